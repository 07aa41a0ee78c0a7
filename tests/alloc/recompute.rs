//! The memory of recomputation, by dry runs: a rank holds its shards, the gathered units, one block's activations and
//! the inputs of all blocks.

use isoshard::Result;
use isoshard::comm::DryRun;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::nn::{Forward, Llama, LlamaConfig, Params, Plan};
use isoshard::optim::{AdamW, clip_scale, global_norm};
use isoshard::tensor::DType;

/// A Llama of 8 billion parameters, but for its vocabulary.
const LLAMA_8B: LlamaConfig = LlamaConfig {
    vocabulary: 256,
    block: 8192,
    layers: 32,
    heads: 32,
    kv_heads: 8,
    head_width: 128,
    width: 4096,
    hidden: 14336,
    base: 5e5,
    dropout: 0.0,
};

/// Takes two steps with one sequence per rank of `fsdp=8` in bf16, and returns the most bytes that tensors took.
fn peak(config: LlamaConfig, recomputed: bool) -> Result<usize> {
    let dry = DryRun::new(8, 0)?;
    let mesh = DeviceMesh::parse(&dry.rank()?, "fsdp=8")?;
    let plan = Plan::default().fsdp("fsdp");
    let plan = if recomputed { plan.recompute("h.*") } else { plan };
    let layout = plan.batch_layout(mesh.mesh());
    let mut params = Params::new(&mesh, plan, 11)?;
    params.compute_in(DType::BF16)?;
    let model = Llama::new(&mut params, config)?;
    let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1);
    for _ in 0..2 {
        let tokens = DTensor::zeros(&mesh, DType::I64, [8, config.block], layout.clone())?;
        let mut loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &tokens)?;
        let mut gradients = loss.backward()?;
        drop(loss);
        let norm = global_norm(params.ids().filter_map(|id| gradients.get(params.value(id))))?;
        optimizer.step(&mut params, &mut gradients, &clip_scale(&norm, 1.0)?, 1e-4)?;
    }
    Ok(dry.report().peak_bytes)
}

#[test]
fn a_llama_of_8_billion_parameters_holds_one_block_and_the_inputs_of_all() {
    let LlamaConfig { layers, heads, kv_heads, head_width, width, hidden, block, .. } = LLAMA_8B;
    let (f32, bf16) = (4, 2);
    let (of_queries, of_pairs) = (heads * head_width, 2 * kv_heads * head_width);
    let of_block = width * (of_queries + of_pairs) + of_queries * width + 3 * width * hidden;
    // A rank's shards of parameters, gradients and two moments in f32, and of the rounded parameters.
    let shards = (layers * of_block).div_ceil(8) * (4 * f32 + bf16);
    // The unit in use and the next one.
    let pool = 2 * of_block * bf16;
    // Per token: the normalised inputs of attention and MLP, and the sum between them; queries, keys and values before and
    // after the rotation; the attention's result; gate and up, silu of the gate, and the product.
    let of_attention = of_queries + of_pairs + of_queries + of_pairs / 2 + of_queries;
    let of_token = 3 * width + of_attention + 2 * hidden + hidden + hidden;
    let one_block = block * of_token * bf16;
    let inputs = layers * block * width * bf16;
    // The unreduced gradients of a unit that is reduced and of the one that arrives, in f32.
    let unreduced = 2 * of_block * f32;
    let bound = shards + pool + unreduced + one_block + inputs;
    let [kept, again] = [false, true].map(|recomputed| peak(LLAMA_8B, recomputed).unwrap());
    let gb = |bytes: f64| bytes / 1e9;
    println!(
        "kept {:.2} GB, recomputed {:.2} GB; shards {:.2}, pool {:.2}, unreduced {:.2}, block {:.2}, inputs {:.2}, sum {:.2} GB",
        gb(kept as f64),
        gb(again as f64),
        gb(shards as f64),
        gb(pool as f64),
        gb(unreduced as f64),
        gb(one_block as f64),
        gb(inputs as f64),
        gb(bound as f64)
    );
    assert!(again as f64 <= 1.1 * bound as f64, "{again} of {bound}");
    assert!(kept > 2 * again, "{kept}");
    // A layer more takes its shards. The backward pass has freed its input when the peak comes.
    let more = peak(LlamaConfig { layers: layers + 1, ..LLAMA_8B }, true).unwrap() - again;
    let expected = (of_block.div_ceil(8) * (4 * f32 + bf16)) as f64;
    assert!((more as f64 - expected).abs() < 0.01 * expected, "{more} for {expected}");
}
