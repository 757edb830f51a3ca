//! The bundles that lie here, for who looks into a pod from outside: the image holds no shell and no tar, so `kubectl truebeat bundles` starts
//! this program in the agent's container (`agent evidence list`, `agent evidence send`). Only reads, and trusts no folder but its own.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use crds::agent::{BUNDLE_DIR, EVIDENCE_DIR};
use serde::{Deserialize, Serialize};

use super::bundle::{self, Manifest};

/// More than this are not told, the newest first.
const TOLD_MAX: usize = 1_000;
/// Folders of pods that are looked into, those that changed last.
const FOLDERS_MAX: usize = 2_000;
/// Names of episodes, classes and fingerprints are shorter: a file that says otherwise is none that an agent wrote.
const WORD_BYTES_MAX: usize = 256;
/// No bundle is longer: it is packed from [`bundle::BYTES_MAX`].
pub const FILE_BYTES_MAX: u64 = 64 << 20;

/// Where bundles lie.
#[derive(Debug, Clone, clap::Args)]
pub struct ShelfArgs {
    /// This pod's own bundles.
    #[arg(long, env = "TRUEBEAT_BUNDLE_DIR", default_value = BUNDLE_DIR)]
    pub bundle_dir: PathBuf,
    /// The bundles of all pods, a folder each; where it is not there, this pod's own are all there are.
    #[arg(long, default_value = EVIDENCE_DIR)]
    pub evidence_dir: PathBuf,
    /// Whose this pod's own are.
    #[arg(long, env = "POD_NAME", default_value = "")]
    pub pod_name: String,
}

/// What is wanted of the shelf.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum Wish {
    /// What lies there, newest first: one JSON object a line.
    List {
        /// What this pod alone wrote.
        #[arg(long)]
        of: Option<String>,
    },
    /// A bundle's bytes to standard output.
    Send {
        /// The episode that it is about.
        episode: String,
        /// The pod that wrote it.
        #[arg(long)]
        of: String,
    },
}

/// `agent evidence …`.
#[derive(Debug, clap::Args)]
pub struct EvidenceArgs {
    #[command(flatten)]
    pub shelf: ShelfArgs,
    #[command(subcommand)]
    pub wish: Wish,
}

/// One bundle on the shelf, as a line of `list`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shelved {
    pub episode: String,
    /// The pod that wrote it: the name of its folder, which no other pod can write to.
    pub pod: String,
    pub class: String,
    pub fingerprint: String,
    pub bytes: u64,
    /// When it was written, in seconds since 1970.
    pub written_s: u64,
}

/// Why nothing was told.
#[derive(Debug, thiserror::Error)]
pub enum ShelfError {
    #[error("{0:?} is no name of a pod")]
    Pod(String),
    #[error("no bundle of episode {episode} of pod {pod} lies here")]
    Nowhere { episode: String, pod: String },
    #[error("{0} is no plain file, or longer than any bundle")]
    NoBundle(PathBuf),
    #[error("could not read {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("could not write to standard output: {0}")]
    Write(#[from] io::Error),
    #[error("could not write a line: {0}")]
    Line(#[from] serde_json::Error),
}

/// Does what is wanted, to standard output.
///
/// # Errors
/// As [`serve`].
pub fn show(args: &EvidenceArgs) -> Result<ExitCode, ShelfError> {
    serve(&args.shelf, &args.wish, &mut io::stdout().lock()).map(|()| ExitCode::SUCCESS)
}

/// Does what is wanted, to `out`.
///
/// # Errors
/// Nothing of that name, a file that is no bundle, a reader that has gone.
pub fn serve(args: &ShelfArgs, wish: &Wish, out: &mut impl Write) -> Result<(), ShelfError> {
    match wish {
        Wish::List { of } => {
            for bundle in list(args, of.as_deref())? {
                serde_json::to_writer(&mut *out, &bundle)?;
                out.write_all(b"\n")?;
            }
        }
        Wish::Send { episode, of } => send(args, episode, of, out)?,
    }
    Ok(out.flush()?)
}

/// What lies on the shelf, newest first: of one pod, or of all.
///
/// # Errors
/// A name that is none of a pod.
pub fn list(args: &ShelfArgs, of: Option<&str>) -> Result<Vec<Shelved>, ShelfError> {
    let folders = match of {
        Some(pod) => folders_of(args, pod)?.into_iter().map(|folder| (pod.to_owned(), folder)).collect(),
        None => folders(args),
    };
    let mut told: Vec<Shelved> = Vec::new();
    for (pod, folder) in folders {
        told.extend(in_folder(&pod, &folder));
        if told.len() > 2 * TOLD_MAX {
            newest(&mut told);
        }
    }
    newest(&mut told);
    Ok(told)
}

/// Each bundle once, the newest first, no more than are told.
fn newest(told: &mut Vec<Shelved>) {
    told.sort_by(|a, b| b.written_s.cmp(&a.written_s).then_with(|| (&a.pod, &a.episode).cmp(&(&b.pod, &b.episode))));
    let mut seen = BTreeSet::new();
    told.retain(|one| seen.insert((one.pod.clone(), one.episode.clone())));
    told.truncate(TOLD_MAX);
}

/// The folder of each pod. What this pod wrote lies among the others' where these are kept.
fn folders(args: &ShelfArgs) -> Vec<(String, PathBuf)> {
    let Ok(entries) = fs::read_dir(&args.evidence_dir) else {
        return vec![(args.pod_name.clone(), args.bundle_dir.clone())];
    };
    let mut folders: Vec<_> = entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry)))
        .collect();
    folders.sort_by_key(|(changed, _)| std::cmp::Reverse(*changed));
    folders.truncate(FOLDERS_MAX);
    folders.into_iter().filter_map(|(_, entry)| Some((entry.file_name().into_string().ok()?, entry.path()))).collect()
}

/// Where the bundles of this pod lie.
fn folders_of(args: &ShelfArgs, pod: &str) -> Result<Vec<PathBuf>, ShelfError> {
    let mut parts = Path::new(pod).components();
    if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) || pod.contains('/') {
        return Err(ShelfError::Pod(pod.to_owned()));
    }
    let own = (pod == args.pod_name).then(|| args.bundle_dir.clone());
    Ok(own.into_iter().chain([args.evidence_dir.join(pod)]).collect())
}

/// An agent keeps so many of its own; whatever else lies there is older, or none of an agent's.
fn in_folder(pod: &str, folder: &Path) -> Vec<Shelved> {
    if fs::symlink_metadata(folder).is_ok_and(|folder| folder.is_symlink()) {
        return Vec::new();
    }
    let seconds = |time: SystemTime| time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let mut files = bundle::files_in(folder);
    files.sort_by_key(|(written, _)| std::cmp::Reverse(*written));
    files.truncate(bundle::KEPT_MAX);
    let bundles = files.into_iter().filter_map(|(written, path)| {
        let Manifest { episode, class, fingerprint, .. } = bundle::manifest_of(&path)?;
        let fits = [&episode, &class, &fingerprint].iter().all(|word| word.len() <= WORD_BYTES_MAX);
        let bytes = fs::metadata(&path).ok()?.len();
        let pod = pod.to_owned();
        fits.then_some(Shelved { episode, pod, class, fingerprint, bytes, written_s: seconds(written) })
    });
    bundles.collect()
}

fn send(args: &ShelfArgs, episode: &str, pod: &str, out: &mut impl Write) -> Result<(), ShelfError> {
    let places = folders_of(args, pod)?.into_iter().map(|folder| bundle::path_of(&folder, episode));
    for path in places {
        let failed = |source| ShelfError::Read { path: path.clone(), source };
        let file = match bundle::open_itself(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(failed(source)),
        };
        let about = file.metadata().map_err(failed)?;
        if !about.is_file() || about.len() > FILE_BYTES_MAX {
            return Err(ShelfError::NoBundle(path));
        }
        io::copy(&mut file.take(FILE_BYTES_MAX), out)?;
        return Ok(());
    }
    Err(ShelfError::Nowhere { episode: episode.to_owned(), pod: pod.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forensics::bundle::BundleEntry;
    use std::sync::atomic::AtomicBool;

    fn write(folder: &Path, episode: &str) -> PathBuf {
        let entries = vec![BundleEntry { name: "summary.txt".to_owned(), text: format!("of {episode}") }];
        let manifest = bundle::manifest(episode, "StepStalled", "00aa");
        bundle::write(folder, episode, manifest, entries, &AtomicBool::new(false)).unwrap()
    }

    fn args(dir: &Path) -> ShelfArgs {
        ShelfArgs { bundle_dir: dir.join("own"), evidence_dir: dir.join("all"), pod_name: "chat-1".to_owned() }
    }

    fn sent(args: &ShelfArgs, episode: &str, of: &str) -> Result<Vec<u8>, ShelfError> {
        let mut out = Vec::new();
        let wish = Wish::Send { episode: episode.to_owned(), of: of.to_owned() };
        serve(args, &wish, &mut out).map(|()| out)
    }

    #[test]
    fn without_a_claim_the_pods_own_are_all_there_are() {
        let dir = tempfile::tempdir().unwrap();
        let args = args(dir.path());
        assert_eq!(list(&args, None).unwrap(), []);
        let path = write(&args.bundle_dir, "e-1");
        fs::write(args.bundle_dir.join("strange.tar.zst"), "no bundle").unwrap();
        let all = list(&args, None).unwrap();
        assert_eq!((all.len(), all[0].episode.as_str(), all[0].pod.as_str()), (1, "e-1", "chat-1"));
        assert_eq!(sent(&args, "e-1", "chat-1").unwrap(), fs::read(path).unwrap());
        let mut lines = Vec::new();
        serve(&args, &Wish::List { of: None }, &mut lines).unwrap();
        assert_eq!(serde_json::from_slice::<Shelved>(&lines).unwrap(), all[0]);
    }

    #[test]
    fn on_a_claim_those_of_pods_that_are_gone_are_told_too() {
        let dir = tempfile::tempdir().unwrap();
        let args = args(dir.path());
        let gone = write(&args.evidence_dir.join("chat-0"), "e-0");
        write(&args.evidence_dir.join("chat-1"), "e-1");
        let told: Vec<_> = list(&args, None).unwrap().into_iter().map(|told| (told.pod, told.episode)).collect();
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told.contains(&("chat-0".to_owned(), "e-0".to_owned())));
        assert_eq!(sent(&args, "e-0", "chat-0").unwrap(), fs::read(gone).unwrap());
        assert!(matches!(sent(&args, "e-0", "chat-1"), Err(ShelfError::Nowhere { .. })));
        let of_one = list(&args, Some("chat-0")).unwrap();
        assert!(of_one.len() == 1 && of_one[0].episode == "e-0", "{of_one:?}");
        assert_eq!(list(&args, Some("chat-7")).unwrap(), []);
        assert!(matches!(list(&args, Some("../secret")), Err(ShelfError::Pod(_))));
    }

    #[test]
    fn what_one_pod_puts_there_neither_fills_the_list_nor_the_memory() {
        let dir = tempfile::tempdir().unwrap();
        let args = args(dir.path());
        let hostile = args.evidence_dir.join("chat-0");
        write(&args.evidence_dir.join("chat-1"), "e-1");
        write(&hostile, "template");
        let whole = fs::read(bundle::path_of(&hostile, "template")).unwrap();
        for n in 0..3 * bundle::KEPT_MAX {
            fs::write(hostile.join(format!("{n}.tar.zst")), &whole).unwrap();
        }
        let long = bundle::manifest(&"e".repeat(WORD_BYTES_MAX + 1), "StepStalled", "00aa");
        bundle::write(&args.evidence_dir.join("chat-2"), "long", long, Vec::new(), &AtomicBool::new(false)).unwrap();
        fs::create_dir_all(args.evidence_dir.join("chat-3")).unwrap();
        fs::write(args.evidence_dir.join("chat-3").join("sparse.tar.zst"), sparse(1 << 40)).unwrap();
        let told: BTreeSet<_> = list(&args, None).unwrap().into_iter().map(|told| told.episode).collect();
        assert_eq!(told, ["e-1", "template"].map(str::to_owned).into());
    }

    /// An archive whose first entry claims to be so long, and holds nothing.
    fn sparse(bytes: u64) -> Vec<u8> {
        let mut header = tar::Header::new_gnu();
        header.set_path("manifest.json").unwrap();
        header.set_entry_type(tar::EntryType::GNUSparse);
        header.set_size(0);
        let gnu = header.as_gnu_mut().unwrap();
        gnu.set_real_size(bytes);
        gnu.sparse[0].set_offset(bytes);
        gnu.sparse[0].set_length(0);
        header.set_cksum();
        zstd::encode_all([header.as_bytes().as_slice(), &[0; 1024]].concat().as_slice(), 1).unwrap()
    }

    #[test]
    fn nothing_leads_out_of_the_shelf() {
        let dir = tempfile::tempdir().unwrap();
        let args = args(dir.path());
        fs::create_dir_all(args.evidence_dir.join("chat-0")).unwrap();
        let secret = write(&dir.path().join("secret"), "e-s");
        std::os::unix::fs::symlink(&secret, bundle::path_of(&args.evidence_dir.join("chat-0"), "e-s")).unwrap();
        assert!(matches!(sent(&args, "e-s", "chat-0"), Err(ShelfError::Read { .. })));
        for name in ["..", "../secret", "/", "", "a/b"] {
            assert!(matches!(sent(&args, "e-s", name), Err(ShelfError::Pod(_))), "{name}");
        }
        std::os::unix::fs::symlink(dir.path().join("secret"), args.evidence_dir.join("chat-9")).unwrap();
        assert_eq!(list(&args, None).unwrap(), []);
        nix::unistd::mkfifo(
            &bundle::path_of(&args.evidence_dir.join("chat-0"), "pipe"),
            nix::sys::stat::Mode::from_bits_truncate(0o600),
        )
        .unwrap();
        assert!(matches!(sent(&args, "pipe", "chat-0"), Err(ShelfError::NoBundle(_))));
        assert!(matches!(sent(&args, "../../secret/e-s", "chat-0"), Err(ShelfError::Nowhere { .. })));
    }
}
