//! The normalisations between the parts of a transformer.

use crate::dtensor::DTensor;
use crate::error::Result;
use crate::nn::forward::Forward;
use crate::nn::layers::last_dim_norms::{LayerNorm, RmsNorm};
use crate::nn::layers::module::Module;
use crate::nn::params::scope::Scope;

/// The kind of a transformer's normalisations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NormConfig {
    /// Layer normalisation ([`LayerNorm`]).
    Layer {
        /// The number that is added to the variance.
        eps: f64,
        /// `true` if a bias is added.
        bias: bool,
    },
    /// Root-mean-square normalisation ([`RmsNorm`]).
    Rms {
        /// The number that is added to the mean square.
        eps: f64,
        /// `true` if the factor is `1 + weight`, as in Gemma.
        unit_offset: bool,
    },
}

/// A normalisation over the last dim, of a kind that a configuration chooses.
#[derive(Clone, Debug)]
pub enum Norm {
    /// Layer normalisation.
    Layer(LayerNorm),
    /// Root-mean-square normalisation.
    Rms(RmsNorm),
}

impl Norm {
    /// Declares the parameters of a normalisation of vectors of `width` elements.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// use isoshard::nn::{Forward, Module, Norm, NormConfig, Params, Plan};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let gemma = NormConfig::Rms { eps: 0.0, unit_offset: true };
    ///     let norm = Norm::new(params.root().child("norm"), 2, gemma)?;
    ///     // The weight is zero, so the factor is one.
    ///     assert_eq!(params.values().next().expect("a weight").full_tensor()?.to_vec::<f32>()?, [0.0; 2]);
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_slice(&[3.0f32, -3.0], [2])?, "()")?;
    ///     assert_eq!(norm.forward(&Forward::eval(&params), &x)?.full_tensor()?.to_vec::<f32>()?, [1.0, -1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Scope::param`] refuses.
    pub fn new(scope: Scope<'_>, width: usize, config: NormConfig) -> Result<Norm> {
        Ok(match config {
            NormConfig::Layer { eps, bias } => Norm::Layer(LayerNorm::declare(scope, width, bias)?.eps(eps)),
            NormConfig::Rms { eps, unit_offset: false } => Norm::Rms(RmsNorm::new(scope, width)?.eps(eps)),
            NormConfig::Rms { eps, unit_offset: true } => {
                Norm::Rms(RmsNorm::with_unit_offset(scope, width)?.eps(eps))
            }
        })
    }

    /// Returns the norm of `x + residual`, and the sum; in one pass if that changes no bit and moves nothing.
    pub(in crate::nn) fn forward_sum(
        &self,
        cx: &Forward,
        x: &DTensor,
        residual: &DTensor,
    ) -> Result<(DTensor, DTensor)> {
        let fits =
            x.layout() == residual.layout() && !x.layout().has_partial() && x.meta() == residual.meta();
        if fits && !x.dtype().is_half() {
            return match self {
                Norm::Layer(norm) => norm.forward_sum(cx, x, residual),
                Norm::Rms(norm) => norm.forward_sum(cx, x, residual),
            };
        }
        let sum = x.add(residual)?;
        Ok((self.forward(cx, &sum)?, sum))
    }
}

impl Module for Norm {
    /// Normalises each vector of the last dim of `x` `[.., width]`.
    ///
    /// # Errors
    /// Refuses an `x` of another width; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        match self {
            Norm::Layer(norm) => norm.forward(cx, x),
            Norm::Rms(norm) => norm.forward(cx, x),
        }
    }
}
