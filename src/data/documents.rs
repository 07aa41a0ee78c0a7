//! Packing of whole documents into rows.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::token_file::TokenFile;
use crate::error::{Error, Result};

/// A document, or a part of one that is longer than a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DocumentPiece {
    pub file: usize,
    /// The first token in the file.
    pub at: usize,
    /// The number of tokens that are read and predict another one: one less than the piece's tokens.
    pub len: usize,
}

/// Rows of whole documents, packed by best-fit decreasing (Ding et al., *Fewer truncations improve language modeling*,
/// 2024): the longest piece first, each into the row with the least space that is left and suffices.
#[derive(Debug)]
pub(super) struct PackedIndex {
    pieces: Vec<DocumentPiece>,
    /// The end of each row among the pieces.
    ends: Vec<usize>,
}

impl PackedIndex {
    /// Reads the files once and packs their documents into rows of `block` tokens. A document ends with the token `end`.
    ///
    /// # Errors
    /// Refuses tokens outside the vocabulary, and files in which no document has two tokens.
    pub fn new(files: &[TokenFile], end: u32, vocabulary: usize, block: usize) -> Result<PackedIndex> {
        let mut pieces = Vec::new();
        for (number, file) in files.iter().enumerate() {
            let mut first = 0;
            let mut document = |first: usize, end: usize| {
                let mut at = first;
                while at + 1 < end {
                    let len = block.min(end - 1 - at);
                    pieces.push(DocumentPiece { file: number, at, len });
                    at += len;
                }
            };
            for (at, token) in file.tokens(0..file.len()).enumerate() {
                if token as usize >= vocabulary {
                    return Err(file.beyond(at, token, vocabulary));
                }
                if token == end {
                    document(first, at + 1);
                    first = at + 1;
                }
            }
            document(first, file.len());
        }
        if pieces.is_empty() {
            let given = files[0].path().display().to_string();
            return Err(Error::invalid("tokens", "no document has a token to predict", given, ""));
        }
        Ok(PackedIndex::best_fit(pieces, block))
    }

    fn best_fit(mut pieces: Vec<DocumentPiece>, block: usize) -> PackedIndex {
        // The sort is stable, so equal lengths keep the order of the files.
        pieces.sort_by_key(|piece| Reverse(piece.len));
        // The rows with this much space left.
        let mut open: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        let mut row_of = Vec::with_capacity(pieces.len());
        let mut rows = 0;
        for piece in &pieces {
            let found = open.range(piece.len..).next().map(|(&space, _)| space);
            let (row, space) = match found {
                Some(space) => {
                    let of_space = open.get_mut(&space).expect("just found");
                    let row = of_space.pop().expect("an empty list is removed");
                    if of_space.is_empty() {
                        open.remove(&space);
                    }
                    (row, space)
                }
                None => {
                    rows += 1;
                    (rows - 1, block)
                }
            };
            row_of.push(row);
            if space > piece.len {
                open.entry(space - piece.len).or_default().push(row);
            }
        }
        let mut order: Vec<usize> = (0..pieces.len()).collect();
        order.sort_by_key(|&k| row_of[k]);
        let mut ends = vec![0; rows];
        row_of.iter().for_each(|&row| ends[row] += 1);
        let mut end = 0;
        ends.iter_mut().for_each(|count| {
            end += *count;
            *count = end;
        });
        PackedIndex { pieces: order.into_iter().map(|k| pieces[k]).collect(), ends }
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the documents of a row.
    pub fn row(&self, row: usize) -> &[DocumentPiece] {
        let start = if row == 0 { 0 } else { self.ends[row - 1] };
        &self.pieces[start..self.ends[row]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_piece_takes_the_tightest_row() {
        let pieces = |lens: &[usize]| -> Vec<DocumentPiece> {
            lens.iter().enumerate().map(|(at, &len)| DocumentPiece { file: 0, at, len }).collect()
        };
        let packed = |lens: &[usize]| -> Vec<Vec<usize>> {
            let rows = PackedIndex::best_fit(pieces(lens), 10);
            (0..rows.len()).map(|row| rows.row(row).iter().map(|p| p.len).collect()).collect()
        };
        assert_eq!(packed(&[3, 10, 6, 7, 4, 1]), [vec![10], vec![7, 3], vec![6, 4], vec![1]]);
        // 2 goes to the row of 8, whose space it fills, and not to that of 7.
        assert_eq!(packed(&[7, 8, 2]), [vec![8, 2], vec![7]]);
        assert_eq!(packed(&[10]), [vec![10]]);
    }
}
