//! This program, started anew in another role: a child that may hang or die in its stead. It reads one link, gives its own process a name, and
//! starts nothing itself.

use std::ffi::CStr;
use std::path::Path;

/// This program itself, also after its file was replaced or removed.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

/// Does the program know our roles? One that only uses this library (a test's) would take their words for its own.
pub fn is_truebeat() -> bool {
    let name = std::fs::read_link(OWN_PROGRAM).ok();
    let name = name.as_deref().and_then(Path::file_name);
    name.is_some_and(|name| name.to_string_lossy().starts_with("truebeat"))
}

/// What the kernel calls this process from now on, in 15 letters at most: for whoever looks at `top`, at a core file, or at the kernel's word of
/// whom it killed for memory. Whoever is started by [`OWN_PROGRAM`] is called `exe`, as half a machine is. For the first thread, whose name it is.
pub fn be_called(name: &CStr) {
    // it goes on without
    let _ = nix::sys::prctl::set_name(name);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_what_the_kernel_tells() {
        let called = std::thread::spawn(|| {
            be_called(c"truebeat-detect");
            std::fs::read_to_string("/proc/thread-self/comm").unwrap()
        });
        assert_eq!(called.join().unwrap(), "truebeat-detect\n");
    }
}
