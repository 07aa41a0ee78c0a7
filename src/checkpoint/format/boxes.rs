//! The test whether boxes cover a tensor once, in a time that grows as their number does.

use std::hash::{BuildHasher, RandomState};

/// The prime 2^61 - 1, modulo which weights are added and multiplied.
const PRIME: u64 = (1 << 61) - 1;

/// Returns true if boxes `(start, extents)`, which lie within a shape, cover it without overlap.
///
/// Each index of each dim has a random number; the weight of `start..end` is the difference of the numbers of `end` and
/// `start`, and that of a box the product over dims. Weights of boxes that cover the shape once add up to the shape's. Those
/// of other boxes do so with a probability of at most dims / 2^60, since the difference is a polynomial in the random numbers
/// that is not zero (Schwartz, 1980; Zippel, 1979). The numbers are new in each call, so no file can be made for them.
pub(in crate::checkpoint) fn cover_once<'a>(
    boxes: impl IntoIterator<Item = (&'a [usize], &'a [usize])>,
    shape: &[usize],
) -> bool {
    let random = RandomState::new();
    let number = |dim: usize, index: usize| random.hash_one((dim, index)) % PRIME;
    let weight = |(start, extents): (&[usize], &[usize])| {
        (0..shape.len()).fold(1, |product: u64, d| {
            let (from, to) = (number(d, start[d]), number(d, start[d] + extents[d]));
            times(product, (to + PRIME - from) % PRIME)
        })
    };
    let sum = boxes.into_iter().fold(0, |sum, of| (sum + weight(of)) % PRIME);
    sum == weight((&vec![0; shape.len()], shape))
}

fn times(a: u64, b: u64) -> u64 {
    (u128::from(a) * u128::from(b) % u128::from(PRIME)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    type Boxes = Vec<(Vec<usize>, Vec<usize>)>;

    fn covers(boxes: &Boxes, shape: &[usize]) -> bool {
        cover_once(boxes.iter().map(|(start, extents)| (&start[..], &extents[..])), shape)
    }

    /// All ways to put two boxes, and a third one, into small shapes, compared with a count of each element.
    #[test]
    fn boxes_cover_if_each_element_is_in_one() {
        let shape = [2, 3];
        let mut all: Boxes = Vec::new();
        for (a, b) in [(0, 1), (0, 2), (1, 2)] {
            for (c, d) in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)] {
                all.push((vec![a, c], vec![b - a, d - c]));
            }
        }
        let counted = |boxes: &Boxes| {
            (0..6).all(|at| {
                let is_in = |(start, len): &&(Vec<usize>, Vec<usize>)| {
                    (start[0]..start[0] + len[0]).contains(&(at / 3))
                        && (start[1]..start[1] + len[1]).contains(&(at % 3))
                };
                boxes.iter().filter(is_in).count() == 1
            })
        };
        let mut covering = 0;
        for a in &all {
            for b in &all {
                for c in &all {
                    let boxes = vec![a.clone(), b.clone(), c.clone()];
                    assert_eq!(covers(&boxes, &shape), counted(&boxes), "{boxes:?}");
                    covering += usize::from(counted(&boxes));
                }
            }
        }
        assert!(covering > 20, "{covering}");
        assert!(covers(&vec![(vec![], vec![])], &[]) && !covers(&vec![], &[]));
        assert!(covers(&vec![], &[0, 3]) && !covers(&vec![(vec![0], vec![3]), (vec![0], vec![3])], &[3]));
    }

    /// Boxes that all reach to the end of the first dim: comparing pairs took 19 seconds for an index of 5.5 MB.
    #[test]
    fn a_staircase_of_boxes_is_compared_once_each() {
        let n = 50_000;
        let mut boxes: Boxes = (0..n).map(|i| (vec![i, i], vec![n - i, 1])).collect();
        boxes.extend((1..n).map(|j| (vec![j - 1, j], vec![1, n - j])));
        // The element above the diagonal is in a row's box, those below in a column's.
        assert!(covers(&boxes, &[n, n]));
        boxes[7].0[1] += 1;
        assert!(!covers(&boxes, &[n, n]));
    }
}
