//! Gradient accumulation: in fast mode and with groups ranks reduce gradients once per step, in exact mode once per
//! micro-batch, and `no_sync` is refused; all give the gradients of the whole batch, exact mode and groups with the bits of one rank.

use isoshard::Result;
use isoshard::comm::{ModulePath, Rank, Tally, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh, Gradients, Reduction};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::optim::{AdamW, Optimizer, Sgd, UpdateRule};
use isoshard::placement::{Layout, Mesh, SumGroups};
use isoshard::rng::{Generator, Init};
use isoshard::tensor::{DType, Tensor};

/// The number of calls that reduce gradients, and the gradients of all parameters.
type Accumulated = (u64, Vec<Vec<f64>>);

fn on<T: Send + 'static>(mesh: &str, run: impl Fn(&Rank) -> Result<T> + Send + Sync + 'static) -> Vec<T> {
    let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
    spmd(ranks, move |rank| run(&rank)).unwrap_or_else(|e| panic!("{mesh}: {e}"))
}

/// Runs `micros` micro-batches of two rows each per rank.
fn accumulate(
    rank: &Rank,
    (mesh, reduction, compute): (&str, Reduction, DType),
    micros: usize,
    unreduced: bool,
    recomputed: bool,
) -> Result<Accumulated> {
    let (rank, tally) = Tally::of(rank)?;
    let mesh = DeviceMesh::parse(&rank, mesh)?;
    mesh.set_reduction(reduction);
    let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: false })?;
    let plan = if recomputed { plan.recompute("h.*") } else { plan };
    let layout = plan.batch_layout(mesh.mesh());
    let mut params = Params::new(&mesh, plan, 7)?;
    params.compute_in(compute)?;
    let config =
        GptConfig { vocabulary: 11, block: 6, layers: 2, heads: 2, width: 8, dropout: 0.1, bias: true };
    let model = Gpt::new(&mut params, config)?;
    let (mut gradients, mut dropout) = (Gradients::default(), Generator::new(1));
    for micro in 0..micros {
        let text = |from: usize| {
            let all = (from..from + 24).map(|i| ((i + 5 * micro) * i % 11) as i64).collect();
            DTensor::distribute(&mesh, &Tensor::from_vec(all, [4, 6])?, layout.clone())
        };
        let (tokens, targets) = (text(0)?, text(1)?);
        let cx = Forward::train(&params, &mut dropout);
        let mut loss = model.loss(&cx, &tokens, &targets)?.mul_scalar(1.0 / micros as f64)?;
        drop(cx);
        let keeps = unreduced && reduction != Reduction::Exact && micro + 1 < micros;
        let _guard = keeps.then(|| mesh.no_sync());
        if unreduced {
            loss.backward_into(&mut gradients)?;
        } else {
            gradients.merge(loss.backward()?)?;
        }
    }
    let reduces = |call: &str| matches!(call, "reduce_scatter" | "all_reduce");
    let calls = tally.rows().iter().filter(|row| reduces(row.call)).map(|row| row.total.calls).sum();
    let gradient = |value: &DTensor| {
        let gradient = gradients.get(value).expect("it is used");
        assert_eq!(gradient.tensor_meta(), value.tensor_meta(), "it has the parameter's layout");
        Ok(gradient.full_tensor()?.to_f64_vec())
    };
    Ok((calls, params.values().map(gradient).collect::<Result<_>>()?))
}

#[test]
fn fast_mode_reduces_once_per_step_and_exact_mode_once_per_micro_batch() {
    for mesh in ["dp=2", "fsdp=2", "dp=2,fsdp=2"] {
        for compute in [DType::F32, DType::BF16] {
            for recomputed in [false, true] {
                let run = move |reduction, micros, unreduced| {
                    on(mesh, move |rank| {
                        accumulate(rank, (mesh, reduction, compute), micros, unreduced, recomputed)
                    })
                };
                let what = format!("{mesh}, {compute}, {recomputed}");
                let (one, _) = run(Reduction::Fast, 1, true).remove(0);
                let fast = run(Reduction::Fast, 4, true);
                let merged = run(Reduction::Fast, 4, false);
                assert!(one > 0);
                assert_eq!((fast[0].0, merged[0].0), (one, 4 * one), "{what}");
                let exact = run(Reduction::Exact, 4, true);
                let (exact_one, _) = run(Reduction::Exact, 1, true).remove(0);
                assert_eq!(exact[0].0, 4 * exact_one, "{what}");
                assert!(exact[0].1 == run(Reduction::Exact, 4, false)[0].1, "{what}: as by merging");
                // Sums of the same numbers in another order.
                let bound = if compute == DType::F32 { 1e-5 } else { 0.04 };
                for (fast, exact) in fast[0].1.iter().zip(&exact[0].1) {
                    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
                    let off = norm(&mut fast.iter().zip(exact).map(|(a, b)| a - b));
                    assert!(off <= bound * norm(&mut exact.iter().copied()), "{what}: {off}");
                }
            }
        }
    }
}

/// On one rank too; the gradients of earlier passes stay as they were, and nothing is sent.
#[test]
fn exact_mode_refuses_unreduced_gradients() {
    for (mesh, ranks) in [("dp=1", 1), ("dp=2", 2), ("dp=2,fsdp=2", 4)] {
        let run = move |rank: Rank| {
            let (rank, tally) = Tally::of(&rank)?;
            let mesh = DeviceMesh::parse(&rank, mesh)?;
            let leaf = |path: &str| {
                let _scope = ModulePath::new(path).enter();
                DTensor::full(&mesh, DType::F32, [3], Layout::replicated(mesh.mesh().ndim()), 2.0)?
                    .requires_grad()
            };
            let (w, v) = (leaf("w")?, leaf("v")?);
            let layout = if mesh.mesh().ndim() == 1 { "(S0)" } else { "(S0, S0)" };
            let x = DTensor::full(&mesh, DType::F32, [8, 3], layout, 1.0)?;
            let loss = |w: &DTensor| x.mul(w)?.sum_all();
            let mut gradients = Gradients::default();
            loss(&w)?.backward_into(&mut gradients)?;
            let calls = tally.total().calls;
            let guard = mesh.no_sync();
            let refused = loss(&w)?.backward_into(&mut gradients).unwrap_err().to_string();
            assert!(loss(&w)?.backward().is_err());
            // A mode by path keeps the gradients of one leaf, and those of the other are reduced; alone they are refused.
            mesh.set_reduction_of("v", Reduction::Fast);
            assert!(loss(&w)?.backward_into(&mut gradients).is_err());
            assert_eq!(tally.total().calls, calls, "nothing is sent");
            assert_eq!(gradients.get(&w).expect("the first pass's").local().to_vec::<f32>()?, [8.0; 3]);
            DTensor::backward_all(&mut [&mut loss(&w)?, &mut loss(&v)?], &mut gradients)?;
            drop(guard);
            loss(&v)?.backward_into(&mut gradients)?;
            for leaf in [&w, &v] {
                assert_eq!(gradients.get(leaf).expect("a leaf").local().to_vec::<f32>()?, [16.0; 3]);
            }
            Ok(refused)
        };
        let said = spmd(ranks, run).unwrap_or_else(|e| panic!("{mesh}: {e}"));
        let axes = mesh.replace(',', ", ");
        let wanted = format!(
            "no_sync: exact mode reduces the gradients of each micro-batch, since bits of a sum of parts depend on the \
             mesh; got Reduction::Exact on ({axes}); declare groups (SumGroups), reduce in fast mode, or accumulate \
             outside no_sync"
        );
        assert_eq!(said, vec![wanted; ranks]);
    }
}

/// Ranks add the parts of micro-batches, and reduce once. Two ranks of `fsdp=3` share a part: they move operands.
#[test]
fn sums_in_groups_are_reduced_once_per_step_with_one_ranks_bits() {
    for (compute, wire) in [(DType::F32, DType::F32), (DType::F32, DType::BF16), (DType::BF16, DType::BF16)] {
        let reduction = Reduction::Grouped(SumGroups::new(4).unwrap().with_wire(wire).unwrap());
        for recomputed in [false, true] {
            let run = move |mesh: &'static str, micros, unreduced| {
                on(mesh, move |rank| {
                    accumulate(rank, (mesh, reduction, compute), micros, unreduced, recomputed)
                })
            };
            let want = run("dp=1", 4, true).remove(0).1;
            let merged = run("dp=1", 4, false).remove(0).1;
            assert!(want != merged, "{compute}, {wire}: parts are added before they are joined");
            for mesh in ["dp=2", "fsdp=2", "dp=2,fsdp=2", "tp=2", "fsdp=2,tp=2", "fsdp=3"] {
                let kept = run(mesh, 4, true);
                assert!(kept[0].1 == want, "{mesh}, {compute}, {wire}, {recomputed}");
                if !mesh.contains("tp") && mesh != "fsdp=3" {
                    let (one, _) = run(mesh, 1, false).remove(0);
                    // Reduced in each micro-batch: the table of positions, which repeats along the batch before it is
                    // read, and a sum of the forward pass. On two axes the table is folded, then all-reduced.
                    let in_each = if mesh.contains(',') { 3 } else { 2 };
                    assert!(kept[0].0 <= one + in_each * 3, "{mesh}: {} calls, {one} in one", kept[0].0);
                }
            }
        }
    }
}

/// The part of a gradient is the sum of the parts of all micro-batches; parts are rounded once and then joined.
#[test]
fn kept_parts_follow_the_definition() {
    on("a=1", |rank| {
        let mesh = DeviceMesh::parse(rank, "a=1")?;
        let of = |micro: usize, n: usize, width: usize| {
            let value = |i: usize| ((i * 7 + micro) as f32 * 0.37).sin() * 10f32.powi(i as i32 % 5 - 2);
            let whole = Tensor::from_vec((0..n * width).map(value).collect(), [n, width])?;
            DTensor::distribute(&mesh, &whole, "(R)")
        };
        let w = of(9, 3, 5)?.requires_grad()?;
        let mut gradients = Gradients::default();
        let mut parts = [None, None];
        for micro in 0..3 {
            let (x, dy) = (of(micro, 64, 3)?, of(micro + 20, 64, 5)?);
            let _guard = (micro < 2).then(|| mesh.no_sync());
            mesh.with_reduction(Reduction::Grouped(SumGroups::new(2)?.with_wire(DType::BF16)?), || {
                x.matmul(&w)?.mul(&dy)?.sum_all()?.backward_into(&mut gradients)
            })?;
            assert_eq!(gradients.get(&w).is_some(), micro == 2);
            for (i, sum) in parts.iter_mut().enumerate() {
                let part = |t: &DTensor| t.slice(0, 32 * i, 32);
                let part = part(&x)?.transpose(0, 1)?.matmul(&part(&dy)?)?;
                *sum = Some(match sum.take() {
                    Some(sum) => part.add(&sum)?,
                    None => part,
                });
            }
        }
        let [a, b] = parts.map(|part| part.expect("three micro-batches").cast(DType::BF16));
        let want = a?.add(&b?)?.cast(DType::F32)?;
        assert_eq!(
            gradients.get(&w).expect("a leaf").local().to_vec::<f32>()?,
            want.local().to_vec::<f32>()?
        );
        Ok(())
    });
}

/// Parameters that are sliced, transposed, or read by a joint map; a batch without elements; gradients that are merged.
#[test]
fn parts_stay_parts_on_the_way_to_their_leaves() {
    let run = |rank: &Rank, mesh: &str, [of_x, of_w]: [&str; 2], merged: bool| -> Result<Vec<Vec<f32>>> {
        let mesh = DeviceMesh::parse(rank, mesh)?;
        let groups = SumGroups::new(2)?.with_gradient_parts(8)?.with_wire(DType::BF16)?;
        mesh.set_reduction(Reduction::Grouped(groups));
        let of = |seed: usize, shape: &[usize], layout: &str| {
            let n = shape.iter().product();
            let value = |i: usize| ((i * 7 + seed) as f32 * 0.37).sin() * 10f32.powi(i as i32 % 5 - 2);
            DTensor::distribute(&mesh, &Tensor::from_vec((0..n).map(value).collect(), shape)?, layout)
        };
        let leaf = |seed, shape: &[usize]| of(seed, shape, of_w)?.requires_grad();
        let (bias, v, w, u) = (leaf(1, &[12])?, leaf(2, &[6, 4])?, leaf(3, &[6, 4])?, leaf(4, &[4, 6])?);
        // A leaf whose gradient's parts are rounded, though sums of its own dtype are not.
        let wide = of(5, &[4, 6], of_w)?.cast(DType::F64)?.detach().requires_grad()?;
        let mut gradients = Gradients::default();
        for micro in 0..3 {
            let guard = (micro < 2).then(|| mesh.no_sync());
            let x = of(micro, &[16, 4], of_x)?;
            let joint = x.joint_linear(&[&v, &w])?;
            let y = joint[0].mul(&joint[1])?.add(&bias.slice(0, 3, 6)?)?;
            let mut loss = y
                .add(&x.matmul(&u)?)?
                .add(&x.matmul(&wide.cast(DType::F32)?)?)?
                .add(&x.matmul(&v.transpose(0, 1)?)?)?
                .tanh()?
                .sum_all()?;
            if merged {
                gradients.merge(loss.backward()?)?;
            } else {
                loss.backward_into(&mut gradients)?;
            }
            drop(guard);
        }
        [&bias, &v, &w, &u]
            .map(|of| gradients.get(of).expect("joined").full_tensor()?.to_vec())
            .into_iter()
            .collect()
    };
    // Merging joins the parts of the first two passes: the last one reduces its gradients by itself.
    let one =
        [false, true].map(|merged| on("a=1", move |rank| run(rank, "a=1", ["(R)", "(R)"], merged)).remove(0));
    assert!(one[0] != one[1]);
    for (mesh, layouts) in [
        ("a=2,b=2", ["(S0, R)", "(R, S0)"]),
        ("a=2,b=2", ["(S0, S0)", "(R, R)"]),
        ("a=2,b=2", ["(S0, R)", "(S0, S0)"]),
        ("a=4", ["(R)", "(S0)"]),
        ("a=8", ["(S0)", "(S0)"]),
    ] {
        for merged in [false, true] {
            let got = on(mesh, move |rank| run(rank, mesh, layouts, merged));
            assert!(got[0] == one[usize::from(merged)], "{mesh}, {layouts:?}, merged: {merged}");
        }
    }
}

#[test]
fn kept_parts_are_no_gradients_and_have_one_layout() {
    on("a=2,b=2", |rank| {
        let mesh = DeviceMesh::parse(rank, "a=2,b=2")?;
        mesh.set_reduction(Reduction::Grouped(SumGroups::new(4)?));
        let mut params = Params::new(&mesh, Plan::default(), 7)?;
        let id = params.root().param("w", [3, 5], Init::Ones)?;
        let x = |layout: &str| DTensor::full(&mesh, DType::F32, [8, 3], layout, 2.0);
        let loss = |layout: &str, w: &DTensor| x(layout)?.matmul(w)?.sum_all();
        let mut gradients = Gradients::default();
        let guard = mesh.no_sync();
        loss("(S0, R)", params.value(id))?.backward_into(&mut gradients)?;
        assert!(gradients.get(params.value(id)).is_none() && gradients.take(params.value(id)).is_none());
        let one = DTensor::full(&mesh, DType::F32, [], "(R, R)", 1.0)?;
        let refused = Sgd::new().step(&mut params, &mut gradients, &one, 1e-3).unwrap_err();
        assert!(refused.to_string().contains("run the last backward_into outside no_sync"), "{refused}");
        let refused = loss("(R, S0)", params.value(id))?.backward_into(&mut gradients).unwrap_err();
        assert!(refused.to_string().contains("the same parts and layout in each micro-batch"), "{refused}");
        drop(guard);
        // Nothing to sum: zeros on every mesh.
        let w = params.value(id);
        for layout in ["(R, R)", "(S0, R)"] {
            let none = DTensor::zeros(&mesh, DType::F32, [0, 3], layout)?;
            let mut gradients = Gradients::default();
            for unreduced in [true, false] {
                let _guard = unreduced.then(|| mesh.no_sync());
                none.matmul(w)?.sum_all()?.backward_into(&mut gradients)?;
            }
            assert_eq!(gradients.get(w).expect("zeros").full_tensor()?.to_vec::<f32>()?, [0.0; 15]);
        }
        Ok(())
    });
}

/// Sums of small integers have the same bits in any order.
#[test]
fn parts_of_micro_batches_add_up() {
    on("a=2,b=2", |rank| {
        let mesh = DeviceMesh::parse(rank, "a=2,b=2")?;
        mesh.set_reduction(Reduction::Fast);
        let whole = |from: i32, shape: [usize; 2]| {
            let len = (shape[0] * shape[1]) as i32;
            Tensor::from_vec((from..from + len).map(|i| (i * i % 7 - 3) as f32).collect(), shape)
        };
        for (of_x, of_w) in [("(S0, S0)", "(R, R)"), ("(S0, R)", "(S0, R)"), ("(S0, S1)", "(R, S0)")] {
            let w = DTensor::distribute(&mesh, &whole(3, [5, 4])?, of_w)?.requires_grad()?;
            let x = |micro: i32| DTensor::distribute(&mesh, &whole(micro, [6, 5])?, of_x);
            // `w` is used twice, and one leaf in the last micro-batch only.
            let late = DTensor::distribute(&mesh, &whole(9, [5, 4])?, of_w)?.requires_grad()?;
            let loss = |micro: i32| -> Result<DTensor> {
                let y = x(micro)?.matmul(&w)?.add(&x(micro + 1)?.matmul(&w)?)?;
                if micro == 3 { y.add(&x(micro)?.matmul(&late)?)?.sum_all() } else { y.sum_all() }
            };
            let (mut kept, mut merged) = (Gradients::default(), Gradients::default());
            for micro in 0..4 {
                let guard = (micro < 3).then(|| mesh.no_sync());
                loss(micro)?.backward_into(&mut kept)?;
                drop(guard);
                merged.merge(loss(micro)?.backward()?)?;
            }
            for leaf in [&w, &late] {
                let [a, b] = [&kept, &merged].map(|all| all.get(leaf).expect("a leaf"));
                assert_eq!(a.layout(), leaf.layout());
                assert_eq!(
                    a.full_tensor()?.to_vec::<f32>()?,
                    b.full_tensor()?.to_vec::<f32>()?,
                    "{of_x} {of_w}"
                );
            }
        }
        Ok(())
    });
}

/// The optimizer's step would move an unreduced gradient to each rank's part of it.
#[test]
fn a_leaf_of_an_earlier_micro_batch_is_reduced_with_the_last() {
    on("dp=2", |rank| {
        let mesh = DeviceMesh::parse(rank, "dp=2")?;
        mesh.set_reduction(Reduction::Fast);
        let mut params = Params::new(&mesh, Plan::default(), 7)?;
        let ids = ["early", "late"].map(|path| params.root().param(path, [3], Init::Ones).expect("free"));
        let x = Tensor::from_vec((0..12).map(|i| i as f32).collect(), [4, 3])?;
        let x = DTensor::distribute(&mesh, &x, "(S0)")?;
        let mut gradients = Gradients::default();
        for (micro, &id) in ids.iter().enumerate() {
            let _guard = (micro == 0).then(|| mesh.no_sync());
            x.mul(params.value(id))?.sum_all()?.backward_into(&mut gradients)?;
        }
        for &id in &ids {
            let gradient = gradients.get(params.value(id)).expect("a leaf");
            assert_eq!(gradient.layout(), params.value(id).layout());
            assert_eq!(gradient.local().to_vec::<f32>()?, [18.0, 22.0, 26.0]);
        }
        Sgd::new().rate(0.5).step(&mut params, &mut gradients)?;
        for id in ids {
            assert_eq!(params.value(id).local().to_vec::<f32>()?, [-8.0, -10.0, -12.0]);
        }
        Ok(())
    });
}

/// The sums of unreduced and reduced gradients communicate, each another number of bytes: ranks that added in different
/// orders would end with an error.
#[test]
fn ranks_merge_in_one_order() {
    on("dp=2", |rank| {
        let mesh = DeviceMesh::parse(rank, "dp=2")?;
        mesh.set_reduction(Reduction::Fast);
        // Leaves of the first rank have other numbers than those of the second.
        for _ in 0..7 * rank.rank() {
            DTensor::full(&mesh, DType::F32, [1], "(R)", 0.0)?.requires_grad()?;
        }
        let leaf = |n| DTensor::full(&mesh, DType::F32, [n], "(R)", 1.0)?.requires_grad();
        let leaves = (1..40).map(leaf).collect::<Result<Vec<_>>>()?;
        let pass = || -> Result<Gradients> {
            let mut gradients = Gradients::default();
            for w in &leaves {
                let x = DTensor::full(&mesh, DType::F32, [4, w.shape()[0]], "(S0)", 1.0)?;
                x.mul(w)?.sum_all()?.backward_into(&mut gradients)?;
            }
            Ok(gradients)
        };
        let guard = mesh.no_sync();
        let mut unreduced = pass()?;
        drop(guard);
        unreduced.merge(pass()?)?;
        let mut all = leaves[0].sum_all()?;
        all.backward_into(&mut unreduced)?;
        for (i, w) in leaves.iter().enumerate() {
            let gradient = unreduced.get(w).expect("a leaf");
            assert_eq!(gradient.layout(), w.layout());
            let want = if i == 0 { 9.0 } else { 8.0 };
            assert_eq!(gradient.local().to_vec::<f32>()?, vec![want; w.shape()[0]]);
        }
        Ok(())
    });
}

/// Gradients that [`DTensor::grad`] records keep their histories in the scope, through a cast as well.
#[test]
fn recorded_gradients_keep_their_histories() {
    on("dp=2", |rank| {
        let mesh = DeviceMesh::parse(rank, "dp=2")?;
        mesh.set_reduction(Reduction::Fast);
        let w = DTensor::full(&mesh, DType::F32, [3], "(R)", 2.0)?.requires_grad()?;
        let x = DTensor::full(&mesh, DType::BF16, [4, 3], "(S0)", 1.0)?;
        let second = |kept: bool| -> Result<Vec<f32>> {
            let _guard = kept.then(|| mesh.no_sync());
            let y = w.cast(DType::BF16)?.mul(&x)?;
            let first = y.mul(&y)?.sum_all()?.grad(&[&w])?.remove(0);
            assert!(first.has_history(), "{kept}");
            first.sum_all()?.grad(&[&w])?.remove(0).full_tensor()?.to_vec()
        };
        assert_eq!(second(false)?, [8.0; 3]);
        assert_eq!(second(true)?, [8.0; 3]);
        Ok(())
    });
}

/// An unreduced gradient is refused before anything changes; the next step has the moments of the first.
#[test]
fn optimizers_refuse_unreduced_gradients_and_keep_their_states() {
    fn steps<R: UpdateRule>(
        rank: &Rank,
        rule: impl Fn() -> Optimizer<R>,
        refusal: Option<&str>,
    ) -> Result<Vec<f32>> {
        let mesh = DeviceMesh::parse(rank, "dp=2")?;
        mesh.set_reduction(Reduction::Fast);
        let mut params = Params::new(&mesh, Plan::default(), 7)?;
        let w = params.root().param("w", [2], Init::Ones)?;
        let x = DTensor::full(&mesh, DType::F32, [4, 2], "(S0)", 0.5)?;
        let mut optimizer = rule();
        for step in 0..3 {
            let mut gradients = Gradients::default();
            let loss = x.mul(params.value(w))?.sum_all()?.mul_scalar(1.0 + f64::from(step))?;
            if let (1, Some(refusal)) = (step, refusal) {
                let guard = mesh.no_sync();
                loss.clone().backward_into(&mut gradients)?;
                drop(guard);
                let e = optimizer.step(&mut params, &mut gradients).expect_err("it is unreduced").to_string();
                assert!(e.starts_with(refusal) && e.contains(" at w; "), "{e}");
                assert!(gradients.get(params.value(w)).is_some(), "it is kept");
                gradients = Gradients::default();
            }
            loss.clone().backward_into(&mut gradients)?;
            optimizer.step(&mut params, &mut gradients)?;
        }
        params.value(w).local().to_vec()
    }
    on("dp=2", |rank| {
        let adamw = || AdamW::new().betas(0.5, 0.75).decay(0.0).rate(0.125);
        let said = "adamw: a gradient has its parameter's layout; got f32[2]@(dp:P(sum)) for f32[2]@(dp:R)";
        assert_eq!(steps(rank, adamw, Some(said))?, steps(rank, adamw, None)?);
        let sgd = || Sgd::new().momentum(0.5).rate(0.125);
        let said = "sgd: a gradient has its parameter's layout; got f32[2]@(dp:P(sum)) for f32[2]@(dp:R)";
        assert_eq!(steps(rank, sgd, Some(said))?, steps(rank, sgd, None)?);
        // A limit that changes gradients does not change unreduced ones.
        let limited = || sgd().clip_value(0.75);
        let said = said.replace("sgd", "clip");
        assert_eq!(steps(rank, limited, Some(&said))?, steps(rank, limited, None)?);
        Ok(())
    });
}
