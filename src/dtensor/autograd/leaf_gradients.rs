//! Gradients that arrive at leaves: partial sums wait for those with which they are reduced, and all are stored.
//!
//! *Uses of one leaf.* Exact mode cannot add partial sums of different trees by bits, so it reduces each use's gradient and
//! adds them afterwards. The gradients of a leaf's uses, such as the two of a tied table, wait for each other and share a call.
//!
//! *Leaves of one unit.* A unit is the parameters that FSDP gathers in one call, such as those of a transformer's block. Its
//! complete gradients wait for each other, unreduced, until as many have arrived as in the pass before, or those of another
//! unit begin to arrive. Then their reductions start, in one call if the gradients have equal nodes, and the next unit's
//! derivatives run meanwhile. So a rank holds at most the unreduced gradients of two units. If replicas of the shards are to
//! agree as well, an all-reduce among them follows. Later calls, also the second half of a large all-reduce, start while the
//! next unit's gradients arrive, at equal distances. From the second pass on, gradients are computed side by side, as they are
//! sent ([`GradientPlaces`]).

use std::rc::Rc;

use rustc_hash::FxHashMap;

use super::gradient_places::{GradientPlaces, UnitBuffers};
use super::gradient_sum::{add, add_in, cast_local, in_dtype};
use super::gradients::Gradients;
use super::leaf_path::LeafPath;
use super::partial_queue::{PartialQueue, StartedReductions};
use crate::comm::{Phase, operator_scope};
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::tape::{GradientUnit, TapeNode};
use crate::error::Result;
use crate::tensor::DType;

/// The most gradients of uses of one leaf that wait for each other. A weight that is used more often, as at each step of a
/// recurrence, would otherwise hold as many whole gradients.
const MOST_USES: usize = 4;

/// The gradients that a pass has brought to leaves.
#[derive(Default)]
pub(in crate::dtensor) struct LeafGradients {
    pub gradients: Gradients,
    /// The gradients of uses that wait, by the node of the leaf or of its cast.
    uses: FxHashMap<u64, PartialQueue>,
    /// The unit whose gradients arrive, and those that have.
    unit: Option<GradientUnit>,
    arrived: PartialQueue,
    started: Option<StartedUnit>,
    /// The dtype of the uses of a leaf whose unreduced gradients each rank has added in the leaf's wider one, by the leaf's
    /// node.
    narrow: FxHashMap<u64, DType>,
    /// The places in which derivatives compute gradients.
    pub places: GradientPlaces,
}

/// A unit whose gradients are being reduced.
struct StartedUnit {
    reductions: StartedReductions,
    /// The times that later calls of its reductions have been started, and the most that they may be.
    advances: usize,
    advances_len: usize,
}

impl LeafGradients {
    /// Takes the gradient of a use of a leaf, the value of `node`, if it is to wait in exact mode: a partial sum, or one that is
    /// to be added after a partial sum. Adds all to `sum` if no further one may wait.
    pub fn takes_use(
        &mut self,
        mesh: &DeviceMesh,
        node: &TapeNode,
        path: &LeafPath<'_>,
        (grad, sum): (&mut Option<DTensor>, &mut Option<DTensor>),
    ) -> Result<bool> {
        let waits = |grad: &mut DTensor| grad.layout().has_partial() || self.uses.contains_key(&node.id);
        if !(path.is_leaf() || path.is_cast()) {
            return Ok(false);
        }
        let Some(grad) = grad.take_if(waits) else { return Ok(false) };
        let uses = self.uses.entry(node.id).or_default();
        uses.push(path.leaf().clone(), grad);
        if uses.len() == MOST_USES {
            let _scope = node.path.enter_in(Phase::Backward);
            self.add_uses(mesh, node, sum, false)?;
        }
        Ok(true)
    }

    /// Reduces the gradients that wait at a node, and adds them to `sum` in the order of their arrival. The only one of a leaf of
    /// a unit is left as it is, if the pass stores it: it is reduced with the unit's.
    pub fn add_uses(
        &mut self,
        mesh: &DeviceMesh,
        node: &TapeNode,
        sum: &mut Option<DTensor>,
        stores: bool,
    ) -> Result<()> {
        let Some(mut uses) = self.uses.remove(&node.id) else { return Ok(()) };
        // The only use of a cast is left to the cast's derivative.
        let is_left = node.call.is_some() || (stores && node.destination.is_some());
        let alone = is_left && sum.is_none() && uses.len() == 1;
        let grads = if alone { uses.take() } else { uses.reduce(mesh)? };
        for (_, grad) in grads {
            *sum = Some(add_in(node.outs[0].dtype(), sum.take(), grad)?);
        }
        Ok(())
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
    fn as_used(&self, mesh: &DeviceMesh, leaf: &TapeNode, sum: DTensor) -> Result<DTensor> {
        let says_one = leaf.destination.as_ref().is_some_and(|to| to.unit.reduced_in.is_some());
        match self.narrow.get(&leaf.id).filter(|_| !says_one) {
            Some(dtype) => cast_local(mesh, &sum, *dtype),
            None => Ok(sum),
        }
    }

    /// Takes a complete gradient, that of a leaf of a unit or of its only cast, if it is to be reduced with those of the unit.
    /// When another unit's gradients begin to arrive, the reductions of this one start; they are waited for when those of the
    /// next one are to start.
    pub fn takes_of_unit(
        &mut self,
        mesh: &DeviceMesh,
        path: &LeafPath<'_>,
        grad: &mut Option<DTensor>,
    ) -> Result<bool> {
        let leaf = path.leaf();
        let Some(unit) = leaf.destination.as_ref().map(|destination| destination.unit) else {
            return Ok(false);
        };
        let Some(partial) = grad.take_if(|grad| grad.layout().has_partial()) else { return Ok(false) };
        let has_part = self.gradients.has_part_of(leaf);
        if mesh.keeps_parts() || has_part && !path.is_leaf() {
            *grad = Some(partial);
            return Ok(false);
        }
        let partial = match self.gradients.remove(leaf) {
            Some(part) if has_part => add(part, in_dtype(partial, leaf.outs[0].dtype())?)?,
            earlier => {
                earlier.into_iter().for_each(|earlier| self.gradients.store(leaf, earlier));
                self.as_used(mesh, leaf, partial)?
            }
        };
        if self.unit.is_some_and(|arriving| arriving != unit) {
            self.start_unit(mesh)?;
        }
        if self.push(mesh, unit, leaf.clone(), partial)? {
            self.start_unit(mesh)?;
        }
        Ok(true)
    }

    /// Adds the gradient of a leaf of the unit that arrives: a partial sum in the leaf's dtype, or in that of its cast. Returns
    /// true if the unit is not to wait for others. On the way through the unit, later calls of the unit before it start.
    fn push(
        &mut self,
        mesh: &DeviceMesh,
        unit: GradientUnit,
        leaf: Rc<TapeNode>,
        grad: DTensor,
    ) -> Result<bool> {
        self.unit = Some(unit);
        self.arrived.push(leaf, grad);
        let arrived_len = self.arrived.len();
        if let Some(started) = self.started.as_mut().filter(|started| started.is_next(arrived_len)) {
            started.advances += 1;
            started.reductions.advance(mesh)?;
        }
        let is_complete =
            || mesh.cache::<UnitBuffers>().are_all(mesh, unit, arrived_len, self.arrived.leaf_numbers());
        Ok(self.arrived.global_bytes() >= unit.limit_bytes || is_complete())
    }

    /// Waits for the unit that is being reduced, so that a rank holds no third one, and starts the reductions of the unit that
    /// has arrived.
    pub fn start_unit(&mut self, mesh: &DeviceMesh) -> Result<()> {
        self.store_started(mesh)?;
        if let Some(unit) = self.unit.take() {
            let numbers: Vec<usize> = self.arrived.leaf_numbers().collect();
            self.places.end(mesh, unit, &numbers);
            mesh.cache::<UnitBuffers>().note_arrived(mesh, unit, numbers);
            let reductions = self.arrived.start(mesh)?;
            let advances_len = reductions.calls_left();
            self.started = Some(StartedUnit { reductions, advances: 0, advances_len });
        }
        Ok(())
    }

    /// Waits for the gradients of the unit that is being reduced, and stores them.
    pub fn store_started(&mut self, mesh: &DeviceMesh) -> Result<()> {
        let Some(unit) = self.started.take() else { return Ok(()) };
        for (leaf, grad) in unit.reductions.finish(mesh)? {
            let _scope = leaf.path.enter_in(Phase::Backward);
            let grad = cast_local(mesh, &grad, leaf.outs[0].dtype())?;
            self.store(mesh, &leaf, grad)?;
        }
        Ok(())
    }

    /// Redistributes a leaf's complete gradient to the leaf's layout, adds it to that of earlier passes and stores it.
    pub fn store(&mut self, mesh: &DeviceMesh, leaf: &Rc<TapeNode>, mut grad: DTensor) -> Result<()> {
        let _label = operator_scope("backward");
        let at_leaf = leaf.gradient_meta();
        let mut earlier = self.gradients.remove(leaf);
        if let Some(part) = earlier.take_if(|earlier| earlier.layout().has_partial()) {
            grad = add(part, in_dtype(grad, at_leaf.dtype())?)?;
        }
        let stays = mesh.keeps_parts() && grad.layout().has_partial();
        if !stays && grad.layout() != at_leaf.layout() {
            grad = grad.redistribute(at_leaf.layout().clone())?;
        }
        grad = in_dtype(grad, at_leaf.dtype())?;
        debug_assert!(stays || grad.meta == *at_leaf, "a gradient has its leaf's dtype and shape");
        if let Some(earlier) = earlier {
            grad = add(earlier, grad)?;
        }
        // A gradient may be a broadcast view; the stored one is contiguous.
        if !grad.local.is_contiguous() {
            grad.local = grad.local.contiguous()?;
        }
        self.gradients.store(leaf, grad);
        Ok(())
    }
}

impl StartedUnit {
    /// Returns true if the next calls are to start when so many gradients of the next unit have arrived: calls start at equal
    /// distances, as if that unit had as many gradients.
    fn is_next(&self, arrived_len: usize) -> bool {
        let StartedUnit { ref reductions, advances, advances_len } = *self;
        advances < advances_len && arrived_len * (advances_len + 1) >= reductions.len() * (advances + 1)
    }
}
