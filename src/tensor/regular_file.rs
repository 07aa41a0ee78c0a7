//! Opens the files that this crate reads: tensors, tokens, texts and settings.

use std::fs::{self, File};
use std::io;
use std::path::Path;

/// Opens a file that is there to be read. A pipe or a device is refused: opening or reading it could wait for ever.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    File::open(path)
}

#[cfg(test)]
mod tests {
    use std::process;

    use super::*;

    /// Opening a pipe waits for a writer, and `/dev/zero` never ends.
    #[test]
    fn what_could_be_read_for_ever_is_not_opened() {
        let pipe = std::env::temp_dir().join(format!("isoshard-pipe-{}", process::id()));
        let made = process::Command::new("mkfifo").arg(&pipe).status().is_ok_and(|made| made.success());
        let refused = |path: &Path| open_regular(path).unwrap_err().to_string();
        for path in [Path::new("/dev/zero"), &std::env::temp_dir()] {
            assert_eq!(refused(path), "it is no regular file");
        }
        if made {
            assert_eq!(refused(&pipe), "it is no regular file");
            fs::remove_file(&pipe).unwrap();
        }
        assert_eq!(open_regular(&pipe).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
