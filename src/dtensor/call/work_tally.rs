//! Counts the work of operator calls, and each rank's share of it.

use std::cell::RefCell;
use std::fmt;
use std::rc::{Rc, Weak};

use crate::dtensor::mesh::device_mesh::DeviceMesh;
use crate::dtensor::mesh::mesh_caches::{CachePlace, MeshCache};
use crate::dtensor::mesh::rank_reports::gather_words;
use crate::dtensor::plan::call_plan::CallPlan;
use crate::dtensor::plan::work_share::part_of_elements;
use crate::error::{Error, Result};
use crate::ops::{Op, Work};
use crate::tensor::{DType, Device};

/// The [`Work`] of the operator calls on a mesh, and this rank's share of it: created by [`DeviceMesh::tally_work`].
/// Counts until it is dropped.
///
/// A rank's share of a call is the part of the operands' and results' elements that the call's sharding gives it. For
/// each mesh axis that shards an operand or a result the rank has its part along that axis; along other axes all ranks
/// do the same work. So the shares add up to the whole if every axis shards something, and to more if ranks repeat work.
/// Work that depends on values or positions counts as if every element cost the same.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
/// spmd(4, |rank| {
///     let mesh = DeviceMesh::parse(&rank, "dp=2,tp=2")?;
///     let x = DTensor::zeros(&mesh, DType::F32, [5, 8], "(S0, R)")?;
///     let w = DTensor::zeros(&mesh, DType::F32, [8, 6], "(R, S1)")?;
///     let tally = mesh.tally_work();
///     x.matmul(&w)?;
///     // 2 m n k operations in all: this rank has 3 or 2 of the 5 rows, and 3 of the 6 columns.
///     assert_eq!(tally.total().whole.flops, 2 * 5 * 6 * 8);
///     assert_eq!(tally.total().share.flops, 2 * [3, 3, 2, 2][rank.rank()] * 3 * 8);
///     // No rank idles: each has at least half of an even share.
///     let all = tally.of_ranks()?;
///     assert!(all.iter().all(|share| 2 * 4 * share.flops >= tally.total().whole.flops));
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
pub struct WorkTally {
    mesh: DeviceMesh,
    rows: Rc<RefCell<Vec<OperatorWork>>>,
}

/// The work of the calls of one operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorWork {
    /// The operator's name.
    pub operator: &'static str,
    /// The number of its calls and their work.
    pub total: WorkTotal,
}

/// A number of calls, their work, and this rank's share of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkTotal {
    /// The number of calls.
    pub calls: u64,
    /// The work of the calls on global shapes, which is the same on every mesh.
    pub whole: Work,
    /// This rank's share, rounded for each call.
    pub share: Work,
}

/// The tallies that count at present.
#[derive(Default)]
struct RunningTallies(RefCell<Vec<Weak<RefCell<Vec<OperatorWork>>>>>);

impl MeshCache for RunningTallies {
    const PLACE: CachePlace = CachePlace::Tallies;
}

impl DeviceMesh {
    /// Starts to count the work of the operator calls on this mesh, those of backward passes and optimizers included.
    /// Communicates nothing. A mesh that no tally counts does no extra work.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4], "(S0)")?;
    ///     let tally = mesh.tally_work();
    ///     x.add(&x)?;
    ///     assert_eq!((tally.total().calls, tally.total().share.flops), (1, 2));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn tally_work(&self) -> WorkTally {
        let rows = Rc::default();
        let running: &RunningTallies = self.cache();
        running.0.borrow_mut().push(Rc::downgrade(&rows));
        self.0.observers.set(self.0.observers.get() + 1);
        WorkTally { mesh: self.clone(), rows }
    }
}

impl WorkTally {
    /// Returns the work by operator, in the order of first calls.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let tally = mesh.tally_work();
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4, 2], "(S0)")?;
    ///     x.exp()?.sum_all()?;
    ///     let rows = tally.rows();
    ///     assert_eq!([rows[0].operator, rows[1].operator], ["exp", "sum"]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn rows(&self) -> Vec<OperatorWork> {
        self.rows.borrow().clone()
    }

    /// Returns the sum over all operators.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let tally = mesh.tally_work();
    ///     let x = DTensor::zeros(&mesh, DType::F32, [4], "(R)")?;
    ///     x.add(&x)?; // every rank adds all four elements
    ///     assert_eq!((tally.total().whole.flops, tally.total().share.flops), (4, 4));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn total(&self) -> WorkTotal {
        self.rows.borrow().iter().fold(WorkTotal::default(), |sum, row| sum.plus(row.total))
    }

    /// Returns the shares of all ranks of the mesh, row-major: one all-gather of 16 bytes per rank (not counted in
    /// [`DeviceMesh::received_bytes`]; none on a single rank). All ranks of the mesh call it together.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// let shares = spmd(3, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 3)])?;
    ///     let tally = mesh.tally_work();
    ///     DTensor::zeros(&mesh, DType::F32, [4], "(S0)")?.neg()?;
    ///     tally.of_ranks()
    /// })?;
    /// assert_eq!(shares[0].iter().map(|share| share.flops).collect::<Vec<_>>(), [2, 2, 0]); // rank 2 idles
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a dry run, which has one rank only. Returns an error if communication fails.
    pub fn of_ranks(&self) -> Result<Vec<Work>> {
        let (group, device) = (self.mesh.all_ranks()?, self.mesh.device());
        if device == Device::Meta && group.len() > 1 {
            let (rule, remedy) = ("a dry run knows its own rank's work only", "read WorkTally::total");
            return Err(Error::unsupported("of_ranks", rule, self.mesh.mesh().to_string(), remedy));
        }
        let Work { flops, bytes } = self.total().share;
        let all = gather_words(&group, device, vec![flops as i64, bytes as i64])?;
        Ok(all.into_iter().map(|words| Work { flops: words[0] as u64, bytes: words[1] as u64 }).collect())
    }
}

impl Drop for WorkTally {
    fn drop(&mut self) {
        let running: &RunningTallies = self.mesh.cache();
        let own = Rc::downgrade(&self.rows);
        running.0.borrow_mut().retain(|rows| !rows.ptr_eq(&own));
        self.mesh.0.observers.set(self.mesh.0.observers.get() - 1);
    }
}

impl WorkTotal {
    fn plus(self, other: WorkTotal) -> WorkTotal {
        let add = |a: Work, b: Work| Work {
            flops: a.flops.saturating_add(b.flops),
            bytes: a.bytes.saturating_add(b.bytes),
        };
        WorkTotal {
            calls: self.calls + other.calls,
            whole: add(self.whole, other.whole),
            share: add(self.share, other.share),
        }
    }
}

impl CallPlan {
    /// Returns the work of a call of `op` by this plan, and this rank's share of it.
    pub(in crate::dtensor) fn work_of(&self, mesh: &DeviceMesh, op: &dyn Op) -> [Work; 2] {
        *self.work.get_or_init(|| {
            let specs = self.targets.iter().chain(&self.outs);
            let tensors: Vec<_> = specs.map(|m| (m.shape(), m.layout())).collect();
            let part = part_of_elements(mesh.mesh(), &tensors, mesh.mesh().coords());
            let outs: Vec<_> = self.outs.iter().map(|m| m.meta()).collect();
            let whole = op.work(&self.metas, &outs);
            let of = |n: u64| (n as f64 * part).round() as u64;
            [whole, Work { flops: of(whole.flops), bytes: of(whole.bytes) }]
        })
    }
}

/// Adds a call to the tallies that count.
pub(in crate::dtensor) fn count(mesh: &DeviceMesh, op: &dyn Op, plan: &CallPlan) {
    let [whole, share] = plan.work_of(mesh, op);
    let dtype = plan.metas.first().map_or(DType::F32, |meta| meta.dtype);
    mesh.rank().compute(dtype, share.flops, share.bytes);
    let call = WorkTotal { calls: 1, whole, share };
    let running: &RunningTallies = mesh.cache();
    for rows in running.0.borrow().iter().filter_map(Weak::upgrade) {
        let mut rows = rows.borrow_mut();
        match rows.iter_mut().find(|row| row.operator == op.name()) {
            Some(row) => row.total = row.total.plus(call),
            None => rows.push(OperatorWork { operator: op.name(), total: call }),
        }
    }
}

/// Prints a table with a row per operator.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
/// let tables = spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let tally = mesh.tally_work();
///     DTensor::zeros(&mesh, DType::F32, [6], "(S0)")?.neg()?;
///     Ok(tally.to_string())
/// })?;
/// assert!(tables[0].lines().nth(1).is_some_and(|line| line.starts_with("neg") && line.contains(" 3 ")));
/// # Ok::<(), isoshard::Error>(())
/// ```
impl fmt::Display for WorkTally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<24}{:>8}{:>18}{:>18}{:>18}{:>18}",
            "operator", "calls", "flops", "share", "bytes", "share"
        )?;
        let mut line = |operator: &str, WorkTotal { calls, whole, share }: WorkTotal| {
            let [flops, own_flops] = [whole.flops, share.flops];
            writeln!(
                f,
                "{operator:<24}{calls:>8}{flops:>18}{own_flops:>18}{:>18}{:>18}",
                whole.bytes, share.bytes
            )
        };
        self.rows().iter().try_for_each(|row| line(row.operator, row.total))?;
        line("all", self.total())
    }
}

impl fmt::Debug for WorkTally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WorkTally").field(&self.total()).finish()
    }
}
