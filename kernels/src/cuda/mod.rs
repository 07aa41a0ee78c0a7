//! The CUDA sources, embedded in the program.

mod variants;

use std::sync::LazyLock;

use variants::ATTENTION;

/// The compiler's options, the same for every kernel: IEEE arithmetic without contraction or approximation.
pub const OPTIONS: &[&str] =
    &["--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"];

/// Returns the headers, each with the name by which sources include it.
///
/// ```
/// let names: Vec<&str> = isoshard_kernels::cuda::headers().iter().map(|(name, _)| *name).collect();
/// assert!(names.contains(&"iso.cuh"));
/// ```
pub fn headers() -> &'static [(&'static str, &'static str)] {
    HEADERS
}

/// Returns the sources of `kernels/cuda` with their text: one per operator with kernels of its own, and some that several
/// operators share. A file that is compiled for one dtype at a time is there once per dtype, as `<file>_<dtype>.cu`, with
/// the dtypes' lists before its text. Attention has a source for each variant.
///
/// ```
/// let (name, text) = isoshard_kernels::cuda::programs()[0];
/// assert!(name.ends_with(".cu") && text.contains("KERNEL"));
/// ```
pub fn programs() -> &'static [(&'static str, &'static str)] {
    static ALL: LazyLock<Vec<(&str, &str)>> =
        LazyLock::new(|| [FILES, &BY_FLOAT.concat(), &BY_NUMBER.concat(), &ATTENTION.concat()].concat());
    &ALL
}

macro_rules! lists {
    ($floats:literal, $up_to_f32:literal, $halves:literal, $integers:literal, $small:literal) => {
        concat!(
            "#define FLOATS(X) ",
            $floats,
            "\n#define UP_TO_F32(X) ",
            $up_to_f32,
            "\n#define HALVES(X) ",
            $halves,
            "\n#define INTEGERS(X) ",
            $integers,
            "\n#define SMALL_TYPES(X) ",
            $small,
            "\n",
        )
    };
}

/// The lists of `iso.cuh` with one dtype alone.
macro_rules! only {
    (f64) => {
        lists!("X(f64)", "", "", "", "")
    };
    (f32) => {
        lists!("X(f32)", "X(f32)", "", "", "")
    };
    (f16) => {
        lists!("X(f16)", "X(f16)", "X(f16)", "", "")
    };
    (bf16) => {
        lists!("X(bf16)", "X(bf16)", "X(bf16)", "", "")
    };
    (i64) => {
        lists!("", "", "", "X(i64)", "")
    };
    (i32) => {
        lists!("", "", "", "X(i32)", "X(i32)")
    };
    (u8) => {
        lists!("", "", "", "X(u8)", "X(u8)")
    };
    (bool) => {
        lists!("", "", "", "", "X(bool)")
    };
}

/// A file once per dtype, with the dtype's lists before its text.
macro_rules! variants {
    ($name:literal, $($dtype:ident)*) => {
        [$((
            concat!($name, "_", stringify!($dtype), ".cu"),
            concat!(only!($dtype), include_str!(concat!("../../cuda/", $name, ".cu"))),
        )),*]
    };
}
macro_rules! by_float {
    ($($name:literal)*) => { &[$(variants!($name, f64 f32 f16 bf16)),*] };
}

macro_rules! embed {
    ($($name:literal)*) => { &[$(($name, include_str!(concat!("../../cuda/", $name)))),*] };
}

const HEADERS: &[(&str, &str)] = embed! {
    "attention.cuh"
    "attention_backward.cuh"
    "attention_fast_backward.cuh"
    "attention_fast_forward.cuh"
    "attention_forward.cuh"
    "attention_tiles.cuh"
    "cast.cuh"
    "cross_entropy.cuh"
    "draws.cuh"
    "flash.cuh"
    "functions.cuh"
    "iso.cuh"
    "math.cuh"
    "matmul.cuh"
    "matmul_panel.cuh"
    "matmul_tile.cuh"
    "mma.cuh"
    "norm.cuh"
    "num.cuh"
    "packs.cuh"
    "parameters.cuh"
    "philox.cuh"
    "pieces.cuh"
    "pointwise.cuh"
    "random.cuh"
    "reduce.cuh"
    "rows.cuh"
    "short_functions.cuh"
    "special_functions.cuh"
    "step.cuh"
    "tree.cuh"
};

/// The files that are compiled for all their dtypes at once.
const FILES: &[(&str, &str)] = embed! {
    "adamw.cu"
    "argmax.cu"
    "attention_delta.cu"
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
    "create.cu"
    "dropout.cu"
    "embedding_grad.cu"
    "expert_slots.cu"
    "exponential.cu"
    "fill.cu"
    "float_test.cu"
    "first_index.cu"
    "flip.cu"
    "fold.cu"
    "gamma.cu"
    "gather.cu"
    "index_rows.cu"
    "inverse_power_of_two.cu"
    "mask.cu"
    "matmul_bf16.cu"
    "matmul_f16.cu"
    "matmul_f32.cu"
    "matmul_f64.cu"
    "multinomial.cu"
    "poisson.cu"
    "radix.cu"
    "prod.cu"
    "random.cu"
    "rotary.cu"
    "rotary_apply.cu"
    "rotary_table.cu"
    "scatter.cu"
    "select.cu"
    "sgd.cu"
    "shuffle.cu"
    "sort.cu"
};

/// The files that are compiled for one float at a time.
const BY_FLOAT: &[[(&str, &str); 4]] = by_float! {
    "cross_entropy"
    "cross_entropy_grad"
    "layer_norm"
    "layer_norm_grad"
    "log_softmax"
    "log_softmax_grad"
    "rms_norm"
    "rms_norm_grad"
    "soft_cross_entropy"
    "soft_cross_entropy_grad"
    "softmax"
    "softmax_grad"
    "sum_exp"
    "terms"
};

/// The reductions, which are compiled for one dtype at a time. Only sums have bools.
const BY_NUMBER: &[&[(&str, &str)]] = &[
    &variants!("max", f64 f32 f16 bf16 i64 i32 u8),
    &variants!("min", f64 f32 f16 bf16 i64 i32 u8),
    &variants!("sum", f64 f32 f16 bf16 i64 i32 u8 bool),
];

/// Returns true if a file has all its dtypes' entries, which are compiled at once.
pub fn is_whole(name: &str) -> bool {
    FILES.iter().any(|(file, _)| file.strip_suffix(".cu") == Some(name))
}
