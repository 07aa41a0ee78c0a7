//! A head's rows of keys or values, copied once for the products of all blocks of queries.

use std::ops::Range;

use super::query_block::{QueryBlock, Scratch};
use crate::tensor::LEAF;
use crate::tensor::cpu::{Gemm, MatRef, packs_lines};

/// Returns the keys that some of these blocks compute, and those between.
fn computed_keys<'b>(blocks: impl Iterator<Item = &'b QueryBlock>) -> Range<usize> {
    let ranges = blocks.filter(|block| block.from < block.to).map(|block| block.from..block.to);
    ranges.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
}

/// A head's rows of keys, for products of several blocks of queries. Rows at distances for which each product would pack
/// them are copied next to each other. (Copies of other rows gained nothing in training on an Intel Xeon.)
pub(super) struct NeighbouringRows<'a, T> {
    copy: Option<Scratch<T>>,
    keys: Range<usize>,
    step: usize,
    /// The most keys of a block; 0 for a single block, which reads rows once, where they are.
    widest: usize,
    /// The head, if its rows are read where they are.
    head: Option<MatRef<'a, T>>,
}

impl<'a, T: Gemm> NeighbouringRows<'a, T> {
    /// Returns no rows yet, for these blocks and rows of `d` elements.
    pub(super) fn new<'b>(blocks: impl ExactSizeIterator<Item = &'b QueryBlock> + Clone, d: usize) -> Self {
        let line = 64 / size_of::<T>();
        let widest = blocks.clone().map(|block| block.to - block.from).max().unwrap_or(0);
        let widest = if blocks.len() > 1 && d > 0 { widest } else { 0 };
        let lines = d.next_multiple_of(line);
        let step = if packs_lines(widest, lines * size_of::<T>()) { lines + line } else { lines };
        NeighbouringRows { copy: None, keys: computed_keys(blocks), step, widest, head: None }
    }

    /// Takes the rows of another head.
    pub(super) fn fill(&mut self, x: MatRef<'a, T>) {
        if !packs_lines(self.widest, x.strides().0 * size_of::<T>()) {
            self.head = Some(x);
            return;
        }
        let copy = self.copy.get_or_insert_with(|| Scratch::new(self.keys.len() * self.step));
        T::copy_rows(x.rows(self.keys.start, self.keys.len()), self.step, copy.get());
        self.head = None;
    }

    /// Returns the rows of some keys.
    pub(super) fn rows(&self, keys: Range<usize>, d: usize) -> MatRef<'_, T> {
        match (self.head, &self.copy) {
            (Some(head), _) => head.rows(keys.start, keys.len()),
            (None, Some(copy)) => {
                let data = &copy.view()[(keys.start - self.keys.start) * self.step..];
                MatRef::new(data, (keys.len(), d), (self.step, 1)).expect("copied rows")
            }
            (None, None) => unreachable!("the rows are filled before they are read"),
        }
    }
}

/// The rows of keys as columns: the matrix `[d, keys]` with contiguous rows, which products read without packing it again
/// for each block of queries. It has the keys that some of these blocks compute.
pub(super) struct TransposedRows<T> {
    data: Scratch<T>,
    keys: Range<usize>,
    d: usize,
    step: usize,
}

impl<T: Gemm> TransposedRows<T> {
    /// Returns room for rows of `d` elements.
    pub(super) fn new<'b>(blocks: impl Iterator<Item = &'b QueryBlock>, d: usize) -> Self {
        let keys = computed_keys(blocks);
        // Whole leaves and one cache line: an odd number of lines, so that neighbouring rows are in different sets of a
        // cache.
        let step = keys.len().next_multiple_of(LEAF) + 64 / size_of::<T>();
        TransposedRows { data: Scratch::new(d * step), keys, d, step }
    }

    /// Copies the rows of a head's keys; those that follow up to a whole leaf are zeros.
    pub(super) fn fill(&mut self, x: MatRef<'_, T>) {
        assert_eq!(x.shape().1, self.d, "rows for which there is room");
        if self.d > 0 && !self.keys.is_empty() {
            T::copy_rows(x.rows(self.keys.start, self.keys.len()).t(), self.step, self.data.get());
        }
    }

    /// Returns the columns of the leaves of some keys: whole leaves from `keys.start` on.
    pub(super) fn whole_columns(&self, keys: Range<usize>) -> MatRef<'_, T> {
        let (data, len) = (self.data.view(), keys.len().next_multiple_of(LEAF));
        let data = &data[(keys.start - self.keys.start).min(data.len())..];
        MatRef::new(data, (self.d, len), (self.step, 1)).expect("whole leaves")
    }
}

#[cfg(test)]
mod tests {
    use super::super::CpuAttention;
    use super::*;
    use crate::tensor::Tensor;

    /// Rows of one head next to each other are read where they are, those between other heads' are copied.
    #[test]
    fn results_do_not_depend_on_the_distance_of_rows() {
        let [heads, keys, d] = [4, 170, 64];
        for queries in [keys, 1] {
            let noise = |salt: usize, rows: usize| {
                Tensor::build([1, heads, rows, d], |out: &mut [f32]| {
                    out.iter_mut()
                        .enumerate()
                        .for_each(|(i, x)| *x = ((i * 7919 + salt) % 1009) as f32 / 500.0 - 1.0)
                })
            };
            let [q, k, v] = [(1, queries), (2, keys), (3, keys)].map(|(salt, rows)| noise(salt, rows));
            let side_by_side =
                |x: &Tensor| x.transpose(1, 2).and_then(|x| x.packed().transpose(1, 2)).expect("four dims");
            let call = CpuAttention::causal("attention", keys - queries, 0.2);
            let run = |[q, k, v]: [&Tensor; 3]| {
                let (o, lse) = call.forward(q, k, v).expect("operands that fit");
                let gradients = call.backward([q, k, v], (&o, &lse), &o).expect("operands that fit");
                [&o, &lse].into_iter().chain(&gradients).map(Tensor::to_f64_vec).collect::<Vec<_>>()
            };
            let apart = [&q, &k, &v].map(side_by_side);
            assert!(packs_lines(keys, apart[1].strides()[2] * 4) && !packs_lines(keys, d * 4));
            assert_eq!(run([&q, &k, &v]), run(apart.each_ref()), "{queries} queries");
        }
    }
}
