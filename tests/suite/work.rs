//! The work of operators, in operations and bytes: splitting a dim divides it, every call except a view touches
//! memory, and products and attention have the numbers that PyTorch counts.

use isoshard::ops::{
    Attention, AttentionGrad, AxisPlacement, Bits, Embedding, Matmul, MeshAxis, Meta, Op, Row, Sample,
    ScoreRule, Unkeyed, Work,
};
use isoshard::placement::chunk;
use isoshard::rng::Generator;
use isoshard::tensor::DType;

use crate::common::samples::catalog;

/// Operators whose ranks all repeat some work: a row's share of the loss, the angles, the order, the writes that leave
/// a rank's shard.
const SHARED: [&str; 6] =
    ["cross_entropy_grad", "rotary", "shuffle", "scatter_max", "scatter_min", "soft_cross_entropy_grad"];

/// Operators that read their first operand by index: only the elements that are read count.
const BY_INDEX: [&str; 3] = ["embedding", "gather", "unpermute_tokens"];

fn work(op: &dyn Op, ins: &[Meta]) -> Work {
    op.work(ins, &op.infer(ins).expect("legal operands"))
}

fn bytes(metas: &[Meta]) -> u64 {
    metas.iter().map(|m| m.len_bytes() as u64).sum()
}

#[test]
fn every_call_touches_bytes_unless_it_is_a_view_or_gives_nothing() {
    let mut wrong = Vec::new();
    for sample in catalog() {
        let ins = sample.metas();
        let outs = sample.op.infer(&ins).expect("samples are legal");
        let work = sample.op.work(&ins, &outs);
        let right = match sample.op.is_view() {
            true => work == Work::view(),
            false => (work.bytes > 0 || bytes(&outs) == 0) && work.bytes <= bytes(&ins) + 2 * bytes(&outs),
        };
        if !right {
            wrong.push(format!("{sample:?}: {work:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Returns the operands of rank `rank`, and the bytes of those that every rank holds whole. `None` if the row does
/// not give each rank a call of the same operator on smaller operands and results.
fn part(sample: &Sample, row: &Row, ranks: usize, rank: usize) -> Option<(Vec<Meta>, u64)> {
    let whole = sample.metas();
    let mut held_by_all = 0;
    let mut ins = Vec::new();
    for (i, (meta, axis_placement)) in whole.iter().zip(&row.ins).enumerate() {
        let by_index = i == 0 && BY_INDEX.contains(&sample.op.name());
        let mut meta = meta.clone();
        match *axis_placement {
            AxisPlacement::S(dim) => meta.shape[dim] = chunk(meta.shape[dim], ranks, rank).len(),
            AxisPlacement::R if by_index => {}
            AxisPlacement::R => held_by_all += meta.len_bytes() as u64,
            _ => return None,
        }
        ins.push(meta);
    }
    let outs = sample.op.infer(&whole).expect("samples are legal");
    let parts = sample.op.infer(&ins).ok()?;
    for ((whole, part), axis_placement) in outs.iter().zip(&parts).zip(&row.outs) {
        let mut want = whole.clone();
        match *axis_placement {
            AxisPlacement::S(dim) => want.shape[dim] = chunk(whole.shape[dim], ranks, rank).len(),
            _ => return None,
        }
        if *part != want {
            return None;
        }
    }
    Some((ins, held_by_all))
}

/// For rows that split operands and results and leave no sum, the work of all ranks adds up to that of a single rank,
/// except that each rank reads the operands that it holds whole.
#[test]
fn a_cut_divides_the_work() {
    let (mut judged, mut wrong) = (0, Vec::new());
    // In attention later queries see more keys, so part of the queries is not a smaller call of the same operator;
    // and part of v's dim needs all scores.
    let whole_heads = |row: &Row| matches!(row.ins[0], AxisPlacement::S(0 | 1));
    let causal = |op: &dyn Op, row: &Row| op.name().starts_with("attention") && !whole_heads(row);
    for sample in catalog().into_iter().filter(|s| !s.op.is_view()) {
        let op = &*sample.op;
        let whole = work(op, &sample.metas());
        for ranks in [2, 3] {
            for row in op.rows(&sample.metas(), MeshAxis::new(ranks)) {
                let cut = row.ins.iter().any(|s| matches!(s, AxisPlacement::S(_)));
                if !cut || causal(op, &row) {
                    continue;
                }
                let parts: Option<Vec<_>> = (0..ranks).map(|r| part(&sample, &row, ranks, r)).collect();
                let Some(parts) = parts else { continue };
                judged += 1;
                let again = (ranks as u64 - 1) * parts[0].1;
                let works: Vec<Work> = parts.iter().map(|(ins, _)| work(op, ins)).collect();
                let flops: u64 = works.iter().map(|w| w.flops).sum();
                let bytes: u64 = works.iter().map(|w| w.bytes).sum();
                let flops_add_up = match SHARED.contains(&op.name()) {
                    true => (whole.flops..=whole.flops * ranks as u64).contains(&flops),
                    false => flops == whole.flops,
                };
                if !flops_add_up || bytes != whole.bytes + again {
                    wrong.push(format!("{sample:?}, {row:?} on {ranks}: {whole:?}, in parts {works:?}"));
                }
            }
        }
    }
    assert!(judged > 300, "only {judged} cuts judged");
    assert!(wrong.is_empty(), "{} of {judged}:\n{}", wrong.len(), wrong.join("\n"));
}

fn f32(shape: &[usize]) -> Meta {
    Meta::new(DType::F32, shape)
}

/// PyTorch's `FlopCounterMode` gives the same: `mm_flop` and `bmm_flop` are `2 m n k`, times the batch.
#[test]
fn products_take_two_operations_for_each_triple() {
    let of = |signature: &str, a: &[usize], b: &[usize]| {
        let op = Matmul::new(signature).expect("a signature");
        work(&op, &[f32(a), f32(b)])
    };
    let product = of("m k, k n -> m n", &[64, 128], &[128, 32]);
    assert_eq!(product, Work { flops: 524_288, bytes: 4 * (64 * 128 + 128 * 32 + 64 * 32) });
    assert_eq!(of("b m k, b k n -> b m n", &[8, 64, 128], &[8, 128, 32]).flops, 8 * 524_288);
    assert_eq!(of("b t k, n k -> b t n", &[4, 16, 128], &[32, 128]).flops, 524_288, "a linear layer");
    assert_eq!(
        of("b t n, b t k -> n k", &[4, 16, 32], &[4, 16, 128]).flops,
        524_288,
        "its weight's gradient"
    );
    assert_eq!(of("m k, k n -> m n", &[3, 0], &[0, 2]), Work { flops: 0, bytes: 24 });
}

/// The operations of attention for shapes (b, h, s, d): those of its products, found by widening the heads, and all.
fn attention(q: [usize; 4], keys: [usize; 2], q_offset: Option<usize>, gradient: bool) -> Work {
    let (k, p) = ([q[0], keys[0], keys[1], q[3]], Bits(0.0));
    let (scale, draw) = (Bits(0.125), Unkeyed(Generator::new(1).next_draw()));
    let rule = ScoreRule::CAUSAL;
    let ins = [f32(&q), f32(&k), f32(&k)];
    if !gradient {
        return work(&Attention { scale, p, q_offset, draw, rule }, &ins);
    }
    let [q, k, v] = ins;
    let ins = [q.clone(), k, v, q.clone(), f32(&q.shape[..3]), q];
    work(&AttentionGrad { scale, p, q_offset, draw, rule }, &ins)
}

/// PyTorch counts `4 b h s s d` for attention's two products and `10 b h s s d` for the five of its gradient, "not
/// accounting for causal attention": of its `s s` pairs ours computes `s (s + 1) / 2`.
#[test]
fn attention_takes_the_causal_half() {
    let (b, h, s, d) = (2, 4, 16, 64);
    let pairs = (b * h * s * (s + 1) / 2) as u64;
    let elements = (b * h * s * d) as u64;
    for (gradient, products) in [(false, 4), (true, 10)] {
        let [narrow, wide] = [d, 2 * d].map(|d| attention([b, h, s, d], [h, s], None, gradient).flops);
        // The division of the result, or the product of o and do, is the only other work that grows with d.
        let rest = if gradient { 2 * elements } else { elements };
        let pytorch = (products * b * h * s * s * d) as u64;
        assert_eq!(2 * s as u64 * (wide - narrow - rest), pytorch * (s as u64 + 1), "gradient {gradient}");
    }
    let forward = attention([b, h, s, d], [h, s], None, false);
    let queries = (b * h * s) as u64;
    assert_eq!(pairs, 1088);
    assert_eq!(forward.flops, 1088 * (4 * 64 + 24) + 128 * 21 + 8192);
    assert_eq!(forward.bytes, 4 * (4 * elements + queries));
    // Grouped heads read fewer keys and compute as much.
    let grouped = attention([b, h, s, d], [1, s], None, false);
    assert_eq!((grouped.flops, grouped.bytes), (forward.flops, forward.bytes - 4 * 2 * elements * 3 / 4));
    // Three queries after two keys attend to 3 + 4 + 5 keys; two queries at the front of five keys to 1 + 2.
    assert_eq!(attention([1, 1, 3, 1], [1, 5], Some(2), false).flops, 12 * (4 + 24) + 3 * 21 + 3);
    assert_eq!(attention([1, 1, 2, 1], [1, 5], Some(0), false).flops, 3 * (4 + 24) + 2 * 21 + 2);
}

#[test]
fn rows_that_are_not_touched_cost_nothing() {
    let small = work(&Embedding, &[f32(&[10, 64]), Meta::new(DType::I64, [8])]);
    let large = work(&Embedding, &[f32(&[1 << 40, 64]), Meta::new(DType::I64, [8])]);
    assert_eq!(small, large);
    assert_eq!(small, Work { flops: 0, bytes: 8 * 8 + 2 * 4 * 8 * 64 });
}

#[test]
fn extents_near_the_largest_do_not_overflow() {
    let most = 1usize << 62;
    let op = Matmul::for_dims(3, 3).expect("legal");
    let ins = [f32(&[most, 4, 1]), f32(&[most, 1, 4])];
    assert_eq!(work(&op, &ins), Work { flops: u64::MAX, bytes: u64::MAX });
    let long = attention([1, 1, most, 1], [1, most], None, true);
    assert_eq!(long, Work { flops: u64::MAX, bytes: u64::MAX });
}
