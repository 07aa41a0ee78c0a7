//! A mesh that can talk: ranks, groups, and this rank's caches.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustc_hash::FxHashMap;

use super::facts::Facts;
use super::plan::PlanCache;
use super::redistribute::{Move, Underway};
use super::reduction::Reduction;
use crate::comm::{Group, Rank};
use crate::error::{Error, Result};
use crate::placement::{Layout, Mesh, Spec, Terms};
use crate::tensor::{DType, Device, Dims, Shape};

/// An n-D grid of ranks, as one of them sees it. Cloning shares it; it stays on its rank's thread.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::DeviceMesh};
/// spmd(4, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2), ("tp", 2)])?;
///     assert_eq!(mesh.mesh().rank_at(mesh.mesh().coords()), rank.rank());
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone)]
pub struct DeviceMesh(pub(super) Rc<Inner>);

pub(super) struct Inner {
    /// Its own in this process.
    id: u64,
    pub mesh: Mesh,
    pub rank: Rank,
    pub strict: Cell<bool>,
    pub reduction: Cell<Reduction>,
    pub no_grad: Cell<usize>,
    pub plans: PlanCache,
    pub moves: RefCell<FxHashMap<(u32, u32), Rc<Move>>>,
    pub underway: Underway,
    pub moved_bytes: Cell<u64>,
    facts: RefCell<FxHashMap<Spec, Rc<Facts>>>,
    most_nodes: RefCell<FxHashMap<Terms, Option<usize>>>,
    groups: RefCell<FxHashMap<Dims, Group>>,
}

impl DeviceMesh {
    /// A mesh of all ranks of the world, the last axis running fastest.
    ///
    /// Communicates nothing.
    ///
    /// # Errors
    /// Refuses axes whose product is not the number of ranks, that have no name, or that share one.
    pub fn new(rank: &Rank, axes: &[(&str, usize)]) -> Result<DeviceMesh> {
        Self::over(rank, Mesh::new(axes, rank.rank())?)
    }

    /// A mesh from its text, `"dp=2,tp=2"`; `"1"` is a single rank.
    ///
    /// # Errors
    /// As [`DeviceMesh::new`], and a text of another form.
    pub fn parse(rank: &Rank, text: &str) -> Result<DeviceMesh> {
        Self::over(rank, Mesh::parse(text, rank.rank())?)
    }

    fn over(rank: &Rank, mesh: Mesh) -> Result<DeviceMesh> {
        if mesh.rank_len() != rank.world_len() {
            return Err(Error::invalid(
                "device_mesh",
                "the axes do not cover the world",
                format!("{mesh} for {} rank(s)", rank.world_len()),
                format!("start {} rank(s)", mesh.rank_len()),
            ));
        }
        static MADE: AtomicU64 = AtomicU64::new(0);
        Ok(DeviceMesh(Rc::new(Inner {
            id: MADE.fetch_add(1, Ordering::Relaxed),
            mesh,
            rank: rank.clone(),
            strict: Cell::new(false),
            reduction: Cell::default(),
            no_grad: Cell::new(0),
            plans: PlanCache::default(),
            moves: RefCell::default(),
            underway: Underway::default(),
            moved_bytes: Cell::new(0),
            facts: RefCell::default(),
            most_nodes: RefCell::default(),
            groups: RefCell::default(),
        })))
    }

    /// The mesh's facts.
    pub fn mesh(&self) -> &Mesh {
        &self.0.mesh
    }

    /// This rank.
    pub fn rank(&self) -> &Rank {
        &self.0.rank
    }

    /// Where this rank's parts of tensors are: [`Rank::device`].
    pub fn device(&self) -> Device {
        self.0.rank.device()
    }

    /// Forbids (or allows) operators to move their operands to other ranks on their own account. Slicing what a rank
    /// already holds stays allowed: it communicates nothing.
    pub fn set_strict(&self, strict: bool) {
        self.0.strict.set(strict);
    }

    /// Until the guard is dropped, operators keep nothing for a backward pass.
    pub fn no_grad(&self) -> NoGrad {
        self.0.no_grad.set(self.0.no_grad.get() + 1);
        NoGrad(self.clone())
    }

    /// Bytes that this rank has received from others in redistributions so far, an all-reduce counted as a ring's: twice
    /// the tensor's, less one part in as many as there are ranks.
    pub fn received_bytes(&self) -> u64 {
        self.0.moved_bytes.get()
    }

    /// Waits until every rank has come here.
    ///
    /// # Errors
    /// Names the ranks that do not come before the deadline.
    pub fn barrier(&self) -> Result<()> {
        self.0.rank.world().barrier()
    }

    /// The interned facts of a tensor on this mesh.
    ///
    /// # Errors
    /// Refuses a layout that does not fit mesh or shape.
    pub fn facts(&self, dtype: DType, shape: &Shape, layout: &Layout) -> Result<Rc<Facts>> {
        let (mesh, shape, layout) = (self.0.mesh.clone(), shape.clone(), layout.clone());
        self.facts_of(Spec { mesh, dtype, shape, layout, terms: None })
    }

    /// The interned facts of a tensor on this mesh that may have terms.
    pub(super) fn facts_of(&self, spec: Spec) -> Result<Rc<Facts>> {
        if let Some(f) = self.0.facts.borrow().get(&spec) {
            return Ok(f.clone());
        }
        spec.validate("layout")?;
        let mut facts = self.0.facts.borrow_mut();
        let new = Facts::new(facts.len() as u32, spec.clone());
        facts.insert(spec, new.clone());
        Ok(new)
    }

    /// [`Terms::most_nodes`], remembered: plans ask for it at every row that they weigh.
    pub(super) fn most_nodes(&self, terms: &Terms) -> Option<usize> {
        if let Some(&n) = self.0.most_nodes.borrow().get(terms) {
            return n;
        }
        let n = terms.most_nodes(&self.0.mesh);
        self.0.most_nodes.borrow_mut().insert(terms.clone(), n);
        n
    }

    /// The ranks that differ from this one in the coordinates of `axes` (ascending) only, in row-major order.
    pub(super) fn group(&self, axes: &[usize]) -> Result<Group> {
        if let Some(g) = self.0.groups.borrow().get(axes) {
            return Ok(g.clone());
        }
        // What needs a group is planned from shared facts: all ranks come here at once, each for its own.
        let mut parts: Vec<Vec<usize>> = Vec::new();
        for rank in self.0.mesh.ranks() {
            if !parts.iter().any(|part| part.contains(&rank)) {
                let there = self.0.mesh.seen_from(rank).expect("the rank is the mesh's own");
                parts.push(there.slice(axes).ranks().collect());
            }
        }
        let name: Vec<&str> = axes.iter().map(|&a| self.0.mesh.axis_name(a)).collect();
        let group = self.0.rank.split(&parts, &name.join("×"))?;
        self.0.groups.borrow_mut().insert(axes.into(), group.clone());
        Ok(group)
    }

    pub(super) fn grad_enabled(&self) -> bool {
        self.0.no_grad.get() == 0
    }

    /// A number that no other mesh in this process has.
    pub(super) fn id(&self) -> u64 {
        self.0.id
    }

    pub(super) fn same(&self, other: &DeviceMesh) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

/// While it lives, operators keep nothing for a backward pass. Made by [`DeviceMesh::no_grad`].
pub struct NoGrad(DeviceMesh);

impl Drop for NoGrad {
    fn drop(&mut self) {
        self.0.0.no_grad.set(self.0.0.no_grad.get() - 1);
    }
}

impl fmt::Debug for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at rank {}", self.0.mesh, self.0.mesh.rank())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;
    use crate::dtensor::DTensor;

    #[test]
    fn guards_nest_and_end_with_their_scope() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 1)])?;
            let x = DTensor::zeros(&mesh, DType::F32, [3], Layout::replicated(1))?.requires_grad()?;
            let keeps = || -> Result<bool> { Ok(x.exp()?.has_history()) };
            {
                let _outer = mesh.no_grad();
                drop(mesh.no_grad());
                assert!(!keeps()?, "the outer guard still lives");
                assert!(x.has_history(), "what is there stays");
            }
            assert!(keeps()?);
            let failing = || -> Result<()> {
                let _guard = mesh.no_grad();
                x.reshape([2]).map(drop)
            };
            assert!(failing().is_err() && keeps()?, "an error ends the scope as well");
            Ok(())
        };
        spmd(1, run).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn facts_are_interned_and_refused_alike_each_time() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 2)])?;
            let facts = |dim: usize| {
                mesh.facts(
                    DType::F32,
                    &[3, 2].into(),
                    &Layout::new([crate::placement::Placement::Shard(dim)]),
                )
            };
            assert!(Rc::ptr_eq(&facts(1)?, &facts(1)?));
            assert_eq!(facts(2).unwrap_err(), facts(2).unwrap_err());
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
