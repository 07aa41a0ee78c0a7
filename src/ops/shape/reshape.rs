//! `reshape`: gives the same elements, in row-major order, another shape. A view if strides allow.

use smallvec::smallvec;

use crate::error::{Error, Result};
use crate::ops::record::view_methods;
use crate::ops::{
    Algebra, AxisPlacement, Input, MeshAxis, Meta, Metas, Op, RaggedCut, Row, Sample, Tensors, Vjp, Windows,
    arity,
};
use crate::placement::chunk;
use crate::tensor::{Shape, Tensor};

/// Gives the same elements, in row-major order, another shape, as a view if strides allow. Applied by
/// [`DTensor::reshape`](crate::dtensor::DTensor::reshape).
///
/// A dim can stay sharded if the shards before and after hold the same elements. A ragged shard stays: it is a run of
/// elements in row-major order, before and after.
///
/// ```
/// use isoshard::{ops::{MeshAxis, Meta, Op, Reshape}, tensor::DType};
/// let x = [Meta::new(DType::F32, [6, 10])];
/// let rows = Reshape { shape: [6, 2, 5].into() }.rows(&x, MeshAxis::new(2));
/// assert_eq!(format!("{:?}", &rows[..2]), "[S0 -> S0, S1 -> S1]");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reshape {
    /// The result's shape.
    pub shape: Shape,
}

impl Op for Reshape {
    fn name(&self) -> &'static str {
        "reshape"
    }

    fn infer(&self, ins: &[Meta]) -> Result<Metas> {
        let [x] = arity(self.name(), ins)?;
        if x.shape.checked_numel(self.name())? != self.shape.checked_numel(self.name())? {
            return Err(Error::invalid(
                self.name(),
                "the number of elements changes",
                format!("{x} to {}", self.shape),
                format!("{} elements there, {} here", self.shape.numel(), x.shape.numel()),
            ));
        }
        Ok(smallvec![Meta { dtype: x.dtype, shape: self.shape.clone() }])
    }

    /// The dims before and after form groups with equal products. In a group only the outermost dims (with an extent
    /// other than 1) can stay sharded, and only if both shardings cut at the same elements.
    fn rows(&self, ins: &[Meta], axis: MeshAxis) -> Vec<Row> {
        let x = &ins[0].shape;
        let mut rows = Vec::new();
        if x.numel() > 0 {
            for (old, new) in groups(x, &self.shape) {
                let lead =
                    |shape: &Shape, dims: std::ops::Range<usize>| dims.into_iter().find(|&d| shape[d] != 1);
                if let (Some(i), Some(o)) = (lead(x, old.clone()), lead(&self.shape, new.clone())) {
                    let inner_old: usize = x[i + 1..old.end].iter().product();
                    let inner_new: usize = self.shape[o + 1..new.end].iter().product();
                    if cuts_agree((x[i], inner_old), (self.shape[o], inner_new), axis.ranks, axis.pieces(i)) {
                        rows.push(Row::new([AxisPlacement::S(i)], [AxisPlacement::S(o)]));
                    }
                }
            }
        }
        rows.extend(Algebra::Structural.rows(1));
        // The fewest dims that divide into as many blocks: a block has as many elements before and after.
        let holds = |cut: RaggedCut, dims: usize| {
            self.shape[..dims].iter().product::<usize>().is_multiple_of(cut.blocks)
        };
        if let Some(cut) = axis.ragged()
            && x.numel() > 0
            && let Some(dims) = (1..=self.shape.len()).find(|&dims| holds(cut, dims))
        {
            rows.push(Row::new([AxisPlacement::Ragged], [AxisPlacement::RaggedOver(dims)]));
        }
        rows
    }

    fn eval(&self, ins: &mut [Tensor], at: &Windows) -> Result<Tensors> {
        Ok(smallvec![ins[0].reshape(at.outs[0].local().clone())?])
    }

    view_methods!();

    fn vjp(&self, g: &mut Vjp) -> Result<()> {
        let shape = g.input_meta(0).shape.clone();
        let dy = g.grad(0);
        let dx = g.apply(Reshape { shape }, &[dy])?;
        g.set(0, dx);
        Ok(())
    }
}

/// Returns true if the shards of a dim of `n` indices with `inner` elements each hold the same elements as those of a
/// dim of `m` indices with `inner_m` elements each. `pieces` counts the cuts of other axes as well.
fn cuts_agree((n, inner): (usize, usize), (m, inner_m): (usize, usize), ranks: usize, pieces: usize) -> bool {
    if n == m || (n % pieces == 0 && m % pieces == 0) {
        return true;
    }
    let equal = |i| chunk(n, ranks, i).start * inner == chunk(m, ranks, i).start * inner_m;
    pieces == ranks && (0..ranks).all(equal)
}

type DimRange = std::ops::Range<usize>;

/// Returns the finest division of old and new dims into pairs of ranges with equal products. No extent is 0.
fn groups(old: &Shape, new: &Shape) -> Vec<(DimRange, DimRange)> {
    let (mut i, mut j) = (0, 0);
    let mut groups = Vec::new();
    while i < old.len() || j < new.len() {
        let (i0, j0) = (i, j);
        let (mut a, mut b) = (1, 1);
        let mut first = true;
        while first || a != b {
            if (a <= b && i < old.len()) || j == new.len() {
                a *= old[i];
                i += 1;
            } else {
                b *= new[j];
                j += 1;
            }
            first = false;
        }
        groups.push((i0..i, j0..j));
    }
    groups
}

pub(in crate::ops) fn samples() -> Vec<Sample> {
    let reshape = |shape: &[usize]| Reshape { shape: shape.into() };
    vec![
        Sample::new(reshape(&[15]), [Input::ints([5, 3])]),
        Sample::new(reshape(&[2, 6]), [Input::ints([4, 3])]),
        Sample::new(reshape(&[6, 2, 5]), [Input::ints([6, 10])]),
        Sample::new(reshape(&[3, 7, 1]), [Input::ints([1, 3, 7])]),
        Sample::new(reshape(&[3, 4]), [Input::ints([6, 2])]),
        Sample::new(reshape(&[]), [Input::ints([1, 1])]),
        Sample::new(reshape(&[0, 5]), [Input::ints([3, 0])]),
    ]
}
