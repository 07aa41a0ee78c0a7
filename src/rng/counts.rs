//! Counts as elements of any type that holds them.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// How counts become elements.
pub(crate) trait Counted: Sized {
    /// Converts.
    fn put(counts: &[f64], out: &mut [Self]);
}

macro_rules! counted {
    ($($t:ty)*) => {$(
        impl Counted for $t {
            #[inline(always)]
            fn put(counts: &[f64], out: &mut [$t]) {
                out.iter_mut().zip(counts).for_each(|(out, &count)| *out = count as $t);
            }
        }
    )*};
}

counted!(i64 i32 f64 f32);

macro_rules! counted_half {
    ($($t:ty)*) => {$(
        impl Counted for $t {
            #[inline(always)]
            fn put(counts: &[f64], out: &mut [$t]) {
                let mut wide = [0.0; 64];
                for (counts, out) in counts.chunks(64).zip(out.chunks_mut(64)) {
                    let wide = &mut wide[..out.len()];
                    f32::put(counts, wide);
                    out.convert_from_f32_slice(wide);
                }
            }
        }
    )*};
}

counted_half!(f16 bf16);
