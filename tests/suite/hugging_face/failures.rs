//! Failures of one rank, which end the call on all ranks.

use std::fs;

use isoshard::comm::spmd;
use isoshard::dtensor::DeviceMesh;
use isoshard::nn::{Decoder, Plan};

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

#[test]
fn ranks_that_cannot_read_end_the_others() {
    let refused = refused_reads(["llama2", "absent"]);
    assert!(refused[0].starts_with("from_hugging_face: some ranks failed"), "{refused:?}");
    assert!(refused[0].contains("config.json") && refused[1].contains("config.json"), "{refused:?}");
}

#[test]
fn ranks_that_read_different_models_are_refused() {
    for refused in refused_reads(["llama2", "llama3"]) {
        assert!(refused.contains("the ranks read different configs or tensors"), "{refused}");
    }
}

/// A folder that exists, and one whose path is so long that no file in it can be created: the second fails when all
/// ranks gather tensors already.
#[test]
fn ranks_fail_together_if_the_first_cannot_write() {
    let top = new_folder("failures");
    let mut long = top.clone();
    // Linux takes paths of at most 4095 bytes; the unfinished folder's name has 12 more than the folder's.
    while long.as_os_str().len() < 3850 {
        long.push("d".repeat(200));
    }
    fs::create_dir_all(&long).expect("the folder is new");
    let rest = 4085 - 13 - long.as_os_str().len();
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
    assert!(refused[1][0].starts_with("save_hugging_face: some ranks failed"), "{refused:?}");
    assert!(refused.iter().all(|of| of[1].contains("00001-of-")), "{refused:?}");
    assert!(refused[1][1].starts_with("save_hugging_face: some ranks failed"), "{refused:?}");
    assert_eq!(fs::read_dir(&long).expect("it is there").count(), 0, "the unfinished folder is removed");
    fs::remove_dir_all(&top).expect("it was made here");
}
