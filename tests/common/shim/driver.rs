//! The driver's calls, one by one.

use std::collections::HashSet;
use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use isoshard::tensor::cuda::{
    self, Address, CopyDirection, DeviceProperties, Driver, DriverError, DriverResult, Grid, Handle,
};

use super::program::{Function, LoadedProgram};
use super::queue::Task;
use super::{ORDER, Order, Shim, lock, mix, refusal};

const INVALID: &str = "CUDA_ERROR_INVALID_VALUE";
const BAD_HANDLE: &str = "CUDA_ERROR_INVALID_HANDLE";

// SAFETY: blocks are allocated until they are freed, and calls do with them only what the trait documents.
unsafe impl Driver for Shim {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn bind(&self) -> DriverResult<()> {
        self.enter("bind")
    }

    fn memory(&self) -> DriverResult<(usize, usize)> {
        self.enter("memory")?;
        let total = self.properties.total_bytes;
        Ok((total - lock(&self.memory).device_bytes, total))
    }

    fn alloc(&self, bytes: usize) -> DriverResult<Address> {
        self.enter("alloc")?;
        let mut memory = lock(&self.memory);
        let free = self.properties.total_bytes - memory.device_bytes;
        match bytes {
            0 => Err(refusal("alloc", INVALID, "0 bytes")),
            _ if bytes > free => {
                let code = format!("CUDA_ERROR_OUT_OF_MEMORY: {bytes} bytes of {free}");
                Err(DriverError { call: "alloc", code, out_of_memory: true })
            }
            _ => Ok(memory.alloc(bytes, false)),
        }
    }

    unsafe fn free(&self, block: Address) -> DriverResult<()> {
        self.enter("free")?;
        self.retire("free", block);
        lock(&self.memory).free(block, false).map_err(|why| refusal("free", INVALID, &why))
    }

    fn alloc_host(&self, bytes: usize) -> DriverResult<*mut u8> {
        self.enter("alloc_host")?;
        Ok(lock(&self.memory).alloc(bytes, true) as *mut u8)
    }

    unsafe fn free_host(&self, block: *mut u8) -> DriverResult<()> {
        self.enter("free_host")?;
        self.retire("free_host", block as u64);
        lock(&self.memory).free(block as u64, true).map_err(|why| refusal("free_host", INVALID, &why))
    }

    fn stream(&self) -> DriverResult<Handle> {
        self.enter("stream")?;
        Ok(lock(&self.queue).stream())
    }

    fn drop_stream(&self, stream: Handle) {
        let mut queue = lock(&self.queue);
        if !queue.knows_stream(stream) {
            self.blame(format!("stream {stream} is given back that is not there"));
        }
        queue.drop_stream(stream);
    }

    fn synchronize(&self, stream: Handle) -> DriverResult<()> {
        self.enter("synchronize")?;
        let mut queue = lock(&self.queue);
        if !queue.knows_stream(stream) {
            return Err(refusal("synchronize", BAD_HANDLE, "there is no such stream"));
        }
        self.finish(&mut queue, stream);
        if let Some(failed) = queue.take_failure(stream) {
            return Err(failed);
        }
        drop(queue);
        let misused = lock(&self.blamed).take().map_or(Ok(()), Err);
        let whole = misused.and_then(|()| lock(&self.memory).check(false));
        whole.map_err(|why| refusal("synchronize", "CUDA_ERROR_ILLEGAL_ADDRESS", &why))
    }

    fn event(&self) -> DriverResult<Handle> {
        self.enter("event")?;
        Ok(lock(&self.queue).event())
    }

    fn drop_event(&self, event: Handle) {
        let mut queue = lock(&self.queue);
        if !queue.knows_event(event) {
            self.blame(format!("event {event} is given back that is not there"));
        }
        queue.drop_event(event);
    }

    fn record(&self, event: Handle, stream: Handle) -> DriverResult<()> {
        self.enter("record")?;
        let mut queue = lock(&self.queue);
        if !queue.knows_event(event) || !queue.knows_stream(stream) {
            return Err(refusal("record", BAD_HANDLE, "there is no such event or stream"));
        }
        let task = queue.record(event, stream);
        match self.late.load(Ordering::Relaxed) {
            true => queue.put(stream, task),
            false => self.step(&mut queue, (stream, task)),
        }
        Ok(())
    }

    fn wait(&self, stream: Handle, event: Handle) -> DriverResult<()> {
        self.enter("wait")?;
        let mut queue = lock(&self.queue);
        if !queue.knows_event(event) || !queue.knows_stream(stream) {
            return Err(refusal("wait", BAD_HANDLE, "there is no such event or stream"));
        }
        if let Some(recording) = queue.recording(event) {
            queue.put(stream, Task::Wait(recording));
        }
        Ok(())
    }

    fn is_done(&self, event: Handle) -> DriverResult<bool> {
        self.enter("is_done")?;
        let mut queue = lock(&self.queue);
        if !queue.knows_event(event) {
            return Err(refusal("is_done", BAD_HANDLE, "there is no such event"));
        }
        // A query takes time, and streams advance meanwhile.
        for _ in 0..1 + queue.below(4) {
            if queue.recording(event).is_some()
                && let Some(next) = queue.next_of_any()
            {
                self.step(&mut queue, next);
            }
        }
        Ok(queue.recording(event).is_none())
    }

    unsafe fn copy(
        &self,
        direction: CopyDirection,
        to: u64,
        from: u64,
        bytes: usize,
        stream: Handle,
    ) -> DriverResult<()> {
        self.enter("copy")?;
        self.put("copy", stream, Task::Copy { direction, to, from, bytes })
    }

    unsafe fn fill(&self, at: Address, byte: u8, bytes: usize, stream: Handle) -> DriverResult<()> {
        self.enter("fill")?;
        self.put("fill", stream, Task::Fill { at, byte, bytes })
    }

    fn compiler(&self) -> Result<String, String> {
        Ok(self.compiler.version.clone())
    }

    fn compile(&self, program: &cuda::KernelProgram) -> Result<Vec<u8>, String> {
        self.enter("compile").map_err(|e| e.to_string())?;
        self.compiler.compile(program)
    }

    fn load(&self, name: &str, image: &[u8]) -> DriverResult<Handle> {
        self.enter("load")?;
        if !is_listed(name) {
            let why = format!("ops::cuda_programs() has no {name}.cu, so pack.sh does not pack it");
            return Err(refusal("load", "CUDA_ERROR_NOT_FOUND", &why));
        }
        let program = LoadedProgram::load(name, image)
            .map_err(|why| refusal("load", "CUDA_ERROR_INVALID_IMAGE", &why))?;
        let mut programs = lock(&self.programs);
        programs.push(program);
        Ok(programs.len() as Handle)
    }

    fn function(&self, module: Handle, name: &str) -> DriverResult<Handle> {
        self.enter("function")?;
        let programs = lock(&self.programs);
        let program = programs.get((module as usize).wrapping_sub(1));
        let program = program.ok_or_else(|| refusal("function", BAD_HANDLE, "there is no such module"))?;
        let function = program.function(name);
        let function = function.ok_or_else(|| refusal("function", "CUDA_ERROR_NOT_FOUND", name))?;
        let mut functions = lock(&self.functions);
        functions.push(function);
        Ok(functions.len() as Handle)
    }

    fn parameters(&self, function: Handle) -> Option<Vec<usize>> {
        lock(&self.functions).get((function as usize).wrapping_sub(1)).map(Function::parameters)
    }

    unsafe fn launch(
        &self,
        function: Handle,
        grid: Grid,
        arguments: &mut [*mut c_void],
        stream: Handle,
    ) -> DriverResult<()> {
        self.enter("launch")?;
        let function = lock(&self.functions).get((function as usize).wrapping_sub(1)).copied();
        let function = function.ok_or_else(|| refusal("launch", BAD_HANDLE, "there is no such function"))?;
        let sizes = function.parameters();
        legal(&function, grid, sizes.len(), arguments.len(), self.properties.shared_bytes)
            .map_err(|why| refusal("launch", INVALID, &format!("{}: {why}", function.name())))?;
        let copy = |(&from, &bytes): (&*mut c_void, &usize)| {
            let mut argument = vec![0u128; bytes.div_ceil(16)];
            // SAFETY: the caller's promise: the argument is as large as the parameter.
            unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), argument.as_mut_ptr().cast(), bytes) };
            argument
        };
        let arguments = arguments.iter().zip(&sizes).map(copy).collect();
        let order = ORDER.get().unwrap_or(self.order);
        let nth = self.launches.fetch_add(1, Ordering::Relaxed);
        let seed = if let Order::Shuffled(seed) = order { mix(seed ^ nth << 32) } else { 0 };
        self.put("launch", stream, Task::Launch { function, grid, arguments, order: (order, seed) })
    }
}

/// # Errors
/// Refuses launches that a device refuses, and more threads than the entry is compiled for.
fn legal(
    function: &Function,
    grid: Grid,
    wants: usize,
    given: usize,
    shared_most: usize,
) -> Result<(), String> {
    let Grid { blocks: [bx, by, bz], threads: [x, y, z], shared_bytes } = grid;
    let threads = u64::from(x) * u64::from(y) * u64::from(z);
    let most = u64::from(function.max_threads());
    if bx == 0 || by == 0 || bz == 0 || bx > i32::MAX as u32 || by > 65535 || bz > 65535 {
        return Err(format!("no grid has [{bx}, {by}, {bz}] blocks"));
    }
    if threads == 0 || threads > 1024 || z > 64 {
        return Err(format!("no block has [{x}, {y}, {z}] threads"));
    }
    if threads > most {
        return Err(format!("{threads} threads where it is compiled for {most}"));
    }
    if shared_bytes as usize > shared_most {
        return Err(format!("{shared_bytes} bytes of shared memory where there are {shared_most}"));
    }
    if wants != given {
        return Err(format!("{given} arguments for {wants} parameters"));
    }
    Ok(())
}

/// Returns true for the programs that `pack.sh` packs, and for those of the shim's own tests. Any other would be missing
/// on a machine without a compiler.
fn is_listed(name: &str) -> bool {
    static LISTED: OnceLock<HashSet<String>> = OnceLock::new();
    let listed =
        LISTED.get_or_init(|| isoshard::ops::cuda_programs().into_iter().map(|(file, _)| file).collect());
    ["one", "kernels"].contains(&name) || listed.contains(&format!("{name}.cu"))
}
