//! The kernel of sorting and of the largest or smallest elements of rows.

use std::ops::Range;

use half::{bf16, f16};

use super::key::{OrderEntry, OrderKey, Ordered};
use crate::element::Element;
use crate::isa::simd::{Isa, Kernel, dispatch};
use crate::memory::KernelList;

/// A list of entries of an element's key type.
type Entries<T> = KernelList<<<T as Ordered>::Key as OrderKey>::Entry>;

/// Orders ranges of rows. It keeps its buffers from one range to the next.
pub struct RowOrder<T: Ordered> {
    descending: bool,
    entries: Entries<T>,
    spare: Entries<T>,
}

/// An element type whose rows are put in order: every one.
///
/// ```
/// use isoshard_kernels::order::{Order, RowOrder};
/// let (mut values, mut indices) = ([0.0f32; 2], [0i64; 2]);
/// f32::write_in_order(&mut RowOrder::new(true), &[1.0, 3.0, 2.0], 0..3, 10, &mut values, &mut indices);
/// assert_eq!((values, indices), ([3.0, 2.0], [11, 12]));
/// ```
pub trait Order: Ordered + Element {
    /// Writes the first `values.len()` elements of `row[range]` in order, and their indices in `row` plus `base`.
    ///
    /// # Panics
    /// Panics if the range has fewer elements.
    fn write_in_order(
        order: &mut RowOrder<Self>,
        row: &[Self],
        range: Range<usize>,
        base: usize,
        values: &mut [Self],
        indices: &mut [i64],
    );
}

macro_rules! order {
    ($($t:ty)*) => {$(
        impl Order for $t {
            fn write_in_order(
                order: &mut RowOrder<$t>,
                row: &[$t],
                range: Range<usize>,
                base: usize,
                values: &mut [$t],
                indices: &mut [i64],
            ) {
                order.write(row, range, base, values, indices);
            }
        }
    )*};
}
order!(f32 f64 f16 bf16 i64 i32 u8 bool);

/// The length from which on a radix sort pays.
const RADIX_LEN: usize = 256;
/// The number of elements that are compared with the threshold at once.
const CHUNK: usize = 64;

impl<T: Ordered> RowOrder<T> {
    /// Creates it for ascending or descending order.
    pub fn new(descending: bool) -> RowOrder<T> {
        RowOrder { descending, entries: KernelList::new(), spare: KernelList::new() }
    }

    /// Writes the first `values.len()` elements of `row[range]` in order, and their indices in `row` plus `base`.
    fn write(&mut self, row: &[T], range: Range<usize>, base: usize, values: &mut [T], indices: &mut [i64]) {
        let (part, k) = (&row[range.clone()], values.len());
        if k == 0 {
            return;
        }
        if k < part.len() / 4 {
            self.select(part, k);
        } else {
            self.sort(part);
        }
        for ((value, index), entry) in values.iter_mut().zip(indices).zip(&*self.entries) {
            *value = part[entry.index()];
            *index = (base + range.start + entry.index()) as i64;
        }
    }

    /// Fills `entries` with all elements in order.
    fn sort(&mut self, part: &[T]) {
        self.entries.resize(part.len());
        dispatch(KeyLoop { part, descending: self.descending, out: &mut self.entries });
        if part.len() < RADIX_LEN {
            self.entries.sort_unstable();
            return;
        }
        // The radix sort of least significant digits first. It is stable, so entries of equal keys stay in the order
        // of their indices.
        let digits = (T::BITS / 8) as usize;
        let mut counts = [[0u32; 256]; 8];
        for entry in &*self.entries {
            for (d, counts) in counts[..digits].iter_mut().enumerate() {
                counts[entry.digit(8 * d as u32)] += 1;
            }
        }
        self.spare.resize(part.len());
        for (d, counts) in counts[..digits].iter_mut().enumerate() {
            let shift = 8 * d as u32;
            if counts[self.entries[0].digit(shift)] as usize == part.len() {
                continue;
            }
            let mut start = 0;
            for count in counts.iter_mut() {
                start += std::mem::replace(count, start);
            }
            let spare = &mut self.spare[..];
            for &entry in &*self.entries {
                let place = &mut counts[entry.digit(shift)];
                spare[*place as usize] = entry;
                *place += 1;
            }
            std::mem::swap(&mut self.entries, &mut self.spare);
        }
    }

    /// Fills `entries` with the first `k` elements in order.
    ///
    /// The loop keeps at most `room` candidates. If there are more, it drops all but the first `k`, and from then on
    /// skips elements that do not come before the last of these. An element with the key of the last one comes after
    /// it, because its index is larger.
    fn select(&mut self, part: &[T], k: usize) {
        let room = 2 * k + 2 * CHUNK;
        let mut threshold = <T::Key as OrderKey>::LARGEST;
        let (mut any, mut keys) = (true, [T::Key::default(); CHUNK]);
        self.entries.clear();
        for (c, chunk) in part.chunks(CHUNK).enumerate() {
            let keys = &mut keys[..chunk.len()];
            let before = dispatch(ChunkKeys { chunk, descending: self.descending, threshold, keys });
            if !(any || before) {
                continue;
            }
            for (i, &key) in keys.iter().enumerate() {
                if any || key < threshold {
                    self.entries.push(OrderEntry::new(key, c * CHUNK + i));
                }
            }
            if self.entries.len() > room - CHUNK {
                self.entries.select_nth_unstable(k - 1);
                self.entries.truncate(k);
                (threshold, any) = (self.entries[k - 1].key(), false);
            }
        }
        self.entries.sort_unstable();
        self.entries.truncate(k);
    }
}

/// Writes the entries of all elements.
struct KeyLoop<'a, T: Ordered> {
    part: &'a [T],
    descending: bool,
    out: &'a mut [<T::Key as OrderKey>::Entry],
}

impl<T: Ordered> Kernel for KeyLoop<'_, T> {
    type Out = ();
    const WIDEST: Isa = Isa::Avx2;
    #[inline(always)]
    fn run(self) {
        for (i, (out, &x)) in self.out.iter_mut().zip(self.part).enumerate() {
            let key = x.key();
            *out = OrderEntry::new(if self.descending { !key } else { key }, i);
        }
    }
}

/// Writes the keys of a chunk and returns true if one is below the threshold.
struct ChunkKeys<'a, T: Ordered> {
    chunk: &'a [T],
    descending: bool,
    threshold: T::Key,
    keys: &'a mut [T::Key],
}

impl<T: Ordered> Kernel for ChunkKeys<'_, T> {
    type Out = bool;
    const WIDEST: Isa = Isa::Avx2;
    #[inline(always)]
    fn run(self) -> bool {
        let mut below = false;
        for (key, &x) in self.keys.iter_mut().zip(self.chunk) {
            *key = if self.descending { !x.key() } else { x.key() };
            below |= *key < self.threshold;
        }
        below
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition: a stable sort by the comparison of elements.
    fn expected(row: &[f32], descending: bool) -> Vec<i64> {
        let mut order: Vec<usize> = (0..row.len()).collect();
        let below = |a: usize, b: usize| match (row[a].is_nan(), row[b].is_nan()) {
            (false, true) => true,
            (true, _) => false,
            _ => row[a] < row[b],
        };
        order.sort_by(|&a, &b| {
            let (a, b) = if descending { (b, a) } else { (a, b) };
            below(b, a).cmp(&below(a, b))
        });
        order.into_iter().map(|i| i as i64).collect()
    }

    #[test]
    fn orders_as_a_stable_sort_by_comparison() {
        for n in [0, 1, 2, 5, 63, 64, 255, 256, 300, 5000] {
            let value = |i: usize| match (i * 7919 + n) % 23 {
                0 => f32::NAN,
                1 => -0.0,
                2 => 0.0,
                3 => f32::NEG_INFINITY,
                k if k % 2 == 0 => ((i * 31) % 97) as f32 - 40.0,
                k => (i as f32).sin() * k as f32,
            };
            let row: Vec<f32> = (0..n).map(value).collect();
            for descending in [false, true] {
                let want = expected(&row, descending);
                let mut order = RowOrder::new(descending);
                for k in [0, 1, 2, 7, 50, n / 5, n / 2, n].into_iter().filter(|&k| k <= n) {
                    let (mut values, mut indices) = (vec![0.0; k], vec![0; k]);
                    order.write(&row, 0..n, 100, &mut values, &mut indices);
                    let found: Vec<i64> = indices.iter().map(|i| i - 100).collect();
                    assert_eq!(found, want[..k], "{n} {k} {descending}");
                    let copied = |(v, &i): (&f32, &i64)| v.to_bits() == row[i as usize].to_bits();
                    assert!(values.iter().zip(&found).all(copied));
                }
            }
        }
    }

    #[test]
    fn orders_every_key_size() {
        fn check<T: Ordered>(row: Vec<T>) {
            let mut order = RowOrder::<T>::new(false);
            let (mut values, mut indices) = (row.clone(), vec![0; row.len()]);
            order.write(&row, 0..row.len(), 0, &mut values, &mut indices);
            let after = |w: &[i64]| {
                let keys = (row[w[0] as usize].key(), row[w[1] as usize].key());
                keys.0 < keys.1 || (keys.0 == keys.1 && w[0] < w[1])
            };
            assert!(indices.windows(2).all(after));
        }
        let mixed = |i: i64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as i64);
        check((0..3000).map(mixed).collect());
        check((0..3000).map(|i| mixed(i) as i32).collect());
        check((0..3000).map(|i| mixed(i) as u8).collect());
        check((0..3000).map(|i| mixed(i) % 3 == 0).collect());
        check((0..3000).map(|i| f64::from_bits(mixed(i) as u64)).collect());
        check((0..3000).map(|i| half::bf16::from_bits(mixed(i) as u16)).collect());
    }
}
