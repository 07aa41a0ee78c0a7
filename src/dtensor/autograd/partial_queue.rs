//! Partial sums of gradients that wait for each other, and are reduced in shared calls.
//!
//! There is one queue per purpose, and its owner says when it is reduced: for the uses of one leaf, when all have arrived or a
//! few wait; for the leaves of a unit, when the unit is complete or another one's gradients arrive; for gradients and parts that
//! earlier passes have left, at the end of the pass.

use std::mem::take;
use std::rc::Rc;

use super::gradient_places::UnitBuffers;
use super::gradient_sum::cast_local;
use crate::comm::{Lineage, ModulePath, Phase, operator_scope};
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::plan::explain::note_moves;
use crate::dtensor::redistribute::{self, Move, ReductionGroup, ReductionInFlight, reductions_sharing};
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::tape::TapeNode;
use crate::error::Result;
use crate::tensor::Tensor;

/// Gradients of leaves in the order of their arrival. Those that are partial sums wait to be reduced to their leaves' layouts.
#[derive(Default)]
pub(in crate::dtensor) struct PartialQueue {
    arrived: Vec<(Rc<TapeNode>, DTensor)>,
    /// The bytes of the gradients, counted globally.
    global_bytes: usize,
}

/// Gradients whose partial sums are being reduced, in calls that several share.
pub(in crate::dtensor) struct StartedReductions {
    /// The gradients, without those elements that are on their way.
    grads: Vec<(Rc<TapeNode>, DTensor)>,
    calls: Vec<ReductionCall>,
}

/// A call that reduces one or several partial sums.
struct ReductionCall {
    /// The gradients' indices, and their metadata after the reduction.
    members: Vec<(usize, Rc<TensorMeta>)>,
    reduction: ReductionInFlight,
}

/// A partial sum with its way to the leaf's layout.
struct PlannedSum {
    /// The index of the gradient.
    index: usize,
    by: Rc<Move>,
    to: Rc<TensorMeta>,
    /// True if it is sent in the dtype in which it was computed.
    is_computed_so: bool,
}

impl PartialQueue {
    /// Adds a gradient of `leaf`, or of a cast of it.
    pub fn push(&mut self, leaf: Rc<TapeNode>, grad: DTensor) {
        let bytes = grad.shape().numel().saturating_mul(grad.dtype().size_bytes());
        self.global_bytes = self.global_bytes.saturating_add(bytes);
        self.arrived.push((leaf, grad));
    }

    pub fn len(&self) -> usize {
        self.arrived.len()
    }

    pub fn global_bytes(&self) -> usize {
        self.global_bytes
    }

    /// Returns the numbers of the leaves in their unit.
    pub fn leaf_numbers(&self) -> impl Iterator<Item = usize> {
        self.arrived.iter().filter_map(|(leaf, _)| Some(leaf.destination.as_ref()?.number))
    }

    /// Removes and returns the gradients as they have arrived.
    pub fn take(&mut self) -> Vec<(Rc<TapeNode>, DTensor)> {
        take(self).arrived
    }

    /// Reduces the partial sums to the layouts of their leaves, and returns all gradients in the order of their arrival.
    pub fn reduce(&mut self, mesh: &DeviceMesh) -> Result<Vec<(Rc<TapeNode>, DTensor)>> {
        self.start(mesh)?.finish(mesh)
    }

    /// Starts the reductions of the partial sums, in the dtypes in which their units are reduced.
    pub fn start(&mut self, mesh: &DeviceMesh) -> Result<StartedReductions> {
        let _label = operator_scope("backward");
        let mut grads = self.take();
        let is_partial = |(_, (_, grad)): &(usize, &mut (_, DTensor))| grad.layout().has_partial();
        let mut sums = Vec::new();
        for (index, (leaf, grad)) in grads.iter_mut().enumerate().filter(is_partial) {
            let computed_in = grad.dtype();
            as_sent(mesh, leaf, grad)?;
            let to = mesh.intern(grad.meta.spec().with_layout(leaf.gradient_meta().layout().clone())?)?;
            let find =
                if leaf.destination.is_some() { redistribute::find_in_unit } else { redistribute::find };
            let by = find(mesh, &grad.meta, &to)?;
            sums.push(PlannedSum { index, by, to, is_computed_so: grad.dtype() == computed_in });
        }
        let moves: Vec<&Rc<Move>> = sums.iter().map(|sum| &sum.by).collect();
        let start = |group: ReductionGroup| ReductionCall::start(mesh, &group, &sums, &mut grads);
        let calls = reductions_sharing(&moves).into_iter().map(start).collect::<Result<_>>()?;
        Ok(StartedReductions { grads, calls })
    }
}

impl ReductionCall {
    fn start(
        mesh: &DeviceMesh,
        group: &ReductionGroup,
        sums: &[PlannedSum],
        grads: &mut [(Rc<TapeNode>, DTensor)],
    ) -> Result<ReductionCall> {
        let sums: Vec<&PlannedSum> = group.members.iter().map(|&i| &sums[i]).collect();
        let common = sums.iter().map(|sum| grads[sum.index].0.path).reduce(ModulePath::common);
        let _scope = common.map(|path| path.enter_in(Phase::Backward));
        let noted = sums.iter().map(|sum| (&*sum.by, &*grads[sum.index].1.meta, &*sum.to));
        note_moves(mesh, &noted.collect::<Vec<_>>());
        let _lineage = Lineage::of_all(sums.iter().map(|sum| grads[sum.index].1.lineage)).enter();
        let locals: Vec<Tensor> = sums.iter().map(|sum| take(&mut grads[sum.index].1.local)).collect();
        let moves: Vec<Rc<Move>> = sums.iter().map(|sum| sum.by.clone()).collect();
        let unit = grads[sums[0].index].0.destination.as_ref().map(|to| to.unit);
        let number = |sum: &&PlannedSum| grads[sum.index].0.destination.as_ref().map(|to| to.number);
        // A derivative finds no place in the dtype in which a gradient is sent after a cast.
        if sums.iter().all(|sum| sum.is_computed_so)
            && let (Some(unit), Some(numbers)) = (unit, sums.iter().map(number).collect::<Option<Vec<_>>>())
            && let Some(buffer) = group.buffer(&moves)
        {
            mesh.cache::<UnitBuffers>().keep(unit, &buffer, &numbers, &locals);
        }
        let reduction = group.start(mesh, moves, locals)?;
        let members = sums.iter().map(|sum| (sum.index, sum.to.clone())).collect();
        Ok(ReductionCall { members, reduction })
    }
}

impl StartedReductions {
    /// Returns the number of gradients.
    pub fn len(&self) -> usize {
        self.grads.len()
    }

    /// Returns the most calls that may follow those in flight. All ranks answer alike.
    pub fn calls_left(&self) -> usize {
        self.calls.iter().map(|call| call.reduction.calls_left()).max().unwrap_or(0)
    }

    /// Starts the second calls of the reductions that have some, after waiting for the first.
    pub fn advance(&mut self, mesh: &DeviceMesh) -> Result<()> {
        self.calls.iter_mut().try_for_each(|call| call.reduction.advance(mesh))
    }

    /// Waits for the reductions, and returns the gradients in the order of their arrival.
    pub fn finish(mut self, mesh: &DeviceMesh) -> Result<Vec<(Rc<TapeNode>, DTensor)>> {
        for ReductionCall { members, reduction } in self.calls {
            for ((index, meta), local) in members.into_iter().zip(reduction.finish(mesh)?) {
                let grad = &mut self.grads[index].1;
                let history = grad.history.take();
                *grad = DTensor { history, ..DTensor::wrap(mesh, local, meta, grad.lineage) };
            }
        }
        Ok(self.grads)
    }
}

/// Casts a partial sum to the dtype in which the leaf's unit is reduced, if fast mode has one. The sums of exact mode and of
/// groups have that dtype on their way.
fn as_sent(mesh: &DeviceMesh, leaf: &TapeNode, grad: &mut DTensor) -> Result<()> {
    let Some(dtype) = leaf.destination.as_ref().and_then(|to| to.unit.reduced_in) else { return Ok(()) };
    let _scope = leaf.path.enter_in(Phase::Backward);
    mesh.expect_reduces_in("backward", leaf.path, dtype)?;
    if mesh.reduction().is_exact() || grad.dtype() == dtype {
        return Ok(());
    }
    *grad = cast_local(mesh, grad, dtype)?;
    Ok(())
}

/// Returns gradients as their leaves want them. The partial sums among them are reduced unit by unit.
pub(in crate::dtensor) fn reduce_by_unit(
    mesh: &DeviceMesh,
    grads: Vec<(Rc<TapeNode>, DTensor)>,
) -> Result<Vec<DTensor>> {
    let mut reduced: Vec<Option<DTensor>> = Vec::new();
    let mut units: Vec<(Option<u64>, PartialQueue, Vec<usize>)> = Vec::new();
    for (i, (leaf, grad)) in grads.into_iter().enumerate() {
        let unit = leaf.destination.as_ref().map(|to| to.unit.number());
        let index = units.iter().position(|(other, ..)| unit.is_some() && *other == unit);
        let index = index.unwrap_or_else(|| {
            units.push((unit, PartialQueue::default(), Vec::new()));
            units.len() - 1
        });
        units[index].1.push(leaf, grad);
        units[index].2.push(i);
        reduced.push(None);
    }
    for (_, mut queue, members) in units {
        for (i, (leaf, grad)) in members.into_iter().zip(queue.reduce(mesh)?) {
            let meta = leaf.gradient_meta();
            let _scope = leaf.path.enter_in(Phase::Backward);
            let grad =
                if grad.layout() == meta.layout() { grad } else { grad.redistribute(meta.layout().clone())? };
            reduced[i] = Some(cast_local(mesh, &grad, meta.dtype())?);
        }
    }
    Ok(reduced.into_iter().flatten().collect())
}
