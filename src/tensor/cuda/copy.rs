//! Copies between strided layouts, fills with a constant, and conversions between dtypes.
//!
//! A copy moves bytes by the size of an element, or of several neighbours if they are contiguous in both tensors. If
//! source and result are contiguous along different dims, the kernel transposes tiles in shared memory.

use super::gpu::Gpu;
use super::map::{FormulaKernels, PACK_BYTES, THREADS, blocks, compute, formula, offset_in_pack};
use super::walk::{INDICES, MergedLayouts, StridedLayout, StridedWalk, TransposedDim, merge_in_result_order};
use crate::error::Result;
use crate::tensor::{DType, Element, Scalar, Tensor};

/// Copies a block of extents `len` from `x`'s buffer into `out`'s. `from` and `to` give the block's offset from the
/// tensor's first element, and its strides. `out` is fresh and on the device of `x`.
///
/// # Errors
/// Returns an error if the kernel fails.
pub(crate) fn copy_block(
    x: &Tensor,
    out: &mut Tensor,
    len: &[usize],
    from: (usize, &[usize]),
    to: (usize, &[usize]),
) -> Result<()> {
    if len.contains(&0) {
        return Ok(());
    }
    let gpu = Gpu::of(x)?;
    let result = StridedLayout { start: to.0, strides: to.1 };
    let mut nest = merge_in_result_order(len, result, StridedLayout { start: from.0, strides: from.1 });
    let mut size = x.dtype().size_bytes();
    for unit in [8, 4, 2] {
        let neighbours = unit / size;
        if neighbours > 1
            && offset_in_pack(x, neighbours) == 0
            && offset_in_pack(out, neighbours) == 0
            && nest.join(neighbours)
        {
            size = unit;
        }
    }
    if nest.is_flat() {
        let n = nest.numel();
        let launch = gpu.kernel("copy", "copy", of_size(size))?.read(x).write(out);
        return launch.arg(n as u64).arg([0.0; 2]).start(blocks(n.div_ceil(PACK_BYTES / size)), THREADS, 0);
    }
    match nest.take_transposed() {
        Some(sides) => copy_transposed(&gpu, x, out, size, nest, sides),
        None => copy_strided(&gpu, x, out, size, nest),
    }
}

/// Sets every element of `out`, which is fresh, to `number` converted to the dtype.
///
/// # Errors
/// Returns an error if the kernel fails.
pub(crate) fn fill(out: &mut Tensor, number: impl Into<Scalar>) -> Result<()> {
    let number = number.into();
    let value = number.to_f64();
    let bits = match out.dtype() {
        DType::F32 => u64::from((value as f32).to_bits()),
        DType::F64 => value.to_bits(),
        DType::F16 => u64::from(<half::f16 as Element>::from_f64(value).to_bits()),
        DType::BF16 => u64::from(<half::bf16 as Element>::from_f64(value).to_bits()),
        DType::I64 => number.to_i64() as u64,
        DType::I32 => u64::from(value as i32 as u32),
        DType::U8 => u64::from(value as u8),
        DType::Bool => u64::from(value != 0.0),
    };
    let (size, n) = (out.dtype().size_bytes(), out.numel());
    let gpu = Gpu::of(out)?;
    let launch = gpu.kernel("fill", "fill", of_size(size))?.write(out).arg(n as u64);
    launch.arg([bits, 0]).start(blocks(n.div_ceil(PACK_BYTES / size)), THREADS, 0)
}

/// Returns `x` in another dtype, by the rules of [`cpu::cast`](crate::tensor::cpu::cast).
///
/// # Errors
/// Returns an error if the device is out of memory or the kernel fails.
pub(crate) fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    if x.dtype() == dtype {
        return Ok(x.clone());
    }
    let from: FormulaKernels = match x.dtype() {
        DType::F32 => formula!("cast_f32"),
        DType::F64 => formula!("cast_f64"),
        DType::F16 => formula!("cast_f16"),
        DType::BF16 => formula!("cast_bf16"),
        DType::I64 => formula!("cast_i64"),
        DType::I32 => formula!("cast_i32"),
        DType::U8 => formula!("cast_u8"),
        DType::Bool => formula!("cast_bool"),
    };
    compute(from, dtype, &mut [x.clone()], dtype, &[])
}

/// Mirrors `struct TiledTranspose` of `kernels/cuda/copy.cu`.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct TiledTranspose {
    around: StridedWalk,
    column_stride: u64,
    row_stride: u64,
    columns: u32,
    rows: u32,
}

/// Returns a dtype whose elements have this size: copies depend on nothing else.
fn of_size(bytes: usize) -> DType {
    match bytes {
        1 => DType::U8,
        2 => DType::F16,
        4 => DType::I32,
        _ => DType::I64,
    }
}

fn copy_strided(gpu: &Gpu, x: &Tensor, out: &mut Tensor, size: usize, mut nest: MergedLayouts) -> Result<()> {
    let width = PACK_BYTES / size;
    // Counts offsets in units, which are whole multiples of elements that both first elements are aligned to.
    let behind =
        |t: &Tensor| offset_in_pack(t, PACK_BYTES / t.dtype().size_bytes()) * t.dtype().size_bytes() / size;
    let places = [behind(out), behind(x)];
    nest.pack(width, |k| places[k]);
    nest.walks(INDICES, &mut |walk| {
        let launch = gpu.kernel("copy", "copy_strided", of_size(size))?.read(x).write(out);
        launch.arg(walk).arg([0.0; 2]).start(blocks(walk.len as usize), THREADS, 0)
    })
}

fn copy_transposed(
    gpu: &Gpu,
    x: &Tensor,
    out: &mut Tensor,
    size: usize,
    around: MergedLayouts,
    (columns, rows): (TransposedDim, TransposedDim),
) -> Result<()> {
    let tile = if size < 4 { 64 } else { 32 };
    let tiles = columns.len.div_ceil(tile) * rows.len.div_ceil(tile);
    around.walks(INDICES / tiles, &mut |walk| {
        let transpose = TiledTranspose {
            around: walk,
            column_stride: columns.stride as u64,
            row_stride: rows.stride as u64,
            columns: columns.len as u32,
            rows: rows.len as u32,
        };
        let launch = gpu.kernel("copy", "copy_transposed", of_size(size))?.read(x).write(out);
        launch.arg(transpose).start(walk.len * tiles as u32, THREADS, 0)
    })
}
