//! A rank's watch: a thread that sees what is late or broken, and gives up where the world does.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use super::engine::{PATIENCE, Shared};
use super::line::{Flight, Line, lock};
use super::{Communicator, Progress};
use crate::comm::coordinator::{FirstFault, Message};
use crate::error::CommFault;

/// How often it looks where calls are under way, and where none are.
const GLANCE: Duration = Duration::from_millis(2);
const IDLE_GLANCE: Duration = Duration::from_millis(20);

/// Watches until the rank's program is over, then ends the communicators.
pub(super) fn watch(shared: &Arc<Shared>) {
    if shared.driver.bind().is_err() {
        // Then the rank's own calls fail, with the driver's words.
        return;
    }
    let mut idle = true;
    loop {
        let pause = if idle { IDLE_GLANCE } else { GLANCE };
        if let Some(first_fault) = shared.client.wait_for_fault(pause) {
            return give_up(shared, first_fault);
        }
        let lines: Vec<Arc<Line>> = lock(&shared.lines).values().cloned().collect();
        let trouble = lines.iter().find_map(|line| look(shared, line));
        if let Some(note) = trouble {
            return give_up(shared, report(shared, note));
        }
        idle = lines.iter().all(|line| lock(&line.flights).is_empty());
        if idle && shared.over.load(Ordering::Acquire) {
            return finish(shared, &lines);
        }
    }
}

/// What is wrong on a line, if anything.
fn look(shared: &Shared, line: &Line) -> Option<Message> {
    let mut flights = lock(&line.flights);
    while let Some(first) = flights.front_mut() {
        if first.done.is_done().unwrap_or(false) {
            flights.pop_front();
            continue;
        }
        if first.since.is_none() && first.began.is_done().unwrap_or(false) {
            first.since = Some(Instant::now());
        }
        if first.since.is_some_and(|since| since.elapsed() >= shared.deadline) {
            let Flight { call, sequence, seq, .. } = *first;
            let compared = shared.compared;
            return Some(Message::Late { group: line.id, sequence, seq, call: call.into(), compared });
        }
        break;
    }
    let error = line.glance(&*shared.nccl).err()?;
    let (call, seq) = flights.front().map_or(("connect", 0), |first| (first.call, first.seq));
    Some(Message::Broken { id: line.call_id(call, seq), reason: error.to_string() })
}

/// Tells the coordinator, and waits for its first_fault. Whoever is the cause of a broken transport may speak first.
fn report(shared: &Shared, note: Message) -> FirstFault {
    const GRACE: Duration = Duration::from_millis(300);
    if matches!(note, Message::Broken { .. })
        && let Some(first_fault) = shared.client.wait_for_fault(GRACE)
    {
        return first_fault;
    }
    shared.client.tell(note.clone());
    shared.client.wait_for_fault(PATIENCE).unwrap_or_else(|| own_verdict(shared, note))
}

/// What this rank makes of it where the coordinator does not answer.
fn own_verdict(shared: &Shared, note: Message) -> FirstFault {
    let (id, reason) = match note {
        Message::Broken { id, reason } => (id, reason),
        Message::Late { group, seq, call, .. } => {
            let lines = lock(&shared.lines);
            let line = lines.values().find(|line| line.id == group).expect("the line that is late");
            let reason = format!(
                "not finished within {:.1} s, and the coordinator does not answer",
                shared.deadline.as_secs_f64()
            );
            (line.call_id(call, seq), reason)
        }
        _ => unreachable!("nothing else is reported"),
    };
    FirstFault::Fault(CommFault::Transport { id, rank: shared.rank, reason })
}

/// Gives up all that is under way: nobody reads what it leaves behind.
fn give_up(shared: &Shared, first_fault: FirstFault) {
    let _ = shared.first_fault.set(first_fault.clone());
    let lines: Vec<Arc<Line>> = lock(&shared.lines).values().cloned().collect();
    let first = lines
        .iter()
        .find_map(|line| lock(&line.flights).front().map(|first| line.call_id(first.call, first.seq)));
    let id = first.unwrap_or_else(|| shared.world_id("read"));
    let why = shared.spoil(first_fault.at(id).into());
    lock(&shared.streams).iter().for_each(|stream| stream.spoil(Some(why.clone())));
    for line in lines {
        if let Some(comm) = line.take() {
            // What cannot even be aborted is past help.
            let _ = shared.nccl.abort(comm);
        }
        lock(&line.flights).clear();
    }
}

/// Ends the communicators in peace; what does not end within the deadline is aborted.
fn finish(shared: &Shared, lines: &[Arc<Line>]) {
    let comms: Vec<Communicator> = lines.iter().filter_map(|line| line.take()).collect();
    for &comm in &comms {
        let _ = shared.nccl.finalize(comm);
    }
    let end = Instant::now() + shared.deadline;
    for comm in comms {
        loop {
            match shared.nccl.progress(comm) {
                Ok(Progress::Ready) => {
                    let _ = shared.nccl.destroy(comm);
                    break;
                }
                Ok(Progress::Underway) if Instant::now() < end => thread::sleep(GLANCE),
                _ => {
                    let _ = shared.nccl.abort(comm);
                    break;
                }
            }
        }
    }
}
