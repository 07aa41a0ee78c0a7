//! Tests of plans that run: bits, bytes and copies.

use super::cost::{CostModel, bytes_and_calls};
use super::redistribution::Redistribution;
use super::run::{Move, find};
use crate::comm::{Lineage, spmd};
use crate::dtensor::redistribute::exchange_piece::communicating_axes;
use crate::dtensor::{DTensor, DeviceMesh};
use crate::error::Result;
use crate::placement::{Layout, Placement, Spec};
use crate::tensor::{DType, ReduceOp, Shape, Tensor};
use std::rc::Rc;

fn layout(text: &str) -> Layout {
    text.parse().expect("a layout")
}

#[test]
fn only_axes_whose_split_is_undone_communicate() {
    let axes = |from: &str, to: &str| communicating_axes(&layout(from), &layout(to), 2).to_vec();
    assert_eq!(axes("(S0, R)", "(S0, S1)"), [0; 0], "slicing communicates nothing");
    assert_eq!(axes("(S0, S1)", "(S0, R)"), [1]);
    assert_eq!(axes("(S0, S0)", "(S0, R)"), [1], "the inner cut alone");
    assert_eq!(axes("(S0, S0)", "(R, S0)"), [0, 1], "the split inside one that is undone");
    assert_eq!(axes("(S0, S0)", "(S0^1, S0^0)"), [0, 1]);
    assert_eq!(axes("(S0, R)", "(S0, S0)"), [0; 0]);
    assert_eq!(axes("(S0, R)", "(S0^1, S0^0)"), [0], "another split came outside");
    assert_eq!(axes("(S1, RS(0..2; 1,1))", "(R, RS(0..2; 1,1))"), [0, 1], "ragged over a dim that was cut");
}

#[test]
fn bytes_received_are_those_of_the_moves() {
    let run = |rank| {
        let mesh = DeviceMesh::new(&rank, &[("a", 3), ("b", 1)])?;
        let received = |x: &DTensor, to: &str| -> Result<u64> {
            let before = mesh.received_bytes();
            let planned = x.plan_redistribute(layout(to))?;
            x.redistribute(layout(to))?;
            let received = mesh.received_bytes() - before;
            assert_eq!(planned.received_bytes(), received);
            Ok(received)
        };
        let local = Tensor::full(DType::F32, [9], 1.0);
        let x = DTensor::from_local(&mesh, local.clone(), [9], layout("(P(sum), R)"))?;
        assert_eq!(received(&x, "(S0, R)")?, 2 * 12, "two parts of three elements");
        assert_eq!(received(&x, "(R, R)")?, 4 * 12, "two thirds, twice");
        let x = DTensor::from_local(&mesh, local, [9], layout("(R, P(sum))"))?;
        assert_eq!(received(&x, "(R, R)")?, 0, "there is no other rank");
        assert!(!find(&mesh, &x.meta, &x.redistribute(layout("(R, R)"))?.meta)?.communicates());
        Ok(())
    };
    spmd(3, run).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn a_new_partial_keeps_every_bit() {
    let run = |rank| {
        let mesh = DeviceMesh::new(&rank, &[("a", 2)])?;
        let whole = Tensor::from_vec(vec![-0.0f32, 0.0, 1.5, f32::NEG_INFINITY], [4])?;
        for to in ["(P(sum))", "(P(max))", "(P(min))"] {
            let x = DTensor::distribute(&mesh, &whole, Layout::replicated(1))?.redistribute(layout(to))?;
            assert_eq!(x.full_tensor()?.as_bytes(), whole.as_bytes(), "{to}");
        }
        Ok(())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
}

/// Returns element `e` of the part of rank `at`, from numbers whose sums round.
fn part(e: u64, at: u64) -> f32 {
    let h = (e * 31 + at * 977 + 5).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((h >> 40) as f32 / 1e5 - 80.0) * [1.0, 1e-3, 1e3][(h >> 20) as usize % 3]
}

/// Returns the sum of the parts by definition: the range of the first axis is halved down to single ranks, then the next.
fn by_definition(
    lens: &[usize],
    base: usize,
    range: std::ops::Range<usize>,
    of: &dyn Fn(usize) -> f32,
) -> f32 {
    let Some((&len, inner)) = lens.split_first() else { return of(base) };
    if range.len() > 1 {
        let mid = range.start + range.len().div_ceil(2);
        return by_definition(lens, base, range.start..mid, of)
            + by_definition(lens, base, mid..range.end, of);
    }
    let at = base * len + range.start;
    by_definition(inner, at, 0..inner.first().copied().unwrap_or(1), of)
}

/// Returns all layouts of two dims on these axes, in both orders, with partial sums.
fn every_layout(ndim: usize) -> Vec<Layout> {
    let choices =
        [Placement::Replicate, Placement::Shard(0), Placement::Shard(1), Placement::Partial(ReduceOp::Sum)];
    let mut all: Vec<Vec<Placement>> = vec![vec![]];
    for _ in 0..ndim {
        all = all
            .iter()
            .flat_map(|p| choices.iter().map(|q| [&p[..], std::slice::from_ref(q)].concat()))
            .collect();
    }
    let back: Vec<usize> = (0..ndim).rev().collect();
    let both = |p: Vec<Placement>| [Layout::new(p.clone()), Layout::new(p).with_order(&back).unwrap()];
    let mut layouts: Vec<Layout> = all.into_iter().flat_map(both).collect();
    layouts.dedup();
    layouts
}

/// Every pair of layouts on meshes of two axes, planned for bytes alone and for calls alone: from random parts, each plan
/// gives the bits of gathering and slicing.
#[test]
fn every_plan_gives_the_bits_of_gathering_and_cutting() {
    for (a, b, shape, every) in [(2, 4, [8, 8], 3), (3, 2, [7, 5], 1), (2, 2, [5, 4], 1), (2, 3, [1, 9], 2)] {
        let run = move |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", a), ("b", b)])?;
            let (mut calls, mut pairs) = (0, 0);
            for (i, from) in every_layout(2).into_iter().enumerate() {
                for (j, to) in every_layout(2).into_iter().enumerate() {
                    if to.has_partial() || (i + j) % every != 0 {
                        continue;
                    }
                    for call_bytes in [0, 1 << 40] {
                        calls +=
                            check(&mesh, shape.into(), &from, &to, CostModel(&bytes_and_calls(call_bytes)))?;
                        pairs += 1;
                    }
                }
            }
            assert!(pairs > 100 && calls > pairs / 2, "{pairs} pairs, {calls} calls");
            Ok(())
        };
        spmd(a * b, run).unwrap_or_else(|e| panic!("{e}"));
    }
}

/// Runs one plan, and returns the number of its calls.
fn check(mesh: &DeviceMesh, shape: Shape, from: &Layout, to: &Layout, costs: CostModel<'_>) -> Result<usize> {
    let m = mesh.mesh();
    let (src, dst) =
        (Spec::new(m, DType::F32, &shape, from.clone())?, Spec::new(m, DType::F32, &shape, to.clone())?);
    let partial: Vec<usize> = (0..2).filter(|&a| from.axis(a).is_partial()).collect();
    let lens: Vec<usize> = partial.iter().map(|&a| m.axis_len(a)).collect();
    let mine = partial.iter().fold(0, |p, &a| p * m.axis_len(a) + m.coords()[a]);
    let fill = |spec: &Spec, value: &dyn Fn(u64) -> f32| -> Result<Tensor> {
        let region = spec.region();
        let mut values = vec![0.0; region.numel()];
        region.runs(&shape, |e, at, len| (0..len).for_each(|k| values[at + k] = value(e + k as u64)));
        Tensor::from_vec(values, region.local.clone())
    };
    let local = fill(&src, &|e| part(e, mine as u64))?;
    let first = 0..lens.first().copied().unwrap_or(1);
    let want = fill(&dst, &|e| by_definition(&lens, 0, first.clone(), &|at| part(e, at as u64)))?;
    let plan = Redistribution::plan_with_costs(&src, &dst, costs)?;
    let (said, calls, bytes) = (plan.to_string(), plan.calls(), plan.received_bytes());
    let before = mesh.received_bytes();
    let _lineage = Lineage::parameter("w").enter();
    let got = Rc::new(Move::new(mesh, plan)?).run(mesh, local)?;
    assert_eq!(got.shape(), want.shape(), "{src} to {to}: {said}");
    let bits = |t: &Tensor| t.to_vec::<f32>().map(|v| v.into_iter().map(f32::to_bits).collect::<Vec<_>>());
    assert_eq!(bits(&got)?, bits(&want)?, "{src} to {to}: {said}");
    assert_eq!(mesh.received_bytes() - before, bytes, "{src} to {to}: {said}");
    Ok(calls)
}

/// Returns, per rank, the bytes copied for a move of 48 elements on two ranks, and true if the result shares the
/// operand's buffer.
fn copies(from: &'static str, to: &'static str) -> Vec<(u64, bool)> {
    let run = move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("a", 2)])?;
        let whole = Tensor::from_vec((0..48).map(|i| i as f32).collect(), [6, 8])?;
        let x = DTensor::distribute(&mesh, &whole, Layout::replicated(1))?;
        let x = x.redistribute(layout(from))?;
        // A slice of the whole tensor would be a view of it.
        let local = x.local().contiguous()?;
        let x = DTensor::wrap(&mesh, local.clone(), x.meta.clone(), x.lineage);
        let before = mesh.copied_bytes();
        let y = x.redistribute(layout(to))?;
        Ok((mesh.copied_bytes() - before, y.local().shares_storage(&local)))
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn bytes_are_copied_once_or_not_at_all() {
    let (whole, half) = (48 * 4, 24 * 4);
    assert_eq!(copies("(R)", "(S0)"), [(0, true); 2], "a view");
    assert_eq!(copies("(R)", "(S1)"), [(0, true); 2]);
    assert_eq!(copies("(S0)", "(R)"), [(whole, false); 2], "put together once");
    assert_eq!(copies("(S1)", "(R)"), [(whole, false); 2]);
    assert_eq!(copies("(S0)", "(S1)"), [(half, false); 2], "peers are read where they are");
    assert_eq!(copies("(RS(0..1; 0,1))", "(R)"), [(0, false), (0, true)], "the owner's own tensor");
    assert_eq!(copies("(RS(0..2; 1,0))", "(R)"), [(0, true), (0, false)]);
    assert_eq!(copies("(RS(0..1; 1,0))", "(RS(0..1; 0,1))"), [(0, false); 2], "a piece that is all of it");
    assert_eq!(copies("(P(sum))", "(S0)"), [(0, false); 2], "rows are sent as they are, and folded");
    assert_eq!(copies("(P(sum))", "(S1)"), [(whole, false); 2], "columns are packed to be folded");
    assert_eq!(copies("(RS(0..2; 3,5))", "(R)"), [(whole, false); 2], "packed as they are stored");
    let told = copies("(RS(0..2; 3,5))", "(RS(0..2; 5,3))");
    assert!(told.iter().all(|(copied, _)| *copied <= 2 * whole), "{told:?}");
}
