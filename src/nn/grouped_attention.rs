//! Grouped-query attention with rotary positions.

use super::forward::Forward;
use super::layers::Linear;
use super::params::Scope;
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::rng::Init;

/// The heads of a [`GroupedAttention`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupedHeads {
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values, each for `heads / kv_heads` neighbouring heads of queries.
    pub kv_heads: usize,
    /// The width of a head; it is even.
    pub head_width: usize,
    /// The base of the rotary angles.
    pub base: f64,
}

/// Causal self-attention in which several heads of queries share one of keys and values (Ainslie et al. 2023), with rotary
/// positions (Su et al. 2021) and without biases: the attention of Llama.
///
/// A cut of `q`, `k` and `v` between groups of heads splits all three alike.
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
    /// Declares `q` `[heads · head_width, width]`, `k` and `v` `[kv_heads · head_width, width]` and `out`
    /// `[width, heads · head_width]`, whose weights are filled by `init` and `out_init`.
    ///
    /// # Errors
    /// Refuses heads that groups do not divide, and an odd width of heads; as [`Scope::param`].
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

    /// Attends over `x` `[batch, time, width]`.
    ///
    /// # Errors
    /// Refuses an `x` that does not fit; a fault of communication.
    pub fn forward(&self, cx: &Forward, x: DTensor) -> Result<DTensor> {
        let &[b, t, _] = &x.shape()[..] else {
            let rule = "wants three dims: batch, time, width";
            return Err(
                Error::invalid("attention", rule, x.spec().to_string(), "reshape it first").at(&self.site)
            );
        };
        let GroupedHeads { heads, kv_heads, head_width: d, base } = self.heads;
        let x = cx.site(&self.input, x)?;
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
