//! Small reductions of several tensors in one message.

use std::rc::Rc;

use super::dtensor::DTensor;
use crate::comm::Lineage;
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::redistribute::{self, Move, run_stacked};
use crate::error::Result;
use crate::tensor::Tensor;

impl DTensor {
    /// Applies [`DTensor::reduce_partial`] to each tensor, with the same bits. Tensors of one length that are
    /// reduced over the same axes share one call, in which each rank receives the partial values of all other ranks. Meant for many small tensors, such as the squared norms of all gradients.
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
        let Some(mesh) = xs.first().map(|x| &x.mesh) else { return Ok(Vec::new()) };
        let mut done: Vec<Option<DTensor>> = vec![None; xs.len()];
        let (mut indices, mut metas): (Vec<usize>, Vec<Rc<TensorMeta>>) = Default::default();
        let (mut moves, mut locals): (Vec<Rc<Move>>, Vec<Tensor>) = Default::default();
        for (i, x) in xs.iter().enumerate() {
            if x.history.is_some() || !x.mesh.same(mesh) {
                done[i] = Some(x.reduce_partial()?);
                continue;
            }
            let meta = x.mesh.intern(x.meta.spec().with_layout(x.layout().reduced())?)?;
            let by = redistribute::find(&x.mesh, &x.meta, &meta)?;
            indices.push(i);
            metas.push(meta);
            moves.push(by);
            locals.push(x.local.clone());
        }
        let _lineage = Lineage::of_all(indices.iter().map(|&i| xs[i].lineage)).enter();
        let reduced = run_stacked(mesh, &moves, locals)?;
        for ((i, meta), local) in indices.into_iter().zip(metas).zip(reduced) {
            done[i] = Some(DTensor::wrap(mesh, local, meta, xs[i].lineage));
        }
        Ok(done.into_iter().flatten().collect())
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
