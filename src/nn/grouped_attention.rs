//! Grouped-query attention with rotary positions.

use super::forward::Forward;
use super::module::Module;
use super::rotary_config::RotaryConfig;
use super::scope::Scope;
use super::self_attention::{SelfAttention, SelfAttentionConfig};
use crate::dtensor::DTensor;
use crate::error::Result;
use crate::rng::Init;

/// The heads of a [`GroupedAttention`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupedHeads {
    /// The number of query heads.
    pub heads: usize,
    /// The number of key and value heads, each shared by `heads / kv_heads` neighbouring query heads.
    pub kv_heads: usize,
    /// The width of a head, an even number.
    pub head_width: usize,
    /// The base of the rotary angles.
    pub base: f64,
}

/// Grouped-query causal self-attention (Ainslie et al. 2023) with rotary positions (Su et al. 2021) and without biases,
/// as in Llama: several query heads share one head of keys and values. A [`SelfAttention`] without further options.
#[derive(Clone, Debug)]
pub struct GroupedAttention(SelfAttention);

impl GroupedAttention {
    /// Declares the maps `qkv` `[kv_heads, (heads / kv_heads + 2) · head_width, width]` and `out`
    /// `[width, heads · head_width]`, filled by `init` and `out_init`, and the site `input`. `dropout` is the
    /// probability with which an attention probability, or an element of the result, is set to zero.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, rng::Init, tensor::DType};
    /// use isoshard::nn::{Forward, GroupedAttention, GroupedHeads, Module, Params, Plan};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let heads = GroupedHeads { heads: 6, kv_heads: 2, head_width: 4, base: 1e4 };
    ///     let init = Init::Normal { mean: 0.0, std: 0.02 };
    ///     let attention = GroupedAttention::new(params.root().child("attn"), 10, heads, 0.0, (init, init))?;
    ///     let qkv = params.find("attn.qkv.weight").expect("it is declared");
    ///     assert_eq!(params.value(qkv).shape()[..], [2, 20, 10]); // two groups of 3 + 1 + 1 heads of width 4
    ///     let x = DTensor::full(&mesh, DType::F32, [3, 5, 10], 1.0, Layout::replicated(1))?;
    ///     assert_eq!(attention.forward(&Forward::eval(&params), &x)?.shape()[..], [3, 5, 10]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses heads that are not a multiple of `kv_heads`, an odd width of heads, and what [`Scope::param`] refuses.
    pub fn new(
        scope: Scope<'_>,
        width: usize,
        heads: GroupedHeads,
        dropout: f64,
        (init, out_init): (Init, Init),
    ) -> Result<GroupedAttention> {
        let GroupedHeads { heads, kv_heads, head_width, base } = heads;
        let config = SelfAttentionConfig {
            rotary: Some(RotaryConfig::plain(base)),
            attention_dropout: dropout,
            dropout,
            ..SelfAttentionConfig::new(heads, kv_heads, head_width)
        };
        Ok(GroupedAttention(SelfAttention::new(scope, width, config, (init, out_init))?))
    }
}

impl Module for GroupedAttention {
    /// Attends over `x` `[batch, time, width]`; the result has the same shape.
    ///
    /// # Errors
    /// Refuses an `x` of other dims or another width; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        self.0.forward(cx, x)
    }
}
