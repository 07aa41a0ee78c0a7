//! The reduction tree over a head's dim, as the kernels read it.

use bytemuck::{Pod, Zeroable};

use crate::tensor::{LEAF, SplitRule};

/// Returns the depth of the tree over `len` elements.
pub(super) fn depth(len: usize) -> u32 {
    SplitRule::Halves.depth(len, LEAF)
}

/// `struct Dim` in `kernels/cuda/attention.cuh`: up to 1024 elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct DimArg {
    pub len: u32,
    pub leaves: u32,
    /// The number of chunks that store it, at least 1.
    pub chunks: u32,
    /// 1 if every place equals the element's index, else 0.
    pub plain: u32,
    pub leaf: [LeafArg; 32],
}

/// `struct DimLeaf`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct LeafArg {
    /// The index of the first element.
    pub start: u16,
    /// The position at which the first element is stored: a multiple of four, such that the leaf does not cross the end
    /// of a chunk.
    pub place: u16,
    pub len: u8,
    /// The length in groups of four, rounded up.
    pub quads: u8,
    /// The number of joins after the leaf.
    pub joins: u8,
    pub unused: u8,
}

impl DimArg {
    pub(super) fn new(len: usize, chunk: usize) -> DimArg {
        let mut dim =
            DimArg { len: len as u32, leaves: 0, chunks: 1, plain: 1, leaf: [LeafArg::default(); 32] };
        if len > 0 {
            let end = dim.halve(0, len, 0, chunk);
            dim.chunks = end.div_ceil(chunk) as u32;
        }
        let leaves = &dim.leaf[..dim.leaves as usize];
        let plain = leaves.iter().all(|leaf| leaf.place == leaf.start && leaf.len % 4 == 0);
        DimArg { plain: u32::from(plain), ..dim }
    }

    /// Adds the leaves of `len` elements from `start` on, stored from `place` on, and returns the position after the
    /// last one.
    fn halve(&mut self, start: usize, len: usize, place: usize, chunk: usize) -> usize {
        if len > LEAF {
            let left = SplitRule::Halves.left_of(len);
            let mid = self.halve(start, left, place, chunk);
            let end = self.halve(start + left, len - left, mid, chunk);
            self.leaf[self.leaves as usize - 1].joins += 1;
            return end;
        }
        let quads = len.div_ceil(4);
        let place = if place % chunk + 4 * quads > chunk { place.next_multiple_of(chunk) } else { place };
        self.leaf[self.leaves as usize] = LeafArg {
            start: start as u16,
            place: place as u16,
            len: len as u8,
            quads: quads as u8,
            joins: 0,
            unused: 0,
        };
        self.leaves += 1;
        place + 4 * quads
    }
}

#[cfg(test)]
mod tests {
    use isoshard_kernels::merges;

    use super::*;

    #[test]
    fn leaves_are_those_of_the_tree() {
        for len in 0..=1024 {
            for chunk in [64, 128] {
                let dim = DimArg::new(len, chunk);
                let leaves = &dim.leaf[..dim.leaves as usize];
                let (mut start, mut place, mut waiting) = (0, 0, 0);
                let list = merges(len, LEAF);
                for leaf in leaves {
                    let (l, p, quads) =
                        (usize::from(leaf.len), usize::from(leaf.place), usize::from(leaf.quads));
                    assert!(
                        usize::from(leaf.start) == start
                            && p >= place
                            && p % 4 == 0
                            && l.div_ceil(4) == quads
                    );
                    assert!(p / chunk == (p + 4 * quads - 1) / chunk, "{len}: a leaf in one chunk");
                    (start, place) = (start + l, p + 4 * quads);
                    // The list also has the joins inside the leaf.
                    let joins = u32::from(list[start - 1]) - (l as u32 - 1).count_ones();
                    assert_eq!(u32::from(leaf.joins), joins, "{len}");
                    waiting = waiting + 1 - i32::from(leaf.joins);
                    assert!(waiting >= 1 && waiting - 1 <= depth(len) as i32);
                }
                assert_eq!((start, waiting), (len, i32::from(len > 0)));
                assert!(dim.chunks == 1 || place.div_ceil(chunk) == dim.chunks as usize);
                assert!(len > chunk || dim.chunks == 1, "{len} in a chunk of {chunk}");
            }
        }
        assert!(
            DimArg::new(96, 128).plain == 1
                && DimArg::new(33, 64).plain == 0
                && DimArg::new(30, 64).plain == 0
        );
    }
}
