//! The fuzz targets of the agent's sources without a fuzzer, on their committed corpus and near it.

#[path = "../../fuzz/src/near.rs"]
mod near;
#[path = "../../fuzz/src/lib.rs"]
mod targets;

#[test]
fn no_target_breaks_its_promise_on_its_corpus_or_near_it() {
    near::hold(&targets::TARGETS);
}

#[test]
fn the_canary_must_fail() {
    let found = (1..200).find_map(|seed| near::run("canary", targets::canary, seed).1);
    assert!(found.is_some_and(|input| input.starts_with(&[0xde, 0xad])), "this fuzzer finds nothing");
}
