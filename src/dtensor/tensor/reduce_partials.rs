//! Small reductions of several tensors in one message.

use std::rc::Rc;

use super::dtensor::DTensor;
use crate::comm::{Group, Lineage, Reduce};
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::redistribute;
use crate::error::Result;
use crate::tensor::{DType, Shape, Tensor};

/// Reductions of one dtype over one group that share a message.
struct ReductionBucket {
    group: Group,
    dtype: DType,
    /// Per tensor: its index in the call, how it is folded, and the metadata of the result.
    members: Vec<(usize, Reduce, Rc<TensorMeta>)>,
}

impl DTensor {
    /// Applies [`DTensor::reduce_partial`] to each tensor, with the same bits. Tensors that are reduced over the same
    /// ranks share one all-gather of every rank's partial values, so each rank receives the partial values of all
    /// other ranks whole. Meant for many small tensors, such as the squared norms of all gradients.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?, "(S0)")?;
    ///     let sums = DTensor::reduce_partials(&[x.sum_all()?, x.mul(&x)?.sum_all()?])?;
    ///     assert_eq!((sums[0].local().item()?, sums[1].local().item()?), (6.0, 14.0));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if communication fails.
    pub fn reduce_partials(xs: &[DTensor]) -> Result<Vec<DTensor>> {
        let mut buckets: Vec<ReductionBucket> = Vec::new();
        let mut done: Vec<Option<DTensor>> = vec![None; xs.len()];
        for (i, x) in xs.iter().enumerate() {
            let meta = x.mesh.intern(x.meta.spec().with_layout(x.layout().reduced())?)?;
            let m = redistribute::find(&x.mesh, &x.meta, &meta)?;
            let Some((group, reduce)) = m.only_all_reduce().filter(|_| x.history.is_none()) else {
                done[i] = Some(x.reduce_partial()?);
                continue;
            };
            let like =
                |b: &&mut ReductionBucket| b.group.ranks() == group.ranks() && b.dtype == x.local.dtype();
            match buckets.iter_mut().find(like) {
                Some(bucket) => bucket.members.push((i, reduce.clone(), meta)),
                None => buckets.push(ReductionBucket {
                    group: group.clone(),
                    dtype: x.local.dtype(),
                    members: vec![(i, reduce.clone(), meta)],
                }),
            }
        }
        for bucket in buckets {
            bucket.run(xs, &mut done)?;
        }
        Ok(done.into_iter().map(|x| x.expect("each is alone or in a bucket")).collect())
    }
}

impl ReductionBucket {
    fn run(&self, xs: &[DTensor], done: &mut [Option<DTensor>]) -> Result<()> {
        let len = |member: usize, reduce: &Reduce| reduce.part_shape(member).numel();
        let total = |member: usize| self.members.iter().map(|(_, r, _)| len(member, r)).sum::<usize>();
        let shapes: Vec<Shape> = (0..self.group.len()).map(|m| [total(m)].into()).collect();
        let device = xs[self.members[0].0].mesh.device();
        let mut mine = Tensor::uninit_on(device, self.dtype, shapes[self.group.index()].clone())?;
        let mut at = 0;
        for (i, ..) in &self.members {
            let x = &xs[*i].local;
            x.copy_block(&mut mine, x.shape(), (0, x.strides()), (at, &x.shape().strides()))?;
            at += x.numel();
        }
        let _lineage = Lineage::of_all(self.members.iter().map(|(i, ..)| xs[*i].lineage)).enter();
        let all = self.group.all_gather(&mine, &shapes)?;
        let mut starts = vec![0; self.group.len()];
        for (i, reduce, meta) in &self.members {
            let part = |(member, all): (usize, &Tensor)| {
                let len = len(member, reduce);
                starts[member] += len;
                all.narrow(0, starts[member] - len, len)?.reshape(reduce.part_shape(member))
            };
            let parts = all.iter().enumerate().map(part).collect::<Result<Vec<_>>>()?;
            let x = &xs[*i];
            done[*i] = Some(DTensor::wrap(&x.mesh, reduce.fold(&parts)?, meta.clone(), x.lineage));
        }
        let others = (0..self.group.len()).filter(|m| *m != self.group.index()).map(total).sum::<usize>();
        if let Some((i, ..)) = self.members.first() {
            xs[*i].mesh.count_call(self.dtype.bytes_of(others));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::{DeviceMesh, Reduction};
    use crate::placement::Layout;

    #[test]
    fn as_one_by_one_by_bits() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 3), ("b", 2)])?;
            let value = |n: usize| {
                let x = (0..n * 5).map(|i| (i as f32 * 0.7).sin() * 10f32.powi(i as i32 % 7 - 3)).collect();
                Tensor::from_vec(x, [n, 5])
            };
            let mut xs = Vec::new();
            for (n, layout) in [
                (7, "(S0, R)"),
                (5, "(S1, S0)"),
                (4, "(R, S0)"),
                (0, "(S0, R)"),
                (9, "(R, R)"),
                (2, "(S0, S0)"),
            ] {
                xs.push(DTensor::distribute(&mesh, &value(n)?, layout.parse::<Layout>()?)?.sum_all()?);
            }
            for reduction in [Reduction::Exact, Reduction::Fast] {
                let together = mesh.with_reduction(reduction, || DTensor::reduce_partials(&xs))?;
                for (one, x) in together.iter().zip(&xs) {
                    let alone = x.reduce_partial()?;
                    assert_eq!(one.local().as_bytes()?, alone.local().as_bytes()?);
                    assert_eq!(one.layout(), alone.layout());
                }
            }
            Ok(())
        };
        spmd(6, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
