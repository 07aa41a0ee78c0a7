//! What the members of one group share: lanes of slots, the first fault, and a place to park.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::slot::{Contents, Lane, Slot};
use super::spin::spin;
use super::sync::atomic::{AtomicBool, Ordering};
use super::sync::{Condvar, Mutex, MutexGuard};
use super::world::World;
use crate::comm::calls::label;
use crate::comm::{Call, Reduce};
use crate::error::{CallId, CommFault, Result};

/// How often a parked rank looks around unasked; only a guard, since everything that matters wakes it.
const NAP: Duration = Duration::from_millis(500);

/// The shortest time to park.
const GLANCE: Duration = Duration::from_millis(1);

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

/// Where a member is in a call that it has come to.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) by: By,
    pub(super) slot: Arc<Slot>,
    /// The member's index among those who meet in the slot.
    pub(super) position: usize,
    /// The call's name.
    pub(super) name: &'static str,
}

impl Hub {
    pub(super) fn new(generation: u64, ranks: &[usize], name: &str) -> Hub {
        let ranks: Arc<[usize]> = ranks.into();
        let collectives = Lane::new(ranks.clone());
        let state = State { collectives, messages: HashMap::new(), fault: None, parked: 0 };
        Hub {
            name: name.into(),
            generation,
            label: label(name, &ranks),
            ranks,
            state: Mutex::new(state),
            wake: Condvar::new(),
            is_faulty: AtomicBool::new(false),
        }
    }

    /// Lays this member's next call down where the others will find it. A reduction says how it folds.
    pub(super) fn publish(
        &self,
        world: &World,
        (by, position): (By, usize),
        call: &Call<'_>,
        reduce: Option<&Reduce>,
    ) -> Result<Place> {
        let mut guard = self.lock();
        let state = &mut *guard;
        if let Some((fault, _)) = &state.fault {
            return Err(fault.clone().into());
        }
        let slot = state.lane(by, &self.ranks).advance(position);
        if let Some(fault) = self.peer_failure(world, &slot, call.name) {
            return Err(fault.into());
        }
        if let Some(fault) = self.mismatch(&slot, position, call) {
            let fault = self.with_last(world, fault);
            self.set_fault(state, fault.clone(), Some(&slot));
            return Err(fault.into());
        }
        if state.lane(by, &self.ranks).lay(&slot, position, call, reduce) {
            if let Some(reduce) = reduce {
                // The others' calls need not wait for this one's fold.
                drop(guard);
                slot.prepare(reduce);
                guard = self.lock();
            }
            slot.open();
            self.wake_parked(&guard);
        }
        Ok(Place { by, slot, position, name: call.name })
    }

    /// The member needs nothing more from the call, whose slot is used again when all have left it.
    pub(super) fn leave(&self, place: &Place) {
        if place.slot.leave() {
            self.lock().lane(place.by, &self.ranks).recycle(place.slot.clone());
        }
    }

    /// Waits until everyone has come, or the call is known to fail.
    pub(super) fn wait(&self, world: &World, place: &Place) -> Result<()> {
        let slot = &place.slot;
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
                return Err(self.own_view(fault, at.as_ref(), place).into());
            }
            let failure = self.peer_failure(world, slot, place.name);
            let absence = self.missing(world, place, Instant::now() >= deadline);
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
                let circle = || world.roster.cycle(slot.ranks[place.position], fault.id());
                // Where it is found by two at once, one of them may have gone on before the other looks.
                let circle = is_late.then(circle).flatten().or_else(|| world.circle_of(self));
                if let Some(circle) = circle {
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
            // Past the deadline, the last to come is still folding.
            let left = deadline.saturating_duration_since(Instant::now());
            state = self.park(state, left.max(GLANCE));
        }
    }

    /// Waits for `ready`, which another member's work makes true; gives up only if the world fails.
    pub(super) fn wait_for_work(&self, world: &World, place: &Place, ready: impl Fn() -> bool) -> Result<()> {
        if spin(&ready) {
            return Ok(());
        }
        let mut state = self.lock();
        while !ready() {
            if let Some(fault) = self.peer_failure(world, &place.slot, place.name) {
                return Err(fault.into());
            }
            state = self.park(state, NAP);
        }
        Ok(())
    }

    /// Wakes all who are parked here, to look around.
    pub(super) fn wake(&self) {
        self.wake_parked(&self.lock());
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

    fn wake_parked(&self, state: &State) {
        if state.parked > 0 {
            self.wake.notify_all();
        }
    }

    /// Only the first fault counts.
    fn set_fault(&self, state: &mut State, fault: CommFault, slot: Option<&Arc<Slot>>) {
        state.fault.get_or_insert_with(|| (fault, slot.cloned()));
        self.is_faulty.store(true, Ordering::Release);
        self.wake.notify_all();
    }

    fn id(&self, slot: &Slot, call: &'static str) -> CallId {
        CallId::new(call, slot.seq(), &*self.label)
    }

    fn mismatch(&self, slot: &Slot, position: usize, call: &Call<'_>) -> Option<CommFault> {
        let contents = slot.contents();
        let (at, other) = contents.disagreement(position, call)?;
        let (low, high) =
            if at < position { ((at, other), (position, *call)) } else { ((position, *call), (at, other)) };
        let (brought, other_brought) = high.1.signature().told_apart(&low.1.signature());
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
    fn missing(&self, world: &World, place: &Place, late: bool) -> Option<CommFault> {
        let (slot, contents) = (&place.slot, place.slot.contents());
        // A rank comes before it ends: so its end is looked at first.
        let ended = |at: usize| world.has_ended(slot.ranks[at]);
        let absent = |at: usize| contents.brought(at).is_none();
        let all = 0..slot.ranks.len();
        let has_ended = all.clone().any(|at| ended(at) && absent(at));
        if !(has_ended || late && all.clone().any(absent)) {
            return None;
        }
        let missing = all.filter(|&at| (ended(at) || !has_ended) && absent(at));
        Some(CommFault::Missing {
            id: self.id(slot, place.name),
            rank: slot.ranks[place.position],
            brought: brought(&contents, place.position),
            missing: missing.map(|at| slot.ranks[at]).collect(),
            ended: has_ended,
            deadline_s: world.deadline.as_secs_f64(),
            elsewhere: vec![],
            last: vec![],
        })
    }

    /// The group's fault, told by a member that waits somewhere: in its own words if it happened there.
    fn own_view(&self, fault: &CommFault, at: Option<&Arc<Slot>>, place: &Place) -> CommFault {
        let mut fault = fault.clone().told_by(place.slot.ranks[place.position]);
        if !at.is_some_and(|at| Arc::ptr_eq(at, &place.slot)) {
            return fault;
        }
        let own = brought(&place.slot.contents(), place.position);
        match &mut fault {
            CommFault::Missing { id, rank, brought, .. } => {
                id.call = place.name.into();
                *rank = place.slot.ranks[place.position];
                *brought = own;
            }
            other => other.id_mut().call = place.name.into(),
        }
        fault
    }
}

impl State {
    fn lane(&mut self, by: By, ranks: &[usize]) -> &mut Lane {
        match by {
            By::Collective => &mut self.collectives,
            By::Message { from, to } => {
                self.messages.entry((from, to)).or_insert_with(|| Lane::new([ranks[from], ranks[to]].into()))
            }
        }
    }
}

fn brought(contents: &Contents, position: usize) -> String {
    contents.brought(position).expect("a member waits only after it has come").to_string()
}
