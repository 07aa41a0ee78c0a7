//! The tensors of a file and the pieces of parameters that they hold, per architecture.

use std::collections::BTreeMap;

use super::architecture::Architecture;
use super::config::HuggingFaceConfig;
use crate::tensor::{Shape, sort_by_key};

/// A tensor of a safetensors file, and the pieces whose elements it has.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct NamedTensor {
    pub name: String,
    pub shape: Shape,
    pub parts: Vec<PieceRange>,
}

/// A range of a piece's elements within a tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PieceRange {
    /// The piece's path, such as `h.0.attn.q.weight`.
    pub path: String,
    /// The first element of the range in the piece.
    pub first: usize,
    /// The range as a row-major box.
    pub dims: Vec<usize>,
    /// The position of the first element in the tensor, and the step per dim.
    pub offset: usize,
    pub steps: Vec<usize>,
}

/// The way in which a file stores experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpertForm {
    /// `experts.3.gate_proj.weight`, one matrix per expert, as models are published.
    OneByOne,
    /// `experts.gate_up_proj` `[experts, 2 · hidden, width]`, as transformers 5 may save them.
    Fused,
}

/// The names in a file that the architecture alone does not tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NameForm {
    /// `true` if names begin with `model.` or `transformer.`.
    pub prefixed: bool,
    pub experts: ExpertForm,
}

impl PieceRange {
    /// Returns the number of elements.
    pub fn numel(&self) -> usize {
        self.dims.iter().product()
    }

    /// Calls `f(element of the piece, element of the tensor, step in the tensor, length)` for each row of the part
    /// among the elements `start..end` of the piece.
    pub fn rows(&self, start: usize, end: usize, mut f: impl FnMut(usize, usize, usize, usize)) {
        let (mut element, end) = (start.max(self.first), end.min(self.first + self.numel()));
        let row = self.dims.last().copied().unwrap_or(1);
        while element < end {
            let within = element - self.first;
            let mut rest = within;
            let mut in_tensor = self.offset;
            for (n, step) in self.dims.iter().zip(&self.steps).rev() {
                in_tensor += rest % n * step;
                rest /= n;
            }
            let len = (row - within % row).min(end - element);
            f(element, in_tensor, self.steps.last().copied().unwrap_or(1), len);
            element += len;
        }
    }
}

/// Returns the tensors of a model's files. The head of a model with tied weights is not among them.
pub(super) fn named_tensors(config: &HuggingFaceConfig, form: NameForm) -> Vec<NamedTensor> {
    let mut list = NameList { config, prefix: String::new(), list: Vec::new() };
    match config.architecture {
        Architecture::Gpt2 => list.gpt2(form),
        _ => list.grouped(form),
    }
    list.list
}

/// Returns the name of the head, which a model with tied weights may have as a second copy of the token table.
pub(super) const HEAD: &str = "lm_head.weight";

/// Returns the name of the token table.
pub(super) fn token_table(config: &HuggingFaceConfig, form: NameForm) -> String {
    let name = match config.architecture {
        Architecture::Gpt2 => "wte.weight",
        _ => "embed_tokens.weight",
    };
    if form.prefixed { format!("{}{name}", prefix(config.architecture)) } else { name.into() }
}

/// Returns what the names of all tensors but the head begin with.
pub(super) fn prefix(architecture: Architecture) -> &'static str {
    if architecture == Architecture::Gpt2 { "transformer." } else { "model." }
}

/// Returns `true` for a buffer: a table that older versions saved beside the parameters, and that is computed.
pub(super) fn is_buffer(architecture: Architecture, name: &str) -> bool {
    let suffixes: &[&str] = match architecture {
        Architecture::Gpt2 => &[".attn.bias", ".attn.masked_bias"],
        _ => &[".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached"],
    };
    suffixes.iter().any(|suffix| name.ends_with(suffix))
}

struct NameList<'a> {
    config: &'a HuggingFaceConfig,
    prefix: String,
    list: Vec<NamedTensor>,
}

impl NameList<'_> {
    fn gpt2(&mut self, form: NameForm) {
        let HuggingFaceConfig { vocabulary, positions, width, hidden, layers, tied_head, .. } = *self.config;
        self.prefix = if form.prefixed { prefix(Architecture::Gpt2).into() } else { String::new() };
        self.same("wte.weight", "wte.weight", &[vocabulary, width]);
        self.same("wpe.weight", "wpe.weight", &[positions, width]);
        for i in 0..layers {
            let h = |name: &str| format!("h.{i}.{name}");
            for (of_file, own) in [("ln_1", "attn_norm"), ("ln_2", "mlp_norm")] {
                self.same(&h(&format!("{of_file}.weight")), &h(&format!("{own}.weight")), &[width]);
                self.same(&h(&format!("{of_file}.bias")), &h(&format!("{own}.bias")), &[width]);
            }
            // Conv1D stores [inputs, outputs].
            let pieces = ["q", "k", "v"].map(|map| h(&format!("attn.{map}")));
            self.transposed(&h("attn.c_attn"), &pieces, [width, width]);
            self.transposed(&h("attn.c_proj"), &[h("attn.out")], [width, width]);
            self.transposed(&h("mlp.c_fc"), &[h("mlp.up")], [hidden, width]);
            self.transposed(&h("mlp.c_proj"), &[h("mlp.down")], [width, hidden]);
        }
        self.same("ln_f.weight", "norm.weight", &[width]);
        self.same("ln_f.bias", "norm.bias", &[width]);
        if !tied_head {
            self.prefix.clear();
            self.same(HEAD, "head.weight", &[vocabulary, width]);
        }
    }

    fn grouped(&mut self, form: NameForm) {
        use Architecture::{Gemma2, Gemma3, Qwen3, Qwen3Moe};
        let config = self.config;
        let &HuggingFaceConfig { architecture, vocabulary, width, layers, tied_head, .. } = config;
        let outer = if form.prefixed { prefix(architecture) } else { "" };
        self.prefix = outer.into();
        self.same("embed_tokens.weight", "wte.weight", &[vocabulary, width]);
        let norms_after = matches!(architecture, Gemma2 | Gemma3);
        let head_norms = matches!(architecture, Qwen3 | Qwen3Moe | Gemma3);
        for i in 0..layers {
            let h = |name: &str| format!("h.{i}.{name}");
            self.prefix = format!("{outer}layers.{i}.");
            self.same("input_layernorm.weight", &h("attn_norm.weight"), &[width]);
            match norms_after {
                false => self.same("post_attention_layernorm.weight", &h("mlp_norm.weight"), &[width]),
                true => {
                    self.same("post_attention_layernorm.weight", &h("attn_after_norm.weight"), &[width]);
                    self.same("pre_feedforward_layernorm.weight", &h("mlp_norm.weight"), &[width]);
                    self.same("post_feedforward_layernorm.weight", &h("mlp_after_norm.weight"), &[width]);
                }
            }
            let d = config.head_width;
            for (map, heads) in [("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads)] {
                let (name, own) = (format!("self_attn.{map}_proj"), h(&format!("attn.{map}")));
                self.map(&name, &own, [heads * d, width], config.qkv_bias);
                if head_norms && map != "v" {
                    let (name, own) =
                        (format!("self_attn.{map}_norm.weight"), format!("attn.{map}_norm.weight"));
                    self.same(&name, &h(&own), &[d]);
                }
            }
            self.map("self_attn.o_proj", &h("attn.out"), [width, config.heads * d], config.out_bias);
            match &config.experts {
                Some(experts) if experts.layers[i] => self.experts(i, form.experts),
                _ => self.gated("mlp", &h("mlp"), config.hidden, config.mlp_bias),
            }
        }
        self.prefix = outer.into();
        self.same("norm.weight", "norm.weight", &[width]);
        if !tied_head {
            self.prefix.clear();
            self.same(HEAD, "head.weight", &[vocabulary, width]);
        }
    }

    /// Adds the mixture of experts of layer `i`.
    fn experts(&mut self, i: usize, form: ExpertForm) {
        let config = self.config;
        let mixture = config.experts.as_ref().expect("the layer has one");
        let (width, hidden, count) = (config.width, mixture.hidden, mixture.experts);
        let own = |name: &str| format!("h.{i}.moe.{name}");
        let mixtral = config.architecture == Architecture::Mixtral;
        let (layer, maps) = match (mixtral, form) {
            (true, ExpertForm::OneByOne) => ("block_sparse_moe", ["w1", "w3", "w2"]),
            _ => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
        };
        self.same(&format!("{layer}.gate.weight"), &own("router.weight"), &[count, width]);
        // The parameters are [experts, inputs, outputs], the files' matrices [outputs, inputs].
        let part =
            |map: &str, e: usize, experts: usize, [inputs, outputs]: [usize; 2], offset, step| PieceRange {
                path: own(&format!("experts.{map}")),
                first: e * inputs * outputs,
                dims: vec![experts, inputs, outputs],
                offset,
                steps: vec![step, 1, inputs],
            };
        let (up, down) = ([width, hidden], [hidden, width]);
        let cut = width * hidden;
        match form {
            ExpertForm::OneByOne => {
                for e in 0..count {
                    for (name, map, sizes) in
                        [(maps[0], "gate", up), (maps[1], "up", up), (maps[2], "down", down)]
                    {
                        let name = format!("{layer}.experts.{e}.{name}.weight");
                        let shape = [sizes[1], sizes[0]];
                        self.add(&name, &shape, vec![part(map, e, 1, sizes, 0, 0)]);
                    }
                }
            }
            ExpertForm::Fused => {
                let gate_up =
                    vec![part("gate", 0, count, up, 0, 2 * cut), part("up", 0, count, up, cut, 2 * cut)];
                self.add(&format!("{layer}.experts.gate_up_proj"), &[count, 2 * hidden, width], gate_up);
                let down = vec![part("down", 0, count, down, 0, cut)];
                self.add(&format!("{layer}.experts.down_proj"), &[count, width, hidden], down);
            }
        }
        if let Some(hidden) = mixture.shared_hidden {
            self.gated(&format!("{layer}.shared_expert"), &own("shared"), hidden, false);
            self.same(&format!("{layer}.shared_expert_gate.weight"), &own("shared_gate.weight"), &[1, width]);
        }
    }

    fn gated(&mut self, name: &str, own: &str, hidden: usize, bias: bool) {
        let width = self.config.width;
        for (map, sizes) in [("gate", [hidden, width]), ("up", [hidden, width]), ("down", [width, hidden])] {
            self.map(&format!("{name}.{map}_proj"), &format!("{own}.{map}"), sizes, bias);
        }
    }

    /// Adds a linear map whose weight is stored as this crate stores it.
    fn map(&mut self, name: &str, own: &str, [outputs, inputs]: [usize; 2], bias: bool) {
        self.same(&format!("{name}.weight"), &format!("{own}.weight"), &[outputs, inputs]);
        if bias {
            self.same(&format!("{name}.bias"), &format!("{own}.bias"), &[outputs]);
        }
    }

    /// Adds linear maps of one input, each `[outputs, inputs]`, that a Conv1D stores side by side as
    /// `[inputs, maps · outputs]`, with their biases.
    fn transposed(&mut self, name: &str, pieces: &[String], [outputs, inputs]: [usize; 2]) {
        let all = pieces.len() * outputs;
        let weights = pieces.iter().enumerate().map(|(i, own)| PieceRange {
            path: format!("{own}.weight"),
            first: 0,
            dims: vec![outputs, inputs],
            offset: i * outputs,
            steps: vec![1, all],
        });
        let biases = pieces.iter().enumerate().map(|(i, own)| PieceRange {
            path: format!("{own}.bias"),
            first: 0,
            dims: vec![outputs],
            offset: i * outputs,
            steps: vec![1],
        });
        let (weights, biases) = (weights.collect(), biases.collect());
        self.add(&format!("{name}.weight"), &[inputs, all], weights);
        self.add(&format!("{name}.bias"), &[all], biases);
    }

    /// Adds a tensor that has the elements of one piece in the same order.
    fn same(&mut self, name: &str, own: &str, shape: &[usize]) {
        let part = PieceRange {
            path: own.into(),
            first: 0,
            dims: shape.to_vec(),
            offset: 0,
            steps: Shape::from(shape).strides().to_vec(),
        };
        self.add(name, shape, vec![part]);
    }

    fn add(&mut self, name: &str, shape: &[usize], parts: Vec<PieceRange>) {
        self.list.push(NamedTensor { name: format!("{}{name}", self.prefix), shape: shape.into(), parts });
    }
}

/// Returns the parts of each piece, by path, in the order of their elements. Each part comes with the number of its
/// tensor.
pub(super) fn parts_by_piece(tensors: &[NamedTensor]) -> BTreeMap<&str, Vec<(usize, &PieceRange)>> {
    let mut parts: BTreeMap<&str, Vec<(usize, &PieceRange)>> = BTreeMap::new();
    for (number, tensor) in tensors.iter().enumerate() {
        for part in &tensor.parts {
            parts.entry(&part.path).or_default().push((number, part));
        }
    }
    parts.values_mut().for_each(|parts| sort_by_key(parts, |(_, part)| part.first));
    parts
}
