//! Conversion of counts to element types.

use half::{bf16, f16};

use crate::tensor::cpu::{Widen, map_slice};

/// An element type that counts convert to.
pub(crate) trait FromCounts: Sized {
    /// Converts `counts` into `out`.
    fn put(counts: &[f64], out: &mut [Self]);
}

macro_rules! counted {
    ($($t:ty)*) => {$(
        impl FromCounts for $t {
            fn put(counts: &[f64], out: &mut [$t]) {
                map_slice(counts, out, |count: f64| count as $t);
            }
        }
    )*};
}

counted!(i64 i32 f32);

impl FromCounts for f64 {
    fn put(counts: &[f64], out: &mut [f64]) {
        out.copy_from_slice(counts);
    }
}

macro_rules! counted_half {
    ($($t:ty)*) => {$(
        impl FromCounts for $t {
            fn put(counts: &[f64], out: &mut [$t]) {
                let mut wide = [0.0; 64];
                for (counts, out) in counts.chunks(64).zip(out.chunks_mut(64)) {
                    let wide = &mut wide[..out.len()];
                    f32::put(counts, wide);
                    <$t as Widen>::narrow_into(wide, out);
                }
            }
        }
    )*};
}

counted_half!(f16 bf16);
