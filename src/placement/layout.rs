//! The placements of all axes, and their order.

use std::fmt;

use smallvec::SmallVec;

use super::Placement;
use crate::error::{Error, Result};

/// One placement for each mesh axis, with the order in which axes split a dim, outermost first. Written
/// `(S0, R)`; where axes split one dim in another than mesh order, `^k` gives the place of each, 0 the outermost:
/// `(S0^1, S0^0)`.
///
/// The order matters only among axes that split a dim in common, and is kept in a canonical form: layouts that mean
/// the same compare equal.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Layout {
    placements: SmallVec<[Placement; 4]>,
    order: AxisOrder,
}

type AxisOrder = SmallVec<[usize; 4]>;

impl Layout {
    /// The layout with these placements, one a mesh axis; the first axis is the outermost.
    pub fn new(placements: impl IntoIterator<Item = Placement>) -> Layout {
        let placements: SmallVec<_> = placements.into_iter().collect();
        let order = (0..placements.len()).collect();
        Layout { placements, order }
    }

    /// Every one of `ndim` axes replicates.
    pub fn replicated(ndim: usize) -> Layout {
        Layout::new(std::iter::repeat_n(Placement::Replicate, ndim))
    }

    /// The same placements, with the axes splitting in this order, outermost first.
    ///
    /// ```
    /// # fn main() -> isoshard::Result<()> {
    /// use isoshard::placement::{Layout, short::*};
    ///
    /// let layout = Layout::new([shard(0), shard(0)]).with_order(&[1, 0])?;
    /// assert_eq!(layout.to_string(), "(S0^1, S0^0)");
    /// // Axes that split different dims have no order.
    /// let layout = Layout::new([shard(0), shard(1)]);
    /// assert_eq!(layout.clone().with_order(&[1, 0])?, layout);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Refuses what is not a permutation of the axes.
    pub fn with_order(mut self, order: &[usize]) -> Result<Layout> {
        let n = self.placements.len();
        if order.len() != n || !(0..n).all(|a| order.contains(&a)) {
            return Err(Error::invalid(
                "with_order",
                "not a permutation of the axes",
                format!("{order:?} for {self}"),
                format!("name each of 0..{n} once, outermost first"),
            ));
        }
        self.order = canonical(&self.placements, order.into());
        Ok(self)
    }

    /// The number of axes.
    pub fn ndim(&self) -> usize {
        self.placements.len()
    }

    /// The placements, one an axis.
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// What axis `a` does.
    pub fn axis(&self, a: usize) -> &Placement {
        &self.placements[a]
    }

    /// All axes, outermost first, in the canonical form: mesh order wherever the order does not matter.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// The layout in which axis `a` does something else. The others keep their relative order; `a` becomes the
    /// innermost on its new dim. Setting what is there already changes nothing.
    pub fn set(&self, a: usize, placement: Placement) -> Layout {
        let mut new = self.clone();
        if self.placements[a] == placement {
            return new;
        }
        new.placements[a] = placement;
        new.order.retain(|&mut b| b != a);
        new.order.push(a);
        new.order = canonical(&new.placements, new.order);
        new
    }

    /// The axes that split `dim`, outermost first; a ragged one splits all dims of its prefix.
    pub fn splitters(&self, dim: usize) -> impl Iterator<Item = usize> + '_ {
        self.order.iter().copied().filter(move |&a| self.placements[a].splits(dim))
    }

    /// True where some axis is [`Placement::Partial`].
    pub fn has_partial(&self) -> bool {
        self.placements.iter().any(Placement::is_partial)
    }

    /// True where every axis is [`Placement::Replicate`].
    pub fn is_replicated(&self) -> bool {
        self.placements.iter().all(Placement::is_replicate)
    }

    /// The same layout with every `Partial` axis replicated.
    pub(crate) fn reduced(&self) -> Layout {
        let whole = |p: &Placement| if p.is_partial() { Placement::Replicate } else { p.clone() };
        let placements: SmallVec<[Placement; 4]> = self.placements.iter().map(whole).collect();
        let order = canonical(&placements, self.order.clone());
        Layout { placements, order }
    }

    /// The first ragged axis.
    pub fn ragged_axis(&self) -> Option<usize> {
        self.placements.iter().position(|p| p.ragged_units().is_some())
    }

    /// The place of `a` among the axes it shares dims with, directly or through others, 0 the outermost; `None` where
    /// those stand in mesh order. This is the `^k` of the notation.
    pub(super) fn nesting(&self, a: usize) -> Option<usize> {
        if self.order.is_sorted() {
            return None;
        }
        let family = family(&self.placements, a);
        let order: AxisOrder = self.order.iter().copied().filter(|b| family.contains(b)).collect();
        if order.is_sorted() { None } else { order.iter().position(|&b| b == a) }
    }
}

/// The axes that share dims with `a`, directly or through others, `a` included.
pub(super) fn family(placements: &[Placement], a: usize) -> AxisOrder {
    let mut family = AxisOrder::from_slice(&[a]);
    let mut next = 0;
    while next < family.len() {
        let b = family[next];
        let near = (0..placements.len()).filter(|&c| placements[b].meets(&placements[c]));
        let new: AxisOrder = near.filter(|c| !family.contains(c)).collect();
        family.extend(new);
        next += 1;
    }
    family
}

/// The lexicographically least order in which axes that share a dim stand as in `order`. That is a normal form: orders
/// mean the same exactly where these pairs agree (the traces of Cartier and Foata).
fn canonical(placements: &[Placement], mut order: AxisOrder) -> AxisOrder {
    for i in 0..order.len() {
        // An axis may come next unless one before it shares a dim with it.
        let free = |j: &usize| order[i..*j].iter().all(|&b| !placements[b].meets(&placements[order[*j]]));
        let least = (i..order.len()).filter(free).min_by_key(|&j| order[j]).expect("order[i] itself is free");
        order[i..=least].rotate_right(1);
    }
    order
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt_with(f, |_| None)
    }
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Layout {
    /// Writes `(name:S0, ...)`, without `name:` where there is no name.
    pub(super) fn fmt_with<'a>(
        &self,
        f: &mut fmt::Formatter<'_>,
        name: impl Fn(usize) -> Option<&'a str>,
    ) -> fmt::Result {
        f.write_str("(")?;
        for (a, placement) in self.placements.iter().enumerate() {
            f.write_str(if a == 0 { "" } else { ", " })?;
            if let Some(name) = name(a) {
                write!(f, "{name}:")?;
            }
            write!(f, "{placement}")?;
            if let Some(k) = self.nesting(a) {
                write!(f, "^{k}")?;
            }
        }
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::super::short::*;
    use super::*;

    fn ordered(placements: &[Placement], order: &[usize]) -> Layout {
        Layout::new(placements.iter().cloned()).with_order(order).unwrap()
    }

    #[test]
    fn order_counts_only_where_dims_are_shared() {
        let three = [shard(0), shard(1), shard(0)];
        assert_eq!(ordered(&three, &[1, 0, 2]), Layout::new(three.clone()));
        assert_eq!(ordered(&three, &[2, 1, 0]), ordered(&three, &[1, 2, 0]));
        assert_ne!(ordered(&three, &[2, 1, 0]), Layout::new(three));
        assert_eq!(ordered(&[R, shard(0), R], &[2, 1, 0]).order(), [0, 1, 2]);
        // A ragged prefix ties the axes that split its dims to itself, not to each other.
        let tied = [ragged(2, &[1]), shard(0), shard(1), shard(2)];
        assert_eq!(ordered(&tied, &[3, 2, 1, 0]), ordered(&tied, &[1, 2, 0, 3]));
        assert_eq!(ordered(&tied, &[3, 2, 1, 0]).order(), [1, 2, 0, 3]);
        assert_ne!(ordered(&tied, &[3, 2, 0, 1]), ordered(&tied, &[1, 2, 0, 3]));
    }

    #[test]
    fn setting_an_axis_makes_it_innermost() {
        let layout = Layout::new([shard(0), shard(0), R]);
        let moved = layout.set(0, shard(1)).set(0, shard(0));
        assert_eq!(moved.to_string(), "(S0^1, S0^0, R)");
        assert_eq!(moved.splitters(0).collect::<Vec<_>>(), [1, 0]);
        assert_eq!(layout.set(0, shard(0)), layout, "nothing changed");
        assert_eq!(moved.set(2, shard(0)).to_string(), "(S0^1, S0^0, S0^2)");
        assert_eq!(moved.set(0, R), Layout::new([R, shard(0), R]));
        assert_eq!(moved.set(0, R).set(1, R), Layout::replicated(3));
    }

    #[test]
    fn questions() {
        let layout = Layout::new([R, partial(crate::tensor::ReduceOp::Sum), ragged(2, &[1, 0])]);
        assert!(layout.has_partial() && !layout.is_replicated());
        assert_eq!((layout.ragged_axis(), layout.ndim()), (Some(2), 3));
        assert_eq!([0, 1, 2].map(|d| layout.splitters(d).count()), [1, 1, 0]);
        assert!(Layout::replicated(0).is_replicated());
    }

    #[test]
    fn refuses_what_is_no_permutation() {
        for order in [&[0][..], &[0, 0], &[0, 2], &[0, 1, 2]] {
            let error = Layout::new([R, shard(0)]).with_order(order).unwrap_err();
            let want = format!(
                "with_order: not a permutation of the axes; got {order:?} for (R, S0); name each of 0..2 once, outermost \
                 first"
            );
            assert_eq!(error.to_string(), want);
        }
    }
}
