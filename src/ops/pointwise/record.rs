//! The record that pointwise operators share: element `i` of the result depends on element `i` of each operand.

use std::fmt;

use smallvec::smallvec;

use crate::error::{Error, Result};
use crate::ops::{
    Algebra, AxisPlacement, MeshAxis, Meta, Metas, Op, OpKey, Row, Tensors, Vjp, Windows, Work, list,
};
use crate::tensor::{DType, Tensor};

/// A pointwise operator. Most are rows of a table (`table.rs`) that makes this record.
///
/// Operands have equal shapes: the engine broadcasts before, and sums broadcast dims of gradients after.
pub trait Pointwise: OpKey + fmt::Debug + Send + Sync {
    /// The name, as users call it.
    const NAME: &'static str;
    /// The number of operands.
    const ARITY: usize;

    /// Which `Partial` may pass unreduced.
    fn algebra(&self) -> Algebra;

    /// The result's dtype.
    ///
    /// # Errors
    /// Refuses operand dtypes it cannot take.
    fn dtype(&self, ins: &[Meta]) -> Result<DType>;

    /// The kernel, on local parts of equal shape; it may reuse a unique operand's buffer.
    ///
    /// # Errors
    /// None that `dtype` could have seen.
    fn kernel(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensor>;

    /// The kernel on a CUDA device, as [`Op::cuda`].
    ///
    /// # Errors
    /// As [`Op::cuda`].
    fn cuda_kernel(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensor>;

    /// The operations for each element, as [`Work`] counts them. A row of the table counts those of its formula.
    fn flops(&self) -> u64;

    /// As [`Op::vjp`].
    ///
    /// # Errors
    /// As [`Op::vjp`].
    fn derivative(&self, g: &mut Vjp) -> Result<()>;

    /// Rows beyond those that the algebra gives.
    fn more_rows(&self, _ins: &[Meta]) -> Vec<Row> {
        Vec::new()
    }
}

impl<T: Pointwise> Op for T {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        expect_shapes(T::NAME, T::ARITY, ins)?;
        Ok(smallvec![Meta { dtype: self.dtype(ins)?, shape: ins[0].shape.clone() }])
    }

    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let mut rows = every_cut(T::ARITY, ins[0].shape.len());
        rows.extend(self.algebra().rows(T::ARITY));
        rows.extend(self.more_rows(ins));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        Ok(smallvec![self.kernel(ins, at)?])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        Ok(smallvec![self.cuda_kernel(ins, at)?])
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::elementwise(self.flops(), ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        self.derivative(g)
    }
}

/// Refuses another number of operands than `arity`, and different shapes.
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

/// All operands and the result cut alike, along any dim or into ragged blocks.
fn every_cut(arity: usize, dims: usize) -> Vec<Row> {
    (0..dims)
        .map(AxisPlacement::S)
        .chain([AxisPlacement::Ragged])
        .map(|slot| Row::same(slot, arity))
        .collect()
}

/// Refuses, in the name of `verb`, operands that do not all have one dtype, and gives it.
pub(crate) fn one_dtype(verb: &str, ins: &[Meta]) -> Result<DType> {
    if ins.iter().all(|m| m.dtype == ins[0].dtype) {
        return Ok(ins[0].dtype);
    }
    Err(Error::invalid(verb, "the operands' dtypes differ", list(ins), "cast one of them"))
}

/// Refuses, in the name of `verb`, operands that do not all have one dtype other than bool, and gives it.
pub(crate) fn numbers(verb: &str, ins: &[Meta]) -> Result<DType> {
    let dtype = one_dtype(verb, ins)?;
    if dtype == DType::Bool {
        return Err(Error::invalid(verb, "bool has no arithmetic", list(ins), "cast it first"));
    }
    Ok(dtype)
}

/// Refuses, in the name of `verb`, operands that do not all have one floating dtype, and gives it.
pub(crate) fn floats(verb: &str, ins: &[Meta]) -> Result<DType> {
    let dtype = one_dtype(verb, ins)?;
    dtype.expect_float(verb)?;
    Ok(dtype)
}
