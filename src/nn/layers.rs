//! Linear maps, embeddings and normalisations.

use super::forward::Forward;
use super::module::Module;
use super::param_id::ParamId;
use super::scope::Scope;
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::rng::Init;

/// A linear map `x wᵀ + b` over the last dim, with `w` of shape `[outputs, inputs]`.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: ParamId,
    bias: Option<ParamId>,
    site: String,
}

impl Linear {
    /// Declares a `weight` `[outputs, inputs]`, filled by `init`, and if `bias` is set, a `bias` `[outputs]` of zeros.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, rng::Init, tensor::DType};
    /// use isoshard::nn::{Forward, Linear, Module, Params, Plan};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     // Each rank computes its rows of the weight: outputs 0 and 1, or output 2.
    ///     let mut params = Params::new(&mesh, Plan::default().shard("map.weight", "tp", 0), 7)?;
    ///     let map = Linear::new(params.root().child("map"), 4, 3, true, Init::Ones)?;
    ///     let x = DTensor::full(&mesh, DType::F32, [2, 5, 4], 0.5, Layout::replicated(1))?;
    ///     let y = map.forward(&Forward::eval(&params), &x)?;
    ///     assert_eq!(y.spec().to_string(), "f32[2, 5, 3]@(tp:S2)");
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [2.0; 30]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Scope::param`] refuses.
    pub fn new(
        mut scope: Scope<'_>,
        inputs: usize,
        outputs: usize,
        bias: bool,
        init: Init,
    ) -> Result<Linear> {
        let weight = scope.param("weight", [outputs, inputs], init)?;
        let bias = if bias { Some(scope.param("bias", [outputs], Init::Zeros)?) } else { None };
        Ok(Linear { weight, bias, site: scope.site_here() })
    }
}

impl Module for Linear {
    /// Maps `x` `[.., inputs]`, with any number of leading dims, to `[.., outputs]`.
    ///
    /// If the weight is sharded over its inputs, the product is a partial sum, which is reduced at the site of this
    /// module's path before the bias is added.
    ///
    /// # Errors
    /// Refuses an `x` whose last dim is not `inputs`; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let y = cx.site(&self.site, cx.with_param(self.weight, |weight| product_over_last(x, weight))?)?;
        match self.bias {
            Some(bias) => cx.with_param(bias, |bias| y.add(bias)),
            None => Ok(y),
        }
    }
}

/// Returns `x wᵀ` over the last dim of `x`, for any number of leading dims.
fn product_over_last(x: &DTensor, weight: &DTensor) -> Result<DTensor> {
    const LEADING: &str = "abcdefghijlmopqrstuvwxyz";
    let signature = match x.shape().len() {
        2 => "t k, n k -> t n",
        3 => "b t k, n k -> b t n",
        dims if (1..=LEADING.len() + 1).contains(&dims) => {
            let leading = &LEADING[..dims - 1];
            return x.einsum(&format!("{leading}k, nk -> {leading}n"), weight);
        }
        _ => {
            let rule = format!("wants 1 to {} dims", LEADING.len() + 1);
            return Err(Error::invalid("linear", rule, x.spec().to_string(), "reshape it first"));
        }
    };
    x.einsum(signature, weight)
}

/// A table of vectors, one per index.
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: ParamId,
}

impl Embedding {
    /// Declares a `weight` `[rows, width]`, filled by `init`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, rng::Init, tensor::Tensor};
    /// use isoshard::nn::{Embedding, Forward, Module, Params, Plan};
    /// spmd(3, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 3)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let table = Embedding::new(params.root().child("wte"), 11, 4, Init::Ones)?;
    ///     let index = DTensor::distribute(&mesh, &Tensor::from_slice(&[3i64, 10], [2])?, Layout::replicated(1))?;
    ///     assert_eq!(table.forward(&Forward::eval(&params), &index)?.shape()[..], [2, 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Scope::param`] refuses.
    pub fn new(mut scope: Scope<'_>, rows: usize, width: usize, init: Init) -> Result<Embedding> {
        Ok(Embedding { weight: scope.param("weight", [rows, width], init)? })
    }

    /// Returns the products of `x` `[.., width]`, with any number of leading dims, with every row: scores `[.., rows]`.
    /// The head of a model with tied weights.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, rng::Init, tensor::DType};
    /// use isoshard::nn::{Embedding, Forward, Params, Plan};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let table = Embedding::new(params.root().child("wte"), 3, 2, Init::Ones)?;
    ///     let x = DTensor::full(&mesh, DType::F32, [2], 0.25, Layout::replicated(0))?;
    ///     let scores = table.scores(&Forward::eval(&params), &x)?;
    ///     assert_eq!(scores.full_tensor()?.to_vec::<f32>()?, [0.5; 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an `x` whose last dim is not `width`; returns an error if a rank fails.
    pub fn scores(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        cx.with_param(self.weight, |table| product_over_last(x, table))
    }
}

impl Module for Embedding {
    /// Returns the row of each index: `index` (i64) of any shape gives `[.., width]`.
    ///
    /// # Errors
    /// Refuses indices outside the table; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, index: &DTensor) -> Result<DTensor> {
        cx.with_param(self.weight, |table| table.embedding(index))
    }
}

/// Layer normalisation over the last dim, with eps 1e-5 (Ba et al. 2016).
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: ParamId,
    bias: Option<ParamId>,
}

impl LayerNorm {
    /// Declares a `weight` `[width]` of ones and, if `bias` is set, a `bias` `[width]` of zeros.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, tensor::Tensor};
    /// use isoshard::nn::{Forward, LayerNorm, Module, Params, Plan};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     let norm = LayerNorm::new(params.root().child("norm"), 2, true)?;
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
    pub fn new(mut scope: Scope<'_>, width: usize, bias: bool) -> Result<LayerNorm> {
        let weight = scope.param("weight", [width], Init::Ones)?;
        let bias = if bias { Some(scope.param("bias", [width], Init::Zeros)?) } else { None };
        Ok(LayerNorm { weight, bias })
    }
}

impl Module for LayerNorm {
    /// Normalises each vector of the last dim of `x` `[.., width]`.
    ///
    /// # Errors
    /// Refuses an `x` of another width; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let bias = self.bias.map(|b| cx.param(b)).transpose()?;
        cx.with_param(self.weight, |weight| x.layer_norm(weight, bias.as_ref(), 1e-5))
    }
}

/// Root-mean-square normalisation over the last dim, with eps 1e-6 (Zhang & Sennrich 2019).
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: ParamId,
}

impl RmsNorm {
    /// Declares a `weight` `[width]` of ones.
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
        Ok(RmsNorm { weight: scope.param("weight", [width], Init::Ones)? })
    }
}

impl Module for RmsNorm {
    /// Normalises each vector of the last dim of `x` `[.., width]`.
    ///
    /// # Errors
    /// Refuses an `x` of another width; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        cx.with_param(self.weight, |weight| x.rms_norm(weight, 1e-6))
    }
}
