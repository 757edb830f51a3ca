//! A2 on real processes: between the leading operator and the API server stands somebody who keeps every connection open and lets nothing through
//! it any more; only whoever connects anew gets through.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::json;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use truebeat_tests::fleet::identity::SERVER;
use truebeat_tests::fleet::operator::{ACCOUNT, Candidate, NAMESPACE, Operator};
use truebeat_tests::wait::until_async;

use crate::world::{BOUND, OPERATOR_ARGS, World};

/// How the operator says that a watch is open and silent (`controllers/watch.rs`).
const NOTICED: &str = "silent for 30 s";

/// Passes bytes on between a client and the API server, until it is silenced. Ends when it is dropped.
struct Between {
    address: SocketAddr,
    silenced: watch::Sender<u32>,
    _work: JoinSet<()>,
}

impl Between {
    async fn start() -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("listen")?;
        let address = listener.local_addr()?;
        let (silenced, heard) = watch::channel(0);
        let mut work = JoinSet::new();
        work.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                connections.spawn(pass_on(client, heard.clone()));
            }
        });
        Ok(Between { address, silenced, _work: work })
    }

    /// Whatever is connected now stays so, and hears nothing any more.
    fn silence(&self) {
        self.silenced.send_modify(|times| *times += 1);
    }
}

async fn pass_on(mut client: TcpStream, mut silenced: watch::Receiver<u32>) {
    let before = *silenced.borrow();
    let Ok(mut server) = TcpStream::connect(SERVER).await else { return };
    tokio::select! {
        _ = copy_bidirectional(&mut client, &mut server) => return,
        _ = silenced.wait_for(|times| *times > before) => {}
    }
    std::future::pending::<()>().await; // both ends stay open
}

/// A watch that is open and silent is noticed, listed anew, and what it has kept quiet about is seen; by the same process.
pub async fn black_holed(world: &World<'_>) -> Result<()> {
    world.tenant("silenced")?;
    let pods = world.deploy("silenced", "chat", json!({})).await?;
    let pod = pods.first().context("a pod")?;
    let between = Between::start().await?;
    let candidate = Candidate {
        binary: &world.programs.operator,
        name: "operator-silenced",
        port: 9504,
        account: (NAMESPACE, ACCOUNT),
        args: &OPERATOR_ARGS,
    };
    let operator = candidate.start_through(world.cluster, &world.client, between.address).await?;
    world.operator.process.signal(Signal::SIGSTOP);
    let story = async {
        leads(&operator).await?;
        operator.ready().await?;
        between.silence();
        // the watch of pods tells of a stall, or a pass that was under way when the silence came and is tried again
        let took = world.stall_until_granted(pod, "silenced-1").await?;
        println!("      granted {:.1} s after the connections went silent", took.as_secs_f64());
        let log = world.cluster.layout().log("operator-silenced");
        until_async("the operator to notice that its watches are silent", BOUND, || async {
            let text = std::fs::read_to_string(&log).context("its log")?;
            Ok(text.contains(NOTICED).then_some(()))
        })
        .await?;
        operator.ready().await?;
        ensure!(operator.process.alive(), "it is another process");
        Ok(())
    };
    let result = story.await;
    world.operator.process.signal(Signal::SIGCONT);
    operator.process.end(BOUND);
    leads(&world.operator).await?;
    result?;
    world.recover(pod, "silenced-1").await?;
    world.leave("silenced").await
}

async fn leads(operator: &Operator) -> Result<()> {
    until_async("the operator to lead", BOUND, || async {
        Ok((operator.metric("truebeat_operator_leader", "").await? == 1.0).then_some(()))
    })
    .await
}
