//! Ranks for tests: threads, or the processes of `mpirun` if `ISOSHARD_TEST_ENGINE` is `mpi`.

use isoshard::Result;
use isoshard::comm::Rank;

/// Runs a program on `world` ranks, like [`isoshard::comm::spmd`]. Over MPI a process that is a rank of the world has
/// its own result only; other processes run the world as threads and have all results.
///
/// # Panics
/// Panics if `ISOSHARD_TEST_ENGINE` names no engine.
pub fn spmd<T, F>(world: usize, f: F) -> Result<Vec<T>>
where
    T: Send + 'static,
    F: Fn(Rank) -> Result<T> + Send + Sync + 'static,
{
    match std::env::var("ISOSHARD_TEST_ENGINE") {
        #[cfg(feature = "mpi")]
        Ok(name) if name == "mpi" => mpi::spmd(world, f),
        Ok(name) => panic!("ISOSHARD_TEST_ENGINE: no engine {name} in this build"),
        Err(_) => isoshard::comm::spmd(world, f),
    }
}

/// Returns true if a test is to run a world of so many ranks. Over MPI a larger world than all processes would be threads in
/// each of them, which other runs have tried.
pub fn is_tried(world: usize) -> bool {
    #[cfg(feature = "mpi")]
    if std::env::var("ISOSHARD_TEST_ENGINE").is_ok_and(|name| name == "mpi") {
        return world <= mpi::processes();
    }
    let _ = world;
    true
}

/// Worlds of MPI's processes: each process of `mpirun` runs the whole test program, whose ranks are then processes.
///
/// Consecutive blocks of `k` processes each form a world of `k` ranks. Processes that are left over, or all if there
/// are fewer than `k`, run the world as threads. Tests run one after another (`RUST_TEST_THREADS=1`), so that all
/// processes run the same one.
#[cfg(feature = "mpi")]
mod mpi {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::sync::mpsc::{Sender, channel};
    use std::sync::{Arc, Mutex, OnceLock};
    use std::thread::{self, JoinHandle};
    use std::time::Duration;

    use isoshard::comm::{Channel, Engine, Launch, Process, Rank};
    use isoshard::{Error, Result};

    /// Runs a program on `world` ranks, like [`super::spmd`].
    pub fn spmd<T, F>(world: usize, f: F) -> Result<Vec<T>>
    where
        T: Send + 'static,
        F: Fn(Rank) -> Result<T> + Send + Sync + 'static,
    {
        let whole = whole();
        let first = whole.rank() / world * world;
        if first + world > whole.world_len() {
            return isoshard::comm::spmd(world, f);
        }
        let part = Part { whole: whole.clone(), first, world };
        match catch_unwind(AssertUnwindSafe(|| f(Rank::new(Arc::new(part))?))) {
            Ok(result) => Ok(vec![result?]),
            Err(panic) => {
                // The other processes then need not wait for the deadline.
                whole.abort(&Error::invalid("test", "another process's test failed", "", ""));
                resume_unwind(panic)
            }
        }
    }

    /// Returns the number of processes.
    pub fn processes() -> usize {
        whole().world_len()
    }

    /// Consecutive processes as a world.
    #[derive(Debug)]
    struct Part {
        whole: Arc<dyn Engine>,
        first: usize,
        world: usize,
    }

    impl Engine for Part {
        fn rank(&self) -> usize {
            self.whole.rank() - self.first
        }

        fn world_len(&self) -> usize {
            self.world
        }

        fn deadline(&self) -> Duration {
            self.whole.deadline()
        }

        fn open(&self, ranks: &[usize], name: &str) -> Result<Arc<dyn Channel>> {
            let ranks: Vec<usize> = ranks.iter().map(|rank| self.first + rank).collect();
            self.whole.open(&ranks, name)
        }

        fn end(&self) -> Result<()> {
            Ok(())
        }

        fn abort(&self, cause: &Error) {
            self.whole.abort(cause);
        }
    }

    /// The engine of this process as a rank, until it ends.
    fn whole() -> &'static Arc<dyn Engine> {
        static WHOLE: OnceLock<Arc<dyn Engine>> = OnceLock::new();
        WHOLE.get_or_init(|| {
            let alone = std::env::var("RUST_TEST_THREADS").is_ok_and(|n| n == "1");
            assert!(alone, "set RUST_TEST_THREADS=1: all processes have to run the same test");
            let launch = Launch::from_env().expect("a launcher's variables").expect("start this by mpirun");
            let (here, begun) = channel();
            let (stay, over) = channel::<()>();
            let life = thread::spawn(move || {
                Process::new(launch).mpi().run(|rank| {
                    here.send(rank.engine().clone()).expect("somebody waits");
                    // Until this process ends.
                    let _ = over.recv();
                    Ok(())
                })
            });
            *LIFE.lock().expect("nobody panics with it") = Some((stay, life));
            // SAFETY: `end` may be called when the process ends.
            unsafe { atexit(end) };
            begun.recv().expect("the world begins")
        })
    }

    type Life = (Sender<()>, JoinHandle<Result<()>>);
    static LIFE: Mutex<Option<Life>> = Mutex::new(None);

    unsafe extern "C" {
        fn atexit(call: extern "C" fn()) -> i32;
    }

    /// Ends the rank with its process, as MPI requires.
    extern "C" fn end() {
        let Some((stay, life)) = LIFE.lock().ok().and_then(|mut life| life.take()) else { return };
        drop(stay);
        if let Ok(Err(error)) = life.join() {
            eprintln!("the world of processes did not end well: {error}");
        }
    }
}
