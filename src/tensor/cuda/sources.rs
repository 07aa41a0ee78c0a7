//! The embedded sources of `kernels/`.

/// The compiler's options, the same for every kernel: IEEE arithmetic as it is written.
pub const OPTIONS: &[&str] =
    &["--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"];

macro_rules! embed {
    ($($name:literal)*) => { &[$(($name, include_str!(concat!("../../../kernels/", $name)))),*] };
}

/// The headers, by the name under which sources include them.
pub fn headers() -> &'static [(&'static str, &'static str)] {
    HEADERS
}

/// The sources, by file name: one an operator, and a few that several share.
pub fn programs() -> &'static [(&'static str, &'static str)] {
    PROGRAMS
}

/// The text of `kernels/<name>.cu`.
pub(super) fn program(name: &str) -> Option<&'static str> {
    PROGRAMS.iter().find(|(file, _)| file.strip_suffix(".cu") == Some(name)).map(|(_, text)| *text)
}

const HEADERS: &[(&str, &str)] = embed! {
    "attention.cuh"
    "attention_backward.cuh"
    "attention_forward.cuh"
    "cast.cuh"
    "draws.cuh"
    "flash.cuh"
    "gelu.cuh"
    "iso.cuh"
    "math.cuh"
    "matmul.cuh"
    "matmul_panel.cuh"
    "matmul_tile.cuh"
    "mma.cuh"
    "norm.cuh"
    "num.cuh"
    "parameters.cuh"
    "philox.cuh"
    "pointwise.cuh"
    "pow.cuh"
    "random.cuh"
    "reduce.cuh"
    "rows.cuh"
    "step.cuh"
};

const PROGRAMS: &[(&str, &str)] = embed! {
    "abs.cu"
    "adamw.cu"
    "add.cu"
    "argmax.cu"
    "attention_bf16.cu"
    "attention_delta.cu"
    "attention_f16.cu"
    "attention_f32.cu"
    "attention_f64.cu"
    "attention_fast.cu"
    "attention_grad_bf16.cu"
    "attention_grad_f16.cu"
    "attention_grad_f32.cu"
    "attention_grad_f64.cu"
    "attention_grad_fast.cu"
    "bernoulli.cu"
    "cast_bf16.cu"
    "cast_bool.cu"
    "cast_f16.cu"
    "cast_f32.cu"
    "cast_f64.cu"
    "cast_i32.cu"
    "cast_i64.cu"
    "cast_u8.cu"
    "compare.cu"
    "copy.cu"
    "cross_entropy.cu"
    "cross_entropy_grad.cu"
    "div.cu"
    "dropout.cu"
    "embedding.cu"
    "embedding_grad.cu"
    "exp.cu"
    "exponential.cu"
    "fill.cu"
    "fold.cu"
    "gamma.cu"
    "gather.cu"
    "gelu.cu"
    "gelu_grad.cu"
    "layer_norm.cu"
    "layer_norm_grad.cu"
    "log.cu"
    "log_softmax.cu"
    "log_softmax_grad.cu"
    "mask.cu"
    "matmul_bf16.cu"
    "matmul_f16.cu"
    "matmul_f32.cu"
    "matmul_f64.cu"
    "max.cu"
    "maximum.cu"
    "min.cu"
    "minimum.cu"
    "mul.cu"
    "multinomial.cu"
    "neg.cu"
    "poisson.cu"
    "pow.cu"
    "pow_grad.cu"
    "pow_scalar.cu"
    "random.cu"
    "relu.cu"
    "relu_grad.cu"
    "rms_norm.cu"
    "rms_norm_grad.cu"
    "rotary.cu"
    "rsqrt.cu"
    "scale.cu"
    "select.cu"
    "sgd.cu"
    "shift.cu"
    "shuffle.cu"
    "sigmoid.cu"
    "sigmoid_grad.cu"
    "sign.cu"
    "silu.cu"
    "silu_grad.cu"
    "softmax.cu"
    "softmax_grad.cu"
    "sqrt.cu"
    "sub.cu"
    "sum.cu"
    "sum_exp.cu"
    "tanh.cu"
    "tanh_grad.cu"
};
