//! Small files that others see whole or not at all.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use super::unfinished::UnfinishedFile;

/// Writes a file, which takes the place of an older one at once. A symbolic link is followed; a pipe or a device is
/// written to.
///
/// # Errors
/// Returns an error if the file cannot be written; an older one stays then.
pub(crate) fn write_whole(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let write = |mut file: &File| parts.iter().try_for_each(|part| file.write_all(part));
    // Such as `/dev/stdout`, which a shell may have opened.
    if ["/dev", "/proc"].iter().any(|system| path.starts_with(system)) {
        return write(&File::create(path)?);
    }
    let target = fs::canonicalize(path);
    let path = target.as_deref().unwrap_or(path);
    let old = fs::metadata(path).ok();
    if old.as_ref().is_some_and(|data| !data.is_file()) {
        return write(&File::options().write(true).open(path)?);
    }
    let (unfinished, file) = match UnfinishedFile::create(path, false) {
        Ok(made) => made,
        // A file may be written although its folder may not.
        Err(e) if old.is_some() && e.kind() == io::ErrorKind::PermissionDenied => {
            return write(&File::create(path)?);
        }
        Err(e) => return Err(e),
    };
    if let Some(old) = old {
        file.set_permissions(old.permissions())?;
    }
    write(&file)?;
    file.sync_all()?;
    unfinished.replace()
}
