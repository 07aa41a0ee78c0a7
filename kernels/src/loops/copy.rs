//! Copies between strided layouts.

use bytemuck::Pod;

use crate::Dims;
use crate::element::{DType, Element};
use crate::threads::parts::Cut;
use crate::threads::team::for_each_part;

/// Returns the bytes of a new buffer as elements of the type for which it was allocated.
///
/// # Panics
/// Panics if the bytes are not aligned for the type, or are to be bools and are not all 0 or 1.
pub fn as_elements_mut<T: Element>(bytes: &mut [u8]) -> &mut [T] {
    let len = bytes.len() / T::DTYPE.size_bytes();
    assert!((bytes.as_ptr() as usize).is_multiple_of(align_of::<T>()), "a buffer is aligned for its dtype");
    // A new buffer of bools is zeroed. The largest byte is found by vectors, and a search for another byte would not be.
    assert!(
        T::DTYPE != DType::Bool || bytes.iter().fold(0, |max, &byte| byte.max(max)) < 2,
        "bools are 0 or 1"
    );
    // SAFETY: the slice is aligned, has the length of the bytes, and keeps their exclusive borrow. Every bit pattern is
    // an element; bools were looked at above.
    unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), len) }
}

/// Copies elements of `size` bytes from one strided layout to another of the same shape.
///
/// `src` and `dst` are the buffers' bytes from the first element on, with the strides in elements. Neighbouring dims
/// that can be merged into one on both sides are merged first, so contiguous blocks are copied as whole slices.
pub fn copy_strided(size: usize, shape: &[usize], src: (&[u8], &[usize]), dst: (&mut [u8], &[usize])) {
    match size {
        1 => copy_as::<u8>(shape, src, dst),
        2 => copy_as::<u16>(shape, src, dst),
        4 => copy_as::<u32>(shape, src, dst),
        8 => copy_as::<u64>(shape, src, dst),
        _ => unreachable!("no element has {size} bytes"),
    }
}

fn copy_as<T: Pod + Default + Send + Sync>(
    shape: &[usize],
    src: (&[u8], &[usize]),
    dst: (&mut [u8], &[usize]),
) {
    let src = (bytemuck::cast_slice::<u8, T>(src.0), src.1);
    let dst = (bytemuck::cast_slice_mut::<u8, T>(dst.0), dst.1);
    if shape.iter().product::<usize>() == 0 {
        return;
    }
    let (mut n, mut s, mut d) = (Dims::new(), Dims::new(), Dims::new());
    for k in (0..shape.len()).rev().filter(|&k| shape[k] != 1) {
        match n.last().copied() {
            Some(inner) if src.1[k] == s[s.len() - 1] * inner && dst.1[k] == d[d.len() - 1] * inner => {
                *n.last_mut().expect("just seen") *= shape[k];
            }
            _ => {
                n.push(shape[k]);
                s.push(src.1[k]);
                d.push(dst.1[k]);
            }
        }
    }
    // From here on dims are innermost first.
    if n.is_empty() {
        dst.0[0] = src.0[0];
        return;
    }
    let top = n.len() - 1;
    let inner: usize = n[..top].iter().product();
    // Rows of the outermost dim that lie one after the other can be written by different threads.
    let last = (0..top).map(|k| (n[k] - 1) * d[k]).sum::<usize>();
    if d[top] <= last {
        return copy_level(top, &n, (src.0, &s), (dst.0, &d));
    }
    let rows = CopiedRows { data: dst.0, step: d[top] };
    for_each_part(n[top], n[top] * inner / 2, rows, |at, rows| {
        let mut n = n.clone();
        n[top] = at.len();
        copy_level(top, &n, (&src.0[at.start * s[top]..], &s), (rows.data, &d));
    });
}

/// The rows of a destination: the last one may be shorter than the step from row to row.
struct CopiedRows<'a, T> {
    data: &'a mut [T],
    step: usize,
}

impl<T: Send> Cut for CopiedRows<'_, T> {
    fn cut(self, at: usize) -> (Self, Self) {
        let (head, tail) = self.data.split_at_mut((at * self.step).min(self.data.len()));
        (CopiedRows { data: head, step: self.step }, CopiedRows { data: tail, step: self.step })
    }
}

/// Copies the dims up to `level`, innermost first.
fn copy_level<T: Pod + Default>(level: usize, n: &[usize], src: (&[T], &[usize]), dst: (&mut [T], &[usize])) {
    let (s, d) = (src.1[level], dst.1[level]);
    if level > 1 || (level == 1 && (src.1[0] == 1 && dst.1[0] == 1)) {
        for i in 0..n[level] {
            copy_level(level - 1, n, (&src.0[i * s..], src.1), (&mut dst.0[i * d..], dst.1));
        }
        return;
    }
    if level == 1 {
        return copy_tile((n[1], n[0]), (src.0, (s, src.1[0])), (dst.0, (d, dst.1[0])));
    }
    match (s, d) {
        (1, 1) => dst.0[..n[0]].copy_from_slice(&src.0[..n[0]]),
        (0, 1) => dst.0[..n[0]].fill(src.0[0]),
        _ => {
            for i in 0..n[0] {
                dst.0[i * d] = src.0[i * s];
            }
        }
    }
}

/// Copies a matrix in square tiles. If one side is contiguous along rows and the other along columns, a tile is copied
/// through a small buffer. So each cache line of both sides is touched once, even if the strides map many lines to one
/// set of the cache.
fn copy_tile<T: Pod + Default>(
    (rows, cols): (usize, usize),
    (src, (sr, sc)): (&[T], (usize, usize)),
    (dst, (dr, dc)): (&mut [T], (usize, usize)),
) {
    const TILE: usize = 16;
    let transposed = sr == 1 && dc == 1;
    let mut tile = [[T::default(); TILE]; TILE];
    for r0 in (0..rows).step_by(TILE) {
        for c0 in (0..cols).step_by(TILE) {
            let (height, width) = (TILE.min(rows - r0), TILE.min(cols - c0));
            if transposed && height == TILE && width == TILE {
                for (c, line) in tile.iter_mut().enumerate() {
                    line.copy_from_slice(&src[r0 + (c0 + c) * sc..][..TILE]);
                }
                for r in 0..TILE {
                    let line: &mut [T] = &mut dst[(r0 + r) * dr + c0..][..TILE];
                    for (x, column) in line.iter_mut().zip(&tile) {
                        *x = column[r];
                    }
                }
                continue;
            }
            for r in r0..r0 + height {
                for c in c0..c0 + width {
                    dst[r * dr + c * dc] = src[r * sr + c * sc];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    /// Any other byte as a `bool` would be undefined behaviour.
    #[test]
    #[should_panic(expected = "bools are 0 or 1")]
    fn other_bytes_are_no_bools() {
        super::as_elements_mut::<bool>(&mut [0, 1, 2]);
    }

    #[test]
    fn transposes_at_odd_sizes() {
        for (m, n) in [(1, 1), (3, 40), (16, 16), (33, 50), (100, 17)] {
            let x: Vec<i32> = (0..(2 * m * n) as i32).collect();
            let mut got = vec![0i32; x.len()];
            let (src, dst) = (bytemuck::cast_slice(&x), bytemuck::cast_slice_mut(&mut got));
            super::copy_strided(4, &[2, n, m], (src, &[m * n, 1, n]), (dst, &[m * n, m, 1]));
            let at = |i: usize| ((i / (m * n)) * m * n + i % m * n + i / m % n) as i32;
            assert_eq!(got, (0..2 * m * n).map(at).collect::<Vec<_>>(), "{m} {n}");
        }
    }
}
