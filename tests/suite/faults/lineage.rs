//! Ranks that move different tensors of one dtype and shape: each call compares what its tensors are, so the ranks get an
//! error in place of a mixture of both.

use isoshard::Result;
use isoshard::comm::{ModulePath, Rank, Spmd, flight};
use isoshard::dtensor::{Bridge, DTensor, DeviceMesh, Transfer};
use isoshard::fsdp::{BlockPolicy, Sharding, fully_shard};
use isoshard::nn::{Forward, Params, Plan};
use isoshard::placement::{Layout, Mesh};
use isoshard::rng::{Distribution, Generator, Init};
use isoshard::tensor::{DType, Tensor};

/// Runs a program on two ranks. Returns the error, in which ranks differ.
fn refused(name: &str, program: impl Fn(&DeviceMesh, bool) -> Result<()> + Send + Sync + 'static) -> String {
    let run = move |rank: Rank| program(&DeviceMesh::parse(&rank, "fsdp=2")?, rank.rank() == 0);
    let error = Spmd::new(2).run(run).expect_err(name).to_string();
    assert!(error.contains("rank"), "{name}: {error}");
    error
}

fn layout(text: &str) -> Layout {
    text.parse().unwrap()
}

/// Three equal parameters in units of their own.
fn three(mesh: &DeviceMesh, plan: Plan) -> Result<(Params, Vec<isoshard::nn::ParamId>)> {
    let mut params = Params::new(mesh, plan, 7)?;
    let init = Init::Normal { mean: 0.0, std: 1.0 };
    let ids =
        (0..3).map(|i| params.root().child("h").child(i).param("w", [6, 2], init)).collect::<Result<_>>()?;
    Ok((params, ids))
}

#[test]
fn ranks_that_gather_other_parameters_are_told_which() {
    for sharding in [None, Some(Sharding::zero3("fsdp")), Some(Sharding::zero2("fsdp"))] {
        let error = refused("gathers", move |mesh, first| {
            let plan = if sharding.is_none() { Plan::default().fsdp("fsdp") } else { Plan::default() };
            let (mut params, ids) = three(mesh, plan)?;
            if let Some(sharding) = &sharding {
                fully_shard(&mut params, &["h.*"], sharding, &BlockPolicy::default())?;
            }
            let cx = Forward::train_without_dropout(&params);
            cx.param(ids[if first { 1 } else { 2 }]).map(drop)
        });
        assert!(error.contains("of h.1.w (lineage") && error.contains("of h.2.w (lineage"), "{error}");
    }
}

#[test]
fn ranks_that_reduce_other_gradients_are_told() {
    let error = refused("reduces", |mesh, first| {
        let (params, ids) = three(mesh, Plan::default())?;
        let x = DTensor::full(mesh, DType::F32, [4, 6], layout("(S0)"), 0.5)?;
        let cx = Forward::train_without_dropout(&params);
        let y = x.matmul(&cx.param(ids[0])?)?;
        let y = if first { y.mul_scalar(2.0)? } else { y.mul_scalar(3.0)? };
        y.sum_all()?.backward().map(drop)
    });
    assert!(error.contains("lineage"), "{error}");
}

/// One program per way in which a tensor is moved.
#[test]
fn every_move_compares_what_is_moved() {
    type Program = fn(&DeviceMesh, bool) -> Result<()>;
    let programs: [(&str, Program); 9] = [
        ("full_tensor", |mesh, first| {
            let x = DTensor::full(mesh, DType::F32, [4], layout("(S0)"), 1.0)?;
            let y = x.mul_scalar(10.0)?;
            if first { &x } else { &y }.full_tensor().map(drop)
        }),
        ("attributes", |mesh, first| {
            let x = DTensor::full(mesh, DType::F32, [4], layout("(S0)"), 1.0)?;
            x.mul_scalar(if first { 2.0 } else { 3.0 })?.full_tensor().map(drop)
        }),
        ("values", |mesh, first| {
            let value = if first { 2.0 } else { 3.0 };
            DTensor::full(mesh, DType::F32, [4], layout("(S0)"), value)?.full_tensor().map(drop)
        }),
        ("operands in another order", |mesh, first| {
            let x = DTensor::arange(mesh, DType::F32, 0, 4, 1, layout("(S0)"))?;
            let y = DTensor::arange(mesh, DType::F32, 1, 5, 1, layout("(S0)"))?;
            if first { x.sub(&y) } else { y.sub(&x) }?.full_tensor().map(drop)
        }),
        ("results of one call", |mesh, first| {
            let x = DTensor::arange(mesh, DType::F32, 0, 8, 1, layout("(S0)"))?.reshape([4, 2])?;
            let (values, indices) = x.sort(1, false)?;
            let (a, b) = (values.cast(DType::F32)?, indices.cast(DType::F32)?);
            if first { &a } else { &b }.full_tensor().map(drop)
        }),
        ("draws", |mesh, first| {
            let mut from = Generator::new(7);
            let normal = Distribution::Normal { mean: 0.0, std: 1.0 };
            let x = DTensor::random(mesh, DType::F32, [4], layout("(S0)"), normal, &mut from)?;
            let y = DTensor::random(mesh, DType::F32, [4], layout("(S0)"), normal, &mut from)?;
            if first { &x } else { &y }.full_tensor().map(drop)
        }),
        ("redistribute_async", |mesh, first| {
            let x = DTensor::full(mesh, DType::F32, [4, 4], layout("(S0)"), 1.0)?;
            let y = x.exp()?;
            if first { &x } else { &y }.redistribute_async(layout("(S1)"))?.wait().map(drop)
        }),
        ("reduce_partial", |mesh, first| {
            let x = DTensor::full(mesh, DType::F32, [4, 2], layout("(S0)"), 1.0)?;
            let y = x.exp()?;
            if first { &x } else { &y }.sum_all()?.reduce_partial().map(drop)
        }),
        ("an operator's operand", |mesh, first| {
            let x = DTensor::full(mesh, DType::F32, [4, 4], layout("(S0)"), 1.0)?;
            let y = x.exp()?;
            let other = DTensor::full(mesh, DType::F32, [4, 4], layout("(R)"), 1.0)?;
            // The shard moves along another dim.
            if first { &x } else { &y }.softmax(0)?.add(&other)?.full_tensor().map(drop)
        }),
    ];
    for (name, program) in programs {
        let error = refused(name, program);
        assert!(error.contains("lineage"), "{name}: {error}");
    }
}

/// Local work of one rank, however much, is no mistake: a lineage counts nothing.
#[test]
fn extra_local_work_of_one_rank_is_legal() {
    let run = |rank: Rank| {
        let mesh = DeviceMesh::parse(&rank, "fsdp=2")?;
        let (params, ids) = three(&mesh, Plan::default().fsdp("fsdp"))?;
        let extra = |x: &DTensor| -> Result<()> {
            if rank.rank() == 1 {
                let alone = DTensor::full(&mesh, DType::F32, [4, 2], layout("(S0)"), 3.0)?;
                alone.exp()?.mul(&alone)?.requires_grad()?.log()?;
                x.mul_scalar(7.0)?.exp()?;
            }
            Ok(())
        };
        let cx = Forward::train_without_dropout(&params);
        let x = DTensor::full(&mesh, DType::F32, [4, 6], layout("(S0)"), 0.5)?;
        extra(&x)?;
        let mut y = x;
        for id in ids {
            y = y.matmul(&cx.param(id)?)?.matmul(&cx.param(id)?.transpose(0, 1)?)?;
            extra(&y)?;
        }
        let mut loss = y.sum_all()?;
        let grads = loss.backward()?;
        let mut all = loss.full_tensor()?.to_vec::<f32>()?;
        for id in params.ids() {
            all.extend(grads.get(params.value(id)).expect("used").full_tensor()?.to_vec::<f32>()?);
        }
        Ok(all)
    };
    let both = Spmd::new(2).run(run).unwrap_or_else(|e| panic!("{e}"));
    assert!(both[0] == both[1] && both[0].iter().all(|x| x.is_finite()));
}

/// A rank's plain call beside another one's tensor.
#[test]
fn a_plain_tensor_is_not_a_distributed_one() {
    let error = refused("plain", |mesh, first| {
        let x = DTensor::full(mesh, DType::F32, [4], layout("(S0)"), 1.0)?;
        match first {
            true => x.full_tensor().map(drop),
            false => {
                let group = mesh.rank().group(&[0, 1], "fsdp")?;
                group.all_gather(&Tensor::zeros(DType::F32, [2]), &vec![[2].into(); 2]).map(drop)
            }
        }
    });
    assert!(error.contains("of a plain tensor") && error.contains("of full (lineage"), "{error}");
}

/// Both ends of a bridge state the same edges, and a parameter goes along its own.
#[test]
fn a_bridge_compares_its_edges() {
    let send = |names: [&'static str; 2], from: usize| {
        let run = move |rank: Rank| {
            let (train, serve) = (Mesh::over(&[("fsdp", 1)], 0..1)?, Mesh::over(&[("tp", 1)], 1..2)?);
            let name = ModulePath::new(names[rank.rank()]);
            let transfer = Transfer::new(DType::F32, [6, 2], layout("(R)"), layout("(R)")).named(name);
            let bridge = Bridge::new(&rank, &train, &serve, [transfer])?;
            if rank.rank() == 0 {
                let (params, ids) = three(&DeviceMesh::on(&rank, &train)?, Plan::default())?;
                return bridge.send([params.value(ids[from])], None).map(drop);
            }
            bridge.send(&[], Some(&DeviceMesh::on(&rank, &serve)?)).map(drop)
        };
        Spmd::new(2).run(run).map(drop).map_err(|e| e.to_string())
    };
    assert_eq!(send(["h.1.w", "h.1.w"], 1), Ok(()));
    let error = send(["h.1.w", "h.2.w"], 1).unwrap_err();
    assert!(error.contains("of h.1.w (lineage") && error.contains("of h.2.w (lineage"), "{error}");
    let error = send(["h.1.w", "h.1.w"], 2).unwrap_err();
    assert!(error.contains("a tensor is another parameter than the planned one; got h.2.w"), "{error}");
}

/// Flight records tell the same.
#[test]
fn flight_records_tell_tensors_apart() {
    let dir = std::env::temp_dir().join(format!("isoshard-lineage-{}", std::process::id()));
    let run = |rank: Rank| {
        let mesh = DeviceMesh::parse(&rank, "fsdp=2")?;
        let x = DTensor::full(&mesh, DType::F32, [4], layout("(S0)"), 1.0)?;
        let y = x.exp()?;
        if rank.rank() == 0 { &x } else { &y }.full_tensor()
    };
    Spmd::new(2).flight_dir(&dir).run(run).expect_err("they differ");
    let report = flight::read(&dir).unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    let brought = &report.mismatches[0].brought;
    assert!(brought.len() == 2, "{report}");
    assert!(
        brought[0].0.contains("of full (lineage") && brought[1].0.contains("of exp (lineage"),
        "{report}"
    );
}
