//! Operators that draw with a parameter for each element.

use crate::error::Result;
use crate::placement::Region;
use crate::rng::Draw;
use crate::rng::cuda::{DrawArg, Place, run_over};
use crate::tensor::cuda::Gpu;
use crate::tensor::{DType, Shape, Tensor};

/// What a tensor's elements are the parameters of.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Parameters {
    /// Of bools: probabilities.
    Bernoulli,
    /// Of exponential numbers: rates.
    Exponential,
    /// Of gamma numbers: shapes.
    Gamma,
    /// Of Poisson numbers of this dtype: rates.
    Poisson(DType),
}

/// The numbers drawn with these parameters, which are the elements of `region` of a tensor of shape `global`.
///
/// # Errors
/// A device without room, a launch that fails. Parameters that break their rule are reported at the next read of a value.
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
    let (file, stem, of, dtype, per) = match what {
        Parameters::Bernoulli => ("bernoulli", "bernoulli_each", from, DType::Bool, 4),
        Parameters::Exponential => ("exponential", "exponential_each", from, from, block),
        Parameters::Gamma => ("gamma", "gamma_each", from, from, 1),
        Parameters::Poisson(dtype) => ("poisson", "poisson_each", dtype, dtype, 1),
    };
    let mut out = gpu.uninit(dtype, params.shape())?;
    for place in Place::all(region, global, per)? {
        let mut launch = gpu.kernel(file, stem, of)?.read(&params);
        if let Parameters::Poisson(_) = what {
            launch = launch.arg(from as u32);
        }
        let launch = launch.write(&mut out).arg(place).arg(DrawArg::from(draw)).faults();
        run_over(launch, &gpu, place.units())?;
    }
    Ok(out)
}
