//! The samples that tests run: the catalog's small calls, and calls whose sums have several leaves of the reduction
//! tree, full and partly filled.
//!
//! `ISOSHARD_OPERATORS=add,sum cargo test --test suite rules::` runs the samples of these operators alone, while one is
//! being written.

use isoshard::ops::{
    Attention, AttentionGrad, Bits, EmbeddingGrad, GroupSizes, GroupedMatmul, GroupedMatmulGrad, Input,
    LayerNormGrad, Matmul, RmsNorm, RmsNormGrad, Sample, ScatterAdd, ScoreRule, Sum, SumExp, SumTerm,
    TermSum, Unkeyed, WideSum,
};
use isoshard::rng::Generator;

/// Returns true if the samples of this operator run: all, unless `ISOSHARD_OPERATORS` names some.
pub fn is_selected(operator: &str) -> bool {
    std::env::var("ISOSHARD_OPERATORS").map_or(true, |names| names.split(',').any(|name| name == operator))
}

/// Returns true if the samples of all operators run.
pub fn is_whole() -> bool {
    std::env::var_os("ISOSHARD_OPERATORS").is_none()
}

/// Returns the catalog's samples.
pub fn catalog() -> Vec<Sample> {
    isoshard::ops::catalog().into_iter().filter(|s| is_selected(s.op.name())).collect()
}

pub fn long_sums() -> Vec<Sample> {
    all_long_sums().into_iter().filter(|s| is_selected(s.op.name())).collect()
}

fn all_long_sums() -> Vec<Sample> {
    let ints = |shape: &[usize]| Input::ints(shape);
    let matmul = |text: &str, a: &[usize], b: &[usize]| {
        Sample::new(Matmul::new(text).expect("a signature"), [ints(a), ints(b)])
    };
    let sum = |dims: &[usize], shape: &[usize]| {
        Sample::new(Sum { dims: dims.iter().copied().collect(), keep: false }, [ints(shape)])
    };
    let rule = ScoreRule::CAUSAL;
    let term = |term, dims: &[usize], shape: &[usize]| {
        let kept: Vec<usize> =
            (0..shape.len()).map(|d| if dims.contains(&d) { 1 } else { shape[d] }).collect();
        let op = TermSum { term, dims: dims.iter().copied().collect() };
        Sample::new(op, [ints(shape), ints(&kept)])
    };
    let (scale, p, draw) = (Bits(0.4), Bits(0.0), Unkeyed(Generator::new(3).next_draw()));
    let heads = |h: usize, t: usize| ints(&[1, h, t, 3]);
    let attention_grad = |h: usize, hk: usize, t: usize, before: usize| {
        let (q, k, lse) = (heads(h, t), heads(hk, before + t), Input::positive([1, h, t]));
        let q_offset = (before > 0).then_some(before);
        let ins = [q.clone(), k.clone(), k, q.clone(), lse, q];
        Sample::new(AttentionGrad { scale, p: Bits(0.2), q_offset, draw, rule }, ins)
    };
    let sizes = |experts: usize, batch: usize, rows: usize| {
        let of = |i: usize| if i.is_multiple_of(2) { [rows / 3, rows - rows / 3] } else { [rows, 0] };
        let all: Vec<usize> = (0..batch).flat_map(of).collect();
        Unkeyed(GroupSizes::new(experts, all).expect("two sizes per entry"))
    };
    let (rows, kept) = ([3, 37, 5], [3, 37, 1]);
    let (x, w, mean, rstd) = (ints(&rows), ints(&[5]), ints(&kept), Input::positive(kept));
    vec![
        matmul("m k, k n -> m n", &[3, 130], &[130, 5]),
        matmul("m k, n k -> m n", &[2, 96], &[3, 96]),
        matmul("b s k, b s n -> k n", &[6, 40, 3], &[6, 40, 2]),
        matmul("h b s, b s n -> h n", &[2, 5, 33], &[5, 33, 2]),
        Sample::new(GroupedMatmul { sizes: sizes(2, 1, 5) }, [ints(&[5, 130]), ints(&[2, 130, 3])]),
        Sample::new(
            GroupedMatmulGrad { experts: 2, sizes: sizes(2, 37, 7) },
            [ints(&[37, 7, 2]), ints(&[37, 7, 3])],
        ),
        Sample::new(
            GroupedMatmulGrad { experts: 2, sizes: sizes(2, 1, 90) },
            [ints(&[90, 2]), ints(&[90, 3])],
        ),
        sum(&[0], &[131, 2]),
        sum(&[0, 1], &[7, 70, 2]),
        sum(&[0, 2], &[5, 2, 37]),
        sum(&[0, 1], &[40, 33]),
        Sample::new(SumExp, [ints(&[3, 70]), ints(&[3, 1])]),
        Sample::new(WideSum { dims: [1].into_iter().collect(), keep: true }, [ints(&[3, 70])]),
        term(SumTerm::Deviation, &[0], &[70, 3]),
        term(SumTerm::SquaredDeviation, &[1], &[3, 70]),
        term(SumTerm::ExpDifference, &[0, 1], &[7, 70]),
        term(SumTerm::Power(Bits(2.0)), &[0], &[131, 2]),
        Sample::new(RmsNorm { eps: Bits(1e-5) }, [ints(&[3, 37, 5]), ints(&[5])]),
        Sample::new(RmsNormGrad { eps: Bits(1e-5) }, [x.clone(), x.clone(), w.clone(), rstd.clone()]),
        Sample::new(
            LayerNormGrad { eps: Bits(1e-5), weight: true, bias: true },
            [x.clone(), x, w, mean, rstd],
        ),
        Sample::new(EmbeddingGrad { rows: 4 }, [Input::index([3, 50], 4), ints(&[3, 50, 2])]),
        Sample::new(ScatterAdd { dim: 1, extent: 3 }, [Input::index([2, 70], 3), ints(&[2, 70])]),
        Sample::new(
            Attention { scale, p, q_offset: None, draw, rule },
            [heads(2, 70), heads(2, 70), heads(2, 70)],
        ),
        Sample::new(
            Attention { scale, p, q_offset: None, draw, rule },
            [heads(4, 40), heads(2, 40), heads(2, 40)],
        ),
        attention_grad(2, 2, 70, 0),
        attention_grad(4, 2, 40, 0),
        attention_grad(1, 1, 70, 5),
    ]
}
