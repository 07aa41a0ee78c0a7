//! CUDA kernels of random operators whose operand gives a parameter per element.

use crate::error::Result;
use crate::placement::Region;
use crate::rng::Draw;
use crate::rng::cuda::{DrawArg, Place, run_over};
use crate::tensor::cuda::Gpu;
use crate::tensor::cuda::fault::Fault;
use crate::tensor::{DType, Shape, Tensor};

// The codes are those of `kernels/cuda/parameters.cuh`.
static PROBABILITY: Fault = Fault::element(600, "bernoulli", "a probability lies in [0, 1]");
static EXPONENTIAL_RATE: Fault = Fault::element(601, "exponential", "a rate is positive and finite");
static GAMMA_SHAPE: Fault = Fault::element(602, "gamma", "a shape is positive and finite");
static POISSON_RATE: Fault = Fault::element(603, "poisson", "a rate lies between 0 and 2^50");

/// The distribution whose parameters a tensor holds.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Parameters {
    /// Bools; the parameters are probabilities.
    Bernoulli,
    /// Exponentially distributed numbers; the parameters are rates.
    Exponential,
    /// Gamma-distributed numbers; the parameters are shapes.
    Gamma,
    /// Poisson-distributed counts of this dtype; the parameters are rates.
    Poisson(DType),
}

/// Draws the elements of `region` of a tensor of shape `global` with the parameters `params`.
///
/// # Errors
/// Returns an error if the device has no memory left or a launch fails. The kernel records parameters that break their
/// rule, and the next call that reads a value returns the error.
pub(crate) fn draw_per_element(
    what: Parameters,
    draw: Draw,
    params: &Tensor,
    global: &Shape,
    region: &Region,
) -> Result<Tensor> {
    let (gpu, params) = (Gpu::of(params)?, params.contiguous()?);
    let from = params.dtype();
    let block = if from == DType::F64 { 2 } else { 4 };
    let (file, stem, fault, of, dtype, per) = match what {
        Parameters::Bernoulli => ("bernoulli", "bernoulli_each", &PROBABILITY, from, DType::Bool, 4),
        Parameters::Exponential => ("exponential", "exponential_each", &EXPONENTIAL_RATE, from, from, block),
        Parameters::Gamma => ("gamma", "gamma_each", &GAMMA_SHAPE, from, from, 1),
        Parameters::Poisson(dtype) => ("poisson", "poisson_each", &POISSON_RATE, dtype, dtype, 1),
    };
    let mut out = gpu.uninit(dtype, params.shape())?;
    for place in Place::all(region, global, per)? {
        let mut launch = gpu.kernel(file, stem, of)?.read(&params);
        if let Parameters::Poisson(_) = what {
            launch = launch.arg(from as u32);
        }
        let launch = launch.write(&mut out).arg(place).arg(DrawArg::from(draw)).may_report(&[fault]);
        run_over(launch, &gpu, place.units())?;
    }
    Ok(out)
}
