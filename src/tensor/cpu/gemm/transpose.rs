//! Transposing copies: contiguous lines become columns.

/// A function that copies `lines` lines of `len` elements, `src_step` apart, into columns: element `k` of line `j` goes
/// to `dst[k * dst_step + j]`.
pub(super) type TransposeFn<T> =
    unsafe fn(src: *const T, src_step: usize, lines: usize, len: usize, dst: *mut T, dst_step: usize);

/// The [`TransposeFn`] that copies element by element.
///
/// # Safety
/// `src` and `dst` cover the lines, and do not overlap.
pub(super) unsafe fn transpose_plain<T: Copy>(
    src: *const T,
    src_step: usize,
    lines: usize,
    len: usize,
    dst: *mut T,
    dst_step: usize,
) {
    for j in 0..lines {
        for k in 0..len {
            // SAFETY: the caller's promise.
            unsafe { *dst.add(k * dst_step + j) = *src.add(j * src_step + k) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{transpose_f32, transpose_f64};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::transpose_plain;

    /// Defines the [`TransposeFn`]s that transpose square blocks in registers.
    macro_rules! transpose {
        ($($name:ident: $t:ty, $n:literal, $block:ident;)*) => {$(
            #[doc = concat!("The [`super::TransposeFn`] that copies blocks of ", $n, " x ", $n, ", and the rest element by element.")]
            ///
            /// # Safety
            /// The conditions of [`transpose_plain`] hold; the CPU has AVX2.
            #[target_feature(enable = "avx2")]
            pub(in super::super) unsafe fn $name(
                src: *const $t,
                src_step: usize,
                lines: usize,
                len: usize,
                dst: *mut $t,
                dst_step: usize,
            ) {
                let (full_lines, full_len) = (lines / $n * $n, len / $n * $n);
                // SAFETY: blocks are inside the lines; the rest is the caller's promise.
                unsafe {
                    for j in (0..full_lines).step_by($n) {
                        for k in (0..full_len).step_by($n) {
                            $block(src.add(j * src_step + k), src_step, dst.add(k * dst_step + j), dst_step);
                        }
                    }
                    let (below, right) = (lines - full_lines, len - full_len);
                    let (lower, rightmost) = (src.add(full_lines * src_step), src.add(full_len));
                    transpose_plain(lower, src_step, below, full_len, dst.add(full_lines), dst_step);
                    transpose_plain(rightmost, src_step, lines, right, dst.add(full_len * dst_step), dst_step);
                }
            }
        )*};
    }

    transpose! {
        transpose_f32: f32, 8, block_f32;
        transpose_f64: f64, 4, block_f64;
    }

    #[target_feature(enable = "avx2")]
    unsafe fn block_f32(src: *const f32, src_step: usize, dst: *mut f32, dst_step: usize) {
        // SAFETY: eight elements of eight lines on both sides, the caller's promise.
        unsafe {
            // A vector of half of line i and half of line i + 4.
            let half = |line: usize, at: usize| _mm_loadu_ps(src.add(line * src_step + at));
            let pair = |line: usize, at: usize| {
                _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(half(line, at)), half(line + 4, at))
            };
            for at in [0, 4] {
                let (r0, r1, r2, r3) = (pair(0, at), pair(1, at), pair(2, at), pair(3, at));
                let (lo01, hi01) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
                let (lo23, hi23) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
                let columns = [
                    _mm256_shuffle_ps::<0x44>(lo01, lo23),
                    _mm256_shuffle_ps::<0xee>(lo01, lo23),
                    _mm256_shuffle_ps::<0x44>(hi01, hi23),
                    _mm256_shuffle_ps::<0xee>(hi01, hi23),
                ];
                for (k, column) in columns.into_iter().enumerate() {
                    _mm256_storeu_ps(dst.add((at + k) * dst_step), column);
                }
            }
        }
    }

    #[target_feature(enable = "avx2")]
    unsafe fn block_f64(src: *const f64, src_step: usize, dst: *mut f64, dst_step: usize) {
        // SAFETY: four elements of four lines on both sides, the caller's promise.
        unsafe {
            let half = |line: usize, at: usize| _mm_loadu_pd(src.add(line * src_step + at));
            let pair = |line: usize, at: usize| {
                _mm256_insertf128_pd::<1>(_mm256_castpd128_pd256(half(line, at)), half(line + 2, at))
            };
            for at in [0, 2] {
                let (r0, r1) = (pair(0, at), pair(1, at));
                _mm256_storeu_pd(dst.add(at * dst_step), _mm256_unpacklo_pd(r0, r1));
                _mm256_storeu_pd(dst.add((at + 1) * dst_step), _mm256_unpackhi_pd(r0, r1));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::simd::Isa;
    use super::super::tile::Tiled;

    fn check<T: Tiled + Copy + PartialEq + std::fmt::Debug>(of: fn(usize) -> T) {
        for &isa in Isa::available() {
            for (lines, len, src_step, dst_step) in
                [(0, 5, 5, 4), (1, 1, 1, 1), (8, 8, 8, 8), (17, 19, 23, 48), (48, 33, 40, 48)]
            {
                let src: Vec<T> = (0..lines.max(1) * src_step).map(of).collect();
                let mut dst = vec![of(9999); len * dst_step];
                // SAFETY: both buffers cover the lines; the CPU has `isa`.
                unsafe {
                    (T::kernels(isa).transpose)(
                        src.as_ptr(),
                        src_step,
                        lines,
                        len,
                        dst.as_mut_ptr(),
                        dst_step,
                    )
                };
                for k in 0..len {
                    for j in 0..dst_step {
                        let want = if j < lines { src[j * src_step + k] } else { of(9999) };
                        assert_eq!(dst[k * dst_step + j], want, "{isa:?} {lines} {len} {k} {j}");
                    }
                }
            }
        }
    }

    #[test]
    fn lines_become_columns() {
        check(|i| i as f32);
        check(|i| i as f64);
    }
}
