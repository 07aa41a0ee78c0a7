//! Taking a draw from a generator, and comparing generators over the ranks of a mesh.

use super::device_mesh::DeviceMesh;
use super::rank_reports::{gather_words, group_by_value, list_values};
use crate::error::{Error, Result};
use crate::rng::{Draw, Generator, GeneratorState};

/// The source of a random operator's numbers: a `&mut Generator`, which gives its next draw, or a [`Draw`] itself.
///
/// When a generator first draws on a mesh, its state is compared over all ranks: one all-gather of 16 bytes per rank,
/// under the engine's deadline (not counted in [`DeviceMesh::received_bytes`]; none on a single rank). Later draws of this
/// generator and of its clones communicate nothing. If ranks then draw different numbers of times, the generators diverge;
/// the program has made different calls on different ranks, which the next collective call detects, or the comparison
/// after the generator is restored from its state. A `Draw` is never compared: it is for programs that number their draws
/// themselves.
///
/// ```
/// use isoshard::{comm::spmd, dtensor::{DTensor, DeviceMesh}, placement::Layout, rng::Generator, tensor::DType};
/// let seeds = |f: fn(usize) -> u64| spmd(3, move |rank| {
///     let mesh = DeviceMesh::new(&rank, &[("dp", 3)])?;
///     let mut generator = Generator::new(f(rank.rank()));
///     DTensor::rand(&mesh, DType::F32, [5], Layout::replicated(1), &mut generator)?.local().to_vec::<f32>()
/// });
/// assert!(seeds(|_| 7).is_ok());
/// let said = seeds(|rank| 7 + rank as u64 / 2).unwrap_err().to_string();
/// assert!(said.ends_with(
///     "rand: ranks must draw from equal generators; got seed 7 draw 0 on rank(s) 0, 1 and seed 8 draw 0 on \
///      rank(s) 2; seed them alike"
/// ));
/// ```
pub trait IntoDraw {
    /// Returns the draw for the operator `verb` on this mesh.
    ///
    /// ```
    /// use isoshard::{comm::spmd, dtensor::{DeviceMesh, IntoDraw}, rng::Generator};
    /// spmd(2, |rank| {
    ///     let mesh = DeviceMesh::new(&rank, &[("dp", 2)])?;
    ///     let mut generator = Generator::new(7);
    ///     let draw = (&mut generator).into_draw("noise", &mesh)?;
    ///     assert_eq!((draw.seed, draw.number, generator.draws()), (7, 0, 1));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), isoshard::Error>(())
    /// ```
    ///
    /// # Errors
    /// Refuses generators that differ between ranks: the text, equal on all ranks, lists seeds and numbers of draws, and no
    /// generator counts a draw. Returns an error if communication fails.
    fn into_draw(self, verb: &str, mesh: &DeviceMesh) -> Result<Draw>;
}

impl IntoDraw for Draw {
    fn into_draw(self, _: &str, _: &DeviceMesh) -> Result<Draw> {
        Ok(self)
    }
}

impl IntoDraw for &mut Generator {
    fn into_draw(self, verb: &str, mesh: &DeviceMesh) -> Result<Draw> {
        if !self.is_compared(mesh.id()) {
            compare(verb, mesh, self.state())?;
            self.remember_compared(mesh.id());
        }
        Ok(self.next_draw())
    }
}

/// Refuses generators whose states differ between ranks.
fn compare(verb: &str, mesh: &DeviceMesh, mine: GeneratorState) -> Result<()> {
    let group = mesh.all_ranks()?;
    if group.len() == 1 {
        return Ok(());
    }
    let all = gather_words(&group, mesh.device(), vec![mine.seed as i64, mine.draws as i64])?;
    let state = |words: &Vec<i64>| GeneratorState { seed: words[0] as u64, draws: words[1] as u64 };
    let seen = group_by_value(group.ranks().iter().copied().zip(all.iter().map(state)));
    if seen.len() == 1 {
        return Ok(());
    }
    let rule = "ranks must draw from equal generators";
    Err(Error::invalid(verb, rule, states(&seen), "seed them alike"))
}

fn states(seen: &[(GeneratorState, Vec<usize>)]) -> String {
    list_values(seen, "other states", |state| format!("seed {} draw {}", state.seed, state.draws))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::spmd;

    #[test]
    fn long_lists_are_cut() {
        let state = |seed| GeneratorState { seed, draws: 3 };
        let text = states(&[(state(1), (0..10).collect()), (state(2), vec![11])]);
        assert_eq!(
            text,
            "seed 1 draw 3 on rank(s) 0, 1, 2, 3, 4, 5, 6, 7 and 2 more and seed 2 draw 3 on rank(s) 11"
        );
        let each: Vec<_> = (0..20).map(|r| (state(r as u64), vec![r])).collect();
        assert!(states(&each).ends_with("seed 7 draw 3 on rank(s) 7 and 12 other states"));
    }

    #[test]
    fn one_comparison_for_each_generator_and_mesh() {
        let run = |rank: crate::comm::Rank| {
            let mesh = DeviceMesh::new(&rank, &[("a", 2)])?;
            let mut g = Generator::new(5);
            g.into_draw("first", &mesh)?;
            // Later draws are not compared: a generator that diverges is not noticed.
            let drawn = |mut g: Generator, mesh: &DeviceMesh| g.into_draw("later", mesh).map(|d| d.number);
            g.next_draw();
            if rank.rank() == 1 {
                g.next_draw();
            }
            assert_eq!(drawn(g.clone(), &mesh)?, 2 + rank.rank() as u64);
            // A restored generator, a child, and a draw on another mesh are compared again.
            let said = drawn(Generator::from_state(g.state()), &mesh).unwrap_err().to_string();
            let tail = "ranks must draw from equal generators; got seed 5 draw 2 on rank(s) 0 and seed 5 draw 3 on \
                        rank(s) 1; seed them alike";
            assert_eq!(said, format!("later: {tail}"));
            assert_eq!(drawn(g.child("a"), &mesh)?, 0);
            assert!(drawn(g.child(&format!("{}", rank.rank())), &mesh).is_err());
            assert!(drawn(g.clone(), &DeviceMesh::new(&rank, &[("b", 2)])?).is_err());
            assert_eq!(
                (&mut g).into_draw("later", &mesh)?.number,
                2 + rank.rank() as u64,
                "refusals do not count"
            );
            Ok(())
        };
        spmd(2, run).unwrap_or_else(|e| panic!("{e}"));
    }
}
