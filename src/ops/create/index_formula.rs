//! Formulas of global indices: sequences of numbers, and bands of diagonals.

/// The numbers `start`, `start + step`, ... by global row-major index.
///
/// Element `i` is `start + i step` for `i` below `turn`, and `end - (last - i) step` from there on, so that a sequence
/// with a given end meets it exactly. Floats are computed in f64 and rounded once; integers are computed in i64.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct IndexSequence {
    pub start: f64,
    pub step: f64,
    pub end: f64,
    pub last: u64,
    pub turn: u64,
}

/// The diagonals `low..=high` of the last two dims: those elements `(i, j)` with `low <= j - i <= high`.
///
/// ```
/// use isoshard::ops::DiagonalBand;
/// assert!(DiagonalBand::up_to(0).contains(2, 1) && !DiagonalBand::up_to(0).contains(1, 2)); // causal
/// assert_eq!(DiagonalBand::from(1).to_string(), "1..");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DiagonalBand {
    /// The lowest diagonal; `i64::MIN` for no bound.
    pub low: i64,
    /// The highest diagonal; `i64::MAX` for no bound.
    pub high: i64,
}

impl DiagonalBand {
    /// Returns the diagonals up to `high`: the lower triangle if `high` is 0.
    ///
    /// ```
    /// # use isoshard::ops::DiagonalBand;
    /// assert_eq!(DiagonalBand::up_to(3), DiagonalBand { low: i64::MIN, high: 3 });
    /// ```
    pub fn up_to(high: i64) -> DiagonalBand {
        DiagonalBand { low: i64::MIN, high }
    }

    /// Returns the diagonals from `low` on: the upper triangle if `low` is 0.
    ///
    /// ```
    /// # use isoshard::ops::DiagonalBand;
    /// assert!(DiagonalBand::from(-1).contains(5, 4) && !DiagonalBand::from(-1).contains(5, 3));
    /// ```
    pub fn from(low: i64) -> DiagonalBand {
        DiagonalBand { low, high: i64::MAX }
    }

    /// Returns true if element (`row`, `column`) is in the band.
    ///
    /// ```
    /// # use isoshard::ops::DiagonalBand;
    /// assert!(DiagonalBand { low: 0, high: 0 }.contains(4, 4)); // the main diagonal
    /// ```
    pub fn contains(&self, row: usize, column: usize) -> bool {
        let diagonal = column as i64 - row as i64;
        self.low <= diagonal && diagonal <= self.high
    }

    /// Returns the columns of `row` that are in the band, out of `columns`.
    pub(super) fn columns_of(&self, row: usize, columns: usize) -> (usize, usize) {
        let at = |by: i64| (row as i64).saturating_add(by).clamp(0, columns as i64) as usize;
        let from = at(self.low);
        (from, at(self.high.saturating_add(1)).max(from))
    }
}

/// Writes the diagonals as a range: `..=0`, `1..`, `-2..=2`.
impl std::fmt::Display for DiagonalBand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.low != i64::MIN {
            write!(f, "{}", self.low)?;
        }
        f.write_str("..")?;
        if self.high != i64::MAX { write!(f, "={}", self.high) } else { Ok(()) }
    }
}
