//! Plans give every rank its share: bytes and work of the calls for which a plan that looks at one axis, or at equal
//! chunks, leaves ranks idle. Each rank of a world is run dry.

use isoshard::Result;
use isoshard::comm::{DryRun, Machine, Network, Rank, Spmd, Tally};
use isoshard::dtensor::{DTensor, DeviceMesh, Reduction};
use isoshard::tensor::DType;

/// A function of one tensor.
type Program<'a> = &'a dyn Fn(&DTensor) -> Result<DTensor>;

/// A rank's received bytes and its flops.
type RankShare = (u64, u64);

/// Runs `program` on each rank of `mesh` without data.
fn every_rank(mesh: &str, program: impl Fn(&DeviceMesh) -> Result<DTensor>) -> Vec<RankShare> {
    let len = mesh.split(',').map(|axis| axis.split_once('=').unwrap().1.parse::<usize>().unwrap()).product();
    let share = |r: usize| -> Result<RankShare> {
        let dry = DryRun::new(len, r)?;
        let mesh = DeviceMesh::parse(&dry.rank()?, mesh)?;
        let tally = mesh.tally_work();
        program(&mesh)?;
        Ok((mesh.received_bytes(), tally.total().share.flops))
    };
    (0..len).map(share).collect::<Result<_>>().unwrap_or_else(|e| panic!("{mesh}: {e}"))
}

/// Most over mean, of bytes and of flops.
fn imbalance(shares: &[RankShare]) -> [f64; 2] {
    let of = |get: fn(&RankShare) -> u64| {
        let (most, sum) = (shares.iter().map(get).max().unwrap(), shares.iter().map(get).sum::<u64>());
        if sum == 0 { 1.0 } else { (most * shares.len() as u64) as f64 / sum as f64 }
    };
    [of(|s| s.0), of(|s| s.1)]
}

fn zeros(mesh: &DeviceMesh, shape: &[usize], layout: &str) -> Result<DTensor> {
    DTensor::zeros(mesh, DType::BF16, shape, layout)
}

/// One long sequence, sharded by time: bytes of Ulysses' all-to-alls or of the gathers that a ring makes, whichever are
/// fewer, and equal work. A chunk is a rank's shard of the queries.
#[test]
fn attention_over_one_sequence_keeps_all_ranks_busy() {
    let (time, width) = (8192, 64);
    for (heads, kv_heads) in [(8, 8), (32, 8), (16, 16), (8, 2), (8, 1)] {
        let shares = every_rank("cp=8", |mesh| {
            let q = zeros(mesh, &[1, heads, time, width], "(S2)")?;
            let k = zeros(mesh, &[1, kv_heads, time, width], "(S2)")?;
            q.attention(&k, &k, 0.125)
        });
        let [bytes, flops] = imbalance(&shares);
        let chunk = |heads: usize| (2 * heads * time * width / 8) as u64;
        let ulysses = 7 * (chunk(heads) + 2 * chunk(kv_heads)) / 8;
        let ring = 2 * 7 * chunk(kv_heads);
        let least = if kv_heads >= 8 { ulysses.min(ring) } else { ring };
        let most = shares.iter().map(|s| s.0).max().unwrap();
        assert!(bytes <= 1.02 && flops <= 1.02, "{heads}, {kv_heads}: {shares:?}");
        assert!(most <= least, "{heads}, {kv_heads}: {most} bytes, {least} would do");
    }
}

/// Normalisation over a sharded dim with a batch that does not feed all ranks.
#[test]
fn other_dims_are_sharded_if_the_batch_is_small() {
    let norm = |x: &DTensor| {
        let weight = DTensor::zeros(x.mesh(), DType::BF16, [4096], "(R)")?;
        x.layer_norm(&weight, None, 1e-5)
    };
    let programs: [(&str, Program); 3] =
        [("softmax", &|x| x.softmax(2)), ("log_softmax", &|x| x.log_softmax(2)), ("layer_norm", &norm)];
    for batch in [1, 2] {
        for (name, program) in programs {
            let shares = every_rank("a=8", |mesh| program(&zeros(mesh, &[batch, 64, 4096], "(S2)")?));
            let [bytes, flops] = imbalance(&shares);
            assert!(bytes <= 1.02 && flops <= 1.02, "{name}, batch {batch}: {shares:?}");
        }
    }
}

/// With no other dim every rank computes the whole, rather than one for all.
#[test]
fn nothing_else_to_shard() {
    let shares = every_rank("a=8", |mesh| zeros(mesh, &[1, 4096], "(S1)")?.softmax(1));
    assert!(imbalance(&shares)[0] <= 1.02, "{shares:?}");
}

/// The second axis has other rows to choose from once the first has chosen: each alone would take the batch.
#[test]
fn axes_are_chosen_together() {
    let shares = every_rank("a=2,b=2", |mesh| zeros(mesh, &[2, 6, 64, 64], "(S3, S3)")?.softmax(3));
    let [bytes, flops] = imbalance(&shares);
    assert!(bytes <= 1.02 && flops <= 1.02, "{shares:?}");
}

/// A shard that lies on one rank is spread if the processor is slow, and stays if the links are. No rate changes a value.
#[test]
fn rates_decide_between_work_and_bytes() {
    let layouts = |flops: f64, bytes: f64| -> Vec<String> {
        let machine = Machine { f32_flops_per_s: flops, bytes_per_s: 1e15, ..Machine::default() };
        let spmd = Spmd::new(2).machine(machine).unwrap().network(Network::uniform(0.0, bytes).unwrap());
        let run = |rank: Rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 2)])?;
            let y = DTensor::full(&mesh, DType::F32, [64, 65], "(RS(0..1; 64,0))", 0.5)?.square()?;
            assert_eq!(y.full_tensor()?.to_f64_vec(), [0.25; 64 * 65]);
            Ok(y.layout().to_string())
        };
        spmd.run(run).unwrap_or_else(|e| panic!("{e}"))
    };
    assert_eq!(layouts(1e3, 1e12), ["(S0)", "(S0)"]);
    assert_eq!(layouts(1e12, 1e3), ["(RS(0..1; 64,0))", "(RS(0..1; 64,0))"]);
}

/// Under a limit the plan that gathers less is taken, though it takes longer.
#[test]
fn a_memory_limit_keeps_large_operands_where_they_are() {
    let taken = |limit: Option<u64>| -> Result<u64> {
        let machine = Machine { call_memory_bytes: limit, ..Machine::default() };
        // Latency is all: gathering one operand takes one call, resharding both takes two.
        let dry = DryRun::with_network(8, 0, Network::uniform(1e-3, 1e15)?)?.with_machine(machine)?;
        let mesh = DeviceMesh::parse(&dry.rank()?, "a=8")?;
        let (q, k) = (zeros(&mesh, &[1, 8, 4096, 64], "(S2)")?, zeros(&mesh, &[1, 8, 4096, 64], "(S2)")?);
        let before = mesh.received_bytes();
        q.attention(&k, &k, 0.125)?;
        Ok(mesh.received_bytes() - before)
    };
    let (free, bounded) = (taken(None).unwrap(), taken(Some(3 << 20)).unwrap());
    assert!(bounded < free, "{bounded} bytes under a limit, {free} without");
}

/// An operand could move at little cost so that its contracted dim is sharded, but the sum that this leaves unreduced
/// would cost more than a gather.
#[test]
fn no_operand_moves_to_leave_more_to_reduce() {
    for mode in [Reduction::Exact, Reduction::Fast] {
        let shares = every_rank("a=8,b=8", |mesh| {
            mesh.set_reduction(mode);
            let (y, w) = (zeros(mesh, &[8, 8192, 512], "(S0, S1)")?, zeros(mesh, &[512, 32768], "(R, S1)")?);
            let x = y.einsum("b t n, n k -> b t k", &w)?;
            assert_eq!(x.layout().to_string(), "(S0, S2)");
            Ok(x)
        });
        let gather = 7 * (2 * 8192 * 512) / 8;
        assert!(shares.iter().all(|share| share.0 == gather), "{mode:?}: {shares:?}");
    }
}

/// The second product of a block under tensor parallelism with sequence parallelism: the backward pass gathers the
/// gradient once, for both of its products, and receives the bytes of the forward pass's reduction.
#[test]
fn the_backward_pass_of_a_summed_product_gathers_its_gradient_once() {
    for batch in [1, 16] {
        let shares = every_rank("tp=8", |mesh| {
            let x = DTensor::zeros(mesh, DType::F32, [batch, 1024, 2048], "(S2)")?.requires_grad()?;
            let w = DTensor::zeros(mesh, DType::F32, [512, 2048], "(S1)")?.requires_grad()?;
            let y = x.einsum("b t k, n k -> b t n", &w)?;
            assert_eq!(y.layout().to_string(), "(P(sum))");
            let y = y.redistribute("(S1)")?;
            let forward = mesh.received_bytes();
            assert_eq!(forward, 7 * (4 * batch * 1024 * 512) as u64 / 8);
            // Its gradient is as large as `y`, and sharded like it.
            let gradients = y.mul(&y)?.sum_all()?.backward()?;
            for leaf in [&x, &w] {
                assert_eq!(gradients.get(leaf).expect("a leaf").layout(), leaf.layout());
            }
            let backward = mesh.received_bytes() - forward;
            assert!(backward - forward < 1024, "{backward} bytes, {forward} in the forward pass");
            Ok(y)
        });
        assert_eq!(imbalance(&shares), [1.0; 2], "batch {batch}");
    }
}

/// Rates so low that times saturate, and a tally around one rank's engine only.
#[test]
fn extreme_rates_and_tallies_change_no_plan() {
    let slow = Machine { f32_flops_per_s: 1e-9, ..Machine::default() };
    for network in [Network::uniform(0.0, 1.0).unwrap(), Network::uniform(1e8, 1e9).unwrap()] {
        let dry = DryRun::with_network(2, 0, network).unwrap().with_machine(slow.clone()).unwrap();
        let mesh = DeviceMesh::parse(&dry.rank().unwrap(), "a=2").unwrap();
        let x = zeros(&mesh, &[4096, 4097], "(RS(0..2; 1,0))").unwrap();
        let y = x.softmax(1).unwrap();
        assert_eq!(y.shape().to_vec(), [4096, 4097]);
    }
    let kept = Spmd::new(2).machine(slow.clone()).unwrap().run(|rank| {
        let counted = if rank.rank() == 0 { Tally::of(&rank)?.0 } else { rank };
        Ok(counted.machine().clone())
    });
    assert_eq!(kept.unwrap(), [slow.clone(), slow]);
}

/// A rank that gives wrong rates is named by all.
#[test]
fn wrong_rates_of_one_rank_are_refused_on_all() {
    let refused = Spmd::new(2).run(|rank| {
        let mine = rank.rank();
        let rate = [1e9, f64::NAN][mine];
        let machine = Machine { bytes_per_s: rate, ..Machine::default() };
        Ok(rank.with_machine(machine).expect_err("a rate is wrong").to_string())
    });
    let refused = refused.unwrap();
    assert!(refused[0].contains("rank 1") && refused[1].contains("NaN"), "{refused:?}");
}
