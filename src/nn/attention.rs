//! Causal self-attention.

use super::forward::Forward;
use super::module::Module;
use super::scope::Scope;
use super::self_attention::{SelfAttention, SelfAttentionConfig};
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::rng::Init;

/// Multi-head causal self-attention (Vaswani et al. 2017): a [`SelfAttention`] without further options.
#[derive(Clone, Debug)]
pub struct CausalAttention(SelfAttention);

impl CausalAttention {
    /// Declares the maps `qkv` `[heads, 3 · width / heads, width]` and `out` `[width, width]`, filled by `init` and
    /// `out_init`, and the site `input`. `dropout` is the probability with which an attention probability, or an
    /// element of the result, is set to zero.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, rng::Init, tensor::DType};
    /// use isoshard::nn::{CausalAttention, Forward, Module, Params, Plan};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     // Each rank has one of the two heads.
    ///     let plan = Plan::default().shard_blocks("attn.qkv.*", "tp", 0, 2);
    ///     let plan = plan.shard_blocks("attn.out.weight", "tp", 1, 2);
    ///     let mut params = Params::new(&mesh, plan, 7)?;
    ///     let init = Init::Normal { mean: 0.0, std: 0.02 };
    ///     let attention = CausalAttention::new(params.root().child("attn"), (8, 2), true, 0.1, (init, init))?;
    ///     let x = DTensor::full(&mesh, DType::F32, [3, 5, 8], 1.0, Layout::replicated(1))?;
    ///     assert_eq!(attention.forward(&Forward::eval(&params), &x)?.shape()[..], [3, 5, 8]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a width that is not a multiple of the heads, and what [`Scope::param`] refuses.
    pub fn new(
        scope: Scope<'_>,
        (width, heads): (usize, usize),
        bias: bool,
        dropout: f64,
        (init, out_init): (Init, Init),
    ) -> Result<CausalAttention> {
        if heads == 0 || width % heads != 0 {
            return Err(Error::invalid(
                "attention",
                "the width is not a multiple of the heads",
                format!("width {width}, {heads} heads"),
                "",
            ));
        }
        let config = SelfAttentionConfig {
            qkv_bias: bias,
            out_bias: bias,
            attention_dropout: dropout,
            dropout,
            ..SelfAttentionConfig::new(heads, heads, width / heads)
        };
        Ok(CausalAttention(SelfAttention::new(scope, width, config, (init, out_init))?))
    }
}

impl Module for CausalAttention {
    /// Attends over `x` `[batch, time, width]`; the result has the same shape.
    ///
    /// # Errors
    /// Refuses an `x` of other dims or another width; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        self.0.forward(cx, x)
    }
}
