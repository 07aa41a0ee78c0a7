//! Pointwise operators as methods: gradients at kinks, at NaN and at subnormal numbers; operations with numbers on
//! partial tensors; broadcasting.

use half::f16;
use isoshard::comm::spmd;
use isoshard::dtensor::{CrossEntropyOptions, DTensor, DeviceMesh};

use isoshard::tensor::{DType, ReduceOp, Tensor};
use isoshard::{Error, Result};

const NAN: f32 = f32::NAN;

/// Returns a sharded vector on two ranks.
fn vector<T: isoshard::tensor::Element>(mesh: &DeviceMesh, values: &[T]) -> Result<DTensor> {
    DTensor::distribute(mesh, &Tensor::from_vec(values.to_vec(), [values.len()])?, "(S0)")
}

/// Returns the gradients of the sum of `y` with respect to `leaves`.
fn gradients(y: &DTensor, leaves: &[&DTensor]) -> Result<Vec<Vec<f64>>> {
    let grads = y.sum_all()?.backward()?;
    leaves.iter().map(|x| Ok(grads.get(x).expect("a leaf").full_tensor()?.to_f64_vec())).collect()
}

/// Runs a test on a mesh of two ranks.
fn on_two(test: impl Fn(&DeviceMesh) -> Result<()> + Send + Sync + Copy + 'static) {
    spmd(2, move |rank| test(&DeviceMesh::new(&rank, &[("dp", 2)])?)).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn the_gradient_of_a_quotient_is_finite_at_subnormal_divisors() {
    on_two(|mesh| {
        let (x, y) = (vector(mesh, &[0.0f32, 6.0])?, vector(mesh, &[1e-39f32, 2.0])?.requires_grad()?);
        assert_eq!(gradients(&x.div(&y)?, &[&y])?, [[0.0, -1.5]]);
        Ok(())
    });
}

#[test]
fn the_gradient_of_abs_is_zero_at_both_zeros_and_at_nan() {
    on_two(|mesh| {
        let x = vector(mesh, &[-2.0f32, -0.0, 0.0, 3.0, NAN])?.requires_grad()?;
        let dx = gradients(&x.abs()?, &[&x])?.remove(0);
        assert_eq!(dx, [-1.0, 0.0, 0.0, 1.0, 0.0]);
        assert!(dx[1].is_sign_positive(), "the gradient at -0 is +0");
        Ok(())
    });
}

#[test]
fn extrema_that_are_nan_have_gradients() {
    on_two(|mesh| {
        let x = vector(mesh, &[NAN, 1.0, NAN, 2.0])?.requires_grad()?;
        let y = vector(mesh, &[1.0, NAN, NAN, 1.0])?.requires_grad()?;
        let want = [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]];
        assert_eq!(gradients(&x.maximum(&y)?, &[&x, &y])?, want);
        assert_eq!(gradients(&x.minimum(&y)?, &[&x, &y])?, [[1.0, 1.0, 1.0, 0.0], [1.0; 4]]);
        assert_eq!(gradients(&x.max(&[0], false)?, &[&x])?, [[0.5, 0.0, 0.5, 0.0]]);
        assert_eq!(gradients(&x.min(&[0], false)?, &[&x])?, [[0.5, 0.0, 0.5, 0.0]]);
        Ok(())
    });
}

/// A NaN destination had no gradient, and f16 and bf16 counted equal extremes up to 2,048 and 256.
#[test]
fn equal_extremes_are_counted_and_nans_share_the_gradient() {
    on_two(|mesh| {
        let index = vector(mesh, &[0i64, 0, 1, 2])?;
        let x = vector(mesh, &[1.0, NAN, 2.0, 7.0])?.requires_grad()?;
        let src = vector(mesh, &[NAN, NAN, 5.0, 2.0])?.requires_grad()?;
        for rule in [ReduceOp::Max, ReduceOp::Min] {
            let y = x.scatter_reduce(0, &index, &src, rule)?;
            assert_eq!(gradients(&y, &[&x, &src])?, [[0.0, 1.0, 0.5, 1.0], [0.5, 0.5, 0.0, 0.5]]);
        }
        let zeros = DTensor::zeros(mesh, DType::F16, [70_000], "(S0)")?.requires_grad()?;
        let share = f16::from_f64(1.0 / 70_000.0).to_f64();
        assert_eq!(gradients(&zeros.max(&[0], false)?, &[&zeros])?, [[share; 70_000]]);
        let ones = DTensor::ones(mesh, DType::BF16, [512], "(S0)")?.requires_grad()?;
        let x = DTensor::zeros(mesh, DType::BF16, [1], "(R)")?;
        let y =
            x.scatter_reduce(0, &DTensor::zeros(mesh, DType::I64, [512], "(S0)")?, &ones, ReduceOp::Max)?;
        assert_eq!(gradients(&y, &[&ones])?, [[1.0 / 512.0; 512]]);
        Ok(())
    });
}

/// PyTorch's gradients, but for that of `xlogy` by `y` at (0, 0), which is NaN there.
#[test]
fn gradients_at_special_points() {
    const INF: f32 = f32::INFINITY;
    on_two(|mesh| {
        let x = vector(mesh, &[0.0f32; 5])?.requires_grad()?;
        let y = vector(mesh, &[0.0, 1.0, INF, -1.0, NAN])?.requires_grad()?;
        let check = |z: DTensor, dx: [f64; 4], dy: [f64; 4]| -> Result<()> {
            let got = gradients(&z, &[&x, &y])?;
            assert_eq!((&got[0][..4], &got[1][..4]), (&dx[..], &dy[..]));
            assert!(got[0][4].is_nan() && got[1][4].is_nan(), "{got:?}");
            Ok(())
        };
        let inf = f64::INFINITY;
        check(x.xlogy(&y)?, [0.0, 0.0, inf, 0.0], [0.0, 0.0, 0.0, 0.0])?;
        check(x.xlog1py(&y)?, [0.0, f64::from(2f32.ln()), inf, 0.0], [0.0, 0.0, 0.0, 0.0])?;
        let x = vector(mesh, &[-3.0f32, 3.0, -3.5, 3.5, 0.0])?.requires_grad()?;
        assert_eq!(gradients(&x.hardswish()?, &[&x])?, [[0.0, 1.0, 0.0, 1.0, 0.5]]);
        let x = vector(mesh, &[1.0f32, -1.0, 0.0])?.requires_grad()?;
        let infinite = vector(mesh, &[INF; 3])?;
        assert_eq!(gradients(&x.elu(1.0)?.mul(&infinite)?, &[&x])?, [[inf; 3]]);
        Ok(())
    });
}

/// Numbers beyond 2^53 were rounded to f64, and `nan_to_num` limited its replacements.
#[test]
fn numbers_reach_their_dtype_unchanged() {
    on_two(|mesh| {
        let large = (1i64 << 60) + 1;
        let x = vector(mesh, &[large - 1, large, large + 1, 0])?;
        assert_eq!(x.eq_scalar(large)?.full_tensor()?.to_vec::<bool>()?, [false, true, false, false]);
        let mask = x.eq_scalar(0)?;
        assert_eq!(x.masked_fill(&mask, -large)?.full_tensor()?.to_vec::<i64>()?[3], -large);
        let clamped = |y: DTensor| y.full_tensor()?.to_vec::<i64>();
        assert_eq!(clamped(x.clamp(1, large)?)?, [large - 1, large, large, 1]);
        assert_eq!(clamped(x.clamp(large, f64::INFINITY)?)?, [large, large, large + 1, large]);
        assert_eq!(clamped(x.clamp_max(i64::MAX - 1)?)?, [large - 1, large, large + 1, 0]);
        let too_large = DTensor::arange(mesh, DType::I64, (1i64 << 53) + 1, (1i64 << 53) + 3, 1, "(R)");
        assert!(too_large.unwrap_err().to_string().starts_with("arange: i64 has no such numbers"));
        assert!(x.eq_scalar(2f64.powi(63)).is_err(), "2^63 is no i64");
        let logp = DTensor::zeros(mesh, DType::F32, [4, 2], "(S0)")?;
        let options = CrossEntropyOptions { ignore_index: Some(large), ..Default::default() };
        let classes = vector(mesh, &[1, large, 0, large])?;
        assert_eq!(logp.nll_loss(&classes, &options)?.item()?, 0.0);
        let near_options = CrossEntropyOptions { ignore_index: Some(large - 1), ..Default::default() };
        assert!(logp.nll_loss(&classes, &near_options).and_then(|loss| loss.full_tensor()).is_err());
        let x = vector(mesh, &[NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0])?;
        let of = |y: DTensor| y.full_tensor()?.to_vec::<f32>();
        let (inf, most) = (f32::INFINITY, f32::MAX);
        assert_eq!(of(x.nan_to_num(f64::INFINITY, None, None)?)?, [inf, most, -most, 1.0]);
        assert_eq!(of(x.nan_to_num(1e39, Some(f64::INFINITY), None)?)?, [inf, inf, -most, 1.0]);
        assert_eq!(of(x.nan_to_num(0.0, None, Some(f64::NEG_INFINITY))?)?, [0.0, most, -inf, 1.0]);
        Ok(())
    });
}

#[test]
fn functions_in_steps_have_the_gradient_zero() {
    on_two(|mesh| {
        let x = vector(mesh, &[-1.5f32, 0.0, 2.5])?.requires_grad()?;
        let steps =
            [x.sign()?, x.floor()?, x.ceil()?, x.trunc()?, x.round()?, x.floor_div(&x.add_scalar(1.0)?)?];
        for y in &steps {
            assert_eq!(gradients(y, &[&x])?, [[0.0; 3]]);
            // Zero also if the incoming gradient is infinite.
            let dx = y.mul_scalar(f64::INFINITY)?.sum_all()?.backward()?.take(&x).expect("a leaf");
            assert_eq!(dx.full_tensor()?.to_f64_vec(), [0.0; 3]);
        }
        assert!(!x.gt_scalar(0.0)?.has_history(), "bools have no derivative");
        Ok(())
    });
}

#[test]
fn gradients_of_remainders_and_interpolation() {
    on_two(|mesh| {
        let of = |values: [f32; 2]| vector(mesh, &values)?.requires_grad();
        let (x, y) = (of([-5.5, 5.5])?, of([2.0, 1.5])?);
        assert_eq!(x.remainder(&y)?.full_tensor()?.to_f64_vec(), [0.5, 1.0]);
        assert_eq!(gradients(&x.remainder(&y)?, &[&x, &y])?, [[1.0, 1.0], [3.0, -3.0]]);
        assert_eq!(x.fmod(&y)?.full_tensor()?.to_f64_vec(), [-1.5, 1.0]);
        assert_eq!(gradients(&x.fmod(&y)?, &[&x, &y])?, [[1.0, 1.0], [2.0, -3.0]]);
        let w = of([0.25, 0.75])?;
        let want = [[0.75, 0.25], [0.25, 0.75], [7.5, -4.0]];
        assert_eq!(gradients(&x.lerp(&y, &w)?, &[&x, &y, &w])?, want);
        Ok(())
    });
}

#[test]
fn numbers_meet_a_partial_sum_once() {
    on_two(|mesh| {
        // The sum over the sharded dim is [4, -4] and is not reduced.
        let x = Tensor::from_vec(vec![1.0f32, -1.0, 3.0, -3.0], [2, 2])?;
        let partial = DTensor::distribute(mesh, &x, "(S0)")?.sum(&[0], false)?;
        assert_eq!(partial.layout().to_string(), "(P(sum))");
        let values = |y: DTensor| -> Result<Vec<f64>> { Ok(y.full_tensor()?.to_f64_vec()) };
        assert_eq!(values(partial.add_scalar(1.0)?)?, [5.0, -3.0]);
        assert_eq!(values(partial.gt_scalar(3.5)?)?, [1.0, 0.0]);
        assert_eq!(values(partial.clamp(-2.0, 3.0)?)?, [3.0, -2.0]);
        assert_eq!(values(partial.floor()?)?, [4.0, -4.0]);
        let mask = DTensor::distribute(mesh, &Tensor::from_vec(vec![true, false], [2])?, "(R)")?;
        let zeros = partial.masked_fill(&mask, 0.0)?;
        assert_eq!(zeros.layout().to_string(), "(P(sum))", "zeros need no reduction");
        assert_eq!(values(zeros)?, [0.0, -4.0]);
        assert_eq!(values(partial.masked_fill(&mask, 7.0)?)?, [7.0, -4.0]);
        Ok(())
    });
}

#[test]
fn integers_take_whole_numbers() {
    on_two(|mesh| {
        let x = vector(mesh, &[1i32, -7, i32::MAX])?;
        assert_eq!(x.add_scalar(1.0)?.full_tensor()?.to_vec::<i32>()?, [2, -6, i32::MIN]);
        assert_eq!(x.mul_scalar(-2.0)?.full_tensor()?.to_vec::<i32>()?, [-2, 14, 2]);
        assert_eq!(x.abs()?.full_tensor()?.to_vec::<i32>()?, [1, 7, i32::MAX]);
        assert_eq!(x.sign()?.full_tensor()?.to_vec::<i32>()?, [1, -1, 1]);
        let bytes = vector(mesh, &[0u8, 200])?;
        assert_eq!(bytes.add_scalar(-1.0)?.full_tensor()?.to_vec::<u8>()?, [255, 199]);
        let text = |refused: Result<DTensor>| refused.unwrap_err().to_string();
        assert!(
            text(x.add_scalar(0.5))
                .starts_with("add_scalar: integers take whole numbers up to 2^53; got 0.5")
        );
        assert!(
            text(x.lt_scalar(0.5)).starts_with("lt_scalar: the dtype does not have this number; got 0.5")
        );
        assert!(text(bytes.eq_scalar(256)).starts_with("eq_scalar: the dtype does not have this number"));
        assert!(text(x.clamp(f64::NAN, 1.0)).starts_with("clamp: a bound is NaN"));
        Ok(())
    });
}

#[test]
fn everything_broadcasts() {
    on_two(|mesh| {
        let rows = Tensor::from_vec(vec![7.0f32, -7.0, 4.0], [3, 1])?;
        let rows = DTensor::distribute(mesh, &rows, "(S0)")?;
        let columns = DTensor::distribute(mesh, &Tensor::from_vec(vec![4.0f32, -4.0], [2])?, "(S0)")?;
        assert_eq!(rows.remainder(&columns)?.full_tensor()?.to_f64_vec(), [3.0, -1.0, 1.0, -3.0, 0.0, -0.0]);
        assert_eq!(rows.floor_div(&columns)?.full_tensor()?.to_f64_vec(), [1.0, -2.0, -2.0, 1.0, 1.0, -1.0]);
        let w = DTensor::full(mesh, DType::F32, [], "(R)", 0.5)?;
        assert_eq!(rows.lerp(&columns, &w)?.full_tensor()?.to_f64_vec(), [5.5, 1.5, -1.5, -5.5, 4.0, 0.0]);
        let sum = rows.addcmul(&columns, &w, 2.0)?;
        assert_eq!(sum.full_tensor()?.to_f64_vec(), [11.0, 3.0, -3.0, -11.0, 8.0, 0.0]);
        let refused: Error = rows.lerp(&columns, &DTensor::zeros(mesh, DType::F32, [5], "(R)")?).unwrap_err();
        assert!(refused.to_string().starts_with("lerp: "), "{refused}");
        Ok(())
    });
}

#[test]
fn gated_units_split_their_input() {
    on_two(|mesh| {
        let x = Tensor::from_vec(vec![1.0f32, -2.0, 0.0, 0.0, 3.0, 4.0, 0.0, 0.0], [2, 4])?;
        let x = DTensor::distribute(mesh, &x, "(S0)")?;
        let y = x.glu(1)?;
        assert_eq!(
            (y.layout().to_string(), y.full_tensor()?.to_f64_vec()),
            ("(S0)".into(), vec![0.5, -1.0, 1.5, 2.0])
        );
        let refused = x.slice(1, 0, 3)?.swiglu(-1).unwrap_err().to_string();
        assert!(
            refused.starts_with("swiglu: wants a dim of even extent; got dim -1 of f32[2, 3]"),
            "{refused}"
        );
        Ok(())
    });
}

#[test]
fn lists_of_tensors_equal_single_calls() {
    on_two(|mesh| {
        let layouts = ["(S0)", "(R)", "(S1)"];
        let of = |salt: usize| -> Result<Vec<DTensor>> {
            let tensor = |k: usize| {
                let values = (0..6 + 2 * k).map(|e| ((e * 7 + salt * 5 + k) % 11) as f32 - 4.5).collect();
                DTensor::distribute(mesh, &Tensor::from_vec(values, [2, 3 + k])?, layouts[k % 3])
            };
            (0..7).map(tensor).collect()
        };
        let (xs, ys, zs) = (of(1)?, of(2)?, of(3)?);
        let same = |list: Vec<DTensor>, single: &dyn Fn(usize) -> Result<DTensor>| -> Result<()> {
            for (k, got) in list.into_iter().enumerate() {
                let want = single(k)?;
                assert_eq!(got.layout(), want.layout());
                assert_eq!(got.full_tensor()?.as_bytes()?, want.full_tensor()?.as_bytes()?);
            }
            Ok(())
        };
        same(DTensor::foreach_add(xs.clone(), &ys)?, &|k| xs[k].add(&ys[k]))?;
        same(DTensor::foreach_sub(xs.clone(), &ys)?, &|k| xs[k].sub(&ys[k]))?;
        same(DTensor::foreach_mul(xs.clone(), &ys)?, &|k| xs[k].mul(&ys[k]))?;
        same(DTensor::foreach_div(xs.clone(), &ys)?, &|k| xs[k].div(&ys[k]))?;
        same(DTensor::foreach_add_scalar(xs.clone(), 0.3)?, &|k| xs[k].add_scalar(0.3))?;
        same(DTensor::foreach_mul_scalar(xs.clone(), 0.3)?, &|k| xs[k].mul_scalar(0.3))?;
        same(DTensor::foreach_lerp(xs.clone(), &ys, 0.9)?, &|k| xs[k].lerp_scalar(&ys[k], 0.9))?;
        let halves = |of: &[DTensor]| of.iter().map(|x| x.cast(DType::BF16)).collect::<Result<Vec<_>>>();
        let (x16, y16) = (halves(&xs)?, halves(&ys)?);
        // 0.999 is 1 in bf16.
        same(DTensor::foreach_lerp(x16.clone(), &y16, 0.999)?, &|k| x16[k].lerp_scalar(&y16[k], 0.999))?;
        for weight in [0.5, 0.3] {
            let refused = x16[0].lerp_scalar(&ys[0], weight).unwrap_err().to_string();
            assert!(refused.starts_with("lerp_scalar: the dtypes differ"), "{refused}");
        }
        same(DTensor::foreach_addcmul(xs.clone(), &ys, &zs, 0.3)?, &|k| xs[k].addcmul(&ys[k], &zs[k], 0.3))?;
        same(DTensor::foreach_addcdiv(xs.clone(), &ys, &zs, 0.3)?, &|k| xs[k].addcdiv(&ys[k], &zs[k], 0.3))?;
        let leaf = xs[0].requires_grad()?;
        let out = DTensor::foreach_mul(vec![leaf.clone()], &ys[..1])?;
        let dx = out[0].sum_all()?.backward()?.take(&leaf).expect("a gradient that is wanted is recorded");
        assert_eq!(dx.full_tensor()?.to_f64_vec(), ys[0].full_tensor()?.to_f64_vec());
        let refused = DTensor::foreach_add(xs, &ys[..2]).unwrap_err().to_string();
        assert_eq!(refused, "foreach_add: the lists have different lengths; got 7 and 2 tensors");
        Ok(())
    });
}

#[test]
fn linear_units_of_other_shapes() {
    on_two(|mesh| {
        let x = vector(mesh, &[-2.0f64, -0.5, 0.0, 3.0])?;
        let values = |y: Result<DTensor>| -> Result<Vec<f64>> { Ok(y?.full_tensor()?.to_f64_vec()) };
        let close = |got: Vec<f64>, want: [f64; 4]| {
            assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-14), "{got:?}, wanted {want:?}");
        };
        let below = |alpha: f64, x: f64| alpha * (x / alpha).exp_m1();
        close(values(x.celu(2.0))?, [below(2.0, -2.0), below(2.0, -0.5), 0.0, 3.0]);
        let (scale, alpha) = (1.050_700_987_355_480_5, 1.673_263_242_354_377_2);
        let selu = |x: f64| scale * alpha * x.exp_m1();
        close(values(x.selu())?, [selu(-2.0), selu(-0.5), 0.0, scale * 3.0]);
        let leaf = x.requires_grad()?;
        close(gradients(&leaf.celu(2.0)?, &[&leaf])?.remove(0), [(-1f64).exp(), (-0.25f64).exp(), 1.0, 1.0]);
        Ok(())
    });
}
