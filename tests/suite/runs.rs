//! Runs that share a folder, and jobs that want one name: each checkpoint is one run's, whole or absent, and the others
//! learn at once what happened.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use isoshard::Result;
use isoshard::checkpoint::{self, Checkpoint, CheckpointFolder, StateTree};
use isoshard::comm::spmd;
use isoshard::data::{TokenWidth, TokenWriter};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::tensor::DType;

/// A folder that is removed at the end of a test.
struct TempFolder(PathBuf);

impl TempFolder {
    fn new() -> TempFolder {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("isoshard-runs-{}-{number}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("a temporary folder can be made");
        TempFolder(dir)
    }

    fn entries(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).expect("the folder is there").flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A tensor of `n` elements with one value, sharded over all ranks.
fn state(mesh: &DeviceMesh, n: usize, value: f64) -> Result<StateTree> {
    let mut state = StateTree::new();
    state.insert("x", DTensor::full(mesh, DType::F32, [n], "(S0)", value)?)?;
    state.insert_value("value", value)?;
    Ok(state)
}

/// Returns the one value of a checkpoint's elements.
fn value_of(dir: &Path) -> Result<f64> {
    let dir = dir.to_path_buf();
    let values = spmd(1, move |rank| {
        let saved = Checkpoint::open(&dir)?;
        let x = saved.tensor(&DeviceMesh::new(&rank, &[("dp", 1)])?, "x", "(R)")?;
        let value = saved.value("value").and_then(|value| value.as_f64()).expect("saved");
        let found = x.local().to_vec::<f32>()?;
        assert!(found.iter().all(|&x| f64::from(x) == value), "{} of {value}", found[0]);
        Ok(value)
    });
    values.map(|values| values[0])
}

fn on_two<T: Send + 'static>(f: impl Fn(&DeviceMesh) -> Result<T> + Send + Sync + 'static) -> Result<Vec<T>> {
    spmd(2, move |rank| f(&DeviceMesh::new(&rank, &[("dp", 2)])?))
}

/// Returns the identity in a checkpoint's index.
fn run_of(folder: &Path, step: u64) -> Option<String> {
    let text =
        fs::read_to_string(CheckpointFolder::new(folder).dir_of(step).join("checkpoint.json")).unwrap();
    let (_, rest) = text.split_once("\"run\":\"")?;
    Some(rest[..16].to_string())
}

#[test]
fn a_run_keeps_its_identity_and_a_used_folder_is_refused_at_the_start() {
    let folder = TempFolder::new();
    let root = folder.0.clone();
    on_two(move |mesh| {
        let mut first = CheckpointFolder::begin(mesh, &root)?;
        first.save(mesh, 1, &state(mesh, 4, 1.0)?)?;
        first.save_async(mesh, 2, &state(mesh, 4, 2.0)?)?;
        first.wait(mesh)
    })
    .unwrap();
    let run = run_of(&folder.0, 1).expect("a run that saves has an identity");
    assert_eq!(run_of(&folder.0, 2), Some(run.clone()));
    // A second run is refused when it starts, on all ranks, and nothing of it stays.
    let root = folder.0.clone();
    let refused = on_two(move |mesh| {
        let begun = CheckpointFolder::begin(mesh, &root).map(drop).unwrap_err().to_string();
        let mut late = CheckpointFolder::new(&root);
        let saved = late.save(mesh, 50, &state(mesh, 4, 50.0)?).unwrap_err().to_string();
        let saved_async = late.save_async(mesh, 50, &state(mesh, 4, 50.0)?).unwrap_err().to_string();
        Ok([begun, saved, saved_async])
    })
    .unwrap();
    for said in refused.iter().flatten() {
        let wanted = "save: rank 0 failed; got save: the folder has checkpoints of another run; got ";
        assert!(said.starts_with(wanted) && said.contains("step-000000000002; go on from"), "{said}");
    }
    // The run goes on elsewhere, and is the same.
    let root = folder.0.clone();
    spmd(3, move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("fsdp", 3)])?;
        let mut resumed = CheckpointFolder::new(&root).keep(2);
        assert_eq!(resumed.newest(&mesh)?.expect("saved").0, 2);
        resumed.save(&mesh, 3, &state(&mesh, 4, 3.0)?)
    })
    .unwrap();
    assert_eq!(run_of(&folder.0, 3), Some(run));
    assert_eq!(folder.entries(), ["step-000000000002", "step-000000000003"]);
}

/// `keep` and `newest` go by the identity; checkpoints of earlier versions have none and count as one run.
#[test]
fn checkpoints_of_other_runs_are_left_alone() {
    let folder = TempFolder::new();
    let root = folder.0.clone();
    on_two(move |mesh| {
        let mut run = CheckpointFolder::begin(mesh, &root)?.keep(1);
        run.save(mesh, 1, &state(mesh, 4, 1.0)?)?;
        // Two checkpoints without identity, one before and one after the run's steps.
        checkpoint::save(mesh, run.dir_of(0), &state(mesh, 4, 0.5)?)?;
        checkpoint::save(mesh, run.dir_of(90), &state(mesh, 4, 90.0)?)?;
        run.save(mesh, 2, &state(mesh, 4, 2.0)?)?;
        assert_eq!(run.steps()?, [0, 2, 90]);
        assert_eq!(run.newest(mesh)?.expect("saved").0, 2);
        let mut resumed = CheckpointFolder::new(&root).keep(1);
        let said = resumed.newest(mesh).map(drop).unwrap_err().to_string();
        assert!(
            said.contains("the folder has checkpoints of several runs; got step-000000000090 of a run with"),
            "{said}"
        );
        assert!(
            said.contains("step-000000000002 of run ") && said.contains("pass it to continue_run"),
            "{said}"
        );
        resumed.continue_run(&Checkpoint::open(run.dir_of(2))?);
        resumed.save(mesh, 3, &state(mesh, 4, 3.0)?)?;
        assert_eq!(resumed.steps()?, [0, 3, 90]);
        Ok(())
    })
    .unwrap();
    assert!(run_of(&folder.0, 3).is_some() && run_of(&folder.0, 0).is_none());
    fs::remove_dir_all(folder.0.join("step-000000000003")).unwrap();
    let root = folder.0.clone();
    on_two(move |mesh| {
        let mut unnamed = CheckpointFolder::new(&root).keep(2);
        assert_eq!(unnamed.newest(mesh)?.expect("saved").0, 90);
        unnamed.save(mesh, 91, &state(mesh, 4, 91.0)?)?;
        assert_eq!(unnamed.steps()?, [90, 91], "the run without identity keeps its own last ones");
        Ok(())
    })
    .unwrap();
    assert_eq!(run_of(&folder.0, 91), None);
}

#[test]
fn a_step_is_replaced_by_word_alone() {
    let folder = TempFolder::new();
    let root = folder.0.clone();
    on_two(move |mesh| {
        let mut run = CheckpointFolder::begin(mesh, &root)?;
        run.save(mesh, 7, &state(mesh, 4, 1.0)?)?;
        let said = run.save(mesh, 7, &state(mesh, 4, 2.0)?).unwrap_err().to_string();
        assert!(said.contains("a checkpoint is saved to a new folder; got "), "{said}");
        assert!(said.contains("replace_steps"), "{said}");
        run = run.replace_steps();
        run.save(mesh, 7, &state(mesh, 4, 3.0)?)?;
        run.save_async(mesh, 8, &state(mesh, 4, 4.0)?)?;
        run.wait(mesh)
    })
    .unwrap();
    assert_eq!(value_of(&folder.0.join("step-000000000007")).unwrap(), 3.0);
    assert_eq!(folder.entries(), ["step-000000000007", "step-000000000008"]);
}

/// Runs `job` in two worlds at once, each with its own value, and returns the errors.
fn at_once(job: impl Fn(usize) -> Result<()> + Send + Sync + 'static) -> Vec<(usize, Option<String>)> {
    let job = Arc::new(job);
    let jobs: Vec<_> = (1..=2)
        .map(|number| {
            let job = job.clone();
            thread::spawn(move || (number, job(number).err().map(|e| e.to_string())))
        })
        .collect();
    jobs.into_iter().map(|job| job.join().expect("it does not panic")).collect()
}

#[test]
fn of_two_jobs_that_save_one_name_the_first_gets_it() {
    let folder = TempFolder::new();
    for round in 0..6 {
        let dir = folder.0.join(format!("saved-{round}"));
        let to = dir.clone();
        let ended = at_once(move |number| {
            let dir = to.clone();
            on_two(move |mesh| checkpoint::save(mesh, &dir, &state(mesh, 1 << 18, number as f64)?)).map(drop)
        });
        let winners: Vec<usize> = ended.iter().filter(|(_, said)| said.is_none()).map(|(n, _)| *n).collect();
        let [winner] = winners[..] else { panic!("one job saves: {ended:?}") };
        assert_eq!(value_of(&dir).unwrap(), winner as f64, "the files are one job's");
        let said = ended.iter().find_map(|(_, said)| said.as_ref()).expect("the other one fails");
        let reasons =
            ["another program has made the folder meanwhile", "a checkpoint is saved to a new folder"];
        assert!(said.starts_with("rank 0: ") && reasons.iter().any(|r| said.contains(r)), "{said}");
    }
    assert!(folder.entries().iter().all(|name| name.starts_with("saved-")), "{:?}", folder.entries());
}

/// Two new runs begin in one empty folder at once. One is refused: when it begins its first save, or, if the other one's
/// first save ends meanwhile, at the end.
#[test]
fn of_two_runs_that_begin_at_once_one_gets_the_folder() {
    let folder = TempFolder::new();
    let root = folder.0.clone();
    let failures = on_two(move |mesh| {
        let both = |name: &str| -> Result<_> {
            let root = root.join(name);
            Ok((CheckpointFolder::begin(mesh, &root)?, CheckpointFolder::begin(mesh, &root)?))
        };
        let (mut first, mut second) = both("one")?;
        first.save(mesh, 1, &state(mesh, 4, 1.0)?)?;
        let said = second.save(mesh, 2, &state(mesh, 4, 2.0)?).unwrap_err().to_string();
        assert!(said.contains("the folder has checkpoints of another run; got "), "{said}");
        first.save(mesh, 3, &state(mesh, 4, 3.0)?)?;
        let mut failures = Vec::new();
        for round in 0..3 {
            // The second run's save begins while there is no checkpoint, and takes longer.
            let (mut first, mut second) = both(&format!("both-{round}"))?;
            second.save_async(mesh, 2, &state(mesh, 1 << 22, 2.0)?)?;
            let saved = [first.save(mesh, 1, &state(mesh, 4, 1.0)?), second.wait(mesh)];
            failures.extend(saved.into_iter().filter_map(|saved| saved.err().map(|e| e.to_string())));
        }
        Ok(failures)
    })
    .unwrap();
    let another = |said: &String| said.contains("the folder has checkpoints of another run; got ");
    // Both may find the folder empty if they rename in one moment, but hardly each time.
    assert!(!failures[0].is_empty() && failures[0].iter().all(another), "{failures:?}");
    assert_eq!(failures[0], failures[1]);
}

/// Removes each unfinished folder in `root` once `when` has accepted it, until `stop` is set; returns their number.
fn remove_unfinished(
    root: PathBuf,
    stop: Arc<AtomicBool>,
    when: fn(&Path) -> bool,
) -> thread::JoinHandle<usize> {
    thread::spawn(move || {
        let (mut removed, mut accepted) = (0, std::collections::HashSet::new());
        while !stop.load(Ordering::Relaxed) {
            for entry in fs::read_dir(&root).expect("readable").flatten() {
                let (path, name) = (entry.path(), entry.file_name());
                if !name.to_string_lossy().ends_with(".unfinished") {
                    continue;
                }
                // A rank may make a file while the folder is being removed: then it is tried once more.
                if accepted.contains(&name) || when(&path) {
                    accepted.insert(name);
                    removed += usize::from(fs::remove_dir_all(&path).is_ok());
                }
            }
        }
        removed
    })
}

/// All ranks learn at once that the folder in which they wrote is gone; none is waited for.
#[test]
fn a_save_whose_folder_vanishes_says_so_at_once() {
    let when: [fn(&Path) -> bool; 2] = [|_| true, |dir| dir.join("part-00001.json").exists()];
    for when in when {
        let folder = TempFolder::new();
        let stop = Arc::new(AtomicBool::new(false));
        let remover = remove_unfinished(folder.0.clone(), stop.clone(), when);
        let root = folder.0.clone();
        let told = on_two(move |mesh| {
            // The patience of half an hour would be waited out if a rank were waited for.
            let mut run = CheckpointFolder::new(&root);
            let mut told = Vec::new();
            for step in 1..2000 {
                let saved =
                    run.save_async(mesh, step, &state(mesh, 1 << 16, 1.0)?).and_then(|()| run.wait(mesh));
                told.extend(saved.err().map(|e| e.to_string()));
                if told.len() == 3 {
                    break;
                }
            }
            Ok(told)
        })
        .unwrap();
        stop.store(true, Ordering::Relaxed);
        assert!(remover.join().expect("it does not panic") >= 3);
        assert_eq!(told[0], told[1], "all ranks say the same");
        assert_eq!(told[0].len(), 3);
        for said in &told[0] {
            assert!(said.contains("the folder in which the files were written has vanished; got "), "{said}");
        }
    }
}

/// A rank that has reported is not blamed if its report is removed.
#[test]
fn a_save_whose_files_are_removed_blames_no_rank() {
    let folder = TempFolder::new();
    let stop = Arc::new(AtomicBool::new(false));
    let (root, until) = (folder.0.clone(), stop.clone());
    let remover = thread::spawn(move || {
        while !until.load(Ordering::Relaxed) {
            for entry in fs::read_dir(&root).expect("readable").flatten() {
                let _ = fs::remove_file(entry.path().join("part-00001.json"));
            }
        }
    });
    let root = folder.0.clone();
    let told = on_two(move |mesh| {
        let mut run = CheckpointFolder::new(&root).patience(std::time::Duration::from_millis(500)).keep(1);
        for step in 1..500 {
            // The first rank's part takes longer, so that the report is removed before it is read.
            let mut state = state(mesh, 1 << 10, 1.0)?;
            let place = "(RS(0..1; 1,0))";
            state.insert("long", DTensor::full(mesh, DType::F32, [1 << 20], place, 1.0)?)?;
            let saved = run.save_async(mesh, step, &state).and_then(|()| run.wait(mesh));
            if let Err(e) = saved {
                return Ok(e.to_string());
            }
        }
        Ok("no report was removed in time".into())
    });
    stop.store(true, Ordering::Relaxed);
    remover.join().expect("it does not panic");
    for said in told.unwrap() {
        assert!(said.contains("the folder in which the files were written has vanished; got "), "{said}");
    }
}

#[test]
fn two_writers_of_one_token_file_do_not_share_it() {
    let folder = TempFolder::new();
    let path = folder.0.join("train.bin");
    let writer = |token: u32| {
        let mut writer = TokenWriter::create(&path, TokenWidth::U16).unwrap();
        writer.write(&[token; 3]).unwrap();
        writer
    };
    let (first, second, dropped) = (writer(1), writer(2), writer(3));
    assert_eq!(second.finish().unwrap(), 3);
    let said = first.finish().unwrap_err().to_string();
    assert!(said.starts_with("token_writer: another program has made the file meanwhile; got "), "{said}");
    drop(dropped);
    assert_eq!(fs::read(&path).unwrap(), [2, 0, 2, 0, 2, 0]);
    // A file that was there at the start is replaced.
    assert_eq!(writer(4).finish().unwrap(), 3);
    assert_eq!(fs::read(&path).unwrap(), [4, 0, 4, 0, 4, 0]);
    assert_eq!(folder.entries(), ["train.bin"]);
}

/// A job of another host is alive while its lock is touched, and dead ten minutes later.
#[test]
fn remains_of_dead_jobs_are_removed_before_a_save_and_live_ones_left() {
    let folder = TempFolder::new();
    // Of another step, as on a disk that the remains have filled.
    let stem = ".step-000000000099.00000000000000ab";
    let [lock, unfinished] = ["lock", "unfinished"].map(|kind| folder.0.join(format!("{stem}.{kind}")));
    fs::create_dir(&unfinished).unwrap();
    let text =
        r#"{"owner":{"host":"other","place":"another kernel","pid":1,"started":5},"touched":1764400000}"#;
    fs::write(&lock, text).unwrap();
    let age = |seconds: u64| {
        let then = std::time::SystemTime::now() - std::time::Duration::from_secs(seconds);
        fs::File::open(&lock).and_then(|file| file.set_modified(then)).unwrap();
    };
    let save = |step: u64| {
        let root = folder.0.clone();
        on_two(move |mesh| {
            let mut run = CheckpointFolder::new(&root);
            run.newest(mesh)?;
            run.save_async(mesh, step, &state(mesh, 4, 1.0)?)?;
            let begun = fs::read_dir(&root).expect("readable").flatten();
            let remains =
                begun.filter(|e| e.file_name().to_string_lossy().starts_with(".step-000000000099")).count();
            run.wait(mesh)?;
            Ok(remains)
        })
        .unwrap()
    };
    age(500);
    assert_eq!((save(1), lock.exists(), unfinished.exists()), (vec![2, 2], true, true));
    age(700);
    assert_eq!((save(2), lock.exists(), unfinished.exists()), (vec![0, 0], false, false));
    assert_eq!(folder.entries(), ["step-000000000001", "step-000000000002"]);
}
