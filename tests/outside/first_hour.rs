//! A newcomer's first hour: a model of one's own that trains, dies, and goes on with one rank fewer. tests/package.rs builds it by
//! README's lines, outside the repository.

use std::path::Path;

use isoshard::checkpoint::{CheckpointFolder, StateTree};
use isoshard::nn::{Embedding, LayerNorm, Linear};
use isoshard::prelude::*;

const TEXT: &str = "the mesh decides who computes an element, never what it is. ";
const STEPS: u64 = 12;

/// Predicts a character from the four before it.
struct Model {
    table: Embedding,
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Model {
    fn new(params: &mut Params) -> Result<Model> {
        let (init, mut root) = (Init::Normal { mean: 0.0, std: 0.1 }, params.root());
        Ok(Model {
            table: Embedding::new(root.child("table"), 128, 16, init)?,
            norm: LayerNorm::new(root.child("norm"), 64)?,
            up: Linear::new(root.child("up"), 64, 96, init)?,
            down: Linear::new(root.child("down"), 96, 128, init)?,
        })
    }

    fn loss(&self, cx: &Forward, tokens: &DTensor, targets: &DTensor) -> Result<DTensor> {
        let x = self.table.forward(cx, tokens)?.flatten(-2, -1)?;
        let hidden = self.up.forward(cx, &self.norm.forward(cx, &x)?)?.gelu()?;
        self.down.forward(cx, &cx.dropout(hidden, 0.1)?)?.cross_entropy(targets)?.mean_all()
    }
}

/// Trains to the last step, from the newest checkpoint if there is one. Rank 1 dies in step `dies_at`.
fn train(rank: Rank, folder: &Path, dies_at: Option<u64>) -> Result<u64> {
    let mesh = DeviceMesh::new(&rank, &[("fsdp", rank.world_len())])?;
    let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
    let model = Model::new(&mut params)?;
    let schedule = WarmupCosine { peak: 1e-2, floor: 1e-3, warmup: 2, steps: STEPS as usize };
    let mut optimizer = AdamW::new().rate(schedule).clip(1.0);
    let mut dropout = Generator::new(7).child("dropout");

    let mut saves = CheckpointFolder::new(folder).keep(2);
    let mut done = 0;
    if let Some((step, saved)) = saves.newest(&mesh)? {
        params.load_state(&saved.subtree("model"))?;
        optimizer.load_state(&params, &saved.subtree("optimizer"))?;
        let text = saved.value("dropout").and_then(|value| value.as_str()).unwrap_or_default();
        dropout.restore(text.parse()?);
        done = step;
    }
    for step in done..STEPS {
        if dies_at == Some(step) && rank.rank() == 1 {
            panic!("the power is gone");
        }
        let text: Vec<i64> = TEXT.bytes().cycle().skip(step as usize).take(36).map(i64::from).collect();
        let rows: Vec<i64> = text.windows(4).take(32).flatten().copied().collect();
        let tokens = params.batch(&Tensor::from_vec(rows, [32, 4])?)?;
        let targets = params.batch(&Tensor::from_vec(text[4..].to_vec(), [32])?)?;
        let mut loss = model.loss(&Forward::train(&params, &mut dropout), &tokens, &targets)?;
        let report = optimizer.step(&mut params, &mut loss.backward()?)?;
        let loss = loss.item()?;
        if rank.rank() == 0 && step % 4 == 3 {
            println!("step {:2}  loss {loss:.4}  rate {:.4}", step + 1, report.rate);
        }
        if step % 4 == 3 {
            let mut state = StateTree::new();
            state.insert_tree("model", params.state()?)?;
            state.insert_tree("optimizer", optimizer.state(&params)?)?;
            state.insert_value("dropout", dropout.state().to_string())?;
            saves.save(&mesh, step + 1, &state)?;
        }
    }
    params.digest()
}

fn main() -> Result<()> {
    let root = std::env::temp_dir().join(format!("first-hour-{}", std::process::id()));
    let (whole, parts) = (root.join("whole"), root.join("parts"));
    let unbroken = spmd_first(1, move |rank| train(rank, &whole, None))?;
    // A rank dies in step 6; the two that are left go on from step 4.
    let folder = parts.clone();
    let died = spmd_first(3, move |rank| train(rank, &folder, Some(6))).unwrap_err();
    println!("{died}");
    let resumed = spmd_first(2, move |rank| train(rank, &parts, None))?;
    println!("digests {unbroken:016x} and {resumed:016x}");
    assert_eq!(resumed, unbroken);
    std::fs::remove_dir_all(root)?;
    Ok(())
}
