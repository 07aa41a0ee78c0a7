//! Streams that run late: their waiting tasks, and which of them may run next.

use std::collections::{HashMap, HashSet, VecDeque};

use isoshard::tensor::cuda::{CopyDirection, DriverError, Grid, Handle};

use super::program::Function;
use super::{Order, mix};

/// A task of a stream.
#[derive(Debug)]
pub enum Task {
    Launch {
        function: Function,
        grid: Grid,
        arguments: Vec<Vec<u128>>,
        order: (Order, u64),
    },
    Copy {
        direction: CopyDirection,
        to: u64,
        from: u64,
        bytes: usize,
    },
    Fill {
        at: u64,
        byte: u8,
        bytes: usize,
    },
    /// Makes this recording of an event happen.
    Record(u64),
    /// Waits for a recording.
    Wait(u64),
}

impl Task {
    /// Returns true if the task may read or write the `bytes` at `at`: one of its addresses lies there.
    fn uses(&self, at: u64, bytes: usize) -> bool {
        let inside = |address: u64| address >= at && address - at < bytes as u64;
        match self {
            Task::Launch { arguments, .. } => {
                arguments.iter().flatten().any(|&word| inside(word as u64) || inside((word >> 64) as u64))
            }
            Task::Copy { to, from, .. } => inside(*to) || inside(*from),
            Task::Fill { at: address, .. } => inside(*address),
            Task::Record(_) | Task::Wait(_) => false,
        }
    }
}

/// All streams and events of a device.
#[derive(Debug)]
pub struct Queue {
    made: u64,
    streams: HashMap<Handle, Stream>,
    /// The last recording of each event, if there is one.
    events: HashMap<Handle, Option<u64>>,
    /// Recordings that are not done, each with its stream.
    pending: HashMap<u64, Handle>,
    random: u64,
}

#[derive(Debug, Default)]
struct Stream {
    tasks: VecDeque<Task>,
    dropped: bool,
    /// The error of a task, for the next call that waits.
    failed: Option<DriverError>,
}

/// The stream that advances while one is waited for.
#[derive(Clone, Copy, PartialEq)]
pub enum Policy {
    /// Only the streams that the waiting one needs.
    Needed,
    /// Any stream that can advance.
    Any,
}

impl Queue {
    pub fn new(seed: u64) -> Queue {
        let random = mix(seed);
        Queue { made: 0, streams: HashMap::new(), events: HashMap::new(), pending: HashMap::new(), random }
    }

    pub fn reseed(&mut self, seed: u64) {
        self.random = mix(seed);
    }

    pub fn stream(&mut self) -> Handle {
        self.made += 1;
        self.streams.insert(self.made, Stream::default());
        self.made
    }

    pub fn event(&mut self) -> Handle {
        self.made += 1;
        self.events.insert(self.made, None);
        self.made
    }

    pub fn knows_stream(&self, stream: Handle) -> bool {
        self.streams.get(&stream).is_some_and(|s| !s.dropped)
    }

    pub fn knows_event(&self, event: Handle) -> bool {
        self.events.contains_key(&event)
    }

    /// Destroys a stream; its tasks still run.
    pub fn drop_stream(&mut self, stream: Handle) {
        if let Some(s) = self.streams.get_mut(&stream) {
            s.dropped = true;
        }
        self.forget_dropped();
    }

    pub fn drop_event(&mut self, event: Handle) {
        self.events.remove(&event);
    }

    /// Records an event on a stream.
    pub fn record(&mut self, event: Handle, stream: Handle) -> Task {
        self.made += 1;
        self.events.insert(event, Some(self.made));
        self.pending.insert(self.made, stream);
        Task::Record(self.made)
    }

    /// Returns the event's last recording, unless it has happened.
    pub fn recording(&self, event: Handle) -> Option<u64> {
        self.events.get(&event).copied().flatten().filter(|r| self.pending.contains_key(r))
    }

    pub fn happened(&mut self, recording: u64) {
        self.pending.remove(&recording);
    }

    pub fn put(&mut self, stream: Handle, task: Task) {
        self.streams.get_mut(&stream).expect("looked at before").tasks.push_back(task);
    }

    pub fn is_empty(&self, stream: Handle) -> bool {
        self.streams.get(&stream).is_none_or(|s| s.tasks.is_empty())
    }

    pub fn is_idle(&self) -> bool {
        self.streams.values().all(|s| s.tasks.is_empty())
    }

    /// Returns true if a waiting task uses the `bytes` at `at`.
    pub fn uses(&self, at: u64, bytes: usize) -> bool {
        self.streams.values().flat_map(|s| &s.tasks).any(|task| task.uses(at, bytes))
    }

    pub fn fail(&mut self, stream: Handle, error: DriverError) {
        if let Some(s) = self.streams.get_mut(&stream) {
            s.failed.get_or_insert(error);
        }
    }

    pub fn take_failure(&mut self, stream: Handle) -> Option<DriverError> {
        self.streams.get_mut(&stream)?.failed.take()
    }

    /// Returns the numbers of live streams and events.
    pub fn live(&self) -> (usize, usize) {
        (self.streams.values().filter(|s| !s.dropped).count(), self.events.len())
    }

    /// Draws a number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.random = mix(self.random.wrapping_add(0x9e37_79b9_7f4a_7c15));
        (self.random % n as u64) as usize
    }

    /// Takes the next task on the way to the end of `stream`, with the stream that it is on.
    pub fn next(&mut self, stream: Handle, policy: Policy) -> (Handle, Task) {
        let from = match policy {
            Policy::Needed => self.needed_by(stream),
            Policy::Any => self.any(),
        };
        let tasks = &mut self.streams.get_mut(&from).expect("a stream that can go on").tasks;
        let task = tasks.pop_front().expect("a stream that can go on");
        self.forget_dropped();
        (from, task)
    }

    /// Takes any task that can run.
    pub fn next_of_any(&mut self) -> Option<(Handle, Task)> {
        (!self.is_idle()).then(|| self.next(0, Policy::Any))
    }

    /// Returns the recording that a stream waits for.
    fn blocked(&self, stream: &Stream) -> Option<u64> {
        match stream.tasks.front() {
            Some(Task::Wait(r)) if self.pending.contains_key(r) => Some(*r),
            _ => None,
        }
    }

    fn needed_by(&self, stream: Handle) -> Handle {
        let mut at = stream;
        let mut seen = HashSet::new();
        while let Some(recording) = self.blocked(&self.streams[&at]) {
            assert!(seen.insert(at), "streams wait for each other: recordings lie before their waits");
            at = self.pending[&recording];
        }
        at
    }

    fn any(&mut self) -> Handle {
        let ready = |s: &Stream| !s.tasks.is_empty() && self.blocked(s).is_none();
        let mut ready: Vec<Handle> = self.streams.iter().filter(|(_, s)| ready(s)).map(|(h, _)| *h).collect();
        ready.sort_unstable();
        ready[self.below(ready.len())]
    }

    fn forget_dropped(&mut self) {
        self.streams.retain(|_, s| !s.dropped || !s.tasks.is_empty());
    }
}
