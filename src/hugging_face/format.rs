//! The form of a model's files: names, dtypes and shapes, compared with what config.json says.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use safetensors::Dtype;

use super::VERB;
use super::config::HuggingFaceConfig;
use super::names::{ExpertForm, HEAD, NameForm, NamedTensor, is_buffer, named_tensors, prefix, token_table};
use super::weight_files::WeightFiles;
use crate::error::{Error, Result};
use crate::tensor::{DType, expect_room, safetensors_dtype};

/// The most tensors of a layer, without its experts.
const TENSORS_PER_LAYER: u128 = 20;
/// The most tensors of a model whose names are made, and the most elements, so that their bytes can be counted.
const MOST_TENSORS: u128 = 1 << 20;
const MOST_ELEMENTS: u128 = 1 << 58;
/// The memory of a tensor's names and shapes.
const TENSOR_BYTES: usize = 512;

/// The dtypes of weights in files.
const WEIGHT_DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const WEIGHT_RULE: &str = "weights are f32, f16 or bf16";

/// The verb of errors about a format that no files have.
const FORMAT_VERB: &str = "hugging_face_format";

/// The names, dtypes and shapes of a model's files, and its config.json: all that export needs beside the values.
///
/// ```
/// use isoshard::{hugging_face::{HuggingFaceConfig, HuggingFaceFormat}, tensor::DType};
/// let text = r#"{"model_type": "gpt2", "vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 6}"#;
/// let format = HuggingFaceFormat::new(HuggingFaceConfig::parse(text)?, DType::BF16)?;
/// let names: Vec<&str> = format.names().collect();
/// assert_eq!(names[..3], ["transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.ln_1.weight"]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct HuggingFaceFormat {
    pub(super) config: HuggingFaceConfig,
    pub(super) tensors: Vec<NamedTensor>,
    /// The dtype of each tensor.
    pub(super) dtypes: Vec<DType>,
    /// The number of the token table, and the dtype of its second copy under the head's name, if there is one.
    pub(super) second_head: Option<(usize, DType)>,
}

impl HuggingFaceFormat {
    /// Returns the form in which `transformers` publishes a model: experts one by one, tied heads absent, and one
    /// dtype. The config that export writes has this dtype, `model_type` and `architectures`.
    ///
    /// ```
    /// use isoshard::{hugging_face::{HuggingFaceConfig, HuggingFaceFormat}, tensor::DType};
    /// let text = r#"{"model_type": "gpt2", "vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 6}"#;
    /// let format = HuggingFaceFormat::new(HuggingFaceConfig::parse(text)?, DType::F32)?;
    /// assert_eq!(format.config().architecture(), "GPT2LMHeadModel");
    /// assert!(HuggingFaceFormat::new(format.config().clone(), DType::I64).is_err());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dtypes other than f32, f16 and bf16, and more than 2^20 tensors or 2^58 elements.
    pub fn new(mut config: HuggingFaceConfig, dtype: DType) -> Result<HuggingFaceFormat> {
        if !WEIGHT_DTYPES.contains(&dtype) {
            return Err(Error::unsupported(FORMAT_VERB, WEIGHT_RULE, dtype.name(), ""));
        }
        expect_sizes(&config)?;
        let json = &mut config.json;
        let name = match dtype {
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
            _ => "float32",
        };
        let keys = ["dtype", "torch_dtype"].map(|key| (key, key == "dtype" || json.contains_key(key)));
        for (key, _) in keys.into_iter().filter(|(_, written)| *written) {
            json.insert(key.into(), name.into());
        }
        json.insert("model_type".into(), config.architecture.model_type().into());
        json.insert("architectures".into(), vec![config.architecture.name()].into());
        let tensors = named_tensors(&config, NameForm { prefixed: true, experts: ExpertForm::OneByOne });
        let dtypes = vec![dtype; tensors.len()];
        Ok(HuggingFaceFormat { config, tensors, dtypes, second_head: None })
    }

    /// Reads `config.json` and the headers of the weights in a folder, and compares them. Communicates nothing.
    ///
    /// ```no_run
    /// use isoshard::hugging_face::HuggingFaceFormat;
    /// let format = HuggingFaceFormat::read("llama-3.1-8b")?;
    /// assert!(format.names().any(|name| name == "model.norm.weight"));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`HuggingFaceConfig::read`] refuses; weights in other files than safetensors; names of files that
    /// leave the folder; damaged files; tensors that are missing, not expected or in two files; other shapes than
    /// config.json gives; and dtypes other than f32, f16 and bf16, each by name.
    pub fn read(dir: impl AsRef<Path>) -> Result<HuggingFaceFormat> {
        Ok(Self::open_folder(dir.as_ref())?.0)
    }

    /// Reads `config.json` and the headers of the weights in a folder, and maps the weights.
    pub(super) fn open_folder(dir: &Path) -> Result<(HuggingFaceFormat, WeightFiles)> {
        let config = HuggingFaceConfig::read(dir)?;
        let files = WeightFiles::open(dir)?;
        Ok((Self::of_files(config, &files)?, files))
    }

    pub(super) fn of_files(config: HuggingFaceConfig, files: &WeightFiles) -> Result<HuggingFaceFormat> {
        let dir = files.dir().display().to_string();
        let refused =
            |rule: &str, given: String| Err(Error::invalid(VERB, rule, format!("{given} in {dir}"), ""));
        let form = NameForm {
            prefixed: files.tensors().any(|(name, _)| name.starts_with(prefix(config.architecture))),
            experts: match files.tensors().any(|(name, _)| name.ends_with(".experts.gate_up_proj")) {
                true => ExpertForm::Fused,
                false => ExpertForm::OneByOne,
            },
        };
        // Each layer, and each expert of each layer, has a tensor; so the list that is built is as long as the files'.
        let experts = match (&config.experts, form.experts) {
            (Some(mixture), ExpertForm::OneByOne) => {
                mixture.experts * mixture.layers.iter().filter(|with| **with).count()
            }
            _ => 0,
        };
        if config.layers.max(experts) > files.len() {
            let given = format!("{} layer(s), {experts} expert(s), {} tensor(s)", config.layers, files.len());
            return refused("the files have fewer tensors than config.json has layers or experts", given);
        }
        let tensors = named_tensors(&config, form);
        let expected: BTreeSet<&str> = tensors.iter().map(|t| &t.name[..]).collect();
        let missing: Vec<&str> = expected.iter().copied().filter(|name| files.get(name).is_none()).collect();
        if !missing.is_empty() {
            return refused("tensors are missing", list(&missing));
        }
        let head_is_second = |name: &str| config.tied_head && name == HEAD;
        let known = |name: &str| {
            expected.contains(name) || head_is_second(name) || is_buffer(config.architecture, name)
        };
        let extra: Vec<&str> = files.tensors().map(|(name, _)| name).filter(|name| !known(name)).collect();
        if !extra.is_empty() {
            return refused("the architecture has no such tensors", list(&extra));
        }
        let mut dtypes = Vec::with_capacity(tensors.len());
        for tensor in &tensors {
            let found = files.get(&tensor.name).expect("none is missing");
            if found.shape != tensor.shape {
                let given = format!("{}{}, not {},", tensor.name, found.shape, tensor.shape);
                return refused("a tensor has another shape than config.json says", given);
            }
            dtypes.push(own_dtype(found.dtype, &tensor.name, &dir)?);
        }
        let table = token_table(&config, form);
        let second_head = match files.get(HEAD).filter(|_| config.tied_head) {
            None => None,
            Some(head) => {
                let first = files.get(&table).expect("none is missing");
                if files.bytes(head) != files.bytes(first)
                    || (head.dtype, &head.shape) != (first.dtype, &first.shape)
                {
                    let given = format!("{HEAD} and {table}");
                    return refused("config.json ties two tensors that differ", given);
                }
                let number =
                    tensors.iter().position(|t| t.name == table).expect("the model has a token table");
                Some((number, dtypes[number]))
            }
        };
        Ok(HuggingFaceFormat { config, tensors, dtypes, second_head })
    }

    /// Returns the config.
    ///
    /// ```
    /// use isoshard::{hugging_face::{HuggingFaceConfig, HuggingFaceFormat}, tensor::DType};
    /// let text = r#"{"model_type": "gpt2", "vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 6}"#;
    /// let format = HuggingFaceFormat::new(HuggingFaceConfig::parse(text)?, DType::F16)?;
    /// assert_eq!(format.config().layers(), 1);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn config(&self) -> &HuggingFaceConfig {
        &self.config
    }

    /// Returns the names of the tensors, without a head that is tied.
    ///
    /// ```
    /// use isoshard::{hugging_face::{HuggingFaceConfig, HuggingFaceFormat}, tensor::DType};
    /// let text = r#"{"model_type": "gpt2", "vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 6}"#;
    /// let format = HuggingFaceFormat::new(HuggingFaceConfig::parse(text)?, DType::F32)?;
    /// assert_eq!(format.names().last(), Some("transformer.ln_f.bias"));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|tensor| &tensor.name[..])
    }

    /// Returns the paths of the pieces of parameters whose elements a tensor has, or `None` if there is no such tensor.
    ///
    /// ```
    /// use isoshard::{hugging_face::{HuggingFaceConfig, HuggingFaceFormat}, tensor::DType};
    /// let text = r#"{"model_type": "gpt2", "vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 6}"#;
    /// let format = HuggingFaceFormat::new(HuggingFaceConfig::parse(text)?, DType::F32)?;
    /// let pieces = format.pieces("transformer.h.0.attn.c_attn.bias").expect("GPT-2 has it");
    /// assert_eq!(pieces, ["h.0.attn.q.bias", "h.0.attn.k.bias", "h.0.attn.v.bias"]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn pieces(&self, name: &str) -> Option<Vec<&str>> {
        let tensor = self.tensors.iter().find(|tensor| tensor.name == name)?;
        Some(tensor.parts.iter().map(|part| &part.path[..]).collect())
    }

    /// Returns the number of elements that the files have of each piece, by path.
    pub(super) fn piece_sizes(&self) -> BTreeMap<&str, usize> {
        let mut sizes = BTreeMap::new();
        for part in self.tensors.iter().flat_map(|tensor| &tensor.parts) {
            *sizes.entry(&part.path[..]).or_default() += part.numel();
        }
        sizes
    }
}

/// Refuses sizes that no model has: lists have an element per tensor, and numbers of bytes are added.
fn expect_sizes(config: &HuggingFaceConfig) -> Result<()> {
    let n = |x: usize| x as u128;
    let of_experts = config.experts.as_ref().map_or((0, 0), |mixture| {
        let layers = n(mixture.layers.iter().filter(|with| **with).count());
        (
            3 * layers * n(mixture.experts),
            3 * layers * n(mixture.experts) * n(mixture.hidden.max(mixture.shared_hidden.unwrap_or(0))),
        )
    });
    let tensors = TENSORS_PER_LAYER * n(config.layers) + of_experts.0;
    let rows = 2 * n(config.vocabulary) + n(config.positions) + 2 * of_experts.1;
    let of_layer = 2 * n(config.heads + config.kv_heads) * n(config.head_width) + 3 * n(config.hidden) + 16;
    let elements = (rows + n(config.layers) * of_layer) * n(config.width);
    let refused = |rule: &str, given: String| Err(Error::unsupported("hugging_face_format", rule, given, ""));
    if tensors > MOST_TENSORS {
        return refused("a model has at most 2^20 tensors", format!("{tensors} in {} layers", config.layers));
    }
    if elements > MOST_ELEMENTS {
        return refused("a model has at most 2^58 elements", format!("about {elements}"));
    }
    expect_room(tensors as usize * TENSOR_BYTES, "the names of a model's tensors")
}

/// Returns this crate's name of a dtype, and refuses dtypes that parameters cannot be read from.
fn own_dtype(dtype: Dtype, name: &str, dir: &str) -> Result<DType> {
    let own = WEIGHT_DTYPES.into_iter().find(|own| safetensors_dtype(*own) == dtype);
    own.ok_or_else(|| {
        let given = format!("{name} of {dtype:?} in {dir}");
        Error::unsupported(VERB, WEIGHT_RULE, given, "")
    })
}

/// Returns the first names of a list, and the number of the rest.
pub(super) fn list(names: &[&str]) -> String {
    match names {
        [a, b, c, _, rest @ ..] => format!("{a}, {b}, {c} and {} more", rest.len() + 1),
        few => few.join(", "),
    }
}
