//! Parts that the NCCL and the MPI engine share. Neither transport compares calls or names a missing rank, so both
//! have a coordinator that does. Here are a rank's connection to the coordinator, the checks and the numbers of a group's
//! calls, messages of a rank to itself, and the thread that watches the calls in flight.

mod channel;
mod failed_call;
mod group_member;
mod membership;
mod self_message;
mod watchdog;

pub(super) use channel::{CoordinatedChannel, MemberTransport};
pub(super) use group_member::{CallNumber, GroupMember, OpenGroups};
pub(super) use membership::Membership;
pub(super) use self_message::SelfMessage;
pub(super) use watchdog::Watchdog;
