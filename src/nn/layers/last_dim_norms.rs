//! Normalisations over the last dim.

use crate::comm::ModulePath;
use crate::dtensor::DTensor;
use crate::error::Result;
use crate::nn::forward::Forward;
use crate::nn::layers::module::Module;
use crate::nn::params::param_id::ParamId;
use crate::nn::params::scope::Scope;
use crate::rng::Init;

/// Layer normalisation over the last dim (Ba et al. 2016).
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: ParamId,
    bias: Option<ParamId>,
    eps: f64,
    path: ModulePath,
}

impl LayerNorm {
    /// Declares a `weight` `[width]` of ones and a `bias` `[width]` of zeros. Its eps is 1e-5.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, tensor::Tensor};
    /// use isoshard::nn::{Forward, LayerNorm, Module, Params, Plan};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let norm = LayerNorm::new(params.root().child("norm"), 2)?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_slice(&[1.0f32, 5.0], [2])?, Layout::replicated(0))?;
    ///     let y = norm.forward(&Forward::eval(&params), &x)?.full_tensor()?.to_vec::<f32>()?;
    ///     assert!((y[0] + 1.0).abs() < 1e-5 && (y[1] - 1.0).abs() < 1e-5);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Scope::param`] refuses.
    pub fn new(scope: Scope<'_>, width: usize) -> Result<LayerNorm> {
        LayerNorm::declare(scope, width, true)
    }

    /// Declares a `weight` `[width]` of ones and no bias. Its eps is 1e-5.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{LayerNorm, Params, Plan}};
    /// spmd(1, |rank| {
    ///     let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 7)?;
    ///     LayerNorm::without_bias(params.root().child("norm"), 4)?;
    ///     assert_eq!(params.numel(), 4);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Scope::param`] refuses.
    pub fn without_bias(scope: Scope<'_>, width: usize) -> Result<LayerNorm> {
        LayerNorm::declare(scope, width, false)
    }

    pub(in crate::nn) fn declare(mut scope: Scope<'_>, width: usize, bias: bool) -> Result<LayerNorm> {
        let weight = scope.param("weight", [width], Init::Ones)?;
        let bias = if bias { Some(scope.param("bias", [width], Init::Zeros)?) } else { None };
        Ok(LayerNorm { weight, bias, eps: 1e-5, path: scope.module_path() })
    }

    /// Adds `eps` to variances instead.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// use isoshard::nn::{Forward, LayerNorm, Module, Params, Plan};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let norm = LayerNorm::without_bias(params.root().child("norm"), 2)?.eps(3.0);
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_slice(&[1.0f32, -1.0], [2])?, "()")?;
    ///     let y = norm.forward(&Forward::eval(&params), &x)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [0.5, -0.5]); // divided by sqrt(1 + 3)
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn eps(self, eps: f64) -> LayerNorm {
        LayerNorm { eps, ..self }
    }
}

impl LayerNorm {
    /// Returns [`DTensor::add_layer_norm`] with the parameters.
    pub(in crate::nn) fn forward_sum(
        &self,
        cx: &Forward,
        x: &DTensor,
        residual: &DTensor,
    ) -> Result<(DTensor, DTensor)> {
        let _scope = self.path.enter();
        let (weight, bias) = (cx.param(self.weight)?, self.bias.map(|b| cx.param(b)).transpose()?);
        let both = x.add_layer_norm(residual, &weight, bias.as_ref(), self.eps);
        both.map_err(|e| e.at(cx.params().path(self.weight)))
    }
}

impl Module for LayerNorm {
    /// Normalises each vector of the last dim of `x` `[.., width]`.
    ///
    /// # Errors
    /// Refuses an `x` of another width; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let _scope = self.path.enter();
        let bias = self.bias.map(|b| cx.param(b)).transpose()?;
        cx.leave(cx.with_param(self.weight, |weight| x.layer_norm(weight, bias.as_ref(), self.eps))?)
    }
}

/// Root-mean-square normalisation over the last dim (Zhang & Sennrich 2019).
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: ParamId,
    eps: f64,
    /// `true` if the factor is `1 + weight`.
    unit_offset: bool,
    path: ModulePath,
}

impl RmsNorm {
    /// Declares a `weight` `[width]` of ones. Its eps is 1e-6.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, tensor::Tensor};
    /// use isoshard::nn::{Forward, Module, Params, Plan, RmsNorm};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let norm = RmsNorm::new(params.root().child("norm"), 2)?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_slice(&[1.0f32, 7.0], [2])?, Layout::replicated(0))?;
    ///     let y = norm.forward(&Forward::eval(&params), &x)?.full_tensor()?.to_vec::<f32>()?;
    ///     assert!((y[0] - 0.2).abs() < 1e-6 && (y[1] - 1.4).abs() < 1e-6); // divided by sqrt((1 + 49) / 2)
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Scope::param`] refuses.
    pub fn new(mut scope: Scope<'_>, width: usize) -> Result<RmsNorm> {
        let weight = scope.param("weight", [width], Init::Ones)?;
        Ok(RmsNorm { weight, eps: 1e-6, unit_offset: false, path: scope.module_path() })
    }

    /// Declares a `weight` `[width]` of zeros; vectors are multiplied by `1 + weight`, as in Gemma. Its eps is 1e-6.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// use isoshard::nn::{Forward, Module, Params, Plan, RmsNorm};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let norm = RmsNorm::with_unit_offset(params.root().child("norm"), 2)?.eps(0.0);
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_slice(&[2.0f32, -2.0], [2])?, "()")?;
    ///     let y = norm.forward(&Forward::eval(&params), &x)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [1.0, -1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Scope::param`] refuses.
    pub fn with_unit_offset(mut scope: Scope<'_>, width: usize) -> Result<RmsNorm> {
        let weight = scope.param("weight", [width], Init::Zeros)?;
        Ok(RmsNorm { weight, eps: 1e-6, unit_offset: true, path: scope.module_path() })
    }

    /// Adds `eps` to mean squares instead.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// use isoshard::nn::{Forward, Module, Params, Plan, RmsNorm};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let norm = RmsNorm::new(params.root().child("norm"), 1)?.eps(12.0);
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_slice(&[2.0f32], [1])?, "()")?;
    ///     let y = norm.forward(&Forward::eval(&params), &x)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [0.5]); // divided by sqrt(4 + 12)
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn eps(self, eps: f64) -> RmsNorm {
        RmsNorm { eps, ..self }
    }
}

impl RmsNorm {
    /// Returns [`DTensor::add_rms_norm`] with the parameter.
    pub(in crate::nn) fn forward_sum(
        &self,
        cx: &Forward,
        x: &DTensor,
        residual: &DTensor,
    ) -> Result<(DTensor, DTensor)> {
        let _scope = self.path.enter();
        let mut weight = cx.param(self.weight)?;
        if self.unit_offset {
            weight = weight.add_scalar(1.0)?;
        }
        x.add_rms_norm(residual, &weight, self.eps).map_err(|e| e.at(cx.params().path(self.weight)))
    }
}

impl Module for RmsNorm {
    /// Normalises each vector of the last dim of `x` `[.., width]`.
    ///
    /// # Errors
    /// Refuses an `x` of another width; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let _scope = self.path.enter();
        let y = cx.with_param(self.weight, |weight| match self.unit_offset {
            true => x.rms_norm(&weight.add_scalar(1.0)?, self.eps),
            false => x.rms_norm(weight, self.eps),
        });
        cx.leave(y?)
    }
}
