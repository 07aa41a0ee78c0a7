//! The embedded sources of `kernels/`.

/// The compiler's options, the same for every kernel: IEEE arithmetic as it is written.
pub const OPTIONS: &[&str] =
    &["--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"];

/// A program of kernels: a file of `kernels/` by its name, or text that an operator's formula gives.
#[derive(Clone, Copy, Debug)]
pub struct KernelSource {
    /// The name: a file's, without `.cu`, or a formula's.
    pub name: &'static str,
    /// The text in parts, which are compiled as one; none for a file of `kernels/`.
    pub parts: &'static [&'static str],
}

impl KernelSource {
    /// The whole text.
    pub fn text(&self) -> Option<String> {
        if self.parts.is_empty() {
            return PROGRAMS
                .iter()
                .find(|(file, _)| file.strip_suffix(".cu") == Some(self.name))
                .map(|(_, text)| text.to_string());
        }
        Some(self.parts.concat())
    }
}

/// A file of `kernels/`.
impl From<&'static str> for KernelSource {
    fn from(name: &'static str) -> KernelSource {
        KernelSource { name, parts: &[] }
    }
}

macro_rules! embed {
    ($($name:literal)*) => { &[$(($name, include_str!(concat!("../../../kernels/", $name)))),*] };
}

/// The headers, by the name under which sources include them.
pub fn headers() -> &'static [(&'static str, &'static str)] {
    HEADERS
}

/// The sources in files, by file name: one per operator with kernels of its own, and a few that several share. Those of
/// formulas are [`ops::cuda_programs`](crate::ops)'s.
pub fn programs() -> &'static [(&'static str, &'static str)] {
    PROGRAMS
}

const HEADERS: &[(&str, &str)] = embed! {
    "attention.cuh"
    "attention_backward.cuh"
    "attention_forward.cuh"
    "cast.cuh"
    "draws.cuh"
    "flash.cuh"
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
    "random.cuh"
    "reduce.cuh"
    "rows.cuh"
    "step.cuh"
};

const PROGRAMS: &[(&str, &str)] = embed! {
    "adamw.cu"
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
    "dropout.cu"
    "embedding.cu"
    "embedding_grad.cu"
    "exponential.cu"
    "fill.cu"
    "fold.cu"
    "gamma.cu"
    "gather.cu"
    "layer_norm.cu"
    "layer_norm_grad.cu"
    "log_softmax.cu"
    "log_softmax_grad.cu"
    "mask.cu"
    "matmul_bf16.cu"
    "matmul_f16.cu"
    "matmul_f32.cu"
    "matmul_f64.cu"
    "max.cu"
    "min.cu"
    "multinomial.cu"
    "poisson.cu"
    "random.cu"
    "rms_norm.cu"
    "rms_norm_grad.cu"
    "rotary.cu"
    "select.cu"
    "sgd.cu"
    "shuffle.cu"
    "softmax.cu"
    "softmax_grad.cu"
    "sum.cu"
    "sum_exp.cu"
};
