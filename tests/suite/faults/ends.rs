//! Ranks that panic, fail, stop for a while, or never come back.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use isoshard::comm::Spmd;
use isoshard::comm::flight::SlowRank;
use isoshard::{CommFault, Error, Failure, MemoryFault};

use super::program::{Program, Random, Turn, repeated};

/// Returns a random program, a rank, and a step in which the rank takes part.
fn scene(random: &mut Random) -> (Program, usize, usize) {
    let program = Program::random(random);
    let at = random.below(program.steps.len());
    let culprit = *random.pick(&program.groups[program.steps[at].group]);
    (program, at, culprit)
}

/// Every other rank reports the failure, or had finished already.
fn assert_echoes<T: std::fmt::Debug>(ends: &[Result<T, Failure>], culprit: usize, cause: &str) {
    for (rank, end) in ends.iter().enumerate().filter(|(rank, _)| *rank != culprit) {
        match end {
            Ok(_) => {}
            Err(Failure::Error(Error::Comm(fault))) => {
                let CommFault::PeerFailed { rank, cause: heard, .. } = &**fault else { panic!("{fault}") };
                assert_eq!((*rank, heard.as_str()), (culprit, cause));
            }
            Err(other) => panic!("rank {rank}: {other}"),
        }
    }
}

/// Runs the program with `wrong` instead of one call, and returns failures.
fn ends(
    program: &Program,
    at: usize,
    culprit: usize,
    wrong: impl Fn() -> Error + Send + Sync + 'static,
) -> Vec<Result<(), Failure>> {
    let deadline = Duration::from_secs(20);
    let shared = program.clone();
    let alive = Arc::new(());
    let token = alive.clone();
    let start = Instant::now();
    let ends = Spmd::new(program.world).deadline(deadline).on_slow(|_| ()).run_each(move |rank| {
        let _alive = &token;
        let me = rank.rank();
        let end = shared.run(&rank, deadline, |step| {
            if (step, me) == (at, culprit) { Err(wrong()) } else { Ok(Turn::AsPlanned) }
        })?;
        end.fault.map_or(Ok(()), |(_, fault)| Err(fault.into()))
    });
    assert!(start.elapsed() < deadline, "nobody waits for the deadline");
    assert_eq!(Arc::strong_count(&alive), 1, "all threads are over");
    ends.unwrap()
}

#[test]
fn a_panic() {
    repeated("panic", |random| {
        let (program, at, culprit) = scene(random);
        let ends = ends(&program, at, culprit, || std::panic::resume_unwind(Box::new("out of luck")));
        assert_eq!(ends[culprit], Err(Failure::Panic("out of luck".into())));
        assert_echoes(&ends, culprit, "panicked: out of luck");
        let members = &program.groups[program.steps[at].group];
        assert!(members.iter().all(|&rank| ends[rank].is_err()), "{ends:?}");
    });
}

/// A rank has no memory for the result of a gather; its peers get the cause.
#[test]
fn out_of_memory_in_a_gather() {
    repeated("memory", |random| {
        let (program, at, culprit) = scene(random);
        let fault = MemoryFault {
            device: "cuda:0".into(),
            wanted: "f32[1024, 1024]".into(),
            wanted_bytes: 4 << 20,
            live_bytes: 62 << 20,
            kept_bytes: 0,
            limit_bytes: 64 << 20,
        };
        let cause = format!("{fault}");
        let ends = ends(&program, at, culprit, move || Error::OutOfMemory(Box::new(fault.clone())));
        assert_echoes(&ends, culprit, &cause);
        assert!(matches!(&ends[culprit], Err(Failure::Error(Error::OutOfMemory(_)))), "{ends:?}");
    });
}

/// Stands for a thread that is killed: it never communicates again.
#[test]
fn a_rank_that_never_comes_back() {
    const DEADLINE: Duration = Duration::from_millis(150);
    repeated("killed", |random| {
        let (program, at, culprit) = scene(random);
        let (alive, never) = channel::<()>();
        let (shared, never) = (program.clone(), Mutex::new(never));
        let start = Instant::now();
        let ends = Spmd::new(program.world).deadline(DEADLINE).on_slow(|_| ()).run_each(move |rank| {
            let end = shared.run(&rank, DEADLINE, |step| {
                if (step, rank.rank()) == (at, culprit) {
                    let _ = never.lock().unwrap().recv();
                }
                Ok(Turn::AsPlanned)
            })?;
            end.fault.map_or(Ok(()), |(_, fault)| Err::<(), _>(fault.into()))
        });
        assert!(start.elapsed() < DEADLINE * 4 + Duration::from_secs(5), "{:?}", start.elapsed());
        let ends = ends.unwrap();
        assert!(matches!(ends[culprit], Err(Failure::Stuck(_))), "{ends:?}");
        let first = ends.iter().filter_map(|end| match end {
            Err(Failure::Error(Error::Comm(fault))) => Some(&**fault),
            _ => None,
        });
        // The rank itself is missing, or the missing ranks waited for it in the end.
        let names = |fault: &CommFault| match fault {
            CommFault::Missing { missing, elsewhere, ended: false, .. } => {
                missing.contains(&culprit) || elsewhere.iter().any(|wait| wait.waits_for == culprit)
            }
            _ => false,
        };
        assert!(first.filter(|fault| names(fault)).count() > 0, "{culprit}: {ends:?}");
        let is_known = |end: &Result<(), Failure>| match end {
            Err(Failure::Error(Error::Comm(fault))) => match &**fault {
                CommFault::PeerFailed { cause, .. } => cause.contains("did not come within"),
                fault => names(fault),
            },
            Err(Failure::Stuck(_)) | Ok(()) => true,
            Err(_) => false,
        };
        assert!(ends.iter().all(is_known), "{culprit}: {ends:?}");
        // The thread continues, finds that its world has failed, and ends.
        drop(alive);
    });
}

#[test]
fn stopped_and_continued_before_the_deadline() {
    const DEADLINE: Duration = Duration::from_secs(2);
    repeated("slow", |random| {
        // Long enough for the check for slow ranks, short enough for fifty repetitions.
        let (program, at, culprit) = scene(random);
        let heard: Arc<Mutex<Vec<SlowRank>>> = Arc::default();
        let (shared, hears) = (program.clone(), heard.clone());
        let run = Spmd::new(program.world)
            .deadline(DEADLINE)
            .patience(Duration::from_millis(30))
            .on_slow(move |slow| hears.lock().unwrap().push(slow.clone()));
        let ends = run.run(move |rank| {
            shared.run(&rank, DEADLINE, |step| {
                if (step, rank.rank()) == (at, culprit) {
                    sleep(Duration::from_millis(150));
                }
                Ok(Turn::AsPlanned)
            })
        });
        assert!(ends.unwrap().iter().all(|end| end.fault.is_none()));
        let mut heard = std::mem::take(&mut *heard.lock().unwrap());
        let about_it = |slow: &&SlowRank| slow.waits_for == [culprit] && slow.id.group.starts_with('g');
        assert!(heard.iter().filter(about_it).count() > 0, "{program:?} {at} {culprit}: {heard:?}");
        assert!(
            heard.iter().all(|slow| slow.waited >= Duration::from_millis(30) && slow.deadline == DEADLINE)
        );
        // Reported once per call and rank.
        let told = heard.len();
        heard.sort_by_key(|slow| (slow.rank, slow.id.to_string()));
        heard.dedup_by_key(|slow| (slow.rank, slow.id.to_string()));
        assert_eq!(heard.len(), told, "{heard:?}");
    });
}

#[test]
fn stopped_and_continued_after_the_deadline() {
    const DEADLINE: Duration = Duration::from_millis(200);
    repeated("late", |random| {
        let mut program = Program::random(random);
        program.steps.truncate(1);
        program.steps[0].group = 0;
        let culprit = random.below(program.world);
        let (world, shared) = (program.world, program.clone());
        let ends = Spmd::new(world).deadline(DEADLINE).on_slow(|_| ()).run(move |rank| {
            shared.run(&rank, DEADLINE, |_| {
                if rank.rank() == culprit {
                    sleep(DEADLINE * 2);
                }
                Ok(Turn::AsPlanned)
            })
        });
        // The late rank gets the waiting ranks' fault at once; `run` checks that.
        for end in ends.unwrap() {
            let Some((0, CommFault::Missing { missing, ended: false, rank, .. })) = end.fault else {
                panic!("{end:?}")
            };
            assert_eq!(missing, [culprit]);
            assert!(
                rank != culprit && (rank == end.rank || end.rank == culprit),
                "{rank} tells {}",
                end.rank
            );
        }
    });
}
