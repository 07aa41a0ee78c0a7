//! Models of Hugging Face against what `transformers` computes, and refusals of files by name.
//!
//! `tests/hugging_face/fixtures.py` built small random models of each architecture with `transformers`, saved them, and
//! stored beside each its logits, loss, gradients and greedily chosen tokens. Here each is read on three meshes and
//! computes the same: logits and gradients differ by at most 1e-5 of the largest value of their tensor, tokens are equal.
//! `fixtures.py --check` tells whether the present `transformers` still gives the stored files.

mod adapters;
mod defaults;
mod failures;
mod names;
mod refusals;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::hugging_face::{HuggingFaceConfig, HuggingFaceFormat, PretrainedDecoder};
use isoshard::nn::{Decoder, Forward, Module, Parallel, Plan};
use isoshard::placement::Layout;
use isoshard::tensor::Tensor;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};

const MESHES: [(&str, usize); 3] = [("1", 1), ("fsdp=2", 2), ("tp=2", 2)];
/// The largest difference, relative to the largest value of the tensor.
const BOUND: f64 = 1e-5;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hugging_face").join(name)
}

/// Returns a folder of this test's own, which does not exist.
fn new_folder(name: &str) -> PathBuf {
    let path =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("hugging_face_{name}_{}", std::process::id()));
    let _ = fs::remove_dir_all(&path);
    path
}

/// The tensors of a safetensors file.
struct Stored(BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>);

impl Stored {
    fn read(path: &Path) -> Stored {
        let bytes = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let tensors = SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let one = |(name, t): (&str, TensorView<'_>)| {
            (name.to_string(), (t.dtype(), t.shape().to_vec(), t.data().to_vec()))
        };
        Stored(tensors.iter().map(one).collect())
    }

    fn write(&self, path: &Path) {
        let view = |(dtype, shape, data)| TensorView::new(dtype, shape, data).expect("it fits");
        let views =
            self.0.iter().map(|(name, (dtype, shape, data))| (name, view((*dtype, shape.clone(), data))));
        fs::write(path, safetensors::serialize(views, None).expect("it can be written"))
            .expect("the folder is there");
    }

    fn i64s(&self, name: &str) -> (Vec<usize>, Vec<i64>) {
        let (dtype, shape, data) = &self.0[name];
        assert_eq!(*dtype, Dtype::I64);
        let (words, _) = data.as_chunks();
        (shape.clone(), words.iter().map(|w| i64::from_le_bytes(*w)).collect())
    }

    fn f32s(&self, name: &str) -> Vec<f32> {
        let (dtype, _, data) = &self.0[name];
        assert_eq!(*dtype, Dtype::F32);
        let (words, _) = data.as_chunks();
        words.iter().map(|w| f32::from_le_bytes(*w)).collect()
    }
}

#[track_caller]
fn expect_near(name: &str, found: &[f32], wanted: &[f32]) {
    assert_eq!(found.len(), wanted.len(), "{name}");
    let largest = wanted.iter().fold(0.0, |m: f64, x| m.max(f64::from(x.abs())));
    let differences = found.iter().zip(wanted).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
    let most = differences.fold(0.0, |m: f64, d| if d.is_nan() { f64::INFINITY } else { m.max(d) });
    assert!(most <= BOUND * largest, "{name}: differs by {most:e}, the largest value is {largest:e}");
}

fn plan(mesh: &DeviceMesh, dir: &Path) -> Result<Plan> {
    let [_, kv_heads] = HuggingFaceConfig::read(dir)?.heads();
    Plan::transformer(mesh.mesh(), Parallel { heads: kv_heads, sequence: false })
}

fn read(mesh: &DeviceMesh, dir: &Path) -> Result<PretrainedDecoder> {
    Decoder::from_hugging_face(mesh, dir, plan(mesh, dir)?)
}

/// Puts rows of tokens in the layout of the batch; a single row on every rank.
fn put(of: &PretrainedDecoder, (shape, tokens): (Vec<usize>, Vec<i64>)) -> Result<DTensor> {
    let mesh = of.params.mesh();
    let layout = match shape[0] {
        1 => Layout::replicated(mesh.mesh().ndim()),
        _ => of.params.batch_layout(),
    };
    DTensor::distribute(mesh, &Tensor::from_vec(tokens, shape)?, layout)
}

fn logits(of: &PretrainedDecoder, tokens: (Vec<usize>, Vec<i64>)) -> Result<Vec<f32>> {
    let tokens = put(of, tokens)?;
    of.model.forward(&Forward::eval(&of.params), &tokens)?.full_tensor()?.to_vec()
}

/// Returns the token of the highest score at the end of each of `steps` growing sequences.
fn greedy(of: &PretrainedDecoder, mut tokens: Vec<i64>, steps: usize) -> Result<Vec<i64>> {
    let prompt = tokens.len();
    for _ in 0..steps {
        let scores = logits(of, (vec![1, tokens.len()], tokens.clone()))?;
        let last = &scores[scores.len() - scores.len() / tokens.len()..];
        let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b])).expect("a vocabulary");
        tokens.push(best as i64);
    }
    Ok(tokens.split_off(prompt))
}

/// Compares logits, loss, gradients and chosen tokens with those of `transformers` on each mesh.
fn compare(name: &str) {
    let dir = fixture(name);
    for (mesh, ranks) in MESHES {
        let out = new_folder(&format!("gradients_{name}_{ranks}_{}", &mesh[..1]));
        let (source, target) = (dir.clone(), out.clone());
        let run = move |rank| {
            let mesh = DeviceMesh::parse(&rank, mesh)?;
            let expected = Stored::read(&source.join("expected.safetensors"));
            let mut of = read(&mesh, &source)?;
            expect_near("logits", &logits(&of, expected.i64s("tokens"))?, &expected.f32s("logits"));
            let (tokens, targets) = (put(&of, expected.i64s("tokens"))?, put(&of, expected.i64s("targets"))?);
            let mut loss = of.model.loss(&Forward::train_without_dropout(&of.params), &tokens, &targets)?;
            expect_near("loss", &loss.full_tensor()?.to_vec()?, &expected.f32s("loss"));
            let (wanted, (_, prompt)) = (expected.i64s("greedy").1, expected.i64s("prompt"));
            assert_eq!(greedy(&of, prompt, wanted.len())?, wanted);
            // Saved like parameters, gradients have the names of the files.
            let grads = loss.backward()?;
            drop((loss, tokens, targets));
            let ids: Vec<_> = of.params.ids().collect();
            for id in ids {
                let value = of.params.value(id);
                let grad = match grads.get(value) {
                    Some(grad) => grad.redistribute(value.layout().clone())?,
                    None => value.zeros_like()?,
                };
                of.params.set(id, grad)?;
            }
            of.save(&target)
        };
        spmd(ranks, run).unwrap_or_else(|e| panic!("{name} on {mesh}: {e}"));
        let wanted = Stored::read(&dir.join("gradients.safetensors"));
        let found = Stored::read(&out.join("model.safetensors"));
        assert!(found.0.keys().eq(wanted.0.keys()), "{name}");
        for tensor in wanted.0.keys() {
            expect_near(&format!("{name} on {mesh}: {tensor}"), &found.f32s(tensor), &wanted.f32s(tensor));
        }
        fs::remove_dir_all(&out).expect("it was written");
    }
}

/// Compares the logits of a folder's model with stored ones on each mesh.
fn compare_logits(dir: &Path, expected: &Path) {
    for (mesh, ranks) in MESHES {
        let (own, expected) = (dir.to_path_buf(), expected.to_path_buf());
        let run = move |rank| {
            let of = read(&DeviceMesh::parse(&rank, mesh)?, &own)?;
            let expected = Stored::read(&expected);
            expect_near("logits", &logits(&of, expected.i64s("tokens"))?, &expected.f32s("logits"));
            Ok(())
        };
        spmd(ranks, run).unwrap_or_else(|e| panic!("{} on {mesh}: {e}", dir.display()));
    }
}

/// Reads and writes a folder on each mesh, and compares all tensors and the config.
fn export(name: &str) {
    let contents = |dir: &Path| {
        let files = fs::read_dir(dir).expect("the folder is there").map(|f| f.expect("a file").path());
        let weights =
            files.filter(|f| f.file_name().is_some_and(|n| n.to_string_lossy().starts_with("model")));
        let weights = weights.filter(|f| f.extension().is_some_and(|e| e == "safetensors"));
        let tensors: Vec<_> = weights.flat_map(|f| Stored::read(&f).0).collect();
        let count = tensors.len();
        let tensors: BTreeMap<_, _> = tensors.into_iter().collect();
        assert_eq!(tensors.len(), count, "each tensor is in one file");
        let config = fs::read_to_string(dir.join("config.json")).expect("it has a config");
        (tensors, serde_json::from_str::<Value>(&config).expect("it is JSON"))
    };
    let dir = fixture(name);
    for (mesh, ranks) in MESHES {
        let out = new_folder(&format!("export_{name}_{ranks}_{}", &mesh[..1]));
        let (source, target) = (dir.clone(), out.clone());
        let run = move |rank| {
            let of = read(&DeviceMesh::parse(&rank, mesh)?, &source)?;
            of.format.save_shards(&of.params, &target, 12_000)
        };
        spmd(ranks, run).unwrap_or_else(|e| panic!("{name} on {mesh}: {e}"));
        assert!(out.join("model.safetensors.index.json").exists(), "{name}: it has several shards");
        assert!(contents(&dir) == contents(&out), "{name} on {mesh}");
        assert_eq!(HuggingFaceFormat::read(&out).unwrap(), HuggingFaceFormat::read(&dir).unwrap());
        fs::remove_dir_all(&out).expect("it was written");
    }
}

macro_rules! architectures {
    ($($test:ident $folder:literal)*) => {$(
        #[test]
        fn $test() {
            compare($folder);
            export($folder);
        }
    )*};
}

architectures! {
    gpt2 "gpt2"
    llama2 "llama2"
    llama3 "llama3"
    llama3_1_scales_its_angles "llama3.1"
    llama_with_biases "llama_biases"
    mistral_has_a_window "mistral"
    qwen2_has_biases "qwen2"
    qwen3_normalises_heads "qwen3"
    gemma "gemma"
    gemma2_caps_scores_and_alternates_windows "gemma2"
    gemma3_has_two_bases "gemma3"
    mixtral "mixtral"
    qwen2_moe_has_a_shared_expert "qwen2_moe"
    qwen3_moe "qwen3_moe"
    qwen3_moe_in_every_second_layer "qwen3_moe_mixed"
}

/// Weights in shards, in bf16, and with fused experts.
#[test]
fn other_forms_of_the_files_are_the_same_model() {
    for (form, like) in
        [("llama3_shards", "llama3"), ("qwen3_moe_fused", "qwen3_moe"), ("qwen2_bf16", "qwen2_bf16")]
    {
        let (dir, expected) = (fixture(form), fixture(like).join("expected.safetensors"));
        compare_logits(&dir, &expected);
        export(form);
    }
}

/// Configs that compute something else from the weights of another fixture.
#[test]
fn other_configs_of_the_same_weights() {
    for (form, base) in [("llama3_linear", "llama3"), ("llama3_yarn", "llama3"), ("qwen2_window", "qwen2")] {
        let dir = new_folder(form);
        fs::create_dir_all(&dir).expect("the folder is new");
        for (from, file) in [(form, "config.json"), (base, "model.safetensors")] {
            fs::copy(fixture(from).join(file), dir.join(file)).expect("it can be copied");
        }
        compare_logits(&dir, &fixture(form).join("expected.safetensors"));
        fs::remove_dir_all(&dir).expect("it was made here");
    }
}

fn config_of(name: &str) -> Value {
    let text = fs::read_to_string(fixture(name).join("config.json")).expect("the fixture has a config");
    serde_json::from_str(&text).expect("it is JSON")
}

/// transformers 4 writes the same models with other keys.
#[test]
fn configs_of_transformers_4_mean_the_same() {
    for name in
        ["llama2", "llama3.1", "mistral", "qwen2", "gemma2", "gemma3", "mixtral", "qwen2_moe", "qwen3_moe"]
    {
        let new = config_of(name);
        let mut old = new.as_object().expect("an object").clone();
        let dtype = old.remove("dtype").expect("transformers 5 writes it");
        old.insert("torch_dtype".into(), dtype);
        old.remove("layer_types");
        let rope = old.remove("rope_parameters").expect("transformers 5 writes it");
        let full = rope.get("full_attention").unwrap_or(&rope);
        old.insert("rope_theta".into(), full["rope_theta"].clone());
        if let Some(sliding) = rope.get("sliding_attention") {
            old.insert("rope_local_base_freq".into(), sliding["rope_theta"].clone());
            old.insert("sliding_window_pattern".into(), json!(2));
            old.remove("_sliding_window_pattern");
        }
        if full["rope_type"] != "default" {
            let mut scaling = full.as_object().expect("an object").clone();
            scaling.remove("rope_theta");
            if let Some(kind) = scaling.remove("rope_type") {
                scaling.insert("type".into(), kind);
            }
            old.insert("rope_scaling".into(), Value::Object(scaling));
        } else {
            old.insert("rope_scaling".into(), Value::Null);
        }
        if name.starts_with("qwen")
            && let Some(count) = old.remove("num_local_experts")
        {
            old.insert("num_experts".into(), count);
        }
        let parse = |config: &Value| {
            HuggingFaceConfig::parse(&config.to_string()).unwrap_or_else(|e| panic!("{name}: {e}"))
        };
        assert_eq!(parse(&Value::Object(old)).decoder(), parse(&new).decoder(), "{name}");
    }
}

/// Files of older versions: names without a prefix, buffers, and a head that is stored beside the table it is tied to.
#[test]
fn names_of_older_files_are_understood() {
    let dir = new_folder("older");
    fs::create_dir_all(&dir).expect("the folder is new");
    let older = |name: &str, change: &dyn Fn(&mut Stored)| {
        fs::copy(fixture(name).join("config.json"), dir.join("config.json")).expect("it can be copied");
        let mut stored = Stored::read(&fixture(name).join("model.safetensors"));
        change(&mut stored);
        stored.write(&dir.join("model.safetensors"));
        HuggingFaceFormat::read(&dir).unwrap_or_else(|e| panic!("{e}"))
    };
    let format = older("gpt2", &|stored| {
        let short = |name: String| name.strip_prefix("transformer.").expect("it is prefixed").to_string();
        stored.0 = std::mem::take(&mut stored.0).into_iter().map(|(name, t)| (short(name), t)).collect();
        for i in 0..2 {
            stored.0.insert(format!("h.{i}.attn.bias"), (Dtype::U8, vec![1, 1, 4, 4], vec![1; 16]));
        }
    });
    assert!(format.names().all(|name| !name.starts_with("transformer.") && name != "h.0.attn.bias"));
    let (source, again) = (dir.clone(), dir.join("again"));
    let target = again.clone();
    let format = older("qwen2", &|stored| {
        let table = stored.0["model.embed_tokens.weight"].clone();
        stored.0.insert("lm_head.weight".into(), table);
        let frequencies = (Dtype::F32, vec![3], vec![0; 12]);
        stored.0.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), frequencies);
    });
    let run = move |rank| {
        let of = read(&DeviceMesh::parse(&rank, "fsdp=2")?, &source)?;
        of.save(&target)
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(HuggingFaceFormat::read(&again).unwrap(), format);
    let mut wanted = Stored::read(&dir.join("model.safetensors"));
    wanted.0.remove("model.layers.0.self_attn.rotary_emb.inv_freq");
    assert!(Stored::read(&again.join("model.safetensors")).0 == wanted.0, "the head is written again");
    fs::remove_dir_all(&dir).expect("it was made here");
}
