//! Mutated conversations with everybody who reads from a wire: nobody panics, and nobody takes more memory than what was said
//! accounts for.
//!
//! `ISOSHARD_FUZZ` says how many conversations (`tests/complete.sh` has ten million), `ISOSHARD_FUZZ_SEED` where they begin.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use super::admission::{ClientHello, HelloState};
use super::auth::{FrameKey, Greeting, Keys};
use super::frame::{self, FrameHead, HEAD_BYTES};
use super::inbox::Inbox;
use super::message::{Answer, FirstFault, JoinRequest, Message, Notice};
use super::server::{CoordinatorState, Recipient};
use crate::comm::calls::{CallSignature, Route, Sequence, group_number};
use crate::comm::launch::Secret;
use crate::error::{CallId, CommFault, LastCall, Wait};
use crate::tensor::{DType, ReduceOp, Shape};

/// Conversations where nobody says how many.
const FEW: u64 = 100_000;
/// More than errors list.
const WORLD: usize = 20;
/// The bytes that a conversation may take at one time, beside [`PER_BYTE`] for every byte that was said.
const BYTES: usize = 256 << 10;
/// A shape without dims is a byte on the wire and a `Shape` in memory, and lists grow by doubling.
const PER_BYTE: usize = 4 * size_of::<Shape>();

/// Counts what each thread takes.
struct Counting;

thread_local! {
    static LIVE: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

fn count(taken: usize, given_back: usize) {
    // A thread that ends counts no more.
    let _ = LIVE.try_with(|live| {
        live.set(live.get().wrapping_add(taken).wrapping_sub(given_back));
        let _ = PEAK.try_with(|peak| {
            // What another thread took may be given back here: such a difference is none.
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

/// The bytes that `f` took at one time beyond what was there.
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
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// A small number, mostly; one at an edge otherwise.
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

    fn message(&mut self) -> Message {
        let group = if self.below(8) == 0 { 7 } else { group_number("dp", &all_ranks()) };
        match self.below(20) {
            0..5 => {
                // Mostly what the others have opened as well.
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
            },
            14 => Message::Broken { id: self.id(), reason: self.text() },
            15 => Message::Put { key: self.text(), value: vec![7; self.below(5000)] },
            16 | 17 => Message::Get { key: self.text() },
            18 => Message::Ended,
            _ => Message::Failed { cause: self.text() },
        }
    }

    fn notice(&mut self) -> Notice {
        let waits = |r: &mut Random| Wait { rank: r.number(), id: r.id(), waits_for: r.number() };
        let last = |r: &mut Random| LastCall { rank: r.number(), on_group: Some(r.id()), in_world: None };
        match self.below(4) {
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
                last: vec![last(self)],
            })),
        }
    }

    /// Bytes changed as a wire or somebody wicked would: flipped, cut, doubled, set to the edges of numbers.
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

/// Conversations of admitted ranks, some wicked, with a coordinator; what it tells is well-formed and for ranks of the world.
fn talk_to_the_coordinator(r: &mut Random) -> usize {
    let mut state = CoordinatorState::new(WORLD, Duration::from_secs(1));
    let mut said = 0;
    for _ in 0..1 + r.below(12) {
        let from = r.below(WORLD);
        let mut body = postcard::to_stdvec(&r.message()).expect("messages are written");
        r.mutate(&mut body);
        said += body.len();
        // As far as it can be read; several messages where bytes were doubled.
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

/// A rank that hears what nobody should tell it.
fn talk_to_a_rank(r: &mut Random) -> usize {
    let inbox = Inbox::default();
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
            // As a rank shows it.
            let shown = fault.at(CallId::new("barrier", 0, "world")).to_string();
            said += shown.len();
        }
    }
    said
}

/// Strangers at the door, with and without the secret, whose words were changed on the way and come in pieces: nobody comes in by
/// changed words.
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
        match hello.hear(&words[said..end], Some(secret)) {
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

/// Frames between admitted ranks whose bytes were changed on the way are never opened.
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
    // What stands behind a frame is the next one's.
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
