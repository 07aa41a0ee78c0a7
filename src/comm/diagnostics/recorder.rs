//! One rank's ring of recent calls.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use super::flight::{State, write};
use super::shapes::Shapes;
use crate::comm::calls::{Call, Route, Sequence, current_operator, label};
use crate::error::{CallId, Error};
use crate::tensor::{DType, ReduceOp};

/// Calls that a rank remembers.
pub(super) const KEPT: usize = 256;

/// What one rank does, as it and others may look it up.
#[derive(Debug)]
pub(crate) struct Recorder {
    pub(super) rank: usize,
    pub(super) world_len: usize,
    pub(super) began: Instant,
    /// When the program began, in microseconds since 1970, so that files of several hosts can be set side by side.
    pub(super) began_unix_us: u64,
    dir: Option<PathBuf>,
    written: AtomicBool,
    ring: Mutex<Ring>,
}

/// A group in a rank's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupId(u32);

#[derive(Debug, Default)]
pub(super) struct Ring {
    pub groups: Vec<Row>,
    pub entries: Vec<Entry>,
    /// Calls started so far; call `n` is entry `n % KEPT`.
    pub calls: u64,
    /// Calls that the rank is waiting in: one for each of its threads.
    waiting: Vec<Waiting>,
    last: Option<(usize, Done)>,
    /// Groups of another generation are others, whatever their names.
    generation: u64,
}

/// What is known of a group.
#[derive(Debug)]
pub(super) struct Row {
    name: String,
    ranks: Arc<[usize]>,
    generation: u64,
    collectives: u64,
    /// By sender, receiver, and whether this rank receives: a rank may send to itself.
    messages: Vec<((usize, usize, bool), u64)>,
    last: Option<Done>,
}

#[derive(Clone, Copy, Debug)]
struct Done {
    call: &'static str,
    seq: u64,
    operator: &'static str,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub number: u64,
    pub group: GroupId,
    pub sequence: Sequence,
    pub seq: u64,
    pub call: &'static str,
    pub route: Route,
    pub op: Option<ReduceOp>,
    pub dtype: DType,
    pub sent: Shapes,
    pub expected: Shapes,
    pub operator: &'static str,
    pub state: State,
    pub started: Duration,
    pub ended: Duration,
}

/// A call that a thread of the rank waits in.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    number: u64,
    group: GroupId,
    sequence: Sequence,
    seq: u64,
    call: &'static str,
    operator: &'static str,
    since: Instant,
    is_slow: bool,
}

/// A recorded call, for whoever sees it end.
#[derive(Debug)]
pub(crate) struct Ticket {
    recorder: Arc<Recorder>,
    number: u64,
    group: GroupId,
    sequence: Sequence,
    seq: u64,
    call: &'static str,
    operator: &'static str,
}

/// A wait as other ranks see it.
#[derive(Clone, Debug)]
pub(super) struct Waits {
    pub id: CallId,
    pub name: String,
    pub ranks: Arc<[usize]>,
    pub generation: u64,
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
            ring: Mutex::default(),
        }
    }

    /// That of a rank whose peers are elsewhere, written where the environment says.
    pub(crate) fn alone(rank: usize, world_len: usize) -> Arc<Recorder> {
        Arc::new(Recorder::new(rank, world_len, write::dir_from_env()))
    }

    /// A group's place in the record; the same ranks and name are the same group.
    pub(crate) fn group(&self, name: &str, ranks: &Arc<[usize]>) -> GroupId {
        let mut ring = self.ring();
        let generation = ring.generation;
        let at = ring.groups.iter().position(|row| row.is(name, ranks, generation)).unwrap_or_else(|| {
            let (name, ranks) = (name.to_string(), ranks.clone());
            ring.groups.push(Row { name, ranks, generation, collectives: 0, messages: vec![], last: None });
            ring.groups.len() - 1
        });
        GroupId(at as u32)
    }

    /// The rank goes on among other ranks: groups made from now on begin their counts anew.
    pub(crate) fn begin_generation(&self) {
        self.ring().generation += 1;
    }

    /// Writes down that the rank, member `index` of the group, starts a call.
    pub(crate) fn start(self: &Arc<Self>, group: GroupId, index: usize, call: &Call) -> Ticket {
        let operator = current_operator();
        let sequence = Sequence::of(call.route, index);
        let started = self.began.elapsed();
        let mut ring = self.ring();
        let seq = ring.groups[group.index()].advance(sequence, matches!(call.route, Route::Recv { .. }));
        let number = ring.calls;
        ring.calls += 1;
        if ring.entries.is_empty() {
            ring.entries.reserve_exact(KEPT);
        }
        let at = (number % KEPT as u64) as usize;
        if at == ring.entries.len() {
            ring.entries.push(Entry::empty(group));
        }
        let entry = &mut ring.entries[at];
        (entry.number, entry.group, entry.sequence, entry.seq) = (number, group, sequence, seq);
        (entry.call, entry.route, entry.op, entry.dtype) = (call.name, call.route, call.op, call.dtype);
        (entry.operator, entry.state, entry.started) = (operator, State::Started, started);
        entry.sent.set(call.outgoing.iter().map(|x| x.shape()));
        entry.expected.set(call.incoming.iter());
        drop(ring);
        Ticket { recorder: self.clone(), number, group, sequence, seq, call: call.name, operator }
    }

    /// The last calls completed: on the group, and of all.
    pub(in crate::comm) fn last(&self, name: &str, ranks: &[usize]) -> (Option<CallId>, Option<CallId>) {
        let ring = self.ring();
        let generation = ring.generation;
        let row = ring.groups.iter().find(|row| row.is(name, ranks, generation));
        let here = row.and_then(|row| Some(row.last?.id(row)));
        let last = ring.last.map(|(group, done)| done.id(&ring.groups[group]));
        (here, last)
    }

    /// The calls that the rank waits in.
    pub(super) fn waits(&self) -> Vec<Waits> {
        let ring = self.ring();
        ring.waiting.iter().map(|waiting| ring.told(waiting)).collect()
    }

    /// As [`Recorder::waits`], those in which it has waited longer than `patience`, each told once.
    pub(super) fn slow(&self, patience: Duration) -> Vec<Waits> {
        let mut ring = self.ring();
        let mut slow = Vec::new();
        for at in 0..ring.waiting.len() {
            if !ring.waiting[at].is_slow && ring.waiting[at].since.elapsed() >= patience {
                ring.waiting[at].is_slow = true;
                slow.push(ring.told(&ring.waiting[at]));
            }
        }
        slow
    }

    /// True where the rank has started this call of a group's sequence.
    pub(super) fn has_come(&self, to: &Waits) -> bool {
        let ring = self.ring();
        let row = ring.groups.iter().find(|row| row.is(&to.name, &to.ranks, to.generation));
        row.is_some_and(|row| row.sent(to.sequence) > to.id.seq)
    }

    /// Writes the record, once, for a failure with this cause; an echo is a failure that only follows from another rank's.
    pub(crate) fn write(&self, cause: &str, is_echo: bool) {
        let Some(dir) = &self.dir else { return };
        if self.written.swap(true, Ordering::Relaxed) {
            return;
        }
        // A rank that fails has something better to report than that its record could not be written.
        if let Err(e) = write::write(self, &self.ring(), dir, (cause, is_echo)) {
            eprintln!(
                "isoshard: rank {} cannot write its flight record to {}: {e}",
                self.rank,
                dir.display()
            );
        }
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ring {
    pub fn row(&self, group: GroupId) -> &Row {
        &self.groups[group.index()]
    }

    fn entry(&mut self, number: u64) -> Option<&mut Entry> {
        let at = (number % KEPT as u64) as usize;
        self.entries.get_mut(at).filter(|entry| entry.number == number)
    }

    fn told(&self, waiting: &Waiting) -> Waits {
        let row = self.row(waiting.group);
        let done = Done { call: waiting.call, seq: waiting.seq, operator: waiting.operator };
        Waits {
            id: done.id(row),
            name: row.name.clone(),
            ranks: row.ranks.clone(),
            generation: row.generation,
            sequence: waiting.sequence,
            since: waiting.since,
        }
    }
}

impl GroupId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl Row {
    pub fn label(&self) -> String {
        label(&self.name, &self.ranks)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    pub fn generation(&self) -> u64 {
        self.generation
    }

    fn is(&self, name: &str, ranks: &[usize], generation: u64) -> bool {
        self.generation == generation && self.name == name && *self.ranks == *ranks
    }

    /// The calls started on a sequence; of messages, those sent.
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

impl Done {
    fn id(&self, row: &Row) -> CallId {
        CallId { call: self.call.into(), seq: self.seq, group: row.label(), operator: self.operator.into() }
    }
}

impl Entry {
    fn empty(group: GroupId) -> Entry {
        Entry {
            number: 0,
            group,
            sequence: Sequence::Collective,
            seq: 0,
            call: "",
            route: Route::Barrier,
            op: None,
            dtype: DType::U8,
            sent: Shapes::NONE,
            expected: Shapes::NONE,
            operator: "",
            state: State::Started,
            started: Duration::ZERO,
            ended: Duration::ZERO,
        }
    }
}

impl Ticket {
    /// The rank begins to wait for the call.
    pub(crate) fn wait(&self) {
        let Ticket { number, group, sequence, seq, call, operator, .. } = *self;
        let since = Instant::now();
        let mut ring = self.recorder.ring();
        ring.waiting.push(Waiting { number, group, sequence, seq, call, operator, since, is_slow: false });
        if let Some(entry) = ring.entry(number) {
            entry.state = State::Waiting;
        }
    }

    /// The rank has what it waited for.
    pub(crate) fn complete(self) {
        let done = Done { call: self.call, seq: self.seq, operator: self.operator };
        let mut ring = self.end(State::Completed);
        let group = self.group.index();
        let row = &mut ring.groups[group];
        // Calls may be waited for in another order than they were made in.
        if self.sequence == Sequence::Collective && row.last.is_none_or(|last| last.seq < self.seq) {
            row.last = Some(done);
        }
        ring.last = Some((group, done));
    }

    /// The call failed: `error` is told which operator wanted it, and the record is written.
    pub(crate) fn fail(self, error: Error) -> Error {
        let ring = self.end(State::Failed);
        let error = match error {
            Error::Comm(mut fault) => {
                let id = fault.id_mut();
                let row = ring.row(self.group);
                if id.operator.is_empty()
                    && id.call == self.call
                    && id.seq == self.seq
                    && id.group == row.label()
                {
                    id.operator = self.operator.into();
                }
                Error::Comm(fault)
            }
            other => other,
        };
        drop(ring);
        // What was refused before anybody else heard of it is no failure of the group's.
        if !matches!(error, Error::Invalid(_)) {
            self.recorder.write(&error.to_string(), error.is_echo());
        }
        error
    }

    fn end(&self, state: State) -> MutexGuard<'_, Ring> {
        let ended = self.recorder.began.elapsed();
        let mut ring = self.recorder.ring();
        if let Some(at) = ring.waiting.iter().position(|waiting| waiting.number == self.number) {
            ring.waiting.swap_remove(at);
        }
        if let Some(entry) = ring.entry(self.number) {
            (entry.state, entry.ended) = (state, ended);
        }
        ring
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{Spmd, spmd};
    use crate::error::Result;
    use crate::tensor::{Shape, Tensor};

    /// Calls to come after others, some waited for late, some never.
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

    /// A message to oneself is one call at each of its ends.
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
        // A second receive waits for a second message, and is missed by nobody but its sender.
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
        assert!(said.contains("circle: rank") || said.contains("did not come"), "{said}");
    }

    /// What a call costs above its engine, to be read with `--nocapture`.
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
        let ring = recorder.ring();
        assert_eq!((ring.entries.len(), ring.calls, ring.waiting.len()), (KEPT, 5 * u64::from(rounds), 0));
    }
}
