//! Rows with space that is left, found by the least space that suffices.

use crate::error::Result;
use crate::tensor::{try_filled, try_push};

/// The mark of a row that is not there.
const NONE: u32 = u32::MAX;

/// The rows that documents are packed into. A row has four bytes here, and so has a size of space.
pub(super) struct OpenRows {
    /// The row that was put last among those with this much space.
    last: Vec<u32>,
    /// For each row, the row that was put before it among those with the same space.
    before: Vec<u32>,
    /// A bit per size of space, set if a row has it; then levels of a bit per word of the level before, up to one word.
    levels: Vec<Vec<u64>>,
}

impl OpenRows {
    /// Returns an empty list of rows that each have at most `most` space.
    ///
    /// # Errors
    /// Returns an error if there is no room.
    pub fn new(most: usize) -> Result<OpenRows> {
        let mut levels = Vec::new();
        let mut len = most + 1;
        while len > 1 || levels.is_empty() {
            len = len.div_ceil(64);
            levels.push(try_filled(0, len, "sizes of space in rows")?);
        }
        Ok(OpenRows { last: try_filled(NONE, most + 1, "rows by their space")?, before: Vec::new(), levels })
    }

    /// Returns the number of rows that were made.
    pub fn len(&self) -> usize {
        self.before.len()
    }

    /// Makes a row.
    ///
    /// # Errors
    /// Returns an error if there is no room.
    pub fn make(&mut self) -> Result<u32> {
        try_push(&mut self.before, NONE, "rows of documents")?;
        Ok(self.len() as u32 - 1)
    }

    /// Puts a row that is not among the rows with space there.
    pub fn put(&mut self, row: u32, space: usize) {
        self.before[row as usize] = std::mem::replace(&mut self.last[space], row);
        let mut index = space;
        for words in &mut self.levels {
            words[index / 64] |= 1 << (index % 64);
            index /= 64;
        }
    }

    /// Takes a row with the least space of at least `least`, of several the one that was put last, and returns it with
    /// its space.
    pub fn take(&mut self, least: usize) -> Option<(u32, usize)> {
        let space = self.least_space(least)?;
        let row = self.last[space];
        self.last[space] = self.before[row as usize];
        if self.last[space] == NONE {
            let mut index = space;
            for words in &mut self.levels {
                words[index / 64] &= !(1 << (index % 64));
                if words[index / 64] != 0 {
                    break;
                }
                index /= 64;
            }
        }
        Some((row, space))
    }

    fn least_space(&self, least: usize) -> Option<usize> {
        let mut index = least;
        for (level, words) in self.levels.iter().enumerate() {
            let bits = words.get(index / 64)? & (u64::MAX << (index % 64));
            if bits != 0 {
                let first = |word: usize, bits: u64| 64 * word + bits.trailing_zeros() as usize;
                let lower = self.levels[..level].iter().rev();
                return Some(lower.fold(first(index / 64, bits), |word, words| first(word, words[word])));
            }
            index = index / 64 + 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::rng::{Draw, bits64};

    /// Random puts and takes, compared with lists in a sorted map.
    #[test]
    fn the_tightest_row_is_found() {
        for most in [1, 63, 64, 65, 4096, 5000] {
            let (mut rows, mut wanted) = (OpenRows::new(most).unwrap(), BTreeMap::<usize, Vec<u32>>::new());
            let mut words = [0; 4000];
            bits64(Draw { seed: most as u64, number: 0 }, 0, &mut words);
            for word in words {
                let size = (word >> 8) as usize % (most + 1);
                if word % 2 == 0 {
                    let row = rows.make().unwrap();
                    rows.put(row, size);
                    wanted.entry(size).or_default().push(row);
                    continue;
                }
                let found = wanted.range(size..).next().map(|(&space, _)| space);
                let expected = found.map(|space| {
                    let row = wanted.get_mut(&space).unwrap().pop().unwrap();
                    wanted.retain(|_, rows| !rows.is_empty());
                    (row, space)
                });
                assert_eq!(rows.take(size), expected, "{size} of {most}");
            }
        }
        assert!(OpenRows::new(1 << 60).is_err(), "there is no such room");
    }
}
