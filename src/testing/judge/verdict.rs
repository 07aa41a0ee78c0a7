//! The judge's findings.

use std::fmt;

use crate::error::Error;
use crate::ops::{Row, Sample};
use crate::placement::Spec;

/// A row, or a product of one row per axis, that does not hold.
#[derive(Clone, Debug)]
pub struct WrongRow {
    /// The sample, with its dtype if bits were compared, and the mesh.
    pub call: String,
    /// The rows, one per mesh axis.
    pub rows: Vec<Row>,
    /// The first difference.
    pub discrepancy: Discrepancy,
}

/// The first difference between a single rank's result and the ranks' results.
#[derive(Clone, Debug)]
pub struct Discrepancy {
    /// The operands' specs.
    pub operands: Vec<Spec>,
    /// The number and the spec of the result that differs; `None` if the kernel failed.
    pub result: Option<(usize, Box<Spec>)>,
    /// The rank, the first element that differs, and both values, or the kernel's error.
    pub difference: String,
}

/// The judge's findings about one sample.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// The rows that do not hold.
    pub wrong: Vec<WrongRow>,
    /// Placements that hold on some number of ranks and that no row lists, each with the call in which it was found.
    pub missing: Vec<(Row, String)>,
    /// The number of rows judged on one axis.
    pub rows: usize,
    /// The number of products of rows judged on two axes.
    pub pairs: usize,
    /// The number of rows judged at other sizes.
    pub resized: usize,
    /// The number of calls with an extent of 0 or 1 that were judged at other sizes.
    pub small: usize,
    /// The number of combinations tried while looking for missing rows.
    pub combinations: usize,
    /// The number of calls in which a rank held less than a leaf of the reduction tree: the dispatcher does not use the
    /// row then, so it was not judged.
    pub cut_leaves: usize,
    /// The rows whose results are sums over sharded dims that were judged, and the number of times they held by bits.
    pub tree_sums: Vec<(Row, usize)>,
}

impl Verdict {
    /// Asserts that no row is wrong. Missing rows are not a failure.
    ///
    /// ```
    /// use isoshard::ops::{Input, Mul, Sample};
    /// let verdict = isoshard::testing::judge(&Sample::new(Mul, [Input::ints([5, 3]), Input::ints([5, 3])]));
    /// verdict.assert();
    /// println!("{verdict}"); // the counts, and the missing rows
    /// ```
    ///
    /// # Panics
    /// Panics with the first wrong rows, each with its layouts and its first wrong element.
    #[track_caller]
    pub fn assert(&self) {
        assert!(self.wrong.is_empty(), "{self}");
    }

    pub(super) fn wrong(&mut self, call: String, rows: &[Row], discrepancy: Discrepancy) {
        self.wrong.push(WrongRow { call, rows: rows.to_vec(), discrepancy });
    }

    /// Records that a single rank refuses the sample.
    pub(super) fn refused(mut self, sample: &Sample, error: &Error) -> Verdict {
        let what = Discrepancy::new(&[], None, format!("a single rank refuses the sample: {error}"));
        self.wrong(format!("{sample:?}"), &[], what);
        self
    }
}

impl std::ops::AddAssign for Verdict {
    fn add_assign(&mut self, other: Verdict) {
        self.wrong.extend(other.wrong);
        self.missing.extend(other.missing);
        self.rows += other.rows;
        self.pairs += other.pairs;
        self.resized += other.resized;
        self.small += other.small;
        self.combinations += other.combinations;
        self.cut_leaves += other.cut_leaves;
        for (row, times) in other.tree_sums {
            match self.tree_sums.iter_mut().find(|(known, _)| *known == row) {
                Some((_, sum)) => *sum += times,
                None => self.tree_sums.push((row, times)),
            }
        }
    }
}

impl Discrepancy {
    pub(super) fn new(operands: &[Spec], result: Option<(usize, &Spec)>, difference: String) -> Discrepancy {
        let result = result.map(|(k, spec)| (k, Box::new(spec.clone())));
        Discrepancy { operands: operands.to_vec(), result, difference }
    }
}

/// Writes the operands' specs, the result's, and the difference.
impl fmt::Display for Discrepancy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, spec) in self.operands.iter().enumerate() {
            write!(f, "{}{spec}", if i == 0 { "" } else { ", " })?;
        }
        match &self.result {
            Some((k, spec)) => write!(f, " -> result {k} {spec}: {}", self.difference),
            None => write!(f, ": {}", self.difference),
        }
    }
}

/// Writes the call, the rows and the difference in one line.
impl fmt::Display for WrongRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.rows[..] {
            [] => write!(f, "{}: {}", self.call, self.discrepancy),
            [row] => write!(f, "{}: the row {row:?} is wrong: {}", self.call, self.discrepancy),
            rows => write!(f, "{}: the rows {rows:?} are wrong together: {}", self.call, self.discrepancy),
        }
    }
}

/// Writes the wrong rows, with a picture of the first one's result, then the missing rows.
impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Verdict { wrong, missing, rows, pairs, resized, .. } = self;
        let (wrong_len, missing_len) = (wrong.len(), missing.len());
        writeln!(
            f,
            "{wrong_len} wrong and {missing_len} missing of {rows} rows, {pairs} pairs and {resized} at other sizes"
        )?;
        for (i, row) in wrong.iter().take(60).enumerate() {
            writeln!(f, "{row}")?;
            if let (0, Some((_, spec))) = (i, &row.discrepancy.result) {
                write!(f, "{}", spec.draw())?;
            }
        }
        missing
            .iter()
            .take(60)
            .try_for_each(|(row, call)| writeln!(f, "not listed, but true: {row:?} ({call})"))
    }
}
