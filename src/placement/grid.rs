//! The map between mesh coordinates and ranks: by strides, or by an explicit list of ranks.
//!
//! A *position* is `base + sum(coordinate * stride)`. Without a list it is the rank; with a list it is an index into it.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::tensor::{Dims, short_list, sort_by_key};

/// The axes of a mesh.
pub(super) type Axes = SmallVec<[Axis; 4]>;

/// A mesh axis.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Axis {
    pub name: Arc<str>,
    pub len: usize,
    /// Ranks per step along the axis; 1 if the axis has one rank.
    pub stride: usize,
}

/// Ranks in an order that no strides describe, row-major.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct RankList {
    pub ranks: Vec<usize>,
    /// The indices into `ranks`, sorted by rank.
    pub positions: Vec<usize>,
}

/// Returns row-major axes over `rank_len` ranks.
pub(super) fn row_major(axes: &[(&str, usize)], rank_len: usize) -> Axes {
    let mut stride = rank_len;
    let axes = axes.iter().map(|&(name, len)| {
        stride /= len;
        Axis { name: name.into(), len, stride }
    });
    axes.collect()
}

/// Returns the positions of all coordinates, row-major.
pub(super) fn positions(axes: &[Axis], base: usize) -> impl Iterator<Item = usize> + '_ {
    let len = axes.iter().map(|axis| axis.len).product();
    (0..len).map(move |mut index: usize| {
        axes.iter().rev().fold(base, |position, axis| {
            let coord = index % axis.len;
            index /= axis.len;
            position + coord * axis.stride
        })
    })
}

/// Returns the strides of `ranks` (row-major over `axes`), if they follow strides from which division recovers the
/// coordinates: each stride must exceed the largest offset that the smaller strides reach.
pub(super) fn strides_of(axes: &[Axis], ranks: &[usize]) -> Option<Dims> {
    let mut stepped: Axes = axes.into();
    for axis in stepped.iter_mut().filter(|axis| axis.len > 1) {
        axis.stride = ranks[axis.stride].checked_sub(ranks[0])?;
    }
    let mut ascending: SmallVec<[&Axis; 4]> = short_list(stepped.iter().filter(|axis| axis.len > 1));
    sort_by_key(&mut ascending, |axis| axis.stride);
    let mut reach = 0usize;
    for axis in ascending {
        if axis.stride <= reach {
            return None;
        }
        reach = reach.checked_add(axis.stride.checked_mul(axis.len - 1)?)?;
    }
    let follow = positions(&stepped, ranks[0]).eq(ranks.iter().copied());
    follow.then(|| stepped.iter().map(|axis| axis.stride).collect())
}

/// Returns the coordinates of `rank`, or `None` if it is not in the mesh. Divides by the strides, largest first, because
/// each stride exceeds the largest offset that the smaller ones reach. Axes of one rank have coordinate 0.
pub(super) fn coords_of(axes: &[Axis], base: usize, list: Option<&RankList>, rank: usize) -> Option<Dims> {
    let position = match list {
        None => rank,
        Some(RankList { ranks, positions }) => {
            positions[positions.binary_search_by_key(&rank, |&position| ranks[position]).ok()?]
        }
    };
    let mut rest = position.checked_sub(base)?;
    let mut coords = Dims::from_elem(0, axes.len());
    let mut by_stride: Dims = short_list((0..axes.len()).filter(|&a| axes[a].len > 1));
    sort_by_key(&mut by_stride, |&a| std::cmp::Reverse(axes[a].stride));
    for a in by_stride {
        coords[a] = rest / axes[a].stride;
        rest %= axes[a].stride;
        if coords[a] >= axes[a].len {
            return None;
        }
    }
    (rest == 0).then_some(coords)
}
