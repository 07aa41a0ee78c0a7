//! Transposing copies: contiguous lines become columns.

/// A function that copies `lines` lines of `len` elements, `src_step` apart, into columns: element `k` of line `j` goes
/// to `dst[k * dst_step + j]`.
pub(in crate::gemm) type TransposeFn<T> =
    unsafe fn(src: *const T, src_step: usize, lines: usize, len: usize, dst: *mut T, dst_step: usize);

/// The [`TransposeFn`] that copies element by element.
///
/// # Safety
/// `src` and `dst` cover the lines, and do not overlap.
pub(in crate::gemm) unsafe fn transpose_plain<T: Copy>(
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
pub(in crate::gemm) use x86::{interleave_f32, interleave_f64, transpose_f32, transpose_f64};

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
            pub(in crate::gemm) unsafe fn $name(
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
                    // Without a rest these lie beyond the matrices, and are not used.
                    let (lower, rightmost) = (src.wrapping_add(full_lines * src_step), src.wrapping_add(full_len));
                    let (after, under) = (dst.wrapping_add(full_lines), dst.wrapping_add(full_len * dst_step));
                    transpose_plain(lower, src_step, below, full_len, after, dst_step);
                    transpose_plain(rightmost, src_step, lines, right, under, dst_step);
                }
            }
        )*};
    }

    transpose! {
        transpose_f32: f32, 8, block_f32;
        transpose_f64: f64, 4, block_f64;
    }

    /// Defines the functions that copy a few lines into columns that are close together.
    macro_rules! interleave {
        ($($name:ident: $t:ty, $n:literal, $columns:ident, $store:ident;)*) => {$(
            #[doc = concat!("A [`super::TransposeFn`] for up to 8 lines, at least one, that writes 8 elements of each column: beyond the lines, the columns after it and at last the memory behind it hold arbitrary elements.")]
            ///
            /// # Safety
            /// The conditions of [`transpose_plain`] hold, with room for 8 elements in every column, and columns are at
            /// most 8 apart; the CPU has AVX2.
            #[target_feature(enable = "avx2")]
            pub(in crate::gemm) unsafe fn $name(
                src: *const $t,
                src_step: usize,
                lines: usize,
                len: usize,
                dst: *mut $t,
                dst_step: usize,
            ) {
                let full = len / $n * $n;
                // SAFETY: the lines are inside the source, the last one in place of those after it; the columns are
                // written in ascending order, so that each overwrites what the one before wrote into it.
                unsafe {
                    let line: [*const $t; 8] = std::array::from_fn(|i| src.add(i.min(lines - 1) * src_step));
                    for k in (0..full).step_by($n) {
                        let parts = $columns(line.map(|line| line.add(k)));
                        for i in 0..$n {
                            for (part, columns) in parts.iter().enumerate() {
                                $store(dst.add((k + i) * dst_step + part * $n), columns[i]);
                            }
                        }
                    }
                    for k in full..len {
                        for (i, line) in line.iter().enumerate().take(lines) {
                            *dst.add(k * dst_step + i) = *line.add(k);
                        }
                    }
                }
            }
        )*};
    }

    interleave! {
        interleave_f32: f32, 8, columns_f32, _mm256_storeu_ps;
        interleave_f64: f64, 4, columns_f64, _mm256_storeu_pd;
    }

    /// Returns the columns of eight lines of eight elements.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn columns_f32(line: [*const f32; 8]) -> [[__m256; 8]; 1] {
        let mut out = [_mm256_setzero_ps(); 8];
        for at in [0, 4] {
            // A vector of half of line i and half of line i + 4.
            // SAFETY: the caller's promise.
            let half = |i: usize| unsafe { _mm_loadu_ps(line[i].add(at)) };
            let pair = |i: usize| _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(half(i)), half(i + 4));
            let (r0, r1, r2, r3) = (pair(0), pair(1), pair(2), pair(3));
            let (lo01, hi01) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
            let (lo23, hi23) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
            out[at] = _mm256_shuffle_ps::<0x44>(lo01, lo23);
            out[at + 1] = _mm256_shuffle_ps::<0xee>(lo01, lo23);
            out[at + 2] = _mm256_shuffle_ps::<0x44>(hi01, hi23);
            out[at + 3] = _mm256_shuffle_ps::<0xee>(hi01, hi23);
        }
        [out]
    }

    /// Returns the columns of eight lines of four elements, in two halves.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn columns_f64(line: [*const f64; 8]) -> [[__m256d; 4]; 2] {
        [0, 4].map(|first| {
            let mut out = [_mm256_setzero_pd(); 4];
            for at in [0, 2] {
                // SAFETY: the caller's promise.
                let half = |i: usize| unsafe { _mm_loadu_pd(line[first + i].add(at)) };
                let pair = |i: usize| _mm256_insertf128_pd::<1>(_mm256_castpd128_pd256(half(i)), half(i + 2));
                let (r0, r1) = (pair(0), pair(1));
                out[at] = _mm256_unpacklo_pd(r0, r1);
                out[at + 1] = _mm256_unpackhi_pd(r0, r1);
            }
            out
        })
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
    use super::super::tile::{INTERLEAVED, Tiled};
    use crate::isa::simd::Isa;

    fn check<T: Tiled + Copy + PartialEq + std::fmt::Debug>(of: fn(usize) -> T) {
        for &isa in Isa::available() {
            for (lines, len, src_step, dst_step) in
                [(0, 5, 5, 4), (1, 1, 1, 1), (8, 8, 8, 8), (17, 19, 23, 48), (48, 33, 40, 48)]
            {
                // No longer than the lines and columns, so that Miri finds an address beyond them.
                let src: Vec<T> = (0..lines.max(1) * src_step - (src_step - len)).map(of).collect();
                let mut dst = vec![of(9999); (len - 1) * dst_step + lines.max(1)];
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
                    for j in (0..dst_step).take_while(|j| k * dst_step + j < dst.len()) {
                        let want = if j < lines { src[j * src_step + k] } else { of(9999) };
                        assert_eq!(dst[k * dst_step + j], want, "{isa:?} {lines} {len} {k} {j}");
                    }
                }
            }
        }
    }

    fn check_close<T: Tiled + Copy + PartialEq + std::fmt::Debug>(of: fn(usize) -> T) {
        for &isa in Isa::available() {
            let kernels = T::kernels(isa);
            let panel = kernels.tiles.len();
            for (lines, len) in (1..=panel).flat_map(|lines| [1, 7, 8, 19, 32].map(|len| (lines, len))) {
                let src: Vec<T> = (0..lines * 40).map(of).collect();
                let mut dst = vec![of(9999); len * panel + INTERLEAVED];
                // SAFETY: both buffers cover the lines; the CPU has `isa`.
                unsafe { (kernels.interleave)(src.as_ptr(), 40, lines, len, dst.as_mut_ptr(), panel) };
                for (k, j) in (0..len).flat_map(|k| (0..lines).map(move |j| (k, j))) {
                    assert_eq!(dst[k * panel + j], src[j * 40 + k], "{isa:?} {lines} {len} {k} {j}");
                }
            }
        }
    }

    #[test]
    fn lines_become_columns_that_are_close_together() {
        check_close(|i| i as f32);
        check_close(|i| i as f64);
    }

    #[test]
    fn lines_become_columns() {
        check(|i| i as f32);
        check(|i| i as f64);
    }
}
