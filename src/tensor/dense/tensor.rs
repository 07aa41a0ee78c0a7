//! The dense tensor: a typed, strided view of a shared buffer.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::tensor::cuda_device::stream::DeviceBlock;
use crate::tensor::dtype::for_dtype;
use crate::tensor::no_room::{no_room, unwind};
use crate::tensor::result_places::take_place;
use crate::tensor::shape::copy_of;
use crate::tensor::storage::{Buffer, Storage};
use crate::tensor::{DType, Device, Dims, Element, Scalar, Shape};

/// A dense tensor in memory, or on a device.
///
/// A clone and a view share the buffer. [`Tensor::make_mut`] writes in place if no other tensor shares the buffer, else
/// it copies the elements first; so a write to one tensor never changes another.
///
/// ```
/// use isoshard::tensor::Tensor;
/// let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3])?;
/// let column = x.narrow(1, 1, 1)?; // a view: no copy
/// assert_eq!(column.to_vec::<f32>()?, [2.0, 5.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
pub struct Tensor {
    pub(in crate::tensor) storage: Storage,
    pub(in crate::tensor) dtype: DType,
    pub(in crate::tensor) shape: Shape,
    pub(in crate::tensor) strides: Dims,
    /// The position of the first element in the buffer, in elements.
    pub(in crate::tensor) offset: usize,
}

impl Clone for Tensor {
    #[inline]
    fn clone(&self) -> Tensor {
        let Tensor { storage, dtype, shape, strides, offset } = self;
        let (storage, shape, strides) = (storage.clone(), shape.clone(), copy_of(strides));
        Tensor { storage, dtype: *dtype, shape, strides, offset: *offset }
    }
}

impl Tensor {
    /// Takes over `data`, in row-major order, without copying it.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let x = Tensor::from_vec(vec![1i32, 2, 3, 4, 5, 6], [2, 3])?;
    /// assert_eq!(x.select(0, 1)?.to_vec::<i32>()?, [4, 5, 6]);
    /// assert!(Tensor::from_vec(vec![1i32, 2], [3]).is_err());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses `data` whose length is not the number of elements of `shape`.
    pub fn from_vec<T: Element>(data: Vec<T>, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if shape.checked_numel("from_vec")? != data.len() {
            return Err(Error::invalid(
                "from_vec",
                "the data's length is not the shape's number of elements",
                format!("{} elements for {shape}", data.len()),
                format!("give {} elements", shape.numel()),
            ));
        }
        Ok(Tensor::from_buffer(Buffer::adopt(data), T::DTYPE, shape))
    }

    /// Copies `data`, in row-major order, into a buffer from the [pool](crate::tensor::storage).
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let primes = [2u8, 3, 5, 7];
    /// assert_eq!(Tensor::from_slice(&primes, [2, 2])?.as_bytes()?, primes);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Tensor::from_vec`].
    pub fn from_slice<T: Element>(data: &[T], shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if shape.checked_numel("from_slice")? != data.len() {
            return Err(Error::invalid(
                "from_slice",
                "the data's length is not the shape's number of elements",
                format!("{} elements for {shape}", data.len()),
                format!("give {} elements", shape.numel()),
            ));
        }
        let mut out = Tensor::try_uninit(T::DTYPE, shape)?;
        out.make_mut::<T>()?.copy_from_slice(data);
        Ok(out)
    }

    /// Returns a new row-major tensor whose elements `fill` writes.
    ///
    /// The elements that `fill` is given are arbitrary (false for `bool`); it should write every one of them.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let squares = Tensor::build([4], |out: &mut [i64]| {
    ///     out.iter_mut().zip(0..).for_each(|(x, i)| *x = i * i);
    /// });
    /// assert_eq!(squares.to_vec::<i64>()?, [0, 1, 4, 9]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Panics
    /// Panics if the elements take more than 2^63 - 1 bytes, or if there is no room for them. In programs that
    /// [`comm`](crate::comm) runs, and in an operator's kernel, both are errors instead ([`Error::OutOfMemory`]).
    /// [`Tensor::zeros_on`] returns an error everywhere.
    pub fn build<T: Element>(shape: impl Into<Shape>, fill: impl FnOnce(&mut [T])) -> Tensor {
        let mut out = Tensor::uninit(T::DTYPE, shape);
        fill(out.make_mut::<T>().expect("the dtype is T's"));
        out
    }

    /// Returns a new row-major tensor with arbitrary elements, to be overwritten. Elements of `bool`, for which most
    /// bytes are invalid, are false.
    ///
    /// # Panics
    /// Panics as [`Tensor::build`] does.
    pub(crate) fn uninit(dtype: DType, shape: impl Into<Shape>) -> Tensor {
        let shape = shape.into();
        if let Some(place) = take_place(Device::Cpu, dtype, &shape) {
            return Tensor::in_place(place, dtype, shape);
        }
        Tensor::scratch(dtype, shape)
    }

    /// Returns [`Tensor::uninit`], or an error if there is no room.
    pub(crate) fn try_uninit(dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if let Some(place) = take_place(Device::Cpu, dtype, &shape) {
            return Ok(Tensor::in_place(place, dtype, shape));
        }
        Ok(Tensor::over(Tensor::buffer(dtype, &shape)?, dtype, shape))
    }

    /// Returns [`Tensor::uninit`] for a kernel's own use: it takes no [place](crate::tensor::result_places) of a result.
    #[inline]
    pub(in crate::tensor) fn scratch(dtype: DType, shape: Shape) -> Tensor {
        match Tensor::buffer(dtype, &shape) {
            Ok(buffer) => Tensor::over(buffer, dtype, shape),
            Err(error) => unwind(error),
        }
    }

    #[inline]
    fn buffer(dtype: DType, shape: &Shape) -> Result<Buffer> {
        let bytes = shape.checked_bytes("tensor", dtype)?;
        Buffer::uninit(bytes).ok_or_else(|| no_room(format!("{dtype}{shape}"), bytes))
    }

    /// Returns the row-major tensor over a new buffer, which is long enough.
    #[inline]
    fn over(buffer: Buffer, dtype: DType, shape: Shape) -> Tensor {
        let mut out = Tensor::in_place(Arc::new(buffer), dtype, shape);
        if dtype == DType::Bool {
            out.bytes_mut().fill(0);
        }
        out
    }

    /// Returns a tensor whose elements are all zero (false for `bool`).
    ///
    /// ```
    /// use isoshard::tensor::{DType, Tensor};
    /// assert_eq!(Tensor::zeros(DType::F16, [2, 3]).to_f64_vec(), [0.0; 6]);
    /// ```
    ///
    /// # Panics
    /// Panics as [`Tensor::build`] does.
    pub fn zeros(dtype: DType, shape: impl Into<Shape>) -> Tensor {
        let mut out = Tensor::uninit(dtype, shape);
        out.bytes_mut().fill(0);
        out
    }

    /// Returns a tensor whose elements are all `value`, converted to `dtype`.
    ///
    /// ```
    /// use isoshard::tensor::{DType, Tensor};
    /// assert_eq!(Tensor::full(DType::U8, [3], 2.9).to_vec::<u8>()?, [2, 2, 2]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Panics
    /// Panics as [`Tensor::build`] does.
    pub fn full(dtype: DType, shape: impl Into<Shape>, value: impl Into<Scalar>) -> Tensor {
        full(dtype, shape.into(), value.into())
    }

    /// Returns a tensor of shape `[]` with one element.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let half = Tensor::scalar(0.5f32);
    /// assert_eq!((half.shape().len(), half.item()?), (0, 0.5));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn scalar<T: Element>(value: T) -> Tensor {
        Tensor::build([], |out: &mut [T]| out[0] = value)
    }

    /// Returns the tensor whose elements fill a buffer that nothing else holds.
    #[inline]
    pub(in crate::tensor) fn in_place(storage: Storage, dtype: DType, shape: Shape) -> Tensor {
        let strides = shape.strides();
        Tensor { storage, dtype, shape, strides, offset: 0 }
    }

    /// Returns the row-major tensor over a buffer's first bytes. Views stay inside of it.
    ///
    /// # Panics
    /// Panics if the buffer is too short for the elements.
    pub(in crate::tensor) fn from_buffer(buffer: Buffer, dtype: DType, shape: Shape) -> Tensor {
        let len_bytes = shape.numel().saturating_mul(dtype.size_bytes());
        assert!(
            len_bytes <= buffer.len_bytes(),
            "a buffer of {} bytes for {dtype}{shape}",
            buffer.len_bytes()
        );
        Tensor::in_place(Arc::new(buffer), dtype, shape)
    }

    /// Returns the device that holds the elements.
    ///
    /// ```
    /// use isoshard::tensor::{Device, Tensor};
    /// assert_eq!(Tensor::scalar(1u8).device(), Device::Cpu);
    /// ```
    #[inline]
    pub fn device(&self) -> Device {
        self.storage.device()
    }

    /// Returns the type of the elements.
    ///
    /// ```
    /// use isoshard::tensor::{DType, Tensor};
    /// assert_eq!(Tensor::scalar(true).dtype(), DType::Bool);
    /// ```
    #[inline]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the extent of each dim, outermost first.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let x = Tensor::build([4, 0, 2], |_: &mut [f32]| {});
    /// assert_eq!((x.shape()[0], x.shape().len(), x.numel()), (4, 3, 0));
    /// ```
    #[inline]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the stride of each dim, in elements; it is 0 along broadcast dims.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let x = Tensor::from_vec(vec![0u8; 6], [2, 3])?;
    /// assert_eq!(x.strides(), [3, 1]);
    /// assert_eq!(x.transpose(0, 1)?.strides(), [1, 3]);
    /// assert_eq!(x.unsqueeze(0)?.expand([5, 2, 3])?.strides(), [0, 3, 1]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// Returns dtype and shape in one line, as errors write them.
    ///
    /// ```
    /// use isoshard::tensor::{DType, Tensor};
    /// assert_eq!(Tensor::zeros(DType::F32, [64, 128]).notation(), "f32[64, 128]");
    /// ```
    pub fn notation(&self) -> String {
        format!("{}{}", self.dtype, self.shape)
    }

    /// Returns the number of elements, the product of the extents.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// assert_eq!(Tensor::from_vec(vec![0u8; 6], [2, 3])?.numel(), 6);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// Returns the number of bytes that a contiguous copy takes. The buffer itself can be smaller (if dims are
    /// broadcast) or larger (if the tensor is a view of a part).
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let row = Tensor::from_vec(vec![1.0f32, 2.0], [1, 2])?;
    /// assert_eq!((row.len_bytes(), row.expand([100, 2])?.len_bytes()), (8, 800));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn len_bytes(&self) -> usize {
        self.numel() * self.dtype.size_bytes()
    }

    /// Returns true if the elements are stored in row-major order without gaps.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let x = Tensor::from_vec(vec![0u8; 6], [2, 3])?;
    /// assert!(x.is_contiguous() && x.narrow(0, 1, 1)?.is_contiguous());
    /// assert!(!x.transpose(0, 1)?.is_contiguous() && !x.narrow(1, 0, 2)?.is_contiguous());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    #[inline]
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        for (&n, &s) in self.shape.iter().zip(&self.strides).rev() {
            if n == 0 {
                return true;
            }
            if n != 1 && s != expected {
                return false;
            }
            expected *= n;
        }
        true
    }

    /// Returns true if both tensors are views of one buffer.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let x = Tensor::from_vec(vec![0u8; 6], [2, 3])?;
    /// assert!(x.reshape([6])?.shares_storage(&x));
    /// assert!(!x.to_owned_copy()?.shares_storage(&x));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn shares_storage(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.storage, &other.storage)
    }

    /// Returns true if both tensors are the same view of one buffer.
    pub(crate) fn is_same_view(&self, other: &Tensor) -> bool {
        self.shares_storage(other)
            && (self.offset, &self.shape, &self.strides) == (other.offset, &other.shape, &other.strides)
    }

    /// Returns the device's block, or `None` if the elements are in the CPU's memory or absent.
    pub(in crate::tensor) fn device_block(&self) -> Option<&DeviceBlock> {
        self.storage.device_block()
    }

    /// Returns the address of the first element, or `None` if the tensor is not on a CUDA device.
    pub(crate) fn device_address(&self) -> Option<u64> {
        let block = self.storage.device_block()?;
        let start = self.storage.start_in_block() + self.offset * self.dtype.size_bytes();
        Some(block.address() + start as u64)
    }
}

/// A tensor without elements, `u8[0]`. It takes no memory, so a program at its limit can make one.
impl Default for Tensor {
    fn default() -> Self {
        thread_local! {
            static EMPTY: Tensor =
                Tensor::from_buffer(Buffer::adopt(Vec::<u8>::new()), DType::U8, [0].into());
        }
        EMPTY.with(Tensor::clone)
    }
}

fn full(dtype: DType, shape: Shape, value: Scalar) -> Tensor {
    if dtype == DType::I64 {
        return Tensor::build(shape, |out: &mut [i64]| out.fill(value.to_i64()));
    }
    let value = value.to_f64();
    for_dtype!(any dtype, T => Tensor::build(shape, |out: &mut [T]| out.fill(Element::from_f64(value))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_tensor_needs_no_room() {
        let run = || {
            crate::tensor::storage::set_memory_limit(0);
            assert_eq!(Tensor::default().notation(), "u8[0]");
            assert!(std::panic::catch_unwind(|| Tensor::zeros(DType::U8, [1])).is_err());
        };
        std::thread::spawn(run).join().unwrap();
    }

    #[test]
    fn sizes_without_addresses_never_get_a_smaller_buffer() {
        for dims in [&[1 << 61][..], &[1 << 32, 1 << 32], &[1 << 60, 8], &[usize::MAX]] {
            let zeros = std::panic::catch_unwind(|| Tensor::zeros(DType::F64, dims));
            assert!(zeros.is_err(), "{dims:?}");
        }
        assert_eq!(Tensor::zeros(DType::F64, [0, 1 << 61]).numel(), 0);
    }

    #[test]
    fn fresh_bools_are_bools() {
        drop(Tensor::full(DType::U8, [100], 255.0));
        let fresh = Tensor::uninit(DType::Bool, [100]);
        assert!(fresh.as_bytes().expect("contiguous").iter().all(|&b| b <= 1));
    }
}
