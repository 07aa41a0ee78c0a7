//! The way from a value back to a leaf: through casts, and through calls that only move elements.
//!
//! A pass finds it once, when it visits the call that reads the value. It decides if a gradient waits for others with which it
//! is reduced, if it is computed in its place, and if parts of a sum stay parts until they reach the leaf.

use std::rc::Rc;

use smallvec::SmallVec;

use super::gradient_sum::cast_local;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::plan::call_plan::CallPlan;
use crate::dtensor::plan::derivative_program::DerivativeProgram;
use crate::dtensor::tensor::dtensor::DTensor;
use crate::dtensor::tensor::tape::{CallDerivative, TapeCall, TapeNode};
use crate::error::Result;
use crate::ops::{Cast, MeshAxis, Op, Reshape, Row, VjpProgram};
use crate::placement::{Layout, Placement};

/// A leaf, and the calls between it and a value that is computed from it alone.
pub(in crate::dtensor) struct LeafPath<'a> {
    leaf: &'a Rc<TapeNode>,
    /// The calls, the last one first.
    calls: SmallVec<[PathCall<'a>; 1]>,
}

/// A call with one operand, whose derivative is one step.
struct PathCall<'a> {
    node: &'a TapeNode,
    /// The operator of the derivative.
    op: &'a dyn Op,
    kind: PathCallKind,
}

#[derive(Clone, Copy, PartialEq)]
enum PathCallKind {
    Cast,
    Reshape,
    /// Another operator that only moves elements: it passes partial sums on by bits.
    Move,
}

/// The paths of a call's operands.
pub(in crate::dtensor) type OperandPaths<'a> = SmallVec<[Option<LeafPath<'a>>; 3]>;

impl<'a> LeafPath<'a> {
    /// Returns the path from the results of a node, or `None` if other calls are on the way.
    pub fn of(mut node: &'a Rc<TapeNode>) -> Option<LeafPath<'a>> {
        let mut calls = SmallVec::new();
        while let Some(call) = &node.call {
            let (path_call, operand) = PathCall::of(node, call)?;
            calls.push(path_call);
            node = operand;
        }
        Some(LeafPath { leaf: node, calls })
    }

    /// Returns the paths of a call's operands, `None` for those that have no history.
    pub fn of_operands(call: &'a TapeCall) -> OperandPaths<'a> {
        let mut paths = OperandPaths::new();
        for output in &call.inputs {
            paths.push(output.as_ref().and_then(|output| LeafPath::of(&output.node)));
        }
        paths
    }

    pub fn leaf(&self) -> &'a Rc<TapeNode> {
        self.leaf
    }

    /// Returns true if the value is the leaf.
    pub fn is_leaf(&self) -> bool {
        self.calls.is_empty()
    }

    /// Returns true if the value is the leaf in another dtype.
    pub fn is_cast(&self) -> bool {
        matches!(&self.calls[..], [PathCall { kind: PathCallKind::Cast, .. }])
    }

    /// Returns true if the value is the leaf or a cast of it, in another shape or not: it has the leaf's elements.
    pub fn has_elements_of_leaf(&self) -> bool {
        let reshapes_len = self.calls.iter().take_while(|call| call.kind == PathCallKind::Reshape).count();
        matches!(&self.calls[reshapes_len..], [] | [PathCall { kind: PathCallKind::Cast, .. }])
    }

    /// Returns the nodes of the calls and of the leaf.
    pub fn nodes(&self) -> impl Iterator<Item = &TapeNode> {
        self.calls.iter().map(|call| call.node).chain([&**self.leaf])
    }

    /// Moves the parts of a gradient of this value to the leaf. They are not reduced on the way.
    pub fn move_parts(&self, mut parts: DTensor) -> Result<DTensor> {
        for PathCall { op, kind, .. } in &self.calls {
            if *kind == PathCallKind::Cast {
                continue;
            }
            let plan = CallPlan::find(&parts.mesh, *op, &[&parts.meta])?;
            if plan.moves[0].is_some() {
                // The other axes give way.
                let whole = |p: &Placement| if p.is_partial() { p.clone() } else { Placement::Replicate };
                let layout = Layout::new(parts.layout().placements().iter().map(whole));
                parts = parts.redistribute(layout)?;
            }
            parts = DTensor::apply_one(*op, &[&parts])?;
        }
        Ok(parts)
    }
}

impl<'a> PathCall<'a> {
    /// Returns a node's call with the node of its operand, if it may be on a path.
    fn of(node: &'a TapeNode, call: &'a TapeCall) -> Option<(PathCall<'a>, &'a Rc<TapeNode>)> {
        let ([Some(operand)], CallDerivative::Program { program, .. }) = (&call.inputs[..], &call.derivative)
        else {
            return None;
        };
        let ([step], [out]) = (&program.steps[..], &node.outs[..]) else { return None };
        let reads_it_alone = matches!(step.ins[..], [only] if only.index() + 1 == program.reads.len());
        let op = &*step.op;
        // An operator is asked once per program, which belongs to one plan.
        let moves = || {
            *program.passes_sums.get_or_init(|| {
                let rows = op.rows(&[out.meta()], MeshAxis::new(1));
                let passes_sums = |row: &Row| row.ins.iter().chain(&row.outs).all(|s| s.is_sum());
                rows.iter().any(|row| row.by_bits && passes_sums(row))
            })
        };
        let kind = match op.as_any() {
            _ if !reads_it_alone => return None,
            op if op.is::<Cast>() => PathCallKind::Cast,
            op if op.is::<Reshape>() => PathCallKind::Reshape,
            _ if moves() => PathCallKind::Move,
            _ => return None,
        };
        Some((PathCall { node, op, kind }, &operand.node))
    }
}

/// Returns a partial sum in the dtype of a leaf, if the only step left before the leaf is a cast to a wider one. Each rank casts
/// its part: no value changes, and parts of several passes are added in the leaf's dtype.
pub(in crate::dtensor) fn widened_part(
    mesh: &DeviceMesh,
    program: &VjpProgram,
    grads: &[Option<DTensor>],
) -> Result<Option<DTensor>> {
    let ([step], [Some(grad)]) = (&program.steps[..], grads) else { return Ok(None) };
    let Some(Cast { dtype }) = step.op.as_any().downcast_ref() else { return Ok(None) };
    let widens = dtype.is_float() && dtype.size_bytes() > grad.dtype().size_bytes();
    if !(widens && grad.layout().has_partial()) {
        return Ok(None);
    }
    cast_local(mesh, grad, *dtype).map(Some)
}

/// Redistributes a `Partial` gradient straight to the layout of a leaf, if only one step that keeps this layout (such as a cast)
/// is left before the leaf. Otherwise that step would reduce the gradient to some layout, from which it would have to be
/// redistributed again. Returns the step's plan if it was looked up.
pub(in crate::dtensor) fn reduce_before_step(
    mesh: &DeviceMesh,
    leaf: &TapeNode,
    program: &DerivativeProgram,
    grads: &mut [Option<DTensor>],
) -> Result<Option<Rc<CallPlan>>> {
    let ([step], [Some(grad)]) = (&program.steps[..], &grads[..]) else { return Ok(None) };
    let leaf = leaf.gradient_meta();
    let saved_len = program.reads.len() - grads.len();
    let reads_it_alone = matches!(step.ins[..], [only] if only.index() == saved_len);
    if !(reads_it_alone && leaf.shape() == grad.shape() && grad.layout().has_partial()) {
        return Ok(None);
    }
    let plan = program.step_plan(mesh, 0, &[&grad.meta])?;
    if plan.moves[0].is_none() {
        return Ok(Some(plan));
    }
    let at_leaf = mesh.intern(grad.meta.spec().with_layout(leaf.layout().clone())?)?;
    let stays = plan.after(mesh, step.op.as_ref(), &[&at_leaf])?;
    let keeps = stays.moves.iter().all(Option::is_none) && stays.outs[0].layout() == leaf.layout();
    if !keeps {
        return Ok(Some(plan));
    }
    let moved = grad.redistribute(leaf.layout().clone())?;
    debug_assert_eq!(moved.meta, at_leaf, "it has the layout that the plan expects");
    grads[0] = Some(moved);
    Ok(Some(stays))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::tensor::DType;

    #[test]
    fn paths_lead_through_casts_and_moves_alone() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
            let w = DTensor::full(&mesh, DType::F32, [4, 3], "(S0)", 1.0)?.requires_grad()?;
            let forms = |y: DTensor| {
                let node = &y.history.as_ref().expect("it has a history").node;
                let leaf = &w.history.as_ref().expect("a leaf").node;
                LeafPath::of(node).map(|path| {
                    assert!(Rc::ptr_eq(path.leaf(), leaf));
                    let calls_len = path.nodes().count() - 1;
                    (calls_len, path.is_leaf(), path.is_cast(), path.has_elements_of_leaf())
                })
            };
            assert_eq!(forms(w.clone()), Some((0, true, false, true)));
            assert_eq!(forms(w.cast(DType::F16)?), Some((1, false, true, true)));
            assert_eq!(forms(w.cast(DType::F16)?.reshape([12])?), Some((2, false, false, true)));
            assert_eq!(forms(w.reshape([12])?.cast(DType::F16)?), Some((2, false, false, false)));
            assert_eq!(forms(w.transpose(0, 1)?), Some((1, false, false, false)));
            assert_eq!(forms(w.mul_scalar(2.0)?), None);
            assert_eq!(forms(w.mul(&w)?), None);
            assert_eq!(forms(w.exp()?.reshape([12])?), None);
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
