//! The system's C++ compiler, and a cache of its images.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use isoshard::tensor::cuda::KernelProgram;

/// The headers that are included before every kernel.
const SHIM: &[(&str, &str)] = &[
    ("shim.hpp", include_str!("../../shim/shim.hpp")),
    ("fiber.hpp", include_str!("../../shim/fiber.hpp")),
    ("block.hpp", include_str!("../../shim/block.hpp")),
    ("grid.hpp", include_str!("../../shim/grid.hpp")),
    ("device.hpp", include_str!("../../shim/device.hpp")),
];

/// IEEE arithmetic as written, and integers and pointers as on a device. Each image keeps its symbols private.
const FLAGS: &[&str] = &[
    "-std=c++20",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fno-math-errno",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-fPIC",
    "-DISO_SHIM",
];

/// The levels of optimisation for kernels of formulas, which are many and run for a short time, and for others. The first
/// takes 0.6 of the second's time to compile, and code runs for twice as long.
const LEVELS: [&str; 2] = ["-Og", "-O1"];

/// The checks that kernels make at run time, if wanted; their reports call functions of the shim.
const CHECKS: &str = "-fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero";

/// A compiler that works.
#[derive(Debug)]
pub struct Compiler {
    command: Vec<String>,
    flags: Vec<String>,
    checks: bool,
    /// The compiler's name and version and a hash of the shim: images depend on these in addition to their sources.
    pub version: String,
}

impl Compiler {
    /// Finds the compiler that `CXX` names, else one of the usual.
    pub fn find(checks: bool) -> Option<Compiler> {
        let named = std::env::var("CXX").ok().filter(|c| !c.trim().is_empty());
        let candidates = named.into_iter().chain(["g++", "c++", "clang++"].map(String::from));
        candidates
            .filter_map(|c| Compiler::of(c.split_whitespace().map(String::from).collect(), checks))
            .next()
    }

    fn of(command: Vec<String>, checks: bool) -> Option<Compiler> {
        let told = Command::new(&command[0]).args(&command[1..]).arg("--version").output().ok()?;
        let name = String::from_utf8_lossy(&told.stdout).lines().next()?.to_string();
        let mut flags: Vec<String> = FLAGS.iter().map(|f| f.to_string()).collect();
        if !name.contains("clang") {
            flags.push("-fno-gnu-unique".into());
        }
        // Makes a fused multiply-add one instruction; without the flag it is a call with the same bits.
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("fma") {
            flags.push("-mfma".into());
        }
        let version = format!("{name}, shim {:016x}", hash(&(&flags, LEVELS, checks, SHIM)));
        told.status.success().then_some(Compiler { command, flags, checks, version })
    }

    /// Returns the image of a program, from disk if it was compiled before.
    ///
    /// # Errors
    /// The compiler's log.
    pub fn compile(&self, program: &KernelProgram) -> Result<Vec<u8>, String> {
        let headers = included(program);
        let defines: Vec<&str> = program.options.iter().copied().filter(|o| o.starts_with("-D")).collect();
        let key = hash(&(&self.version, program.name, program.source, &headers, &defines));
        let dir = scratch();
        let file = dir.join(format!("{}-{key:016x}.so", program.name));
        let lock = File::create(file.with_extension("lock")).ok();
        // A second caller waits for the first one's image, also in another process.
        let _held = lock.as_ref().map(File::lock);
        if let Ok(image) = fs::read(&file) {
            return Ok(image);
        }
        let work = unique(&dir, program.name);
        let made = self.run(program, &headers, &defines, &work);
        let kept = made.map(|image| fs::rename(&image, &file).and_then(|()| fs::read(&file)));
        let _ = fs::remove_dir_all(&work);
        kept?.map_err(|e| format!("{}: {e}", file.display()))
    }

    /// Compiles in a new folder, and returns the image's path.
    fn run(
        &self,
        program: &KernelProgram,
        headers: &[(&str, &str)],
        defines: &[&str],
        work: &Path,
    ) -> Result<PathBuf, String> {
        let write =
            |at: PathBuf, text: &str| fs::write(&at, text).map_err(|e| format!("{}: {e}", at.display()));
        fs::create_dir_all(work.join("shim")).map_err(|e| format!("{}: {e}", work.display()))?;
        for (name, text) in SHIM {
            write(work.join("shim").join(name), text)?;
        }
        for (name, text) in headers {
            write(work.join(name), text)?;
        }
        let source = format!("{}.cu", program.name);
        write(work.join(&source), program.source)?;
        let is_formula = program.source.contains("#include \"pointwise.cuh\"");
        let level = LEVELS[usize::from(!is_formula)];
        let include = [level, "-include", "shim/shim.hpp", "-x", "c++", &source];
        match self.checks {
            false => self.call(work, &[defines, &include, &["-shared", "-o", "image.so"]])?,
            true => {
                self.call(work, &[defines, &include, &[CHECKS, "-c", "-o", "image.o"]])?;
                // Linked without the flag, which would add the compiler's own library.
                self.call(work, &[&["image.o", "-shared", "-o", "image.so"]])?;
            }
        }
        Ok(work.join("image.so"))
    }

    fn call(&self, work: &Path, arguments: &[&[&str]]) -> Result<(), String> {
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]).args(&self.flags).args(arguments.concat()).current_dir(work);
        let done = command.output().map_err(|e| format!("{}: {e}", self.command[0]))?;
        match done.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&done.stderr).into_owned()),
        }
    }
}

/// Returns a folder for files made here: in the build's folder, or in the system's if there is none.
pub fn scratch() -> PathBuf {
    let built = option_env!("CARGO_TARGET_TMPDIR").map(|dir| Path::new(dir).join("shim"));
    let built = built.filter(|dir| fs::create_dir_all(dir).is_ok());
    built.unwrap_or_else(|| {
        let dir = std::env::temp_dir().join("isoshard-shim");
        let _ = fs::create_dir_all(&dir);
        dir
    })
}

/// Returns a new path in `dir`.
pub fn unique(dir: &Path, name: &str) -> PathBuf {
    static MADE: AtomicU64 = AtomicU64::new(0);
    dir.join(format!("{name}.{}.{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed)))
}

/// Returns the headers that a program includes, directly or not; others do not matter to its image.
fn included<'a>(program: &KernelProgram<'a>) -> Vec<(&'a str, &'a str)> {
    let mut found: Vec<(&str, &str)> = Vec::new();
    let mut texts = vec![program.source];
    while let Some(text) = texts.pop() {
        for name in text.lines().filter_map(|l| l.trim().strip_prefix("#include \"")?.strip_suffix('"')) {
            let header = program.headers.iter().find(|(n, _)| *n == name);
            if let Some(header) = header.filter(|h| !found.contains(h)) {
                found.push(*header);
                texts.push(header.1);
            }
        }
    }
    found.sort_unstable();
    found
}

fn hash(what: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}
