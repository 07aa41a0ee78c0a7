//! A random order of 0..n, any element of which can be asked for alone.

use super::philox;
use super::{Draw, bits64};
use crate::error::{Error, Result};
use crate::tensor::cpu::simd::{Kernel, dispatch};

/// A point or a pair of points is left unmixed with probability 2^-64.
const ROUNDS: usize = 64;
const LANES: usize = 16;

/// A permutation of `0..len`, a function of `(draw, index)`: a data order without a table.
///
/// The swap-or-not shuffle of Hoang, Morris and Rogaway (CRYPTO 2012), 64 rounds. Round r reflects x to
/// x' = (K_r - x) mod n if bit 0 of word 0 of block max(x, x') of attempt r + 1 is set; K_r is the upper half of
/// (64-bit element r of attempt 0) times n. It works for every n, and each round undoes itself.
///
/// ```
/// use isoshard::rng::{Generator, Permutation};
/// let order = Permutation::new(Generator::new(3).next_draw(), 1000);
/// assert_eq!(order.position(order.at(17)?)?, 17);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Permutation {
    draw: Draw,
    len: u64,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of `0..len` that this draw names.
    pub fn new(draw: Draw, len: u64) -> Permutation {
        let mut keys = [0; ROUNDS];
        bits64(draw, 0, &mut keys);
        let keys = keys.map(|bits| ((u128::from(bits) * u128::from(len)) >> 64) as u64);
        Permutation { draw, len, keys }
    }

    /// The number of elements.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True where there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What stands at `index`.
    ///
    /// # Errors
    /// Refuses an index that is not there.
    pub fn at(&self, index: u64) -> Result<u64> {
        self.check(index, 1)?;
        Ok((0..ROUNDS).fold(index, |x, round| self.round(round, x)))
    }

    /// Where `value` stands: the inverse of [`Permutation::at`].
    ///
    /// # Errors
    /// Refuses a value that is not there.
    pub fn position(&self, value: u64) -> Result<u64> {
        self.check(value, 1)?;
        Ok((0..ROUNDS).rev().fold(value, |x, round| self.round(round, x)))
    }

    /// What stands at `start..start + out.len()`, several times as fast as one by one.
    ///
    /// # Errors
    /// Refuses a range that leaves the permutation.
    pub fn fill(&self, start: u64, out: &mut [u64]) -> Result<()> {
        self.check(start, out.len() as u64)?;
        dispatch(Fill { order: self, start, out });
        Ok(())
    }

    fn check(&self, start: u64, len: u64) -> Result<()> {
        if start.checked_add(len).is_some_and(|end| end <= self.len) {
            return Ok(());
        }
        Err(Error::invalid(
            "permutation",
            "the range leaves the permutation",
            format!("{len} elements from {start}"),
            format!("there are {} elements", self.len),
        ))
    }

    #[inline(always)]
    fn round(&self, round: usize, x: u64) -> u64 {
        let key = self.keys[round];
        let reflected = key.wrapping_sub(x).wrapping_add(if x > key { self.len } else { 0 });
        let upper = if x > reflected { x } else { reflected };
        let [bits, _] = philox::pairs(self.draw.key(), upper, self.draw.counter_high(round as u16 + 1));
        if bits & 1 == 1 { reflected } else { x }
    }
}

struct Fill<'a> {
    order: &'a Permutation,
    start: u64,
    out: &'a mut [u64],
}

impl Kernel for Fill<'_> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        for (chunk, out) in self.out.chunks_mut(LANES).enumerate() {
            let mut lanes = [0; LANES];
            for (lane, x) in lanes.iter_mut().enumerate().take(out.len()) {
                *x = self.start + (chunk * LANES + lane) as u64;
            }
            for round in 0..ROUNDS {
                for x in &mut lanes {
                    *x = self.order.round(round, *x);
                }
            }
            out.copy_from_slice(&lanes[..out.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bijection_with_its_inverse_at_every_size() {
        for len in [0u64, 1, 2, 3, 7, 16, 17, 1009] {
            let order = Permutation::new(Draw { seed: 8, number: len }, len);
            let mut all = vec![0; len as usize];
            order.fill(0, &mut all).unwrap();
            for (i, &x) in all.iter().enumerate() {
                assert_eq!(order.at(i as u64).unwrap(), x);
                assert_eq!(order.position(x).unwrap(), i as u64);
            }
            let mut sorted = all.clone();
            sorted.sort_unstable();
            assert!(sorted.iter().copied().eq(0..len));
            assert!(order.at(len).is_err() && order.position(len).is_err());
        }
        let huge = Permutation::new(Draw { seed: 8, number: 0 }, u64::MAX);
        for i in [0, 1, u64::MAX - 1] {
            assert_eq!(huge.position(huge.at(i).unwrap()).unwrap(), i);
        }
    }

    #[test]
    fn every_order_is_as_likely() {
        // 24 orders of 4 elements from 24,000 seeds: chi-square with 23 degrees of freedom exceeds 58 once in 10^4.
        let mut counts = [0u32; 256];
        for number in 0..24_000 {
            let mut x = [0; 4];
            Permutation::new(Draw { seed: 1, number }, 4).fill(0, &mut x).unwrap();
            counts[(x[0] | x[1] << 2 | x[2] << 4 | x[3] << 6) as usize] += 1;
        }
        let seen: Vec<f64> = counts.iter().filter(|&&c| c > 0).map(|&c| f64::from(c)).collect();
        let chi: f64 = seen.iter().map(|c| (c - 1000.0).powi(2) / 1000.0).sum();
        assert!(seen.len() == 24 && chi < 58.0, "{} orders, chi-square {chi}", seen.len());
    }
}
