//! One tile of a product: a few rows by a few vectors of columns, over the whole summation tree or one block of it.
//!
//! The accumulators of a leaf stay in registers. A finished leaf is joined with finished nodes on its left, which are
//! on a small stack in memory, and pushed onto it.

use std::cell::Cell;

use super::prefetch::Ahead;
use super::transpose::{TransposeFn, transpose_plain};
#[cfg(target_arch = "x86_64")]
use super::transpose::{interleave_f32, interleave_f64, transpose_f32, transpose_f64};
use super::vector::{ArrayVector, Vector};
use crate::gemm::contraction::ContractionLeaf;
use crate::isa::caches::CACHE_LINE_BYTES;
use crate::isa::simd::{Isa, prefetch_line, prefetch_line_to_write};
use crate::summation::LEAF;

/// The operands and the destination of a tile. Distances are in elements.
pub(in crate::gemm) struct Tile<T> {
    /// The first element of the first row.
    pub(in crate::gemm) a: *const T,
    /// The distances from row to row and along the contraction.
    pub(in crate::gemm) a_steps: (usize, usize),
    /// The first row of the panel of columns.
    pub(in crate::gemm) b: *const T,
    /// The distance along the contraction; columns are contiguous.
    pub(in crate::gemm) b_step: usize,
    /// The place to which a packing tile writes the columns next to each other, as it reads them; or null.
    pub(in crate::gemm) packed_b: *mut T,
    /// The leaves to compute; never empty.
    pub(in crate::gemm) leaves: *const [ContractionLeaf],
    /// The buffer for finished nodes.
    pub(in crate::gemm) stack: *mut T,
    /// The end of the tile's finished blocks, which are not joined yet.
    pub(in crate::gemm) parts: *mut T,
    /// True if the rows after the tile's are prefetched. They are read in place, in lines along the contraction.
    pub(in crate::gemm) next_rows_ahead: bool,
    /// Columns that later tiles read. Each leaf prefetches some lines of them.
    pub(in crate::gemm) ahead: Cell<Ahead>,
    /// The number of joins with finished blocks.
    pub(in crate::gemm) joins: u32,
    /// True if the node is kept among the finished blocks: it is not the whole sum.
    pub(in crate::gemm) keep: bool,
    /// The first element of the result, whose columns are contiguous.
    pub(in crate::gemm) c: *mut T,
    /// The distance from row to row of the result.
    pub(in crate::gemm) c_step: usize,
    /// The factor of the sum.
    pub(in crate::gemm) alpha: T,
    /// The matrix added to it, from the tile's first element on. Its columns are contiguous.
    pub(in crate::gemm) added: Option<Added<T>>,
}

/// A matrix that is added to sums, times a factor.
#[derive(Clone, Copy)]
pub(in crate::gemm) struct Added<T> {
    pub(in crate::gemm) factor: T,
    /// The first element. The matrix may be the result, which is read before it is written.
    pub(in crate::gemm) x: *const T,
    /// The distances from row to row and from column to column: 0 for rows or columns that are equal.
    pub(in crate::gemm) strides: (usize, usize),
}

impl<T> Added<T> {
    /// Returns the part of the matrix that begins at `(row, col)`.
    pub(in crate::gemm) fn at(self, row: usize, col: usize) -> Self {
        let offset = row.wrapping_mul(self.strides.0).wrapping_add(col.wrapping_mul(self.strides.1));
        Added { x: self.x.wrapping_add(offset), ..self }
    }
}

/// A function that computes a tile.
pub(in crate::gemm) type TileFn<T> = unsafe fn(&Tile<T>);

/// The kernels of one instruction set. Some numbers of rows have none: such rows are two tiles or more.
pub struct TileKernels<T: 'static> {
    /// The number of elements in a vector.
    pub(in crate::gemm) lanes: usize,
    /// The kernel for `rows` rows and `vectors` vectors is `tiles[rows - 1][vectors - 1]`, unless the list is empty.
    pub(in crate::gemm) tiles: &'static [&'static [TileFn<T>]],
    /// The kernel for four vectors and `rows` rows is `four_vectors[rows - 1][0]`, for AVX-512 alone.
    pub(in crate::gemm) four_vectors: &'static [&'static [TileFn<T>]],
    /// True if the kernels for the most rows can also pack the columns.
    pub(in crate::gemm) packs: bool,
    /// The number of vectors in a single wide row, and its kernel.
    pub(in crate::gemm) wide_row: Option<(usize, TileFn<T>)>,
    /// The function that packs columns that are contiguous along the contraction.
    pub(in crate::gemm) transpose: TransposeFn<T>,
    /// The function that packs a panel of rows that are contiguous along the contraction. It may write up to
    /// [`INTERLEAVED`] elements of each column, and columns are at most so far apart.
    pub(in crate::gemm) interleave: TransposeFn<T>,
}

impl<T> TileKernels<T> {
    /// Returns the number of vectors of the next panel if so many are left, with tiles of four vectors or without: as few panels as
    /// possible, and as even as possible.
    pub(in crate::gemm) fn panel_vectors(&self, left: usize, of_four: bool) -> usize {
        let panels = left.div_ceil(self.tiles[0].len());
        if of_four && !self.four_vectors.is_empty() && left.div_ceil(4) < panels {
            4
        } else {
            left.div_ceil(panels)
        }
    }

    /// Returns the most vectors of a panel.
    pub(in crate::gemm) fn most_vectors(&self) -> usize {
        if self.four_vectors.is_empty() { self.tiles[0].len() } else { 4 }
    }
}

/// The most elements that [`TileKernels::interleave`] writes for one index of the contraction.
pub(in crate::gemm) const INTERLEAVED: usize = 8;

/// An element type with tile kernels.
pub trait Tiled: Sized + 'static {
    /// Returns the kernels for `isa`, which this CPU must have.
    fn kernels(isa: Isa) -> &'static TileKernels<Self>;
}

/// Lists kernels by rows; `-` has none. Those for the most rows read packed rows as well, and pack columns if there is a kernel for that.
macro_rules! kernels {
    ($name:ident, $t:ty, $v:ty, $call:ident $unroll:literal, $transpose:expr, $interleave:expr, [$($rows:tt)*] $most:literal, $vectors:tt,
        packs: $packs:literal, four: [$($four:tt)*] $most_of_four:literal, wide: $($wide:literal)?) => {
        pub(in crate::gemm) static $name: TileKernels<$t> = TileKernels {
            lanes: <$v as Vector>::LANES,
            tiles: &[$(kernels!(@row $rows $call $v, $unroll, $most, $packs, $vectors)),*],
            four_vectors: &[$(kernels!(@row $four $call $v, $unroll, $most_of_four, $packs, [4])),*],
            packs: $packs,
            wide_row: kernels!(@wide $call $v, $($wide)?),
            transpose: $transpose,
            interleave: $interleave,
        };
    };
    (@row - $call:ident $v:ty, $unroll:literal, $most:literal, $packs:literal, $vectors:tt) => { &[] };
    (@row $rows:literal $call:ident $v:ty, $unroll:literal, $most:literal, $packs:literal, [$($vectors:literal)*]) => {
        &[$($call::<$v, $unroll, { $rows == $most }, { $packs && $rows == $most }, $rows, $vectors> as TileFn<_>),*]
    };
    (@wide $call:ident $v:ty, $wide:literal) => { Some(($wide, $call::<$v, 1, false, false, 1, $wide>)) };
    (@wide $call:ident $v:ty,) => { None };
}

/// Tiles of eight rows by three vectors are about as fast as those of twelve by two, `benches/results/2026-11-28-huge-pages.md`.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m256, __m256d, __m512, __m512d};

    use super::*;

    kernels!(AVX512_F32, f32, __m512, avx512 4, transpose_f32, interleave_f32, [1 2 3 4 5 6 7 8] 8, [1 2 3],
        packs: true, four: [- - - 4 - 6] 6, wide:);
    kernels!(AVX512_F64, f64, __m512d, avx512 4, transpose_f64, interleave_f64, [1 2 - 4 - - - 8] 8, [1 2 3],
        packs: false, four: [] 0, wide: 16);
    kernels!(AVX2_F32, f32, __m256, avx2 4, transpose_f32, interleave_f32, [1 2 3 4 5 6] 6, [1 2], packs: true, four: [] 0, wide:);
    kernels!(AVX2_F64, f64, __m256d, avx2 4, transpose_f64, interleave_f64, [1 2 - 4 - 6] 6, [1 2], packs: false, four: [] 0, wide: 8);
    // For tests, and for CPUs that emulate multiply-adds.
    kernels!(PLAIN_F32, f32, ArrayVector<f32, 4>, plain 1, transpose_plain::<f32>, transpose_plain::<f32>, [1] 1, [1],
        packs: false, four: [] 0, wide:);
    kernels!(PLAIN_F64, f64, ArrayVector<f64, 2>, plain 1, transpose_plain::<f64>, transpose_plain::<f64>, [1] 1, [1],
        packs: false, four: [] 0, wide:);
}

#[cfg(target_arch = "x86_64")]
use x86::{PLAIN_F32, PLAIN_F64};

#[cfg(not(target_arch = "x86_64"))]
kernels!(PLAIN_F32, f32, ArrayVector<f32, 4>, plain 4, transpose_plain::<f32>, transpose_plain::<f32>, [1 2 3 4] 4, [1 2],
    packs: true, four: [] 0, wide:);
#[cfg(not(target_arch = "x86_64"))]
kernels!(PLAIN_F64, f64, ArrayVector<f64, 2>, plain 4, transpose_plain::<f64>, transpose_plain::<f64>, [1 2 3 4] 4, [1 2],
    packs: false, four: [] 0, wide: 4);

macro_rules! tiled {
    ($($t:ty, $avx512:ident, $avx2:ident, $plain:ident;)*) => {$(
        impl Tiled for $t {
            fn kernels(isa: Isa) -> &'static TileKernels<$t> {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => &x86::$avx512,
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => &x86::$avx2,
                    _ => &$plain,
                }
            }
        }
    )*};
}

tiled! {
    f32, AVX512_F32, AVX2_F32, PLAIN_F32;
    f64, AVX512_F64, AVX2_F64, PLAIN_F64;
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
unsafe fn avx512<
    V: Vector,
    const UNROLL: u32,
    const FULL: bool,
    const PACKS: bool,
    const ROWS: usize,
    const VECTORS: usize,
>(
    t: &Tile<V::T>,
) {
    // SAFETY: the caller's promise.
    unsafe { tile::<V, UNROLL, FULL, PACKS, ROWS, VECTORS>(t) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<
    V: Vector,
    const UNROLL: u32,
    const FULL: bool,
    const PACKS: bool,
    const ROWS: usize,
    const VECTORS: usize,
>(
    t: &Tile<V::T>,
) {
    // SAFETY: the caller's promise.
    unsafe { tile::<V, UNROLL, FULL, PACKS, ROWS, VECTORS>(t) }
}

unsafe fn plain<
    V: Vector,
    const UNROLL: u32,
    const FULL: bool,
    const PACKS: bool,
    const ROWS: usize,
    const VECTORS: usize,
>(
    t: &Tile<V::T>,
) {
    // SAFETY: the caller's promise.
    unsafe { tile::<V, UNROLL, FULL, PACKS, ROWS, VECTORS>(t) }
}

/// The distance along the contraction at which rows are prefetched.
const PREFETCH_DISTANCE: usize = 12;
/// More lines of the result are prefetched leaf by leaf. All at once, they would take the buffers in which a core waits for lines
/// (16 in some cores), while columns wait for a buffer to come from the second cache.
const LINES_AT_ONCE: usize = 16;

/// Sets `c = alpha * sum + factor * x`, with the sum of `a * b` in the order of the tree, after joining the sum with finished blocks; or
/// keeps it among them. `UNROLL` indices are multiplied between two tests for the end. `FULL` has a loop for packed rows, `PACKS` one that
/// packs the columns; without them, such rows are read as any others, and columns are not packed.
///
/// # Safety
/// The CPU has `V`'s instruction set. `a` covers `ROWS` rows and `b` `VECTORS` vectors, both over the leaves' lengths.
/// `c` and the added matrix cover the tile, and no other code writes them; packed columns fit at their place. The
/// stack has room for the tiles of all unfinished nodes.
#[inline(always)]
unsafe fn tile<
    V: Vector,
    const UNROLL: u32,
    const FULL: bool,
    const PACKS: bool,
    const ROWS: usize,
    const VECTORS: usize,
>(
    t: &Tile<V::T>,
) {
    // SAFETY: the caller's promise, for everything below.
    unsafe {
        let (mut a, mut b, mut stack) = (t.a, t.b, t.stack);
        let leaves = &*t.leaves;
        let mut at = 0;
        let packed = FULL && t.a_steps == (1, ROWS) && t.b_step == VECTORS * V::LANES;
        let packs = PACKS && !t.packed_b.is_null();
        if t.joins > 0 || t.keep {
            let first = t.parts.wrapping_sub(t.joins as usize * ROWS * VECTORS * V::LANES);
            let line = CACHE_LINE_BYTES / size_of::<V::T>();
            for i in 0..((t.joins as usize).max(1) * ROWS * VECTORS * V::LANES).div_ceil(line) {
                prefetch_line(first.wrapping_add(i * line));
            }
        }
        let writes = leaves.len() > 2 && !t.keep;
        let (mut c, mut due) = (t.c, 0);
        if writes && ROWS * VECTORS <= LINES_AT_ONCE {
            for _ in 0..ROWS {
                c = prefetch_row_to_write::<V, VECTORS>(c, t.c_step);
            }
        }
        let mut copy = t.packed_b;
        let mut acc = first_products::<V, ROWS, VECTORS>(a, t.a_steps.0, b);
        loop {
            if packs {
                copy = copy_vectors::<V, VECTORS>(b, copy);
            }
            a = a.wrapping_add(t.a_steps.1);
            b = b.wrapping_add(t.b_step);
            let leaf = leaves[at];
            let mut left = leaf.len - 1;
            t.ahead.set(t.ahead.get().advanced());
            // A leaf's share of the result's lines.
            if writes && ROWS * VECTORS > LINES_AT_ONCE {
                due += ROWS;
                while due >= leaves.len() {
                    due -= leaves.len();
                    c = prefetch_row_to_write::<V, VECTORS>(c, t.c_step);
                }
            }
            if t.next_rows_ahead {
                let next = a.wrapping_add(t.a_steps.0.wrapping_mul(ROWS));
                for i in 0..ROWS {
                    for j in (0..LEAF).step_by(CACHE_LINE_BYTES / size_of::<V::T>()) {
                        prefetch_line(next.wrapping_add(t.a_steps.0.wrapping_mul(i)).wrapping_add(j));
                    }
                }
            }
            // Steps that the compiler knows leave little to the integer units, which share ports with the multipliers on
            // Intel's cores.
            let (steps, b_of) = (t.a_steps, (b, t.b_step));
            if packs {
                let from = (b, t.b_step, copy);
                copy = copy.wrapping_add(left as usize * VECTORS * V::LANES);
                (a, b) = pack_and_add::<V, ROWS, VECTORS>(left, a, steps, from, &mut acc);
                left = 0;
            } else if UNROLL > 1 && packed {
                let b_of = (b, VECTORS * V::LANES);
                (a, b) = add_products::<V, UNROLL, 2, ROWS, VECTORS>(left, a, (1, ROWS), b_of, &mut acc);
                left = 0;
            } else if UNROLL > 1 && steps.1 == 1 {
                (a, b) = add_products::<V, UNROLL, 0, ROWS, VECTORS>(left, a, (steps.0, 1), b_of, &mut acc);
                left = 0;
            } else if UNROLL > 1 && steps.0 == 1 {
                (a, b) = add_products::<V, UNROLL, 4, ROWS, VECTORS>(left, a, (1, steps.1), b_of, &mut acc);
                left = 0;
            }
            // Rows with any other steps.
            for _ in 0..left {
                prefetch_line(a.wrapping_add(steps.1.wrapping_mul(PREFETCH_DISTANCE)));
                multiply(a, steps.0, b, &mut acc);
                (a, b) = (a.wrapping_add(steps.1), b.wrapping_add(t.b_step));
            }
            for _ in 0..leaf.merges {
                stack = stack.sub(ROWS * VECTORS * V::LANES);
                for (i, acc) in acc.as_flattened_mut().iter_mut().enumerate() {
                    *acc = V::load(stack.add(i * V::LANES)).add(*acc);
                }
            }
            at += 1;
            if at == leaves.len() {
                break;
            }
            push_and_multiply(&mut acc, stack, a, t.a_steps.0, b);
            stack = stack.add(ROWS * VECTORS * V::LANES);
        }
        let mut parts = t.parts;
        for _ in 0..t.joins {
            parts = parts.sub(ROWS * VECTORS * V::LANES);
            for (i, acc) in acc.as_flattened_mut().iter_mut().enumerate() {
                *acc = V::load(parts.add(i * V::LANES)).add(*acc);
            }
        }
        if t.keep {
            for (i, acc) in acc.as_flattened().iter().enumerate() {
                acc.store(parts.add(i * V::LANES));
            }
            return;
        }
        finish(t, acc);
    }
}

/// Prefetches a row of vectors that will be written. Returns where the next row begins.
#[inline(always)]
fn prefetch_row_to_write<V: Vector, const VECTORS: usize>(c: *mut V::T, step: usize) -> *mut V::T {
    for j in 0..VECTORS {
        prefetch_line_to_write(c.wrapping_add(j * V::LANES));
    }
    c.wrapping_add(step)
}

/// Returns the vectors at `b`.
///
/// # Safety
/// The CPU has `V`'s instruction set; `b` covers the vectors.
#[inline(always)]
unsafe fn load_columns<V: Vector, const VECTORS: usize>(b: *const V::T) -> [V; VECTORS] {
    // SAFETY: the caller's promise, for everything below.
    unsafe {
        let mut columns = [V::sum_identity(); VECTORS];
        for (j, column) in columns.iter_mut().enumerate() {
            *column = V::load(b.add(j * V::LANES));
        }
        columns
    }
}

/// Returns the products of `ROWS` elements, `row_step` apart, and the vectors at `b`.
///
/// # Safety
/// The CPU has `V`'s instruction set; `a` covers the rows and `b` the vectors.
#[inline(always)]
unsafe fn first_products<V: Vector, const ROWS: usize, const VECTORS: usize>(
    a: *const V::T,
    row_step: usize,
    b: *const V::T,
) -> [[V; VECTORS]; ROWS] {
    // SAFETY: the caller's promise.
    unsafe {
        let columns = load_columns::<V, VECTORS>(b);
        let mut acc = [columns; ROWS];
        for (i, acc) in acc.iter_mut().enumerate() {
            let x = V::splat(*a.add(i * row_step));
            for acc in acc {
                *acc = x.mul(*acc);
            }
        }
        acc
    }
}

/// Stores a finished node at `to` and replaces it by [`first_products`]. Each vector is stored just before it is replaced:
/// a row of stores alone would keep the multipliers waiting.
///
/// # Safety
/// The conditions of [`first_products`] hold; the node fits at `to`.
#[inline(always)]
unsafe fn push_and_multiply<V: Vector, const ROWS: usize, const VECTORS: usize>(
    acc: &mut [[V; VECTORS]; ROWS],
    to: *mut V::T,
    a: *const V::T,
    row_step: usize,
    b: *const V::T,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let columns = load_columns::<V, VECTORS>(b);
        for (i, acc) in acc.iter_mut().enumerate() {
            let x = V::splat(*a.add(i * row_step));
            for (j, (acc, &column)) in acc.iter_mut().zip(&columns).enumerate() {
                acc.store(to.add((i * VECTORS + j) * V::LANES));
                *acc = x.mul(column);
            }
        }
    }
}

/// Copies the columns of one index. Returns where the next index begins in the copy.
///
/// # Safety
/// The CPU has `V`'s instruction set; `b` covers the vectors, and they fit at `to`.
#[inline(always)]
unsafe fn copy_vectors<V: Vector, const VECTORS: usize>(b: *const V::T, to: *mut V::T) -> *mut V::T {
    for j in 0..VECTORS {
        // SAFETY: the caller's promise.
        unsafe { V::load(b.add(j * V::LANES)).store(to.add(j * V::LANES)) };
    }
    to.wrapping_add(VECTORS * V::LANES)
}

/// Adds the products of `count` indices of the contraction, `UNROLL` at a time. Returns where the next index begins.
///
/// Prefetches `LINES` cache lines of rows for four indices: 2 for packed rows, of whose f32 two indices share a line, 4 for rows in place,
/// and 0 for rows that are lines along the contraction: the machine finds those by itself.
///
/// # Safety
/// The conditions of [`tile`] hold for the elements of these indices.
#[inline(always)]
unsafe fn add_products<
    V: Vector,
    const UNROLL: u32,
    const LINES: usize,
    const ROWS: usize,
    const VECTORS: usize,
>(
    count: u32,
    mut a: *const V::T,
    (row_step, step): (usize, usize),
    (mut b, b_step): (*const V::T, usize),
    acc: &mut [[V; VECTORS]; ROWS],
) -> (*const V::T, *const V::T) {
    let (a_ahead, unroll) = (step.wrapping_mul(PREFETCH_DISTANCE), UNROLL as usize);
    // SAFETY: the caller's promise, for everything below.
    unsafe {
        for _ in 0..count / UNROLL {
            for i in 0..unroll {
                let (a, b) = (a.wrapping_add(step.wrapping_mul(i)), b.wrapping_add(b_step.wrapping_mul(i)));
                if LINES > 0 && (i * LINES).is_multiple_of(4) {
                    prefetch_line(a.wrapping_add(a_ahead));
                }
                multiply(a, row_step, b, acc);
            }
            a = a.wrapping_add(step.wrapping_mul(unroll));
            b = b.wrapping_add(b_step.wrapping_mul(unroll));
        }
        for _ in 0..count % UNROLL {
            multiply(a, row_step, b, acc);
            (a, b) = (a.wrapping_add(step), b.wrapping_add(b_step));
        }
    }
    (a, b)
}

/// Packs the columns of `count` indices, and adds their products, index by index. Returns where the next index begins.
///
/// # Safety
/// The conditions of [`tile`] hold for the elements of `count` indices.
#[inline(always)]
unsafe fn pack_and_add<V: Vector, const ROWS: usize, const VECTORS: usize>(
    count: u32,
    mut a: *const V::T,
    (row_step, step): (usize, usize),
    (mut b, b_step, mut copy): (*const V::T, usize, *mut V::T),
    acc: &mut [[V; VECTORS]; ROWS],
) -> (*const V::T, *const V::T) {
    // SAFETY: the caller's promise, for everything below.
    unsafe {
        for _ in 0..count {
            prefetch_line(a.wrapping_add(step.wrapping_mul(PREFETCH_DISTANCE)));
            let ahead = b.wrapping_add(b_step.wrapping_mul(PREFETCH_DISTANCE));
            for j in 0..VECTORS {
                prefetch_line(ahead.wrapping_add(j * V::LANES));
            }
            let columns = load_columns::<V, VECTORS>(b);
            for (j, column) in columns.iter().enumerate() {
                column.store(copy.add(j * V::LANES));
            }
            multiply_columns(a, row_step, columns, acc);
            a = a.wrapping_add(step);
            b = b.wrapping_add(b_step);
            copy = copy.wrapping_add(VECTORS * V::LANES);
        }
    }
    (a, b)
}

/// Adds the products of `ROWS` elements, `row_step` apart, and the vectors at `b`.
///
/// # Safety
/// The CPU has `V`'s instruction set; `a` covers the rows and `b` the vectors.
#[inline(always)]
unsafe fn multiply<V: Vector, const ROWS: usize, const VECTORS: usize>(
    a: *const V::T,
    row_step: usize,
    b: *const V::T,
    acc: &mut [[V; VECTORS]; ROWS],
) {
    // SAFETY: the caller's promise.
    unsafe { multiply_columns(a, row_step, load_columns(b), acc) }
}

/// Adds the products of `ROWS` elements, `row_step` apart, and some vectors.
///
/// # Safety
/// The CPU has `V`'s instruction set; `a` covers the rows.
#[inline(always)]
unsafe fn multiply_columns<V: Vector, const ROWS: usize, const VECTORS: usize>(
    a: *const V::T,
    row_step: usize,
    columns: [V; VECTORS],
    acc: &mut [[V; VECTORS]; ROWS],
) {
    for (i, acc) in acc.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let x = V::splat(*a.add(i * row_step));
            for (acc, &column) in acc.iter_mut().zip(&columns) {
                *acc = x.fma(column, *acc);
            }
        }
    }
}

/// Stores a finished tile.
///
/// # Safety
/// The conditions of [`tile`] hold.
#[inline(always)]
unsafe fn finish<V: Vector, const ROWS: usize, const VECTORS: usize>(
    t: &Tile<V::T>,
    acc: [[V; VECTORS]; ROWS],
) {
    // SAFETY: the caller's promise, for everything below.
    unsafe {
        let alpha = V::splat(t.alpha);
        if let Some(added) = t.added {
            let factor = V::splat(added.factor);
            for (i, acc) in acc.iter().enumerate() {
                for (j, acc) in acc.iter().enumerate() {
                    let x = V::load(added.x.add(i * added.strides.0 + j * V::LANES));
                    alpha.mul(*acc).add(factor.mul(x)).store(t.c.add(i * t.c_step + j * V::LANES));
                }
            }
            return;
        }
        for (i, acc) in acc.iter().enumerate() {
            for (j, acc) in acc.iter().enumerate() {
                alpha.mul(*acc).store(t.c.add(i * t.c_step + j * V::LANES));
            }
        }
    }
}
