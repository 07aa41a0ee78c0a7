//! Configs and files that cannot be read, and the names in their refusals.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use isoshard::comm::spmd;
use isoshard::dtensor::DeviceMesh;
use isoshard::hugging_face::{HuggingFaceConfig, HuggingFaceFormat};
use isoshard::nn::{DecoderLayer, FeedForwardConfig};
use isoshard::tensor::DType;
use safetensors::Dtype;
use serde_json::{Value, json};

use super::{Stored, config_of, fixture, new_folder, read};

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
        ("gpt2", "resid_pdrop", json!(1.5), "not a probability below 1"),
        ("qwen2_moe", "use_sliding_window", json!(1), "not true or false"),
        ("gemma2", "sliding_window", Value::Null, "layers with a sliding window need its length"),
        ("gemma2", "rope_parameters", json!({ "full_attention": {} }), "only Gemma 3 has rotary positions"),
        ("gemma3", "rope_parameters", rope("linear"), "for full_attention and sliding_attention"),
        ("llama2", "rope_scaling", rope("linear"), "rope_parameters of transformers 5 excludes rope_scaling"),
        ("gpt2", "n_head", json!(5), "the heads do not divide the width"),
        ("gemma3", "layer_types", json!(["full_attention"]), "one text for each of 2 layers"),
        (
            "gemma3",
            "layer_types",
            json!(["full_attention", "chunked"]),
            "full_attention or sliding_attention",
        ),
        ("gemma3", "use_bidirectional_attention", json!(true), "only false is built"),
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

/// Keys that `transformers` reads for other models, or for these in its shared code, change the scores; they were
/// ignored.
#[test]
fn keys_of_other_models_are_refused_unless_they_change_nothing() {
    for (key, other, same) in [
        ("is_causal", json!(false), json!(true)),
        ("is_bidirectional", json!(true), json!(false)),
        ("use_bidirectional_attention", json!(true), json!(false)),
        ("attention_chunk_size", json!(8), Value::Null),
        ("dual_chunk_attention_config", json!({ "chunk_size": 4 }), Value::Null),
        ("clip_qkv", json!(8.0), Value::Null),
        ("logit_scale", json!(0.0625), json!(1)),
        ("logits_scaling", json!(8.0), json!(1.0)),
        ("embedding_multiplier", json!(12.0), json!(1.0)),
        ("residual_multiplier", json!(0.22), json!(1.0)),
        ("attention_multiplier", json!(0.0078125), Value::Null),
        ("scale_attn_by_inverse_layer_idx", json!(true), json!(false)),
        ("no_rope_layers", json!([1, 0]), json!([1, 1])),
        ("rope_interleave", json!(true), json!(false)),
        ("rotary_pct", json!(0.25), json!(1.0)),
        ("alibi", json!(true), json!(false)),
        ("use_parallel_residual", json!(true), json!(false)),
        ("router_jitter_noise", json!(0.1), json!(0.0)),
        ("first_k_dense_replace", json!(1), json!(0)),
        ("quantization", json!({ "bits": 4 }), Value::Null),
    ] {
        for name in [
            "gpt2",
            "llama2",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma",
            "gemma2",
            "gemma3",
            "mixtral",
            "qwen3_moe",
        ] {
            let refused = refused_config(name, &[(key, other.clone())]);
            let (given, remedy) =
                (format!("; got {key}: "), "remove the key if the model was trained without it");
            let rule = "from_hugging_face: only ";
            assert!(
                refused.starts_with(rule) && refused.contains(&given) && refused.contains(remedy),
                "{refused}"
            );
            let decoder = |value: Option<&Value>| {
                let mut config = config_of(name);
                config.as_object_mut().expect("an object").remove(key);
                value.into_iter().for_each(|value| config[key] = value.clone());
                HuggingFaceConfig::parse(&config.to_string())
                    .unwrap_or_else(|e| panic!("{name}: {e}"))
                    .decoder()
            };
            assert_eq!(decoder(Some(&same)), decoder(None), "{name}, {key}");
        }
    }
    let yarn = json!({ "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "attn_factor": 0.7 });
    let default = json!({ "rope_type": "default", "rope_theta": 1e4, "factor": 2.0 });
    for (name, changes, rule) in [
        // Those that single architectures read.
        ("llama2", vec![("attn_logit_softcapping", json!(50.0))], "only null is built"),
        ("qwen3", vec![("final_logit_softcapping", json!(30.0))], "only null is built"),
        ("llama2", vec![("query_pre_attn_scalar", json!(144))], "only 6 is built"),
        ("mixtral", vec![("norm_topk_prob", json!(false))], "only true is built"),
        ("llama2", vec![("use_qk_norm", json!(true))], "only false is built"),
        ("qwen3", vec![("use_qk_norm", json!(false))], "only true is built"),
        ("llama2", vec![("position_embedding_type", json!("alibi"))], "only \"rope\" is built"),
        ("gpt2", vec![("position_embedding_type", json!("relative_key"))], "only \"absolute\" is built"),
        ("llama2", vec![("sliding_window", json!(4))], "the architecture has no sliding windows"),
        ("gpt2", vec![("sliding_window", json!(4))], "the architecture has no sliding windows"),
        (
            "gemma",
            vec![("layer_types", json!(["sliding_attention", "full_attention"]))],
            "full_attention alone",
        ),
        (
            "llama3",
            vec![("rope_parameters", yarn)],
            "the rotary scaling yarn has no such key; got rope_parameters.attn_factor",
        ),
        ("llama3", vec![("rope_parameters", default)], "the rotary scaling default has no such key"),
        ("llama3.1", vec![("original_max_position_embeddings", json!(7))], "only 16 is built"),
    ] {
        let refused = refused_config(name, &changes);
        assert!(refused.contains(rule), "{changes:?}: {refused}");
    }
    for changes in [
        vec![("sliding_window", json!(4)), ("use_sliding_window", json!(false))],
        vec![("sliding_window", json!(1 << 20))],
        vec![("layer_types", json!(["full_attention", "full_attention"]))],
    ] {
        let mut config = config_of("llama2");
        changes.iter().for_each(|(key, value)| config[*key] = value.clone());
        assert!(HuggingFaceConfig::parse(&config.to_string()).is_ok(), "{changes:?}");
    }
}

/// Sizes that no model has give an error, and not lists that no memory holds.
#[test]
fn sizes_without_a_model_have_no_format() {
    let refused = |name: &str, changes: Value| {
        let mut config = config_of(name);
        config.as_object_mut().expect("an object").extend(changes.as_object().expect("an object").clone());
        ["layer_types", "mlp_only_layers"].iter().for_each(|key| config[*key] = Value::Null);
        let config = HuggingFaceConfig::parse(&config.to_string()).unwrap_or_else(|e| panic!("{name}: {e}"));
        HuggingFaceFormat::new(config, DType::F32).map(drop).expect_err("it is refused").to_string()
    };
    let most = 1u64 << 20;
    let said = refused(
        "qwen3_moe",
        json!({ "num_hidden_layers": 65_536, "num_experts": most, "num_local_experts": most }),
    );
    assert!(said.starts_with("hugging_face_format: a model has at most 2^20 tensors; got 206"), "{said}");
    let said = refused("llama2", json!({ "num_hidden_layers": 65_536 }));
    assert!(
        said.starts_with("hugging_face_format: a model has at most 2^20 tensors; got 1310720 in 65536"),
        "{said}"
    );
    let said =
        refused("gpt2", json!({ "n_embd": most, "n_inner": most, "n_layer": 40_000, "vocab_size": most }));
    assert!(said.starts_with("hugging_face_format: a model has at most 2^58 elements"), "{said}");
    // Each layer once, however long the list is.
    let mut config = config_of("qwen3_moe");
    config["num_hidden_layers"] = json!(65_536);
    config["layer_types"] = Value::Null;
    config["mlp_only_layers"] = vec![7; 300_000].into();
    let decoder = HuggingFaceConfig::parse(&config.to_string()).expect("it is a config").decoder();
    let plain = |of: &DecoderLayer| matches!(of.feed_forward, FeedForwardConfig::Mlp(_));
    assert_eq!(decoder.layers.iter().position(plain), Some(7));
    assert_eq!(decoder.layers.iter().filter(|layer| plain(layer)).count(), 1);
}

/// Models are read from folders: a path that is none says what to give.
#[test]
fn paths_that_are_no_folders_of_models_say_what_is_wanted() {
    let refused = |dir: &Path| HuggingFaceFormat::read(dir).map(drop).expect_err("it is refused").to_string();
    assert_eq!(
        refused(Path::new("meta-llama/Llama-3.2-1B")),
        "from_hugging_face: there is no such folder, and models are read from folders; got meta-llama/Llama-3.2-1B; \
         download the model by `hf download meta-llama/Llama-3.2-1B --local-dir DIR`, and give DIR"
    );
    let said = refused(Path::new("/no/such/folder"));
    assert!(
        said.ends_with(
            "give the folder to which save_pretrained of transformers or `hf download` has written"
        ),
        "{said}"
    );
    let said = refused(&fixture("llama2").join("model.safetensors"));
    assert!(said.contains("models are read from folders, and this is a file"), "{said}");
    let said = refused(&fixture("llama2").join(".."));
    assert!(said.contains("the folder has no config.json") && said.contains("safetensors"), "{said}");
}

/// A pattern for adapters can be tried on a config alone.
#[test]
fn patterns_of_linear_maps_match_before_weights_are_read() {
    let config = HuggingFaceConfig::read(fixture("mixtral")).expect("the fixture is there");
    let found = config.linear_maps("h.*.moe.experts.*").expect("it has experts");
    assert_eq!(found[..3], ["h.0.moe.experts.gate", "h.0.moe.experts.up", "h.0.moe.experts.down"]);
    assert_eq!(found.len(), 6);
    let refused = config.linear_maps("h.*.mlp.up").unwrap_err().to_string();
    assert!(
        refused.starts_with("lora: a pattern matches no linear map; got \"h.*.mlp.up\" among "),
        "{refused}"
    );
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
    let refused = HuggingFaceFormat::read(&dir);
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
    let refused = refused_files("llama2", |dir| {
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
        fs::write(dir.join("model.safetensors"), pointer).expect("it can be written");
    });
    expect_text(&refused, &["the file is a pointer of Git LFS", "fetch the weights by git lfs pull"]);
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

    // Two entries of one size that name the same bytes.
    let entry = r#""data_offsets":["#;
    let len = u64::from_le_bytes(whole[..8].try_into().expect("eight bytes")) as usize;
    let mut text = String::from_utf8(whole[8..8 + len].to_vec()).expect("JSON");
    let entries: Vec<Value> = {
        let all: BTreeMap<String, Value> = serde_json::from_str(&text).expect("JSON");
        all.into_iter().filter(|(name, _)| name != "__metadata__").map(|(_, entry)| entry).collect()
    };
    let offsets = |of: &Value| format!("{entry}{},{}]", of["data_offsets"][0], of["data_offsets"][1]);
    let (a, b) = (0..entries.len())
        .flat_map(|a| (0..a).map(move |b| (a, b)))
        .map(|(a, b)| (&entries[a], &entries[b]))
        .find(|(a, b)| a["shape"] == b["shape"] && offsets(a).len() == offsets(b).len())
        .expect("two tensors have one shape");
    text = text.replace(&offsets(a), &offsets(b));
    let mut overlapping = whole.clone();
    overlapping[8..8 + len].copy_from_slice(text.as_bytes());
    assert!(overlapping != whole);
    expect_text(&refused_bytes(&overlapping), &["the file is not whole safetensors"]);

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
