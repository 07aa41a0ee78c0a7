//! Packing of whole documents into rows.

use super::open_rows::OpenRows;
use super::token_file::TokenFile;
use crate::error::{Error, Result};
use crate::tensor::{try_filled, try_push};

/// The number of tokens that are read between two steps of a file's checksum.
const SCANNED: usize = 1 << 16;
/// The number of pieces for which the number of rows before them is known; a multiple of 64.
const COUNTED: usize = 512;

/// Rows of whole documents, packed by best-fit decreasing (Ding et al., *Fewer truncations improve language modeling*,
/// 2024): the longest piece first, each into the row with the least space that is left and suffices.
///
/// A piece is a document, or a part of one that is longer than a row. It is known by its first token alone, because it
/// ends with its document or when it fills a row. So it takes eight bytes, a bit, and an eighth of a byte.
#[derive(Debug)]
pub(super) struct PackedIndex {
    /// The number of tokens before each file.
    before: Vec<u64>,
    /// The first token of each piece, counted over all files; the pieces of a row are next to each other.
    starts: Vec<u64>,
    /// A bit per piece, set if it is the first of its row.
    firsts: Vec<u64>,
    /// The number of rows before every [`COUNTED`] pieces.
    counts: Vec<u64>,
    rows: usize,
}

/// The form of the keys by which pieces are sorted: the tokens that a row has more than the piece, and below them its
/// start. So the longest comes first, and of equal ones the first in the files.
#[derive(Clone, Copy)]
struct KeyForm {
    /// The most tokens of a piece that are read and predict another one.
    longest: usize,
    start_bits: u32,
}

impl KeyForm {
    fn new(files: &[TokenFile], block: usize) -> Result<KeyForm> {
        let tokens = files.iter().fold(0u64, |sum, file| sum.saturating_add(file.len() as u64));
        let longest = (block as u64).min(tokens) as usize;
        let bits = |n: u64| u64::BITS - n.leading_zeros();
        let start_bits = bits(tokens);
        if start_bits + bits(longest as u64) > u64::BITS {
            let (rule, given) = ("the tokens and the block are too many", format!("{tokens} and {block}"));
            return Err(Error::invalid("tokens", rule, given, "pack fewer files at a time"));
        }
        Ok(KeyForm { longest, start_bits })
    }

    fn key(self, start: u64, len: usize) -> u64 {
        ((self.longest - len) as u64) << self.start_bits | start
    }

    fn start(self, key: u64) -> u64 {
        key & !(u64::MAX << self.start_bits)
    }

    fn len(self, key: u64) -> usize {
        self.longest - (key >> self.start_bits) as usize
    }
}

impl PackedIndex {
    /// Reads the files once and packs their documents into rows of `block` tokens. A document ends with the token `end`.
    /// Appends each file's checksum to `checksums`.
    ///
    /// # Errors
    /// Refuses tokens outside the vocabulary, files in which no document has two tokens, and more than 2^32 - 1
    /// documents; returns an error if there is no room.
    pub fn new(
        files: &[TokenFile],
        end: u32,
        vocabulary: usize,
        block: usize,
        checksums: &mut Vec<u32>,
    ) -> Result<PackedIndex> {
        let form = KeyForm::new(files, block)?;
        let (mut keys, mut before, mut sum) = (Vec::new(), Vec::new(), 0);
        for file in files {
            before.push(sum);
            checksums.push(scan(file, end, vocabulary, &mut |first, end| {
                let mut start = first;
                while start + 1 < end {
                    let len = form.longest.min(end - 1 - start);
                    try_push(&mut keys, form.key(sum + start as u64, len), "documents")?;
                    start += len;
                }
                Ok(())
            })?);
            sum += file.len() as u64;
        }
        if keys.is_empty() {
            let given = files[0].path().display().to_string();
            return Err(Error::invalid("tokens", "no document has a token to predict", given, ""));
        }
        if keys.len() >= u32::MAX as usize {
            let (rule, given) =
                ("more than 2^32 - 1 documents are not packed", format!("{} pieces", keys.len()));
            return Err(Error::invalid("tokens", rule, given, "pack fewer files at a time"));
        }
        PackedIndex::best_fit(before, keys, form)
    }

    fn best_fit(before: Vec<u64>, mut keys: Vec<u64>, form: KeyForm) -> Result<PackedIndex> {
        keys.sort_unstable();
        let mut open = OpenRows::new(form.longest)?;
        // The row of each piece, and the number of pieces in each row.
        let mut places = try_filled(0u32, keys.len(), "documents")?;
        let mut lens: Vec<u32> = Vec::new();
        for (place, &key) in places.iter_mut().zip(&keys) {
            let len = form.len(key);
            let (row, space) = match open.take(len) {
                Some(found) => found,
                None => {
                    try_push(&mut lens, 0, "rows of documents")?;
                    (open.make()?, form.longest)
                }
            };
            *place = row;
            lens[row as usize] += 1;
            if space > len {
                open.put(row, space - len);
            }
        }
        drop(open);
        let rows = lens.len();
        let mut firsts = try_filled(0u64, keys.len().div_ceil(64), "rows of documents")?;
        let mut counts = try_filled(0u64, keys.len().div_ceil(COUNTED), "rows of documents")?;
        let mut end = 0;
        for (row, len) in lens.iter_mut().enumerate() {
            firsts[end / 64] |= 1 << (end % 64);
            // Overwritten by later rows of the same part, up to its last one.
            let first_after = end / COUNTED + 1;
            if let Some(count) = counts.get_mut(first_after) {
                *count = row as u64 + 1;
            }
            let start = end as u32;
            end += *len as usize;
            *len = start;
        }
        (1..counts.len()).for_each(|k| counts[k] = counts[k].max(counts[k - 1]));
        // Now `lens` are the rows' starts: each piece gets its place, in the order of lengths.
        for place in &mut places {
            let next = &mut lens[*place as usize];
            *place = *next;
            *next += 1;
        }
        drop(lens);
        move_to(&mut keys, &mut places);
        keys.iter_mut().for_each(|key| *key = form.start(*key));
        keys.shrink_to_fit();
        Ok(PackedIndex { before, starts: keys, firsts, counts, rows })
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Returns the pieces of a row: each one's file, and its first token there.
    pub fn row(&self, row: usize) -> impl Iterator<Item = (usize, usize)> {
        let (start, end) = (self.first_piece(row), self.first_piece(row + 1));
        self.starts[start..end].iter().map(|&start| {
            let file = self.before.partition_point(|&before| before <= start) - 1;
            (file, (start - self.before[file]) as usize)
        })
    }

    /// Returns the first piece of a row; for the row after the last, the number of pieces.
    fn first_piece(&self, row: usize) -> usize {
        if row == self.rows {
            return self.starts.len();
        }
        // The last part before which there are not more rows than before `row`.
        let part = self.counts.partition_point(|&count| count <= row as u64) - 1;
        let mut left = row - self.counts[part] as usize;
        for (word, &bits) in self.firsts.iter().enumerate().skip(part * COUNTED / 64) {
            let here = bits.count_ones() as usize;
            if left < here {
                let bits = (0..left).fold(bits, |bits, _| bits & (bits - 1));
                return 64 * word + bits.trailing_zeros() as usize;
            }
            left -= here;
        }
        unreachable!("each row has a first piece")
    }
}

/// Reads a file, calls `document` with each document's first token and the token after its last, and returns the file's
/// checksum.
fn scan(
    file: &TokenFile,
    end: u32,
    vocabulary: usize,
    document: &mut dyn FnMut(usize, usize) -> Result<()>,
) -> Result<u32> {
    let mut checksum = crc32fast::Hasher::new();
    let mut first = 0;
    for from in (0..file.len()).step_by(SCANNED) {
        let range = from..file.len().min(from + SCANNED);
        checksum.update(file.bytes_of(range.clone()));
        for (position, token) in range.clone().zip(file.tokens(range)) {
            if token as usize >= vocabulary {
                return Err(file.beyond(position, token, vocabulary));
            }
            if token == end {
                document(first, position + 1)?;
                first = position + 1;
            }
        }
    }
    document(first, file.len())?;
    Ok(checksum.finalize())
}

/// Moves each key to its place. `places` are the numbers from 0 on in some order, and ascend afterwards.
fn move_to(keys: &mut [u64], places: &mut [u32]) {
    for index in 0..keys.len() {
        while places[index] as usize != index {
            let place = places[index] as usize;
            keys.swap(index, place);
            places.swap(index, place);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;
    use std::collections::BTreeMap;

    use super::*;
    use crate::rng::{Draw, bits64};

    /// Packs pieces of these lengths, and returns each row's pieces by their numbers.
    fn packed(lens: &[usize], block: usize) -> Vec<Vec<usize>> {
        let form = KeyForm { longest: block, start_bits: 32 };
        let keys = lens.iter().enumerate().map(|(number, &len)| form.key(number as u64, len)).collect();
        let rows = PackedIndex::best_fit(vec![0], keys, form).unwrap();
        (0..rows.len()).map(|row| rows.row(row).map(|(_, number)| number).collect()).collect()
    }

    /// Packs by the definition, with lists of rows and of their pieces.
    fn expected(lens: &[usize], block: usize) -> Vec<Vec<usize>> {
        let mut order: Vec<usize> = (0..lens.len()).collect();
        order.sort_by_key(|&number| Reverse(lens[number]));
        let (mut rows, mut open) = (Vec::new(), BTreeMap::<usize, Vec<usize>>::new());
        for number in order {
            let found = open.range(lens[number]..).next().map(|(&space, _)| space);
            let (row, space) = match found {
                Some(space) => (open.get_mut(&space).unwrap().pop().unwrap(), space),
                None => {
                    rows.push(Vec::new());
                    (rows.len() - 1, block)
                }
            };
            open.retain(|_, rows| !rows.is_empty());
            rows[row].push(number);
            if space > lens[number] {
                open.entry(space - lens[number]).or_default().push(row);
            }
        }
        rows
    }

    #[test]
    fn each_piece_takes_the_tightest_row() {
        let by_len = |lens: &[usize]| -> Vec<Vec<usize>> {
            packed(lens, 10).iter().map(|row| row.iter().map(|&number| lens[number]).collect()).collect()
        };
        assert_eq!(by_len(&[3, 10, 6, 7, 4, 1]), [vec![10], vec![7, 3], vec![6, 4], vec![1]]);
        // 2 goes to the row of 8, whose space it fills, and not to that of 7.
        assert_eq!(by_len(&[7, 8, 2]), [vec![8, 2], vec![7]]);
        assert_eq!(by_len(&[10]), [vec![10]]);
    }

    #[test]
    fn rows_are_those_of_the_definition() {
        for (block, most, count) in [(10, 10, 2000), (100, 30, 3000), (1000, 1000, 700), (7, 1, 1300)] {
            let mut words = vec![0; count];
            bits64(Draw { seed: block as u64, number: 1 }, 0, &mut words);
            let lens: Vec<usize> = words.iter().map(|word| 1 + (word >> 9) as usize % most).collect();
            assert_eq!(packed(&lens, block), expected(&lens, block), "{block} and {most}");
        }
        // Exactly as many pieces as a count is kept for, and one row for all.
        for count in [COUNTED - 1, COUNTED, COUNTED + 1, 2 * COUNTED] {
            assert_eq!(packed(&vec![1; count], count), [(0..count).collect::<Vec<_>>()]);
            assert_eq!(packed(&vec![3; count], 3).len(), count);
        }
    }
}
