//! The senders and receivers of a call.

use serde::{Deserialize, Serialize};

/// The members that send and those that receive. Members are named by their index in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Route {
    /// Every member sends one tensor to all members.
    Gather,
    /// Every member sends part i to member i.
    AllToAll,
    /// The root sends one tensor to all members.
    Broadcast {
        /// The root.
        root: usize,
    },
    /// This member sends one tensor to one member.
    Send {
        /// The receiver.
        to: usize,
    },
    /// This member receives one tensor from one member.
    Recv {
        /// The sender.
        from: usize,
    },
    /// No tensor is sent; every member waits for all.
    Barrier,
}
