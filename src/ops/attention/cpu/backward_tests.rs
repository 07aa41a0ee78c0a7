//! Tests of the gradients of attention.

use std::ops::Range;

use super::{CpuAttention, CpuAttentionDropout};
use crate::tensor::cpu::{Isa, map2, with_isa};
use crate::tensor::{DType, Shape, Tensor};

/// The largest number of queries of a leaf.
const LEAF_ROWS: usize = 64;

fn noise(shape: impl Into<Shape>, seed: usize) -> Tensor {
    Tensor::build(shape, |out: &mut [f32]| {
        for (i, x) in out.iter_mut().enumerate() {
            *x = ((i * 7919 + seed * 131) % 1009) as f32 * 0.003_1 - 1.5;
        }
    })
}

fn bits(x: &Tensor) -> Vec<u32> {
    x.to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect()
}

/// Operands of a call, which the tests repeat on some of the queries and heads.
struct AttentionCase {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropped: bool,
}

impl AttentionCase {
    fn new(heads: usize, groups: usize, queries: usize, keys: usize, dropped: bool) -> AttentionCase {
        let (q, k) = (noise([2, queries, heads, 8], 1), noise([2, groups, keys, 8], 2));
        AttentionCase { q: q.transpose(1, 2).unwrap(), k, v: noise([2, groups, keys, 5], 3), dropped }
    }

    /// Returns output, lse, and the gradients of q, k and v for the queries and heads in these ranges.
    fn at(&self, queries: Range<usize>, heads: Range<usize>) -> [Tensor; 5] {
        let cut = |t: &Tensor| {
            let t = t.narrow(1, heads.start, heads.len()).unwrap();
            t.narrow(2, queries.start, queries.len()).unwrap()
        };
        let each = self.q.shape()[1] / self.k.shape()[1];
        let groups = heads.start / each..heads.end.div_ceil(each);
        let [k, v] = [&self.k, &self.v].map(|t| t.narrow(1, groups.start, groups.len()).unwrap());
        let keep = |[b, h, i]: [usize; 3], from: usize, keep: &mut [bool]| {
            let (h, i) = (h + heads.start, i + queries.start);
            let kept = |j: usize| (b * 7 + h * 5 + i * 3 + j * j) % 4 != 1;
            keep.iter_mut().enumerate().for_each(|(j, k)| *k = kept(from + j));
        };
        let dropout = CpuAttentionDropout { scale: 1.25, keep: &keep };
        let dropout = self.dropped.then_some(dropout);
        let call = CpuAttention { dropout, ..CpuAttention::causal("attention", queries.start, 0.3) };
        let q = cut(&self.q);
        let (o, lse) = call.forward(&q, &k, &v).unwrap();
        let grad = noise([2, self.q.shape()[1], self.q.shape()[2], 5], 4);
        let [dq, dk, dv] = call.backward([&q, &k, &v], (&o, &lse), &cut(&grad)).unwrap();
        [o, lse, dq, dk, dv]
    }

    fn whole(&self) -> [Tensor; 5] {
        self.at(0..self.q.shape()[2], 0..self.q.shape()[1])
    }

    /// Returns the gradients of k and v of a node of the tree, added from separately computed leaves.
    fn by_leaves(&self, queries: Range<usize>, heads: Range<usize>, leaf: usize) -> [Tensor; 2] {
        let cut = |r: &Range<usize>| r.start + r.len().div_ceil(2);
        let parts = if heads.len() > 1 {
            let mid = cut(&heads);
            [heads.start..mid, mid..heads.end].map(|heads| self.by_leaves(queries.clone(), heads, leaf))
        } else if queries.len() > leaf {
            let mid = cut(&queries);
            [queries.start..mid, mid..queries.end].map(|q| self.by_leaves(q, heads.clone(), leaf))
        } else {
            let [.., dk, dv] = self.at(queries, heads);
            return [dk, dv];
        };
        let [[a, b], [c, d]] = parts;
        let add = |x: &Tensor, y: &Tensor| map2::<f32, _>(x, y, |x, y| x + y).unwrap();
        [add(&a, &c), add(&b, &d)]
    }
}

#[test]
fn nodes_computed_apart_add_up_to_the_whole_by_bits() {
    for (heads, queries, keys) in
        [(1, 65, 65), (1, 70, 70), (1, 128, 128), (3, 150, 150), (2, 200, 231), (5, 130, 70), (4, 1, 1)]
    {
        for dropped in [false, true] {
            let call = AttentionCase::new(heads, 1, queries, keys, dropped);
            let [.., dk, dv] = call.whole();
            for leaf in [LEAF_ROWS, 100] {
                let [k, v] = call.by_leaves(0..queries, 0..heads, leaf);
                let same = bits(&k) == bits(&dk) && bits(&v) == bits(&dv);
                assert!(same, "{heads} heads, {queries} queries, {keys} keys, apart from {leaf} on");
            }
        }
    }
}

#[test]
fn what_belongs_to_a_query_does_not_depend_on_the_others() {
    let cuts = |n: usize| (0..n).flat_map(move |a| (a + 1..=n).map(move |b| a..b));
    let some = [0..63, 0..64, 1..66, 60..70, 63..129, 64..130, 64..128, 65..66, 127..130, 129..130];
    for (queries, ranges) in [(9, cuts(9).collect()), (130, some.to_vec())] {
        let call = AttentionCase::new(4, 2, queries, queries, true);
        let whole = call.whole();
        for range in ranges {
            for heads in [0..4, 2..4] {
                let part = call.at(range.clone(), heads.clone());
                for (part, whole) in part.iter().zip(&whole).take(3) {
                    let want = whole.narrow(1, heads.start, heads.len()).unwrap();
                    let want = want.narrow(2, range.start, range.len()).unwrap();
                    assert_eq!(bits(part), bits(&want), "queries {range:?}, heads {heads:?}");
                }
            }
        }
    }
}

/// An infinite key gives some queries the score -inf, which leaves out the key and its infinite value.
#[test]
fn an_infinite_key_is_left_out_whatever_the_other_queries_are() {
    let mut call = AttentionCase::new(2, 2, 70, 70, false);
    call.k.make_mut::<f32>().unwrap()[20 * 8 + 1] = f32::INFINITY;
    call.v.make_mut::<f32>().unwrap()[20 * 5 + 2] = f32::INFINITY;
    let bits = |x: &Tensor| -> Vec<u32> {
        let values = x.to_vec::<f32>().unwrap();
        values.iter().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect()
    };
    let whole = call.whole();
    let mut finite = 0;
    for i in 0..70 {
        for (part, whole) in call.at(i..i + 1, 0..2).iter().zip(&whole).take(3) {
            assert_eq!(bits(part), bits(&whole.narrow(2, i, 1).unwrap()), "query {i}");
        }
        let row = whole[0].narrow(2, i, 1).unwrap().to_f64_vec();
        finite += usize::from(i > 20 && row.iter().all(|x| x.is_finite()));
    }
    assert!((1..49).contains(&finite), "{finite} later queries leave the key out");
}

#[test]
fn groups_are_heads_repeated_and_instruction_sets_agree() {
    let call = AttentionCase::new(6, 2, 97, 97, true);
    let repeat = |t: &Tensor| {
        let &[b, h, t_len, d] = &t.shape()[..] else { unreachable!("four dims") };
        let t = t.unsqueeze(2).unwrap().expand([b, h, 3, t_len, d]).unwrap();
        t.reshape([b, 3 * h, t_len, d]).unwrap()
    };
    let wide = AttentionCase { q: call.q.clone(), k: repeat(&call.k), v: repeat(&call.v), dropped: true };
    let (got, want) = (call.whole(), wide.whole());
    for i in 0..3 {
        assert_eq!(bits(&got[i]), bits(&want[i]));
    }
    for i in 3..5 {
        let (got, want) = (got[i].to_f64_vec(), want[i].to_f64_vec());
        let len = 97 * [8, 5][i - 3];
        for (at, got) in got.iter().enumerate() {
            let of = |head: usize| want[(at / len * 3 + head) * len + at % len];
            assert!((got - of(0) - of(1) - of(2)).abs() < 1e-4, "{at}");
        }
    }
    for &isa in Isa::available() {
        let again = with_isa(isa, || call.whole());
        assert!(again.iter().zip(&got).all(|(a, b)| bits(a) == bits(b)), "{isa:?}");
    }
}

#[test]
fn no_sum_is_minus_zero_and_empty_ones_are_zero() {
    let call = AttentionCase::new(2, 1, 3, 5, false);
    let [.., dk, dv] = call.whole();
    for x in [&dk, &dv] {
        let unseen = x.narrow(2, 3, 2).unwrap();
        assert!(bits(&unseen).iter().all(|&b| b == 0), "keys that no query sees");
    }
    let none = AttentionCase::new(2, 2, 0, 4, false).whole();
    assert_eq!(none[3].to_f64_vec(), [0.0; 2 * 2 * 4 * 8]);
    let tiny = Tensor::full(DType::F32, [1, 1, 2, 1], 1e-30);
    let grad = Tensor::full(DType::F32, [1, 1, 2, 1], -1e-30);
    let call = CpuAttention::causal("attention", 0, 1.0);
    let (o, lse) = call.forward(&tiny, &tiny, &tiny).unwrap();
    let [_, dk, _] = call.backward([&tiny; 3], (&o, &lse), &grad).unwrap();
    assert!(bits(&dk).iter().all(|&b| b != 0x8000_0000), "{:?}", dk.to_f64_vec());
}
