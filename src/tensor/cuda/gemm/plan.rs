//! The plan of an exact product: its tile, the operand whose rows are the tile's, and the number of parts of the
//! contraction.
//!
//! The plan changes no bit: tiles are independent of each other, and parts are nodes of the summation tree.

use crate::tensor::DType;
use crate::tensor::cuda::DeviceProperties;

/// A tile of `kernels/cuda/matmul.cuh`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Tiling {
    /// The kernel's name without the dtype.
    pub(super) stem: &'static str,
    /// The rows and columns of a tile.
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// The indices of the contraction that are in shared memory at a time.
    depth: usize,
    /// The blocks that run at once on a multiprocessor, as registers allow.
    resident: usize,
    /// The expected share of the peak arithmetic rate, beside the other tiles': an estimate. Large tiles alone have been measured
    /// (`benches/results/2026-11-27-h200.md`).
    speed: f64,
}

/// The threads of a block.
pub(super) const THREADS: usize = 128;
/// The most levels of the tree above the parts of a contraction: the joining kernel takes 2^6 parts.
const MOST_PARTS: u32 = 6;
/// The most bytes of unfinished parts.
const PARTS_BYTES: usize = 64 << 20;

impl Tiling {
    const fn new(stem: &'static str, rows: usize, cols: usize, depth: usize, cost: (usize, f64)) -> Tiling {
        Tiling { stem, rows, cols, depth, resident: cost.0, speed: cost.1 }
    }

    const LARGE: Tiling = Tiling::new("matmul_large", 128, 64, 16, (2, 0.75));
    const LARGE_HALF: Tiling = Tiling::new("matmul_large", 128, 64, 32, (2, 0.75));
    const LARGE_F64: Tiling = Tiling::new("matmul_large", 64, 64, 16, (2, 0.75));
    const SMALL: Tiling = Tiling::new("matmul_small", 32, 64, 16, (4, 0.45));
    const FEW: Tiling = Tiling::new("matmul_few", 8, 128, 32, (4, 0.25));
    const ONE: Tiling = Tiling::new("matmul_one", 1, 128, 32, (4, 0.05));

    /// Returns true if each thread loads whole groups of four elements from a panel with `outer` rows.
    pub(super) fn takes_quads(&self, outer: usize) -> bool {
        outer * self.depth >= 4 * THREADS
    }

    /// Returns the shared memory of two stages of both panels, in bytes.
    fn stage_bytes(&self, wide: usize) -> usize {
        // Each panel pads its rows by 16 bytes against bank conflicts.
        2 * self.depth * ((self.rows + self.cols) * wide + 2 * 16)
    }

    /// Returns the bytes of a slot, which holds a finished node for a whole tile.
    pub(super) fn slot_bytes(&self, wide: usize) -> usize {
        self.rows * self.cols * wide
    }
}

/// The plan of a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct GemmPlan {
    pub(super) tiling: Tiling,
    /// True if the tile's rows are the result's columns.
    pub(super) transposed: bool,
    /// The depth of the nodes that are computed as parts.
    pub(super) part_depth: u32,
    /// The slots in shared and in global memory.
    pub(super) shared_slots: usize,
    pub(super) global_slots: usize,
    /// The shared memory of a block, in bytes.
    pub(super) shared_bytes: usize,
    /// The most blocks of a launch if blocks own slots in global memory.
    pub(super) most_blocks: usize,
}

/// The extents of a batch of products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GemmExtents {
    pub(super) batch: usize,
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
}

/// Returns the plan with the least expected time. `depths` are the depth down to which the tree is complete, and the
/// depth of its deepest leaf.
pub(super) fn plan(
    properties: &DeviceProperties,
    dtype: DType,
    e: GemmExtents,
    depths: (u32, u32),
) -> GemmPlan {
    let large = match dtype {
        DType::F64 => Tiling::LARGE_F64,
        DType::F32 => Tiling::LARGE,
        _ => Tiling::LARGE_HALF,
    };
    let few = [e.m, e.n].into_iter().min().unwrap_or(0);
    let tilings = match few {
        0..=1 => &[Tiling::ONE][..],
        2..=8 => &[Tiling::FEW],
        _ => &[large, Tiling::SMALL],
    };
    let wide = if dtype == DType::F64 { 8 } else { 4 };
    let mut best = (f64::INFINITY, large, false, 0);
    for &tiling in tilings {
        for transposed in [false, true] {
            // Tiles with few rows take the operand that has few.
            if few <= 8 && transposed != (e.n < e.m) {
                continue;
            }
            for part_depth in 0..=depths.0.min(MOST_PARTS) {
                let parts_bytes = (e.batch * e.m * e.n * wide) << part_depth;
                if part_depth > 0 && parts_bytes > PARTS_BYTES {
                    break;
                }
                let time = expected(properties, &tiling, e, transposed, part_depth);
                if time < best.0 {
                    best = (time, tiling, transposed, part_depth);
                }
            }
        }
    }
    let (_, tiling, transposed, part_depth) = best;
    let slots = (depths.1 - part_depth) as usize;
    let stage_bytes = tiling.stage_bytes(wide);
    // The driver reserves 1 KiB of shared memory per block.
    let room = (properties.shared_bytes / tiling.resident).saturating_sub(1024 + stage_bytes);
    let shared_slots = slots.min(room / tiling.slot_bytes(wide));
    GemmPlan {
        tiling,
        transposed,
        part_depth,
        shared_slots,
        global_slots: slots - shared_slots,
        shared_bytes: stage_bytes + shared_slots * tiling.slot_bytes(wide),
        most_blocks: properties.multiprocessors as usize * tiling.resident,
    }
}

/// Returns the expected time, in multiply-adds of one multiprocessor.
fn expected(
    properties: &DeviceProperties,
    t: &Tiling,
    e: GemmExtents,
    transposed: bool,
    part_depth: u32,
) -> f64 {
    // The elements of parts that a multiprocessor writes and reads per multiply-add, and the cost of a launch.
    const PARTS_RATE: f64 = 0.05;
    const LAUNCH: f64 = 300_000.0;
    let (m, n) = if transposed { (e.n, e.m) } else { (e.m, e.n) };
    let processors = properties.multiprocessors.max(1) as usize;
    let blocks = (m.div_ceil(t.rows) * n.div_ceil(t.cols) * e.batch) << part_depth;
    let waves = blocks.div_ceil(processors);
    // A multiprocessor with few blocks cannot hide their latency.
    let alone = 1.4 - 0.4 * waves.min(t.resident) as f64 / t.resident as f64;
    // A stage costs its full time even if it is short.
    let len = (e.k >> part_depth).max(t.depth) as f64 + 2.0 * t.depth as f64;
    let mut time = waves as f64 * (t.rows * t.cols) as f64 * len * alone / t.speed;
    if transposed {
        time *= 1.02;
    }
    if part_depth > 0 {
        let elements = ((e.batch * m * n) << part_depth) as f64;
        time += elements / processors as f64 / PARTS_RATE + LAUNCH;
    }
    time
}

#[cfg(test)]
mod tests {
    use super::*;

    fn h100() -> DeviceProperties {
        DeviceProperties {
            name: String::new(),
            capability: (9, 0),
            multiprocessors: 132,
            shared_bytes: 232_448,
            total_bytes: 80 << 30,
        }
    }

    fn of(batch: usize, m: usize, n: usize, k: usize) -> GemmPlan {
        let depth = (k / 32).max(1).ilog2();
        plan(&h100(), DType::F32, GemmExtents { batch, m, n, k }, (depth, depth))
    }

    #[test]
    fn shapes_get_their_tiles() {
        let stem = |batch, m, n, k| of(batch, m, n, k).tiling.stem;
        assert_eq!(stem(1, 16384, 3072, 768), "matmul_large");
        assert_eq!(stem(1, 4096, 4096, 4096), "matmul_large");
        assert_eq!(stem(192, 64, 64, 32), "matmul_small");
        assert_eq!(stem(1, 8, 4096, 4096), "matmul_few");
        assert_eq!(stem(1, 1, 4096, 4096), "matmul_one");
        assert!(of(1, 4096, 1, 4096).transposed && !of(1, 1, 4096, 4096).transposed);
    }

    #[test]
    fn long_sums_of_few_tiles_are_cut() {
        assert!(of(1, 768, 768, 16384).part_depth >= 1);
        assert!(of(1, 1, 4096, 4096).part_depth >= 3);
        assert_eq!(of(1, 16384, 3072, 768).part_depth, 0);
        assert_eq!(of(1, 64, 64, 32).part_depth, 0);
    }

    #[test]
    fn as_many_blocks_fit_as_are_meant_to() {
        for (m, n, k) in [(4096, 4096, 16384), (64, 64, 4096), (8, 4096, 4096), (1, 4096, 1 << 20)] {
            let p = of(1, m, n, k);
            assert!(p.tiling.resident * (p.shared_bytes + 1024) <= 233_472, "{p:?}");
            assert!(p.shared_slots > 0 || p.global_slots == 0, "{p:?}");
        }
        assert_eq!(of(1, 4096, 4096, 4096).shared_slots, 2);
    }
}
