//! Flight records: the files that ranks write, and the reader's conclusions.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use isoshard::Result;
use isoshard::comm::flight::{CallState, FlightReport, read};
use isoshard::comm::{Group, Rank, Spmd};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::tensor::{DType, ReduceOp, Shape, Tensor};
use proptest::prelude::*;
use serde_json::json;

use super::program::{Program, Turn, repeated};

/// A temporary folder, deleted on drop.
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

/// Runs `f`, which fails on some rank, and reads the records.
fn flown(
    world: usize,
    folder: &Folder,
    f: impl Fn(&Rank) -> Result<()> + Send + Sync + 'static,
) -> FlightReport {
    let run = Spmd::new(world).deadline(Duration::from_millis(200)).on_slow(|_| ()).flight_dir(&folder.0);
    run.run(move |rank| f(&rank)).unwrap_err();
    for rank in 0..world {
        let text = fs::read_to_string(folder.file(rank)).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).expect("records are JSON");
        assert_eq!((json["isoshard_flight"].as_u64(), json["rank"].as_u64()), (Some(3), Some(rank as u64)));
    }
    read(&folder.0).unwrap()
}

/// The records and the report show announced work, also that of a rank that waits itself.
#[test]
fn announced_work_is_shown() {
    let folder = Folder::new();
    let report = flown(3, &folder, |rank| {
        let _busy = match rank.rank() {
            0 => Some(rank.busy_for("saving", Duration::from_millis(100))),
            1 => Some(rank.busy("hashing")),
            _ => None,
        };
        std::thread::sleep(Duration::from_millis(if rank.rank() == 0 { 900 } else { 0 }));
        rank.world().barrier()
    });
    let busy: Vec<_> = report.records.iter().map(|record| record.busy.as_ref()).collect();
    assert_eq!(
        busy.iter().map(|busy| busy.map(|busy| &busy.what[..])).collect::<Vec<_>>(),
        [Some("saving"), Some("hashing"), None]
    );
    assert!(busy[0].unwrap().spent >= Duration::from_millis(250), "{busy:?}");
    let text = report.to_string();
    assert!(text.contains("completed nothing last; busy with \"hashing\" for "), "{text}");
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
        let [mismatch] = &report.mismatches[..] else { panic!("{report}") };
        assert!(mismatch.id.group.starts_with(&name), "{report}");
        assert!(mismatch.brought.iter().any(|(_, ranks)| *ranks == [culprit]), "{culprit}: {report}");
        assert!(report.first.is_some() && report.without_record.is_empty(), "{report}");
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
    let circle: Vec<_> = report.cycle.iter().map(|w| (w.rank, w.id.to_string(), w.waits_for)).collect();
    // Ranks 0 and 1 wait in one call, so rank 2 forms a cycle with either.
    let waits = |r| [(r, "all_reduce #1 on group a{0, 1, 2}", 2), (2, "barrier #0 on group b{0, 1, 2}", r)];
    let found =
        |wait: &(usize, &str, usize)| circle.iter().any(|(r, id, on)| (*r, id.as_str(), *on) == *wait);
    assert!(circle.len() == 2 && [0, 1].iter().any(|&r| waits(r).iter().any(found)), "{report}");
    assert!(report.incomplete.iter().any(|b| b.absent.iter().any(|(rank, _)| *rank == 2)), "{report}");
    assert!(report.mismatches.is_empty(), "{report}");

    let folder = Folder::new();
    let report = flown(2, &folder, |rank| {
        (0..3).try_for_each(|k| sum(&rank.world(), k))?;
        if rank.rank() == 1 {
            std::panic::resume_unwind(Box::new("out of luck\n\"quoted\""));
        }
        sum(&rank.world(), 7)
    });
    assert_eq!(report.first, Some((1, "panicked: out of luck\n\"quoted\"".into())));
    let [behind] = &report.incomplete[..] else { panic!("{report}") };
    assert_eq!((behind.waiting.as_slice(), behind.absent[0].0), (&[0][..], 1), "{report}");
    assert_eq!(behind.id.to_string(), "all_reduce #3 on group world{0, 1}");
    assert_eq!(behind.absent[0].1.as_deref(), Some("all_reduce #2 on group world{0, 1}"));
}

/// A record holds the last 256 calls, oldest first, with the operators that they were made for.
#[test]
fn what_a_record_holds() {
    let folder = Folder::new();
    let report = flown(2, &folder, |rank| {
        let mesh = DeviceMesh::new(rank, &[("tp", 2)])?;
        let x = DTensor::zeros(&mesh, DType::F32, [4, 6], "(S0)")?;
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
                .all(|call| call.state == CallState::Completed && call.ended_us >= call.started_us)
        );
        let last = &calls[255];
        let group = |call| &*record.group(call).name;
        assert_eq!((last.state, &*last.operator, group(last)), (CallState::Failed, "", "world"));
        assert_eq!((&*calls[0].operator, group(&calls[0])), ("redistribute", "tp"));
        let exchange = calls.iter().find(|call| call.brought.name == "all_to_all").unwrap();
        assert!(exchange.brought.sent.kept().eq([[1, 3], [2, 3]]));
        assert!(exchange.brought.expected.kept().eq([[1 + record.rank, 3]]));
        assert_eq!(exchange.brought.expected.len(), 2);
        assert_eq!(exchange.brought.dtype, DType::BF16);
        let message = calls.iter().find(|call| matches!(&*call.brought.name, "send" | "recv")).unwrap();
        assert_eq!(message.brought.name == "send", record.rank == 0);
    }
    assert_eq!(report.mismatches.len(), 1, "{report}");
}

/// An empty list of shapes as files hold it.
const NONE: &str = "{\"len\":0,\"is_uniform\":true,\"kept\":[],\"hash\":\"0\"}";

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
    refused("", "EOF while parsing a value at line 1 column 0");
    refused("[]", "expected a flight record");
    refused("{}", "missing field `isoshard_flight`");
    refused("{\"isoshard_flight\":1}", "it is of version 1, this reader's is 3");
    refused("{\"isoshard_flight\":4}", "it is of version 4, this reader's is 3");
    refused("{\"isoshard_flight\":3}", "missing field `rank`");
    let whole = |rank: usize, calls: &str| {
        format!(
            "{{\"isoshard_flight\":3,\"rank\":{rank},\"world_len\":2,\"began_unix_us\":0,\"failed_us\":0,\"cause\":\"\",\
             \"is_echo\":true,\"calls_len\":0,\"groups\":[],\"calls\":[{calls}]}}"
        )
    };
    refused(&whole(1, ""), "the record is that of rank 1");
    refused(&whole(2, ""), "there is no rank 2 of 2");
    refused(&whole(0, "{\"group\":0}"), "missing field `number`");
    let call = |number: u64, group: usize| {
        format!(
            "{{\"number\":{number},\"group\":{group},\"seq\":0,\"brought\":{{\"name\":\"barrier\",\"route\":\"barrier\",\
             \"op\":null,\"dtype\":\"u8\",\"sent\":{NONE},\"expected\":{NONE}}},\"operator\":\"\",\
             \"state\":\"started\",\"started_us\":0,\"ended_us\":0}}"
        )
    };
    refused(&whole(0, &call(0, 0)), "1 calls are kept of 0");
    refused(&whole(0, &call(0, 0)).replace("\"calls_len\":0", "\"calls_len\":1"), "no group 0");
    fs::write(folder.file(0), whole(0, "")).unwrap();
    assert_eq!(read(&folder.0).unwrap().without_record, [1]);
    fs::write(folder.file(2), whole(2, "").replace("\"world_len\":2", "\"world_len\":3")).unwrap();
    assert!(said(&folder).contains("of several worlds"), "{}", said(&folder));
}

/// Returns the record that rank 0 of two writes.
fn sample() -> String {
    let folder = Folder::new();
    flown(2, &folder, |rank| {
        sum(&rank.world(), 3)?;
        rank.world().all_to_all(vec![Tensor::zeros(DType::F32, [1]); 2], &vec![Shape::from([1]); 2])?;
        sum(&rank.world(), rank.rank())
    });
    fs::read_to_string(folder.file(0)).unwrap()
}

/// Changes one value of a record and reads it.
fn changed(at: &str, to: serde_json::Value) -> String {
    let folder = Folder::new();
    let mut record: serde_json::Value = serde_json::from_str(&sample()).unwrap();
    let place = record.pointer_mut(at);
    *place.expect(at) = to;
    fs::create_dir_all(&folder.0).unwrap();
    fs::write(folder.file(0), record.to_string()).unwrap();
    read(&folder.0).map_or_else(|e| e.to_string(), |report| report.to_string())
}

#[test]
fn what_a_record_claims_is_bounded() {
    let refused = |at: &str, to: serde_json::Value, why: &str| {
        let said = changed(at, to);
        assert!(said.starts_with("flight: not a flight record") && said.contains(why), "{at}: {said}");
    };
    let huge = u64::MAX / 2;
    refused("/world_len", json!(4_611_686_018_427_387_904u64), "there is no rank 0 of");
    refused("/world_len", json!(huge), "there is no rank 0 of");
    refused("/rank", json!(2), "there is no rank 2 of 2");
    refused("/rank", json!(-1), "invalid value: integer `-1`");
    refused("/groups/0/ranks", json!([0, 2]), "group 0 does not consist of ranks of a world of 2");
    refused("/groups/0/ranks", json!([0, 0]), "group 0 does not consist of ranks of a world of 2");
    refused("/groups/0/ranks", json!([]), "group 0 does not consist of ranks of a world of 2");
    refused("/groups/0/ranks", json!([1]), "rank 0 is not in group 0");
    refused("/groups/0/ranks", json!([0, 1.5]), "invalid type: floating point `1.5`");
    refused("/groups", json!(vec![(); 300]), "expected a group");
    refused("/calls/1/group", json!(1), "no group 1");
    refused("/calls/1/number", json!(2), "call 2 stands in the place of call 1");
    refused("/calls/0/brought/route", json!({"broadcast": {"root": 2}}), "group 0 has no member 2");
    refused("/calls/0/brought/route", json!({"send": {"to": huge}}), "group 0 has no member");
    refused("/calls/0/brought/route", json!("ring"), "unknown variant `ring`");
    refused("/calls/0/brought/dtype", json!("f33"), "unknown variant `f33`");
    refused("/calls/0/brought/op", json!("product"), "unknown variant `product`");
    refused("/calls/0/state", json!("lost"), "unknown variant `lost`");
    refused("/calls/0/brought/sent/hash", json!("x"), "no hash \"x\"");
    refused("/calls/0/brought/sent/kept", json!([[3], [3]]), "2 shapes are more than a record keeps of 1");
    refused("/calls/0/brought/sent/kept", json!([vec![1; 24]]), "1 shapes are more than a record keeps of 1");
    refused("/calls/0/brought/sent/kept", json!(vec![[0; 0]; 25]), "expected a list of at most 24");
    let call: serde_json::Value =
        serde_json::from_str::<serde_json::Value>(&sample()).unwrap()["calls"][0].take();
    refused("/calls", json!(vec![call; 257]), "expected a list of at most 256");
    // A huge length without items takes no time.
    let said = changed("/calls/0/brought/sent/len", json!(huge));
    assert!(said.starts_with("records of 1 rank(s) of 2"), "{said}");
    let said = changed("/world_len", json!(1 << 20));
    assert!(said.starts_with("records of 1 rank(s) of 1048576"), "{}", &said[..100]);

    let (folder, text) = (Folder::new(), sample());
    let said = |text: &str| {
        fs::create_dir_all(&folder.0).unwrap();
        fs::write(folder.file(0), text).unwrap();
        read(&folder.0).map_or_else(|e| e.to_string(), |report| report.to_string())
    };
    assert!(said(&text).starts_with("records of 1 rank(s) of 2"));
    for before in ["", "{\"other\":", "{\"isoshard_flight\":", "{\"isoshard_flight\":3,\"calls\":"] {
        let deep = said(&(before.to_string() + &"[".repeat(100_000)));
        assert!(deep.starts_with("flight: not a flight record") && deep.contains("rank-0.json: "), "{deep}");
    }
    assert!(said(&format!("{text}{text}")).contains("rank-0.json: trailing characters"));
    assert!(
        said(&(text.clone() + &" ".repeat(16 << 20)))
            .contains("rank-0.json: it has more than 16777216 bytes")
    );
    for (from, to) in [
        ("\"rank\":0", "\"rank\":00"),
        ("\"rank\":0", "\"rank\":18446744073709551616"),
        ("\"rank\":0", "\"rank\" 0"),
        ("\"rank\":0", "\"rank\":0,\"rank\":0"),
        ("\"name\":\"world\"", "\"name\":\"\n\""),
        ("\"name\":\"world\"", "\"name\":\"\\x\""),
        ("\"name\":\"world\"", "\"name\":\"\\ud800\""),
        ("\"ranks\":[0,1]", "\"ranks\":[0,1,]"),
        ("\"ranks\":[0,1]", "\"ranks\":[0 1]"),
    ] {
        let wrong = text.replacen(from, to, 1);
        assert!(wrong != text && said(&wrong).contains("rank-0.json: "), "{to}: {}", said(&wrong));
    }
    fs::remove_file(folder.file(0)).unwrap();
    fs::create_dir(folder.file(0)).unwrap();
    assert!(read(&folder.0).unwrap_err().to_string().contains("rank-0.json: it is no regular file"));
    fs::remove_dir(folder.file(0)).unwrap();
    // A pipe would never end, nor be opened.
    match std::process::Command::new("mkfifo").arg(folder.file(0)).status() {
        Ok(made) if made.success() => {
            assert!(read(&folder.0).unwrap_err().to_string().contains("rank-0.json: it is no regular file"));
        }
        _ => println!("SKIPPED: no mkfifo"),
    }
}

/// Reads a text instead of a record: it is a record, or refused with the file's name.
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
    // Pieces of records in another order, with changed bytes.
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
