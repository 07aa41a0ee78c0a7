//! A mesh that can communicate: the rank, its groups, and its caches.

use std::cell::{Cell, OnceCell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustc_hash::FxHashMap;

use super::copied_bytes::copied_bytes;
use super::interned::{InternedMeta, NodeCounts};
use super::mesh_caches::MeshCaches;
use super::reduction::ReductionModes;
use super::unoptimised;
use crate::comm::{Group, Peers, Rank};
use crate::error::{Error, Result};
use crate::placement::Mesh;
use crate::tensor::{Device, Dims};

/// An n-D grid of ranks with named axes, as one of its ranks sees it, together with what the rank needs to
/// communicate.
///
/// It holds the rank's groups, settings (strict mode, reduction mode) and caches of plans. Cloning shares it. It
/// stays on its rank's thread.
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
pub struct DeviceMesh(pub(in crate::dtensor) Rc<MeshState>);

/// The state that all clones of a mesh share.
pub(in crate::dtensor) struct MeshState {
    /// A number that no other mesh in this process has.
    id: u64,
    pub mesh: Mesh,
    pub rank: Rank,
    pub strict: Cell<bool>,
    /// True if what a program's own functions return is compared over the ranks, and the mesh that does so, if it is
    /// another one.
    pub checks_own_code: Cell<bool>,
    pub checking_mesh: RefCell<Option<DeviceMesh>>,
    pub reduction: ReductionModes,
    pub no_grad: Cell<usize>,
    /// The number of guards that leave gradients unreduced.
    pub no_sync: Cell<usize>,
    /// The number of guards of [`DeviceMesh::keep_layouts`].
    pub keep_layouts: Cell<usize>,
    /// The number of guards under which the tape does not keep the results of cheap calls.
    pub recompute_cheap: Cell<usize>,
    pub moved_bytes: Cell<u64>,
    pub moving_calls: Cell<u64>,
    /// The number of the last backward pass.
    pub backward_pass: Cell<u64>,
    pub meta: InternedMeta,
    pub most_nodes: NodeCounts,
    groups: RefCell<FxHashMap<Dims, Group>>,
    /// The distances between ranks, one entry per axis.
    pub peers: OnceCell<Vec<Peers>>,
    pub caches: MeshCaches,
    /// The number of tallies and explanations. A call looks for them if it is not 0.
    pub observers: Cell<usize>,
}

impl DeviceMesh {
    /// Creates a mesh of all ranks of the world, row-major: the last axis varies fastest. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh};
    /// spmd(4, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2), ("tp", 2)])?;
    ///     assert_eq!(mesh.mesh().coords(), [rank.rank() / 2, rank.rank() % 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses axes whose product is not the number of ranks, and names that are empty or repeat.
    pub fn new(rank: &Rank, axes: &[(&str, usize)]) -> Result<DeviceMesh> {
        Self::of_world(rank, &Mesh::new(axes, 0)?)
    }

    /// Creates a mesh of all ranks from its text, such as `"dp=2,tp=2"`; `"1"` is a single rank. Communicates
    /// nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh};
    /// spmd(4, |rank| {
    ///     let mesh = DeviceMesh::parse(&rank, "dp=2,tp=2")?;
    ///     assert_eq!(mesh.mesh().to_string(), "(dp=2, tp=2)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`DeviceMesh::new`] refuses, and text of another form.
    pub fn parse(rank: &Rank, text: &str) -> Result<DeviceMesh> {
        Self::of_world(rank, &Mesh::parse(text, 0)?)
    }

    /// Creates a mesh over some ranks of the world, row-major in the order in which they are listed. Only its members
    /// create it; meshes may share ranks. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::{Layout, short::shard}, tensor::DType};
    /// spmd(3, |rank| {
    ///     if rank.rank() > 0 {
    ///         let mesh = DeviceMesh::over(&rank, &[("tp", 2)], [2, 1])?;
    ///         let x = DTensor::full(&mesh, DType::F32, [5], Layout::new([shard(0)]), 2)?;
    ///         assert_eq!(x.local().shape()[0], [2, 3][rank.rank() - 1]); // rank 2 is listed first
    ///         assert_eq!(x.sum_all()?.item()?, 10.0);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Mesh::over`] and [`DeviceMesh::on`] refuse.
    pub fn over(
        rank: &Rank,
        axes: &[(&str, usize)],
        ranks: impl IntoIterator<Item = usize>,
    ) -> Result<DeviceMesh> {
        Self::on(rank, &Mesh::over(axes, ranks)?)
    }

    /// Creates the mesh that `mesh` describes, seen from `rank`, whichever rank `mesh` was seen from. Communicates
    /// nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, placement::Mesh};
    /// spmd(3, |rank| {
    ///     let generate = Mesh::over(&[("tp", 2)], 1..3)?;
    ///     if generate.contains(rank.rank()) {
    ///         let mesh = DeviceMesh::on(&rank, &generate)?;
    ///         assert_eq!(mesh.mesh().coords(), [rank.rank() - 1]);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a mesh that is larger than the world or has a rank that is not in it, and a `rank` that is not in the
    /// mesh: only members create it.
    pub fn on(rank: &Rank, mesh: &Mesh) -> Result<DeviceMesh> {
        let refuse = |rule: &str, given: String, remedy: String| {
            Err(Error::invalid("device_mesh", rule, given, remedy))
        };
        let (world, len) = (rank.world_len(), mesh.rank_len());
        if len > world {
            return too_large(mesh, world);
        }
        if let Some(r) = mesh.ranks().find(|&r| r >= world) {
            let given = format!("rank {r} in {} for {world} rank(s)", mesh.with_ranks());
            return refuse("no such rank", given, format!("ranks are 0 to {}", world - 1));
        }
        match mesh.seen_from(rank.rank()) {
            Some(mesh) => Ok(Self::from_mesh(rank, mesh)),
            None => refuse(
                "this rank is not in the mesh",
                format!("{} on rank {}", mesh.with_ranks(), rank.rank()),
                "only members make it: ask Mesh::contains first".into(),
            ),
        }
    }

    fn of_world(rank: &Rank, mesh: &Mesh) -> Result<DeviceMesh> {
        let (world, len) = (rank.world_len(), mesh.rank_len());
        if len > world {
            return too_large(mesh, world);
        }
        if len < world {
            return Err(Error::invalid(
                "device_mesh",
                "the axes do not cover the world",
                format!("{mesh} for {world} rank(s)"),
                format!("start {len} rank(s), or name the mesh's with DeviceMesh::over"),
            ));
        }
        Ok(Self::from_mesh(rank, mesh.seen_from(rank.rank()).expect("it has all ranks")))
    }

    fn from_mesh(rank: &Rank, mesh: Mesh) -> DeviceMesh {
        unoptimised::warn_once();
        static MADE: AtomicU64 = AtomicU64::new(0);
        DeviceMesh(Rc::new(MeshState {
            id: MADE.fetch_add(1, Ordering::Relaxed),
            mesh,
            rank: rank.clone(),
            strict: Cell::new(false),
            checks_own_code: Cell::new(false),
            checking_mesh: RefCell::default(),
            reduction: ReductionModes::default(),
            no_grad: Cell::new(0),
            no_sync: Cell::new(0),
            keep_layouts: Cell::new(0),
            recompute_cheap: Cell::new(0),
            moved_bytes: Cell::new(0),
            moving_calls: Cell::new(0),
            backward_pass: Cell::new(0),
            meta: InternedMeta::default(),
            most_nodes: NodeCounts::default(),
            groups: RefCell::default(),
            peers: OnceCell::new(),
            caches: MeshCaches::default(),
            observers: Cell::new(usize::from(rank.has_clock())),
        }))
    }

    /// Returns the mesh's metadata: axes, ranks, coordinates.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     assert_eq!((mesh.mesh().rank_len(), mesh.mesh().axis("dp")?), (2, 0));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn mesh(&self) -> &Mesh {
        &self.0.mesh
    }

    /// Returns true if the mesh has an axis of this name.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     assert!(mesh.has("dp") && !mesh.has("tp"));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn has(&self, axis: &str) -> bool {
        self.0.mesh.axis(axis).is_ok()
    }

    /// Returns this rank.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     assert_eq!(mesh.rank().rank(), rank.rank());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn rank(&self) -> &Rank {
        &self.0.rank
    }

    /// Returns the device of this rank's shards: [`Rank::device`].
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, tensor::Device};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     assert_eq!(mesh.device(), Device::Cpu);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn device(&self) -> Device {
        self.0.rank.device()
    }

    /// Sets strict mode: if `strict`, operators refuse operands that they would have to redistribute with
    /// communication. Slicing what a rank already holds stays allowed, since it communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     mesh.set_strict(true);
    ///     let x = |layout: &str| DTensor::full(&mesh, DType::F32, [4, 4], layout, 1.0);
    ///     let refused = x("(S0)")?.add(&x("(S1)")?).unwrap_err().to_string();
    ///     assert!(refused.contains("would have to move, which strict mode forbids"), "{refused}");
    ///     x("(S0)")?.add(&x("(R)")?)?; // slices the second operand
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn set_strict(&self, strict: bool) {
        self.0.strict.set(strict);
    }

    /// Returns true in strict mode.
    pub(crate) fn is_strict(&self) -> bool {
        self.0.strict.get()
    }

    /// Returns the number of bytes that this rank has received from other ranks in redistributions so far. An
    /// all-reduce over `n` ranks counts as a ring's: `2 (n - 1) / n` times the tensor's bytes.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [6], "(S0)")?;
    ///     x.redistribute("(R)")?;
    ///     assert_eq!(mesh.received_bytes(), 3 * 4); // the other rank's three elements
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn received_bytes(&self) -> u64 {
        self.0.moved_bytes.get()
    }

    /// Returns the number of collective calls that this rank has made so far to redistribute tensors on this mesh.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4, 4], "(S0)")?;
    ///     x.redistribute("(R)")?.redistribute("(S1)")?;
    ///     assert_eq!(mesh.redistribution_calls(), 1); // the second is a slice
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn redistribution_calls(&self) -> u64 {
        self.0.moving_calls.get()
    }

    /// Counts a call of a redistribution, by which this rank received so many bytes.
    pub(in crate::dtensor) fn count_call(&self, received_bytes: u64) {
        let MeshState { moved_bytes, moving_calls, .. } = &*self.0;
        moved_bytes.set(moved_bytes.get().saturating_add(received_bytes));
        moving_calls.set(moving_calls.get() + 1);
    }

    /// Returns the number of bytes that this rank has copied so far to pack what its redistributions send, and to unpack
    /// what they receive. Bytes that a collective itself moves to their place do not count; those of all meshes of this rank
    /// do.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4, 4], "(S0)")?;
    ///     let before = mesh.copied_bytes();
    ///     x.redistribute("(S1)")?;
    ///     assert_eq!(mesh.copied_bytes() - before, 2 * 2 * 2 * 4); // two blocks of two rows and two columns
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn copied_bytes(&self) -> u64 {
        copied_bytes()
    }

    /// Waits until every rank of the mesh has called this.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     mesh.barrier()?;
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error that names the ranks that do not call it before the deadline.
    pub fn barrier(&self) -> Result<()> {
        self.all_ranks()?.barrier()
    }

    /// Returns the group of the ranks that differ from this one along the named axes only, row-major in the order of the
    /// mesh's axes. All ranks of the mesh ask for it at the same place in the program.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh};
    /// let ranks = spmd(4, |rank| {
    ///     let mesh = DeviceMesh::parse(&rank, "dp=2,tp=2")?;
    ///     assert_eq!(mesh.group_along(&["tp", "dp"])?.len(), 4);
    ///     Ok(mesh.group_along(&["dp"])?.ranks().to_vec())
    /// })?;
    /// assert_eq!(ranks, [[0, 2], [1, 3], [0, 2], [1, 3]]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses names that the mesh does not have; returns an error if the engine cannot open the group.
    pub fn group_along(&self, axes: &[&str]) -> Result<Group> {
        let mut axes = axes.iter().map(|name| self.0.mesh.axis(name)).collect::<Result<Vec<usize>>>()?;
        axes.sort_unstable();
        axes.dedup();
        self.group(&axes)
    }

    /// Returns the group of the ranks that differ from this one along `axes` (ascending) only, row-major.
    pub(in crate::dtensor) fn group(&self, axes: &[usize]) -> Result<Group> {
        if let Some(g) = self.0.groups.borrow().get(axes) {
            return Ok(g.clone());
        }
        let MeshState { mesh, rank, .. } = &*self.0;
        let part: Vec<usize> = mesh.slice(axes).ranks().collect();
        let name: Vec<&str> = axes.iter().map(|&a| mesh.axis_name(a)).collect();
        let name = name.join("×");
        // Calls that need a group are planned from shared metadata, so all ranks of the mesh come here together, each for
        // its own part. If the mesh is the whole world, the parts split it; their first ranks tell them apart.
        let group = if mesh.rank_len() == rank.world_len() && part.len() > 1 {
            rank.part(&part, part[0], &name)?
        } else {
            rank.group(&part, &name)?
        };
        self.0.groups.borrow_mut().insert(axes.into(), group.clone());
        Ok(group)
    }

    /// Returns the group of all ranks of the mesh, row-major.
    pub(in crate::dtensor) fn all_ranks(&self) -> Result<Group> {
        let MeshState { mesh, rank, .. } = &*self.0;
        if mesh.is_all_of(rank.world_len()) {
            return Ok(rank.world());
        }
        self.group(&(0..mesh.ndim()).collect::<Vec<_>>())
    }

    /// Returns a number that no other mesh in this process has.
    pub(in crate::dtensor) fn id(&self) -> u64 {
        self.0.id
    }

    pub(in crate::dtensor) fn same(&self, other: &DeviceMesh) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// Returns two different meshes as errors name them: by their axes, or if these are equal by their ranks too, or if
    /// nothing differs, as made apart.
    pub(in crate::dtensor) fn told_apart(&self, other: &DeviceMesh) -> [String; 2] {
        let (a, b) = (&self.0.mesh, &other.0.mesh);
        let (axes, ranks) = ([a.to_string(), b.to_string()], [a.with_ranks(), b.with_ranks()]);
        match (axes[0] == axes[1], a.ranks().eq(b.ranks())) {
            (false, _) => axes,
            (true, false) if ranks[0] != ranks[1] => ranks,
            (true, false) => [axes[0].clone(), format!("{} over other ranks", axes[1])],
            (true, true) => [axes[0].clone(), format!("another {} that was made apart", axes[1])],
        }
    }
}

fn too_large(mesh: &Mesh, world: usize) -> Result<DeviceMesh> {
    Err(Error::invalid(
        "device_mesh",
        "the mesh is larger than the world",
        format!("{mesh} for {world} rank(s)"),
        format!("start {} rank(s)", mesh.rank_len()),
    ))
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
    use crate::placement::Layout;
    use crate::tensor::DType;

    #[test]
    fn meshes_of_equal_axes_are_told_apart() {
        let run = |rank: Rank| {
            let over = |ranks: [usize; 2]| DeviceMesh::over(&rank, &[("dp", 2)], ranks);
            let (mesh, again, other) = (over([0, 1])?, over([0, 1])?, over([1, 0])?);
            let of = |mesh: &DeviceMesh| DTensor::zeros(mesh, DType::F32, [2], "(S0)");
            let sum = |other: &DeviceMesh| of(&mesh)?.add(&of(other)?).map(drop);
            let said = |other: &DeviceMesh| sum(other).map_err(|e| e.to_string());
            let refused = |a: &str, b: &str| {
                Err(format!(
                    "add: the operands are on different meshes; got f32[2]@(dp:S0) on {a}, f32[2]@(dp:S0) on {b}; make both on \
                     one DeviceMesh, of which clones are the same mesh"
                ))
            };
            assert_eq!(said(&mesh.clone()), Ok(()));
            assert_eq!(said(&again), refused("(dp=2)", "another (dp=2) that was made apart"));
            assert_eq!(said(&other), refused("(dp=2) over {0, 1}", "(dp=2) over {1, 0}"));
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }

    #[test]
    fn facts_are_interned_and_refused_alike_each_time() {
        let run = |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 2)])?;
            let meta = |dim: usize| {
                mesh.meta(DType::F32, &[3, 2].into(), &Layout::new([crate::placement::Placement::Shard(dim)]))
            };
            assert!(Rc::ptr_eq(&meta(1)?, &meta(1)?));
            assert_eq!(meta(2).unwrap_err(), meta(2).unwrap_err());
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
