//! Pointwise kernels: a formula over operands with any strides. The result is a fresh tensor, or overwrites an
//! operand that nothing else holds.
//!
//! Missing: results in the layout of transposed operands, which are copied to row-major order first.

use bytemuck::NoUninit;
use smallvec::SmallVec;

use super::gpu::Gpu;
use super::walk::{INDICES, LAYOUTS, MergedLayouts, StridedLayout};
use crate::error::Result;
use crate::tensor::cuda_device::sources::KernelSource;
use crate::tensor::{DType, Tensor};

/// The kernels that compute a formula. Made by [`formula!`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct FormulaKernels {
    pub source: KernelSource,
    pub contiguous: &'static str,
    pub strided: &'static str,
}

/// Makes the [`FormulaKernels`] of a name, from a given source or from the file of `kernels/cuda/` of that name.
macro_rules! formula {
    ($file:literal) => {
        $crate::tensor::cuda::formula!($file, $file)
    };
    ($file:literal, $name:literal) => {
        $crate::tensor::cuda::formula!(
            in $crate::tensor::cuda::KernelSource { name: $file, parts: &[] }, $name
        )
    };
    (in $source:expr, $name:expr) => {
        $crate::tensor::cuda::FormulaKernels {
            source: $source,
            contiguous: $name,
            strided: concat!($name, "_strided"),
        }
    };
}
pub(crate) use formula;

/// Returns `formula` of operands of equal shapes, in the dtype of the last one.
///
/// # Errors
/// Returns an error if the device is out of memory or a kernel fails.
pub(crate) fn map(formula: FormulaKernels, ins: &mut [Tensor], attributes: &[f64]) -> Result<Tensor> {
    let dtype = last_dtype(ins);
    compute(formula, dtype, ins, dtype, attributes)
}

/// Returns `formula` as [`map`] does, with a result of another dtype.
///
/// # Errors
/// Returns the errors of [`map`].
pub(crate) fn map_to(formula: FormulaKernels, ins: &mut [Tensor], dtype: DType) -> Result<Tensor> {
    compute(formula, last_dtype(ins), ins, dtype, &[])
}

/// Runs the entry for `key` of `formula`, with a result of `dtype`. The result overwrites the first operand of that
/// dtype that nothing else holds, if there is one.
pub(super) fn compute(
    formula: FormulaKernels,
    key: DType,
    ins: &mut [Tensor],
    dtype: DType,
    attributes: &[f64],
) -> Result<Tensor> {
    let gpu = Gpu::of(&ins[0])?;
    let shape = ins[0].shape().clone();
    debug_assert!(ins.iter().all(|x| x.shape() == &shape), "{formula:?}: the operands' shapes differ");
    if shape.numel() == 0 {
        return gpu.uninit_bools(dtype, shape);
    }
    let mut nest = None;
    if !ins.iter().all(Tensor::is_contiguous) {
        let found = merge_layouts(ins);
        let transposed: SmallVec<[usize; LAYOUTS]> =
            (0..ins.len()).filter(|&k| found.is_transposed(k + 1)).collect();
        for &k in &transposed {
            ins[k] = ins[k].to_owned_copy()?;
        }
        nest = Some(if transposed.is_empty() { found } else { merge_layouts(ins) })
            .filter(|nest| !nest.is_flat());
    }
    let own = (0..ins.len()).find(|&k| ins[k].dtype() == dtype && ins[k].is_unique());
    let fresh = if own.is_none() { Some(gpu.uninit_bools(dtype, shape)?) } else { None };
    let mut attributes_pair = [0.0; 2];
    attributes_pair[..attributes.len()].copy_from_slice(attributes);
    let launch = MapLaunch { gpu: &gpu, formula, key, ins, own, fresh, attributes: attributes_pair };
    launch.run(nest)
}

/// The threads of a block.
pub(super) const THREADS: u32 = 256;
/// The packs that a thread computes.
const PACKS: usize = 2;
/// The bytes of a pack: the elements that a thread loads at once.
pub(super) const PACK_BYTES: usize = 16;

/// Returns the number of blocks that compute `len` packs.
pub(super) fn blocks(len: usize) -> u32 {
    len.div_ceil(THREADS as usize * PACKS) as u32
}

fn last_dtype(ins: &[Tensor]) -> DType {
    ins.last().expect("a formula has operands").dtype()
}

/// Merges the layouts of a contiguous result and of the operands.
fn merge_layouts(ins: &[Tensor]) -> MergedLayouts {
    let own = ins[0].shape().strides();
    let all = std::iter::once(&own[..]).chain(ins.iter().map(Tensor::strides));
    let layouts: SmallVec<[StridedLayout; LAYOUTS]> =
        all.map(|strides| StridedLayout { start: 0, strides }).collect();
    MergedLayouts::new(ins[0].shape(), &layouts)
}

/// The launches of one formula.
struct MapLaunch<'a> {
    gpu: &'a Gpu,
    formula: FormulaKernels,
    key: DType,
    ins: &'a mut [Tensor],
    /// The operand that the result overwrites, if there is one.
    own: Option<usize>,
    /// The result, if no operand is overwritten.
    fresh: Option<Tensor>,
    attributes: [f64; 2],
}

impl MapLaunch<'_> {
    /// Launches over `nest`, or over all elements in order if it is `None`: then all tensors are contiguous.
    fn run(mut self, nest: Option<MergedLayouts>) -> Result<Tensor> {
        let widest = self.ins.iter().chain(&self.fresh).map(|x| x.dtype().size_bytes()).max();
        let width = PACK_BYTES / widest.expect("a formula has operands");
        match nest {
            None => {
                let n = self.ins[0].numel();
                self.launch(self.formula.contiguous, n as u64, blocks(n.div_ceil(width)))?;
            }
            Some(mut nest) => {
                nest.pack(width, |k| self.offset_in_pack(k, width));
                nest.walks(INDICES, &mut |walk| {
                    self.launch(self.formula.strided, walk, blocks(walk.len as usize))
                })?;
            }
        }
        Ok(match self.own {
            Some(k) => self.ins[k].clone(),
            None => self.fresh.expect("the result is fresh or an operand"),
        })
    }

    fn launch(&mut self, stem: &'static str, extent: impl NoUninit, blocks: u32) -> Result<()> {
        let mut launch = self.gpu.kernel(self.formula.source, stem, self.key)?;
        for x in self.ins.iter() {
            launch = launch.read(x);
        }
        let out = match self.own {
            Some(k) => &mut self.ins[k],
            None => self.fresh.as_mut().expect("the result is fresh or an operand"),
        };
        launch.write(out).arg(extent).arg(self.attributes).start(blocks, THREADS, 0)
    }

    /// Returns the offset of the first element of the result (0) or of an operand from an address that is aligned to
    /// a pack.
    fn offset_in_pack(&self, k: usize, width: usize) -> usize {
        let x = match (k, self.own) {
            (0, None) => self.fresh.as_ref().expect("the result is fresh or an operand"),
            (0, Some(own)) => &self.ins[own],
            (k, _) => &self.ins[k - 1],
        };
        offset_in_pack(x, width)
    }
}

/// Returns the offset of a tensor's first element from an address that is aligned to `width` elements.
pub(super) fn offset_in_pack(x: &Tensor, width: usize) -> usize {
    let size = x.dtype().size_bytes();
    let at = x.device_address().expect("the operands lie on a device") as usize;
    at % (width * size) / size
}
