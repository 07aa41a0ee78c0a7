//! Gradients of the leaves of a unit, which are reduced together.
//!
//! A unit is what FSDP gathers in one call, such as the parameters of a transformer's block. Its complete gradients wait
//! for each other, unreduced, until those of another unit begin to arrive. Then their reductions start, in one call if the
//! gradients' trees are equal, and the next unit's derivatives run meanwhile.

use std::rc::Rc;

use super::device_mesh::DeviceMesh;
use super::explain::note_moves;
use super::redistribute::{self, Move, ReductionInFlight, reductions_sharing, start_reductions};
use super::tensor::{DTensor, GradientUnit, TapeNode};
use super::tensor_meta::TensorMeta;
use crate::comm::{Phase, operator_scope};
use crate::error::Result;
use crate::tensor::Tensor;

/// The gradients of the unit that arrives, and the unit whose reductions have started.
#[derive(Default)]
pub(super) struct UnitGradients {
    unit: Option<GradientUnit>,
    arrived: Vec<(Rc<TapeNode>, DTensor)>,
    started: Option<StartedUnit>,
}

/// A unit whose gradients are being reduced.
pub(super) struct StartedUnit {
    groups: Vec<StartedGroup>,
}

/// The gradients that share a call.
struct StartedGroup {
    members: Vec<(Rc<TapeNode>, Rc<TensorMeta>)>,
    reduction: ReductionInFlight,
}

impl UnitGradients {
    /// Returns true if gradients of another unit than `unit` have arrived.
    pub fn is_another(&self, unit: GradientUnit) -> bool {
        self.unit.is_some_and(|arriving| arriving != unit)
    }

    /// Adds the gradient of a leaf of the unit that arrives: a partial sum in the leaf's dtype, or in that of its cast.
    pub fn push(&mut self, unit: GradientUnit, leaf: Rc<TapeNode>, grad: DTensor) {
        self.unit = Some(unit);
        self.arrived.push((leaf, grad));
    }

    /// Starts the reductions of the gradients that have arrived, and returns the unit that was started before.
    pub fn start(&mut self, mesh: &DeviceMesh) -> Result<Option<StartedUnit>> {
        self.unit = None;
        if self.arrived.is_empty() {
            return Ok(None);
        }
        let _label = operator_scope("backward");
        let mut moves = Vec::with_capacity(self.arrived.len());
        for (leaf, grad) in &self.arrived {
            let layout = leaf.gradient_meta().layout().clone();
            let to = mesh.intern(grad.meta.spec().with_layout(layout)?)?;
            moves.push((redistribute::find(mesh, &grad.meta, &to)?, to));
        }
        let mut arrived: Vec<Option<(Rc<TapeNode>, DTensor)>> = self.arrived.drain(..).map(Some).collect();
        let plans: Vec<&Rc<Move>> = moves.iter().map(|(plan, _)| plan).collect();
        let mut groups = Vec::new();
        for group in reductions_sharing(&plans) {
            let (mut members, mut locals): (Vec<_>, Vec<Tensor>) = Default::default();
            let mut froms = Vec::new();
            for &i in &group {
                let (leaf, grad) = arrived[i].take().expect("each gradient is in one group");
                members.push((leaf, moves[i].1.clone()));
                froms.push(grad.meta);
                locals.push(grad.local);
            }
            let path = members.iter().skip(1).fold(members[0].0.path, |all, (leaf, _)| all.common(leaf.path));
            let _scope = path.enter_in(Phase::Backward);
            let noted: Vec<(&Move, &TensorMeta, &TensorMeta)> =
                group.iter().zip(&froms).map(|(&i, from)| (&*moves[i].0, &**from, &*moves[i].1)).collect();
            note_moves(mesh, &noted);
            let plans: Vec<Rc<Move>> = group.iter().map(|&i| moves[i].0.clone()).collect();
            groups.push(StartedGroup { members, reduction: start_reductions(mesh, plans, locals)? });
        }
        Ok(self.started.replace(StartedUnit { groups }))
    }

    /// Removes the unit that was started last.
    pub fn take_started(&mut self) -> Option<StartedUnit> {
        self.started.take()
    }
}

impl StartedUnit {
    /// Waits for the reductions. Returns the gradients in the layouts that their leaves want.
    pub fn finish(self, mesh: &DeviceMesh) -> Result<Vec<(Rc<TapeNode>, DTensor)>> {
        let mut all = Vec::new();
        for StartedGroup { members, reduction } in self.groups {
            let reduced = reduction.finish(mesh)?;
            let wrap = |((leaf, meta), local)| (leaf, DTensor::wrap(mesh, local, meta));
            all.extend(members.into_iter().zip(reduced).map(wrap));
        }
        Ok(all)
    }
}
