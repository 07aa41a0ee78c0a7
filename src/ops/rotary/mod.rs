//! `rotary`: rotary position embedding (Su et al., *RoFormer*, 2021), with angles from a base. `rotary_table` and
//! `rotary_apply` take any frequencies and positions.
//!
//! Missing: rows that shard the last dim through a pair, which is gathered instead; a rotation of a part of the last dim
//! alone (`slice` and `cat` do it).

mod apply;
pub(super) mod cpu;
mod cuda;
mod frequencies;
mod table;

pub use apply::{RotaryApply, RotaryPairing};
pub use frequencies::{Llama3Scaling, RotaryFrequencies, YarnScaling};
pub use table::RotaryTable;

use smallvec::smallvec;

use super::{
    Algebra, AxisPlacement, Bits, Input, MeshAxis, Meta, Metas, Op, Row, Sample, Tensors, Vjp, Windows, Work,
    arity, list,
};
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use cpu::Rotation;

/// Rotary position embedding of `x` `[.., T, D]` with even `D` (Su et al., *RoFormer*, 2021). Applied by
/// [`DTensor::rotary`](crate::dtensor::DTensor::rotary).
///
/// The vector at global index `t` has position `p = offset + t`. Its elements `i` and `i + D/2` are rotated as a pair
/// by the angle `p · base^(-2i/D)`. Llama's published weights use this pairing; the paper pairs neighbours. The angles
/// are computed by a fixed sequence of f64 operations. The derivative rotates by
/// the negative angle.
///
/// ```
/// use isoshard::{ops::{Bits, Rotary, eval_whole}, tensor::Tensor};
/// let x = Tensor::from_vec(vec![1.0, 0.0, 1.0, 0.0], [2, 2])?; // two positions
/// let y = eval_whole(&Rotary { base: Bits(1e4), offset: 0, inverse: false }, &[x])?.remove(0);
/// assert_eq!(format!("{:.3?}", y.to_f64_vec()), "[1.000, 0.000, 0.540, 0.841]"); // cos 1, sin 1
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rotary {
    /// The base of the geometric sequence of angles, usually 10000.
    pub base: Bits,
    /// The position of the first vector.
    pub offset: usize,
    /// True to rotate by the negative angle.
    pub inverse: bool,
}

impl Op for Rotary {
    fn name(&self) -> &'static str {
        "rotary"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        x.dtype.expect_float(self.name())?;
        let refused = |rule: &str, given: String| Err(Error::invalid(self.name(), rule, given, ""));
        if !matches!(x.shape[..], [.., _, d] if d % 2 == 0) {
            return refused("wants [.., time, d] with an even d", list(ins));
        }
        if !(self.base.0 > 0.0 && self.base.0.is_finite()) {
            return refused("the base is not a positive number", self.base.0.to_string());
        }
        if self.offset.checked_add(x.shape[x.shape.len() - 2]).is_none() {
            return refused("the positions overflow", format!("offset {} for {x}", self.offset));
        }
        Ok(smallvec![x.clone()])
    }

    /// Any dim may be sharded but the last, whose halves are mixed. Linear.
    fn rows(&self, ins: &[Meta], _: MeshAxis) -> Vec<Row> {
        let cut = |d| Row::same(AxisPlacement::S(d), 1);
        let mut rows: Vec<Row> = (0..ins[0].shape.len() - 1).map(cut).collect();
        rows.extend(Algebra::Linear.rows(1));
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        Ok(smallvec![self.rotation(at).apply(self.name(), &ins[0])?])
    }

    fn cuda(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        Ok(smallvec![cuda::rotary(&self.rotation(at), &ins[0])?])
    }

    /// Two products and an addition per element; a sine and a cosine per angle, shared by all vectors at a position.
    fn work(&self, ins: &[Meta], outs: &[Meta]) -> Work {
        let angles = match ins[0].shape[..] {
            [.., t, d] => (t as u64).saturating_mul(d as u64 / 2),
            _ => 0,
        };
        Work::elementwise(3, ins, outs).plus(angles.saturating_mul(2 * Work::SPECIAL))
    }

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let dy = g.grad(0);
        let dx = g.apply(Rotary { inverse: !self.inverse, ..*self }, &[dy])?;
        g.set(0, dx);
        Ok(())
    }
}

impl Rotary {
    /// Returns the rotation of this rank's shard.
    fn rotation(&self, at: &Windows) -> Rotation {
        let x = &at.ins[0];
        let start = self.offset + x.start(x.global.len() - 2);
        Rotation { base: self.base.0, start, inverse: self.inverse }
    }
}

pub(super) fn samples() -> Vec<Sample> {
    let sample = |base, offset, inverse, shape: &[usize]| {
        Sample::new(Rotary { base: Bits(base), offset, inverse }, [Input::ints(shape)])
    };
    let own = vec![
        sample(1e4, 0, false, &[2, 3, 5, 4]),
        sample(100.0, 7, true, &[3, 7, 2]),
        sample(5e5, 1_000_000, false, &[5, 6]),
        sample(1e4, 0, false, &[2, 0, 4]),
        sample(1e4, 3, false, &[3, 1, 2]),
    ];
    [own, apply::samples(), table::samples()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::eval_whole;
    use crate::tensor::DType;

    /// The score of a query and a key depends on how far apart they are only.
    #[test]
    fn scores_depend_on_the_distance() {
        let x = Input::ints([2, 1, 8]).values(DType::F64, 3);
        let at = |row: usize, offset| {
            let op = Rotary { base: Bits(1e4), offset, inverse: false };
            eval_whole(&op, &[x.narrow(0, row, 1).unwrap()]).unwrap()[0].to_f64_vec()
        };
        let score = |q, k| at(0, q).iter().zip(at(1, k)).map(|(q, k)| q * k).sum::<f64>();
        assert!((score(17, 5) - score(1017, 1005)).abs() < 1e-10);
        assert!((score(17, 5) - score(17, 6)).abs() > 1e-3);
        let plain = x.to_f64_vec();
        assert_eq!(at(0, 0), plain[..8], "position 0 does not turn");
    }

    #[test]
    fn refuses_odd_widths_and_bases_that_are_not_positive() {
        let refused = |base, shape: &[usize]| {
            let op = Rotary { base: Bits(base), offset: 0, inverse: false };
            op.infer(&[Meta::new(DType::F32, shape)]).unwrap_err().to_string()
        };
        assert_eq!(refused(1e4, &[5, 3]), "rotary: wants [.., time, d] with an even d; got f32[5, 3]");
        assert_eq!(refused(1e4, &[4]), "rotary: wants [.., time, d] with an even d; got f32[4]");
        assert_eq!(refused(0.0, &[5, 4]), "rotary: the base is not a positive number; got 0");
        assert_eq!(refused(f64::NAN, &[5, 4]), "rotary: the base is not a positive number; got NaN");
    }
}
