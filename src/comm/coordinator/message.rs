//! The messages of ranks, and the notices of the coordinator.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::comm::calls::{CallSignature, Sequence};
use crate::error::{CallId, CommFault, Error, Refusal};

/// The longest text of an error that travels; what is beyond is cut off.
const TEXT_BYTES: usize = 16 << 10;

/// The first message of a rank, once it has shown that it knows the secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct JoinRequest {
    pub rank: usize,
    pub world_len: usize,
    /// The process, by a random number: a rank that comes again is told from two that claim one place.
    pub process: u64,
    /// The library that carries its tensors, e.g. `NCCL 2.21.5`: the same on all ranks.
    pub library: String,
}

impl JoinRequest {
    /// The largest `JoinRequest`.
    pub const BYTES: usize = 1024;
}

/// The coordinator's answer to a [`JoinRequest`], twice: that it has heard, and what came of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Answer {
    /// The rank is in; the others are waited for.
    Admitted,
    /// All are there.
    Complete,
    /// Nothing comes of it.
    Refused { verb: String, rule: String, given: String, remedy: String },
    /// These ranks have not come.
    Missing(Vec<usize>),
}

impl Answer {
    /// An error, as the others read it.
    pub fn of(error: &Error) -> Answer {
        match error {
            Error::Invalid(refusal) => {
                let Refusal { verb, rule, given, remedy } = &**refusal;
                let [verb, rule, given, remedy] = [verb, rule, given, remedy].map(|text| cut(text.clone()));
                Answer::Refused { verb, rule, given, remedy }
            }
            Error::Comm(fault) => match &**fault {
                CommFault::Missing { missing, .. } => Answer::Missing(missing.clone()),
                other => Answer::failed(other.to_string()),
            },
            other => Answer::failed(other.to_string()),
        }
    }

    /// Rank 0 cannot go on.
    pub fn failed(why: String) -> Answer {
        let [verb, rule, remedy] = ["rendezvous", "rank 0 failed", ""].map(String::from);
        Answer::Refused { verb, rule, given: cut(why), remedy }
    }
}

/// A rank's message to the coordinator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::comm) enum Message {
    /// A group, before its first call.
    Open { name: String, ranks: Vec<usize> },
    /// A call that this rank brings to its next call of a sequence; `group` is its [number](crate::comm::calls::group_number).
    Arrived { group: u64, sequence: Sequence, seq: u64, signature: CallSignature },
    /// A call has not finished within the deadline; `compared` where calls are told of at all.
    Late { group: u64, sequence: Sequence, seq: u64, call: Cow<'static, str>, compared: bool },
    /// The transport failed.
    Broken { id: CallId, reason: String },
    /// Bytes for whoever asks.
    Put { key: String, value: Vec<u8> },
    /// A question, answered when somebody has put it.
    Get { key: String },
    /// The rank's program is over.
    Ended,
    /// The rank's program failed.
    Failed { cause: String },
}

impl Message {
    /// The same with texts of errors cut to what travels.
    pub(super) fn cut(mut self) -> Message {
        if let Message::Broken { reason: text, .. } | Message::Failed { cause: text } = &mut self {
            *text = cut(std::mem::take(text));
        }
        self
    }
}

fn cut(mut text: String) -> String {
    if text.len() > TEXT_BYTES {
        let end = (0..=TEXT_BYTES).rfind(|&end| text.is_char_boundary(end)).unwrap_or(0);
        text.truncate(end);
        text.push_str(" ...");
    }
    text
}

/// A word of the coordinator to ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::comm) enum Notice {
    /// The world's first fault.
    FirstFault(FirstFault),
    /// An answer.
    Value { key: String, value: Vec<u8> },
    /// All ranks are over: the connections close.
    Closing,
}

/// The fault for which the world is given up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::comm) enum FirstFault {
    Fault(CommFault),
    /// A rank's program failed.
    Failed {
        rank: usize,
        cause: String,
    },
}

impl FirstFault {
    /// The fault as the rank sees it that makes the call `id`.
    pub fn at(&self, id: CallId) -> CommFault {
        match self {
            FirstFault::Fault(fault) => fault.clone(),
            FirstFault::Failed { rank, cause } => {
                CommFault::PeerFailed { id, rank: *rank, cause: cause.clone() }
            }
        }
    }
}
