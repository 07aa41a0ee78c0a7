//! What the members of one group share: lanes of slots, the first fault, and a place to park.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::slot::{Lane, Slot};
use super::world::{World, spin};
use crate::comm::Call;
use crate::comm::group::label;
use crate::error::{CallId, CommFault, Result};

/// How often a parked rank looks around unasked; only a guard, since everything that matters wakes it.
const NAP: Duration = Duration::from_millis(500);

/// The meeting place of a group.
#[derive(Debug)]
pub(super) struct Hub {
    pub(super) ranks: Arc<[usize]>,
    name: String,
    pub(super) label: String,
    /// Hubs of the first generation heed every failure in the world, later ones their own members' alone.
    pub(super) generation: u64,
    state: Mutex<State>,
    wake: Condvar,
    /// True once `State::fault` is set.
    is_faulty: AtomicBool,
}

#[derive(Debug)]
struct State {
    collectives: Lane,
    /// Messages by (sender, receiver).
    messages: HashMap<(usize, usize), Lane>,
    /// The first fault, and the slot of this hub where it happened, if it was in this hub.
    fault: Option<(CommFault, Option<Arc<Slot>>)>,
    parked: usize,
}

/// Which lane a call goes by.
#[derive(Clone, Copy, Debug)]
pub(super) enum By {
    Collective,
    Message { from: usize, to: usize },
}

impl Hub {
    pub(super) fn new(generation: u64, ranks: &[usize], name: &str) -> Hub {
        let ranks: Arc<[usize]> = ranks.into();
        let collectives = Lane::new(ranks.clone());
        let state = State { collectives, messages: HashMap::new(), fault: None, parked: 0 };
        Hub {
            name: name.into(),
            label: label(name, &ranks),
            generation,
            ranks,
            state: Mutex::new(state),
            wake: Condvar::new(),
            is_faulty: AtomicBool::new(false),
        }
    }

    /// Lays this member's next call down where the others will find it.
    pub(super) fn publish(
        &self,
        world: &World,
        by: By,
        position: usize,
        call: &Call<'_>,
    ) -> Result<Arc<Slot>> {
        let mut state = self.lock();
        if let Some((fault, _)) = &state.fault {
            return Err(fault.clone().into());
        }
        let lane = match by {
            By::Collective => &mut state.collectives,
            By::Message { from, to } => state
                .messages
                .entry((from, to))
                .or_insert_with(|| Lane::new([self.ranks[from], self.ranks[to]].into())),
        };
        let slot = lane.advance(position);
        if let Some(fault) = self.peer_failure(world, &slot, call.name) {
            return Err(fault.into());
        }
        if let Some(fault) = self.mismatch(&slot, position, call) {
            let fault = self.with_last(world, fault);
            self.set_fault(&mut state, fault.clone(), Some(&slot));
            return Err(fault.into());
        }
        if lane.lay(&slot, position, call) && state.parked > 0 {
            self.wake.notify_all();
        }
        Ok(slot)
    }

    /// Waits until everyone has come to `slot`, or the call is known to fail.
    pub(super) fn wait(&self, world: &World, slot: &Arc<Slot>, position: usize) -> Result<()> {
        let settled = || slot.is_open() || self.is_given_up(world);
        spin(settled);
        if slot.is_open() {
            return Ok(());
        }
        let deadline = Instant::now() + world.deadline;
        let mut state = self.lock();
        loop {
            if slot.is_open() {
                return Ok(());
            }
            if let Some((fault, at)) = &state.fault {
                return Err(self.own_view(fault, at.as_ref(), slot, position).into());
            }
            let failure = self.peer_failure(world, slot, self.own_call(slot, position).name);
            let absence = self.missing(world, slot, position, Instant::now() >= deadline);
            // Members of a circle may have heard of it, and have ended, before this group does.
            if (failure.is_some() || absence.is_some())
                && let Some(circle) = world.circle_of(self)
            {
                self.set_fault(&mut state, circle, None);
                continue;
            }
            if let Some(fault) = failure {
                return Err(fault.into());
            }
            if let Some(fault) = absence {
                let fault = self.with_last(world, fault);
                let is_late = matches!(fault, CommFault::Missing { ended: false, .. });
                let circle = || world.roster.circle(slot.ranks[position], fault.id());
                if let Some(circle) = is_late.then(circle).flatten() {
                    // The others hear of it while this rank still waits: whoever looks meanwhile finds the same circle.
                    drop(state);
                    world.spread(&circle, self);
                    state = self.lock();
                    self.set_fault(&mut state, circle, None);
                    continue;
                }
                self.set_fault(&mut state, fault.clone(), Some(slot));
                return Err(fault.into());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            state = self.park(state, left);
        }
    }

    /// Waits for `ready`, which another member's work makes true; gives up only if the world fails.
    pub(super) fn wait_for_work(
        &self,
        world: &World,
        slot: &Arc<Slot>,
        position: usize,
        ready: impl Fn() -> bool,
    ) -> Result<()> {
        if spin(&ready) {
            return Ok(());
        }
        let mut state = self.lock();
        while !ready() {
            if let Some(fault) = self.peer_failure(world, slot, self.own_call(slot, position).name) {
                return Err(fault.into());
            }
            state = self.park(state, NAP);
        }
        Ok(())
    }

    /// Wakes all who are parked here, to look around.
    pub(super) fn wake(&self) {
        if self.lock().parked > 0 {
            self.wake.notify_all();
        }
    }

    /// True where nothing that waits here will be completed any more.
    pub(super) fn is_given_up(&self, world: &World) -> bool {
        self.is_faulty.load(Ordering::Acquire) || self.failure(world).is_some()
    }

    /// Gives the group up for a fault that was found in another one.
    pub(super) fn fail(&self, fault: &CommFault) {
        self.set_fault(&mut self.lock(), fault.clone(), None);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn park<'a>(&self, mut state: MutexGuard<'a, State>, at_most: Duration) -> MutexGuard<'a, State> {
        state.parked += 1;
        let (mut state, _) =
            self.wake.wait_timeout(state, at_most.min(NAP)).unwrap_or_else(PoisonError::into_inner);
        state.parked -= 1;
        state
    }

    /// Only the first fault counts.
    fn set_fault(&self, state: &mut State, fault: CommFault, slot: Option<&Arc<Slot>>) {
        state.fault.get_or_insert_with(|| (fault, slot.cloned()));
        self.is_faulty.store(true, Ordering::Release);
        self.wake.notify_all();
    }

    fn id(&self, slot: &Slot, call: &'static str) -> CallId {
        CallId::new(call, slot.seq, &*self.label)
    }

    fn own_call<'a>(&self, slot: &'a Slot, position: usize) -> Call<'a> {
        slot.brought(position).expect("a member waits only after it has come")
    }

    fn mismatch(&self, slot: &Slot, position: usize, call: &Call<'_>) -> Option<CommFault> {
        let (at, other) = slot.disagreement(position, call)?;
        let (low, high) =
            if at < position { ((at, other), (position, *call)) } else { ((position, *call), (at, other)) };
        let (brought, other_brought) = high.1.facts().told_apart(&low.1.facts());
        Some(CommFault::Mismatch {
            id: self.id(slot, call.name),
            rank: slot.ranks[high.0],
            brought,
            other: slot.ranks[low.0],
            other_brought,
            last: vec![],
        })
    }

    fn peer_failure(&self, world: &World, slot: &Slot, call: &'static str) -> Option<CommFault> {
        let (rank, cause) = self.failure(world)?;
        Some(CommFault::PeerFailed { id: self.id(slot, call), rank, cause: cause.clone() })
    }

    /// The failed rank for which the group is given up, and its cause.
    fn failure<'a>(&self, world: &'a World) -> Option<(usize, &'a String)> {
        match self.generation {
            0 => world.first_failure().map(|(rank, cause)| (*rank, cause)),
            _ => world.failure_among(&self.ranks),
        }
    }

    /// The fault, with what the members have completed, and where those wait that are missing.
    fn with_last(&self, world: &World, mut fault: CommFault) -> CommFault {
        if let CommFault::Mismatch { last, .. } | CommFault::Missing { last, .. } = &mut fault {
            *last = world.roster.last(&self.name, &self.ranks);
        }
        if let CommFault::Missing { missing, elsewhere, .. } = &mut fault {
            *elsewhere = world.roster.elsewhere(missing);
        }
        fault
    }

    /// The fault of members that will not come: those that have ended, or when it is `late`, all absent ones.
    fn missing(&self, world: &World, slot: &Slot, position: usize, late: bool) -> Option<CommFault> {
        // A rank comes before it ends: so its end is looked at first.
        let ended: Vec<bool> = slot.ranks.iter().map(|&rank| world.has_ended(rank)).collect();
        let absent = |at: usize| slot.brought(at).is_none();
        let has_ended = (0..ended.len()).any(|at| ended[at] && absent(at));
        if !late && !has_ended {
            return None;
        }
        let missing = (0..ended.len()).filter(|&at| absent(at) && (ended[at] || !has_ended));
        let call = self.own_call(slot, position);
        Some(CommFault::Missing {
            id: self.id(slot, call.name),
            rank: slot.ranks[position],
            brought: call.to_string(),
            missing: missing.map(|at| slot.ranks[at]).collect(),
            ended: has_ended,
            deadline_s: world.deadline.as_secs_f64(),
            elsewhere: vec![],
            last: vec![],
        })
    }

    /// The group's fault, told by a member that waits at `slot`: in its own words if it happened there.
    fn own_view(
        &self,
        fault: &CommFault,
        at: Option<&Arc<Slot>>,
        slot: &Arc<Slot>,
        position: usize,
    ) -> CommFault {
        let mut fault = fault.clone().told_by(slot.ranks[position]);
        if !at.is_some_and(|at| Arc::ptr_eq(at, slot)) {
            return fault;
        }
        let call = self.own_call(slot, position);
        match &mut fault {
            CommFault::Missing { id, rank, brought, .. } => {
                id.call = call.name;
                *rank = slot.ranks[position];
                *brought = call.to_string();
            }
            other => other.id_mut().call = call.name,
        }
        fault
    }
}
