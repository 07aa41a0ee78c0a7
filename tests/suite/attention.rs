//! Attention's masks, bias, soft cap and documents: against a definition in f64, and by bits.

use isoshard::ops::cpu::CpuAttention;
use isoshard::ops::{Bits, ScoreOperands, ScoreRule};
use isoshard::tensor::cpu::cast;
use isoshard::tensor::{DType, Shape, Tensor};

fn noise(shape: impl Into<Shape>, seed: usize) -> Tensor {
    let shape = shape.into();
    let value = |i: usize| ((i * 7919 + seed * 131) % 1009) as f64 * 0.003 - 1.5;
    Tensor::from_vec((0..shape.numel()).map(value).collect::<Vec<f64>>(), shape).unwrap()
}

fn f32_bits(x: &Tensor) -> Vec<u32> {
    x.to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect()
}

/// The optional operands, in f64.
#[derive(Clone, Default)]
struct Extra {
    bias: Option<Tensor>,
    mask: Option<Tensor>,
    documents: Option<[Tensor; 2]>,
}

impl Extra {
    fn operands(&self) -> ScoreOperands<'_> {
        ScoreOperands {
            bias: self.bias.as_ref(),
            mask: self.mask.as_ref(),
            documents: self.documents.as_ref().map(|[q, k]| [q, k]),
        }
    }

    fn rule(&self, rule: ScoreRule) -> ScoreRule {
        let (bias, mask) = (self.bias.is_some(), self.mask.is_some());
        ScoreRule { bias, mask, documents: self.documents.is_some(), ..rule }
    }
}

/// Returns the element of a tensor in which any extent may be 1.
fn at(x: &Tensor, index: &[usize]) -> f64 {
    let flat = index.iter().zip(x.shape().iter()).fold(0, |flat, (&i, &n)| flat * n + i.min(n - 1));
    x.to_f64_vec()[flat]
}

/// Returns the output by the definition: a softmax over the keys that a query sees.
fn by_definition(ins: [&Tensor; 3], call: &CpuAttention<'_>) -> Vec<f64> {
    let [q, k, v] = ins;
    let [b, h, tq, d] = q.shape()[..] else { panic!("four dims") };
    let (groups, keys, dv) = (k.shape()[1], k.shape()[2], v.shape()[3]);
    let [qs, ks, vs] = ins.map(Tensor::to_f64_vec);
    let mut out = Vec::new();
    for row in 0..b * h * tq {
        let (n, head, i) = (row / tq / h, row / tq % h, row % tq);
        let group = n * groups + head / (h / groups);
        let seen: Vec<usize> = (0..keys)
            .filter(|&j| {
                let position = (call.q_start + i) as i64;
                let [before, after] =
                    [call.rule.before, call.rule.after].map(|n| n.map_or(i64::MAX / 2, |n| n as i64));
                let window = position - before <= j as i64 && j as i64 <= position + after;
                let mask = call.operands.mask.is_none_or(|mask| at(mask, &[n, head, i, j]) == 1.0);
                let own = call.operands.documents.is_none_or(|[q, k]| at(q, &[n, i]) == at(k, &[n, j]));
                window && mask && own
            })
            .collect();
        let score = |j: usize| {
            let s =
                call.scale * (0..d).map(|c| qs[row * d + c] * ks[(group * keys + j) * d + c]).sum::<f64>();
            let s = call.rule.soft_cap.map_or(s, |cap| cap.0 * (s / cap.0).tanh());
            s + call.operands.bias.map_or(0.0, |bias| at(bias, &[n, head, i, j]))
        };
        let e: Vec<f64> = seen.iter().map(|&j| score(j).exp()).collect();
        let sum: f64 = e.iter().sum();
        for c in 0..dv {
            let value = seen.iter().zip(&e).map(|(&j, e)| e / sum * vs[(group * keys + j) * dv + c]);
            out.push(if seen.is_empty() { 0.0 } else { value.sum() });
        }
    }
    out
}

/// Every kind of mask for two sequences of four heads.
fn cases(tq: usize, tk: usize) -> Vec<(ScoreRule, Extra)> {
    let bools = |shape: [usize; 4], of: &dyn Fn(usize) -> bool| {
        let n = shape.iter().product::<usize>();
        Some(Tensor::from_vec((0..n).map(of).collect::<Vec<bool>>(), shape).unwrap())
    };
    let ids = |rows: usize, len: usize, each: usize| {
        Tensor::from_vec((0..rows * len).map(|i| (i / each) as i64).collect::<Vec<_>>(), [rows, len]).unwrap()
    };
    let all = ScoreRule::BIDIRECTIONAL;
    let none = Extra::default();
    let window = |before, after| ScoreRule { before: Some(before), after: Some(after), ..all };
    let capped = ScoreRule { soft_cap: Some(Bits(0.7)), ..ScoreRule::CAUSAL };
    let bias = |shape: [usize; 4]| Extra { bias: Some(noise(shape, 9)), ..Extra::default() };
    let mask = |mask| Extra { mask, ..Extra::default() };
    let documents = Some([ids(1, tq, 23), ids(2, tk, 23)]);
    vec![
        (ScoreRule::CAUSAL, none.clone()),
        (all, none.clone()),
        (window(0, 0), none.clone()),
        (window(40, 3), none.clone()),
        (ScoreRule { before: Some(33), ..ScoreRule::CAUSAL }, none.clone()),
        (ScoreRule { before: Some(5), ..all }, none.clone()),
        (capped, none),
        (all, bias([1, 4, tq, tk])),
        (ScoreRule::CAUSAL, bias([2, 1, 1, tk])),
        (capped, bias([1, 1, tq, 1])),
        (all, mask(bools([2, 1, 1, tk], &|i| i % tk < 40 + i / tk * 20))),
        (all, mask(bools([1, 4, tq, tk], &|i| i % 3 != 0 && i % tk / 32 != 1))),
        (ScoreRule::CAUSAL, mask(bools([1, 1, tq, tk], &|i| i / tk % 5 != 2))),
        (all, mask(bools([1, 1, 1, 1], &|_| false))),
        (all, Extra { documents: documents.clone(), ..Extra::default() }),
        (
            window(30, 2),
            Extra { documents, mask: bools([2, 4, 1, tk], &|i| i % 7 != 0), ..bias([2, 4, tq, tk]) },
        ),
    ]
}

fn call<'a>(rule: ScoreRule, extra: &'a Extra, q_start: usize) -> CpuAttention<'a> {
    let plain = CpuAttention::causal("attention", q_start, 0.3);
    CpuAttention { rule: extra.rule(rule), operands: extra.operands(), ..plain }
}

#[test]
fn every_mask_follows_the_definition() {
    for (tq, tk, q_start) in [(7, 7, 0), (70, 70, 0), (3, 130, 100), (80, 50, 0)] {
        let (q, k, v) = (noise([2, 4, tq, 3], 1), noise([2, 2, tk, 3], 2), noise([2, 2, tk, 2], 3));
        for (rule, extra) in cases(tq, tk) {
            let call = call(rule, &extra, q_start);
            let (o, lse) = call.forward(&q, &k, &v).unwrap();
            let want = by_definition([&q, &k, &v], &call);
            for (i, (got, want)) in o.to_f64_vec().iter().zip(want).enumerate() {
                assert!((got - want).abs() < 1e-12, "{tq} {tk} {:?} at {i}: {got} {want}", call.rule);
            }
            assert!(o.to_f64_vec().iter().all(|o| o.to_bits() != (-0.0f64).to_bits()));
            assert!(lse.to_f64_vec().iter().all(|lse| !lse.is_nan()));
        }
    }
}

#[test]
fn gradients_of_every_mask_by_differences() {
    gradients_by_differences((5, 41, 30), [7, 5]);
}

/// Rows so long that their exponentials are computed in several goes.
#[test]
fn gradients_of_long_rows_by_differences() {
    gradients_by_differences((2, 600, 597), [499, 799]);
}

/// Compares some elements of each gradient, `apart` elements from one to the next; those of biases have the second number.
fn gradients_by_differences((tq, tk, q_start): (usize, usize, usize), apart: [usize; 2]) {
    for (rule, extra) in cases(tq, tk) {
        let inputs = [noise([2, 4, tq, 3], 1), noise([2, 2, tk, 3], 2), noise([2, 2, tk, 2], 3)];
        let grad = noise([2, 4, tq, 2], 4);
        let loss = |ins: &[Tensor; 3], extra: &Extra| -> f64 {
            let (o, _) = call(rule, extra, q_start).forward(&ins[0], &ins[1], &ins[2]).unwrap();
            o.to_f64_vec().iter().zip(grad.to_f64_vec()).map(|(o, g)| o * g).sum()
        };
        let this = call(rule, &extra, q_start);
        let [q, k, v] = &inputs;
        let (o, lse) = this.forward(q, k, v).unwrap();
        let got = this.backward([q, k, v], (&o, &lse), &grad).unwrap();
        let nudged = |x: &Tensor, i: usize, by: f64| {
            let mut x = x.to_owned_copy().unwrap();
            x.make_mut::<f64>().unwrap()[i] += by;
            x
        };
        let step = 1e-5;
        for (which, got) in got.iter().enumerate() {
            for (i, got) in got.to_f64_vec().iter().enumerate().step_by(apart[0]) {
                let at = |by: f64| {
                    let mut ins = inputs.clone();
                    ins[which] = nudged(&ins[which], i, by);
                    loss(&ins, &extra)
                };
                let want = (at(step) - at(-step)) / (2.0 * step);
                assert!((got - want).abs() < 1e-8, "{:?}, input {which}, {i}: {got} {want}", this.rule);
            }
        }
        if let Some(bias) = &extra.bias {
            let got = this.bias_backward([q, k, v], (&o, &lse), &grad).unwrap();
            assert_eq!(got.shape(), bias.shape());
            for (i, got) in got.to_f64_vec().iter().enumerate().step_by(apart[1]) {
                let at = |by: f64| {
                    let bias = Some(nudged(bias, i, by));
                    loss(&inputs, &Extra { bias, ..extra.clone() })
                };
                let want = (at(step) - at(-step)) / (2.0 * step);
                assert!((got - want).abs() < 1e-8, "{:?}, bias, {i}: {got} {want}", this.rule);
            }
        }
    }
}

/// Keys that are appended, or masked, change no earlier result: forward, and the gradients of queries.
#[test]
fn rows_of_a_prefix_equal_the_rows_of_the_whole_by_bits() {
    let whole = 200;
    let [q, k, v, grad] = [1, 2, 3, 4].map(|seed| cast(&noise([1, 1, whole, 4], seed), DType::F32).unwrap());
    let causal = CpuAttention::causal("attention", 0, 0.3);
    let run = |call: &CpuAttention<'_>, x: [&Tensor; 4]| {
        let (o, lse) = call.forward(x[0], x[1], x[2]).unwrap();
        let [dq, ..] = call.backward([x[0], x[1], x[2]], (&o, &lse), x[3]).unwrap();
        [o, lse, dq]
    };
    let all = run(&causal, [&q, &k, &v, &grad]);
    for len in 1..=whole {
        let cut = |x: &Tensor| x.narrow(2, 0, len).unwrap();
        let prefix = [&q, &k, &v, &grad].map(cut);
        let part = run(&causal, prefix.each_ref());
        for (part, all) in part.iter().zip(&all) {
            assert_eq!(f32_bits(part), f32_bits(&cut(all)), "{len} of {whole}");
        }
        // The queries of the prefix, which see all of its keys, and the keys after them masked.
        let mask =
            Tensor::from_vec((0..whole).map(|j| j < len).collect::<Vec<_>>(), [1, 1, 1, whole]).unwrap();
        let extra = Extra { mask: Some(mask), ..Extra::default() };
        let masked = call(ScoreRule::BIDIRECTIONAL, &extra, 0);
        let empty = Extra::default();
        let alone = run(&call(ScoreRule::BIDIRECTIONAL, &empty, 0), prefix.each_ref());
        let masked = run(&masked, [&prefix[0], &k, &v, &prefix[3]]);
        for (masked, alone) in masked.iter().zip(&alone) {
            assert_eq!(f32_bits(masked), f32_bits(alone), "{len} of {whole}, masked");
        }
    }
    assert!(all.iter().all(|x| f32_bits(x).iter().all(|&bits| bits != 0x8000_0000)), "no -0");
}

/// The lemma of `docs/exactness.md` in every dtype, with grouped heads and windows, at lengths around blocks of 32 keys.
#[test]
fn rows_of_a_prefix_in_every_dtype_with_grouped_heads_and_windows() {
    let whole = 131;
    let windows = [
        ScoreRule::CAUSAL,
        ScoreRule { before: Some(40), ..ScoreRule::CAUSAL },
        ScoreRule { before: Some(3), soft_cap: Some(Bits(0.7)), ..ScoreRule::CAUSAL },
    ];
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        let of = |heads, seed| cast(&noise([2, heads, whole, 3], seed), dtype).unwrap();
        let ins = [of(4, 1), of(2, 2), of(2, 3), of(4, 4)];
        for rule in windows {
            let call = CpuAttention { rule, ..CpuAttention::causal("attention", 0, 0.3) };
            let run = |[q, k, v, grad]: [&Tensor; 4]| {
                let (o, lse) = call.forward(q, k, v).unwrap();
                let [dq, ..] = call.backward([q, k, v], (&o, &lse), grad).unwrap();
                [o, lse, dq]
            };
            let bits = |x: &Tensor| x.to_f64_vec().into_iter().map(f64::to_bits).collect::<Vec<_>>();
            let all = run(ins.each_ref());
            for len in [1, 2, 31, 32, 33, 63, 64, 65, 96, 97, 128, 130] {
                let cut = |x: &Tensor| x.narrow(2, 0, len).unwrap();
                let part = run(ins.each_ref().map(cut).each_ref());
                for (part, all) in part.iter().zip(&all) {
                    assert_eq!(bits(part), bits(&cut(all)), "{len} of {whole}, {dtype}, {rule:?}");
                }
            }
        }
    }
}

/// A key or query that is left out is not multiplied: it may be an infinity or a NaN.
#[test]
fn masked_keys_change_nothing() {
    let t = 70;
    let [q, k, v, grad] = [1, 2, 3, 4].map(|seed| cast(&noise([1, 2, t, 4], seed), DType::F32).unwrap());
    let hidden = |j: usize| j % 3 == 1;
    let mask = Tensor::from_vec((0..t).map(|j| !hidden(j)).collect::<Vec<_>>(), [1, 1, 1, t]).unwrap();
    let extra = Extra { mask: Some(mask), ..Extra::default() };
    let window = ScoreRule { before: Some(20), ..ScoreRule::CAUSAL };
    for rule in [ScoreRule::BIDIRECTIONAL, window] {
        let call = call(rule, &extra, 0);
        let run = |k: &Tensor, v: &Tensor| {
            let (o, lse) = call.forward(&q, k, v).unwrap();
            let [dq, dk, dv] = call.backward([&q, k, v], (&o, &lse), &grad).unwrap();
            [o, lse, dq, dk, dv]
        };
        let spoilt = |x: &Tensor, value: f32| {
            let mut x = x.to_owned_copy().unwrap();
            let data = x.make_mut::<f32>().unwrap();
            (0..data.len()).filter(|i| hidden(i / 4 % t)).for_each(|i| data[i] = value);
            x
        };
        let want = run(&k, &v);
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let got = run(&spoilt(&k, value), &spoilt(&v, value));
            for (got, want) in got.iter().zip(&want) {
                assert_eq!(f32_bits(got), f32_bits(want), "{value} in {rule:?}");
            }
        }
    }
    // A bias of -inf leaves out as a mask does.
    let minus = |j: usize| if hidden(j) { f32::NEG_INFINITY } else { 0.0 };
    let bias = Tensor::from_vec((0..t).map(minus).collect::<Vec<_>>(), [1, 1, 1, t]).unwrap();
    let biased = Extra { bias: Some(bias), ..Extra::default() };
    let of = |extra: &Extra| call(ScoreRule::CAUSAL, extra, 0).forward(&q, &k, &v).unwrap();
    assert_eq!(f32_bits(&of(&biased).0), f32_bits(&of(&extra).0));
}

#[test]
fn without_keys_or_queries_gradients_are_zero() {
    for (tq, tk) in [(0, 3), (3, 0)] {
        let (q, k) = (noise([2, 2, tq, 3], 1), noise([2, 2, tk, 3], 2));
        let (none, all) = (Extra::default(), ScoreRule::BIDIRECTIONAL);
        let call = call(all, &none, 0);
        let (o, lse) = call.forward(&q, &k, &k).unwrap();
        assert!(lse.to_f64_vec().iter().all(|&lse| lse == f64::NEG_INFINITY));
        for grad in call.backward([&q, &k, &k], (&o, &lse), &o).unwrap() {
            assert!(grad.to_f64_vec().iter().all(|&x| x == 0.0));
        }
    }
}
