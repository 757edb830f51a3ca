//! By what two stalls are known to be the same disease: class, where the processes stand, flags, image. Pure.
//!
//! What differs between two runs of the same disease is left out: pids, states, lines, times, ports, addresses, directories.

use super::proc_facts::MainThread;
use super::stacks::PythonThread;

/// Calls of one Python main thread that make its place.
const FRAMES_MAX: usize = 4;
/// Words in a flag's name that make its value this very process's own.
const OWN_WORDS: [&str; 14] = [
    "port", "ports", "listen", "host", "hostname", "addr", "address", "dir", "path", "file", "log", "nonce", "uds",
    "seed",
];

/// Where the processes stand, best source first.
#[derive(Debug, Clone, Copy, Default)]
pub struct Places<'a> {
    /// What processes told of themselves (H10).
    pub told: &'a [(i32, Vec<String>)],
    pub pythons: &'a [(i32, PythonThread)],
    pub mains: &'a [MainThread],
}

/// 16 hex digits: the same on every replica and in every run with the same disease.
///
/// `command_line` is the redacted one; `image` is whatever names the engine's program.
pub fn fingerprint(class: &str, places: Places<'_>, command_line: &[String], image: &str) -> String {
    let mut hash = Fnv1a::default();
    hash.part(class);
    top_frames(places).iter().for_each(|place| hash.part(place));
    hash.part("--");
    flags(command_line).iter().for_each(|flag| hash.part(flag));
    hash.part("--");
    hash.part(image);
    format!("{:016x}", hash.0)
}

/// The places, each once and in a fixed order: eight ranks that stand in one place are one place.
pub fn top_frames(places: Places<'_>) -> Vec<String> {
    let mut all: Vec<String> = if !places.told.is_empty() {
        places.told.iter().map(|(_, frames)| frames.join(" < ")).collect()
    } else if !places.pythons.is_empty() {
        places.pythons.iter().map(|(_, thread)| frames(thread).join(" < ")).collect()
    } else {
        places.mains.iter().map(|main| format!("{} in {}", main.comm, wait_of(&main.wchan))).collect()
    };
    all.sort();
    all.dedup();
    all
}

/// What a kernel function waits for. Kernels rename them (`futex_wait_queue_me`, `futex_wait_queue`, `futex_do_wait`), and compilers append to
/// their names (`.isra.0`): a fleet is of several kernels while its nodes are upgraded.
fn wait_of(wchan: &str) -> &str {
    const WAITS: [(&str, &str); 6] = [
        ("futex", "futex"),
        ("nanosleep", "nanosleep"),
        ("poll", "poll"),
        ("select", "poll"),
        ("pipe", "pipe"),
        ("do_wait", "wait"),
    ];
    let known = WAITS.iter().find(|(part, _)| wchan.contains(part));
    known.map_or_else(|| wchan.split('.').next().unwrap_or(wchan), |(_, wait)| wait)
}

/// The innermost calls, without lines and directories.
pub fn frames(thread: &PythonThread) -> Vec<String> {
    let name = |file: &str| file.rsplit('/').next().unwrap_or(file).to_owned();
    thread.frames.iter().take(FRAMES_MAX).map(|frame| format!("{} ({})", frame.function, name(&frame.file))).collect()
}

/// The flags that make a configuration. Of positional paths the last part.
fn flags(command_line: &[String]) -> Vec<String> {
    let mut kept = Vec::new();
    let mut skip_value = false;
    for word in command_line.iter().skip(1) {
        let own_value = std::mem::replace(&mut skip_value, false) && !word.starts_with('-');
        if own_value {
            continue;
        }
        let name = word.split('=').next().unwrap_or(word);
        if word.starts_with('-') && is_own(name) {
            // whether it is set is part of the configuration, to what is not
            skip_value = !word.contains('=');
            kept.push(name.to_owned());
            continue;
        }
        kept.push(if word.contains('/') && !word.contains(' ') { last_part(word) } else { word.clone() });
    }
    kept
}

fn is_own(flag: &str) -> bool {
    flag.trim_start_matches('-').split(['-', '_', '.']).any(|word| OWN_WORDS.contains(&word))
}

fn last_part(word: &str) -> String {
    word.trim_end_matches('/').rsplit('/').next().unwrap_or(word).to_owned()
}

/// FNV-1a, 64 bits: stable across versions and machines, which the standard library's hasher does not promise.
struct Fnv1a(u64);

impl Default for Fnv1a {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv1a {
    /// Adds one part and a separator, so that `ab, c` is not `a, bc`.
    fn part(&mut self, text: &str) {
        for byte in text.bytes().chain(std::iter::once(0)) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn main(comm: &str, state: char, wchan: &str) -> MainThread {
        MainThread { pid: 7, comm: comm.to_owned(), state, wchan: wchan.to_owned() }
    }

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn the_fingerprint_is_stable_and_tells_diseases_apart() {
        let of = |class: &str, mains: &[MainThread], line: &str, image: &str| {
            fingerprint(class, Places { mains, ..Places::default() }, &words(line), image)
        };
        let one = of("StepStalled", &[main("a", 'S', "futex"), main("b", 'R', "0")], "vllm --tp=8 --port 1", "i:1");
        assert_eq!(one.len(), 16);
        let mut other = [main("b", 'S', "0"), main("a", 'S', "futex")];
        other[0].pid = 99;
        let again = of("StepStalled", &other, "/usr/bin/vllm --tp=8 --port 4711", "i:1");
        assert_eq!(again, one, "order, pid, state, port and the program's place do not matter");
        for different in [
            of("DeviceWait", &other, "vllm --tp=8 --port 1", "i:1"),
            of("StepStalled", &other, "vllm --tp=4 --port 1", "i:1"),
            of("StepStalled", &other, "vllm --tp=8", "i:1"),
            of("StepStalled", &other[..1], "vllm --tp=8 --port 1", "i:1"),
            of("StepStalled", &other, "vllm --tp=8 --port 1", "i:2"),
        ] {
            assert_ne!(different, one);
        }
    }

    #[test]
    fn what_a_process_tells_of_itself_comes_before_what_is_seen_of_it() {
        let mains = [main("engine", 'S', "futex")];
        let told = |frame: &str| {
            vec![(7, vec![frame.to_owned(), "step".to_owned()]), (8, vec![frame.to_owned(), "step".to_owned()])]
        };
        let (sleeps, spins) = (told("sleep"), told("spin"));
        let of = |told: &[(i32, Vec<String>)]| {
            fingerprint("StepStalled", Places { told, mains: &mains, pythons: &[] }, &words("e --x"), "")
        };
        assert_ne!(of(&sleeps), of(&spins), "another cause, another fingerprint");
        assert_eq!(of(&sleeps), of(&sleeps[..1]), "more ranks in one place are one place");
        assert_eq!(top_frames(Places { told: &sleeps, ..Places::default() }), ["sleep < step"]);
    }

    #[test]
    fn a_wait_has_one_name_under_every_kernel() {
        for (names, wait) in [
            (&["futex_wait_queue_me", "futex_wait_queue", "futex_do_wait"][..], "futex"),
            (&["hrtimer_nanosleep", "do_nanosleep"], "nanosleep"),
            (&["ep_poll", "do_sys_poll", "poll_schedule_timeout.constprop.0", "do_select"], "poll"),
            (&["pipe_read", "anon_pipe_read"], "pipe"),
            (&["uvm_fault.isra.0", "uvm_fault"], "uvm_fault"),
            (&["0"], "0"),
        ] {
            names.iter().for_each(|name| assert_eq!(wait_of(name), wait, "{name}"));
        }
    }

    #[test]
    fn flags_are_kept_without_what_differs_from_start_to_start() {
        let line =
            "vllm serve /models/tiny --port 80 --host=h --enforce-eager --api-key [redacted] --log-dir /x --tp 2";
        let kept = flags(&words(line)).join(" ");
        assert_eq!(kept, "serve tiny --port --host --enforce-eager --api-key [redacted] --log-dir --tp 2");
    }

    #[test]
    fn the_hash_is_the_published_one() {
        let mut hash = Fnv1a::default();
        hash.part("");
        // one zero byte: the offset basis times the prime
        assert_eq!(hash.0, 0xaf63_bd4c_8601_b7df);
    }
}
