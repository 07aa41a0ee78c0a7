//! Lowering of a plan: the groups, pieces and fold orders of each step on this rank.

use std::sync::Arc;

use smallvec::SmallVec;

use super::redistribution::{ExchangeKind, Redistribution, RedistributionStep, StepAction};
use crate::comm::{Group, Reduce};
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::redistribute::exchange_piece::ExchangePiece;
use crate::error::Result;
use crate::placement::Spec;
use crate::tensor::{DType, Dims, FoldOrder, FoldStep, ReduceOp, Shape, SplitRule, short_list, stacked};

/// A step with everything that this rank needs to run it.
#[derive(Debug)]
pub(super) enum Stage {
    AllReduce {
        group: Group,
        reduce: Reduce,
    },
    Fold(FoldStage),
    Exchange(ExchangeStage),
    Collapse(Reduce),
    Round(DType),
    /// This rank's part of a new `Partial`: the value on one rank, the identity of the operation on the others.
    Share {
        op: ReduceOp,
        keep: bool,
    },
}

/// A reduction in which this rank receives, from every rank that has some, the partial values of the elements that it
/// will hold.
#[derive(Debug)]
pub(super) struct FoldStage {
    pub group: Group,
    /// The pieces of this rank's part, one per receiving member.
    pub give: Vec<ExchangePiece>,
    /// The number of tensors that this rank stores; the pieces of all of them are stacked.
    pub nodes: usize,
    /// The folds that are computed separately: one per part into which the other axes split the tensor.
    pub sources: Vec<FoldSource>,
    /// The shapes that arrive, one per member.
    pub shapes: Vec<Shape>,
    pub out: StackedShape,
}

/// The members that hold partial values of the same elements.
#[derive(Debug)]
pub(super) struct FoldSource {
    pub members: Vec<usize>,
    pub piece: ExchangePiece,
    pub reduce: Reduce,
}

/// The shape that this rank stores after a step: tensors of one shape, stacked unless there is one.
#[derive(Debug)]
pub(super) struct StackedShape {
    pub nodes: usize,
    pub each: Shape,
}

/// An exchange in which every rank receives exactly the elements that it lacks.
#[derive(Debug)]
pub(super) struct ExchangeStage {
    pub group: Group,
    pub kind: ExchangeKind,
    /// The pieces of this rank's part, one per receiving member; empty if every member receives all of it.
    pub give: Vec<ExchangePiece>,
    /// The pieces that this rank receives, one per sending member.
    pub take: Vec<ExchangePiece>,
    /// The shapes that arrive, one per member.
    pub shapes: Vec<Shape>,
    pub out: StackedShape,
}

impl StackedShape {
    fn of(spec: &Spec) -> StackedShape {
        StackedShape { nodes: spec.nodes_len_at(spec.mesh.coords()), each: spec.local_shape() }
    }

    pub fn shape(&self) -> Shape {
        stacked(self.nodes, &self.each)
    }
}

/// Lowers the steps of a plan.
pub(super) fn lower(mesh: &DeviceMesh, plan: &Redistribution) -> Result<SmallVec<[Stage; 2]>> {
    plan.steps.iter().map(|step| stage(mesh, step)).collect()
}

/// Lowers one step.
fn stage(mesh: &DeviceMesh, step: &RedistributionStep) -> Result<Stage> {
    Ok(match &step.action {
        StepAction::AllReduce(op, axes) => {
            let order = order(&step.from, axes, &mesh.mesh().members_along(axes));
            let shape = order.shape(step.to.local_shape());
            Stage::AllReduce {
                group: mesh.group(axes)?,
                reduce: Reduce { op: *op, order: order.steps, shape },
            }
        }
        StepAction::Fold(op, axes) => Stage::Fold(fold(mesh, step, *op, axes)?),
        StepAction::Exchange(kind) => Stage::Exchange(exchange(mesh, step, *kind)?),
        StepAction::Collapse => Stage::Collapse(collapse(&step.from)),
        StepAction::Round => Stage::Round(step.to.dtype),
        StepAction::Share(op, a) => Stage::Share { op: *op, keep: mesh.mesh().coords()[*a] == 0 },
    })
}

/// Lowers a fold: which pieces this rank sends, receives and folds.
fn fold(mesh: &DeviceMesh, step: &RedistributionStep, op: ReduceOp, axes: &[usize]) -> Result<FoldStage> {
    let (from, to) = (&step.from, &step.to);
    let group = mesh.group(&step.axes)?;
    let coords = mesh.mesh().members_along(&step.axes);
    let (mine, wanted) = (from.region(), to.region());
    let give = coords.iter().map(|c| ExchangePiece::new(&mine, &to.region_at(c))).collect();
    let order = order(from, axes, &mesh.mesh().members_along(axes));
    // Members that differ only along the folded axes hold partial values of the same elements.
    let mut sources: Vec<(Dims, FoldSource)> = Vec::new();
    let mut shapes = Vec::with_capacity(coords.len());
    for (i, c) in coords.iter().enumerate() {
        let mut at = c.clone();
        axes.iter().for_each(|&a| at[a] = 0);
        let k = sources.iter().position(|(other, _)| *other == at).unwrap_or_else(|| {
            let piece = ExchangePiece::new(&from.region_at(c), &wanted);
            let reduce = Reduce { op, order: order.steps.clone(), shape: order.shape(piece.shape()) };
            sources.push((at, FoldSource { members: Vec::new(), piece, reduce }));
            sources.len() - 1
        });
        let source = &mut sources[k].1;
        shapes.push(source.reduce.part_shape(source.members.len()));
        source.members.push(i);
    }
    let sources: Vec<FoldSource> = sources.into_iter().map(|(_, s)| s).collect();
    debug_assert_eq!(
        sources.iter().map(|s| s.piece.numel()).sum::<usize>(),
        wanted.numel(),
        "{from} to {to}"
    );
    let nodes = from.nodes_len_at(from.mesh.coords());
    Ok(FoldStage { group, give, nodes, sources, shapes, out: StackedShape::of(to) })
}

/// Lowers an exchange.
fn exchange(mesh: &DeviceMesh, step: &RedistributionStep, kind: ExchangeKind) -> Result<ExchangeStage> {
    let (from, to) = (&step.from, &step.to);
    let coords = mesh.mesh().members_along(&step.axes);
    let (mine, wanted) = (from.region(), to.region());
    let take: Vec<ExchangePiece> =
        coords.iter().map(|c| ExchangePiece::new(&from.region_at(c), &wanted)).collect();
    debug_assert_eq!(take.iter().map(ExchangePiece::numel).sum::<usize>(), wanted.numel(), "{from} to {to}");
    let nodes = from.nodes_len_at(from.mesh.coords());
    let (give, shapes) = match kind {
        ExchangeKind::AllToAll => {
            let give = coords.iter().map(|c| ExchangePiece::new(&mine, &to.region_at(c))).collect();
            (give, take.iter().map(|p| stacked(nodes, &p.shape())).collect())
        }
        // Every member sends its whole part.
        _ => (Vec::new(), coords.iter().map(|c| stacked(nodes, &from.local_shape_at(c))).collect()),
    };
    Ok(ExchangeStage { group: mesh.group(&step.axes)?, kind, give, take, shapes, out: StackedShape::of(to) })
}

/// The order in which partial values are folded.
struct PartialsOrder {
    steps: Arc<FoldOrder>,
    /// The number of nodes per contribution that are folded separately: those of a partial sum with a tree along
    /// another axis.
    nodes_len: usize,
}

impl PartialsOrder {
    fn shape(&self, each: Shape) -> Shape {
        stacked(self.nodes_len, &each)
    }
}

/// Returns the order in which the partial values along `axes` are folded: those of a sum with a reduction tree in the
/// tree's order, all others by halving the range of the first axis, then that of the next.
fn order(from: &Spec, axes: &[usize], members: &[Dims]) -> PartialsOrder {
    let open = from.open_axes();
    if let Some(tree) = from.tree.as_ref().filter(|_| axes.iter().any(|a| open.contains(a))) {
        let steps = tree.fold_order(&from.mesh, from.mesh.coords(), members, axes);
        return PartialsOrder { steps: Arc::new(steps), nodes_len: 1 };
    }
    let lens: Dims = short_list(axes.iter().map(|&a| from.mesh.axis_len(a)));
    PartialsOrder { steps: Arc::new(nested(&lens)), nodes_len: from.nodes_len_at(from.mesh.coords()) }
}

/// Returns the fold order of one partial value per member, row-major over `lens`: the range of the first axis is
/// halved down to single indices, then that of the next axis.
fn nested(lens: &[usize]) -> FoldOrder {
    fn fold(lens: &[usize], base: usize, from: usize, to: usize, steps: &mut Vec<FoldStep>) {
        if to - from > 1 {
            let mid = SplitRule::Halves.mid(from, to);
            fold(lens, base, from, mid, steps);
            fold(lens, base, mid, to, steps);
            return steps.push(FoldStep::Join);
        }
        let at = base * lens[0] + from;
        match &lens[1..] {
            [] => steps.push(FoldStep::Push { operand: at, node: 0 }),
            inner => fold(inner, at, 0, inner[0], steps),
        }
    }
    let members: usize = lens.iter().product();
    let mut steps = Vec::with_capacity(2 * members);
    fold(lens, 0, 0, lens[0], &mut steps);
    FoldOrder::new(vec![1; members], steps)
}

/// Returns the fold that adds up this rank's nodes from the first to the last; zeros if it has none.
fn collapse(from: &Spec) -> Reduce {
    let nodes = from.nodes_len_at(from.mesh.coords());
    let first = if nodes == 0 { FoldStep::Empty } else { FoldStep::Push { operand: 0, node: 0 } };
    let others = (1..nodes).flat_map(|node| [FoldStep::Push { operand: 0, node }, FoldStep::Join]);
    let order = FoldOrder::new(vec![nodes], std::iter::once(first).chain(others).collect());
    Reduce { op: ReduceOp::Sum, order: Arc::new(order), shape: from.local_shape() }
}

#[cfg(test)]
mod order_tests {
    use super::*;

    #[test]
    fn the_first_axis_is_halved_first_whatever_its_length() {
        let text = |lens: &[usize]| {
            let mut stack: Vec<String> = Vec::new();
            for step in nested(lens).steps() {
                match step {
                    FoldStep::Push { operand, .. } => stack.push(operand.to_string()),
                    FoldStep::Empty => unreachable!("every member contributes one part"),
                    FoldStep::Join => {
                        let (b, a) = (stack.pop().unwrap(), stack.pop().unwrap());
                        stack.push(format!("({a} {b})"));
                    }
                }
            }
            stack.concat()
        };
        assert_eq!(text(&[3]), "((0 1) 2)");
        assert_eq!(text(&[3, 2]), "(((0 1) (2 3)) (4 5))", "not ((0 1) 2) and the rest");
        assert_eq!(text(&[2, 1, 2]), "((0 1) (2 3))");
        assert_eq!(nested(&[1, 5]), FoldOrder::halving(5));
        assert_eq!(nested(&[4, 2]), FoldOrder::halving(8));
    }
}
