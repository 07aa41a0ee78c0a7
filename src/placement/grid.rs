//! Where coordinates lead: strides, and lists of ranks that follow none.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::tensor::Dims;

pub(super) type Axes = SmallVec<[Axis; 4]>;

#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Axis {
    pub name: Arc<str>,
    pub len: usize,
    /// 1 of an axis of one rank, which takes no step.
    pub stride: usize,
}

/// Ranks that follow no strides, row-major.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct RankList {
    pub ranks: Vec<usize>,
    /// The places, by ascending rank.
    pub places: Vec<usize>,
}

pub(super) fn row_major(axes: &[(&str, usize)], rank_len: usize) -> Axes {
    let mut stride = rank_len;
    let axes = axes.iter().map(|&(name, len)| {
        stride /= len;
        Axis { name: name.into(), len, stride }
    });
    axes.collect()
}

/// Where the coordinates lead, row-major.
pub(super) fn places(axes: &[Axis], base: usize) -> impl Iterator<Item = usize> + '_ {
    let len = axes.iter().map(|axis| axis.len).product();
    (0..len).map(move |mut position: usize| {
        axes.iter().rev().fold(base, |place, axis| {
            let coord = position % axis.len;
            position /= axis.len;
            place + coord * axis.stride
        })
    })
}

/// The strides with which these ranks, row-major, go up from the first along each axis, if they do, and if a rank tells
/// its coordinates by division: if each stride is larger than all that those below it reach.
pub(super) fn strides_of(axes: &[Axis], ranks: &[usize]) -> Option<Dims> {
    let mut stepped: Axes = axes.into();
    for axis in stepped.iter_mut().filter(|axis| axis.len > 1) {
        axis.stride = ranks[axis.stride].checked_sub(ranks[0])?;
    }
    let mut ascending: SmallVec<[&Axis; 4]> = stepped.iter().filter(|axis| axis.len > 1).collect();
    ascending.sort_unstable_by_key(|axis| axis.stride);
    let mut reach = 0usize;
    for axis in ascending {
        if axis.stride <= reach {
            return None;
        }
        reach = reach.checked_add(axis.stride.checked_mul(axis.len - 1)?)?;
    }
    let follow = places(&stepped, ranks[0]).eq(ranks.iter().copied());
    follow.then(|| stepped.iter().map(|axis| axis.stride).collect())
}

/// Divides by the strides, largest first: each is larger than all that the smaller ones can reach. Axes of one rank
/// stand at 0.
pub(super) fn coords_of(axes: &[Axis], base: usize, list: Option<&RankList>, rank: usize) -> Option<Dims> {
    let place = match list {
        None => rank,
        Some(RankList { ranks, places }) => {
            places[places.binary_search_by_key(&rank, |&place| ranks[place]).ok()?]
        }
    };
    let mut rest = place.checked_sub(base)?;
    let mut coords = Dims::from_elem(0, axes.len());
    let mut by_stride: Dims = (0..axes.len()).filter(|&a| axes[a].len > 1).collect();
    by_stride.sort_unstable_by_key(|&a| std::cmp::Reverse(axes[a].stride));
    for a in by_stride {
        coords[a] = rest / axes[a].stride;
        rest %= axes[a].stride;
        if coords[a] >= axes[a].len {
            return None;
        }
    }
    (rest == 0).then_some(coords)
}
