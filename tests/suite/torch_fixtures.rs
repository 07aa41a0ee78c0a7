//! Results and gradients compared with PyTorch's, at odd shapes and special values.
//!
//! `tests/torch/fixtures.py` calls PyTorch and writes `tests/torch/fixtures.jsonl`. `operators` maps each call to a
//! method of `DTensor` and says how far the two may differ: not at all, or by a number of units in the last place.
//! Elements that differ by more must be covered by an intended difference (`differences`); an intended difference that
//! covers no element is out of date. Both are errors. `docs/torch.md` shows the differences and the bounds:
//! `ISOSHARD_BLESS=1 cargo test --test suite torch_fixtures::` writes the page.

mod attributes;
mod coverage;
mod differences;
mod operators;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::Layout;
use isoshard::tensor::{DType, Tensor};
use serde_json::Value;

use coverage::EXCUSED;
use differences::DIFFERENCES;
use operators::{OPERATORS, TorchOperator};

/// The bound of a comparison: a number of units in the last place (ulp) of a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UlpBound {
    ulps: f64,
    scale: UlpScale,
}

/// The value whose unit in the last place a bound counts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum UlpScale {
    /// PyTorch's element.
    Element,
    /// PyTorch's element, or 1 if that is larger: terms of about 1 cancel.
    One,
    /// The tensor's largest finite element, or 1 if that is larger: sums.
    Largest,
}

impl UlpBound {
    fn text(self) -> String {
        let of = match self.scale {
            UlpScale::Element => "",
            UlpScale::One => " of 1 or more",
            UlpScale::Largest => " of the largest",
        };
        if self.ulps == 0.0 { "equal".into() } else { format!("{} ulp{of}", self.ulps) }
    }
}

/// A call of PyTorch.
pub struct TorchCase {
    line: usize,
    op: String,
    attributes: Vec<Value>,
    ins: Vec<Tensor>,
    outs: Vec<Tensor>,
    /// The text of PyTorch's error, in which case there are no results.
    raises: Option<String>,
    /// Gradients of the results, and of the operands.
    grads: Option<(OptionalTensors, OptionalTensors)>,
}

type OptionalTensors = Vec<Option<Tensor>>;

/// The compared tensor of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Compared {
    Result(usize),
    Gradient(usize),
}

/// An element, or a whole tensor that one side lacks, which differs from PyTorch's by more than the bound.
pub struct Found<'a> {
    case: &'a TorchCase,
    compared: Compared,
    dtype: DType,
    index: usize,
    here: f64,
    torch: f64,
    /// The message if this crate refuses, in which case there are no elements.
    error: Option<String>,
}

impl Found<'_> {
    /// Returns true if PyTorch raises an error, and this crate does not.
    pub fn is_raised(&self) -> bool {
        self.case.raises.is_some()
    }
}

impl Found<'_> {
    /// Returns the element of operand `k` at the same index, for operators that broadcast; NaN if the operand is larger.
    pub fn x(&self, k: usize) -> f64 {
        let shape = match self.compared {
            Compared::Result(k) => self.case.outs[k].shape(),
            Compared::Gradient(k) => self.case.ins[k].shape(),
        };
        self.case.ins[k].expand(shape).map_or(f64::NAN, |x| x.to_f64_vec()[self.index])
    }

    /// Returns attribute `k`.
    pub fn number(&self, k: usize) -> f64 {
        attributes::number(&self.case.attributes, k)
    }

    /// Returns true for the case whose rows have infinities, NaN and the largest numbers.
    pub fn is_special_row(&self) -> bool {
        self.case.ins[0].shape()[..] == [14, 3]
    }

    /// Returns true for f16 and bf16.
    pub fn is_narrow(&self) -> bool {
        self.dtype == DType::F16 || self.dtype == DType::BF16
    }
}

impl std::fmt::Display for Found<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Found { case, compared, dtype, index, here, torch, error } = self;
        let ins: Vec<String> = case.ins.iter().map(Tensor::notation).collect();
        write!(f, "line {}, {}{:?} {}: {compared:?}", case.line, case.op, case.attributes, ins.join(", "))?;
        match error {
            Some(error) => write!(f, ": {error}"),
            None => {
                write!(
                    f,
                    "[{index}] is {here:e}, PyTorch's {torch:e} ({} ulp)",
                    (here - torch).abs() / ulp(*dtype, *torch)
                )?;
                let operands: Vec<Vec<f64>> = case.ins.iter().map(Tensor::to_f64_vec).collect();
                let alike = operands.iter().all(|x| x.len() == case.outs[0].numel());
                let at: Vec<String> =
                    operands.iter().filter(|_| alike).map(|x| format!("{:e}", x[*index])).collect();
                if alike { write!(f, " for {}", at.join(", ")) } else { Ok(()) }
            }
        }
    }
}

/// The number of differing elements that a failure shows per operator, tensor and dtype.
const SHOWN: usize = 6;

/// Counts of one operator.
#[derive(Default)]
struct Compare {
    cases: usize,
    elements: usize,
    gradients: usize,
    dtypes: BTreeSet<&'static str>,
}

#[test]
fn operators_agree_with_pytorch_but_for_intended_differences() {
    let (version, cases) = fixtures();
    let mut counts: BTreeMap<&str, Compare> = BTreeMap::new();
    let mut covered = vec![0usize; DIFFERENCES.len()];
    let mut wrong: Vec<String> = Vec::new();
    let mut unlisted: BTreeMap<(String, Compared, &str), Vec<String>> = BTreeMap::new();
    for case in &cases {
        let Some(operator) = OPERATORS.iter().find(|o| o.name == case.op) else {
            wrong.push(format!("line {}: no operator is named {}", case.line, case.op));
            continue;
        };
        let count = counts.entry(operator.name).or_default();
        for found in compare(operator, case, count) {
            let by: Vec<usize> = (0..DIFFERENCES.len()).filter(|&d| DIFFERENCES[d].covers(&found)).collect();
            by.iter().for_each(|&d| covered[d] += 1);
            if by.is_empty() {
                let group = (found.case.op.clone(), found.compared, found.dtype.name());
                unlisted.entry(group).or_default().push(found.to_string());
            }
        }
    }
    for (group, found) in &unlisted {
        wrong.push(format!("{} elements of {group:?} differ, the first:", found.len()));
        wrong.extend(found.iter().take(SHOWN).map(|text| format!("    {text}")));
    }
    for (difference, _) in DIFFERENCES.iter().zip(&covered).filter(|(_, n)| **n == 0) {
        wrong.push(format!(
            "no longer a difference: {} if {}",
            difference.operators.join(", "),
            difference.when
        ));
    }
    for operator in OPERATORS.iter().filter(|o| !counts.contains_key(o.name)) {
        wrong.push(format!("{}: fixtures.jsonl has no case", operator.name));
    }
    let page = page(&version, &counts, &covered);
    let kept = kept_page(&page);
    assert!(wrong.is_empty(), "compared with PyTorch {version}:\n{}", wrong.join("\n"));
    assert!(
        kept == page,
        "docs/torch.md is out of date: ISOSHARD_BLESS=1 cargo test --test suite torch_fixtures:: writes it"
    );
}

#[test]
fn the_cases_have_strided_empty_and_special_operands() {
    let (_, cases) = fixtures();
    let operands = || cases.iter().flat_map(|c| &c.ins);
    assert!(operands().any(|x| !x.is_contiguous()) && operands().any(|x| x.numel() == 0));
    let values: Vec<f64> = operands().flat_map(Tensor::to_f64_vec).collect();
    for special in
        [0.0, -0.0, f64::INFINITY, f64::MIN, f32::MAX.into(), f64::from_bits(1), f32::from_bits(1).into()]
    {
        assert!(values.iter().any(|v: &f64| v.to_bits() == special.to_bits()), "{special}");
    }
    assert!(values.iter().any(|v| v.is_nan()));
}

/// Runs a case on one rank and returns the elements that differ by more than the operator's bounds.
fn compare<'a>(operator: &'static TorchOperator, case: &'a TorchCase, count: &mut Compare) -> Vec<Found<'a>> {
    let refusal = |compared, error: String| {
        vec![Found { case, compared, dtype: DType::F64, index: 0, here: 0.0, torch: 0.0, error: Some(error) }]
    };
    let attributes = case.attributes.clone();
    let run = operator.run;
    let given = call(case, move |xs| run(xs, &attributes));
    let (outs, gradients) = match (given, &case.raises) {
        (Ok(_), Some(error)) => {
            count.cases += 1;
            return refusal(Compared::Result(0), format!("no error; PyTorch's is {error}"));
        }
        (Err(_), Some(_)) => {
            count.cases += 1;
            return Vec::new();
        }
        (Ok(given), None) => given,
        (Err(e), None) => return refusal(Compared::Result(0), e.to_string()),
    };
    count.cases += 1;
    count.dtypes.extend(case.ins.iter().map(|x| x.dtype().name()));
    let mut found = Vec::new();
    assert_eq!(outs.len(), case.outs.len(), "line {}: the number of results", case.line);
    for (k, (here, torch)) in outs.iter().zip(&case.outs).enumerate() {
        count.elements += torch.numel();
        found.extend(differing(case, Compared::Result(k), here, torch, operator.result));
    }
    match gradients {
        Err(error) => found.extend(refusal(Compared::Gradient(0), error)),
        Ok(gradients) => {
            for (k, here) in gradients.iter().enumerate() {
                let torch = case.grads.as_ref().and_then(|(_, dx)| dx[k].as_ref());
                let (Some(here), Some(torch)) = (here, torch) else { continue };
                count.gradients += torch.numel();
                found.extend(differing(case, Compared::Gradient(k), here, torch, operator.gradient));
            }
        }
    }
    found
}

/// The results, and the gradients of the operands or the message of the error.
type Called = (Vec<Tensor>, std::result::Result<Vec<Option<Tensor>>, String>);

fn call(
    case: &TorchCase,
    f: impl Fn(&[DTensor]) -> Result<Vec<DTensor>> + Send + Sync + 'static,
) -> Result<Called> {
    let (ins, grads) = (case.ins.clone(), case.grads.clone());
    let run = move |rank| {
        let mesh = DeviceMesh::parse(&rank, "1")?;
        let whole = |t: &Tensor| DTensor::distribute(&mesh, t, Layout::replicated(0));
        let wanted = |k: usize| grads.as_ref().is_some_and(|(_, dx)| dx[k].is_some());
        let mut xs = Vec::new();
        for (k, x) in ins.iter().enumerate() {
            xs.push(if wanted(k) { whole(x)?.requires_grad()? } else { whole(x)? });
        }
        let ys = f(&xs)?;
        let outs = ys.iter().map(|y| y.local().clone()).collect();
        let Some((dys, _)) = &grads else { return Ok((outs, Ok(vec![None; xs.len()]))) };
        let backward = || -> Result<Vec<Option<Tensor>>> {
            let mut total: Option<DTensor> = None;
            let pairs: Vec<(&DTensor, &Tensor)> =
                ys.iter().zip(dys).filter_map(|(y, dy)| Some((y, dy.as_ref()?))).collect();
            let gradients = match pairs[..] {
                [(y, dy)] => y.clone().backward_from(whole(dy)?)?,
                _ => {
                    for (y, dy) in pairs {
                        let term = y.mul(&whole(dy)?)?.sum_all()?;
                        total = Some(match total {
                            None => term,
                            Some(before) => before.add(&term)?,
                        });
                    }
                    total.expect("a result has a gradient").backward()?
                }
            };
            let dense = |x: &DTensor| gradients.get(x).map(|g| g.full_tensor()).transpose();
            xs.iter().map(dense).collect()
        };
        Ok((outs, backward().map_err(|e| e.to_string())))
    };
    Ok(spmd(1, run)?.swap_remove(0))
}

fn differing<'a>(
    case: &'a TorchCase,
    compared: Compared,
    here: &Tensor,
    torch: &Tensor,
    bound: UlpBound,
) -> Vec<Found<'a>> {
    let dtype = torch.dtype();
    let (a, b) = (here.to_f64_vec(), torch.to_f64_vec());
    if here.shape() != torch.shape() || here.dtype() != dtype {
        let error = format!("{} instead of {}", here.notation(), torch.notation());
        return vec![Found { case, compared, dtype, index: 0, here: 0.0, torch: 0.0, error: Some(error) }];
    }
    let largest = b.iter().filter(|v| v.is_finite()).fold(1.0f64, |m, v| m.max(v.abs()));
    let agrees = |(a, b): (f64, f64)| {
        let scale = match bound.scale {
            UlpScale::Element => b,
            UlpScale::One => b.abs().max(1.0),
            UlpScale::Largest => largest,
        };
        let zeros = a == 0.0 && b == 0.0 && bound.scale == UlpScale::Element;
        let near = bound.ulps > 0.0 && !zeros && (a - b).abs() <= bound.ulps * ulp(dtype, scale);
        a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()) || near
    };
    let pairs = a.iter().copied().zip(b.iter().copied()).enumerate().filter(|(_, pair)| !agrees(*pair));
    let found = |(index, (here, torch))| Found { case, compared, dtype, index, here, torch, error: None };
    pairs.map(found).collect()
}

/// Returns the distance from `|v|` to the next larger number of the dtype.
fn ulp(dtype: DType, v: f64) -> f64 {
    let (digits, least) = match dtype {
        DType::F64 => (53, -1022),
        DType::F32 => (24, -126),
        DType::F16 => (11, -14),
        DType::BF16 => (8, -126),
        _ => return 1.0,
    };
    let exponent = if v == 0.0 { least } else { (v.abs().log2().floor() as i32).max(least) };
    2f64.powi(exponent.min(1023) - digits + 1)
}

/// Reads the file that fixtures.py writes: PyTorch's version, and the cases.
fn fixtures() -> (String, Vec<TorchCase>) {
    let (mut version, mut tensors, mut cases) = (String::new(), Vec::new(), Vec::new());
    for (line, text) in include_str!("../torch/fixtures.jsonl").lines().enumerate() {
        let mut value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("line {line}: {e}"));
        if let Some(torch) = value.get("torch") {
            version = torch.as_str().expect("a version").to_string();
        } else if value.get("x").is_some() {
            tensors.push(stored(&value));
        } else {
            let tensor = |n: &Value| n.as_u64().map(|n| tensors[n as usize].clone());
            let list = |name: &str| -> Vec<Option<Tensor>> {
                value[name].as_array().expect("a list").iter().map(tensor).collect()
            };
            let operand = |v: &Value| {
                let base = tensor(&v["n"]).expect("a stored tensor");
                match v.get("e") {
                    Some(shape) => base.expand(attributes::extents(shape)).expect("a shape to expand to"),
                    None if v.get("t").is_some() => {
                        base.transpose(base.shape().len() - 2, base.shape().len() - 1).expect("two dims")
                    }
                    None => base,
                }
            };
            let ins = value["i"].as_array().expect("operands").iter().map(operand).collect();
            let outs = list("o").into_iter().map(|o| o.expect("a result")).collect();
            let grads = value.get("dx").map(|_| (list("dy"), list("dx")));
            let raises = value.get("raises").map(|text| text.as_str().expect("a text").to_string());
            let op = value["op"].as_str().expect("a name").to_string();
            let attributes = std::mem::take(value["a"].as_array_mut().expect("attributes"));
            cases.push(TorchCase { line: line + 1, op, attributes, ins, outs, raises, grads });
        }
    }
    (version, cases)
}

fn stored(value: &Value) -> Tensor {
    let digits = value["x"].as_str().expect("digits").as_bytes();
    let digit = |d: u8| (d as char).to_digit(16).expect("a hexadecimal digit") as u8;
    let bytes: Vec<u8> = digits.chunks(2).map(|d| digit(d[0]) << 4 | digit(d[1])).collect();
    let shape = attributes::extents(&value["s"]);
    fn of<const N: usize, T: isoshard::tensor::Element>(
        bytes: &[u8],
        from: fn([u8; N]) -> T,
        shape: Vec<usize>,
    ) -> Tensor {
        let elements = bytes.chunks_exact(N).map(|b| from(b.try_into().expect("N bytes"))).collect();
        Tensor::from_vec(elements, shape).expect("as many elements as the shape has")
    }
    match value["d"].as_str().expect("a dtype") {
        "f64" => of(&bytes, f64::from_le_bytes, shape),
        "f32" => of(&bytes, f32::from_le_bytes, shape),
        "f16" => of(&bytes, half::f16::from_le_bytes, shape),
        "bf16" => of(&bytes, half::bf16::from_le_bytes, shape),
        "i64" => of(&bytes, i64::from_le_bytes, shape),
        "i32" => of(&bytes, i32::from_le_bytes, shape),
        "u8" => of(&bytes, u8::from_le_bytes, shape),
        "bool" => of(&bytes, |[b]: [u8; 1]| b == 1, shape),
        other => panic!("dtype {other}"),
    }
}

fn page(version: &str, counts: &BTreeMap<&str, Compare>, covered: &[usize]) -> String {
    let mut page = format!(
        "# Compared with PyTorch\n\n\
        `tests/torch/fixtures.py` calls PyTorch {version} at odd shapes and special values (zeros of both signs, \
        infinities, NaN, subnormal and largest numbers; strided, broadcast and empty operands), in every dtype. \
        `tests/suite/torch_fixtures.rs` compares results and gradients element by element and writes this page \
        (`ISOSHARD_BLESS=1`).\n\n\
        ## Intended differences\n\n\
        An element that differs and is not in this table fails the test, and so does a row without such an element.\n\n\
        | operator | of | if | here | PyTorch | reason | elements |\n|---|---|---|---|---|---|---|\n"
    );
    for (d, elements) in DIFFERENCES.iter().zip(covered) {
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} | {} | {elements} |",
            d.operators.iter().map(|o| format!("`{o}`")).collect::<Vec<_>>().join(", "),
            d.of.text(),
            d.when,
            d.here,
            d.torch,
            d.reason
        );
    }
    page.push_str(
        "\n## Operators\n\n\
        An ulp is a unit in the last place of PyTorch's element, in its dtype; \"of 1 or more\" means that terms of about 1 \
        cancel, so the unit is at least that of 1; \"of the largest\" means the unit of the tensor's largest element.\n\n\
        | operator | results | gradients | dtypes | calls | elements compared |\n|---|---|---|---|---|---|\n",
    );
    for (name, c) in counts {
        let operator = OPERATORS.iter().find(|o| o.name == *name).expect("it was run");
        let dtypes: Vec<&str> = c.dtypes.iter().copied().collect();
        let gradient = if c.gradients == 0 { "none".into() } else { operator.gradient.text() };
        let elements = c.elements + c.gradients;
        let _ = writeln!(
            page,
            "| `{name}` | {} | {gradient} | {} | {} | {elements} |",
            operator.result.text(),
            dtypes.join(", "),
            c.cases
        );
    }
    page.push_str(
        "\n## Not compared\n\nEvery other operator and method is in the table above, under its name or those of its cases; a test \
        compares the lists.\n\n| operators and methods | reason |\n|---|---|\n",
    );
    for (reason, names) in EXCUSED {
        let _ = writeln!(page, "| `{}` | {reason} |", names.join("`, `"));
    }
    page
}

/// Returns the text of `docs/torch.md`, which is first overwritten with `page` if `ISOSHARD_BLESS` is set.
fn kept_page(page: &str) -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/torch.md");
    if std::env::var_os("ISOSHARD_BLESS").is_some() {
        std::fs::write(path, page).expect("the page can be written");
    }
    std::fs::read_to_string(path).unwrap_or_default()
}
