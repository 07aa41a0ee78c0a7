//! Attributes of the fixtures' cases, and results of calls.

use isoshard::Result;
use isoshard::dtensor::{BinaryLossOptions, CrossEntropyOptions, DTensor, DeviceMesh, LossReduction};
use isoshard::placement::Layout;
use isoshard::tensor::{DType, ReduceOp};
use serde_json::Value;

/// The results of a call: one tensor or a list.
pub trait IntoResults {
    fn into_results(self) -> Result<Vec<DTensor>>;
}

impl IntoResults for Result<DTensor> {
    fn into_results(self) -> Result<Vec<DTensor>> {
        Ok(vec![self?])
    }
}

impl IntoResults for Result<(DTensor, DTensor)> {
    fn into_results(self) -> Result<Vec<DTensor>> {
        self.map(|(first, second)| vec![first, second])
    }
}

impl IntoResults for Result<Vec<DTensor>> {
    fn into_results(self) -> Result<Vec<DTensor>> {
        self
    }
}

/// Returns attribute `k` as a number. The strings `inf` and `-inf` are numbers.
pub fn number(a: &[Value], k: usize) -> f64 {
    a[k].as_f64().unwrap_or_else(|| a[k].as_str().expect("a number").parse().expect("inf or -inf"))
}

/// Returns attribute `k` as an integer, such as a dim that may be negative.
pub fn integer(a: &[Value], k: usize) -> isize {
    a[k].as_i64().expect("an integer") as isize
}

/// Returns attribute `k` as a count.
pub fn count(a: &[Value], k: usize) -> usize {
    a[k].as_u64().expect("a count") as usize
}

/// Returns attribute `k`, 0 or 1, as a bool.
pub fn flag(a: &[Value], k: usize) -> bool {
    count(a, k) == 1
}

/// Returns a list of extents.
pub fn extents(a: &Value) -> Vec<usize> {
    a.as_array().expect("a list").iter().map(|n| n.as_u64().expect("an extent") as usize).collect()
}

/// Returns attribute `k` as the reduction of a loss.
pub fn reduction(a: &[Value], k: usize) -> LossReduction {
    match a[k].as_str().expect("the name of a reduction") {
        "none" => LossReduction::None,
        "mean" => LossReduction::Mean,
        "sum" => LossReduction::Sum,
        other => panic!("reduction {other}"),
    }
}

/// Returns attribute `k` as the operation of `scatter_reduce`.
pub fn reduce_op(a: &[Value], k: usize) -> ReduceOp {
    match a[k].as_str().expect("the name of a reduction") {
        "sum" => ReduceOp::Sum,
        "amax" => ReduceOp::Max,
        "amin" => ReduceOp::Min,
        other => panic!("reduction {other}"),
    }
}

/// Returns attribute `k` as a number, or `None` for null.
pub fn optional(a: &[Value], k: usize) -> Option<f64> {
    (!a[k].is_null()).then(|| number(a, k))
}

/// Returns the mesh of an operand and a replicated layout, for tensors that are created.
pub fn place(x: &DTensor) -> (&DeviceMesh, Layout) {
    (x.mesh(), Layout::replicated(x.mesh().mesh().ndim()))
}

/// Returns list `k` of the `lists` lists, equally long, that the operands are.
pub fn list(xs: &[DTensor], k: usize, lists: usize) -> Vec<DTensor> {
    let len = xs.len() / lists;
    xs[k * len..][..len].to_vec()
}

/// Returns the options of a loss that ignores target -100 and whose reduction is attribute `k`.
pub fn class_options(a: &[Value], k: usize) -> CrossEntropyOptions<'static> {
    let reduction = reduction(a, k);
    CrossEntropyOptions { reduction, ignore_index: Some(-100), ..CrossEntropyOptions::default() }
}

/// Returns the options of a binary loss whose reduction is attribute `k`.
pub fn binary_options(a: &[Value], k: usize) -> BinaryLossOptions<'static> {
    BinaryLossOptions { reduction: reduction(a, k), ..BinaryLossOptions::default() }
}

/// Returns a result in the dtype of an operand.
pub fn narrow(y: Result<DTensor>, x: &DTensor) -> Result<DTensor> {
    y?.cast(x.dtype())
}

/// Returns attribute `k` as a dtype.
pub fn dtype(a: &[Value], k: usize) -> DType {
    let name = a[k].as_str().expect("the name of a dtype");
    let all =
        [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::U8, DType::Bool];
    all.into_iter().find(|d| d.name() == name).expect("a dtype")
}
