//! The collectives of a group.

use std::slice;

use smallvec::SmallVec;

use super::group::Group;
use super::pending::Pending;
use crate::comm::calls::{Call, Lineage, Route};
use crate::comm::transport::{CallResults, Reduce, fold};
use crate::error::Result;
use crate::tensor::{DType, ReduceOp, Shape, Tensor, short_list};

impl Group {
    /// Gathers the members' tensors on every member, in group order. `shapes[i]` is the shape of member i's tensor;
    /// shapes may differ and be empty. Each rank receives the bytes of all other members' tensors. With threads
    /// nothing is copied: the results are the peers' own tensors with their strides.
    ///
    /// ```
    /// use isoshard::comm::spmd;
    /// use isoshard::tensor::{Shape, Tensor};
    /// let gathered = spmd(2, |rank| {
    ///     let mine = Tensor::from_vec(vec![rank.rank() as i64; 1 + rank.rank()], [1 + rank.rank()])?;
    ///     let all = rank.world().all_gather(&mine, &[Shape::from([1]), Shape::from([2])])?;
    ///     Ok((all[0].to_vec::<i64>()?, all[1].to_vec::<i64>()?))
    /// })?;
    /// assert_eq!(gathered[0], (vec![0], vec![1, 1]));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses `shapes` unless it has one entry per member and this member's is the shape of `x`. Returns
    /// [`CommFault`](crate::CommFault)s.
    pub fn all_gather(&self, x: &Tensor, shapes: &[Shape]) -> Result<Vec<Tensor>> {
        self.all_gather_async(x, shapes).wait()
    }

    /// Starts [`Group::all_gather`].
    ///
    /// ```
    /// use isoshard::{comm::spmd, tensor::{Shape, Tensor}};
    /// let lens = spmd(3, |rank| {
    ///     let all = rank.world().all_gather_async(&Tensor::scalar(1i64), &vec![Shape::from([]); 3]);
    ///     Ok(all.wait()?.len())
    /// })?;
    /// assert_eq!(lens, [3, 3, 3]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn all_gather_async(&self, x: &Tensor, shapes: &[Shape]) -> Pending<Vec<Tensor>> {
        let verb = "all_gather";
        if let Err(e) = self.one_each(verb, "shapes", shapes.len()) {
            return Pending::ready(Err(e));
        }
        if *x.shape() != shapes[self.index()] {
            return Pending::ready(self.refuse(
                verb,
                "the tensor's shape is not the one announced for this member",
                format!("{}, announced {}", x.notation(), shapes[self.index()]),
            ));
        }
        if self.len() == 1 {
            return Pending::ready(Ok(vec![x.clone()]));
        }
        let call = Call {
            lineage: Lineage::current(),
            name: verb,
            route: Route::Gather,
            op: None,
            dtype: x.dtype(),
            outgoing: slice::from_ref(x),
            incoming: shapes,
        };
        Pending::running(self.start(call), |all| Ok(all.into_vec()))
    }

    /// Starts [`Group::all_gather`] of tensors of one shape, which arrive in `into`: one contiguous tensor of that shape per
    /// member, held by nothing else. Returns these. Members' tensors are copied there by the collective alone.
    pub(crate) fn all_gather_into(&self, x: &Tensor, into: Vec<Tensor>) -> Pending<Vec<Tensor>> {
        let verb = "all_gather";
        if let Err(e) = self.one_each(verb, "tensors", into.len()) {
            return Pending::ready(Err(e));
        }
        let shapes: SmallVec<[Shape; 16]> = short_list(into.iter().map(|x| x.shape().clone()));
        debug_assert!(shapes.iter().all(|shape| shape == x.shape()), "equal shapes");
        let call = Call {
            lineage: Lineage::current(),
            name: verb,
            route: Route::Gather,
            op: None,
            dtype: x.dtype(),
            outgoing: slice::from_ref(x),
            incoming: &shapes,
        };
        let started = self.recorded(call, |channel, call| channel.gather_into(call, into));
        Pending::running(started, |all| Ok(all.into_vec()))
    }

    /// Sends `parts[i]` to member i and returns the parts that the members sent to this one: the part of member i has
    /// shape `shapes[i]`. Parts may differ in shape and be empty. Each rank sends the bytes of its parts except its
    /// own. With threads nothing is copied.
    ///
    /// ```
    /// use isoshard::{comm::spmd, tensor::{Shape, Tensor}};
    /// let received = spmd(2, |rank| {
    ///     let me = rank.rank() as i64;
    ///     let parts = vec![Tensor::scalar(10 * me), Tensor::scalar(10 * me + 1)];
    ///     let parts = rank.world().all_to_all(parts, &vec![Shape::from([]); 2])?;
    ///     Ok((parts[0].item()?, parts[1].item()?))
    /// })?;
    /// assert_eq!(received, [(0.0, 10.0), (1.0, 11.0)]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses `parts` or `shapes` unless there is one per member, parts of several dtypes or devices, and a part for
    /// this member of another shape than expected. Returns [`CommFault`](crate::CommFault)s.
    pub fn all_to_all(&self, parts: Vec<Tensor>, shapes: &[Shape]) -> Result<Vec<Tensor>> {
        self.all_to_all_async(parts, shapes).wait()
    }

    /// Starts [`Group::all_to_all`].
    ///
    /// ```
    /// use isoshard::{comm::spmd, tensor::{Shape, Tensor}};
    /// spmd(2, |rank| {
    ///     let parts = vec![Tensor::scalar(rank.rank() as i64); 2];
    ///     let received = rank.world().all_to_all_async(parts, &vec![Shape::from([]); 2]).wait()?;
    ///     assert_eq!(received[1].item()?, 1.0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn all_to_all_async(&self, parts: Vec<Tensor>, shapes: &[Shape]) -> Pending<Vec<Tensor>> {
        let verb = "all_to_all";
        let checked =
            self.check_parts(verb, &parts).and_then(|()| self.one_each(verb, "shapes", shapes.len()));
        if let Err(e) = checked {
            return Pending::ready(Err(e));
        }
        let own = &parts[self.index()];
        if *own.shape() != shapes[self.index()] {
            let given = format!("{}, expected {}", own.notation(), shapes[self.index()]);
            return Pending::ready(self.refuse(
                verb,
                "this member's own part has an unexpected shape",
                given,
            ));
        }
        if self.len() == 1 {
            return Pending::ready(Ok(parts));
        }
        let call = Call {
            lineage: Lineage::current(),
            name: verb,
            route: Route::AllToAll,
            op: None,
            dtype: parts[0].dtype(),
            outgoing: &parts,
            incoming: shapes,
        };
        Pending::running(self.start(call), |all| Ok(all.into_vec()))
    }

    /// Reduces the members' parts: member i gets the reduction of every member's `parts[i]`. Part i has the same
    /// shape on all members and may be empty. The fold follows the tree over the member indices, with the same bits
    /// on every engine. Each rank sends the bytes of its parts except its own, as a ring would.
    ///
    /// ```
    /// use isoshard::{comm::spmd, tensor::{ReduceOp, Tensor}};
    /// let reduced = spmd(2, |rank| {
    ///     let me = rank.rank() as i64;
    ///     let parts = vec![Tensor::scalar(me), Tensor::scalar(me + 10)];
    ///     rank.world().reduce_scatter(parts, ReduceOp::Sum)?.item()
    /// })?;
    /// assert_eq!(reduced, [1.0, 21.0]); // 0 + 1 and 10 + 11
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses `parts` unless there is one per member, and parts of several dtypes or devices. Returns
    /// [`CommFault`](crate::CommFault)s.
    pub fn reduce_scatter(&self, parts: Vec<Tensor>, op: ReduceOp) -> Result<Tensor> {
        self.reduce_scatter_async(parts, op).wait()
    }

    /// Starts [`Group::reduce_scatter`]. [`Pending::wait`] computes the fold.
    ///
    /// ```
    /// use isoshard::{comm::spmd, tensor::{ReduceOp, Tensor}};
    /// let largest = spmd(2, |rank| {
    ///     let parts = vec![Tensor::scalar(rank.rank() as f32); 2];
    ///     rank.world().reduce_scatter_async(parts, ReduceOp::Max).wait()?.item()
    /// })?;
    /// assert_eq!(largest, [1.0, 1.0]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn reduce_scatter_async(&self, parts: Vec<Tensor>, op: ReduceOp) -> Pending<Tensor> {
        if let Err(e) = self.check_parts("reduce_scatter", &parts) {
            return Pending::ready(Err(e));
        }
        let shape = parts[self.index()].shape().clone();
        self.reduce_scatter_with(parts, self.default_reduce(op, shape))
    }

    /// Like [`Group::reduce_scatter_async`], by a given tree: members may bring several parts or none. `parts[i]`
    /// holds this member's parts for member i, and `reduce.shape` is the shape of one part for this member.
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
            lineage: Lineage::current(),
            name: verb,
            route: Route::AllToAll,
            op: Some(reduce.op),
            dtype: parts[0].dtype(),
            outgoing: &parts,
            incoming: &incoming,
        };
        Pending::running(self.recorded(call, |channel, call| channel.reduce_scatter(reduce, call)), single)
    }

    /// Reduces the members' tensors, all of one shape, and returns the result on every member. The fold follows the
    /// tree over the member indices, so all members get the same bits. Each rank sends `2 (n - 1) / n` times the
    /// bytes of `x`, or `n - 1` times if `x` is small. With threads each element is folded once, and all members
    /// share the result's buffer.
    ///
    /// ```
    /// use isoshard::{comm::spmd, tensor::{ReduceOp, Tensor}};
    /// let sums = spmd(4, |rank| {
    ///     let x = Tensor::from_vec(vec![rank.rank() as f32, 1.0], [2])?;
    ///     rank.world().all_reduce(&x, ReduceOp::Sum)?.to_vec::<f32>()
    /// })?;
    /// assert_eq!(sums, vec![[6.0, 4.0]; 4]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`CommFault`](crate::CommFault)s.
    pub fn all_reduce(&self, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        self.all_reduce_with(x, self.default_reduce(op, x.shape().clone()))
    }

    /// Like [`Group::all_reduce`], by a given tree: members may bring several parts or none.
    pub(crate) fn all_reduce_with(&self, x: &Tensor, reduce: Reduce) -> Result<Tensor> {
        self.all_reduce_with_async(x, reduce).wait()
    }

    /// Starts [`Group::all_reduce_with`]. A large one over an engine without shared memory takes two phases and is
    /// complete when this returns.
    pub(crate) fn all_reduce_with_async(&self, x: &Tensor, reduce: Reduce) -> Pending<Tensor> {
        self.all_reduce_in_phases(x, reduce).without_later_calls()
    }

    /// Starts [`Group::all_reduce`]. Without shared memory it always takes one phase, in which each rank sends `n -
    /// 1` times the bytes of `x`: if a [`Pending`] were dropped, a second phase would never start.
    ///
    /// ```
    /// use isoshard::{comm::spmd, tensor::{ReduceOp, Tensor}};
    /// let least = spmd(2, |rank| {
    ///     let x = Tensor::scalar(rank.rank() as i64 - 5);
    ///     rank.world().all_reduce_async(&x, ReduceOp::Min).wait()?.item()
    /// })?;
    /// assert_eq!(least, [-5.0, -5.0]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn all_reduce_async(&self, x: &Tensor, op: ReduceOp) -> Pending<Tensor> {
        self.start_all_reduce(x, self.default_reduce(op, x.shape().clone()))
    }

    pub(super) fn start_all_reduce(&self, x: &Tensor, reduce: Reduce) -> Pending<Tensor> {
        let x = match x.contiguous() {
            Ok(x) if self.len() == 1 => return Pending::ready(fold(&reduce, &[x])),
            Ok(x) => x,
            Err(e) => return Pending::ready(Err(e)),
        };
        let incoming = self.incoming(&reduce);
        let call = Call {
            lineage: Lineage::current(),
            name: "all_reduce",
            route: Route::Gather,
            op: Some(reduce.op),
            dtype: x.dtype(),
            outgoing: slice::from_ref(&x),
            incoming: &incoming,
        };
        Pending::running(self.recorded(call, |channel, call| channel.all_reduce(reduce, call)), single)
    }

    /// Returns the root's `x` on every member; other members' `x` is ignored. All members name the root and the dtype
    /// and shape of its tensor. The root sends the bytes of `x` at least once. With threads nothing is copied.
    ///
    /// ```
    /// use isoshard::{comm::spmd, tensor::{DType, Shape, Tensor}};
    /// let seeds = spmd(3, |rank| {
    ///     let seed = (rank.rank() == 1).then(|| Tensor::scalar(42i64));
    ///     rank.world().broadcast(seed.as_ref(), 1, DType::I64, &Shape::from([]))?.item()
    /// })?;
    /// assert_eq!(seeds, [42.0; 3]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a root that is no member, and on the root an `x` that is absent or has another dtype or shape than
    /// announced. Returns [`CommFault`](crate::CommFault)s.
    pub fn broadcast(&self, x: Option<&Tensor>, root: usize, dtype: DType, shape: &Shape) -> Result<Tensor> {
        self.broadcast_async(x, root, dtype, shape).wait()
    }

    /// Starts [`Group::broadcast`].
    ///
    /// ```
    /// use isoshard::{comm::spmd, tensor::{DType, Shape, Tensor}};
    /// let values = spmd(2, |rank| {
    ///     let mine = Tensor::scalar(rank.rank() as f64 + 0.5); // every member may pass one: the root's counts
    ///     rank.world().broadcast_async(Some(&mine), 0, DType::F64, &Shape::from([])).wait()?.item()
    /// })?;
    /// assert_eq!(values, [0.5, 0.5]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
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
            let given = x.map_or("no tensor".into(), Tensor::notation);
            return Pending::ready(self.refuse(
                verb,
                "the root's tensor is not the one announced",
                format!("{given}, announced {dtype}{shape}"),
            ));
        }
        if let (1, Some(x)) = (self.len(), x) {
            return Pending::ready(Ok(x.clone()));
        }
        let call = Call {
            lineage: Lineage::current(),
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
    /// return before the receiver has the tensor; with threads it never waits. Sends the bytes of `x`.
    ///
    /// Over NCCL a message is one of the group's calls in order and completes when both ends have come to it: if one
    /// member sends first, the other one must receive first. To exchange tensors among several members at once, use
    /// [`Group::all_to_all`].
    ///
    /// ```
    /// use isoshard::{comm::spmd, tensor::{DType, Shape, Tensor}};
    /// let received = spmd(2, |rank| {
    ///     let world = rank.world();
    ///     if rank.rank() == 0 {
    ///         world.send(&Tensor::from_vec(vec![1.0f32, 2.0], [2])?, 1)?;
    ///         return Ok(vec![]);
    ///     }
    ///     world.recv(0, DType::F32, &Shape::from([2]))?.to_vec::<f32>()
    /// })?;
    /// assert_eq!(received[1], [1.0, 2.0]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a receiver that is no member. Returns [`CommFault`](crate::CommFault)s.
    pub fn send(&self, x: &Tensor, to: usize) -> Result<()> {
        self.send_async(x, to).wait()
    }

    /// Starts [`Group::send`].
    ///
    /// ```
    /// use isoshard::{comm::spmd, tensor::{DType, Shape, Tensor}};
    /// let swapped = spmd(2, |rank| {
    ///     let (world, other) = (rank.world(), 1 - rank.rank());
    ///     let sent = world.send_async(&Tensor::scalar(rank.rank() as i64), other);
    ///     let received = world.recv(other, DType::I64, &Shape::from([]))?;
    ///     sent.wait()?;
    ///     received.item()
    /// })?;
    /// assert_eq!(swapped, [1.0, 0.0]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn send_async(&self, x: &Tensor, to: usize) -> Pending<()> {
        if let Err(e) = self.check_member("send", to) {
            return Pending::ready(Err(e));
        }
        let call = Call {
            lineage: Lineage::current(),
            name: "send",
            route: Route::Send { to },
            op: None,
            dtype: x.dtype(),
            outgoing: slice::from_ref(x),
            incoming: slice::from_ref(x.shape()),
        };
        Pending::running(self.start(call), |_| Ok(()))
    }

    /// Receives the next tensor that member `from` sends to this one.
    ///
    /// ```
    /// use isoshard::{comm::spmd, tensor::{DType, Shape, Tensor}};
    /// // Each rank adds its number to what its predecessor sends, and passes the sum on.
    /// let sums = spmd(3, |rank| {
    ///     let (world, me) = (rank.world(), rank.rank());
    ///     let before = if me == 0 { 0.0 } else { world.recv(me - 1, DType::F64, &Shape::from([]))?.item()? };
    ///     let sum = before + me as f64;
    ///     if me < 2 { world.send(&Tensor::scalar(sum), me + 1)? }
    ///     Ok(sum)
    /// })?;
    /// assert_eq!(sums, [0.0, 1.0, 3.0]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a sender that is no member. Returns [`CommFault`](crate::CommFault)s.
    pub fn recv(&self, from: usize, dtype: DType, shape: &Shape) -> Result<Tensor> {
        self.recv_async(from, dtype, shape).wait()
    }

    /// Starts [`Group::recv`].
    ///
    /// ```
    /// use isoshard::{comm::spmd, tensor::{DType, Shape, Tensor}};
    /// let echoes = spmd(1, |rank| {
    ///     let coming = rank.world().recv_async(0, DType::I64, &Shape::from([]));
    ///     rank.world().send(&Tensor::scalar(7i64), 0)?; // a rank may send to itself
    ///     coming.wait()?.item()
    /// })?;
    /// assert_eq!(echoes, [7.0]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn recv_async(&self, from: usize, dtype: DType, shape: &Shape) -> Pending<Tensor> {
        if let Err(e) = self.check_member("recv", from) {
            return Pending::ready(Err(e));
        }
        let call = Call {
            lineage: Lineage::current(),
            name: "recv",
            route: Route::Recv { from },
            op: None,
            dtype,
            outgoing: &[],
            incoming: slice::from_ref(shape),
        };
        Pending::running(self.start(call), single)
    }

    /// Waits until all members have called it. Sends no elements.
    ///
    /// ```
    /// use std::sync::atomic::{AtomicUsize, Ordering};
    /// static ARRIVED: AtomicUsize = AtomicUsize::new(0);
    /// isoshard::comm::spmd(3, |rank| {
    ///     ARRIVED.fetch_add(1, Ordering::SeqCst);
    ///     rank.world().barrier()?;
    ///     assert_eq!(ARRIVED.load(Ordering::SeqCst), 3);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`CommFault`](crate::CommFault)s.
    pub fn barrier(&self) -> Result<()> {
        self.barrier_async().wait()
    }

    /// Starts [`Group::barrier`].
    ///
    /// ```
    /// isoshard::comm::spmd(2, |rank| {
    ///     let barrier = rank.world().barrier_async();
    ///     // ... work that needs no other rank ...
    ///     barrier.wait()
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn barrier_async(&self) -> Pending<()> {
        if self.len() == 1 {
            return Pending::ready(Ok(()));
        }
        let call = Call {
            lineage: Lineage::current(),
            name: "barrier",
            route: Route::Barrier,
            op: None,
            dtype: DType::U8,
            outgoing: &[],
            incoming: &[],
        };
        Pending::running(self.start(call), |_| Ok(()))
    }
}

fn single(mut parts: CallResults) -> Result<Tensor> {
    Ok(parts.pop().expect("the engine returns one tensor for this route"))
}
