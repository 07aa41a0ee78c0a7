//! CPU kernels of layer norm and RMS norm over the last dim, and of their derivatives.
//!
//! Each row is summed along the [reduction tree](crate::tensor::cpu::RowTree) of its length, and the gradients of weight and bias along the
//! tree over all leading dims. f16 and bf16 compute in f32 and round once; the statistics stay f32 (f64 for f64).
//!
//! A row whose squares overflow is multiplied by a power of two first, which changes no bit of any other row.

use isoshard_kernels::rows::{Norm, NormBackward, NormForward};

use crate::error::{Error, Result};
use crate::tensor::cpu::{as_elements_mut, cast, expect_matching, reduce};
use crate::tensor::{DType, ReduceOp, Shape, Tensor, with_places};

/// Computes `(x - mean) / sqrt(variance + eps) * weight + bias` along the last dim. Returns the result, and per row the
/// mean and `1 / sqrt(variance + eps)`, with last extent 1. The variance is the mean square deviation.
///
/// ```
/// use isoshard::{ops::cpu::layer_norm, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 3.0], [1, 2])?;
/// let (y, mean, rstd) = layer_norm("layer_norm", &x, None, None, 0.0)?;
/// assert_eq!((y.to_f64_vec(), mean.item()?, rstd.item()?), (vec![-1.0, 1.0], 2.0, 1.0));
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses integers, a tensor without dims, and a weight or bias that does not have the last dim's extent and `x`'s
/// dtype. The error begins with `verb`.
pub fn layer_norm(
    verb: &str,
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor, Tensor)> {
    let NormResults { y, mean, rstd, .. } = forward(verb, x, None, [weight, bias], eps, true)?;
    Ok((y, mean, rstd))
}

/// Computes a [`layer_norm`] of `x + residual`. Returns its result, the sum, the means and `1 / sqrt(variance + eps)`.
/// For f16 and bf16 the sum is not rounded before it is normalised.
pub(super) fn add_layer_norm(
    verb: &str,
    [x, residual]: [&Tensor; 2],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor, Tensor, Tensor)> {
    let NormResults { y, sum, mean, rstd } = forward(verb, x, Some(residual), [weight, bias], eps, true)?;
    Ok((y, sum.expect("there is a residual"), mean, rstd))
}

/// Computes an [`rms_norm`] of `x + residual`, as [`add_layer_norm`] does.
pub(super) fn add_rms_norm(
    verb: &str,
    [x, residual]: [&Tensor; 2],
    weight: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor, Tensor)> {
    let NormResults { y, sum, rstd, .. } = forward(verb, x, Some(residual), [weight, None], eps, false)?;
    Ok((y, sum.expect("there is a residual"), rstd))
}

/// Computes `x / sqrt(mean(x^2) + eps) * weight` along the last dim. Returns the result, and per row
/// `1 / sqrt(mean(x^2) + eps)`.
///
/// ```
/// use isoshard::{ops::cpu::rms_norm, tensor::Tensor};
/// let (y, rstd) = rms_norm("rms_norm", &Tensor::from_vec(vec![2.0, -2.0], [1, 2])?, None, 0.0)?;
/// assert_eq!((y.to_f64_vec(), rstd.item()?), (vec![1.0, -1.0], 0.5));
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns the errors of [`layer_norm`].
pub fn rms_norm(verb: &str, x: &Tensor, weight: Option<&Tensor>, eps: f64) -> Result<(Tensor, Tensor)> {
    let NormResults { y, rstd, .. } = forward(verb, x, None, [weight, None], eps, false)?;
    Ok((y, rstd))
}

/// Computes the gradients of input, weight and bias of a [`layer_norm`] from the gradient `dy` of its output, the
/// input, the weight and the statistics.
///
/// ```
/// use isoshard::{ops::cpu::{layer_norm, layer_norm_backward}, tensor::{DType, Tensor}};
/// let (x, dy) = (Tensor::from_vec(vec![1.0, 3.0], [1, 2])?, Tensor::full(DType::F64, [1, 2], 5.0));
/// let (_, mean, rstd) = layer_norm("layer_norm", &x, None, None, 0.0)?;
/// let (dx, dw, db) = layer_norm_backward("layer_norm_grad", &dy, &x, None, &mean, &rstd)?;
/// assert_eq!(dx.to_f64_vec(), [0.0, 0.0]); // a shift of all elements changes nothing
/// assert_eq!((dw.to_f64_vec(), db.to_f64_vec()), (vec![-5.0, 5.0], vec![5.0, 5.0]));
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns the errors of [`layer_norm`].
pub fn layer_norm_backward(
    verb: &str,
    dy: &Tensor,
    x: &Tensor,
    weight: Option<&Tensor>,
    mean: &Tensor,
    rstd: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (dx, dw) = backward(verb, dy, x, weight, Some(mean), rstd)?;
    Ok((dx, weight_gradient(verb, &dw, x.dtype())?, over_leading(verb, dy)?))
}

/// Computes the gradients of input and weight of an [`rms_norm`], as [`layer_norm_backward`].
///
/// # Errors
/// Returns the errors of [`layer_norm`].
pub(crate) fn rms_norm_backward(
    verb: &str,
    dy: &Tensor,
    x: &Tensor,
    weight: Option<&Tensor>,
    rstd: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let (dx, dw) = backward(verb, dy, x, weight, None, rstd)?;
    Ok((dx, weight_gradient(verb, &dw, x.dtype())?))
}

/// Computes the gradient of the input of a [`layer_norm`] without weight and bias.
pub(super) fn layer_norm_input_backward(
    verb: &str,
    dy: &Tensor,
    x: &Tensor,
    mean: &Tensor,
    rstd: &Tensor,
) -> Result<Tensor> {
    Ok(backward(verb, dy, x, None, Some(mean), rstd)?.0)
}

/// Sums the products per element of a gradient of the weight.
fn weight_gradient(verb: &str, products: &Tensor, dtype: DType) -> Result<Tensor> {
    cast(&over_leading(verb, products)?, dtype)
}

/// The results of a normalisation.
struct NormResults {
    y: Tensor,
    /// The sum of the input and the residual, if there is one.
    sum: Option<Tensor>,
    mean: Tensor,
    rstd: Tensor,
}

/// Normalises the rows of `x`, or of `x + residual`; around their means if it is `centred`.
fn forward(
    verb: &str,
    x: &Tensor,
    residual: Option<&Tensor>,
    affine: [Option<&Tensor>; 2],
    eps: f64,
    centred: bool,
) -> Result<NormResults> {
    expect_rows(verb, x, &affine)?;
    if let Some(residual) = residual {
        expect_matching(verb, x, &[residual])?;
    }
    let (x, residual, affine) =
        (x.packed(), residual.map(Tensor::packed), affine.map(|t| t.map(Tensor::packed)));
    let (residual, affine) = (residual.as_ref(), [affine[0].as_ref(), affine[1].as_ref()]);
    match x.dtype() {
        DType::F32 => forward_as::<f32>(&x, residual, affine, eps, centred),
        DType::F64 => forward_as::<f64>(&x, residual, affine, eps, centred),
        half => {
            let wide = |t: &Tensor| cast(t, DType::F32);
            let (w, b) = (affine[0].map(wide).transpose()?, affine[1].map(wide).transpose()?);
            let (x, residual) = (wide(&x)?, residual.map(wide).transpose()?);
            let wide = forward_as::<f32>(&x, residual.as_ref(), [w.as_ref(), b.as_ref()], eps, centred)?;
            let sum = wide.sum.map(|sum| cast(&sum, half)).transpose()?;
            Ok(NormResults { y: cast(&wide.y, half)?, sum, ..wide })
        }
    }
}

fn forward_as<T: Norm>(
    x: &Tensor,
    residual: Option<&Tensor>,
    [weight, bias]: [Option<&Tensor>; 2],
    eps: f64,
    centred: bool,
) -> Result<NormResults> {
    let stats = statistics_shape(x);
    let mut y = Tensor::uninit(T::DTYPE, x.shape());
    let mut sum = residual.map(|_| Tensor::uninit(T::DTYPE, x.shape()));
    let mut mean = Tensor::zeros(T::DTYPE, stats.clone());
    let mut rstd = Tensor::zeros(T::DTYPE, stats);
    if x.numel() > 0 {
        let len = x.shape()[x.shape().len() - 1];
        T::normalise(NormForward {
            x: x.as_slice()?,
            residual: residual.map(Tensor::as_slice).transpose()?,
            weight: weight.map(Tensor::as_slice).transpose()?,
            bias: bias.map(Tensor::as_slice).transpose()?,
            len,
            eps,
            centred,
            y: as_elements_mut(y.bytes_mut()),
            sums: sum.as_mut().map_or(&mut [], |sum| as_elements_mut(sum.bytes_mut())),
            mean: mean.make_mut()?,
            rstd: rstd.make_mut()?,
        });
    }
    Ok(NormResults { y, sum, mean, rstd })
}

/// Returns the shape of one number per row.
fn statistics_shape(x: &Tensor) -> Shape {
    let mut shape = x.shape().clone();
    let last = shape.len() - 1;
    shape[last] = 1;
    shape
}

/// Refuses an input without rows, and weights that do not have its last extent and dtype.
fn expect_rows(verb: &str, x: &Tensor, affine: &[Option<&Tensor>]) -> Result<()> {
    x.dtype().expect_float(verb)?;
    let Some(&len) = x.shape().last() else {
        return Err(Error::invalid(verb, "wants a last dim", x.notation(), "reshape it to [1]"));
    };
    match affine.iter().flatten().find(|t| t.shape()[..] != [len] || t.dtype() != x.dtype()) {
        Some(t) => Err(Error::invalid(
            verb,
            "weight and bias are not of the input's last dim and dtype",
            format!("{} for {}", t.notation(), x.notation()),
            format!("give {}[{len}]", x.dtype()),
        )),
        None => Ok(()),
    }
}

/// Computes the gradient of the input, and the product per element whose sum over the leading dims is the gradient of
/// the weight, in the dtype of sums.
fn backward(
    verb: &str,
    dy: &Tensor,
    x: &Tensor,
    weight: Option<&Tensor>,
    mean: Option<&Tensor>,
    rstd: &Tensor,
) -> Result<(Tensor, Tensor)> {
    expect_rows(verb, x, &[weight])?;
    expect_matching(verb, x, &[dy])?;
    let stats = statistics_shape(x);
    if *rstd.shape() != stats || mean.is_some_and(|m| *m.shape() != stats) {
        return Err(Error::invalid(
            verb,
            "the statistics are not the input's",
            format!("{} for {}", rstd.notation(), x.notation()),
            format!("give {stats}"),
        ));
    }
    let dtype = x.dtype();
    let acc = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    // The weight has the length of its gradient, whose place it must not take.
    let wide = |t: &Tensor| with_places(Vec::new(), || cast(&t.contiguous()?, acc)).0;
    let (dy, x, rstd) = (wide(dy)?, wide(x)?, wide(rstd)?);
    let (weight, mean) = (weight.map(wide).transpose()?, mean.map(wide).transpose()?);
    let (dx, dw) = match acc {
        DType::F64 => backward_as::<f64>(&dy, &x, weight.as_ref(), mean.as_ref(), &rstd)?,
        _ => backward_as::<f32>(&dy, &x, weight.as_ref(), mean.as_ref(), &rstd)?,
    };
    Ok((cast(&dx, dtype)?, dw))
}

/// Computes the gradient of the input, and the product per element whose sum over the leading dims is the gradient of
/// the weight.
fn backward_as<T: Norm>(
    dy: &Tensor,
    x: &Tensor,
    weight: Option<&Tensor>,
    mean: Option<&Tensor>,
    rstd: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let (mut dx, mut dw) = (Tensor::uninit(T::DTYPE, x.shape()), Tensor::uninit(T::DTYPE, x.shape()));
    if x.numel() > 0 {
        let len = x.shape()[x.shape().len() - 1];
        T::normalise_backward(NormBackward {
            dy: dy.as_slice()?,
            x: x.as_slice()?,
            weight: weight.map(Tensor::as_slice).transpose()?,
            mean: mean.map(Tensor::as_slice).transpose()?,
            rstd: rstd.as_slice()?,
            len,
            dx: as_elements_mut(dx.bytes_mut()),
            dw: as_elements_mut(dw.bytes_mut()),
        });
    }
    Ok((dx, dw))
}

/// Sums over all dims but the last.
fn over_leading(verb: &str, x: &Tensor) -> Result<Tensor> {
    let leading: Vec<usize> = (0..x.shape().len() - 1).collect();
    reduce(verb, x, &leading, ReduceOp::Sum, false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::cpu::{Isa, Real, with_isa};

    fn noise(shape: impl Into<Shape>, seed: usize) -> Tensor {
        let shape = shape.into();
        let value = |i: usize| ((i * 7919 + seed * 101) % 1009) as f64 * 0.004 - 2.0;
        Tensor::from_vec((0..shape.numel()).map(value).collect::<Vec<f64>>(), shape).unwrap()
    }

    #[test]
    fn against_the_definition() {
        for n in [1, 2, 33, 100] {
            let (x, w, b) = (noise([2, 3, n], 1), noise([n], 2), noise([n], 3));
            let (y, mean, rstd) = layer_norm("ln", &x, Some(&w), Some(&b), 1e-5).unwrap();
            let (rms, _) = rms_norm("rms", &x, Some(&w), 1e-5).unwrap();
            assert_eq!((&mean.shape()[..], &rstd.shape()[..]), (&[2, 3, 1][..], &[2, 3, 1][..]));
            let (xv, wv, bv) = (x.to_f64_vec(), w.to_f64_vec(), b.to_f64_vec());
            for (i, (y, rms)) in y.to_f64_vec().iter().zip(rms.to_f64_vec()).enumerate() {
                let row = &xv[i / n * n..][..n];
                let mean = row.iter().sum::<f64>() / n as f64;
                let var = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
                let square = row.iter().map(|x| x * x).sum::<f64>() / n as f64;
                let want = (xv[i] - mean) / (var + 1e-5).sqrt() * wv[i % n] + bv[i % n];
                assert!((y - want).abs() < 1e-12, "{y} {want}");
                assert!((rms - xv[i] / (square + 1e-5).sqrt() * wv[i % n]).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn derivatives_by_differences() {
        let (x, w, b, dy) = (noise([2, 2, 5], 1), noise([5], 2), noise([5], 3), noise([2, 2, 5], 4));
        let dot =
            |y: &Tensor| -> f64 { y.to_f64_vec().iter().zip(dy.to_f64_vec()).map(|(y, d)| y * d).sum() };
        let layer =
            |t: &[Tensor; 3]| dot(&layer_norm("ln", &t[0], Some(&t[1]), Some(&t[2]), 1e-3).unwrap().0);
        let rms = |t: &[Tensor; 3]| dot(&rms_norm("rms", &t[0], Some(&t[1]), 1e-3).unwrap().0);
        let (_, mean, rstd) = layer_norm("ln", &x, Some(&w), Some(&b), 1e-3).unwrap();
        let (dx, dw, db) = layer_norm_backward("ln", &dy, &x, Some(&w), &mean, &rstd).unwrap();
        let (_, rstd) = rms_norm("rms", &x, Some(&w), 1e-3).unwrap();
        let (rdx, rdw) = rms_norm_backward("rms", &dy, &x, Some(&w), &rstd).unwrap();
        let inputs = [x, w, b];
        let check = |loss: &dyn Fn(&[Tensor; 3]) -> f64, which: usize, got: &Tensor| {
            for (i, got) in got.to_f64_vec().iter().enumerate() {
                let nudge = |by: f64| {
                    let mut t = inputs.clone();
                    t[which].make_mut::<f64>().unwrap()[i] += by;
                    loss(&t)
                };
                let want = (nudge(1e-5) - nudge(-1e-5)) / 2e-5;
                assert!((got - want).abs() < 1e-7, "input {which}, {i}: {got} {want}");
            }
        };
        check(&layer, 0, &dx);
        check(&layer, 1, &dw);
        check(&layer, 2, &db);
        check(&rms, 0, &rdx);
        check(&rms, 1, &rdw);
    }

    /// [MAX, -MAX, 0, 0] and the like: squares, and the sum of equal numbers, exceed the dtype.
    #[test]
    fn rows_whose_variance_overflows() {
        fn as_f64<T: Real>(x: T) -> f64 {
            Tensor::from_vec(vec![x], [1]).unwrap().to_f64_vec()[0]
        }
        fn check<T: Real>(most: T, close: f64) {
            let rows = [
                [most, -most, T::ZERO, T::ZERO],
                [most; 4],
                [most, -most, -most, -most],
                [T::ONE, T::ZERO, T::ZERO, T::ZERO],
            ];
            let x = Tensor::from_vec(rows.concat(), [4, 4]).unwrap();
            let near = |got: &[f64], want: [f64; 4]| {
                got.iter().zip(want).for_each(|(g, w)| assert!((g - w).abs() < close, "{got:?} {want:?}"));
            };
            let (y, mean, rstd) = layer_norm("ln", &x, None, None, 1e-5).unwrap();
            let y = y.to_f64_vec();
            near(&y[..4], [2f64.sqrt(), -2f64.sqrt(), 0.0, 0.0]);
            near(&y[4..8], [0.0; 4]);
            near(&y[8..12], [3f64.sqrt(), -(1.0 / 3f64).sqrt(), -(1.0 / 3f64).sqrt(), -(1.0 / 3f64).sqrt()]);
            let last = layer_norm("ln", &x.narrow(0, 3, 1).unwrap(), None, None, 1e-5).unwrap().0;
            assert_eq!(y[12..], last.to_f64_vec(), "the other row keeps its bits");
            // The gradient by the definition, on rows of the same shape but of ordinary size.
            let dy = Tensor::from_vec(
                vec![T::of(0.5); 16]
                    .into_iter()
                    .enumerate()
                    .map(|(i, v)| v * T::of((i % 5) as f64))
                    .collect::<Vec<T>>(),
                [4, 4],
            )
            .unwrap();
            let (dx, dw, _) = layer_norm_backward("ln", &dy, &x, None, &mean, &rstd).unwrap();
            let ones = Tensor::from_vec(
                [[T::ONE, -T::ONE, T::ZERO, T::ZERO], [T::ONE, -T::ONE, -T::ONE, -T::ONE]].concat(),
                [2, 4],
            )
            .unwrap();
            let (_, m1, r1) = layer_norm("ln", &ones, None, None, 0.0).unwrap();
            let some = |t: &Tensor| {
                let parts =
                    [t.narrow(0, 0, 1).unwrap().to_f64_vec(), t.narrow(0, 2, 1).unwrap().to_f64_vec()];
                Tensor::from_vec(parts.concat().into_iter().map(T::of).collect::<Vec<T>>(), [2, 4]).unwrap()
            };
            let want = layer_norm_backward("ln", &some(&dy), &ones, None, &m1, &r1).unwrap().0.to_f64_vec();
            let got: Vec<f64> = some(&dx).to_f64_vec().iter().map(|dx| dx * as_f64(most)).collect();
            got.iter()
                .zip(&want)
                .for_each(|(g, w)| assert!((g - w).abs() < close * 10.0, "{got:?} {want:?}"));
            assert!(dw.to_f64_vec().iter().all(|w| w.is_finite()));
            let (y, rstd) = rms_norm("rms", &x, None, 1e-5).unwrap();
            near(&y.to_f64_vec()[4..8], [1.0; 4]);
            let unit = Tensor::from_vec([T::ONE, T::ZERO, T::ZERO, T::ZERO].repeat(4), [4, 4]).unwrap();
            let (dx, dw) = rms_norm_backward("rms", &unit, &x, None, &rstd).unwrap();
            let row: Vec<f64> = dx.to_f64_vec()[4..8].iter().map(|dx| dx * as_f64(most)).collect();
            near(&row, [0.75, -0.25, -0.25, -0.25]);
            assert!(dw.to_f64_vec().iter().all(|w| w.is_finite()));
        }
        check::<f32>(f32::MAX, 2e-6);
        check::<f64>(f64::MAX, 1e-14);
    }

    #[test]
    fn parts_empty_halves_and_instruction_sets() {
        let f32s = |t: Tensor| cast(&t, DType::F32).unwrap();
        let (x, w, dy) = (f32s(noise([4, 9, 70], 1)), f32s(noise([70], 2)), f32s(noise([4, 9, 70], 3)));
        let run = |x: &Tensor, dy: &Tensor| {
            let (y, mean, rstd) = layer_norm("ln", x, Some(&w), Some(&w), 1e-5).unwrap();
            let (dx, dw, db) = layer_norm_backward("ln", dy, x, Some(&w), &mean, &rstd).unwrap();
            [y, dx, dw, db].map(|t| t.to_vec::<f32>().unwrap())
        };
        let whole = run(&x, &dy);
        for &isa in Isa::available() {
            assert_eq!(with_isa(isa, || run(&x, &dy)), whole, "{isa:?}");
        }
        let half = |r| run(&x.narrow(0, r, 2).unwrap(), &dy.narrow(0, r, 2).unwrap());
        let (a, b) = (half(0), half(2));
        assert_eq!([a[0].clone(), b[0].clone()].concat(), whole[0]);
        for k in [2, 3] {
            let sum: Vec<f32> = a[k].iter().zip(&b[k]).map(|(a, b)| a + b).collect();
            assert_eq!(sum, whole[k], "two parts are two nodes");
        }
        let (y, mean, _) = layer_norm("ln", &cast(&x, DType::BF16).unwrap(), None, None, 1e-5).unwrap();
        assert_eq!((y.dtype(), mean.dtype()), (DType::BF16, DType::F32));
        for shape in [[0, 3], [3, 0]] {
            let x = Tensor::zeros(DType::F32, shape);
            let (_, mean, rstd) = layer_norm("ln", &x, None, None, 1e-5).unwrap();
            let (dx, dw, db) = layer_norm_backward("ln", &x, &x, None, &mean, &rstd).unwrap();
            assert_eq!(
                (dx.shape(), dw.shape(), db.shape()),
                (x.shape(), &[shape[1]].into(), &[shape[1]].into())
            );
        }
        assert!(layer_norm("ln", &x, Some(&x), None, 1e-5).is_err());
    }
}
