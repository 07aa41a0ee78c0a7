//! Damaged checkpoints: no bit of an index, no exchanged file and no mixture of runs is loaded as if it were whole; the newest
//! whole one is found.
//!
//! `ISOSHARD_FUZZ` sets the number of mutated folders (`tests/complete.sh` tries a hundred thousand), `ISOSHARD_FUZZ_SEED`
//! the first seed.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use isoshard::Result;
use isoshard::checkpoint::{self, Checkpoint, CheckpointFolder, StateTree, WholeCheck};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::tensor::{DType, Shape, Tensor};
use isoshard::testing::values::{SplitMix, small_ints};

use crate::checkpoint::{TempFolder, expect_refusal, run_on};
use crate::common::index_file::{body_of, summed};

const INDEX: &str = "checkpoint.json";
/// The names, dtypes, shapes and layouts of the tensors; two have one shape.
const TENSORS: [(&str, DType, &[usize], &str); 4] = [
    ("model.a", DType::F32, &[6, 5], "(S0)"),
    ("model.b", DType::F32, &[6, 5], "(S0)"),
    ("model.mask", DType::Bool, &[7], "(S0)"),
    ("model.scale", DType::BF16, &[], "(R)"),
];

/// The state of a run with such a seed.
fn state_of(mesh: &DeviceMesh, seed: u64) -> Result<StateTree> {
    let mut state = StateTree::new();
    for (number, (name, dtype, shape, layout)) in TENSORS.into_iter().enumerate() {
        let x = small_ints(dtype, &Shape::from(shape), seed + number as u64);
        state.insert(name, DTensor::distribute(mesh, &x, layout)?)?;
    }
    state.insert_value("dropout", format!("philox4x32-10:{seed:016x}:12"))?;
    state.insert_value("data", serde_json::json!({ "epoch": seed, "position": 123, "rate": 0.125 }))?;
    Ok(state)
}

fn save(dir: &Path, seed: u64) {
    let dir = dir.to_path_buf();
    run_on("dp=2", move |mesh| checkpoint::save(mesh, &dir, &state_of(mesh, seed)?));
}

/// Everything that is loaded on two ranks, as text and numbers.
fn load(mesh: &DeviceMesh, dir: &Path) -> Result<(String, Vec<Vec<f64>>)> {
    let saved = Checkpoint::open(dir)?;
    let wanted = TENSORS.map(|(name, _, _, layout)| (name, layout.parse().expect("a layout")));
    let loaded = saved.tensors(mesh, &wanted)?;
    let numbers = loaded.iter().map(|x| Ok(x.full_tensor()?.to_f64_vec())).collect::<Result<_>>()?;
    Ok((format!("{:?} {:?}", saved.value("dropout"), saved.value("data")), numbers))
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |text| text.parse().expect("a number"))
}

/// 412 of 18,144 flips were loaded before the index had a checksum, with other steps, dropout or data positions.
#[test]
fn each_flipped_bit_of_an_index_is_refused() {
    let folder = TempFolder::new();
    let dir = folder.at("saved");
    save(&dir, 3);
    Checkpoint::open(&dir).unwrap();
    let path = dir.join(INDEX);
    let text = fs::read(&path).unwrap();
    let mut file = File::options().write(true).open(&path).unwrap();
    let mut put = |at: usize, byte: u8| {
        file.seek(SeekFrom::Start(at as u64)).and_then(|_| file.write_all(&[byte])).expect("writable");
    };
    for (at, &byte) in text.iter().enumerate() {
        for bit in 0..8 {
            put(at, byte ^ (1 << bit));
            let said =
                Checkpoint::open(&dir).err().unwrap_or_else(|| panic!("bit {bit} of byte {at} is loaded"));
            assert!(said.to_string().contains(INDEX), "bit {bit} of byte {at}: {said}");
        }
        put(at, byte);
    }
    Checkpoint::open(&dir).unwrap();
    println!("{} bits, each flipped alone, were refused", 8 * text.len());
}

/// Changes a file or exchanges files of the folder, with those of another run.
fn mutate(dir: &Path, other: &Path, random: &mut SplitMix) -> String {
    let mut names: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    names.sort();
    let [a, b] = [0; 2].map(|_| names[random.below(names.len())].clone());
    let (name, len) = (a.file_name().unwrap().to_owned(), fs::metadata(&a).unwrap().len());
    let open = || File::options().read(true).write(true).open(&a).unwrap();
    let kind = random.below(10);
    match kind {
        0 => open().set_len(random.below(len as usize + 1) as u64).unwrap(),
        1 => open().set_len(len + 1 + random.below(5000) as u64).unwrap(),
        2 => fs::remove_file(&a).unwrap(),
        3 => {
            let aside = dir.join("aside");
            fs::rename(&a, &aside).unwrap();
            if a != b {
                fs::rename(&b, &a).unwrap();
            }
            fs::rename(&aside, &b).unwrap();
        }
        4 => drop(fs::copy(other.join(&name), &a)),
        5 => fs::rename(&a, dir.join("renamed")).unwrap(),
        6 => {
            fs::remove_file(&a).unwrap();
            fs::create_dir(&a).unwrap();
        }
        7 => drop(fs::copy(&b, &a)),
        _ => {
            let mut bytes = fs::read(&a).unwrap();
            for _ in 0..1 + random.below(3) {
                if !bytes.is_empty() {
                    let at = random.below(bytes.len());
                    let end = (at + 1 + random.below(9)).min(bytes.len());
                    match kind {
                        8 => bytes[at] ^= 1 << random.below(8),
                        _ => bytes[at..end].fill(random.next_u64() as u8),
                    }
                }
            }
            fs::write(&a, bytes).unwrap();
        }
    }
    format!("{kind} of {name:?}")
}

#[test]
fn a_mutated_folder_is_refused_alike_or_gives_what_was_saved() {
    let folder = TempFolder::new();
    let (whole, other, at) = (folder.at("whole"), folder.at("other"), folder.at("mutated"));
    save(&whole, 3);
    save(&other, 4);
    let (count, seed) = (number("ISOSHARD_FUZZ", 300), number("ISOSHARD_FUZZ_SEED", 1));
    let outcomes = run_on("dp=2", move |mesh| {
        let expected = load(mesh, &whole)?;
        let is_first = mesh.rank().rank() == 0;
        let mut outcomes = Vec::new();
        for seed in seed..seed + count {
            let mut random = SplitMix(seed);
            let mut done = String::new();
            if is_first {
                let _ = fs::remove_dir_all(&at);
                fs::create_dir(&at).unwrap();
                for entry in fs::read_dir(&whole).unwrap() {
                    let from = entry.unwrap().path();
                    fs::copy(&from, at.join(from.file_name().unwrap())).unwrap();
                }
                for _ in 0..1 + random.below(2) {
                    if fs::read_dir(&at).unwrap().all(|e| e.unwrap().path().is_file()) {
                        done = format!("{done} {}", mutate(&at, &other, &mut random));
                    }
                }
            }
            mesh.barrier()?;
            let loaded = load(mesh, &at);
            if let Ok(loaded) = &loaded {
                assert!(*loaded == expected, "seed {seed},{done}: {loaded:?}");
            }
            if is_first && let Ok(saved) = Checkpoint::open(&at) {
                assert_eq!(saved.verify().is_ok(), loaded.is_ok(), "seed {seed},{done}");
            }
            outcomes.push(loaded.err().map(|e| e.to_string()));
            mesh.barrier()?;
        }
        Ok(outcomes)
    });
    assert_eq!(outcomes[0], outcomes[1], "all ranks say the same");
    let refused = outcomes[0].iter().flatten().count() as u64;
    println!("{refused} of {count} mutated folders were refused; the others gave what was saved");
    assert!(refused > count / 2 && refused < count);
}

/// A checkpoint of the format before has no checksum of its index, and is loaded; a sparse file is not read.
#[test]
fn the_format_before_is_loaded_and_long_sparse_files_are_not_read() {
    let folder = TempFolder::new();
    let dir = folder.at("saved");
    save(&dir, 3);
    let path = dir.join(INDEX);
    let text = fs::read_to_string(&path).unwrap();
    let before = format!("{{\"format\":\"isoshard checkpoint 1\",{}", &body_of(&text)[1..]);
    let load_both = |dir: &Path| {
        let dir = dir.to_path_buf();
        run_on("dp=2", move |mesh| Ok(load(mesh, &dir).map_err(|e| e.to_string()))).swap_remove(0)
    };
    let expected = load_both(&dir).unwrap();
    fs::write(&path, &before).unwrap();
    assert_eq!(load_both(&dir), Ok(expected));

    // A header of 9 of 10 GB.
    let mut file = File::options().write(true).open(dir.join("part-00001.safetensors")).unwrap();
    file.set_len(10 << 30).unwrap();
    file.write_all(&(9u64 << 30).to_le_bytes()).unwrap();
    let mut index: serde_json::Value = serde_json::from_str(body_of(&text)).unwrap();
    index["files"][1]["bytes"] = (10u64 << 30).into();
    fs::write(&path, summed(&index.to_string())).unwrap();
    let said = load_both(&dir).unwrap_err();
    assert!(said.contains("a header of 9663676416 bytes in 10737418240"), "{said}");

    File::create(&path).unwrap().set_len(10 << 30).unwrap();
    let said = load_both(&dir).unwrap_err();
    assert!(said.contains("got 10737418240 bytes, more than 268435456 at "), "{said}");
}

#[test]
fn ranks_that_see_different_runs_are_refused_with_their_numbers() {
    let folder = TempFolder::new();
    let roots = ["a", "b"].map(|name| folder.at(name));
    for (number, root) in roots.iter().enumerate() {
        save(&CheckpointFolder::new(root).dir_of(10), 3 + number as u64);
    }
    run_on("dp=3", move |mesh| {
        let root = &roots[usize::from(mesh.rank().rank() == 1)];
        let mut seen = CheckpointFolder::new(root);
        let mixed = "all ranks open the same checkpoint; got ";
        for said in [load(mesh, &seen.dir_of(10)).map(drop), seen.newest(mesh).map(drop)] {
            let said = said.unwrap_err().to_string();
            let names = [
                format!("{mixed}{}", roots[0].display()),
                format!("{} with", roots[1].join("step-000000000010").display()),
            ];
            assert!(names.iter().all(|name| said.contains(name)), "{said}");
            assert!(
                said.contains(" on rank(s) 0, 2 and ") && said.contains(" on rank(s) 1; let all ranks see"),
                "{said}"
            );
        }
        expect_refusal(seen.newest_whole(mesh, WholeCheck::Lengths), mixed);
        // One run, but other tensors.
        let saved = Checkpoint::open(CheckpointFolder::new(&roots[0]).dir_of(10))?;
        let name = if mesh.rank().rank() == 1 { "model.a" } else { "model.b" };
        expect_refusal(
            saved.tensor(mesh, name, "(S0)"),
            "all ranks load the same tensors in the same layouts; got model.b",
        );
        // A copy of the run elsewhere is the same run.
        saved.tensor(mesh, "model.b", "(S0)").map(drop)
    });
}

/// Checkpoints of the steps 10, 20 and 30.
fn three(root: &Path) {
    for step in [10, 20, 30] {
        save(&CheckpointFolder::new(root).dir_of(step), step);
    }
}

fn flip_last(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn the_newest_whole_checkpoint_is_named_and_taken_by_a_word() {
    let folder = TempFolder::new();
    let root = folder.at("run");
    three(&root);
    let dir_of = |step| CheckpointFolder::new(&root).dir_of(step);
    let at = root.clone();
    let on_two = move |f: fn(&DeviceMesh, &mut CheckpointFolder) -> Result<()>| {
        let at = at.clone();
        run_on("dp=2", move |mesh| f(mesh, &mut CheckpointFolder::new(&at)));
    };
    // A flipped bit of an element is found by checksums only.
    flip_last(&dir_of(30).join("part-00001.safetensors"));
    fs::remove_file(dir_of(20).join("part-00000.safetensors")).unwrap();
    on_two(|mesh, folder| {
        assert_eq!(folder.newest(mesh)?.expect("three").0, 30);
        assert_eq!(folder.newest_whole(mesh, WholeCheck::Lengths)?.expect("three").0, 30);
        assert_eq!(folder.steps()?, [10, 20, 30]);
        Ok(())
    });
    flip_last(&dir_of(30).join(INDEX));
    on_two(|mesh, folder| {
        let said = folder.newest(mesh).unwrap_err().to_string();
        for text in [
            "checkpoint: the newest checkpoint is damaged; got step 30 with this error: ",
            "another checksum than its own",
            "step-000000000030/checkpoint.json",
            "; take step 10, whose index and lengths of files are right, with CheckpointFolder::newest_whole",
        ] {
            assert!(said.contains(text), "{said}");
        }
        assert_eq!(folder.steps()?, [10, 20, 30], "an error changes nothing");
        let (step, saved) = folder.newest_whole(mesh, WholeCheck::Lengths)?.expect("one is whole");
        assert_eq!((step, saved.value("data").expect("saved")["epoch"].as_u64()), (10, Some(10)));
        assert_eq!(folder.steps()?, [10]);
        // The run goes on and saves the steps again.
        folder.save(mesh, 20, &state_of(mesh, 20)?)?;
        folder.save(mesh, 30, &state_of(mesh, 30)?)
    });
    flip_last(&dir_of(30).join("part-00000.safetensors"));
    on_two(|mesh, folder| {
        assert_eq!(folder.newest_whole(mesh, WholeCheck::Checksums)?.expect("two are whole").0, 20);
        Ok(())
    });
    let mut names: Vec<String> =
        fs::read_dir(&root).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    let [a, b, c] = [10, 20, 30].map(|step| format!("step-{step:012}"));
    let expected =
        [a.clone(), b.clone(), format!("{b}.damaged"), format!("{c}.damaged"), format!("{c}.damaged.1")];
    assert_eq!(names, expected);
    // A lost index is damage, too: the step before is not taken without a word.
    fs::remove_file(dir_of(20).join(INDEX)).unwrap();
    on_two(|mesh, folder| {
        let said = folder.newest(mesh).unwrap_err().to_string();
        assert!(
            said.contains("got step 20 with this error: ") && said.contains("; take step 10, "),
            "{said}"
        );
        Ok(())
    });
    fs::write(dir_of(10).join(INDEX), "{}").unwrap();
    on_two(|mesh, folder| {
        expect_refusal(folder.newest(mesh), "; no older one is whole");
        expect_refusal(
            folder.newest_whole(mesh, WholeCheck::Checksums),
            "a checkpoint of the folder is whole; got 2 damaged ones, the newest, step 20, with this error: ",
        );
        assert_eq!(folder.steps()?, [10], "a folder without an index has no step");
        assert!(folder.dir_of(20).is_dir(), "nothing is set aside");
        Ok(())
    });
}

/// A file that some ranks do not see is no damage of the checkpoint: another mount is named, and nothing is passed over.
#[test]
fn a_checkpoint_that_some_ranks_do_not_see_is_not_passed_over() {
    let folder = TempFolder::new();
    let roots = ["a", "b"].map(|name| folder.at(name));
    roots.iter().for_each(|root| three(root));
    fs::remove_dir_all(CheckpointFolder::new(&roots[1]).dir_of(30)).unwrap();
    run_on("dp=2", move |mesh| {
        let mut seen = CheckpointFolder::new(&roots[mesh.rank().rank()]);
        expect_refusal(seen.newest(mesh), "rank 1 failed; got ");
        let said = seen.newest_whole(mesh, WholeCheck::Checksums).unwrap_err().to_string();
        assert!(said.contains("rank 1 failed; got ") && said.contains("No such file"), "{said}");
        assert!(CheckpointFolder::new(&roots[0]).dir_of(30).is_dir());
        Ok(())
    });
}

#[test]
fn a_value_that_is_nested_too_deep_is_refused_when_it_is_inserted() {
    let nested = |depth: usize| (0..depth).fold(serde_json::json!(7), |inner, _| serde_json::json!([inner]));
    let said = StateTree::new().insert_value("deep", nested(101)).unwrap_err().to_string();
    assert_eq!(
        said,
        "state: the lists and maps of a value are nested at most 100 deep; got a deeper value for \"deep\"; \
         flatten it, or insert its text"
    );
    let folder = TempFolder::new();
    let dir = folder.at("saved");
    run_on("1", move |mesh| {
        let mut state = StateTree::new();
        state.insert_value("deep", nested(100))?;
        state.insert("x", DTensor::distribute(mesh, &Tensor::from_vec(vec![1i64], [1])?, "()")?)?;
        checkpoint::save(mesh, &dir, &state)?;
        assert_eq!(Checkpoint::open(&dir)?.value("deep"), Some(&nested(100)));
        Ok(())
    });
}
