//! The variants of attention's kernels, each a source of its own: a program compiles those that it calls.
//!
//! A name is `attention`, `attention_masked` (more than positions decides the scores) or `attention_bias` with `_grad` for
//! the backward pass, the class of the head's dim, `_dropout` if the kernel has dropout, and the dtype.

/// A source with and without dropout for each dtype: its name, its header, the header's macro for its class of head
/// dims, and the arguments of the macro between dtype and dropout.
macro_rules! of_class {
    ($name:literal, $header:literal, $entries:literal, $given:literal, $($dtype:ident)*) => {
        &[$(
            (
                concat!($name, "_", stringify!($dtype), ".cu"),
                concat!("#include \"", $header, "\"\n\n", $entries, "(", stringify!($dtype), $given, ", false)\n"),
            ),
            (
                concat!($name, "_dropout_", stringify!($dtype), ".cu"),
                concat!("#include \"", $header, "\"\n\n", $entries, "(", stringify!($dtype), $given, ", true)\n"),
            ),
        )*]
    };
}

/// All variants with their text.
pub(crate) const ATTENTION: &[&[(&str, &str)]] = &[
    of_class!("attention_narrow", "attention_forward.cuh", "NARROW", ", false", f32 f16 bf16),
    of_class!("attention_wide", "attention_forward.cuh", "WIDE", ", false", f32 f16 bf16),
    of_class!("attention_any", "attention_forward.cuh", "ANY", ", false", f32 f64),
    of_class!("attention_masked_narrow", "attention_forward.cuh", "NARROW", ", true", f32),
    of_class!("attention_masked_wide", "attention_forward.cuh", "WIDE", ", true", f32),
    of_class!("attention_masked_any", "attention_forward.cuh", "ANY", ", true", f32 f64),
    of_class!("attention_grad_narrow", "attention_backward.cuh", "NARROW", ", false", f32 f16 bf16),
    of_class!("attention_grad_wide", "attention_backward.cuh", "WIDE", ", false", f32 f16 bf16),
    of_class!("attention_grad_any", "attention_backward.cuh", "ANY", ", false", f32 f64),
    of_class!("attention_masked_grad_narrow", "attention_backward.cuh", "NARROW", ", true", f32),
    of_class!("attention_masked_grad_wide", "attention_backward.cuh", "WIDE", ", true", f32),
    of_class!("attention_masked_grad_any", "attention_backward.cuh", "ANY", ", true", f32 f64),
    of_class!("attention_bias_grad_narrow", "attention_backward.cuh", "NARROW_BIAS", "", f32),
    of_class!("attention_bias_grad_any", "attention_backward.cuh", "ANY_BIAS", "", f32 f64),
    of_class!("attention_fast32", "attention_fast_forward.cuh", "FAST32", "", f16 bf16),
    of_class!("attention_fast64", "attention_fast_forward.cuh", "FAST64", "", f16 bf16),
    of_class!("attention_fast96", "attention_fast_forward.cuh", "FAST96", "", f16 bf16),
    of_class!("attention_fast128", "attention_fast_forward.cuh", "FAST128", "", f16 bf16),
    of_class!("attention_grad_fast32", "attention_fast_backward.cuh", "FAST32", "", f16 bf16),
    of_class!("attention_grad_fast64", "attention_fast_backward.cuh", "FAST64", "", f16 bf16),
    of_class!("attention_grad_fast96", "attention_fast_backward.cuh", "FAST96", "", f16 bf16),
    of_class!("attention_grad_fast128", "attention_fast_backward.cuh", "FAST128", "", f16 bf16),
];
