//! Mixture of experts: routing, sorting tokens by expert, products per expert, and the losses of a router.
//!
//! Tokens have shape `[tokens, ..]` or `[batch, tokens, ..]`. With a batch dim, each batch entry has slots of its own,
//! so a mesh axis that shards the batch moves no tokens; experts' sums run over the batch along the reduction tree.

use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::ops::{ExpertSlots, GroupSizes, GroupedMatmul, PermuteTokens, Unkeyed, UnpermuteTokens};
use crate::tensor::{DType, Device};

/// Routing tokens to experts, and products per expert.
impl DTensor {
    /// Chooses `k` experts per token from these router logits `[.., experts]`: their numbers, i64 `[.., k]`, in
    /// descending order of their logits (of equal logits the lower number first), and their weights `[.., k]`, the
    /// softmax over the chosen logits (Jiang et al., *Mixtral of Experts*, 2024).
    ///
    /// Weights that are relative to all experts (Fedus et al. 2021) are `logits.softmax(-1)?.gather(-1, &expert)?`.
    /// Communicates as [`DTensor::topk`] does: nothing if each rank holds whole rows of logits.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let logits = Tensor::from_vec(vec![0.0f32, 5.0, 5.0, -1.0, 2.0, -3.0], [2, 3])?;
    ///     let logits = DTensor::distribute(&mesh, &logits, "(S0)")?;
    ///     let (expert, weight) = logits.route_top_k(2)?;
    ///     assert_eq!(expert.full_tensor()?.to_vec::<i64>()?, [1, 2, 1, 0]);
    ///     assert_eq!(weight.full_tensor()?.to_vec::<f32>()?[..2], [0.5, 0.5]);
    ///     assert_eq!(weight.spec().to_string(), "f32[2, 2]@(dp:S0)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses logits without dims, dtypes that are not floating-point, and a `k` of 0 or above the number of experts.
    pub fn route_top_k(&self, k: usize) -> Result<(DTensor, DTensor)> {
        self.dtype().expect_float("route_top_k")?;
        let experts = self.shape().last().copied().unwrap_or(0);
        if k == 0 || k > experts {
            let given = format!("{k} of {}", self.spec());
            let rule = "chooses at least one expert and at most all";
            return Err(Error::invalid("route_top_k", rule, given, "choose another k"));
        }
        let (chosen, expert) = self.topk(k, -1, true)?;
        Ok((expert, chosen.softmax(-1)?))
    }

    /// Returns the slot of each of these assignments of tokens to experts (i64 `[tokens, choices]`, or with a batch
    /// dim) in a list sorted by expert, and the number of assignments per expert, `[experts]` or `[batch, experts]`.
    ///
    /// Assignments to one expert keep the order of tokens in the global tensor. With a `capacity`, each expert has that
    /// many slots and later assignments are dropped: their slot is -1 (Lepikhin et al., *GShard*, 2020).
    ///
    /// A sharded batch dim communicates nothing. If tokens are sharded, each rank receives the expert numbers that it
    /// lacks, 8 bytes per assignment.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let expert = Tensor::from_vec(vec![1i64, 0, 1, 1], [4, 1])?;
    ///     let expert = DTensor::distribute(&mesh, &expert, "(S0)")?;
    ///     let (slot, counts) = expert.expert_slots(2, None)?;
    ///     assert_eq!(slot.full_tensor()?.to_vec::<i64>()?, [1, 0, 2, 3]);
    ///     assert_eq!(counts.full_tensor()?.to_vec::<i64>()?, [1, 3]);
    ///     let (slot, _) = expert.expert_slots(2, Some(2))?;
    ///     assert_eq!(slot.full_tensor()?.to_vec::<i64>()?, [2, 0, 3, -1]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses another dtype or number of dims, expert numbers that are out of range, no experts, and a capacity with which
    /// the slots' numbers exceed i64.
    pub fn expert_slots(&self, experts: usize, capacity: Option<usize>) -> Result<(DTensor, DTensor)> {
        let [slot, counts] = DTensor::apply(&ExpertSlots { experts, capacity }, &[self])?.into_array()?;
        Ok((slot, counts))
    }

    /// Returns the rows of `slots` slots: row `slot[.., t, k]` of the result `[.., slots, width]` is token `t` of this
    /// tensor `[.., tokens, width]`, for each choice `k`. `slot` is i64 `[.., tokens, choices]`, and no two slots of a
    /// batch entry are equal. Tokens with slot -1 are dropped; a slot without a token is zeros (-0).
    ///
    /// A sharded batch dim or width communicates nothing. If tokens are sharded, the result is `Partial`. Each rank needs
    /// all slots of its batch entries, as [`DTensor::expert_slots`] returns them, and receives those that it lacks, 8
    /// bytes each.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2])?;
    ///     let x = DTensor::distribute(&mesh, &x, "(S1)")?;
    ///     let slot = DTensor::distribute(&mesh, &Tensor::from_vec(vec![2i64, 0], [2, 1])?, "(R)")?;
    ///     let y = x.permute_tokens(&slot, 3)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [3.0, 4.0, 0.0, 0.0, 1.0, 2.0]);
    ///     let tokens = y.unpermute_tokens(&slot)?.squeeze(1)?.full_tensor()?;
    ///     assert_eq!(tokens.to_vec::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses shapes that do not fit, slots of another dtype, slots that are out of range, and equal slots of a batch
    /// entry, on every mesh and device.
    pub fn permute_tokens(&self, slot: &DTensor, slots: usize) -> Result<DTensor> {
        let (dims, mut shape) = (self.shape().len(), self.shape().to_vec());
        let fits = matches!(dims, 2 | 3) && slot.shape().len() == dims;
        if !fits || slot.shape()[..dims - 1] != shape[..dims - 1] {
            let given = format!("{}, {}", self.spec(), slot.spec());
            let rule = "wants tokens [tokens, width] and slots [tokens, choices], or both with a batch dim";
            return Err(Error::invalid("permute_tokens", rule, given, "reshape them"));
        }
        shape.insert(dims - 1, slot.shape()[dims - 1]);
        let rows = self.unsqueeze(-2)?.expand(shape)?;
        DTensor::apply_one(&PermuteTokens { slots }, &[&rows, slot])
    }

    /// Returns the rows of tokens from these rows of slots: `x[.., t, k, :]` of the result
    /// `[.., tokens, choices, width]` is row `slot[.., t, k]` of this tensor `[.., slots, width]`, or zeros (-0) if the
    /// assignment was dropped (-1). The transpose of [`DTensor::permute_tokens`], whose page has an example.
    ///
    /// A sharded batch dim or width communicates nothing, and neither do sharded tokens of `slot`. If the slots' rows
    /// are sharded, the result is `Partial`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("ep", 2)])?;
    ///     let y = DTensor::distribute(&mesh, &Tensor::from_vec(vec![5.0f32, 7.0], [2, 1])?, "(S0)")?;
    ///     let slot = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1i64, -1, 0], [3, 1])?, "(R)")?;
    ///     let x = y.unpermute_tokens(&slot)?;
    ///     assert_eq!(x.spec().to_string(), "f32[3, 1, 1]@(ep:P(sum))");
    ///     assert_eq!(x.full_tensor()?.to_vec::<f32>()?, [7.0, 0.0, 5.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses shapes that do not fit, slots of another dtype, and slots that are out of range. Equal slots of a batch entry
    /// read one row several times; then [`DTensor::backward`] refuses the gradient of the rows, since
    /// [`DTensor::permute_tokens`] computes it.
    pub fn unpermute_tokens(&self, slot: &DTensor) -> Result<DTensor> {
        DTensor::apply_one(&UnpermuteTokens, &[self, slot])
    }

    /// Reads these counts per expert (i64 `[experts]` or `[batch, experts]`) as the sizes of groups, equal on every
    /// rank.
    ///
    /// Each rank receives the counts that it lacks, 8 bytes each. On a CUDA device this waits for earlier kernels.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, ops::GroupSizes, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let counts = Tensor::from_vec(vec![2i64, 1, 0, 3], [2, 2])?;
    ///     let counts = DTensor::distribute(&mesh, &counts, "(S0)")?;
    ///     assert_eq!(counts.group_sizes()?, GroupSizes::new(2, [2, 1, 0, 3])?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses counts on [`Device::Meta`], which have no values: create the [`GroupSizes`] there. Refuses another dtype
    /// or number of dims, and negative counts.
    pub fn group_sizes(&self) -> Result<GroupSizes> {
        let refuse = |rule: &str, remedy: &str| {
            Err(Error::invalid("group_sizes", rule, self.spec().to_string(), remedy))
        };
        if self.mesh().device() == Device::Meta {
            return refuse("counts on meta have no values", "give the sizes with GroupSizes::new");
        }
        let (1 | 2, Some(&experts)) = (self.shape().len(), self.shape().last()) else {
            return refuse("wants counts [experts] or [batch, experts]", "reshape them");
        };
        if self.dtype() != DType::I64 {
            return refuse("counts are i64", "cast them first");
        }
        let counts = self.full_tensor()?.to_vec::<i64>()?;
        match counts.iter().map(|&n| usize::try_from(n)).collect::<std::result::Result<Vec<_>, _>>() {
            Ok(sizes) => GroupSizes::new(experts, sizes),
            Err(_) => refuse("a count is negative", ""),
        }
    }

    /// Multiplies each row of this tensor `[.., rows, k]`, sorted by expert, with its expert's matrix of `w`
    /// `[experts, k, n]`: `[.., rows, n]`. `sizes` has the number of rows of each expert, per batch entry.
    ///
    /// Communicates nothing if the rows or the batch, or the columns `n`, are sharded. If the experts are sharded, exact
    /// mode gathers the matrices; fast mode gathers the rows, and the result is `Partial`, since each rank computes the
    /// rows of its experts. In exact mode the gradient of `w` follows the tree over the batch and over each expert's
    /// rows, so a sharded batch leaves it `Partial`; sharded rows within a batch entry are gathered for it.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, ops::GroupSizes, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2, 1])?;
    ///     let x = DTensor::distribute(&mesh, &x, "(S0)")?;
    ///     let w = Tensor::from_vec(vec![1.0f32, 100.0], [2, 1, 1])?; // two experts
    ///     let w = DTensor::distribute(&mesh, &w, "(R)")?;
    ///     let y = x.grouped_matmul(&w, &GroupSizes::new(2, [1, 1, 0, 2])?)?;
    ///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [1.0, 200.0, 300.0, 400.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses shapes and dtypes that do not fit, and sizes that do not add up to the rows.
    pub fn grouped_matmul(&self, w: &DTensor, sizes: &GroupSizes) -> Result<DTensor> {
        DTensor::apply_one(&GroupedMatmul { sizes: Unkeyed(sizes.clone()) }, &[self, w])
    }

    /// Returns `experts * sum over experts of fraction * mean probability` (shape `[]`), which is 1 if tokens are spread
    /// evenly: the load-balancing loss of Fedus et al. (*Switch Transformers*, 2021, equation 4). This
    /// tensor has the router's probabilities `[.., experts]`; `counts` (i64 `[.., experts]`) has the assignments per
    /// expert, from which the fractions follow. f32, or f64 for f64 probabilities. Without tokens, or if all counts are 0, the
    /// loss is 0.
    ///
    /// Communicates one partial sum of `[experts]` elements per operand whose tokens are sharded.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let p = Tensor::from_vec(vec![0.75f32, 0.25, 0.75, 0.25], [2, 2])?;
    ///     let p = DTensor::distribute(&mesh, &p, "(S0)")?;
    ///     let of = |counts: [i64; 2]| -> isoshard::Result<f64> {
    ///         let counts = DTensor::distribute(&mesh, &Tensor::from_slice(&counts, [2])?, "(R)")?;
    ///         p.load_balancing_loss(&counts)?.item()
    ///     };
    ///     assert_eq!((of([1, 1])?, of([2, 0])?), (1.0, 1.5)); // even, and all tokens to the first expert
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses numbers of experts that differ, and probabilities that are not floating-point.
    pub fn load_balancing_loss(&self, counts: &DTensor) -> Result<DTensor> {
        self.dtype().expect_float("load_balancing_loss")?;
        let experts = match (self.shape().split_last(), counts.shape().split_last()) {
            (Some((&a, _)), Some((&b, _))) if a == b => a,
            _ => {
                let given = format!("{}, {}", self.spec(), counts.spec());
                let rule = "wants probabilities and counts of the same experts";
                return Err(Error::invalid("load_balancing_loss", rule, given, ""));
            }
        };
        let leading = |x: &DTensor| (0..x.shape().len() as isize - 1).collect::<Vec<_>>();
        let wide = if self.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let probabilities = self.cast(wide)?;
        let is_empty = self.shape()[..self.shape().len() - 1].contains(&0);
        let mean = if is_empty {
            probabilities.sum(&leading(self), false)?
        } else {
            probabilities.mean(&leading(self), false)?
        };
        let counts = counts.sum(&leading(counts), false)?.cast(wide)?;
        // A total of 0 has no fractions: they are 0.
        let fractions = counts.div(&counts.sum_all()?.clamp_min(1.0)?)?;
        mean.mul(&fractions)?.sum_all()?.mul_scalar(experts as f64)
    }

    /// Returns the mean over tokens of `logsumexp(logits)²` for these router logits `[.., experts]` (shape `[]`): the
    /// router z-loss of Zoph et al. (*ST-MoE*, 2022, equation 5), which keeps logits small. f32, or f64 for f64 logits.
    /// Without tokens the loss is 0.
    ///
    /// Communicates one partial sum of one element if tokens are sharded.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let logits = DTensor::full(&mesh, DType::F64, [3, 4], "(S0)", 2.0)?;
    ///     let loss = logits.router_z_loss()?.item()?;
    ///     assert!((loss - (2.0 + 4f64.ln()).powi(2)).abs() < 1e-12);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses logits without experts, and dtypes that are not floating-point.
    pub fn router_z_loss(&self) -> Result<DTensor> {
        self.dtype().expect_float("router_z_loss")?;
        if self.shape().last().is_none_or(|&experts| experts == 0) {
            let given = self.spec().to_string();
            return Err(Error::invalid("router_z_loss", "wants logits of at least one expert", given, ""));
        }
        let logits = self.cast(if self.dtype() == DType::F64 { DType::F64 } else { DType::F32 })?;
        let log_sum = logits.logsumexp(&[-1], true)?;
        let squares = log_sum.mul(&log_sum)?;
        if self.shape().numel() == 0 { squares.sum_all() } else { squares.mean_all() }
    }
}
