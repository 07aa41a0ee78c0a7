//! Tests of the table's operators: definitions, limits, and reuse of operands' buffers.

use super::*;
use crate::ops::{Meta, Op, Windows, eval_whole};
use crate::tensor::cpu::{self, Isa, Loops, with_isa};
use crate::tensor::{DType, Tensor};

/// Expected values are from tables of the normal distribution function, and from the formula with the standard
/// library's tanh.
#[test]
fn values_by_definition_and_limits() {
    let points = [f64::NEG_INFINITY, -3.0, -1.0, 0.0, 0.5, 2.0, f64::INFINITY, f64::NAN];
    let x = Tensor::from_vec(points.to_vec(), [8]).expect("eight");
    let at = |op: &dyn Op| eval_whole(op, std::slice::from_ref(&x)).expect("legal")[0].to_f64_vec();
    let erf = at(&Gelu);
    let want = [
        0.0,
        -0.004_049_694_094_890_285,
        -0.158_655_253_931_457_07,
        0.0,
        0.345_731_230_637_006_56,
        1.954_499_736_103_641_6,
    ];
    for (got, want) in erf.iter().zip(want) {
        assert!((got - want).abs() < 1e-14, "{got}, wanted {want}");
    }
    let tanh = at(&GeluTanh);
    for (got, x) in tanh[1..6].iter().zip(&points[1..6]) {
        let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        assert!((got - 0.5 * x * (1.0 + u.tanh())).abs() < 1e-15, "at {x}");
    }
    for y in [erf, tanh] {
        assert!(y[0] == 0.0 && y[6] == f64::INFINITY && y[7].is_nan());
    }
}

/// `1 - erf` in f32 would have no digit right at -5.5. Expected values are `x · erfc(-x / √2) / 2`, from mpmath.
#[test]
fn gelu_has_its_tail_in_f32() {
    let (points, want) = (
        vec![-1.0f32, -4.0, -5.5, -9.0, -13.5],
        [
            -0.158_655_253_931_457_05,
            -1.266_849_673_324_797e-4,
            -1.044_425_935_623_824_6e-7,
            -1.015_729_565_358_456_6e-18,
            0.0,
        ],
    );
    let x = Tensor::from_vec(points, [5]).expect("five");
    let got = eval_whole(&Gelu, &[x]).expect("legal")[0].to_f64_vec();
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() <= 1e-6 * f64::abs(want), "{got:e}, wanted {want:e}");
    }
}

#[test]
fn gelu_keeps_the_sign_of_zeros_and_of_results_that_underflow() {
    for dtype in [DType::F32, DType::F64] {
        let x = Tensor::from_vec(vec![0.0, -0.0, -50.0, f64::NEG_INFINITY], [4]).expect("four");
        let got = eval_whole(&Gelu, &[x.cast(dtype).expect("a float")]).expect("legal")[0].to_f64_vec();
        assert_eq!(
            got.iter().map(|y| y.to_bits()).collect::<Vec<_>>(),
            [0.0, -0.0, -0.0, -0.0].map(f64::to_bits)
        );
    }
}

/// The loops that go over a chunk several times compute what the formula does for each element.
#[test]
fn passes_change_no_bit() {
    let mut points: Vec<f32> = (0..=u32::MAX).step_by(20_011).map(f32::from_bits).collect();
    points.extend((-60_000..60_000).map(|i| i as f32 * 1e-4));
    points.extend([f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0, -0.0, f32::MAX, 1e-45, 1e4, -1e4]);
    let (x, len) = (Tensor::from_vec(points.clone(), [points.len()]).expect("a list"), points.len());
    let dy = Tensor::from_vec(points.iter().rev().copied().collect::<Vec<f32>>(), [len]).expect("a list");
    let bits = |loops: Loops, ins: &[&Tensor]| -> Vec<u32> {
        let mut ins: Vec<Tensor> = ins.iter().map(|&t| t.clone()).collect();
        let y = cpu::compute("gelu", &loops, [0.0; 2], &mut ins).expect("floats");
        // The payload of a NaN is not kept.
        let bits = |y: f32| if y.is_nan() { f32::NAN.to_bits() } else { y.to_bits() };
        y.to_vec::<f32>().expect("f32").into_iter().map(bits).collect()
    };
    for &isa in Isa::available() {
        with_isa(isa, || {
            assert_eq!(bits(Gelu::LOOPS, &[&x]), bits(Loops::floats::<Gelu, 1>(), &[&x]), "{isa:?}");
            let at_once = Loops::floats::<GeluGrad, 2>();
            assert_eq!(bits(GeluGrad::LOOPS, &[&dy, &x]), bits(at_once, &[&dy, &x]), "{isa:?}");
        });
    }
}

#[test]
fn the_derivative_of_gelu_has_its_limits() {
    let x = Tensor::from_vec(vec![f32::NEG_INFINITY, -2e4, 0.0, 2e4, f32::INFINITY], [5]).expect("five");
    let dy = Tensor::full(DType::F32, [5], 1.0);
    for op in [&GeluGrad as &dyn Op, &GeluTanhGrad] {
        let dx = eval_whole(op, &[dy.clone(), x.clone()]).expect("legal");
        assert_eq!(dx[0].to_f64_vec(), [0.0, 0.0, 0.5, 1.0, 1.0], "{op:?}");
    }
}

#[test]
fn silu_has_its_limits() {
    let x = Tensor::from_vec(vec![f64::NEG_INFINITY, -2.0, 0.0, f64::INFINITY, f64::NAN], [5]).expect("five");
    let y = eval_whole(&Silu, &[x]).expect("legal")[0].to_f64_vec();
    assert_eq!((y[0], y[2], y[3]), (0.0, 0.0, f64::INFINITY));
    assert!((y[1] + 2.0 / (1.0 + 2f64.exp())).abs() < 1e-15 && y[4].is_nan());
}

const POINTS: [f64; 19] = [
    -f64::INFINITY,
    -1e3,
    -3.0,
    -2.5,
    -2.0,
    -1.0,
    -0.5,
    -0.0,
    0.0,
    1e-9,
    0.3,
    0.5,
    1.0,
    1.7,
    2.0,
    3.0,
    1e3,
    f64::INFINITY,
    f64::NAN,
];

#[test]
fn agrees_with_the_standard_library_on_every_pair_of_awkward_numbers() {
    let pairs: Vec<(f64, f64)> = POINTS.iter().flat_map(|&x| POINTS.map(|y| (x, y))).collect();
    let column = |f: fn(&(f64, f64)) -> f64| {
        Tensor::from_vec(pairs.iter().map(f).collect::<Vec<f64>>(), [pairs.len()]).expect("as many")
    };
    let got = eval_whole(&Pow, &[column(|p| p.0), column(|p| p.1)]).expect("legal")[0].to_f64_vec();
    for (&(x, y), z) in pairs.iter().zip(got) {
        let want = x.powf(y);
        let close = (z - want).abs() <= want.abs() * 2e-13 || (z.is_nan() && want.is_nan());
        let same_sign = z.is_nan() || z.is_sign_negative() == want.is_sign_negative();
        assert!((z == want || close) && same_sign, "{x}^{y} = {z}, wanted {want}");
    }
}

#[test]
fn f32_is_rounded_from_f64() {
    let x = Tensor::from_vec(vec![1.1f32, 7.3, 0.02], [3]).expect("three");
    let y = Tensor::from_vec(vec![33.3f32, -2.2, 5.5], [3]).expect("three");
    let got = eval_whole(&Pow, &[x.clone(), y.clone()]).expect("legal")[0].to_vec::<f32>().expect("f32");
    let want: Vec<f32> = x.to_f64_vec().iter().zip(y.to_f64_vec()).map(|(x, y)| x.powf(y) as f32).collect();
    assert_eq!(got, want);
}

#[test]
fn zeros_have_gradients_without_nan() {
    let of = |v: [f64; 3]| Tensor::from_vec(v.to_vec(), [3]).expect("three");
    let (dz, x, y) = (of([1.0; 3]), of([0.0, 0.0, 2.0]), of([0.0, 3.0, 0.0]));
    let dx = eval_whole(&PowGradBase, &[dz.clone(), x.clone(), y.clone()]).expect("legal");
    assert_eq!(dx[0].to_f64_vec(), [0.0; 3]);
    let z = eval_whole(&Pow, &[x.clone(), y]).expect("legal");
    let dy = eval_whole(&PowGradExponent, &[dz, x, z[0].clone()]).expect("legal")[0].to_f64_vec();
    assert_eq!(dy[..2], [0.0; 2]);
    assert!((dy[2] - std::f64::consts::LN_2).abs() < 1e-15);
}

#[test]
fn every_path_agrees_with_the_standard_library() {
    let x = Tensor::from_vec(vec![0.25f32, 1.0, 2.7, 81.5], [4]).expect("four");
    for c in [-3.0, -1.0, -0.5, 0.0, 1.0 / 3.0, 0.5, 1.0, 2.0, 3.0, 4.0] {
        let got = eval_whole(&PowScalar::to(c), std::slice::from_ref(&x)).expect("legal")[0].to_f64_vec();
        for (x, y) in x.to_f64_vec().into_iter().zip(got) {
            let want = x.powf(c);
            assert!((y - want).abs() <= want * 2f64.powi(-22), "{x}^{c} = {y}, wanted {want}");
        }
    }
}

/// Computes `x - y`, and returns it with the number of the operand whose buffer holds the result. `own_x` and `own_y`
/// say whether the call is the only owner of an operand.
fn sub(own_x: bool, own_y: bool) -> (Vec<i32>, Option<usize>) {
    let mut ins = [[5, 7, -2], [3, 0, 9]].map(|v| Tensor::from_vec(v.to_vec(), [3]).expect("three elements"));
    let metas: Vec<Meta> = ins.iter().map(Meta::of).collect();
    let whole = Windows::whole(&metas, &metas[..1]);
    let places: Vec<*const i32> = ins.iter().map(|t| t.data::<i32>().expect("i32").as_ptr()).collect();
    let shared = [own_x, own_y].map(|own| !own);
    let _others: Vec<Tensor> = ins.iter().zip(shared).filter(|(_, s)| *s).map(|(t, _)| t.clone()).collect();
    let out = Sub.eval(&mut ins, &whole).expect("legal").swap_remove(0);
    let place = out.data::<i32>().expect("i32").as_ptr();
    (out.to_vec().expect("i32"), places.iter().position(|&p| p == place))
}

#[test]
fn the_result_lies_over_an_operand_that_nobody_else_holds() {
    let want = vec![2, 7, -11];
    assert_eq!(sub(true, true), (want.clone(), Some(0)));
    assert_eq!(sub(true, false), (want.clone(), Some(0)));
    assert_eq!(sub(false, true), (want.clone(), Some(1)));
    assert_eq!(sub(false, false), (want, None));
}

#[test]
fn one_tensor_as_both_operands_is_left_alone() {
    let x = Tensor::from_vec(vec![1.5f32, -2.0], [2]).expect("two elements");
    let out = eval_whole(&Sub, &[x.clone(), x.clone()]).expect("legal");
    assert_eq!(out[0].to_f64_vec(), [0.0, 0.0]);
    assert_eq!(x.to_f64_vec(), [1.5, -2.0]);
}

#[test]
fn rows_count_the_operations_of_their_formulas() {
    use crate::ops::Work;
    let s = Work::SPECIAL;
    let counted = [
        (Add.flops(), 1),
        (Div.flops(), 1),
        (Sign.flops(), 4),
        (Exp.flops(), s),
        (Rsqrt.flops(), 2),
        (Relu.flops(), 1),
        // Three for the bounded magnitude, the bell, Mills' ratio, and six around them.
        (Gelu.flops(), 3 + 6 + 2 * s),
        (Silu.flops(), 2 + 1 + s),
        (MulScalar::by(0.5).flops(), 1),
        (TanhGrad.flops(), 3),
        (PowScalar::to(1.0).flops(), 0),
        (PowScalar::to(2.0).flops(), 1),
        (PowScalar::to(-0.5).flops(), 2),
    ];
    for (i, (got, want)) in counted.into_iter().enumerate() {
        assert_eq!(got, want, "number {i}");
    }
    assert!(Pow.flops() > 2 * s && Pow.flops() < 5 * s, "{}", Pow.flops());
}
