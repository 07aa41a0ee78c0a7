//! The layouts through which a redistribution may pass, and the sample of ranks at which bytes are counted.

use smallvec::SmallVec;

use crate::placement::{Layout, Mesh, Placement, Spec};
use crate::tensor::{Dims, short_list};

/// The largest number of intermediate layouts considered; if there are more, only those near both ends.
const STATES_LEN: usize = 600;
/// The largest number of ranks that are all sampled; if there are more, some along each axis.
const RANKS_LEN: usize = 64;

/// The placements that one axis may have.
type Options = SmallVec<[Placement; 6]>;

/// Returns the layouts of `src`'s tensor in which `fixed` axes stay as they are: each other axis is replicated,
/// splits any dim, or does what it does at one of the ends, in any order of axes. If those are too many, returns the
/// likeliest ones.
pub(super) fn candidate_layouts(src: &Spec, target: &Layout, fixed: &[usize]) -> Vec<Layout> {
    let every_dim: Dims = (0..src.shape.len()).collect();
    let cut = |d: &usize| src.layout.splitters(*d).chain(target.splitters(*d)).next().is_some();
    let longest = every_dim.iter().copied().max_by_key(|&d| (src.shape[d], std::cmp::Reverse(d)));
    let near: Dims = short_list(every_dim.iter().copied().filter(|d| cut(d) || Some(*d) == longest));
    let one: Dims = longest.into_iter().collect();
    let every_order = orders(src.mesh.ndim());
    let two_orders = [nested_in(&src.layout), nested_in(target)];
    for (dims, orders) in
        [(&every_dim, &every_order[..]), (&near, &every_order), (&near, &two_orders), (&one, &two_orders)]
    {
        let options: Vec<Options> =
            (0..src.mesh.ndim()).map(|a| options(src, target, fixed, dims, a)).collect();
        let len = options.iter().map(|o| o.len()).try_fold(orders.len(), usize::checked_mul);
        if len.is_some_and(|n| n > 0 && n <= STATES_LEN) {
            return legal(src, &options, orders);
        }
    }
    let ends = |a: usize| options(src, target, fixed, &[], a).into_iter().take(1).collect();
    legal(src, &(0..src.mesh.ndim()).map(ends).collect::<Vec<Options>>(), &two_orders)
}

/// Returns the coordinates at which bytes are counted, from shared metadata: all ranks or, along each axis, the
/// first, the last, one in the middle, and the largest of a ragged split. Under the ceil rule the first rank holds
/// the most elements, and two splits of a dim have the least in common at ranks that are first in one and last in the
/// other.
pub(in crate::dtensor) fn sample_coords(mesh: &Mesh, ends: [&Layout; 2]) -> Vec<Dims> {
    let mut all = vec![Dims::from_elem(0, mesh.ndim())];
    for a in (0..mesh.ndim()).filter(|&a| mesh.axis_len(a) > 1) {
        let picks = sampled_along(mesh, a, ends.into_iter());
        let at = |c: &Dims, i: usize| {
            let mut c = c.clone();
            c[a] = i;
            c
        };
        all = all.iter().flat_map(|c| picks.iter().map(move |&i| at(c, i))).collect();
    }
    all
}

/// Returns the coordinates along axis `a` of [`sample_coords`].
pub(super) fn sampled_along<'a>(mesh: &Mesh, a: usize, layouts: impl Iterator<Item = &'a Layout>) -> Dims {
    let n = mesh.axis_len(a);
    if mesh.rank_len() <= RANKS_LEN {
        return (0..n).collect();
    }
    let mut some: Dims = [0, n - 1].into_iter().collect();
    if (0..mesh.ndim()).filter(|&b| mesh.axis_len(b) > 1).count() <= 4 {
        some.push(n / 2);
    }
    for layout in layouts {
        match layout.axis(a) {
            Placement::RaggedShard { units, .. } => {
                some.extend((0..n).max_by_key(|&i| (units[i], std::cmp::Reverse(i))));
            }
            Placement::Replicate | Placement::Shard(_) | Placement::Partial(_) => {}
        }
    }
    some.sort_unstable();
    some.dedup();
    some
}

/// Returns the placements of axis `a` to consider.
fn options(src: &Spec, target: &Layout, fixed: &[usize], dims: &[usize], a: usize) -> Options {
    if fixed.contains(&a) {
        return [src.layout.axis(a).clone()].into_iter().collect();
    }
    let mut options: Options = [target.axis(a).clone()].into_iter().collect();
    if src.mesh.axis_len(a) == 1 {
        return options;
    }
    let own = Some(src.layout.axis(a).clone()).filter(|p| !p.is_partial());
    let shards = dims.iter().map(|&d| Placement::Shard(d));
    for p in own.into_iter().chain([Placement::Replicate]).chain(shards) {
        if !options.contains(&p) {
            options.push(p);
        }
    }
    options
}

/// Returns the layouts with these placements and orders that fit the tensor.
fn legal(src: &Spec, options: &[Options], orders: &[Dims]) -> Vec<Layout> {
    let mut products: Vec<SmallVec<[Placement; 4]>> = vec![SmallVec::new()];
    for axis in options {
        let with = |p: &SmallVec<[Placement; 4]>, o: &Placement| {
            let mut p = p.clone();
            p.push(o.clone());
            p
        };
        products = products.iter().flat_map(|p| axis.iter().map(move |o| with(p, o))).collect();
    }
    let mut found: Vec<Layout> = Vec::with_capacity(products.len());
    for placements in products {
        let first = found.len();
        let natural = Layout::new(placements.iter().cloned());
        let meet = |a: usize| (0..a).any(|b| placements[a].meets(&placements[b]));
        let fits = |layout: &Layout| {
            // The placements other than ragged ones are those of layouts that fit, or shard dims that exist.
            layout.ragged_axis().is_none()
                || Spec::new(&src.mesh, src.dtype, &src.shape, layout.clone()).is_ok()
        };
        if !orders.is_empty() && !(0..placements.len()).any(meet) {
            found.extend(Some(natural).filter(fits));
            continue;
        }
        for order in orders {
            let layout = natural.clone().with_order(order).expect("a permutation");
            if !found[first..].contains(&layout) && fits(&layout) {
                found.push(layout);
            }
        }
    }
    found
}

/// Returns all orders of `n` axes, mesh order first, or none if they are too many.
fn orders(n: usize) -> Vec<Dims> {
    if n > 5 {
        return Vec::new();
    }
    let mut all = vec![Dims::new()];
    for _ in 0..n {
        let longer = |o: &Dims| -> Vec<Dims> {
            let more = |a: usize| o.iter().copied().chain([a]).collect();
            (0..n).filter(|a| !o.contains(a)).map(more).collect()
        };
        all = all.iter().flat_map(longer).collect();
    }
    all
}

/// Returns the order of a layout's splitting axes, followed by the axes that split nothing.
fn nested_in(layout: &Layout) -> Dims {
    let cuts = |a: &usize| !layout.axis(*a).split_dims().is_empty();
    let (outer, inner): (Dims, Dims) = layout.order().iter().copied().partition(cuts);
    outer.into_iter().chain(inner).collect()
}
