//! `rotary_table`: cosines and sines of rotary position embedding, for given positions and frequencies.

use isoshard_kernels::rows::Rotary;
use smallvec::smallvec;

use super::cuda;
use crate::error::{Error, Result};
use crate::ops::record::work::elements;
use crate::ops::{
    AxisPlacement, Bits, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work, arity,
    list,
};
use crate::tensor::cpu::{as_elements_mut, cast};
use crate::tensor::{DType, Tensor};

/// Computes tables of a rotary position embedding: `(position i64 [..], angle [P]) -> (cos, sin)`, each `[.., P]`, with
/// `cos[.., i] = scale · cos(position · angle[i])`. Applied by
/// [`DTensor::rotary_tables`](crate::dtensor::DTensor::rotary_tables).
///
/// Angles are computed in f64, and full turns are subtracted exactly, as in [`Rotary`](crate::ops::Rotary); with its
/// frequencies the tables have its bits.
///
/// ```
/// use isoshard::{ops::{Bits, RotaryTable, eval_whole}, tensor::{DType, Tensor}};
/// let (position, angle) = (Tensor::from_vec(vec![0i64, 2], [2])?, Tensor::from_vec(vec![0.5], [1])?);
/// let tables = eval_whole(&RotaryTable { dtype: DType::F64, scale: Bits(1.0) }, &[position, angle])?;
/// assert_eq!(format!("{:.3?}", tables[0].to_f64_vec()), "[1.000, 0.540]"); // cos 0, cos 1
/// assert_eq!(format!("{:.3?}", tables[1].to_f64_vec()), "[0.000, 0.841]");
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RotaryTable {
    /// The dtype of the tables, f32 or f64.
    pub dtype: DType,
    /// The factor of cosines and sines.
    pub scale: Bits,
}

impl Op for RotaryTable {
    fn name(&self) -> &'static str {
        "rotary_table"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [position, angle] = arity(self.name(), ins)?;
        angle.dtype.expect_float(self.name())?;
        let bad = |rule: &str| Err(Error::invalid(self.name(), rule, list(ins), ""));
        if position.dtype != DType::I64 {
            return bad("positions are i64");
        }
        if angle.shape.len() != 1 {
            return bad("wants one angle per pair, [pairs]");
        }
        if !matches!(self.dtype, DType::F32 | DType::F64) {
            return Err(Error::invalid(self.name(), "tables are f32 or f64", self.dtype.to_string(), ""));
        }
        let shape = position.shape.iter().copied().chain([angle.shape[0]]).collect();
        let table = Meta { dtype: self.dtype, shape };
        Ok(smallvec![table.clone(), table])
    }

    /// Every element is computed by itself.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let (r, last) = (AxisPlacement::R, ins[0].shape.len());
        let cut = |d| Row::new([AxisPlacement::S(d), r], [AxisPlacement::S(d); 2]);
        let mut rows: Vec<Row> = (0..last).map(cut).collect();
        rows.push(Row::new([AxisPlacement::Ragged, r], [AxisPlacement::Ragged; 2]));
        rows.push(Row::new([r, AxisPlacement::S(0)], [AxisPlacement::S(last); 2]));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let (position, angle) = (ins[0].contiguous()?, cast(&ins[1].contiguous()?, DType::F64)?);
        let (position, angle) = (position.as_slice::<i64>()?, angle.as_slice::<f64>()?);
        let shape: crate::tensor::Shape = ins[0].shape().iter().copied().chain([angle.len()]).collect();
        let mut tables = [Tensor::uninit(self.dtype, &shape), Tensor::uninit(self.dtype, &shape)];
        if shape.numel() > 0 {
            let [cos, sin] = &mut tables;
            match self.dtype {
                DType::F64 => fill::<f64>(position, angle, self.scale.0, [cos, sin]),
                _ => fill::<f32>(position, angle, self.scale.0, [cos, sin]),
            }
        }
        Ok(tables.into_iter().collect())
    }

    fn cuda(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensors> {
        let [cos, sin] = cuda::tables(&ins[0], &ins[1], self.dtype, self.scale.0)?;
        Ok(smallvec![cos, sin])
    }

    /// A sine and a cosine per pair, and four operations for the angle.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        Work::new(elements(&outs[0]).saturating_mul(2 * Work::SPECIAL + 4), ins, outs)
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        g.none(0, "a position is an integer");
        g.refuse("the angles are constants of a model")
    }
}

fn fill<T: Rotary>(position: &[i64], angle: &[f64], scale: f64, [cos, sin]: [&mut Tensor; 2]) {
    let tables = [as_elements_mut(cos.bytes_mut()), as_elements_mut(sin.bytes_mut())];
    T::rotary_tables(position, angle, scale, tables);
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let sample = |positions: &[usize], pairs: usize, scale| {
        let op = RotaryTable { dtype: DType::F32, scale: Bits(scale) };
        Sample::new(op, [Input::index(positions, 1000), Input::positive([pairs])]).not_smooth()
    };
    vec![sample(&[5], 3, 1.0), sample(&[2, 3], 5, 1.25), sample(&[], 7, 1.0), sample(&[0], 3, 1.0)]
}
