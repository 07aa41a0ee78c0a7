//! Conversion to and from `ndarray` arrays, without a copy if possible.

use ndarray::{ArrayD, ArrayViewD, IxDyn, ShapeBuilder};

use super::tensor::Tensor;
use crate::error::Result;
use crate::tensor::{Element, Shape};

impl Tensor {
    /// Takes over an array: without a copy if it is row-major, else with one.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let array = ndarray::arr2(&[[1.0f32, 2.0], [3.0, 4.0]]);
    /// let x = Tensor::from_ndarray(array.reversed_axes())?;
    /// assert_eq!(x.to_vec::<f32>()?, [1.0, 3.0, 2.0, 4.0]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns no error today: every array has a tensor.
    pub fn from_ndarray<T: Element, D: ndarray::Dimension>(array: ndarray::Array<T, D>) -> Result<Tensor> {
        let shape = Shape::from(array.shape());
        if array.is_standard_layout() {
            let (data, offset) = array.into_raw_vec_and_offset();
            let start = offset.unwrap_or(0);
            if start == 0 && data.len() == shape.numel() {
                return Tensor::from_vec(data, shape);
            }
            return Tensor::from_slice(&data[start..start + shape.numel()], shape);
        }
        Tensor::from_vec(array.iter().copied().collect(), shape)
    }

    /// Returns an `ndarray` view of this tensor's memory, with the tensor's strides.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let x = Tensor::from_vec(vec![1i64, 2, 3, 4, 5, 6], [2, 3])?;
    /// let view = x.to_ndarray_view::<i64>()?;
    /// assert_eq!((view.sum(), view[[1, 0]]), (21, 4));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the dtype is not `T`'s or if the elements are not in the CPU's memory.
    pub fn to_ndarray_view<T: Element>(&self) -> Result<ArrayViewD<'_, T>> {
        let data = self.data::<T>()?;
        let shape = IxDyn(&self.shape).strides(IxDyn(&self.strides));
        Ok(ArrayViewD::from_shape(shape, data).expect("a tensor's strides stay inside its buffer"))
    }

    /// Returns a copy as an `ndarray` array.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let x = Tensor::from_vec(vec![1.0f64, 2.0], [2])?;
    /// assert_eq!(x.to_ndarray::<f64>()?.mapv(f64::sqrt)[[0]], 1.0);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Tensor::to_ndarray_view`].
    pub fn to_ndarray<T: Element>(&self) -> Result<ArrayD<T>> {
        Ok(self.to_ndarray_view()?.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_copy_where_layouts_allow() {
        let a = ndarray::arr2(&[[1f32, 2.0, 3.0], [4.0, 5.0, 6.0]]);
        let at = a.as_ptr();
        let x = Tensor::from_ndarray(a).unwrap();
        assert_eq!(x.data::<f32>().unwrap().as_ptr(), at);
        let t = x.transpose(0, 1).unwrap();
        assert_eq!(t.to_ndarray_view::<f32>().unwrap().as_ptr(), at);
        assert_eq!(t.to_ndarray::<f32>().unwrap()[[2, 1]], 6.0);
        let back = Tensor::from_ndarray(t.to_ndarray::<f32>().unwrap()).unwrap();
        assert_eq!(back.to_vec::<f32>().unwrap(), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        let e = x.narrow(0, 0, 1).unwrap().expand([4, 3]).unwrap();
        assert_eq!(e.to_ndarray_view::<f32>().unwrap()[[3, 2]], 3.0);
    }
}
