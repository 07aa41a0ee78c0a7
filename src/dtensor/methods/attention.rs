//! Attention.

use super::attention_options::AttentionOptions;
use crate::dtensor::{DTensor, IntoDraw};
use crate::error::Result;
use crate::rng::Draw;

/// Attention.
impl DTensor {
    /// Applies causal attention to queries, keys and values `[batch, heads, time, width]`:
    /// `softmax(scale * q k^T) v`; each query sees the keys up to its own time. Keys and values may have fewer
    /// heads (grouped queries). Communicates nothing if batch or heads are sharded, or the queries' time alone; keys and
    /// values that are sharded along time are gathered.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let v = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [1, 2, 2, 1])?, "(S1)")?;
    ///     let y = v.attention(&v, &v, 0.5)?;
    ///     assert_eq!(y.spec().to_string(), "f32[1, 2, 2, 1]@(dp:S1)");
    ///     // The first query of each head sees the first key alone.
    ///     assert_eq!(y.slice(2, 0, 1)?.full_tensor()?.to_vec::<f32>()?, [1.0, 3.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses shapes that do not match, and a number of queries other than that of keys: see
    /// [`DTensor::attention_at`].
    pub fn attention(&self, k: &DTensor, v: &DTensor, scale: f64) -> Result<DTensor> {
        self.attention_dropout(k, v, scale, 0.0, Draw { seed: 0, number: 0 })
    }

    /// Applies [`DTensor::attention`] to queries that follow keys of earlier times, as when decoding with a cache:
    /// query `i` has the time `q_offset + i` and sees the keys up to that time; key `j` has the time `j`. Communicates
    /// as [`DTensor::attention`] does.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let x = Tensor::from_vec((0..16).map(|i| (i as f32 * 0.7).sin()).collect(), [1, 1, 8, 2])?;
    ///     let x = DTensor::distribute(&mesh, &x, Layout::replicated(1))?;
    ///     let whole = x.attention(&x, &x, 0.5)?;
    ///     let last = x.slice(2, 6, 2)?.attention_at(&x, &x, 0.5, 6)?;
    ///     assert_eq!(
    ///         last.full_tensor()?.to_vec::<f32>()?,
    ///         whole.slice(2, 6, 2)?.full_tensor()?.to_vec::<f32>()?
    ///     );
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses shapes that do not match, and queries at times that have no key.
    pub fn attention_at(&self, k: &DTensor, v: &DTensor, scale: f64, q_offset: usize) -> Result<DTensor> {
        self.attention_with(k, v, &AttentionOptions::causal(scale).offset(q_offset))
    }

    /// Applies [`DTensor::attention`], and drops attention probabilities with probability `p`. `from` is a
    /// `&mut Generator` or a `Draw`. The same elements are dropped on every layout. Communicates as
    /// [`DTensor::attention`] does, and compares a generator at its [first draw](IntoDraw) on a mesh.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, rng::Draw, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let draw = Draw { seed: 7, number: 0 };
    ///     let values = Tensor::from_vec((0..8).map(|i| i as f32).collect(), [1, 2, 4, 1])?;
    ///     let dropped = |layout: &str| -> isoshard::Result<Vec<f32>> {
    ///         let x = DTensor::distribute(&mesh, &values, layout)?;
    ///         x.attention_dropout(&x, &x, 1.0, 0.5, draw)?.full_tensor()?.to_vec()
    ///     };
    ///     assert_eq!(dropped("(R)")?, dropped("(S1)")?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses shapes that do not match, a `p` outside `[0, 1]`, and generators that differ between ranks.
    pub fn attention_dropout(
        &self,
        k: &DTensor,
        v: &DTensor,
        scale: f64,
        p: f64,
        from: impl IntoDraw,
    ) -> Result<DTensor> {
        self.attention_with_dropout(k, v, &AttentionOptions::causal(scale), p, from)
    }
}
