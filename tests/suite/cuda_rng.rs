//! Random numbers on a CUDA device have the CPU's bits: every distribution, dtype and initialisation, for any window
//! of a rank; operators with a parameter per element; faults that kernels report of invalid parameters.

use half::f16;
use isoshard::ops::{
    Bernoulli, Bits, Dropout, Exponential, Gamma, Multinomial, Op, Poisson, Shuffle, Unkeyed, Window, Windows,
};
use isoshard::placement::{Mesh, Region, Spec};
use isoshard::rng::{Distribution, Draw, Generator, Init, Permutation};
use isoshard::tensor::{DType, Device, Shape, Tensor};

use crate::common::{shim, tensor};

const DRAW: Draw = Draw { seed: 0x0123_4567_89ab_cdef, number: 5 };
/// A draw number above 48 bits is part of the key.
const FAR: Draw = Draw { seed: 3, number: (7 << 48) | 9 };

const DISTRIBUTIONS: [Distribution; 25] = [
    Distribution::UNIT,
    Distribution::Uniform { low: -3.0, high: 0.7 },
    Distribution::STANDARD,
    Distribution::Normal { mean: 1.0, std: 1e-3 },
    Distribution::TruncatedNormal { mean: 0.5, std: 2.0, low: 0.0, high: 1.0 },
    Distribution::TruncatedNormal { mean: 0.0, std: 1.0, low: -2.0, high: 2.0 },
    // By another method: tails on both sides, and an interval that is narrow.
    Distribution::TruncatedNormal { mean: 0.5, std: 2.0, low: 5.0, high: f64::INFINITY },
    Distribution::TruncatedNormal { mean: 0.0, std: 1.0, low: -4.0, high: -2.0 },
    Distribution::TruncatedNormal { mean: 0.0, std: 1.0, low: -0.05, high: 0.1 },
    Distribution::LogNormal { mean: -0.5, std: 0.7 },
    Distribution::Exponential { rate: 1.5 },
    Distribution::Gamma { shape: 0.4, scale: 2.0 },
    Distribution::Gamma { shape: 3.0, scale: 0.5 },
    Distribution::Poisson { rate: 0.0 },
    Distribution::Poisson { rate: 2.5 },
    Distribution::Poisson { rate: 40.0 },
    Distribution::Poisson { rate: 1e12 },
    Distribution::UniformInt { low: 7, high: 213 },
    // Half of the words are rejected, and a quarter of the pairs.
    Distribution::UniformInt { low: -1 << 30, high: (1 << 30) + 1 },
    Distribution::UniformInt { low: -3, high: 3 << 61 },
    Distribution::UniformInt { low: i64::MIN as i128, high: 1 << 63 },
    Distribution::Bernoulli { p: 0.3 },
    Distribution::Bernoulli { p: 0.0 },
    Distribution::Bernoulli { p: 1.0 },
    Distribution::Bits,
];

/// Layouts on the mesh a=2, b=3: replicated, rows, columns, runs of 4 and of odd lengths, several dims, ragged and
/// empty shards.
const SPECS: [&str; 14] = [
    "[37]@(a:R, b:R)",
    "[4, 256]@(a:S0, b:R)",
    "[5, 48]@(a:S1, b:S0)",
    "[7, 21]@(a:S1, b:R)",
    "[9, 5]@(a:S0, b:S1)",
    "[4, 6, 8]@(a:S2, b:S1)",
    "[3, 2, 5, 7]@(a:S3, b:S1)",
    "[3, 5, 7]@(a:S1, b:S1)",
    "[2, 3, 4]@(a:S0, b:S2)",
    "[5, 3, 7]@(a:RS(0..3; 32, 73), b:R)",
    "[6, 8]@(a:RS(0..2; 20, 28), b:R)",
    "[11, 3]@(a:R, b:RS(0..1; 2, 0, 9))",
    "[]@(a:R, b:R)",
    "[1, 4]@(a:S0, b:S1)",
];

fn has(from: Distribution, dtype: DType) -> bool {
    from.check(dtype).is_ok()
}

/// Returns the windows of the mesh's ranks for a spec of this dtype.
fn parts(dtype: DType, spec: &str) -> Vec<(Shape, Region)> {
    let mesh = Mesh::parse("a=2,b=3", 0).unwrap();
    let spec = Spec::parse(&format!("{dtype}{spec}"), &mesh).unwrap();
    let ranks = (0..6).map(|r| spec.region_at(&[r / 3, r % 3]));
    ranks.map(|region| (spec.shape.clone(), region)).collect()
}

/// Windows of tensors too large for any machine, at global indices above 2^32.
fn far_parts() -> Vec<(Shape, Region)> {
    let far = |shape: &[usize], start: &[usize], len: &[usize]| {
        (Shape::from(shape), Region::of_box(start.iter().copied().collect(), len.into()))
    };
    vec![
        far(&[1 << 40], &[(1 << 32) + 7], &[6]),
        far(&[1 << 40], &[(1 << 33) - 3], &[37]),
        far(&[1 << 21, 1 << 12, 5], &[1 << 20, 17, 1], &[3, 2, 3]),
    ]
}

fn bytes(x: &Tensor) -> Vec<u8> {
    x.to_device(Device::Cpu).unwrap().contiguous().unwrap().as_bytes().unwrap().to_vec()
}

/// Checks that `fill` writes the same values on both devices.
fn filled_alike(
    device: Device,
    dtype: DType,
    region: &Region,
    at: &str,
    fill: impl Fn(&Region, &mut Tensor) -> isoshard::Result<()>,
) {
    let mut want = Tensor::zeros(dtype, region.local.clone());
    fill(region, &mut want).unwrap();
    let mut got = Tensor::zeros_on(device, dtype, region.local.clone()).unwrap();
    fill(region, &mut got).unwrap_or_else(|e| panic!("{at}: {e}"));
    assert_eq!(got.device(), device);
    assert_eq!(bytes(&got), bytes(&want), "{at}: {got:?} for {want:?}");
}

#[test]
fn every_distribution_in_every_layout() {
    let Some(device) = shim::device() else { return };
    let mut cases = 0;
    for dtype in DType::ALL {
        let mut all: Vec<(Shape, Region)> = SPECS.iter().flat_map(|spec| parts(dtype, spec)).collect();
        all.extend(far_parts());
        for from in DISTRIBUTIONS.into_iter().filter(|&d| has(d, dtype)) {
            for (k, (shape, region)) in all.iter().enumerate() {
                let draw = if k % 7 == 0 { FAR } else { DRAW };
                let at = format!("{from:?} of {dtype}{shape}, {region:?}");
                filled_alike(device, dtype, region, &at, |region, local| {
                    from.fill_tensor(draw, shape, region, local)
                });
                cases += 1;
            }
        }
    }
    assert!(cases > 4000, "{cases}");
}

#[test]
fn long_fills_take_many_blocks() {
    let Some(device) = shim::device() else { return };
    let (shape, columns) =
        (Shape::from([1009, 331]), Region::of_box([0, 2].into_iter().collect(), [1009, 248].into()));
    for (region, from) in [(Region::whole(&shape), Distribution::STANDARD), (columns, Distribution::UNIT)] {
        for dtype in [DType::F32, DType::BF16] {
            filled_alike(device, dtype, &region, &format!("{from:?}"), |region, local| {
                from.fill_tensor(DRAW, &shape, region, local)
            });
        }
    }
}

#[test]
fn every_initial_value() {
    let Some(device) = shim::device() else { return };
    let inits = [
        Init::Zeros,
        Init::Ones,
        // f16 is rounded twice.
        Init::Constant(1.0 + 2f64.powi(-11) + 2f64.powi(-30)),
        Init::Uniform { low: -1.0, high: 2.0 },
        Init::TruncatedNormal { mean: 0.5, std: 2.0, low: 0.0, high: 1.0 },
        Init::XavierUniform { gain: 1.0 },
        Init::XavierNormal { gain: 2.0 },
        Init::KaimingUniform { gain: 1.0 },
        Init::KaimingNormal { gain: 1.0 },
        Init::Orthogonal { gain: 1.5 },
    ];
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        for spec in ["[9, 5]@(a:S0, b:S1)", "[4, 6, 8]@(a:S2, b:S1)", "[6, 8]@(a:RS(0..2; 20, 28), b:R)"] {
            for (shape, region) in parts(dtype, spec) {
                for init in inits {
                    let values = init.prepare(DRAW, &shape).unwrap();
                    let at = format!("{init:?} of {dtype}{spec}");
                    filled_alike(device, dtype, &region, &at, |region, local| {
                        values.fill_tensor(region, local)
                    });
                }
            }
        }
    }
    let values = Init::Ones.prepare(DRAW, &[2]).unwrap();
    let mut ints = Tensor::zeros_on(device, DType::I32, [2]).unwrap();
    assert!(values.fill_tensor(&Region::whole(&[2].into()), &mut ints).is_err());
}

#[test]
fn orders() {
    let Some(device) = shim::device() else { return };
    for (len, spec) in [(1, "[1]@(a:S0, b:R)"), (37, "[37]@(a:S0, b:S0)"), (1000, "[1000]@(a:R, b:S0)")] {
        let order = Permutation::new(DRAW, len);
        for (_, region) in parts(DType::I64, spec) {
            filled_alike(device, DType::I64, &region, spec, |region, local| order.fill_tensor(region, local));
        }
    }
    let mut short = Tensor::zeros_on(device, DType::I64, [4]).unwrap();
    assert!(Permutation::new(DRAW, 3).fill_tensor(&Region::whole(&[4].into()), &mut short).is_err());
}

#[test]
fn shared_storage_is_left_alone() {
    let Some(device) = shim::device() else { return };
    let (shape, mut x) = (Shape::from([5]), Tensor::zeros_on(device, DType::F32, [5]).unwrap());
    let kept = x.clone();
    Distribution::UNIT.fill_tensor(DRAW, &shape, &Region::whole(&shape), &mut x).unwrap();
    assert_eq!(kept.to_device(Device::Cpu).unwrap().to_vec::<f32>().unwrap(), [0.0; 5]);
    assert_ne!(bytes(&x), bytes(&kept));
}

/// Checks every line of the frozen streams that is a fill.
#[test]
fn the_golden_file() {
    let Some(device) = shim::device() else { return };
    let golden = include_str!("../golden/rng.txt");
    let mut lines = 0;
    let mut expect = |line: String| {
        assert!(golden.lines().any(|l| l == line), "{line}");
        lines += 1;
    };
    let hex = |x: &Tensor| {
        let width = x.dtype().size_bytes();
        let words = bytes(x);
        let words =
            words.chunks(width).map(|w| w.iter().rev().map(|b| format!("{b:02x}")).collect::<String>());
        words.collect::<Vec<_>>().join(" ")
    };
    for (place, start) in [("0", 0), ("2^32+7", (1 << 32) + 7)] {
        let (shape, region) =
            (Shape::from([1 << 40]), Region::of_box([start].into_iter().collect(), [6].into()));
        let drawn = |from: Distribution, dtype| {
            let mut out = Tensor::zeros_on(device, dtype, [6]).unwrap();
            from.fill_tensor(DRAW, &shape, &region, &mut out).unwrap();
            out
        };
        expect(format!("bits32 from {place}: {}", hex(&drawn(Distribution::Bits, DType::I32))));
        expect(format!("bits64 from {place}: {}", hex(&drawn(Distribution::Bits, DType::I64))));
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            for (name, from) in [
                ("uniform", Distribution::UNIT),
                ("normal", Distribution::STANDARD),
                ("truncated", Distribution::TruncatedNormal { mean: 0.5, std: 2.0, low: 0.0, high: 1.0 }),
                ("uniform of [-1, 2)", Distribution::Uniform { low: -1.0, high: 2.0 }),
                ("log-normal 0.5, 0.25", Distribution::LogNormal { mean: 0.5, std: 0.25 }),
                ("exponential 1.5", Distribution::Exponential { rate: 1.5 }),
                ("gamma 0.5, 1", Distribution::Gamma { shape: 0.5, scale: 1.0 }),
                ("gamma 2.5, 2", Distribution::Gamma { shape: 2.5, scale: 2.0 }),
                ("poisson 3.5", Distribution::Poisson { rate: 3.5 }),
                ("poisson 50", Distribution::Poisson { rate: 50.0 }),
            ] {
                expect(format!("{name} {dtype} from {place}: {}", hex(&drawn(from, dtype))));
            }
            let square = Shape::from([1 << 20, 1 << 20]);
            let row = Region::of_box([start >> 20, start % (1 << 20)].into_iter().collect(), [1, 6].into());
            let mut out = Tensor::zeros_on(device, dtype, [1, 6]).unwrap();
            let kaiming = Init::KaimingUniform { gain: 1.0 }.prepare(DRAW, &square).unwrap();
            kaiming.fill_tensor(&row, &mut out).unwrap();
            expect(format!("kaiming {dtype} from {place}: {}", hex(&out)));
            let at = Window { global: shape.clone(), region: region.clone() };
            let x = Tensor::full(dtype, [6], 1.1).to_device(device).unwrap();
            let op = Dropout { p: Bits(0.4), draw: Unkeyed(DRAW) };
            let y = op.cuda(&mut [x], &windows(at.clone(), at)).unwrap();
            expect(format!("dropout {dtype} from {place}: {}", hex(&y[0])));
        }
        let text = |x: Tensor| {
            let values = x.to_device(Device::Cpu).unwrap().to_vec::<i64>().unwrap();
            values.iter().map(i64::to_string).collect::<Vec<_>>().join(" ")
        };
        for (low, high) in [(-5, 10), (0, 3i128 << 30), (-(1 << 62), 1 << 61)] {
            let values = text(drawn(Distribution::UniformInt { low, high }, DType::I64));
            expect(format!("integers of {low} to below {high} from {place}: {values}"));
        }
        let counts = text(drawn(Distribution::Poisson { rate: 1e9 }, DType::I64));
        expect(format!("poisson 10^9 i64 from {place}: {counts}"));
    }
    assert_eq!(lines, 2 * (2 + 4 * 12 + 4));
}

fn windows(ins: Window, outs: Window) -> Windows {
    Windows { ins: [ins].into_iter().collect(), outs: [outs].into_iter().collect(), exact: true }
}

/// Checks that `op` gives the same on both devices, for an operand and for a view that starts at an odd element.
fn drawn_alike(device: Device, op: &dyn Op, x: &Tensor, at: &Windows) {
    let want = op.eval(&mut [x.clone()], at).unwrap();
    let whole = x.to_device(device).unwrap();
    let got = op.cuda(&mut [whole], at).unwrap();
    assert_eq!(got[0].shape(), want[0].shape());
    assert_eq!(bytes(&got[0]), bytes(&want[0]), "{op:?} of {x:?}, {at:?}");
    if x.shape().len() != 1 {
        return;
    }
    let len = x.numel();
    let padded: Vec<f64> = std::iter::once(0.0).chain(x.to_f64_vec()).collect();
    let view = tensor(x.dtype(), &padded, &[len + 1].into()).to_device(device).unwrap();
    let got = op.cuda(&mut [view.narrow(0, 1, len).unwrap()], at).unwrap();
    assert_eq!(bytes(&got[0]), bytes(&want[0]), "{op:?} of an odd view of {x:?}");
}

/// Parameters as `f` of the element's position, exact in all types except f16 and bf16, which round them.
fn values(dtype: DType, shape: &Shape, f: impl Fn(usize) -> f64) -> Tensor {
    tensor(dtype, &(0..shape.numel()).map(f).collect::<Vec<_>>(), shape)
}

#[test]
fn operators_with_a_parameter_for_each_element() {
    let Some(device) = shim::device() else { return };
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let mut all: Vec<(Shape, Region)> = SPECS.iter().flat_map(|spec| parts(dtype, spec)).collect();
        all.extend(far_parts());
        for (global, region) in all {
            let at = Window { global, region };
            let (local, at) = (at.local().clone(), windows(at.clone(), at));
            let draw = Unkeyed(DRAW);
            let signed = values(dtype, &local, |i| (i as f64 - 3.5) * 10f64.powi(i as i32 % 5 - 2));
            for p in [0.0, 0.1, 0.5, 1.0 - 1e-12, 1.0] {
                drawn_alike(device, &Dropout { p: Bits(p), draw }, &signed, &at);
            }
            let unit = values(dtype, &local, |i| (i % 9) as f64 / 8.0);
            drawn_alike(device, &Bernoulli { draw }, &unit, &at);
            let positive = values(dtype, &local, |i| [0.125, 0.75, 1.0, 3.5, 60.0][i % 5]);
            drawn_alike(device, &Exponential { draw }, &positive, &at);
            drawn_alike(device, &Gamma { draw }, &positive, &at);
            let rates = values(dtype, &local, |i| [0.0, 0.5, 9.875, 10.0, 200.0, 30000.0][i % 6]);
            for dtype in [DType::I64, DType::I32, DType::F32, DType::F64, DType::F16, DType::BF16] {
                drawn_alike(device, &Poisson { dtype, draw }, &rates, &at);
            }
        }
    }
}

#[test]
fn counts_saturate() {
    let Some(device) = shim::device() else { return };
    let x = Tensor::from_vec(vec![2f64.powi(31), 2f64.powi(50), 2f64.powi(31) - 2.0, 1e9], [4]).unwrap();
    let at = Window::whole(x.shape());
    let op = Poisson { dtype: DType::I32, draw: Unkeyed(DRAW) };
    drawn_alike(device, &op, &x, &windows(at.clone(), at));
}

#[test]
fn categories() {
    let Some(device) = shim::device() else { return };
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        for (k, samples, replacement) in [
            (1, 1, true),
            (1, 1, false),
            (7, 5, true),
            (7, 5, false),
            (33, 70, true),
            (37, 37, false),
            (300, 1, true),
            (300, 11, false),
            (9, 0, true),
        ] {
            let spec = format!("[5, 2, {k}]@(a:S0, b:S1)");
            let drawn = format!("[5, 2, {samples}]@(a:S0, b:S1)");
            for ((shape, region), (of, drawn)) in
                parts(dtype, &spec).into_iter().zip(parts(DType::I64, &drawn))
            {
                let ins = Window { global: shape, region };
                // Some zeros, equal weights, and only positive weights if every category is drawn.
                let zero = if samples == k { 1.0 } else { 0.0 };
                let weights = values(dtype, ins.local(), |i| [1.0, zero, 0.25, 3.0, 1.0][i % 5]);
                let at = windows(ins, Window { global: of, region: drawn });
                drawn_alike(device, &Multinomial { samples, replacement, draw: Unkeyed(FAR) }, &weights, &at);
            }
        }
    }
    let golden = include_str!("../golden/rng.txt");
    let weights: Vec<f32> = (0..14).map(|i| ((i * 5) % 11) as f32).collect();
    let weights = Tensor::from_vec(weights, [2, 7]).unwrap().to_device(device).unwrap();
    for (name, replacement) in [("multinomial", true), ("multinomial without replacement", false)] {
        let op = Multinomial { samples: 5, replacement, draw: Unkeyed(DRAW) };
        let drawn = isoshard::ops::eval_whole(&op, std::slice::from_ref(&weights)).unwrap();
        let drawn = drawn[0].to_device(Device::Cpu).unwrap().to_vec::<i64>().unwrap();
        let line = drawn.iter().map(i64::to_string).collect::<Vec<_>>().join(" ");
        assert!(golden.lines().any(|l| l == format!("{name}: {line}")), "{name}: {line}");
    }
}

#[test]
fn shuffles_move_every_width_untouched() {
    let Some(device) = shim::device() else { return };
    for dtype in DType::ALL {
        for (shape, dim) in [
            (&[7, 3][..], 0),
            (&[3, 5], 1),
            (&[2, 7, 3], 1),
            (&[3, 11, 16], 1),
            (&[5, 2, 4], 0),
            (&[0, 3], 0),
            (&[23], 0),
        ] {
            let x = values(dtype, &shape.into(), |i| (i % 120) as f64);
            let at = Window::whole(x.shape());
            for inverse in [false, true] {
                let op = Shuffle { dim, inverse, draw: Unkeyed(DRAW) };
                drawn_alike(device, &op, &x, &windows(at.clone(), at.clone()));
            }
        }
    }
}

#[test]
fn what_breaks_a_rule_is_named_at_the_next_read() {
    let Some(device) = shim::device() else { return };
    let draw = Unkeyed(Generator::new(3).next_draw());
    let said = |op: &dyn Op, x: &[f32], shape: &[usize]| {
        let x = Tensor::from_vec(x.to_vec(), shape).unwrap().to_device(device).unwrap();
        let y = isoshard::ops::eval_whole(op, &[x]).unwrap();
        y[0].to_device(Device::Cpu).unwrap_err().to_string()
    };
    assert_eq!(
        said(&Bernoulli { draw }, &[0.5, 1.5], &[2]),
        "bernoulli: a probability lies in [0, 1]; got 1.5 for element 1"
    );
    assert_eq!(
        said(&Exponential { draw }, &[0.5, 1.0, f32::NAN], &[3]),
        "exponential: a rate is positive and finite; got NaN for element 2"
    );
    assert_eq!(
        said(&Gamma { draw }, &[0.5, -2.0, 1.0], &[3]),
        "gamma: a shape is positive and finite; got -2 for element 1"
    );
    assert_eq!(
        said(&Poisson { dtype: DType::I64, draw }, &[1.0, -1.0], &[2]),
        "poisson: a rate lies between 0 and 2^50; got -1 for element 1"
    );
    for replacement in [true, false] {
        let op = Multinomial { samples: 1, replacement, draw };
        assert_eq!(
            said(&op, &[1.0, 2.0, 3.0, 1.0, -1.0, 1.0], &[2, 3]),
            "multinomial: weights are finite and not negative; got -1 for element 4"
        );
    }
    assert_eq!(
        said(&Multinomial { samples: 1, replacement: true, draw }, &[1.0, 2.0, 0.0, 0.0], &[2, 2]),
        "multinomial: a row's weights have a positive, finite sum; got 0 for row 1"
    );
    assert_eq!(
        said(&Multinomial { samples: 2, replacement: false, draw }, &[1.0, 2.0, 1.0, 0.0], &[2, 2]),
        "multinomial: without replacement a row has as many positive weights as samples; got 1 for row 1"
    );
    // A fault is reported once: later reads succeed.
    let x = Tensor::zeros_on(device, DType::F16, [3]).unwrap();
    assert_eq!(x.to_device(Device::Cpu).unwrap().to_vec::<f16>().unwrap(), [f16::ZERO; 3]);
}
