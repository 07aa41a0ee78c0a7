//! Models of Hugging Face against what `transformers` computes, and refusals of files by name.
//!
//! `tests/hugging_face/fixtures.py` built small random models of each architecture with `transformers`, saved them, and
//! stored beside each its logits, loss, gradients and greedily chosen tokens. Here each is read on three meshes and
//! computes the same: logits and gradients differ by at most 1e-5 of the largest value of their tensor, tokens are equal.
//! `fixtures.py --check` tells whether the present `transformers` still gives the stored files.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::hugging_face::{HuggingFaceConfig, HuggingFaceFormat, PretrainedDecoder};
use isoshard::nn::{Decoder, Forward, Module, Parallel, Plan};
use isoshard::placement::Layout;
use isoshard::tensor::Tensor;
use isoshard::{Error, Result};
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
        _ => of.params.plan().batch_layout(mesh.mesh()),
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
            let loss = of.model.loss(&Forward::train_without_dropout(&of.params), &tokens, &targets)?;
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
        for (mesh, ranks) in MESHES {
            let (dir, expected) = (dir.clone(), expected.clone());
            let run = move |rank| {
                let of = read(&DeviceMesh::parse(&rank, mesh)?, &dir)?;
                let expected = Stored::read(&expected);
                expect_near("logits", &logits(&of, expected.i64s("tokens"))?, &expected.f32s("logits"));
                Ok(())
            };
            spmd(ranks, run).unwrap_or_else(|e| panic!("{form} on {mesh}: {e}"));
        }
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
        for (mesh, ranks) in MESHES {
            let (dir, expected) = (dir.clone(), fixture(form).join("expected.safetensors"));
            let run = move |rank| {
                let of = read(&DeviceMesh::parse(&rank, mesh)?, &dir)?;
                let expected = Stored::read(&expected);
                expect_near("logits", &logits(&of, expected.i64s("tokens"))?, &expected.f32s("logits"));
                Ok(())
            };
            spmd(ranks, run).unwrap_or_else(|e| panic!("{form} on {mesh}: {e}"));
        }
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
        if name.starts_with("qwen") {
            if let Some(count) = old.remove("num_local_experts") {
                old.insert("num_experts".into(), count);
            }
        }
        let parse = |config: &Value| {
            HuggingFaceConfig::parse(&config.to_string()).unwrap_or_else(|e| panic!("{name}: {e}"))
        };
        assert_eq!(parse(&Value::Object(old)).decoder(), parse(&new).decoder(), "{name}");
    }
}

/// Returns the refusal of a config with some values replaced.
fn refused_config(name: &str, changes: &[(&str, Value)]) -> String {
    let mut config = config_of(name);
    for (key, value) in changes {
        config[*key] = value.clone();
    }
    match HuggingFaceConfig::parse(&config.to_string()) {
        Ok(config) => panic!("{changes:?} was accepted: {config:?}"),
        Err(e) => e.to_string(),
    }
}

#[test]
fn configs_that_cannot_be_computed_are_refused_by_key() {
    let rope = |kind: &str| json!({ "rope_type": kind, "rope_theta": 1e4, "factor": 2.0 });
    for (name, key, value, rule) in [
        ("llama2", "architectures", json!(["MambaForCausalLM"]), "the architecture is not built"),
        (
            "llama2",
            "architectures",
            json!(["LlamaForSequenceClassification"]),
            "the architecture is not built",
        ),
        ("llama2", "model_type", json!("mistral"), "LlamaForCausalLM has model_type llama"),
        (
            "llama2",
            "rope_parameters",
            rope("longrope"),
            "the rotary scalings are default, linear, llama3 and yarn",
        ),
        ("llama2", "rope_parameters", rope("llama3"), "a key is absent"),
        ("llama2", "hidden_act", json!("mish"), "the activations are silu"),
        ("llama2", "quantization_config", json!({ "bits": 4 }), "quantized weights are not built"),
        ("llama2", "partial_rotary_factor", json!(0.5), "only whole heads are turned"),
        ("llama2", "hidden_size", json!(-3), "not a size from 1 to 2^20"),
        ("llama2", "hidden_size", json!(1u64 << 40), "not a size from 1 to 2^20"),
        ("llama2", "num_hidden_layers", json!(1 << 18), "at most 65536 layers"),
        (
            "llama2",
            "num_key_value_heads",
            json!(3),
            "the heads are not a multiple of those of keys and values",
        ),
        ("llama2", "rms_norm_eps", json!("small"), "not a positive number"),
        ("llama2", "tie_word_embeddings", json!(1), "not true or false"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", json!(true), "only false is built"),
        ("gpt2", "resid_pdrop", json!(0.5), "the model has one probability of dropout"),
        ("gpt2", "n_head", json!(5), "the heads do not divide the width"),
        ("gemma3", "layer_types", json!(["full_attention"]), "one text for each of 2 layers"),
        (
            "gemma3",
            "layer_types",
            json!(["full_attention", "chunked"]),
            "full_attention or sliding_attention",
        ),
        ("gemma3", "use_bidirectional_attention", json!(true), "only causal models are built"),
        ("mixtral", "num_experts_per_tok", json!(9), "at most 4 experts can be chosen"),
    ] {
        let refused = refused_config(name, &[(key, value.clone())]);
        assert!(
            refused.contains(rule) && refused.starts_with("from_hugging_face: "),
            "{key}: {value}: {refused}"
        );
    }
    let absent = refused_config("llama2", &[("vocab_size", Value::Null)]);
    assert_eq!(absent, "from_hugging_face: a key is absent; got no vocab_size in config.json");
}

/// Copies a fixture, lets `change` damage the copy, and returns the refusal.
fn refused_files(name: &str, change: impl FnOnce(&Path)) -> String {
    let dir =
        new_folder(&format!("refused_{name}_{:?}", std::thread::current().id()).replace(['(', ')'], ""));
    fs::create_dir_all(&dir).expect("the folder is new");
    for file in fs::read_dir(fixture(name)).expect("the fixture is there") {
        let file = file.expect("a file");
        fs::copy(file.path(), dir.join(file.file_name())).expect("it can be copied");
    }
    change(&dir);
    let refused: std::result::Result<HuggingFaceFormat, Error> = HuggingFaceFormat::read(&dir);
    let text = refused.map(|_| ()).expect_err("it is refused").to_string();
    fs::remove_dir_all(&dir).expect("it was made here");
    text
}

/// Returns the refusal of a fixture of one file whose tensors are changed.
fn refused_tensors(
    name: &str,
    change: impl FnOnce(&mut BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>),
) -> String {
    refused_files(name, |dir| {
        let path = dir.join("model.safetensors");
        let mut stored = Stored::read(&path);
        change(&mut stored.0);
        stored.write(&path);
    })
}

const NORM: &str = "model.norm.weight";

#[track_caller]
fn expect_text(refused: &str, parts: &[&str]) {
    assert!(parts.iter().all(|part| refused.contains(part)), "{refused}");
}

#[test]
fn missing_tensors_are_named() {
    let refused = refused_tensors("llama2", |t| drop(t.remove(NORM)));
    expect_text(&refused, &["tensors are missing; got model.norm.weight in "]);
}

#[test]
fn extra_tensors_are_named() {
    let refused = refused_tensors("llama2", |t| {
        let norm = t[NORM].clone();
        t.insert("model.layers.2.input_layernorm.weight".into(), norm);
    });
    expect_text(
        &refused,
        &["the architecture has no such tensors; got model.layers.2.input_layernorm.weight in "],
    );
}

#[test]
fn tensors_of_other_shapes_are_named() {
    let refused = refused_tensors("llama2", |t| t.get_mut(NORM).expect("a norm").1 = vec![2, 12]);
    expect_text(&refused, &["another shape than config.json says; got model.norm.weight[2, 12], not [24],"]);
}

#[test]
fn tensors_of_other_dtypes_are_named() {
    let refused = refused_tensors("llama2", |t| t.get_mut(NORM).expect("a norm").0 = Dtype::I32);
    expect_text(&refused, &["weights are f32, f16 or bf16; got model.norm.weight of I32"]);
}

#[test]
fn tied_heads_that_differ_are_refused() {
    let mut same = None;
    let refused = refused_tensors("qwen2", |t| {
        let mut table = t["model.embed_tokens.weight"].clone();
        same = Some(table.clone());
        table.2[0] ^= 1;
        t.insert("lm_head.weight".into(), table);
    });
    expect_text(
        &refused,
        &["ties two tensors that differ; got lm_head.weight and model.embed_tokens.weight"],
    );
}

fn edit_index(dir: &Path, change: impl FnOnce(&mut Value)) {
    let path = dir.join("model.safetensors.index.json");
    let mut index =
        serde_json::from_str(&fs::read_to_string(&path).expect("it has an index")).expect("it is JSON");
    change(&mut index);
    fs::write(&path, index.to_string()).expect("it can be written");
}

#[test]
fn names_of_files_do_not_leave_the_folder() {
    for name in ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".safetensors", "model.bin"]
    {
        let refused = refused_files("llama3_shards", |dir| {
            edit_index(dir, |index| index["weight_map"][NORM] = json!(name));
        });
        expect_text(&refused, &["a shard's name has letters, digits, - _ . only", name]);
    }
}

#[test]
fn an_index_that_differs_from_its_files_is_refused() {
    let refused = refused_files("llama3_shards", |dir| {
        edit_index(dir, |index| index["weight_map"][NORM] = json!("model-00001-of-00003.safetensors"));
    });
    expect_text(&refused, &["a file has a tensor that the index has in another file", NORM]);
    let refused = refused_files("llama3_shards", |dir| {
        edit_index(dir, |index| drop(index["weight_map"].as_object_mut().expect("a map").remove(NORM)));
    });
    expect_text(&refused, &["the index lacks a tensor of the file", NORM]);
    let refused = refused_files("llama3_shards", |dir| {
        edit_index(dir, |index| index["weight_map"]["model.more"] = index["weight_map"][NORM].clone());
    });
    expect_text(&refused, &["the index names a tensor that the file lacks", "model.more"]);
    let refused = refused_files("llama3_shards", |dir| {
        let path = dir.join("model.safetensors.index.json");
        let text = fs::read_to_string(&path).expect("it has an index");
        let twice = format!("\"weight_map\": {{ \"{NORM}\": \"model-00001-of-00003.safetensors\",");
        fs::write(&path, text.replace("\"weight_map\": {", &twice)).expect("it can be written");
    });
    expect_text(&refused, &["model.norm.weight stands twice"]);
    let refused = refused_files("llama3_shards", |dir| {
        fs::remove_file(dir.join("model-00002-of-00003.safetensors")).expect("it is there");
    });
    expect_text(&refused, &["cannot access the file", "model-00002-of-00003.safetensors"]);
}

#[test]
fn a_tensor_in_two_files_is_refused() {
    let refused = refused_files("llama3_shards", |dir| {
        let norm = Stored::read(&dir.join("model-00003-of-00003.safetensors")).0[NORM].clone();
        let path = dir.join("model-00001-of-00003.safetensors");
        let mut first = Stored::read(&path);
        first.0.insert(NORM.into(), norm);
        first.write(&path);
    });
    expect_text(
        &refused,
        &[
            "a file has a tensor that the index has in another file",
            "model.norm.weight, in the index in model-0000",
        ],
    );
}

#[test]
fn other_files_than_safetensors_are_refused() {
    let remove = |dir: &Path| fs::remove_file(dir.join("model.safetensors")).expect("it is there");
    let refused = refused_files("llama2", remove);
    expect_text(&refused, &["has neither model.safetensors nor model.safetensors.index.json"]);
    let refused = refused_files("llama2", |dir| {
        remove(dir);
        fs::write(dir.join("pytorch_model.bin"), "pickle").expect("it can be written");
    });
    expect_text(&refused, &["pytorch_model.bin is a pickle"]);
}

/// Reading a damaged file ends with an error or a format, and soon.
#[test]
fn damaged_files_are_refused() {
    let whole = fs::read(fixture("llama2").join("model.safetensors")).expect("the fixture is there");
    let refused_bytes = |bytes: &[u8]| {
        refused_files("llama2", |dir| {
            fs::write(dir.join("model.safetensors"), bytes).expect("it can be written");
        })
    };
    for len in [0, 7, 8, 100, whole.len() - 1] {
        expect_text(&refused_bytes(&whole[..len]), &["the file is not whole safetensors"]);
    }
    let mut longer = whole.clone();
    longer.push(0);
    expect_text(&refused_bytes(&longer), &["the file is not whole safetensors"]);
    let mut header = whole.clone();
    header[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    expect_text(&refused_bytes(&header), &["the file is not whole safetensors"]);

    // A small generator: each mutation changes up to three bytes of a config or of a header.
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    let config = fs::read(fixture("gemma3").join("config.json")).expect("the fixture is there");
    let mut accepted = 0;
    for _ in 0..20_000 {
        let mut text = config.clone();
        for _ in 0..=random(3) {
            let at = random(text.len());
            text[at] = b"0123456789-eE.\"{}[],: atrufnl"[random(29)];
        }
        accepted +=
            usize::from(std::str::from_utf8(&text).is_ok_and(|t| HuggingFaceConfig::parse(t).is_ok()));
    }
    assert!(accepted > 1000, "{accepted}: most mutations touch a key that is not read");
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().expect("eight bytes")) as usize;
    let dir = new_folder("mutated");
    fs::create_dir_all(&dir).expect("the folder is new");
    fs::copy(fixture("llama2").join("config.json"), dir.join("config.json")).expect("it can be copied");
    let mut read = 0;
    for _ in 0..1_000 {
        let mut bytes = whole.clone();
        for _ in 0..=random(3) {
            let at = random(header);
            bytes[at] = bytes[at].wrapping_add(random(255) as u8 + 1);
        }
        fs::write(dir.join("model.safetensors"), bytes).expect("it can be written");
        read += usize::from(HuggingFaceFormat::read(&dir).is_ok());
    }
    assert!(read < 100, "{read} of 1000 damaged headers were read");
    fs::remove_dir_all(&dir).expect("it was made here");
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

#[test]
fn a_folder_that_exists_is_not_overwritten() {
    let dir = new_folder("exists");
    fs::create_dir_all(&dir).expect("the folder is new");
    let target = dir.clone();
    let run = move |rank| {
        let of = read(&DeviceMesh::parse(&rank, "1")?, &fixture("qwen3"))?;
        of.save(&target)
    };
    let refused = spmd(1, run).unwrap_err().to_string();
    expect_text(&refused, &["save_hugging_face: the folder exists", "choose another name"]);
    fs::remove_dir_all(&dir).expect("it was made here");
}
