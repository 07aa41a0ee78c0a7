//! The parameters of one layer of published models, from their configurations on the Hugging Face hub.

/// A model's name, and the shapes of one layer's parameters.
pub type Layer = (&'static str, Vec<Vec<usize>>);

/// Returns a dense layer's parameters: norms, grouped-query attention, a gated MLP.
fn dense(width: usize, kv_width: usize, hidden: usize) -> Vec<Vec<usize>> {
    let mut shapes = attention(width, kv_width);
    shapes.extend([[hidden, width], [hidden, width], [width, hidden]].map(Vec::from));
    shapes
}

fn attention(width: usize, kv_width: usize) -> Vec<Vec<usize>> {
    let maps = [[width, width], [kv_width, width], [kv_width, width], [width, width]];
    maps.map(Vec::from).into_iter().chain([vec![width], vec![width]]).collect()
}

/// Returns `n` experts' maps, each a parameter of its own: gate, up and down.
fn experts(n: usize, width: usize, hidden: usize) -> impl Iterator<Item = Vec<usize>> {
    (0..n).flat_map(move |_| [vec![hidden, width], vec![hidden, width], vec![width, hidden]])
}

/// DeepSeek-V3's latent attention, its router, and a shared expert.
fn deepseek() -> Vec<Vec<usize>> {
    const WIDTH: usize = 7168;
    let attention = [
        vec![WIDTH],
        vec![1536, WIDTH],
        vec![1536],
        vec![128 * 192, 1536],
        vec![512 + 64, WIDTH],
        vec![512],
        vec![128 * 256, 512],
        vec![WIDTH, 128 * 128],
        vec![WIDTH],
        vec![256, WIDTH],
        vec![256],
    ];
    attention.into_iter().chain(experts(1, WIDTH, 2048)).collect()
}

/// All layers, dense ones first.
pub fn layers() -> Vec<Layer> {
    let mixtral = attention(4096, 1024).into_iter().chain([vec![8, 4096]]).chain(experts(8, 4096, 14_336));
    let qwen = [[8192, 4096], [512, 4096], [512, 4096], [4096, 8192], [128, 4096]].map(Vec::from);
    let qwen =
        qwen.into_iter().chain([4096, 4096, 128, 128].map(|n| vec![n])).chain(experts(128, 4096, 1536));
    let gpt_oss = vec![
        vec![2880],
        vec![4096, 2880],
        vec![4096],
        vec![512, 2880],
        vec![512],
        vec![512, 2880],
        vec![512],
        vec![2880, 4096],
        vec![2880],
        vec![64],
        vec![2880],
        vec![128, 2880],
        vec![128],
        vec![128, 5760, 2880],
        vec![128, 5760],
        vec![128, 2880, 2880],
        vec![128, 2880],
    ];
    vec![
        ("Llama-3 8B", dense(4096, 1024, 14_336)),
        ("Llama-3 70B", dense(8192, 1024, 28_672)),
        ("Llama-3 405B", dense(16_384, 1024, 53_248)),
        ("Mixtral 8x7B", mixtral.collect()),
        ("Qwen3 235B-A22B", qwen.collect()),
        ("GPT-OSS 120B", gpt_oss),
        ("DeepSeek-V3 671B", deepseek().into_iter().chain(experts(256, 7168, 2048)).collect()),
        ("DeepSeek-V3 671B, fused experts", {
            deepseek().into_iter().chain([vec![256, 2 * 2048, 7168], vec![256, 7168, 2048]]).collect()
        }),
    ]
}
