//! A list of shapes in a fixed place.

use crate::tensor::Shape;

/// Words kept of a list: lengths and extents, as many whole shapes as fit.
const WORDS: usize = 24;

/// What is remembered of a list of shapes: all of it where it is short, its first shapes, length and a hash where not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shapes {
    /// The number of shapes.
    pub len: usize,
    /// Of all of them: lists that differ in one extent have different hashes.
    pub hash: u64,
    /// True where all are one shape, which then stands for all.
    pub alike: bool,
    words: [usize; WORDS],
    used: usize,
}

impl Shapes {
    pub const NONE: Shapes = Shapes { len: 0, hash: 0, alike: true, words: [0; WORDS], used: 0 };

    /// Replaces what is here.
    pub fn set<'a>(&mut self, shapes: impl Iterator<Item = &'a Shape>) {
        *self = Shapes::NONE;
        for shape in shapes {
            self.hash = shape.iter().fold(mix(self.hash, shape.len()), |h, &extent| mix(h, extent));
            let was_alike = self.alike;
            self.alike &= self.len == 0 || self.first_is(shape);
            if self.len == 0 {
                self.keep(shape);
            } else if !self.alike {
                if was_alike {
                    self.write_out();
                }
                if self.kept().count() == self.len {
                    self.keep(shape);
                }
            }
            self.len += 1;
        }
    }

    /// The shapes that are kept: all, or the first ones; one for all where they are alike.
    pub fn kept(&self) -> impl Iterator<Item = &[usize]> {
        let mut rest = &self.words[..self.used];
        std::iter::from_fn(move || {
            let (&len, after) = rest.split_first()?;
            let (shape, after) = after.split_at(len);
            rest = after;
            Some(shape)
        })
    }

    fn first_is(&self, shape: &Shape) -> bool {
        self.used > shape.len() && self.words[0] == shape.len() && self.words[1..=shape.len()] == shape[..]
    }

    /// True if there was room.
    fn keep(&mut self, shape: &[usize]) -> bool {
        let end = self.used + 1 + shape.len();
        if end > WORDS {
            return false;
        }
        self.words[self.used] = shape.len();
        self.words[self.used + 1..end].copy_from_slice(shape);
        self.used = end;
        true
    }

    /// The first shape, which stood for all so far, as often as there are shapes.
    fn write_out(&mut self) {
        let Some(first) = self.kept().next().map(Shape::from) else { return };
        let _ = (1..self.len).all(|_| self.keep(&first));
    }
}

/// Injective in either argument, so that a single difference always shows.
fn mix(h: u64, word: usize) -> u64 {
    (h.rotate_left(23) ^ (word as u64).wrapping_add(0x9e37_79b9_7f4a_7c15))
        .wrapping_mul(0xff51_afd7_ed55_8ccd)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(list: &[&[usize]]) -> (Vec<Vec<usize>>, usize, u64) {
        let shapes: Vec<Shape> = list.iter().map(|&s| Shape::from(s)).collect();
        let mut kept = Shapes::NONE;
        kept.set(shapes.iter());
        (kept.kept().map(<[usize]>::to_vec).collect(), kept.len, kept.hash)
    }

    #[test]
    fn short_lists_are_kept_whole_and_long_ones_begun() {
        assert_eq!(of(&[]).0, Vec::<Vec<usize>>::new());
        assert_eq!(of(&[&[], &[]]), (vec![vec![]], 2, of(&[&[], &[]]).2));
        assert_eq!(of(&[&[2usize, 3][..]; 5]).0, [[2, 3]]);
        assert_eq!(of(&[&[2, 3], &[2, 3], &[1, 3]]).0, [[2, 3], [2, 3], [1, 3]]);
        assert_eq!(of(&[&[1], &[], &[1]]).0, [vec![1], vec![], vec![1]]);
        let long: Vec<Vec<usize>> = (0..100).map(|i| vec![i, 7]).collect();
        let long: Vec<&[usize]> = long.iter().map(Vec::as_slice).collect();
        assert_eq!((of(&long).0.len(), of(&long).1), (8, 100));
        let alike_at_first = [vec![[4usize, 7]; 30], vec![[3, 7]]].concat();
        let alike_at_first: Vec<&[usize]> = alike_at_first.iter().map(|s| &s[..]).collect();
        assert_eq!(of(&alike_at_first).0, vec![[4, 7]; 8]);
        // More extents than there is room for.
        assert_eq!(of(&[&[1; 30]]).0.len(), 0);
    }

    #[test]
    fn one_extent_makes_another_hash() {
        let mut hashes: Vec<u64> = [
            &[&[2usize, 3][..], &[4]][..],
            &[&[2, 3], &[5]],
            &[&[2], &[3, 4]],
            &[&[2, 3, 4]],
            &[&[3, 2], &[4]],
            &[],
        ]
        .iter()
        .map(|list| of(list).2)
        .collect();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), 6);
    }
}
