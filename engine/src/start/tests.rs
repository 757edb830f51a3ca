//! The cache as processes use it: one prepares, others wait and map; what is damaged is made anew; nothing stops a start.
#![allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]

use super::*;
use crate::backend::{Part, WeightShape};
use crate::weights::WeightType;

const SHAPE: WeightShape = WeightShape { rows: 1, cols: 32, kind: WeightType::Q8_0 };

fn options(dir: &Path, guards: bool) -> CacheOptions {
    let (stage, faults) = (Stage::default(), Faults::default());
    CacheOptions { dir: dir.to_owned(), stage, faults, guards, fleet: None }
}

/// Asks for the file as rank `rank` of 3; gives its weight, and how often it was prepared here.
fn ask(options: &CacheOptions, rank: usize) -> (Option<Vec<u8>>, usize) {
    let mut times = 0;
    let mut prepare = |writer: &mut PackWriter, watch: &mut dyn FnMut(u64, u64) -> bool| {
        times += 1;
        writer.add(("w", &Part::Whole), SHAPE, &[5; 64], &mut || true);
        if watch(1, 1) { Ok(()) } else { Err("another has the lease".to_owned()) }
    };
    let cache = Cache::new(options, "key".into(), (rank, 3));
    let file = cache.file(&mut prepare, &mut |_, _| ()).unwrap();
    (file.and_then(|file| Some(file.get("w", &Part::Whole, SHAPE)?.to_vec())), times)
}

#[test]
fn one_of_many_prepares_and_the_next_start_none() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path(), true);
    let answers: Vec<_> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                scope.spawn({
                    let options = &options;
                    move || ask(options, rank)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(answers.iter().all(|(bytes, _)| bytes.as_deref() == Some(&[5; 64])));
    assert_eq!(answers.iter().map(|(_, times)| times).sum::<usize>(), 1, "{answers:?}");
    assert_eq!(ask(&options, 0), (Some(vec![5; 64]), 0));
    assert!(!options.stage.is_compiling());
}

#[test]
fn a_file_of_other_bytes_is_made_anew_and_a_lease_of_the_dead_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path(), true);
    let path = Cache::new(&options, "key".into(), (1, 3)).path;
    std::fs::write(&path, "not a pack").unwrap();
    std::fs::write(path.with_extension("lease"), "not a lease").unwrap();
    assert_eq!(ask(&options, 1), (Some(vec![5; 64]), 1));
    // damage within a weight is seen where it is used: this start goes without it, the next makes it anew
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[70] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    assert_eq!(ask(&options, 1), (None, 0));
    assert_eq!(ask(&options, 1), (Some(vec![5; 64]), 1));
}

#[test]
fn an_owner_that_lives_and_says_nothing_loses_its_lease_and_finds_out() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path(), true);
    let lease = Lease::at(Cache::new(&options, "key".into(), (1, 3)).path.with_extension("lease"));
    let mut silent = lease.take(None).unwrap().unwrap();
    assert_eq!(ask(&options, 1), (Some(vec![5; 64]), 1));
    assert!(!silent.renew(1, 2));
}

#[test]
fn a_place_that_cannot_be_written_is_no_obstacle() {
    for dir in ["/dev/null/x", "/proc"] {
        let (bytes, _) = ask(&options(Path::new(dir), true), 1);
        assert_eq!(bytes, None);
    }
}
