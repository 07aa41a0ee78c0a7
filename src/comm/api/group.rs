//! Groups of ranks. Their collectives are in `collectives.rs`.

use std::fmt;
use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;
use tracing::Span;

use super::group_threads::{GroupHandle, KnownGroups};
use crate::comm::calls::{Call, collective_span, label};
use crate::comm::diagnostics::{GroupId, RecordedCall, Recorder};
#[cfg(test)]
use crate::comm::transport::Engine;
use crate::comm::transport::{CallResults, Channel, Reduce, Request};
#[cfg(test)]
use crate::error::CallId;
use crate::error::{Error, Result};
use crate::tensor::{FoldOrder, ReduceOp, Shape, Tensor};

/// An ordered list of ranks: the members of collectives. Written `dp{0, 4, 8}`; cloning only counts a reference.
///
/// All members make the same calls in the same order. Collectives are numbered per group and compared between
/// members, so a program that breaks this rule gets an error that names the rank that differs. After a failure the
/// group cannot be used any more: every later call returns the first error.
///
/// Tensors stay on their device. All members pass tensors on devices of the same kind, and with threads on the same
/// device. No collective waits for a device, except [`Group::barrier`] over NCCL.
///
/// In the descriptions below `n` is [`Group::len`], and members are named by their index in the group. A group of one
/// never communicates. A member may overwrite a tensor as soon as the call returns: a buffer that is still in use is
/// copied first. Every collective has an `_async` variant, which returns a [`Pending`](super::Pending) and reports all errors when
/// that is waited for.
///
/// One thread of a rank calls a group: the one that made it. Calls of two threads have no order that all ranks share, so
/// results would mix. Another thread takes a group over once it has been given all its clones, those in
/// [`Rank`](super::Rank)s among them; before, its calls are refused. A thread that needs a group of its own makes one with another name.
/// A reference to a group does not cross threads:
///
/// ```compile_fail,E0277
/// isoshard::comm::spmd(2, |rank| {
///     let world = rank.world();
///     std::thread::scope(|scope| scope.spawn(|| world.barrier()).join().unwrap())
/// });
/// ```
#[derive(Clone)]
pub struct Group {
    pub(super) inner: Arc<GroupInner>,
    handle: GroupHandle,
}

pub(super) struct GroupInner {
    name: String,
    ranks: Arc<[usize]>,
    index: usize,
    pub(super) channel: Arc<dyn Channel>,
    recorder: Arc<Recorder>,
    /// The group's number in the recorder.
    recorded: GroupId,
    /// The tree by which public reductions fold, made at the first one.
    default_order: OnceLock<Arc<FoldOrder>>,
}

impl Group {
    /// Opens a group over a channel of `engine` with its own flight record; `ranks` includes the engine's rank.
    #[cfg(test)]
    pub(crate) fn open(engine: &dyn Engine, ranks: &[usize], name: &str) -> Result<Group> {
        let recorder = Recorder::alone(engine.rank(), engine.world_len());
        let known = KnownGroups::default();
        Ok(Group::over(engine.open(ranks, name)?, engine.rank(), ranks.into(), name, &recorder, &known))
    }

    /// Makes the group of `rank` over an open channel.
    pub(super) fn over(
        channel: Arc<dyn Channel>,
        rank: usize,
        ranks: Arc<[usize]>,
        name: &str,
        recorder: &Arc<Recorder>,
        known: &KnownGroups,
    ) -> Group {
        let index = ranks.iter().position(|&r| r == rank).expect("checked by the caller");
        let (recorded, recorder) = (recorder.group(name, &ranks), recorder.clone());
        let (handle, default_order) = (known.handle(name, &ranks), OnceLock::new());
        let inner =
            GroupInner { name: name.into(), ranks, index, channel, recorder, recorded, default_order };
        Group { inner: Arc::new(inner), handle }
    }

    /// Returns the number of members.
    ///
    /// ```
    /// assert_eq!(isoshard::comm::spmd(2, |rank| Ok(rank.world().len()))?, [2, 2]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    #[expect(clippy::len_without_is_empty, reason = "a group holds at least the rank that made it")]
    pub fn len(&self) -> usize {
        self.inner.ranks.len()
    }

    /// Returns this rank's index among the members.
    ///
    /// ```
    /// let indices = isoshard::comm::spmd(2, |rank| Ok(rank.group(&[1, 0], "reversed")?.index()))?;
    /// assert_eq!(indices, [1, 0]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn index(&self) -> usize {
        self.inner.index
    }

    /// Returns this rank's number in the world.
    ///
    /// ```
    /// let ranks = isoshard::comm::spmd(2, |rank| Ok(rank.group(&[1, 0], "reversed")?.rank()))?;
    /// assert_eq!(ranks, [0, 1]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn rank(&self) -> usize {
        self.inner.ranks[self.inner.index]
    }

    /// Returns the members' numbers in the world, in group order.
    ///
    /// ```
    /// let ranks = isoshard::comm::spmd(2, |rank| Ok(rank.group(&[1, 0], "reversed")?.ranks().to_vec()))?;
    /// assert_eq!(ranks[0], [1, 0]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn ranks(&self) -> &[usize] {
        &self.inner.ranks
    }

    /// Returns the name given when the group was made.
    ///
    /// ```
    /// assert_eq!(isoshard::comm::spmd(1, |rank| Ok(rank.world().name().to_string()))?, ["world"]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Returns the last calls that this rank has completed: on this group, and on any group.
    #[cfg(test)]
    pub(crate) fn last_completed(&self) -> (Option<CallId>, Option<CallId>) {
        self.inner.recorder.last(self.name(), self.ranks())
    }

    pub(super) fn start(&self, call: Call) -> Result<(Box<dyn Request>, RecordedCall)> {
        self.recorded(call, |channel, call| channel.start(call))
    }

    /// Starts a call by `start`, and records it.
    pub(super) fn recorded(
        &self,
        call: Call,
        start: impl FnOnce(&dyn Channel, Call) -> Result<Box<dyn Request>>,
    ) -> Result<(Box<dyn Request>, RecordedCall)> {
        if !self.handle.may_call() {
            return Err(self.of_another_thread(call.name));
        }
        let GroupInner { index, channel, recorder, recorded, .. } = &*self.inner;
        let ticket = recorder.start(*recorded, *index, &call);
        let span = collective_span(&call, self, *index, self.len());
        let started = span.in_scope(|| start(&**channel, call));
        ticket.has_started();
        match started {
            Ok(request) if span.is_none() => Ok((request, ticket)),
            Ok(request) => Ok((Box::new(SpannedRequest { request, span }), ticket)),
            Err(error) => Err(ticket.fail(error)),
        }
    }

    #[cold]
    fn of_another_thread(&self, verb: &str) -> Error {
        let thread = std::thread::current();
        let name = thread.name().map_or("an unnamed thread".into(), |name| format!("thread {name:?}"));
        Error::invalid(
            verb,
            "one thread of a rank calls a group, since calls of two have no order that all ranks share",
            format!("{self} on rank {}, in {name}, which does not have all clones of the group", self.rank()),
            "make a group of another name in this thread, or move the group with all its clones, those in Ranks among them",
        )
    }

    /// Returns the public reduction: one part per member, halved recursively.
    pub(super) fn default_reduce(&self, op: ReduceOp, shape: Shape) -> Reduce {
        let order = self.inner.default_order.get_or_init(|| Arc::new(FoldOrder::halving(self.len())));
        Reduce { op, order: order.clone(), shape }
    }

    /// Returns the shape of each member's part of a reduction, without allocation in groups of up to 16 members.
    pub(super) fn incoming(&self, reduce: &Reduce) -> SmallVec<[Shape; 16]> {
        (0..self.len()).map(|m| reduce.part_shape(m)).collect()
    }

    pub(super) fn check_parts(&self, verb: &str, parts: &[Tensor]) -> Result<()> {
        self.one_each(verb, "parts", parts.len())?;
        match parts.iter().find(|p| p.dtype() != parts[0].dtype()) {
            Some(other) => self.refuse(
                verb,
                "the parts' dtypes differ",
                format!("{}, {}", parts[0].notation(), other.notation()),
            ),
            None => self.check_devices(verb, parts),
        }
    }

    pub(super) fn check_devices(&self, verb: &str, parts: &[Tensor]) -> Result<()> {
        let device = parts[0].device();
        match parts.iter().find(|p| p.device() != device) {
            Some(other) => {
                let given = format!(
                    "{} on {device}, {} on {}",
                    parts[0].notation(),
                    other.notation(),
                    other.device()
                );
                self.refuse(verb, "the parts are on different devices", given)
            }
            None => Ok(()),
        }
    }

    pub(super) fn one_each(&self, verb: &str, what: &str, len: usize) -> Result<()> {
        if len == self.len() {
            return Ok(());
        }
        self.refuse(
            verb,
            &format!("the {what} are not one per member"),
            format!("{len} {what} for {} members", self.len()),
        )
    }

    pub(super) fn check_member(&self, verb: &str, index: usize) -> Result<()> {
        if index < self.len() {
            return Ok(());
        }
        self.refuse(verb, "no such member", format!("member {index} of {}", self.len()))
    }

    pub(super) fn refuse<T>(&self, verb: &str, rule: &str, given: String) -> Result<T> {
        Err(Error::invalid(
            verb,
            rule,
            given,
            format!("the group is {self}, this is member {}", self.index()),
        ))
    }
}

/// A call in flight with a span, which is entered while the rank waits.
struct SpannedRequest {
    request: Box<dyn Request>,
    span: Span,
}

impl Request for SpannedRequest {
    fn wait(self: Box<Self>) -> Result<CallResults> {
        let SpannedRequest { request, span } = *self;
        span.in_scope(|| request.wait())
    }

    fn is_ready(&self) -> bool {
        self.request.is_ready()
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&label(self.name(), self.ranks()))
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
