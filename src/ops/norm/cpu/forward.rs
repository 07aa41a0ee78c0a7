//! The normalisation of rows, with the sum before it if there is a residual.

use crate::error::{Error, Result};
use crate::tensor::cpu::{
    Isa, Kernel, Real, RowTree, RowsMut, SumReducer, as_elements_mut, cast, dispatch, expect_matching,
    for_each_part, widest_of,
};
use crate::tensor::{DType, Shape, Tensor};

/// The results of a normalisation.
pub(super) struct NormResults {
    pub(super) y: Tensor,
    /// The sum of the input and the residual, if there is one.
    pub(super) sum: Option<Tensor>,
    pub(super) mean: Tensor,
    pub(super) rstd: Tensor,
}

/// Normalises the rows of `x`, or of `x + residual`; around their means if it is `centred`.
pub(super) fn forward(
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

fn forward_as<T: Real>(
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
        let x = x.as_slice::<T>()?;
        let residual = residual.map(Tensor::as_slice).transpose()?;
        let weight = weight.map(Tensor::as_slice).transpose()?;
        let bias = bias.map(Tensor::as_slice).transpose()?;
        let rows = |data, len| RowsMut { data, len };
        let sums = match &mut sum {
            Some(sum) => rows(as_elements_mut(sum.bytes_mut()), len),
            None => rows(&mut [][..], 0),
        };
        let out = ((rows(as_elements_mut(y.bytes_mut()), len), sums), mean.make_mut()?, rstd.make_mut()?);
        for_each_part(x.len() / len, x.len(), out, |at, ((y, sums), mean, rstd)| {
            let elements = at.start * len..at.end * len;
            let (x, residual) = (&x[elements.clone()], residual.map(|r: &[T]| &r[elements]));
            let (y, sums) = (y.data, sums.data);
            dispatch(NormForward::<T> { x, residual, weight, bias, len, eps, centred, y, sums, mean, rstd });
        });
    }
    Ok(NormResults { y, sum, mean, rstd })
}

/// The rows are summed one after the other: sums of 16 rows of 128 together ([`RowTree::fold_rows`]) took a Xeon as long.
struct NormForward<'a, T> {
    x: &'a [T],
    residual: Option<&'a [T]>,
    weight: Option<&'a [T]>,
    bias: Option<&'a [T]>,
    len: usize,
    eps: f64,
    centred: bool,
    y: &'a mut [T],
    /// The sums with the residual; empty without one.
    sums: &'a mut [T],
    mean: &'a mut [T],
    rstd: &'a mut [T],
}

impl<T: Real> Kernel for NormForward<'_, T> {
    type Out = ();
    const WIDEST: Isa = widest_of::<T>();
    #[inline(always)]
    fn run(self) {
        let len = self.len;
        let mut tree = RowTree::new(len);
        let (mut squares, mut scaled) = (vec![T::ZERO; len], Vec::new());
        let rows = self.x.chunks_exact(len).zip(self.y.chunks_exact_mut(len));
        let (mut residuals, mut sums) =
            (self.residual.map(|r| r.chunks_exact(len)), self.sums.chunks_exact_mut(len));
        for ((mut x, y), (mean, rstd)) in rows.zip(self.mean.iter_mut().zip(self.rstd)) {
            if let Some(residual) = residuals.as_mut().and_then(Iterator::next)
                && let Some(sum) = sums.next()
            {
                sum.iter_mut().zip(x.iter().zip(residual)).for_each(|(sum, (&x, &r))| *sum = x + r);
                x = sum;
            }
            let mut scale = 1.0;
            let (mut center, mut variance) = moments(x, self.centred, &mut tree, &mut squares);
            if variance * T::ZERO != T::ZERO {
                // The variance is infinite or NaN.
                scale = if T::DTYPE == DType::F64 { power_of_two(-600) } else { power_of_two(-100) };
                scaled.clear();
                scaled.extend(x.iter().map(|&x| x * T::of(scale)));
                x = &scaled;
                (center, variance) = moments(x, self.centred, &mut tree, &mut squares);
            }
            let sum = variance + T::of(self.eps * scale * scale);
            // Beside the variance 0 of large equal elements the scaled eps underflows.
            let spread = match sum == T::ZERO {
                true => T::of(self.eps).sqrt().recip() / T::of(scale),
                false => sum.sqrt().recip(),
            };
            (*mean, *rstd) = (center / T::of(scale), spread * T::of(scale));
            let (mean, rstd) = (center, spread);
            match (self.weight, self.bias) {
                (Some(w), Some(b)) => {
                    for ((y, &x), (&w, &b)) in y.iter_mut().zip(x).zip(w.iter().zip(b)) {
                        *y = ((x - mean) * rstd).mul_add(w, b);
                    }
                }
                (Some(w), None) => {
                    for ((y, &x), &w) in y.iter_mut().zip(x).zip(w) {
                        *y = (x - mean) * rstd * w;
                    }
                }
                (None, b) => {
                    for (i, (y, &x)) in y.iter_mut().zip(x).enumerate() {
                        let normal = (x - mean) * rstd;
                        *y = if let Some(b) = b { normal + b[i] } else { normal };
                    }
                }
            }
        }
    }
}

/// Returns a row's mean, or 0 if it is not `centred`, and the mean of the squared distances to it. It is not a closure,
/// because a closure would be compiled without the loop's instruction set.
#[inline(always)]
fn moments<T: Real>(x: &[T], centred: bool, tree: &mut RowTree<T>, squares: &mut [T]) -> (T, T) {
    let count = T::of(x.len() as f64);
    let mean = if centred { tree.fold::<SumReducer>(x) / count } else { T::ZERO };
    for (s, &x) in squares.iter_mut().zip(x) {
        *s = (x - mean) * (x - mean);
    }
    (mean, tree.fold::<SumReducer>(squares) / count)
}

/// Returns 2 to the power of an exponent that f64 has.
pub(super) fn power_of_two(exponent: i64) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}

/// Returns the shape of one number per row.
pub(super) fn statistics_shape(x: &Tensor) -> Shape {
    let mut shape = x.shape().clone();
    let last = shape.len() - 1;
    shape[last] = 1;
    shape
}

/// Refuses an input without rows, and weights that do not have its last extent and dtype.
pub(super) fn expect_rows(verb: &str, x: &Tensor, affine: &[Option<&Tensor>]) -> Result<()> {
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
