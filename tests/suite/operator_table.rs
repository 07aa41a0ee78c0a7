//! The table of operators, `docs/operators.md`: its test writes the page from the records, and fails if the file in the
//! repository differs. `ISOSHARD_BLESS=1 cargo test --test suite operator_table::` writes it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use isoshard::ops::{Input, InputFill, MeshAxis, Meta, Sample, Vjp, catalog};
use isoshard::tensor::DType;

use crate::house::examples::{PublicFunction, functions};
use crate::house::source::{Source, sources};

const DTYPES: [DType; 8] =
    [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::U8, DType::Bool];

#[test]
fn the_table_of_operators_is_up_to_date() {
    let page = page();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/operators.md");
    if std::env::var_os("ISOSHARD_BLESS").is_some() {
        std::fs::write(path, &page).expect("the page can be written");
    }
    let kept = std::fs::read_to_string(path).unwrap_or_default();
    let differs = kept.lines().zip(page.lines()).find(|(a, b)| a != b);
    assert!(kept == page, "run with ISOSHARD_BLESS=1; the first line that differs: {differs:?}");
}

/// Operators that are no method, with the functions that apply them. Derivatives are not listed.
const USED_BY: &[(&str, &[&str])] = &[
    ("adamw", &["optim::AdamW"]),
    ("compare", &["eq", "ne", "lt", "le", "gt", "ge", "eq_scalar"]),
    ("first_index", &["argmin", "max_with_index", "min_with_index"]),
    ("float_test", &["isnan", "isinf", "isfinite"]),
    ("inverse_power_of_two", &["norm", "optim::global_norm"]),
    ("keep_band", &["tril", "triu"]),
    ("last_write", &["scatter", "index_copy", "index_put"]),
    ("linear_index", &["index", "index_put"]),
    ("mask", &["masked_fill", "cross_entropy_with"]),
    ("pad", &["slice"]),
    ("rotary_apply", &["rotary_with"]),
    ("rotary_table", &["rotary_tables"]),
    ("scatter_max", &["scatter_reduce"]),
    ("scatter_min", &["scatter_reduce"]),
    ("sgd", &["optim::Sgd"]),
    ("soft_cross_entropy", &["cross_entropy_with"]),
    ("sum_deviations", &["var", "std"]),
    ("sum_exp", &["cross_entropy", "cross_entropy_with"]),
    ("sum_exp_differences", &["logsumexp"]),
    ("sum_powers", &["norm"]),
    ("sum_squared_deviations", &["var", "std", "optim::global_norm"]),
    ("topk_blocks", &["topk"]),
    ("wide_sum", &["mean", "mean_all"]),
];

#[test]
fn every_operator_is_a_method_or_names_its_users() {
    let methods = operator_methods();
    let operators: BTreeSet<&str> = catalog().iter().map(|s| s.op.name()).collect();
    let mut wrong = Vec::new();
    for operator in operators.iter().filter(|o| !methods.contains(**o) && !o.contains("_grad")) {
        if !USED_BY.iter().any(|(name, _)| name == operator) {
            wrong.push(format!("{operator} is no method, and nothing that applies it is listed"));
        }
    }
    for (operator, users) in USED_BY {
        if !operators.contains(operator) || methods.contains(*operator) {
            wrong.push(format!("{operator} is a method, or no operator"));
        }
        let unknown = users.iter().filter(|u| !methods.contains(**u) && !u.starts_with("optim::"));
        wrong.extend(unknown.map(|u| format!("{u} is no method")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Returns the names of the methods of `DTensor` that apply operators.
pub fn operator_methods() -> BTreeSet<String> {
    functions().iter().filter(|f| is_operator_method(f)).map(|f| name(f).to_string()).collect()
}

fn page() -> String {
    let mut samples: BTreeMap<&str, Vec<Sample>> = BTreeMap::new();
    for sample in catalog() {
        samples.entry(sample.op.name()).or_default().push(sample);
    }
    let functions = functions();
    let methods: Vec<&PublicFunction> = functions.iter().filter(|f| is_operator_method(f)).collect();
    let sources = sources();
    let mut page = format!(
        "# Operators\n\n\
        *Written by `tests/suite/operator_table.rs` from the operators' records: `ISOSHARD_BLESS=1 cargo test --test suite \
        operator_table::` writes it.*\n\n\
        {} operators, and {} methods of `DTensor` that are composed of them. Every method has an example in its \
        documentation.\n\n\
        - *Method* names the method of `DTensor`, or the functions that apply an operator without a method of its own. \
        The engine applies derivatives in the backward pass.\n\
        - *Dtypes* are those of the elements. Indices are i64 and conditions bool. If f16 and bf16 are taken, \
        statistics such as a norm's are f32.\n\
        - *Devices* are those with a kernel; the tests run every sample on both.\n\
        - *Gradient*: `yes` if all floating-point operands but statistics have one. Otherwise the operands, counted from 0, that have \
        one, and the reason why others have none. An operator that refuses returns an error if an operand needs a gradient.\n\
        - *Placements* are the rows: the placements of operands and results, for one mesh axis, with which the operator \
        communicates nothing. Replicas of all operands always give replicas. Other placements are moved to the \
        cheapest row. `S0` is a shard of dim 0, `Sd` of any dim, `RS` a ragged shard, `P(any)` a partial sum, maximum \
        or minimum. A row with (some) holds for some attributes or dtypes: multiplication by a negative number makes a \
        partial maximum a minimum. Rows that follow for ragged shards from rows for `S0`, `S1` and so on \
        (`ops/ragged/rows.rs`) are not repeated. If rows depend on dims they are shown for one call, whose attributes and shapes \
        follow. The judge (`tests/suite/rules.rs`) compares every row with a single rank; [its counts](judge.md).\n\n\
        | operator | method | dtypes | devices | gradient | placements |\n|---|---|---|---|---|---|\n",
        samples.len(),
        methods.iter().filter(|m| !samples.contains_key(name(m))).count(),
    );
    for (operator, samples) in &samples {
        let _ = writeln!(
            page,
            "| `{operator}` | {} | {} | {} | {} | {} |",
            method(operator, &methods),
            dtypes(samples),
            devices(operator, &sources),
            gradient(samples),
            placements(samples)
        );
    }
    page.push_str("\n## Methods that are composed of operators\n\n| method | |\n|---|---|\n");
    let mut composed: Vec<_> = methods.iter().filter(|m| !samples.contains_key(name(m))).collect();
    composed.sort_by_key(|m| name(m));
    for method in composed {
        let _ = writeln!(page, "| `{}` | {} |", name(method), plain(&method.summary));
    }
    page
}

/// Returns the method of an operator, or the functions that apply it.
fn method(operator: &str, methods: &[&PublicFunction]) -> String {
    if methods.iter().any(|f| name(f) == operator) {
        return format!("`{operator}`");
    }
    match USED_BY.iter().find(|(name, _)| *name == operator) {
        Some((_, users)) => format!("in `{}`", users.join("`, `")),
        None => "in derivatives".into(),
    }
}

/// Returns true for the methods of the folder of methods, and for those that rows of the pointwise table make.
fn is_operator_method(function: &PublicFunction) -> bool {
    let place = function.place.replace('\\', "/");
    function.name.starts_with("DTensor::")
        && (place.contains("src/dtensor/methods/") || place.contains("src/ops/pointwise/"))
}

fn name(function: &PublicFunction) -> &str {
    function.name.trim_start_matches("DTensor::")
}

/// Returns a sentence without links, for a cell of a table.
fn plain(sentence: &str) -> String {
    let mut text = sentence.replace('|', "\\|");
    while let Some(from) = text.find("](") {
        let Some(len) = text[from..].find(')') else { break };
        text.replace_range(from + 1..=from + len, "");
    }
    text.replace("[`", "`").replace("`]", "`")
}

/// Returns the dtypes of the elements that the operator takes: of the first operand that is neither indices nor a
/// condition. Other floating-point operands have the same dtype, or are statistics in the dtype of sums.
fn dtypes(samples: &[Sample]) -> String {
    let mut taken = BTreeSet::new();
    for sample in samples {
        let Some(elements) = sample.ins.iter().position(is_data).or((!sample.ins.is_empty()).then_some(0))
        else {
            continue;
        };
        let first = sample.ins[elements].meta.dtype;
        let follows: Vec<usize> = (0..sample.ins.len())
            .filter(|&k| k != elements && is_data(&sample.ins[k]) && sample.ins[k].meta.dtype == first)
            .collect();
        for (k, dtype) in DTYPES.into_iter().enumerate() {
            let sums = if dtype.is_float() && dtype != DType::F64 { DType::F32 } else { dtype };
            let is_taken = (0..1usize << follows.len()).any(|wide| {
                let mut metas = sample.metas();
                metas[elements].dtype = dtype;
                for (bit, &operand) in follows.iter().enumerate() {
                    metas[operand].dtype = if wide >> bit & 1 == 1 { sums } else { dtype };
                }
                sample.op.infer(&metas).is_ok()
            });
            if is_taken {
                taken.insert(k);
            }
        }
    }
    taken.into_iter().map(|k| DTYPES[k].name()).collect::<Vec<_>>().join(" ")
}

/// Returns true unless an operand's values are indices or conditions.
fn is_data(input: &Input) -> bool {
    match input.fill {
        InputFill::Bools | InputFill::Index(_) | InputFill::Slots(_) => false,
        InputFill::Ints
        | InputFill::Positive
        | InputFill::Unit
        | InputFill::InsideUnit
        | InputFill::AboveOne => true,
    }
}

/// Returns the devices; an operator without a kernel for CUDA says so in its file.
fn devices(operator: &str, sources: &[Source]) -> &'static str {
    let says =
        |s: &Source| s.operator().as_deref() == Some(operator) && s.text.contains("no_cuda_kernel(self");
    if sources.iter().any(says) { "CPU" } else { "CPU, CUDA" }
}

/// Returns whether the operands have gradients, and the reasons why some have none.
fn gradient(samples: &[Sample]) -> String {
    let (mut with, mut data) = (BTreeSet::new(), BTreeSet::new());
    let (mut refused, mut reasons) = (None, BTreeMap::new());
    for sample in samples {
        let metas = sample.metas();
        let statistics: Vec<usize> = sample.op.statistics(&metas).iter().map(|s| s.operand).collect();
        let floats = (0..metas.len()).filter(|i| metas[*i].dtype.is_float() && !statistics.contains(i));
        data.extend(floats);
        match Vjp::write(sample.op.as_ref(), &metas, &vec![true; metas.len()]) {
            Ok(program) => {
                with.extend((0..metas.len()).filter(|&i| program.grads[i].is_some()));
                reasons.extend((0..metas.len()).filter_map(|i| Some((i, program.reasons[i]?))));
            }
            Err(error) => {
                let text = error.to_string();
                let why = text.split_once("no derivative: ").map_or("no derivative", |(_, why)| why);
                refused = Some(why.split("; ").next().unwrap_or_default().to_string());
            }
        }
    }
    let list =
        |operands: &BTreeSet<usize>| operands.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    match (with.is_empty(), refused) {
        (true, Some(why)) => format!("refuses: {}", plain(&why)),
        (true, None) => format!("none: {}", reasons.values().next().copied().unwrap_or("no operands")),
        (false, _) if with.is_superset(&data) => "yes".into(),
        (false, _) => {
            let is_statistic = |i: &usize| reasons.get(i).is_some_and(|why| why.starts_with("a statistic"));
            let without: BTreeSet<usize> =
                data.difference(&with).copied().filter(|i| !is_statistic(i)).collect();
            if without.is_empty() {
                return "yes".into();
            }
            let whys: BTreeSet<&str> = without.iter().filter_map(|i| reasons.get(i).copied()).collect();
            let whys: Vec<&str> = whys.into_iter().collect();
            format!("of {}; not of {}: {}", list(&with), list(&without), whys.join(", "))
        }
    }
}

/// Returns the sample whose rows the table shows: one without an extent of 0 if there is one, with the most dims and
/// elements.
fn shown_sample(samples: &[Sample]) -> Option<&Sample> {
    let numel = |s: &Sample| s.ins.iter().map(|i| i.meta.shape.numel()).collect::<Vec<_>>();
    let dims = |s: &Sample| s.ins.iter().map(|i| i.meta.shape.len()).max();
    samples.iter().max_by_key(|s| (!numel(s).contains(&0), dims(s), numel(s).iter().sum::<usize>()))
}

/// Returns the rows of every sample of an operator whose rows treat all dims alike, as an elementwise operator's do, or
/// nothing for another operator. "(some)" marks a row that some sample lacks.
fn rows_of_all(samples: &[Sample]) -> Option<Vec<String>> {
    let of_samples: Vec<Vec<String>> =
        samples.iter().filter(|s| s.ins[0].meta.shape.len() > 1).map(rows).collect();
    let names_a_dim = |row: &String| row.split(' ').any(|w| w.starts_with('S') && w != "Sd");
    let names_no_dim =
        |rows: &Vec<String>| !rows.iter().any(names_a_dim) && rows.iter().any(|r| r.contains("Sd"));
    if of_samples.is_empty() || !of_samples.iter().all(names_no_dim) {
        return None;
    }
    let mut shown: Vec<String> = Vec::new();
    for row in of_samples.iter().flatten() {
        let text = if of_samples.iter().all(|rows| rows.contains(row)) {
            row.clone()
        } else {
            format!("{row} (some)")
        };
        if !shown.contains(&text) {
            shown.push(text);
        }
    }
    Some(shown)
}

/// Returns the placements, and the attributes and shapes to which they belong.
fn placements(samples: &[Sample]) -> String {
    let quoted = |rows: &[String]| match rows {
        [] => "replicas only".to_string(),
        _ => format!("`{}`", rows.join("`, `")).replace(" (some)`", "` (some)"),
    };
    if let Some(rows) = rows_of_all(samples) {
        return quoted(&rows);
    }
    let Some(sample) = shown_sample(samples) else { return String::new() };
    let shapes = |metas: &[Meta]| metas.iter().map(|m| format!("{}", m.shape)).collect::<Vec<_>>().join(" ");
    let metas = sample.metas();
    let outs = sample.op.infer(&metas).expect("the sample is right");
    format!("{}<br>{}: `{} -> {}`", quoted(&rows(sample)), attributes(sample), shapes(&metas), shapes(&outs))
}

/// Returns the operator's attributes, unless they are long or the operator has none.
fn attributes(sample: &Sample) -> String {
    let text = format!("{:?}", sample.op);
    match text.split_once(" { ") {
        Some((_, fields)) if fields.len() < 60 => {
            format!("`{}`", fields.strip_suffix(" }").unwrap_or(fields))
        }
        _ => "shapes".to_string(),
    }
}

/// Returns the rows of a sample, those that differ in a dim or in the kind of a partial alone as one.
fn rows(sample: &Sample) -> Vec<String> {
    let rows = sample.op.rows(&sample.metas(), MeshAxis::new(2));
    let texts: Vec<String> = rows.iter().map(|r| format!("{r:?}")).collect();
    let mut shown: Vec<String> = Vec::new();
    let ndim = sample.ins.first().map_or(0, |i| i.meta.shape.len());
    for row in &texts {
        let over_dims = one_letter(row, "Sd", |w| (w.starts_with('S')).then(|| w.to_string()));
        let of_dim = |d: usize| over_dims.as_ref().map(|r| r.replace("Sd", &format!("S{d}")));
        let every_dim = ndim > 1 && (0..ndim).all(|d| of_dim(d).is_some_and(|r| texts.contains(&r)));
        let partials = one_letter(row, "P(any)", |w| w.starts_with("P(").then(|| w.to_string()));
        let of_partial = |op: &str| partials.as_ref().map(|r| r.replace("P(any)", op));
        let any_partial =
            ["P(sum)", "P(max)", "P(min)"].iter().all(|p| of_partial(p).is_some_and(|r| texts.contains(&r)));
        let text = match (over_dims, partials) {
            (Some(text), _) if every_dim => text,
            (_, Some(text)) if any_partial => text,
            _ => row.clone(),
        };
        if !shown.contains(&text) {
            shown.push(text);
        }
    }
    shown
}

/// Returns a row with the chosen words replaced, if they are all the same word.
fn one_letter(row: &str, by: &str, chosen: impl Fn(&str) -> Option<String>) -> Option<String> {
    let words: BTreeSet<String> = row.split(' ').filter_map(chosen).collect();
    let [word] = &words.into_iter().collect::<Vec<_>>()[..] else { return None };
    Some(row.split(' ').map(|w| if w == word { by } else { w }).collect::<Vec<_>>().join(" "))
}
