//! Packed rows: attention that stays within a document, positions that start anew, and a loss without padding give each
//! document the values that it has alone.

use std::fs;

use isoshard::Result;
use isoshard::comm::{Rank, spmd};
use isoshard::data::{Packing, TokenWidth, TokenWriter, Tokens, TokensConfig};
use isoshard::dtensor::{AttentionOptions, CrossEntropyOptions, DTensor, DeviceMesh};
use isoshard::nn::{
    Activation, Decoder, DecoderConfig, DecoderLayer, FeedForwardConfig, Forward, MlpConfig, NormConfig,
    Parallel, Params, Plan, RotaryConfig, SelfAttentionConfig, Sequences,
};
use isoshard::ops::{RotaryFrequencies, RotaryPairing};
use isoshard::optim::AdamW;
use isoshard::placement::{Layout, Mesh};
use isoshard::rng::Generator;
use isoshard::tensor::{DType, Tensor};

const VOCABULARY: usize = 23;
const HEADS: usize = 2;
const HEAD_WIDTH: usize = 6;
const WIDTH: usize = HEADS * HEAD_WIDTH;

/// A block of attention with rotary positions, and a head.
struct Block {
    mesh: DeviceMesh,
    table: DTensor,
    head: DTensor,
}

/// Rows of tokens, with all that a packed batch has.
struct Rows {
    tokens: DTensor,
    targets: DTensor,
    documents: DTensor,
    positions: DTensor,
}

impl Block {
    fn new(mesh: &DeviceMesh) -> Result<Block> {
        let everywhere = Layout::replicated(mesh.mesh().ndim());
        let mut g = Generator::new(5);
        let table = DTensor::randn(mesh, DType::F32, [VOCABULARY, WIDTH], everywhere.clone(), &mut g)?;
        let head = DTensor::randn(mesh, DType::F32, [WIDTH, VOCABULARY], everywhere, &mut g)?;
        Ok(Block { mesh: mesh.clone(), table: table.requires_grad()?, head: head.requires_grad()? })
    }

    /// Returns rows `[batch, time]` in a layout.
    fn rows(&self, layout: &str, rows: &[[Vec<i64>; 4]]) -> Result<Rows> {
        let shape = [rows.len(), rows[0][0].len()];
        let stack = |k: usize| {
            let all = rows.iter().flat_map(|row| row[k].clone()).collect();
            DTensor::distribute(&self.mesh, &Tensor::from_vec(all, shape)?, layout)
        };
        Ok(Rows { tokens: stack(0)?, targets: stack(1)?, documents: stack(2)?, positions: stack(3)? })
    }

    fn scores(&self, rows: &Rows) -> Result<DTensor> {
        let &[b, t] = &rows.tokens.shape()[..] else { unreachable!("rows have two dims") };
        let x = self.table.embedding(&rows.tokens)?;
        let heads = x.reshape([b, t, HEADS, HEAD_WIDTH])?.permute(&[0, 2, 1, 3])?;
        let frequencies = RotaryFrequencies::geometric(HEAD_WIDTH, 1e4)?;
        let (cos, sin) = rows.positions.reshape([b, 1, t])?.rotary_tables(&frequencies, DType::F32)?;
        let turned = heads.rotary_with(&cos, &sin, RotaryPairing::Halves)?;
        let options = AttentionOptions::causal(0.4).documents(&rows.documents, &rows.documents);
        let y = turned.attention_with(&turned, &heads, &options)?;
        let y = y.permute(&[0, 2, 1, 3])?.reshape([b, t, WIDTH])?.add(&x)?;
        y.reshape([b * t, WIDTH])?.matmul(&self.head)?.reshape([b, t, VOCABULARY])
    }

    /// Returns the mean loss over targets other than -100.
    fn loss(&self, rows: &Rows) -> Result<DTensor> {
        let options = CrossEntropyOptions { ignore_index: Some(-100), ..Default::default() };
        self.scores(rows)?.cross_entropy_with(&rows.targets, &options)
    }
}

/// A document of `len` positions, whose tokens depend on `from`: tokens, targets, document and positions.
fn document(from: i64, len: usize, number: i64) -> [Vec<i64>; 4] {
    let token = |i: i64| (from + i) * (from + i + 3) % VOCABULARY as i64;
    let len = len as i64;
    [
        (0..len).map(token).collect(),
        (1..=len).map(token).collect(),
        vec![number; len as usize],
        (0..len).collect(),
    ]
}

fn padding(len: usize, number: i64) -> [Vec<i64>; 4] {
    [vec![0; len], vec![-100; len], vec![number; len], (0..len as i64).collect()]
}

fn joined(parts: &[[Vec<i64>; 4]]) -> [Vec<i64>; 4] {
    [0, 1, 2, 3].map(|k| parts.iter().flat_map(|part| part[k].clone()).collect())
}

fn on(mesh: &'static str, run: impl Fn(&Block, &DeviceMesh) -> Result<()> + Send + Sync + 'static) {
    let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
    let run = move |rank: Rank| {
        let mesh = DeviceMesh::parse(&rank, mesh)?;
        run(&Block::new(&mesh)?, &mesh)
    };
    spmd(ranks, run).unwrap_or_else(|e| panic!("{mesh}: {e}"));
}

/// Returns the scores of positions `from..from + len` of a row.
fn part(scores: &DTensor, from: usize, len: usize) -> Result<Vec<f32>> {
    scores.slice(1, from, len)?.full_tensor()?.to_vec()
}

/// The first document of a row has the bits that it has alone; so has a later one that begins at a multiple of 32 and
/// spans one leaf of the sums over keys. Any other one has the same values up to rounding.
#[test]
fn a_document_in_a_row_has_the_values_that_it_has_alone() {
    on("1", |block, _| {
        for (first, second) in [(20, 13), (32, 27), (64, 32), (5, 40), (1, 1)] {
            let [a, b] = [document(1, first, 0), document(9, second, 1)];
            let row = block.rows("()", &[joined(&[a.clone(), b.clone()])])?;
            let packed = block.scores(&row)?;
            let alone =
                |document| block.scores(&block.rows("()", &[document])?)?.full_tensor()?.to_vec::<f32>();
            assert_eq!(part(&packed, 0, first)?, alone(a)?, "the first of {first} and {second}");
            let (got, want) = (part(&packed, first, second)?, alone(b)?);
            if first % 32 == 0 && second <= 32 {
                assert_eq!(got, want, "the second of {first} and {second}");
            }
            for (got, want) in got.iter().zip(&want) {
                assert!((got - want).abs() <= 1e-5 * (1.0 + want.abs()), "{got} {want} in {first}, {second}");
            }
            // The documents do matter: as one document, the second has other scores.
            let mut one = joined(&[document(1, first, 0), document(9, second, 0)]);
            one[3] = (0..(first + second) as i64).collect();
            let one = part(&block.scores(&block.rows("()", &[one])?)?, first, second)?;
            assert!(one.iter().zip(&want).any(|(a, b)| (a - b).abs() > 1e-3));
        }
        Ok(())
    });
}

/// A row of 32 positions with 32 of padding after it: the same scores, loss and gradients, by bits.
#[test]
fn padding_changes_nothing() {
    on("1", |block, _| {
        let text = joined(&[document(1, 20, 0), document(9, 12, 1)]);
        let short = block.rows("()", std::slice::from_ref(&text))?;
        let long = block.rows("()", &[joined(&[text, padding(32, 2)])])?;
        let whole = block.scores(&short)?.full_tensor()?.to_vec::<f32>()?;
        assert_eq!(part(&block.scores(&long)?, 0, 32)?, whole);
        let mut losses = [block.loss(&short)?, block.loss(&long)?];
        let [a, b] = [losses[0].item()?, losses[1].item()?];
        assert_eq!(a.to_bits(), b.to_bits());
        let [a, b] = [losses[0].backward()?, losses[1].backward()?];
        for leaf in [&block.table, &block.head] {
            let [a, b] = [&a, &b].map(|gradients| gradients.get(leaf).expect("it was used").full_tensor());
            let (a, b) = (a?.to_f64_vec(), b?.to_f64_vec());
            let largest = a.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            assert!(largest > 0.0);
            let far = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far <= 1e-6 * largest, "{far} of {largest}");
        }
        Ok(())
    });
}

/// The mean over a packed batch is that over the documents one by one, weighted by their lengths.
#[test]
fn the_loss_is_the_mean_over_all_documents() {
    on("1", |block, _| {
        let lens = [7, 18, 3, 25];
        let documents: Vec<_> = (0..4).map(|k| document(4 * k as i64 + 1, lens[k], (k % 2) as i64)).collect();
        let rows = [
            joined(&[documents[0].clone(), documents[1].clone(), padding(7, 2)]),
            joined(&[documents[2].clone(), documents[3].clone(), padding(4, 2)]),
        ];
        let packed = block.loss(&block.rows("()", &rows)?)?.item()?;
        let mut sum = 0.0;
        for (document, len) in documents.into_iter().zip(lens) {
            sum += len as f64 * block.loss(&block.rows("()", &[document])?)?.item()?;
        }
        let mean = sum / lens.iter().sum::<usize>() as f64;
        assert!((packed - mean).abs() < 1e-5 * mean, "{packed} {mean}");
        Ok(())
    });
}

/// Writes documents of several lengths. Each ends with token 0.
fn token_file(name: &str) -> std::path::PathBuf {
    let path = std::env::temp_dir().join(format!("isoshard-packed-{name}-{}.bin", std::process::id()));
    let mut writer = TokenWriter::create(&path, TokenWidth::U16).unwrap();
    for (k, len) in [5usize, 17, 3, 40, 9, 12, 30, 2, 21].into_iter().enumerate() {
        let tokens: Vec<u32> = (0..len).map(|i| ((i * i + 7 * k) % (VOCABULARY - 1) + 1) as u32).collect();
        writer.write(&tokens).unwrap();
        writer.write(&[0]).unwrap();
    }
    writer.finish().unwrap();
    path
}

/// Rows of whole documents.
const PACKED: TokensConfig = TokensConfig {
    vocabulary: VOCABULARY,
    block: 36,
    batch: 3,
    shuffle: Some(7),
    packing: Packing::Documents { end_of_text: 0 },
    width: None,
    read_ahead: 2,
    compare_all: false,
};

/// From a token file to the gradients: the same bits on every mesh, also if ranks have unequal rows or parts of rows.
#[test]
fn packed_batches_train_with_the_same_bits_on_every_mesh() {
    let path = token_file("block");
    let outcome = |mesh: &'static str, layout: &'static str| {
        let path = path.clone();
        let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
        let run = move |rank: Rank| {
            let mesh = DeviceMesh::parse(&rank, mesh)?;
            let block = Block::new(&mesh)?;
            let mut tokens = Tokens::open(&[&path], PACKED)?;
            let mut bits = Vec::new();
            for _ in 0..3 {
                let batch = tokens.next_packed_batch(&mesh, layout)?;
                let rows = Rows {
                    tokens: batch.tokens,
                    targets: batch.targets,
                    documents: batch.documents,
                    positions: batch.positions,
                };
                let mut loss = block.loss(&rows)?;
                bits.push(loss.item()?.to_bits());
                let gradients = loss.backward()?;
                let table = gradients.get(&block.table).expect("it was used").full_tensor()?;
                bits.extend(table.to_f64_vec().iter().map(|x| x.to_bits()));
            }
            Ok(bits)
        };
        spmd(ranks, run).unwrap_or_else(|e| panic!("{mesh}: {e}")).remove(0)
    };
    let single = outcome("1", "()");
    for (mesh, layout) in
        [("dp=2", "(S0)"), ("dp=3", "(S0)"), ("dp=4", "(S0)"), ("sp=2", "(S1)"), ("dp=2,sp=2", "(S0, S1)")]
    {
        assert_eq!(outcome(mesh, layout), single, "{mesh}");
    }
    fs::remove_file(path).unwrap();
}

fn decoder(params: &mut Params) -> Result<Decoder> {
    let rotary = Some(RotaryConfig::plain(1e4));
    let attention = SelfAttentionConfig { rotary, ..SelfAttentionConfig::new(4, 2, 6) };
    let mlp = MlpConfig { hidden: 20, gated: true, activation: Activation::Silu, bias: false, dropout: 0.0 };
    let layer = DecoderLayer { attention, feed_forward: FeedForwardConfig::Mlp(mlp) };
    let norm = NormConfig::Rms { eps: 1e-6, unit_offset: false };
    Decoder::new(params, DecoderConfig::new(VOCABULARY, 36, 16, norm, vec![layer; 2]))
}

/// Fine-tuning of the last layer on packed documents: the same bits on every mesh and after every change of meshes.
#[test]
fn a_decoder_with_a_frozen_layer_learns_from_packed_rows_alike_on_every_mesh() {
    let path = token_file("decoder");
    let outcome = |mesh: &'static str| {
        let path = path.clone();
        let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
        let run = move |rank: Rank| {
            let mesh = DeviceMesh::parse(&rank, mesh)?;
            let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: false })?;
            let layout = plan.batch_layout(mesh.mesh());
            let mut params = Params::new(&mesh, plan, 7)?;
            let model = decoder(&mut params)?;
            params.freeze("**")?;
            params.unfreeze("h.1.**")?;
            let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(0.01).clip(1.0);
            let mut tokens = Tokens::open(&[&path], PACKED)?;
            let mut losses = Vec::new();
            for _ in 0..4 {
                let batch = tokens.next_packed_batch(&mesh, layout.clone())?;
                let rows = Sequences::packed(&batch.documents, &batch.positions)?;
                let cx = Forward::train_without_dropout(&params);
                let mut loss = model.loss_in(&cx, &batch.tokens, &batch.targets, &rows)?;
                drop(cx);
                losses.push(loss.item()?.to_bits());
                optimizer.step(&mut params, &mut loss.backward()?)?;
            }
            Ok((losses, params.digest()?))
        };
        spmd(ranks, run).unwrap_or_else(|e| panic!("{mesh}: {e}")).remove(0)
    };
    let single = outcome("1");
    for mesh in ["fsdp=2", "fsdp=3", "tp=2", "dp=2,tp=2", "fsdp=2,tp=2"] {
        assert_eq!(outcome(mesh), single, "{mesh}");
    }
    fs::remove_file(path).unwrap();
}
