//! Derivatives compared with their definition: central differences in f64 on a single rank.
//!
//! With a step of `h = 2^-17`, the difference has an error of `h² f'''/6`, about `1e-11 f'''`, and one from rounding
//! two sums, about `2^-52 |f| / h = 3e-11 |f|`. Samples keep third derivatives below `1e4` (at 1/8, `x^-1/2` has 3e3).
//! The bound is `1e-6` times the largest of 1, the gradient and the sum of absolute terms: far above both errors, and
//! far below the error of a wrong derivative of multiples of 1/8.

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::ops::{Meta, Sample, Vjp, eval_whole};
use isoshard::placement::Layout;
use isoshard::tensor::{DType, Tensor};

use crate::common::samples::catalog;
use crate::common::{has_no_derivative, magnitude, small_ints, tensor, values};

const STEP: f64 = 1.0 / 131_072.0;

#[test]
fn smooth_samples_agree_with_finite_differences() {
    let mut wrong = Vec::new();
    for sample in catalog().into_iter().filter(|s| s.smooth && !has_no_derivative(s)) {
        let ins = values(&sample, DType::F64, 3);
        let Ok(outs) = eval_whole(sample.op.as_ref(), &ins) else { panic!("{sample:?} cannot be evaluated") };
        for k in (0..outs.len()).filter(|&k| outs[k].dtype() == DType::F64 && !is_constant(&sample, k)) {
            let weights = small_ints(DType::F64, outs[k].shape(), 9);
            let all = vec![true; ins.len()];
            let grads =
                gradients(&sample, &ins, &weights, k, &all).unwrap_or_else(|e| panic!("{sample:?}: {e}"));
            for (i, x) in ins.iter().enumerate().filter(|(_, x)| x.dtype() == DType::F64) {
                // An operand that a result does not depend on has no gradient.
                let got = grads[i].as_ref().map_or_else(|| vec![0.0; x.numel()], Tensor::to_f64_vec);
                for e in picked(x.numel()) {
                    let [(up, scale), (down, _)] =
                        [STEP, -STEP].map(|h| weighted(&sample, &ins, i, e, h, &weights, k));
                    let want = (up - down) / (2.0 * STEP);
                    let bound = 1e-6 * magnitude(x).max(want.abs()).max(scale);
                    if (got[e] - want).is_nan() || (got[e] - want).abs() > bound {
                        wrong.push(format!(
                            "{sample:?}: d result {k} / d operand {i}[{e}] = {} instead of {want}",
                            got[e]
                        ));
                        break;
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong derivatives:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn what_else_is_wanted_changes_no_gradient() {
    let mut wrong = Vec::new();
    for sample in catalog().into_iter().filter(|s| !has_no_derivative(s)) {
        let ins = values(&sample, DType::F32, 4);
        let outs = eval_whole(sample.op.as_ref(), &ins).unwrap_or_else(|e| panic!("{sample:?}: {e}"));
        let floats: Vec<bool> = ins.iter().map(|x| x.dtype().is_float()).collect();
        for k in (0..outs.len()).filter(|&k| outs[k].dtype().is_float()) {
            let weights = small_ints(outs[k].dtype(), outs[k].shape(), 9);
            let run = |needs: &[bool]| {
                gradients(&sample, &ins, &weights, k, needs).unwrap_or_else(|e| panic!("{sample:?}: {e}"))
            };
            let all = run(&floats);
            for subset in 1..1u32 << ins.len() {
                let needs: Vec<bool> = (0..ins.len()).map(|i| floats[i] && subset >> i & 1 == 1).collect();
                if !needs.contains(&true) {
                    continue;
                }
                let some = run(&needs);
                for i in (0..ins.len()).filter(|&i| needs[i]) {
                    let bits = |g: &Tensor| g.to_f64_vec().into_iter().map(f64::to_bits).collect::<Vec<_>>();
                    // A result that depends on no wanted operand has no history.
                    let is_zero = |g: &Tensor| g.to_f64_vec().iter().all(|&v| v == 0.0);
                    let differ = match (&some[i], &all[i]) {
                        (Some(one), Some(other)) => bits(one) != bits(other),
                        (Some(only), None) | (None, Some(only)) => !is_zero(only),
                        (None, None) => false,
                    };
                    if differ {
                        wrong.push(format!(
                            "{sample:?}: the gradient of operand {i} alone of {needs:?} differs"
                        ));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

/// True for results that their operator declares constant to the derivative (`Vjp::constant`).
fn is_constant(sample: &Sample, k: usize) -> bool {
    let metas: Vec<Meta> = sample.metas();
    let needs: Vec<bool> = metas.iter().map(|m| m.dtype.is_float()).collect();
    let program = Vjp::write(sample.op.as_ref(), &metas, &needs).expect("it has a derivative");
    assert!(k > 0 || !program.constants[0], "{sample:?} has no result with a derivative");
    program.constants[k]
}

/// All indices of a small operand, a few of a larger one.
fn picked(n: usize) -> impl Iterator<Item = usize> {
    (0..n).step_by((n / 24).max(1))
}

/// The weighted sum of result `k` with `h` added to element `e` of operand `i`, and the sum of its terms' absolute
/// values.
fn weighted(
    sample: &Sample,
    ins: &[Tensor],
    i: usize,
    e: usize,
    h: f64,
    weights: &Tensor,
    k: usize,
) -> (f64, f64) {
    let mut ins = ins.to_vec();
    let mut moved = ins[i].to_f64_vec();
    moved[e] += h;
    ins[i] = tensor(DType::F64, &moved, ins[i].shape());
    let outs = eval_whole(sample.op.as_ref(), &ins).unwrap_or_else(|e| panic!("{sample:?}: {e}"));
    let terms = outs[k].to_f64_vec().into_iter().zip(weights.to_f64_vec()).map(|(y, w)| y * w);
    terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()))
}

fn gradients(
    sample: &Sample,
    ins: &[Tensor],
    grad: &Tensor,
    k: usize,
    needs: &[bool],
) -> Result<Vec<Option<Tensor>>> {
    let (sample, ins, grad, needs) = (sample.clone(), ins.to_vec(), grad.clone(), needs.to_vec());
    let run = move |rank| {
        let mesh = DeviceMesh::parse(&rank, "1")?;
        let whole = |t: &Tensor| DTensor::distribute(&mesh, t, Layout::replicated(0));
        let mut xs = Vec::new();
        for (x, needed) in ins.iter().zip(&needs) {
            xs.push(if *needed && x.dtype().is_float() { whole(x)?.requires_grad()? } else { whole(x)? });
        }
        let outs = DTensor::apply(sample.op.as_ref(), &xs.iter().collect::<Vec<_>>())?;
        if !outs[k].has_history() {
            return Ok(vec![None; xs.len()]);
        }
        let grads = outs[k].backward_from(whole(&grad)?)?;
        Ok(xs.iter().map(|x| grads.get(x).map(|g| g.local().clone())).collect())
    };
    Ok(spmd(1, run)?.swap_remove(0))
}
