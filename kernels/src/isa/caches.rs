//! The sizes of the CPU's caches, which kernels choose their blocks by.

use std::cell::Cell;
use std::path::Path;
use std::sync::OnceLock;

/// The bytes of a cache line of the CPUs that have kernels of their own here.
pub(crate) const CACHE_LINE_BYTES: usize = 64;

/// The bytes of each level of cache that one core has: those of a level that several cores share are divided by their
/// number. They decide how fast a product is, and no bit of it.
///
/// ```
/// use isoshard_kernels::Caches;
/// let caches = Caches::detect();
/// assert!(caches.first > 0 && caches.second >= caches.first && caches.third >= caches.second);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caches {
    /// The first level's data cache.
    pub first: usize,
    /// The second level.
    pub second: usize,
    /// The third level; that of the second if there is none.
    pub third: usize,
}

impl Caches {
    /// The sizes that are assumed if the system does not tell: most cores have these or more.
    pub const USUAL: Caches = Caches { first: 32 << 10, second: 512 << 10, third: 2 << 20 };

    /// Returns this machine's caches as Linux lists them, or [`Caches::USUAL`] for each level that it does not list.
    ///
    /// ```
    /// use isoshard_kernels::Caches;
    /// assert_eq!(Caches::detect(), Caches::detect());
    /// ```
    pub fn detect() -> Caches {
        Caches::listed(Path::new("/sys/devices/system/cpu/cpu0/cache"))
    }

    /// Returns the caches that kernels of this thread use: the detected ones, unless [`with_caches`] has set others.
    ///
    /// ```
    /// use isoshard_kernels::Caches;
    /// assert_eq!(Caches::current(), Caches::detect());
    /// ```
    pub fn current() -> Caches {
        static DETECTED: OnceLock<Caches> = OnceLock::new();
        CHOSEN.get().unwrap_or_else(|| *DETECTED.get_or_init(Caches::detect))
    }

    /// Returns the caches of a folder with one `index*` per cache.
    fn listed(folder: &Path) -> Caches {
        let mut found = [None; 3];
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let text = |name: &str| std::fs::read_to_string(entry.path().join(name)).ok();
            let field = |name: &str| text(name).map(|text| text.trim().to_owned());
            let of = || {
                let level: usize = field("level")?.parse().ok()?;
                let size = bytes(&field("size")?)? / cpus(&field("shared_cpu_list")?)?;
                (field("type")? != "Instruction" && size > 0).then_some((level, size))
            };
            if let Some((level @ 1..=3, size)) = of() {
                found[level - 1] = Some(size);
            }
        }
        let usual = Caches::USUAL;
        let first = found[0].unwrap_or(usual.first);
        let second = found[1].unwrap_or(usual.second).max(first);
        let third = found[2].unwrap_or(if found[1].is_some() { second } else { usual.third }).max(second);
        Caches { first, second, third }
    }
}

/// Runs `f`, in which kernels of this thread choose their blocks for these caches: for tests and benches. The bits of
/// results do not change.
///
/// ```
/// use isoshard_kernels::{Caches, with_caches};
/// let small = Caches { first: 4096, second: 8192, third: 8192 };
/// assert_eq!(with_caches(small, Caches::current), small);
/// ```
pub fn with_caches<R>(caches: Caches, f: impl FnOnce() -> R) -> R {
    struct RestoreCaches(Option<Caches>);
    impl Drop for RestoreCaches {
        fn drop(&mut self) {
            CHOSEN.set(self.0);
        }
    }
    let _restore = RestoreCaches(CHOSEN.replace(Some(caches)));
    f()
}

thread_local! {
    static CHOSEN: Cell<Option<Caches>> = const { Cell::new(None) };
}

/// Returns the bytes of a size such as `512K`.
fn bytes(size: &str) -> Option<usize> {
    let digits = size.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &size[digits.len()..] {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        _ => return None,
    };
    digits.parse::<usize>().ok()?.checked_mul(unit)
}

/// Returns the number of CPUs in a list such as `0-3,8`, at least one.
fn cpus(list: &str) -> Option<usize> {
    list.split(',').try_fold(0usize, |sum, range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        sum.checked_add(last.checked_sub(first)?.checked_add(1)?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_sharing_are_read_as_linux_lists_them() {
        assert_eq!(
            ["32K", "1M", "2G", "64", "1T", "K", ""].map(bytes),
            [Some(32 << 10), Some(1 << 20), Some(2 << 30), Some(64), None, None, None]
        );
        assert_eq!(
            ["0", "0-1", "0-3,8,10-11", "3-1", "a", ""].map(cpus),
            [Some(1), Some(2), Some(7), None, None, None]
        );
        let folder = std::env::temp_dir().join(format!("isoshard-caches-{}", std::process::id()));
        let list = |index: &str, [level, kind, size, shared]: [&str; 4]| {
            let at = folder.join(index);
            std::fs::create_dir_all(&at).unwrap();
            for (name, text) in
                [("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)]
            {
                std::fs::write(at.join(name), format!("{text}\n")).unwrap();
            }
        };
        assert_eq!(Caches::listed(&folder), Caches::USUAL, "nothing is listed");
        list("index0", ["1", "Data", "48K", "0"]);
        list("index1", ["1", "Instruction", "32K", "0"]);
        list("index2", ["2", "Unified", "2048K", "0,64"]);
        let found = Caches::listed(&folder);
        assert_eq!(found, Caches { first: 48 << 10, second: 1 << 20, third: 1 << 20 });
        list("index3", ["3", "Unified", "32768K", "0-1"]);
        assert_eq!(Caches::listed(&folder), Caches { third: 16 << 20, ..found });
        list("index2", ["2", "Unified", "garbage", "0"]);
        assert_eq!(Caches::listed(&folder).second, Caches::USUAL.second);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_choice_is_the_threads_and_ends_with_the_call() {
        let found = Caches::current();
        let small = Caches { first: 1, second: 2, third: 3 };
        with_caches(small, || {
            assert_eq!(Caches::current(), small);
            assert_eq!(std::thread::spawn(Caches::current).join().unwrap(), found);
        });
        assert_eq!(Caches::current(), found);
    }
}
