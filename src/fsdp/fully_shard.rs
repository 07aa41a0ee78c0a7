//! Parameters of a model, placed for fully sharded data parallelism.

use std::fmt;

use rustc_hash::FxHashMap;

use super::block_policy::BlockPolicy;
use super::packing::lcm;
use super::planner::ShardPlanner;
use super::same_on_ranks::same_on_ranks;
use super::shard_plan::{BlockedTensor, ShardPlan};
use super::sharding::{Sharding, ShardingAxes};
use crate::comm::{ModulePath, path_matches};
use crate::error::{Error, Result};
use crate::nn::{ParamId, ParamPlacement, ParamUnit, Params, PlacedUnit};
use crate::placement::{Layout, Mesh, Placement, Spec};
use crate::tensor::Shape;

/// Places a model's parameters: each unit in a buffer that ranks share equally, each parameter in whole blocks.
///
/// `units` are patterns of module paths, such as `h.*`: the parameters below each module that matches are a unit, which
/// is gathered in one call and its gradients reduced in one; the parameters outside all units are the root's, which stay
/// gathered throughout a pass. Without patterns, units are the model's own: its numbered parts. Tensor, sequence and
/// expert parallelism are the [`Plan`](crate::nn::Plan)'s, on other axes; a part that they leave to a rank is sharded here.
///
/// Compares units, layouts and positions over the ranks (one all-gather of 40 bytes per rank; none on a single rank), and
/// moves each parameter once, from the plan's layout to its new one. Declare parameters under
/// [`Plan::fsdp`](crate::nn::Plan::fsdp) if no rank has room for all of them. Training then goes on as before, with
/// equal bits on every mesh.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::{Forward, Gpt, GptConfig, Params, Plan}};
/// use isoshard::{fsdp::{BlockPolicy, Sharding, fully_shard}, optim::{AdamW, WarmupCosine}, tensor::DType};
/// let losses = |mesh: &'static str, ranks, sharding: fn() -> Sharding| spmd(ranks, move |rank| {
///     let mesh = DeviceMesh::parse(&rank, mesh)?;
///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
///     let config =
///         GptConfig { vocabulary: 11, block: 6, layers: 2, heads: 2, width: 8, dropout: 0.0, bias: true };
///     let model = Gpt::new(&mut params, config)?;
///     fully_shard(&mut params, &["h.*"], &sharding(), &BlockPolicy::default())?;
///     let schedule = WarmupCosine { peak: 0.01, floor: 0.0, warmup: 1, steps: 3 };
///     let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(schedule).clip(1.0);
///     let batch = params.batch_layout();
///     let tokens = DTensor::zeros(&mesh, DType::I64, [4, 6], batch)?;
///     let mut losses = Vec::new();
///     for _ in 0..3 {
///         let mut loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &tokens)?;
///         optimizer.step(&mut params, &mut loss.backward()?)?;
///         losses.push(loss.item()?);
///     }
///     Ok(losses)
/// });
/// let single = &losses("dp=1", 1, || Sharding::ddp("dp"))?[0];
/// assert_eq!(losses("dp=2", 2, || Sharding::zero2("dp"))?[1], *single);
/// assert_eq!(losses("dp=2,fsdp=2", 4, || Sharding::hsdp("dp", "fsdp"))?[3], *single);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Refuses an axis that the mesh lacks, axes that do not nest ([`Sharding`]), a pattern that matches nothing, a module
/// inside another unit, blocks that do not fit a parameter, blocks of several rows of a parameter that the plan cuts into unequal
/// parts, a dtype of reductions that the mode does not have ([`Sharding::reduce_in`]), and a unit beyond the limit of
/// gathered bytes ([`Sharding::gather_at_most`]). Refuses, with one text on all ranks, parameters, shardings, units and
/// positions that differ between ranks. Nothing has moved then. Returns an error if a rank fails.
pub fn fully_shard(
    params: &mut Params,
    units: &[&str],
    sharding: &Sharding,
    blocks: &BlockPolicy,
) -> Result<ShardedUnits> {
    let planned = plan_units(params, units, sharding, blocks);
    let mesh = params.mesh().clone();
    let same = |(placed, _): &(Vec<PlacedUnit>, _)| same_on_ranks(params, sharding, blocks, placed);
    let (placed, units) = mesh.expect_same_on_ranks("fully_shard", planned, same)?;
    params.place(placed, sharding.batch(), sharding.gather_limit())?;
    Ok(ShardedUnits { units })
}

/// The units of a model that [`fully_shard`] has placed, in the order of their first parameters.
#[derive(Clone, Debug)]
pub struct ShardedUnits {
    units: Vec<ShardedUnit>,
}

/// A unit: parameters that share a buffer.
#[derive(Clone, Debug)]
pub struct ShardedUnit {
    /// The path of the unit's module; empty for the root.
    pub name: String,
    /// The paths of the parameters in the buffer, as the plan numbers its tensors. It lacks those without a dim or without
    /// elements, and those that the model's plan cuts into unequal parts: they are cut by rows, outside the buffer.
    pub paths: Vec<String>,
    /// Their positions in the buffer; `None` if nothing is sharded.
    pub plan: Option<ShardPlan>,
}

impl ShardedUnits {
    /// Returns the units.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// use isoshard::fsdp::{BlockPolicy, Sharding, fully_shard};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default(), 7)?;
    ///     for i in 0..3 {
    ///         params.root().child("h").child(i).param("w", [5, 4], Init::Ones)?;
    ///     }
    ///     let sharded = fully_shard(&mut params, &["h.*"], &Sharding::zero3("fsdp"), &BlockPolicy::default())?;
    ///     let plan = sharded.units()[1].plan.as_ref().expect("it is sharded");
    ///     assert_eq!((plan.shard_len(), plan.padding()), (16, 12)); // three rows and two, and padding to 16 bytes
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn units(&self) -> &[ShardedUnit] {
        &self.units
    }
}

/// Prints a line per unit: its parameters, its elements, the shard of a rank, and the padding.
impl fmt::Display for ShardedUnits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for ShardedUnit { name, paths, plan } in &self.units {
            let name = if name.is_empty() { "root" } else { name };
            let Some(plan) = plan else {
                writeln!(f, "{name}: nothing is sharded")?;
                continue;
            };
            let used = plan.buffer_len() - plan.padding();
            let share = 100.0 * plan.padding() as f64 / used.max(1) as f64;
            let (params, ranks, shard) = (paths.len(), plan.ranks(), plan.shard_len());
            writeln!(
                f,
                "{name}: {params} parameters, {used} elements on {ranks} ranks, {shard} each, padding {share:.1}%"
            )?;
        }
        Ok(())
    }
}

/// Returns the units with their parameters, in the order of their first parameters.
fn units_of(params: &Params, patterns: &[&str]) -> Result<Vec<(String, Vec<ParamId>)>> {
    if patterns.is_empty() {
        let unit = |unit: &ParamUnit| (unit.name.clone(), unit.members.to_vec());
        return Ok(params.units().iter().map(unit).collect());
    }
    let mut matched = vec![false; patterns.len()];
    let mut units: Vec<(String, Vec<ParamId>)> = Vec::new();
    let mut known: FxHashMap<&str, usize> = FxHashMap::default();
    for id in params.ids() {
        let path = params.path(id);
        let ends = path.match_indices('.').map(|(at, _)| at).chain([path.len()]);
        let modules: Vec<&str> = ends.map(|end| &path[..end]).collect();
        let mut name: Option<(&str, &str)> = None;
        for (pattern, matched) in patterns.iter().zip(&mut matched) {
            let Some(module) = modules.iter().find(|module| path_matches(pattern, module)) else { continue };
            *matched = true;
            match name {
                Some((other, first)) if other != *module => {
                    let given =
                        format!("{other:?} of {first:?} and {module:?} of {pattern:?}, both with {path}");
                    return Err(Error::invalid("fully_shard", "a parameter is in two units", given, ""));
                }
                _ => name = Some((module, pattern)),
            }
        }
        let name = name.map_or("", |(module, _)| module);
        let number = *known.entry(name).or_insert(units.len());
        match units.get_mut(number) {
            Some((_, ids)) => ids.push(id),
            None => units.push((name.to_string(), vec![id])),
        }
    }
    match matched.iter().position(|matched| !matched) {
        None => Ok(units),
        Some(k) => params.matching_for("fully_shard", patterns[k]).map(|_| units),
    }
}

/// Returns the units of the given patterns, with the layouts of their parameters, and their plans.
fn plan_units(
    params: &Params,
    units: &[&str],
    sharding: &Sharding,
    blocks: &BlockPolicy,
) -> Result<(Vec<PlacedUnit>, Vec<ShardedUnit>)> {
    let mesh = params.mesh().mesh().clone();
    let axes = sharding.axes(&mesh)?;
    for pattern in blocks.patterns() {
        params.matching_for("fully_shard", pattern)?;
    }
    let (mut placed, mut sharded) = (Vec::new(), Vec::new());
    let units = units_of(params, units)?;
    for pattern in sharding.patterns().iter().chain(sharding.reductions().iter().map(|(pattern, _)| pattern))
    {
        if !units.iter().any(|(name, _)| path_matches(pattern, name)) {
            let given = format!("{pattern:?} among {} units", units.len());
            return Err(Error::invalid("fully_shard", "a pattern matches no unit", given, ""));
        }
    }
    for (name, ids) in units {
        let of_unit = sharding.reductions().iter().rev().find(|(pattern, _)| path_matches(pattern, &name));
        let reduced_in = of_unit.map(|(_, dtype)| *dtype);
        if let Some(dtype) = reduced_in {
            dtype.expect_float("fully_shard").map_err(|e| Error::from(e).at(&unit_text(&name)))?;
            params.mesh().expect_reduces_in("fully_shard", ModulePath::new(&name), dtype)?;
        }
        let stays_gathered = sharding.patterns().iter().any(|pattern| path_matches(pattern, &name));
        let (unit, placements) = plan_unit(params, &mesh, &axes, name, &ids, blocks)?;
        let members = ids.into_iter().zip(placements).collect();
        let (name, padding) = (unit.name.clone(), unit.plan.as_ref().map_or(0, ShardPlan::padding));
        placed.push(PlacedUnit { name, members, stays_gathered, reduced_in, padding });
        sharded.push(unit);
    }
    Ok((placed, sharded))
}

/// The axes over which the buffer of a unit is cut.
struct BufferAxes<'a> {
    params: &'a Params,
    mesh: &'a Mesh,
    axes: &'a ShardingAxes,
    /// The first axis that shards parameters, gradients or states: the plan cuts the buffer along it, in whole blocks.
    planned: usize,
    /// The other axes, inside: they cut whole rows of a dim.
    inner: Vec<usize>,
}

/// The part of a parameter that the plan's axes leave to each rank.
struct EqualPart {
    shape: Shape,
    tensor: BlockedTensor,
}

/// The cut of a parameter over the axes of a buffer.
struct BufferCut {
    planned: Placement,
    /// The dim that the inner axes cut.
    inner_dim: usize,
}

/// Plans a unit's buffer over the first axis that shards its parameters, gradients or states.
fn plan_unit(
    params: &Params,
    mesh: &Mesh,
    axes: &ShardingAxes,
    name: String,
    ids: &[ParamId],
    blocks: &BlockPolicy,
) -> Result<(ShardedUnit, Vec<ParamPlacement>)> {
    expect_free_axes(params, mesh, axes, ids)?;
    let planned = axes.parameters.first().or(axes.gradients.first()).or(axes.states.first()).copied();
    let Some(planned) = planned else {
        let as_used = |&id: &ParamId| {
            let used = params.used_layout(id);
            ParamPlacement { stored: used.clone(), gradient: used.clone(), held: used.clone() }
        };
        let placements = ids.iter().map(as_used).collect();
        return Ok((ShardedUnit { name, paths: Vec::new(), plan: None }, placements));
    };
    let inner = axes.states.iter().copied().filter(|&a| a != planned).collect();
    let buffer = BufferAxes { params, mesh, axes, planned, inner };
    let parts = ids.iter().map(|&id| buffer.equal_part(id, blocks)).collect::<Result<Vec<_>>>()?;
    let tensors: Vec<BlockedTensor> = parts.iter().flatten().map(|part| part.tensor).collect();
    let planner = ShardPlanner::new(mesh.axis_len(planned));
    let plan = planner.plan(&tensors).map_err(|e| e.at(&unit_text(&name)))?;
    let (mut paths, mut placements) = (Vec::new(), Vec::with_capacity(ids.len()));
    for (&id, part) in ids.iter().zip(&parts) {
        let cut = match part {
            Some(part) => {
                paths.push(params.path(id).to_string());
                Some(buffer.planned_cut(part, &plan, paths.len() - 1))
            }
            None => buffer.row_cut(id),
        };
        placements.push(buffer.placement(id, cut.as_ref())?);
    }
    Ok((ShardedUnit { name, paths, plan: Some(plan) }, placements))
}

/// Refuses parameters that the model's plan cuts along an axis of the sharding.
fn expect_free_axes(params: &Params, mesh: &Mesh, axes: &ShardingAxes, ids: &[ParamId]) -> Result<()> {
    for &id in ids {
        let used = params.used_layout(id);
        let cut = axes.states.iter().find(|&&a| *used.axis(a) != Placement::Replicate);
        if let Some(&a) = cut {
            let given = format!("axis {} of {} at {}", mesh.axis_name(a), used, params.path(id));
            let rule = "the plan uses an axis of the sharding";
            return Err(Error::invalid("fully_shard", rule, given, "shard over another axis"));
        }
    }
    Ok(())
}

impl BufferAxes<'_> {
    /// Returns the part of a parameter that the plan's axes leave to a rank, if it is equal on all ranks and has
    /// elements, with its blocks.
    fn equal_part(&self, id: ParamId, blocks: &BlockPolicy) -> Result<Option<EqualPart>> {
        let (path, value) = (self.params.path(id), self.params.value(id));
        let spec = Spec::new(self.mesh, value.dtype(), value.shape(), self.params.used_layout(id).clone())?;
        let Some(shape) = equal_shape(&spec) else {
            if value.shape().numel() > 0 && !value.shape().is_empty() {
                blocks.of(path).expect_whole_between_rows(path, &spec)?;
            }
            return Ok(None);
        };
        let mut block = blocks.of(path).numel(path, &shape)?;
        if !self.inner.is_empty() {
            // Axes inside cut whole rows of the first dim.
            block = lcm(block, shape[1..].iter().product::<usize>().max(1)).unwrap_or(usize::MAX);
        }
        let tensor = BlockedTensor { len: shape.numel(), block: block.min(shape.numel()) };
        Ok(Some(EqualPart { shape, tensor }))
    }

    /// Returns the cut of the plan's tensor of this number.
    fn planned_cut(&self, part: &EqualPart, plan: &ShardPlan, number: usize) -> BufferCut {
        let ranks = 0..self.mesh.axis_len(self.planned);
        let lens: Vec<usize> = ranks.map(|rank| plan.part(number, rank).len()).collect();
        let most = lens.iter().copied().max().unwrap_or(0);
        let inner_len = self.inner.iter().map(|&a| self.mesh.axis_len(a)).product();
        let inner_dim = dim_inside(&part.shape, most, inner_len);
        BufferCut { planned: ragged(&part.shape, part.tensor.block, lens), inner_dim }
    }

    /// Returns the cut by rows of a parameter outside the buffer, or `None` if it has no elements or no dim.
    fn row_cut(&self, id: ParamId) -> Option<BufferCut> {
        let shape = self.params.value(id).shape();
        let has_rows = !shape.is_empty() && shape.numel() > 0;
        has_rows.then_some(BufferCut { planned: Placement::Shard(0), inner_dim: 0 })
    }

    fn placement(&self, id: ParamId, cut: Option<&BufferCut>) -> Result<ParamPlacement> {
        Ok(ParamPlacement {
            stored: self.layout(id, cut, &self.axes.states)?,
            gradient: self.layout(id, cut, &self.axes.gradients)?,
            held: self.layout(id, cut, &self.axes.parameters)?,
        })
    }

    /// Returns the layout of a parameter that is cut over `axes` alone.
    fn layout(&self, id: ParamId, cut: Option<&BufferCut>, axes: &[usize]) -> Result<Layout> {
        let mut layout = self.params.used_layout(id).clone();
        let Some(cut) = cut.filter(|_| !axes.is_empty()) else { return Ok(layout) };
        let mut order: Vec<usize> = (0..self.mesh.ndim()).filter(|a| !self.axes.states.contains(a)).collect();
        if axes.contains(&self.planned) {
            layout = layout.set(self.planned, cut.planned.clone());
        }
        order.push(self.planned);
        for &a in &self.inner {
            if axes.contains(&a) {
                layout = layout.set(a, Placement::Shard(cut.inner_dim));
            }
            order.push(a);
        }
        let (layout, value) = (layout.with_order(&order)?, self.params.value(id));
        Spec::new(self.mesh, value.dtype(), value.shape(), layout.clone())
            .map_err(|e| e.at(self.params.path(id)))?;
        Ok(layout)
    }
}

/// Returns a unit's name in an error.
fn unit_text(name: &str) -> String {
    if name.is_empty() { "the root unit".into() } else { format!("unit {name:?}") }
}

/// Returns the shape of a rank's part, if all ranks have equal parts that have elements and a dim.
fn equal_shape(spec: &Spec) -> Option<Shape> {
    let mesh = &spec.mesh;
    let first = spec.local_shape_at(&vec![0; mesh.ndim()]);
    let last: Vec<usize> = (0..mesh.ndim()).map(|a| mesh.axis_len(a) - 1).collect();
    let parts_are_equal = spec.local_shape_at(&last) == first;
    (parts_are_equal && !first.is_empty() && first.numel() > 0).then_some(first)
}

/// Returns the dim along which the axes inside, of `ranks` ranks, cut a rank's rows of dim 0, of at most `len` elements: dim 0
/// if it has a row for each of them, else the longest.
fn dim_inside(local: &Shape, len: usize, ranks: usize) -> usize {
    let rows = len / local[1..].iter().product::<usize>().max(1);
    let longest = (1..local.len()).max_by_key(|&d| (local[d], std::cmp::Reverse(d)));
    longest.filter(|&d| rows < ranks && local[d] > rows).unwrap_or(0)
}

/// Returns the placement that gives each rank the next elements of a tensor, in whole blocks.
fn ragged(local: &Shape, block: usize, lens: Vec<usize>) -> Placement {
    let inner = |dims: usize| local[dims..].iter().product::<usize>();
    // The fewest flattened dims between whose indices all boundaries lie.
    let dims = (1..=local.len()).find(|&dims| block.is_multiple_of(inner(dims))).unwrap_or(local.len());
    Placement::RaggedShard { dims, units: lens.into_iter().map(|len| len / inner(dims)).collect() }
}
