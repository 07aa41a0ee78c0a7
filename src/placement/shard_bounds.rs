//! The indices of one rank's shard of a tensor, computed from mesh, layout and shape.

use std::ops::Range;

use smallvec::SmallVec;

use super::{Layout, Mesh, Placement, Region, chunk};
use crate::tensor::{Dims, Shape, short_list};

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
                    let block = (hi - lo) / units.total();
                    let lo = lo + block * units.before(coords[a]);
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

    /// Returns the indices of dim `d`.
    pub fn range(&self, d: usize) -> Range<usize> {
        self.start[d]..self.start[d] + self.len[d]
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

    /// Returns the numbers of elements that this shard has in common with the shards under `layout` of all ranks that
    /// differ from the one at `coords` along `axes` only, added up; `None` if a shard is ragged.
    pub fn common_numel_along(
        &self,
        mesh: &Mesh,
        layout: &Layout,
        shape: &Shape,
        coords: &[usize],
        axes: &[usize],
    ) -> Option<usize> {
        if self.flat.is_some() || layout.ragged_axis().is_some() {
            return None;
        }
        let cuts_nothing = |a: &&usize| layout.axis(**a).split_dims().is_empty();
        let copies: usize = axes.iter().filter(cuts_nothing).map(|&a| mesh.axis_len(a)).product();
        // An axis cuts one dim, so the sum over ranks is a product of sums.
        let along = |d: usize| {
            let cut = |a: usize| (mesh.axis_len(a), (!axes.contains(&a)).then_some(coords[a]));
            let cuts: SmallVec<[(usize, Option<usize>); 4]> = short_list(layout.splitters(d).map(cut));
            common_along(0..shape[d], &cuts, &self.range(d))
        };
        Some(copies * (0..shape.len()).map(along).product::<usize>())
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

/// Returns the number of indices of `held` in the parts of `all`, added up. Each of `cuts` cuts into so many parts, and
/// the part with the given number counts, or every part.
fn common_along(all: Range<usize>, cuts: &[(usize, Option<usize>)], held: &Range<usize>) -> usize {
    let both = all.end.min(held.end).saturating_sub(all.start.max(held.start));
    let Some(((parts, number), inner)) = cuts.split_first().filter(|_| both > 0) else { return both };
    if cuts.iter().all(|(_, number)| number.is_none()) {
        return both;
    }
    let part = |i: usize| {
        let part = chunk(all.len(), *parts, i);
        common_along(all.start + part.start..all.start + part.end, inner, held)
    };
    number.map_or_else(|| (0..*parts).map(part).sum(), part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::short::*;

    #[test]
    fn common_elements_add_up_over_ranks() {
        let mesh = Mesh::parse("a=3,b=2,c=2", 0).unwrap();
        let placements = [R, shard(0), shard(1)];
        let orders = [[0, 1, 2], [2, 1, 0], [1, 2, 0]];
        let every = (0..27).map(|n| [n / 9, n / 3 % 3, n % 3].map(|p| placements[p].clone()));
        let layouts: Vec<Layout> = every
            .flat_map(|p| orders.map(|order| Layout::new(p.clone()).with_order(&order).unwrap()))
            .collect();
        let mut compared = 0;
        for shape in [[12, 4], [7, 5], [1, 9], [0, 3]] {
            let shape = Shape::from(shape);
            for (i, to) in layouts.iter().enumerate() {
                let from = &layouts[i * 7 % layouts.len()];
                for axes in [&[0][..], &[1], &[0, 2], &[1, 2], &[0, 1, 2]] {
                    for rank in mesh.ranks() {
                        let coords = mesh.coords_of(rank).unwrap();
                        let have = ShardBounds::at(&mesh, from, &shape, &coords);
                        let others = mesh.ranks().map(|r| mesh.coords_of(r).unwrap()).filter(|member| {
                            (0..mesh.ndim()).all(|a| member[a] == coords[a] || axes.contains(&a))
                        });
                        let each = others
                            .map(|member| ShardBounds::at(&mesh, to, &shape, &member).common_numel(&have));
                        let sum = have.common_numel_along(&mesh, to, &shape, &coords, axes);
                        assert_eq!(sum, Some(each.sum()), "{from} to {to} along {axes:?}, rank {rank}");
                        compared += 1;
                    }
                }
            }
        }
        assert!(compared > 10_000, "{compared}");
    }
}
