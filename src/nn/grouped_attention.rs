//! Grouped-query attention with rotary positions.

use super::forward::Forward;
use super::layers::Linear;
use super::module::Module;
use super::scope::Scope;
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
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
/// as in Llama: several query heads share one head of keys and values.
///
/// A shard of whole groups has the queries, keys and values that belong together.
#[derive(Clone, Debug)]
pub struct GroupedAttention {
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
    heads: GroupedHeads,
    dropout: f64,
    input: String,
    site: String,
}

impl GroupedAttention {
    /// Declares the maps `q` `[heads · head_width, width]`, `k` and `v` `[kv_heads · head_width, width]` and `out`
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
    ///     let k = params.find("attn.k.weight").expect("it is declared");
    ///     assert_eq!(params.value(k).shape()[..], [8, 10]); // 2 heads of width 4
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
        mut scope: Scope<'_>,
        width: usize,
        heads: GroupedHeads,
        dropout: f64,
        (init, out_init): (Init, Init),
    ) -> Result<GroupedAttention> {
        let GroupedHeads { heads: all, kv_heads, head_width: d, .. } = heads;
        let refused = |rule: &str, given: String| Err(Error::invalid("attention", rule, given, ""));
        if kv_heads == 0 || all == 0 || all % kv_heads != 0 {
            let given = format!("{all} heads, {kv_heads} of keys and values");
            return refused("the heads are not a multiple of those of keys and values", given);
        }
        if d == 0 || d % 2 != 0 {
            return refused("rotary positions turn pairs: a head's width is even", format!("width {d}"));
        }
        let mut linear =
            |name: &str, inputs, outputs, init| Linear::new(scope.child(name), inputs, outputs, false, init);
        Ok(GroupedAttention {
            q: linear("q", width, all * d, init)?,
            k: linear("k", width, kv_heads * d, init)?,
            v: linear("v", width, kv_heads * d, init)?,
            out: linear("out", all * d, width, out_init)?,
            heads,
            dropout,
            input: scope.site("input"),
            site: scope.path().to_string(),
        })
    }
}

impl Module for GroupedAttention {
    /// Attends over `x` `[batch, time, width]`; the result has the same shape.
    ///
    /// # Errors
    /// Refuses an `x` of other dims or another width; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let &[b, t, _] = &x.shape()[..] else {
            let rule = "wants three dims: batch, time, width";
            return Err(
                Error::invalid("attention", rule, x.spec().to_string(), "reshape it first").at(&self.site)
            );
        };
        let GroupedHeads { heads, kv_heads, head_width: d, base } = self.heads;
        let x = cx.site(&self.input, x.clone())?;
        let (q, k, v) = (self.q.forward(cx, &x)?, self.k.forward(cx, &x)?, self.v.forward(cx, &x)?);
        let split = |x: DTensor, heads: usize| x.reshape([b, t, heads, d])?.permute(&[0, 2, 1, 3]);
        let attend = || -> Result<DTensor> {
            let (q, k) = (split(q, heads)?.rotary(base, 0)?, split(k, kv_heads)?.rotary(base, 0)?);
            let y = cx.attention(&q, &k, &split(v, kv_heads)?, 1.0 / (d as f64).sqrt(), self.dropout)?;
            y.permute(&[0, 2, 1, 3])?.reshape([b, t, heads * d])
        };
        let y = attend().map_err(|e| e.at(&self.site))?;
        let y = self.out.forward(cx, &y)?;
        cx.dropout(y, self.dropout)
    }
}
