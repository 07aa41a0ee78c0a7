//! The ranks of a group along axes of a mesh.

use super::mesh::Mesh;
use crate::tensor::Dims;

impl Mesh {
    /// Returns the coordinates of the ranks that differ from this one along `axes` only, row-major in the order of
    /// `axes`: that of the members of their group.
    pub(crate) fn members_along(&self, axes: &[usize]) -> Vec<Dims> {
        let members: usize = axes.iter().map(|&a| self.axis_len(a)).product();
        let coords_of = |member: usize| {
            let (mut coords, mut rest) = (Dims::from_slice(self.coords()), member);
            for &a in axes.iter().rev() {
                coords[a] = rest % self.axis_len(a);
                rest /= self.axis_len(a);
            }
            coords
        };
        (0..members).map(coords_of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_in_the_order_of_their_group() {
        let mesh = Mesh::parse("a=2,b=3,c=1,d=2", 7).unwrap();
        for axes in [&[][..], &[1], &[0, 3], &[3, 0], &[1, 0, 2], &[0, 1, 2, 3]] {
            let ranks: Vec<usize> = mesh.members_along(axes).iter().map(|c| mesh.rank_at(c)).collect();
            assert_eq!(ranks, mesh.slice(axes).ranks().collect::<Vec<_>>(), "{axes:?}");
        }
    }
}
