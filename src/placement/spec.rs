//! Specs: the metadata of a distributed tensor that all its ranks share.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::shard_bounds::ShardBounds;
use super::{Layout, Mesh, Placement, ReductionTree, Region};
use crate::error::{Error, Result};
use crate::tensor::{DType, Shape, short_list, sort_by};

/// The metadata of a tensor that all ranks share: mesh, dtype, global shape and layout.
///
/// Displayed and parsed as `f32[64, 128]@(dp:S0, tp:R)`.
///
/// ```
/// use isoshard::placement::{Layout, Mesh, Spec, short::*};
/// use isoshard::tensor::DType;
/// let mesh = Mesh::parse("dp=2,tp=2", 1)?;
/// let spec = Spec::new(&mesh, DType::F32, [64, 128], Layout::new([shard(0), R]))?;
/// assert_eq!(spec.to_string(), "f32[64, 128]@(dp:S0, tp:R)");
/// assert_eq!(spec.local_shape(), [32, 128].into());
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Spec {
    /// The mesh of ranks that hold the tensor.
    pub mesh: Mesh,
    /// The element type.
    pub dtype: DType,
    /// The global shape.
    pub shape: Shape,
    /// The placement along each mesh axis.
    pub layout: Layout,
    /// The reduction tree of a `Partial` sum that is added in the order of a single rank. Without it, the partial
    /// values are added by a tree over the ranks.
    pub tree: Option<Arc<ReductionTree>>,
}

impl Spec {
    /// Creates a spec and [validates](Spec::validate) it.
    ///
    /// ```
    /// use isoshard::placement::{Layout, Mesh, Spec, short::*};
    /// use isoshard::tensor::DType;
    /// let mesh = Mesh::parse("dp=2", 0)?;
    /// assert!(Spec::new(&mesh, DType::F32, [5, 3], Layout::new([shard(1)])).is_ok());
    /// assert!(Spec::new(&mesh, DType::F32, [5, 3], Layout::new([shard(2)])).is_err());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Spec::validate`] refuses, under the verb `layout`.
    pub fn new(mesh: &Mesh, dtype: DType, shape: impl Into<Shape>, layout: Layout) -> Result<Spec> {
        let spec = Spec { mesh: mesh.clone(), dtype, shape: shape.into(), layout, tree: None };
        spec.validate("layout")?;
        Ok(spec)
    }

    /// Returns the same tensor in another layout. Along axes that are no longer `Partial`, the sum's
    /// [tree](Spec::tree) counts as added up.
    ///
    /// ```
    /// use isoshard::placement::{Mesh, Spec};
    /// let spec = Spec::parse("f32[5, 3]@(dp:S0)", &Mesh::parse("dp=2", 0)?)?;
    /// assert_eq!(spec.with_layout("(R)".parse()?)?.to_string(), "f32[5, 3]@(dp:R)");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`Spec::validate`] refuses, under the verb `layout`.
    pub fn with_layout(&self, layout: Layout) -> Result<Spec> {
        let kept = |a: usize| layout.placements().get(a) == Some(self.layout.axis(a));
        let added: SmallVec<[usize; 4]> = short_list(self.open_axes().into_iter().filter(|&a| !kept(a)));
        let tree = match &self.tree {
            Some(tree) if added.is_empty() => Some(tree.clone()),
            Some(tree) => tree.after(&added).map(Arc::new),
            None => None,
        };
        Ok(Spec { tree, ..Spec::new(&self.mesh, self.dtype, &self.shape, layout)? })
    }

    /// Returns the `Partial` axes along which the sum's [tree](Spec::tree) has not been added up yet.
    pub(crate) fn open_axes(&self) -> SmallVec<[usize; 4]> {
        self.tree.iter().flat_map(|t| t.open_axes()).collect()
    }

    /// Returns the number of tensors that the rank at `coords` stores: one, except for a partial sum with a
    /// [tree](Spec::tree), for which it stores one per finished node.
    pub(crate) fn nodes_len_at(&self, coords: &[usize]) -> usize {
        self.tree.as_ref().map_or(1, |tree| tree.nodes_len(&self.mesh, coords).unwrap_or(1))
    }

    /// Returns the dtype of the stored elements: [`ReductionTree::stored_dtype`] of a partial sum with a
    /// [tree](Spec::tree).
    pub(crate) fn stored_dtype(&self) -> DType {
        self.tree.as_ref().map_or(self.dtype, |tree| tree.stored_dtype(self.dtype))
    }

    /// Checks that mesh, dtype, shape and layout fit together; `verb` names the operation in an error's text.
    ///
    /// ```
    /// use isoshard::placement::{Mesh, Spec};
    /// let mut spec = Spec::parse("f32[5, 3]@(dp:S1)", &Mesh::parse("dp=2", 0)?)?;
    /// spec.shape = [5].into();
    /// let text = "load: shards a dim that is not there; got f32[5]@(dp:S1); dims are 0 to 0";
    /// assert_eq!(spec.validate("load").unwrap_err().to_string(), text);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error unless all of these hold:
    ///
    /// - The layout has one placement per mesh axis.
    /// - Each `Shard` names a dim of the tensor.
    /// - `Partial` is not of booleans, and all `Partial` axes have one operation (a maximum of sums is not a sum of
    ///   maxima).
    /// - The prefix of each `RaggedShard` is at most the tensor's dims, it has one count per rank of its axis, some
    ///   count is above 0, and each part of the prefix that the axes outside leave is divisible into the blocks. An
    ///   axis inside a `RaggedShard` over several dims splits none of them, unless it is a `RaggedShard` over the same
    ///   dims: it cuts the run of flattened indices again.
    pub fn validate(&self, verb: &str) -> Result<()> {
        if self.layout.ndim() != self.mesh.ndim() {
            return Err(Error::sharding(
                verb,
                "wants one placement for each mesh axis",
                format!("{} on mesh {}", self.layout, self.mesh),
                format!("give {}", self.mesh.ndim()),
            ));
        }
        self.shape.checked_bytes(verb, self.dtype)?;
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
        match self.layout.ragged_axis() {
            Some(_) => self.check_nesting(verb),
            None => Ok(()),
        }
    }

    /// Returns the shape of this rank's shard.
    ///
    /// ```
    /// use isoshard::placement::{Mesh, Spec};
    /// let spec = Spec::parse("f32[5, 3]@(dp:S0)", &Mesh::parse("dp=2", 1)?)?;
    /// assert_eq!(spec.local_shape(), [2, 3].into());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn local_shape(&self) -> Shape {
        self.local_shape_at(self.mesh.coords())
    }

    /// Returns the shape of the shard of the rank at `coords`.
    ///
    /// ```
    /// use isoshard::placement::{Mesh, Spec};
    /// let spec = Spec::parse("f32[5, 3]@(dp:S0)", &Mesh::parse("dp=2", 1)?)?;
    /// assert_eq!(spec.local_shape_at(&[0]), [3, 3].into());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn local_shape_at(&self, coords: &[usize]) -> Shape {
        ShardBounds::at(&self.mesh, &self.layout, &self.shape, coords).shape()
    }

    /// Returns the global indices that this rank holds. A `Partial` axis splits nothing: each rank holds every index.
    ///
    /// ```
    /// use isoshard::placement::{Mesh, Spec};
    /// let spec = Spec::parse("f32[5, 3]@(dp:S0)", &Mesh::parse("dp=2", 1)?)?;
    /// assert_eq!((spec.region().start(0), spec.region().extent(0)), (Some(3), Some(2)));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn region(&self) -> Region {
        self.region_at(self.mesh.coords())
    }

    /// Returns the global indices that the rank at `coords` holds.
    ///
    /// ```
    /// use isoshard::placement::{Mesh, Spec};
    /// let spec = Spec::parse("f32[5, 3]@(dp:S0)", &Mesh::parse("dp=2", 1)?)?;
    /// assert_eq!(spec.region_at(&[0]).numel(), 9);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
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
        Ok(())
    }

    /// Refuses ragged axes, in order from the outermost, whose prefix does not divide into their blocks in each part
    /// that the axes outside leave, and axes that split dims which an axis outside flattens.
    fn check_nesting(&self, verb: &str) -> Result<()> {
        let order = self.layout.order();
        // The lengths that the parts of each dim can have, and those of the flattened dims with their axis.
        let mut lens: SmallVec<[ShardLens; 4]> =
            self.shape.iter().map(|&n| ShardLens::from_slice(&[n])).collect();
        let mut flat: Option<(usize, usize, ShardLens)> = None;
        for (i, &a) in order.iter().enumerate() {
            let placement = self.layout.axis(a);
            let inside = flat.as_ref().filter(|(_, dims, _)| placement.split_dims().start < *dims);
            match placement {
                Placement::Replicate | Placement::Partial(_) => {}
                Placement::Shard(dim) => {
                    if let Some((outer, ..)) = inside {
                        return self.refuse_inside(verb, a, *outer);
                    }
                    let ranks = self.mesh.axis_len(a);
                    lens[*dim] = distinct(lens[*dim].iter().flat_map(|&n| {
                        let each = n.div_ceil(ranks);
                        [each, n.checked_rem(each).unwrap_or(0)]
                    }));
                }
                Placement::RaggedShard { dims, units } => {
                    let parts = match inside {
                        Some((_, outer_dims, parts)) if outer_dims == dims => parts.clone(),
                        Some((outer, ..)) => return self.refuse_inside(verb, a, *outer),
                        None => products(&lens[..*dims]),
                    };
                    let total = units.total();
                    if let Some(n) = parts.iter().find(|n| !n.is_multiple_of(total)) {
                        let rule =
                            format!("a prefix of {n} does not divide into {total} equal ragged blocks");
                        return self.refuse(verb, rule, "give counts whose sum divides it");
                    }
                    if !order[i + 1..].iter().any(|&b| self.layout.axis(b).meets(placement)) {
                        continue;
                    }
                    if parts.len() * units.len() > LENS_LEN {
                        let rule = "ragged axes that split each other leave too many different lengths";
                        return self.refuse(verb, rule, "give equal counts, or nest fewer axes");
                    }
                    let kept = distinct(parts.iter().flat_map(|n| units.iter().map(move |u| n / total * u)));
                    match dims {
                        1 => lens[0] = kept,
                        _ => flat = Some((a, *dims, kept)),
                    }
                }
            }
        }
        Ok(())
    }

    fn refuse_inside(&self, verb: &str, inner: usize, outer: usize) -> Result<()> {
        let (inner, outer) = (self.mesh.axis_name(inner), self.mesh.axis_name(outer));
        let rule = "an axis splits dims that a ragged shard flattens, from inside";
        self.refuse(verb, rule, format!("order {inner} outside {outer}"))
    }
}

/// The largest number of lengths that ragged axes may leave to the axes inside them.
const LENS_LEN: usize = 1 << 16;

/// The distinct lengths of shards along a dim. Under the ceil rule a length leaves at most two, so plain shards leave few for any
/// number of ranks; a ragged axis leaves one for each different count.
type ShardLens = SmallVec<[usize; 4]>;

/// Returns the distinct products of one length per dim, other than 0.
fn products(lens: &[ShardLens]) -> ShardLens {
    let one = ShardLens::from_slice(&[1]);
    lens.iter().fold(one, |all, lens| distinct(all.iter().flat_map(|n| lens.iter().map(move |len| n * len))))
}

/// Returns the distinct values other than 0, largest first.
fn distinct(values: impl Iterator<Item = usize>) -> ShardLens {
    let mut values: ShardLens = short_list(values.filter(|&n| n > 0));
    sort_by(&mut values, |a, b| b.cmp(a));
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

    /// Nested uneven shards of one dim (PyTorch issue 194457).
    #[test]
    fn five_rows_on_two_by_two() {
        let got = shapes("f32[5, 3]@(dp:S0, tp:S0)", &mesh("dp=2,tp=2"));
        assert_eq!(got, [[2, 3], [1, 3], [1, 3], [1, 3]].map(Shape::from));
    }

    /// The nesting order decides which rank holds which elements (PyTorch issue 168134).
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

    /// Uneven shards that the user chooses (PyTorch issue 144109).
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
        let text = "layout: a prefix of 3 does not divide into 2 equal ragged blocks; got f32[4]@(dp:RS(0..1; 1,3), \
                    tp:RS(0..1; 1,1)); give counts whose sum divides it";
        let odd = Layout::new([ragged(1, &[1, 3]), ragged(1, &[1, 1])]);
        refused(DType::F32, &[4], odd, dp_tp, text);
        let text = "layout: an axis splits dims that a ragged shard flattens, from inside; got f32[2, \
                    2]@(dp:RS(0..2; 1,1), tp:S1); order tp outside dp";
        let inside = Layout::new([ragged(2, &[1, 1]), shard(1)]);
        refused(DType::F32, &[2, 2], inside.clone(), dp_tp, text);
        assert!(Spec::new(dp_tp, DType::F32, [2, 2], inside.with_order(&[1, 0]).unwrap()).is_ok());
        let text = "layout: an axis splits dims that a ragged shard flattens, from inside; got f32[2, \
                    2]@(dp:RS(0..2; 1,1), tp:RS(0..1; 1,1)); order tp outside dp";
        refused(DType::F32, &[2, 2], Layout::new([ragged(2, &[1, 1]), ragged(1, &[1, 1])]), dp_tp, text);
        // dp splits into 3 and 2 rows, and both must be divisible.
        let text = "layout: a prefix of 2 does not divide into 3 equal ragged blocks; got f32[5]@(dp:S0, \
                    tp:RS(0..1; 1,2)); give counts whose sum divides it";
        refused(DType::F32, &[5], Layout::new([shard(0), ragged(1, &[1, 2])]), dp_tp, text);
        let text = "layout: the number of ragged blocks overflows; got f32[4]@(dp:RS(0..1; 18446744073709551615,1,0)); \
                    use smaller counts";
        refused(DType::F32, &[4], Layout::new([ragged(1, &[usize::MAX, 1, 0])]), dp, text);
    }

    /// Each axis cuts again, by its own rule, the part that the axes outside leave.
    #[test]
    fn ragged_axes_nest_in_any_order() {
        let starts = |text: &str| -> Vec<(usize, usize)> {
            let ranks =
                (0..4).map(|rank| Spec::parse(text, &Mesh::parse("dp=2,tp=2", rank).unwrap()).unwrap());
            let first = |s: Spec| {
                let mut first = None;
                s.region().runs(&s.shape, |index, _, _| first = first.or(Some(index as usize)));
                (first.unwrap_or(usize::MAX), s.region().numel())
            };
            ranks.map(first).collect()
        };
        // dp: 3 and 9 rows; tp: a third and two thirds of each.
        let of_two = "f32[12]@(dp:RS(0..1; 1,3), tp:RS(0..1; 1,2))";
        assert_eq!(starts(of_two), [(0, 1), (1, 2), (3, 3), (6, 6)]);
        let other_order = "f32[12]@(dp:RS(0..1; 1,3)^1, tp:RS(0..1; 1,2)^0)";
        assert_eq!(starts(other_order), [(0, 1), (4, 2), (1, 3), (6, 6)]);
        assert_eq!(starts("f32[12]@(dp:RS(0..1; 1,3), tp:S0)"), [(0, 2), (2, 1), (3, 5), (8, 4)]);
        // Runs of flattened indices are cut again: 6 of 24 and 18 of 24 elements, of 4 x 6.
        let flat = "f32[4, 6]@(dp:RS(0..2; 1,3), tp:RS(0..2; 2,1))";
        assert_eq!(starts(flat), [(0, 4), (4, 2), (6, 12), (18, 6)]);
        assert_eq!(
            starts("f32[4, 6]@(dp:RS(0..1; 1,3), tp:RS(0..2; 1,2))"),
            [(0, 2), (2, 4), (6, 6), (12, 12)]
        );
    }
}
