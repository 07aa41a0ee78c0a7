//! The cost model: a redistribution costs no more than two redistributions through a third layout, on equal links and
//! on a mix of fast and slow ones, and the modelled cost equals the sum over a dry run's calls.

use isoshard::comm::{Cost, DryRun, Level, Network};
use isoshard::dtensor::{DTensor, DeviceMesh, Redistribution};
use isoshard::placement::{Layout, Mesh, Placement, Spec, short::*};
use isoshard::tensor::{DType, ReduceOp};

/// All layouts of a matrix on a mesh of `ndim` axes, with every order in which axes split one dim. `Partial` is a
/// maximum only: a float's sum has bits that some orders of folding change, and the planner does not take those.
fn layouts(ndim: usize) -> Vec<Layout> {
    let choices = [R, shard(0), shard(1), partial(ReduceOp::Max)];
    let mut all: Vec<Vec<Placement>> = vec![vec![]];
    for _ in 0..ndim {
        all = all
            .iter()
            .flat_map(|p| choices.iter().map(|q| [&p[..], std::slice::from_ref(q)].concat()))
            .collect();
    }
    let back: Vec<usize> = (0..ndim).rev().collect();
    let mut layouts: Vec<Layout> = Vec::new();
    for placements in all {
        let natural = Layout::new(placements.clone());
        let nested = Layout::new(placements).with_order(&back).expect("a permutation");
        for layout in [natural, nested] {
            if !layouts.contains(&layout) {
                layouts.push(layout);
            }
        }
    }
    layouts
}

fn equal_links() -> Network {
    Network::uniform(2e-9, 1e9).expect("sound")
}

/// A network with fast links within pairs of ranks; a call costs as much as two bytes over a fast link.
fn fast_and_slow() -> Network {
    let level = |ranks, latency_s, bytes_per_s| Level { ranks, latency_s, bytes_per_s };
    Network::new([level(2, 1e-9, 2e9), level(usize::MAX, 5e-9, 1e8)]).expect("from fast to slow")
}

fn cost(network: &Network, mesh: &Mesh, shape: &[usize], from: &Layout, to: &Layout) -> Cost {
    let spec = |l: &Layout| Spec::new(mesh, DType::F32, shape, l.clone()).expect("every layout fits");
    Redistribution::over(network, &spec(from), &spec(to)).expect("planned").cost()
}

#[test]
fn no_way_by_a_third_layout_is_cheaper() {
    let mut triples = 0;
    for (text, shape, every) in
        [("a=2,b=2", [4, 4], 1), ("a=2,b=4", [8, 8], 1), ("a=3,b=2", [7, 5], 1), ("a=2,b=2,c=2", [8, 8], 7)]
    {
        let mesh = Mesh::parse(text, 0).expect("a mesh");
        let some = |(i, _): &(usize, Layout)| i % every == 0;
        let all: Vec<Layout> =
            layouts(mesh.ndim()).into_iter().enumerate().filter(some).map(|(_, l)| l).collect();
        for network in [equal_links(), fast_and_slow()] {
            let costs: Vec<Vec<Cost>> = all
                .iter()
                .map(|a| all.iter().map(|b| cost(&network, &mesh, &shape, a, b)).collect())
                .collect();
            let n = all.len();
            for (a, b, c) in (0..n * n * n).map(|i| (i / n / n, i / n % n, i % n)) {
                // A tensor that stays partial is not reduced on the way and opened again: that would be another sum.
                let kept = |x: usize| all[a].axis(x).is_partial() && all[c].axis(x).is_partial();
                if (0..mesh.ndim()).any(|x| kept(x) && !all[b].axis(x).is_partial()) {
                    continue;
                }
                let by = costs[a][b] + costs[b][c];
                assert!(
                    costs[a][c] <= by,
                    "{text} {network}: {} to {} costs {}, by {} {} + {}",
                    all[a],
                    all[c],
                    costs[a][c],
                    all[b],
                    costs[a][b],
                    costs[b][c]
                );
                triples += 1;
            }
        }
    }
    assert!(triples > 30_000, "{triples} triples");
}

/// Ranks that all receive equally much, and from all peers equally much.
#[test]
fn a_moves_cost_is_its_calls_time() {
    for network in [equal_links(), fast_and_slow()] {
        for (from, to) in
            [("(S0, R)", "(R, R)"), ("(R, S0)", "(R, R)"), ("(S0, R)", "(S1, R)"), ("(R, S0)", "(R, S1)")]
        {
            let dry = DryRun::with_network(8, 3, network.clone()).unwrap();
            let mesh = DeviceMesh::parse(&dry.rank().unwrap(), "a=4,b=2").unwrap();
            let x = DTensor::zeros(&mesh, DType::F32, [64, 64], from).unwrap();
            let to: Layout = to.parse().unwrap();
            x.redistribute(to.clone()).unwrap();
            let (from, to) =
                (x.tensor_meta().spec().clone(), x.tensor_meta().spec().with_layout(to).unwrap());
            let planned = Redistribution::over(&network, &from, &to).unwrap();
            assert_eq!(dry.report().total().time, planned.cost(), "{network}: {from} to {to}");
        }
    }
}

/// On a network of two levels two calls are cheaper, because slow links carry each byte once; on equal links one call is.
#[test]
fn slow_links_carry_each_byte_once() {
    let mesh = Mesh::parse("node=4,gpu=2", 0).unwrap();
    let spec = |text: &str| Spec::parse(text, &mesh).unwrap();
    let (from, to) = (spec("f32[64, 64]@(node:S0^1, gpu:S0^0)"), spec("f32[64, 64]@(node:R, gpu:R)"));
    let near = Redistribution::over(&fast_and_slow(), &from, &to).unwrap();
    let names: Vec<&str> = near.collectives().collect();
    assert_eq!(names, ["all_gather", "all_gather"]);
    let direct = Redistribution::over(&equal_links(), &from, &to).unwrap();
    assert_eq!((direct.calls(), direct.received_bytes()), (1, near.received_bytes()));
}
