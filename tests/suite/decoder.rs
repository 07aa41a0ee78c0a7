//! Decoders as GPT-2, Llama, Mistral, Qwen, Gemma and mixtures of experts configure them, with sizes that no mesh
//! divides evenly: scores, losses and gradients have one rank's bits on every mesh. The pieces of fused parameters are
//! the maps that the layers compute.

use isoshard::comm::{Rank, spmd};
use isoshard::dtensor::{AttentionOptions, DTensor, DeviceMesh};
use isoshard::nn::{
    Activation, Decoder, DecoderConfig, DecoderLayer, ExpertWeights, FeedForwardConfig, Forward, LoraConfig,
    Mlp, MlpConfig, Module, MoeConfig, NormConfig, Parallel, Params, Plan, RotaryConfig, RotaryScaling,
    SelfAttention, SelfAttentionConfig, Sequences,
};
use isoshard::ops::{Llama3Scaling, YarnScaling};
use isoshard::optim::{AdamW, global_norm};
use isoshard::placement::{Layout, Mesh};
use isoshard::rng::{Generator, Init, bits32};
use isoshard::tensor::{DType, Tensor};
use isoshard::testing::{Equivalence, Trial};
use isoshard::{Error, Result};

const VOCABULARY: usize = 29;
const WIDTH: usize = 13;
const HIDDEN: usize = 22;
const BATCH: usize = 3;
const TIME: usize = 7;
const RMS: NormConfig = NormConfig::Rms { eps: 1e-6, unit_offset: false };
const GEMMA: NormConfig = NormConfig::Rms { eps: 1e-6, unit_offset: true };
const MESHES: [&str; 5] = ["fsdp=2", "fsdp=3", "tp=2", "dp=2,tp=2", "fsdp=2,tp=2"];

/// Four query heads of width 6, two heads of keys and values, plain rotary positions.
fn attention() -> SelfAttentionConfig {
    SelfAttentionConfig { rotary: Some(RotaryConfig::plain(1e4)), ..SelfAttentionConfig::new(4, 2, 6) }
}

fn mlp(hidden: usize, gated: bool, activation: Activation, bias: bool) -> FeedForwardConfig {
    FeedForwardConfig::Mlp(MlpConfig { hidden, gated, activation, bias, dropout: 0.1 })
}

fn swiglu() -> FeedForwardConfig {
    mlp(HIDDEN, true, Activation::Silu, false)
}

fn config(norm: NormConfig, layers: Vec<DecoderLayer>) -> DecoderConfig {
    DecoderConfig { init_std: 0.3, dropout: 0.1, ..DecoderConfig::new(VOCABULARY, TIME, WIDTH, norm, layers) }
}

/// Two layers of this attention and feed-forward part.
fn two(norm: NormConfig, attention: SelfAttentionConfig, feed_forward: FeedForwardConfig) -> DecoderConfig {
    config(norm, vec![DecoderLayer { attention, feed_forward }; 2])
}

fn gpt2() -> DecoderConfig {
    let attention = SelfAttentionConfig {
        qkv_bias: true,
        out_bias: true,
        attention_dropout: 0.1,
        dropout: 0.1,
        ..SelfAttentionConfig::new(4, 4, 3)
    };
    let norm = NormConfig::Layer { eps: 1e-3, bias: true };
    let mlp = mlp(HIDDEN, false, Activation::GeluTanh, true);
    DecoderConfig { learned_positions: true, tied_head: true, ..two(norm, attention, mlp) }
}

fn gemma(window: [Option<usize>; 2]) -> DecoderConfig {
    let layer = |window| DecoderLayer {
        attention: SelfAttentionConfig { window, scale: Some(0.3), soft_cap: Some(5.0), ..attention() },
        feed_forward: mlp(HIDDEN, true, Activation::GeluTanh, false),
    };
    DecoderConfig {
        embedding_scale: Some((WIDTH as f64).sqrt()),
        norm_results: true,
        tied_head: true,
        score_soft_cap: Some(3.0),
        ..config(GEMMA, window.map(layer).to_vec())
    }
}

fn experts(weights: ExpertWeights, shared: bool) -> FeedForwardConfig {
    FeedForwardConfig::Moe(MoeConfig {
        width: WIDTH,
        hidden: 10,
        experts: 5,
        top_k: 2,
        capacity_factor: None,
        gated: true,
        activation: Activation::Silu,
        weights,
        shared_hidden: shared.then_some(HIDDEN),
        shared_gate: shared,
        dropout: 0.0,
    })
}

/// Computes scores, the loss and all gradients, with dropout, and then two steps of training.
fn run(mesh: &Trial, config: DecoderConfig, sequence: bool) -> Result<()> {
    let heads = config.layers[0].attention.kv_heads;
    let plan = Plan::transformer(mesh.mesh(), Parallel { heads, sequence })?;
    let layout = plan.batch_layout(mesh.mesh());
    let mut params = Params::new(mesh, plan, 5)?;
    let model = Decoder::new(&mut params, config)?;
    let mut words = vec![0; 2 * BATCH * TIME];
    bits32(Generator::new(9).next_draw(), 0, &mut words);
    let number = |w: &u32| (*w as usize % VOCABULARY) as i64;
    let put = |x: Vec<i64>| DTensor::distribute(mesh, &Tensor::from_vec(x, [BATCH, TIME])?, layout.clone());
    let tokens = put(words[..BATCH * TIME].iter().map(number).collect())?;
    // Some tokens, and a whole row, are left out of the loss.
    let target = |(i, w): (usize, &u32)| if i % 5 == 1 || i / TIME == 1 { -100 } else { number(w) };
    let targets = put(words[BATCH * TIME..].iter().enumerate().map(target).collect())?;
    mesh.record_params(&params)?;
    mesh.record("scores", &model.forward(&Forward::eval(&params), &tokens)?)?;
    let mut dropout = Generator::new(5).child("dropout");
    let mut optimizer = AdamW::new().betas(0.9, 0.99).decay(0.1);
    for _ in 0..2 {
        let mut loss = model.loss(&Forward::train(&params, &mut dropout), &tokens, &targets)?;
        let mut grads = loss.backward()?;
        mesh.record("loss", &loss)?;
        for id in params.ids() {
            let grad = grads.get(params.value(id));
            let grad = grad.unwrap_or_else(|| panic!("{} has no gradient", params.path(id)));
            mesh.record(format!("gradient of {}", params.path(id)), grad)?;
        }
        mesh.record("norm", &global_norm(params.ids().filter_map(|id| grads.get(params.value(id))))?)?;
        let one = DTensor::full(mesh, DType::F32, [], Layout::replicated(mesh.mesh().ndim()), 1.0)?;
        optimizer.step(&mut params, &mut grads, &one, 1e-2)?;
        mesh.next_step();
    }
    mesh.record_params(&params)
}

fn one_result(config: DecoderConfig) {
    for sequence in [false, true] {
        let own = config.clone();
        let meshes = MESHES.into_iter().filter(|mesh| !sequence || mesh.contains("tp"));
        Equivalence::new(move |mesh| run(mesh, own.clone(), sequence)).meshes(meshes).assert();
    }
}

#[test]
fn gpt_2() {
    one_result(gpt2());
}

#[test]
fn llama_with_an_odd_hidden_width_and_scaled_positions() {
    one_result(two(RMS, attention(), mlp(101, true, Activation::Silu, true)));
    let scalings = [
        RotaryScaling::Linear(4.0),
        RotaryScaling::Llama3(Llama3Scaling {
            factor: 8.0,
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original_context: 16.0,
        }),
        RotaryScaling::Yarn(YarnScaling {
            factor: 4.0,
            fast_turns: 32.0,
            slow_turns: 1.0,
            original_context: 16.0,
            attention_factor: None,
        }),
    ];
    let layer = |scaling| {
        let rotary = RotaryConfig { base: 1e4, width: Some(4), scaling };
        DecoderLayer {
            attention: SelfAttentionConfig { rotary: Some(rotary), ..attention() },
            feed_forward: swiglu(),
        }
    };
    one_result(config(RMS, scalings.map(layer).to_vec()));
}

#[test]
fn mistral_and_qwen() {
    one_result(two(RMS, SelfAttentionConfig { window: Some(3), ..attention() }, swiglu()));
    let qwen2 = SelfAttentionConfig { qkv_bias: true, ..attention() };
    one_result(DecoderConfig { tied_head: true, ..two(RMS, qwen2, swiglu()) });
    one_result(two(RMS, SelfAttentionConfig { head_norm: Some(RMS), ..attention() }, swiglu()));
}

#[test]
fn gemma_2_and_3() {
    one_result(gemma([Some(3), None]));
    let mut third = gemma([Some(4), None]);
    for layer in &mut third.layers {
        (layer.attention.soft_cap, layer.attention.head_norm) = (None, Some(GEMMA));
    }
    let scaling = RotaryScaling::Linear(8.0);
    third.layers[1].attention.rotary = Some(RotaryConfig { scaling, ..RotaryConfig::plain(1e6) });
    third.score_soft_cap = None;
    one_result(third);
}

#[test]
fn mixtures_of_experts() {
    one_result(two(RMS, attention(), experts(ExpertWeights::SoftmaxOfChosen, false)));
    let layer = |feed_forward| DecoderLayer { attention: attention(), feed_forward };
    let weights = ExpertWeights::SoftmaxOfAll;
    one_result(config(RMS, vec![layer(swiglu()), layer(experts(weights, true))]));
}

/// Returns the model's parameters and itself on a single rank.
fn alone(f: impl Fn(&DeviceMesh, Params) -> Result<()> + Send + Sync + 'static) {
    let run = move |rank: Rank| {
        let mesh = DeviceMesh::new(&rank, &[])?;
        f(&mesh, Params::new(&mesh, Plan::default(), 3)?)
    };
    spmd(1, run).unwrap_or_else(|e| panic!("{e}"));
}

fn near(what: &str, a: &DTensor, b: &DTensor) -> Result<()> {
    let (a, b) = (a.full_tensor()?.to_f64_vec(), b.full_tensor()?.to_f64_vec());
    let largest = b.iter().fold(0.0, |m: f64, b| m.max(b.abs()));
    assert!(largest > 0.0 && a.len() == b.len(), "{what}");
    let worst = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    // Sums of at most 24 terms, each rounded by 2^-24.
    assert!(worst <= 1e-5 * largest, "{what}: {worst} of {largest}");
    Ok(())
}

/// Fused layers compute what their pieces say, map by map.
#[test]
fn pieces_are_the_maps_that_layers_compute() {
    alone(|mesh, mut params| {
        let init = Init::Normal { mean: 0.0, std: 0.5 };
        let options = SelfAttentionConfig { qkv_bias: true, ..attention() };
        let attention = SelfAttention::new(params.root().child("attn"), WIDTH, options, init)?;
        let config = MlpConfig { bias: true, ..MlpConfig::gated(66) };
        let gated = Mlp::new(params.root().child("mlp"), WIDTH, config, init)?;
        for path in ["attn.qkv.bias", "mlp.gate_up.bias"] {
            let id = params.find(path).expect("declared");
            let shape = params.value(id).shape().clone();
            let values = DTensor::randn(mesh, DType::F32, shape, "()", &mut Generator::new(4))?;
            params.set(id, values)?;
        }
        let x = DTensor::randn(mesh, DType::F32, [2, 5, WIDTH], "()", &mut Generator::new(3))?;
        let cx = Forward::eval(&params);
        let piece = |path: &str| {
            let (id, piece) = params.find_piece(path).expect("declared");
            piece.of(params.value(id))
        };
        let map = |path: &str| {
            x.einsum("b t k, n k -> b t n", &piece(&format!("{path}.weight"))?)?
                .add(&piece(&format!("{path}.bias"))?)
        };
        let heads = |path: &str, n: usize| map(path)?.reshape([2, 5, n, 6])?.permute(&[0, 2, 1, 3]);
        let (q, k) = (heads("attn.q", 4)?.rotary(1e4, 0)?, heads("attn.k", 2)?.rotary(1e4, 0)?);
        let y = q.attention_with(&k, &heads("attn.v", 2)?, &AttentionOptions::causal(1.0 / 6f64.sqrt()))?;
        let y = y.permute(&[0, 2, 1, 3])?.reshape([2, 5, 24])?;
        let want = y.einsum("b t k, n k -> b t n", &piece("attn.out.weight")?)?;
        near("attention", &attention.forward(&cx, &x)?, &want)?;
        let hidden = map("mlp.gate")?.silu()?.mul(&map("mlp.up")?)?;
        let want = hidden.einsum("b t k, n k -> b t n", &piece("mlp.down.weight")?)?;
        near("mlp", &gated.forward(&cx, &x)?, &want)
    });
}

/// Every parameter of every configuration is covered by its pieces once, and piece paths differ.
#[test]
fn pieces_cover_each_parameter_once() {
    let all = [
        gpt2(),
        two(RMS, attention(), mlp(101, true, Activation::Silu, true)),
        gemma([Some(3), None]),
        two(RMS, attention(), experts(ExpertWeights::SoftmaxOfAll, true)),
    ];
    for config in all {
        alone(move |_, mut params| {
            Decoder::new(&mut params, config.clone())?;
            let mut paths = Vec::new();
            for id in params.ids() {
                let n = params.value(id).shape().numel();
                let mut covered = vec![0; n];
                for piece in params.pieces(id) {
                    paths.push(piece.path().to_string());
                    let runs = piece.runs(0..n).flat_map(|run| run.param_start..run.param_start + run.len);
                    runs.for_each(|element| covered[element] += 1);
                    assert_eq!(piece.of(params.value(id))?.shape(), piece.shape());
                }
                assert!(covered.iter().all(|&times| times == 1), "{}", params.path(id));
            }
            let before = paths.len();
            paths.sort();
            paths.dedup();
            assert_eq!(paths.len(), before);
            Ok(())
        });
    }
}

/// No rank idles if a fused parameter has fewer groups than the axis has ranks.
#[test]
fn fsdp_shards_the_rows_of_all_groups() {
    let held = spmd(3, |rank| {
        let mesh = DeviceMesh::new(&rank, &[("fsdp", 3)])?;
        let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 5)?;
        Decoder::new(&mut params, two(RMS, attention(), swiglu()))?;
        let of = |path: &str| params.value(params.find(path).expect("declared")).local().shape().numel();
        Ok([of("h.0.attn.qkv.weight"), of("h.0.mlp.gate_up.weight")])
    });
    // 2 groups of 24 rows, and one group of 44 rows.
    assert_eq!(held.unwrap(), [[16 * WIDTH, 15 * WIDTH], [16 * WIDTH, 15 * WIDTH], [16 * WIDTH, 14 * WIDTH]]);
}

/// A norm of gradients that are sharded by the rows of all groups receives no parameter.
#[test]
fn the_norm_of_sharded_gradients_gathers_none() {
    let received = spmd(2, |rank| {
        let mesh = DeviceMesh::new(&rank, &[("fsdp", 2)])?;
        let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 5)?;
        Decoder::new(&mut params, two(RMS, attention(), mlp(64, true, Activation::Silu, false)))?;
        let before = mesh.received_bytes();
        global_norm(params.values())?.full_tensor()?;
        Ok((mesh.received_bytes() - before, 4 * params.numel()))
    });
    for (received, bytes) in received.unwrap() {
        assert!(received * 20 < bytes as u64, "received {received} of {bytes} bytes");
    }
}

/// In packed rows each document has the scores that it has alone.
#[test]
fn packed_documents_do_not_see_each_other() {
    for config in [gpt2(), gemma([Some(3), None]), two(RMS, attention(), swiglu())] {
        alone(move |mesh, mut params| {
            let model = Decoder::new(&mut params, config.clone())?;
            let cx = Forward::eval(&params);
            let put = |x: &[i64]| DTensor::distribute(mesh, &Tensor::from_slice(x, [1, x.len()])?, "()");
            let tokens = [3, 1, 4, 1, 5, 9, 2];
            let sequences = Sequences::packed(&put(&[0, 0, 0, 1, 1, 1, 1])?, &put(&[0, 1, 2, 0, 1, 2, 3])?)?;
            let packed = model.forward_in(&cx, &put(&tokens)?, &sequences)?;
            let first = model.forward(&cx, &put(&tokens[..3])?)?;
            near("first", &packed.slice(1, 0, 3)?, &first)?;
            near("second", &packed.slice(1, 3, 4)?, &model.forward(&cx, &put(&tokens[3..])?)?)
        });
    }
}

/// Adapters learn, and nothing else does; merged into the weights they give the same scores. `patterns` come with the
/// number of maps that they match.
fn adapters(
    config: DecoderConfig,
    plan: fn(&Mesh) -> Result<Plan>,
    patterns: &'static [(&'static str, usize)],
) -> Equivalence {
    Equivalence::new(move |mesh: &Trial| {
        let plan = plan(mesh.mesh())?;
        let layout = plan.batch_layout(mesh.mesh());
        let mut params = Params::new(mesh, plan.clone(), 5)?;
        let mut model = Decoder::new(&mut params, config.clone())?;
        let tokens = Tensor::from_vec((0..2 * TIME as i64).map(|i| i * i % 29).collect(), [2, TIME])?;
        let tokens = DTensor::distribute(mesh, &tokens, layout)?;
        let scores = |model: &Decoder, params: &Params| model.forward(&Forward::eval(params), &tokens);
        let before = scores(&model, &params)?.full_tensor()?.to_f64_vec();
        let lora = LoraConfig { rank: 3, alpha: 6.0, dropout: 0.1 };
        for &(pattern, found) in patterns {
            assert_eq!(model.add_lora(&mut params, pattern, lora)?, found, "{pattern}");
        }
        let bits = |x: &[f64]| x.iter().map(|x| (x + 0.0).to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&scores(&model, &params)?.full_tensor()?.to_f64_vec()), bits(&before));
        let own = |path: &str| path.ends_with(".lora_a") || path.ends_with(".lora_b");
        let adapters = params.ids().filter(|&id| own(params.path(id))).count();
        assert_eq!(adapters, 2 * patterns.iter().map(|(_, found)| found).sum::<usize>());
        let mut optimizer = AdamW::new().betas(0.9, 0.99).decay(0.1);
        let mut losses = Vec::new();
        let mut dropout = Generator::new(5).child("dropout");
        for step in 0..4 {
            // The last step drops elements of the adapters' operands.
            let cx = match step {
                3 => Forward::train(&params, &mut dropout),
                _ => Forward::train_without_dropout(&params),
            };
            let mut loss = model.loss(&cx, &tokens, &tokens)?;
            drop(cx);
            losses.push(loss.item()?);
            let mut grads = loss.backward()?;
            let learn = params.ids().filter(|&id| grads.get(params.value(id)).is_some());
            assert_eq!(learn.filter(|&id| own(params.path(id))).count(), adapters);
            let one = DTensor::full(mesh, DType::F32, [], Layout::replicated(mesh.mesh().ndim()), 1.0)?;
            optimizer.step(&mut params, &mut grads, &one, 3e-2)?;
            mesh.record_params(&params)?;
            mesh.record("loss", &loss)?;
            mesh.next_step();
        }
        assert!(losses[2] < losses[0], "{losses:?}");
        let (merged, of_merged) = model.merge_lora(&params, plan)?;
        assert!(of_merged.ids().all(|id| !own(of_merged.path(id))));
        near("merged", &scores(&merged, &of_merged)?, &scores(&model, &params)?)?;
        mesh.record_params(&of_merged)
    })
}

fn transformer(mesh: &Mesh) -> Result<Plan> {
    Plan::transformer(mesh, Parallel { heads: 2, sequence: false })
}

#[test]
fn adapters_learn_and_merge() {
    let biased = SelfAttentionConfig { qkv_bias: true, ..attention() };
    let patterns = &[
        ("h.*.attn.q", 2),
        ("h.*.attn.v", 2),
        ("h.*.attn.out", 2),
        ("h.*.mlp.up", 2),
        ("h.*.mlp.down", 2),
        ("head", 1),
    ];
    adapters(two(RMS, biased, swiglu()), transformer, patterns).meshes(MESHES).assert();
}

/// Each expert has an adapter, in stacked parameters that a plan may shard by experts.
#[test]
fn adapters_of_experts_learn_and_merge() {
    let both = two(RMS, attention(), experts(ExpertWeights::SoftmaxOfAll, true));
    let patterns = &[
        ("h.*.moe.experts.*", 6),
        ("h.*.moe.shared.*", 6),
        ("h.1.moe.router", 1),
        ("h.*.moe.shared_gate", 2),
    ];
    adapters(both, transformer, patterns).meshes(MESHES).assert();
    let FeedForwardConfig::Moe(moe) = experts(ExpertWeights::SoftmaxOfChosen, false) else { unreachable!() };
    let sharded = |mesh: &Mesh| {
        Ok(match mesh.axis("ep") {
            Ok(_) => Plan::default().experts("h.*.moe", "ep"),
            Err(_) => Plan::default(),
        })
    };
    for capacity_factor in [None, Some(1.25)] {
        let plain = FeedForwardConfig::Moe(MoeConfig { capacity_factor, gated: false, ..moe });
        let patterns = &[("h.*.moe.experts.up", 2), ("h.0.moe.experts.down", 1)];
        adapters(two(RMS, attention(), plain), sharded, patterns).meshes(["ep=2", "ep=3"]).assert();
    }
}

/// A refusal leaves the model, the parameters and their generator as they were.
#[test]
fn refused_adapters_change_nothing() {
    let lora = LoraConfig { rank: 3, alpha: 6.0, dropout: 0.0 };
    let run = move |rank| {
        let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
        let declare = |plan| {
            let mut params = Params::new(&mesh, plan, 5)?;
            let model = Decoder::new(&mut params, two(RMS, attention(), swiglu()))?;
            Ok::<_, Error>((params, model))
        };
        let (mut params, mut model) = declare(Plan::default().shard("h.1.attn.k.lora_b", "tp", 5))?;
        let before = format!("{params:?}");
        let e = model.add_lora(&mut params, "h.*.attn.*", lora).unwrap_err().to_string();
        assert!(
            e.starts_with("layout: shards a dim that is not there") && e.contains("h.1.attn.k.lora_b"),
            "{e}"
        );
        assert_eq!(format!("{params:?}"), before);
        assert!(params.ids().all(|id| !params.is_frozen(id)), "nothing is frozen");
        let (mut fresh, mut of_fresh) = declare(Plan::default())?;
        for (params, model) in [(&mut params, &mut model), (&mut fresh, &mut of_fresh)] {
            assert_eq!(model.add_lora(params, "h.0.attn.q", lora)?, 1);
        }
        assert_eq!(params.digest()?, fresh.digest()?);
        let before = format!("{fresh:?}");
        for (pattern, want) in [
            ("h.*.attn.*", "lora: a map has an adapter; got h.0.attn.q; match other maps, or merge"),
            ("h.*.attn.qkv", "lora: a pattern matches no linear map; got \"h.*.attn.qkv\""),
        ] {
            let e = of_fresh.add_lora(&mut fresh, pattern, lora).unwrap_err().to_string();
            assert!(e.starts_with(want), "{e}");
            assert_eq!(format!("{fresh:?}"), before);
        }
        assert_eq!(of_fresh.add_lora(&mut fresh, "h.1.attn.*", lora)?, 4);
        Ok(())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn what_does_not_fit_is_refused() {
    let refusals = [
        (
            two(RMS, SelfAttentionConfig { kv_heads: 3, ..attention() }, swiglu()),
            "attention: the heads are not a multiple of those of keys and values; got 4 heads, 3 of keys and values",
        ),
        (
            two(RMS, SelfAttentionConfig { window: Some(0), ..attention() }, swiglu()),
            "attention: a window holds one or more keys; got a window of 0",
        ),
        (
            DecoderConfig { width: 5, ..two(RMS, attention(), experts(ExpertWeights::SoftmaxOfAll, false)) },
            "moe: the experts have another width; got width 13 in a decoder of width 5",
        ),
    ];
    for (config, want) in refusals {
        alone(move |_, mut params| {
            let e = Decoder::new(&mut params, config.clone()).unwrap_err();
            assert_eq!(e.to_string(), want);
            Ok(())
        });
    }
    alone(|mesh, mut params| {
        let model = Decoder::new(&mut params, two(RMS, attention(), swiglu()))?;
        let tokens = DTensor::zeros(mesh, DType::I64, [1, TIME + 1], "()")?;
        let e = model.forward(&Forward::eval(&params), &tokens).unwrap_err();
        let text =
            "decoder: the sequence is longer than the context; got i64[1, 8]@(); pass at most 7 tokens";
        assert_eq!(e.to_string(), text);
        assert!(matches!(e, Error::Invalid(_)), "{e:?}");
        Ok(())
    });
}
