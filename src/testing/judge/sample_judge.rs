//! The judge of one sample, question by question.

use std::collections::BTreeSet;

use super::axis_rows::{all_rows, line};
use super::exact::{BitsCase, BitsTrial, RowOutcome};
use super::fast::{holds_everywhere, implies, is_degenerate, truths, try_trials};
use super::resized::resized;
use super::verdict::{Discrepancy, Verdict};
use crate::ops::{AxisPlacement, MeshAxis, Meta, RaggedCut, Row, Sample, broken_clause, rows_on_axis};
use crate::placement::Mesh;
use crate::tensor::DType;
use crate::testing::expected_panics::caught;
use crate::testing::values::{SplitMix, mix, ordinary_values};

/// The number of operands above which only a selection of the unlisted combinations is judged.
const OPERANDS: usize = 3;
/// The approximate number of combinations in the selection, per mesh.
const SELECTED: u64 = 1000;
/// The dtypes in which bits are compared.
const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

/// Judges the rows of a sample's operator: looks for a counterexample to each, and for rows that are missing.
///
/// A row says: with operands in these placements, each rank's kernel computes its part of results in those placements
/// ([`Op::rows`](crate::ops::Op::rows)). The judge runs the operator's kernel on the shards of simulated ranks, which
/// exchange nothing, and compares with a single rank:
///
/// - bit for bit, on ordinary values, if the row claims bits ([`Row::by_bits`]); arbitrary partial sums and the nodes
///   of the reduction tree are tried as well;
/// - on small integers and multiples of 1/8, in f32 and in f64, for every row;
/// - on one mesh axis of 1 to 5 ranks, on two axes in both nesting orders, and at extents of 0, 1, 2 and 7.
///
/// A row that does not hold is *wrong*. A combination of placements that holds and is not listed is *missing*: such
/// an operator computes the right results, and moves more bytes than it must.
///
/// The sample's operands have dtypes that the operator takes; floating-point ones are tried in all that it takes.
/// Communicates nothing, and takes from milliseconds to seconds, depending on the number of operands.
///
/// ```
/// use isoshard::ops::{Add, Input, Sample};
/// let verdict = isoshard::testing::judge(&Sample::new(Add, [Input::ints([5, 3]), Input::ints([5, 3])]));
/// assert!(verdict.wrong.is_empty(), "{verdict}");
/// ```
pub fn judge(sample: &Sample) -> Verdict {
    if let Err(error) = sample.op.infer(&sample.metas()) {
        return Verdict::default().refused(sample, &error);
    }
    let judge = Judge::new(sample);
    let mut verdict = judge.one_axis();
    // A wrong row makes every product with it wrong, and no combination that it implies is missing.
    if verdict.wrong.is_empty() {
        verdict += judge.one_axis_by_bits();
        verdict += judge.two_axes();
        verdict += judge.two_axes_by_bits();
        verdict += judge.other_sizes();
        verdict += judge.missing();
    }
    verdict
}

/// The judge of one sample, question by question; [`judge`] asks all of them.
///
/// ```
/// use isoshard::ops::{Input, Sample, Sum};
/// use isoshard::testing::Judge;
/// let sum = Sum { dims: [0].into_iter().collect(), keep: false };
/// let sample = Sample::new(sum, [Input::ints([5, 3])]);
/// let verdict = Judge::new(&sample).one_axis_by_bits();
/// assert!(verdict.wrong.is_empty() && verdict.rows > 0);
/// ```
pub struct Judge {
    sample: Sample,
    complete: bool,
    always: BTreeSet<String>,
}

impl Judge {
    /// Creates the judge of a sample.
    ///
    /// ```
    /// use isoshard::ops::{Exp, Input, Sample};
    /// use isoshard::testing::Judge;
    /// let judge = Judge::new(&Sample::new(Exp, [Input::ints([5, 3])]));
    /// // S0, S1, and ragged shards, each on 2, 3 and 5 ranks.
    /// assert!(judge.one_axis().rows >= 6);
    /// ```
    pub fn new(sample: &Sample) -> Judge {
        Judge { sample: sample.clone(), complete: false, always: BTreeSet::new() }
    }

    /// Makes [`missing`](Judge::missing) try all combinations of operators with more than three operands, which can
    /// take minutes, instead of a fixed selection.
    ///
    /// ```
    /// use isoshard::ops::{Add, Input, Sample};
    /// use isoshard::testing::Judge;
    /// let judge = Judge::new(&Sample::new(Add, [Input::ints([5, 3]), Input::ints([5, 3])]));
    /// // Two operands are few: all combinations are tried in any case.
    /// assert_eq!(judge.missing().combinations, judge.complete(true).missing().combinations);
    /// ```
    pub fn complete(self, complete: bool) -> Judge {
        Judge { complete, ..self }
    }

    /// Adds rows to the selection that [`missing`](Judge::missing) tries, each written as `{row:?}`. So a row that a
    /// complete run once found missing is judged in every run.
    ///
    /// ```
    /// use isoshard::ops::{Input, Neg, Sample};
    /// use isoshard::testing::Judge;
    /// let judge = Judge::new(&Sample::new(Neg, [Input::ints([5, 3])]));
    /// let judge = judge.always(["S0 -> S0".to_string()].into());
    /// assert!(judge.missing().missing.is_empty());
    /// ```
    pub fn always(self, rows: BTreeSet<String>) -> Judge {
        Judge { always: rows, ..self }
    }

    /// Judges each row on one axis of 2, 3 and 5 ranks by values.
    ///
    /// ```
    /// use isoshard::ops::{Input, Matmul, Sample};
    /// use isoshard::testing::Judge;
    /// let product = Matmul::new("m k, k n -> m n")?;
    /// let verdict = Judge::new(&Sample::new(product, [Input::ints([4, 5]), Input::ints([5, 3])])).one_axis();
    /// assert!(verdict.wrong.is_empty() && verdict.pairs == 0);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn one_axis(&self) -> Verdict {
        let mut verdict = Verdict::default();
        let trials = match try_trials(&self.sample, 5) {
            Ok(trials) => trials,
            Err(error) => return verdict.refused(&self.sample, &error),
        };
        let (ins, outs) =
            (self.sample.metas(), self.sample.op.infer(&self.sample.metas()).unwrap_or_default());
        for ranks in [2, 3, 5] {
            let mesh = line(ranks);
            for row in all_rows(self.sample.op.as_ref(), &self.sample.metas(), MeshAxis::new(ranks)) {
                verdict.rows += 1;
                let rows = std::slice::from_ref(&row);
                if let Some((rule, place)) = broken_clause(&row, &ins, &outs) {
                    let what = format!("{place}{row:?} breaks the contract of Op::rows: {rule}");
                    verdict.wrong(format!("{:?}", self.sample), rows, Discrepancy::new(&[], None, what));
                    continue;
                }
                if let Err(what) = holds_everywhere(&self.sample, &trials, &mesh, rows, &[0]) {
                    verdict.wrong(format!("{:?} on {ranks} ranks", self.sample), rows, what);
                }
            }
        }
        verdict
    }

    /// Judges products of one row per axis on meshes of 2 x 2, 2 x 3 and 3 x 2 ranks by values, in both nesting
    /// orders: a fixed random selection.
    ///
    /// ```
    /// use isoshard::ops::{Input, Sample, Tanh};
    /// use isoshard::testing::Judge;
    /// let verdict = Judge::new(&Sample::new(Tanh, [Input::ints([5, 3])])).two_axes();
    /// assert!(verdict.wrong.is_empty() && verdict.pairs > 0);
    /// ```
    pub fn two_axes(&self) -> Verdict {
        let mut verdict = Verdict::default();
        let trials = match try_trials(&self.sample, 2) {
            Ok(trials) => trials,
            Err(error) => return verdict.refused(&self.sample, &error),
        };
        for lens in [[2, 2], [2, 3], [3, 2]] {
            let mesh = grid(lens);
            for pair in row_pairs(&self.sample, &self.sample.metas(), lens, 12, |_| true) {
                for order in [[0, 1], [1, 0]] {
                    match holds_everywhere(&self.sample, &trials, &mesh, &pair, &order) {
                        Ok(ran) => verdict.pairs += usize::from(ran),
                        Err(what) => {
                            verdict.pairs += 1;
                            verdict.wrong(
                                format!("{:?} on {mesh} in order {order:?}", self.sample),
                                &pair,
                                what,
                            );
                        }
                    }
                }
            }
        }
        verdict
    }

    /// Judges each row by values with all dims of one extent changed to 0, 1, 2 or 7, if the operator takes such
    /// operands.
    ///
    /// ```
    /// use isoshard::ops::{Input, Sample, Softmax};
    /// use isoshard::testing::Judge;
    /// let verdict = Judge::new(&Sample::new(Softmax { dim: 0 }, [Input::ints([5, 3])])).other_sizes();
    /// assert_eq!((verdict.wrong.len(), verdict.small), (0, 4)); // 0 or 1 instead of 5, and instead of 3
    /// ```
    pub fn other_sizes(&self) -> Verdict {
        let mut verdict = Verdict::default();
        for sample in resized(&self.sample) {
            let trials = match caught(|| try_trials(&sample, 2)) {
                Ok(Ok(trials)) => trials,
                Ok(Err(_)) => continue,
                Err(panic) => {
                    let what = Discrepancy::new(&[], None, format!("a single rank panics: {panic}"));
                    verdict.wrong(format!("{sample:?}"), &[], what);
                    continue;
                }
            };
            verdict.small += usize::from(has_small_extent(&sample));
            for ranks in [2, 3, 5] {
                let mesh = line(ranks);
                // A partial sum that passes is no matter of sizes, and its rounding is that of the operator's terms,
                // which may be larger than its results.
                let rounds = |row: &Row| row.ins.contains(&AxisPlacement::SUM) && !row.by_bits;
                let rows = all_rows(sample.op.as_ref(), &sample.metas(), MeshAxis::new(ranks));
                for row in rows.into_iter().filter(|row| !rounds(row)) {
                    verdict.resized += 1;
                    let rows = std::slice::from_ref(&row);
                    if let Err(what) = holds_everywhere(&sample, &trials, &mesh, rows, &[0]) {
                        verdict.wrong(format!("{sample:?} on {ranks} ranks"), rows, what);
                    }
                }
            }
        }
        verdict
    }

    /// Looks for combinations of placements on one axis of 2, 3 and 5 ranks that hold and that no row lists.
    ///
    /// A combination is not called missing
    /// - if an operand or result of the sample has an extent of 0 or 1, or one element, because shards are then the
    ///   same as replicas;
    /// - if a listed row gives it by putting `R` for an operand's `P(max)` or `P(min)`, as a special case of it, or
    ///   `P(max)` or `P(min)` for a result's `R`, which is a case of them;
    /// - if a result is ragged and no operand is;
    /// - or if the operands have more than 4096 combinations of placements, and it uses two different placements besides
    ///   `R`.
    ///
    /// For more than three operands it tries a fixed selection of the combinations.
    ///
    /// ```
    /// use isoshard::ops::{Input, Log, Sample};
    /// use isoshard::testing::Judge;
    /// let verdict = Judge::new(&Sample::new(Log, [Input::positive([5, 3])])).missing();
    /// // It holds for these values, and is not listed: the approximation is not proved to be monotone.
    /// assert_eq!(format!("{:?}", verdict.missing[0].0), "P(min) -> P(min)");
    /// ```
    pub fn missing(&self) -> Verdict {
        let mut verdict = Verdict::default();
        if is_degenerate(&self.sample) {
            return verdict;
        }
        let trials = match try_trials(&self.sample, 5) {
            Ok(trials) => trials,
            Err(error) => return verdict.refused(&self.sample, &error),
        };
        for ranks in [2, 3, 5] {
            let (op, metas, axis) = (self.sample.op.as_ref(), self.sample.metas(), MeshAxis::new(ranks));
            let rows = |cut: Option<RaggedCut>| match cut {
                Some(cut) => rows_on_axis(op, &metas, axis.with_ragged(cut)),
                None => op.rows(&metas, axis),
            };
            let tries = |row: &Row, all: usize| {
                let tries = self.tries(row, ranks, all);
                verdict.combinations += usize::from(tries);
                tries
            };
            let found = truths(&self.sample, &trials, &line(ranks), tries);
            for (truth, cut) in found {
                if !rows(cut).iter().any(|r| implies(r, &truth, cut)) {
                    let dims = cut.map_or(String::new(), |cut| format!(", {} dim(s) ragged", cut.dims));
                    verdict.missing.push((truth, format!("{:?} on {ranks}{dims}", self.sample)));
                }
            }
        }
        verdict
    }

    /// Returns true if this combination, one of `all` on `ranks` ranks, is judged: in a complete run, if there are few
    /// operands, if the caller names it, or if a fixed hash selects it.
    fn tries(&self, row: &Row, ranks: usize, all: usize) -> bool {
        if self.complete || self.sample.ins.len() <= OPERANDS {
            return true;
        }
        let row = format!("{row:?}");
        let name = format!("{}: {row}", self.sample.op.name());
        let draw = name.bytes().fold(ranks as u64, |seed, byte| mix(seed ^ u64::from(byte)));
        // A hash that is selected among many combinations is selected among few, so that two ragged placements are
        // judged alike.
        draw / SELECTED < u64::MAX / all as u64 || self.always.contains(&row)
    }

    /// Judges each row that claims bits ([`Row::by_bits`]) on one axis of 1 to 5 ranks, in every floating-point dtype that
    /// the operator takes.
    ///
    /// ```
    /// use isoshard::ops::{Input, Sample, Sum};
    /// use isoshard::testing::Judge;
    /// let columns = Sum { dims: [0].into_iter().collect(), keep: false };
    /// let verdict = Judge::new(&Sample::new(columns, [Input::ints([5, 3])])).one_axis_by_bits();
    /// // The sum over sharded rows follows the reduction tree.
    /// assert!(verdict.tree_sums.iter().any(|(row, times)| format!("{row:?}").starts_with("S0") && *times > 0));
    /// ```
    pub fn one_axis_by_bits(&self) -> Verdict {
        let mut verdict = Verdict::default();
        for dtype in self.dtypes() {
            let trial = BitsTrial::new(&self.sample, dtype, 1);
            for ranks in [1, 2, 3, 4, 5] {
                let rows = all_rows(self.sample.op.as_ref(), &trial.metas, MeshAxis::new(ranks));
                for row in rows.iter().filter(|r| r.by_bits) {
                    let rows = std::slice::from_ref(row);
                    let case = BitsCase { trial: &trial, mesh: &line(ranks), rows, order: &[0] };
                    let held =
                        judged(&mut verdict, format!("{dtype} {:?} on {ranks} ranks", self.sample), &case);
                    verdict.rows += usize::from(held);
                }
            }
        }
        verdict
    }

    /// Judges products of rows that claim bits on two axes, in both nesting orders: a fixed random selection.
    ///
    /// ```
    /// use isoshard::ops::{Input, Neg, Sample};
    /// use isoshard::testing::Judge;
    /// let judge = Judge::new(&Sample::new(Neg, [Input::ints([5, 3])]));
    /// let mut verdict = judge.two_axes();
    /// let by_values = verdict.pairs;
    /// verdict += judge.two_axes_by_bits();
    /// assert!(verdict.pairs > by_values);
    /// ```
    pub fn two_axes_by_bits(&self) -> Verdict {
        let mut verdict = Verdict::default();
        for dtype in self.dtypes() {
            let trial = BitsTrial::new(&self.sample, dtype, 2);
            for lens in [[2, 2], [2, 3], [3, 2], [1, 4]] {
                let mesh = grid(lens);
                for pair in row_pairs(&self.sample, &trial.metas, lens, 8, |row| row.by_bits) {
                    for order in [[0, 1], [1, 0]] {
                        let case = BitsCase { trial: &trial, mesh: &mesh, rows: &pair, order: &order };
                        let call = format!("{dtype} {:?} on {mesh} in order {order:?}", self.sample);
                        let held = judged(&mut verdict, call, &case);
                        verdict.pairs += usize::from(held);
                    }
                }
            }
        }
        verdict
    }

    /// Returns the rows that claim to hold up to rounding only, each with true if some call rounds indeed. Exact mode
    /// uses no such row, so a row must not be marked so without need.
    ///
    /// ```
    /// use isoshard::ops::{Input, Neg, Sample};
    /// use isoshard::testing::Judge;
    /// // A negated partial sum: -(1 - 1) is -0, and -1 + 1 is +0.
    /// let rounded = Judge::new(&Sample::new(Neg, [Input::ints([5, 3])])).rounded();
    /// assert!(!rounded.is_empty() && rounded.iter().all(|(_, rounds)| *rounds));
    /// ```
    pub fn rounded(&self) -> Vec<(Row, bool)> {
        let mut found: Vec<(Row, bool)> = Vec::new();
        for dtype in self.dtypes() {
            for salt in 3..6 {
                let trial = BitsTrial::new(&self.sample, dtype, salt);
                for ranks in [2, 3, 5] {
                    let rows = all_rows(self.sample.op.as_ref(), &trial.metas, MeshAxis::new(ranks));
                    for row in rows.iter().filter(|r| !r.by_bits) {
                        let rows = std::slice::from_ref(row);
                        let case = BitsCase { trial: &trial, mesh: &line(ranks), rows, order: &[0] };
                        let rounds = case.judge().is_err();
                        match found.iter_mut().find(|(known, _)| known == row) {
                            Some((_, any)) => *any |= rounds,
                            None => found.push((row.clone(), rounds)),
                        }
                    }
                }
            }
        }
        found
    }

    /// Returns the dtypes of floating-point operands that the operator takes. An operand's dtype may depend on
    /// another's: a statistic of f16 or bf16 operands is f32.
    fn dtypes(&self) -> impl Iterator<Item = DType> {
        let takes = |dtype: &DType| {
            let metas: Vec<Meta> = ordinary_values(&self.sample, *dtype, 1).iter().map(Meta::of).collect();
            self.sample.op.infer(&metas).is_ok()
        };
        DTYPES.into_iter().filter(takes)
    }
}

/// The number of draws of two rows that both take ragged operands.
const RAGGED_PAIRS: usize = 3;

/// Returns the products of rows for a mesh of two axes, among them the row of replicas: of `n` draws, and of some of
/// ragged rows only, those whose rows go together.
fn row_pairs(
    sample: &Sample,
    metas: &[Meta],
    lens: [usize; 2],
    n: usize,
    is_wanted: impl Fn(&Row) -> bool,
) -> Vec<[Row; 2]> {
    let outs = sample.op.infer(metas).expect("a sample's operands fit its operator");
    let whole = Row::new(metas.iter().map(|_| AxisPlacement::R), outs.iter().map(|_| AxisPlacement::R));
    let rows = |a: usize, other: Option<AxisPlacement>| {
        let axis = MeshAxis::new(lens[a]);
        let axis = match other {
            Some(AxisPlacement::S(dim)) => axis.with_split(dim, lens[1 - a]),
            Some(AxisPlacement::Ragged | AxisPlacement::RaggedOver(_)) => axis.with_ragged_split(0),
            Some(AxisPlacement::R | AxisPlacement::P(_) | AxisPlacement::TreeSum(_)) | None => axis,
        };
        let mut rows = all_rows(sample.op.as_ref(), metas, axis);
        rows.retain(|row| is_wanted(row));
        rows.push(whole.clone());
        rows
    };
    let seed = format!("{sample:?} {metas:?} {lens:?}")
        .bytes()
        .fold(n as u64, |seed, byte| mix(seed ^ u64::from(byte)));
    let mut stream = SplitMix(seed);
    let pair = |both_ragged: bool| {
        let drawn = |mut rows: Vec<Row>, stream: &mut SplitMix| {
            rows.retain(|row| !both_ragged || row.takes_ragged());
            (!rows.is_empty()).then(|| stream.pick(&rows).clone())
        };
        let a = drawn(rows(0, None), &mut stream)?;
        let b = drawn(rows(1, a.ins.first().copied()), &mut stream)?;
        rows(0, b.ins.first().copied()).contains(&a).then_some([a, b])
    };
    (0..n).map(|_| false).chain([true; RAGGED_PAIRS]).filter_map(pair).collect()
}

fn grid(lens: [usize; 2]) -> Mesh {
    Mesh::new(&[("a", lens[0]), ("b", lens[1])], 0).expect("two axes with names of their own")
}

/// Judges a case by bits. Returns true if it was judged and held.
fn judged(verdict: &mut Verdict, call: String, case: &BitsCase<'_>) -> bool {
    // A kernel or a row that panics is a finding, and the call and the row are named.
    let outcome = caught(|| case.judge())
        .unwrap_or_else(|panic| Err(Discrepancy::new(&[], None, format!("panics: {panic}"))));
    for row in case.rows.iter().filter(|r| r.outs.iter().any(|s| matches!(s, AxisPlacement::TreeSum(_)))) {
        let held = usize::from(matches!(outcome, Ok(RowOutcome::Holds)));
        match verdict.tree_sums.iter_mut().find(|(known, _)| known == row) {
            Some((_, times)) => *times += held,
            None => verdict.tree_sums.push((row.clone(), held)),
        }
    }
    match outcome {
        Ok(RowOutcome::Holds) => return true,
        Ok(RowOutcome::CutsALeaf) => verdict.cut_leaves += 1,
        Ok(RowOutcome::Illegal) => {}
        Err(what) => verdict.wrong(call, case.rows, what),
    }
    false
}

fn has_small_extent(sample: &Sample) -> bool {
    sample.ins.iter().any(|i| i.meta.shape.is_empty() || i.meta.shape.iter().any(|&n| n < 2))
}
