//! Making, moving, converting and copying tensors on any device. Each method calls the implementation of the device
//! that holds the elements.

use super::cuda::{self, Gpu};
use super::meta::CountedBytes;
use super::no_room::catch_no_room;
use super::result_places::take_place;
use super::storage::Buffer;
use super::{DType, Device, Scalar, Shape, Tensor};
use crate::error::{Error, Result};

impl Tensor {
    /// Returns a new row-major tensor on `device` with arbitrary elements, to be overwritten.
    ///
    /// # Errors
    /// Returns an error if there is no such device or if its memory does not suffice.
    pub(crate) fn uninit_on(device: Device, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        match device {
            Device::Cpu => Tensor::try_uninit(dtype, shape),
            Device::Cuda(index) => Gpu::get(index)?.uninit(dtype, shape),
            Device::Meta => Tensor::without_elements(dtype, shape),
        }
    }

    /// Returns a tensor on `device` whose elements are all zero (false for `bool`).
    ///
    /// ```
    /// use isoshard::tensor::{DType, Device, Tensor};
    /// let x = Tensor::zeros_on(Device::Cpu, DType::F32, [2, 2])?;
    /// assert_eq!((x.device(), x.to_f64_vec()), (Device::Cpu, vec![0.0; 4]));
    /// assert!(Tensor::zeros_on(Device::Cuda(9999), DType::F32, [2, 2]).is_err());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if there is no such device or if its memory does not suffice.
    pub fn zeros_on(device: Device, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        match device {
            Device::Cpu => {
                let mut out = Tensor::try_uninit(dtype, shape)?;
                out.bytes_mut().fill(0);
                Ok(out)
            }
            Device::Cuda(index) => Gpu::get(index)?.zeros(dtype, shape),
            Device::Meta => Tensor::without_elements(dtype, shape),
        }
    }

    /// Returns a tensor on `device` whose elements are all `value`, converted to `dtype`.
    ///
    /// ```
    /// use isoshard::tensor::{DType, Device, Tensor};
    /// let seven = Tensor::full_on(Device::Cpu, DType::I32, [3], 7)?;
    /// assert_eq!(seven.to_vec::<i32>()?, [7, 7, 7]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if there is no such device or if its memory does not suffice.
    pub fn full_on(
        device: Device,
        dtype: DType,
        shape: impl Into<Shape>,
        value: impl Into<Scalar>,
    ) -> Result<Tensor> {
        full_on(device, dtype, shape.into(), value.into())
    }

    /// Returns the elements on `device`: this tensor if it is there already, else a contiguous copy.
    ///
    /// A copy to a CUDA device is queued on this thread's stream. A copy from a CUDA device waits for all work on it,
    /// and returns the faults that earlier kernels have reported.
    ///
    /// ```
    /// use isoshard::tensor::{Device, Tensor};
    /// let x = Tensor::from_vec(vec![1.0f32, 2.0], [2])?;
    /// assert!(x.to_device(Device::Cpu)?.shares_storage(&x)); // no copy
    /// let shape_only = x.to_device(Device::Meta)?;
    /// assert!(shape_only.to_device(Device::Cpu).is_err()); // its elements are gone
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if there is no such device, if its memory does not suffice, if an earlier kernel has reported a
    /// fault, or if the tensor is on [`Device::Meta`] and `device` is not.
    pub fn to_device(&self, device: Device) -> Result<Tensor> {
        if self.device() == device {
            return Ok(self.clone());
        }
        match (self.device(), device) {
            (Device::Cpu, Device::Cuda(index)) => cuda::upload(&Gpu::get(index)?, &self.contiguous()?),
            (Device::Cuda(_), Device::Cpu) => catch_no_room("", || cuda::download(&self.contiguous()?)),
            (_, Device::Meta) => Tensor::without_elements(self.dtype, self.shape.clone()),
            (Device::Meta, _) => self.refuse_without_elements("to_device"),
            _ => self.to_device(Device::Cpu)?.to_device(device),
        }
    }

    /// Returns the elements in another dtype, converted as by [`cpu::cast`](super::cpu::cast), or this tensor if it has
    /// that dtype already.
    ///
    /// ```
    /// use isoshard::tensor::{DType, Tensor};
    /// let x = Tensor::from_vec(vec![1.5f32, -2.7], [2])?;
    /// assert_eq!(x.cast(DType::I32)?.to_vec::<i32>()?, [1, -2]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the device's memory does not suffice.
    pub fn cast(&self, dtype: DType) -> Result<Tensor> {
        match self.device() {
            _ if self.dtype == dtype => Ok(self.clone()),
            Device::Cpu => catch_no_room("cast", || super::cpu::cast(self, dtype)),
            Device::Cuda(_) => cuda::cast(self, dtype),
            Device::Meta => Tensor::without_elements(dtype, self.shape.clone()),
        }
    }

    /// Returns a contiguous copy with a buffer of its own, on the same device.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let x = Tensor::from_vec(vec![1u8, 2, 3, 4], [2, 2])?;
    /// let mut column = x.narrow(1, 0, 1)?.to_owned_copy()?;
    /// assert!(column.is_unique() && !column.shares_storage(&x));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the device's memory does not suffice.
    pub fn to_owned_copy(&self) -> Result<Tensor> {
        match self.device() {
            Device::Cpu => catch_no_room("", || Ok(self.packed_copy())),
            Device::Meta => Tensor::without_elements(self.dtype, self.shape.clone()),
            Device::Cuda(_) => {
                let mut out = Gpu::of(self)?.uninit(self.dtype, self.shape.clone())?;
                let strides = out.strides.clone();
                cuda::copy_block(self, &mut out, &self.shape, (0, &self.strides), (0, &strides))?;
                Ok(out)
            }
        }
    }

    /// Stacks copies of `parts` along a new first dim of extent `parts.len()`, which may be 0. Every part has dtype
    /// `dtype`, is on `device`, and has as many elements as `shape`.
    ///
    /// # Errors
    /// Returns an error if a part has another number of elements.
    pub(crate) fn stack(parts: &[Tensor], shape: &Shape, dtype: DType, device: Device) -> Result<Tensor> {
        let all: Shape = std::iter::once(parts.len()).chain(shape.iter().copied()).collect();
        let mut out = Tensor::uninit_on(device, dtype, all)?;
        for (k, part) in parts.iter().enumerate() {
            let part = part.reshape(shape.clone())?;
            part.copy_block(&mut out, shape, (0, part.strides()), (k * shape.numel(), &shape.strides()))?;
        }
        Ok(out)
    }

    /// Copies a block of extents `len` from this tensor's buffer into that of `out`. `from` and `to` are the offset of
    /// the block's first element from the tensor's first element, and the block's strides. `out` must not share its
    /// buffer.
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
            Device::Meta => return self.refuse_without_elements("copy"),
            Device::Cpu => {}
        }
        let size = self.dtype.size_bytes();
        let src = &self.data_bytes()?[from.0 * size..];
        let dst = &mut out.bytes_mut()[to.0 * size..];
        super::cpu::copy_strided(size, len, (src, from.1), (dst, to.1));
        Ok(())
    }

    /// Returns a tensor on [`Device::Meta`].
    ///
    /// # Errors
    /// Returns an error if the number of bytes overflows.
    pub(crate) fn without_elements(dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if let Some(place) = take_place(Device::Meta, dtype, &shape) {
            return Ok(Tensor::in_place(place, dtype, shape));
        }
        let bytes = shape.checked_bytes("meta", dtype)?;
        Ok(Tensor::from_buffer(Buffer::without_bytes(CountedBytes::new(bytes), bytes), dtype, shape))
    }

    /// Returns true if the tensor is on [`Device::Meta`].
    pub(crate) fn is_meta(&self) -> bool {
        self.device() == Device::Meta
    }

    /// Returns the error that names `verb` for a tensor on [`Device::Meta`].
    pub(super) fn refuse_without_elements<T>(&self, verb: &str) -> Result<T> {
        Err(Error::invalid(
            verb,
            "a tensor on meta has no elements",
            self.notation(),
            "a dry run computes shapes alone: run with data to read values",
        ))
    }
}

fn full_on(device: Device, dtype: DType, shape: Shape, value: Scalar) -> Result<Tensor> {
    match device {
        Device::Cpu => catch_no_room("", || Ok(Tensor::full(dtype, shape, value))),
        Device::Cuda(index) => {
            let mut out = Gpu::get(index)?.uninit(dtype, shape)?;
            cuda::fill(&mut out, value)?;
            Ok(out)
        }
        Device::Meta => Tensor::without_elements(dtype, shape),
    }
}
