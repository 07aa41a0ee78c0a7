//! A saved checkpoint, opened to be read.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use crate::checkpoint::format::index::{Index, SavedTensor};
use crate::checkpoint::format::index_file::{SummedIndex, read_index};
use crate::checkpoint::format::piece_reader::PieceReader;
use crate::checkpoint::format::run_id::RunId;
use crate::dtensor::{DTensor, DeviceMesh, SameOnRanks};
use crate::error::{Error, Result};
use crate::placement::IntoLayout;
use crate::tensor::{DType, Shape};

/// A saved checkpoint, or the part of it whose names begin with a prefix. A clone is cheap.
///
/// ```
/// use isoshard::{checkpoint::{self, Checkpoint, StateTree}, comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
/// let dir = std::env::temp_dir().join(format!("isoshard-checkpoint-{}", std::process::id()));
/// # let also = dir.clone();
/// spmd(2, move |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let mut model = StateTree::new();
///     model.insert("weight", DTensor::full(&mesh, DType::F32, [4, 3], "(S0)", 2.0)?)?;
///     let mut state = StateTree::new();
///     state.insert_tree("model", model)?;
///     state.insert_value("step", 12)?;
///     checkpoint::save(&mesh, &dir, &state)?;
///
///     let saved = Checkpoint::open(&dir)?;
///     assert_eq!(saved.value("step").expect("saved"), 12);
///     let weight = saved.subtree("model").tensor(&mesh, "weight", "(S1)")?; // another layout
///     assert_eq!(weight.full_tensor()?.to_vec::<f32>()?, [2.0; 12]);
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(also).unwrap();
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Checkpoint {
    opened: Arc<Opened>,
    prefix: String,
}

#[derive(Debug)]
struct Opened {
    dir: PathBuf,
    index: Index,
    sha256: [u8; 32],
}

impl Checkpoint {
    /// Opens a checkpoint: reads its index, and compares the index's checksum and the files' lengths. Communicates
    /// nothing: ranks that see different checkpoints under one name find it when they load tensors.
    /// [`CheckpointFolder::newest`](crate::checkpoint::CheckpointFolder::newest) compares what all ranks have opened.
    ///
    /// ```
    /// use isoshard::checkpoint::Checkpoint;
    /// let refused = Checkpoint::open("no/such/folder").unwrap_err().to_string();
    /// assert!(refused.starts_with("checkpoint: cannot access the file; got no/such/folder/checkpoint.json"));
    /// ```
    ///
    /// # Errors
    /// Returns an error if the folder has no index, and refuses an index that is damaged or does not fit the files.
    pub fn open(dir: impl AsRef<Path>) -> Result<Checkpoint> {
        let dir = dir.as_ref().to_path_buf();
        let SummedIndex { index, sha256 } = read_index(&dir)?;
        Ok(Checkpoint { opened: Arc::new(Opened { dir, index, sha256 }), prefix: String::new() })
    }

    /// Returns the run that saved this.
    pub(in crate::checkpoint) fn run(&self) -> Option<RunId> {
        self.opened.index.run
    }

    /// Returns the part of the checkpoint below a name: its names are those that begin with `name` and a dot, without
    /// both.
    ///
    /// ```
    /// use isoshard::{checkpoint::{self, Checkpoint, StateTree}, comm::spmd, dtensor::DeviceMesh};
    /// let dir = std::env::temp_dir().join(format!("isoshard-subtree-{}", std::process::id()));
    /// # let also = dir.clone();
    /// spmd(1, move |rank| {
    ///     let mut state = StateTree::new();
    ///     state.insert_value("data.epoch", 2)?;
    ///     checkpoint::save(&DeviceMesh::new(&rank, &[])?, &dir, &state)?;
    ///     let data = Checkpoint::open(&dir)?.subtree("data");
    ///     assert_eq!(data.value("epoch").expect("saved"), 2);
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(also).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn subtree(&self, name: &str) -> Checkpoint {
        Checkpoint { opened: self.opened.clone(), prefix: format!("{}{name}.", self.prefix) }
    }

    /// Returns the folder.
    ///
    /// ```
    /// use isoshard::{checkpoint::{self, Checkpoint, StateTree}, comm::spmd, dtensor::DeviceMesh};
    /// let dir = std::env::temp_dir().join(format!("isoshard-dir-{}", std::process::id()));
    /// # let also = dir.clone();
    /// spmd(1, move |rank| {
    ///     checkpoint::save(&DeviceMesh::new(&rank, &[])?, &dir, &StateTree::new())?;
    ///     assert_eq!(Checkpoint::open(&dir)?.dir(), dir);
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(also).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn dir(&self) -> &Path {
        &self.opened.dir
    }

    /// Returns a value, or `None` if there is none of this name.
    ///
    /// ```
    /// use isoshard::{checkpoint::{self, Checkpoint, StateTree}, comm::spmd, dtensor::DeviceMesh, rng::Generator};
    /// let dir = std::env::temp_dir().join(format!("isoshard-value-{}", std::process::id()));
    /// # let also = dir.clone();
    /// spmd(1, move |rank| {
    ///     let mut state = StateTree::new();
    ///     state.insert_value("dropout", Generator::new(7).state().to_string())?;
    ///     checkpoint::save(&DeviceMesh::new(&rank, &[])?, &dir, &state)?;
    ///     let saved = Checkpoint::open(&dir)?;
    ///     let text = saved.value("dropout").and_then(|value| value.as_str()).expect("saved");
    ///     assert_eq!(Generator::from_state(text.parse()?), Generator::new(7));
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(also).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.opened.index.values.get(&format!("{}{name}", self.prefix))
    }

    /// Returns the names of the tensors, in order.
    ///
    /// ```
    /// use isoshard::{checkpoint::{self, Checkpoint, StateTree}, comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// let dir = std::env::temp_dir().join(format!("isoshard-names-{}", std::process::id()));
    /// # let also = dir.clone();
    /// spmd(1, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut state = StateTree::new();
    ///     state.insert("b.x", DTensor::zeros(&mesh, DType::F32, [2], "()")?)?;
    ///     state.insert("a", DTensor::zeros(&mesh, DType::F32, [], "()")?)?;
    ///     checkpoint::save(&mesh, &dir, &state)?;
    ///     let saved = Checkpoint::open(&dir)?;
    ///     assert_eq!(saved.names().collect::<Vec<_>>(), ["a", "b.x"]);
    ///     assert_eq!(saved.subtree("b").names().collect::<Vec<_>>(), ["x"]);
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(also).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.opened.index.tensors.keys().filter_map(|name| name.strip_prefix(&self.prefix[..]))
    }

    /// Returns a tensor's dtype and global shape, or `None` if there is none of this name.
    ///
    /// ```
    /// use isoshard::{checkpoint::{self, Checkpoint, StateTree}, comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// let dir = std::env::temp_dir().join(format!("isoshard-shape-{}", std::process::id()));
    /// # let also = dir.clone();
    /// spmd(2, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let mut state = StateTree::new();
    ///     state.insert("x", DTensor::zeros(&mesh, DType::BF16, [3, 5], "(S0)")?)?;
    ///     checkpoint::save(&mesh, &dir, &state)?;
    ///     let saved = Checkpoint::open(&dir)?;
    ///     assert_eq!(saved.meta("x"), Some((DType::BF16, [3, 5].into())));
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(also).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn meta(&self, name: &str) -> Option<(DType, Shape)> {
        let of = self.opened.index.tensors.get(&format!("{}{name}", self.prefix))?;
        Some((of.dtype().expect("checked"), Shape::from(&of.shape[..])))
    }

    /// Loads a tensor in any layout, with the bits that were saved: [`Checkpoint::tensors`] for one.
    ///
    /// ```
    /// use isoshard::{checkpoint::{self, Checkpoint, StateTree}, comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::Tensor};
    /// let dir = std::env::temp_dir().join(format!("isoshard-tensor-{}", std::process::id()));
    /// # let also = dir.clone();
    /// spmd(3, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 3)])?;
    ///     let x = Tensor::from_vec((0..20).collect::<Vec<i64>>(), [5, 4])?;
    ///     let mut state = StateTree::new();
    ///     state.insert("x", DTensor::distribute(&mesh, &x, "(S0)")?)?;
    ///     checkpoint::save(&mesh, &dir, &state)?;
    ///     let loaded = Checkpoint::open(&dir)?.tensor(&mesh, "x", "(R)")?;
    ///     assert_eq!(loaded.local().to_vec::<i64>()?, x.to_vec::<i64>()?);
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(also).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Checkpoint::tensors`].
    pub fn tensor(&self, mesh: &DeviceMesh, name: &str, layout: impl IntoLayout) -> Result<DTensor> {
        Ok(self.tensors(mesh, &[(name, layout.into_layout()?)])?.remove(0))
    }

    /// Reads every byte and compares it with its checksum. Communicates nothing: one rank's answer stands for all.
    ///
    /// ```
    /// use isoshard::{checkpoint::{self, Checkpoint, StateTree}, comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
    /// let dir = std::env::temp_dir().join(format!("isoshard-verify-{}", std::process::id()));
    /// let saved = dir.clone();
    /// spmd(1, move |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[])?;
    ///     let mut state = StateTree::new();
    ///     state.insert("x", DTensor::zeros(&mesh, DType::F32, [9], "()")?)?;
    ///     checkpoint::save(&mesh, &saved, &state)
    /// })?;
    /// Checkpoint::open(&dir)?.verify()?;
    /// let file = dir.join("part-00000.safetensors");
    /// let mut bytes = std::fs::read(&file).unwrap();
    /// *bytes.last_mut().unwrap() ^= 1;
    /// std::fs::write(&file, bytes).unwrap();
    /// let refused = Checkpoint::open(&dir)?.verify().unwrap_err().to_string();
    /// assert!(refused.contains("part-00000.safetensors: bytes 128..164 have the checksum"), "{refused}");
    /// # std::fs::remove_dir_all(dir).unwrap();
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses files that are not those that were saved; names the file and the bytes.
    pub fn verify(&self) -> Result<()> {
        self.verify_share(0, 1)
    }

    /// Verifies each `members`-th piece from number `member` on.
    pub(in crate::checkpoint) fn verify_share(&self, member: usize, members: usize) -> Result<()> {
        let mut reader = self.reader();
        let mut number = 0;
        for (name, of) in &self.opened.index.tensors {
            let dtype = of.dtype().expect("checked");
            for piece in &of.pieces {
                if number % members == member {
                    reader.check(piece, dtype).map_err(|e| e.at(name))?;
                }
                number += 1;
            }
        }
        Ok(())
    }

    /// Returns the index's checksum, to be compared with other ranks'.
    pub(in crate::checkpoint) fn opened_alike(&self) -> SameOnRanks {
        let Opened { dir, sha256, .. } = &*self.opened;
        let digits: String = sha256[..4].iter().map(|byte| format!("{byte:02x}")).collect();
        let shown = format!("{} with the index {digits}", dir.display());
        SameOnRanks {
            remedy: "let all ranks see the files of one checkpoint",
            ..SameOnRanks::new("all ranks open the same checkpoint", sha256, shown)
        }
    }

    pub(in crate::checkpoint) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(in crate::checkpoint) fn reader(&self) -> PieceReader<'_> {
        PieceReader::new(&self.opened.dir, &self.opened.index)
    }

    /// Returns a tensor's entry in the index, or refuses the name with the nearest ones.
    pub(in crate::checkpoint) fn entry(&self, name: &str) -> Result<&SavedTensor> {
        self.opened.index.tensors.get(&format!("{}{name}", self.prefix)).ok_or_else(|| {
            let given = format!("{:?} in {}", format!("{}{name}", self.prefix), self.dir().display());
            Error::invalid(
                "load",
                "the checkpoint has no such tensor",
                given,
                "take one of Checkpoint::names",
            )
        })
    }
}
