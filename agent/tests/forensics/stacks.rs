//! Stacks of real processes: read from outside, also of a stopped one and without the right to; and told by the process itself (H10).

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use agent::forensics::{Captured, bundle, capture, python_threads};
use agent::sources::EngineProcess;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::not_run::without_right;
use super::{Running, request, unheard};

const SOON: Duration = Duration::from_secs(60);
/// Announces by the rules of H10 as a Python engine does, then hangs in a loop that never gives the interpreter away.
const ANNOUNCES: &str = r#"
import faulthandler, os, signal, sys
pages, ticks = sys.argv[1], open('/proc/self/stat').read().rsplit(') ', 1)[1].split(' ')[19]
name = f'{pages}/stacks-{os.getpid()}'
faulthandler.register(signal.SIGURG, file=open(name + '.txt', 'a'), all_threads=True, chain=False)
def hangs_in_vain():
    os.rename(name + '.part', name + '.ready')
    while True:
        pass
with open(name + '.part', 'w') as f:
    f.write(f'{ticks} faulthandler\n')
hangs_in_vain()
"#;

fn until(what: &str, mut wanted: impl FnMut() -> bool) {
    let since = Instant::now();
    while !wanted() {
        assert!(since.elapsed() < SOON, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn shows(pid: i32, function: &str) -> bool {
    python_threads(pid)
        .is_ok_and(|threads| threads.iter().any(|thread| thread.frames.iter().any(|frame| frame.function == function)))
}

#[test]
fn python_frames_are_read_without_stopping_the_process_and_of_a_stopped_one() {
    let script = "import time\ndef waits_in_vain():\n    time.sleep(1000)\nwaits_in_vain()\n";
    let python = Running::start("python3", &["-c", script]);
    until("its frames", || shows(python.pid(), "waits_in_vain"));
    kill(Pid::from_raw(python.pid()), Signal::SIGSTOP).unwrap();
    let state = || std::fs::read_to_string(format!("/proc/{}/stat", python.pid())).unwrap();
    until("it is stopped", || state().contains(") T "));
    assert!(shows(python.pid(), "waits_in_vain"), "{:?}", python_threads(python.pid()));
    assert!(state().contains(") T "), "nobody let it go on");
}

#[test]
fn a_process_that_is_no_python_has_no_python_stacks() {
    let sleeper = Running::start("sleep", &["1000"]);
    let error = python_threads(sleeper.pid()).unwrap_err();
    assert!(error.contains(&sleeper.pid().to_string()), "{error}");
}

#[test]
fn without_the_right_to_read_a_process_the_helper_says_which_right() {
    if !nix::unistd::geteuid().is_root() {
        return without_right("only root can become somebody without rights");
    }
    // a copy that anybody may execute, wherever the build lies
    let dir =
        tempfile::Builder::new().permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755)).tempdir().unwrap();
    let helper = dir.path().join("agent");
    std::fs::copy(env!("CARGO_BIN_EXE_truebeat-agent"), &helper).unwrap();
    let sleeper = Running::start("sleep", &["1000"]);
    let pid = sleeper.pid().to_string();
    let output = Command::new(&helper).args(["agent", "py-stacks", &pid]).uid(65_534).gid(65_534).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains(&format!("no right to read process {pid}")), "{said}");
    assert!(said.contains("CAP_SYS_PTRACE") && said.contains(&format!("proc/{pid}/threads.txt")), "{said}");
}

/// A capture of one process with this page directory, and what its bundle's entries are.
async fn captured(pages: &Path, pid: i32) -> (Captured, Vec<(String, String)>) {
    let bundles = tempfile::tempdir().unwrap();
    let mut request = request(bundles.path(), EngineProcess::of(pid));
    request.page_dir = pages.to_owned();
    let captured = capture(request, unheard).await;
    let contents = bundle::read(captured.bundle.as_ref().unwrap()).unwrap();
    (captured, contents.entries.into_iter().map(|entry| (entry.name, entry.text)).collect())
}

/// One whose process has told one dump to its end: held up in the middle of it by a busy machine, it seems to have ended, and its rest lies
/// before the next one.
async fn captured_whole(pages: &Path, pid: i32) -> (Captured, String) {
    let mut tries = 1;
    loop {
        let (captured, entries) = captured(pages, pid).await;
        let own = entries.into_iter().find(|(name, _)| *name == format!("stacks/own-{pid}.txt"));
        let text = own.map(|(_, text)| text).unwrap_or_default();
        let whole = text.matches("hangs_in_vain").count() == 1 && text.contains("in <module>");
        if whole || tries == 3 {
            assert!(!text.is_empty(), "{:?}", captured.notes);
            return (captured, text);
        }
        tries += 1;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_python_that_holds_its_interpreter_tells_its_stacks_and_they_make_the_fingerprint() {
    let pages = tempfile::tempdir().unwrap();
    let python = Running::start("python3", &["-c", ANNOUNCES, pages.path().to_str().unwrap()]);
    let marker = pages.path().join(format!("stacks-{}.ready", python.pid()));
    until("the marker", || marker.exists());
    let mut fingerprints = Vec::new();
    for _ in 0..2 {
        let (captured, text) = captured_whole(pages.path(), python.pid()).await;
        assert_eq!(text.matches("hangs_in_vain").count(), 1, "one dump, not those before it:\n{text}");
        let stands = format!("stands {}: hangs_in_vain (<string>)", python.pid());
        assert!(captured.summary.contains(&stands), "{}", captured.summary);
        fingerprints.push(captured.fingerprint);
    }
    assert_eq!(fingerprints[0], fingerprints[1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_is_signalled_for_anothers_marker_and_no_link_or_pipe_is_followed() {
    let pages = tempfile::tempdir().unwrap();
    let secret = pages.path().join("secret");
    std::fs::write(&secret, "zq7-told\nend of dump 1\n").unwrap();
    let sleeper = Running::start("sleep", &["1000"]);
    let (pid, name) = (sleeper.pid(), |ending: &str| pages.path().join(format!("stacks-{}.{ending}", sleeper.pid())));
    let ticks = EngineProcess::of(pid).unwrap().start_ticks;
    for (marker, note) in [
        (format!("{} native\n", ticks - 1), Some("not that process's")),
        (format!("{ticks} morse\n"), Some("a format that is not known: morse")),
        ("no marker at all".to_owned(), None),
        (format!("{ticks} native\n"), Some("announced its stacks and told none")),
    ] {
        std::fs::write(name("ready"), &marker).unwrap();
        // a link in the answer's place: never followed
        let _ = std::os::unix::fs::symlink(&secret, name("txt"));
        let (captured, entries) = captured(pages.path(), pid).await;
        let told = captured.notes.iter().any(|said| note.is_some_and(|note| said.contains(note)));
        assert_eq!(told, note.is_some(), "{marker}: {:?}", captured.notes);
        assert!(entries.iter().all(|(name, text)| !name.contains("own-") && !text.contains("zq7-told")));
    }
    std::fs::remove_file(name("ready")).unwrap();
    nix::unistd::mkfifo(&name("ready"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let (_, entries) = captured(pages.path(), pid).await;
    assert!(entries.iter().all(|(name, _)| !name.contains("own-")), "a pipe is not waited for");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_process_is_not_waited_for() {
    let pages = tempfile::tempdir().unwrap();
    let sleeper = Running::start("sleep", &["1000"]);
    let ticks = EngineProcess::of(sleeper.pid()).unwrap().start_ticks;
    std::fs::write(pages.path().join(format!("stacks-{}.ready", sleeper.pid())), format!("{ticks} native\n")).unwrap();
    kill(Pid::from_raw(sleeper.pid()), Signal::SIGSTOP).unwrap();
    until("it is stopped", || {
        std::fs::read_to_string(format!("/proc/{}/stat", sleeper.pid())).unwrap().contains(") T ")
    });
    let (captured, entries) = captured(pages.path(), sleeper.pid()).await;
    assert!(captured.notes.iter().any(|note| note.contains("is stopped")), "{:?}", captured.notes);
    let threads = format!("proc/{}/threads.txt", sleeper.pid());
    let (_, text) = entries.iter().find(|(name, _)| *name == threads).unwrap();
    assert!(text.contains(" T wchan="), "the kernel's view of its threads is there: {text}");
}
