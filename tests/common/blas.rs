//! A driver that wraps another one with other properties and notes the entries that are looked up, and a library of
//! matrix products for it: plain loops in f64, written from [`Product`]'s documentation alone.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use isoshard::tensor::DType;
use isoshard::tensor::cuda::{
    Address, Blas, CopyDirection, DeviceProperties, Driver, DriverResult, Grid, Handle, KernelProgram,
    Matrix, Product,
};

/// A driver that wraps another one.
#[derive(Debug)]
pub struct Wrapped {
    pub inner: Arc<dyn Driver>,
    pub properties: DeviceProperties,
    pub blas: Option<Loops>,
    /// The entries that were looked up.
    pub entries: Mutex<BTreeSet<String>>,
}

/// Matrix products by plain loops.
#[derive(Debug)]
pub struct Loops {
    driver: Arc<dyn Driver>,
    /// The products that were computed.
    pub products: Mutex<Vec<Product>>,
}

/// The number of columns for which [`Loops`] does not support a product.
pub const REFUSED_COLS: usize = 13;
/// The size of the workspace, which is overwritten.
const ROOM_BYTES: usize = 1000;

impl Wrapped {
    pub fn new(inner: Arc<dyn Driver>, properties: DeviceProperties, blas: bool) -> Arc<Wrapped> {
        let loops = || Loops { driver: inner.clone(), products: Mutex::default() };
        let blas = blas.then(loops);
        Arc::new(Wrapped { inner, properties, blas, entries: Mutex::default() })
    }
}

// SAFETY: the products read and write the memory that they name, and nothing else.
unsafe impl Blas for Loops {
    fn workspace_bytes(&self, product: &Product) -> DriverResult<Option<usize>> {
        Ok((product.cols != REFUSED_COLS).then_some(ROOM_BYTES))
    }

    unsafe fn multiply(&self, product: &Product, room: Address, stream: Handle) -> DriverResult<()> {
        let p = *product;
        assert_eq!(room % 256, 0);
        assert!(!p.out.transposed && p.out.step >= p.rows);
        for (m, rows, cols) in [(p.left, p.rows, p.sum), (p.right, p.sum, p.cols), (p.out, p.rows, p.cols)] {
            assert!(
                m.step >= if m.transposed { cols } else { rows }.max(1),
                "BLAS's leading dimension: {m:?}"
            );
        }
        // SAFETY: the workspace has as many bytes.
        unsafe { self.driver.fill(room, 0xff, ROOM_BYTES, stream) }?;
        self.driver.synchronize(stream)?;
        for (batch, i, j) in
            (0..p.batch).flat_map(|b| (0..p.rows).flat_map(move |i| (0..p.cols).map(move |j| (b, i, j))))
        {
            // SAFETY: the caller's promise: the matrices are in allocated memory, and the stream has finished with
            // it.
            let sum = (0..p.sum).map(|k| unsafe {
                get(p.dtype, at(&p, &p.left, batch, i, k)) * get(p.dtype, at(&p, &p.right, batch, k, j))
            });
            let sum = sum.sum();
            // SAFETY: as above.
            unsafe { put(p.dtype, at(&p, &p.out, batch, i, j), sum) };
        }
        self.products.lock().unwrap().push(p);
        Ok(())
    }
}

fn at(p: &Product, m: &Matrix, batch: usize, i: usize, j: usize) -> Address {
    let (quick, slow) = if m.transposed { (j, i) } else { (i, j) };
    m.at + ((batch * m.batch_step + quick + slow * m.step) * p.dtype.size_bytes()) as u64
}

unsafe fn get(dtype: DType, at: Address) -> f64 {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F64 => (at as *const f64).read(),
            DType::F16 => (at as *const half::f16).read().to_f64(),
            DType::BF16 => (at as *const half::bf16).read().to_f64(),
            _ => f64::from((at as *const f32).read()),
        }
    }
}

unsafe fn put(dtype: DType, at: Address, x: f64) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F64 => (at as *mut f64).write(x),
            DType::F16 => (at as *mut half::f16).write(half::f16::from_f64(x)),
            DType::BF16 => (at as *mut half::bf16).write(half::bf16::from_f64(x)),
            _ => (at as *mut f32).write(x as f32),
        }
    }
}

// SAFETY: the inner driver does everything.
unsafe impl Driver for Wrapped {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }
    fn bind(&self) -> DriverResult<()> {
        self.inner.bind()
    }
    fn memory(&self) -> DriverResult<(usize, usize)> {
        self.inner.memory()
    }
    fn alloc(&self, bytes: usize) -> DriverResult<Address> {
        self.inner.alloc(bytes)
    }
    unsafe fn free(&self, block: Address) -> DriverResult<()> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.free(block) }
    }
    fn alloc_host(&self, bytes: usize) -> DriverResult<*mut u8> {
        self.inner.alloc_host(bytes)
    }
    unsafe fn free_host(&self, block: *mut u8) -> DriverResult<()> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.free_host(block) }
    }
    fn stream(&self) -> DriverResult<Handle> {
        self.inner.stream()
    }
    fn drop_stream(&self, stream: Handle) {
        self.inner.drop_stream(stream);
    }
    fn synchronize(&self, stream: Handle) -> DriverResult<()> {
        self.inner.synchronize(stream)
    }
    fn event(&self) -> DriverResult<Handle> {
        self.inner.event()
    }
    fn drop_event(&self, event: Handle) {
        self.inner.drop_event(event);
    }
    fn record(&self, event: Handle, stream: Handle) -> DriverResult<()> {
        self.inner.record(event, stream)
    }
    fn wait(&self, stream: Handle, event: Handle) -> DriverResult<()> {
        self.inner.wait(stream, event)
    }
    fn is_done(&self, event: Handle) -> DriverResult<bool> {
        self.inner.is_done(event)
    }
    unsafe fn copy(
        &self,
        direction: CopyDirection,
        to: u64,
        from: u64,
        bytes: usize,
        stream: Handle,
    ) -> DriverResult<()> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.copy(direction, to, from, bytes, stream) }
    }
    unsafe fn fill(&self, at: Address, byte: u8, bytes: usize, stream: Handle) -> DriverResult<()> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.fill(at, byte, bytes, stream) }
    }
    fn compiler(&self) -> Result<String, String> {
        self.inner.compiler()
    }
    fn compile(&self, program: &KernelProgram) -> Result<Vec<u8>, String> {
        self.inner.compile(program)
    }
    fn load(&self, name: &str, image: &[u8]) -> DriverResult<Handle> {
        self.inner.load(name, image)
    }
    fn function(&self, module: Handle, name: &str) -> DriverResult<Handle> {
        self.entries.lock().unwrap().insert(name.to_string());
        self.inner.function(module, name)
    }
    fn parameters(&self, function: Handle) -> Option<Vec<usize>> {
        self.inner.parameters(function)
    }
    unsafe fn launch(
        &self,
        function: Handle,
        grid: Grid,
        arguments: &mut [*mut c_void],
        stream: Handle,
    ) -> DriverResult<()> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.launch(function, grid, arguments, stream) }
    }
    fn blas(&self) -> Option<&dyn Blas> {
        self.blas.as_ref().map(|blas| blas as &dyn Blas)
    }
}
