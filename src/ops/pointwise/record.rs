//! The trait of pointwise operators, from which their [`Op`] is derived.

use std::fmt;

use smallvec::smallvec;

use crate::error::{Error, Result};
use crate::ops::{
    Algebra, AxisPlacement, MeshAxis, Meta, Metas, Op, OpKey, Row, Tensors, Vjp, Windows, Work, list,
};
use crate::tensor::{DType, Tensor};

/// An operator whose result's element `i` depends only on element `i` of each operand.
///
/// Every `Pointwise` is an [`Op`]. Its rows shard operands and result alike, along any dim; [`Pointwise::algebra`] adds
/// the rows of partial operands. Operands have equal shapes: methods of `DTensor` broadcast before the call, and the
/// backward pass sums the gradients of broadcast dims.
///
/// ```
/// use isoshard::{ops::{Add, MeshAxis, Meta, Op, Pointwise}, tensor::DType};
/// let x = Meta::new(DType::F32, [8]);
/// assert_eq!((Add::NAME, Add::ARITY, Add.flops()), ("add", 2, 1));
/// let rows = format!("{:?}", Add.rows(&[x.clone(), x], MeshAxis::new(2)));
/// assert_eq!(rows, "[S0 S0 -> S0, RS RS -> RS, P(sum) P(sum) -> P(sum)]");
/// ```
pub trait Pointwise: OpKey + fmt::Debug + Send + Sync {
    /// The operator's name, with which its errors begin.
    const NAME: &'static str;
    /// The number of operands.
    const ARITY: usize;

    /// Returns the property that decides which partial operands are accepted.
    fn algebra(&self) -> Algebra;

    /// Returns the result's dtype.
    ///
    /// # Errors
    /// Refuses operand dtypes that the operator cannot take.
    fn dtype(&self, ins: &[Meta]) -> Result<DType>;

    /// Computes the result from local shards of equal shape. It may write over the buffer of an operand that is its
    /// only owner.
    ///
    /// # Errors
    /// Returns an error only for what [`Pointwise::dtype`] cannot see, such as a probability above 1.
    fn kernel(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensor>;

    /// Computes the same on a CUDA device, as [`Op::cuda`].
    ///
    /// # Errors
    /// Returns the errors of [`Op::cuda`].
    fn cuda_kernel(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensor>;

    /// Returns the number of operations per element, as [`Work`] counts them. A row of the table counts those of its
    /// formula.
    fn flops(&self) -> u64;

    /// Writes the derivative, as [`Op::vjp`].
    ///
    /// # Errors
    /// Returns the errors of [`Op::vjp`].
    fn derivative(&self, g: &mut Vjp) -> Result<()>;

    /// Returns rows in addition to those of the algebra.
    fn more_rows(&self, _ins: &[Meta]) -> Vec<Row> {
        Vec::new()
    }
}

impl<T: Pointwise> Op for T {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        infer(T::NAME, T::ARITY, ins, &|ins| self.dtype(ins))
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        rows(T::ARITY, ins, self.algebra(), self.more_rows(ins))
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        listed(self.kernel(ins, at))
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        listed(self.cuda_kernel(ins, at))
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(self.flops(), ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        self.derivative(g)
    }

    fn writes_in_place(&self) -> bool {
        true
    }
}

// There is an `impl Op` per operator of the table. The functions below are their common code, compiled once.

/// Returns the dtype and shape of the result of operands of equal shapes, given a function for its dtype.
#[inline(never)]
fn infer(verb: &str, arity: usize, ins: &[Meta], dtype: &dyn Fn(&[Meta]) -> Result<DType>) -> Result<Metas> {
    expect_shapes(verb, arity, ins)?;
    Ok(smallvec![Meta { dtype: dtype(ins)?, shape: ins[0].shape.clone() }])
}

/// Returns all rows: those that shard operands and result alike, those of the algebra, and `more`.
#[inline(never)]
fn rows(arity: usize, ins: &[Meta], algebra: Algebra, more: Vec<Row>) -> Vec<Row> {
    let mut rows = every_cut(arity, ins[0].shape.len());
    rows.extend(algebra.rows(arity));
    rows.extend(more);
    rows
}

/// Returns a list of one result.
#[inline(never)]
fn listed(result: Result<Tensor>) -> Result<Tensors> {
    Ok(smallvec![result?])
}

/// Refuses operands if there are not `arity` of them or their shapes differ.
fn expect_shapes(verb: &str, arity: usize, ins: &[Meta]) -> Result<()> {
    let bad = |rule: &str| Err(Error::invalid(verb, rule, list(ins), ""));
    if ins.len() != arity {
        return bad(&format!("wants {arity} operand(s)"));
    }
    if ins.iter().any(|m| m.shape != ins[0].shape) {
        return bad("the operands' shapes differ");
    }
    Ok(())
}

/// Returns the rows that shard all operands and the result alike, along any dim or raggedly.
fn every_cut(arity: usize, dims: usize) -> Vec<Row> {
    (0..dims)
        .map(AxisPlacement::S)
        .chain([AxisPlacement::Ragged])
        .map(|placement| Row::same(placement, arity))
        .collect()
}

/// Returns the operands' common dtype, or an error that begins with `verb` if their dtypes differ.
pub(crate) fn one_dtype(verb: &str, ins: &[Meta]) -> Result<DType> {
    if ins.iter().all(|m| m.dtype == ins[0].dtype) {
        return Ok(ins[0].dtype);
    }
    Err(Error::invalid(verb, "the operands' dtypes differ", list(ins), "cast one of them"))
}

/// Returns the operands' common dtype. Refuses different dtypes, and bool.
pub(crate) fn numbers(verb: &str, ins: &[Meta]) -> Result<DType> {
    let dtype = one_dtype(verb, ins)?;
    if dtype == DType::Bool {
        return Err(Error::invalid(verb, "bool has no arithmetic", list(ins), "cast it first"));
    }
    Ok(dtype)
}

/// Returns the operands' common floating-point dtype. Refuses different dtypes, integers and bool.
pub(crate) fn floats(verb: &str, ins: &[Meta]) -> Result<DType> {
    let dtype = one_dtype(verb, ins)?;
    dtype.expect_float(verb)?;
    Ok(dtype)
}

/// Returns the operands' common dtype. Refuses different dtypes, and floats.
pub(crate) fn bits(verb: &str, ins: &[Meta]) -> Result<DType> {
    let dtype = one_dtype(verb, ins)?;
    if dtype.is_float() {
        return Err(Error::invalid(verb, "floats have no bits to work on", list(ins), "cast them first"));
    }
    Ok(dtype)
}

/// Returns the operands' common integer dtype. Refuses different dtypes, floats and bool.
pub(crate) fn integers(verb: &str, ins: &[Meta]) -> Result<DType> {
    bits(verb, ins)?;
    numbers(verb, ins)
}

/// Returns the dtype of a formula with these constants: that of its operands, which must be of a class of dtypes such as
/// [`numbers`].
pub(crate) fn dtype_of_formula(
    class: fn(&str, &[Meta]) -> Result<DType>,
    verb: &str,
    ins: &[Meta],
    constants: &[f64],
) -> Result<DType> {
    let dtype = class(verb, ins)?;
    expect_whole(verb, ins, constants)?;
    Ok(dtype)
}

/// Refuses constants of a formula over integers that are not whole, or too large for an f64 to hold every integer of
/// their size.
pub(crate) fn expect_whole(verb: &str, ins: &[Meta], constants: &[f64]) -> Result<()> {
    let whole = |c: f64| c.trunc() == c && c.abs() <= (1u64 << 53) as f64;
    let Some(number) = constants.iter().find(|&&c| !ins[0].dtype.is_float() && !whole(c)) else {
        return Ok(());
    };
    let given = format!("{number:?} for {}", list(ins));
    Err(Error::invalid(verb, "integers take whole numbers up to 2^53", given, "cast the tensor to a float"))
}
