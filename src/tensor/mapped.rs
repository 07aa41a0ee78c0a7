//! Tensors whose elements lie in a file that is mapped into memory.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use memmap2::{MmapMut, MmapOptions};

use super::storage::Buffer;
use super::{DType, Shape, Tensor};
use crate::base::lock;
use crate::error::{Error, Result};
use crate::files::draw_number;

const VERB: &str = "mapped_file";

/// Tensors begin at multiples of this many bytes.
const PAGE_BYTES: u64 = 4096;

/// A file whose pages hold tensors: the system keeps those pages in memory that are used, and writes the others to the
/// disk. Such tensors take nothing of a thread's pool, and do not count in
/// [`storage::pool_stats`](super::storage::pool_stats).
///
/// The file has no name once it is made, so no other program opens it, and the system frees its blocks when the last of its
/// tensors is dropped, also after a crash. The bytes of a dropped tensor are used again by a
/// tensor of as many pages.
///
/// ```
/// use isoshard::tensor::{DType, MappedFile, Tensor, storage};
/// let file = MappedFile::in_dir(std::env::temp_dir())?;
/// let before = storage::pool_stats().live_bytes;
/// let mut x = file.copy(&Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [3])?)?;
/// x.make_mut::<f32>()?[1] = 5.0; // written to the page
/// assert_eq!(x.to_vec::<f32>()?, [1.0, 5.0, 3.0]);
/// assert!(x.is_mapped() && storage::pool_stats().live_bytes == before);
/// # Ok::<(), isoshard::Error>(())
/// ```
#[derive(Clone)]
pub struct MappedFile(Arc<FileRegions>);

struct FileRegions {
    path: PathBuf,
    state: Mutex<RegionList>,
}

/// The file, its length, and the regions that no tensor has.
struct RegionList {
    file: File,
    end: u64,
    /// Starts and lengths.
    free: Vec<(u64, u64)>,
    live_bytes: u64,
}

/// A tensor's part of a file.
struct MappedRegion {
    start: u64,
    len: u64,
    _map: MmapMut,
    of: Arc<FileRegions>,
}

impl MappedFile {
    /// Makes a file in a directory.
    ///
    /// ```
    /// use isoshard::tensor::MappedFile;
    /// assert_eq!(MappedFile::in_dir(std::env::temp_dir())?.live_bytes(), 0);
    /// let refused = MappedFile::in_dir("no/such/directory").unwrap_err().to_string();
    /// assert!(refused.starts_with("mapped_file: cannot access the file; got no/such/directory"), "{refused}");
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the directory is missing or cannot be written to.
    pub fn in_dir(dir: impl AsRef<Path>) -> Result<MappedFile> {
        // Processes of other hosts or containers may have this one's number, so the name is drawn.
        let number = draw_number().map_err(|e| Error::io(VERB, dir.as_ref(), e))?;
        let path = dir.as_ref().join(format!("isoshard-{number:016x}.mapped"));
        let open = || -> io::Result<File> {
            let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
            std::fs::remove_file(&path)?;
            Ok(file)
        };
        let file = open().map_err(|e| Error::io(VERB, &path, e))?;
        let state = Mutex::new(RegionList { file, end: 0, free: Vec::new(), live_bytes: 0 });
        Ok(MappedFile(Arc::new(FileRegions { path, state })))
    }

    /// Returns zeros in the file.
    ///
    /// ```
    /// use isoshard::tensor::{DType, MappedFile};
    /// let file = MappedFile::in_dir(std::env::temp_dir())?;
    /// let x = file.zeros(DType::F32, [3, 2])?;
    /// assert_eq!((x.to_vec::<f32>()?, file.live_bytes()), (vec![0.0; 6], 4096)); // whole pages
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses tensors larger than any address space; returns an error if the disk is full.
    pub fn zeros(&self, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        self.place(dtype, shape.into(), None)
    }

    /// Copies a tensor of the CPU's memory into the file.
    ///
    /// ```
    /// use isoshard::tensor::{MappedFile, Tensor};
    /// let file = MappedFile::in_dir(std::env::temp_dir())?;
    /// let x = Tensor::from_vec(vec![1i64, 2, 3, 4], [2, 2])?;
    /// assert_eq!(file.copy(&x.transpose(0, 1)?)?.to_vec::<i64>()?, [1, 3, 2, 4]);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses tensors on a device; returns an error if the disk is full.
    pub fn copy(&self, x: &Tensor) -> Result<Tensor> {
        let x = x.contiguous()?;
        self.place(x.dtype(), x.shape().clone(), Some(x.as_bytes()?))
    }

    /// Returns the bytes of the file that tensors have, in whole pages.
    ///
    /// ```
    /// use isoshard::tensor::{DType, MappedFile};
    /// let file = MappedFile::in_dir(std::env::temp_dir())?;
    /// drop(file.zeros(DType::U8, [5000])?);
    /// assert_eq!(file.live_bytes(), 0);
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn live_bytes(&self) -> u64 {
        lock(&self.0.state).live_bytes
    }

    fn place(&self, dtype: DType, shape: Shape, values: Option<&[u8]>) -> Result<Tensor> {
        let len_bytes = shape.checked_bytes(VERB, dtype)?;
        if len_bytes == 0 {
            return Ok(Tensor::zeros(dtype, shape));
        }
        let fault = |e| Error::io(VERB, &self.0.path, e);
        let (region, ptr) = self.0.region(len_bytes, values).map_err(fault)?;
        Ok(Tensor::from_buffer(Buffer::mapped(ptr, len_bytes, Box::new(region)), dtype, shape))
    }
}

impl FileRegions {
    /// Returns a region with these bytes, or with zeros, and the address at which it is mapped.
    fn region(
        self: &Arc<Self>,
        len_bytes: usize,
        values: Option<&[u8]>,
    ) -> io::Result<(MappedRegion, NonNull<u8>)> {
        let len = (len_bytes as u64).next_multiple_of(PAGE_BYTES);
        let mut state = lock(&self.state);
        let kept = state.free.iter().position(|(_, free)| *free == len);
        let start = kept.map_or(state.end, |k| state.free[k].0);
        // Writing reserves the blocks: a full disk is an error here, and no signal when a page is used.
        state.file.seek(SeekFrom::Start(start))?;
        let zeros = [0; PAGE_BYTES as usize];
        state.file.write_all(values.unwrap_or(&[]))?;
        let mut left = len as usize - values.map_or(0, <[u8]>::len);
        while left > 0 {
            let part = left.min(zeros.len());
            state.file.write_all(&zeros[..part])?;
            left -= part;
        }
        // SAFETY: the file has no name, so this process alone has it open, and it is never cut shorter. Nothing uses another
        // map of these bytes: no tensor has the region, and it is marked as used before the lock is released. A dropped
        // tensor's map may still be there, which only ends.
        let mut map = unsafe { MmapOptions::new().offset(start).len(len_bytes).map_mut(&state.file)? };
        let ptr = NonNull::new(map.as_mut_ptr()).expect("a map has an address");
        match kept {
            Some(k) => drop(state.free.swap_remove(k)),
            None => state.end += len,
        }
        state.live_bytes += len;
        Ok((MappedRegion { start, len, _map: map, of: self.clone() }, ptr))
    }
}

impl Drop for MappedRegion {
    fn drop(&mut self) {
        let mut state = lock(&self.of.state);
        state.free.push((self.start, self.len));
        state.live_bytes -= self.len;
    }
}

/// Prints the directory's file name and the bytes of tensors.
impl fmt::Debug for MappedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MappedFile({}, {} bytes)", self.0.path.display(), self.live_bytes())
    }
}

impl Tensor {
    /// Returns true if the elements lie in a [`MappedFile`].
    ///
    /// ```
    /// use isoshard::tensor::{DType, MappedFile, Tensor};
    /// let x = MappedFile::in_dir(std::env::temp_dir())?.zeros(DType::F32, [2])?;
    /// assert!(x.is_mapped() && x.narrow(0, 1, 1)?.is_mapped() && !Tensor::scalar(1.0f32).is_mapped());
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub fn is_mapped(&self) -> bool {
        self.storage.is_mapped()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_do_not_overlap_and_are_used_again() {
        let file = MappedFile::in_dir(std::env::temp_dir()).expect("there is a directory");
        let ones = |n: usize| Tensor::from_vec(vec![1u8; n], [n]).unwrap();
        let first = file.copy(&ones(5000)).unwrap();
        let mut second = file.copy(&ones(4096)).unwrap();
        second.make_mut::<u8>().unwrap().fill(7);
        assert_eq!(first.to_vec::<u8>().unwrap(), [1; 5000]);
        assert_eq!(file.live_bytes(), 3 * 4096);
        drop(first);
        // Takes the place of the first one, and has none of its elements.
        let third = file.zeros(DType::U8, [6000]).unwrap();
        assert_eq!(third.to_vec::<u8>().unwrap(), [0; 6000]);
        assert_eq!(file.live_bytes(), 3 * 4096);
        assert_eq!(file.0.state.lock().unwrap().end, 3 * 4096);
        assert_eq!(second.to_vec::<u8>().unwrap(), [7; 4096]);
        // A shared tensor is copied before it is written to, into the thread's pool.
        let shared = second.clone();
        second.make_mut::<u8>().unwrap().fill(9);
        assert!(shared.is_mapped() && !second.is_mapped());
        drop(file);
        assert_eq!(shared.to_vec::<u8>().unwrap(), [7; 4096], "the file lives as long as its tensors");
        std::thread::spawn(move || drop(shared)).join().expect("no panic");
    }

    #[test]
    fn empty_tensors_and_alignment() {
        let file = MappedFile::in_dir(std::env::temp_dir()).expect("there is a directory");
        assert_eq!(file.zeros(DType::F32, [0, 3]).unwrap().numel(), 0);
        let x = file.zeros(DType::Bool, [1]).unwrap();
        assert_eq!(x.to_vec::<bool>().unwrap(), [false]);
        assert_eq!(x.storage.as_ptr() as usize % 64, 0);
        assert!(file.zeros(DType::F64, [1 << 62]).is_err());
    }
}
