//! Redistribution: from any layout to any other of one mesh.
//!
//! A move is planned once per pair of facts, from what every rank knows, in up to four kinds of stage: reduce-scatter
//! where a `Partial` axis ends up sharded, one all-reduce for the `Partial` axes that end up otherwise, one exchange
//! in which every rank receives exactly what it lacks, and zeroing where a new `Partial` begins. An exchange involves
//! only the axes whose cuts change; ranks that are replicas of each other each ask within their own replica, so the
//! load is spread and the holder is the nearest.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use smallvec::SmallVec;

use super::device_mesh::DeviceMesh;
use super::exchange::{Exchange, Piece, cuts, exchange, members};
use super::facts::Facts;
use crate::comm::{Group, Pending, Reduce};
use crate::error::Result;
use crate::placement::{Layout, Placement, Spec};
use crate::tensor::{DType, Dims, FoldOrder, FoldStep, ReduceOp, Shape, Tensor};

/// A planned redistribution.
#[derive(Debug)]
pub(crate) struct Move {
    stages: SmallVec<[Stage; 2]>,
}

#[derive(Debug)]
enum Stage {
    AllReduce {
        group: Group,
        reduce: Reduce,
    },
    ReduceScatter {
        group: Group,
        reduce: Reduce,
        give: Vec<Piece>,
        /// The number of tensors of which each gives its pieces, stacked.
        nodes: usize,
        out: Shape,
    },
    Exchange(Exchange),
    /// The nodes that this rank has finished of a sum in parts become one part, without the order of the tree.
    Collapse(Reduce),
    /// A finished f16 or bf16 sum, whose parts were f32, is rounded.
    Round(DType),
    /// This rank's part of a new partial: the value on one rank, the identity on the others.
    Share {
        op: ReduceOp,
        keep: bool,
    },
}

/// A redistribution whose last exchange may still be on its way.
pub(super) enum InFlight {
    Done(Tensor),
    Waiting { plan: Rc<Move>, stage: usize, parts: Pending<Vec<Tensor>>, local: Tensor },
}

/// The move from `src` to `dst`, planned at the first call.
pub(super) fn find(mesh: &DeviceMesh, src: &Facts, dst: &Facts) -> Result<Rc<Move>> {
    let key = (src.id, dst.id);
    if let Some(m) = mesh.0.moves.borrow().get(&key) {
        return Ok(m.clone());
    }
    let m = Rc::new(plan(mesh, src.spec(), dst.spec())?);
    mesh.0.moves.borrow_mut().insert(key, m.clone());
    Ok(m)
}

impl Move {
    /// True where some rank receives something: then `strict` forbids doing it silently.
    pub(super) fn communicates(&self) -> bool {
        self.stages.iter().any(|s| match s {
            Stage::AllReduce { group, .. } | Stage::ReduceScatter { group, .. } => group.len() > 1,
            Stage::Exchange(x) => x.group.len() > 1,
            Stage::Share { .. } | Stage::Collapse(_) | Stage::Round(_) => false,
        })
    }

    pub(super) fn run(self: &Rc<Self>, mesh: &DeviceMesh, local: Tensor) -> Result<Tensor> {
        self.start(mesh, local)?.finish(mesh)
    }

    /// The reduction over a group, where the move is nothing else.
    pub(super) fn only_all_reduce(&self) -> Option<(&Group, &Reduce)> {
        match &self.stages[..] {
            [Stage::AllReduce { group, reduce }] => Some((group, reduce)),
            _ => None,
        }
    }

    /// Runs the stages up to an exchange that is the last one, and starts that.
    pub(super) fn start(self: &Rc<Self>, mesh: &DeviceMesh, local: Tensor) -> Result<InFlight> {
        self.start_at(0, mesh, local)
    }

    fn start_at(self: &Rc<Self>, first: usize, mesh: &DeviceMesh, mut local: Tensor) -> Result<InFlight> {
        for (k, stage) in self.stages.iter().enumerate().skip(first) {
            local = match stage {
                Stage::AllReduce { group, reduce } => group.all_reduce_in(&local, reduce.clone())?,
                Stage::ReduceScatter { group, reduce, give, nodes, out } => {
                    let parts = give.iter().map(|p| p.cut_nodes(&local, *nodes)).collect::<Result<_>>()?;
                    group.reduce_scatter_in(parts, reduce.clone()).wait()?.reshape(out.clone())?
                }
                Stage::Collapse(reduce) => reduce.fold(&[local.contiguous()?])?,
                Stage::Round(dtype) => local.cast(*dtype)?,
                Stage::Share { op, keep } => {
                    if *keep {
                        local
                    } else {
                        Tensor::identity(*op, &local)?
                    }
                }
                Stage::Exchange(x) if x.nodes != 1 => {
                    let moved = |i| x.run(&local.select(0, i)?);
                    Tensor::stack(
                        &(0..x.nodes).map(moved).collect::<Result<Vec<_>>>()?,
                        &x.out,
                        local.dtype(),
                        local.device(),
                    )?
                }
                Stage::Exchange(x) if x.group.len() == 1 => x.run(&local)?,
                Stage::Exchange(x) => {
                    let parts = x.start(&local)?;
                    return Ok(InFlight::Waiting { plan: self.clone(), stage: k, parts, local });
                }
            };
            mesh.0.moved_bytes.set(mesh.0.moved_bytes.get() + stage.received_bytes(local.dtype()));
        }
        Ok(InFlight::Done(local))
    }
}

impl Stage {
    /// Bytes that come from other ranks while the stage runs; those of an exchange that is waited for are counted then.
    fn received_bytes(&self, dtype: DType) -> u64 {
        let size = dtype.size_bytes();
        let bytes = match self {
            Stage::AllReduce { group, reduce } => {
                let (n, nodes) = (group.len(), reduce.order.nodes());
                let others = nodes.iter().sum::<usize>() - nodes[group.index()];
                let elements = reduce.shape.numel() * size;
                others * elements / n + reduce.order.outs_len() * (n - 1) * elements / n
            }
            Stage::ReduceScatter { group, reduce, .. } => {
                let nodes = reduce.order.nodes();
                (nodes.iter().sum::<usize>() - nodes[group.index()]) * reduce.shape.numel() * size
            }
            Stage::Exchange(x) if x.nodes != 1 => x.nodes * x.received_len * size,
            Stage::Exchange(_) | Stage::Share { .. } | Stage::Collapse(_) | Stage::Round(_) => 0,
        };
        bytes as u64
    }
}

/// One stage after the other: `reduce_scatter(sum) over tp{0, 1}, then exchange over dp{0, 2}: 96 bytes come`.
impl fmt::Display for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (k, stage) in self.stages.iter().enumerate() {
            f.write_str(if k == 0 { "" } else { ", then " })?;
            match stage {
                Stage::AllReduce { group, reduce } => {
                    write!(f, "all_reduce({}) over {group}{}", reduce.op, Nodes(reduce))?;
                }
                Stage::ReduceScatter { group, reduce, .. } => {
                    write!(f, "reduce_scatter({}) over {group}{}", reduce.op, Nodes(reduce))?;
                }
                Stage::Collapse(reduce) => write!(f, "add up {} nodes", reduce.order.nodes()[0])?,
                Stage::Round(dtype) => write!(f, "round to {dtype}")?,
                Stage::Share { op, keep: true } => write!(f, "keep as this rank's part of a {op}")?,
                Stage::Share { op, keep: false } => write!(f, "take the identity of {op}")?,
                Stage::Exchange(x) if x.group.len() == 1 => f.write_str("slice")?,
                Stage::Exchange(x) => {
                    let call = if x.give.is_none() { "all_gather" } else { "all_to_all" };
                    write!(
                        f,
                        "{call} over {}: {} bytes come",
                        x.group,
                        x.received_len * x.nodes * x.size_bytes
                    )?;
                }
            }
        }
        f.write_str(if self.stages.is_empty() { "nothing to do" } else { "" })
    }
}

/// How many parts the members bring, where that is not one each: ` of 2, 3 and 2 nodes`.
struct Nodes<'a>(&'a Reduce);

impl fmt::Display for Nodes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes = self.0.order.nodes();
        if nodes.iter().all(|&n| n == 1) {
            return Ok(());
        }
        let (last, first) = nodes.split_last().expect("a group has members");
        let first: Vec<String> = first.iter().map(usize::to_string).collect();
        write!(f, " of {} and {last} nodes", first.join(", "))
    }
}

impl InFlight {
    pub(super) fn finish(self, mesh: &DeviceMesh) -> Result<Tensor> {
        match self {
            InFlight::Done(local) => Ok(local),
            InFlight::Waiting { plan, stage, parts, local } => {
                let Stage::Exchange(x) = &plan.stages[stage] else { unreachable!("only exchanges wait") };
                let parts = parts.wait()?;
                let out = x.assemble(&parts, &local)?;
                let bytes = x.received_len * x.size_bytes;
                mesh.0.moved_bytes.set(mesh.0.moved_bytes.get() + bytes as u64);
                plan.start_at(stage + 1, mesh, out)?.finish(mesh)
            }
        }
    }
}

fn plan(mesh: &DeviceMesh, src: &Spec, dst: &Spec) -> Result<Move> {
    let mut stages = SmallVec::new();
    let mut cur = src.clone();
    for a in leaving_partials(&cur, dst) {
        if let Some(next) = scattered(&cur, dst, a)? {
            stages.push(reduce_scatter(mesh, &cur, &next, a)?);
            cur = next;
        }
    }
    for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
        let leaving = leaving_partials(&cur, dst);
        let axes: Vec<usize> =
            leaving.into_iter().filter(|&a| *cur.layout.axis(a) == Placement::Partial(op)).collect();
        // Parts that follow the tree over the terms, and others, that follow one over the ranks.
        let open = cur.open_axes();
        let (tree, plain): (Vec<usize>, Vec<usize>) = axes.into_iter().partition(|a| open.contains(a));
        for axes in [plain, tree].into_iter().filter(|axes| !axes.is_empty()) {
            let next = with_axes(&cur, &axes, Placement::Replicate)?;
            let reduce = reduction(mesh, &cur, &axes, op, next.local_shape());
            stages.push(Stage::AllReduce { group: mesh.group(&axes)?, reduce });
            cur = next;
        }
    }
    if cur.terms.is_some() && dst.terms.is_none() {
        stages.push(Stage::Collapse(collapse(&cur)));
        cur.terms = None;
    }
    if cur.stored_dtype() != src.stored_dtype() {
        stages.push(Stage::Round(cur.stored_dtype()));
    }
    let opening: Vec<usize> = (0..mesh.mesh().ndim())
        .filter(|&a| {
            matches!(dst.layout.axis(a), Placement::Partial(_)) && dst.layout.axis(a) != cur.layout.axis(a)
        })
        .collect();
    let mid = with_axes(dst, &opening, Placement::Replicate)?;
    if mid.layout != cur.layout {
        stages.push(Stage::Exchange(exchange(mesh, &cur, &mid)?));
    }
    for a in opening {
        if let Placement::Partial(op) = *dst.layout.axis(a) {
            stages.push(Stage::Share { op, keep: mesh.mesh().coords()[a] == 0 });
        }
    }
    Ok(Move { stages })
}

/// How the parts along `axes` are folded: those of a sum with terms in the tree's order, all others by halving the range
/// of ranks. `shape` is that of each part of this rank's result.
fn reduction(mesh: &DeviceMesh, cur: &Spec, axes: &[usize], op: ReduceOp, shape: Shape) -> Reduce {
    let members = members(mesh, axes);
    match &cur.terms {
        Some(terms) if cur.open_axes().contains(&axes[0]) => {
            let order = terms.order(mesh.mesh(), mesh.mesh().coords(), &members, axes);
            Reduce { op, order: Arc::new(order), shape }
        }
        Some(_) => {
            // Parts of one sum with terms along another axis: node by node.
            let nodes = cur.nodes_len_at(mesh.mesh().coords());
            let shape = if nodes == 1 {
                shape
            } else {
                std::iter::once(nodes).chain(shape.iter().copied()).collect()
            };
            Reduce::halving(op, members.len(), shape)
        }
        None => Reduce::halving(op, members.len(), shape),
    }
}

/// This rank's nodes added from the first to the last; zeros if it has none.
fn collapse(cur: &Spec) -> Reduce {
    let nodes = cur.nodes_len_at(cur.mesh.coords());
    let first = if nodes == 0 { FoldStep::Empty } else { FoldStep::Push { member: 0, node: 0 } };
    let others = (1..nodes).flat_map(|node| [FoldStep::Push { member: 0, node }, FoldStep::Join]);
    let order = FoldOrder::new(vec![nodes], std::iter::once(first).chain(others).collect());
    Reduce { op: ReduceOp::Sum, order: Arc::new(order), shape: cur.local_shape() }
}

/// The axes whose partial of `cur` is not wanted in `dst`.
fn leaving_partials(cur: &Spec, dst: &Spec) -> Vec<usize> {
    let partial = |a: &usize| matches!(cur.layout.axis(*a), Placement::Partial(_));
    (0..cur.mesh.ndim()).filter(partial).filter(|&a| cur.layout.axis(a) != dst.layout.axis(a)).collect()
}

fn with_axes(spec: &Spec, axes: &[usize], placement: Placement) -> Result<Spec> {
    let mut placements = spec.layout.placements().to_vec();
    axes.iter().for_each(|&a| placements[a] = placement.clone());
    spec.with_layout(Layout::new(placements).with_order(spec.layout.order())?)
}

/// `cur` with partial axis `a` sharded as in `dst`, if each rank's part is then a part of what it holds: that is, if
/// `a` cuts innermost and the other cuts stay as they are.
fn scattered(cur: &Spec, dst: &Spec, a: usize) -> Result<Option<Spec>> {
    let dims = match dst.layout.axis(a) {
        Placement::Shard(d) => *d..*d + 1,
        Placement::RaggedShard { dims, .. } => 0..*dims,
        _ => return Ok(None),
    };
    let mut placements = cur.layout.placements().to_vec();
    placements[a] = dst.layout.axis(a).clone();
    let order: Dims = cur.layout.order().iter().copied().filter(|&b| b != a).chain([a]).collect();
    let Ok(next) = Layout::new(placements).with_order(&order).and_then(|l| cur.with_layout(l)) else {
        return Ok(None);
    };
    // Splitting the same dims in another order later would move everything again; then all-reduce is no worse.
    let kept = dims.clone().all(|d| cuts(&next.layout, d).iter().all(|c| cuts(&dst.layout, d).contains(c)));
    Ok(kept.then_some(next))
}

fn reduce_scatter(mesh: &DeviceMesh, cur: &Spec, next: &Spec, a: usize) -> Result<Stage> {
    let Placement::Partial(op) = *cur.layout.axis(a) else { unreachable!("called for partial axes") };
    let mine = cur.region();
    let give: Vec<Piece> =
        members(mesh, &[a]).iter().map(|c| Piece::new(&mine, &next.region_at(c))).collect();
    let group = mesh.group(&[a])?;
    let reduce = reduction(mesh, cur, &[a], op, give[group.index()].shape());
    let nodes = cur.nodes_len_at(mesh.mesh().coords());
    let out = mesh.facts_of(next.clone())?.stored_shape().clone();
    Ok(Stage::ReduceScatter { group, reduce, give, nodes, out })
}

#[cfg(test)]
mod tests {
    use super::super::exchange::talking_axes;
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::DTensor;

    fn layout(text: &str) -> Layout {
        text.parse().expect("a layout")
    }

    #[test]
    fn only_axes_whose_cut_is_undone_talk() {
        let axes = |from: &str, to: &str| talking_axes(&layout(from), &layout(to), 2);
        assert_eq!(axes("(S0, R)", "(S0, S1)"), [0usize; 0], "slicing needs nobody");
        assert_eq!(axes("(S0, S1)", "(S0, R)"), [1]);
        assert_eq!(axes("(S0, S0)", "(S0, R)"), [1], "the inner cut alone");
        assert_eq!(axes("(S0, S0)", "(R, S0)"), [0, 1], "what lies inside a cut that is undone");
        assert_eq!(axes("(S0, S0)", "(S0^1, S0^0)"), [0, 1]);
        assert_eq!(axes("(S0, R)", "(S0, S0)"), [0usize; 0]);
        assert_eq!(axes("(S0, R)", "(S0^1, S0^0)"), [0], "another cut came outside");
        assert_eq!(
            axes("(S1, RS(0..2; 1,1))", "(R, RS(0..2; 1,1))"),
            [0, 1],
            "ragged over a dim that was cut"
        );
    }

    #[test]
    fn bytes_received_are_those_of_the_moves() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 3), ("b", 1)])?;
            let received = |x: &DTensor, to: &str| -> Result<u64> {
                let before = mesh.received_bytes();
                x.redistribute(layout(to))?;
                Ok(mesh.received_bytes() - before)
            };
            let local = Tensor::full(crate::tensor::DType::F32, [9], 1.0);
            let x = DTensor::from_local(&mesh, local.clone(), [9], layout("(P(sum), R)"))?;
            assert_eq!(received(&x, "(S0, R)")?, 2 * 12, "two parts of three elements");
            assert_eq!(received(&x, "(R, R)")?, 4 * 12, "two thirds, twice");
            let x = DTensor::from_local(&mesh, local, [9], layout("(R, P(sum))"))?;
            assert_eq!(received(&x, "(R, R)")?, 0, "nobody else is there");
            assert!(!find(&mesh, &x.facts, &x.redistribute(layout("(R, R)"))?.facts)?.communicates());
            Ok(())
        };
        spmd(3, run).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn a_new_partial_keeps_every_bit() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 2)])?;
            let whole = Tensor::from_vec(vec![-0.0f32, 0.0, 1.5, f32::NEG_INFINITY], [4])?;
            for to in ["(P(sum))", "(P(max))", "(P(min))"] {
                let x =
                    DTensor::distribute(&mesh, &whole, Layout::replicated(1))?.redistribute(layout(to))?;
                assert_eq!(x.full_tensor()?.as_bytes(), whole.as_bytes(), "{to}");
            }
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
