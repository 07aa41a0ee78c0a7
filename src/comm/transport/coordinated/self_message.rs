//! Messages of a rank to itself, which do not use the transport.

use std::sync::Arc;

use smallvec::smallvec;

use super::group_member::{CallNumber, GroupMember};
use crate::base::lock;
use crate::comm::calls::{Call, Route};
use crate::comm::calls::{CallSignature, Sequence};
use crate::comm::transport::{CallResults, Request};
use crate::error::Result;

/// One end of a message of a rank to itself.
pub(in crate::comm::transport) struct SelfMessage {
    group: Arc<GroupMember>,
    number: CallNumber,
    sends: bool,
    call: CallSignature,
}

impl SelfMessage {
    /// Starts `call` if this member is both of its ends.
    pub fn start(group: &Arc<GroupMember>, call: &Call<'_>) -> Option<SelfMessage> {
        if !group.is_to_itself(call.route) {
            return None;
        }
        let sends = matches!(call.route, Route::Send { .. });
        // Sends and receives have separate counters; no message between two members has these ends.
        let to = if sends { group.index } else { usize::MAX };
        let sequence = Sequence::Message { from: group.index, to };
        let number = CallNumber { name: call.name, sequence, seq: group.advance(sequence) };
        if sends {
            lock(&group.to_itself).insert(number.seq, call.outgoing[0].clone());
        }
        Some(SelfMessage { group: group.clone(), number, sends, call: call.to_signature() })
    }
}

impl Request for SelfMessage {
    fn wait(self: Box<Self>) -> Result<CallResults> {
        let SelfMessage { group, number, sends, call } = *self;
        if sends {
            return Ok(CallResults::new());
        }
        let x = lock(&group.to_itself).remove(&number.seq);
        let rank = group.membership.rank;
        let reason = match x {
            Some(x) if x.dtype() == call.dtype && *x.shape() == call.incoming[0] => return Ok(smallvec![x]),
            Some(x) => format!("rank {rank} sent itself {} and expects {}", x.notation(), call.view()),
            None => format!("rank {rank} waits for itself with {}", call.view()),
        };
        group.membership.give(Err(group.broken(&number, reason)))
    }

    fn is_ready(&self) -> bool {
        true
    }
}
