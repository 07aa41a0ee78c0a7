//! `matmul`: products of two operands over named dims, batched, with any dims summed over.
//!
//! One operator is the matrix product, the linear layer and both their derivatives: they differ in the signature.

use smallvec::{SmallVec, smallvec};

use super::{Input, MeshAxis, Meta, Metas, Op, Row, Sample, Signature, Tensors, Vjp, Windows, Work, list};
use crate::error::{Error, Result};
use crate::tensor::{Dims, Shape, Tensor, cpu, cuda};

/// The product of two operands, summed over the letters that the result lacks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Matmul {
    /// Of two operands that share every summed dim.
    signature: Signature,
}

impl Matmul {
    /// From a signature's text.
    ///
    /// # Errors
    /// Refuses a text that is no signature of two operands, and a letter of one operand alone that the result lacks.
    pub fn new(signature: &str) -> Result<Matmul> {
        let sig = Signature::parse(signature)?;
        let alone = |i: usize| {
            sig.operand(i).iter().any(|l| !sig.result().contains(l) && !sig.operand(1 - i).contains(l))
        };
        if sig.operands_len() != 2 || alone(0) || alone(1) {
            return Err(Error::invalid(
                "matmul",
                "wants two operands that share every summed dim",
                format!("{sig:?}"),
                "sum the other dims with sum()",
            ));
        }
        Ok(Matmul { signature: sig })
    }

    /// NumPy's matrix product for operands with these numbers of dims: the last two multiply, the others are batch
    /// dims, which an operand with two dims lacks.
    ///
    /// # Errors
    /// Refuses operands with fewer than two dims, and batches with different numbers of dims.
    pub fn for_dims(lhs: usize, rhs: usize) -> Result<Matmul> {
        if lhs < 2 || rhs < 2 || (lhs != rhs && lhs != 2 && rhs != 2) {
            return Err(Error::invalid(
                "matmul",
                "wants two dims or more, and equal numbers of batch dims",
                format!("{lhs} and {rhs} dims"),
                "unsqueeze or expand one of them",
            ));
        }
        let batch = b"abcdefgh".get(..lhs.max(rhs) - 2).ok_or_else(|| {
            Error::unsupported(
                "matmul",
                "more than eight batch dims are not built",
                format!("{lhs} and {rhs} dims"),
                "",
            )
        })?;
        let of = |n: usize| if n == 2 { &[][..] } else { batch };
        Ok(Matmul { signature: Signature::of([(of(lhs), b"mk"), (of(rhs), b"kn")], (batch, b"mn")) })
    }
}

impl Op for Matmul {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let shape = self.signature.infer(self.name(), ins)?;
        if ins[0].dtype != ins[1].dtype || !ins[0].dtype.is_float() {
            return Err(Error::invalid(
                self.name(),
                "wants one floating dtype",
                list(ins),
                "cast one of them",
            ));
        }
        Ok(smallvec![Meta { dtype: ins[0].dtype, shape }])
    }

    fn rows(&self, _: &[Meta], _: MeshAxis) -> Vec<Row> {
        self.signature.rows()
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        Ok(smallvec![product(&self.signature, &ins[0], &ins[1], &|a, b, tree| {
            cpu::gemm(self.name(), a, b, tree)
        })?])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        Ok(smallvec![product(&self.signature, &ins[0], &ins[1], &|a, b, tree| {
            cuda::gemm(self.name(), a, b, tree, at.exact)
        })?])
    }

    /// A product and an addition for every combination of the letters' indices: `2mnk`.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::new(self.signature.points(ins).saturating_mul(2), ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        for i in 0..2 {
            if g.needs(i) {
                let (dy, other) = (g.grad(0), g.input(1 - i));
                let dx = g.apply(Matmul { signature: self.signature.transposed(i) }, &[dy, other])?;
                g.set(i, dx);
            }
        }
        Ok(())
    }

    fn adds(&self) -> bool {
        true
    }
}

/// The letters by their part in the product.
struct Roles {
    batch: SmallVec<[u8; 6]>,
    rows: SmallVec<[u8; 6]>,
    cols: SmallVec<[u8; 6]>,
    summed: SmallVec<[u8; 6]>,
}

/// A kernel for `[batch, m, k]` by `[batch, k, n]` with the extents that `k` runs over.
type Multiply<'a> = &'a dyn Fn(&Tensor, &Tensor, &[usize]) -> Result<Tensor>;

/// Lays both operands out as `[batch, m, k]` and `[batch, k, n]`, views where strides allow, and multiplies.
fn product(sig: &Signature, a: &Tensor, b: &Tensor, multiply: Multiply) -> Result<Tensor> {
    let (x, y, z) = (sig.operand(0), sig.operand(1), sig.result());
    let pick = |from: &[u8], f: &dyn Fn(u8) -> bool| from.iter().copied().filter(|&l| f(l)).collect();
    let roles = Roles {
        batch: pick(z, &|l| x.contains(&l) && y.contains(&l)),
        rows: pick(z, &|l| !y.contains(&l)),
        cols: pick(z, &|l| !x.contains(&l)),
        summed: pick(x, &|l| !z.contains(&l)),
    };
    let extent = |l: u8| {
        x.iter().position(|&m| m == l).map(|d| a.shape()[d]).unwrap_or_else(|| {
            b.shape()[y.iter().position(|&m| m == l).expect("a letter stands in an operand")]
        })
    };
    let size = |letters: &[u8]| letters.iter().map(|&l| extent(l)).product::<usize>();
    let matrix = |t: &Tensor, letters: &[u8], first: &[u8], second: &[u8]| -> Result<Tensor> {
        let order: Dims = [&roles.batch, first, second]
            .iter()
            .flat_map(|group| group.iter())
            .map(|l| letters.iter().position(|m| m == l).expect("roles are the operand's letters"))
            .collect();
        t.permute(&order)?.reshape([size(&roles.batch), size(first), size(second)])
    };
    let c = multiply(
        &matrix(a, x, &roles.rows, &roles.summed)?,
        &matrix(b, y, &roles.summed, &roles.cols)?,
        &roles.summed.iter().map(|&l| extent(l)).collect::<Dims>(),
    )?;
    // From [batch, rows, cols] to the result's order of letters.
    let natural: SmallVec<[u8; 6]> =
        roles.batch.iter().chain(&roles.rows).chain(&roles.cols).copied().collect();
    let c = c.reshape(natural.iter().map(|&l| extent(l)).collect::<Shape>())?;
    let order: Dims =
        z.iter().map(|l| natural.iter().position(|m| m == l).expect("the same letters")).collect();
    c.permute(&order)
}

pub(super) fn samples() -> Vec<Sample> {
    let sample = |sig: &str, a: &[usize], b: &[usize]| {
        Sample::new(Matmul::new(sig).expect("a signature"), [Input::ints(a), Input::ints(b)])
    };
    vec![
        sample("m k, k n -> m n", &[5, 3], &[3, 2]),
        sample("m k, k n -> m n", &[1, 7], &[7, 1]),
        sample("m k, k n -> m n", &[3, 0], &[0, 2]),
        sample("b m k, b k n -> b m n", &[2, 3, 5], &[2, 5, 1]),
        sample("b t k, n k -> b t n", &[2, 3, 5], &[4, 5]),
        sample("b t n, b t k -> n k", &[2, 3, 4], &[2, 3, 5]),
    ]
}
