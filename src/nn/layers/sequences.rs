//! The positions and documents of a batch's tokens.

use std::cell::RefCell;
use std::rc::Rc;

use crate::dtensor::DTensor;
use crate::error::{Error, Result};
use crate::nn::layers::rotary_config::{RotaryConfig, RotaryScaling};
use crate::ops::RotaryPairing;
use crate::placement::Layout;
use crate::tensor::{DType, Tensor};

/// The positions and documents of the tokens `[batch, time]` of one forward pass.
///
/// By default each row of a batch is one document, whose positions count from 0. In packed rows several documents stand
/// one after another: a token attends to its own document only, and positions start anew in each.
///
/// ```
/// use isoshard::nn::Sequences;
/// assert!(Sequences::default().documents().is_none());
/// ```
#[derive(Clone, Debug, Default)]
pub struct Sequences {
    packed: Option<PackedRows>,
    /// The cosines and sines that layers have asked for.
    tables: Rc<RefCell<Vec<RotaryTables>>>,
}

#[derive(Clone, Debug)]
struct PackedRows {
    documents: DTensor,
    positions: DTensor,
}

/// The rotary positions of heads of a width, the tables' dtype, and the number of positions.
type RotaryTableKey = (RotaryConfig, usize, DType, usize);

/// Cosines and sines, with what they were computed from.
type RotaryTables = (RotaryTableKey, [DTensor; 2]);

impl Sequences {
    /// Returns the sequences of packed rows. `documents` numbers the document of each token and `positions` its position
    /// in it, both i64 `[batch, time]`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::Sequences, tensor::Tensor};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let put = |x: Vec<i64>| DTensor::distribute(&mesh, &Tensor::from_vec(x, [2, 3])?, "(S0)");
    ///     let documents = put(vec![0, 0, 1, 0, 1, 1])?;
    ///     let packed = Sequences::packed(&documents, &put(vec![0, 1, 0, 0, 0, 1])?)?;
    ///     assert_eq!(packed.documents().expect("packed").shape()[..], [2, 3]);
    ///     assert!(Sequences::packed(&documents, &documents.slice(1, 0, 2)?).is_err());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses tensors that are not i64 `[batch, time]` of one shape.
    pub fn packed(documents: &DTensor, positions: &DTensor) -> Result<Sequences> {
        let fits = |x: &DTensor| x.dtype() == DType::I64 && x.shape().len() == 2;
        if !fits(documents) || !fits(positions) || documents.shape() != positions.shape() {
            let given = format!("{}, {}", documents.spec(), positions.spec());
            let rule = "wants documents and positions i64 [batch, time]";
            return Err(Error::invalid("sequences", rule, given, ""));
        }
        let packed = PackedRows { documents: documents.clone(), positions: positions.clone() };
        Ok(Sequences { packed: Some(packed), tables: Rc::default() })
    }

    /// Returns the number of each token's document, `[batch, time]`, if the rows are packed.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::Sequences, tensor::Tensor};
    /// spmd(1, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let x = DTensor::distribute(&mesh, &Tensor::from_vec(vec![0i64, 0], [1, 2])?, "()")?;
    ///     assert!(Sequences::packed(&x, &x)?.documents().is_some());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn documents(&self) -> Option<&DTensor> {
        self.packed.as_ref().map(|packed| &packed.documents)
    }

    /// Returns each token's position in its document: `[batch, time]` if the rows are packed, otherwise `[time]`.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, nn::Sequences, tensor::DType};
    /// spmd(1, |rank| {
    ///     let tokens = DTensor::zeros(&DeviceMesh::new(&rank, &[])?, DType::I64, [2, 3], "()")?;
    ///     let positions = Sequences::default().positions(&tokens, 3)?;
    ///     assert_eq!(positions.full_tensor()?.to_vec::<i64>()?, [0, 1, 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses packed rows of a length other than `time`.
    pub fn positions(&self, like: &DTensor, time: usize) -> Result<DTensor> {
        match &self.packed {
            Some(packed) if packed.positions.shape()[1] != time => {
                let given = format!("{} for a time of {time}", packed.positions.spec());
                Err(Error::invalid("sequences", "wants positions for each token", given, ""))
            }
            Some(packed) => Ok(packed.positions.clone()),
            None => {
                let positions =
                    Tensor::build([time], |out: &mut [i64]| (0..).zip(out).for_each(|(i, p)| *p = i));
                DTensor::distribute(like.mesh(), &positions, Layout::replicated(like.mesh().mesh().ndim()))
            }
        }
    }

    /// Rotates vectors `[batch, .., time, width]` by their positions.
    pub(in crate::nn) fn rotate(&self, x: &DTensor, rotary: &RotaryConfig) -> Result<DTensor> {
        let d = x.shape()[x.shape().len() - 1];
        let width = rotary.width.unwrap_or(d);
        if width < d {
            let parts = x.split(&[width, d - width], -1)?;
            let whole = RotaryConfig { width: None, ..*rotary };
            return DTensor::cat(&[&self.rotate(&parts[0], &whole)?, &parts[1]], -1);
        }
        if self.packed.is_none() && rotary.scaling == RotaryScaling::Plain {
            return x.rotary(rotary.base, 0);
        }
        let [cos, sin] = self.tables(x, rotary, d)?;
        x.rotary_with(&cos, &sin, RotaryPairing::Halves)
    }

    /// Returns the cosines and sines for vectors `x` of width `d`, which broadcast to them.
    fn tables(&self, x: &DTensor, rotary: &RotaryConfig, d: usize) -> Result<[DTensor; 2]> {
        let dims = x.shape().len();
        let time = x.shape()[dims - 2];
        let dtype = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let key = (*rotary, d, dtype, time);
        let known = self.tables.borrow().iter().find(|(known, _)| *known == key).map(|(_, t)| t.clone());
        let [cos, sin] = match known {
            Some(tables) => tables,
            None => {
                let positions = self.positions(x, time)?;
                let (cos, sin) = positions.rotary_tables(&rotary.frequencies(d)?, dtype)?;
                self.tables.borrow_mut().push((key, [cos.clone(), sin.clone()]));
                [cos, sin]
            }
        };
        if self.packed.is_none() {
            return Ok([cos, sin]);
        }
        let mut shape = vec![1; dims];
        (shape[0], shape[dims - 2], shape[dims - 1]) = (cos.shape()[0], time, d / 2);
        Ok([cos.reshape(shape.clone())?, sin.reshape(shape)?])
    }
}
