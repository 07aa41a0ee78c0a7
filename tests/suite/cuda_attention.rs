//! Attention and rotary embedding on a device have the CPU's bits: at sizes around those of the tiles, for every
//! dtype, grouped heads, queries with any offset, dropout, and operands with any strides.

use crate::common::{SplitMix, shim};
use half::{bf16, f16};
use isoshard::ops::{
    Attention, AttentionGrad, Bits, Rotary, RotaryApply, RotaryPairing, RotaryTable, ScoreRule, Unkeyed,
    eval_whole,
};
use isoshard::ops::{cpu, cuda};
use isoshard::rng::{self, Draw, Generator};
use isoshard::tensor::cpu::cast;
use isoshard::tensor::{DType, Device, Shape, Tensor};

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// Normals times powers of ten, whose sum differs by the order of summation.
fn noise(shape: impl Into<Shape>, dtype: DType, seed: u64) -> Tensor {
    let shape = shape.into();
    let mut stream = SplitMix(seed.wrapping_mul(0x9e37_79b9) + 1);
    let mut unit = || (stream.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
    let value = |_| {
        let normal = (-2.0 * (1.0 - unit()).ln()).sqrt() * (std::f64::consts::TAU * unit()).cos();
        normal * [1.0, 1.0, 1.0, 0.1, 10.0][(unit() * 5.0) as usize]
    };
    let values: Vec<f64> = (0..shape.numel()).map(value).collect();
    cast(&Tensor::from_vec(values, shape).unwrap(), dtype).unwrap()
}

/// The bits of every element, with one NaN for all.
fn bits(x: &Tensor) -> Vec<u64> {
    let x = x.to_device(Device::Cpu).unwrap();
    let nan = |is_nan: bool, bits: u64| if is_nan { u64::MAX } else { bits };
    match x.dtype() {
        DType::F32 => {
            x.to_vec::<f32>().unwrap().iter().map(|x| nan(x.is_nan(), x.to_bits().into())).collect()
        }
        DType::F64 => x.to_vec::<f64>().unwrap().iter().map(|x| nan(x.is_nan(), x.to_bits())).collect(),
        DType::F16 => {
            x.to_vec::<f16>().unwrap().iter().map(|x| nan(x.is_nan(), x.to_bits().into())).collect()
        }
        _ => x.to_vec::<bf16>().unwrap().iter().map(|x| nan(x.is_nan(), x.to_bits().into())).collect(),
    }
}

fn expect_same(got: &Tensor, want: &Tensor, what: &str) {
    assert_eq!((got.dtype(), got.shape()), (want.dtype(), want.shape()), "{what}");
    let (got, want) = (bits(got), bits(want));
    let wrong: Vec<usize> = (0..want.len()).filter(|&i| got[i] != want[i]).collect();
    if let Some(&i) = wrong.first() {
        let (len, got, want) = (want.len(), got[i], want[i]);
        panic!("{what}: {} of {len} differ, the first at {i}: {got:x} for {want:x}", wrong.len());
    }
}

/// One call, whose queries start at `q_start` of a longer sequence.
#[derive(Clone, Copy, Debug)]
struct Case {
    dtype: DType,
    batch: usize,
    heads: usize,
    groups: usize,
    queries: usize,
    keys: usize,
    d: usize,
    dv: usize,
    q_start: usize,
    p: f64,
    /// A view in which heads are neighbours in memory, as projections produce them, and rows are padded.
    transposed: bool,
}

const PLAIN: Case = Case {
    dtype: DType::F32,
    batch: 1,
    heads: 1,
    groups: 1,
    queries: 1,
    keys: 1,
    d: 8,
    dv: 8,
    q_start: 0,
    p: 0.0,
    transposed: false,
};

const DRAW: Draw = Draw { seed: 7, number: 3 };

impl Case {
    fn operand(&self, device: Device, heads: usize, len: usize, d: usize, seed: u64) -> Tensor {
        if !self.transposed {
            return noise([self.batch, heads, len, d], self.dtype, seed).to_device(device).unwrap();
        }
        let wide = noise([self.batch, len, heads, d + 3], self.dtype, seed).to_device(device).unwrap();
        wide.narrow(3, 1, d).unwrap().transpose(1, 2).unwrap()
    }

    /// Returns q, k, v and the gradient of o.
    fn operands(&self, device: Device) -> [Tensor; 4] {
        let Case { heads, groups, queries, keys, d, dv, .. } = *self;
        [(heads, queries, d), (groups, keys, d), (groups, keys, dv), (heads, queries, dv)]
            .map(|(heads, len, d)| self.operand(device, heads, len, d, (d + len) as u64))
    }

    /// Checks that the results on the CPU and on the device are equal: o, lse, and the gradients of q, k and v.
    fn check(&self, device: Device) {
        let Case { heads, queries, keys, d, q_start, p, .. } = *self;
        let verb = "attention";
        // The global tensor has one more batch and head, and more queries.
        let extents = [heads + 1, q_start + queries + 2, keys];
        let keep = |[b, h, i]: [usize; 3], j: usize, out: &mut [bool]| {
            let row = ((b + 1) * extents[0] + h + 1) * extents[1] + q_start + i;
            rng::keep(DRAW, (row * keys + j) as u64, p, out).unwrap();
        };
        let scale = (d as f64).max(1.0).powf(-0.5);
        let factor = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
        let dropout = (p > 0.0).then_some(cpu::CpuAttentionDropout { scale: factor, keep: &keep });
        let [q, k, v, grad] = self.operands(Device::Cpu);
        let call = cpu::CpuAttention { dropout, ..cpu::CpuAttention::causal(verb, q_start, scale) };
        let (o, lse) = call.forward(&q, &k, &v).unwrap();
        let [dq, dk, dv] = call.backward([&q, &k, &v], (&o, &lse), &grad).unwrap();

        let [_, _, low, high] = DRAW.counter(0, 0);
        let dropout = (p > 0.0).then_some(cuda::CudaAttentionDropout {
            key: DRAW.key(),
            high: u64::from(low) | u64::from(high) << 32,
            threshold: rng::keep_threshold("", p).unwrap(),
            everything: p == 1.0,
            scale: factor,
            extents,
            start: [1, 1, q_start],
        });
        let [q, k, v, grad] = self.operands(device);
        let call = cuda::CudaAttention { dropout, ..cuda::CudaAttention::causal(verb, q_start, scale) };
        let (go, glse) = call.forward(&q, &k, &v).unwrap();
        let [gq, gk, gv] = call.backward([&q, &k, &v], (&go, &glse), &grad).unwrap();
        assert!(go.transpose(1, 2).unwrap().is_contiguous(), "merging heads is free");
        for (name, got, want) in
            [("lse", glse, lse), ("o", go, o), ("dq", gq, dq), ("dk", gk, dk), ("dv", gv, dv)]
        {
            expect_same(&got, &want, &format!("{name} of {self:?}"));
        }
    }
}

/// Checks one case of two heads in one group on another device.
pub fn one_case(device: Device, dtype: DType, [queries, keys, d]: [usize; 3], p: f64) {
    Case { dtype, queries, keys, d, dv: d, heads: 2, groups: 1, p, ..PLAIN }.check(device);
}

#[test]
fn every_length_up_to_two_tiles() {
    let Some(device) = shim::device() else { return };
    for len in (1..=70).chain([97, 127, 128, 129]) {
        let dtype = DTYPES[len % 4];
        Case { dtype, queries: len, keys: len, heads: 2, groups: 1, ..PLAIN }.check(device);
    }
}

#[test]
fn every_dim_in_its_tree() {
    let Some(device) = shim::device() else { return };
    for (i, d) in [0, 1, 3, 8, 31, 32, 33, 50, 61, 64, 65, 80, 96, 100, 128].into_iter().enumerate() {
        for (j, dtype) in DTYPES.into_iter().enumerate() {
            let dv = [d, 1, 64, 33, 128][(i + j) % 5];
            Case { dtype, queries: 37, keys: 37, d, dv, ..PLAIN }.check(device);
        }
    }
    for (d, dv, dtype) in [
        (129, 129, DType::F32),
        (200, 8, DType::BF16),
        (8, 300, DType::F32),
        (530, 130, DType::F64),
        (1024, 1, DType::F32),
    ] {
        Case { dtype, queries: 35, keys: 35, heads: 2, groups: 1, d, dv, ..PLAIN }.check(device);
    }
}

#[test]
fn long_rows_follow_uneven_trees() {
    let Some(device) = shim::device() else { return };
    // Leaves of 24, of 17 and 16, and of 32; more work items than blocks.
    for (len, dtype, d) in [
        (192, DType::F32, 8),
        (330, DType::F16, 16),
        (513, DType::F32, 4),
        (256, DType::F64, 8),
        (2150, DType::F32, 1),
    ] {
        Case { dtype, queries: len, keys: len, d, dv: d, ..PLAIN }.check(device);
    }
    Case { batch: 3, heads: 4, groups: 2, queries: 130, keys: 130, ..PLAIN }.check(device);
}

#[test]
fn queries_start_anywhere_and_keys_end_anywhere() {
    let Some(device) = shim::device() else { return };
    for (queries, keys, q_start) in [
        (1, 67, 66),
        (3, 67, 64),
        (7, 40, 60),
        (2, 9, 3),
        (65, 200, 63),
        (70, 130, 60),
        (5, 3, 0),
        (100, 40, 0),
        (9, 20, 100),
        (1, 300, 299),
    ] {
        for dtype in [DType::F32, DType::F64] {
            Case { dtype, queries, keys, q_start, heads: 3, groups: 3, p: 0.25, ..PLAIN }.check(device);
        }
    }
}

#[test]
fn groups_dropout_and_strides() {
    let Some(device) = shim::device() else { return };
    for (i, (heads, groups)) in [(2, 2), (3, 1), (6, 2), (5, 1)].into_iter().enumerate() {
        for (j, p) in [0.0, 0.25, 1.0].into_iter().enumerate() {
            let (dtype, transposed) = (DTYPES[(i + j) % 4], j != 1);
            let d = [8, 12, 72][(i + 2 * j) % 3];
            Case { dtype, batch: 2, heads, groups, queries: 67, keys: 69, d, dv: d, p, transposed, ..PLAIN }
                .check(device);
        }
    }
}

#[test]
fn infinities_and_nothing() {
    let Some(device) = shim::device() else { return };
    let put = |x: &Tensor, at: usize, value: f32| {
        let mut x = x.to_owned_copy().unwrap();
        x.make_mut::<f32>().unwrap()[at] = value;
        x
    };
    let case = Case { queries: 40, keys: 40, ..PLAIN };
    let [q, k, v, grad] = case.operands(Device::Cpu);
    let call = cpu::CpuAttention::causal("attention", 0, 0.3);
    let there = cuda::CudaAttention::causal("attention", 0, 0.3);
    for (which, value) in
        [(0, f32::INFINITY), (1, f32::NEG_INFINITY), (2, f32::INFINITY), (2, f32::NAN), (3, f32::INFINITY)]
    {
        let mut ins = [q.clone(), k.clone(), v.clone(), grad.clone()];
        ins[which] = put(&ins[which], 8 * 21 + 3, value);
        let (o, lse) = call.forward(&ins[0], &ins[1], &ins[2]).unwrap();
        let wants = call.backward([&ins[0], &ins[1], &ins[2]], (&o, &lse), &ins[3]).unwrap();
        let ins = ins.map(|x| x.to_device(device).unwrap());
        let (go, glse) = there.forward(&ins[0], &ins[1], &ins[2]).unwrap();
        let gots = there.backward([&ins[0], &ins[1], &ins[2]], (&go, &glse), &ins[3]).unwrap();
        for (got, want) in [(&go, &o), (&glse, &lse)].into_iter().chain(gots.iter().zip(&wants)) {
            expect_same(got, want, &format!("operand {which} with {value}"));
        }
    }
    for (queries, keys) in [(0, 5), (5, 0), (0, 0)] {
        Case { queries, keys, heads: 2, groups: 2, ..PLAIN }.check(device);
    }
    Case { queries: 3, keys: 3, batch: 0, ..PLAIN }.check(device);
}

#[test]
fn threads_in_any_order() {
    let Some(device) = shim::device() else { return };
    for order in [shim::Order::Descending, shim::Order::Shuffled(1), shim::Order::Shuffled(2)] {
        shim::with_order(order, || {
            for (dtype, d) in [(DType::F32, 24), (DType::BF16, 80), (DType::F64, 70)] {
                let case = Case { dtype, heads: 2, queries: 150, keys: 150, d, dv: d, p: 0.25, ..PLAIN };
                case.check(device);
            }
        });
    }
}

#[test]
fn the_operators_run_where_their_operands_are() {
    let Some(device) = shim::device() else { return };
    let draw = Unkeyed(Generator::new(5).next_draw());
    let keys = [(19, None), (30, Some(9))];
    for (dtype, (keys, q_offset)) in DTYPES.into_iter().flat_map(|dtype| keys.map(|keys| (dtype, keys))) {
        let case = Case { dtype, batch: 2, heads: 4, groups: 2, queries: 19, keys, ..PLAIN };
        let [q, k, v, grad] = case.operands(Device::Cpu);
        let there = |x: &[&Tensor]| x.iter().map(|x| x.to_device(device).unwrap()).collect::<Vec<_>>();
        let op = Attention { scale: Bits(0.3), p: Bits(0.5), q_offset, draw, rule: ScoreRule::CAUSAL };
        let outs = eval_whole(&op, &[q.clone(), k.clone(), v.clone()]).unwrap();
        let gots = eval_whole(&op, &there(&[&q, &k, &v])).unwrap();
        let op = AttentionGrad { scale: Bits(0.3), p: Bits(0.5), q_offset, draw, rule: ScoreRule::CAUSAL };
        let ins = [&q, &k, &v, &outs[0], &outs[1], &grad];
        let grads = eval_whole(&op, &ins.map(Tensor::clone)).unwrap();
        let got_grads = eval_whole(&op, &there(&ins)).unwrap();
        for (got, want) in gots.iter().zip(&outs).chain(got_grads.iter().zip(&grads)) {
            expect_same(got, want, &format!("{op:?} in {dtype}"));
        }
    }
}

#[test]
fn long_heads_are_refused() {
    let Some(device) = shim::device() else { return };
    let case = Case { queries: 2, keys: 2, d: 1025, dv: 1, ..PLAIN };
    let [q, k, v, _] = case.operands(device);
    let call = cuda::CudaAttention::causal("attention", 0, 1.0);
    let text = call.forward(&q, &k, &v).unwrap_err().to_string();
    let rule = "attention: is not built for vectors of more than 1024 elements on a device";
    assert_eq!(text, format!("{rule}; got 1025; use Device::Cpu"));
}

#[test]
fn rotary_by_tables_has_the_cpus_bits() {
    let Some(device) = shim::device() else { return };
    for (i, shape) in
        [&[2usize, 3, 5, 64][..], &[7, 2], &[6], &[2, 0, 4], &[2, 2, 2, 2, 3, 10]].into_iter().enumerate()
    {
        for (dtype, table) in [(DType::F32, DType::F32), (DType::F64, DType::F64), (DType::BF16, DType::F32)]
        {
            let (&d, outer) = shape.split_last().unwrap();
            let count: usize = outer.iter().product();
            let positions = (0..count as i64).map(|p| p * 7919 - 5).collect();
            let positions = Tensor::from_vec(positions, outer).unwrap();
            let angles =
                Tensor::from_vec((0..d / 2).map(|k| 0.7f64.powi(k as i32)).collect(), [d / 2]).unwrap();
            let op = RotaryTable { dtype: table, scale: Bits(1.25) };
            let ins = [positions, angles];
            let want = eval_whole(&op, &ins).unwrap();
            let there = ins.clone().map(|t| t.to_device(device).unwrap());
            let got = eval_whole(&op, &there).unwrap();
            (0..2)
                .for_each(|k| expect_same(&got[k], &want[k], &format!("table {k} for {shape:?} in {table}")));
            let x = noise(shape, dtype, i as u64);
            for pairing in [RotaryPairing::Halves, RotaryPairing::Interleaved] {
                let op = RotaryApply { pairing, inverse: i % 2 == 1 };
                let want_y =
                    eval_whole(&op, &[x.clone(), want[0].clone(), want[1].clone()]).unwrap().remove(0);
                let x = x.to_device(device).unwrap();
                let last = shape.len() - 1;
                let turned = |x: &Tensor| {
                    x.transpose(0, last).unwrap().contiguous().unwrap().transpose(0, last).unwrap()
                };
                for x in [x.clone(), turned(&x)] {
                    let y = eval_whole(&op, &[x, got[0].clone(), turned(&got[1])]).unwrap().remove(0);
                    expect_same(&y, &want_y, &format!("{pairing:?} of {shape:?} in {dtype}"));
                }
            }
        }
    }
}

#[test]
fn rotary_turns_by_the_cpus_bits() {
    let Some(device) = shim::device() else { return };
    let op = |offset, inverse| Rotary { base: Bits(5e5), offset, inverse };
    for (i, shape) in [
        &[2, 3, 5, 64][..],
        &[3, 7, 2],
        &[5, 6],
        &[2, 0, 4],
        &[2, 3, 0],
        &[1, 1, 1, 32],
        &[2, 2, 2, 2, 3, 10],
        &[70, 4],
    ]
    .into_iter()
    .enumerate()
    {
        for dtype in DTYPES {
            let x = noise(shape, dtype, i as u64);
            let op = op(1000 * i, i % 2 == 1);
            let want = eval_whole(&op, std::slice::from_ref(&x)).unwrap().remove(0);
            let there = x.to_device(device).unwrap();
            let got = eval_whole(&op, std::slice::from_ref(&there)).unwrap().remove(0);
            expect_same(&got, &want, &format!("{shape:?} in {dtype}"));
            // The same elements in other layouts: heads inside, the last dim outside, a misaligned part.
            let (t, last) = (shape.len() - 2, shape.len() - 1);
            let heads =
                |x: &Tensor| x.transpose(0, t).unwrap().contiguous().unwrap().transpose(0, t).unwrap();
            let apart =
                |x: &Tensor| x.transpose(t, last).unwrap().contiguous().unwrap().transpose(t, last).unwrap();
            for transposed in [heads(&there), apart(&there)] {
                let got = eval_whole(&op, std::slice::from_ref(&transposed)).unwrap().remove(0);
                expect_same(&got, &want, &format!("{shape:?} transposed, in {dtype}"));
            }
            assert_eq!(
                eval_whole(&op, &[heads(&there)]).unwrap()[0].strides(),
                eval_whole(&op, &[heads(&x)]).unwrap()[0].strides()
            );
            if shape[last] > 4 {
                let part = |x: &Tensor| x.narrow(last, 1, 4).unwrap();
                let want = eval_whole(&op, &[part(&x)]).unwrap().remove(0);
                expect_same(&eval_whole(&op, &[part(&there)]).unwrap()[0], &want, "a misaligned part");
            }
        }
    }
}
