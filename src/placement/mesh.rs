//! The grid of ranks.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::FxHasher;
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::tensor::Dims;

/// An n-D grid of ranks with named axes, as one of its ranks sees it. Written `(dp=2, tp=2)`.
///
/// Cloning is a reference count. Meshes compare by content: axes, ranks, and the rank that looks. Nothing in it
/// grows with the number of ranks: a rank is `base + sum(coordinate * stride)`.
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
pub struct Mesh(Arc<Inner>);

struct Inner {
    axes: SmallVec<[Axis; 4]>,
    base: usize,
    rank: usize,
    coords: Dims,
    /// Of the fields above, so that a mesh in a cache key costs one word.
    hash: u64,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Axis {
    name: Arc<str>,
    len: usize,
    stride: usize,
}

impl Mesh {
    /// The row-major mesh over ranks `0..product` of the axis lengths, seen from `rank`. No axes: a single rank.
    ///
    /// # Errors
    /// Refuses an axis without ranks, a name that is empty, used twice, or not made of letters, digits and `_`, more
    /// ranks than can be counted, and a `rank` that is not in the mesh.
    pub fn new(axes: &[(&str, usize)], rank: usize) -> Result<Mesh> {
        let refuse = |rule: &str, remedy: String| {
            Err(Error::invalid("mesh", rule, format!("rank {rank} of {}", Pairs(axes)), remedy))
        };
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
        let Some(rank_len) = axes.iter().try_fold(1usize, |n, &(_, len)| n.checked_mul(len)) else {
            return refuse("the number of ranks overflows", "use shorter axes".into());
        };
        if rank >= rank_len {
            return refuse("this rank is not in the mesh", format!("its ranks are 0 to {}", rank_len - 1));
        }
        let mut stride = rank_len;
        let axes = axes.iter().map(|&(name, len)| {
            stride /= len;
            Axis { name: name.into(), len, stride }
        });
        Ok(Mesh::from_parts(axes.collect(), 0, rank))
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
        self.0.base + steps.sum::<usize>()
    }

    /// The coordinates of `rank`, or `None` where it is not in the mesh.
    pub fn coords_of(&self, rank: usize) -> Option<Dims> {
        coords_of(&self.0.axes, self.0.base, rank)
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
        let inside: usize = axes.iter().map(|&a| self.0.coords[a] * self.0.axes[a].stride).sum();
        let kept = axes.iter().map(|&a| self.0.axes[a].clone()).collect();
        Mesh::from_parts(kept, self.0.rank - inside, self.0.rank)
    }

    /// The same mesh as `rank` sees it, or `None` where that rank is not in it.
    pub fn seen_from(&self, rank: usize) -> Option<Mesh> {
        self.coords_of(rank).map(|_| Mesh::from_parts(self.0.axes.clone(), self.0.base, rank))
    }

    /// The ranks, numbered in the world, row-major.
    pub fn ranks(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.rank_len()).map(|mut position| {
            self.0.axes.iter().rev().fold(self.0.base, |rank, axis| {
                let coord = position % axis.len;
                position /= axis.len;
                rank + coord * axis.stride
            })
        })
    }

    fn from_parts(axes: SmallVec<[Axis; 4]>, base: usize, rank: usize) -> Mesh {
        let coords = coords_of(&axes, base, rank).expect("the callers have checked that the rank is inside");
        let mut hasher = FxHasher::default();
        (axes.as_slice(), base, rank).hash(&mut hasher);
        Mesh(Arc::new(Inner { axes, base, rank, coords, hash: hasher.finish() }))
    }
}

/// Divides by the strides, largest first: each is a multiple of all that the smaller ones can reach, as they come from
/// a row-major mesh. Axes of one rank may share a stride with others and stand at 0.
fn coords_of(axes: &[Axis], base: usize, rank: usize) -> Option<Dims> {
    let mut rest = rank.checked_sub(base)?;
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

impl PartialEq for Mesh {
    fn eq(&self, other: &Mesh) -> bool {
        let (a, b) = (&*self.0, &*other.0);
        Arc::ptr_eq(&self.0, &other.0)
            || (a.hash == b.hash && a.rank == b.rank && a.base == b.base && a.axes == b.axes)
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
        Pairs(&pairs).fmt(f)
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

struct Pairs<'a>(&'a [(&'a str, usize)]);

impl fmt::Display for Pairs<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(")?;
        for (i, (name, len)) in self.0.iter().enumerate() {
            write!(f, "{}{name}={len}", if i == 0 { "" } else { ", " })?;
        }
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
