//! The bytes and calls of every pair of layouts, beside what cannot be beaten and what PyTorch takes: `docs/redistribution.md`
//! is made here, and must be what is in the repository. `ISOSHARD_BLESS=1` writes it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use isoshard::dtensor::Redistribution;
use isoshard::placement::{Layout, Mesh, Placement, Region, Spec};
use isoshard::tensor::{DType, ReduceOp, Shape};

/// What a call counts, in bytes: the planner's.
const CALL_BYTES: u64 = 16 << 10;
const STEPS: usize = 4;

#[test]
fn the_table_is_what_is_planned() {
    let mut page = INTRO.to_string();
    two_by_four(&mut page);
    other_meshes(&mut page);
    ragged(&mut page);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/redistribution.md");
    if std::env::var_os("ISOSHARD_BLESS").is_some() {
        std::fs::write(&path, &page).expect("the page can be written");
    }
    let kept = std::fs::read_to_string(&path).expect("docs/redistribution.md is there");
    let differs = kept.lines().zip(page.lines()).find(|(a, b)| a != b);
    assert!(kept == page, "run with ISOSHARD_BLESS=1; the first line that differs: {differs:?}");
}

/// 16,384 ranks, a fold over two axes among them: bytes by hand.
#[test]
fn a_large_mesh_is_planned_by_its_axes() {
    let mesh = Mesh::parse("dp=64,fsdp=32,tp=8", 12_345).expect("a mesh");
    let n = 1u64 << 28;
    let planned = |from: &str, to: &str| {
        let spec = |layout: &str| Spec::new(&mesh, DType::F32, [8192, 8192], layout.parse()?);
        let plan = Redistribution::plan(&spec(from)?, &spec(to)?)?;
        Ok::<_, isoshard::Error>((plan.received_bytes(), plan.calls()))
    };
    let planned = |from: &str, to: &str| planned(from, to).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(planned("(R, S0, S1)", "(R, R, S1)"), (n / 8 * 31 / 32, 1), "a parameter is gathered");
    assert_eq!(planned("(P(sum), P(sum), S1)", "(R, S0, S1)"), (n / 8 / 2048 * 2047 + n / 8 / 2048 * 63, 2));
    assert_eq!(planned("(R, R, R)", "(S0, S0, S1)"), (0, 0));
    let (bytes, calls) = planned("(R, P(sum), R)", "(R, R, R)");
    assert!(calls <= 2 && bytes < 2 * n * 31 / 32, "replicas share the folding: {bytes}");
}

const INTRO: &str = "\
# Redistribution: bytes and calls

*Made by `tests/suite/redistribute_table.rs`, which fails where this page differs from what is planned;
`ISOSHARD_BLESS=1 cargo test --test suite redistribute_table::` writes it.*

A move between two layouts is planned from facts that every rank has, without asking. Bytes are those that a rank
receives, in units of N, the bytes of the whole tensor: their mean over ranks, and those of the rank that receives most. An
all-reduce counts as a ring's. A call is a collective that ranks make together.

- **Without `Partial`** the bound is the set difference: what a rank will hold less what it holds. The plan is one exchange
  with just these bytes, on every rank, for every pair: nothing can take less.
- **With `Partial`** the plan is the cheapest of all sequences of folds, all-reduces and exchanges through any layouts, by the
  bytes of the rank that receives most at each step, a call counting as 16 KiB; sums of floats are folded only in orders
  that keep their bits. The optimum below was found by trying all sequences of up to four steps through all layouts, by
  another program (`tests/suite/redistribute_table.rs`; at small sizes also `src/dtensor/redistribute/exhaustive.rs`).

";

/// All pairs on one mesh, with PyTorch's numbers.
fn two_by_four(page: &mut String) {
    let world = World::new("a=2,b=4", &[8192, 8192]);
    let torch = Torch::read();
    for partial in [false, true] {
        let (title, ours) = match partial {
            false => ("without `Partial`", "bound, mean"),
            true => ("with a `Partial` source", "optimum, most"),
        };
        writeln!(page, "## A mesh of 2 x 4, {title}\n").unwrap();
        writeln!(
            page,
            "`f32[8192, 8192]`; PyTorch {}'s default planner, and its opt-in one by a graph.\n",
            torch.version
        )
        .unwrap();
        writeln!(page, "| from | to | calls | mean | most | {ours} | default | calls | graph | calls |")
            .unwrap();
        writeln!(page, "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|").unwrap();
        let mut sums = [0.0; 5];
        let (mut calls, mut several, mut pairs) = ([0; 3], 0, 0);
        for row in world.rows(&plain_layouts(2), partial) {
            let [default, graph] = torch.pairs[&(letters(&row.from), letters(&row.to))];
            let least = default.0.min(graph.0);
            assert!(row.most <= least + 1e-9, "{} to {}: {} of {least}", row.from, row.to, row.most);
            let bound = if partial { row.optimum } else { row.bound };
            for (sum, x) in sums.iter_mut().zip([row.mean, row.most, bound, default.0, graph.0]) {
                *sum += x;
            }
            for (sum, n) in calls.iter_mut().zip([row.calls, default.1, graph.1]) {
                *sum += n;
            }
            several += usize::from(default.1 > 1);
            pairs += 1;
            writeln!(
                page,
                "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                letters(&row.from),
                letters(&row.to),
                row.calls,
                number(row.mean),
                number(row.most),
                number(bound),
                number(default.0),
                default.1,
                number(graph.0),
                graph.1
            )
            .unwrap();
        }
        assert_eq!(pairs, if partial { 63 } else { 72 });
        writeln!(
            page,
            "| **all {pairs}** | | {} | {} | {} | {} | {} | {} | {} | {} |\n",
            calls[0],
            number(sums[0]),
            number(sums[1]),
            number(sums[2]),
            number(sums[3]),
            calls[1],
            number(sums[4]),
            calls[2]
        )
        .unwrap();
        writeln!(page, "PyTorch's default plan takes more than one collective on {several} of them.\n")
            .unwrap();
    }
}

/// Sums over all pairs on other meshes, of sizes that divide and of sizes that do not.
fn other_meshes(page: &mut String) {
    page.push_str(
        "## Other meshes\n\nSums over all pairs of layouts of R, S0, S1 (and P in the source), the first axis outermost; \
         nested the other way round is tested at small sizes.\n\n\
         | mesh | tensor | pairs | calls | mean | bound | most | pairs with P | calls | mean | most | optimum |\n\
         |---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
    );
    for (mesh, shape) in [
        ("a=4", [8192, 8192]),
        ("a=4", [4099, 2053]),
        ("a=4", [3, 65537]),
        ("a=2,b=2", [8192, 8192]),
        ("a=2,b=2", [4099, 2053]),
        ("a=3,b=2", [6144, 6144]),
        ("a=3,b=2", [4099, 2053]),
        ("a=3,b=2", [2, 65537]),
        ("a=2,b=4", [4099, 2053]),
        ("a=2,b=4", [7, 5]),
        ("a=2,b=2,c=2", [8192, 8192]),
        ("a=2,b=2,c=2", [4099, 2053]),
    ] {
        let world = World::new(mesh, &shape);
        let layouts = plain_layouts(world.mesh.ndim());
        let sum = |rows: &[Row], of: fn(&Row) -> f64| number(rows.iter().map(of).sum());
        let [without, with] = [false, true].map(|partial| world.rows(&layouts, partial));
        writeln!(
            page,
            "| {} | {}{} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            lens(&world.mesh),
            DType::F32,
            world.shape,
            without.len(),
            without.iter().map(|r| r.calls).sum::<usize>(),
            sum(&without, |r| r.mean),
            sum(&without, |r| r.bound),
            sum(&without, |r| r.most),
            with.len(),
            with.iter().map(|r| r.calls).sum::<usize>(),
            sum(&with, |r| r.mean),
            sum(&with, |r| r.most),
            sum(&with, |r| r.optimum),
        )
        .unwrap();
    }
    page.push('\n');
}

/// Cuts by choice: uneven, empty, over flattened dims, one rank that has all.
fn ragged(page: &mut String) {
    page.push_str(
        "## Ragged layouts\n\n`f32[4100, 2053]`. With `Partial` the optimum is that through all plain layouts and the two \
         ends, which the plan may beat.\n\n| mesh | from | to | how | mean | most | bound or optimum |\n|---|---|---|---|--:|--:|--:|\n",
    );
    let one = [
        "(R)",
        "(S0)",
        "(S1)",
        "(RS(0..1; 5,1,0,4))",
        "(RS(0..2; 7,0,9,4))",
        "(RS(0..1; 0,0,1,0))",
        "(RS(0..2; 1,0,0,0))",
        "(P(sum))",
    ];
    let two = [
        "(R, R)",
        "(S0, S1)",
        "(S0, RS(0..1; 3,2))",
        "(RS(0..2; 1,4)^1, S1^0)",
        "(R, RS(0..1; 1,0))",
        "(P(sum), RS(0..1; 2,3))",
        "(P(sum), S1)",
    ];
    for (mesh, layouts) in [("a=4", &one[..]), ("a=2,b=2", &two)] {
        let layouts: Vec<Layout> = layouts.iter().map(|l| l.parse().expect("a layout")).collect();
        let world = World::with(mesh, &[4100, 2053], &layouts);
        for partial in [false, true] {
            for row in world.rows(&layouts, partial) {
                let plain = |l: &Layout| l.ragged_axis().is_none();
                if plain(&row.from) && plain(&row.to) {
                    continue;
                }
                writeln!(
                    page,
                    "| {} | {} | {} | {} | {} | {} | {} |",
                    lens(&world.mesh),
                    row.from,
                    row.to,
                    row.how,
                    number(row.mean),
                    number(row.most),
                    number(if partial { row.optimum } else { row.bound })
                )
                .unwrap();
            }
        }
    }
}

/// One pair, in units of N.
struct Row {
    from: Layout,
    to: Layout,
    how: String,
    calls: usize,
    mean: f64,
    most: f64,
    /// Mean over ranks of what each lacks.
    bound: f64,
    /// What the rank receives that receives most, step by step, in the best of all sequences of steps.
    optimum: f64,
}

/// A tensor on a mesh, with all layouts it may have.
struct World {
    mesh: Mesh,
    shape: Shape,
    layouts: Vec<Layout>,
    held: Vec<Vec<Region>>,
}

impl World {
    fn new(mesh: &str, shape: &[usize]) -> World {
        World::with(mesh, shape, &[])
    }

    fn with(mesh: &str, shape: &[usize], more: &[Layout]) -> World {
        let (mesh, shape) = (Mesh::parse(mesh, 0).expect("a mesh"), Shape::from(shape));
        let mut layouts = plain_layouts(mesh.ndim());
        let placements: Vec<Vec<Placement>> = layouts.iter().map(|l| l.placements().to_vec()).collect();
        for order in permutations(mesh.ndim()) {
            layouts.extend(
                placements.iter().map(|p| Layout::new(p.clone()).with_order(&order).expect("an order")),
            );
        }
        layouts.extend(more.iter().cloned());
        let mut unique: Vec<Layout> = Vec::new();
        for layout in layouts {
            if !unique.contains(&layout) {
                unique.push(layout);
            }
        }
        let hold = |layout: &Layout| {
            let spec = Spec::new(&mesh, DType::F32, &shape, layout.clone()).expect("a legal layout");
            mesh.ranks().map(|r| spec.region_at(&mesh.coords_of(r).expect("in the mesh"))).collect()
        };
        let held = unique.iter().map(hold).collect();
        World { mesh, shape, layouts: unique, held }
    }

    /// All pairs of these layouts whose source is `Partial`, or is not, to those that are not.
    fn rows(&self, layouts: &[Layout], partial: bool) -> Vec<Row> {
        let steps = if partial { self.steps() } else { Vec::new() };
        let mut rows = Vec::new();
        for from in layouts.iter().filter(|l| l.has_partial() == partial) {
            let best = if partial { self.cheapest(self.at(from), &steps) } else { Vec::new() };
            for to in layouts.iter().filter(|to| !to.has_partial() && *to != from) {
                rows.push(self.row(from, to, &best));
            }
        }
        rows
    }

    fn row(&self, from: &Layout, to: &Layout, best: &[Option<(u64, u64)>]) -> Row {
        let spec = |r: usize, l: &Layout| {
            let mesh = self.mesh.seen_from(r).expect("in the mesh");
            Spec::new(&mesh, DType::F32, &self.shape, l.clone()).expect("a legal layout")
        };
        let of = |r: usize| Redistribution::plan(&spec(r, from), &spec(r, to)).expect("plans");
        let plans: Vec<Redistribution> = self.mesh.ranks().map(of).collect();
        let lacking: Vec<u64> = self.lacking(self.at(from), self.at(to), 1);
        let received: Vec<u64> = plans.iter().map(Redistribution::received_bytes).collect();
        let calls = plans[0].calls();
        let text = format!("{from} to {to} on {}: {}", self.mesh, plans[0]);
        // As the search adds up: the rank that receives most at each step.
        let most = (0..plans[0].step_bytes().count())
            .map(|k| plans.iter().map(|p| p.step_bytes().nth(k).expect("alike")).max().expect("ranks"))
            .sum::<u64>();
        let ragged = from.ragged_axis().or(to.ragged_axis()).is_some();
        let mut optimum = 0;
        if from.has_partial() {
            let (weight, bytes) = best[self.at(to)].expect("all can be reached");
            let planned = most + CALL_BYTES * calls as u64;
            assert!(planned == weight || (ragged && planned < weight), "{planned}, not {weight}: {text}");
            optimum = bytes;
        } else {
            assert_eq!(received, lacking, "{text}");
            assert!(calls <= 1, "{text}");
        }
        let n = self.bytes(self.shape.numel() as u64) as f64;
        let mean = |of: &[u64]| of.iter().sum::<u64>() as f64 / of.len() as f64 / n;
        let mut how = plans[0].collectives().collect::<Vec<_>>().join(", ");
        if how.is_empty() {
            how.push_str("slice");
        }
        Row {
            from: from.clone(),
            to: to.clone(),
            how,
            calls,
            mean: mean(&received),
            most: most as f64 / n,
            bound: mean(&lacking),
            optimum: optimum as f64 / n,
        }
    }

    fn at(&self, layout: &Layout) -> usize {
        self.layouts.iter().position(|l| l == layout).expect("a layout of this world")
    }

    fn bytes(&self, elements: u64) -> u64 {
        elements * DType::F32.size_bytes() as u64
    }

    /// What each rank receives that wants layout `to` as `members` parts, of which it has one as in layout `from`.
    fn lacking(&self, from: usize, to: usize, members: u64) -> Vec<u64> {
        let lacks = |(have, want): (&Region, &Region)| {
            let both: usize = have.intersect(want).iter().map(|o| o.numel()).sum();
            self.bytes(members * want.numel() as u64 - both as u64)
        };
        self.held[from].iter().zip(&self.held[to]).map(lacks).collect()
    }

    /// Every step between two layouts, with its weight and its bytes; sums are folded from the last axis on.
    fn steps(&self) -> Vec<(usize, usize, u64, u64)> {
        let partials =
            |l: &Layout| -> Vec<usize> { (0..l.ndim()).filter(|&a| l.axis(a).is_partial()).collect() };
        let mut steps = Vec::new();
        for (i, from) in self.layouts.iter().enumerate() {
            let before = partials(from);
            for (j, to) in self.layouts.iter().enumerate() {
                let after = partials(to);
                if i == j || !before.starts_with(&after) {
                    continue;
                }
                let folded = &before[after.len()..];
                let members: u64 = folded.iter().map(|&a| self.mesh.axis_len(a) as u64).product();
                let mut bytes = self.lacking(i, j, members).into_iter().max().expect("ranks");
                let calls = u64::from(members > 1 || bytes > 0);
                let stays =
                    |a: usize| from.axis(a) == to.axis(a) || folded.contains(&a) && to.axis(a).is_replicate();
                if members > 1 && (0..from.ndim()).all(stays) && from.order() == to.order() {
                    let whole = self.held[i].iter().map(|r| r.numel() as u64).max().expect("ranks");
                    let share = whole.div_ceil(members);
                    bytes = bytes.min(self.bytes((members - 1) * share + whole - share));
                }
                steps.push((i, j, bytes + CALL_BYTES * calls, bytes));
            }
        }
        steps
    }

    /// Weight and bytes of the cheapest sequence from layout `src` to every other.
    fn cheapest(&self, src: usize, steps: &[(usize, usize, u64, u64)]) -> Vec<Option<(u64, u64)>> {
        let mut best = vec![None; self.layouts.len()];
        best[src] = Some((0, 0));
        for _ in 0..STEPS {
            let mut next = best.clone();
            for &(from, to, weight, bytes) in steps {
                let Some((w, b)) = best[from] else { continue };
                if next[to].is_none_or(|old| (w + weight, b + bytes) < old) {
                    next[to] = Some((w + weight, b + bytes));
                }
            }
            best = next;
        }
        best
    }
}

/// PyTorch's bytes in units of N, and calls: of its default planner and of that by a graph.
struct Torch {
    version: String,
    pairs: BTreeMap<(String, String), [(f64, usize); 2]>,
}

impl Torch {
    fn read() -> Torch {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/torch/redistribute.json");
        let text = std::fs::read_to_string(path).expect("PyTorch's numbers are there");
        let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let names = |v: &serde_json::Value| {
            let names: Vec<&str> =
                v.as_array().expect("names").iter().map(|n| n.as_str().expect("a name")).collect();
            format!("({})", names.join(", "))
        };
        let number =
            |v: &serde_json::Value| (v[0].as_f64().expect("bytes"), v[1].as_u64().expect("calls") as usize);
        let rows = json["pairs"].as_array().expect("pairs").iter();
        let pairs = rows
            .map(|r| ((names(&r["from"]), names(&r["to"])), [number(&r["default"]), number(&r["graph"])]));
        Torch { version: json["torch"].as_str().expect("a version").into(), pairs: pairs.collect() }
    }
}

/// All layouts of two dims, the first axis outermost.
fn plain_layouts(ndim: usize) -> Vec<Layout> {
    let choices =
        [Placement::Replicate, Placement::Shard(0), Placement::Shard(1), Placement::Partial(ReduceOp::Sum)];
    let mut all: Vec<Vec<Placement>> = vec![vec![]];
    for _ in 0..ndim {
        all = all
            .iter()
            .flat_map(|p| choices.iter().map(|q| [&p[..], std::slice::from_ref(q)].concat()))
            .collect();
    }
    all.into_iter().map(Layout::new).collect()
}

fn permutations(n: usize) -> Vec<Vec<usize>> {
    let mut all: Vec<Vec<usize>> = vec![vec![]];
    for a in 0..n {
        let with =
            |p: &Vec<usize>| (0..=p.len()).map(|i| [&p[..i], &[a], &p[i..]].concat()).collect::<Vec<_>>();
        all = all.iter().flat_map(with).collect();
    }
    all
}

fn letters(layout: &Layout) -> String {
    layout.to_string().replace("P(sum)", "P")
}

fn lens(mesh: &Mesh) -> String {
    let lens: Vec<String> = (0..mesh.ndim()).map(|a| mesh.axis_len(a).to_string()).collect();
    lens.join("x")
}

/// Four digits behind the point, without zeros at the end.
fn number(x: f64) -> String {
    let text = format!("{x:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}
