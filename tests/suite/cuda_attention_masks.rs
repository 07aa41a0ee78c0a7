//! Attention's windows, masks, bias, soft cap and documents on a device have the CPU's bits, forward and backward.

use crate::common::{SplitMix, shim};
use isoshard::ops::{Bits, ScoreOperands, ScoreRule};
use isoshard::ops::{cpu::CpuAttention, cuda::CudaAttention};
use isoshard::tensor::cpu::cast;
use isoshard::tensor::{DType, Device, Tensor};

/// One call: numbers of heads, key heads, queries and keys, and the position of the first query.
#[derive(Clone, Copy, Debug)]
struct MaskCase {
    dtype: DType,
    heads: [usize; 2],
    len: [usize; 2],
    q_start: usize,
    d: usize,
    rule: ScoreRule,
    /// The extents of bias and mask that are 1, by bits; the last bit is the batch.
    repeats: usize,
    /// One value of k and v is this.
    special: Option<f64>,
}

const BATCH: usize = 2;

fn noise(shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    let mut stream = SplitMix(seed.wrapping_mul(0x9e37_79b9) + 1);
    let value = |_| (stream.next_u64() >> 40) as f64 / (1u64 << 23) as f64 - 1.0;
    let values: Vec<f64> = (0..shape.iter().product::<usize>()).map(value).collect();
    cast(&Tensor::from_vec(values, shape).unwrap(), dtype).unwrap()
}

impl MaskCase {
    /// Returns q, k, v, the gradient of o, bias, mask and the documents.
    fn operands(&self) -> Vec<Tensor> {
        let ([h, groups], [tq, tk], d) = (self.heads, self.len, self.d);
        let scores = [BATCH, h, tq, tk];
        let shape: Vec<usize> =
            (0..4).map(|i| if self.repeats >> (3 - i) & 1 == 1 { 1 } else { scores[i] }).collect();
        let random = noise(&shape, DType::F64, 5).to_f64_vec();
        // Some keys, and a whole leaf of them, are hidden.
        let last = shape[3];
        let mask = random.iter().enumerate().map(|(i, x)| *x > -0.5 && (last < 64 || i % last / 32 != 1));
        let spoil = |x: Tensor| match self.special {
            Some(value) => {
                let mut values = x.to_f64_vec();
                let at = values.len() / 3;
                values[at] = value;
                cast(&Tensor::from_vec(values, x.shape().clone()).unwrap(), self.dtype).unwrap()
            }
            None => x,
        };
        let documents = |len: usize| {
            let ids = (0..BATCH * len).map(|i| (i / 45) as i64).collect::<Vec<_>>();
            Tensor::from_vec(ids, [BATCH, len]).unwrap()
        };
        vec![
            noise(&[BATCH, h, tq, d], self.dtype, 1),
            spoil(noise(&[BATCH, groups, tk, d], self.dtype, 2)),
            spoil(noise(&[BATCH, groups, tk, d + 3], self.dtype, 3)),
            noise(&[BATCH, h, tq, d + 3], self.dtype, 4),
            noise(&shape, self.dtype, 6),
            Tensor::from_vec(mask.collect::<Vec<bool>>(), &shape[..]).unwrap(),
            documents(tq),
            documents(tk),
        ]
    }

    fn check(&self, device: Device) {
        let here = self.operands();
        let there: Vec<Tensor> = here.iter().map(|x| x.to_device(device).unwrap()).collect();
        let of = |ins: &[Tensor]| -> Vec<Tensor> {
            let operands = ScoreOperands {
                bias: self.rule.bias.then_some(&ins[4]),
                mask: self.rule.mask.then_some(&ins[5]),
                documents: self.rule.documents.then_some([&ins[6], &ins[7]]),
            };
            let (rule, q_start, qkv) = (self.rule, self.q_start, [&ins[0], &ins[1], &ins[2]]);
            let [q, k, v] = qkv;
            if ins[0].device() == Device::Cpu {
                let call = CpuAttention { rule, operands, ..CpuAttention::causal("attention", q_start, 0.4) };
                let (o, lse) = call.forward(q, k, v).unwrap();
                let [dq, dk, dv] = call.backward(qkv, (&o, &lse), &ins[3]).unwrap();
                let bias = rule.bias.then(|| call.bias_backward(qkv, (&o, &lse), &ins[3]).unwrap());
                return [o, lse, dq, dk, dv].into_iter().chain(bias).collect();
            }
            let call = CudaAttention { rule, operands, ..CudaAttention::causal("attention", q_start, 0.4) };
            let (o, lse) = call.forward(q, k, v).unwrap();
            let [dq, dk, dv] = call.backward(qkv, (&o, &lse), &ins[3]).unwrap();
            let bias = rule.bias.then(|| call.bias_backward(qkv, (&o, &lse), &ins[3]).unwrap());
            [o, lse, dq, dk, dv].into_iter().chain(bias).collect()
        };
        let (want, got) = (of(&here), of(&there));
        for (name, (got, want)) in ["o", "lse", "dq", "dk", "dv", "dbias"].iter().zip(got.iter().zip(&want)) {
            assert_eq!((got.dtype(), got.shape()), (want.dtype(), want.shape()), "{name} of {self:?}");
            let bits = |x: &Tensor| -> Vec<u64> {
                let values = x.to_device(Device::Cpu).unwrap().to_f64_vec();
                values.iter().map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() }).collect()
            };
            let (got, want) = (bits(got), bits(want));
            let wrong = (0..want.len()).find(|&i| got[i] != want[i]);
            assert_eq!(wrong, None, "{name} of {self:?}: {:?}", wrong.map(|i| (got[i], want[i])));
        }
    }
}

const PLAIN: MaskCase = MaskCase {
    dtype: DType::F32,
    heads: [2, 2],
    len: [70, 70],
    q_start: 0,
    d: 5,
    rule: ScoreRule::BIDIRECTIONAL,
    repeats: 0,
    special: None,
};

#[test]
fn windows_and_lengths() {
    let Some(device) = shim::device() else { return };
    for (i, len) in [[1, 1], [33, 33], [70, 70], [3, 200], [150, 40], [129, 300]].into_iter().enumerate() {
        for (j, (before, after)) in
            [(None, None), (Some(0), Some(0)), (Some(40), Some(3)), (Some(100), None), (None, Some(70))]
                .into_iter()
                .enumerate()
        {
            let rule = ScoreRule { before, after, ..ScoreRule::BIDIRECTIONAL };
            let dtype = [DType::F32, DType::F64, DType::F16, DType::BF16][(i + j) % 4];
            let q_start = if len[1] > 100 { 97 } else { 0 };
            MaskCase { dtype, len, q_start, rule, heads: [3 - j % 3, 1], ..PLAIN }.check(device);
        }
    }
}

#[test]
fn bias_mask_documents_and_soft_cap() {
    let Some(device) = shim::device() else { return };
    for case in 0..16 {
        let bit = |i: usize| case >> i & 1 == 1;
        let soft_cap = bit(3).then_some(Bits(0.5));
        let rule =
            ScoreRule { bias: bit(0), mask: bit(1), documents: bit(2), soft_cap, ..ScoreRule::BIDIRECTIONAL };
        for (rule, dtype, d) in [
            (rule, DType::F32, 5),
            (ScoreRule { after: Some(0), ..rule }, DType::F64, 7),
            (ScoreRule { before: Some(50), ..rule }, DType::BF16, 70),
        ] {
            MaskCase { dtype, d, rule, len: [67, 100], q_start: 20, ..PLAIN }.check(device);
        }
    }
}

#[test]
fn operands_repeat_along_any_dims() {
    let Some(device) = shim::device() else { return };
    let rule = ScoreRule { bias: true, mask: true, ..ScoreRule::CAUSAL };
    for repeats in 0..16 {
        // f16 has its bias read as it is, and vectors of more than 128 elements are read in chunks.
        let (dtype, d) = ([DType::F32, DType::F16][repeats % 2], if repeats == 6 { 130 } else { 5 });
        MaskCase { rule, repeats, dtype, d, heads: [3, 1], len: [66, 70], ..PLAIN }.check(device);
    }
}

/// A key that is left out is not multiplied by an infinity or a NaN.
#[test]
fn special_values_that_some_queries_see() {
    let Some(device) = shim::device() else { return };
    for special in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
        let mask = ScoreRule { mask: true, before: Some(9), ..ScoreRule::BIDIRECTIONAL };
        for rule in [ScoreRule::CAUSAL, mask, ScoreRule::BIDIRECTIONAL] {
            let d = if rule == mask { 5 } else { 66 };
            MaskCase { rule, d, special: Some(special), ..PLAIN }.check(device);
        }
    }
}
