//! Causal self-attention.

use super::forward::Forward;
use super::layers::Linear;
use super::module::Module;
use super::scope::Scope;
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::rng::Init;

/// Multi-head causal self-attention (Vaswani et al. 2017).
///
/// The rows of `qkv.weight` are ordered `[heads, 3, width / heads]`, so a shard of whole heads has their queries, keys
/// and values.
#[derive(Clone, Debug)]
pub struct CausalAttention {
    qkv: Linear,
    out: Linear,
    heads: usize,
    dropout: f64,
    input: String,
    site: String,
}

impl CausalAttention {
    /// Declares the maps `qkv` `[3 · width, width]` and `out` `[width, width]`, filled by `init` and `out_init`, and
    /// the site `input`. `dropout` is the probability with which an attention probability, or an
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
        mut scope: Scope<'_>,
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
        Ok(CausalAttention {
            qkv: Linear::new(scope.child("qkv"), width, 3 * width, bias, init)?,
            out: Linear::new(scope.child("out"), width, width, bias, out_init)?,
            heads,
            dropout,
            input: scope.site("input"),
            site: scope.path().to_string(),
        })
    }
}

impl Module for CausalAttention {
    /// Attends over `x` `[batch, time, width]`; the result has the same shape.
    ///
    /// # Errors
    /// Refuses an `x` of other dims or another width; returns an error if a rank fails.
    fn forward(&self, cx: &Forward, x: &DTensor) -> Result<DTensor> {
        let &[b, t, width] = &x.shape()[..] else {
            let rule = "wants three dims: batch, time, width";
            return Err(
                Error::invalid("attention", rule, x.spec().to_string(), "reshape it first").at(&self.site)
            );
        };
        let d = width / self.heads;
        let x = cx.site(&self.input, x.clone())?;
        let qkv = self.qkv.forward(cx, &x)?;
        let attend = || -> Result<DTensor> {
            let qkv = qkv.reshape([b, t, self.heads, 3 * d])?.permute(&[0, 2, 1, 3])?;
            let parts = qkv.split(-1, &[d, d, d])?;
            let y = cx.attention(&parts[0], &parts[1], &parts[2], 1.0 / (d as f64).sqrt(), self.dropout)?;
            y.permute(&[0, 2, 1, 3])?.reshape([b, t, width])
        };
        let y = attend().map_err(|e| e.at(&self.site))?;
        let y = self.out.forward(cx, &y)?;
        cx.dropout(y, self.dropout)
    }
}
