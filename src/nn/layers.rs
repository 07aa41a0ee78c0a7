//! Linear maps, embeddings and normalisations.

use super::forward::Forward;
use super::params::{ParamId, Scope};
use crate::dtensor::DTensor;
use crate::error::Result;
use crate::rng::Init;

/// `x wᵀ + b` over the last dim, with `w` of shape `[outputs, inputs]`.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: ParamId,
    bias: Option<ParamId>,
    site: String,
}

impl Linear {
    /// Declares `weight` `[outputs, inputs]`, filled by `init`, and, if wanted, a `bias` `[outputs]` of zeros.
    ///
    /// # Errors
    /// As [`Scope::param`].
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

    /// Applies the map to `x` `[batch, time, inputs]`. A row-parallel weight leaves a partial sum, which is reduced at
    /// the site of this module's path before the bias is added.
    ///
    /// # Errors
    /// Refuses an `x` that does not fit; a fault of communication.
    pub fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let y = cx.site(&self.site, cx.with_param(self.weight, |weight| project(x, weight))?)?;
        match self.bias {
            Some(bias) => cx.with_param(bias, |bias| y.add(bias)),
            None => Ok(y),
        }
    }
}

/// `x wᵀ` over the last dim of `x`, which has two or three.
fn project(x: &DTensor, weight: &DTensor) -> Result<DTensor> {
    x.einsum(if x.shape().len() == 2 { "t k, n k -> t n" } else { "b t k, n k -> b t n" }, weight)
}

/// A table of vectors.
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: ParamId,
}

impl Embedding {
    /// Declares `weight` `[rows, width]`, filled by `init`.
    ///
    /// # Errors
    /// As [`Scope::param`].
    pub fn new(mut scope: Scope<'_>, rows: usize, width: usize, init: Init) -> Result<Embedding> {
        Ok(Embedding { weight: scope.param("weight", [rows, width], init)? })
    }

    /// The rows that `index` (i64) names.
    ///
    /// # Errors
    /// Refuses indices outside the table; a fault of communication.
    pub fn forward(&self, cx: &Forward, index: &DTensor) -> Result<DTensor> {
        cx.with_param(self.weight, |table| table.embedding(index))
    }

    /// Scores of `x` `[batch, time, width]` against every row: the head of a model with tied weights.
    ///
    /// # Errors
    /// Refuses an `x` that does not fit; a fault of communication.
    pub fn scores(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        cx.with_param(self.weight, |table| project(x, table))
    }
}

/// Layer normalisation over the last dim, eps 1e-5.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: ParamId,
    bias: Option<ParamId>,
}

impl LayerNorm {
    /// Declares `weight` `[width]` of ones and, if wanted, `bias` `[width]` of zeros.
    ///
    /// # Errors
    /// As [`Scope::param`].
    pub fn new(mut scope: Scope<'_>, width: usize, bias: bool) -> Result<LayerNorm> {
        let weight = scope.param("weight", [width], Init::Ones)?;
        let bias = if bias { Some(scope.param("bias", [width], Init::Zeros)?) } else { None };
        Ok(LayerNorm { weight, bias })
    }

    /// Normalises each vector of the last dim.
    ///
    /// # Errors
    /// Refuses an `x` of another width; a fault of communication.
    pub fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let bias = self.bias.map(|b| cx.param(b)).transpose()?;
        cx.with_param(self.weight, |weight| x.layer_norm(weight, bias.as_ref(), 1e-5))
    }
}

/// Root-mean-square normalisation over the last dim, eps 1e-6.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: ParamId,
}

impl RmsNorm {
    /// Declares `weight` `[width]` of ones.
    ///
    /// # Errors
    /// As [`Scope::param`].
    pub fn new(mut scope: Scope<'_>, width: usize) -> Result<RmsNorm> {
        Ok(RmsNorm { weight: scope.param("weight", [width], Init::Ones)? })
    }

    /// Normalises each vector of the last dim.
    ///
    /// # Errors
    /// Refuses an `x` of another width; a fault of communication.
    pub fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        cx.with_param(self.weight, |weight| x.rms_norm(weight, 1e-6))
    }
}
