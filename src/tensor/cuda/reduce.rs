//! Reductions over any dims along the summation tree, with the bits of `cpu::reduce`.
//!
//! There is one launch per dim, from the innermost reduced dim outwards, which is the order of the tree. A dim with
//! contiguous elements is reduced by rows, any other by columns (`kernels/cuda/reduce.cuh`). If there are too few rows to
//! keep the device busy, each row's topmost nodes are computed separately and a second launch joins them.

use super::gpu::Gpu;
use super::packs::{has_packed_leaves, is_aligned, pack_len};
use crate::error::{Error, Result};
use crate::tensor::{DType, LEAF, ReduceOp, Shape, SplitRule, Tensor, sort_by_key};

/// Reduces `x` over `dims`, as [`cpu::reduce`](crate::tensor::cpu::reduce) does.
///
/// # Errors
/// Returns the errors of [`cpu::reduce`](crate::tensor::cpu::reduce); also returns an error if the device is out of
/// memory.
pub(crate) fn reduce(
    verb: &str,
    x: &Tensor,
    dims: &[usize],
    op: ReduceOp,
    keep_dims: bool,
) -> Result<Tensor> {
    let mut dims = dims.to_vec();
    dims.sort_unstable();
    if dims.windows(2).any(|w| w[0] == w[1]) || dims.last().is_some_and(|&d| d >= x.shape().len()) {
        let given = format!("dims {dims:?} of {}", x.notation());
        return Err(Error::invalid(verb, "wants dims of the tensor, each once", given, ""));
    }
    if x.dtype() == DType::Bool {
        if op == ReduceOp::Sum {
            return Err(Error::invalid(verb, "bool has no arithmetic", x.notation(), "cast it first"));
        }
        return reduce(verb, &x.cast(DType::U8)?, &dims, op, keep_dims)?.cast(DType::Bool);
    }
    let kept: Shape =
        (0..x.shape().len()).map(|d| if dims.contains(&d) { 1 } else { x.shape()[d] }).collect();
    let out = match dims.split_last() {
        None => x.to_owned_copy()?,
        Some(_) if kept.numel() == 0 => Gpu::of(x)?.uninit(x.dtype(), kept.clone())?,
        Some(_) if x.numel() == 0 => {
            let mut out = Gpu::of(x)?.uninit(x.dtype(), kept.clone())?;
            super::fill(&mut out, if op == ReduceOp::Sum { 0.0 } else { op.identity(x.dtype()) })?;
            out
        }
        Some((&inner, outer)) => {
            let outer = outer.iter().rev().filter(|&&d| x.shape()[d] != 1).map(|&d| (d, LeafKind::One));
            let stages: Vec<(usize, LeafKind)> =
                std::iter::once((inner, LeafKind::Pairs)).chain(outer).collect();
            run_stages(verb, x.clone(), &stages, op, x.dtype())?
        }
    };
    let shape = match keep_dims {
        true => kept,
        false => (0..kept.len()).filter(|d| !dims.contains(d)).map(|d| kept[d]).collect(),
    };
    out.reshape(shape)
}

/// Sums over `dims`, which are ascending and stay with extent 1, in another dtype than `x`'s: f32 for f16 and bf16, i64
/// for narrower integers and bools. With `term`, sums its terms instead of the elements, in the dtype of its operand.
///
/// # Errors
/// Returns the errors of [`reduce`].
pub(crate) fn sum_to(
    verb: &str,
    x: &Tensor,
    dims: &[usize],
    term: Option<TermKernel>,
    to: DType,
) -> Result<Tensor> {
    let kept: Shape =
        (0..x.shape().len()).map(|d| if dims.contains(&d) { 1 } else { x.shape()[d] }).collect();
    if kept.numel() == 0 || x.numel() == 0 {
        return Gpu::of(x)?.zeros(to, kept);
    }
    // The first launch computes the terms, so it needs a dim: an element is a row of one.
    let Some((&inner, outer)) = dims.split_last() else {
        let (list, last) = (x.shape().iter().copied().chain([1]).collect::<Shape>(), x.shape().len());
        let with = term.map(|t| t.with.reshape(list.clone())).transpose()?;
        let term = term.zip(with.as_ref()).map(|(t, with)| TermKernel { with, ..t });
        return sum_to(verb, &x.reshape(list)?, &[last], term, to)?.reshape(kept);
    };
    let kernel = DimKernel { file: term.map_or("sum", |_| "terms"), term };
    let mut sums = reduce_dim(verb, x, inner, LeafKind::Pairs, kernel, to)?;
    for &d in outer.iter().rev().filter(|&&d| x.shape()[d] != 1) {
        sums = reduce_dim(verb, &sums, d, LeafKind::One, DimKernel::of(ReduceOp::Sum), to)?;
    }
    sums.reshape(kept)
}

/// Returns the product of each row of a matrix of f32, f64 or i64, which has elements: `[rows, n]` gives `[rows, 1]`.
///
/// # Errors
/// Returns the errors of [`reduce`].
pub(crate) fn product_of_rows(verb: &str, x: &Tensor) -> Result<Tensor> {
    reduce_dim(verb, x, 1, LeafKind::Pairs, DimKernel { file: "prod", term: None }, x.dtype())
}

/// A term of `kernels/cuda/terms.cu`.
#[derive(Clone, Copy)]
pub(crate) struct TermKernel<'a> {
    /// The entries for contiguous rows, for those whose leaves consist of packs, and for columns.
    pub stems: [&'static str; 3],
    /// The value of each row or column, in the result's dtype, with extent 1 at the reduced dims.
    pub with: &'a Tensor,
    /// The exponent of a power.
    pub power: f64,
}

/// The kernels that reduce one dim.
#[derive(Clone, Copy)]
struct DimKernel<'a> {
    file: &'static str,
    term: Option<TermKernel<'a>>,
}

impl DimKernel<'_> {
    fn of(op: ReduceOp) -> DimKernel<'static> {
        DimKernel { file: file(op), term: None }
    }
}

/// The leaves of a dim's tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeafKind {
    /// Leaves of up to 32 elements, whose neighbours are joined in pairs: the innermost dim.
    Pairs,
    /// Leaves of one element, joined by halving: all outer dims.
    One,
}

/// Reduces the dims of `stages`, one after the other, to an extent of 1. The result has dtype `to`; intermediate
/// results have the dtype that `to` is summed in.
pub(crate) fn run_stages(
    verb: &str,
    mut x: Tensor,
    stages: &[(usize, LeafKind)],
    op: ReduceOp,
    to: DType,
) -> Result<Tensor> {
    for (k, &(dim, leaf)) in stages.iter().enumerate() {
        let out = if k + 1 == stages.len() { to } else { wide(to) };
        x = reduce_dim(verb, &x, dim, leaf, DimKernel::of(op), out)?;
    }
    x.cast(to)
}

/// Returns the dtype that sums of `dtype` are kept in.
pub(crate) fn wide(dtype: DType) -> DType {
    if dtype.is_half() { DType::F32 } else { dtype }
}

/// The distribution of a dim's tree over a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TreeSpread {
    /// The tree has 2^depth leaves.
    pub depth: u32,
    /// 2^split nodes per row are joined by a second launch.
    pub split: u32,
    /// 2^team workers share a node, and join their parts in their block.
    pub team: u32,
}

/// The work of one worker, which is a warp or a thread: at most 2^most units of 2^unit leaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Worker {
    pub leaf: usize,
    pub unit: u32,
    pub most: u32,
}

/// A warp that reduces contiguous rows, eight leaves at a time.
const WARP: Worker = Worker { leaf: LEAF, unit: 3, most: 8 };
/// A thread that reduces a column.
pub(crate) const THREAD: Worker = Worker { leaf: LEAF, unit: 0, most: 11 };
/// A [`THREAD`] whose leaves are single elements: up to four elements, joining neighbours and halving are the same
/// tree.
const HALVING_THREAD: Worker = Worker { leaf: 4, unit: 0, most: 11 };

impl TreeSpread {
    /// Distributes `lines` lines of `n` elements. `busy` is the number of workers that keep the device busy.
    pub fn new(n: usize, lines: usize, busy: usize, worker: Worker) -> TreeSpread {
        let depth = SplitRule::Halves.depth(n, worker.leaf);
        let above = depth.saturating_sub(worker.unit);
        let workers = |levels: u32| lines.saturating_mul(1 << levels);
        let (mut team, mut split) = (0, 0);
        while team < above.min(3) && workers(team) < busy {
            team += 1;
        }
        // A second launch pays only if every worker still has several units.
        while above > team + split + 3 && workers(team + split) < busy {
            split += 1;
        }
        while above > team + split + worker.most {
            if team < 3 { team += 1 } else { split += 1 }
        }
        TreeSpread { depth, split, team }
    }
}

/// The dims that are not reduced; mirrors `struct KeptDims` of `kernels/cuda/reduce.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::NoUninit)]
pub(crate) struct KeptDims {
    from: [u64; 6],
    to: [u64; 6],
    len: [u32; 6],
    rank: u32,
    unused: u32,
}

impl KeptDims {
    /// Merges dims `(extent, stride in the operand, stride in the result)`, in any order. Returns `None` if they are
    /// too many or too large for a kernel.
    pub fn new(dims: impl Iterator<Item = (usize, usize, usize)>) -> Option<KeptDims> {
        let mut dims: Vec<_> = dims.filter(|d| d.0 != 1).collect();
        sort_by_key(&mut dims, |&(_, from, to)| (from, to));
        let mut joined: Vec<(usize, usize, usize)> = Vec::with_capacity(dims.len());
        for (len, from, to) in dims {
            match joined.last_mut() {
                Some(below) if from == below.1 * below.0 && to == below.2 * below.0 => below.0 *= len,
                _ => joined.push((len, from, to)),
            }
        }
        let mut nest = KeptDims { rank: joined.len() as u32, ..KeptDims::default() };
        if joined.len() > nest.len.len() || joined.iter().map(|d| d.0).product::<usize>() > u32::MAX as usize
        {
            return None;
        }
        for (d, (len, from, to)) in joined.into_iter().enumerate() {
            (nest.len[d], nest.from[d], nest.to[d]) = (len as u32, from as u64, to as u64);
        }
        Some(nest)
    }

    /// Returns true if all strides of the operand are multiples of `len` elements.
    fn are_multiples(&self, len: usize) -> bool {
        self.from[..self.rank as usize].iter().all(|&step| (step as usize).is_multiple_of(len))
    }

    /// Returns true if neighbouring indices are not neighbours in the operand's memory.
    fn is_scattered(&self) -> bool {
        self.rank > 0 && self.from[0] > 1
    }
}

fn reduce_dim(
    verb: &str,
    x: &Tensor,
    dim: usize,
    leaf: LeafKind,
    kernel: DimKernel,
    to: DType,
) -> Result<Tensor> {
    let gpu = Gpu::of(x)?;
    let (n, stride) = (x.shape()[dim], x.strides()[dim]);
    let lines = x.numel() / n;
    // One thread reads a row that is shorter than this.
    let by_rows = stride == 1 && n > 8;
    let worker = match (by_rows, leaf) {
        (true, _) => WARP,
        (false, LeafKind::Pairs) => THREAD,
        (false, LeafKind::One) => HALVING_THREAD,
    };
    let busy = gpu.multiprocessors() as usize * if by_rows { 32 } else { 1024 };
    let spread = TreeSpread::new(n, lines, busy, worker);
    let mut shape = x.shape().clone();
    shape[dim] = 1 << spread.split;
    let mut out = gpu.uninit(if spread.split > 0 { wide(to) } else { to }, shape)?;
    let others = (0..x.shape().len()).filter(|&d| d != dim);
    let nest = KeptDims::new(others.map(|d| (x.shape()[d], x.strides()[d], out.strides()[d])));
    // In a contiguous copy, the dim is either a row or a column of contiguous neighbours.
    let is_scattered = !by_rows && stride != 1 && n > 1 && nest.is_some_and(|nest| nest.is_scattered());
    let nest = match nest.filter(|_| !is_scattered || x.is_contiguous()) {
        Some(nest) if n <= i32::MAX as usize => nest,
        _ if !x.is_contiguous() => return reduce_dim(verb, &x.to_owned_copy()?, dim, leaf, kernel, to),
        _ => {
            let given = format!("dim {dim} of {}", x.notation());
            return Err(Error::unsupported(
                verb,
                "2^32 elements or more in one kernel",
                given,
                "reduce parts",
            ));
        }
    };
    // Leaves of outer dims are halved down to single elements, which differs unless their length is a power of two.
    let pairs = leaf == LeafKind::Pairs || (n >> spread.depth).is_power_of_two();
    let packed = by_rows
        && pairs
        && has_packed_leaves(n, spread.depth, x.dtype())
        && nest.are_multiples(pack_len(x.dtype()))
        && is_aligned(x);
    let kind = match (by_rows, packed) {
        (false, _) => LineKind::Columns,
        (true, true) if !matches!(kernel.file, "max" | "min") => LineKind::PackedRows,
        (true, _) => LineKind::Rows,
    };
    let (stem, key) = match kernel.term {
        Some(term) => (term.stems[kind as usize], x.dtype()),
        None => entry(kind, x.dtype(), out.dtype()),
    };
    let apart = out.strides()[dim] as u64;
    let with = kernel.term.map(|term| term.with.expand(out.shape())?.contiguous()).transpose()?;
    let launch = gpu.kernel(kernel.file, stem, key)?.read(x);
    let launch = if let Some(with) = &with { launch.read(with) } else { launch };
    let launch = launch.write(&mut out).arg(nest).arg(lines as u64);
    let launch = if by_rows { launch } else { launch.arg(stride as u64) };
    let TreeSpread { depth, split, team } = spread;
    let launch = launch.arg(apart).arg(n as u32).arg(depth).arg(split).arg(team);
    let launch = launch.arg(u32::from(leaf == LeafKind::One));
    let launch = if let Some(term) = kernel.term { launch.arg(term.power) } else { launch };
    if by_rows {
        let rows_per_block = if depth < 3 { 8 << (3 - depth) } else { 8 >> team };
        launch.start(((lines << split) as u64).div_ceil(rows_per_block) as u32, 256, 0)?;
    } else {
        launch.start([columns_blocks(lines, team), 1 << split, 1], [32, 8, 1], 0)?;
    }
    if split == 0 {
        return Ok(out);
    }
    let kernel = DimKernel { file: if kernel.term.is_some() { "sum" } else { kernel.file }, term: None };
    reduce_dim(verb, &out, dim, LeafKind::Pairs, kernel, to)
}

/// Returns the number of blocks of 32 x 8 threads if 2^team threads share a column.
pub(crate) fn columns_blocks(columns: usize, team: u32) -> u32 {
    columns.div_ceil(32 * (8 >> team)) as u32
}

fn file(op: ReduceOp) -> &'static str {
    match op {
        ReduceOp::Sum => "sum",
        ReduceOp::Max => "max",
        ReduceOp::Min => "min",
    }
}

/// The layout of the lines that are reduced, for which there are entries. Those of maxima and minima load packs of any
/// rows, and have none for packed ones.
#[derive(Clone, Copy)]
enum LineKind {
    Rows,
    PackedRows,
    Columns,
}

fn entry(lines: LineKind, from: DType, to: DType) -> (&'static str, DType) {
    let (stems, key) = if from == to {
        (["rows", "packed_rows", "columns"], from)
    } else if wide(from) == to || to == DType::I64 {
        (["wide_rows", "wide_packed_rows", "wide_columns"], from)
    } else {
        (["narrow_rows", "narrow_packed_rows", "narrow_columns"], to)
    };
    (stems[lines as usize], key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_spread_within_what_workers_take() {
        for worker in [WARP, THREAD, HALVING_THREAD] {
            for n in [1, 2, 31, 33, 129, 1000, 50_257, 1 << 20, i32::MAX as usize] {
                for lines in [1, 7, 1000, 1 << 20] {
                    let TreeSpread { depth, split, team } = TreeSpread::new(n, lines, 5000, worker);
                    let below = depth.saturating_sub(worker.unit);
                    assert!(n.div_ceil(1 << depth) <= worker.leaf && team <= 3, "{n} {lines} {worker:?}");
                    assert!(split + team <= below && below - split - team <= worker.most, "{n} {lines}");
                    assert!(split == 0 || lines << team < 5000 || below > 3 + worker.most, "{n} {lines}");
                    assert!(split <= 15, "blocks in y");
                }
            }
        }
    }

    #[test]
    fn dims_that_run_on_are_one() {
        let nest = KeptDims::new([(3, 40, 4), (5, 8, 1), (1, 7, 7), (2, 200, 12)].into_iter()).unwrap();
        assert_eq!((nest.rank, &nest.len[..3], &nest.from[..3]), (3, &[5, 3, 2][..], &[8, 40, 200][..]));
        let nest = KeptDims::new([(3, 40, 5), (5, 8, 1)].into_iter()).unwrap();
        assert_eq!((nest.rank, nest.len[0]), (1, 15));
        assert!(KeptDims::new((0..7).map(|d| (2, 3usize.pow(d), 2usize.pow(6 - d)))).is_none());
        assert!(KeptDims::new([(1 << 33, 1, 1)].into_iter()).is_none());
    }
}
