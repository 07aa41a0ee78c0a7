//! `fully_shard` with frozen parameters, and with gradients that stay unreduced: the bits of a single rank, and no gradient,
//! reduction or state that nothing needs.

use isoshard::Result;
use isoshard::comm::{Rank, Tally, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh, Gradients, Reduction};
use isoshard::fsdp::{BlockPolicy, ShardedBytes, Sharding, fully_shard};
use isoshard::nn::{Forward, Gpt, GptConfig, Params, Plan};
use isoshard::optim::AdamW;
use isoshard::placement::{Mesh, SumGroups};
use isoshard::rng::Generator;
use isoshard::tensor::{DType, Tensor};

const CONFIG: GptConfig =
    GptConfig { vocabulary: 13, block: 6, layers: 3, heads: 2, width: 8, dropout: 0.1, bias: true };

/// A GPT whose blocks are units, and a batch.
struct Setup {
    params: Params,
    model: Gpt,
    tokens: DTensor,
    targets: DTensor,
    tally: Tally,
}

impl Setup {
    fn new(rank: &Rank, mesh: &str, mode: Reduction, compute: DType) -> Result<Setup> {
        let (rank, tally) = Tally::of(rank)?;
        let mesh = DeviceMesh::parse(&rank, mesh)?;
        mesh.set_reduction(mode);
        let mut params = Params::new(&mesh, Plan::default(), 7)?;
        params.compute_in(compute)?;
        let model = Gpt::new(&mut params, CONFIG)?;
        let tokens = DTensor::zeros(&mesh, DType::I64, [1, 6], params.batch_layout())?;
        Ok(Setup { params, model, targets: tokens.clone(), tokens, tally })
    }

    fn shard(&mut self, sharding: &Sharding) -> Result<()> {
        fully_shard(&mut self.params, &["h.*"], sharding, &BlockPolicy::default())?;
        let mesh = self.params.mesh().clone();
        let layout = self.params.batch_layout();
        let text = |from: i64| -> Result<DTensor> {
            let text = (from..from + 48).map(|i| i * i % 13).collect();
            DTensor::distribute(&mesh, &Tensor::from_vec(text, [8, 6])?, layout.clone())
        };
        (self.tokens, self.targets) = (text(0)?, text(1)?);
        Ok(())
    }

    fn loss(&self, dropout: &mut Generator) -> Result<DTensor> {
        self.model.loss(&Forward::train(&self.params, dropout), &self.tokens, &self.targets)
    }

    /// Returns the calls that reduce gradients.
    fn reductions(&self) -> u64 {
        let reduces = |call: &str| matches!(call, "reduce_scatter" | "all_reduce" | "all_to_all");
        self.tally.rows().iter().filter(|row| reduces(row.call)).map(|row| row.total.calls).sum()
    }
}

fn on<T: Send + PartialEq + 'static>(
    mesh: &'static str,
    run: impl Fn(&Rank, &'static str) -> Result<T> + Send + Sync + 'static,
) -> T {
    let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
    let mut all = spmd(ranks, move |rank| run(&rank, mesh)).unwrap_or_else(|e| panic!("{mesh}: {e}"));
    assert!(all.iter().all(|one| *one == all[0]), "{mesh}: ranks differ");
    all.remove(0)
}

/// One block learns; it was frozen before or after units were placed.
#[test]
fn frozen_parameters_have_no_gradient_no_reduction_and_no_state() {
    let train = |sharding: fn() -> Sharding, frozen_first: bool, compute: DType| {
        move |rank: &Rank, mesh: &'static str| {
            let mut setup = Setup::new(rank, mesh, Reduction::Exact, compute)?;
            let freeze = |params: &mut Params| {
                params.freeze("**")?;
                params.unfreeze("h.1.**").map(drop)
            };
            if frozen_first {
                freeze(&mut setup.params)?;
            }
            setup.shard(&sharding())?;
            if !frozen_first {
                freeze(&mut setup.params)?;
            }
            let learns: Vec<bool> =
                setup.params.ids().map(|id| setup.params.path(id).starts_with("h.1.")).collect();
            let before = setup.params.values().map(DTensor::clone).collect::<Vec<_>>();
            let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(0.01).clip(1.0);
            let mut dropout = Generator::new(3);
            let mut reduced = Vec::new();
            for _ in 0..2 {
                let mut loss = setup.loss(&mut dropout)?;
                let start = setup.reductions();
                let mut gradients = loss.backward()?;
                reduced.push(setup.reductions() - start);
                drop(loss);
                let mut bytes = 0;
                for (value, learns) in setup.params.values().zip(&learns) {
                    assert_eq!(gradients.get(value).is_some(), *learns);
                    bytes += gradients.get(value).map_or(0, |grad| grad.local().len_bytes());
                }
                assert_eq!(ShardedBytes::of(&setup.params)?.gradients, bytes);
                optimizer.step(&mut setup.params, &mut gradients)?;
            }
            for ((id, learns), old) in setup.params.ids().zip(&learns).zip(before) {
                let states = optimizer.rule().moments();
                assert!(states.iter().all(|of| of.get(id).is_some() == *learns), "{}", setup.params.path(id));
                let of = |x: &DTensor| -> Result<Vec<f64>> { Ok(x.full_tensor()?.to_f64_vec()) };
                assert_eq!(of(&old)? != of(setup.params.value(id))?, *learns, "{}", setup.params.path(id));
            }
            Ok((setup.params.digest()?, reduced))
        }
    };
    for compute in [DType::F32, DType::BF16] {
        for frozen_first in [true, false] {
            let (single, none) = on("dp=1", train(|| Sharding::ddp("dp"), frozen_first, compute));
            assert_eq!(none, [0, 0]);
            type Case = (&'static str, fn() -> Sharding, u64);
            let cases: [Case; 5] = [
                ("dp=2", || Sharding::zero1("dp"), 1),
                ("dp=2", || Sharding::zero2("dp"), 1),
                ("dp=2", || Sharding::zero3("dp"), 1),
                ("dp=2,fsdp=2", || Sharding::hsdp("dp", "fsdp"), 2),
                ("dp=2,fsdp=2", || Sharding::hfsdp("dp", "fsdp"), 2),
            ];
            for (mesh, sharding, most) in cases {
                let (digest, reduced) = on(mesh, train(sharding, frozen_first, compute));
                assert_eq!(digest, single, "{mesh} {}, {compute}", sharding());
                println!("{mesh} {} {compute}: {reduced:?}", sharding());
                assert!(reduced.iter().all(|calls| (1..=most).contains(calls)), "{mesh}: {reduced:?}");
            }
        }
    }
}

/// Four micro-batches: ranks keep the parts of all but the last.
#[test]
fn sums_in_groups_stay_unreduced_with_the_bits_of_a_single_rank() {
    let groups = || Reduction::Grouped(SumGroups::new(4).unwrap().with_wire(DType::BF16).unwrap());
    let train = move |sharding: fn() -> Sharding, unreduced: bool, compute: DType| {
        move |rank: &Rank, mesh: &'static str| {
            let mut setup = Setup::new(rank, mesh, groups(), compute)?;
            setup.shard(&sharding())?;
            let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(0.01).clip(1.0);
            let mut dropout = Generator::new(3);
            let mut reduced = 0;
            for _ in 0..2 {
                let mut gradients = Gradients::default();
                for micro in 0..4 {
                    let mut loss = setup.loss(&mut dropout)?;
                    let guard = (unreduced && micro < 3).then(|| setup.params.mesh().no_sync());
                    let start = setup.reductions();
                    loss.backward_into(&mut gradients)?;
                    reduced += setup.reductions() - start;
                    drop(guard);
                }
                optimizer.step(&mut setup.params, &mut gradients)?;
            }
            Ok((setup.params.digest()?, reduced))
        }
    };
    type Case = (&'static str, fn() -> Sharding);
    let cases: [Case; 4] = [
        ("dp=2", || Sharding::zero2("dp")),
        ("dp=2", || Sharding::zero3("dp")),
        ("dp=2,fsdp=2", || Sharding::hsdp("dp", "fsdp")),
        ("dp=2,fsdp=2", || Sharding::hfsdp("dp", "fsdp")),
    ];
    for compute in [DType::F32, DType::BF16] {
        let (kept, _) = on("dp=1", train(|| Sharding::ddp("dp"), true, compute));
        let (merged, _) = on("dp=1", train(|| Sharding::ddp("dp"), false, compute));
        assert!(kept != merged, "parts are added before they are joined");
        for (mesh, sharding) in cases {
            let (digest, few) = on(mesh, train(sharding, true, compute));
            let (each, many) = on(mesh, train(sharding, false, compute));
            assert_eq!((digest, each), (kept, merged), "{mesh} {}, {compute}", sharding());
            println!("{mesh} {} {compute}: {few} calls, {many} without no_sync", sharding());
            assert!(2 * few < many, "{mesh} {}: {few} calls of {many}", sharding());
        }
    }
}
