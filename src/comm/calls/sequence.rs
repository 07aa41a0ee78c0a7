//! The numbering of a group's calls.

use serde::{Deserialize, Serialize};

use super::Route;

/// A sequence in which calls of a group are numbered from 0: one for all collectives, and one per sender and
/// receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Sequence {
    /// The group's collectives.
    Collective,
    /// The messages from one member to another.
    Message {
        /// The sender's index in the group.
        from: usize,
        /// The receiver's index in the group.
        to: usize,
    },
}

impl Sequence {
    /// Returns the sequence of a call that member `index` makes.
    pub(in crate::comm) fn of(route: Route, index: usize) -> Sequence {
        match route {
            Route::Send { to } => Sequence::Message { from: index, to },
            Route::Recv { from } => Sequence::Message { from, to: index },
            Route::Gather | Route::AllToAll | Route::Broadcast { .. } | Route::Barrier => {
                Sequence::Collective
            }
        }
    }
}
