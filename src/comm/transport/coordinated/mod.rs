//! Everything that the engines share whose transport compares nothing and names nobody, NCCL and MPI: a rank's dealings with the
//! coordinator, the numbers of a group's calls, messages of a rank to itself, and the thread that watches what is in flight.

mod failed_call;
mod group_member;
mod membership;
mod self_message;
mod watchdog;

pub(super) use failed_call::FailedCall;
pub(super) use group_member::{CallNumber, GroupMember, OpenGroups};
pub(super) use membership::Membership;
pub(super) use self_message::SelfMessage;
pub(super) use watchdog::Watchdog;
