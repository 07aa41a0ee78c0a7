//! Sizes that overflow, and memory that does not suffice: errors in the operator's name, alike on every rank.

use std::time::{Duration, Instant};

use isoshard::comm::{DryRun, Rank, Spmd, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh, Redistribution, Reduction};
use isoshard::ops::{LastWrite, Meta};
use isoshard::placement::{Mesh, Spec};
use isoshard::rng::{Fans, Generator, Init};
use isoshard::tensor::{DType, Device, ReduceOp, Shape, Tensor, cpu, storage};
use isoshard::{Error, Failure, Result};

use crate::common::baby;

/// The most bytes that an address space can hold.
const MOST: usize = isize::MAX as usize;

/// Runs `f` on two ranks, which refuse alike, and returns the error's text.
fn refused(f: impl Fn(&DeviceMesh) -> Result<()> + Send + Sync + 'static) -> String {
    let ends = spmd(2, move |rank| Ok(f(&DeviceMesh::new(&rank, &[("dp", 2)])?).unwrap_err().to_string()));
    let [a, b] = ends.unwrap().try_into().unwrap();
    assert_eq!(a, b);
    a
}

#[test]
fn products_of_extents_never_wrap() {
    assert_eq!(Shape::from([1 << 40, 1 << 40]).numel(), usize::MAX);
    assert_eq!(Shape::from([1 << 40, 1 << 40, 0]).numel(), 0);
    assert_eq!(Shape::from([0, 3, 6, MOST]).strides()[..], [usize::MAX, usize::MAX, MOST, 1]);
    for shape in [&[1 << 32, 1 << 32, 1 << 33][..], &[0, 1 << 40, 1 << 40], &[2, 3, MOST]] {
        let said = Fans::of(shape).unwrap_err().to_string();
        assert!(said.starts_with("init: the number of elements overflows; got ["), "{said}");
        let init = Init::XavierUniform { gain: 1.0 };
        assert!(init.fill(Generator::new(0).next_draw(), shape, 0, &mut [0f32; 2]).is_err());
    }
}

#[test]
fn shapes_that_overflow_behind_an_extent_of_zero_are_refused_on_every_rank() {
    let rule = "the number of elements overflows; got [0, 3, 6, 9223372036854775807]; use smaller extents";
    let huge = [0, 3, 6, MOST];
    let empty = |mesh: &DeviceMesh, shape: &[usize]| DTensor::zeros(mesh, DType::F32, shape, "(R)");
    assert_eq!(refused(move |mesh| empty(mesh, &huge).map(drop)), format!("layout: {rule}"));
    assert_eq!(
        refused(move |mesh| empty(mesh, &[0, 3])?.reshape(huge).map(drop)),
        format!("reshape: {rule}")
    );
    assert_eq!(
        refused(move |mesh| empty(mesh, &[0, 1, 1, 1])?.expand(huge).map(drop)),
        format!("expand: {rule}")
    );
    let said =
        refused(move |mesh| empty(mesh, &[1 << 40, 0])?.matmul(&empty(mesh, &[0, 1 << 40])?).map(drop));
    assert_eq!(
        said,
        "matmul: the number of elements overflows; got [1099511627776, 1099511627776]; use smaller extents"
    );
}

#[test]
fn an_expansion_has_at_most_as_many_bytes_as_addresses() {
    let one = Tensor::scalar(1.0f64).reshape([1]).unwrap();
    for n in [MOST, 1 << 61, 1 << 60] {
        let said = one.expand([n]).unwrap_err().to_string();
        assert!(said.starts_with("expand: the number of bytes overflows; got f64["), "{said}");
    }
    let wide = one.expand([(1 << 60) - 1]).unwrap();
    assert_eq!(wide.len_bytes(), MOST - 7);
    // A wider dtype is refused by the cast.
    let bytes = Tensor::scalar(1u8).reshape([1]).unwrap().expand([MOST]).unwrap();
    let said = bytes.cast(DType::F32).unwrap_err().to_string();
    assert!(said.contains("the number of bytes overflows; got f32["), "{said}");
}

#[test]
fn positions_overflow_on_every_rank_or_on_none() {
    for layout in ["(S0)", "(R)", "(S1)"] {
        for offset in [usize::MAX, usize::MAX - 1, usize::MAX - 2] {
            let said = refused(move |mesh| {
                DTensor::ones(mesh, DType::F32, [3, 4], layout)?.rotary(1e4, offset).map(drop)
            });
            assert_eq!(said, format!("rotary: the positions overflow; got offset {offset} for f32[3, 4]"));
        }
    }
}

/// Costs and bytes of moves saturate; a build with overflow checks panicked here, and others chose plans by sums that had
/// wrapped.
#[test]
fn the_largest_tensors_have_plans() -> Result<()> {
    for ranks in [2, 3, 64, 1000] {
        let mesh = Mesh::parse(&format!("dp={ranks}"), 0)?;
        let spec = |placement: &str| Spec::parse(&format!("u8[{MOST}]@(dp:{placement})"), &mesh);
        for (from, to) in [("P(sum)", "R"), ("P(sum)", "S0"), ("S0", "R"), ("P(max)", "R"), ("S0", "P(sum)")]
        {
            let plan = Redistribution::plan(&spec(from)?, &spec(to)?)?;
            assert!(plan.received_bytes() >= (MOST / 2) as u64, "{plan}");
        }
    }
    // All ranks' values of a part together have more bytes than a counter counts.
    let mesh = Mesh::parse("dp=64,tp=256", 0)?;
    let spec = |layout: &str| Spec::parse(&format!("f64[{}]@({layout})", MOST / 8), &mesh);
    let plan = Redistribution::plan(&spec("dp:P(sum), tp:P(sum)")?, &spec("dp:S0, tp:R")?)?;
    assert_eq!(plan.received_bytes(), u64::MAX, "{plan}");
    Ok(())
}

/// The bytes that ranks exchange of such tensors overflow. A product that wrapped made the dearest way the cheapest.
#[test]
fn operators_on_the_largest_tensors_are_planned_as_on_smaller_ones() -> Result<()> {
    let layouts = |n: usize, reduction: Reduction| -> Result<[String; 5]> {
        let mesh = DeviceMesh::parse(&DryRun::new(4, 0)?.rank()?, "a=4")?;
        mesh.set_reduction(reduction);
        let x = |layout: &str| DTensor::zeros(&mesh, DType::F64, [n], layout);
        let local = Tensor::zeros_on(Device::Meta, DType::F64, [n])?;
        let partial = DTensor::from_local(&mesh, local, [n], "(P(sum))")?;
        let (sharded, whole) = (x("(S0)")?, x("(R)")?);
        let outs = [
            partial.exp()?,
            partial.mul(&sharded)?,
            partial.add(&sharded)?,
            sharded.add(&whole)?,
            sharded.sum_all()?,
        ];
        Ok(outs.map(|x| x.layout().to_string()))
    };
    for reduction in [Reduction::Exact, Reduction::Fast] {
        assert_eq!(layouts((1 << 60) - 4, reduction)?, layouts(1 << 24, reduction)?, "{reduction:?}");
    }
    assert_eq!(Meta::new(DType::F64, [MOST]).len_bytes(), usize::MAX);
    Ok(())
}

/// Returns the indices 0, 1 and 2.
fn indices(mesh: &DeviceMesh) -> Result<DTensor> {
    DTensor::arange(mesh, DType::I64, 0i64, 3i64, 1i64, "(R)")
}

/// Allocations beyond any address space, which ended the process.
#[test]
fn what_no_machine_can_hold_is_an_error_on_every_rank() {
    type Program = fn(&DeviceMesh) -> Result<()>;
    let programs: [(Program, &str); 13] = [
        (|mesh| DTensor::zeros(mesh, DType::F32, [1 << 50], "(S0)").map(drop), "f32[562949953421312]"),
        (|mesh| DTensor::zeros(mesh, DType::U8, [MOST], "(R)").map(drop), "u8[9223372036854775807]"),
        (
            |mesh| {
                let [x, y] = [[1 << 20, 1], [1, 1 << 20]].map(|n| DTensor::ones(mesh, DType::F32, n, "(R)"));
                x?.matmul(&y?).map(drop)
            },
            "f32[1, 1048576, 1048576] for matmul of 4398046511104 bytes",
        ),
        (
            |mesh| DTensor::randperm(mesh, 1 << 50, "(R)", &mut Generator::new(0)).map(drop),
            "i64[1125899906842624]",
        ),
        (
            |mesh| {
                let weights = DTensor::ones(mesh, DType::F32, [4], "(R)")?;
                weights.multinomial(1 << 32, true, &mut Generator::new(0)).map(drop)
            },
            "a list of 4294967296 numbers for multinomial",
        ),
        (
            |_| {
                let shape = [1 << 24, 1 << 24];
                let mut part = [0f32; 2];
                Init::Orthogonal { gain: 1.0 }.fill(Generator::new(0).next_draw(), &shape, 0, &mut part)
            },
            "a list of 281474976710656 numbers for init",
        ),
        (
            |_| {
                let x = Tensor::scalar(1f32).reshape([1])?.expand([1 << 50])?;
                x.contiguous().map(drop)
            },
            "f32[1125899906842624]",
        ),
        (|mesh| indices(mesh)?.bincount(1 << 50).map(drop), "i64[1125899906842624] for bincount"),
        (
            |mesh| {
                let x = DTensor::ones(mesh, DType::F32, [3, 1], "(R)")?;
                x.permute_tokens(&indices(mesh)?.reshape([3, 1])?, 1 << 55).map(drop)
            },
            "a list of 562949953421312 numbers for permute_tokens",
        ),
        (
            |mesh| {
                let x = DTensor::ones(mesh, DType::F32, [3, 5], "(R)")?;
                let index = DTensor::zeros(mesh, DType::I64, [1], "(R)")?.expand([1 << 50])?;
                x.index(&[&index, &index]).map(drop)
            },
            "i64[1125899906842624] for linear_index",
        ),
        (
            |mesh| {
                let last = LastWrite { dim: 0, extent: 1 << 55 };
                DTensor::apply_one(&last, &[&indices(mesh)?]).map(drop)
            },
            "a list of 36028797018963968 numbers for last_write",
        ),
        (
            // A tensor's own constructor has no `Result`.
            |_| {
                drop(Tensor::zeros(DType::F32, [1usize << 50]));
                Ok(())
            },
            "f32[1125899906842624]",
        ),
        (
            |_| {
                drop(Tensor::zeros(DType::F64, [1usize << 49]));
                Ok(())
            },
            "f64[562949953421312]",
        ),
    ];
    for (program, wanted) in programs {
        let began = Instant::now();
        // The draws take 32 GiB, which a machine may have.
        let spmd = Spmd::new(2).memory_limit(16 << 30);
        let ends = spmd.run_each(move |rank| program(&DeviceMesh::new(&rank, &[("dp", 2)])?)).unwrap();
        for end in ends {
            let Err(Failure::Error(error)) = end else { panic!("{wanted}: {end:?}") };
            let said = error.to_string();
            assert!(error.is_echo() || said.starts_with("memory: cpu has no room; got "), "{said}");
            assert!(said.contains(wanted), "{said}");
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{wanted}");
    }
    let many = DryRun::new(1 << 40, 0).unwrap_err().to_string();
    assert_eq!(
        many,
        "dry_run: the groups of a dry run list their ranks; got 1099511627776 ranks; count at most 16777216"
    );
    let many = Mesh::over(&[("dp", 1 << 50)], 0..1 << 50).unwrap_err().to_string();
    assert!(many.starts_with("mesh: too many ranks are listed; got (dp=1125899906842624) over "), "{many}");
    let endless = Mesh::over(&[("dp", 2)], (0..).map(|i| i % 7)).unwrap_err().to_string();
    assert!(endless.starts_with("mesh: too many ranks are listed"), "{endless}");
}

#[test]
fn a_limit_ends_the_rank_that_meets_it_and_the_others_hear_of_it() {
    let began = Instant::now();
    let ends = Spmd::new(3).memory_limit(1 << 20).run_each(|rank| {
        let mesh = DeviceMesh::new(&rank, &[("dp", 3)])?;
        if rank.rank() == 1 {
            let held = DTensor::ones(&mesh, DType::F32, [3 << 16], "(S0)")?;
            // The error may pass through the program.
            let error = held.local().cast(DType::F64).and_then(|x| x.cast(DType::I64)).unwrap_err();
            assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
            Tensor::zeros(DType::F32, [1 << 18]);
        }
        rank.world().barrier()
    });
    let ends = ends.unwrap();
    let Err(Failure::Error(Error::OutOfMemory(fault))) = &ends[1] else { panic!("{:?}", ends[1]) };
    assert_eq!((&*fault.wanted, fault.wanted_bytes, fault.limit_bytes), ("f32[262144]", 1 << 20, 1 << 20));
    assert_eq!(fault.live_bytes, 1 << 18);
    for end in [&ends[0], &ends[2]] {
        let Err(Failure::Error(error)) = end else { panic!("{end:?}") };
        assert!(
            error.is_echo() && error.to_string().contains("rank 1 failed: memory: cpu has no room"),
            "{error}"
        );
    }
    assert!(began.elapsed() < Duration::from_secs(30));
}

/// Lists that kernels need besides their operands and results, each larger than what the limit leaves.
#[test]
fn a_limit_counts_the_steps_of_reductions_and_the_sums_of_scatter_add() {
    let lacks = |limit: usize, program: fn(&Rank) -> Result<()>| {
        let ends = Spmd::new(1).memory_limit(limit).run_each(move |rank| program(&rank));
        match ends.unwrap().remove(0) {
            Err(Failure::Error(Error::OutOfMemory(fault))) => (fault.wanted, fault.wanted_bytes),
            other => panic!("{other:?}"),
        }
    };
    // Steps over the outer dim: 64 MiB, and the operand and the result take nothing. The list of joins takes 4 MiB.
    fn steps(_: &Rank) -> Result<()> {
        let x = Tensor::scalar(1f32).reshape([1, 1])?.expand([1 << 22, 1])?;
        cpu::reduce("sum", &x, &[0, 1], ReduceOp::Sum, false).map(drop)
    }
    let list = |len: usize, verb: &str| format!("a list of {len} numbers{verb}");
    assert_eq!(lacks(1 << 20, steps), (list(1 << 22, ""), 4 << 20));
    assert_eq!(lacks(32 << 20, steps), (list(1 << 22, ""), 64 << 20));
    // Joins of rows: 4 MiB beside an operand of 8 MiB.
    fn rows(_: &Rank) -> Result<()> {
        let x = Tensor::zeros(DType::U8, [1 << 22, 2]);
        cpu::reduce("sum", &x, &[0], ReduceOp::Sum, false).map(drop)
    }
    assert_eq!(lacks(10 << 20, rows), (list(1 << 22, ""), 4 << 20));
    // Sums of single elements: 2 MiB and 8 bytes, beside 1.8 MiB of operands and results. No sum has three elements.
    fn sums(rank: &Rank) -> Result<()> {
        const N: usize = 1 << 16;
        let mesh = DeviceMesh::new(rank, &[("dp", 1)])?;
        let index = DTensor::arange(&mesh, DType::I64, 0i64, N as i64, 1i64, "(R)")?;
        let src = DTensor::ones(&mesh, DType::F32, [N], "(R)")?;
        src.scatter_add(0, &index, 4 * N).map(drop)
    }
    assert_eq!(lacks(3 << 20, sums), (list(262_145, " for scatter_add"), 8 * 262_145));
}

/// One rank of a GPT of 10.7 million parameters does not fit, nor do two that share its parameters.
#[test]
fn a_baby_gpt_in_200_mb_ends_with_an_error_that_names_what_it_lacks() {
    for ranks in [1, 2] {
        let limit = 200_000_000 / ranks;
        let spmd = Spmd::new(ranks).memory_limit(limit).on_slow(|_| ());
        let ends = spmd.run_each(|rank| baby::step(&rank)).unwrap();
        let mut lacking = 0;
        for end in ends {
            let Err(Failure::Error(error)) = end else { panic!("{end:?}") };
            let said = error.to_string();
            let Error::OutOfMemory(fault) = &error else {
                assert!(error.is_echo() && said.contains("memory: cpu has no room; got "), "{said}");
                continue;
            };
            lacking += 1;
            assert_eq!(fault.limit_bytes, limit, "{said}");
            assert!(fault.live_bytes > limit / 2 && fault.live_bytes <= limit, "{said}");
            assert!(fault.live_bytes + fault.kept_bytes + fault.wanted_bytes > limit, "{said}");
            assert!(fault.wanted.contains(" for ") || fault.wanted.contains(" at "), "{said}");
            for number in [fault.wanted_bytes, fault.live_bytes, limit] {
                assert!(said.contains(&number.to_string()), "{said}");
            }
        }
        assert!(lacking > 0, "{ranks} ranks");
    }
}

/// Attention takes memory on the threads that compute it. At the least limit with which one thread succeeds, a second one
/// has no room, and its error is the rank's.
#[test]
fn the_limit_of_a_rank_is_that_of_all_its_threads() {
    let run = |limit: usize, threads: usize| {
        let ends = Spmd::new(1).memory_limit(limit).threads_per_rank(threads).run_each(|rank| {
            let mesh = DeviceMesh::new(&rank, &[("dp", 1)])?;
            // The scores of a head are half as large as all keys.
            let ones = |times: usize| DTensor::ones(&mesh, DType::F32, [1, 16, times, 8], "(R)");
            let (q, k) = (ones(64)?, ones(2048)?);
            q.attention_at(&k, &k, 0.1, 2048 - 64)?.local().to_vec::<f32>()
        });
        match ends.unwrap().remove(0) {
            Ok(values) => {
                assert!(values.iter().all(|x| (*x - 1.0).abs() < 1e-5));
                true
            }
            Err(Failure::Error(Error::OutOfMemory(fault))) => {
                assert_eq!(fault.limit_bytes, limit, "{fault:?}");
                assert!(
                    fault.wanted.ends_with(" for attention") || !fault.wanted.contains(" for "),
                    "{fault:?}"
                );
                false
            }
            Err(other) => panic!("{other:?}"),
        }
    };
    let (mut fails, mut succeeds) = (0, 1 << 26);
    assert!(run(succeeds, 2));
    while succeeds - fails > 64 {
        let middle = (fails + succeeds) / 2;
        if run(middle, 1) { succeeds = middle } else { fails = middle }
    }
    // The second thread may come too late to take part.
    assert!((0..100).any(|_| !run(succeeds, 2)), "the second thread's memory counts");
}

/// The member that comes last has no room for the sum that all share.
#[test]
fn a_fold_without_room_fails_the_call_on_every_member() {
    for numel in [1 << 10, 1 << 16, 1 << 18] {
        let ends = Spmd::new(3).run_each(move |rank| {
            let x = Tensor::full(DType::F32, [numel], 1.0);
            if rank.rank() == 2 {
                std::thread::sleep(Duration::from_millis(100));
                storage::set_memory_limit(storage::pool_stats().live_bytes);
            }
            let told = rank.world().all_reduce(&x, ReduceOp::Sum).map(drop).unwrap_err();
            // The rank does not end: the call alone tells the others.
            std::thread::sleep(Duration::from_millis(300));
            Ok((told.is_echo(), told.to_string()))
        });
        let ends: Vec<(bool, String)> = ends.unwrap().into_iter().map(|end| end.unwrap()).collect();
        let said = format!("memory: cpu has no room; got f32[{numel}] of {} bytes, ", 4 * numel);
        assert!(!ends[2].0 && ends[2].1.starts_with(&said), "{ends:?}");
        assert!(ends[..2].iter().all(|(echo, text)| *echo && text.contains(&said)), "{ends:?}");
    }
}
