//! MPI's functions that this engine calls, one call at a time.

use std::ffi::{c_char, c_int};
use std::fmt;
use std::ptr;
use std::sync::{Mutex, MutexGuard};

use mpi_sys as sys;

use crate::base::lock;
use crate::error::{Error, Result};

/// The largest message that is sent as one piece.
const PIECE_BYTES: usize = 1 << 30;

/// MPI's text for a call that failed.
#[derive(Clone, Debug)]
pub(super) struct MpiError(String);

pub(super) type MpiResult<T> = std::result::Result<T, MpiError>;

/// MPI in this process.
#[derive(Debug)]
pub(in crate::comm) struct Mpi {
    pub rank: usize,
    pub world_len: usize,
    /// The largest tag.
    pub tag_limit: u32,
    /// The library's name and version.
    pub name: String,
    /// This machine's name.
    pub host: String,
    pub piece_bytes: usize,
    comm: sys::MPI_Comm,
    /// True if this engine has started MPI, and so has to end it.
    ours: bool,
    calls: Mutex<()>,
}

/// A lock guard that allows its holder to call MPI.
pub(super) struct MpiGuard<'a> {
    mpi: &'a Mpi,
    _alone: MutexGuard<'a, ()>,
}

/// A message in flight. Null once MPI has finished it.
#[derive(Debug)]
pub(super) struct MessageHandle(sys::MPI_Request);

// SAFETY: MPI was started for threads that call one at a time, which the lock guarantees; handles belong to the
// process.
unsafe impl Send for Mpi {}
// SAFETY: as above.
unsafe impl Sync for Mpi {}
// SAFETY: as above; a request belongs to no thread.
unsafe impl Send for MessageHandle {}

/// True once MPI was started in this process: it starts once, and ends once.
static STARTED: Mutex<bool> = Mutex::new(false);

impl Mpi {
    /// Starts MPI, with a communicator that only this engine uses. All ranks of the job call this.
    ///
    /// # Errors
    /// Refuses a second start in one process, an MPI that was started for a single thread, and a piece size that is
    /// no number. Returns an error if MPI fails.
    pub fn start() -> Result<Mpi> {
        let mut started = lock(&STARTED);
        if std::mem::replace(&mut *started, true) {
            return Err(Error::unsupported(
                "mpi",
                "MPI starts only once in a process",
                "a second world",
                "run everything in one program of the rank",
            ));
        }
        let piece_bytes = piece_bytes()?;
        let ours = init()?;
        Mpi::open(ours, piece_bytes).map_err(|e| {
            Error::unsupported("mpi", "MPI did not start", e.to_string(), "look at its installation")
        })
    }

    fn open(ours: bool, piece_bytes: usize) -> MpiResult<Mpi> {
        let (mut rank, mut world_len, mut has) = (0, 0, 0);
        let mut limit: *mut c_int = ptr::null_mut();
        // SAFETY: MPI runs; all pointers are to live variables, and the attribute points to an int that MPI keeps.
        unsafe {
            let world = sys::RSMPI_COMM_WORLD;
            let mut comm = world;
            check(sys::MPI_Comm_set_errhandler(world, sys::RSMPI_ERRORS_RETURN))?;
            check(sys::MPI_Comm_dup(world, &mut comm))?;
            check(sys::MPI_Comm_set_errhandler(comm, sys::RSMPI_ERRORS_RETURN))?;
            check(sys::MPI_Comm_rank(comm, &mut rank))?;
            check(sys::MPI_Comm_size(comm, &mut world_len))?;
            let at: *mut *mut c_int = &mut limit;
            check(sys::MPI_Comm_get_attr(comm, sys::MPI_TAG_UB as c_int, at.cast(), &mut has))?;
            // The least value that the standard promises.
            let tag_limit = if has != 0 && !limit.is_null() { *limit } else { 32_767 };
            let name = text(sys::MPI_MAX_LIBRARY_VERSION_STRING as usize, |at, n| {
                sys::MPI_Get_library_version(at, n)
            })?;
            let host =
                text(sys::MPI_MAX_PROCESSOR_NAME as usize, |at, n| sys::MPI_Get_processor_name(at, n))?;
            Ok(Mpi {
                rank: rank as usize,
                world_len: world_len as usize,
                tag_limit: tag_limit as u32,
                name: name.split([',', '\n']).next().unwrap_or_default().trim().to_string(),
                host,
                piece_bytes,
                comm,
                ours,
                calls: Mutex::new(()),
            })
        }
    }

    /// Returns a description that must be equal on all ranks.
    pub fn kind(&self) -> String {
        format!("{}, pieces of {} bytes", self.name, self.piece_bytes)
    }

    /// Waits until no other thread calls MPI, and returns the lock's guard.
    pub(super) fn guard(&self) -> MpiGuard<'_> {
        MpiGuard { mpi: self, _alone: lock(&self.calls) }
    }

    /// Returns the lock's guard, or `None` if another thread is calling MPI.
    pub(super) fn try_guard(&self) -> Option<MpiGuard<'_>> {
        Some(MpiGuard { mpi: self, _alone: self.calls.try_lock().ok()? })
    }
}

impl MpiGuard<'_> {
    /// Starts sending bytes.
    ///
    /// # Safety
    /// Nothing writes or frees the bytes before MPI has finished the message.
    pub unsafe fn send(&self, bytes: *const u8, len: usize, to: usize, tag: u32) -> MpiResult<MessageHandle> {
        self.handle(|comm, handle| {
            // SAFETY: the caller's promise; the length is that of a piece, which fits an int.
            unsafe {
                let (kind, to, tag) = (sys::RSMPI_UINT8_T, to as c_int, tag as c_int);
                sys::MPI_Isend(bytes.cast(), len as c_int, kind, to, tag, comm, handle)
            }
        })
    }

    /// Starts receiving bytes.
    ///
    /// # Safety
    /// Nothing reads, writes or frees the bytes before MPI has finished the message.
    pub unsafe fn receive(
        &self,
        bytes: *mut u8,
        len: usize,
        from: usize,
        tag: u32,
    ) -> MpiResult<MessageHandle> {
        self.handle(|comm, handle| {
            // SAFETY: the caller's promise; the length is that of a piece, which fits an int.
            unsafe {
                let (kind, from, tag) = (sys::RSMPI_UINT8_T, from as c_int, tag as c_int);
                sys::MPI_Irecv(bytes.cast(), len as c_int, kind, from, tag, comm, handle)
            }
        })
    }

    /// Starts a broadcast of rank 0's bytes to all ranks.
    ///
    /// # Safety
    /// Nothing reads, writes or frees the bytes before MPI has finished the message.
    pub unsafe fn broadcast(&self, bytes: *mut u8, len: usize) -> MpiResult<MessageHandle> {
        self.handle(|comm, handle| {
            // SAFETY: the caller's promise.
            unsafe { sys::MPI_Ibcast(bytes.cast(), len as c_int, sys::RSMPI_UINT8_T, 0, comm, handle) }
        })
    }

    fn handle(
        &self,
        start: impl FnOnce(sys::MPI_Comm, *mut sys::MPI_Request) -> c_int,
    ) -> MpiResult<MessageHandle> {
        // SAFETY: a constant of the library.
        let mut handle = unsafe { sys::RSMPI_REQUEST_NULL };
        check(start(self.mpi.comm, &mut handle))?;
        Ok(MessageHandle(handle))
    }

    /// Returns the number of received bytes, or zero for a send, once MPI has finished the message; `None` before.
    pub fn test(&self, handle: &mut MessageHandle) -> MpiResult<Option<usize>> {
        let (mut done, mut count) = (0, 0);
        // SAFETY: a status consists of plain numbers; the request is live or null, and both pointers are to live
        // variables.
        unsafe {
            let mut status: sys::MPI_Status = std::mem::zeroed();
            check(sys::MPI_Test(&mut handle.0, &mut done, &mut status))?;
            if done == 0 {
                return Ok(None);
            }
            check(sys::MPI_Get_count(&status, sys::RSMPI_UINT8_T, &mut count))?;
        }
        Ok(Some(count.max(0) as usize))
    }

    /// Cancels a receive. The sender may wait for ever.
    pub fn cancel(&self, mut handle: MessageHandle) -> MpiResult<()> {
        // SAFETY: the request is live. It is freed after it was cancelled, and its memory is not used again, since
        // the caller leaks that.
        unsafe {
            check(sys::MPI_Cancel(&mut handle.0))?;
            check(sys::MPI_Request_free(&mut handle.0))
        }
    }

    /// Lets MPI make progress on all messages in flight.
    pub fn make_progress(&self) -> MpiResult<()> {
        let mut found = 0;
        // SAFETY: the pointers are to live variables, or MPI's constant for an unused status.
        check(unsafe {
            let tag = self.mpi.tag_limit as c_int;
            sys::MPI_Iprobe(sys::RSMPI_ANY_SOURCE, tag, self.mpi.comm, &mut found, sys::RSMPI_STATUS_IGNORE)
        })
    }

    /// Ends MPI, which waits for all ranks.
    pub fn finish(&self) -> MpiResult<()> {
        // SAFETY: nothing calls MPI after this: the engine has ended, and MPI is started once per process.
        if self.mpi.ours { check(unsafe { sys::MPI_Finalize() }) } else { Ok(()) }
    }
}

/// Starts MPI unless it is started. Returns true if this engine has to end it.
fn init() -> Result<bool> {
    let (mut flag, mut provided) = (0, 0);
    let refuse =
        |rule: &str, given: String, remedy: &str| Err(Error::unsupported("mpi", rule, given, remedy));
    // SAFETY: MPI allows these calls at any time, from any thread; pointers are to live variables, or null if MPI
    // allows that.
    unsafe {
        sys::MPI_Finalized(&mut flag);
        if flag != 0 {
            return refuse(
                "MPI starts only once in a process",
                "an MPI that has ended".into(),
                "run the ranks before MPI ends",
            );
        }
        let wanted = sys::RSMPI_THREAD_SERIALIZED;
        sys::MPI_Initialized(&mut flag);
        let ours = flag == 0;
        let code = match ours {
            true => sys::MPI_Init_thread(ptr::null_mut(), ptr::null_mut(), wanted, &mut provided),
            false => sys::MPI_Query_thread(&mut provided),
        };
        if let Err(e) = check(code) {
            return refuse("MPI did not start", e.to_string(), "look at its installation");
        }
        if provided < wanted {
            let given = format!("level {provided}, wanted {wanted} (MPI_THREAD_SERIALIZED)");
            return refuse(
                "MPI was started without support for threads",
                given,
                "start it with MPI_THREAD_SERIALIZED, or let this crate start it",
            );
        }
        Ok(ours)
    }
}

fn piece_bytes() -> Result<usize> {
    const NAME: &str = "ISOSHARD_MPI_PIECE_BYTES";
    let Ok(text) = std::env::var(NAME) else { return Ok(PIECE_BYTES) };
    match text.parse() {
        Ok(n) if (1..=c_int::MAX as usize).contains(&n) => Ok(n),
        _ => {
            let remedy = "set it to the same number from 1 to 2147483647 on all ranks";
            Err(Error::invalid(
                "mpi",
                "the size of a piece is out of range",
                format!("{NAME}={text}"),
                remedy,
            ))
        }
    }
}

/// Returns a text that MPI writes.
fn text(limit: usize, write: impl FnOnce(*mut c_char, *mut c_int) -> c_int) -> MpiResult<String> {
    // The library may have been built with a larger limit than the bindings.
    let (mut bytes, mut len) = (vec![0u8; limit.max(8192)], 0);
    check(write(bytes.as_mut_ptr().cast(), &mut len))?;
    bytes.truncate(len.max(0) as usize);
    Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_string())
}

fn check(code: c_int) -> MpiResult<()> {
    if code == sys::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut bytes = vec![0u8; 8192];
    let mut len = 0;
    // SAFETY: the buffer has room for the longest text, and the pointer is to a live variable; allowed at any time.
    let known = unsafe { sys::MPI_Error_string(code, bytes.as_mut_ptr().cast(), &mut len) };
    bytes.truncate(if known == sys::MPI_SUCCESS as c_int { len.max(0) as usize } else { 0 });
    Err(MpiError(format!("MPI error {code}: {}", String::from_utf8_lossy(&bytes))))
}

impl fmt::Display for MpiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
