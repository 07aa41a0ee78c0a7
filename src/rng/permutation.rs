//! A random order of 0..n that is evaluated per element, without a table.

use super::counter::philox;
use super::{Draw, bits64};
use crate::error::{Error, Result};
use crate::tensor::cpu::{Kernel, dispatch};

/// The number of rounds. A point or a pair of points stays unmixed with probability 2^-64.
pub(super) const ROUNDS: usize = 64;
const LANES: usize = 16;

/// A permutation of `0..len` as a function of `(draw, index)`: a data order without a table.
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
    /// Creates the permutation of `0..len` of this draw.
    ///
    /// ```
    /// use isoshard::rng::{Generator, Permutation};
    /// let order = Permutation::new(Generator::new(3).next_draw(), 5);
    /// let mut all = (0..5).map(|i| order.at(i)).collect::<isoshard::Result<Vec<_>>>()?;
    /// all.sort();
    /// assert_eq!(all, [0, 1, 2, 3, 4]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn new(draw: Draw, len: u64) -> Permutation {
        let mut keys = [0; ROUNDS];
        bits64(draw, 0, &mut keys);
        let keys = keys.map(|bits| ((u128::from(bits) * u128::from(len)) >> 64) as u64);
        Permutation { draw, len, keys }
    }

    /// Returns the number of elements.
    ///
    /// ```
    /// # use isoshard::rng::{Generator, Permutation};
    /// assert_eq!(Permutation::new(Generator::new(3).next_draw(), 5).len(), 5);
    /// ```
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if there are no elements.
    ///
    /// ```
    /// # use isoshard::rng::{Generator, Permutation};
    /// assert!(Permutation::new(Generator::new(3).next_draw(), 0).is_empty());
    /// ```
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the value at `index`.
    ///
    /// ```
    /// # use isoshard::rng::{Generator, Permutation};
    /// let order = Permutation::new(Generator::new(3).next_draw(), 1 << 40);
    /// assert!(order.at(123_456_789)? < 1 << 40);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an index that is not below `len`.
    pub fn at(&self, index: u64) -> Result<u64> {
        self.check(index, 1)?;
        Ok((0..ROUNDS).fold(index, |x, round| self.round(round, x)))
    }

    /// Returns the index of `value`: the inverse of [`Permutation::at`].
    ///
    /// ```
    /// # use isoshard::rng::{Generator, Permutation};
    /// let order = Permutation::new(Generator::new(3).next_draw(), 1000);
    /// assert_eq!(order.at(order.position(17)?)?, 17);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a value that is not below `len`.
    pub fn position(&self, value: u64) -> Result<u64> {
        self.check(value, 1)?;
        Ok((0..ROUNDS).rev().fold(value, |x, round| self.round(round, x)))
    }

    /// Writes the values at `start..start + out.len()`, several times as fast as one by one.
    ///
    /// ```
    /// # use isoshard::rng::{Generator, Permutation};
    /// let order = Permutation::new(Generator::new(3).next_draw(), 1000);
    /// let mut batch = [0; 4];
    /// order.fill(8, &mut batch)?;
    /// assert_eq!(batch[3], order.at(11)?);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a range that leaves the permutation.
    pub fn fill(&self, start: u64, out: &mut [u64]) -> Result<()> {
        self.check(start, out.len() as u64)?;
        dispatch(FillOrder { order: self, start, out });
        Ok(())
    }

    /// Returns the draw.
    pub(super) fn draw(&self) -> Draw {
        self.draw
    }

    /// Returns the keys of the rounds' reflections.
    pub(super) fn keys(&self) -> &[u64; ROUNDS] {
        &self.keys
    }

    pub(super) fn check(&self, start: u64, len: u64) -> Result<()> {
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

struct FillOrder<'a> {
    order: &'a Permutation,
    start: u64,
    out: &'a mut [u64],
}

impl Kernel for FillOrder<'_> {
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
        for len in [u64::MAX, (1 << 33) + 1, 1 << 40] {
            let huge = Permutation::new(Draw { seed: 8, number: 0 }, len);
            for i in [0, 1, (1 << 32) - 1, 1 << 32, len / 2, len - 1] {
                let value = huge.at(i).unwrap();
                assert!(value < len && huge.position(value).unwrap() == i);
            }
            let mut last = [0; 40];
            huge.fill(len - 40, &mut last).unwrap();
            assert!(last.iter().zip(len - 40..).all(|(&x, i)| huge.at(i).unwrap() == x));
        }
    }

    #[test]
    fn orders_of_sizes_beyond_32_bits_are_spread_and_unrelated() {
        let (len, draws) = ((1u64 << 33) + 12_345, [0, 1].map(|number| Draw { seed: 6, number }));
        let parts = draws.map(|draw| {
            let mut part = vec![0; 64_000];
            Permutation::new(draw, len).fill((1 << 32) - 32_000, &mut part).unwrap();
            part
        });
        for part in &parts {
            // Chi-square with 63 degrees of freedom exceeds 127 once in 2·10^5 fresh seeds.
            let mut counts = [0.0f64; 64];
            part.iter().for_each(|&x| counts[(u128::from(x) * 64 / u128::from(len)) as usize] += 1.0);
            let chi: f64 = counts.iter().map(|c| (c - 1000.0).powi(2) / 1000.0).sum();
            assert!(chi < 127.0, "{chi}");
            // Neighbours: the correlation of 63,999 pairs has a standard deviation of 0.004; 5 sigma.
            let centred = |x: u64| x as f64 / len as f64 - 0.5;
            let products = part.windows(2).map(|pair| centred(pair[0]) * centred(pair[1]) * 12.0);
            assert!((products.sum::<f64>() / 63_999.0).abs() < 0.02);
        }
        // Two draws agree in a place once in 134,000 tests of this length.
        assert!(parts[0].iter().zip(&parts[1]).all(|(a, b)| a != b));
    }

    #[test]
    fn every_order_is_as_likely() {
        // All n! orders, over draws of one seed and over seeds: chi-square with n! - 1 degrees of freedom exceeds the
        // bound less than once in 10^4 fresh seeds; six checks.
        for (len, orders, bound) in [(3u64, 6, 26.0), (4, 24, 58.0), (5, 120, 186.0)] {
            let tries = 500 * orders;
            let draws: [fn(u64) -> Draw; 2] =
                [|number| Draw { seed: 1, number }, |seed| Draw { seed: seed << 20, number: 7 }];
            for draw in draws {
                let mut counts = std::collections::BTreeMap::new();
                for i in 0..tries {
                    let mut order = [0; 5];
                    Permutation::new(draw(i), len).fill(0, &mut order[..len as usize]).unwrap();
                    *counts.entry(order).or_insert(0.0f64) += 1.0;
                }
                let chi: f64 = counts.values().map(|c| (c - 500.0).powi(2) / 500.0).sum();
                assert!(
                    counts.len() as u64 == orders && chi < bound,
                    "{} orders, chi-square {chi}",
                    counts.len()
                );
            }
        }
    }

    #[test]
    fn fixed_points_are_as_many_as_they_should_be() {
        // In a random order of any size one element stays in place on average, with variance 1: 5 sigma.
        let stays = |seed| {
            let mut order = [0u64; 50];
            Permutation::new(Draw { seed, number: 0 }, 50).fill(0, &mut order).unwrap();
            order.iter().enumerate().filter(|&(i, &x)| i as u64 == x).count() as f64
        };
        let mean = (0..4000).map(stays).sum::<f64>() / 4000.0;
        assert!((mean - 1.0).abs() < 5.0 / 4000f64.sqrt(), "{mean}");
    }
}
