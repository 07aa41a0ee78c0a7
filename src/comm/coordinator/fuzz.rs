//! Sends mutated messages to every reader of untrusted input: none may panic, or take more memory than the received
//! bytes account for.
//!
//! `ISOSHARD_FUZZ` sets the number of conversations (`tests/complete.sh` runs ten million), `ISOSHARD_FUZZ_SEED` the
//! first seed.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use super::admission::{ClientHello, HelloState};
use super::auth::{FrameKey, Greeting, Keys};
use super::frame::{self, FrameHead, HEAD_BYTES};
use super::inbox::NoticeInbox;
use super::message::{Answer, FirstFault, JoinRequest, Message, Notice};
use super::server::{CoordinatorState, Recipient};
use crate::base::mix;
use crate::comm::calls::{BusyWork, CallSignature, Route, Sequence, group_number};
use crate::comm::launch::Secret;
use crate::error::{CallId, CommFault, LastCall, Wait};
use crate::tensor::{DType, ReduceOp, Shape};

/// The default number of conversations.
const FEW: u64 = 100_000;
/// The number of ranks: more than errors list one by one.
const WORLD: usize = 20;
/// The memory that a conversation may take at a time, plus [`PER_BYTE`] per byte received.
const BYTES: usize = 256 << 10;
/// A shape without dims takes one byte in a message and a `Shape` in memory, and lists grow by doubling.
const PER_BYTE: usize = 4 * size_of::<Shape>();

/// An allocator that counts the memory of each thread.
struct Counting;

thread_local! {
    static LIVE: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

fn count(taken: usize, given_back: usize) {
    // A thread that is ending has no counters any more.
    let _ = LIVE.try_with(|live| {
        live.set(live.get().wrapping_add(taken).wrapping_sub(given_back));
        let _ = PEAK.try_with(|peak| {
            // Memory of another thread may be freed here, which would make the difference negative.
            if live.get() > peak.get() && live.get() < usize::MAX / 2 {
                peak.set(live.get());
            }
        });
    });
}

// SAFETY: the system's allocator, and counters that do not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size, layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Returns the peak of memory that `f` allocated.
fn peak_of(f: impl FnOnce()) -> usize {
    LIVE.set(0);
    PEAK.set(0);
    f();
    PEAK.get()
}

fn all_ranks() -> Vec<usize> {
    (0..WORLD).collect()
}

#[derive(Clone)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Returns a small number in most cases, otherwise one near a limit.
    fn number(&mut self) -> usize {
        match self.below(12) {
            0 => usize::MAX - self.below(WORLD),
            1 => 1 << self.below(64),
            2 => self.below(300),
            _ => self.below(WORLD + 1),
        }
    }

    fn text(&mut self) -> String {
        match self.below(8) {
            0 => "ü".repeat(self.below(3000)),
            1 => "#7".into(),
            _ => ["dp", "k", "all_gather", "broadcast", ""][self.below(5)].into(),
        }
    }

    fn numbers(&mut self) -> Vec<usize> {
        match self.below(4) {
            0 => all_ranks(),
            1 => (usize::MAX - 17..=usize::MAX).collect(),
            _ => (0..self.below(6)).map(|_| self.number()).collect(),
        }
    }

    fn shapes(&mut self) -> Vec<Shape> {
        let len = if self.below(3) == 0 { WORLD } else { self.below(5) };
        (0..len).map(|_| self.numbers().into()).collect()
    }

    fn sequence(&mut self) -> Sequence {
        match self.below(2) {
            0 => Sequence::Collective,
            _ => Sequence::Message { from: self.number(), to: self.number() },
        }
    }

    fn signature(&mut self) -> CallSignature {
        let route = match self.below(6) {
            0 => Route::Gather,
            1 => Route::AllToAll,
            2 => Route::Broadcast { root: self.number() },
            3 => Route::Send { to: self.number() },
            4 => Route::Recv { from: self.number() },
            _ => Route::Barrier,
        };
        CallSignature {
            name: self.text().into(),
            route,
            op: [None, Some(ReduceOp::Sum), Some(ReduceOp::Max)][self.below(3)],
            dtype: DType::ALL[self.below(2)],
            outgoing: self.shapes(),
            incoming: self.shapes(),
            operator: self.text().into(),
            lineage: self.next(),
            made_by: self.text().into(),
        }
    }

    fn id(&mut self) -> CallId {
        CallId {
            call: self.text().into(),
            seq: self.next(),
            group: self.text(),
            operator: self.text().into(),
        }
    }

    fn time(&mut self) -> Duration {
        [Duration::ZERO, Duration::from_millis(self.next() >> 50), Duration::MAX][self.below(3)]
    }

    fn work(&mut self) -> Option<BusyWork> {
        let work = BusyWork { what: self.text(), spent: self.time(), limit: self.time() };
        (self.below(3) > 0).then_some(work)
    }

    fn message(&mut self) -> Message {
        let group = if self.below(8) == 0 { 7 } else { group_number("dp", &all_ranks()) };
        match self.below(23) {
            0..5 => {
                // In most cases the group that the other ranks open as well.
                let well = self.below(3) > 0;
                let (name, ranks) =
                    if well { ("dp".into(), all_ranks()) } else { (self.text(), self.numbers()) };
                Message::Open { name, ranks }
            }
            5..13 => Message::Arrived {
                group,
                sequence: self.sequence(),
                seq: self.number() as u64,
                signature: self.signature(),
            },
            13 => Message::Late {
                group,
                sequence: self.sequence(),
                seq: self.number() as u64,
                call: self.text().into(),
                compared: self.below(2) == 0,
                waited: self.time(),
            },
            14 => Message::Broken { id: self.id(), reason: self.text() },
            15 => Message::Put { key: self.text(), value: vec![7; self.below(5000)] },
            16 | 17 => Message::Get { key: self.text() },
            18 => Message::Ended,
            19 => Message::LateToOpen { group, waited: self.time() },
            20 | 21 => Message::Busy { work: self.work() },
            _ => Message::Failed { cause: self.text() },
        }
    }

    fn notice(&mut self) -> Notice {
        let waits = |r: &mut Random| Wait { rank: r.number(), id: r.id(), waits_for: r.number() };
        let last = |r: &mut Random| LastCall { rank: r.number(), on_group: Some(r.id()), in_world: None };
        match self.below(5) {
            3 => Notice::WaitOn {
                group: self.next(),
                sequence: self.sequence(),
                seq: self.number() as u64,
                time: self.time(),
            },
            0 => Notice::Value { key: self.text(), value: vec![1; self.below(100)] },
            1 => Notice::Closing,
            2 => Notice::FirstFault(FirstFault::Failed { rank: self.number(), cause: self.text() }),
            _ => Notice::FirstFault(FirstFault::Fault(CommFault::Missing {
                id: self.id(),
                rank: self.number(),
                brought: self.text(),
                missing: self.numbers(),
                ended: self.below(2) == 0,
                deadline_s: f64::from_bits(self.next()),
                elsewhere: vec![waits(self)],
                busy: vec![],
                last: vec![last(self)],
            })),
        }
    }

    /// Changes bytes as a faulty network or an attacker would: flips bits, cuts, doubles, sets numbers to their
    /// limits.
    fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..self.below(4) {
            let at = self.below(bytes.len().max(1)).min(bytes.len());
            match self.below(6) {
                0 => bytes.truncate(at),
                1 => bytes.insert(at, self.next() as u8),
                2 => bytes.extend_from_within(at..),
                3 => bytes.splice(at..at, [0xff; 9]).for_each(drop),
                _ if at < bytes.len() => match self.below(3) {
                    0 => bytes[at] ^= 1 << self.below(8),
                    1 => bytes[at] = 0xff,
                    _ => bytes[at] = self.below(8) as u8,
                },
                _ => {}
            }
        }
    }
}

/// Admitted ranks, some malicious, send messages to a coordinator. Its notices must be well-formed and addressed to
/// ranks of the world.
fn talk_to_the_coordinator(r: &mut Random) -> usize {
    let mut state = CoordinatorState::new(WORLD, Duration::from_secs(1));
    let mut said = 0;
    for _ in 0..1 + r.below(12) {
        let from = r.below(WORLD);
        let mut body = postcard::to_stdvec(&r.message()).expect("messages are written");
        r.mutate(&mut body);
        said += body.len();
        // Decodes as far as possible; doubled bytes can be several messages.
        let _ = frame::decode_each(&body, |message: Message| {
            for (to, notice) in state.take(from, message) {
                assert!(to == Recipient::All || matches!(to, Recipient::Rank(rank) if rank < WORLD));
                let told = postcard::to_stdvec(&notice).expect("notices are written");
                assert!(frame::decode::<Notice>(&told).expect("a notice is read") == notice);
            }
        });
    }
    said
}

/// A rank receives invalid notices.
fn talk_to_a_rank(r: &mut Random) -> usize {
    let inbox = NoticeInbox::default();
    let mut said = 0;
    for _ in 0..1 + r.below(4) {
        let mut body = postcard::to_stdvec(&r.notice()).expect("notices are written");
        r.mutate(&mut body);
        said += body.len();
        if let Ok(notice) = frame::decode::<Notice>(&body) {
            inbox.put(notice);
        }
        let _ = frame::decode::<Answer>(&body);
        if let Some(fault) = inbox.first_fault() {
            // Formats the fault as a rank does.
            let shown = fault.at(CallId::new("barrier", 0, "world")).to_string();
            said += shown.len();
        }
    }
    said
}

/// Connections with and without the secret send mutated join requests in pieces. A changed request must never be
/// accepted.
fn talk_to_the_door(r: &mut Random, secret: &Secret) -> usize {
    let mut hello = ClientHello::new().expect("there are random numbers");
    let ours = Greeting::fresh().expect("there are random numbers");
    let knows = r.below(4) > 0;
    let mut keys = Keys::of(knows.then_some(secret), &hello.greeting, &ours);
    let mut words = ours.encode().to_vec();
    let join = JoinRequest { rank: r.number(), world_len: r.number(), process: 7, library: "lib".into() };
    frame::seal(&join, &mut keys.to_coordinator, JoinRequest::BYTES, &mut words).expect("a join is small");
    let unchanged = words.clone();
    r.mutate(&mut words);
    let mut said = 0;
    while said < words.len() {
        let end = words.len().min(said + 1 + r.below(100));
        match hello.receive(&words[said..end], Some(secret)) {
            HelloState::Incomplete => said = end,
            HelloState::Authenticated(heard, _) => {
                assert!(knows && words[..end] == unchanged[..] && heard == join);
                break;
            }
            HelloState::Rejected(_) | HelloState::Closed => break,
        }
    }
    said
}

/// A frame whose bytes were changed must never be accepted.
fn change_a_frame(r: &mut Random, (key, other): (&FrameKey, &FrameKey)) -> usize {
    let mut frame = Vec::new();
    let message = r.message();
    frame::seal(&message, &mut key.clone(), frame::message_limit(WORLD), &mut frame)
        .expect("a message is small");
    let unchanged = frame.clone();
    r.mutate(&mut frame);
    let opened = frame.split_first_chunk::<HEAD_BYTES>().and_then(|(head, body)| {
        let head = FrameHead::decode(head, frame::message_limit(WORLD)).ok()?;
        head.open::<Message>(body.get(..head.len)?, &mut key.clone()).ok()
    });
    // Bytes after a frame belong to the next one.
    let same = frame.starts_with(&unchanged);
    assert_eq!(opened, same.then_some(message));
    let head = unchanged.first_chunk().expect("a frame has a head");
    let head = FrameHead::decode(head, frame::message_limit(WORLD)).expect("it was sealed");
    assert!(head.open::<Message>(&unchanged[HEAD_BYTES..], &mut other.clone()).is_err());
    frame.len()
}

#[test]
fn no_words_panic_or_take_more_than_they_account_for() {
    let number = |name: &str, or: u64| std::env::var(name).map_or(or, |n| n.parse().expect("a number"));
    let (conversations, seed) = (number("ISOSHARD_FUZZ", FEW), number("ISOSHARD_FUZZ_SEED", 0));
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    std::thread::scope(|s| {
        for t in 0..threads {
            s.spawn(move || (t..conversations).step_by(threads as usize).for_each(|i| converse(seed + i)));
        }
    });
}

fn converse(seed: u64) {
    let secret = Secret::from_text("the secret of this job", "test").expect("long enough");
    let mut r = Random(seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
    let mut said = 0;
    let taken = peak_of(|| {
        said = match seed % 8 {
            0 => talk_to_the_door(&mut r, &secret),
            1 => {
                let greeting = |byte| {
                    Greeting::decode(
                        &[&b"isoshard\x02\0\0\0"[..], &[byte; 32]]
                            .concat()
                            .try_into()
                            .expect("of its length"),
                    )
                };
                let (one, two) = (greeting(1).expect("a greeting"), greeting(2).expect("a greeting"));
                let keys = Keys::of(Some(&secret), &one, &two);
                change_a_frame(&mut r, (&keys.to_coordinator, &keys.from_coordinator))
            }
            2 | 3 => talk_to_a_rank(&mut r),
            _ => talk_to_the_coordinator(&mut r),
        };
    });
    assert!(taken <= BYTES + PER_BYTE * said, "seed {seed}: {taken} bytes for {said} that were said");
}
