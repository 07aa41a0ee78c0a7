//! NVIDIA's driver, call by call.

use std::cell::Cell;
use std::ffi::{CString, c_void};
use std::sync::{Arc, OnceLock};

use cudarc::driver::result::{self, DriverError as Code};
use cudarc::driver::sys::{
    self, CUdevice_attribute_enum as Attribute, CUfunction_attribute_enum as OfFunction,
};

use super::blas::CublasLt;
use super::compiler;
use crate::tensor::cuda::{
    Address, Blas, CopyDirection, DeviceProperties, Driver, DriverError, DriverResult, Grid, Handle,
    KernelProgram,
};

/// The first driver version that can tell a function's parameters.
const TELLS_PARAMETERS: i32 = 12_040;

/// Returns the number of devices, or the reason for which there is none.
pub(in crate::tensor::cuda_device) fn devices_len() -> Result<usize, String> {
    // SAFETY: the function only looks up the library.
    if !unsafe { sys::is_culib_present() } {
        return Err("NVIDIA's driver is not found (libcuda.so)".into());
    }
    // The look-up panics if the driver is too old to have one of the functions.
    let count = std::panic::catch_unwind(|| {
        result::init()?;
        result::device::get_count()
    });
    match count {
        Ok(Ok(n)) => Ok(n as usize),
        Ok(Err(e)) => Err(format!("NVIDIA's driver does not start: {}", text(e))),
        Err(_) => Err("NVIDIA's driver is too old".into()),
    }
}

/// Opens the device of this number.
pub(in crate::tensor::cuda_device) fn open(index: usize) -> Result<Arc<dyn Driver>, String> {
    Ok(Arc::new(Nvidia::open(index).map_err(|e| e.to_string())?))
}

/// A device behind NVIDIA's driver, in its primary context.
#[derive(Debug)]
struct Nvidia {
    properties: DeviceProperties,
    context: usize,
    tells_parameters: bool,
    /// Opened at its first use; `None` if it is not installed.
    blas: OnceLock<Option<CublasLt>>,
}

impl Nvidia {
    fn open(index: usize) -> DriverResult<Nvidia> {
        result::init().map_err(call_error("cuInit"))?;
        let device = result::device::get(index as i32).map_err(call_error("cuDeviceGet"))?;
        let attribute = |a| {
            // SAFETY: the device is one of the driver's.
            unsafe { result::device::get_attribute(device, a) }.map_err(call_error("cuDeviceGetAttribute"))
        };
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
        );
        let properties = DeviceProperties {
            name: result::device::get_name(device).map_err(call_error("cuDeviceGetName"))?,
            capability,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
            shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
                as usize,
            // SAFETY: as above.
            total_bytes: unsafe { result::device::total_mem(device) }
                .map_err(call_error("cuDeviceTotalMem"))?,
        };
        // SAFETY: as above. The primary context is kept for the life of the process.
        let context =
            unsafe { result::primary_ctx::retain(device) }.map_err(call_error("cuDevicePrimaryCtxRetain"))?;
        let mut version = 0;
        // SAFETY: the pointer is valid.
        unsafe { sys::cuDriverGetVersion(&mut version) }
            .result()
            .map_err(call_error("cuDriverGetVersion"))?;
        let tells_parameters = version >= TELLS_PARAMETERS;
        Ok(Nvidia { properties, context: context as usize, tells_parameters, blas: OnceLock::new() })
    }

    /// Makes this device's context current on the calling thread, if it is not.
    fn set_current(&self) -> DriverResult<()> {
        thread_local!(static BOUND: Cell<usize> = const { Cell::new(0) });
        if BOUND.get() != self.context {
            // SAFETY: the context was retained when the device was opened.
            unsafe { result::ctx::set_current(self.context as sys::CUcontext) }
                .map_err(call_error("cuCtxSetCurrent"))?;
            BOUND.set(self.context);
        }
        Ok(())
    }
}

// SAFETY: all memory comes from the driver, and every call does what the trait documents.
unsafe impl Driver for Nvidia {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn bind(&self) -> DriverResult<()> {
        self.set_current()
    }

    fn memory(&self) -> DriverResult<(usize, usize)> {
        self.set_current()?;
        result::mem_get_info().map_err(call_error("cuMemGetInfo"))
    }

    fn alloc(&self, bytes: usize) -> DriverResult<Address> {
        self.set_current()?;
        // SAFETY: the block is not read before it is written.
        unsafe { result::malloc_sync(bytes) }.map_err(call_error("cuMemAlloc"))
    }

    unsafe fn free(&self, block: Address) -> DriverResult<()> {
        self.set_current()?;
        // SAFETY: the caller's promise.
        unsafe { result::free_sync(block) }.map_err(call_error("cuMemFree"))
    }

    fn alloc_host(&self, bytes: usize) -> DriverResult<*mut u8> {
        self.set_current()?;
        // SAFETY: portable to all contexts; not read before it is written.
        let block = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
        block.map(|p| p.cast()).map_err(call_error("cuMemHostAlloc"))
    }

    unsafe fn free_host(&self, block: *mut u8) -> DriverResult<()> {
        self.set_current()?;
        // SAFETY: the caller's promise.
        unsafe { result::free_host(block.cast()) }.map_err(call_error("cuMemFreeHost"))
    }

    fn stream(&self) -> DriverResult<Handle> {
        self.set_current()?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
        stream.map(|s| s as Handle).map_err(call_error("cuStreamCreate"))
    }

    fn drop_stream(&self, stream: Handle) {
        // SAFETY: the stream was created by this driver, and is destroyed once.
        let _ = self.set_current().map(|()| unsafe { result::stream::destroy(stream as sys::CUstream) });
    }

    fn synchronize(&self, stream: Handle) -> DriverResult<()> {
        self.set_current()?;
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(stream as sys::CUstream) }
            .map_err(call_error("cuStreamSynchronize"))
    }

    fn event(&self) -> DriverResult<Handle> {
        self.set_current()?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        event.map(|e| e as Handle).map_err(call_error("cuEventCreate"))
    }

    fn drop_event(&self, event: Handle) {
        // SAFETY: the event was created by this driver, and is destroyed once.
        let _ = self.set_current().map(|()| unsafe { result::event::destroy(event as sys::CUevent) });
    }

    fn record(&self, event: Handle, stream: Handle) -> DriverResult<()> {
        self.set_current()?;
        // SAFETY: both are alive.
        unsafe { result::event::record(event as sys::CUevent, stream as sys::CUstream) }
            .map_err(call_error("cuEventRecord"))
    }

    fn wait(&self, stream: Handle, event: Handle) -> DriverResult<()> {
        self.set_current()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are alive.
        let waits =
            unsafe { result::stream::wait_event(stream as sys::CUstream, event as sys::CUevent, flags) };
        waits.map_err(call_error("cuStreamWaitEvent"))
    }

    fn is_done(&self, event: Handle) -> DriverResult<bool> {
        self.set_current()?;
        // SAFETY: the event is alive.
        match unsafe { result::event::query(event as sys::CUevent) } {
            Ok(()) => Ok(true),
            Err(Code(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(e) => Err(call_error("cuEventQuery")(e)),
        }
    }

    unsafe fn copy(
        &self,
        direction: CopyDirection,
        to: u64,
        from: u64,
        bytes: usize,
        stream: Handle,
    ) -> DriverResult<()> {
        self.set_current()?;
        let stream = stream as sys::CUstream;
        // SAFETY: the caller's promise.
        let copied = unsafe {
            match direction {
                CopyDirection::ToDevice => {
                    sys::cuMemcpyHtoDAsync_v2(to, from as *const c_void, bytes, stream)
                }
                CopyDirection::ToHost => sys::cuMemcpyDtoHAsync_v2(to as *mut c_void, from, bytes, stream),
                CopyDirection::Within => sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream),
            }
        };
        copied.result().map_err(call_error("cuMemcpyAsync"))
    }

    unsafe fn fill(&self, at: Address, byte: u8, bytes: usize, stream: Handle) -> DriverResult<()> {
        self.set_current()?;
        // SAFETY: the caller's promise.
        let filled = unsafe { result::memset_d8_async(at, byte, bytes, stream as sys::CUstream) };
        filled.map_err(call_error("cuMemsetD8Async"))
    }

    fn compiler(&self) -> Result<String, String> {
        compiler::compiler_version()
    }

    fn compile(&self, program: &KernelProgram) -> Result<Vec<u8>, String> {
        compiler::compile(program, self.properties.capability)
    }

    fn load(&self, _: &str, image: &[u8]) -> DriverResult<Handle> {
        self.set_current()?;
        // SAFETY: the image is whole (the cache keeps a checksum) and outlives the call.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) };
        module.map(|m| m as Handle).map_err(call_error("cuModuleLoadData"))
    }

    fn function(&self, module: Handle, name: &str) -> DriverResult<Handle> {
        self.set_current()?;
        let name = CString::new(name).expect("entries are named by letters");
        // SAFETY: the module lives as long as the process.
        let function = unsafe { result::module::get_function(module as sys::CUmodule, name) };
        let function = function.map_err(call_error("cuModuleGetFunction"))?;
        let fixed = OfFunction::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: the function was found above.
        let fixed = unsafe { result::function::get_function_attribute(function, fixed) };
        let room = self.properties.shared_bytes as i32 - fixed.map_err(call_error("cuFuncGetAttribute"))?;
        let most = OfFunction::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: as above.
        unsafe { result::function::set_function_attribute(function, most, room) }
            .map_err(call_error("cuFuncSetAttribute"))?;
        Ok(function as Handle)
    }

    fn parameters(&self, function: Handle) -> Option<Vec<usize>> {
        if !self.tells_parameters || self.set_current().is_err() {
            return None;
        }
        let size = |k: usize| {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: the function was found by this driver; the call refuses an index beyond the last parameter.
            let told =
                unsafe { sys::cuFuncGetParamInfo(function as sys::CUfunction, k, &mut offset, &mut size) };
            (told == sys::CUresult::CUDA_SUCCESS).then_some(size)
        };
        Some((0..).map_while(size).collect())
    }

    unsafe fn launch(
        &self,
        function: Handle,
        grid: Grid,
        arguments: &mut [*mut c_void],
        stream: Handle,
    ) -> DriverResult<()> {
        self.set_current()?;
        let (function, stream) = (function as sys::CUfunction, stream as sys::CUstream);
        let (blocks, threads) = (grid.blocks.into(), grid.threads.into());
        // SAFETY: the caller's promise.
        let started =
            unsafe { result::launch_kernel(function, blocks, threads, grid.shared_bytes, stream, arguments) };
        started.map_err(call_error("cuLaunchKernel"))
    }

    fn blas(&self) -> Option<&dyn Blas> {
        self.set_current().ok()?;
        self.blas.get_or_init(CublasLt::open).as_ref().map(|blas| blas as &dyn Blas)
    }
}

/// Returns a function that turns a code into the error of `call`.
fn call_error(call: &'static str) -> impl Fn(Code) -> DriverError {
    move |e| {
        let out_of_memory = e.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        DriverError { call, code: text(e), out_of_memory }
    }
}

fn text(e: Code) -> String {
    match e.error_name() {
        Ok(name) => name.to_string_lossy().into_owned(),
        Err(_) => format!("code {}", e.0 as i32),
    }
}
