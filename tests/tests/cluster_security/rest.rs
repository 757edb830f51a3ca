//! P7 on a real API server: whoever has nothing to change writes nothing, however often something makes them look.

use anyhow::{Result, ensure};
use serde_json::json;
use tokio::time::{Duration, sleep};
use truebeat_tests::product;
use truebeat_tests::wait::until_async;

use crate::world::{BOUND, World, infd};

/// So long without a write is rest: longer than any pause that a pass which failed is given at first.
const REST: Duration = Duration::from_secs(6);
const TOUCHES: usize = 10;

/// Passes that find everything as it should be leave it so: after foreign labels on all that it watches, and after its very manifest anew.
pub async fn silent(world: &World<'_>) -> Result<()> {
    world.tenant("resting")?;
    world.deploy("resting", "chat", json!({"replicas": 3})).await?;
    until_async("the operator to come to rest", BOUND, || async {
        let asked = world.asked()?.len();
        sleep(REST).await;
        Ok(world.tried_since(asked)?.is_empty().then_some(()))
    })
    .await?;
    let asked = world.asked()?.len();
    let passes = || world.operator.metric("truebeat_operator_reconciles_total", "");
    let status = || world.json(&["-n", "resting", "infd", "chat"]).map(|mut infd| infd["status"].take());
    let first = status()?;
    for touch in 0..TOUCHES {
        let before = passes().await?;
        let label = format!("example.com/touched={touch}");
        // (an annotation would do for all but the Deployment, of which it is another generation, which its controller has to observe)
        for [kind, name] in [["infd", "chat"], ["deployments.apps", "chat"], ["services", "chat"], ["pods", "--all"]] {
            world.cluster.kubectl(&["-n", "resting", "label", "--overwrite", kind, name, &label, "-o=name"])?;
        }
        product::apply(world.cluster, &infd("resting", "chat", json!({"replicas": 3})).to_string())?;
        until_async("a pass over what was touched", BOUND, || async { Ok((passes().await? > before).then_some(())) })
            .await?;
    }
    sleep(REST).await;
    let tried = world.tried_since(asked)?;
    let what: Vec<String> = tried.iter().map(|entry| format!("{} {}", entry.verb, entry.object())).collect();
    ensure!(
        what.is_empty(),
        "nothing had changed, and it wrote: {what:#?}\nstatus before: {first}\nand after: {}",
        status()?
    );
    println!(
        "      {TOUCHES} touches of each object, {} requests of the operator, no write",
        world.asked()?.len() - asked
    );
    world.leave("resting").await
}
