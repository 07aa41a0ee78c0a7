//! Tensors on any device: making, moving, converting and copying them. Each goes to the loops, kernels or accounts of the
//! device that holds the elements.

use super::cuda::{self, Gpu};
use super::meta::Absent;
use super::storage::Buffer;
use super::{DType, Device, Scalar, Shape, Tensor};
use crate::error::{Error, Result};

impl Tensor {
    /// A new row-major tensor on `device` with arbitrary contents, to be overwritten.
    ///
    /// # Errors
    /// A device that is not there or has no room.
    pub(crate) fn uninit_on(device: Device, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        match device {
            Device::Cpu => Ok(Tensor::uninit(dtype, shape)),
            Device::Cuda(index) => Gpu::get(index)?.uninit(dtype, shape),
            Device::Meta => Tensor::absent(dtype, shape),
        }
    }

    /// All zeros (false), on `device`.
    ///
    /// # Errors
    /// A device that is not there or has no room.
    pub fn zeros_on(device: Device, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        match device {
            Device::Cpu => Ok(Tensor::zeros(dtype, shape)),
            Device::Cuda(index) => Gpu::get(index)?.zeros(dtype, shape),
            Device::Meta => Tensor::absent(dtype, shape),
        }
    }

    /// All elements equal to `value`, converted to `dtype`, on `device`.
    ///
    /// # Errors
    /// A device that is not there or has no room.
    pub fn full_on(
        device: Device,
        dtype: DType,
        shape: impl Into<Shape>,
        value: impl Into<Scalar>,
    ) -> Result<Tensor> {
        match device {
            Device::Cpu => Ok(Tensor::full(dtype, shape, value)),
            Device::Cuda(index) => {
                let mut out = Gpu::get(index)?.uninit(dtype, shape)?;
                cuda::fill(&mut out, value.into().0)?;
                Ok(out)
            }
            Device::Meta => Tensor::absent(dtype, shape),
        }
    }

    /// The same elements on `device`: this tensor if it is there, else a contiguous copy. To a device the copy is in
    /// stream order; from a device this waits for all work on it, and reports what kernels have reported.
    ///
    /// # Errors
    /// A device that is not there or has no room; the faults of kernels before. Refuses to leave [`Device::Meta`].
    pub fn to_device(&self, device: Device) -> Result<Tensor> {
        if self.device() == device {
            return Ok(self.clone());
        }
        match (self.device(), device) {
            (Device::Cpu, Device::Cuda(index)) => cuda::upload(&Gpu::get(index)?, &self.contiguous()?),
            (Device::Cuda(_), Device::Cpu) => cuda::download(&self.contiguous()?),
            (_, Device::Meta) => Tensor::absent(self.dtype, self.shape.clone()),
            (Device::Meta, _) => self.refuse_absent("to_device"),
            _ => self.to_device(Device::Cpu)?.to_device(device),
        }
    }

    /// The elements in another dtype, as [`cpu::cast`](super::cpu::cast) converts them; this tensor where it is the same.
    ///
    /// # Errors
    /// A device without room.
    pub fn cast(&self, dtype: DType) -> Result<Tensor> {
        match self.device() {
            _ if self.dtype == dtype => Ok(self.clone()),
            Device::Cpu => super::cpu::cast(self, dtype),
            Device::Cuda(_) => cuda::cast(self, dtype),
            Device::Meta => Tensor::absent(dtype, self.shape.clone()),
        }
    }

    /// A contiguous copy in a buffer of its own.
    ///
    /// # Errors
    /// A device without room.
    pub fn to_owned_copy(&self) -> Result<Tensor> {
        match self.device() {
            Device::Cpu => Ok(self.packed_copy()),
            Device::Meta => Tensor::absent(self.dtype, self.shape.clone()),
            Device::Cuda(_) => {
                let mut out = Gpu::of(self)?.uninit(self.dtype, self.shape.clone())?;
                let strides = out.strides.clone();
                cuda::copy_block(self, &mut out, &self.shape, (0, &self.strides), (0, &strides))?;
                Ok(out)
            }
        }
    }

    /// Copies of `parts`, all of this dtype, on this device and with the elements of `shape`, along a new first dim; there
    /// may be none.
    ///
    /// # Errors
    /// Refuses parts that have another number of elements.
    pub(crate) fn stack(parts: &[Tensor], shape: &Shape, dtype: DType, device: Device) -> Result<Tensor> {
        let all: Shape = std::iter::once(parts.len()).chain(shape.iter().copied()).collect();
        let mut out = Tensor::uninit_on(device, dtype, all)?;
        for (k, part) in parts.iter().enumerate() {
            let part = part.reshape(shape.clone())?;
            part.copy_block(&mut out, shape, (0, part.strides()), (k * shape.numel(), &shape.strides()))?;
        }
        Ok(out)
    }

    /// Copies a block of extents `len` from this buffer into `out`'s; each place is an offset from the tensor's first
    /// element, with the block's strides there. `out` must be fresh.
    pub(crate) fn copy_block(
        &self,
        out: &mut Tensor,
        len: &[usize],
        from: (usize, &[usize]),
        to: (usize, &[usize]),
    ) -> Result<()> {
        debug_assert_eq!(self.dtype, out.dtype);
        if len.contains(&0) {
            return Ok(());
        }
        match self.device() {
            Device::Cuda(_) => return cuda::copy_block(self, out, len, from, to),
            _ if out.is_meta() => return Ok(()),
            Device::Meta => return self.refuse_absent("copy"),
            Device::Cpu => {}
        }
        let size = self.dtype.size_bytes();
        let src = &self.data_bytes()?[from.0 * size..];
        let dst = &mut out.bytes_mut()[to.0 * size..];
        super::cpu::copy_strided(size, len, (src, from.1), (dst, to.1));
        Ok(())
    }

    /// A tensor without elements.
    ///
    /// # Errors
    /// Refuses more bytes than can be counted.
    pub(crate) fn absent(dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        let bytes = shape.checked_numel("meta")?.checked_mul(dtype.size_bytes());
        let Some(bytes) = bytes.filter(|&n| n <= isize::MAX as usize) else {
            return Err(Error::invalid(
                "meta",
                "the number of bytes overflows",
                format!("{dtype}{shape}"),
                "use smaller extents",
            ));
        };
        Ok(Tensor::over(Buffer::absent(Absent::new(bytes), bytes), dtype, shape))
    }

    /// True where there are no elements.
    pub(crate) fn is_meta(&self) -> bool {
        self.device() == Device::Meta
    }

    /// Refuses to make elements of none.
    pub(super) fn refuse_absent<T>(&self, verb: &str) -> Result<T> {
        Err(Error::invalid(
            verb,
            "a tensor on meta has no elements",
            self.notation(),
            "a dry run computes shapes alone: run with data to read values",
        ))
    }
}
