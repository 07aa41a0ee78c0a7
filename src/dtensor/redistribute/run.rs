//! Running what was planned: packing, the calls, folding and unpacking; each byte is copied at most once before and once
//! after its call, and not at all where it lies right already.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::super::device_mesh::DeviceMesh;
use super::super::exchange::{Piece, packed};
use super::super::tensor_meta::TensorMeta;
use super::lower::{Exchange, Fold, Out, Stage, lower};
use super::redistribution::{Redistribution, Way};
use crate::comm::{Group, Pending, Reduce};
use crate::error::Result;
use crate::tensor::Tensor;

/// A redistribution that can be run, again and again.
#[derive(Debug)]
pub(crate) struct Move {
    stages: SmallVec<[Stage; 2]>,
    plan: Redistribution,
    calls: usize,
}

/// A redistribution on its way.
#[expect(clippy::large_enum_variant, reason = "almost all are the large one, which need not be boxed")]
pub(in crate::dtensor) enum InFlight {
    /// No call is left but the one that was started, if any.
    Last(Flight),
    /// Later calls begin when it is waited for, or one that was started after it.
    More(Rc<RefCell<Flight>>),
}

/// How far a redistribution has come.
pub(in crate::dtensor) enum Flight {
    Done(Result<Tensor>),
    Waiting { plan: Rc<Move>, stage: usize, coming: Coming, local: Tensor },
}

/// The redistributions that a mesh keeps.
#[derive(Default)]
struct Moves {
    /// By the numbers of the facts before and after.
    planned: RefCell<FxHashMap<(u32, u32), Rc<Move>>>,
    underway: Underway,
}

/// A rank's redistributions with calls that have not begun, in the order in which they were started: their calls begin in
/// that order too, in whatever order they are waited for.
#[derive(Default)]
struct Underway(RefCell<Vec<Weak<RefCell<Flight>>>>);

/// What a call on its way will bring.
pub(in crate::dtensor) enum Coming {
    /// A finished tensor.
    Whole(Pending<Tensor>),
    /// One tensor from each member.
    Parts(Pending<Vec<Tensor>>),
}

/// The move from `src` to `dst`, planned at the first call.
pub(in crate::dtensor) fn find(mesh: &DeviceMesh, src: &TensorMeta, dst: &TensorMeta) -> Result<Rc<Move>> {
    let key = (src.id, dst.id);
    let moves: &Moves = mesh.0.moves.of();
    if let Some(m) = moves.planned.borrow().get(&key) {
        return Ok(m.clone());
    }
    let m = Rc::new(Move::new(mesh, Redistribution::over(mesh.rank().network(), src.spec(), dst.spec())?)?);
    moves.planned.borrow_mut().insert(key, m.clone());
    Ok(m)
}

impl Move {
    pub(super) fn new(mesh: &DeviceMesh, plan: Redistribution) -> Result<Move> {
        Ok(Move { stages: lower(mesh, &plan)?, calls: plan.calls(), plan })
    }

    /// True where some rank receives something: then `strict` forbids doing it silently.
    pub(in crate::dtensor) fn communicates(&self) -> bool {
        self.calls > 0
    }

    pub(in crate::dtensor) fn run(self: &Rc<Self>, mesh: &DeviceMesh, local: Tensor) -> Result<Tensor> {
        self.start_at(0, mesh, local)?.finish(mesh)
    }

    /// The reduction over a group, where the move is nothing else.
    pub(in crate::dtensor) fn only_all_reduce(&self) -> Option<(&Group, &Reduce)> {
        match &self.stages[..] {
            [Stage::AllReduce { group, reduce }] => Some((group, reduce)),
            _ => None,
        }
    }

    /// Runs the stages up to the first that talks to others, and starts that.
    pub(in crate::dtensor) fn start(self: &Rc<Self>, mesh: &DeviceMesh, local: Tensor) -> Result<InFlight> {
        let flight = self.start_at(0, mesh, local)?;
        if self.calls < 2 {
            return Ok(InFlight::Last(flight));
        }
        let flight = Rc::new(RefCell::new(flight));
        mesh.0.moves.of::<Moves>().underway.0.borrow_mut().push(Rc::downgrade(&flight));
        Ok(InFlight::More(flight))
    }

    fn start_at(self: &Rc<Self>, first: usize, mesh: &DeviceMesh, mut local: Tensor) -> Result<Flight> {
        for (k, stage) in self.stages.iter().enumerate().skip(first) {
            let coming = match stage {
                Stage::AllReduce { group, reduce } => {
                    Coming::Whole(group.all_reduce_with_async(&local, reduce.clone()))
                }
                Stage::Fold(fold) => fold.start(&local)?,
                Stage::Exchange(x) if x.way == Way::Slice => {
                    local = x.slice(&local)?;
                    continue;
                }
                Stage::Exchange(x) => x.start(&local)?,
                stage => {
                    local = stage.run_alone(local)?;
                    continue;
                }
            };
            let waiting = Flight::Waiting { plan: self.clone(), stage: k, coming, local };
            if self.plan.steps[k].talks() {
                return Ok(waiting);
            }
            local = waiting.arrived(mesh)?;
        }
        Ok(Flight::Done(Ok(local)))
    }
}

impl Stage {
    /// A stage that needs nobody.
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
        let flight = match self {
            InFlight::Last(flight) => return flight.finish(mesh),
            InFlight::More(flight) => flight,
        };
        for earlier in mesh.0.moves.of::<Moves>().underway.before(&flight) {
            let done = earlier.replace(Flight::away()).finish(mesh);
            earlier.replace(Flight::Done(done));
        }
        flight.replace(Flight::away()).finish(mesh)
    }
}

impl Underway {
    /// Those that were started before this one and still are waited for; with it they leave the list.
    fn before(&self, flight: &Rc<RefCell<Flight>>) -> Vec<Rc<RefCell<Flight>>> {
        let mut all = self.0.borrow_mut();
        let Some(at) = all.iter().position(|w| std::ptr::eq(w.as_ptr(), Rc::as_ptr(flight))) else {
            return Vec::new();
        };
        all.drain(..=at).filter_map(|w| w.upgrade()).filter(|f| !Rc::ptr_eq(f, flight)).collect()
    }
}

impl Flight {
    /// What stands in for one that is being finished.
    fn away() -> Flight {
        Flight::Done(Ok(Tensor::default()))
    }

    fn finish(mut self, mesh: &DeviceMesh) -> Result<Tensor> {
        loop {
            let (plan, next) = match self {
                Flight::Done(result) => return result,
                Flight::Waiting { ref plan, stage, .. } => (plan.clone(), stage + 1),
            };
            let local = self.arrived(mesh)?;
            self = plan.start_at(next, mesh, local)?;
        }
    }

    /// Waits for the call on its way: what this rank holds after it.
    fn arrived(self, mesh: &DeviceMesh) -> Result<Tensor> {
        let (plan, stage, coming, local) = match self {
            Flight::Done(result) => return result,
            Flight::Waiting { plan, stage, coming, local } => (plan, stage, coming, local),
        };
        let out = match (&plan.stages[stage], coming) {
            (Stage::AllReduce { .. }, Coming::Whole(coming)) => coming.wait()?,
            (Stage::Fold(fold), Coming::Whole(coming)) => coming.wait()?.reshape(fold.out.shape())?,
            (Stage::Exchange(x), Coming::Whole(coming)) => coming.wait()?.reshape(x.out.shape())?,
            (Stage::Fold(fold), Coming::Parts(coming)) => fold.assemble(&coming.wait()?, &local)?,
            (Stage::Exchange(x), Coming::Parts(coming)) => x.assemble(&coming.wait()?, &local)?,
            _ => unreachable!("other stages wait for nothing"),
        };
        let moved = &mesh.0.moved_bytes;
        moved.set(moved.get() + plan.plan.steps[stage].received_bytes);
        Ok(out)
    }
}

impl Fold {
    fn start(&self, local: &Tensor) -> Result<Coming> {
        let mut parts = Vec::with_capacity(self.give.len());
        for piece in &self.give {
            parts.push(packed(&piece.cut_nodes(local, self.nodes)?)?);
        }
        Ok(match &self.sources[..] {
            // Everybody's parts are of all that this rank will hold.
            [only] => Coming::Whole(self.group.reduce_scatter_with(parts, only.reduce.clone())),
            _ => Coming::Parts(self.group.all_to_all_async(parts, &self.shapes)),
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

impl Exchange {
    fn slice(&self, local: &Tensor) -> Result<Tensor> {
        self.take[0].cut_nodes(local, self.out.nodes)?.reshape(self.out.shape())
    }

    fn start(&self, local: &Tensor) -> Result<Coming> {
        Ok(match self.way {
            Way::AllGather => Coming::Parts(self.group.all_gather_async(local, &self.shapes)),
            Way::Broadcast { root } => {
                let x = Some(local).filter(|_| root == self.group.index());
                Coming::Whole(self.group.broadcast_async(x, root, local.dtype(), &self.shapes[root]))
            }
            Way::AllToAll | Way::Slice => {
                let cut = |p: &Piece| p.cut_nodes(local, self.out.nodes);
                let parts = self.give.iter().map(cut).collect::<Result<_>>()?;
                Coming::Parts(self.group.all_to_all_async(parts, &self.shapes))
            }
        })
    }

    fn assemble(&self, parts: &[Tensor], local: &Tensor) -> Result<Tensor> {
        let some = self.take.iter().zip(parts).filter(|(piece, _)| piece.numel() > 0);
        let pieces = some.map(|(piece, part)| {
            // Of a gathered part the piece is a cut; of an exchanged one it is all.
            let gathered = self.way == Way::AllGather;
            let part = if gathered { piece.cut_nodes(part, self.out.nodes)? } else { part.clone() };
            Ok((piece, part))
        });
        assemble(&self.out, pieces.collect::<Result<_>>()?, local)
    }
}

/// One tensor of pieces of it, each with what stands there; pieces that hold nothing are left out.
fn assemble(out: &Out, mut pieces: Vec<(&Piece, Tensor)>, like: &Tensor) -> Result<Tensor> {
    if pieces.len() == 1 {
        // It is all of it.
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
