//! Derivatives compared with their definition: central differences in f64 on a single rank, by
//! [`isoshard::testing::gradients`]. Samples keep third derivatives below `1e4` (at 1/8, `x^-1/2` has 3e3).

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::ops::{Meta, Sample, Vjp, eval_whole};
use isoshard::placement::Layout;
use isoshard::tensor::{DType, Tensor};
use isoshard::testing::wrong_gradients;

use crate::common::samples::catalog;
use crate::common::{has_no_derivative, small_ints, values};

#[test]
fn smooth_samples_agree_with_finite_differences() {
    let mut wrong = Vec::new();
    for sample in catalog().into_iter().filter(|s| s.smooth && !has_no_derivative(s)) {
        let ins = values(&sample, DType::F64, 3);
        let Ok(outs) = eval_whole(sample.op.as_ref(), &ins) else { panic!("{sample:?} cannot be evaluated") };
        for k in (0..outs.len()).filter(|&k| outs[k].dtype() == DType::F64 && !is_constant(&sample, k)) {
            let (sample, ins) = (sample.clone(), ins.clone());
            let call = format!("{sample:?}: result {k}");
            let floats: Vec<Tensor> = ins.iter().filter(|x| x.dtype() == DType::F64).cloned().collect();
            let found = wrong_gradients(&floats, move |floats| {
                let mesh = floats[0].mesh().clone();
                let (mut floats, mut xs) = (floats.iter(), Vec::new());
                for x in &ins {
                    xs.push(match x.dtype() {
                        DType::F64 => floats.next().expect("one of each").clone(),
                        _ => DTensor::distribute(&mesh, x, Layout::replicated(0))?,
                    });
                }
                Ok(DTensor::apply(sample.op.as_ref(), &xs.iter().collect::<Vec<_>>())?.remove(k))
            });
            let found = found.unwrap_or_else(|e| panic!("{call}: {e}"));
            wrong.extend(found.into_iter().map(|line| format!("{call}: {line}")));
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
        let mut outs = DTensor::apply(sample.op.as_ref(), &xs.iter().collect::<Vec<_>>())?;
        if !outs[k].has_history() {
            return Ok(vec![None; xs.len()]);
        }
        let grads = outs[k].backward_from(whole(&grad)?)?;
        Ok(xs.iter().map(|x| grads.get(x).map(|g| g.local().clone())).collect())
    };
    Ok(spmd(1, run)?.swap_remove(0))
}
