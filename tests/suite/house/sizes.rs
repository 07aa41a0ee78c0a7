//! The sizes of files and folders, and the one form of a module with folders.

use std::collections::BTreeMap;

use super::source::{Source, kernel_sources, root, sources};

/// The most lines of a file.
const FILE_LINES: usize = 400;
/// The files that have more. The numbers may only fall.
const LONG_FILES: &[(&str, usize)] = &[
    ("kernels/src/gemm/product.rs", 414),
    ("kernels/src/gemm/thin.rs", 419),
    ("kernels/src/gemm/tiles/tile.rs", 597),
    ("kernels/src/loops/formulas.rs", 424),
    ("kernels/src/num/real.rs", 586),
    ("kernels/src/sums/lanes.rs", 552),
    ("kernels/src/sums/leaves.rs", 589),
    ("kernels/src/sums/tree.rs", 559),
    ("kernels/src/threads/team.rs", 522),
    ("src/checkpoint/series/folder.rs", 411),
    ("src/comm/api/collectives.rs", 523),
    ("src/comm/api/spmd.rs", 445),
    ("src/comm/api/tally.rs", 429),
    ("src/comm/coordinator/rendezvous.rs", 472),
    ("src/comm/coordinator/tests/mod.rs", 480),
    ("src/comm/diagnostics/call_table/mod.rs", 406),
    ("src/comm/diagnostics/recorder.rs", 531),
    ("src/comm/launch/secret.rs", 411),
    ("src/comm/network.rs", 444),
    ("src/comm/transport/engine.rs", 435),
    ("src/comm/transport/fold.rs", 502),
    ("src/comm/transport/nccl/nvidia.rs", 492),
    ("src/comm/transport/threads/group.rs", 405),
    ("src/dtensor/bridge/bridge_plan.rs", 471),
    ("src/dtensor/call/dispatch.rs", 447),
    ("src/dtensor/call/local_map.rs", 402),
    ("src/dtensor/mesh/device_mesh.rs", 518),
    ("src/dtensor/methods/create.rs", 532),
    ("src/dtensor/methods/index.rs", 426),
    ("src/dtensor/methods/pointwise/logic.rs", 422),
    ("src/dtensor/methods/random.rs", 506),
    ("src/dtensor/methods/shape.rs", 542),
    ("src/dtensor/redistribute/redistribution.rs", 476),
    ("src/dtensor/redistribute/run.rs", 405),
    ("src/dtensor/redistribute/search.rs", 460),
    ("src/error/fault.rs", 438),
    ("src/error/mod.rs", 476),
    ("src/fsdp/draw.rs", 417),
    ("src/nn/forward/mod.rs", 493),
    ("src/nn/layers/linear.rs", 483),
    ("src/nn/layers/moe.rs", 401),
    ("src/nn/params/mod.rs", 596),
    ("src/nn/plan/rules.rs", 555),
    ("src/ops/norm/cpu.rs", 458),
    ("src/ops/pointwise/formula.rs", 595),
    ("src/optim/adamw.rs", 472),
    ("src/optim/optimizer.rs", 535),
    ("src/placement/mesh/mod.rs", 508),
    ("src/placement/reduction_tree.rs", 542),
    ("src/placement/spec.rs", 473),
    ("src/rng/distributions/sample.rs", 411),
    ("src/rng/init.rs", 464),
    ("src/tensor/cpu/map.rs", 427),
    ("src/tensor/cuda_device/module.rs", 486),
    ("src/tensor/dense/display.rs", 454),
    ("src/tensor/dense/tensor.rs", 414),
    ("src/testing/equivalence/check.rs", 534),
    ("src/testing/equivalence/trial.rs", 504),
    ("src/testing/judge/exact.rs", 485),
    ("src/testing/judge/sample_judge.rs", 468),
];

/// The most files of a folder.
const FOLDER_FILES: usize = 20;
/// The folders that have more. The numbers may only fall.
const FULL_FOLDERS: &[(&str, usize)] = &[];

fn all_sources() -> impl Iterator<Item = Source> {
    sources().into_iter().chain(kernel_sources())
}

/// Returns what is wrong if things of a size have at most `limit`, apart from those listed, which have their own numbers.
fn wrong_sizes(sizes: &BTreeMap<String, usize>, limit: usize, listed: &[(&str, usize)]) -> Vec<String> {
    let mut wrong = Vec::new();
    for (path, &size) in sizes {
        let most = listed.iter().find(|(name, _)| name == path).map_or(limit, |(_, most)| *most);
        if size > most {
            wrong.push(format!("{path} has {size}, at most {most}"));
        }
    }
    for &(path, most) in listed {
        match sizes.get(path) {
            Some(&size) if size <= limit => wrong.push(format!("{path} has {size}: remove it from the list")),
            // A few lines less need no other number.
            Some(&size) if size < most - most / 20 => {
                wrong.push(format!("{path} has {size}: lower its number from {most}"))
            }
            None => wrong.push(format!("{path} is not there: remove it from the list")),
            _ => {}
        }
    }
    wrong
}

#[test]
fn files_stay_small() {
    let sizes = all_sources().map(|s| (s.path.display().to_string(), s.lines)).collect();
    let wrong = wrong_sizes(&sizes, FILE_LINES, LONG_FILES);
    assert!(wrong.is_empty(), "lines of files (LONG_FILES):\n{}", wrong.join("\n"));
}

#[test]
fn folders_stay_small() {
    let mut counts = BTreeMap::new();
    for source in all_sources() {
        let folder = source.path.parent().expect("a file stands in a folder").display().to_string();
        *counts.entry(folder).or_default() += 1;
    }
    let wrong = wrong_sizes(&counts, FOLDER_FILES, FULL_FOLDERS);
    assert!(wrong.is_empty(), "files of folders (FULL_FOLDERS):\n{}", wrong.join("\n"));
}

#[test]
fn a_module_with_a_folder_is_its_mod_rs() {
    let beside = all_sources().filter(|s| root().join(s.path.with_extension("")).is_dir());
    let beside: Vec<String> = beside.map(|s| s.path.display().to_string()).collect();
    assert_eq!(beside, [""; 0], "files x.rs beside folders x/, which have x/mod.rs instead");
}

#[test]
fn sizes_are_compared_with_the_limit_or_with_the_list() {
    let sizes = [("a", 3), ("b", 5), ("c", 7), ("d", 2)].map(|(path, size)| (path.to_string(), size)).into();
    assert_eq!(wrong_sizes(&sizes, 3, &[("b", 5), ("c", 7)]), [""; 0]);
    let wrong = wrong_sizes(&sizes, 3, &[("b", 6), ("c", 6), ("d", 4), ("e", 4)]);
    let want = [
        "c has 7, at most 6",
        "b has 5: lower its number from 6",
        "d has 2: remove it from the list",
        "e is not there: remove it from the list",
    ];
    assert_eq!(wrong, want);
}
