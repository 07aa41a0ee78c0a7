//! Transfers: the metadata of a tensor that moves between meshes, as the ranks of both know it.

use std::fmt;
use std::hash::{Hash, Hasher};

use rustc_hash::FxHasher;

use crate::comm::{Lineage, ModulePath};
use crate::error::{Error, Result};
use crate::placement::{Layout, Mesh, Placement, Spec};
use crate::tensor::{DType, Dims, Shape};

/// The metadata of one tensor that crosses a [`Bridge`](super::Bridge), as the ranks of both meshes know it.
///
/// Displayed without axis names: `f32[64, 128] (S0) to (R, S1)`.
///
/// ```
/// use isoshard::{dtensor::Transfer, tensor::DType};
/// let weight = Transfer::new(DType::F32, [64, 128], "(S0)".parse()?, "(R, S1)".parse()?);
/// assert_eq!(weight.to_string(), "f32[64, 128] (S0) to (R, S1)");
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Transfer {
    /// The element type.
    pub dtype: DType,
    /// The global shape.
    pub shape: Shape,
    /// The layout on the source mesh.
    pub from: Layout,
    /// The layout on the target mesh.
    pub to: Layout,
    /// The tensor's name, or an empty path. The ranks of both meshes compare it.
    pub name: ModulePath,
}

impl Transfer {
    /// Creates the transfer of a tensor of this dtype and global shape from one layout to another.
    ///
    /// ```
    /// use isoshard::{dtensor::Transfer, tensor::DType};
    /// let bias = Transfer::new(DType::BF16, [128], "(S0)".parse()?, "(R)".parse()?);
    /// assert_eq!((bias.dtype, bias.from.to_string()), (DType::BF16, "(S0)".to_string()));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn new(dtype: DType, shape: impl Into<Shape>, from: Layout, to: Layout) -> Transfer {
        Transfer { dtype, shape: shape.into(), from, to, name: ModulePath::default() }
    }

    /// Names the tensor, such as a parameter by its path. Ranks whose transfers differ in names get an error in place of
    /// another tensor of the same shape.
    ///
    /// ```
    /// use isoshard::{comm::ModulePath, dtensor::Transfer, tensor::DType};
    /// let bias = Transfer::new(DType::BF16, [128], "(S0)".parse()?, "(R)".parse()?).named(ModulePath::new("h.0.b"));
    /// assert_eq!(bias.name.as_str(), "h.0.b");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn named(self, name: ModulePath) -> Transfer {
        Transfer { name, ..self }
    }

    /// Returns the lineage of what arrives, which both ends know.
    pub(super) fn lineage(&self) -> Lineage {
        let mut hasher = FxHasher::default();
        (self.dtype, &self.shape, &self.from, &self.to, self.name.as_str()).hash(&mut hasher);
        let name = if self.name == ModulePath::default() { "bridge" } else { self.name.as_str() };
        Lineage::made_by(name, hasher.finish())
    }

    /// Returns the spec in which the tensor is sent, with every `Partial` axis reduced, and that in which it arrives.
    pub(super) fn specs(&self, from: &Mesh, to: &Mesh) -> Result<(Spec, Spec)> {
        let src = Spec::new(from, self.dtype, &self.shape, self.from.clone())?;
        let dst = Spec::new(to, self.dtype, &self.shape, self.to.clone())?;
        if dst.layout.has_partial() {
            return Err(Error::sharding(
                "bridge",
                "a tensor cannot arrive as Partial",
                dst.to_string(),
                "replicate or shard it there",
            ));
        }
        Ok((reduced_source(src), dst))
    }
}

impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{} {} to {}", self.dtype, self.shape, self.from, self.to)
    }
}

/// Returns the spec with its `Partial` axes reduced: by a reduce-scatter along the dim that leaves the smallest
/// shards, or by an all-reduce if no dim can be split. A partial value is then sent once.
fn reduced_source(mut spec: Spec) -> Spec {
    for a in 0..spec.mesh.ndim() {
        if !spec.layout.axis(a).is_partial() {
            continue;
        }
        let with = |placement| spec.with_layout(spec.layout.set(a, placement));
        let whole = with(Placement::Replicate).expect("a tensor may always be replicated");
        let cuts = (0..spec.shape.len()).filter_map(|dim| with(Placement::Shard(dim)).ok());
        let least = cuts.min_by_key(largest).filter(|cut| largest(cut) < largest(&whole));
        spec = least.unwrap_or(whole);
    }
    spec
}

/// Returns the largest number of elements on a rank.
fn largest(spec: &Spec) -> usize {
    let at = spec.layout.placements().iter().map(|placement| match placement {
        Placement::RaggedShard { units, .. } => {
            (0..units.len()).max_by_key(|&i| units[i]).expect("an axis has ranks")
        }
        // The first chunks are the longest.
        Placement::Replicate | Placement::Shard(_) | Placement::Partial(_) => 0,
    });
    spec.local_shape_at(&at.collect::<Dims>()).numel()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_reduced_to_the_smallest_shards() {
        let reduced = |mesh: &str, text: &str| {
            let mesh = Mesh::parse(mesh, 0).unwrap();
            reduced_source(Spec::parse(text, &mesh).unwrap()).layout.to_string()
        };
        assert_eq!(reduced("a=3", "f32[4, 9]@(a:P(sum))"), "(S1)", "3 of 9, not 2 of 4");
        assert_eq!(reduced("a=3", "f32[1, 1]@(a:P(max))"), "(R)");
        assert_eq!(reduced("a=3", "f32[]@(a:P(max))"), "(R)");
        assert_eq!(reduced("a=3", "f32[0, 4]@(a:P(max))"), "(R)");
        assert_eq!(
            reduced("a=2,b=2", "f32[4, 1]@(a:P(sum), b:S0)"),
            "(S0^1, S0^0)",
            "inside the cut that is there"
        );
        assert_eq!(reduced("a=2,b=2", "f32[8, 4]@(a:P(sum), b:P(sum))"), "(S0, S0)");
        // A ragged prefix cannot be split from inside.
        assert_eq!(reduced("a=2,b=2", "f32[4, 2]@(a:P(sum), b:RS(0..1; 1,3))"), "(S1, RS(0..1; 1,3))");
        assert_eq!(reduced("a=2,b=2", "f32[4, 2]@(a:P(sum), b:RS(0..2; 1,3))"), "(R, RS(0..2; 1,3))");
    }
}
