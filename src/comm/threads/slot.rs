//! Where the members of one call meet.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::reduction::Reduction;
use crate::comm::{Call, Route};
use crate::error::Result;
use crate::tensor::Tensor;

/// One call of a group: what each member brought. Lives as long as somebody has still to take from it.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) seq: u64,
    /// The members that meet here, numbered in the world.
    pub(super) ranks: Arc<[usize]>,
    cells: Box<[OnceLock<Call>]>,
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
    pub(super) fn brought(&self, position: usize) -> Option<&Call> {
        self.cells[position].get()
    }

    /// A member that is here and whose call does not belong together with `call`.
    pub(super) fn disagreement(&self, position: usize, call: &Call) -> Option<(usize, &Call)> {
        let here = self.cells.iter().enumerate().filter_map(|(at, cell)| Some((at, cell.get()?)));
        // What is not all-to-all agrees with everyone if with one.
        let compared = if call.route == Route::AllToAll { usize::MAX } else { 1 };
        here.take(compared).find(|&(at, other)| !call.agrees(position, other, at))
    }

    /// What an open slot holds for the member at `position`.
    pub(super) fn take(&self, position: usize) -> Vec<Tensor> {
        let outgoing = |at: usize, part: usize| self.call(at).outgoing[part].clone();
        match self.call(position).route {
            Route::Gather => (0..self.cells.len()).map(|at| outgoing(at, 0)).collect(),
            Route::AllToAll => (0..self.cells.len()).map(|at| outgoing(at, position)).collect(),
            Route::Broadcast { root } => vec![outgoing(root, 0)],
            Route::Recv { .. } => vec![outgoing(0, 0)],
            Route::Send { .. } | Route::Barrier => vec![],
        }
    }

    /// Everybody's first tensor, in group order.
    pub(super) fn contributions(&self) -> impl Iterator<Item = &Tensor> {
        (0..self.cells.len()).map(|at| &self.call(at).outgoing[0])
    }

    fn call(&self, position: usize) -> &Call {
        self.cells[position].get().expect("the slot is open: everyone has come")
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
    pub(super) fn lay(&mut self, slot: &Slot, position: usize, call: Call) -> bool {
        slot.cells[position].set(call).expect("a member comes to a slot once");
        let complete = slot.cells.iter().all(|cell| cell.get().is_some());
        if complete {
            self.waiting.pop_front();
            slot.open.store(true, Ordering::Release);
        }
        complete
    }
}
