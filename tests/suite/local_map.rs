//! `local_map`: a program's own code on local tensors gives the same results on every mesh and in every layout, and its
//! failures on one rank reach all ranks before the deadline.

use std::time::Duration;

use isoshard::comm::{DryRun, Rank, Spmd, spmd};
use isoshard::dtensor::{DTensor, DTensors, DeviceMesh};
use isoshard::ops::Windows;
use isoshard::placement::{Layout, Mesh};
use isoshard::tensor::{DType, ReduceOp, Tensor};
use isoshard::{CommFault, Error, Failure, Result};

const DEADLINE: Duration = Duration::from_secs(20);

fn layout(text: &str) -> Layout {
    text.parse().expect("a layout")
}

fn ranks_of(mesh: &str) -> usize {
    Mesh::parse(mesh, 0).expect("a mesh").rank_len()
}

/// Runs `program` on each mesh and checks that every rank of every mesh returns `want`.
fn on_meshes<T: PartialEq + std::fmt::Debug + Send + 'static>(
    meshes: &[&'static str],
    want: &T,
    program: fn(&DeviceMesh) -> Result<T>,
) {
    for &text in meshes {
        let got = spmd(ranks_of(text), move |rank| program(&DeviceMesh::parse(&rank, text)?));
        for (rank, got) in got.unwrap_or_else(|e| panic!("{text}: {e}")).iter().enumerate() {
            assert_eq!(got, want, "rank {rank} of {text}");
        }
    }
}

/// Adds its global row-major index to each element, which a function can do for any window.
fn add_index(ins: &mut [Tensor], at: &Windows) -> Result<[Tensor; 1]> {
    assert_eq!(at.ins[0], at.outs[0], "both have one layout");
    assert_eq!(ins[0].shape(), at.ins[0].local());
    let window = &at.outs[0];
    let mut y = ins[0].to_vec::<f64>()?;
    window.region.runs(&window.global, |global, local, len| {
        (0..len).for_each(|i| y[local + i] += 100.0 * (global as f64 + i as f64));
    });
    Ok([Tensor::from_vec(y, window.local())?])
}

/// From every layout to every layout: even, uneven, empty, ragged over one dim and over two, nested in both orders.
#[test]
fn windows_say_which_elements_a_function_has() {
    let on = |mesh: &'static str, layouts: &'static [&'static str]| {
        let run = move |rank: Rank| {
            let mesh = DeviceMesh::parse(&rank, mesh)?;
            let whole = Tensor::from_vec((0..15).map(f64::from).collect(), [5, 3])?;
            let want: Vec<f64> = (0..15).map(|i| 101.0 * f64::from(i)).collect();
            for from in layouts {
                let x = DTensor::distribute(&mesh, &whole, layout(from))?;
                for to in layouts {
                    let map = mesh.local_map("add_index").operand(&x, layout(to));
                    let [y] = map.result(DType::F64, [5, 3], layout(to)).run(add_index)?.into_array()?;
                    assert_eq!(y.layout(), &layout(to));
                    assert_eq!(y.full_tensor()?.to_vec::<f64>()?, want, "{from} -> {to}");
                }
            }
            Ok(())
        };
        spmd(ranks_of(mesh), run).unwrap_or_else(|e| panic!("{mesh}: {e}"));
    };
    on("a=1", &["(R)", "(S0)"]);
    on("a=2", &["(R)", "(S0)", "(S1)", "(RS(0..1; 4,1))", "(RS(0..2; 2,1))"]);
    on("a=7", &["(S0)", "(S1)", "(RS(0..1; 0,0,5,0,0,0,0))", "(RS(0..2; 1,0,4,3,5,0,2))"]);
    on("a=2,b=3", &["(S0, S1)", "(S0, S0)", "(S0^1, S0^0)", "(S1, RS(0..1; 2,1,2))", "(R, S0)"]);
}

/// The program of the next test: a running maximum of rows, then operators, then a function with two results.
fn between_operators(mesh: &DeviceMesh) -> Result<Vec<Vec<f64>>> {
    let axes = mesh.mesh().ndim();
    let by = |placement: &str| layout(&format!("({placement}{})", ", R".repeat(axes - 1)));
    let whole = Tensor::from_vec((0..28i32).map(|i| f64::from(i * i * 7 % 29) - 11.0).collect(), [7, 4])?;
    let x = DTensor::distribute(mesh, &whole, by("S1"))?.tanh()?;
    let map = mesh.local_map("running_max").operand(&x, by("S0")).result(DType::F64, [7, 4], by("S0"));
    let y = map.run_checked(|ins, at| {
        let mut y = ins[0].to_vec::<f64>()?;
        for row in y.chunks_mut(4) {
            (1..4).for_each(|i| row[i] = row[i].max(row[i - 1]));
        }
        Ok([Tensor::from_vec(y, at.outs[0].local())?])
    })?;
    let z = y[0].matmul(&x.transpose(0, 1)?)?;
    let map = mesh.local_map("signs").operand(&z, by("S0")).operand(&x, by("R"));
    let map = map.result(DType::Bool, [7, 7], by("S0")).result(DType::I64, [7], by("S0"));
    let outs: DTensors = map.run(|ins, at| {
        assert_eq!(ins[1].shape()[..], [7, 4]);
        let z = ins[0].to_vec::<f64>()?;
        let signs: Vec<bool> = z.iter().map(|z| *z > 0.0).collect();
        let counts = signs.chunks(7).map(|row| row.iter().filter(|s| **s).count() as i64).collect();
        let [signs_at, counts_at] = [0, 1].map(|i| at.outs[i].local());
        Ok(vec![Tensor::from_vec(signs, signs_at)?, Tensor::from_vec(counts, counts_at)?])
    })?;
    [&y[0], &z, &outs[0], &outs[1]].iter().map(|t| Ok(t.full_tensor()?.to_f64_vec())).collect()
}

#[test]
fn the_same_bits_on_every_mesh() {
    let want = spmd(1, |rank| between_operators(&DeviceMesh::parse(&rank, "a=1")?));
    let want = want.unwrap_or_else(|e| panic!("{e}")).remove(0);
    assert_eq!(want[3].len(), 7);
    on_meshes(&["a=2", "a=3", "a=8", "a=2,b=2"], &want, between_operators);
}

/// A function may communicate: the largest element of each row, whose columns are sharded.
#[test]
fn a_function_may_call_collectives() {
    on_meshes(&["dp=1,tp=1", "dp=1,tp=3", "dp=2,tp=2", "dp=4,tp=2"], &vec![2, 5, 8, 11, 14], |mesh| {
        let whole = Tensor::from_vec((0..15i64).collect(), [5, 3])?;
        let x = DTensor::distribute(mesh, &whole, layout("(R, R)"))?;
        let columns = mesh.group_along(&["tp"])?;
        let map = mesh.local_map("row_max").operand(&x, layout("(S0, S1)"));
        let y = map.result(DType::I64, [5], layout("(S0, R)")).run_checked(|ins, at| {
            let width = ins[0].shape()[1];
            let own = ins[0].to_vec::<i64>()?;
            let rows = 0..ins[0].shape()[0];
            let most = rows.map(|r| own[r * width..(r + 1) * width].iter().copied().max().unwrap_or(-1));
            let most = Tensor::from_vec(most.collect(), at.outs[0].local())?;
            Ok([columns.all_reduce(&most, ReduceOp::Max)?])
        })?;
        y[0].full_tensor()?.to_vec::<i64>()
    });
}

/// The running product of each row, or the derivative of one: `local_map` within `custom_vjp`.
fn running_product(x: &DTensor) -> Result<DTensor> {
    let axes = x.mesh().mesh().ndim();
    let rows = layout(&format!("(S0{})", ", R".repeat(axes - 1)));
    let mapped = move |name, ins: &[&DTensor], f: fn(&mut [f64], &[f64])| {
        let map = ins[0].mesh().local_map(name);
        let map = ins.iter().fold(map, |map, x| map.operand(x, rows.clone()));
        let outs = map.result(DType::F64, ins[0].shape(), rows.clone()).run(|ins, at| {
            let mut y = ins[0].to_vec::<f64>()?;
            let other = ins[ins.len() - 1].to_vec::<f64>()?;
            y.chunks_mut(4).zip(other.chunks(4)).for_each(|(y, other)| f(y, other));
            Ok([Tensor::from_vec(y, at.outs[0].local())?])
        });
        Ok::<_, Error>(outs?.remove(0))
    };
    let back = mapped.clone();
    let forward = move |ins: &[DTensor]| {
        let y = mapped("running_product", &[&ins[0]], |y, _| (1..4).for_each(|i| y[i] *= y[i - 1]))?;
        Ok((vec![y], vec![ins[0].clone()]))
    };
    let backward = move |saved: &[DTensor], grads: &[DTensor]| {
        let dx = back("running_product_grad", &[&grads[0], &saved[0]], |dy, x| {
            let partial = |i: usize, k: usize| (0..=i).filter(|&j| j != k).map(|j| x[j]).product::<f64>();
            let dx: Vec<f64> = (0..4).map(|k| (k..4).map(|i| dy[i] * partial(i, k)).sum()).collect();
            dy.copy_from_slice(&dx);
        });
        Ok(vec![Some(dx?)])
    };
    Ok(DTensor::custom_vjp("running_product", &[x], forward, backward)?.remove(0))
}

#[test]
fn a_function_with_a_stated_derivative() {
    let program = |mesh: &DeviceMesh| -> Result<[Vec<f64>; 2]> {
        let axes = mesh.mesh().ndim();
        let columns = layout(&format!("(S1{})", ", R".repeat(axes - 1)));
        let whole =
            Tensor::from_vec((1..21i32).map(|i| f64::from(i * 11 % 7) / 3.0 - 0.9).collect(), [5, 4])?;
        let x = DTensor::distribute(mesh, &whole, columns)?.requires_grad()?;
        let y = running_product(&x.exp()?)?;
        let dx = y.square()?.sum_all()?.backward()?.take(&x).expect("x is a leaf");
        let [y, dx] = [y, dx].map(|t| t.full_tensor()?.to_vec::<f64>());
        Ok([y?, dx?])
    };
    let want = spmd(1, move |rank| program(&DeviceMesh::parse(&rank, "a=1")?));
    let want = want.unwrap_or_else(|e| panic!("{e}")).remove(0);
    // The product of e^x up to element i is e^sum: its square has the derivative 2 e^(2 sum) by each of its factors.
    let x: Vec<f64> = (1..21i32).map(|i| f64::from(i * 11 % 7) / 3.0 - 0.9).collect();
    for (i, dx) in want[1].iter().enumerate() {
        let row = &x[i / 4 * 4..i / 4 * 4 + 4];
        let sum = |to: usize| row[..=to].iter().sum::<f64>();
        let by_hand: f64 = (i % 4..4).map(|to| 2.0 * (2.0 * sum(to)).exp()).sum();
        assert!((dx - by_hand).abs() <= 1e-12 * by_hand, "{i}: {dx}, by hand {by_hand}");
    }
    on_meshes(&["a=2", "a=3", "a=2,b=2", "a=7"], &want, program);
}

/// Contributions of all ranks are added; integers and maxima have the same bits on every mesh.
#[test]
fn results_may_be_partial() {
    on_meshes(&["a=1", "a=2", "a=5", "a=8"], &(vec![0, 10, 20], 4.0), |mesh| {
        let whole = Tensor::from_vec((0..5i64).collect(), [5])?;
        let x = DTensor::distribute(mesh, &whole, layout("(R)"))?;
        let map = mesh.local_map("weighted").operand(&x, layout("(S0)"));
        let map = map.result(DType::I64, [3], layout("(P(sum))")).result(DType::F32, [], layout("(P(max))"));
        let [sums, most] = map
            .run(|ins, _| {
                let own = ins[0].to_vec::<i64>()?;
                let sum: i64 = own.iter().sum();
                let most = own.iter().copied().max().unwrap_or(-1) as f32;
                Ok([Tensor::from_vec(vec![0, sum, 2 * sum], [3])?, Tensor::scalar(most)])
            })?
            .into_array()?;
        assert!(sums.layout().has_partial() && sums.spec().tree.is_none());
        // Passed on as it is, since its contributions have no tree.
        let map = mesh.local_map("keep").operand(&sums, layout("(P(sum))"));
        let map = map.result(DType::I64, [3], layout("(P(sum))"));
        let kept = map.run(|ins, _| Ok([ins[0].clone()]))?;
        Ok((kept[0].full_tensor()?.to_vec::<i64>()?, most.item()?))
    });
}

/// Runs a program that fails alike on all ranks, and still can communicate afterwards; returns the text.
fn alike(ranks: usize, program: fn(&DeviceMesh) -> Result<DTensors>) -> String {
    let run = move |rank: Rank| {
        let mesh = DeviceMesh::new(&rank, &[("a", ranks)])?;
        let said = program(&mesh).expect_err("it fails").to_string();
        mesh.barrier()?;
        Ok(said)
    };
    let said = Spmd::new(ranks).deadline(DEADLINE).run(run).unwrap_or_else(|e| panic!("{e}"));
    assert!(said.iter().all(|text| *text == said[0]), "{said:#?}");
    said[0].clone()
}

#[test]
fn wrong_results_of_one_rank_fail_on_all_ranks() {
    let shapes = alike(3, |mesh| {
        let map = mesh.local_map("make").result(DType::F32, [5, 2], layout("(S0)"));
        map.run_checked(|_, _| Ok([Tensor::zeros(DType::F32, [2, 2])]))
    });
    assert_eq!(
        shapes,
        "make: the results are not the shards that the layouts give their ranks; got f32[2, 2] on rank(s) 0, 1, 2 for \
         f32[5, 2]@(a:S0); return f32[2, 2] on rank(s) 0, 1 and f32[1, 2] on rank(s) 2"
    );
    let dtype = alike(2, |mesh| {
        let map = mesh.local_map("make").result(DType::F32, [2], layout("(S0)"));
        let dtype = if mesh.mesh().rank() == 1 { DType::F64 } else { DType::F32 };
        map.run_checked(|_, at| Ok([Tensor::zeros(dtype, at.outs[0].local())]))
    });
    assert_eq!(
        dtype,
        "make: the results are not the shards that the layouts give their ranks; got f32[1] on rank(s) 0 and f64[1] on \
         rank(s) 1 for f32[2]@(a:S0); return f32[1] on rank(s) 0, 1"
    );
    let number = alike(2, |mesh| {
        let x = DTensor::zeros(mesh, DType::F32, [2], layout("(S0)"))?;
        let map = mesh.local_map("drop").operand(&x, layout("(S0)")).result(DType::F32, [2], layout("(S0)"));
        map.run_checked(|_, _| Ok(Vec::new()))
    });
    assert_eq!(
        number,
        "drop: the results are not the shards that the layouts give their ranks; got nothing on rank(s) 0, 1 for \
         f32[2]@(a:S0); return f32[1] on rank(s) 0, 1"
    );
    let single = alike(1, |mesh| {
        let map = mesh.local_map("make").result(DType::I64, [2], layout("(S0)"));
        map.run_checked(|_, _| Ok([Tensor::zeros(DType::I64, [3])]))
    });
    assert!(
        single.ends_with("got i64[3] on rank(s) 0 for i64[2]@(a:S0); return i64[2] on rank(s) 0"),
        "{single}"
    );
}

#[test]
fn an_error_of_some_ranks_is_returned_by_all() {
    let failed = alike(4, |mesh| {
        let map = mesh.local_map("load").result(DType::F32, [4], layout("(S0)"));
        map.run_checked(|_, at| match mesh.mesh().rank() {
            1 | 3 => Err(Error::other("no such file")),
            _ => Ok([Tensor::zeros(DType::F32, at.outs[0].local())]),
        })
    });
    assert_eq!(failed, "load: the function failed on some ranks; got no such file on rank(s) 1, 3");
    let differ = alike(2, |mesh| {
        let to = ["(S0)", "(R)"][mesh.mesh().rank()];
        let map = mesh.local_map("load").result(DType::F32, [4], layout(to));
        map.run_checked(|_, at| Ok([Tensor::zeros(DType::F32, at.outs[0].local())]))
    });
    assert_eq!(
        differ,
        "load: ranks state different functions; got load() -> f32[4]@(a:S0) on rank(s) 0 and load() -> f32[4]@(a:R) on \
         rank(s) 1; state one name, operands and results"
    );
}

/// `run` communicates nothing: the rank fails alone, and the other ranks get an error that names it as soon as they wait
/// for it.
#[test]
fn an_error_of_one_rank_does_not_leave_others_waiting() {
    let run = |rank: Rank| {
        let mesh = DeviceMesh::new(&rank, &[("a", 3)])?;
        let map = mesh.local_map("make").result(DType::F32, [3], layout("(S0)"));
        let len = if rank.rank() == 1 { 2 } else { 1 };
        let x = map.run(|_, _| Ok([Tensor::zeros(DType::F32, [len])]))?;
        x[0].full_tensor().map(drop)
    };
    let ends = Spmd::new(3).deadline(DEADLINE).run_each(run).unwrap_or_else(|e| panic!("{e}"));
    let said: Vec<String> = ends.into_iter().map(|end| end.expect_err("all fail").to_string()).collect();
    let cause = "make: the results are not the shards that the layouts give rank 1; got f32[2] for f32[3]@(a:S0); return \
                 f32[1]";
    assert_eq!(said[1], cause);
    assert!(said[0].contains(cause) && said[2].contains(cause), "{said:#?}");
}

/// A rank that leaves a function which communicates: the ranks within it are told its number by the deadline.
#[test]
fn a_rank_that_leaves_a_function_is_named_within_the_deadline() {
    let run = |rank: Rank| {
        let mesh = DeviceMesh::parse(&rank, "a=2,b=2")?;
        let group = mesh.group_along(&["b"])?;
        let map = mesh.local_map("exchange").result(DType::F32, [2, 2], layout("(S0, S1)"));
        let outs = map.run_checked(|_, _| {
            if rank.rank() == 2 {
                return Err(Error::other("left"));
            }
            Ok([group.all_reduce(&Tensor::zeros(DType::F32, [1, 1]), ReduceOp::Sum)?])
        });
        outs.map(drop)
    };
    let ends =
        Spmd::new(4).deadline(Duration::from_millis(300)).run_each(run).unwrap_or_else(|e| panic!("{e}"));
    let errors: Vec<Error> = ends
        .into_iter()
        .map(|end| match end.expect_err("all fail") {
            Failure::Error(error) => error,
            other => panic!("{other}"),
        })
        .collect();
    assert_eq!(errors[2].to_string(), "left");
    for rank in [0, 1, 3] {
        let Error::Comm(fault) = &errors[rank] else { panic!("rank {rank}: {}", errors[rank]) };
        let named = match &**fault {
            CommFault::Missing { missing, .. } => missing.contains(&2) || missing.contains(&3),
            other => other.to_string().contains("rank 2") || other.to_string().contains("rank 3"),
        };
        assert!(named, "rank {rank}: {fault}");
    }
    assert!(errors[3].to_string().contains("exchange"), "{}", errors[3]);
}

#[test]
fn what_all_ranks_know_is_refused_before_the_function_runs() {
    fn never<T>(_: &mut [Tensor], _: &Windows) -> Result<Vec<T>> {
        panic!("it is refused before")
    }
    let said = alike(2, |mesh| {
        let x = DTensor::zeros(mesh, DType::F32, [4], layout("(S0)"))?.requires_grad()?;
        mesh.local_map("own").operand(&x, layout("(S0)")).run(never)
    });
    assert_eq!(
        said,
        "own: local_map has no derivative; got operand 0, f32[4]@(a:S0), with a history; detach the operand, use no_grad, \
         or give a derivative with custom_vjp"
    );
    let said = alike(2, |mesh| {
        let x = DTensor::zeros(mesh, DType::F32, [4], layout("(S0)"))?;
        mesh.local_map("own").operand(&x, layout("(S1)")).run(never)
    });
    assert_eq!(said, "own: shards a dim that is not there; got f32[4]@(a:S1); dims are 0 to 0");
    let said =
        alike(2, |mesh| mesh.local_map("own").result(DType::F32, [], layout("(S0)")).run_checked(never));
    assert_eq!(said, "own: a single element has no dim to shard; got f32[]@(a:S0); replicate it");
    let said = alike(2, |mesh| {
        let sum = DTensor::zeros(mesh, DType::F32, [4], layout("(S0)"))?.sum_all()?;
        mesh.local_map("own").operand(&sum, layout("(P(sum))")).run(never)
    });
    assert_eq!(
        said,
        "own: operand 0 would stay a partial sum with a reduction tree; got f32[]@(a:P(sum)) for f32[]@(a:P(sum)); give it \
         a layout without Partial"
    );
    let said = alike(2, |mesh| {
        let other = DeviceMesh::new(mesh.rank(), &[("b", 2)])?;
        let x = DTensor::zeros(&other, DType::F32, [4], layout("(S0)"))?;
        mesh.local_map("own").operand(&x, layout("(S0)")).run(never)
    });
    assert_eq!(
        said,
        "own: an operand is on another mesh; got operand 0 on (b=2) for (a=2); make it on the mesh of local_map"
    );
}

#[test]
fn a_history_is_dropped_if_the_program_says_so() {
    let run = |rank| {
        let mesh = DeviceMesh::new(&rank, &[("a", 2)])?;
        let x = DTensor::full(&mesh, DType::F32, [3], layout("(S0)"), 2.0)?.requires_grad()?;
        let same = |x: &DTensor| {
            let map = mesh.local_map("same").operand(x, layout("(S0)"));
            Ok::<_, Error>(
                map.result(DType::F32, [3], layout("(S0)")).run(|ins, _| Ok([ins[0].clone()]))?.remove(0),
            )
        };
        assert!(!same(&x.detach())?.has_history());
        let guard = mesh.no_grad();
        assert!(!same(&x)?.has_history());
        drop(guard);
        // A function that writes in place leaves the operand as it is.
        let kept = x.detach();
        let map = mesh.local_map("zero").operand(&kept, layout("(S0)"));
        let zeros = map.result(DType::F32, [3], layout("(S0)")).run(|ins, _| {
            ins[0].make_mut::<f32>()?.fill(0.0);
            Ok([std::mem::take(&mut ins[0])])
        })?;
        assert_eq!(zeros[0].full_tensor()?.to_vec::<f32>()?, [0.0; 3]);
        assert_eq!(kept.full_tensor()?.to_vec::<f32>()?, [2.0; 3]);
        Ok(())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
}

/// Strict mode forbids moves that nothing in the program states; this one is stated.
#[test]
fn strict_mode_allows_the_stated_layouts() {
    let run = |rank| {
        let mesh = DeviceMesh::new(&rank, &[("a", 2)])?;
        mesh.set_strict(true);
        let x = DTensor::full(&mesh, DType::F32, [4, 4], layout("(S0)"), 1.0)?;
        let map = mesh.local_map("columns").operand(&x, layout("(S1)"));
        let widths = map
            .result(DType::I64, [2], layout("(S0)"))
            .run(|ins, _| Ok([Tensor::from_vec(vec![ins[0].shape()[1] as i64], [1])?]))?;
        mesh.set_strict(false);
        assert_eq!(widths[0].full_tensor()?.to_vec::<i64>()?, [2, 2]);
        Ok(())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
}

/// A dry run counts the operands' moves and has the results' shapes, without calling the function.
#[test]
fn a_dry_run_does_not_call_the_function() {
    let dry = DryRun::new(2, 1).expect("a rank of two");
    let rank = dry.rank().expect("a dry rank");
    let mesh = DeviceMesh::new(&rank, &[("a", 2)]).expect("a mesh");
    let x = DTensor::zeros(&mesh, DType::F32, [5, 4], layout("(S0)")).expect("zeros");
    let map = mesh.local_map("columns").operand(&x, layout("(S1)"));
    let map = map.result(DType::F32, [5, 4], layout("(S1)"));
    let outs = map.run_checked(|_, _| -> Result<Vec<Tensor>> { panic!("a dry run has no elements") });
    let outs = outs.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(outs[0].local().shape()[..], [5, 2]);
    assert_eq!(mesh.received_bytes(), 3 * 2 * 4);
}
