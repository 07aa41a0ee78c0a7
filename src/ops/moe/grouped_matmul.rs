//! `grouped_matmul`: products of rows, sorted by expert, with their expert's matrix.

use smallvec::smallvec;

use super::cpu::with_batch;
use crate::error::{Error, Result};
use crate::ops::record::work::elements;
use crate::ops::{
    Algebra, AxisPlacement, GroupSizes, GroupedMatmulGrad, Input, MeshAxis, Meta, Metas, Op, Permute, Row,
    Sample, Tensors, Unkeyed, Vjp, Windows, Work, arity, list,
};
use crate::placement::Leaf;
use crate::tensor::{Shape, Tensor, cpu, cuda};

/// The product of each row of `x` `[.., rows, k]`, with at most one leading dim, with one matrix of `w`
/// `[experts, k, n]`: a result `[.., rows, n]`. Rows are sorted by expert: of each batch entry the first rows belong to
/// expert 0, the next to expert 1, as many as `sizes` says. Applied by
/// [`DTensor::grouped_matmul`](crate::dtensor::DTensor::grouped_matmul).
///
/// Operands have one floating-point dtype. If the experts are sharded, each rank fills in the rows of its experts,
/// which gives a partial sum.
///
/// ```
/// use isoshard::{ops::{GroupSizes, GroupedMatmul, Unkeyed, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 2.0, 3.0], [3, 1])?;
/// let w = Tensor::from_vec(vec![10.0, 100.0], [2, 1, 1])?; // two experts
/// let sizes = Unkeyed(GroupSizes::new(2, [1, 2])?); // row 0 belongs to expert 0, rows 1 and 2 to expert 1
/// assert_eq!(eval_whole(&GroupedMatmul { sizes }, &[x, w])?[0].to_f64_vec(), [10.0, 200.0, 300.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GroupedMatmul {
    /// The number of rows of each expert. Plans do not depend on it.
    pub sizes: Unkeyed<GroupSizes>,
}

impl Op for GroupedMatmul {
    fn name(&self) -> &'static str {
        "grouped_matmul"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x, w] = arity(self.name(), ins)?;
        x.dtype.expect_float(self.name())?;
        let (dims, last) = (x.shape.len(), x.shape.last());
        if !matches!(dims, 2 | 3) || w.shape.len() != 3 || last != w.shape.get(1) || x.dtype != w.dtype {
            let rule = "wants rows [rows, k] or [batch, rows, k], and matrices [experts, k, n], of one dtype";
            return Err(Error::invalid(self.name(), rule, list(ins), "reshape or cast them"));
        }
        self.sizes.0.expect(self.name(), &x.shape, w.shape[0])?;
        let shape: Shape = x.shape[..dims - 1].iter().copied().chain([w.shape[2]]).collect();
        Ok(smallvec![Meta { dtype: x.dtype, shape }])
    }

    /// If the experts are sharded, each rank fills in the rows of its experts. Exact mode does not use that row: the tree
    /// of a contraction that another axis shards does not know such parts.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let last = ins[0].shape.len() - 1;
        let mut rows: Vec<Row> = (0..last)
            .map(|d| Row::new([AxisPlacement::S(d), AxisPlacement::R], [AxisPlacement::S(d)]))
            .collect();
        rows.push(Row::new([AxisPlacement::R, AxisPlacement::S(2)], [AxisPlacement::S(last)]));
        rows.push(Row::new([AxisPlacement::R, AxisPlacement::S(0)], [AxisPlacement::SUM]));
        rows.push(Row::new(
            [AxisPlacement::S(last), AxisPlacement::S(1)],
            [AxisPlacement::TreeSum(Leaf::Chain)],
        ));
        rows.extend(Algebra::Multilinear.rows(2));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let multiply = |a: &Tensor, b: &Tensor| cpu::gemm(self.name(), a, b, &[b.shape()[1]]);
        Ok(smallvec![self.products(&ins[0], &ins[1], at, &multiply)?])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let multiply = |a: &Tensor, b: &Tensor| cuda::gemm(self.name(), a, b, &[b.shape()[1]], at.exact);
        Ok(smallvec![self.products(&ins[0], &ins[1], at, &multiply)?])
    }

    /// A product and an addition per row and element of its matrix.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        let k = ins[1].shape[1] as u64;
        Work::new(elements(&outs[0]).saturating_mul(2).saturating_mul(k), ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let (x, w, dy) = (g.input(0), g.input(1), g.grad(0));
        if g.needs(0) {
            let transposed = g.apply(Permute::swap(3, 1, 2), &[w])?;
            let dx = g.apply(self.clone(), &[dy, transposed])?;
            g.set(0, dx);
        }
        if g.needs(1) {
            let dw = g.apply(
                GroupedMatmulGrad { experts: self.sizes.0.experts(), sizes: self.sizes.clone() },
                &[x, dy],
            )?;
            g.set(1, dw);
        }
        Ok(())
    }

    fn takes_groups(&self) -> bool {
        true
    }
}

impl GroupedMatmul {
    /// Multiplies this rank's rows, one product per group. `multiply` takes `[1, m, k]` and `[1, k, n]`.
    fn products(
        &self,
        x: &Tensor,
        w: &Tensor,
        at: &Windows,
        multiply: &dyn Fn(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.sizes.0.expect(self.name(), &at.ins[0].global, at.ins[1].global[0])?;
        let (first, held) = (at.ins[1].start(0), w.shape()[0]);
        let shape = at.outs[0].local().clone();
        let mut out = match held == at.ins[1].global[0] {
            true => Tensor::uninit_on(x.device(), x.dtype(), shape)?,
            // Another rank has the other experts: their rows become -0, which a sum ignores.
            false => Tensor::full_on(x.device(), x.dtype(), shape, -0.0)?,
        };
        if out.numel() == 0 {
            return Ok(out);
        }
        let (x, n) = (with_batch(x, 3)?, w.shape()[2]);
        let rows = x.shape()[1];
        for part in self.sizes.0.parts(&at.ins[0], x.shape()[0], rows) {
            let Some(e) = part.expert.checked_sub(first).filter(|&e| e < held) else { continue };
            let a = x.narrow(0, part.entry, 1)?.narrow(1, part.start, part.len)?;
            let y = multiply(&a, &w.narrow(0, e, 1)?)?;
            let start = (part.entry * rows + part.start) * n;
            y.copy_block(&mut out, &[part.len, n], (0, &[n, 1]), (start, &[n, 1]))?;
        }
        Ok(out)
    }
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sample = |sizes: &[usize], x: &[usize], w: [usize; 3]| {
        let sizes = Unkeyed(GroupSizes::new(w[0], sizes).expect("sizes of whole batch entries"));
        Sample::new(GroupedMatmul { sizes }, [Input::ints(x), Input::ints(w)])
    };
    vec![
        sample(&[2, 0, 3], &[5, 3], [3, 3, 2]),
        sample(&[1, 2, 3, 0, 0, 3], &[3, 3, 5], [2, 5, 3]),
        sample(&[2, 1, 0], &[3, 1], [3, 1, 2]),
        sample(&[0, 0], &[0, 3], [2, 3, 1]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Matmul, eval_whole};
    use crate::tensor::DType;

    fn noise(shape: impl Into<Shape>, seed: usize) -> Tensor {
        let shape = shape.into();
        let value = |i: usize| ((i * 7919 + seed * 31) % 1009) as f64 * 0.013 - 5.0;
        Tensor::from_vec((0..shape.numel()).map(value).collect(), shape).unwrap()
    }

    /// Each group is a matrix product by itself, by bits, in every dtype and for views.
    #[test]
    fn a_group_has_the_bits_of_a_matrix_product() {
        let sizes = [4, 0, 37, 1, 40, 0];
        let op = GroupedMatmul { sizes: Unkeyed(GroupSizes::new(3, sizes).unwrap()) };
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let x = noise([2, 70, 41], 1).transpose(1, 2).unwrap().cast(dtype).unwrap();
            let w = noise([3, 5, 70], 2).transpose(1, 2).unwrap().cast(dtype).unwrap();
            let y = eval_whole(&op, &[x.clone(), w.clone()]).unwrap().remove(0);
            let product = Matmul::new("m k, k n -> m n").unwrap();
            for entry in 0..2 {
                let mut start = 0;
                for e in 0..3 {
                    let len = sizes[entry * 3 + e];
                    let part = x.select(0, entry).unwrap().narrow(0, start, len).unwrap();
                    let want = eval_whole(&product, &[part, w.select(0, e).unwrap()]).unwrap().remove(0);
                    let got = y.select(0, entry).unwrap().narrow(0, start, len).unwrap();
                    assert_eq!(got.to_f64_vec(), want.to_f64_vec(), "{dtype} {entry} {e}");
                    start += len;
                }
            }
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        let (x, w) = (noise([5, 2], 1), noise([2, 2, 3], 2));
        let of = |experts, sizes: &[usize]| {
            let op = GroupedMatmul { sizes: Unkeyed(GroupSizes::new(experts, sizes).unwrap()) };
            eval_whole(&op, &[x.clone(), w.clone()]).map(drop).unwrap_err().to_string()
        };
        let text = "grouped_matmul: wants sizes of 2 experts that add up to 5 rows in each of 1 batch entries; \
                    got sizes [1, 3] of 2 experts; pass the sizes of these rows";
        assert_eq!(of(2, &[1, 3]), text);
        assert!(of(1, &[5]).contains("sizes [5] of 1 experts"));
        assert!(of(2, &[1, 4, 2, 3]).contains("sizes [1, 4, 2, 3]"));
        let e = GroupSizes::new(2, [1, 2, 3]).unwrap_err().to_string();
        assert!(e.starts_with("group_sizes: wants one size per batch entry and expert"), "{e}");
    }
}
