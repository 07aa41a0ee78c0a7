//! The largest or the smallest element of rows. Any order of joins gives the same bits, so the loops keep several extremes
//! side by side and follow no tree.

use std::marker::PhantomData;

use crate::isa::simd::{Isa, Kernel, dispatch};
use crate::num::real::{Num, is_nan, select};
use crate::sums::lanes::{self, Lanes, LanesFold};
use crate::sums::leaves::RowStarts;
use crate::sums::reducer::{JoinOperation, MaxReducer, MinReducer, Reducer, SquareSumReducer, SumReducer};
use crate::sums::row_terms::{Elements, RowTerm, Squares};
use crate::sums::tree::RowTree;
use crate::sums::unordered::in_any_order;

/// A reduction of contiguous rows.
pub(crate) trait RowReducer<T: Num>: Reducer<T> {
    /// The terms that are joined.
    type Term: RowTerm<T>;
    /// True if any order of joins gives the same bits: of integers, which wrap, and of extremes.
    const ANY_ORDER: bool = !T::DTYPE.is_float() && !matches!(Self::OPERATION, JoinOperation::Other);

    /// Sets `out[i]` to the node of row `i` of `data`, which has the tree's length. It is not finished.
    #[inline(always)]
    fn fold_at(
        tree: &mut RowTree<T>,
        data: &[<Self::Term as RowTerm<T>>::Element],
        starts: RowStarts<'_>,
        out: &mut [T],
    ) {
        tree.fold_terms_at::<Self::Term, Self>(data, starts, out);
    }
}

/// The type of the elements whose terms `F` joins.
pub(crate) type RowElement<T, F> = <<F as RowReducer<T>>::Term as RowTerm<T>>::Element;

impl<T: Num> RowReducer<T> for SumReducer {
    type Term = Elements;
}

impl RowReducer<f64> for SquareSumReducer {
    type Term = Squares;
}

macro_rules! extreme_rows {
    ($($Type:ident)*) => {$(
        impl<T: Num> RowReducer<T> for $Type {
            type Term = Elements;
            const ANY_ORDER: bool = true;

            #[inline(always)]
            fn fold_at(tree: &mut RowTree<T>, data: &[T], starts: RowStarts<'_>, out: &mut [T]) {
                dispatch(ExtremeRows { data, len: tree.row_len(), starts, out, of: PhantomData::<$Type> });
            }
        }
    )*};
}
extreme_rows!(MaxReducer MinReducer);

/// The reduction to the largest or the smallest element.
pub(crate) trait Extreme<T: Num>: Reducer<T> {
    /// True for the largest.
    const MAX: bool;
}

impl<T: Num> Extreme<T> for MaxReducer {
    const MAX: bool = true;
}

impl<T: Num> Extreme<T> for MinReducer {
    const MAX: bool = false;
}

/// The elements of a row that are reduced at a time, and stay in the nearest cache.
const BLOCK: usize = 2048;

struct ExtremeRows<'a, T, F> {
    data: &'a [T],
    len: usize,
    starts: RowStarts<'a>,
    out: &'a mut [T],
    of: PhantomData<F>,
}

impl<T: Num, F: Extreme<T>> Kernel for ExtremeRows<'_, T, F> {
    type Out = ();
    /// The fast loop has its own vectors.
    const WIDEST: Isa = Isa::Baseline;
    #[inline(always)]
    fn run(self) {
        let ExtremeRows { data, len, starts, out, .. } = self;
        let isa = Isa::current();
        for (i, out) in out.iter_mut().enumerate() {
            let row = &data[starts.of(i)..][..len];
            *out = F::EMPTY;
            for block in row.chunks(BLOCK) {
                let extreme = match fast_extreme::<T, F>(isa, block) {
                    // Zeros of both signs are equal there.
                    Some(x) if !(T::DTYPE.is_float() && x == T::ZERO) => x,
                    _ => in_any_order::<Elements, T, F>(block),
                };
                *out = F::join(*out, extreme);
            }
        }
    }
}

/// Writes the node of two rows, joined with `node` if `INTO`.
#[inline(always)]
pub(crate) fn join2<T: Num, F: RowReducer<T>, const INTO: bool>(
    node: &mut [T],
    a: &[RowElement<T, F>],
    b: &[RowElement<T, F>],
) {
    for (n, (&a, &b)) in node.iter_mut().zip(a.iter().zip(b)) {
        let joint = F::join(F::Term::of(a), F::Term::of(b));
        *n = if INTO { F::join(*n, joint) } else { joint };
    }
}

/// Writes the node of four rows, joined with `node` if `INTO`.
#[inline(always)]
pub(crate) fn join4<T: Num, F: RowReducer<T>, const INTO: bool>(
    node: &mut [T],
    [a, b, c, d]: [&[RowElement<T, F>]; 4],
) {
    for (n, ((&a, &b), (&c, &d))) in node.iter_mut().zip(a.iter().zip(b).zip(c.iter().zip(d))) {
        let (a, b) = (F::Term::of(a), F::Term::of(b));
        let joint = F::join(F::join(a, b), F::join(F::Term::of(c), F::Term::of(d)));
        *n = if INTO { F::join(*n, joint) } else { joint };
    }
}

/// Returns the extreme of `x`, whose sign is any if it is a zero, or `None` if an element is NaN.
pub(crate) fn fast_extreme<T: Num, F: Extreme<T>>(isa: Isa, x: &[T]) -> Option<T> {
    let mut extreme = None;
    lanes::run::<T, F, _>(isa, 0, FastExtreme { x, extreme: &mut extreme });
    extreme
}

struct FastExtreme<'a, T> {
    x: &'a [T],
    extreme: &'a mut Option<T>,
}

impl<T: Num, F: Extreme<T>> LanesFold<T, F> for FastExtreme<'_, T> {
    const JOINS_LEAVES: bool = false;

    #[inline(always)]
    fn run<L: Lanes<N>, const N: usize>(self, lanes: L) {
        let mut best = [[F::EMPTY; N]; 4];
        let mut marks = [[T::ZERO; N]; 2];
        let (vectors, rest) = self.x.as_chunks::<N>();
        let (fours, vectors) = vectors.as_chunks::<4>();
        for four in fours {
            for (best, x) in best.iter_mut().zip(four) {
                *best = beyond::<T, F, L, N>(lanes, *x, *best);
            }
            marks[0] = lanes.mark_nan(four[0], four[1], marks[0]);
            marks[1] = lanes.mark_nan(four[2], four[3], marks[1]);
        }
        let [mut all, b, c, d] = best;
        for &x in [b, c, d].iter().chain(vectors) {
            all = beyond::<T, F, L, N>(lanes, x, all);
        }
        let [mut nan, more] = marks;
        nan = vectors.iter().fold(nan, |nan, &x| lanes.mark_nan(x, x, nan));
        let mut extreme = F::EMPTY;
        for &x in all.iter().chain(rest) {
            extreme = select(if F::MAX { x > extreme } else { x < extreme }, x, extreme);
        }
        let marked = nan.iter().chain(&more).any(|&mark| mark != T::ZERO);
        let has_nan = marked | rest.iter().any(|&x| is_nan(x));
        *self.extreme = if has_nan { None } else { Some(extreme) };
    }
}

#[inline(always)]
fn beyond<T: Num, F: Extreme<T>, L: Lanes<N>, const N: usize>(lanes: L, x: [T; N], best: [T; N]) -> [T; N] {
    if F::MAX { lanes.beyond::<T, true>(x, best) } else { lanes.beyond::<T, false>(x, best) }
}

/// The number of elements that are compared before a loop may end.
const COMPARED: usize = 32;

/// Returns the index of the first element with a property.
#[inline(always)]
pub(crate) fn first_with<T: Copy>(x: &[T], has: impl Fn(T) -> bool) -> Option<usize> {
    let (blocks, _) = x.as_chunks::<COMPARED>();
    let found = blocks.iter().position(|block| block.iter().fold(false, |any, &x| any | has(x)));
    let start = found.unwrap_or(blocks.len()) * COMPARED;
    x[start..].iter().position(|&x| has(x)).map(|i| start + i)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Isa, with_isa};

    /// Compares rows that begin anywhere with joins in order.
    fn check<T: Num, F: Extreme<T> + RowReducer<T, Term = Elements>>(x: &[T], bits: impl Fn(T) -> u64) {
        for len in (0..200).chain([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 77]) {
            let starts = RowStarts::Strided { first: 1, stride: 7 };
            for &isa in Isa::available() {
                let mut got = vec![T::ZERO; 25];
                with_isa(isa, || F::fold_at(&mut RowTree::new(len), x, starts, &mut got));
                for (i, &got) in got.iter().enumerate() {
                    let want = x[starts.of(i)..][..len].iter().fold(F::EMPTY, |node, &x| F::join(node, x));
                    assert_eq!(bits(F::finish(got)), bits(F::finish(want)), "row {i} of {len}, {isa:?}");
                }
            }
        }
    }

    #[test]
    fn extremes_have_the_bits_of_joins_in_order() {
        let kinds: [fn(usize) -> f32; 5] = [
            |i| (i * 7919 % 1009) as f32 - 500.0,
            |i| if i.is_multiple_of(97) { f32::from_bits(0xffc0_0042) } else { i as f32 },
            |i| if (i * 31).is_multiple_of(83) { 0.0 } else { -0.0 },
            |i| if i.is_multiple_of(2) { f32::NEG_INFINITY } else { f32::INFINITY },
            |i| if i % 300 < 200 { f32::NEG_INFINITY } else { -0.0 },
        ];
        for kind in kinds {
            let x: Vec<f32> = (0..3 * BLOCK).map(kind).collect();
            check::<f32, MaxReducer>(&x, |x| x.to_bits().into());
            check::<f32, MinReducer>(&x, |x| x.to_bits().into());
            let x: Vec<f64> = x.into_iter().map(f64::from).collect();
            check::<f64, MaxReducer>(&x, f64::to_bits);
            check::<f64, MinReducer>(&x, f64::to_bits);
        }
        let x: Vec<i64> = (0..3 * BLOCK as i64).map(|i| i * 7919 % 1009 - 500).collect();
        check::<i64, MaxReducer>(&x, |x| x as u64);
        check::<i64, MinReducer>(&x, |x| x as u64);
        let x: Vec<u8> = x.into_iter().map(|x| x as u8).collect();
        check::<u8, MinReducer>(&x, u64::from);
    }

    #[test]
    fn the_first_is_found() {
        for len in [0, 1, 31, 32, 33, 100] {
            for at in 0..len {
                let x: Vec<usize> = (0..len).map(|i| usize::from(i >= at)).collect();
                assert_eq!(first_with(&x, |x| x == 1), Some(at));
            }
            assert_eq!(first_with(&vec![0; len], |x| x == 1), None);
        }
    }
}
