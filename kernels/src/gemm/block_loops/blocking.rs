//! The sizes of a product's blocks, by the caches that the machine has.
//!
//! A panel of columns over one block of the contraction stays in the first cache while all rows of a block pass it, or
//! for tiles of three vectors in the second. These rows take half of the second cache or more, packed or in place, and stay
//! there while all panels pass. With several row blocks, packed columns are kept for all of them, in the third
//! cache. No size changes a bit of the product. The sizes for tiles of three vectors were measured with 2 MiB of second cache
//! (`benches/results/2026-11-27-xeon.md`) and with 1 MiB (`benches/results/2026-11-29-zen5.md`).

use crate::gemm::contraction::Contraction;
use crate::gemm::matrix::MatRef;
use crate::gemm::tiles::tile::TileKernels;
use crate::isa::caches::Caches;
use crate::num::real::Widen;
use crate::summation::LEAF;

/// With fewer rows than this, packing would cost more than it saves.
pub(in crate::gemm) const MIN_ROWS_TO_PACK: usize = 32;
/// Contiguous columns that are shorter than this are packed for many rows only.
const MIN_LEN_TO_PACK: usize = 128;
/// With fewer rows than this, such columns are read in place.
const MIN_ROWS_TO_PACK_SHORT: usize = 320;
/// With fewer rows than this, wide tiles read columns in place, unless their lines are a multiple of [`SHARED_SETS`] bytes
/// apart, and share few sets of a cache.
const MIN_ROWS_TO_PACK_WIDE: usize = 160;
const SHARED_SETS: usize = 1024;
/// The most indices of contiguous columns that are one block for few rows.
const MAX_LEN_IN_PLACE: usize = 512;
/// The largest blocks of more of them. Much larger ones are slower (`benches/results/2026-11-28-zen3.md`).
const BLOCK_LEN_IN_PLACE: usize = 128;
/// With fewer columns than this, rows are read in place.
const MIN_COLS_TO_PACK: usize = 100;
/// With fewer columns than this, rows that are contiguous along the contraction are read in place as well.
const MIN_COLS_TO_PACK_LINES: usize = 256;
/// The most rows in place of a block, if finished blocks of the contraction are kept.
const MAX_ROWS_IN_PLACE: usize = 768;
/// Packed columns are kept if at least so many fit.
const MIN_KEPT_COLS: usize = 256;
/// The most bytes of a panel of columns that wide tiles read beside rows in place.
const MAX_WIDE_PANEL: usize = 256 << 10;
/// The most bytes of the third cache that count: they bound the memory that a thread keeps.
const MAX_THIRD: usize = 16 << 20;

/// The sizes of a product's blocks, and the operands that are packed.
#[derive(Clone, Copy, Debug)]
pub(in crate::gemm) struct Blocking {
    /// The number of rows of a block, a multiple of a tile's.
    pub(in crate::gemm) rows: usize,
    /// The number of vectors of columns that are computed before the next ones begin.
    pub(in crate::gemm) vectors: usize,
    /// True if rows are packed.
    pub(in crate::gemm) packs_rows: bool,
    /// True if columns that could be read in place are packed.
    pub(in crate::gemm) packs_cols: bool,
    /// True if packed columns are kept for all row blocks.
    pub(in crate::gemm) keeps_cols: bool,
}

/// Returns the largest number of indices in a contraction block of the product `a @ b`.
///
/// A panel of columns of wide tiles takes a quarter of the second cache, or an eighth beside packed rows: a step of such a tile has
/// time to read it from there.
/// A narrower one takes half of the first cache if rows are packed, so that they, results and the stack have room.
/// Few rows go over columns whose lines at a large distance share few sets of a cache and many pages: so a block's panel
/// is short.
pub(in crate::gemm) fn block_len<E: Widen<Wide = T>, T>(
    a: MatRef<'_, E>,
    b: MatRef<'_, E>,
    kernels: &TileKernels<T>,
) -> usize {
    let ((m, k), n) = (a.shape(), b.shape().1);
    let panel_bytes = kernels.tiles[0].len() * kernels.lanes * size_of::<T>();
    let Caches { first, second, .. } = Caches::current();
    let packs_rows = packing_rows_pays(kernels, a.shape(), n, a.strides());
    if is_wide(kernels) {
        let share = if packs_rows { second / 8 } else { (second / 4).min(MAX_WIDE_PANEL) };
        (share / panel_bytes).max(LEAF)
    } else if packs_rows {
        (first / 2 / panel_bytes).max(LEAF)
    } else if m < MIN_ROWS_TO_PACK && b.strides().1 == 1 && k > MAX_LEN_IN_PLACE {
        BLOCK_LEN_IN_PLACE
    } else {
        long_block_len::<T>()
    }
}

/// Returns [`block_len`] for rows in place, which are read best in long lines: a line takes an eighth of the first cache,
/// and panels of columns stay in the second.
pub(in crate::gemm) fn long_block_len<T>() -> usize {
    (Caches::current().first / 8 / size_of::<T>()).max(LEAF)
}

/// Returns the fewest rows for which contiguous columns of `k` indices are packed.
pub(in crate::gemm) fn least_rows_to_pack<T>(
    kernels: &TileKernels<T>,
    k: usize,
    lines_share_sets: bool,
) -> usize {
    if k < MIN_LEN_TO_PACK {
        MIN_ROWS_TO_PACK_SHORT
    } else if is_wide(kernels) && !lines_share_sets {
        MIN_ROWS_TO_PACK_WIDE
    } else {
        MIN_ROWS_TO_PACK
    }
}

/// Returns true for tiles of three vectors of columns, which AVX-512 has registers for. They pass the rows a third as
/// often as tiles of two narrower vectors, so that lines of rows are read in place about as fast as packed ones
/// (`benches/results/2026-11-28-long-attention.md`).
fn is_wide<T>(kernels: &TileKernels<T>) -> bool {
    kernels.tiles[0].len() > 2
}

/// Returns true if every product of at least [`MIN_ROWS_TO_PACK`] rows packs contiguous columns of `len` indices whose lines
/// are so many bytes apart.
pub fn packs_lines(len: usize, apart: usize) -> bool {
    len >= MIN_LEN_TO_PACK && apart.is_multiple_of(SHARED_SETS)
}

/// Returns true if rows are faster when they are packed: wide tiles read lines in place, and other rows that take at most
/// half of the second cache.
fn packing_rows_pays<T>(
    kernels: &TileKernels<T>,
    (rows, k): (usize, usize),
    cols: usize,
    (_, step): (usize, usize),
) -> bool {
    let bytes = rows.saturating_mul(k).saturating_mul(size_of::<T>());
    if is_wide(kernels) && (step == 1 || bytes <= Caches::current().second / 2) {
        return false;
    }
    let least = if step == 1 { MIN_COLS_TO_PACK_LINES } else { MIN_COLS_TO_PACK };
    rows >= MIN_ROWS_TO_PACK && cols >= least
}

/// Returns the number of rows of the next tile of rows in place, if so many are left: one that `tiles` has. A tile of one or two rows
/// would wait for its own sums, so the last two tiles share their rows.
pub(in crate::gemm) fn tile_rows<F>(left: usize, tiles: &[&[F]]) -> usize {
    let most = tiles.len();
    let has = |rows: usize| tiles.get(rows - 1).is_some_and(|list| !list.is_empty());
    if left > most + most / 2 {
        most
    } else if has(left) {
        left
    } else {
        // Tiles of half as many rows, or of the next number.
        (left.div_ceil(2)..=left.min(most)).find(|&rows| has(rows)).expect("a tile has one row")
    }
}

/// Returns how many vectors of `vectors` are in each part if they are cut into as few parts of at most `limit` as possible, all
/// equal and multiples of `unit`, as `limit` is.
fn evenly(vectors: usize, limit: usize, unit: usize) -> usize {
    vectors.div_ceil(vectors.div_ceil(limit).max(1)).next_multiple_of(unit)
}

impl Blocking {
    /// Returns the blocks of the product `a @ b` along `tree`.
    pub(in crate::gemm) fn new<E: Widen<Wide = T>, T>(
        a: MatRef<'_, E>,
        b: MatRef<'_, E>,
        tree: &Contraction,
        kernels: &TileKernels<T>,
    ) -> Blocking {
        let ((m, k), n) = (a.shape(), b.shape().1);
        let (panel_rows, most) = (kernels.tiles.len(), kernels.tiles[0].len());
        let packs_rows = !E::NATIVE || packing_rows_pays(kernels, a.shape(), n, a.strides());
        let apart = b.strides().0.wrapping_mul(size_of::<T>());
        let least = least_rows_to_pack(kernels, k, packs_lines(k, apart));
        let packs_cols = !E::NATIVE || m >= least || b.strides().1 != 1;
        let in_parts = tree.blocks.len() > 1;
        let mut vectors = n.div_ceil(kernels.lanes).next_multiple_of(most);
        if !packs_rows && !in_parts && !is_wide(kernels) {
            let rows = m.next_multiple_of(panel_rows);
            return Blocking { rows, vectors, packs_rows, packs_cols, keeps_cols: false };
        }
        let Caches { second, third, .. } = Caches::current();
        let third = third.min(MAX_THIRD);
        // Rows that take half of the second cache, or three quarters if wide tiles read them packed.
        let room = if packs_rows && is_wide(kernels) { second / 4 * 3 } else { second / 2 };
        let fit = room / (tree.longest * size_of::<T>()).max(1);
        let largest = if packs_rows || is_wide(kernels) { fit } else { MAX_ROWS_IN_PLACE };
        let largest = (largest / panel_rows * panel_rows).max(panel_rows);
        let even = if m <= largest { m } else { m.div_ceil(m.div_ceil(largest)) };
        let rows = even.next_multiple_of(panel_rows);
        let panels =
            |bytes: usize, of: usize| bytes / (of * kernels.lanes * size_of::<T>()).max(1) / most * most;
        if in_parts {
            // An eighth of the third cache holds the finished blocks.
            vectors = evenly(vectors, panels(third / 8, tree.levels * rows).max(most), most);
        }
        let row_blocks = if is_wide(kernels) { 1 } else { 2 };
        let kept = if packs_cols && m > row_blocks * rows { panels(third / 8 * 3, k) } else { 0 };
        let keeps_cols = kept > 0 && kept * kernels.lanes >= MIN_KEPT_COLS.min(n);
        if keeps_cols {
            vectors = evenly(vectors, kept, most);
        }
        Blocking { rows, vectors, packs_rows, packs_cols, keeps_cols }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::gemm::epilogue::{LinearEpilogue, RoundingEpilogue};
    use crate::gemm::product::{Gemm, multiply};
    use crate::gemm::tiles::stored::Stored;
    use crate::gemm::tiles::tile::{TileFn, Tiled};
    use crate::isa::caches::with_caches;
    use crate::isa::simd::{Isa, with_isa};
    use crate::num::real::Real;
    use crate::summation::SplitRule;

    /// This machine's caches, usual ones of three kinds, one without a third level, and some of sizes that no CPU has, so
    /// that small products have many blocks of each kind.
    fn descriptions() -> [Caches; 10] {
        let of = |first: usize, second: usize, third: usize| Caches { first, second, third };
        [
            Caches::current(),
            Caches::USUAL,
            of(48 << 10, 2 << 20, 4 << 20),
            of(128 << 10, 4 << 20, 4 << 20),
            of(64, 64, 64),
            of(4096, 8192, 16 << 10),
            of(4096, 40_000, 8 << 20),
            of(8192, 20_000, 300_000),
            of(9000, 77_777, 1 << 20),
            of(usize::MAX >> 8, usize::MAX >> 4, usize::MAX),
        ]
    }

    /// Returns the sum of products of the indices `start..start + len` in the tree's order, by its definition.
    fn by_definition<T: Real>(pair: &impl Fn(usize) -> (T, T), start: usize, len: usize) -> T {
        if len <= LEAF {
            let (x, y) = pair(start);
            return (start + 1..start + len).fold(x * y, |sum, k| pair(k).0.mul_add(pair(k).1, sum));
        }
        let left = SplitRule::Halves.left_of(len);
        by_definition(pair, start, left) + by_definition(pair, start + left, len - left)
    }

    /// Multiplies with each description and each instruction set; `bits` shows an element of the result exactly.
    fn check<E: Stored<Wide: Gemm>>(of: impl Fn(f64) -> E, bits: impl Fn(&E) -> u64) {
        let noise = |i: usize| ((i * 7919 + 13) % 1009) as f64 * 0.01 - 5.0;
        // Miri is slow: it gets sizes that only narrow types pack rows of, and caches that split everything.
        let sizes: &[_] = match (cfg!(miri), E::NATIVE) {
            (true, true) => &[(9, 40, 11), (1, 33, 21)],
            (true, false) => &[(9, 40, 11)],
            _ => &[
                (33, 300, 260),
                (150, 67, 260),
                (7, 400, 40),
                (1, 1100, 70),
                (130, 130, 1),
                (34, 3, 33),
                (21, 600, 9),
                (170, 130, 50),
            ],
        };
        for &(m, k, n) in sizes {
            let a: Vec<E> = (0..m * k).map(|i| of(noise(i))).collect();
            let b: Vec<E> = (0..k * n).map(|i| of(noise(i + 77))).collect();
            let wide = |x: &E| E::load(std::slice::from_ref(x), &mut [E::Wide::default()])[0];
            let strides = [((1, m), (n, 1)), ((k, 1), (1, k)), ((k, 1), (n, 1)), ((1, m), (1, k))];
            for (a_strides, b_strides) in strides.into_iter().take(if cfg!(miri) { 2 } else { 4 }) {
                let at = |i: usize, j: usize, (rs, cs): (usize, usize)| i * rs + j * cs;
                let want: Vec<E> = (0..m * n)
                    .map(|i| {
                        let pair =
                            |j: usize| (wide(&a[at(i / n, j, a_strides)]), wide(&b[at(j, i % n, b_strides)]));
                        let mut rounded = [E::default()];
                        E::narrow_into(&[by_definition(&pair, 0, k)], &mut rounded);
                        rounded[0]
                    })
                    .collect();
                let (a, b) = (
                    MatRef::new(&a, (m, k), a_strides).unwrap(),
                    MatRef::new(&b, (k, n), b_strides).unwrap(),
                );
                // The narrower instruction sets take turns: other tests compare them with each other.
                let isas = Isa::available();
                let described = descriptions().into_iter().enumerate();
                for (i, caches) in described.filter(|(i, _)| !cfg!(miri) || *i == 4) {
                    let isa = isas[if i % 5 == 4 { m % isas.len() } else { isas.len() - 1 }];
                    let mut c = vec![E::default(); m * n];
                    let data = c.as_mut_ptr();
                    let product = || {
                        // SAFETY: `c` has the product's shape; a type that is its own wide type has its pointers.
                        unsafe {
                            if E::NATIVE {
                                multiply(a, b, &[k], (n, 1), |strides, _| LinearEpilogue {
                                    c: data.cast::<E::Wide>(),
                                    strides,
                                    alpha: E::Wide::of(1.0),
                                    added: None,
                                });
                            } else {
                                multiply(a, b, &[k], (n, 1), |strides, _| RoundingEpilogue {
                                    c: data,
                                    strides,
                                });
                            }
                        }
                    };
                    with_caches(caches, || with_isa(isa, product));
                    let wrong = c.iter().zip(&want).position(|(got, want)| bits(got) != bits(want));
                    assert_eq!(wrong, None, "{m}x{k}x{n} {a_strides:?} {b_strides:?} {caches:?} {isa:?}");
                }
            }
        }
    }

    #[test]
    fn bits_do_not_depend_on_the_caches() {
        check(|x| x as f32, |x| x.to_bits().into());
        check(|x| x, |x| x.to_bits());
        check(bf16::from_f64, |x| x.to_bits().into());
    }

    #[test]
    fn parts_are_as_few_as_the_limit_allows() {
        for (vectors, limits, unit) in
            (1..100).flat_map(|n| (1..20).flat_map(move |l| (1..4).map(move |u| (n, l, u))))
        {
            let limit = limits * unit;
            let part = evenly(vectors, limit, unit);
            assert!(
                part > 0 && part <= limit && part.is_multiple_of(unit),
                "{vectors} {limit} {unit}: {part}"
            );
            assert_eq!(vectors.div_ceil(part), vectors.div_ceil(limit), "{vectors} {limit} {unit}: {part}");
        }
        assert_eq!(evenly(32, 28, 1), 16);
    }

    const NO_TILE: TileFn<f32> = |_| unreachable!();

    #[test]
    fn blocks_follow_the_caches() {
        let data = vec![0.0f32; 1000 * 1024];
        let a = MatRef::new(&data, (1000, 1024), (1024, 1)).unwrap();
        let b = MatRef::new(&data, (1024, 1000), (1000, 1)).unwrap();
        // Four lanes of plain arrays, in tiles of four rows by two vectors, which are not called.
        static TILES: [&[TileFn<f32>]; 4] = [&[NO_TILE; 2]; 4];
        let kernels = &TileKernels { tiles: &TILES, ..*f32::kernels(Isa::Baseline) };
        let of = |caches| {
            with_caches(caches, || {
                let len = block_len(a, b, kernels);
                let tree = Contraction::new(&[1024], len);
                let blocking = Blocking::new(a, b, &tree, kernels);
                (tree.longest, blocking.rows, blocking.vectors * kernels.lanes, blocking.keeps_cols)
            })
        };
        let zen3 = Caches { first: 32 << 10, second: 512 << 10, third: 16 << 20 };
        // Four rows by eight columns: 512 indices of a panel in 16 KB, and 128 rows of 512 in 256 KB.
        assert_eq!(of(zen3), (512, 128, 1000, true));
        assert_eq!(of(Caches { first: 16 << 10, ..zen3 }), (256, 252, 1000, true));
        assert_eq!(of(Caches { third: 512 << 10, ..zen3 }), (512, 128, 128, false));
        assert_eq!(of(Caches { first: 64, second: 64, third: 64 }), (32, 4, 8, false));
    }

    #[test]
    fn wide_tiles_block_rows_in_place_by_the_second_cache() {
        let data = vec![0.0f32; 1000 * 1024];
        // Four lanes of plain arrays, in tiles of eight rows by three vectors, which are not called.
        static TILES: [&[TileFn<f32>]; 8] = [&[NO_TILE; 3]; 8];
        let wide = TileKernels { tiles: &TILES, ..*f32::kernels(Isa::Baseline) };
        let xeon = Caches { first: 48 << 10, second: 2 << 20, third: 240 << 20 };
        let of = |(m, k, n): (usize, usize, usize), a_strides, caches| {
            with_caches(caches, || {
                let a = MatRef::new(&data, (m, k), a_strides).unwrap();
                let b = MatRef::new(&data, (k, n), (n, 1)).unwrap();
                let tree = Contraction::new(&[k], block_len(a, b, &wide));
                let blocking = Blocking::new(a, b, &tree, &wide);
                (tree.longest, blocking.rows, blocking.packs_rows, blocking.packs_cols, blocking.keeps_cols)
            })
        };
        // A panel of 5,461 indices takes 256 KB, and 256 rows of 1,024 take 1 MB.
        assert_eq!(of((1000, 1024, 1000), (1024, 1), xeon), (1024, 256, false, true, true));
        // A second cache of a sixteenth: 682 indices take a quarter, so halves, and 32 rows a half.
        assert_eq!(
            of((1000, 1024, 1000), (1024, 1), Caches { second: 128 << 10, ..xeon }),
            (512, 32, false, true, true)
        );
        // Rows across the contraction are packed if they take more than half of the second cache, and then take three quarters.
        assert_eq!(of((128, 768, 384), (1, 128), xeon), (768, 128, false, false, false));
        assert_eq!(of((512, 768, 128), (1, 512), xeon), (768, 512, true, true, false));
        // Two blocks of rows share packed columns.
        assert_eq!(
            of((512, 768, 128), (1, 512), Caches { second: 1 << 20, ..xeon }),
            (768, 256, true, true, true)
        );
        // Lines that are a multiple of 1 KiB apart are packed for fewer rows.
        assert_eq!(of((128, 768, 512), (1, 128), xeon), (768, 128, false, true, false));
    }
}
