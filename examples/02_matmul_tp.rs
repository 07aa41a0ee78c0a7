//! 2. Tensor parallelism: two matrix products, one reduction. `cargo run --example 02_matmul_tp`

use isoshard::Result;
use isoshard::comm::spmd;
use isoshard::dtensor::{DTensor, DeviceMesh};
use isoshard::placement::{Layout, Placement};
use isoshard::tensor::Tensor;

fn main() -> Result<()> {
    spmd(2, |rank| {
        let mesh = DeviceMesh::new(&rank, &[("tp", 2)])?;
        let replicated = || Layout::replicated(1);
        let shard = |dim| Layout::new([Placement::Shard(dim)]);

        let numbers = |shape: [usize; 2], layout| {
            let value = |i: usize| ((i * 7 + i / 5) % 9) as f32 * 0.1 - 0.4;
            let whole = Tensor::from_vec((0..shape[0] * shape[1]).map(value).collect(), shape)?;
            DTensor::distribute(&mesh, &whole, layout)
        };
        let x = numbers([4, 6], replicated())?;
        // The first weight is cut by columns, the second by rows (Shoeybi et al. 2019).
        let up = numbers([6, 64], shard(1))?.requires_grad()?;
        let down = numbers([64, 6], shard(0))?.requires_grad()?;

        // Columns of the weight give columns of the product.
        let hidden = x.matmul(&up)?.relu()?;
        assert_eq!(hidden.spec().to_string(), "f32[4, 64]@(tp:S1)");

        // Where the contracted dim is cut, each rank has a part of every sum: here a half of the summation tree. (A cut
        // through a leaf, of at most 32, would make the plan move operands instead: sums are exact.)
        let y = hidden.matmul(&down)?;
        assert_eq!(y.spec().to_string(), "f32[4, 6]@(tp:P(sum))");
        assert_eq!(mesh.received_bytes(), 0);

        // Only now do the ranks talk. In strict mode they talk nowhere else.
        mesh.set_strict(true);
        let y = y.reduce_partial()?;
        mesh.set_strict(false);

        // The same program on replicated weights gives the same bits: layouts never change values.
        let whole = |t: &DTensor| t.redistribute(replicated());
        let expected = x.matmul(&whole(&up)?)?.relu()?.matmul(&whole(&down)?)?;
        assert_eq!(y.local().to_vec::<f32>()?, expected.local().to_vec::<f32>()?);

        // Gradients lie as their parameters do.
        let grads = y.sum_all()?.backward()?;
        assert_eq!(grads.get(&up).map(|g| g.spec().to_string()), Some("f32[6, 64]@(tp:S1)".into()));
        assert_eq!(grads.get(&down).map(|g| g.spec().to_string()), Some("f32[64, 6]@(tp:S0)".into()));
        Ok(())
    })?;
    println!("two products on two ranks took one all-reduce and gave one rank's result");
    Ok(())
}
