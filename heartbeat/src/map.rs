//! A writer's shared mapping of what it writes, and a reader's of what nobody can cut: the only `unsafe` of this crate.
//!
//! Of pages only the writer maps (H7: stores without a syscall). The reader never does: a mapping of a file that somebody else
//! can truncate is a SIGBUS (H8). Memory that is sealed against that can be read without a syscall as well.
#![allow(unsafe_code, reason = "mmap and munmap have no safe form; each block argues for itself")]

use std::fs::File;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// A shared, writable mapping of a file's first words; unmapped on drop.
#[derive(Debug)]
pub(crate) struct Map<const WORDS: usize> {
    words: NonNull<[AtomicU64; WORDS]>,
}

impl<const WORDS: usize> Map<WORDS> {
    const BYTES: usize = WORDS * 8;

    /// Maps so many words of `file`, which must be open for reading and writing and that long.
    ///
    /// # Errors
    /// `EINVAL` for a file that is too short (a store beyond its end would be a SIGBUS), else what mmap says.
    pub(crate) fn shared(file: &File) -> Result<Self, Errno> {
        Self::mapped(file, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)
    }

    fn mapped(file: &File, access: ProtFlags) -> Result<Self, Errno> {
        let long_enough = file.metadata().is_ok_and(|m| m.len() >= Self::BYTES as u64);
        let length = NonZeroUsize::new(Self::BYTES).filter(|_| long_enough).ok_or(Errno::EINVAL)?;
        // SAFETY: a new mapping at an address that the kernel chooses aliases no Rust object; `length` is not 0.
        let address = unsafe { mmap(None, length, access, MapFlags::MAP_SHARED, file, 0)? };
        Ok(Self { words: address.cast() })
    }

    /// The words. Other processes may change them at any time, which is why they are atomics.
    #[inline]
    pub(crate) fn words(&self) -> &[AtomicU64; WORDS] {
        // SAFETY: the mapping is of all these words, page-aligned (so 8-aligned), readable and (but for a `View`, which only loads)
        // writable, and lives as long as `self`. Any bytes are a valid AtomicU64, and all access in this process is by these atomics.
        unsafe { self.words.as_ref() }
    }
}

/// A mapping for the eyes alone of memory that cannot be cut any more: no load can be a SIGBUS.
#[derive(Debug)]
pub(crate) struct View<const WORDS: usize>(Map<WORDS>);

impl<const WORDS: usize> View<WORDS> {
    /// Maps so many words of `file`, which must be open for reading, that long, and sealed against becoming shorter.
    ///
    /// # Errors
    /// `EPERM` for memory that is not sealed, `EINVAL` for what is no such memory or too short, else what mmap says.
    pub(crate) fn sealed(file: &File) -> Result<Self, Errno> {
        let seals = SealFlag::from_bits_truncate(fcntl(file, FcntlArg::F_GET_SEALS)?);
        if !seals.contains(SealFlag::F_SEAL_SHRINK) {
            return Err(Errno::EPERM);
        }
        Map::mapped(file, ProtFlags::PROT_READ).map(Self)
    }

    /// One word as it is now.
    #[inline]
    pub(crate) fn load_relaxed(&self, word: usize) -> u64 {
        self.0.words()[word].load(Ordering::Relaxed)
    }
}

impl<const WORDS: usize> Drop for Map<WORDS> {
    fn drop(&mut self) {
        // SAFETY: address and length are those of `mapped`; `words` borrows from `self`, so no reference is left.
        // A failure would leave a few KiB mapped, which harms nobody: nothing to do about it in a drop.
        let _ = unsafe { munmap(self.words.cast(), Self::BYTES) };
    }
}

// SAFETY: the mapping belongs to no thread, and `words` gives atomics alone.
unsafe impl<const WORDS: usize> Send for Map<WORDS> {}
// SAFETY: as above: shared access is by atomics.
unsafe impl<const WORDS: usize> Sync for Map<WORDS> {}
