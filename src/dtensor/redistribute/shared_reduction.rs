//! Several redistributions whose reductions share calls.

use std::rc::Rc;

use tracing::Span;

use super::lower::Stage;
use super::redistribution::{RedistributionStep, StepAction};
use super::run::{InFlight, Move};
use super::shared_positions::{Arrangement, CallShare, GradientBuffer, Positions, results, start_shared};
use super::span::shared_span;
use crate::comm::{CallContext, PhasedReduce};
use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::error::Result;
use crate::placement::Spec;
use crate::tensor::{Tensor, sort_by_key};

/// Moves whose reductions share calls.
pub(in crate::dtensor) struct ReductionGroup {
    /// The indices of the moves.
    pub members: Vec<usize>,
    arrangement: Arrangement,
}

/// Sorts moves into groups whose reductions share calls: those with equal trees, of tensors of any shapes; and of those that
/// would be alone, the moves of tensors of one shape, or of one length if they are all-reduced. All ranks answer alike: only shared metadata is compared.
pub(in crate::dtensor) fn reductions_sharing(moves: &[&Rc<Move>]) -> Vec<ReductionGroup> {
    let all = groups(moves, 0..moves.len(), Arrangement::SideBySide);
    let (alone, sharing): (Vec<_>, Vec<_>) = all.into_iter().partition(|members| members.len() == 1);
    let stacked = groups(moves, alone.into_iter().flatten(), Arrangement::Stacked);
    let sharing = sharing.into_iter().map(|members| (members, Arrangement::SideBySide));
    let all = sharing.chain(stacked.into_iter().map(|members| (members, Arrangement::Stacked)));
    let mut all: Vec<ReductionGroup> =
        all.map(|(members, arrangement)| ReductionGroup { members, arrangement }).collect();
    sort_by_key(&mut all, |group| group.members[0]);
    all
}

/// Runs moves of small tensors, and returns the tensors in their order: those of one length, whatever their trees, share calls.
pub(in crate::dtensor) fn run_stacked(
    mesh: &DeviceMesh,
    moves: &[Rc<Move>],
    locals: Vec<Tensor>,
) -> Result<Vec<Tensor>> {
    let mut locals: Vec<Option<Tensor>> = locals.into_iter().map(Some).collect();
    let all: Vec<&Rc<Move>> = moves.iter().collect();
    for members in groups(&all, 0..all.len(), Arrangement::Stacked) {
        let own = members.iter().filter_map(|&i| locals[i].take()).collect();
        let alike = members.iter().map(|&i| moves[i].clone()).collect();
        let moved = start(mesh, alike, own, Arrangement::Stacked)?.finish(mesh)?;
        members.iter().zip(moved).for_each(|(&i, local)| locals[i] = Some(local));
    }
    Ok(locals.into_iter().flatten().collect())
}

impl ReductionGroup {
    /// Starts the moves of the group, which are given in the order of its members, and whose bits are those of
    /// [`Move::run`]. A tensor is freed when it has been copied to the buffer that is sent, unless it is held elsewhere.
    pub fn start(
        &self,
        mesh: &DeviceMesh,
        moves: Vec<Rc<Move>>,
        locals: Vec<Tensor>,
    ) -> Result<ReductionInFlight> {
        start(mesh, moves, locals, self.arrangement)
    }

    /// Returns the buffer from which [`ReductionGroup::start`] would send the tensors without copying them, or `None` if it
    /// copies them.
    pub fn buffer(&self, moves: &[Rc<Move>]) -> Option<GradientBuffer> {
        let calls = moves.iter().map(|m| CallShare::of(m.stages().first()?)).collect::<Option<Vec<_>>>()?;
        let first = calls.first().filter(|first| first.nodes() == 1 && calls.len() > 1)?;
        debug_assert!(calls.iter().all(|call| call.group.ranks() == first.group.ranks()));
        Positions::new(&calls, self.arrangement, None).buffer
    }
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

fn shared_calls(moves: &[Rc<Move>], stage: usize) -> Option<Vec<CallShare<'_>>> {
    moves.iter().map(|m| CallShare::of(&m.stages()[stage])).collect()
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
fn groups(
    moves: &[&Rc<Move>],
    indices: impl IntoIterator<Item = usize>,
    arrangement: Arrangement,
) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for i in indices {
        match groups.iter_mut().find(|group| is_alike(moves[group[0]], moves[i], arrangement)) {
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
    one.stages().iter().zip(other.stages()).all(|(a, b)| match (CallShare::of(a), CallShare::of(b)) {
        (Some(a), Some(b)) => a.reduce.order == b.reduce.order,
        (None, None) => matches!(a, Stage::Round(_) | Stage::Exchange(_)),
        _ => false,
    })
}

fn is_same_step(a: &RedistributionStep, b: &RedistributionStep, arrangement: Arrangement) -> bool {
    let same_form = match arrangement {
        Arrangement::Stacked => {
            // An all-reduce does not look at dims.
            let is_flat = matches!(a.action, StepAction::AllReduce(..));
            let same_len = is_flat && a.from.shape.numel() == b.from.shape.numel();
            (same_len || a.from.shape == b.from.shape)
                && a.from.layout == b.from.layout
                && a.to.layout == b.to.layout
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
