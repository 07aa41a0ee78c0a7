//! The work that a rank announces while it keeps other ranks waiting.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use crate::base::lock;
use crate::comm::calls::{BusyWork, NAME_BYTES};

/// A rank's announcements, which it may make on several threads, and the function that tells other ranks.
#[derive(Default)]
pub(in crate::comm) struct Announcer {
    /// The number of announcements, to be read without the lock: most ranks have none.
    len: AtomicUsize,
    announcements: Mutex<Announcements>,
    tell: OnceLock<TellWork>,
}

/// Tells other ranks of this rank's work.
type TellWork = Box<dyn Fn(Option<BusyWork>) + Send + Sync>;

#[derive(Debug, Default)]
struct Announcements {
    made: u64,
    open: Vec<Announcement>,
}

#[derive(Debug)]
struct Announcement {
    number: u64,
    thread: ThreadId,
    what: Box<str>,
    since: Instant,
    limit: Duration,
    /// True while the thread waits for other ranks itself.
    rests: bool,
}

impl Announcer {
    /// Sets the function that tells other ranks, unless there is one.
    pub fn tell_by(&self, tell: impl Fn(Option<BusyWork>) + Send + Sync + 'static) {
        let _ = self.tell.set(Box::new(tell));
    }

    /// Announces work of this thread and returns the announcement's number.
    pub fn begin(&self, what: &str, limit: Duration) -> u64 {
        let mut all = lock(&self.announcements);
        all.made += 1;
        let (number, thread, since) = (all.made, thread::current().id(), Instant::now());
        all.open.push(Announcement { number, thread, what: what.into(), since, limit, rests: false });
        self.changed(&all);
        number
    }

    /// Ends an announcement.
    pub fn end(&self, number: u64) {
        let mut all = lock(&self.announcements);
        all.open.retain(|one| one.number != number);
        self.changed(&all);
    }

    /// Sets whether this thread's announcements rest, because the thread waits for other ranks.
    pub fn rest(&self, rests: bool) {
        if self.len.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut all = lock(&self.announcements);
        let thread = thread::current().id();
        let mut changes = false;
        for one in all.open.iter_mut().filter(|one| one.thread == thread && one.rests != rests) {
            (one.rests, changes) = (rests, true);
        }
        if changes {
            self.changed(&all);
        }
    }

    /// Returns the work that does not rest.
    pub fn work(&self) -> Option<BusyWork> {
        lock(&self.announcements).work(|one| !one.rests)
    }

    /// Returns all announced work.
    pub fn all_work(&self) -> Option<BusyWork> {
        lock(&self.announcements).work(|_| true)
    }

    /// Tells other ranks, with the lock held, so that they learn of changes in their order.
    fn changed(&self, all: &Announcements) {
        self.len.store(all.open.len(), Ordering::Relaxed);
        if let Some(tell) = self.tell.get() {
            tell(all.work(|one| !one.rests));
        }
    }
}

impl fmt::Debug for Announcer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        lock(&self.announcements).fmt(f)
    }
}

impl Announcements {
    /// Joins the announcements for which `counts` is true.
    fn work(&self, counts: impl Fn(&Announcement) -> bool) -> Option<BusyWork> {
        let counted = || self.open.iter().filter(|one| counts(one));
        let since = counted().map(|one| one.since).min()?;
        let spent = since.elapsed();
        let limit = counted().map(|one| (one.since - since).saturating_add(one.limit)).max()?;
        let mut what = String::new();
        for one in counted() {
            what.push_str(if what.is_empty() { "" } else { ", " });
            what.push_str(&one.what);
        }
        if what.len() > NAME_BYTES {
            const CUT: &str = " ...";
            let end = NAME_BYTES - CUT.len();
            what.truncate((0..=end).rfind(|&end| what.is_char_boundary(end)).unwrap_or(0));
            what.push_str(CUT);
        }
        Some(BusyWork { what, spent, limit })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn announcements_nest_and_rest_by_thread() {
        let told: Arc<Mutex<Vec<Option<String>>>> = Arc::default();
        let announcer = Arc::new(Announcer::default());
        announcer.rest(true);
        let hears = told.clone();
        announcer.tell_by(move |work| lock(&hears).push(work.map(|work| work.what)));
        let saving = announcer.begin("saving", Duration::from_secs(9));
        let second = announcer.clone();
        let hashing = thread::spawn(move || second.begin("hashing", Duration::MAX)).join().unwrap();
        assert_eq!(announcer.work().unwrap().limit, Duration::MAX);
        announcer.rest(true);
        announcer.rest(true);
        assert_eq!(announcer.all_work().unwrap().what, "saving, hashing");
        announcer.end(hashing);
        announcer.rest(false);
        assert_eq!(announcer.work().unwrap().limit, Duration::from_secs(9));
        announcer.end(saving);
        announcer.end(saving);
        let [all, one, other] = ["saving, hashing", "saving", "hashing"].map(|what| Some(what.to_string()));
        let want = [one.clone(), all, other, None, one, None, None];
        assert_eq!(*lock(&told), want);
    }

    #[test]
    fn long_names_are_cut() {
        let announcer = Announcer::default();
        for what in ["ä".repeat(100), "b".repeat(100)] {
            announcer.begin(&what, Duration::from_secs(1));
        }
        let what = announcer.work().unwrap().what;
        assert!(what.len() <= NAME_BYTES && what.ends_with("bbb ..."), "{what}");
    }

    /// Prints what an announcement costs (read it with `--nocapture`).
    #[test]
    fn work_is_announced_quickly() {
        let announcer = Announcer::default();
        let heard = Mutex::new(None);
        announcer.tell_by(move |work| *lock(&heard) = work);
        let rounds = 10_000;
        let least = (0..5).map(|_| {
            let start = Instant::now();
            for _ in 0..rounds {
                announcer.end(announcer.begin("saving", Duration::from_secs(1)));
            }
            start.elapsed() / rounds
        });
        println!("work is announced and ended in {:?}", least.min().unwrap_or_default());
        assert_eq!(announcer.all_work(), None);
    }
}
