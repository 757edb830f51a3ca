//! A launcher whose disk hangs.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use agent::launch::{LaunchConfig, Launcher};
use agent::sources::procs::ProcRoot;
use agent::supervisor::registry::Registry;
use nix::sys::stat::Mode;

/// Far longer than two starts are tried.
const HANGS_FOR: Duration = Duration::from_secs(15);

#[tokio::test]
async fn d10_a_disk_that_hangs_holds_no_runtime_and_no_end() {
    let dir = tempfile::tempdir().unwrap();
    // whoever opens it to write waits until somebody reads, as on a disk that hangs
    let hangs = dir.path().join("engine.tmp");
    nix::unistd::mkfifo(&hangs, Mode::S_IRWXU).unwrap();
    let (release, held) = channel::<()>();
    let reader = std::thread::spawn(move || {
        let _ = held.recv_timeout(HANGS_FOR);
        std::fs::File::open(&hangs)
    });
    let launcher = Launcher::new(LaunchConfig {
        command: vec!["sleep".into(), "600.75".into()],
        exe: env!("CARGO_BIN_EXE_truebeat-agent").into(),
        agent_dir: dir.path().to_owned(),
        page_dir: dir.path().join("pages"),
        log_path: dir.path().join("engine.log"),
        grace: Duration::from_secs(1),
        narrate: false,
    })
    .unwrap();
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let registry = Registry::default();
    let begun = Instant::now();
    let two_tries = async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        stop.send_replace(true);
    };
    tokio::join!(launcher.run(&registry, stopped), two_tries);
    let took = begun.elapsed();
    release.send(()).ok();
    assert!(took < HANGS_FOR, "held for {took:?}");
    let sleeps = |pid: i32| std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.ends_with(b"600.75\0"));
    let left: Vec<i32> = ProcRoot::live().all().iter().map(|stat| stat.pid).filter(|pid| sleeps(*pid)).collect();
    assert!(left.is_empty(), "{left:?}");
    drop(reader.join());
}
