//! NVIDIA's library, loaded at run time under the names that it has on machines without its development files.
//!
//! Its functions are looked up here and not by existing bindings, which look for the development link `libnccl.so`
//! alone, or stop the program if an older library lacks a function.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use libloading::Library;

use super::{Communicator, Nccl, NcclError, NcclResult, Progress};
use crate::base::lock;
use crate::error::{Error, Result};
use crate::tensor::cuda::{Address, Handle};

/// Loads the library.
pub(super) fn load() -> Result<Arc<dyn Nccl>> {
    let named = std::env::var("ISOSHARD_NCCL").ok();
    let names = named.map_or(vec!["libnccl.so.2".into(), "libnccl.so".into()], |name| vec![name]);
    let mut reasons = Vec::new();
    for name in names {
        // SAFETY: NCCL's own initialisers run, as in any program that is linked with it.
        match unsafe { Library::new(&name) } {
            Ok(library) => return Ok(Arc::new(NvidiaNccl::new(library)?)),
            Err(e) => {
                let why =
                    std::error::Error::source(&e).map_or_else(|| e.to_string(), |source| source.to_string());
                reasons.push(why);
            }
        }
    }
    Err(Error::unsupported(
        "nccl",
        "the library is not found",
        reasons.join("; "),
        "put the folder of libnccl.so.2 into LD_LIBRARY_PATH, or name the file by ISOSHARD_NCCL",
    ))
}

/// `ncclComm_t`.
type Comm = *mut c_void;
/// `ncclResult_t`.
type Status = c_int;

const SUCCESS: Status = 0;
const IN_PROGRESS: Status = 7;
/// `ncclUint8`: all dtypes are moved as bytes.
const BYTES: c_int = 1;
const ID_BYTES: usize = 128;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([c_char; ID_BYTES]);

/// `ncclConfig_t` as of 2.17; later libraries read as many bytes as `size` says.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
}

/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;

macro_rules! functions {
    ($($field:ident: $name:literal ($($arg:ty),*) -> $ret:ty;)*) => {
        /// The library's functions, by name.
        struct Functions {
            $($field: unsafe extern "C" fn($($arg),*) -> $ret,)*
        }

        impl Functions {
            fn of(library: &Library) -> std::result::Result<Functions, &'static str> {
                Ok(Functions {
                    $($field: {
                        // SAFETY: the type is the one that nccl.h declares for this name, unchanged since 2.18.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($arg),*) -> $ret>(concat!($name, "\0").as_bytes())
                        };
                        *found.map_err(|_| $name)?
                    },)*
                })
            }
        }
    };
}

functions! {
    get_version: "ncclGetVersion" (*mut c_int) -> Status;
    get_unique_id: "ncclGetUniqueId" (*mut UniqueId) -> Status;
    init_rank: "ncclCommInitRankConfig" (*mut Comm, c_int, UniqueId, c_int, *mut Config) -> Status;
    split: "ncclCommSplit" (Comm, c_int, c_int, *mut Comm, *mut Config) -> Status;
    get_async_error: "ncclCommGetAsyncError" (Comm, *mut Status) -> Status;
    get_last_error: "ncclGetLastError" (Comm) -> *const c_char;
    get_error_string: "ncclGetErrorString" (Status) -> *const c_char;
    group_start: "ncclGroupStart" () -> Status;
    group_end: "ncclGroupEnd" () -> Status;
    send: "ncclSend" (*const c_void, usize, c_int, c_int, Comm, *mut c_void) -> Status;
    recv: "ncclRecv" (*mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Status;
    all_gather: "ncclAllGather" (*const c_void, *mut c_void, usize, c_int, Comm, *mut c_void) -> Status;
    broadcast: "ncclBroadcast" (*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> Status;
    finalize: "ncclCommFinalize" (Comm) -> Status;
    destroy: "ncclCommDestroy" (Comm) -> Status;
    abort: "ncclCommAbort" (Comm) -> Status;
}

struct NvidiaNccl {
    functions: Functions,
    version: c_int,
    comms: Mutex<HashMap<Communicator, Arc<CommunicatorEntry>>>,
    /// The last number that was assigned.
    last: AtomicU64,
    /// Keeps the library loaded as long as its functions.
    _library: Library,
}

/// A communicator. The library writes the pointer of one that is being split off once it is ready.
struct CommunicatorEntry {
    comm: AtomicPtr<c_void>,
    parent: Option<Arc<CommunicatorEntry>>,
    /// Held while the library is asked about the communicator for a child, which its group's lock does not cover.
    asked: Mutex<()>,
}

impl CommunicatorEntry {
    fn new(parent: Option<Arc<CommunicatorEntry>>) -> Arc<CommunicatorEntry> {
        Arc::new(CommunicatorEntry { comm: AtomicPtr::default(), parent, asked: Mutex::default() })
    }

    /// Calls `ask` with the communicator that reports this one's state: its own, or the parent's until it is ready. It is
    /// null if the parent was freed; the parent is not freed meanwhile.
    fn ask<T>(&self, ask: impl FnOnce(Comm) -> T) -> T {
        let own = self.comm.load(Ordering::Acquire);
        match &self.parent {
            Some(parent) if own.is_null() => {
                let _kept = lock(&parent.asked);
                ask(parent.comm.load(Ordering::Acquire))
            }
            _ => ask(own),
        }
    }

    /// Returns the pointer in order to free the communicator, once no child asks; children find none from now on.
    fn take(&self) -> Comm {
        let _alone = lock(&self.asked);
        self.comm.swap(ptr::null_mut(), Ordering::AcqRel)
    }
}

impl NvidiaNccl {
    fn new(library: Library) -> Result<NvidiaNccl> {
        let refuse = |given: String| {
            Error::unsupported("nccl", "the library is older than 2.18", given, "install a newer one")
        };
        let functions = Functions::of(&library).map_err(|name| refuse(format!("one without {name}")))?;
        let mut version = 0;
        // SAFETY: the pointer is to a live variable.
        unsafe { (functions.get_version)(&mut version) };
        if version < 21_800 {
            return Err(refuse(format!("version {}", dotted(version))));
        }
        let (comms, last) = (Mutex::default(), AtomicU64::new(0));
        Ok(NvidiaNccl { functions, version, comms, last, _library: library })
    }

    fn kept(&self, comm: Communicator) -> Arc<CommunicatorEntry> {
        let comms = lock(&self.comms);
        comms.get(&comm).expect("a communicator is not used after its end").clone()
    }

    /// Returns the library's pointer of a communicator; null if it is not ready yet.
    fn raw(&self, comm: Communicator) -> Comm {
        self.kept(comm).comm.load(Ordering::Acquire)
    }

    fn forget(&self, comm: Communicator) -> Comm {
        let mut comms = lock(&self.comms);
        let Some(kept) = comms.remove(&comm) else { return ptr::null_mut() };
        let comm = kept.take();
        if comm.is_null() {
            // The library may still write to it.
            std::mem::forget(kept);
        }
        comm
    }

    fn keep(&self, kept: Arc<CommunicatorEntry>) -> Communicator {
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        lock(&self.comms).insert(number, kept);
        number
    }

    fn check(&self, call: &'static str, status: Status, comm: Comm) -> NcclResult<()> {
        if status == SUCCESS || status == IN_PROGRESS {
            return Ok(());
        }
        let text = |at: *const c_char| {
            if at.is_null() {
                return String::new();
            }
            // SAFETY: the library's texts live as long as it does, or until the next failure; they are copied at
            // once.
            unsafe { CStr::from_ptr(at) }.to_string_lossy().trim().to_string()
        };
        // SAFETY: both take any status, and a communicator that is alive, or null.
        let (what, mut words) = unsafe {
            (text((self.functions.get_error_string)(status)), text((self.functions.get_last_error)(comm)))
        };
        // The most frequent mistake.
        if name_of(status) == "ncclInvalidUsage" {
            words.push_str("; NCCL takes one rank a GPU");
        }
        let code = format!("{}: {what}", name_of(status));
        Err(NcclError { call, code, words: words.trim_start_matches("; ").to_string() })
    }
}

fn name_of(status: Status) -> &'static str {
    match status {
        1 => "ncclUnhandledCudaError",
        2 => "ncclSystemError",
        3 => "ncclInternalError",
        4 => "ncclInvalidArgument",
        5 => "ncclInvalidUsage",
        6 => "ncclRemoteError",
        8 => "ncclTimeout",
        _ => "an unknown code",
    }
}

fn dotted(version: c_int) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

impl fmt::Debug for NvidiaNccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

fn number(n: usize) -> c_int {
    c_int::try_from(n).expect("fewer ranks than 2^31")
}

// SAFETY: the library does what its documentation says of each function.
unsafe impl Nccl for NvidiaNccl {
    fn name(&self) -> String {
        format!("NCCL {}", dotted(self.version))
    }

    fn unique_id(&self) -> NcclResult<Vec<u8>> {
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: the pointer is to a live variable.
        let status = unsafe { (self.functions.get_unique_id)(&mut id) };
        self.check("ncclGetUniqueId", status, ptr::null_mut())?;
        Ok(id.0.iter().map(|&b| b as u8).collect())
    }

    fn join(&self, id: &[u8], len: usize, rank: usize) -> NcclResult<Communicator> {
        let mut name = UniqueId([0; ID_BYTES]);
        name.0.iter_mut().zip(id).for_each(|(to, &from)| *to = from as c_char);
        let mut config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21_700,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
        };
        let kept = CommunicatorEntry::new(None);
        // SAFETY: the pointers are to live memory; the first is kept as long as the communicator, the second is
        // copied.
        let status = unsafe {
            (self.functions.init_rank)(kept.comm.as_ptr(), number(len), name, number(rank), &mut config)
        };
        self.check("ncclCommInitRankConfig", status, ptr::null_mut())?;
        Ok(self.keep(kept))
    }

    fn split(&self, parent: Communicator, color: u32, key: usize) -> NcclResult<Communicator> {
        let parent = self.kept(parent);
        let comm = parent.comm.load(Ordering::Acquire);
        let kept = CommunicatorEntry::new(Some(parent));
        let color = c_int::try_from(color).expect("fewer groups than 2^31");
        // SAFETY: the parent is alive; the child's memory is kept until the child is ready. Without a configuration
        // the child inherits its parent's, and so does not block.
        let status =
            unsafe { (self.functions.split)(comm, color, number(key), kept.comm.as_ptr(), ptr::null_mut()) };
        self.check("ncclCommSplit", status, comm)?;
        Ok(self.keep(kept))
    }

    fn progress(&self, comm: Communicator) -> NcclResult<Progress> {
        let kept = self.kept(comm);
        let waits = kept.comm.load(Ordering::Acquire).is_null();
        let state = kept.ask(|comm| -> NcclResult<Status> {
            let mut state = SUCCESS;
            // SAFETY: the communicator is alive, or null, which the library refuses; the pointer is to a live variable.
            let status = unsafe { (self.functions.get_async_error)(comm, &mut state) };
            self.check("ncclCommGetAsyncError", status, comm)?;
            self.check("a call before", state, comm)?;
            Ok(state)
        })?;
        let waits = waits && kept.comm.load(Ordering::Acquire).is_null();
        Ok(if state == IN_PROGRESS || waits { Progress::Underway } else { Progress::Ready })
    }

    fn group_start(&self) -> NcclResult<()> {
        // SAFETY: the call takes no pointer.
        self.check("ncclGroupStart", unsafe { (self.functions.group_start)() }, ptr::null_mut())
    }

    fn group_end(&self) -> NcclResult<()> {
        // SAFETY: the call takes no pointer.
        self.check("ncclGroupEnd", unsafe { (self.functions.group_end)() }, ptr::null_mut())
    }

    unsafe fn send(
        &self,
        from: Address,
        bytes: usize,
        to: usize,
        comm: Communicator,
        stream: Handle,
    ) -> NcclResult<()> {
        let comm = self.raw(comm);
        // SAFETY: the caller's promise, and the communicator is alive.
        let status = unsafe {
            (self.functions.send)(
                from as *const c_void,
                bytes,
                BYTES,
                number(to),
                comm,
                stream as *mut c_void,
            )
        };
        self.check("ncclSend", status, comm)
    }

    unsafe fn recv(
        &self,
        at: Address,
        bytes: usize,
        from: usize,
        comm: Communicator,
        stream: Handle,
    ) -> NcclResult<()> {
        let comm = self.raw(comm);
        // SAFETY: as above.
        let status = unsafe {
            (self.functions.recv)(at as *mut c_void, bytes, BYTES, number(from), comm, stream as *mut c_void)
        };
        self.check("ncclRecv", status, comm)
    }

    unsafe fn all_gather(
        &self,
        from: Address,
        at: Address,
        bytes: usize,
        comm: Communicator,
        stream: Handle,
    ) -> NcclResult<()> {
        let comm = self.raw(comm);
        let (from, at, stream) = (from as *const c_void, at as *mut c_void, stream as *mut c_void);
        // SAFETY: as above.
        let status = unsafe { (self.functions.all_gather)(from, at, bytes, BYTES, comm, stream) };
        self.check("ncclAllGather", status, comm)
    }

    unsafe fn broadcast(
        &self,
        at: Address,
        bytes: usize,
        root: usize,
        comm: Communicator,
        stream: Handle,
    ) -> NcclResult<()> {
        let comm = self.raw(comm);
        let (from, to, stream) = (at as *const c_void, at as *mut c_void, stream as *mut c_void);
        // SAFETY: as above; sending and receiving in place is allowed.
        let status =
            unsafe { (self.functions.broadcast)(from, to, bytes, BYTES, number(root), comm, stream) };
        self.check("ncclBroadcast", status, comm)
    }

    fn finalize(&self, comm: Communicator) -> NcclResult<()> {
        let comm = self.raw(comm);
        // SAFETY: the communicator is alive.
        self.check("ncclCommFinalize", unsafe { (self.functions.finalize)(comm) }, comm)
    }

    fn destroy(&self, comm: Communicator) -> NcclResult<()> {
        let comm = self.forget(comm);
        // SAFETY: the communicator is alive, and was just removed from the table.
        self.check("ncclCommDestroy", unsafe { (self.functions.destroy)(comm) }, ptr::null_mut())
    }

    fn abort(&self, comm: Communicator) -> NcclResult<()> {
        let comm = self.forget(comm);
        if comm.is_null() {
            return Ok(());
        }
        // SAFETY: as above.
        self.check("ncclCommAbort", unsafe { (self.functions.abort)(comm) }, ptr::null_mut())
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_communicator_that_was_freed_reports_nothing() {
        let entry = |at: usize, parent| {
            let entry = CommunicatorEntry::new(parent);
            entry.comm.store(ptr::without_provenance_mut(at), Ordering::Release);
            entry
        };
        let asked = |of: &CommunicatorEntry| of.ask(|comm| comm.addr());
        let parent = entry(64, None);
        let child = entry(0, Some(parent.clone()));
        assert_eq!((asked(&parent), asked(&child)), (64, 64));
        assert_eq!(parent.take().addr(), 64);
        assert_eq!((asked(&parent), asked(&child)), (0, 0), "nothing asks what was freed");
        assert_eq!(asked(&entry(128, Some(parent))), 128);
    }

    /// The watchdog frees the communicator of the world, while a thread asks it about a group that is being split off.
    #[test]
    fn a_communicator_is_not_freed_while_a_child_asks_it() {
        let parent = CommunicatorEntry::new(None);
        parent.comm.store(ptr::without_provenance_mut(64), Ordering::Release);
        let child = CommunicatorEntry::new(Some(parent.clone()));
        let freeing = child.ask(|comm| {
            let freeing = std::thread::spawn(move || parent.take().addr());
            sleep(Duration::from_millis(100));
            assert!(comm.addr() == 64 && !freeing.is_finished(), "the child still asks it");
            freeing
        });
        assert_eq!(freeing.join().unwrap(), 64);
    }

    /// Without a GPU, checks that all functions are found, and that an error has the library's code and message.
    #[test]
    fn the_library_answers() {
        let nccl = match load() {
            Ok(nccl) => nccl,
            Err(e) => return eprintln!("SKIPPED (no NCCL): {e}"),
        };
        let id = match nccl.unique_id() {
            Ok(id) => id,
            Err(e) => return assert!(e.to_string().starts_with("ncclGetUniqueId failed with nccl"), "{e}"),
        };
        assert!(id.len() == ID_BYTES && id.iter().any(|&b| b != 0));
        let comm = match nccl.join(&id, 1, 0) {
            Ok(comm) => comm,
            Err(e) => {
                return assert!(e.to_string().starts_with("ncclCommInitRankConfig failed with nccl"), "{e}");
            }
        };
        let progress = (0..3000).find_map(|_| match nccl.progress(comm) {
            Ok(Progress::Underway) => {
                sleep(Duration::from_millis(10));
                None
            }
            other => Some(other),
        });
        match progress.expect("it comes to an end") {
            Ok(progress) => assert_eq!(progress, Progress::Ready),
            Err(e) => assert!(e.to_string().starts_with("a call before failed with nccl"), "{e}"),
        }
        nccl.abort(comm).unwrap();
    }
}
