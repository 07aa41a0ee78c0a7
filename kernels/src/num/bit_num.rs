//! Integers and bools as strings of bits.

use crate::num::real::{Widen, select};

/// An integer or a bool as a string of bits: i64, i32, u8 or bool.
///
/// ```
/// use isoshard_kernels::BitNum;
/// assert_eq!((6u8.bit_and(3), 6u8.bit_xor(3), true.bit_not()), (2, 5, false));
/// assert_eq!((1u8.shift_left(9), (-8i32).shift_right(40)), (0, -1));
/// ```
pub trait BitNum: Widen<Wide = Self> {
    /// Returns the bits that both have.
    fn bit_and(self, other: Self) -> Self;
    /// Returns the bits that one or both have.
    fn bit_or(self, other: Self) -> Self;
    /// Returns the bits that exactly one has.
    fn bit_xor(self, other: Self) -> Self;
    /// Returns the bits that this value does not have.
    fn bit_not(self) -> Self;
    /// Moves the bits up by `by` places. All bits leave if `by` is negative or at least the type's number of bits.
    fn shift_left(self, by: Self) -> Self;
    /// Moves the bits down by `by` places and copies the sign. If `by` is negative or at least the type's number of
    /// bits, only copies of the sign are left.
    fn shift_right(self, by: Self) -> Self;
}

macro_rules! bit_num {
    ($($t:ident ($x:ident, $by:ident) $left:expr, $right:expr;)*) => {$(
        impl BitNum for $t {
            #[inline(always)]
            fn bit_and(self, other: $t) -> $t { self & other }
            #[inline(always)]
            fn bit_or(self, other: $t) -> $t { self | other }
            #[inline(always)]
            fn bit_xor(self, other: $t) -> $t { self ^ other }
            #[inline(always)]
            fn bit_not(self) -> $t { !self }
            #[inline(always)]
            fn shift_left(self, $by: $t) -> $t { let $x = self; $left }
            #[inline(always)]
            fn shift_right(self, $by: $t) -> $t { let $x = self; $right }
        }
    )*};
}

bit_num! {
    i64 (x, by) select((by as u64) < 64, x.wrapping_shl(by as u32), 0), x.wrapping_shr((by as u64).min(63) as u32);
    i32 (x, by) select((by as u32) < 32, x.wrapping_shl(by as u32), 0), x.wrapping_shr((by as u32).min(31));
    u8 (x, by) select(by < 8, x.wrapping_shl(u32::from(by)), 0), select(by < 8, x.wrapping_shr(u32::from(by)), 0);
    bool (x, by) x & !by, x & !by;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_shift_by_any_number_without_a_panic() {
        for x in [i32::MIN, -7, -1, 0, 1, 8, i32::MAX] {
            for by in [-1, 0, 1, 31, 32, 99] {
                let places = if (0..32).contains(&by) { by as u32 } else { 63 };
                assert_eq!(x.shift_right(by), (i64::from(x) >> places) as i32, "{x} >> {by}");
                assert_eq!(
                    x.shift_left(by),
                    (i64::from(x).checked_shl(places).unwrap_or(0)) as i32 * i32::from(places < 32),
                    "{x} << {by}"
                );
            }
        }
        assert_eq!((0x81u8.shift_left(1), 0x81u8.shift_right(7), 1u8.shift_left(8)), (2, 1, 0));
    }
}
