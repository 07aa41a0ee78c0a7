//! Parsing Slurm's lists of nodes.

/// Returns the first node of a list: `gpu03` for `gpu[03-07,12],login1`.
pub(super) fn first_host(list: &str) -> Option<String> {
    let list = list.trim();
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let Some(inside) = rest.strip_prefix('[') else {
        return (!name.is_empty()).then(|| name.to_string());
    };
    let (numbers, after) = inside.split_once(']')?;
    let first = numbers.split(['-', ',']).next().filter(|n| !n.is_empty())?;
    // The text between the bracket and the next comma belongs to the name: `rack[1-2]node[3-4]`.
    let after = match after.split(',').next() {
        None | Some("") => String::new(),
        Some(tail) if tail.contains('[') => first_host(after)?,
        Some(tail) => tail.to_string(),
    };
    Some(format!("{name}{first}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_every_form() {
        for (list, first) in [
            ("node1", Some("node1")),
            ("node1,node2", Some("node1")),
            ("gpu[03-07,12],login1", Some("gpu03")),
            ("gpu[3,5]", Some("gpu3")),
            ("rack[1-2]node[3-4],x", Some("rack1node3")),
            ("a[1-2]-ib,b", Some("a1-ib")),
            ("gpu-a.site.org", Some("gpu-a.site.org")),
            ("", None),
            ("a[", None),
            ("a[]", None),
        ] {
            assert_eq!(first_host(list).as_deref(), first, "{list}");
        }
    }
}
