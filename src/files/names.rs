//! The names of files that stand beside a final name: `.model.<number>.unfinished` and others.

/// The end of the name of a file or folder that is being written.
pub(super) const UNFINISHED: &str = "unfinished";
/// The end of the name of a lock.
pub(super) const LOCK: &str = "lock";
/// The end of the name of a folder that is being removed.
pub(crate) const REMOVED: &str = "removed";
/// The end of the name of a folder that another one is about to replace.
pub(super) const REPLACED: &str = "replaced";

/// Returns the name of a file beside the final name `of`. Earlier versions wrote some without a number.
pub(super) fn hidden_name(of: &str, number: &str, kind: &str) -> String {
    if number.is_empty() { format!(".{of}.{kind}") } else { format!(".{of}.{number}.{kind}") }
}

/// Takes the name of a file beside a final name apart: the final name, the number in hexadecimal digits, and the kind.
pub(super) fn parts(name: &str) -> Option<(&str, &str, &'static str)> {
    let (rest, kind) = name.strip_prefix('.')?.rsplit_once('.')?;
    let kind = [LOCK, UNFINISHED, REMOVED, REPLACED].into_iter().find(|known| *known == kind)?;
    let is_number = |text: &str| text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
    match rest.rsplit_once('.') {
        Some((of, number)) if is_number(number) => Some((of, number, kind)),
        // A lock always has a number.
        _ if kind == LOCK => None,
        _ => Some((rest, "", kind)),
    }
}
