//! The intended differences from PyTorch, each with its reason.

use isoshard::tensor::DType;

use super::{Compared, Found};

/// An intended difference.
pub struct Difference {
    pub operators: &'static [&'static str],
    pub of: Part,
    /// The condition, in words.
    pub when: &'static str,
    pub here: &'static str,
    pub torch: &'static str,
    pub reason: &'static str,
    /// The condition, for an element that differs.
    pub condition: fn(&Found) -> bool,
}

/// The tensors of a call that an intended difference concerns.
pub enum Part {
    Results,
    Gradients,
}

impl Part {
    pub fn text(&self) -> &'static str {
        match self {
            Part::Results => "result",
            Part::Gradients => "gradient",
        }
    }
}

impl Difference {
    /// Returns true if this difference covers the element.
    pub fn covers(&self, found: &Found) -> bool {
        let part = matches!(
            (&self.of, found.compared),
            (Part::Results, Compared::Result(_)) | (Part::Gradients, Compared::Gradient(_))
        );
        let refused = if found.is_raised() { self.torch == REFUSES } else { self.here == REFUSES };
        part && found.error.is_some() == refused
            && self.operators.contains(&found.case.op.as_str())
            && (self.condition)(found)
    }
}

/// The text of a side that returns an error.
const REFUSES: &str = "refuses";

/// The page's table.
pub const DIFFERENCES: &[Difference] = &[
    Difference {
        operators: &["maximum", "minimum", "max", "min", "max_with_index", "min_with_index"],
        of: Part::Results,
        when: "the extremum is a zero and the operands have zeros of both signs",
        here: "-0 is less than 0",
        torch: "the first zero",
        reason: "an extremum must not depend on the order of its operands (IEEE 754-2019)",
        condition: |f| f.here == 0.0 && f.torch == 0.0,
    },
    Difference {
        operators: &["maximum", "minimum"],
        of: Part::Gradients,
        when: "the operands are equal",
        here: "all to the first",
        torch: "half to each",
        reason: "the halves of a tie of one element are an average of two subgradients; one is as right",
        condition: |f| f.x(0) == f.x(1),
    },
    Difference {
        operators: &["relu", "relu6"],
        of: Part::Results,
        when: "x is -0",
        here: "0",
        torch: "-0",
        reason: "max(0, x) by IEEE 754-2019, equal on every device",
        condition: |f| f.x(0) == 0.0 && f.here == 0.0,
    },
    Difference {
        operators: &["max", "min"],
        of: Part::Gradients,
        when: "an element is not the extremum",
        here: "0",
        torch: "0 with the sign of the incoming gradient",
        reason: "a selection of 0, not a product with 0",
        condition: |f| f.here == 0.0 && f.torch == 0.0,
    },
    Difference {
        operators: &["abs"],
        of: Part::Gradients,
        when: "x is a zero",
        here: "0",
        torch: "0 with the sign of the incoming gradient",
        reason: "a selection of 0, not a product with 0",
        condition: |f| f.x(0) == 0.0 && f.here == 0.0,
    },
    Difference {
        operators: &["sign"],
        of: Part::Results,
        when: "x is -0 or NaN",
        here: "x",
        torch: "0",
        reason: "zeros keep their sign, and NaN is not hidden",
        condition: |f| f.x(0) == 0.0 || f.x(0).is_nan(),
    },
    Difference {
        operators: &["gelu", "gelu_tanh", "silu", "mish"],
        of: Part::Results,
        when: "x is infinite or overflows within",
        here: "the limit: x, or -0",
        torch: "NaN or inf",
        reason: "the limit is known",
        condition: |f| f.x(0).abs() > 1e30,
    },
    Difference {
        operators: &["gelu", "gelu_tanh", "silu"],
        of: Part::Gradients,
        when: "x is infinite or overflows within",
        here: "the limit: the incoming gradient, or a zero",
        torch: "NaN",
        reason: "the limit is known",
        condition: |f| f.x(0).abs() > 1e30,
    },
    Difference {
        operators: &["sigmoid", "silu"],
        of: Part::Results,
        when: "e^x is subnormal",
        here: "the subnormal number",
        torch: "0",
        reason: "subnormal numbers are kept",
        condition: |f| f.x(0) < -80.0 && f.torch == 0.0,
    },
    Difference {
        operators: &["add_scalar"],
        of: Part::Results,
        when: "the dtype is f16 or bf16 and the number has more digits",
        here: "the number is rounded to f32",
        torch: "the number is rounded to the dtype",
        reason: "a sum is rounded once",
        condition: |f| f.is_narrow(),
    },
    Difference {
        operators: &["pow_scalar"],
        of: Part::Results,
        when: "the exponent is 1/3, which the dtype does not represent",
        here: "the exponent stays f64",
        torch: "the exponent is rounded to the dtype",
        reason: "a constant is as exact as the program gives it",
        condition: |f| f.dtype != DType::F64 && f.number(0) == 1.0 / 3.0,
    },
    Difference {
        operators: &["pow_scalar"],
        of: Part::Gradients,
        when: "the exponent is 1/3, which the dtype does not represent",
        here: "the exponent stays f64",
        torch: "the exponent is rounded to the dtype",
        reason: "a constant is as exact as the program gives it",
        condition: |f| f.dtype != DType::F64 && f.number(0) == 1.0 / 3.0,
    },
    Difference {
        operators: &["pow_scalar"],
        of: Part::Results,
        when: "the exponent is 1/2 or -1/2, the dtype is f16 and x is -0 or -inf",
        here: "the square root's, as in the wider dtypes",
        torch: "pow's, unlike its wider dtypes",
        reason: "one rule for all dtypes",
        condition: |f| {
            f.dtype == DType::F16 && f.number(0).abs() == 0.5 && (f.x(0) == 0.0 || f.x(0).is_infinite())
        },
    },
    Difference {
        operators: &["pow_scalar"],
        of: Part::Gradients,
        when: "the exponent is 1/2, the dtype is f16 and x is -0 or -inf",
        here: "the square root's, as in the wider dtypes",
        torch: "pow's, unlike its wider dtypes",
        reason: "one rule for all dtypes",
        condition: |f| {
            f.dtype == DType::F16 && f.number(0).abs() == 0.5 && (f.x(0) == 0.0 || f.x(0).is_infinite())
        },
    },
    Difference {
        operators: &["gelu_tanh"],
        of: Part::Gradients,
        when: "x is 7, in f64",
        here: "within 1 ulp",
        torch: "off by 41 ulp of 1",
        reason: "PyTorch subtracts two numbers near 1",
        condition: |f| f.dtype == DType::F64 && f.x(0) == 7.0,
    },
    Difference {
        operators: &["max", "min"],
        of: Part::Gradients,
        when: "a NaN is reduced",
        here: "the NaN elements share the incoming gradient, and the others get 0",
        torch: "NaN for all elements",
        reason: "the gradient goes to the elements that the result comes from",
        condition: |f| f.torch.is_nan(),
    },
    Difference {
        operators: &["div"],
        of: Part::Gradients,
        when: "x / y² overflows, although its product with the incoming gradient does not",
        here: "the product",
        torch: "inf",
        reason: "x / y is multiplied by the gradient first, so that a gradient of 0 stays 0",
        condition: |f| f.torch.is_infinite() && f.here.is_finite(),
    },
    Difference {
        operators: &["pow"],
        of: Part::Gradients,
        when: "x is 0, or an operand is special",
        here: "0",
        torch: "-inf or NaN",
        reason: "the limit, if there is one",
        condition: |f| !(f.x(0) > 1e-3 && f.x(0) < 1e3 && f.x(1).abs() < 1e3),
    },
    Difference {
        operators: &["rsqrt"],
        of: Part::Gradients,
        when: "the dtype is f16 and y^3 overflows",
        here: "inf",
        torch: "a finite number",
        reason: "a step of the derivative is rounded to f16",
        condition: |f| f.dtype == DType::F16,
    },
    Difference {
        operators: &["fmod", "remainder", "floor_div"],
        of: Part::Results,
        when: "an integer is divided by 0",
        here: "the number itself; 0 for floor_div",
        torch: REFUSES,
        reason: "a kernel on a device cannot return an error, and all devices give one result",
        condition: |_| true,
    },
    Difference {
        operators: &["acosh"],
        of: Part::Gradients,
        when: "x is -1",
        here: "-inf",
        torch: "inf",
        reason: "the function is not defined there",
        condition: |f| f.x(0) == -1.0,
    },
    Difference {
        operators: &["hardswish", "lerp", "lerp_scalar"],
        of: Part::Results,
        when: "six times x, or a difference of the operands, overflows",
        here: "the result",
        torch: "an infinity",
        reason: "no step overflows",
        condition: |f| f.here.is_finite() && f.torch.is_infinite(),
    },
    Difference {
        operators: &["atan2"],
        of: Part::Gradients,
        when: "x² + y² overflows",
        here: "the slope",
        torch: "NaN",
        reason: "no step overflows",
        condition: |f| f.here.is_finite() && f.torch.is_nan(),
    },
    Difference {
        operators: &["atan2"],
        of: Part::Gradients,
        when: "x² + y² is 0 or underflows",
        here: "NaN or an infinity",
        torch: "0",
        reason: "the gradient does not exist at the origin",
        condition: |f| f.x(0).abs() < 1e-30 && f.x(1).abs() < 1e-30,
    },
    Difference {
        operators: &["log10"],
        of: Part::Gradients,
        when: "x is subnormal",
        here: "an infinity",
        torch: "a finite number",
        reason: "a step of the derivative overflows",
        condition: |f| f.x(0).abs() < 1e-4,
    },
    Difference {
        operators: &["logit"],
        of: Part::Gradients,
        when: "x is not in (0, 1)",
        here: "the formula's value, or an infinity of the other sign",
        torch: "NaN, or an infinity",
        reason: "the result is NaN or infinite already",
        condition: |f| !(f.x(0) > 0.0 && f.x(0) < 1.0),
    },
    Difference {
        operators: &["logsumexp"],
        of: Part::Gradients,
        when: "two elements are the largest number",
        here: "each its share",
        torch: "each the whole gradient",
        reason: "x - logsumexp(x) rounds to 0 in PyTorch",
        condition: |f| f.here == f.torch / 2.0 || f.is_special_row(),
    },
    Difference {
        operators: &["norm"],
        of: Part::Results,
        when: "squares or powers overflow",
        here: "the norm",
        torch: "inf",
        reason: "elements are scaled by a power of two first",
        condition: |f| f.torch.is_infinite(),
    },
    Difference {
        operators: &["norm", "var", "std"],
        of: Part::Gradients,
        when: "a row has infinities, NaN or numbers whose squares overflow",
        here: "a limit or NaN",
        torch: "another limit or NaN",
        reason: "not compared: no gradient exists, or a step overflows on one side",
        condition: |f| f.is_special_row(),
    },
    Difference {
        operators: &["var", "std"],
        of: Part::Results,
        when: "a row has infinities or numbers whose squares overflow",
        here: "NaN or inf",
        torch: "inf or a number",
        reason: "not compared: a step overflows on one side",
        condition: |f| f.is_special_row(),
    },
    Difference {
        operators: &["norm"],
        of: Part::Gradients,
        when: "the order is 0",
        here: REFUSES,
        torch: "0",
        reason: "a count does not depend on the elements' sizes",
        condition: |_| true,
    },
    Difference {
        operators: &["var", "std"],
        of: Part::Gradients,
        when: "no degree of freedom is left",
        here: "0",
        torch: "NaN",
        reason: "the result is NaN already",
        condition: |f| f.torch.is_nan() && f.case.ins[0].shape()[..] == [3, 1],
    },
    Difference {
        operators: &["max_with_index", "min_with_index"],
        of: Part::Gradients,
        when: "several elements are the extremum",
        here: "each its share, as max",
        torch: "all to the index",
        reason: "the gradient does not depend on the order of the elements",
        condition: |f| f.is_special_row() || f.case.ins[0].shape()[..] == [5, 3],
    },
    Difference {
        operators: &[
            "clamp",
            "clamp_min",
            "clamp_max",
            "relu6",
            "hardtanh",
            "hardshrink",
            "softshrink",
            "hardsigmoid",
        ],
        of: Part::Gradients,
        when: "x is NaN",
        here: "the incoming gradient, a sixth of it for hardsigmoid",
        torch: "0, for some operators in f64 alone",
        reason: "the gradient does not say that a NaN is a bound",
        condition: |f| f.x(0).is_nan(),
    },
    Difference {
        operators: &["celu", "hardswish"],
        of: Part::Gradients,
        when: "x is NaN",
        here: "NaN",
        torch: "the incoming gradient",
        reason: "NaN is not hidden",
        condition: |f| f.x(0).is_nan(),
    },
    Difference {
        operators: &["celu", "hardsigmoid"],
        of: Part::Gradients,
        when: "the dtype is f64",
        here: "computed in f64",
        torch: "off by up to ten ulps of f32, the exponent that the constant divides",
        reason: "PyTorch's constants 0.7 and 1/6 are f32",
        condition: |f| f.dtype == DType::F64 && (f.here - f.torch).abs() <= 1.2e-6 * f.torch.abs(),
    },
    Difference {
        operators: &["bce_loss"],
        of: Part::Gradients,
        when: "x is 0 or 1",
        here: "the derivative of the loss, whose logarithms are at least -100",
        torch: "another slope, up to 1e12, or NaN",
        reason: "the gradient is that of the result",
        condition: |f| f.x(0) == 0.0 || f.x(0) == 1.0,
    },
    Difference {
        operators: &["copysign"],
        of: Part::Gradients,
        when: "x is infinite",
        here: "the incoming gradient with its sign",
        torch: "NaN",
        reason: "the limit is known",
        condition: |f| f.x(0).is_infinite(),
    },
    Difference {
        operators: &["digamma"],
        of: Part::Gradients,
        when: "x is a pole, or the dtype is f64",
        here: "an infinity at a pole, and 15 digits elsewhere",
        torch: "a finite number at a pole, 9 digits elsewhere, and 5 digits of a negative f32",
        reason: "PyTorch's trigamma has no poles and few terms",
        condition: |f| {
            is_pole(f.x(0))
                || f.x(0) < 0.0 && f.dtype == DType::F32
                || f.dtype == DType::F64 && nine_digits(f)
        },
    },
    Difference {
        operators: &["trigamma"],
        of: Part::Results,
        when: "x is a pole, or the dtype is f64",
        here: "an infinity at a pole, and 15 digits elsewhere",
        torch: "a finite number at a pole, 9 digits elsewhere, and 5 digits of a negative f32",
        reason: "PyTorch's trigamma has no poles and few terms",
        condition: |f| {
            is_pole(f.x(0))
                || f.x(0) < 0.0 && f.dtype == DType::F32
                || f.dtype == DType::F64 && nine_digits(f)
        },
    },
    Difference {
        operators: &["fmod"],
        of: Part::Gradients,
        when: "y is 0 or x is infinite",
        here: "NaN",
        torch: "an infinity",
        reason: "the result is NaN already",
        condition: |f| f.x(1) == 0.0 || f.x(0).is_infinite(),
    },
    Difference {
        operators: &["hardswish"],
        of: Part::Results,
        when: "x is at most -3",
        here: "0",
        torch: "-0, or NaN for -inf",
        reason: "the function is 0 there",
        condition: |f| f.x(0) <= -3.0,
    },
    Difference {
        operators: &["heaviside"],
        of: Part::Results,
        when: "x is NaN",
        here: "NaN",
        torch: "0",
        reason: "NaN is not hidden",
        condition: |f| f.x(0).is_nan(),
    },
    Difference {
        operators: &["hypot"],
        of: Part::Gradients,
        when: "an operand is the largest number",
        here: "x / z times the gradient",
        torch: "an infinity or NaN",
        reason: "PyTorch's product with the gradient overflows before the division",
        condition: |f| f.x(0).abs() > 1e30 || f.x(1).abs() > 1e30,
    },
    Difference {
        operators: &["index_put"],
        of: Part::Gradients,
        when: "two values are written to one place",
        here: "to the value that stays",
        torch: "to both",
        reason: "a value that is written over does not change the result",
        condition: |f| f.case.ins[1].shape().is_empty(),
    },
    Difference {
        operators: &["nan_to_num"],
        of: Part::Gradients,
        when: "x is -inf",
        here: "0",
        torch: "0 with the sign of the incoming gradient",
        reason: "a selection of 0, not a product with 0",
        condition: |f| f.here == 0.0 && f.torch == 0.0,
    },
    Difference {
        operators: &["rotary_tables"],
        of: Part::Results,
        when: "the position is large",
        here: "off by 1e-16 per position",
        torch: "within 1 ulp",
        reason: "turns per position are one f64; the error is far below one of f32",
        condition: |f| (f.here - f.torch).abs() < 1e-12,
    },
    Difference {
        operators: &["sinc"],
        of: Part::Results,
        when: "π x overflows",
        here: "the limit 0",
        torch: "NaN",
        reason: "the limit is known",
        condition: |f| f.x(0).abs() > 1e30,
    },
    Difference {
        operators: &["sinc"],
        of: Part::Gradients,
        when: "x is near 0, or π x overflows",
        here: "within 4 ulp of 1, or the limit",
        torch: "too few digits, or NaN",
        reason: "PyTorch subtracts two numbers that are nearly equal",
        condition: |f| f.x(0).abs() < 0.5 || f.torch.is_nan() || f.x(0).abs() > 1e30,
    },
    Difference {
        operators: &["softshrink"],
        of: Part::Results,
        when: "x is negative and its magnitude is at most the threshold, or -0",
        here: "-0",
        torch: "0",
        reason: "the function is odd, as its formula is",
        condition: |f| f.here == 0.0 && f.torch == 0.0,
    },
    Difference {
        operators: &["softsign"],
        of: Part::Results,
        when: "x is infinite",
        here: "1 or -1",
        torch: "NaN",
        reason: "the limit is known",
        condition: |f| f.x(0).is_infinite(),
    },
    Difference {
        operators: &["softsign"],
        of: Part::Gradients,
        when: "x is above 1/2",
        here: "within 2 ulp, and 0 at infinities",
        torch: "few digits, 0 or NaN",
        reason: "PyTorch subtracts two numbers that are nearly equal",
        condition: |f| f.x(0).abs() > 0.5,
    },
    Difference {
        operators: &["xlogy", "xlog1py"],
        of: Part::Gradients,
        when: "x is 0, and the logarithm is infinite",
        here: "0",
        torch: "NaN",
        reason: "the limit along x = 0",
        condition: |f| f.x(0) == 0.0,
    },
];

/// Returns true for 0 and negative integers, where the gamma function is infinite.
fn is_pole(x: f64) -> bool {
    x <= 0.0 && x == x.floor()
}

/// Returns true if both results have nine equal digits.
fn nine_digits(f: &Found) -> bool {
    (f.here - f.torch).abs() < 1e-8 * f.here.abs()
}
