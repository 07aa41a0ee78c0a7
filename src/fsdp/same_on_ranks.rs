//! The facts of a sharded model on which all ranks must agree.

use super::block_policy::BlockPolicy;
use super::sharding::Sharding;
use crate::dtensor::SameOnRanks;
use crate::nn::{ParamId, ParamPlacement, Params, PlacedUnit};
use crate::placement::Layout;

/// The units that an error lists.
const SHOWN: usize = 8;

/// Returns what all ranks must agree on. Ranks that cut a parameter at other places would take other elements for it: to
/// place a replicated parameter is to slice it, which communicates nothing.
pub(super) fn same_on_ranks(
    params: &Params,
    sharding: &Sharding,
    blocks: &BlockPolicy,
    placed: &[PlacedUnit],
) -> [SameOnRanks; 4] {
    let declared = |id| {
        let (value, used) = (params.value(id), params.used_layout(id));
        (params.path(id), value.dtype(), value.shape(), value.layout(), used, params.is_frozen(id))
    };
    let declared: Vec<_> = params.ids().map(declared).collect();
    let count = format!("{} parameter(s) computed in {}", declared.len(), params.compute_dtype());
    let unit = |unit: &PlacedUnit| {
        let members: Vec<&str> = unit.members.iter().map(|(id, _)| params.path(*id)).collect();
        (unit.name.clone(), members, unit.stays_gathered, unit.reduced_in)
    };
    let units: Vec<_> = placed.iter().map(unit).collect();
    let layouts: Vec<_> = placed.iter().flat_map(|unit| unit.members.iter().map(layouts)).collect();
    let padding: Vec<usize> = placed.iter().map(|unit| unit.padding).collect();
    let cuts = (layouts, padding);
    [
        SameOnRanks::new("ranks have different parameters", (declared, params.compute_dtype()), count),
        SameOnRanks::new("ranks shard in different ways", sharding, format!("{sharding:?}")),
        SameOnRanks::new("ranks have different units", units, names(placed)),
        SameOnRanks::new("ranks cut parameters at different places", cuts, format!("{blocks:?}")),
    ]
}

/// Returns the layout in which a parameter is stored, and the other two if they differ from it.
fn layouts((_, at): &(ParamId, ParamPlacement)) -> (&Layout, [Option<&Layout>; 2]) {
    let others = [&at.gradient, &at.held].map(|layout| (*layout != at.stored).then_some(layout));
    (&at.stored, others)
}

fn names(placed: &[PlacedUnit]) -> String {
    let name = |unit: &PlacedUnit| match unit.name.is_empty() {
        true => "the root".to_string(),
        false => unit.name.clone(),
    };
    let names: Vec<String> = placed.iter().take(SHOWN).map(name).collect();
    let more = placed.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", names.join(", "))
}
