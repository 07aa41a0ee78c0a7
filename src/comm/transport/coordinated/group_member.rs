//! A group as one of its members sees it: its ranks, and the numbers of this member's calls.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::membership::Membership;
use crate::base::lock;
use crate::comm::calls::{Call, Route};
use crate::comm::calls::{Sequence, group_number, label};
use crate::comm::coordinator::{FirstFault, Message};
use crate::error::{CallId, Error, Result};
use crate::tensor::Tensor;

/// A group as one of its members sees it.
#[derive(Debug)]
pub(in crate::comm::transport) struct GroupMember {
    pub membership: Arc<Membership>,
    /// The group's name in errors.
    pub label: String,
    /// A hash of name and ranks, by which the coordinator identifies the group: a label leaves out some of many
    /// ranks.
    id: u64,
    pub ranks: Vec<usize>,
    /// This member's position among the ranks.
    pub index: usize,
    next: Mutex<HashMap<Sequence, u64>>,
    /// Tensors that this rank has sent itself, by number.
    pub(super) to_itself: Mutex<HashMap<u64, Tensor>>,
}

/// A call of a group, identified by its number in its sequence.
#[derive(Clone, Copy, Debug)]
pub(in crate::comm::transport) struct CallNumber {
    pub name: &'static str,
    pub sequence: Sequence,
    pub seq: u64,
}

impl CallNumber {
    /// Stands for connecting the members, which is no numbered call.
    pub const CONNECT: CallNumber = CallNumber { name: "connect", sequence: Sequence::Collective, seq: 0 };
}

impl GroupMember {
    /// Opens a group, and tells the coordinator.
    pub fn open(membership: &Arc<Membership>, ranks: &[usize], name: &str) -> GroupMember {
        let label = label(name, ranks);
        let state = GroupMember {
            membership: membership.clone(),
            id: group_number(name, ranks),
            label,
            ranks: ranks.to_vec(),
            index: ranks.iter().position(|&r| r == membership.rank).expect("checked by the caller"),
            next: Mutex::default(),
            to_itself: Mutex::default(),
        };
        membership.tell_later(Message::Open { name: name.into(), ranks: ranks.to_vec() });
        state
    }

    /// Returns the key that the members use for the group in the coordinator's store.
    pub fn key(&self) -> String {
        format!("{} {:016x}", self.label, self.id)
    }

    /// Numbers a call of this member, and sends its signature to the coordinator.
    ///
    /// # Errors
    /// Returns the fault for which the world was given up.
    pub fn enter(&self, call: &Call<'_>) -> Result<CallNumber> {
        let sequence = Sequence::of(call.route, self.index);
        let number = CallNumber { name: call.name, sequence, seq: self.advance(sequence) };
        if self.membership.is_given_up() {
            return Err(self.given_up(&number, call.signature()));
        }
        if self.membership.compared {
            let (group, seq, signature) = (self.id, number.seq, call.to_signature());
            self.membership.tell_later(Message::Arrived { group, sequence, seq, signature });
        }
        Ok(number)
    }

    /// Returns the number of this member's next call of a sequence.
    pub(super) fn advance(&self, sequence: Sequence) -> u64 {
        let mut next = lock(&self.next);
        let next = next.entry(sequence).or_default();
        *next += 1;
        *next - 1
    }

    /// Returns true if this member is both ends of a call.
    pub(super) fn is_to_itself(&self, route: Route) -> bool {
        match route {
            Route::Send { to: other } | Route::Recv { from: other } => other == self.index,
            Route::Gather | Route::AllToAll | Route::Broadcast { .. } | Route::Barrier => false,
        }
    }

    /// Returns the name of a call in errors.
    pub fn call_id(&self, call: &CallNumber) -> CallId {
        CallId::new(call.name, call.seq, &*self.label)
    }

    /// Calls [`Membership::given_up`].
    pub fn given_up(&self, call: &CallNumber, brought: impl ToString) -> Error {
        self.membership.given_up(self.call_id(call), brought)
    }

    /// Calls [`Membership::broken`].
    pub fn broken(&self, call: &CallNumber, reason: impl ToString) -> Error {
        self.membership.broken(self.call_id(call), reason.to_string())
    }

    /// Calls [`Membership::report_broken`].
    pub fn report_broken(&self, call: &CallNumber, reason: impl ToString) -> FirstFault {
        self.membership.report_broken(&self.call_id(call), reason.to_string())
    }

    /// Tells the coordinator that a call has waited for `waited`, which is beyond the deadline. Returns the time for
    /// which to wait on, because ranks that the call waits for are busy.
    ///
    /// # Errors
    /// Returns the first fault if they are not.
    pub fn report_late(
        &self,
        call: &CallNumber,
        brought: impl ToString,
        waited: Duration,
    ) -> Result<Duration, Box<FirstFault>> {
        let CallNumber { name, sequence, seq } = *call;
        let (group, compared) = (self.id, self.membership.compared);
        let late = Message::Late { group, sequence, seq, call: name.into(), compared, waited };
        let time = self.membership.time_left(late);
        // The coordinator has had its time to answer.
        time.ok_or_else(|| {
            Box::new(self.membership.await_fault(&self.call_id(call), brought, Duration::ZERO))
        })
    }

    /// Does the same as [`GroupMember::report_late`].
    ///
    /// # Errors
    /// Returns the call's error.
    pub fn late(&self, call: &CallNumber, brought: impl ToString, waited: Duration) -> Result<Duration> {
        self.report_late(call, brought, waited).map_err(|fault| fault.at(self.call_id(call)).into())
    }

    /// Tells the coordinator that this rank has waited for `waited` for the other members to open the group. Returns
    /// the time for which to wait on, because members that are missing are busy, or `None` if they are not.
    pub fn late_to_open(&self, waited: Duration) -> Option<Duration> {
        self.membership.time_left(Message::LateToOpen { group: self.id, waited })
    }
}

type ByNameAndRanks<G> = HashMap<(String, Vec<usize>), Arc<G>>;

/// The groups that a rank has opened, by name and ranks.
#[derive(Debug)]
pub(in crate::comm::transport) struct OpenGroups<G>(Mutex<ByNameAndRanks<G>>);

impl<G> Default for OpenGroups<G> {
    fn default() -> Self {
        OpenGroups(Mutex::default())
    }
}

impl<G> OpenGroups<G> {
    pub fn find(&self, ranks: &[usize], name: &str) -> Option<Arc<G>> {
        lock(&self.0).get(&(name.into(), ranks.into())).cloned()
    }

    pub fn keep(&self, ranks: &[usize], name: &str, group: G) -> Arc<G> {
        let group = Arc::new(group);
        lock(&self.0).insert((name.into(), ranks.into()), group.clone());
        group
    }

    pub fn all(&self) -> Vec<Arc<G>> {
        lock(&self.0).values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::coordinator::Client;

    /// A label shows the first ones of many ranks and the number of the rest, so groups may share a label.
    #[test]
    fn groups_of_one_label_are_two() {
        let client = Client::of_threads(40, Duration::ZERO).remove(0);
        let membership = Arc::new(Membership::new(0, 40, Duration::ZERO, true, client));
        let ranks = |last: usize| (0..19).chain([last]).collect::<Vec<_>>();
        let open = |ranks: &[usize]| GroupMember::open(&membership, ranks, "g");
        let (a, b) = (open(&ranks(30)), open(&ranks(31)));
        assert_eq!(a.label, b.label);
        assert!(a.id != b.id && a.key() != b.key());
        assert_eq!(a.key(), open(&ranks(30)).key());
        let groups = OpenGroups::default();
        groups.keep(&ranks(30), "g", a);
        assert!(groups.find(&ranks(30), "g").is_some());
        assert!(groups.find(&ranks(31), "g").is_none() && groups.find(&ranks(30), "h").is_none());
    }
}
