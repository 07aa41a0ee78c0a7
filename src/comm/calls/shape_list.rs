//! A list of shapes in a fixed amount of memory.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::bounded::at_most;
use crate::tensor::Shape;

/// Numbers kept per list: the rank and the extents of each shape, for as many whole shapes as fit.
const WORDS: usize = 24;

/// A list of shapes in a flight record: all of a short list; the first shapes, the length and a hash of a long one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "KeptShapes", try_from = "KeptShapes")]
pub struct ShapeList {
    len: usize,
    hash: u64,
    is_uniform: bool,
    words: [usize; WORDS],
    used: usize,
}

impl ShapeList {
    /// The empty list.
    pub(crate) const EMPTY: ShapeList =
        ShapeList { len: 0, hash: 0, is_uniform: true, words: [0; WORDS], used: 0 };

    /// Returns the number of shapes.
    #[allow(clippy::len_without_is_empty, reason = "the shapes are read by `kept`")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the i-th shape, if it was kept.
    pub(crate) fn at(&self, i: usize) -> Option<&[usize]> {
        let at = if self.is_uniform { 0 } else { i };
        if i < self.len { self.kept().nth(at) } else { None }
    }

    /// Returns the shapes that were kept: all or the first ones. Equal shapes are kept once.
    pub fn kept(&self) -> impl Iterator<Item = &[usize]> + Clone {
        let mut rest = &self.words[..self.used];
        std::iter::from_fn(move || {
            let (&len, after) = rest.split_first()?;
            let (shape, after) = after.split_at(len);
            rest = after;
            Some(shape)
        })
    }

    /// Replaces the list by `shapes`.
    pub(in crate::comm) fn set<'a>(&mut self, shapes: impl Iterator<Item = &'a Shape>) {
        *self = ShapeList::EMPTY;
        for shape in shapes {
            self.hash = shape.iter().fold(mix(self.hash, shape.len()), |h, &extent| mix(h, extent));
            let was_uniform = self.is_uniform;
            self.is_uniform &= self.len == 0 || self.first_is(shape);
            if self.len == 0 {
                self.keep(shape);
            } else if !self.is_uniform {
                if was_uniform {
                    self.write_out();
                }
                if self.kept().count() == self.len {
                    self.keep(shape);
                }
            }
            self.len += 1;
        }
    }

    fn first_is(&self, shape: &Shape) -> bool {
        self.used > shape.len() && self.words[0] == shape.len() && self.words[1..=shape.len()] == shape[..]
    }

    /// Appends a shape; returns false if there is no room.
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

    /// Writes out the first shape, which represented all so far, once per shape.
    fn write_out(&mut self) {
        let Some(first) = self.kept().next().map(Shape::from) else { return };
        let _ = (1..self.len).all(|_| self.keep(&first));
    }
}

/// A [`ShapeList`] as files hold it.
#[derive(Serialize, Deserialize)]
struct KeptShapes {
    len: usize,
    is_uniform: bool,
    #[serde(deserialize_with = "at_most::<WORDS, _, _>")]
    kept: Vec<Shape>,
    /// In hexadecimal digits, since some JSON readers have no 64-bit integers.
    hash: String,
}

impl From<ShapeList> for KeptShapes {
    fn from(list: ShapeList) -> KeptShapes {
        let kept = list.kept().map(Shape::from).collect();
        KeptShapes { len: list.len, is_uniform: list.is_uniform, kept, hash: format!("{:016x}", list.hash) }
    }
}

impl TryFrom<KeptShapes> for ShapeList {
    type Error = String;

    fn try_from(KeptShapes { len, is_uniform, kept, hash }: KeptShapes) -> Result<ShapeList, String> {
        let of = if is_uniform { len.min(1) } else { len };
        let hash = u64::from_str_radix(&hash, 16).map_err(|_| format!("no hash {hash:?}"))?;
        let mut list = ShapeList { len, hash, is_uniform, ..ShapeList::EMPTY };
        if kept.len() > of || !kept.iter().all(|shape| list.keep(shape)) {
            return Err(format!("{} shapes are more than a record keeps of {len}", kept.len()));
        }
        Ok(list)
    }
}

/// Writes `[2, 3]` if all shapes are equal, else `{[2, 3], [1, 3]}`, or `{[2, 3], [1, 3], 100 in all}` if only the
/// first few were kept.
impl fmt::Display for ShapeList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let len = if self.is_uniform && self.used > 0 { 1 } else { self.len };
        write_shapes(f, self.kept(), len)
    }
}

/// Writes a list of `len` shapes; `known` holds the first ones.
pub(super) fn write_shapes<'a>(
    f: &mut fmt::Formatter<'_>,
    known: impl Iterator<Item = &'a [usize]> + Clone,
    len: usize,
) -> fmt::Result {
    let known_len = known.clone().count();
    if let Some(first) = known.clone().next()
        && known_len == len
        && known.clone().all(|shape| shape == first)
    {
        return write!(f, "{first:?}");
    }
    f.write_str("{")?;
    for (i, shape) in known.enumerate() {
        write!(f, "{}{shape:?}", if i > 0 { ", " } else { "" })?;
    }
    if known_len < len {
        write!(f, "{}{len} in all", if known_len > 0 { ", " } else { "" })?;
    }
    f.write_str("}")
}

/// Mixes a number into a hash. Injective in either argument, so a single difference always changes the result.
fn mix(h: u64, word: usize) -> u64 {
    (h.rotate_left(23) ^ (word as u64).wrapping_add(0x9e37_79b9_7f4a_7c15))
        .wrapping_mul(0xff51_afd7_ed55_8ccd)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(list: &[&[usize]]) -> (Vec<Vec<usize>>, usize, u64) {
        let shapes: Vec<Shape> = list.iter().map(|&s| Shape::from(s)).collect();
        let mut kept = ShapeList::EMPTY;
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
        // The shape has more extents than fit.
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
