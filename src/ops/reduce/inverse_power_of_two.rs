//! `inverse_power_of_two`: a factor that brings a magnitude near 1 without rounding.

use crate::error::{Error, Result};
use crate::ops::{Algebra, Input, Meta, Pointwise, Sample, Vjp, Windows};
use crate::tensor::{DType, Tensor, cpu, cuda};

/// Computes `2^-e` for `2^e <= |x| < 2^(e + 1)`, in f64, and 1 for 0, infinities and NaN. Below `2^-1022` the result is
/// `2^1023`. Norms scale their operands by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct InversePowerOfTwo;

impl Pointwise for InversePowerOfTwo {
    const NAME: &'static str = "inverse_power_of_two";
    const ARITY: usize = 1;

    /// Steps that fall and then return to 1 at 0 are not monotone.
    fn algebra(&self) -> Algebra {
        Algebra::Opaque
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        if matches!(ins[0].dtype, DType::F64 | DType::F32) {
            return Ok(ins[0].dtype);
        }
        let remedy = "cast it to f64";
        Err(Error::invalid(Self::NAME, "wants f64 or f32", ins[0].to_string(), remedy))
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        match ins[0].dtype() {
            DType::F64 => cpu::map1::<f64, f64, _>(&ins[0], inverse),
            _ => cpu::map1::<f32, f32, _>(&ins[0], inverse_f32),
        }
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        cuda::map(cuda::formula!("inverse_power_of_two"), ins, &[])
    }

    /// A few operations on bits count as one.
    fn flops(&self) -> u64 {
        1
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        g.none(0, "a step function is constant almost everywhere");
        Ok(())
    }
}

fn inverse(x: f64) -> f64 {
    match x.to_bits() >> 52 & 0x7ff {
        0x7ff => 1.0,
        0 if x == 0.0 => 1.0,
        0 => f64::from_bits(0x7fe << 52),
        // 2^-1023 is subnormal.
        0x7fe => f64::from_bits(1 << 51),
        exponent => f64::from_bits((0x7fe - exponent) << 52),
    }
}

/// Returns `inverse` in f32, at most its largest power of two.
fn inverse_f32(x: f32) -> f32 {
    inverse(f64::from(x)).min(127f64.exp2()) as f32
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let shapes: [&[usize]; 3] = [&[5, 3], &[0, 2], &[]];
    shapes.map(|shape| Sample::new(InversePowerOfTwo, [Input::ints(shape)]).not_smooth()).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_near_one() {
        for x in [f64::MAX, 1.5, 1.0, 0.999, f64::MIN_POSITIVE, 3e-200] {
            assert!((1.0..2.0).contains(&(x * inverse(-x))), "{x}");
        }
        assert_eq!([0.0, f64::INFINITY, f64::NAN].map(inverse), [1.0; 3]);
        assert!(inverse(5e-324) * 5e-324 > 1e-16);
        for x in [f32::MAX, 1.5, f32::MIN_POSITIVE] {
            assert!((1.0..2.0).contains(&(x * inverse_f32(-x))), "{x}");
        }
        assert!(inverse_f32(1e-45) * 1e-45 > 1e-7, "finite for subnormal numbers");
    }
}
