//! A file or a folder that is written beside its final name.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::lock::Lock;
use super::names::{LOCK, REPLACED, UNFINISHED, hidden_name};
use super::remains::{remove, remove_remains};
use crate::error::{Error, Result};

/// The most bytes of a final name in a hidden one. File systems take 255 bytes.
const NAME_BYTES: usize = 200;
/// The number of times that a folder is removed in which others may still be writing.
const REMOVALS: usize = 8;

/// The place beside a final name where this process writes.
#[derive(Debug)]
struct Place {
    /// The final path.
    to: PathBuf,
    number: String,
    /// `None` if there is nothing to remove: the place is not taken yet, or its content has the final name.
    lock: Option<Lock>,
}

impl Place {
    fn new(to: &Path, number: u64) -> Place {
        Place { to: to.to_path_buf(), number: format!("{number:016x}"), lock: None }
    }

    /// Takes the place, after it has removed what dead programs left of this name, and of names that begin with `family`.
    fn take(mut self, family: Option<&str>, beats: bool) -> io::Result<Place> {
        let (dir, own) = (parent(&self.to), name_of(&self.to)?);
        let is_ours = |name: &str| name == own || family.is_some_and(|family| name.starts_with(family));
        // Remains that cannot be removed, such as another user's, stay.
        let remove = |now| drop(remove_remains(dir, &is_ours, now));
        let mut lock = match Lock::make(self.path(LOCK)?) {
            Ok(lock) => lock,
            Err(_) => {
                // There may be room for a lock after this. Only what is dead by its process is removed.
                remove(SystemTime::UNIX_EPOCH);
                Lock::make(self.path(LOCK)?)?
            }
        };
        remove(lock.time().unwrap_or(SystemTime::UNIX_EPOCH));
        lock.sign(beats)?;
        self.lock = Some(lock);
        Ok(self)
    }

    fn path(&self, kind: &str) -> io::Result<PathBuf> {
        Ok(parent(&self.to).join(hidden_name(&name_of(&self.to)?, &self.number, kind)))
    }
}

/// A file that is written beside its final name. If this is dropped before it has its name, the file is removed.
#[derive(Debug)]
pub(crate) struct UnfinishedFile {
    place: Place,
    path: PathBuf,
}

impl UnfinishedFile {
    /// Makes a file, and removes those that dead programs left of this name. `beats` is for files that take long.
    ///
    /// # Errors
    /// Returns an error if the file cannot be made, or, with `beats`, if the system refuses a thread.
    pub fn create(to: &Path, beats: bool) -> io::Result<(UnfinishedFile, File)> {
        let place = Place::new(to, draw_number()?).take(None, beats)?;
        let path = place.path(UNFINISHED)?;
        let file = File::options().read(true).write(true).create_new(true).open(&path)?;
        Ok((UnfinishedFile { place, path }, file))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the file its final name, in the place of an older file.
    pub fn replace(mut self) -> io::Result<()> {
        fs::rename(&self.path, &self.place.to)?;
        self.place.lock = None;
        Ok(())
    }

    /// Gives the file its final name, which no other file has.
    ///
    /// # Errors
    /// Returns [`io::ErrorKind::AlreadyExists`] if another file has it; that one stays.
    pub fn name(self) -> io::Result<()> {
        // Unlike a rename, a link does not replace a file. Some file systems have none.
        match fs::hard_link(&self.path, &self.place.to) {
            Ok(()) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Err(e),
            Err(_) if is_taken(&self.place.to) => Err(io::ErrorKind::AlreadyExists.into()),
            Err(_) => self.replace(),
        }
    }
}

impl Drop for UnfinishedFile {
    fn drop(&mut self) {
        if self.place.lock.is_some() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A folder that is written beside its final name. If this is dropped before it has its name, the folder is removed.
#[derive(Debug)]
pub(crate) struct UnfinishedFolder {
    place: Place,
    path: PathBuf,
}

impl UnfinishedFolder {
    /// Returns the folder in which the job with a drawn number writes `to`: all ranks of a job know it.
    ///
    /// # Errors
    /// Refuses a path that does not end with a name.
    pub fn path_of(to: &Path, number: u64) -> io::Result<PathBuf> {
        Place::new(to, number).path(UNFINISHED)
    }

    /// Makes the folder, and those above it, and removes what dead programs left of this name, and of names that begin
    /// with `family`.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be made, or if the system refuses the thread that touches its lock.
    pub fn create(to: &Path, number: u64, family: Option<&str>) -> io::Result<UnfinishedFolder> {
        name_of(to)?;
        make_folders(parent(to))?;
        let place = Place::new(to, number).take(family, true)?;
        let path = place.path(UNFINISHED)?;
        fs::create_dir(&path)?;
        Ok(UnfinishedFolder { place, path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Refuses a folder that something else has removed meanwhile.
    pub fn expect(&self, verb: &str) -> Result<()> {
        if self.path.is_dir() { Ok(()) } else { Err(vanished(verb, &self.path)) }
    }

    /// Flushes the folder and gives it its final name, which nothing else has.
    ///
    /// # Errors
    /// Refuses a final name that something else has got meanwhile, and a folder that has vanished. If only the last
    /// flush of the folder above fails, the error says so, and the folder has its name.
    pub fn name(self, verb: &'static str) -> Result<()> {
        self.expect(verb)?;
        let to = self.place.to.clone();
        // A rename does not replace a folder that has files; an empty one it would.
        if is_taken(&to) {
            return Err(taken(verb, &to));
        }
        self.rename(verb, &to)
    }

    /// Flushes the folder and gives it its final name, in the place of an older folder, which is removed. If the program
    /// dies in between, the older one has its name again after the next call of [`remove_remains`].
    ///
    /// # Errors
    /// Returns the errors of [`UnfinishedFolder::name`].
    pub fn replace(self, verb: &'static str) -> Result<()> {
        self.expect(verb)?;
        let to = self.place.to.clone();
        let old = self.place.path(REPLACED).map_err(|e| Error::io(verb, &to, e))?;
        match fs::rename(&to, &old) {
            Ok(()) => {
                let named = self.rename(verb, &to);
                if named.is_err() && !is_taken(&to) {
                    let _ = fs::rename(&old, &to);
                }
                named.and_then(|()| fs::remove_dir_all(&old).map_err(|e| Error::io(verb, &old, e)))
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => self.rename(verb, &to),
            Err(e) => Err(Error::io(verb, &to, e)),
        }
    }

    fn rename(mut self, verb: &'static str, to: &Path) -> Result<()> {
        let named = File::open(&self.path).and_then(|file| file.sync_all());
        let named = named.and_then(|()| fs::rename(&self.path, to));
        if let Err(e) = named {
            return Err(match (self.path.is_dir(), is_taken(to)) {
                (false, _) => vanished(verb, &self.path),
                (true, true) => taken(verb, to),
                (true, false) => Error::io(verb, to, e),
            });
        }
        self.place.lock = None;
        File::open(parent(to)).and_then(|file| file.sync_all()).map_err(|e| Error::io(verb, to, e))
    }
}

impl Drop for UnfinishedFolder {
    fn drop(&mut self) {
        if self.place.lock.is_some() {
            // Other ranks may still put files there. If all tries fail, the folder counts as that of a dead program later.
            let _ = (0..REMOVALS).any(|_| remove(&self.path).is_ok());
        }
    }
}

/// Returns `error`, or that the folder has vanished if that is its cause: files are missing in it, or it is.
pub(crate) fn or_vanished(verb: &str, folder: &Path, error: Error) -> Error {
    let is_missing = error.downcast_ref().is_some_and(|e: &io::Error| e.kind() == io::ErrorKind::NotFound);
    if is_missing || !folder.is_dir() { vanished(verb, folder) } else { error }
}

/// Returns the error of a job whose unfinished folder, or what it wrote there, is gone.
pub(crate) fn vanished(verb: &str, path: &Path) -> Error {
    let rule = "the folder in which the files were written has vanished";
    Error::invalid(verb, rule, path.display().to_string(), "find out what removes it, and save again")
}

fn taken(verb: &str, to: &Path) -> Error {
    let rule = "another program has made the folder meanwhile";
    Error::invalid(verb, rule, to.display().to_string(), "choose another name")
}

/// Draws a number that no other job has.
pub(crate) fn draw_number() -> io::Result<u64> {
    getrandom::u64().map_err(|e| io::Error::other(e.to_string()))
}

/// Returns `true` if something has this name, also a symbolic link that leads nowhere.
pub(crate) fn is_taken(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Returns the folder that a path is in.
pub(crate) fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns the name that a path ends with, as it is a part of hidden names: long names are cut, so that these fit.
fn name_of(to: &Path) -> io::Result<String> {
    let refused = || io::Error::new(io::ErrorKind::InvalidInput, "the path does not end with a name");
    let mut name = to.file_name().ok_or_else(refused)?.to_string_lossy().into_owned();
    let cut = (0..=NAME_BYTES.min(name.len())).rev().find(|&at| name.is_char_boundary(at));
    name.truncate(cut.unwrap_or(0));
    Ok(name)
}

/// Makes a folder and those above it, and flushes the entry of each.
fn make_folders(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    make_folders(parent(dir))?;
    match fs::create_dir(dir) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
        _ => File::open(parent(dir))?.sync_all(),
    }
}
