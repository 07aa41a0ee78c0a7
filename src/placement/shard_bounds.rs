//! The indices of one rank's shard of a tensor, computed from mesh, layout and shape.

use super::{Layout, Mesh, Placement, Region, chunk};
use crate::tensor::{Dims, Shape};

/// A box of global indices; if `flat` is `Some((dims, lo, hi))`, only the range `lo..hi` of its first `dims` dims,
/// flattened.
pub(super) struct ShardBounds {
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
        let mut ragged = None;
        for &a in layout.order() {
            match layout.axis(a) {
                Placement::Shard(dim) => {
                    let part = chunk(len[*dim], mesh.axis_len(a), coords[a]);
                    start[*dim] += part.start;
                    len[*dim] = part.len();
                }
                Placement::RaggedShard { dims, units } => ragged = Some((a, dims, units)),
                Placement::Replicate | Placement::Partial(_) => {}
            }
        }
        // No axis splits the prefix inside the ragged one (`Spec::validate`), so the ragged axis comes last.
        let mut flat = None;
        if let Some((a, dims, units)) = ragged {
            let block = len[..*dims].iter().product::<usize>() / units.iter().sum::<usize>();
            let lo = block * units[..coords[a]].iter().sum::<usize>();
            let hi = lo + block * units[coords[a]];
            if *dims == 1 {
                start[0] += lo;
                len[0] = hi - lo;
            } else {
                flat = Some((*dims, lo, hi));
            }
        }
        ShardBounds { start, len, flat }
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
