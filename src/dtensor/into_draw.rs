//! Where generators meet a mesh.

use super::device_mesh::DeviceMesh;
use super::rank_reports::{gather_words, group_by_value, list_values};
use crate::error::{Error, Result};
use crate::rng::{Draw, Generator, GeneratorState};

/// Where a random operator's numbers come from: a `&mut Generator`, whose next draw is taken, or a [`Draw`], taken as
/// it is.
///
/// A generator is compared over all ranks of a mesh when it first draws there: one all-gather of 16 bytes a rank,
/// under the engine's deadline (not counted in [`DeviceMesh::received_bytes`]; none on a single rank). Later draws of
/// this generator and of its clones communicate nothing. They can still go apart, if ranks draw different numbers of
/// times; that is a program whose ranks make different calls, and it is met as such at the next collective, or when
/// the generator is restored from its state, which is compared again. A `Draw` is never compared: it is for programs
/// that name their numbers themselves.
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
///     "uniform: ranks must draw from equal generators; got seed 7 draw 0 on rank(s) 0, 1 and seed 8 draw 0 on \
///      rank(s) 2; seed them alike"
/// ));
/// ```
pub trait IntoDraw {
    /// The numbers of the operator `verb` on this mesh.
    ///
    /// # Errors
    /// Names, on every rank alike, the ranks whose generators differ, with seeds and numbers of draws; no generator has
    /// counted then. A fault of communication.
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

fn compare(verb: &str, mesh: &DeviceMesh, mine: GeneratorState) -> Result<()> {
    let everyone = mesh.all_ranks()?;
    if everyone.len() == 1 {
        return Ok(());
    }
    let all = gather_words(&everyone, mesh.device(), vec![mine.seed as i64, mine.draws as i64])?;
    let state = |words: &Vec<i64>| GeneratorState { seed: words[0] as u64, draws: words[1] as u64 };
    let seen = group_by_value(everyone.ranks().iter().copied().zip(all.iter().map(state)));
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
            // From here on a rank that differs is not noticed: nothing is compared.
            let drawn = |mut g: Generator, mesh: &DeviceMesh| g.into_draw("later", mesh).map(|d| d.number);
            g.next_draw();
            if rank.rank() == 1 {
                g.next_draw();
            }
            assert_eq!(drawn(g.clone(), &mesh)?, 2 + rank.rank() as u64);
            // What is restored, a child, and another mesh are compared anew.
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
