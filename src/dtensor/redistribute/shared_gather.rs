//! Several tensors that are gathered in one call: the parameters of a unit of FSDP.

use std::cell::RefCell;
use std::rc::Rc;

use super::super::device_mesh::DeviceMesh;
use super::cost::peers;
use super::lower::{ExchangeStage, Stage};
use super::redistribution::{ExchangeKind, Redistribution};
use super::run::{GatheredTensor, InFlight, Move, SharedCallState, SharedGather, assemble};
use super::span::shared_span;
use crate::comm::{CallOrigin, Cost, Pending};
use crate::error::{Error, Result};
use crate::tensor::{Shape, Tensor};

/// Sorts moves into groups that can share a call, by their indices. Moves that are one gather each, of one dtype and along
/// the same axes, share a call; every other move is alone. All ranks answer alike: only shared metadata is compared.
pub(in crate::dtensor) fn sharing(moves: &[(Rc<Move>, Tensor)]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (i, one) in moves.iter().enumerate() {
        match groups.iter_mut().find(|group| is_alike(&moves[group[0]], one)) {
            Some(group) => group.push(i),
            None => groups.push(vec![i]),
        }
    }
    groups
}

/// Starts the moves of a group, and returns them in their order. This rank's parts are copied side by side and sent
/// together.
pub(in crate::dtensor) fn start_sharing(
    mesh: &DeviceMesh,
    moves: Vec<(Rc<Move>, Tensor)>,
) -> Result<Vec<InFlight>> {
    if let [(only, local)] = &moves[..] {
        return Ok(vec![only.start(mesh, local.clone())?]);
    }
    let len = moves.len();
    let gather = Rc::new(SharedGather::start(moves)?);
    Ok((0..len).map(|index| InFlight::Shared { gather: gather.clone(), index }).collect())
}

/// Returns the modelled time of the moves of a group.
pub(in crate::dtensor) fn shared_time<'a>(mesh: &DeviceMesh, moves: impl Iterator<Item = &'a Move>) -> Cost {
    let plans: Vec<&Redistribution> = moves.map(Move::plan).collect();
    let bytes = plans.iter().map(|plan| plan.received_bytes()).sum();
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

/// Returns true if two moves can share a call.
fn is_alike((one, a): &(Rc<Move>, Tensor), (other, b): &(Rc<Move>, Tensor)) -> bool {
    let axes = |m: &Move| m.plan().steps.first().map(|step| step.axes.clone());
    gather_of(one).is_some()
        && gather_of(other).is_some()
        && axes(one) == axes(other)
        && (a.dtype(), a.device()) == (b.dtype(), b.device())
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
        let stages: Vec<&ExchangeStage> = moves.iter().filter_map(|(m, _)| gather_of(m)).collect();
        let group = stages[0].group.clone();
        let mut ends = vec![0; group.len()];
        let mut starts = Vec::with_capacity(stages.len());
        for x in &stages {
            starts.push(ends.clone());
            ends.iter_mut().enumerate().for_each(|(member, end)| *end += sent_len(x, member));
        }
        let (me, like) = (group.index(), &moves[0].1);
        let mut mine = Tensor::uninit_on(like.device(), like.dtype(), [ends[me]])?;
        for ((x, starts), (_, local)) in stages.iter().zip(&starts).zip(&moves) {
            if sent_len(x, me) > 0 {
                let packed = local.shape().strides();
                local.copy_block(&mut mine, local.shape(), (0, local.strides()), (starts[me], &packed))?;
            }
        }
        let shapes: Vec<Shape> = ends.into_iter().map(|len| [len].into()).collect();
        let call = RefCell::new(SharedCallState::Waiting(group.all_gather_async(&mine, &shapes)));
        let tensor = |((plan, local), starts)| GatheredTensor { plan, local, starts };
        let gathers = moves.into_iter().zip(starts).map(tensor).collect();
        Ok(SharedGather { gathers, call, origin: CallOrigin::current(), span })
    }

    /// Waits for the call, and returns one of the gathered tensors. The first wait makes all of them, so that the elements
    /// that arrived are freed.
    pub(super) fn finish(&self, mesh: &DeviceMesh, index: usize) -> Result<Tensor> {
        let mut made = match self.call.replace(SharedCallState::Made(Vec::new())) {
            SharedCallState::Made(made) => made,
            SharedCallState::Waiting(call) => {
                let all = self.wait(mesh, call);
                let make = |tensor: &GatheredTensor| {
                    Some(all.as_ref().map_err(Error::clone).and_then(|all| tensor.of(all)))
                };
                self.gathers.iter().map(make).collect()
            }
        };
        let own = made[index].take().expect("each tensor is asked for once");
        self.call.replace(SharedCallState::Made(made));
        own
    }

    fn wait(&self, mesh: &DeviceMesh, call: Pending<Vec<Tensor>>) -> Result<Vec<Tensor>> {
        let _origin = self.origin.enter();
        let _span = self.span.enter();
        let all = call.wait()?;
        let bytes: u64 = self.gathers.iter().map(|tensor| tensor.plan.plan().received_bytes()).sum();
        mesh.0.moving_calls.set(mesh.0.moving_calls.get() + 1);
        mesh.0.moved_bytes.set(mesh.0.moved_bytes.get() + bytes);
        Ok(all)
    }
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
