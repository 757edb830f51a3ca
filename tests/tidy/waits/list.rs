//! Clippy's list of waits: the same for each crate of the engine's process, and no line of it that forbids nothing. Clippy itself is asked, about a
//! file with one use of each; runs `rustc` and `clippy-driver` on files in a folder of its own.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::CRATES;
use crate::tree::{Finding, Tree};

/// The list.
pub const LIST: &str = "engine/clippy.toml";

/// What a line of the list forbids and a use of it. The uses are compiled here too, so that a name that its crate no longer has is an error.
macro_rules! uses {
    ($($path:literal: $use:expr,)*) => {
        const USES: &[(&str, &str)] = &[$(($path, stringify!($use))),*];

        #[expect(dead_code, reason = "names are compiled, nothing is called")]
        fn there_are() {
            $(let _ = $use;)*
        }
    };
}

uses! {
    "std::sync::mpsc::Receiver::recv": std::sync::mpsc::Receiver::<u8>::recv,
    "std::sync::mpsc::Receiver::iter": std::sync::mpsc::Receiver::<u8>::iter,
    "std::sync::mpsc::SyncSender::send": std::sync::mpsc::SyncSender::<u8>::send,
    "std::sync::Mutex::lock": std::sync::Mutex::<u8>::lock,
    "std::sync::RwLock::read": std::sync::RwLock::<u8>::read,
    "std::sync::RwLock::write": std::sync::RwLock::<u8>::write,
    "std::sync::Condvar::wait": std::sync::Condvar::wait::<u8>,
    "std::sync::Condvar::wait_while": std::sync::Condvar::wait_while::<u8, fn(&mut u8) -> bool>,
    "std::sync::Barrier::wait": std::sync::Barrier::wait,
    "std::sync::Once::call_once": std::sync::Once::call_once::<fn()>,
    "std::sync::Once::call_once_force": std::sync::Once::call_once_force::<fn(&std::sync::OnceState)>,
    "std::sync::Once::wait": std::sync::Once::wait,
    "std::sync::OnceLock::get_or_init": std::sync::OnceLock::<u8>::get_or_init::<fn() -> u8>,
    "std::sync::OnceLock::wait": std::sync::OnceLock::<u8>::wait,
    "std::sync::LazyLock::force": std::sync::LazyLock::<u8>::force,
    "std::thread::scope": std::thread::scope::<fn(&std::thread::Scope<'_, '_>), ()>,
    "std::thread::ScopedJoinHandle::join": std::thread::ScopedJoinHandle::<u8>::join,
    "std::fs::File::lock": std::fs::File::lock,
    "std::fs::File::lock_shared": std::fs::File::lock_shared,
    "std::thread::park": std::thread::park,
    "std::thread::JoinHandle::join": std::thread::JoinHandle::<u8>::join,
    "std::process::Child::wait": std::process::Child::wait,
    "std::process::Child::wait_with_output": std::process::Child::wait_with_output,
    "std::process::Command::output": std::process::Command::output,
    "std::process::Command::status": std::process::Command::status,
    "std::net::TcpStream::connect": std::net::TcpStream::connect::<&str>,
    "std::sync::LazyLock": std::sync::LazyLock::<u8>::force,
    "std::sync::mpsc::Iter": None::<std::sync::mpsc::Iter<'static, u8>>,
    "std::sync::mpsc::IntoIter": None::<std::sync::mpsc::IntoIter<u8>>,
    "tokio::runtime::Handle::block_on": tokio::runtime::Handle::block_on::<std::future::Ready<u8>>,
    "tokio::sync::Mutex::blocking_lock": tokio::sync::Mutex::<u8>::blocking_lock,
    "tokio::sync::RwLock::blocking_read": tokio::sync::RwLock::<u8>::blocking_read,
    "tokio::sync::RwLock::blocking_write": tokio::sync::RwLock::<u8>::blocking_write,
    "tokio::sync::mpsc::Receiver::blocking_recv": tokio::sync::mpsc::Receiver::<u8>::blocking_recv,
    "tokio::sync::mpsc::UnboundedReceiver::blocking_recv": tokio::sync::mpsc::UnboundedReceiver::<u8>::blocking_recv,
    "tokio::sync::mpsc::Sender::blocking_send": tokio::sync::mpsc::Sender::<u8>::blocking_send,
    "tokio::sync::mpsc::Sender::send": tokio::sync::mpsc::Sender::<u8>::send,
    "tokio::sync::oneshot::Receiver::blocking_recv": tokio::sync::oneshot::Receiver::<u8>::blocking_recv,
    "tokio::sync::broadcast::Receiver::blocking_recv": tokio::sync::broadcast::Receiver::<u8>::blocking_recv,
    "futures::executor::block_on": futures::executor::block_on::<std::future::Ready<u8>>,
    "nix::sys::wait::wait": nix::sys::wait::wait,
    "nix::sys::wait::waitpid": nix::sys::wait::waitpid::<nix::unistd::Pid>,
}

/// What stands for other crates, which this program has and the compiler in the scratch folder does not.
const STAND_INS: [(&str, &str); 3] = [
    (
        "tokio",
        "pub mod runtime { pub struct Handle; impl Handle { pub fn block_on<F>(&self, _: F) {} } }
pub mod sync {
    pub struct Mutex<T>(pub T); impl<T> Mutex<T> { pub fn blocking_lock(&self) {} }
    pub struct RwLock<T>(pub T); impl<T> RwLock<T> { pub fn blocking_read(&self) {} pub fn blocking_write(&self) {} }
    pub mod mpsc {
        pub struct Receiver<T>(pub T); impl<T> Receiver<T> { pub fn blocking_recv(&mut self) {} }
        pub struct UnboundedReceiver<T>(pub T); impl<T> UnboundedReceiver<T> { pub fn blocking_recv(&mut self) {} }
        pub struct Sender<T>(pub T); impl<T> Sender<T> { pub fn blocking_send(&self, _: T) {} pub async fn send(&self, _: T) {} }
    }
    pub mod oneshot { pub struct Receiver<T>(pub T); impl<T> Receiver<T> { pub fn blocking_recv(self) {} } }
    pub mod broadcast { pub struct Receiver<T>(pub T); impl<T> Receiver<T> { pub fn blocking_recv(&mut self) {} } }
}",
    ),
    ("futures", "pub mod executor { pub fn block_on<F>(_: F) {} }"),
    (
        "nix",
        "pub mod unistd { pub struct Pid; } pub mod sys { pub mod wait { pub fn wait() {} pub fn waitpid<P>(_: P) {} } }",
    ),
];

/// Crates of the engine's process that have another list, or none, or that nobody knows of.
pub fn of_each_crate(tree: &Tree, metadata: &Value) -> Vec<Finding> {
    let text = |path: &str| tree.files.iter().find(|file| file.path == path).map(|file| file.text.as_str());
    let finding = |path: String, what: &str| Finding { path, line: 1, what: what.to_owned() };
    let lists = CRATES.map(|name| format!("{name}/clippy.toml")).into_iter();
    let other = lists.filter(|path| text(path).is_none() || text(path) != text(LIST));
    let mut findings: Vec<_> = other.map(|path| finding(path, &format!("is not what {LIST} is (E1)"))).collect();
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let engine = packages.filter(|package| package["name"] == "engine");
    let needed = engine.flat_map(|engine| engine["dependencies"].as_array().into_iter().flatten());
    let ours = needed.filter(|needed| needed["kind"].is_null() && !needed["path"].is_null());
    let unknown = ours.filter_map(|needed| needed["name"].as_str()).filter(|name| !CRATES.contains(name));
    let what = "runs in the engine's process, and tests/tidy/waits.rs does not look at it (E1)";
    findings.extend(unknown.map(|name| finding(format!("{name}/Cargo.toml"), what)));
    findings
}

/// Lines of a list that forbid nothing, or of which no use is known here.
///
/// # Errors
/// A list that is none, or no compiler.
pub fn idle_lines(list: &str) -> Result<Vec<Finding>> {
    let paths = paths_of(list)?;
    let told = told_by_clippy(list)?;
    let idle = paths.into_iter().filter(|path| {
        let line = USES.iter().position(|(known, _)| known == path).map(|at| at + 1);
        let heard = |line: usize| {
            let place = format!("uses.rs:{line}:");
            told.lines().any(|told| told.starts_with(&place) && told.contains(&format!("`{path}`")))
        };
        !line.is_some_and(heard)
    });
    let what = |path: &str| format!("clippy says nothing of a use of {path}, or tests/tidy/waits/list.rs has none");
    Ok(idle.map(|path| Finding { path: LIST.to_owned(), line: 1, what: what(&path) }).collect())
}

fn paths_of(list: &str) -> Result<Vec<String>> {
    let list: toml::Table = list.parse().context("the list is no TOML")?;
    let lines = ["disallowed-methods", "disallowed-types"].into_iter().filter_map(|name| list.get(name)?.as_array());
    let path = |line: &toml::Value| Some(line.get("path")?.as_str()?.to_owned());
    Ok(lines.flatten().filter_map(path).collect())
}

/// What clippy says of a file with one use a line.
fn told_by_clippy(list: &str) -> Result<String> {
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("clippy.toml"), list)?;
    for (name, text) in STAND_INS {
        std::fs::write(at(&format!("{name}.rs")), text)?;
        let built = compile("rustc", folder.path(), &format!("{name}.rs"), &["--crate-name", name])?;
        if !at(&format!("lib{name}.rmeta")).exists() {
            bail!("no stand-in for {name}: {built}");
        }
    }
    let lines: Vec<String> = USES.iter().map(|(_, used)| format!("pub fn f() {{ let _ = {}; }}", flat(used))).collect();
    let text: Vec<String> =
        lines.iter().enumerate().map(|(n, line)| line.replacen("f()", &format!("f{n}()"), 1)).collect();
    std::fs::write(at("uses.rs"), text.join("\n"))?;
    let names = STAND_INS.map(|(name, _)| format!("{name}={}", at(&format!("lib{name}.rmeta")).display()));
    let others: Vec<&str> = names.iter().flat_map(|name| ["--extern", name]).collect();
    compile("clippy-driver", folder.path(), "uses.rs", &others)
}

/// On one line.
fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// What the compiler says.
fn compile(with: &str, folder: &Path, file: &str, more: &[&str]) -> Result<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    // the toolchain of this tree is chosen by the folder; paths in what is said begin at the scratch folder
    let toolchain = Command::new("rustc").args(["--print", "sysroot"]).current_dir(root).output().context("rustc")?;
    let toolchain = String::from_utf8(toolchain.stdout)?;
    let output = Command::new(Path::new(toolchain.trim()).join("bin").join(with))
        .args(["--edition", "2024", "--crate-type", "lib", "--emit", "metadata", "--error-format", "short"])
        .args(more)
        .arg(file)
        .current_dir(folder)
        .env("CLIPPY_CONF_DIR", folder)
        .output()
        .with_context(|| format!("cannot start {with}"))?;
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_line_that_forbids_nothing_and_a_crate_without_the_list_are_found() {
    let list = |path: &str| format!("disallowed-methods = [{{ path = \"{path}\" }}]");
    let idle = |path: &str| idle_lines(&list(path)).unwrap().len();
    assert_eq!(idle("std::sync::Mutex::lock"), 0);
    assert_eq!(idle("tokio::sync::mpsc::Sender::send"), 0);
    for unheard in ["std::sync::mpsc::Receiver::into_iter", "std::sync::Mutex::locks", "std::sync::Mutex::try_lock"] {
        assert_eq!(idle(unheard), 1, "{unheard}");
    }
    let whole = format!("{}\n", list("std::thread::park"));
    let texts = |of: &[(&str, &str)]| of.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect();
    let one = ("engine/clippy.toml", whole.as_str());
    let other = ("heartbeat/clippy.toml", "too-many-arguments-threshold = 6\n");
    let tree = Tree::new(texts(&[one, other, ("role/clippy.toml", &whole)])).unwrap();
    let needs = |name: &str| serde_json::json!({"name": name, "path": "/x", "kind": null});
    let metadata =
        serde_json::json!({"packages": [{"name": "engine", "dependencies": [needs("role"), needs("vitals")]}]});
    let found: Vec<String> = of_each_crate(&tree, &metadata).into_iter().map(|finding| finding.path).collect();
    assert_eq!(found, ["heartbeat/clippy.toml", "vitals/Cargo.toml"]);
}
