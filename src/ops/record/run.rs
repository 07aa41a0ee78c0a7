//! Runs an operator on local tensors: its kernel on the device that stores them, or no kernel on the meta device.

use smallvec::SmallVec;

use super::contract::{expect_count, expect_shapes};
use super::{Meta, Metas, Op, Tensors, Windows};
use crate::error::{Error, Result};
use crate::tensor::{DType, Device, Shape, Tensor, catch_no_room, short_list};

/// Returns the dtypes and shapes of an operator's results.
///
/// # Errors
/// Returns the operator's error if it refuses the operands. Refuses, in the operator's name, results whose numbers of
/// elements or bytes overflow.
pub(crate) fn infer_results(op: &dyn Op, ins: &[Meta]) -> Result<Metas> {
    let outs = op.infer(ins)?;
    for out in &outs {
        out.shape.checked_bytes(op.name(), out.dtype)?;
    }
    Ok(outs)
}

/// Runs an operator on local tensors, as a mesh of one rank would. Returns all results.
///
/// ```
/// use isoshard::ops::{Cat, eval_whole};
/// use isoshard::tensor::Tensor;
/// let (a, b) = (Tensor::from_vec(vec![1i64, 2], [2])?, Tensor::from_vec(vec![3i64], [1])?);
/// assert_eq!(eval_whole(&Cat { dim: 0 }, &[a, b])?[0].to_vec::<i64>()?, [1, 2, 3]);
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Errors
/// Returns the operator's error if it refuses the operands.
pub fn eval_whole(op: &dyn Op, ins: &[Tensor]) -> Result<Tensors> {
    let metas: Metas = short_list(ins.iter().map(Meta::of));
    let outs = infer_results(op, &metas)?;
    let mut ins: Tensors = ins.iter().cloned().collect();
    let at = Windows::whole(&metas, &outs);
    if ins.first().is_some_and(Tensor::is_meta) && !op.is_view() {
        return meta_results(&mut ins, outs.iter().map(|m| (m.dtype, m.shape.clone())));
    }
    let found = run(op, &mut ins, &at)?;
    expect_shapes(op, &at, &found)?;
    let other = found.iter().zip(&outs).position(|(x, m)| x.dtype() != m.dtype);
    if let Some(k) = other {
        let given = format!("{} for {}", found[k].notation(), outs[k]);
        let rule = format!("the kernel's result {k} has the dtype that infer states");
        return Err(Error::invalid(op.name(), rule, given, "mend Op::eval or Op::infer"));
    }
    Ok(found)
}

/// Runs an operator's kernel on the device that stores its operands.
///
/// # Errors
/// Refuses operands that are stored on different devices. Returns the kernel's error if it fails.
pub(crate) fn run(op: &dyn Op, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
    let mut outs = Tensors::new();
    run_into(op, ins, at, &mut outs)?;
    Ok(outs)
}

/// Runs an operator as [`run`] does, and writes the results to `outs`, which is empty before. A list of tensors takes as long to move as a
/// small kernel.
pub(crate) fn run_into(op: &dyn Op, ins: &mut [Tensor], at: &Windows, outs: &mut Tensors) -> Result<()> {
    let device = ins.first().map_or(Device::Cpu, Tensor::device);
    if let Some(other) = ins.iter().find(|x| x.device() != device) {
        let given = format!("{} on {device}, {} on {}", ins[0].notation(), other.notation(), other.device());
        let rule = "the operands are stored on different devices";
        return Err(Error::invalid(op.name(), rule, given, "move them to one with to_device"));
    }
    match device {
        Device::Cpu => catch_no_room(op.name(), || {
            *outs = op.eval(ins, at)?;
            Ok(())
        })?,
        Device::Cuda(_) => *outs = op.cuda(ins, at)?,
        Device::Meta if op.is_view() => *outs = op.eval(ins, at)?,
        Device::Meta => {
            let (rule, given) = ("tensors on meta have no elements to compute with", ins[0].notation());
            return Err(Error::unsupported(op.name(), rule, given, ""));
        }
    }
    expect_count(op, at, outs)
}

/// Returns results without elements, of the dtypes and shapes `outs`, for the meta device. A result takes over an
/// operand's buffer if a kernel could: it has the same dtype and shape, and no other tensor owns the buffer.
pub(crate) fn meta_results(
    ins: &mut [Tensor],
    outs: impl Iterator<Item = (DType, Shape)>,
) -> Result<Tensors> {
    let mut taken: SmallVec<[bool; 8]> = SmallVec::from_elem(false, ins.len());
    let mut one = |(dtype, shape): (DType, Shape)| {
        let fits = |x: &mut Tensor| x.dtype() == dtype && *x.shape() == shape && x.is_unique();
        match (0..ins.len()).find(|&i| !taken[i] && fits(&mut ins[i])) {
            Some(i) => {
                taken[i] = true;
                Ok(ins[i].clone())
            }
            None => Tensor::without_elements(dtype, shape),
        }
    };
    outs.map(&mut one).collect()
}
