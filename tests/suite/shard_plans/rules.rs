//! The rules of FSDP2 and of Megatron-FSDP for the same buffers, for comparisons.

/// The elements of one rank's shard by PyTorch FSDP2's rule: dim 0 of each parameter is cut into equal chunks, and the
/// last ones are padded.
pub fn fsdp2(shapes: &[Vec<usize>], ranks: usize) -> u128 {
    shapes.iter().map(|shape| (shape[0].div_ceil(ranks) * shape[1..].iter().product::<usize>()) as u128).sum()
}

/// The elements of one rank's shard by Megatron-FSDP's rule of 2025: a bucket is padded to a multiple of the ranks and of
/// a chunk, which is the least common multiple of the parameters' lengths without dim 0. Parameters that are no multiple
/// of it share chunks, which is left out here: so this is a lower bound of its padding.
pub fn megatron(shapes: &[Vec<usize>], ranks: usize) -> u128 {
    let row = |shape: &Vec<usize>| shape[1..].iter().product::<usize>() as u128;
    let chunk = shapes.iter().map(row).fold(1, lcm);
    let total: u128 = shapes.iter().map(|shape| row(shape) * shape[0] as u128).sum();
    total.div_ceil(ranks as u128 * chunk) * chunk
}

fn lcm(a: u128, b: u128) -> u128 {
    let (mut gcd, mut rest) = (a, b);
    while rest > 0 {
        (gcd, rest) = (rest, gcd % rest);
    }
    a / gcd * b
}
