//! The kinds of history: every hang of the corpus (H1–H13), every healthy look-alike (B1–B9), the environment's noise, and mutations.

/// What the truth of a history is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Truth {
    /// Nothing is ever wrong with the engine itself.
    Benign,
    /// It hangs at one moment and stays so.
    Hang,
    /// It hangs and goes on by itself: it may be fenced, and what is done after a confirmation is the policy's.
    Passing,
}

/// One kind.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    pub name: &'static str,
    pub truth: Truth,
    /// How often it is dealt, relative to the others; 0: it is lived by name alone.
    pub weight: u64,
    pub what: &'static str,
}

const fn hang(name: &'static str, weight: u64, what: &'static str) -> Kind {
    Kind { name, truth: Truth::Hang, weight, what }
}

const fn benign(name: &'static str, weight: u64, what: &'static str) -> Kind {
    Kind { name, truth: Truth::Benign, weight, what }
}

/// All kinds, in the order of the table.
pub const KINDS: &[Kind] = &[
    hang("H1", 2, "device wait under load: spinning thread, busy and cold GPU"),
    hang("H2", 2, "deadlock with few requests: GPU busy at a third of its power"),
    hang("H3", 2, "prefill kernel of the first request after idle: gauges frozen at zero"),
    hang("H4", 2, "the scheduler admits nobody: running 0, waiting climbs"),
    hang("H5", 2, "shared-memory collective: ranks spin"),
    hang("H6", 2, "the engine core's process is gone, the front end answers"),
    hang("H7", 2, "SGLang's scheduler is gone, /health answers 200"),
    hang("H8", 2, "livelock: steps turn, nothing is handed out"),
    hang("H9", 2, "decode starves: prompts are prefilled again and again"),
    hang("H10", 2, "grammar compiler spins in the core with a few requests"),
    hang("H11", 2, "one rank of several diverges, the others spin in a collective"),
    hang("H12", 2, "a stranger's socket blocks the core: every thread asleep"),
    hang("H13", 1, "a device wait that survives SIGKILL"),
    hang("S4", 2, "start-up stands still"),
    hang("frontend", 2, "the API server is stopped, the core is well"),
    hang("stopped", 2, "SIGSTOP of the core, at any moment, also between two bursts"),
    hang("crash", 1, "the process dies"),
    hang("native", 4, "goal 1b: a native engine's step freezes under a steady load"),
    hang("warm", 4, "goal 1c: a foreign engine's step freezes while it streams through the gate"),
    hang("mutant", 8, "any fault, look, moment, load, missing signal"),
    hang("dp-one", 3, "one of 2 to 4 data-parallel engines of a pod hangs, the others serve on"),
    hang("dp-all", 1, "all data-parallel engines of a pod hang at one moment"),
    Kind { name: "c0", truth: Truth::Passing, weight: 2, what: "a freeze of 10 to 60 s that ends by itself" },
    benign("B1", 3, "llama.cpp's lumps: no counter moves for a whole answer"),
    benign("B2", 3, "JIT of 30 to 70 s in mid-traffic, compiler children burning"),
    benign("B3", 3, "many long prompts in chunks: nobody gets a token for long"),
    benign("B4", 3, "saturated event loop: /health times out, chunks come in lumps"),
    benign("B5", 3, "crawling: a hundred times slower for a while"),
    benign("B6", 3, "throttling, cgroup freezer, debugger, VM pause"),
    benign("B7", 2, "CRIU restore: port closed until it is done"),
    benign("B8", 3, "sleep, pause, weight update under maintenance, LoRA swap"),
    benign("B9", 2, "idle nights"),
    benign("day", 6, "mixed load with light noise"),
    benign("agents", 3, "long prompts up to 128k tokens, chunked or in a single step"),
    benign("full", 2, "saturation: hundreds waiting"),
    benign("preempt", 2, "KV at 100 %: preemption storms"),
    benign("clients", 2, "clients that leave, and clients that do not read"),
    benign("late", 3, "heavy-tailed lateness of agent and engine on a loaded host"),
    benign("agent", 2, "the agent restarts, the gate restarts, signals go missing"),
    benign("scrapes", 2, "/metrics up to 3.4 s late, /health times out"),
    benign("dp", 3, "2 to 4 data-parallel engines in a pod: unequal loads, one idle, long prompts"),
    benign("dp-hard", 3, "the same, disturbed: one that crawls, JIT, a loaded host, restarts, sleep, missing signals"),
    benign("restarts", 2, "the engine is restarted: counters begin anew, start-ups slow and very slow"),
    benign("benign-mutant", 6, "any two disturbances at once, missing signals, a loaded host"),
    benign("tool", 2, "a front end that calls tools within a streamed answer"),
    benign("argument", 2, "a front end that holds an argument of a tool call back until it is whole"),
    benign("grammar", 2, "grammars that are compiled before their requests begin"),
    benign("fetch", 1, "start-ups that fetch their model over the network"),
    benign("argument-lumps", 0, "the same by engines that count tokens at an answer's end alone (known to fail)"),
    hang("excused", 4, "any hang, and something that excuses silence at the same moment"),
];

/// A kind by its name.
pub fn by_name(name: &str) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| kind.name == name)
}

/// The kind that a draw of 0.. deals.
pub fn deal(draw: u64) -> &'static Kind {
    const FIRST: &Kind = &KINDS[0];
    let total: u64 = KINDS.iter().map(|kind| kind.weight).sum();
    let mut left = draw % total.max(1);
    for kind in KINDS {
        if left < kind.weight {
            return kind;
        }
        left -= kind.weight;
    }
    FIRST
}
