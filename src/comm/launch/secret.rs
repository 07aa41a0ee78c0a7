//! The secret that the ranks of one job share, and the ways to come by it.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use super::vars::{Vars, refused};
use crate::error::Result;

/// The variable that holds the secret itself.
const TOKEN: &str = "ISOSHARD_TOKEN";
/// The variable that names a file with it.
const TOKEN_FILE: &str = "ISOSHARD_TOKEN_FILE";
/// A shorter secret could be guessed from what a listener sees.
const LEAST_BYTES: usize = 16;
const MOST_BYTES: usize = 4096;
const DRAWN_BYTES: usize = 32;

/// A text that the ranks of a job know and nobody else does. Shown nowhere.
#[derive(Clone, PartialEq, Eq)]
pub(in crate::comm) struct Secret(Box<[u8]>);

/// The place of a job's secret, as the environment names it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::comm) enum SecretSource {
    /// Nobody has given one.
    #[default]
    None,
    /// Given by value.
    Value(Secret),
    /// In a file that only its owner may read; rank 0 makes it where it is not there.
    File(PathBuf),
}

impl Secret {
    /// A secret from the system's random numbers: 32 bytes in hexadecimal.
    ///
    /// # Errors
    /// A system that has none.
    pub fn draw() -> Result<Secret> {
        let mut bytes = [0; DRAWN_BYTES];
        getrandom::fill(&mut bytes).map_err(|e| {
            refused("the system has no random numbers", e.to_string(), "set ISOSHARD_TOKEN on all ranks")
        })?;
        let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Secret(text.into_bytes().into()))
    }

    /// The secret that a text is; `from` is where it stood. White space around it does not count.
    ///
    /// # Errors
    /// Refuses one of less than 16 bytes, or of more than 4096.
    pub fn from_text(text: &str, from: &str) -> Result<Secret> {
        let bytes = text.trim().as_bytes();
        match bytes.len() {
            LEAST_BYTES..=MOST_BYTES => Ok(Secret(bytes.into())),
            n => Err(refused(
                "a secret has 16 to 4096 bytes",
                format!("{n} bytes in {from}"),
                "take 32 random bytes in hexadecimal, as `openssl rand -hex 32` prints them",
            )),
        }
    }

    /// The text that [`Secret::from_text`] read.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.0).expect("made of a text")
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Without the bytes.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl SecretSource {
    pub(super) fn from_vars(vars: &Vars) -> Result<SecretSource> {
        Ok(match (vars.text(TOKEN), vars.text(TOKEN_FILE)) {
            (Some(_), Some(file)) => {
                return Err(refused(
                    "the secret is given twice",
                    format!("{TOKEN} and {TOKEN_FILE}={file}"),
                    "set one of them, the same on all ranks",
                ));
            }
            (Some(text), None) => SecretSource::Value(Secret::from_text(&text, TOKEN)?),
            (None, Some(file)) => SecretSource::File(file.into()),
            (None, None) => SecretSource::None,
        })
    }

    /// The secret, if there is one. Rank 0 (`draws`) draws it where its file is not there; the others wait for the file until
    /// `end`.
    ///
    /// # Errors
    /// Refuses a file that others than its owner may read, or that holds no secret; names one that does not come.
    pub fn read(&self, draws: bool, end: Instant) -> Result<Option<Secret>> {
        const PAUSE: Duration = Duration::from_millis(20);
        let path = match self {
            SecretSource::None => return Ok(None),
            SecretSource::Value(secret) => return Ok(Some(secret.clone())),
            SecretSource::File(path) => path,
        };
        loop {
            match File::open(path) {
                Ok(file) => return read_file(file, path).map(Some),
                Err(e) if e.kind() == io::ErrorKind::NotFound && draws => {
                    write_file(path, &Secret::draw()?).map_err(|e| unusable(path, &e.to_string()))?;
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound && Instant::now() < end => thread::sleep(PAUSE),
                Err(e) => return Err(unusable(path, &e.to_string())),
            }
        }
    }
}

fn unusable(path: &Path, why: &str) -> crate::Error {
    refused(
        "the file of the secret cannot be used",
        format!("{TOKEN_FILE}={}: {why}", path.display()),
        "name a file of your own with mode 600 that all ranks see, or one that is not there yet: rank 0 makes it",
    )
}

fn read_file(file: File, path: &Path) -> Result<Secret> {
    check_mode(&file, path)?;
    let mut text = String::new();
    let limit = MOST_BYTES as u64 + 64;
    file.take(limit).read_to_string(&mut text).map_err(|e| unusable(path, &e.to_string()))?;
    Secret::from_text(&text, &path.display().to_string())
}

#[cfg(unix)]
fn check_mode(file: &File, path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let metadata = file.metadata().map_err(|e| unusable(path, &e.to_string()))?;
    let mode = metadata.permissions().mode() & 0o777;
    if !metadata.is_file() {
        return Err(unusable(path, "it is no file"));
    }
    if mode & 0o077 != 0 {
        return Err(unusable(path, &format!("others may read it, its mode is {mode:03o}")));
    }
    Ok(())
}

#[cfg(not(unix))]
fn check_mode(_: &File, _: &Path) -> Result<()> {
    Ok(())
}

/// Makes the file, whole at once: who opens it finds all of the secret. Where somebody else has made it meanwhile, theirs stays.
fn write_file(path: &Path, secret: &Secret) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}", std::process::id()));
    let unfinished = path.with_file_name(name);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(0o600);
    }
    let written = options.open(&unfinished).and_then(|mut file| {
        writeln!(file, "{}", secret.text())?;
        file.sync_all()
    });
    // A link, unlike a rename, does not replace what is there.
    let made = written.and_then(|()| match fs::hard_link(&unfinished, path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => fs::rename(&unfinished, path),
        _ => Ok(()),
    });
    let _ = fs::remove_file(&unfinished);
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(table: &[(&str, &str)]) -> Result<SecretSource> {
        let get = |name: &str| table.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
        SecretSource::from_vars(&Vars::new(&get))
    }

    #[test]
    fn a_secret_is_given_by_value_or_by_file_and_never_shown() {
        let long = "0123456789abcdef";
        let given = from(&[(TOKEN, " 0123456789abcdef\n")]).unwrap();
        assert_eq!(given, SecretSource::Value(Secret(long.as_bytes().into())));
        assert_eq!(format!("{given:?}"), "Value(Secret(..))");
        assert_eq!(from(&[]).unwrap(), SecretSource::None);
        for (table, want) in [
            (&[(TOKEN, "short")][..], "a secret has 16 to 4096 bytes; got 5 bytes in ISOSHARD_TOKEN"),
            (&[(TOKEN, long), (TOKEN_FILE, "f")], "the secret is given twice; got ISOSHARD_TOKEN and"),
        ] {
            let text = from(table).unwrap_err().to_string();
            assert!(text.contains(want) && !text.contains(long), "{text}");
        }
    }

    #[test]
    fn rank_0_makes_the_file_and_the_others_wait_for_it() {
        let dir = std::env::temp_dir().join(format!("isoshard-secret-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let source = SecretSource::File(dir.join("token"));
        let soon = || Instant::now() + Duration::from_secs(20);
        let waiting = source.clone();
        let other = thread::spawn(move || waiting.read(false, soon()).unwrap().unwrap());
        let drawn = source.read(true, soon()).unwrap().unwrap();
        assert_eq!(other.join().unwrap(), drawn);
        assert_eq!(source.read(true, soon()).unwrap().unwrap(), drawn, "what is there stays");
        assert_eq!(drawn.bytes().len(), 64);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "nothing unfinished is left");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let path = dir.join("token");
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
            let text = source.read(false, soon()).unwrap_err().to_string();
            assert!(text.contains("others may read it, its mode is 640"), "{text}");
        }
        let absent = SecretSource::File(dir.join("absent")).read(false, Instant::now()).unwrap_err();
        assert!(
            absent.to_string().contains("the file of the secret cannot be used; got ISOSHARD_TOKEN_FILE=")
        );
        fs::remove_dir_all(&dir).unwrap();
    }
}
