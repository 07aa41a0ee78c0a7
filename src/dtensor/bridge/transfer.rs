//! What crosses, as both ends know it.

use std::fmt;

use crate::error::{Error, Result};
use crate::placement::{Layout, Mesh, Placement, Spec};
use crate::tensor::{DType, Dims, Shape};

/// One tensor that crosses a [`Bridge`](super::Bridge), as the ranks of both meshes know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Its element type.
    pub dtype: DType,
    /// Its global shape.
    pub shape: Shape,
    /// How it lies on the mesh that it comes from.
    pub from: Layout,
    /// How it shall lie on the mesh that it goes to.
    pub to: Layout,
}

impl Transfer {
    /// Of a tensor of this dtype and global shape, from one layout to another.
    pub fn new(dtype: DType, shape: impl Into<Shape>, from: Layout, to: Layout) -> Transfer {
        Transfer { dtype, shape: shape.into(), from, to }
    }

    /// What leaves, with every `Partial` axis reduced, and what arrives.
    pub(super) fn specs(&self, from: &Mesh, to: &Mesh) -> Result<(Spec, Spec)> {
        let src = Spec::new(from, self.dtype, &self.shape, self.from.clone())?;
        let dst = Spec::new(to, self.dtype, &self.shape, self.to.clone())?;
        if dst.layout.has_partial() {
            return Err(Error::sharding(
                "bridge",
                "a tensor cannot arrive in parts of a sum",
                dst.to_string(),
                "replicate or shard it there",
            ));
        }
        Ok((reduced_source(src), dst))
    }
}

/// The notation, without the axes' names: `f32[64, 128] (S0) to (R, S1)`.
impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{} {} to {}", self.dtype, self.shape, self.from, self.to)
    }
}

/// The same tensor with its `Partial` axes reduced: cut along the dim that leaves the least, by reduce-scatter, or where
/// none can be cut, whole. What follows starts from there, as cheap as can be: a part of a sum travels once.
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

/// The elements that the rank with most holds.
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
        // Not inside a ragged prefix.
        assert_eq!(reduced("a=2,b=2", "f32[4, 2]@(a:P(sum), b:RS(0..1; 1,3))"), "(S1, RS(0..1; 1,3))");
        assert_eq!(reduced("a=2,b=2", "f32[4, 2]@(a:P(sum), b:RS(0..2; 1,3))"), "(R, RS(0..2; 1,3))");
    }
}
