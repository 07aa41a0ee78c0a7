//! A group of ranks and the collectives its members call together.

use std::fmt;
use std::slice;
use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;

use super::pending::Pending;
use crate::comm::calls::{Call, Route, label};
use crate::comm::diagnostics::{GroupId, RecordedCall, Recorder};
#[cfg(test)]
use crate::comm::transport::Engine;
use crate::comm::transport::{Channel, Reduce, Request, Tensors, fold};
#[cfg(test)]
use crate::error::CallId;
use crate::error::{Error, Result};
use crate::tensor::{DType, FoldOrder, ReduceOp, Shape, Tensor};

/// From so many bytes on that all members' tensors are beyond what two phases bring, an all-reduce over an engine without
/// shared memory is a reduce-scatter and an all-gather.
const TWO_PHASE_BYTES: usize = 64 << 10;

/// Some ranks in an order: the members of collectives. Written `dp{0, 4, 8}`; cloning shares it.
///
/// All members make the same calls in the same order. The collectives are numbered per group, and what the
/// members bring is compared, so a program that breaks the rule gets an error that names who differs. After one
/// failure the group is out of use: every later call returns the first error.
///
/// Tensors stay on the device where they are: all members bring theirs on one device of the same kind, and with threads on
/// the same one. Nothing here waits for a device but [`Group::barrier`] over NCCL.
///
/// Below, `n` is [`Group::len`], members are named by their index in the group, and a group of one never
/// communicates. The tensors a member gives may be written by it at once: they are copied first if still in use.
/// Every method comes blocking and as an `_async` twin, which reports all errors when it is waited for.
#[derive(Clone)]
pub struct Group {
    inner: Arc<GroupInner>,
}

struct GroupInner {
    name: String,
    ranks: Arc<[usize]>,
    index: usize,
    channel: Arc<dyn Channel>,
    recorder: Arc<Recorder>,
    /// The group in the recorder.
    recorded: GroupId,
    /// The order of ordinary reductions, made at the first.
    default_order: OnceLock<Arc<FoldOrder>>,
}

impl Group {
    /// The group over a channel of `engine`, with a record of its own; `ranks` holds the engine's rank.
    #[cfg(test)]
    pub(crate) fn open(engine: &dyn Engine, ranks: &[usize], name: &str) -> Result<Group> {
        let recorder = Recorder::alone(engine.rank(), engine.world_len());
        Ok(Group::over(engine.open(ranks, name)?, &recorder, engine.rank(), (ranks, name)))
    }

    /// The group of `rank` over an open channel.
    pub(crate) fn over(
        channel: Arc<dyn Channel>,
        recorder: &Arc<Recorder>,
        rank: usize,
        (ranks, name): (&[usize], &str),
    ) -> Group {
        let index = ranks.iter().position(|&r| r == rank).expect("checked by the caller");
        let ranks: Arc<[usize]> = ranks.into();
        let (recorded, recorder) = (recorder.group(name, &ranks), recorder.clone());
        let default_order = OnceLock::new();
        let inner =
            GroupInner { name: name.into(), ranks, index, channel, recorder, recorded, default_order };
        Group { inner: Arc::new(inner) }
    }

    /// The number of members.
    #[expect(clippy::len_without_is_empty, reason = "a group holds at least the rank that made it")]
    pub fn len(&self) -> usize {
        self.inner.ranks.len()
    }

    /// This rank's index among the members.
    pub fn index(&self) -> usize {
        self.inner.index
    }

    /// This rank's number in the world.
    pub fn rank(&self) -> usize {
        self.inner.ranks[self.inner.index]
    }

    /// The members' numbers in the world, in group order.
    pub fn ranks(&self) -> &[usize] {
        &self.inner.ranks
    }

    /// The name given when the group was made.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Everyone's tensor, in group order: `shapes[i]` is the shape of member i's, which may differ and be empty.
    /// Each rank receives the bytes of all the others' tensors. With threads nothing is copied: the results are the
    /// peers' own tensors, with whatever strides they have.
    ///
    /// # Errors
    /// Refuses `shapes` that is not one per member or not `x`'s at this one; [`CommFault`](crate::CommFault)s.
    pub fn all_gather(&self, x: &Tensor, shapes: &[Shape]) -> Result<Vec<Tensor>> {
        self.all_gather_async(x, shapes).wait()
    }

    /// Starts [`Group::all_gather`].
    pub fn all_gather_async(&self, x: &Tensor, shapes: &[Shape]) -> Pending<Vec<Tensor>> {
        let verb = "all_gather";
        if let Err(e) = self.one_each(verb, "shapes", shapes.len()) {
            return Pending::ready(Err(e));
        }
        if *x.shape() != shapes[self.index()] {
            return Pending::ready(self.refuse(
                verb,
                "the tensor's shape is not the one announced for this member",
                format!("{x}, announced {}", shapes[self.index()]),
            ));
        }
        if self.len() == 1 {
            return Pending::ready(Ok(vec![x.clone()]));
        }
        let call = Call {
            name: verb,
            route: Route::Gather,
            op: None,
            dtype: x.dtype(),
            outgoing: slice::from_ref(x),
            incoming: shapes,
        };
        Pending::running(self.start(call), |all| Ok(all.into_vec()))
    }

    /// Sends `parts[i]` to member i, and returns what the members sent here: from member i a tensor of shape
    /// `shapes[i]`. Parts may differ in shape and be empty. Each rank sends the bytes of its parts but its own. With
    /// threads nothing is copied.
    ///
    /// # Errors
    /// Refuses `parts` or `shapes` that are not one per member, parts of several dtypes or devices, and an own part that has
    /// not the expected shape; [`CommFault`](crate::CommFault)s.
    pub fn all_to_all(&self, parts: Vec<Tensor>, shapes: &[Shape]) -> Result<Vec<Tensor>> {
        self.all_to_all_async(parts, shapes).wait()
    }

    /// Starts [`Group::all_to_all`].
    pub fn all_to_all_async(&self, parts: Vec<Tensor>, shapes: &[Shape]) -> Pending<Vec<Tensor>> {
        let verb = "all_to_all";
        let checked =
            self.check_parts(verb, &parts).and_then(|()| self.one_each(verb, "shapes", shapes.len()));
        if let Err(e) = checked {
            return Pending::ready(Err(e));
        }
        let own = &parts[self.index()];
        if *own.shape() != shapes[self.index()] {
            let given = format!("{own}, expected {}", shapes[self.index()]);
            return Pending::ready(self.refuse(verb, "the own part has not the expected shape", given));
        }
        if self.len() == 1 {
            return Pending::ready(Ok(parts));
        }
        let call = Call {
            name: verb,
            route: Route::AllToAll,
            op: None,
            dtype: parts[0].dtype(),
            outgoing: &parts,
            incoming: shapes,
        };
        Pending::running(self.start(call), |all| Ok(all.into_vec()))
    }

    /// The reduction of everybody's `parts[me]`: part i belongs to member i, has there one shape on all members, and
    /// may be empty. Folded by the tree over the member indices: the same bits on every engine. Each rank sends the
    /// bytes of its parts but its own, as a ring would.
    ///
    /// # Errors
    /// Refuses parts that are not one per member, or of several dtypes or devices; [`CommFault`](crate::CommFault)s.
    pub fn reduce_scatter(&self, parts: Vec<Tensor>, op: ReduceOp) -> Result<Tensor> {
        self.reduce_scatter_async(parts, op).wait()
    }

    /// Starts [`Group::reduce_scatter`]. The fold is done by [`Pending::wait`].
    pub fn reduce_scatter_async(&self, parts: Vec<Tensor>, op: ReduceOp) -> Pending<Tensor> {
        if let Err(e) = self.check_parts("reduce_scatter", &parts) {
            return Pending::ready(Err(e));
        }
        let shape = parts[self.index()].shape().clone();
        self.reduce_scatter_with(parts, self.default_reduce(op, shape))
    }

    /// As [`Group::reduce_scatter_async`], where members bring several parts, or none, which are folded in an order of
    /// their own: `parts[i]` is this member's part for member i, and `reduce.shape` that of a part for this member.
    pub(crate) fn reduce_scatter_with(&self, mut parts: Vec<Tensor>, reduce: Reduce) -> Pending<Tensor> {
        let verb = "reduce_scatter";
        if let Err(e) = self.check_parts(verb, &parts) {
            return Pending::ready(Err(e));
        }
        if self.len() == 1 {
            return Pending::ready(parts.remove(0).contiguous().and_then(|x| fold(&reduce, &[x])));
        }
        for part in &mut parts {
            match part.contiguous() {
                Ok(packed) => *part = packed,
                Err(e) => return Pending::ready(Err(e)),
            }
        }
        let incoming = self.incoming(&reduce);
        let call = Call {
            name: verb,
            route: Route::AllToAll,
            op: Some(reduce.op),
            dtype: parts[0].dtype(),
            outgoing: &parts,
            incoming: &incoming,
        };
        Pending::running(self.recorded(call, |channel, call| channel.reduce_scatter(reduce, call)), single)
    }

    /// The reduction of everybody's `x`, of one shape, on every member: folded by the tree over the member indices,
    /// so all get the same bits. Each rank sends `2 (n - 1) / n` times the bytes of `x`, or `n - 1` times where `x` is
    /// small. With threads each element is folded once, and all members share the result's buffer.
    ///
    /// # Errors
    /// [`CommFault`](crate::CommFault)s.
    pub fn all_reduce(&self, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        self.all_reduce_with(x, self.default_reduce(op, x.shape().clone()))
    }

    /// As [`Group::all_reduce`], where members bring several parts, or none, which are folded in an order of their own.
    pub(crate) fn all_reduce_with(&self, x: &Tensor, reduce: Reduce) -> Result<Tensor> {
        self.all_reduce_with_async(x, reduce).wait()
    }

    /// As [`Group::all_reduce_with`], on its way where it takes one phase; one that takes two is done when this returns.
    pub(crate) fn all_reduce_with_async(&self, x: &Tensor, reduce: Reduce) -> Pending<Tensor> {
        let bytes = reduce.out_shape().numel() * x.dtype().size_bytes();
        // One phase brings n - 1 times the tensor, two bring 2 (n - 1) / n times it; among few they still share the folding.
        let spared = bytes * ((self.len() - 1) * self.len().saturating_sub(2) / self.len()).max(1);
        if spared >= TWO_PHASE_BYTES && self.len() > 1 && !self.inner.channel.reduces_well() {
            return Pending::ready(self.all_reduce_two_phase(x, &reduce));
        }
        self.start_all_reduce(x, reduce)
    }

    /// Starts [`Group::all_reduce`]. Without shared memory each rank sends `n - 1` times the bytes of `x`: a second
    /// phase would never come if this one were dropped.
    pub fn all_reduce_async(&self, x: &Tensor, op: ReduceOp) -> Pending<Tensor> {
        self.start_all_reduce(x, self.default_reduce(op, x.shape().clone()))
    }

    fn start_all_reduce(&self, x: &Tensor, reduce: Reduce) -> Pending<Tensor> {
        let x = match x.contiguous() {
            Ok(x) if self.len() == 1 => return Pending::ready(fold(&reduce, &[x])),
            Ok(x) => x,
            Err(e) => return Pending::ready(Err(e)),
        };
        let incoming = self.incoming(&reduce);
        let call = Call {
            name: "all_reduce",
            route: Route::Gather,
            op: Some(reduce.op),
            dtype: x.dtype(),
            outgoing: slice::from_ref(&x),
            incoming: &incoming,
        };
        Pending::running(self.recorded(call, |channel, call| channel.all_reduce(reduce, call)), single)
    }

    /// The root's `x` on every member; the others' is ignored. All name the root, and the dtype and shape that will
    /// come. The root sends the bytes of `x`, at least once. With threads nothing is copied.
    ///
    /// # Errors
    /// Refuses a root that is no member, and on the root, an `x` that is absent or not as announced;
    /// [`CommFault`](crate::CommFault)s.
    pub fn broadcast(&self, x: Option<&Tensor>, root: usize, dtype: DType, shape: &Shape) -> Result<Tensor> {
        self.broadcast_async(x, root, dtype, shape).wait()
    }

    /// Starts [`Group::broadcast`].
    pub fn broadcast_async(
        &self,
        x: Option<&Tensor>,
        root: usize,
        dtype: DType,
        shape: &Shape,
    ) -> Pending<Tensor> {
        let verb = "broadcast";
        if let Err(e) = self.check_member(verb, root) {
            return Pending::ready(Err(e));
        }
        let x = x.filter(|_| root == self.index());
        if root == self.index() && x.is_none_or(|x| x.dtype() != dtype || x.shape() != shape) {
            let given = x.map_or("no tensor".into(), Tensor::to_string);
            return Pending::ready(self.refuse(
                verb,
                "the root has not what is announced",
                format!("{given}, announced {dtype}{shape}"),
            ));
        }
        if let (1, Some(x)) = (self.len(), x) {
            return Pending::ready(Ok(x.clone()));
        }
        let call = Call {
            name: verb,
            route: Route::Broadcast { root },
            op: None,
            dtype,
            outgoing: x.map_or(&[], slice::from_ref),
            incoming: slice::from_ref(shape),
        };
        Pending::running(self.start(call), single)
    }

    /// Sends `x` to one member, which calls [`Group::recv`]. Messages between two members keep their order. May
    /// return before the receiver has it; with threads it never waits. Sends the bytes of `x`.
    ///
    /// Over NCCL a message takes its turn among this group's calls and is done when both ends have come to it: where one
    /// member sends first, the other receives first. An exchange among several at once is [`Group::all_to_all`].
    ///
    /// # Errors
    /// Refuses a receiver that is no member; [`CommFault`](crate::CommFault)s.
    pub fn send(&self, x: &Tensor, to: usize) -> Result<()> {
        self.send_async(x, to).wait()
    }

    /// Starts [`Group::send`].
    pub fn send_async(&self, x: &Tensor, to: usize) -> Pending<()> {
        if let Err(e) = self.check_member("send", to) {
            return Pending::ready(Err(e));
        }
        let call = Call {
            name: "send",
            route: Route::Send { to },
            op: None,
            dtype: x.dtype(),
            outgoing: slice::from_ref(x),
            incoming: slice::from_ref(x.shape()),
        };
        Pending::running(self.start(call), |_| Ok(()))
    }

    /// The next tensor that member `from` sends here.
    ///
    /// # Errors
    /// Refuses a sender that is no member; [`CommFault`](crate::CommFault)s.
    pub fn recv(&self, from: usize, dtype: DType, shape: &Shape) -> Result<Tensor> {
        self.recv_async(from, dtype, shape).wait()
    }

    /// Starts [`Group::recv`].
    pub fn recv_async(&self, from: usize, dtype: DType, shape: &Shape) -> Pending<Tensor> {
        if let Err(e) = self.check_member("recv", from) {
            return Pending::ready(Err(e));
        }
        let call = Call {
            name: "recv",
            route: Route::Recv { from },
            op: None,
            dtype,
            outgoing: &[],
            incoming: slice::from_ref(shape),
        };
        Pending::running(self.start(call), single)
    }

    /// Waits until all members have come. Sends no elements.
    ///
    /// # Errors
    /// [`CommFault`](crate::CommFault)s.
    pub fn barrier(&self) -> Result<()> {
        self.barrier_async().wait()
    }

    /// Starts [`Group::barrier`].
    pub fn barrier_async(&self) -> Pending<()> {
        if self.len() == 1 {
            return Pending::ready(Ok(()));
        }
        let call = Call {
            name: "barrier",
            route: Route::Barrier,
            op: None,
            dtype: DType::U8,
            outgoing: &[],
            incoming: &[],
        };
        Pending::running(self.start(call), |_| Ok(()))
    }

    /// A reduce-scatter of the flat elements, then an all-gather: the bytes of a ring, the bits of one fold.
    fn all_reduce_two_phase(&self, x: &Tensor, reduce: &Reduce) -> Result<Tensor> {
        let (each, outs) = (reduce.shape.numel(), reduce.order.outs_len());
        let flat = x.reshape([reduce.order.nodes()[self.index()], each])?;
        let chunk = each.div_ceil(self.len());
        let start = |i: usize| (i * chunk).min(each);
        let len = |i: usize| start(i + 1) - start(i);
        let of = |i: usize| Reduce { shape: [len(i)].into(), ..reduce.clone() };
        let part = |i: usize| flat.narrow(1, start(i), len(i))?.reshape(of(i).part_shape(self.index()));
        let parts: Result<Vec<Tensor>> = (0..self.len()).map(part).collect();
        let mine =
            self.reduce_scatter_with(parts?, of(self.index())).wait()?.reshape([outs, len(self.index())])?;
        let shapes: Vec<Shape> = (0..self.len()).map(|i| Shape::from([outs, len(i)])).collect();
        let chunks = self.all_gather(&mine, &shapes)?;
        let mut out = Tensor::uninit_on(x.device(), x.dtype(), [outs, each])?;
        for (i, chunk) in chunks.iter().enumerate() {
            chunk.copy_block(&mut out, chunk.shape(), (0, chunk.strides()), (start(i), &[each, 1]))?;
        }
        out.reshape(reduce.out_shape())
    }

    /// The last calls that this rank has completed: on this group, and at all.
    #[cfg(test)]
    pub(crate) fn last_completed(&self) -> (Option<CallId>, Option<CallId>) {
        self.inner.recorder.last(self.name(), self.ranks())
    }

    fn start(&self, call: Call) -> Result<(Box<dyn Request>, RecordedCall)> {
        self.recorded(call, |channel, call| channel.start(call))
    }

    /// Starts a call by `start`, and writes it down.
    fn recorded(
        &self,
        call: Call,
        start: impl FnOnce(&dyn Channel, Call) -> Result<Box<dyn Request>>,
    ) -> Result<(Box<dyn Request>, RecordedCall)> {
        let GroupInner { index, channel, recorder, recorded, .. } = &*self.inner;
        let ticket = recorder.start(*recorded, *index, &call);
        match start(&**channel, call) {
            Ok(request) => Ok((request, ticket)),
            Err(error) => Err(ticket.fail(error)),
        }
    }

    /// The ordinary reduction of one part from each member.
    fn default_reduce(&self, op: ReduceOp, shape: Shape) -> Reduce {
        let order = self.inner.default_order.get_or_init(|| Arc::new(FoldOrder::halving(self.len())));
        Reduce { op, order: order.clone(), shape }
    }

    /// The shapes of what the members bring to a reduction; no allocation in groups of ordinary size.
    fn incoming(&self, reduce: &Reduce) -> SmallVec<[Shape; 16]> {
        (0..self.len()).map(|m| reduce.part_shape(m)).collect()
    }

    fn check_parts(&self, verb: &str, parts: &[Tensor]) -> Result<()> {
        self.one_each(verb, "parts", parts.len())?;
        match parts.iter().find(|p| p.dtype() != parts[0].dtype()) {
            Some(other) => self.refuse(verb, "the parts' dtypes differ", format!("{}, {other}", parts[0])),
            None => self.check_devices(verb, parts),
        }
    }

    fn check_devices(&self, verb: &str, parts: &[Tensor]) -> Result<()> {
        let device = parts[0].device();
        match parts.iter().find(|p| p.device() != device) {
            Some(other) => {
                let given = format!("{} on {device}, {other} on {}", parts[0], other.device());
                self.refuse(verb, "the parts lie on different devices", given)
            }
            None => Ok(()),
        }
    }

    fn one_each(&self, verb: &str, what: &str, len: usize) -> Result<()> {
        if len == self.len() {
            return Ok(());
        }
        self.refuse(
            verb,
            &format!("the {what} are not one per member"),
            format!("{len} {what} for {} members", self.len()),
        )
    }

    fn check_member(&self, verb: &str, index: usize) -> Result<()> {
        if index < self.len() {
            return Ok(());
        }
        self.refuse(verb, "no such member", format!("member {index} of {}", self.len()))
    }

    fn refuse<T>(&self, verb: &str, rule: &str, given: String) -> Result<T> {
        Err(Error::invalid(
            verb,
            rule,
            given,
            format!("the group is {self}, this is member {}", self.index()),
        ))
    }
}

fn single(mut parts: Tensors) -> Result<Tensor> {
    Ok(parts.pop().expect("the engine returns one tensor for this route"))
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
