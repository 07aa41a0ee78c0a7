//! Plans: the layouts of a model's parameters and activations, given outside the model by path pattern.

use crate::error::{Error, Result};
use crate::nn::plan::pattern::{matches, no_match};
use crate::placement::{Layout, Mesh, Placement, Spec, chunk};
use crate::tensor::{DType, Shape};

/// The layouts of a model's parameters and activations on a mesh.
///
/// A rule names a path pattern, a mesh axis and a placement. A pattern is a path whose parts may be `*`, which stands
/// for any one part, or `**`, which stands for any number of parts: `h.*.attn.qkv.weight`, `h.**`. Among several rules
/// that match a path on one axis, the last one decides. Parameters that no rule matches are replicated. Patterns name
/// whole parameters, such as `attn.qkv.weight`, not the [pieces](crate::nn::Params::pieces) of fused ones. A pattern that
/// matches nothing is refused at the first forward pass, by [`Params::check_plan`](crate::nn::Params::check_plan).
///
/// ```
/// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
/// spmd(4, |rank| {
///     let mesh = DeviceMesh::parse(&rank, "fsdp=2,tp=2")?;
///     // The rows over tp; a rank's rows over fsdp; the batch over fsdp.
///     let plan = Plan::default().shard("h.*.up.weight", "tp", 0).fsdp("fsdp");
///     assert_eq!(plan.batch_layout(mesh.mesh()), "(S0, R)".parse()?);
///     let mut params = Params::new(&mesh, plan, 7)?;
///     let up = params.root().child("h").child(0).child("up").param("weight", [8, 3], Init::Ones)?;
///     assert_eq!(params.value(up).local().shape()[..], [2, 3]);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Plan {
    params: Vec<PlanRule>,
    sites: Vec<PlanRule>,
    batch: Vec<String>,
    fsdp: Option<String>,
    /// The patterns of blocks that are recomputed.
    recomputed: Vec<String>,
    /// The patterns of blocks whose results of cheap calls are recomputed.
    recomputed_cheap: Vec<String>,
}

/// The sizes and choices of a transformer on which its plan depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parallel {
    /// The number of attention heads; for grouped-query attention, the number of key and value heads. Tensor
    /// parallelism gives each rank whole heads.
    pub heads: usize,
    /// Sequence parallelism: shards activations between the tensor-parallel parts along the sequence (Korthikanti et
    /// al. 2022).
    pub sequence: bool,
}

#[derive(Clone, Debug)]
struct PlanRule {
    pattern: String,
    axis: String,
    placement: Placement,
    /// The number of equal blocks in the sharded dim; no block may be cut.
    blocks: Option<usize>,
    /// `true` for a rule that is written for several models, so that no single model matches all such rules.
    shared: bool,
}

impl Plan {
    /// Shards the batch, dim 0 of the model's input, over `axis`: data parallelism. Parameters stay replicated over it
    /// and their gradients are all-reduced.
    ///
    /// ```
    /// use isoshard::{nn::Plan, placement::Mesh};
    /// let mesh = Mesh::new(&[("dp", 2), ("tp", 2)], 0)?;
    /// assert_eq!(Plan::default().batch("dp").batch_layout(&mesh), "(S0, R)".parse()?);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn batch(mut self, axis: &str) -> Plan {
        self.batch.push(axis.into());
        self
    }

    /// Shards matching parameters along `dim` over `axis`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().shard("*.weight", "tp", 1), 7)?;
    ///     let w = params.root().child("down").param("weight", [3, 4], Init::Ones)?;
    ///     assert_eq!(params.value(w).spec().to_string(), "f32[3, 4]@(tp:S1)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn shard(self, pattern: &str, axis: &str, dim: usize) -> Plan {
        self.rule(pattern, axis, dim, None)
    }

    /// Shards matching parameters as [`Plan::shard`] does, and refuses to cut any of the `blocks` equal blocks (heads)
    /// of `dim`. Declaring a parameter whose dim does not consist of so many equal blocks is an error, on every mesh.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// let error = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().shard_blocks("qkv", "tp", 0, 3), 7)?;
    ///     params.root().param("qkv", [12, 4], Init::Ones).map(drop)
    /// });
    /// let text = error.unwrap_err().to_string();
    /// assert!(text.contains("2 ranks of axis tp cannot have whole blocks each; got 3 blocks (heads)"), "{text}");
    /// ```
    pub fn shard_blocks(self, pattern: &str, axis: &str, dim: usize, blocks: usize) -> Plan {
        self.rule(pattern, axis, dim, Some(blocks))
    }

    fn rule(mut self, pattern: &str, axis: &str, dim: usize, blocks: Option<usize>) -> Plan {
        let placement = Placement::Shard(dim);
        self.params.push(PlanRule {
            pattern: pattern.into(),
            axis: axis.into(),
            placement,
            blocks,
            shared: false,
        });
        self
    }

    /// Moves activations at matching sites ([`Scope::site`](crate::nn::Scope::site)) to `placement` on `axis`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::{Forward, Params, Plan}};
    /// use isoshard::{placement::{Layout, Placement}, tensor::DType};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().site("h.*.input", "tp", Placement::Shard(1)), 7)?;
    ///     let site = params.root().child("h").child(0).site("input");
    ///     let x = DTensor::zeros(&mesh, DType::F32, [2, 6], Layout::replicated(1))?;
    ///     let moved = Forward::eval(&params).site(&site, x)?;
    ///     assert_eq!(moved.spec().to_string(), "f32[2, 6]@(tp:S1)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn site(mut self, pattern: &str, axis: &str, placement: impl Into<Placement>) -> Plan {
        let (pattern, axis, placement) = (pattern.into(), axis.into(), placement.into());
        self.sites.push(PlanRule { pattern, axis, placement, blocks: None, shared: false });
        self
    }

    /// Shards the batch and every parameter over `axis`: fully sharded data parallelism (FSDP, Zhao et al. 2023).
    ///
    /// A parameter's rows are sharded over the axis: those of its first two dims if it has three or more. A unit of
    /// parameters, such as a transformer block, is gathered one unit ahead of its use, freed after it, and gathered again
    /// for the backward pass. Gradients are reduce-scattered, and the optimizer works on the shards.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Forward, Params, Plan}, rng::Init};
    /// spmd(3, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 3)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    ///     let w = params.root().param("w", [4, 2], Init::Ones)?;
    ///     assert_eq!(params.value(w).spec().to_string(), "f32[4, 2]@(fsdp:RS(0..1; 2,1,1))");
    ///     assert_eq!(Forward::eval(&params).param(w)?.spec().to_string(), "f32[4, 2]@(fsdp:R)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn fsdp(mut self, axis: &str) -> Plan {
        self.fsdp = Some(axis.into());
        self.batch(axis)
    }

    /// Shards the batch, and the experts of every [`Moe`](crate::nn::Moe) whose path matches, over `axis`: expert
    /// parallelism (Lepikhin et al., *GShard*, 2020). Every other parameter is replicated over the axis.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::DeviceMesh, nn::{Params, Plan}, rng::Init};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("ep", 2)])?;
    ///     let mut params = Params::new(&mesh, Plan::default().experts("moe", "ep"), 7)?;
    ///     let up = params.root().child("moe").child("experts").param("up", [4, 2, 3], Init::Ones)?;
    ///     assert_eq!(params.value(up).spec().to_string(), "f32[4, 2, 3]@(ep:S0)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn experts(self, pattern: &str, axis: &str) -> Plan {
        // The experts' adapters are parameters below the maps.
        self.shard(&format!("{pattern}.experts.**"), axis, 0).batch(axis)
    }

    /// Drops the activations of matching blocks ([`Scope::block_here`](crate::nn::Scope::block_here)) after the forward pass
    /// and computes them again in the backward pass ([`recompute`](crate::nn::recompute())). The blocks of this crate's
    /// transformers are `h.0`, `h.1` and so on.
    ///
    /// A step then takes the time of one more forward pass of the blocks, with its communication, and holds the
    /// activations of one block and the inputs of the others. No bit changes.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// use isoshard::nn::{Forward, Gpt, GptConfig, Params, Plan};
    /// let norms = spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
    ///     let norm = |plan: Plan| -> isoshard::Result<f64> {
    ///         let mut params = Params::new(&mesh, plan.fsdp("fsdp"), 7)?;
    ///         let config = GptConfig {
    ///             vocabulary: 11, block: 6, layers: 2, heads: 2, width: 8, dropout: 0.0, bias: true,
    ///         };
    ///         let model = Gpt::new(&mut params, config)?;
    ///         let tokens = DTensor::zeros(&mesh, DType::I64, [3, 6], "(S0)")?;
    ///         let mut loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &tokens)?;
    ///         params.grad_norm(&loss.backward()?)?.item()
    ///     };
    ///     Ok([norm(Plan::default())?, norm(Plan::default().recompute("h.*"))?])
    /// })?;
    /// assert_eq!(norms[0][0], norms[0][1]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn recompute(mut self, pattern: &str) -> Plan {
        self.recomputed.push(pattern.into());
        self
    }

    /// Drops the results of cheap calls in matching blocks, such as those of activation functions and norms, and computes
    /// them again in the backward pass ([`DeviceMesh::recompute_cheap`](crate::dtensor::DeviceMesh::recompute_cheap)).
    /// Attention, products of all but the thinnest matrices and communication are not repeated. No bit changes.
    ///
    /// A block of [`Gpt`](crate::nn::Gpt) then keeps 11 tensors of the width of its stream for each token instead of 17.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::{DType, storage}};
    /// use isoshard::nn::{Forward, Gpt, GptConfig, Params, Plan};
    /// let kept = spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let bytes = |plan: Plan| -> isoshard::Result<usize> {
    ///         let mut params = Params::new(&mesh, plan, 7)?;
    ///         let config = GptConfig {
    ///             vocabulary: 11, block: 64, layers: 2, heads: 2, width: 64, dropout: 0.0, bias: true,
    ///         };
    ///         let model = Gpt::new(&mut params, config)?;
    ///         let tokens = DTensor::zeros(&mesh, DType::I64, [8, 64], "()")?;
    ///         let before = storage::pool_stats().live_bytes;
    ///         let _loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &tokens)?;
    ///         Ok(storage::pool_stats().live_bytes - before)
    ///     };
    ///     Ok([bytes(Plan::default())?, bytes(Plan::default().recompute_cheap("h.*"))?])
    /// })?;
    /// assert!(kept[0][1] * 10 < kept[0][0] * 8, "{kept:?}");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn recompute_cheap(mut self, pattern: &str) -> Plan {
        self.recomputed_cheap.push(pattern.into());
        self
    }

    /// Returns the plan for this crate's transformers on a mesh with any of the axes `dp`, `fsdp` and `tp`.
    ///
    /// `tp` shards the heads, the hidden width of the MLPs and the vocabulary (Shoeybi et al. 2019).
    ///
    /// ```
    /// use isoshard::{nn::{Parallel, Plan}, placement::Mesh};
    /// let mesh = Mesh::parse("dp=2,fsdp=2,tp=2", 0)?;
    /// let plan = Plan::transformer(&mesh, Parallel { heads: 4, sequence: true })?;
    /// // The batch is sharded over dp, then over fsdp.
    /// assert_eq!(plan.batch_layout(&mesh), "(S0, S0, R)".parse()?);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an axis of another name.
    pub fn transformer(mesh: &Mesh, parallel: Parallel) -> Result<Plan> {
        let mut plan = Plan::default();
        for a in 0..mesh.ndim() {
            plan = match mesh.axis_name(a) {
                "dp" => plan.batch("dp"),
                "fsdp" => plan.fsdp("fsdp"),
                "tp" => plan.tensor_parallel(parallel),
                other => {
                    return Err(Error::invalid(
                        "plan",
                        "no such kind of parallelism",
                        format!("axis {other:?} of {mesh}"),
                        "name the axes dp, fsdp or tp",
                    ));
                }
            };
        }
        plan.check(mesh)?;
        Ok(plan)
    }

    /// Adds the rules for all of this crate's transformers; some of them match one of the models only.
    fn tensor_parallel(mut self, Parallel { heads, sequence }: Parallel) -> Plan {
        let before = (self.params.len(), self.sites.len());
        self = self.tensor_parallel_rules(heads, sequence);
        self.params[before.0..]
            .iter_mut()
            .chain(&mut self.sites[before.1..])
            .for_each(|rule| rule.shared = true);
        self
    }

    fn tensor_parallel_rules(self, heads: usize, sequence: bool) -> Plan {
        let between = if sequence { Placement::Shard(1) } else { Placement::Replicate };
        self.shard("wte.weight", "tp", 0)
            .shard_blocks("h.*.attn.qkv.weight", "tp", 0, heads)
            .shard_blocks("h.*.attn.qkv.bias", "tp", 0, heads)
            .shard_blocks("h.*.attn.out.weight", "tp", 1, heads)
            .shard("h.*.mlp.up.weight", "tp", 0)
            .shard("h.*.mlp.up.bias", "tp", 0)
            .shard("h.*.mlp.gate_up.weight", "tp", 0)
            .shard("h.*.mlp.down.weight", "tp", 1)
            .shard("head.weight", "tp", 0)
            .shard("h.*.moe.experts.gate", "tp", 2)
            .shard("h.*.moe.experts.up", "tp", 2)
            .shard("h.*.moe.experts.down", "tp", 1)
            .shard("h.*.moe.shared.gate_up.weight", "tp", 0)
            .shard("h.*.moe.shared.up.weight", "tp", 0)
            .shard("h.*.moe.shared.down.weight", "tp", 1)
            .site("h.*.moe.shared.down", "tp", Placement::Replicate)
            .site("h.*.moe.input", "tp", Placement::Replicate)
            .site("h.*.moe.down", "tp", Placement::Replicate)
            .site("embedding", "tp", between.clone())
            .site("h.*.attn.input", "tp", Placement::Replicate)
            .site("h.*.attn.out", "tp", between.clone())
            .site("h.*.mlp.input", "tp", Placement::Replicate)
            .site("h.*.mlp.down", "tp", between)
            .site("head.input", "tp", Placement::Replicate)
    }

    /// Shards the batch over further axes.
    pub(in crate::nn) fn shard_batch(&mut self, axes: &[String]) {
        let new: Vec<String> = axes.iter().filter(|axis| !self.batch.contains(axis)).cloned().collect();
        self.batch.extend(new);
    }

    /// Returns the layout of a model's input: dim 0 sharded over the batch axes, in the mesh's order.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::Plan, tensor::Tensor};
    /// let rows = spmd(3, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 3)])?;
    ///     let batch = Tensor::from_vec((0..10).collect::<Vec<i64>>(), [5, 2])?; // equal on all ranks
    ///     let layout = Plan::default().batch("dp").batch_layout(mesh.mesh());
    ///     Ok(DTensor::distribute(&mesh, &batch, layout)?.local().shape()[0])
    /// })?;
    /// assert_eq!(rows, [2, 2, 1]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn batch_layout(&self, mesh: &Mesh) -> Layout {
        Layout::new((0..mesh.ndim()).map(|a| {
            if self.batch.iter().any(|b| b == mesh.axis_name(a)) {
                Placement::Shard(0)
            } else {
                Placement::Replicate
            }
        }))
    }

    /// Returns `layout` with the placements that the rules of a site set.
    pub(in crate::nn) fn site_layout(&self, mesh: &Mesh, path: &str, layout: &Layout) -> Layout {
        let rules = self.sites.iter().filter(|r| matches(&r.pattern, path));
        rules.fold(layout.clone(), |l, r| match mesh.axis(&r.axis) {
            Ok(a) if *l.axis(a) != r.placement => l.set(a, r.placement.clone()),
            _ => l,
        })
    }

    /// Returns the calls of the rules that match a parameter.
    pub(in crate::nn) fn rules_of<'a>(&'a self, path: &'a str) -> impl Iterator<Item = String> + 'a {
        self.params.iter().filter(|rule| matches(&rule.pattern, path)).map(|rule| {
            let PlanRule { pattern, axis, placement, blocks, .. } = rule;
            match (blocks, placement.shard_dim()) {
                (Some(blocks), Some(dim)) => format!("shard_blocks({pattern:?}, {axis:?}, {dim}, {blocks})"),
                (None, Some(dim)) => format!("shard({pattern:?}, {axis:?}, {dim})"),
                (_, None) => unreachable!("the rules of parameters shard"),
            }
        })
    }

    /// Returns the axis over which all parameters are sharded, if there is one.
    pub(in crate::nn) fn fsdp_axis(&self) -> Option<&str> {
        self.fsdp.as_deref()
    }

    /// Returns true if no rule places a site.
    pub(in crate::nn) fn leaves_site(&self, path: &str) -> bool {
        !self.sites.iter().any(|rule| matches(&rule.pattern, path))
    }

    /// Returns true if the activations of a block are recomputed.
    pub(in crate::nn) fn recomputes(&self, path: &str) -> bool {
        self.recomputed.iter().any(|pattern| matches(pattern, path))
    }

    /// Returns true if the results of cheap calls in a block are recomputed.
    pub(in crate::nn) fn recomputes_cheap(&self, path: &str) -> bool {
        self.recomputed_cheap.iter().any(|pattern| matches(pattern, path))
    }

    /// Returns the layout in which the model computes with a parameter.
    pub(in crate::nn) fn used_layout(&self, mesh: &Mesh, path: &str, shape: &Shape) -> Result<Layout> {
        let mut layout = Layout::replicated(mesh.ndim());
        for rule in self.params.iter().filter(|r| matches(&r.pattern, path)) {
            let a = mesh.axis(&rule.axis)?;
            rule.check_blocks(mesh, shape).map_err(|e| e.at(path))?;
            layout = layout.set(a, rule.placement.clone());
        }
        Ok(layout)
    }

    /// Returns the layout in which a parameter is stored between steps. FSDP's axis shards the rows that the other axes
    /// leave to a rank, as evenly as possible; by the ceil rule if the other axes leave different numbers of rows.
    pub(in crate::nn) fn stored_layout(
        &self,
        mesh: &Mesh,
        dtype: DType,
        shape: &Shape,
        used: &Layout,
    ) -> Result<Layout> {
        let Some(axis) = &self.fsdp else { return Ok(used.clone()) };
        let a = mesh.axis(axis)?;
        if shape.is_empty() {
            return Ok(used.clone());
        }
        let local = Spec::new(mesh, dtype, shape, used.clone())?.local_shape_at(&vec![0; mesh.ndim()]);
        let ranks = mesh.axis_len(a);
        let order: Vec<usize> = (0..mesh.ndim()).filter(|&b| b != a).chain([a]).collect();
        let with = |p: Placement| used.set(a, p).with_order(&order);
        // Stacked matrices and fused maps are sharded by the rows of all of them.
        let most = if shape.len() > 2 { 2 } else { 1 };
        for dims in (1..=most).rev() {
            let rows = local[..dims].iter().product::<usize>();
            let units = (0..ranks).map(|i| rows / ranks + usize::from(i < rows % ranks)).collect();
            let ragged = with(Placement::RaggedShard { dims, units })?;
            if Spec::new(mesh, dtype, shape, ragged.clone()).is_ok() {
                return Ok(ragged);
            }
        }
        with(Placement::Shard(0))
    }

    /// Refuses, by name, a rule that matches none of a model's parameters, none of its sites or none of its blocks. Among
    /// the rules that are written for several models, one has to match.
    pub(in crate::nn) fn expect_matches(
        &self,
        paths: &[&str],
        sites: &[&str],
        blocks: &[&str],
    ) -> Result<()> {
        expect_matches(&self.params, paths, "parameter")?;
        expect_matches(&self.sites, sites, "site")?;
        let mut patterns = self.recomputed.iter().chain(&self.recomputed_cheap);
        match patterns.find(|pattern| !blocks.iter().any(|path| matches(pattern, path))) {
            None => Ok(()),
            Some(pattern) => Err(no_match("plan", pattern, blocks, "block")),
        }
    }

    /// Refuses axes that the mesh lacks.
    pub(in crate::nn) fn check(&self, mesh: &Mesh) -> Result<()> {
        for rule in self.params.iter().chain(&self.sites) {
            mesh.axis(&rule.axis).map_err(|e| e.at(&rule.pattern))?;
        }
        self.batch.iter().chain(&self.fsdp).try_for_each(|a| mesh.axis(a).map(drop))
    }
}

impl PlanRule {
    /// Refuses to cut a block, and to leave a rank without a block.
    fn check_blocks(&self, mesh: &Mesh, shape: &Shape) -> Result<()> {
        let (Some(blocks), Some(dim)) = (self.blocks, self.placement.shard_dim()) else { return Ok(()) };
        // The layout refuses a dim that the parameter lacks.
        let Some(&extent) = shape.get(dim) else { return Ok(()) };
        let ranks = mesh.axis_len(mesh.axis(&self.axis)?);
        if extent.checked_rem(blocks).is_none_or(|rest| rest > 0) {
            let given = format!("{blocks} blocks (heads) for dim {dim} of {shape}");
            let remedy = format!(
                "state a number of blocks that divides {extent}; the heads of grouped-query attention are those of keys and \
                 values"
            );
            return Err(Error::invalid("plan", "a dim consists of equal blocks", given, remedy));
        }
        let size = extent / blocks;
        let cut = (0..ranks).any(|i| size == 0 || chunk(extent, ranks, i).start.min(extent) % size != 0);
        if !cut && blocks >= ranks {
            return Ok(());
        }
        Err(Error::sharding(
            "plan",
            format!("{ranks} ranks of axis {} cannot have whole blocks each", self.axis),
            format!("{blocks} blocks (heads) in dim {dim} of {shape}"),
            format!("take a number of {} ranks that divides {blocks}", self.axis),
        ))
    }
}

fn expect_matches(rules: &[PlanRule], paths: &[&str], kind: &str) -> Result<()> {
    let matched = |rule: &PlanRule| paths.iter().any(|path| matches(&rule.pattern, path));
    if let Some(rule) = rules.iter().find(|rule| !rule.shared && !matched(rule)) {
        return Err(no_match("plan", &rule.pattern, paths, kind));
    }
    let mut shared = rules.iter().filter(|rule| rule.shared).peekable();
    let Some(first) = shared.peek() else { return Ok(()) };
    let given = format!("{:?} and others among {} {kind}(s)", first.pattern, paths.len());
    if shared.any(matched) {
        return Ok(());
    }
    let rule = format!("no pattern of a transformer's plan matches a {kind}");
    Err(Error::invalid("plan", rule, given, "pass a plan of the model's own"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_stay_whole() {
        let mesh = Mesh::new(&[("tp", 2)], 0).unwrap();
        let plan = Plan::transformer(&mesh, Parallel { heads: 5, sequence: false }).unwrap();
        let e = plan.used_layout(&mesh, "h.0.attn.qkv.weight", &Shape::from([90, 30])).unwrap_err();
        assert_eq!(
            e.to_string(),
            "plan: 2 ranks of axis tp cannot have whole blocks each; got 5 blocks (heads) in dim 0 of [90, 30] at \
             h.0.attn.qkv.weight; take a number of tp ranks that divides 5"
        );
        assert!(plan.used_layout(&mesh, "h.0.mlp.up.weight", &Shape::from([121, 30])).is_ok());
    }

    #[test]
    fn refusals_name_the_parameter_or_the_pattern() {
        let run = |rank| {
            let mesh = crate::dtensor::DeviceMesh::new(&rank, &[("tp", 2)])?;
            let refused = |plan: Plan| {
                let declare =
                    |mut p: crate::nn::Params| p.root().param("w", [4, 2], crate::rng::Init::Ones).map(drop);
                crate::nn::Params::new(&mesh, plan, 1).and_then(declare).unwrap_err().to_string()
            };
            let text = "layout: shards a dim that is not there; got f32[4, 2]@(tp:S2) at w; dims are 0 to 1";
            assert_eq!(refused(Plan::default().shard("*", "tp", 2)), text);
            assert_eq!(refused(Plan::default().shard_blocks("w", "tp", 2, 2)), text);
            for blocks in [3, 8, 0] {
                let text = format!(
                    "plan: a dim consists of equal blocks; got {blocks} blocks (heads) for dim 0 of [4, 2] at w; state a \
                     number of blocks that divides 4; the heads of grouped-query attention are those of keys and values"
                );
                assert_eq!(refused(Plan::default().shard_blocks("w", "tp", 0, blocks)), text);
            }
            assert_eq!(refused(Plan::default().shard("w", "tp", 2).fsdp("tp")), text);
            assert_eq!(
                refused(Plan::default().shard("h.*", "pp", 0)),
                "mesh: no such axis; got \"pp\" of (tp=2) at h.*; the axes are tp"
            );
            Ok(())
        };
        crate::comm::spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
