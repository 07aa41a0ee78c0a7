//! Redistributions in flight: several at once, waited for in any order, dropped, and with a rank that fails.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use isoshard::comm::Spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::{Layout, Spec};
use isoshard::tensor::{DType, Shape, Tensor};
use isoshard::{Error, Result};

use crate::common::{part_of, small_ints, spmd, spread};

fn layout(text: &str) -> Layout {
    text.parse().expect("a layout")
}

/// Pairs of layouts whose plans have no call, one or two, folds and exchanges.
const MOVES: [(&str, &str); 7] = [
    ("(S0, R)", "(R, S0)"),
    ("(R, P(sum))", "(R, R)"),
    ("(P(sum), S0)", "(S1, S1)"),
    ("(R, R)", "(S0, S1)"),
    ("(S1, S0)", "(R, R)"),
    ("(P(sum), P(sum))", "(R, S1)"),
    ("(RS(0..1; 0,1), R)", "(R, R)"),
];

/// A shape so large that two calls are chosen over one if they save bytes.
fn shape() -> Shape {
    [128, 256].into()
}

fn source(mesh: &DeviceMesh, k: usize) -> Result<DTensor> {
    let whole = small_ints(DType::F32, &shape(), k as u64);
    let spec = Spec::new(mesh.mesh(), DType::F32, shape(), layout(MOVES[k].0))?;
    spread(mesh, &whole, &spec, k as u64)
}

fn assert_arrived(mesh: &DeviceMesh, k: usize, got: &DTensor) -> Result<()> {
    let whole = small_ints(DType::F32, &shape(), k as u64);
    let spec = Spec::new(mesh.mesh(), DType::F32, shape(), layout(MOVES[k].1))?;
    let want = part_of(&whole, &spec, mesh.mesh().coords(), 0);
    assert_eq!(got.local().to_f64_vec(), want.to_f64_vec(), "{:?}", MOVES[k]);
    Ok(())
}

#[test]
fn some_take_two_calls() {
    let calls = spmd(8, |rank| {
        let mesh = DeviceMesh::new(&rank, &[("a", 2), ("b", 4)])?;
        let calls = |k: usize| Ok(source(&mesh, k)?.plan_redistribute(layout(MOVES[k].1))?.calls());
        (0..MOVES.len()).map(calls).collect::<Result<Vec<_>>>()
    });
    assert_eq!(calls.unwrap_or_else(|e| panic!("{e}"))[3], [1, 2, 1, 0, 1, 2, 1]);
}

/// All are in flight at once, and each rank waits for them in its own order.
#[test]
fn waited_for_in_any_order() {
    for turn in 0..5 {
        let run = move |rank: isoshard::comm::Rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 2), ("b", 4)])?;
            let start = |k: usize| Ok(Some(source(&mesh, k)?.redistribute_async(layout(MOVES[k].1))?));
            let mut pending = (0..MOVES.len()).map(start).collect::<Result<Vec<_>>>()?;
            for i in 0..MOVES.len() {
                // Strides coprime with the number of moves: 1 to 6.
                let k = (i * (1 + (turn + rank.rank()) % 6) + turn) % MOVES.len();
                let got = pending[k].take().expect("each once").wait()?;
                assert_arrived(&mesh, k, &got)?;
            }
            Ok(())
        };
        spmd(8, run).unwrap_or_else(|e| panic!("{e}"));
    }
}

#[test]
fn dropped_by_all_or_some() {
    let run = |rank: isoshard::comm::Rank| {
        let mesh = DeviceMesh::new(&rank, &[("a", 2), ("b", 4)])?;
        for round in 0..20 {
            let mut kept = Vec::new();
            for (k, to) in MOVES.iter().enumerate() {
                let x = source(&mesh, k)?;
                let pending = x.redistribute_async(layout(to.1))?;
                // A move of two calls is dropped by all ranks or none; a move of one call by some.
                let who = if x.plan_redistribute(layout(to.1))?.calls() > 1 { 0 } else { rank.rank() };
                if (who + k + round) % 3 == 0 {
                    drop(pending);
                } else {
                    kept.push((k, pending));
                }
            }
            for (k, pending) in kept {
                assert_arrived(&mesh, k, &pending.wait()?)?;
            }
        }
        Ok(())
    };
    spmd(8, run).unwrap_or_else(|e| panic!("{e}"));
}

/// A rank ends with an error while other ranks wait: moves for which it has sent its part complete, and all others fail with
/// an error that names it, before the deadline.
#[test]
fn one_rank_fails() {
    for culprit in [0, 5, 7] {
        let said = Arc::new(Mutex::new(vec![String::new(); 8]));
        let saying = said.clone();
        let run = move |rank: isoshard::comm::Rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 2), ("b", 4)])?;
            let one = source(&mesh, 4)?.redistribute_async(layout(MOVES[4].1))?;
            let two = source(&mesh, 1)?.redistribute_async(layout(MOVES[1].1))?;
            mesh.barrier()?;
            if rank.rank() == culprit {
                return Err(Error::invalid("step", "went wrong", "it", "try again"));
            }
            let text = match one.wait().and_then(|_| two.wait()) {
                Ok(_) => "arrived".to_string(),
                Err(e) => e.to_string(),
            };
            saying.lock().unwrap()[rank.rank()] = text;
            Ok(())
        };
        let began = std::time::Instant::now();
        let error = Spmd::new(8).deadline(Duration::from_secs(30)).run(run).unwrap_err().to_string();
        assert_eq!(error, format!("rank {culprit}: step: went wrong; got it; try again"));
        assert!(began.elapsed() < Duration::from_secs(20), "nobody waited for the deadline");
        for (rank, text) in said.lock().unwrap().iter().enumerate().filter(|(rank, _)| *rank != culprit) {
            let named = text.contains(&format!("rank {culprit}")) || text.contains(&format!("[{culprit}]"));
            assert!(named, "rank {rank} says {text:?} of rank {culprit}");
        }
    }
}

#[test]
fn the_source_may_be_written_meanwhile() {
    let run = |rank| {
        let mesh = DeviceMesh::new(&rank, &[("a", 2), ("b", 2)])?;
        let local = Tensor::from_vec(vec![1.0f32; 6], [6])?;
        let x = DTensor::from_local(&mesh, local, [12], layout("(S0, R)"))?;
        let pending = x.redistribute_async(layout("(R, R)"))?;
        let mut mine = x.into_local();
        mine.make_mut::<f32>()?.fill(7.0);
        assert_eq!(pending.wait()?.local().to_f64_vec(), [1.0; 12]);
        Ok(())
    };
    spmd(4, run).unwrap_or_else(|e| panic!("{e}"));
}
