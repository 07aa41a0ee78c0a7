//! Loading into parameters of any layout, and saving them again, without a model.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;

use super::format::HuggingFaceFormat;
use crate::comm::spmd;
use crate::dtensor::DeviceMesh;
use crate::error::Result;
use crate::nn::{FusedMaps, Params, Plan};
use crate::rng::Init;

const ALL: [&str; 16] = [
    "gemma",
    "gemma2",
    "gemma3",
    "gpt2",
    "llama2",
    "llama3",
    "llama3.1",
    "llama3_shards",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_bf16",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe_fused",
];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hugging_face").join(name)
}

/// Declares the pieces of a format, queries, keys and values and the maps of MLPs in fused parameters.
fn declare(format: &HuggingFaceFormat, params: &mut Params) -> Result<()> {
    let heads = format.config.kv_heads;
    let each = format.config.heads / heads * format.config.head_width;
    let d = format.config.head_width;
    let sizes = format.piece_sizes();
    for (&path, &size) in &sizes {
        let (scope, name) = path.rsplit_once('.').expect("every path has a module");
        let (parent, module) = scope.rsplit_once('.').unwrap_or(("", scope));
        let inputs = size / format.config.width;
        let fused = |maps: FusedMaps, as_one: &str, params: &mut Params| {
            let rows = maps.groups() * maps.rows_per_group();
            let one = maps.groups() * maps.rows_per_group() / if as_one == "qkv" { 1 } else { 2 };
            let row = match (name, as_one) {
                ("bias", _) => vec![],
                (_, "qkv") => vec![format.config.width],
                _ => vec![size / one],
            };
            let mut root = params.root();
            let mut scope = root.child(parent);
            assert!(rows > 0);
            scope.child(as_one).fused_param(name, &maps, &row, Init::Ones).map(drop)
        };
        match module {
            "q" => fused(FusedMaps::new(heads, [("q", each), ("k", d), ("v", d)])?, "qkv", params)?,
            "gate" if name == "weight" && parent.ends_with("mlp") => {
                let (groups, rows) = (inputs / 3, 3);
                fused(FusedMaps::new(groups, [("gate", rows), ("up", rows)])?, "gate_up", params)?;
            }
            "k" | "v" => {}
            "up" if sizes.contains_key(&format!("{parent}.gate.{name}")[..]) && parent.ends_with("mlp") => {}
            "experts" => {
                let mixture = format.config.experts.as_ref().expect("it has experts");
                let (width, hidden) = (format.config.width, mixture.hidden);
                let [inputs, outputs] = if name == "down" { [hidden, width] } else { [width, hidden] };
                params.root().child(scope).param(name, [mixture.experts, inputs, outputs], Init::Ones)?;
            }
            _ if name == "weight" && size % format.config.width == 0 && size > format.config.width => {
                // The shape of an odd map does not matter here: its elements are those of the file, in order.
                params.root().child(scope).param(name, [inputs, format.config.width], Init::Ones)?;
            }
            _ => drop(params.root().child(scope).param(name, [size], Init::Ones)?),
        }
    }
    Ok(())
}

/// Returns all tensors of a folder's safetensors files, with dtypes, shapes and bytes.
fn contents(dir: &Path) -> Vec<(String, String, Vec<u8>)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).expect("the folder is there") {
        let path = entry.expect("it can be listed").path();
        let name = path.file_name().expect("a file").to_string_lossy().into_owned();
        if name.starts_with("model") && name.ends_with(".safetensors") {
            let bytes = fs::read(&path).expect("it can be read");
            let tensors = SafeTensors::deserialize(&bytes).expect("it is whole");
            let one = |(name, t): (&str, safetensors::tensor::TensorView<'_>)| {
                (name.to_string(), format!("{:?}{:?}", t.dtype(), t.shape()), t.data().to_vec())
            };
            all.extend(tensors.iter().map(one));
        }
    }
    all.sort();
    all
}

#[test]
fn what_is_loaded_on_any_mesh_is_saved_with_the_same_bytes() {
    let out = std::env::temp_dir().join(format!("isoshard-hugging-face-{}", std::process::id()));
    let _ = fs::remove_dir_all(&out);
    fs::create_dir_all(&out).expect("a folder can be made");
    for (mesh, ranks) in [("fsdp=1", 1), ("fsdp=3", 3), ("dp=2,tp=2", 4)] {
        for name in ALL {
            let (from, to) = (fixture(name), out.join(format!("{name}-{mesh}")));
            let (source, target) = (from.clone(), to.clone());
            let run = move |rank| {
                let mesh = DeviceMesh::parse(&rank, mesh)?;
                let plan = match ranks {
                    4 => Plan::default().shard("h.*.attn.qkv.weight", "tp", 2).shard("wte.weight", "tp", 1),
                    _ => Plan::default().fsdp("fsdp"),
                };
                let format = HuggingFaceFormat::read(&source)?;
                let mut params = Params::new(&mesh, plan, 1)?;
                declare(&format, &mut params)?;
                format.load(&source, &mut params)?;
                format.save_shards(&params, &target, 30_000)
            };
            spmd(ranks, run).unwrap_or_else(|e| panic!("{name} on {mesh}: {e}"));
            assert_eq!(contents(&from), contents(&to), "{name} on {mesh}");
            let config = |dir: &Path| {
                let text = fs::read_to_string(dir.join("config.json")).expect("it has a config");
                serde_json::from_str::<serde_json::Value>(&text).expect("it is JSON")
            };
            assert_eq!(config(&from), config(&to), "{name}");
            assert_eq!(HuggingFaceFormat::read(&from).unwrap(), HuggingFaceFormat::read(&to).unwrap());
        }
    }
    fs::remove_dir_all(&out).expect("it was made here");
}
