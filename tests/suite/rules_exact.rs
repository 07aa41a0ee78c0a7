//! The judge in exact mode: compares every row that claims to hold bit for bit with a single rank, on ordinary values.
//!
//! Values are normals times powers of ten, with zeros of either sign and the smallest numbers among them, in f32, f64,
//! f16 and bf16. Ranks are simulated and exchange nothing. A row holds if
//! - shards of a sharded result are those of the single rank's result;
//! - for a partial operand: the operator applied to each rank's contribution to an *arbitrary* sum (maximum, minimum),
//!   and reduced afterwards, equals the operator applied to the reduced operand; in some elements contributions cancel
//!   or are zeros of either sign;
//! - for a sum to which one rank contributes each element: the sum equals the single rank's result;
//! - for a sum over sharded dims: the kernel run separately on every finished node of every rank, added up in the order
//!   of `ReductionTree::order`, equals the single rank's result, and so do all other results of these runs.
//!
//! A row that claims to hold up to rounding only must need to: some trial differs, or the row is in
//! `golden/rounded_rows.txt` with a reason.

use std::collections::{BTreeMap, BTreeSet};

use isoshard::ops::{
    AxisPlacement, Input, Matmul, MeshAxis, Meta, Metas, Neg, Op, Row, Sample, Sum, Tensors, Vjp, Windows,
    Work,
};
use isoshard::placement::{Leaf, Mesh};
use isoshard::tensor::{DType, Tensor};

use crate::common::judge::{Case, Outcome, Trial};
use crate::common::rows::line;
use crate::common::samples::{catalog, is_selected, is_whole, long_sums};
use crate::common::{self, Stream, ordinary_values};

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

#[test]
fn every_exact_row_holds_by_bits_on_one_axis() {
    common::quiet_panics();
    let (mut wrong, mut count) = (Vec::new(), Count::default());
    for (sample, dtype) in samples() {
        let trial = Trial::new(&sample, dtype, 1);
        for ranks in [1, 2, 3, 4, 5] {
            for row in sample.op.rows(&trial.metas, MeshAxis::new(ranks)).iter().filter(|r| r.by_bits) {
                let case =
                    Case { trial: &trial, mesh: &line(ranks), rows: std::slice::from_ref(row), order: &[0] };
                count.see(row, case.judge(), &format!("{dtype} {sample:?} on {ranks}"), &mut wrong);
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong rows:\n{}", wrong.len(), wrong.join("\n"));
    count.expect_all_terms();
}

#[test]
fn products_of_exact_rows_hold_by_bits_on_two_axes() {
    common::quiet_panics();
    let (mut wrong, mut count, mut stream) = (Vec::new(), Count::default(), Stream(7));
    for (sample, dtype) in samples() {
        let trial = Trial::new(&sample, dtype, 2);
        let outs = trial.op().infer(&trial.metas).expect("the sample was made so");
        let whole =
            Row::new(trial.metas.iter().map(|_| AxisPlacement::R), outs.iter().map(|_| AxisPlacement::R));
        for lens in [[2, 2], [2, 3], [3, 2], [1, 4]] {
            let mesh = Mesh::new(&[("a", lens[0]), ("b", lens[1])], 0).unwrap();
            let rows = |a: usize, other: Option<AxisPlacement>| {
                let axis = match other {
                    Some(AxisPlacement::S(dim)) => MeshAxis::new(lens[a]).with_split(dim, lens[1 - a]),
                    _ => MeshAxis::new(lens[a]),
                };
                let mut rows = trial.op().rows(&trial.metas, axis);
                rows.retain(|r| r.by_bits);
                rows.push(whole.clone());
                rows
            };
            for _ in 0..8 {
                let a = stream.pick(&rows(0, None)).clone();
                let b = stream.pick(&rows(1, a.ins.first().copied())).clone();
                if !rows(0, b.ins.first().copied()).contains(&a) {
                    continue;
                }
                let pair = [a, b];
                for order in [[0, 1], [1, 0]] {
                    let case = Case { trial: &trial, mesh: &mesh, rows: &pair, order: &order };
                    let of = format!("{dtype} {sample:?} on {mesh} in order {order:?}: {pair:?}");
                    count.see(&pair[0], case.judge(), &of, &mut wrong);
                }
            }
        }
    }
    wrong.sort();
    wrong.dedup();
    assert!(wrong.is_empty(), "{} wrong products:\n{}", wrong.len(), wrong.join("\n"));
    assert!(count.judged > 20 * count.cut, "{} judged, {} cut a leaf", count.judged, count.cut);
}

/// Exact mode does not use rows that hold up to rounding only, so no row may be marked so without need.
#[test]
fn rows_said_to_round_do_round_or_are_listed_with_a_reason() {
    common::quiet_panics();
    let mut differs: BTreeMap<String, bool> = BTreeMap::new();
    for (sample, dtype) in samples() {
        for salt in 3..6 {
            let trial = Trial::new(&sample, dtype, salt);
            for ranks in [2, 3, 5] {
                for row in sample.op.rows(&trial.metas, MeshAxis::new(ranks)).iter().filter(|r| !r.by_bits) {
                    let rows = std::slice::from_ref(row);
                    let outcome = Case { trial: &trial, mesh: &line(ranks), rows, order: &[0] }.judge();
                    *differs.entry(format!("{}: {row:?}", sample.op.name())).or_default() |= outcome.is_err();
                }
            }
        }
    }
    let found: BTreeSet<&str> = differs.iter().filter(|(_, d)| !**d).map(|(row, _)| row.as_str()).collect();
    let golden = include_str!("../golden/rounded_rows.txt");
    let listed = golden
        .lines()
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
        .filter(|l| is_selected(l.split([':', ' ']).next().unwrap_or_default()))
        .map(|line| {
            let (row, reason) = line.split_once(" # ").unwrap_or((line, ""));
            assert!(!reason.trim().is_empty(), "without a reason: {line}");
            row
        });
    let listed: BTreeSet<&str> = listed.collect();
    assert_eq!(found, listed, "golden/rounded_rows.txt differs");
}

/// Tests the judge itself: it finds rows that claim too much.
#[test]
fn false_claims_are_found() {
    common::quiet_panics();
    for lie in [Lie::Negates, Lie::OtherLeaves, Lie::OtherOrder, Lie::OneRanksShare] {
        let sample = lie.sample();
        let trial = Trial::new(&sample, DType::F32, 1);
        let found = [2, 3, 5].iter().any(|&ranks| {
            let judged = |row: &Row| {
                let rows = std::slice::from_ref(row);
                Case { trial: &trial, mesh: &line(ranks), rows, order: &[0] }.judge().is_err()
            };
            lie.rows(&trial.metas, MeshAxis::new(ranks)).iter().any(judged)
        });
        assert!(found, "{lie:?} is believed");
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Lie {
    /// Claims that negation commutes with a sum, zeros included.
    Negates,
    /// Claims that a product adds neighbours.
    OtherLeaves,
    /// Claims that the inner dim of a sum is the outer one.
    OtherOrder,
    /// Claims that each element of a sum comes from one rank, although other ranks contribute +0.
    OneRanksShare,
}

impl Lie {
    fn of(&self) -> Box<dyn Op> {
        let sum = |dims: &[usize]| Sum { dims: dims.iter().copied().collect(), keep: false };
        match self {
            Lie::Negates => Box::new(Neg),
            Lie::OtherLeaves => Box::new(Matmul::new("m k, k n -> m n").expect("a signature")),
            Lie::OtherOrder => Box::new(sum(&[0, 1])),
            Lie::OneRanksShare => Box::new(sum(&[0])),
        }
    }

    fn sample(&self) -> Sample {
        let shapes: &[&[usize]] = match self {
            Lie::Negates | Lie::OneRanksShare => &[&[9, 4]],
            Lie::OtherLeaves => &[&[3, 30], &[30, 4]],
            Lie::OtherOrder => &[&[6, 4, 9]],
        };
        Sample::new(self.clone(), shapes.iter().map(|s| Input::ints(*s)))
    }
}

impl Op for Lie {
    fn name(&self) -> &'static str {
        "lie"
    }
    fn infer(&self, ins: &[Meta]) -> isoshard::Result<Metas> {
        self.of().infer(ins)
    }
    fn rows(&self, _: &[Meta], _: MeshAxis) -> Vec<Row> {
        let pairs = AxisPlacement::TreeSum(Leaf::Pairs);
        match self {
            Lie::Negates => vec![Row::same(AxisPlacement::SUM, 1).exact()],
            Lie::OtherLeaves => vec![Row::new([AxisPlacement::S(1), AxisPlacement::S(0)], [pairs])],
            Lie::OtherOrder => {
                vec![Row::new([AxisPlacement::S(1)], [pairs]), Row::new([AxisPlacement::S(0)], [pairs])]
            }
            Lie::OneRanksShare => vec![Row::new([AxisPlacement::S(0)], [AxisPlacement::SUM]).exact()],
        }
    }
    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> isoshard::Result<Tensors> {
        self.of().eval(ins, at)
    }
    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> isoshard::Result<Tensors> {
        self.of().cuda(ins, at)
    }
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        self.of().work(ins, outs)
    }
    fn vjp(&self, _: &mut Vjp) -> isoshard::Result<()> {
        Ok(())
    }
}

/// Returns the catalog and the long sums, in every dtype that they take.
fn samples() -> impl Iterator<Item = (Sample, DType)> {
    let takes = |(sample, dtype): &(Sample, DType)| {
        let metas: Vec<Meta> = ordinary_values(sample, *dtype, 1).iter().map(Meta::of).collect();
        // Not if an operand's dtype depends on another's: a statistic of f16 or bf16 operands is f32.
        sample.op.infer(&metas).is_ok()
    };
    let all = catalog().into_iter().chain(long_sums());
    all.flat_map(|s| DTYPES.map(|dtype| (s.clone(), dtype))).filter(takes)
}

/// Counts of judged and skipped rows.
#[derive(Default)]
struct Count {
    judged: usize,
    cut: usize,
    /// Per operator, true if its rows that shard a sum were judged.
    terms: BTreeMap<String, bool>,
}

impl Count {
    fn see(&mut self, row: &Row, outcome: Result<Outcome, String>, of: &str, wrong: &mut Vec<String>) {
        if row.outs.iter().any(|s| matches!(s, AxisPlacement::TreeSum(_))) {
            let name = of.split([' ', '{']).nth(1).unwrap_or_default();
            *self.terms.entry(format!("{name} {row:?}")).or_default() |=
                matches!(outcome, Ok(Outcome::Holds));
        }
        match outcome {
            Ok(Outcome::Holds) => self.judged += 1,
            Ok(Outcome::CutsALeaf) => self.cut += 1,
            Ok(Outcome::Illegal) => {}
            Err(what) => wrong.push(format!("{of}: {row:?}: {what}")),
        }
    }

    fn expect_all_terms(&self) {
        if !is_whole() {
            return;
        }
        let never: Vec<&String> =
            self.terms.iter().filter(|(_, judged)| !**judged).map(|(row, _)| row).collect();
        assert!(never.is_empty() && self.judged > 1000, "never judged: {never:?}");
        assert!(self.terms.len() >= 12, "{:?}", self.terms);
    }
}
