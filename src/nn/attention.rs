//! Causal self-attention.

use super::forward::Forward;
use super::layers::Linear;
use super::params::Scope;
use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::rng::Init;

/// Multi-head causal self-attention (Vaswani et al. 2017).
///
/// The rows of `qkv.weight` are laid out `[heads, 3, width / heads]`, so that a cut between heads splits queries, keys
/// and values alike.
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
    /// Declares `qkv` and `out`, whose weights are filled by `init` and `out_init`.
    ///
    /// # Errors
    /// Refuses a width that heads do not divide; as [`Scope::param`].
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

    /// Attends over `x` `[batch, time, width]`.
    ///
    /// # Errors
    /// Refuses an `x` that does not fit; a fault of communication.
    pub fn forward(&self, cx: &Forward, x: DTensor) -> Result<DTensor> {
        let &[b, t, width] = &x.shape()[..] else {
            let rule = "wants three dims: batch, time, width";
            return Err(
                Error::invalid("attention", rule, x.spec().to_string(), "reshape it first").at(&self.site)
            );
        };
        let d = width / self.heads;
        let x = cx.site(&self.input, x)?;
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
