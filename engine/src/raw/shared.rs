//! Memory that the processes of one engine share: a sealed anonymous file, seen as atomics and nothing else, so that no store of
//! another process is undefined behaviour here. Its length is fixed by a seal: nobody can truncate it under its readers (SIGBUS).

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicU32, AtomicU64};

use memmap2::MmapRaw;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

/// A mapping in two parts: words of control, then words of data.
#[derive(Debug)]
pub struct SharedMap {
    map: MmapRaw,
    control_words: usize,
}

/// An anonymous file of `control_words` words of 8 bytes and `data_words` of 4, all zero. Children do not inherit it: not all that an engine
/// starts are its ranks.
///
/// # Errors
/// What the system says.
pub fn shared_file(control_words: usize, data_words: usize) -> Result<File> {
    let file = File::from(memfd_create(c"truebeat-ranks", MFdFlags::MFD_ALLOW_SEALING | MFdFlags::MFD_CLOEXEC)?);
    file.set_len(control_words as u64 * 8 + data_words as u64 * 4)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL))?;
    Ok(file)
}

impl SharedMap {
    /// Maps all of `file`, which must be sealed against shrinking.
    ///
    /// # Errors
    /// `InvalidInput` for a file that is not sealed or shorter than its control words; else what mmap says.
    pub fn new(file: &File, control_words: usize) -> Result<Self> {
        let refuse = |why: &str| Error::new(ErrorKind::InvalidInput, why.to_owned());
        let seals = SealFlag::from_bits_truncate(fcntl(file, FcntlArg::F_GET_SEALS)?);
        if !seals.contains(SealFlag::F_SEAL_SHRINK) {
            return Err(refuse("the ranks' memory is not sealed"));
        }
        let map = MmapRaw::map_raw(file)?;
        if map.len() / 8 < control_words {
            return Err(refuse("the ranks' memory is too short"));
        }
        Ok(Self { map, control_words })
    }

    /// The words of control.
    pub fn control(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page-aligned, readable, writable, sealed against shrinking, at least this long and lives as long
        // as `self`. Any bytes are a valid AtomicU64, and no process reaches these bytes but by such atomics.
        unsafe { std::slice::from_raw_parts(self.map.as_mut_ptr().cast::<AtomicU64>(), self.control_words) }
    }

    /// The words of data.
    pub fn data(&self) -> &[AtomicU32] {
        let len = (self.map.len() - self.control_words * 8) / 4;
        // SAFETY: as above; the words of data begin where those of control end, at a multiple of 8 within the mapping.
        unsafe {
            std::slice::from_raw_parts(self.map.as_mut_ptr().add(self.control_words * 8).cast::<AtomicU32>(), len)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn two_mappings_see_one_memory_that_cannot_shrink() {
        let file = shared_file(4, 6).unwrap();
        let (a, b) = (SharedMap::new(&file, 4).unwrap(), SharedMap::new(&file, 4).unwrap());
        a.control()[3].store(7, Relaxed);
        a.data()[0].store(1, Relaxed);
        a.data()[5].store(9, Relaxed);
        assert_eq!((b.control()[3].load(Relaxed), b.data()[0].load(Relaxed), b.data()[5].load(Relaxed)), (7, 1, 9));
        assert_eq!((b.data().len(), b.control().len()), (6, 4));
        assert!(file.set_len(8).is_err());
        let flags = nix::fcntl::FdFlag::from_bits_truncate(fcntl(&file, FcntlArg::F_GETFD).unwrap());
        assert!(flags.contains(nix::fcntl::FdFlag::FD_CLOEXEC), "a renderer of chats would inherit it");
    }

    #[test]
    fn what_is_not_sealed_or_too_short_is_refused() {
        let short = shared_file(1, 0).unwrap();
        assert!(SharedMap::new(&short, 2).is_err());
        assert!(SharedMap::new(&tempfile::tempfile().unwrap(), 0).is_err());
    }
}
