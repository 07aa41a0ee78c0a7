//! Locks of dead and of live programs, of this host and of others; names that two programs want.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::lock::{LockText, touch};
use super::owner::Owner;
use super::remains::remove_remains;
use super::unfinished::{UnfinishedFile, UnfinishedFolder, draw_number};
use super::write_whole;

struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        let dir = std::env::temp_dir().join(format!("isoshard-files-{:016x}", draw_number().unwrap()));
        fs::create_dir_all(&dir).unwrap();
        Folder(dir)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn entries(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap().flatten();
        let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Makes what a program leaves that dies while it writes `model`: a lock, with an age, and an unfinished folder.
    fn leave(&self, number: u64, owner: Option<&Owner>, age: Duration, kind: &str) {
        let folder = self.at(&format!(".model.{number:016x}.{kind}"));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("part"), "half").unwrap();
        let old = SystemTime::now() - age;
        if let Some(owner) = owner {
            let lock = self.at(&format!(".model.{number:016x}.lock"));
            fs::write(&lock, serde_json::to_vec(&LockText { owner: owner.clone(), touched: 0 }).unwrap())
                .unwrap();
            set_time(&lock, old);
        }
        set_time(&folder.join("part"), old);
        set_time(&folder, old);
    }

    fn numbers(&self) -> Vec<String> {
        let unfinished = |name: &String| name.ends_with(".unfinished");
        self.entries().iter().filter(|name| unfinished(name)).map(|name| name[22..23].to_string()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn set_time(path: &Path, time: SystemTime) {
    File::open(path).and_then(|file| file.set_modified(time)).unwrap();
}

const SECOND: Duration = Duration::from_secs(1);

#[cfg(target_os = "linux")]
#[test]
fn remains_of_dead_programs_alone_are_removed() {
    let folder = Folder::new();
    let this = Owner::this();
    let elsewhere = Owner { place: "another kernel pid:[1]".into(), ..this.clone() };
    let ended = Owner { started: this.started + 1, ..this.clone() };
    let gone = Owner { pid: u32::MAX, ..this.clone() };
    folder.leave(1, Some(&this), 9000 * SECOND, "unfinished"); // lives, however old its lock is
    folder.leave(2, Some(&ended), Duration::ZERO, "unfinished");
    folder.leave(3, Some(&gone), Duration::ZERO, "unfinished");
    folder.leave(4, Some(&elsewhere), 601 * SECOND, "unfinished");
    folder.leave(5, Some(&elsewhere), 560 * SECOND, "unfinished"); // touched recently
    folder.leave(6, None, 601 * SECOND, "unfinished"); // of a version without locks
    folder.leave(7, None, 560 * SECOND, "unfinished");
    folder.leave(8, None, Duration::ZERO, "removed"); // no program wants it
    fs::write(folder.at(".model.0000000000000009.lock"), "cut of").unwrap(); // just begun
    // The clock of this host may be wrong: a lock from the future is fresh.
    let ahead = folder.at(".model.000000000000000a.unfinished");
    fs::create_dir(&ahead).unwrap();
    set_time(&ahead, SystemTime::now() + 9000 * SECOND);
    remove_remains(&folder.0, &|name| name == "other", SystemTime::now()).unwrap();
    assert_eq!(folder.numbers().len(), 8, "names that are not asked for stay");
    remove_remains(&folder.0, &|name| name == "model", SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!(
        folder.numbers(),
        ["1", "4", "5", "6", "7", "a"],
        "without a clock, what is dead by its process"
    );
    remove_remains(&folder.0, &|name| name == "model", SystemTime::now()).unwrap();
    assert_eq!(folder.numbers(), ["1", "5", "7", "a"]);
    let locks: Vec<String> = folder.entries().into_iter().filter(|name| name.ends_with(".lock")).collect();
    assert_eq!(locks.len(), 3, "{locks:?}");
    // The next program that writes the name removes what has died meanwhile, and nothing else.
    folder.leave(2, Some(&ended), Duration::ZERO, "unfinished");
    drop(UnfinishedFolder::create(&folder.at("model"), 11, None).unwrap());
    assert_eq!(folder.numbers(), ["1", "5", "7", "a"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_folder_that_was_moved_away_comes_back_if_nothing_replaced_it() {
    let folder = Folder::new();
    let ended = Owner { started: Owner::this().started + 1, ..Owner::this() };
    let remove = || remove_remains(&folder.0, &|name| name == "model", SystemTime::now()).unwrap();
    folder.leave(1, Some(&Owner::this()), Duration::ZERO, "replaced");
    remove();
    assert_eq!(folder.entries().len(), 2, "its program lives, and is about to replace it");
    folder.leave(1, Some(&ended), Duration::ZERO, "replaced");
    folder.leave(1, Some(&ended), Duration::ZERO, "unfinished");
    remove();
    assert_eq!(folder.entries(), ["model"]);
    folder.leave(2, Some(&ended), Duration::ZERO, "replaced");
    fs::write(folder.at("model/whole"), "new").unwrap();
    remove();
    assert_eq!((folder.entries(), folder.at("model/whole").exists()), (vec!["model".to_string()], true));
}

#[test]
fn a_lock_is_touched_and_does_not_come_back() {
    let folder = Folder::new();
    let path = folder.at("lock");
    fs::write(&path, "").unwrap();
    set_time(&path, SystemTime::now() - 9000 * SECOND);
    touch(&path, &Owner::this()).unwrap();
    assert!(super::lock::is_fresh(&path, SystemTime::now()));
    let text: LockText = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(text.owner, Owner::this());
    fs::remove_file(&path).unwrap();
    assert_eq!(touch(&path, &Owner::this()).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(folder.entries().is_empty());
}

#[test]
fn the_first_of_two_programs_gets_the_name() {
    let folder = Folder::new();
    let to = folder.at("train.bin");
    let [(first, mut a), (second, mut b)] = [(); 2].map(|()| UnfinishedFile::create(&to, true).unwrap());
    a.write_all(b"first").unwrap();
    b.write_all(b"second").unwrap();
    first.name().unwrap();
    assert_eq!(second.name().unwrap_err().kind(), ErrorKind::AlreadyExists);
    assert_eq!((folder.entries(), fs::read(&to).unwrap()), (vec!["train.bin".into()], b"first".to_vec()));
    drop(UnfinishedFile::create(&to, false).unwrap());
    let (third, mut c) = UnfinishedFile::create(&to, false).unwrap();
    c.write_all(b"third").unwrap();
    third.replace().unwrap();
    assert_eq!((folder.entries(), fs::read(&to).unwrap()), (vec!["train.bin".into()], b"third".to_vec()));

    let to = folder.at("model");
    let make = |number, text: &str| {
        let made = UnfinishedFolder::create(&to, number, None).unwrap();
        fs::write(made.path().join("weights"), text).unwrap();
        made
    };
    let (a, b, c, d) = (make(1, "a"), make(2, "b"), make(3, "c"), make(4, "d"));
    a.name("save").unwrap();
    let said = b.name("save").unwrap_err().to_string();
    assert!(said.starts_with("save: another program has made the folder meanwhile; got "), "{said}");
    fs::remove_dir_all(c.path()).unwrap();
    let said = c.name("save").unwrap_err().to_string();
    assert!(
        said.starts_with("save: the folder in which the files were written has vanished; got "),
        "{said}"
    );
    assert_eq!(fs::read(to.join("weights")).unwrap(), b"a");
    d.replace("save").unwrap();
    assert_eq!(fs::read(to.join("weights")).unwrap(), b"d");
    assert_eq!(folder.entries(), ["model", "train.bin"]);
}

/// An empty folder is another program's, which is about to fill it.
#[test]
fn an_empty_folder_is_not_replaced() {
    let folder = Folder::new();
    let made = UnfinishedFolder::create(&folder.at("model"), 1, None).unwrap();
    fs::create_dir(folder.at("model")).unwrap();
    assert!(made.name("save").is_err());
    assert_eq!(fs::read_dir(folder.at("model")).unwrap().count(), 0);
}

#[test]
fn small_files_are_replaced_whole() {
    let folder = Folder::new();
    let to = folder.at("machine.json");
    for text in ["a long text", "short"] {
        write_whole(&to, &[text.as_bytes(), b"\n"]).unwrap();
        assert_eq!(fs::read_to_string(&to).unwrap(), format!("{text}\n"));
    }
    let long = folder.at(&"n".repeat(250));
    write_whole(&long, &[b"x"]).unwrap();
    fs::remove_file(long).unwrap();
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(&to, folder.at("link")).unwrap();
        write_whole(&folder.at("link"), &[b"through"]).unwrap();
        assert_eq!(fs::read_to_string(&to).unwrap(), "through");
        write_whole(Path::new("/dev/null"), &[b"nothing"]).unwrap();
        fs::remove_file(folder.at("link")).unwrap();
    }
    assert_eq!(folder.entries(), ["machine.json"]);
    assert_eq!(write_whole(&folder.at("no/such"), &[]).unwrap_err().kind(), ErrorKind::NotFound);
}
