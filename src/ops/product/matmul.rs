//! `matmul`: products of two operands over named dims.
//!
//! The matrix product, the linear layer and the derivatives of both are one operator with different signatures.

use std::borrow::Cow;

use smallvec::smallvec;

use crate::error::{Error, Result};
use crate::ops::record::signature::Letters;
use crate::ops::{
    Input, MeshAxis, Meta, Metas, Op, Row, Sample, Signature, Tensors, Vjp, Windows, Work, list,
};
use crate::tensor::{Dims, Tensor, cpu, cuda};

/// The product of two operands, summed over the dims that the result lacks. Applied by
/// [`DTensor::matmul`](crate::dtensor::DTensor::matmul) and [`DTensor::einsum`](crate::dtensor::DTensor::einsum).
///
/// Operands have one floating-point dtype. Shapes follow from the signature; with `"m k, k n -> m n"` they are
/// `[m, k]`, `[k, n]` and `[m, n]`. A sharded summed dim gives a partial sum.
///
/// ```
/// use isoshard::{ops::{Matmul, eval_whole}, tensor::Tensor};
/// let a = Tensor::from_vec(vec![1.0, 2.0, 3.0, 4.0], [2, 2])?;
/// let b = Tensor::from_vec(vec![1.0, 10.0], [2, 1])?;
/// assert_eq!(eval_whole(&Matmul::new("m k, k n -> m n")?, &[a, b])?[0].to_f64_vec(), [21.0, 43.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Matmul {
    /// A signature of two operands that both have every summed dim.
    signature: Signature,
}

impl Matmul {
    /// Creates the operator from a signature's text.
    ///
    /// ```
    /// # use isoshard::ops::Matmul;
    /// assert!(Matmul::new("b t k, n k -> b t n").is_ok());
    /// assert!(Matmul::new("m k, n -> m n").is_err()); // k is summed over, and only one operand has it
    /// ```
    ///
    /// # Errors
    /// Refuses a text that is not a signature of two operands, and a summed dim that only one operand has.
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

    /// Creates NumPy's matrix product for operands with these numbers of dims: the last two dims multiply, the others
    /// are batch dims. An operand with two dims is used for the whole batch.
    ///
    /// ```
    /// # use isoshard::ops::Matmul;
    /// let product = Matmul::for_dims(3, 2)?;
    /// assert_eq!(format!("{product:?}"), r#"Matmul { signature: "a m k, k n -> a m n" }"#);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
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

    /// Returns the derivative with respect to operand `i`, which takes the result's gradient and the other operand.
    pub(super) fn transposed(&self, i: usize) -> Matmul {
        Matmul { signature: self.signature.transposed(i) }
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

    /// A product and an addition per combination of the letters' indices: `2mnk`.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::new(self.signature.points(ins).saturating_mul(2), ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        for i in 0..2 {
            if g.needs(i) {
                let (dy, other) = (g.grad(0), g.input(1 - i));
                let dx = g.apply(self.transposed(i), &[dy, other])?;
                g.set(i, dx);
            }
        }
        Ok(())
    }

    fn takes_groups(&self) -> bool {
        true
    }
}

/// A kernel for `[batch, m, k]` times `[batch, k, n]`. The third argument is the list of extents whose product is `k`.
type Multiply<'a> = &'a dyn Fn(&Tensor, &Tensor, &[usize]) -> Result<Tensor>;

/// Reshapes both operands to `[batch, m, k]` and `[batch, k, n]`, as views if strides allow, and multiplies.
fn product(sig: &Signature, a: &Tensor, b: &Tensor, multiply: Multiply) -> Result<Tensor> {
    let (x, y, z) = (sig.operand(0), sig.operand(1), sig.result());
    let place = |of: &[u8], l: u8| of.iter().position(|&m| m == l);
    let (mut batch, mut rows, mut cols, mut summed) =
        (Letters::new(), Letters::new(), Letters::new(), Letters::new());
    for &l in z {
        match (place(x, l), place(y, l)) {
            (Some(_), Some(_)) => batch.push(l),
            (Some(_), None) => rows.push(l),
            _ => cols.push(l),
        }
    }
    x.iter().filter(|&&l| place(z, l).is_none()).for_each(|&l| summed.push(l));
    let extent = |l: u8| match place(x, l) {
        Some(d) => a.shape()[d],
        None => b.shape()[place(y, l).expect("an operand has the letter")],
    };
    let extents = |letters: &[u8]| {
        let mut list = Dims::new();
        letters.iter().for_each(|&l| list.push(extent(l)));
        list
    };
    let size = |letters: &[u8]| letters.iter().map(|&l| extent(l)).product::<usize>();
    let matrix = |t: &Tensor, letters: &[u8], first: &[u8], second: &[u8]| {
        let shape = [size(&batch), size(first), size(second)];
        reordered(t, letters, [&batch, first, second].into_iter().flatten())?.reshape(shape)
    };
    let c = multiply(&matrix(a, x, &rows, &summed)?, &matrix(b, y, &summed, &cols)?, &extents(&summed))?;
    // From [batch, rows, cols] to the result's letters.
    let mut natural = batch.clone();
    natural.extend_from_slice(&rows);
    natural.extend_from_slice(&cols);
    let c = c.reshape(extents(&natural))?;
    Ok(reordered(&c, &natural, z.iter())?.into_owned())
}

/// Returns a tensor whose dims have letters with its dims in another order of these letters.
fn reordered<'a, 'b>(
    t: &'a Tensor,
    letters: &[u8],
    to: impl Iterator<Item = &'b u8>,
) -> Result<Cow<'a, Tensor>> {
    let (mut order, mut is_same) = (Dims::new(), true);
    for l in to {
        let d = letters.iter().position(|m| m == l).expect("the same letters");
        is_same &= d == order.len();
        order.push(d);
    }
    Ok(if is_same { Cow::Borrowed(t) } else { Cow::Owned(t.permute(&order)?) })
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
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
