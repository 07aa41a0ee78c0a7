//! Checkpoints and exports of programs that are killed: after a kill at any moment, what has its name is whole. And two
//! processes that export to one name.
//!
//! The tests start this program again as children that save without end, and kill them at random moments. Each child
//! first loads the newest checkpoint and compares every element. `ISOSHARD_CRASH_KILLS` sets the number of kills.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use isoshard::checkpoint::{self, Checkpoint, CheckpointFolder, StateTree};
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::nn::{Decoder, Plan};
use isoshard::tensor::DType;
use isoshard::testing::values::SplitMix;

/// Names the folder to a child.
const CHILD: &str = "ISOSHARD_CRASH_FOLDER";
/// Names the folder to a child that exports, and says how.
const EXPORTER: &str = "ISOSHARD_CRASH_EXPORT";

/// Returns the number of kills of a test.
fn kills(few: usize) -> usize {
    std::env::var("ISOSHARD_CRASH_KILLS").map_or(few, |text| text.parse().expect("a number of kills"))
}

/// Compares the newest checkpoint with what its step saved, then saves one step after another until it is killed.
fn save_without_end(root: PathBuf, ranks: usize, asynchronous: bool) {
    let run = move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("fsdp", ranks)])?;
        let mut folder = CheckpointFolder::new(&root).keep(2);
        let mut step = 0;
        if let Some((newest, saved)) = folder.newest(&mesh)? {
            saved.verify()?;
            let wanted = [("sharded", "(S0)".parse()?), ("whole", "(R)".parse()?)];
            for x in saved.tensors(&mesh, &wanted)? {
                let found = x.local().to_vec::<f32>()?;
                assert!(found.iter().all(|&x| x == newest as f32), "step {newest} has {:?}", found[0]);
            }
            assert_eq!(saved.value("step").and_then(|v| v.as_u64()), Some(newest));
            step = newest;
        }
        loop {
            step += 1;
            let state = state_of(&mesh, step)?;
            match asynchronous {
                true => folder.save_async(&mesh, step, &state)?,
                false => folder.save(&mesh, step, &state)?,
            }
        }
    };
    let ended: isoshard::Result<Vec<()>> = spmd(ranks, run);
    ended.unwrap_or_else(|e| panic!("{e}"));
}

/// The child's part; nothing if the program was not started as a child.
#[test]
fn child() {
    let Ok(root) = std::env::var(CHILD) else { return };
    let (ranks, asynchronous) = root.split_once(':').expect("ranks:how:folder");
    let (how, root) = asynchronous.split_once(':').expect("ranks:how:folder");
    save_without_end(PathBuf::from(root), ranks.parse().expect("a number"), how == "async");
}

/// The folders of saves that have begun and not ended.
fn unfinished(root: &Path) -> Vec<String> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.ends_with(".unfinished")).collect()
}

fn steps(root: &Path) -> Vec<u64> {
    CheckpointFolder::new(root).steps().expect("readable")
}

#[test]
fn kills_leave_a_whole_checkpoint() {
    let root = std::env::temp_dir().join(format!("isoshard-crash-{}", std::process::id()));
    let _ = fs::remove_dir_all(&root);
    let mut random = SplitMix(7);
    // The time of a few saves on this machine, whose disk may be slow to flush.
    let window = 4 * time_of_a_save(&root);
    let (mut within, mut last) = (0, 0);
    let kills = kills(200);
    for kill in 0..kills {
        let how = if kill % 2 == 0 { "async" } else { "sync" };
        let place = format!("{}:{how}:{}", 1 + kill % 3, root.display());
        let left = unfinished(&root);
        let begun = || unfinished(&root).iter().any(|name| !left.contains(name));
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["child", "--exact", "--nocapture"])
            .env(CHILD, place)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("this program starts");
        // A save has begun, or a while has passed; then any moment of this save and the next ones.
        let deadline = Instant::now() + Duration::from_secs(10);
        while !begun() && Instant::now() < deadline && child.try_wait().expect("a child").is_none() {
            std::thread::sleep(Duration::from_micros(200));
        }
        std::thread::sleep(Duration::from_micros(random.below(window.as_micros() as usize) as u64));
        child.kill().expect("it runs");
        let output = child.wait_with_output().expect("it was killed");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), None, "kill {kill}: the child ended by itself: {said}");
        within += usize::from(begun());
        let newest = steps(&root).last().copied().unwrap_or(0);
        assert!(newest >= last, "kill {kill}: step {newest} after {last}");
        last = newest;
    }
    println!("{kills} kills, {within} of them within a save; {last} steps");
    assert!(within >= kills / 5, "only {within} kills were within a save");
    assert!(last >= kills as u64 / 5, "only {last} saves ended");
    let newest = CheckpointFolder::new(&root).dir_of(last);
    Checkpoint::open(newest).and_then(|saved| saved.verify()).expect("the last one is whole");
    fs::remove_dir_all(root).expect("made here");
}

/// Times a save as the children make them.
fn time_of_a_save(root: &Path) -> Duration {
    let dir = root.join("timed");
    let took = spmd(1, move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("fsdp", 1)])?;
        let state = state_of(&mesh, 0)?;
        let begin = Instant::now();
        checkpoint::save(&mesh, &dir, &state)?;
        fs::remove_dir_all(&dir).map_err(isoshard::Error::other)?;
        Ok(begin.elapsed())
    });
    took.unwrap_or_else(|e| panic!("{e}"))[0].max(Duration::from_millis(5))
}

/// Two tensors with the step as the value of every element, and the step.
fn state_of(mesh: &DeviceMesh, step: u64) -> isoshard::Result<StateTree> {
    let mut state = StateTree::new();
    for (name, layout) in [("sharded", "(S0)"), ("whole", "(R)")] {
        let x = DTensor::full(mesh, DType::F32, [1501, 500], layout, step as f64)?;
        state.insert(name, x)?;
    }
    state.insert_value("step", step)?;
    Ok(state)
}

/// Reads the small Llama, multiplies its parameters, and exports it to a folder: once, or without end. Returns the digest of
/// the parameters.
fn export(dir: &Path, factor: f64, without_end: bool) -> isoshard::Result<u64> {
    let dir = dir.to_path_buf();
    let ended = spmd(2, move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
        let from = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hugging_face/llama2");
        let mut of = Decoder::from_hugging_face(&mesh, from, Plan::default().fsdp("fsdp"))?;
        for id in of.params.ids().collect::<Vec<_>>() {
            let scaled = of.params.value(id).mul_scalar(factor)?;
            of.params.set(id, scaled)?;
        }
        loop {
            of.format.save_shards(&of.params, &dir, 12_000)?;
            if !without_end {
                return of.params.digest();
            }
            if rank.rank() == 0 {
                let old = dir.with_extension("old");
                fs::rename(&dir, &old)
                    .and_then(|()| fs::remove_dir_all(old))
                    .map_err(isoshard::Error::other)?;
            }
            rank.world().barrier()?;
        }
    });
    ended.map(|digests| digests[0])
}

/// Returns the digest of the parameters in a folder.
fn digest_of(dir: &Path) -> u64 {
    let dir = dir.to_path_buf();
    let loaded = spmd(1, move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("fsdp", 1)])?;
        Decoder::from_hugging_face(&mesh, &dir, Plan::default())?.params.digest()
    });
    loaded.unwrap_or_else(|e| panic!("{e}"))[0]
}

/// The part of a child that exports; nothing if the program was not started as one.
#[test]
fn exporter() {
    let Ok(how) = std::env::var(EXPORTER) else { return };
    let (factor, dir) = how.split_once(':').expect("a factor, or `endless`, and a folder");
    let dir = Path::new(dir);
    if factor == "endless" {
        let _ = fs::remove_dir_all(dir.with_extension("old"));
        let _ = fs::remove_dir_all(dir);
        export(dir, 1.0, true).unwrap_or_else(|e| panic!("{e}"));
    }
    // Two children begin when the file that both wait for is there.
    let deadline = Instant::now() + Duration::from_secs(60);
    while !dir.with_extension("go").exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_micros(100));
    }
    export(dir, factor.parse().expect("a number"), false).unwrap_or_else(|e| panic!("{e}"));
}

fn start_exporter(how: &str, dir: &Path) -> Child {
    Command::new(std::env::current_exe().expect("this program"))
        .args(["exporter", "--exact", "--nocapture"])
        .env(EXPORTER, format!("{how}:{}", dir.display()))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("this program starts")
}

fn new_root(name: &str) -> PathBuf {
    let root = std::env::temp_dir().join(format!("isoshard-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&root);
    fs::create_dir_all(&root).expect("a temporary folder can be made");
    root
}

#[test]
fn kills_leave_a_whole_export_and_no_remains() {
    let root = new_root("crash-export");
    let dir = root.join("model");
    let whole = export(&dir, 1.0, false).unwrap_or_else(|e| panic!("{e}"));
    let mut random = SplitMix(11);
    let (mut within, mut found) = (0, 0);
    for kill in 0..kills(12) {
        let left = unfinished(&root);
        let mut child = start_exporter("endless", &dir);
        let begun = || unfinished(&root).iter().any(|name| !left.contains(name));
        let deadline = Instant::now() + Duration::from_secs(20);
        while !begun() && Instant::now() < deadline && child.try_wait().expect("a child").is_none() {
            std::thread::sleep(Duration::from_micros(200));
        }
        std::thread::sleep(Duration::from_micros(random.below(40_000) as u64));
        child.kill().expect("it runs");
        let output = child.wait_with_output().expect("it was killed");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), None, "kill {kill}: the child ended by itself: {said}");
        let remains = unfinished(&root);
        assert!(remains.len() <= 1, "kill {kill}: remains of several jobs: {remains:?}");
        within += remains.len();
        if dir.exists() {
            assert_eq!(digest_of(&dir), whole, "kill {kill}");
            found += 1;
        }
    }
    println!("{} kills, {within} of them within an export, {found} with a folder", kills(12));
    assert!(within > 0, "no kill was within an export");
    let _ = fs::remove_dir_all(&dir);
    export(&dir, 1.0, false).unwrap_or_else(|e| panic!("{e}"));
    let hidden = fs::read_dir(&root)
        .expect("readable")
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned());
    let hidden: Vec<String> = hidden.filter(|name| name.starts_with('.')).collect();
    assert!(hidden.is_empty(), "{hidden:?}");
    fs::remove_dir_all(root).expect("made here");
}

#[test]
fn of_two_processes_that_export_to_one_name_the_first_gets_it() {
    let root = new_root("two-exports");
    for round in 0..kills(12) / 4 {
        let dir = root.join(format!("model-{round}"));
        let children = ["2", "4"].map(|factor| start_exporter(factor, &dir));
        fs::write(dir.with_extension("go"), "").expect("the folder is there");
        let ended = children.map(|child| child.wait_with_output().expect("it ends"));
        let good: Vec<usize> = (0..2).filter(|&i| ended[i].status.success()).collect();
        let said = |i: usize| String::from_utf8_lossy(&ended[i].stderr).into_owned();
        let [winner] = good[..] else { panic!("one of them exports: {}\n{}", said(0), said(1)) };
        let loser = said(1 - winner);
        let reasons = ["another program has made the folder meanwhile", "the folder exists"];
        assert!(reasons.iter().any(|reason| loser.contains(reason)), "{loser}");
        let other = root.join(format!("again-{round}"));
        let wanted = export(&other, [2.0, 4.0][winner], false).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(digest_of(&dir), wanted, "the files are one process's");
    }
    assert!(unfinished(&root).is_empty(), "{:?}", unfinished(&root));
    fs::remove_dir_all(root).expect("made here");
}
