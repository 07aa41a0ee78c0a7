//! Exact products, by this crate's kernels, with the bits of the CPU.

use std::cell::RefCell;
use std::rc::Rc;

use bytemuck::NoUninit;

use super::plan::{self, GemmExtents, GemmPlan, THREADS};
use super::tree::Tree;
use crate::base::BoundedCache;
use crate::error::{Error, Result};
use crate::tensor::cuda::Gpu;
use crate::tensor::{DType, Device, Dims, Tensor};

/// An operand as its tiles are loaded; mirrors `struct PanelOperand` of `kernels/cuda/matmul_panel.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, NoUninit)]
struct PanelOperand {
    outer: i64,
    along: i64,
    batch: i64,
    mode: u32,
    extent: u32,
}

/// The arguments of a launch; mirrors `struct GemmJob` of `kernels/cuda/matmul_tile.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, NoUninit)]
struct GemmJob {
    left: PanelOperand,
    right: PanelOperand,
    c_row: i64,
    c_col: i64,
    c_batch: i64,
    c_part: i64,
    rows_tiles: u32,
    cols_tiles: u32,
    batch: u32,
    parts: u32,
    items: u32,
    part_depth: u32,
    deepest: u32,
    shared_slots: u32,
    global_slots: u32,
    whole_vectors: u32,
}

/// The plan and tables of a product, which depend on its sizes alone; each thread keeps them.
struct PreparedGemm {
    plan: GemmPlan,
    deepest: u32,
    /// True if the length of every leaf is a multiple of four.
    in_fours: bool,
    /// The tree's leaves and parts, as kernels read them.
    leaves: Tensor,
    parts: Tensor,
    parts_len: usize,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct GemmKey {
    device: Device,
    dtype: DType,
    extents: GemmExtents,
    tree: Dims,
}

/// The most shapes that a thread remembers.
const KEPT: usize = 512;

/// Computes `out = a @ b` for `a` of `[batch, m, k]` and `b` of `[batch, k, n]` with any strides. Neither is empty;
/// `out` is fresh.
pub(super) fn multiply(
    verb: &str,
    gpu: &Gpu,
    (a, b): (&Tensor, &Tensor),
    tree: &[usize],
    out: &mut Tensor,
) -> Result<()> {
    let (batch, m, k, n) = (a.shape()[0], a.shape()[1], a.shape()[2], b.shape()[2]);
    let of = prepared(gpu, a.dtype(), GemmExtents { batch, m, n, k }, tree)?;
    let plan = &of.plan;
    let tiling = &plan.tiling;
    let (left, right) = if plan.transposed { ((b, 2, 1), (a, 1, 2)) } else { ((a, 1, 2), (b, 2, 1)) };
    let (rows, cols) = if plan.transposed { (n, m) } else { (m, n) };
    let [rows_tiles, cols_tiles] = [rows.div_ceil(tiling.rows), cols.div_ceil(tiling.cols)];
    let items = [rows_tiles, cols_tiles, batch, of.parts_len].iter().try_fold(1u32, |all, &n| {
        // The grid-stride step of the last block must not overflow either.
        all.checked_mul(u32::try_from(n).ok()?).filter(|&all| all < 1 << 31)
    });
    let Some(items) = items.filter(|_| m.max(n).max(k) < 1 << 31) else {
        let given = format!("{}, {}", a.notation(), b.notation());
        return Err(Error::unsupported(
            verb,
            "a product of 2^31 indices or tiles or more is not supported",
            given,
            "multiply parts of it",
        ));
    };
    let total = batch * m * n;
    let wide_dtype = if a.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let vector = 16 / wide_dtype.size_bytes();
    let job = GemmJob {
        left: panel_operand(left, tiling.rows, &of),
        right: panel_operand(right, tiling.cols, &of),
        c_row: if plan.transposed { 1 } else { n as i64 },
        c_col: if plan.transposed { n as i64 } else { 1 },
        c_batch: (m * n) as i64,
        c_part: total as i64,
        rows_tiles: rows_tiles as u32,
        cols_tiles: cols_tiles as u32,
        batch: batch as u32,
        parts: of.parts_len as u32,
        items,
        part_depth: plan.part_depth,
        deepest: of.deepest,
        shared_slots: plan.shared_slots as u32,
        global_slots: plan.global_slots as u32,
        whole_vectors: u32::from(!plan.transposed && n.is_multiple_of(vector)),
    };
    let in_parts = of.parts_len > 1;
    let mut sums = in_parts.then(|| gpu.uninit(wide_dtype, [of.parts_len, total])).transpose()?;
    let blocks =
        if plan.global_slots > 0 { plan.most_blocks.min(items as usize) } else { items as usize } as u32;
    let far_len = blocks as usize * plan.global_slots * tiling.rows * tiling.cols;
    let mut far = (far_len > 0).then(|| gpu.uninit(wide_dtype, [far_len])).transpose()?;
    gpu.kernel(file(a.dtype()), tiling.stem, a.dtype())?
        .read(left.0)
        .read(right.0)
        .write(out)
        .write_or_null(sums.as_mut())
        .write_or_null(far.as_mut())
        .read(&of.leaves)
        .read(&of.parts)
        .arg(job)
        .start(blocks, THREADS as u32, plan.shared_bytes)?;
    let Some(sums) = sums else { return Ok(()) };
    let blocks = total.div_ceil(256).min(8 * gpu.multiprocessors() as usize);
    gpu.kernel(file(a.dtype()), "matmul_join", a.dtype())?
        .read(&sums)
        .write(out)
        .arg(total as u64)
        .arg(plan.part_depth)
        .start(blocks as u32, 256, 0)
}

/// Returns the dtype's file. Each is compiled when its dtype is first multiplied.
fn file(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "matmul_f64",
        DType::F16 => "matmul_f16",
        DType::BF16 => "matmul_bf16",
        _ => "matmul_f32",
    }
}

/// Describes an operand by its outer dim and the contraction's dim; `tile` is the tile's extent along the outer one.
fn panel_operand((x, outer, along): (&Tensor, usize, usize), tile: usize, of: &PreparedGemm) -> PanelOperand {
    // The stride of an extent of 1 is never used, so it must not count for the alignment.
    let stride = |d: usize| if x.shape()[d] == 1 { 0 } else { x.strides()[d] };
    let extent = x.shape()[outer];
    let (outer, along, batch) = (stride(outer), stride(along), stride(0));
    let four = (4 * x.dtype().size_bytes()).min(16) as u64;
    let aligned = x.device_address().is_some_and(|at| at.is_multiple_of(four)) && batch.is_multiple_of(4);
    let quads = aligned && of.plan.tiling.takes_quads(tile);
    let mode = if quads && along == 1 && of.in_fours && outer.is_multiple_of(4) {
        PanelLoad::Along4
    } else if quads && outer == 1 && extent.is_multiple_of(4) && along.is_multiple_of(4) {
        PanelLoad::Outer4
    } else if along != 0 && (outer == 0 || along < outer) {
        PanelLoad::Along
    } else {
        PanelLoad::Outer
    };
    PanelOperand {
        outer: outer as i64,
        along: along as i64,
        batch: batch as i64,
        mode: mode as u32,
        extent: extent as u32,
    }
}

/// The order and width of a panel's loads; mirrors `enum PanelLoad` of `kernels/cuda/matmul_panel.cuh`.
#[derive(Clone, Copy)]
enum PanelLoad {
    Along4 = 0,
    Outer4 = 1,
    Along = 2,
    Outer = 3,
}

fn prepared(gpu: &Gpu, dtype: DType, extents: GemmExtents, tree: &[usize]) -> Result<Rc<PreparedGemm>> {
    thread_local!(static HERE: RefCell<BoundedCache<GemmKey, Rc<PreparedGemm>, KEPT>> = RefCell::default());
    let key = GemmKey { device: gpu.device(), dtype, extents, tree: Dims::from_slice(tree) };
    if let Some(found) = HERE.with_borrow(|here| here.get(&key).cloned()) {
        return Ok(found);
    }
    let made = Rc::new(prepare(gpu, dtype, extents, tree)?);
    Ok(HERE.with_borrow_mut(|here| here.get_or_insert_with(key, || made).clone()))
}

fn prepare(gpu: &Gpu, dtype: DType, extents: GemmExtents, tree: &[usize]) -> Result<PreparedGemm> {
    let tree = Tree::new(tree);
    let properties = gpu.stream().device.driver.properties();
    let plan = plan::plan(properties, dtype, extents, (tree.full_depth(), tree.deepest()));
    let leaf = |l: &super::tree::ContractionLeaf| (l.len | l.merges << 8 | l.depth << 16) as i32;
    let leaves: Vec<i32> = tree.leaves.iter().map(leaf).collect();
    let parts = tree.parts(plan.part_depth);
    let words =
        |p: &super::tree::SeparateNode| [p.leaves.0 as i64 | (p.leaves.1 as i64) << 32, p.start as i64];
    let words: Vec<i64> = parts.iter().flat_map(words).collect();
    let upload = |x: Tensor| x.to_device(gpu.device());
    let (leaves_len, words_len) = (leaves.len(), words.len());
    Ok(PreparedGemm {
        plan,
        deepest: tree.deepest(),
        in_fours: tree.is_in_groups_of(4),
        leaves: upload(Tensor::from_vec(leaves, [leaves_len])?)?,
        parts: upload(Tensor::from_vec(words, [words_len])?)?,
        parts_len: parts.len(),
    })
}
