//! Sums that a program takes in groups: the parts are those of the definition, and ranks send as many bytes as in fast
//! mode. The module `train` compares the bits of meshes.

use isoshard::Result;
use isoshard::comm::{Rank, Tally, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh, Reduction};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::placement::{Mesh, SumGroups};
use isoshard::rng::Generator;
use isoshard::tensor::{DType, Tensor};

fn on<T: Send + 'static>(mesh: &str, run: impl Fn(&Rank) -> Result<T> + Send + Sync + 'static) -> Vec<T> {
    let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
    spmd(ranks, move |rank| run(&rank)).unwrap_or_else(|e| panic!("{mesh}: {e}"))
}

fn grouped(parts: usize, wire: DType) -> Reduction {
    Reduction::Grouped(SumGroups::new(parts).unwrap().with_wire(wire).unwrap())
}

fn values(shape: [usize; 2]) -> Tensor {
    let n = shape[0] * shape[1];
    let value = |i: usize| (i as f32 * 0.37).sin() * 10f32.powi(i as i32 % 5 - 2);
    Tensor::from_vec((0..n).map(value).collect(), shape).unwrap()
}

/// Products of parts of the contraction, rounded to bf16 and added in pairs, which are rounded again.
#[test]
fn parts_are_those_of_the_definition() {
    on("a=1", |rank| {
        let mesh = DeviceMesh::new(rank, &[("a", 1)])?;
        let whole = |t: &Tensor| DTensor::distribute(&mesh, t, "(R)");
        for dtype in [DType::F32, DType::BF16] {
            let (x, w) = (whole(&values([3, 640]))?.cast(dtype)?, whole(&values([5, 640]))?.cast(dtype)?);
            let part = |i: usize| -> Result<DTensor> {
                let of = |t: &DTensor| t.slice(1, 160 * i, 160)?.cast(DType::F32);
                of(&x)?.matmul(&of(&w)?.transpose(0, 1)?)?.cast(DType::BF16)
            };
            let join = |a: DTensor, b: DTensor| a.add(&b);
            let want = join(join(part(0)?, part(1)?)?, join(part(2)?, part(3)?)?)?.cast(dtype)?;
            let got = mesh.with_reduction(grouped(4, DType::BF16), || x.matmul(&w.transpose(0, 1)?))?;
            assert_eq!(got.local().as_bytes()?, want.local().as_bytes()?);
            assert_ne!(
                got.local().as_bytes()?,
                x.matmul(&w.transpose(0, 1)?)?.local().as_bytes()?,
                "rounding shows"
            );
            let f32_parts = mesh.with_reduction(grouped(4, DType::F32), || x.matmul(&w.transpose(0, 1)?))?;
            assert_eq!(f32_parts.local().as_bytes()?, x.matmul(&w.transpose(0, 1)?)?.local().as_bytes()?);
        }
        Ok(())
    });
}

/// A gradient of a leaf, by a product or by a joint map, has the parts that the program gives gradients.
#[test]
fn gradients_of_leaves_have_parts_of_their_own() {
    on("a=1", |rank| {
        let mesh = DeviceMesh::new(rank, &[("a", 1)])?;
        let whole = |t: &Tensor| DTensor::distribute(&mesh, t, "(R)");
        let (x, dy) = (whole(&values([256, 3]))?, whole(&values([256, 5]))?);
        let gradients = |groups: SumGroups| -> Result<Vec<Vec<f32>>> {
            mesh.set_reduction(Reduction::Grouped(groups.with_wire(DType::BF16)?));
            let leaf = || whole(&values([5, 3]))?.requires_grad();
            let (v, w) = (leaf()?, leaf()?);
            let ys = x.joint_linear(&[&v, &w])?;
            let all = ys[0].add(&ys[1])?.add(&x.matmul(&w.transpose(0, 1)?)?)?;
            let gradients = all.mul(&dy)?.sum_all()?.backward()?;
            [&v, &w].map(|of| gradients.get(of).expect("it is used").local().to_vec()).into_iter().collect()
        };
        let (two, four) = (gradients(SumGroups::new(2)?)?, gradients(SumGroups::new(4)?)?);
        assert!(two[0] != four[0] && two[1] != four[1]);
        assert_eq!(gradients(SumGroups::new(4)?.with_gradient_parts(2)?)?, two);
        assert_eq!(gradients(SumGroups::new(2)?.with_gradient_parts(4)?)?, four);
        Ok(())
    });
}

/// Returns the bytes that this rank receives in reductions of one step: eight rows of a GPT in bf16.
fn reduced_bytes(rank: &Rank, mesh: &str, reduction: Reduction) -> Result<u64> {
    let (rank, tally) = Tally::of(rank)?;
    let mesh = DeviceMesh::parse(&rank, mesh)?;
    mesh.set_reduction(reduction);
    let config =
        GptConfig { vocabulary: 16, block: 8, layers: 2, heads: 4, width: 256, dropout: 0.0, bias: false };
    let plan = Plan::transformer(mesh.mesh(), Parallel { heads: config.heads, sequence: false })?;
    let layout = plan.batch_layout(mesh.mesh());
    let mut params = Params::new(&mesh, plan, 7)?;
    params.compute_in(DType::BF16)?;
    let model = Gpt::new(&mut params, config)?;
    let tokens = Tensor::from_vec((0..64i64).map(|i| i * i % 11).collect(), [8, 8])?;
    let tokens = DTensor::distribute(&mesh, &tokens, layout)?;
    let mut dropout = Generator::new(1);
    model.loss(&Forward::train(&params, &mut dropout), &tokens, &tokens)?.backward()?;
    let reduces = |call: &str| matches!(call, "reduce_scatter" | "all_reduce" | "all_to_all");
    let rows = tally.rows();
    Ok(rows.iter().filter(|row| reduces(row.call)).map(|row| row.total.received_bytes).sum())
}

/// Returns the gradients of two blocks whose modules have modes of their own.
fn gradients_by_path(rank: &Rank, mesh: &str, patterns: &[&str], recomputed: bool) -> Result<Vec<Vec<f32>>> {
    let mesh = DeviceMesh::parse(rank, mesh)?;
    patterns.iter().for_each(|pattern| mesh.set_reduction_of(pattern, grouped(4, DType::BF16)));
    let config =
        GptConfig { vocabulary: 16, block: 8, layers: 2, heads: 4, width: 64, dropout: 0.1, bias: true };
    let plan = Plan::transformer(mesh.mesh(), Parallel { heads: config.heads, sequence: false })?;
    let plan = if recomputed { plan.recompute("h.*") } else { plan };
    let layout = plan.batch_layout(mesh.mesh());
    let mut params = Params::new(&mesh, plan, 7)?;
    let model = Gpt::new(&mut params, config)?;
    let tokens = Tensor::from_vec((0..64i64).map(|i| i * i % 11).collect(), [8, 8])?;
    let tokens = DTensor::distribute(&mesh, &tokens, layout)?;
    let mut dropout = Generator::new(1);
    let gradients = model.loss(&Forward::train(&params, &mut dropout), &tokens, &tokens)?.backward()?;
    let gradient = |value| gradients.get(value).expect("it is used").full_tensor()?.to_vec::<f32>();
    params.values().map(gradient).collect()
}

#[test]
fn modules_have_modes_of_their_own_by_path() {
    let run = |mesh: &'static str, patterns: &'static [&'static str], recomputed| {
        on(mesh, move |rank| gradients_by_path(rank, mesh, patterns, recomputed)).swap_remove(0)
    };
    let cases: [&[&str]; 4] = [&[], &["h.*.mlp"], &["h.1.**"], &["**"]];
    let all = cases.map(|patterns| run("dp=1", patterns, false));
    assert!((0..4).all(|i| (0..i).all(|j| all[i] != all[j])), "each has other bits");
    for (patterns, want) in cases.into_iter().zip(&all) {
        for mesh in ["dp=2,tp=2", "fsdp=4"] {
            for recomputed in [false, true] {
                assert!(run(mesh, patterns, recomputed) == *want, "{patterns:?} on {mesh}, {recomputed}");
            }
        }
    }
}

#[test]
fn ranks_send_as_many_bytes_as_in_fast_mode() {
    for mesh in ["fsdp=4", "dp=2,tp=2", "fsdp=8"] {
        let bytes =
            |reduction| -> u64 { on(mesh, move |rank| reduced_bytes(rank, mesh, reduction)).iter().sum() };
        let all = [grouped(8, DType::BF16), Reduction::Fast, Reduction::Exact].map(bytes);
        let [grouped, fast, exact] = all.map(|n| n as f64);
        println!("{mesh}: {all:?}");
        assert!(grouped <= 1.05 * fast, "{mesh}: {all:?}");
        assert!(exact > 1.05 * grouped, "{mesh}: {all:?}");
    }
}
