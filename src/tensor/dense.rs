//! The tensor itself: a typed, strided view of a shared buffer.

use std::sync::Arc;

use super::cuda::DeviceBlock;
use super::dtype::for_dtype;
use super::storage::{Buffer, Storage};
use super::{DType, Device, Dims, Element, Scalar, Shape};
use crate::error::{Error, Result};

/// A dense tensor in memory, or on a device.
///
/// Cloning shares the buffer. [`Tensor::make_mut`] writes in place where nobody shares it, and copies first where
/// somebody does, so a clone never sees another one's writes.
///
/// ```
/// use isoshard::tensor::Tensor;
/// let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [2, 3])?;
/// let column = x.narrow(1, 1, 1)?; // a view: no copy
/// assert_eq!(column.to_vec::<f32>()?, [2.0, 5.0]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone)]
pub struct Tensor {
    pub(super) storage: Storage,
    pub(super) dtype: DType,
    pub(super) shape: Shape,
    pub(super) strides: Dims,
    /// In elements.
    pub(super) offset: usize,
}

impl Tensor {
    /// A tensor over `data`, row-major, without copying.
    ///
    /// # Errors
    /// Refuses a length that is not the shape's number of elements.
    pub fn from_vec<T: Element>(data: Vec<T>, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if shape.checked_numel("from_vec")? != data.len() {
            return Err(Error::invalid(
                "from_vec",
                "the shape does not hold the data",
                format!("{} elements for {shape}", data.len()),
                format!("give {} elements", shape.numel()),
            ));
        }
        Ok(Tensor::over(Buffer::adopt(data), T::DTYPE, shape))
    }

    /// A copy of `data`, row-major, in pool memory.
    ///
    /// # Errors
    /// As [`Tensor::from_vec`].
    pub fn from_slice<T: Element>(data: &[T], shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if shape.checked_numel("from_slice")? != data.len() {
            return Err(Error::invalid(
                "from_slice",
                "the shape does not hold the data",
                format!("{} elements for {shape}", data.len()),
                format!("give {} elements", shape.numel()),
            ));
        }
        Ok(Tensor::build(shape, |out: &mut [T]| out.copy_from_slice(data)))
    }

    /// A new row-major tensor that `fill` writes.
    ///
    /// `fill` gets arbitrary uninit values (for `bool`, false) and should write every element.
    ///
    /// # Panics
    /// Where the elements take more than 2^63 - 1 bytes.
    pub fn build<T: Element>(shape: impl Into<Shape>, fill: impl FnOnce(&mut [T])) -> Tensor {
        let mut out = Tensor::uninit(T::DTYPE, shape);
        fill(out.make_mut::<T>().expect("the dtype is T's"));
        out
    }

    /// A new row-major tensor with arbitrary contents (for `bool`, whose uninit bytes could be invalid, false), to be
    /// overwritten.
    ///
    /// # Panics
    /// As [`Tensor::build`].
    pub(crate) fn uninit(dtype: DType, shape: impl Into<Shape>) -> Tensor {
        let shape = shape.into();
        let numel = shape.checked_numel("tensor").ok();
        let bytes =
            numel.and_then(|n| n.checked_mul(dtype.size_bytes())).filter(|&n| n <= isize::MAX as usize);
        let bytes = bytes.unwrap_or_else(|| panic!("tensor: no memory has addresses for {dtype}{shape}"));
        let mut out = Tensor::over(Buffer::uninit(bytes), dtype, shape);
        if dtype == DType::Bool {
            out.bytes_mut().fill(0);
        }
        out
    }

    /// All zeros (false).
    ///
    /// # Panics
    /// As [`Tensor::build`].
    pub fn zeros(dtype: DType, shape: impl Into<Shape>) -> Tensor {
        let mut out = Tensor::uninit(dtype, shape);
        out.bytes_mut().fill(0);
        out
    }

    /// All elements equal to `value`, converted to `dtype`.
    ///
    /// # Panics
    /// As [`Tensor::build`].
    pub fn full(dtype: DType, shape: impl Into<Shape>, value: impl Into<Scalar>) -> Tensor {
        let value = value.into().0;
        for_dtype!(any dtype, T => Tensor::build(shape, |out: &mut [T]| out.fill(Element::from_f64(value))))
    }

    /// One element, shape `[]`.
    pub fn scalar<T: Element>(value: T) -> Tensor {
        Tensor::build([], |out: &mut [T]| out[0] = value)
    }

    pub(super) fn over(buffer: Buffer, dtype: DType, shape: Shape) -> Tensor {
        debug_assert!(buffer.len_bytes() >= shape.numel() * dtype.size_bytes());
        let strides = shape.strides();
        Tensor { storage: Arc::new(buffer), dtype, shape, strides, offset: 0 }
    }

    /// Where the elements are.
    pub fn device(&self) -> Device {
        self.storage.device()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The extents.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The strides, in elements; 0 along broadcast dims.
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

    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// The size in bytes that a contiguous copy would have.
    pub fn len_bytes(&self) -> usize {
        self.numel() * self.dtype.size_bytes()
    }

    /// True where the elements lie row-major without gaps.
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

    /// True where both are views of one buffer.
    pub fn shares_storage(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.storage, &other.storage)
    }

    /// True where both see the same elements of one buffer.
    pub(crate) fn is_same_view(&self, other: &Tensor) -> bool {
        self.shares_storage(other)
            && (self.offset, &self.shape, &self.strides) == (other.offset, &other.shape, &other.strides)
    }

    /// The elements of a contiguous tensor.
    ///
    /// # Errors
    /// Refuses another dtype, and a tensor that is not contiguous (call [`Tensor::contiguous`] first).
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        if !self.is_contiguous() {
            return Err(Error::invalid(
                "as_slice",
                "the tensor is not contiguous",
                format!("{} with strides {:?}", self.notation(), self.strides.as_slice()),
                "call contiguous() first",
            ));
        }
        Ok(&self.data::<T>()?[..self.numel()])
    }

    /// The buffer from this tensor's first element on, for kernels that follow the strides themselves.
    ///
    /// # Errors
    /// Refuses another dtype.
    pub fn data<T: Element>(&self) -> Result<&[T]> {
        self.expect_dtype("data", T::DTYPE)?;
        self.expect_cpu("data")?;
        let len = self.storage.len_bytes() / T::DTYPE.size_bytes();
        // SAFETY: the block is aligned to 64 (a foreign one was a Vec of elements of this size), initialised, holds
        // `len` elements of this dtype, and nobody writes to it while it is shared or borrowed.
        let all = unsafe { std::slice::from_raw_parts(self.storage.as_ptr().cast::<T>(), len) };
        Ok(&all[self.offset.min(len)..])
    }

    /// The bytes of [`Tensor::data`], whatever the dtype.
    pub(super) fn data_bytes(&self) -> Result<&[u8]> {
        for_dtype!(any self.dtype, T => Ok(bytemuck::cast_slice(self.data::<T>()?)))
    }

    /// The elements, writable: in place if the tensor is contiguous and shares its buffer with nobody, else in a
    /// fresh copy that it then owns.
    ///
    /// # Errors
    /// Refuses another dtype.
    pub fn make_mut<T: Element>(&mut self) -> Result<&mut [T]> {
        self.expect_dtype("make_mut", T::DTYPE)?;
        self.expect_cpu("make_mut")?;
        if !self.is_unique() {
            *self = self.to_owned_copy()?;
        }
        let (offset, len) = (self.offset, self.numel());
        let buffer = Arc::get_mut(&mut self.storage).expect("checked or made unique above");
        // SAFETY: `&mut Buffer` is exclusive, the block holds `offset + len` initialised elements of this dtype, and
        // its alignment suffices.
        Ok(unsafe { std::slice::from_raw_parts_mut(buffer.as_mut_ptr().cast::<T>().add(offset), len) })
    }

    /// True where [`Tensor::make_mut`], or a kernel on this thread's stream, writes in place.
    pub fn is_unique(&mut self) -> bool {
        self.is_contiguous()
            && self.is_unshared()
            && self.storage.device_block().is_none_or(DeviceBlock::is_on_own_thread)
    }

    /// As [`Tensor::is_unique`], where the tensor is all that its buffer holds: keeping it keeps nothing else.
    pub(crate) fn owns_buffer(&mut self) -> bool {
        self.is_unique() && self.storage.len_bytes() == self.len_bytes()
    }

    /// True where nobody shares the buffer.
    pub(super) fn is_unshared(&mut self) -> bool {
        Arc::get_mut(&mut self.storage).is_some()
    }

    /// The block of a tensor on a device.
    pub(super) fn device_block(&self) -> Option<&DeviceBlock> {
        self.storage.device_block()
    }

    /// The address of the first element of a tensor on a device.
    pub(crate) fn device_address(&self) -> Option<u64> {
        let block = self.storage.device_block()?;
        Some(block.address() + (self.offset * self.dtype.size_bytes()) as u64)
    }

    /// The raw bytes of a contiguous tensor, for engines and files.
    ///
    /// # Errors
    /// Refuses a tensor that is not contiguous.
    pub fn as_bytes(&self) -> Result<&[u8]> {
        if !self.is_contiguous() {
            return Err(Error::invalid(
                "as_bytes",
                "the tensor is not contiguous",
                self.notation(),
                "call contiguous() first",
            ));
        }
        self.expect_cpu("as_bytes")?;
        let start = self.offset * self.dtype.size_bytes();
        // SAFETY: the range lies in the block, whose bytes are initialised and not written while borrowed.
        Ok(unsafe { std::slice::from_raw_parts(self.storage.as_ptr().add(start), self.len_bytes()) })
    }

    /// The raw bytes of a tensor made by [`Tensor::uninit`] and not shared since.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        assert_eq!(self.device(), Device::Cpu, "only the device's kernels write there");
        let (start, len) = (self.offset * self.dtype.size_bytes(), self.len_bytes());
        let buffer = Arc::get_mut(&mut self.storage).expect("a fresh tensor shares its buffer with nobody");
        // SAFETY: exclusive access to an initialised block that holds the range.
        unsafe { std::slice::from_raw_parts_mut(buffer.as_mut_ptr().add(start), len) }
    }

    /// This tensor if it is contiguous, else a contiguous copy.
    ///
    /// # Errors
    /// As [`Tensor::to_owned_copy`].
    pub fn contiguous(&self) -> Result<Tensor> {
        if self.is_contiguous() { Ok(self.clone()) } else { self.to_owned_copy() }
    }

    /// [`Tensor::contiguous`] for the processor's own kernels.
    pub(crate) fn packed(&self) -> Tensor {
        if self.is_contiguous() { self.clone() } else { self.packed_copy() }
    }

    /// A contiguous copy in the processor's memory, where this tensor is.
    pub(crate) fn packed_copy(&self) -> Tensor {
        let mut out = Tensor::uninit(self.dtype, self.shape.clone());
        let (size, strides) = (self.dtype.size_bytes(), out.strides.clone());
        super::cpu::copy_strided(
            size,
            &self.shape,
            (self.data_bytes().expect("in the processor's memory, where this tensor is"), &self.strides),
            (out.bytes_mut(), &strides),
        );
        out
    }

    /// The elements in row-major order.
    ///
    /// # Errors
    /// Refuses another dtype.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.expect_dtype("to_vec", T::DTYPE)?;
        Ok(self.to_host()?.as_slice::<T>()?.to_vec())
    }

    /// The elements in row-major order, each converted to f64.
    ///
    /// # Panics
    /// Where the tensor lies on a device that fails, or on [`Device::Meta`]; [`Tensor::to_device`] gives the error instead.
    pub fn to_f64_vec(&self) -> Vec<f64> {
        let t = self.to_host().unwrap_or_else(|e| panic!("{e}"));
        for_dtype!(any self.dtype, T => {
            t.as_slice::<T>().expect("contiguous, of dtype T").iter().map(|x| x.to_f64()).collect()
        })
    }

    /// The elements in the processor's memory, contiguous.
    fn to_host(&self) -> Result<Tensor> {
        self.to_device(Device::Cpu)?.contiguous()
    }

    /// The only element of a tensor with one, as f64.
    ///
    /// # Errors
    /// Refuses a tensor with another number of elements.
    pub fn item(&self) -> Result<f64> {
        if self.numel() != 1 {
            return Err(Error::invalid(
                "item",
                "wants exactly one element",
                self.notation(),
                "reduce or index first",
            ));
        }
        let x = self.to_host()?;
        Ok(for_dtype!(any self.dtype, T => x.data::<T>()?[0].to_f64()))
    }

    /// Refuses, in the name of `verb`, a tensor on a device.
    pub(crate) fn expect_cpu(&self, verb: &str) -> Result<()> {
        match self.device() {
            Device::Cpu => Ok(()),
            Device::Meta => self.refuse_absent(verb),
            device => {
                let given = format!("{} on {device}", self.notation());
                let rule = "the elements are not in the processor's memory";
                Err(Error::invalid(verb, rule, given, "call to_device(Device::Cpu) first"))
            }
        }
    }

    pub(crate) fn expect_dtype(&self, verb: &str, dtype: DType) -> Result<()> {
        if self.dtype == dtype {
            return Ok(());
        }
        Err(Error::invalid(verb, format!("the elements are not {dtype}"), self.notation(), "cast first"))
    }
}

/// No elements, `u8[0]`; allocates nothing.
impl Default for Tensor {
    fn default() -> Self {
        thread_local!(static NONE: Tensor = Tensor::zeros(DType::U8, [0]));
        NONE.with(Tensor::clone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
