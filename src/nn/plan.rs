//! Plans: how a model's parameters and activations lie on a mesh, said outside the model by path pattern.

use crate::error::{Error, Result};
use crate::placement::{Layout, Mesh, Placement, Spec, chunk};
use crate::tensor::{DType, Shape};

/// How a model lies on a mesh.
///
/// A pattern is a path whose parts may be `*`, which stands for any one part: `h.*.attn.qkv.weight`. The last rule
/// that matches a path on an axis holds. A pattern that matches nothing of the model is refused at the first forward pass,
/// by [`Params::check_plan`](super::Params::check_plan).
///
/// ```
/// use isoshard::{nn::Plan, placement::Placement};
/// let plan = Plan::default().batch("dp").shard("h.*.mlp.up.weight", "tp", 0).fsdp("fsdp");
/// # let _ = plan;
/// ```
#[derive(Clone, Debug, Default)]
pub struct Plan {
    params: Vec<Rule>,
    sites: Vec<Rule>,
    batch: Vec<String>,
    fsdp: Option<String>,
}

/// What the plan for a transformer needs to know of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parallel {
    /// The number of attention heads, of which tensor parallelism gives each rank whole ones; where several heads of
    /// queries share one of keys and values, the number of the latter.
    pub heads: usize,
    /// Whether activations between the tensor-parallel parts are sharded along the sequence (Korthikanti et al. 2022).
    pub sequence: bool,
}

#[derive(Clone, Debug)]
struct Rule {
    pattern: String,
    axis: String,
    placement: Placement,
    /// The dim consists of so many blocks, none of which may be cut.
    blocks: Option<usize>,
    /// Written for several models, of which none has all that the rules of its kind match.
    shared: bool,
}

impl Plan {
    /// The batch, dim 0 of the model's input, is sharded over `axis`.
    pub fn batch(mut self, axis: &str) -> Plan {
        self.batch.push(axis.into());
        self
    }

    /// Matching parameters are sharded along `dim` over `axis`.
    pub fn shard(self, pattern: &str, axis: &str, dim: usize) -> Plan {
        self.rule(pattern, axis, dim, None)
    }

    /// As [`Plan::shard`], where the dim consists of `blocks` equal blocks (heads) none of which may be cut.
    pub fn shard_blocks(self, pattern: &str, axis: &str, dim: usize, blocks: usize) -> Plan {
        self.rule(pattern, axis, dim, Some(blocks))
    }

    fn rule(mut self, pattern: &str, axis: &str, dim: usize, blocks: Option<usize>) -> Plan {
        let placement = Placement::Shard(dim);
        self.params.push(Rule {
            pattern: pattern.into(),
            axis: axis.into(),
            placement,
            blocks,
            shared: false,
        });
        self
    }

    /// At matching sites of the model ([`Scope::site`](super::Scope::site)), activations take `placement` on `axis`.
    pub fn site(mut self, pattern: &str, axis: &str, placement: Placement) -> Plan {
        let (pattern, axis) = (pattern.into(), axis.into());
        self.sites.push(Rule { pattern, axis, placement, blocks: None, shared: false });
        self
    }

    /// Fully sharded data parallelism (Zhao et al. 2023) over `axis`: the batch is sharded over it, every parameter lies
    /// cut by rows over it and is gathered a block ahead of its use, gradients are reduce-scattered, and optimizers
    /// work on the shards.
    pub fn fsdp(mut self, axis: &str) -> Plan {
        self.fsdp = Some(axis.into());
        self.batch(axis)
    }

    /// The plan for this crate's transformers on a mesh with any of the axes `dp`, `fsdp` and `tp`.
    ///
    /// `tp` splits heads, the hidden width of the MLPs and the vocabulary (Shoeybi et al. 2019).
    ///
    /// # Errors
    /// Refuses an axis of another name, and more `tp` ranks than can have whole heads each.
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

    /// Some of its rules match one of this crate's transformers alone.
    fn tensor_parallel(mut self, Parallel { heads, sequence }: Parallel) -> Plan {
        let own = (self.params.len(), self.sites.len());
        self = self.tensor_parallel_rules(heads, sequence);
        self.params[own.0..].iter_mut().chain(&mut self.sites[own.1..]).for_each(|rule| rule.shared = true);
        self
    }

    fn tensor_parallel_rules(self, heads: usize, sequence: bool) -> Plan {
        let between = if sequence { Placement::Shard(1) } else { Placement::Replicate };
        self.shard("wte.weight", "tp", 0)
            .shard_blocks("h.*.attn.qkv.weight", "tp", 0, heads)
            .shard_blocks("h.*.attn.qkv.bias", "tp", 0, heads)
            .shard_blocks("h.*.attn.q.weight", "tp", 0, heads)
            .shard_blocks("h.*.attn.k.weight", "tp", 0, heads)
            .shard_blocks("h.*.attn.v.weight", "tp", 0, heads)
            .shard_blocks("h.*.attn.out.weight", "tp", 1, heads)
            .shard("h.*.mlp.up.weight", "tp", 0)
            .shard("h.*.mlp.up.bias", "tp", 0)
            .shard("h.*.mlp.gate.weight", "tp", 0)
            .shard("h.*.mlp.down.weight", "tp", 1)
            .shard("head.weight", "tp", 0)
            .site("embedding", "tp", between.clone())
            .site("h.*.attn.input", "tp", Placement::Replicate)
            .site("h.*.attn.out", "tp", between.clone())
            .site("h.*.mlp.input", "tp", Placement::Replicate)
            .site("h.*.mlp.down", "tp", between)
            .site("head.input", "tp", Placement::Replicate)
    }

    /// The layout of a model's input on `mesh`: dim 0 over the batch axes, in the mesh's order.
    pub fn batch_layout(&self, mesh: &Mesh) -> Layout {
        Layout::new((0..mesh.ndim()).map(|a| {
            if self.batch.iter().any(|b| b == mesh.axis_name(a)) {
                Placement::Shard(0)
            } else {
                Placement::Replicate
            }
        }))
    }

    /// `layout` as it becomes at a site.
    pub(super) fn site_layout(&self, mesh: &Mesh, path: &str, layout: &Layout) -> Layout {
        let rules = self.sites.iter().filter(|r| matches(&r.pattern, path));
        rules.fold(layout.clone(), |l, r| match mesh.axis(&r.axis) {
            Ok(a) if *l.axis(a) != r.placement => l.set(a, r.placement.clone()),
            _ => l,
        })
    }

    /// The layout in which the model computes with a parameter.
    pub(super) fn used_layout(&self, mesh: &Mesh, path: &str, shape: &Shape) -> Result<Layout> {
        let mut layout = Layout::replicated(mesh.ndim());
        for rule in self.params.iter().filter(|r| matches(&r.pattern, path)) {
            let a = mesh.axis(&rule.axis)?;
            rule.check_blocks(mesh, shape).map_err(|e| e.at(path))?;
            layout = layout.set(a, rule.placement.clone());
        }
        Ok(layout)
    }

    /// The layout in which a parameter lies between steps. FSDP's axis cuts what the others leave, by rows as equal as
    /// can be; where the others leave pieces of different sizes, by the ceil rule.
    pub(super) fn rest_layout(
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
        let rows = Spec::new(mesh, dtype, shape, used.clone())?.local_shape_at(&vec![0; mesh.ndim()])[0];
        let ranks = mesh.axis_len(a);
        let units = (0..ranks).map(|i| rows / ranks + usize::from(i < rows % ranks)).collect();
        let order: Vec<usize> = (0..mesh.ndim()).filter(|&b| b != a).chain([a]).collect();
        let with = |p: Placement| used.set(a, p).with_order(&order);
        let ragged = with(Placement::RaggedShard { dims: 1, units })?;
        match Spec::new(mesh, dtype, shape, ragged.clone()) {
            Ok(_) => Ok(ragged),
            Err(_) => with(Placement::Shard(0)),
        }
    }

    /// Refuses, by name, a rule that matches none of a model's parameters, or none of its sites. Of the rules that are written
    /// for several models one has to match.
    pub(super) fn expect_matches(&self, paths: &[&str], sites: &[&str]) -> Result<()> {
        expect_matches(&self.params, paths, "parameter")?;
        expect_matches(&self.sites, sites, "site")
    }

    /// Refuses axes that the mesh lacks.
    pub(super) fn check(&self, mesh: &Mesh) -> Result<()> {
        for rule in self.params.iter().chain(&self.sites) {
            mesh.axis(&rule.axis).map_err(|e| e.at(&rule.pattern))?;
        }
        self.batch.iter().chain(&self.fsdp).try_for_each(|a| mesh.axis(a).map(drop))
    }
}

impl Rule {
    /// Refuses to cut a block, or to leave a rank without one.
    fn check_blocks(&self, mesh: &Mesh, shape: &Shape) -> Result<()> {
        let (Some(blocks), Some(dim)) = (self.blocks, self.placement.shard_dim()) else { return Ok(()) };
        // A dim that is not there is refused with the layout.
        let Some(&extent) = shape.get(dim) else { return Ok(()) };
        let ranks = mesh.axis_len(mesh.axis(&self.axis)?);
        let size = extent / blocks.max(1);
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

fn expect_matches(rules: &[Rule], paths: &[&str], kind: &str) -> Result<()> {
    let matched = |rule: &Rule| paths.iter().any(|path| matches(&rule.pattern, path));
    if let Some(rule) = rules.iter().find(|rule| !rule.shared && !matched(rule)) {
        let given = format!("{:?} among {} {kind}(s)", rule.pattern, paths.len());
        let remedy = match nearest(&rule.pattern, paths) {
            near if near.is_empty() => format!("the model declares no {kind}"),
            near => format!("the nearest are {}", near.join(", ")),
        };
        return Err(Error::invalid("plan", format!("a pattern matches no {kind}"), given, remedy));
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

/// The paths that take the fewest edits to match `pattern`, up to three, the nearest first. A part that the pattern leaves open
/// stays so: `h.0.up` and `h.1.up` are one.
pub(super) fn nearest(pattern: &str, paths: &[&str]) -> Vec<String> {
    let parts: Vec<&str> = pattern.split('.').collect();
    let open = |path: &&str| {
        let of_path: Vec<&str> = path.split('.').collect();
        if of_path.len() != parts.len() {
            return path.to_string();
        }
        let pairs = parts.iter().zip(of_path);
        pairs.map(|(&part, own)| if part == "*" { part } else { own }).collect::<Vec<_>>().join(".")
    };
    let mut near: Vec<(usize, String)> = Vec::new();
    for path in paths.iter().map(open) {
        if near.iter().all(|(_, known)| *known != path) {
            near.push((edits(pattern, &path), path));
        }
    }
    near.sort_by_key(|(edits, _)| *edits);
    near.into_iter().take(3).map(|(_, path)| path).collect()
}

/// The fewest letters to put in, leave out or replace (Levenshtein 1966).
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, &y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// Path patterns: part by part, where `*` stands for any one part.
fn matches(pattern: &str, path: &str) -> bool {
    let (mut p, mut q) = (pattern.split('.'), path.split('.'));
    loop {
        match (p.next(), q.next()) {
            (None, None) => return true,
            (Some("*"), Some(_)) => {}
            (Some(a), Some(b)) if a == b => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        assert!(matches("h.*.attn.qkv.weight", "h.11.attn.qkv.weight"));
        assert!(!matches("h.*.attn", "h.1.attn.qkv"));
        assert!(!matches("h.*", "h"));
    }

    #[test]
    fn the_nearest_names() {
        assert_eq!(
            [("", ""), ("ab", ""), ("kitten", "sitting"), ("ab", "ba")].map(|(a, b)| edits(a, b)),
            [0, 2, 3, 2]
        );
        let paths = ["wte.weight", "h.0.up.weight", "h.0.up.bias", "h.1.up.weight", "h.1.up.bias", "norm"];
        assert_eq!(nearest("h.*.up.wieght", &paths), ["h.*.up.weight", "h.*.up.bias", "wte.weight"]);
        assert_eq!(nearest("h.up.weight", &paths)[..2], ["h.0.up.weight", "h.1.up.weight"]);
        assert!(nearest("h", &[]).is_empty());
    }

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
