//! Several tensors that are gathered in one call: the parameters of a unit of FSDP.
//!
//! If the tensors have positions in a buffer of equal shards ([`EvenShards`]), all members send shards of one length, which
//! arrive side by side: the gathered tensors are views of what has arrived. A member whose parts lie in one block as they are
//! sent ([`shard_places`]) copies nothing. Otherwise parts are copied side by side before the call, and put together after it.

use std::cell::RefCell;
use std::rc::Rc;

use super::cost::peers;
use super::even_shards::{EvenShards, MemberLens};
use super::lower::{ExchangeStage, Stage};
use super::redistribution::{ExchangeKind, Redistribution};
use super::run::{GatheredTensor, InFlight, Move, SharedGather, SharedGatherState, assemble};
use super::span::shared_span;
use crate::comm::{CallContext, Cost, Pending};
use crate::dtensor::mesh::copied_bytes::note_copied;
use crate::dtensor::mesh::counted_list::visit;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::error::{Error, Result};
use crate::tensor::{Device, Shape, Tensor};

/// Sorts moves into groups that can share a call, by their indices. Moves that are one gather each, of one dtype and along
/// the same axes, share a call; every other move is alone. All ranks answer alike: only shared metadata is compared.
pub(in crate::dtensor) fn sharing(moves: &[(Rc<Move>, Tensor)]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    // The groups of gathers, which differ in dtypes and axes, so they are few. Other moves are not compared with them.
    let mut gathers: Vec<usize> = Vec::new();
    for (i, one) in moves.iter().enumerate() {
        let is_gather = gather_of(&one.0).is_some();
        match gathers.iter().find(|&&g| is_gather && is_alike(&moves[groups[g][0]], one)) {
            Some(&g) => groups[g].push(i),
            None => {
                gathers.extend(is_gather.then_some(groups.len()));
                groups.push(vec![i]);
            }
        }
    }
    groups
}

/// Starts the moves of a group, and returns them in their order. This rank's parts are sent together. A single tensor with
/// positions in a buffer of equal shards arrives in place too.
pub(in crate::dtensor) fn start_sharing(
    mesh: &DeviceMesh,
    moves: Vec<(Rc<Move>, Tensor)>,
) -> Result<Vec<InFlight>> {
    if let [(only, local)] = &moves[..]
        && even_shards(&[only]).is_none()
    {
        return Ok(vec![only.start(mesh, local.clone())?]);
    }
    let len = moves.len();
    let gather = Rc::new(SharedGather::start(moves)?);
    Ok((0..len).map(|index| InFlight::Shared { gather: gather.clone(), index }).collect())
}

/// Returns the modelled time of the moves of a group.
pub(in crate::dtensor) fn shared_time<'a>(mesh: &DeviceMesh, moves: impl Iterator<Item = &'a Move>) -> Cost {
    let moves: Vec<&Move> = moves.collect();
    let plans: Vec<&Redistribution> = moves.iter().map(|m| m.plan()).collect();
    let bytes = match even_shards(&moves) {
        Some(even) => even.received_bytes(plans[0].steps[0].from.dtype),
        None => plans.iter().map(|plan| plan.received_bytes()).fold(0, u64::saturating_add),
    };
    match (&plans[..], plans.first().and_then(|plan| plan.steps.first())) {
        ([], _) => Cost::default(),
        ([only], _) => only.cost(),
        ([first, ..], None) => first.cost(),
        (_, Some(step)) => peers(mesh.rank().network(), mesh.mesh(), &step.axes).cost(1, bytes),
    }
}

/// Returns the only stage of a move that gathers a tensor on every rank of a group.
fn gather_of(m: &Move) -> Option<&ExchangeStage> {
    match m.stages() {
        // A sum that waits for its reduction may have several nodes, and another number on another rank.
        [Stage::Exchange(x)] if m.plan().steps[0].from.open_axes().is_empty() => match x.kind {
            ExchangeKind::AllGather | ExchangeKind::Broadcast { .. } => Some(x),
            ExchangeKind::AllToAll | ExchangeKind::Slice => None,
        },
        _ => None,
    }
}

/// Returns true if two gathers can share a call.
fn is_alike((one, a): &(Rc<Move>, Tensor), (other, b): &(Rc<Move>, Tensor)) -> bool {
    visit();
    let axes = |m: &Move| m.plan().steps.first().map(|step| step.axes.clone());
    axes(one) == axes(other) && (a.dtype(), a.device()) == (b.dtype(), b.device())
}

/// Returns the positions of the tensors of a group in a buffer of equal shards, if they have some. All ranks answer alike.
fn even_shards(moves: &[&Move]) -> Option<EvenShards> {
    let stages: Vec<&ExchangeStage> = moves.iter().map(|m| gather_of(m)).collect::<Option<_>>()?;
    let members_len = stages[0].group.len();
    let lens = stages.iter().map(|x| MemberLens::of_gather(x)).collect::<Option<_>>()?;
    if members_len > 1 { EvenShards::new(members_len, lens) } else { None }
}

/// Returns places for tensors of this rank that are to be gathered together, in one block per call, with their numbers. Their
/// contents are arbitrary, their dtypes those of the moves. Other tensors than these are copied before a call.
///
/// # Errors
/// Returns an error if there is no room.
pub(in crate::dtensor) fn shard_places(
    device: Device,
    moves: &[(Rc<Move>, Tensor)],
) -> Result<Vec<(usize, Tensor)>> {
    let mut places = Vec::new();
    for group in sharing(moves) {
        let own: Vec<&Move> = group.iter().map(|&i| &*moves[i].0).collect();
        let Some(even) = even_shards(&own) else { continue };
        let me = gather_of(own[0]).map_or(0, |x| x.group.index());
        let held: Vec<(usize, usize)> = even.parts_of(me).map(|(i, start)| (group[i], start)).collect();
        let parts: Vec<_> = held.iter().map(|&(i, start)| (start, moves[i].1.shape().clone())).collect();
        let dtype = own[0].plan().steps[0].from.dtype;
        let shard = Tensor::uninit_on(device, dtype, [even.shard_len])?.cut(&parts)?;
        places.extend(held.into_iter().map(|(i, _)| i).zip(shard));
    }
    Ok(places)
}

/// Returns the number of elements that a member sends of a tensor.
fn sent_len(x: &ExchangeStage, member: usize) -> usize {
    match x.kind {
        ExchangeKind::Broadcast { root } if root != member => 0,
        _ => x.shapes[member].numel(),
    }
}

impl SharedGather {
    fn start(moves: Vec<(Rc<Move>, Tensor)>) -> Result<SharedGather> {
        let span = shared_span(moves.iter().map(|(m, _)| m.plan()));
        let _span = span.clone().entered();
        let context = CallContext::current();
        let own: Vec<&Move> = moves.iter().map(|(m, _)| &**m).collect();
        let (even, started, starts) = match even_shards(&own) {
            Some(even) => {
                let group = gather_of(own[0]).expect("only gathers share a call").group.clone();
                let mine = shard_of(&even, group.index(), &moves)?;
                let rooms = even.rooms(mine.device(), mine.dtype())?;
                (Some(even), group.all_gather_into(&mine, rooms), vec![Vec::new(); moves.len()])
            }
            None => {
                let (started, starts) = start_packed(&moves)?;
                (None, started, starts)
            }
        };
        let call = RefCell::new(SharedGatherState::Waiting(started));
        let tensor = |((plan, local), starts)| GatheredTensor { plan, local, starts };
        let gathers = moves.into_iter().zip(starts).map(tensor).collect();
        Ok(SharedGather { gathers, even, call, context, span })
    }

    /// Waits for the call, and returns one of the gathered tensors. The first wait makes all of them, so that the elements
    /// that arrived are freed.
    pub(super) fn finish(&self, mesh: &DeviceMesh, index: usize) -> Result<Tensor> {
        let mut made = match self.call.replace(SharedGatherState::Made(Vec::new())) {
            SharedGatherState::Made(made) => made,
            SharedGatherState::Waiting(call) => {
                let all = self.wait(mesh, call);
                let make = |i| Some(all.as_ref().map_err(Error::clone).and_then(|all| self.tensor(i, all)));
                (0..self.gathers.len()).map(make).collect()
            }
        };
        let own = made[index].take().expect("each tensor is asked for once");
        self.call.replace(SharedGatherState::Made(made));
        own
    }

    fn wait(&self, mesh: &DeviceMesh, call: Pending<Vec<Tensor>>) -> Result<Vec<Tensor>> {
        let _context = self.context.enter();
        let _span = self.span.enter();
        let mut all = call.wait()?;
        let bytes = match &self.even {
            Some(even) => {
                let bytes = even.received_bytes(all[0].dtype());
                let rooms = all.iter().enumerate().map(|(member, room)| (member * even.shard_len, room));
                all = vec![Tensor::joined(rooms).expect("the rooms are those that the call was given")];
                bytes
            }
            None => self
                .gathers
                .iter()
                .map(|tensor| tensor.plan.plan().received_bytes())
                .fold(0, u64::saturating_add),
        };
        mesh.count_call(bytes);
        Ok(all)
    }

    /// Returns a gathered tensor, of all that has arrived.
    fn tensor(&self, i: usize, all: &[Tensor]) -> Result<Tensor> {
        let tensor = &self.gathers[i];
        let Some(even) = &self.even else { return tensor.of(all) };
        let x = gather_of(&tensor.plan).expect("only gathers share a call");
        all[0].narrow(0, even.starts[i], even.numel_of(i))?.reshape(x.out.shape())
    }
}

/// Returns this rank's shard of the tensors that are gathered: the block in which they lie, or a copy.
fn shard_of(even: &EvenShards, me: usize, moves: &[(Rc<Move>, Tensor)]) -> Result<Tensor> {
    let parts = || even.parts_of(me).map(|(i, start)| (start, &moves[i].1));
    let is_shard = |shard: &Tensor| shard.numel() == even.shard_len;
    if let Some(shard) = Tensor::joined(parts()).filter(is_shard) {
        return Ok(shard);
    }
    note_copied(parts().map(|(_, part)| part.len_bytes()).sum());
    let like = &moves[0].1;
    let mut shard = Tensor::uninit_on(like.device(), like.dtype(), [even.shard_len])?;
    for (start, part) in parts() {
        part.copy_block(&mut shard, part.shape(), (0, part.strides()), (start, &part.shape().strides()))?;
    }
    Ok(shard)
}

/// A call, and per tensor and member the position of a part in what the member sends.
type PackedGather = (Pending<Vec<Tensor>>, Vec<Vec<usize>>);

/// Starts the gather of tensors whose parts every member sends one after the other.
fn start_packed(moves: &[(Rc<Move>, Tensor)]) -> Result<PackedGather> {
    let stages: Vec<&ExchangeStage> = moves.iter().filter_map(|(m, _)| gather_of(m)).collect();
    let group = &stages[0].group;
    let mut ends = vec![0; group.len()];
    let mut starts = Vec::with_capacity(stages.len());
    for x in &stages {
        starts.push(ends.clone());
        ends.iter_mut().enumerate().for_each(|(member, end)| *end += sent_len(x, member));
    }
    let (me, like) = (group.index(), &moves[0].1);
    let mut mine = Tensor::uninit_on(like.device(), like.dtype(), [ends[me]])?;
    note_copied(mine.len_bytes());
    for ((x, starts), (_, local)) in stages.iter().zip(&starts).zip(moves) {
        if sent_len(x, me) > 0 {
            let packed = local.shape().strides();
            local.copy_block(&mut mine, local.shape(), (0, local.strides()), (starts[me], &packed))?;
        }
    }
    let shapes: Vec<Shape> = ends.into_iter().map(|len| [len].into()).collect();
    Ok((group.all_gather_async(&mine, &shapes), starts))
}

impl GatheredTensor {
    /// Returns the tensor, of the elements that each member sent.
    fn of(&self, all: &[Tensor]) -> Result<Tensor> {
        let x = gather_of(&self.plan).expect("only gathers share a call");
        let part = |member: usize| {
            let len = sent_len(x, member);
            all[member].narrow(0, self.starts[member], len)?.reshape(x.shapes[member].clone())
        };
        if let ExchangeKind::Broadcast { root } = x.kind {
            return part(root)?.reshape(x.out.shape());
        }
        let some = x.take.iter().enumerate().filter(|(_, piece)| piece.numel() > 0);
        let pieces = some.map(|(member, piece)| Ok((piece, piece.cut(&part(member)?)?)));
        assemble(&x.out, pieces.collect::<Result<_>>()?, &self.local)
    }
}

#[cfg(test)]
mod tests {
    use crate::comm::{Tally, spmd};
    use crate::dtensor::{DTensor, DeviceMesh};
    use crate::error::Result;
    use crate::placement::Layout;
    use crate::tensor::{DType, Shape, Tensor};

    /// An exchange comes first, then gathers of two dtypes, a tensor that one rank holds, and an empty one.
    #[test]
    fn gathers_share_a_call_and_other_moves_do_not() {
        let run = |rank| {
            let (rank, tally) = Tally::of(&rank)?;
            let mesh = DeviceMesh::parse(&rank, "x=3")?;
            let whole = |shape: &[usize], k: usize| {
                let values = (0..shape.iter().product()).map(|i: usize| (i * 7 + k) as f32).collect();
                Tensor::from_vec(values, Shape::from(shape))
            };
            let cases: [(&[usize], DType, &str, &str); 7] = [
                (&[6, 4], DType::F32, "(RS(0..1; 2,1,3))", "(S1)"),
                (&[6, 4], DType::F32, "(RS(0..1; 2,1,3))", "(R)"),
                (&[5, 2], DType::BF16, "(S0)", "(R)"),
                (&[1, 9], DType::F32, "(S0)", "(R)"),
                (&[0, 9], DType::F32, "(S0)", "(R)"),
                (&[2, 3, 2], DType::F32, "(RS(0..2; 0,5,1))", "(R)"),
                (&[4], DType::BF16, "(RS(0..1; 4,0,0))", "(R)"),
            ];
            let layout = |text: &str| text.parse::<Layout>();
            let mut moved = Vec::new();
            for (k, (shape, dtype, from, to)) in cases.iter().enumerate() {
                let x = DTensor::distribute(&mesh, &whole(shape, k)?.cast(*dtype)?, layout(from)?)?;
                moved.push((x, layout(to)?));
            }
            let alone = |(x, to): &(DTensor, Layout)| x.redistribute(to.clone());
            let wanted = moved.iter().map(alone).collect::<Result<Vec<DTensor>>>()?;
            let before = tally.total();
            let pending = DTensor::redistribute_together(moved)?;
            let calls = tally.total().calls - before.calls;
            // They are waited for in another order on each rank.
            let mut pending: Vec<_> = pending.into_iter().enumerate().collect();
            pending.rotate_left(rank.rank() * 2);
            for (k, pending) in pending {
                let (got, want) = (pending.wait()?, &wanted[k]);
                assert_eq!(got.spec(), want.spec());
                assert_eq!(got.local().to_f64_vec(), want.local().to_f64_vec(), "{k}");
            }
            Ok(calls)
        };
        assert_eq!(
            spmd(3, run).unwrap_or_else(|e| panic!("{e}")),
            [3; 3],
            "an exchange, and a gather per dtype"
        );
    }
}
