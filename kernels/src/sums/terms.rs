//! Terms of sums: functions of each element and of a value, and their sums over rows.

use super::reducer::SumReducer;
use super::tree::RowTree;
use crate::element::Element;
use crate::isa::simd::{Isa, Kernel, dispatch};
use crate::num::real::Real;
use crate::threads::team::for_each_part;

/// The function of an element `x` and a value `w`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Term {
    /// `x - w`.
    Deviation,
    /// `(x - w)²`.
    SquaredDeviation,
    /// `e^(x - w)`.
    ExpDifference,
    /// `|x w|^p`: a product for whole `p` from 1 to 8, else `e^(p ln |x w|)`.
    Power(f64),
}

/// A type of terms: f32 or f64.
///
/// ```
/// use isoshard_kernels::sums::{Term, Terms};
/// let mut out = [0.0f32; 2];
/// f32::write_terms(Term::SquaredDeviation, &[1.0, 5.0], &[3.0, 2.0], &mut out);
/// assert_eq!(out, [4.0, 9.0]);
/// ```
pub trait Terms: Real {
    /// Writes the term of each element and its value in `with`.
    fn write_terms(term: Term, x: &[Self], with: &[Self], out: &mut [Self]);
}

/// An element type of rows whose terms are computed and summed in `A`: f32 in f32 or f64, and f64 in f64.
pub trait TermRows<A>: Element {
    /// Writes the sum of the terms of each row of `n` elements and its value in `with`, with the bits of all terms and then a sum.
    ///
    /// # Panics
    /// Panics if `n` is 0, or lengths do not fit each other.
    fn sum_term_rows(term: Term, x: &[Self], n: usize, with: &[A], out: &mut [A]);
}

macro_rules! terms {
    ($($a:ty: $($s:ty)*;)*) => {$(
        impl Terms for $a {
            fn write_terms(term: Term, x: &[$a], with: &[$a], out: &mut [$a]) {
                dispatch(TermLoop { term, x, with, out });
            }
        }

        $(
            impl TermRows<$a> for $s {
                fn sum_term_rows(term: Term, x: &[$s], n: usize, with: &[$a], out: &mut [$a]) {
                    sum_rows(term, x, n, with, out);
                }
            }
        )*
    )*};
}
terms! {
    f32: f32;
    f64: f32 f64;
}

fn sum_rows<S: Element, A: Real + From<S>>(term: Term, x: &[S], n: usize, with: &[A], out: &mut [A]) {
    for_each_part(out.len(), x.len(), out, |at, out| {
        dispatch(TermRowsLoop { term, x: &x[at.start * n..at.end * n], n, with: &with[at], out });
    });
}

/// The loop over one run of elements.
struct TermLoop<'a, A> {
    term: Term,
    x: &'a [A],
    with: &'a [A],
    out: &'a mut [A],
}

impl<A: Real> Kernel for TermLoop<'_, A> {
    type Out = ();
    const WIDEST: Isa = Isa::Avx2;
    #[inline(always)]
    fn run(self) {
        each_term(self.term, self.x.iter().zip(self.with).map(|(&x, &m)| (x, m)), self.out);
    }
}

/// Writes the term of each element and its value `m`.
#[inline(always)]
fn each_term<A: Real>(term: Term, operands: impl Iterator<Item = (A, A)>, out: &mut [A]) {
    let all = out.iter_mut().zip(operands);
    match term {
        Term::Deviation => all.for_each(|(o, (x, m))| *o = x - m),
        Term::SquaredDeviation => all.for_each(|(o, (x, m))| *o = (x - m) * (x - m)),
        Term::ExpDifference => all.for_each(|(o, (x, m))| *o = (x - m).exp()),
        Term::Power(2.0) => all.for_each(|(o, (x, m))| *o = (x * m) * (x * m)),
        Term::Power(p) if (1.0..=8.0).contains(&p) && p.fract() == 0.0 => {
            for (o, (x, m)) in all {
                let y = (x * m).abs();
                *o = (1..p as u32).fold(y, |product, _| product * y);
            }
        }
        Term::Power(p) => all.for_each(|(o, (x, m))| *o = (A::of(p) * (x * m).abs().ln()).exp()),
    }
}

/// The number of elements in a buffer that has several rows.
const ROWS_BUFFER: usize = 1024;

/// The loop over rows of `n` elements, each with its value in `with`.
struct TermRowsLoop<'a, S, A> {
    term: Term,
    x: &'a [S],
    n: usize,
    with: &'a [A],
    out: &'a mut [A],
}

impl<S: Copy, A: Real + From<S>> Kernel for TermRowsLoop<'_, S, A> {
    type Out = ();
    const WIDEST: Isa = Isa::Avx2;
    #[inline(always)]
    fn run(self) {
        let (n, rows) = (self.n, (ROWS_BUFFER / self.n).max(1));
        let mut tree = RowTree::<A>::new(n);
        let mut buffer = vec![A::ZERO; rows * n];
        let chunks = self.x.chunks(rows * n).zip(self.with.chunks(rows)).zip(self.out.chunks_mut(rows));
        for ((x, with), out) in chunks {
            for ((x, &m), terms) in x.chunks_exact(n).zip(with).zip(buffer.chunks_exact_mut(n)) {
                each_term(self.term, x.iter().map(|&x| (A::from(x), m)), terms);
            }
            tree.fold_rows::<SumReducer>(&buffer[..x.len()], out);
        }
    }
}
