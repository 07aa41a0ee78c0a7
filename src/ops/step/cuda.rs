//! CUDA kernels of optimizer steps, in place. One launch updates up to 48 parameters of one dtype.

use bytemuck::NoUninit;

use crate::error::Result;
use crate::tensor::cuda::Gpu;
use crate::tensor::{DType, Tensor, sort_by_key};

/// The maximum number of parameters of one launch, as in `kernels/cuda/step.cuh`.
const TENSORS: usize = 48;
const THREADS: u32 = 256;
/// The number of elements of one block, as in `kernels/cuda/step.cuh`.
const A_BLOCK: usize = THREADS as usize * 16;

/// The operands of one parameter's step: parameter, gradient and `N` tensors of state, all of the parameter's shape.
#[derive(Debug)]
pub(crate) struct ParamStep<'a, const N: usize> {
    pub param: &'a mut Tensor,
    pub grad: &'a Tensor,
    pub state: [&'a mut Tensor; N],
    /// The tensor of the parameter's shape in f16 or bf16 to which the new parameter, of f32, is rounded.
    pub rounded: Option<&'a mut Tensor>,
    /// The attribute that may differ from parameter to parameter.
    pub value: f64,
}

/// The attributes of AdamW as its kernel takes them. A step's `value` is the factor `1 - lr λ` of the parameter.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, NoUninit)]
pub(crate) struct AdamWRates {
    pub beta1: f64,
    pub beta2: f64,
    pub rest1: f64,
    pub rest2: f64,
    pub eps: f64,
    pub step: f64,
    pub root: f64,
}

/// The attributes of gradient descent as its kernel takes them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, NoUninit)]
pub(crate) struct SgdRates {
    pub momentum: f64,
    pub decay: f64,
    pub step: f64,
    /// 1 for Nesterov momentum, else 0.
    pub nesterov: u64,
}

/// `struct Pieces` of `kernels/cuda/step.cuh`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct Pieces {
    len: [u64; TENSORS],
    value: [f64; TENSORS],
    block: [u32; TENSORS],
    tensors: u32,
    unused: u32,
}

/// Performs AdamW steps; see [`AdamWStep`](crate::ops::AdamWStep). `scale` has one element of the state's dtype, and
/// the state is (m, v).
///
/// # Errors
/// Returns an error if the device has no memory left or a launch fails.
pub(crate) fn adamw(steps: &mut [ParamStep<2>], scale: &Tensor, rates: AdamWRates) -> Result<()> {
    run("adamw", ["adamw", "adamw_to_bf16", "adamw_to_f16"], steps, scale, rates)
}

/// Performs steps of gradient descent, as [`adamw`]; see [`SgdStep`](crate::ops::SgdStep).
///
/// # Errors
/// Returns the errors of [`adamw`].
pub(crate) fn sgd(steps: &mut [ParamStep<1>], scale: &Tensor, rates: SgdRates) -> Result<()> {
    run("sgd", ["sgd", "sgd_to_bf16", "sgd_to_f16"], steps, scale, rates)
}

/// Makes the steps with a file's entries: those that do not round, and those that round to bf16 and to f16.
fn run<const N: usize, R: NoUninit>(
    file: &'static str,
    [plain, to_bf16, to_f16]: [&'static str; 3],
    steps: &mut [ParamStep<N>],
    scale: &Tensor,
    rates: R,
) -> Result<()> {
    let mut grads = Vec::with_capacity(steps.len());
    for step in steps.iter_mut() {
        grads.push(step.grad.contiguous()?);
        own(step.param)?;
        step.state.iter_mut().try_for_each(|x| own(x))?;
        step.rounded.as_mut().map_or(Ok(()), |x| own(x))?;
    }
    let mut rest: Vec<(&mut ParamStep<N>, &Tensor)> =
        steps.iter_mut().zip(&grads).filter(|(s, _)| s.param.numel() > 0).collect();
    // A launch takes one dtype, and rounds to one. The sort is stable, so parameters of one dtype keep their order.
    let dtypes =
        |(s, _): &(&mut ParamStep<N>, &Tensor)| (s.param.dtype(), s.rounded.as_ref().map(|x| x.dtype()));
    sort_by_key(&mut rest, dtypes);
    for same in rest.chunk_by_mut(|a, b| dtypes(a) == dtypes(b)) {
        let entry = match dtypes(&same[0]).1 {
            None => plain,
            Some(DType::BF16) => to_bf16,
            Some(_) => to_f16,
        };
        for some in same.chunks_mut(TENSORS) {
            launch(file, entry, some, scale, rates)?;
        }
    }
    Ok(())
}

fn launch<const N: usize, R: NoUninit>(
    file: &'static str,
    entry: &'static str,
    steps: &mut [(&mut ParamStep<N>, &Tensor)],
    scale: &Tensor,
    rates: R,
) -> Result<()> {
    let dtype: DType = steps[0].0.param.dtype();
    let gpu = Gpu::of(steps[0].0.param)?;
    let mut pieces = Pieces {
        len: [0; TENSORS],
        value: [0.0; TENSORS],
        block: [0; TENSORS],
        tensors: steps.len() as u32,
        unused: 0,
    };
    let mut blocks = 0;
    for (k, (step, _)) in steps.iter().enumerate() {
        let n = step.param.numel();
        (pieces.len[k], pieces.value[k], pieces.block[k]) = (n as u64, step.value, blocks);
        blocks += n.div_ceil(A_BLOCK) as u32;
    }
    let grads: Vec<&Tensor> = steps.iter().map(|(_, g)| *g).collect();
    let mut params: Vec<&mut Tensor> = Vec::with_capacity(steps.len());
    let mut states: Vec<Vec<&mut Tensor>> = (0..N).map(|_| Vec::with_capacity(steps.len())).collect();
    let mut rounded: Vec<&mut Tensor> = Vec::new();
    for (step, _) in steps.iter_mut() {
        let ParamStep { param, state, rounded: to, .. } = &mut **step;
        params.push(param);
        states.iter_mut().zip(state).for_each(|(all, x)| all.push(x));
        rounded.extend(to.as_mut().map(|x| &mut **x));
    }
    let written = states.iter_mut().chain((!rounded.is_empty()).then_some(&mut rounded));
    let launch =
        gpu.kernel(file, entry, dtype)?.write_all::<TENSORS>(&mut params).read_all::<TENSORS>(&grads);
    let launch = written.fold(launch, |launch, all| launch.write_all::<TENSORS>(all));
    launch.read(scale).arg(pieces).arg(rates).start(blocks, THREADS, 0)
}

/// Copies the tensor unless it is the only owner of its buffer.
fn own(x: &mut Tensor) -> Result<()> {
    if !x.is_unique() {
        *x = x.to_owned_copy()?;
    }
    Ok(())
}
