//! Several redistributions whose reductions share calls.

use std::rc::Rc;
use std::sync::Arc;

use tracing::Span;

use super::even_shards::{EvenShards, MemberLens};
use super::lower::{FoldStage, Stage, stacked};
use super::redistribution::{RedistributionStep, StepAction};
use super::run::{InFlight, Move};
use super::span::shared_span;
use crate::comm::{CallContext, Group, PhasedReduce, Reduce};
use crate::dtensor::mesh::copied_bytes::note_copied;
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::redistribute::exchange_piece::ExchangePiece;
use crate::error::Result;
use crate::placement::Spec;
use crate::tensor::{DType, FoldOrder, FoldStep, Shape, Tensor};

/// Runs several moves, and returns the tensors in their order, with the bits of [`Move::run`].
///
/// Moves of tensors of one shape that make the same steps share the calls of their reductions: the partial values of all
/// tensors are stacked in one buffer. A tensor is freed when it has been copied there, unless it is held elsewhere.
pub(in crate::dtensor) fn run_together(
    mesh: &DeviceMesh,
    moves: &[Rc<Move>],
    locals: Vec<Tensor>,
) -> Result<Vec<Tensor>> {
    let mut waiting: Vec<Option<Tensor>> = locals.into_iter().map(Some).collect();
    let mut moved = vec![Tensor::default(); moves.len()];
    for members in groups(moves, Arrangement::Stacked) {
        let locals: Vec<Tensor> = members.iter().filter_map(|&i| waiting[i].take()).collect();
        let alike: Vec<Rc<Move>> = members.iter().map(|&i| moves[i].clone()).collect();
        let reduction = start(mesh, alike, locals, Arrangement::Stacked)?;
        for (i, local) in members.into_iter().zip(reduction.finish(mesh)?) {
            moved[i] = local;
        }
    }
    Ok(moved)
}

/// Sorts moves into groups that [`start_reductions`] can start, by their indices. All ranks answer alike: only shared
/// metadata is compared.
pub(in crate::dtensor) fn reductions_sharing(moves: &[&Rc<Move>]) -> Vec<Vec<usize>> {
    let moves: Vec<Rc<Move>> = moves.iter().map(|&m| m.clone()).collect();
    groups(&moves, Arrangement::SideBySide)
}

/// Starts the moves of a group, whose reductions share calls: those of tensors of any shapes whose sums have equal trees.
pub(in crate::dtensor) fn start_reductions(
    mesh: &DeviceMesh,
    moves: Vec<Rc<Move>>,
    locals: Vec<Tensor>,
) -> Result<ReductionInFlight> {
    start(mesh, moves, locals, Arrangement::SideBySide)
}

/// The arrangement of several tensors in the buffer of a shared call.
#[derive(Clone, Copy, PartialEq)]
enum Arrangement {
    /// The nodes of one tensor, then those of the next. All tensors have one shape; their trees may differ.
    Stacked,
    /// Each node is a row with that node of all tensors. All trees are equal; the shapes may differ.
    SideBySide,
}

/// Reductions that have started.
pub(in crate::dtensor) enum ReductionInFlight {
    Alone(InFlight),
    Shared(SharedReduction),
}

/// Moves that run step by step, and share the call of each reduction.
pub(in crate::dtensor) struct SharedReduction {
    moves: Vec<Rc<Move>>,
    arrangement: Arrangement,
    progress: SharedProgress,
    context: CallContext,
    span: Span,
}

enum SharedProgress {
    Done(Vec<Tensor>),
    Waiting { stage: usize, call: Box<PhasedReduce>, positions: Positions },
}

impl ReductionInFlight {
    /// Waits for the reductions, and returns the tensors in their order.
    pub fn finish(self, mesh: &DeviceMesh) -> Result<Vec<Tensor>> {
        match self {
            ReductionInFlight::Alone(only) => Ok(vec![only.finish(mesh)?]),
            ReductionInFlight::Shared(shared) => shared.finish(mesh),
        }
    }

    /// Returns the most calls that may follow the one in flight. All ranks answer alike.
    pub fn calls_left(&self) -> usize {
        match self {
            ReductionInFlight::Alone(only) => only.calls_left(),
            ReductionInFlight::Shared(shared) => shared.calls_left(),
        }
    }

    /// If another shared call follows the one in flight, waits for that and starts the next. All ranks call this between the
    /// same calls.
    pub fn advance(&mut self, mesh: &DeviceMesh) -> Result<()> {
        match self {
            ReductionInFlight::Alone(only) => {
                only.advance(mesh);
                Ok(())
            }
            ReductionInFlight::Shared(shared) => shared.advance(mesh),
        }
    }
}

fn start(
    mesh: &DeviceMesh,
    moves: Vec<Rc<Move>>,
    mut locals: Vec<Tensor>,
    arrangement: Arrangement,
) -> Result<ReductionInFlight> {
    if let ([only], [_]) = (&moves[..], &locals[..]) {
        return Ok(ReductionInFlight::Alone(only.start(mesh, locals.remove(0))?));
    }
    let span = shared_span(moves.iter().map(|m| m.plan()));
    let progress = span.in_scope(|| start_at(0, mesh, &moves, arrangement, locals, None))?;
    let context = CallContext::current();
    Ok(ReductionInFlight::Shared(SharedReduction { moves, arrangement, progress, context, span }))
}

/// Runs the stages from `first` on, up to the first whose call all moves share, and starts that. `before` are the positions of
/// the shared call before it.
fn start_at(
    first: usize,
    mesh: &DeviceMesh,
    moves: &[Rc<Move>],
    arrangement: Arrangement,
    mut locals: Vec<Tensor>,
    before: Option<&Positions>,
) -> Result<SharedProgress> {
    let stages_len = moves.first().map_or(0, |m| m.stages().len());
    for stage in first..stages_len {
        if let Some(calls) = shared_calls(moves, stage) {
            // The results of the call before lie at its positions, unless other stages came between.
            let positions = Positions::new(&calls, arrangement, before.filter(|_| stage == first));
            let call = Box::new(start_shared(&calls, arrangement, &positions, locals)?);
            return Ok(SharedProgress::Waiting { stage, call, positions });
        }
        let one = |(m, local): (&Rc<Move>, Tensor)| m.start_stage(stage, local)?.wait_call(mesh);
        locals = moves.iter().zip(locals).map(one).collect::<Result<_>>()?;
    }
    Ok(SharedProgress::Done(locals))
}

fn shared_calls(moves: &[Rc<Move>], stage: usize) -> Option<Vec<SharedCall<'_>>> {
    moves.iter().map(|m| SharedCall::of(&m.stages()[stage])).collect()
}

impl SharedReduction {
    fn finish(mut self, mesh: &DeviceMesh) -> Result<Vec<Tensor>> {
        loop {
            match std::mem::replace(&mut self.progress, SharedProgress::Done(Vec::new())) {
                SharedProgress::Done(locals) => return Ok(locals),
                SharedProgress::Waiting { stage, call, positions } => {
                    self.progress = self.after(mesh, stage, *call, &positions)?;
                }
            }
        }
    }

    fn advance(&mut self, mesh: &DeviceMesh) -> Result<()> {
        match std::mem::replace(&mut self.progress, SharedProgress::Done(Vec::new())) {
            SharedProgress::Waiting { stage, mut call, positions } if call.has_next() => {
                let (_context, _span) = (self.context.enter(), self.span.enter());
                call.advance();
                self.progress = SharedProgress::Waiting { stage, call, positions };
            }
            SharedProgress::Waiting { stage, call, positions } if self.calls_after(stage) > 0 => {
                self.progress = self.after(mesh, stage, *call, &positions)?;
            }
            progress => self.progress = progress,
        }
        Ok(())
    }

    fn calls_left(&self) -> usize {
        match &self.progress {
            SharedProgress::Done(_) => 0,
            SharedProgress::Waiting { stage, .. } => self.most_calls(*stage) - 1 + self.calls_after(*stage),
        }
    }

    /// Returns the most calls that the stages after this one make.
    fn calls_after(&self, stage: usize) -> usize {
        (stage + 1..self.moves[0].stages().len()).map(|stage| self.most_calls(stage)).sum()
    }

    /// Returns the most calls that a stage makes: a large all-reduce may be two.
    fn most_calls(&self, stage: usize) -> usize {
        match shared_calls(&self.moves, stage) {
            None => 0,
            Some(calls) if calls[0].fold.is_some() => 1,
            Some(_) => 2,
        }
    }

    /// Waits for the call of a stage, and goes on to the next one.
    fn after(
        &self,
        mesh: &DeviceMesh,
        stage: usize,
        call: PhasedReduce,
        positions: &Positions,
    ) -> Result<SharedProgress> {
        let SharedReduction { moves, arrangement, context, span, .. } = self;
        let _context = context.enter();
        let _span = span.enter();
        let all = call.wait()?;
        let calls = shared_calls(moves, stage).expect("it was shared");
        let planned = moves.iter().map(|m| m.plan().steps[stage].received_bytes).fold(0, u64::saturating_add);
        let bytes = positions.padded_bytes(&calls, all.dtype(), planned);
        mesh.count_call(bytes);
        let locals = results(&calls, *arrangement, positions, all)?;
        start_at(stage + 1, mesh, moves, *arrangement, locals, Some(positions))
    }
}

/// Sorts moves into groups of those that can share their calls, each like its first member.
fn groups(moves: &[Rc<Move>], arrangement: Arrangement) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (i, one) in moves.iter().enumerate() {
        match groups.iter_mut().find(|group| is_alike(&moves[group[0]], one, arrangement)) {
            Some(group) => group.push(i),
            None => groups.push(vec![i]),
        }
    }
    groups
}

/// Returns true if two moves can share their calls. All ranks of a call answer alike: only metadata is compared that they
/// share.
fn is_alike(one: &Move, other: &Move, arrangement: Arrangement) -> bool {
    let (steps, others) = (&one.plan().steps, &other.plan().steps);
    let same_steps =
        steps.len() == others.len() && steps.iter().zip(others).all(|(a, b)| is_same_step(a, b, arrangement));
    let alike = |a: &Spec, b: &Spec| match (&a.tree, &b.tree) {
        (Some(a), Some(b)) => a.folds_as(b),
        (a, b) => a.is_none() && b.is_none(),
    };
    let same_trees = || steps.iter().zip(others).all(|(a, b)| alike(&a.from, &b.from));
    same_steps
        && match arrangement {
            Arrangement::Stacked => true,
            // Other trees may still have equal nodes on this call's ranks. Two ranks that share a second call may have been in
            // different first calls, so their nodes can differ.
            Arrangement::SideBySide => {
                same_trees() || (one.plan().calls() == 1 && has_same_orders(one, other))
            }
        }
}

/// Returns true if the reductions of two moves fold equal nodes in equal orders on the ranks of this rank's group.
fn has_same_orders(one: &Move, other: &Move) -> bool {
    one.stages().iter().zip(other.stages()).all(|(a, b)| match (SharedCall::of(a), SharedCall::of(b)) {
        (Some(a), Some(b)) => a.reduce.order == b.reduce.order,
        (None, None) => matches!(a, Stage::Round(_) | Stage::Exchange(_)),
        _ => false,
    })
}

fn is_same_step(a: &RedistributionStep, b: &RedistributionStep, arrangement: Arrangement) -> bool {
    let same_form = match arrangement {
        Arrangement::Stacked => {
            a.from.shape == b.from.shape && a.from.layout == b.from.layout && a.to.layout == b.to.layout
        }
        Arrangement::SideBySide => true,
    };
    let same_move = same_form
        && a.action == b.action
        && a.axes == b.axes
        && a.from.stored_dtype() == b.from.stored_dtype();
    // A fold along other axes than those of a tree keeps the nodes apart, as many as the rank has.
    let one_value = |step: &RedistributionStep, axes: &[usize]| {
        step.from.tree.as_ref().is_none_or(|tree| tree.open_axes().any(|a| axes.contains(&a)))
    };
    same_move
        && match &a.action {
            StepAction::AllReduce(_, axes) => one_value(a, axes) && one_value(b, axes),
            // If other axes take part, their ranks bring values of other elements, which are folded apart.
            StepAction::Fold(_, axes) => a.axes == *axes && one_value(a, axes) && one_value(b, axes),
            StepAction::Exchange(_) | StepAction::Collapse | StepAction::Round | StepAction::Share(..) => {
                true
            }
        }
}

/// One tensor's share of a call that reduces several.
#[derive(Clone, Copy)]
struct SharedCall<'a> {
    group: &'a Group,
    reduce: &'a Reduce,
    /// The fold, or `None` for an all-reduce.
    fold: Option<&'a FoldStage>,
}

impl SharedCall<'_> {
    /// Returns the call of a stage that folds one value per member.
    fn of(stage: &Stage) -> Option<SharedCall<'_>> {
        match stage {
            Stage::AllReduce { group, reduce } => Some(SharedCall { group, reduce, fold: None }),
            Stage::Fold(fold) => match &fold.sources[..] {
                [source] => Some(SharedCall { group: &fold.group, reduce: &source.reduce, fold: Some(fold) }),
                _ => None,
            },
            Stage::Exchange(_) | Stage::Collapse(_) | Stage::Round(_) | Stage::Share { .. } => None,
        }
    }

    /// Returns the number of values that this rank brings.
    fn nodes(&self) -> usize {
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

/// Returns the buffer from which [`start_reductions`] would send the tensors of a group without copying them, or `None` if it
/// copies them.
pub(in crate::dtensor) fn buffer_of(moves: &[Rc<Move>]) -> Option<GradientBuffer> {
    let calls = moves.iter().map(|m| SharedCall::of(m.stages().first()?)).collect::<Option<Vec<_>>>()?;
    let first = calls.first().filter(|first| first.nodes() == 1 && calls.len() > 1)?;
    debug_assert!(calls.iter().all(|call| call.group.ranks() == first.group.ranks()));
    Positions::new(&calls, Arrangement::SideBySide, None).buffer
}

/// The positions of several tensors in the parts that a shared call sends.
struct Positions {
    /// The shape of one value of each part, one part per member that receives one.
    parts: Vec<Shape>,
    /// Per part, the tensors that have a piece in it, and the position of the first element of each piece.
    pieces: Vec<Vec<(usize, usize)>>,
    /// The part of this rank.
    own: usize,
    /// The parts, equally long, as one buffer in which each tensor is a run, if there is one.
    buffer: Option<GradientBuffer>,
}

impl Positions {
    /// Returns the positions for a shared call, after a call with positions `before`. All its members answer alike: they have
    /// the same number in the groups of the call before, and positions depend only on that and on the lengths of all parts.
    fn new(calls: &[SharedCall<'_>], arrangement: Arrangement, before: Option<&Positions>) -> Positions {
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
        let lens = |call: &SharedCall<'_>| match call.fold {
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
    fn padded_bytes(&self, calls: &[SharedCall<'_>], dtype: DType, planned: u64) -> u64 {
        if self.buffer.is_none() {
            return planned;
        }
        let SharedCall { group, reduce, fold } = calls[0];
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
fn even_positions(calls: &[SharedCall<'_>]) -> Option<EvenShards> {
    let lens = |call: &SharedCall<'_>| match call.fold {
        Some(fold) => MemberLens::of_reduction(fold),
        None => MemberLens::whole(call.reduce.shape.numel()),
    };
    let members_len = calls[0].fold.map_or(1, |_| calls[0].group.len());
    EvenShards::new(members_len, calls.iter().map(lens).collect::<Option<_>>()?)
}

/// Starts the call that reduces several tensors.
fn start_shared(
    calls: &[SharedCall<'_>],
    arrangement: Arrangement,
    positions: &Positions,
    locals: Vec<Tensor>,
) -> Result<PhasedReduce> {
    let SharedCall { group, reduce, fold } = calls[0];
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
    calls: &[SharedCall<'_>],
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
fn results(
    calls: &[SharedCall<'_>],
    arrangement: Arrangement,
    positions: &Positions,
    mut all: Tensor,
) -> Result<Vec<Tensor>> {
    let (device, dtype) = (all.device(), all.dtype());
    // A tensor has no position if this rank gets none of its elements.
    let nothing = |call: &SharedCall<'_>| match call.out_shape() {
        shape if shape.numel() == 0 => Tensor::uninit_on(device, dtype, shape),
        _ => Ok(Tensor::default()),
    };
    let mut found = calls.iter().map(nothing).collect::<Result<Vec<Tensor>>>()?;
    // Rows of the results of all tensors, if they lie side by side.
    let (rows, own) = match arrangement {
        Arrangement::Stacked => {
            let mut end = 0;
            let place = |(i, call): (usize, &SharedCall<'_>)| {
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
fn joined_order(calls: &[SharedCall<'_>]) -> FoldOrder {
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
