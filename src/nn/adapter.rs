//! Low-rank adapters of linear maps (LoRA).

use super::forward::Forward;
use super::param_id::ParamId;
use super::params::Params;
use super::pieces::FusedMaps;
use super::product::product_over_last;
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::rng::Init;

/// The sizes of low-rank adapters (Hu et al., *LoRA*, 2022), for [`Decoder::add_lora`](super::Decoder::add_lora).
///
/// ```
/// use isoshard::nn::LoraConfig;
/// let config = LoraConfig { rank: 8, alpha: 16.0, dropout: 0.0 };
/// assert_eq!(config.factor(), 2.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraConfig {
    /// The rank of an adapter's matrix.
    pub rank: usize,
    /// The adapter's result is multiplied by `alpha / rank`.
    pub alpha: f64,
    /// The probability of dropping an element of the adapter's operand.
    pub dropout: f64,
}

impl LoraConfig {
    /// Returns the factor of an adapter's result.
    ///
    /// ```
    /// use isoshard::nn::LoraConfig;
    /// assert_eq!(LoraConfig { rank: 4, alpha: 2.0, dropout: 0.1 }.factor(), 0.5);
    /// ```
    pub fn factor(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.rank > 0 && self.alpha.is_finite() && (0.0..1.0).contains(&self.dropout) {
            return Ok(());
        }
        let rule = "an adapter has a rank of at least 1, a finite alpha and a dropout below 1";
        Err(Error::invalid("lora", rule, format!("{self:?}"), ""))
    }
}

/// An adapter of one map: `factor · (x aᵀ) bᵀ` is added to the map's result.
#[derive(Clone, Debug)]
pub(super) struct Adapter {
    /// `[rank, inputs]`.
    a: ParamId,
    /// `[groups, rows per group, rank]` for a map of a fused parameter, otherwise `[outputs, rank]`.
    b: ParamId,
    config: LoraConfig,
}

/// The shape of a map that takes an adapter.
pub(super) struct AdaptedMap<'a> {
    /// The map's path, such as `h.0.attn.q`.
    pub path: &'a str,
    pub inputs: usize,
    pub outputs: usize,
    /// The number of groups, if the map's parameter is fused.
    pub groups: Option<usize>,
}

impl Adapter {
    /// Declares `lora_a` `[rank, inputs]`, normal with standard deviation `1 / sqrt(inputs)`, and `lora_b` of zeros, whose
    /// piece is `[outputs, rank]`.
    pub(super) fn new(params: &mut Params, map: AdaptedMap<'_>, config: LoraConfig) -> Result<Adapter> {
        let AdaptedMap { path, inputs, outputs, groups } = map;
        let std = 1.0 / (inputs.max(1) as f64).sqrt();
        let mut root = params.root();
        let mut scope = root.child(path);
        let a = scope.param("lora_a", [config.rank, inputs], Init::Normal { mean: 0.0, std })?;
        let b = match groups {
            None => scope.param("lora_b", [outputs, config.rank], Init::Zeros)?,
            Some(groups) => {
                let name = path.rsplit('.').next().expect("a split has a last part");
                let maps = FusedMaps::new(groups, [(name, outputs / groups.max(1))])?;
                scope.fused_param("lora_b", &maps, &[config.rank], Init::Zeros)?
            }
        };
        Ok(Adapter { a, b, config })
    }

    /// Returns the adapter's share of the map's result for `x` `[.., inputs]`.
    pub(super) fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let x = cx.dropout(x.clone(), self.config.dropout)?;
        let low = cx.with_param(self.a, |a| product_over_last(&x, a))?;
        cx.with_param(self.b, |b| product_over_last(&low, b))?.mul_scalar(self.config.factor())
    }

    /// Returns the matrix `factor · b a` that the adapter adds to the map's weight, with the dims of `b` and then the
    /// inputs.
    pub(super) fn matrix(&self, params: &Params) -> Result<DTensor> {
        let (a, b) = (params.value(self.a).detach(), params.value(self.b).detach());
        let signature = if b.shape().len() == 3 { "g n r, r k -> g n k" } else { "n r, r k -> n k" };
        b.einsum(signature, &a)?.mul_scalar(self.config.factor())
    }
}
