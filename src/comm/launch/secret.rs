//! The secret that the ranks of one job share, and where it comes from.

use std::ffi::OsString;
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
/// The variable that names a file with the secret.
const TOKEN_FILE: &str = "ISOSHARD_TOKEN_FILE";
/// A shorter secret could be guessed from recorded traffic.
const LEAST_BYTES: usize = 16;
const MOST_BYTES: usize = 4096;
const DRAWN_BYTES: usize = 32;

/// A text that only the ranks of a job know. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub(in crate::comm) struct Secret(Box<[u8]>);

/// The source of a job's secret in the environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::comm) enum SecretSource {
    /// No secret is given.
    #[default]
    None,
    /// The secret itself.
    Value(Secret),
    /// A file that only its owner can read. Rank 0 creates it if it does not exist.
    File(PathBuf),
}

impl Secret {
    /// Draws a secret from the system's random numbers: 32 bytes in hexadecimal.
    ///
    /// # Errors
    /// Returns an error if the system has none.
    pub fn draw() -> Result<Secret> {
        let text = random_hex::<DRAWN_BYTES>().map_err(|e| {
            refused("the system has no random numbers", e.to_string(), "set ISOSHARD_TOKEN on all ranks")
        })?;
        Ok(Secret(text.into_bytes().into()))
    }

    /// Makes a secret from a text without the white space around it; `from` names the text's source in errors.
    ///
    /// # Errors
    /// Refuses fewer than 16 and more than 4096 bytes.
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

    /// Returns the text.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.0).expect("made of a text")
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Writes `Secret(..)`, without the bytes.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl SecretSource {
    pub(super) fn from_vars(vars: &Vars) -> Result<SecretSource> {
        Ok(match (vars.text_or_absent(TOKEN)?, vars.text_or_absent(TOKEN_FILE)?) {
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

    /// Reads the secret, if there is one. If its file does not exist, rank 0 (`draws`) creates it with a new secret,
    /// and other ranks wait for it until `end`.
    ///
    /// # Errors
    /// Refuses a path that is not a regular file, a file of another user than this process's or root, one that other
    /// users can read, and one without a valid secret. Returns an error if the file does not appear in time or the
    /// path is a dangling link.
    pub fn read(&self, draws: bool, end: Instant) -> Result<Option<Secret>> {
        let path = match self {
            SecretSource::None => return Ok(None),
            SecretSource::Value(secret) => return Ok(Some(secret.clone())),
            SecretSource::File(path) => path,
        };
        let (begun, mut drawn) = (Instant::now(), false);
        loop {
            let error = match open(path) {
                Ok(file) => return read_file(file, path).map(Some),
                Err(e) if e.kind() == io::ErrorKind::NotFound => e,
                Err(e) => return Err(unusable(path, &e.to_string())),
            };
            let leads_nowhere = fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink());
            let now = Instant::now();
            if leads_nowhere && (draws || now >= end) {
                return Err(unusable(path, "it is a link to a file that is not there"));
            } else if draws && !drawn {
                write_file(path, &Secret::draw()?).map_err(|e| unusable(path, &e.to_string()))?;
                drawn = true;
            } else if now < end {
                thread::sleep(pause_after(now - begun).min(end - now));
                // A network file system may cache that the file does not exist until the directory is read.
                let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
                let _ = fs::read_dir(directory.unwrap_or(Path::new("."))).map(|mut all| all.next());
            } else {
                return Err(unusable(path, &error.to_string()));
            }
        }
    }
}

/// Returns the pause before the next look at the file. It grows, because many ranks may ask one file server.
fn pause_after(waited: Duration) -> Duration {
    Duration::from_millis(if waited < Duration::from_secs(1) { 20 } else { 200 })
}

/// Refuses a secret that is not UTF-8. The usual lookup would treat it as absent.
pub(super) fn check_encoding(get: impl Fn(&str) -> Option<OsString>) -> Result<()> {
    let broken = |name: &&str| get(name).is_some_and(|value| value.to_str().is_none());
    match [TOKEN, TOKEN_FILE].into_iter().find(broken) {
        Some(name) => Err(refused(
            "a variable is not UTF-8",
            name.into(),
            "take 32 random bytes in hexadecimal, as `openssl rand -hex 32` prints them, and a file's name that is a text",
        )),
        None => Ok(()),
    }
}

fn random_hex<const BYTES: usize>() -> std::result::Result<String, getrandom::Error> {
    let mut bytes = [0; BYTES];
    getrandom::fill(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn unusable(path: &Path, why: &str) -> crate::Error {
    refused(
        "the file of the secret cannot be used",
        format!("{TOKEN_FILE}={}: {why}", path.display()),
        "name a file of your own with mode 600 that all ranks see, or one that is not there yet: rank 0 makes it",
    )
}

/// Opens a regular file. The type is checked before, because opening a named pipe waits for its other end, and after,
/// because the path may have changed.
fn open(path: &Path) -> io::Result<File> {
    let plain = |found: fs::Metadata| match found.is_file() {
        true => Ok(()),
        false => Err(io::Error::other("it is not a regular file")),
    };
    plain(fs::metadata(path)?)?;
    let file = File::open(path)?;
    plain(file.metadata()?)?;
    Ok(file)
}

fn read_file(file: File, path: &Path) -> Result<Secret> {
    #[cfg(unix)]
    check_owner(&file).map_err(|e| unusable(path, &e.to_string()))?;
    let mut text = String::new();
    let limit = MOST_BYTES as u64 + 64;
    file.take(limit).read_to_string(&mut text).map_err(|e| unusable(path, &e.to_string()))?;
    Secret::from_text(&text, &path.display().to_string())
}

#[cfg(unix)]
fn check_owner(file: &File) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let found = file.metadata()?;
    match objection(found.uid(), found.mode(), own_user()?) {
        Some(why) => Err(io::Error::other(why)),
        None => Ok(()),
    }
}

/// Returns the reason why a file of this owner and mode cannot hold a secret of user `own`.
#[cfg(unix)]
fn objection(owner: u32, mode: u32, own: u32) -> Option<String> {
    if owner != own && owner != 0 {
        Some(format!("it is user {owner}'s, and this process is user {own}'s"))
    } else if mode & 0o077 != 0 {
        Some(format!("others may read it, its mode is {:03o}", mode & 0o777))
    } else {
        None
    }
}

/// Returns the number of this process's effective user: on Linux from `/proc`, which uses this process's user
/// namespace as file owners do; elsewhere the owner of a new file, which POSIX defines as this user.
#[cfg(unix)]
fn own_user() -> io::Result<u32> {
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
    if let Ok(status) = fs::read_to_string("/proc/self/status")
        // The line holds the real, effective, saved and file-system user.
        && let Some(users) = status.lines().find_map(|line| line.strip_prefix("Uid:"))
        && let Some(Ok(effective)) = users.split_whitespace().nth(1).map(str::parse)
    {
        return Ok(effective);
    }
    let path =
        std::env::temp_dir().join(format!("isoshard-{}", random_hex::<8>().map_err(io::Error::other)?));
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    let file = file.map_err(|e| io::Error::other(format!("this process's user cannot be found out: {e}")))?;
    let _ = fs::remove_file(&path);
    Ok(file.metadata()?.uid())
}

/// Creates the file atomically, so that readers see all of the secret. If another process has created it meanwhile,
/// that file stays.
fn write_file(path: &Path, secret: &Secret) -> io::Result<()> {
    // Processes of different machines or containers may have equal numbers, so the name is random.
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}", random_hex::<8>().map_err(io::Error::other)?));
    let unfinished = path.with_file_name(name);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(0o600);
    }
    let mut file = options.open(&unfinished)?;
    let written = writeln!(file, "{}", secret.text()).and_then(|()| file.sync_all());
    // Unlike a rename, a link does not replace an existing file.
    let made = written.and_then(|()| match fs::hard_link(&unfinished, path) {
        Ok(()) => Ok(false),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(_) => fs::rename(&unfinished, path).map(|()| true),
    });
    if !matches!(made, Ok(true)) {
        let _ = fs::remove_file(&unfinished);
    }
    made.map(drop)
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
            (&[(TOKEN, "")], "a variable is set and empty; got ISOSHARD_TOKEN=; give"),
            (
                &[(TOKEN, long), (TOKEN_FILE, " ")],
                "a variable is set and empty; got ISOSHARD_TOKEN_FILE=; give",
            ),
        ] {
            let text = from(table).unwrap_err().to_string();
            assert!(text.contains(want) && !text.contains(long), "{text}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_secret_that_is_no_text_is_refused() {
        use std::os::unix::ffi::OsStringExt;
        for name in [TOKEN, TOKEN_FILE] {
            let get =
                |asked: &str| (asked == name).then(|| OsString::from_vec(b"0123456789abcdef\xff".to_vec()));
            let text = check_encoding(get).unwrap_err().to_string();
            assert!(text.contains(&format!("a variable is not UTF-8; got {name};")), "{text}");
        }
        assert_eq!(check_encoding(|_| Some("a text".into())), Ok(()));
        assert_eq!(check_encoding(|_| None), Ok(()));
    }

    fn directory() -> PathBuf {
        let dir = std::env::temp_dir().join(format!("isoshard-secret-{}", random_hex::<8>().unwrap()));
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    /// Returns a rank's error about a file, within a time limit.
    #[cfg(unix)]
    fn refusal(path: &Path, draws: bool, wait: Duration) -> String {
        let (source, end) = (SecretSource::File(path.into()), Instant::now() + wait);
        let (said, hears) = std::sync::mpsc::channel();
        thread::spawn(move || said.send(source.read(draws, end).unwrap_err().to_string()));
        hears.recv_timeout(Duration::from_secs(20)).expect("a rank says something in time")
    }

    #[cfg(unix)]
    #[test]
    fn a_link_to_nothing_and_a_pipe_keep_nobody_waiting() {
        let dir = directory();
        let link = dir.join("link");
        std::os::unix::fs::symlink(dir.join("nothing"), &link).unwrap();
        for (draws, wait) in [(true, Duration::from_secs(60)), (false, Duration::from_millis(50))] {
            let text = refusal(&link, draws, wait);
            assert!(text.contains("link: it is a link to a file that is not there;"), "{text}");
        }
        let pipe = dir.join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.is_ok_and(|status| status.success()), "mkfifo is every Unix's");
        for path in [&pipe, &dir] {
            for draws in [true, false] {
                let text = refusal(path, draws, Duration::from_secs(60));
                assert!(text.contains(": it is not a regular file;"), "{text}");
            }
        }
        fs::remove_dir_all(&dir).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn a_file_of_another_user_is_refused() {
        use std::os::unix::fs::{MetadataExt, chown};
        assert_eq!(objection(7, 0o100_600, 7), None);
        assert_eq!(objection(0, 0o100_400, 7), None, "root's, as Kubernetes mounts it");
        assert_eq!(objection(7, 0o100_600, 8).unwrap(), "it is user 7's, and this process is user 8's");
        assert_eq!(objection(7, 0o100_600, 0).unwrap(), "it is user 7's, and this process is user 0's");
        assert_eq!(objection(0, 0o100_440, 7).unwrap(), "others may read it, its mode is 440");
        let dir = directory();
        assert_eq!(own_user().unwrap(), fs::metadata(&dir).unwrap().uid());
        let path = dir.join("token");
        write_file(&path, &Secret::draw().unwrap()).unwrap();
        if chown(&path, Some(12_345), None).is_ok() {
            let text = refusal(&path, true, Duration::from_secs(60));
            assert!(text.contains("token: it is user 12345's, and this process is user"), "{text}");
        } else {
            eprintln!("SKIPPED (only root gives files away): a foreign user's file is not read");
        }
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn what_stands_beside_the_file_stays() {
        let dir = directory();
        let beside = dir.join(format!("token.{}", std::process::id()));
        fs::write(&beside, "another container's").unwrap();
        let source = SecretSource::File(dir.join("token"));
        source.read(true, Instant::now() + Duration::from_secs(20)).unwrap().unwrap();
        assert_eq!(fs::read_to_string(&beside).unwrap(), "another container's");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 2, "nothing unfinished is left");
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn who_waits_for_long_asks_seldom() {
        assert_eq!(pause_after(Duration::from_millis(900)), Duration::from_millis(20));
        assert_eq!(pause_after(Duration::from_secs(2)), Duration::from_millis(200));
    }

    #[test]
    fn rank_0_makes_the_file_and_the_others_wait_for_it() {
        let dir = directory();
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
