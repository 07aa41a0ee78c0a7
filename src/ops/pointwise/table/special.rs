//! Error functions and the gamma function.

use std::sync::Arc;

use crate::error::Result;
use crate::ops::pointwise::flops::operations;
use crate::ops::pointwise::functions::*;
use crate::ops::pointwise::gradient_expr::{GradientExpr, GradientWriter};
use crate::ops::pointwise::record::{
    Pointwise, dtype_of_formula, floats, floats as far_floats, floats as short_floats,
};
use crate::ops::pointwise::row_samples::add_samples;
use crate::ops::pointwise::words::*;
use crate::ops::{Algebra, InputFill, Meta, Op, Sample, Vjp, Windows};
use crate::tensor::cpu::{self, Constants, Function, Loops, Real, WideFunction};
use crate::tensor::{DType, Tensor, cuda};

macro_rules! special_table {
    ($then:ident) => { $then! { methods {
        /// Returns the error function `2/√π ∫ e^(-t²) dt` from 0 to `x`.
        Erf erf(x) = erf(x),
            for floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy * ((x * x * -1.0).exp() * std::f64::consts::FRAC_2_SQRT_PI)) },
            samples [Ints],
            example [0.0, 0.5] => "[0.000, 0.520]";
        /// Returns the complementary error function `1 - erf x` without cancellation.
        ///
        /// Computed in f64 and rounded once.
        Erfc erfc(x) = of(erfc(wide(x))),
            for short_floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy * ((x * x * -1.0).exp() * -std::f64::consts::FRAC_2_SQRT_PI)) },
            samples [Ints],
            example [0.0, 0.5] => "[1.000, 0.480]";
        /// Returns the number whose error function is `x`: infinite at ±1, NaN beyond.
        ///
        /// Computed in f64 and rounded once.
        Erfinv erfinv(x) = of(erfinv(wide(x))),
            for short_floats, Opaque "Not linear, and the approximation is not proved to be monotone bit for bit.",
            gradient |dy, y| { x => (dy * ((y * y).exp() * (0.5 / std::f64::consts::FRAC_2_SQRT_PI * 2.0))) },
            samples [InsideUnit],
            example [0.0, 0.5] => "[0.000, 0.477]";
        /// Returns the logarithm of the absolute value of the gamma function: infinite at 0, at negative integers and at infinities. Its gradient is [`Digamma`](crate::ops::Digamma).
        ///
        /// Computed in f64 and rounded once.
        Lgamma lgamma(x) = of(lgamma(wide(x))),
            for far_floats, Opaque "Neither linear nor monotone.",
            gradient |dy, y| { x => (dy * x.digamma()) },
            samples [Positive],
            example [5.0, 0.5] => "[3.178, 0.572]";
        /// Returns the derivative of the logarithm of the gamma function: infinite at zeros, NaN at negative integers.
        ///
        /// Computed in f64 and rounded once.
        Digamma digamma(x) = of(digamma(wide(x))),
            for far_floats, Opaque "Neither linear nor monotone.",
            gradient |dy, y| { x => (dy * x.trigamma()) },
            samples [Positive],
            example [1.0, 2.0] => "[-0.577, 0.423]";
        /// Returns the derivative of [`Digamma`](crate::ops::Digamma): infinite at zeros and negative integers.
        ///
        /// Computed in f64 and rounded once.
        Trigamma trigamma(x) = of(trigamma(wide(x))),
            for far_floats, Opaque "Neither linear nor monotone.",
            gradient |dy, y| { x => (dy.refuse("the second derivative of digamma is not available")) },
            samples [] not_smooth [Positive],
            example [1.0, 2.0] => "[1.645, 0.645]";
    } derivatives {
    } } };
}
pub(crate) use special_table;

special_table!(make_operators);
