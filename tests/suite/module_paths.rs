//! Module paths: each call of a training step belongs to the module that made it, in the forward pass, the backward pass
//! and recomputation; explanations and tallies count by path, and docs/plans.md shows the explanation of a Llama block.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use isoshard::Result;
use isoshard::comm::{
    DryRun, Level, Machine, ModulePath, ModuleTraffic, Network, Phase, Rank, Tally, Total, spmd,
};
use isoshard::dtensor::{DTensor, DeviceMesh, ExplainedPlan, Explanation, Gradients, Reduction};
use isoshard::nn::{Forward, Llama, LlamaConfig, Parallel, Params, Plan};
use isoshard::placement::Mesh;
use isoshard::tensor::DType;

const SMALL: LlamaConfig = LlamaConfig {
    vocabulary: 11,
    block: 6,
    layers: 2,
    heads: 4,
    kv_heads: 2,
    head_width: 4,
    width: 10,
    hidden: 64,
    base: 1e4,
    dropout: 0.0,
};

/// The parts of a block, and what is around the blocks.
const PARTS: [&str; 9] =
    ["", ".attn_norm", ".attn", ".attn.qkv", ".attn.out", ".mlp_norm", ".mlp", ".mlp.gate_up", ".mlp.down"];
const AROUND: [&str; 3] = ["wte", "norm", "head"];

/// Explains one step and counts its traffic.
fn step(rank: &Rank, mesh: &str, recomputed: &[&str]) -> Result<(Explanation, Tally)> {
    let (rank, tally) = Tally::of(rank)?;
    let mesh = DeviceMesh::parse(&rank, mesh)?;
    let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: true })?;
    let plan = recomputed.iter().fold(plan, |plan, pattern| plan.recompute(pattern));
    let batch = plan.batch_layout(mesh.mesh());
    let mut params = Params::new(&mesh, plan, 7)?;
    let model = Llama::new(&mut params, SMALL)?;
    let tokens = DTensor::zeros(&mesh, DType::I64, [4, 6], batch)?;
    let cx = Forward::train_without_dropout(&params);
    let (_, explanation) = mesh.explain(|| model.loss(&cx, &tokens, &tokens)?.backward())?;
    Ok((explanation, tally))
}

fn on_all(mesh: &'static str, recomputed: &'static [&str]) -> (Explanation, Tally) {
    let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
    let all = spmd(ranks, move |rank| step(&rank, mesh, recomputed));
    all.unwrap_or_else(|e| panic!("{mesh}: {e}")).swap_remove(0)
}

fn is_move(plan: &ExplainedPlan) -> bool {
    ["redistribute", "backward"].contains(&plan.operator.as_str())
}

/// The numbers of operator calls by path, without redistributions.
fn calls(explanation: &Explanation, phase: Phase) -> BTreeMap<&'static str, u64> {
    let mut calls = BTreeMap::new();
    for plan in explanation.plans.iter().filter(|plan| plan.phase == phase && !is_move(plan)) {
        *calls.entry(plan.path.as_str()).or_default() += plan.calls;
    }
    calls
}

fn block_paths() -> Vec<String> {
    (0..SMALL.layers).flat_map(|i| PARTS.map(|part| format!("h.{i}{part}"))).collect()
}

#[test]
fn every_call_of_a_step_has_its_modules_path() {
    for mesh in ["1", "fsdp=2", "tp=2", "dp=2,tp=2"] {
        let (plain, _) = on_all(mesh, &[]);
        let mut want = block_paths();
        want.extend(AROUND.map(String::from));
        for phase in [Phase::Forward, Phase::Backward] {
            let by_path = calls(&plain, phase);
            let inside: Vec<&str> = by_path.keys().copied().filter(|path| !path.is_empty()).collect();
            let mut want: Vec<&str> = want.iter().map(String::as_str).collect();
            // The derivative of a sum of two terms is its gradient: no call is left.
            let adds_alone = |path: &&str| phase == Phase::Forward || path.matches('.').count() != 1;
            want.retain(|path| adds_alone(path) || by_path.contains_key(path));
            want.sort_unstable();
            assert_eq!(inside, want, "{mesh}, {phase}");
        }
        let first = &calls(&plain, Phase::Forward);
        assert_eq!(first["h.0.attn_norm"], 1, "{mesh}: {first:?}");
        assert_eq!(first["h.0"], 1, "{mesh}: the last residual sum; the first is taken by the norm after it");
        assert!(calls(&plain, Phase::Recomputation).is_empty(), "{mesh}");
        let same = PARTS.iter().all(|part| first[&*format!("h.0{part}")] == first[&*format!("h.1{part}")]);
        assert!(same, "{mesh}: {first:?}");

        let (again, _) = on_all(mesh, &["h.*"]);
        let (second, mut blocks) = (calls(&again, Phase::Recomputation), first.clone());
        blocks.retain(|path, _| path.starts_with("h."));
        assert_eq!(calls(&again, Phase::Forward), *first, "{mesh}");
        assert_eq!(second, blocks, "{mesh}: a block's calls are made again under their paths");
        assert_eq!(calls(&again, Phase::Backward), calls(&plain, Phase::Backward), "{mesh}");
    }
}

fn sum<'a>(rows: impl IntoIterator<Item = &'a ModuleTraffic>) -> Total {
    rows.into_iter().map(|row| row.traffic.total).sum()
}

#[test]
fn tallies_count_gathers_and_reductions_by_module() {
    let (explanation, tally) = on_all("fsdp=2", &[]);
    let rows = tally.by_module();
    assert_eq!(sum(&rows), tally.total());
    for row in tally.rows() {
        let parts =
            rows.iter().filter(|part| (&part.traffic.group, part.traffic.call) == (&row.group, row.call));
        assert_eq!(sum(parts), row.total);
    }
    let of = |path: &'static str, phase: Phase, operator: &'static str| -> Total {
        let path = ModulePath::new(path);
        sum(rows.iter().filter(|row| (row.path, row.phase, row.operator) == (path, phase, operator)))
    };
    // A block is gathered by one call before each pass but for the last block, which the backward pass finds held. Half
    // of qkv's f32 elements are among them.
    let half = (10 * (4 + 2 + 2) * 4 * 4 / 2) as u64;
    let gathered = |block| [Phase::Forward, Phase::Backward].map(|phase| of(block, phase, "redistribute"));
    let [forward, backward] = gathered("h.0");
    assert!(
        forward.calls == 1 && forward.received_bytes > half && forward == backward,
        "{forward:?} {backward:?}"
    );
    assert_eq!(gathered("h.1"), [forward, Total::default()]);
    assert_eq!(gathered("h.0.attn.qkv"), [Total::default(); 2]);
    // So are a block's gradients reduced.
    assert_eq!(of("h.1.attn.qkv", Phase::Backward, "backward"), Total::default());
    let reduced = of("h.1", Phase::Backward, "backward");
    assert!(reduced.calls == 1 && reduced.received_bytes > half, "{reduced:?}");
    // The explanation has them too. The other call compared the ranks' seeds before.
    let of_plan =
        |plan: &ExplainedPlan| plan.calls * plan.moves.iter().map(|m| calls_of(&m.plan)).sum::<u64>();
    let explained: u64 = explanation.plans.iter().map(of_plan).sum();
    assert_eq!(explained + of("", Phase::Forward, "").calls, tally.total().calls);
}

/// The number of collective calls that the text of a move names.
fn calls_of(text: &str) -> u64 {
    text.matches(" over ").count() as u64
}

/// A move of two calls that is started in one module and waited for in another.
#[test]
fn later_calls_belong_to_the_module_that_started_the_move() {
    let dry = DryRun::new(8, 3).unwrap();
    let (rank, tally) = Tally::of(&dry.rank().unwrap()).unwrap();
    let mesh = DeviceMesh::parse(&rank, "a=2,b=4").unwrap();
    let wait_elsewhere = || -> Result<()> {
        let x = DTensor::zeros(&mesh, DType::F32, [128, 256], "(R, R)")?;
        let x = x.redistribute("(R, P(sum))")?;
        let pending = {
            let _scope = ModulePath::new("first").enter();
            x.redistribute_async("(R, R)")?
        };
        assert_eq!(tally.total().calls, 1, "the second call starts later");
        let _scope = ModulePath::new("second").enter();
        pending.wait().map(drop)
    };
    wait_elsewhere().unwrap();
    let paths: Vec<(&str, &str)> =
        tally.by_module().iter().map(|row| (row.path.as_str(), row.operator)).collect();
    assert_eq!(tally.total().calls, 2);
    assert!(paths.iter().all(|of| *of == ("first", "redistribute")), "{paths:?}");
}

/// A recorded backward pass, and a derivative that the user writes.
#[test]
fn a_users_scope_holds_in_derivatives() {
    let run = |rank: Rank| -> Result<()> {
        let mesh = DeviceMesh::parse(&rank, "dp=2")?;
        let x = DTensor::full(&mesh, DType::F32, [4], "(S0)", 0.5)?.requires_grad()?;
        let scope = ModulePath::new("head").enter();
        let y = DTensor::custom_vjp(
            "own",
            &[&x],
            |ins| Ok((vec![ins[0].exp()?], vec![ins[0].clone()])),
            |saved, grads| Ok(vec![Some(saved[0].exp()?.mul(&grads[0])?)]),
        )?
        .remove(0);
        drop(scope);
        let (slope, first) = mesh.explain(|| y.mul(&y)?.sum_all()?.grad(&[&x]))?;
        let (_, second) = mesh.explain(|| slope[0].sum_all()?.grad(&[&x]))?;
        let exp = |explanation: &Explanation| {
            let of = |plan: &&ExplainedPlan| plan.operator == "Exp";
            explanation.plans.iter().find(of).map(|plan| (plan.path.as_str(), plan.phase, plan.calls))
        };
        assert_eq!(exp(&first), Some(("head", Phase::Backward, 1)));
        assert!(second.plans.iter().any(|plan| plan.path.as_str() == "head"), "{second}");
        assert_eq!(ModulePath::current().as_str(), "");
        Ok(())
    };
    spmd(2, run).unwrap();
}

/// Gradients that stayed unreduced are reduced by a pass that does not reach their leaves.
#[test]
fn a_late_reduction_belongs_to_the_leafs_module() {
    let run = |rank: Rank| -> Result<Vec<(&'static str, Phase)>> {
        let (rank, tally) = Tally::of(&rank)?;
        let mesh = DeviceMesh::parse(&rank, "dp=2")?;
        mesh.set_reduction(Reduction::Fast);
        let leaf = |path: &str| {
            let _scope = ModulePath::new(path).enter();
            DTensor::full(&mesh, DType::F32, [4], "(R)", 2.0)?.requires_grad()
        };
        let x = DTensor::full(&mesh, DType::F32, [6, 4], "(S0)", 1.0)?;
        let mut gradients = Gradients::default();
        let first = mesh.no_sync();
        x.mul(&leaf("early")?)?.sum_all()?.backward_into(&mut gradients)?;
        drop(first);
        assert_eq!(tally.total().calls, 0);
        x.mul(&leaf("late")?)?.sum_all()?.backward_into(&mut gradients)?;
        Ok(tally.by_module().iter().map(|row| (row.path.as_str(), row.phase)).collect())
    };
    let seen = spmd(2, run).unwrap();
    assert_eq!(seen[0], [("late", Phase::Backward), ("early", Phase::Backward)]);
}

/// Opens and closes the part of docs/plans.md that this test writes.
const MARKS: [&str; 2] = ["<!-- the explanation of a Llama block -->\n", "<!-- end of the explanation -->\n"];

/// One block of a Llama of 8 billion parameters, on eight ranks of a node. The page has the same program in short.
#[test]
fn the_page_shows_a_llama_block() {
    let explain = || -> Result<Explanation> {
        let network = Network::new([Level { ranks: usize::MAX, latency_s: 2e-6, bytes_per_s: 400e9 }])?;
        let gpu = Machine { half_flops_per_s: 8e14, bytes_per_s: 3e12, ..Machine::default() };
        let dry = DryRun::with_network(8, 0, network)?.with_machine(gpu)?;
        let mesh = DeviceMesh::parse(&dry.rank()?, "tp=8")?;
        let mut params =
            Params::new(&mesh, Plan::transformer(mesh.mesh(), Parallel { heads: 8, sequence: true })?, 7)?;
        params.compute_in(DType::BF16)?;
        let config = LlamaConfig {
            vocabulary: 128_256,
            block: 8192,
            layers: 1,
            heads: 32,
            kv_heads: 8,
            head_width: 128,
            width: 4096,
            hidden: 14_336,
            base: 5e5,
            dropout: 0.0,
        };
        let model = Llama::new(&mut params, config)?;
        let tokens = DTensor::zeros(&mesh, DType::I64, [1, 8192], "(R)")?;
        let cx = Forward::train_without_dropout(&params);
        let (_, mut why) = mesh.explain(|| model.loss(&cx, &tokens, &tokens)?.backward())?;
        why.plans.retain(|plan| {
            let moves = plan.received_bytes[2] > 0.0;
            let shown = if plan.phase == Phase::Forward { plan.time.seconds() > 1e-6 } else { moves };
            plan.path.as_str().starts_with("h.0") && shown
        });
        Ok(why)
    };
    let why = explain().unwrap_or_else(|e| panic!("{e}"));
    let mut text = String::new();
    write!(text, "{}\n```text\n{why}```\n\n{}", MARKS[0], MARKS[1]).unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/plans.md");
    let page = std::fs::read_to_string(&path).expect("docs/plans.md is there");
    let [start, end] = MARKS.map(|mark| page.find(mark).unwrap_or_else(|| panic!("{mark} is missing")));
    let end = end + MARKS[1].len();
    if std::env::var_os("ISOSHARD_BLESS").is_some() {
        std::fs::write(&path, format!("{}{text}{}", &page[..start], &page[end..]))
            .expect("it can be written");
    } else {
        assert_eq!(page[start..end], text, "run with ISOSHARD_BLESS=1 to write the page");
    }
}
