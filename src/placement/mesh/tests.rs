//! Meshes over any ranks: coordinates, slices, equality and refusals.

use super::*;

#[test]
fn any_ranks_in_any_order() {
    type Given<'a> = (&'a [(&'a str, usize)], &'a [usize], bool);
    let lists: [Given<'_>; 9] = [
        (&[("a", 2), ("b", 2)], &[2, 3, 4, 5], true),
        (&[("a", 2), ("b", 3)], &[1, 5, 9, 3, 7, 11], true),
        (&[("a", 2), ("b", 3)], &[1, 3, 5, 8, 10, 12], true),
        (&[("a", 3), ("b", 2)], &[1, 8, 3, 10, 5, 12], true),
        (&[("a", 3)], &[4, 2, 0], false),
        (&[("a", 1), ("b", 1)], &[7], true),
        (&[], &[3], true),
        (&[("a", 2), ("b", 1), ("c", 2)], &[6, 0, 9, 2], false),
        // These follow strides 3 and 2, but division by them does not recover the coordinates of rank 4.
        (&[("a", 2), ("b", 3)], &[0, 2, 4, 3, 5, 7], false),
    ];
    for (axes, ranks, regular) in lists {
        let mesh = Mesh::over(axes, ranks.iter().copied()).unwrap();
        assert_eq!((mesh.rank(), mesh.0.list.is_none()), (ranks[0], regular), "{ranks:?}");
        assert_eq!(mesh.ranks().collect::<Vec<_>>(), ranks);
        for r in 0..14 {
            let position = ranks.iter().position(|&other| other == r);
            assert_eq!(
                mesh.coords_of(r).map(|c| (mesh.position_of(&c), mesh.rank_at(&c))),
                position.map(|p| (p, r))
            );
            assert_eq!(
                (mesh.contains(r), mesh.seen_from(r).is_some()),
                (position.is_some(), position.is_some())
            );
        }
        for (&rank, a) in ranks.iter().flat_map(|r| (0..axes.len()).map(move |a| (r, a))) {
            let here = mesh.seen_from(rank).unwrap();
            let agrees = |r: &usize| {
                let c = mesh.coords_of(*r).unwrap();
                (0..axes.len()).all(|b| a == b || c[b] == here.coords()[b])
            };
            let slice = here.slice(&[a]);
            assert!(slice.ranks().eq(ranks.iter().copied().filter(agrees)), "{slice} of {ranks:?}");
            // Meshes compare by content, however they were created.
            let listed = Mesh::over(&[axes[a]], slice.ranks()).unwrap().seen_from(rank).unwrap();
            assert_eq!((&listed, listed.0.hash), (&slice, slice.0.hash), "{ranks:?}");
        }
    }
    let whole = Mesh::over(&[("dp", 2), ("tp", 3)], 0..6).unwrap();
    assert_eq!(whole.seen_from(4).unwrap(), Mesh::parse("dp=2,tp=3", 4).unwrap());
    assert!(whole.is_all_of(6) && !whole.is_all_of(7) && !whole.slice(&[1, 0]).is_all_of(6));
    assert!(whole.slice(&[1]).is_all_of(3) && !whole.slice(&[0]).is_all_of(2));
    assert!(Mesh::over(&[("a", 1), ("b", 2)], 0..2).unwrap().slice(&[1, 0]).is_all_of(2));
    assert_eq!(whole.with_ranks(), "(dp=2, tp=3) over {0, 1, 2, 3, 4, 5}");
}

#[test]
fn ranks_that_are_no_mesh() {
    let refused = |axes: &[(&str, usize)], ranks: &[usize], want: &str| {
        assert_eq!(Mesh::over(axes, ranks.iter().copied()).unwrap_err().to_string(), want);
    };
    refused(
        &[("a", 3)],
        &[4, 0, 4],
        "mesh: a rank is listed twice; got (a=3) over {4, 0, 4}; name rank 4 once",
    );
    let text = "mesh: the number of ranks differs from the product of the axis lengths; got (a=2, b=2) over {0, 1, 5}; \
                name 4, not 3";
    refused(&[("a", 2), ("b", 2)], &[0, 1, 5], text);
    let text = "mesh: the number of ranks differs from the product of the axis lengths; got (a=2) over {0, 1, 2, 3, 4, \
                5, 6, 7 and 2 more}; name 2, not 10";
    refused(&[("a", 2)], &(0..10).collect::<Vec<_>>(), text);
    refused(&[("a", 0)], &[], "mesh: an axis has no ranks; got (a=0) over {}; give a at least 1");
}

#[test]
fn ranks_and_coordinates_are_inverse() {
    for text in ["1", "a=1", "a=5", "a=2,b=2", "a=2,b=1,c=3", "a=1,b=2", "a=2,b=3,c=1,d=2"] {
        let mesh = Mesh::parse(text, 0).unwrap();
        let ranks: Vec<usize> = mesh.ranks().collect();
        assert_eq!(ranks, (0..mesh.rank_len()).collect::<Vec<_>>(), "{text}");
        for rank in ranks {
            let coords = mesh.coords_of(rank).unwrap();
            assert_eq!((mesh.rank_at(&coords), mesh.position_of(&coords)), (rank, rank), "{text}");
        }
        assert_eq!(mesh.coords_of(mesh.rank_len()), None);
    }
}

#[test]
fn slices_hold_the_ranks_that_agree_elsewhere() {
    let names = ["a", "b", "c", "d"];
    let lens = [2, 3, 1, 2];
    let axes: Vec<(&str, usize)> = names.into_iter().zip(lens).collect();
    for rank in 0..12 {
        let mesh = Mesh::new(&axes, rank).unwrap();
        for subset in 0..16usize {
            let kept: Vec<usize> = (0..4).filter(|a| subset >> a & 1 == 1).collect();
            let slice = mesh.slice(&kept);
            let agrees = |&r: &usize| {
                let coords = mesh.coords_of(r).unwrap();
                (0..4).all(|a| kept.contains(&a) || coords[a] == mesh.coords()[a])
            };
            let want: Vec<usize> = mesh.ranks().filter(agrees).collect();
            assert_eq!(slice.ranks().collect::<Vec<_>>(), want);
            assert_eq!((slice.rank(), slice.rank_at(slice.coords())), (rank, rank));
            for r in 0..14 {
                let coords = slice.coords_of(r);
                assert_eq!(coords.is_some(), want.contains(&r), "rank {r} of {slice} from {rank}");
                assert!(coords.is_none_or(|c| slice.rank_at(&c) == r));
                assert_eq!(slice.seen_from(r).map(|m| m.rank()), want.contains(&r).then_some(r));
            }
            let back: Vec<usize> = kept.iter().rev().copied().collect();
            let mut turned: Vec<usize> = mesh.slice(&back).ranks().collect();
            turned.sort_unstable();
            assert_eq!(turned, want);
        }
    }
}

#[test]
fn meshes_compare_by_content() {
    let mesh = Mesh::parse("dp=2,tp=2", 1).unwrap();
    assert_eq!(mesh, Mesh::parse(&mesh.to_string(), 1).unwrap());
    assert_ne!(mesh, Mesh::parse("dp=2,tp=2", 0).unwrap());
    assert_ne!(mesh, Mesh::parse("dp=2,pp=2", 1).unwrap());
    assert_ne!(mesh, Mesh::parse("tp=2,dp=2", 1).unwrap());
    assert_eq!(mesh.slice(&[0, 1]), mesh);
    assert_eq!(mesh.slice(&[0, 1]).slice(&[1]), mesh.slice(&[1]));
    let other = Mesh::parse("dp=2,tp=2", 3).unwrap();
    assert_ne!(mesh.slice(&[1]), other.slice(&[1]), "ranks 0, 1 and ranks 2, 3");
    assert_eq!(Mesh::parse("1", 0).unwrap(), Mesh::parse("()", 0).unwrap());
    assert_eq!(Mesh::parse(" ( dp = 2 ) ", 0).unwrap().to_string(), "(dp=2)");
}

#[test]
#[should_panic(expected = "slice: axes [0, 0] of (dp=2) repeat")]
fn a_slice_names_an_axis_once() {
    let _ = Mesh::parse("dp=2", 0).unwrap().slice(&[0, 0]);
}

#[test]
fn refusals() {
    let new = |axes: &[(&str, usize)], rank| Mesh::new(axes, rank).unwrap_err().to_string();
    let unread = |text: &str| Mesh::parse(text, 0).unwrap_err().to_string();
    assert_eq!(
        new(&[("dp", 0), ("tp", 2)], 0),
        "mesh: an axis has no ranks; got rank 0 of (dp=0, tp=2); give dp at least 1"
    );
    assert_eq!(
        new(&[("dp", 2), ("dp", 2)], 0),
        "mesh: two axes have one name; got rank 0 of (dp=2, dp=2); rename one dp"
    );
    assert_eq!(
        new(&[("", 2)], 0),
        "mesh: an axis name is not a word; got rank 0 of (=2); use letters, digits and _"
    );
    assert_eq!(new(&[("d:p", 2)], 0), new(&[("d p", 2)], 0).replace("d p", "d:p"));
    assert_eq!(
        new(&[("a", usize::MAX), ("b", 2)], 0),
        "mesh: the number of ranks overflows; got rank 0 of (a=18446744073709551615, b=2); use shorter axes"
    );
    assert_eq!(
        new(&[("dp", 2), ("tp", 2)], 4),
        "mesh: this rank is not in the mesh; got rank 4 of (dp=2, tp=2); its ranks are 0 to 3"
    );
    for text in ["", "4", "dp", "dp=", "dp=x", "dp=2,", "dp=2;tp=2", "dp=-1"] {
        let want = format!(
            "mesh: cannot be read; got {text:?}; write pairs axis=ranks such as dp=2,tp=4, or 1 for a single rank"
        );
        assert_eq!(unread(text), want);
    }
    let axis = |text: &str| Mesh::parse(text, 0).unwrap().axis("pp").unwrap_err().to_string();
    assert_eq!(axis("dp=2,tp=2"), "mesh: no such axis; got \"pp\" of (dp=2, tp=2); the axes are dp, tp");
    assert_eq!(axis("1"), "mesh: no such axis; got \"pp\" of (); it has no axes");
}
