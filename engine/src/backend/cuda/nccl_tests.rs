//! The link of devices against a library that speaks NCCL's interface, made for this (`tests/cuda/fake_nccl.c`): compiles it, and loads it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::*;

const PATIENCE: Duration = Duration::from_secs(60);
/// The one stream that the fake knows.
const STREAM: *mut c_void = 0x57 as *mut c_void;

/// The fake, compiled for this test; it stays loaded.
fn fake(flags: &[&str]) -> Result<Nccl, DriverError> {
    let dir = tempfile::tempdir().unwrap();
    let (source, file) =
        (PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/cuda/fake_nccl.c"), dir.path().join("libnccl.so.2"));
    let mut compile = std::process::Command::new("cc");
    compile.args(["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread"]).args(flags);
    #[allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]
    let done = compile.arg(&source).arg("-o").arg(&file).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Nccl::load_from(&file)
}

fn until(mut done: impl FnMut() -> bool) {
    let since = Instant::now();
    while !done() {
        assert!(since.elapsed() < PATIENCE, "it never comes");
        std::thread::yield_now();
    }
}

#[test]
fn ranks_are_joined_when_all_have_come_and_bring_bytes_when_all_have_asked() {
    let nccl = fake(&[]).unwrap();
    let name = nccl.link_name().unwrap();
    let first = nccl.link(&name, 0, 2).unwrap();
    assert!(!first.is_linked().unwrap(), "rank 1 has not come");
    let second = nccl.link(&name, 1, 2).unwrap();
    until(|| first.is_linked().unwrap() && second.is_linked().unwrap());
    let (mine, theirs, mut all) = ([1u8, 2, 3], [4u8, 5, 6], [[0u8; 6]; 2]);
    let place = |bytes: &[u8]| Address(bytes.as_ptr() as u64);
    let to = all.each_mut().map(|all| Address(all.as_mut_ptr() as u64));
    // SAFETY: all of it outlives the two calls and what they begin, which is done below.
    unsafe {
        first.all_gather(place(&mine), to[0], 3, STREAM).unwrap();
        assert!(!first.is_linked().unwrap(), "it has begun when rank 1 asks too");
        second.all_gather(place(&theirs), to[1], 3, STREAM).unwrap();
    }
    until(|| first.is_linked().unwrap() && second.is_linked().unwrap());
    assert_eq!(all, [[1, 2, 3, 4, 5, 6]; 2]);
    second.part();
    until(|| first.is_linked().is_err());
    let error = first.is_linked().unwrap_err().to_string();
    assert_eq!(
        error,
        "a collective of NCCL: remote process exited or there was a network error (6): the fake says no more"
    );
}

#[test]
fn what_nccl_refuses_is_told_by_its_own_name() {
    let nccl = fake(&[]).unwrap();
    let error = nccl.link(&nccl.link_name().unwrap(), 2, 2).err().unwrap().to_string();
    assert_eq!(error, "ncclCommInitRankConfig: invalid argument (4)");
}

#[test]
fn a_library_that_is_too_old_or_none_is_not_taken() {
    let error = fake(&["-DVERSION=21701"]).err().unwrap().to_string();
    assert_eq!(error, "ncclGetVersion: 21701 is older than 21800");
    let error = Nccl::load_from(Path::new("/nonexistent/libnccl.so.2")).err().unwrap().to_string();
    assert!(error.starts_with("NCCL cannot be loaded: "), "{error}");
}
