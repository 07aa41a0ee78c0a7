//! Loaded programs and their entries, and the memory of a running block: stacks and shared memory.

use std::alloc::{Layout, alloc, dealloc};
use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::fs;
use std::ptr;

use isoshard::tensor::cuda::Grid;
use libloading::Library;

use super::Order;
use super::compiler::{scratch, unique};

/// The constant of the same name in block.hpp.
const STACK_BYTES: usize = 65536;
const MAX_THREADS: usize = 1024;
const GUARD_BYTES: usize = 4096;

/// A program that is loaded in this process, and never unloaded.
#[derive(Debug)]
pub struct LoadedProgram {
    library: Library,
    name: &'static str,
}

/// An entry of a program, which lives as long as the process.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    program: &'static str,
    entry: &'static Entry,
    run: unsafe extern "C" fn(*const Entry, *mut Launch) -> bool,
}

/// `struct Entry` of block.hpp.
#[repr(C)]
#[derive(Debug)]
struct Entry {
    name: *const c_char,
    call: *const c_void,
    parameters_len: u32,
    parameter_bytes: *const u32,
    max_threads: u32,
}

// SAFETY: constants of a program that is never unloaded.
unsafe impl Sync for Entry {}

/// `struct Launch` of block.hpp.
#[repr(C)]
struct Launch {
    arguments: *mut *mut c_void,
    blocks: [u32; 3],
    threads: [u32; 3],
    shared_bytes: u32,
    order: u32,
    seed: u64,
    stacks: *mut u8,
    dynamic: *mut u8,
    error: *mut u8,
    error_bytes: u32,
}

impl LoadedProgram {
    /// Loads an image from a temporary file.
    ///
    /// # Errors
    /// Returns the loader's message.
    pub fn load(name: &str, image: &[u8]) -> Result<LoadedProgram, String> {
        let file = unique(&scratch(), &format!("{name}.so"));
        fs::write(&file, image).map_err(|e| format!("{}: {e}", file.display()))?;
        // SAFETY: the image is ours; its initialisers are those of the C library.
        let library = unsafe { Library::new(&file) };
        let _ = fs::remove_file(&file);
        let name = String::from(name).leak();
        library.map(|library| LoadedProgram { library, name }).map_err(|e| e.to_string())
    }

    /// Returns an entry by its name.
    pub fn function(&self, name: &str) -> Option<Function> {
        let symbol = format!("iso_shim_entry_{name}");
        // SAFETY: the symbol is a constant `Entry`, and programs are never unloaded.
        let entry = unsafe { self.library.get::<*const Entry>(&symbol).ok()?.as_ref()? };
        // SAFETY: every program has this function, of this type.
        let run = unsafe { self.library.get(b"iso_shim_run\0") }.ok()?;
        Some(Function { program: self.name, entry, run: *run })
    }
}

impl Function {
    /// The sizes of the parameters in bytes.
    pub fn parameters(&self) -> Vec<usize> {
        // SAFETY: the program gives their number.
        let bytes = unsafe {
            std::slice::from_raw_parts(self.entry.parameter_bytes, self.entry.parameters_len as usize)
        };
        bytes.iter().map(|&b| b as usize).collect()
    }

    /// The most threads of a block.
    pub fn max_threads(&self) -> u32 {
        self.entry.max_threads
    }

    /// The name of the entry's program.
    pub fn program(&self) -> &'static str {
        self.program
    }

    pub fn name(&self) -> &'static str {
        // SAFETY: a constant text of the program.
        unsafe { CStr::from_ptr(self.entry.name) }.to_str().expect("entries are named by letters")
    }

    /// Runs a launch on the calling thread.
    ///
    /// # Errors
    /// Returns a description of what the blocks did and a device does not allow.
    ///
    /// # Safety
    /// The conditions of [`isoshard::tensor::cuda::Driver::launch`] hold, and the grid is legal.
    pub unsafe fn run(
        &self,
        grid: Grid,
        arguments: &mut [*mut c_void],
        (order, seed): (Order, u64),
    ) -> Result<(), String> {
        let mut error = [0u8; 1024];
        let launch = Launch {
            arguments: arguments.as_mut_ptr(),
            blocks: grid.blocks,
            threads: grid.threads,
            shared_bytes: grid.shared_bytes,
            order: match order {
                Order::Ascending => 0,
                Order::Descending => 1,
                Order::Shuffled(_) => 2,
            },
            seed,
            stacks: ptr::null_mut(),
            dynamic: ptr::null_mut(),
            error: error.as_mut_ptr(),
            error_bytes: error.len() as u32,
        };
        // SAFETY: the caller's promise for the arguments; the rest is as block.hpp requires.
        let well = Room::with(|room| unsafe {
            let (stacks, dynamic) = (room.stacks(), room.dynamic(grid.shared_bytes as usize));
            (self.run)(self.entry, &mut Launch { stacks, dynamic, ..launch })
        });
        match well {
            true => Ok(()),
            false => {
                let end = error.iter().position(|&b| b == 0).unwrap_or(error.len());
                Err(String::from_utf8_lossy(&error[..end]).into_owned())
            }
        }
    }
}

/// The memory of blocks that run on one OS thread.
#[derive(Default)]
struct Room {
    stacks: Option<*mut u8>,
    dynamic: Vec<u128>,
}

thread_local!(static ROOM: RefCell<Room> = RefCell::default());

impl Room {
    /// Memory below the first stack, so that a stack overflow there is seen.
    const BELOW_BYTES: usize = 4 * STACK_BYTES;
    const STACKS: Layout =
        match Layout::from_size_align(STACK_BYTES * MAX_THREADS + Room::BELOW_BYTES, STACK_BYTES) {
            Ok(layout) => layout,
            Err(_) => unreachable!(),
        };

    /// Calls with this thread's memory. If a thread that ends has freed it already, while the last tasks of its
    /// streams run, calls with memory for this call alone.
    fn with<T>(call: impl FnOnce(&mut Room) -> T) -> T {
        let mut call = Some(call);
        let mut run = |room: &mut Room| call.take().map(|call| call(room));
        let done = match ROOM.try_with(|room| run(&mut room.borrow_mut())) {
            Ok(done) => done,
            Err(_) => run(&mut Room::default()),
        };
        done.expect("called once")
    }

    /// Returns memory for stacks, which the system provides page by page as it is used.
    fn stacks(&mut self) -> *mut u8 {
        *self.stacks.get_or_insert_with(|| {
            // SAFETY: the layout has a size.
            let stacks = unsafe { alloc(Room::STACKS) };
            assert!(!stacks.is_null(), "no memory for stacks");
            // SAFETY: inside the allocation.
            unsafe { stacks.add(Room::BELOW_BYTES) }
        })
    }

    /// Returns shared memory with its guard, aligned to 16 and to no more.
    fn dynamic(&mut self, bytes: usize) -> *mut u8 {
        let words = (bytes + GUARD_BYTES).div_ceil(16) + 2;
        if self.dynamic.len() < words {
            self.dynamic.resize(words, 0);
        }
        let first = self.dynamic.as_mut_ptr().cast::<u8>();
        let skip = if (first as usize).is_multiple_of(32) { 16 } else { 0 };
        // SAFETY: there are two more words than needed.
        unsafe { first.add(skip) }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Some(stacks) = self.stacks {
            // SAFETY: allocated with the same layout; no launch runs on a thread that ends.
            unsafe { dealloc(stacks.sub(Room::BELOW_BYTES), Room::STACKS) };
        }
    }
}
