//! Where the members of one call meet.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

use smallvec::smallvec;

use super::reduction::{Folds, Kept};
use super::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use super::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use crate::comm::{Call, Reduce, Route, Tensors};
use crate::error::Result;
use crate::tensor::{DType, ReduceOp, Shape, Tensor};

/// One call of a group: what each member brought.
///
/// Written under the hub's lock until everyone has come; read by everyone once it is open; cleared, and used for a later
/// call, when all have left.
#[derive(Debug)]
pub(super) struct Slot {
    /// The members that meet here, numbered in the world.
    pub(super) ranks: Arc<[usize]>,
    seq: AtomicU64,
    open: AtomicBool,
    /// How many members have come and need nothing more from here.
    left: AtomicUsize,
    contents: RwLock<Contents>,
}

/// What lies in a slot.
#[derive(Debug)]
pub(super) struct Contents {
    cells: Box<[Cell]>,
    come: usize,
    /// What all members expect, but for an all-to-all.
    incoming: Vec<Shape>,
    pub(super) outcome: Outcome,
    kept: Kept,
}

/// What becomes of the parts that members brought.
#[derive(Debug)]
pub(super) enum Outcome {
    /// They are taken, or folded by each for itself.
    Parts,
    /// One fold for all, which the last to come has done.
    Whole(Result<Tensor>),
    /// Large folds, done together by those who wait.
    Folds(Folds),
}

/// A member's call as it lies in a slot.
#[derive(Debug)]
struct Cell {
    here: bool,
    name: &'static str,
    route: Route,
    op: Option<ReduceOp>,
    dtype: DType,
    outgoing: Vec<Tensor>,
    /// Of an all-to-all alone.
    incoming: Vec<Shape>,
    /// How this member folds what comes to it alone.
    reduce: Option<Reduce>,
}

impl Slot {
    fn new(ranks: &Arc<[usize]>) -> Slot {
        let cells = ranks.iter().map(|_| Cell::empty()).collect();
        let kept = Kept::default();
        Slot {
            ranks: ranks.clone(),
            seq: AtomicU64::new(0),
            open: AtomicBool::new(false),
            left: AtomicUsize::new(0),
            contents: RwLock::new(Contents {
                cells,
                come: 0,
                incoming: vec![],
                outcome: Outcome::Parts,
                kept,
            }),
        }
    }

    /// The number of the call that this slot serves now.
    pub(super) fn seq(&self) -> u64 {
        self.seq.load(Ordering::Relaxed)
    }

    /// True once all members have come and what they wait for is there.
    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    pub(super) fn open(&self) {
        self.open.store(true, Ordering::Release);
    }

    pub(super) fn contents(&self) -> RwLockReadGuard<'_, Contents> {
        self.contents.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn contents_mut(&self) -> RwLockWriteGuard<'_, Contents> {
        self.contents.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Folds what needs one fold for all, after everyone has come and before the slot opens. `reduce` is any member's.
    pub(super) fn prepare(&self, reduce: &Reduce) {
        let contents = &mut *self.contents_mut();
        contents.outcome = match contents.cells[0].route {
            Route::AllToAll => Folds::uneven(contents).map_or(Outcome::Parts, Outcome::Folds),
            _ => match Folds::large(reduce, contents) {
                Some(folds) => Outcome::Folds(folds),
                None => {
                    let mut kept = std::mem::take(&mut contents.kept);
                    let whole = kept.fold(reduce, &|at| contents.part(at, 0));
                    contents.kept = kept;
                    Outcome::Whole(whole)
                }
            },
        };
    }

    /// A member needs nothing more from here. True where it is the last one: nobody looks at the slot any more, which is
    /// empty then.
    pub(super) fn leave(&self) -> bool {
        // Everything that members did here comes before what the last one does.
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

impl Contents {
    /// The call of a member, if it has come.
    pub(super) fn brought(&self, position: usize) -> Option<Call<'_>> {
        let cell = &self.cells[position];
        let incoming = if cell.route == Route::AllToAll { &cell.incoming } else { &self.incoming };
        let Cell { name, route, op, dtype, ref outgoing, .. } = *cell;
        cell.here.then_some(Call { name, route, op, dtype, outgoing, incoming })
    }

    /// A member that is here and whose call does not belong together with `call`.
    pub(super) fn disagreement(&self, position: usize, call: &Call<'_>) -> Option<(usize, Call<'_>)> {
        let here = (0..self.cells.len()).filter_map(|at| Some((at, self.brought(at)?)));
        // What is not all-to-all agrees with everyone if with one.
        let compared = if call.route == Route::AllToAll { usize::MAX } else { 1 };
        here.take(compared).find(|(at, other)| !call.agrees(position, other, *at))
    }

    /// What an open slot holds for the member at `position`.
    pub(super) fn take(&self, position: usize) -> Tensors {
        let all = 0..self.cells.len();
        match self.cells[position].route {
            Route::Gather => all.map(|at| self.part(at, 0).clone()).collect(),
            Route::AllToAll => all.map(|at| self.part(at, position).clone()).collect(),
            Route::Broadcast { root } => smallvec![self.part(root, 0).clone()],
            Route::Recv { .. } => smallvec![self.part(0, 0).clone()],
            Route::Send { .. } | Route::Barrier => smallvec![],
        }
    }

    /// One of the tensors that a member brought to an open slot.
    pub(super) fn part(&self, position: usize, part: usize) -> &Tensor {
        let cell = &self.cells[position];
        assert!(cell.here, "the slot is open: everyone has come");
        &cell.outgoing[part]
    }

    pub(super) fn len(&self) -> usize {
        self.cells.len()
    }

    /// The fold of what comes to a member alone.
    pub(super) fn reduce(&self, position: usize) -> Option<&Reduce> {
        self.cells[position].reduce.as_ref()
    }

    fn lay(&mut self, position: usize, call: &Call<'_>, reduce: Option<&Reduce>) {
        let cell = &mut self.cells[position];
        assert!(!cell.here, "a member comes to a slot once");
        cell.here = true;
        (cell.name, cell.route, cell.op, cell.dtype) = (call.name, call.route, call.op, call.dtype);
        cell.outgoing.extend_from_slice(call.outgoing);
        // Calls that agree expect the same, but for an all-to-all.
        if call.route == Route::AllToAll {
            cell.incoming.extend_from_slice(call.incoming);
        } else if self.come == 0 {
            self.incoming.extend_from_slice(call.incoming);
        }
        self.come += 1;
        cell.reduce = reduce.filter(|_| call.route == Route::AllToAll).cloned();
    }

    /// Forgets everything but the room it took.
    fn clear(&mut self) {
        for cell in &mut self.cells {
            cell.here = false;
            cell.outgoing.clear();
            cell.incoming.clear();
            cell.reduce = None;
        }
        self.incoming.clear();
        self.come = 0;
        self.outcome = Outcome::Parts;
    }
}

impl Cell {
    fn empty() -> Cell {
        Cell {
            here: false,
            name: "",
            route: Route::Barrier,
            op: None,
            dtype: DType::U8,
            outgoing: vec![],
            incoming: vec![],
            reduce: None,
        }
    }
}

/// A sequence of slots with the same members: a group's collectives, or the messages from one member to another.
#[derive(Debug)]
pub(super) struct Lane {
    ranks: Arc<[usize]>,
    /// The next sequence number of each member.
    next: Vec<u64>,
    /// The slots that somebody has not come to yet, by ascending sequence number, and the first one's number.
    waiting: VecDeque<Arc<Slot>>,
    first: u64,
    /// Slots that all have left.
    spare: Vec<Arc<Slot>>,
}

impl Lane {
    pub(super) fn new(ranks: Arc<[usize]>) -> Lane {
        // A member that waits for each call is at most one call ahead of the others.
        let spare = (0..2).map(|_| Arc::new(Slot::new(&ranks))).collect();
        Lane { next: vec![0; ranks.len()], waiting: VecDeque::with_capacity(8), first: 0, spare, ranks }
    }

    /// The slot of this member's next call.
    pub(super) fn advance(&mut self, position: usize) -> Arc<Slot> {
        let seq = self.next[position];
        self.next[position] += 1;
        let at = (seq - self.first) as usize;
        if at == self.waiting.len() {
            let slot = self.spare.pop().unwrap_or_else(|| Arc::new(Slot::new(&self.ranks)));
            slot.begin(seq);
            self.waiting.push_back(slot);
        }
        self.waiting[at].clone()
    }

    /// Lays down `call`; true if everyone has come now.
    ///
    /// Each member comes to its slots in order, so slots are complete in order: this one is then the first that waited.
    pub(super) fn lay(
        &mut self,
        slot: &Slot,
        position: usize,
        call: &Call<'_>,
        reduce: Option<&Reduce>,
    ) -> bool {
        let mut contents = slot.contents_mut();
        contents.lay(position, call, reduce);
        let complete = contents.come == contents.cells.len();
        if complete {
            self.waiting.pop_front();
            self.first += 1;
        }
        complete
    }

    /// Takes back a slot that the last member has left.
    pub(super) fn recycle(&mut self, slot: Arc<Slot>) {
        self.spare.push(slot);
    }
}
