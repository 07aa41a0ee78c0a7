//! Activation functions that other operators apply to their results.

use crate::error::Result;
use crate::ops::pointwise::{
    Gelu, GeluGrad, GeluTanh, GeluTanhGrad, Pointwise, Relu, ReluGrad, Silu, SiluGrad,
};
use crate::ops::{Op, Vjp, VjpValue};
use crate::tensor::cpu::Loops;

/// The function between the two maps of a feed-forward layer. [`Linear`](crate::ops::Linear) applies it to its sums.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::Activation, tensor::Tensor};
/// spmd(1, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[])?;
///     let x = DTensor::distribute(&mesh, &Tensor::from_slice(&[-1.0f64, 2.0], [2])?, "()")?;
///     assert_eq!(Activation::Relu.apply(&x)?.full_tensor()?.to_f64_vec(), [0.0, 2.0]);
///     let (exact, tanh) = (Activation::Gelu.apply(&x)?, Activation::GeluTanh.apply(&x)?);
///     let difference = exact.sub(&tanh)?.abs()?.full_tensor()?.to_f64_vec();
///     assert!(difference.iter().all(|d| (1e-5..1e-3).contains(d)), "{difference:?}");
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// [`Gelu`](crate::ops::Gelu), exact.
    Gelu,
    /// [`GeluTanh`](crate::ops::GeluTanh), the approximation that GPT-2 and Gemma use.
    GeluTanh,
    /// [`Silu`](crate::ops::Silu), also called swish.
    Silu,
    /// [`Relu`](crate::ops::Relu).
    Relu,
}

impl Activation {
    /// Returns the operator that applies the function to each element.
    pub(crate) fn operator(self) -> &'static dyn Op {
        match self {
            Activation::Gelu => &Gelu,
            Activation::GeluTanh => &GeluTanh,
            Activation::Silu => &Silu,
            Activation::Relu => &Relu,
        }
    }

    /// Returns the function's compiled loops.
    pub(super) fn loops(self) -> &'static Loops {
        match self {
            Activation::Gelu => &Gelu::LOOPS,
            Activation::GeluTanh => &GeluTanh::LOOPS,
            Activation::Silu => &Silu::LOOPS,
            Activation::Relu => &Relu::LOOPS,
        }
    }

    /// Returns the number of operations per element.
    pub(super) fn flops(self) -> u64 {
        match self {
            Activation::Gelu => Gelu.flops(),
            Activation::GeluTanh => GeluTanh.flops(),
            Activation::Silu => Silu.flops(),
            Activation::Relu => Relu.flops(),
        }
    }

    /// Adds the step of the derivative: `f'(z) dy`.
    pub(super) fn gradient(self, g: &mut Vjp, dy: VjpValue, z: VjpValue) -> Result<VjpValue> {
        match self {
            Activation::Gelu => g.apply(GeluGrad, &[dy, z]),
            Activation::GeluTanh => g.apply(GeluTanhGrad, &[dy, z]),
            Activation::Silu => g.apply(SiluGrad, &[dy, z]),
            Activation::Relu => g.apply(ReluGrad, &[dy, z]),
        }
    }
}
