//! The table of a model's parameters, and the parameters that a plan probably does not mean to place so.

use std::fmt;

use super::{Param, Params};
use crate::error::{Error, Result};
use crate::nn::plan::rules::Plan;
use crate::placement::{Mesh, Placement};

/// A parameter that stays whole is reported if it has more than this part of the elements of a sharded neighbour: routers and
/// other small maps stay whole on purpose.
const SMALL_PART: usize = 16;

/// A parameter whose layout is legal but probably not meant, from [`Params::warnings`].
///
/// Displayed as a sentence with the parameter's path.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanWarning {
    /// A plan shards a parameter's neighbours, those of the same part of the model, over an axis, and leaves the parameter
    /// whole on each rank.
    WholeBesideSharded {
        /// The parameter that stays whole.
        path: String,
        /// The mesh axis.
        axis: String,
        /// A neighbour that is sharded over the axis.
        neighbour: String,
    },
    /// A plan shards a dim over an axis whose ranks do not divide its extent. Ranks wait for the one with most, and a dim of
    /// several heads is cut inside one of them.
    Uneven {
        /// The parameter.
        path: String,
        /// The mesh axis.
        axis: String,
        /// The number of ranks along the axis.
        ranks: usize,
        /// The sharded dim.
        dim: usize,
        /// Its extent.
        extent: usize,
    },
}

impl fmt::Display for PlanWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlanWarning::WholeBesideSharded { path, axis, neighbour } => {
                write!(f, "{path} is whole on each rank of {axis}, which shards its neighbour {neighbour}")
            }
            PlanWarning::Uneven { path, axis, ranks, dim, extent } => {
                write!(
                    f,
                    "{path} has {extent} indices in dim {dim}, which {ranks} ranks of {axis} cannot share equally"
                )
            }
        }
    }
}

impl Params {
    /// Returns the parameters that the plan probably does not mean to place as it does: matrices that stay whole beside sharded
    /// ones, such as those whose names a plan does not know, and dims that the ranks of an axis do not divide. In
    /// [strict mode](crate::dtensor::DeviceMesh::set_strict) a forward pass refuses them. Communicates nothing.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().shard("h.*.attn.out.weight", "tp", 1), 7)?;
    ///     let mut root = params.root();
    ///     let mut attention = root.child("h.0.attn");
    ///     for map in ["q", "out"] {
    ///         attention.child(map).param("weight", [8, 8], Init::Ones)?;
    ///     }
    ///     let warnings: Vec<String> = params.warnings().iter().map(|warning| warning.to_string()).collect();
    ///     let text = "h.0.attn.q.weight is whole on each rank of tp, which shards its neighbour h.0.attn.out.weight";
    ///     assert_eq!(warnings, [text]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn warnings(&self) -> Vec<PlanWarning> {
        let mesh = self.mesh.mesh();
        let axes = (0..mesh.ndim()).filter(|&a| mesh.axis_len(a) > 1);
        axes.flat_map(|a| self.list.iter().filter_map(move |param| self.warning(mesh, a, param))).collect()
    }

    fn warning(&self, mesh: &Mesh, a: usize, param: &Param) -> Option<PlanWarning> {
        let (path, axis, ranks) = (param.path.clone(), mesh.axis_name(a).to_string(), mesh.axis_len(a));
        let shape = param.value.shape();
        match *param.used.axis(a) {
            Placement::Shard(dim) if !shape[dim].is_multiple_of(ranks) => {
                Some(PlanWarning::Uneven { path, axis, ranks, dim, extent: shape[dim] })
            }
            Placement::Replicate if shape.len() >= 2 => {
                let part = part_of(&param.path)?;
                let is_neighbour = |other: &&Param| {
                    part_of(&other.path) == Some(part)
                        && other.used.axis(a).shard_dim().is_some()
                        && other.value.shape().len() >= 2
                        && other.value.numel() < SMALL_PART * param.value.numel()
                };
                let neighbour = self.list.iter().find(is_neighbour)?.path.clone();
                Some(PlanWarning::WholeBesideSharded { path, axis, neighbour })
            }
            Placement::Replicate
            | Placement::Shard(_)
            | Placement::Partial(_)
            | Placement::RaggedShard { .. } => None,
        }
    }

    /// Refuses a plan with [warnings](Params::warnings) in strict mode.
    pub(super) fn expect_no_warnings(&self) -> Result<()> {
        if !self.mesh.is_strict() {
            return Ok(());
        }
        let warnings: Vec<String> = self.warnings().iter().map(PlanWarning::to_string).collect();
        if warnings.is_empty() {
            return Ok(());
        }
        let remedy = "place them with Plan::shard, or leave strict mode";
        Err(Error::sharding(
            "plan",
            "strict mode refuses layouts that are probably not meant",
            warnings.join("; "),
            remedy,
        ))
    }
}

/// Returns the part of the model in which parameters are neighbours: the module that holds the parameter's own module. `None`
/// for the parameters of the model's own modules.
fn part_of(path: &str) -> Option<&str> {
    let (module, _) = path.rsplit_once('.')?;
    let (part, _) = module.rsplit_once('.')?;
    Some(part)
}

/// Prints a line per parameter: path, shape, layout between steps, bytes on this rank, and the rules of the plan that placed it;
/// then the totals, and the [warnings](Params::warnings).
///
/// ```
/// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Linear, Params, Plan}, rng::Init};
/// let texts = spmd(4, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2), ("tp", 2)])?;
///     let mut params = Params::new(&mesh, Plan::default().shard("up.*", "tp", 0).fsdp("fsdp"), 7)?;
///     Linear::new(params.root().child("up"), 3, 8, Init::Ones)?;
///     Linear::without_bias(params.root().child("down"), 8, 3, Init::Ones)?;
///     Ok(params.to_string())
/// })?;
/// assert_eq!(texts[0], "\
/// parameter    dtype and shape  layout                           bytes on rank 0  placed by
/// up.weight    f32[8, 3]        (fsdp:RS(0..1; 2,2)^1, tp:S0^0)               24  shard(\"up.*\", \"tp\", 0), fsdp(\"fsdp\")
/// up.bias      f32[8]           (fsdp:RS(0..1; 2,2)^1, tp:S0^0)                8  shard(\"up.*\", \"tp\", 0), fsdp(\"fsdp\")
/// down.weight  f32[3, 8]        (fsdp:RS(0..1; 2,1), tp:R)                    64  fsdp(\"fsdp\")
/// 3 parameters, 56 elements, 224 bytes; 96 bytes on rank 0 of (fsdp=2, tp=2)");
/// # Ok::<(), isoshard::Error>(())
/// ```
impl fmt::Display for Params {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mesh, rank) = (self.mesh.mesh(), self.mesh.rank().rank());
        let bytes = |param: &Param| param.value.local().len_bytes();
        let head = ["parameter", "dtype and shape", "layout", &format!("bytes on rank {rank}"), "placed by"];
        let mut rows = vec![head.map(String::from)];
        rows.extend(self.list.iter().map(|param| {
            let notation = param.value.spec().to_string();
            let (shape, layout) = notation.split_once('@').expect("a notation has a layout");
            let placed_by = self.plan.placed_by(&param.path);
            [param.path.clone(), shape.into(), layout.into(), bytes(param).to_string(), placed_by]
        }));
        let width = |k: usize| rows.iter().map(|row| row[k].chars().count()).max().unwrap_or(0);
        let [path, shape, layout, held] = [0, 1, 2, 3].map(width);
        for [a, b, c, d, e] in &rows {
            let line = format!("{a:path$}  {b:shape$}  {c:layout$}  {d:>held$}  {e}");
            writeln!(f, "{}", line.trim_end())?;
        }
        let whole: u64 = self.list.iter().map(|p| p.value.dtype().bytes_of(p.value.numel())).sum();
        let held: usize = self.list.iter().map(bytes).sum();
        let (parameters, elements) = (self.len(), self.numel());
        write!(
            f,
            "{parameters} parameters, {elements} elements, {whole} bytes; {held} bytes on rank {rank} of {mesh}"
        )?;
        self.warnings().iter().try_for_each(|warning| write!(f, "\nwarning: {warning}"))
    }
}

impl Plan {
    /// Returns the calls that placed a parameter, separated by commas; empty if no rule matches it.
    fn placed_by(&self, path: &str) -> String {
        self.rules_of(path)
            .chain(self.fsdp_axis().map(|axis| format!("fsdp({axis:?})")))
            .collect::<Vec<_>>()
            .join(", ")
    }
}

/// Prints one line per parameter: its path and its notation.
impl fmt::Debug for Params {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.list.iter().map(|p| (&p.path, p.value.spec().to_string()))).finish()
    }
}
