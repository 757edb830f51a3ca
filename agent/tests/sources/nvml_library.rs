//! NVML through a real shared library that answers, lies, sleeps, blocks, crashes or lacks functions, in the real child process.
//! State D (a process that even SIGKILL does not end) cannot be made without a driver that hangs: not tested here.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use agent::sources::clock::monotonic_ms;
use agent::sources::procs::ProcRoot;
use agent::sources::{NvmlSource, ProbeCommand, VisibleGpus};
use vitals::observation::{GpuObs, XidObs};
use vitals::xid::Remedy;

use crate::http::eventually_async;

/// The fake's ways to answer at first and then never again.
const HANGS: [&str; 3] = ["block", "sleep", "spin"];
const TRIES: u32 = 3;

struct Library {
    directory: tempfile::TempDir,
    started: Instant,
    command: ProbeCommand,
}

impl Library {
    /// Compiles the fake with these definitions; the child will find it in this mode.
    fn new(mode: &str, definitions: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sources/fake_nvml.c");
        let library = directory.path().join("libnvidia-ml.so.1");
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .arg(&library)
            .args(definitions)
            .arg(&source)
            .status();
        assert!(compiled.unwrap().success(), "cc compiles the fake library");
        std::os::unix::fs::symlink(&library, directory.path().join("libnvidia-ml.so")).unwrap();
        let env = |name: &str, value: &Path| (name.to_owned(), value.to_str().unwrap().to_owned());
        let command = ProbeCommand {
            program: env!("CARGO_BIN_EXE_truebeat-agent").to_owned(),
            envs: vec![
                env("LD_LIBRARY_PATH", directory.path()),
                env("FAKE_NVML", Path::new(mode)),
                env("FAKE_NVML_LOG", &directory.path().join("calls")),
            ],
            first_line: Duration::from_secs(20),
            // nobody is to be killed but who hangs
            line: Duration::from_secs(if HANGS.contains(&mode) { 2 } else { 20 }),
            pause: Duration::from_secs(600),
            ..ProbeCommand::default()
        };
        Self { directory, started: Instant::now(), command }
    }

    fn spawn(&self) -> NvmlSource {
        NvmlSource::spawn(self.command.clone())
    }

    fn calls(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.log()).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn starts(&self) -> usize {
        self.calls().iter().filter(|call| *call == "nvmlInit_v2").count()
    }

    fn log(&self) -> PathBuf {
        self.directory.path().join("calls")
    }

    /// Our children that run the probe over this library.
    fn children(&self) -> usize {
        let me = i32::try_from(std::process::id()).unwrap();
        let mine = |pid: i32| {
            let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            String::from_utf8_lossy(&environ).contains(self.directory.path().to_str().unwrap())
        };
        let all = ProcRoot::live().all();
        all.into_iter().filter(|stat| stat.ppid == me && !stat.ended() && mine(stat.pid)).count()
    }
}

async fn first_readings(source: &NvmlSource) -> Vec<GpuObs> {
    eventually_async("a reading", async || source.latest().value.filter(|gpus| gpus[0].uuid != "unknown")).await
}

#[tokio::test]
async fn it_answers_once_a_second_by_cheap_calls_alone() {
    let library = Library::new("answer", &[]);
    let source = library.spawn();
    let gpus = first_readings(&source).await;
    let told = (gpus.len(), gpus[0].util, gpus[0].memory_util, gpus[0].power_watts, gpus[0].power_limit_watts);
    assert_eq!((told, gpus[0].sm_clock_mhz), ((2, 97, 2, Some(142.0), Some(600.0)), Some(1980)));
    assert_eq!(gpus[0].pci.as_deref(), Some("00000000:44:00.0"));
    let began = Instant::now();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let calls = library.calls();
    let counts = calls.iter().filter(|call| *call == "nvmlDeviceGetCount_v2").count();
    // one before we began, one by whoever listens for Xids, and none that a slow machine could squeeze in twice a second
    assert!((3..=began.elapsed().as_secs() as usize + 3).contains(&counts), "{counts} readings");
    let names: BTreeSet<&str> = calls.iter().map(String::as_str).collect();
    let cheap = BTreeSet::from([
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceRegisterEvents",
        "nvmlEventSetCreate",
        "nvmlEventSetWait_v2",
        "nvmlInit_v2",
    ]);
    assert_eq!(names, cheap);
    eventually_async("nobody is silent", async || all_speak(&source).then_some(())).await;
    drop(source);
    eventually_async("the child ends with its source", async || (library.children() == 0).then_some(())).await;
}

#[tokio::test]
async fn d07_what_no_card_can_have_is_unknown() {
    let library = Library::new("lie", &[]);
    let gpus = first_readings(&library.spawn()).await;
    assert_eq!(gpus.len(), 63, "four billion cards are 64, and the one at 255 % is not believed");
    assert_eq!((gpus[0].uuid.as_str(), gpus[0].power_watts, gpus[0].sm_clock_mhz), ("GPU-[31m1", None, None));
    let library = Library::new("lost", &[]);
    let gpus = first_readings(&library.spawn()).await;
    assert_eq!((gpus.len(), gpus[0].uuid.as_str()), (1, "GPU-2"), "one lost card does not hide the other");
    for mode in ["not-supported", "no-watts"] {
        let gpus = first_readings(&Library::new(mode, &[]).spawn()).await;
        assert_eq!((gpus[0].power_watts, gpus[0].power_limit_watts), (None, Some(600.0)), "{mode}");
    }
}

#[tokio::test]
async fn d06_a_call_that_never_returns_is_said_within_two_seconds_and_its_child_is_killed() {
    for mode in HANGS {
        let mut tries = 1;
        while let Err(after) = said_within_two_seconds(mode).await {
            assert!(tries < TRIES, "{mode}: said after {after:?}, two seconds and a busy machine, {TRIES} times");
            tries += 1;
        }
    }
}

/// What hangs in this way is found silent. The error is after how long, where a busy machine can have been the reason.
async fn said_within_two_seconds(mode: &str) -> Result<(), Duration> {
    let library = Library::new(mode, &[]);
    let source = library.spawn();
    let last = first_readings(&source).await;
    let spoke = last.iter().all(|gpu| gpu.silent_since_ms.is_none());
    let heard = Instant::now();
    eventually_async("silence", async || {
        source.latest().value.filter(|gpus| gpus.iter().all(|gpu| gpu.silent_since_ms.is_some()))
    })
    .await;
    let after = heard.elapsed();
    assert!(after < Duration::from_secs(20), "{mode}: said after {after:?}");
    assert_eq!(source.latest().value.unwrap()[0].util, 97, "the last known readings stay");
    eventually_async("the child is gone", async || (library.children() == 0).then_some(())).await;
    assert!(source.note().contains("does not answer"), "{mode}: {}", source.note());
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(library.starts(), 1, "{mode}: the next child waits its pause");
    if spoke && after < Duration::from_millis(3_500) { Ok(()) } else { Err(after) }
}

#[tokio::test]
async fn d06_a_driver_that_hangs_while_it_is_loaded_is_silent_too() {
    let mut library = Library::new("block-init", &[]);
    library.command.first_line = Duration::from_secs(3);
    let source = library.spawn();
    let gpus = eventually_async("silence", async || source.latest().value).await;
    assert_eq!((gpus.len(), gpus[0].uuid.as_str(), gpus[0].silent_since_ms.is_some()), (1, "unknown", true));
    eventually_async("the child is gone", async || (library.children() == 0).then_some(())).await;
}

#[tokio::test]
async fn a_child_that_crashes_is_followed_by_another_after_a_growing_pause() {
    let mut library = Library::new("crash", &[]);
    library.command.pause = Duration::from_millis(50);
    library.command.pause_max = Duration::from_secs(1);
    let source = library.spawn();
    first_readings(&source).await;
    eventually_async("a second child", async || (library.starts() >= 2).then_some(())).await;
    // a child that never spoke: each pause is twice the one before
    let mut library = Library::new("chatter", &[]);
    library.command.pause = Duration::from_millis(400);
    library.command.pause_max = Duration::from_secs(600);
    let source = library.spawn();
    eventually_async("a note", async || source.note().contains("it said something else").then_some(())).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(library.starts() <= 3, "{} children in three seconds", library.starts());
}

#[tokio::test]
async fn a_library_without_functions_and_one_without_a_driver() {
    let library = Library::new("answer", &["-DWITHOUT_POWER"]);
    let gpus = first_readings(&library.spawn()).await;
    assert_eq!((gpus[0].power_watts, gpus[0].util), (None, 97), "the rest is told all the same");
    let library = Library::new("no-driver", &[]);
    let source = library.spawn();
    eventually_async("absence", async || source.note().contains("NVML absent").then_some(())).await;
    assert_eq!(source.latest().value, None);
}

const NONE_READ: &str = "NVML answers for 0 GPUs; 2 more do not tell their use";

#[tokio::test]
async fn fault_f1_gpus_that_do_not_tell_their_use_have_xids_all_the_same() {
    for (mode, definitions) in [("mig", vec![]), ("xid", vec!["-DWITHOUT_UTILIZATION"])] {
        let library = Library::new(mode, &definitions);
        let source = library.spawn();
        assert_eq!(told(&first_xids(&source).await), [("GPU-1", 79)], "{mode}");
        eventually_async("a note", async || (source.note() == NONE_READ).then_some(())).await;
        assert_eq!(source.latest().value, Some(Vec::new()), "{mode}: nothing is known of their use");
        assert_eq!(library.starts(), 1, "{mode}: it is the same child");
    }
}

#[tokio::test]
async fn a_neighbours_xid_is_known_as_such_although_its_gpu_does_not_tell_its_use() {
    let library = Library::new("mig-first", &[]);
    let source = library.spawn();
    assert_eq!((first_readings(&source).await.len(), told(&first_xids(&source).await)), (1, vec![("GPU-1", 79)]));
    for (own, xids_of_its_own) in [("GPU-2", 0), ("GPU-1", 1), ("1", 1)] {
        let environ = format!("CUDA_VISIBLE_DEVICES={own}");
        source.set_visible(VisibleGpus::of_environ(environ.as_bytes(), true));
        assert_eq!(xids(&source).len(), xids_of_its_own, "{own}: CUDA counts otherwise where a GPU is cut into parts");
    }
}

#[tokio::test]
async fn a_neighbours_gpu_and_its_xids_are_not_the_engines() {
    let library = Library::new("xid", &[]);
    let source = library.spawn();
    assert_eq!((first_readings(&source).await.len(), told(&first_xids(&source).await)), (2, vec![("GPU-1", 79)]));
    source.set_visible(VisibleGpus::of_environ(b"HOME=/root\0CUDA_VISIBLE_DEVICES=1\0", true));
    let own = source.latest().value.unwrap();
    assert_eq!(own.iter().map(|gpu| gpu.uuid.as_str()).collect::<Vec<_>>(), ["GPU-2"]);
    assert_eq!(told(&xids(&source)), []);
    source.set_visible(None);
    assert_eq!((source.latest().value.unwrap().len(), xids(&source).len()), (2, 1));
}

fn xids(source: &NvmlSource) -> Vec<XidObs> {
    let mut seen = Vec::new();
    source.renew_xids(&mut seen);
    seen
}

async fn first_xids(source: &NvmlSource) -> Vec<XidObs> {
    eventually_async("a Xid", async || Some(xids(source)).filter(|xids| !xids.is_empty())).await
}

fn told(xids: &[XidObs]) -> Vec<(&str, u32)> {
    xids.iter().map(|xid| (xid.uuid.as_str(), xid.code)).collect()
}

#[tokio::test]
async fn fault_f1_a_xid_is_told_with_its_gpu_and_the_drivers_own_word() {
    let library = Library::new("xid", &[]);
    let source = library.spawn();
    let xids = first_xids(&source).await;
    assert_eq!((told(&xids), xids[0].remedy), (vec![("GPU-1", 79)], None));
    let age_ms = monotonic_ms().saturating_sub(xids[0].at_ms);
    assert!(age_ms < 10_000, "told when it was: {age_ms} ms ago");
    let library = Library::new("xid-154", &[]);
    let xids = first_xids(&library.spawn()).await;
    assert_eq!((told(&xids), xids[0].remedy), (vec![("GPU-1", 154)], Some(Remedy::RestartNode)));
}

#[tokio::test]
async fn fault_f1_a_gpu_that_falls_off_the_bus_is_named_although_nothing_tells_of_it_any_more() {
    let library = Library::new("xid-lost", &[]);
    let source = library.spawn();
    assert_eq!(told(&first_xids(&source).await), [("GPU-1", 79)]);
    let left = eventually_async("the other card", async || source.latest().value.filter(|gpus| gpus.len() == 1)).await;
    assert_eq!((left[0].uuid.as_str(), told(&xids(&source))), ("GPU-2", vec![("GPU-1", 79)]));
    // the driver answers nothing at all any more: the child ends, and what it said stays
    let library = Library::new("xid-all-lost", &[]);
    let source = library.spawn();
    eventually_async("the child's end", async || source.note().contains("closed its output").then_some(())).await;
    assert_eq!(told(&first_xids(&source).await), [("GPU-1", 79)]);
}

#[tokio::test]
async fn fault_f1_events_that_never_come_or_never_end_cost_nothing_but_themselves() {
    for (mode, definitions) in [
        ("xid-unsupported", vec![]),
        ("xid-crowded", vec![]),
        ("xid-block-register", vec![]),
        ("answer", vec!["-DWITHOUT_EVENTS"]),
    ] {
        let library = Library::new(mode, &definitions);
        let source = library.spawn();
        first_readings(&source).await;
        goes_on(&source, &library, mode).await;
        assert!(xids(&source).is_empty(), "{mode}");
    }
    // one GPU's wait never returns: the other's Xids come all the same
    let library = Library::new("xid-block", &[]);
    let source = library.spawn();
    assert_eq!(told(&first_xids(&source).await), [("GPU-1", 79)]);
    goes_on(&source, &library, "xid-block").await;
}

#[tokio::test]
async fn fault_f1_a_gpu_whose_wait_fails_once_is_listened_to_anew() {
    let library = Library::new("xid-fails", &[]);
    let source = library.spawn();
    assert_eq!(told(&first_xids(&source).await), [("GPU-1", 79)]);
    assert_eq!(library.starts(), 1, "by the same child");
}

#[tokio::test]
async fn fault_f1_a_driver_that_floods_and_lies_is_believed_in_what_can_be() {
    let library = Library::new("xid-lie", &[]);
    let source = library.spawn();
    let codes: BTreeSet<u32> = first_xids(&source).await.iter().map(|xid| xid.code).collect();
    goes_on(&source, &library, "xid-lie").await;
    let names: BTreeSet<String> = xids(&source).into_iter().map(|xid| xid.uuid).collect();
    assert_eq!((codes, names), (BTreeSet::from([31]), BTreeSet::from(["GPU-1".to_owned(), "GPU-2".to_owned()])));
    let readings = library.calls().iter().filter(|call| *call == "nvmlDeviceGetCount_v2").count();
    let child_s = library.started.elapsed().as_secs() as usize;
    // the first at once, and one by whoever listens for Xids
    assert!(readings <= child_s + 2, "{readings} readings in {child_s} s: a flood brings none forward");
}

fn all_speak(source: &NvmlSource) -> bool {
    source.latest().value.is_some_and(|gpus| gpus.iter().all(|gpu| gpu.silent_since_ms.is_none()))
}

/// The readings go on, from the child that was first.
async fn goes_on(source: &NvmlSource, library: &Library, mode: &str) {
    let before_ms = source.latest().at_ms;
    eventually_async("more readings, and nobody is silent", async || {
        (source.latest().at_ms > before_ms + 2_000 && all_speak(source)).then_some(())
    })
    .await;
    assert_eq!(library.starts(), 1, "{mode}: it is the same child");
}
