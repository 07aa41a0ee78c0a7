//! Flight records: what is written, and what the reader makes of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use isoshard::Result;
use isoshard::comm::flight::{Report, State, read};
use isoshard::comm::{Group, Rank, Spmd};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::Layout;
use isoshard::tensor::{DType, ReduceOp, Shape, Tensor};
use proptest::prelude::*;

use super::program::{Program, Turn, repeated};

/// A folder of its own, gone with the value.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let name = format!("isoshard-flight-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        Folder(std::env::temp_dir().join(name))
    }

    fn file(&self, rank: usize) -> PathBuf {
        self.0.join(format!("rank-{rank}.json"))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn sum(group: &Group, len: usize) -> Result<()> {
    group.all_reduce(&Tensor::zeros(DType::F32, [len]), ReduceOp::Sum).map(drop)
}

/// Runs `f`, which fails on some rank, and reads what was written.
fn flown(world: usize, folder: &Folder, f: impl Fn(&Rank) -> Result<()> + Send + Sync + 'static) -> Report {
    let run = Spmd::new(world).deadline(Duration::from_millis(200)).on_slow(|_| ()).flight_dir(&folder.0);
    run.run(move |rank| f(&rank)).unwrap_err();
    for rank in 0..world {
        let text = fs::read_to_string(folder.file(rank)).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).expect("records are JSON");
        assert_eq!((json["isoshard_flight"].as_u64(), json["rank"].as_u64()), (Some(1), Some(rank as u64)));
    }
    read(&folder.0).unwrap()
}

#[test]
fn who_brought_something_else_is_found() {
    repeated("flight", |random| {
        let folder = Folder::new();
        let program = Program::random(random);
        let at = random.below(program.steps.len());
        let culprit = *random.pick(&program.groups[program.steps[at].group]);
        let planned = program.steps[at];
        let (shared, name) = (program.clone(), format!("g{}{{", planned.group));
        let report = flown(program.world, &folder, move |rank| {
            let end = shared.run(rank, Duration::from_secs(1), |step| {
                let other = super::program::Step { len: planned.len + 7, ..planned };
                Ok(if (step, rank.rank()) == (at, culprit) { Turn::Instead(other) } else { Turn::AsPlanned })
            })?;
            end.fault.map_or(Ok(()), |(_, fault)| Err(fault.into()))
        });
        let [difference] = &report.differences[..] else { panic!("{report}") };
        assert!(difference.id.group.starts_with(&name), "{report}");
        assert!(difference.brought.iter().any(|(_, ranks)| *ranks == [culprit]), "{culprit}: {report}");
        assert!(report.first.is_some() && report.silent.is_empty(), "{report}");
        assert!(report.to_string().contains(&format!("rank(s) [{culprit}] brought")), "{report}");
    });
}

#[test]
fn who_stayed_behind_and_who_waits_for_whom() {
    let folder = Folder::new();
    let report = flown(3, &folder, |rank| {
        let (a, b) = (rank.group(&[0, 1, 2], "a")?, rank.group(&[0, 1, 2], "b")?);
        sum(&a, 2)?;
        if rank.rank() == 2 {
            b.barrier()?;
            return sum(&a, 3);
        }
        sum(&a, 3)?;
        b.barrier()
    });
    let circle: Vec<_> = report.circle.iter().map(|w| (w.rank, w.id.to_string(), w.waits_for)).collect();
    // Ranks 0 and 1 wait in one call, so rank 2 makes a circle with either.
    let waits = |r| [(r, "all_reduce #1 on group a{0, 1, 2}", 2), (2, "barrier #0 on group b{0, 1, 2}", r)];
    let found =
        |wait: &(usize, &str, usize)| circle.iter().any(|(r, id, on)| (*r, id.as_str(), *on) == *wait);
    assert!(circle.len() == 2 && [0, 1].iter().any(|&r| waits(r).iter().any(found)), "{report}");
    assert!(report.behind.iter().any(|b| b.absent.iter().any(|(rank, _)| *rank == 2)), "{report}");
    assert!(report.differences.is_empty(), "{report}");

    let folder = Folder::new();
    let report = flown(2, &folder, |rank| {
        (0..3).try_for_each(|k| sum(&rank.world(), k))?;
        if rank.rank() == 1 {
            std::panic::resume_unwind(Box::new("out of luck\n\"quoted\""));
        }
        sum(&rank.world(), 7)
    });
    assert_eq!(report.first, Some((1, "panicked: out of luck\n\"quoted\"".into())));
    let [behind] = &report.behind[..] else { panic!("{report}") };
    assert_eq!((behind.waiting.as_slice(), behind.absent[0].0), (&[0][..], 1), "{report}");
    assert_eq!(behind.id.to_string(), "all_reduce #3 on group world{0, 1}");
    assert_eq!(behind.absent[0].1.as_deref(), Some("all_reduce #2 on group world{0, 1}"));
}

/// A ring of the last 256 calls, oldest first, with what wanted them.
#[test]
fn what_a_record_holds() {
    let folder = Folder::new();
    let report = flown(2, &folder, |rank| {
        let mesh = DeviceMesh::new(rank, &[("tp", 2)])?;
        let x = DTensor::zeros(&mesh, DType::F32, [4, 6], "(S0)".parse::<Layout>()?)?;
        for _ in 0..300 {
            x.full_tensor()?;
        }
        let part = |rows| Tensor::zeros(DType::BF16, [rows, 3]);
        rank.world()
            .all_to_all(vec![part(1), part(2)], &[1, 2].map(|_| Shape::from([1 + rank.rank(), 3])))?;
        if rank.rank() == 0 {
            rank.world().send(&part(5), 1)?;
        } else {
            rank.world().recv(0, DType::BF16, &Shape::from([5, 3]))?;
        }
        x.transpose(0, 1)?.matmul(&x)?.sum_all()?.full_tensor()?;
        sum(&rank.world(), rank.rank())
    });
    for record in &report.records {
        let calls = &record.calls;
        assert_eq!(
            (calls.len(), record.calls_len, calls[255].number + 1),
            (256, record.calls_len, record.calls_len)
        );
        assert!(calls.windows(2).all(|pair| pair[1].number == pair[0].number + 1));
        assert!(calls.windows(2).all(|pair| pair[1].started_us >= pair[0].started_us));
        assert!(
            calls[..255]
                .iter()
                .all(|call| call.state == State::Completed && call.ended_us >= call.started_us)
        );
        let last = &calls[255];
        assert_eq!((last.state, last.operator.as_str(), last.group.as_str()), (State::Failed, "", "world"));
        assert_eq!((calls[0].operator.as_str(), calls[0].group.as_str()), ("redistribute", "tp"));
        let exchange = calls.iter().find(|call| call.brought.call == "all_to_all").unwrap();
        let shape = vec![1 + record.rank, 3];
        assert_eq!(exchange.brought.sent.kept, [[1, 3], [2, 3]]);
        assert_eq!(
            (exchange.brought.expected.kept.as_slice(), exchange.brought.expected.len),
            (&[shape][..], 2)
        );
        assert_eq!(exchange.brought.dtype, "bf16");
        let message = calls.iter().find(|call| matches!(call.brought.call, "send" | "recv")).unwrap();
        assert_eq!(message.brought.call == "send", record.rank == 0);
    }
    assert_eq!(report.differences.len(), 1, "{report}");
}

#[test]
fn what_is_no_record_is_refused_by_name() {
    let folder = Folder::new();
    let said = |folder: &Folder| read(&folder.0).unwrap_err().to_string();
    assert!(said(&folder).starts_with("flight: cannot access the file; got"));
    fs::create_dir_all(&folder.0).unwrap();
    assert!(said(&folder).ends_with("there are no files rank-<k>.json"), "{}", said(&folder));
    let refused = |text: &str, why: &str| {
        fs::write(folder.file(0), text).unwrap();
        assert!(said(&folder).contains("rank-0.json: ") && said(&folder).contains(why), "{}", said(&folder));
    };
    refused("", "expected a value at byte 0");
    refused("[]", "an object was expected");
    refused("{}", "there is no \"isoshard_flight\"");
    refused("{\"isoshard_flight\":2}", "it is of version 2, this reader's is 1");
    let whole = |rank: usize, calls: &str| {
        format!(
            "{{\"isoshard_flight\":1,\"rank\":{rank},\"world_len\":2,\"began_unix_us\":0,\"failed_us\":0,\"cause\":\"\",\
             \"is_echo\":true,\"calls_len\":0,\"groups\":[],\"calls\":[{calls}]}}"
        )
    };
    refused(&whole(1, ""), "the record is that of rank 1");
    refused(&whole(0, "{\"group\":0}"), "no group 0");
    fs::write(folder.file(0), whole(0, "")).unwrap();
    assert_eq!(read(&folder.0).unwrap().silent, [1]);
    fs::write(folder.file(2), whole(2, "")).unwrap();
    assert!(said(&folder).contains("of several worlds"), "{}", said(&folder));
}

fn sample() -> String {
    let folder = Folder::new();
    flown(2, &folder, |rank| {
        sum(&rank.world(), 3)?;
        rank.world().all_to_all(vec![Tensor::zeros(DType::F32, [1]); 2], &vec![Shape::from([1]); 2])?;
        sum(&rank.world(), rank.rank())
    });
    fs::read_to_string(folder.file(0)).unwrap()
}

/// Reads a text in place of a record; whatever it is, it is a record or refused with the file's name.
fn survives(dir: &Path, bytes: &[u8]) {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("rank-0.json"), bytes).unwrap();
    match read(dir) {
        Ok(report) => drop(report.to_string()),
        Err(e) => assert!(e.to_string().contains("rank-0.json"), "{e}"),
    }
}

#[test]
fn broken_records_are_refused_and_never_panic() {
    let (folder, text) = (Folder::new(), sample());
    (0..text.len()).step_by(7).for_each(|n| survives(&folder.0, &text.as_bytes()[..n]));
    // Pieces of records put together anew, and bytes changed.
    let pieces: Vec<String> =
        text.split_inclusive([',', ':', '{', '}', '[', ']', '"']).map(String::from).collect();
    let changed = proptest::collection::vec((0..text.len(), any::<u8>()), 1..4);
    let joined = proptest::collection::vec(proptest::sample::select(pieces), 0..40);
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() };
    let rng = proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha);
    let mut runner = proptest::test_runner::TestRunner::new_with_rng(config, rng);
    let run = runner.run(&(changed, joined), |(changed, joined)| {
        let mut bytes = text.clone().into_bytes();
        changed.iter().for_each(|(at, byte)| bytes[*at] = *byte);
        survives(&folder.0, &bytes);
        survives(&folder.0, joined.concat().as_bytes());
        Ok(())
    });
    run.unwrap();
}
