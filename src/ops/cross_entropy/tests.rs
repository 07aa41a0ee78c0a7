//! Values and gradients of the losses of classes against their definitions, in f64 and f32.

use super::*;
use crate::ops::{Max, SoftCrossEntropy, SoftCrossEntropyGrad, SumExp, eval_whole};
use crate::tensor::Element;

fn statistics(x: &Tensor) -> [Tensor; 2] {
    let max = Max { dims: [x.shape().len() - 1].into_iter().collect(), keep: true };
    let m = eval_whole(&max, std::slice::from_ref(x)).unwrap().remove(0);
    let s = eval_whole(&SumExp, &[x.clone(), m.clone()]).unwrap().remove(0);
    [m, s]
}

fn operands<T: Element>(logits: &[T], target: i64) -> Vec<Tensor> {
    let x = Tensor::from_slice(logits, [1, logits.len()]).unwrap();
    let [m, s] = statistics(&x);
    vec![x, Tensor::from_vec(vec![target], [1]).unwrap(), m, s]
}

fn loss<T: Element>(terms: CrossEntropyTerms, logits: &[T], target: i64) -> f64 {
    eval_whole(&CrossEntropy { terms }, &operands(logits, target)).unwrap()[0].item().unwrap()
}

const PLAIN: CrossEntropyTerms =
    CrossEntropyTerms { ignore_index: None, nll_factor: Bits(1.0), z_factor: Bits(0.0) };

#[test]
fn loss_and_total_gradient_follow_the_definition() {
    let logits = [1.5, -0.25, 1000.0, 998.5, 1000.5];
    for (target, chosen) in logits.iter().enumerate() {
        let mut ins = operands(&logits, target as i64);
        let sum: f64 = logits.iter().map(|x| (x - 1000.5f64).exp()).sum();
        assert!((loss(PLAIN, &logits, target as i64) - (sum.ln() + 1000.5 - chosen)).abs() < 1e-12);
        ins.push(Tensor::from_vec(vec![2.0], [1]).unwrap());
        let grad = eval_whole(&CrossEntropyGrad { terms: PLAIN }, &ins).unwrap()[0].to_f64_vec();
        for (c, g) in grad.iter().enumerate() {
            let want = 2.0 * ((logits[c] - 1000.5).exp() / sum - f64::from(u8::from(c == target)));
            assert!((g - want).abs() < 1e-14, "{g} {want}");
        }
    }
    let mut bad = operands(&[0.0; 3], 0);
    bad[1] = Tensor::from_vec(vec![3i64], [1]).unwrap();
    let error = eval_whole(&CrossEntropy::default(), &bad).unwrap_err().to_string();
    assert!(error.starts_with("cross_entropy: an index leaves dim 1; got index 3 for 3 indices"), "{error}");
}

/// Numbers from mpmath. Half a unit in the last place of the sum of exponentials, which is just above 1, remains.
#[test]
fn a_small_loss_of_large_logits_does_not_cancel() {
    let close = |got: f64, want: f64, by: f64| assert!((got - want).abs() <= by, "{got} {want}");
    close(loss(PLAIN, &[50f32, 36.0], 0), 8.315283660e-7, f64::from(f32::EPSILON) / 2.0);
    close(loss(PLAIN, &[1e6f32, 1e6], 1), std::f64::consts::LN_2, 1e-7);
    close(loss(PLAIN, &[50.0, 14.0], 0), 2.319522830243569e-16, f64::EPSILON / 2.0);
    close(loss(PLAIN, &[1e300, -1e300], 1), 2e300, 0.0);
}

#[test]
fn terms_change_the_loss_and_its_gradient() {
    let logits = [0.5, -1.25, 2.0];
    let terms = CrossEntropyTerms { ignore_index: Some(-100), nll_factor: Bits(0.75), z_factor: Bits(0.1) };
    let lse = |x: &[f64]| x.iter().map(|x| x.exp()).sum::<f64>().ln();
    let want = |x: &[f64]| 0.75 * (lse(x) - x[1]) + 0.1 * lse(x) * lse(x);
    assert!((loss(terms, &logits, 1) - want(&logits)).abs() < 1e-14);
    let dy = Tensor::from_vec(vec![1.0], [1]).unwrap();
    let ins = [operands(&logits, 1), vec![dy.clone()]].concat();
    let grad = eval_whole(&CrossEntropyGrad { terms }, &ins).unwrap()[0].to_f64_vec();
    for (c, g) in grad.iter().enumerate() {
        let nudged = |by: f64| {
            let mut x = logits;
            x[c] += by;
            want(&x)
        };
        assert!((g - (nudged(1e-5) - nudged(-1e-5)) / 2e-5).abs() < 1e-9, "{c}");
    }
    // A row that is ignored may have any values.
    let odd = [operands(&[f64::NAN, f64::INFINITY], -100), vec![dy]].concat();
    assert_eq!(eval_whole(&CrossEntropy { terms }, &odd[..4]).unwrap()[0].to_f64_vec(), [0.0]);
    assert_eq!(eval_whole(&CrossEntropyGrad { terms }, &odd).unwrap()[0].to_f64_vec(), [0.0; 2]);
}

#[test]
fn soft_losses_follow_the_definition() {
    let (logits, q) = ([0.5, -1.25, 2.0, f64::NEG_INFINITY], [0.25, 0.5, 1.0, 0.0]);
    let lse = |x: &[f64]| x.iter().map(|x| x.exp()).sum::<f64>().ln();
    let want = |x: &[f64]| (0..3).map(|c| q[c] * (lse(x) - x[c])).sum::<f64>();
    let x = Tensor::from_slice(&logits, [1, 4]).unwrap();
    let weights = Tensor::from_slice(&q, [1, 4]).unwrap();
    let [m, s] = statistics(&x);
    let ins = [x, weights, m, s];
    let got = eval_whole(&SoftCrossEntropy { row_sum: None }, &ins).unwrap()[0].item().unwrap();
    assert!((got - want(&logits)).abs() < 1e-14, "{got}");
    let dy = Tensor::from_vec(vec![3.0], [1]).unwrap();
    let sum = Tensor::from_vec(vec![1.75], [1, 1]).unwrap();
    let with = |more: &[Tensor]| [&ins[..], std::slice::from_ref(&dy), more].concat();
    let grad = |row_sum, more: &[Tensor]| {
        eval_whole(&SoftCrossEntropyGrad { row_sum }, &with(more)).unwrap()[0].to_f64_vec()
    };
    let got = grad(None, &[sum]);
    assert_eq!(got, grad(Some(Bits(1.75)), &[]));
    for (c, g) in got.iter().enumerate().take(3) {
        let nudged = |by: f64| {
            let mut x = logits;
            x[c] += by;
            want(&x)
        };
        assert!((g - 3.0 * (nudged(1e-5) - nudged(-1e-5)) / 2e-5).abs() < 1e-9, "{c}: {g}");
    }
    assert_eq!(got[3], 0.0);
}
