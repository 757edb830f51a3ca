//! Archives that somebody made to do harm: refused with what and where, within bounds, and nothing is ever unpacked to disk.

use std::io::Write;
use std::path::Path;

use agent::forensics::bundle::{self, BundleError};

const INDEX: &str = r#"{"format":"truebeat-bundle","format_version":1,"agent_version":"0","episode":"e","class":"c",
    "fingerprint":"f","pieces":[],"notes":[],"entries":[]}"#;

/// A bundle whose index is right and whose second entry is made by `add`.
fn archive(path: &Path, add: impl FnOnce(&mut tar::Builder<zstd::Encoder<'static, std::fs::File>>)) {
    let file = std::fs::File::create(path).unwrap();
    let mut archive = tar::Builder::new(zstd::Encoder::new(file, 1).unwrap());
    plain(&mut archive, "manifest.json", INDEX.as_bytes());
    add(&mut archive);
    archive.into_inner().unwrap().finish().unwrap();
}

/// An entry with any name whatever, as no well-behaved archiver writes it.
fn plain(archive: &mut tar::Builder<impl Write>, name: &str, content: &[u8]) {
    let mut header = tar::Header::new_gnu();
    header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
    header.set_size(content.len() as u64);
    header.set_entry_type(tar::EntryType::Regular);
    header.set_cksum();
    archive.append(&header, content).unwrap();
}

#[test]
fn names_that_lead_out_and_entries_that_are_no_files_are_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("b.tar.zst");
    for name in ["../../etc/passwd", "/etc/passwd", "proc/../../x", "a\u{1b}[2Jb"] {
        archive(&path, |archive| plain(archive, name, b"x"));
        let error = bundle::read(&path).unwrap_err();
        assert!(matches!(&error, BundleError::Hostile { name: found, .. } if found == name), "{name}: {error}");
        assert!(!error.to_string().contains('\u{1b}'), "the message itself is printable");
    }
    use tar::EntryType::{Block, Char, Directory, Fifo, Link, Symlink};
    for kind in [Symlink, Link, Fifo, Char, Block, Directory] {
        archive(&path, |archive| {
            let mut header = tar::Header::new_gnu();
            header.set_size(0);
            header.set_entry_type(kind);
            header.set_path("x").unwrap();
            header.set_link_name("/etc/passwd").unwrap();
            header.set_cksum();
            archive.append(&header, &b""[..]).unwrap();
        });
        let error = bundle::read(&path).unwrap_err();
        assert!(matches!(error, BundleError::Hostile { .. }), "{kind:?}: {error}");
    }
    archive(&path, |archive| plain(archive, "summary.txt", b"x"));
    assert_eq!(bundle::read(&path).unwrap().entries.len(), 1, "the same with nothing wrong is read");
}

#[test]
fn a_bomb_ends_at_the_bound_whether_it_is_one_entry_or_many() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("b.tar.zst");
    let zeros = vec![0_u8; 1 << 20];
    archive(&path, |archive| {
        let mut header = tar::Header::new_gnu();
        header.set_path("zeros").unwrap();
        header.set_size(200 << 20);
        header.set_cksum();
        archive.append(&header, std::io::Read::take(std::io::repeat(0), 200 << 20)).unwrap();
    });
    assert!(path.metadata().unwrap().len() < zeros.len() as u64, "it is small on disk");
    assert!(bundle::read(&path).is_err());
    archive(&path, |archive| (0..100).for_each(|n| plain(archive, &format!("z{n}"), &zeros)));
    let error = bundle::read(&path).unwrap_err();
    assert!(matches!(error, BundleError::TooLarge { .. } | BundleError::Unpack { .. }), "{error}");
    archive(&path, |archive| (0..20_000).for_each(|n| plain(archive, &format!("e{n}"), b"")));
    assert!(matches!(bundle::read(&path), Err(BundleError::TooLarge { .. })));
    // an entry that claims more than there is
    archive(&path, |archive| {
        let mut header = tar::Header::new_gnu();
        header.set_path("liar").unwrap();
        header.set_size(u64::MAX >> 2);
        header.set_cksum();
        archive.get_mut().write_all(header.as_bytes()).unwrap();
    });
    assert!(bundle::read(&path).is_err());
}

#[test]
fn pipes_folders_and_devices_are_not_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let pipe = directory.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    for path in [pipe.as_path(), directory.path(), Path::new("/dev/zero")] {
        assert!(matches!(bundle::read(path), Err(BundleError::NoFile { .. })), "{}", path.display());
    }
}

#[test]
fn no_bytes_whatever_make_the_reader_panic() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("b.tar.zst");
    archive(&path, |archive| plain(archive, "summary.txt", b"a few words"));
    let whole = std::fs::read(&path).unwrap();
    let mut state = 7_u64;
    for _ in 0..2_000 {
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize
        };
        let mut bytes = whole.clone();
        for _ in 0..=next() % 4 {
            let at = next() % bytes.len();
            bytes[at] = next() as u8;
        }
        bytes.truncate(bytes.len() - next() % 8);
        std::fs::write(&path, &bytes).unwrap();
        // an answer or an error that names the file; never a panic
        if let Err(error) = bundle::read(&path) {
            assert!(error.to_string().contains("b.tar.zst"), "{error}");
        }
    }
}
