//! The way of a call's data.

use serde::{Deserialize, Serialize};

/// The members that send, and those that receive. Members are named by their index in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Route {
    /// Every member's tensor goes to all.
    Gather,
    /// Every member's part i goes to member i.
    AllToAll,
    /// The root's tensor goes to all.
    Broadcast {
        /// The root.
        root: usize,
    },
    /// This member's tensor goes to one.
    Send {
        /// The receiver.
        to: usize,
    },
    /// One member's tensor comes here.
    Recv {
        /// The sender.
        from: usize,
    },
    /// Nothing is sent; all wait for all.
    Barrier,
}
