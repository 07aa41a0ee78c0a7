//! Fast attention on matrix units: its error is within a bound that follows from rounding probabilities, their
//! gradients and results to the storage type, and its bits are the same in every order of threads.

use crate::common::{SplitMix, shim};
use isoshard::ops::cuda::{CudaAttention, CudaAttentionDropout};
use isoshard::rng::{self, Draw};
use isoshard::tensor::{DType, Device, Tensor, cpu};

const DRAW: Draw = Draw { seed: 11, number: 2 };

#[derive(Clone, Copy, Debug)]
struct Case {
    dtype: DType,
    heads: usize,
    groups: usize,
    queries: usize,
    keys: usize,
    d: usize,
    dv: usize,
    q_start: usize,
    p: f64,
    /// A view in which heads are neighbours in memory.
    transposed: bool,
}

const PLAIN: Case = Case {
    dtype: DType::BF16,
    heads: 1,
    groups: 1,
    queries: 1,
    keys: 1,
    d: 16,
    dv: 16,
    q_start: 0,
    p: 0.0,
    transposed: false,
};

/// One or several matrices in f64.
#[derive(Clone)]
struct Rows {
    data: Vec<f64>,
    len: usize,
    d: usize,
}

impl Rows {
    fn zeros(heads: usize, len: usize, d: usize) -> Rows {
        Rows { data: vec![0.0; heads * len * d], len, d }
    }

    fn row(&self, head: usize, i: usize) -> &[f64] {
        &self.data[(head * self.len + i) * self.d..][..self.d]
    }

    fn row_mut(&mut self, head: usize, i: usize) -> &mut [f64] {
        &mut self.data[(head * self.len + i) * self.d..][..self.d]
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn dot_abs(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum()
}

fn add(to: &mut [f64], by: f64, from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(t, f)| *t += by * f);
}

fn add_abs(to: &mut [f64], by: f64, from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(t, f)| *t += by * f.abs());
}

impl Case {
    fn scale(&self) -> f64 {
        (self.d as f64).powf(-0.5)
    }

    /// Returns q, k, v and the gradient of o.
    fn operands(&self) -> [Tensor; 4] {
        let Case { heads, groups, queries, keys, d, dv, .. } = *self;
        [(heads, queries, d), (groups, keys, d), (groups, keys, dv), (heads, queries, dv)].map(
            |(h, len, d)| {
                let mut stream = SplitMix((h * 31 + len * 7 + d) as u64);
                let mut unit = || (stream.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
                let shape = if self.transposed { [1, len, h, d] } else { [1, h, len, d] };
                let values: Vec<f64> =
                    (0..h * len * d).map(|_| (unit() + unit() + unit() + unit() - 2.0) * 1.7).collect();
                let x = cpu::cast(&Tensor::from_vec(values, shape).unwrap(), self.dtype).unwrap();
                if self.transposed { x.transpose(1, 2).unwrap() } else { x }
            },
        )
    }

    fn call(&self) -> CudaAttention<'static> {
        let [_, _, low, high] = DRAW.counter(0, 0);
        let dropout = (self.p > 0.0).then_some(CudaAttentionDropout {
            key: DRAW.key(),
            high: u64::from(low) | u64::from(high) << 32,
            threshold: rng::keep_threshold("", self.p).unwrap(),
            everything: false,
            scale: 1.0 / (1.0 - self.p),
            extents: [self.heads, self.q_start + self.queries, self.keys],
            start: [0, 0, self.q_start],
        });
        let (q_start, scale) = (self.q_start, self.scale());
        CudaAttention { dropout, exact: false, ..CudaAttention::causal("attention", q_start, scale) }
    }

    fn on(&self, device: Device, ins: &[Tensor; 4]) -> [Tensor; 5] {
        // Copied to the device with their strides.
        let moved = ins.each_ref().map(|x| {
            let transposed = if self.transposed { x.transpose(1, 2).unwrap() } else { x.clone() };
            let there = transposed.to_device(device).unwrap();
            if self.transposed { there.transpose(1, 2).unwrap() } else { there }
        });
        let [q, k, v, grad] = &moved;
        let (o, lse) = self.call().forward(q, k, v).unwrap();
        let [dq, dk, dv] = self.call().backward([q, k, v], (&o, &lse), grad).unwrap();
        [o, lse, dq, dk, dv]
    }

    /// Returns o, lse, dq, dk and dv, each with its error bound.
    fn definition(&self, ins: &[Tensor; 4]) -> [(Rows, Rows); 5] {
        let Case { heads, groups, queries, keys, d, dv, q_start, p, dtype, .. } = *self;
        // The rounding errors of the storage type: relative, and absolute for subnormal numbers.
        let (eps, tiny) = if dtype == DType::BF16 { (1.0 / 256.0, 1e-30) } else { (1.0 / 1024.0, 6e-8) };
        let rows = |x: &Tensor| Rows { data: x.to_f64_vec(), len: x.shape()[2], d: x.shape()[3] };
        let [q, k, v, g] = ins.each_ref().map(rows);
        let new = |heads, len, d| (Rows::zeros(heads, len, d), Rows::zeros(heads, len, d));
        let (mut o, mut lse) = (new(heads, queries, dv), new(heads, queries, 1));
        let (mut dq, mut dk, mut dvs) = (new(heads, queries, d), new(groups, keys, d), new(groups, keys, dv));
        for (h, i) in (0..heads).flat_map(|h| (0..queries).map(move |i| (h, i))) {
            let (group, seen, scale) = (h / (heads / groups), (q_start + i + 1).min(keys), self.scale());
            let s: Vec<f64> = (0..seen).map(|j| scale * dot(q.row(h, i), k.row(group, j))).collect();
            let max = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = s.iter().map(|s| (s - max).exp()).sum();
            lse.0.row_mut(h, i)[0] = max + sum.ln();
            lse.1.row_mut(h, i)[0] = 1e-4;
            let mut kept = vec![true; keys];
            if p > 0.0 {
                let at = (h * (q_start + queries) + q_start + i) * keys;
                rng::keep(DRAW, at as u64, p, &mut kept).unwrap();
            }
            let factor: Vec<f64> = kept.iter().map(|&k| if k { 1.0 / (1.0 - p) } else { 0.0 }).collect();
            let prob: Vec<f64> = s.iter().map(|s| (s - max).exp() / sum).collect();
            for j in 0..seen {
                add(o.0.row_mut(h, i), factor[j] * prob[j], v.row(group, j));
                add_abs(o.1.row_mut(h, i), factor[j] * (prob[j] * eps + tiny), v.row(group, j));
            }
            let (value, error) = (o.0.row(h, i).to_vec(), o.1.row_mut(h, i));
            add_abs(error, eps, &value);
            let (delta, delta_error) = (dot(&value, g.row(h, i)), dot_abs(error, g.row(h, i)));
            for j in 0..seen {
                let dp = factor[j] * dot(g.row(h, i), v.row(group, j));
                let ds = scale * prob[j] * (dp - delta);
                let small =
                    1e-5 * (factor[j] * dot_abs(g.row(h, i), v.row(group, j)) + dot_abs(&value, g.row(h, i)));
                let ds_error = eps * ds.abs() + scale * prob[j] * (delta_error + small) + tiny;
                add(dq.0.row_mut(h, i), ds, k.row(group, j));
                add_abs(dq.1.row_mut(h, i), ds_error, k.row(group, j));
                add(dk.0.row_mut(group, j), ds, q.row(h, i));
                add_abs(dk.1.row_mut(group, j), ds_error, q.row(h, i));
                add(dvs.0.row_mut(group, j), factor[j] * prob[j], g.row(h, i));
                add_abs(dvs.1.row_mut(group, j), factor[j] * (prob[j] * eps + tiny), g.row(h, i));
            }
        }
        for (value, error) in [&mut dq, &mut dk, &mut dvs] {
            add_abs(&mut error.data, eps, &value.data);
        }
        [o, lse, dq, dk, dvs]
    }

    fn check(&self, device: Device) {
        let ins = self.operands();
        let wants = self.definition(&ins);
        let names = ["o", "lse", "dq", "dk", "dv"];
        for ((name, got), (want, error)) in names.into_iter().zip(self.on(device, &ins)).zip(&wants) {
            let got = got.to_f64_vec();
            assert_eq!(got.len(), want.data.len(), "{name} of {self:?}");
            for (i, got) in got.iter().enumerate() {
                let (want, error) = (want.data[i], error.data[i] + 1e-6);
                assert!(
                    (got - want).abs() <= error,
                    "{name} of {self:?} at {i}: {got} for {want} within {error}"
                );
            }
        }
    }
}

/// Runs one case of two heads in one group on another device, forward and backward.
pub fn one_case(device: Device, dtype: DType, [queries, keys, d]: [usize; 3], p: f64) {
    let case = Case { dtype, queries, keys, d, dv: d, heads: 2, groups: 1, p, ..PLAIN };
    case.on(device, &case.operands());
}

#[test]
fn within_the_bound_at_every_size() {
    let Some(device) = shim::device() else { return };
    for (i, len) in [1, 7, 8, 33, 63, 64, 65, 127, 128, 129, 150].into_iter().enumerate() {
        let dtype = [DType::BF16, DType::F16][i % 2];
        Case { dtype, queries: len, keys: len, ..PLAIN }.check(device);
    }
    for (d, dv, dtype) in [
        (8, 32, DType::F16),
        (40, 64, DType::BF16),
        (64, 8, DType::F16),
        (96, 72, DType::BF16),
        (128, 104, DType::F16),
    ] {
        Case { dtype, d, dv, queries: 70, keys: 70, heads: 2, groups: 1, transposed: true, ..PLAIN }
            .check(device);
    }
}

#[test]
fn within_the_bound_with_cuts_groups_and_dropout() {
    let Some(device) = shim::device() else { return };
    for (queries, keys, q_start, p) in [
        (3, 67, 64, 0.25),
        (7, 40, 60, 0.0),
        (65, 200, 63, 0.5),
        (5, 3, 0, 0.25),
        (100, 40, 0, 0.25),
        (1, 133, 132, 0.1),
    ] {
        for dtype in [DType::BF16, DType::F16] {
            Case { dtype, queries, keys, q_start, p, heads: 4, groups: 2, ..PLAIN }.check(device);
        }
    }
    Case { queries: 66, keys: 68, p: 0.25, d: 72, dv: 72, transposed: true, ..PLAIN }.check(device);
}

#[test]
fn the_same_in_every_order_of_threads_and_not_the_exact_bits() {
    let Some(device) = shim::device() else { return };
    let case = Case { queries: 140, keys: 140, d: 32, dv: 32, p: 0.25, heads: 2, ..PLAIN };
    let ins = case.operands();
    let bytes = |x: &[Tensor; 5]| {
        x.each_ref()
            .map(|x| x.to_device(Device::Cpu).unwrap().contiguous().unwrap().as_bytes().unwrap().to_vec())
    };
    let want = bytes(&case.on(device, &ins));
    for order in [shim::Order::Descending, shim::Order::Shuffled(5)] {
        assert!(shim::with_order(order, || bytes(&case.on(device, &ins))) == want, "{order:?}");
    }
    let there = ins.each_ref().map(|x| x.to_device(device).unwrap());
    let exact = CudaAttention { exact: true, ..case.call() };
    let (o, _) = exact.forward(&there[0], &there[1], &there[2]).unwrap();
    assert!(
        o.to_device(Device::Cpu).unwrap().contiguous().unwrap().as_bytes().unwrap() != want[0],
        "another kernel"
    );
}
