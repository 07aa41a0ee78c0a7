//! The description of a model in config.json, as transformers 4 and 5 write it.

use std::path::Path;

use serde_json::{Map, Value};

use super::VERB;
use super::architecture::Architecture;
use super::rope::{longest_sequence, read_rope};
use super::unread_keys::refuse_unread_keys;
use super::values::ConfigValues;
use super::weight_files::{expect_folder, parse_json};
use super::windows::read_windows;
use crate::error::{Error, Result};
use crate::nn::{Activation, RotaryConfig};

pub(super) use super::weight_files::CONFIG_FILE;

/// The longest config.json that is read, in bytes.
const CONFIG_BYTES: u64 = 16 << 20;

/// The largest number of layers.
const LAYERS: usize = 1 << 16;

/// A model's config.json: its architecture and sizes, and the JSON itself, which export writes again.
///
/// Keys that do not change what a model computes, such as `use_cache`, are kept and not read. A value that this crate
/// cannot compute with is refused by its key. So are keys by which other models compute something else, such as
/// `is_causal` or `logit_scale`, unless their value changes nothing.
///
/// ```
/// use isoshard::hugging_face::HuggingFaceConfig;
/// let config = HuggingFaceConfig::parse(
///     r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 11, "hidden_size": 8,
///         "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
///         "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16"}"#,
/// )?;
/// assert_eq!((config.architecture(), config.layers(), config.heads()), ("LlamaForCausalLM", 2, [4, 2]));
///
/// let refused = HuggingFaceConfig::parse(r#"{"architectures": ["MambaForCausalLM"]}"#).unwrap_err().to_string();
/// assert!(refused.contains("the architecture is not built; got MambaForCausalLM"), "{refused}");
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct HuggingFaceConfig {
    pub(super) json: Map<String, Value>,
    pub(super) architecture: Architecture,
    pub(super) vocabulary: usize,
    pub(super) width: usize,
    /// The hidden width of an MLP that is not a mixture of experts.
    pub(super) hidden: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_width: usize,
    pub(super) positions: usize,
    pub(super) eps: f64,
    pub(super) activation: Activation,
    pub(super) tied_head: bool,
    pub(super) qkv_bias: bool,
    pub(super) out_bias: bool,
    pub(super) mlp_bias: bool,
    /// The rotary positions of layers that attend to all earlier tokens, and of layers with a sliding window; `None`
    /// for learned positions.
    pub(super) rope: Option<[RotaryConfig; 2]>,
    /// The number of tokens that each layer's queries see, themselves included; `None` for all earlier tokens.
    pub(super) windows: Vec<Option<usize>>,
    /// The layers whose rotary positions are those of a sliding window.
    pub(super) slides: Vec<bool>,
    pub(super) attention_cap: Option<f64>,
    pub(super) final_cap: Option<f64>,
    /// The number whose inverse square root scales the scores.
    pub(super) query_scalar: f64,
    pub(super) experts: Option<ExpertConfig>,
    /// The probability of dropping an element of the embeddings.
    pub(super) embedding_dropout: f64,
    /// The probability of dropping an attention weight.
    pub(super) attention_dropout: f64,
    /// The probability of dropping an element of a part's result.
    pub(super) residual_dropout: f64,
    /// The standard deviation of new parameters.
    pub(super) init_std: f64,
}

/// The mixture of experts of the layers that have one.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ExpertConfig {
    pub experts: usize,
    pub top_k: usize,
    pub hidden: usize,
    /// `true` if the weights of the chosen experts are divided by their sum.
    pub normalised: bool,
    /// The hidden width of the expert that every token is sent to, if there is one.
    pub shared_hidden: Option<usize>,
    /// The layers with a mixture of experts.
    pub layers: Vec<bool>,
}

impl HuggingFaceConfig {
    /// Reads `config.json` in a folder. Each rank reads it; communicates nothing.
    ///
    /// ```no_run
    /// use isoshard::hugging_face::HuggingFaceConfig;
    /// let config = HuggingFaceConfig::read("llama-3.1-8b")?;
    /// println!("{} with {} layers", config.architecture(), config.layers());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`HuggingFaceConfig::parse`] refuses, and a path that is no folder with a `config.json`, such as
    /// the name of a model that was not downloaded; returns an error if the file cannot be read.
    pub fn read(dir: impl AsRef<Path>) -> Result<HuggingFaceConfig> {
        expect_folder(dir.as_ref())?;
        let path = dir.as_ref().join(CONFIG_FILE);
        from_json(parse_json(&path, CONFIG_BYTES)?, &path)
    }

    /// Reads the text of a config.json.
    ///
    /// ```
    /// use isoshard::hugging_face::HuggingFaceConfig;
    /// let refused = HuggingFaceConfig::parse(r#"{"architectures": ["GPT2LMHeadModel"], "n_embd": -1}"#).unwrap_err();
    /// let text = "from_hugging_face: the value is not a size from 1 to 2^20; got n_embd: -1 in config.json";
    /// assert_eq!(refused.to_string(), text);
    /// ```
    ///
    /// # Errors
    /// Refuses other text than a JSON object, an architecture that is not built, absent or impossible sizes, and values
    /// that this crate cannot compute with, each by its key.
    pub fn parse(text: &str) -> Result<HuggingFaceConfig> {
        let json = serde_json::from_str(text).map_err(|e| {
            Error::invalid(
                VERB,
                "the file is not the JSON that is expected",
                format!("{CONFIG_FILE}: {e}"),
                "",
            )
        })?;
        from_json(json, Path::new(CONFIG_FILE))
    }

    /// Returns the architecture's name, such as `LlamaForCausalLM`.
    ///
    /// ```
    /// use isoshard::hugging_face::HuggingFaceConfig;
    /// let text = r#"{"model_type": "gpt2", "vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 6}"#;
    /// assert_eq!(HuggingFaceConfig::parse(text)?.architecture(), "GPT2LMHeadModel");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn architecture(&self) -> &'static str {
        self.architecture.name()
    }

    /// Returns the number of blocks.
    ///
    /// ```
    /// use isoshard::hugging_face::HuggingFaceConfig;
    /// let text = r#"{"model_type": "gpt2", "vocab_size": 11, "n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 6}"#;
    /// assert_eq!(HuggingFaceConfig::parse(text)?.layers(), 3);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Returns the number of query heads, and the number of key and value heads, which a tensor-parallel axis divides
    /// among its ranks.
    ///
    /// ```
    /// use isoshard::hugging_face::HuggingFaceConfig;
    /// let text = r#"{"model_type": "gpt2", "vocab_size": 11, "n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 6}"#;
    /// assert_eq!(HuggingFaceConfig::parse(text)?.heads(), [2, 2]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn heads(&self) -> [usize; 2] {
        [self.heads, self.kv_heads]
    }
}

fn from_json(json: Map<String, Value>, path: &Path) -> Result<HuggingFaceConfig> {
    let values = ConfigValues::new(&json, path);
    let architecture = Architecture::read(&values)?;
    if values.get("quantization_config").is_some() {
        return Err(values.unsupported("quantization_config", "quantized weights are not built"));
    }
    let mut config = match architecture {
        Architecture::Gpt2 => gpt2(&values)?,
        other => grouped(&values, other)?,
    };
    config.architecture = architecture;
    refuse_unread_keys(&values, architecture, config.positions, config.query_scalar, &config.rope)?;
    let HuggingFaceConfig { heads, kv_heads, .. } = config;
    if heads % kv_heads != 0 {
        let given = format!("{heads} and {kv_heads} in {}", path.display());
        let rule = "the heads are not a multiple of those of keys and values";
        return Err(Error::invalid(VERB, rule, given, ""));
    }
    config.json = json;
    Ok(config)
}

fn gpt2(values: &ConfigValues<'_>) -> Result<HuggingFaceConfig> {
    let [width, layers, heads] = [values.size("n_embd")?, layers(values, "n_layer")?, values.size("n_head")?];
    if width % heads != 0 {
        return Err(values.unsupported("n_head", &format!("the heads do not divide the width, {width}")));
    }
    Ok(HuggingFaceConfig {
        json: Map::new(),
        architecture: Architecture::Gpt2,
        vocabulary: values.size("vocab_size")?,
        width,
        hidden: values.size_or("n_inner", 4 * width)?,
        layers,
        heads,
        kv_heads: heads,
        head_width: width / heads,
        positions: values.length("n_positions")?,
        eps: values.number_or("layer_norm_epsilon", 1e-5)?,
        activation: activation(values, "activation_function", "gelu_new")?,
        tied_head: values.flag("tie_word_embeddings", true)?,
        qkv_bias: true,
        out_bias: true,
        mlp_bias: true,
        rope: None,
        windows: vec![None; layers],
        slides: vec![false; layers],
        attention_cap: None,
        final_cap: None,
        query_scalar: (width / heads) as f64,
        experts: None,
        embedding_dropout: values.probability("embd_pdrop", 0.1)?,
        attention_dropout: values.probability("attn_pdrop", 0.1)?,
        residual_dropout: values.probability("resid_pdrop", 0.1)?,
        init_std: values.number_or("initializer_range", 0.02)?,
    })
}

/// Reads a config of the architectures that descend from Llama.
fn grouped(values: &ConfigValues<'_>, architecture: Architecture) -> Result<HuggingFaceConfig> {
    use Architecture::{Gemma2, Gemma3, Llama, Mixtral, Qwen2, Qwen2Moe};
    let [width, heads] = [values.size("hidden_size")?, values.size("num_attention_heads")?];
    let layers = layers(values, "num_hidden_layers")?;
    let head_width = head_width(values, architecture, [width, heads])?;
    let kv_heads = match architecture {
        Llama => values.size_or("num_key_value_heads", heads)?,
        _ => values.size("num_key_value_heads")?,
    };
    let activation = gate_activation(values, architecture)?;
    let attention_bias = values.flag("attention_bias", false)?;
    let qkv_bias = match architecture {
        Qwen2 => true,
        Qwen2Moe => values.flag("qkv_bias", true)?,
        _ => attention_bias,
    };
    let query_scalar = match architecture {
        Gemma2 | Gemma3 => values.number("query_pre_attn_scalar")?,
        _ => head_width as f64,
    };
    let cap = |key, default| match architecture {
        Gemma2 => values.number_unless_null(key, Some(default)),
        Gemma3 => values.optional_number(key),
        _ => Ok(None),
    };
    let (windows, slides) = read_windows(values, architecture, layers)?;
    let rope = read_rope(values, architecture)?;
    Ok(HuggingFaceConfig {
        json: Map::new(),
        architecture,
        vocabulary: values.size("vocab_size")?,
        width,
        hidden: values.size("intermediate_size")?,
        layers,
        heads,
        kv_heads,
        head_width,
        positions: longest_sequence(values.length("max_position_embeddings")?, &rope),
        eps: values.number_or("rms_norm_eps", if architecture == Mixtral { 1e-5 } else { 1e-6 })?,
        activation,
        tied_head: values.flag("tie_word_embeddings", is_gemma(architecture))?,
        qkv_bias,
        out_bias: attention_bias && !matches!(architecture, Qwen2 | Qwen2Moe),
        mlp_bias: architecture == Llama && values.flag("mlp_bias", false)?,
        rope: Some(rope),
        windows,
        slides,
        attention_cap: cap("attn_logit_softcapping", 50.0)?,
        final_cap: cap("final_logit_softcapping", 30.0)?,
        query_scalar,
        experts: experts(values, architecture, layers)?,
        embedding_dropout: 0.0,
        attention_dropout: values.probability("attention_dropout", 0.0)?,
        residual_dropout: 0.0,
        init_std: values.number_or("initializer_range", 0.02)?,
    })
}

fn is_gemma(architecture: Architecture) -> bool {
    matches!(architecture, Architecture::Gemma | Architecture::Gemma2 | Architecture::Gemma3)
}

fn head_width(
    values: &ConfigValues<'_>,
    architecture: Architecture,
    [width, heads]: [usize; 2],
) -> Result<usize> {
    let is_always_there = is_gemma(architecture) || architecture == Architecture::Qwen3;
    if values.get("head_dim").is_some() || is_always_there {
        return values.size("head_dim");
    }
    if width % heads != 0 {
        let rule = format!("without head_dim, the heads divide the width, {width}");
        return Err(values.unsupported("num_attention_heads", &rule));
    }
    Ok(width / heads)
}

/// Reads the function of the gate in feed-forward layers.
fn gate_activation(values: &ConfigValues<'_>, architecture: Architecture) -> Result<Activation> {
    if !is_gemma(architecture) {
        return activation(values, "hidden_act", "silu");
    }
    // The first configs of Gemma 1 have "gelu" for what its authors and transformers compute by tanh.
    let is_old = values.get("hidden_activation").is_none() && values.text("hidden_act")? != Some("gelu");
    activation(values, if is_old { "hidden_act" } else { "hidden_activation" }, "gelu_pytorch_tanh")
}

/// Reads the number of layers, which is bounded because lists have an element per layer.
fn layers(values: &ConfigValues<'_>, key: &str) -> Result<usize> {
    let layers = values.size(key)?;
    if layers > LAYERS {
        return Err(values.unsupported(key, &format!("a model has at most {LAYERS} layers")));
    }
    Ok(layers)
}

fn experts(
    values: &ConfigValues<'_>,
    architecture: Architecture,
    layers: usize,
) -> Result<Option<ExpertConfig>> {
    let is_qwen = matches!(architecture, Architecture::Qwen2Moe | Architecture::Qwen3Moe);
    if !is_qwen && architecture != Architecture::Mixtral {
        return Ok(None);
    }
    // transformers 5 writes num_local_experts for all, transformers 4 only for Mixtral.
    let count = if values.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
    let (experts, top_k) = (values.size(count)?, values.size("num_experts_per_tok")?);
    if top_k > experts {
        return Err(
            values.unsupported("num_experts_per_tok", &format!("at most {experts} experts can be chosen"))
        );
    }
    let mut with = vec![true; layers];
    if is_qwen {
        let step = values.size_or("decoder_sparse_step", 1)?;
        let plain = match values.get("mlp_only_layers") {
            None => Vec::new(),
            Some(list) => {
                let numbers =
                    list.as_array().and_then(|l| l.iter().map(Value::as_u64).collect::<Option<Vec<_>>>());
                let rule = "the value is a list of numbers of layers";
                numbers.ok_or_else(|| values.unsupported("mlp_only_layers", rule))?
            }
        };
        with.iter_mut().enumerate().for_each(|(i, with)| *with = (i + 1) % step == 0);
        for number in plain {
            if let Some(with) = usize::try_from(number).ok().and_then(|i| with.get_mut(i)) {
                *with = false;
            }
        }
    }
    Ok(Some(ExpertConfig {
        experts,
        top_k,
        hidden: values.size(if is_qwen { "moe_intermediate_size" } else { "intermediate_size" })?,
        normalised: if is_qwen { values.flag("norm_topk_prob", false)? } else { true },
        shared_hidden: match architecture {
            Architecture::Qwen2Moe => Some(values.size("shared_expert_intermediate_size")?),
            _ => None,
        },
        layers: with,
    }))
}

fn activation(values: &ConfigValues<'_>, key: &str, default: &str) -> Result<Activation> {
    match values.text(key)?.unwrap_or(default) {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu" => Ok(Activation::Gelu),
        "gelu_new" | "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        "relu" => Ok(Activation::Relu),
        _ => {
            let rule = "the activations are silu, gelu, gelu_new, gelu_pytorch_tanh and relu";
            Err(values.unsupported(key, rule))
        }
    }
}
