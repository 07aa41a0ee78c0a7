//! Parameters that a program reads several times: in one pass and in several before a backward pass, with other units in
//! between, in recomputed functions, and through casts of its own. In bf16 and f16, under every sharding, gradients and
//! updated parameters have the bits of a single rank that shards nothing.

use isoshard::Result;
use isoshard::comm::{Rank, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::fsdp::{Block, BlockPolicy, Sharding, fully_shard};
use isoshard::nn::{Forward, ParamId, Params, Plan, recompute};
use isoshard::optim::Sgd;
use isoshard::placement::{Layout, Mesh};
use isoshard::rng::Init;
use isoshard::tensor::DType;
use isoshard::testing::{Equivalence, Trial};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::common::failures::{Failures, is_complete};
use crate::common::ordinary;

/// A way to place parameters on a mesh.
#[derive(Clone, Debug)]
enum Placed {
    /// By a plan that shards nothing.
    Whole,
    /// By [`Plan::fsdp`].
    ByPlan(&'static str),
    Sharded(Sharding),
}

/// All ways, each with a mesh.
fn placements() -> Vec<(&'static str, Placed)> {
    use Placed::{ByPlan, Sharded, Whole};
    let over = |axes: &[&str]| Sharding::over(axes);
    vec![
        ("dp=1", Sharded(Sharding::ddp("dp"))),
        ("dp=1", Sharded(Sharding::zero1("dp"))),
        ("dp=1", Sharded(Sharding::zero2("dp"))),
        ("dp=1", Sharded(Sharding::zero3("dp"))),
        ("dp=1", ByPlan("dp")),
        ("dp=1,s=1", Sharded(Sharding::hsdp("dp", "s"))),
        ("dp=1,s=1", Sharded(Sharding::hfsdp("dp", "s"))),
        ("dp=2", Whole),
        ("dp=2", ByPlan("dp")),
        ("dp=3", ByPlan("dp")),
        ("dp=2", Sharded(Sharding::ddp("dp"))),
        ("dp=3", Sharded(Sharding::ddp("dp"))),
        ("dp=2", Sharded(Sharding::zero1("dp"))),
        ("dp=3", Sharded(Sharding::zero1("dp"))),
        ("dp=2", Sharded(Sharding::zero2("dp"))),
        ("dp=5", Sharded(Sharding::zero2("dp"))),
        ("dp=2", Sharded(Sharding::zero3("dp"))),
        ("dp=3", Sharded(Sharding::zero3("dp").stay_gathered("h.1"))),
        ("dp=2,s=2", Sharded(Sharding::hsdp("dp", "s"))),
        ("dp=2,s=3", Sharded(Sharding::hsdp("dp", "s"))),
        ("dp=2,s=2", Sharded(Sharding::hfsdp("dp", "s"))),
        ("dp=3,s=2", Sharded(Sharding::hfsdp("dp", "s"))),
        ("dp=2,s=2", Sharded(Sharding::hsdp("dp", "s").states(&["s", "dp"]))),
        ("dp=2,s=2", Sharded(over(&["dp", "s"]).states(&["s", "dp"]))),
    ]
}

/// The paths of the parameters, and true for matrices. `tied` is a unit of its own.
const PARAMS: [(&str, bool); 6] =
    [("emb", true), ("h.0.w", true), ("h.0.v", false), ("h.1.w", true), ("tied.w", true), ("h.2.v", false)];

/// One use of a parameter, or several.
#[derive(Clone, Copy, Debug)]
struct Step {
    param: usize,
    act: Act,
    is_recomputed: bool,
}

#[derive(Clone, Copy, Debug)]
enum Act {
    Once,
    /// One read, two uses.
    TwoUses,
    /// Two reads, and one of another parameter in between.
    TwoReads(usize),
    /// Two uses of one cast that the program writes, and one of the parameter beside it.
    OwnCast,
}

/// A program of two steps of training, each with several forward passes before one backward pass.
#[derive(Clone, Debug)]
struct Program {
    rows: usize,
    width: usize,
    compute: DType,
    forwards: Vec<Vec<Step>>,
    /// True if the backward pass frees the tape.
    frees: bool,
    salt: u64,
}

/// A result of a run, and its name.
type Seen = (String, Vec<f64>);

fn programs() -> impl Strategy<Value = Program> {
    let param = || 0..PARAMS.len();
    let act = prop_oneof![
        3 => Just(Act::Once),
        1 => Just(Act::TwoUses),
        1 => param().prop_map(Act::TwoReads),
        1 => Just(Act::OwnCast),
    ];
    let step = (param(), act, prop::bool::weighted(0.25));
    let step = step.prop_map(|(param, act, is_recomputed)| Step { param, act, is_recomputed });
    let compute = prop_oneof![4 => Just(DType::BF16), 2 => Just(DType::F16), 1 => Just(DType::F32)];
    let forwards = vec(vec(step, 1..6), 1..4);
    (5..8usize, 3..6usize, compute, forwards, any::<bool>(), 0..64u64).prop_map(
        |(rows, width, compute, forwards, frees, salt)| Program {
            rows,
            width,
            compute,
            forwards,
            frees,
            salt,
        },
    )
}

/// Returns `x` after a use of a parameter: a product with a matrix, or a scaled `x`.
fn used(x: &DTensor, w: &DTensor) -> Result<DTensor> {
    if w.shape().len() == 2 { x.matmul(w) } else { x.mul(w) }
}

impl Step {
    fn run(self, cx: &Forward, ids: &[ParamId], x: &DTensor) -> Result<DTensor> {
        let ids = ids.to_vec();
        let step = move |cx: &Forward, ins: &[DTensor]| self.result(cx, &ids, &ins[0]);
        if self.is_recomputed { recompute(cx, &[x], step) } else { step(cx, std::slice::from_ref(x)) }
    }

    fn result(self, cx: &Forward, ids: &[ParamId], x: &DTensor) -> Result<DTensor> {
        let w = cx.param(ids[self.param])?;
        let small = x.mul_scalar(0.0625)?;
        let y = match self.act {
            Act::Once => used(x, &w)?,
            Act::TwoUses => used(x, &w)?.add(&used(&small, &w)?)?,
            Act::TwoReads(other) => {
                let y = used(x, &w)?;
                drop(w);
                let between = used(&small, &cx.param(ids[other])?)?;
                y.add(&between)?.add(&used(&small, &cx.param(ids[self.param])?)?)?
            }
            Act::OwnCast => {
                let (wide, of) = (w.cast(DType::F32)?, x.cast(DType::F32)?);
                let y = used(&of, &wide)?.add(&used(&of.mul_scalar(0.01)?, &wide)?)?;
                y.cast(x.dtype())?.add(&used(&small, &w)?)?
            }
        };
        y.tanh()?.add(x)
    }
}

impl Program {
    /// Returns the losses, gradients and parameters of two steps of training.
    fn train(&self, rank: &Rank, mesh: &str, placed: &Placed) -> Result<Vec<Seen>> {
        let mesh = &DeviceMesh::parse(rank, mesh)?;
        let (params, ids) = &mut self.declare(mesh, placed)?;
        let mut optimizer = Sgd::new().rate(0.125);
        let batch = params.batch_layout();
        let of_batch = |salt: u64| {
            let whole = ordinary(self.compute, &[self.rows, self.width].into(), salt);
            DTensor::distribute(mesh, &whole, batch.clone())
        };
        let mut seen = Vec::new();
        for round in 0..2u64 {
            let mut loss: Option<DTensor> = None;
            for (nth, steps) in (0..).zip(&self.forwards) {
                let cx = Forward::train_without_dropout(params);
                let mut x = of_batch(self.salt + nth + 16 * round)?.tanh()?;
                for step in steps {
                    x = step.run(&cx, ids, &x)?;
                }
                let one = x.mul(&of_batch(self.salt + 100 + nth)?.sin()?)?.sum_all()?.cast(DType::F32)?;
                loss = Some(match loss {
                    None => one,
                    // Sums of terms of different sizes round.
                    Some(loss) => loss.mul_scalar(0.25)?.add(&one)?,
                });
            }
            let mut loss = loss.expect("there is a pass");
            seen.push((format!("loss {round}"), loss.full_tensor()?.to_f64_vec()));
            let mut gradients = if self.frees { loss.backward()? } else { loss.backward_keeping()? };
            drop(loss);
            for &id in ids.iter() {
                if let Some(gradient) = gradients.get(params.value(id)) {
                    assert_eq!(gradient.dtype(), DType::F32);
                    let name = format!("gradient {round} of {}", params.path(id));
                    seen.push((name, gradient.full_tensor()?.to_f64_vec()));
                }
            }
            optimizer.step(params, &mut gradients)?;
            seen.push((format!("digest {round}"), vec![params.digest()? as f64]));
        }
        Ok(seen)
    }

    fn declare(&self, mesh: &DeviceMesh, placed: &Placed) -> Result<(Params, Vec<ParamId>)> {
        let plan = match placed {
            Placed::ByPlan(axis) => Plan::default().fsdp(axis).batch(axis),
            Placed::Whole if mesh.mesh().rank_len() > 1 => Plan::default().batch("dp"),
            Placed::Whole | Placed::Sharded(_) => Plan::default(),
        };
        let mut params = Params::new(mesh, plan, self.salt)?;
        params.compute_in(self.compute)?;
        let init = Init::Normal { mean: 0.0, std: 0.5 };
        let n = self.width;
        let declare = |(path, is_matrix): (&str, bool)| match is_matrix {
            true => params.root().param(path, [n, n], init),
            false => params.root().param(path, [n], init),
        };
        let ids = PARAMS.into_iter().map(declare).collect::<Result<Vec<_>>>()?;
        if let Placed::Sharded(sharding) = placed {
            fully_shard(&mut params, &["h.*", "tied"], sharding, &BlockPolicy::new(Block::Element))?;
        }
        Ok((params, ids))
    }

    /// Returns the first difference between a run and that of a single rank that shards nothing.
    fn difference(&self, mesh: &'static str, placed: &Placed) -> std::result::Result<(), String> {
        let run = |mesh: &'static str, placed: Placed| {
            let (program, ranks) = (self.clone(), Mesh::parse(mesh, 0).expect("a mesh").rank_len());
            spmd(ranks, move |rank| program.train(&rank, mesh, &placed)).map_err(|e| e.to_string())
        };
        let want = run("dp=1", Placed::Whole)?.swap_remove(0);
        for (rank, got) in run(mesh, placed.clone())?.into_iter().enumerate() {
            if got.len() != want.len() {
                return Err(format!("rank {rank} has {} results for {}", got.len(), want.len()));
            }
            let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let differs = |((name, got), (of, want)): &(&Seen, &Seen)| name != of || bits(got) != bits(want);
            if let Some(((name, got), (_, want))) = got.iter().zip(&want).find(differs) {
                return Err(format!("rank {rank}, {name}: {got:?} instead of {want:?}"));
            }
        }
        Ok(())
    }
}

#[test]
fn gradients_have_the_bits_of_a_single_rank_under_every_sharding() {
    let mut failures = Failures::default();
    for (mesh, placed) in placements() {
        let of = format!("{mesh} {placed:?}");
        let cases = if is_complete() { 60 } else { 4 };
        failures.check(&of, cases, &programs(), |program| program.difference(mesh, &placed));
    }
    failures.report();
}

/// `w · 256 + w · 1`: in bf16 the sum of the two gradients would be 256.
#[test]
fn contributions_are_added_in_the_parameters_dtype() {
    type Loss = fn(&Params, ParamId) -> Result<DTensor>;
    let losses: [(&str, Loss); 4] = [
        ("two passes", |params, id| {
            let of = |by| Forward::train_without_dropout(params).param(id)?.mul_scalar(by);
            of(256.0)?.add(&of(1.0)?)
        }),
        ("two reads", |params, id| {
            let cx = Forward::train_without_dropout(params);
            cx.param(id)?.mul_scalar(256.0)?.add(&cx.param(id)?.mul_scalar(1.0)?)
        }),
        ("two uses", |params, id| {
            let w = Forward::train_without_dropout(params).param(id)?;
            w.mul_scalar(256.0)?.add(&w.mul_scalar(1.0)?)
        }),
        ("in a recomputed function", |params, id| {
            let cx = Forward::train_without_dropout(params);
            let layout = Layout::replicated(params.mesh().mesh().ndim());
            let x = DTensor::ones(params.mesh(), DType::BF16, [1], layout)?;
            let f = move |cx: &Forward, ins: &[DTensor]| {
                let w = cx.param(id)?;
                w.mul_scalar(256.0)?.add(&w.mul_scalar(1.0)?)?.mul(&ins[0])
            };
            recompute(&cx, &[&x], f)
        }),
    ];
    for (mesh, placed) in placements() {
        for (name, loss) in losses {
            let of = placed.clone();
            let gradient = move |rank: Rank| {
                let mesh = DeviceMesh::parse(&rank, mesh)?;
                let plan = match of {
                    Placed::ByPlan(axis) => Plan::default().fsdp(axis),
                    Placed::Whole | Placed::Sharded(_) => Plan::default(),
                };
                let mut params = Params::new(&mesh, plan, 1)?;
                params.compute_in(DType::BF16)?;
                let id = params.root().param("h.1.w", [1], Init::Ones)?;
                if let Placed::Sharded(sharding) = &of {
                    fully_shard(&mut params, &["h.*"], sharding, &BlockPolicy::default())?;
                }
                let gradients = loss(&params, id)?.sum_all()?.backward()?;
                gradients.get(params.value(id)).expect("it is used").item()
            };
            let found = spmd(Mesh::parse(mesh, 0).unwrap().rank_len(), gradient);
            let found = found.unwrap_or_else(|e| panic!("{mesh} {placed:?}, {name}: {e}"));
            assert!(found.iter().all(|&x| x == 257.0), "{mesh} {placed:?}, {name}: {found:?}");
        }
    }
}

/// Gradients of chosen tensors are added alike, and are recorded: the second derivative of `w²` is 2.
#[test]
fn recorded_gradients_are_those_of_the_parameter() {
    let run = |rank: Rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        let mut params = Params::new(&mesh, Plan::default(), 1)?;
        params.compute_in(DType::BF16)?;
        let id = params.root().param("h.0.w", [3], Init::Ones)?;
        fully_shard(&mut params, &["h.*"], &Sharding::zero3("dp"), &BlockPolicy::default())?;
        let w = Forward::train_without_dropout(&params).param(id)?;
        let twice = w.mul_scalar(256.0)?.add(&w)?.sum_all()?;
        let [stored, used] = [params.value(id), &w].map(|of| twice.grad(&[of]).map(|mut all| all.remove(0)));
        let (stored, used) = (stored?, used?);
        assert_eq!((stored.dtype(), used.dtype()), (DType::F32, DType::BF16));
        assert_eq!([&stored, &used].map(DTensor::layout), [params.value(id).layout(), w.layout()]);
        // The sum is 257, which bf16 rounds.
        assert_eq!(stored.full_tensor()?.to_f64_vec(), [257.0; 3]);
        assert_eq!(used.full_tensor()?.to_f64_vec(), [256.0; 3]);
        let first = w.mul(&w)?.sum_all()?.grad(&[params.value(id)])?.remove(0);
        let second = first.sum_all()?.grad(&[params.value(id)])?.remove(0);
        assert_eq!(first.full_tensor()?.to_f64_vec(), [2.0; 3]);
        Ok(second.full_tensor()?.to_f64_vec())
    };
    assert_eq!(spmd(2, run).unwrap(), [[2.0; 3], [2.0; 3]]);
}

/// A cast that the program writes has one gradient, in its own dtype: `256 + 1` is 256 there.
#[test]
fn a_cast_of_the_program_keeps_its_meaning() {
    let run = |rank: Rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        let w = DTensor::ones(&mesh, DType::F32, [1], "(R)")?.requires_grad()?;
        let narrow = w.cast(DType::BF16)?;
        let gradients = narrow.mul_scalar(256.0)?.add(&narrow)?.sum_all()?.backward()?;
        gradients.get(&w).expect("a leaf").item()
    };
    assert_eq!(spmd(2, run).unwrap(), [256.0, 256.0]);
}

/// The public harness draws sizes, layouts and the sharding; its single rank shards nothing.
#[test]
fn the_harness_judges_programs_under_every_sharding() {
    let program = |trial: &Trial, compute: DType| {
        let (rows, width) = (trial.size("rows", 1..=7), trial.size("width", 1..=5));
        let sharding = match trial.size("sharding", 0..=6) {
            0 => None,
            1 => Some(Sharding::over(&["dp", "s"])),
            2 => Some(Sharding::zero1("dp")),
            3 => Some(Sharding::zero2("s")),
            4 => Some(Sharding::zero3("dp")),
            5 => Some(Sharding::hsdp("dp", "s")),
            _ => Some(Sharding::hfsdp("dp", "s")),
        };
        let mut params = Params::new(trial, Plan::default(), trial.seed())?;
        params.compute_in(compute)?;
        let normal = Init::Normal { mean: 0.0, std: 0.5 };
        let mut declare = |path: &str| params.root().param(path, [width, width], normal);
        let ids = [declare("h.0.w")?, declare("h.1.w")?, declare("tied.w")?];
        if let Some(sharding) = sharding.filter(|_| trial.mesh().rank_len() > 1) {
            fully_shard(&mut params, &["h.*", "tied"], &sharding, &BlockPolicy::default())?;
        }
        let mut loss: Option<DTensor> = None;
        for pass in ["first", "second"] {
            let cx = Forward::train_without_dropout(&params);
            let mut x = trial.input(pass, compute, [rows, width])?;
            for id in [ids[2], ids[0], ids[2], ids[1], ids[0], ids[2]] {
                x = x.tanh()?.matmul(&cx.param(id)?)?;
            }
            let one = x.sum_all()?;
            loss = Some(loss.map_or_else(|| Ok(one.clone()), |loss| loss.add(&one))?);
        }
        let gradients = loss.expect("two passes").backward()?;
        ids.iter().try_for_each(|&id| {
            let gradient = gradients.get(params.value(id)).expect("it is used");
            trial.record(params.path(id), gradient)
        })
    };
    for compute in [DType::BF16, DType::F16] {
        let check = Equivalence::new(move |trial: &Trial| program(trial, compute));
        check.meshes(["dp=2,s=1", "dp=1,s=3", "dp=2,s=2", "dp=3,s=2"]).runs(7).assert();
    }
}
