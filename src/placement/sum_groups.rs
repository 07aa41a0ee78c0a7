//! Sums that a program takes in parts: how many, and in which dtype they travel.

use crate::error::{Error, Result};
use crate::tensor::DType;

/// The parts in which a program takes large sums, on every mesh and on one rank.
///
/// The parts are the nodes of the sum's [reduction tree](super::ReductionTree) at depth `log2(parts)`, and leaves above
/// that depth. Each part is computed in the accumulator's dtype. Then it is rounded to the wire's dtype, and so is each
/// node above it. Ranks send nodes of the wire's dtype. A mesh may cut such a sum between parts only, so its bits do
/// not depend on the mesh.
///
/// With 8 parts, a mesh that cuts the outermost summed dim into 1, 2, 4 or 8 equal ranges gives each rank one node. Sums over
/// the batch, which data-parallel axes cut, often want more parts than sums over widths, which tensor parallelism cuts:
/// gradients of leaf tensors may have a number of their own. A sum of one part is not grouped.
///
/// ```
/// use isoshard::{placement::SumGroups, tensor::DType};
/// let groups = SumGroups::new(8)?.with_wire(DType::BF16)?;
/// assert_eq!((groups.parts(), groups.wire()), (8, DType::BF16));
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SumGroups {
    depth: u8,
    gradient_depth: u8,
    wire: DType,
    /// Set if ranks store parts, unrounded, in place of nodes.
    kept: bool,
}

impl SumGroups {
    /// The largest number of parts.
    pub(crate) const PARTS_LEN: usize = 1 << 16;

    /// Returns groups of this many parts, which travel as f32.
    ///
    /// ```
    /// use isoshard::placement::SumGroups;
    /// assert!(SumGroups::new(64).is_ok());
    /// let error = SumGroups::new(6).unwrap_err().to_string();
    /// assert!(error.starts_with("groups: the number of parts is a power of two up to 65536; got 6"), "{error}");
    /// ```
    ///
    /// # Errors
    /// Refuses numbers that are no power of two, and numbers above 65536.
    pub fn new(parts: usize) -> Result<SumGroups> {
        let depth = depth_of(parts)?;
        Ok(SumGroups { depth, gradient_depth: depth, wire: DType::F32, kept: false })
    }

    /// Returns the same groups, but in a backward pass the gradients of leaf tensors have this many parts.
    /// [`DTensor::grad`](crate::dtensor::DTensor::grad) takes those of other sums.
    ///
    /// ```
    /// use isoshard::placement::SumGroups;
    /// let groups = SumGroups::new(8)?.with_gradient_parts(64)?; // for tp=8 and fsdp=64
    /// assert_eq!((groups.parts(), groups.gradient_parts()), (8, 64));
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses what [`SumGroups::new`] refuses.
    pub fn with_gradient_parts(self, parts: usize) -> Result<SumGroups> {
        Ok(SumGroups { gradient_depth: depth_of(parts)?, ..self })
    }

    /// Returns the same parts, which travel in another dtype. Sums of f64 travel as f64. The largest f16 is 65,504: greater
    /// parts become infinite.
    ///
    /// ```
    /// use isoshard::{placement::SumGroups, tensor::DType};
    /// assert!(SumGroups::new(8)?.with_wire(DType::F16).is_ok());
    /// assert!(SumGroups::new(8)?.with_wire(DType::F64).is_err());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses dtypes other than f16, bf16 and f32.
    pub fn with_wire(self, wire: DType) -> Result<SumGroups> {
        match wire {
            DType::F16 | DType::BF16 | DType::F32 => Ok(SumGroups { wire, ..self }),
            DType::F64 | DType::I64 | DType::I32 | DType::U8 | DType::Bool => {
                let rule = "parts travel as f16, bf16 or f32";
                Err(Error::invalid("groups", rule, wire.to_string(), ""))
            }
        }
    }

    /// Returns the number of parts.
    ///
    /// ```
    /// use isoshard::placement::SumGroups;
    /// assert_eq!(SumGroups::new(16)?.parts(), 16);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn parts(&self) -> usize {
        1 << self.depth
    }

    /// Returns the number of parts of the gradients of leaf tensors.
    ///
    /// ```
    /// use isoshard::placement::SumGroups;
    /// assert_eq!(SumGroups::new(16)?.gradient_parts(), 16);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn gradient_parts(&self) -> usize {
        1 << self.gradient_depth
    }

    /// Returns the dtype in which parts travel.
    ///
    /// ```
    /// use isoshard::{placement::SumGroups, tensor::DType};
    /// assert_eq!(SumGroups::new(16)?.wire(), DType::F32);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn wire(&self) -> DType {
        self.wire
    }

    /// Returns the groups of the gradients of leaf tensors.
    pub(crate) fn for_gradients(self) -> SumGroups {
        SumGroups { depth: self.gradient_depth, ..self }
    }

    /// Returns the depth of the parts in the reduction tree.
    pub(crate) fn depth(&self) -> usize {
        self.depth.into()
    }

    /// Returns the same parts, which ranks store one by one and unrounded, so that those of several sums can be added.
    pub(crate) fn kept(self) -> SumGroups {
        SumGroups { kept: true, ..self }
    }

    /// Returns the parts of sums that are complete: ranks store nodes.
    pub(crate) fn joined(self) -> SumGroups {
        SumGroups { kept: false, ..self }
    }

    /// Returns the same parts, which nothing rounds.
    pub(crate) fn unrounded(self) -> SumGroups {
        SumGroups { wire: DType::F32, ..self }
    }

    /// Returns true if ranks store parts.
    pub(crate) fn is_kept(&self) -> bool {
        self.kept
    }

    /// Returns true if the parts of sums of this dtype are rounded.
    pub(crate) fn rounds(&self, dtype: DType) -> bool {
        let narrow = matches!(self.wire, DType::F16 | DType::BF16);
        self.depth > 0 && narrow && matches!(dtype, DType::F16 | DType::BF16 | DType::F32)
    }
}

/// Returns the depth of so many parts in a reduction tree.
fn depth_of(parts: usize) -> Result<u8> {
    if !parts.is_power_of_two() || parts > SumGroups::PARTS_LEN {
        let rule = format!("the number of parts is a power of two up to {}", SumGroups::PARTS_LEN);
        return Err(Error::invalid(
            "groups",
            rule,
            parts.to_string(),
            "each part is a node of a binary tree",
        ));
    }
    Ok(parts.trailing_zeros() as u8)
}
