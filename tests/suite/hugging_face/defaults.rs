//! Configs without some of their keys, and rules of single architectures, as `transformers` 5.23 reads them.

use isoshard::hugging_face::HuggingFaceConfig;
use isoshard::nn::{DecoderConfig, FeedForwardConfig, RotaryConfig, RotaryScaling};
use serde_json::{Value, json};

use super::config_of;

/// Returns the decoder of a fixture's config with some values replaced and some keys removed.
fn decoder(name: &str, changes: Value, removed: &[&str]) -> DecoderConfig {
    let mut config = config_of(name);
    let map = config.as_object_mut().expect("an object");
    map.extend(changes.as_object().expect("an object").clone());
    removed.iter().for_each(|key| drop(map.remove(*key)));
    HuggingFaceConfig::parse(&config.to_string()).unwrap_or_else(|e| panic!("{name}: {e}")).decoder()
}

fn windows(of: &DecoderConfig) -> Vec<Option<usize>> {
    of.layers.iter().map(|layer| layer.attention.window).collect()
}

fn rotary(of: &DecoderConfig) -> Vec<RotaryConfig> {
    of.layers.iter().map(|layer| layer.attention.rotary.expect("rotary positions")).collect()
}

#[test]
fn absent_keys_differ_from_null() {
    let all = |of: &DecoderConfig, window| assert_eq!(windows(of), vec![window; of.layers.len()]);
    all(&decoder("mistral", json!({}), &["sliding_window"]), Some(4096));
    all(&decoder("mistral", json!({ "sliding_window": null }), &[]), None);
    all(&decoder("mixtral", json!({}), &["sliding_window"]), None);

    let caps = |of: DecoderConfig| (of.layers[0].attention.soft_cap, of.score_soft_cap);
    let keys = ["attn_logit_softcapping", "final_logit_softcapping"];
    assert_eq!(caps(decoder("gemma2", json!({}), &keys)), (Some(50.0), Some(30.0)));
    assert_eq!(caps(decoder("gemma2", json!({ keys[0]: null, keys[1]: null }), &[])), (None, None));
    assert_eq!(caps(decoder("gemma3", json!({}), &keys)), (None, None));
    assert_eq!(
        windows(&decoder("gemma2", json!({}), &["sliding_window", "layer_types"]))[..2],
        [Some(4096), None]
    );
}

/// GPT-2 has one probability of dropout for embeddings, one for attention and one for the parts' results.
#[test]
fn gpt2_has_three_probabilities_of_dropout() {
    let dropouts = |of: DecoderConfig| {
        let FeedForwardConfig::Mlp(mlp) = of.layers[1].feed_forward else { panic!("GPT-2 has MLPs") };
        let attention = of.layers[1].attention;
        [of.dropout, attention.attention_dropout, attention.dropout, mlp.dropout]
    };
    let keys = ["embd_pdrop", "attn_pdrop", "resid_pdrop"];
    assert_eq!(dropouts(decoder("gpt2", json!({}), &keys)), [0.1; 4]);
    let different = json!({ keys[0]: 0.25, keys[1]: 0, keys[2]: 0.5 });
    assert_eq!(dropouts(decoder("gpt2", different, &[])), [0.25, 0.0, 0.5, 0.5]);
}

#[test]
fn each_architecture_has_its_own_rule_of_sliding_layers() {
    let sliding = json!({
        "use_sliding_window": true, "sliding_window": 5, "max_window_layers": 3, "num_hidden_layers": 6
    });
    let (all, none) = (Some(5), None);
    let wanted = [
        ("qwen2", [none, none, none, all, all, all]),
        ("qwen3", [none, none, none, all, all, all]),
        ("qwen2_moe", [all, none, all, none, none, none]),
        ("qwen3_moe", [all; 6]),
        ("mistral", [all; 6]),
        ("mixtral", [all; 6]),
    ];
    for (name, wanted) in wanted {
        assert_eq!(windows(&decoder(name, sliding.clone(), &["layer_types"])), wanted, "{name}");
    }
    let mut listed = sliding;
    listed["layer_types"] = vec!["full_attention"; 6].into();
    for (name, window) in [
        ("qwen2", none),
        ("qwen3", none),
        ("qwen2_moe", none),
        ("qwen3_moe", all),
        ("mistral", all),
        ("mixtral", all),
    ] {
        assert_eq!(windows(&decoder(name, listed.clone(), &[])), [window; 6], "{name}");
    }
}

/// A kind of layer without rotary positions in Gemma 3's config has the default ones, with its own base.
#[test]
fn gemma3_reads_half_of_its_rotary_positions() {
    let full = json!({ "full_attention": { "rope_type": "linear", "factor": 8.0 } });
    let of = decoder("gemma3", json!({ "rope_parameters": full }), &[]);
    let linear = RotaryConfig { scaling: RotaryScaling::Linear(8.0), ..RotaryConfig::plain(1e6) };
    for (rotary, window) in rotary(&of).into_iter().zip(windows(&of)) {
        assert_eq!(rotary, if window.is_some() { RotaryConfig::plain(1e4) } else { linear });
    }
    let sliding = json!({ "sliding_attention": { "rope_type": "default", "rope_theta": 5e4 } });
    let of = decoder("gemma3", json!({ "rope_parameters": sliding }), &[]);
    for (rotary, window) in rotary(&of).into_iter().zip(windows(&of)) {
        assert_eq!(rotary, RotaryConfig::plain(if window.is_some() { 5e4 } else { 1e6 }));
    }
}

/// YaRN serves longer sequences than those of the first training, which max_position_embeddings may name.
#[test]
fn yarn_extends_the_context() {
    let context = |changes| decoder("llama3_yarn", changes, &[]).context;
    assert_eq!(context(json!({ "max_position_embeddings": 16 })), 64);
    assert_eq!(context(json!({ "max_position_embeddings": 100 })), 100);
    let without = json!({ "rope_type": "yarn", "rope_theta": 1e4, "factor": 3.0 });
    assert_eq!(context(json!({ "max_position_embeddings": 16, "rope_parameters": without })), 48);
    assert_eq!(decoder("llama3", json!({ "max_position_embeddings": 16 }), &[]).context, 16);
}
