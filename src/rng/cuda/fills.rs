//! Launches of fills: distributions and permutations.

use bytemuck::NoUninit;

use super::place::{DrawArg, Place, run_over};
use crate::error::Result;
use crate::placement::Region;
use crate::rng::distributions::integers::{IntegerRange, range_of};
use crate::rng::distributions::poisson::{CumulativeSums, LARGE};
use crate::rng::distributions::truncated::Truncated;
use crate::rng::distributions::truncated_tail::TruncatedTail;
use crate::rng::permutation::ROUNDS;
use crate::rng::{Distribution, Draw, Permutation, keep_threshold};
use crate::tensor::cuda::{Gpu, KernelLaunch};
use crate::tensor::{DType, Element, Shape, Tensor, for_dtype};

/// Writes the numbers of `from`, which was checked for the dtype, for the elements of `region` to `out`, the region's storage on
/// a device. The storage must not be shared.
pub(in crate::rng) fn fill(
    from: Distribution,
    draw: Draw,
    global: &Shape,
    region: &Region,
    out: &mut Tensor,
) -> Result<()> {
    let (gpu, dtype) = (Gpu::of(out)?, out.dtype());
    let (file, stem, per) = kernel_of(from, dtype);
    for place in Place::all(region, global, per)? {
        let launch = gpu.kernel(file, stem, dtype)?.write(out).arg(place).arg(DrawArg::from(draw));
        run_over(parameters(launch, from, dtype)?, &gpu, place.units())?;
    }
    Ok(())
}

/// Writes the elements of `region` of a permutation to `out`, the region's storage on a device. It must not be shared.
pub(crate) fn order(order: &Permutation, region: &Region, out: &mut Tensor) -> Result<()> {
    let gpu = Gpu::of(out)?;
    let global = Shape::from([order.len() as usize]);
    for place in Place::all(region, &global, 1)? {
        let launch = gpu.kernel("shuffle", "permutation", DType::I64)?.write(out).arg(place);
        let launch =
            launch.arg(DrawArg::from(order.draw())).arg(OrderArg { len: order.len(), keys: *order.keys() });
        run_over(launch, &gpu, place.units())?;
    }
    Ok(())
}

/// Returns the source file, the entry, and the number of elements per thread and step.
fn kernel_of(from: Distribution, dtype: DType) -> (&'static str, &'static str, u64) {
    let block = if matches!(dtype, DType::F64) { 2 } else { 4 };
    match from {
        Distribution::Uniform { .. } => ("random", "uniform", block),
        Distribution::Normal { .. } => ("random", "normal", block),
        Distribution::TruncatedNormal { mean, std, low, high } => {
            match (Truncated { mean, std, low, high }).is_frequent() {
                true => ("random", "truncated", block),
                false => ("random", "truncated_tail", 1),
            }
        }
        Distribution::LogNormal { .. } => ("random", "log_normal", block),
        Distribution::Exponential { .. } => ("exponential", "exponential", block),
        Distribution::Gamma { .. } => ("gamma", "gamma", 1),
        Distribution::Poisson { rate } if rate < LARGE => ("poisson", "poisson", 2),
        Distribution::Poisson { .. } => ("poisson", "poisson_large", 1),
        Distribution::UniformInt { low, high } => match range_of(low, high) {
            IntegerRange::One { .. } => ("random", "integers", 4),
            IntegerRange::Two { .. } => ("random", "wide_integers", 2),
        },
        Distribution::Bernoulli { .. } => ("random", "bernoulli", 4),
        Distribution::Bits => ("random", "bits", if dtype == DType::I64 { 2 } else { 4 }),
    }
}

/// Adds the distribution's own arguments to a launch.
fn parameters<'a>(launch: KernelLaunch<'a>, from: Distribution, dtype: DType) -> Result<KernelLaunch<'a>> {
    let wide = |launch: KernelLaunch<'a>, x: f64| match dtype {
        DType::F64 => launch.arg(x),
        _ => launch.arg(x as f32),
    };
    Ok(match from {
        Distribution::Uniform { low, high } => wide(wide(launch, high - low), low),
        Distribution::Normal { mean, std } | Distribution::LogNormal { mean, std } => {
            wide(wide(launch, std), mean)
        }
        Distribution::TruncatedNormal { mean, std, low, high } => {
            let of = Truncated { mean, std, low, high };
            match of.is_frequent() {
                true => launch.arg(mean).arg(std).arg(low).arg(high),
                false => {
                    let TruncatedTail { mean, std, low, high, from, to, rate, peak } = of.tail()?;
                    launch.arg([mean, std, low, high, from, to, rate, peak])
                }
            }
        }
        Distribution::Exponential { rate } => wide(launch, rate),
        Distribution::Gamma { shape, scale } => wide(wide(launch, shape), scale),
        Distribution::Poisson { rate } if rate < LARGE => launch.arg(SumsArg::from(CumulativeSums::of(rate))),
        Distribution::Poisson { rate } => launch.arg(rate),
        Distribution::UniformInt { low, high } => launch.arg(match range_of(low, high) {
            IntegerRange::One { low, last, threshold } => {
                RangeArg { low, last: u64::from(last), threshold: u64::from(threshold) }
            }
            IntegerRange::Two { low, last, threshold } => RangeArg { low, last, threshold },
        }),
        Distribution::Bernoulli { p } => {
            let threshold = keep_threshold("bernoulli", p)?;
            let launch = launch.arg(if p == 1.0 { 1 << 32 } else { u64::from(threshold) });
            for_dtype!(any dtype, T => launch.arg(<T as Element>::from_f64(0.0)).arg(<T as Element>::from_f64(1.0)))
        }
        Distribution::Bits => launch,
    })
}

/// `struct Sums` of `kernels/cuda/poisson.cu`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct SumsArg {
    of: [f64; 64],
    len: u64,
}

impl From<CumulativeSums> for SumsArg {
    fn from(all: CumulativeSums) -> SumsArg {
        SumsArg { of: all.sums, len: all.len as u64 }
    }
}

/// `struct RangeArg` of `kernels/cuda/random.cu`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct RangeArg {
    low: u64,
    last: u64,
    threshold: u64,
}

/// `struct OrderArg` of `kernels/cuda/shuffle.cu`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct OrderArg {
    len: u64,
    keys: [u64; ROUNDS],
}
