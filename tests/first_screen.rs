//! The first block of README: its commands are run, and print what it shows. They take seconds each.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// A command of the block, and the lines that it shows.
struct Shown<'a> {
    args: Vec<&'a str>,
    lines: Vec<&'a str>,
}

/// Reads the commands after the line that says what `train` stands for.
fn shown(readme: &str) -> (&str, Vec<Shown<'_>>) {
    let block =
        readme.split("```").find_map(|block| block.strip_prefix("console\n")).expect("README has a console");
    let mut lines = block.lines().filter(|line| !line.is_empty());
    let alias = lines.next().expect("the block has lines");
    let mut all: Vec<Shown<'_>> = Vec::new();
    for line in lines {
        match line.strip_prefix("$ train ") {
            Some(command) => {
                let command = command.split('#').next().unwrap_or_default();
                all.push(Shown { args: command.split_whitespace().collect(), lines: Vec::new() });
            }
            None => all.last_mut().expect("a command comes first").lines.push(line),
        }
    }
    (alias, all)
}

/// Returns the path of `train_gpt`: that of the variable, or of the one that is built here as `cargo test` builds the crate.
fn program(root: &Path) -> Option<PathBuf> {
    if let Some(built) = env::var_os("ISOSHARD_TRAIN_GPT") {
        return Some(built.into());
    }
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root).args(["build", "--quiet", "--offline", "--example", "train_gpt"]);
    if !cargo.status().ok()?.success() {
        return None;
    }
    let deps = env::current_exe().ok()?;
    let name = Path::new("train_gpt").with_extension(env::consts::EXE_EXTENSION);
    Some(deps.parent()?.parent()?.join("examples").join(name)).filter(|program| program.exists())
}

#[test]
fn readme_shows_what_its_commands_print() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = fs::read_to_string(root.join("README.md")).expect("README.md");
    let (alias, commands) = shown(&readme);
    let steps = alias.strip_prefix("$ alias train='cargo run --release --example train_gpt -- ");
    let always: Vec<&str> = steps
        .and_then(|rest| rest.strip_suffix('\''))
        .expect("the alias runs train_gpt")
        .split(' ')
        .collect();
    assert!(commands.len() >= 5 && commands.iter().all(|command| !command.lines.is_empty()), "{readme}");
    let Some(program) = program(root) else {
        // Past the test harness, which keeps the output of tests that pass.
        writeln!(std::io::stderr(), "SKIPPED (Cargo builds no example here): README's first block")
            .expect("stderr");
        return;
    };
    let work = Path::new(env!("CARGO_TARGET_TMPDIR")).join("first_screen");
    let _ = fs::remove_dir_all(&work);
    fs::create_dir_all(&work).expect("a folder below target");
    for Shown { args, lines } in commands {
        let run =
            Command::new(&program).args(&always).args(&args).current_dir(&work).output().expect("it runs");
        let said =
            [run.stdout, run.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        // Lines that README leaves out of the output are marked by dots at the end of a shown one.
        let missing: Vec<&&str> =
            lines.iter().filter(|line| !said.contains(line.trim_end_matches(" ..."))).collect();
        assert!(missing.is_empty(), "train {} does not print {missing:?}, but\n{said}", args.join(" "));
    }
}
