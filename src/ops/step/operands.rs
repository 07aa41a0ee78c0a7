//! The operands of an optimizer's step: their checks and their rows.

use crate::error::{Error, Result};
use crate::ops::{AxisPlacement, Meta, Row, Tensors, accumulator, arity, list};
use crate::tensor::{DType, Tensor};

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

/// Returns a step's `N` operands, and the parameter to round if there is one more operand, before the last: of the
/// parameter's shape, f16 or bf16 beside a parameter of f32. The step overwrites it with the new parameter, rounded.
pub(super) fn step_operands<'a, const N: usize>(
    verb: &str,
    ins: &'a [Meta],
) -> Result<([&'a Meta; N], Option<&'a Meta>)> {
    if ins.len() != N + 1 {
        return Ok((arity(verb, ins)?.each_ref(), None));
    }
    let (p, rounded) = (&ins[0], &ins[N - 1]);
    if p.dtype != DType::F32 || !matches!(rounded.dtype, DType::F16 | DType::BF16) || p.shape != rounded.shape
    {
        let rule = "an f32 parameter is rounded to f16 or bf16 of its shape";
        return Err(Error::invalid(verb, rule, list(ins), ""));
    }
    Ok((std::array::from_fn(|i| &ins[if i < N - 1 { i } else { N }]), Some(rounded)))
}

/// Returns the dtype that the parameter is rounded to, if a step of `len` operands has one more.
pub(super) fn rounded_dtype(ins: &[Tensor], len: usize) -> Option<DType> {
    (ins.len() > len).then(|| ins[len - 1].dtype())
}

/// Returns a step's results: its operands but for the gradient and the scale.
pub(super) fn step_results(ins: &[Tensor]) -> Tensors {
    ins[..1].iter().chain(&ins[2..ins.len() - 1]).cloned().collect()
}

/// Returns true if two steps have the same scale.
pub(super) fn have_one_scale(a: &[Tensor], b: &[Tensor]) -> bool {
    a.last().zip(b.last()).is_some_and(|(a, b)| a.is_same_view(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{AdamWStep, Bits, Op, SgdStep, Unkeyed, eval_whole};

    fn wave(n: usize, k: f64) -> Tensor {
        Tensor::build([n], |out: &mut [f32]| {
            out.iter_mut().enumerate().for_each(|(i, x)| *x = (i as f64 * k).sin() as f32)
        })
    }

    /// The other results keep their bits, and the rounded parameter is the cast one.
    #[test]
    fn a_step_rounds_the_new_parameter_where_it_is_told_to() {
        let adamw = AdamWStep::at_step(3, 0.01, (0.9, 0.99), 1e-8, 0.1);
        let sgd = SgdStep { momentum: Bits(0.9), weight_decay: Bits(0.1), nesterov: true, lr: Unkeyed(0.3) };
        for (n, dtype) in [(0, DType::BF16), (1, DType::F16), (2500, DType::BF16), (2500, DType::F16)] {
            let [p, g, m] = [0.37, 0.71, 1.9].map(|k| wave(n, k));
            let (rounded, scale) = (Tensor::zeros(dtype, [n]), Tensor::full(DType::F32, [], 0.5));
            let squares = Tensor::full(DType::F32, [n], 0.25);
            let calls: [(&dyn Op, Vec<Tensor>); 2] =
                [(&adamw, vec![p.clone(), g.clone(), m.clone(), squares]), (&sgd, vec![p, g, m])];
            for (op, mut ins) in calls {
                let plain = eval_whole(op, &[&ins[..], std::slice::from_ref(&scale)].concat()).unwrap();
                ins.extend([rounded.clone(), scale.clone()]);
                let outs = eval_whole(op, &ins).unwrap();
                assert_eq!(outs.len(), plain.len() + 1);
                for (out, plain) in outs.iter().zip(&plain) {
                    assert_eq!(out.data::<f32>().unwrap(), plain.data::<f32>().unwrap(), "{op:?}");
                }
                let last = outs.last().unwrap();
                assert_eq!(last.dtype(), dtype);
                assert_eq!(last.to_f64_vec(), plain[0].cast(dtype).unwrap().to_f64_vec(), "{op:?} {dtype}");
            }
        }
    }

    #[test]
    fn other_parameters_to_round_are_refused() {
        let op = SgdStep { momentum: Bits(0.0), weight_decay: Bits(0.0), nesterov: false, lr: Unkeyed(0.1) };
        let like = |dtype: DType| Meta::new(dtype, [3]);
        let refused = |p: DType, rounded: Meta| {
            let kept = accumulator(p);
            let ins = [like(p), like(p), like(kept), rounded, Meta::new(kept, [])];
            op.infer(&ins).unwrap_err().to_string()
        };
        for (p, rounded) in [
            (DType::F64, like(DType::BF16)),
            (DType::BF16, like(DType::BF16)),
            (DType::F32, like(DType::F32)),
            (DType::F32, Meta::new(DType::BF16, [4])),
        ] {
            let said = refused(p, rounded);
            assert!(
                said.starts_with("sgd: an f32 parameter is rounded to f16 or bf16 of its shape"),
                "{said}"
            );
        }
    }
}
