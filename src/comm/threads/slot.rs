//! Where the members of one call meet.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use smallvec::smallvec;

use super::reduction::Reduction;
use crate::comm::{Call, Route, Tensors};
use crate::error::Result;
use crate::tensor::{DType, ReduceOp, Shape, Tensor};

/// One call of a group: what each member brought. Lives as long as somebody has still to take from it.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) seq: u64,
    /// The members that meet here, numbered in the world.
    pub(super) ranks: Arc<[usize]>,
    cells: Box<[OnceLock<Kept>]>,
    open: AtomicBool,
    pub(super) reduction: OnceLock<Reduction>,
    /// On a device: the result, by whichever member came to wait first.
    pub(super) folded: OnceLock<Result<Tensor>>,
}

impl Slot {
    fn new(seq: u64, ranks: &Arc<[usize]>) -> Slot {
        Slot {
            seq,
            ranks: ranks.clone(),
            cells: ranks.iter().map(|_| OnceLock::new()).collect(),
            open: AtomicBool::new(false),
            reduction: OnceLock::new(),
            folded: OnceLock::new(),
        }
    }

    /// True once all members have come.
    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    /// What a member brought, if it has come.
    pub(super) fn brought(&self, position: usize) -> Option<Call<'_>> {
        self.cells[position].get().map(Kept::call)
    }

    /// A member that is here and whose call does not belong together with `call`.
    pub(super) fn disagreement(&self, position: usize, call: &Call<'_>) -> Option<(usize, Call<'_>)> {
        let here = self.cells.iter().enumerate().filter_map(|(at, cell)| Some((at, cell.get()?.call())));
        // What is not all-to-all agrees with everyone if with one.
        let compared = if call.route == Route::AllToAll { usize::MAX } else { 1 };
        here.take(compared).find(|(at, other)| !call.agrees(position, other, *at))
    }

    /// What an open slot holds for the member at `position`.
    pub(super) fn take(&self, position: usize) -> Tensors {
        let outgoing = |at: usize, part: usize| self.call(at).outgoing[part].clone();
        match self.call(position).call().route {
            Route::Gather => (0..self.cells.len()).map(|at| outgoing(at, 0)).collect(),
            Route::AllToAll => (0..self.cells.len()).map(|at| outgoing(at, position)).collect(),
            Route::Broadcast { root } => smallvec![outgoing(root, 0)],
            Route::Recv { .. } => smallvec![outgoing(0, 0)],
            Route::Send { .. } | Route::Barrier => smallvec![],
        }
    }

    /// Everybody's first tensor, in group order.
    pub(super) fn contributions(&self) -> impl Iterator<Item = &Tensor> {
        (0..self.cells.len()).map(|at| &self.call(at).outgoing[0])
    }

    fn call(&self, position: usize) -> &Kept {
        self.cells[position].get().expect("the slot is open: everyone has come")
    }
}

/// A call as it lies in a slot.
#[derive(Debug)]
struct Kept {
    name: &'static str,
    route: Route,
    op: Option<ReduceOp>,
    dtype: DType,
    outgoing: Vec<Tensor>,
    incoming: Vec<Shape>,
}

impl Kept {
    fn of(call: &Call<'_>) -> Kept {
        let Call { name, route, op, dtype, outgoing, incoming } = *call;
        Kept { name, route, op, dtype, outgoing: outgoing.to_vec(), incoming: incoming.to_vec() }
    }

    fn call(&self) -> Call<'_> {
        let Kept { name, route, op, dtype, ref outgoing, ref incoming } = *self;
        Call { name, route, op, dtype, outgoing, incoming }
    }
}

/// A sequence of slots with the same members: a group's collectives, or the messages from one member to another.
#[derive(Debug)]
pub(super) struct Lane {
    ranks: Arc<[usize]>,
    /// The next sequence number of each member.
    next: Vec<u64>,
    /// The slots that somebody has not come to yet, by ascending sequence number.
    waiting: VecDeque<Arc<Slot>>,
}

impl Lane {
    pub(super) fn new(ranks: Arc<[usize]>) -> Lane {
        Lane { next: vec![0; ranks.len()], ranks, waiting: VecDeque::new() }
    }

    /// The slot of this member's next call.
    pub(super) fn advance(&mut self, position: usize) -> Arc<Slot> {
        let seq = self.next[position];
        self.next[position] += 1;
        let first = self.waiting.front().map_or(seq, |slot| slot.seq);
        let at = (seq - first) as usize;
        if at == self.waiting.len() {
            self.waiting.push_back(Arc::new(Slot::new(seq, &self.ranks)));
        }
        self.waiting[at].clone()
    }

    /// Lays down `call`; true if everyone has come now.
    ///
    /// Each member comes to its slots in order, so slots open in order: this one is then the first that waited.
    pub(super) fn lay(&mut self, slot: &Slot, position: usize, call: &Call<'_>) -> bool {
        slot.cells[position].set(Kept::of(call)).expect("a member comes to a slot once");
        let complete = slot.cells.iter().all(|cell| cell.get().is_some());
        if complete {
            self.waiting.pop_front();
            slot.open.store(true, Ordering::Release);
        }
        complete
    }
}
