//! A thread that is there before it is needed (D8). What may block is done beside the runtime, on threads that end when nothing was asked of
//! them for a while. Where the kernel then makes no more (a limit of processes, a cgroup's of pids) the runtime panics at whoever asks: the
//! supervisor, which must never end, ended with an engine that died meanwhile. As long as one thread lives it does all of it in turn.

use std::time::Duration;

use tokio::runtime::Builder;

/// A thread of which nothing is asked for so long ends: what an episode needed is not kept.
const IDLE_MAX: Duration = Duration::from_secs(30);
/// One is asked this often for nothing: seldom, for it wakes a process that may be at rest, and twice before it would end.
const ASKED_EVERY: Duration = Duration::from_secs(12);

/// For a runtime that [`keep_one`] runs on.
pub fn ends_late(runtime: &mut Builder) -> &mut Builder {
    runtime.thread_keep_alive(IDLE_MAX)
}

/// Sees to it that there is one. Runs for ever.
pub async fn keep_one() {
    loop {
        // where there is none and none can be made that panics, and costs nobody but this task
        let _ = tokio::spawn(async { tokio::task::spawn_blocking(|| ()).await }).await;
        tokio::time::sleep(ASKED_EVERY).await;
    }
}
