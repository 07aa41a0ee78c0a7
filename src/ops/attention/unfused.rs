//! Attention as an expression of ordinary operators, from which second derivatives follow.

use super::Attention;
use crate::error::Result;
use crate::ops::unfused::UnfusedExpression;
use crate::ops::{
    Add, AddScalar, Bits, Compare, CompareKind, DiagonalBand, Dropout, Expand, KeepBand, Mask, Matmul, Meta,
    MulScalar, Select, Softmax, Tanh, VjpValue, ZeroGrad,
};

/// The score of a key that a query does not see: far below all others, so its probability is 0, and finite, so that a
/// row without keys has finite derivatives.
const UNSEEN: f64 = -1e30;

/// Returns the expression of `o`, from q, k, v and the operands of the rule.
pub(super) fn unfused(attention: &Attention, ins: &[Meta]) -> Result<UnfusedExpression> {
    let mut e = UnfusedExpression::of(&ins.iter().collect::<Vec<_>>());
    let [batch, heads, queries, width] = [0, 1, 2, 3].map(|d| ins[0].shape[d]);
    let (key_heads, keys) = (ins[1].shape[1], ins[1].shape[2]);
    let group = heads.checked_div(key_heads).unwrap_or(1);
    let (q, k, v) = (e.wide_input(0)?, e.wide_input(1)?, e.wide_input(2)?);
    let q = e.reshape(q, [batch, key_heads, group, queries, width])?;
    let scores = e.apply(Matmul::new("b h g q d, b h k d -> b h g q k")?, &[q, k])?;
    let scores = e.reshape(scores, [batch, heads, queries, keys])?;
    let mut scores = e.apply(MulScalar { factor: attention.scale }, &[scores])?;
    if let Some(Bits(cap)) = attention.rule.soft_cap {
        scores = e.apply(MulScalar { factor: Bits(1.0 / cap) }, &[scores])?;
        scores = e.apply(Tanh, &[scores])?;
        scores = e.apply(MulScalar { factor: Bits(cap) }, &[scores])?;
    }
    let (scores, seen) = masked_scores(&mut e, attention, scores)?;
    let mut p = e.apply(Softmax { dim: 3 }, &[scores])?;
    if let Some(seen) = seen {
        p = e.apply(Mask { on: true }, &[seen, p])?;
    }
    if attention.p.0 > 0.0 {
        p = e.apply(Dropout { p: attention.p, draw: attention.draw }, &[p])?;
    }
    let p = e.reshape(p, [batch, key_heads, group, queries, keys])?;
    let o = e.apply(Matmul::new("b h g q k, b h k d -> b h g q d")?, &[p, v])?;
    let o = e.reshape(o, [batch, heads, queries, ins[2].shape[3]])?;
    let o = e.cast(o, ins[0].dtype)?;
    e.returns(o);
    Ok(e)
}

/// Adds the bias to the scores and replaces those of keys that the query does not see. Returns the scores, and true for
/// each key that its query sees unless it sees all.
fn masked_scores(
    e: &mut UnfusedExpression,
    attention: &Attention,
    mut scores: VjpValue,
) -> Result<(VjpValue, Option<VjpValue>)> {
    let rule = &attention.rule;
    let shape = e.meta(scores).shape.clone();
    let zeros = e.apply(ZeroGrad, &[scores])?;
    let mut seen: Option<VjpValue> = None;
    let mut only = |e: &mut UnfusedExpression, condition: VjpValue| -> Result<()> {
        seen = Some(match seen {
            None => condition,
            Some(seen) => e.apply(Mask { on: true }, &[seen, condition])?,
        });
        Ok(())
    };
    let mut next = 3..;
    let mut operand = |e: &UnfusedExpression| e.input(next.next().expect("endless"));
    if rule.bias {
        let bias = operand(e);
        let bias = e.cast(bias, e.meta(scores).dtype)?;
        let bias = e.apply(Expand { shape: shape.clone() }, &[bias])?;
        let lowest = e.apply(AddScalar { by: Bits(f64::NEG_INFINITY) }, &[zeros])?;
        let above = e.apply(Compare { kind: CompareKind::Ne }, &[bias, lowest])?;
        scores = e.apply(Add, &[scores, bias])?;
        only(e, above)?;
    }
    if rule.mask {
        let mask = operand(e);
        let mask = e.apply(Expand { shape: shape.clone() }, &[mask])?;
        only(e, mask)?;
    }
    if rule.documents {
        let [of_queries, of_keys] = [operand(e), operand(e)];
        let (entries, queries) = (e.meta(of_queries).shape[0], e.meta(of_queries).shape[1]);
        let of_queries = e.reshape(of_queries, [entries, 1, queries, 1])?;
        let (entries, keys) = (e.meta(of_keys).shape[0], e.meta(of_keys).shape[1]);
        let of_keys = e.reshape(of_keys, [entries, 1, 1, keys])?;
        let of_queries = e.apply(Expand { shape: shape.clone() }, &[of_queries])?;
        let of_keys = e.apply(Expand { shape: shape.clone() }, &[of_keys])?;
        let equal = e.apply(Compare { kind: CompareKind::Eq }, &[of_queries, of_keys])?;
        only(e, equal)?;
    }
    if rule.has_window() {
        // Key j is j - i - offset positions after query i.
        let offset = attention.q_offset.unwrap_or(0) as i64;
        let low = rule.before.map_or(i64::MIN, |before| offset.saturating_sub(clamped(before)));
        let high = rule.after.map_or(i64::MAX, |after| offset.saturating_add(clamped(after)));
        let all = e.apply(Compare { kind: CompareKind::Eq }, &[zeros, zeros])?;
        let window = e.apply(KeepBand { band: DiagonalBand { low, high } }, &[all])?;
        only(e, window)?;
    }
    let Some(seen) = seen else { return Ok((scores, None)) };
    let unseen = e.apply(AddScalar { by: Bits(UNSEEN) }, &[zeros])?;
    let scores = e.apply(Select, &[seen, scores, unseen])?;
    Ok((scores, Some(seen)))
}

/// Returns a number of keys as an i64.
fn clamped(keys: usize) -> i64 {
    i64::try_from(keys).unwrap_or(i64::MAX)
}
