//! Rows that some operators of the table have in addition to those of their algebra.

use crate::ops::{AxisPlacement, Meta, Row};
use crate::tensor::{DType, ReduceOp};

/// Returns the rows of `maximum` or `minimum`, called `join` (∨); the other one is `meet` (∧).
///
/// They follow from associativity, `(a ∨ a') ∨ (b ∨ b') = (a ∨ b) ∨ (a' ∨ b')`, idempotence,
/// `(a ∨ a') ∨ b = (a ∨ b) ∨ (a' ∨ b)`, and distributivity, `(a ∧ a') ∨ b = (a ∨ b) ∧ (a' ∨ b)`.
pub(super) fn lattice_rows(join: ReduceOp, meet: ReduceOp) -> Vec<Row> {
    let (join, meet) = (AxisPlacement::P(join), AxisPlacement::P(meet));
    vec![
        Row::same(join, 2),
        Row::new([join, AxisPlacement::R], [join]),
        Row::new([AxisPlacement::R, join], [join]),
        Row::new([meet, AxisPlacement::R], [meet]),
        Row::new([AxisPlacement::R, meet], [meet]),
    ]
}

/// Returns the rows of negation: a partial maximum becomes a partial minimum. Integers have none, because the lowest
/// integer is its own negative.
pub(super) fn negated_rows(is_float: bool) -> Vec<Row> {
    let (max, min) = (AxisPlacement::P(ReduceOp::Max), AxisPlacement::P(ReduceOp::Min));
    if is_float { vec![Row::new([max], [min]), Row::new([min], [max])] } else { vec![] }
}

/// Returns the rows of a product with a constant.
///
/// The rounded product is monotone in `x`, and the constant's sign says in which direction. Constants below 1 in
/// magnitude have no rows, because tiny numbers of both signs become zeros of both signs; infinite ones have none,
/// because they turn zero into NaN. Products of integers wrap.
pub(super) fn mul_scalar_rows(ins: &[Meta], factor: f64) -> Vec<Row> {
    if !ins[0].dtype.is_float() || !(1.0..=f64::from(f32::MAX)).contains(&factor.abs()) {
        return vec![];
    }
    let (max, min) = (AxisPlacement::P(ReduceOp::Max), AxisPlacement::P(ReduceOp::Min));
    let (of_max, of_min) = if factor > 0.0 { (max, min) } else { (min, max) };
    vec![Row::new([max], [of_max]), Row::new([min], [of_min])]
}

/// Returns the rows of a sum with a constant.
///
/// The rounded sum never decreases in `x`. f16 and bf16 have no rows, because the sum may underflow; an infinite
/// constant has none, because it turns the opposite infinity into NaN.
pub(super) fn add_scalar_rows(ins: &[Meta], by: f64) -> Vec<Row> {
    let exact_zeros = matches!(ins[0].dtype, DType::F32 | DType::F64);
    if !exact_zeros || by.is_nan() || by.abs() > f64::from(f32::MAX) {
        return vec![];
    }
    [ReduceOp::Max, ReduceOp::Min].map(|op| Row::same(AxisPlacement::P(op), 1)).to_vec()
}

/// Returns the rows of softshrink, which never decreases. An infinite or NaN `lambda` has none, because infinities
/// become NaN.
pub(super) fn softshrink_rows(lambda: f64) -> Vec<Row> {
    if lambda.is_nan() || lambda.abs() > f64::from(f32::MAX) {
        return vec![];
    }
    [ReduceOp::Max, ReduceOp::Min].map(|op| Row::same(AxisPlacement::P(op), 1)).to_vec()
}

/// Returns the rows of an operator that selects the first operand or 0 by the second, which is replicated. Each rank
/// may select from its partial operand.
///
/// Partial sums keep their bits in f32 and f64 only: those of f16 and bf16 are f32, which cannot be combined with a
/// 16-bit operand.
pub(super) fn select_rows(dtype: DType) -> Vec<Row> {
    let row = |op| Row::new([AxisPlacement::P(op), AxisPlacement::R], [AxisPlacement::P(op)]);
    let wide = matches!(dtype, DType::F32 | DType::F64);
    let sum = if wide { row(ReduceOp::Sum).exact() } else { row(ReduceOp::Sum) };
    [sum, row(ReduceOp::Max), row(ReduceOp::Min)].to_vec()
}

/// Returns the rows of an operator that never decreases in the first operand, whatever the second one is.
pub(super) fn monotone_in_first_rows() -> Vec<Row> {
    let row = |op| Row::new([AxisPlacement::P(op), AxisPlacement::R], [AxisPlacement::P(op)]);
    vec![row(ReduceOp::Max), row(ReduceOp::Min)]
}

/// Returns the rows of `x + y z`, which is linear in `x` together with `y` or `z`.
pub(super) fn added_product_rows() -> Vec<Row> {
    let (sum, whole) = (AxisPlacement::SUM, AxisPlacement::R);
    vec![Row::new([sum, sum, whole], [sum]), Row::new([sum, whole, sum], [sum])]
}
