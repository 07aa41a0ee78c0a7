//! The flight recorder of one rank: its recent calls.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use super::announcer::Announcer;
use super::flight::record::{CALLS_KEPT, CallRecord, CallState, GroupRecord, RankRecord};
use super::flight::write;
use crate::base::lock;
use crate::comm::calls::{Call, Route, Sequence, current_operator, label};
use crate::error::{CallId, Error};

/// A rank's last calls. Other ranks of the process can read it.
#[derive(Debug)]
pub(crate) struct Recorder {
    pub(super) rank: usize,
    world_len: usize,
    began: Instant,
    /// Start of the program in microseconds since 1970, so that files of several hosts can be compared.
    began_unix_us: u64,
    dir: Option<PathBuf>,
    written: AtomicBool,
    /// The work that the rank has announced.
    pub(in crate::comm) announcer: Announcer,
    /// One more than the number of the call that the rank's engine has been given and has not put in flight yet; 0 if there
    /// is none. If several threads start calls at once, one of them.
    starting: AtomicU64,
    history: Mutex<CallHistory>,
}

/// The index of a group in a rank's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupId(u32);

#[derive(Debug, Default)]
struct CallHistory {
    groups: Vec<GroupProgress>,
    /// A ring buffer: call `n` is at `n % CALLS_KEPT`. A call's `group` is an index into `groups`.
    calls: Vec<CallRecord>,
    /// The number of calls started so far.
    calls_len: u64,
    /// The calls in which the rank waits, one per thread.
    waiting: Vec<OpenWait>,
    /// The last call that failed, until the rank starts another one, and the ranks that its error names. Ranks that look
    /// for a cause at this moment find it behind a rank that waits no more.
    gave_up: Option<(CallId, Vec<usize>)>,
    last: Option<(usize, CompletedCall)>,
    /// Incremented when the rank continues without failed ranks. Groups of different generations differ even if name
    /// and members are equal.
    generation: u64,
}

/// A rank's progress in a group.
#[derive(Debug)]
struct GroupProgress {
    group: GroupRecord,
    collectives: u64,
    /// The number of messages per sender, receiver, and whether this rank receives, since a rank may send to itself.
    messages: Vec<((usize, usize, bool), u64)>,
    last: Option<CompletedCall>,
}

#[derive(Clone, Copy, Debug)]
struct CompletedCall {
    call: &'static str,
    seq: u64,
    operator: &'static str,
}

/// A call in which a thread of the rank waits.
#[derive(Clone, Copy, Debug)]
struct OpenWait {
    number: u64,
    group: GroupId,
    sequence: Sequence,
    seq: u64,
    call: &'static str,
    operator: &'static str,
    since: Instant,
    is_slow: bool,
}

/// The handle by which the end of a recorded call is recorded.
#[derive(Debug)]
pub(crate) struct RecordedCall {
    recorder: Arc<Recorder>,
    number: u64,
    group: GroupId,
    sequence: Sequence,
    seq: u64,
    call: &'static str,
    operator: &'static str,
}

/// A wait, as other ranks see it.
#[derive(Clone, Debug)]
pub(super) struct RankWait {
    pub id: CallId,
    pub group: GroupRecord,
    pub sequence: Sequence,
    pub since: Instant,
}

impl Recorder {
    pub(crate) fn new(rank: usize, world_len: usize, dir: Option<PathBuf>) -> Recorder {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Recorder {
            rank,
            world_len,
            began: Instant::now(),
            began_unix_us: now.as_micros() as u64,
            dir,
            written: AtomicBool::new(false),
            announcer: Announcer::default(),
            starting: AtomicU64::new(0),
            history: Mutex::default(),
        }
    }

    /// Makes the recorder of a rank whose peers are in other processes. Its folder is the one that the environment
    /// names.
    pub(crate) fn alone(rank: usize, world_len: usize) -> Arc<Recorder> {
        Arc::new(Recorder::new(rank, world_len, write::dir_from_env()))
    }

    /// Returns the index of a group in the record. The same name and ranks give the same index.
    pub(crate) fn group(&self, name: &str, ranks: &Arc<[usize]>) -> GroupId {
        let mut history = lock(&self.history);
        let generation = history.generation;
        let at = history
            .groups
            .iter()
            .position(|group| group.matches(name, ranks, generation))
            .unwrap_or_else(|| {
                let group = GroupRecord { name: name.to_string(), ranks: ranks.clone(), generation };
                history.groups.push(GroupProgress { group, collectives: 0, messages: vec![], last: None });
                history.groups.len() - 1
            });
        GroupId(at as u32)
    }

    /// Starts a new generation: groups made from now on start their counts at 0.
    pub(crate) fn begin_generation(&self) {
        let mut history = lock(&self.history);
        history.generation += 1;
        history.gave_up = None;
    }

    /// Records that the rank, as member `index` of the group, starts a call.
    pub(crate) fn start(self: &Arc<Self>, group: GroupId, index: usize, call: &Call) -> RecordedCall {
        let operator = current_operator();
        let sequence = Sequence::of(call.route, index);
        let started_us = self.elapsed_us();
        let mut history = lock(&self.history);
        let receives = matches!(call.route, Route::Recv { .. });
        history.gave_up = None;
        let seq = history.groups[group.index()].advance(sequence, receives);
        let number = history.calls_len;
        history.calls_len += 1;
        if history.calls.is_empty() {
            history.calls.reserve_exact(CALLS_KEPT);
        }
        let at = (number % CALLS_KEPT as u64) as usize;
        if at == history.calls.len() {
            history.calls.push(CallRecord::empty());
        }
        let record = &mut history.calls[at];
        (record.number, record.group, record.seq) = (number, group.index(), seq);
        (record.operator, record.state) = (Cow::Borrowed(operator), CallState::Started);
        (record.started_us, record.ended_us) = (started_us, 0);
        record.brought.set(call);
        self.starting.store(number + 1, Ordering::Relaxed);
        drop(history);
        RecordedCall { recorder: self.clone(), number, group, sequence, seq, call: call.name, operator }
    }

    /// Returns the last calls completed: on the group, and on any group.
    pub(in crate::comm) fn last(&self, name: &str, ranks: &[usize]) -> (Option<CallId>, Option<CallId>) {
        let history = lock(&self.history);
        let generation = history.generation;
        let group = history.groups.iter().find(|group| group.matches(name, ranks, generation));
        let here = group.and_then(|group| Some(group.last?.id(&group.group)));
        let last = history.last.map(|(group, done)| done.id(&history.groups[group].group));
        (here, last)
    }

    /// Returns the calls in which the rank waits.
    pub(super) fn waits(&self) -> Vec<RankWait> {
        let history = lock(&self.history);
        history.waiting.iter().map(|waiting| history.rank_wait(waiting)).collect()
    }

    /// Returns the call that failed last, if the rank has started none since, and the ranks that its error names.
    pub(super) fn gave_up(&self) -> Option<(CallId, Vec<usize>)> {
        lock(&self.history).gave_up.clone()
    }

    /// Returns the calls in which the rank has waited longer than `patience`. Each is returned once.
    pub(super) fn slow(&self, patience: Duration) -> Vec<RankWait> {
        let mut history = lock(&self.history);
        let mut slow = Vec::new();
        for at in 0..history.waiting.len() {
            if !history.waiting[at].is_slow && history.waiting[at].since.elapsed() >= patience {
                history.waiting[at].is_slow = true;
                slow.push(history.rank_wait(&history.waiting[at]));
            }
        }
        slow
    }

    /// Returns true if the rank has put the call in flight that another rank waits in.
    pub(super) fn has_come(&self, to: &RankWait) -> bool {
        let history = lock(&self.history);
        let Some(at) = history.groups.iter().position(|group| group.group == to.group) else { return false };
        let group = &history.groups[at];
        let is_starting = || {
            let number = self.starting.load(Ordering::Relaxed).checked_sub(1)?;
            let call = history.call_at(number).filter(|call| (call.group, call.seq) == (at, to.id.seq))?;
            let index = group.group.ranks.iter().position(|&rank| rank == self.rank)?;
            Some(call.sequence(index) == to.sequence)
        };
        group.sent(to.sequence) > to.id.seq && !is_starting().unwrap_or(false)
    }

    /// Writes the record to its file for a failure with this cause; only the first call writes. An echo is a failure
    /// that only follows from another rank's.
    pub(crate) fn write(&self, cause: &str, is_echo: bool) {
        let Some(dir) = &self.dir else { return };
        if self.written.swap(true, Ordering::Relaxed) {
            return;
        }
        // The rank reports its own failure, so a record that cannot be written is only a warning.
        if let Err(e) = write::write(&self.snapshot(cause, is_echo), dir) {
            eprintln!(
                "isoshard: rank {} cannot write its flight record to {}: {e}",
                self.rank,
                dir.display()
            );
        }
    }

    /// Returns the current record.
    fn snapshot(&self, cause: &str, is_echo: bool) -> RankRecord {
        let history = lock(&self.history);
        let (groups, calls) = history.last_calls();
        RankRecord {
            rank: self.rank,
            world_len: self.world_len,
            began_unix_us: self.began_unix_us,
            failed_us: self.elapsed_us(),
            cause: cause.to_string(),
            is_echo,
            busy: self.announcer.all_work(),
            calls_len: history.calls_len,
            groups,
            calls,
        }
    }

    /// Returns the microseconds since the start of the program.
    fn elapsed_us(&self) -> u64 {
        self.began.elapsed().as_micros() as u64
    }
}

impl CallHistory {
    /// Returns the calls that are kept, oldest first, and their groups.
    fn last_calls(&self) -> (Vec<GroupRecord>, Vec<CallRecord>) {
        // In a full ring the oldest call is the one that the next call overwrites.
        let oldest =
            if self.calls.len() < CALLS_KEPT { 0 } else { (self.calls_len % CALLS_KEPT as u64) as usize };
        let (newer, older) = self.calls.split_at(oldest);
        let mut calls: Vec<CallRecord> = older.iter().chain(newer).cloned().collect();
        let mut groups = Vec::new();
        let mut places = vec![None; self.groups.len()];
        for call in &mut calls {
            call.group = *places[call.group].get_or_insert_with(|| {
                groups.push(self.groups[call.group].group.clone());
                groups.len() - 1
            });
        }
        (groups, calls)
    }

    fn group(&self, group: GroupId) -> &GroupRecord {
        &self.groups[group.index()].group
    }

    fn call_at(&self, number: u64) -> Option<&CallRecord> {
        let at = (number % CALLS_KEPT as u64) as usize;
        self.calls.get(at).filter(|call| call.number == number)
    }

    fn call(&mut self, number: u64) -> Option<&mut CallRecord> {
        let at = (number % CALLS_KEPT as u64) as usize;
        self.calls.get_mut(at).filter(|call| call.number == number)
    }

    fn rank_wait(&self, wait: &OpenWait) -> RankWait {
        let group = self.group(wait.group);
        let done = CompletedCall { call: wait.call, seq: wait.seq, operator: wait.operator };
        RankWait { id: done.id(group), group: group.clone(), sequence: wait.sequence, since: wait.since }
    }
}

impl GroupId {
    fn index(self) -> usize {
        self.0 as usize
    }
}

impl GroupProgress {
    fn matches(&self, name: &str, ranks: &[usize], generation: u64) -> bool {
        let GroupRecord { name: own, ranks: members, generation: made } = &self.group;
        *made == generation && own == name && **members == *ranks
    }

    /// Returns the number of calls started in a sequence; for messages, the number sent.
    fn sent(&self, sequence: Sequence) -> u64 {
        match sequence {
            Sequence::Collective => self.collectives,
            Sequence::Message { from, to } => {
                self.messages.iter().find(|(key, _)| *key == (from, to, false)).map_or(0, |(_, n)| *n)
            }
        }
    }

    fn advance(&mut self, sequence: Sequence, receives: bool) -> u64 {
        let next = match sequence {
            Sequence::Collective => &mut self.collectives,
            Sequence::Message { from, to } => {
                let key = (from, to, receives);
                let at = self.messages.iter().position(|(other, _)| *other == key).unwrap_or_else(|| {
                    self.messages.push((key, 0));
                    self.messages.len() - 1
                });
                &mut self.messages[at].1
            }
        };
        *next += 1;
        *next - 1
    }
}

impl CompletedCall {
    fn id(&self, group: &GroupRecord) -> CallId {
        let CompletedCall { call, seq, operator } = *self;
        CallId { call: call.into(), seq, group: label(&group.name, &group.ranks), operator: operator.into() }
    }
}

impl RecordedCall {
    /// Records that the engine has put the call in flight.
    pub(crate) fn has_started(&self) {
        let own = self.number + 1;
        let _ = self.recorder.starting.compare_exchange(own, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Records that the rank starts to wait for the call.
    pub(crate) fn wait(&self) {
        let RecordedCall { number, group, sequence, seq, call, operator, .. } = *self;
        let since = Instant::now();
        self.recorder.announcer.rest(true);
        let mut history = lock(&self.recorder.history);
        history.waiting.push(OpenWait {
            number,
            group,
            sequence,
            seq,
            call,
            operator,
            since,
            is_slow: false,
        });
        if let Some(record) = history.call(number) {
            record.state = CallState::Waiting;
        }
    }

    /// Records that the rank has the call's result.
    pub(crate) fn complete(self) {
        let done = CompletedCall { call: self.call, seq: self.seq, operator: self.operator };
        let mut history = self.end(CallState::Completed);
        let group = self.group.index();
        let progress = &mut history.groups[group];
        // The program may wait for calls in another order than it started them.
        if self.sequence == Sequence::Collective && progress.last.is_none_or(|last| last.seq < self.seq) {
            progress.last = Some(done);
        }
        history.last = Some((group, done));
    }

    /// Records that the call failed, writes the record, and returns `error` with the operator that the call was made
    /// for.
    pub(crate) fn fail(self, error: Error) -> Error {
        let mut history = self.end(CallState::Failed);
        // Under the same lock, so that no rank sees this one neither wait nor blame another.
        if let Error::Comm(fault) = &error {
            let done = CompletedCall { call: self.call, seq: self.seq, operator: self.operator };
            let id = done.id(history.group(self.group));
            history.gave_up = Some((id, fault.blamed()));
        }
        let error = match error {
            Error::Comm(mut fault) => {
                let id = fault.id_mut();
                let group = history.group(self.group);
                if id.operator.is_empty()
                    && id.call == self.call
                    && id.seq == self.seq
                    && id.group == label(&group.name, &group.ranks)
                {
                    id.operator = self.operator.into();
                }
                Error::Comm(fault)
            }
            other => other,
        };
        drop(history);
        // Arguments that were refused before the call started are no failure of the group.
        if !matches!(error, Error::Invalid(_)) {
            self.recorder.write(&error.to_string(), error.is_echo());
        }
        error
    }

    fn end(&self, state: CallState) -> MutexGuard<'_, CallHistory> {
        let ended_us = self.recorder.elapsed_us();
        self.recorder.announcer.rest(false);
        let mut history = lock(&self.recorder.history);
        if let Some(at) = history.waiting.iter().position(|waiting| waiting.number == self.number) {
            history.waiting.swap_remove(at);
        }
        if let Some(record) = history.call(self.number) {
            (record.state, record.ended_us) = (state, ended_us);
        }
        history
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::calls::Lineage;
    use crate::comm::{Spmd, spmd};
    use crate::error::Result;
    use crate::tensor::{DType, ReduceOp, Shape, Tensor};

    /// Calls that are waited for late, out of order, or never.
    #[test]
    fn what_is_completed_is_known_in_any_order_of_waits() {
        let lasts = spmd(2, |rank| {
            let g = rank.group(&[0, 1], "dp")?;
            let x = Tensor::scalar(1i64);
            let all: Vec<_> = (0..4).map(|_| g.all_reduce_async(&x, ReduceOp::Sum)).collect();
            let mut all: Vec<_> = all.into_iter().map(Some).collect();
            [2, 0].into_iter().try_for_each(|k| all[k].take().expect("once").wait().map(drop))?;
            drop(all);
            rank.world().barrier()?;
            let last = rank.group(&[0, 1], "dp")?;
            Ok(last.last_completed())
        });
        for (here, last) in lasts.unwrap() {
            assert_eq!(here.unwrap().to_string(), "all_reduce #2 on group dp{0, 1}");
            assert_eq!(last.unwrap().to_string(), "barrier #0 on group world{0, 1}");
        }
    }

    /// A message to the rank itself counts as one call at each end.
    #[test]
    fn messages_are_counted_at_both_ends() {
        let run = |rank: crate::comm::Rank| -> Result<()> {
            let (g, x) = (rank.world(), Tensor::scalar(1i64));
            for to in 0..2 {
                g.send(&x, to)?;
            }
            for from in 0..2 {
                g.recv(from, DType::I64, &Shape::from([]))?;
            }
            g.barrier()
        };
        spmd(2, run).unwrap();
        // A second receive waits for a second message, and only its sender is missing.
        let error = Spmd::new(2).deadline(Duration::from_millis(100)).on_slow(|_| ()).run(|rank| {
            let g = rank.world();
            if rank.rank() == 1 {
                return g.barrier();
            }
            g.send(&Tensor::scalar(1i64), 0)?;
            g.recv(0, DType::I64, &Shape::from([]))?;
            g.recv(1, DType::I64, &Shape::from([])).map(drop)
        });
        let said = error.unwrap_err().to_string();
        assert!(said.contains("cycle: rank") || said.contains("did not come"), "{said}");
    }

    /// Prints what recording a call costs (read it with `--nocapture`).
    #[test]
    fn a_call_is_written_down_quickly() {
        let recorder = Recorder::alone(0, 2);
        let group = recorder.group("dp", &[0, 1].into());
        let x = Tensor::zeros(DType::F32, [64, 128]);
        let call = Call {
            name: "all_reduce",
            route: Route::Gather,
            op: Some(ReduceOp::Sum),
            dtype: DType::F32,
            outgoing: &[x],
            incoming: &[Shape::from([64, 128]), Shape::from([64, 128])],
            lineage: Lineage::NONE,
        };
        let rounds = 20_000u32;
        let least = (0..5).map(|_| {
            let start = Instant::now();
            for _ in 0..rounds {
                let ticket = recorder.start(group, 0, &call);
                ticket.wait();
                ticket.complete();
            }
            start.elapsed() / rounds
        });
        println!("a call is recorded in {:?}", least.min().unwrap_or_default());
        let history = lock(&recorder.history);
        assert_eq!(
            (history.calls.len(), history.calls_len, history.waiting.len()),
            (CALLS_KEPT, 5 * u64::from(rounds), 0)
        );
    }
}
