//! Measures the cost of dispatch: nanoseconds of a cached operator on DTensors above the same kernels on the same local
//! tensors. `cargo bench --bench dispatch [-- --json]`.
//!
//! Every rank has 8 x 8 f32 elements, sharded by rows, so nothing is sent. There are three modes: forward without a
//! tape, forward with a tape, and forward, `sum_all` and backward to the first operand. Each number is the minimum of
//! many rounds. `cargo bench --bench dispatch -- relu` measures only cases whose name starts so. The last column is the
//! number of allocations above the local operator.

use std::alloc::{GlobalAlloc, Layout as BlockLayout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::ops::{
    Add, Matmul, Meta, Metas, Mul, Op, Permute, Relu, Reshape, Softmax, Sum, Tensors, Vjp, VjpProgram,
    Windows,
};
use isoshard::placement::{Layout, Placement};
use isoshard::tensor::{DType, Tensor};

const SIDE: usize = 8;
const ROUNDS: usize = 60;
const CALLS: u32 = 500;

/// Counts the allocations of each thread.
struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

thread_local!(static ALLOCATIONS: Cell<u64> = const { Cell::new(0) });

// SAFETY: the system's allocator does all work.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: BlockLayout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps the same promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: BlockLayout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: BlockLayout) {
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: BlockLayout, len: usize) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as above.
        unsafe { System.realloc(block, layout, len) }
    }
}

type Distributed = fn(&DTensor, &DTensor) -> Result<DTensor>;

/// An operator's method, and its record for `rows` rows.
struct Case {
    name: &'static str,
    method: Distributed,
    record: fn(rows: usize) -> Result<Box<dyn Op>>,
    operands: usize,
}

const CASES: [Case; 8] = [
    Case { name: "add", method: |x, y| x.add(y), record: |_| Ok(Box::new(Add)), operands: 2 },
    Case { name: "mul", method: |x, y| x.mul(y), record: |_| Ok(Box::new(Mul)), operands: 2 },
    Case {
        name: "matmul",
        method: |x, y| x.matmul(y),
        record: |_| Ok(Box::new(Matmul::for_dims(2, 2)?)),
        operands: 2,
    },
    Case { name: "relu", method: |x, _| x.relu(), record: |_| Ok(Box::new(Relu)), operands: 1 },
    Case {
        name: "sum",
        method: |x, _| x.sum(&[1], false),
        record: |_| Ok(Box::new(Sum { dims: [1].into_iter().collect(), keep: false })),
        operands: 1,
    },
    Case {
        name: "softmax",
        method: |x, _| x.softmax(1),
        record: |_| Ok(Box::new(Softmax { dim: 1 })),
        operands: 1,
    },
    Case {
        name: "reshape",
        method: |x, _| x.reshape([x.shape()[0], 2, 4]),
        record: |rows| Ok(Box::new(Reshape { shape: [rows, 2, 4].into() })),
        operands: 1,
    },
    Case {
        name: "transpose",
        method: |x, _| x.transpose(0, 1),
        record: |_| Ok(Box::new(Permute { order: [1, 0].into_iter().collect() })),
        operands: 1,
    },
];

fn main() -> Result<()> {
    let json = std::env::args().any(|a| a == "--json");
    let only = std::env::args().skip(1).find(|a| !a.starts_with('-')).unwrap_or_default();
    if !json {
        println!("{:<34}{:>10}{:>10}{:>10}   (ns){:>14}", "case", "local", "DTensor", "above", "allocations");
    }
    for (ranks, mesh) in [(1, "1"), (2, "dp=2")] {
        let only = only.clone();
        let lines = spmd(ranks, move |rank| measure(&DeviceMesh::parse(&rank, mesh)?, &only))?;
        for (case, local, distributed) in lines.iter().flatten().take(lines[0].len()) {
            let (case, above) = (format!("{case}/{ranks}"), distributed.ns - local.ns);
            if json {
                println!(r#"{{"bench":"dispatch","case":"{case}","value":{above:.1},"unit":"ns"}}"#);
            } else {
                let allocations = distributed.allocations - local.allocations;
                let (local, distributed) = (local.ns, distributed.ns);
                println!("{case:<34}{local:>10.0}{distributed:>10.0}{above:>10.0}{allocations:>19.1}");
            }
        }
    }
    Ok(())
}

/// The cost of one call.
#[derive(Clone, Copy, Default)]
struct Cost {
    /// The average nanoseconds in the fastest round.
    ns: f64,
    allocations: f64,
}

/// The cases whose names start with `only`, with their costs on local tensors and on distributed tensors.
fn measure(mesh: &DeviceMesh, only: &str) -> Result<Vec<(String, Cost, Cost)>> {
    let rows = SIDE * mesh.mesh().rank_len();
    let layout = Layout::new(mesh.mesh().coords().iter().map(|_| Placement::Shard(0)));
    let x = DTensor::full(mesh, DType::F32, [rows, SIDE], layout.clone(), 0.5)?;
    let leaf = x.requires_grad()?;
    let w = DTensor::full(mesh, DType::F32, [SIDE, SIDE], Layout::replicated(layout.ndim()), 0.25)?;
    let mut lines = Vec::new();
    for case in CASES.into_iter().filter(|case| case.name.starts_with(only)) {
        // A product's second operand is a weight; all other operands have the first one's layout.
        let y = if case.name == "matmul" { &w } else { &x };
        let apply = |x: &DTensor| (case.method)(x, y);
        let locals = [x.local().clone(), y.local().clone()];
        let tape = Local::new((case.record)(SIDE)?.as_ref(), &locals[..case.operands])?;
        let local = time(|| tape.forward().map(drop))?;
        let no_grad = {
            let _guard = mesh.no_grad();
            time(|| apply(&x).map(drop))?
        };
        lines.push((format!("{}, no grad", case.name), local, no_grad));
        lines.push((format!("{}, grad", case.name), local, time(|| apply(&leaf).map(drop))?));
        let both = time(|| apply(&leaf)?.sum_all()?.backward().map(drop))?;
        lines.push((
            format!("{}, forward and backward", case.name),
            time(|| tape.forward_and_backward())?,
            both,
        ));
    }
    let stay = time(|| x.redistribute(layout.clone()).map(drop))?;
    lines.push(("redistribute to where it lies".into(), Cost::default(), stay));
    Ok(lines)
}

/// Returns the cost of a call.
fn time(mut call: impl FnMut() -> Result<()>) -> Result<Cost> {
    let mut cost = Cost { ns: f64::INFINITY, allocations: f64::INFINITY };
    for _ in 0..ROUNDS {
        let (start, before) = (Instant::now(), ALLOCATIONS.get());
        for _ in 0..CALLS {
            call()?;
        }
        cost.ns = cost.ns.min(start.elapsed().as_nanos() as f64 / f64::from(CALLS));
        let allocations = ALLOCATIONS.get() - before;
        cost.allocations = cost.allocations.min(allocations as f64 / f64::from(CALLS));
    }
    Ok(cost)
}

/// An operator, its sum and both derivatives on local tensors. Everything except the kernels is done beforehand.
struct Local {
    ins: Tensors,
    op: Kernel,
    sum: Kernel,
    ones: Tensor,
    op_derivative: Derivative,
    sum_derivative: Derivative,
}

struct Kernel {
    op: Arc<dyn Op>,
    windows: Windows,
    outs: Metas,
}

struct Derivative {
    program: VjpProgram,
    kernels: Vec<Kernel>,
}

impl Local {
    fn new(op: &dyn Op, ins: &[Tensor]) -> Result<Local> {
        let metas: Metas = ins.iter().map(Meta::of).collect();
        let kernel = Kernel::new(op.to_shared(), &metas)?;
        let dims = (0..kernel.outs[0].shape.len()).collect();
        let sum = Kernel::new(Arc::new(Sum { dims, keep: false }), &kernel.outs)?;
        Ok(Local {
            ins: ins.iter().cloned().collect(),
            op_derivative: Derivative::new(&kernel, &metas)?,
            sum_derivative: Derivative::new(&sum, &kernel.outs)?,
            op: kernel,
            sum,
            ones: Tensor::full(DType::F32, isoshard::tensor::Shape::from([]), 1.0),
        })
    }

    fn forward(&self) -> Result<Tensors> {
        self.op.run(self.ins.clone())
    }

    fn forward_and_backward(&self) -> Result<()> {
        let outs = self.forward()?;
        let sum = self.sum.run(outs.clone())?;
        let grad = self.sum_derivative.run(&outs, &sum, &self.ones)?;
        black_box(self.op_derivative.run(&self.ins, &outs, &grad)?);
        Ok(())
    }
}

impl Kernel {
    fn new(op: Arc<dyn Op>, ins: &[Meta]) -> Result<Kernel> {
        let outs = op.infer(ins)?;
        Ok(Kernel { windows: Windows::whole(ins, &outs), op, outs })
    }

    fn run(&self, mut ins: Tensors) -> Result<Tensors> {
        self.op.eval(black_box(&mut ins), &self.windows)
    }
}

impl Derivative {
    /// The derivative with respect to the first operand.
    fn new(of: &Kernel, ins: &[Meta]) -> Result<Derivative> {
        let needs: Vec<bool> = (0..ins.len()).map(|i| i == 0).collect();
        let program = Vjp::write(of.op.as_ref(), ins, &needs)?;
        let mut metas: Vec<Meta> = ins.iter().chain(&of.outs).chain(&of.outs).cloned().collect();
        let mut kernels = Vec::new();
        for step in &program.steps {
            let ins: Metas = step.ins.iter().map(|r| metas[r.index()].clone()).collect();
            let kernel = Kernel::new(step.op.clone(), &ins)?;
            metas.extend(kernel.outs.iter().cloned());
            kernels.push(kernel);
        }
        Ok(Derivative { program, kernels })
    }

    fn run(&self, ins: &Tensors, outs: &Tensors, grad: &Tensor) -> Result<Tensor> {
        let mut values: Tensors = ins.iter().chain(outs).chain([grad]).cloned().collect();
        for (step, kernel) in self.program.steps.iter().zip(&self.kernels) {
            let outs = kernel.run(step.ins.iter().map(|r| values[r.index()].clone()).collect())?;
            values.extend(outs);
        }
        let first = self.program.grads[0].expect("asked for");
        Ok(values[first.index()].clone())
    }
}
