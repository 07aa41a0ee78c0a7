//! The grid of ranks.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::FxHasher;
use smallvec::SmallVec;

use super::grid::{Axes, Axis, RankList, coords_of, places, row_major, strides_of};
use crate::error::{Error, Result};
use crate::tensor::Dims;

/// An n-D grid of ranks with named axes, as one of its ranks sees it. Written `(dp=2, tp=2)`.
///
/// It holds all ranks of the world ([`Mesh::new`]) or any others ([`Mesh::over`]). Cloning is a reference count. Meshes
/// compare by content: axes, ranks, and the rank that looks. Nothing in it grows with the number of ranks, a rank being
/// `base + sum(coordinate * stride)`, unless they were listed in an order that follows no strides.
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

/// Length and stride of each axis.
type Strides = SmallVec<[(usize, usize); 4]>;

struct MeshGrid {
    axes: Axes,
    /// Where coordinates lead: `base + sum(coordinate * stride)` is a rank, or where there is a list, a place in it.
    base: usize,
    list: Option<Arc<RankList>>,
    rank: usize,
    coords: Dims,
    /// Of the fields above, so that a mesh in a cache key costs one word.
    hash: u64,
}

impl Mesh {
    /// The row-major mesh over ranks `0..product` of the axis lengths, seen from `rank`. No axes: a single rank.
    ///
    /// # Errors
    /// Refuses an axis without ranks, a name that is empty, used twice, or not made of letters, digits and `_`, more
    /// ranks than can be counted, and a `rank` that is not in the mesh.
    pub fn new(axes: &[(&str, usize)], rank: usize) -> Result<Mesh> {
        let given = || format!("rank {rank} of {}", AxesText(axes));
        let rank_len = check_axes(axes, given)?;
        if rank >= rank_len {
            let remedy = format!("its ranks are 0 to {}", rank_len - 1);
            return Err(Error::invalid("mesh", "this rank is not in the mesh", given(), remedy));
        }
        Ok(Mesh::from_parts(row_major(axes, rank_len), 0, None, rank))
    }

    /// The mesh over these ranks of the world, row-major, seen from the first of them; [`Mesh::seen_from`] turns it. Any
    /// rank may make it, also one outside: it is a fact. Ranks in a regular order take no memory.
    ///
    /// ```
    /// # fn main() -> isoshard::Result<()> {
    /// use isoshard::placement::Mesh;
    ///
    /// let generate = Mesh::over(&[("dp", 2), ("tp", 2)], 2..6)?;
    /// assert_eq!(generate.coords_of(5).as_deref(), Some(&[1, 1][..]));
    /// assert!(!generate.contains(0));
    /// // Neighbours in one machine are 0, 1, 2 and 5, 4, 3: any order will do.
    /// let odd = Mesh::over(&[("host", 2), ("gpu", 3)], [0, 1, 2, 5, 4, 3])?;
    /// assert_eq!(odd.seen_from(4).expect("a member").slice(&[0]).ranks().collect::<Vec<_>>(), [1, 4]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Refuses the axes that [`Mesh::new`] refuses, another number of ranks than the axes have, and a rank named twice.
    pub fn over(axes: &[(&str, usize)], ranks: impl IntoIterator<Item = usize>) -> Result<Mesh> {
        let ranks: Vec<usize> = ranks.into_iter().collect();
        let given = || format!("{} over {}", AxesText(axes), RanksText(&ranks));
        let rank_len = check_axes(axes, given)?;
        if ranks.len() != rank_len {
            let rule = "the number of ranks is not the axes'";
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
            return Err(Error::invalid("mesh", "a rank is in it twice", given(), remedy));
        }
        let first = ranks[0];
        Ok(Mesh::from_ranks(row_major(axes, rank_len), ranks, first))
    }

    /// Reads `dp=2,tp=2`, with or without spaces and parentheses; `1` is the mesh without axes, of a single rank.
    ///
    /// # Errors
    /// Refuses other texts, and what [`Mesh::new`] refuses.
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

    /// The number of axes.
    pub fn ndim(&self) -> usize {
        self.0.axes.len()
    }

    /// The name of axis `a`.
    pub fn axis_name(&self, a: usize) -> &str {
        &self.0.axes[a].name
    }

    /// The number of ranks along axis `a`; at least 1.
    pub fn axis_len(&self, a: usize) -> usize {
        self.0.axes[a].len
    }

    /// The rank at the origin, and length and stride of each axis, where ranks follow strides: `base + sum(coordinate *
    /// stride)`.
    pub fn strides(&self) -> Option<(usize, Strides)> {
        let axes = self.0.axes.iter().map(|axis| (axis.len, axis.stride)).collect();
        self.0.list.is_none().then_some((self.0.base, axes))
    }

    /// The axis called `name`.
    ///
    /// # Errors
    /// Refuses a name that no axis has, and gives those there are.
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

    /// The number of ranks in the mesh.
    pub fn rank_len(&self) -> usize {
        self.0.axes.iter().map(|axis| axis.len).product()
    }

    /// This rank, numbered in the world.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// This rank's coordinates, one an axis.
    pub fn coords(&self) -> &[usize] {
        &self.0.coords
    }

    /// The rank, numbered in the world, at `coords`; there is one coordinate an axis, each inside its axis.
    pub fn rank_at(&self, coords: &[usize]) -> usize {
        debug_assert_eq!(coords.len(), self.ndim(), "one coordinate an axis");
        let steps = self.0.axes.iter().zip(coords).map(|(axis, &c)| {
            debug_assert!(c < axis.len, "coordinate {c} of axis {}={}", axis.name, axis.len);
            c * axis.stride
        });
        self.0.rank_of(self.0.base + steps.sum::<usize>())
    }

    /// The coordinates of `rank`, or `None` where it is not in the mesh.
    pub fn coords_of(&self, rank: usize) -> Option<Dims> {
        coords_of(&self.0.axes, self.0.base, self.0.list.as_deref(), rank)
    }

    /// True where `rank` is in the mesh.
    pub fn contains(&self, rank: usize) -> bool {
        self.coords_of(rank).is_some()
    }

    /// True where the mesh is all ranks of a world of `len`, row-major.
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

    /// The row-major position of `coords` among [`Mesh::ranks`].
    pub fn position_of(&self, coords: &[usize]) -> usize {
        self.0.axes.iter().zip(coords).fold(0, |p, (axis, &c)| p * axis.len + c)
    }

    /// The sub-mesh along `axes`, in that order, that contains this rank: the other coordinates are fixed at its own.
    ///
    /// # Panics
    /// Where `axes` names an axis twice, or one that is not there.
    pub fn slice(&self, axes: &[usize]) -> Mesh {
        let twice = axes.iter().enumerate().any(|(i, a)| axes[..i].contains(a));
        assert!(!twice, "slice: axes {axes:?} of {self} repeat");
        let inner = &*self.0;
        let inside: usize = axes.iter().map(|&a| inner.coords[a] * inner.axes[a].stride).sum();
        let kept: Axes = axes.iter().map(|&a| inner.axes[a].clone()).collect();
        let place = inner.axes.iter().zip(&inner.coords).map(|(axis, c)| axis.stride * c).sum::<usize>();
        let base = inner.base + place - inside;
        if inner.list.is_none() {
            return Mesh::from_parts(kept, base, None, inner.rank);
        }
        // Ranks without an order may have one among these.
        let ranks: Vec<usize> = places(&kept, base).map(|place| inner.rank_of(place)).collect();
        let mut stride = ranks.len();
        let kept = kept.into_iter().map(|axis| {
            stride /= axis.len;
            Axis { stride, ..axis }
        });
        Mesh::from_ranks(kept.collect(), ranks, inner.rank)
    }

    /// The same mesh as `rank` sees it, or `None` where that rank is not in it.
    pub fn seen_from(&self, rank: usize) -> Option<Mesh> {
        let MeshGrid { axes, base, list, .. } = &*self.0;
        self.contains(rank).then(|| Mesh::from_parts(axes.clone(), *base, list.clone(), rank))
    }

    /// The ranks, numbered in the world, row-major.
    pub fn ranks(&self) -> impl Iterator<Item = usize> + '_ {
        places(&self.0.axes, self.0.base).map(|place| self.0.rank_of(place))
    }

    /// The mesh with its ranks, as errors name it: `(tp=2) over {4, 5}`.
    pub(crate) fn with_ranks(&self) -> String {
        format!(
            "{self} over {}",
            RanksText(&self.ranks().take(SHOWN + 1).collect::<Vec<_>>()).of(self.rank_len())
        )
    }

    /// `ranks` row-major along axes with row-major strides: as strides where they follow some, else as a list.
    fn from_ranks(mut axes: Axes, ranks: Vec<usize>, rank: usize) -> Mesh {
        if let Some(strides) = strides_of(&axes, &ranks) {
            axes.iter_mut().zip(strides).for_each(|(axis, stride)| axis.stride = stride);
            return Mesh::from_parts(axes, ranks[0], None, rank);
        }
        let mut places: Vec<usize> = (0..ranks.len()).collect();
        places.sort_unstable_by_key(|&place| ranks[place]);
        Mesh::from_parts(axes, 0, Some(Arc::new(RankList { ranks, places })), rank)
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
    fn rank_of(&self, place: usize) -> usize {
        self.list.as_ref().map_or(place, |list| list.ranks[place])
    }
}

/// The number of ranks, once the axes have been checked.
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

/// Ranks that an error lists; the rest it counts.
const SHOWN: usize = 8;

/// Ranks as errors list them: `{0, 1, 5}`.
struct RanksText<'a>(&'a [usize]);

impl RanksText<'_> {
    /// The same, of which these are the first of `len`.
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
mod tests {
    use super::*;

    #[test]
    fn any_ranks_in_any_order() {
        type Given<'a> = (&'a [(&'a str, usize)], &'a [usize], bool);
        let lists: [Given<'_>; 9] = [
            (&[("a", 2), ("b", 2)], &[2, 3, 4, 5], true),
            (&[("a", 2), ("b", 3)], &[1, 5, 9, 3, 7, 11], true),
            (&[("a", 2), ("b", 3)], &[1, 3, 5, 8, 10, 12], true),
            (&[("a", 3), ("b", 2)], &[1, 8, 3, 10, 5, 12], true),
            (&[("a", 3)], &[4, 2, 0], false),
            (&[("a", 1), ("b", 1)], &[7], true),
            (&[], &[3], true),
            (&[("a", 2), ("b", 1), ("c", 2)], &[6, 0, 9, 2], false),
            // It follows strides 3 and 2, by which 4 could be told from no coordinates by division.
            (&[("a", 2), ("b", 3)], &[0, 2, 4, 3, 5, 7], false),
        ];
        for (axes, ranks, regular) in lists {
            let mesh = Mesh::over(axes, ranks.iter().copied()).unwrap();
            assert_eq!((mesh.rank(), mesh.0.list.is_none()), (ranks[0], regular), "{ranks:?}");
            assert_eq!(mesh.ranks().collect::<Vec<_>>(), ranks);
            for r in 0..14 {
                let at = ranks.iter().position(|&other| other == r);
                assert_eq!(
                    mesh.coords_of(r).map(|c| (mesh.position_of(&c), mesh.rank_at(&c))),
                    at.map(|p| (p, r))
                );
                assert_eq!((mesh.contains(r), mesh.seen_from(r).is_some()), (at.is_some(), at.is_some()));
            }
            for (&rank, a) in ranks.iter().flat_map(|r| (0..axes.len()).map(move |a| (r, a))) {
                let here = mesh.seen_from(rank).unwrap();
                let agrees = |r: &usize| {
                    let c = mesh.coords_of(*r).unwrap();
                    (0..axes.len()).all(|b| a == b || c[b] == here.coords()[b])
                };
                let slice = here.slice(&[a]);
                assert!(slice.ranks().eq(ranks.iter().copied().filter(agrees)), "{slice} of {ranks:?}");
                // However it was come by: content is what counts.
                let listed = Mesh::over(&[axes[a]], slice.ranks()).unwrap().seen_from(rank).unwrap();
                assert_eq!((&listed, listed.0.hash), (&slice, slice.0.hash), "{ranks:?}");
            }
        }
        let whole = Mesh::over(&[("dp", 2), ("tp", 3)], 0..6).unwrap();
        assert_eq!(whole.seen_from(4).unwrap(), Mesh::parse("dp=2,tp=3", 4).unwrap());
        assert!(whole.is_all_of(6) && !whole.is_all_of(7) && !whole.slice(&[1, 0]).is_all_of(6));
        assert!(whole.slice(&[1]).is_all_of(3) && !whole.slice(&[0]).is_all_of(2));
        assert!(Mesh::over(&[("a", 1), ("b", 2)], 0..2).unwrap().slice(&[1, 0]).is_all_of(2));
        assert_eq!(whole.with_ranks(), "(dp=2, tp=3) over {0, 1, 2, 3, 4, 5}");
    }

    #[test]
    fn ranks_that_are_no_mesh() {
        let refused = |axes: &[(&str, usize)], ranks: &[usize], want: &str| {
            assert_eq!(Mesh::over(axes, ranks.iter().copied()).unwrap_err().to_string(), want);
        };
        refused(
            &[("a", 3)],
            &[4, 0, 4],
            "mesh: a rank is in it twice; got (a=3) over {4, 0, 4}; name rank 4 once",
        );
        let text = "mesh: the number of ranks is not the axes'; got (a=2, b=2) over {0, 1, 5}; name 4, not 3";
        refused(&[("a", 2), ("b", 2)], &[0, 1, 5], text);
        let text = "mesh: the number of ranks is not the axes'; got (a=2) over {0, 1, 2, 3, 4, 5, 6, 7 and 2 more}; name \
                    2, not 10";
        refused(&[("a", 2)], &(0..10).collect::<Vec<_>>(), text);
        refused(&[("a", 0)], &[], "mesh: an axis has no ranks; got (a=0) over {}; give a at least 1");
    }

    #[test]
    fn ranks_and_coordinates_are_inverse() {
        for text in ["1", "a=1", "a=5", "a=2,b=2", "a=2,b=1,c=3", "a=1,b=2", "a=2,b=3,c=1,d=2"] {
            let mesh = Mesh::parse(text, 0).unwrap();
            let ranks: Vec<usize> = mesh.ranks().collect();
            assert_eq!(ranks, (0..mesh.rank_len()).collect::<Vec<_>>(), "{text}");
            for rank in ranks {
                let coords = mesh.coords_of(rank).unwrap();
                assert_eq!((mesh.rank_at(&coords), mesh.position_of(&coords)), (rank, rank), "{text}");
            }
            assert_eq!(mesh.coords_of(mesh.rank_len()), None);
        }
    }

    #[test]
    fn slices_hold_the_ranks_that_agree_elsewhere() {
        let names = ["a", "b", "c", "d"];
        let lens = [2, 3, 1, 2];
        let axes: Vec<(&str, usize)> = names.into_iter().zip(lens).collect();
        for rank in 0..12 {
            let mesh = Mesh::new(&axes, rank).unwrap();
            for subset in 0..16usize {
                let kept: Vec<usize> = (0..4).filter(|a| subset >> a & 1 == 1).collect();
                let slice = mesh.slice(&kept);
                let agrees = |&r: &usize| {
                    let coords = mesh.coords_of(r).unwrap();
                    (0..4).all(|a| kept.contains(&a) || coords[a] == mesh.coords()[a])
                };
                let want: Vec<usize> = mesh.ranks().filter(agrees).collect();
                assert_eq!(slice.ranks().collect::<Vec<_>>(), want);
                assert_eq!((slice.rank(), slice.rank_at(slice.coords())), (rank, rank));
                for r in 0..14 {
                    let coords = slice.coords_of(r);
                    assert_eq!(coords.is_some(), want.contains(&r), "rank {r} of {slice} from {rank}");
                    assert!(coords.is_none_or(|c| slice.rank_at(&c) == r));
                    assert_eq!(slice.seen_from(r).map(|m| m.rank()), want.contains(&r).then_some(r));
                }
                let back: Vec<usize> = kept.iter().rev().copied().collect();
                let mut turned: Vec<usize> = mesh.slice(&back).ranks().collect();
                turned.sort_unstable();
                assert_eq!(turned, want);
            }
        }
    }

    #[test]
    fn meshes_compare_by_content() {
        let mesh = Mesh::parse("dp=2,tp=2", 1).unwrap();
        assert_eq!(mesh, Mesh::parse(&mesh.to_string(), 1).unwrap());
        assert_ne!(mesh, Mesh::parse("dp=2,tp=2", 0).unwrap());
        assert_ne!(mesh, Mesh::parse("dp=2,pp=2", 1).unwrap());
        assert_ne!(mesh, Mesh::parse("tp=2,dp=2", 1).unwrap());
        assert_eq!(mesh.slice(&[0, 1]), mesh);
        assert_eq!(mesh.slice(&[0, 1]).slice(&[1]), mesh.slice(&[1]));
        let other = Mesh::parse("dp=2,tp=2", 3).unwrap();
        assert_ne!(mesh.slice(&[1]), other.slice(&[1]), "ranks 0, 1 and ranks 2, 3");
        assert_eq!(Mesh::parse("1", 0).unwrap(), Mesh::parse("()", 0).unwrap());
        assert_eq!(Mesh::parse(" ( dp = 2 ) ", 0).unwrap().to_string(), "(dp=2)");
    }

    #[test]
    #[should_panic(expected = "slice: axes [0, 0] of (dp=2) repeat")]
    fn a_slice_names_an_axis_once() {
        let _ = Mesh::parse("dp=2", 0).unwrap().slice(&[0, 0]);
    }

    #[test]
    fn refusals() {
        let new = |axes: &[(&str, usize)], rank| Mesh::new(axes, rank).unwrap_err().to_string();
        let unread = |text: &str| Mesh::parse(text, 0).unwrap_err().to_string();
        assert_eq!(
            new(&[("dp", 0), ("tp", 2)], 0),
            "mesh: an axis has no ranks; got rank 0 of (dp=0, tp=2); give dp at least 1"
        );
        assert_eq!(
            new(&[("dp", 2), ("dp", 2)], 0),
            "mesh: two axes have one name; got rank 0 of (dp=2, dp=2); rename one dp"
        );
        assert_eq!(
            new(&[("", 2)], 0),
            "mesh: an axis name is not a word; got rank 0 of (=2); use letters, digits and _"
        );
        assert_eq!(new(&[("d:p", 2)], 0), new(&[("d p", 2)], 0).replace("d p", "d:p"));
        assert_eq!(
            new(&[("a", usize::MAX), ("b", 2)], 0),
            "mesh: the number of ranks overflows; got rank 0 of (a=18446744073709551615, b=2); use shorter axes"
        );
        assert_eq!(
            new(&[("dp", 2), ("tp", 2)], 4),
            "mesh: this rank is not in the mesh; got rank 4 of (dp=2, tp=2); its ranks are 0 to 3"
        );
        for text in ["", "4", "dp", "dp=", "dp=x", "dp=2,", "dp=2;tp=2", "dp=-1"] {
            let want = format!(
                "mesh: cannot be read; got {text:?}; write pairs axis=ranks such as dp=2,tp=4, or 1 for a single rank"
            );
            assert_eq!(unread(text), want);
        }
        let axis = |text: &str| Mesh::parse(text, 0).unwrap().axis("pp").unwrap_err().to_string();
        assert_eq!(axis("dp=2,tp=2"), "mesh: no such axis; got \"pp\" of (dp=2, tp=2); the axes are dp, tp");
        assert_eq!(axis("1"), "mesh: no such axis; got \"pp\" of (); it has no axes");
    }
}
