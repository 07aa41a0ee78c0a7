//! The operands of an optimizer's step: their checks and their rows.

use crate::error::{Error, Result};
use crate::ops::softmax::sum_exp::accumulator;
use crate::ops::{AxisPlacement, Meta, Row, list};

/// Checks the operands of an optimizer's step: the gradient `g` has the shape and dtype of the parameter `p`; every
/// tensor of `state` has its shape in f32 (f64 for an f64 parameter); `scale` has shape `[]` and the dtype of the
/// state.
///
/// ```
/// use isoshard::{ops::{Meta, expect_step}, tensor::DType};
/// let p = Meta::new(DType::BF16, [3]);
/// let (momentum, scale) = (Meta::new(DType::F32, [3]), Meta::new(DType::F32, []));
/// assert!(expect_step("lion", &p, &p, &[&momentum], &scale, &[]).is_ok());
/// let refused = expect_step("lion", &p, &p, &[&p], &scale, &[p.clone()]).unwrap_err();
/// assert!(refused.to_string().starts_with("lion: the state is f32[3]"), "{refused}");
/// ```
///
/// # Errors
/// Returns an error, which begins with the optimizer's name `verb` and shows the operands `ins`, if one does not fit.
pub fn expect_step(
    verb: &str,
    p: &Meta,
    g: &Meta,
    state: &[&Meta],
    scale: &Meta,
    ins: &[Meta],
) -> Result<()> {
    p.dtype.expect_float(verb)?;
    let kept = Meta { dtype: accumulator(p.dtype), shape: p.shape.clone() };
    let factor = Meta::new(kept.dtype, []);
    let rule = if g != p {
        "the gradient does not have the parameter's shape and dtype".to_string()
    } else if state.iter().any(|&s| *s != kept) {
        format!("the state is {kept}")
    } else if *scale != factor {
        format!("the scale is {factor}")
    } else {
        return Ok(());
    };
    Err(Error::invalid(verb, rule, list(ins), ""))
}

/// Returns the rows of an optimizer's step on the parameter `p`: the first `ins` operands and all `outs` results have
/// the parameter's shape and the same placement, which may be any; one more operand, the scale, is replicated.
///
/// ```
/// use isoshard::{ops::{Meta, step_rows}, tensor::DType};
/// let rows = step_rows(&Meta::new(DType::F32, [8]), 2, 1);
/// assert_eq!(format!("{rows:?}"), "[S0 S0 R -> S0, RS RS R -> RS]");
/// ```
pub fn step_rows(p: &Meta, ins: usize, outs: usize) -> Vec<Row> {
    use std::iter::repeat_n;
    let like = |p: AxisPlacement| Row::new(repeat_n(p, ins).chain([AxisPlacement::R]), repeat_n(p, outs));
    (0..p.shape.len()).map(|d| like(AxisPlacement::S(d))).chain([like(AxisPlacement::Ragged)]).collect()
}
