//! `compare`: compares two tensors element by element.

use super::record::{Pointwise, one_dtype};
use crate::error::Result;
use crate::ops::{Algebra, AxisPlacement, Input, Meta, Row, Sample, Vjp, Windows};
use crate::tensor::cpu::{Relation, RelationLoops};
use crate::tensor::{DType, ReduceOp, Tensor, cpu, cuda};

/// Compares two tensors element by element: `(x, y) -> bool`. A NaN is unequal to everything, and neither less nor
/// greater. Applied by [`DTensor::eq`](crate::dtensor::DTensor::eq), `ne`, `lt`, `le`, `gt` and `ge`.
///
/// ```
/// use isoshard::{ops::{Compare, CompareKind, eval_whole}, tensor::Tensor};
/// let (x, y) = (Tensor::from_vec(vec![1.0, f64::NAN], [2])?, Tensor::from_vec(vec![2.0, 2.0], [2])?);
/// let less = eval_whole(&Compare { kind: CompareKind::Lt }, &[x, y])?.remove(0);
/// assert_eq!(less.to_vec::<bool>()?, [true, false]);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Compare {
    /// The relation.
    pub kind: CompareKind,
}

/// The relation that a [`Compare`] tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompareKind {
    /// `x == y`.
    Eq,
    /// `x != y`.
    Ne,
    /// `x < y`.
    Lt,
    /// `x <= y`.
    Le,
    /// `x > y`.
    Gt,
    /// `x >= y`.
    Ge,
}

impl Pointwise for Compare {
    const NAME: &'static str = "compare";
    const ARITY: usize = 2;

    /// Partial sums are reduced before they are compared. The additional rows accept partial maxima and minima of
    /// integers.
    fn algebra(&self) -> Algebra {
        Algebra::Opaque
    }

    fn dtype(&self, ins: &[Meta]) -> Result<DType> {
        one_dtype(Self::NAME, ins).map(|_| DType::Bool)
    }

    fn kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        let (x, y) = (&ins[0], &ins[1]);
        match self.kind {
            CompareKind::Eq => cpu::compare(Self::NAME, &EQUAL, x, y),
            CompareKind::Ne => cpu::compare(Self::NAME, &UNEQUAL, x, y),
            CompareKind::Lt => cpu::compare(Self::NAME, &LESS, x, y),
            CompareKind::Le => cpu::compare(Self::NAME, &NOT_MORE, x, y),
            CompareKind::Gt => cpu::compare(Self::NAME, &LESS, y, x),
            CompareKind::Ge => cpu::compare(Self::NAME, &NOT_MORE, y, x),
        }
    }

    fn cuda_kernel(&self, ins: &mut [Tensor], _: &Windows) -> Result<Tensor> {
        let formula = match self.kind {
            CompareKind::Eq => cuda::formula!("compare", "compare_eq"),
            CompareKind::Ne => cuda::formula!("compare", "compare_ne"),
            CompareKind::Lt | CompareKind::Gt => cuda::formula!("compare", "compare_lt"),
            CompareKind::Le | CompareKind::Ge => cuda::formula!("compare", "compare_le"),
        };
        if matches!(self.kind, CompareKind::Gt | CompareKind::Ge) {
            ins.swap(0, 1);
        }
        cuda::map_to(formula, ins, DType::Bool)
    }

    fn flops(&self) -> u64 {
        1
    }

    fn derivative(&self, g: &mut Vjp) -> Result<()> {
        g.no_gradients("bools have no derivative");
        Ok(())
    }

    /// A maximum is greater than `y` if any rank's contribution is, and less than `y` if every contribution is. The
    /// maximum of bools is "any", the minimum "every". Floats have no such rows, because a NaN is the maximum but not
    /// greater than `y`.
    fn more_rows(&self, ins: &[Meta]) -> Vec<Row> {
        let (max, min) = (AxisPlacement::P(ReduceOp::Max), AxisPlacement::P(ReduceOp::Min));
        let (any, every) = match self.kind {
            _ if ins[0].dtype.is_float() => return vec![],
            CompareKind::Eq | CompareKind::Ne => return vec![],
            CompareKind::Gt | CompareKind::Ge => (max, min),
            CompareKind::Lt | CompareKind::Le => (min, max),
        };
        vec![
            Row::new([any, AxisPlacement::R], [max]),
            Row::new([every, AxisPlacement::R], [min]),
            Row::new([AxisPlacement::R, every], [max]),
            Row::new([AxisPlacement::R, any], [min]),
        ]
    }
}

macro_rules! relations {
    ($($constant:ident $name:ident, $op:tt;)*) => {$(
        struct $name;

        impl Relation for $name {
            #[inline(always)]
            fn at<A: PartialOrd + Copy>(x: A, y: A) -> bool {
                x $op y
            }
        }

        const $constant: RelationLoops = RelationLoops::of::<$name>();
    )*};
}

relations! {
    EQUAL Equal, ==;
    UNEQUAL Unequal, !=;
    LESS Less, <;
    NOT_MORE NotMore, <=;
}

pub(super) fn samples() -> Vec<Sample> {
    use CompareKind::{Eq, Ge, Gt, Le, Lt, Ne};
    let floats = [Eq, Ne, Lt, Le, Gt, Ge].map(|kind| (kind, Input::ints([5, 3])));
    let ints = [Eq, Ge, Lt].map(|kind| (kind, Input::index([7], 5)));
    let others = [(Gt, Input::ints([])), (Le, Input::ints([0, 3]))];
    let sample = |(kind, x): (CompareKind, Input)| Sample::new(Compare { kind }, [x.clone(), x]).not_smooth();
    floats.into_iter().chain(ints).chain(others).map(sample).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::eval_whole;

    #[test]
    fn every_relation_by_its_definition() {
        use CompareKind::{Eq, Ge, Gt, Le, Lt, Ne};
        let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, f32::NAN], [4]).expect("four");
        let y = Tensor::from_vec(vec![2.0f32, 2.0, 2.0, f32::NAN], [4]).expect("four");
        for (kind, want) in [
            (Eq, [false, true, false, false]),
            (Ne, [true, false, true, true]),
            (Lt, [true, false, false, false]),
            (Le, [true, true, false, false]),
            (Gt, [false, false, true, false]),
            (Ge, [false, true, true, false]),
        ] {
            let got = eval_whole(&Compare { kind }, &[x.clone(), y.clone()]).expect("legal");
            assert_eq!(got[0].to_vec::<bool>().expect("bools"), want, "{kind:?}");
        }
    }
}
