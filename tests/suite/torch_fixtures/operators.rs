//! The operators that fixtures.py calls, as methods of `DTensor`, with the bounds of the comparison.

use isoshard::Result;
use isoshard::dtensor::{
    AttentionOptions, BatchStatistics, BinaryLossOptions, CrossEntropyOptions, DTensor, LossReduction,
};
use isoshard::nn::Activation;
use isoshard::ops::{
    AdamWStep, Bits, DiagonalBand, GroupSizes, Pad, RotaryFrequencies, RotaryPairing, SgdStep, Unkeyed,
};
use isoshard::tensor::DType;
use serde_json::Value;

use super::attributes::*;
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

    reciprocal |x, _| EQUAL, ulp(2.0), x[0].reciprocal();
    square |x, _| EQUAL, EQUAL, x[0].square();
    relu6 |x, _| EQUAL, EQUAL, x[0].relu6();
    softsign |x, _| ulp(1.0), ulp(2.0), x[0].softsign();
    hardsigmoid |x, _| ulp(1.0), ulp(1.0), x[0].hardsigmoid();
    hardswish |x, _| ulp(2.0), near_one(2.0), x[0].hardswish();
    floor |x, _| EQUAL, EQUAL, x[0].floor();
    ceil |x, _| EQUAL, EQUAL, x[0].ceil();
    trunc |x, _| EQUAL, EQUAL, x[0].trunc();
    round |x, _| EQUAL, EQUAL, x[0].round();
    frac |x, _| EQUAL, EQUAL, x[0].frac();
    isnan |x, _| EQUAL, EQUAL, x[0].isnan();
    isinf |x, _| EQUAL, EQUAL, x[0].isinf();
    isfinite |x, _| EQUAL, EQUAL, x[0].isfinite();
    leaky_relu |x, a| EQUAL, EQUAL, x[0].leaky_relu(number(a, 0));
    hardtanh |x, a| EQUAL, EQUAL, x[0].hardtanh(number(a, 0), number(a, 1));
    threshold |x, a| EQUAL, EQUAL, x[0].threshold(number(a, 0), number(a, 1));
    clamp |x, a| EQUAL, EQUAL, x[0].clamp(number(a, 0), number(a, 1));
    clamp_min |x, a| EQUAL, EQUAL, x[0].clamp_min(number(a, 0));
    clamp_max |x, a| EQUAL, EQUAL, x[0].clamp_max(number(a, 0));
    div_scalar |x, a| EQUAL, EQUAL, x[0].div_scalar(number(a, 0));
    nan_to_num |x, a| EQUAL, EQUAL, x[0].nan_to_num(number(a, 0), optional(a, 1), optional(a, 2));
    eq_scalar |x, a| EQUAL, EQUAL, x[0].eq_scalar(number(a, 0));
    ne_scalar |x, a| EQUAL, EQUAL, x[0].ne_scalar(number(a, 0));
    lt_scalar |x, a| EQUAL, EQUAL, x[0].lt_scalar(number(a, 0));
    le_scalar |x, a| EQUAL, EQUAL, x[0].le_scalar(number(a, 0));
    gt_scalar |x, a| EQUAL, EQUAL, x[0].gt_scalar(number(a, 0));
    ge_scalar |x, a| EQUAL, EQUAL, x[0].ge_scalar(number(a, 0));
    hypot |x, _| ulp(1.0), sums(4.0), x[0].hypot(&x[1]);
    copysign |x, _| EQUAL, sums(2.0), x[0].copysign(&x[1]);
    heaviside |x, _| EQUAL, EQUAL, x[0].heaviside(&x[1]);
    fmod |x, _| EQUAL, sums(2.0), x[0].fmod(&x[1]);
    remainder |x, _| EQUAL, sums(2.0), x[0].remainder(&x[1]);
    floor_div |x, _| EQUAL, EQUAL, x[0].floor_div(&x[1]);
    prelu |x, _| EQUAL, sums(2.0), x[0].prelu(&x[1]);
    lerp |x, _| ulp(2.0), sums(2.0), x[0].lerp(&x[1], &x[2]);
    lerp_scalar |x, a| ulp(2.0), sums(2.0), x[0].lerp_scalar(&x[1], number(a, 0));
    addcmul |x, a| ulp(2.0), sums(2.0), x[0].addcmul(&x[1], &x[2], number(a, 0));
    addcdiv |x, a| ulp(2.0), sums(2.0), x[0].addcdiv(&x[1], &x[2], number(a, 0));
    logical_and |x, _| EQUAL, EQUAL, x[0].logical_and(&x[1]);
    logical_or |x, _| EQUAL, EQUAL, x[0].logical_or(&x[1]);
    logical_xor |x, _| EQUAL, EQUAL, x[0].logical_xor(&x[1]);
    logical_not |x, _| EQUAL, EQUAL, x[0].logical_not();
    bitwise_and |x, _| EQUAL, EQUAL, x[0].bitwise_and(&x[1]);
    bitwise_or |x, _| EQUAL, EQUAL, x[0].bitwise_or(&x[1]);
    bitwise_xor |x, _| EQUAL, EQUAL, x[0].bitwise_xor(&x[1]);
    bitwise_not |x, _| EQUAL, EQUAL, x[0].bitwise_not();
    shift_left |x, _| EQUAL, EQUAL, x[0].shift_left(&x[1]);
    shift_right |x, _| EQUAL, EQUAL, x[0].shift_right(&x[1]);
    masked_fill |x, a| EQUAL, EQUAL, x[0].masked_fill(&x[1], number(a, 0));
    glu |x, a| ulp(2.0), near_one(4.0), x[0].glu(integer(a, 0));
    geglu |x, a| near_one(2.0), near_one(4.0), x[0].geglu(integer(a, 0));
    swiglu |x, a| near_one(2.0), near_one(4.0), x[0].swiglu(integer(a, 0));
    logaddexp |x, _| near_one(2.0), sums(4.0), x[0].logaddexp(&x[1]);
    xlogy |x, _| ulp(2.0), sums(4.0), x[0].xlogy(&x[1]);
    xlog1py |x, _| ulp(2.0), sums(4.0), x[0].xlog1py(&x[1]);
    foreach_add |x, _| EQUAL, EQUAL, DTensor::foreach_add(list(x, 0, 2), &list(x, 1, 2));
    foreach_sub |x, _| EQUAL, EQUAL, DTensor::foreach_sub(list(x, 0, 2), &list(x, 1, 2));
    foreach_mul |x, _| EQUAL, EQUAL, DTensor::foreach_mul(list(x, 0, 2), &list(x, 1, 2));
    foreach_div |x, _| EQUAL, sums(2.0), DTensor::foreach_div(list(x, 0, 2), &list(x, 1, 2));
    foreach_add_scalar |x, a| EQUAL, EQUAL, DTensor::foreach_add_scalar(x.to_vec(), number(a, 0));
    foreach_mul_scalar |x, a| EQUAL, EQUAL, DTensor::foreach_mul_scalar(x.to_vec(), number(a, 0));
    foreach_lerp |x, a| ulp(2.0), sums(2.0), DTensor::foreach_lerp(list(x, 0, 2), &list(x, 1, 2), number(a, 0));
    foreach_addcmul |x, a| ulp(2.0), sums(2.0),
        DTensor::foreach_addcmul(list(x, 0, 3), &list(x, 1, 3), &list(x, 2, 3), number(a, 0));
    foreach_addcdiv |x, a| ulp(2.0), sums(2.0),
        DTensor::foreach_addcdiv(list(x, 0, 3), &list(x, 1, 3), &list(x, 2, 3), number(a, 0));

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
    lgamma |x, _| near_one(2.0), near_one(20.0), x[0].lgamma();
    digamma |x, _| near_one(12.0), near_one(4.0), x[0].digamma();
    log1p |x, _| near_one(2.0), near_one(4.0), x[0].log1p();
    log2 |x, _| near_one(2.0), near_one(4.0), x[0].log2();
    log10 |x, _| near_one(2.0), near_one(4.0), x[0].log10();
    acosh |x, _| near_one(2.0), near_one(20.0), x[0].acosh();
    asin |x, _| near_one(2.0), near_one(20.0), x[0].asin();
    acos |x, _| near_one(2.0), near_one(20.0), x[0].acos();
    atanh |x, _| near_one(2.0), near_one(20.0), x[0].atanh();
    erfinv |x, _| near_one(2.0), near_one(4.0), x[0].erfinv();
    softplus |x, _| near_one(2.0), near_one(4.0), x[0].softplus();
    mish |x, _| near_one(2.0), near_one(4.0), x[0].mish();
    log_sigmoid |x, _| near_one(2.0), near_one(4.0), x[0].log_sigmoid();
    logit |x, _| near_one(2.0), near_one(4.0), x[0].logit();
    elu |x, a| near_one(2.0), near_one(4.0), x[0].elu(number(a, 0));
    selu |x, _| near_one(2.0), near_one(4.0), x[0].selu();
    celu |x, a| near_one(2.0), near_one(4.0), x[0].celu(number(a, 0));
    tanhshrink |x, _| near_one(2.0), near_one(4.0), x[0].tanhshrink();
    hardshrink |x, a| EQUAL, EQUAL, x[0].hardshrink(number(a, 0));
    softshrink |x, a| EQUAL, EQUAL, x[0].softshrink(number(a, 0));
    sinc |x, _| near_one(2.0), near_one(4.0), x[0].sinc();
    trigamma |x, _| near_one(2.0), EQUAL, x[0].trigamma();
    softplus_with |x, a| near_one(2.0), near_one(4.0), x[0].softplus_with(number(a, 0), number(a, 1));
    atan2 |x, _| ulp(2.0), sums(4.0), x[0].atan2(&x[1]);

    sum |x, a| sums(4.0), EQUAL, x[0].sum(&[integer(a, 0)], false);
    mean |x, a| sums(4.0), ulp(1.0), x[0].mean(&[integer(a, 0)], false);
    max |x, a| EQUAL, EQUAL, x[0].max(&[integer(a, 0)], false);
    min |x, a| EQUAL, EQUAL, x[0].min(&[integer(a, 0)], false);
    argmax |x, a| EQUAL, EQUAL, x[0].argmax(integer(a, 0));
    argmin |x, a| EQUAL, EQUAL, x[0].argmin(integer(a, 0));
    max_with_index |x, a| EQUAL, EQUAL, x[0].max_with_index(integer(a, 0), false);
    min_with_index |x, a| EQUAL, EQUAL, x[0].min_with_index(integer(a, 0), false);
    prod |x, a| sums(4.0), sums(8.0), x[0].prod(&[integer(a, 0)], false);
    var |x, a| sums(4.0), sums(8.0), x[0].var(&[integer(a, 0)], count(a, 1), false);
    std |x, a| sums(4.0), sums(8.0), x[0].std(&[integer(a, 0)], count(a, 1), false);
    logsumexp |x, a| sums(4.0), sums(4.0), x[0].logsumexp(&[integer(a, 0)], false);
    norm |x, a| sums(4.0), sums(8.0), x[0].norm(number(a, 1), &[integer(a, 0)], false);
    any |x, a| EQUAL, EQUAL, x[0].any(&[integer(a, 0)], false);
    all |x, a| EQUAL, EQUAL, x[0].all(&[integer(a, 0)], false);
    count_nonzero |x, a| EQUAL, EQUAL, x[0].count_nonzero(&[integer(a, 0)], false);
    softmax |x, a| sums(2.0), sums(4.0), x[0].softmax(integer(a, 0));
    log_softmax |x, a| near_one(4.0), sums(4.0), x[0].log_softmax(integer(a, 0));
    sum_all |x, _| sums(4.0), EQUAL, x[0].sum_all();
    mean_all |x, _| sums(4.0), ulp(1.0), x[0].mean_all();
    linear |x, a| sums(4.0), sums(8.0), {
        let f = match a[0].as_str().expect("a name") {
            "gelu" => Some(Activation::Gelu),
            "silu" => Some(Activation::Silu),
            "relu" => Some(Activation::Relu),
            _ => None,
        };
        x[0].linear(&x[1], Some(&x[2]), f)
    };
    layer_norm |x, a| sums(4.0), sums(8.0), x[0].layer_norm(&x[1], Some(&x[2]), number(a, 0));
    layer_norm_plain |x, a| sums(4.0), sums(8.0), x[0].layer_norm_over(1, None, None, number(a, 0));
    layer_norm_over |x, a| sums(4.0), sums(8.0),
        x[0].layer_norm_over(count(a, 0), Some(&x[1]), Some(&x[2]), number(a, 1));
    add_layer_norm |x, a| sums(4.0), sums(8.0), x[0].add_layer_norm(&x[1], &x[2], Some(&x[3]), number(a, 0));
    add_rms_norm |x, a| sums(4.0), sums(8.0), x[0].add_rms_norm(&x[1], &x[2], number(a, 0));
    group_norm |x, a| sums(4.0), sums(8.0), x[0].group_norm(count(a, 0), Some((&x[1], &x[2])), number(a, 1));
    instance_norm |x, a| sums(4.0), sums(8.0), x[0].instance_norm(Some((&x[1], &x[2])), number(a, 0));
    batch_norm |x, a| sums(4.0), sums(8.0),
        x[0].batch_norm(Some((&x[1], &x[2])), number(a, 0)).map(|(y, _)| y);
    normalise_channels |x, a| sums(4.0), sums(8.0), {
        let running = BatchStatistics { mean: x[1].clone(), variance: x[2].clone() };
        x[0].normalise_channels(&running, Some((&x[3], &x[4])), number(a, 0))
    };
    weight_norm |x, a| sums(4.0), sums(8.0), x[0].weight_norm(&x[1], integer(a, 0));
    rms_norm |x, a| sums(4.0), sums(8.0), x[0].rms_norm(&x[1], number(a, 0));

    reshape |x, a| EQUAL, EQUAL, x[0].reshape(extents(&a[0]));
    permute |x, a| EQUAL, EQUAL, x[0].permute(&extents(&a[0]).iter().map(|&d| d as isize).collect::<Vec<_>>());
    transpose |x, a| EQUAL, EQUAL, x[0].transpose(integer(a, 0), integer(a, 1));
    expand |x, a| EQUAL, sums(2.0), x[0].expand(extents(&a[0]));
    unsqueeze |x, a| EQUAL, EQUAL, x[0].unsqueeze(integer(a, 0));
    squeeze |x, a| EQUAL, EQUAL, x[0].squeeze(integer(a, 0));
    slice |x, a| EQUAL, EQUAL, x[0].slice(integer(a, 0), count(a, 1), count(a, 2));
    split |x, a| EQUAL, EQUAL, x[0].split(&extents(&a[1]), integer(a, 0));
    cat |x, a| EQUAL, EQUAL, DTensor::cat(&x.iter().collect::<Vec<_>>(), integer(a, 0));
    pad |x, a| EQUAL, EQUAL,
        DTensor::apply_one(&Pad { dim: count(a, 0), before: count(a, 1), after: count(a, 2) }, &[&x[0]]);

    arange |x, a| ulp(1.0), EQUAL, {
        let (mesh, layout) = place(&x[0]);
        DTensor::arange(mesh, dtype(a, 0), number(a, 1), number(a, 2), number(a, 3), layout)
    };
    linspace |x, a| sums(1.0), EQUAL, {
        let (mesh, layout) = place(&x[0]);
        DTensor::linspace(mesh, dtype(a, 0), number(a, 1), number(a, 2), count(a, 3), layout)
    };
    logspace |x, a| sums(2.0), EQUAL, {
        let (mesh, layout) = place(&x[0]);
        DTensor::logspace(mesh, dtype(a, 0), number(a, 1), number(a, 2), count(a, 3), number(a, 4), layout)
    };
    ones |x, a| EQUAL, EQUAL, {
        let (mesh, layout) = place(&x[0]);
        DTensor::ones(mesh, dtype(a, 0), extents(&a[1]), layout)
    };
    eye |x, a| EQUAL, EQUAL, {
        let (mesh, layout) = place(&x[0]);
        DTensor::eye(mesh, dtype(a, 0), count(a, 1), count(a, 2), layout)
    };
    zeros_like |x, _| EQUAL, EQUAL, x[0].zeros_like();
    ones_like |x, _| EQUAL, EQUAL, x[0].ones_like();
    full_like |x, a| EQUAL, EQUAL, x[0].full_like(number(a, 0));
    band_mask |x, a| EQUAL, EQUAL, {
        let (mesh, layout) = place(&x[0]);
        let band = DiagonalBand { low: integer(a, 1) as i64, high: integer(a, 2) as i64 };
        DTensor::band_mask(mesh, extents(&a[0]), band, layout)
    };
    causal_mask |x, a| EQUAL, EQUAL, {
        let (mesh, layout) = place(&x[0]);
        DTensor::causal_mask(mesh, count(a, 0), count(a, 1), count(a, 2), layout)
    };

    embedding |x, _| EQUAL, sums(4.0), x[0].embedding(&x[1]);
    gather |x, a| EQUAL, sums(4.0), x[0].gather(integer(a, 0), &x[1]);
    scatter_add |x, a| sums(4.0), EQUAL, x[0].scatter_add(integer(a, 0), &x[1], count(a, 1));

    sort |x, a| EQUAL, EQUAL, x[0].sort(integer(a, 0), count(a, 1) == 1);
    argsort |x, a| EQUAL, EQUAL, x[0].argsort(integer(a, 0), count(a, 1) == 1);
    topk |x, a| EQUAL, EQUAL, x[0].topk(count(a, 0), integer(a, 1), flag(a, 2));
    kthvalue |x, a| EQUAL, EQUAL, x[0].kthvalue(count(a, 0), integer(a, 1), false);
    tril |x, a| EQUAL, EQUAL, x[0].tril(integer(a, 0) as i64);
    triu |x, a| EQUAL, EQUAL, x[0].triu(integer(a, 0) as i64);
    one_hot |x, a| EQUAL, EQUAL, x[0].one_hot(count(a, 0), DType::I64);
    index_select |x, a| EQUAL, sums(4.0), x[0].index_select(integer(a, 0), &x[1]);
    index_add |x, a| sums(4.0), EQUAL, x[0].index_add(integer(a, 0), &x[1], &x[2]);
    index_copy |x, a| EQUAL, EQUAL, x[0].index_copy(integer(a, 0), &x[1], &x[2]);
    index |x, _| EQUAL, sums(4.0), x[0].index(&x[1..].iter().collect::<Vec<_>>());
    index_put |x, a| sums(2.0), EQUAL,
        x[0].index_put(&x[2..].iter().collect::<Vec<_>>(), &x[1], flag(a, 0));
    scatter |x, a| EQUAL, EQUAL, x[0].scatter(integer(a, 0), &x[1], &x[2]);
    scatter_reduce |x, a| sums(4.0), EQUAL, x[0].scatter_reduce(integer(a, 0), &x[1], &x[2], reduce_op(a, 1));
    take_along_dim |x, a| EQUAL, sums(4.0), x[0].take_along_dim(integer(a, 0), &x[1]);
    take |x, _| EQUAL, sums(4.0), x[0].take(&x[1]);
    bincount |x, a| EQUAL, EQUAL, x[0].bincount(count(a, 0));
    flip |x, a| EQUAL, EQUAL, x[0].flip(&extents(&a[0]).iter().map(|&d| d as isize).collect::<Vec<_>>());
    roll |x, a| EQUAL, EQUAL, x[0].roll(integer(a, 0), integer(a, 1));
    repeat |x, a| EQUAL, sums(4.0), x[0].repeat(&extents(&a[0]));
    repeat_interleave |x, a| EQUAL, sums(4.0), x[0].repeat_interleave(count(a, 0), integer(a, 1));
    stack |x, a| EQUAL, EQUAL, DTensor::stack(&x.iter().collect::<Vec<_>>(), integer(a, 0));
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
    attention_at |x, a| sums(8.0), sums(16.0), x[0].attention_at(&x[1], &x[2], number(a, 0), count(a, 1));
    attention_soft_cap |x, a| sums(8.0), sums(16.0),
        x[0].attention_with(&x[1], &x[2], &AttentionOptions::causal(number(a, 0)).soft_cap(number(a, 1)));
    attention_documents |x, a| sums(8.0), sums(16.0),
        x[0].attention_with(&x[1], &x[2], &AttentionOptions::causal(number(a, 0)).documents(&x[3], &x[3]));
    rotary |x, a| sums(2.0), sums(2.0), x[0].rotary(number(a, 0), count(a, 1));
    rotary_tables |x, a| sums(2.0), EQUAL,
        RotaryFrequencies::geometric(count(a, 0), number(a, 1)).and_then(|f| x[0].rotary_tables(&f, DType::F64));
    rotary_with |x, a| sums(2.0), sums(4.0), {
        let interleaved = a[0].as_str() == Some("interleaved");
        let pairing = if interleaved { RotaryPairing::Interleaved } else { RotaryPairing::Halves };
        x[0].rotary_with(&x[1], &x[2], pairing)
    };

    route_top_k |x, a| sums(2.0), sums(4.0), x[0].route_top_k(count(a, 0));
    router_z_loss |x, _| sums(4.0), sums(8.0), x[0].router_z_loss();
    load_balancing_loss |x, _| sums(4.0), sums(4.0), x[0].load_balancing_loss(&x[1]);
    expert_slots |x, a| EQUAL, EQUAL, x[0].expert_slots(count(a, 0), None);
    permute_tokens |x, a| EQUAL, sums(2.0), x[0].permute_tokens(&x[1], count(a, 0));
    unpermute_tokens |x, _| EQUAL, sums(2.0), x[0].unpermute_tokens(&x[1]);
    grouped_matmul |x, a| sums(8.0), sums(8.0),
        GroupSizes::new(x[1].shape()[0], extents(&a[0])).and_then(|sizes| x[0].grouped_matmul(&x[1], &sizes));

    // The loss of narrow logits is f32 here.
    cross_entropy |x, _| sums(4.0), sums(4.0), narrow(x[0].cross_entropy(&x[1]), &x[0]);
    cross_entropy_with |x, a| sums(4.0), sums(4.0), {
        let (label_smoothing, class_weights) = (number(a, 1), Some(&x[2]));
        let options = CrossEntropyOptions { label_smoothing, class_weights, ..class_options(a, 0) };
        x[0].cross_entropy_with(&x[1], &options)
    };
    cross_entropy_probabilities |x, a| sums(4.0), sums(4.0), {
        let (label_smoothing, class_weights) = (number(a, 1), Some(&x[2]));
        let options = CrossEntropyOptions { label_smoothing, class_weights, ignore_index: None, ..class_options(a, 0) };
        x[0].cross_entropy_with(&x[1], &options)
    };
    cross_entropy_dim |x, a| sums(4.0), sums(4.0), {
        let options = CrossEntropyOptions { class_dim: integer(a, 0), ..class_options(a, 1) };
        x[0].cross_entropy_with(&x[1], &options)
    };
    nll_loss |x, a| sums(4.0), sums(4.0), x[0].nll_loss(&x[1], &class_options(a, 0));
    nll_loss_weighted |x, a| sums(4.0), sums(4.0), {
        let options = CrossEntropyOptions { class_weights: Some(&x[2]), ..class_options(a, 0) };
        x[0].nll_loss(&x[1], &options)
    };
    bce_loss |x, a| sums(4.0), sums(4.0), x[0].bce_loss(&x[1], &binary_options(a, 0));
    bce_with_logits_loss |x, a| sums(4.0), sums(4.0), x[0].bce_with_logits_loss(&x[1], &binary_options(a, 0));
    bce_weighted |x, a| sums(4.0), sums(4.0), {
        let (weight, pos_weight) = (Some(&x[2]), Some(&x[3]));
        let options = BinaryLossOptions { weight, pos_weight, ..binary_options(a, 0) };
        x[0].bce_with_logits_loss(&x[1], &options)
    };
    mse_loss |x, a| sums(4.0), sums(4.0), x[0].mse_loss(&x[1], reduction(a, 0));
    l1_loss |x, a| sums(4.0), sums(4.0), x[0].l1_loss(&x[1], reduction(a, 0));
    huber_loss |x, a| sums(4.0), sums(4.0), x[0].huber_loss(&x[1], number(a, 0), reduction(a, 1));
    smooth_l1_loss |x, a| sums(4.0), sums(4.0), x[0].smooth_l1_loss(&x[1], number(a, 0), reduction(a, 1));
    kl_div_loss |x, a| sums(16.0), sums(8.0), x[0].kl_div_loss(&x[1], false, reduction(a, 0));
    kl_div_log |x, a| sums(16.0), sums(8.0), x[0].kl_div_loss(&x[1], true, reduction(a, 0));
    cosine_similarity |x, a| sums(4.0), sums(8.0), x[0].cosine_similarity(&x[1], integer(a, 0), number(a, 1));
    cosine_embedding_loss |x, a| sums(4.0), sums(8.0),
        x[0].cosine_embedding_loss(&x[1], &x[2], number(a, 0), LossReduction::Mean);

    adamw |x, a| sums(2.0), EQUAL, {
        let step = AdamWStep::at_step(
            count(a, 0) as u64, number(a, 1), (number(a, 2), number(a, 3)), number(a, 4), number(a, 5));
        DTensor::apply(&step, &x.iter().collect::<Vec<_>>()).map(Vec::from_iter)
    };
    sgd |x, a| sums(2.0), EQUAL, {
        let [momentum, weight_decay] = [1, 2].map(|k| Bits(number(a, k)));
        let step = SgdStep { momentum, weight_decay, nesterov: flag(a, 3), lr: Unkeyed(number(a, 0)) };
        DTensor::apply(&step, &x.iter().collect::<Vec<_>>()).map(Vec::from_iter)
    };
};
