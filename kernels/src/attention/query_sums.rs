//! Sums over queries: the nodes of the tree for the gradients of keys and values.

use std::ops::Range;

use smallvec::SmallVec;

use super::query_block::{BlockSum, Factors, QueryBlock, Stripe, masked_product};
use super::scratch::Scratch;
use crate::gemm::{BandedProduct, Gemm, MatRef};
use crate::isa::simd::{Kernel, dispatch};

/// The unfinished nodes of one sum, leftmost first: matrices `[keys, d]` for a range of keys, of whose rows only some are computed.
pub(super) struct UnfinishedNodes<'a, T> {
    /// The leftmost node, which becomes the sum. All zeros at first.
    out: &'a mut [T],
    /// The other nodes.
    room: &'a mut Vec<Scratch<T>>,
    /// The first key.
    first: usize,
    shape: (usize, usize),
    /// The computed rows of each node.
    rows: SmallVec<[Range<usize>; 16]>,
}

impl<'a, T: Gemm> UnfinishedNodes<'a, T> {
    pub(super) fn new(
        out: &'a mut [T],
        keys: &Range<usize>,
        d: usize,
        room: &'a mut Vec<Scratch<T>>,
    ) -> UnfinishedNodes<'a, T> {
        out.fill(T::ZERO);
        UnfinishedNodes { out, room, first: keys.start, shape: (keys.len(), d), rows: SmallVec::new() }
    }

    /// Adds the leaf `aᵀ b` of a block of queries, then joins the two topmost nodes `joins` times. The product itself
    /// performs the first join.
    ///
    /// Each range of leaves of keys comes with the rows that it is summed over: a node of the tree over the block's rows,
    /// since the others add zeros. With bands it comes with all rows, and they sum the rows that see a key.
    pub(super) fn push(
        &mut self,
        block: &QueryBlock,
        (seen_by, factors, bands): (&[Stripe], Factors, Option<&BandedProduct<T>>),
        (a, b): (&[T], MatRef<'_, T>),
        joins: u8,
    ) {
        let d = self.shape.1;
        if d == 0 {
            return;
        }
        if joins == 0 {
            self.rows.push(0..0);
        }
        let top = self.rows.len() - 1;
        let data = match top.checked_sub(1) {
            None => &mut *self.out,
            Some(i) => {
                if i == self.room.len() {
                    self.room.push(Scratch::new(self.shape.0 * d));
                }
                self.room[i].get()
            }
        };
        // The leftmost node has zeros in rows that are not computed.
        let zeroed = if top == 0 { None } else { Some(d) };
        // A block that sees none of these keys has none of their rows.
        let first = self.first;
        let own = if block.from < block.to { block.from - first..block.to - first } else { 0..0 };
        let whole = extend_rows(&mut self.rows[top], own.clone(), |rows| {
            if let Some(d) = zeroed {
                data[rows.start * d..rows.end * d].fill(T::ZERO);
            }
        });
        let onto = if whole { T::ONE } else { T::ZERO };
        let gaps = block.leaves.len() > 1;
        if !whole && gaps && top > 0 {
            data[own.start * d..own.end * d].fill(T::ZERO);
        }
        for Stripe { rows, leaves } in seen_by {
            let keys = block.keys_of(leaves.clone());
            let into = (&mut data[(keys.start - first) * d..], (d, 1));
            let (a, b) = (block.part(a, rows, keys).t(), b.rows(rows.start, rows.len()));
            masked_product((factors, bands), BlockSum::Queries(onto), a, b, into);
        }
        (1..joins).for_each(|_| self.join());
    }

    /// Joins the two topmost nodes.
    fn join(&mut self) {
        let d = self.shape.1;
        let rows = self.rows.pop().expect("two nodes");
        let left = self.rows.len() - 1;
        let (below, above) = self.room.split_at_mut(left);
        let data = match left.checked_sub(1) {
            None => &mut *self.out,
            Some(i) => below[i].get(),
        };
        let mut clear = |rows: Range<usize>| {
            if left > 0 {
                data[rows.start * d..rows.end * d].fill(T::ZERO);
            }
        };
        if !extend_rows(&mut self.rows[left], rows.clone(), &mut clear) {
            clear(rows.clone());
        }
        let right = &above[0].get()[rows.start * d..rows.end * d];
        dispatch(JoinNodes { left: &mut data[rows.start * d..], right });
    }
}

/// Widens the computed rows of a node so that they contain `more`, and calls `clear` with the rows that become new.
/// Returns false, and does not call it, if no row was computed before.
fn extend_rows(rows: &mut Range<usize>, more: Range<usize>, mut clear: impl FnMut(Range<usize>)) -> bool {
    if more.is_empty() {
        return !Range::is_empty(rows);
    }
    if Range::is_empty(rows) {
        *rows = more;
        return false;
    }
    if more.start < rows.start {
        clear(more.start..rows.start);
        rows.start = more.start;
    }
    if more.end > rows.end {
        clear(rows.end..more.end);
        rows.end = more.end;
    }
    true
}

/// The kernel that joins two nodes: adds the rows of `right` to those of `left`.
struct JoinNodes<'a, T> {
    left: &'a mut [T],
    right: &'a [T],
}

impl<T: Gemm> Kernel for JoinNodes<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        self.left.iter_mut().zip(self.right).for_each(|(l, &r)| *l = *l + r);
    }
}
