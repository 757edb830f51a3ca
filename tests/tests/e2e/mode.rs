//! How far recovery goes is changed while an engine hangs: the pod that runs is told, and is the same pod all the while.

use anyhow::{Result, ensure};
use truebeat_tests::times::Times;

use crate::recovery::{LONG, one_serving, removed};
use crate::world::{World, answered, members, restarted, restarts, uid};

pub async fn story(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let (pod, endpoints, load) = one_serving(world, "told", "{mode: Fence, lastReplica: Fence}").await?;
    let (born, before) = (uid(&*world.pod(&pod)?), restarts(&*world.pod(&pod)?, "engine"));
    let set = |mode: &str| {
        let patch = format!(r#"{{"spec":{{"recovery":{{"mode":"{mode}"}}}}}}"#);
        world.kubectl(&["patch", "infd", "told", "--type=merge", "-p", &patch])
    };
    let frozen = times.act("SIGUSR2 to the engine; the mode is Fence");
    world.freeze(&pod)?;
    times.seen("its endpoint is away", endpoints.flip(&pod, false, frozen, LONG).await?);

    let observed = times.act("kubectl patch infd: mode Observe, in the middle of the stall");
    set("Observe")?;
    times.seen("the fence is lifted", endpoints.flip(&pod, true, observed, LONG).await?);
    ensure!(restarts(&*world.pod(&pod)?, "engine") == before, "the engine was restarted in mode Observe");

    let recovers = times.act("mode Recover");
    set("Recover")?;
    times.seen("it is fenced", endpoints.flip(&pod, false, recovers, LONG).await?);
    restarted(world, &pod, before + 1, recovers, times).await?;
    times.seen("it serves", endpoints.flip(&pod, true, recovers, LONG).await?);
    answered(&load).await?;
    ensure!(members(&world.pods, "told") == [pod.clone()] && uid(&*world.pod(&pod)?) == born, "another pod is there");
    let sets = world.kubectl(&["get", "rs", "-l", "inference.truebeat.io/deployment=told", "-o", "name"])?;
    ensure!(sets.lines().count() == 1, "the change rolled: {sets}");
    times.now("one ReplicaSet, the same pod");
    world.quiet("told").await?;
    removed(world, "told").await
}
