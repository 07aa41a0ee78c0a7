//! The optimizer of a training loop: a step has the bits of its parts, and settings by path pattern hold on every mesh.

use isoshard::comm::{Tally, spmd};
use isoshard::dtensor::{DTensor, DeviceMesh, Gradients};
use isoshard::fsdp::{BlockPolicy, Sharding, fully_shard};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, ParamId, Params, Plan};
use isoshard::optim::{
    AdamW, LossScale, Optimizer, ParamGroup, ParamStates, Rates, Sgd, UpdateRule, WarmupCosine, clip_scale,
    global_norm,
};
use isoshard::placement::{Layout, Mesh};
use isoshard::rng::{Generator, Init};
use isoshard::tensor::{DType, Tensor};
use isoshard::{Error, Result};

const MESHES: [&str; 4] = ["1", "fsdp=3", "tp=2", "dp=2,fsdp=2"];
const SCHEDULE: WarmupCosine = WarmupCosine { peak: 1e-2, floor: 1e-3, warmup: 2, steps: 4 };

/// Runs `f` on a mesh; returns rank 0's result, which all ranks share.
fn on<T: Clone + PartialEq + std::fmt::Debug + Send + 'static>(
    mesh: &'static str,
    f: impl Fn(&DeviceMesh) -> Result<T> + Send + Sync + 'static,
) -> T {
    let ranks = Mesh::parse(mesh, 0).expect("a mesh").rank_len();
    let all = spmd(ranks, move |rank| f(&DeviceMesh::parse(&rank, mesh)?));
    let all = all.unwrap_or_else(|e| panic!("{mesh}: {e}"));
    assert!(all.iter().all(|one| *one == all[0]), "{mesh}: {all:?}");
    all[0].clone()
}

/// Four steps of a GPT; returns the digest, and each step's rate and norm.
fn train(
    mesh: &DeviceMesh,
    mut step: impl FnMut(usize, &mut Params, &mut Gradients) -> Result<(f64, f64)>,
) -> Result<(u64, Vec<(f64, f64)>)> {
    let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: false })?;
    let batch = plan.batch_layout(mesh.mesh());
    let mut params = Params::new(mesh, plan, 7)?;
    let config =
        GptConfig { vocabulary: 11, block: 6, layers: 2, heads: 2, width: 10, dropout: 0.1, bias: true };
    let model = Gpt::new(&mut params, config)?;
    let mut dropout = Generator::new(7).child("dropout");
    let text =
        |from: usize| Tensor::from_vec((from..from + 30).map(|i| (i * i % 11) as i64).collect(), [5, 6]);
    let tokens = DTensor::distribute(mesh, &text(0)?, batch.clone())?;
    let targets = DTensor::distribute(mesh, &text(1)?, batch)?;
    let mut facts = Vec::new();
    for number in 0..4 {
        let mut loss = model.loss(&Forward::train(&params, &mut dropout), &tokens, &targets)?;
        facts.push(step(number, &mut params, &mut loss.backward()?)?);
    }
    Ok((params.digest()?, facts))
}

#[test]
fn a_step_has_the_bits_of_its_parts() {
    let by_parts = |mesh: &DeviceMesh| {
        let mut adam = AdamW::new().betas(0.9, 0.95).decay(0.1);
        train(mesh, |number, params, grads| {
            let norm = global_norm(params.ids().filter_map(|id| grads.get(params.value(id))))?;
            let rate = SCHEDULE.at(number);
            adam.step(params, grads, &clip_scale(&norm, 0.5)?, rate)?;
            Ok((rate, norm.item()?))
        })
    };
    let at_once = |mesh: &DeviceMesh| {
        let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).rate(SCHEDULE).clip(0.5);
        train(mesh, |number, params, grads| {
            let report = optimizer.step(params, grads)?;
            assert_eq!((report.step, optimizer.steps()), (number, number + 1));
            Ok((report.rate, report.norm.expect("a limit was set").item()?))
        })
    };
    let single = on("1", by_parts);
    assert!(single.1.iter().all(|&(_, norm)| norm > 0.5), "every step is clipped: {single:?}");
    for mesh in MESHES {
        assert_eq!(on(mesh, by_parts), single, "{mesh}");
        assert_eq!(on(mesh, at_once), single, "{mesh}");
    }
}

#[test]
fn without_a_limit_nothing_is_scaled() {
    let plain = |limit: Option<f64>| {
        move |mesh: &DeviceMesh| {
            let optimizer =
                Sgd::new().momentum(0.5).nesterov().decay(0.1).rate(|step: usize| 0.1 / (step + 1) as f64);
            let mut optimizer = match limit {
                Some(limit) => optimizer.clip(limit),
                None => optimizer,
            };
            train(mesh, |_, params, grads| {
                let report = optimizer.step(params, grads)?;
                assert_eq!(report.norm.is_some(), limit.is_some());
                Ok((report.rate, 0.0))
            })
        }
    };
    let (digest, rates) = on("1", plain(None));
    assert_eq!(rates.iter().map(|r| r.0).collect::<Vec<_>>(), [0.1, 0.05, 0.1 / 3.0, 0.025]);
    for mesh in MESHES {
        assert_eq!(on(mesh, plain(None)).0, digest, "{mesh}");
        assert_eq!(on(mesh, plain(Some(f64::INFINITY))).0, digest, "{mesh}");
    }
    assert_ne!(on("1", plain(Some(1e-3))).0, digest);
}

/// Three steps on two blocks, whose gradients do not depend on the parameters: each parameter's values depend on its own
/// settings only.
fn blocks<R: UpdateRule>(mesh: &DeviceMesh, mut rule: R, lr: f64) -> Result<Vec<Vec<f32>>> {
    let axis = mesh.mesh().axis_name(0);
    let plan =
        if axis == "tp" { Plan::default().shard("h.*.weight", "tp", 1) } else { Plan::default().fsdp(axis) };
    let mut params = Params::new(mesh, plan, 7)?;
    let mut declare = |i: usize| -> Result<[ParamId; 2]> {
        let mut root = params.root();
        let mut h = root.child("h");
        let mut block = h.child(i);
        let init = Init::Normal { mean: 1.0, std: 0.5 };
        Ok([block.param("weight", [5, 3], init)?, block.param("bias", [3], init)?])
    };
    let ids = [declare(0)?, declare(1)?].concat();
    let one = DTensor::full(mesh, DType::F32, [], Layout::replicated(mesh.mesh().ndim()), 1.0)?;
    for step in 0..3 {
        let sums = ids.iter().enumerate().map(|(i, &id)| {
            params
                .value(id)
                .mul_scalar((i + 1) as f64 * if step == 1 { -1.0 } else { 0.5 })?
                .sum_all()?
                .reduce_partial()
        });
        let sums = sums.collect::<Result<Vec<_>>>()?;
        let mut loss = sums[1..].iter().try_fold(sums[0].clone(), |a, b| a.add(b))?;
        rule.step(&mut params, &mut loss.backward()?, &one, &lr.into())?;
    }
    ids.iter().map(|&id| params.value(id).full_tensor()?.to_vec::<f32>()).collect()
}

#[test]
fn groups_by_pattern_have_settings_of_their_own() {
    let adam = || AdamW::new().betas(0.9, 0.95).decay(0.1);
    type Case = (fn() -> AdamW, fn() -> AdamW, f64);
    // A rule with a group, and a rule and rate that hold for all: the group's parameters have the values of the second.
    let cases: [(&str, Case); 3] = [
        (
            "rate",
            (
                || AdamW::new().betas(0.9, 0.95).decay(0.1).group_rate("h.1.*", 0.25),
                || AdamW::new().betas(0.9, 0.95).decay(0.1),
                0.125,
            ),
        ),
        (
            "betas",
            (
                || AdamW::new().betas(0.9, 0.95).decay(0.1).group_betas("h.1.*", 0.5, 0.75),
                || AdamW::new().betas(0.5, 0.75).decay(0.1),
                0.5,
            ),
        ),
        (
            "decay",
            (
                || {
                    AdamW::new()
                        .betas(0.9, 0.95)
                        .decay(0.1)
                        .group_decay("h.*.*", 0.4)
                        .group_decay("h.0.*", 0.1)
                        .group_decay("h.0.bias", 0.0)
                },
                // Without a group, biases do not decay.
                || AdamW::new().betas(0.9, 0.95).decay(0.4).group_decay("h.*.bias", 0.4),
                0.5,
            ),
        ),
    ];
    for mesh in ["dp=1", "fsdp=2", "tp=3"] {
        let plain = on(mesh, move |mesh| blocks(mesh, adam(), 0.5));
        for (name, (grouped, all, rate)) in cases {
            let grouped = on(mesh, move |mesh| blocks(mesh, grouped(), 0.5));
            let all = on(mesh, move |mesh| blocks(mesh, all(), rate));
            assert_eq!(grouped[..2], plain[..2], "{name} on {mesh}: parameters outside the group");
            assert_eq!(grouped[2..], all[2..], "{name} on {mesh}: parameters of the group");
            assert!(grouped[2] != plain[2] && grouped[3] != plain[3], "{name} on {mesh}");
        }
    }
    let sgd = on("fsdp=2", |mesh| {
        blocks(
            mesh,
            Sgd::new().momentum(0.5).decay(0.1).group_rate("*.0.*", 0.5).group_decay("*.1.*", 0.0),
            0.5,
        )
    });
    assert_eq!(sgd[..2], on("fsdp=2", |mesh| blocks(mesh, Sgd::new().momentum(0.5).decay(0.1), 0.25))[..2]);
    assert_eq!(sgd[2..], on("fsdp=2", |mesh| blocks(mesh, Sgd::new().momentum(0.5), 0.5))[2..]);
}

/// A group has the values of the same settings one by one, on every mesh, and an adjustment changes one of them.
#[test]
fn a_group_sets_several_settings_at_once() {
    let slow = ParamGroup::new().rate(0.25).decay(0.4);
    for mesh in ["dp=1", "fsdp=2", "tp=3"] {
        let adam = || AdamW::new().betas(0.9, 0.95).decay(0.1);
        let at_once = on(mesh, move |mesh| blocks(mesh, adam().group("h.1.*", slow.betas(0.5, 0.75)), 0.5));
        let one_by_one = on(mesh, move |mesh| {
            let rule = adam().group_rate("h.1.*", 0.25).group_decay("h.1.*", 0.4);
            blocks(mesh, rule.group_betas("h.1.*", 0.5, 0.75), 0.5)
        });
        assert_eq!(at_once, one_by_one, "{mesh}");
        // Adjusted, the bias decays as without a group: not at all.
        let adjusted =
            on(mesh, move |mesh| blocks(mesh, adam().group_decay("**.bias", 0.0).group("h.1.*", slow), 0.5));
        let weight_alone = on(mesh, move |mesh| {
            blocks(
                mesh,
                adam().group("h.1.weight", slow).group("h.1.bias", ParamGroup::new().rate(0.25)),
                0.5,
            )
        });
        assert_eq!(adjusted, weight_alone, "{mesh}");
        let sgd = |group: fn(Sgd) -> Sgd| {
            on(mesh, move |mesh| blocks(mesh, group(Sgd::new().momentum(0.5).nesterov().decay(0.1)), 0.5))
        };
        let grouped = sgd(|sgd| sgd.group("*.0.**", ParamGroup::new().rate(0.5).decay(0.0)));
        assert_eq!(grouped, sgd(|sgd| sgd.group_rate("*.0.*", 0.5).group_decay("*.0.*", 0.0)), "{mesh}");
    }
}

#[test]
fn groups_that_overlap_or_set_too_much_are_refused() {
    on("fsdp=2", |mesh| {
        let mut params = Params::new(mesh, Plan::default().fsdp("fsdp"), 7)?;
        let w = params.root().child("h").child(0).param("bias", [3], Init::Ones)?;
        let mut grads = params.value(w).sum_all()?.backward()?;
        let group = ParamGroup::new().rate(0.5);
        let mut twice =
            AdamW::new().betas(0.9, 0.95).decay(0.1).group("h.**", group).group("**.bias", group).rate(0.5);
        assert_eq!(
            twice.step(&mut params, &mut grads).unwrap_err().to_string(),
            "adamw: a parameter is in two groups; got h.0.bias in \"h.**\" and \"**.bias\"; \
             change single settings of some of a group by an adjustment, such as group_decay"
        );
        let sgd = || Sgd::new();
        let refused = |sgd: Sgd, params: &mut Params, grads: &mut Gradients| {
            sgd.rate(0.5).step(params, grads).unwrap_err().to_string()
        };
        let text = refused(sgd().group("h.**", group.betas(0.9, 0.9)), &mut params, &mut grads);
        assert_eq!(text, "sgd: a group has settings that the rule has; got betas at h.0.bias");
        let text = refused(sgd().group("head", group), &mut params, &mut grads);
        assert!(text.starts_with("sgd: a pattern matches no parameter; got \"head\""), "{text}");
        let text = refused(sgd().group("h.**", group.decay(-1.0)), &mut params, &mut grads);
        assert!(text.starts_with("sgd: a weight decay is finite and at least 0; got -1"), "{text}");
        assert!(grads.get(params.value(w)).is_some(), "the gradient is there for another try");
        assert_eq!(params.value(w).full_tensor()?.to_vec::<f32>()?, [1.0; 3]);
        Ok(())
    });
}

/// A state that is read and given to another optimizer continues with equal bits; one that does not fit is refused.
#[test]
fn states_are_read_and_replaced() {
    let run = |mesh: &DeviceMesh, transplanted: bool| {
        let mut params = Params::new(mesh, Plan::default().fsdp("fsdp"), 7)?;
        let w = params.root().param("w", [5, 2], Init::Normal { mean: 0.0, std: 1.0 })?;
        let other = params.root().param("other", [2], Init::Ones)?;
        let one = DTensor::full(mesh, DType::F32, [], Layout::replicated(1), 1.0)?;
        let mut sgd = Sgd::new().momentum(0.5).decay(0.1);
        for _ in 0..3 {
            let mut grads = params.value(w).mul(params.value(w))?.sum_all()?.backward()?;
            sgd.step(&mut params, &mut grads, &one, 0.125)?;
            if transplanted {
                let mut fresh = Sgd::new().momentum(0.5).decay(0.1);
                let momentum = sgd.momenta().get(w).expect("it had a step").clone();
                fresh.momenta_mut().set(&params, w, momentum.clone())?;
                let refused = fresh.momenta_mut().set(&params, other, momentum).unwrap_err().to_string();
                assert!(refused.starts_with("set: a state has its parameter's dtype, shape and layout"));
                let foreign = Params::new(mesh, Plan::default(), 7)?;
                let zeros = params.zeros_like(w)?;
                assert!(fresh.momenta_mut().set(&foreign, w, zeros).is_err());
                sgd = fresh;
            }
        }
        params.digest()
    };
    let single = on("fsdp=1", move |mesh| run(mesh, false));
    for mesh in ["fsdp=1", "fsdp=3"] {
        assert_eq!(on(mesh, move |mesh| run(mesh, true)), single, "{mesh}");
    }
}

#[test]
fn a_group_that_matches_nothing_changes_nothing() {
    on("fsdp=2", |mesh| {
        let mut params = Params::new(mesh, Plan::default().fsdp("fsdp"), 7)?;
        let w = params.root().child("h").child(0).param("weight", [3], Init::Ones)?;
        let mut grads = params.value(w).sum_all()?.backward()?;
        let mut optimizer = AdamW::new().betas(0.9, 0.95).decay(0.1).group_decay("h.*.wieght", 0.0).rate(0.5);
        let refused = optimizer.step(&mut params, &mut grads).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "adamw: a pattern matches no parameter; got \"h.*.wieght\" among 1 parameter(s); the nearest are h.*.weight"
        );
        assert_eq!(optimizer.steps(), 0);
        assert!(grads.get(params.value(w)).is_some(), "the gradient is there for another try");
        assert_eq!(params.value(w).full_tensor()?.to_vec::<f32>()?, [1.0; 3]);
        let refused = Sgd::new().group_rate("head", 0.5).rate(0.5).step(&mut params, &mut grads);
        assert!(refused.unwrap_err().to_string().starts_with("sgd: a pattern matches no parameter"));
        Ok(())
    });
}

#[test]
fn gradients_of_an_older_step_are_refused() {
    on("fsdp=2", |mesh| {
        let mut params = Params::new(mesh, Plan::default().fsdp("fsdp"), 7)?;
        let w = params.root().param("w", [3], Init::Ones)?;
        let mut loss = params.value(w).sum_all()?;
        let mut optimizer = Sgd::new().rate(0.5).clip(1.0);
        optimizer.step(&mut params, &mut loss.backward_keeping()?)?;
        let refused: Error = optimizer.step(&mut params, &mut loss.backward()?).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "step: no parameter has a gradient; got 1 parameter(s); compute the loss from these parameters after the last step"
        );
        assert_eq!(optimizer.steps(), 1);
        Ok(())
    });
}

/// Settings that would spoil the parameters are refused, and nothing has changed then.
#[test]
fn unsound_settings_are_refused() {
    let (texts, ones, large) = on("fsdp=3", |mesh| {
        let mut params = Params::new(mesh, Plan::default().fsdp("fsdp"), 7)?;
        let w = params.root().param("w", [4], Init::Ones)?;
        let adam = |betas: (f64, f64), decay| AdamW::new().betas(betas.0, betas.1).decay(decay);
        let sound = || adam((0.9, 0.99), 0.1);
        let unsound = [
            sound().rate(-1.0),
            sound().rate(f64::NAN),
            adam((1.0, 0.99), 0.1).rate(0.1),
            adam((0.9, 0.99), -0.1).rate(0.1),
            sound().group_rate("w", -2.0).rate(0.1),
            sound().rate(0.1).clip(0.0),
            sound().rate(0.1).clip(f64::NAN),
        ];
        let mut texts = Vec::new();
        for mut optimizer in unsound {
            let mut grads = params.value(w).sum_all()?.backward()?;
            texts.push(optimizer.step(&mut params, &mut grads).unwrap_err().to_string());
            assert_eq!(optimizer.steps(), 0);
        }
        let ones = params.value(w).full_tensor()?.to_f64_vec();
        // The sum of these squares overflows f32; without a limit nothing is clipped.
        let mut grads = params.value(w).mul_scalar(1.5e19)?.sum_all()?.backward()?;
        sound().rate(0.1).clip(f64::INFINITY).step(&mut params, &mut grads)?;
        Ok((texts, ones, params.value(w).full_tensor()?.to_f64_vec()))
    });
    assert_eq!(ones, [1.0; 4]);
    let rules = ["learning rate", "learning rate", "beta", "weight decay", "learning rate", "limit", "limit"];
    for (text, rule) in texts.iter().zip(rules) {
        assert!(text.contains(rule), "{text}");
    }
    assert!(large.iter().all(|x| x.is_finite() && *x < 1.0), "{large:?}");
}

/// Lion by operators (Chen et al. 2023, algorithm 2).
#[derive(Default)]
struct LionByOperators(ParamStates);

impl UpdateRule for LionByOperators {
    fn step(
        &mut self,
        params: &mut Params,
        grads: &mut Gradients,
        scale: &DTensor,
        rates: &Rates,
    ) -> Result<()> {
        params.update_by(grads, [&mut self.0], |id, p, g, [m]| {
            let (g, lr) = (g.mul(scale)?, rates.of(id));
            let direction = m.mul_scalar(0.9)?.add(&g.mul_scalar(0.1)?)?.sign()?;
            let p = p.mul_scalar(1.0 - lr * 0.1)?.sub(&direction.mul_scalar(lr)?)?;
            Ok((p, [m.mul_scalar(0.99)?.add(&g.mul_scalar(0.01)?)?]))
        })
    }
}

/// A step by operators receives what AdamW's kernel receives, the norm, though the ranks' shards are as uneven as can be, and gives the
/// bits of one rank.
#[test]
fn an_optimizer_of_operators_moves_nothing() {
    fn train<R: UpdateRule + 'static>(mesh: &'static str, rule: fn() -> R) -> (u64, u64, u64) {
        let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
        let all = spmd(ranks, move |rank| {
            let (rank, tally) = Tally::of(&rank)?;
            let mesh = DeviceMesh::parse(&rank, mesh)?;
            let mut params = Params::new(&mesh, Plan::default(), 7)?;
            let init = Init::Normal { mean: 0.0, std: 0.1 };
            for (name, shape) in
                [("a", vec![257, 340]), ("b", vec![1, 700]), ("c", vec![2]), ("d", vec![3, 5, 64])]
            {
                params.root().param(name, shape, init)?;
            }
            // The unit's buffer is shared equally, so its parameters are not: a rank has nearly all rows of one, and none of another.
            fully_shard(&mut params, &[], &Sharding::zero3("fsdp"), &BlockPolicy::default())?;
            let uneven = |x: &DTensor| x.local().numel() * 2 > x.numel() || x.local().numel() == 0;
            assert!(rank.world_len() == 1 || params.values().any(uneven));
            let mut optimizer = Optimizer::new(rule(), 0.01).clip(1.0);
            let mut received = (0, 0);
            for _ in 0..3 {
                let squares = params.values().map(|x| x.mul(x)?.sum_all()).collect::<Result<Vec<_>>>()?;
                let mut loss = squares[1..].iter().try_fold(squares[0].clone(), |a, b| a.add(b))?;
                let mut gradients = loss.backward()?;
                let before = tally.total();
                optimizer.step(&mut params, &mut gradients)?;
                let total = tally.total();
                received = (total.received_bytes - before.received_bytes, total.calls - before.calls);
            }
            Ok((params.digest()?, received.0, received.1))
        });
        all.unwrap_or_else(|e| panic!("{mesh}: {e}"))
            .into_iter()
            .max_by_key(|(_, bytes, _)| *bytes)
            .expect("a rank")
    }
    let single = train("fsdp=1", LionByOperators::default);
    let (digest, bytes, calls) = train("fsdp=3", LionByOperators::default);
    let (_, adams_bytes, adams_calls) = train("fsdp=3", AdamW::new);
    assert_eq!(digest, single.0);
    assert!(
        bytes <= adams_bytes && calls <= adams_calls,
        "{bytes} bytes in {calls} calls; {adams_bytes} in {adams_calls}"
    );
    assert!(bytes < 1000, "{bytes} bytes");
}

/// A function that fails leaves parameters, gradients and states as they were.
#[test]
fn a_failed_update_by_operators_loses_nothing() {
    on("fsdp=2", |mesh| {
        let mut params = Params::new(mesh, Plan::default().fsdp("fsdp"), 7)?;
        let (a, b) = (params.root().param("a", [3], Init::Ones)?, params.root().param("b", [5], Init::Ones)?);
        let mut states = ParamStates::default();
        let mut loss = params.value(a).sum_all()?.add(&params.value(b).sum_all()?)?;
        let mut grads = loss.backward()?;
        let refused = params.update_by(&mut grads, [&mut states], |id, p, g, [m]| match id == b {
            true => Ok((p.cast(DType::F64)?, [m.clone()])), // not the parameter's dtype
            false => Ok((p.sub(g)?, [g.clone()])),
        });
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("parameter b has another dtype, shape or layout"), "{text}");
        assert!(grads.get(params.value(a)).is_none() && grads.get(params.value(b)).is_some());
        assert_eq!(params.value(a).full_tensor()?.to_vec::<f32>()?, [0.0; 3], "updated before");
        assert_eq!(params.value(b).full_tensor()?.to_vec::<f32>()?, [1.0; 5]);
        assert_eq!(states.get(b).expect("made").full_tensor()?.to_vec::<f32>()?, [0.0; 5]);
        Ok(())
    });
}

/// Two groups with limits of their own, and the other gradients, have the bits of one rank and the norms of their parts.
#[test]
fn gradients_are_limited_by_group_and_by_other_norms() {
    let step = |mesh: &'static str| {
        on(mesh, |mesh| {
            let plan =
                (0..mesh.mesh().ndim()).fold(Plan::default(), |plan, a| match mesh.mesh().axis_name(a) {
                    "fsdp" => plan.fsdp("fsdp"),
                    "tp" => plan.shard("h.*.weight", "tp", 1),
                    axis => plan.batch(axis),
                });
            let mut params = Params::new(mesh, plan, 7)?;
            let ids = ["h.0.weight", "h.1.weight", "head"]
                .map(|path| params.root().param(path, [6, 4], Init::Normal { mean: 0.0, std: 1.0 }));
            let ids = ids.into_iter().collect::<Result<Vec<ParamId>>>()?;
            let loss = |params: &Params| {
                let squares = ids.iter().map(|&id| params.value(id).mul(params.value(id))?.sum_all());
                let squares = squares.collect::<Result<Vec<_>>>()?;
                squares[1..].iter().try_fold(squares[0].clone(), |a, b| a.add(b))
            };
            let before = params.value(ids[0]).full_tensor()?.to_f64_vec();
            let mut optimizer =
                Sgd::new().rate(1.0).clip_group("h.0.*", 0.5).clip_norm(f64::INFINITY, 0.25).clip_value(3.0);
            let mut grads = loss(&params)?.backward()?;
            let report = optimizer.step(&mut params, &mut grads)?;
            let after = params.value(ids[0]).full_tensor()?.to_f64_vec();
            let moved: f64 = before.iter().zip(&after).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
            assert!((moved - 0.5).abs() < 1e-5, "the group's step has its limit: {moved}");
            let norm = report.norm.expect("there is a limit").item()?;
            assert!(norm <= 3.0, "{norm}: elements are limited first");
            Ok((params.digest()?, norm.to_bits()))
        })
    };
    let single = step("1");
    for mesh in ["fsdp=3", "tp=2", "dp=2,fsdp=2"] {
        assert_eq!(step(mesh), single, "{mesh}");
    }
    on("1", |mesh| {
        let mut params = Params::new(mesh, Plan::default(), 7)?;
        let w = params.root().param("w", [2], Init::Ones)?;
        for (wrong, text) in [
            (Sgd::new().rate(1.0).clip_group("v", 1.0), "clip: a pattern matches no parameter"),
            (
                Sgd::new().rate(1.0).clip_group("w", 1.0).clip_group("**", 1.0),
                "clip: a parameter is in two groups",
            ),
            (Sgd::new().rate(1.0).clip_value(f64::NAN), "clip: a limit of elements is above 0"),
            (Sgd::new().rate(1.0).group_schedule("v", 1.0), "step: a pattern matches no parameter"),
            (
                Sgd::new().rate(1.0).group_schedule("w", 1.0).group_schedule("**", 1.0),
                "step: a parameter has two schedules",
            ),
            (
                Sgd::new().rate(1.0).group_schedule("w", -1.0),
                "step: a learning rate is finite and at least 0",
            ),
        ] {
            let (mut wrong, mut grads) = (wrong, params.value(w).sum_all()?.backward()?);
            let refused = wrong.step(&mut params, &mut grads).unwrap_err().to_string();
            assert!(refused.starts_with(text), "{refused}");
            assert_eq!(params.value(w).full_tensor()?.to_vec::<f32>()?, [1.0; 2]);
        }
        Ok(())
    });
}

/// f16 with a scaled loss trains with the bits of one rank, and overflows on one rank's shard are known on all.
#[test]
fn scaled_losses_have_one_curve() {
    let train = |mesh: &'static str| {
        on(mesh, |mesh| {
            let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: false })?;
            let mut params = Params::new(mesh, plan, 7)?;
            params.compute_in(DType::F16)?;
            let config = GptConfig {
                vocabulary: 11,
                block: 6,
                layers: 1,
                heads: 2,
                width: 12,
                dropout: 0.0,
                bias: true,
            };
            let model = Gpt::new(&mut params, config)?;
            let text = Tensor::from_vec((0..24i64).map(|i| i * i % 11).collect(), [4, 6])?;
            let tokens = params.batch(&text)?;
            let (mut scale, mut optimizer) = (LossScale::new().interval(2), AdamW::new().rate(1e-2));
            let mut factors = Vec::new();
            for _ in 0..6 {
                let loss = model.loss(&Forward::train_without_dropout(&params), &tokens, &tokens)?;
                let mut grads = scale.scale(&loss)?.backward()?;
                if scale.unscale(&params, &mut grads)? {
                    optimizer.step(&mut params, &mut grads)?;
                }
                factors.push(scale.factor());
            }
            assert!(optimizer.steps() >= 2, "{factors:?}");
            Ok((params.digest()?, factors))
        })
    };
    let single = train("1");
    for mesh in ["fsdp=3", "tp=2"] {
        assert_eq!(train(mesh), single, "{mesh}");
    }
}

/// Without the scope a product with a scalar balances the work of a tensor that one rank has nearly all of; in the scope it stays.
#[test]
fn layouts_are_kept_in_a_scope_that_asks_for_it() {
    on("fsdp=3", |mesh| {
        let x = DTensor::ones(mesh, DType::F32, [256, 16384], "(RS(0..1; 1,255,0))")?;
        let half = DTensor::full(mesh, DType::F32, [], "(R)", 0.5)?;
        let moved = x.mul(&half)?;
        let guard = mesh.keep_layouts();
        let kept = x.mul(&half)?;
        drop(guard);
        assert_ne!(moved.layout(), x.layout());
        assert_eq!(kept.layout(), x.layout());
        assert_eq!(kept.full_tensor()?.to_vec::<f32>()?, moved.full_tensor()?.to_vec::<f32>()?);
        Ok(())
    });
}
