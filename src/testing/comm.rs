//! Assertions about communication.

/// Asserts how many bytes a rank receives, or how many calls it makes, for redistributions while an expression is evaluated, and returns its value.
///
/// The numbers are those of [`DeviceMesh::received_bytes`](crate::dtensor::DeviceMesh::received_bytes) and
/// [`DeviceMesh::redistribution_calls`](crate::dtensor::DeviceMesh::redistribution_calls): moves of
/// operands and gradients on this mesh, beside those of [`Trial::record`](crate::testing::Trial::record), which reduces a `Partial` tensor. A [`Tally`](crate::comm::Tally) counts collectives
/// of every kind.
///
/// ```
/// use isoshard::{assert_comm, comm::spmd, dtensor::{DTensor, DeviceMesh}, tensor::DType};
/// spmd(2, |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
///     let x = DTensor::zeros(&mesh, DType::F32, [6], "(S0)")?;
///     let y = assert_comm!(mesh, bytes == 0, x.relu()?);
///     assert_comm!(mesh, bytes <= 3 * 4, y.redistribute("(R)")?);
///     assert_comm!(mesh, calls == 1, y.redistribute("(R)")?);
///     Ok(())
/// })?;
/// # Ok::<(), isoshard::Error>(())
/// ```
///
/// # Panics
/// Panics with the number if the comparison is false.
#[macro_export]
macro_rules! assert_comm {
    ($mesh:expr, calls $compare:tt $limit:expr, $value:expr) => {{
        let mesh: &$crate::dtensor::DeviceMesh = &$mesh;
        let before = mesh.redistribution_calls();
        let value = $value;
        let (calls, limit): (u64, u64) = (mesh.redistribution_calls() - before, $limit);
        assert!(
            calls $compare limit,
            "rank {} of {} makes {calls} calls; the limit is {} {limit}",
            mesh.mesh().rank(),
            mesh.mesh(),
            stringify!($compare),
        );
        value
    }};
    ($mesh:expr, bytes $compare:tt $limit:expr, $value:expr) => {{
        let mesh: &$crate::dtensor::DeviceMesh = &$mesh;
        let before = mesh.received_bytes();
        let value = $value;
        let (received, limit): (u64, u64) = (mesh.received_bytes() - before, $limit);
        assert!(
            received $compare limit,
            "rank {} of {} receives {received} bytes; the limit is {} {limit}",
            mesh.mesh().rank(),
            mesh.mesh(),
            stringify!($compare),
        );
        value
    }};
}
