//! Rows of cross entropies, with a class or with probabilities, and of their derivatives.

use crate::isa::simd::{Isa, Kernel, dispatch};
use crate::loops::formulas::widest_of;
use crate::num::real::Real;
use crate::sums::reducer::SumReducer;
use crate::sums::tree::RowTree;

/// A type of the arithmetic of cross entropies: f32 or f64.
///
/// ```
/// use isoshard_kernels::rows::CrossEntropyRows;
/// let mut out = [0.0f64; 2];
/// f64::shares(&[5.0, f64::NEG_INFINITY], 5.0, 0.5, &mut out);
/// assert_eq!(out, [0.5, 0.0]);
/// ```
pub trait CrossEntropyRows: Real {
    /// Computes `exp(x - m)` of each element and its `m`.
    fn exp_differences(x: &[Self], m: &[Self], out: &mut [Self]);
    /// Computes `exp(x - m) * share` of a row.
    fn shares(x: &[Self], m: Self, share: Self, out: &mut [Self]);
    /// Returns `exp(x - m) * share`, with the bits of [`shares`](Self::shares).
    fn share(x: Self, m: Self, share: Self) -> Self;
    /// Computes the losses of rows with probabilities.
    ///
    /// # Panics
    /// Panics if lengths do not fit each other.
    fn soft_losses(rows: SoftRows<'_, Self>);
    /// Computes the gradients of the logits of rows with probabilities.
    ///
    /// # Panics
    /// Panics if lengths do not fit each other.
    fn soft_gradients(rows: SoftGradientRows<'_, Self>);
}

macro_rules! cross_entropy_rows {
    ($($t:ty)*) => {$(
        impl CrossEntropyRows for $t {
            fn exp_differences(x: &[$t], m: &[$t], out: &mut [$t]) {
                dispatch(ExpDifferences { x, m, out });
            }

            fn shares(x: &[$t], m: $t, share: $t, out: &mut [$t]) {
                dispatch(Shares { x, m, share, out });
            }

            fn share(x: $t, m: $t, share: $t) -> $t {
                share_at(x, m, share)
            }

            fn soft_losses(rows: SoftRows<'_, $t>) {
                dispatch(rows);
            }

            fn soft_gradients(rows: SoftGradientRows<'_, $t>) {
                dispatch(rows);
            }
        }
    )*};
}
cross_entropy_rows!(f32 f64);

/// The losses of rows, `sum(q (ln(s) - (x - m)))`, with probabilities `q`.
pub struct SoftRows<'a, A> {
    /// The logits.
    pub x: &'a [A],
    /// The probabilities.
    pub q: &'a [A],
    /// The distance of the rows of `q`: `len`, or 0 if one row stands for all.
    pub step: usize,
    /// The maximum of each row.
    pub m: &'a [A],
    /// The sum of exponentials of each row.
    pub s: &'a [A],
    /// The number of elements in a row, at least 1.
    pub len: usize,
    /// The losses.
    pub out: &'a mut [A],
}

impl<A: Real> Kernel for SoftRows<'_, A> {
    type Out = ();
    const WIDEST: Isa = widest_of::<A>();
    #[inline(always)]
    fn run(self) {
        let len = self.len;
        let mut tree = RowTree::new(len);
        let mut terms = vec![A::ZERO; len];
        for (r, (x, out)) in self.x.chunks_exact(len).zip(self.out).enumerate() {
            let (q, m, log) = (&self.q[r * self.step..][..len], self.m[r], self.s[r].ln());
            for (term, (&x, &q)) in terms.iter_mut().zip(x.iter().zip(q)) {
                let loss = q * (log - (x - m));
                *term = if q == A::ZERO { A::ZERO } else { loss };
            }
            *out = tree.fold::<SumReducer>(&terms);
        }
    }
}

/// The gradients of the losses of rows with probabilities `q`.
pub struct SoftGradientRows<'a, A> {
    /// The logits.
    pub x: &'a [A],
    /// The probabilities.
    pub q: &'a [A],
    /// The distance of the rows of `q`: `len`, or 0 if one row stands for all.
    pub step: usize,
    /// The rows' maxima, sums of exponentials and gradients of their losses.
    pub statistics: [&'a [A]; 3],
    /// The sum of each row of `q`; `None` for `number`.
    pub sums: Option<&'a [A]>,
    /// The sum of every row of `q` without `sums`.
    pub number: A,
    /// The number of elements in a row, at least 1.
    pub len: usize,
    /// The gradients of the logits.
    pub out: &'a mut [A],
}

impl<A: Real> Kernel for SoftGradientRows<'_, A> {
    type Out = ();
    const WIDEST: Isa = widest_of::<A>();
    #[inline(always)]
    fn run(self) {
        let len = self.len;
        for (r, (x, out)) in self.x.chunks_exact(len).zip(self.out.chunks_exact_mut(len)).enumerate() {
            let [m, s, dy] = self.statistics;
            let (m, s, dy) = (m[r], s[r], dy[r]);
            let q = &self.q[r * self.step..][..len];
            let share = dy * self.sums.map_or(self.number, |sums| sums[r]) / s;
            for (out, (&x, &q)) in out.iter_mut().zip(x.iter().zip(q)) {
                *out = (x - m).exp() * share - dy * q;
            }
        }
    }
}

/// The kernel that computes `exp(x - m)`.
struct ExpDifferences<'a, A> {
    x: &'a [A],
    m: &'a [A],
    out: &'a mut [A],
}

impl<A: Real> Kernel for ExpDifferences<'_, A> {
    type Out = ();
    const WIDEST: Isa = widest_of::<A>();
    #[inline(always)]
    fn run(self) {
        for (out, (&x, &m)) in self.out.iter_mut().zip(self.x.iter().zip(self.m)) {
            *out = (x - m).exp();
        }
    }
}

/// Computes `exp(x - m) * share`. The function is generic because `.exp()` on an f32 would call the standard library's.
#[inline(always)]
fn share_at<A: Real>(x: A, m: A, share: A) -> A {
    (x - m).exp() * share
}

/// The kernel for one piece of a row.
struct Shares<'a, A> {
    x: &'a [A],
    m: A,
    share: A,
    out: &'a mut [A],
}

impl<A: Real> Kernel for Shares<'_, A> {
    type Out = ();
    const WIDEST: Isa = widest_of::<A>();
    #[inline(always)]
    fn run(self) {
        for (out, &x) in self.out.iter_mut().zip(self.x) {
            *out = share_at(x, self.m, self.share);
        }
    }
}
