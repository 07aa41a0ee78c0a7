//! CUDA kernels that read elements and rows by index, and of their derivatives, which add by destination.

use super::lines::DimLines;
use crate::error::{Error, Result};
use crate::ops::index::radix;
use crate::tensor::cuda::Gpu;
use crate::tensor::cuda::fault::Fault;
use crate::tensor::cuda::reduce::wide;
use crate::tensor::{DType, LEAF, Shape, SplitRule, Tensor};

static EMBEDDING_GRAD: Fault = Fault::index(401, "embedding_grad");
static GATHER: Fault = Fault::index(402, "gather");
pub(super) static SCATTER_ADD: Fault = Fault::index(403, "scatter_add");

/// The position of a rank's shard of a dim. The shard's length is the local tensor's extent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldRange {
    /// The global extent.
    pub n: usize,
    /// The first global index that the rank stores.
    pub start: usize,
}

pub(super) const THREADS: u32 = 256;
/// The maximum number of blocks; the kernels loop over further elements.
const BLOCKS: usize = 1 << 20;

/// `struct Places` of `kernels/cuda/gather.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default, bytemuck::NoUninit)]
struct GatherPlaces {
    x: [u64; 6],
    index: [u64; 6],
    len: [u32; 6],
    rank: u32,
    unused: u32,
}

impl GatherPlaces {
    /// Returns the strides and extents of the index's dims, neighbours merged, or `None` if a kernel cannot take that
    /// many dims.
    fn new(x: &Tensor, index: &Tensor, dim: usize) -> Option<GatherPlaces> {
        let mut places = GatherPlaces::default();
        let mut rank = 0usize;
        for d in (0..index.shape().len()).rev().filter(|&d| index.shape()[d] != 1) {
            let along_x = if d == dim { 0 } else { x.strides()[d] as u64 };
            let (along_index, len) = (index.strides()[d] as u64, u32::try_from(index.shape()[d]).ok()?);
            let below = rank.wrapping_sub(1);
            let runs_on = rank > 0
                && along_x == places.x[below] * u64::from(places.len[below])
                && along_index == places.index[below] * u64::from(places.len[below]);
            match places.len.get(below).and_then(|n| n.checked_mul(len)) {
                Some(joint) if runs_on => places.len[below] = joint,
                _ if rank == 6 => return None,
                _ => {
                    (places.x[rank], places.index[rank], places.len[rank]) = (along_x, along_index, len);
                    rank += 1;
                }
            }
        }
        places.rank = rank as u32;
        Some(places)
    }
}

/// Reads `x[.., index[.., k, ..], ..]` along `dim`, into the index's shape. Elements that this rank does not store
/// become -0.
///
/// # Errors
/// Returns an error if the device has no memory left or the launch fails, and refuses tensors with more dims than a kernel takes.
pub(crate) fn gather(x: &Tensor, index: &Tensor, dim: usize, indices: HeldRange) -> Result<Tensor> {
    let gpu = Gpu::of(x)?;
    let mut out = gpu.uninit(x.dtype(), index.shape())?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let places = GatherPlaces::new(x, index, dim).ok_or_else(|| {
        Error::unsupported(
            "gather",
            "tensors of more than 6 dims",
            format!("{}, {}", x.notation(), index.notation()),
            "reshape them",
        )
    })?;
    let (held, stride, all) = (x.shape()[dim], x.strides()[dim], out.numel());
    let launch = gpu.kernel("gather", "gather", x.dtype())?.read(x).read(index).write(&mut out).arg(places);
    let launch = launch.arg(all as u64).arg(stride as u64).arg(held as u64);
    let launch =
        launch.arg(indices.n as u64).arg(indices.start as u64).arg(GATHER.code).may_report(&[&GATHER]);
    launch.start(blocks(all), THREADS, 0)?;
    Ok(out)
}

/// Returns zeros `[held, width]` with the rows of `dy` added at the rows that `index` names.
///
/// # Errors
/// Returns an error if the device has no memory left or a launch fails. The kernel records an index out of range.
pub(crate) fn embedding_grad(index: &Tensor, dy: &Tensor, rows: HeldRange, out: &Shape) -> Result<Tensor> {
    let (index, dy) = (index.contiguous()?, dy.contiguous()?);
    let extents = PositionExtents::new(index.shape());
    let sums =
        SumsByDestination { index: &index, src: &dy, indices: rows, held: out[0], width: out[1], rows: 1 };
    sums.run(extents, &EMBEDDING_GRAD, out)
}

/// Returns zeros with the rows of `src` along `dim` added at the rows that `index` names, `held` of them. `index` has the
/// extents of `src`, but 1 in the dims after `dim`.
///
/// # Errors
/// Returns an error if the device has no memory left or a launch fails. The kernel records an index out of range.
pub(crate) fn scatter_add(
    index: &Tensor,
    src: &Tensor,
    dim: usize,
    indices: HeldRange,
    held: usize,
) -> Result<Tensor> {
    let (index, src) = (index.contiguous()?, src.contiguous()?);
    let lines = DimLines::new(src.shape(), dim);
    let (each, rows, width) = (lines.len, lines.outer, lines.inner);
    let mut out = src.shape().clone();
    out[dim] = held;
    let sums = SumsByDestination { index: &index, src: &src, indices, held, width, rows };
    if each != 1 || width != 1 {
        return sums.run(PositionExtents::new(&[each]), &SCATTER_ADD, &out);
    }
    // One element per row: no two elements have the same destination.
    let gpu = Gpu::of(&src)?;
    let mut out = gpu.zeros(src.dtype(), &out)?;
    if rows > 0 {
        let launch =
            gpu.kernel("embedding_grad", "put", src.dtype())?.read(&index).read(&src).write(&mut out);
        let launch = launch.arg(rows as u64).arg(held as u64).arg(indices.n as u64).arg(indices.start as u64);
        launch.arg(SCATTER_ADD.code).may_report(&[&SCATTER_ADD]).start(
            rows.div_ceil(THREADS as usize) as u32,
            THREADS,
            0,
        )?;
    }
    Ok(out)
}

/// `struct Extents` of `kernels/cuda/embedding_grad.cu`: the dims of the positions that are summed over.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::NoUninit)]
struct PositionExtents {
    len: [u32; 8],
    levels: [u32; 8],
    rank: u32,
    unused: u32,
}

impl PositionExtents {
    /// Returns `None` if a kernel cannot take that many dims.
    fn new(shape: &[usize]) -> Option<PositionExtents> {
        let mut extents = PositionExtents::default();
        let mut rank = 0usize;
        for (d, &n) in shape.iter().enumerate() {
            let innermost = d + 1 == shape.len();
            if n == 1 && !innermost {
                continue;
            }
            *extents.len.get_mut(rank)? = u32::try_from(n).ok()?;
            extents.levels[rank] = match innermost {
                // Within a leaf, the path is the index in the leaf.
                true => SplitRule::Halves.depth(n, LEAF) + LEAF.ilog2(),
                false => SplitRule::Halves.depth(n, 1),
            };
            rank += 1;
        }
        extents.rank = rank as u32;
        (extents.levels_len() <= 64).then_some(extents)
    }

    fn levels_len(&self) -> u32 {
        self.levels.iter().sum()
    }
}

/// A sum of rows of `src`, each `width` long, by destination. `index` consists of `rows` equal stretches, each with
/// `held` destinations.
struct SumsByDestination<'a> {
    index: &'a Tensor,
    src: &'a Tensor,
    indices: HeldRange,
    held: usize,
    width: usize,
    rows: usize,
}

impl SumsByDestination<'_> {
    fn run(&self, extents: Option<PositionExtents>, fault: &'static Fault, shape: &Shape) -> Result<Tensor> {
        let gpu = Gpu::of(self.src)?;
        let (hits, places) = (self.index.numel(), self.rows * self.held);
        let mut out = gpu.zeros(self.src.dtype(), shape)?;
        if hits == 0 {
            return Ok(out);
        }
        let fits = hits < u32::MAX as usize && places < u32::MAX as usize;
        let extents = extents.filter(|_| fits).ok_or_else(|| {
            let given = format!("{}, {}", self.index.notation(), self.src.notation());
            let rule = "2^32 positions or destinations, or positions in more than 8 dims";
            Error::unsupported("sums by destination", rule, given, "split or reshape them")
        })?;
        let mut keys = gpu.uninit(DType::I32, [hits])?;
        let mut paths = gpu.uninit(DType::I64, [hits])?;
        let launch = gpu.kernel("embedding_grad", "keys", DType::I64)?.read(self.index);
        let launch = launch.write(&mut keys).write(&mut paths).arg(hits as u64);
        let launch = launch.arg((hits / self.rows) as u64).arg(extents).arg(self.held as u64);
        let launch = launch.arg(self.indices.n as u64).arg(self.indices.start as u64);
        launch.arg(places as u32).arg(fault.code).may_report(&[fault]).start(
            hits.div_ceil(256) as u32,
            256,
            0,
        )?;
        if out.numel() == 0 {
            return Ok(out); // the indices have been checked
        }
        let (keys, positions) = radix::sort(&gpu, keys, None, usize::BITS - places.leading_zeros())?;
        const ADDING: usize = 128;
        let all = (hits * self.width).div_ceil(ADDING);
        let acc = wide(self.src.dtype()).size_bytes();
        let waiting = extents.levels_len() as usize * ADDING * acc;
        let launch = gpu.kernel("embedding_grad", "add", self.src.dtype())?.read(&keys).read(&positions);
        let launch =
            launch.read(&paths).read(self.src).write(&mut out).arg(hits as u64).arg(self.width as u32);
        launch.arg(places as u32).start(all as u32, ADDING as u32, waiting)?;
        Ok(out)
    }
}

pub(super) fn blocks(threads: usize) -> u32 {
    threads.div_ceil(THREADS as usize).min(BLOCKS) as u32
}
