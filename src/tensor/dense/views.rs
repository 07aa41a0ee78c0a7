//! Views: tensors of other shapes over the same buffer. No method copies elements, except `reshape` if no strides fit.

use super::tensor::Tensor;
use crate::error::{Error, Result};
use crate::tensor::shape::copy_of;
use crate::tensor::{Dims, Shape, short_list, sort_by_key};

impl Tensor {
    /// A tensor over the same buffer.
    fn view(&self, shape: Shape, strides: Dims, offset: usize) -> Tensor {
        Tensor { storage: self.storage.clone(), dtype: self.dtype, shape, strides, offset }
    }

    /// Returns the position of the first element in the buffer.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the view whose elements lie in this tensor's buffer as those of `other` lie in its own.
    pub(crate) fn viewed_like(&self, other: &Tensor) -> Result<Tensor> {
        let last = other.shape.iter().zip(&other.strides).map(|(&n, &stride)| n.saturating_sub(1) * stride);
        let end = (other.offset + last.sum::<usize>() + 1) * self.dtype.size_bytes();
        if other.shape.numel() > 0 && end > self.storage.len_bytes() {
            let given = format!("{} for a buffer of {} bytes", other.notation(), self.storage.len_bytes());
            return Err(Error::invalid("view", "leaves the buffer", given, ""));
        }
        Ok(self.view(other.shape.clone(), other.strides.clone(), other.offset))
    }

    /// Returns the tensor that these are parts of, in order along `dim`, if they are all elements of one buffer. The
    /// other extents are equal.
    pub(crate) fn whole_of(parts: &[Tensor], dim: usize) -> Option<Tensor> {
        let mut parts = parts.iter().filter(|part| part.shape[dim] > 0).peekable();
        let first = *parts.peek()?;
        let mut shape = first.shape.clone();
        shape[dim] = 0;
        for part in parts {
            let start = first.offset + shape[dim] * first.strides[dim];
            if !part.shares_storage(first) || part.strides != first.strides || part.offset != start {
                return None;
            }
            shape[dim] += part.shape[dim];
        }
        // One after the other from the innermost dim on, the elements are each once in the buffer.
        let mut dims: Dims = short_list((0..shape.len()).filter(|&d| shape[d] != 1));
        sort_by_key(&mut dims, |&d| first.strides[d]);
        let mut elements = 1;
        for d in dims {
            if first.strides[d] != elements {
                return None;
            }
            elements *= shape[d];
        }
        let whole = first.view(shape, first.strides.clone(), first.offset);
        (elements > 0 && !whole.keeps_more()).then_some(whole)
    }

    /// Returns the view of the indices `start..start + len` of `dim`.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let x = Tensor::from_vec(vec![0i32, 1, 2, 3, 4, 5], [2, 3])?;
    ///
    /// assert_eq!(x.narrow(1, 1, 2)?.to_vec::<i32>()?, [1, 2, 4, 5]);
    /// let e = x.narrow(1, 2, 2).unwrap_err().to_string();
    /// assert!(e.starts_with("narrow: the range leaves the tensor"), "{e}");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if there is no such dim or if the range exceeds its extent.
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Result<Tensor> {
        let dim = self.shape.dim("narrow", dim as isize)?;
        if start.checked_add(len).is_none_or(|end| end > self.shape[dim]) {
            return Err(Error::invalid(
                "narrow",
                "the range leaves the tensor",
                format!("{start}..{start}+{len} of dim {dim} of {}", self.notation()),
                format!("dim {dim} has {} indices", self.shape[dim]),
            ));
        }
        let mut shape = self.shape.clone();
        shape[dim] = len;
        let offset = if shape.numel() == 0 { self.offset } else { self.offset + start * self.strides[dim] };
        Ok(self.view(shape, self.strides.clone(), offset))
    }

    /// Returns the view with the dims in another order: dim `d` of the result is dim `order[d]` of this tensor.
    ///
    /// ```
    /// use isoshard::tensor::{DType, Tensor};
    /// let images = Tensor::zeros(DType::U8, [10, 32, 48, 3]); // height, width, channels
    /// assert_eq!(images.permute(&[0, 3, 1, 2])?.shape()[..], [10, 3, 32, 48]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if `order` is not a permutation of the dims.
    pub fn permute(&self, order: &[usize]) -> Result<Tensor> {
        let n = self.shape.len();
        let once = |i: usize| order[i] < n && !order[..i].contains(&order[i]);
        if order.len() != n || !(0..n).all(once) {
            return Err(Error::invalid(
                "permute",
                "not a permutation of the dims",
                format!("{order:?} for {}", self.notation()),
                format!("name each of 0..{n} once"),
            ));
        }
        let (mut shape, mut strides) = (Dims::new(), Dims::new());
        for &d in order {
            shape.push(self.shape[d]);
            strides.push(self.strides[d]);
        }
        Ok(self.view(shape.into(), strides, self.offset))
    }

    /// Returns the view with dims `a` and `b` swapped.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let x = Tensor::from_vec(vec![0i32, 1, 2, 3, 4, 5], [2, 3])?;
    ///
    /// assert_eq!(x.transpose(0, 1)?.to_vec::<i32>()?, [0, 3, 1, 4, 2, 5]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if there is no such dim.
    pub fn transpose(&self, a: usize, b: usize) -> Result<Tensor> {
        let (a, b) = (self.shape.dim("transpose", a as isize)?, self.shape.dim("transpose", b as isize)?);
        let mut order: Dims = (0..self.shape.len()).collect();
        order.swap(a, b);
        self.permute(&order)
    }

    /// Returns the view that repeats dims of extent 1, and new leading dims, to `shape`. Their stride is 0.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let bias = Tensor::from_vec(vec![1i32, 2, 3], [3])?;
    /// assert_eq!(bias.expand([2, 3])?.to_vec::<i32>()?, [1, 2, 3, 1, 2, 3]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if this tensor's shape does not broadcast to `shape`, or if a copy would take more than 2^63 - 1
    /// bytes.
    pub fn expand(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        self.expanded(shape.into())
    }

    fn expanded(&self, shape: Shape) -> Result<Tensor> {
        shape.checked_bytes("expand", self.dtype)?;
        let lead = shape.len().checked_sub(self.shape.len());
        let fits = lead
            .is_some_and(|lead| self.shape.iter().enumerate().all(|(d, &n)| n == shape[lead + d] || n == 1));
        let Some(lead) = lead.filter(|_| fits) else {
            return Err(Error::invalid(
                "expand",
                "only dims of extent 1 and new leading dims can be repeated",
                format!("{} to {shape}", self.notation()),
                "",
            ));
        };
        let stride = |d: usize| match d.checked_sub(lead) {
            Some(own) if self.shape[own] == shape[d] => self.strides[own],
            _ => 0,
        };
        let strides = (0..shape.len()).map(stride).collect();
        Ok(self.view(shape, strides, self.offset))
    }

    /// Returns the elements, in row-major order, under another shape: a view if some strides describe it, else a copy.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let x = Tensor::from_vec(vec![0i32, 1, 2, 3, 4, 5], [2, 3])?;
    ///
    /// assert!(x.reshape([3, 2])?.shares_storage(&x));
    /// assert!(!x.transpose(0, 1)?.reshape([6])?.shares_storage(&x));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if `shape` has another number of elements.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        self.reshaped(shape.into())
    }

    fn reshaped(&self, shape: Shape) -> Result<Tensor> {
        if shape.checked_numel("reshape")? != self.numel() {
            return Err(Error::invalid(
                "reshape",
                "the number of elements changes",
                format!("{} to {shape}", self.notation()),
                format!("give a shape with {} elements, not {}", self.numel(), shape.numel()),
            ));
        }
        if self.is_contiguous() {
            let strides = shape.strides();
            return Ok(self.view(shape, strides, self.offset));
        }
        match self.view_strides(&shape) {
            Some(strides) => Ok(self.view(shape, strides, self.offset)),
            None => self.to_owned_copy()?.reshaped(shape),
        }
    }

    /// Returns the strides by which a view of this buffer has `shape`, or `None` if there are none.
    fn view_strides(&self, shape: &Shape) -> Option<Dims> {
        let mut strides = Dims::from_elem(0, shape.len());
        // Runs of this tensor's dims that could be merged into one dim, innermost first. Each run must be split into
        // whole new dims.
        let (mut new, mut old) = (shape.len(), self.shape.len());
        while old > 0 {
            let (mut run, inner) = (self.shape[old - 1], self.strides[old - 1]);
            old -= 1;
            while old > 0 && (self.shape[old - 1] == 1 || self.strides[old - 1] == inner * run) {
                run *= self.shape[old - 1];
                old -= 1;
            }
            let mut stride = inner;
            while run > 1 || (new > 0 && shape[new - 1] == 1) {
                new = new.checked_sub(1)?;
                if shape[new] == 0 || run % shape[new] != 0 {
                    return None;
                }
                strides[new] = stride;
                stride *= shape[new];
                run /= shape[new];
            }
        }
        (shape[..new].iter().all(|&n| n == 1)).then_some(strides)
    }

    /// Returns the view of a diagonal of dims `rows` and `columns`, the elements whose column is their row plus `offset`,
    /// as the last dim. It is empty if the offset leaves the matrix.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let x = Tensor::from_vec(vec![0i32, 1, 2, 3, 4, 5], [2, 3])?;
    ///
    /// assert_eq!(x.diagonal(1, 0, 1)?.to_vec::<i32>()?, [1, 5]);
    /// assert_eq!(x.diagonal(-1, 0, 1)?.to_vec::<i32>()?, [3]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if there are no two such dims.
    pub fn diagonal(&self, offset: isize, rows: usize, columns: usize) -> Result<Tensor> {
        let ndim = self.shape.len();
        if rows == columns || rows.max(columns) >= ndim {
            let given = format!("dims {rows} and {columns} of {}", self.notation());
            return Err(Error::invalid("diagonal", "wants two dims of the tensor", given, ""));
        }
        let (row, column) = (offset.min(0).unsigned_abs(), offset.max(0).unsigned_abs());
        let len = self.shape[rows].saturating_sub(row).min(self.shape[columns].saturating_sub(column));
        let others = || (0..ndim).filter(|&d| d != rows && d != columns);
        let shape: Shape = others().map(|d| self.shape[d]).chain([len]).collect();
        let step = self.strides[rows] + self.strides[columns];
        let strides = others().map(|d| self.strides[d]).chain([step]).collect();
        let skipped = row * self.strides[rows] + column * self.strides[columns];
        let offset = if shape.numel() == 0 { self.offset } else { self.offset + skipped };
        Ok(self.view(shape, strides, offset))
    }

    /// Returns the view with a new dim of extent 1 before `dim`.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let x = Tensor::from_vec(vec![0i32, 1, 2, 3, 4, 5], [2, 3])?;
    ///
    /// assert_eq!(x.unsqueeze(1)?.shape()[..], [2, 1, 3]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if `dim` is larger than the number of dims.
    pub fn unsqueeze(&self, dim: usize) -> Result<Tensor> {
        if dim > self.shape.len() {
            return Err(Error::invalid(
                "unsqueeze",
                "no such dim",
                format!("dim {dim} of {}", self.notation()),
                "",
            ));
        }
        let (mut shape, mut strides) = (Dims::from_slice(&self.shape), copy_of(&self.strides));
        shape.insert(dim, 1);
        strides.insert(dim, 0);
        Ok(self.view(shape.into(), strides, self.offset))
    }

    /// Returns the view of index `index` of `dim`, without that dim.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let x = Tensor::from_vec(vec![0i32, 1, 2, 3, 4, 5], [2, 3])?;
    ///
    /// assert_eq!(x.select(0, 1)?.to_vec::<i32>()?, [3, 4, 5]);
    /// assert_eq!(x.select(1, 1)?.to_vec::<i32>()?, [1, 4]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if there is no such dim or index.
    pub fn select(&self, dim: usize, index: usize) -> Result<Tensor> {
        self.narrow(dim, index, 1)?.squeeze(dim)
    }

    /// Returns the view without `dim`, whose extent must be 1.
    ///
    /// ```
    /// use isoshard::tensor::Tensor;
    /// let column = Tensor::from_vec(vec![1u8, 2], [2, 1])?;
    /// assert_eq!(column.squeeze(1)?.shape()[..], [2]);
    /// assert!(column.squeeze(0).is_err());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if there is no such dim or if its extent is not 1.
    pub fn squeeze(&self, dim: usize) -> Result<Tensor> {
        let dim = self.shape.dim("squeeze", dim as isize)?;
        if self.shape[dim] != 1 {
            return Err(Error::invalid(
                "squeeze",
                "the dim's extent is not 1",
                format!("dim {dim} of {}", self.notation()),
                "",
            ));
        }
        let (mut shape, mut strides) = (Dims::from_slice(&self.shape), copy_of(&self.strides));
        shape.remove(dim);
        strides.remove(dim);
        Ok(self.view(shape.into(), strides, self.offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn iota(shape: impl Into<Shape>) -> Tensor {
        let shape = shape.into();
        Tensor::from_vec((0..shape.numel() as i64).collect::<Vec<_>>(), shape).unwrap()
    }

    #[test]
    fn reshape_views_where_it_can() {
        let x = iota([2, 3, 4]);
        let t = x.transpose(0, 1).unwrap();
        assert!(t.reshape([3, 2, 2, 2]).unwrap().shares_storage(&x), "splitting the inner dim is a view");
        assert!(!t.reshape([6, 4]).unwrap().shares_storage(&x), "merging swapped dims is not");
        assert_eq!(t.reshape([6, 4]).unwrap().to_vec::<i64>().unwrap()[..6], [0, 1, 2, 3, 12, 13]);
        let n = x.narrow(2, 1, 2).unwrap();
        assert!(n.reshape([6, 2]).unwrap().shares_storage(&x));
        assert_eq!(n.reshape([12]).unwrap().to_vec::<i64>().unwrap()[..4], [1, 2, 5, 6]);
        let e = iota([1, 3]).expand([2, 3]).unwrap();
        assert_eq!(e.reshape([6]).unwrap().to_vec::<i64>().unwrap(), [0, 1, 2, 0, 1, 2]);
        assert_eq!(e.reshape([2, 1, 3, 1]).unwrap().to_vec::<i64>().unwrap(), [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn empty_and_scalar() {
        let x = iota([0, 3]);
        assert_eq!(x.reshape([3, 0, 7]).unwrap().numel(), 0);
        assert_eq!(x.narrow(1, 2, 1).unwrap().to_vec::<i64>().unwrap(), [0i64; 0]);
        assert_eq!(iota([]).reshape([1, 1]).unwrap().to_vec::<i64>().unwrap(), [0]);
        assert!(iota([2]).narrow(0, 1, 2).is_err());
        for order in [&[1][..], &[], &[0, 0], &[0, 1], &[1 << 32]] {
            assert!(iota([2]).permute(order).is_err(), "{order:?}");
        }
        assert!(iota([2, 2]).permute(&[1, 1]).is_err());
        assert!(iota([1]).expand([1 << 40, 1 << 40]).is_err(), "repeated more often than can be counted");
    }

    #[test]
    fn writes_never_show_in_a_clone() {
        let mut x = iota([4]);
        let y = x.clone();
        x.make_mut::<i64>().unwrap()[0] = 9;
        assert_eq!(y.to_vec::<i64>().unwrap(), [0, 1, 2, 3]);
        let before = x.data::<i64>().unwrap().as_ptr();
        x.make_mut::<i64>().unwrap()[1] = 9;
        assert_eq!(x.data::<i64>().unwrap().as_ptr(), before, "a unique tensor is written in place");
    }
}
