//! CUDA kernels of `multinomial` and `shuffle`.

use crate::error::{Error, Result};
use crate::placement::Region;
use crate::rng::cuda::{DrawArg, Place, order as write_order, run_over};
use crate::rng::{Draw, Permutation};
use crate::tensor::cuda::Gpu;
use crate::tensor::cuda::fault::Fault;
use crate::tensor::{DType, Shape, Tensor};

// The codes are those of `kernels/cuda/parameters.cuh`.
static WEIGHT: Fault = Fault::element(604, "multinomial", "weights are finite and not negative");
static SUM: Fault = Fault::row(605, "multinomial", "a row's weights have a positive, finite sum");
static POSITIVE: Fault =
    Fault::row(606, "multinomial", "without replacement a row has as many positive weights as samples");

/// The maximum size of temporary storage of a launch.
const SCRATCH_BYTES: u64 = 256 << 20;
const WARPS: u64 = 4;

/// Draws categories, i64, by rows of weights. `ins` and `outs` are the global shapes and this rank's regions of weights
/// and result.
///
/// # Errors
/// Refuses more than 2^30 categories without replacement. Returns an error if the device has no memory left or a launch
/// fails. The kernel records weights that break a rule, and the next call that reads a value returns the error.
pub(crate) fn multinomial(
    draw: Draw,
    replacement: bool,
    weights: &Tensor,
    ins: (&Shape, &Region),
    outs: (&Shape, &Region),
) -> Result<Tensor> {
    let (gpu, weights) = (Gpu::of(weights)?, weights.contiguous()?);
    let mut out = gpu.uninit(DType::I64, outs.1.local.clone())?;
    let last = |shape: &Shape| shape.last().map_or(1, |&n| n as u64);
    let (k, samples) = (last(ins.0), last(outs.0));
    if out.numel() == 0 {
        return Ok(out);
    }
    if replacement {
        for place in Place::all(outs.1, outs.0, 1)? {
            let rows = place.numel() / samples;
            let room = (SCRATCH_BYTES / (8 * WARPS * k.max(1))).max(1);
            let blocks = rows.div_ceil(WARPS).min(room).min(u64::from(gpu.multiprocessors()) * 8);
            let mut sums = gpu.uninit(DType::F64, [(blocks * WARPS * k) as usize])?;
            let launch = gpu.kernel("multinomial", "with_replacement", weights.dtype())?;
            let launch = launch.read(&weights).write(&mut out).write(&mut sums);
            let launch = launch.arg(place).arg(DrawArg::from(draw)).arg(rows).arg(k).arg(samples);
            let launch = launch.may_report(&[&WEIGHT, &SUM, &POSITIVE]);
            launch.start(blocks as u32, 32 * WARPS as u32, 0)?;
        }
        return Ok(out);
    }
    if k > 1 << 30 {
        let rule = "a device orders at most 2^30 categories";
        return Err(Error::unsupported("multinomial", rule, weights.notation(), "draw with replacement"));
    }
    let len = k.next_power_of_two();
    for place in Place::all(ins.1, ins.0, 1)? {
        let rows = place.numel() / k;
        let room = (SCRATCH_BYTES / (12 * len)).max(1);
        let blocks = rows.min(room).min(u64::from(gpu.multiprocessors()) * 2);
        let mut keys = gpu.uninit(DType::I64, [(blocks * len) as usize])?;
        let mut categories = gpu.uninit(DType::I32, [(blocks * len) as usize])?;
        let launch = gpu.kernel("multinomial", "without", weights.dtype())?;
        let launch = launch.read(&weights).write(&mut out).write(&mut keys).write(&mut categories);
        let launch = launch.arg(place).arg(DrawArg::from(draw)).arg(rows);
        let launch = launch.arg(k as u32).arg(len as u32).arg(samples as u32);
        let launch = launch.may_report(&[&WEIGHT, &SUM, &POSITIVE]);
        launch.start(blocks as u32, (len / 2).clamp(32, 512) as u32, 0)?;
    }
    Ok(out)
}

/// Returns `x` with the indices along `dim` in the draw's order, or with `inverse` in the original order.
///
/// # Errors
/// Returns an error if the device has no memory left or a launch fails.
pub(crate) fn shuffle(draw: Draw, x: &Tensor, dim: usize, inverse: bool) -> Result<Tensor> {
    let (gpu, x) = (Gpu::of(x)?, x.contiguous()?);
    let mut out = gpu.uninit(x.dtype(), x.shape())?;
    if out.numel() == 0 {
        return Ok(out);
    }
    let len = x.shape()[dim];
    let mut order = gpu.uninit(DType::I64, [len])?;
    write_order(&Permutation::new(draw, len as u64), &Region::whole(&[len].into()), &mut order)?;
    // Moves bytes in the largest unit that divides all offsets and addresses.
    let row_bytes = (x.shape()[dim + 1..].iter().product::<usize>() * x.dtype().size_bytes()) as u64;
    let address = x.device_address().unwrap_or(0);
    let (stem, unit, dtype) = match (row_bytes | address | 16).trailing_zeros() {
        0 => ("shuffle", 1, DType::U8),
        1 => ("shuffle", 2, DType::BF16),
        2 => ("shuffle", 4, DType::I32),
        3 => ("shuffle", 8, DType::I64),
        _ => ("shuffle_sixteen", 16, DType::U8),
    };
    let outer: usize = x.shape()[..dim].iter().product();
    let launch = gpu.kernel("shuffle", stem, dtype)?.read(&x).read(&order).write(&mut out);
    let launch = launch.arg(outer as u64).arg(len as u64).arg(row_bytes / unit).arg(u32::from(inverse));
    run_over(launch, &gpu, x.len_bytes() as u64 / unit)?;
    Ok(out)
}
