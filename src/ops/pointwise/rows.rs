//! Rows that some operators of the table have beyond those of their algebra.

use crate::ops::{AxisPlacement, Meta, Row};
use crate::tensor::{DType, ReduceOp};

/// The rows of `join` (maximum or minimum), by associativity: `(a ∨ a') ∨ (b ∨ b') = (a ∨ b) ∨ (a' ∨ b')`; by
/// idempotence: `(a ∨ a') ∨ b = (a ∨ b) ∨ (a' ∨ b)`; and by distributivity over the other one, `meet`:
/// `(a ∧ a') ∨ b = (a ∨ b) ∧ (a' ∨ b)`.
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

/// The rows of negation: the largest becomes the smallest; but among integers the lowest is its own negative.
pub(super) fn negated_rows(is_float: bool) -> Vec<Row> {
    let (max, min) = (AxisPlacement::P(ReduceOp::Max), AxisPlacement::P(ReduceOp::Min));
    if is_float { vec![Row::new([max], [min]), Row::new([min], [max])] } else { vec![] }
}

/// The rows of a product with a constant. Rounded, it never decreases in the other factor, or never increases, by the
/// constant's sign. Not so by bits for small constants, under which tiny numbers of both signs become zeros of both signs,
/// nor for infinite ones, which make zero a NaN.
pub(super) fn mul_scalar_rows(factor: f64) -> Vec<Row> {
    if !(1.0..=f64::from(f32::MAX)).contains(&factor.abs()) {
        return vec![];
    }
    let (max, min) = (AxisPlacement::P(ReduceOp::Max), AxisPlacement::P(ReduceOp::Min));
    let (of_max, of_min) = if factor > 0.0 { (max, min) } else { (min, max) };
    vec![Row::new([max], [of_max]), Row::new([min], [of_min])]
}

/// The rows of a sum with a constant. Rounded, it never decreases in the other term. Not so by bits if it may underflow, in
/// f16 and bf16, nor for an infinite constant, which makes the other infinity a NaN.
pub(super) fn add_scalar_rows(ins: &[Meta], by: f64) -> Vec<Row> {
    let exact_zeros = matches!(ins[0].dtype, DType::F32 | DType::F64);
    if !exact_zeros || by.is_nan() || by.abs() > f64::from(f32::MAX) {
        return vec![];
    }
    [ReduceOp::Max, ReduceOp::Min].map(|op| Row::same(AxisPlacement::P(op), 1)).to_vec()
}

/// The rows of a choice between the first operand and 0 that the second, whole, makes: every part of a sum may be chosen by
/// itself; by bits in f32 and f64, since the f32 parts of a half sum do not go beside a half operand.
pub(super) fn select_rows(dtype: DType) -> Vec<Row> {
    let row = |op| Row::new([AxisPlacement::P(op), AxisPlacement::R], [AxisPlacement::P(op)]);
    let wide = matches!(dtype, DType::F32 | DType::F64);
    let sum = if wide { row(ReduceOp::Sum).exact() } else { row(ReduceOp::Sum) };
    [sum, row(ReduceOp::Max), row(ReduceOp::Min)].to_vec()
}
