//! Checkpoints: what any mesh saves, any mesh loads by bits; damaged files are refused by name; a save that ends early
//! leaves nothing that looks whole.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use isoshard::Result;
use isoshard::checkpoint::{self, Checkpoint, CheckpointFolder, StateTree, WhileSaving};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::nn::{Forward, Gpt, GptConfig, Parallel, Params, Plan};
use isoshard::optim::{AdamW, Optimizer, Sgd, UpdateRule, WarmupCosine};
use isoshard::placement::{Layout, Mesh, Spec};
use isoshard::rng::Generator;
use isoshard::tensor::{DType, Shape, Tensor};
use isoshard::testing::strategies::{layouts, meshes, shapes};
use proptest::prelude::*;

use crate::common::index_file::{body_of, summed};
use crate::common::{bits_differ, on_mesh, part_of, small_ints, spmd, spread};

/// A folder that is removed at the end of a test.
pub struct TempFolder(PathBuf);

impl TempFolder {
    pub fn new() -> TempFolder {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("isoshard-checkpoints-{}-{number}", std::process::id()));
        fs::create_dir_all(&dir).expect("a temporary folder can be made");
        TempFolder(dir)
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The names of all entries, also hidden ones.
    fn entries(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).expect("the folder is there");
        let mut names: Vec<String> =
            entries.map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs a program on each rank of a mesh, and returns the results.
pub fn run_on<T: Send + 'static>(
    mesh: &'static str,
    f: impl Fn(&DeviceMesh) -> Result<T> + Send + Sync + 'static,
) -> Vec<T> {
    let ranks = Mesh::parse(mesh, 0).expect("a mesh").rank_len();
    spmd(ranks, move |rank| f(&DeviceMesh::parse(&rank, mesh)?)).unwrap_or_else(|e| panic!("{mesh}: {e}"))
}

/// Expects a refusal with this text.
#[track_caller]
pub fn expect_refusal<T>(result: Result<T>, text: &str) {
    let said = result.err().unwrap_or_else(|| panic!("nothing refused; wanted {text}")).to_string();
    assert!(said.contains(text), "{said}\nwanted {text}");
}

/// A tensor that is saved in one layout and loaded in another one, on another mesh.
#[derive(Clone, Debug)]
struct Moved {
    dtype: DType,
    shape: Shape,
    from: Spec,
    to: Spec,
}

fn moved(from: &Mesh, to: &Mesh) -> impl Strategy<Value = Moved> + use<> {
    let (from, to) = (from.clone(), to.clone());
    (proptest::sample::select(&DType::ALL[..]), shapes()).prop_flat_map(move |(dtype, shape)| {
        let partials = dtype.is_float();
        let specs = (layouts(&from, dtype, &shape, partials), layouts(&to, dtype, &shape, false));
        specs.prop_map(move |(from, to)| Moved { dtype, shape: shape.clone(), from, to })
    })
}

#[derive(Clone, Debug)]
struct Case {
    from: Mesh,
    to: Mesh,
    tensors: Vec<Moved>,
}

fn cases() -> impl Strategy<Value = Case> {
    (meshes(), meshes()).prop_flat_map(|(from, to)| {
        let tensors = proptest::collection::vec(moved(&from, &to), 1..=4);
        tensors.prop_map(move |tensors| Case { from: from.clone(), to: to.clone(), tensors })
    })
}

fn whole(number: usize, of: &Moved) -> Tensor {
    small_ints(of.dtype, &of.shape, 31 * number as u64 + 5)
}

fn save_case(case: &Case, dir: &Path) -> std::result::Result<(), String> {
    let (tensors, dir) = (case.tensors.clone(), dir.to_path_buf());
    on_mesh(&case.from, move |mesh| {
        let mut state = StateTree::new();
        for (number, of) in tensors.iter().enumerate() {
            state.insert(format!("t.{number}"), spread(mesh, &whole(number, of), &of.from, 3)?)?;
        }
        state.insert_value("count", tensors.len())?;
        checkpoint::save(mesh, &dir, &state)?;
        Ok(Vec::new())
    })
}

fn load_case(case: &Case, dir: &Path) -> std::result::Result<(), String> {
    let (tensors, dir) = (case.tensors.clone(), dir.to_path_buf());
    on_mesh(&case.to, move |mesh| {
        let saved = Checkpoint::open(&dir)?;
        assert_eq!(saved.value("count").and_then(|v| v.as_u64()), Some(tensors.len() as u64));
        let saved = saved.subtree("t");
        let names: Vec<String> = (0..tensors.len()).map(|number| number.to_string()).collect();
        let wanted: Vec<(&str, Layout)> =
            names.iter().zip(&tensors).map(|(name, of)| (&name[..], of.to.layout.clone())).collect();
        let mut wrong = Vec::new();
        for (number, loaded) in saved.tensors(mesh, &wanted)?.iter().enumerate() {
            let of = &tensors[number];
            let want = part_of(&whole(number, of), &of.to, mesh.mesh().coords(), 0);
            let local = loaded.local().to_device(isoshard::tensor::Device::Cpu)?;
            wrong.extend(bits_differ(&local, &want).map(|d| format!("{number} {}: {d}", of.to)));
        }
        Ok(wrong)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn any_mesh_loads_the_bits_that_any_mesh_saved(case in cases()) {
        let folder = TempFolder::new();
        let dir = folder.at("saved");
        save_case(&case, &dir).map_err(TestCaseError::fail)?;
        load_case(&case, &dir).map_err(TestCaseError::fail)?;
        prop_assert_eq!(folder.entries(), ["saved"]);
    }
}

/// A training program that saves its whole state: model, optimizer, schedule and dropout.
struct Training<R> {
    mesh: DeviceMesh,
    params: Params,
    model: Gpt,
    optimizer: Optimizer<R>,
    dropout: Generator,
}

impl<R: UpdateRule> Training<R> {
    fn new(mesh: &DeviceMesh, rule: R, seed: u64) -> Result<Training<R>> {
        let plan = Plan::transformer(mesh.mesh(), Parallel { heads: 2, sequence: false })?;
        let mut params = Params::new(mesh, plan, seed)?;
        let config =
            GptConfig { vocabulary: 11, block: 6, layers: 2, heads: 2, width: 8, dropout: 0.2, bias: true };
        let model = Gpt::new(&mut params, config)?;
        let schedule = WarmupCosine { peak: 0.05, floor: 0.01, warmup: 3, steps: 8 };
        let optimizer = Optimizer::new(rule, schedule).clip(1.0);
        Ok(Training {
            mesh: mesh.clone(),
            params,
            model,
            optimizer,
            dropout: Generator::new(seed).child("dropout"),
        })
    }

    fn step(&mut self) -> Result<f64> {
        let tokens = Tensor::from_vec((0..18).map(|i| (i * i + 3) % 11).collect::<Vec<i64>>(), [3, 6])?;
        let tokens =
            DTensor::distribute(&self.mesh, &tokens, self.params.plan().batch_layout(self.mesh.mesh()))?;
        let mut loss = self.model.loss(&Forward::train(&self.params, &mut self.dropout), &tokens, &tokens)?;
        self.optimizer.step(&mut self.params, &mut loss.backward()?)?;
        loss.item()
    }

    fn state(&self) -> Result<StateTree> {
        let mut state = StateTree::new();
        state.insert_tree("model", self.params.state()?)?;
        state.insert_tree("optimizer", self.optimizer.state(&self.params)?)?;
        state.insert_value("dropout", self.dropout.state().to_string())?;
        Ok(state)
    }

    fn load(&mut self, saved: &Checkpoint) -> Result<()> {
        self.params.load_state(&saved.subtree("model"))?;
        self.optimizer.load_state(&self.params, &saved.subtree("optimizer"))?;
        let text = saved.value("dropout").and_then(|value| value.as_str()).expect("saved");
        self.dropout.restore(text.parse()?);
        Ok(())
    }
}

/// Trains four steps without a pause, and two, saved while the third is computed, then two more on another mesh.
fn resumes<R: UpdateRule + 'static>(rule: fn() -> R) {
    let folder = TempFolder::new();
    let root = folder.at("run");
    let train = |text: &'static str, root: PathBuf, resume: bool| {
        run_on(text, move |mesh| {
            let mut training = Training::new(mesh, rule(), if resume { 8 } else { 7 })?;
            let mut checkpoints = CheckpointFolder::new(&root);
            let mut losses = Vec::new();
            if resume {
                let (step, saved) = checkpoints.newest(mesh)?.expect("saved");
                assert_eq!(step, 2);
                training.load(&saved)?;
            }
            for step in if resume { 2 } else { 0 }..4 {
                if step == 2 && !resume {
                    checkpoints.save_async(mesh, step, &training.state()?)?;
                }
                losses.push(training.step()?);
            }
            checkpoints.wait(mesh)?;
            Ok((losses, training.params.digest()?))
        })
        .remove(0)
    };
    let (losses, digest) = train("fsdp=2", root.clone(), false);
    for mesh in ["1", "fsdp=3", "dp=2,tp=2", "fsdp=2"] {
        let resumed = train(mesh, root.clone(), true);
        assert_eq!((&resumed.0[..], resumed.1), (&losses[2..], digest), "{mesh}");
    }
}

#[test]
fn a_resumed_run_has_the_bits_of_the_uninterrupted_one_on_any_mesh() {
    resumes(|| AdamW::new().betas(0.9, 0.99).decay(0.1));
    resumes(|| Sgd::new().momentum(0.9).nesterov().decay(0.01));
}

/// Saves a small checkpoint of three ranks: a sharded and a replicated tensor, and a value.
fn small(dir: &Path) {
    let dir = dir.to_path_buf();
    run_on("dp=3", move |mesh| {
        let mut state = StateTree::new();
        for (name, layout) in [("sharded", "(S0)"), ("whole", "(R)")] {
            let x = small_ints(DType::F32, &Shape::from([51, 7]), 3);
            state.insert(name, DTensor::distribute(mesh, &x, layout)?)?;
        }
        state.insert_value("step", 5)?;
        checkpoint::save(mesh, &dir, &state)
    });
}

/// The error of loading everything on a mesh of two ranks, which all ranks return.
fn refusal(dir: &Path) -> Option<String> {
    let dir = dir.to_path_buf();
    let mut all = run_on("tp=2", move |mesh| {
        let loaded = Checkpoint::open(&dir).and_then(|saved| {
            saved.tensors(mesh, &[("sharded", "(S1)".parse()?), ("whole", "(S0)".parse()?)])
        });
        Ok(loaded.err().map(|e| e.to_string()))
    });
    assert_eq!(all[0], all[1], "all ranks say the same");
    all.remove(0)
}

#[test]
fn damaged_files_are_refused_by_name() {
    let folder = TempFolder::new();
    let dir = folder.at("saved");
    small(&dir);
    assert_eq!(refusal(&dir), None);
    let part = |number: usize| dir.join(format!("part-{number:05}.safetensors"));
    let files: Vec<Vec<u8>> = (0..3).map(|number| fs::read(part(number)).unwrap()).collect();
    let restore =
        || files.iter().enumerate().for_each(|(number, bytes)| fs::write(part(number), bytes).unwrap());
    let expect = |wanted: &str| {
        let said = refusal(&dir).unwrap_or_else(|| panic!("nothing refused; wanted {wanted}"));
        assert!(said.contains(wanted), "{said}\nwanted {wanted}");
        restore();
    };
    let mut flipped = files[1].clone();
    *flipped.last_mut().unwrap() ^= 0x40;
    fs::write(part(1), &flipped).unwrap();
    expect("part-00001.safetensors: bytes ");

    let mut header = files[1].clone();
    header[20] ^= 1;
    fs::write(part(1), &header).unwrap();
    expect("part-00001.safetensors: the header's checksum differs from the index");

    fs::write(part(2), &files[2][..files[2].len() - 1]).unwrap();
    expect("part-00002.safetensors with ");

    fs::remove_file(part(0)).unwrap();
    expect("part-00000.safetensors: No such file");

    // Files of equal length that changed places.
    assert_eq!(files[1].len(), files[2].len());
    fs::write(part(1), &files[2]).unwrap();
    fs::write(part(2), &files[1]).unwrap();
    expect("the header's checksum differs from the index");

    let index = dir.join("checkpoint.json");
    let text = fs::read_to_string(&index).unwrap();
    for (from, to, wanted) in [
        ("part-00001", "../outside", "a file named"),
        ("\"shape\":[51,7]", "\"shape\":[51,8]", "pieces of 357 elements for [51, 8]"),
        ("\"start\":[0,0]", "\"start\":[1,0]", "in tensor"),
        ("sharded#1", "sharded#2", "a piece at [17, 0] named \"sharded#2\" in tensor \"sharded\""),
        ("{", "[", "the index is not one that this version writes"),
    ] {
        let body = body_of(&text);
        assert!(body.contains(from), "{from} in {text}");
        fs::write(&index, summed(&body.replacen(from, to, 1))).unwrap();
        expect(wanted);
        fs::write(&index, text.replacen(body, &body.replacen(from, to, 1), 1)).unwrap();
        expect("the index is not the one that was saved; got another checksum than its own at ");
    }
    fs::write(&index, text.replacen("isoshard checkpoint 2", "isoshard checkpoint 9", 1)).unwrap();
    expect("the index is not one that this version writes; got format \"isoshard checkpoint 9\"");
    fs::write(&index, &text[..text.len() / 2]).unwrap();
    expect("the index is not the one that was saved");
    fs::remove_file(&index).unwrap();
    expect("checkpoint.json: No such file");
}

#[test]
fn names_that_do_not_fit_are_refused_and_change_nothing() {
    let folder = TempFolder::new();
    let dir = folder.at("saved");
    small(&dir);
    run_on("tp=2", move |mesh| {
        let saved = Checkpoint::open(&dir)?;
        expect_refusal(saved.tensor(mesh, "hole", "(R)"), "the checkpoint has no such tensor; got \"hole\"");
        expect_refusal(saved.tensor(mesh, "whole", "(P(sum))"), "a checkpoint has values, not partial ones");
        expect_refusal(saved.tensor(mesh, "whole", "(S2)"), "shards a dim that is not there");
        let mut params = Params::new(mesh, Plan::default(), 1)?;
        let zeros = isoshard::rng::Init::Zeros;
        params.root().param("whole", [51, 7], zeros)?;
        expect_refusal(params.load_state(&saved), "has tensors that are no parameters; got \"sharded\"");
        params.root().param("sharded", [51, 7], zeros)?;
        params.root().param("third", [], zeros)?;
        expect_refusal(params.load_state(&saved), "lacks parameters; got \"third\"");
        assert!(params.values().all(|x| x.local().to_f64_vec().iter().all(|&x| x == 0.0)));
        let mut other = Params::new(mesh, Plan::default(), 1)?;
        other.root().param("whole", [51, 7], zeros)?;
        other.root().param("sharded", [7, 51], zeros)?;
        expect_refusal(other.load_state(&saved), "sharded has another dtype or shape in the checkpoint");
        Ok(())
    });
}

#[test]
fn ranks_that_save_different_things_are_refused() {
    let folder = TempFolder::new();
    let (dir, root) = (folder.at("saved"), folder.0.clone());
    run_on("dp=2", move |mesh| {
        let mut state = StateTree::new();
        state.insert_value("step", mesh.rank().rank())?;
        let saved = checkpoint::save(mesh, &dir, &state);
        expect_refusal(saved, "all ranks save the same names, specs and values");
        Ok(())
    });
    assert_eq!(fs::read_dir(root).unwrap().count(), 0);
}

#[test]
fn a_rank_that_cannot_write_fails_every_rank_and_leaves_nothing() {
    let folder = TempFolder::new();
    let root = folder.0.clone();
    let all = run_on("dp=2", move |mesh| {
        let mut state = StateTree::new();
        let x = small_ints(DType::F32, &Shape::from([8]), 3);
        state.insert("x", DTensor::distribute(mesh, &x, "(S0)")?)?;
        let mut checkpoints = CheckpointFolder::new(&root).patience(std::time::Duration::from_millis(300));
        checkpoints.save(mesh, 1, &state)?;
        // A folder stands where a rank, by turns, wants to write its file.
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let (until, folder) = (stop.clone(), root.clone());
        let obstacle = std::thread::spawn(move || {
            // Each unfinished save gets one: the first rank removes the folder afterwards.
            let mut served = std::collections::HashSet::new();
            while !until.load(Ordering::Relaxed) {
                for entry in fs::read_dir(&folder).expect("readable").flatten() {
                    let is_unfinished = entry.file_name().to_string_lossy().ends_with(".unfinished");
                    if is_unfinished && served.insert(entry.file_name()) {
                        let part = format!("part-{:05}.safetensors", served.len() % 2);
                        let _ = fs::create_dir(entry.path().join(part));
                    }
                }
            }
        });
        let mut failed = 0;
        for step in 2..40 {
            let outcome = checkpoints.save_async(mesh, step, &state).and_then(|()| checkpoints.wait(mesh));
            let Err(e) = outcome else { continue };
            assert!(e.to_string().contains(".safetensors: Is a directory"), "{e}");
            assert!(!checkpoints.steps()?.contains(&step), "no checkpoint appears");
            failed += 1;
            if failed == 4 {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        obstacle.join().expect("it does not panic");
        let (step, newest) = checkpoints.newest(mesh)?.expect("the earlier ones are whole");
        newest.verify()?;
        checkpoints.save(mesh, 100, &state)?;
        Ok((failed, step))
    });
    assert_eq!(all[0], all[1], "every rank sees the same failures");
    assert!(all[0].0 > 0, "the obstacle was never in time");
    assert!(folder.entries().iter().all(|name| name.starts_with("step-")), "{:?}", folder.entries());
}

#[test]
fn a_second_save_waits_or_is_refused_and_the_last_ones_are_kept() {
    let folder = TempFolder::new();
    let root = folder.0.clone();
    let refused = run_on("dp=2", move |mesh| {
        let state = |value: f64| {
            let mut state = StateTree::new();
            let x = DTensor::full(mesh, DType::F32, [1 << 20], "(S0)", value)?;
            state.insert("x", x)?;
            Ok::<_, isoshard::Error>(state)
        };
        let mut waits = CheckpointFolder::new(root.join("waits")).keep(2);
        for step in 1..=4 {
            waits.save_async(mesh, step, &state(step as f64)?)?;
        }
        waits.wait(mesh)?;
        assert_eq!(waits.steps()?, [3, 4]);
        let mut refuses = CheckpointFolder::new(root.join("refuses")).while_saving(WhileSaving::Refuse);
        let mut refused = 0;
        for step in 1..=20 {
            match refuses.save_async(mesh, step, &state(step as f64)?) {
                Ok(()) => {}
                Err(e) => {
                    assert!(e.to_string().contains("another save is being written"), "{e}");
                    refused += 1;
                }
            }
        }
        refuses.wait(mesh)?;
        assert_eq!(refuses.steps()?.len() + refused, 20);
        for step in refuses.steps()? {
            let x = Checkpoint::open(refuses.dir_of(step))?.tensor(mesh, "x", "(S0)")?;
            assert!(x.local().to_vec::<f32>()?.iter().all(|&x| x == step as f32));
        }
        Ok(refused)
    });
    assert_eq!(refused[0], refused[1]);
    assert!(refused[0] > 0, "no save was refused");
    let hidden = |dir: &str| {
        fs::read_dir(folder.at(dir))
            .unwrap()
            .flatten()
            .filter(|e| e.file_name().to_string_lossy().starts_with('.'))
            .count()
    };
    assert_eq!((hidden("waits"), hidden("refuses")), (0, 0));
}

/// Updates in place do not reach a snapshot that is being written.
#[test]
fn training_goes_on_while_a_snapshot_is_written() {
    let folder = TempFolder::new();
    let root = folder.0.clone();
    run_on("fsdp=2", move |mesh| {
        let mut training = Training::new(mesh, AdamW::new().betas(0.9, 0.99).decay(0.1), 7)?;
        training.step()?;
        let before = training.params.digest()?;
        let mut checkpoints = CheckpointFolder::new(&root);
        checkpoints.save_async(mesh, 1, &training.state()?)?;
        for _ in 0..3 {
            training.step()?;
        }
        checkpoints.wait(mesh)?;
        assert_ne!(training.params.digest()?, before);
        training.load(&checkpoints.newest(mesh)?.expect("saved").1)?;
        assert_eq!(training.params.digest()?, before);
        Ok(())
    });
}

/// Tensors of many blocks, each element with a value of its own, in layouts that cut blocks in all ways.
#[test]
fn every_element_of_many_blocks_finds_its_place() {
    let folder = TempFolder::new();
    let dir = folder.at("saved");
    // 6.6 and 2.2 MiB, and several tensors smaller than a block.
    let shapes = [vec![1301, 1333], vec![37, 15601], vec![3, 700], vec![11], vec![]];
    let whole = |number: usize, shape: &[usize]| {
        let n: usize = shape.iter().product();
        Tensor::from_vec((0..n as i32).map(|i| i ^ (number as i32) << 24).collect(), shape.to_vec())
    };
    let save = |mesh: &'static str, layouts: [&'static str; 2]| {
        let (dir, shapes) = (dir.clone(), shapes.clone());
        let _ = fs::remove_dir_all(&dir);
        run_on(mesh, move |mesh| {
            let mut state = StateTree::new();
            for (number, shape) in shapes.iter().enumerate() {
                let layout = if shape.len() == 2 { layouts[0] } else { layouts[1] };
                let x = DTensor::distribute(mesh, &whole(number, shape)?, layout)?;
                state.insert(format!("{number}"), x)?;
            }
            checkpoint::save(mesh, &dir, &state)
        });
    };
    let load = |mesh: &'static str, layouts: [&'static str; 2]| {
        let (dir, shapes) = (dir.clone(), shapes.clone());
        run_on(mesh, move |mesh| {
            let names: Vec<String> = (0..shapes.len()).map(|number| number.to_string()).collect();
            let layout = |shape: &Vec<usize>| if shape.len() == 2 { layouts[0] } else { layouts[1] };
            let wanted: Vec<(&str, Layout)> = names
                .iter()
                .zip(&shapes)
                .map(|(name, s)| Ok((&name[..], layout(s).parse()?)))
                .collect::<Result<_>>()?;
            for (number, x) in Checkpoint::open(&dir)?.tensors(mesh, &wanted)?.into_iter().enumerate() {
                let want = part_of(&whole(number, &shapes[number])?, x.spec(), mesh.mesh().coords(), 0);
                let local = x.local().to_device(isoshard::tensor::Device::Cpu)?;
                assert_eq!(bits_differ(&local, &want), None, "tensor {number} as {}", x.spec());
            }
            Ok(())
        });
    };
    for (mesh, layouts) in
        [("a=3", ["(S0)", "(R)"]), ("a=2,b=2", ["(R, S1)", "(R, R)"]), ("a=1", ["(R)", "(R)"])]
    {
        save(mesh, layouts);
        load("a=1", ["(R)", "(R)"]);
        load("a=3", ["(R)", "(R)"]);
        load("a=4", ["(S1)", "(R)"]);
        load("a=2,b=2", ["(S0, S1)", "(R, R)"]);
    }
}

/// States of other rules, and names that files use, are refused.
#[test]
fn states_of_other_rules_and_reserved_names_are_refused() {
    let folder = TempFolder::new();
    let dir = folder.at("saved");
    run_on("1", move |mesh| {
        let mut training = Training::new(mesh, AdamW::new().betas(0.9, 0.99).decay(0.1), 7)?;
        training.step()?;
        checkpoint::save(mesh, &dir, &training.optimizer.state(&training.params)?)?;
        let mut other = Sgd::new().momentum(0.9).rate(0.1);
        expect_refusal(
            other.load_state(&training.params, &Checkpoint::open(&dir)?),
            "the state is that of sgd; got \"adamw\"",
        );
        assert_eq!(other.steps(), 0);
        for name in ["__metadata__", "x#1", ""] {
            let e = StateTree::new().insert_value(name, 1).unwrap_err().to_string();
            assert!(e.starts_with("state: a name neither begins with"), "{e}");
        }
        let mut state = StateTree::new();
        state.insert_value("float", 31.245270191439438)?;
        let dir = dir.with_file_name("float");
        checkpoint::save(mesh, &dir, &state)?;
        assert_eq!(Checkpoint::open(&dir)?.value("float").and_then(|v| v.as_f64()), Some(31.245270191439438));
        Ok(())
    });
}
