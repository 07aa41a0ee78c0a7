//! Recomputation: losses, gradients and dropout have the bits that they have without it, on every mesh; second derivatives
//! have one rank's; parameters are gathered as often; a second run that differs from the first is refused.

use std::cell::Cell;
use std::rc::Rc;

use isoshard::Result;
use isoshard::comm::{Rank, Tally, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::nn::{BatchNorm, LoraConfig, recompute};
use isoshard::nn::{Forward, Gpt, GptConfig, Linear, Llama, LlamaConfig, Module, Parallel, Params, Plan};
use isoshard::placement::Mesh;
use isoshard::rng::{Generator, Init};
use isoshard::tensor::{DType, Tensor};

pub(crate) type Loss = Box<dyn Fn(&Forward, &DTensor, &DTensor) -> Result<DTensor>>;

pub(crate) fn on(mesh: &'static str, run: impl Fn(&Rank, DeviceMesh) -> Result<()> + Send + Sync + 'static) {
    let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
    let run = move |rank: Rank| run(&rank, DeviceMesh::parse(&rank, mesh)?);
    spmd(ranks, run).unwrap_or_else(|e| panic!("{mesh}: {e}"));
}

pub(crate) fn declare(params: &mut Params, llama: bool, bias: bool, dropout: f64) -> Result<Loss> {
    let (vocabulary, block, layers, heads, width) = (11, 6, 3, 2, 10);
    if llama {
        let (kv_heads, head_width, hidden, base) = (2, 4, 13, 1e4);
        let config = LlamaConfig {
            vocabulary,
            block,
            layers,
            heads,
            kv_heads,
            head_width,
            width,
            hidden,
            base,
            dropout,
        };
        let model = Llama::new(params, config)?;
        return Ok(Box::new(move |cx, tokens, targets| model.loss(cx, tokens, targets)));
    }
    let model = Gpt::new(params, GptConfig { vocabulary, block, layers, heads, width, dropout, bias })?;
    Ok(Box::new(move |cx, tokens, targets| model.loss(cx, tokens, targets)))
}

fn plan(mesh: &DeviceMesh, recomputed: &[&str]) -> Result<Plan> {
    let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: false })?;
    Ok(recomputed.iter().fold(plan, |plan, pattern| plan.recompute(pattern)))
}

pub(crate) fn batch(mesh: &DeviceMesh, plan: &Plan) -> Result<[DTensor; 2]> {
    let text = |from: i64| Tensor::from_vec((from..from + 30).map(|i| i * i % 11).collect(), [5, 6]);
    let put = |text: Tensor| DTensor::distribute(mesh, &text, plan.batch_layout(mesh.mesh()));
    Ok([put(text(0)?)?, put(text(1)?)?])
}

/// The bits of the loss and of all gradients of two passes, and the number of draws.
fn two_passes(
    mesh: &DeviceMesh,
    (llama, compute): (bool, DType),
    recomputed: &[&str],
    keep_context: bool,
) -> Result<(Vec<Vec<u8>>, u64)> {
    let plan = plan(mesh, recomputed)?;
    let [tokens, targets] = batch(mesh, &plan)?;
    let mut params = Params::new(mesh, plan, 7)?;
    params.compute_in(compute)?;
    let loss = declare(&mut params, llama, true, 0.1)?;
    let (mut bits, mut dropout) = (Vec::new(), Generator::new(3));
    for _ in 0..2 {
        let cx = Forward::train(&params, &mut dropout);
        let mut loss = loss(&cx, &tokens, &targets)?;
        let cx = if keep_context { Some(cx) } else { None };
        bits.push(loss.full_tensor()?.as_bytes()?.to_vec());
        let gradients = loss.backward()?;
        drop(cx);
        for value in params.values() {
            bits.push(gradients.get(value).expect("it is used").local().as_bytes()?.to_vec());
        }
    }
    Ok((bits, dropout.draws()))
}

#[test]
fn losses_and_gradients_keep_their_bits() {
    for mesh in ["1", "fsdp=2", "tp=2", "fsdp=3", "dp=2", "fsdp=2,tp=2"] {
        on(mesh, move |_, mesh| {
            for model in [(false, DType::F32), (true, DType::F32), (true, DType::BF16)] {
                let plain = two_passes(&mesh, model, &[], false)?;
                assert!(plain.1 > 0, "dropout is drawn");
                for (patterns, keep_context) in [(&["h.*"][..], false), (&["h.0", "h.2"], true)] {
                    let again = two_passes(&mesh, model, patterns, keep_context)?;
                    assert!(again == plain, "{mesh:?}, {model:?}, {patterns:?}");
                }
            }
            Ok(())
        });
    }
}

/// Adapters and frozen parameters inside blocks.
#[test]
fn adapters_in_recomputed_blocks_learn_with_the_same_bits() {
    for mesh in ["1", "fsdp=2", "tp=2"] {
        on(mesh, move |_, mesh| {
            let gradients = |recomputed: &[&str]| -> Result<Vec<Option<Vec<u8>>>> {
                let plan = plan(&mesh, recomputed)?;
                let [tokens, targets] = batch(&mesh, &plan)?;
                let mut params = Params::new(&mesh, plan, 7)?;
                let config = isoshard::nn::DecoderConfig::new(
                    11,
                    6,
                    8,
                    isoshard::nn::NormConfig::Rms { eps: 1e-6, unit_offset: false },
                    vec![
                        isoshard::nn::DecoderLayer {
                            attention: isoshard::nn::SelfAttentionConfig::new(2, 2, 4),
                            feed_forward: isoshard::nn::FeedForwardConfig::Mlp(isoshard::nn::MlpConfig {
                                hidden: 12,
                                gated: false,
                                activation: isoshard::nn::Activation::Gelu,
                                bias: true,
                                dropout: 0.0,
                            }),
                        };
                        2
                    ],
                );
                let mut model = isoshard::nn::Decoder::new(&mut params, config)?;
                model.add_lora(
                    &mut params,
                    "h.*.attn.out",
                    LoraConfig { rank: 2, alpha: 4.0, dropout: 0.1 },
                )?;
                params.unfreeze("h.1.mlp.**")?;
                let mut loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &targets)?;
                let gradients = loss.backward()?;
                let bits = |x: &DTensor| x.local().as_bytes().map(<[u8]>::to_vec);
                params.values().map(|value| gradients.get(value).map(bits).transpose()).collect()
            };
            let plain = gradients(&[])?;
            assert!(plain.iter().any(Option::is_some) && plain.iter().any(Option::is_none));
            assert!(gradients(&["h.*"])? == plain);
            Ok(())
        });
    }
}

/// Without biases, whose values no derivative reads, a unit is gathered once in either backward pass, by one call.
/// Reductions are the same calls.
#[test]
fn units_are_gathered_once_for_the_second_run_and_the_derivative() {
    on("fsdp=2", |rank, _| {
        let calls = |recomputed: &[&str]| -> Result<Vec<(String, u64)>> {
            let (rank, tally) = Tally::of(rank)?;
            let mesh = DeviceMesh::parse(&rank, "fsdp=2")?;
            let plan = plan(&mesh, recomputed)?;
            let [tokens, targets] = batch(&mesh, &plan)?;
            let mut params = Params::new(&mesh, plan, 7)?;
            let loss = declare(&mut params, false, false, 0.1)?;
            let mut dropout = Generator::new(3);
            let mut loss = loss(&Forward::train(&params, &mut dropout), &tokens, &targets)?;
            loss.backward()?;
            Ok(tally
                .rows()
                .into_iter()
                .map(|row| (format!("{} {}", row.call, row.group), row.total.calls))
                .collect())
        };
        let (mut plain, mut again) = (calls(&[])?, calls(&["h.*"])?);
        plain.sort();
        again.sort();
        assert_eq!(plain, again);
        assert!(
            plain.iter().any(|(call, count)| call.starts_with("all_gather fsdp") && *count == 6),
            "{plain:?}"
        );
        Ok(())
    });
}

#[test]
fn captured_tensors_operands_that_return_and_several_results() {
    for mesh in ["dp=1", "dp=2", "dp=3"] {
        on(mesh, |_, mesh| {
            let values = |from: i32, layout: &str| {
                let all = (from..from + 35).map(|i| (i as f32 * 0.7).sin() * 10f32.powi(i % 5 - 2)).collect();
                DTensor::distribute(&mesh, &Tensor::from_vec(all, [5, 7])?, layout)?.requires_grad()
            };
            let (x, w, v) = (values(0, "(S0)")?, values(40, "(R)")?, values(80, "(R)")?);
            let function = |w: DTensor, v: DTensor| {
                move |ins: &[DTensor]| -> Result<Vec<DTensor>> {
                    let y = ins[0].mul(&w)?.tanh()?;
                    let z = y.matmul(&v.transpose(0, 1)?)?;
                    Ok(vec![y.mul(&w)?, ins[0].clone(), z.clone(), z.matmul(&v)?.add(&ins[0])?])
                }
            };
            // The captured tensors are used outside as well, before and after.
            let gradients = |recomputed: bool| -> Result<Vec<Vec<f32>>> {
                let h = x.mul(&w)?.add(&v)?;
                let f = function(w.clone(), v.clone());
                let ys = if recomputed {
                    DTensor::recompute("f", &[&h], f)?
                } else {
                    f(std::slice::from_ref(&h))?
                };
                let mut loss = ys[0].mul(&ys[3])?.add(&ys[1])?.mul(&w)?.sum_all()?.add(&ys[2].sum_all()?)?;
                let gradients = loss.backward()?;
                let of = |leaf: &DTensor| gradients.get(leaf).expect("a leaf").full_tensor()?.to_vec::<f32>();
                let mut all = vec![of(&x)?, of(&w)?, of(&v)?];
                // One result alone, and the gradient of an inner tensor.
                let one = ys[2].sum_all()?.grad(&[&h, &v, &w])?;
                all.extend(one.iter().map(|g| g.full_tensor()?.to_vec::<f32>()).collect::<Result<Vec<_>>>()?);
                Ok(all)
            };
            assert_eq!(gradients(true)?, gradients(false)?);
            Ok(())
        });
    }
}

/// Second and third derivatives through recomputed functions, one inside another.
#[test]
fn gradients_of_gradients() {
    on("dp=2", |_, mesh| {
        let x = Tensor::from_vec(vec![0.3f64, -1.0, 2.0, 0.7, 1.5], [5])?;
        let x = DTensor::distribute(&mesh, &x, "(S0)")?.requires_grad()?;
        let inner = |ins: &[DTensor]| -> Result<Vec<DTensor>> { Ok(vec![ins[0].tanh()?.mul(&ins[0])?]) };
        let outer = move |ins: &[DTensor]| {
            let y = DTensor::recompute("inner", &[&ins[0].sin()?], inner)?.remove(0);
            Ok(vec![y.mul(&ins[0])?])
        };
        let plain = |x: &DTensor| inner(&[x.sin()?])?.remove(0).mul(x);
        let derivatives = |recomputed: bool| -> Result<Vec<Vec<f64>>> {
            let operand = x.mul(&x)?;
            let mut y = match recomputed {
                true => DTensor::recompute("outer", &[&operand], outer)?.remove(0),
                false => plain(&operand)?,
            };
            let mut all = Vec::new();
            for _ in 0..3 {
                y = y.sum_all()?.grad(&[&x])?.remove(0);
                all.push(y.full_tensor()?.to_vec::<f64>()?);
            }
            let last = y.sum_all()?.backward()?;
            all.push(last.get(&x).expect("a leaf").full_tensor()?.to_vec()?);
            Ok(all)
        };
        let (again, plain) = (derivatives(true)?, derivatives(false)?);
        assert_eq!(again[0], plain[0]);
        // The same terms are added in another order.
        for (a, b) in again.iter().flatten().zip(plain.iter().flatten()) {
            assert!((a - b).abs() <= 1e-13 * b.abs().max(1.0), "{a} for {b}");
        }
        assert!(plain[3].iter().all(|v| v.is_finite() && *v != 0.0), "{plain:?}");
        Ok(())
    });
}

/// A gradient penalty of a whole model, whose blocks are recomputed and whose parameters are gathered: the same bits on
/// every mesh, and up to rounding those without recomputation.
#[test]
fn a_gradient_penalty_through_blocks() {
    let gradients = |mesh: &'static str, recomputed: &'static [&'static str]| {
        let run = move |rank: Rank| {
            let mesh = DeviceMesh::parse(&rank, mesh)?;
            let plan = plan(&mesh, recomputed)?;
            let [tokens, targets] = batch(&mesh, &plan)?;
            let mut params = Params::new(&mesh, plan, 7)?;
            let loss = declare(&mut params, true, true, 0.0)?;
            let loss = loss(&Forward::train_without_dropout(&params), &tokens, &targets)?;
            let of = params.value(params.find("h.1.mlp.down.weight").expect("declared"));
            let penalty = loss.grad(&[of])?.remove(0);
            let gradients = penalty.mul(&penalty)?.sum_all()?.backward()?;
            let value = |value: &DTensor| Some(gradients.get(value)?.full_tensor().map(|x| x.to_f64_vec()));
            params.values().filter_map(value).collect::<Result<Vec<_>>>()
        };
        spmd(Mesh::parse(mesh, 0).unwrap().rank_len(), run)
            .unwrap_or_else(|e| panic!("{mesh}: {e}"))
            .remove(0)
    };
    let again = gradients("1", &["h.*"]);
    assert!(again == gradients("fsdp=2", &["h.*"]));
    let plain = gradients("1", &[]);
    assert!(plain.len() > 5);
    for (a, b) in again.iter().zip(&plain) {
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let off = norm(&mut a.iter().zip(b).map(|(a, b)| a - b));
        assert!(off <= 1e-4 * norm(&mut b.iter().copied()), "{off}");
    }
}

#[test]
fn a_pass_without_history_runs_once() {
    on("1", |_, mesh| {
        let params = Params::new(&mesh, Plan::default(), 7)?;
        let runs = Rc::new(Cell::new(0));
        let run = |cx: &Forward| -> Result<DTensor> {
            let counted = runs.clone();
            let x = DTensor::full(&mesh, DType::F32, [3], "()", 1.0)?.requires_grad()?;
            recompute(cx, &[&x], move |_, ins| {
                counted.set(counted.get() + 1);
                ins[0].exp()
            })
        };
        assert!(!run(&Forward::eval(&params))?.has_history() && runs.get() == 1);
        let y = run(&Forward::train_without_dropout(&params))?;
        assert_eq!(runs.get(), 2);
        y.sum_all()?.backward()?;
        y.sum_all()?.backward()?;
        assert_eq!(runs.get(), 4, "once more in each backward pass");
        Ok(())
    });
}

#[test]
fn running_averages_move_once() {
    on("dp=2", |_, mesh| {
        let mut params = Params::new(&mesh, Plan::default(), 7)?;
        let norm = Rc::new(BatchNorm::new(params.root().child("norm"), 1, 0.5)?);
        let x = Tensor::from_vec(vec![100.0f32, 300.0], [2, 1])?;
        let x = DTensor::distribute(&mesh, &x, "(S0)")?.requires_grad()?;
        let inside = norm.clone();
        let cx = Forward::train_without_dropout(&params);
        let y = recompute(&cx, &[&x], move |cx, ins| inside.forward(cx, &ins[0]))?;
        y.sum_all()?.backward()?;
        // Half of 0 and 200; a second time would give 150.
        assert_eq!(norm.running().expect("trained").mean.full_tensor()?.to_vec::<f32>()?, [100.0]);
        Ok(())
    });
}

#[test]
fn a_second_run_that_differs_is_refused() {
    on("fsdp=2", |_, mesh| {
        let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
        let init = Init::Normal { mean: 0.0, std: 1.0 };
        let map = |params: &mut Params, i: usize| {
            Linear::without_bias(params.root().child("h").child(i), 3, 3, init)
        };
        let maps = [map(&mut params, 0)?, map(&mut params, 1)?];
        let x = DTensor::full(&mesh, DType::F32, [4, 3], "(S0)", 1.0)?.requires_grad()?;
        let other = x.exp()?;
        type Run = fn(&Forward, &DTensor, &DTensor, &[Linear; 2], bool) -> Result<DTensor>;
        let cases: [(Run, &str); 5] = [
            (
                |_, x, _, _, again| if again { x.sum(&[0], false) } else { x.exp() },
                "recompute: the second run gives other results than the first; got ",
            ),
            (
                |_, x, other, _, again| if again { x.mul(other) } else { x.exp() },
                "recompute: the second run depends on a tensor on which the first did not; got f32[4, 3]@(fsdp:S0)",
            ),
            (
                |_, x, other, _, again| if again { x.mul(&other.detach()) } else { x.mul(other) },
                "recompute: the second run does not depend on a tensor on which the first did; got f32[4, 3]@(fsdp:S0)",
            ),
            (
                |cx, x, _, _, again| if again { x.exp() } else { cx.dropout(x.exp()?, 0.5) },
                "recompute: the second run of a function draws as often as the first; got 0 draws for 1",
            ),
            (
                |cx, x, _, maps, again| maps[usize::from(again)].forward(cx, x),
                "recompute: the second run of a function reads the parameters that the first run read; got h.1.weight",
            ),
        ];
        for (run, text) in cases {
            let mut dropout = Generator::new(1);
            let cx = Forward::train(&params, &mut dropout);
            let (calls, other, maps) = (Cell::new(0), other.clone(), maps.clone());
            let f = move |cx: &Forward, ins: &[DTensor]| {
                calls.set(calls.get() + 1);
                run(cx, &ins[0], &other, &maps, calls.get() > 1)
            };
            let mut y = recompute(&cx, &[&x], f)?.sum_all()?;
            let said = y.backward().unwrap_err().to_string();
            assert!(said.starts_with(text), "{said}");
        }
        let calls = Cell::new(0);
        let ys = DTensor::recompute("f", &[&x], move |ins| {
            calls.set(calls.get() + 1);
            let y = ins[0].exp()?;
            Ok(if calls.get() > 1 { vec![y.detach(), y] } else { vec![y.clone(), y.detach()] })
        })?;
        let said = ys[0].sum_all()?.backward().unwrap_err().to_string();
        let text = "f: the same results of both runs depend on tensors with gradients; got result 0 of one run alone";
        assert!(said.starts_with(text), "{said}");
        let cx = Forward::train_without_dropout(&params);
        let said = cx.block("h.7", &[&x], |_, ins| Ok(ins[0].clone())).unwrap_err().to_string();
        assert_eq!(
            said,
            "block: no module declared the block; got \"h.7\"; declare it with Scope::block_here"
        );
        for plan in [Plan::default().recompute("layers.*"), Plan::default().recompute_cheap("layers.*")] {
            let mut params = Params::new(&mesh, plan, 7)?;
            drop(declare(&mut params, false, true, 0.0)?);
            let said = params.check_plan().unwrap_err().to_string();
            assert!(
                said.starts_with("plan: a pattern matches no block; got \"layers.*\" among 3 block(s)"),
                "{said}"
            );
        }
        Ok(())
    });
}
