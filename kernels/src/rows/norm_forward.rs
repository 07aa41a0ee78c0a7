//! The normalisation of rows, with the sum before it if there is a residual.

use crate::element::DType;
use crate::isa::simd::{Isa, Kernel, dispatch};
use crate::loops::formulas::widest_of;
use crate::num::real::Real;
use crate::sums::reducer::SumReducer;
use crate::sums::tree::RowTree;
use crate::threads::parts::RowsMut;
use crate::threads::team::for_each_part;

/// Normalises all rows.
pub(super) fn normalise<T: Real>(call: NormForward<'_, T>) {
    let NormForward { x, residual, weight, bias, len, eps, centred, y, sums, mean, rstd } = call;
    let rows = |data, len| RowsMut { data, len };
    let sums = rows(sums, if residual.is_some() { len } else { 0 });
    let out = ((rows(y, len), sums), mean, rstd);
    for_each_part(x.len() / len, x.len(), out, |at, ((y, sums), mean, rstd)| {
        let elements = at.start * len..at.end * len;
        let (x, residual) = (&x[elements.clone()], residual.map(|r: &[T]| &r[elements]));
        let (y, sums) = (y.data, sums.data);
        dispatch(NormForward::<T> { x, residual, weight, bias, len, eps, centred, y, sums, mean, rstd });
    });
}

/// The normalisation of rows, around their means if it is `centred`. A row whose squares overflow is multiplied by a power of two
/// first, which changes no bit of any other row.
///
/// The rows are summed one after the other: sums of 16 rows together ([`RowTree::fold_rows`]) are no faster.
pub struct NormForward<'a, T> {
    /// The rows.
    pub x: &'a [T],
    /// Rows that are added to them first.
    pub residual: Option<&'a [T]>,
    /// The factors of a row's normalised elements.
    pub weight: Option<&'a [T]>,
    /// The numbers that are added to the elements of a row after that.
    pub bias: Option<&'a [T]>,
    /// The number of elements in a row, at least 1.
    pub len: usize,
    /// The number that is added to the variance.
    pub eps: f64,
    /// True for distances to a row's mean, false for its elements themselves.
    pub centred: bool,
    /// The results.
    pub y: &'a mut [T],
    /// The sums with the residual; empty without one.
    pub sums: &'a mut [T],
    /// The mean of each row; 0 if it is not `centred`.
    pub mean: &'a mut [T],
    /// `1 / sqrt(variance + eps)` of each row.
    pub rstd: &'a mut [T],
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
