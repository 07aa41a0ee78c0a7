//! Results that no cache holds, which are written past the caches.
//!
//! A store to a line that is in no cache reads the line first; a streaming store does not. So a large result is computed piece by piece
//! in a buffer that stays in the first cache, and streamed from there; results of f16 and bf16 are not. That pays for loops that wait for
//! memory, such as `add`, and not for those that compute, such as `gelu` and softmax, since these no longer overlap with their stores
//! (`benches/results/2026-11-28-attention-and-stores.md`).

use std::cell::Cell;
use std::ops::Range;

use crate::isa::caches::CACHE_LINE_BYTES;
use crate::isa::simd::Isa;
use crate::loops::aligned_buffer::AlignedBuffer;

/// A piece's size. Shorter pieces take longer.
pub const PIECE_BYTES: usize = 2 << 10;

/// The least size of a result that is written past the caches. The caches that the system lists do not tell: a virtual machine is told the third
/// cache of its whole host, and one that many cores share may be free.
const LEAST_BYTES: usize = 32 << 20;

thread_local! {
    static STREAMED_FROM: Cell<usize> = const { Cell::new(LEAST_BYTES) };
}

/// Runs `f`, in which this thread writes results of `bytes` and more past the caches, to compare both ways. The bits are the same.
pub fn with_streaming_from<R>(bytes: usize, f: impl FnOnce() -> R) -> R {
    struct Restore(usize);
    impl Drop for Restore {
        fn drop(&mut self) {
            STREAMED_FROM.set(self.0);
        }
    }
    let _restore = Restore(STREAMED_FROM.replace(bytes));
    f()
}

/// Stores past the caches. Its end orders them before all that follows, other threads' reads among it.
pub struct Streaming(());

impl Streaming {
    /// Returns a writer for a result of so many bytes, if that is larger than caches are and this CPU has streaming stores.
    pub fn of(bytes: usize) -> Option<Streaming> {
        let streams =
            cfg!(target_arch = "x86_64") && bytes >= STREAMED_FROM.get() && Isa::current() >= Isa::Avx2;
        // Not `then_some`, which would make one and end it.
        streams.then(|| Streaming(()))
    }

    /// Copies elements to slices of the same length. `ahead` is called with the first element of each line, to prefetch what is read
    /// next.
    #[inline]
    pub fn copy<T: Copy>(&self, from: &[T], to: &mut [T], ahead: impl Fn(usize)) {
        assert_eq!(from.len(), to.len(), "elements and their places");
        let lines = whole_lines(to);
        to[..lines.start].copy_from_slice(&from[..lines.start]);
        to[lines.end..].copy_from_slice(&from[lines.end..]);
        let (from, to) = (&from[lines.clone()], &mut to[lines.clone()]);
        #[cfg(target_arch = "x86_64")]
        {
            let at = |line: usize| ahead(lines.start + line * line_len::<T>());
            // SAFETY: `of` found AVX2, and AVX with it; both slices have the same whole lines, and the result's are aligned.
            unsafe {
                stream_lines(from.as_ptr().cast(), to.as_mut_ptr().cast(), from.len() / line_len::<T>(), at)
            };
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = ahead;
            to.copy_from_slice(from);
        }
    }

    /// Writes `out` piece by piece. `write` takes the elements of a piece as a range, and the slice for them; `ahead` takes, some time before,
    /// the first element of each line of a piece, to prefetch what `write` will read there. It may be beyond the last element.
    pub fn write<T: Copy + Default>(
        &self,
        out: &mut [T],
        mut write: impl FnMut(Range<usize>, &mut [T]),
        ahead: impl Fn(usize),
    ) {
        let (first, piece) = (whole_lines(out).start, PIECE_BYTES / size_of::<T>());
        let mut buffer = AlignedBuffer::new(piece);
        let mut start = 0;
        while start < out.len() {
            // A first piece up to the first line, so that the others are whole lines.
            let end = if start < first { first } else { out.len().min(start + piece) };
            let buffer = &mut buffer[..end - start];
            write(start..end, buffer);
            self.copy(buffer, &mut out[start..end], |at| ahead(end + at));
            start = end;
        }
    }
}

impl Drop for Streaming {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every CPU of this architecture has SSE.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

/// Returns the number of elements of a cache line.
const fn line_len<T>() -> usize {
    CACHE_LINE_BYTES / size_of::<T>()
}

/// Returns the elements of a slice that are whole cache lines.
fn whole_lines<T>(slice: &[T]) -> Range<usize> {
    let start = slice.as_ptr().align_offset(CACHE_LINE_BYTES).min(slice.len());
    start..start + (slice.len() - start) / line_len::<T>() * line_len::<T>()
}

/// Copies lines.
///
/// # Safety
/// The CPU has AVX. `from` covers the lines; `to` is aligned to a line and covers them, and nothing else refers to them.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn stream_lines(from: *const u8, to: *mut u8, lines: usize, ahead: impl Fn(usize)) {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};
    for line in 0..lines {
        ahead(line);
        for half in [0, CACHE_LINE_BYTES / 2] {
            let at = line * CACHE_LINE_BYTES + half;
            // SAFETY: the caller's promise.
            unsafe {
                let x = _mm256_loadu_si256(from.add(at).cast());
                _mm256_stream_si256(to.add(at).cast::<__m256i>(), x);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_element_is_written_once() {
        let Some(streaming) = Streaming::of(usize::MAX) else { return println!("SKIPPED (no AVX2)") };
        for (len, skipped) in [0, 1, 15, 16, 17, 511, 512, 513, 700, 5000]
            .into_iter()
            .flat_map(|len| [(len, 0), (len, 1), (len, 13)])
        {
            let mut all = AlignedBuffer::<u32>::new(len + skipped + 1);
            let mut written = vec![0; len];
            let write = |range: Range<usize>, out: &mut [u32]| {
                assert_eq!(range.len(), out.len());
                for (i, out) in range.zip(out) {
                    written[i] += 1;
                    *out = 7 * i as u32 + 1;
                }
            };
            streaming.write(&mut all[skipped..][..len], write, |_| {});
            assert_eq!(written, vec![1; len], "{len} from {skipped} on");
            let between = (0..len as u32).map(|i| 7 * i + 1);
            let want: Vec<u32> = std::iter::repeat_n(0, skipped).chain(between).chain([0]).collect();
            assert_eq!(all[..want.len()], want, "{len} from {skipped} on");
        }
    }
}
