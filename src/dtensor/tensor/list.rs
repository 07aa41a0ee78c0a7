//! A short list of distributed tensors: the operands or the results of one call.

use std::ops::{Deref, DerefMut};

use smallvec::SmallVec;

use super::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::tensor::short_list;

/// The operands or the results of one operator call.
///
/// A list dereferences to a slice, and collects from an iterator. Up to three tensors take no allocation.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DTensors, DeviceMesh}, ops::Add, placement::Layout, tensor::DType};
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let x = DTensor::full(&mesh, DType::F32, [3], "(S0)", 1.5)?;
///     let mut operands: DTensors = [x.clone(), x].into();
///     let [sum] = DTensor::apply_owned(&Add, &mut operands)?.into_array()?;
///     assert_eq!(sum.full_tensor()?.to_vec::<f32>()?, [3.0; 3]);
///     assert!(operands.is_empty()); // they were given up
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct DTensors(pub(in crate::dtensor) SmallVec<[DTensor; 3]>);

impl DTensors {
    /// Returns an empty list.
    ///
    /// ```
    /// assert!(isoshard::dtensor::DTensors::new().is_empty());
    /// ```
    pub fn new() -> DTensors {
        DTensors::default()
    }

    /// Appends a tensor.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DTensors, DeviceMesh}, placement::Layout, tensor::DType};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut list = DTensors::new();
    ///     list.push(DTensor::zeros(&mesh, DType::F32, [2], Layout::replicated(0))?);
    ///     assert_eq!(list[0].shape()[..], [2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn push(&mut self, tensor: DTensor) {
        self.0.push(tensor);
    }

    /// Inserts a tensor before the one at `index`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DTensors, DeviceMesh}, placement::Layout, tensor::DType};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let zeros = |n: usize| DTensor::zeros(&mesh, DType::F32, [n], Layout::replicated(0));
    ///     let mut list = DTensors::from([zeros(1)?, zeros(2)?]);
    ///     list.insert(0, zeros(5)?);
    ///     assert_eq!(list.iter().map(|x| x.shape()[0]).collect::<Vec<_>>(), [5, 1, 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Panics
    /// Panics if `index` is larger than the length.
    pub fn insert(&mut self, index: usize, tensor: DTensor) {
        self.0.insert(index, tensor);
    }

    /// Removes and returns the tensor at `index`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DTensors, DeviceMesh}, placement::Layout, tensor::DType};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let zeros = |n: usize| DTensor::zeros(&mesh, DType::F32, [n], Layout::replicated(0));
    ///     let mut list = DTensors::from([zeros(1)?, zeros(2)?]);
    ///     assert_eq!((list.remove(0).shape()[0], list.len()), (1, 1));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Panics
    /// Panics if the list has no such tensor.
    pub fn remove(&mut self, index: usize) -> DTensor {
        self.0.remove(index)
    }

    /// Returns the tensors as an array, to be taken apart: `let [values, statistics] = outs.into_array()?`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}};
    /// use isoshard::{ops::{Bits, RmsNorm}, placement::Layout, tensor::DType};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let ones = |shape: &[usize]| DTensor::full(&mesh, DType::F32, shape, Layout::replicated(0), 1.0);
    ///     let outs = DTensor::apply(&RmsNorm { eps: Bits(0.0) }, &[&ones(&[3, 2])?, &ones(&[2])?])?;
    ///     assert!(outs.clone().into_array::<1>().is_err());
    ///     let [y, scale] = outs.into_array()?;
    ///     assert_eq!((&y.shape()[..], &scale.shape()[..]), (&[3, 2][..], &[3, 1][..]));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a list of another length.
    pub fn into_array<const N: usize>(self) -> Result<[DTensor; N]> {
        self.0.into_vec().try_into().map_err(|all: Vec<DTensor>| {
            Error::invalid("into_array", "the list has another length", format!("{} for {N}", all.len()), "")
        })
    }
}

impl Deref for DTensors {
    type Target = [DTensor];

    fn deref(&self) -> &[DTensor] {
        &self.0
    }
}

impl DerefMut for DTensors {
    fn deref_mut(&mut self) -> &mut [DTensor] {
        &mut self.0
    }
}

impl<const N: usize> From<[DTensor; N]> for DTensors {
    fn from(tensors: [DTensor; N]) -> Self {
        tensors.into_iter().collect()
    }
}

impl From<Vec<DTensor>> for DTensors {
    fn from(tensors: Vec<DTensor>) -> Self {
        DTensors(tensors.into())
    }
}

impl From<DTensors> for Vec<DTensor> {
    fn from(tensors: DTensors) -> Self {
        tensors.0.into_vec()
    }
}

impl FromIterator<DTensor> for DTensors {
    fn from_iter<I: IntoIterator<Item = DTensor>>(tensors: I) -> Self {
        DTensors(short_list(tensors))
    }
}

impl Extend<DTensor> for DTensors {
    fn extend<I: IntoIterator<Item = DTensor>>(&mut self, tensors: I) {
        self.0.extend(tensors);
    }
}

impl IntoIterator for DTensors {
    type Item = DTensor;
    type IntoIter = DTensorsIntoIter;

    fn into_iter(self) -> DTensorsIntoIter {
        DTensorsIntoIter(self.0.into_iter())
    }
}

impl<'a> IntoIterator for &'a DTensors {
    type Item = &'a DTensor;
    type IntoIter = std::slice::Iter<'a, DTensor>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

/// The iterator over the tensors of a [`DTensors`], by value.
#[derive(Debug)]
pub struct DTensorsIntoIter(smallvec::IntoIter<[DTensor; 3]>);

impl Iterator for DTensorsIntoIter {
    type Item = DTensor;

    fn next(&mut self) -> Option<DTensor> {
        self.0.next()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl ExactSizeIterator for DTensorsIntoIter {}
