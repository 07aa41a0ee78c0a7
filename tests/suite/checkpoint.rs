//! Checkpoints: what any mesh saves, any mesh loads by bits; damaged files are refused by name; a save that ends early
//! leaves nothing that looks whole.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use isoshard::Result;
use isoshard::checkpoint::{self, Checkpoint, CheckpointFolder, StateTree, WhileSaving};
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::{Layout, Mesh, Spec};
use isoshard::tensor::{DType, Shape, Tensor};
use isoshard::testing::strategies::{layouts, meshes, shapes};
use proptest::prelude::*;

use crate::common::{bits_differ, on_mesh, part_of, small_ints, spmd, spread};

/// A folder that is removed at the end of a test.
struct TempFolder(PathBuf);

impl TempFolder {
    fn new() -> TempFolder {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("isoshard-suite-{}-{number}", std::process::id()));
        fs::create_dir_all(&dir).expect("a temporary folder can be made");
        TempFolder(dir)
    }

    fn at(&self, name: &str) -> PathBuf {
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
