//! Collective calls: their description, their numbering per group, and the rule by which two members' calls fit
//! together.

mod bounded;
mod busy_work;
mod call;
mod group_name;
mod lineage;
mod operator;
mod origin;
mod route;
mod sequence;
mod shape_list;
mod signature;
mod span;

pub(crate) use crate::module_path::path_matches;
pub use crate::module_path::{ModulePath, ModuleScope, Phase};
pub(super) use bounded::at_most;
pub use busy_work::BusyWork;
pub use call::Call;
pub(super) use group_name::{NAME_BYTES, group_number, label};
pub use lineage::Lineage;
pub(crate) use operator::{current_operator, operator_scope, operator_scope_if_none};
pub(crate) use origin::{CallContext, CallOrigin};
pub use route::Route;
pub(super) use sequence::Sequence;
pub use shape_list::ShapeList;
pub(super) use signature::{CallSignature, ShapesView, SignatureView, Subject};
pub(super) use span::collective_span;
pub(crate) use span::spans_enabled;
