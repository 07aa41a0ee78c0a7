//! One tensor's shared facts.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::shard_bounds::ShardBounds;
use super::{Layout, Mesh, Placement, ReductionTree, Region};
use crate::error::{Error, Result};
use crate::tensor::{DType, Shape};

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
    /// Of a `Partial` sum whose order of addition is that of one rank: its terms. Without it the ranks' parts are added
    /// by a tree over the ranks.
    pub tree: Option<Arc<ReductionTree>>,
}

impl Spec {
    /// Joins the facts and [validates](Spec::validate) them.
    ///
    /// # Errors
    /// Refuses what [`Spec::validate`] refuses, in the name of `layout`.
    pub fn new(mesh: &Mesh, dtype: DType, shape: impl Into<Shape>, layout: Layout) -> Result<Spec> {
        let spec = Spec { mesh: mesh.clone(), dtype, shape: shape.into(), layout, tree: None };
        spec.validate("layout")?;
        Ok(spec)
    }

    /// The same tensor in another layout. Of a sum in parts with [`Spec::terms`], axes that are no longer `Partial` have
    /// been added up.
    ///
    /// # Errors
    /// Refuses what [`Spec::validate`] refuses, in the name of `layout`.
    pub fn with_layout(&self, layout: Layout) -> Result<Spec> {
        let kept = |a: usize| layout.placements().get(a) == Some(self.layout.axis(a));
        let added: SmallVec<[usize; 4]> = self.open_axes().into_iter().filter(|&a| !kept(a)).collect();
        let tree = match &self.tree {
            Some(tree) if added.is_empty() => Some(tree.clone()),
            Some(tree) => tree.after(&added).map(Arc::new),
            None => None,
        };
        Ok(Spec { tree, ..Spec::new(&self.mesh, self.dtype, &self.shape, layout)? })
    }

    /// The `Partial` axes along which [`Spec::terms`] have still to be added up.
    pub fn open_axes(&self) -> SmallVec<[usize; 4]> {
        self.tree.iter().flat_map(|t| t.open_axes()).collect()
    }

    /// The number of tensors that the rank at `coords` holds: one, except of a sum in parts with [`Spec::terms`], where
    /// it is one for each of its finished nodes.
    pub fn nodes_len_at(&self, coords: &[usize]) -> usize {
        self.tree.as_ref().map_or(1, |t| t.finished_nodes(&self.mesh, coords).map_or(1, |nodes| nodes.len()))
    }

    /// The dtype of what is stored: parts of an f16 or bf16 sum with [`Spec::terms`] are kept in f32, so that it is
    /// rounded once.
    pub fn stored_dtype(&self) -> DType {
        match self.dtype {
            DType::F16 | DType::BF16 if self.tree.is_some() => DType::F32,
            dtype => dtype,
        }
    }

    /// Refuses, in the name of `verb`, facts that do not fit together.
    ///
    /// # Errors
    /// The rules: one placement for each mesh axis; `Shard` of a dim that is there; no `Partial` of booleans, nor under
    /// two operations (a maximum of sums is not a sum of maxima); at most one `RaggedShard`, over a prefix that is there, with one count for each rank of its axis, some count above 0,
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
                Placement::Partial(_) => {
                    let first = self.layout.placements().iter().find(|p| p.is_partial());
                    if first != Some(placement) {
                        let rule = "is Partial under two operations, whose order would matter";
                        return self.refuse(verb, rule, "reduce one of the axes first");
                    }
                }
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
        ShardBounds::at(&self.mesh, &self.layout, &self.shape, coords).shape()
    }

    /// What this rank holds; `Partial` counts as holding every index.
    pub fn region(&self) -> Region {
        self.region_at(self.mesh.coords())
    }

    /// What the rank at `coords` holds.
    pub fn region_at(&self, coords: &[usize]) -> Region {
        ShardBounds::at(&self.mesh, &self.layout, &self.shape, coords).region()
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
        if self.layout.placements().iter().filter(|p| p.ragged_units().is_some()).count() > 1 {
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

#[cfg(test)]
mod tests {
    use super::super::short::*;
    use super::*;
    use crate::tensor::ReduceOp::{Max, Min, Sum};

    fn mesh(text: &str) -> Mesh {
        Mesh::parse(text, 0).unwrap()
    }

    fn shapes(text: &str, mesh: &Mesh) -> Vec<Shape> {
        let spec = Spec::parse(text, mesh).unwrap();
        mesh.ranks().map(|r| spec.local_shape_at(&mesh.coords_of(r).unwrap())).collect()
    }

    #[track_caller]
    fn refused(dtype: DType, shape: &[usize], layout: Layout, mesh: &Mesh, text: &str) {
        assert_eq!(Spec::new(mesh, dtype, shape, layout).unwrap_err().to_string(), text);
    }

    /// Nested uneven shards of one dim, as in PyTorch issue 194457.
    #[test]
    fn five_rows_on_two_by_two() {
        let got = shapes("f32[5, 3]@(dp:S0, tp:S0)", &mesh("dp=2,tp=2"));
        assert_eq!(got, [[2, 3], [1, 3], [1, 3], [1, 3]].map(Shape::from));
    }

    /// The nesting order decides who holds what, as in PyTorch issue 168134.
    #[test]
    fn five_elements_in_both_orders() {
        let mesh = mesh("dp=2,tp=2");
        let held = |text: &str| -> Vec<(usize, usize)> {
            let spec = Spec::parse(text, &mesh).unwrap();
            let region = |r| spec.region_at(&mesh.coords_of(r).unwrap());
            mesh.ranks().map(|r| (region(r).start(0).unwrap(), region(r).extent(0).unwrap())).collect()
        };
        assert_eq!(held("f32[5]@(dp:S0, tp:S0)"), [(0, 2), (2, 1), (3, 1), (4, 1)]);
        assert_eq!(held("f32[5]@(dp:S0^1, tp:S0^0)"), [(0, 2), (3, 1), (2, 1), (4, 1)]);
    }

    /// Uneven shards that the user chooses, as wished for in PyTorch issue 144109.
    #[test]
    fn uneven_shards_by_choice() {
        let got = shapes("f32[5, 2]@(dp:RS(0..1; 3,0,2))", &mesh("dp=3"));
        assert_eq!(got, [[3, 2], [0, 2], [2, 2]].map(Shape::from));
        let got = shapes("f32[5, 2, 7]@(dp:RS(0..2; 3,0,2))", &mesh("dp=3"));
        assert_eq!(got, [[6, 7], [0, 7], [4, 7]].map(Shape::from));
    }

    #[test]
    fn a_mesh_of_a_trillion_ranks_costs_nothing() {
        let mesh = Mesh::parse("dp=1048576,tp=1048576", 123_456_789_012).unwrap();
        let spec = Spec::parse("f32[2097152, 2097155]@(dp:S0, tp:S1)", &mesh).unwrap();
        assert_eq!(spec.local_shape(), [2, 3].into());
        assert_eq!(spec.region().start(0), Some(2 * (123_456_789_012 >> 20)));
    }

    #[test]
    fn refusals_of_shards_and_partials() {
        let (dp, dp_tp) = (&mesh("dp=3"), &mesh("dp=2,tp=2"));
        let text = "layout: wants one placement for each mesh axis; got (S0) on mesh (dp=2, tp=2); give 2";
        refused(DType::F32, &[4], Layout::new([shard(0)]), dp_tp, text);
        let text = "layout: shards a dim that is not there; got f32[4, 2]@(dp:S2); dims are 0 to 1";
        refused(DType::F32, &[4, 2], Layout::new([shard(2)]), dp, text);
        let text = "layout: a single element has no dim to shard; got f32[]@(dp:S0); replicate it";
        refused(DType::F32, &[], Layout::new([shard(0)]), dp, text);
        let text = "layout: booleans cannot be Partial; got bool[4]@(dp:P(max)); cast to u8 or i32 first";
        refused(DType::Bool, &[4], Layout::new([partial(Max)]), dp, text);
        let text = "layout: is Partial under two operations, whose order would matter; got f32[4]@(dp:P(sum), \
                    tp:P(max)); reduce one of the axes first";
        refused(DType::F32, &[4], Layout::new([partial(Sum), partial(Max)]), dp_tp, text);
        assert!(Spec::new(dp_tp, DType::I64, [4], Layout::new([partial(Min), partial(Min)])).is_ok());
        let huge = Spec::new(dp, DType::F32, [usize::MAX, 2], Layout::replicated(1)).unwrap_err();
        assert!(huge.to_string().starts_with("layout: the number of elements overflows; got ["), "{huge}");
    }

    #[test]
    fn refusals_of_ragged_shards() {
        let (dp, dp_tp) = (&mesh("dp=3"), &mesh("dp=2,tp=2"));
        let text = "layout: 2 counts for the 3 ranks of dp; got f32[4]@(dp:RS(0..1; 1,1)); give one count for each \
                    rank";
        refused(DType::F32, &[4], Layout::new([ragged(1, &[1, 1])]), dp, text);
        let text = "layout: no rank owns a ragged block; got f32[4]@(dp:RS(0..1; 0,0,0)); give some rank a count \
                    above 0";
        refused(DType::F32, &[4], Layout::new([ragged(1, &[0, 0, 0])]), dp, text);
        let text = "layout: a prefix of 4 does not divide into 3 equal ragged blocks; got f32[4]@(dp:RS(0..1; 1,1,1)); \
                    give counts whose sum divides it";
        refused(DType::F32, &[4], Layout::new([ragged(1, &[1, 1, 1])]), dp, text);
        let text =
            "layout: the ragged prefix is not there; got f32[4]@(dp:RS(0..2; 1,1,1)); flatten 1 to 1 dims";
        refused(DType::F32, &[4], Layout::new([ragged(2, &[1, 1, 1])]), dp, text);
        let text = "layout: the ragged prefix is not there; got f32[]@(dp:RS(0..0; 1,1,1)); replicate a single element";
        refused(DType::F32, &[], Layout::new([ragged(0, &[1, 1, 1])]), dp, text);
        let text = "layout: two axes are ragged; got f32[4]@(dp:RS(0..1; 1,1), tp:RS(0..1; 1,1)); make one of them a \
                    plain shard";
        refused(DType::F32, &[4], Layout::new([ragged(1, &[1, 1]), ragged(1, &[1, 1])]), dp_tp, text);
        let text = "layout: an axis splits a ragged prefix from inside; got f32[4]@(dp:RS(0..1; 1,1), tp:S0); order tp \
                    outside dp";
        let inside = Layout::new([ragged(1, &[1, 1]), shard(0)]);
        refused(DType::F32, &[4], inside.clone(), dp_tp, text);
        assert!(Spec::new(dp_tp, DType::F32, [4], inside.with_order(&[1, 0]).unwrap()).is_ok());
        // dp leaves pieces of 3 and 2 rows: the smaller one counts too.
        let text = "layout: a prefix of 2 does not divide into 3 equal ragged blocks; got f32[5]@(dp:S0, \
                    tp:RS(0..1; 1,2)); give counts whose sum divides it";
        refused(DType::F32, &[5], Layout::new([shard(0), ragged(1, &[1, 2])]), dp_tp, text);
        let text = "layout: the number of ragged blocks overflows; got f32[4]@(dp:RS(0..1; 18446744073709551615,1,0)); \
                    use smaller counts";
        refused(DType::F32, &[4], Layout::new([ragged(1, &[usize::MAX, 1, 0])]), dp, text);
    }
}
