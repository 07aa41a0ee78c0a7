//! `grouped_matmul_grad`: per expert, the product of its transposed rows with their gradients. The derivative of
//! `grouped_matmul`.

use smallvec::smallvec;

use super::cpu::with_batch;
use crate::error::{Error, Result};
use crate::ops::record::work::elements;
use crate::ops::{
    Add, Algebra, AxisPlacement, GroupSizes, GroupedMatmul, Input, MeshAxis, Meta, Metas, Op, Permute, Row,
    Sample, Tensors, Unkeyed, Vjp, Windows, Work, arity, list,
};
use crate::placement::Leaf;
use crate::tensor::{DType, Device, Shape, SplitRule, Tensor, cpu, cuda};

/// The derivative of [`GroupedMatmul`](crate::ops::GroupedMatmul) with respect to the matrices: `(x, dy) -> dw`.
///
/// `x` is `[.., rows, k]`, `dy` `[.., rows, n]` and the result `[experts, k, n]`: per expert, the sum of
/// `x[row] dy[row]ᵀ` over its rows. The sum follows the reduction tree over the batch, and within a batch entry the tree
/// over the expert's rows. An expert without rows has zeros.
///
/// ```
/// use isoshard::{ops::{GroupSizes, GroupedMatmulGrad, Unkeyed, eval_whole}, tensor::Tensor};
/// let (x, dy) = (Tensor::from_vec(vec![1.0, 2.0, 3.0], [3, 1])?, Tensor::from_vec(vec![1.0, 10.0, 10.0], [3, 1])?);
/// let op = GroupedMatmulGrad { experts: 3, sizes: Unkeyed(GroupSizes::new(3, [1, 2, 0])?) };
/// assert_eq!(eval_whole(&op, &[x, dy])?[0].to_f64_vec(), [1.0, 50.0, 0.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GroupedMatmulGrad {
    /// The number of experts, an extent of the result.
    pub experts: usize,
    /// The number of rows of each expert. Plans do not depend on it.
    pub sizes: Unkeyed<GroupSizes>,
}

impl Op for GroupedMatmulGrad {
    fn name(&self) -> &'static str {
        "grouped_matmul_grad"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x, dy] = arity(self.name(), ins)?;
        x.dtype.expect_float(self.name())?;
        let dims = x.shape.len();
        let fits = matches!(dims, 2 | 3)
            && dy.shape.len() == dims
            && x.shape[..dims - 1] == dy.shape[..dims - 1]
            && x.dtype == dy.dtype;
        if !fits {
            let rule = "wants rows [rows, k] or [batch, rows, k], and as many rows of n, of one dtype";
            return Err(Error::invalid(self.name(), rule, list(ins), "reshape or cast them"));
        }
        self.sizes.0.expect(self.name(), &x.shape, self.experts)?;
        let shape = Shape::from([self.experts, x.shape[dims - 1], dy.shape[dims - 1]]);
        Ok(smallvec![Meta { dtype: x.dtype, shape }])
    }

    /// If the batch is sharded, each rank has a part of every expert's sum. If the result is sharded by experts, each
    /// rank adds up its own. A cut of the rows does not follow the groups' trees, so it holds up to rounding.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let last = ins[0].shape.len() - 1;
        let mut rows = Vec::new();
        if last == 2 {
            rows.push(Row::new(
                [AxisPlacement::S(0), AxisPlacement::S(0)],
                [AxisPlacement::TreeSum(Leaf::Pairs)],
            ));
        }
        rows.push(Row::new([AxisPlacement::S(last), AxisPlacement::R], [AxisPlacement::S(1)]));
        rows.push(Row::new([AxisPlacement::R, AxisPlacement::S(last)], [AxisPlacement::S(2)]));
        rows.push(Row::new([AxisPlacement::R, AxisPlacement::R], [AxisPlacement::S(0)]));
        rows.push(Row::new([AxisPlacement::S(last - 1), AxisPlacement::S(last - 1)], [AxisPlacement::SUM]));
        rows.extend(Algebra::Multilinear.rows(2));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let multiply = |a: &Tensor, b: &Tensor| cpu::gemm(self.name(), a, b, &[b.shape()[1]]);
        Ok(smallvec![self.sums(ins, at, &multiply)?])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        let multiply = |a: &Tensor, b: &Tensor| cuda::gemm(self.name(), a, b, &[b.shape()[1]], at.exact);
        Ok(smallvec![self.sums(ins, at, &multiply)?])
    }

    /// A product and an addition per row and element of its matrix.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        let k = outs[0].shape[1] as u64;
        Work::new(elements(&ins[1]).saturating_mul(2).saturating_mul(k), ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let (x, dy, dw) = (g.input(0), g.input(1), g.grad(0));
        let again = GroupedMatmul { sizes: self.sizes.clone() };
        if g.needs(0) {
            let transposed = g.apply(Permute::swap(3, 1, 2), &[dw])?;
            let dx = g.apply(again.clone(), &[dy, transposed])?;
            g.set(0, dx);
        }
        if g.needs(1) {
            let ddy = g.apply(again, &[x, dw])?;
            g.set(1, ddy);
        }
        Ok(())
    }

    fn takes_groups(&self) -> bool {
        true
    }
}

/// The sum of one expert, while it is computed.
struct ExpertSum<'a> {
    x: &'a Tensor,
    dy: &'a Tensor,
    /// The first row and the number of rows, per batch entry.
    rows: &'a [(usize, usize)],
    multiply: &'a dyn Fn(&Tensor, &Tensor) -> Result<Tensor>,
}

impl GroupedMatmulGrad {
    /// Adds up this rank's rows for the experts whose sums it returns.
    fn sums(
        &self,
        ins: &[Tensor],
        at: &Windows,
        multiply: &dyn Fn(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let sizes = &self.sizes.0;
        sizes.expect(self.name(), &at.ins[0].global, sizes.experts())?;
        // A sum over batch entries is rounded once, when it is complete.
        let wide = |x: &Tensor| match x.dtype() {
            DType::F16 | DType::BF16 => x.cast(DType::F32),
            _ => Ok(x.clone()),
        };
        let (x, dy) = (with_batch(&wide(&ins[0])?, 3)?, with_batch(&wide(&ins[1])?, 3)?);
        let (local, first) = (at.outs[0].local(), at.outs[0].start(0));
        let (entries, matrix) = (x.shape()[0], [local[1], local[2]]);
        let mut out = Tensor::zeros_on(x.device(), ins[0].dtype(), local.clone())?;
        if out.numel() == 0 || entries == 0 {
            return Ok(out);
        }
        let mut rows = vec![(0, 0); local[0] * entries];
        for part in sizes.parts(&at.ins[0], entries, x.shape()[1]) {
            if let Some(e) = part.expert.checked_sub(first).filter(|&e| e < local[0]) {
                rows[e * entries + part.entry] = (part.start, part.len);
            }
        }
        for (e, rows) in rows.chunks_exact(entries).enumerate() {
            let sum = ExpertSum { x: &x, dy: &dy, rows, multiply }.node(0, entries)?.cast(out.dtype())?;
            let strides = [matrix[1], 1];
            sum.copy_block(&mut out, &matrix, (0, &strides), (e * matrix[0] * matrix[1], &strides))?;
        }
        Ok(out)
    }
}

impl ExpertSum<'_> {
    /// Returns the sum over batch entries `lo..hi`, along the reduction tree, as a `[1, k, n]`.
    fn node(&self, lo: usize, hi: usize) -> Result<Tensor> {
        if hi - lo == 1 {
            let (start, len) = self.rows[lo];
            let of = |t: &Tensor| t.narrow(0, lo, 1)?.narrow(1, start, len);
            return (self.multiply)(&of(self.x)?.transpose(1, 2)?, &of(self.dy)?);
        }
        let mid = lo + Leaf::Pairs.left_of(SplitRule::Halves, hi - lo).expect("pairs can be cut");
        let (left, right) = (self.node(lo, mid)?, self.node(mid, hi)?);
        sum(left, right)
    }
}

/// Returns `left + right`, in the buffer of `left`.
fn sum(left: Tensor, right: Tensor) -> Result<Tensor> {
    let metas = [Meta::of(&left), Meta::of(&right)];
    let at = Windows::whole(&metas, &metas[..1]);
    let mut ins = [left, right];
    let mut outs = match ins[0].device() {
        Device::Cuda(_) => Add.cuda(&mut ins, &at)?,
        Device::Cpu | Device::Meta => Add.eval(&mut ins, &at)?,
    };
    Ok(outs.remove(0))
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sample = |experts, sizes: &[usize], x: &[usize], n| {
        let dy: Vec<usize> = x[..x.len() - 1].iter().copied().chain([n]).collect();
        let sizes = Unkeyed(GroupSizes::new(experts, sizes).expect("sizes of whole batch entries"));
        Sample::new(GroupedMatmulGrad { experts, sizes }, [Input::ints(x), Input::ints(dy)])
    };
    vec![
        sample(3, &[2, 0, 5], &[7, 3], 2),
        sample(2, &[1, 2, 3, 0, 0, 3, 2, 1, 1, 2], &[5, 3, 2], 3),
        sample(2, &[1, 2], &[1, 3, 1], 1),
        sample(2, &[0, 0], &[0, 3], 2),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::eval_whole;

    /// Without a batch dim, an expert's sum is the matrix product over its rows.
    #[test]
    fn sums_by_definition() {
        let of = |shape: [usize; 3], seed: usize| {
            let value = |i: usize| ((i * 31 + seed) % 13) as f64 - 6.0;
            Tensor::from_vec((0..shape.iter().product()).map(value).collect(), shape).unwrap()
        };
        let (x, dy) = (of([2, 5, 3], 1), of([2, 5, 2], 4));
        let sizes = [1, 4, 3, 2];
        let op = GroupedMatmulGrad { experts: 2, sizes: Unkeyed(GroupSizes::new(2, sizes).unwrap()) };
        let dw = eval_whole(&op, &[x.clone(), dy.clone()]).unwrap()[0].to_f64_vec();
        let (x, dy) = (x.to_f64_vec(), dy.to_f64_vec());
        let mut want = vec![0.0; 12];
        for row in 0..10 {
            let e = usize::from(row % 5 >= sizes[row / 5 * 2]);
            for (k, n) in (0..3).flat_map(|k| (0..2).map(move |n| (k, n))) {
                want[(e * 3 + k) * 2 + n] += x[row * 3 + k] * dy[row * 2 + n];
            }
        }
        assert_eq!(dw, want);
    }
}
