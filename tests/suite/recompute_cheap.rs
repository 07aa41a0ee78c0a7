//! Cheap calls that the backward pass makes again: losses and gradients of any order keep their bits on every mesh, calls and
//! bytes of communication their number, and values are freed.

use isoshard::Result;
use isoshard::comm::{DryRun, Tally};
use isoshard::dtensor::{DTensor, DeviceMesh, Reduction};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::optim::Sgd;
use isoshard::placement::SumGroups;
use isoshard::rng::{Generator, Init};
use isoshard::tensor::{DType, Tensor};

use crate::recompute::{batch, declare, on};

/// The values and the communication of a model's passes.
#[derive(Debug, PartialEq)]
struct Step {
    /// The bits of the loss and of all gradients, of a pass that keeps the tape and of one that frees it.
    bits: Vec<Vec<u8>>,
    calls: Vec<(String, u64, u64)>,
}

fn step(
    mesh: &DeviceMesh,
    tally: &Tally,
    (llama, compute): (bool, DType),
    again: impl Fn(Plan) -> Plan,
) -> Result<Step> {
    let plan = again(Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: false })?);
    let [tokens, targets] = batch(mesh, &plan)?;
    let mut params = Params::new(mesh, plan, 7)?;
    params.compute_in(compute)?;
    let loss = declare(&mut params, llama, true, 0.1)?;
    let (mut bits, mut dropout) = (Vec::new(), Generator::new(3));
    let before = tally.rows();
    for frees in [false, true] {
        let mut loss = loss(&Forward::train(&params, &mut dropout), &tokens, &targets)?;
        bits.push(loss.full_tensor()?.as_bytes()?.to_vec());
        let gradients = if frees { loss.backward()? } else { loss.backward_keeping()? };
        for value in params.values() {
            bits.push(gradients.get(value).expect("it is used").local().as_bytes()?.to_vec());
        }
    }
    let of_before = |call: &str, group: &str| {
        let row = before.iter().find(|row| row.call == call && row.group == group);
        row.map_or((0, 0), |row| (row.total.calls, row.total.received_bytes))
    };
    let calls = tally.rows().into_iter().map(|row| {
        let (calls, bytes) = of_before(row.call, &row.group);
        (format!("{} {}", row.call, row.group), row.total.calls - calls, row.total.received_bytes - bytes)
    });
    let mut calls: Vec<_> = calls.filter(|(_, calls, _)| *calls > 0).collect();
    calls.sort();
    Ok(Step { bits, calls })
}

#[test]
fn models_keep_their_bits_and_their_calls() {
    for axes in ["1", "fsdp=2", "tp=2", "fsdp=3", "dp=2", "fsdp=2,tp=2"] {
        on(axes, move |rank, _| {
            let (rank, tally) = Tally::of(rank)?;
            let mesh = DeviceMesh::parse(&rank, axes)?;
            let groups = Reduction::Grouped(SumGroups::new(4)?);
            for reduction in [Reduction::Exact, Reduction::Fast, groups] {
                mesh.set_reduction(reduction);
                for model in [(false, DType::F32), (true, DType::F32), (true, DType::BF16)] {
                    let plain = step(&mesh, &tally, model, |plan| plan)?;
                    let cheap = step(&mesh, &tally, model, |plan| plan.recompute_cheap("h.*"))?;
                    assert!(
                        cheap == plain,
                        "{axes}, {model:?}, {reduction:?}: {:?} {:?}",
                        cheap.calls,
                        plain.calls
                    );
                    // One block is recomputed as a whole.
                    let mixed =
                        step(&mesh, &tally, model, |plan| plan.recompute_cheap("h.*").recompute("h.1"))?;
                    assert!(mixed.bits == plain.bits, "{axes}, {model:?}, {reduction:?}");
                }
            }
            Ok(())
        });
    }
}

fn values(mesh: &DeviceMesh, layout: &str) -> Result<DTensor> {
    let all = (0..64).map(|i| (f64::from(i) * 0.7).sin() * 2.0).collect();
    DTensor::distribute(mesh, &Tensor::from_vec(all, [64])?, layout)?.requires_grad()
}

#[test]
fn gradients_of_gradients_keep_their_bits() {
    on("dp=2", |_, mesh| {
        let x = values(&mesh, "(S0)")?;
        let derivatives = || -> Result<Vec<Vec<f64>>> {
            // A product of results that are computed again, and a view of one.
            let mut y = x.gelu()?.mul(&x.sin()?)?.square()?.reshape([8, 8])?.square()?;
            let mut all = Vec::new();
            for _ in 0..3 {
                y = y.sum_all()?.grad(&[&x])?.remove(0);
                all.push(y.full_tensor()?.to_vec::<f64>()?);
            }
            all.push(y.sum_all()?.backward()?.get(&x).expect("a leaf").full_tensor()?.to_vec()?);
            Ok(all)
        };
        let plain = derivatives()?;
        let guard = mesh.recompute_cheap();
        let again = derivatives()?;
        drop(guard);
        assert_eq!(again, plain);
        assert!(plain[3].iter().all(|v| v.is_finite()));
        Ok(())
    });
}

/// Each value of a chain is computed again from one at most two calls before it.
#[test]
fn a_chain_is_not_computed_from_its_start() {
    on("1", |_, mesh| {
        let x = values(&mesh, "()")?;
        const LEN: usize = 100;
        let calls = || -> Result<(u64, Vec<f64>)> {
            let tally = mesh.tally_work();
            let mut y = x.clone();
            for _ in 0..LEN {
                y = y.sin()?;
            }
            let gradients = y.sum_all()?.backward()?;
            Ok((tally.total().calls, gradients.get(&x).expect("a leaf").local().to_vec()?))
        };
        let plain = calls()?;
        let guard = mesh.recompute_cheap();
        let again = calls()?;
        drop(guard);
        assert_eq!(again.1, plain.1);
        // One of three is kept; the others take one call and two.
        assert_eq!(again.0 - plain.0, LEN as u64 - 1, "{again:?}");
        Ok(())
    });
}

/// A leaf that was a result has the values that it is given.
#[test]
fn a_leaf_is_not_computed_again() {
    on("1", |_, mesh| {
        let x = values(&mesh, "()")?;
        let _guard = mesh.recompute_cheap();
        let mut params = Params::new(&mesh, Plan::default(), 7)?;
        let w = params.root().param("w", [64], Init::Ones)?;
        params.set(w, x.gelu()?.cast(DType::F32)?.detach())?;
        let mut sgd = Sgd::new();
        for _ in 0..2 {
            let before = params.value(w).local().to_vec::<f32>()?;
            let mut gradients = params.value(w).square()?.sum_all()?.backward()?;
            let twice: Vec<f32> = before.iter().map(|w| 2.0 * w).collect();
            assert_eq!(gradients.get(params.value(w)).expect("a leaf").local().to_vec::<f32>()?, twice);
            let one = DTensor::ones(&mesh, DType::F32, [], "()")?;
            sgd.step(&mut params, &mut gradients, &one, 0.25)?;
        }
        let leaf = x.gelu()?.requires_grad()?;
        let tally = mesh.tally_work();
        let of_leaf = leaf.square()?.sum_all()?.backward()?;
        assert!(of_leaf.get(&leaf).is_some() && of_leaf.get(&x).is_none());
        assert!(
            tally.rows().iter().all(|row| row.operator != "gelu"),
            "the call that made it is not repeated"
        );
        Ok(())
    });
}

/// The bytes that are alive after a forward pass of a GPT's blocks, by a dry run.
fn bytes_of_forward(again: impl Fn(Plan) -> Plan, layers: usize) -> Result<usize> {
    let dry = DryRun::new(1, 0)?;
    let mesh = DeviceMesh::parse(&dry.rank()?, "1")?;
    let mut params = Params::new(&mesh, again(Plan::default()), 7)?;
    let config =
        GptConfig { vocabulary: 65, block: 256, layers, heads: 6, width: 384, dropout: 0.0, bias: true };
    let model = Gpt::new(&mut params, config)?;
    let tokens = DTensor::zeros(&mesh, DType::I64, [4, 256], "()")?;
    let before = dry.report().live_bytes;
    let loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &tokens)?;
    let bytes = dry.report().live_bytes - before;
    drop(loss);
    Ok(bytes)
}

#[test]
fn a_block_keeps_11_vectors_of_a_token_instead_of_17() {
    let of_block = |again: fn(Plan) -> Plan| {
        let [two, one] = [2, 1].map(|layers| bytes_of_forward(again, layers).unwrap());
        two - one
    };
    let vector = 4 * 256 * 384 * 4;
    let [plain, cheap] = [of_block(|plan| plan), of_block(|plan| plan.recompute_cheap("h.*"))];
    // Besides vectors, the means and deviations of two norms and the sums of attention's rows.
    let others = 4 * 256 * (4 + 2 * 6) * 4;
    let fits = |bytes: usize, vectors: usize| bytes >= vectors * vector && bytes <= vectors * vector + others;
    assert!(fits(plain, 17) && fits(cheap, 11), "{plain} and {cheap} bytes; a vector has {vector}");
}
