//! The activation functions of feed-forward layers.

use crate::dtensor::DTensor;
use crate::error::Result;

/// The function between the two maps of a feed-forward layer.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::Activation, tensor::Tensor};
/// spmd(1, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[])?;
///     let x = DTensor::distribute(&mesh, &Tensor::from_slice(&[-1.0f64, 2.0], [2])?, "()".parse()?)?;
///     assert_eq!(Activation::Relu.apply(&x)?.full_tensor()?.to_f64_vec(), [0.0, 2.0]);
///     let (exact, tanh) = (Activation::Gelu.apply(&x)?, Activation::GeluTanh.apply(&x)?);
///     let difference = exact.sub(&tanh)?.abs()?.full_tensor()?.to_f64_vec();
///     assert!(difference.iter().all(|d| (1e-5..1e-3).contains(d)), "{difference:?}");
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// [`DTensor::gelu`], exact.
    Gelu,
    /// [`DTensor::gelu_tanh`], the approximation that GPT-2 and Gemma use.
    GeluTanh,
    /// [`DTensor::silu`], also called swish.
    Silu,
    /// [`DTensor::relu`].
    Relu,
}

impl Activation {
    /// Returns the function of each element of `x`. Communicates nothing unless `x` is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::Activation, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4], "(S0)".parse()?)?;
    ///     assert_eq!(Activation::Silu.apply(&x)?.spec().to_string(), "f32[4]@(tp:S0)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses integers and bools; returns an error if a rank fails.
    pub fn apply(self, x: &DTensor) -> Result<DTensor> {
        match self {
            Activation::Gelu => x.gelu(),
            Activation::GeluTanh => x.gelu_tanh(),
            Activation::Silu => x.silu(),
            Activation::Relu => x.relu(),
        }
    }
}
