//! Refusals that all operators share: a wrong number of operands, and a device without a kernel.

use super::{Meta, Metas, Op, list};
use crate::error::{Error, Result};
use crate::tensor::{Tensor, short_list};

/// Returns the operands as an array; [`Op::infer`] takes them apart with it.
///
/// ```
/// use isoshard::ops::{Meta, arity};
/// use isoshard::tensor::DType;
/// let ins = [Meta::new(DType::F32, [2, 3]), Meta::new(DType::I64, [2])];
/// let [x, index] = arity("pick", &ins)?;
/// assert_eq!((x.shape.len(), index.dtype), (2, DType::I64));
/// let refused = arity::<3>("pick", &ins).unwrap_err();
/// assert_eq!(refused.to_string(), "pick: wants 3 operand(s); got 2: f32[2, 3], i64[2]");
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses, in the name `verb`, a number of operands other than `N`.
pub fn arity<'a, const N: usize>(verb: &str, ins: &'a [Meta]) -> Result<&'a [Meta; N]> {
    ins.try_into().map_err(|_| {
        Error::invalid(verb, format!("wants {N} operand(s)"), format!("{}: {}", ins.len(), list(ins)), "")
    })
}

/// Refuses a call on a CUDA device: the body of [`Op::cuda`], or of
/// [`Pointwise::cuda_kernel`](crate::ops::Pointwise::cuda_kernel), for an operator without a kernel for such devices.
///
/// ```
/// use isoshard::ops::{Relu, Tensors, no_cuda_kernel};
/// use isoshard::tensor::{DType, Tensor};
/// // `relu` has a kernel; an operator of your own calls this with `self`.
/// let x = Tensor::zeros(DType::F32, [2, 3]);
/// let refused = no_cuda_kernel::<Tensors>(&Relu, &[x]).unwrap_err();
/// assert_eq!(refused.to_string(), "relu: has no CUDA kernel; got f32[2, 3]; use a mesh on Device::Cpu");
/// ```
///
/// # Errors
/// Always returns an error, in the operator's name.
pub fn no_cuda_kernel<T>(op: &dyn Op, ins: &[Tensor]) -> Result<T> {
    let given: Metas = short_list(ins.iter().map(Meta::of));
    Err(Error::unsupported(op.name(), "has no CUDA kernel", list(&given), "use a mesh on Device::Cpu"))
}
