//! The table of operators, `docs/operators.md`: its test writes the page from the records, and fails if the file in the
//! repository differs. `ISOSHARD_BLESS=1 cargo test --test suite operator_table::` writes it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use isoshard::ops::{InputFill, MeshAxis, Meta, Sample, Vjp, catalog};
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

fn page() -> String {
    let mut samples: BTreeMap<&str, Vec<Sample>> = BTreeMap::new();
    for sample in catalog() {
        samples.entry(sample.op.name()).or_default().push(sample);
    }
    let functions = functions();
    let methods: Vec<&PublicFunction> = functions.iter().filter(|f| is_operator_method(f)).collect();
    let method_of = |operator: &str| methods.iter().find(|f| name(f) == operator);
    let sources = sources();
    let mut page = format!(
        "# Operators\n\n\
        *Written by `tests/suite/operator_table.rs` from the operators' records: `ISOSHARD_BLESS=1 cargo test --test suite \
        operator_table::` writes it.*\n\n\
        {} operators, and {} methods of `DTensor` that are composed of them. Every method has an example in its \
        documentation.\n\n\
        - *Dtypes* are those of the first operand. *Devices* are those with a kernel; the tests run every sample on both.\n\
        - *Gradient* names the operands, counted from 0, that have one.\n\
        - *Placements* are the rows: the placements of operands and results, for one mesh axis, with which the operator \
        communicates nothing, shown for one sample of the operator. `S0` is a shard of dim 0, `Sd` of any dim, `RS` a \
        ragged shard, `P(any)` a partial sum, maximum or minimum. Replicas of all operands always give replicas. Other placements are moved to the cheapest row. \
        The judge (`tests/suite/rules.rs`) compares every row with a single rank.\n\n\
        | operator | method | dtypes | devices | gradient | placements |\n|---|---|---|---|---|---|\n",
        samples.len(),
        methods.iter().filter(|m| !samples.contains_key(name(m))).count(),
    );
    for (operator, samples) in &samples {
        let method = match method_of(operator) {
            Some(function) => format!("`{}`", name(function)),
            None if operator.contains("_grad") => "in derivatives".into(),
            None => "in methods below".into(),
        };
        let _ = writeln!(
            page,
            "| `{operator}` | {method} | {} | {} | {} | {} |",
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

/// Returns the dtypes of the first operand that the operator takes; the other operands have the same dtype, or a
/// sample's.
fn dtypes(samples: &[Sample]) -> String {
    let mut taken = BTreeSet::new();
    for sample in samples.iter().filter(|s| !s.ins.is_empty()) {
        let first = sample.ins[0].meta.dtype;
        for (k, dtype) in DTYPES.into_iter().enumerate() {
            let changes = |fill: InputFill, of: DType| match fill {
                InputFill::Bools => false,
                _ => of == first,
            };
            let metas: Vec<Meta> = sample
                .ins
                .iter()
                .map(|i| match changes(i.fill, i.meta.dtype) {
                    true => Meta::new(dtype, i.meta.shape.clone()),
                    false => i.meta.clone(),
                })
                .collect();
            if metas[0].dtype == dtype && sample.op.infer(&metas).is_ok() {
                taken.insert(k);
            }
        }
    }
    taken.into_iter().map(|k| DTYPES[k].name()).collect::<Vec<_>>().join(" ")
}

/// Returns the devices; an operator without a kernel for CUDA says so in its file.
fn devices(operator: &str, sources: &[Source]) -> &'static str {
    let says =
        |s: &Source| s.operator().as_deref() == Some(operator) && s.text.contains("has no CUDA kernel");
    if sources.iter().any(says) { "CPU" } else { "CPU, CUDA" }
}

/// Returns the operands with a gradient, or the reason why there is none.
fn gradient(samples: &[Sample]) -> String {
    let (mut with, mut floats, mut reason) = (BTreeSet::new(), BTreeSet::new(), None);
    for sample in samples {
        let metas = sample.metas();
        let needs: Vec<bool> = metas.iter().map(|m| m.dtype.is_float()).collect();
        floats.extend((0..needs.len()).filter(|&i| needs[i]));
        match Vjp::write(sample.op.as_ref(), &metas, &needs) {
            Ok(program) => with.extend((0..needs.len()).filter(|&i| program.grads[i].is_some())),
            Err(error) => {
                let text = error.to_string();
                let why = text.split_once("no derivative: ").map_or("no derivative", |(_, why)| why);
                reason = Some(why.split("; ").next().unwrap_or_default().to_string());
            }
        }
    }
    match (with.is_empty(), reason) {
        (true, Some(reason)) => format!("none: {}", plain(&reason)),
        (true, None) => "none".into(),
        _ if with == floats && floats.len() == 1 => "yes".into(),
        _ if with == floats => "all".into(),
        _ => with.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
    }
}

/// Returns the rows of the sample with the most elements, those that differ in a dim or in the kind of a partial alone
/// as one.
fn placements(samples: &[Sample]) -> String {
    let numel = |s: &&Sample| s.ins.iter().map(|i| i.meta.shape.numel()).sum::<usize>();
    let dims = |s: &&Sample| s.ins.iter().map(|i| i.meta.shape.len()).max();
    let Some(sample) = samples.iter().max_by_key(|s| (dims(s), numel(s))) else { return String::new() };
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
    if shown.is_empty() { "replicas only".into() } else { format!("`{}`", shown.join("`, `")) }
}

/// Returns a row with the chosen words replaced, if they are all the same word.
fn one_letter(row: &str, by: &str, chosen: impl Fn(&str) -> Option<String>) -> Option<String> {
    let words: BTreeSet<String> = row.split(' ').filter_map(chosen).collect();
    let [word] = &words.into_iter().collect::<Vec<_>>()[..] else { return None };
    Some(row.split(' ').map(|w| if w == word { by } else { w }).collect::<Vec<_>>().join(" "))
}
