//! A warning for builds that compile this crate without optimisation: Cargo applies no profile of a dependency.

use std::ffi::OsStr;
use std::sync::Once;

/// The environment variable that silences the warning, if set to anything but `0` or the empty string.
const SILENCE: &str = "ISOSHARD_NO_BUILD_WARNING";

/// Prints a warning to stderr, once per process, if this crate was compiled without optimisation.
pub(in crate::dtensor) fn warn_once() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Some(text) = warning(cfg!(unoptimised), std::env::var_os(SILENCE).as_deref()) {
            eprintln!("{text}");
        }
    });
}

/// Returns the warning, given whether the build is unoptimised and the value of [`SILENCE`].
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
