//! What goes to the coordinator, and what comes from it.

use std::borrow::Cow;

use super::wire::{Reader, Writer};
use crate::comm::calls::{CallSignature, Sequence};
use crate::error::{CallId, CommFault};

/// A rank's note to the coordinator.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::comm) enum Message {
    /// A group, before its first call. `group` is a number made from its name and ranks.
    Open { group: u64, name: String, ranks: Vec<usize> },
    /// What this rank brings to its next call of a sequence.
    Came { group: u64, sequence: Sequence, seq: u64, brief: CallSignature },
    /// A call has not finished within the deadline; `compared` where calls are noted at all.
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

/// What the coordinator tells.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::comm) enum Notice {
    /// The world's first fault.
    FirstFault(FirstFault),
    /// An answer.
    Value { key: String, value: Vec<u8> },
    /// The coordinator closes, all being over.
    Closing,
}

/// Why the world is given up.
#[derive(Clone, Debug, PartialEq)]
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

impl Message {
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        match self {
            Message::Open { group, name, ranks } => w.u8(0).u64(*group).text(name).ranks(ranks),
            Message::Came { group, sequence, seq, brief } => {
                w.u8(1).u64(*group).sequence(*sequence).u64(*seq).brief(brief)
            }
            Message::Late { group, sequence, seq, call, compared } => {
                w.u8(2).u64(*group).sequence(*sequence).u64(*seq).text(call).u8(u8::from(*compared))
            }
            Message::Broken { id, reason } => w.u8(3).id(id).text(reason),
            Message::Put { key, value } => w.u8(4).text(key).bytes(value),
            Message::Get { key } => w.u8(5).text(key),
            Message::Ended => w.u8(6),
            Message::Failed { cause } => w.u8(7).text(cause),
        };
        w.0
    }

    pub fn decode(bytes: &[u8]) -> Option<Message> {
        let mut r = Reader(bytes);
        Some(match r.u8()? {
            0 => Message::Open { group: r.u64()?, name: r.text()?, ranks: r.ranks()? },
            1 => Message::Came { group: r.u64()?, sequence: r.sequence()?, seq: r.u64()?, brief: r.brief()? },
            2 => Message::Late {
                group: r.u64()?,
                sequence: r.sequence()?,
                seq: r.u64()?,
                call: r.name()?.into(),
                compared: r.u8()? == 1,
            },
            3 => Message::Broken { id: r.id()?, reason: r.text()? },
            4 => Message::Put { key: r.text()?, value: r.bytes()? },
            5 => Message::Get { key: r.text()? },
            6 => Message::Ended,
            7 => Message::Failed { cause: r.text()? },
            _ => return None,
        })
    }
}

impl Notice {
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        match self {
            Notice::FirstFault(FirstFault::Failed { rank, cause }) => w.u8(0).usize(*rank).text(cause),
            Notice::FirstFault(FirstFault::Fault(fault)) => w.u8(1).fault(fault),
            Notice::Value { key, value } => w.u8(2).text(key).bytes(value),
            Notice::Closing => w.u8(3),
        };
        w.0
    }

    pub fn decode(bytes: &[u8]) -> Option<Notice> {
        let mut r = Reader(bytes);
        Some(match r.u8()? {
            0 => Notice::FirstFault(FirstFault::Failed { rank: r.usize()?, cause: r.text()? }),
            1 => Notice::FirstFault(FirstFault::Fault(r.fault()?)),
            2 => Notice::Value { key: r.text()?, value: r.bytes()? },
            3 => Notice::Closing,
            _ => return None,
        })
    }
}

impl Writer {
    fn sequence(&mut self, sequence: Sequence) -> &mut Writer {
        match sequence {
            Sequence::Collective => self.u8(0),
            Sequence::Message { from, to } => self.u8(1).usize(from).usize(to),
        }
    }

    fn fault(&mut self, fault: &CommFault) -> &mut Writer {
        match fault {
            CommFault::Mismatch { id, rank, brought, other, other_brought, last } => {
                self.u8(0).id(id).usize(*rank).text(brought).usize(*other).text(other_brought).last(last)
            }
            CommFault::Missing { id, rank, brought, missing, ended, deadline_s, elsewhere, last } => self
                .u8(1)
                .id(id)
                .usize(*rank)
                .text(brought)
                .ranks(missing)
                .u8(u8::from(*ended))
                .f64(*deadline_s)
                .waits(elsewhere)
                .last(last),
            CommFault::PeerFailed { id, rank, cause } => self.u8(2).id(id).usize(*rank).text(cause),
            CommFault::Transport { id, rank, reason } => self.u8(3).id(id).usize(*rank).text(reason),
            CommFault::Cycle { id, rank, waits, last } => {
                self.u8(4).id(id).usize(*rank).waits(waits).last(last)
            }
        }
    }
}

impl Reader<'_> {
    fn sequence(&mut self) -> Option<Sequence> {
        match self.u8()? {
            0 => Some(Sequence::Collective),
            1 => Some(Sequence::Message { from: self.usize()?, to: self.usize()? }),
            _ => None,
        }
    }

    fn fault(&mut self) -> Option<CommFault> {
        let (kind, id) = (self.u8()?, self.id()?);
        let rank = self.usize()?;
        Some(match kind {
            0 => CommFault::Mismatch {
                id,
                rank,
                brought: self.text()?,
                other: self.usize()?,
                other_brought: self.text()?,
                last: self.last()?,
            },
            1 => CommFault::Missing {
                id,
                rank,
                brought: self.text()?,
                missing: self.ranks()?,
                ended: self.u8()? == 1,
                deadline_s: self.f64()?,
                elsewhere: self.waits()?,
                last: self.last()?,
            },
            2 => CommFault::PeerFailed { id, rank, cause: self.text()? },
            3 => CommFault::Transport { id, rank, reason: self.text()? },
            4 => CommFault::Cycle { id, rank, waits: self.waits()?, last: self.last()? },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::calls::Route;
    use crate::error::{LastCall, Wait};
    use crate::tensor::{DType, ReduceOp, Shape};

    #[test]
    fn what_is_sent_is_received() {
        let shapes = vec![Shape::from([2, 0]), Shape::from([])];
        let brief = |route, op| CallSignature {
            name: "all_reduce".into(),
            route,
            op,
            dtype: DType::BF16,
            outgoing: shapes.clone(),
            incoming: vec![],
            operator: "matmul".into(),
        };
        let routes = [
            Route::Gather,
            Route::AllToAll,
            Route::Broadcast { root: 3 },
            Route::Send { to: 1 },
            Route::Recv { from: 2 },
            Route::Barrier,
        ];
        let id = CallId {
            operator: "an operator of the caller's".into(),
            ..CallId::new("broadcast", 7, "dp{0, 1}")
        };
        let last = vec![
            LastCall { rank: 1, on_group: Some(id.clone()), in_world: None },
            LastCall { rank: 0, on_group: None, in_world: Some(id.clone()) },
        ];
        let mut notes = vec![
            Message::Open { group: 9, name: "dp".into(), ranks: vec![0, 5] },
            Message::Late {
                group: 1,
                sequence: Sequence::Collective,
                seq: 2,
                call: "send".into(),
                compared: true,
            },
            Message::Broken { id: id.clone(), reason: "ü".into() },
            Message::Put { key: "k".into(), value: vec![0, 255] },
            Message::Get { key: String::new() },
            Message::Ended,
            Message::Failed { cause: "c".into() },
        ];
        for (route, op) in
            routes.into_iter().zip([None, Some(ReduceOp::Sum), Some(ReduceOp::Min), None, None, None])
        {
            let sequence = Sequence::Message { from: 1, to: 0 };
            notes.push(Message::Came { group: u64::MAX, sequence, seq: 1, brief: brief(route, op) });
        }
        for note in notes {
            let bytes = note.encode();
            assert_eq!(Message::decode(&bytes).as_ref(), Some(&note));
            // Nothing that is cut short is taken for something else, and nothing panics.
            (0..bytes.len())
                .for_each(|n| assert_eq!(Message::decode(&bytes[..n]), None, "{note:?} cut to {n}"));
        }
        let text = || "t".to_string();
        let faults = [
            CommFault::Mismatch {
                id: id.clone(),
                rank: 1,
                brought: text(),
                other: 0,
                other_brought: text(),
                last: last.clone(),
            },
            CommFault::Cycle {
                id: id.clone(),
                rank: 1,
                waits: vec![Wait { rank: 1, id: id.clone(), waits_for: 0 }],
                last: vec![],
            },
            CommFault::Missing {
                id: id.clone(),
                rank: 1,
                brought: text(),
                missing: vec![2, 3],
                ended: true,
                deadline_s: 0.5,
                elsewhere: vec![Wait { rank: 2, id: id.clone(), waits_for: 0 }],
                last,
            },
            CommFault::PeerFailed { id: id.clone(), rank: 1, cause: text() },
            CommFault::Transport { id, rank: 1, reason: text() },
        ];
        let news = faults.map(|fault| Notice::FirstFault(FirstFault::Fault(fault))).into_iter().chain([
            Notice::FirstFault(FirstFault::Failed { rank: 1, cause: text() }),
            Notice::Value { key: text(), value: vec![1] },
            Notice::Closing,
        ]);
        for news in news {
            assert_eq!(Notice::decode(&news.encode()), Some(news));
        }
        assert_eq!((Message::decode(&[99]), Notice::decode(&[])), (None, None));
    }
}
