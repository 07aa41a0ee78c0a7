//! Low-rank adapters of linear maps (LoRA).

use crate::dtensor::{DTensor, product_over_last};
use crate::error::{Error, Result};
use crate::nn::forward::Forward;
use crate::nn::params::Params;
use crate::nn::params::param_id::ParamId;
use crate::nn::params::pieces::FusedMaps;
use crate::rng::Init;

/// The sizes of low-rank adapters (Hu et al., *LoRA*, 2022), for [`Decoder::add_lora`](crate::nn::Decoder::add_lora).
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

    pub(in crate::nn) fn check(&self) -> Result<()> {
        if self.rank > 0 && self.alpha.is_finite() && (0.0..1.0).contains(&self.dropout) {
            return Ok(());
        }
        let rule = "an adapter has a rank of at least 1, a finite alpha and a dropout below 1";
        Err(Error::invalid("lora", rule, format!("{self:?}"), ""))
    }
}

/// An adapter of one map: `factor · (x aᵀ) bᵀ` is added to the map's result.
///
/// The experts' maps have the adapter `factor · (x a) b` per expert, stacked as their weights are.
#[derive(Clone, Debug)]
pub(in crate::nn) struct Adapter {
    /// `[rank, inputs]`, or `[experts, inputs, rank]`.
    a: ParamId,
    /// `[groups, rows per group, rank]` for a map of a fused parameter, otherwise `[outputs, rank]`; or
    /// `[experts, rank, outputs]`.
    b: ParamId,
    config: LoraConfig,
    of_experts: bool,
}

/// The shape of a map that takes an adapter.
pub(in crate::nn) struct AdaptedMap<'a> {
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
    pub(in crate::nn) fn new(
        params: &mut Params,
        map: AdaptedMap<'_>,
        config: LoraConfig,
    ) -> Result<Adapter> {
        let AdaptedMap { path, inputs, outputs, groups } = map;
        let mut root = params.root();
        let mut scope = root.child(path);
        let a = scope.param("lora_a", [config.rank, inputs], normal(inputs))?;
        let b = match groups {
            None => scope.param("lora_b", [outputs, config.rank], Init::Zeros)?,
            Some(groups) => {
                let name = path.rsplit('.').next().expect("a split has a last part");
                let maps = FusedMaps::new(groups, [(name, outputs / groups.max(1))])?;
                scope.fused_param("lora_b", &maps, &[config.rank], Init::Zeros)?
            }
        };
        Ok(Adapter { a, b, config, of_experts: false })
    }

    /// Declares an adapter for each expert of a stacked map: `lora_a` `[experts, inputs, rank]` and `lora_b`
    /// `[experts, rank, outputs]`, with the values of [`Adapter::new`].
    pub(in crate::nn) fn of_experts(
        params: &mut Params,
        path: &str,
        [experts, inputs, outputs]: [usize; 3],
        config: LoraConfig,
    ) -> Result<Adapter> {
        let mut root = params.root();
        let mut scope = root.child(path);
        let a = scope.param("lora_a", [experts, inputs, config.rank], normal(inputs))?;
        let b = scope.param("lora_b", [experts, config.rank, outputs], Init::Zeros)?;
        Ok(Adapter { a, b, config, of_experts: true })
    }

    /// Returns the adapter's share of the map's result for `x` `[.., inputs]`.
    pub(in crate::nn) fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        self.forward_by(cx, x, &product_over_last)
    }

    /// Returns the adapter's share of the map's result, with the product by which the map multiplies operand and weight.
    pub(in crate::nn) fn forward_by(
        &self,
        cx: &Forward,
        x: &DTensor,
        product: &dyn Fn(&DTensor, &DTensor) -> Result<DTensor>,
    ) -> Result<DTensor> {
        let x = cx.dropout(x.clone(), self.config.dropout)?;
        let low = cx.with_param(self.a, |a| product(&x, a))?;
        cx.with_param(self.b, |b| product(&low, b))?.mul_scalar(self.config.factor())
    }

    /// Returns the matrix `factor · b a` that the adapter adds to the map's weight, in the weight's shape.
    pub(in crate::nn) fn matrix(&self, params: &Params) -> Result<DTensor> {
        let (a, b) = (params.value(self.a).detach(), params.value(self.b).detach());
        let signature = match b.shape().len() {
            _ if self.of_experts => "e r n, e k r -> e k n",
            3 => "g n r, r k -> g n k",
            _ => "n r, r k -> n k",
        };
        b.einsum(signature, &a)?.mul_scalar(self.config.factor())
    }
}

/// Returns the distribution of `lora_a`.
fn normal(inputs: usize) -> Init {
    Init::Normal { mean: 0.0, std: 1.0 / (inputs.max(1) as f64).sqrt() }
}
