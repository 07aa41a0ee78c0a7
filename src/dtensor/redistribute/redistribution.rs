//! Redistribution plans: the steps between two layouts, which every rank computes for itself without communication.

use std::fmt;

use super::cost::{CostModel, communicates};
use super::search::{Hop, cheapest, fold_axes, leaving_partials, replicated};
use super::unit_hops::unit_hops;
use crate::comm::{self, Network};
use crate::dtensor::redistribute::exchange_piece::{communicating_axes, is_gather};
use crate::error::{Error, Result};
use crate::placement::{Layout, Mesh, Placement, Spec};
use crate::tensor::{Dims, ReduceOp};

/// The plan of a change of layout, as one rank takes part in it: steps of at most one collective call each.
///
/// Displayed as
/// `reduce_scatter(sum) over tp{0, 1}: receives 48 bytes, then all_gather over dp×tp{0, 1, 2, 3}: receives 96 bytes`.
///
/// Without `Partial`, the rank receives exactly the elements that it lacks, once. With `Partial`, the plan is the
/// cheapest of all orders of reductions and moves that keep the bits. Cost is the modelled time of calls and bytes
/// ([`Network`]), per step for the rank that receives most; by default a call takes as long as 16 KiB. The search is
/// exhaustive up to four mesh axes; with more axes, or many dims, it considers the likeliest layouts. On a network
/// with fast and slow links, an exchange may go through another layout to send fewer bytes over the slow links.
///
/// ```
/// use isoshard::dtensor::Redistribution;
/// use isoshard::placement::{Mesh, Spec};
///
/// let mesh = Mesh::parse("dp=2,tp=4", 0)?;
/// let spec = |text| Spec::parse(text, &mesh);
/// let (from, to) = (spec("f32[512, 512]@(dp:P(sum), tp:S0)")?, spec("f32[512, 512]@(dp:S1, tp:S1)")?);
/// let planned = Redistribution::plan(&from, &to)?;
/// // Two partial values of an eighth of the elements, less those that are here: 7/32 of the tensor.
/// assert_eq!((planned.received_bytes(), planned.calls()), (512 * 512 * 4 * 7 / 32, 1));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Redistribution {
    pub(super) steps: Vec<RedistributionStep>,
    cost: comm::Cost,
}

/// One step, with the metadata before and after it.
#[derive(Clone, Debug)]
pub(super) struct RedistributionStep {
    pub action: StepAction,
    pub from: Spec,
    pub to: Spec,
    /// The axes along which ranks communicate, ascending.
    pub axes: Dims,
    /// The bytes that this rank receives from other ranks; for an all-reduce, those of a ring.
    pub received_bytes: u64,
}

/// The operation of a step.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum StepAction {
    /// Folds these axes; every rank along them receives the whole result.
    AllReduce(ReduceOp, Dims),
    /// Folds these axes; every rank receives the partial values of the elements that it will hold.
    Fold(ReduceOp, Dims),
    Exchange(ExchangeKind),
    /// Adds up the nodes of a partial sum on this rank, without the order of the tree (fast mode).
    Collapse,
    /// Rounds a finished f16 or bf16 sum, whose nodes were f32.
    Round,
    /// Makes this rank's part of a new `Partial` along an axis: the value on the axis's first rank, the identity on
    /// the others.
    Share(ReduceOp, usize),
}

/// The collective call of an exchange. It follows from the layouts, so that all ranks choose the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum ExchangeKind {
    /// No rank lacks anything.
    Slice,
    AllGather,
    /// One rank holds all that the other ranks lack.
    Broadcast {
        root: usize,
    },
    AllToAll,
}

impl Redistribution {
    /// Plans the change from `from` to `to`, two layouts of one tensor on one mesh, over the default network, as the
    /// mesh's rank sees it. Communicates nothing, and needs no memory that grows with the number of ranks.
    ///
    /// ```
    /// use isoshard::{dtensor::Redistribution, placement::{Mesh, Spec}};
    /// let mesh = Mesh::parse("dp=4", 0)?;
    /// let spec = |text| Spec::parse(text, &mesh);
    /// let plan = Redistribution::plan(&spec("f32[8, 8]@(dp:S0)")?, &spec("f32[8, 8]@(dp:S1)")?)?;
    /// assert_eq!(plan.to_string(), "all_to_all over dp{0, 1, 2, 3}: receives 48 bytes");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses specs of different tensors or meshes.
    pub fn plan(from: &Spec, to: &Spec) -> Result<Redistribution> {
        Redistribution::over(&Network::default(), from, to)
    }

    /// Plans as [`Redistribution::plan`] does, over this network, which must be the same on all ranks.
    ///
    /// ```
    /// use isoshard::comm::{Level, Network};
    /// use isoshard::dtensor::Redistribution;
    /// use isoshard::placement::{Mesh, Spec};
    ///
    /// // Four machines of two ranks. tp is outermost, so the two ranks of a machine hold rows that are far apart.
    /// let level = |ranks, latency_s, bytes_per_s| Level { ranks, latency_s, bytes_per_s };
    /// let network = Network::new([level(2, 1e-6, 100e9), level(8, 1e-5, 10e9)])?;
    /// let mesh = Mesh::parse("dp=4,tp=2", 0)?;
    /// let spec = |text| Spec::parse(text, &mesh);
    /// let (from, to) = (spec("f32[4096, 4096]@(dp:S0^1, tp:S0^0)")?, spec("f32[4096, 4096]@(dp:R, tp:R)")?);
    /// let (near, far) = (Redistribution::over(&network, &from, &to)?, Redistribution::plan(&from, &to)?);
    /// assert_eq!((near.received_bytes(), far.received_bytes()), (56 << 20, 56 << 20));
    /// assert_eq!((near.calls(), far.calls()), (2, 1)); // across machines first, then within each
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Redistribution::plan`] refuses.
    pub fn over(network: &Network, from: &Spec, to: &Spec) -> Result<Redistribution> {
        Redistribution::plan_with_costs(from, to, CostModel(network))
    }

    /// Plans the reduction of a gradient that shares its calls with others of its unit.
    pub(super) fn in_unit(network: &Network, from: &Spec, to: &Spec) -> Result<Redistribution> {
        match unit_hops(from, &to.layout, CostModel(network)) {
            Some((hops, cost)) => Redistribution::along(hops, cost.time, from, to),
            None => Redistribution::over(network, from, to),
        }
    }

    /// Plans with a given cost model.
    pub(super) fn plan_with_costs(from: &Spec, to: &Spec, costs: CostModel<'_>) -> Result<Redistribution> {
        if from.mesh != to.mesh || from.dtype != to.dtype || from.shape != to.shape {
            return Err(Error::sharding(
                "redistribute",
                "wants two layouts of one tensor on one mesh",
                format!("{from} and {to}"),
                "give specs that differ in their layouts alone",
            ));
        }
        let (hops, cost) = cheapest(from, &replicated(&to.layout, &opening(from, to)), costs)?;
        Redistribution::along(hops, cost.time, from, to)
    }

    /// Returns the plan of a path, and of the steps around it that do not communicate.
    fn along(hops: Vec<Hop>, cost: comm::Cost, from: &Spec, to: &Spec) -> Result<Redistribution> {
        let opening = opening(from, to);
        let target = replicated(&to.layout, &opening);
        let mut plan = PlanBuilder { cur: from.clone(), steps: Vec::new() };
        for hop in hops {
            if leaving_partials(&plan.cur.layout, &target).is_empty() {
                plan.collapse(to);
            }
            match hop {
                Hop::AllReduce(axes) => plan.all_reduce(axes)?,
                Hop::Fold(axes, layout) => plan.fold(axes, layout)?,
                Hop::Exchange(layout) => plan.exchange(layout)?,
            }
        }
        plan.collapse(to);
        for a in opening {
            plan.share(a, to.layout.axis(a))?;
        }
        Ok(Redistribution { steps: plan.steps, cost })
    }

    /// Returns the metadata before the first step and after the last, or `None` if there is none.
    pub(in crate::dtensor) fn ends(&self) -> Option<(&Spec, &Spec)> {
        Some((&self.steps.first()?.from, &self.steps.last()?.to))
    }

    /// Returns the number of bytes that this rank receives from other ranks; an all-reduce counts as a ring's.
    ///
    /// ```
    /// use isoshard::{dtensor::Redistribution, placement::{Mesh, Spec}};
    /// let mesh = Mesh::parse("dp=4", 0)?;
    /// let spec = |text| Spec::parse(text, &mesh);
    /// let gather = Redistribution::plan(&spec("f32[8]@(dp:S0)")?, &spec("f32[8]@(dp:R)")?)?;
    /// assert_eq!(gather.received_bytes(), 6 * 4); // six of eight elements
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn received_bytes(&self) -> u64 {
        self.steps.iter().map(|s| s.received_bytes).fold(0, u64::saturating_add)
    }

    /// Returns the number of bytes that this rank receives in each step, in order; steps without a call receive 0.
    ///
    /// ```
    /// use isoshard::{dtensor::Redistribution, placement::{Mesh, Spec}};
    /// let mesh = Mesh::parse("dp=2", 0)?;
    /// let spec = |text| Spec::parse(text, &mesh);
    /// let plan = Redistribution::plan(&spec("f32[8]@(dp:P(sum))")?, &spec("f32[8]@(dp:S0)")?)?;
    /// assert_eq!(plan.step_bytes().collect::<Vec<_>>(), [16]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn step_bytes(&self) -> impl Iterator<Item = u64> + '_ {
        self.steps.iter().map(|s| s.received_bytes)
    }

    /// Returns the modelled time: the sum over steps of the time of the rank that receives most, equal on all ranks.
    ///
    /// Costs satisfy the triangle inequality: going through a third layout never costs less, except for paths that
    /// would change the bits of a sum.
    ///
    /// ```
    /// use isoshard::{dtensor::Redistribution, placement::{Mesh, Spec}};
    /// let mesh = Mesh::parse("dp=4", 0)?;
    /// let spec = |text| Spec::parse(text, &mesh);
    /// let cost = |from, to| Ok::<_, isoshard::Error>(Redistribution::plan(&spec(from)?, &spec(to)?)?.cost());
    /// assert!(cost("f32[1024]@(dp:R)", "f32[1024]@(dp:S0)")? < cost("f32[1024]@(dp:S0)", "f32[1024]@(dp:R)")?);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn cost(&self) -> comm::Cost {
        self.cost
    }

    /// Returns the number of collective calls.
    ///
    /// ```
    /// use isoshard::{dtensor::Redistribution, placement::{Mesh, Spec}};
    /// let mesh = Mesh::parse("dp=4", 0)?;
    /// let spec = |text| Spec::parse(text, &mesh);
    /// let slice = Redistribution::plan(&spec("f32[8]@(dp:R)")?, &spec("f32[8]@(dp:S0)")?)?;
    /// assert_eq!(slice.calls(), 0);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn calls(&self) -> usize {
        self.collectives().count()
    }

    /// Returns the names of the collective calls, in order.
    ///
    /// ```
    /// use isoshard::{dtensor::Redistribution, placement::{Mesh, Spec}};
    /// let mesh = Mesh::parse("dp=4", 0)?;
    /// let spec = |text| Spec::parse(text, &mesh);
    /// let plan = Redistribution::plan(&spec("f32[8]@(dp:P(sum))")?, &spec("f32[8]@(dp:S0)")?)?;
    /// assert_eq!(plan.collectives().collect::<Vec<_>>(), ["reduce_scatter"]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn collectives(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.steps.iter().filter(|s| s.communicates()).map(RedistributionStep::name)
    }
}

/// Returns the axes that become `Partial`.
fn opening(from: &Spec, to: &Spec) -> Dims {
    let opens = |a: &usize| to.layout.axis(*a).is_partial() && to.layout.axis(*a) != from.layout.axis(*a);
    (0..to.mesh.ndim()).filter(opens).collect()
}

/// A plan under construction: the metadata after the steps so far.
struct PlanBuilder {
    cur: Spec,
    steps: Vec<RedistributionStep>,
}

impl PlanBuilder {
    /// Appends a step, and one that rounds if the stored dtype changes.
    fn push(&mut self, action: StepAction, to: Spec, axes: Dims, received: usize) {
        let received_bytes = self.cur.stored_dtype().bytes_of(received);
        let from = std::mem::replace(&mut self.cur, to.clone());
        let rounds = from.stored_dtype() != to.stored_dtype();
        self.steps.push(RedistributionStep { action, from, to: to.clone(), axes, received_bytes });
        if rounds {
            let (from, axes) = (to.clone(), Dims::new());
            self.steps.push(RedistributionStep {
                action: StepAction::Round,
                from,
                to,
                axes,
                received_bytes: 0,
            });
        }
    }

    fn all_reduce(&mut self, axes: Dims) -> Result<()> {
        let to = self.cur.with_layout(replicated(&self.cur.layout, &axes))?;
        let (others, outs) = (self.others(&axes), to.nodes_len_at(to.mesh.coords()));
        // Each member reduces one chunk of the flattened elements, by the ceil rule.
        let (mesh, len) = (&self.cur.mesh, self.cur.local_shape().numel());
        let place = axes.iter().fold(0, |p, &a| p * mesh.axis_len(a) + mesh.coords()[a]);
        let members = axes.iter().map(|&a| mesh.axis_len(a)).product();
        let share = crate::placement::chunk(len, members, place).len();
        let action = StepAction::AllReduce(self.op(&axes), axes.clone());
        self.push(
            action,
            to,
            axes,
            others.saturating_mul(share).saturating_add(outs.saturating_mul(len - share)),
        );
        Ok(())
    }

    fn fold(&mut self, axes: Dims, layout: Layout) -> Result<()> {
        let to = self.cur.with_layout(layout)?;
        let communicating = fold_axes(&self.cur.layout, &to.layout, to.shape.len(), &axes);
        let (wanted, own) = (to.region().numel(), self.own_len(&to));
        let mine = self.cur.nodes_len_at(self.cur.mesh.coords());
        let received =
            self.others(&axes).saturating_mul(wanted).saturating_add(mine.saturating_mul(wanted - own));
        self.push(StepAction::Fold(self.op(&axes), axes), to, communicating, received);
        Ok(())
    }

    fn exchange(&mut self, layout: Layout) -> Result<()> {
        let to = self.cur.with_layout(layout)?;
        let axes = communicating_axes(&self.cur.layout, &to.layout, to.shape.len());
        let lacking = to.region().numel() - self.own_len(&to);
        let nodes = self.cur.nodes_len_at(self.cur.mesh.coords());
        let action = StepAction::Exchange(exchange_kind(&self.cur, &to, &axes));
        self.push(action, to, axes, nodes.saturating_mul(lacking));
        Ok(())
    }

    /// Adds a step that adds up the nodes of this rank, if the target has no tree (fast mode).
    fn collapse(&mut self, dst: &Spec) {
        if self.cur.tree.is_some() && dst.tree.is_none() {
            let to = Spec { tree: None, ..self.cur.clone() };
            self.push(StepAction::Collapse, to, Dims::new(), 0);
        }
    }

    /// Appends the step that makes axis `a` `Partial`.
    fn share(&mut self, a: usize, placement: &Placement) -> Result<()> {
        let op = placement.partial_op().expect("called for axes that open");
        let mut placements = self.cur.layout.placements().to_vec();
        placements[a] = placement.clone();
        let layout = Layout::new(placements).with_order(self.cur.layout.order())?;
        let to = self.cur.with_layout(layout)?;
        self.push(StepAction::Share(op, a), to, Dims::new(), 0);
        Ok(())
    }

    fn op(&self, axes: &[usize]) -> ReduceOp {
        self.cur.layout.axis(axes[0]).partial_op().expect("called for partial axes")
    }

    /// Returns the number of elements of `to` that this rank holds already.
    fn own_len(&self, to: &Spec) -> usize {
        self.cur.region().intersect(&to.region()).iter().map(|o| o.numel()).sum()
    }

    /// Returns the number of partial values that the other ranks along `axes` contribute.
    fn others(&self, axes: &[usize]) -> usize {
        let mesh = &self.cur.mesh;
        if self.cur.tree.is_none() {
            return axes.iter().map(|&a| mesh.axis_len(a)).product::<usize>() - 1;
        }
        let all: usize = mesh.members_along(axes).iter().map(|c| self.cur.nodes_len_at(c)).sum();
        all - self.cur.nodes_len_at(mesh.coords())
    }
}

impl RedistributionStep {
    pub fn communicates(&self) -> bool {
        communicates(&self.from.mesh, &self.axes)
    }

    /// Returns the name of the step's call.
    fn name(&self) -> &'static str {
        match &self.action {
            StepAction::AllReduce(..) => "all_reduce",
            StepAction::Fold(_, axes) if *axes == self.axes => "reduce_scatter",
            StepAction::Fold(..) => "reduce_exchange",
            StepAction::Exchange(ExchangeKind::Slice) => "slice",
            StepAction::Exchange(ExchangeKind::AllGather) => "all_gather",
            StepAction::Exchange(ExchangeKind::Broadcast { .. }) => "broadcast",
            StepAction::Exchange(ExchangeKind::AllToAll) => "all_to_all",
            StepAction::Collapse => "collapse",
            StepAction::Round => "round",
            StepAction::Share(..) => "share",
        }
    }
}

/// Chooses the call of an exchange from the layouts.
fn exchange_kind(cur: &Spec, to: &Spec, axes: &[usize]) -> ExchangeKind {
    if !communicates(&cur.mesh, axes) {
        return ExchangeKind::Slice;
    }
    if !is_gather(&cur.layout, &to.layout, axes) {
        return ExchangeKind::AllToAll;
    }
    let root = match axes {
        [a] => match cur.layout.axis(*a) {
            Placement::RaggedShard { units, .. } => {
                let hot = units.iter().position(|&n| n > 0);
                hot.filter(|_| units.iter().filter(|&&n| n > 0).count() == 1)
            }
            Placement::Shard(d) => (cur.shape[*d] == 1).then_some(0),
            Placement::Replicate | Placement::Partial(_) => None,
        },
        _ => None,
    };
    root.map_or(ExchangeKind::AllGather, |root| ExchangeKind::Broadcast { root })
}

/// Displays the steps in order.
impl fmt::Display for Redistribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (k, step) in self.steps.iter().enumerate() {
            write!(f, "{}{step}", if k == 0 { "" } else { ", then " })?;
        }
        f.write_str(if self.steps.is_empty() { "nothing to do" } else { "" })
    }
}

impl fmt::Display for RedistributionStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mesh = &self.from.mesh;
        let (over, bytes) = (AxisRanks(mesh, &self.axes), self.received_bytes);
        match &self.action {
            StepAction::AllReduce(op, axes) | StepAction::Fold(op, axes) => {
                let nodes = NodeCounts(&self.from, axes);
                write!(f, "{}({op}) over {over}{nodes}: receives {bytes} bytes", self.name())
            }
            StepAction::Exchange(ExchangeKind::Slice) => f.write_str("slice"),
            StepAction::Exchange(_) => write!(f, "{} over {over}: receives {bytes} bytes", self.name()),
            StepAction::Collapse => write!(f, "add up {} nodes", self.from.nodes_len_at(mesh.coords())),
            StepAction::Round => write!(f, "round to {}", self.to.dtype),
            StepAction::Share(op, a) if mesh.coords()[*a] == 0 => {
                write!(f, "keep as this rank's part of a {op}")
            }
            StepAction::Share(op, _) => write!(f, "take the identity of {op}"),
        }
    }
}

/// Displays the ranks along some axes: `dp×tp{0, 1, 2, 3}`; the middle of a long list is left out.
struct AxisRanks<'a>(&'a Mesh, &'a [usize]);

impl fmt::Display for AxisRanks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 16;
        let AxisRanks(mesh, axes) = *self;
        let names: Vec<&str> = axes.iter().map(|&a| mesh.axis_name(a)).collect();
        write!(f, "{}{{", names.join("×"))?;
        let slice = mesh.slice(axes);
        let len = slice.rank_len();
        for (i, rank) in slice.ranks().enumerate() {
            if i < SHOWN || i + 1 == len {
                write!(f, "{}{rank}", if i == 0 { "" } else { ", " })?;
            } else if i == SHOWN {
                f.write_str(", ...")?;
            }
        }
        f.write_str("}")
    }
}

/// Displays the number of nodes that each member contributes, unless it is one: ` of 2, 3 and 2 nodes`.
struct NodeCounts<'a>(&'a Spec, &'a [usize]);

impl fmt::Display for NodeCounts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NodeCounts(spec, axes) = *self;
        let open = spec.open_axes();
        if !axes.iter().any(|a| open.contains(a)) {
            return Ok(());
        }
        let nodes: Vec<usize> = spec.mesh.members_along(axes).iter().map(|c| spec.nodes_len_at(c)).collect();
        if nodes.iter().all(|&n| n == 1) {
            return Ok(());
        }
        let (last, first) = nodes.split_last().expect("a group has members");
        let first: Vec<String> = first.iter().map(usize::to_string).collect();
        write!(f, " of {} and {last} nodes", first.join(", "))
    }
}
