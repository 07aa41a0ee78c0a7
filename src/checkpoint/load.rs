//! Loading: each rank reads the parts of the files that it stores, in any layout on any mesh.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::Value;

use super::copy::copy_into;
use super::index::{INDEX, INDEX_BYTES, Index, PieceIndex};
use super::save::dtype_of;
use crate::dtensor::{DTensor, DeviceMesh};
use crate::error::{Error, Result};
use crate::placement::{Layout, Region, Spec};
use crate::tensor::{Dims, Shape, Tensor};

const VERB: &str = "checkpoint";

/// A saved checkpoint, opened to be read.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    index: Index,
}

impl Checkpoint {
    /// Opens a checkpoint, and reads its index.
    ///
    /// # Errors
    /// Returns an error if the folder has no index, and refuses an index that is not whole.
    pub fn open(dir: impl AsRef<Path>) -> Result<Checkpoint> {
        let dir = dir.as_ref().to_path_buf();
        let path = dir.join(INDEX);
        let failed = |e: std::io::Error| Error::io(VERB, &path, e);
        let file = File::open(&path).map_err(failed)?;
        let mut text = String::new();
        file.take(INDEX_BYTES).read_to_string(&mut text).map_err(failed)?;
        let index = Index::parse(&text)?;
        for file in &index.files {
            let path = dir.join(&file.name);
            let len = std::fs::metadata(&path).map_err(|e| Error::io(VERB, &path, e))?.len();
            if len != file.bytes {
                let given = format!("{} with {len} bytes", path.display());
                return Err(Error::invalid(VERB, format!("the file has {} bytes", file.bytes), given, ""));
            }
        }
        Ok(Checkpoint { dir, index })
    }

    /// Returns a value.
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.index.values.get(name)
    }

    /// Returns the names of the tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.index.tensors.keys().map(|name| &**name)
    }

    /// Reads a tensor into a layout. Each rank reads the elements that it stores; communicates nothing.
    ///
    /// # Errors
    /// Refuses a name that the checkpoint lacks, a layout that does not fit, and a file that is damaged.
    pub fn tensor(&self, mesh: &DeviceMesh, name: &str, layout: Layout) -> Result<DTensor> {
        let Some(of) = self.index.tensors.get(name) else {
            let given = format!("{name:?} in {}", self.dir.display());
            return Err(Error::invalid(VERB, "the checkpoint has no such tensor", given, ""));
        };
        let dtype = of.dtype().expect("checked when the index was read");
        let shape = Shape::from(of.shape.clone());
        let spec = Spec::new(mesh.mesh(), dtype, shape.clone(), layout.clone())?;
        let region = spec.region();
        let mut local = Tensor::zeros(dtype, region.local.clone());
        for piece in &of.pieces {
            let held = Region::of_box(Dims::from_slice(&piece.start), Shape::from(piece.shape.clone()));
            if !region.intersect(&held).is_empty() {
                let bytes = self.read(piece, dtype_of(dtype))?;
                copy_into(&mut local, &region, &bytes, &held);
            }
        }
        DTensor::from_local(mesh, local, shape, layout)
    }

    /// Reads the bytes of a piece.
    fn read(&self, piece: &PieceIndex, dtype: safetensors::Dtype) -> Result<Vec<u8>> {
        let path = self.dir.join(&self.index.files[piece.file].name);
        let failed = |e: std::io::Error| Error::io(VERB, &path, e);
        let damaged = |what: String| {
            Error::invalid(VERB, "the file is damaged", format!("{}: {what}", path.display()), "")
        };
        let file = File::open(&path).map_err(failed)?;
        let mut bytes = Vec::new();
        (&file).read_to_end(&mut bytes).map_err(failed)?;
        let (header, metadata) = SafeTensors::read_metadata(&bytes).map_err(|e| damaged(e.to_string()))?;
        let Some(info) = metadata.info(&piece.key) else {
            return Err(damaged(format!("no piece {}", piece.key)));
        };
        if info.dtype != dtype || info.shape != piece.shape {
            return Err(damaged(format!("{} is {:?}{:?}", piece.key, info.dtype, info.shape)));
        }
        let (from, to) = info.data_offsets;
        let mut found = vec![0; to - from];
        file.read_exact_at(&mut found, (header + 8 + from) as u64).map_err(failed)?;
        Ok(found)
    }
}
