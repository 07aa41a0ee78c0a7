//! Plans that are legal and probably not meant: the parameters that are listed, and strict mode.

use isoshard::nn::{Gpt, GptConfig, Linear, Moe, MoeConfig, Parallel};
use isoshard::prelude::*;

const INIT: Init = Init::Normal { mean: 0.0, std: 0.1 };

/// Attention with maps of its own names, of 4 heads of width 4.
fn own_attention(params: &mut Params) -> Result<[Linear; 4]> {
    let mut root = params.root();
    let mut attention = root.child("h.0.attn");
    let mut map = |name: &str| Linear::new(attention.child(name), 16, 16, INIT);
    Ok([map("q")?, map("k")?, map("v")?, map("out")?])
}

/// Returns what a plan's parameters are warned of, the same on every rank, and the refusal of a strict forward pass.
fn warned(
    axis: usize,
    plan: impl Fn(&DeviceMesh) -> Result<Plan> + Send + Sync + 'static,
    model: impl Fn(&mut Params) -> Result<()> + Send + Sync + 'static,
) -> (Vec<String>, Option<String>) {
    let all = spmd(axis, move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("tp", rank.world_len())])?;
        let mut params = Params::new(&mesh, plan(&mesh)?, 7)?;
        model(&mut params)?;
        assert!(params.check_plan().is_ok(), "warnings are no errors");
        mesh.set_strict(true);
        let refused = params.check_plan().err().map(|e| e.to_string());
        mesh.set_strict(false);
        assert!(params.check_plan().is_ok());
        let warnings: Vec<String> = params.warnings().iter().map(ToString::to_string).collect();
        let table = params.to_string();
        assert!(
            warnings
                .iter()
                .all(|warning| table.ends_with(&format!("warning: {warning}")) || table.contains(warning))
        );
        Ok((warnings, refused))
    });
    let all = all.unwrap_or_else(|e| panic!("{e}"));
    assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
    all[0].clone()
}

#[test]
fn maps_that_a_transformers_plan_does_not_know_are_listed() {
    let plan = |mesh: &DeviceMesh| Plan::transformer(mesh.mesh(), Parallel { heads: 4, sequence: false });
    let (warnings, refused) = warned(2, plan, |params| own_attention(params).map(drop));
    let wanted = ["q", "k", "v"].map(|map| {
        format!("h.0.attn.{map}.weight is whole on each rank of tp, which shards its neighbour h.0.attn.out.weight")
    });
    assert_eq!(warnings, wanted);
    let refused = refused.expect("strict mode refuses it");
    assert!(refused.starts_with(
        "plan: strict mode refuses layouts that are probably not meant; got h.0.attn.q.weight is whole"
    ));
}

#[test]
fn four_heads_on_three_ranks_are_listed() {
    let plan = |_: &DeviceMesh| Ok(Plan::default().shard("h.*.attn.q.*", "tp", 0));
    let (warnings, _) = warned(3, plan, |params| own_attention(params).map(drop));
    assert_eq!(
        warnings[0],
        "h.0.attn.q.weight has 16 indices in dim 0, which 3 ranks of tp cannot share equally"
    );
    assert_eq!(
        warnings[1],
        "h.0.attn.q.bias has 16 indices in dim 0, which 3 ranks of tp cannot share equally"
    );
}

#[test]
fn the_plans_of_this_crates_models_are_meant() {
    let plan = |mesh: &DeviceMesh| Plan::transformer(mesh.mesh(), Parallel { heads: 4, sequence: true });
    let (warnings, refused) = warned(2, plan, |params| {
        let config =
            GptConfig { vocabulary: 12, block: 8, layers: 2, heads: 4, width: 16, dropout: 0.0, bias: true };
        Gpt::new(params, config).map(drop)
    });
    assert_eq!((warnings, refused), (Vec::new(), None));
    // A router stays whole on purpose: it is small beside the experts.
    let experts = |_: &DeviceMesh| Ok(Plan::default().experts("moe", "tp"));
    let (warnings, refused) = warned(2, experts, |params| {
        let config = MoeConfig { width: 4, hidden: 24, experts: 4, top_k: 2, ..MoeConfig::default() };
        Moe::new(params.root().child("moe"), config, INIT).map(drop)
    });
    assert_eq!((warnings, refused), (Vec::new(), None));
}
