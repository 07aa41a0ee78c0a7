//! Checks of operands that the losses of classes share.

use crate::error::{Error, Result};
use crate::ops::index::segments::expect_indices;
use crate::ops::softmax::sum_exp::statistic_shape;
use crate::ops::{Meta, accumulator, list};
use crate::tensor::{Shape, Tensor};

/// Returns the loss's shape. Refuses operands whose shapes or dtypes do not fit.
pub(super) fn expect_loss(verb: &str, [logits, target, m, s]: [&Meta; 4], ins: &[Meta]) -> Result<Shape> {
    logits.dtype.expect_float(verb)?;
    expect_indices(verb, target)?;
    match logits.shape.split_last() {
        Some((_, outer)) if *outer != *target.shape => {
            return Err(Error::invalid(verb, "wants one target for each row of logits", list(ins), ""));
        }
        _ => expect_statistics(verb, [logits, m, s], ins)?,
    }
    Ok(target.shape.clone())
}

/// Refuses probabilities and statistics whose shapes or dtypes do not fit the logits.
pub(super) fn expect_soft(verb: &str, [logits, q, m, s]: [&Meta; 4], ins: &[Meta]) -> Result<()> {
    logits.dtype.expect_float(verb)?;
    expect_statistics(verb, [logits, m, s], ins)?;
    let wide = accumulator(logits.dtype);
    if q.shape == logits.shape && q.dtype == wide {
        return Ok(());
    }
    let rule = format!("wants probabilities of the logits' shape in {wide}");
    Err(Error::invalid(verb, rule, list(ins), "cast or expand them"))
}

fn expect_statistics(verb: &str, [logits, m, s]: [&Meta; 3], ins: &[Meta]) -> Result<()> {
    let bad = |rule: &str| Err(Error::invalid(verb, rule, list(ins), ""));
    if logits.shape.is_empty() {
        return bad("the logits have no dim of classes");
    }
    let kept = statistic_shape(logits);
    if m.shape != kept || s.shape != kept || m.dtype != logits.dtype || s.dtype != accumulator(logits.dtype) {
        return bad("the statistics are not those of max and sum_exp, kept with extent 1");
    }
    Ok(())
}

/// Returns `q` with contiguous rows, and the distance between them: 0 if all rows are views of one, as after an
/// expansion.
pub(super) fn repeated_rows(q: &Tensor) -> Result<(Tensor, usize)> {
    let (&n, leading) = q.shape().split_last().expect("infer refuses a tensor without dims");
    if leading.iter().zip(q.strides()).all(|(&extent, &stride)| extent == 1 || stride == 0) {
        let row = (0..leading.len()).try_fold(q.clone(), |row, d| row.narrow(d, 0, 1))?;
        return Ok((row.contiguous()?, 0));
    }
    Ok((q.contiguous()?, n))
}
