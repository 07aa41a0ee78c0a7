//! Failures of one rank, which end the call on all ranks.

use std::fs;

use isoshard::comm::spmd;
use isoshard::dtensor::DeviceMesh;
use isoshard::hugging_face::HuggingFaceFormat;
use isoshard::nn::{Decoder, Params, Plan};
use isoshard::rng::Init;

use super::{fixture, new_folder};

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
    assert!(refused[0].contains("config.json") && refused[1].contains("config.json"), "{refused:?}");
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
