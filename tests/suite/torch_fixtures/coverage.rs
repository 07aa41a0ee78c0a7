//! Operators and methods that fixtures.py calls under other names, and those that it cannot call.

use std::collections::BTreeSet;

use isoshard::ops::catalog;

use super::operators::OPERATORS;
use super::{TorchCase, fixtures};
use crate::operator_table::operator_methods;

/// Operators and methods, with the cases that run them under another name.
const CASES: &[(&str, &[&str])] = &[
    ("attention_with", &["attention_bidirectional", "attention_mask", "attention_bias", "attention_window"]),
    ("attention_with", &["attention_soft_cap", "attention_documents"]),
    ("bce_with_logits_loss", &["bce_weighted"]),
    ("compare", &["eq", "ne", "lt", "le", "gt", "ge"]),
    ("cross_entropy_with", &["cross_entropy_dim", "cross_entropy_probabilities"]),
    ("first_index", &["argmin", "max_with_index"]),
    ("float_test", &["isnan", "isinf", "isfinite"]),
    ("full", &["full_like"]),
    ("inverse_power_of_two", &["norm"]),
    ("keep_band", &["tril", "triu"]),
    ("kl_div_loss", &["kl_div_log"]),
    ("last_write", &["scatter", "index_copy"]),
    ("layer_norm_over", &["layer_norm_plain"]),
    ("linear_index", &["index", "index_put"]),
    ("mask", &["masked_fill"]),
    ("nll_loss", &["nll_loss_weighted"]),
    ("rotary_apply", &["rotary_with"]),
    ("rotary_table", &["rotary_tables"]),
    ("scatter_max", &["scatter_reduce"]),
    ("scatter_min", &["scatter_reduce"]),
    ("soft_cross_entropy", &["cross_entropy_probabilities"]),
    ("sum_deviations", &["var"]),
    ("sum_exp", &["cross_entropy"]),
    ("sum_exp_differences", &["logsumexp"]),
    ("sum_powers", &["norm"]),
    ("sum_squared_deviations", &["var", "std"]),
    ("wide_sum", &["mean", "mean_all"]),
    // Derivatives, by the cases whose gradients they are. One that is named as its operator is found by its name.
    ("attention_grad", &["attention", "attention_window"]),
    ("attention_bias_grad", &["attention_bias"]),
    ("soft_cross_entropy_grad", &["cross_entropy_probabilities"]),
    ("zero_grad", &["sign", "floor"]),
    ("zeros", &["zeros_like"]),
];

/// Operators and methods that are not compared with PyTorch, by reason.
pub const EXCUSED: &[(&str, &[&str])] = &[
    (
        "PyTorch draws other random numbers; `rng` and `rng_statistics` compare with definitions and distributions",
        &[
            "attention_dropout",
            "attention_with_dropout",
            "bernoulli",
            "categorical",
            "dropout",
            "exponential",
            "fill_init",
            "fill_random",
            "gamma",
            "init",
            "multinomial",
            "poisson",
            "rand",
            "rand_like",
            "randn",
            "randn_like",
            "random",
            "random_like",
            "randperm",
            "shuffle",
        ],
    ),
    ("PyTorch has no such function; `functions` compares with mpmath", &["cbrt"]),
    ("calls an operator or a function that the program names", &["foreach", "from_fn"]),
    (
        "products that `matmul` compares; `joint` compares them and their gradients with those of one weight",
        &["joint_linear", "joint_linear_in"],
    ),
    ("returns the sizes of groups, not a tensor", &["group_sizes"]),
    ("runs if the sorted dim is sharded; `index_maps` compares with `topk` of the whole", &["topk_blocks"]),
];

/// Returns the cases that run an operator or a method.
fn cases_of(name: &str) -> impl Iterator<Item = &str> {
    let derived = name.split_once("_grad").map(|(of, _)| of);
    let direct = OPERATORS.iter().map(|o| o.name).filter(move |o| *o == name || Some(*o) == derived);
    direct.chain(CASES.iter().filter(move |(of, _)| *of == name).flat_map(|(_, cases)| cases.iter().copied()))
}

#[test]
fn every_operator_and_method_is_compared_or_excused() {
    let (_, cases) = fixtures();
    let mut all: BTreeSet<String> = catalog().iter().map(|s| s.op.name().to_string()).collect();
    all.extend(operator_methods());
    let excused: Vec<&str> = EXCUSED.iter().flat_map(|(_, names)| names.iter().copied()).collect();
    let mut wrong = Vec::new();
    for name in &all {
        // A derivative runs only in cases with gradients.
        let runs = |c: &&TorchCase| !name.contains("_grad") || c.grads.is_some();
        let compared = cases_of(name).any(|of| cases.iter().filter(runs).any(|c| c.op == of));
        match (compared, excused.contains(&name.as_str())) {
            (false, false) => wrong.push(format!("{name} is neither compared nor excused")),
            (true, true) => wrong.push(format!("{name} is compared and excused")),
            _ => {}
        }
    }
    let named = CASES.iter().map(|(name, _)| *name).chain(excused);
    wrong.extend(named.filter(|n| !all.contains(*n)).map(|n| format!("{n} is no operator and no method")));
    for case in CASES.iter().flat_map(|(_, cases)| cases.iter()) {
        if !cases.iter().any(|c| c.op == **case) {
            wrong.push(format!("{case} is not a case"));
        }
    }
    for operator in OPERATORS {
        let is_case = CASES.iter().any(|(_, cases)| cases.contains(&operator.name));
        if !all.contains(operator.name) && !is_case {
            wrong.push(format!("{} belongs to no operator and no method", operator.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The names of operators in fixtures.py are those in fixtures.jsonl: the script was run.
#[test]
fn every_case_of_the_script_is_stored() {
    let script = include_str!("../../torch/fixtures.py");
    let (_, cases) = fixtures();
    let stored: BTreeSet<&str> = cases.iter().map(|c| c.op.as_str()).collect();
    let mut called = BTreeSet::new();
    for call in ["case(\"", "made(\"", "unary(\"", "binary(\"", "along(\""] {
        called.extend(script.split(call).skip(1).filter_map(|rest| rest.split('"').next()));
    }
    assert!(called.len() > 150, "only {} names are read", called.len());
    let missing: Vec<_> = called.difference(&stored).collect();
    assert!(missing.is_empty(), "run tests/torch/fixtures.py: no case of {missing:?}");
}
