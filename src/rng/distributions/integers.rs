//! Uniform integers, without bias.

use std::ops::RangeInclusive;

use super::sample::{PIECE, PhiloxSink, drive};
use crate::error::{Error, Result};
use crate::rng::Draw;
use crate::rng::counter::index_ranges::{IndexRanges, Indices};
use crate::rng::counter::philox::{self, PhiloxBlocks};
use crate::tensor::cpu::Isa;
use crate::tensor::{DType, Element};

/// An integer element type of random numbers: i64, i32 or u8. Sealed.
#[expect(private_bounds, reason = "sealed")]
pub trait Integer: Element + WholeRange {}

impl<T: Element + WholeRange> Integer for T {}

/// Writes uniform integers from `low` to below `high`, both within the element type; up to 2^64 different ones.
///
/// The method is multiplication and shift (D. Lemire, "Fast random integer generation in an interval", 2019). For n numbers,
/// the word x of a 32-bit draw gives `low` + floor(x n / 2^32), unless x n mod 2^32 is below 2^32 mod n; then the element's
/// word of the next attempt is used. More than 2^32 numbers use a 64-bit draw in the same way. So the numbers depend on the
/// range and not on the element type.
///
/// ```
/// use isoshard::rng::{Generator, uniform_int};
/// let mut dice = [0u8; 100];
/// uniform_int(Generator::new(1).next_draw(), 0, 1, 7, &mut dice)?;
/// assert!(dice.iter().all(|d| (1..=6).contains(d)));
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses an empty range, and one that leaves the type.
pub fn uniform_int<T: Integer>(
    draw: Draw,
    at: impl Indices,
    low: i128,
    high: i128,
    out: &mut [T],
) -> Result<()> {
    expect_range(low, high, T::DTYPE, T::RANGE)?;
    T::fill(draw, at.ranges(), &range_of(low, high), out);
    Ok(())
}

/// A range of integers: `low` modulo 2^64, the number of integers minus one (there may be 2^64), and the remainder below which
/// a word is rejected; for one or two words per element.
pub(in crate::rng) enum IntegerRange {
    One { low: u64, last: u32, threshold: u32 },
    Two { low: u64, last: u64, threshold: u64 },
}

/// Returns the range from `low` to below `high`, which was checked.
pub(in crate::rng) fn range_of(low: i128, high: i128) -> IntegerRange {
    let (low, last) = (low as u64, (high - low - 1) as u64);
    match u32::try_from(last) {
        Ok(last) => {
            // 2^32 mod n = (2^32 - n) mod n.
            let n = u64::from(last) + 1;
            IntegerRange::One { low, last, threshold: (((1u64 << 32) - n) % n) as u32 }
        }
        Err(_) => {
            let n = u128::from(last) + 1;
            IntegerRange::Two { low, last, threshold: (((1u128 << 64) - n) % n) as u64 }
        }
    }
}

/// Returns the error of [`uniform_int`] for this range and dtype, if any.
pub(in crate::rng) fn check(low: i128, high: i128, dtype: DType) -> Result<()> {
    match dtype {
        DType::I64 => expect_range(low, high, dtype, i64::RANGE),
        DType::I32 => expect_range(low, high, dtype, i32::RANGE),
        DType::U8 => expect_range(low, high, dtype, u8::RANGE),
        _ => Ok(()),
    }
}

fn expect_range(low: i128, high: i128, dtype: DType, holds: RangeInclusive<i128>) -> Result<()> {
    if low < high && *holds.start() <= low && high - 1 <= *holds.end() {
        return Ok(());
    }
    Err(Error::invalid(
        "uniform_int",
        format!("wants low < high, within {dtype}"),
        format!("{low} to below {high}"),
        format!("{dtype} holds {} to {}", holds.start(), holds.end()),
    ))
}

/// An integer type: its range and its fill.
trait WholeRange: Sized {
    /// The values of the type.
    const RANGE: RangeInclusive<i128>;
    /// Writes the numbers of a range within the type.
    fn fill(draw: Draw, at: IndexRanges<'_>, words: &IntegerRange, out: &mut [Self]);
}

/// Conversion from the low bits of a `u64`. i64 and i32 have it; u8 is converted from i32.
trait LowBits: Element {
    fn low(x: u64) -> Self;
}

impl LowBits for i64 {
    #[inline(always)]
    fn low(x: u64) -> i64 {
        x as i64
    }
}

impl LowBits for i32 {
    #[inline(always)]
    fn low(x: u64) -> i32 {
        x as i32
    }
}

impl WholeRange for i64 {
    const RANGE: RangeInclusive<i128> = i64::MIN as i128..=i64::MAX as i128;
    fn fill(draw: Draw, at: IndexRanges<'_>, words: &IntegerRange, out: &mut [i64]) {
        let len = out.len();
        match *words {
            IntegerRange::One { low, last, threshold } => {
                drive(draw, 0, at, len, FromWords { draw, start: at, low, last, threshold, out });
            }
            IntegerRange::Two { low, last, threshold } => {
                drive(draw, 0, at, len, FromPairs { draw, start: at, low, last, threshold, out });
            }
        }
    }
}

impl WholeRange for i32 {
    const RANGE: RangeInclusive<i128> = i32::MIN as i128..=i32::MAX as i128;
    fn fill(draw: Draw, at: IndexRanges<'_>, words: &IntegerRange, out: &mut [i32]) {
        let &IntegerRange::One { low, last, threshold } = words else {
            unreachable!("i32 holds 2^32 numbers")
        };
        drive(draw, 0, at, out.len(), FromWords { draw, start: at, low, last, threshold, out });
    }
}

impl WholeRange for u8 {
    const RANGE: RangeInclusive<i128> = u8::MIN as i128..=u8::MAX as i128;
    fn fill(draw: Draw, mut at: IndexRanges<'_>, words: &IntegerRange, out: &mut [u8]) {
        let mut numbers = [0i32; PIECE];
        let mut rest = out;
        while !rest.is_empty() {
            let len = (PIECE - (at.first() % 4) as usize).min(rest.len());
            let (piece, left) = rest.split_at_mut(len);
            i32::fill(draw, at, words, &mut numbers[..len]);
            piece.iter_mut().zip(&numbers).for_each(|(to, &number)| *to = number as u8);
            at.advance(len);
            rest = left;
        }
    }
}

/// Writes integers of a 32-bit draw.
struct FromWords<'a, T> {
    draw: Draw,
    start: IndexRanges<'a>,
    low: u64,
    last: u32,
    threshold: u32,
    out: &'a mut [T],
}

impl<T: LowBits> FromWords<'_, T> {
    /// Returns the number and the remainder that decides about rejection.
    #[inline(always)]
    fn place(low: u64, last: u32, word: u32) -> (T, u32) {
        // word * (last + 1), where last + 1 may be 2^32.
        let product = u64::from(word) * u64::from(last) + u64::from(word);
        (T::low(low.wrapping_add(product >> 32)), product as u32)
    }

    #[cold]
    fn redraw(&self, index: u64) -> T {
        let mut attempt = 0;
        loop {
            attempt += 1;
            let words = philox::block(self.draw.key(), self.draw.counter(index / 4, attempt));
            let (number, share) = Self::place(self.low, self.last, words[(index % 4) as usize]);
            if share >= self.threshold || attempt == u16::MAX {
                return number;
            }
        }
    }
}

impl<T: LowBits> PhiloxSink for FromWords<'_, T> {
    const PER_BLOCK: usize = 4;
    #[inline(always)]
    fn take<const N: usize>(&mut self, mut blocks: PhiloxBlocks<N>, skip: usize, at: usize, len: usize) {
        let words = &blocks.words()[skip..skip + len];
        let (low, last, threshold) = (self.low, self.last, self.threshold);
        let mut rejected = 0u32;
        for (out, &word) in self.out[at..at + len].iter_mut().zip(words) {
            let (number, share) = Self::place(low, last, word);
            *out = number;
            rejected |= u32::from(share < threshold);
        }
        if rejected != 0 {
            for (i, &word) in words.iter().enumerate() {
                if Self::place(low, last, word).1 < threshold {
                    self.out[at + i] = self.redraw(self.start.index(at + i));
                }
            }
        }
    }
}

/// Writes integers of a 64-bit draw.
struct FromPairs<'a> {
    draw: Draw,
    start: IndexRanges<'a>,
    low: u64,
    last: u64,
    threshold: u64,
    out: &'a mut [i64],
}

impl FromPairs<'_> {
    #[inline(always)]
    fn place(&self, pair: u64) -> (i64, u64) {
        let product = u128::from(pair) * u128::from(self.last) + u128::from(pair);
        (self.low.wrapping_add((product >> 64) as u64) as i64, product as u64)
    }

    #[cold]
    fn redraw(&self, index: u64) -> i64 {
        let mut attempt = 0;
        loop {
            attempt += 1;
            let high = self.draw.counter_high(attempt);
            let pairs = philox::pairs(self.draw.key(), index / 2, high);
            let (number, share) = self.place(pairs[(index % 2) as usize]);
            if share >= self.threshold || attempt == u16::MAX {
                return number;
            }
        }
    }
}

impl PhiloxSink for FromPairs<'_> {
    const WIDEST: Isa = Isa::Avx2;
    const PER_BLOCK: usize = 2;
    #[inline(always)]
    fn take<const N: usize>(&mut self, blocks: PhiloxBlocks<N>, skip: usize, at: usize, len: usize) {
        for (i, &pair) in blocks.0.as_flattened()[skip..skip + len].iter().enumerate() {
            let (number, share) = self.place(pair);
            self.out[at + i] =
                if share >= self.threshold { number } else { self.redraw(self.start.index(at + i)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::distributions::fill::{bits32, bits64};

    const DRAW: Draw = Draw { seed: 31, number: 32 };

    #[test]
    fn whole_types_are_the_words_themselves() {
        let (mut words, mut pairs) = ([0u32; 9], [0u64; 9]);
        bits32(DRAW, 5, &mut words);
        bits64(DRAW, 5, &mut pairs);
        let (mut bytes, mut ints, mut longs) = ([0u8; 9], [0i32; 9], [0i64; 9]);
        uniform_int(DRAW, 5, 0, 256, &mut bytes).unwrap();
        uniform_int(DRAW, 5, i128::from(i32::MIN), 1 << 31, &mut ints).unwrap();
        uniform_int(DRAW, 5, i128::from(i64::MIN), 1 << 63, &mut longs).unwrap();
        assert_eq!(bytes, words.map(|w| (w >> 24) as u8));
        assert_eq!(ints, words.map(|w| (w ^ 1 << 31) as i32));
        assert_eq!(longs, pairs.map(|p| (p ^ 1 << 63) as i64));
    }

    #[test]
    fn the_type_does_not_matter_and_rejections_are_redrawn() {
        let (mut a, mut b) = ([0i64; 500], [0i32; 500]);
        // Close to half of all words are rejected.
        let n = (1i128 << 31) + 1;
        uniform_int(DRAW, 3, -7, n - 8, &mut a).unwrap();
        uniform_int(DRAW, 3, -7, n - 8, &mut b).unwrap();
        assert!(a.iter().zip(&b).all(|(&a, &b)| a == i64::from(b)));
        let mut words = [0u32; 500];
        bits32(DRAW, 3, &mut words);
        let mut redrawn = 0;
        for (&x, &word) in a.iter().zip(&words) {
            let product = u64::from(word) * n as u64;
            if u64::from(product as u32) >= (1 << 32) % n as u64 {
                assert_eq!(x, (product >> 32) as i64 - 7);
            } else {
                redrawn += 1;
            }
        }
        assert!((180..320).contains(&redrawn), "{redrawn}");
        let mut wide = [0i64; 500];
        uniform_int(DRAW, 3, 0, (1 << 62) + (1 << 61), &mut wide).unwrap();
        assert!(wide.iter().all(|&x| (0..(1 << 62) + (1 << 61)).contains(&x)));
    }

    #[test]
    fn refusals() {
        let refused = |low, high| uniform_int(DRAW, 0, low, high, &mut [0u8; 1]).unwrap_err().to_string();
        assert_eq!(
            refused(3, 3),
            "uniform_int: wants low < high, within u8; got 3 to below 3; u8 holds 0 to 255"
        );
        refused(-1, 3);
        refused(0, 257);
        refused(i128::MIN, i128::MAX);
        uniform_int(DRAW, 0, 255, 256, &mut [0u8; 1]).unwrap();
    }
}
