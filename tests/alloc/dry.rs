//! A dry run counts the calls and bytes of a real run, on every rank of small meshes, and every operator gives the
//! same shapes. One rank of 16,384 trains in a laptop's memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use isoshard::comm::{
    Call, Channel, DryRun, Engine, Level, Network, Rank, Request, Spmd, Tally, Traffic, spmd,
};
use isoshard::dtensor::{DTensor, DeviceMesh, Reduction};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::ops::{Sample, catalog};
use isoshard::optim::{AdamW, clip_scale, global_norm};
use isoshard::placement::{Layout, Mesh};
use isoshard::rng::Generator;
use isoshard::tensor::{DType, Device, ReduceOp, Tensor, meta};
use isoshard::{Error, Result};

use crate::peak_of;

/// An engine that only exchanges data, like engines without shared memory: large all-reduces take two phases.
#[derive(Debug)]
struct Plain<T: ?Sized>(Arc<T>);

impl Engine for Plain<dyn Engine> {
    fn rank(&self) -> usize {
        self.0.rank()
    }
    fn world_len(&self) -> usize {
        self.0.world_len()
    }
    fn deadline(&self) -> Duration {
        self.0.deadline()
    }
    fn open(&self, ranks: &[usize], name: &str) -> Result<Arc<dyn Channel>> {
        Ok(Arc::new(Plain(self.0.open(ranks, name)?)))
    }
    fn end(&self) -> Result<()> {
        self.0.end()
    }
    fn abort(&self, cause: &Error) {
        self.0.abort(cause);
    }
}

impl Channel for Plain<dyn Channel> {
    fn start(&self, call: Call<'_>) -> Result<Box<dyn Request>> {
        self.0.start(call)
    }
}

/// A GPT and the settings of its training.
#[derive(Clone, Copy, Debug)]
struct Job {
    mesh: &'static str,
    config: GptConfig,
    batch: usize,
    sequence: bool,
    reduction: Reduction,
    compute: DType,
}

/// Sizes that no mesh divides evenly.
const ODD: Job = Job {
    mesh: "1",
    config: GptConfig { vocabulary: 67, block: 37, layers: 2, heads: 6, width: 78, dropout: 0.1, bias: true },
    batch: 5,
    sequence: false,
    reduction: Reduction::Exact,
    compute: DType::F32,
};

impl Job {
    fn ranks(&self) -> usize {
        Mesh::parse(self.mesh, 0).expect("a mesh").rank_len()
    }

    /// Runs two steps of forward, backward, clipping and AdamW, and reads no value. Returns the bytes that
    /// redistributions received.
    fn train(&self, rank: &Rank) -> Result<u64> {
        let mesh = DeviceMesh::parse(rank, self.mesh)?;
        mesh.set_reduction(self.reduction);
        let parallel = Parallel { heads: self.config.heads, sequence: self.sequence };
        let plan = Plan::transformer(mesh.mesh(), parallel)?;
        let layout = plan.batch_layout(mesh.mesh());
        let mut params = Params::new(&mesh, plan, 11)?;
        params.compute_in(self.compute)?;
        let model = Gpt::new(&mut params, self.config)?;
        let mut optimizer = AdamW::new().betas(0.9, 0.99).decay(0.1);
        let mut dropout = Generator::new(11).child("dropout");
        for _ in 0..2 {
            let shape = [self.batch, self.config.block];
            let tokens = DTensor::zeros(&mesh, DType::I64, shape, layout.clone())?;
            let cx = Forward::train(&params, &mut dropout);
            let mut loss = model.loss(&cx, &tokens, &tokens)?;
            drop(cx);
            let mut grads = loss.backward()?;
            loss.full_tensor()?;
            let norm = global_norm(params.ids().filter_map(|id| grads.get(params.value(id))))?;
            optimizer.step(&mut params, &mut grads, &clip_scale(&norm, 1.0)?, 1e-2)?;
        }
        Ok(mesh.received_bytes())
    }
}

/// The counts of a run, sorted.
fn sorted(mut rows: Vec<Traffic>) -> Vec<Traffic> {
    rows.sort_by(|a, b| (&a.group, a.call).cmp(&(&b.group, b.call)));
    rows
}

fn two_levels() -> Network {
    let level = |ranks, latency_s, bytes_per_s| Level { ranks, latency_s, bytes_per_s };
    Network::new([level(2, 1e-6, 100e9), level(usize::MAX, 10e-6, 10e9)]).expect("from fast to slow")
}

#[test]
fn a_training_steps_counts_are_those_of_a_real_run() {
    for (mesh, sequence, reduction, compute) in [
        ("fsdp=2,tp=2", false, Reduction::Exact, DType::F32),
        ("fsdp=2,tp=3", true, Reduction::Exact, DType::F32),
        ("dp=2,fsdp=3", false, Reduction::Fast, DType::F32),
        ("dp=2,fsdp=2", false, Reduction::Exact, DType::BF16),
    ] {
        let job = Job { mesh, sequence, reduction, compute, ..ODD };
        // On threads too, with and without data.
        let run = move |rank: Rank| {
            let plain = Rank::new(Arc::new(Plain(rank.engine().clone())))?;
            let (rank, tally) = Tally::of(&plain.on(rank.device()).with_network(rank.network().clone()))?;
            let received = job.train(&rank)?;
            Ok((sorted(tally.rows()), received))
        };
        let world = || Spmd::new(job.ranks()).network(two_levels());
        let real = world().run(run).unwrap_or_else(|e| panic!("{job:?}: {e}"));
        let absent = world().on(|_| Device::Meta).run(run).unwrap_or_else(|e| panic!("{job:?}: {e}"));
        for (rank, (real, absent)) in real.iter().zip(&absent).enumerate() {
            let dry = DryRun::with_network(job.ranks(), rank, two_levels()).unwrap();
            let received = job.train(&dry.rank().unwrap()).unwrap_or_else(|e| panic!("{job:?}: {e}"));
            let report = dry.report();
            assert_eq!((sorted(report.rows.clone()), received), *real, "{job:?}: rank {rank}");
            assert_eq!(real, absent, "{job:?}: rank {rank}: threads without data");
            assert_eq!(report.live_bytes, 0);
            assert!(report.total().calls > 20 && report.of_call("all_gather").received_bytes > 0);
            // Some group spans more than a pair of ranks, so its calls take slow links.
            assert!(report.total().time.seconds() > report.total().calls as f64 * 1e-6);
        }
    }
}

/// Large all-reduces, broadcasts, messages and barriers, which training does not call.
#[test]
fn every_collective_counts_as_a_real_one() {
    let run = |rank: &Rank| -> Result<()> {
        let (world, device) = (rank.world(), rank.device());
        let (n, me) = (world.len(), world.index());
        let shape = |k: usize| isoshard::tensor::Shape::from([k, 3]);
        let x = |k: usize| Tensor::zeros_on(device, DType::F32, shape(k));
        assert_eq!(world.all_reduce(&x(10_000)?, ReduceOp::Sum)?.shape(), &shape(10_000));
        assert_eq!(world.all_reduce_async(&x(7)?, ReduceOp::Max).wait()?.shape(), &shape(7));
        let got = world.all_gather(&x(me)?, &(0..n).map(shape).collect::<Vec<_>>())?;
        assert!(got.iter().enumerate().all(|(i, x)| *x.shape() == shape(i)));
        let parts: Vec<Tensor> = (0..n).map(|i| x(me * n + i)).collect::<Result<_>>()?;
        let got = world.all_to_all(parts, &(0..n).map(|i| shape(i * n + me)).collect::<Vec<_>>())?;
        assert!(got.iter().enumerate().all(|(i, x)| *x.shape() == shape(i * n + me)));
        let parts = (0..n).map(x).collect::<Result<_>>()?;
        assert_eq!(world.reduce_scatter(parts, ReduceOp::Sum)?.shape(), &shape(me));
        let mine = x(5)?;
        assert_eq!(world.broadcast(Some(&mine), 1, DType::F32, &shape(5))?.shape(), &shape(5));
        world.send(&x(2)?, (me + 1) % n)?;
        assert_eq!(world.recv((me + n - 1) % n, DType::F32, &shape(2))?.shape(), &shape(2));
        let pair = rank.group(&[me - me % 2, me - me % 2 + 1], &format!("pair{}", me / 2))?;
        pair.barrier()?;
        rank.group(&[me], "alone")?.all_reduce(&x(3)?, ReduceOp::Sum)?;
        Ok(())
    };
    let real = Spmd::new(4).network(two_levels()).run(move |rank| {
        let plain = Rank::new(Arc::new(Plain(rank.engine().clone())))?.with_network(rank.network().clone());
        let (rank, tally) = Tally::of(&plain)?;
        run(&rank)?;
        Ok(tally.rows())
    });
    for (me, real) in real.unwrap().into_iter().enumerate() {
        let dry = DryRun::with_network(4, me, two_levels()).unwrap();
        run(&dry.rank().unwrap()).unwrap();
        assert_eq!(dry.report().rows, real, "rank {me}");
        let of = |call| dry.report().rows.iter().find(|r| r.call == call).unwrap().total;
        assert_eq!(of("barrier").time.seconds(), 1e-6);
        assert_eq!(of("broadcast").received_bytes, if me == 1 { 0 } else { 60 });
    }
}

#[test]
fn every_operator_gives_shapes_without_elements() {
    let mut run = 0;
    for sample in catalog() {
        for text in ["(R)", "(S0)"] {
            let layout: Layout = text.parse().unwrap();
            let cuts = |s: &Sample| text == "(R)" || s.ins.iter().all(|i| !i.meta.shape.is_empty());
            if !cuts(&sample) {
                continue;
            }
            let call = {
                let sample = sample.clone();
                move |rank: &Rank| -> Result<Vec<(String, Vec<usize>, bool)>> {
                    let mesh = DeviceMesh::new(rank, &[("a", 3)])?;
                    let whole = |(i, x): (usize, &isoshard::ops::Input)| {
                        DTensor::distribute(&mesh, &x.values(DType::F32, i as u64), layout.clone())
                    };
                    let ins = sample.ins.iter().enumerate().map(whole).collect::<Result<Vec<_>>>()?;
                    let outs = DTensor::apply(sample.op.as_ref(), &ins.iter().collect::<Vec<_>>())?;
                    let said = |x: &DTensor| {
                        (
                            x.spec().to_string(),
                            x.local().shape().to_vec(),
                            x.local().shares_storage(ins[0].local()),
                        )
                    };
                    Ok(outs.iter().map(said).collect())
                }
            };
            let real = call.clone();
            let real = spmd(3, move |rank| real(&rank)).unwrap_or_else(|e| panic!("{sample:?} {text}: {e}"));
            for (rank, real) in real.iter().enumerate() {
                let dry = DryRun::new(3, rank).unwrap();
                let got = call(&dry.rank().unwrap()).unwrap_or_else(|e| panic!("{sample:?} {text}: {e}"));
                for (got, real) in got.iter().zip(real) {
                    assert_eq!((&got.0, &got.1), (&real.0, &real.1), "{sample:?} {text} on rank {rank}");
                    assert!(!got.2 || real.2, "{sample:?} {text} on rank {rank}: views share");
                }
                assert_eq!(got.len(), real.len());
                run += 1;
            }
        }
    }
    assert!(run > 300, "{run} calls");
}

#[test]
fn what_needs_values_is_refused_by_name() {
    assert_eq!(
        DryRun::new(4, 4).unwrap_err().to_string(),
        "dry_run: no such rank; got rank 4 of 4; number ranks from 0"
    );
    let dry = DryRun::new(4, 1).unwrap();
    let mesh = DeviceMesh::parse(&dry.rank().unwrap(), "a=4").unwrap();
    let mut generator = Generator::new(3);
    let x = DTensor::randn(&mesh, DType::F32, [6, 2], "(S0)", &mut generator).unwrap();
    let loss = x.mul(&x).unwrap().sum_all().unwrap();
    let said = "to_device: a tensor on meta has no elements; got f32[]; a dry run computes shapes alone: run with data to \
                read values";
    assert_eq!(loss.full_tensor().unwrap().item().unwrap_err().to_string(), said);
    assert_eq!(format!("{loss:?}"), "f32[]@(a:P(sum)) local f32[2] on meta", "two finished nodes");
}

#[test]
fn optimizers_write_in_place_without_data_too() {
    let dry = DryRun::new(2, 0).unwrap();
    let mesh = DeviceMesh::parse(&dry.rank().unwrap(), "fsdp=2").unwrap();
    let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 1).unwrap();
    let id = params.root().param("w", [64, 8], isoshard::rng::Init::Ones).unwrap();
    let (mut adam, mut live) = (AdamW::new().betas(0.9, 0.99).decay(0.1), Vec::new());
    for _ in 0..3 {
        let mut grads = params.value(id).sum_all().unwrap().backward().unwrap();
        let norm = global_norm([grads.get(params.value(id)).unwrap()]).unwrap();
        adam.step(&mut params, &mut grads, &clip_scale(&norm, 1.0).unwrap(), 0.1).unwrap();
        drop((grads, norm));
        live.push(meta::memory_stats().live_bytes);
    }
    assert_eq!(live, [3 * 1024; 3], "the parameter and two moments, 32 rows of 8 floats each");
}

/// Plans one rank of 16,384.
#[test]
fn a_rank_of_16384_trains_in_little_memory() {
    const MESH: &str = "dp=64,fsdp=32,tp=8";
    let config = GptConfig {
        vocabulary: 50_304,
        block: 1024,
        layers: 12,
        heads: 16,
        width: 1024,
        dropout: 0.1,
        bias: false,
    };
    for (sequence, rank, compute) in [(true, 0, DType::F32), (false, 9_999, DType::BF16)] {
        let job = Job { mesh: MESH, config, batch: 4096, sequence, compute, ..ODD };
        let began = Instant::now();
        let (report, peak) = peak_of(|| {
            let dry = DryRun::new(job.ranks(), rank).unwrap();
            job.train(&dry.rank().unwrap()).unwrap_or_else(|e| panic!("{e}"));
            dry.report()
        });
        println!("{:.3} s, {} KiB\n{report}", began.elapsed().as_secs_f64(), peak >> 10);
        assert!(peak < 100 << 20, "{} MiB", peak >> 20);
        assert_eq!(report.rows.iter().map(|r| r.group_len).max(), Some(16_384), "the generators' comparison");
        assert!(report.rows.iter().all(|r| r.group.len() < 120), "{report}");
    }
}
