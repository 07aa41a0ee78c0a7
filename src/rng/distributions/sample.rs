//! The vectorised loops from Philox blocks to numbers, and the driver that cuts ranges into chunks of blocks.

use std::ops::Range;

use super::counts::FromCounts;
use crate::rng::Draw;
use crate::rng::counter::index_ranges::IndexRanges;
use crate::rng::counter::philox::PhiloxBlocks;
use crate::tensor::Float;
use crate::tensor::cpu::{Isa, Kernel, Widen, dispatch, for_each_part, opaque_index, widest_of};
use crate::tensor::math::log::{ln_normal_f32, ln_normal_f64};
use crate::tensor::math::trig::{sin_cos_2pi_f32, sin_cos_2pi_f64};

/// Blocks per chunk.
const CHUNK: usize = 32;
/// Blocks per chunk at the end of a range.
const SMALL_CHUNK: usize = 8;

/// A consumer of blocks: turns them into the elements of a range.
pub(crate) trait PhiloxSink {
    /// [`Kernel::WIDEST`] of the loop.
    const WIDEST: Isa = Isa::Avx512;
    /// Elements per block.
    const PER_BLOCK: usize;
    /// Writes elements `skip..skip + len` of these blocks to elements `at..at + len` of the output.
    fn take<const N: usize>(&mut self, blocks: PhiloxBlocks<N>, skip: usize, at: usize, len: usize);
}

/// Passes the blocks of the first `len` elements at these indices, of one attempt of a draw, to `sink`.
pub(crate) fn drive<S: PhiloxSink>(draw: Draw, attempt: u16, at: IndexRanges<'_>, len: usize, sink: S) {
    let (key, high) = (draw.key(), draw.counter_high(attempt));
    dispatch(Drive { key, high, at, len, sink });
}

struct Drive<'a, S> {
    key: [u32; 2],
    high: u64,
    at: IndexRanges<'a>,
    len: usize,
    sink: S,
}

impl<S: PhiloxSink> Kernel for Drive<'_, S> {
    type Out = ();
    const WIDEST: Isa = S::WIDEST;
    #[inline(always)]
    fn run(self) {
        self.chunks::<CHUNK>();
    }
    #[inline(always)]
    fn run_small(self) {
        self.chunks::<SMALL_CHUNK>();
    }
}

impl<S: PhiloxSink> Drive<'_, S> {
    /// Consumes all elements in chunks of up to `LARGE` blocks.
    #[inline(always)]
    fn chunks<const LARGE: usize>(mut self) {
        let mut done = 0;
        while done < self.len {
            let len = self.at.first_len().min(self.len - done);
            self.stretch::<LARGE>(self.at.first(), done, len);
            self.at.advance(len);
            done += len;
        }
    }

    /// Consumes the range that starts at global index `start`: large chunks, then small ones.
    #[inline(always)]
    fn stretch<const LARGE: usize>(&mut self, start: u64, mut at: usize, len: usize) {
        let mut block = start / S::PER_BLOCK as u64;
        let mut skip = (start % S::PER_BLOCK as u64) as usize;
        let end = at + len;
        if const { LARGE > SMALL_CHUNK } {
            while skip + (end - at) > LARGE / 2 * S::PER_BLOCK {
                at += self.chunk::<LARGE>(block, skip, at, end);
                block = block.wrapping_add(LARGE as u64);
                skip = 0;
            }
        }
        while at < end {
            at += self.chunk::<SMALL_CHUNK>(block, skip, at, end);
            block = block.wrapping_add(SMALL_CHUNK as u64);
            skip = 0;
        }
    }

    #[inline(always)]
    fn chunk<const N: usize>(&mut self, block: u64, skip: usize, at: usize, end: usize) -> usize {
        let len = (end - at).min(N * S::PER_BLOCK - skip);
        self.sink.take(PhiloxBlocks::<N>::compute(self.key, block, self.high), skip, at, len);
        len
    }
}

/// A distribution as a map from blocks to numbers: four f32 per block, or two f64.
pub(crate) trait PhiloxDistribution: Copy + Sync {
    /// Computes the numbers of a 32-bit draw.
    fn numbers_f32<const N: usize>(self, blocks: &PhiloxBlocks<N>, out: &mut [[f32; 4]; N]);
    /// Computes the numbers of a 64-bit draw.
    fn numbers_f64<const N: usize>(self, blocks: &PhiloxBlocks<N>, out: &mut [[f64; 2]; N]);
}

/// A map of a number, before it is rounded to the element type.
pub(crate) trait MapNumber: Copy + Sync {
    /// In f32.
    fn f32(self, x: f32) -> f32;
    /// In f64.
    fn f64(self, x: f64) -> f64;
}

/// The identity.
#[derive(Clone, Copy)]
pub(in crate::rng) struct Unchanged;

/// `fma(x, scale, shift)`, with scale and shift rounded to the type computed in.
#[derive(Clone, Copy)]
pub(in crate::rng) struct Affine {
    pub scale: f64,
    pub shift: f64,
}

impl Affine {
    /// The identity: adding -0.0 keeps the sign of a zero.
    pub const SAME: Affine = Affine { scale: 1.0, shift: -0.0 };
}

/// Uniform on [0, 1).
#[derive(Clone, Copy)]
pub(in crate::rng) struct Uniform<A>(pub A);

/// Standard normal.
#[derive(Clone, Copy)]
pub(in crate::rng) struct Normal<A>(pub A);

impl MapNumber for Unchanged {
    #[inline(always)]
    fn f32(self, x: f32) -> f32 {
        x
    }
    #[inline(always)]
    fn f64(self, x: f64) -> f64 {
        x
    }
}

impl MapNumber for Affine {
    #[inline(always)]
    fn f32(self, x: f32) -> f32 {
        x.mul_add(self.scale as f32, self.shift as f32)
    }
    #[inline(always)]
    fn f64(self, x: f64) -> f64 {
        x.mul_add(self.scale, self.shift)
    }
}

impl<A: MapNumber> PhiloxDistribution for Uniform<A> {
    #[inline(always)]
    fn numbers_f32<const N: usize>(self, blocks: &PhiloxBlocks<N>, out: &mut [[f32; 4]; N]) {
        let out = out.as_flattened_mut().as_chunks_mut::<2>().0;
        for (out, &pair) in out.iter_mut().zip(blocks.0.as_flattened()) {
            *out = [self.0.f32(unit_f32(pair as u32)), self.0.f32(unit_f32((pair >> 32) as u32))];
        }
    }
    #[inline(always)]
    fn numbers_f64<const N: usize>(self, blocks: &PhiloxBlocks<N>, out: &mut [[f64; 2]; N]) {
        for (out, &pair) in out.as_flattened_mut().iter_mut().zip(blocks.0.as_flattened()) {
            *out = self.0.f64(unit_f64(pair));
        }
    }
}

impl<A: MapNumber> PhiloxDistribution for Normal<A> {
    #[inline(always)]
    fn numbers_f32<const N: usize>(self, blocks: &PhiloxBlocks<N>, out: &mut [[f32; 4]; N]) {
        let out = out.as_flattened_mut().as_chunks_mut::<2>().0;
        for (out, &pair) in out.iter_mut().zip(blocks.0.as_flattened()) {
            let [x, y] = box_muller_f32(pair as u32, (pair >> 32) as u32);
            *out = [self.0.f32(x), self.0.f32(y)];
        }
    }
    #[inline(always)]
    fn numbers_f64<const N: usize>(self, blocks: &PhiloxBlocks<N>, out: &mut [[f64; 2]; N]) {
        for (out, &[a, b]) in out.iter_mut().zip(&blocks.0) {
            let [x, y] = box_muller_f64(a, b);
            *out = [self.0.f64(x), self.0.f64(y)];
        }
    }
}

/// Returns the upper 24 bits as a fraction.
#[inline(always)]
fn unit_f32(word: u32) -> f32 {
    // Below 2^24 the conversion from i32 is the same, and every vector unit has it.
    (word >> 8) as i32 as f32 * (1.0 / 16_777_216.0)
}

/// Returns the upper 53 bits as a fraction.
#[inline(always)]
pub(in crate::rng) fn unit_f64(pair: u64) -> f64 {
    (pair >> 11) as f64 * (1.0 / 9_007_199_254_740_992.0)
}

/// Returns sqrt(-2 ln u) times cos and sin of 2πv; u in [2^-33, 1] is (a + 1/2) / 2^32 rounded, v is the fraction of `b`.
#[inline(always)]
pub(in crate::rng) fn box_muller_f32(a: u32, b: u32) -> [f32; 2] {
    let u = (a as f32).mul_add(1.0 / 4_294_967_296.0, 0.5 / 4_294_967_296.0);
    let radius = (-2.0 * ln_normal_f32(u)).sqrt();
    let (sin, cos) = sin_cos_2pi_f32(unit_f32(b));
    [radius * cos, radius * sin]
}

/// Returns the same in f64; u in [2^-54, 1] is (floor(a / 2^11) + 1/2) / 2^53 rounded.
#[inline(always)]
pub(in crate::rng) fn box_muller_f64(a: u64, b: u64) -> [f64; 2] {
    let half_step = 0.5 / 9_007_199_254_740_992.0;
    let u = ((a >> 11) as f64).mul_add(2.0 * half_step, half_step);
    let radius = (-2.0 * ln_normal_f64(u)).sqrt();
    let (sin, cos) = sin_cos_2pi_f64(unit_f64(b));
    [radius * cos, radius * sin]
}

/// A type that numbers are computed in: f32 or f64.
pub(crate) trait Computed: Widen<Wide = Self> {
    /// Writes the numbers at these global indices.
    fn numbers<D: PhiloxDistribution>(
        draw: Draw,
        attempt: u16,
        at: IndexRanges<'_>,
        out: &mut [Self],
        dist: D,
    );
    /// Does `then` to each of the numbers.
    fn change<A: MapNumber>(numbers: &mut [Self], map: A);
}

/// A type that gamma numbers are computed in: f32 or f64.
pub(crate) trait Gammas: Widen<Wide = Self> {
    /// Computes [`gamma`](crate::rng::gamma()) without its checks.
    fn gamma(draw: Draw, at: IndexRanges<'_>, shape: Self, scale: Self, out: &mut [Self]);
    /// Computes [`gamma_each`](crate::rng::gamma_each) without its checks.
    fn gamma_each(draw: Draw, at: IndexRanges<'_>, shape: &[Self], out: &mut [Self]);
}

macro_rules! computed {
    ($($t:ident, $sink:ident;)*) => {$(
        impl Computed for $t {
            fn numbers<D: PhiloxDistribution>(draw: Draw, attempt: u16, at: IndexRanges<'_>, out: &mut [Self], dist: D) {
                drive(draw, attempt, at, out.len(), $sink { out, dist })
            }
            fn change<A: MapNumber>(numbers: &mut [Self], map: A) {
                dispatch(Change { numbers, map });
            }
        }

        impl<A: MapNumber> Kernel for Change<'_, $t, A> {
            type Out = ();
            const WIDEST: Isa = widest_of::<$t>();
            #[inline(always)]
            fn run(self) {
                for x in self.numbers {
                    *x = self.map.$t(*x);
                }
            }
            #[inline(always)]
            fn run_small(self) {
                for i in 0..self.numbers.len() {
                    let i = opaque_index(i);
                    self.numbers[i] = self.map.$t(self.numbers[i]);
                }
            }
        }
    )*};
}

computed! {
    f32, By32;
    f64, By64;
}

struct Change<'a, T, A> {
    numbers: &'a mut [T],
    map: A,
}

/// A [`Float`] that can be sampled.
pub(crate) trait Sampled:
    Float
    + FromCounts
    + Widen<Wide: Computed + Gammas + std::ops::Mul<Output = Self::Wide> + std::ops::Div<Output = Self::Wide>>
{
    /// Writes the numbers at these global indices.
    fn sample<D: PhiloxDistribution>(
        draw: Draw,
        attempt: u16,
        at: IndexRanges<'_>,
        out: &mut [Self],
        dist: D,
    ) {
        for_each_part(out.len(), 2 * out.len(), out, |part, out| {
            in_compute_type(at.after(part.start), out, false, &mut |at, _, wide| {
                Self::Wide::numbers(draw, attempt, at, wide, dist)
            });
        });
    }
}

impl<T> Sampled for T where
    T: Float
        + FromCounts
        + Widen<Wide: Computed + Gammas + std::ops::Mul<Output = T::Wide> + std::ops::Div<Output = T::Wide>>
{
}

/// The largest number of elements in a piece.
pub(crate) const PIECE: usize = 512;

/// Writes numbers of a type that may be wider than the element type, given their global indices and their range of `out`.
pub(crate) type Write<'a, W> = &'a mut dyn FnMut(IndexRanges<'_>, Range<usize>, &mut [W]);

/// Calls `write` to write the elements in the type that they are computed in: once, or piece by piece if pieces have to be
/// rounded. If `old` is true, `write` finds the elements' old values in its slice.
pub(crate) fn in_compute_type<T: Widen>(
    at: IndexRanges<'_>,
    out: &mut [T],
    old: bool,
    write: Write<'_, T::Wide>,
) {
    if T::NATIVE {
        let all = 0..out.len();
        return T::store(out, &mut [], |wide| write(at, all, wide));
    }
    pieces(at, out, old, write);
}

/// Does the same, always piece by piece, so that a second pass over a piece finds it in the cache.
pub(in crate::rng) fn in_pieces<T: Widen>(at: IndexRanges<'_>, out: &mut [T], write: Write<'_, T::Wide>) {
    pieces(at, out, false, write);
}

fn pieces<T: Widen>(mut at: IndexRanges<'_>, out: &mut [T], old: bool, write: Write<'_, T::Wide>) {
    let mut room = [T::Wide::default(); PIECE];
    let mut done = 0;
    while done < out.len() {
        // A piece ends at the end of a block if the indices are consecutive.
        let len = (PIECE - (at.first() % 4) as usize).min(out.len() - done);
        let here = done..done + len;
        let out = &mut out[here.clone()];
        if old && !T::NATIVE {
            T::widen_into(out, &mut room[..len]);
        }
        T::store(out, &mut room, |wide| write(at, here, wide));
        at.advance(len);
        done += len;
    }
}

/// Writes f32 numbers of a 32-bit draw.
struct By32<'a, D> {
    out: &'a mut [f32],
    dist: D,
}

impl<D: PhiloxDistribution> PhiloxSink for By32<'_, D> {
    const PER_BLOCK: usize = 4;
    #[inline(always)]
    fn take<const N: usize>(&mut self, blocks: PhiloxBlocks<N>, skip: usize, at: usize, len: usize) {
        let mut numbers = [[0.0f32; 4]; N];
        self.dist.numbers_f32(&blocks, &mut numbers);
        self.out[at..at + len].copy_from_slice(&numbers.as_flattened()[skip..skip + len]);
    }
}

/// Writes f64 numbers of a 64-bit draw.
struct By64<'a, D> {
    out: &'a mut [f64],
    dist: D,
}

impl<D: PhiloxDistribution> PhiloxSink for By64<'_, D> {
    const WIDEST: Isa = Isa::Avx2;
    const PER_BLOCK: usize = 2;
    #[inline(always)]
    fn take<const N: usize>(&mut self, blocks: PhiloxBlocks<N>, skip: usize, at: usize, len: usize) {
        let mut numbers = [[0.0f64; 2]; N];
        self.dist.numbers_f64(&blocks, &mut numbers);
        self.out[at..at + len].copy_from_slice(&numbers.as_flattened()[skip..skip + len]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ends_of_the_words() {
        assert_eq!([unit_f32(0), unit_f32(!0)], [0.0, 1.0 - 2f32.powi(-24)]);
        assert_eq!([unit_f64(0), unit_f64(!0)], [0.0, 1.0 - 2f64.powi(-53)]);
        assert_eq!(box_muller_f32(!0, 5).map(f32::abs), [0.0; 2]);
        assert_eq!(box_muller_f64(!0, 5).map(f64::abs), [0.0; 2]);
        let (far, farther) = ((66.0 * 2f64.ln()).sqrt(), (108.0 * 2f64.ln()).sqrt());
        assert!((f64::from(box_muller_f32(0, 0)[0]) - far).abs() < 1e-6 && far < 6.77);
        assert!((box_muller_f64(0, 0)[0] - farther).abs() < 1e-14 && farther < 8.66);
        for a in (0..=u32::MAX).step_by(0xf_ff7f).chain(u32::MAX - 300..=u32::MAX) {
            let [x, y] = box_muller_f32(a, a.rotate_left(9));
            assert!(x.is_finite() && y.is_finite(), "word {a:#x}");
        }
    }
}
