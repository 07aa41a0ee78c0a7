//! Exports of several jobs to one name, and what export refuses before and after a training.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use isoshard::comm::{Spmd, spmd};
use isoshard::dtensor::DeviceMesh;
use isoshard::hugging_face::{HuggingFaceConfig, HuggingFaceFormat, PretrainedDecoder};
use isoshard::nn::{Decoder, LoraConfig, Params, Plan};
use isoshard::tensor::DType;
use isoshard::{Error, Result};

use super::{fixture, new_folder, read};

/// Multiplies all parameters.
fn scale(of: &mut PretrainedDecoder, factor: f64) -> Result<()> {
    for id in of.params.ids().collect::<Vec<_>>() {
        let scaled = of.params.value(id).mul_scalar(factor)?;
        of.params.set(id, scaled)?;
    }
    Ok(())
}

fn names_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).expect("it is there").flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn of_two_exports_to_one_name_the_first_gets_it() {
    let top = new_folder("two_exports");
    fs::create_dir_all(&top).expect("the folder is new");
    for round in 0..4 {
        let target = top.join(format!("model-{round}"));
        let export = |factor: f64| {
            let target = target.clone();
            std::thread::spawn(move || {
                spmd(2, move |rank| {
                    let mesh = DeviceMesh::parse(&rank, "fsdp=2")?;
                    let mut of = read(&mesh, &fixture("llama2"))?;
                    scale(&mut of, factor)?;
                    let digest = of.params.digest()?;
                    Ok((digest, of.format.save_shards(&of.params, &target, 12_000)?).0)
                })
            })
        };
        let ended = [export(2.0), export(4.0)].map(|job| job.join().expect("it does not panic"));
        let winners: Vec<u64> = ended.iter().flatten().map(|digests| digests[0]).collect();
        let [digest] = winners[..] else { panic!("one job exports: {ended:?}") };
        let said = ended.iter().find_map(|end| end.as_ref().err()).expect("the other one fails").to_string();
        let reasons = ["another program has made the folder meanwhile", "the folder exists"];
        assert!(said.starts_with("rank 0: save_hugging_face: "), "{said}");
        assert!(reasons.iter().any(|reason| said.contains(reason)), "{said}");
        let loaded = spmd(1, move |rank| read(&DeviceMesh::parse(&rank, "1")?, &target)?.params.digest());
        assert_eq!(loaded.unwrap_or_else(|e| panic!("{e}")), [digest], "the files are one job's");
    }
    assert!(names_in(&top).iter().all(|name| name.starts_with("model-")), "{:?}", names_in(&top));
    fs::remove_dir_all(&top).expect("it was made here");
}

#[test]
fn an_export_whose_folder_vanishes_says_so_on_all_ranks() {
    let top = new_folder("vanishing");
    fs::create_dir_all(&top).expect("the folder is new");
    let stop = Arc::new(AtomicBool::new(false));
    let (until, root) = (stop.clone(), top.clone());
    let remover = std::thread::spawn(move || {
        while !until.load(Ordering::Relaxed) {
            for name in names_in(&root).iter().filter(|name| name.ends_with(".unfinished")) {
                let _ = fs::remove_dir_all(root.join(name));
            }
        }
    });
    let target = top.join("model");
    let told = spmd(2, move |rank| {
        let mesh = DeviceMesh::parse(&rank, "fsdp=2")?;
        let of = read(&mesh, &fixture("llama2"))?;
        for _ in 0..200 {
            match of.format.save_shards(&of.params, &target, 12_000) {
                Ok(()) if rank.rank() == 0 => fs::remove_dir_all(&target).map_err(Error::other)?,
                Ok(()) => {}
                Err(e) => return Ok(e.to_string()),
            }
            rank.world().barrier()?;
        }
        Ok("no folder vanished in time".into())
    });
    stop.store(true, Ordering::Relaxed);
    remover.join().expect("it does not panic");
    for said in told.unwrap_or_else(|e| panic!("{e}")) {
        assert!(said.contains("the folder in which the files were written has vanished; got "), "{said}");
    }
    fs::remove_dir_all(&top).expect("it was made here");
}

/// Adapters are named in the refusal, and are not lost: the model is saved elsewhere afterwards.
#[test]
fn a_refused_export_loses_nothing_and_can_be_refused_before_the_training() {
    let top = new_folder("refused_export");
    let (used, free) = (top.join("used"), top.join("free"));
    fs::create_dir_all(&used).expect("the folder is new");
    let run = move |rank| {
        let mesh = DeviceMesh::parse(&rank, "fsdp=2")?;
        let said = HuggingFaceFormat::expect_new(&mesh, &used).unwrap_err().to_string();
        assert!(said.contains("save_hugging_face: the folder exists; got "), "{said}");
        HuggingFaceFormat::expect_new(&mesh, &free)?;
        assert!(!free.exists());
        let mut of = read(&mesh, &fixture("llama2"))?;
        of.model.add_lora(&mut of.params, "h.*.attn.q", LoraConfig { rank: 2, alpha: 8.0, dropout: 0.0 })?;
        for dir in [&used, &free] {
            let said = of.save(dir).unwrap_err().to_string();
            let wanted = "save_hugging_face: the model has adapters, which its files do not have; got h.0.attn.q.lora_a, \
                          h.0.attn.q.lora_b";
            assert!(said.starts_with(wanted) && said.contains("; call merge_lora first"), "{said}");
        }
        let (_, merged) = of.model.merge_lora(&of.params, Plan::default().fsdp("fsdp"))?;
        assert!(of.format.save(&merged, &used).is_err());
        of.format.save(&merged, &free)?;
        assert_eq!(read(&mesh, &free)?.params.digest()?, merged.digest()?);
        Ok(())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(names_in(&top).len(), 2, "{:?}", names_in(&top));
    fs::remove_dir_all(&top).expect("it was made here");
}

/// A program's error begins with the rank that failed, not with one that was told.
#[test]
fn an_error_names_the_rank_that_failed() {
    let used = new_folder("used");
    fs::create_dir_all(&used).expect("the folder is new");
    let to = used.clone();
    for _ in 0..8 {
        let to = to.clone();
        let error = spmd(3, move |rank| {
            let mesh = DeviceMesh::parse(&rank, "fsdp=3")?;
            read(&mesh, &fixture("llama2"))?.save(&to)
        });
        let said = error.unwrap_err().to_string();
        let wanted = format!(
            "rank 0: save_hugging_face: the folder exists; got {}; choose another name",
            used.display()
        );
        assert_eq!(said, wanted);
    }
    fs::remove_dir_all(&used).expect("it was made here");
}

/// The tensors that an export gathers count against the limit of memory.
#[test]
fn an_export_without_room_is_an_error() {
    let top = new_folder("without_room");
    fs::create_dir_all(&top).expect("the folder is new");
    let export = |limit: usize| {
        let target: PathBuf = top.join("model");
        Spmd::new(2).memory_limit(limit).run(move |rank| {
            let mesh = DeviceMesh::parse(&rank, "fsdp=2")?;
            let text = r#"{"model_type": "gpt2", "vocab_size": 32768, "n_embd": 64, "n_layer": 1, "n_head": 2,
                           "n_positions": 6}"#;
            let config = HuggingFaceConfig::parse(text)?;
            let mut params = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
            Decoder::new(&mut params, config.decoder())?;
            HuggingFaceFormat::new(config, DType::F32)?.save(&params, &target)
        })
    };
    // Shards of 4 MiB, and the gathered table of 8 MiB; the table of the file has no room beside it.
    let error = export(16 << 20).map(drop).unwrap_err();
    assert!(error.to_string().contains("memory: cpu has no room; got "), "{error}");
    assert_eq!(names_in(&top).len(), 0, "{:?}", names_in(&top));
    export(64 << 20).unwrap_or_else(|e| panic!("{e}"));
    fs::remove_dir_all(&top).expect("it was made here");
}
