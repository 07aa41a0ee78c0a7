//! The operators that fixtures.py calls, as methods of `DTensor`, with the bounds of the comparison.

use isoshard::Result;
use isoshard::dtensor::{AttentionOptions, CrossEntropyOptions, DTensor, LossReduction};
use isoshard::tensor::{DType, ReduceOp};
use serde_json::Value;

use super::{UlpBound, UlpScale};

/// An operator of the fixtures.
pub struct TorchOperator {
    /// The name in the fixtures.
    pub name: &'static str,
    /// The bound of results.
    pub result: UlpBound,
    /// The bound of gradients.
    pub gradient: UlpBound,
    /// Calls the method.
    pub run: fn(&[DTensor], &[Value]) -> Result<Vec<DTensor>>,
}

const EQUAL: UlpBound = ulp(0.0);

/// A bound in units of the element's last place.
const fn ulp(ulps: f64) -> UlpBound {
    UlpBound { ulps, scale: UlpScale::Element }
}

/// A bound in units of the last place of the element, or of 1.
const fn near_one(ulps: f64) -> UlpBound {
    UlpBound { ulps, scale: UlpScale::One }
}

/// A bound in units of the last place of the tensor's largest element.
const fn sums(ulps: f64) -> UlpBound {
    UlpBound { ulps, scale: UlpScale::Largest }
}

macro_rules! operators {
    ($($name:ident |$x:pat_param, $a:pat_param| $result:expr, $gradient:expr, $call:expr;)*) => {
        &[$(TorchOperator {
            name: stringify!($name),
            result: $result,
            gradient: $gradient,
            run: |$x, $a| IntoResults::into_results($call),
        }),*]
    };
}

/// One line per operator: name, operands and attributes, bounds of results and of gradients, the call.
pub const OPERATORS: &[TorchOperator] = operators! {
    add |x, _| EQUAL, sums(2.0), x[0].add(&x[1]);
    sub |x, _| EQUAL, sums(2.0), x[0].sub(&x[1]);
    mul |x, _| EQUAL, sums(2.0), x[0].mul(&x[1]);
    div |x, _| EQUAL, sums(2.0), x[0].div(&x[1]);
    maximum |x, _| EQUAL, sums(2.0), x[0].maximum(&x[1]);
    minimum |x, _| EQUAL, sums(2.0), x[0].minimum(&x[1]);
    pow |x, _| ulp(2.0), sums(4.0), x[0].pow(&x[1]);
    eq |x, _| EQUAL, EQUAL, x[0].eq(&x[1]);
    ne |x, _| EQUAL, EQUAL, x[0].ne(&x[1]);
    lt |x, _| EQUAL, EQUAL, x[0].lt(&x[1]);
    le |x, _| EQUAL, EQUAL, x[0].le(&x[1]);
    gt |x, _| EQUAL, EQUAL, x[0].gt(&x[1]);
    ge |x, _| EQUAL, EQUAL, x[0].ge(&x[1]);
    neg |x, _| EQUAL, EQUAL, x[0].neg();
    abs |x, _| EQUAL, EQUAL, x[0].abs();
    sign |x, _| EQUAL, EQUAL, x[0].sign();
    exp |x, _| ulp(2.0), ulp(3.0), x[0].exp();
    log |x, _| ulp(2.0), ulp(1.0), x[0].log();
    sqrt |x, _| ulp(1.0), ulp(2.0), x[0].sqrt();
    rsqrt |x, _| ulp(2.0), ulp(4.0), x[0].rsqrt();
    tanh |x, _| ulp(2.0), near_one(4.0), x[0].tanh();
    sigmoid |x, _| ulp(2.0), near_one(4.0), x[0].sigmoid();
    relu |x, _| EQUAL, EQUAL, x[0].relu();
    gelu |x, _| near_one(5.0), near_one(4.0), x[0].gelu();
    gelu_tanh |x, _| near_one(2.0), near_one(4.0), x[0].gelu_tanh();
    silu |x, _| ulp(3.0), near_one(4.0), x[0].silu();
    mul_scalar |x, a| EQUAL, EQUAL, x[0].mul_scalar(number(a, 0));
    add_scalar |x, a| EQUAL, EQUAL, x[0].add_scalar(number(a, 0));
    pow_scalar |x, a| ulp(2.0), ulp(4.0), x[0].pow_scalar(number(a, 0));
    select |x, _| EQUAL, sums(2.0), x[0].select(&x[1], &x[2]);
    cast |x, a| EQUAL, EQUAL, x[0].cast(dtype(a, 0));

    sin |x, _| near_one(2.0), near_one(4.0), x[0].sin();
    cos |x, _| near_one(2.0), near_one(4.0), x[0].cos();
    tan |x, _| near_one(2.0), near_one(4.0), x[0].tan();
    sinh |x, _| near_one(2.0), near_one(4.0), x[0].sinh();
    cosh |x, _| near_one(2.0), near_one(4.0), x[0].cosh();
    asinh |x, _| near_one(2.0), near_one(4.0), x[0].asinh();
    atan |x, _| near_one(2.0), near_one(4.0), x[0].atan();
    erf |x, _| near_one(2.0), near_one(4.0), x[0].erf();
    erfc |x, _| near_one(2.0), near_one(4.0), x[0].erfc();
    expm1 |x, _| near_one(2.0), near_one(4.0), x[0].expm1();
    exp2 |x, _| near_one(2.0), near_one(4.0), x[0].exp2();
    lgamma |x, _| near_one(2.0), near_one(4.0), x[0].lgamma();
    digamma |x, _| near_one(2.0), near_one(4.0), x[0].digamma();
    log1p |x, _| near_one(2.0), near_one(4.0), x[0].log1p();
    log2 |x, _| near_one(2.0), near_one(4.0), x[0].log2();
    log10 |x, _| near_one(2.0), near_one(4.0), x[0].log10();
    acosh |x, _| near_one(2.0), near_one(4.0), x[0].acosh();
    asin |x, _| near_one(2.0), near_one(4.0), x[0].asin();
    acos |x, _| near_one(2.0), near_one(4.0), x[0].acos();
    atanh |x, _| near_one(2.0), near_one(4.0), x[0].atanh();
    erfinv |x, _| near_one(2.0), near_one(4.0), x[0].erfinv();
    softplus |x, _| near_one(2.0), near_one(4.0), x[0].softplus();
    mish |x, _| near_one(2.0), near_one(4.0), x[0].mish();
    log_sigmoid |x, _| near_one(2.0), near_one(4.0), x[0].log_sigmoid();
    logit |x, _| near_one(2.0), near_one(4.0), x[0].logit();
    elu |x, a| near_one(2.0), near_one(4.0), x[0].elu(number(a, 0));
    atan2 |x, _| ulp(2.0), sums(4.0), x[0].atan2(&x[1]);

    sum |x, a| sums(4.0), EQUAL, x[0].sum(&[integer(a, 0)], false);
    mean |x, a| sums(4.0), ulp(1.0), x[0].mean(&[integer(a, 0)], false);
    max |x, a| EQUAL, EQUAL, x[0].max(&[integer(a, 0)], false);
    min |x, a| EQUAL, EQUAL, x[0].min(&[integer(a, 0)], false);
    argmax |x, a| EQUAL, EQUAL, x[0].argmax(integer(a, 0));
    softmax |x, a| sums(2.0), sums(4.0), x[0].softmax(integer(a, 0));
    log_softmax |x, a| near_one(4.0), sums(4.0), x[0].log_softmax(integer(a, 0));
    sum_all |x, _| sums(4.0), EQUAL, x[0].sum_all();
    mean_all |x, _| sums(4.0), ulp(1.0), x[0].mean_all();
    layer_norm |x, a| sums(4.0), sums(8.0), x[0].layer_norm(&x[1], Some(&x[2]), number(a, 0));
    layer_norm_plain |x, a| sums(4.0), sums(8.0), x[0].layer_norm_over(1, None, None, number(a, 0));
    group_norm |x, a| sums(4.0), sums(8.0), x[0].group_norm(count(a, 0), Some((&x[1], &x[2])), number(a, 1));
    instance_norm |x, a| sums(4.0), sums(8.0), x[0].instance_norm(Some((&x[1], &x[2])), number(a, 0));
    batch_norm |x, a| sums(4.0), sums(8.0),
        x[0].batch_norm(Some((&x[1], &x[2])), number(a, 0)).map(|(y, _)| y);
    weight_norm |x, a| sums(4.0), sums(8.0), x[0].weight_norm(&x[1], integer(a, 0));
    rms_norm |x, a| sums(4.0), sums(8.0), x[0].rms_norm(&x[1], number(a, 0));

    reshape |x, a| EQUAL, EQUAL, x[0].reshape(extents(&a[0]));
    permute |x, a| EQUAL, EQUAL, x[0].permute(&extents(&a[0]));
    transpose |x, a| EQUAL, EQUAL, x[0].transpose(integer(a, 0), integer(a, 1));
    expand |x, a| EQUAL, sums(2.0), x[0].expand(extents(&a[0]));
    unsqueeze |x, a| EQUAL, EQUAL, x[0].unsqueeze(count(a, 0));
    squeeze |x, a| EQUAL, EQUAL, x[0].squeeze(integer(a, 0));
    slice |x, a| EQUAL, EQUAL, x[0].slice(integer(a, 0), count(a, 1), count(a, 2));
    split |x, a| EQUAL, EQUAL, x[0].split(integer(a, 0), &extents(&a[1]));
    cat |x, a| EQUAL, EQUAL, DTensor::cat(&x.iter().collect::<Vec<_>>(), integer(a, 0));

    embedding |x, _| EQUAL, sums(4.0), x[0].embedding(&x[1]);
    gather |x, a| EQUAL, sums(4.0), x[0].gather(integer(a, 0), &x[1]);
    scatter_add |x, a| sums(4.0), EQUAL, x[0].scatter_add(integer(a, 0), &x[1], count(a, 1));

    sort |x, a| EQUAL, EQUAL, x[0].sort(integer(a, 0), count(a, 1) == 1);
    argsort |x, a| EQUAL, EQUAL, x[0].argsort(integer(a, 0), count(a, 1) == 1);
    topk |x, a| EQUAL, EQUAL, x[0].topk(count(a, 0), integer(a, 1), true);
    kthvalue |x, a| EQUAL, EQUAL, x[0].kthvalue(count(a, 0), integer(a, 1), false);
    tril |x, a| EQUAL, EQUAL, x[0].tril(integer(a, 0) as i64);
    triu |x, a| EQUAL, EQUAL, x[0].triu(integer(a, 0) as i64);
    one_hot |x, a| EQUAL, EQUAL, x[0].one_hot(count(a, 0), DType::I64);
    index_select |x, a| EQUAL, sums(4.0), x[0].index_select(integer(a, 0), &x[1]);
    index_add |x, a| sums(4.0), EQUAL, x[0].index_add(integer(a, 0), &x[1], &x[2]);
    index_copy |x, a| EQUAL, EQUAL, x[0].index_copy(integer(a, 0), &x[1], &x[2]);
    scatter |x, a| EQUAL, EQUAL, x[0].scatter(integer(a, 0), &x[1], &x[2]);
    scatter_reduce |x, a| sums(4.0), EQUAL, x[0].scatter_reduce(integer(a, 0), &x[1], &x[2], reduce_op(a, 1));
    take_along_dim |x, a| EQUAL, sums(4.0), x[0].take_along_dim(integer(a, 0), &x[1]);
    take |x, _| EQUAL, sums(4.0), x[0].take(&x[1]);
    bincount |x, a| EQUAL, EQUAL, x[0].bincount(count(a, 0));
    flip |x, a| EQUAL, EQUAL, x[0].flip(&extents(&a[0]).iter().map(|&d| d as isize).collect::<Vec<_>>());
    roll |x, a| EQUAL, EQUAL, x[0].roll(integer(a, 0), integer(a, 1));
    repeat |x, a| EQUAL, sums(4.0), x[0].repeat(&extents(&a[0]));
    repeat_interleave |x, a| EQUAL, sums(4.0), x[0].repeat_interleave(count(a, 0), integer(a, 1));
    stack |x, a| EQUAL, EQUAL, DTensor::stack(&x.iter().collect::<Vec<_>>(), count(a, 0));
    unbind |x, a| EQUAL, EQUAL, x[0].unbind(integer(a, 0));
    chunk |x, a| EQUAL, EQUAL, x[0].chunk(count(a, 0), integer(a, 1));
    flatten |x, a| EQUAL, EQUAL, x[0].flatten(integer(a, 0), integer(a, 1));
    unflatten |x, a| EQUAL, EQUAL, x[0].unflatten(integer(a, 0), &extents(&a[1]));
    movedim |x, a| EQUAL, EQUAL, x[0].movedim(integer(a, 0), integer(a, 1));
    diagonal |x, a| EQUAL, EQUAL, x[0].diagonal(integer(a, 0), integer(a, 1), integer(a, 2));
    diag_embed |x, a| EQUAL, EQUAL, x[0].diag_embed(integer(a, 0));

    matmul |x, _| sums(8.0), sums(8.0), x[0].matmul(&x[1]);
    einsum |x, a| sums(8.0), sums(8.0), x[0].einsum(a[0].as_str().expect("a signature"), &x[1]);
    attention |x, a| sums(8.0), sums(16.0), x[0].attention(&x[1], &x[2], number(a, 0));
    attention_bidirectional |x, a| sums(8.0), sums(16.0),
        x[0].attention_with(&x[1], &x[2], &AttentionOptions::bidirectional(number(a, 0)));
    attention_mask |x, a| sums(8.0), sums(16.0),
        x[0].attention_with(&x[1], &x[2], &AttentionOptions::bidirectional(number(a, 0)).mask(&x[3]));
    attention_bias |x, a| sums(8.0), sums(16.0),
        x[0].attention_with(&x[1], &x[2], &AttentionOptions::bidirectional(number(a, 0)).bias(&x[3]));
    attention_window |x, a| sums(8.0), sums(16.0), {
        let options = AttentionOptions::bidirectional(number(a, 0)).window(count(a, 1), count(a, 2));
        x[0].attention_with(&x[1], &x[2], &options)
    };

    // The loss of narrow logits is f32 here.
    cross_entropy |x, _| sums(4.0), sums(4.0), narrow(x[0].cross_entropy(&x[1]), &x[0]);
    cross_entropy_with |x, a| sums(4.0), sums(4.0), {
        let options = CrossEntropyOptions {
            reduction: reduction(a, 0),
            label_smoothing: number(a, 1),
            ignore_index: Some(-100),
            class_weights: Some(&x[2]),
            ..CrossEntropyOptions::default()
        };
        x[0].cross_entropy_with(&x[1], &options)
    };
    nll_loss |x, a| sums(4.0), sums(4.0), {
        let options = CrossEntropyOptions {
            reduction: reduction(a, 0),
            ignore_index: Some(-100),
            ..CrossEntropyOptions::default()
        };
        x[0].nll_loss(&x[1], &options)
    };
    mse_loss |x, a| sums(4.0), sums(4.0), x[0].mse_loss(&x[1], reduction(a, 0));
    l1_loss |x, a| sums(4.0), sums(4.0), x[0].l1_loss(&x[1], reduction(a, 0));
    huber_loss |x, a| sums(4.0), sums(4.0), x[0].huber_loss(&x[1], number(a, 0), reduction(a, 1));
    smooth_l1_loss |x, a| sums(4.0), sums(4.0), x[0].smooth_l1_loss(&x[1], number(a, 0), reduction(a, 1));
    kl_div_loss |x, a| sums(4.0), sums(8.0), x[0].kl_div_loss(&x[1], false, reduction(a, 0));
    cosine_similarity |x, a| sums(4.0), sums(8.0), x[0].cosine_similarity(&x[1], integer(a, 0), number(a, 1));
    cosine_embedding_loss |x, a| sums(4.0), sums(8.0),
        x[0].cosine_embedding_loss(&x[1], &x[2], number(a, 0), LossReduction::Mean);
};

/// The results of a call: one tensor or a list.
trait IntoResults {
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

fn count(a: &[Value], k: usize) -> usize {
    a[k].as_u64().expect("a count") as usize
}

/// Returns a list of extents.
pub fn extents(a: &Value) -> Vec<usize> {
    a.as_array().expect("a list").iter().map(|n| n.as_u64().expect("an extent") as usize).collect()
}

fn reduction(a: &[Value], k: usize) -> LossReduction {
    match a[k].as_str().expect("the name of a reduction") {
        "none" => LossReduction::None,
        "mean" => LossReduction::Mean,
        "sum" => LossReduction::Sum,
        other => panic!("reduction {other}"),
    }
}

fn reduce_op(a: &[Value], k: usize) -> ReduceOp {
    match a[k].as_str().expect("the name of a reduction") {
        "sum" => ReduceOp::Sum,
        "amax" => ReduceOp::Max,
        "amin" => ReduceOp::Min,
        other => panic!("reduction {other}"),
    }
}

/// Returns a result in the dtype of an operand.
fn narrow(y: Result<DTensor>, x: &DTensor) -> Result<DTensor> {
    y?.cast(x.dtype())
}

fn dtype(a: &[Value], k: usize) -> DType {
    let name = a[k].as_str().expect("the name of a dtype");
    let all =
        [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::U8, DType::Bool];
    all.into_iter().find(|d| d.name() == name).expect("a dtype")
}
