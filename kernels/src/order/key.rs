//! Integer keys whose order is that of elements, and entries that join a key with an index.

use bytemuck::Pod;
use half::{bf16, f16};

use crate::element::Element;

/// An element with a key: an unsigned integer that is smaller for a smaller element. Equal elements, among them zeros of
/// both signs, have equal keys; NaN has the largest.
pub trait Ordered: Element {
    /// The type of keys, u32 or u64.
    type Key: OrderKey;
    /// The number of the key's lower bits that differ between elements.
    const BITS: u32;
    /// Returns the key.
    fn key(self) -> Self::Key;
}

/// A key, which an index extends to an entry.
pub trait OrderKey: Copy + Ord + Default + std::ops::Not<Output = Self> {
    /// The largest key.
    const LARGEST: Self;
    /// A key above an index. Entries are ordered by key, then by index, so no two are equal.
    type Entry: OrderEntry<Key = Self>;
}

/// A key and an index below 2^32 in one integer.
pub trait OrderEntry: Ord + Pod {
    /// The type of the key.
    type Key;
    /// Joins a key and an index.
    fn new(key: Self::Key, index: usize) -> Self;
    /// Returns the key.
    fn key(self) -> Self::Key;
    /// Returns the index.
    fn index(self) -> usize;
    /// Returns 8 bits of the key, from bit `shift` on.
    fn digit(self, shift: u32) -> usize;
}

macro_rules! entry {
    ($key:ty, $entry:ty) => {
        impl OrderKey for $key {
            const LARGEST: $key = <$key>::MAX;
            type Entry = $entry;
        }

        impl OrderEntry for $entry {
            type Key = $key;
            #[inline(always)]
            fn new(key: $key, index: usize) -> $entry {
                (key as $entry) << <$key>::BITS | index as $entry
            }
            #[inline(always)]
            fn key(self) -> $key {
                (self >> <$key>::BITS) as $key
            }
            #[inline(always)]
            fn index(self) -> usize {
                self as u32 as usize
            }
            #[inline(always)]
            fn digit(self, shift: u32) -> usize {
                (self >> (<$key>::BITS + shift)) as u8 as usize
            }
        }
    };
}

entry!(u32, u64);
entry!(u64, u128);

macro_rules! float_key {
    ($($t:ty, $bits:ty, $key:ty;)*) => {$(
        impl Ordered for $t {
            type Key = $key;
            const BITS: u32 = <$bits>::BITS;
            #[inline(always)]
            fn key(self) -> $key {
                const SIGN: $bits = 1 << (<$bits>::BITS - 1);
                let bits = self.to_bits();
                let bits = if bits == SIGN { 0 } else { bits };
                let ordered = if bits & SIGN == 0 { bits | SIGN } else { !bits };
                let nan = bits & !SIGN > <$t>::INFINITY.to_bits();
                (if nan { <$bits>::MAX } else { ordered }) as $key
            }
        }
    )*};
}

macro_rules! integer_key {
    ($($t:ty, $bits:ty, $key:ty, $flip:expr;)*) => {$(
        impl Ordered for $t {
            type Key = $key;
            const BITS: u32 = <$bits>::BITS;
            #[inline(always)]
            fn key(self) -> $key {
                (self as $bits ^ $flip) as $key
            }
        }
    )*};
}

float_key! {
    f32, u32, u32;
    f64, u64, u64;
    f16, u16, u32;
    bf16, u16, u32;
}

integer_key! {
    i64, u64, u64, 1 << 63;
    i32, u32, u32, 1 << 31;
    u8, u8, u32, 0;
    bool, u8, u32, 0;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ascend<T: Ordered>(groups: &[&[T]]) {
        let keys: Vec<Vec<T::Key>> = groups.iter().map(|g| g.iter().map(|x| x.key()).collect()).collect();
        assert!(keys.iter().all(|k| k.iter().all(|x| *x == k[0])), "{groups:?}");
        assert!(keys.windows(2).all(|w| w[0][0] < w[1][0]), "{groups:?}");
    }

    #[test]
    fn keys_ascend_with_elements() {
        let least = f32::from_bits(1);
        let nans = [f32::NAN, -f32::NAN, f32::from_bits(0xffff_ffff), f32::from_bits(0x7f80_0001)];
        let (inf, max) = (f32::INFINITY, f32::MAX);
        ascend(&[
            &[-inf],
            &[-max],
            &[-1.0],
            &[-least],
            &[-0.0, 0.0],
            &[least],
            &[1.0],
            &[max],
            &[inf],
            &nans,
        ]);
        ascend(&[&[f64::NEG_INFINITY], &[-0.0, 0.0], &[1e300], &[f64::INFINITY], &[f64::NAN, -f64::NAN]]);
        let half = |xs: &[f32]| xs.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>();
        ascend(&[&half(&[-inf])[..], &half(&[-2.0]), &half(&[0.0, -0.0]), &half(&[inf]), &half(&[f32::NAN])]);
        let brain = |xs: &[f32]| xs.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>();
        ascend(&[&brain(&[-inf])[..], &brain(&[-2.0]), &brain(&[0.0, -0.0]), &brain(&[f32::NAN])]);
        ascend(&[&[i64::MIN][..], &[-1], &[0], &[i64::MAX]]);
        ascend(&[&[i32::MIN][..], &[-1], &[0], &[i32::MAX]]);
        ascend(&[&[0u8][..], &[1], &[255]]);
        ascend(&[&[false][..], &[true]]);
    }

    #[test]
    fn entries_keep_key_and_index() {
        let entry = <u64 as OrderKey>::Entry::new(0x0123_4567_89ab_cdef, 0xffff_fffe);
        assert_eq!((OrderEntry::key(entry), entry.index()), (0x0123_4567_89ab_cdef, 0xffff_fffe));
        assert_eq!((entry.digit(0), entry.digit(56)), (0xef, 0x01));
    }
}
