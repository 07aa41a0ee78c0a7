//! Frames and what is in them.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::sync::{Mutex, PoisonError};

use crate::comm::calls::{CallSignature, Route};
use crate::error::{CallId, LastCall, Wait};
use crate::tensor::{DType, ReduceOp, Shape};

/// No frame is larger: what is, comes from a stranger.
const FRAME_BYTES: usize = 64 << 20;

/// Writes one frame.
pub(super) fn send(to: &mut impl Write, body: &[u8]) -> io::Result<()> {
    let len = u32::try_from(body.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    let mut frame = Vec::with_capacity(4 + body.len());
    frame.extend_from_slice(&len.to_le_bytes());
    frame.extend_from_slice(body);
    to.write_all(&frame)
}

/// Reads one frame of at most `limit` bytes.
pub(super) fn receive_within(from: &mut impl Read, limit: usize) -> io::Result<Vec<u8>> {
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > limit {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a frame of {len} bytes")));
    }
    let mut body = vec![0; len];
    from.read_exact(&mut body)?;
    Ok(body)
}

/// Reads one frame.
pub(super) fn receive(from: &mut impl Read) -> io::Result<Vec<u8>> {
    receive_within(from, FRAME_BYTES)
}

/// Puts values one after the other.
#[derive(Default)]
pub(super) struct Writer(pub Vec<u8>);

impl Writer {
    pub fn u8(&mut self, v: u8) -> &mut Writer {
        self.0.push(v);
        self
    }

    pub fn u64(&mut self, v: u64) -> &mut Writer {
        self.0.extend_from_slice(&v.to_le_bytes());
        self
    }

    pub fn usize(&mut self, v: usize) -> &mut Writer {
        self.u64(v as u64)
    }

    pub fn f64(&mut self, v: f64) -> &mut Writer {
        self.u64(v.to_bits())
    }

    pub fn bytes(&mut self, v: &[u8]) -> &mut Writer {
        self.usize(v.len());
        self.0.extend_from_slice(v);
        self
    }

    pub fn text(&mut self, v: &str) -> &mut Writer {
        self.bytes(v.as_bytes())
    }

    pub fn list<T>(&mut self, items: &[T], mut one: impl FnMut(&mut Writer, &T)) -> &mut Writer {
        self.usize(items.len());
        items.iter().for_each(|item| one(self, item));
        self
    }

    pub fn ranks(&mut self, ranks: &[usize]) -> &mut Writer {
        self.list(ranks, |w, &r| {
            w.usize(r);
        })
    }

    pub fn id(&mut self, id: &CallId) -> &mut Writer {
        self.text(&id.call).u64(id.seq).text(&id.group).text(&id.operator)
    }

    pub fn last(&mut self, last: &[LastCall]) -> &mut Writer {
        let maybe = |w: &mut Writer, id: &Option<CallId>| match id {
            Some(id) => drop(w.u8(1).id(id)),
            None => drop(w.u8(0)),
        };
        self.list(last, |w, last| {
            w.usize(last.rank);
            maybe(w, &last.on_group);
            maybe(w, &last.in_world);
        })
    }

    pub fn waits(&mut self, waits: &[Wait]) -> &mut Writer {
        self.list(waits, |w, wait| {
            w.usize(wait.rank).id(&wait.id).usize(wait.waits_for);
        })
    }

    pub fn brief(&mut self, brief: &CallSignature) -> &mut Writer {
        let CallSignature { name, route, op, dtype, outgoing, incoming, operator } = brief;
        let (kind, peer) = match *route {
            Route::Gather => (0, 0),
            Route::AllToAll => (1, 0),
            Route::Broadcast { root } => (2, root),
            Route::Send { to } => (3, to),
            Route::Recv { from } => (4, from),
            Route::Barrier => (5, 0),
        };
        let op = op.and_then(|op| OPS.iter().position(|&o| o == op)).map_or(255, |i| i as u8);
        let dtype = DType::ALL.iter().position(|d| d == dtype).expect("one of all") as u8;
        self.text(name).u8(kind).usize(peer).u8(op).u8(dtype);
        self.list(outgoing, |w, s| {
            w.ranks(s);
        });
        self.list(incoming, |w, s| {
            w.ranks(s);
        });
        self.text(operator)
    }
}

const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];

/// Takes values one after the other; none where the bytes are not what was put.
pub(super) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }

    pub fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|b| b[0])
    }

    pub fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    pub fn usize(&mut self) -> Option<usize> {
        self.u64()?.try_into().ok()
    }

    pub fn f64(&mut self) -> Option<f64> {
        self.u64().map(f64::from_bits)
    }

    pub fn bytes(&mut self) -> Option<Vec<u8>> {
        let n = self.usize()?;
        self.take(n).map(<[u8]>::to_vec)
    }

    pub fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?).ok()
    }

    pub fn list<T>(&mut self, mut one: impl FnMut(&mut Reader<'a>) -> Option<T>) -> Option<Vec<T>> {
        let n = self.usize()?;
        // Each item takes a byte at least: a length beyond what is there is no length.
        (n <= self.0.len()).then(|| (0..n).map(|_| one(self)).collect())?
    }

    pub fn ranks(&mut self) -> Option<Vec<usize>> {
        self.list(Reader::usize)
    }

    /// The name of a call or an operator.
    pub fn name(&mut self) -> Option<&'static str> {
        self.text().map(name)
    }

    pub fn id(&mut self) -> Option<CallId> {
        let (call, seq, group) = (self.name()?, self.u64()?, self.text()?);
        Some(CallId { call: call.into(), seq, group, operator: self.name()?.into() })
    }

    pub fn last(&mut self) -> Option<Vec<LastCall>> {
        let maybe = |r: &mut Self| match r.u8()? {
            0 => Some(None),
            1 => r.id().map(Some),
            _ => None,
        };
        self.list(|r| Some(LastCall { rank: r.usize()?, on_group: maybe(r)?, in_world: maybe(r)? }))
    }

    pub fn waits(&mut self) -> Option<Vec<Wait>> {
        self.list(|r| Some(Wait { rank: r.usize()?, id: r.id()?, waits_for: r.usize()? }))
    }

    pub fn brief(&mut self) -> Option<CallSignature> {
        let name = self.name()?.into();
        let (kind, peer) = (self.u8()?, self.usize()?);
        let route = match kind {
            0 => Route::Gather,
            1 => Route::AllToAll,
            2 => Route::Broadcast { root: peer },
            3 => Route::Send { to: peer },
            4 => Route::Recv { from: peer },
            5 => Route::Barrier,
            _ => return None,
        };
        let op = self.u8()?;
        let op = if op == 255 { None } else { Some(*OPS.get(usize::from(op))?) };
        let dtype = *DType::ALL.get(usize::from(self.u8()?))?;
        let mut shapes = || self.list(|r| r.ranks().map(|s| s.into_iter().collect::<Shape>()));
        let (outgoing, incoming) = (shapes()?, shapes()?);
        Some(CallSignature { name, route, op, dtype, outgoing, incoming, operator: self.name()?.into() })
    }
}

/// A call's name from its text, or an operator's. All that this crate's groups make are listed; others are kept for good, once.
fn name(text: String) -> &'static str {
    const NAMES: [&str; 13] = [
        "",
        "all_gather",
        "all_to_all",
        "reduce_scatter",
        "all_reduce",
        "broadcast",
        "send",
        "recv",
        "barrier",
        "connect",
        "rendezvous",
        "read",
        "end",
    ];
    static OTHERS: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    if let Some(name) = NAMES.into_iter().find(|n| *n == text) {
        return name;
    }
    let mut others = OTHERS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(name) = others.get(text.as_str()) {
        return name;
    }
    let name: &'static str = Box::leak(text.into_boxed_str());
    others.insert(name);
    name
}
