//! Linear maps of one input whose weights are separate tensors, with one contraction for the input's gradient.

use crate::comm::operator_scope;
use crate::dtensor::DTensor;
use crate::dtensor::call::dispatch::plan_for;
use crate::dtensor::plan::explain::note_move;
use crate::dtensor::plan::gradient_needs::GradientNeeds;
use crate::error::{Error, Result};
use crate::ops::{Matmul, Op};
use crate::tensor::{LEAF, Shape};

/// The letters of leading dims beside `g`, `n` and `k`: groups, rows and inputs.
const LEADING: &str = "abcdefhijlmopqrstuvwxyz";

/// Linear maps of one input.
impl DTensor {
    /// Returns the products `x wᵀ` over the last dim of this tensor with each weight `[outputs, inputs]`, such as those
    /// of queries, keys and values. The gradient of this tensor is one contraction over the outputs of all weights.
    ///
    /// The products, and the gradients of the weights, have the bits of separate products. The gradient of this tensor
    /// has other bits than with separate products, and the same on every mesh. Separate products leave one sum per
    /// weight, which exact mode reduces one by one. Here one sum is left, so a tensor-parallel backward pass makes one
    /// reduction. Its tree has the order of a [fused parameter](crate::nn::FusedMaps): the rows of each weight are
    /// divided into equal groups, and group 0 of all weights comes first. The number of groups is the least for which
    /// every weight has a multiple of 1 to 32 rows per group: the common divisor of the numbers of rows, over its own
    /// largest divisor up to 32. [`DTensor::joint_linear_in`] takes another number.
    ///
    /// Forward, it communicates what separate products do, and moves this tensor at most once per mesh axis. Backward, nothing moves
    /// before the contraction if the weights are sharded over their rows, along an axis whose length divides the number
    /// of groups; otherwise rows or gradients may move. The backward pass copies the weights and the gradients of the
    /// products once, to interleave their groups. With one weight, this is its product.
    ///
    /// ```
    /// use isoshard::{assert_comm, comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let full = |shape: [usize; 2], layout: &str| {
    ///         DTensor::full(&mesh, DType::F32, shape, layout, 0.5)?.requires_grad()
    ///     };
    ///     let x = full([3, 4], "(R)")?;
    ///     let (gate, up) = (full([64, 4], "(S0)")?, full([64, 4], "(S0)")?);
    ///     let ys = x.joint_linear(&[&gate, &up])?;
    ///     assert_eq!(ys[1].spec().to_string(), "f32[3, 64]@(tp:S1)");
    ///     let mut loss = ys[0].mul(&ys[1])?.sum_all()?.reduce_partial()?;
    ///     let grads = assert_comm!(mesh, calls == 1, loss.backward()?); // one sum: one reduction
    ///     assert_eq!(grads.get(&x).expect("a leaf").local().to_vec::<f32>()?, [64.0; 12]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses no weights, a tensor without dims or of more than 24, weights whose dims, extents or dtypes do not fit,
    /// and tensors on different meshes; returns an error if communication fails.
    pub fn joint_linear(&self, weights: &[&DTensor]) -> Result<Vec<DTensor>> {
        let rows: Vec<usize> = weights.iter().filter_map(|w| w.shape().first().copied()).collect();
        self.joint_linear_in(default_groups(&rows), weights)
    }

    /// Runs [`DTensor::joint_linear`] with a number of groups, which divides every weight's number of rows: for
    /// attention, the heads of keys and values.
    ///
    /// The number decides the order of the sum, and so the bits of the input's gradient. With two or more weights they
    /// are those of a fused parameter with as many groups.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(3, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 3)])?;
    ///     let full = |shape: &[usize], layout: &str| DTensor::full(&mesh, DType::F32, shape, layout, 1.0);
    ///     // Six heads of queries and three of keys and values, of width 2: a rank has one group.
    ///     let (q, k, v) = (full(&[12, 5], "(S0)")?, full(&[6, 5], "(S0)")?, full(&[6, 5], "(S0)")?);
    ///     let ys = full(&[7, 5], "(R)")?.joint_linear_in(3, &[&q, &k, &v])?;
    ///     assert_eq!(ys.iter().map(|y| y.shape()[1]).collect::<Vec<_>>(), [12, 6, 6]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DTensor::joint_linear`] refuses, no groups, and groups that do not divide a weight's rows.
    pub fn joint_linear_in(&self, groups: usize, weights: &[&DTensor]) -> Result<Vec<DTensor>> {
        check(self, groups, weights)?;
        let maps = JointMaps::new(self.shape().len(), groups)?;
        if let [weight] = weights {
            return Ok(vec![DTensor::apply_one(&maps.product, &[self, weight])?]);
        }
        // The derivative keeps operands as they are given, but a partial sum reduced.
        let x = match self.layout().has_partial() {
            true => moved_operand(&maps.product, [self, weights[0]], 0)?,
            false => self.clone(),
        };
        let operands: Vec<&DTensor> = [&x].into_iter().chain(weights.iter().copied()).collect();
        let op = maps.product.clone();
        let forward = |ins: &[DTensor]| {
            let (mut x, mut ys) = (ins[0].clone(), Vec::new());
            for w in &ins[1..] {
                x = moved_operand(&op, [&x, w], 0)?;
                ys.push(DTensor::apply_one(&op, &[&x, w])?);
            }
            Ok((ys, ins.to_vec()))
        };
        let backward = move |saved: &[DTensor], grads: &[DTensor], needs: &GradientNeeds<'_>| {
            maps.gradients(saved, grads, needs)
        };
        DTensor::custom_vjp_of_needed("joint_linear", &operands, forward, backward)
    }
}

/// The operators of a joint map.
struct JointMaps {
    groups: usize,
    /// `(x, w) -> y`, and the derivative by the weight: `(dy, x) -> dw`.
    product: Matmul,
    weight_grad: Matmul,
    /// The derivative by the input, `(dy, w) -> dx`, with the groups and rows of all weights.
    input_grad: Matmul,
}

impl JointMaps {
    fn new(dims: usize, groups: usize) -> Result<JointMaps> {
        let leading = &LEADING[..dims - 1];
        Ok(JointMaps {
            groups,
            product: Matmul::new(&format!("{leading}k, nk -> {leading}n"))?,
            weight_grad: Matmul::new(&format!("{leading}n, {leading}k -> nk"))?,
            input_grad: Matmul::new(&format!("{leading}gn, gnk -> {leading}k"))?,
        })
    }

    /// Returns the gradients of the input and of the weights, given those of the products.
    fn gradients(
        &self,
        saved: &[DTensor],
        grads: &[DTensor],
        needs: &GradientNeeds<'_>,
    ) -> Result<Vec<Option<DTensor>>> {
        let (mut x, weights) = (saved[0].clone(), &saved[1..]);
        let dx = if needs.needed[0] { Some(self.input_gradient(weights, grads)?) } else { None };
        let mut found = vec![dx];
        for (i, dy) in grads.iter().enumerate() {
            if !needs.needed[i + 1] {
                found.push(None);
                continue;
            }
            let dw = needs.in_groups(&dy.mesh, i + 1, || -> Result<DTensor> {
                x = moved_operand(&self.weight_grad, [dy, &x], 1)?;
                DTensor::apply_one(&self.weight_grad, &[dy, &x])
            });
            found.push(Some(dw?));
        }
        Ok(found)
    }

    /// Returns the input's gradient: one contraction over the interleaved groups of all weights.
    fn input_gradient(&self, weights: &[DTensor], grads: &[DTensor]) -> Result<DTensor> {
        let (mut of_weights, mut of_grads) = (Vec::new(), Vec::new());
        for (w, dy) in weights.iter().zip(grads) {
            let rows = [self.groups, w.shape()[0] / self.groups];
            let leading = &dy.shape()[..dy.shape().len() - 1];
            of_weights.push(w.reshape([rows[0], rows[1], w.shape()[1]])?);
            of_grads.push(dy.reshape(leading.iter().copied().chain(rows).collect::<Shape>())?);
        }
        let dy = DTensor::cat(&of_grads.iter().collect::<Vec<_>>(), -1)?;
        let w = DTensor::cat(&of_weights.iter().collect::<Vec<_>>(), 1)?;
        DTensor::apply_one(&self.input_grad, &[&dy, &w])
    }
}

/// Returns operand `i` with its history, moved as the plan of a call moves it, so that later calls find it moved.
fn moved_operand(op: &Matmul, ins: [&DTensor; 2], i: usize) -> Result<DTensor> {
    let (plan, x) = (plan_for(op, &ins)?, ins[i]);
    let Some((m, to)) = &plan.moves[i] else { return Ok(x.clone()) };
    let _label = operator_scope(op.name());
    note_move(&x.mesh, m, &x.meta, to);
    let moved = DTensor::wrap(&x.mesh, x.run_move(m)?, to.clone(), x.lineage);
    Ok(DTensor { history: x.history.clone(), ..moved })
}

/// Returns the number of groups if the program gives none.
fn default_groups(rows: &[usize]) -> usize {
    let divisor = rows.iter().copied().fold(0, greatest_common_divisor);
    let in_group = (1..=LEAF).rev().find(|n| divisor.is_multiple_of(*n)).expect("1 divides all numbers");
    (divisor / in_group).max(1)
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Refuses operands and groups that do not fit.
fn check(x: &DTensor, groups: usize, weights: &[&DTensor]) -> Result<()> {
    let refused = |rule: String, given: String, remedy: &str| {
        Err(Error::invalid("joint_linear", rule, given, remedy.to_string()))
    };
    let most = LEADING.len() + 1;
    if weights.is_empty() {
        return refused("wants one or more weights".into(), "none".into(), "");
    }
    let Some(&inputs) = x.shape().last().filter(|_| x.shape().len() <= most) else {
        return refused(format!("wants 1 to {most} dims"), x.spec().to_string(), "reshape it first");
    };
    for (i, w) in weights.iter().enumerate() {
        let fits = matches!(w.shape()[..], [_, n] if n == inputs) && w.dtype() == x.dtype();
        if !fits || !w.dtype().is_float() {
            let rule =
                format!("wants weights [outputs, inputs] of the input's floating dtype and width {inputs}");
            let given = format!("{} and weight {i} {}", x.spec(), w.spec());
            return refused(rule, given, "transpose or cast one of them");
        }
        if groups == 0 || !w.shape()[0].is_multiple_of(groups) {
            let rule = "the number of groups does not divide the rows of every weight".to_string();
            let given = format!("{groups} group(s) for weight {i} {}", w.spec());
            return refused(rule, given, "give a common divisor of the weights' rows");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_up_to_a_leaf_of_the_common_divisor() {
        for (rows, groups) in [
            (&[4096, 1024, 1024][..], 32),
            (&[14336, 14336], 448),
            (&[48, 48], 2),
            (&[37, 37], 37),
            (&[7, 14], 1),
            (&[0, 64], 2),
            (&[0, 0], 1),
            (&[], 1),
        ] {
            assert_eq!(default_groups(rows), groups, "{rows:?}");
        }
    }
}
