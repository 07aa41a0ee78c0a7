//! Kernel launches: arguments, waits between streams, and errors that name the launch.

use std::ffi::c_void;
use std::fmt::Write;
use std::rc::Rc;
use std::sync::Arc;

use bytemuck::NoUninit;
use smallvec::SmallVec;

use super::fault::{self, Fault};
use super::gpu::{Gpu, KernelEntry, is_checked};
use crate::error::{Error, Result};
use crate::tensor::cuda_device::devices::CudaDevice;
use crate::tensor::cuda_device::driver::Grid;
use crate::tensor::cuda_device::handle::{Address, DriverResult};
use crate::tensor::cuda_device::sources::KernelSource;
use crate::tensor::{DType, Tensor, short_list};

/// A kernel about to be launched: [`Gpu::kernel`] makes it, the methods add its arguments in order, and
/// [`KernelLaunch::run`] starts it.
///
/// ```
/// use isoshard::tensor::{DType, cuda::{self, Gpu}};
///
/// if cuda::is_available() {
///     let gpu = Gpu::get(0)?;
///     let mut out = gpu.uninit(DType::I32, [8])?;
///     // The entry fill_i32(out, n, bits) of kernels/cuda/fill.cu.
///     let fill = gpu.kernel("fill", "fill", DType::I32)?.write(&mut out).arg(8u64).arg([7u64, 0]);
///     // SAFETY: these are the entry's parameters; it writes the eight elements of `out`, which lives until then.
///     unsafe { fill.run(1, 256, 0) }?;
///     assert_eq!(out.to_vec::<i32>()?, [7; 8]);
/// }
/// # Ok::<(), isoshard::Error>(())
/// ```
#[must_use = "a launch does nothing until it is run"]
pub struct KernelLaunch<'a> {
    gpu: &'a Gpu,
    kernel: Rc<KernelEntry>,
    /// The arguments' bytes, each aligned as its type.
    bytes: SmallVec<[u64; 32]>,
    used: usize,
    at: SmallVec<[u32; 16]>,
    sizes: SmallVec<[u32; 16]>,
    /// The operands as errors show them; filled only if launches are checked.
    given: String,
    failed: Option<Error>,
}

/// The number of blocks or threads in x, y and z.
#[derive(Clone, Copy, Debug)]
pub struct Extent(pub [u32; 3]);

impl From<u32> for Extent {
    fn from(x: u32) -> Extent {
        Extent([x, 1, 1])
    }
}

impl From<[u32; 3]> for Extent {
    fn from(all: [u32; 3]) -> Extent {
        Extent(all)
    }
}

impl Gpu {
    /// Returns a launch of the entry `<stem>_<dtype>` of a source; a string names the file `kernels/<name>.cu`.
    ///
    /// # Errors
    /// Returns an error if the source does not compile or load, has no such entry, or has the name of another source.
    pub fn kernel(
        &self,
        source: impl Into<KernelSource>,
        stem: &'static str,
        dtype: DType,
    ) -> Result<KernelLaunch<'_>> {
        let source = source.into();
        let entry = (source.name, stem, dtype);
        let found = self.0.kernels.borrow().get(&entry).cloned();
        let kernel = match found {
            Some(kernel) if kernel.source.is_same(&source) => kernel,
            Some(_) => return Err(source.refuse_name()),
            None => {
                let kernel = Rc::new(self.find_kernel(source, stem, dtype)?);
                self.0.kernels.borrow_mut().insert(entry, kernel.clone());
                kernel
            }
        };
        Ok(KernelLaunch::new(self, kernel))
    }

    fn find_kernel(&self, source: KernelSource, stem: &'static str, dtype: DType) -> Result<KernelEntry> {
        let compiled = source.of_dtype(dtype);
        let device: &CudaDevice = &self.stream().device;
        let name = symbol(stem, dtype);
        let module = device.modules.find(device, compiled)?;
        let function = device.driver.function(module, &name);
        let function =
            function.map_err(|e| device.error(format!("{name} of kernels/cuda/{}.cu", compiled.name), &e))?;
        let parameters = device.driver.parameters(function);
        Ok(KernelEntry { source, name, function, parameters })
    }
}

impl<'a> KernelLaunch<'a> {
    fn new(gpu: &'a Gpu, kernel: Rc<KernelEntry>) -> KernelLaunch<'a> {
        KernelLaunch {
            gpu,
            kernel,
            bytes: SmallVec::new(),
            used: 0,
            at: SmallVec::new(),
            sizes: SmallVec::new(),
            given: String::new(),
            failed: None,
        }
    }

    /// Adds a pointer to the first element of a tensor that the kernel reads. If another thread's stream owns the
    /// tensor, the device waits for that stream.
    pub fn read(mut self, x: &Tensor) -> Self {
        let at = self.readable(x);
        self.arg(at)
    }

    /// Adds a structure of `N` pointers, as [`KernelLaunch::read`] adds one; those after the last tensor are null.
    ///
    /// # Panics
    /// Panics if there are more than `N` tensors.
    pub(crate) fn read_all<const N: usize>(mut self, all: &[&Tensor]) -> Self {
        let mut table: [Address; N] = [0; N];
        for (at, x) in table[..all.len()].iter_mut().zip(all) {
            *at = self.readable(x);
        }
        self.push(bytemuck::cast_slice(&table), align_of::<Address>());
        self
    }

    /// Adds a pointer as [`KernelLaunch::read`] does, or a null pointer.
    pub(crate) fn read_or_null(self, x: Option<&Tensor>) -> Self {
        match x {
            Some(x) => self.read(x),
            None => self.arg(0u64),
        }
    }

    /// Adds a pointer to the first element of a tensor that the kernel writes: a fresh tensor, or one that is
    /// [unique](Tensor::is_unique).
    pub fn write(mut self, x: &mut Tensor) -> Self {
        let at = self.writable(x);
        self.arg(at)
    }

    /// Adds a structure of `N` pointers, as [`KernelLaunch::write`] adds one; those after the last tensor are null.
    ///
    /// # Panics
    /// Panics if there are more than `N` tensors.
    pub(crate) fn write_all<const N: usize>(mut self, all: &mut [&mut Tensor]) -> Self {
        let mut table: [Address; N] = [0; N];
        for (at, x) in table[..all.len()].iter_mut().zip(all) {
            *at = self.writable(x);
        }
        self.push(bytemuck::cast_slice(&table), align_of::<Address>());
        self
    }

    /// Adds a pointer as [`KernelLaunch::write`] does, or a null pointer.
    pub(crate) fn write_or_null(self, x: Option<&mut Tensor>) -> Self {
        match x {
            Some(x) => self.write(x),
            None => self.arg(0u64),
        }
    }

    /// Adds a value byte for byte: a number, or a `#[repr(C)]` structure with the layout of the kernel's parameter.
    pub fn arg<T: NoUninit>(mut self, value: T) -> Self {
        self.push(bytemuck::bytes_of(&value), align_of::<T>());
        self
    }

    /// Adds a pointer to the memory to which the kernel reports faults.
    pub(crate) fn faults(self) -> Self {
        let at = self.gpu.stream().fault.at;
        self.arg(at)
    }

    /// Adds the same pointer, for a kernel that may report `faults`.
    pub(crate) fn may_report(self, faults: &[&'static Fault]) -> Self {
        fault::expect(faults);
        self.faults()
    }

    /// Puts the kernel on the thread's stream. Does nothing if the grid has no blocks.
    ///
    /// # Errors
    /// Returns an error, with kernel, grid and operands, if the driver refuses the launch, or if the kernel fails
    /// while launches are [checked](super::set_checked).
    ///
    /// # Panics
    /// Panics if the driver can tell the sizes of the entry's parameters, and those of the arguments differ.
    ///
    /// # Safety
    /// The arguments are the entry's parameters, in their order. With them and this grid the kernel reads and writes only
    /// memory of the tensors that were added, which still exist, and writes to none that was added to be read.
    ///
    /// ```compile_fail,E0133
    /// use isoshard::tensor::{DType, cuda::Gpu};
    /// let gpu = Gpu::get(0)?;
    /// let mut out = gpu.uninit(DType::I32, [8])?;
    /// // Writes far behind the tensor.
    /// gpu.kernel("fill", "fill", DType::I32)?.write(&mut out).arg(1u64 << 40).arg([7u64, 0]).run(1, 256, 0)?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    pub unsafe fn run(
        self,
        blocks: impl Into<Extent>,
        threads: impl Into<Extent>,
        shared_bytes: usize,
    ) -> Result<()> {
        self.start(blocks, threads, shared_bytes)
    }

    /// Does what [`KernelLaunch::run`] does, for the kernels of this crate. Each is launched by one function, which holds the
    /// operands until then, and which the tests run on a driver that checks every access of the kernel.
    pub(crate) fn start(
        mut self,
        blocks: impl Into<Extent>,
        threads: impl Into<Extent>,
        shared_bytes: usize,
    ) -> Result<()> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        let grid =
            Grid { blocks: blocks.into().0, threads: threads.into().0, shared_bytes: shared_bytes as u32 };
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        if let Some(parameters) = &self.kernel.parameters {
            let same = parameters.iter().copied().eq(self.sizes.iter().map(|&s| s as usize));
            assert!(same, "{} takes {parameters:?} bytes, not {:?}", self.kernel.name, self.sizes);
        }
        let base: *mut u64 = self.bytes.as_mut_ptr();
        // SAFETY: every offset is inside the buffer.
        let pointer = |&at: &u32| unsafe { base.cast::<u8>().add(at as usize) }.cast::<c_void>();
        let mut arguments: SmallVec<[*mut c_void; 16]> = short_list(self.at.iter().map(pointer));
        let stream = self.gpu.stream();
        let driver = &stream.device.driver;
        // SAFETY: `run`'s caller promises it, and so does each function that launches a kernel of this crate. The tensors'
        // blocks return to their streams, which reuse them only after this kernel.
        let done = unsafe { driver.launch(self.kernel.function, grid, &mut arguments, stream.handle) };
        stream.note_work();
        let done = match is_checked() {
            true => done.and_then(|()| driver.synchronize(stream.handle)),
            false => done,
        };
        done.map_err(|e| {
            let [x, y, z] = grid.blocks;
            let [a, b, c] = grid.threads;
            let verb = format!(
                "{}<<<[{x}, {y}, {z}], [{a}, {b}, {c}], {shared_bytes}>>>({})",
                self.kernel.name,
                self.given.trim_end_matches(", ")
            );
            stream.device.error(verb, &e)
        })
    }

    fn readable(&mut self, x: &Tensor) -> Address {
        match x.device_block().filter(|b| b.owner().device.index == self.gpu.index()) {
            Some(block) => {
                let ready = block.read_by(self.gpu.stream());
                self.note(x, ready)
            }
            None => self.refuse(x, "an operand is on another device"),
        }
    }

    fn writable(&mut self, x: &mut Tensor) -> Address {
        let mine = x.device_block().is_some_and(|b| Arc::ptr_eq(b.owner(), self.gpu.stream()));
        if !mine || !x.is_unshared() {
            return self.refuse(x, "a kernel writes only to a tensor that nothing else holds");
        }
        let ready = x.device_block().map_or(Ok(()), |block| block.write_by_owner());
        self.note(x, ready)
    }

    fn push(&mut self, bytes: &[u8], align: usize) {
        let at = self.used.next_multiple_of(align);
        self.used = at + bytes.len();
        self.bytes.resize(self.used.div_ceil(8), 0);
        bytemuck::cast_slice_mut::<u64, u8>(&mut self.bytes)[at..self.used].copy_from_slice(bytes);
        self.at.push(at as u32);
        self.sizes.push(bytes.len() as u32);
    }

    /// Returns the operand's address, and keeps the error of `ready`, the wait for its other users, for
    /// [`KernelLaunch::run`].
    fn note(&mut self, x: &Tensor, ready: DriverResult<()>) -> Address {
        if is_checked() {
            let _ = write!(self.given, "{}, ", x.notation());
        }
        if let Err(e) = ready {
            let device = &self.gpu.stream().device;
            self.failed.get_or_insert_with(|| device.error(self.kernel.name.clone(), &e));
        }
        x.device_address().expect("looked at by the caller")
    }

    fn refuse(&mut self, x: &Tensor, rule: &str) -> Address {
        let given = format!("{} on {} for {}", x.notation(), x.device(), self.gpu.device());
        let remedy = "move the operands to one device first";
        self.failed.get_or_insert_with(|| Error::invalid(self.kernel.name.clone(), rule, given, remedy));
        0
    }
}

/// Returns the symbol of an entry.
fn symbol(stem: &str, dtype: DType) -> String {
    format!("{stem}_{dtype}")
}
