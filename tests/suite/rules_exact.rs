//! The judge of bits, of the library's operators: every row that exact mode uses holds by bits, for the catalog's
//! samples and for sums with several leaves of the reduction tree. `isoshard::testing::judge` says what is compared.
//!
//! A row that claims to hold up to rounding only must need to: some call differs, or the row is in
//! `golden/rounded_rows.txt` with a reason.

use std::collections::{BTreeMap, BTreeSet};

use isoshard::ops::{
    AxisPlacement, Input, Matmul, MeshAxis, Meta, Metas, Neg, Op, Row, Sample, Sum, Tensors, Vjp, Windows,
    Work,
};
use isoshard::placement::Leaf;
use isoshard::tensor::Tensor;
use isoshard::testing::{Judge, Verdict, WrongRow};

use crate::common::samples::{catalog, is_selected, is_whole, long_sums};

#[test]
fn every_exact_row_holds_by_bits_on_one_axis() {
    let verdicts = every_sample(Judge::one_axis_by_bits);
    if is_whole() {
        let mut sums: BTreeMap<String, usize> = BTreeMap::new();
        let of = |(name, verdict): &(&'static str, Verdict)| {
            verdict.tree_sums.iter().map(|(row, held)| (format!("{name} {row:?}"), *held)).collect::<Vec<_>>()
        };
        for (row, held) in verdicts.iter().flat_map(of) {
            *sums.entry(row).or_default() += held;
        }
        let never: Vec<&String> = sums.iter().filter(|(_, held)| **held == 0).map(|(row, _)| row).collect();
        let judged: usize = verdicts.iter().map(|(_, v)| v.rows).sum();
        assert!(never.is_empty() && judged > 1000, "never judged: {never:?}");
        assert!(sums.len() >= 12, "{sums:?}");
    }
}

#[test]
fn products_of_exact_rows_hold_by_bits_on_two_axes() {
    let verdicts = every_sample(Judge::two_axes_by_bits);
    let sum = |of: fn(&Verdict) -> usize| verdicts.iter().map(|(_, v)| of(v)).sum::<usize>();
    let (judged, cut) = (sum(|v| v.pairs), sum(|v| v.cut_leaves));
    assert!(!is_whole() || judged > 20 * cut, "{judged} judged, {cut} cut a leaf");
}

/// Asks the judge about every sample, and returns the verdicts with the operators' names.
fn every_sample(ask: impl Fn(&Judge) -> Verdict) -> Vec<(&'static str, Verdict)> {
    let verdicts: Vec<_> = samples().map(|sample| (sample.op.name(), ask(&Judge::new(&sample)))).collect();
    let wrong: Vec<String> =
        verdicts.iter().flat_map(|(_, v)| v.wrong.iter().map(WrongRow::to_string)).collect();
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    verdicts
}

/// Exact mode does not use rows that hold up to rounding only, so no row may be marked so without need.
#[test]
fn rows_said_to_round_do_round_or_are_listed_with_a_reason() {
    let mut differs: BTreeMap<String, bool> = BTreeMap::new();
    for sample in samples() {
        for (row, rounds) in Judge::new(&sample).rounded() {
            *differs.entry(format!("{}: {row:?}", sample.op.name())).or_default() |= rounds;
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
    for lie in [Lie::Negates, Lie::OtherLeaves, Lie::OtherOrder, Lie::OneRanksShare] {
        let verdict = Judge::new(&lie.sample()).one_axis_by_bits();
        assert!(verdict.wrong.iter().any(|row| row.call.starts_with("f32 ")), "{lie:?} is believed");
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

/// Returns the catalog and the long sums.
fn samples() -> impl Iterator<Item = Sample> {
    catalog().into_iter().chain(long_sums())
}
