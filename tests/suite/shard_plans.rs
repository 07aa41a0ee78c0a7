//! Plans of shared buffers: every rule by its definition, the optimum of small cases by enumeration, and the table of
//! real layers in `docs/padding.md` (`ISOSHARD_BLESS=1 cargo test --test suite shard_plans::` writes it).

mod rules;
mod shapes;

use std::fmt::Write;
use std::ops::Range;

use isoshard::fsdp::{BlockedTensor, ShardPlan, ShardPlanner};
use proptest::prelude::*;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/padding.md");

fn tensors(of: &[(usize, usize)]) -> Vec<BlockedTensor> {
    of.iter().map(|&(len, block)| BlockedTensor { len, block }).collect()
}

/// Returns true if tensors of these blocks may lie at these ranges of a buffer, by the definition.
fn is_legal(of: &[BlockedTensor], at: &[Range<usize>], ranks: usize, shard_len: usize) -> bool {
    let whole = |(tensor, at): (&BlockedTensor, &Range<usize>)| {
        let mut boundaries = (1..ranks).map(|rank| rank * shard_len).filter(|b| *b > at.start && *b < at.end);
        at.end <= ranks * shard_len && boundaries.all(|b| (b - at.start) % tensor.block == 0)
    };
    let apart = |a: &Range<usize>, b: &Range<usize>| {
        a.end <= b.start || b.end <= a.start || a.is_empty() || b.is_empty()
    };
    of.iter().zip(at).all(whole) && (0..at.len()).all(|i| (0..i).all(|j| apart(&at[i], &at[j])))
}

/// Places tensor after tensor at every legal start. The rest is tried only if some placement is left.
fn fits(of: &[BlockedTensor], placed: &mut Vec<Range<usize>>, ranks: usize, shard_len: usize) -> bool {
    let Some(next) = of.get(placed.len()) else { return true };
    for start in 0..=(ranks * shard_len).saturating_sub(next.len) {
        placed.push(start..start + next.len);
        let legal = is_legal(&of[..placed.len()], placed, ranks, shard_len);
        if legal && fits(of, placed, ranks, shard_len) {
            return true;
        }
        placed.pop();
    }
    false
}

/// Returns the least shard length, by trying every length and every placement.
fn optimum(of: &[BlockedTensor], ranks: usize, align: usize) -> usize {
    let lens = (0..).map(|n| n * align);
    lens.into_iter().find(|&len| fits(of, &mut Vec::new(), ranks, len)).expect("one shard holds all")
}

fn check(plan: &ShardPlan, of: &[BlockedTensor], align: usize) {
    let (ranks, shard_len) = (plan.ranks(), plan.shard_len());
    assert_eq!(shard_len % align, 0, "{plan:?}");
    let ranges: Vec<Range<usize>> = (0..of.len()).map(|t| plan.range(t)).collect();
    assert!(ranges.iter().zip(of).all(|(range, tensor)| range.len() == tensor.len), "{plan:?}");
    assert!(is_legal(of, &ranges, ranks, shard_len), "{plan:?}");
    // Every rank's parts, from the shard's elements.
    for (t, range) in ranges.iter().enumerate() {
        let mut next = 0;
        for rank in 0..ranks {
            let mine = |at: &usize| *at / shard_len.max(1) == rank;
            let (part, held) = (plan.part(t, rank), range.clone().filter(mine).count());
            assert_eq!(part.len(), held, "tensor {t}, rank {rank} of {plan:?}");
            if held > 0 {
                assert_eq!(
                    (part.start, part.start % of[t].block),
                    (next, 0),
                    "tensor {t}, rank {rank} of {plan:?}"
                );
                assert_eq!(rank * shard_len + plan.position(t, rank), range.start + part.start);
                next = part.end;
            }
        }
        assert_eq!(next, of[t].len);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_plan_keeps_the_rules(
        of in prop::collection::vec((0usize..90, 1usize..24), 0..9),
        ranks in 1usize..20,
        align in 1usize..9,
    ) {
        let (of, planner) = (tensors(&of), ShardPlanner::new(ranks).align(align));
        let (plan, in_order) = (planner.plan(&of).unwrap(), planner.plan_in_order(&of).unwrap());
        check(&plan, &of, align);
        check(&in_order, &of, align);
        prop_assert!(plan.shard_len() <= in_order.shard_len());
        prop_assert!(planner.lower_bound(&of).unwrap() <= plan.shard_len());
        prop_assert_eq!(planner.plan(&of).unwrap(), plan);
    }
}

/// A linear congruential generator by Knuth, whose high bits choose cases.
struct Chooser(u64);

impl Chooser {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

/// Compares plans of `lens` tensors of up to `len` elements, in blocks of up to `block`, with the optimum. Prints how
/// near they are (read it with `--nocapture`), and returns the number of those that are optimal.
fn optimal_plans(cases: usize, lens: Range<usize>, len: usize, block: usize) -> usize {
    let mut choose = Chooser(7);
    let (mut optimal, mut most) = (0, (1, 1));
    for _ in 0..cases {
        let n = lens.start + choose.below(lens.len());
        let of: Vec<(usize, usize)> =
            (0..n).map(|_| (1 + choose.below(len), 1 + choose.below(block))).collect();
        let (of, ranks, align) = (tensors(&of), 1 + choose.below(4), 1 + choose.below(2));
        let planner = ShardPlanner::new(ranks).align(align);
        let (least, plan) = (optimum(&of, ranks, align), planner.plan(&of).unwrap());
        assert!(planner.lower_bound(&of).unwrap() <= least, "{of:?}, {ranks} ranks, multiples of {align}");
        let found = plan.shard_len();
        assert!(least <= found && found <= 2 * least, "{least}: {plan:?}");
        optimal += usize::from(found == least);
        if found * most.1 > most.0 * least {
            most = (found, least);
        }
    }
    println!("{optimal} of {cases} plans are optimal; the longest shard is {} for {}", most.0, most.1);
    optimal
}

#[test]
fn small_plans_are_near_the_optimum() {
    assert_eq!(optimal_plans(1500, 1..5, 9, 5), 1500, "up to five tensors all orders are tried");
    assert!(optimal_plans(40, 6..8, 5, 4) > 36);
}

#[test]
fn blocks_without_a_common_divisor_have_no_bound_by_sizes_alone() {
    let of = tensors(&[(1_000_000, 997), (1_000_000, 1009), (1_000_000, 1013)]);
    let planner = ShardPlanner::new(1000).align(1);
    let (plan, bound) = (planner.plan(&of).unwrap(), planner.lower_bound(&of).unwrap());
    assert!(bound >= 500_000 && plan.shard_len() - bound < bound / 1000, "{bound} {}", plan.shard_len());
}

#[test]
fn refusals() {
    let of = tensors(&[(8, 2)]);
    let refused = |planner: ShardPlanner, of: &[BlockedTensor], text: &str| {
        for error in [planner.plan(of).unwrap_err(), planner.plan_in_order(of).unwrap_err()] {
            assert!(error.to_string().contains(text), "{error}");
        }
        assert!(planner.lower_bound(of).unwrap_err().to_string().contains(text));
    };
    refused(ShardPlanner::new(0), &of, "no such buffer; got 0 ranks");
    refused(ShardPlanner::new(2).align(0), &of, "no such buffer; got 2 ranks, shards of multiples of 0");
    refused(ShardPlanner::new(2), &tensors(&[(8, 2), (3, 0)]), "a block has no elements; got tensor 1");
    refused(ShardPlanner::new(2), &tensors(&[(usize::MAX, 1), (3, 1)]), "too many elements; got 2 tensors");
    let huge = tensors(&[(usize::MAX, 1)]);
    assert!(
        ShardPlanner::new(2)
            .plan(&huge)
            .unwrap_err()
            .to_string()
            .contains("the buffer has too many elements")
    );
    let new = |starts: &[usize], ranks, shard_len| {
        ShardPlan::new(&of, starts, ranks, shard_len).unwrap_err().to_string()
    };
    assert!(new(&[], 2, 4).contains("each tensor needs a start; got 0 starts for 1 tensors"));
    assert!(new(&[0], 0, 4).contains("no such buffer; got 0 shards of 4 elements"));
    assert!(new(&[0], usize::MAX, 4).contains("no such buffer"));
    assert!(
        new(&[1], 2, 4)
            .contains("a tensor ends after the buffer; got tensor 0 of 8 elements at 1, 2 shards of 4")
    );
    assert!(new(&[usize::MAX], 2, 4).contains("a tensor ends after the buffer"));
    let two = tensors(&[(4, 1), (4, 1)]);
    let error = ShardPlan::new(&two, &[0, 3], 2, 4).unwrap_err().to_string();
    assert!(error.contains("two tensors overlap; got tensor 0 at 0..4, tensor 1 at 3..7"), "{error}");
}

/// A boundary lies in the gap before a tensor that begins in the shard after it: no filler may cross it.
#[test]
fn a_gap_with_a_boundary_is_filled_on_both_sides() {
    let of = [(39, 8), (51, 19), (40, 5), (7, 7), (56, 9), (10, 1), (7, 2), (51, 1)];
    check(&ShardPlanner::new(8).align(1).plan(&tensors(&of)).unwrap(), &tensors(&of), 1);
}

/// The lower bound gives up after many refused lengths; the search goes on from a multiple of the alignment.
#[test]
fn a_bound_that_gives_up_is_aligned() {
    let (of, planner) = (tensors(&[(14_096, 5007)]), ShardPlanner::new(3));
    assert_eq!(planner.lower_bound(&of).unwrap() % 8, 0);
    assert_eq!(planner.plan(&of).unwrap().shard_len(), 9096);
}

#[test]
fn empty_tensors_take_no_room() {
    let planner = ShardPlanner::new(3);
    assert_eq!(planner.plan(&[]).unwrap().buffer_len(), 0);
    let of = tensors(&[(0, 5), (30, 1), (0, 1)]);
    let plan = planner.plan(&of).unwrap();
    check(&plan, &of, 8);
    assert_eq!((plan.shard_len(), plan.range(0).len(), plan.part(2, 1).len()), (16, 0, 0));
    assert_eq!(planner.lower_bound(&tensors(&[(0, 5)])).unwrap(), 0);
}

/// The block of a parameter by the table's policies: rows of the last dim, or one matrix of the last two.
#[derive(Clone, Copy)]
enum BlockPolicy {
    Rows(usize),
    Matrix,
}

impl BlockPolicy {
    fn name(self) -> String {
        match self {
            BlockPolicy::Rows(1) => "1 row".into(),
            BlockPolicy::Rows(n) => format!("{n} rows"),
            BlockPolicy::Matrix => "matrix".into(),
        }
    }

    fn of(self, shape: &[usize]) -> BlockedTensor {
        let block = match (self, shape) {
            (_, [_]) => 1,
            (BlockPolicy::Rows(n), [.., columns]) => n * columns,
            (BlockPolicy::Matrix, [.., rows, columns]) => rows * columns,
            (_, []) => 1,
        };
        BlockedTensor { len: shape.iter().product(), block }
    }
}

const POLICIES: [BlockPolicy; 5] = [
    BlockPolicy::Rows(1),
    BlockPolicy::Rows(16),
    BlockPolicy::Rows(32),
    BlockPolicy::Rows(128),
    BlockPolicy::Matrix,
];
const RANKS: [usize; 6] = [8, 64, 128, 256, 1024, 16_384];

#[test]
fn the_table_of_padding_is_up_to_date() {
    let page = page();
    if std::env::var_os("ISOSHARD_BLESS").is_some() {
        std::fs::write(PAGE, &page).expect("the page can be written");
    }
    let kept = std::fs::read_to_string(PAGE).unwrap_or_default();
    let differs = kept.lines().zip(page.lines()).find(|(a, b)| a != b);
    assert!(kept == page, "run with ISOSHARD_BLESS=1; the first line that differs: {differs:?}");
}

/// Writes a buffer's elements as a multiple of its tensors'.
fn ratio(buffer: u128, total: u128) -> String {
    let ratio = buffer as f64 / total as f64;
    if ratio < 10.0 { format!("{ratio:.4}") } else { format!("{ratio:.0}") }
}

fn page() -> String {
    let mut text = String::from(include_str!("shard_plans/padding.md"));
    let (mut bound_met, mut cells) = (0, 0);
    for (name, shapes) in shapes::layers() {
        let total: u128 = shapes.iter().map(|shape| shape.iter().product::<usize>() as u128).sum();
        let _ = writeln!(text, "\n### {name}: {:.1} million elements a layer\n", total as f64 / 1e6);
        let _ = writeln!(text, "| blocks | {} |", RANKS.map(|ranks| ranks.to_string()).join(" | "));
        let _ = writeln!(text, "|---{}|", "|---".repeat(RANKS.len()));
        for policy in POLICIES {
            let of: Vec<BlockedTensor> = shapes.iter().map(|shape| policy.of(shape)).collect();
            let cell = |ranks: usize| {
                let planner = ShardPlanner::new(ranks);
                let plan = planner.plan(&of).unwrap();
                let (mine, bound) = (plan.shard_len(), planner.lower_bound(&of).unwrap());
                assert!(mine <= planner.plan_in_order(&of).unwrap().shard_len());
                cells += 1;
                bound_met += usize::from(mine == bound);
                let texts = [mine, bound].map(|len| ratio((len * ranks) as u128, total));
                if mine == bound { texts[0].clone() } else { format!("{} ({})", texts[0], texts[1]) }
            };
            let _ = writeln!(text, "| {} | {} |", policy.name(), RANKS.map(cell).join(" | "));
        }
        for (rule, of) in [
            ("FSDP2's rule, dim 0", rules::fsdp2 as fn(&[Vec<usize>], usize) -> u128),
            ("Megatron-FSDP's rule, dim 0", rules::megatron),
        ] {
            let cells = RANKS.map(|ranks| ratio(of(&shapes, ranks) * ranks as u128, total));
            let _ = writeln!(text, "| {rule} | {} |", cells.join(" | "));
        }
    }
    let _ = writeln!(text, "\n{bound_met} of {cells} plans have shards of exactly the lower bound.");
    text
}
