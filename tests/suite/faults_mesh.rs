//! Wrong input that a program passes to a mesh: every rank returns the same error, before the deadline, and nothing
//! hangs. Each fault is put into random places of random worlds, fifty times.

use std::time::Duration;

use isoshard::comm::{Rank, Spmd};
use isoshard::dtensor::{DTensor, DeviceMesh, Reduction};
use isoshard::ops::Sample;
use isoshard::placement::{Layout, Placement, Spec, short::ragged};
use isoshard::rng::Generator;
use isoshard::tensor::{DType, Shape, Tensor};
use isoshard::{CommFault, Error, Result};

use crate::common::samples::catalog;
use crate::common::{SplitMix, bits_differ, has_no_derivative, ordinary, ordinary_values, spread};

const REPETITIONS: u64 = 50;
const DEADLINE: Duration = Duration::from_secs(20);

#[test]
fn ranks_with_other_seeds_are_named() {
    for salt in 0..REPETITIONS {
        let mut random = SplitMix(salt);
        let world = 2 + random.below(4);
        let odd: Vec<usize> = (0..world).filter(|_| random.below(3) == 0).collect();
        let (seed, other) = (random.next_u64(), random.next_u64());
        // Meshes over some of the ranks, in another order, are covered too.
        let members: Vec<usize> =
            (0..world).rev().filter(|r| salt % 2 == 0 || r % 2 == 0 || *r == 1).collect();
        let seeds = odd.clone();
        let mesh_of = members.clone();
        let texts = alike(world, &members, move |rank| {
            let mesh = DeviceMesh::over(&rank, &[("a", mesh_of.len())], mesh_of.iter().copied())?;
            let mut generator = Generator::new(if seeds.contains(&rank.rank()) { other } else { seed });
            DTensor::rand(&mesh, DType::F32, [5], Layout::replicated(1), &mut generator).map(drop)
        });
        let of = |wanted: bool| -> Vec<usize> {
            members.iter().copied().filter(|r| odd.contains(r) == wanted).collect()
        };
        let state = |seed: u64, ranks: &[usize]| format!("seed {seed} draw 0 on rank(s) {}", list(ranks));
        let both = match (of(false), of(true)) {
            (a, b) if a.is_empty() || b.is_empty() => {
                assert_eq!(texts, "", "all have one seed");
                continue;
            }
            (a, b) if a.contains(&members[0]) => [state(seed, &a), state(other, &b)],
            (a, b) => [state(other, &b), state(seed, &a)],
        };
        let want = format!(
            "rand: ranks must draw from equal generators; got {}; seed them alike",
            both.join(" and ")
        );
        assert_eq!(texts, want);
    }
}

#[test]
fn a_rank_that_does_not_draw_is_named_within_the_deadline() {
    for salt in 0..5 {
        let mut random = SplitMix(salt);
        let world = 2 + random.below(3);
        let lazy = random.below(world);
        let run = move |rank: Rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", rank.world_len())])?;
            let draw =
                || DTensor::rand(&mesh, DType::F32, [5], Layout::replicated(1), &mut Generator::new(1));
            if rank.rank() != lazy {
                let told = draw().expect_err("somebody is missing");
                let named = match &told {
                    Error::Comm(fault) => match &**fault {
                        CommFault::Missing { missing, .. } => missing.clone(),
                        _ => vec![],
                    },
                    _ => vec![],
                };
                assert_eq!(named, [lazy], "{told}");
            }
            Ok(())
        };
        Spmd::new(world).deadline(Duration::from_millis(300)).run(run).unwrap_or_else(|e| panic!("{e}"));
    }
}

#[test]
fn parts_of_another_shape_fail_on_all_ranks() {
    for salt in 0..REPETITIONS {
        let mut random = SplitMix(salt);
        let world = 2 + random.below(4);
        let (rows, wrong) = (1 + random.below(9), random.below(world));
        let by = 1 + random.below(2);
        let everyone: Vec<usize> = (0..world).collect();
        let due =
            move |r: usize| (rows.div_ceil(world) * r).min(rows)..(rows.div_ceil(world) * (r + 1)).min(rows);
        let text = alike(world, &everyone, move |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", world)])?;
            let me = rank.rank();
            let mine = due(me).len() + if me == wrong { by } else { 0 };
            let mine = Tensor::zeros(DType::F32, [mine, 3]);
            DTensor::from_local_checked(&mesh, mine, [rows, 3], layout("(S0)")).map(drop)
        });
        let shapes = |given: &dyn Fn(usize) -> String| {
            let mut seen: Vec<(String, Vec<usize>)> = Vec::new();
            for r in 0..world {
                match seen.iter_mut().find(|(text, _)| *text == given(r)) {
                    Some((_, ranks)) => ranks.push(r),
                    None => seen.push((given(r), vec![r])),
                }
            }
            let parts: Vec<String> =
                seen.iter().map(|(text, ranks)| format!("{text} on rank(s) {}", list(ranks))).collect();
            parts.join(" and ")
        };
        let got = shapes(&|r| format!("f32[{}, 3]", due(r).len() + if r == wrong { by } else { 0 }));
        let want = shapes(&|r| format!("[{}, 3]", due(r).len()));
        assert_eq!(
            text,
            format!(
                "from_local: a part is not the one that the layout gives its rank; got {got} for f32[{rows}, 3]@(a:S0); pass \
                 {want}"
            )
        );
    }
}

#[test]
fn ranks_that_name_different_tensors_are_told_apart() {
    let everyone = [0, 1, 2];
    let text = alike(3, &everyone, |rank| {
        let mesh = DeviceMesh::new(&rank, &[("a", 3)])?;
        let rows = if rank.rank() == 1 { 4 } else { 5 };
        let mine = Tensor::zeros(DType::F32, [2 - rank.rank() / 2, 3]);
        DTensor::from_local_checked(&mesh, mine, [rows, 3], layout("(S0)")).map(drop)
    });
    assert_eq!(
        text,
        "from_local: ranks name different tensors; got f32[5, 3] (S0) on rank(s) 0, 2 and f32[4, 3] (S0) on rank(s) 1; name \
         one dtype, global shape and layout"
    );
    let text = alike(3, &everyone, |rank| {
        let mesh = DeviceMesh::new(&rank, &[("a", 3)])?;
        DTensor::from_local_checked(&mesh, Tensor::zeros(DType::F32, [2]), [6], layout("(S1)")).map(drop)
    });
    assert_eq!(text, "layout: shards a dim that is not there; got f32[6]@(a:S1); dims are 0 to 0");
}

/// Without the comparison, the rank with wrong input fails alone, and the other ranks get its error when they wait for it.
#[test]
fn an_unchecked_part_of_another_shape_is_the_first_cause() {
    for salt in 0..REPETITIONS {
        let mut random = SplitMix(salt);
        let world = 2 + random.below(4);
        let wrong = random.below(world);
        let run = move |rank: Rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", world)])?;
            let rows = if rank.rank() == 0 { 1 } else { 0 } + usize::from(rank.rank() == wrong);
            let x = DTensor::from_local(&mesh, Tensor::zeros(DType::F32, [rows, 2]), [1, 2], layout("(S0)"))?;
            x.full_tensor().map(drop)
        };
        let error = Spmd::new(world).deadline(DEADLINE).run(run).unwrap_err().to_string();
        let (got, due) = (usize::from(wrong == 0) + 1, usize::from(wrong == 0));
        let others: Vec<usize> = (1..world).collect();
        assert_eq!(
            error,
            format!(
                "rank {wrong}: from_local: the layout gives rank {wrong} a f32[{due}, 2]; got f32[{got}, 2] for \
                 f32[1, 2]@(a:S0); pass [1, 2] on rank(s) 0 and [0, 2] on rank(s) {}",
                list(&others)
            )
        );
    }
}

#[test]
fn ragged_units_that_do_not_fit() {
    let on = |units: &'static [usize], dims: usize, want: &str| {
        for verb in ["zeros", "from_local", "redistribute", "distribute"] {
            let text = alike(3, &[0, 1, 2], move |rank| {
                let mesh = DeviceMesh::new(&rank, &[("a", 3)])?;
                let to = Layout::new([ragged(dims, units)]);
                let made = match verb {
                    "zeros" => DTensor::zeros(&mesh, DType::F32, [6, 4], to),
                    "from_local" => DTensor::from_local(&mesh, Tensor::zeros(DType::F32, [2, 4]), [6, 4], to),
                    "distribute" => DTensor::distribute(&mesh, &Tensor::zeros(DType::F32, [6, 4]), to),
                    _ => DTensor::zeros(&mesh, DType::F32, [6, 4], layout("(S0)"))?.redistribute(to),
                };
                made.map(drop)
            });
            assert_eq!(text, want, "{verb}");
        }
    };
    on(
        &[1, 1],
        1,
        "layout: 2 counts for the 3 ranks of a; got f32[6, 4]@(a:RS(0..1; 1,1)); give one count for each rank",
    );
    on(
        &[2, 1, 1],
        1,
        "layout: a prefix of 6 does not divide into 4 equal ragged blocks; got f32[6, 4]@(a:RS(0..1; 2,1,1)); give counts \
         whose sum divides it",
    );
    on(
        &[0, 0, 0],
        1,
        "layout: no rank owns a ragged block; got f32[6, 4]@(a:RS(0..1; 0,0,0)); give some rank a count above 0",
    );
    on(
        &[usize::MAX, 1, 0],
        1,
        "layout: the number of ragged blocks overflows; got f32[6, 4]@(a:RS(0..1; 18446744073709551615,1,0)); use smaller \
         counts",
    );
    // The boundary would split blocks of five elements.
    on(
        &[2, 2, 1],
        2,
        "layout: a prefix of 24 does not divide into 5 equal ragged blocks; got f32[6, 4]@(a:RS(0..2; 2,2,1)); give counts \
         whose sum divides it",
    );
    on(
        &[1, 1, 1],
        3,
        "layout: the ragged prefix is not there; got f32[6, 4]@(a:RS(0..3; 1,1,1)); flatten 1 to 2 dims",
    );
}

/// A view that would split a shard is refused in strict mode, and otherwise equals the whole tensor's.
#[test]
fn views_that_would_cut_a_shard() {
    let on = |from: &'static str, f: fn(&DTensor) -> Result<DTensor>, want: Option<(&str, &str)>| {
        let text = alike(3, &[0, 1, 2], move |rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 3)])?;
            let whole = ordinary(DType::F32, &[6, 4].into(), 3);
            let x = DTensor::distribute(&mesh, &whole, layout(from))?;
            let alone = f(&DTensor::distribute(&mesh, &whole, Layout::replicated(1))?)?.full_tensor()?;
            assert_eq!(bits_differ(&f(&x)?.full_tensor()?, &alone), None);
            mesh.set_strict(true);
            f(&x).map(drop)
        });
        let strict = |(verb, to): (&str, &str)| {
            let from = from.replacen('(', "(a:", 1);
            format!(
                "{verb}: operand 0 would have to move, which strict mode forbids; got f32[6, 4]@{from}; redistribute operand \
                 0 to f32[6, 4]@{to} first"
            )
        };
        assert_eq!(text, want.map(strict).unwrap_or_default(), "from {from}");
    };
    on("(S0)", |x| x.reshape([24]), None);
    on("(S0)", |x| x.reshape([3, 8]), None);
    on("(S0)", |x| x.permute(&[1, 0]), None);
    on("(S1)", |x| x.slice(0, 1, 3), None);
    on("(S0)", |x| x.reshape([2, 12]), Some(("reshape", "(a:R)")));
    on("(S0)", |x| x.reshape([4, 6]), Some(("reshape", "(a:R)")));
    on("(S1)", |x| x.reshape([24]), Some(("reshape", "(a:S0)")));
    on("(S0)", |x| x.slice(0, 1, 3), Some(("slice", "(a:S1)")));
    on("(RS(0..1; 1,4,1))", |x| x.reshape([24]), None);
    on("(RS(0..2; 3,8,1))", |x| x.permute(&[1, 0]), Some(("permute", "(a:S0)")));
}

/// Every operator of the catalog if most ranks hold nothing: seven ranks for a few rows, or one rank with all rows.
#[test]
fn empty_shards_everywhere() {
    let samples = || catalog().into_iter().filter(|s| !s.ins.is_empty());
    let whole = Spmd::new(1).run(move |rank| {
        let mesh = DeviceMesh::new(&rank, &[])?;
        samples().map(|s| Values::of(&s, &mesh, |_| Layout::replicated(0))).collect::<Result<Vec<_>>>()
    });
    let whole = whole.unwrap_or_else(|e| panic!("{e}")).remove(0);
    let run = move |rank: Rank| {
        let mesh = DeviceMesh::new(&rank, &[("a", 7)])?;
        let mut wrong = Vec::new();
        for (s, want) in samples().zip(&whole) {
            for turn in 0..3 {
                let got = Values::of(&s, &mesh, |i| empty(&s.ins[i].meta.shape, i + turn))?;
                wrong.extend(got.differ(want).map(|how| format!("{s:?}, turn {turn}: {how}")));
            }
        }
        Ok(wrong)
    };
    let wrong = Spmd::new(7).run(run).unwrap_or_else(|e| panic!("{e}")).concat();
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong[..wrong.len().min(20)].join("\n"));
}

/// Returns one of the layouts of a shape on seven ranks in which some ranks hold nothing.
fn empty(shape: &Shape, turn: usize) -> Layout {
    if shape.is_empty() {
        return Layout::replicated(1);
    }
    let mut one_hot = [0; 7];
    one_hot[turn * 3 % 7] = 1;
    let mut all: Vec<Placement> = (0..shape.len()).map(Placement::Shard).collect();
    all.push(ragged(1, &one_hot));
    all.push(ragged(shape.len(), &one_hot));
    Layout::new([all.swap_remove(turn % all.len())])
}

/// Returns a sample's results and gradients, gathered.
struct Values(Vec<Option<Tensor>>);

impl Values {
    fn of(sample: &Sample, mesh: &DeviceMesh, layout: impl Fn(usize) -> Layout) -> Result<Values> {
        mesh.set_reduction(Reduction::Exact);
        let derives = !has_no_derivative(sample);
        let mut leaves = Vec::new();
        for (i, whole) in ordinary_values(sample, DType::F32, 5).iter().enumerate() {
            let spec = Spec::new(mesh.mesh(), whole.dtype(), whole.shape(), layout(i))?;
            let leaf = spread(mesh, whole, &spec, 0)?;
            leaves.push(if derives && leaf.dtype().is_float() { leaf.requires_grad()? } else { leaf });
        }
        let outs = DTensor::apply(sample.op.as_ref(), &leaves.iter().collect::<Vec<_>>())?;
        let mut values: Vec<Option<Tensor>> = Vec::new();
        for out in &outs {
            values.push(Some(out.full_tensor()?));
        }
        for out in outs.iter().filter(|out| out.has_history()) {
            let from = ordinary(out.dtype(), out.shape(), 9);
            let grads = out.clone().backward_from(DTensor::distribute(
                mesh,
                &from,
                Layout::replicated(mesh.mesh().ndim()),
            )?)?;
            for leaf in &leaves {
                values.push(grads.get(leaf).map(DTensor::full_tensor).transpose()?);
            }
        }
        Ok(Values(values))
    }

    fn differ(&self, want: &Values) -> Option<String> {
        if self.0.len() != want.0.len() {
            return Some(format!("{} values instead of {}", self.0.len(), want.0.len()));
        }
        self.0.iter().zip(&want.0).enumerate().find_map(|(k, pair)| match pair {
            (Some(got), Some(want)) => bits_differ(got, want).map(|how| format!("value {k}: {how}")),
            (None, None) => None,
            _ => Some(format!("value {k} is there on one side")),
        })
    }
}

/// Returns the error text of all `members`, which must be equal; empty if they succeed.
#[track_caller]
fn alike(world: usize, members: &[usize], f: impl Fn(Rank) -> Result<()> + Send + Sync + 'static) -> String {
    let inside = members.to_vec();
    let texts = Spmd::new(world).deadline(DEADLINE).run(move |rank| {
        let here = inside.contains(&rank.rank());
        Ok(here.then(|| f(rank).err().map(|e: Error| e.to_string()).unwrap_or_default()))
    });
    let texts = texts.unwrap_or_else(|e| panic!("{e}"));
    let first = texts[members[0]].clone().expect("a member");
    assert!(texts.iter().flatten().all(|text| *text == first), "ranks differ: {texts:?}");
    first
}

fn list(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

fn layout(text: &str) -> Layout {
    text.parse().expect("a layout")
}
