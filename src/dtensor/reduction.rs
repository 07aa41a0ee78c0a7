//! How sums that ranks share are taken.

/// The way in which sums that ranks share are taken; of a mesh
/// ([`DeviceMesh::set_reduction`](super::DeviceMesh::set_reduction)) or of some calls
/// ([`DeviceMesh::with_reduction`](super::DeviceMesh::with_reduction)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Every result has the bits that a single rank computes, on every mesh.
    ///
    /// A sum follows one tree over the *global* extents: see `docs/exactness.md`. Parts of a sum pass through operators that
    /// move elements, and are added up before any other. Where a cut falls between the nodes of the tree, a rank sends the
    /// few nodes it has finished; where it falls inside a leaf that cannot be cut, operands move instead.
    #[default]
    Exact,
    /// Each rank adds up what it has, in one number, and the ranks' numbers are added by a tree over the ranks; parts of a
    /// sum pass through whatever is linear. Results are right up to rounding, and differ from mesh to mesh. Fewer bytes
    /// where cuts do not fall on nodes, or where several partial gradients of one value meet, which are added before they
    /// are reduced; as many where cuts do fall on nodes.
    Fast,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::{DTensor, DeviceMesh};
    use crate::error::Result;
    use crate::placement::Layout;
    use crate::tensor::{DType, Tensor};

    fn value(mesh: &DeviceMesh, dtype: DType, shape: &[usize], layout: &str) -> Result<DTensor> {
        let n: usize = shape.iter().product();
        let whole = Tensor::from_vec((0..n).map(|i| (i % 7) as f32 - 3.0).collect(), shape)?;
        let x = DTensor::distribute(mesh, &whole, Layout::replicated(mesh.mesh().ndim()))?.cast(dtype)?;
        x.redistribute(layout.parse()?)
    }

    /// Forests of two, three and no nodes, also of halves, whose parts are f32.
    #[test]
    fn sums_in_parts_outlive_a_change_of_mode() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 3), ("b", 2)])?;
            for dtype in [DType::F32, DType::BF16] {
                for (rows, layout) in [(12, "(S0, R)"), (2, "(S0, S0)"), (12, "(S0, S1)"), (0, "(S0, R)")] {
                    let x = value(&mesh, dtype, &[rows, 4], layout)?;
                    let w = value(&mesh, dtype, &[4, 4], "(R, R)")?.requires_grad()?;
                    let sum = x.sum(&[0], true)?;
                    assert!(sum.layout().has_partial());
                    let read = || -> Result<Vec<Vec<f64>>> {
                        let y = sum.matmul(&w)?;
                        let both = sum.add(&y)?.mul_scalar(0.5)?;
                        let grad = both.sum_all()?.backward()?.take(&w).expect("w is a leaf");
                        let values =
                            [sum.mul_scalar(3.0)?, y, both.clone(), DTensor::cat(&[&sum, &both], 0)?, grad];
                        values.iter().map(|v| Ok(v.full_tensor()?.to_f64_vec())).collect()
                    };
                    let (exact, fast) = (read()?, mesh.with_reduction(Reduction::Fast, read)?);
                    // Small integers; but halves round them.
                    let rounding = if dtype == DType::F32 { 0.0 } else { 1.0 / 64.0 };
                    for (exact, fast) in exact.iter().zip(&fast) {
                        let largest = exact.iter().fold(1.0f64, |m, v| m.max(v.abs()));
                        let near = exact.iter().zip(fast).all(|(e, f)| (e - f).abs() <= rounding * largest);
                        assert!(near, "{dtype}[{rows}]@{layout}: {exact:?}, {fast:?}");
                    }
                    let again = sum.redistribute(sum.layout().reduced())?;
                    assert_eq!(again.full_tensor()?.to_f64_vec(), sum.full_tensor()?.to_f64_vec());
                }
            }
            Ok(())
        };
        spmd(6, run).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn a_backward_pass_may_run_in_another_mode() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 3)])?;
            let (x, w) =
                (value(&mesh, DType::F32, &[12, 2, 4], "(S0)")?, value(&mesh, DType::F32, &[4], "(R)")?);
            let modes = [Reduction::Exact, Reduction::Fast];
            let gradient = |forward: Reduction, backward: Reduction| -> Result<Vec<f64>> {
                let w = w.requires_grad()?;
                let loss = mesh.with_reduction(forward, || -> Result<DTensor> {
                    let y = x.mul(&w.expand([12, 2, 4])?)?.sum(&[0, 1], false)?;
                    y.mul(&w)?.add(&y)?.sum_all()
                })?;
                let grads = mesh.with_reduction(backward, || loss.backward())?;
                Ok(grads.get(&w).expect("w is a leaf").full_tensor()?.to_f64_vec())
            };
            let all = modes.iter().flat_map(|f| modes.iter().map(|b| gradient(*f, *b)));
            let all = all.collect::<Result<Vec<_>>>()?;
            assert!(all.iter().all(|g| *g == all[0]), "{all:?}");
            Ok(())
        };
        spmd(3, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
