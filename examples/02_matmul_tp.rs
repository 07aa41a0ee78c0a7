//! 2. Tensor parallelism: two matrix products, one reduction. `cargo run --example 02_matmul_tp`
//!
//! Prints the layouts that go into each step and come out of it, and the bytes that rank 0 receives.

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::{Layout, Placement};
use isoshard::tensor::Tensor;

fn main() -> Result<()> {
    let tables = spmd(2, |rank| {
        let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
        let replicated = || Layout::replicated(1);
        let shard = |dim| Layout::new([Placement::Shard(dim)]);

        let numbers = |shape: [usize; 2], layout| {
            let value = |i: usize| ((i * 7 + i / 5) % 9) as f32 * 0.1 - 0.4;
            let whole = Tensor::from_vec((0..shape[0] * shape[1]).map(value).collect(), shape)?;
            DTensor::distribute(&mesh, &whole, layout)
        };
        let x = numbers([4, 6], replicated())?;
        // The first weight is sharded by columns, the second by rows (Shoeybi et al. 2019).
        let up = numbers([6, 64], shard(1))?.requires_grad()?;
        let down = numbers([64, 6], shard(0))?.requires_grad()?;
        let mut table = Table { mesh: &mesh, lines: Vec::new(), received: mesh.received_bytes() };

        // Each rank has some columns of the weight and computes the same columns of the product.
        let hidden = x.matmul(&up)?;
        table.step("x · up", &[&x, &up], &hidden);
        let hidden = table.then("relu", &hidden, hidden.relu()?);
        assert_eq!(hidden.spec().to_string(), "f32[4, 64]@(tp:S1)");

        // The contracted dim is sharded, so each rank holds a contribution to every sum: here one half of the reduction
        // tree. (If the cut went through a leaf of the tree, at most 32 elements, the plan would move operands instead,
        // because sums are exact.)
        let partial = hidden.matmul(&down)?;
        table.step("hidden · down", &[&hidden, &down], &partial);
        assert_eq!(partial.spec().to_string(), "f32[4, 6]@(tp:P(sum))");
        assert_eq!(mesh.received_bytes(), 0);

        // Only now do the ranks communicate. In strict mode an operator that had to move an operand would be an error.
        mesh.set_strict(true);
        let y = table.then("all-reduce", &partial, partial.reduce_partial()?);
        mesh.set_strict(false);

        // Gradients have their parameters' layouts.
        let grads = y.sum_all()?.backward()?;
        let (up_grad, down_grad) = (grads.get(&up).expect("a leaf"), grads.get(&down).expect("a leaf"));
        assert_eq!((up_grad.layout(), down_grad.layout()), (up.layout(), down.layout()));
        table.step("gradient of up", &[&y], up_grad);
        table.step("gradient of down", &[&y], down_grad);

        // The same program on replicated weights gives the same bits: layouts never change values.
        let whole = |t: &DTensor| t.redistribute(replicated());
        let expected = x.matmul(&whole(&up)?)?.relu()?.matmul(&whole(&down)?)?;
        assert_eq!(y.local().to_vec::<f32>()?, expected.local().to_vec::<f32>()?);
        Ok(table.lines)
    })?;

    println!("An MLP on two ranks. Its weights are sharded: up by columns, down by rows.\n");
    println!("{:<18}{:<44}{:<24}rank 0 receives", "step", "from", "to");
    tables[0].iter().for_each(|line| println!("{line}"));
    println!("\nTwo products take one all-reduce, and y has the bits of a single rank.");
    Ok(())
}

/// A line per step, with the bytes that arrived since the step before.
struct Table<'a> {
    mesh: &'a DeviceMesh,
    lines: Vec<String>,
    received: u64,
}

impl Table<'_> {
    fn step(&mut self, name: &str, operands: &[&DTensor], result: &DTensor) {
        let operands: Vec<String> = operands.iter().map(|x| x.spec().to_string()).collect();
        let (from, to, now) = (operands.join(", "), result.spec().to_string(), self.mesh.received_bytes());
        self.lines.push(format!("{name:<18}{from:<44}{to:<24}{:>9} bytes", now - self.received));
        self.received = now;
    }

    fn then(&mut self, name: &str, operand: &DTensor, result: DTensor) -> DTensor {
        self.step(name, &[operand], &result);
        result
    }
}
