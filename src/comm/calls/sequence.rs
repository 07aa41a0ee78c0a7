//! The sequences by which a group's calls are numbered.

use serde::{Deserialize, Serialize};

use super::Route;

/// The sequence by which a call is numbered among its group's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Sequence {
    /// The collectives.
    Collective,
    /// The messages from one member to another.
    Message {
        /// The sender's index in the group.
        from: usize,
        /// The receiver's.
        to: usize,
    },
}

impl Sequence {
    /// The sequence of a call by member `index`.
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
