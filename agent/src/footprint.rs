//! Gives back what start-up alone has touched (2c). Of the program's own files: text and constants that a later instruction needs come
//! back from the page cache, a fault each; what nobody needs again stays out of the process's resident memory. A fault maps the pages
//! around it as well, sixteen or all that the page cache keeps together, but none of another mapping: so for a minute each page is a
//! mapping of its own, and what is needed in that minute comes back alone. Of the heap: whole pages that hold nothing any more, which the
//! C library keeps in case somebody asks again. Of the first thread's stack: what lies far beyond its end, where reading the command line
//! and starting up had been.
//!
//! May touch `/proc/self/smaps`, the heap, the stack and the mappings of this process.

use std::time::Duration;

use nix::libc::c_void;
use nix::sys::mman::{MmapAdvise, madvise};

/// Start-up is over by then, on a quiet machine; on a busy one by the next time, for the second pause is ten times as long.
const FIRST_AFTER: Duration = Duration::from_secs(5);
/// What an episode needed (stacks, packing) is not kept for ever.
const EVERY: Duration = Duration::from_secs(600);
/// So much longer than the pause before it is a pause, up to that.
const GROWTH: u32 = 10;

/// For so long what comes back comes back by single pages: whatever a healthy process does, it does within a minute. No longer, for each
/// mapping is a little memory of the kernel's.
const APART_FOR: Duration = Duration::from_secs(60);

/// Of a process's life so far: when it gives back for the second time, after which nothing of start-up is left, and when that is over.
pub const SECOND_TIME: (Duration, Duration) = {
    let begins = FIRST_AFTER.saturating_add(APART_FOR).saturating_add(FIRST_AFTER.saturating_mul(GROWTH));
    (begins, begins.saturating_add(APART_FOR))
};
/// From one time to the next, but to the third, which comes somewhat sooner.
pub const CYCLE: Duration = EVERY.saturating_add(APART_FOR);

const PAGE: usize = 4 << 10;
/// Of the stack beyond its end: what a call may be using just then, and what the next ones will.
const STACK_KEPT: usize = 32 << 10;

/// Keeps this process small. Runs for ever.
pub async fn keep_small() {
    let mut pause = FIRST_AFTER;
    loop {
        tokio::time::sleep(pause).await;
        pause = (pause * GROWTH).min(EVERY);
        let files = give_back();
        tokio::time::sleep(APART_FOR).await;
        files.into_iter().for_each(join);
    }
}

/// Returns what of it is in single pages now.
fn give_back() -> Vec<Range> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    forget_stack(&smaps);
    let files = clean_file_mappings(&smaps);
    drop(smaps);
    for file in &files {
        part(*file);
        forget(*file);
    }
    trim_heap();
    files
}

/// Address and length.
type Range = (usize, usize);

/// Mappings of files that may not be written to and of which no page was ever copied: each of their pages is the file's.
fn clean_file_mappings(smaps: &str) -> Vec<Range> {
    let mut clean = Vec::new();
    let mut candidate = None;
    for line in smaps.lines() {
        match line.strip_prefix("Anonymous:") {
            Some(kib) => clean.extend(candidate.take().filter(|_| kib.trim() == "0 kB")),
            None if is_header(line) => candidate = read_only_file(line),
            None => {}
        }
    }
    clean
}

/// A mapping's first line begins with its range, the others with a name and a colon.
fn is_header(line: &str) -> bool {
    line.split(' ').next().is_some_and(|word| word.contains('-') && !word.ends_with(':'))
}

/// `7f00-7f10 r-xp 00001000 fe:00 1234   /path`: a private mapping of a file that nobody may write to.
fn read_only_file(line: &str) -> Option<Range> {
    let mut words = line.split_ascii_whitespace();
    let (range, rights, _, _, inode) = (words.next()?, words.next()?, words.next()?, words.next()?, words.next()?);
    let (from, to) = range.split_once('-')?;
    let (from, to) = (usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?);
    let wanted = matches!(rights, "r-xp" | "r--p") && inode != "0" && words.next()?.starts_with('/');
    wanted.then_some((from, to.checked_sub(from)?))
}

/// Makes each page of a file's mapping one of its own: neighbours differ in what a core dump shall hold of them, which for pages of a file
/// is nothing anyhow.
fn part((from, length): Range) {
    (from..from.saturating_add(length))
        .step_by(2 * PAGE)
        .for_each(|page| advise((page, PAGE), MmapAdvise::MADV_DONTDUMP));
}

/// Makes one mapping of it again. What is resident stays so.
fn join(file: Range) {
    advise(file, MmapAdvise::MADV_DODUMP);
}

fn forget(file: Range) {
    advise(file, MmapAdvise::MADV_DONTNEED);
}

/// Of a clean mapping of a file, and one of the three advices above.
#[allow(unsafe_code, reason = "giving pages back has no safe form")]
fn advise((from, length): Range, advice: MmapAdvise) {
    let Some(address) = std::ptr::NonNull::new(std::ptr::with_exposed_provenance_mut::<c_void>(from)) else { return };
    // SAFETY: the range is a private mapping of a file, not writable, none of whose pages is a copy: dropping them changes no byte that
    // anybody can read, for the next access maps the file's same page again; and what a core dump holds of them changes none either.
    // Should it have been unmapped since, the kernel refuses.
    let _ = unsafe { madvise(address, length, advice) };
}

/// The mapping of the first thread's stack.
fn stack(smaps: &str) -> Option<Range> {
    let line = smaps.lines().find(|line| line.ends_with("[stack]"))?;
    let (from, to) = line.split(' ').next()?.split_once('-')?;
    let (from, to) = (usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?);
    Some((from, to.checked_sub(from)?))
}

/// Of a stack that grows down to `end`, the whole pages beyond it, but for some that whoever is called from here may be using. Nothing
/// where that is another thread's stack.
fn beyond((from, length): Range, end: usize) -> Option<Range> {
    let used = end.checked_sub(from).filter(|used| *used < length)?;
    let unused = used.checked_sub(STACK_KEPT)? / PAGE * PAGE;
    (unused > 0).then_some((from, unused))
}

#[inline(never)]
#[allow(unsafe_code, reason = "giving pages back has no safe form")]
fn forget_stack(smaps: &str) {
    let here = 0_u8;
    let Some((from, length)) = stack(smaps).and_then(|stack| beyond(stack, (&raw const here).addr())) else { return };
    let Some(address) = std::ptr::NonNull::new(std::ptr::with_exposed_provenance_mut::<c_void>(from)) else { return };
    // SAFETY: the range is of this very thread's stack, since `here` lies in it, and beyond its end by more than what is called from here
    // takes: no frame that is live, and none that will be before it is written to, has a byte in it. Whoever grows into it finds zeros.
    let _ = unsafe { madvise(address, length, MmapAdvise::MADV_DONTNEED) };
}

/// Whole free pages of the heap go back to the kernel. Other C libraries than GNU's have no word for it, and keep less.
#[cfg(target_env = "gnu")]
#[allow(unsafe_code, reason = "the C library's own call has no safe form")]
fn trim_heap() {
    // SAFETY: it takes the allocator's own locks, moves and frees nothing that anybody holds, and may be called from any thread.
    let _ = unsafe { nix::libc::malloc_trim(0) };
}

#[cfg(not(target_env = "gnu"))]
fn trim_heap() {}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
1000-3000 r-xp 00001000 fe:00 12                         /usr/bin/x
Rss:                   8 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
3000-4000 r--p 00003000 fe:00 12                         /usr/bin/x
Rss:                   4 kB
Anonymous:             4 kB
4000-5000 rw-p 00004000 fe:00 12                         /usr/bin/x
Anonymous:             0 kB
5000-6000 r--p 00000000 00:00 0                          [vvar]
Anonymous:             0 kB
6000-7000 r--s 00000000 00:1a 77                         /dev/shm/page
Anonymous:             0 kB
8000-9000 r--p 00000000 fe:00 13                         /usr/lib/y
Anonymous:             0 kB
";

    #[test]
    fn only_whole_pages_of_files_are_given_back() {
        assert_eq!(clean_file_mappings(SMAPS), [(0x1000, 0x2000), (0x8000, 0x1000)]);
    }

    #[test]
    fn of_the_stack_only_what_lies_far_beyond_its_end_is_given_back() {
        let stack =
            stack("8000-9000 rw-p 00000000 00:00 0\n40000-80000 rw-p 00000000 00:00 0                   [stack]\n");
        assert_eq!(stack, Some((0x40000, 0x40000)));
        let beyond = |end| beyond((0x40000, 0x40000), end);
        assert_eq!(beyond(0x7f123), Some((0x40000, 0x37000)));
        assert_eq!([0x48fff, 0x40001, 0x3ffff, 0x80000].map(beyond), [None; 4]);
    }

    /// Whoever gives back all mappings of files, and whoever counts pages of one.
    static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());

    #[test]
    fn whatever_was_given_back_is_there_again() {
        let _alone = ONE_AT_A_TIME.lock();
        let words = "what a program says is constant".to_owned();
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mine = clean_file_mappings(&smaps);
        assert!(!mine.is_empty());
        mine.into_iter().for_each(forget);
        assert_eq!(words, "what a program says is constant");
    }

    /// How many pages of a range are resident.
    fn resident(file: Range) -> usize {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        let mut kib = 0;
        for line in smaps.lines() {
            if is_header(line) {
                let from = usize::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
                inside = (file.0..file.0 + file.1).contains(&from);
            } else if let Some(rss) = line.strip_prefix("Rss:").filter(|_| inside) {
                kib += rss.trim().trim_end_matches(" kB").parse::<usize>().unwrap();
            }
        }
        kib * 1024 / PAGE
    }

    #[test]
    fn what_comes_back_while_pages_are_apart_comes_alone_and_stays_alone() {
        let _alone = ONE_AT_A_TIME.lock();
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &vec![7; 64 * PAGE]).unwrap();
        let length = std::num::NonZeroUsize::new(64 * PAGE).unwrap();
        let (read, private) = (nix::sys::mman::ProtFlags::PROT_READ, nix::sys::mman::MapFlags::MAP_PRIVATE);
        #[allow(unsafe_code, reason = "mmap has no safe form")]
        // SAFETY: a new mapping at an address that the kernel chooses aliases no Rust object; it is never unmapped.
        let mapped = unsafe { nix::sys::mman::mmap(None, length, read, private, &file, 0) }.unwrap();
        let range = (mapped.as_ptr().expose_provenance(), length.get());
        let touch = |page: usize| {
            #[allow(unsafe_code, reason = "a mapping's bytes have no safe form")]
            // SAFETY: within the mapping, which is readable, of a file that is as long and that nobody cuts.
            let byte = unsafe { mapped.cast::<u8>().add(page * PAGE).read_volatile() };
            assert_eq!(byte, 7);
        };
        // it passes over pages that are on their way to the disk just then
        let around = (0..1_000).any(|tries| {
            std::thread::sleep(Duration::from_millis(u64::from(tries > 0) * 10));
            forget(range);
            touch(20);
            resident(range) > 1
        });
        assert!(around, "the kernel maps what lies around");
        part(range);
        forget(range);
        assert_eq!(resident(range), 0);
        [20, 21, 63].into_iter().for_each(touch);
        assert_eq!(resident(range), 3);
        join(range);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let from = format!("{:x}-{:x} ", range.0, range.0 + range.1);
        assert!(maps.lines().any(|line| line.starts_with(&from)), "one mapping again");
        assert_eq!(resident(range), 3);
    }

    #[test]
    fn what_the_heap_no_longer_holds_goes_back_and_what_it_holds_stays() {
        let kept: Vec<Vec<u8>> = (0..4_000).map(|n| vec![n as u8; 4_000]).collect();
        let held: Vec<Vec<u8>> = kept.iter().step_by(100).cloned().collect();
        drop(kept);
        let resident = || {
            let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
            statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap()
        };
        let before = resident();
        trim_heap();
        assert!(resident() + 1_000 < before, "{before} pages, then {}", resident());
        assert!(held.iter().enumerate().all(|(n, bytes)| bytes.iter().all(|byte| *byte == (n * 100) as u8)));
    }
}
