//! Layouts: one placement per mesh axis, and the order of the axes that split one dim.

use std::fmt;

use smallvec::SmallVec;

use super::Placement;
use crate::error::{Error, Result};
use crate::tensor::short_list;

/// One [`Placement`] per mesh axis, and the order in which axes split a dim, outermost first.
///
/// Displayed and parsed as `(S0, R)`. If axes split one dim in an order other than the mesh's, `^k` gives each axis's
/// position in that order, 0 being the outermost: `(S0^1, S0^0)`.
///
/// The order matters only among axes that split a common dim. It is stored in a canonical form, so that layouts with
/// the same meaning compare equal.
///
/// ```
/// use isoshard::placement::{Layout, short::*};
///
/// let layout = Layout::new([shard(0), R]);
/// assert_eq!(layout, "(S0, R)".parse()?);
/// assert_eq!(layout.axis(0), &shard(0));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Layout {
    placements: SmallVec<[Placement; 4]>,
    order: AxisOrder,
}

/// A layout as an argument: a [`Layout`], a reference to one, or its text.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let x = DTensor::zeros(&mesh, DType::F32, [4], "(S0)")?;
///     let y = DTensor::zeros(&mesh, DType::F32, [4], "(R)")?.redistribute(x.layout())?;
///     assert_eq!(y.layout(), x.layout());
///     let refused = x.redistribute("S0").unwrap_err().to_string();
///     assert_eq!(refused, "layout: cannot be read; got \"S0\"; write it as (S0, R)");
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
pub trait IntoLayout {
    /// Returns the layout.
    ///
    /// ```
    /// use isoshard::placement::{IntoLayout, Layout};
    /// assert_eq!("(R, R)".into_layout()?, Layout::replicated(2));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a text that is no layout.
    fn into_layout(self) -> Result<Layout>;
}

impl IntoLayout for Layout {
    fn into_layout(self) -> Result<Layout> {
        Ok(self)
    }
}

impl IntoLayout for &Layout {
    fn into_layout(self) -> Result<Layout> {
        Ok(self.clone())
    }
}

impl IntoLayout for &str {
    fn into_layout(self) -> Result<Layout> {
        self.parse()
    }
}

impl IntoLayout for &&str {
    fn into_layout(self) -> Result<Layout> {
        self.parse()
    }
}

impl IntoLayout for &String {
    fn into_layout(self) -> Result<Layout> {
        self.parse()
    }
}

/// Mesh axes in some order.
type AxisOrder = SmallVec<[usize; 4]>;

impl Layout {
    /// Creates a layout from one placement per mesh axis; the first axis is the outermost.
    ///
    /// ```
    /// use isoshard::placement::{Layout, short::*};
    /// assert_eq!(Layout::new([shard(1), R]).to_string(), "(S1, R)");
    /// ```
    pub fn new(placements: impl IntoIterator<Item = Placement>) -> Layout {
        let placements: SmallVec<_> = short_list(placements);
        let order = (0..placements.len()).collect();
        Layout { placements, order }
    }

    /// Creates the layout that replicates along each of `ndim` axes.
    ///
    /// ```
    /// use isoshard::placement::Layout;
    /// assert_eq!(Layout::replicated(2).to_string(), "(R, R)");
    /// ```
    pub fn replicated(ndim: usize) -> Layout {
        Layout::new(std::iter::repeat_n(Placement::Replicate, ndim))
    }

    /// Returns the same placements with the axes in this order, outermost first.
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
    /// Refuses an `order` that is not a permutation of the axes.
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

    /// Returns the number of mesh axes.
    ///
    /// ```
    /// use isoshard::placement::Layout;
    /// assert_eq!("(S0, R, S1)".parse::<Layout>()?.ndim(), 3);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn ndim(&self) -> usize {
        self.placements.len()
    }

    /// Returns the placements, one per axis.
    ///
    /// ```
    /// use isoshard::placement::{Layout, short::*};
    /// assert_eq!("(S0, R)".parse::<Layout>()?.placements(), [shard(0), R]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// Returns the placement along axis `a`.
    ///
    /// # Panics
    /// Panics if the layout has no axis `a`.
    ///
    /// ```
    /// use isoshard::placement::{Layout, short::*};
    /// assert_eq!("(S0, R)".parse::<Layout>()?.axis(1), &R);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn axis(&self, a: usize) -> &Placement {
        &self.placements[a]
    }

    /// Returns all axes, outermost first, in the canonical form: in mesh order if the order does not matter.
    ///
    /// ```
    /// use isoshard::placement::Layout;
    /// assert_eq!("(S0^1, S0^0)".parse::<Layout>()?.order(), [1, 0]);
    /// assert_eq!("(S0, S1)".parse::<Layout>()?.with_order(&[1, 0])?.order(), [0, 1]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Returns the layout with another placement along axis `a`. The other axes keep their relative order, and `a`
    /// becomes the innermost axis on its new dim. Setting the placement that `a` already has changes nothing.
    ///
    /// ```
    /// use isoshard::placement::{Layout, short::*};
    /// let layout = Layout::new([shard(1), shard(0)]);
    /// assert_eq!(layout.set(0, shard(0)).to_string(), "(S0^1, S0^0)");
    /// ```
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

    /// Returns the axes that split `dim`, outermost first. A ragged axis splits all dims of its prefix.
    ///
    /// ```
    /// use isoshard::placement::Layout;
    /// let layout: Layout = "(S0^1, S0^0, S1)".parse()?;
    /// assert_eq!(layout.splitters(0).collect::<Vec<_>>(), [1, 0]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn splitters(&self, dim: usize) -> impl Iterator<Item = usize> + '_ {
        self.order.iter().copied().filter(move |&a| self.placements[a].splits(dim))
    }

    /// Returns true if any axis is [`Placement::Partial`].
    ///
    /// ```
    /// use isoshard::placement::Layout;
    /// assert!("(P(sum), S0)".parse::<Layout>()?.has_partial());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn has_partial(&self) -> bool {
        self.placements.iter().any(Placement::is_partial)
    }

    /// Returns true if every axis is [`Placement::Replicate`].
    ///
    /// ```
    /// use isoshard::placement::Layout;
    /// assert!(Layout::replicated(2).is_replicated());
    /// ```
    pub fn is_replicated(&self) -> bool {
        self.placements.iter().all(Placement::is_replicate)
    }

    /// Returns the layout with every `Partial` axis replicated.
    pub(crate) fn reduced(&self) -> Layout {
        let whole = |p: &Placement| if p.is_partial() { Placement::Replicate } else { p.clone() };
        let placements: SmallVec<[Placement; 4]> = short_list(self.placements.iter().map(whole));
        let order = canonical(&placements, self.order.clone());
        Layout { placements, order }
    }

    /// Returns the first axis with a [`Placement::RaggedShard`].
    ///
    /// ```
    /// use isoshard::placement::Layout;
    /// assert_eq!("(S1, RS(0..1; 2,3))".parse::<Layout>()?.ragged_axis(), Some(1));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn ragged_axis(&self) -> Option<usize> {
        self.placements.iter().position(|p| p.ragged_units().is_some())
    }

    /// Returns the `^k` of the notation: the rank of `a` in the order of the [axes that it shares dims
    /// with](axes_sharing_dims), 0 being the outermost; `None` if these axes are in mesh order.
    pub(super) fn nesting(&self, a: usize) -> Option<usize> {
        if self.order.is_sorted() {
            return None;
        }
        let family = axes_sharing_dims(&self.placements, a);
        let order: AxisOrder = self.order.iter().copied().filter(|b| family.contains(b)).collect();
        if order.is_sorted() { None } else { order.iter().position(|&b| b == a) }
    }
}

/// Returns `a` and the axes that share split dims with it, directly or through further axes.
pub(super) fn axes_sharing_dims(placements: &[Placement], a: usize) -> AxisOrder {
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

/// Returns the lexicographically least order that keeps the relative order of each two axes that share a dim. It is a
/// normal form: two orders mean the same if and only if they agree on all such pairs (traces of Cartier and Foata).
fn canonical(placements: &[Placement], mut order: AxisOrder) -> AxisOrder {
    for i in 0..order.len() {
        // An axis may come next unless an axis before it shares a dim with it.
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
    /// Writes `(name:S0, ...)`, omitting `name:` if `name` returns `None`.
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
    fn order_counts_only_if_dims_are_shared() {
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
