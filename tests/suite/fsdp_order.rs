//! The order in which FSDP starts its calls and waits for them, on threads and over MPI: it communicates for one unit while another
//! computes.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use isoshard::comm::{Call, CallResults, Channel, Engine, ModulePath, Rank, Reduce, Request};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::fsdp::{Block, BlockPolicy, Sharding, fully_shard};
use isoshard::nn::{Forward, Params, Plan};
use isoshard::rng::Init;
use isoshard::tensor::DType;
use isoshard::{Error, Result};

use crate::common::ranks::spmd;

const UNITS: usize = 5;

thread_local!(static LOG: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) });

fn note(event: String) {
    LOG.with(|log| log.borrow_mut().push(event));
}

/// An engine that notes the starts of calls and the waits for them.
#[derive(Debug)]
struct Noted<T: ?Sized> {
    inner: Arc<T>,
    /// True if large all-reduces are one call where the engine makes them so.
    reduces_well: bool,
}

struct NotedRequest {
    inner: Box<dyn Request>,
    call: String,
}

impl Engine for Noted<dyn Engine> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn world_len(&self) -> usize {
        self.inner.world_len()
    }
    fn deadline(&self) -> Duration {
        self.inner.deadline()
    }
    fn open(&self, ranks: &[usize], name: &str) -> Result<Arc<dyn Channel>> {
        Ok(Arc::new(Noted { inner: self.inner.open(ranks, name)?, reduces_well: self.reduces_well }))
    }
    fn end(&self) -> Result<()> {
        self.inner.end()
    }
    fn abort(&self, cause: &Error) {
        self.inner.abort(cause);
    }
}

impl Noted<dyn Channel> {
    fn noted(
        &self,
        name: &str,
        start: impl FnOnce() -> Result<Box<dyn Request>>,
    ) -> Result<Box<dyn Request>> {
        // A gather of parameters that one rank holds is a broadcast.
        let name = if name == "broadcast" { "all_gather" } else { name };
        let call = format!("{name} {}", ModulePath::current());
        note(format!("start {call}"));
        Ok(Box::new(NotedRequest { inner: start()?, call }))
    }
}

impl Channel for Noted<dyn Channel> {
    fn start(&self, call: Call<'_>) -> Result<Box<dyn Request>> {
        self.noted(call.name, || self.inner.start(call))
    }
    fn all_reduce(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        self.noted(call.name, || self.inner.all_reduce(reduce, call))
    }
    fn reduce_scatter(&self, reduce: Reduce, call: Call<'_>) -> Result<Box<dyn Request>> {
        self.noted(call.name, || self.inner.reduce_scatter(reduce, call))
    }
    fn reduces_well(&self) -> bool {
        self.reduces_well && self.inner.reduces_well()
    }
}

impl Request for NotedRequest {
    fn wait(self: Box<Self>) -> Result<CallResults> {
        note(format!("wait {}", self.call));
        self.inner.wait()
    }
    fn is_ready(&self) -> bool {
        self.inner.is_ready()
    }
}

/// Runs a pass through units of two matrices each, and returns what happened in the forward and the backward pass.
fn pass(rank: &Rank, mesh: &str, sharding: &Sharding) -> Result<[Vec<String>; 2]> {
    Ok(pass_over(Noted { inner: rank.engine().clone(), reduces_well: true }, mesh, sharding, 16)?.0)
}

/// The events of a forward and a backward pass, and the gradients.
type PassEvents = ([Vec<String>; 2], Vec<Vec<f32>>);

/// Runs such a pass over an engine, with matrices of this width, and returns the gradients too.
fn pass_over(engine: Noted<dyn Engine>, mesh: &str, sharding: &Sharding, width: usize) -> Result<PassEvents> {
    let rank = Rank::new(Arc::new(engine))?;
    let mesh = DeviceMesh::parse(&rank, mesh)?;
    let mut params = Params::new(&mesh, Plan::default(), 7)?;
    let init = Init::Normal { mean: 0.0, std: 0.1 };
    let mut ids = Vec::new();
    for i in 0..UNITS {
        for name in ["a", "b"] {
            ids.push(params.root().child("h").child(i).param(name, [width, width], init)?);
        }
    }
    fully_shard(&mut params, &["h.*"], sharding, &BlockPolicy::new(Block::Rows(8)))?;
    let mut x = DTensor::full(&mesh, DType::F32, [1024, width], params.batch_layout(), 1.0)?;
    let take = || LOG.with(|log| std::mem::take(&mut *log.borrow_mut()));
    take();
    let cx = Forward::train_without_dropout(&params);
    for (i, pair) in ids.chunks(2).enumerate() {
        for &id in pair {
            x = x.matmul(&cx.param(id)?)?;
        }
        note(format!("computed h.{i}"));
    }
    drop(cx);
    let mut loss = x.sum_all()?;
    let forward = take();
    let gradients = loss.backward()?;
    let backward = take();
    let whole = |value| gradients.get(value).expect("used").full_tensor()?.to_vec::<f32>();
    Ok(([forward, backward], params.values().map(whole).collect::<Result<_>>()?))
}

/// Returns the position of an event that happens once.
fn position(events: &[String], event: &str) -> usize {
    let at: Vec<usize> = (0..events.len()).filter(|&i| events[i] == event).collect();
    assert_eq!(at.len(), 1, "{event} in {events:#?}");
    at[0]
}

fn assert_order(events: &[String], order: &[String]) {
    let at: Vec<usize> = order.iter().map(|event| position(events, event)).collect();
    assert!(at.is_sorted(), "{order:?} at {at:?} in {events:#?}");
}

#[test]
fn a_unit_is_gathered_while_the_one_before_it_computes() {
    let all =
        spmd(2, |rank| pass(&rank, "fsdp=2", &Sharding::zero3("fsdp"))).unwrap_or_else(|e| panic!("{e}"));
    for [forward, _] in all {
        for i in 0..UNITS - 1 {
            let (gather, computed) = (format!("all_gather h.{}", i + 1), format!("computed h.{i}"));
            assert_order(&forward, &[format!("start {gather}"), computed, format!("wait {gather}")]);
        }
    }
}

/// The gradients of a unit are reduced while those of the unit before it are computed, and so is the gather for the unit
/// before that.
#[test]
fn a_unit_is_reduced_while_the_one_before_it_computes() {
    let all =
        spmd(2, |rank| pass(&rank, "fsdp=2", &Sharding::zero3("fsdp"))).unwrap_or_else(|e| panic!("{e}"));
    for [_, backward] in all {
        // The last unit is still gathered.
        for i in 3..UNITS {
            let (reduce, gather) = (format!("reduce_scatter h.{i}"), format!("all_gather h.{}", i - 3));
            let next = format!("start reduce_scatter h.{}", i - 1);
            let order =
                [format!("start {reduce}"), format!("start {gather}"), format!("wait {reduce}"), next];
            assert_order(&backward, &order);
        }
        let order = [1, 0].map(|i| format!("start reduce_scatter h.{i}"));
        assert_order(&backward, &order);
    }
}

/// If two units are more than the limit of gathered bytes, a unit is gathered after the one before it has computed, in both
/// passes, by one call.
#[test]
fn units_beyond_a_limit_are_gathered_one_by_one() {
    let sharding = || Sharding::zero3("fsdp").gather_at_most(3 * 4 * 16 * 16);
    let all = spmd(2, move |rank| pass(&rank, "fsdp=2", &sharding())).unwrap_or_else(|e| panic!("{e}"));
    for [forward, backward] in all {
        for i in 0..UNITS - 1 {
            let gather = format!("all_gather h.{}", i + 1);
            let order = [format!("computed h.{i}"), format!("start {gather}"), format!("wait {gather}")];
            assert_order(&forward, &order);
        }
        for i in 0..UNITS - 1 {
            let gather = format!("all_gather h.{i}");
            let reduced = format!("start reduce_scatter h.{}", i + 1);
            assert_order(&backward, &[format!("start {gather}"), format!("wait {gather}"), reduced]);
        }
    }
}

/// With replicas, the shards' all-reduce starts before the next unit's gradients are complete.
#[test]
fn replicas_agree_while_the_unit_before_computes() {
    let sharding = || Sharding::hsdp("dp", "fsdp");
    let all = spmd(4, move |rank| pass(&rank, "dp=2,fsdp=2", &sharding())).unwrap_or_else(|e| panic!("{e}"));
    for [_, backward] in all {
        for i in 1..UNITS {
            let of = |what: &str| format!("{what} h.{i}");
            let next = format!("start reduce_scatter h.{}", i - 1);
            let order = [
                of("start reduce_scatter"),
                of("wait reduce_scatter"),
                of("start all_reduce"),
                of("wait all_reduce"),
                next,
            ];
            assert_order(&backward, &order);
        }
    }
}

/// Without shared memory a large all-reduce is two calls. The second starts while the next unit's gradients arrive.
#[test]
fn the_second_half_of_an_all_reduce_does_not_wait_for_the_next_unit() {
    let run = |reduces_well: bool, mesh: &'static str, sharding: fn() -> Sharding| {
        let run = move |rank: Rank| {
            let engine = Noted { inner: rank.engine().clone(), reduces_well };
            pass_over(engine, mesh, &sharding(), 128)
        };
        spmd(4, run).unwrap_or_else(|e| panic!("{e}"))
    };
    let hsdp: fn() -> Sharding = || Sharding::hsdp("dp", "fsdp");
    for (mesh, sharding) in [("dp=4", (|| Sharding::ddp("dp")) as fn() -> Sharding), ("dp=2,fsdp=2", hsdp)] {
        let in_one_call = run(true, mesh, sharding);
        for ((events, gradients), (_, wanted)) in run(false, mesh, sharding).into_iter().zip(in_one_call) {
            assert!(gradients == wanted, "{mesh}");
            let reduces = |call: &&String| call.starts_with("start all_reduce h.");
            assert_eq!(events[1].iter().filter(reduces).count(), 0, "{mesh}");
            if mesh == "dp=4" {
                for i in 1..UNITS {
                    let of = |what: &str| format!("{what} h.{i}");
                    let order = [
                        of("start reduce_scatter"),
                        of("wait reduce_scatter"),
                        of("start all_gather"),
                        of("wait all_gather"),
                        format!("start reduce_scatter h.{}", i - 1),
                    ];
                    assert_order(&events[1], &order);
                }
            }
        }
    }
}
