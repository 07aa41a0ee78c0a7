//! Launching a kernel: its arguments, the waits between streams, and errors that say what was launched.

use std::ffi::c_void;
use std::fmt::Write;
use std::rc::Rc;
use std::sync::Arc;

use bytemuck::NoUninit;
use smallvec::SmallVec;

use super::device::CudaDevice;
use super::driver::Grid;
use super::gpu::{Gpu, Kernel, is_checked};
use super::handle::{Address, DriverResult};
use super::sources::Source;
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};

/// A kernel about to be launched; see [`Gpu::kernel`].
#[must_use = "a launch does nothing until it is run"]
pub struct KernelLaunch<'a> {
    gpu: &'a Gpu,
    kernel: Rc<Kernel>,
    /// The arguments' bytes, each at its alignment.
    bytes: SmallVec<[u64; 32]>,
    used: usize,
    at: SmallVec<[u32; 16]>,
    sizes: SmallVec<[u32; 16]>,
    /// The operands, for errors; written where launches are checked.
    given: String,
    failed: Option<Error>,
}

/// Blocks or threads in x, y and z.
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
    /// The entry `<stem>_<dtype>` of a source (`kernels/<file>.cu` by its name), to be given arguments and run.
    ///
    /// # Errors
    /// A source that does not compile or load.
    pub fn kernel(
        &self,
        source: impl Into<Source>,
        stem: &'static str,
        dtype: DType,
    ) -> Result<KernelLaunch<'_>> {
        let source = source.into();
        let entry = (source.name, stem, dtype);
        let found = self.0.kernels.borrow().get(&entry).cloned();
        let kernel = match found {
            Some(kernel) => kernel,
            None => {
                let kernel = Rc::new(self.find_kernel(source, stem, dtype)?);
                self.0.kernels.borrow_mut().insert(entry, kernel.clone());
                kernel
            }
        };
        Ok(KernelLaunch::new(self, kernel))
    }

    fn find_kernel(&self, source: Source, stem: &'static str, dtype: DType) -> Result<Kernel> {
        let device: &CudaDevice = &self.stream().device;
        let name = symbol(stem, dtype);
        let module = device.modules.find(device, source)?;
        let function = device.driver.function(module, &name);
        let function =
            function.map_err(|e| device.error(format!("{name} of kernels/{}.cu", source.name), &e))?;
        let parameters = device.driver.parameters(function);
        Ok(Kernel { name, function, parameters })
    }
}

impl<'a> KernelLaunch<'a> {
    fn new(gpu: &'a Gpu, kernel: Rc<Kernel>) -> KernelLaunch<'a> {
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

    /// A pointer to the first element of a tensor that the kernel reads. Waits, on the device, for another thread's stream
    /// if the tensor is that thread's.
    pub fn read(mut self, x: &Tensor) -> Self {
        let at = self.readable(x);
        self.arg(at)
    }

    /// A structure of `N` pointers, those behind the last tensor null, each as of [`KernelLaunch::read`].
    ///
    /// # Panics
    /// With more than `N` tensors.
    pub fn read_all<const N: usize>(mut self, all: &[&Tensor]) -> Self {
        let mut table: [Address; N] = [0; N];
        for (at, x) in table[..all.len()].iter_mut().zip(all) {
            *at = self.readable(x);
        }
        self.push(bytemuck::cast_slice(&table), align_of::<Address>());
        self
    }

    /// As [`KernelLaunch::read`], or a null pointer.
    pub fn read_or_null(self, x: Option<&Tensor>) -> Self {
        match x {
            Some(x) => self.read(x),
            None => self.arg(0u64),
        }
    }

    /// A pointer to the first element of a tensor that the kernel writes: a fresh one, or one that is
    /// [unique](Tensor::is_unique).
    pub fn write(mut self, x: &mut Tensor) -> Self {
        let at = self.writable(x);
        self.arg(at)
    }

    /// A structure of `N` pointers, those behind the last tensor null, each as of [`KernelLaunch::write`].
    ///
    /// # Panics
    /// With more than `N` tensors.
    pub fn write_all<const N: usize>(mut self, all: &mut [&mut Tensor]) -> Self {
        let mut table: [Address; N] = [0; N];
        for (at, x) in table[..all.len()].iter_mut().zip(all) {
            *at = self.writable(x);
        }
        self.push(bytemuck::cast_slice(&table), align_of::<Address>());
        self
    }

    /// As [`KernelLaunch::write`], or a null pointer.
    pub fn write_or_null(self, x: Option<&mut Tensor>) -> Self {
        match x {
            Some(x) => self.write(x),
            None => self.arg(0u64),
        }
    }

    /// A value, byte for byte: a number, or a `#[repr(C)]` structure that the kernel's parameter has the layout of.
    pub fn arg<T: NoUninit>(mut self, value: T) -> Self {
        self.push(bytemuck::bytes_of(&value), align_of::<T>());
        self
    }

    /// A pointer to where the kernel reports faults.
    pub fn faults(self) -> Self {
        let at = self.gpu.stream().fault.at;
        self.arg(at)
    }

    /// Puts the kernel on the thread's stream. Nothing happens where there are no blocks.
    ///
    /// # Errors
    /// A launch that the driver refuses, named with kernel, grid and operands; where launches are
    /// [checked](super::set_checked), also a kernel that fails.
    pub fn run(
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
        // SAFETY: every offset lies in the buffer.
        let pointer = |&at: &u32| unsafe { base.cast::<u8>().add(at as usize) }.cast::<c_void>();
        let mut arguments: SmallVec<[*mut c_void; 16]> = self.at.iter().map(pointer).collect();
        let stream = self.gpu.stream();
        let driver = &stream.device.driver;
        // SAFETY: the sizes are the entry's where the driver can tell, and the tests run every kernel under one that can;
        // the tensors' blocks return to their streams, which reuse them after this kernel.
        let done = unsafe { driver.launch(self.kernel.function, grid, &mut arguments, stream.handle) };
        stream.worked();
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
        match x.device_block().filter(|b| b.home().device.index == self.gpu.index()) {
            Some(block) => {
                let ready = block.read_by(self.gpu.stream());
                self.note(x, ready)
            }
            None => self.refuse(x, "an operand lies elsewhere"),
        }
    }

    fn writable(&mut self, x: &mut Tensor) -> Address {
        let mine = x.device_block().is_some_and(|b| Arc::ptr_eq(b.home(), self.gpu.stream()));
        if !mine || !x.is_unshared() {
            return self.refuse(x, "a kernel writes to what nobody else holds");
        }
        let ready = x.device_block().map_or(Ok(()), |block| block.write_at_home());
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

    /// The address of an operand that is there, once `ready`.
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

/// The symbol of an entry.
fn symbol(stem: &str, dtype: DType) -> String {
    format!("{stem}_{dtype}")
}
