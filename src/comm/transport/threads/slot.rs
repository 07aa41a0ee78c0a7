//! Slots, which hold the tensors of one call each, and queues of slots.

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::smallvec;

use super::shared_folds::{ReusedResult, SharedFolds};
use super::shared_places::SharedPlaces;
use super::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use super::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use crate::base::unpoisoned;
use crate::comm::calls::{Call, Lineage, Route};
use crate::comm::transport::{CallResults, Reduce};
use crate::error::Result;
use crate::tensor::{DType, ReduceOp, Shape, Tensor};

/// One call of a group, with each member's tensors.
///
/// Members write it under the group's lock until all have arrived, read it once it is open, and the last one to leave
/// clears it for a later call.
#[derive(Debug)]
pub(super) struct CallSlot {
    /// The call's members, numbered in the world.
    pub(super) ranks: Arc<[usize]>,
    seq: AtomicU64,
    open: AtomicBool,
    /// The number of members that have taken their results.
    left: AtomicUsize,
    contents: RwLock<SlotContents>,
}

#[derive(Debug)]
pub(super) struct SlotContents {
    entries: Box<[SlotEntry]>,
    /// The number of members that have arrived.
    come: usize,
    /// The shapes that all members expect, except in an all-to-all.
    incoming: Vec<Shape>,
    pub(super) outcome: SlotOutcome,
    reused: ReusedResult,
}

/// The way in which members get their results from an open slot.
#[derive(Debug)]
pub(super) enum SlotOutcome {
    /// Each member takes the tensors that are for it, or folds them itself.
    Parts,
    /// One result for all members, folded by the last one to arrive.
    Whole(Tensor),
    /// Large folds, computed together by the members that wait.
    Shared(SharedFolds),
    /// The parts of a large gather, copied together by the members that wait. A member that has no place for them takes
    /// the members' tensors, as with `Parts`.
    Placed(SharedPlaces),
}

/// One member's call in a slot.
#[derive(Debug)]
struct SlotEntry {
    here: bool,
    name: &'static str,
    route: Route,
    op: Option<ReduceOp>,
    dtype: DType,
    outgoing: Vec<Tensor>,
    /// The shapes that this member expects; used in an all-to-all only.
    incoming: Vec<Shape>,
    /// The fold of the parts that only this member gets.
    reduce: Option<Reduce>,
    lineage: Lineage,
}

impl CallSlot {
    fn new(ranks: &Arc<[usize]>) -> CallSlot {
        CallSlot {
            ranks: ranks.clone(),
            seq: AtomicU64::new(0),
            open: AtomicBool::new(false),
            left: AtomicUsize::new(0),
            contents: RwLock::new(SlotContents {
                entries: ranks.iter().map(|_| SlotEntry::empty()).collect(),
                come: 0,
                incoming: vec![],
                outcome: SlotOutcome::Parts,
                reused: ReusedResult::default(),
            }),
        }
    }

    /// Returns the number of the call that this slot serves now.
    pub(super) fn seq(&self) -> u64 {
        self.seq.load(Ordering::Relaxed)
    }

    /// Returns true once all members have arrived and the results are there, except for what members make together.
    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    pub(super) fn open(&self) {
        self.open.store(true, Ordering::Release);
    }

    pub(super) fn contents(&self) -> RwLockReadGuard<'_, SlotContents> {
        unpoisoned(self.contents.read())
    }

    fn contents_mut(&self) -> RwLockWriteGuard<'_, SlotContents> {
        unpoisoned(self.contents.write())
    }

    /// Computes the result that all members share, or prepares its shared fold, after all have arrived and before the
    /// slot opens. `reduce` is any member's fold.
    ///
    /// # Errors
    /// Returns an error if this rank has no room for the result.
    pub(super) fn prepare(&self, reduce: &Reduce) -> Result<()> {
        let contents = &mut *self.contents_mut();
        contents.outcome = match contents.entries[0].route {
            Route::AllToAll => {
                let of = |at: usize| contents.entries[at].reduce.as_ref().expect("every member folds");
                let folds = SharedFolds::uneven(contents.entries.len(), of, contents.part(0, 0))?;
                folds.map_or(SlotOutcome::Parts, SlotOutcome::Shared)
            }
            _ => match SharedFolds::large(reduce, contents.part(0, 0))? {
                Some(folds) => SlotOutcome::Shared(folds),
                None => {
                    let mut reused = std::mem::take(&mut contents.reused);
                    let whole = reused.fold(reduce, &|at| contents.part(at, 0));
                    contents.reused = reused;
                    SlotOutcome::Whole(whole?)
                }
            },
        };
        Ok(())
    }

    /// Counts a member that has taken its results. Returns true if it is the last one; then no member uses the slot
    /// any more, and it is empty.
    pub(super) fn leave(&self) -> bool {
        // All that members did with the slot happens before the last one clears it.
        if self.left.fetch_add(1, Ordering::AcqRel) + 1 < self.ranks.len() {
            return false;
        }
        self.contents_mut().clear();
        true
    }

    fn begin(&self, seq: u64) {
        self.seq.store(seq, Ordering::Relaxed);
        self.left.store(0, Ordering::Relaxed);
        self.open.store(false, Ordering::Relaxed);
    }
}

impl SlotContents {
    /// Returns the call of a member that has arrived.
    pub(super) fn brought(&self, position: usize) -> Option<Call<'_>> {
        let entry = &self.entries[position];
        let incoming = if entry.route == Route::AllToAll { &entry.incoming } else { &self.incoming };
        let SlotEntry { name, route, op, dtype, ref outgoing, lineage, .. } = *entry;
        entry.here.then_some(Call { name, route, op, dtype, outgoing, incoming, lineage })
    }

    /// Returns an arrived member whose call does not agree with `call`, and its call.
    pub(super) fn disagreement(&self, position: usize, call: &Call<'_>) -> Option<(usize, Call<'_>)> {
        let here = (0..self.entries.len()).filter_map(|at| Some((at, self.brought(at)?)));
        // Agreement is transitive except for all-to-alls, so one comparison suffices.
        let compared = if call.route == Route::AllToAll { usize::MAX } else { 1 };
        here.take(compared).find(|(at, other)| !call.agrees(position, other, *at))
    }

    /// Returns the tensors that an open slot holds for the member at `position`.
    pub(super) fn take(&self, position: usize) -> CallResults {
        let all = 0..self.entries.len();
        match self.entries[position].route {
            Route::Gather => all.map(|at| self.part(at, 0).clone()).collect(),
            Route::AllToAll => all.map(|at| self.part(at, position).clone()).collect(),
            Route::Broadcast { root } => smallvec![self.part(root, 0).clone()],
            Route::Recv { .. } => smallvec![self.part(0, 0).clone()],
            Route::Send { .. } | Route::Barrier => smallvec![],
        }
    }

    /// Returns one of the tensors that a member put into an open slot.
    pub(super) fn part(&self, position: usize, part: usize) -> &Tensor {
        let entry = &self.entries[position];
        assert!(entry.here, "the slot is open: everyone has come");
        &entry.outgoing[part]
    }

    fn put(
        &mut self,
        position: usize,
        call: &Call<'_>,
        reduce: Option<&Reduce>,
        places: Option<Vec<Tensor>>,
    ) {
        let entry = &mut self.entries[position];
        assert!(!entry.here, "a member comes to a slot once");
        entry.here = true;
        (entry.name, entry.route, entry.op, entry.dtype) = (call.name, call.route, call.op, call.dtype);
        entry.lineage = call.lineage;
        entry.outgoing.extend_from_slice(call.outgoing);
        // Calls that agree expect the same shapes, except all-to-alls.
        if call.route == Route::AllToAll {
            entry.incoming.extend_from_slice(call.incoming);
        } else if self.come == 0 {
            self.incoming.extend_from_slice(call.incoming);
        }
        self.come += 1;
        entry.reduce = reduce.filter(|_| call.route == Route::AllToAll).cloned();
        if let Some(places) = places {
            self.outcome = SlotOutcome::Placed(SharedPlaces::new(places));
        }
    }

    /// Drops the contents but keeps the lists' memory.
    fn clear(&mut self) {
        for entry in &mut self.entries {
            entry.here = false;
            entry.outgoing.clear();
            entry.incoming.clear();
            entry.reduce = None;
        }
        self.incoming.clear();
        self.come = 0;
        self.outcome = SlotOutcome::Parts;
    }
}

impl SlotEntry {
    fn empty() -> SlotEntry {
        SlotEntry {
            here: false,
            name: "",
            route: Route::Barrier,
            op: None,
            dtype: DType::U8,
            outgoing: vec![],
            incoming: vec![],
            reduce: None,
            lineage: Lineage::NONE,
        }
    }
}

/// The slots of one sequence of calls: a group's collectives, or the messages from one member to another.
#[derive(Debug)]
pub(super) struct SlotQueue {
    ranks: Arc<[usize]>,
    /// The next sequence number of each member.
    next: Vec<u64>,
    /// The slots that some member has not reached yet, by ascending sequence number, and the first one's number.
    waiting: VecDeque<Arc<CallSlot>>,
    first: u64,
    /// Slots that all members have left.
    spare: Vec<Arc<CallSlot>>,
}

impl SlotQueue {
    pub(super) fn new(ranks: Arc<[usize]>) -> SlotQueue {
        // A member that waits for each call is at most one call ahead of the others.
        let spare = (0..2).map(|_| Arc::new(CallSlot::new(&ranks))).collect();
        SlotQueue { next: vec![0; ranks.len()], waiting: VecDeque::with_capacity(8), first: 0, spare, ranks }
    }

    /// Returns the slot of this member's next call.
    pub(super) fn advance(&mut self, position: usize) -> Arc<CallSlot> {
        let seq = self.next[position];
        self.next[position] += 1;
        let at = (seq - self.first) as usize;
        if at == self.waiting.len() {
            let slot = self.spare.pop().unwrap_or_else(|| Arc::new(CallSlot::new(&self.ranks)));
            slot.begin(seq);
            self.waiting.push_back(slot);
        }
        self.waiting[at].clone()
    }

    /// Puts `call` into the slot. Returns true if all members have arrived now. `places` are those of a gather, from one
    /// member.
    ///
    /// Members reach their slots in order, so slots are completed in order: a completed slot is the first of `waiting`.
    pub(super) fn put(
        &mut self,
        slot: &CallSlot,
        position: usize,
        call: &Call<'_>,
        reduce: Option<&Reduce>,
        places: Option<Vec<Tensor>>,
    ) -> bool {
        let mut contents = slot.contents_mut();
        contents.put(position, call, reduce, places);
        let complete = contents.come == contents.entries.len();
        if complete {
            self.waiting.pop_front();
            self.first += 1;
        }
        complete
    }

    /// Returns the first call of a queue of messages that has a sender and no receiver.
    pub(super) fn unreceived(&self) -> Option<&Arc<CallSlot>> {
        self.waiting.iter().find(|slot| {
            let contents = slot.contents();
            contents.entries[0].here && !contents.entries[1].here
        })
    }

    /// Takes back a slot that the last member has left.
    pub(super) fn recycle(&mut self, slot: Arc<CallSlot>) {
        self.spare.push(slot);
    }
}
