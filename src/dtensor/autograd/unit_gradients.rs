//! Gradients of the leaves of a unit, which are reduced together.
//!
//! A unit is the parameters that FSDP gathers in one call, such as those of a transformer's block. Its complete gradients
//! wait for each other, unreduced, until as many have arrived as in the pass before, or those of another unit begin to
//! arrive. Then their reductions start, in one call if the gradients have equal nodes, and the next unit's derivatives run
//! meanwhile. So a rank holds at most the unreduced gradients of two units. If replicas of the shards are to agree as well, an
//! all-reduce among them follows. Later calls, also the second half of a large all-reduce, start while the next unit's
//! gradients arrive, at equal distances. From the second pass on, gradients are computed side by side, as they are sent.

use std::rc::Rc;

use rustc_hash::FxHashMap;

use super::gradient_places::{GradientPlaces, UnitBuffers};
use super::gradient_sum::cast_local;
use crate::comm::{Lineage, ModulePath, Phase, operator_scope};
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::plan::explain::note_moves;
use crate::dtensor::redistribute::{
    self, Move, ReductionInFlight, buffer_of, reductions_sharing, start_reductions,
};
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::tape::{GradientUnit, TapeNode};
use crate::error::Result;
use crate::placement::Spec;
use crate::tensor::{DType, Tensor};

/// The gradients of the unit that arrives, and the unit whose reductions have started.
#[derive(Default)]
pub(in crate::dtensor) struct UnitGradients {
    unit: Option<GradientUnit>,
    arrived: Vec<(Rc<TapeNode>, DTensor)>,
    /// The bytes of those that have arrived, counted globally.
    arrived_bytes: usize,
    started: Option<StartedUnit>,
    /// The dtype of the uses of a leaf whose unreduced gradients each rank has added in the leaf's wider one, by the leaf's
    /// node.
    narrow: FxHashMap<u64, DType>,
    /// The places in which derivatives compute gradients.
    pub places: GradientPlaces,
}

/// A unit whose gradients are being reduced.
pub(in crate::dtensor) struct StartedUnit {
    leaves: Vec<Rc<TapeNode>>,
    /// The times that later calls of its reductions have been started, and the most that they may be.
    advances: usize,
    advances_len: usize,
    reductions: StartedReductions,
}

/// The form in which a leaf wants its gradient.
#[derive(Clone)]
pub(in crate::dtensor) struct WantedGradient {
    pub meta: Rc<TensorMeta>,
    pub path: ModulePath,
    /// The leaf's unit, and its number there.
    unit: Option<(GradientUnit, usize)>,
}

/// Gradients that are being reduced, in groups that share calls.
struct StartedReductions {
    groups: Vec<StartedGroup>,
    len: usize,
}

struct StartedGroup {
    /// The gradients' numbers, their metadata after the reduction, and their lineages.
    members: Vec<(usize, Rc<TensorMeta>, Lineage)>,
    reduction: ReductionInFlight,
}

impl WantedGradient {
    pub fn of(leaf: &TapeNode) -> WantedGradient {
        let unit = leaf.destination.as_ref().map(|to| (to.unit, to.number));
        WantedGradient { meta: leaf.gradient_meta().clone(), path: leaf.path, unit }
    }

    /// Returns a partial sum in the dtype in which the unit is reduced, if fast mode has one. The sums of exact mode and of
    /// groups have that dtype on their way.
    fn as_sent(&self, mesh: &DeviceMesh, grad: DTensor) -> Result<DTensor> {
        let Some(dtype) = self.unit.and_then(|(unit, _)| unit.reduced_in) else { return Ok(grad) };
        let _scope = self.path.enter_in(Phase::Backward);
        mesh.expect_reduces_in("backward", self.path, dtype)?;
        if mesh.reduction().is_exact() || grad.dtype() == dtype || !grad.layout().has_partial() {
            return Ok(grad);
        }
        let meta = mesh.intern(Spec { dtype, ..grad.spec().clone() })?;
        Ok(DTensor::wrap(mesh, grad.local.cast(dtype)?, meta, grad.lineage))
    }
}

impl UnitGradients {
    /// Returns true if gradients of another unit than `unit` have arrived.
    pub fn is_another(&self, unit: GradientUnit) -> bool {
        self.unit.is_some_and(|arriving| arriving != unit)
    }

    /// Notes that a rank adds an unreduced gradient of a use of a leaf to the `sum` of others, in the leaf's dtype.
    pub fn note_added(&mut self, leaf: &TapeNode, sum: &DTensor, grad: &DTensor) {
        let is_narrow = |x: &DTensor| x.dtype().size_bytes() < leaf.outs[0].dtype().size_bytes();
        if !grad.layout().has_partial() || leaf.destination.is_none() {
            return;
        }
        if is_narrow(grad) && (is_narrow(sum) || self.narrow.contains_key(&leaf.id)) {
            self.narrow.insert(leaf.id, grad.dtype());
        } else {
            self.narrow.remove(&leaf.id);
        }
    }

    /// Returns a leaf's unreduced sum in the dtype of its uses, in which that of an only use is sent, unless the unit says
    /// another one.
    pub fn as_used(&self, mesh: &DeviceMesh, leaf: &TapeNode, sum: DTensor) -> Result<DTensor> {
        let says_one = leaf.destination.as_ref().is_some_and(|to| to.unit.reduced_in.is_some());
        match self.narrow.get(&leaf.id).filter(|_| !says_one) {
            Some(dtype) => cast_local(mesh, &sum, *dtype),
            None => Ok(sum),
        }
    }

    /// Adds the gradient of a leaf of the unit that arrives: a partial sum in the leaf's dtype, or in that of its cast. Returns
    /// true if the unit is not to wait for others. On the way through the unit, later calls of the unit before it start.
    pub fn push(
        &mut self,
        mesh: &DeviceMesh,
        unit: GradientUnit,
        leaf: Rc<TapeNode>,
        grad: DTensor,
    ) -> Result<bool> {
        self.unit = Some(unit);
        let bytes = grad.shape().numel().saturating_mul(grad.dtype().size_bytes());
        self.arrived_bytes = self.arrived_bytes.saturating_add(bytes);
        self.arrived.push((leaf, grad));
        let arrived_len = self.arrived.len();
        if let Some(started) = self.started.as_mut().filter(|started| started.is_next(arrived_len)) {
            started.advances += 1;
            started.reductions.advance(mesh)?;
        }
        let numbers = || self.arrived.iter().filter_map(|(leaf, _)| Some(leaf.destination.as_ref()?.number));
        let is_complete = || mesh.cache::<UnitBuffers>().are_all(mesh, unit, arrived_len, numbers());
        Ok(self.arrived_bytes >= unit.limit_bytes || is_complete())
    }

    /// Starts the reductions of the gradients that have arrived. Those of the unit before are finished.
    pub fn start(&mut self, mesh: &DeviceMesh) -> Result<()> {
        self.arrived_bytes = 0;
        let numbers = self.arrived.iter().filter_map(|(leaf, _)| Some(leaf.destination.as_ref()?.number));
        let numbers: Vec<usize> = numbers.collect();
        if let Some(unit) = self.unit.take() {
            self.places.end(mesh, unit, &numbers);
            mesh.cache::<UnitBuffers>().note_arrived(mesh, unit, numbers);
        }
        if self.arrived.is_empty() {
            return Ok(());
        }
        let (leaves, grads): (Vec<_>, Vec<_>) = self.arrived.drain(..).unzip();
        let wanted: Vec<WantedGradient> = leaves.iter().map(|leaf| WantedGradient::of(leaf)).collect();
        let wanted: Vec<&WantedGradient> = wanted.iter().collect();
        let reductions = StartedReductions::of(mesh, grads, &wanted)?;
        let advances_len =
            reductions.groups.iter().map(|group| group.reduction.calls_left()).max().unwrap_or(0);
        self.started = Some(StartedUnit { leaves, advances: 0, advances_len, reductions });
        Ok(())
    }

    /// Removes the unit that was started last.
    pub fn take_started(&mut self) -> Option<StartedUnit> {
        self.started.take()
    }
}

impl StartedUnit {
    /// Returns true if the next calls are to start when so many gradients of the next unit have arrived: calls start at equal
    /// distances, as if that unit had as many gradients.
    fn is_next(&self, arrived_len: usize) -> bool {
        let StartedUnit { ref leaves, advances, advances_len, .. } = *self;
        advances < advances_len && arrived_len * (advances_len + 1) >= leaves.len() * (advances + 1)
    }

    /// Waits for the reductions. Returns the gradients in the layouts that their leaves want.
    pub fn finish(self, mesh: &DeviceMesh) -> Result<Vec<(Rc<TapeNode>, DTensor)>> {
        Ok(self.leaves.into_iter().zip(self.reductions.finish(mesh)?).collect())
    }
}

/// Returns gradients as their leaves want them. The partial sums among them are reduced unit by unit.
pub(in crate::dtensor) fn reduce_by_unit(
    mesh: &DeviceMesh,
    grads: Vec<(DTensor, WantedGradient)>,
) -> Result<Vec<DTensor>> {
    let (mut grads, wanted): (Vec<DTensor>, Vec<WantedGradient>) = grads.into_iter().unzip();
    let (mut units, mut known): (Vec<Vec<usize>>, FxHashMap<u64, usize>) = Default::default();
    for (i, _) in grads.iter().enumerate().filter(|(_, grad)| grad.layout().has_partial()) {
        let next = units.len();
        let at = wanted[i].unit.map_or(next, |(unit, _)| *known.entry(unit.number()).or_insert(next));
        match units.get_mut(at) {
            Some(members) => members.push(i),
            None => units.push(vec![i]),
        }
    }
    for members in units {
        let empty = |i: &usize| DTensor { local: std::mem::take(&mut grads[*i].local), ..grads[*i].clone() };
        let partial: Vec<DTensor> = members.iter().map(empty).collect();
        let own: Vec<&WantedGradient> = members.iter().map(|&i| &wanted[i]).collect();
        let reduced = StartedReductions::of(mesh, partial, &own)?.finish(mesh)?;
        members.into_iter().zip(reduced).for_each(|(i, grad)| grads[i] = grad);
    }
    let finished = grads.into_iter().zip(&wanted).map(|(grad, WantedGradient { meta, path, .. })| {
        let _scope = path.enter_in(Phase::Backward);
        let grad =
            if grad.layout() == meta.layout() { grad } else { grad.redistribute(meta.layout().clone())? };
        cast_local(mesh, &grad, meta.dtype())
    });
    finished.collect()
}

impl StartedReductions {
    /// Starts the reductions of partial sums to the layouts that are wanted, in the dtypes that units are reduced in.
    fn of(mesh: &DeviceMesh, grads: Vec<DTensor>, wanted: &[&WantedGradient]) -> Result<StartedReductions> {
        let _label = operator_scope("backward");
        let computed_in: Vec<DType> = grads.iter().map(DTensor::dtype).collect();
        let sent = grads.into_iter().zip(wanted).map(|(grad, wanted)| wanted.as_sent(mesh, grad));
        let grads = sent.collect::<Result<Vec<DTensor>>>()?;
        let is_computed_so: Vec<bool> =
            grads.iter().zip(computed_in).map(|(x, dtype)| x.dtype() == dtype).collect();
        let planned = |(grad, wanted): (&DTensor, &&WantedGradient)| {
            let to = mesh.intern(grad.meta.spec().with_layout(wanted.meta.layout().clone())?)?;
            Ok((redistribute::find_in_unit(mesh, &grad.meta, &to)?, to))
        };
        let moves: Vec<(Rc<Move>, Rc<TensorMeta>)> =
            grads.iter().zip(wanted).map(planned).collect::<Result<_>>()?;
        let plans: Vec<&Rc<Move>> = moves.iter().map(|(plan, _)| plan).collect();
        let len = grads.len();
        let mut grads: Vec<Option<DTensor>> = grads.into_iter().map(Some).collect();
        let mut groups = Vec::new();
        for group in reductions_sharing(&plans) {
            let common = group.iter().map(|&i| wanted[i].path).reduce(ModulePath::common);
            let _scope = common.map(|path| path.enter_in(Phase::Backward));
            let own: Vec<DTensor> = group.iter().filter_map(|&i| grads[i].take()).collect();
            let noted: Vec<(&Move, &TensorMeta, &TensorMeta)> =
                group.iter().zip(&own).map(|(&i, grad)| (&*moves[i].0, &*grad.meta, &*moves[i].1)).collect();
            note_moves(mesh, &noted);
            let lineages: Vec<Lineage> = own.iter().map(|grad| grad.lineage).collect();
            let _lineage = Lineage::of_all(lineages.iter().copied()).enter();
            let locals: Vec<Tensor> = own.into_iter().map(|grad| grad.local).collect();
            let plans: Vec<Rc<Move>> = group.iter().map(|&i| moves[i].0.clone()).collect();
            let leaves: Option<Vec<_>> = group.iter().map(|&i| wanted[i].unit).collect();
            // A derivative finds no place in the dtype in which a gradient is sent after a cast.
            let leaves = leaves.filter(|_| group.iter().all(|&i| is_computed_so[i]));
            if let (Some(leaves), Some(buffer)) = (leaves, buffer_of(&plans)) {
                let numbers: Vec<usize> = leaves.iter().map(|(_, number)| *number).collect();
                mesh.cache::<UnitBuffers>().keep(leaves[0].0, &buffer, &numbers, &locals);
            }
            let reduction = start_reductions(mesh, plans, locals)?;
            let members =
                group.into_iter().zip(lineages).map(|(i, lineage)| (i, moves[i].1.clone(), lineage));
            let members = members.collect();
            groups.push(StartedGroup { members, reduction });
        }
        Ok(StartedReductions { groups, len })
    }

    /// Starts the second calls of the reductions that have some, after waiting for the first.
    fn advance(&mut self, mesh: &DeviceMesh) -> Result<()> {
        self.groups.iter_mut().try_for_each(|group| group.reduction.advance(mesh))
    }

    /// Waits for the reductions, and returns the gradients in their order.
    fn finish(self, mesh: &DeviceMesh) -> Result<Vec<DTensor>> {
        let mut all: Vec<Option<DTensor>> = (0..self.len).map(|_| None).collect();
        for StartedGroup { members, reduction } in self.groups {
            for ((i, meta, lineage), local) in members.into_iter().zip(reduction.finish(mesh)?) {
                all[i] = Some(DTensor::wrap(mesh, local, meta, lineage));
            }
        }
        Ok(all.into_iter().flatten().collect())
    }
}
