//! The bytes of memory that the system leaves this process, by which a program chooses its limits.

use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

/// The most bytes that are read of a file of the system.
const MOST_READ: u64 = 1 << 20;

/// The most control groups that lie in one another.
const MOST_GROUPS: usize = 64;

/// Limits of control groups from here on mean none: version 1 writes the largest multiple of a page.
const NO_LIMIT: usize = 1 << 62;

/// Returns the most bytes of memory that this process may take as Linux tells: the least of the machine's memory, the limits of
/// the control groups that the process is in, and the process's own limits of address space and data (`ulimit -v` and
/// `ulimit -d`). `None` if the system tells nothing.
///
/// It includes the bytes that the process already holds.
///
/// ```
/// use isoshard::tensor::cpu::memory_bytes;
/// // Half of it for tensors, in each of two threads a part.
/// let limit = memory_bytes().map_or(usize::MAX, |bytes| bytes / 2 / 2);
/// isoshard::tensor::storage::set_memory_limit(limit);
/// # isoshard::tensor::storage::set_memory_limit(usize::MAX);
/// ```
pub fn memory_bytes() -> Option<usize> {
    System { root: Path::new("/") }.memory_bytes()
}

/// The files in which Linux tells of itself, below a folder.
struct System<'a> {
    root: &'a Path,
}

impl System<'_> {
    fn memory_bytes(&self) -> Option<usize> {
        let machine = self.read("proc/meminfo").and_then(|text| total(&text));
        let own = self.read("proc/self/limits");
        let own = own
            .iter()
            .flat_map(|text| [soft_limit(text, "Max address space"), soft_limit(text, "Max data size")]);
        machine.into_iter().chain(own.flatten()).chain(self.group_limit()).min()
    }

    /// Returns the least limit of the control groups that the process is in.
    fn group_limit(&self) -> Option<usize> {
        let (groups, mounts) = (self.read("proc/self/cgroup")?, self.read("proc/self/mountinfo")?);
        let folders = groups.lines().filter_map(ControlGroup::parse).flat_map(|of| {
            let mounts = mounts.lines().filter_map(Mount::parse);
            mounts.filter(move |mount| mount.version == of.version).flat_map(move |mount| {
                let file = mount.version.file();
                let chain = mount.folders(of.path);
                chain.into_iter().map(move |folder| folder.join(file))
            })
        });
        folders.filter_map(|file| group_bytes(&self.read(file.to_str()?)?)).min()
    }

    /// Reads the beginning of a file, whose name may begin with `/`.
    fn read(&self, name: &str) -> Option<String> {
        let file = File::open(self.root.join(name.trim_start_matches('/'))).ok()?;
        let mut bytes = Vec::new();
        file.take(MOST_READ).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// The versions of control groups. A system may have both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ControlGroupVersion {
    One,
    Two,
}

impl ControlGroupVersion {
    /// Returns the name of the file that has a group's limit.
    fn file(self) -> &'static str {
        match self {
            ControlGroupVersion::One => "memory.limit_in_bytes",
            ControlGroupVersion::Two => "memory.max",
        }
    }
}

/// A control group that limits the process's memory: a line of `/proc/self/cgroup`.
struct ControlGroup<'a> {
    version: ControlGroupVersion,
    path: &'a str,
}

impl ControlGroup<'_> {
    fn parse(line: &str) -> Option<ControlGroup<'_>> {
        let (number, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let version = if (number, controllers) == ("0", "") {
            ControlGroupVersion::Two
        } else if controllers.split(',').any(|name| name == "memory") {
            ControlGroupVersion::One
        } else {
            return None;
        };
        Some(ControlGroup { version, path })
    }
}

/// A tree of control groups in the file system: a line of `/proc/self/mountinfo`.
struct Mount {
    version: ControlGroupVersion,
    /// The group that lies at `at`.
    root: PathBuf,
    at: PathBuf,
}

impl Mount {
    fn parse(line: &str) -> Option<Mount> {
        let (place, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let version = match (kind.next()?, kind.nth(1)) {
            ("cgroup2", _) => ControlGroupVersion::Two,
            ("cgroup", Some(options)) if options.split(',').any(|name| name == "memory") => {
                ControlGroupVersion::One
            }
            _ => return None,
        };
        let mut place = place.split(' ').skip(3).map(unescaped);
        Some(Mount { version, root: place.next()?, at: place.next()? })
    }

    /// Returns the folders of a group and of those that it lies in, as far as this tree shows them.
    fn folders(&self, group: &str) -> Vec<PathBuf> {
        let below = Path::new(group).strip_prefix(&self.root).unwrap_or(Path::new(""));
        // A group outside of the tree has a path with `..`; the top of the tree is all that is known of it.
        let is_below = below.components().all(|part| matches!(part, Component::Normal(_)));
        let own = if is_below { self.at.join(below) } else { self.at.clone() };
        let chain = own.ancestors().take_while(|folder| folder.starts_with(&self.at));
        chain.take(MOST_GROUPS).map(Path::to_path_buf).collect()
    }
}

/// Returns a path of `/proc/self/mountinfo`, in which a space is `\040`.
fn unescaped(path: &str) -> PathBuf {
    PathBuf::from(
        path.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\"),
    )
}

/// Returns the bytes of a group's limit.
fn group_bytes(text: &str) -> Option<usize> {
    text.trim().parse().ok().filter(|&bytes| bytes < NO_LIMIT)
}

/// Returns the machine's bytes by `/proc/meminfo`.
fn total(text: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

/// Returns a soft limit by `/proc/self/limits`, which says `unlimited` if there is none.
fn soft_limit(text: &str, name: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// A made-up system, deleted on drop.
    struct Folder(PathBuf);

    impl Folder {
        fn of(files: &[(&str, &str)]) -> Folder {
            static MADE: AtomicUsize = AtomicUsize::new(0);
            let name =
                format!("isoshard-memory-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
            let folder = Folder(std::env::temp_dir().join(name));
            for (name, text) in files {
                let at = folder.0.join(name);
                fs::create_dir_all(at.parent().unwrap()).unwrap();
                fs::write(at, text).unwrap();
            }
            folder
        }

        fn bytes(&self) -> Option<usize> {
            System { root: &self.0 }.memory_bytes()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal:       24664512 kB\nMemFree:  1 kB\n");
    const LIMITS: &str = "Limit                     Soft Limit           Hard Limit           Units     \n\
                          Max data size             unlimited            unlimited            bytes     \n\
                          Max address space         unlimited            unlimited            bytes     \n";
    const MACHINE: usize = 24_664_512 * 1024;
    const TWO: &str = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const ONE: &str = "33 25 0:29 / /sys/fs/cgroup/memory rw,relatime shared:12 - cgroup cgroup rw,memory\n\
                       34 25 0:30 / /sys/fs/cgroup/cpu rw,relatime shared:13 - cgroup cgroup rw,cpu\n";

    #[test]
    fn this_system_tells_its_memory() {
        if cfg!(all(target_os = "linux", not(miri))) {
            assert!(memory_bytes().unwrap() > 1 << 20);
        }
    }

    #[test]
    fn the_least_of_the_machines_memory_and_the_processes_limits_counts() {
        assert_eq!(Folder::of(&[]).bytes(), None);
        assert_eq!(Folder::of(&[MEMINFO]).bytes(), Some(MACHINE));
        assert_eq!(Folder::of(&[MEMINFO, ("proc/self/limits", LIMITS)]).bytes(), Some(MACHINE));
        for (name, bytes) in [("Max address space         ", 204_800_000), ("Max data size             ", 77)]
        {
            let limits = LIMITS.replace(&format!("{name}unlimited"), &format!("{name}{bytes}"));
            assert_eq!(Folder::of(&[MEMINFO, ("proc/self/limits", &limits)]).bytes(), Some(bytes));
            // Without the machine's, and above it.
            assert_eq!(Folder::of(&[("proc/self/limits", &limits)]).bytes(), Some(bytes));
            let large = LIMITS.replace(&format!("{name}unlimited"), &format!("{name}{}", 1u64 << 50));
            assert_eq!(Folder::of(&[MEMINFO, ("proc/self/limits", &large)]).bytes(), Some(MACHINE));
        }
    }

    #[test]
    fn a_control_groups_limit_and_those_around_it_count() {
        let two = ("proc/self/mountinfo", TWO);
        let group = ("proc/self/cgroup", "0::/jobs/job 7/step\n");
        let own = |bytes| ("sys/fs/cgroup/jobs/job 7/step/memory.max", bytes);
        let around = |bytes| ("sys/fs/cgroup/jobs/memory.max", bytes);
        for (files, bytes) in [
            (&[own("1000000\n")][..], 1_000_000),
            (&[own("max\n"), around("2000000\n")], 2_000_000),
            (&[own("3000000\n"), around("2000000\n")], 2_000_000),
            (&[own("max\n"), around("max\n")], MACHINE),
            (&[own(""), around("-1\n")], MACHINE),
            (&[own("99999999999999999999999\n")], MACHINE),
            (&[("sys/fs/cgroup/other/memory.max", "5\n")], MACHINE),
        ] {
            let files: Vec<_> = [MEMINFO, two, group].into_iter().chain(files.iter().copied()).collect();
            assert_eq!(Folder::of(&files).bytes(), Some(bytes), "{files:?}");
        }
        let one = ("proc/self/mountinfo", ONE);
        let group = ("proc/self/cgroup", "5:cpu,cpuacct:/cpu\n4:memory:/a/b\n1:name=systemd:/\n");
        let none = "9223372036854771712\n";
        let at = |name, bytes| (name, bytes);
        for (files, bytes) in [
            ([at("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "4096\n"), at("x", "")], 4096),
            (
                [
                    at("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", none),
                    at("sys/fs/cgroup/memory/memory.limit_in_bytes", "8192\n"),
                ],
                8192,
            ),
            ([at("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", none), at("x", "")], MACHINE),
            ([at("sys/fs/cgroup/memory/cpu/memory.limit_in_bytes", "1\n"), at("x", "")], MACHINE),
        ] {
            let files = [one, group, files[0], files[1], MEMINFO];
            assert_eq!(Folder::of(&files).bytes(), Some(bytes), "{files:?}");
            let told = Folder::of(&files[..4]).bytes();
            assert_eq!(told, (bytes < MACHINE).then_some(bytes), "{files:?}");
        }
    }

    #[test]
    fn a_container_that_shows_a_part_of_the_tree_is_read_from_its_top() {
        let limit = ("sys/fs/cgroup/memory.max", "5000\n");
        for (root, group) in
            [("/docker/c1", "/docker/c1"), ("/docker/c1", "/docker/c2"), ("/", "/../../other")]
        {
            let mounts = TWO.replace("0:26 /", &format!("0:26 {root}"));
            let group = format!("0::{group}\n");
            let elsewhere = ("sys/other/memory.max", "5\n");
            let files =
                [("proc/self/mountinfo", &*mounts), ("proc/self/cgroup", &*group), MEMINFO, limit, elsewhere];
            assert_eq!(Folder::of(&files).bytes(), Some(5000), "{root} {group}");
        }
        let below = [
            ("proc/self/mountinfo", "30 24 0:26 /docker/c1 /my\\040groups rw - cgroup2 cgroup2 rw\n"),
            ("proc/self/cgroup", "0::/docker/c1/sub\n"),
            ("my groups/sub/memory.max", "6000\n"),
        ];
        assert_eq!(Folder::of(&below).bytes(), Some(6000));
    }

    #[test]
    fn files_that_say_something_else_or_never_end_are_no_limit() {
        let noise = [
            "",
            "\n",
            ":",
            "::",
            "0::",
            "30 24 - ",
            " - cgroup2",
            "MemTotal: kB",
            "Max data size",
            "\u{0}\u{ff}",
        ];
        for a in noise {
            for b in noise {
                let files = [
                    ("proc/meminfo", a),
                    ("proc/self/limits", a),
                    ("proc/self/cgroup", a),
                    ("proc/self/mountinfo", b),
                ];
                assert_eq!(Folder::of(&files).bytes(), None, "{a:?} {b:?}");
            }
        }
        let long = "x".repeat(2 << 20) + "\nMemTotal: 1 kB\n";
        assert_eq!(Folder::of(&[("proc/meminfo", &long)]).bytes(), None, "the end is not read");
        let deep = format!("0::{}\n", "/a".repeat(10_000));
        let files = [("proc/self/cgroup", &*deep), ("proc/self/mountinfo", TWO), MEMINFO];
        assert_eq!(Folder::of(&files).bytes(), Some(MACHINE));
    }
}
