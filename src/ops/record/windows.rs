//! The parts of operands and results that a rank stores.

use smallvec::SmallVec;

use super::Meta;
use crate::placement::Region;
use crate::tensor::Shape;

/// The region of a global tensor that this rank stores.
///
/// ```
/// use isoshard::comm::spmd;
/// use isoshard::dtensor::{DTensor, DeviceMesh};
/// use isoshard::tensor::DType;
///
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
///     let x = DTensor::zeros(&mesh, DType::F32, [5, 4], "(S0)")?;
///     let window = x.tensor_meta().window().clone();
///     let (start, rows) = [(0, 3), (3, 2)][rank.rank()];
///     assert_eq!(window.global[..], [5, 4]);
///     assert_eq!((window.start(0), &window.local()[..]), (start, &[rows, 4][..]));
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    /// The global shape.
    pub global: Shape,
    /// The global indices that this rank stores, and their positions in local storage.
    pub region: Region,
}

/// The windows of all operands and results of one call on one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Windows {
    /// One window per operand.
    pub ins: SmallVec<[Window; 3]>,
    /// One window per result.
    pub outs: SmallVec<[Window; 3]>,
    /// True if sums must follow the reduction tree. If false, a device may use its fastest matrix products and
    /// attention; all other kernels follow the tree in any case.
    pub exact: bool,
}

impl Window {
    /// Returns the window that covers the whole tensor.
    ///
    /// ```
    /// use isoshard::ops::Window;
    /// assert_eq!(Window::whole(&[5, 4].into()).local()[..], [5, 4]);
    /// ```
    pub fn whole(shape: &Shape) -> Window {
        Window { global: shape.clone(), region: Region::whole(shape) }
    }

    /// Returns the local shape.
    pub fn local(&self) -> &Shape {
        &self.region.local
    }

    /// Returns the first global index along `dim` that this rank stores, or 0 if it stores nothing.
    ///
    /// # Panics
    /// Panics if the region is ragged over several dims. Only operators that list ragged rows themselves get such windows.
    pub fn start(&self, dim: usize) -> usize {
        if self.region.is_empty() {
            return 0;
        }
        self.region.start(dim).expect("the operator lists ragged rows, and reads no start of a flattened dim")
    }
}

impl Windows {
    /// Returns the windows of a single rank, which stores all operands and results whole.
    pub fn whole(ins: &[Meta], outs: &[Meta]) -> Windows {
        let whole = |m: &Meta| Window::whole(&m.shape);
        Windows { ins: ins.iter().map(whole).collect(), outs: outs.iter().map(whole).collect(), exact: true }
    }
}
