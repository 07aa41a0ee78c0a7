//! Tensors seen as lines along a dim: the loops of operators that work along it.

use crate::error::Result;
use crate::tensor::{Dims, Tensor, short_list};

use super::segments::checked_index;

/// A contiguous tensor seen as `outer` blocks of `len` rows, the indices of a dim, with `inner` elements each.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct DimLines {
    pub outer: usize,
    pub len: usize,
    pub inner: usize,
}

impl DimLines {
    pub fn new(shape: &[usize], dim: usize) -> DimLines {
        let product = |n: &[usize]| n.iter().product();
        DimLines { outer: product(&shape[..dim]), len: shape[dim], inner: product(&shape[dim + 1..]) }
    }
}

/// An index along a dim, contiguous.
pub(in crate::ops) struct LineIndex {
    entries: Tensor,
    /// The number of elements that share an entry: `inner` if the index is expanded along all inner dims, else 1.
    pub width: usize,
}

impl LineIndex {
    /// Prepares `index`. Every entry must be one of the `n` indices of `dim`.
    ///
    /// # Errors
    /// Returns an error that begins with `verb` if an entry is not.
    pub fn new(verb: &str, index: &Tensor, dim: usize, n: usize) -> Result<LineIndex> {
        let index = LineIndex::unchecked(index, dim)?;
        expect_in_range(verb, index.entries()?, dim, n)?;
        Ok(index)
    }

    /// Prepares an `index` whose entries the caller [checks](expect_in_range).
    pub fn unchecked(index: &Tensor, dim: usize) -> Result<LineIndex> {
        let (mut entries, mut width) = (index.clone(), 1);
        if let Some(rows) = LineIndex::shared_rows(index, dim)? {
            width = index.shape()[dim + 1..].iter().product();
            entries = rows;
        }
        Ok(LineIndex { entries: entries.contiguous()?, width })
    }

    /// Returns the index with extent 1 in the dims after `dim`, if it repeats its entries along all of them.
    pub fn shared_rows(index: &Tensor, dim: usize) -> Result<Option<Tensor>> {
        let mut inner = dim + 1..index.shape().len();
        let repeated = inner.clone().all(|d| index.shape()[d] == 1 || index.strides()[d] == 0);
        if !repeated || index.numel() == 0 {
            return Ok(None);
        }
        inner.try_fold(index.clone(), |rows, d| rows.narrow(d, 0, 1)).map(Some)
    }

    pub fn entries(&self) -> Result<&[i64]> {
        self.entries.as_slice::<i64>()
    }
}

/// Refuses entries that are not among the `n` indices of `dim`.
///
/// # Errors
/// Returns an error that begins with `verb` if there are such.
pub(in crate::ops) fn expect_in_range(verb: &str, entries: &[i64], dim: usize, n: usize) -> Result<()> {
    if entries.iter().fold(false, |bad, &i| bad | (i as u64 >= n as u64)) {
        for &i in entries {
            checked_index(verb, i, n, dim)?;
        }
    }
    Ok(())
}

/// Moves `dim` to the end and makes the tensor contiguous.
pub(in crate::ops) fn rows_along(x: &Tensor, dim: usize) -> Result<Tensor> {
    let order: Dims = short_list((0..x.shape().len()).filter(|&d| d != dim).chain([dim]));
    x.permute(&order)?.contiguous()
}

/// Moves the last dim back to `dim`, as a view.
pub(in crate::ops) fn rows_back(x: &Tensor, dim: usize) -> Result<Tensor> {
    let last = x.shape().len() - 1;
    let order: Dims = short_list((0..dim).chain([last]).chain(dim..last));
    x.permute(&order)
}
