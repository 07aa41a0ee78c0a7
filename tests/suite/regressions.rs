//! Bugs of other libraries, by number: each test follows the PyTorch issue that it cites, and passes only if this
//! library gives the answer of a single tensor. 153354, an operator that met a plain tensor and a distributed one, is a
//! compile error here: the documentation of `DTensor` has the program.

use isoshard::Result;
use isoshard::comm::Rank;
use isoshard::dtensor::{AttentionOptions, DTensor, DeviceMesh, Gradients};
use isoshard::nn::{Activation, ExpertWeights, Forward, Module, Moe, MoeConfig, Params, Plan};
use isoshard::ops::GroupSizes;
use isoshard::placement::Layout;
use isoshard::rng::{Generator, Init};
use isoshard::tensor::{DType, Device, ReduceOp, Shape, Tensor};

use crate::common::{device, spmd};

/// 179502: a view of a tensor sharded on an inner dim moved nothing and gave wrong values: `[12, 8]@S1` as `[16, 6]`.
#[test]
fn a_view_that_needs_a_move_moves() {
    on(4, "a=4", |mesh| {
        let x = put(mesh, &[12, 8], "(S1)")?;
        for shape in [[16usize, 6], [6, 16], [96, 1], [1, 96], [24, 4]] {
            same(&x.reshape(shape)?, &iota(&shape));
        }
        Ok(())
    });
}

/// Decoding with a cache (not a PyTorch issue): the last queries alone, with all keys before them, get the bits that
/// they get in the whole sequence, and so do their gradients, on every layout. Without its position, query 0 would
/// see key 0 only.
#[test]
fn the_last_queries_alone_are_those_of_all() {
    let wave = |salt: usize, shape: &[usize]| {
        let numbers = (0..shape.iter().product()).map(|i: usize| ((i * 31 + salt) as f32 * 0.37).sin());
        Tensor::from_vec(numbers.collect(), shape)
    };
    for (ranks, mesh, layout) in
        [(1, "a=1", "(R)"), (2, "a=2", "(S1)"), (3, "a=3", "(S2)"), (2, "a=2", "(S0)"), (5, "a=5", "(S2)")]
    {
        on(ranks, mesh, move |mesh| {
            let (shape, all) = ([2, 2, 77, 3], 77);
            let put = |salt| DTensor::distribute(mesh, &wave(salt, &shape)?, Layout::replicated(1));
            let (q, k, v) = (put(1)?.requires_grad()?, put(2)?.requires_grad()?, put(3)?.requires_grad()?);
            let grad = put(4)?;
            let whole = q.attention(&k, &v, 0.6)?;
            for len in [1, 3, 70, 77] {
                let last = |x: &DTensor| x.slice(2, all - len, len);
                let queries = last(&q)?.redistribute(layout)?;
                let (mine, theirs) = (queries.attention_at(&k, &v, 0.6, all - len)?, last(&whole)?);
                let values = |x: &DTensor| x.full_tensor()?.to_vec::<f32>();
                assert_eq!(values(&mine)?, values(&theirs)?, "{len} on {layout}");
                let [mine, theirs] = [mine, theirs].map(|o| o.mul(&last(&grad)?)?.sum_all()?.backward());
                let (mine, theirs) = (mine?, theirs?);
                let of = |x: &DTensor| -> Result<[Vec<f32>; 2]> {
                    let gradient = |g: &Gradients| values(g.get(x).expect("a leaf"));
                    Ok([gradient(&mine)?, gradient(&theirs)?])
                };
                let [mine, theirs] = of(&q)?;
                assert_eq!(mine, theirs, "dq of {len} on {layout}");
                // A sum over fewer queries has another reduction tree.
                for [mine, theirs] in [of(&k)?, of(&v)?] {
                    assert!(mine.iter().zip(theirs).all(|(a, b)| (a - b).abs() <= 1e-4), "{len} on {layout}");
                }
            }
            Ok(())
        });
    }
}

/// Heads of width 0 (not a PyTorch issue): a rank took its first query from a window without elements, so that every
/// rank's first query saw key 0 only.
#[test]
fn queries_of_width_zero_average_the_values_that_they_see() {
    for layout in ["(S2)", "(R)"] {
        on(2, "a=2", move |mesh| {
            let q = DTensor::zeros(mesh, DType::F32, [1, 1, 4, 0], layout)?;
            let k = DTensor::zeros(mesh, DType::F32, [1, 1, 4, 0], "(R)")?;
            let o = q.attention(&k, &put(mesh, &[1, 1, 4, 1], "(R)")?, 1.0)?;
            assert_eq!(o.full_tensor()?.to_vec::<f32>()?, [0.0, 0.5, 1.0, 1.5], "{layout}");
            Ok(())
        });
    }
}

/// 163193: a scalar was added to a `Partial(sum)` once per rank.
#[test]
fn a_constant_is_added_to_a_partial_once() {
    on(2, "a=2", |mesh| {
        let sum = put(mesh, &[10, 1], "(S0)")?.sum_all()?;
        assert!(sum.layout().has_partial(), "the sum is unreduced, else this tests nothing: {sum:?}");
        assert_eq!(sum.add_scalar(10.0)?.item()?, 55.0);
        let ten = DTensor::full(mesh, sum.dtype(), Shape::from([]), Layout::replicated(1), 10.0)?;
        assert_eq!(sum.add(&ten)?.item()?, 55.0);
        assert_eq!(ten.add(&sum)?.item()?, 55.0);
        assert_eq!(ten.sub(&sum)?.item()?, -35.0);
        Ok(())
    });
}

/// 153603: after a reduction, the product with the first scalar was cached and returned for every other scalar.
#[test]
fn another_scalar_is_another_plan() {
    on(2, "a=2", |mesh| {
        let sum = put(mesh, &[5], "(S0)")?.sum_all()?;
        for factor in [1.0, 2.0, 3.0, -5.0, 0.5] {
            assert_eq!(sum.mul_scalar(factor)?.item()?, 10.0 * factor);
            assert_eq!(sum.add_scalar(factor)?.item()?, 10.0 + factor);
        }
        Ok(())
    });
}

/// 147180: with a `Partial(sum)`, `-5 x` and `2 x` were equal. The test covers all operators with scalars.
#[test]
fn scalars_meet_partials() {
    on(3, "a=3", |mesh| {
        let local = Tensor::from_vec(vec![mesh.rank().rank() as f32 - 0.5, 2.0, -1.0], [3])?;
        let x = DTensor::from_local(mesh, local, [3], "(P(sum))")?;
        let whole = [1.5f32, 6.0, -3.0];
        let check = |y: DTensor, f: fn(f32) -> f32| -> Result<()> {
            assert_eq!(y.full_tensor()?.to_vec::<f32>()?, whole.map(f), "{y:?}");
            Ok(())
        };
        check(x.mul_scalar(2.0)?, |v| 2.0 * v)?;
        check(x.mul_scalar(-5.0)?, |v| -5.0 * v)?;
        check(x.add_scalar(1.0)?, |v| v + 1.0)?;
        check(x.neg()?.add_scalar(1.0)?, |v| 1.0 - v)?;
        check(x.mul(&x)?, |v| v * v)?;
        check(x.pow_scalar(2.0)?, |v| v * v)?;
        check(x.relu()?, |v| v.max(0.0))?;
        let zero = DTensor::zeros(mesh, x.dtype(), [3], Layout::replicated(1))?;
        let positive = x.gt(&zero)?.full_tensor()?;
        assert_eq!(positive.to_vec::<bool>()?, [true, true, false]);
        let one = DTensor::full(mesh, x.dtype(), Shape::from([]), Layout::replicated(1), 1.0)?;
        check(one.div(&x)?, |v| 1.0 / v)?;
        check(x.add(&x)?, |v| 2.0 * v)?;
        check(x.add(&one)?, |v| v + 1.0)
    });
}

/// 144109: shards with lengths that the user gives, uneven and empty, in every operator.
#[test]
fn shards_of_chosen_lengths() {
    on(3, "a=3", |mesh| {
        let x = put(mesh, &[5, 2], "(RS(0..1; 3,0,2))")?;
        assert_eq!(x.local().shape()[0], [3, 0, 2][mesh.rank().rank()]);
        same(&x, &iota(&[5, 2]));
        same(&x.redistribute("(S0)")?, &iota(&[5, 2]));
        assert_eq!(x.sum_all()?.item()?, 45.0);
        let twice = x.mul_scalar(2.0)?;
        assert_eq!(twice.layout(), x.layout(), "a pointwise operator moves nothing");
        let w = put(mesh, &[2, 3], "(R)")?;
        let product = x.matmul(&w)?;
        assert_eq!(product.full_tensor()?.to_vec::<f32>()?, matmul(&iota(&[5, 2]), &iota(&[2, 3])));
        same(&x.reshape([10])?, &iota(&[10]));
        Ok(())
    });
}

/// 166598: a contraction multiplied its operands as they were, although the same axes split them in different orders.
#[test]
fn a_contraction_cut_in_two_orders() {
    on(4, "dp=2,tp=2", |mesh| {
        for n in [4, 5, 7] {
            let want = matmul(&iota(&[3, n]), &iota(&[n, 2]));
            for (a, b) in
                [("(S1, S1)", "(S0^1, S0^0)"), ("(S1^1, S1^0)", "(S0, S0)"), ("(S1^1, S1^0)", "(S0^1, S0^0)")]
            {
                let (x, w) = (put(mesh, &[3, n], a)?, put(mesh, &[n, 2], b)?);
                assert_eq!(x.matmul(&w)?.full_tensor()?.to_vec::<f32>()?, want, "{x:?} times {w:?}");
            }
        }
        Ok(())
    });
}

/// 143372: a view that splits or merges a sharded dim failed, or kept a layout that its elements do not have.
#[test]
fn views_of_sharded_dims() {
    on(3, "a=3", |mesh| {
        for layout in ["(S0)", "(S1)", "(S2)", "(RS(0..1; 3,0,2))", "(RS(0..2; 5,3,2))"] {
            let x = put(mesh, &[5, 2, 3], layout)?;
            for shape in
                [&[10usize, 3][..], &[5, 6], &[30], &[1, 5, 6], &[2, 5, 3], &[5, 1, 2, 3, 1], &[3, 10]]
            {
                let y = x.reshape(shape)?;
                same(&y, &iota(shape));
                same(&y.reshape([5, 2, 3])?, &iota(&[5, 2, 3]));
            }
        }
        Ok(())
    });
}

/// 172041: the mean of a `Partial(sum)` was the mean of one rank's part, a norm was taken before the sum, and a mean that
/// follows a sum over a sharded dim divided by the local number of elements, or twice.
#[test]
fn means_and_norms_of_a_partial_sum_come_after_the_sum() {
    on(4, "dp=2,tp=2", |mesh| {
        let whole = iota(&[5, 3]);
        let share = if mesh.rank().rank() < 2 { 3.0 } else { -2.0 };
        let mine = whole.to_f64_vec().into_iter().map(|v| (v * share) as f32).collect();
        let partial = DTensor::from_local(mesh, Tensor::from_vec(mine, [5, 3])?, [5, 3], "(P(sum), R)")?;
        for x in [partial.clone(), partial.redistribute("(P(sum), S0)")?] {
            assert!(x.layout().has_partial(), "the sum is unreduced, else this tests nothing: {x:?}");
            assert!((x.mean_all()?.item()? - 7.0).abs() < 1e-6);
            let means = x.mean(&[0], false)?.full_tensor()?.to_vec::<f32>()?;
            assert!(
                means.iter().zip([6.0, 7.0, 8.0]).all(|(mean, want)| (mean - want).abs() < 1e-6),
                "{means:?}"
            );
            assert_eq!(x.max(&[1], false)?.full_tensor()?.to_vec::<f32>()?, [2.0, 5.0, 8.0, 11.0, 14.0]);
            assert_eq!(x.min(&[0, 1], false)?.item()?, 0.0);
            assert_eq!(x.mul(&x)?.sum_all()?.item()?, 1015.0);
        }
        for layout in ["(S0, R)", "(S0, S0)"] {
            let x = put(mesh, &[8, 4], layout)?;
            assert_eq!(x.sum(&[0], false)?.mean(&[0], false)?.item()?, 124.0);
            assert_eq!(x.mean(&[0], false)?.sum_all()?.item()?, 62.0);
            assert_eq!(x.mean_all()?.item()?, 15.5);
        }
        Ok(())
    });
}

/// 172350: each rank wrote its shard of the values into its shard of the tensor by global indices, which wrote rows to
/// other ranks' places.
#[test]
fn values_are_written_to_global_indices() {
    for (tensor, index, values) in
        [("(S0)", "(R)", "(S0)"), ("(S1)", "(S0)", "(R)"), ("(S0)", "(S0)", "(S0)")]
    {
        on(4, "a=4", move |mesh| {
            let zeros = put(mesh, &[4, 4], tensor)?.mul_scalar(0.0)?;
            let order = Tensor::from_vec(vec![0i64, 1, 2, 3], [4])?;
            let order = DTensor::distribute(mesh, &order, index.parse::<Layout>()?)?;
            let values = put(mesh, &[4], values)?.add_scalar(1.0)?;
            let diagonal = values.diag_embed(0)?.full_tensor()?;
            for accumulate in [false, true] {
                same(&zeros.index_put(&[&order, &order], &values, accumulate)?, &diagonal);
            }
            assert_eq!(diagonal.to_f64_vec().iter().sum::<f64>(), 10.0);
            same(&zeros.index_put(&[&order], &zeros, false)?, &zeros.full_tensor()?);
            // An index outside its own dim is refused, although the joined index is inside the tensor.
            let near = order.redistribute(Layout::replicated(1))?;
            let far = DTensor::distribute(
                mesh,
                &Tensor::from_vec(vec![0i64, 1, 2, 4], [4])?,
                Layout::replicated(1),
            )?;
            let put = zeros.index_put(&[&near, &far], &values, false).and_then(|x| read(&x));
            let error = put.expect_err("4 is outside dim 1");
            // A kernel does not know the dim's number.
            let dim = if device() == Device::Cpu { "dim 1" } else { "its dim" };
            let wanted = format!("linear_index: an index leaves {dim}; got index 4");
            assert!(error.to_string().starts_with(&wanted), "{error}");
            Ok(())
        });
    }
}

/// 189945: five rows on four ranks leave the last rank without any; PyTorch's operators returned wrong results there.
#[test]
fn an_empty_last_shard_takes_part() {
    on(4, "a=4", |mesh| {
        let negative = Tensor::from_vec((0..10).map(|i| i as f32 - 20.0).collect(), [5, 2])?;
        let x = DTensor::distribute(mesh, &negative, "(S0)")?.requires_grad()?;
        assert_eq!(x.local().shape()[0], [2, 2, 1, 0][mesh.rank().rank()]);
        assert_eq!(x.max(&[0], false)?.full_tensor()?.to_vec::<f32>()?, [-12.0, -11.0]);
        assert_eq!(x.min(&[0, 1], false)?.item()?, -20.0);
        assert_eq!(x.argmax(0)?.full_tensor()?.to_vec::<i64>()?, [4, 4]);
        assert!((x.mean_all()?.item()? + 15.5).abs() < 1e-5);
        let weights = x.softmax(0)?;
        assert!((weights.sum_all()?.item()? - 2.0).abs() < 1e-6);
        assert_eq!(x.slice(0, 4, 1)?.full_tensor()?.to_vec::<f32>()?, [-12.0, -11.0]);
        assert_eq!(DTensor::cat(&[&x, &x], 0)?.sum_all()?.item()?, -310.0);
        let gradients = x.mul(&x)?.sum_all()?.backward()?;
        let gradient = gradients.get(&x).expect("a leaf");
        assert_eq!(gradient.layout(), x.layout());
        assert_eq!(
            gradient.full_tensor()?.to_vec::<f32>()?,
            (0..10).map(|i| (i as f32 - 20.0) * 2.0).collect::<Vec<_>>()
        );
        Ok(())
    });
}

/// 146190: ranks dropped the same local positions of their shards, so that the mask depended on the layout.
#[test]
fn dropout_depends_on_the_global_index_alone() {
    on(3, "a=3", |mesh| {
        let ones = Tensor::full(DType::F32, [12, 5], 1.0);
        let dropped = |layout: &str| -> Result<Vec<f32>> {
            let x = DTensor::distribute(mesh, &ones, layout)?;
            x.dropout(0.5, &mut Generator::new(7))?.full_tensor()?.to_vec()
        };
        let want = dropped("(R)")?;
        for layout in ["(S0)", "(S1)", "(RS(0..1; 7,0,5))", "(RS(0..2; 1,30,29))"] {
            assert_eq!(dropped(layout)?, want, "{layout}");
        }
        let mask: Vec<&[f32]> = want.chunks(20).collect();
        assert!(mask[0] != mask[1] && mask[1] != mask[2], "shards have masks of their own");
        let mine = Tensor::full(DType::F32, [12, 5], 1.0 / 3.0);
        let x = DTensor::from_local(mesh, mine, [12, 5], "(P(sum))")?;
        assert_eq!(x.dropout(0.5, &mut Generator::new(7))?.full_tensor()?.to_vec::<f32>()?, want);
        Ok(())
    });
}

/// 194457: `[5, 3]` with both axes of a 2 x 2 mesh on dim 0.
#[test]
fn five_rows_on_two_by_two() {
    on(4, "dp=2,tp=2", |mesh| {
        for layout in ["(S0, S0)", "(S0^1, S0^0)"] {
            let x = put(mesh, &[5, 3], layout)?;
            same(&x, &iota(&[5, 3]));
            for to in ["(R, R)", "(S0, R)", "(R, S0)", "(S1, S0)", "(S0, S1)", "(S0^1, S0^0)", "(S0, S0)"] {
                let y = x.redistribute(to)?;
                same(&y, &iota(&[5, 3]));
                same(&y.redistribute(layout)?, &iota(&[5, 3]));
            }
            assert_eq!(x.sum_all()?.item()?, 105.0);
            assert_eq!(x.sum(&[0], false)?.full_tensor()?.to_vec::<f32>()?, [30.0, 35.0, 40.0]);
            assert_eq!(x.sum(&[1], false)?.full_tensor()?.to_vec::<f32>()?, [3.0, 12.0, 21.0, 30.0, 39.0]);
            let w = put(mesh, &[3, 2], "(R, S1)")?;
            assert_eq!(x.matmul(&w)?.full_tensor()?.to_vec::<f32>()?, matmul(&iota(&[5, 3]), &iota(&[3, 2])));
        }
        Ok(())
    });
}

/// 168134: five elements in nested order left gaps.
#[test]
fn five_elements_in_nested_order() {
    on(4, "dp=2,tp=2", |mesh| {
        let held = |layout: &str| -> Result<Vec<f32>> { put(mesh, &[5], layout)?.local().to_vec() };
        let rank = mesh.rank().rank();
        assert_eq!(held("(S0, S0)")?, [&[0.0, 1.0][..], &[2.0], &[3.0], &[4.0]][rank]);
        assert_eq!(held("(S0^1, S0^0)")?, [&[0.0, 1.0][..], &[3.0], &[2.0], &[4.0]][rank]);
        for n in 0..9 {
            same(&put(mesh, &[n], "(S0^1, S0^0)")?, &iota(&[n]));
        }
        Ok(())
    });
}

/// Found in this library: the gradient of the second product had the first one's number of experts, because calls with
/// equal operands shared a plan.
#[test]
fn products_of_other_numbers_of_experts_are_other_plans() {
    on(2, "dp=2", |mesh| {
        for experts in [2usize, 4] {
            let x = put(mesh, &[4, 3], "(R)")?;
            let w = put(mesh, &[experts, 3, 2], "(R)")?.requires_grad()?;
            let sizes = isoshard::ops::GroupSizes::new(experts, vec![4 / experts; experts])?;
            let dw = x.grouped_matmul(&w, &sizes)?.sum_all()?.backward()?.take(&w).expect("w is a leaf");
            assert_eq!(dw.shape()[..], [experts, 3, 2]);
            assert_eq!(dw.full_tensor()?.to_f64_vec().iter().sum::<f64>(), 2.0 * 66.0);
        }
        Ok(())
    });
}

/// Found in this library: a window after causal options let queries see later keys.
#[test]
fn a_window_narrows_causal_attention() {
    on(1, "dp=1", |mesh| {
        let x = put(mesh, &[1, 1, 5, 2], "(R)")?;
        let causal = || AttentionOptions::causal(0.25);
        let [y, want] = [causal().window(1, 3), causal().window(1, 0)].map(|o| x.attention_with(&x, &x, &o));
        assert_eq!(y?.full_tensor()?.to_f64_vec(), want?.full_tensor()?.to_f64_vec());
        Ok(())
    });
}

/// Found in this library: the squares of f16 weights overflowed, and those of small ones were 0.
#[test]
fn norms_of_weights_neither_overflow_nor_vanish() {
    on(2, "dp=2", |mesh| {
        for value in [200.0, 2f64.powi(-20)] {
            let v = DTensor::full(mesh, DType::F16, [1, 4], "(S1)", value)?;
            let norms = DTensor::full(mesh, DType::F16, [1], "(R)", 1.0)?;
            assert_eq!(v.weight_norm(&norms, 0)?.full_tensor()?.to_f64_vec(), [0.5; 4]);
        }
        Ok(())
    });
}

/// Found in this library: reshaping `(a:S1, b:S1)` moved both axes to dim 0, which splits at other elements.
#[test]
fn a_view_does_not_cut_one_dim_twice_unseen() {
    for (text, ranks) in [("a=2,b=2", 4), ("a=2,b=3", 6)] {
        on(ranks, text, |mesh| {
            for layout in ["(S1, S1)", "(S0, S0)", "(S0, S1)", "(S1^1, S1^0)", "(S0^1, S0^0)"] {
                let x = put(mesh, &[4, 3], layout)?;
                for shape in [[2usize, 6], [6, 2], [3, 4], [12, 1]] {
                    same(&x.reshape(shape)?, &iota(&shape));
                }
            }
            Ok(())
        });
    }
}

/// 165962: the maximum, minimum and norm of a tensor that is `Partial(sum)` combined each rank's contributions instead of
/// the sums.
#[test]
fn extremes_and_norms_of_a_partial_sum_are_those_of_the_sum() {
    for (ranks, mesh) in [(2, "a=2"), (3, "a=3")] {
        on(ranks, mesh, |mesh| {
            // Column sums of rows that change sign: no contribution is near the sum.
            let numbers = |i: usize| if i < 8 { 10.0 + i as f32 } else { -9.0 - (i % 8) as f32 * 2.0 };
            let whole = Tensor::from_vec((0..16).map(numbers).collect(), [2, 8])?;
            let x = DTensor::distribute(mesh, &whole, "(S0)")?.sum(&[0], false)?;
            assert_eq!(x.layout().to_string(), "(P(sum))");
            let sums = x.full_tensor()?.to_vec::<f32>()?;
            assert_eq!(sums, [1.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0]);
            let item = |y: DTensor| y.item();
            assert_eq!((item(x.max(&[0], false)?)?, item(x.min(&[0], false)?)?), (1.0, -6.0));
            assert_eq!(item(x.norm(2.0, &[0], false)?)? as f32, 92f32.sqrt());
            assert_eq!(item(x.norm(1.0, &[0], false)?)?, 22.0);
            assert_eq!((item(x.argmax(0)?)?, item(x.argmin(0)?)?), (0.0, 7.0));
            assert_eq!(item(x.var(&[0], 0, false)?)?, 5.25);
            Ok(())
        });
    }
}

/// Not a PyTorch issue: beside another path to the loss, a derivative that is not available counted as 0.
#[test]
fn derivatives_that_are_not_available_are_refused_beside_others() {
    on(2, "a=2", |mesh| {
        let x = put(mesh, &[3], "(S0)")?.add_scalar(1.0)?.requires_grad()?;
        let refused = x.trigamma().and_then(|y| y.add(&x)?.sum_all()?.backward()).map(drop);
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("the second derivative of digamma is not available"), "{refused}");
        // The derivative of a constant is 0, alone and beside another path.
        let y = x.pow_scalar(0.0)?;
        let gradient = |y: DTensor| -> Result<Vec<f64>> {
            Ok(y.sum_all()?.backward()?.take(&x).expect("x is a leaf").full_tensor()?.to_f64_vec())
        };
        assert_eq!((gradient(y.clone())?, gradient(y.add(&x)?)?), (vec![0.0; 3], vec![1.0; 3]));
        Ok(())
    });
}

/// Not a PyTorch issue: products of sizes wrapped, which gave wrong shapes in release builds and panics in others.
#[test]
fn sizes_that_overflow_are_refused_by_name() {
    on(2, "a=2", |mesh| {
        const HUGE: usize = usize::MAX;
        let (x, none) = (put(mesh, &[4, 3], "(S0)")?, put(mesh, &[0, 3], "(R)")?);
        let index = DTensor::zeros(mesh, DType::I64, [4, 3], "(S0)")?;
        let (line, slot) = (index.slice(1, 0, 1)?.squeeze(1)?, index.slice(1, 0, 1)?);
        let sequence = |len, end: f64| DTensor::linspace(mesh, DType::F64, -f64::MAX, end, len, "(R)");
        let refused: [(&str, Result<()>); 19] = [
            ("repeat: the number of", x.repeat(&[HUGE, 2]).map(drop)),
            ("repeat: the number of", none.repeat(&[1, HUGE]).map(drop)),
            ("repeat_interleave: the number of", x.repeat_interleave(HUGE, 0).map(drop)),
            ("expand: the number of", none.unsqueeze(0)?.expand([HUGE, 0, 3]).map(drop)),
            ("unflatten: the product of the sizes", none.unflatten(1, &[5]).map(drop)),
            ("diag_embed: the number of", x.diag_embed(isize::MIN).map(drop)),
            ("topk: ", x.topk(HUGE, 0, true).map(drop)),
            ("rotary: the positions", put(mesh, &[3, 4], "(S0)")?.rotary(1e4, HUGE).map(drop)),
            ("kthvalue: ", x.kthvalue(HUGE, 0, true).map(drop)),
            ("one_hot: the number of", index.one_hot(HUGE, DType::F32).map(drop)),
            ("one_hot: there is no class", index.one_hot(0, DType::F32).map(drop)),
            ("bincount: the number of", index.bincount(1 << 60).map(drop)),
            ("scatter_add: the number of", x.scatter_add(0, &index, HUGE).map(drop)),
            ("permute_tokens: the number of", x.permute_tokens(&slot, HUGE).map(drop)),
            ("expert_slots: the slots' numbers", index.expert_slots(3, Some(HUGE)).map(drop)),
            ("expert_slots: there is no expert", index.expert_slots(0, None).map(drop)),
            ("group_sizes: the number of rows", GroupSizes::new(2, [1, 1, HUGE, 2]).map(drop)),
            ("layout: the number of", sequence(HUGE, 0.0).map(drop)),
            ("layout: the number of", DTensor::zeros(mesh, DType::F64, [1 << 61], "(R)").map(drop)),
        ];
        for (start, outcome) in refused {
            let text = outcome.expect_err(start).to_string();
            assert!(text.starts_with(start), "{start}...: {text}");
        }
        assert_eq!(x.chunk(HUGE, 0)?.len(), 4);
        assert_eq!(line.roll(isize::MIN, 0)?.shape(), line.shape());
        assert_eq!(sequence(2, f64::MAX)?.full_tensor()?.to_f64_vec(), [-f64::MAX, f64::MAX]);
        assert_eq!(sequence(1, f64::MAX)?.full_tensor()?.to_f64_vec(), [-f64::MAX]);
        let q = put(mesh, &[1, 1, 3, 2], "(R)")?;
        let at = |options: &AttentionOptions| q.attention_with(&q, &q, options)?.full_tensor();
        let options = AttentionOptions::bidirectional(0.3);
        assert_eq!(at(&options.clone().offset(HUGE))?.to_f64_vec(), at(&options)?.to_f64_vec());
        let mut params = Params::new(mesh, Plan::default(), 7)?;
        let config = MoeConfig {
            width: 3,
            hidden: 2,
            experts: 2,
            top_k: 1,
            capacity_factor: Some(1e300),
            gated: true,
            activation: Activation::Silu,
            weights: ExpertWeights::SoftmaxOfChosen,
            shared_hidden: None,
            shared_gate: false,
            dropout: 0.0,
        };
        let moe = Moe::new(params.root().child("moe"), config, Init::Ones)?;
        assert_eq!(moe.forward(&Forward::eval(&params), &x)?.shape(), x.shape());
        Ok(())
    });
}

/// Not a PyTorch issue: rows with equal slots were added up if they lay on different ranks.
#[test]
fn equal_slots_are_refused_on_every_mesh() {
    for (ranks, mesh) in [(1, "a=1"), (2, "a=2"), (3, "a=3")] {
        for (layout, backward) in
            [("(R)", false), ("(S0)", false), ("(S1)", false), ("(R)", true), ("(S1)", true)]
        {
            let run = move |rank: Rank| {
                let mesh = DeviceMesh::parse(&rank, mesh)?;
                let put = |x: &Tensor| DTensor::distribute(&mesh, x, layout);
                let slots = Tensor::from_vec(vec![0i64, 3, -1, -1, 0, 2], [6, 1])?;
                let (x, slot) = (put(&iota(&[6, 2]))?, put(&slots)?);
                let (entries, of_entries) = (x.reshape([2, 3, 2])?, slot.reshape([2, 3, 1])?);
                entries.permute_tokens(&of_entries, 4)?; // each batch entry has slots of its own
                if !backward {
                    return read(&x.permute_tokens(&slot, 4)?);
                }
                let y = x.slice(0, 0, 4)?.detach().requires_grad()?;
                let tokens = y.unpermute_tokens(&slot)?;
                let rows = tokens.full_tensor()?.to_f64_vec();
                assert_eq!(rows, [0.0, 1.0, 6.0, 7.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 4.0, 5.0]);
                let grads = tokens.sum_all()?.backward()?;
                read(grads.get(&y).expect("the loss depends on it"))
            };
            let text = spmd(ranks, run).unwrap_err().to_string();
            // A kernel does not know the batch entry.
            let of = if device() == Device::Cpu { " of batch entry 0" } else { "" };
            let wanted = format!("two rows have the same slot; got slot 0{of}");
            assert!(text.contains(&wanted), "{mesh}: {text}");
        }
    }
}

/// Not a PyTorch issue: sums of integers by index wrap as PyTorch's do, on every mesh.
#[test]
fn integers_are_added_by_index() {
    for (ranks, mesh) in [(1, "a=1"), (3, "a=3")] {
        on(ranks, mesh, |mesh| {
            let integers = |values: [i64; 4]| Tensor::from_slice(&values, [4, 1]);
            for (dtype, most) in [(DType::I32, i64::from(i32::MAX)), (DType::I64, i64::MAX)] {
                for layout in ["(R)", "(S0)", "(S1)"] {
                    let put = |x: Tensor| DTensor::distribute(mesh, &x, layout);
                    let x = put(integers([1, 2, 3, 4])?)?.cast(dtype)?;
                    let src = put(integers([most, 5, 7, -2])?)?.cast(dtype)?;
                    let (index, line) = (put(integers([0, 2, 0, 3])?)?, [0i64, 2, 0, 3]);
                    let line = DTensor::distribute(mesh, &Tensor::from_slice(&line, [4])?, "(R)")?;
                    let check = |y: DTensor, want: [i64; 4]| -> Result<()> {
                        assert_eq!(y.dtype(), dtype);
                        assert_eq!(y.cast(DType::I64)?.full_tensor()?.to_vec::<i64>()?, want, "{layout}");
                        Ok(())
                    };
                    check(src.scatter_add(0, &index, 4)?, [-most + 5, 0, 5, -2])?;
                    let want = [-most + 6, 2, 8, 2];
                    check(x.scatter_reduce(0, &index, &src, ReduceOp::Sum)?, want)?;
                    check(x.index_add(0, &line, &src)?, want)?;
                    check(x.index_put(&[&line], &src, true)?, want)?;
                }
            }
            let bytes = DTensor::zeros(mesh, DType::U8, [4, 1], "(R)")?;
            let index = DTensor::zeros(mesh, DType::I64, [4, 1], "(R)")?;
            let text = bytes.scatter_add(0, &index, 2).unwrap_err().to_string();
            assert!(text.starts_with("scatter_add: adds floats, i64 and i32; got u8[4, 1]"), "{text}");
            Ok(())
        });
    }
}

fn on(ranks: usize, mesh: &'static str, f: impl Fn(&DeviceMesh) -> Result<()> + Send + Sync + 'static) {
    let run = move |rank: Rank| f(&DeviceMesh::parse(&rank, mesh)?);
    spmd(ranks, run).unwrap_or_else(|e| panic!("on {mesh}: {e}"));
}

/// Reads a tensor's values: a kernel's errors in values appear at the next read.
fn read(x: &DTensor) -> Result<()> {
    x.full_tensor()?.to_device(Device::Cpu).map(drop)
}

/// Returns 0, 1, 2, ... in `layout`.
fn put(mesh: &DeviceMesh, shape: &[usize], layout: &str) -> Result<DTensor> {
    DTensor::distribute(mesh, &iota(shape), layout)
}

fn iota(shape: &[usize]) -> Tensor {
    let n = shape.iter().product::<usize>();
    Tensor::from_vec((0..n).map(|i| i as f32).collect(), shape).expect("as many values as elements")
}

#[track_caller]
fn same(x: &DTensor, whole: &Tensor) {
    let full = x.full_tensor().unwrap_or_else(|e| panic!("{x:?}: {e}"));
    assert_eq!(full.shape(), whole.shape(), "{x:?}");
    assert_eq!(full.to_f64_vec(), whole.to_f64_vec(), "{x:?}");
}

/// The product by its definition.
fn matmul(a: &Tensor, b: &Tensor) -> Vec<f32> {
    let (m, k, n) = (a.shape()[0], a.shape()[1], b.shape()[1]);
    let (x, y) = (a.to_f64_vec(), b.to_f64_vec());
    (0..m * n).map(|e| (0..k).map(|j| x[e / n * k + j] * y[j * n + e % n]).sum::<f64>() as f32).collect()
}
