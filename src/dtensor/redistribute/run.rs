//! Running a plan: packing, calls, folding and unpacking. Each byte is copied at most once before and once after its
//! call, and not at all if its storage already fits.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use smallvec::SmallVec;
use tracing::Span;

use super::even_shards::EvenShards;
use super::lower::{ExchangeStage, FoldStage, StackedShape, Stage, lower};
use super::redistribution::{ExchangeKind, Redistribution};
use super::span::move_span;
use crate::base::BoundedCache;
use crate::comm::{CallContext, Lineage, Network, Pending};
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::mesh_caches::{CachePlace, MeshCache};
use crate::dtensor::mesh::tensor_meta::TensorMeta;
use crate::dtensor::redistribute::exchange_piece::{ExchangePiece, packed};
use crate::error::Result;
use crate::placement::Spec;
use crate::tensor::Tensor;

/// A redistribution that is planned and lowered, and can be run any number of times.
#[derive(Debug)]
pub(crate) struct Move {
    stages: SmallVec<[Stage; 2]>,
    plan: Redistribution,
    calls: usize,
}

/// A redistribution in flight. Its later calls have the context of its start, wherever it is waited for.
#[expect(clippy::large_enum_variant, reason = "almost all are the large one, which need not be boxed")]
pub(in crate::dtensor) enum InFlight {
    /// No call is left except the one that was started, if any.
    Last(StartedMove),
    /// Later calls start when this redistribution is waited for, or one that was started after it.
    More(Rc<RefCell<StartedMove>>),
    /// One of the tensors of a call.
    Shared { gather: Rc<SharedGather>, index: usize },
}

/// A gather of several tensors. Each member sends its parts of all of them, as one tensor.
pub(in crate::dtensor) struct SharedGather {
    pub(super) gathers: Vec<GatheredTensor>,
    /// The positions of the tensors in what arrives, if each of them arrives in one piece.
    pub(super) even: Option<EvenShards>,
    pub(super) call: RefCell<SharedGatherState>,
    pub(super) context: CallContext,
    pub(super) span: Span,
}

/// One of the tensors.
pub(super) struct GatheredTensor {
    pub plan: Rc<Move>,
    /// This rank's part.
    pub local: Tensor,
    /// Per member, the position of its part in the elements that it sends; empty if the tensor arrives in one piece.
    pub starts: Vec<usize>,
}

pub(super) enum SharedGatherState {
    Waiting(Pending<Vec<Tensor>>),
    /// The tensors that have not been asked for yet.
    Made(Vec<Option<Result<Tensor>>>),
}

/// A redistribution that was started, and its context.
pub(in crate::dtensor) struct StartedMove {
    progress: MoveProgress,
    context: CallContext,
    span: Span,
}

/// The progress of a redistribution.
pub(in crate::dtensor) enum MoveProgress {
    Done(Result<Tensor>),
    Waiting { plan: Rc<Move>, stage: usize, call: PendingCall, local: Tensor },
}

/// The redistributions that a mesh caches.
#[derive(Default)]
struct MoveCache {
    /// Moves, by the numbers of the metadata before and after.
    planned: RefCell<BoundedCache<(u32, u32), Rc<Move>>>,
    /// Moves of gradients that share calls with their unit's.
    planned_in_units: RefCell<BoundedCache<(u32, u32), Rc<Move>>>,
    unfinished: UnfinishedMoves,
}

impl MeshCache for MoveCache {
    const PLACE: CachePlace = CachePlace::Moves;
}

/// The redistributions of a rank with calls that have not started, in the order in which they were started. Their
/// calls start in that order, in whatever order they are waited for.
#[derive(Default)]
struct UnfinishedMoves(RefCell<Vec<Weak<RefCell<StartedMove>>>>);

/// A collective call in flight.
pub(in crate::dtensor) enum PendingCall {
    /// The call returns the finished tensor.
    Whole(Pending<Tensor>),
    /// The call returns one tensor from each member.
    Parts(Pending<Vec<Tensor>>),
}

/// Returns the move from `src` to `dst`, planned at the first call.
pub(in crate::dtensor) fn find(mesh: &DeviceMesh, src: &TensorMeta, dst: &TensorMeta) -> Result<Rc<Move>> {
    find_by(mesh, (src, dst), &mesh.cache::<MoveCache>().planned, Redistribution::over)
}

/// Returns the move of a gradient from `src` to `dst` that shares its calls with others of its unit, planned at the first
/// call.
pub(in crate::dtensor) fn find_in_unit(
    mesh: &DeviceMesh,
    src: &TensorMeta,
    dst: &TensorMeta,
) -> Result<Rc<Move>> {
    find_by(mesh, (src, dst), &mesh.cache::<MoveCache>().planned_in_units, Redistribution::in_unit)
}

fn find_by(
    mesh: &DeviceMesh,
    (src, dst): (&TensorMeta, &TensorMeta),
    planned: &RefCell<BoundedCache<(u32, u32), Rc<Move>>>,
    plan: fn(&Network, &Spec, &Spec) -> Result<Redistribution>,
) -> Result<Rc<Move>> {
    let key = (src.id, dst.id);
    if let Some(m) = planned.borrow().get(&key) {
        return Ok(m.clone());
    }
    let m = Rc::new(Move::new(mesh, plan(mesh.rank().network(), src.spec(), dst.spec())?)?);
    Ok(planned.borrow_mut().get_or_insert_with(key, || m).clone())
}

impl Move {
    pub(super) fn new(mesh: &DeviceMesh, plan: Redistribution) -> Result<Move> {
        Ok(Move { stages: lower(mesh, &plan)?, calls: plan.calls(), plan })
    }

    /// Returns true if some rank receives something; strict mode then forbids the move.
    pub(in crate::dtensor) fn communicates(&self) -> bool {
        self.calls > 0
    }

    pub(in crate::dtensor) fn run(self: &Rc<Self>, mesh: &DeviceMesh, local: Tensor) -> Result<Tensor> {
        let _span = move_span(&self.plan).entered();
        self.start_at(0, mesh, local)?.finish(mesh)
    }

    /// Returns the plan that this move runs.
    pub(in crate::dtensor) fn plan(&self) -> &Redistribution {
        &self.plan
    }

    /// Runs the stages up to the first that communicates, and starts that.
    pub(in crate::dtensor) fn start(self: &Rc<Self>, mesh: &DeviceMesh, local: Tensor) -> Result<InFlight> {
        let span = move_span(&self.plan);
        let progress = span.in_scope(|| self.start_at(0, mesh, local))?;
        let started = StartedMove { progress, context: CallContext::current(), span };
        if self.calls < 2 {
            return Ok(InFlight::Last(started));
        }
        let started = Rc::new(RefCell::new(started));
        mesh.cache::<MoveCache>().unfinished.0.borrow_mut().push(Rc::downgrade(&started));
        Ok(InFlight::More(started))
    }

    /// Runs the stages from `first` on, up to one that communicates, and starts that.
    fn start_at(self: &Rc<Self>, first: usize, mesh: &DeviceMesh, mut local: Tensor) -> Result<MoveProgress> {
        for k in first..self.stages.len() {
            let progress = self.start_stage(k, local)?;
            if matches!(progress, MoveProgress::Waiting { .. }) && self.plan.steps[k].communicates() {
                return Ok(progress);
            }
            local = progress.wait_call(mesh)?;
        }
        Ok(MoveProgress::Done(Ok(local)))
    }

    /// Starts the call of a stage, or runs a stage without a call.
    pub(super) fn start_stage(self: &Rc<Self>, stage: usize, local: Tensor) -> Result<MoveProgress> {
        debug_assert_ne!(Lineage::current(), Lineage::NONE, "a move is of some tensor");
        let call = match &self.stages[stage] {
            Stage::AllReduce { group, reduce } => {
                PendingCall::Whole(group.all_reduce_with_async(&local, reduce.clone()))
            }
            Stage::Fold(fold) => fold.start(&local)?,
            Stage::Exchange(x) if x.kind == ExchangeKind::Slice => {
                return Ok(MoveProgress::Done(x.slice(&local)));
            }
            Stage::Exchange(x) => x.start(&local)?,
            alone => return Ok(MoveProgress::Done(alone.run_alone(local))),
        };
        Ok(MoveProgress::Waiting { plan: self.clone(), stage, call, local })
    }

    pub(super) fn stages(&self) -> &[Stage] {
        &self.stages
    }
}

impl Stage {
    /// Runs a stage that does not communicate.
    fn run_alone(&self, local: Tensor) -> Result<Tensor> {
        match self {
            Stage::Collapse(reduce) => reduce.fold(&[local.contiguous()?]),
            Stage::Round(dtype) => local.cast(*dtype),
            Stage::Share { keep: true, .. } => Ok(local),
            Stage::Share { op, keep: false } => Tensor::identity(*op, &local),
            Stage::AllReduce { .. } | Stage::Fold(_) | Stage::Exchange(_) => {
                unreachable!("these are started")
            }
        }
    }
}

impl InFlight {
    pub(in crate::dtensor) fn finish(self, mesh: &DeviceMesh) -> Result<Tensor> {
        let started = match self {
            InFlight::Last(started) => return started.finish(mesh),
            InFlight::More(started) => started,
            InFlight::Shared { gather, index } => return gather.finish(mesh, index),
        };
        finish_earlier(mesh, &started);
        StartedMove::take(&started).finish(mesh)
    }

    /// Returns the most calls that [`InFlight::advance`] starts.
    pub(super) fn calls_left(&self) -> usize {
        usize::from(matches!(self, InFlight::More(_)))
    }

    /// Starts the second of two calls, after waiting for the first. All ranks do this between the same calls.
    pub(super) fn advance(&self, mesh: &DeviceMesh) {
        let InFlight::More(started) = self else { return };
        let has_two_calls = |progress: &MoveProgress| match progress {
            MoveProgress::Waiting { plan, stage, .. } => {
                plan.calls == 2 && plan.plan.steps[stage + 1..].iter().any(|step| step.communicates())
            }
            MoveProgress::Done(_) => false,
        };
        if has_two_calls(&started.borrow().progress) {
            finish_earlier(mesh, started);
            let StartedMove { progress, context, span } = StartedMove::take(started);
            let _context = context.enter();
            let _span = span.enter();
            let next = progress.next(mesh).unwrap_or_else(|e| MoveProgress::Done(Err(e)));
            started.borrow_mut().progress = next;
        }
    }
}

/// Finishes the redistributions that were started before this one and have later calls.
fn finish_earlier(mesh: &DeviceMesh, started: &Rc<RefCell<StartedMove>>) {
    for earlier in mesh.cache::<MoveCache>().unfinished.before(started) {
        let done = StartedMove::take(&earlier).finish(mesh);
        earlier.borrow_mut().progress = MoveProgress::Done(done);
    }
}

impl UnfinishedMoves {
    /// Removes from the list this redistribution and those started before it, and returns the earlier ones that are
    /// still waited for.
    fn before(&self, started: &Rc<RefCell<StartedMove>>) -> Vec<Rc<RefCell<StartedMove>>> {
        let mut all = self.0.borrow_mut();
        let Some(at) = all.iter().position(|w| std::ptr::eq(w.as_ptr(), Rc::as_ptr(started))) else {
            return Vec::new();
        };
        all.drain(..=at).filter_map(|w| w.upgrade()).filter(|f| !Rc::ptr_eq(f, started)).collect()
    }
}

impl StartedMove {
    /// Takes a redistribution out, and leaves a placeholder while it is finished.
    fn take(started: &RefCell<StartedMove>) -> StartedMove {
        let mut started = started.borrow_mut();
        let progress = std::mem::replace(&mut started.progress, MoveProgress::Done(Ok(Tensor::default())));
        StartedMove { progress, context: started.context, span: started.span.clone() }
    }

    fn finish(self, mesh: &DeviceMesh) -> Result<Tensor> {
        let _context = self.context.enter();
        let _span = self.span.enter();
        self.progress.finish(mesh)
    }
}

impl MoveProgress {
    fn finish(mut self, mesh: &DeviceMesh) -> Result<Tensor> {
        loop {
            match self {
                MoveProgress::Done(result) => return result,
                MoveProgress::Waiting { .. } => self = self.next(mesh)?,
            }
        }
    }

    /// Waits for the call in flight, and starts the next one.
    fn next(self, mesh: &DeviceMesh) -> Result<MoveProgress> {
        let (plan, next) = match &self {
            MoveProgress::Done(_) => return Ok(self),
            MoveProgress::Waiting { plan, stage, .. } => (plan.clone(), stage + 1),
        };
        let local = self.wait_call(mesh)?;
        plan.start_at(next, mesh, local)
    }

    /// Waits for the call in flight, and returns the tensor that this rank holds after it.
    pub(super) fn wait_call(self, mesh: &DeviceMesh) -> Result<Tensor> {
        let (plan, stage, call, local) = match self {
            MoveProgress::Done(result) => return result,
            MoveProgress::Waiting { plan, stage, call, local } => (plan, stage, call, local),
        };
        let out = match (&plan.stages[stage], call) {
            (Stage::AllReduce { .. }, PendingCall::Whole(call)) => call.wait()?,
            (Stage::Fold(fold), PendingCall::Whole(call)) => call.wait()?.reshape(fold.out.shape())?,
            (Stage::Exchange(x), PendingCall::Whole(call)) => call.wait()?.reshape(x.out.shape())?,
            (Stage::Fold(fold), PendingCall::Parts(call)) => fold.assemble(&call.wait()?, &local)?,
            (Stage::Exchange(x), PendingCall::Parts(call)) => x.assemble(&call.wait()?, &local)?,
            _ => unreachable!("other stages wait for nothing"),
        };
        mesh.count_call(plan.plan.steps[stage].received_bytes);
        Ok(out)
    }
}

impl FoldStage {
    fn start(&self, local: &Tensor) -> Result<PendingCall> {
        let mut parts = Vec::with_capacity(self.give.len());
        for piece in &self.give {
            parts.push(packed(&piece.cut_nodes(local, self.nodes)?)?);
        }
        Ok(match &self.sources[..] {
            // Every member has partial values of all elements that this rank will hold.
            [only] => PendingCall::Whole(self.group.reduce_scatter_with(parts, only.reduce.clone())),
            _ => PendingCall::Parts(self.group.all_to_all_async(parts, &self.shapes)),
        })
    }

    fn assemble(&self, parts: &[Tensor], local: &Tensor) -> Result<Tensor> {
        let folded = self.sources.iter().filter(|s| s.piece.numel() > 0).map(|source| {
            let parts: Vec<Tensor> = source.members.iter().map(|&m| parts[m].clone()).collect();
            Ok((&source.piece, source.reduce.fold(&parts)?))
        });
        assemble(&self.out, folded.collect::<Result<_>>()?, local)
    }
}

impl ExchangeStage {
    fn slice(&self, local: &Tensor) -> Result<Tensor> {
        let cut = self.take[0].cut_nodes(local, self.out.nodes)?;
        let shape = self.out.shape();
        if *cut.shape() == shape { Ok(cut) } else { cut.reshape(shape) }
    }

    fn start(&self, local: &Tensor) -> Result<PendingCall> {
        Ok(match self.kind {
            ExchangeKind::AllGather => PendingCall::Parts(self.group.all_gather_async(local, &self.shapes)),
            ExchangeKind::Broadcast { root } => {
                let x = Some(local).filter(|_| root == self.group.index());
                PendingCall::Whole(self.group.broadcast_async(x, root, local.dtype(), &self.shapes[root]))
            }
            ExchangeKind::AllToAll | ExchangeKind::Slice => {
                let cut = |p: &ExchangePiece| p.cut_nodes(local, self.out.nodes);
                let parts = self.give.iter().map(cut).collect::<Result<_>>()?;
                PendingCall::Parts(self.group.all_to_all_async(parts, &self.shapes))
            }
        })
    }

    fn assemble(&self, parts: &[Tensor], local: &Tensor) -> Result<Tensor> {
        let some = self.take.iter().zip(parts).filter(|(piece, _)| piece.numel() > 0);
        let pieces = some.map(|(piece, part)| {
            // A gathered part is the member's whole part, from which the piece is cut; an exchanged one is the piece.
            let gathered = self.kind == ExchangeKind::AllGather;
            let part = if gathered { piece.cut_nodes(part, self.out.nodes)? } else { part.clone() };
            Ok((piece, part))
        });
        assemble(&self.out, pieces.collect::<Result<_>>()?, local)
    }
}

/// Writes pieces, without empty ones, into one tensor.
pub(super) fn assemble(
    out: &StackedShape,
    mut pieces: Vec<(&ExchangePiece, Tensor)>,
    like: &Tensor,
) -> Result<Tensor> {
    if pieces.len() == 1 {
        // One piece is the whole tensor.
        return pieces.swap_remove(0).1.reshape(out.shape());
    }
    let mut whole = Tensor::uninit_on(like.device(), like.dtype(), out.shape())?;
    for (piece, part) in &pieces {
        match out.nodes {
            1 => piece.paste(part, &mut whole, 0)?,
            n => {
                (0..n).try_for_each(|i| piece.paste(&part.select(0, i)?, &mut whole, i * out.each.numel()))?
            }
        }
    }
    Ok(whole)
}
