//! S4: what an operator has taken from itself is gone, and what it works with is there. In processes of their own, for nothing of it can be given back.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test program; the lint sees test functions alone")]

#[path = "../../agent/tests/common/not_run.rs"]
mod not_run;

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::{fs::PermissionsExt, net::UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::libc;
use operator::confine::in_pod;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Tells a process of these tests where its files lie, and what it is confined by.
const DIR_ENV: &str = "TRUEBEAT_TEST_CONFINED_DIR";
const BY_ENV: &str = "TRUEBEAT_TEST_CONFINED_BY";

/// What has EPERM for an answer. No argument is good, so that none of them would do anything where it is let through: but for the first, which
/// has a tracer's parent wait for it.
const REFUSED: [(&str, i64); 16] = [
    ("ptrace", libc::SYS_ptrace),
    ("process_vm_readv", libc::SYS_process_vm_readv),
    ("execve", libc::SYS_execve),
    ("kill", libc::SYS_kill),
    ("tgkill", libc::SYS_tgkill),
    ("unshare", libc::SYS_unshare),
    ("setns", libc::SYS_setns),
    ("mount", libc::SYS_mount),
    ("bpf", libc::SYS_bpf),
    ("perf_event_open", libc::SYS_perf_event_open),
    ("io_uring_setup", libc::SYS_io_uring_setup),
    ("userfaultfd", libc::SYS_userfaultfd),
    ("keyctl", libc::SYS_keyctl),
    ("finit_module", libc::SYS_finit_module),
    ("kexec_load", libc::SYS_kexec_load),
    ("memfd_create", libc::SYS_memfd_create),
];

#[test]
fn s04_a_confined_process_runs_writes_and_traces_nothing_and_still_does_its_work() {
    let folder = tempfile::tempdir().unwrap();
    prepare(folder.path());
    let mut child = confined(folder.path(), "both");
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.ends_with("token: first")), "it could not read its token");
    token(folder.path(), "second");
    writeln!(child.0.stdin.take().unwrap()).unwrap();
    let said: Vec<_> = lines.collect();
    assert!(child.0.wait().unwrap().success(), "{said:#?}");
    assert!(said.iter().any(|line| line.ends_with("token: second")), "{said:#?}");
}

/// Where a kernel has one of them not, the other has to hold by itself.
#[test]
fn s04_each_of_the_two_alone_lets_nothing_be_written_or_executed() {
    for by in ["landlock", "seccomp"] {
        let folder = tempfile::tempdir().unwrap();
        prepare(folder.path());
        let mut child = confined(folder.path(), by);
        let said: Vec<_> = BufReader::new(child.0.stdout.take().unwrap()).lines().map(Result::unwrap).collect();
        assert!(child.0.wait().unwrap().success(), "{by}: {said:#?}");
        assert!(said.iter().any(|line| line.ends_with(by)), "{by}: nothing was tried: {said:#?}");
    }
}

#[test]
fn s04_every_thread_of_an_operator_is_confined_unless_it_is_told_not_to_be() {
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("kubeconfig");
    let server =
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:9'}}]\ncontexts: [{name: c, context: {cluster: c}}]";
    fs::write(&kubeconfig, format!("apiVersion: v1\nkind: Config\ncurrent-context: c\n{server}\n")).unwrap();
    let ours = filters(Path::new("/proc/thread-self/status"));
    // the switch of an emergency is not to be a riddle: 1 and yes will do
    for (flag, word, more) in [
        (None, None, 2),
        (None, Some("0"), 2),
        (Some("--no-confine"), None, 0),
        (None, Some("1"), 0),
        (None, Some("yes"), 0),
    ] {
        let mut operator = start(folder.path(), (flag, word), Some(&kubeconfig));
        let mut log = BufReader::new(operator.0.stderr.take().unwrap()).lines().map(Result::unwrap);
        assert!(log.any(|line| line.contains("operator starts")), "it did not start");
        let threads = fs::read_dir(format!("/proc/{}/task", operator.0.id())).unwrap();
        let filters: Vec<_> = threads.map(|thread| filters(&thread.unwrap().path().join("status"))).collect();
        assert!(
            filters.len() > 1 && filters.iter().all(|n| *n == ours + more),
            "{flag:?} {word:?}: {filters:?}, ours {ours}"
        );
    }
}

/// Without a kubeconfig it is in a pod, and reads what is a pod's.
#[test]
fn s04_an_operator_in_a_pod_reads_its_service_account_and_little_else() {
    let folder = tempfile::tempdir().unwrap();
    let mut operator = start(folder.path(), (None, None), None);
    let log: Vec<_> = BufReader::new(operator.0.stderr.take().unwrap()).lines().map(Result::unwrap).collect();
    let says = |words: &str| log.iter().any(|line| line.contains(words));
    assert!(says("seccomp: ") && (says("its service account") || says("no landlock")), "{log:#?}");
}

/// Its work is what the tests above ask of it.
#[test]
#[ignore = "a process of the tests above"]
fn confined_process() {
    let Some(folder) = std::env::var_os(DIR_ENV).map(PathBuf::from) else { return };
    let by = std::env::var(BY_ENV).unwrap();
    let both = role::listen_in_pod((Ipv4Addr::UNSPECIFIED, 0).into()).unwrap().local_addr().unwrap().is_ipv6();
    let files = in_pod(&folder.join("serviceaccount"));
    let landlock = by != "seccomp" && files.restrict().unwrap();
    if by != "landlock" {
        files.restrict_calls().unwrap();
    }
    if by == "landlock" && !landlock {
        not_run::on_record("s04_landlock_alone_lets_nothing_be_written_or_executed", "this kernel has no landlock");
        println!("nothing was tried by landlock");
        return;
    }
    executes_nothing();
    writes_nothing(&folder);
    if landlock {
        reads_nothing_else(&folder);
    }
    if by != "landlock" {
        asks_for_nothing_rare();
    }
    works(both);
    if by == "both" {
        rereads_its_token(&folder);
    }
    println!("confined by {by}");
}

fn executes_nothing() {
    refused("start a program", Command::new("/bin/true").spawn());
    let error = nix::unistd::execv(c"/bin/true", &[c"true"]).unwrap_err();
    refused("become a program", Err::<(), _>(io::Error::from(error)));
}

fn writes_nothing(folder: &Path) {
    let (there, new) = (folder.join("there"), folder.join("new"));
    refused("make a file", File::create(&new));
    refused("write a file", OpenOptions::new().write(true).open(&there));
    refused("write its token", OpenOptions::new().append(true).open(folder.join("serviceaccount/token")));
    refused("remove a file", fs::remove_file(&there));
    refused("rename a file", fs::rename(&there, &new));
    refused("make a folder", fs::create_dir(&new));
    refused("link a file", std::os::unix::fs::symlink(&there, &new));
}

fn reads_nothing_else(folder: &Path) {
    refused("read another's file", File::open(folder.join("there")));
    refused("list a folder", fs::read_dir("/etc"));
    if Path::new("/etc/shadow").exists() {
        refused("read passwords", File::open("/etc/shadow"));
    }
}

fn asks_for_nothing_rare() {
    for (name, call) in REFUSED {
        assert_eq!(errno(call, 0), libc::EPERM, "{name}");
    }
    for call in [libc::SYS_clone3, libc::SYS_openat2] {
        assert_eq!(errno(call, 0), libc::ENOSYS, "{call}");
    }
    // ptrace by its number of x32; a kernel without x32 says the same
    #[cfg(target_arch = "x86_64")]
    assert_eq!(errno(0x4000_0000 + 521, 0), libc::ENOSYS);
    for family in [libc::AF_ALG, libc::AF_PACKET, libc::AF_VSOCK, libc::AF_X25] {
        assert_eq!(errno(libc::SYS_socket, family.into()), libc::EPERM, "sockets of family {family}");
    }
    // a resolver's; without a type it is refused as nonsense, not as forbidden
    assert_eq!(errno(libc::SYS_socket, libc::AF_NETLINK.into()), libc::ESOCKTNOSUPPORT);
    // a child that is no thread
    assert_eq!(errno(libc::SYS_clone, libc::SIGCHLD.into()), libc::EPERM);
    refused("change a mode", fs::set_permissions("/", Permissions::from_mode(0o755)));
}

/// What an operator does all day: threads, a runtime, names, connections both ways, and a look at itself.
fn works(both: bool) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || io::copy(&mut &listener.accept().unwrap().0, &mut io::sink()).unwrap());
    role::workers(2).unwrap().block_on(async {
        let resolved: Vec<_> = tokio::net::lookup_host(("localhost", address.port())).await.unwrap().collect();
        assert!(resolved.contains(&address), "{resolved:?}");
        let mut stream = tokio::spawn(tokio::net::TcpStream::connect(address)).await.unwrap().unwrap();
        stream.write_all(b"hello").await.unwrap();
        stream.shutdown().await.unwrap();
        assert_eq!(stream.read(&mut [0; 1]).await.unwrap(), 0);
    });
    assert_eq!(server.join().unwrap(), 5);
    UnixStream::pair().unwrap();
    let listener = role::listen_in_pod((Ipv4Addr::UNSPECIFIED, 0).into()).unwrap();
    assert_eq!(listener.local_addr().unwrap().is_ipv6(), both, "an IPv6 cluster's probes would not arrive");
    assert!(fs::read_to_string("/proc/thread-self/status").unwrap().contains("NoNewPrivs:\t1"));
}

fn rereads_its_token(folder: &Path) {
    let file = folder.join("serviceaccount/token");
    println!("token: {}", fs::read_to_string(&file).unwrap());
    io::stdin().read_line(&mut String::new()).unwrap();
    println!("token: {}", fs::read_to_string(&file).unwrap());
}

/// By the kernel's refusal, not by another mishap.
fn refused<T>(what: &str, outcome: io::Result<T>) {
    let error = outcome.err().map(|error| error.kind());
    assert_eq!(error, Some(ErrorKind::PermissionDenied), "{what} (none: it could)");
}

/// What the kernel says to this call with this first argument and nothing else; 0: it was obeyed.
fn errno(call: i64, first: i64) -> i32 {
    let none = 0_i64;
    // SAFETY: none of these calls can do anything to this process's memory with null for every pointer; one that is let through fails, or
    // makes a descriptor or a child, and the test fails by it.
    #[allow(unsafe_code, reason = "these system calls have no safe form")]
    let result = unsafe { libc::syscall(call, first, none, none, none, none, none) };
    if result == -1 { nix::errno::Errno::last_raw() } else { 0 }
}

/// A file that is not the operator's affair, and a service account as a kubelet lays it out.
fn prepare(folder: &Path) {
    fs::write(folder.join("there"), "another's").unwrap();
    fs::create_dir(folder.join("serviceaccount")).unwrap();
    token(folder, "first");
    std::os::unix::fs::symlink("..data/token", folder.join("serviceaccount/token")).unwrap();
}

/// Replaces the token as a kubelet does: a new folder beside the old one, and a link that is renamed over the one that names it.
fn token(folder: &Path, token: &str) {
    let account = folder.join("serviceaccount");
    let (data, next) = (account.join(format!("..{token}")), account.join("..data_tmp"));
    fs::create_dir(&data).unwrap();
    fs::write(data.join("token"), token).unwrap();
    std::os::unix::fs::symlink(data.file_name().unwrap(), &next).unwrap();
    fs::rename(next, account.join("..data")).unwrap();
}

fn confined(folder: &Path, by: &str) -> Reaped {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "confined_process", "--ignored", "--nocapture"]).env(DIR_ENV, folder).env(BY_ENV, by);
    Reaped(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap())
}

/// The operator itself, whose user's home is `home`.
fn start(home: &Path, (flag, word): (Option<&str>, Option<&str>), kubeconfig: Option<&Path>) -> Reaped {
    let mut command = Command::new(env!("CARGO_BIN_EXE_truebeat-operator"));
    command.args(["operator", "--listen", "127.0.0.1:0"]).args(flag).env("HOME", home);
    for name in ["KUBECONFIG", "KUBERNETES_SERVICE_HOST", "TRUEBEAT_NO_CONFINE", "TRUEBEAT_LOG"] {
        command.env_remove(name);
    }
    command.envs(kubeconfig.map(|path| ("KUBECONFIG", path))).envs(word.map(|word| ("TRUEBEAT_NO_CONFINE", word)));
    Reaped(command.stderr(Stdio::piped()).spawn().unwrap())
}

/// How many seccomp filters a thread has; those of whoever runs these tests count as well.
fn filters(status: &Path) -> u32 {
    let text = fs::read_to_string(status).unwrap();
    text.lines().find_map(|line| line.strip_prefix("Seccomp_filters:")).unwrap().trim().parse().unwrap()
}

/// Ends its child also where the test fails.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
