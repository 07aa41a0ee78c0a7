//! Joins that give the same bits in any order: of integers, which wrap, and of extremes.

use crate::num::real::Num;
use crate::sums::reducer::Reducer;
use crate::sums::row_terms::RowTerm;

/// Joins the terms of all elements, several side by side.
#[inline(always)]
pub(crate) fn in_any_order<X: RowTerm<T>, T: Num, F: Reducer<T>>(row: &[X::Element]) -> T {
    let mut node = F::PAD;
    let (blocks, rest) = row.as_chunks::<16>();
    if !blocks.is_empty() {
        let mut lanes = [F::PAD; 16];
        for block in blocks {
            for (lane, &x) in lanes.iter_mut().zip(block) {
                *lane = F::join(*lane, X::of(x));
            }
        }
        for lane in lanes {
            node = F::join(node, lane);
        }
    }
    for &x in rest {
        node = F::join(node, X::of(x));
    }
    node
}
