//! The packed crate and the packed package of its kernels: they are small, have what they need, and a crate outside this repository
//! builds against them, runs, and proves itself with `isoshard::testing` (tests/outside).
//!
//! The program is one of its own because it starts Cargo. Everything that it makes stands below `target/tmp/package`, where
//! dependencies stay compiled from one run to the next: the first takes about a minute on two cores, later ones seconds.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{env, fs};

/// crates.io's limit is twice as high.
const PACKED_BYTES: u64 = 5 << 20;
/// Files without which the packages do not build, are not documented or may not be used.
const NEEDED: [&str; 7] = [
    "Cargo.lock",
    "README.md",
    "CHANGELOG.md",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "src/lib.rs",
    "tests/golden/rng.txt",
];
const NEEDED_OF_KERNELS: [&str; 4] = ["LICENSE-APACHE", "LICENSE-MIT", "cuda/iso.cuh", "src/lib.rs"];

/// The crate outside, by the name of its file there and here.
const OUTSIDE: [(&str, &str); 4] = [
    ("Cargo.toml", "manifest.toml"),
    ("src/main.rs", "src/main.rs"),
    ("src/lib.rs", "src/lib.rs"),
    ("tests/prove.rs", "tests/prove.rs"),
];
/// Texts that its tests print about an operator with a false row: the row, the layouts, and the first wrong element.
const FOUND: [&str; 3] = [
    "the row S2 -> S2 is wrong",
    "f32[5, 2, 7]@(a:S2) -> result 0 f32[5, 2, 7]@(a:S2): rank 1, element",
    "not equivalent to a single rank: step 0, the result: element [0, 1] is",
];

#[test]
fn a_crate_outside_builds_against_the_packed_form_and_runs() {
    if cargo(root()).arg("--version").output().is_err() {
        // Past the test harness, which keeps the output of tests that pass.
        writeln!(std::io::stderr(), "SKIPPED (no Cargo): the packed form").expect("stderr takes a line");
        return;
    }
    let work = Path::new(env!("CARGO_TARGET_TMPDIR")).join("package");
    let unpacked = work.join("unpacked");
    // A downloaded package is the packed form already, and Cargo does not pack it a second time.
    if root().join("Cargo.toml.orig").exists() {
        update(root(), &unpacked);
    } else {
        pack_into(&work);
    }
    let kernels = work.join("isoshard-kernels");
    let needed = NEEDED.map(|name| unpacked.join(name)).into_iter();
    let of_kernels = NEEDED_OF_KERNELS.map(|name| kernels.join(name)).into_iter();
    let missing: Vec<_> =
        needed.chain(of_kernels.filter(|_| kernels.exists())).filter(|file| !file.exists()).collect();
    assert!(missing.is_empty(), "the packages lack {missing:?}");

    let outside = work.join("outside");
    for (there, here) in OUTSIDE {
        let mut text = fs::read(unpacked.join("tests/outside").join(here)).expect("a file of the package");
        if there == "Cargo.toml" && kernels.exists() {
            text.extend(b"\n[patch.crates-io]\nisoshard-kernels = { path = \"../isoshard-kernels\" }\n");
        }
        write(&outside.join(there), &text);
    }
    // The versions that this crate is tested with, which are downloaded already.
    write(&outside.join("Cargo.lock"), &fs::read(root().join("Cargo.lock")).expect("there is a lock file"));
    let outside_cargo = |args: &[&str]| {
        let mut command = cargo(&outside);
        command.args(args).args(["--quiet", "--offline", "--target-dir"]).arg(work.join("target"));
        // As a dependency the crate is not optimised, and would say so.
        command.env("ISOSHARD_NO_BUILD_WARNING", "1").output()
    };
    let proofs = finished("the outside crate's tests", outside_cargo(&["test"]));
    assert!(proofs.contains("test result: ok. 6 passed"), "{proofs}");
    // `cargo test` has built the crate's program too.
    let said = finished("the outside crate", Command::new(work.join("target/debug/outside")).output());
    let counts: Vec<usize> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    if kernels.exists() {
        let files = || fs::read_dir(kernels.join("cuda")).expect("there are kernels").flatten();
        let of = |ending: &str| {
            files().filter(|file| file.file_name().to_string_lossy().ends_with(ending)).count()
        };
        // Some files are a program for each dtype.
        assert!(counts.len() == 2 && counts[0] >= of(".cu") && counts[1] == of(".cuh"), "{said}");
    }
    first_hour(&work);
    let lies = outside_cargo(&["test", "--features", "false-row", "--test", "prove"]).expect("Cargo runs");
    let said = String::from_utf8_lossy(&lies.stdout);
    assert!(!lies.status.success(), "tests of a false row pass: {said}");
    let missing: Vec<&str> = FOUND.into_iter().filter(|part| !said.contains(part)).collect();
    assert!(missing.is_empty(), "tests of a false row do not say {missing:?}:\n{said}");
}

/// Takes a newcomer's path by README's lines: a new crate, the dependency, a program of a model of its own that dies and goes on.
fn first_hour(work: &Path) {
    let readme = fs::read_to_string(root().join("README.md")).expect("README.md");
    let block =
        readme.split("```").find_map(|block| block.strip_prefix("toml\n")).expect("README has the lines");
    let (dependency, profile) = block.split_once("\n\n").expect("the dependency, then the profile");
    assert!(profile.starts_with("[profile.dev.package.isoshard]"), "{block}");
    // Elsewhere: below this repository the new crate would join its workspace.
    let made = env::temp_dir().join(format!("isoshard-first-hour-{}", std::process::id()));
    let new = ["new", "--quiet", "--vcs", "none", "--name", "first_hour"];
    finished("cargo new", cargo(&env::temp_dir()).args(new).arg(&made).output());
    let manifest = fs::read_to_string(made.join("Cargo.toml")).expect("Cargo's manifest");
    fs::remove_dir_all(&made).expect("it was just made");
    let crate_dir = work.join("first_hour");
    let dependency = dependency.replace("../isoshard", "../unpacked");
    assert!(dependency.contains("path = \"../unpacked\""), "{dependency}");
    let mut manifest = manifest.replace("[dependencies]\n", &format!("{dependency}\n\n[workspace]\n"));
    if work.join("isoshard-kernels").exists() {
        manifest.push_str("\n[patch.crates-io]\nisoshard-kernels = { path = \"../isoshard-kernels\" }\n");
    }
    write(&crate_dir.join("Cargo.toml"), manifest.as_bytes());
    let program = fs::read(root().join("tests/outside/first_hour.rs")).expect("the program");
    assert!(program.iter().filter(|&&byte| byte == b'\n').count() < 100, "the first hour is below 100 lines");
    write(&crate_dir.join("src/main.rs"), &program);
    write(&crate_dir.join("Cargo.lock"), &fs::read(work.join("outside/Cargo.lock")).expect("a lock file"));
    let mut run = cargo(&crate_dir);
    run.args(["run", "--quiet", "--offline", "--target-dir"]).arg(work.join("target"));
    let said = finished("the first hour", run.env("ISOSHARD_NO_BUILD_WARNING", "1").output());
    let digests: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("digests ")).collect();
    let (unbroken, resumed) =
        digests.first().and_then(|pair| pair.split_once(" and ")).expect("it prints digests");
    assert_eq!(unbroken, resumed, "{said}");
    assert!(said.contains("rank 1: panicked: the power is gone"), "{said}");
}

/// Packs this crate and its kernels, and brings the files of the packages up to date in `unpacked` and `isoshard-kernels`.
fn pack_into(work: &Path) {
    let packed = work.join("packed");
    let args =
        ["package", "--workspace", "--no-verify", "--allow-dirty", "--offline", "--quiet", "--target-dir"];
    finished("cargo package", cargo(root()).args(args).arg(&packed).output());
    for (package, folder) in [(env!("CARGO_PKG_NAME"), "unpacked"), ("isoshard-kernels", "isoshard-kernels")]
    {
        let name = format!("{package}-{}", env!("CARGO_PKG_VERSION"));
        let archive = packed.join(format!("package/{name}.crate"));
        let bytes = fs::metadata(&archive).expect("Cargo leaves the package").len();
        assert!(bytes < PACKED_BYTES, "the package has {bytes} bytes");
        println!("{}: {bytes} bytes", archive.display());
        // An earlier run's folder would keep files that have left the package.
        let _ = fs::remove_dir_all(packed.join(&name));
        finished("tar", Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(&packed).output());
        update(&packed.join(name), &work.join(folder));
    }
}

/// Makes `to` hold the files of `from`; those that have not changed keep their times, so that Cargo builds what has.
fn update(from: &Path, to: &Path) {
    let wanted = files(from);
    for stale in files(to).difference(&wanted) {
        fs::remove_file(to.join(stale)).expect("a file of an earlier run");
    }
    for name in &wanted {
        write(&to.join(name), &fs::read(from.join(name)).expect("a file of the package"));
    }
}

fn write(path: &Path, text: &[u8]) {
    if fs::read(path).is_ok_and(|old| old == text) {
        return;
    }
    fs::create_dir_all(path.parent().expect("a file stands in a folder")).expect("a folder below target");
    fs::write(path, text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}

/// The files below a folder, without builds.
fn files(folder: &Path) -> BTreeSet<PathBuf> {
    let (mut found, mut folders) = (BTreeSet::new(), vec![folder.to_path_buf()]);
    while let Some(next) = folders.pop() {
        for path in fs::read_dir(next).into_iter().flatten().flatten().map(|e| e.path()) {
            let name = path.strip_prefix(folder).expect("below the folder").to_path_buf();
            match path.is_dir() {
                true if name == Path::new("target") => {}
                true => folders.push(path),
                false => _ = found.insert(name),
            }
        }
    }
    found
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Cargo as it is started by hand: without the flags and folders of the one that runs this test.
fn cargo(at: &Path) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(at);
    for name in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_TARGET_DIR", "CARGO_BUILD_TARGET_DIR"] {
        command.env_remove(name);
    }
    command
}

/// The output of a command that must succeed.
fn finished(command: &str, output: std::io::Result<Output>) -> String {
    let output = output.unwrap_or_else(|e| panic!("{command}: {e}"));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command}: {said}\n{}", String::from_utf8_lossy(&output.stderr));
    said
}
