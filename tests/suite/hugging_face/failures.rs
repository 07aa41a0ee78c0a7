//! Failures of one rank, which end the call on all ranks.

use std::fs;
use std::path::PathBuf;

use isoshard::comm::{Spmd, spmd};
use isoshard::dtensor::DeviceMesh;
use isoshard::hugging_face::HuggingFaceFormat;
use isoshard::nn::{Decoder, Params, Plan};
use isoshard::rng::Init;
use isoshard::tensor::storage;

use super::{Stored, fixture, new_folder};

/// Returns each rank's refusal of a folder of its own.
fn refused_reads(folders: [&'static str; 2]) -> Vec<String> {
    let run = move |rank: isoshard::comm::Rank| {
        let mesh = DeviceMesh::parse(&rank, "fsdp=2")?;
        let dir = fixture(folders[rank.rank()]);
        let read = Decoder::from_hugging_face(&mesh, dir, Plan::default().fsdp("fsdp"));
        Ok(read.map(|_| ()).expect_err("it is refused").to_string())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"))
}

/// Returns each rank's refusal to fill the parameters of llama2 from a folder of its own.
fn refused_loads(
    format: impl Fn(usize) -> HuggingFaceFormat + Send + Sync + 'static,
    folders: [&'static str; 2],
) -> Vec<String> {
    let run = move |rank: isoshard::comm::Rank| {
        let mesh = DeviceMesh::parse(&rank, "fsdp=2")?;
        let mut of = Decoder::from_hugging_face(&mesh, fixture("llama2"), Plan::default().fsdp("fsdp"))?;
        let before = of.params.digest()?;
        let loaded = format(rank.rank()).load(fixture(folders[rank.rank()]), &mut of.params);
        assert_eq!(of.params.digest()?, before, "no rank fills anything");
        Ok(loaded.expect_err("it is refused").to_string())
    };
    spmd(2, run).unwrap_or_else(|e| panic!("{e}"))
}

fn format_of(name: &str) -> HuggingFaceFormat {
    HuggingFaceFormat::read(fixture(name)).expect("the fixture can be read")
}

#[test]
fn ranks_that_cannot_read_end_the_others() {
    let refused = refused_reads(["llama2", "absent"]);
    assert!(refused[0].starts_with("from_hugging_face: rank 1 failed"), "{refused:?}");
    assert!(refused.iter().all(|of| of.contains("there is no such folder")), "{refused:?}");
    for (folder, said) in [("absent", "absent"), ("llama3", "llama3")] {
        let refused = refused_loads(|_| format_of("llama2"), ["llama2", folder]);
        assert!(refused[0].starts_with("from_hugging_face: rank 1 failed"), "{refused:?}");
        assert!(refused.iter().all(|of| of.contains(said)), "{refused:?}");
    }
}

/// One rank's model has other parameters, which that rank finds after the ranks have compared the files.
#[test]
fn a_rank_that_cannot_fill_its_parameters_leaves_those_of_the_others() {
    let run = |rank: isoshard::comm::Rank| {
        let mesh = DeviceMesh::parse(&rank, "fsdp=2")?;
        let mut of = Decoder::from_hugging_face(&mesh, fixture("llama2"), Plan::default().fsdp("fsdp"))?;
        let first = of.params.ids().next().expect("a parameter");
        let doubled = of.params.value(first).mul_scalar(2.0)?;
        of.params.set(first, doubled)?;
        let mut other = Params::new(&mesh, Plan::default().fsdp("fsdp"), 7)?;
        other.root().param("extra", [2], Init::Ones)?;
        let value = |params: &Params| params.value(first).local().to_vec::<f32>();
        let before = value(&of.params)?;
        let params = if rank.rank() == 1 { &mut other } else { &mut of.params };
        let refused = of.format.load(fixture("llama2"), params).expect_err("rank 1 refuses");
        assert_eq!(value(&of.params)?, before);
        Ok(refused.to_string())
    };
    let refused = spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    assert!(refused.iter().all(|said| said.contains("extra")), "{refused:?}");
}

#[test]
fn ranks_that_read_different_models_are_refused() {
    let reads = refused_reads(["llama2", "llama3"]);
    let loads = refused_loads(|rank| format_of(["llama2", "llama3"][rank]), ["llama2", "llama3"]);
    for refused in reads.into_iter().chain(loads) {
        assert!(refused.contains("the ranks read different configs or tensors"), "{refused}");
    }
}

/// Copies llama2 and changes a byte of the token table.
fn changed_copy(name: &str, at: usize) -> PathBuf {
    let dir = new_folder(name);
    fs::create_dir_all(&dir).expect("the folder is new");
    fs::copy(fixture("llama2").join("config.json"), dir.join("config.json")).expect("it can be copied");
    let mut stored = Stored::read(&fixture("llama2").join("model.safetensors"));
    stored.0.get_mut("model.embed_tokens.weight").expect("it has a table").2[at] ^= 1;
    stored.write(&dir.join("model.safetensors"));
    dir
}

/// Ranks whose files differ in the values of a tensor alone do not load a mixture: samples find the first, the last and
/// the middle bytes of each tensor, and a full comparison every byte.
#[test]
fn ranks_that_read_other_weights_are_refused() {
    let len =
        Stored::read(&fixture("llama2").join("model.safetensors")).0["model.embed_tokens.weight"].2.len();
    for (at, is_sampled) in [(0, true), (len / 2, true), (len - 1, true), (300, false)] {
        let changed = changed_copy(&format!("changed_{at}"), at);
        let other = changed.clone();
        let run = move |rank: isoshard::comm::Rank| {
            let mesh = DeviceMesh::parse(&rank, "fsdp=2")?;
            let dir = if rank.rank() == 1 { other.clone() } else { fixture("llama2") };
            let plan = || Plan::default().fsdp("fsdp");
            let read = Decoder::from_hugging_face(&mesh, &dir, plan()).map(drop);
            let mut of = Decoder::from_hugging_face(&mesh, fixture("llama2"), plan())?;
            let before = of.params.digest()?;
            let loaded = of.format.load(&dir, &mut of.params);
            assert!(loaded.is_ok() || of.params.digest()? == before, "no rank fills anything");
            assert_eq!(HuggingFaceFormat::compare_all(&mesh, fixture("llama2")), Ok(()));
            let compared = HuggingFaceFormat::compare_all(&mesh, &dir);
            Ok([read, loaded, compared].map(|done| done.err().map(|e| e.to_string())))
        };
        let refused = spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(refused[0], refused[1], "{at}");
        let [read, loaded, compared] = &refused[0];
        assert_eq!(
            (read.is_some(), loaded.is_some(), compared.is_some()),
            (is_sampled, is_sampled, true),
            "{at}"
        );
        for said in [read, loaded, compared].into_iter().flatten() {
            let rule = "from_hugging_face: the ranks read different configs or tensors; got model.embed_tokens.weight[";
            let of_ranks =
                ["llama2 on rank(s) 0 and ".into(), format!("in {} on rank(s) 1;", changed.display())];
            assert!(said.starts_with(rule) && of_ranks.iter().all(|of: &String| said.contains(of)), "{said}");
        }
        fs::remove_dir_all(&changed).expect("it was made here");
    }
}

/// Under a limit that has no room for a replicated model, the pattern is what is refused.
#[test]
fn plans_are_compared_with_the_model_before_there_is_memory_for_it() {
    let refused = |pattern: &'static str, limit: usize| {
        let run = move |rank: isoshard::comm::Rank| {
            let mesh = DeviceMesh::parse(&rank, "tp=2")?;
            let plan = Plan::default().shard(pattern, "tp", 0);
            Ok(Decoder::from_hugging_face(&mesh, fixture("llama2"), plan)
                .map(drop)
                .err()
                .map(|e| e.to_string()))
        };
        Spmd::new(2).memory_limit(limit).run(run).unwrap_or_else(|e| panic!("{e}"))
    };
    for said in refused("h.*.attn.q.weight", 4096) {
        let said = said.expect("queries are a part of a fused parameter");
        assert!(
            said.starts_with("plan: a pattern matches no parameter; got \"h.*.attn.q.weight\" among "),
            "{said}"
        );
        assert!(said.contains("the nearest are h.*.attn."), "{said}");
    }
    for said in refused("h.*.attn.qkv.weight", 4096) {
        let said = said.expect("there is no room");
        assert!(said.contains("memory: cpu has no room"), "{said}");
    }
    // Adapters may be declared later.
    for pattern in ["h.*.attn.qkv.weight", "h.*.attn.out.lora_b", "h.*.mlp.up.lora_b"] {
        assert_eq!(refused(pattern, usize::MAX), [None, None], "{pattern}");
    }
    let run = |rank| {
        let mesh = DeviceMesh::parse(&rank, "tp=2")?;
        let format = format_of("llama2");
        let mut params = Params::new(&mesh, Plan::default().shard("h.*.attn.qvk.weight", "tp", 0), 7)?;
        Decoder::new(&mut params, format.config().decoder())?;
        Ok(format.load(fixture("llama2"), &mut params).unwrap_err().to_string())
    };
    for said in spmd(2, run).unwrap_or_else(|e| panic!("{e}")) {
        assert!(
            said.starts_with("plan: a pattern matches no parameter; got \"h.*.attn.qvk.weight\""),
            "{said}"
        );
    }
}

/// One rank without room for its second copy: all ranks get an error, and no parameter changes.
#[test]
fn a_load_without_room_is_an_error_on_all_ranks() {
    let run = |rank: isoshard::comm::Rank| {
        let mesh = DeviceMesh::parse(&rank, "fsdp=2")?;
        let mut of = Decoder::from_hugging_face(&mesh, fixture("llama2"), Plan::default().fsdp("fsdp"))?;
        let first = of.params.ids().next().expect("a parameter");
        let doubled = of.params.value(first).mul_scalar(2.0)?;
        of.params.set(first, doubled)?;
        let before = of.params.digest()?;
        if rank.rank() == 1 {
            storage::trim_pool();
            storage::set_memory_limit(storage::pool_stats().live_bytes + 2000);
        }
        let loaded = of.format.load(fixture("llama2"), &mut of.params);
        storage::set_memory_limit(usize::MAX);
        assert_eq!(of.params.digest()?, before, "no rank fills anything");
        Ok(loaded.map_err(|e| e.to_string()).expect_err("rank 1 has no room"))
    };
    let refused = spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    assert!(refused.iter().all(|said| said.contains("memory: cpu has no room; got f32[")), "{refused:?}");
    assert!(
        refused[0].starts_with("from_hugging_face: rank 1 failed; got ")
            && refused[1].starts_with("memory: "),
        "{refused:?}"
    );
}

/// A folder that exists, and one whose path is so long that no file in it can be created: the second fails when all
/// ranks gather tensors already.
#[test]
fn ranks_fail_together_if_the_first_cannot_write() {
    let top = new_folder("failures");
    let mut long = top.clone();
    // Linux takes paths of at most 4095 bytes; the unfinished folder's name has 29 more than the folder's.
    while long.as_os_str().len() < 3855 {
        long.push("d".repeat(100));
    }
    fs::create_dir_all(&long).expect("the folder is new");
    let rest = 4085 - 30 - long.as_os_str().len();
    let (exists, unwritable) = (long.clone(), long.join("e".repeat(rest)));
    let run = move |rank| {
        let mesh = DeviceMesh::parse(&rank, "fsdp=2")?;
        let of = Decoder::from_hugging_face(&mesh, fixture("llama2"), Plan::default().fsdp("fsdp"))?;
        let refused = |dir: &std::path::Path| {
            let saved = of.format.save_shards(&of.params, dir, 12_000);
            saved.expect_err("it is refused").to_string()
        };
        Ok([refused(&exists), refused(&unwritable)])
    };
    let refused = spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    assert!(refused[0][0].starts_with("save_hugging_face: the folder exists"), "{refused:?}");
    assert!(refused[1][0].starts_with("save_hugging_face: rank 0 failed"), "{refused:?}");
    assert!(refused.iter().all(|of| of[1].contains("00001-of-")), "{refused:?}");
    assert!(refused[1][1].starts_with("save_hugging_face: rank 0 failed"), "{refused:?}");
    assert_eq!(fs::read_dir(&long).expect("it is there").count(), 0, "the unfinished folder is removed");
    fs::remove_dir_all(&top).expect("it was made here");
}
