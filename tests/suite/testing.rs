//! The public harness: what it must find, the smallest case that it shows, and what it must let pass.

use std::time::{Duration, Instant};

use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::ops::{
    AxisPlacement, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work,
};
use isoshard::optim::{AdamW, clip_scale, global_norm};
use isoshard::placement::Layout;
use isoshard::rng::{Generator, bits32};
use isoshard::tensor::{DType, Tensor};
use isoshard::testing::{
    Equivalence, Finding, RankFault, Scenario, Trial, equivalent, gradients, judge, wrong_gradients,
};
use isoshard::{Result, assert_comm};

/// Sums along dim 0 up to each row. Its row `S1 -> S1` is true; `S0 -> S0` forgets the rows of earlier ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct RunningSum {
    lies: bool,
}

impl Op for RunningSum {
    fn name(&self) -> &'static str {
        "running_sum"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        Ok(ins.iter().cloned().collect())
    }

    fn rows(&self, _: &[Meta], _: MeshAxis) -> Vec<Row> {
        let dims = if self.lies { 0..2 } else { 1..2 };
        dims.map(|dim| Row::same(AxisPlacement::S(dim), 1)).collect()
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let x = &ins[0];
        let (mut values, columns) = (x.to_f64_vec(), x.shape()[1]);
        for e in columns..values.len() {
            values[e] += values[e - columns];
        }
        Ok([isoshard::testing::values::tensor(x.dtype(), &values, x.shape())].into_iter().collect())
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        Err(isoshard::Error::unsupported(
            "running_sum",
            "has no CUDA kernel",
            ins[0].notation(),
            "use the CPU",
        ))
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        isoshard::ops::Neg.work(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.refuse("this test has no use for it")
    }
}

fn running_sum(trial: &Trial, lies: bool) -> Result<DTensor> {
    let (rows, columns) = (trial.size("rows", 0..=9), trial.size("columns", 1..=5));
    let x = trial.place("x", &isoshard::testing::values::ordinary(DType::F32, &[rows, columns].into(), 1))?;
    DTensor::apply_one(&RunningSum { lies }, &[&x])
}

#[test]
fn a_false_row_is_shown_with_its_layout_and_first_wrong_element() {
    let sample = |lies| Sample::new(RunningSum { lies }, [Input::ints([7, 3])]);
    judge(&sample(false)).assert();
    let verdict = judge(&sample(true));
    let wrong = &verdict.wrong[0];
    assert_eq!(format!("{:?}", wrong.rows), "[S0 -> S0]");
    assert_eq!(wrong.discrepancy.operands[0].to_string(), "f32[7, 3]@(a:S0)");
    let text = verdict.to_string();
    for part in ["the row S0 -> S0 is wrong", "result 0 f32[7, 3]@(a:S0): rank 1, element 12:", "│"] {
        assert!(text.contains(part), "{part:?} is missing in\n{text}");
    }
}

#[test]
fn a_program_with_a_false_row_shrinks_to_two_ranks() {
    equivalent(|trial| running_sum(trial, false));
    let failed = Equivalence::new(|trial| running_sum(trial, true)).runs(8).check().unwrap_err();
    let Finding::Differs { index, rank, .. } = &failed.finding else { panic!("{failed}") };
    let Scenario { sizes, layouts, .. } = &failed.scenario;
    // Two rows of one column: each rank stores one element.
    assert_eq!((failed.scenario.rank_len(), &index[..], *rank), (2, &[1, 0][..], 1), "{failed}");
    assert_eq!(sizes[..], [("rows".into(), 2), ("columns".into(), 1)], "{failed}");
    assert!(layouts[0].1.to_string().contains("S0"), "{failed}");
    let text = failed.to_string();
    let line = text.split('"').nth(1).expect("the scenario stands in quotes");
    let again = Equivalence::new(|trial| running_sum(trial, true)).replay(line).check().unwrap_err();
    assert_eq!(again.finding.to_string(), failed.finding.to_string());
}

/// A rank that sees its own number is no SPMD program: each kind of difference is found.
#[test]
fn differences_between_ranks_are_found() {
    let check = |program: fn(&Trial) -> Result<()>| {
        let failed = Equivalence::new(program).meshes(["dp=3"]).check().expect_err("ranks differ");
        failed.to_string()
    };
    let value = check(|trial| {
        trial.next_step();
        trial.record_value("loss", if trial.mesh().rank() == 1 { 0.1 } else { 0.2 })
    });
    assert!(value.contains("step 1, loss: element [] is 1e-1 (0x3fb999999999999a) on rank 1"), "{value}");
    let order = check(|trial| {
        let name = ["a", "b"][trial.mesh().rank() % 2];
        trial.record_value(name, 1.0)
    });
    assert!(order.contains("record 0 is step 0, b on rank 1, and step 0, a on a single rank"), "{order}");
    let shape = check(|trial| {
        let n = trial.mesh().rank_len();
        trial.record("x", &DTensor::zeros(trial, DType::F32, [n], Layout::replicated(1))?)
    });
    assert!(shape.contains("step 0, x: rank 0 has f32[2] instead of f32[1]"), "{shape}");
    let error = check(|trial| {
        assert!(trial.mesh().rank_len() < 2, "too many");
        Ok(())
    });
    assert!(
        error.contains("fails, which it does not on a single rank: rank ")
            && error.contains("panicked: too many"),
        "{error}"
    );
    let layout = Equivalence::new(|trial| {
        let x = trial.input("x", DType::F32, [trial.size("n", 1..=9), 2])?;
        let splits = x.layout().splitters(1).next().is_some();
        let refused = || isoshard::Error::invalid("program", "wants whole rows", x.spec().to_string(), "");
        if splits { Err(refused()) } else { Ok(x) }
    });
    let layout = layout.check().expect_err("some layout splits rows").scenario.to_string();
    assert!(layout.starts_with("a=2") && layout.contains("| n = 1 |") && layout.contains("S1"), "{layout}");
    let alone = check(|_| Err(isoshard::Error::invalid("program", "is wrong", "x", "")));
    assert!(alone.contains("the program fails on a single rank: rank 0: program: is wrong"), "{alone}");
    let nothing = check(|_| Ok(()));
    assert!(nothing.contains("the program returns and records nothing"), "{nothing}");
    // -0 and 0 differ by a bit; NaNs do not, whatever their bits are.
    let zero =
        check(|trial| trial.record_value("zero", 0.0 * if trial.mesh().rank_len() > 1 { -1.0 } else { 1.0 }));
    assert!(zero.contains("is -0e0 (0x8000000000000000)"), "{zero}");
    Equivalence::new(|trial| {
        trial.record_value("nan", f64::from_bits(0x7ff8_0000_0000_0000 | trial.mesh().rank() as u64))
    })
    .meshes(["dp=3"])
    .assert();
}

#[test]
fn bytes_are_limited() {
    let check = Equivalence::new(|trial| {
        let x = DTensor::full(trial, DType::F32, [6], "(S0)", 1.0)?;
        let before = assert_comm!(trial, bytes == 0, x.relu()?);
        // Three of six elements come from the other rank; the harness's own reduction of the sum does not count.
        let whole = assert_comm!(trial, bytes <= 12, before.redistribute("(R)")?);
        Ok([("whole", whole), ("sum", x.sum_all()?)])
    })
    .meshes(["dp=2"]);
    assert_eq!(check.clone().at_most(12).assert().received_bytes, [("dp=2".to_string(), 12)]);
    let text = check.at_most(11).check().unwrap_err().to_string();
    assert!(text.contains("receives 12 bytes; at most 11 are allowed"), "{text}");
    assert!(text.contains("all_gather"), "the table of calls: {text}");
}

#[test]
fn ranks_that_idle_are_found() {
    let rows = |n: usize| {
        let check = Equivalence::new(move |trial| {
            let n = trial.size("rows", n..=n + 2);
            DTensor::full(trial, DType::F32, [n, 2], "(S0, R)", 1.0)?.exp()
        });
        check.meshes(["dp=3,tp=2"]).runs(3).least_work(0.2).check()
    };
    assert_eq!(rows(12).expect("every rank has rows").runs, 3);
    let idle = rows(1).expect_err("one row is on one rank");
    assert!(matches!(idle.finding, Finding::Idles { flops: 0, busiest: 40, .. }), "{idle}");
    // A mesh of two ranks, with no other axis, suffices.
    assert_eq!(idle.scenario.to_string().split(" | ").next(), Some("dp=2,tp=1"), "{idle}");
}

#[test]
fn fast_mode_has_a_bound() {
    let sums = |trial: &Trial| {
        let x = trial.place("x", &isoshard::testing::values::ordinary(DType::F32, &[4096].into(), 3))?;
        x.redistribute(Layout::new([isoshard::placement::Placement::Shard(0)]))?.sum_all()
    };
    Equivalence::new(sums).meshes(["dp=3"]).fast(1e-4).assert();
}

fn nano_step(trial: &Trial) -> Result<()> {
    let mesh: &DeviceMesh = trial;
    let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 4, sequence: false })?;
    let layout = plan.batch_layout(mesh.mesh());
    let mut params = Params::new(mesh, plan, 11)?;
    let config =
        GptConfig { vocabulary: 67, block: 64, layers: 4, heads: 4, width: 64, dropout: 0.1, bias: true };
    let model = Gpt::new(&mut params, config)?;
    trial.record_params(&params)?;
    let mut words = [0; 8];
    bits32(Generator::new(11).child("data").next_draw(), 0, &mut words);
    let rows = |next: usize| {
        let token = move |row: u32, i: usize| ((row as usize % 67 + (i + next) * (i + next)) % 67) as i64;
        let all = words.iter().flat_map(|&row| (0..64).map(move |i| token(row, i)));
        DTensor::distribute(mesh, &Tensor::from_vec(all.collect(), [8, 64])?, layout.clone())
    };
    let mut dropout = Generator::new(11).child("dropout");
    let mut loss = model.loss(&Forward::train(&params, &mut dropout), &rows(0)?, &rows(1)?)?;
    trial.record("loss", &loss)?;
    let mut grads = loss.backward()?;
    let norm = global_norm(params.ids().filter_map(|id| grads.get(params.value(id))))?;
    AdamW::new().betas(0.9, 0.99).decay(0.1).step(&mut params, &mut grads, &clip_scale(&norm, 1.0)?, 1e-2)?;
    trial.next_step();
    trial.record_params(&params)
}

/// A whole training step: loss and parameters. Prints the time.
#[test]
fn a_step_of_a_nano_gpt_on_five_meshes() {
    let began = Instant::now();
    let meshes = ["fsdp=2", "fsdp=3", "dp=2,tp=2", "fsdp=2,tp=2", "fsdp=4"];
    let report = Equivalence::new(nano_step).meshes(meshes).assert();
    // A program that draws nothing runs once per mesh.
    assert_eq!((report.runs, report.received_bytes.len()), (5, 5));
    println!("a nano GPT's step on five meshes: {:.1} s, {report:?}", began.elapsed().as_secs_f64());
}

#[test]
fn a_rank_that_fails_is_named_by_all() {
    let runs = Equivalence::new(nano_step)
        .meshes(["fsdp=2", "fsdp=2,tp=2"])
        .deadline(Duration::from_secs(2))
        .with_fault(1, None);
    assert_eq!(runs.len(), 6);
    let faults: Vec<RankFault> = runs.iter().take(3).map(|run| run.fault).collect();
    assert_eq!(faults, [RankFault::Dies, RankFault::Stalls, RankFault::Differs]);
    for run in &runs {
        assert!(run.calls >= 10 && run.ends.len() >= 2, "{run:?}");
    }
}

#[test]
#[should_panic(expected = "rank 1 makes 0 collectives")]
fn a_fault_needs_a_collective() {
    Equivalence::new(|_| Ok(())).meshes(["dp=2"]).with_fault(1, None);
}

#[test]
fn wrong_derivatives_are_found() {
    let x = Tensor::from_vec(vec![0.5f64, -1.25, 2.0, 0.25], [2, 2]).expect("four values");
    gradients(&[x.clone(), x.clone()], |x| x[0].matmul(&x[1])?.tanh());
    // A detached factor is a constant to the gradient and not to the function.
    let wrong = wrong_gradients(&[x], |x| x[0].mul(&x[0].detach())).expect("it runs");
    assert_eq!(wrong.len(), 1, "{wrong:?}");
    assert!(wrong[0].contains("the derivative by input 0 along element 0"), "{wrong:?}");
    let refused = wrong_gradients(&[Tensor::zeros(DType::F32, [2])], |x| x[0].exp()).unwrap_err();
    assert!(refused.to_string().contains("inputs are f64"), "{refused}");
}

#[test]
fn scenarios_are_read_as_they_are_written() {
    for text in [
        "1 | seed 0",
        "dp=2,tp=3 | seed 18446744073709551615 | n = 5 | x = (S0^1, S0^0) | gradient of y = (R, P(sum))",
        "a=3 | seed 1 | w = (RS(0..1; 3,0,2))",
    ] {
        assert_eq!(text.parse::<Scenario>().expect(text).to_string(), text);
    }
    for text in ["", "dp=2", "dp=2 | seed x", "dp=2 | seed 1 | n", "dp=0 | seed 1", "dp=2 | seed 1 | x = (S)"]
    {
        assert!(text.parse::<Scenario>().is_err(), "{text}");
    }
}

/// Squares, with a row that says that the square of a sum is the sum of the squares.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct FalseSquare;

impl Op for FalseSquare {
    fn name(&self) -> &'static str {
        "false_square"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        Ok(ins.iter().cloned().collect())
    }

    fn rows(&self, _: &[Meta], _: MeshAxis) -> Vec<Row> {
        vec![Row::same(AxisPlacement::SUM, 1).exact()]
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let x = &ins[0];
        let squares: Vec<f64> = x.to_f64_vec().into_iter().map(|v| v * v).collect();
        Ok([isoshard::testing::values::tensor(x.dtype(), &squares, x.shape())].into_iter().collect())
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        isoshard::ops::no_cuda_kernel(self, ins)
    }

    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        isoshard::ops::Neg.work(ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.refuse("this test has no use for it")
    }
}

/// The shares of a partial sum are such that a row which is false for sums shows.
#[test]
fn false_rows_of_partial_sums_are_found() {
    let program = |trial: &Trial| {
        let x = trial.place("x", &isoshard::testing::values::ordinary(DType::F32, &[4, 3].into(), 1))?;
        DTensor::apply_one(&FalseSquare, &[&x])
    };
    let check = Equivalence::new(program).meshes(["a=3"]);
    let failed = check.replay("a=3 | seed 1 | x = (P(sum))").check().expect_err("(2x)² + (-x)² is not x²");
    assert!(matches!(failed.finding, Finding::Differs { .. }), "{failed}");
}

#[test]
fn large_integers_are_compared_whole() {
    let large = |last: i64| Tensor::from_vec(vec![1i64 << 60, last], [2]).expect("two values");
    let found = isoshard::testing::values::bits_differ(&large((1 << 60) + 1), &large(1 << 60));
    assert_eq!(found.as_deref(), Some("element 1: 1152921504606846977 instead of 1152921504606846976"));
    Equivalence::new(move |trial| {
        let x = trial.place("x", &large((1 << 60) + 1))?;
        Ok([("x", x)])
    })
    .assert();
}

#[test]
fn a_seed_is_a_draw() {
    let check = Equivalence::new(|trial| trial.record_value("seed", trial.seed() as f64)).meshes(["dp=2"]);
    assert_eq!(check.runs(5).assert().runs, 5);
}

#[test]
#[should_panic(expected = "has two ranks")]
fn a_mesh_of_one_rank_compares_nothing() {
    Equivalence::new(|trial| trial.record_value("x", 1.0)).meshes(["1", "dp=1"]).assert();
}

/// A gradient penalty differentiates inside.
#[test]
fn functions_that_differentiate_have_derivatives() {
    let x = Tensor::from_vec(vec![0.5f64, -1.25, 2.0], [3]).expect("three values");
    gradients(&[x], |x| x[0].tanh()?.sum_all()?.grad(&[&x[0]])?.remove(0).square());
}

/// Sizes at the ends of their range, numbers of runs and times are values or errors: nothing overflows or waits.
#[test]
fn absurd_sizes_of_the_harness_are_refused() {
    let whole = |trial: &Trial| {
        let n = trial.size("n", 0..=usize::MAX);
        assert!(trial.size("one", usize::MAX..=usize::MAX) == usize::MAX);
        let said = [
            trial.input("x", DType::F32, [n | 1 << 62]).unwrap_err().to_string(),
            trial.leaf("y", DType::F64, [1 << 31]).unwrap_err().to_string(),
        ];
        assert!(
            said[0].starts_with("x: ")
                && said[1].contains("at most 1073741824 elements; got f64[2147483648]"),
            "{said:?}"
        );
        trial.record_value("loss", 1.0)
    };
    Equivalence::new(whole).meshes(["a=2"]).runs(2).seed(u64::MAX).assert();
    let fails = |trial: &Trial| trial.record_value("rank", trial.rank().rank() as f64);
    Equivalence::new(fails).meshes(["a=2"]).runs(usize::MAX).shrink_for(Duration::MAX).check().unwrap_err();
}

/// A model whose second block reads the ranks' shards where it should read the whole: the failure names the block's map.
#[test]
fn a_failure_names_the_module() {
    use isoshard::nn::{Linear, Module};
    let failed = Equivalence::new(|trial| {
        let mut params = Params::new(trial, Plan::default().batch("dp"), 7)?;
        let init = isoshard::rng::Init::Normal { mean: 0.0, std: 1.0 };
        let maps = [0, 1, 2].map(|i| Linear::new(params.root().child("h").child(i), 4, 4, init));
        let [first, second, third] = maps;
        let x = DTensor::distribute(trial, &Tensor::zeros(DType::F32, [6, 4]), params.batch_layout())?;
        let cx = Forward::train_without_dropout(&params);
        let y = first?.forward(&cx, &x.add_scalar(1.0)?)?;
        // The bug: the number of the rank's own rows.
        let rows = y.local().shape()[0] as f64;
        let y = second?.forward(&cx, &y.mul_scalar(rows)?)?;
        third?.forward(&cx, &y)?.mean_all()
    })
    .meshes(["dp=2"])
    .check()
    .unwrap_err();
    assert_eq!(failed.module.as_deref(), Some("h.1"));
    assert!(failed.to_string().contains("the first module whose result differs is h.1\n"), "{failed}");
    assert!(matches!(failed.finding, Finding::Differs { .. }));
}
