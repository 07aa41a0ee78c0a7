//! CUDA kernels of sequences, bands and one-hot rows: the counterpart of `cpu.rs`.

use bytemuck::NoUninit;

use super::index_formula::{DiagonalBand, IndexSequence};
use crate::error::Result;
use crate::placement::Region;
use crate::rng::cuda::{Place, run_over};
use crate::tensor::cuda::Gpu;
use crate::tensor::cuda::fault::Fault;
use crate::tensor::{DType, Element, Shape, Tensor, for_dtype};

static INDEX: Fault = Fault::index(430, "one_hot");

/// `struct Diagonals` of `kernels/cuda/create.cu`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct DiagonalsArg {
    rows: u64,
    columns: u64,
    low: i64,
    high: i64,
}

impl DiagonalsArg {
    fn new(global: &Shape, band: DiagonalBand) -> DiagonalsArg {
        let [.., rows, columns] = global[..] else {
            return DiagonalsArg { rows: 1, columns: 1, low: band.low, high: band.high };
        };
        DiagonalsArg { rows: rows as u64, columns: columns as u64, low: band.low, high: band.high }
    }
}

/// Writes a sequence as [`cpu::sequence`](super::cpu::sequence).
///
/// # Errors
/// Returns an error if the launch fails.
pub(super) fn sequence(
    out: &mut Tensor,
    global: &Shape,
    region: &Region,
    numbers: IndexSequence,
) -> Result<()> {
    let (gpu, dtype) = (Gpu::of(out)?, out.dtype());
    let IndexSequence { start, step, end, last, turn } = numbers;
    for place in Place::all(region, global, 1)? {
        let launch = gpu.kernel("create", "sequence", dtype)?.write(out).arg(place);
        let launch = launch.arg(start).arg(step).arg(end).arg(last).arg(turn);
        run_over(launch, &gpu, place.units())?;
    }
    Ok(())
}

/// Writes a band as [`cpu::band`](super::cpu::band).
///
/// # Errors
/// Returns the errors of [`sequence`].
pub(super) fn band(
    out: &mut Tensor,
    global: &Shape,
    region: &Region,
    band: DiagonalBand,
    [inside, outside]: [f64; 2],
) -> Result<()> {
    let (gpu, dtype) = (Gpu::of(out)?, out.dtype());
    for place in Place::all(region, global, 4)? {
        let launch = gpu.kernel("create", "band", dtype)?.write(out).arg(place);
        let launch = launch.arg(DiagonalsArg::new(global, band));
        let launch = for_dtype!(any dtype, T => {
            launch.arg(<T as Element>::from_f64(inside)).arg(<T as Element>::from_f64(outside))
        });
        run_over(launch, &gpu, place.units())?;
    }
    Ok(())
}

/// Keeps a band as [`cpu::keep_band`](super::cpu::keep_band).
///
/// # Errors
/// Returns the errors of [`sequence`]. Returns an error if the device has no memory left.
pub(super) fn keep_band(x: &Tensor, global: &Shape, region: &Region, band: DiagonalBand) -> Result<Tensor> {
    let (gpu, dtype, x) = (Gpu::of(x)?, x.dtype(), x.contiguous()?);
    let mut out = gpu.uninit(dtype, x.shape())?;
    for place in Place::all(region, global, 4)? {
        let launch = gpu.kernel("create", "keep_band", dtype)?.read(&x).write(&mut out).arg(place);
        run_over(launch.arg(DiagonalsArg::new(global, band)), &gpu, place.units())?;
    }
    Ok(out)
}

/// Returns rows of `held` classes from `start` on that are 1 at the index's class and 0 elsewhere; there are `classes`.
///
/// # Errors
/// Returns the errors of [`keep_band`]. The kernel records an index that is not a class.
pub(super) fn one_hot(index: &Tensor, dtype: DType, [start, held, classes]: [usize; 3]) -> Result<Tensor> {
    let (gpu, index) = (Gpu::of(index)?, index.contiguous()?);
    let shape: Shape = index.shape().iter().copied().chain([held]).collect();
    let mut out = gpu.uninit(dtype, shape)?;
    let all = out.numel() as u64;
    if all == 0 {
        return Ok(out);
    }
    let launch = gpu.kernel("create", "one_hot", dtype)?.read(&index).write(&mut out).arg(all);
    let launch = launch.arg(start as u64).arg(held as u64).arg(classes as u64);
    let launch = for_dtype!(any dtype, T => {
        launch.arg(<T as Element>::from_f64(1.0)).arg(<T as Element>::from_f64(0.0))
    });
    run_over(launch.arg(INDEX.code).may_report(&[&INDEX]), &gpu, all)?;
    Ok(out)
}
