//! One tensor's shared facts.

use std::fmt;

use smallvec::SmallVec;

use super::{Layout, Mesh, Placement, Region, chunk};
use crate::error::{Error, Result};
use crate::tensor::{DType, Dims, Shape};

/// What all ranks know of a tensor. Written `f32[64, 128]@(dp:S0, tp:R)`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Spec {
    /// The ranks that hold it.
    pub mesh: Mesh,
    /// Its element type.
    pub dtype: DType,
    /// Its global shape.
    pub shape: Shape,
    /// What each mesh axis does to it.
    pub layout: Layout,
}

impl Spec {
    /// Joins the facts and [validates](Spec::validate) them.
    ///
    /// # Errors
    /// Refuses what [`Spec::validate`] refuses, in the name of `layout`.
    pub fn new(mesh: &Mesh, dtype: DType, shape: impl Into<Shape>, layout: Layout) -> Result<Spec> {
        let spec = Spec { mesh: mesh.clone(), dtype, shape: shape.into(), layout };
        spec.validate("layout")?;
        Ok(spec)
    }

    /// The same tensor in another layout.
    ///
    /// # Errors
    /// Refuses what [`Spec::validate`] refuses, in the name of `layout`.
    pub fn with_layout(&self, layout: Layout) -> Result<Spec> {
        Spec::new(&self.mesh, self.dtype, &self.shape, layout)
    }

    /// Refuses, in the name of `verb`, facts that do not fit together.
    ///
    /// # Errors
    /// The rules: one placement for each mesh axis; `Shard` of a dim that is there; no `Partial` of booleans; at most
    /// one `RaggedShard`, over a prefix that is there, with one count for each rank of its axis, some count above 0,
    /// no axis splitting a dim of the prefix inside it, and every piece that the axes outside leave of the prefix
    /// divisible into the blocks.
    pub fn validate(&self, verb: &str) -> Result<()> {
        if self.layout.ndim() != self.mesh.ndim() {
            return Err(Error::sharding(
                verb,
                "wants one placement for each mesh axis",
                format!("{} on mesh {}", self.layout, self.mesh),
                format!("give {}", self.mesh.ndim()),
            ));
        }
        self.shape.checked_numel(verb)?;
        for (a, placement) in self.layout.placements().iter().enumerate() {
            match placement {
                Placement::Replicate => {}
                Placement::Shard(dim) => self.check_dim(verb, *dim)?,
                Placement::Partial(_) if self.dtype == DType::Bool => {
                    return self.refuse(verb, "booleans cannot be Partial", "cast to u8 or i32 first");
                }
                Placement::Partial(_) => {}
                Placement::RaggedShard { dims, units } => self.check_ragged(verb, a, *dims, units)?,
            }
        }
        Ok(())
    }

    /// The shape of this rank's local tensor.
    pub fn local_shape(&self) -> Shape {
        self.local_shape_at(self.mesh.coords())
    }

    /// The shape of the local tensor of the rank at `coords`.
    pub fn local_shape_at(&self, coords: &[usize]) -> Shape {
        let Piece { len, flat, .. } = self.piece_at(coords);
        match flat {
            None => Shape::from(len),
            Some((dims, lo, hi)) => std::iter::once(hi - lo).chain(len[dims..].iter().copied()).collect(),
        }
    }

    /// What this rank holds; `Partial` counts as holding every index.
    pub fn region(&self) -> Region {
        self.region_at(self.mesh.coords())
    }

    /// What the rank at `coords` holds.
    pub fn region_at(&self, coords: &[usize]) -> Region {
        let Piece { start, len, flat } = self.piece_at(coords);
        match flat {
            None => Region::of_box(start, Shape::from(len)),
            Some((dims, lo, hi)) => Region::of_range(&start, &len, dims, lo, hi),
        }
    }

    fn piece_at(&self, coords: &[usize]) -> Piece {
        debug_assert_eq!(coords.len(), self.mesh.ndim(), "one coordinate an axis");
        let mut start = Dims::from_elem(0, self.shape.len());
        let mut len = Dims::from_slice(&self.shape);
        for &a in self.layout.order() {
            if let Placement::Shard(dim) = *self.layout.axis(a) {
                let part = chunk(len[dim], self.mesh.axis_len(a), coords[a]);
                start[dim] += part.start;
                len[dim] = part.len();
            }
        }
        // No axis splits the prefix inside the ragged one, so it comes last whatever the order of the others.
        let mut flat = None;
        if let Some(a) = self.layout.ragged_axis()
            && let Placement::RaggedShard { dims, units } = self.layout.axis(a)
        {
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
        Piece { start, len, flat }
    }

    fn refuse<T>(&self, verb: &str, rule: impl Into<String>, remedy: impl Into<String>) -> Result<T> {
        Err(Error::sharding(verb, rule, self.to_string(), remedy))
    }

    fn check_dim(&self, verb: &str, dim: usize) -> Result<()> {
        match self.shape.len() {
            n if dim < n => Ok(()),
            0 => self.refuse(verb, "a single element has no dim to shard", "replicate it"),
            n => self.refuse(verb, "shards a dim that is not there", format!("dims are 0 to {}", n - 1)),
        }
    }

    fn check_ragged(&self, verb: &str, a: usize, dims: usize, units: &[usize]) -> Result<()> {
        let (axis, ranks) = (self.mesh.axis_name(a), self.mesh.axis_len(a));
        if self.layout.ragged_axis() != Some(a) {
            return self.refuse(verb, "two axes are ragged", "make one of them a plain shard");
        }
        if dims == 0 || dims > self.shape.len() {
            let remedy = match self.shape.len() {
                0 => "replicate a single element".into(),
                n => format!("flatten 1 to {n} dims"),
            };
            return self.refuse(verb, "the ragged prefix is not there", remedy);
        }
        if units.len() != ranks {
            let rule = format!("{} counts for the {ranks} ranks of {axis}", units.len());
            return self.refuse(verb, rule, "give one count for each rank");
        }
        let Some(total) = units.iter().try_fold(0usize, |sum, &n| sum.checked_add(n)) else {
            return self.refuse(verb, "the number of ragged blocks overflows", "use smaller counts");
        };
        if total == 0 {
            return self.refuse(verb, "no rank owns a ragged block", "give some rank a count above 0");
        }
        let inside = self.layout.order().iter().skip_while(|&&b| b != a).skip(1);
        if let Some(&b) = inside.into_iter().find(|&&b| self.layout.axis(b).meets(self.layout.axis(a))) {
            let (rule, inner) = ("an axis splits a ragged prefix from inside", self.mesh.axis_name(b));
            return self.refuse(verb, rule, format!("order {inner} outside {axis}"));
        }
        match self.prefix_numels(dims).into_iter().find(|n| n % total != 0) {
            Some(n) => {
                let rule = format!("a prefix of {n} does not divide into {total} equal ragged blocks");
                self.refuse(verb, rule, "give counts whose sum divides it")
            }
            None => Ok(()),
        }
    }

    /// The sizes, without 0, that the pieces of the first `dims` dims can have when their `Shard`s are done. Under the
    /// ceil rule a length leaves at most two others, so there are few, however many ranks.
    fn prefix_numels(&self, dims: usize) -> SmallVec<[usize; 4]> {
        let mut numels: SmallVec<[usize; 4]> = SmallVec::from_slice(&[1]);
        for dim in 0..dims {
            let mut lens: SmallVec<[usize; 4]> = SmallVec::from_slice(&[self.shape[dim]]);
            for a in self.layout.splitters(dim).filter(|&a| self.layout.axis(a).shard_dim().is_some()) {
                lens = distinct(lens.iter().flat_map(|&n| {
                    let each = n.div_ceil(self.mesh.axis_len(a));
                    [each, n.checked_rem(each).unwrap_or(0)]
                }));
            }
            numels = distinct(numels.iter().flat_map(|n| lens.iter().map(move |len| n * len)));
        }
        numels
    }
}

/// A box of indices; of the range `lo..hi` of its first dims flattened, given `Some((dims, lo, hi))`.
struct Piece {
    start: Dims,
    len: Dims,
    flat: Option<(usize, usize, usize)>,
}

fn distinct(values: impl Iterator<Item = usize>) -> SmallVec<[usize; 4]> {
    let mut values: SmallVec<[usize; 4]> = values.filter(|&n| n > 0).collect();
    values.sort_unstable_by(|a, b| b.cmp(a));
    values.dedup();
    values
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}@", self.dtype, self.shape)?;
        self.layout.fmt_with(f, |a| Some(self.mesh.axis_name(a)))
    }
}

impl fmt::Debug for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
