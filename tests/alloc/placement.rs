//! Queries that the dispatcher makes once per operator do not allocate.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::hint::black_box;

use isoshard::placement::{Mesh, Spec};

fn calls(f: impl FnOnce()) -> usize {
    let before = crate::calls();
    f();
    crate::calls() - before
}

#[test]
fn questions_do_not_allocate() {
    let mesh = Mesh::parse("pp=2,dp=2,tp=2,cp=3", 13).unwrap();
    let text = "f32[8, 5, 7, 3, 4]@(pp:S0^1, dp:P(sum), tp:S0^0, cp:S2)";
    let nested = Spec::parse(text, &mesh).unwrap();
    let ragged = Spec::parse("f32[4, 6]@(pp:S1, dp:RS(0..1; 3,1), tp:R, cp:R)", &mesh).unwrap();
    for spec in [&nested, &ragged] {
        let used = calls(|| {
            let copy = black_box(spec.clone());
            let mut hasher = DefaultHasher::new();
            copy.hash(&mut hasher);
            assert!(black_box(hasher.finish()) > 0 && copy == *spec);
            copy.validate("test").unwrap();
            assert_eq!(copy.local_shape(), copy.region().local);
            assert!(copy.region().intersect(&spec.region()).len() == 1);
            let mut numel = 0;
            copy.region().runs(&spec.shape, |_, _, len| numel += len);
            assert_eq!(numel, copy.region().numel());
            black_box(spec.layout.set(1, isoshard::placement::short::shard(1)));
            assert!(mesh.coords_of(13).is_some());
        });
        assert_eq!(used, 0, "{spec}");
    }
}
