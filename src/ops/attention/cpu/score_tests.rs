//! Tests of the order of scores and of the copies of rows, which change no bit.

use isoshard_kernels::{Caches, packs_lines, with_caches};

use super::CpuAttention;
use super::operands::ScoreTensors;
use crate::ops::attention::scores::{ScoreOperands, ScoreRule};
use crate::tensor::cpu::{Isa, cast, with_isa};
use crate::tensor::{DType, Tensor};

fn noise(shape: [usize; 4], salt: usize, dtype: DType) -> Tensor {
    let value = |i: usize| ((i * 7919 + salt * 131) % 1009) as f32 * 0.003_1 - 1.5;
    let x = Tensor::build(shape, |out: &mut [f32]| {
        out.iter_mut().enumerate().for_each(|(i, x)| *x = value(i));
    });
    cast(&x, dtype).expect("floats")
}

/// A mask that leaves out nothing lets scores lie by queries. Nothing else may come of it: with windows, grouped heads,
/// infinite keys, rows far apart, small exponentials, and each instruction set.
#[test]
fn scores_by_keys_and_by_queries_give_the_same_bits() {
    let windows = [(None, None), (None, Some(0)), (Some(9), Some(0)), (Some(40), Some(3)), (Some(0), None)];
    let sizes = [(8usize, 8usize), (15, 31), (16, 64), (17, 17), (40, 70), (64, 64), (65, 100), (130, 600)];
    for (n, (queries, keys)) in sizes.into_iter().enumerate() {
        for (before, after) in windows {
            let rule = ScoreRule { before, after, ..ScoreRule::BIDIRECTIONAL };
            let q_start = if n % 2 == 0 { keys.saturating_sub(queries) } else { 3 };
            let dtype = if n % 3 == 2 { DType::F64 } else { DType::F32 };
            // Vectors of queries' rows are whole or not. Rows of keys are a little or, next to other columns, far apart.
            let d = if n % 4 < 2 { 8 } else { 16 };
            let columns = if keys < 512 { d + 2 } else { 140 };
            let rows = |len: usize, heads: usize, salt: usize| {
                let x = noise([1, len, heads, columns], salt, dtype).transpose(1, 2);
                x.and_then(|x| x.narrow(3, 1, d)).expect("four dims")
            };
            let (q, mut k, v, grad) =
                (rows(queries, 4, 1), rows(keys, 2, 2), rows(keys, 2, 3), rows(queries, 4, 4));
            if n == 3 {
                k = k.packed();
                k.make_mut::<f32>().expect("f32")[5 * d + 1] = f32::INFINITY;
            }
            // With a large scale, most exponentials are subnormal numbers or 0.
            let scale = if n % 3 == 1 { 30.0 } else { 0.3 };
            let call = CpuAttention { q_start, rule, ..CpuAttention::causal("attention", 0, scale) };
            let all = Tensor::full(DType::Bool, [1, 1, 1, 1], 1.0);
            let operands = ScoreOperands { mask: Some(&all), ..ScoreOperands::default() };
            let by_queries = CpuAttention { rule: ScoreRule { mask: true, ..rule }, operands, ..call };
            for (call, by_keys) in [(&call, true), (&by_queries, false)] {
                let extra = ScoreTensors::of(&call.operands, dtype).expect("operands");
                let kernel = call.kernel::<f32>(&extra).expect("operands");
                assert_eq!(kernel.scores_by_keys([queries, keys], [d, d]), by_keys);
            }
            let run = |call: &CpuAttention<'_>| {
                let (o, lse) = call.forward(&q, &k, &v).expect("operands that fit");
                let grads = call.backward([&q, &k, &v], (&o, &lse), &grad).expect("operands that fit");
                let bits = |x: &Tensor| {
                    let x = x.to_f64_vec().into_iter();
                    x.map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() }).collect::<Vec<_>>()
                };
                [&o, &lse].into_iter().chain(&grads).map(bits).collect::<Vec<_>>()
            };
            let want = run(&by_queries);
            let all = Isa::available();
            // Others than the widest on small sizes, since they are slow.
            for &isa in &all[if n < 4 { 0 } else { all.len() - 1 }..] {
                let got = with_isa(isa, || run(&call));
                assert!(got == want, "{queries} queries, {keys} keys, {before:?} {after:?}, {isa:?}");
            }
        }
    }
}

/// A hidden NaN does not hide a seen score that is far below the others.
#[test]
fn hidden_nans_leave_small_exponentials() {
    let rule = ScoreRule { before: Some(2), after: Some(0), ..ScoreRule::BIDIRECTIONAL };
    let call = CpuAttention { rule, ..CpuAttention::causal("attention", 0, 1.0) };
    let q = Tensor::full(DType::F32, [1, 1, 16, 1], 1.0);
    let v = noise([1, 1, 16, 1], 4, DType::F32);
    for hidden in 0..12 {
        let run = |at_hidden: f32| {
            let mut scores = [0.0f32; 16];
            (scores[hidden], scores[hidden + 1]) = (at_hidden, -95.0);
            let k = Tensor::from_vec(scores.to_vec(), [1, 1, 16, 1]).expect("sixteen keys");
            let (o, lse) = call.forward(&q, &k, &v).expect("operands that fit");
            let [dq, dk, _] = call.backward([&q, &k, &v], (&o, &lse), &v).expect("operands that fit");
            // Queries from here on see the key after the hidden one alone, and so do gradients of later keys.
            let blind = |x: &Tensor| x.to_f64_vec()[hidden + 3..].to_vec();
            let later = dk.to_f64_vec()[hidden + 3..].to_vec();
            [blind(&o), blind(&lse), blind(&dq), later]
        };
        let [got, want] = [f32::NAN, 0.0].map(run);
        assert_eq!(got, want, "NaN at {hidden}");
        assert!(got[0].iter().all(|x| x.is_finite()), "{got:?}");
    }
}

/// Three parts of the keys and a single one: causal, with windows that begin and end in any part, an infinite key, and keys
/// that no query sees.
#[test]
fn gradients_do_not_depend_on_the_parts() {
    let [queries, keys] = [140, 1300];
    let rows = |heads: usize, len: usize, salt: usize| noise([1, heads, len, 8], salt, DType::F32);
    let with = |second: usize| Caches { second, ..Caches::USUAL };
    let cases =
        [(None, Some(0), 1160), (Some(600), Some(0), 1100), (Some(40), Some(300), 480), (None, None, 0)];
    for (before, after, q_start) in cases {
        let rule = ScoreRule { before, after, ..ScoreRule::BIDIRECTIONAL };
        let call = CpuAttention { q_start, rule, ..CpuAttention::causal("attention", 0, 0.3) };
        for infinite in [false, true] {
            let (q, mut k, v, grad) =
                (rows(2, queries, 1), rows(1, keys, 2), rows(1, keys, 3), rows(2, queries, 4));
            if infinite {
                k.make_mut::<f32>().expect("f32")[(q_start + 60) * 8] = f32::INFINITY;
            }
            let (o, lse) = call.forward(&q, &k, &v).expect("operands that fit");
            let run = |second: usize| {
                let grads = || call.backward([&q, &k, &v], (&o, &lse), &grad).expect("operands that fit");
                with_caches(with(second), grads).map(|x| {
                    let x = x.to_f64_vec().into_iter();
                    x.map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() }).collect::<Vec<_>>()
                })
            };
            assert!(run(1) == run(usize::MAX >> 8), "{before:?} {after:?} {q_start} {infinite}");
        }
    }
}

/// Rows of one head next to each other are read where they are, those between other heads' are copied.
#[test]
fn results_do_not_depend_on_the_distance_of_rows() {
    let [heads, keys, d] = [4, 170, 64];
    for queries in [keys, 1] {
        let noise = |salt: usize, rows: usize| {
            Tensor::build([1, heads, rows, d], |out: &mut [f32]| {
                out.iter_mut()
                    .enumerate()
                    .for_each(|(i, x)| *x = ((i * 7919 + salt) % 1009) as f32 / 500.0 - 1.0)
            })
        };
        let [q, k, v] = [(1, queries), (2, keys), (3, keys)].map(|(salt, rows)| noise(salt, rows));
        let side_by_side =
            |x: &Tensor| x.transpose(1, 2).and_then(|x| x.packed().transpose(1, 2)).expect("four dims");
        let call = CpuAttention::causal("attention", keys - queries, 0.2);
        let run = |[q, k, v]: [&Tensor; 3]| {
            let (o, lse) = call.forward(q, k, v).expect("operands that fit");
            let gradients = call.backward([q, k, v], (&o, &lse), &o).expect("operands that fit");
            [&o, &lse].into_iter().chain(&gradients).map(Tensor::to_f64_vec).collect::<Vec<_>>()
        };
        let apart = [&q, &k, &v].map(side_by_side);
        assert!(packs_lines(keys, apart[1].strides()[2] * 4) && !packs_lines(keys, d * 4));
        assert_eq!(run([&q, &k, &v]), run(apart.each_ref()), "{queries} queries");
    }
}
