//! The place of a member in its group.

/// A member's index in its group, and the number of members.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemberPlace {
    pub index: usize,
    pub members: usize,
}
