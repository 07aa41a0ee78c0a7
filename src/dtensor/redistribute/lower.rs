//! From facts to calls: the groups, pieces and orders of folding of each step.

use std::sync::Arc;

use smallvec::SmallVec;

use super::super::device_mesh::DeviceMesh;
use super::super::exchange::{Piece, members};
use super::redistribution::{Act, Redistribution, Step, Way};
use crate::comm::{Group, Reduce};
use crate::error::Result;
use crate::placement::Spec;
use crate::tensor::{DType, Dims, FoldOrder, FoldStep, ReduceOp, Shape, SplitRule};

/// A step that can be run.
#[derive(Debug)]
pub(super) enum Stage {
    AllReduce {
        group: Group,
        reduce: Reduce,
    },
    Fold(Fold),
    Exchange(Exchange),
    Collapse(Reduce),
    Round(DType),
    /// This rank's part of a new partial: the value on one rank, the identity on the others.
    Share {
        op: ReduceOp,
        keep: bool,
    },
}

/// A fold whose parts come from everybody who has some of what this rank will hold.
#[derive(Debug)]
pub(super) struct Fold {
    pub group: Group,
    /// What each member gets of mine.
    pub give: Vec<Piece>,
    /// The number of tensors of which each gives its pieces, stacked.
    pub nodes: usize,
    /// What is folded apart from each other: the parts of one cut of the dims each.
    pub sources: Vec<Source>,
    /// The shapes that arrive, one a member.
    pub shapes: Vec<Shape>,
    pub out: Out,
}

/// The members that hold parts of the same elements.
#[derive(Debug)]
pub(super) struct Source {
    pub members: Vec<usize>,
    pub piece: Piece,
    pub reduce: Reduce,
}

/// What this rank holds afterwards: some tensors of one shape, stacked unless there is one.
#[derive(Debug)]
pub(super) struct Out {
    pub nodes: usize,
    pub each: Shape,
}

/// An exchange after which every rank has exactly what it lacked, from whoever held it.
#[derive(Debug)]
pub(super) struct Exchange {
    pub group: Group,
    pub way: Way,
    /// What each member gets of mine; nothing where everybody gets all of it.
    pub give: Vec<Piece>,
    /// What I get of each member's, with the shapes that arrive.
    pub take: Vec<Piece>,
    pub shapes: Vec<Shape>,
    pub out: Out,
}

impl Out {
    fn of(spec: &Spec) -> Out {
        Out { nodes: spec.nodes_len_at(spec.mesh.coords()), each: spec.local_shape() }
    }

    pub fn shape(&self) -> Shape {
        stacked(self.nodes, &self.each)
    }
}

/// The stages of a planned redistribution.
pub(super) fn lower(mesh: &DeviceMesh, plan: &Redistribution) -> Result<SmallVec<[Stage; 2]>> {
    plan.steps.iter().map(|step| stage(mesh, step)).collect()
}

fn stage(mesh: &DeviceMesh, step: &Step) -> Result<Stage> {
    Ok(match &step.act {
        Act::AllReduce(op, axes) => {
            let order = order(&step.from, axes, &members(mesh, axes));
            let shape = order.shape(step.to.local_shape());
            Stage::AllReduce {
                group: mesh.group(axes)?,
                reduce: Reduce { op: *op, order: order.steps, shape },
            }
        }
        Act::Fold(op, axes) => Stage::Fold(fold(mesh, step, *op, axes)?),
        Act::Exchange(way) => Stage::Exchange(exchange(mesh, step, *way)?),
        Act::Collapse => Stage::Collapse(collapse(&step.from)),
        Act::Round => Stage::Round(step.to.dtype),
        Act::Share(op, a) => Stage::Share { op: *op, keep: mesh.mesh().coords()[*a] == 0 },
    })
}

fn fold(mesh: &DeviceMesh, step: &Step, op: ReduceOp, axes: &[usize]) -> Result<Fold> {
    let (from, to) = (&step.from, &step.to);
    let group = mesh.group(&step.axes)?;
    let coords = members(mesh, &step.axes);
    let (mine, wanted) = (from.region(), to.region());
    let give = coords.iter().map(|c| Piece::new(&mine, &to.region_at(c))).collect();
    let order = order(from, axes, &members(mesh, axes));
    // Members that differ along the folded axes alone have parts of the same elements.
    let mut sources: Vec<(Dims, Source)> = Vec::new();
    let mut shapes = Vec::with_capacity(coords.len());
    for (i, c) in coords.iter().enumerate() {
        let mut at = c.clone();
        axes.iter().for_each(|&a| at[a] = 0);
        let k = sources.iter().position(|(other, _)| *other == at).unwrap_or_else(|| {
            let piece = Piece::new(&from.region_at(c), &wanted);
            let reduce = Reduce { op, order: order.steps.clone(), shape: order.shape(piece.shape()) };
            sources.push((at, Source { members: Vec::new(), piece, reduce }));
            sources.len() - 1
        });
        let source = &mut sources[k].1;
        shapes.push(source.reduce.part_shape(source.members.len()));
        source.members.push(i);
    }
    let sources: Vec<Source> = sources.into_iter().map(|(_, s)| s).collect();
    debug_assert_eq!(
        sources.iter().map(|s| s.piece.numel()).sum::<usize>(),
        wanted.numel(),
        "{from} to {to}"
    );
    let nodes = from.nodes_len_at(from.mesh.coords());
    Ok(Fold { group, give, nodes, sources, shapes, out: Out::of(to) })
}

fn exchange(mesh: &DeviceMesh, step: &Step, way: Way) -> Result<Exchange> {
    let (from, to) = (&step.from, &step.to);
    let coords = members(mesh, &step.axes);
    let (mine, wanted) = (from.region(), to.region());
    let take: Vec<Piece> = coords.iter().map(|c| Piece::new(&from.region_at(c), &wanted)).collect();
    debug_assert_eq!(take.iter().map(Piece::numel).sum::<usize>(), wanted.numel(), "{from} to {to}");
    let nodes = from.nodes_len_at(from.mesh.coords());
    let (give, shapes) = match way {
        Way::AllToAll => {
            let give = coords.iter().map(|c| Piece::new(&mine, &to.region_at(c))).collect();
            (give, take.iter().map(|p| stacked(nodes, &p.shape())).collect())
        }
        // Whole parts are sent.
        _ => (Vec::new(), coords.iter().map(|c| stacked(nodes, &from.local_shape_at(c))).collect()),
    };
    Ok(Exchange { group: mesh.group(&step.axes)?, way, give, take, shapes, out: Out::of(to) })
}

/// In which order parts are folded, and how many of them each tensor of a contribution stands for.
struct Order {
    steps: Arc<FoldOrder>,
    /// Parts of one sum with terms along another axis: that many nodes, folded one by one.
    beside: usize,
}

impl Order {
    fn shape(&self, each: Shape) -> Shape {
        stacked(self.beside, &each)
    }
}

/// How the parts along `axes` are folded: those of a sum with terms in the tree's order, all others by halving the range of
/// the first axis, then that of the next.
fn order(from: &Spec, axes: &[usize], members: &[Dims]) -> Order {
    let open = from.open_axes();
    if let Some(tree) = from.tree.as_ref().filter(|_| axes.iter().any(|a| open.contains(a))) {
        let steps = tree.order(&from.mesh, from.mesh.coords(), members, axes);
        return Order { steps: Arc::new(steps), beside: 1 };
    }
    let lens: Dims = axes.iter().map(|&a| from.mesh.axis_len(a)).collect();
    Order { steps: Arc::new(nested(&lens)), beside: from.nodes_len_at(from.mesh.coords()) }
}

/// One part each of members row-major over `lens`, split by the rule of all sums along the first,
/// below single indices along the next.
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

/// This rank's nodes added from the first to the last; zeros if it has none.
fn collapse(from: &Spec) -> Reduce {
    let nodes = from.nodes_len_at(from.mesh.coords());
    let first = if nodes == 0 { FoldStep::Empty } else { FoldStep::Push { operand: 0, node: 0 } };
    let others = (1..nodes).flat_map(|node| [FoldStep::Push { operand: 0, node }, FoldStep::Join]);
    let order = FoldOrder::new(vec![nodes], std::iter::once(first).chain(others).collect());
    Reduce { op: ReduceOp::Sum, order: Arc::new(order), shape: from.local_shape() }
}

fn stacked(n: usize, shape: &Shape) -> Shape {
    if n == 1 { shape.clone() } else { std::iter::once(n).chain(shape.iter().copied()).collect() }
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
                    FoldStep::Empty => unreachable!("every member brings a part"),
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
