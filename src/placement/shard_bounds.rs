//! The indices of one rank's shard of a tensor, computed from mesh, layout and shape.

use smallvec::SmallVec;

use super::{Layout, Mesh, Placement, Region, chunk};
use crate::tensor::{Dims, Shape};

/// A box of global indices; if `flat` is `Some((dims, lo, hi))`, only the range `lo..hi` of its first `dims` dims,
/// flattened.
#[derive(Clone)]
pub(crate) struct ShardBounds {
    start: Dims,
    len: Dims,
    flat: Option<(usize, usize, usize)>,
}

impl ShardBounds {
    /// Returns the shard of the rank at `coords`. A `Partial` axis splits nothing: each rank holds every index.
    pub fn at(mesh: &Mesh, layout: &Layout, shape: &Shape, coords: &[usize]) -> ShardBounds {
        debug_assert_eq!(coords.len(), mesh.ndim(), "one coordinate an axis");
        let mut start = Dims::from_elem(0, shape.len());
        let mut len = Dims::from_slice(shape);
        let mut flat: Option<(usize, usize, usize)> = None;
        for &a in layout.order() {
            match layout.axis(a) {
                Placement::Shard(dim) => {
                    let part = chunk(len[*dim], mesh.axis_len(a), coords[a]);
                    start[*dim] += part.start;
                    len[*dim] = part.len();
                }
                Placement::RaggedShard { dims, units } => {
                    // Inside flattened dims, only axes that flatten the same dims split them (`Spec::validate`).
                    let all = len[..*dims].iter().product::<usize>();
                    let (_, lo, hi) = flat.unwrap_or((*dims, 0, all));
                    let block = (hi - lo) / units.iter().sum::<usize>();
                    let lo = lo + block * units[..coords[a]].iter().sum::<usize>();
                    let hi = lo + block * units[coords[a]];
                    match dims {
                        1 => (start[0], len[0]) = (start[0] + lo, hi - lo),
                        _ => flat = Some((*dims, lo, hi)),
                    }
                }
                Placement::Replicate | Placement::Partial(_) => {}
            }
        }
        ShardBounds { start, len, flat }
    }

    /// Returns the number of elements.
    pub fn numel(&self) -> usize {
        match self.flat {
            None => self.len.iter().product(),
            Some((dims, lo, hi)) => (hi - lo) * self.len[dims..].iter().product::<usize>(),
        }
    }

    /// Returns the number of elements that both shards hold.
    pub fn common_numel(&self, other: &ShardBounds) -> usize {
        if self.flat.is_some() || other.flat.is_some() {
            let boxes = |bounds: &ShardBounds| bounds.clone().region().boxes;
            let pieces = boxes(other);
            let pairs = boxes(self).into_iter().flat_map(|x| {
                pieces
                    .iter()
                    .map(move |y| common(&x.start, &x.len, &y.start, &y.len))
                    .collect::<SmallVec<[usize; 4]>>()
            });
            return pairs.sum();
        }
        common(&self.start, &self.len, &other.start, &other.len)
    }

    /// Returns the shape of the local tensor.
    pub fn shape(&self) -> Shape {
        match self.flat {
            None => Shape::from(self.len.clone()),
            Some((dims, lo, hi)) => {
                std::iter::once(hi - lo).chain(self.len[dims..].iter().copied()).collect()
            }
        }
    }

    /// Returns the global indices.
    pub fn region(self) -> Region {
        match self.flat {
            None => Region::of_box(self.start, Shape::from(self.len)),
            Some((dims, lo, hi)) => Region::of_range(&self.start, &self.len, dims, lo, hi),
        }
    }
}

/// Returns the number of indices that two boxes share.
fn common(a: &[usize], a_len: &[usize], b: &[usize], b_len: &[usize]) -> usize {
    let along = |d: usize| (a[d] + a_len[d]).min(b[d] + b_len[d]).saturating_sub(a[d].max(b[d]));
    (0..a.len()).map(along).product()
}
