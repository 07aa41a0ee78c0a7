//! A fake NCCL: ranks of this process move bytes between their devices' memory, on their streams, once both ends have
//! called. A send waits for its receiver, as NCCL's may.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use isoshard::comm::nccl::{Communicator, Nccl, NcclError, NcclResult, Progress};
use isoshard::tensor::cuda::{Address, Handle};

use crate::driver::{lock, put};

/// One library, made per test.
#[derive(Debug, Default)]
pub struct Fake {
    state: Mutex<State>,
    last: AtomicU64,
    /// While it is set, no communicator becomes ready.
    pub stuck: AtomicBool,
    /// The calls by name, and the communicators by how they ended.
    pub calls: Mutex<HashMap<&'static str, usize>>,
}

#[derive(Debug, Default)]
struct State {
    cliques: HashMap<Vec<u8>, Arc<Clique>>,
    comms: HashMap<Communicator, Place>,
    /// The error that a member of the world's communicator finds.
    errors: HashMap<usize, String>,
}

#[derive(Clone, Debug)]
enum Place {
    There(End),
    /// A communicator that is being split off: its parent, the number of the split, and this member's colour.
    Split(Arc<Clique>, usize, usize, u32),
}

/// One member's end of a communicator.
#[derive(Clone, Debug)]
struct End {
    clique: Arc<Clique>,
    rank: usize,
}

/// The members of a communicator.
#[derive(Debug)]
struct Clique {
    name: Vec<u8>,
    /// True for the first communicator, that of all ranks.
    is_world: bool,
    len: usize,
    mail: Mutex<Mail>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct Mail {
    joined: usize,
    ended: usize,
    aborted: Vec<usize>,
    parcels: HashMap<(usize, usize), VecDeque<Parcel>>,
    /// Colours and keys of the members, by the number of the split.
    splits: HashMap<usize, Vec<Option<(u32, usize)>>>,
    splits_len: Vec<usize>,
}

#[derive(Clone, Debug)]
struct Parcel {
    kind: &'static str,
    at: Address,
    bytes: usize,
    number: u64,
}

/// One step of a group.
#[derive(Clone, Debug)]
enum Step {
    Send { kind: &'static str, from: Address, bytes: usize, to: usize },
    Recv { kind: &'static str, at: Address, bytes: usize, from: usize },
    Own { from: Address, at: Address, bytes: usize },
}

thread_local!(static GROUP: RefCell<Option<Vec<(Communicator, Handle, Step)>>> = const { RefCell::new(None) });

impl Fake {
    /// Makes a rank's world communicator find an error.
    pub fn break_rank(&self, rank: usize, code: &str) {
        lock(&self.state).errors.insert(rank, code.into());
    }

    pub fn count(&self, call: &str) -> usize {
        lock(&self.calls).get(call).copied().unwrap_or(0)
    }

    fn note(&self, call: &'static str) {
        *lock(&self.calls).entry(call).or_default() += 1;
    }

    fn keep(&self, place: Place) -> Communicator {
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        lock(&self.state).comms.insert(number, place);
        number
    }

    fn end(&self, comm: Communicator) -> End {
        match lock(&self.state).comms.get(&comm) {
            Some(Place::There(end)) => end.clone(),
            other => panic!("used before it is there or after its end: {other:?}"),
        }
    }

    /// Completes a communicator that is being split off once all members have given their colour.
    fn make(&self, comm: Communicator) -> bool {
        let mut state = lock(&self.state);
        let Some(Place::Split(parent, number, rank, color)) = state.comms.get(&comm).cloned() else {
            return true;
        };
        let mail = lock(&parent.mail);
        let Some(colors) = mail.splits[&number].iter().copied().collect::<Option<Vec<_>>>() else {
            return false;
        };
        let mut members: Vec<(usize, usize)> =
            colors.iter().enumerate().filter(|(_, c)| c.0 == color).map(|(r, c)| (c.1, r)).collect();
        members.sort_unstable();
        let place = members.iter().position(|&(_, r)| r == rank).unwrap();
        let name = [&parent.name[..], &(number as u64).to_le_bytes(), &color.to_le_bytes()].concat();
        let clique = Clique::new(members.len(), &name, false);
        let clique = state.cliques.entry(name).or_insert(clique).clone();
        lock(&clique.mail).joined += 1;
        state.comms.insert(comm, Place::There(End { clique, rank: place }));
        true
    }

    fn step(&self, comm: Communicator, stream: Handle, step: Step) -> NcclResult<()> {
        GROUP.with_borrow_mut(|group| group.as_mut().expect("the engine groups").push((comm, stream, step)));
        Ok(())
    }
}

fn refusal(call: &'static str, code: &str) -> NcclError {
    NcclError { call, code: code.into(), words: String::new() }
}

// SAFETY: bytes are copied between the ranges that both ends passed, under a lock, while neither has given up.
unsafe impl Nccl for Fake {
    fn name(&self) -> String {
        "fake 1.0".into()
    }

    fn unique_id(&self) -> NcclResult<Vec<u8>> {
        self.note("unique_id");
        Ok(self.last.fetch_add(1, Ordering::Relaxed).to_le_bytes().to_vec())
    }

    fn join(&self, id: &[u8], len: usize, rank: usize) -> NcclResult<Communicator> {
        self.note("join");
        let mut state = lock(&self.state);
        let is_world = state.cliques.is_empty() || state.cliques.get(id).is_some_and(|c| c.is_world);
        let clique =
            state.cliques.entry(id.to_vec()).or_insert_with(|| Clique::new(len, id, is_world)).clone();
        drop(state);
        if len != clique.len {
            return Err(refusal("join", "invalid argument"));
        }
        lock(&clique.mail).joined += 1;
        Ok(self.keep(Place::There(End { clique, rank })))
    }

    fn split(&self, parent: Communicator, color: u32, key: usize) -> NcclResult<Communicator> {
        self.note("split");
        let End { clique, rank } = self.end(parent);
        let mut mail = lock(&clique.mail);
        let number = mail.splits_len[rank];
        mail.splits_len[rank] += 1;
        let all = mail.splits.entry(number).or_insert_with(|| vec![None; clique.len]);
        all[rank] = Some((color, key));
        drop(mail);
        Ok(self.keep(Place::Split(clique, number, rank, color)))
    }

    fn progress(&self, comm: Communicator) -> NcclResult<Progress> {
        if !self.make(comm) {
            return Ok(Progress::Underway);
        }
        let End { clique, rank } = self.end(comm);
        if let Some(code) = lock(&self.state).errors.get(&rank).filter(|_| clique.is_world) {
            return Err(refusal("progress", code));
        }
        if self.stuck.load(Ordering::Relaxed) || lock(&clique.mail).joined < clique.len {
            return Ok(Progress::Underway);
        }
        let ended = lock(&clique.mail).ended;
        Ok(if ended > 0 && ended < clique.len { Progress::Underway } else { Progress::Ready })
    }

    fn group_start(&self) -> NcclResult<()> {
        GROUP.set(Some(vec![]));
        Ok(())
    }

    fn group_end(&self) -> NcclResult<()> {
        let steps = GROUP.take().expect("a group was begun");
        let Some(&(comm, stream, _)) = steps.first() else { return Ok(()) };
        assert!(steps.iter().all(|s| (s.0, s.1) == (comm, stream)), "one communicator and stream a group");
        let end = self.end(comm);
        let steps: Vec<Step> = steps.into_iter().map(|(_, _, step)| step).collect();
        put(stream, move || end.run(&steps));
        Ok(())
    }

    unsafe fn send(
        &self,
        from: Address,
        bytes: usize,
        to: usize,
        comm: Communicator,
        stream: Handle,
    ) -> NcclResult<()> {
        self.note("send");
        self.step(comm, stream, Step::Send { kind: "message", from, bytes, to })
    }

    unsafe fn recv(
        &self,
        at: Address,
        bytes: usize,
        from: usize,
        comm: Communicator,
        stream: Handle,
    ) -> NcclResult<()> {
        self.note("recv");
        self.step(comm, stream, Step::Recv { kind: "message", at, bytes, from })
    }

    unsafe fn all_gather(
        &self,
        from: Address,
        at: Address,
        bytes: usize,
        comm: Communicator,
        stream: Handle,
    ) -> NcclResult<()> {
        self.note("all_gather");
        let End { clique, rank } = self.end(comm);
        let kind = "gather";
        for peer in 0..clique.len {
            let here = at + (peer * bytes) as u64;
            if peer == rank {
                self.step(comm, stream, Step::Own { from, at: here, bytes })?;
            } else {
                self.step(comm, stream, Step::Send { kind, from, bytes, to: peer })?;
                self.step(comm, stream, Step::Recv { kind, at: here, bytes, from: peer })?;
            }
        }
        Ok(())
    }

    unsafe fn broadcast(
        &self,
        at: Address,
        bytes: usize,
        root: usize,
        comm: Communicator,
        stream: Handle,
    ) -> NcclResult<()> {
        self.note("broadcast");
        let End { clique, rank } = self.end(comm);
        let kind = "broadcast";
        if rank != root {
            return self.step(comm, stream, Step::Recv { kind, at, bytes, from: root });
        }
        (0..clique.len)
            .filter(|&to| to != root)
            .try_for_each(|to| self.step(comm, stream, Step::Send { kind, from: at, bytes, to }))
    }

    fn finalize(&self, comm: Communicator) -> NcclResult<()> {
        self.note("finalize");
        lock(&self.end(comm).clique.mail).ended += 1;
        Ok(())
    }

    fn destroy(&self, comm: Communicator) -> NcclResult<()> {
        self.note("destroy");
        lock(&self.state).comms.remove(&comm);
        Ok(())
    }

    fn abort(&self, comm: Communicator) -> NcclResult<()> {
        self.note("abort");
        let end = lock(&self.state).comms.remove(&comm);
        if let Some(Place::There(End { clique, rank })) = end {
            let mut mail = lock(&clique.mail);
            mail.aborted.push(rank);
            mail.parcels.iter_mut().filter(|((from, _), _)| *from == rank).for_each(|(_, all)| all.clear());
            clique.wake.notify_all();
        }
        Ok(())
    }
}

impl Clique {
    fn new(len: usize, name: &[u8], is_world: bool) -> Arc<Clique> {
        let mail = Mail { splits_len: vec![0; len], ..Mail::default() };
        Arc::new(Clique { name: name.to_vec(), is_world, len, mail: Mutex::new(mail), wake: Condvar::new() })
    }
}

impl End {
    /// Does a group's work on its stream, until it is complete or this end is aborted.
    fn run(&self, steps: &[Step]) {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let End { clique, rank } = self;
        let mut mail = lock(&clique.mail);
        let mut sent: Vec<(usize, u64)> = Vec::new();
        for step in steps {
            match *step {
                Step::Send { kind, from, bytes, to } => {
                    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
                    let parcel = Parcel { kind, at: from, bytes, number };
                    mail.parcels.entry((*rank, to)).or_default().push_back(parcel);
                    sent.push((to, number));
                }
                // SAFETY: both ranges are this rank's, for this call.
                Step::Own { from, at, bytes } => unsafe {
                    std::ptr::copy(from as *const u8, at as *mut u8, bytes);
                },
                Step::Recv { .. } => {}
            }
        }
        clique.wake.notify_all();
        let mut wanted: Vec<Step> =
            steps.iter().filter(|s| matches!(s, Step::Recv { .. })).cloned().collect();
        loop {
            if mail.aborted.contains(rank) {
                return;
            }
            // From each peer, in the order of the steps.
            let mut blocked: Vec<usize> = vec![];
            wanted.retain(|step| {
                let &Step::Recv { kind, at, bytes, from } = step else { return false };
                let parcels = mail.parcels.entry((from, *rank)).or_default();
                let fits = |p: &&Parcel| (p.kind, p.bytes) == (kind, bytes);
                let Some(parcel) = parcels.front().filter(fits).filter(|_| !blocked.contains(&from)) else {
                    blocked.push(from);
                    return true;
                };
                // SAFETY: the sender waits in its own call until the bytes are taken, the lock keeps it from giving
                // up meanwhile, and the range belongs to this rank's call.
                unsafe { std::ptr::copy_nonoverlapping(parcel.at as *const u8, at as *mut u8, bytes) };
                parcels.pop_front();
                clique.wake.notify_all();
                false
            });
            let gone = |&(to, number): &(usize, u64)| {
                !mail.parcels.get(&(*rank, to)).is_some_and(|all| all.iter().any(|p| p.number == number))
            };
            if wanted.is_empty() && sent.iter().all(gone) {
                return;
            }
            mail = clique.wake.wait(mail).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
