//! The bridge: exchanges that are planned once, and transfers in flight.

use std::fmt;
use std::rc::Rc;

use super::batch::Batch;
use super::bridge_piece::BridgePiece;
use super::routing::Routing;
use super::transfer::Transfer;
use crate::comm::{Group, Lineage, ModulePath, Pending, Rank};
use crate::dtensor::{DTensor, DeviceMesh};
use crate::error::{Error, Result};
use crate::placement::{Layout, Mesh};
use crate::tensor::{Shape, Tensor};

/// A plan for moving tensors from one mesh to another, used any number of times. It stays on its rank's thread.
///
/// All ranks of both meshes create it with the same arguments, and call [`Bridge::send`] together. Besides its shards
/// on both meshes, a rank needs at most one packed copy of what it sends.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{Bridge, DTensor, DeviceMesh, Transfer}, placement::{Layout, Mesh, short::{R, shard}}};
/// use isoshard::tensor::{DType, Tensor};
/// spmd(4, |rank| {
///     // Ranks 0 to 2 train; ranks 2 and 3 generate. Every rank can create both meshes' metadata.
///     let (train, generate) = (Mesh::over(&[("fsdp", 3)], 0..3)?, Mesh::over(&[("tp", 2)], 2..4)?);
///     let weight = Transfer::new(DType::F32, [5, 4], Layout::new([shard(0)]), Layout::new([shard(1)]));
///     let bridge = Bridge::new(&rank, &train, &generate, [weight])?;
///
///     let mut weights = Vec::new();
///     if train.contains(rank.rank()) {
///         let mesh = DeviceMesh::on(&rank, &train)?;
///         weights.push(DTensor::full(&mesh, DType::F32, [5, 4], Layout::new([shard(0)]), 0.5)?);
///     }
///     let there = generate.contains(rank.rank()).then(|| DeviceMesh::on(&rank, &generate)).transpose()?;
///     let arrived = bridge.send(&weights, there.as_ref())?;
///     if let Some(weight) = arrived.first() {
///         assert_eq!(weight.spec().to_string(), "f32[5, 4]@(tp:S1)");
///         assert_eq!(weight.sum_all()?.item()?, 10.0);
///     }
///     // Rank 2 already held one row of its two columns.
///     assert_eq!(bridge.received_bytes(), [0, 0, 4 * 2 * 4, 5 * 2 * 4][rank.rank()]);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
pub struct Bridge {
    plan: Rc<BridgePlan>,
}

/// The plan that a bridge and its transfers in flight share.
struct BridgePlan {
    rank: Rank,
    from: Mesh,
    to: Mesh,
    /// The ranks of either mesh, ascending.
    group: Group,
    tensors: Vec<PlannedTensor>,
    batches: Vec<Batch>,
}

/// A planned transfer, as this rank sees it.
struct PlannedTensor {
    transfer: Transfer,
    /// The layout in which it is sent.
    source_layout: Layout,
    /// The shape of this rank's shard on the target mesh, if it has one.
    out: Option<Shape>,
    keep: Option<BridgePiece>,
    stays: bool,
}

impl Bridge {
    /// Plans the transfers from one mesh to the other. With threads it communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{Bridge, DTensor, DeviceMesh, Transfer}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let transfer = Transfer::new(DType::F32, [4, 2], "(S0)".parse()?, "(S1)".parse()?);
    ///     let bridge = Bridge::new(&rank, mesh.mesh(), mesh.mesh(), [transfer])?;
    ///
    ///     assert_eq!(bridge.to_string(), "(dp=2) over {0, 1} to (dp=2) over {0, 1}: 1 tensor(s) in 1 exchange(s), \
    ///         sends 8 bytes and receives 8");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a mesh with a rank that is not in the world, a `rank` that is in neither mesh, layouts that do not
    /// fit, and a `Partial` target layout. Returns an error if communication fails.
    pub fn new(
        rank: &Rank,
        from: &Mesh,
        to: &Mesh,
        transfers: impl IntoIterator<Item = Transfer>,
    ) -> Result<Bridge> {
        let group = joint_group(rank, from, to)?;
        let (mut tensors, mut batches) = (Vec::new(), Vec::new());
        for (i, transfer) in transfers.into_iter().enumerate() {
            let (src, dst) = transfer.specs(from, to)?;
            let Routing { give, take, keep, stays } = Routing::new(&src, &dst, rank.rank(), i);
            let batch = Batch::of(&mut batches, &transfer);
            let member = |rank: usize| group.ranks().binary_search(&rank).expect("a rank of either mesh");
            let k = batch.tensors.len();
            batch.tensors.push(i);
            give.into_iter()
                .for_each(|(to, piece)| batch.give.entry(member(to)).or_default().push((k, piece)));
            take.into_iter()
                .for_each(|(from, piece)| batch.take.entry(member(from)).or_default().push((k, piece)));
            let out = to.coords_of(rank.rank()).map(|coords| dst.local_shape_at(&coords));
            tensors.push(PlannedTensor { transfer, source_layout: src.layout, out, keep, stays });
        }
        let plan =
            BridgePlan { rank: rank.clone(), from: from.clone(), to: to.clone(), group, tensors, batches };
        Ok(Bridge { plan: Rc::new(plan) })
    }

    /// Sends one tensor per planned transfer, in order, and returns the tensors on the target mesh. They have no
    /// history: gradients do not flow back. A rank outside the source mesh passes no tensors. `onto` is the target
    /// mesh; a rank outside it passes `None` and receives an empty list.
    ///
    /// Each rank receives [`Bridge::received_bytes`]. A `Partial` tensor is first reduce-scattered on the source
    /// mesh.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{Bridge, DTensor, DeviceMesh, Transfer}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let transfer = Transfer::new(DType::F32, [4, 2], "(S0)".parse()?, "(S1)".parse()?);
    ///     let bridge = Bridge::new(&rank, mesh.mesh(), mesh.mesh(), [transfer])?;
    ///     let x = DTensor::full(&mesh, DType::F32, [4, 2], "(S0)", 0.5)?;
    ///
    ///     let arrived = bridge.send([&x], Some(&mesh))?;
    ///     assert_eq!(arrived[0].spec().to_string(), "f32[4, 2]@(dp:S1)");
    ///     assert_eq!(arrived[0].local().to_vec::<f32>()?, [0.5; 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses tensors that are not as planned, and a mesh other than the planned one, on the rank that passes them.
    /// Returns an error if communication fails.
    pub fn send<'a>(
        &self,
        tensors: impl IntoIterator<Item = &'a DTensor>,
        onto: Option<&DeviceMesh>,
    ) -> Result<Vec<DTensor>> {
        self.send_async(tensors, onto)?.wait()
    }

    /// Starts [`Bridge::send`]; other work can run before [`PendingTransfer::wait`]. It returns at once, unless a `Partial`
    /// tensor has to be reduced, for which it waits. While a transfer is in flight, a rank of the source mesh that
    /// writes to a sent tensor in place writes to a copy.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{Bridge, DTensor, DeviceMesh, Transfer}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let transfer = Transfer::new(DType::F32, [4, 2], "(S0)".parse()?, "(S1)".parse()?);
    ///     let bridge = Bridge::new(&rank, mesh.mesh(), mesh.mesh(), [transfer])?;
    ///     let x = DTensor::full(&mesh, DType::F32, [4, 2], "(S0)", 0.5)?;
    ///
    ///     let transit = bridge.send_async([&x], Some(&mesh))?;
    ///     let doubled = x.mul_scalar(2.0)?; // runs while the transfer is in flight
    ///     assert_eq!(transit.wait()?[0].full_tensor()?.to_vec::<f32>()?, [0.5; 8]);
    ///     assert_eq!(doubled.local().to_vec::<f32>()?, [1.0; 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Bridge::send`] refuses.
    pub fn send_async<'a>(
        &self,
        tensors: impl IntoIterator<Item = &'a DTensor>,
        onto: Option<&DeviceMesh>,
    ) -> Result<PendingTransfer> {
        let tensors: Vec<&DTensor> = tensors.into_iter().collect();
        self.plan.check(&tensors, onto)?;
        let planned = tensors.iter().zip(&self.plan.tensors);
        let locals: Vec<Tensor> =
            planned.map(|(x, planned)| planned.source_part(x)).collect::<Result<_>>()?;
        let BridgePlan { rank, group, batches, .. } = &*self.plan;
        let exchanges = batches.iter().map(|batch| {
            let edges = batch.tensors.iter().map(|&i| self.plan.tensors[i].transfer.lineage());
            let _lineage = Lineage::of_all(edges).enter();
            batch.start(group, rank.device(), &locals)
        });
        let exchanges = exchanges.collect::<Result<_>>()?;
        Ok(PendingTransfer { plan: self.plan.clone(), locals, exchanges, onto: onto.cloned() })
    }

    /// Returns the number of bytes that this rank receives from other ranks per send: those of its target shards that
    /// it lacks.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{Bridge, DeviceMesh, Transfer}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let transfer = Transfer::new(DType::F32, [4, 2], "(S0)".parse()?, "(S1)".parse()?);
    ///     let bridge = Bridge::new(&rank, mesh.mesh(), mesh.mesh(), [transfer])?;
    ///
    ///     assert_eq!(bridge.received_bytes(), 2 * 4); // half of its column
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn received_bytes(&self) -> u64 {
        self.plan.batches.iter().map(|batch| batch.received_bytes()).sum()
    }

    /// Returns the number of bytes that this rank sends to other ranks per send.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{Bridge, DeviceMesh, Transfer}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let transfer = Transfer::new(DType::F32, [4, 2], "(S0)".parse()?, "(S1)".parse()?);
    ///     let bridge = Bridge::new(&rank, mesh.mesh(), mesh.mesh(), [transfer])?;
    ///
    ///     assert_eq!(bridge.sent_bytes(), 2 * 4);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn sent_bytes(&self) -> u64 {
        self.plan.batches.iter().map(|batch| batch.sent_bytes()).sum()
    }
}

/// Displays `(fsdp=3) over {0, 1, 2} to (tp=2) over {2, 3}: 1 tensor(s) in 1 exchange(s), sends 8 bytes and receives 32`.
impl fmt::Display for Bridge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BridgePlan { from, to, tensors, batches, .. } = &*self.plan;
        write!(f, "{} to {}: ", from.with_ranks(), to.with_ranks())?;
        write!(f, "{} tensor(s) in {} exchange(s), ", tensors.len(), batches.len())?;
        write!(f, "sends {} bytes and receives {}", self.sent_bytes(), self.received_bytes())
    }
}

impl fmt::Debug for Bridge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Tensors in flight over a [`Bridge`], from [`Bridge::send_async`]. Dropping it is safe.
#[must_use = "a transfer's errors are lost unless it is waited for"]
pub struct PendingTransfer {
    plan: Rc<BridgePlan>,
    locals: Vec<Tensor>,
    exchanges: Vec<Pending<Vec<Tensor>>>,
    onto: Option<DeviceMesh>,
}

impl PendingTransfer {
    /// Waits for the tensors, and returns them on the target mesh; an empty list on ranks outside it.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{Bridge, DTensor, DeviceMesh, Transfer}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let transfer = Transfer::new(DType::F32, [4, 2], "(S0)".parse()?, "(S1)".parse()?);
    ///     let bridge = Bridge::new(&rank, mesh.mesh(), mesh.mesh(), [transfer])?;
    ///     let x = DTensor::full(&mesh, DType::F32, [4, 2], "(S0)", 0.5)?;
    ///
    ///     assert_eq!(bridge.send_async([&x], Some(&mesh))?.wait()?.len(), 1);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if communication fails.
    pub fn wait(self) -> Result<Vec<DTensor>> {
        let mut arrived: Vec<Option<DTensor>> = self.plan.tensors.iter().map(|_| None).collect();
        self.wait_each(|i, x| {
            arrived[i] = Some(x);
            Ok(())
        })?;
        Ok(arrived.into_iter().flatten().collect())
    }

    /// Waits for the tensors, and calls `f` with each, and with its index among the planned ones, as it completes. A
    /// caller that replaces older tensors one by one never holds both sets whole.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{Bridge, DTensor, DeviceMesh, Transfer}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let transfer = Transfer::new(DType::F32, [4, 2], "(S0)".parse()?, "(S1)".parse()?);
    ///     let bridge = Bridge::new(&rank, mesh.mesh(), mesh.mesh(), [transfer])?;
    ///     let x = DTensor::full(&mesh, DType::F32, [4, 2], "(S0)", 0.5)?;
    ///
    ///     let mut weights = [x.clone()];
    ///     bridge.send_async([&x], Some(&mesh))?.wait_each(|i, weight| {
    ///         weights[i] = weight;
    ///         Ok(())
    ///     })?;
    ///     assert_eq!(weights[0].layout().to_string(), "(S1)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error of `f`, and an error if communication fails.
    pub fn wait_each(self, mut f: impl FnMut(usize, DTensor) -> Result<()>) -> Result<()> {
        let PendingTransfer { plan, locals, exchanges, onto } = self;
        for (batch, exchange) in plan.batches.iter().zip(exchanges) {
            let mut arrivals: Vec<Option<Tensor>> = batch.tensors.iter().map(|_| None).collect();
            let mut received = 0;
            for (member, received_part) in exchange.wait()?.into_iter().enumerate() {
                let Some(pieces) = batch.take.get(&member) else { continue };
                received += received_part.len_bytes() as u64;
                plan.place_received((batch, pieces), received_part, &locals, &mut arrivals)?;
            }
            let Some(onto) = &onto else { continue };
            onto.0.moved_bytes.set(onto.0.moved_bytes.get() + received);
            for (&i, arrived) in batch.tensors.iter().zip(arrivals) {
                let Transfer { dtype, shape, to, .. } = &plan.tensors[i].transfer;
                let local = arrived.map_or_else(|| plan.new_part(i, &locals), Ok)?;
                let lineage = plan.tensors[i].transfer.lineage();
                f(i, DTensor::wrap(onto, local, onto.meta(*dtype, shape, to)?, lineage))?;
            }
        }
        Ok(())
    }
}

impl BridgePlan {
    /// Refuses tensors or a mesh that are not as planned.
    fn check(&self, tensors: &[&DTensor], onto: Option<&DeviceMesh>) -> Result<()> {
        let refuse = |rule: &str, given: String, remedy: String| {
            let given = format!("{given} on rank {}", self.rank.rank());
            Err(Error::invalid("bridge", rule, given, remedy))
        };
        let from = self.from.seen_from(self.rank.rank());
        let due = if from.is_some() { self.tensors.len() } else { 0 };
        if tensors.len() != due {
            let given = format!("{} tensor(s)", tensors.len());
            let rule = match from {
                Some(_) => "wants one tensor for each planned transfer",
                None => "this rank is not in the source mesh",
            };
            return refuse(rule, given, format!("give {due}"));
        }
        for (x, PlannedTensor { transfer, .. }) in tensors.iter().zip(&self.tensors) {
            let same_mesh = Some(x.mesh().mesh()) == from.as_ref();
            let meta =
                (x.dtype(), x.shape(), x.layout()) == (transfer.dtype, &transfer.shape, &transfer.from);
            if !same_mesh || !meta {
                let given = format!("{} on {}", x.spec(), x.mesh().mesh().with_ranks());
                return refuse(
                    "a tensor is not as planned",
                    given,
                    format!(
                        "give {}{}@{} on {}",
                        transfer.dtype,
                        transfer.shape,
                        transfer.from,
                        self.from.with_ranks()
                    ),
                );
            }
        }
        for (x, PlannedTensor { transfer, .. }) in tensors.iter().zip(&self.tensors) {
            let (lineage, name) = (x.lineage(), transfer.name);
            if name != ModulePath::default() && lineage.is_another_parameter(name.as_str()) {
                return refuse(
                    "a tensor is another parameter than the planned one",
                    lineage.name().to_string(),
                    format!("give {name}"),
                );
            }
        }
        let to = self.to.seen_from(self.rank.rank());
        if onto.map(DeviceMesh::mesh) == to.as_ref() {
            return Ok(());
        }
        let given = onto.map_or("none".into(), |mesh| mesh.mesh().with_ranks());
        let remedy = match to {
            Some(to) => format!("give a DeviceMesh of {}", to.with_ranks()),
            None => "give none: this rank is not in it".into(),
        };
        refuse("not the target mesh", given, remedy)
    }

    /// Writes what one member sent, pieces of the tensors of a batch, into the target shards.
    fn place_received(
        &self,
        (batch, pieces): (&Batch, &[(usize, BridgePiece)]),
        mut received_part: Tensor,
        locals: &[Tensor],
        arrivals: &mut [Option<Tensor>],
    ) -> Result<()> {
        if let [(k, piece)] = pieces {
            let out = self.tensors[batch.tensors[*k]]
                .out
                .as_ref()
                .expect("only members of the target mesh receive");
            // The piece is the whole shard, in a buffer of its own: it is used as received.
            if piece.numel() == out.numel() && received_part.owns_buffer() {
                arrivals[*k] = Some(received_part.reshape(out.clone())?);
                return Ok(());
            }
        }
        let alone = pieces.len() == 1;
        let mut at = 0;
        for (k, piece) in pieces {
            let out = match &mut arrivals[*k] {
                Some(out) => out,
                none => none.insert(self.new_part(batch.tensors[*k], locals)?),
            };
            if alone {
                piece.paste(&received_part, out)?;
            } else {
                piece.unpack(&received_part, at, out)?;
                at += piece.numel();
            }
        }
        Ok(())
    }

    /// Creates this rank's target shard of tensor `i`, with the elements that it keeps.
    fn new_part(&self, i: usize, locals: &[Tensor]) -> Result<Tensor> {
        let PlannedTensor { transfer, out, keep, stays, .. } = &self.tensors[i];
        if *stays {
            return Ok(locals[i].clone());
        }
        let shape = out.as_ref().expect("called on members of the target mesh").clone();
        let mut out = Tensor::uninit_on(self.rank.device(), transfer.dtype, shape)?;
        if let Some(keep) = keep {
            keep.copy(&locals[i], &mut out)?;
        }
        Ok(out)
    }
}

impl PlannedTensor {
    /// Returns this rank's shard of `x` as it is sent.
    fn source_part(&self, x: &DTensor) -> Result<Tensor> {
        let local = x.detach().redistribute(self.source_layout.clone())?.into_local();
        // The pieces of a ragged shard over flattened dims are runs of its storage.
        if self.source_layout.ragged_axis().is_some() { local.contiguous() } else { Ok(local) }
    }
}

/// Returns the group of the ranks of both meshes.
fn joint_group(rank: &Rank, from: &Mesh, to: &Mesh) -> Result<Group> {
    let refuse =
        |rule: &str, given: String, remedy: String| Err(Error::invalid("bridge", rule, given, remedy));
    let world = rank.world_len();
    let mut ranks: Vec<usize> = from.ranks().chain(to.ranks()).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let between = || format!("{} to {}", from.with_ranks(), to.with_ranks());
    if let Some(&r) = ranks.last().filter(|&&r| r >= world) {
        let given = format!("rank {r} in {} for {world} rank(s)", between());
        return refuse("no such rank", given, format!("ranks are 0 to {}", world - 1));
    }
    if ranks.binary_search(&rank.rank()).is_err() {
        let given = format!("{} on rank {}", between(), rank.rank());
        return refuse("this rank is in neither mesh", given, "only their members make it".into());
    }
    if ranks.len() == world { Ok(rank.world()) } else { rank.group(&ranks, "bridge") }
}
