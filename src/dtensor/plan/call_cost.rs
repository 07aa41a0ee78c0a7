//! The modelled time of one call for a sharding of it: the measure by which rows are chosen.

use std::rc::Rc;

use smallvec::SmallVec;

use super::move_cost::{MoveCost, largest_rank, of_move, smallest_rank};
use super::row_product::{ChosenLayouts, RowProduct};
use super::work_share::part_of_elements;
use crate::comm::Cost;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::redistribute::{RankSamples, cheapest_time, peers};
use crate::ops::{Meta, Op, Work};
use crate::placement::{Layout, Mesh, Placement, ShardBounds, Spec};
use crate::tensor::{DType, Dims, Shape, short_list};

/// The cost of a call, compared in the order of the fields; less is better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::dtensor) struct CallCost {
    /// True if an operand moves though the program asks for calls that [keep layouts](DeviceMesh::keep_layouts).
    moves: bool,
    /// The bytes above the machine's limit that moved operands and results take.
    over_limit: u64,
    /// The time of each move for the rank that is slowest in it, one move after the other, then that of the kernel.
    pub time: Cost,
    /// True if some rank has no part of the call: equal times go to the shardings that give all ranks some.
    idle: bool,
    /// The elements of the results on the rank that holds most, for the better balanced results.
    held: u64,
    /// The bytes of each move for the rank that receives most, added up.
    pub bytes: u64,
}

/// Computes the costs of one call's shardings.
pub(in crate::dtensor) struct CallModel<'a> {
    pub mesh: &'a DeviceMesh,
    pub ins: &'a [&'a Rc<TensorMeta>],
    pub metas: &'a [Meta],
    pub outs: &'a [Meta],
    work: Work,
    ranks: RankSamples,
    /// The costs of moves computed so far, by operand and layout: in one step, and by the planner.
    moves: Vec<(usize, Layout, MoveCost)>,
    planned: Vec<(usize, Layout, MoveCost)>,
    least: Cost,
}

/// Returns the axes of more than one rank along which a call leaves a result unreduced that no operand was.
pub(in crate::dtensor) fn made_sums(mesh: &Mesh, chosen: &ChosenLayouts, out: &TensorMeta) -> Dims {
    let open = |f: &TensorMeta, a: usize| f.layout().axis(a).is_partial();
    let made = |&a: &usize| mesh.axis_len(a) > 1 && open(out, a) && !chosen.ins.iter().any(|f| open(f, a));
    (0..mesh.ndim()).filter(made).collect()
}

/// Returns those of `axes` along which an operand changes its placement.
pub(in crate::dtensor) fn moved_axes(
    axes: &[usize],
    ins: &[&Rc<TensorMeta>],
    chosen: &ChosenLayouts,
) -> Dims {
    let moves =
        |a: usize| ins.iter().zip(&chosen.ins).any(|(f, to)| f.layout().axis(a) != to.layout().axis(a));
    axes.iter().copied().filter(|&a| moves(a)).collect()
}

impl CallCost {
    /// Returns true if no call costs less, given the least time of its kernel.
    pub fn is_least(&self, kernel: Cost) -> bool {
        !self.moves && self.over_limit == 0 && self.time <= kernel
    }
}

impl<'a> CallModel<'a> {
    pub fn new(
        mesh: &'a DeviceMesh,
        op: &dyn Op,
        ins: &'a [&'a Rc<TensorMeta>],
        metas: &'a [Meta],
        outs: &'a [Meta],
    ) -> CallModel<'a> {
        let ranks = RankSamples::new(mesh.mesh(), ins.iter().map(|f| f.layout()));
        let work = op.work(metas, outs);
        let (moves, planned) = (Vec::new(), Vec::new());
        let mut model =
            CallModel { mesh, ins, metas, outs, work, ranks, moves, planned, least: Cost::default() };
        // No sharding divides the work by more ranks than those along axes that shard or reduce an operand.
        let used = |a: &usize| ins.iter().any(|f| !f.layout().axis(*a).is_replicate());
        let most: usize = (0..mesh.mesh().ndim()).filter(used).map(|a| mesh.mesh().axis_len(a)).product();
        model.least = model.kernel_time(1.0 / most as f64);
        model
    }

    /// Returns a lower bound on the time of the call's kernel.
    pub fn least_time(&self) -> Cost {
        self.least
    }

    /// Returns the time of moving operand `i` along axis `a` alone.
    pub fn along_axis(&mut self, i: usize, a: usize, to: Placement) -> Cost {
        let from = self.ins[i].layout();
        if *from.axis(a) == to {
            return Cost::default();
        }
        // A ragged shard along another axis may not admit this one: they can only be changed together.
        let others_kept = from.set(a, to.clone());
        let alone = Layout::replicated(from.ndim()).set(a, to);
        let layout = [others_kept, alone].into_iter().find(|layout| self.fits(&self.metas[i], layout));
        layout.map_or(Cost::INFINITE, |layout| self.of_move(i, &layout).time)
    }

    /// Returns the cost of a product of rows without that of reducing its results, or `None` if it is above `limit`.
    pub fn cost(&mut self, product: &RowProduct<'_>, limit: Option<CallCost>) -> Option<CallCost> {
        let layouts = |count: usize, of: &dyn Fn(usize) -> Option<Layout>| -> Option<SmallVec<[Layout; 3]>> {
            (0..count).map(of).collect()
        };
        let ins = layouts(self.ins.len(), &|i| product.layout(&|r| r.ins[i]).ok())?;
        let outs = layouts(self.outs.len(), &|k| product.layout(&|r| r.outs[k]).ok())?;
        let all = || self.metas.iter().chain(self.outs).zip(ins.iter().chain(&outs));
        if !all().all(|(meta, layout)| self.fits(meta, layout)) {
            return None;
        }
        let shapes = self.metas.iter().chain(self.outs).map(|m| &m.shape);
        let tensors: SmallVec<[(&Shape, &Layout); 6]> = short_list(shapes.zip(ins.iter().chain(&outs)));
        let largest = largest_rank(ins.iter().chain(&outs));
        let part = part_of_elements(self.mesh.mesh(), &tensors, &largest);
        let mut cost = CallCost { time: self.kernel_time(part), ..CallCost::default() };
        let above = |cost: &CallCost| {
            limit.is_some_and(|limit| !limit.moves && limit.over_limit == 0 && cost.time > limit.time)
        };
        for (i, to) in ins.iter().enumerate() {
            if above(&cost) {
                return None;
            }
            let moved = self.of_planned(i, to);
            cost.time = cost.time + moved.time;
            cost.bytes = cost.bytes.saturating_add(moved.bytes);
        }
        if above(&cost) || cost.time == Cost::INFINITE {
            return None;
        }
        cost.moves = self.mesh.keeps_layouts() && cost.bytes > 0;
        let held = |meta: &Meta, layout: &Layout| {
            ShardBounds::at(self.mesh.mesh(), layout, &meta.shape, &largest).numel()
        };
        let bytes = |meta: &Meta, layout: &Layout| meta.dtype.bytes_of(held(meta, layout));
        cost.idle = part_of_elements(
            self.mesh.mesh(),
            &tensors,
            &smallest_rank(ins.iter().chain(&outs), self.mesh.mesh()),
        ) == 0.0;
        cost.held = self.outs.iter().zip(&outs).map(|(m, l)| held(m, l) as u64).fold(0, u64::saturating_add);
        if let Some(limit) = self.mesh.rank().machine().call_memory_bytes {
            let moved = (0..ins.len()).filter(|&i| ins[i] != *self.ins[i].layout());
            let moved = moved.map(|i| bytes(&self.metas[i], &ins[i]));
            let made = self.outs.iter().zip(&outs).map(|(m, l)| bytes(m, l));
            cost.over_limit = moved.chain(made).fold(0, u64::saturating_add).saturating_sub(limit);
        }
        Some(cost)
    }

    /// Adds the time that unreduced results will take to reduce: for each node beyond one, and for sums that exist only
    /// because an operand moved. A sum over dims that the program's own layouts shard counts nothing: whatever reads it
    /// decides how it is reduced.
    pub fn with_reductions(&self, mut cost: CallCost, chosen: &ChosenLayouts) -> CallCost {
        for out in &chosen.outs {
            let made = made_sums(self.mesh.mesh(), chosen, out);
            if made.is_empty() {
                continue;
            }
            let tree = out.spec().tree.as_ref();
            let more = tree.map_or(0, |tree| self.mesh.most_nodes(tree).unwrap_or(1).saturating_sub(1));
            let held = out.spec().local_shape_at(&largest_rank([out.layout()].into_iter())).numel();
            let moved = moved_axes(&made, self.ins, chosen);
            let members: usize = moved.iter().map(|&a| self.mesh.mesh().axis_len(a)).product();
            let elements = more.saturating_mul(held).saturating_add(held / members * (members - 1));
            if elements > 0 {
                let bytes = out.spec().stored_dtype().bytes_of(elements);
                let axes = if moved.is_empty() { &made } else { &moved };
                let along = peers(self.mesh.rank().network(), self.mesh.mesh(), axes);
                cost.time = cost.time + along.cost(0, bytes);
            }
        }
        cost
    }

    /// Returns true unless a ragged shard does not fit the tensor. Rows shard only dims that exist.
    fn fits(&self, meta: &Meta, layout: &Layout) -> bool {
        layout.ragged_axis().is_none()
            || Spec::new(self.mesh.mesh(), meta.dtype, meta.shape.clone(), layout.clone()).is_ok()
    }

    fn kernel_time(&self, part: f64) -> Cost {
        let of = |n: u64| (n as f64 * part).ceil() as u64;
        let dtype = self.metas.first().map_or(DType::F32, |m| m.dtype);
        self.mesh.rank().machine().time(dtype, of(self.work.flops), of(self.work.bytes))
    }

    fn of_move(&mut self, i: usize, to: &Layout) -> MoveCost {
        if self.ins[i].layout() == to {
            return MoveCost::default();
        }
        if let Some((.., cost)) = self.moves.iter().find(|(j, layout, _)| *j == i && layout == to) {
            return *cost;
        }
        let cost = of_move(self.mesh, self.ins[i], to, &self.ranks);
        self.moves.push((i, to.clone(), cost));
        cost
    }

    /// Returns the cost of operand `i`'s move by the plan that will run. Without a reduction and with links of one speed,
    /// one exchange is the cheapest; otherwise the planner may find a cheaper path.
    fn of_planned(&mut self, i: usize, to: &Layout) -> MoveCost {
        let direct = self.of_move(i, to);
        let network = self.mesh.rank().network();
        let from = self.ins[i].layout();
        let folds = (0..to.ndim()).any(|a| from.axis(a).is_partial() && from.axis(a) != to.axis(a));
        if !folds && network.levels().len() == 1 || direct.bytes == 0 || direct.time == Cost::INFINITE {
            return direct;
        }
        if let Some((.., cost)) = self.planned.iter().find(|(j, layout, _)| *j == i && layout == to) {
            return *cost;
        }
        let planned = cheapest_time(self.ins[i].spec(), to, network).unwrap_or(direct.time);
        let cost = MoveCost { time: (Cost::LEAST + planned).min(direct.time), bytes: direct.bytes };
        self.planned.push((i, to.clone(), cost));
        cost
    }
}
