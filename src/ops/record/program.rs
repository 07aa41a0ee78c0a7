//! A finished derivative: a list of steps of other operators.

use std::sync::Arc;

use smallvec::SmallVec;

use super::Op;
use super::vjp::live_values;

/// The number of a value in a [`VjpProgram`]: an operand, a result, an incoming gradient, or a result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VjpValue(pub(crate) u32);

/// One application of an operator in a [`VjpProgram`].
#[derive(Clone)]
pub struct VjpStep {
    /// The operator.
    pub op: Arc<dyn Op>,
    /// The operator's operands.
    pub ins: SmallVec<[VjpValue; 4]>,
    /// The operator's first result. The others have the next numbers.
    pub(crate) out: VjpValue,
    /// The number of results.
    pub(crate) out_len: usize,
}

/// A finished derivative: a list of steps that compute the operands' gradients.
///
/// Values are numbered in this order: operands, results, gradients of the results, then the steps' results.
///
/// ```
/// use isoshard::{ops::{Div, Meta, Vjp}, tensor::DType};
/// let x = Meta::new(DType::F32, [3]);
/// // z = x / y: 0 is x, 1 is y, 2 is z, 3 is dz. The first step computes dx = dz / y.
/// let program = Vjp::write(&Div, &[x.clone(), x], &[true, false])?;
/// assert_eq!(format!("{program:?}"), "%4 = Div(%3, %1)\ngrads [%4, -]");
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone)]
pub struct VjpProgram {
    /// The steps in order of execution.
    pub steps: Vec<VjpStep>,
    /// The gradient of each operand, or `None` if it is not wanted or does not exist.
    pub grads: SmallVec<[Option<VjpValue>; 4]>,
    /// For each operand, the reason why it has no gradient ([`Vjp::none`](super::Vjp::none)), if there is one.
    pub reasons: SmallVec<[Option<&'static str>; 4]>,
    /// The number of values.
    pub(crate) values_len: usize,
    /// For each operand, result and incoming gradient, true if the program reads it.
    pub(crate) reads: SmallVec<[bool; 8]>,
    /// For each result, true if the derivative treats it as a constant ([`Vjp::constant`](super::Vjp::constant)).
    pub constants: SmallVec<[bool; 4]>,
}

impl VjpValue {
    /// Returns the value's number in its program.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl VjpStep {
    /// Returns the numbers of the results.
    pub(crate) fn outs(&self) -> std::ops::Range<usize> {
        self.out.index()..self.out.index() + self.out_len
    }
}

impl VjpProgram {
    /// Returns, per value, true if the gradient of an operand in `needed` depends on it.
    pub(crate) fn live_values(&self, needed: &[bool]) -> Vec<bool> {
        let wanted = self.grads.iter().zip(needed).filter_map(|(grad, &needed)| grad.filter(|_| needed));
        live_values(&self.steps, self.values_len, wanted)
    }
}
