//! Frozen parameters: no gradient, no reduction, no optimizer state; the others learn with the same bits on every mesh.

use isoshard::checkpoint::{self, Checkpoint, StateTree};
use isoshard::comm::Rank;
use isoshard::dtensor::{DTensor, DeviceMesh, Gradients};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::optim::{AdamW, UpdateRule};
use isoshard::placement::Mesh;
use isoshard::rng::Generator;
use isoshard::tensor::Tensor;
use isoshard::{Result, comm::spmd};

const CONFIG: GptConfig =
    GptConfig { vocabulary: 11, block: 6, layers: 3, heads: 2, width: 8, dropout: 0.1, bias: true };
const MESHES: [&str; 6] = ["1", "dp=2", "fsdp=2", "fsdp=3", "tp=2", "fsdp=2,tp=2"];

/// A model and a batch on a mesh.
struct Setup {
    params: Params,
    model: Gpt,
    tokens: DTensor,
    targets: DTensor,
}

impl Setup {
    fn new(rank: &Rank, mesh: &str) -> Result<Setup> {
        let mesh = DeviceMesh::parse(rank, mesh)?;
        let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: false })?;
        let layout = plan.batch_layout(mesh.mesh());
        let mut params = Params::new(&mesh, plan, 7)?;
        let model = Gpt::new(&mut params, CONFIG)?;
        let text = |from: i64| Tensor::from_vec((from..from + 30).map(|i| i * i % 11).collect(), [5, 6]);
        let tokens = DTensor::distribute(&mesh, &text(0)?, layout.clone())?;
        let targets = DTensor::distribute(&mesh, &text(1)?, layout)?;
        Ok(Setup { params, model, tokens, targets })
    }

    /// Returns the gradients, and the bytes that the backward pass received.
    fn gradients(&self, dropout: &mut Generator) -> Result<(Gradients, u64)> {
        let cx = Forward::train(&self.params, dropout);
        let mut loss = self.model.loss(&cx, &self.tokens, &self.targets)?;
        drop(cx);
        let before = self.params.mesh().received_bytes();
        let gradients = loss.backward()?;
        Ok((gradients, self.params.mesh().received_bytes() - before))
    }

    fn values(&self) -> Result<Vec<(String, Vec<f64>)>> {
        let value = |id| Ok((self.params.path(id).into(), self.params.value(id).full_tensor()?.to_f64_vec()));
        self.params.ids().map(value).collect()
    }
}

fn on(mesh: &'static str, run: impl Fn(Rank) -> Result<()> + Send + Sync + 'static) {
    let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
    spmd(ranks, run).unwrap_or_else(|e| panic!("{mesh}: {e}"));
}

#[test]
fn gradients_of_the_others_keep_their_bits_and_nothing_else_is_reduced() {
    for mesh in MESHES {
        on(mesh, move |rank| {
            let mut setup = Setup::new(&rank, mesh)?;
            let (all, bytes_of_all) = setup.gradients(&mut Generator::new(1))?;
            assert_eq!(setup.params.freeze("**")?, setup.params.len());
            let learning = ["h.1.mlp.down.bias", "norm.weight", "h.0.attn_norm.bias"];
            for path in learning {
                assert_eq!(setup.params.unfreeze(path)?, 1);
            }
            let (some, bytes_of_some) = setup.gradients(&mut Generator::new(1))?;
            for id in setup.params.ids() {
                let path = setup.params.path(id).to_string();
                let gradient = some.get(setup.params.value(id));
                assert_eq!(gradient.is_some(), learning.contains(&&*path), "{mesh}: {path}");
                assert_eq!(setup.params.is_frozen(id), gradient.is_none(), "{mesh}: {path}");
            }
            match mesh {
                "dp=2" => assert!(20 * bytes_of_some < bytes_of_all, "{bytes_of_some} of {bytes_of_all}"),
                // Under tensor parallelism the backward pass reduces gradients of activations alone.
                "1" | "tp=2" => assert!(bytes_of_some <= bytes_of_all, "{mesh}"),
                _ => assert!(bytes_of_some < bytes_of_all, "{mesh}: {bytes_of_some} of {bytes_of_all}"),
            }
            // Leaf tensors that were frozen are new ones: compare with a set-up that never was.
            let fresh = Setup::new(&rank, mesh)?;
            let (whole, _) = fresh.gradients(&mut Generator::new(1))?;
            drop(all);
            for path in learning {
                let [a, b] = [(&setup, &some), (&fresh, &whole)].map(|(setup, gradients)| {
                    let id = setup.params.find(path).expect("it is declared");
                    gradients.get(setup.params.value(id)).expect("it learns").full_tensor()
                });
                assert_eq!(a?.to_vec::<f32>()?, b?.to_vec::<f32>()?, "{mesh}: {path}");
            }
            Ok(())
        });
    }
}

/// Two steps with all but one block frozen: the same bits on every mesh, nothing else moves, and no moments are kept
/// for frozen parameters.
#[test]
fn the_rest_is_trained_with_the_same_bits_on_every_mesh() {
    let train = |mesh: &'static str| {
        let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
        let run = move |rank: Rank| {
            let mut setup = Setup::new(&rank, mesh)?;
            let before = setup.values()?;
            setup.params.freeze("**")?;
            assert!(setup.params.unfreeze("h.1.**")? > 5);
            let mut rule = AdamW::new().betas(0.9, 0.95).decay(0.1);
            let mut dropout = Generator::new(1);
            for _ in 0..2 {
                let (mut gradients, _) = setup.gradients(&mut dropout)?;
                let one = setup.params.grad_norm(&gradients)?;
                let one = one.sub(&one)?.add_scalar(1.0)?;
                rule.step(&mut setup.params, &mut gradients, &one, 0.01)?;
            }
            let after = setup.values()?;
            for ((path, old), (_, new)) in before.iter().zip(&after) {
                assert_eq!(old != new, path.starts_with("h.1."), "{path}");
            }
            let state = UpdateRule::state(&rule, &setup.params)?;
            let names: Vec<&str> = state.tensors().map(|(name, _)| name).collect();
            let learning = after.iter().filter(|(path, _)| path.starts_with("h.1.")).count();
            assert_eq!(names.len(), 2 * learning);
            assert!(
                names.iter().all(|name| name.split_once('.').is_some_and(|(_, p)| p.starts_with("h.1.")))
            );
            setup.params.digest()
        };
        spmd(ranks, run).unwrap_or_else(|e| panic!("{mesh}: {e}")).remove(0)
    };
    let single = train("1");
    for mesh in MESHES {
        assert_eq!(train(mesh), single, "{mesh}");
    }
}

/// Steps with all parameters, with some frozen, and with all again: moments made before the freezing stay as they are,
/// in checkpoints too, and a run resumed while parameters are frozen has the bits of the uninterrupted one.
#[test]
fn parameters_that_freeze_in_mid_training_keep_their_moments() {
    const FROZEN: &str = "h.0.**";
    let dir =
        |mesh: &str| std::env::temp_dir().join(format!("isoshard-freeze-{}-{mesh}", std::process::id()));
    let step = |setup: &mut Setup, rule: &mut AdamW, number: u64| -> Result<()> {
        let (mut gradients, _) = setup.gradients(&mut Generator::new(number))?;
        let one = setup.params.grad_norm(&gradients)?;
        let one = one.sub(&one)?.add_scalar(1.0)?;
        rule.step(&mut setup.params, &mut gradients, &one, 0.01)
    };
    let moments = |setup: &Setup, rule: &AdamW| -> Result<Vec<(String, Vec<f64>)>> {
        let state = UpdateRule::state(rule, &setup.params)?;
        state.tensors().map(|(name, x)| Ok((name.to_string(), x.full_tensor()?.to_f64_vec()))).collect()
    };
    let is_frozen = |path: &str| path.starts_with("h.0.");
    let run = move |mesh: &'static str| {
        let dir = dir(mesh);
        let at = dir.clone();
        let train = move |rank: Rank| {
            let rule = || AdamW::new().betas(0.9, 0.95).decay(0.1);
            let (mut setup, mut adam) = (Setup::new(&rank, mesh)?, rule());
            step(&mut setup, &mut adam, 1)?;
            setup.params.freeze(FROZEN)?;
            let (values, old) = (setup.values()?, moments(&setup, &adam)?);
            step(&mut setup, &mut adam, 2)?;
            for ((path, before), (_, after)) in values.iter().zip(&setup.values()?) {
                assert_eq!(before == after, is_frozen(path), "{mesh}: {path}");
            }
            let new = moments(&setup, &adam)?;
            assert_eq!((old.len(), new.len()), (2 * values.len(), 2 * values.len()), "{mesh}");
            for ((name, before), (_, after)) in old.iter().zip(&new) {
                let path = name.split_once('.').expect("first. or second.").1;
                assert_eq!(before == after, is_frozen(path), "{mesh}: {name}");
            }
            let mut state = StateTree::new();
            state.insert_tree("model", setup.params.state()?)?;
            state.insert_tree("optimizer", UpdateRule::state(&adam, &setup.params)?)?;
            checkpoint::save(setup.params.mesh(), &at, &state)?;
            let saved = Checkpoint::open(&at)?;
            let (mut resumed, mut second) = (Setup::new(&rank, mesh)?, rule());
            resumed.params.load_state(&saved.subtree("model"))?;
            second.load_state(&resumed.params, &saved.subtree("optimizer"))?;
            let mut digests = Vec::new();
            for (setup, adam) in [(&mut setup, &mut adam), (&mut resumed, &mut second)] {
                setup.params.unfreeze("**")?;
                step(setup, adam, 3)?;
                digests.push(setup.params.digest()?);
            }
            assert_eq!(digests[0], digests[1], "{mesh}: resumed");
            Ok(digests[0])
        };
        let ranks = Mesh::parse(mesh, 0).unwrap().rank_len();
        let digest = spmd(ranks, train).unwrap_or_else(|e| panic!("{mesh}: {e}")).remove(0);
        std::fs::remove_dir_all(dir).unwrap();
        digest
    };
    let single = run("1");
    for mesh in &MESHES[1..] {
        assert_eq!(run(mesh), single, "{mesh}");
    }
}

#[test]
fn a_frozen_parameter_stays_frozen_when_it_is_replaced() {
    on("fsdp=2", |rank| {
        let mut setup = Setup::new(&rank, "fsdp=2")?;
        let id = setup.params.find("norm.weight").expect("it is declared");
        setup.params.freeze("norm.*")?;
        setup.params.set(id, setup.params.value(id).mul_scalar(2.0)?)?;
        assert!(setup.params.is_frozen(id));
        assert_eq!(setup.params.value(id).full_tensor()?.to_vec::<f32>()?, [2.0; 8]);
        setup.params.unfreeze("norm.weight")?;
        setup.params.set(id, setup.params.value(id).mul_scalar(2.0)?)?;
        assert!(!setup.params.is_frozen(id));
        let (gradients, _) = setup.gradients(&mut Generator::new(1))?;
        assert!(gradients.get(setup.params.value(id)).is_some());
        // A parameter that learns keeps its leaf tensor.
        setup.params.unfreeze("norm.weight")?;
        assert!(gradients.get(setup.params.value(id)).is_some());
        Ok(())
    });
}

#[test]
fn patterns_that_match_nothing_are_refused() {
    on("1", |rank| {
        let mut setup = Setup::new(&rank, "1")?;
        for (verb, refused) in [
            ("freeze", setup.params.freeze("h.*.attn.qvk.weight")),
            ("unfreeze", setup.params.unfreeze("**.qvk.*")),
        ] {
            let said = refused.unwrap_err().to_string();
            assert!(said.starts_with(&format!("{verb}: a pattern matches no parameter; got ")), "{said}");
        }
        assert!(setup.params.ids().all(|id| !setup.params.is_frozen(id)));
        // Nothing that learns: the backward pass says so.
        setup.params.freeze("**")?;
        assert!(setup.gradients(&mut Generator::new(1)).is_err());
        Ok(())
    });
}
