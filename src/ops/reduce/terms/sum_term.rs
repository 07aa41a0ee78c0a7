//! The functions whose values [`TermSum`](crate::ops::TermSum) sums.

use isoshard_kernels::sums::Term;

use crate::ops::Bits;
use crate::ops::accumulator;
use crate::tensor::DType;

/// The function of an element `x` and a value `w` that a [`TermSum`](crate::ops::TermSum) sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SumTerm {
    /// `x - w`.
    Deviation,
    /// `(x - w)²`.
    SquaredDeviation,
    /// `e^(x - w)`.
    ExpDifference,
    /// `|x w|^p`: a product for whole `p` from 1 to 8, else `e^(p ln |x w|)`.
    Power(Bits),
}

impl SumTerm {
    pub(super) fn name(self) -> &'static str {
        match self {
            SumTerm::Deviation => "sum_deviations",
            SumTerm::SquaredDeviation => "sum_squared_deviations",
            SumTerm::ExpDifference => "sum_exp_differences",
            SumTerm::Power(_) => "sum_powers",
        }
    }

    /// Returns the function as kernels know it.
    pub(super) fn of_numbers(self) -> Term {
        match self {
            SumTerm::Deviation => Term::Deviation,
            SumTerm::SquaredDeviation => Term::SquaredDeviation,
            SumTerm::ExpDifference => Term::ExpDifference,
            SumTerm::Power(p) => Term::Power(p.0),
        }
    }

    /// Returns true if the terms of `x` may have this dtype.
    pub(super) fn takes(self, x: DType, with: DType) -> bool {
        match self {
            SumTerm::Power(_) => with == accumulator(x) || with == DType::F64,
            SumTerm::Deviation | SumTerm::SquaredDeviation | SumTerm::ExpDifference => with == accumulator(x),
        }
    }
}
