//! Second and third derivatives compared with central differences, on a single rank.
//!
//! The differences are taken along one direction per operand. With a step of `h = 2^-17` they have an error of
//! `h² f'''/6`, about `1e-11 f'''`, and one from rounding sums, about `3e-11` times the sum of absolute terms. The bound
//! is that of the module `gradients`: `1e-6` times the largest of 1, the value and the sum of absolute terms.

use isoshard::comm::spmd;
use isoshard::dtensor::{AttentionOptions, CrossEntropyOptions, DTensor, DeviceMesh};
use isoshard::nn::Activation;
use isoshard::ops::{Bits, LayerNorm, Max, SoftCrossEntropy, SumExp, Vjp, catalog};
use isoshard::placement::Layout;
use isoshard::rng::Draw;
use isoshard::tensor::{DType, Tensor};
use isoshard::{Error, Result};

const STEP: f64 = 1.0 / 131_072.0;

/// Operators whose derivative has no derivative, with the reason.
const REFUSED: [(&str, &str); 1] =
    [("digamma", "its second derivative, a polygamma function, is not available")];

#[test]
fn smooth_samples_agree_with_differences_of_gradients() {
    let found = spmd(1, |rank| {
        let mesh = DeviceMesh::parse(&rank, "1")?;
        let mut found = Vec::new();
        for sample in catalog().iter().filter(|s| s.smooth) {
            let metas = sample.metas();
            let needs: Vec<bool> = metas.iter().map(|m| m.dtype.is_float()).collect();
            let Ok(program) = Vjp::write(sample.op.as_ref(), &metas, &needs) else { continue };
            let ins: Vec<Tensor> =
                (49..).zip(&sample.ins).map(|(i, input)| input.values(DType::F64, i)).collect();
            for k in (0..sample.op.infer(&metas)?.len()).filter(|&k| !program.constants[k]) {
                let result = |xs: &[&DTensor]| Ok(DTensor::apply(sample.op.as_ref(), xs)?.remove(k));
                found.push((
                    format!("{sample:?}, result {k}"),
                    sample.op.name(),
                    compare(&mesh, &result, &ins),
                ));
            }
        }
        Ok(found)
    });
    let (mut wrong, mut refused, mut compared) = (Vec::new(), Vec::new(), 0);
    for (what, name, result) in found.unwrap_or_else(|e| panic!("{e}")).remove(0) {
        match result {
            Ok(None) => {}
            Ok(Some(differences)) => {
                compared += 1;
                wrong.extend(differences.into_iter().map(|d| format!("{what}: {d}")));
            }
            Err(Error::Unsupported(_)) => refused.push(name),
            Err(e) => wrong.push(format!("{what}: {e}")),
        }
    }
    refused.dedup();
    assert!(wrong.is_empty(), "{} wrong derivatives:\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!(refused, REFUSED.map(|(name, _)| name));
    assert!(compared > 200, "{compared} results of samples were compared");
}

/// A function of tensors, with a name and its operands.
type Composite = (&'static str, Box<dyn Fn(&[&DTensor]) -> Result<DTensor>>, Vec<Tensor>);

/// Second and third derivatives of the fused operators with every option, as programs use them.
#[test]
fn fused_operators_agree_with_differences_of_first_and_second_derivatives() {
    let found = spmd(1, |rank| {
        let mesh = DeviceMesh::parse(&rank, "1")?;
        let mut wrong = Vec::new();
        for (name, f, ins) in composites(&mesh)?.into_iter().chain(methods_with_statistics()) {
            // The weighted sum of the gradients, a function whose first derivative is the second one of `f`.
            let gradient = |xs: &[&DTensor]| -> Result<DTensor> {
                let y = f(xs)?;
                let floats: Vec<&DTensor> = xs.iter().copied().filter(|x| x.dtype() == DType::F64).collect();
                let dy = DTensor::distribute(x_mesh(xs), &numbers(y.shape(), 33), Layout::replicated(0))?;
                let mut sum = y.mul(&dy)?.sum_all()?.mul_scalar(0.25)?;
                for (grad, salt) in y.grad_from(&dy, &floats)?.into_iter().zip(34..) {
                    let weights =
                        DTensor::distribute(x_mesh(xs), &numbers(grad.shape(), salt), Layout::replicated(0))?;
                    sum = sum.add(&grad.mul(&weights)?.sum_all()?)?;
                }
                Ok(sum)
            };
            for (order, found) in [(2, compare(&mesh, &*f, &ins)?), (3, compare(&mesh, &gradient, &ins)?)] {
                let Some(found) = found else { panic!("{name} has no derivative of order {order}") };
                wrong.extend(found.into_iter().map(|d| format!("{name}, order {order}: {d}")));
            }
        }
        Ok(wrong)
    });
    let wrong = found.unwrap_or_else(|e| panic!("{e}")).remove(0);
    assert!(wrong.is_empty(), "{} wrong derivatives:\n{}", wrong.len(), wrong.join("\n"));
}

fn x_mesh<'a>(xs: &[&'a DTensor]) -> &'a DeviceMesh {
    xs[0].mesh()
}

fn composites(mesh: &DeviceMesh) -> Result<Vec<Composite>> {
    let all = |x: Tensor| DTensor::distribute(mesh, &x, Layout::replicated(0));
    let n = |shape: &[usize], salt| numbers(shape, salt);
    let mut found: Vec<Composite> = vec![
        (
            "layer_norm",
            Box::new(|x| x[0].layer_norm(x[1], Some(x[2]), 0.1)),
            vec![n(&[3, 5], 1), n(&[5], 2), n(&[5], 3)],
        ),
        (
            "layer_norm without weights",
            Box::new(|x| {
                let op = LayerNorm { eps: Bits(0.1), weight: false, bias: false };
                Ok(DTensor::apply(&op, x)?.remove(0))
            }),
            vec![n(&[3, 5], 1)],
        ),
        (
            "add_layer_norm",
            Box::new(|x| {
                let (y, sum) = x[0].add_layer_norm(x[1], x[2], Some(x[3]), 0.1)?;
                y.mul(&sum)
            }),
            vec![n(&[3, 5], 1), n(&[3, 5], 2), n(&[5], 3), n(&[5], 4)],
        ),
        (
            "add_rms_norm",
            Box::new(|x| Ok(x[0].add_rms_norm(x[1], x[2], 0.1)?.0)),
            vec![n(&[3, 5], 1), n(&[3, 5], 2), n(&[5], 3)],
        ),
        (
            "linear",
            Box::new(|x| x[0].linear(x[1], Some(x[2]), Some(Activation::Silu))),
            vec![n(&[2, 5], 1), n(&[3, 5], 2), n(&[3], 3)],
        ),
        ("rms_norm", Box::new(|x| x[0].rms_norm(x[1], 0.1)), vec![n(&[3, 5], 1), n(&[5], 2)]),
        ("prod", Box::new(|x| x[0].prod(&[0, 2], false)), vec![n(&[3, 2, 5], 1)]),
        ("softmax", Box::new(|x| x[0].softmax(1)), vec![n(&[3, 5], 1)]),
        ("log_softmax", Box::new(|x| x[0].log_softmax(0)), vec![n(&[3, 5], 1)]),
    ];
    let targets = all(Tensor::from_vec(vec![2i64, 0, -7, 4], [4])?)?;
    let losses = vec![n(&[4, 5], 1)];
    let valid = all(Tensor::from_vec(vec![2i64, 0, 1, 4], [4])?)?;
    found.push(("cross_entropy", Box::new(move |x| x[0].cross_entropy(&valid)), losses.clone()));
    let smoothed = move |x: &[&DTensor]| {
        let options = CrossEntropyOptions {
            ignore_index: Some(-7),
            label_smoothing: 0.2,
            z_loss: 0.3,
            ..Default::default()
        };
        x[0].cross_entropy_with(&targets, &options)
    };
    found.push(("cross_entropy with all terms", Box::new(smoothed), losses.clone()));
    // The probabilities are a function of an operand as well.
    let soft = |x: &[&DTensor]| {
        let dims = || [1].into_iter().collect();
        let m = DTensor::apply_one(&Max { dims: dims(), keep: true }, &[&x[0].detach()])?;
        let s = DTensor::apply_one(&SumExp, &[&x[0].detach(), &m])?;
        DTensor::apply_one(&SoftCrossEntropy { row_sum: None }, &[x[0], &x[1].exp()?, &m, &s])
    };
    found.push(("soft_cross_entropy", Box::new(soft), vec![n(&[4, 5], 1), n(&[4, 5], 2)]));
    let known = |x: &[&DTensor]| {
        let dims = || [1].into_iter().collect();
        let m = DTensor::apply_one(&Max { dims: dims(), keep: true }, &[&x[0].detach()])?;
        let s = DTensor::apply_one(&SumExp, &[&x[0].detach(), &m])?;
        DTensor::apply_one(&SoftCrossEntropy { row_sum: Some(Bits(1.0)) }, &[x[0], &x[1].softmax(1)?, &m, &s])
    };
    found.push(("soft_cross_entropy of a distribution", Box::new(known), vec![n(&[4, 5], 1), n(&[4, 5], 2)]));
    let (q, k, v) = (n(&[2, 2, 3, 2], 1), n(&[2, 2, 4, 2], 2), n(&[2, 2, 4, 3], 3));
    let qkv = || vec![q.clone(), k.clone(), v.clone()];
    let mut attention = |name, options: AttentionOptions, p: f64, ins: Vec<Tensor>| {
        let f = move |x: &[&DTensor]| {
            let options = if x.len() > 3 { options.clone().bias(x[3]) } else { options.clone() };
            x[0].attention_with_dropout(x[1], x[2], &options, p, Draw { seed: 3, number: 1 })
        };
        found.push((name, Box::new(f), ins));
    };
    let both = AttentionOptions::bidirectional(0.7);
    attention("attention", both.clone(), 0.0, qkv());
    attention("attention with a window", AttentionOptions::causal(0.7).offset(1).window(1, 0), 0.0, qkv());
    attention("attention with dropout", AttentionOptions::causal(0.7).offset(1), 0.4, qkv());
    let mut bias = n(&[1, 2, 3, 4], 5).to_f64_vec();
    attention("attention with a cap and a bias", both.clone().soft_cap(0.8), 0.0, {
        [qkv(), vec![Tensor::from_vec(bias.clone(), [1, 2, 3, 4])?]].concat()
    });
    attention(
        "attention with a bias per key",
        both.clone(),
        0.3,
        [qkv(), vec![n(&[2, 1, 1, 4], 5)]].concat(),
    );
    bias[5] = f64::NEG_INFINITY;
    let minus = all(Tensor::from_vec(bias, [1, 2, 3, 4])?)?;
    attention("attention with a bias of -inf", both.clone().bias(&minus), 0.0, qkv());
    // The second query of the first entry sees no key.
    let mask = (0..2 * 3 * 4).map(|e| !(4..8).contains(&e) && e % 5 != 0).collect();
    let mask = all(Tensor::from_vec::<bool>(mask, [2, 1, 3, 4])?)?;
    let of_queries = all(Tensor::from_vec(vec![0i64, 0, 1, 5, 6, 6], [2, 3])?)?;
    let of_keys = all(Tensor::from_vec(vec![0i64, 0, 1, 1, 5, 6, 6, 6], [2, 4])?)?;
    attention("attention with a mask", both.clone().mask(&mask), 0.0, qkv());
    attention("attention within documents", both.clone().documents(&of_queries, &of_keys), 0.2, qkv());
    let grouped = vec![n(&[1, 4, 3, 2], 1), n(&[1, 2, 3, 2], 2), n(&[1, 2, 3, 2], 3)];
    attention("attention of grouped heads", AttentionOptions::causal(0.7), 0.3, grouped);
    Ok(found)
}

/// Methods that subtract or divide by a statistic whose gradient is not recorded, since the result does not depend on it.
fn methods_with_statistics() -> Vec<Composite> {
    let n = |shape: &[usize], salt| numbers(shape, salt);
    let x = || vec![n(&[4, 3, 5], 1)];
    let affine = || vec![n(&[2, 4, 3], 1), n(&[4], 2), n(&[4], 3)];
    vec![
        ("var", Box::new(|x| x[0].var(&[0, 2], 1, false)), x()),
        ("std", Box::new(|x| x[0].std(&[1], 0, true)), x()),
        ("logsumexp", Box::new(|x| x[0].logsumexp(&[0, 2], false)), x()),
        ("norm", Box::new(|x| x[0].norm(2.0, &[0, 2], false)), x()),
        ("norm of order 3", Box::new(|x| x[0].add_scalar(2.0)?.norm(3.0, &[1], false)), x()),
        ("layer_norm_over", Box::new(|x| x[0].layer_norm_over(2, None, None, 0.1)), x()),
        ("batch_norm", Box::new(|x| Ok(x[0].batch_norm(Some((x[1], x[2])), 0.1)?.0)), affine()),
        ("group_norm", Box::new(|x| x[0].group_norm(2, Some((x[1], x[2])), 0.1)), affine()),
        ("instance_norm", Box::new(|x| x[0].instance_norm(None, 0.1)), x()),
        ("weight_norm", Box::new(|x| x[0].weight_norm(x[1], 0)), vec![n(&[3, 5], 1), n(&[3], 2)]),
        (
            "cosine_similarity",
            Box::new(|x| x[0].cosine_similarity(x[1], 1, 1e-8)),
            vec![n(&[3, 5], 1), n(&[3, 5], 2)],
        ),
    ]
}

/// Compares the derivative of the weighted gradients of `f` with differences, by each operand and by the incoming
/// gradient. Returns the differences, or `None` if the result has no derivative.
fn compare(
    mesh: &DeviceMesh,
    f: &dyn Fn(&[&DTensor]) -> Result<DTensor>,
    operands: &[Tensor],
) -> Result<Option<Vec<String>>> {
    let whole = |x: &Tensor| DTensor::distribute(mesh, x, Layout::replicated(0));
    let leaf = |x: &Tensor| if x.dtype() == DType::F64 { whole(x)?.requires_grad() } else { whole(x) };
    let weights: Vec<Tensor> = operands.iter().zip(70..).map(|(x, salt)| numbers(x.shape(), salt)).collect();
    // The leaves and the result.
    let apply = |ins: &[Tensor]| -> Result<(Vec<DTensor>, DTensor)> {
        let leaves = ins.iter().map(leaf).collect::<Result<Vec<_>>>()?;
        let y = f(&leaves.iter().collect::<Vec<_>>())?;
        Ok((leaves, y))
    };
    let (leaves, y) = apply(operands)?;
    if y.dtype() != DType::F64 || !y.has_history() {
        return Ok(None);
    }
    let incoming = numbers(y.shape(), 60);
    // The weighted sum of the gradients, and the sum of its terms' absolute values.
    let weighted = |ins: &[Tensor], incoming: &Tensor| -> Result<(f64, f64)> {
        let (leaves, mut y) = apply(ins)?;
        let gradients = y.backward_from(whole(incoming)?)?;
        let mut sums = (0.0, 0.0);
        for (x, w) in leaves.iter().zip(&weights).filter(|(x, _)| x.dtype() == DType::F64) {
            let Some(grad) = gradients.get(x) else { continue };
            for (g, w) in grad.local().to_f64_vec().into_iter().zip(w.to_f64_vec()) {
                sums = (sums.0 + g * w, sums.1 + (g * w).abs());
            }
        }
        Ok(sums)
    };
    let dy = leaf(&incoming)?;
    let mut sum = whole(&Tensor::zeros(DType::F64, []))?;
    let wanted: Vec<usize> = (0..leaves.len()).filter(|&i| leaves[i].dtype() == DType::F64).collect();
    let grads = y.grad_from(&dy, &wanted.iter().map(|&i| &leaves[i]).collect::<Vec<_>>())?;
    for (&i, grad) in wanted.iter().zip(grads) {
        sum = sum.add(&grad.mul(&whole(&weights[i])?)?.sum_all()?)?;
    }
    let mut wrong = Vec::new();
    for &i in wanted.iter().chain([&leaves.len()]) {
        let x = leaves.get(i).unwrap_or(&dy);
        let direction = numbers(x.shape(), 80 + i as u64).to_f64_vec();
        let _guard = mesh.no_grad(); // this derivative is not differentiated again
        let got: f64 = if sum.has_history() {
            let second = sum.grad(&[x])?.remove(0).local().to_f64_vec();
            second.iter().zip(&direction).map(|(g, d)| g * d).sum()
        } else {
            0.0
        };
        drop(_guard);
        let at = |h: f64| {
            let moved = |x: &Tensor| {
                let values = x.to_f64_vec().into_iter().zip(&direction).map(|(x, d)| x + h * d).collect();
                Tensor::from_vec(values, x.shape().clone())
            };
            let mut ins = operands.to_vec();
            match ins.get_mut(i) {
                None => weighted(&ins, &moved(&incoming)?),
                Some(x) => {
                    *x = moved(x)?;
                    weighted(&ins, &incoming)
                }
            }
        };
        let ((up, scale), (down, _)) = (at(STEP)?, at(-STEP)?);
        let want = (up - down) / (2.0 * STEP);
        let bound = 1e-6 * want.abs().max(scale).max(1.0);
        if (got - want).is_nan() || (got - want).abs() > bound {
            wrong.push(format!(
                "the derivative by operand {i} is {got} instead of {want} (bound {bound:.1e})"
            ));
        }
    }
    Ok(Some(wrong))
}

/// Multiples of 1/8 from -1 to 1 that depend on the index and on `salt`.
fn numbers(shape: &[usize], salt: u64) -> Tensor {
    let mix = |e: u64| (e ^ salt << 20).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23) >> 40;
    let values = (0..shape.iter().product::<usize>() as u64).map(|e| (mix(e) % 17) as f64 / 8.0 - 1.0);
    Tensor::from_vec(values.collect(), shape).expect("as many values as elements")
}
