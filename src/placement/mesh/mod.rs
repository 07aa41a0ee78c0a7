//! Meshes: grids of ranks with named axes.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::FxHasher;
use smallvec::SmallVec;

use super::grid::{Axes, Axis, RankList, coords_of, positions, row_major, strides_of};
use crate::error::{Error, Result};
use crate::tensor::{Dims, short_list, sort_by_key};

/// The most ranks that a mesh lists one by one.
const MOST_LISTED: usize = 1 << 24;

/// An n-D grid of ranks with named axes, as one of its ranks sees it.
///
/// Displayed and parsed as `(dp=2, tp=2)`. A mesh holds all ranks of the world ([`Mesh::new`]) or a chosen list of
/// them ([`Mesh::over`]). It is metadata: any rank can create it, without communication. Cloning shares it. Meshes
/// compare by content: axes, ranks, and the rank that sees the mesh. A mesh needs no memory per rank, because a rank
/// is `base + sum(coordinate * stride)`, unless its ranks are listed in an order that no strides describe.
///
/// ```
/// # fn main() -> isoshard::Result<()> {
/// use isoshard::placement::Mesh;
///
/// let mesh = Mesh::new(&[("dp", 2), ("tp", 3)], 4)?;
/// assert_eq!(mesh.coords(), [1, 1]);
/// assert_eq!(mesh.slice(&[1]).ranks().collect::<Vec<_>>(), [3, 4, 5]);
/// assert_eq!(mesh.slice(&[0]).ranks().collect::<Vec<_>>(), [1, 4]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Mesh(Arc<MeshGrid>);

/// The length and stride of each axis.
type Strides = SmallVec<[(usize, usize); 4]>;

/// The axes and ranks of a mesh, with the rank that sees it.
struct MeshGrid {
    axes: Axes,
    /// The position of the origin: `base + sum(coordinate * stride)` is a rank or, with a list, an index into it.
    base: usize,
    list: Option<Arc<RankList>>,
    rank: usize,
    coords: Dims,
    /// The hash of the fields above: hashing a mesh as part of a cache key takes one word.
    hash: u64,
}

impl Mesh {
    /// Creates the row-major mesh over the ranks `0..product` of the axis lengths, seen from `rank`. Without axes it
    /// is a single rank.
    ///
    /// ```
    /// use isoshard::placement::Mesh;
    /// let mesh = Mesh::new(&[("dp", 2), ("tp", 2)], 3)?;
    /// assert_eq!((mesh.to_string(), mesh.rank_len()), ("(dp=2, tp=2)".to_string(), 4));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses an axis without ranks; a name that is empty, used twice, or not made of letters, digits and `_`; a
    /// number of ranks that overflows; and a `rank` that is not in the mesh.
    pub fn new(axes: &[(&str, usize)], rank: usize) -> Result<Mesh> {
        let given = || format!("rank {rank} of {}", AxesText(axes));
        let rank_len = check_axes(axes, given)?;
        if rank >= rank_len {
            let remedy = format!("its ranks are 0 to {}", rank_len - 1);
            return Err(Error::invalid("mesh", "this rank is not in the mesh", given(), remedy));
        }
        Ok(Mesh::from_parts(row_major(axes, rank_len), 0, None, rank))
    }

    /// Creates the mesh over these ranks of the world, row-major, seen from the first of them; [`Mesh::seen_from`]
    /// changes the rank that sees it. Any rank can create it, also a rank outside the mesh.
    ///
    /// ```
    /// # fn main() -> isoshard::Result<()> {
    /// use isoshard::placement::Mesh;
    ///
    /// let generate = Mesh::over(&[("dp", 2), ("tp", 2)], 2..6)?;
    /// assert_eq!(generate.coords_of(5).as_deref(), Some(&[1, 1][..]));
    /// assert!(!generate.contains(0));
    /// // The ranks may come in any order: here host 1 counts its GPUs backwards.
    /// let odd = Mesh::over(&[("host", 2), ("gpu", 3)], [0, 1, 2, 5, 4, 3])?;
    /// assert_eq!(odd.seen_from(4).expect("a member").slice(&[0]).ranks().collect::<Vec<_>>(), [1, 4]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Refuses the axes that [`Mesh::new`] refuses, a number of ranks other than the product of the axis lengths, more
    /// than 2^24 ranks, and a rank that is listed twice.
    pub fn over(axes: &[(&str, usize)], ranks: impl IntoIterator<Item = usize>) -> Result<Mesh> {
        let ranks = ranks.into_iter();
        let least = ranks.size_hint().0;
        let ranks: Vec<usize> = ranks.take(if least > MOST_LISTED { 0 } else { MOST_LISTED + 1 }).collect();
        if least.max(ranks.len()) > MOST_LISTED {
            let given = format!("{} over {} or more", AxesText(axes), least.max(ranks.len()));
            let remedy = format!("list at most {MOST_LISTED}, or use Mesh::new");
            return Err(Error::invalid("mesh", "too many ranks are listed", given, remedy));
        }
        let given = || format!("{} over {}", AxesText(axes), RanksText(&ranks));
        let rank_len = check_axes(axes, given)?;
        if ranks.len() != rank_len {
            let rule = "the number of ranks differs from the product of the axis lengths";
            return Err(Error::invalid(
                "mesh",
                rule,
                given(),
                format!("name {rank_len}, not {}", ranks.len()),
            ));
        }
        let mut sorted = ranks.clone();
        sorted.sort_unstable();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            let remedy = format!("name rank {} once", pair[0]);
            return Err(Error::invalid("mesh", "a rank is listed twice", given(), remedy));
        }
        let first = ranks[0];
        Ok(Mesh::from_ranks(row_major(axes, rank_len), ranks, first))
    }

    /// Parses `dp=2,tp=2`, with or without spaces and parentheses; `1` is the mesh without axes, of a single rank.
    ///
    /// ```
    /// use isoshard::placement::Mesh;
    /// assert_eq!(Mesh::parse("dp=2,tp=4", 5)?, Mesh::new(&[("dp", 2), ("tp", 4)], 5)?);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses text of another form, and what [`Mesh::new`] refuses.
    pub fn parse(text: &str, rank: usize) -> Result<Mesh> {
        let unread = || {
            Error::invalid(
                "mesh",
                "cannot be read",
                format!("{text:?}"),
                "write pairs axis=ranks such as dp=2,tp=4, or 1 for a single rank",
            )
        };
        let trimmed = text.trim();
        let inner = trimmed.strip_prefix('(').and_then(|t| t.strip_suffix(')')).unwrap_or(trimmed).trim();
        if inner == "1" || (inner.is_empty() && trimmed.starts_with('(')) {
            return Mesh::new(&[], rank);
        }
        let pairs = inner.split(',').map(|pair| {
            let (name, len) = pair.split_once('=').ok_or_else(unread)?;
            Ok((name.trim(), len.trim().parse().map_err(|_| unread())?))
        });
        Mesh::new(&pairs.collect::<Result<Vec<_>>>()?, rank)
    }

    /// Returns the number of axes.
    ///
    /// ```
    /// use isoshard::placement::Mesh;
    /// assert_eq!(Mesh::parse("dp=2,tp=2", 0)?.ndim(), 2);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn ndim(&self) -> usize {
        self.0.axes.len()
    }

    /// Returns the name of axis `a`.
    ///
    /// ```
    /// use isoshard::placement::Mesh;
    /// assert_eq!(Mesh::parse("dp=2,tp=4", 0)?.axis_name(1), "tp");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Panics
    /// Panics if the mesh has no axis `a`.
    pub fn axis_name(&self, a: usize) -> &str {
        &self.0.axes[a].name
    }

    /// Returns the number of ranks along axis `a`; at least 1.
    ///
    /// ```
    /// use isoshard::placement::Mesh;
    /// assert_eq!(Mesh::parse("dp=2,tp=4", 0)?.axis_len(1), 4);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Panics
    /// Panics if the mesh has no axis `a`.
    pub fn axis_len(&self, a: usize) -> usize {
        self.0.axes[a].len
    }

    /// Returns the rank at the origin, and the length and stride of each axis, if ranks follow strides: then a rank
    /// is `base + sum(coordinate * stride)`. Returns `None` if the ranks were listed in another order.
    ///
    /// ```
    /// use isoshard::placement::Mesh;
    /// let (base, axes) = Mesh::over(&[("dp", 2), ("tp", 2)], 4..8)?.strides().expect("ranks in order");
    /// assert_eq!((base, axes.as_slice()), (4, &[(2, 2), (2, 1)][..]));
    /// assert!(Mesh::over(&[("dp", 3)], [4, 2, 0])?.strides().is_none());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn strides(&self) -> Option<(usize, Strides)> {
        let axes = self.0.axes.iter().map(|axis| (axis.len, axis.stride)).collect();
        self.0.list.is_none().then_some((self.0.base, axes))
    }

    /// Returns the index of the axis called `name`.
    ///
    /// ```
    /// use isoshard::placement::Mesh;
    /// assert_eq!(Mesh::parse("dp=2,tp=2", 0)?.axis("tp")?, 1);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses a name that no axis has, and lists the names of the axes.
    pub fn axis(&self, name: &str) -> Result<usize> {
        self.0.axes.iter().position(|axis| &*axis.name == name).ok_or_else(|| {
            let names: Vec<&str> = self.0.axes.iter().map(|axis| &*axis.name).collect();
            let remedy = match names.len() {
                0 => "it has no axes".into(),
                _ => format!("the axes are {}", names.join(", ")),
            };
            Error::invalid("mesh", "no such axis", format!("{name:?} of {self}"), remedy)
        })
    }

    /// Returns the number of ranks in the mesh.
    ///
    /// ```
    /// use isoshard::placement::Mesh;
    /// assert_eq!(Mesh::parse("dp=2,tp=4", 0)?.rank_len(), 8);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn rank_len(&self) -> usize {
        self.0.axes.iter().map(|axis| axis.len).product()
    }

    /// Returns the rank that sees this mesh, as numbered in the world.
    ///
    /// ```
    /// use isoshard::placement::Mesh;
    /// assert_eq!(Mesh::parse("dp=2,tp=2", 3)?.rank(), 3);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Returns the coordinates of [`Mesh::rank`], one per axis.
    ///
    /// ```
    /// use isoshard::placement::Mesh;
    /// assert_eq!(Mesh::parse("dp=2,tp=2", 2)?.coords(), [1, 0]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn coords(&self) -> &[usize] {
        &self.0.coords
    }

    /// Returns the rank, as numbered in the world, at `coords`: one coordinate per axis, each less than the axis's
    /// length.
    ///
    /// ```
    /// use isoshard::placement::Mesh;
    /// assert_eq!(Mesh::parse("dp=2,tp=4", 0)?.rank_at(&[1, 2]), 6);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn rank_at(&self, coords: &[usize]) -> usize {
        debug_assert_eq!(coords.len(), self.ndim(), "one coordinate an axis");
        let steps = self.0.axes.iter().zip(coords).map(|(axis, &c)| {
            debug_assert!(c < axis.len, "coordinate {c} of axis {}={}", axis.name, axis.len);
            c * axis.stride
        });
        self.0.rank_of(self.0.base + steps.sum::<usize>())
    }

    /// Returns the coordinates of `rank`, or `None` if it is not in the mesh.
    ///
    /// ```
    /// use isoshard::placement::Mesh;
    /// let mesh = Mesh::parse("dp=2,tp=4", 0)?;
    /// assert_eq!(mesh.coords_of(6).as_deref(), Some(&[1, 2][..]));
    /// assert_eq!(mesh.coords_of(8), None);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn coords_of(&self, rank: usize) -> Option<Dims> {
        coords_of(&self.0.axes, self.0.base, self.0.list.as_deref(), rank)
    }

    /// Returns true if `rank` is in the mesh.
    ///
    /// ```
    /// use isoshard::placement::Mesh;
    /// assert!(!Mesh::over(&[("tp", 2)], 2..4)?.contains(0));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn contains(&self, rank: usize) -> bool {
        self.coords_of(rank).is_some()
    }

    /// Returns true if the mesh holds all ranks of a world of `len` ranks, row-major.
    pub(crate) fn is_all_of(&self, len: usize) -> bool {
        let mut stride = len;
        let row_major = |axis: &Axis| {
            stride /= axis.len;
            axis.len == 1 || axis.stride == stride
        };
        self.rank_len() == len
            && self.0.base == 0
            && self.0.list.is_none()
            && self.0.axes.iter().all(row_major)
    }

    /// Returns the row-major position of `coords` among [`Mesh::ranks`].
    pub(crate) fn position_of(&self, coords: &[usize]) -> usize {
        self.0.axes.iter().zip(coords).fold(0, |p, (axis, &c)| p * axis.len + c)
    }

    /// Returns the sub-mesh along `axes`, in that order, that contains this rank: along the other axes, all its ranks
    /// have this rank's coordinates.
    ///
    /// ```
    /// use isoshard::placement::Mesh;
    /// let tp = Mesh::parse("dp=2,tp=2", 3)?.slice(&[1]);
    /// assert_eq!((tp.to_string(), tp.ranks().collect::<Vec<_>>()), ("(tp=2)".to_string(), vec![2, 3]));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Panics
    /// Panics if `axes` names an axis twice, or one that the mesh does not have.
    pub fn slice(&self, axes: &[usize]) -> Mesh {
        let twice = axes.iter().enumerate().any(|(i, a)| axes[..i].contains(a));
        assert!(!twice, "slice: axes {axes:?} of {self} repeat");
        let inner = &*self.0;
        let inside: usize = axes.iter().map(|&a| inner.coords[a] * inner.axes[a].stride).sum();
        let kept: Axes = short_list(axes.iter().map(|&a| inner.axes[a].clone()));
        let here = inner.axes.iter().zip(&inner.coords).map(|(axis, c)| axis.stride * c).sum::<usize>();
        let base = inner.base + here - inside;
        if inner.list.is_none() {
            return Mesh::from_parts(kept, base, None, inner.rank);
        }
        // Ranks that follow no strides in the whole mesh may follow some here.
        let ranks: Vec<usize> = positions(&kept, base).map(|position| inner.rank_of(position)).collect();
        let mut stride = ranks.len();
        let kept = kept.into_iter().map(|axis| {
            stride /= axis.len;
            Axis { stride, ..axis }
        });
        Mesh::from_ranks(kept.collect(), ranks, inner.rank)
    }

    /// Returns the same mesh as `rank` sees it, or `None` if that rank is not in the mesh.
    ///
    /// ```
    /// use isoshard::placement::Mesh;
    /// let mesh = Mesh::parse("dp=2,tp=2", 0)?;
    /// assert_eq!(mesh.seen_from(3).expect("a member").coords(), [1, 1]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn seen_from(&self, rank: usize) -> Option<Mesh> {
        let MeshGrid { axes, base, list, .. } = &*self.0;
        self.contains(rank).then(|| Mesh::from_parts(axes.clone(), *base, list.clone(), rank))
    }

    /// Returns the ranks, as numbered in the world, row-major.
    ///
    /// ```
    /// use isoshard::placement::Mesh;
    /// let mesh = Mesh::over(&[("tp", 3)], [4, 2, 0])?;
    /// assert_eq!(mesh.ranks().collect::<Vec<_>>(), [4, 2, 0]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn ranks(&self) -> impl Iterator<Item = usize> + '_ {
        positions(&self.0.axes, self.0.base).map(|position| self.0.rank_of(position))
    }

    /// Returns the mesh with its ranks, as error messages name it: `(tp=2) over {4, 5}`.
    pub(crate) fn with_ranks(&self) -> String {
        format!(
            "{self} over {}",
            RanksText(&self.ranks().take(SHOWN + 1).collect::<Vec<_>>()).of(self.rank_len())
        )
    }

    /// Creates a mesh of `ranks`, row-major along axes with row-major strides: with strides if the ranks follow some,
    /// otherwise with a list.
    fn from_ranks(mut axes: Axes, ranks: Vec<usize>, rank: usize) -> Mesh {
        if let Some(strides) = strides_of(&axes, &ranks) {
            axes.iter_mut().zip(strides).for_each(|(axis, stride)| axis.stride = stride);
            return Mesh::from_parts(axes, ranks[0], None, rank);
        }
        let mut positions: Vec<usize> = (0..ranks.len()).collect();
        sort_by_key(&mut positions, |&position| ranks[position]);
        Mesh::from_parts(axes, 0, Some(Arc::new(RankList { ranks, positions })), rank)
    }

    fn from_parts(mut axes: Axes, base: usize, list: Option<Arc<RankList>>, rank: usize) -> Mesh {
        axes.iter_mut().filter(|axis| axis.len == 1).for_each(|axis| axis.stride = 1);
        let coords = coords_of(&axes, base, list.as_deref(), rank)
            .expect("the callers have checked that the rank is inside");
        let mut hasher = FxHasher::default();
        (axes.as_slice(), base, &list, rank).hash(&mut hasher);
        Mesh(Arc::new(MeshGrid { axes, base, list, rank, coords, hash: hasher.finish() }))
    }
}

impl MeshGrid {
    fn rank_of(&self, position: usize) -> usize {
        self.list.as_ref().map_or(position, |list| list.ranks[position])
    }
}

/// Checks the axes, and returns the number of ranks.
fn check_axes(axes: &[(&str, usize)], given: impl Fn() -> String) -> Result<usize> {
    let refuse = |rule: &str, remedy: String| Err(Error::invalid("mesh", rule, given(), remedy));
    for (i, &(name, len)) in axes.iter().enumerate() {
        if name.is_empty() || !name.chars().all(|c| c.is_alphanumeric() || c == '_') {
            return refuse("an axis name is not a word", "use letters, digits and _".into());
        }
        if axes[..i].iter().any(|&(other, _)| other == name) {
            return refuse("two axes have one name", format!("rename one {name}"));
        }
        if len == 0 {
            return refuse("an axis has no ranks", format!("give {name} at least 1"));
        }
    }
    match axes.iter().try_fold(1usize, |n, &(_, len)| n.checked_mul(len)) {
        Some(rank_len) => Ok(rank_len),
        None => refuse("the number of ranks overflows", "use shorter axes".into()),
    }
}

impl PartialEq for Mesh {
    fn eq(&self, other: &Mesh) -> bool {
        let (a, b) = (&*self.0, &*other.0);
        Arc::ptr_eq(&self.0, &other.0)
            || (a.hash == b.hash
                && a.rank == b.rank
                && a.base == b.base
                && a.axes == b.axes
                && a.list == b.list)
    }
}

impl Eq for Mesh {}

impl Hash for Mesh {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash);
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs: SmallVec<[(&str, usize); 4]> =
            self.0.axes.iter().map(|axis| (&*axis.name, axis.len)).collect();
        AxesText(&pairs).fmt(f)
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Axes as meshes are displayed: `(dp=2, tp=2)`.
struct AxesText<'a>(&'a [(&'a str, usize)]);

impl fmt::Display for AxesText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(")?;
        for (i, (name, len)) in self.0.iter().enumerate() {
            write!(f, "{}{name}={len}", if i == 0 { "" } else { ", " })?;
        }
        f.write_str(")")
    }
}

/// The number of ranks that an error message lists; it counts the rest.
const SHOWN: usize = 8;

/// Ranks as error messages list them: `{0, 1, 5}`.
struct RanksText<'a>(&'a [usize]);

impl RanksText<'_> {
    /// Returns the text if these ranks are the first of `len`.
    fn of(&self, len: usize) -> String {
        let shown: Vec<String> = self.0.iter().take(SHOWN).map(usize::to_string).collect();
        let more = if len > SHOWN { format!(" and {} more", len - SHOWN) } else { String::new() };
        format!("{{{}{more}}}", shown.join(", "))
    }
}

impl fmt::Display for RanksText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.of(self.0.len()))
    }
}

#[cfg(test)]
mod tests;
