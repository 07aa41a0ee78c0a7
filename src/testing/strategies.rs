//! Meshes, shapes and legal layouts as [proptest](https://docs.rs/proptest) strategies.
//!
//! Values shrink towards replication on small meshes.
//!
//! ```
//! use isoshard::{placement::Spec, tensor::DType, testing::strategies};
//! use proptest::prelude::*;
//!
//! let case = (strategies::meshes(), strategies::shapes())
//!     .prop_flat_map(|(mesh, shape)| strategies::layouts(&mesh, DType::F32, &shape, true));
//! proptest!(|(spec in case)| {
//!     let text = spec.to_string();
//!     prop_assert_eq!(Spec::parse(&text, &spec.mesh)?.to_string(), text);
//! });
//! ```

use proptest::collection::vec;
use proptest::prelude::*;

use crate::placement::{Layout, Mesh, Placement, Spec};
use crate::tensor::{DType, ReduceOp, Shape};

/// Meshes of one to three axes and at most eight ranks, axes of one rank among them, seen from rank 0.
///
/// ```
/// use isoshard::testing::strategies::meshes;
/// use proptest::prelude::*;
/// proptest!(|(mesh in meshes())| {
///     prop_assert!((1..=3).contains(&mesh.ndim()) && mesh.rank_len() <= 8);
/// });
/// ```
pub fn meshes() -> impl Strategy<Value = Mesh> {
    let axes = vec(1..=5usize, 1..=3).prop_filter("at most 8 ranks", |a| a.iter().product::<usize>() <= 8);
    axes.prop_map(|lens| {
        let named: Vec<(&str, usize)> = ["a", "b", "c"].into_iter().zip(lens).collect();
        Mesh::new(&named, 0).expect("axes with names of their own")
    })
}

/// Shapes of up to four dims with extents up to 6, 0 and 1 among them.
///
/// ```
/// use isoshard::tensor::{DType, Tensor};
/// use isoshard::testing::strategies::shapes;
/// use proptest::prelude::*;
/// proptest!(|(shape in shapes())| {
///     prop_assert_eq!(Tensor::zeros(DType::U8, shape.clone()).numel(), shape.iter().product::<usize>());
/// });
/// ```
pub fn shapes() -> impl Strategy<Value = Shape> {
    vec(prop_oneof![8 => 1..=6usize, 1 => Just(0usize)], 0..=4).prop_map(Shape::from)
}

/// All legal layouts of a tensor on a mesh, as its [`Spec`]: replicated, sharded in any nesting order, ragged with empty
/// ranks, and partial if `partials`.
///
/// ```
/// use isoshard::{placement::Mesh, tensor::DType, testing::strategies::layouts};
/// use proptest::prelude::*;
/// let mesh = Mesh::parse("dp=2,tp=2", 0)?;
/// proptest!(|(spec in layouts(&mesh, DType::F32, &[5, 3].into(), false))| {
///     prop_assert!(!spec.layout.has_partial());
///     // Each element is stored once or more.
///     let stored: usize = (0..4).map(|rank| spec.region_at(&[rank / 2, rank % 2]).local.numel()).sum();
///     prop_assert!((15..=60).contains(&stored), "{}", spec);
/// });
/// # Ok::<(), isoshard::Error>(())
/// ```
pub fn layouts(mesh: &Mesh, dtype: DType, shape: &Shape, partials: bool) -> BoxedStrategy<Spec> {
    let axes: Vec<_> =
        (0..mesh.ndim()).map(|a| placements(mesh.axis_len(a), dtype, shape, partials)).collect();
    let op = prop_oneof![2 => Just(ReduceOp::Sum), 1 => Just(ReduceOp::Max), 1 => Just(ReduceOp::Min)];
    let order = Just((0..mesh.ndim()).collect::<Vec<usize>>()).prop_shuffle();
    let (mesh, shape) = (mesh.clone(), shape.clone());
    (axes, op, order)
        .prop_filter_map("a legal layout", move |(mut axes, op, order)| {
            for axis in axes.iter_mut().filter(|p| p.is_partial()) {
                *axis = Placement::Partial(op);
            }
            let layout = Layout::new(axes).with_order(&order).expect("a permutation");
            Spec::new(&mesh, dtype, shape.clone(), layout).ok()
        })
        .boxed()
}

/// The placements that a tensor may have on one axis; a sum stands for every `Partial`.
fn placements(ranks: usize, dtype: DType, shape: &Shape, partials: bool) -> BoxedStrategy<Placement> {
    let mut kinds = vec![(4, Just(Placement::Replicate).boxed())];
    if !shape.is_empty() {
        kinds.push((8, (0..shape.len()).prop_map(Placement::Shard).boxed()));
        let prefixes: Vec<_> = (1..=shape.len()).flat_map(|dims| ragged(ranks, shape, dims)).collect();
        kinds.push((2, proptest::strategy::Union::new(prefixes).boxed()));
    }
    if partials && dtype != DType::Bool {
        kinds.push((2, Just(Placement::Partial(ReduceOp::Sum)).boxed()));
    }
    proptest::strategy::Union::new_weighted(kinds).boxed()
}

/// Uneven ragged placements, some with empty ranks, in units of the two smallest block sizes, or all on one rank.
fn ragged(ranks: usize, shape: &Shape, dims: usize) -> Vec<BoxedStrategy<Placement>> {
    let numel: usize = shape[..dims].iter().product();
    let mut counts: Vec<usize> =
        (1..=numel.max(1)).rev().filter(|t| numel.is_multiple_of(*t)).take(2).collect();
    // Ragged axes nest if the blocks of the inner one divide each part that the outer one leaves.
    if numel > 3 {
        counts.push(1);
    }
    let of = |total: usize| {
        let cut = prop_oneof![2 => Just(0), 4 => 0..=total, 1 => Just(total)];
        let units = vec(cut, ranks - 1).prop_map(move |mut cuts| {
            cuts.sort_unstable();
            cuts.push(total);
            let mut from = 0;
            cuts.into_iter().map(|to| to - std::mem::replace(&mut from, to)).collect::<Vec<usize>>()
        });
        units
            .prop_shuffle()
            .prop_map(move |units| Placement::RaggedShard { dims, units: units.into() })
            .boxed()
    };
    counts.into_iter().map(of).collect()
}
