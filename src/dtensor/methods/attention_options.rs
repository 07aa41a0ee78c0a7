//! Attention with masks and further operands.

use crate::dtensor::{DTensor, IntoDraw};
use crate::error::Result;
use crate::ops::{Attention, Bits, ScoreRule, Unkeyed};
use crate::rng::Draw;

/// The scale, masks and further operands of [`DTensor::attention_with`]. A query that sees no key has the result 0.
#[derive(Clone, Debug)]
pub struct AttentionOptions {
    scale: f64,
    q_offset: Option<usize>,
    rule: ScoreRule,
    bias: Option<DTensor>,
    mask: Option<DTensor>,
    documents: Option<[DTensor; 2]>,
}

impl AttentionOptions {
    /// Returns options in which each query sees all keys: bidirectional attention, or cross attention if queries and
    /// keys differ in number. `scale` multiplies the scores.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{AttentionOptions, DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let v = Tensor::from_vec(vec![1.0f32, 2.0, 6.0], [1, 1, 3, 1])?;
    ///     let v = DTensor::distribute(&mesh, &v, "(R)")?;
    ///     let q = DTensor::zeros(&mesh, v.dtype(), [1, 1, 2, 1], "(S2)")?;
    ///     let y = q.attention_with(&v, &v, &AttentionOptions::bidirectional(1.0))?;
    ///     assert_eq!(y.spec().to_string(), "f32[1, 1, 2, 1]@(tp:S2)"); // nothing was communicated
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [3.0, 3.0]); // the mean of all values
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn bidirectional(scale: f64) -> AttentionOptions {
        let rule = ScoreRule::BIDIRECTIONAL;
        AttentionOptions { scale, q_offset: None, rule, bias: None, mask: None, documents: None }
    }

    /// Returns options in which each query sees the keys up to its own position, as [`DTensor::attention`].
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{AttentionOptions, DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let v = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 3.0], [1, 1, 2, 1])?, "()")?;
    ///     let y = v.attention_with(&v, &v, &AttentionOptions::causal(0.0))?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [1.0, 2.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn causal(scale: f64) -> AttentionOptions {
        AttentionOptions { rule: ScoreRule::CAUSAL, ..AttentionOptions::bidirectional(scale) }
    }

    /// Limits the keys that a query sees to `before` keys before its own position and `after` keys after it: a sliding
    /// window (Beltagy et al., *Longformer*, 2020). Keys outside all windows of a block of queries are not computed.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{AttentionOptions, DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let v = Tensor::from_vec(vec![1.0f32, 3.0, 5.0], [1, 1, 3, 1])?;
    ///     let v = DTensor::distribute(&mesh, &v, "()")?;
    ///     let window = AttentionOptions::bidirectional(0.0).window(1, 0); // each position and the one before
    ///     assert_eq!(v.attention_with(&v, &v, &window)?.full_tensor()?.to_vec::<f32>()?, [1.0, 2.0, 4.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn window(mut self, before: usize, after: usize) -> AttentionOptions {
        let least = |old: Option<usize>, new: usize| Some(old.map_or(new, |old| old.min(new)));
        (self.rule.before, self.rule.after) =
            (least(self.rule.before, before), least(self.rule.after, after));
        self
    }

    /// Gives query `i` the position `offset + i`, as [`DTensor::attention_at`]. Key `j` has the position `j`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{AttentionOptions, DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let v = Tensor::from_vec(vec![2.0f32, 4.0, 8.0], [1, 1, 3, 1])?;
    ///     let v = DTensor::distribute(&mesh, &v, "()")?;
    ///     let last = AttentionOptions::causal(0.0).offset(2).window(1, 0);
    ///     let y = v.slice(2, 2, 1)?.attention_with(&v, &v, &last)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [6.0]); // the mean of the last two values
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn offset(mut self, offset: usize) -> AttentionOptions {
        self.q_offset = Some(offset);
        self
    }

    /// Replaces each score `s` by `cap * tanh(s / cap)` (Gemma Team, *Gemma 2*, 2024), before bias and masks.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{AttentionOptions, DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let v = Tensor::from_vec(vec![0.0f64, 1000.0], [1, 1, 2, 1])?;
    ///     let v = DTensor::distribute(&mesh, &v, "()")?;
    ///     let capped = AttentionOptions::bidirectional(1.0).soft_cap(2.0);
    ///     let y = v.attention_with(&v, &v, &capped)?.full_tensor()?.to_f64_vec();
    ///     assert_eq!(y[1].round(), 881.0); // 1000 / (1 + exp(-2))
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn soft_cap(mut self, cap: f64) -> AttentionOptions {
        self.rule.soft_cap = Some(Bits(cap));
        self
    }

    /// Adds `bias` to the scores, as in T5 (Raffel et al., 2020). Its shape is `[batch, heads, queries, keys]`, in which
    /// any extent may be 1. It has a gradient. A bias of -inf leaves the key out.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{AttentionOptions, DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let v = Tensor::from_vec(vec![0.0f64, 4.0, 0.0, 8.0], [2, 1, 2, 1])?;
    ///     let v = DTensor::distribute(&mesh, &v, "(S0)")?;
    ///     let bias = Tensor::from_vec(vec![0.0, 3f64.ln()], [1, 1, 1, 2])?;
    ///     let bias = DTensor::distribute(&mesh, &bias, "(R)")?.requires_grad()?;
    ///     let y = v.attention_with(&v, &v, &AttentionOptions::bidirectional(0.0).bias(&bias))?;
    ///     // The second key has three quarters of the weight.
    ///     let rounded: Vec<f64> = y.full_tensor()?.to_f64_vec().iter().map(|y| y.round()).collect();
    ///     assert_eq!(rounded, [3.0, 3.0, 6.0, 6.0]);
    ///     let gradient = y.sum_all()?.backward()?.take(&bias).expect("bias is a leaf tensor");
    ///     assert_eq!(gradient.shape(), bias.shape());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn bias(mut self, bias: &DTensor) -> AttentionOptions {
        (self.rule.bias, self.bias) = (true, Some(bias.clone()));
        self
    }

    /// Lets a query see the keys where `mask`, a bool tensor, is true. Its shape is `[batch, heads, queries, keys]`, in
    /// which any extent may be 1: a padding mask is `[batch, 1, 1, keys]`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{AttentionOptions, DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let v = Tensor::from_vec(vec![1.0f32, 3.0, f32::INFINITY], [1, 1, 3, 1])?;
    ///     let v = DTensor::distribute(&mesh, &v, "()")?;
    ///     let mask = Tensor::from_vec(vec![true, true, false], [1, 1, 1, 3])?;
    ///     let mask = DTensor::distribute(&mesh, &mask, "()")?;
    ///     let q = DTensor::zeros(&mesh, v.dtype(), [1, 1, 1, 1], "()")?;
    ///     let y = q.attention_with(&v, &v, &AttentionOptions::bidirectional(1.0).mask(&mask))?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [2.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn mask(mut self, mask: &DTensor) -> AttentionOptions {
        (self.rule.mask, self.mask) = (true, Some(mask.clone()));
        self
    }

    /// Lets a query see the keys of its own document only, for sequences that are packed one after another. `of_queries`
    /// `[batch, queries]` and `of_keys` `[batch, keys]` are i64 numbers of documents; a batch extent of 1 serves all.
    /// A leaf of 32 keys whose documents no query of a block belongs to is not computed.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{AttentionOptions, DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let v = Tensor::from_vec(vec![1.0f32, 3.0, 7.0], [1, 1, 3, 1])?;
    ///     let v = DTensor::distribute(&mesh, &v, "()")?;
    ///     let documents = Tensor::from_vec(vec![0i64, 0, 1], [1, 3])?;
    ///     let documents = DTensor::distribute(&mesh, &documents, "()")?;
    ///     let packed = AttentionOptions::causal(0.0).documents(&documents, &documents);
    ///     assert_eq!(v.attention_with(&v, &v, &packed)?.full_tensor()?.to_vec::<f32>()?, [1.0, 2.0, 7.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn documents(mut self, of_queries: &DTensor, of_keys: &DTensor) -> AttentionOptions {
        (self.rule.documents, self.documents) = (true, Some([of_queries.clone(), of_keys.clone()]));
        self
    }
}

/// Attention with masks and further operands.
impl DTensor {
    /// Applies attention to queries, keys and values `[batch, heads, time, width]`, `softmax(scale * q k^T) v`, with the
    /// masks and further operands of `options`. Keys and values may have fewer heads (grouped queries).
    ///
    /// Communicates nothing if batch, heads or queries are sharded, or the last dim of `v`. A mask, bias or document
    /// number is sharded with the queries' batch, heads and time, or replicated if its extent is 1. No tensor of all
    /// scores is allocated. Sums over keys leave masked keys out, so that a prefix of the keys gives the same bits by
    /// itself as with masked keys after it. If the queries are sharded and heads grouped, the backward pass gathers the
    /// queries.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{AttentionOptions, DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = Tensor::from_vec((0..12).map(|i| (i as f32).cos()).collect(), [2, 1, 3, 2])?;
    ///     let x = DTensor::distribute(&mesh, &x, "(S0)")?;
    ///     // The second sequence has one position of padding.
    ///     let mask = Tensor::from_vec(vec![true, true, true, true, true, false], [2, 1, 1, 3])?;
    ///     let mask = DTensor::distribute(&mesh, &mask, "(S0)")?;
    ///     let y = x.attention_with(&x, &x, &AttentionOptions::bidirectional(0.7).mask(&mask))?;
    ///     let short = x.slice(2, 0, 2)?;
    ///     let alone = short.attention_with(&short, &short, &AttentionOptions::bidirectional(0.7))?;
    ///     let second = |x: &DTensor| x.slice(0, 1, 1)?.slice(2, 0, 2)?.full_tensor()?.to_vec::<f32>();
    ///     assert_eq!(second(&y)?, second(&alone)?); // the same bits without the padding
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses shapes and dtypes that do not match, a soft cap that is not positive, and in a window queries at
    /// positions that no key has.
    pub fn attention_with(&self, k: &DTensor, v: &DTensor, options: &AttentionOptions) -> Result<DTensor> {
        self.attention_with_dropout(k, v, options, 0.0, Draw { seed: 0, number: 0 })
    }

    /// Applies [`DTensor::attention_with`], and drops attention probabilities with probability `p`. `from` is a
    /// `&mut Generator` or a `Draw`. The same elements are dropped on every layout. Communicates as
    /// [`DTensor::attention_with`] does, and compares a generator at its [first draw](IntoDraw) on a mesh.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{AttentionOptions, DTensor, DeviceMesh}, rng::Draw, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let x = DTensor::full(&mesh, DType::F32, [1, 2, 4, 2], "(S1)", 1.0)?;
    ///     let (all, draw) = (AttentionOptions::bidirectional(1.0), Draw { seed: 7, number: 0 });
    ///     let y = x.attention_with_dropout(&x, &x, &all, 1.0, draw)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [0.0; 16]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`DTensor::attention_with`]. Refuses a `p` outside `[0, 1]`, and generators that differ
    /// between ranks.
    pub fn attention_with_dropout(
        &self,
        k: &DTensor,
        v: &DTensor,
        options: &AttentionOptions,
        p: f64,
        from: impl IntoDraw,
    ) -> Result<DTensor> {
        let draw = Unkeyed(from.into_draw("attention", self.mesh())?);
        let &AttentionOptions { scale, q_offset, rule, .. } = options;
        let op = Attention { scale: Bits(scale), p: Bits(p), q_offset, draw, rule };
        let mut ins = vec![self, k, v];
        ins.extend(&options.bias);
        ins.extend(&options.mask);
        ins.extend(options.documents.iter().flatten());
        Ok(DTensor::apply(&op, &ins)?.remove(0))
    }
}
