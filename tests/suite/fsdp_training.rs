//! Training under `fully_shard`: reductions in a dtype of choice, several losses, evaluation that gathers once, and parameters and
//! states in a file; each with the bits of a single rank, and with the calls, bytes and memory that it promises.

use isoshard::comm::{Rank, Tally, spmd};
use isoshard::dtensor::{DTensor, DTensors, DeviceMesh, Gradients, Reduction};
use isoshard::fsdp::{BlockPolicy, Sharding, fully_shard};
use isoshard::nn::{Forward, Gpt, GptConfig, Module, Params, Plan};
use isoshard::ops::Add;
use isoshard::optim::{AdamW, ParamGroup};
use isoshard::placement::{Mesh, SumGroups};
use isoshard::rng::Init;
use isoshard::tensor::{DType, Device, MappedFile, Tensor, storage};
use isoshard::{Error, Result};

use crate::common::shim;

const CONFIG: GptConfig =
    GptConfig { vocabulary: 13, block: 6, layers: 3, heads: 2, width: 8, dropout: 0.0, bias: true };

fn on<T: Send + PartialEq + 'static>(
    mesh: &'static str,
    run: impl Fn(&Rank, &DeviceMesh) -> Result<T> + Send + Sync + 'static,
) -> T {
    let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
    let mut all = spmd(ranks, move |rank| run(&rank, &DeviceMesh::parse(&rank, mesh)?))
        .unwrap_or_else(|e| panic!("{mesh}: {e}"));
    assert!(all.iter().all(|one| *one == all[0]), "{mesh}: ranks differ");
    all.remove(0)
}

/// A GPT in units, and a batch of tokens with their targets.
fn gpt(mesh: &DeviceMesh, sharding: &Sharding, compute: DType) -> Result<(Params, Gpt, [DTensor; 2])> {
    let mut params = Params::new(mesh, Plan::default(), 7)?;
    params.compute_in(compute)?;
    let model = Gpt::new(&mut params, CONFIG)?;
    fully_shard(&mut params, &["h.*"], sharding, &BlockPolicy::default())?;
    let layout = params.batch_layout();
    let text = |from: i64| {
        let text = Tensor::from_vec((from..from + 36).map(|i| i * i % 13).collect(), [6, 6])?;
        DTensor::distribute(mesh, &text, layout.clone())
    };
    Ok((params, model, [text(0)?, text(1)?]))
}

fn bits(params: &Params, gradients: &Gradients) -> Result<Vec<f64>> {
    let of = |value: &DTensor| Ok(gradients.get(value).expect("used").full_tensor()?.to_f64_vec());
    Ok(params.values().map(of).collect::<Result<Vec<_>>>()?.concat())
}

/// Groups by path pattern, on parameters that `fully_shard` has placed.
#[test]
fn groups_of_placed_parameters_have_the_bits_of_a_single_rank() {
    let train = |sharding: fn() -> Sharding| {
        move |_: &Rank, mesh: &DeviceMesh| {
            let (mut params, model, [tokens, targets]) = gpt(mesh, &sharding(), DType::F32)?;
            let head = ParamGroup::new().rate(0.5).decay(0.0);
            let mut optimizer = AdamW::new()
                .betas(0.9, 0.95)
                .decay(0.1)
                .group("wte.**", head)
                .group("h.*.attn.**", ParamGroup::new().betas(0.8, 0.9))
                .group_rate("h.1.**", 0.25)
                .rate(0.01)
                .clip(1.0);
            for _ in 0..3 {
                let mut loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &targets)?;
                optimizer.step(&mut params, &mut loss.backward()?)?;
            }
            params.digest()
        }
    };
    let single = on("dp=1", train(|| Sharding::ddp("dp")));
    assert_eq!(on("dp=3", train(|| Sharding::zero3("dp"))), single);
    assert_eq!(on("dp=2,fsdp=2", train(|| Sharding::hfsdp("dp", "fsdp"))), single);
}

/// Returns the bytes that all ranks receive in a backward pass that gathers nothing, and the gradients.
fn reduced(
    mesh: &'static str,
    mode: Reduction,
    compute: DType,
    reduce_in: Option<(&'static str, DType)>,
) -> (u64, Vec<f64>) {
    let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
    let run = move |rank: Rank| {
        let mesh = &DeviceMesh::parse(&rank, mesh)?;
        mesh.set_reduction(mode);
        let sharding = Sharding::zero2("dp");
        let sharding =
            reduce_in.into_iter().fold(sharding, |all, (units, dtype)| all.reduce_in(units, dtype));
        let (params, model, [tokens, targets]) = gpt(mesh, &sharding, compute)?;
        let mut loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &targets)?;
        let before = mesh.received_bytes();
        let gradients = loss.backward()?;
        let bytes = mesh.received_bytes() - before;
        for value in params.values() {
            assert_eq!(gradients.get(value).expect("used").dtype(), DType::F32);
        }
        Ok((bytes, bits(&params, &gradients)?))
    };
    let all = spmd(ranks, run).unwrap_or_else(|e| panic!("{mesh}: {e}"));
    (all.iter().map(|(bytes, _)| bytes).sum(), all[0].1.clone())
}

#[test]
fn fast_mode_reduces_in_a_dtype_of_choice() {
    let off = |a: &[f64], b: &[f64]| {
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
    };
    let fast = |compute, reduce_in| reduced("dp=2", Reduction::Fast, compute, reduce_in);
    let (bytes, want) = fast(DType::F32, None);
    for narrow in [DType::BF16, DType::F16] {
        let (half, found) = fast(DType::F32, Some(("**", narrow)));
        assert_eq!(2 * half, bytes, "{narrow}");
        assert!(found != want && off(&found, &want) < 0.01, "{narrow}: {}", off(&found, &want));
        // A unit's own dtype: the other two blocks and the root stay f32.
        let (some, _) = fast(DType::F32, Some(("h.1", narrow)));
        assert!(half < some && some < bytes, "{narrow}: {half}, {some}, {bytes}");
    }
    // Parts of bf16 computation that are not rounded between ranks: twice the bytes.
    let (narrow, rounded) = fast(DType::BF16, None);
    let (wide, found) = fast(DType::BF16, Some(("**", DType::F32)));
    assert_eq!((2 * narrow, wide), (wide, bytes));
    assert!(found != rounded && off(&found, &rounded) < 0.02, "{}", off(&found, &rounded));
}

#[test]
fn exact_mode_reduces_in_other_dtypes_only_in_groups() {
    let groups = |wire| Reduction::Grouped(SumGroups::new(4).unwrap().with_wire(wire).unwrap());
    // A dtype that the mode has changes nothing.
    for (mode, dtype) in [(Reduction::Exact, DType::F32), (groups(DType::BF16), DType::BF16)] {
        let single = reduced("dp=1", mode, DType::F32, None).1;
        assert_eq!(reduced("dp=2", mode, DType::F32, Some(("**", dtype))).1, single, "{dtype}");
    }
    // Another one is refused, on one rank too, when units are placed and in a backward pass.
    for mesh in ["dp=1", "dp=2"] {
        let texts = on(mesh, move |_, mesh| {
            let sharding = Sharding::zero3("dp").reduce_in("h.*", DType::BF16);
            let refused = |mode| {
                mesh.set_reduction(mode);
                gpt(mesh, &sharding, DType::F32).map(drop).unwrap_err().to_string()
            };
            let texts = [refused(Reduction::Exact), refused(groups(DType::F16))];
            mesh.set_reduction(Reduction::Fast);
            let (params, model, [tokens, targets]) = gpt(mesh, &sharding, DType::F32)?;
            mesh.set_reduction(Reduction::Exact);
            let mut loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &targets)?;
            let late = loss.backward().map(drop).err().map(|e| e.to_string());
            assert!(late.is_some_and(|text| text.starts_with("backward: exact mode sends sums as f32")));
            mesh.set_reduction(Reduction::Fast);
            let unit = Sharding::zero3("dp").reduce_in("g.*", DType::BF16);
            let texts =
                texts.into_iter().chain([gpt(mesh, &unit, DType::F32).map(drop).unwrap_err().to_string()]);
            let whole = Sharding::zero3("dp").reduce_in("h.*", DType::I64);
            Ok(texts
                .chain([gpt(mesh, &whole, DType::F32).map(drop).unwrap_err().to_string()])
                .collect::<Vec<_>>())
        });
        assert_eq!(
            texts[0],
            "fully_shard: exact mode sends sums as f32, since to round a rank's part would change bits; \
             got bf16 for the gradients of \"h.0\"; declare groups with SumGroups::with_wire(bf16), or reduce in fast mode"
        );
        assert!(texts[1].starts_with("fully_shard: the groups of this program send sums as f16; got bf16"));
        assert!(texts[2].contains("a pattern matches no unit; got \"g.*\""), "{}", texts[2]);
        assert!(texts[3].contains("got i64 at unit \"h.0\""), "{}", texts[3]);
    }
}

/// A loss and a penalty on its logits: one pass, two passes, and the pass of their sum.
#[test]
fn several_losses_share_a_backward_pass() {
    let run = |sharding: fn() -> Sharding, how: usize| {
        move |rank: &Rank, mesh: &DeviceMesh| {
            let (rank, tally) = Tally::of(rank)?;
            let mesh = DeviceMesh::on(&rank, mesh.mesh())?;
            let (mut params, model, [tokens, targets]) = gpt(&mesh, &sharding(), DType::F32)?;
            let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(0.01).clip(1.0);
            let mut calls = 0;
            for _ in 0..2 {
                let cx = Forward::train_without_dropout(&params);
                let logits = model.forward(&cx, &tokens)?;
                let mut loss = logits.cross_entropy(&targets)?.mean_all()?;
                let mut penalty = logits.mul(&logits)?.mean_all()?.mul_scalar(0.1)?;
                drop((cx, logits));
                let mut gradients = Gradients::default();
                let before = tally.total().calls;
                match how {
                    0 => DTensor::backward_all(&mut [&mut loss, &mut penalty], &mut gradients)?,
                    1 => loss.add(&penalty)?.backward_into(&mut gradients)?,
                    _ => {
                        loss.backward_into(&mut gradients)?;
                        penalty.backward_into(&mut gradients)?;
                    }
                }
                calls += tally.total().calls - before;
                drop((loss, penalty));
                optimizer.step(&mut params, &mut gradients)?;
            }
            Ok((params.digest()?, calls))
        }
    };
    for how in 0..3 {
        let (single, _) = on("dp=1", run(|| Sharding::ddp("dp"), how));
        assert_eq!(on("dp=3", run(|| Sharding::zero3("dp"), how)).0, single, "{how}");
        assert_eq!(on("dp=2", run(|| Sharding::zero2("dp"), how)).0, single, "{how}");
    }
    let [at_once, of_sum, twice] = [0, 1, 2].map(|how| on("dp=2", run(|| Sharding::zero3("dp"), how)).1);
    assert!(at_once <= of_sum && at_once < twice, "{at_once}, {of_sum}, {twice}");
}

#[test]
fn wrong_losses_are_refused_and_leave_gradients() {
    on("dp=2", |_, mesh| {
        let (params, model, [tokens, targets]) = gpt(mesh, &Sharding::zero3("dp"), DType::F32)?;
        let loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &targets)?;
        let mut gradients = Gradients::default();
        loss.clone().backward_into(&mut gradients)?;
        let before = bits(&params, &gradients)?;
        let eval = model.loss(&Forward::eval(&params), &tokens, &targets)?;
        let mut refused = |losses: &[&DTensor]| {
            let mut losses: Vec<DTensor> = losses.iter().map(|&loss| loss.clone()).collect();
            let mut losses: Vec<&mut DTensor> = losses.iter_mut().collect();
            DTensor::backward_all(&mut losses, &mut gradients).unwrap_err().to_string()
        };
        assert!(refused(&[]).starts_with("backward: wants losses"));
        assert!(refused(&[&loss, &eval]).contains("does not depend on a leaf"));
        assert!(refused(&[&loss, params.values().next().expect("one")]).contains("wants one element"));
        assert!(bits(&params, &gradients)? == before);
        Ok(())
    });
}

/// Units stay gathered between batches, and training goes on as after any evaluation.
#[test]
fn an_evaluation_of_several_batches_gathers_once() {
    let run = |sharding: fn() -> Sharding, keeps: bool| {
        move |rank: &Rank, mesh: &DeviceMesh| {
            let (rank, tally) = Tally::of(rank)?;
            let mesh = DeviceMesh::on(&rank, mesh.mesh())?;
            let (mut params, model, [tokens, targets]) = gpt(&mesh, &sharding(), DType::BF16)?;
            let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(0.01);
            let (mut losses, mut calls) = (Vec::new(), Vec::new());
            for _ in 0..2 {
                let mut loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &targets)?;
                optimizer.step(&mut params, &mut loss.backward()?)?;
                drop(loss);
                let kept = Forward::eval_gathered(&params);
                for batch in [[&tokens, &targets], [&targets, &tokens], [&tokens, &tokens]] {
                    let before = tally.total().calls;
                    let loss = match keeps {
                        true => model.loss(&kept, batch[0], batch[1])?,
                        false => model.loss(&Forward::eval(&params), batch[0], batch[1])?,
                    };
                    calls.push(tally.total().calls - before);
                    losses.push(loss.item()?);
                    assert!(!loss.has_history());
                }
            }
            Ok((losses, calls))
        }
    };
    let (single, _) = on("dp=1", run(|| Sharding::ddp("dp"), false));
    let (losses, calls) = on("dp=2", run(|| Sharding::zero3("dp"), true));
    assert_eq!(losses, single);
    let (again, every_time) = on("dp=2", run(|| Sharding::zero3("dp"), false));
    assert_eq!(again, single);
    // Three blocks and the root, and the loss's reduction: the later batches have the reduction alone.
    assert_eq!(calls[0], every_time[0]);
    assert_eq!(every_time, [calls[0]; 6]);
    assert_eq!(calls, [calls[0], calls[0] - 4, calls[0] - 4, calls[0], calls[0] - 4, calls[0] - 4]);
}

/// Returns the digest after three steps, the bytes of tensors in the CPU's memory between steps, and those in the file.
fn offloaded(
    rank: &Rank,
    sharding: Sharding,
    compute: DType,
    offload: [bool; 2],
) -> Result<(u64, usize, u64)> {
    let mesh = DeviceMesh::new(rank, &[("dp", rank.world_len())])?;
    let mut params = Params::new(&mesh, Plan::default(), 7)?;
    params.compute_in(compute)?;
    let mut ids = Vec::new();
    for k in 0..6 {
        let init = Init::Normal { mean: 0.0, std: 0.1 };
        ids.push(params.root().child("h").child(k / 2).param(&format!("w{}", k % 2), [64, 64], init)?);
    }
    let file = MappedFile::in_dir(std::env::temp_dir())?;
    if offload[0] {
        params.offload(&file)?;
    }
    fully_shard(&mut params, &["h.*"], &sharding, &BlockPolicy::default())?;
    let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(0.01).clip(1.0);
    if offload[1] {
        optimizer.offload(&params, &file)?;
    }
    let x = DTensor::full(&mesh, compute, [6, 64], params.batch_layout(), 0.5)?;
    let mut kept = None;
    for step in 0..3 {
        let cx = Forward::train_without_dropout(&params);
        let mut y = x.clone();
        for &id in &ids {
            y = y.matmul(&cx.param(id)?)?;
        }
        let mut loss = y.mul(&y)?.sum_all()?;
        drop((cx, y));
        let mut gradients = loss.backward()?;
        // The loss shares the parameters' elements, and a state the moments', so these steps cannot write in place.
        kept = (step < 2).then_some((loss, optimizer.state(&params)?));
        optimizer.step(&mut params, &mut gradients)?;
    }
    drop(kept);
    for &id in ids.iter().filter(|&&id| params.value(id).local().numel() > 0) {
        assert_eq!(params.value(id).local().is_mapped(), offload[0]);
        for moments in optimizer.rule().moments() {
            let state = moments.get(id).expect("three steps");
            assert_eq!(state.local().is_mapped(), offload[1], "{} {}", params.path(id), state.spec());
        }
    }
    let digest = params.digest()?;
    storage::trim_pool(); // takes back the blocks that other ranks have dropped
    let live = storage::pool_stats().live_bytes.saturating_sub(x.local().len_bytes());
    Ok((digest, live, file.live_bytes()))
}

#[test]
fn parameters_and_states_in_a_file_have_the_same_bits_and_take_no_memory() {
    const PARAMETERS: usize = 6 * 64 * 64 * 4;
    for (ranks, sharding) in [(1, Sharding::ddp("dp")), (2, Sharding::zero3("dp"))] {
        let run = |offload| {
            let sharding = sharding.clone();
            let run = move |rank: Rank| offloaded(&rank, sharding.clone(), DType::F32, offload);
            spmd(ranks, run).unwrap_or_else(|e| panic!("{e}"))
        };
        let plain = run([false, false]);
        for (rank, (digest, memory, file)) in plain.iter().enumerate() {
            assert!(*memory >= 3 * PARAMETERS / ranks && *file == 0, "rank {rank}: {memory}, {file}");
            let all = run([true, true]);
            let states = run([false, true]);
            assert_eq!((all[rank].0, states[rank].0), (*digest, *digest), "{ranks} ranks");
            assert_eq!(all[rank].2 as usize, 3 * PARAMETERS / ranks, "whole pages");
            assert_eq!(states[rank].2 as usize, 2 * PARAMETERS / ranks);
            // Another rank may not have dropped a block yet.
            let is_near = |found: usize, want: usize| found.abs_diff(want) <= 64 * 64 * 4;
            assert!(is_near(memory - states[rank].1, 2 * PARAMETERS / ranks), "{memory}, {}", states[rank].1);
            assert!(is_near(memory - all[rank].1, 3 * PARAMETERS / ranks), "{memory}, {}", all[rank].1);
        }
    }
}

/// The emulated device runs the kernels of a CUDA device: the file is in the host's memory there, and updates are computed on the CPU.
#[test]
fn a_devices_parameters_and_states_in_a_file_have_the_bits_of_the_cpu() {
    let Some(device) = shim::device() else { return };
    for (ranks, sharding) in
        [(1, Sharding::ddp("dp")), (2, Sharding::zero3("dp")), (3, Sharding::zero2("dp"))]
    {
        let run = |device: Device, compute, offload| {
            let sharding = sharding.clone();
            let run = move |rank: Rank| {
                let (digest, _, file) = offloaded(&rank.on(device), sharding.clone(), compute, offload)?;
                Ok((digest, file))
            };
            spmd(ranks, run).unwrap_or_else(|e| panic!("{e}"))
        };
        for offload in [[false, false], [true, true], [false, true], [true, false]] {
            for compute in [DType::F32, DType::BF16] {
                let [there, here] = [device, Device::Cpu].map(|device| run(device, compute, offload));
                assert_eq!(there, here, "{ranks} ranks, {compute}, {offload:?}");
            }
        }
    }
}

/// An update with an offloaded operand copies the others to the CPU; if there is no room, all are where they were.
#[test]
fn an_update_without_room_on_the_cpu_gives_its_operands_back() {
    let Some(device) = shim::device() else { return };
    let run = move |rank: Rank| {
        let mesh = DeviceMesh::new(&rank.on(device), &[("dp", 1)])?;
        let mut params = Params::new(&mesh, Plan::default(), 7)?;
        let id = params.root().param("w", [64, 64], Init::Constant(3.0))?;
        let file = MappedFile::in_dir(std::env::temp_dir())?;
        params.offload(&file)?;
        let layout = params.value(id).layout().clone();
        let there = DTensor::ones(&mesh, DType::F32, [64, 64], layout)?;
        let mut ins: DTensors = [there, params.value(id).detach()].into_iter().collect();
        storage::trim_pool();
        storage::set_memory_limit(storage::pool_stats().live_bytes);
        let lacks = DTensor::apply_owned(&Add, &mut ins).unwrap_err();
        storage::set_memory_limit(usize::MAX);
        assert!(matches!(lacks, Error::OutOfMemory(_)), "{lacks}");
        assert!(ins[0].local().device() == device && ins[1].local().is_mapped(), "{ins:?}");
        let sum = DTensor::apply_owned(&Add, &mut ins)?;
        sum[0].full_tensor()?.to_device(Device::Cpu)?.to_vec::<f32>()
    };
    let sums = spmd(1, run).unwrap_or_else(|e| panic!("{e}"));
    assert!(sums[0].iter().all(|&sum| sum == 4f32), "{:?}", &sums[0][..9]);
}

#[test]
fn loaded_states_go_to_the_file() {
    let dir = std::env::temp_dir().join(format!("isoshard-offload-{}", std::process::id()));
    let also = dir.clone();
    on("dp=2", move |_, mesh| {
        let (mut params, model, [tokens, targets]) = gpt(mesh, &Sharding::zero3("dp"), DType::F32)?;
        let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(0.01);
        let file = MappedFile::in_dir(std::env::temp_dir())?;
        params.offload(&file)?;
        optimizer.offload(&params, &file)?;
        let mut loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &targets)?;
        optimizer.step(&mut params, &mut loss.backward()?)?;
        let mut state = isoshard::checkpoint::StateTree::new();
        state.insert_tree("model", params.state()?)?;
        state.insert_tree("optimizer", optimizer.state(&params)?)?;
        isoshard::checkpoint::save(mesh, &dir, &state)?;
        let saved = isoshard::checkpoint::Checkpoint::open(&dir)?;
        let before = params.digest()?;
        params.load_state(&saved.subtree("model"))?;
        optimizer.load_state(&params, &saved.subtree("optimizer"))?;
        assert_eq!(params.digest()?, before);
        let in_file = |value: &DTensor| value.local().is_mapped() || value.local().numel() == 0;
        assert!(params.values().all(in_file));
        for moments in optimizer.rule().moments() {
            assert!(params.ids().all(|id| moments.get(id).is_some_and(in_file)));
        }
        Ok(())
    });
    std::fs::remove_dir_all(also).unwrap();
}

/// The guide's loop has at most 12 lines that a reader sees.
#[test]
fn the_guides_loop_is_short() {
    let guide = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/fsdp.md")).unwrap();
    let (_, section) = guide.split_once("## The loop\n").expect("a section");
    let (_, block) = section.split_once("```rust\n").expect("an example");
    let (block, _) = block.split_once("```").expect("it ends");
    let shown: Vec<&str> =
        block.lines().filter(|line| !line.starts_with("# ") && !line.trim().is_empty()).collect();
    assert!((5..=12).contains(&shown.len()), "{} lines:\n{}", shown.len(), shown.join("\n"));
    for part in ["Gpt::new", "fully_shard", "WarmupCosine", "clip(", "backward", "optimizer.step"] {
        assert!(shown.iter().any(|line| line.contains(part)), "{part}");
    }
    assert!(!shown.iter().any(|line| line.contains("eval")), "training is not called so");
}
