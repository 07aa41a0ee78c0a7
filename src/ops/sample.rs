//! Samples: small calls of an operator, at odd sizes, that feed every test.

use std::fmt;
use std::sync::Arc;

use super::{Meta, Op};
use crate::tensor::{DType, Shape, Tensor};

/// What values an operand of a sample has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum InputFill {
    /// Integers from -4 to 4: their sums and products are exact, whatever the order.
    Ints,
    /// Positive multiples of 1/8 up to 4, for logarithms, roots and divisors.
    Positive,
    /// Multiples of 1/8 from 0 to 1, for probabilities.
    Unit,
    /// Indices from 0 to below this.
    Index(usize),
    /// False and true.
    Bools,
}

/// One operand of a sample.
#[derive(Clone, Debug)]
pub struct Input {
    /// Dtype and global shape.
    pub meta: Meta,
    /// Its values.
    pub fill: InputFill,
}

/// One call of an operator.
#[derive(Clone)]
pub struct Sample {
    /// The operator with its attributes.
    pub op: Arc<dyn Op>,
    /// Its operands; floating ones are f32, and the harness may widen all of them to f64.
    pub ins: Vec<Input>,
    /// How many rounded additions stand behind one element of a result when a dim is split: 0 where results are equal
    /// by bits however the operands lie.
    pub rounded_sums: usize,
    /// False where the derivative cannot be checked by finite differences (kinks, integer results).
    pub smooth: bool,
}

impl Input {
    /// f32 integers from -4 to 4.
    pub fn ints(shape: impl Into<Shape>) -> Input {
        Input { meta: Meta::new(DType::F32, shape), fill: InputFill::Ints }
    }

    /// f32 in (0, 4].
    pub fn positive(shape: impl Into<Shape>) -> Input {
        Input { meta: Meta::new(DType::F32, shape), fill: InputFill::Positive }
    }

    /// f32 in [0, 1].
    pub fn unit(shape: impl Into<Shape>) -> Input {
        Input { meta: Meta::new(DType::F32, shape), fill: InputFill::Unit }
    }

    /// i64 indices below `n`.
    pub fn index(shape: impl Into<Shape>, n: usize) -> Input {
        Input { meta: Meta::new(DType::I64, shape), fill: InputFill::Index(n) }
    }

    /// Bools.
    pub fn bools(shape: impl Into<Shape>) -> Input {
        Input { meta: Meta::new(DType::Bool, shape), fill: InputFill::Bools }
    }

    /// The values, as a function of `salt` and the element's index, floating ones in `dtype`.
    pub fn values(&self, dtype: DType, salt: u64) -> Tensor {
        let hash = |e: u64| {
            // SplitMix64's finaliser: any fixed mixing will do.
            let mut z = (e ^ salt.rotate_left(32)).wrapping_add(0x9e37_79b9_7f4a_7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        };
        let n = self.meta.shape.numel() as u64;
        let value = |e: u64| match self.fill {
            InputFill::Ints => (hash(e) % 9) as f64 - 4.0,
            InputFill::Positive => ((hash(e) % 32) + 1) as f64 / 8.0,
            InputFill::Unit => (hash(e) % 9) as f64 / 8.0,
            InputFill::Index(below) => (hash(e) % below.max(1) as u64) as f64,
            InputFill::Bools => (hash(e) % 2) as f64,
        };
        let dtype = if self.meta.dtype.is_float() { dtype } else { self.meta.dtype };
        crate::tensor::for_dtype!(any dtype, T => Tensor::from_vec(
            (0..n).map(|e| <T as crate::tensor::Element>::from_f64(value(e))).collect(),
            self.meta.shape.clone(),
        ).expect("as many values as the shape has elements"))
    }
}

impl Sample {
    /// A sample whose results are equal by bits under every layout, with a smooth derivative.
    pub fn new(op: impl Op, ins: impl IntoIterator<Item = Input>) -> Sample {
        Sample { op: Arc::new(op), ins: ins.into_iter().collect(), rounded_sums: 0, smooth: true }
    }

    /// Says that `n` rounded additions stand behind an element of a result.
    pub fn rounded(mut self, n: usize) -> Sample {
        self.rounded_sums = n;
        self
    }

    /// Says that finite differences do not apply.
    pub fn not_smooth(mut self) -> Sample {
        self.smooth = false;
        self
    }

    /// The operands' dtypes and global shapes.
    pub fn metas(&self) -> Vec<Meta> {
        self.ins.iter().map(|i| i.meta.clone()).collect()
    }
}

/// `matmul("m k, k n -> m n") f32[3, 5], f32[5, 2]`.
impl fmt::Debug for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {}", self.op, super::list(&self.metas()))
    }
}
