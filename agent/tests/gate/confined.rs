//! S4: what a gate has taken from itself is gone, and what it works with is there. In processes of their own, for nothing of it can be given back.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use agent::gate::confine::left_to;
use agent::gate::control::{GateClient, socket_in};
use agent::gate::ledger::Control;
use agent::gate::memory::{kept_beside, recall};
use nix::sys::signal::kill;
use nix::unistd::Pid;

use super::SOON;

#[path = "../common/not_run.rs"]
mod not_run;

/// Tells the process of the first test where its files lie.
const DIR_ENV: &str = "TRUEBEAT_TEST_CONFINED_DIR";

#[test]
fn s04_a_confined_gate_writes_in_its_own_folder_and_starts_signals_and_reads_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("gate")).unwrap();
    fs::write(dir.path().join("there"), "another's").unwrap();
    let mut test = Command::new(std::env::current_exe().unwrap());
    test.args(["--exact", "confined::confined_gate", "--ignored", "--nocapture"]).env(DIR_ENV, dir.path());
    let said = test.output().unwrap();
    let text = String::from_utf8_lossy(&said.stdout);
    assert!(said.status.success() && text.contains("confined by "), "{text}{}", String::from_utf8_lossy(&said.stderr));
    if !text.contains("confined by both") {
        not_run::on_record("s04_a_gate_reads_and_writes_nothing_else", "this kernel has no landlock");
    }
}

/// Its work is what the test above asks of it.
#[test]
#[ignore = "a process of the test above"]
fn confined_gate() {
    let Some(dir) = std::env::var_os(DIR_ENV).map(PathBuf::from) else { return };
    let (own, there) = (dir.join("gate"), dir.join("there"));
    let files = left_to(&own, parent_id());
    let landlock = files.restrict().unwrap();
    files.restrict_calls().unwrap();

    refused("start a program", Command::new("/bin/true").spawn());
    refused("become a program", nix::unistd::execv(c"/bin/true", &[c"true"]).map_err(io::Error::from));
    refused("signal another", kill(Pid::from_raw(parent_id().cast_signed()), None).map_err(io::Error::from));
    refused("change a mode", fs::set_permissions(&there, fs::Permissions::from_mode(0o777)));
    if landlock {
        refused("read another's file", File::open(&there));
        refused("write another's file", File::options().append(true).open(&there));
        refused("remove another's file", fs::remove_file(&there));
        refused("make a file beside its folder", File::create(dir.join("new")));
        refused("take its file elsewhere", fs::rename(&own, dir.join("new")));
    }

    // what its forerunner left, and what it is told
    fs::write(own.join("gate.tmp"), "{}").unwrap();
    fs::rename(own.join("gate.tmp"), own.join("gate.state")).unwrap();
    assert_eq!(fs::read_to_string(own.join("gate.state")).unwrap(), "{}");
    heartbeat::counts::CountsWriter::create("test").unwrap();
    for path in ["/dev/null", "/proc/self/smaps", "/proc/self/status", "/proc/sys/kernel/random/boot_id"] {
        File::open(path).unwrap();
    }
    fs::read_to_string(format!("/proc/{}/stat", parent_id())).unwrap();
    std::thread::spawn(|| ()).join().unwrap();
    println!("confined by {}", if landlock { "both" } else { "seccomp" });
}

#[tokio::test]
async fn s04_every_thread_of_a_gate_is_confined_unless_it_is_told_not_to_be() {
    let ours = filters(Path::new("/proc/thread-self/status"));
    for (word, more) in [(None, 2), (Some("--no-confine"), 0)] {
        let dir = tempfile::tempdir().unwrap();
        let mut gate = Command::new(env!("CARGO_BIN_EXE_truebeat-agent"));
        gate.args(["agent", "gate", "--listen=127.0.0.1:0", "--upstream=http://127.0.0.1:1"]).args(word);
        gate.env("TRUEBEAT_AGENT_DIR", dir.path()).env_remove("TRUEBEAT_NO_CONFINE");
        let gate = Reaped(gate.spawn().unwrap());
        let socket = socket_in(dir.path());
        let mut client = GateClient::new(socket.clone());
        let shut = Control { fenced: true, ..Control::default() };
        let remembers = async {
            // written by a thread that was not there when it began
            while client.exchange(&shut).await.is_err() || !recall(&kept_beside(&socket)).fenced {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(SOON, remembers).await.expect("it never remembers what it was told");
        let threads = fs::read_dir(format!("/proc/{}/task", gate.0.id())).unwrap();
        let found: Vec<_> = threads.map(|thread| filters(&thread.unwrap().path().join("status"))).collect();
        assert!(found.len() > 1 && found.iter().all(|n| *n == ours + more), "{word:?}: {found:?}, ours {ours}");
    }
}

/// How many seccomp filters a thread has; those of whoever runs these tests count as well.
fn filters(status: &Path) -> u32 {
    let text = fs::read_to_string(status).unwrap();
    text.lines().find_map(|line| line.strip_prefix("Seccomp_filters:")).unwrap().trim().parse().unwrap()
}

/// By the kernel's refusal, not by another mishap.
fn refused<T>(what: &str, outcome: io::Result<T>) {
    let error = outcome.err().map(|error| error.kind());
    assert_eq!(error, Some(ErrorKind::PermissionDenied), "{what} (none: it could)");
}

/// Ends its child also where the test fails.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
