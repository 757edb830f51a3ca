//! The same over real processes and real signals.

use agent::sources::clock::monotonic_ms;
use agent::sources::proc::ProcSource;
use agent::sources::{EngineProcess, process_tree};
use nix::sys::signal::Signal;

use crate::fixture::{Session, eventually};

const SPIN: &str = "while :; do :; done & echo $! >/dev/null; wait";

fn source_of(session: &Session) -> (ProcSource, EngineProcess) {
    let engine = EngineProcess::of(session.pid()).unwrap();
    let mut source = ProcSource::live();
    source.set_engine(Some(engine.clone()));
    (source, engine)
}

#[test]
fn a_spinning_child_is_found_counted_and_taken_for_the_one_that_steps() {
    let session = Session::sh(SPIN);
    let (mut source, engine) = source_of(&session);
    let tree = eventually("the child is there", || Some(process_tree(&engine)).filter(|tree| tree.len() == 2));
    assert_eq!(tree[0], session.pid());
    source.set_members(tree);
    let first = source.look(monotonic_ms(), None).unwrap();
    assert!(first.alive && !first.traced);
    assert!(first.started_ms <= monotonic_ms() + 20);
    eventually("it burns and is seen in state R", || {
        let now = source.look(monotonic_ms(), None).unwrap();
        (now.cpu_ms >= first.cpu_ms + 100 && now.state == Some('R')).then_some(())
    });
}

#[test]
fn a_stopped_process_is_alive_in_state_t() {
    let session = Session::sh("sleep 1000; :");
    let (mut source, _) = source_of(&session);
    session.signal(Signal::SIGSTOP);
    let stopped = eventually("it stops", || source.look(monotonic_ms(), None).filter(|seen| seen.state == Some('T')));
    assert!(stopped.alive);
}

#[test]
fn a_killed_root_is_dead_as_a_zombie_and_after_and_its_orphans_are_still_in_the_tree() {
    let mut session = Session::sh("sleep 1000 & sleep 1000 & wait");
    let (mut source, engine) = source_of(&session);
    eventually("both children are there", || (process_tree(&engine).len() == 3).then_some(()));
    session.kill_leader();
    eventually("the zombie is not alive", || source.look(monotonic_ms(), None).filter(|seen| !seen.alive));
    assert_eq!(process_tree(&engine).len(), 2);
    session.reap();
    assert!(!source.look(monotonic_ms(), None).unwrap().alive);
    let orphans = process_tree(&engine);
    assert_eq!(orphans.len(), 2, "children that outlived their parent are found by session");
    for pid in orphans {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    }
    eventually("nothing is left", || process_tree(&engine).is_empty().then_some(()));
}
