//! Several redistributions whose reductions share calls.

use std::rc::Rc;
use std::sync::Arc;

use super::super::device_mesh::DeviceMesh;
use super::lower::{FoldStage, Stage, stacked};
use super::redistribution::{RedistributionStep, StepAction};
use super::run::Move;
use crate::comm::{Group, Reduce};
use crate::error::Result;
use crate::tensor::{FoldOrder, FoldStep, Shape, Tensor};

/// Runs several moves, and returns the tensors in their order, with the bits of [`Move::run`].
///
/// Moves that make the same steps share the calls of their reductions: the partial values of all tensors are stacked in
/// one buffer. A tensor is freed when it has been copied there, unless it is held elsewhere.
pub(in crate::dtensor) fn run_together(
    mesh: &DeviceMesh,
    moves: &[Rc<Move>],
    locals: Vec<Tensor>,
) -> Result<Vec<Tensor>> {
    let mut waiting: Vec<Option<Tensor>> = locals.into_iter().map(Some).collect();
    let mut moved = vec![Tensor::default(); moves.len()];
    for first in 0..moves.len() {
        let joins = |&i: &usize| waiting[i].is_some() && (i == first || is_alike(&moves[first], &moves[i]));
        let members: Vec<usize> = (first..moves.len()).filter(joins).collect();
        let locals: Vec<Tensor> = members.iter().filter_map(|&i| waiting[i].take()).collect();
        let alike: Vec<&Rc<Move>> = members.iter().map(|&i| &moves[i]).collect();
        for (i, local) in members.into_iter().zip(run_alike(mesh, &alike, locals)?) {
            moved[i] = local;
        }
    }
    Ok(moved)
}

/// Returns true if two moves can share their calls. All ranks answer alike: only shared metadata is compared.
fn is_alike(one: &Move, other: &Move) -> bool {
    let (one, other) = (&one.plan().steps, &other.plan().steps);
    one.len() == other.len() && one.iter().zip(other).all(|(a, b)| is_same_step(a, b))
}

fn is_same_step(a: &RedistributionStep, b: &RedistributionStep) -> bool {
    let same_move = a.action == b.action
        && a.axes == b.axes
        && a.from.shape == b.from.shape
        && a.from.stored_dtype() == b.from.stored_dtype()
        && a.from.layout == b.from.layout
        && a.to.layout == b.to.layout;
    // A fold along other axes than those of a tree keeps the nodes apart, as many as the rank has.
    let one_value = |step: &RedistributionStep, axes: &[usize]| {
        step.from.tree.as_ref().is_none_or(|tree| tree.open_axes().any(|a| axes.contains(&a)))
    };
    same_move
        && match &a.action {
            StepAction::AllReduce(_, axes) => one_value(a, axes) && one_value(b, axes),
            // If other axes take part, their ranks bring values of other elements, which are folded apart.
            StepAction::Fold(_, axes) => a.axes == *axes && one_value(a, axes) && one_value(b, axes),
            StepAction::Exchange(_) | StepAction::Collapse | StepAction::Round | StepAction::Share(..) => {
                true
            }
        }
}

/// Runs moves that are alike, step by step.
fn run_alike(mesh: &DeviceMesh, moves: &[&Rc<Move>], mut locals: Vec<Tensor>) -> Result<Vec<Tensor>> {
    if let ([only], [_]) = (moves, &locals[..]) {
        return Ok(vec![only.run(mesh, locals.remove(0))?]);
    }
    let steps_len = moves.first().map_or(0, |m| m.stages().len());
    for k in 0..steps_len {
        let calls: Option<Vec<SharedCall<'_>>> =
            moves.iter().map(|m| SharedCall::of(&m.stages()[k])).collect();
        locals = match calls {
            Some(calls) => {
                let bytes = moves.iter().map(|m| m.plan().steps[k].received_bytes).sum::<u64>();
                mesh.0.moving_calls.set(mesh.0.moving_calls.get() + 1);
                mesh.0.moved_bytes.set(mesh.0.moved_bytes.get() + bytes);
                run_shared(&calls, locals)?
            }
            None => {
                let one = |(m, local): (&&Rc<Move>, Tensor)| m.start_stage(k, local)?.wait_call(mesh);
                moves.iter().zip(locals).map(one).collect::<Result<_>>()?
            }
        };
    }
    Ok(locals)
}

/// One tensor's share of a call that reduces several.
#[derive(Clone, Copy)]
struct SharedCall<'a> {
    group: &'a Group,
    reduce: &'a Reduce,
    /// The fold, or `None` for an all-reduce.
    fold: Option<&'a FoldStage>,
}

impl SharedCall<'_> {
    /// Returns the call of a stage that folds one value per member.
    fn of(stage: &Stage) -> Option<SharedCall<'_>> {
        match stage {
            Stage::AllReduce { group, reduce } => Some(SharedCall { group, reduce, fold: None }),
            Stage::Fold(fold) => match &fold.sources[..] {
                [source] => Some(SharedCall { group: &fold.group, reduce: &source.reduce, fold: Some(fold) }),
                _ => None,
            },
            Stage::Exchange(_) | Stage::Collapse(_) | Stage::Round(_) | Stage::Share { .. } => None,
        }
    }

    /// Returns the number of partial values that this rank brings.
    fn nodes(&self) -> usize {
        self.reduce.order.nodes()[self.group.index()]
    }

    /// Returns the shape of this tensor's results.
    fn out_shape(&self) -> Shape {
        self.fold.map_or_else(|| self.reduce.out_shape(), |fold| fold.out.shape())
    }
}

/// Reduces tensors in one call.
fn run_shared(calls: &[SharedCall<'_>], locals: Vec<Tensor>) -> Result<Vec<Tensor>> {
    let SharedCall { group, reduce, fold } = calls[0];
    let (device, dtype) = (locals[0].device(), locals[0].dtype());
    let nodes: usize = calls.iter().map(SharedCall::nodes).sum();
    let shapes: Vec<Shape> = match fold {
        Some(fold) => fold.give.iter().map(|piece| piece.shape()).collect(),
        None => vec![reduce.shape.clone()],
    };
    let room = |shape: &Shape| Tensor::uninit_on(device, dtype, [nodes * shape.numel()]);
    let mut parts = shapes.iter().map(room).collect::<Result<Vec<Tensor>>>()?;
    let mut ends = vec![0; parts.len()];
    for (local, call) in locals.into_iter().zip(calls) {
        for (i, (part, end)) in parts.iter_mut().zip(&mut ends).enumerate() {
            let piece = match call.fold {
                Some(fold) => fold.give[i].cut_nodes(&local, fold.nodes)?,
                None => local.clone(),
            };
            piece.copy_block(part, piece.shape(), (0, piece.strides()), (*end, &piece.shape().strides()))?;
            *end += piece.numel();
        }
    }
    let shaped = parts.into_iter().zip(&shapes).map(|(part, shape)| part.reshape(stacked(nodes, shape)));
    let parts = shaped.collect::<Result<Vec<Tensor>>>()?;
    let order = Arc::new(joined_order(calls));
    let shared = Reduce { op: reduce.op, order, shape: reduce.shape.clone() };
    let call = match fold {
        Some(_) => group.reduce_scatter_with(parts, shared),
        None => group.all_reduce_with_async(&parts[0], shared),
    };
    let all = call.wait()?;
    let all = all.reshape([all.numel()])?;
    let mut at = 0;
    let result = |call: &SharedCall<'_>| {
        let shape = call.out_shape();
        at += shape.numel();
        all.narrow(0, at - shape.numel(), shape.numel())?.reshape(shape)
    };
    calls.iter().map(result).collect()
}

/// Returns the order that folds each tensor's values as alone. A member's values are those of the first tensor, then
/// those of the next.
fn joined_order(calls: &[SharedCall<'_>]) -> FoldOrder {
    let mut nodes = vec![0; calls[0].group.len()];
    let mut steps = Vec::new();
    for call in calls {
        let order = &call.reduce.order;
        steps.extend(order.steps().iter().map(|&step| match step {
            FoldStep::Push { operand, node } => FoldStep::Push { operand, node: nodes[operand] + node },
            FoldStep::Empty | FoldStep::Join => step,
        }));
        nodes.iter_mut().zip(order.nodes()).for_each(|(all, own)| *all += own);
    }
    FoldOrder::new(nodes, steps)
}
