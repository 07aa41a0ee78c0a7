//! A word to those whose build leaves this crate unoptimised: Cargo takes no profile from a dependency.

use std::ffi::OsStr;
use std::sync::Once;

/// Set to anything but `0` or nothing, it silences the word.
const SILENCE: &str = "ISOSHARD_NO_BUILD_WARNING";

/// Says once per process, on stderr, that this crate was compiled without optimisation, if it was.
pub(super) fn warn_once() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Some(text) = warning(cfg!(unoptimised), std::env::var_os(SILENCE).as_deref()) {
            eprintln!("{text}");
        }
    });
}

/// The warning that is due, given whether the build is unoptimised and the variable that silences it.
fn warning(unoptimised: bool, silence: Option<&OsStr>) -> Option<String> {
    let silent = silence.is_some_and(|value| !value.is_empty() && value != "0");
    (unoptimised && !silent).then(|| {
        format!(
            "isoshard: compiled without optimisation, which is tens of times slower; add two lines to your Cargo.toml: \
             `[profile.dev.package.isoshard]` and `opt-level = 3` ({SILENCE}=1 silences this)"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_one_line_with_both_lines_to_add_unless_silenced() {
        let text = warning(true, None).expect("it is due");
        assert!(
            text.contains("`[profile.dev.package.isoshard]`") && text.contains("`opt-level = 3`"),
            "{text}"
        );
        assert!(text.contains(SILENCE) && text.lines().count() == 1, "{text}");
        assert_eq!(warning(false, None), None, "an optimised build is silent");
        for (value, silent) in [("1", true), ("yes", true), ("0", false), ("", false)] {
            assert_eq!(warning(true, Some(OsStr::new(value))).is_none(), silent, "{value:?}");
        }
    }
}
