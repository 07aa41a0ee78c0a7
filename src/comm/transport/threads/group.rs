//! The state that the members of a group share: queues of call slots, the first fault, and a condition variable.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::slot::{CallSlot, SlotContents, SlotQueue};
use super::spin::spin;
use super::status::WorldStatus;
use super::sync::atomic::{AtomicBool, Ordering};
use super::sync::{Condvar, Mutex, MutexGuard};
use crate::base::unpoisoned;
use crate::comm::calls::label;
use crate::comm::calls::{Call, Sequence};
use crate::comm::deadline::end_after;
use crate::comm::diagnostics::Blame;
use crate::comm::transport::Reduce;
use crate::error::{CallId, CommFault, Result};
use crate::tensor::{Tensor, sort_by_key};

/// The longest time to park without looking around. Everything that matters wakes the rank; this is only a safeguard.
const LONGEST_PARK: Duration = Duration::from_millis(500);

/// The shortest time to park.
const SHORTEST_PARK: Duration = Duration::from_millis(1);

/// The shortest oversleeping that counts as a pause of the machine.
const SHORTEST_PAUSE: Duration = Duration::from_millis(5);

/// A group of ranks that are threads.
#[derive(Debug)]
pub(super) struct ThreadGroup {
    status: Arc<WorldStatus>,
    pub(super) ranks: Arc<[usize]>,
    name: String,
    pub(super) label: String,
    /// Groups of generation 0 fail with any rank in the world, later ones only with their own members.
    generation: u64,
    state: Mutex<GroupState>,
    wake: Condvar,
    /// True once `GroupState::fault` is set.
    is_faulty: AtomicBool,
}

#[derive(Debug)]
struct GroupState {
    collectives: SlotQueue,
    /// Messages by (sender, receiver).
    messages: HashMap<(usize, usize), SlotQueue>,
    /// The first fault, and the call's slot if it happened in this group.
    fault: Option<(CommFault, Option<Arc<CallSlot>>)>,
    parked: usize,
}

/// A call that a member has published and not left yet.
#[derive(Clone, Debug)]
pub(super) struct PublishedCall {
    sequence: Sequence,
    pub(super) slot: Arc<CallSlot>,
    /// The member's position among the slot's members.
    pub(super) position: usize,
    /// The call's name.
    name: &'static str,
}

impl ThreadGroup {
    pub(super) fn new(status: Arc<WorldStatus>, generation: u64, ranks: &[usize], name: &str) -> ThreadGroup {
        let ranks: Arc<[usize]> = ranks.into();
        let collectives = SlotQueue::new(ranks.clone());
        let state = GroupState { collectives, messages: HashMap::new(), fault: None, parked: 0 };
        ThreadGroup {
            status,
            name: name.into(),
            generation,
            label: label(name, &ranks),
            ranks,
            state: Mutex::new(state),
            wake: Condvar::new(),
            is_faulty: AtomicBool::new(false),
        }
    }

    /// Publishes a member's next call of a sequence. `position` is the member's position in the sequence; `reduce` is
    /// the fold of a reduction. `places` are those of a gather: members bring them in turn, and the others keep theirs.
    pub(super) fn publish(
        &self,
        sequence: Sequence,
        position: usize,
        call: &Call<'_>,
        reduce: Option<&Reduce>,
        places: &mut Option<Vec<Tensor>>,
    ) -> Result<PublishedCall> {
        let mut guard = self.lock();
        let state = &mut *guard;
        if let Some((fault, _)) = &state.fault {
            return Err(fault.clone().into());
        }
        let slot = state.queue(sequence, &self.ranks).advance(position);
        if let Some(fault) = self.peer_failure(&slot, call.name) {
            return Err(fault.into());
        }
        if let Some(fault) = self.mismatch(&slot, position, call) {
            let fault = self.with_last(fault);
            self.set_fault(state, fault.clone(), Some(&slot));
            return Err(fault.into());
        }
        let places = places.take_if(|_| slot.seq() % self.ranks.len() as u64 == position as u64);
        if state.queue(sequence, &self.ranks).put(&slot, position, call, reduce, places) {
            if let Some(reduce) = reduce {
                // Other calls of the group can continue during this fold.
                drop(guard);
                let prepared = slot.prepare(reduce);
                guard = self.lock();
                if let Err(error) = prepared {
                    let (id, rank) = (self.id(&slot, call.name), slot.ranks[position]);
                    let fault = CommFault::PeerFailed { id, rank, cause: error.to_string() };
                    self.set_fault(&mut guard, fault, None);
                    return Err(error);
                }
            }
            slot.open();
            self.wake_parked(&guard);
        }
        Ok(PublishedCall { sequence, slot, position, name: call.name })
    }

    /// Leaves a call that the member no longer needs. The last member to leave returns the slot for reuse.
    pub(super) fn leave(&self, call: &PublishedCall) {
        if call.slot.leave() {
            self.lock().queue(call.sequence, &self.ranks).recycle(call.slot.clone());
        }
    }

    /// Waits until all members have published the call, or until it fails. If it fails because this rank finds a
    /// cycle of ranks that wait for each other, `fail_others` fails the other groups in the cycle.
    pub(super) fn wait(&self, call: &PublishedCall, fail_others: impl Fn(&CommFault)) -> Result<()> {
        let slot = &call.slot;
        let settled = || slot.is_open() || self.is_given_up();
        spin(settled);
        if slot.is_open() {
            return Ok(());
        }
        let (began, interval) = (Instant::now(), self.status.deadline / 4);
        // A member that has just come out of a wait for a busy rank depends on none, but had no time yet. So the chain is
        // read several times per deadline, and each reading gives this call time of its own.
        let mut patience = end_after(self.status.deadline);
        let mut deadline = end_after(interval);
        // If this thread sleeps for longer than it wants to, the machine has stood still, or is busy with other programs: the
        // other ranks had no time either. At most one deadline more is waited for them.
        let mut pauses = self.status.deadline;
        let mut state = self.lock();
        loop {
            if slot.is_open() {
                return Ok(());
            }
            if let Some((fault, at)) = &state.fault {
                return Err(self.own_view(fault, at.as_ref(), call).into());
            }
            let failure = self.peer_failure(slot, call.name);
            let mut is_late = Instant::now() >= deadline;
            if is_late {
                patience = patience.max(end_after(self.time_left(call, began.elapsed())));
                is_late = Instant::now() >= patience;
                deadline = patience.min(end_after(interval));
            }
            let absence = self.missing(call, is_late);
            // The members of a cycle may have been told and have ended before this group is.
            if (failure.is_some() || absence.is_some())
                && let Some(cycle) = self.cycle()
            {
                self.set_fault(&mut state, cycle, None);
                continue;
            }
            if let Some(fault) = failure {
                return Err(fault.into());
            }
            if let Some(fault) = absence {
                let fault = self.with_last(fault);
                let is_late = matches!(fault, CommFault::Missing { ended: false, .. });
                let cycle = || self.status.recorders.cycle(slot.ranks[call.position], fault.id());
                // If two ranks find the cycle at once, one of them may have continued before the other looks.
                let cycle = is_late.then(cycle).flatten().or_else(|| self.cycle());
                if let Some(cycle) = cycle {
                    // Tells the other groups while this rank still counts as waiting, so that a rank that looks
                    // meanwhile finds the same cycle.
                    drop(state);
                    // Recorded before any rank of the cycle can be told and end.
                    self.status.add_cycle(self.generation, &cycle);
                    fail_others(&cycle);
                    state = self.lock();
                    self.set_fault(&mut state, cycle, None);
                    continue;
                }
                self.set_fault(&mut state, fault.clone(), Some(slot));
                return Err(fault.into());
            }
            // Past the deadline, the last member to arrive may still be folding.
            let left = deadline.saturating_duration_since(Instant::now()).max(SHORTEST_PARK);
            let parked = Instant::now();
            state = self.park(state, left);
            let pause = parked.elapsed().saturating_sub(left.min(LONGEST_PARK)).min(pauses);
            if pause > SHORTEST_PAUSE {
                pauses -= pause;
                for end in [&mut patience, &mut deadline] {
                    *end = end.checked_add(pause).unwrap_or(*end);
                }
            }
        }
    }

    /// Waits until other members' work makes `ready` true. Gives up only if the world fails.
    pub(super) fn wait_for_work(&self, call: &PublishedCall, ready: impl Fn() -> bool) -> Result<()> {
        if spin(&ready) {
            return Ok(());
        }
        let mut state = self.lock();
        while !ready() {
            if let Some(fault) = self.peer_failure(&call.slot, call.name) {
                return Err(fault.into());
            }
            state = self.park(state, LONGEST_PARK);
        }
        Ok(())
    }

    /// Wakes all parked members, to look at the state again.
    pub(super) fn wake(&self) {
        self.wake_parked(&self.lock());
    }

    /// Returns true if no call that is incomplete now can be completed any more.
    pub(super) fn is_given_up(&self) -> bool {
        self.is_faulty.load(Ordering::Acquire) || self.failure().is_some()
    }

    /// Returns the cycle of waiting ranks that this group is part of, if one was found.
    pub(super) fn cycle(&self) -> Option<CommFault> {
        self.status.cycle_of(self.generation, &self.label)
    }

    /// Fails the group with a fault that was found in another one.
    pub(super) fn fail(&self, fault: &CommFault) {
        self.set_fault(&mut self.lock(), fault.clone(), None);
    }

    /// Returns the fault of a message that was not received, with the first ranks that have one.
    pub(super) fn unreceived(&self) -> Option<CommFault> {
        let state = self.lock();
        let mut messages: Vec<_> = state.messages.iter().collect();
        sort_by_key(&mut messages, |(ends, _)| **ends);
        messages.into_iter().find_map(|(_, queue)| {
            let (slot, call) = (queue.unreceived()?, "send");
            let (id, brought) = (self.id(slot, call), brought(&slot.contents(), 0));
            Some(CommFault::Unreceived { id, rank: slot.ranks[0], brought, receiver: slot.ranks[1] })
        })
    }

    fn lock(&self) -> MutexGuard<'_, GroupState> {
        unpoisoned(self.state.lock())
    }

    fn park<'a>(
        &self,
        mut state: MutexGuard<'a, GroupState>,
        at_most: Duration,
    ) -> MutexGuard<'a, GroupState> {
        state.parked += 1;
        let (mut state, _) = unpoisoned(self.wake.wait_timeout(state, at_most.min(LONGEST_PARK)));
        state.parked -= 1;
        state
    }

    fn wake_parked(&self, state: &GroupState) {
        if state.parked > 0 {
            self.wake.notify_all();
        }
    }

    /// Sets the group's fault, unless it has one.
    fn set_fault(&self, state: &mut GroupState, fault: CommFault, slot: Option<&Arc<CallSlot>>) {
        state.fault.get_or_insert_with(|| (fault, slot.cloned()));
        self.is_faulty.store(true, Ordering::Release);
        self.wake.notify_all();
    }

    fn id(&self, slot: &CallSlot, call: &'static str) -> CallId {
        CallId::new(call, slot.seq(), &*self.label)
    }

    fn mismatch(&self, slot: &CallSlot, position: usize, call: &Call<'_>) -> Option<CommFault> {
        let contents = slot.contents();
        let (at, other) = contents.disagreement(position, call)?;
        let (low, high) =
            if at < position { ((at, other), (position, *call)) } else { ((position, *call), (at, other)) };
        let (brought, other_brought) = high.1.signature().describe_both(high.0, &low.1.signature(), low.0);
        Some(CommFault::Mismatch {
            id: self.id(slot, call.name),
            rank: slot.ranks[high.0],
            brought,
            other: slot.ranks[low.0],
            other_brought,
            last: vec![],
        })
    }

    fn peer_failure(&self, slot: &CallSlot, call: &'static str) -> Option<CommFault> {
        let (rank, cause) = self.failure()?;
        Some(CommFault::PeerFailed { id: self.id(slot, call), rank, cause: cause.clone() })
    }

    /// Returns the failed rank for which the group fails, and its cause.
    fn failure(&self) -> Option<(usize, &String)> {
        match self.generation {
            0 => self.status.first_failure().map(|(rank, cause)| (*rank, cause)),
            _ => self.status.failure_among(&self.ranks),
        }
    }

    /// Adds the members' last completed calls to a fault, and the work that is waited for. If missing members wait
    /// themselves, names the ranks that they wait for.
    fn with_last(&self, mut fault: CommFault) -> CommFault {
        if let CommFault::Mismatch { last, .. } | CommFault::Missing { last, .. } = &mut fault {
            *last = self.status.recorders.last(&self.name, &self.ranks);
        }
        if let CommFault::Missing { rank, missing, ended, elsewhere, busy, .. } = &mut fault {
            *busy = self.status.busy(&self.status.recorders.awaited(missing));
            // A rank that has ended waits for none.
            if !*ended {
                Blame { ranks: *missing, elsewhere: *elsewhere } =
                    self.status.recorders.blame(*rank, missing);
            }
        }
        fault
    }

    /// Returns the time for which a call that has waited for `waited` waits on, which depends on the work that the
    /// absent members have announced, and the ranks that these wait for.
    fn time_left(&self, call: &PublishedCall, waited: Duration) -> Duration {
        let absent: Vec<usize> = {
            let (ranks, contents) = (&call.slot.ranks, call.slot.contents());
            (0..ranks.len()).filter(|&at| contents.brought(at).is_none()).map(|at| ranks[at]).collect()
        };
        self.status.time_left(self.status.recorders.awaited(&absent).into_iter(), waited)
    }

    /// Returns the fault of members that will not arrive: those that have ended, or if `late`, all that are absent.
    fn missing(&self, call: &PublishedCall, late: bool) -> Option<CommFault> {
        let (slot, contents) = (&call.slot, call.slot.contents());
        // A rank publishes its calls before it ends, so its end is read first.
        let ended = |at: usize| self.status.has_ended(slot.ranks[at]);
        let absent = |at: usize| contents.brought(at).is_none();
        let all = 0..slot.ranks.len();
        let has_ended = all.clone().any(|at| ended(at) && absent(at));
        if !(has_ended || late && all.clone().any(absent)) {
            return None;
        }
        let missing = all.filter(|&at| (ended(at) || !has_ended) && absent(at));
        Some(CommFault::Missing {
            id: self.id(slot, call.name),
            rank: slot.ranks[call.position],
            brought: brought(&contents, call.position),
            missing: missing.map(|at| slot.ranks[at]).collect(),
            ended: has_ended,
            deadline_s: self.status.deadline.as_secs_f64(),
            elsewhere: vec![],
            busy: vec![],
            last: vec![],
        })
    }

    /// Rewrites the group's fault, which happened in the slot `at`, for the member that waits for `call`: if that is
    /// the call that failed, in terms of the member's own arguments.
    fn own_view(&self, fault: &CommFault, at: Option<&Arc<CallSlot>>, call: &PublishedCall) -> CommFault {
        let mut fault = fault.clone().told_by(call.slot.ranks[call.position]);
        if !at.is_some_and(|at| Arc::ptr_eq(at, &call.slot)) {
            return fault;
        }
        let own = brought(&call.slot.contents(), call.position);
        match &mut fault {
            CommFault::Missing { id, rank, brought, .. } => {
                id.call = call.name.into();
                *rank = call.slot.ranks[call.position];
                *brought = own;
            }
            other => other.id_mut().call = call.name.into(),
        }
        fault
    }
}

impl GroupState {
    fn queue(&mut self, sequence: Sequence, ranks: &[usize]) -> &mut SlotQueue {
        match sequence {
            Sequence::Collective => &mut self.collectives,
            Sequence::Message { from, to } => {
                let between = || SlotQueue::new([ranks[from], ranks[to]].into());
                self.messages.entry((from, to)).or_insert_with(between)
            }
        }
    }
}

fn brought(contents: &SlotContents, position: usize) -> String {
    contents.brought(position).expect("a member waits only after it has come").to_string()
}
