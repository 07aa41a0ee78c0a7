//! Ranks that announce long work: the other ranks wait for them beyond the deadline, but not for ever.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use isoshard::comm::{DryRun, Rank, Spmd, Tally};
use isoshard::{CommFault, Error, Failure, Result};

const DEADLINE: Duration = Duration::from_millis(600);

fn run(
    world: usize,
    f: impl Fn(&Rank) -> Result<()> + Send + Sync + 'static,
) -> (Vec<Result<(), Failure>>, Duration) {
    let start = Instant::now();
    let ends = Spmd::new(world).deadline(DEADLINE).on_slow(|_| ()).run_each(move |rank| f(&rank)).unwrap();
    (ends, start.elapsed())
}

fn missing(end: &Result<(), Failure>) -> &CommFault {
    let Err(Failure::Error(Error::Comm(fault))) = end else { panic!("{end:?}") };
    assert!(matches!(&**fault, CommFault::Missing { ended: false, .. }), "{fault}");
    fault
}

fn assert_all_continue(ends: &[Result<(), Failure>]) {
    assert!(ends.iter().all(Result::is_ok), "{ends:?}");
}

#[test]
fn a_busy_rank_is_waited_for() {
    let work = |guarded: bool| {
        run(3, move |rank| {
            if rank.rank() == 0 {
                let _busy = guarded.then(|| rank.busy("saving"));
                sleep(DEADLINE * 4);
            }
            rank.world().barrier()
        })
    };
    let (ends, _) = work(false);
    // Rank 0 may not be waited for once the other two have failed.
    ends[1..].iter().for_each(|end| assert_eq!(missing(end).last_completed().len(), 3));
    let (ends, took) = work(true);
    assert_all_continue(&ends);
    assert!(took >= DEADLINE * 4);
}

/// A rank that waits for a rank that waits for a busy one has patience as well, in another group and for a message.
#[test]
fn a_chain_of_waits_that_leads_to_a_busy_rank_has_patience() {
    let (ends, _) = run(4, |rank| {
        let groups = [rank.group(&[0, 1], "a"), rank.group(&[1, 2], "b")];
        match (rank.rank(), groups) {
            (0, [a, _]) => {
                let busy = rank.busy("saving");
                sleep(DEADLINE * 3);
                drop(busy);
                a?.barrier()
            }
            (1, [a, b]) => a?.barrier().and_then(|()| b?.barrier()),
            (2, [_, b]) => {
                b?.barrier()?;
                rank.world().send(&isoshard::tensor::Tensor::scalar(1i64), 3)
            }
            _ => {
                let shape = isoshard::tensor::Shape::from([]);
                rank.world().recv(2, isoshard::tensor::DType::I64, &shape).map(drop)
            }
        }
    });
    assert_all_continue(&ends);
}

/// A rank that comes out of a wait for a busy rank shortly before the first deadline of those that wait for it still
/// gets time of its own.
#[test]
fn a_chain_that_ends_before_the_first_deadline_leaves_time() {
    let (ends, took) = run(3, |rank| {
        let (a, b) = (rank.group(&[0, 1], "a"), rank.group(&[1, 2], "b"));
        match rank.rank() {
            0 => {
                let busy = rank.busy("saving");
                sleep(DEADLINE * 4 / 5);
                drop(busy);
                a?.barrier()
            }
            1 => {
                a?.barrier()?;
                sleep(DEADLINE * 2 / 5);
                b?.barrier()
            }
            _ => b?.barrier(),
        }
    });
    assert_all_continue(&ends);
    assert!(took >= DEADLINE * 6 / 5);
}

/// The deadline counts anew from the end of the work, and a rank that then stays away is late.
#[test]
fn a_rank_that_stays_away_after_its_work_is_late() {
    let waited = Arc::new(Mutex::new(Duration::ZERO));
    let measured = waited.clone();
    let (ends, _) = run(2, move |rank| {
        if rank.rank() == 0 {
            let busy = rank.busy("saving");
            sleep(DEADLINE * 2);
            drop(busy);
            sleep(DEADLINE * 3);
            return rank.world().barrier();
        }
        let start = Instant::now();
        let said = rank.world().barrier();
        *measured.lock().unwrap() = start.elapsed();
        said
    });
    let text = missing(&ends[1]).to_string();
    assert!(text.contains("rank(s) [0] did not come within 0.6 s") && !text.contains("busy"), "{text}");
    let waited = *waited.lock().unwrap();
    assert!(waited >= DEADLINE * 3 - DEADLINE / 4, "{waited:?}");
}

#[test]
fn a_busy_rank_that_fails_or_ends_is_reported_at_once() {
    let deadline = Duration::from_secs(20);
    for panics in [true, false] {
        let start = Instant::now();
        let ends = Spmd::new(3).deadline(deadline).on_slow(|_| ()).run_each(move |rank| {
            if rank.rank() != 1 {
                return rank.world().barrier();
            }
            let busy = rank.busy("saving");
            sleep(Duration::from_millis(50));
            if panics {
                std::panic::resume_unwind(Box::new("disk full"));
            }
            // The announcement outlives the rank's program.
            std::mem::forget(busy);
            Ok(())
        });
        let ends = ends.unwrap();
        assert!(start.elapsed() < deadline / 2);
        for rank in [0, 2] {
            let Err(Failure::Error(Error::Comm(fault))) = &ends[rank] else { panic!("{ends:?}") };
            match &**fault {
                CommFault::PeerFailed { rank: 1, cause, .. } if panics => {
                    assert_eq!(cause, "panicked: disk full");
                }
                CommFault::Missing { missing, ended: true, .. } if !panics => assert_eq!(*missing, [1]),
                other => panic!("{other}"),
            }
        }
    }
}

#[test]
fn work_beyond_its_limit_is_named() {
    let (ends, _) = run(2, |rank| {
        if rank.rank() == 0 {
            let _busy = rank.busy_for("saving", DEADLINE);
            let _inner = rank.busy_for("hashing \"a\"", DEADLINE / 3);
            sleep(DEADLINE * 5);
        }
        rank.world().barrier()
    });
    let fault = missing(&ends[1]);
    let CommFault::Missing { missing, busy, .. } = fault else { panic!("{fault}") };
    assert_eq!((&missing[..], busy.len(), busy[0].rank), (&[0][..], 1, 0));
    assert!(busy[0].spent >= DEADLINE * 2 - DEADLINE / 4, "{busy:?}");
    let text = fault.to_string();
    let says = r#"; rank 0 is busy with "saving, hashing \"a\"" for "#;
    assert!(text.contains(says) && text.contains(" s, longer than its limit of 0.6 s; last"), "{text}");
    assert!(ends[0].is_err());
}

/// Ranks that are busy and wait for each other are not busy: they get their error at the deadline.
#[test]
fn busy_ranks_that_wait_for_each_other_are_late() {
    let (ends, took) = run(2, |rank| {
        let groups = [rank.group(&[0, 1], "a")?, rank.group(&[0, 1], "b")?];
        let _busy = rank.busy("saving");
        groups[rank.rank()].barrier()
    });
    assert!(took < Duration::from_secs(60), "{took:?}");
    for end in &ends {
        let Err(Failure::Error(Error::Comm(fault))) = end else { panic!("{ends:?}") };
        assert!(matches!(&**fault, CommFault::Cycle { .. }), "{fault}");
    }
}

/// A thread beside the rank's own announces work, while the rank itself waits for others.
#[test]
fn another_thread_of_the_rank_may_be_busy() {
    let (ends, _) = run(2, |rank| {
        let side = rank.group(&[0, 1], "side")?;
        let (announced, hears) = channel();
        let own = rank.clone();
        let saving = thread::spawn(move || {
            if own.rank() == 0 {
                let busy = own.busy("saving");
                announced.send(()).expect("the rank waits");
                sleep(DEADLINE * 3);
                drop(busy);
            }
            side.barrier()
        });
        if rank.rank() == 0 {
            hears.recv().expect("the thread announces its work");
        }
        let done = rank.world().barrier();
        saving.join().expect("no panic").and(done)
    });
    assert_all_continue(&ends);
}

/// Work that is announced again and again extends a wait by its limit and the deadline, not for ever.
#[test]
fn repeated_announcements_do_not_extend_a_wait_for_ever() {
    let (sender, over) = channel::<()>();
    let over = Mutex::new(over);
    let sender = Mutex::new(Some(sender));
    let (ends, took) = run(2, move |rank| {
        if rank.rank() == 1 {
            let said = rank.world().barrier();
            drop(sender.lock().unwrap().take());
            return said;
        }
        let over = over.lock().unwrap();
        loop {
            let _busy = rank.busy_for("trying again", DEADLINE);
            if over.recv_timeout(DEADLINE / 10) != Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                return Ok(());
            }
        }
    });
    let text = missing(&ends[1]).to_string();
    assert!(text.contains("; rank 0 is busy with \"trying again\" for "), "{text}");
    assert!(took >= DEADLINE * 2, "{took:?}");
}

/// If another rank has failed, the program waits for the end of a rank that is busy.
#[test]
fn a_busy_rank_is_not_abandoned_when_another_fails() {
    let (ends, _) = run(2, |rank| {
        if rank.rank() == 1 {
            return Err(Error::invalid("step", "went wrong", "", ""));
        }
        let _busy = rank.busy("saving");
        sleep(DEADLINE * 4);
        Ok(())
    });
    assert!(ends[0].is_ok() && matches!(ends[1], Err(Failure::Error(_))), "{ends:?}");
}

#[test]
fn survivors_wait_for_a_busy_rank() {
    let (ends, _) = run(3, |rank| {
        match rank.rank() {
            0 => return Err(Error::invalid("step", "went wrong", "", "")),
            1 => {
                let _busy = rank.busy("saving");
                sleep(DEADLINE * 3);
            }
            _ => {}
        }
        let rest = rank.survivors("rest")?;
        assert_eq!(rest.ranks(), [1, 2]);
        rest.barrier()
    });
    assert!(ends[0].is_err() && ends[1].is_ok() && ends[2].is_ok(), "{ends:?}");
}

/// Announcements pass through an engine that counts calls, and a dry run ignores them.
#[test]
fn announcements_pass_through_wrapped_engines() {
    let (ends, _) = run(2, |rank| {
        let (rank, _) = Tally::of(rank)?;
        if rank.rank() == 0 {
            let _busy = rank.busy("saving");
            sleep(DEADLINE * 3);
        }
        rank.world().barrier()
    });
    assert_all_continue(&ends);
    let dry = DryRun::new(64, 3).unwrap().rank().unwrap();
    let _busy = dry.busy("saving");
    dry.world().barrier().unwrap();
}

#[test]
fn slow_ranks_are_reported_with_their_work() {
    let heard: Arc<Mutex<Vec<String>>> = Arc::default();
    let hears = heard.clone();
    let run = Spmd::new(2).deadline(Duration::from_secs(20)).patience(Duration::from_millis(100));
    let run = run.on_slow(move |slow| hears.lock().unwrap().push(slow.to_string()));
    let done = run.run(|rank| {
        if rank.rank() == 1 {
            let _busy = rank.busy("saving");
            sleep(Duration::from_millis(500));
        }
        rank.world().barrier()
    });
    done.unwrap();
    let heard = heard.lock().unwrap();
    assert!(heard[0].contains("slow rank(s) [1]"), "{heard:?}");
    assert!(heard[0].contains("gives up after 20.0 s; rank 1 is busy with \"saving\" for "), "{heard:?}");
}
