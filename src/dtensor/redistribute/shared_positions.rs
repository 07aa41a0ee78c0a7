//! The positions of several tensors in the buffers of a call that reduces all of them.

use std::sync::Arc;

use super::even_shards::{EvenShards, MemberLens};
use super::exchange_piece::ExchangePiece;
use super::lower::{FoldStage, Stage};
use crate::comm::{Group, PhasedReduce, Reduce};
use crate::dtensor::mesh::copied_bytes::note_copied;
use crate::error::Result;
use crate::tensor::{DType, FoldOrder, FoldStep, Shape, Tensor, stacked};

/// The arrangement of several tensors in the buffer of a shared call.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Arrangement {
    /// The nodes of one tensor, then those of the next. All tensors have one shape, or one length in an all-reduce; their
    /// trees may differ.
    Stacked,
    /// Each node is a row with that node of all tensors. All trees are equal; the shapes may differ.
    SideBySide,
}

/// One tensor's share of a call that reduces several.
#[derive(Clone, Copy)]
pub(super) struct CallShare<'a> {
    pub group: &'a Group,
    pub reduce: &'a Reduce,
    /// The fold, or `None` for an all-reduce.
    pub fold: Option<&'a FoldStage>,
}

impl CallShare<'_> {
    /// Returns the call of a stage that folds one value per member.
    pub fn of(stage: &Stage) -> Option<CallShare<'_>> {
        match stage {
            Stage::AllReduce { group, reduce } => Some(CallShare { group, reduce, fold: None }),
            Stage::Fold(fold) => match &fold.sources[..] {
                [source] => Some(CallShare { group: &fold.group, reduce: &source.reduce, fold: Some(fold) }),
                _ => None,
            },
            Stage::Exchange(_) | Stage::Collapse(_) | Stage::Round(_) | Stage::Share { .. } => None,
        }
    }

    /// Returns the number of values that this rank brings.
    pub fn nodes(&self) -> usize {
        self.reduce.order.nodes()[self.group.index()]
    }

    /// Returns the shape of this tensor's results.
    fn out_shape(&self) -> Shape {
        self.fold.map_or_else(|| self.reduce.out_shape(), |fold| fold.out.shape())
    }
}

/// A buffer from which a shared reduction sends what lies there.
pub(in crate::dtensor) struct GradientBuffer {
    pub len: usize,
    /// The tensors in the order of their positions: their indices, and the positions.
    pub places: Vec<(usize, usize)>,
}

/// The positions of several tensors in the parts that a shared call sends.
pub(super) struct Positions {
    /// The shape of one value of each part, one part per member that receives one.
    parts: Vec<Shape>,
    /// Per part, the tensors that have a piece in it, and the position of the first element of each piece.
    pieces: Vec<Vec<(usize, usize)>>,
    /// The part of this rank.
    own: usize,
    /// The parts, equally long, as one buffer in which each tensor is a run, if there is one.
    pub buffer: Option<GradientBuffer>,
}

impl Positions {
    /// Returns the positions for a shared call, after a call with positions `before`. All its members answer alike: they have
    /// the same number in the groups of the call before, and positions depend only on that and on the lengths of all parts.
    pub fn new(calls: &[CallShare<'_>], arrangement: Arrangement, before: Option<&Positions>) -> Positions {
        let is_all_reduce = calls.iter().all(|call| call.fold.is_none());
        let own = calls[0].fold.map_or(0, |fold| fold.group.index());
        if arrangement == Arrangement::SideBySide {
            // The shards that the call before has left lie where they are to be sent from.
            if let Some(before) = before.filter(|before| before.buffer.is_some() && is_all_reduce) {
                let (part, pieces) = (before.parts[before.own].clone(), before.pieces[before.own].clone());
                let buffer = GradientBuffer { len: part.numel(), places: pieces.clone() };
                return Positions { parts: vec![part], pieces: vec![pieces], own, buffer: Some(buffer) };
            }
            if let Some(even) = even_positions(calls) {
                let parts = vec![[even.shard_len].into(); even.members_len];
                let pieces = (0..even.members_len).map(|k| even.parts_of(k).collect()).collect();
                let places = even.tensors().map(|i| (i, even.starts[i])).collect();
                let buffer = GradientBuffer { len: even.buffer_len(), places };
                return Positions { parts, pieces, own, buffer: Some(buffer) };
            }
        }
        let lens = |call: &CallShare<'_>| match call.fold {
            Some(fold) => fold.give.iter().map(ExchangePiece::numel).collect(),
            None => vec![call.reduce.shape.numel()],
        };
        let mut ends = vec![0; lens(&calls[0]).len()];
        let mut pieces = vec![Vec::with_capacity(calls.len()); ends.len()];
        for (i, call) in calls.iter().enumerate() {
            // Stacked tensors follow each other with all their values.
            let values = if arrangement == Arrangement::Stacked { call.nodes() } else { 1 };
            for ((end, pieces), len) in ends.iter_mut().zip(&mut pieces).zip(lens(call)) {
                pieces.push((i, *end));
                *end += len * values;
            }
        }
        let parts = match arrangement {
            Arrangement::SideBySide => ends.into_iter().map(|len| [len].into()).collect(),
            Arrangement::Stacked => match calls[0].fold {
                Some(fold) => fold.give.iter().map(ExchangePiece::shape).collect(),
                None => vec![calls[0].reduce.shape.clone()],
            },
        };
        Positions { parts, pieces, own, buffer: None }
    }

    /// Returns the bytes that this rank receives in a shared call, for which the plans of its tensors have `planned`: those
    /// of a buffer of equal shards have padding.
    pub fn padded_bytes(&self, calls: &[CallShare<'_>], dtype: DType, planned: u64) -> u64 {
        if self.buffer.is_none() {
            return planned;
        }
        let CallShare { group, reduce, fold } = calls[0];
        let len = self.parts[self.own].numel();
        if fold.is_none() {
            let planned_len: usize = calls.iter().map(|call| call.reduce.shape.numel()).sum();
            return (u128::from(planned) * len as u128 / planned_len.max(1) as u128) as u64;
        }
        let others = reduce.order.nodes().iter().enumerate().filter(|(member, _)| *member != group.index());
        dtype.bytes_of(others.map(|(_, nodes)| nodes).sum::<usize>().saturating_mul(len))
    }
}

/// Returns the positions of the tensors of a call in a buffer of equal shards, if they have some. In an all-reduce the buffer
/// is one shard.
fn even_positions(calls: &[CallShare<'_>]) -> Option<EvenShards> {
    let lens = |call: &CallShare<'_>| match call.fold {
        Some(fold) => MemberLens::of_reduction(fold),
        None => MemberLens::whole(call.reduce.shape.numel()),
    };
    let members_len = calls[0].fold.map_or(1, |_| calls[0].group.len());
    EvenShards::new(members_len, calls.iter().map(lens).collect::<Option<_>>()?)
}

/// Starts the call that reduces several tensors.
pub(super) fn start_shared(
    calls: &[CallShare<'_>],
    arrangement: Arrangement,
    positions: &Positions,
    locals: Vec<Tensor>,
) -> Result<PhasedReduce> {
    let CallShare { group, reduce, fold } = calls[0];
    let order: Arc<FoldOrder> = match arrangement {
        Arrangement::Stacked => Arc::new(joined_order(calls)),
        Arrangement::SideBySide => reduce.order.clone(),
    };
    let nodes = order.nodes()[group.index()];
    let buffer = positions.buffer.as_ref().filter(|_| nodes == 1).and_then(|buffer| {
        let whole = Tensor::joined(buffer.places.iter().map(|&(i, start)| (start, &locals[i])))?;
        (whole.numel() == buffer.len).then_some(whole)
    });
    let parts = match buffer {
        // The gradients lie where they are sent from.
        Some(whole) => {
            let len = positions.parts[0].numel();
            let part = |k: usize| whole.narrow(0, k * len, len)?.reshape(stacked(nodes, &[len].into()));
            (0..positions.parts.len()).map(part).collect::<Result<Vec<Tensor>>>()?
        }
        None => pack(calls, arrangement, positions, nodes, locals)?,
    };
    let shape = match (arrangement, fold) {
        (Arrangement::Stacked, _) => reduce.shape.clone(),
        (Arrangement::SideBySide, Some(_)) => positions.parts[group.index()].clone(),
        (Arrangement::SideBySide, None) => positions.parts[0].clone(),
    };
    let shared = Reduce { op: reduce.op, order, shape };
    Ok(match fold {
        Some(_) => group.reduce_scatter_with(parts, shared).into(),
        None => group.all_reduce_in_phases(&parts[0], shared),
    })
}

/// Copies the pieces of all tensors to their positions in the parts of a call. A tensor is freed when it has been copied.
fn pack(
    calls: &[CallShare<'_>],
    arrangement: Arrangement,
    positions: &Positions,
    nodes: usize,
    locals: Vec<Tensor>,
) -> Result<Vec<Tensor>> {
    let (device, dtype) = (locals[0].device(), locals[0].dtype());
    let Positions { parts: shapes, pieces, .. } = positions;
    let room = |shape: &Shape| Tensor::uninit_on(device, dtype, [nodes * shape.numel()]);
    let mut parts = shapes.iter().map(room).collect::<Result<Vec<Tensor>>>()?;
    let mut places = vec![Vec::new(); calls.len()];
    for (k, pieces) in pieces.iter().enumerate() {
        pieces.iter().for_each(|&(i, start)| places[i].push((k, start)));
    }
    for ((local, call), places) in locals.into_iter().zip(calls).zip(places) {
        for (k, start) in places {
            let piece = match call.fold {
                Some(fold) => fold.give[k].cut_nodes(&local, fold.nodes)?,
                None => local.clone(),
            };
            let mut strides = piece.shape().strides();
            if arrangement == Arrangement::SideBySide && nodes > 1 {
                // The first dim of a stacked tensor counts its nodes.
                strides[0] = shapes[k].numel();
            }
            note_copied(piece.len_bytes());
            piece.copy_block(&mut parts[k], piece.shape(), (0, piece.strides()), (start, &strides))?;
        }
    }
    parts.into_iter().zip(shapes).map(|(part, shape)| part.reshape(stacked(nodes, shape))).collect()
}

/// Returns the tensors that a shared call yields. Each can be written in place if it is one value and the call's result is no
/// other rank's.
pub(super) fn results(
    calls: &[CallShare<'_>],
    arrangement: Arrangement,
    positions: &Positions,
    mut all: Tensor,
) -> Result<Vec<Tensor>> {
    let (device, dtype) = (all.device(), all.dtype());
    // A tensor has no position if this rank gets none of its elements.
    let nothing = |call: &CallShare<'_>| match call.out_shape() {
        shape if shape.numel() == 0 => Tensor::uninit_on(device, dtype, shape),
        _ => Ok(Tensor::default()),
    };
    let mut found = calls.iter().map(nothing).collect::<Result<Vec<Tensor>>>()?;
    // Rows of the results of all tensors, if they lie side by side.
    let (rows, own) = match arrangement {
        Arrangement::Stacked => {
            let mut end = 0;
            let place = |(i, call): (usize, &CallShare<'_>)| {
                end += call.out_shape().numel();
                (i, end - call.out_shape().numel())
            };
            (1, calls.iter().enumerate().map(place).collect())
        }
        Arrangement::SideBySide => {
            (calls[0].reduce.order.outs_len(), positions.pieces[positions.own].clone())
        }
    };
    if rows == 1 && all.is_unique() {
        let places: Vec<_> = own.iter().map(|&(i, start)| (start, calls[i].out_shape())).collect();
        own.iter().zip(all.cut(&places)?).for_each(|(&(i, _), part)| found[i] = part);
        return Ok(found);
    }
    let all = all.reshape([rows, all.numel() / rows.max(1)])?;
    for (i, start) in own {
        let shape = calls[i].out_shape();
        if shape.numel() == 0 {
            continue;
        }
        let result = all.narrow(1, start, shape.numel() / rows.max(1))?;
        note_copied(if result.is_contiguous() { 0 } else { result.len_bytes() });
        found[i] = result.contiguous()?.reshape(shape)?;
    }
    Ok(found)
}

/// Returns the order that folds each tensor's values as alone. A member's values are those of the first tensor, then
/// those of the next.
fn joined_order(calls: &[CallShare<'_>]) -> FoldOrder {
    let mut nodes = vec![0; calls[0].group.len()];
    let mut steps = Vec::new();
    for call in calls {
        let order = &call.reduce.order;
        steps.extend(order.steps().iter().map(|&step| match step {
            FoldStep::Push { operand, node } => FoldStep::Push { operand, node: nodes[operand] + node },
            FoldStep::Empty | FoldStep::Join => step,
        }));
        nodes.iter_mut().zip(order.nodes()).for_each(|(all, own)| *all += own);
    }
    FoldOrder::new(nodes, steps)
}
