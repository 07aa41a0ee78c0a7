//! Random numbers in the interpreter of PTX: every distribution and the operators that draw per element or per row.

use isoshard::ops::*;
use isoshard::placement::Region;
use isoshard::rng::{Distribution, Draw, Permutation};
use isoshard::tensor::{DType, Device, Shape, Tensor};

use super::check;
use crate::common::tensor;
use crate::cuda_reduce::compare;

const DRAW: Draw = Draw { seed: 0x0123_4567_89ab_cdef, number: 5 };

/// Fills a tensor that is a part of a larger one, so that counters do not begin at 0.
fn filled(device: Device, from: Distribution, dtype: DType) {
    let region = Region::of_box([(1 << 32) + 7].into_iter().collect(), [701].into());
    let fill = |on: Device| {
        let mut out = Tensor::zeros_on(on, dtype, [701]).unwrap();
        from.fill_tensor(DRAW, &Shape::from([1 << 40]), &region, &mut out).unwrap();
        out.to_device(Device::Cpu).unwrap().as_bytes().unwrap().to_vec()
    };
    assert!(fill(device) == fill(Device::Cpu), "{from:?} in {dtype}");
}

#[test]
fn distributions() {
    check("distributions", &[], |device| {
        let all = [
            Distribution::Uniform { low: -3.0, high: 0.7 },
            Distribution::STANDARD,
            Distribution::TruncatedNormal { mean: 0.5, std: 2.0, low: 0.0, high: 1.0 },
            Distribution::TruncatedNormal { mean: 0.5, std: 2.0, low: 5.0, high: f64::INFINITY },
            Distribution::LogNormal { mean: -0.5, std: 0.7 },
            Distribution::Exponential { rate: 1.5 },
            Distribution::Gamma { shape: 0.4, scale: 2.0 },
            Distribution::Poisson { rate: 40.0 },
        ];
        for from in all {
            filled(device, from, DType::F32);
        }
        for dtype in [DType::BF16, DType::F16, DType::F64] {
            filled(device, Distribution::UNIT, dtype);
            filled(device, Distribution::STANDARD, dtype);
        }
        filled(device, Distribution::Bernoulli { p: 0.3 }, DType::Bool);
        filled(device, Distribution::UniformInt { low: -3, high: 3 << 61 }, DType::I64);
        filled(device, Distribution::Bits, DType::I32);
        let order = Permutation::new(DRAW, 1000);
        let orders = [device, Device::Cpu].map(|on| {
            let mut out = Tensor::zeros_on(on, DType::I64, [1000]).unwrap();
            order.fill_tensor(&Region::whole(&[1000].into()), &mut out).unwrap();
            out.to_device(Device::Cpu).unwrap().to_vec::<i64>().unwrap()
        });
        assert_eq!(orders[0], orders[1]);
    });
}

#[test]
fn operators_that_draw() {
    check("drawn", &[], |device| {
        let draw = Unkeyed(DRAW);
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            let values = |shape: &[usize], of: &[f64]| {
                let n = shape.iter().product::<usize>();
                tensor(dtype, &(0..n).map(|i| of[i % of.len()]).collect::<Vec<_>>(), &shape.into())
            };
            let signed = values(&[501], &[-3.5, 0.25, 1e3, -0.0]);
            compare(&Dropout { p: Bits(0.4), draw }, device, &[signed]);
            compare(&Bernoulli { draw }, device, &[values(&[301], &[0.0, 0.125, 0.75, 1.0])]);
            let positive = values(&[301], &[0.125, 0.75, 1.0, 3.5, 60.0]);
            compare(&Exponential { draw }, device, std::slice::from_ref(&positive));
            compare(&Gamma { draw }, device, &[positive]);
            let rates = values(&[301], &[0.0, 0.5, 9.875, 10.0, 200.0, 30000.0]);
            compare(&Poisson { dtype: DType::I64, draw }, device, &[rates]);
            for (k, samples, replacement) in [(33, 70, true), (300, 11, false)] {
                let weights = values(&[5, k], &[1.0, 0.0, 0.25, 3.0, 1.0]);
                compare(&Multinomial { samples, replacement, draw }, device, &[weights]);
            }
            let x = values(&[3, 11, 16], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
            compare(&Shuffle { dim: 1, inverse: false, draw }, device, &[x]);
        }
    });
}
