//! Regions compared with their definition, element by element, on every small layout.

use std::collections::{HashMap, HashSet};

use isoshard::placement::short::{R, partial, ragged, shard};
use isoshard::placement::{Layout, Mesh, Placement, Region, Spec};
use isoshard::tensor::{DType, ReduceOp, Shape};

const MESHES: [&[usize]; 7] = [&[1], &[2], &[3], &[5], &[2, 2], &[2, 3], &[2, 2, 2]];
const SHAPES: [&[usize]; 13] = [
    &[],
    &[0],
    &[1],
    &[5],
    &[12],
    &[1, 4],
    &[0, 3],
    &[3, 0],
    &[5, 3],
    &[4, 3],
    &[2, 3, 5],
    &[3, 1, 2],
    &[2, 2, 0],
];

/// Returns the elements that one rank holds, in the order of its local storage, by the definition; `None` for a layout
/// without a meaning.
fn held(
    shape: &[usize],
    mesh: &Mesh,
    layout: &[Placement],
    order: &[usize],
    at: &[usize],
) -> Option<Vec<Vec<usize>>> {
    let mut lists: Vec<Vec<usize>> = shape.iter().map(|&n| (0..n).collect()).collect();
    let mut flat: Option<Vec<Vec<usize>>> = None;
    let mut taken = 0;
    for &a in order {
        match &layout[a] {
            Placement::Shard(d) => {
                if *d < taken {
                    return None;
                }
                let each = lists[*d].len().div_ceil(mesh.axis_len(a)).max(1);
                lists[*d] = lists[*d].chunks(each).nth(at[a]).map_or(Vec::new(), <[usize]>::to_vec);
            }
            Placement::RaggedShard { dims, units } => {
                if taken > 0 && taken != *dims {
                    return None;
                }
                let prefix = flat.take().unwrap_or_else(|| product(&lists[..*dims]));
                let total: usize = units.iter().sum();
                if !prefix.len().is_multiple_of(total) {
                    return None;
                }
                let block = prefix.len() / total;
                let skipped: usize = units[..at[a]].iter().sum();
                let own = prefix[skipped * block..][..units[at[a]] * block].to_vec();
                match dims {
                    1 => lists[0] = own.concat(),
                    _ => (flat, taken) = (Some(own), *dims),
                }
            }
            _ => {}
        }
    }
    let rest = product(&lists[taken..]);
    let join = |p: &Vec<usize>| rest.iter().map(|r| [p.as_slice(), r].concat()).collect::<Vec<_>>();
    Some(flat.unwrap_or_else(|| vec![vec![]]).iter().flat_map(join).collect())
}

fn product(lists: &[Vec<usize>]) -> Vec<Vec<usize>> {
    lists.iter().fold(vec![vec![]], |heads, list| {
        heads.iter().flat_map(|h| list.iter().map(move |&i| [h.as_slice(), &[i]].concat())).collect()
    })
}

fn choices(ranks: usize, dims: usize) -> Vec<Placement> {
    let mut all = vec![R, partial(ReduceOp::Sum)];
    all.extend((0..dims).map(shard));
    for d in 1..=dims {
        let one_hot: Vec<usize> = (0..ranks).map(|r| usize::from(r + 1 == ranks)).collect();
        let uneven: Vec<usize> = (0..ranks).map(|r| [3, 0, 1, 2, 0][r % 5]).collect();
        all.extend([ragged(d, &vec![1; ranks]), ragged(d, &one_hot), ragged(d, &uneven)]);
    }
    all
}

fn orders(n: usize) -> Vec<Vec<usize>> {
    let mut all = product(&vec![(0..n).collect(); n]);
    all.retain(|order| order.iter().collect::<HashSet<_>>().len() == n);
    all
}

fn mesh(lens: &[usize]) -> Mesh {
    let axes: Vec<(&str, usize)> = ["a", "b", "c"].into_iter().zip(lens.iter().copied()).collect();
    Mesh::new(&axes, 0).unwrap()
}

/// Calls `f(spec, the placements, the order as it was given)` for every layout, and checks that `Spec::new` accepts
/// exactly those that have a meaning on every rank.
fn every_layout(lens: &[usize], shape: &[usize], mut f: impl FnMut(Spec, &[Placement], &[usize])) -> usize {
    let mesh = mesh(lens);
    let per_axis: Vec<Vec<Placement>> = lens.iter().map(|&n| choices(n, shape.len())).collect();
    let indices: Vec<Vec<usize>> = per_axis.iter().map(|c| (0..c.len()).collect()).collect();
    let mut accepted = 0;
    for pick in product(&indices) {
        let placements: Vec<Placement> = pick.iter().zip(&per_axis).map(|(&i, c)| c[i].clone()).collect();
        for order in orders(lens.len()) {
            let layout = Layout::new(placements.clone()).with_order(&order).unwrap();
            let spec = Spec::new(&mesh, DType::F32, shape, layout.clone());
            let coords = |r: usize| mesh.coords_of(r).unwrap();
            let meant = mesh.ranks().all(|r| held(shape, &mesh, &placements, &order, &coords(r)).is_some());
            assert_eq!(spec.is_ok(), meant, "{layout} of {shape:?} on {mesh}: {spec:?}");
            if let Ok(spec) = spec {
                accepted += 1;
                f(spec, &placements, &order);
            }
        }
    }
    accepted
}

fn linear(index: &[usize], shape: &[usize]) -> usize {
    index.iter().zip(shape).fold(0, |l, (i, n)| l * n + i)
}

fn check_region(region: &Region, want: &[Vec<usize>], shape: &Shape, case: &dyn std::fmt::Display) {
    assert_eq!((region.numel(), region.is_empty()), (want.len(), want.is_empty()), "{case}");
    for (offset, index) in want.iter().enumerate() {
        assert_eq!(region.offset_of(index), Some(offset), "{case}: {index:?}");
    }
    let boxed: usize = region.boxes.iter().map(|b| b.len.iter().product::<usize>()).sum();
    assert_eq!(boxed, want.len(), "{case}: the boxes are disjoint");
    // The longest runs by the definition: local storage has `want`'s order.
    let mut longest: Vec<(u64, usize, usize)> = vec![];
    for (offset, index) in want.iter().enumerate() {
        let at = linear(index, shape) as u64;
        match longest.last_mut() {
            Some((start, _, len)) if *start + *len as u64 == at => *len += 1,
            _ => longest.push((at, offset, 1)),
        }
    }
    let mut runs = vec![];
    region.runs(shape, |global, local, len| runs.push((global, local, len)));
    assert_eq!(runs, longest, "{case}");
    for d in 0..shape.len() {
        if let (Some(start), Some(extent), Some(first)) = (region.start(d), region.extent(d), want.first()) {
            assert_eq!(start, first[d], "{case}");
            assert_eq!(start + extent - 1, want.last().unwrap()[d], "{case}");
        }
    }
}

#[test]
fn regions_are_what_the_definition_says() {
    let mut accepted = 0;
    for lens in MESHES {
        for shape in SHAPES.iter().filter(|s| lens.len() < 3 || s.len() < 3) {
            accepted += every_layout(lens, shape, |spec, placements, order| {
                let mesh = &spec.mesh;
                let replicas: usize = (0..mesh.ndim())
                    .filter(|&a| placements[a].split_dims().is_empty())
                    .map(|a| mesh.axis_len(a))
                    .product();
                let mut holders = vec![0; spec.shape.numel()];
                for rank in mesh.ranks() {
                    let at = mesh.coords_of(rank).unwrap();
                    let want = held(shape, mesh, placements, order, &at).unwrap();
                    let region = spec.region_at(&at);
                    check_region(&region, &want, &spec.shape, &spec);
                    assert_eq!(region.local, spec.local_shape_at(&at), "{spec}");
                    want.iter().for_each(|index| holders[linear(index, shape)] += 1);
                }
                assert!(holders.iter().all(|&n| n == replicas), "{spec}: every replica is whole");
                assert_eq!(Spec::parse(&spec.to_string(), mesh).unwrap(), spec);
            });
        }
    }
    assert!(accepted > 10_000, "{accepted} layouts");
}

#[test]
fn intersections_are_what_both_hold() {
    for shape in [&[][..], &[5], &[0, 3], &[4, 3], &[2, 3, 5]] {
        let mut regions: HashSet<Region> = HashSet::new();
        for lens in [&[3][..], &[2, 2]] {
            every_layout(lens, shape, |spec, _, _| {
                regions.extend(spec.mesh.ranks().map(|r| spec.region_at(&spec.mesh.coords_of(r).unwrap())));
            });
        }
        let all: Vec<Vec<usize>> = product(&shape.iter().map(|&n| (0..n).collect()).collect::<Vec<_>>());
        let regions: Vec<Region> = regions.into_iter().collect();
        let offsets: Vec<Vec<Option<usize>>> =
            regions.iter().map(|r| all.iter().map(|index| r.offset_of(index)).collect()).collect();
        for (a, a_offsets) in regions.iter().zip(&offsets) {
            for (b, b_offsets) in regions.iter().zip(&offsets) {
                let pairs = a_offsets.iter().zip(b_offsets);
                let want: HashMap<usize, usize> = pairs.filter_map(|(x, y)| x.zip(*y)).collect();
                let overlaps = a.intersect(b);
                let mut got = HashMap::new();
                for overlap in &overlaps {
                    overlap.runs(|x, y, len| {
                        got.extend((0..len).map(|i| (x + i, y + i)));
                    });
                }
                assert_eq!(got, want, "{a:?} and {b:?}");
                assert_eq!(overlaps.iter().map(|o| o.numel()).sum::<usize>(), want.len());
                assert!(overlaps.is_sorted_by(|x, y| x.start < y.start));
                let turned = b.intersect(a);
                let starts = |o: &[isoshard::placement::Overlap]| -> Vec<_> {
                    o.iter().map(|o| (o.start.clone(), o.len.clone())).collect()
                };
                assert_eq!(starts(&overlaps), starts(&turned), "both sides see the same boxes");
            }
        }
    }
}

/// On axes of coprime lengths, with dims that none of them divides, two layouts are equal if and only if every rank holds
/// the same elements under both.
#[test]
fn layouts_are_equal_where_they_mean_the_same() {
    let mesh = mesh(&[2, 3, 5]);
    let choices: [Placement; 3] = [R, shard(0), shard(1)];
    for pick in product(&vec![vec![0, 1, 2]; 3]) {
        let specs: Vec<Spec> = orders(3)
            .iter()
            .map(|order| Layout::new(pick.iter().map(|&i| choices[i].clone())).with_order(order).unwrap())
            .map(|layout| Spec::new(&mesh, DType::F32, [101, 103], layout).unwrap())
            .collect();
        let regions = |s: &Spec| -> Vec<Region> {
            mesh.ranks().map(|r| s.region_at(&mesh.coords_of(r).unwrap())).collect()
        };
        for x in &specs {
            for y in &specs {
                assert_eq!(x == y, regions(x) == regions(y), "{x} and {y}");
            }
        }
    }
}

#[test]
fn a_flattened_range_takes_few_boxes() {
    let mesh = Mesh::parse("dp=3", 1).unwrap();
    // Elements 7..113 of [5, 5, 5]: up to the row, up to the plane, planes, down to the row, down to the element.
    let layout = Layout::new([ragged(3, &[7, 106, 12])]);
    let region = Spec::new(&mesh, DType::F32, [5, 5, 5], layout).unwrap().region();
    assert_eq!(region.local, Shape::from([106]));
    assert_eq!(region.boxes.len(), 5);
    let mut runs = vec![];
    region.runs(&[5, 5, 5].into(), |global, local, len| runs.push((global, local, len)));
    assert_eq!(runs, [(7, 0, 106)]);
    assert_eq!((region.start(0), region.extent(0)), (None, None));
}

/// An empty shard still has a start.
#[test]
fn an_empty_shard_keeps_its_place() {
    let mesh = Mesh::parse("dp=4", 3).unwrap();
    let region = Spec::parse("f32[5, 3]@(dp:S0)", &mesh).unwrap().region();
    assert!(region.is_empty() && region.boxes.is_empty());
    assert_eq!((region.start(0), region.extent(0)), (Some(5), Some(0)));
    assert_eq!((region.start(1), region.extent(1)), (Some(0), Some(3)));
    region.runs(&[5, 3].into(), |_, _, _| unreachable!("it holds nothing"));
}
