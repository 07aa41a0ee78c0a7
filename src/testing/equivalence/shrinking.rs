//! The steps by which a failing scenario shrinks.

use super::scenario::Scenario;
use crate::placement::{Layout, Placement};

/// Returns the size of a scenario, by which each step of shrinking makes it smaller. A layout that does not fit its
/// tensor is drawn anew, so a candidate need not be what runs.
pub(super) fn weight(scenario: &Scenario) -> (usize, usize, usize) {
    let placement = |placement: &Placement| match placement {
        Placement::Replicate => 0,
        Placement::Shard(0) => 1,
        Placement::Shard(_) | Placement::Partial(_) | Placement::RaggedShard { .. } => 2,
    };
    let layout = |layout: &Layout| {
        let placements = layout.placements();
        let is_nested = Layout::new(placements.to_vec()) != *layout;
        placements.iter().map(placement).sum::<usize>() + usize::from(is_nested)
    };
    let layouts = scenario.layouts.iter().map(|(_, of)| layout(of)).sum();
    let sizes = scenario.sizes.iter().fold(0usize, |sum, (_, size)| sum.saturating_add(*size));
    (scenario.rank_len(), layouts, sizes)
}

/// The scenarios that are one step smaller: fewer ranks, then plainer layouts, then smaller sizes.
pub(super) fn smaller(scenario: &Scenario, least_sizes: &[(String, usize)]) -> Vec<Scenario> {
    let mut found = Vec::new();
    for (a, &(_, len)) in scenario.axes.iter().enumerate() {
        for shorter in 1..len {
            let mut candidate = scenario.clone();
            candidate.axes[a].1 = shorter;
            if candidate.rank_len() > 1 {
                found.push(candidate);
            }
        }
    }
    found.sort_by_key(Scenario::rank_len);
    for (at, (_, layout)) in scenario.layouts.iter().enumerate() {
        let plain = |layout: Layout| {
            let mut candidate = scenario.clone();
            candidate.layouts[at].1 = layout;
            candidate
        };
        let placements = layout.placements();
        if placements.iter().any(|p| *p != Placement::Replicate) {
            found.push(plain(Layout::replicated(placements.len())));
        }
        for axis in 0..placements.len() {
            let mut with = |placement: Placement| {
                let mut all = placements.to_vec();
                all[axis] = placement;
                found.push(plain(Layout::new(all)));
            };
            match &placements[axis] {
                Placement::Replicate => {}
                Placement::Shard(0) => with(Placement::Replicate),
                Placement::Shard(_) | Placement::Partial(_) | Placement::RaggedShard { .. } => {
                    with(Placement::Replicate);
                    with(Placement::Shard(0));
                }
            }
        }
        let default_order = Layout::new(placements.to_vec());
        if default_order != *layout {
            found.push(plain(default_order));
        }
    }
    for (at, (name, size)) in scenario.sizes.iter().enumerate() {
        let least = least_sizes.iter().find(|(known, _)| known == name).map_or(*size, |(_, least)| *least);
        let mut steps = vec![least, least + (size - least) / 2, size.saturating_sub(1)];
        steps.dedup();
        for step in steps.into_iter().filter(|step| (least..*size).contains(step)) {
            let mut candidate = scenario.clone();
            candidate.sizes[at].1 = step;
            found.push(candidate);
        }
    }
    found.retain(|candidate| candidate != scenario);
    found
}
