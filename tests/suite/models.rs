//! Blocks of today's models, with sizes that no mesh divides evenly, trained on several meshes: losses and final
//! parameters have equal bits. A vision transformer, BERT with padding, T5 with relative bias and cross attention, and a
//! mixture of experts.

use isoshard::comm::{Rank, spmd};
use isoshard::dtensor::{AttentionOptions, DTensor, DeviceMesh};
use isoshard::nn::{
    Activation, Embedding, ExpertWeights, Forward, LayerNorm, Linear, Mlp, MlpConfig, Module, Moe, MoeConfig,
    ParamId, Params, Plan, RmsNorm, Scope,
};
use isoshard::optim::AdamW;
use isoshard::placement::{Layout, Mesh, Placement};
use isoshard::rng::{Generator, Init, bits32};
use isoshard::tensor::{DType, Tensor};
use isoshard::testing::{Equivalence, Trial};
use isoshard::{Error, Failure, Result};

const STEPS: usize = 4;
const BATCH: usize = 5;
const TIME: usize = 7;
const WIDTH: usize = 13;
const HIDDEN: usize = 22;
const HEADS: usize = 4;
const HEAD_WIDTH: usize = 3;
const VOCABULARY: usize = 17;
const INIT: Init = Init::Normal { mean: 0.0, std: 0.3 };
const MESHES: [&str; 2] = ["fsdp=3", "dp=2,tp=2"];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Model {
    Vit,
    Bert,
    T5,
    /// A mixture of experts, with a capacity factor.
    Moe(Option<f64>),
}

#[test]
fn a_vision_transformer_has_one_loss_curve() {
    one_curve(Model::Vit, &MESHES);
}

#[test]
fn bert_with_padding_has_one_loss_curve() {
    one_curve(Model::Bert, &MESHES);
}

#[test]
fn t5_with_bias_and_cross_attention_has_one_loss_curve() {
    one_curve(Model::T5, &MESHES);
}

#[test]
fn a_mixture_of_experts_has_one_loss_curve() {
    one_curve(Model::Moe(None), &MESHES);
    one_curve(Model::Moe(None), &["ep=2", "ep=2,tp=2"]);
}

#[test]
fn a_mixture_of_experts_with_a_capacity_has_one_loss_curve() {
    one_curve(Model::Moe(Some(0.8)), &MESHES);
    one_curve(Model::Moe(Some(0.8)), &["ep=2", "ep=2,fsdp=2", "dp=2,ep=3"]);
}

/// The layer's result, computed token by token in f64. Sums have at most 22 terms of f32, each rounded by 2^-24.
#[test]
fn a_mixture_of_experts_by_definition() {
    let run = |rank: Rank| {
        let mesh = DeviceMesh::new(&rank, &[])?;
        let mut params = Params::new(&mesh, Plan::default(), 3)?;
        let moe = Moe::new(params.root().child("moe"), moe_config(None, HIDDEN), INIT)?;
        let x = Tensor::from_vec((0..10 * WIDTH).map(|i| (i as f32 * 0.37).sin()).collect(), [2, 5, WIDTH])?;
        let y = DTensor::distribute(&mesh, &x, Layout::replicated(0))?;
        let y = moe.forward(&Forward::eval(&params), &y)?.full_tensor()?.to_f64_vec();
        let of = |path: &str| params.value(params.find(path).expect("declared")).full_tensor();
        let of = |path: &str| of(path).expect("on one rank").to_f64_vec();
        let (router, gate) = (of("moe.router.weight"), of("moe.experts.gate"));
        let (up, down) = (of("moe.experts.up"), of("moe.experts.down"));
        for (x, y) in x.to_f64_vec().chunks(WIDTH).zip(y.chunks(WIDTH)) {
            let dot = |w: &dyn Fn(usize) -> f64| (0..WIDTH).map(|d| x[d] * w(d)).sum::<f64>();
            let mut logits: Vec<(usize, f64)> =
                (0..4).map(|e| (e, dot(&|d| router[e * WIDTH + d]))).collect();
            logits.sort_by(|a, b| b.1.total_cmp(&a.1));
            let sum: f64 = logits[..2].iter().map(|l| l.1.exp()).sum();
            let mut want = [0.0; WIDTH];
            for (e, logit) in &logits[..2] {
                for h in 0..HIDDEN {
                    let column = |w: &[f64]| dot(&|d| w[(e * WIDTH + d) * HIDDEN + h]);
                    let (gate, up) = (column(&gate), column(&up));
                    let hidden = logit.exp() / sum * gate / (1.0 + (-gate).exp()) * up;
                    (0..WIDTH).for_each(|d| want[d] += hidden * down[(e * HIDDEN + h) * WIDTH + d]);
                }
            }
            let near = |(y, want): (&f64, &f64)| (y - want).abs() < 1e-5 * (1.0 + want.abs());
            assert!(y.iter().zip(&want).all(near), "{y:?} instead of {want:?}");
        }
        Ok(())
    };
    spmd(1, run).unwrap();
}

/// Expert parallelism exchanges rows of tokens, not weights: a rank receives no expert of another rank.
#[test]
fn experts_stay_on_their_ranks() {
    let run = |rank: Rank| {
        let mesh = DeviceMesh::new(&rank, &[("ep", 2)])?;
        let mut params = Params::new(&mesh, Plan::default().experts("moe", "ep"), 3)?;
        let config = moe_config(Some(1.0), 1000);
        let moe = Moe::new(params.root().child("moe"), config, INIT)?;
        let x = DTensor::full(&mesh, DType::F32, [2, 8, WIDTH], params.batch_layout(), 0.5)?;
        let before = mesh.received_bytes();
        moe.forward(&Forward::eval(&params), &x)?;
        Ok(mesh.received_bytes() - before)
    };
    // The rows that one batch entry has for two experts, four each, of 4-byte elements, are sent and come back.
    let rows = 2 * (2 * 4 * WIDTH as u64 * 4);
    assert_eq!(spmd(2, run).unwrap(), [rows; 2]);
}

/// Tokens of a batch entry beyond the capacity of their expert are dropped: they pass through the residual alone.
#[test]
fn tokens_beyond_the_capacity_are_dropped_in_order() {
    let dropped = |mesh: &'static str, ranks| {
        spmd(ranks, move |rank| {
            let mesh = DeviceMesh::parse(&rank, mesh)?;
            let mut params = Params::new(&mesh, Plan::default().batch(mesh.mesh().axis_name(0)), 3)?;
            let config = MoeConfig { top_k: 1, ..moe_config(Some(1.0), 5) };
            let moe = Moe::new(params.root().child("moe"), config, INIT)?;
            // All tokens of an entry are equal, so they choose one expert, which takes two of eight.
            let x = Tensor::from_vec(
                (0..3 * 8 * WIDTH).map(|i| (i / 8 / WIDTH) as f32 + 0.5).collect(),
                [3, 8, WIDTH],
            )?;
            let x = params.batch(&x)?;
            moe.forward(&Forward::eval(&params), &x)?.full_tensor()?.to_vec::<f32>()
        })
    };
    let whole = dropped("dp=1", 1).unwrap().remove(0);
    for (token, y) in whole.chunks(WIDTH).enumerate() {
        assert_eq!(y.iter().all(|&y| y == 0.0), token % 8 >= 2, "token {token}: {y:?}");
    }
    assert!(dropped("dp=2", 2).unwrap().iter().all(|y| *y == whole));
}

#[test]
fn a_wrong_number_of_experts_is_refused() {
    let run = |rank: Rank| {
        let mut params = Params::new(&DeviceMesh::new(&rank, &[])?, Plan::default(), 3)?;
        let config = MoeConfig { top_k: 5, ..moe_config(None, 5) };
        Moe::new(params.root().child("moe"), config, INIT).map(drop)
    };
    let Error::Rank { cause, .. } = spmd(1, run).unwrap_err() else { panic!("a rank fails") };
    let Failure::Error(error) = *cause else { panic!("with an error") };
    let text = error.to_string();
    assert!(text.starts_with("moe: wants sizes above 0, 1 to `experts` experts per token"), "{text}");
}

/// Trains on a single rank and on the meshes: the losses and all parameters of every step have equal bits.
fn one_curve(model: Model, meshes: &[&str]) {
    Equivalence::new(move |mesh| train(mesh, model)).meshes(meshes.iter().copied()).assert();
}

type Loss = Box<dyn Fn(&Forward, &Inputs) -> Result<DTensor>>;

/// The mesh on which inputs are made, and their layout.
struct Inputs {
    mesh: DeviceMesh,
    layout: Layout,
}

impl Inputs {
    /// Returns numbers below `n`, the same on every rank.
    fn numbers(&self, shape: &[usize], n: usize, draw: u64) -> Result<DTensor> {
        let mut words = vec![0; shape.iter().product()];
        bits32(Generator::new(5).child("data").next_draw(), draw * 4096, &mut words);
        let all = Tensor::from_vec(words.iter().map(|&w| (w as usize % n) as i64).collect(), shape)?;
        DTensor::distribute(&self.mesh, &all, self.layout.clone())
    }
}

fn train(trial: &Trial, model: Model) -> Result<()> {
    let mesh: &DeviceMesh = trial;
    let mut params = Params::new(mesh, plan(mesh.mesh(), model), 11)?;
    let loss = match model {
        Model::Vit => vit(&mut params)?,
        Model::Bert => bert(&mut params)?,
        Model::T5 => t5(&mut params)?,
        Model::Moe(capacity) => mixture(&mut params, capacity)?,
    };
    let inputs = Inputs { mesh: mesh.clone(), layout: params.batch_layout() };
    let mut optimizer = AdamW::new().betas(0.9, 0.99).decay(0.1);
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let mut loss = loss(&Forward::train_without_dropout(&params), &inputs)?;
        let mut grads = loss.backward()?;
        let one = DTensor::full(mesh, DType::F32, [], Layout::replicated(mesh.mesh().ndim()), 1.0)?;
        optimizer.step(&mut params, &mut grads, &one, 1e-2)?;
        losses.push(loss.item()?);
        trial.record("loss", &loss)?;
        trial.record_params(&params)?;
        trial.next_step();
    }
    assert!(losses[STEPS - 1] < losses[0], "{model:?}: {losses:?}");
    Ok(())
}

/// Returns the plan of a model on a mesh with any of the axes `dp`, `fsdp`, `tp` and `ep`.
fn plan(mesh: &Mesh, model: Model) -> Plan {
    let (attention, mlps): (&[&str], &[&str]) = match model {
        Model::Vit | Model::Bert => (&["block.attn"], &["block.mlp"]),
        Model::T5 => (&["encoder.attn", "decoder.attn", "decoder.cross"], &["encoder.mlp", "decoder.mlp"]),
        Model::Moe(_) => (&["block.attn"], &[]),
    };
    let mut plan = Plan::default();
    for a in 0..mesh.ndim() {
        plan = match mesh.axis_name(a) {
            "dp" => plan.batch("dp"),
            "fsdp" => plan.fsdp("fsdp"),
            "ep" => plan.experts("block.moe", "ep"),
            _ => {
                for path in attention {
                    for part in ["q", "k", "v"] {
                        plan = plan.shard_blocks(&format!("{path}.{part}.weight"), "tp", 0, HEADS);
                    }
                    plan = plan.shard_blocks(&format!("{path}.out.weight"), "tp", 1, HEADS);
                    plan = plan.site(&format!("{path}.out"), "tp", Placement::Replicate);
                }
                for path in mlps {
                    plan = plan.shard(&format!("{path}.up.weight"), "tp", 0);
                    plan = plan.shard(&format!("{path}.down.weight"), "tp", 1);
                    plan = plan.site(&format!("{path}.down"), "tp", Placement::Replicate);
                }
                if let Model::Moe(_) = model {
                    plan =
                        plan.shard("block.moe.experts.gate", "tp", 2).shard("block.moe.experts.up", "tp", 2);
                    plan = plan.shard("block.moe.experts.down", "tp", 1);
                    plan = plan.site("block.moe.down", "tp", Placement::Replicate);
                }
                plan
            }
        };
    }
    plan
}

/// Attention with maps of queries, keys, values and results.
struct Heads {
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
}

impl Heads {
    fn new(mut scope: Scope<'_>) -> Result<Heads> {
        let mut map =
            |name: &str, inputs, outputs| Linear::without_bias(scope.child(name), inputs, outputs, INIT);
        let all = HEADS * HEAD_WIDTH;
        Ok(Heads {
            q: map("q", WIDTH, all)?,
            k: map("k", WIDTH, all)?,
            v: map("v", WIDTH, all)?,
            out: map("out", all, WIDTH)?,
        })
    }

    fn forward(
        &self,
        cx: &Forward,
        x: &DTensor,
        from: &DTensor,
        options: &AttentionOptions,
    ) -> Result<DTensor> {
        let heads = |map: &Linear, x: &DTensor| {
            let (batch, time) = (x.shape()[0], x.shape()[1]);
            map.forward(cx, x)?.reshape([batch, time, HEADS, HEAD_WIDTH])?.permute(&[0, 2, 1, 3])
        };
        let (q, k, v) = (heads(&self.q, x)?, heads(&self.k, from)?, heads(&self.v, from)?);
        let y = q.attention_with(&k, &v, options)?.permute(&[0, 2, 1, 3])?;
        self.out.forward(cx, &y.reshape([x.shape()[0], x.shape()[1], HEADS * HEAD_WIDTH])?)
    }
}

/// A pre-norm block of bidirectional attention and an MLP.
struct Block {
    norms: [LayerNorm; 2],
    attn: Heads,
    mlp: Mlp,
}

impl Block {
    fn new(mut scope: Scope<'_>) -> Result<Block> {
        Ok(Block {
            norms: [
                LayerNorm::new(scope.child("norm1"), WIDTH)?,
                LayerNorm::new(scope.child("norm2"), WIDTH)?,
            ],
            attn: Heads::new(scope.child("attn"))?,
            mlp: Mlp::new(
                scope.child("mlp"),
                WIDTH,
                MlpConfig { bias: false, ..MlpConfig::new(HIDDEN) },
                INIT,
            )?,
        })
    }

    fn forward(&self, cx: &Forward, x: &DTensor, options: &AttentionOptions) -> Result<DTensor> {
        let normed = self.norms[0].forward(cx, x)?;
        let x = x.add(&self.attn.forward(cx, &normed, &normed, options)?)?;
        x.add(&self.mlp.forward(cx, &self.norms[1].forward(cx, &x)?)?)
    }
}

fn scale() -> f64 {
    1.0 / (HEAD_WIDTH as f64).sqrt()
}

/// Images of 2 channels and 6 x 6 pixels, in patches of 3 x 3, with a class token before the patches.
fn vit(params: &mut Params) -> Result<Loss> {
    let mut root = params.root();
    let patches = Linear::new(root.child("patches"), 2 * 3 * 3, WIDTH, INIT)?;
    let class: ParamId = root.param("class", [1, 1, WIDTH], INIT)?;
    let positions = root.param("positions", [5, WIDTH], INIT)?;
    let block = Block::new(root.child("block"))?;
    let norm = LayerNorm::new(root.child("norm"), WIDTH)?;
    let head = Linear::new(root.child("head"), WIDTH, 3, INIT)?;
    Ok(Box::new(move |cx, inputs| {
        let images = inputs.numbers(&[BATCH, 2, 6, 6], 9, 1)?.cast(DType::F32)?.mul_scalar(0.25)?;
        let cut = images.reshape([BATCH, 2, 2, 3, 2, 3])?.permute(&[0, 2, 4, 1, 3, 5])?;
        let x = patches.forward(cx, &cut.reshape([BATCH, 4, 18])?)?;
        let class = cx.with_param(class, |c| c.expand([BATCH, 1, WIDTH]))?;
        let x = DTensor::cat(&[&class, &x], 1)?;
        let x = cx.with_param(positions, |p| x.add(p))?;
        let x = block.forward(cx, &x, &AttentionOptions::bidirectional(scale()))?;
        let x = norm.forward(cx, &x.slice(1, 0, 1)?.reshape([BATCH, WIDTH])?)?;
        head.forward(cx, &x)?.cross_entropy(&inputs.numbers(&[BATCH], 3, 2)?)?.mean_all()
    }))
}

/// Sequences of different lengths: their padding is masked in attention and left out of the loss.
fn bert(params: &mut Params) -> Result<Loss> {
    let mut root = params.root();
    let tokens = Embedding::new(root.child("tokens"), VOCABULARY, WIDTH, INIT)?;
    let positions = root.param("positions", [TIME, WIDTH], INIT)?;
    let block = Block::new(root.child("block"))?;
    let norm = LayerNorm::new(root.child("norm"), WIDTH)?;
    Ok(Box::new(move |cx, inputs| {
        let lengths = [TIME, 3, 5, 1, 6];
        let real = lengths.iter().flat_map(|&n| (0..TIME).map(move |t| t < n)).collect();
        let real = DTensor::distribute(
            &inputs.mesh,
            &Tensor::from_vec(real, [BATCH, TIME])?,
            inputs.layout.clone(),
        )?;
        let (text, target) =
            (inputs.numbers(&[BATCH, TIME], VOCABULARY, 1)?, inputs.numbers(&[BATCH, TIME], VOCABULARY, 2)?);
        let x = tokens.forward(cx, &text)?;
        let x = cx.with_param(positions, |p| x.add(p))?;
        let mask = real.reshape([BATCH, 1, 1, TIME])?;
        let x = block.forward(cx, &x, &AttentionOptions::bidirectional(scale()).mask(&mask))?;
        let scores = tokens.scores(cx, &norm.forward(cx, &x)?)?;
        let real = real.cast(DType::F32)?;
        scores.cross_entropy(&target)?.mul(&real)?.sum_all()?.div(&real.sum_all()?)
    }))
}

/// An encoder and a decoder block. Biases of attention are looked up by the distance of positions; the decoder attends
/// to the encoder's result.
fn t5(params: &mut Params) -> Result<Loss> {
    const BUCKETS: usize = 5;
    const TARGETS: usize = 6;
    struct Decoder {
        norms: [RmsNorm; 3],
        attn: Heads,
        cross: Heads,
        mlp: Mlp,
    }
    let mut root = params.root();
    let tokens = Embedding::new(root.child("tokens"), VOCABULARY, WIDTH, INIT)?;
    let biases = Embedding::new(root.child("biases"), BUCKETS, HEADS, INIT)?;
    let encoder = Block::new(root.child("encoder"))?;
    let mut scope = root.child("decoder");
    let decoder = Decoder {
        norms: [
            RmsNorm::new(scope.child("norm1"), WIDTH)?,
            RmsNorm::new(scope.child("norm2"), WIDTH)?,
            RmsNorm::new(scope.child("norm3"), WIDTH)?,
        ],
        attn: Heads::new(scope.child("attn"))?,
        cross: Heads::new(scope.child("cross"))?,
        mlp: Mlp::new(scope.child("mlp"), WIDTH, MlpConfig { bias: false, ..MlpConfig::new(HIDDEN) }, INIT)?,
    };
    Ok(Box::new(move |cx, inputs| {
        let bias = |time: usize| {
            let bucket = |q: usize, k: usize| (q as i64 - k as i64).clamp(-2, 2) + 2;
            let all = (0..time).flat_map(|q| (0..time).map(move |k| bucket(q, k))).collect();
            let layout = Layout::replicated(inputs.mesh.mesh().ndim());
            let index = DTensor::distribute(&inputs.mesh, &Tensor::from_vec(all, [time, time])?, layout)?;
            biases.forward(cx, &index)?.permute(&[2, 0, 1])?.unsqueeze(0)
        };
        let text = |time, draw| inputs.numbers(&[BATCH, time], VOCABULARY, draw);
        let options = AttentionOptions::bidirectional(scale()).bias(&bias(TIME)?);
        let memory = encoder.forward(cx, &tokens.forward(cx, &text(TIME, 1)?)?, &options)?;
        let x = tokens.forward(cx, &text(TARGETS, 2)?)?;
        let normed = decoder.norms[0].forward(cx, &x)?;
        let options = AttentionOptions::causal(scale()).bias(&bias(TARGETS)?);
        let x = x.add(&decoder.attn.forward(cx, &normed, &normed, &options)?)?;
        let normed = decoder.norms[1].forward(cx, &x)?;
        let all = AttentionOptions::bidirectional(scale());
        let x = x.add(&decoder.cross.forward(cx, &normed, &memory, &all)?)?;
        let x = x.add(&decoder.mlp.forward(cx, &decoder.norms[2].forward(cx, &x)?)?)?;
        tokens.scores(cx, &x)?.cross_entropy(&text(TARGETS, 3)?)?.mean_all()
    }))
}

fn moe_config(capacity_factor: Option<f64>, hidden: usize) -> MoeConfig {
    MoeConfig {
        width: WIDTH,
        hidden,
        experts: 4,
        top_k: 2,
        capacity_factor,
        gated: true,
        activation: Activation::Silu,
        weights: ExpertWeights::SoftmaxOfChosen,
        shared_hidden: None,
        shared_gate: false,
        dropout: 0.0,
    }
}

/// A block of causal attention and four experts, two per token, with the losses of the router.
fn mixture(params: &mut Params, capacity_factor: Option<f64>) -> Result<Loss> {
    let mut root = params.root();
    let tokens = Embedding::new(root.child("tokens"), VOCABULARY, WIDTH, INIT)?;
    let mut scope = root.child("block");
    let norms = [RmsNorm::new(scope.child("norm1"), WIDTH)?, RmsNorm::new(scope.child("norm2"), WIDTH)?];
    let attn = Heads::new(scope.child("attn"))?;
    let moe = Moe::new(scope.child("moe"), moe_config(capacity_factor, HIDDEN), INIT)?;
    let head = Linear::without_bias(root.child("head"), WIDTH, VOCABULARY, INIT)?;
    Ok(Box::new(move |cx, inputs| {
        let text = |draw| inputs.numbers(&[BATCH, TIME], VOCABULARY, draw);
        let x = tokens.forward(cx, &text(1)?)?;
        let normed = norms[0].forward(cx, &x)?;
        let x = x.add(&attn.forward(cx, &normed, &normed, &AttentionOptions::causal(scale()))?)?;
        let out = moe.forward_with_losses(cx, &norms[1].forward(cx, &x)?)?;
        let loss = head.forward(cx, &x.add(&out.y)?)?.cross_entropy(&text(2)?)?.mean_all()?;
        loss.add(&out.balance.mul_scalar(1e-2)?)?.add(&out.z.mul_scalar(1e-3)?)
    }))
}
