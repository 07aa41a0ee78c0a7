//! The bridge: exchanges planned once, and what is on its way.

use std::fmt;
use std::rc::Rc;

use super::batch::Batch;
use super::bridge_piece::BridgePiece;
use super::routing::Routing;
use super::transfer::Transfer;
use crate::comm::{Group, Pending, Rank};
use crate::dtensor::{DTensor, DeviceMesh};
use crate::error::{Error, Result};
use crate::placement::{Layout, Mesh};
use crate::tensor::{Shape, Tensor};

/// A planned way for tensors from one mesh to another, used as often as wanted. Stays on its rank's thread.
///
/// All ranks of either mesh make it, with the same facts, and call [`Bridge::send`] together. Besides a rank's parts at
/// both ends there is at most one packed copy of what it sends.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{Bridge, DTensor, DeviceMesh, Transfer}, placement::{Layout, Mesh, short::{R, shard}}};
/// use isoshard::tensor::{DType, Tensor};
/// spmd(4, |rank| {
///     // Ranks 0 to 2 train; 2 and 3 generate. The meshes are facts that every rank may know.
///     let (train, generate) = (Mesh::over(&[("fsdp", 3)], 0..3)?, Mesh::over(&[("tp", 2)], 2..4)?);
///     let weight = Transfer::new(DType::F32, [5, 4], Layout::new([shard(0)]), Layout::new([shard(1)]));
///     let bridge = Bridge::new(&rank, &train, &generate, [weight])?;
///
///     let mut weights = Vec::new();
///     if train.contains(rank.rank()) {
///         let mesh = DeviceMesh::on(&rank, &train)?;
///         weights.push(DTensor::full(&mesh, DType::F32, [5, 4], 0.5, Layout::new([shard(0)]))?);
///     }
///     let there = generate.contains(rank.rank()).then(|| DeviceMesh::on(&rank, &generate)).transpose()?;
///     let arrived = bridge.send(&weights, there.as_ref())?;
///     if let Some(weight) = arrived.first() {
///         assert_eq!(weight.spec().to_string(), "f32[5, 4]@(tp:S1)");
///         assert_eq!(weight.sum_all()?.full_tensor()?.item()?, 10.0);
///     }
///     // Rank 2 had a row of its two columns already.
///     assert_eq!(bridge.received_bytes(), [0, 0, 4 * 2 * 4, 5 * 2 * 4][rank.rank()]);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
pub struct Bridge {
    plan: Rc<BridgePlan>,
}

struct BridgePlan {
    rank: Rank,
    from: Mesh,
    to: Mesh,
    /// The ranks of either mesh, ascending.
    group: Group,
    tensors: Vec<PlannedTensor>,
    batches: Vec<Batch>,
}

/// A tensor that crosses, as this rank sees it.
struct PlannedTensor {
    transfer: Transfer,
    /// How it lies when it leaves.
    source_layout: Layout,
    /// The shape of this rank's part there, if it has one.
    out: Option<Shape>,
    keep: Option<BridgePiece>,
    stays: bool,
}

impl Bridge {
    /// Plans the way of `transfers` from one mesh to the other. Communicates nothing with threads.
    ///
    /// # Errors
    /// Refuses meshes with ranks that are not in the world, a rank that is in neither, layouts that do not fit, and a `Partial`
    /// one to arrive in. A fault of communication.
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
            let member = |rank: usize| group.ranks().binary_search(&rank).expect("of either mesh");
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

    /// Sends the tensors, one for each planned transfer in order, and returns them on the other mesh, without a history:
    /// gradients do not flow back. A rank that is only in the mesh they go to gives none; `onto` is that mesh, on its
    /// ranks, and the others get none.
    ///
    /// Each rank receives [`Bridge::received_bytes`], and before that what reducing a `Partial` takes: a reduce-scatter
    /// on the first mesh.
    ///
    /// # Errors
    /// Refuses, on the rank that gives them, tensors that are not as planned, and another mesh than was planned. A fault of
    /// communication.
    pub fn send<'a>(
        &self,
        tensors: impl IntoIterator<Item = &'a DTensor>,
        onto: Option<&DeviceMesh>,
    ) -> Result<Vec<DTensor>> {
        self.send_async(tensors, onto)?.wait()
    }

    /// Starts [`Bridge::send`]; other work may come before [`InTransit::wait`]. Returns at once, unless a `Partial` has to be
    /// reduced: that is waited for here. Until all have waited, ranks of the first mesh that write to a tensor in place
    /// write to a copy.
    ///
    /// # Errors
    /// As [`Bridge::send`].
    pub fn send_async<'a>(
        &self,
        tensors: impl IntoIterator<Item = &'a DTensor>,
        onto: Option<&DeviceMesh>,
    ) -> Result<InTransit> {
        let tensors: Vec<&DTensor> = tensors.into_iter().collect();
        self.plan.check(&tensors, onto)?;
        let planned = tensors.iter().zip(&self.plan.tensors);
        let locals: Vec<Tensor> =
            planned.map(|(x, planned)| planned.source_part(x)).collect::<Result<_>>()?;
        let BridgePlan { rank, group, batches, .. } = &*self.plan;
        let exchanges = batches.iter().map(|batch| batch.start(group, rank.device(), &locals));
        let exchanges = exchanges.collect::<Result<_>>()?;
        Ok(InTransit { plan: self.plan.clone(), locals, exchanges, onto: onto.cloned() })
    }

    /// Bytes that this rank receives from others each time: exactly those of its parts there that it lacks.
    pub fn received_bytes(&self) -> u64 {
        self.plan.batches.iter().map(|batch| batch.received_bytes()).sum()
    }

    /// Bytes that this rank sends to others each time.
    pub fn sent_bytes(&self) -> u64 {
        self.plan.batches.iter().map(|batch| batch.sent_bytes()).sum()
    }
}

/// `(fsdp=3) over {0, 1, 2} to (tp=2) over {2, 3}: 1 tensor(s) in 1 exchange(s), 8 bytes go and 32 come`.
impl fmt::Display for Bridge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BridgePlan { from, to, tensors, batches, .. } = &*self.plan;
        write!(f, "{} to {}: ", from.with_ranks(), to.with_ranks())?;
        write!(f, "{} tensor(s) in {} exchange(s), ", tensors.len(), batches.len())?;
        write!(f, "{} bytes go and {} come", self.sent_bytes(), self.received_bytes())
    }
}

impl fmt::Debug for Bridge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Tensors on their way over a [`Bridge`]. Dropping it is harmless.
#[must_use = "a transfer's errors are lost unless it is waited for"]
pub struct InTransit {
    plan: Rc<BridgePlan>,
    locals: Vec<Tensor>,
    exchanges: Vec<Pending<Vec<Tensor>>>,
    onto: Option<DeviceMesh>,
}

impl InTransit {
    /// The tensors on the mesh that they go to; none on ranks outside it.
    ///
    /// # Errors
    /// A fault of communication.
    pub fn wait(self) -> Result<Vec<DTensor>> {
        let mut arrived: Vec<Option<DTensor>> = self.plan.tensors.iter().map(|_| None).collect();
        self.wait_each(|i, x| {
            arrived[i] = Some(x);
            Ok(())
        })?;
        Ok(arrived.into_iter().flatten().collect())
    }

    /// As [`InTransit::wait`], handing over one tensor after the other, by its number among the planned ones: whoever puts
    /// each in the place of an older one never has all of both.
    ///
    /// # Errors
    /// A fault of communication; what `f` gives.
    pub fn wait_each(self, mut f: impl FnMut(usize, DTensor) -> Result<()>) -> Result<()> {
        let InTransit { plan, locals, exchanges, onto } = self;
        for (batch, exchange) in plan.batches.iter().zip(exchanges) {
            let mut arrivals: Vec<Option<Tensor>> = batch.tensors.iter().map(|_| None).collect();
            let mut received = 0;
            for (member, came) in exchange.wait()?.into_iter().enumerate() {
                let Some(pieces) = batch.take.get(&member) else { continue };
                received += came.len_bytes() as u64;
                plan.place_received((batch, pieces), came, &locals, &mut arrivals)?;
            }
            let Some(onto) = &onto else { continue };
            onto.0.moved_bytes.set(onto.0.moved_bytes.get() + received);
            for (&i, arrived) in batch.tensors.iter().zip(arrivals) {
                let Transfer { dtype, shape, to, .. } = &plan.tensors[i].transfer;
                let local = arrived.map_or_else(|| plan.new_part(i, &locals), Ok)?;
                f(i, DTensor::wrap(onto, local, onto.meta(*dtype, shape, to)?))?;
            }
        }
        Ok(())
    }
}

impl BridgePlan {
    /// Refuses what is not as planned.
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
                None => "this rank is not in the mesh that they leave",
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
        let to = self.to.seen_from(self.rank.rank());
        if onto.map(DeviceMesh::mesh) == to.as_ref() {
            return Ok(());
        }
        let given = onto.map_or("none".into(), |mesh| mesh.mesh().with_ranks());
        let remedy = match to {
            Some(to) => format!("give a DeviceMesh of {}", to.with_ranks()),
            None => "give none: this rank is not in it".into(),
        };
        refuse("not the mesh that they go to", given, remedy)
    }

    /// Puts what came from one member, pieces of a batch's tensors, where it belongs.
    fn place_received(
        &self,
        (batch, pieces): (&Batch, &[(usize, BridgePiece)]),
        mut came: Tensor,
        locals: &[Tensor],
        arrivals: &mut [Option<Tensor>],
    ) -> Result<()> {
        if let [(k, piece)] = pieces {
            let out = self.tensors[batch.tensors[*k]].out.as_ref().expect("it comes to a member");
            // All of the part, in a buffer of its own: it stays where it came.
            if piece.numel() == out.numel() && came.owns_buffer() {
                arrivals[*k] = Some(came.reshape(out.clone())?);
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
                piece.paste(&came, out)?;
            } else {
                piece.unpack(&came, at, out)?;
                at += piece.numel();
            }
        }
        Ok(())
    }

    /// This rank's part there of tensor `i`, with what it keeps.
    fn new_part(&self, i: usize, locals: &[Tensor]) -> Result<Tensor> {
        let PlannedTensor { transfer, out, keep, stays, .. } = &self.tensors[i];
        if *stays {
            return Ok(locals[i].clone());
        }
        let shape = out.as_ref().expect("asked of members").clone();
        let mut out = Tensor::uninit_on(self.rank.device(), transfer.dtype, shape)?;
        if let Some(keep) = keep {
            keep.copy(&locals[i], &mut out)?;
        }
        Ok(out)
    }
}

impl PlannedTensor {
    /// This rank's part of `x` as it leaves.
    fn source_part(&self, x: &DTensor) -> Result<Tensor> {
        let local = x.detach().redistribute(self.source_layout.clone())?.into_local();
        // Of a range over flattened dims pieces are runs of its storage.
        if self.source_layout.ragged_axis().is_some() { local.contiguous() } else { Ok(local) }
    }
}

/// The group of the ranks of either mesh.
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
