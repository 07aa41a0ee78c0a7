//! Access to a tensor's elements: borrowed, copied, or written in place.

use super::cuda_device::stream::DeviceBlock;
use super::dtype::for_dtype;
use super::storage::exclusive;
use super::{DType, Device, Element, Tensor};
use crate::error::{Error, Result};

impl Tensor {
    /// Returns the elements of a contiguous tensor, without copying.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2])?;
    /// assert_eq!(x.as_slice::<f32>()?.iter().sum::<f32>(), 10.0);
    /// assert!(x.transpose(0, 1)?.as_slice::<f32>().is_err());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the dtype is not `T`'s, if the tensor is not contiguous (call [`Tensor::contiguous`] first)
    /// or if its elements are not in the CPU's memory.
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

    /// Returns the buffer from this tensor's first element to the buffer's end, for kernels that follow the strides
    /// themselves.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let x = Tensor::from_vec(vec![0i32, 1, 2, 3, 4, 5], [2, 3])?;
    /// let column = x.narrow(1, 1, 1)?;
    /// let (data, step) = (column.data::<i32>()?, column.strides()[0]);
    /// assert_eq!([data[0], data[step]], [1, 4]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the dtype is not `T`'s or if the elements are not in the CPU's memory.
    #[inline]
    pub fn data<T: Element>(&self) -> Result<&[T]> {
        self.expect_dtype("data", T::DTYPE)?;
        self.expect_cpu("data")?;
        let len = self.storage.len_bytes() / T::DTYPE.size_bytes();
        // SAFETY: the buffer is aligned to 64 bytes, or was a list of elements of this alignment, or is a part of such a one
        // from an element on. It is initialised, holds `len` elements of this dtype, and is not written while it is shared
        // or borrowed.
        let all = unsafe { std::slice::from_raw_parts(self.storage.as_ptr().cast::<T>(), len) };
        Ok(&all[self.offset.min(len)..])
    }

    /// Returns the bytes of [`Tensor::data`] for any dtype.
    pub(super) fn data_bytes(&self) -> Result<&[u8]> {
        for_dtype!(any self.dtype, T => Ok(bytemuck::cast_slice(self.data::<T>()?)))
    }

    /// Returns the elements for writing, in row-major order.
    ///
    /// They are those of the buffer if the tensor is contiguous and no other tensor shares the buffer; else the tensor
    /// first becomes a contiguous copy of itself.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let mut x = Tensor::from_vec(vec![1.0f32, 2.0], [2])?;
    /// let before = x.clone();
    /// x.make_mut::<f32>()?[0] = 9.0;
    /// assert_eq!(x.to_vec::<f32>()?, [9.0, 2.0]);
    /// assert_eq!(before.to_vec::<f32>()?, [1.0, 2.0]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the dtype is not `T`'s or if the elements are not in the CPU's memory.
    pub fn make_mut<T: Element>(&mut self) -> Result<&mut [T]> {
        self.expect_dtype("make_mut", T::DTYPE)?;
        self.expect_cpu("make_mut")?;
        if !self.is_unique() {
            *self = self.to_owned_copy()?;
        }
        let (offset, len) = (self.offset, self.numel());
        let buffer = exclusive(&mut self.storage).expect("checked or made unique above");
        // SAFETY: `&mut Buffer` is exclusive, the tensor is contiguous, so that the buffer holds `offset + len` initialised
        // elements of this dtype, and its alignment suffices, as in `data`.
        Ok(unsafe { std::slice::from_raw_parts_mut(buffer.as_mut_ptr().cast::<T>().add(offset), len) })
    }

    /// Returns true if [`Tensor::make_mut`], or a kernel on this thread's stream, writes this tensor in place: it is
    /// contiguous and no other tensor shares its buffer.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let mut x = Tensor::scalar(1.0f64);
    /// assert!(x.is_unique());
    /// let shared = x.clone();
    /// assert!(!x.is_unique());
    /// drop(shared);
    /// assert!(x.is_unique());
    /// ```
    pub fn is_unique(&mut self) -> bool {
        self.is_contiguous()
            && self.is_unshared()
            && self.storage.device_block().is_none_or(DeviceBlock::is_on_own_thread)
    }

    /// Returns true if [`Tensor::is_unique`] and the tensor covers its whole buffer, so keeping it alive keeps no other
    /// memory.
    pub(crate) fn owns_buffer(&mut self) -> bool {
        self.is_unique() && self.storage.len_bytes() == self.len_bytes() && !self.storage.is_part()
    }

    /// Returns true for a part of a block of memory ([`Tensor::cut`]).
    pub(crate) fn is_part(&self) -> bool {
        self.storage.is_part()
    }

    /// Returns true if keeping this tensor alive keeps more memory than its elements take.
    pub(crate) fn keeps_more(&self) -> bool {
        self.storage.len_bytes() > self.len_bytes() || self.storage.is_part()
    }

    /// Returns true if no other tensor shares the buffer.
    pub(super) fn is_unshared(&mut self) -> bool {
        exclusive(&mut self.storage).is_some()
    }

    /// Returns the elements of a contiguous tensor as bytes in the machine's byte order, for files and for comparisons
    /// by bits.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let x = Tensor::from_vec(vec![-0.0f32, 1.0], [2])?;
    /// assert_eq!(x.as_bytes()?, [(-0.0f32).to_ne_bytes(), 1f32.to_ne_bytes()].concat());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the tensor is not contiguous or if its elements are not in the CPU's memory.
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
        // SAFETY: the range is inside the buffer, whose bytes are initialised and not written while borrowed.
        Ok(unsafe { std::slice::from_raw_parts(self.storage.as_ptr().add(start), self.len_bytes()) })
    }

    /// Returns the bytes, for writing, of a tensor from [`Tensor::uninit`] that has not been shared since.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        assert_eq!(self.device(), Device::Cpu, "only a device's kernels write its memory");
        // A repeated element has fewer bytes than its copies.
        assert!(self.is_contiguous(), "a new tensor is contiguous");
        let (start, len) = (self.offset * self.dtype.size_bytes(), self.len_bytes());
        let buffer = exclusive(&mut self.storage).expect("a new tensor does not share its buffer");
        // SAFETY: exclusive access to an initialised buffer that holds the range.
        unsafe { std::slice::from_raw_parts_mut(buffer.as_mut_ptr().add(start), len) }
    }

    /// Returns this tensor if it is contiguous, else a contiguous copy.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let t = Tensor::from_vec(vec![1u8, 2, 3, 4], [2, 2])?.transpose(0, 1)?;
    /// assert_eq!(t.contiguous()?.as_slice::<u8>()?, [1, 3, 2, 4]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Tensor::to_owned_copy`].
    pub fn contiguous(&self) -> Result<Tensor> {
        if self.is_contiguous() { Ok(self.clone()) } else { self.to_owned_copy() }
    }

    /// Returns [`Tensor::contiguous`] for a tensor in the CPU's memory.
    pub(crate) fn packed(&self) -> Tensor {
        if self.is_contiguous() { self.clone() } else { self.packed_copy() }
    }

    /// Returns a contiguous copy of a tensor in the CPU's memory.
    pub(crate) fn packed_copy(&self) -> Tensor {
        let mut out = Tensor::scratch(self.dtype, self.shape.clone());
        let (size, strides) = (self.dtype.size_bytes(), out.strides.clone());
        super::cpu::copy_strided(
            size,
            &self.shape,
            (self.data_bytes().expect("the elements are in the CPU's memory"), &self.strides),
            (out.bytes_mut(), &strides),
        );
        out
    }

    /// Returns the elements in row-major order. Elements on a device are copied from there, which waits for its work.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let t = Tensor::from_vec(vec![1i64, 2, 3, 4], [2, 2])?.transpose(0, 1)?;
    /// assert_eq!(t.to_vec::<i64>()?, [1, 3, 2, 4]);
    /// assert!(t.to_vec::<f32>().is_err()); // `cast` converts
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the dtype is not `T`'s, if the device fails, or if the tensor is on [`Device::Meta`].
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.expect_dtype("to_vec", T::DTYPE)?;
        Ok(self.to_host()?.as_slice::<T>()?.to_vec())
    }

    /// Returns the elements in row-major order, each converted to f64, for any dtype.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// assert_eq!(Tensor::from_vec(vec![true, false], [2])?.to_f64_vec(), [1.0, 0.0]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Panics
    /// Panics if the tensor is on a device that fails, or on [`Device::Meta`]. [`Tensor::to_device`] returns the error
    /// instead.
    pub fn to_f64_vec(&self) -> Vec<f64> {
        let t = self.to_host().unwrap_or_else(|e| panic!("{e}"));
        for_dtype!(any self.dtype, T => {
            t.as_slice::<T>().expect("contiguous, of dtype T").iter().map(|x| x.to_f64()).collect()
        })
    }

    /// Returns a contiguous tensor in the CPU's memory with the same elements.
    fn to_host(&self) -> Result<Tensor> {
        self.to_device(Device::Cpu)?.contiguous()
    }

    /// Returns the only element, as f64.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let x = Tensor::from_vec(vec![1.5f32, 2.5], [2])?;
    /// assert_eq!(x.select(0, 1)?.item()?, 2.5);
    /// assert!(x.item().is_err());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the tensor does not have exactly one element, or if the elements cannot be read (see
    /// [`Tensor::to_vec`]).
    pub fn item(&self) -> Result<f64> {
        if self.numel() != 1 {
            return Err(Error::invalid(
                "item",
                "the tensor does not have exactly one element",
                self.notation(),
                "reduce or index first; the value of a DTensor is that of its full_tensor",
            ));
        }
        let x = self.to_host()?;
        Ok(for_dtype!(any self.dtype, T => x.data::<T>()?[0].to_f64()))
    }

    /// Returns an error that names `verb` if the elements are not in the CPU's memory.
    #[inline]
    pub(crate) fn expect_cpu(&self, verb: &str) -> Result<()> {
        if self.device() == Device::Cpu { Ok(()) } else { self.refuse_device(verb) }
    }

    #[cold]
    fn refuse_device(&self, verb: &str) -> Result<()> {
        if self.device() == Device::Meta {
            return self.refuse_without_elements(verb);
        }
        let given = format!("{} on {}", self.notation(), self.device());
        let rule = "the elements are not in the CPU's memory";
        Err(Error::invalid(verb, rule, given, "call to_device(Device::Cpu) first"))
    }

    /// Returns an error that names `verb` if the dtype is another one.
    #[inline]
    pub(crate) fn expect_dtype(&self, verb: &str, dtype: DType) -> Result<()> {
        if self.dtype == dtype { Ok(()) } else { self.refuse_dtype(verb, dtype) }
    }

    #[cold]
    fn refuse_dtype(&self, verb: &str, dtype: DType) -> Result<()> {
        Err(Error::invalid(verb, format!("the elements are not {dtype}"), self.notation(), "cast first"))
    }
}
