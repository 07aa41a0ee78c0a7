//! Gradients of one leaf tensor that are reduced together.
//!
//! Exact mode cannot add partial sums of different trees by bits, so it reduces each contribution to a leaf tensor's
//! gradient and adds them afterwards. The contributions, such as the two of a tied table, wait for each other and share
//! a call.

use rustc_hash::FxHashMap;

use super::gradient_sum::add_in;
use crate::comm::{Lineage, operator_scope};
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::plan::explain::note_move;
use crate::dtensor::redistribute::{self, run_together};
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::tape::{CallDerivative, TapeNode};
use crate::error::Result;
use crate::ops::Cast;
use crate::placement::Layout;

/// The most contributions that wait for each other. A weight that is used more often, as at each step of a recurrence,
/// would otherwise hold as many whole gradients.
const MOST_WAITING: usize = 4;

/// The contributions to gradients that have arrived and are not reduced yet, by node of the leaf tensor or of its cast.
#[derive(Default)]
pub(in crate::dtensor) struct WaitingGradients {
    by_node: FxHashMap<u64, Vec<DTensor>>,
}

impl WaitingGradients {
    /// Returns true for a contribution that waits: a partial sum, or one that is to be added after a partial sum.
    pub fn takes(&self, node: &TapeNode, grad: &DTensor) -> bool {
        let after_or_partial = grad.layout().has_partial() || self.by_node.contains_key(&node.id);
        after_or_partial && leaf_layout(node).is_some()
    }

    /// Adds a contribution to those that wait at a node. Returns true if no further one may wait.
    pub fn push(&mut self, node: &TapeNode, grad: DTensor) -> bool {
        let waiting = self.by_node.entry(node.id).or_default();
        waiting.push(grad);
        waiting.len() == MOST_WAITING
    }

    /// Reduces the contributions that wait at a node, and adds them to `sum` in the order of their arrival. The only
    /// contribution to a leaf of a unit is left as it is, if the pass stores it: it is reduced with the unit's.
    pub fn add_to(
        &mut self,
        mesh: &DeviceMesh,
        node: &TapeNode,
        sum: &mut Option<DTensor>,
        stores: bool,
    ) -> Result<()> {
        let Some(mut waiting) = self.by_node.remove(&node.id) else { return Ok(()) };
        // The only contribution to a cast is left to the cast's derivative.
        let is_left = node.call.is_some() || (stores && node.destination.is_some());
        if !is_left || sum.is_some() || waiting.len() > 1 {
            reduce_together(mesh, &mut waiting, leaf_layout(node).expect("only at these nodes they wait"))?;
        }
        for grad in waiting {
            *sum = Some(add_in(node.outs[0].dtype(), sum.take(), grad)?);
        }
        Ok(())
    }
}

/// Returns the layout of a leaf tensor, given its node or that of its cast to another dtype.
fn leaf_layout(node: &TapeNode) -> Option<&Layout> {
    let Some(call) = &node.call else { return Some(node.gradient_meta().layout()) };
    let ([Some(leaf)], CallDerivative::Program { program, .. }) = (&call.inputs[..], &call.derivative) else {
        return None;
    };
    let casts = matches!(&program.steps[..], [step] if step.op.as_any().is::<Cast>());
    (casts && leaf.node.call.is_none()).then(|| leaf.node.gradient_meta().layout())
}

/// Redistributes the partial sums among `grads` to `layout`; those that are reduced over the same ranks share calls.
pub(in crate::dtensor) fn reduce_together(
    mesh: &DeviceMesh,
    grads: &mut [DTensor],
    layout: &Layout,
) -> Result<()> {
    let _label = operator_scope("backward");
    let mut partial: Vec<&mut DTensor> = grads.iter_mut().filter(|g| g.layout().has_partial()).collect();
    let (mut moves, mut metas, mut locals) = (Vec::new(), Vec::new(), Vec::new());
    for grad in &mut partial {
        let meta = mesh.intern(grad.meta.spec().with_layout(layout.clone())?)?;
        let step = redistribute::find(mesh, &grad.meta, &meta)?;
        note_move(mesh, &step, &grad.meta, &meta);
        moves.push(step);
        metas.push(meta);
        locals.push(std::mem::take(&mut grad.local));
    }
    let _lineage = Lineage::of_all(partial.iter().map(|grad| grad.lineage)).enter();
    let moved = run_together(mesh, &moves, locals)?;
    for (grad, (local, meta)) in partial.into_iter().zip(moved.into_iter().zip(metas)) {
        *grad = DTensor { history: grad.history.clone(), ..DTensor::wrap(mesh, local, meta, grad.lineage) };
    }
    Ok(())
}
