//! The messages from ranks and the notices from the coordinator.

use std::borrow::Cow;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::comm::calls::{BusyWork, CallSignature, Sequence};
use crate::error::{CallId, CommFault, Error, Refusal};

/// The longest error text in a message, in bytes; longer texts are cut off.
const TEXT_BYTES: usize = 16 << 10;

/// The first message of a rank, protected by the secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct JoinRequest {
    pub rank: usize,
    pub world_len: usize,
    /// A random number per process. It tells a rank that connects again from two processes that claim one rank.
    pub process: u64,
    /// The library that carries tensors, e.g. `NCCL 2.21.5`; the same on all ranks.
    pub library: String,
}

impl JoinRequest {
    /// The largest encoded `JoinRequest`.
    pub const BYTES: usize = 1024;
}

/// The coordinator's answers to a [`JoinRequest`]: first `Admitted`, then the outcome.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Answer {
    /// The rank is admitted; others are missing.
    Admitted,
    /// All ranks have come.
    Complete,
    /// The world cannot start, for this reason.
    Refused { verb: String, rule: String, given: String, remedy: String },
    /// These ranks did not come within the deadline.
    Missing(Vec<usize>),
}

impl Answer {
    /// Returns the answer that tells other ranks of an error.
    pub fn of(error: &Error) -> Answer {
        match error {
            Error::Invalid(refusal) => {
                let Refusal { verb, rule, given, remedy, .. } = &**refusal;
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

    /// Returns the answer that rank 0 cannot continue.
    pub fn failed(why: String) -> Answer {
        let [verb, rule, remedy] = ["rendezvous", "rank 0 failed", ""].map(String::from);
        Answer::Refused { verb, rule, given: cut(why), remedy }
    }
}

/// A message from a rank to the coordinator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::comm) enum Message {
    /// The rank opens a group, before its first call.
    Open { name: String, ranks: Vec<usize> },
    /// The rank starts a call; `group` is the group's [number](crate::comm::calls::group_number).
    Arrived { group: u64, sequence: Sequence, seq: u64, signature: CallSignature },
    /// A call has waited for `waited`, which is beyond the deadline; `compared` is true if the ranks report their
    /// calls. The answer is [`Notice::WaitOn`] or the first fault.
    Late {
        group: u64,
        sequence: Sequence,
        seq: u64,
        call: Cow<'static, str>,
        compared: bool,
        waited: Duration,
    },
    /// The rank has waited for `waited` for the other members to open a group. The answer is [`Notice::WaitOn`] with
    /// [`Notice::OPENING`].
    LateToOpen { group: u64, waited: Duration },
    /// The rank's announced work, if it has any.
    Busy { work: Option<BusyWork> },
    /// The transport failed.
    Broken { id: CallId, reason: String },
    /// Stores bytes under a key, for ranks that ask.
    Put { key: String, value: Vec<u8> },
    /// Asks for the bytes of a key. The answer comes when a rank has stored them.
    Get { key: String },
    /// The rank's program has ended.
    Ended,
    /// The rank's program failed.
    Failed { cause: String },
}

impl Message {
    /// Returns the message with error texts cut to [`TEXT_BYTES`].
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

/// A notice from the coordinator to ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::comm) enum Notice {
    /// The world's first fault.
    FirstFault(FirstFault),
    /// The answer to [`Message::Get`].
    Value { key: String, value: Vec<u8> },
    /// The answer to [`Message::Late`] and [`Message::LateToOpen`]: the time for which the rank waits on, because ranks
    /// that it waits for are busy.
    WaitOn { group: u64, sequence: Sequence, seq: u64, time: Duration },
    /// All ranks have ended, and the connections close.
    Closing,
}

impl Notice {
    /// Stands for the opening of a group in the place of a call's number.
    pub const OPENING: (Sequence, u64) = (Sequence::Collective, u64::MAX);
}

/// The fault that ends the world.
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
    /// Returns the fault as call `id` reports it.
    pub fn at(&self, id: CallId) -> CommFault {
        match self {
            FirstFault::Fault(fault) => fault.clone(),
            FirstFault::Failed { rank, cause } => {
                CommFault::PeerFailed { id, rank: *rank, cause: cause.clone() }
            }
        }
    }
}
