//! Folds of the members' parts, on the device that holds them.

use bytemuck::NoUninit;

use super::gpu::Gpu;
use crate::error::{Error, Result};
use crate::tensor::{DType, FoldOrder, FoldStep, ReduceOp, Shape, Tensor, stacked};

/// The most parts and steps of one launch, as in `kernels/cuda/fold.cu`.
const PARTS: usize = 64;
const STEPS: usize = 256;
const JOIN: u8 = 254;
const EMPTY: u8 = 255;
const THREADS: u32 = 256;

#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct FoldProgram([u8; STEPS]);

/// Folds the operands in `order`, element by element, rounded to the dtype after each join, as the CPU does. Each
/// operand stacks its parts of `shape`. Several results are stacked along a new first dim.
///
/// # Errors
/// Refuses operands of several dtypes, on several devices, or of another number than the order's. Returns an error if the
/// device is out of memory or a kernel fails.
///
/// ```
/// use isoshard::tensor::{Device, FoldOrder, ReduceOp, Tensor, cuda};
///
/// if cuda::is_available() {
///     let x = Tensor::from_vec(vec![1.0f32, 2.0], [2])?.to_device(Device::Cuda(0))?;
///     let sum = cuda::fold(ReduceOp::Sum, &FoldOrder::halving(3), x.shape(), &[x.clone(), x.clone(), x.clone()])?;
///     assert_eq!(sum.to_vec::<f32>()?, [3.0, 6.0]);
/// }
/// # Ok::<(), isoshard::Error>(())
/// ```
pub fn fold(op: ReduceOp, order: &FoldOrder, shape: &Shape, operands: &[Tensor]) -> Result<Tensor> {
    let Some(first) = operands.first().filter(|_| operands.len() == order.nodes().len()) else {
        let given = format!("{} tensors for an order of {}", operands.len(), order.nodes().len());
        return Err(Error::invalid("fold", "the order is of another number of operands", given, ""));
    };
    let (gpu, dtype) = (Gpu::of(first)?, first.dtype());
    if let Some(other) = operands.iter().find(|x| (x.dtype(), x.device()) != (dtype, first.device())) {
        let given =
            format!("{} on {}, {} on {}", first.notation(), gpu.device(), other.notation(), other.device());
        return Err(Error::invalid("fold", "wants operands of one dtype on one device", given, ""));
    }
    let n = shape.numel();
    let mut parts: Vec<Vec<Tensor>> = Vec::with_capacity(operands.len());
    for (operand, &nodes) in operands.iter().zip(order.nodes()) {
        let all = operand.contiguous()?.reshape([nodes, n])?;
        parts.push((0..nodes).map(|k| all.narrow(0, k, 1)).collect::<Result<_>>()?);
    }
    let outs = order.outs_len();
    let out_shape = stacked(outs, shape);
    let used = order.steps().iter().filter(|s| matches!(s, FoldStep::Push { .. })).count();
    if used <= PARTS && order.steps().len() <= STEPS {
        return run(&gpu, dtype, op, order.steps(), order.depth(), &parts, [outs, n])?.reshape(out_shape);
    }
    // A longer order is cut into subtrees, of as many parts as a launch takes. Each is a launch, whose result is a part.
    let mut stack: Vec<Subtree> = Vec::new();
    for step in order.steps() {
        match *step {
            FoldStep::Push { operand, node } => stack.push(Subtree::of_part(parts[operand][node].clone())),
            FoldStep::Empty => stack.push(Subtree::of_part(gpu.zeros(dtype, [1, n])?)),
            FoldStep::Join => {
                let right = stack.pop().expect("checked when the order was made");
                let left = stack.pop().expect("checked when the order was made");
                stack.push(if left.parts.len() + right.parts.len() <= PARTS {
                    left.joined(right)
                } else {
                    let folded = |tree: Subtree| tree.fold(&gpu, dtype, op, n).map(Subtree::of_part);
                    folded(left)?.joined(folded(right)?)
                });
            }
        }
    }
    let folded = |tree: Subtree| tree.fold(&gpu, dtype, op, n);
    let mut all = stack.into_iter().map(folded).collect::<Result<Vec<Tensor>>>()?;
    if outs == 1 {
        return all.swap_remove(0).reshape(out_shape);
    }
    Tensor::stack(&all, shape, dtype, operands[0].device())
}

/// A part of a long order: its parts of `[1, n]`, the steps that fold them, and the most results that wait at once.
struct Subtree {
    parts: Vec<Tensor>,
    steps: Vec<FoldStep>,
    depth: usize,
}

impl Subtree {
    fn of_part(part: Tensor) -> Subtree {
        Subtree { parts: vec![part], steps: vec![FoldStep::Push { operand: 0, node: 0 }], depth: 1 }
    }

    fn joined(mut self, right: Subtree) -> Subtree {
        let before = self.parts.len();
        self.steps.extend(right.steps.into_iter().map(|step| match step {
            FoldStep::Push { operand, node } => FoldStep::Push { operand, node: before + node },
            other => other,
        }));
        self.steps.push(FoldStep::Join);
        self.parts.extend(right.parts);
        self.depth = self.depth.max(1 + right.depth);
        self
    }

    fn fold(self, gpu: &Gpu, dtype: DType, op: ReduceOp, n: usize) -> Result<Tensor> {
        if let [part] = &self.parts[..] {
            return Ok(part.clone());
        }
        run(gpu, dtype, op, &self.steps, self.depth, &[self.parts], [1, n])
    }
}

fn run(
    gpu: &Gpu,
    dtype: DType,
    op: ReduceOp,
    steps: &[FoldStep],
    depth: usize,
    parts: &[Vec<Tensor>],
    [outs, n]: [usize; 2],
) -> Result<Tensor> {
    let mut program = FoldProgram([EMPTY; STEPS]);
    let mut used: Vec<&Tensor> = Vec::with_capacity(PARTS);
    for (code, step) in program.0.iter_mut().zip(steps) {
        *code = match *step {
            FoldStep::Push { operand, node } => {
                used.push(&parts[operand][node]);
                (used.len() - 1) as u8
            }
            FoldStep::Empty => EMPTY,
            FoldStep::Join => JOIN,
        };
    }
    let mut out = gpu.uninit(dtype, [outs, n])?;
    let width = 16 / dtype.size_bytes();
    let aligned = |t: &Tensor| t.device_address().is_some_and(|at| at.is_multiple_of(16));
    let packed = n.is_multiple_of(width) && used.iter().all(|t| aligned(t)) && aligned(&out);
    let (stem, width) = if packed { ("packed", width) } else { ("fold", 1) };
    let packs = n / width;
    let launch = gpu.kernel("fold", stem, dtype)?.read_all::<PARTS>(&used).arg(program).write(&mut out);
    let launch = launch.arg(packs as u64).arg(steps.len() as u32).arg(op as u32);
    let below = depth.saturating_sub(1) * THREADS as usize * width * dtype.size_bytes();
    launch.start(packs.div_ceil(THREADS as usize) as u32, THREADS, below)?;
    Ok(out)
}
