//! The judge of bits: an operator on the shards that its rows give each rank, in exact mode, compared bit for bit with a
//! single rank, on ordinary values.
//!
//! Values are normals times powers of ten, with zeros of either sign and the smallest numbers among them. Ranks are
//! simulated and exchange nothing. A row holds if
//! - shards of a sharded result are those of the single rank's result;
//! - for a partial operand: the operator applied to each rank's contribution to an *arbitrary* sum (maximum, minimum),
//!   and reduced afterwards, equals the operator applied to the reduced operand; in some elements contributions cancel
//!   or are zeros of either sign;
//! - for a sum to which one rank contributes each element: the sum equals the single rank's result;
//! - for a sum over sharded dims: the kernel run separately on every finished node of every rank, added up in the order
//!   of [`ReductionTree::fold_order`], equals the single rank's result, and so do all other results of these runs.

use crate::ops::{
    AxisPlacement, InputFill, MeshAxis, Meta, Op, Row, Sample, Tensors, Window, Windows, empty_box,
    eval_whole,
};
use crate::placement::{Layout, Mesh, Placement, ReductionTree, Region, Spec, TreeNode};
use crate::tensor::{DType, Dims, FoldOrder, FoldStep, ReduceOp, Shape, Tensor};
use crate::testing::shards::{elements_of, global_index};
use crate::testing::values::{bits_differ, first_difference, mix, ordinary, ordinary_values, tensor};

use super::axis_rows::{AxisCuts, by_boxes, placement, ragged_cuts, specs};
use super::local_evaluation::{eval_apart, have_common_boxes};
use super::verdict::Discrepancy;

/// The result of a judgement that finds no difference.
pub(super) enum RowOutcome {
    Holds,
    /// No tensor can have this layout.
    Illegal,
    /// Some rank holds less than a leaf of the reduction tree, so the engine takes another row.
    CutsALeaf,
}

/// The values that rows are judged with.
pub(super) struct BitsTrial<'a> {
    sample: &'a Sample,
    dtype: DType,
    ins: Vec<Tensor>,
    pub metas: Vec<Meta>,
    salt: u64,
}

impl<'a> BitsTrial<'a> {
    pub fn new(sample: &'a Sample, dtype: DType, salt: u64) -> BitsTrial<'a> {
        let mut ins = ordinary_values(sample, dtype, salt);
        for (i, x) in ins.iter_mut().enumerate() {
            if sample.ins[i].fill == InputFill::Ints && x.dtype().is_float() {
                *x = awkward(x, salt + 100 * i as u64);
            }
        }
        make_consistent(sample.op.as_ref(), &mut ins);
        let metas = ins.iter().map(Meta::of).collect();
        BitsTrial { sample, dtype, ins, metas, salt }
    }

    pub fn op(&self) -> &dyn Op {
        self.sample.op.as_ref()
    }

    /// Returns operand `i` as `n` partial values under `op`: arbitrary ones, not shares of one value.
    fn parts(&self, i: usize, op: ReduceOp, n: usize, dtype: DType) -> Vec<Tensor> {
        let (meta, fill) = (&self.metas[i], self.sample.ins[i].fill);
        let tiny = smallest(dtype);
        let value = |of: &[f64], e: usize, m: usize| {
            let h = mix(e as u64 ^ self.salt << 32 ^ (i as u64) << 48);
            let own = of[e * n + m];
            match (fill, op, h % 8) {
                (InputFill::Index(_) | InputFill::Slots(_) | InputFill::Bools, ..) => {
                    (mix(h + m as u64) % 5) as f64
                }
                (InputFill::Positive | InputFill::Unit, ..) => own.abs().clamp(1e-3, 1e3),
                (InputFill::InsideUnit, ..) => own.abs().clamp(1e-3, 0.99),
                (InputFill::AboveOne, ..) => 1.0 + own.abs().clamp(1e-3, 1e3),
                (_, ReduceOp::Sum, 0) => [of[e * n], -of[e * n], -0.0][m.min(2)],
                (_, ReduceOp::Sum, 1) => -0.0,
                (_, ReduceOp::Sum, 2) => tiny,
                (_, _, 0..4) => [0.0, -0.0][(h as usize >> 8 >> m) % 2],
                _ => own,
            }
        };
        let numel = meta.shape.numel();
        let of = ordinary(DType::F64, &Shape::from([numel * n]), self.salt + 50 + i as u64).to_f64_vec();
        let part = |m: usize| (0..numel).map(|e| value(&of, e, m)).collect::<Vec<f64>>();
        (0..n).map(|m| tensor(dtype, &part(m), &meta.shape)).collect()
    }
}

/// Returns `x` with zeros of both signs, and the smallest numbers, among its elements.
fn awkward(x: &Tensor, salt: u64) -> Tensor {
    let tiny = smallest(x.dtype());
    let value = |(e, v): (usize, f64)| match mix(e as u64 ^ salt << 40) % 16 {
        0 => 0.0,
        1 => -0.0,
        2 => tiny.copysign(v),
        _ => v,
    };
    tensor(x.dtype(), &x.to_f64_vec().into_iter().enumerate().map(value).collect::<Vec<_>>(), x.shape())
}

fn smallest(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => f64::from(f32::from_bits(1)),
        DType::BF16 => half::bf16::from_bits(1).to_f64(),
        DType::F16 => half::f16::from_bits(1).to_f64(),
        _ => f64::from_bits(1),
    }
}

/// Makes statistics fit their operands: an exponential of their distance must not be infinite everywhere.
fn make_consistent(op: &dyn Op, ins: &mut [Tensor]) {
    let metas: Vec<Meta> = ins.iter().map(Meta::of).collect();
    for statistic in op.statistics(&metas) {
        let of: Vec<Tensor> = statistic.of.iter().map(|&i| ins[i].clone()).collect();
        let outs = eval_whole(statistic.op.as_ref(), &of).expect("the operands are that operator's");
        ins[statistic.operand] = outs[statistic.result].clone();
    }
}

/// One row per mesh axis.
pub(super) struct BitsCase<'a> {
    pub trial: &'a BitsTrial<'a>,
    pub mesh: &'a Mesh,
    pub rows: &'a [Row],
    /// The axes in the order in which they split a dim, the outermost first.
    pub order: &'a [usize],
}

impl BitsCase<'_> {
    /// Judges the rows together, for every ragged cut that fits.
    pub fn judge(&self) -> Result<RowOutcome, Discrepancy> {
        let mut best = RowOutcome::Illegal;
        let rows = (self.rows, self.order);
        for cuts in ragged_cuts(self.trial.op(), self.mesh, rows, &self.trial.metas) {
            match self.judge_one(&cuts)? {
                RowOutcome::Illegal => {}
                _ if matches!(best, RowOutcome::Holds) => {}
                other => best = other,
            }
        }
        Ok(best)
    }

    fn judge_one(&self, cuts: &AxisCuts) -> Result<RowOutcome, Discrepancy> {
        let sums_pass = self.rows.iter().any(|r| r.ins.contains(&AxisPlacement::SUM));
        if self.trial.dtype.is_half() && sums_pass && self.rows.iter().all(|r| r.by_bits) {
            // Partial sums that follow the reduction tree are stored in f32 and rounded when the sum is complete.
            self.judge_stored(cuts, true)?;
        }
        self.judge_stored(cuts, false)
    }

    fn judge_stored(&self, cuts: &AxisCuts, wide: bool) -> Result<RowOutcome, Discrepancy> {
        let BitsCase { trial, mesh, rows, order } = self;
        let out_metas = trial.op().infer(&trial.metas).expect("the trial's operands fit");
        let ins = specs(mesh, (rows, order), &trial.metas, cuts, |r| &r.ins);
        let outs = specs(mesh, (rows, order), &out_metas, cuts, |r| &r.outs);
        let (Some(ins), Some(outs)) = (ins, outs) else { return Ok(RowOutcome::Illegal) };
        let operands: Vec<PartialOperand> =
            ins.into_iter().enumerate().map(|(i, s)| PartialOperand::new(trial, i, s, wide)).collect();
        let specs: Vec<Spec> = operands.iter().map(|o| o.spec.clone()).collect();
        let fails = |what: String| Discrepancy::new(&specs, None, what);
        let wholes: Vec<Tensor> = operands.iter().map(|o| o.whole.clone()).collect();
        let want = eval_whole(trial.op(), &wholes).map_err(|e| fails(e.to_string()))?;
        let tree: Vec<Option<ReductionTree>> = (0..outs.len()).map(|k| self.tree(k, cuts)).collect();
        if tree.iter().flatten().any(|t| t.most_nodes(mesh).is_none()) {
            return Ok(RowOutcome::CutsALeaf);
        }
        let found = match tree.iter().position(Option::is_some) {
            // The dispatcher runs a kernel once per node or once per box, but not both.
            Some(k) if self.has_boxes_beside_sums(k, cuts) => return Ok(RowOutcome::Illegal),
            Some(k) => self.under_nodes(&operands, &outs, &tree, k, &want),
            None => {
                let by_boxes = by_boxes(trial.op(), mesh, rows, &trial.metas, cuts);
                let passes = rows.iter().any(|r| r.ins.contains(&AxisPlacement::SUM));
                if by_boxes && (passes || !have_common_boxes(&specs, &outs)) {
                    return Ok(RowOutcome::Illegal);
                }
                self.apart(&operands, &outs, by_boxes)
            }
        };
        let found = found.map_err(fails)?;
        for (k, (spec, whole)) in outs.iter().zip(&want).enumerate() {
            let of = |rank: usize| found[rank][k].as_slice();
            if let Some(what) = self.differs(spec, tree[k].as_ref(), whole, of) {
                return Err(Discrepancy::new(&specs, Some((k, spec)), what));
            }
        }
        Ok(RowOutcome::Holds)
    }

    /// Returns true if some row that does not make the sum `k` runs the kernel once per box.
    fn has_boxes_beside_sums(&self, k: usize, cuts: &AxisCuts) -> bool {
        let others = self.rows.iter().zip(cuts);
        let others: AxisCuts =
            others.map(|(r, cut)| cut.filter(|_| r.outs[k].tree_leaf().is_none())).collect();
        by_boxes(self.trial.op(), self.mesh, self.rows, &self.trial.metas, &others)
    }

    /// Returns the reduction tree of result `k`, from the rows that cut one dim each.
    fn tree(&self, k: usize, cuts: &AxisCuts) -> Option<ReductionTree> {
        let summed = |r: &Row| matches!(r.outs[k], AxisPlacement::TreeSum(_));
        let leaf = self
            .rows
            .iter()
            .find_map(|r| if let AxisPlacement::TreeSum(leaf) = r.outs[k] { Some(leaf) } else { None })?;
        let dims = self.term_rows(k);
        let extent = |r: &Row| {
            let mut cut = r.ins.iter().zip(&self.trial.metas);
            cut.find_map(|(s, m)| if let AxisPlacement::S(d) = *s { Some(m.shape[d]) } else { None })
                .expect("a cut operand")
        };
        let place = |(a, r): (usize, &Row)| match summed(r) {
            false => Placement::Replicate,
            true if r.takes_ragged() => {
                placement(AxisPlacement::Ragged, cuts[a], self.mesh.axis_len(a)).expect("the operand lies so")
            }
            true => Placement::Shard(
                dims.iter().position(|d| d.ins == r.ins).expect("a row that cuts a summed dim"),
            ),
        };
        let layout =
            Layout::new(self.rows.iter().enumerate().map(place)).with_order(self.order).expect("an order");
        Some(ReductionTree::new(dims.iter().map(extent).collect(), leaf, layout))
    }

    fn term_rows(&self, k: usize) -> Vec<Row> {
        let mut rows = self.trial.op().rows(&self.trial.metas, MeshAxis::new(1));
        rows.retain(|r| matches!(r.outs[k], AxisPlacement::TreeSum(_)) && !r.takes_ragged());
        rows
    }

    /// Runs the operator on each rank's whole shards. Returns one part per rank and result.
    fn apart(
        &self,
        operands: &[PartialOperand],
        outs: &[Spec],
        by_boxes: bool,
    ) -> Result<Vec<Vec<Vec<Tensor>>>, String> {
        let parts: Vec<Vec<Tensor>> = operands.iter().map(|o| o.locals()).collect();
        let with: Vec<(&Spec, &[Tensor])> =
            operands.iter().zip(&parts).map(|(o, p)| (&o.spec, p.as_slice())).collect();
        let found = eval_apart(self.trial.op(), &with, outs, by_boxes)?;
        Ok(found.into_iter().map(|outs| outs.into_iter().map(|t| vec![t]).collect()).collect())
    }

    /// Runs the operator under each node that a rank holds. Returns one part per node for sums over terms; compares
    /// other results with `want`, and leaves them out.
    fn under_nodes(
        &self,
        operands: &[PartialOperand],
        outs: &[Spec],
        tree: &[Option<ReductionTree>],
        k: usize,
        want: &Tensors,
    ) -> Result<Vec<Vec<Vec<Tensor>>>, String> {
        let (dims, forest_of) = (self.term_rows(k), tree[k].as_ref().expect("asked for it"));
        let widen = outs.iter().zip(tree).any(|(s, t)| t.is_some() && s.dtype.is_half());
        let mut all = Vec::new();
        for rank in self.mesh.ranks() {
            let coords = self.mesh.coords_of(rank).expect("a rank of the mesh");
            let mut found: Vec<Vec<Tensor>> = vec![Vec::new(); outs.len()];
            for node in forest_of.finished_nodes(self.mesh, &coords).expect("it fits") {
                let window = |spec: &Spec, placement_in: &dyn Fn(&Row) -> AxisPlacement| {
                    under(spec, &coords, &node, &dims, placement_in)
                };
                let at = Windows {
                    ins: operands.iter().enumerate().map(|(i, o)| window(&o.spec, &|r| r.ins[i])).collect(),
                    outs: outs.iter().enumerate().map(|(o, s)| window(s, &|r| r.outs[o])).collect(),
                    exact: true,
                };
                let part = |(o, w): (&PartialOperand, &Window)| {
                    let x = cut(&o.shares[o.share_of(&coords)], w);
                    if widen && x.dtype().is_half() { rounded(&x, DType::F32) } else { x }
                };
                let mut locals: Tensors = operands.iter().zip(&at.ins).map(part).collect();
                let outs = self.trial.op().eval(&mut locals, &at).map_err(|e| e.to_string())?;
                for (o, part) in outs.into_iter().enumerate() {
                    if tree[o].is_some() {
                        found[o].push(part.contiguous().expect("it is in memory"));
                        continue;
                    }
                    let want = cut(&want[o], &at.outs[o]);
                    if let Some(what) = bits_differ(&rounded(&part, want.dtype()), &want) {
                        return Err(format!("result {o} of rank {rank} under {node:?}: {what}"));
                    }
                }
            }
            all.push(found);
        }
        Ok(all)
    }

    /// Describes a difference between the parts of one result, by rank, and the parts of the whole; `None` if there
    /// is none.
    fn differs<'p>(
        &self,
        spec: &Spec,
        tree: Option<&ReductionTree>,
        whole: &Tensor,
        parts: impl Fn(usize) -> &'p [Tensor],
    ) -> Option<String> {
        let open: Vec<usize> = spec
            .layout
            .placements()
            .iter()
            .enumerate()
            .filter(|(_, p)| p.is_partial())
            .map(|(a, _)| a)
            .collect();
        let made: Vec<usize> = tree.iter().flat_map(|t| t.open_axes()).collect();
        assert!(tree.is_none() || made == open, "no operator makes sums beside others that pass");
        if parts(0).is_empty() && tree.is_none() {
            return None;
        }
        for rank in self.mesh.ranks() {
            let coords = self.mesh.coords_of(rank).expect("a rank of the mesh");
            if open.iter().any(|&a| coords[a] != 0) {
                continue;
            }
            let region = spec.region_at(&coords);
            let members = along(self.mesh, &coords, &open);
            let order = match tree {
                Some(tree) => tree.fold_order(self.mesh, &coords, &members, &open),
                None => nested(&open.iter().map(|&a| self.mesh.axis_len(a)).collect::<Vec<_>>()),
            };
            let op = open.first().map_or(ReduceOp::Sum, |&a| match spec.layout.axis(a) {
                Placement::Partial(op) => *op,
                _ => unreachable!("an open axis is partial"),
            });
            let dtype = if tree.is_some() && spec.dtype.is_half() { DType::F32 } else { spec.dtype };
            let part = |m: usize, node: usize| parts(self.mesh.position_of(&members[m]))[node].clone();
            let got = match fold(op, &order, part, || Tensor::zeros(dtype, region.local.clone())) {
                Ok(got) => rounded(&got, spec.dtype),
                Err(e) => return Some(e),
            };
            let want = elements_of(whole, &region);
            if (got.shape(), got.dtype()) != (want.shape(), want.dtype()) {
                return Some(format!("rank {rank} has {} instead of {}", got.notation(), want.notation()));
            }
            if let Some((place, values)) = first_difference(&got, &want) {
                let e = global_index(&region, &spec.shape, place);
                return Some(format!("rank {rank}, element {e}: {values}"));
            }
        }
        None
    }
}

/// An operand in the layout that the rows give it.
struct PartialOperand {
    spec: Spec,
    /// For a `Partial` operand one value per rank along those axes, for all indices; else the whole operand.
    shares: Vec<Tensor>,
    whole: Tensor,
}

impl PartialOperand {
    fn new(trial: &BitsTrial, i: usize, spec: Spec, wide: bool) -> PartialOperand {
        let op = spec
            .layout
            .placements()
            .iter()
            .find_map(|p| if let Placement::Partial(op) = p { Some(*op) } else { None });
        let Some(op) = op else {
            return PartialOperand { spec, shares: vec![trial.ins[i].clone()], whole: trial.ins[i].clone() };
        };
        let lens: Vec<usize> = PartialOperand::open(&spec).map(|a| spec.mesh.axis_len(a)).collect();
        let n = lens.iter().product();
        let dtype = if wide && op == ReduceOp::Sum && spec.dtype.is_half() { DType::F32 } else { spec.dtype };
        let shares = trial.parts(i, op, n, dtype);
        let whole = fold(op, &nested(&lens), |m, _| shares[m].clone(), || unreachable!("a rank has a part"));
        let whole = rounded(&whole.expect("parts of one shape"), spec.dtype);
        PartialOperand { spec, shares, whole }
    }

    fn open(spec: &Spec) -> impl Iterator<Item = usize> + '_ {
        (0..spec.mesh.ndim()).filter(|&a| spec.layout.axis(a).is_partial())
    }

    fn share_of(&self, coords: &[usize]) -> usize {
        PartialOperand::open(&self.spec).fold(0, |at, a| at * self.spec.mesh.axis_len(a) + coords[a])
    }

    fn locals(&self) -> Vec<Tensor> {
        let local = |rank: usize| {
            let coords = self.spec.mesh.coords_of(rank).expect("a rank of the mesh");
            elements_of(&self.shares[self.share_of(&coords)], &self.spec.region_at(&coords))
        };
        self.spec.mesh.ranks().map(local).collect()
    }
}

/// Returns the numbers in another dtype, rounded once.
fn rounded(x: &Tensor, dtype: DType) -> Tensor {
    if x.dtype() == dtype { x.clone() } else { tensor(dtype, &x.to_f64_vec(), x.shape()) }
}

/// Returns the coordinates that differ from `coords` along `axes` only, in row-major order.
fn along(mesh: &Mesh, coords: &[usize], axes: &[usize]) -> Vec<Dims> {
    let all = mesh.ranks().map(|r| mesh.coords_of(r).expect("a rank of the mesh"));
    all.filter(|c| (0..c.len()).all(|a| axes.contains(&a) || c[a] == coords[a])).collect()
}

/// Returns the box of a rank's elements that lies under `node`.
fn under(
    spec: &Spec,
    coords: &[usize],
    node: &TreeNode,
    dims: &[Row],
    placement_in: &dyn Fn(&Row) -> AxisPlacement,
) -> Window {
    let region = spec.region_at(coords);
    let (mut start, mut len): (Dims, Dims) = match region.boxes.first() {
        Some(b) => (b.start.clone(), b.len.clone()),
        None => (Dims::from_elem(0, spec.shape.len()), empty_box(&spec.shape, &region.local)),
    };
    for (j, row) in dims.iter().enumerate() {
        if let AxisPlacement::S(d) = placement_in(row) {
            (start[d], len[d]) = (node.start[j], node.len[j]);
        }
    }
    Window { global: spec.shape.clone(), region: Region::of_box(start, Shape::from(len)) }
}

/// Copies the elements of a box.
fn cut(whole: &Tensor, at: &Window) -> Tensor {
    if at.region.is_empty() {
        return Tensor::zeros(whole.dtype(), at.local().clone());
    }
    let narrow = |t: Tensor, d: usize| t.narrow(d, at.start(d), at.local()[d]).expect("a box of the whole");
    (0..whole.shape().len()).fold(whole.clone(), narrow).to_owned_copy().expect("it is in memory")
}

/// Folds parts in the given order until one is left.
fn fold(
    op: ReduceOp,
    order: &FoldOrder,
    part: impl Fn(usize, usize) -> Tensor,
    empty: impl Fn() -> Tensor,
) -> Result<Tensor, String> {
    let mut stack: Vec<Tensor> = Vec::new();
    for step in order.steps() {
        match *step {
            FoldStep::Push { operand: member, node } => {
                stack.push(part(member, node).to_owned_copy().expect("it is in memory"))
            }
            FoldStep::Empty => stack.push(empty()),
            FoldStep::Join => {
                let right = stack.pop().expect("two entries");
                let left = stack.last_mut().expect("two entries");
                if left.shape() != right.shape() {
                    return Err(format!("parts {} and {}", left.notation(), right.notation()));
                }
                op.fold(left, &right).map_err(|e| e.to_string())?;
            }
        }
    }
    if stack.len() != 1 {
        return Err(format!("{} entries are left", stack.len()));
    }
    Ok(stack.swap_remove(0))
}

/// Returns the order in which a sum without a tree is folded: one part per member, row-major over the lengths of its
/// axes; the range of the first axis is halved down to single indices, then that of the next axis.
fn nested(lens: &[usize]) -> FoldOrder {
    fn fold(lens: &[usize], base: usize, from: usize, to: usize, steps: &mut Vec<FoldStep>) {
        if to - from > 1 {
            let mid = from + (to - from).div_ceil(2);
            fold(lens, base, from, mid, steps);
            fold(lens, base, mid, to, steps);
            return steps.push(FoldStep::Join);
        }
        match lens.split_first() {
            Some((len, [])) => steps.push(FoldStep::Push { operand: base * len + from, node: 0 }),
            Some((len, inner)) => fold(inner, base * len + from, 0, inner[0], steps),
            None => steps.push(FoldStep::Push { operand: 0, node: 0 }),
        }
    }
    let mut steps = Vec::new();
    fold(lens, 0, 0, lens.first().copied().unwrap_or(1), &mut steps);
    FoldOrder::new(vec![1; lens.iter().product()], steps)
}
