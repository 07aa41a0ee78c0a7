//! Random numbers on meshes: every distribution, order and initial value in every layout is, by bits, the single rank's;
//! ranks whose generators differ are named; what is saved on one mesh goes on upon another.

use std::fmt;

use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::nn::{Forward, Params, Plan};
use isoshard::placement::{Layout, Mesh, Region, Spec};
use isoshard::rng::{Distribution, Draw, Generator, GeneratorState, Init, Permutation, RandomElement};
use isoshard::tensor::{DType, Device, Shape, Tensor};
use isoshard::{Error, Result};
use proptest::prelude::*;

use crate::common::failures::Failures;
use crate::common::{on_mesh, small_ints, spmd, spread};
use isoshard::testing::strategies::{layouts, meshes, shapes};

/// A fill of a tensor.
#[derive(Clone, Copy, Debug)]
enum Values {
    RandomElement(Distribution),
    Init(Init),
}

const VALUES: [Values; 22] = [
    Values::RandomElement(Distribution::UNIT),
    Values::RandomElement(Distribution::Uniform { low: -3.0, high: 0.7 }),
    Values::RandomElement(Distribution::STANDARD),
    Values::RandomElement(Distribution::Normal { mean: 1.0, std: 1e-3 }),
    Values::RandomElement(Distribution::TruncatedNormal { mean: 0.0, std: 1.0, low: -1.0, high: 0.5 }),
    Values::RandomElement(Distribution::LogNormal { mean: -0.5, std: 0.7 }),
    Values::RandomElement(Distribution::Exponential { rate: 1.5 }),
    Values::RandomElement(Distribution::Gamma { shape: 0.4, scale: 2.0 }),
    Values::RandomElement(Distribution::Gamma { shape: 3.0, scale: 0.5 }),
    Values::RandomElement(Distribution::Poisson { rate: 2.5 }),
    Values::RandomElement(Distribution::Poisson { rate: 40.0 }),
    Values::RandomElement(Distribution::UniformInt { low: 7, high: 213 }),
    // Half of the words are rejected, and a quarter of the pairs.
    Values::RandomElement(Distribution::UniformInt { low: -1 << 30, high: (1 << 30) + 1 }),
    Values::RandomElement(Distribution::UniformInt { low: -3, high: 3 << 61 }),
    Values::RandomElement(Distribution::Bernoulli { p: 0.3 }),
    Values::RandomElement(Distribution::Bits),
    Values::Init(Init::Constant(0.1)),
    Values::Init(Init::XavierUniform { gain: 1.0 }),
    Values::Init(Init::XavierNormal { gain: 1.0 }),
    Values::Init(Init::KaimingUniform { gain: 1.0 }),
    Values::Init(Init::KaimingNormal { gain: 1.0 }),
    Values::Init(Init::Orthogonal { gain: 1.5 }),
];

/// One tensor to be drawn.
#[derive(Clone)]
struct Case {
    values: Values,
    spec: Spec,
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} as {}", self.values, self.spec)
    }
}

#[test]
fn every_layout_gives_the_single_ranks_values() {
    let mut failures = Failures::default();
    for values in VALUES {
        for dtype in DType::ALL {
            let given = (meshes(), shapes())
                .prop_filter("it has such values", move |(_, shape)| has(values, dtype, shape))
                .prop_flat_map(move |(mesh, shape)| layouts(&mesh, dtype, &shape, false));
            if has(values, dtype, &[3, 2].into()) {
                let given = given.prop_map(move |spec| Case { values, spec });
                failures.check(&format!("{values:?} of {dtype}"), 24, &given, drawn_alike);
            }
        }
    }
    failures.report();
}

fn has(values: Values, dtype: DType, shape: &Shape) -> bool {
    match values {
        Values::RandomElement(distribution) => distribution.check(dtype).is_ok(),
        Values::Init(init) => dtype.is_float() && init.resolve(shape).is_ok(),
    }
}

/// Constructors, their likes and the in-place forms, from a generator that has counted already.
fn drawn_alike(case: Case) -> std::result::Result<(), String> {
    let mesh = case.spec.mesh.clone();
    on_mesh(&mesh, move |mesh| {
        let Case { values, spec } = &case;
        let (dtype, shape, layout) = (spec.dtype, spec.shape.clone(), spec.layout.clone());
        let mine = Spec::new(mesh.mesh(), dtype, shape.clone(), layout.clone())?.region();
        let mut generator = Generator::new(7).child("values");
        generator.next_draw();
        let mut found = Vec::new();
        let mut compare = |what: &str, x: &DTensor, number: u64| -> Result<()> {
            let draw = Draw { seed: Generator::new(7).child("values").seed(), number };
            let want = cut(&whole(*values, dtype, &shape, draw)?, &mine)?;
            if *x.layout() != layout || x.local().to_device(Device::Cpu)?.contiguous()?.as_bytes()? != want {
                found.push(format!("{what}: {:?}, {}", x.local(), x.layout()));
            }
            Ok(())
        };
        match *values {
            Values::RandomElement(from) => {
                let mut x =
                    DTensor::random(mesh, dtype, shape.clone(), layout.clone(), from, &mut generator)?;
                compare("made", &x, 1)?;
                compare("alike", &x.random_like(from, &mut generator)?, 2)?;
                let before = x.clone();
                x.fill_random(from, &mut generator)?;
                compare("in a copy", &x, 3)?;
                compare("left alone", &before, 1)?;
                drop(before);
                x.fill_random(from, &mut generator)?;
                compare("in place", &x, 4)?;
            }
            Values::Init(init) => {
                let mut x = DTensor::init(mesh, dtype, shape.clone(), layout.clone(), init, &mut generator)?;
                compare("made", &x, 1)?;
                x.fill_init(init, &mut generator)?;
                compare("in place", &x, 2)?;
            }
        }
        Ok(found)
    })
}

/// Rows cut into stretches shorter and longer than what fills compute at once, and more of them than go together.
#[test]
fn many_stretches_are_the_single_ranks_values() {
    let mut failures = Vec::new();
    for (axes, text) in [
        ("a=2", "600, 5]@(a:S1)"),
        ("a=2, b=2", "3, 70, 9]@(a:S2, b:S2)"),
        ("a=2, b=2", "3, 70, 9]@(a:S2^1, b:S2^0)"),
        ("a=3", "40, 97]@(a:S1)"),
        ("a=2", "7, 301]@(a:S1)"),
        ("a=3, b=2", "9, 53]@(a:RS(0..1; 1, 0, 8), b:S1)"),
    ] {
        let mesh = Mesh::parse(axes, 0).unwrap();
        for values in VALUES {
            for dtype in DType::ALL {
                let spec = Spec::parse(&format!("{dtype}[{text}"), &mesh).unwrap();
                if has(values, dtype, &spec.shape) {
                    let case = Case { values, spec };
                    failures.extend(drawn_alike(case.clone()).err().map(|e| format!("{case:?}: {e}")));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} differ:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn partial_layouts_are_refused_by_name() {
    let mesh = Mesh::parse("a=2", 0).unwrap();
    let refused = on_mesh(&mesh, |mesh| {
        let mut found = Vec::new();
        let mut generator = Generator::new(7);
        for values in VALUES {
            for dtype in
                DType::ALL.into_iter().filter(|&d| d != DType::Bool && has(values, d, &[3, 2].into()))
            {
                let partial: Layout = "(P(sum))".parse()?;
                let (name, drawn) = match values {
                    Values::RandomElement(from) => {
                        ("random", DTensor::random(mesh, dtype, [3, 2], partial, from, &mut generator))
                    }
                    Values::Init(init) => {
                        ("init", DTensor::init(mesh, dtype, [3, 2], partial, init, &mut generator))
                    }
                };
                let want = format!(
                    "{name}: a Partial layout has no values of its own; got {dtype}[3, 2]@(a:P(sum)); redistribute first"
                );
                let said = drawn.map_or_else(|e| e.to_string(), |x| x.spec().to_string());
                found.extend((said != want).then_some(said));
            }
        }
        assert_eq!(generator.draws(), 0);
        Ok(found)
    });
    refused.unwrap_or_else(|e| panic!("{e}"));
}

/// Returns the values of a single rank, by the fills alone.
fn whole(values: Values, dtype: DType, shape: &Shape, draw: Draw) -> Result<Tensor> {
    fn drawn<T: RandomElement>(from: Distribution, shape: &Shape, draw: Draw) -> Result<Tensor> {
        let mut out = vec![T::default(); shape.numel()];
        from.fill(draw, 0, &mut out)?;
        Tensor::from_vec(out, shape.clone())
    }
    fn initial<T: isoshard::rng::RandomFloat>(init: Init, shape: &Shape, draw: Draw) -> Result<Tensor> {
        let mut out = vec![T::default(); shape.numel()];
        init.fill(draw, shape, 0, &mut out)?;
        Tensor::from_vec(out, shape.clone())
    }
    match (values, dtype) {
        (Values::RandomElement(from), DType::F32) => drawn::<f32>(from, shape, draw),
        (Values::RandomElement(from), DType::F64) => drawn::<f64>(from, shape, draw),
        (Values::RandomElement(from), DType::F16) => drawn::<half::f16>(from, shape, draw),
        (Values::RandomElement(from), DType::BF16) => drawn::<half::bf16>(from, shape, draw),
        (Values::RandomElement(from), DType::I64) => drawn::<i64>(from, shape, draw),
        (Values::RandomElement(from), DType::I32) => drawn::<i32>(from, shape, draw),
        (Values::RandomElement(from), DType::U8) => drawn::<u8>(from, shape, draw),
        (Values::RandomElement(from), DType::Bool) => drawn::<bool>(from, shape, draw),
        (Values::Init(init), DType::F64) => initial::<f64>(init, shape, draw),
        (Values::Init(init), DType::F16) => initial::<half::f16>(init, shape, draw),
        (Values::Init(init), DType::BF16) => initial::<half::bf16>(init, shape, draw),
        (Values::Init(init), _) => initial::<f32>(init, shape, draw),
    }
}

/// The bytes of the elements that a region holds.
fn cut(whole: &Tensor, region: &Region) -> Result<Vec<u8>> {
    let (size, bytes) = (whole.dtype().size_bytes(), whole.as_bytes()?);
    let mut out = vec![0; region.numel() * size];
    region.runs(whole.shape(), |global, at, len| {
        out[at * size..][..len * size].copy_from_slice(&bytes[global as usize * size..][..len * size]);
    });
    Ok(out)
}

#[test]
fn orders_are_one_order_in_every_layout() {
    let given =
        (meshes(), 0..24usize).prop_flat_map(|(mesh, len)| layouts(&mesh, DType::I64, &[len].into(), false));
    let mut failures = Failures::default();
    failures.check("randperm", 128, &given, |spec| {
        on_mesh(&spec.mesh.clone(), move |mesh| {
            let len = spec.shape[0];
            let x = DTensor::randperm(mesh, len, spec.layout.clone(), &mut Generator::new(9))?;
            let order = Permutation::new(Draw { seed: 9, number: 0 }, len as u64);
            let want: Vec<i64> =
                (0..len as u64).map(|i| order.at(i).map(|v| v as i64)).collect::<Result<_>>()?;
            let got = x.full_tensor()?.to_vec::<i64>()?;
            Ok(if got == want { vec![] } else { vec![format!("{got:?} instead of {want:?}")] })
        })
    });
    failures.report();
}

#[test]
fn shuffles_are_one_shuffle_in_every_layout_and_so_are_their_gradients() {
    let given = (meshes(), shapes().prop_filter("it has dims", |s| !s.is_empty()))
        .prop_flat_map(|(mesh, shape)| (layouts(&mesh, DType::F32, &shape, false), 0..shape.len()));
    let mut failures = Failures::default();
    failures.check("shuffle", 256, &given, |(spec, dim)| {
        on_mesh(&spec.mesh.clone(), move |mesh| {
            let shape = &spec.shape;
            let order = Permutation::new(Draw { seed: 4, number: 0 }, shape[dim] as u64);
            let mut places = vec![0; shape[dim]];
            order.fill(0, &mut places)?;
            let index = |places: &[u64], t: &Tensor| -> Result<Vec<f64>> {
                let rows = t.to_f64_vec();
                let inner: usize = shape[dim + 1..].iter().product();
                let outer: usize = shape[..dim].iter().product();
                let n = places.len();
                let at = |o: usize, i: usize, k: usize| rows[(o * n + places[i] as usize) * inner + k];
                let indices = (0..outer).flat_map(|o| (0..n).map(move |i| (o, i)));
                Ok(indices
                    .flat_map(|(o, i)| (0..inner).map(move |k| (o, i, k)))
                    .map(|(o, i, k)| at(o, i, k))
                    .collect())
            };
            let (whole, weights) = (small_ints(DType::F32, shape, 1), small_ints(DType::F32, shape, 2));
            let x = spread(mesh, &whole, &spec, 1)?.requires_grad()?;
            let y = x.shuffle(dim as isize, &mut Generator::new(4))?;
            let mut found = Vec::new();
            if y.layout() != x.layout() || y.full_tensor()?.to_f64_vec() != index(&places, &whole)? {
                found.push(format!("{y:?}"));
            }
            // The gradient of sum(w · shuffle(x)) is w with the order undone.
            let gradients = y.mul(&spread(mesh, &weights, &spec, 2)?)?.sum_all()?.backward()?;
            let mut back = vec![0; places.len()];
            places.iter().enumerate().for_each(|(i, &place)| back[place as usize] = i as u64);
            let got = gradients.get(&x).expect("a leaf").full_tensor()?.to_f64_vec();
            if got != index(&back, &weights)? {
                found.push(format!("gradient {got:?}"));
            }
            Ok(found)
        })
    });
    failures.report();
}

#[test]
fn samples_on_different_ranks_are_dropped_differently() {
    // Every row of a batch is the same sample: what differs between rows is the masks alone.
    let run = |ranks: usize, text: &'static str| {
        let all = spmd(ranks, move |rank| {
            let mesh = DeviceMesh::new(&rank, &[("dp", ranks)])?;
            let x = DTensor::full(&mesh, DType::F32, [4, 64], text.parse::<Layout>()?, 1.0)?;
            let mut generator = Generator::new(3).child("dropout");
            let masks = (x.dropout(0.5, &mut generator)?, x.dropout(0.5, &mut generator)?);
            Ok([masks.0.full_tensor()?.to_vec::<f32>()?, masks.1.full_tensor()?.to_vec::<f32>()?])
        });
        all.unwrap_or_else(|e| panic!("{e}")).swap_remove(0)
    };
    let single = run(1, "(R)");
    let rows: Vec<&[f32]> = single.iter().flat_map(|mask| mask.chunks(64)).collect();
    for (i, row) in rows.iter().enumerate() {
        // Any of the 28 pairs agrees in 13 or fewer, or 51 or more, of 64 places once in 10^4 fresh seeds.
        for other in &rows[..i] {
            let agree = row.iter().zip(*other).filter(|(a, b)| a == b).count();
            assert!((14..=50).contains(&agree), "{agree} of 64");
        }
    }
    for text in ["(S0)", "(S1)", "(R)"] {
        assert_eq!(run(4, text), single, "{text}");
        assert_eq!(run(3, text), single, "{text}");
    }
}

/// The error of rank 0, whose generator is `seed(rank)` after `draws(rank)` draws.
fn refusal(
    ranks: usize,
    state: fn(usize) -> (u64, u64),
    call: fn(&DeviceMesh, &mut Generator) -> Result<()>,
) -> String {
    let outcome = spmd(ranks, move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", ranks)])?;
        let (seed, draws) = state(rank.rank());
        let mut generator = Generator::from_state(GeneratorState { seed, draws });
        let refused = call(&mesh, &mut generator).expect_err("the generators differ");
        assert_eq!(generator.draws(), draws, "a refused draw does not count");
        // All ranks fail alike, and none is stuck: they can go on together.
        mesh.barrier()?;
        Ok(refused)
    });
    let mut said: Vec<Error> = outcome.unwrap_or_else(|e| panic!("{e}"));
    said.dedup();
    assert_eq!(said.len(), 1, "{said:?}");
    said[0].to_string()
}

fn rows(mesh: &DeviceMesh, _: &mut Generator) -> Result<DTensor> {
    DTensor::zeros(mesh, DType::F32, [5, 2], "(S0)")
}

#[test]
fn ranks_that_differ_are_named_at_the_first_draw() {
    let tail = "ranks must draw from equal generators; got seed 7 draw 3 on rank(s) 0, 1 and seed 8 draw 3 on \
                rank(s) 2; seed them alike";
    let seeds = |rank: usize| (7 + rank as u64 / 2, 3);
    assert_eq!(
        refusal(3, seeds, |mesh, g| rows(mesh, g)?.fill_random(Distribution::UNIT, g)),
        format!("fill_random: {tail}")
    );
    assert_eq!(
        refusal(3, seeds, |mesh, g| rows(mesh, g)?.randn_like(g).map(drop)),
        format!("randn_like: {tail}")
    );
    assert_eq!(
        refusal(3, seeds, |mesh, g| rows(mesh, g)?.dropout(0.5, g).map(drop)),
        format!("dropout: {tail}")
    );
    assert_eq!(
        refusal(3, seeds, |mesh, g| rows(mesh, g)?.shuffle(0, g).map(drop)),
        format!("shuffle: {tail}")
    );
    assert_eq!(
        refusal(3, seeds, |mesh, g| { DTensor::init(mesh, DType::F32, [4], "(R)", Init::Ones, g).map(drop) }),
        format!("init: {tail}")
    );
    assert_eq!(
        refusal(3, seeds, |mesh, g| {
            let x = rows(mesh, g)?;
            let params = Params::new(mesh, Plan::default(), 1)?;
            Forward::train(&params, g).dropout(x, 0.5).map(drop)
        }),
        format!("dropout: {tail}")
    );
    assert_eq!(
        refusal(2, |rank| (7, rank as u64), |mesh, g| rows(mesh, g)?.rand_like(g).map(drop)),
        "rand_like: ranks must draw from equal generators; got seed 7 draw 0 on rank(s) 0 and seed 7 draw 1 on rank(s) \
         1; seed them alike"
    );
}

#[test]
fn parameters_of_ranks_with_different_seeds_are_refused() {
    let said = spmd(2, |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        let mut params = Params::new(&mesh, Plan::default(), rank.rank() as u64)?;
        params.root().param("w", [3, 2], Init::KaimingNormal { gain: 1.0 }).map(drop)
    });
    let said = said.unwrap_err().to_string();
    assert!(said.contains("init: ranks must draw from equal generators; got seed "), "{said}");
    assert!(said.contains(" draw 0 on rank(s) 0 and seed "), "{said}");
}

#[test]
fn a_rank_that_does_not_draw_is_met_as_a_call_that_differs() {
    let said = spmd(2, |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        let mut generator = Generator::new(1);
        if rank.rank() == 0 {
            return mesh.barrier();
        }
        DTensor::rand(&mesh, DType::F32, [3], "(R)", &mut generator).map(drop)
    });
    let said = said.unwrap_err().to_string();
    assert!(said.contains("all_gather") && said.contains("barrier") && said.contains("i64[2]"), "{said}");
}

#[test]
fn a_state_saved_on_one_mesh_goes_on_upon_another() {
    /// Four draws, the generator being saved as text and read again after `saved` of them.
    fn run(ranks: usize, saved: usize) -> Vec<Vec<f32>> {
        let all = spmd(ranks, move |rank| {
            let mesh = DeviceMesh::new(&rank, &[("dp", ranks)])?;
            let mut generator = Generator::new(11).child("noise");
            let mut out = Vec::new();
            for i in 0..4 {
                if i == saved {
                    let text = generator.state().to_string();
                    generator = Generator::from_state(text.parse()?);
                }
                let x = DTensor::randn(&mesh, DType::F32, [7, 3], "(S0)", &mut generator)?;
                out.push(x.full_tensor()?.to_vec::<f32>()?);
            }
            Ok(out)
        });
        all.unwrap_or_else(|e| panic!("{e}")).swap_remove(0)
    }
    let want = run(1, 9);
    assert!(want.iter().enumerate().all(|(i, a)| want[..i].iter().all(|b| a != b)));
    for (ranks, saved) in [(1, 0), (1, 2), (3, 2), (5, 3)] {
        assert_eq!(run(ranks, saved), want, "{ranks} rank(s), saved after {saved}");
    }
}

#[test]
fn later_draws_communicate_nothing() {
    // The world's collectives are numbered: a barrier's error tells how many came before.
    let said = spmd(2, |rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
        let mut generator = Generator::new(1);
        let mut x = DTensor::randn(&mesh, DType::F32, [7, 3], "(S0)", &mut generator)?;
        for _ in 0..5 {
            x.fill_random(Distribution::UNIT, &mut generator)?;
            x = x.dropout(0.1, &mut generator)?.shuffle(1, &mut generator.clone())?;
        }
        assert_eq!(mesh.received_bytes(), 0);
        if rank.rank() == 0 {
            return Ok(());
        }
        mesh.barrier()
    });
    let said = said.unwrap_err().to_string();
    assert!(said.contains("barrier #1 on group world{0, 1}"), "{said}");
    let mesh = Mesh::parse("a=1", 0).unwrap();
    on_mesh(&mesh, |mesh| {
        let x = DTensor::rand(mesh, DType::F32, [3], "(R)", &mut Generator::new(1))?;
        Ok(if x.local().numel() == 3 { vec![] } else { vec![x.spec().to_string()] })
    })
    .unwrap();
}
