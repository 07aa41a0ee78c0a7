//! The feed-forward parts of transformers.

use super::forward::Forward;
use super::layers::Linear;
use super::params::Scope;
use crate::dtensor::DTensor;
use crate::error::Result;
use crate::rng::Init;

/// `down(gelu(up(x)))`, with dropout after.
#[derive(Clone, Debug)]
pub struct Mlp {
    up: Linear,
    down: Linear,
    dropout: f64,
    input: String,
}

impl Mlp {
    /// Declares `up` `[hidden, width]` and `down` `[width, hidden]`.
    ///
    /// # Errors
    /// As [`Scope::param`].
    pub fn new(
        mut scope: Scope<'_>,
        (width, hidden): (usize, usize),
        bias: bool,
        dropout: f64,
        (init, down_init): (Init, Init),
    ) -> Result<Mlp> {
        Ok(Mlp {
            up: Linear::new(scope.child("up"), width, hidden, bias, init)?,
            down: Linear::new(scope.child("down"), hidden, width, bias, down_init)?,
            dropout,
            input: scope.site("input"),
        })
    }

    /// Applies the layers to `x` `[batch, time, width]`.
    ///
    /// # Errors
    /// Refuses an `x` that does not fit; a fault of communication.
    pub fn forward(&self, cx: &Forward, x: DTensor) -> Result<DTensor> {
        let x = cx.site(&self.input, x)?;
        let y = self.down.forward(cx, &self.up.forward(cx, &x)?.gelu()?)?;
        cx.dropout(y, self.dropout)
    }
}

/// `down(silu(gate(x)) · up(x))`, with dropout after: the gated layer of Llama (Shazeer 2020).
#[derive(Clone, Debug)]
pub struct GatedMlp {
    gate: Linear,
    up: Linear,
    down: Linear,
    dropout: f64,
    input: String,
}

impl GatedMlp {
    /// Declares `gate` and `up` `[hidden, width]` and `down` `[width, hidden]`, without biases.
    ///
    /// # Errors
    /// As [`Scope::param`].
    pub fn new(
        mut scope: Scope<'_>,
        (width, hidden): (usize, usize),
        dropout: f64,
        (init, down_init): (Init, Init),
    ) -> Result<GatedMlp> {
        Ok(GatedMlp {
            gate: Linear::new(scope.child("gate"), width, hidden, false, init)?,
            up: Linear::new(scope.child("up"), width, hidden, false, init)?,
            down: Linear::new(scope.child("down"), hidden, width, false, down_init)?,
            dropout,
            input: scope.site("input"),
        })
    }

    /// Applies the layers to `x` `[batch, time, width]`.
    ///
    /// # Errors
    /// Refuses an `x` that does not fit; a fault of communication.
    pub fn forward(&self, cx: &Forward, x: DTensor) -> Result<DTensor> {
        let x = cx.site(&self.input, x)?;
        let gated = self.gate.forward(cx, &x)?.silu()?.mul(&self.up.forward(cx, &x)?)?;
        let y = self.down.forward(cx, &gated)?;
        cx.dropout(y, self.dropout)
    }
}
