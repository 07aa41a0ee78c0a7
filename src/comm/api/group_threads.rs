//! The threads of a rank that hold a group, and the one of them that may call it.
//!
//! The calls of a group have an order, which must be the same on all ranks. Two threads of a rank that call at once have no
//! order, so sums of one would mix with sums of the other. A handle belongs to the thread that touched it last, and a
//! reference to it cannot cross threads, since a `Cell` is not `Sync`. A thread that has all handles of a group is alone
//! with it: nothing is left with which another thread could call.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use smallvec::SmallVec;

use crate::base::lock;

/// The number of a thread of this process; no two threads have the same, even if one has ended.
fn this_thread() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    thread_local!(static NUMBER: Cell<u64> = const { Cell::new(0) });
    match NUMBER.get() {
        0 => {
            let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
            NUMBER.set(number);
            number
        }
        number => number,
    }
}

type ByNameAndRanks = HashMap<String, Vec<(Arc<[usize]>, Arc<GroupThreads>)>>;

/// The groups that a rank has made, by name and ranks. A group that is made again is the same one.
#[derive(Clone, Debug, Default)]
pub(super) struct KnownGroups(Arc<Mutex<ByNameAndRanks>>);

impl KnownGroups {
    /// Returns a new handle of the group, which belongs to this thread.
    pub fn handle(&self, name: &str, ranks: &Arc<[usize]>) -> GroupHandle {
        let mut all = lock(&self.0);
        let of_name = all.entry(name.to_string()).or_default();
        let group = match of_name.iter().find(|(known, _)| known == ranks) {
            Some((_, group)) => group.clone(),
            None => {
                let group =
                    Arc::new(GroupThreads { caller: this_thread().into(), handles: Mutex::default() });
                of_name.push((ranks.clone(), group.clone()));
                group
            }
        };
        GroupHandle::new(group)
    }
}

/// The threads that hold a group.
#[derive(Debug)]
struct GroupThreads {
    /// The thread that may call: the one that made the group, or took it over.
    caller: AtomicU64,
    /// The number of handles by thread.
    handles: Mutex<SmallVec<[(u64, usize); 2]>>,
}

impl GroupThreads {
    /// Moves one handle between threads; `None` is a handle that does not exist before, or afterwards.
    fn count(&self, from: Option<u64>, to: Option<u64>) {
        let mut handles = lock(&self.handles);
        if let Some(at) = from.and_then(|from| handles.iter().position(|(thread, _)| *thread == from)) {
            handles[at].1 -= 1;
            if handles[at].1 == 0 {
                handles.swap_remove(at);
            }
        }
        let Some(to) = to else { return };
        match handles.iter_mut().find(|(thread, _)| *thread == to) {
            Some((_, len)) => *len += 1,
            None => handles.push((to, 1)),
        }
    }
}

/// One handle of a group: a `Group` has one.
#[derive(Debug)]
pub(super) struct GroupHandle {
    group: Arc<GroupThreads>,
    /// The thread that touched the handle last.
    thread: Cell<u64>,
}

impl GroupHandle {
    fn new(group: Arc<GroupThreads>) -> GroupHandle {
        let thread = this_thread();
        group.count(None, Some(thread));
        GroupHandle { group, thread: Cell::new(thread) }
    }

    /// Returns true if this thread may call the group. If it has all handles, it takes the group over.
    pub fn may_call(&self) -> bool {
        let me = this_thread();
        // No other thread takes the group over while this handle counts as one of this thread.
        if self.thread.get() == me && self.group.caller.load(Ordering::Relaxed) == me {
            return true;
        }
        self.touch();
        let handles = lock(&self.group.handles);
        if self.group.caller.load(Ordering::Relaxed) == me {
            return true;
        }
        let has_all = handles.iter().all(|(thread, _)| *thread == me);
        if has_all {
            self.group.caller.store(me, Ordering::Relaxed);
        }
        has_all
    }

    /// Gives the handle to this thread.
    fn touch(&self) {
        let me = this_thread();
        let before = self.thread.replace(me);
        if before != me {
            self.group.count(Some(before), Some(me));
        }
    }
}

impl Clone for GroupHandle {
    fn clone(&self) -> GroupHandle {
        self.touch();
        GroupHandle::new(self.group.clone())
    }
}

impl Drop for GroupHandle {
    fn drop(&mut self) {
        self.group.count(Some(self.thread.get()), None);
    }
}

#[cfg(test)]
mod tests {
    use std::thread::spawn;

    use super::*;

    #[test]
    fn a_thread_calls_if_it_made_the_group_or_has_all_handles() {
        let groups = KnownGroups::default();
        let ranks: Arc<[usize]> = [0, 1].into();
        let made = groups.handle("dp", &ranks);
        assert!(made.may_call());
        // Another group of that name, and one of these ranks.
        let others = [groups.handle("dp", &[1, 0].into()), groups.handle("tp", &ranks)];
        let second = made.clone();
        let second = spawn(move || {
            assert!(!second.may_call() && !second.clone().may_call());
            second
        });
        let second = second.join().unwrap();
        assert!(made.may_call() && second.may_call(), "they have come back");
        drop(second);
        let moved = spawn(move || {
            assert!(made.may_call() && made.clone().may_call());
            made
        });
        // The handle is still the other thread's until this one touches it.
        let made = moved.join().unwrap();
        let again = groups.handle("dp", &ranks);
        assert!(!again.may_call());
        assert!(made.may_call() && again.may_call());
        drop((made, again));
        assert!(spawn(move || groups.handle("dp", &ranks).may_call()).join().unwrap());
        assert!(others.iter().all(GroupHandle::may_call));
    }
}
