//! Checkpoints of programs that are killed: after a kill at any moment of a save, the newest checkpoint is whole.
//!
//! The test starts this program again as a child that saves without end, and kills it at random moments. Each child
//! first loads the newest checkpoint and compares every element.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use isoshard::checkpoint::{self, Checkpoint, CheckpointFolder, StateTree};
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::tensor::DType;
use isoshard::testing::values::SplitMix;

const KILLS: usize = 200;
/// Names the folder to a child.
const CHILD: &str = "ISOSHARD_CRASH_FOLDER";

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
fn two_hundred_kills_leave_a_whole_checkpoint() {
    let root = std::env::temp_dir().join(format!("isoshard-crash-{}", std::process::id()));
    let _ = fs::remove_dir_all(&root);
    let mut random = SplitMix(7);
    // The time of a few saves on this machine, whose disk may be slow to flush.
    let window = 4 * time_of_a_save(&root);
    let (mut within, mut last) = (0, 0);
    for kill in 0..KILLS {
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
    println!("{KILLS} kills, {within} of them within a save; {last} steps");
    assert!(within >= KILLS / 5, "only {within} kills were within a save");
    assert!(last >= KILLS as u64 / 5, "only {last} saves ended");
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
        let x = DTensor::full(mesh, DType::F32, [1501, 500], step as f64, layout.parse()?)?;
        state.insert(name, x)?;
    }
    state.insert_value("step", step)?;
    Ok(state)
}
