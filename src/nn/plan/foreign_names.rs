//! Hugging Face's names of a decoder's parts, as patterns of this crate's paths.

/// The names of parts by those of this crate. GPT-2's `c_attn` is three maps here and its `c_proj` two, so they have no single name.
const PARTS: [(&str, &str); 15] = [
    ("layers", "h"),
    ("self_attn", "attn"),
    ("q_proj", "q"),
    ("k_proj", "k"),
    ("v_proj", "v"),
    ("o_proj", "out"),
    ("gate_proj", "gate"),
    ("up_proj", "up"),
    ("down_proj", "down"),
    ("c_fc", "up"),
    ("lm_head", "head"),
    ("embed_tokens", "wte"),
    ("input_layernorm", "attn_norm"),
    ("ln_1", "attn_norm"),
    ("ln_2", "mlp_norm"),
];

/// The names with which a path begins in files of weights, and in adapters of PEFT.
const PREFIXES: [&str; 3] = ["base_model.model.", "model.", "transformer."];

/// Returns a pattern of Hugging Face's names in this crate's: `model.layers.*.self_attn.q_proj` is `h.*.attn.q`, and a map's
/// name alone, as in PEFT's `target_modules`, is that map in every layer. `None` if no part is a name of theirs.
pub(in crate::nn) fn own_pattern(pattern: &str) -> Option<String> {
    let bare = PREFIXES.iter().fold(pattern, |rest, prefix| rest.strip_prefix(prefix).unwrap_or(rest));
    let mut is_theirs = bare.len() < pattern.len();
    let own = |part: &str| PARTS.iter().find(|(theirs, _)| *theirs == part).map(|(_, own)| *own);
    let parts: Vec<&str> =
        bare.split('.').map(|part| own(part).inspect(|_| is_theirs = true).unwrap_or(part)).collect();
    if !is_theirs {
        return None;
    }
    let path = parts.join(".");
    let in_layers = |path: String| format!("h.*.{path}");
    Some(match parts[..] {
        ["q" | "k" | "v" | "out"] => in_layers(format!("attn.{path}")),
        ["gate" | "up" | "down"] => in_layers(format!("mlp.{path}")),
        _ => path,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_and_of_adapters() {
        for (theirs, own) in [
            ("q_proj", "h.*.attn.q"),
            ("down_proj", "h.*.mlp.down"),
            ("model.layers.3.self_attn.o_proj", "h.3.attn.out"),
            ("base_model.model.model.layers.*.mlp.gate_proj", "h.*.mlp.gate"),
            ("model.embed_tokens.weight", "wte.weight"),
            ("transformer.h.0.ln_1.bias", "h.0.attn_norm.bias"),
            ("h.*.attn.q_proj", "h.*.attn.q"),
            ("lm_head", "head"),
        ] {
            assert_eq!(own_pattern(theirs).as_deref(), Some(own), "{theirs}");
        }
        assert!(own_pattern("h.*.attn.q").is_none() && own_pattern("attn.c_proj").is_none());
    }
}
