//! Files that programs which have died left beside the names that they wrote.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::time::SystemTime;

use super::lock::{is_alive, is_fresh};
use super::names::{LOCK, REMOVED, REPLACED, UNFINISHED, hidden_name, parts};

/// Removes what dead programs left in `dir` of files and folders whose final names `is_ours` accepts. `now` is the file
/// system's time. A folder that was moved away to be replaced gets its name back if nothing has it.
///
/// # Errors
/// Returns an error if the folder cannot be read, or something cannot be removed.
pub(crate) fn remove_remains(dir: &Path, is_ours: &dyn Fn(&str) -> bool, now: SystemTime) -> io::Result<()> {
    // The kinds of files by name and number.
    let mut groups: BTreeMap<(String, String), Vec<&str>> = BTreeMap::new();
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let Some((of, number, kind)) = name.to_str().and_then(parts) else { continue };
        if is_ours(of) {
            groups.entry((of.into(), number.into())).or_default().push(kind);
        }
    }
    for ((of, number), kinds) in groups {
        let path = |kind: &str| dir.join(hidden_name(&of, &number, kind));
        // A folder that is being removed is not wanted by any program.
        if kinds.contains(&REMOVED) {
            remove(&path(REMOVED))?;
        }
        let lives = match kinds.contains(&LOCK) {
            true => is_alive(&path(LOCK), now),
            false => kinds.iter().any(|kind| is_fresh(&path(kind), now)),
        };
        if lives {
            continue;
        }
        if kinds.contains(&REPLACED) {
            match fs::symlink_metadata(dir.join(&of)).is_ok() {
                true => remove(&path(REPLACED))?,
                // The program died between two renames.
                false => missing_is_fine(fs::rename(path(REPLACED), dir.join(&of)))?,
            }
        }
        if kinds.contains(&UNFINISHED) {
            remove(&path(UNFINISHED))?;
        }
        // The lock goes last: if this program dies meanwhile, the next one can still tell.
        if kinds.contains(&LOCK) {
            remove(&path(LOCK))?;
        }
    }
    Ok(())
}

/// Removes a file or a folder; it may be gone already, because other programs remove remains as well.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    let is_dir = fs::symlink_metadata(path).is_ok_and(|data| data.is_dir());
    missing_is_fine(if is_dir { fs::remove_dir_all(path) } else { fs::remove_file(path) })
}

fn missing_is_fine(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
