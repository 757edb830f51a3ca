//! What a person on call sees, with the plugin of this very build: every command and its answer are written to `target/on-call.md`,
//! which `make on-call` makes `docs/on-call.md` of.

use std::fmt::Write as _;
use std::time::{Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use crds::EngineIncident;
use kube::ResourceExt;
use truebeat_tests::times::Times;

use crate::world::{BOUND, World, by_its_own_clock, restarted, restarts, two_serving};

const OUT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/on-call.md");
const BEGIN: &str = "\
# Three in the morning: what the on-call sees

Written by the story `on_call` from a real run (`make on-call`): a real control plane and kubelet, two replicas of our own engine under
load, of which one freezes while its `/health` goes on saying 200. Names, times and outputs are that run's own; the machine was a small one
with other work, so they are no claim.

The commands' names and rights: [runbooks](runbooks/README.md). Incidents that are `Recovered` when the page begins are left over from stories that ran
before on the same deployment; the page is about the one that is open.
";

/// The page as far as it is written.
struct Page<'a, 'w> {
    world: &'a World<'w>,
    text: String,
}

impl Page<'_, '_> {
    fn say(&mut self, words: &str) {
        let _ = write!(self.text, "\n{words}\n");
    }

    /// Runs a command of kubectl's in the namespace, as its user would, and writes it down with its answer.
    fn ask(&mut self, line: &str) -> Result<String> {
        self.show(line, |answer| answer.trim_end().to_owned())
    }

    /// The same, and writes down what `cut` leaves of the answer.
    fn show(&mut self, line: &str, cut: impl Fn(&str) -> String) -> Result<String> {
        let answer = self.world.as_typed(line)?;
        let _ = write!(self.text, "\n```console\n$ kubectl {line}\n{}\n```\n", cut(&answer));
        Ok(answer)
    }
}

pub async fn story(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let endpoints = world.endpoints("chat");
    let load = world.load("chat").await?;
    let pods = two_serving(world, &endpoints, &load).await?;
    let (victim, other) = (&pods[0], &pods[1]);
    let before = restarts(&*world.pod(victim)?, "engine");
    let mut page = Page { world, text: BEGIN.to_owned() };

    let (frozen, wall) = (times.act(&format!("SIGUSR2 to the engine of {victim}")), SystemTime::now());
    world.freeze(victim)?;
    times.seen("its endpoint is away", endpoints.flip(victim, false, frozen, BOUND).await?);
    let (at, incident) = world.incident("an incident", victim, frozen, |inc| Some(inc.name_any())).await?;
    times.seen("an incident tells of it", at);
    while_it_goes_on(&mut page, victim, &incident)?;
    times.now("asked while it goes on");

    restarted(world, victim, before + 1, frozen, times).await?;
    let outcome = |inc: &EngineIncident| inc.status.as_ref()?.outcome.clone().map(|_| inc.clone());
    let (at, ended) = world.incident("the incident's end", victim, frozen, outcome).await?;
    times.seen("the incident is closed", at);
    world.quiet("chat").await?;
    afterwards(&mut page, victim, &ended)?;
    times.note(&by_its_own_clock(&ended, wall)?);
    by_hand(&mut page, other, &endpoints).await?;
    world.quiet("chat").await?;
    std::fs::write(OUT, &page.text).with_context(|| format!("cannot write {OUT}"))?;
    times.note("every command and answer: target/on-call.md");
    Ok(())
}

fn while_it_goes_on(page: &mut Page<'_, '_>, victim: &str, incident: &str) -> Result<()> {
    page.say(
        "## It goes on\n\nThe first command, of your context's namespace (of another: `-n NAMESPACE`, of all: `-A`): which\n\
         deployments are not whole, and which incidents are open? The frozen replica is out of traffic already, the\n\
         other one serves.",
    );
    let all = page.ask("get infd,inc")?;
    ensure!(all.contains(incident) && all.contains("StepStalled"), "{all}");
    page.say("And why, in one screen:");
    let why = page.ask(&format!("truebeat why {victim}"))?;
    ensure!(why.contains("StepStalled"), "{why}");
    Ok(())
}

fn afterwards(page: &mut Page<'_, '_>, victim: &str, incident: &EngineIncident) -> Result<()> {
    let name = incident.name_any();
    page.say("## It is over\n\nNobody did anything; the record stays.");
    let all = page.ask("get infd,inc")?;
    ensure!(all.contains("Recovered"), "{all}");
    let said = page.ask(&format!("describe inc {name}"))?;
    ensure!(said.contains(&incident.spec.fingerprint) && said.contains("Serving At"), "{said}");
    page.say("The same for people:");
    let why = page.ask(&format!("truebeat why {name}"))?;
    ensure!(why.contains("StepStalled") && why.contains("Recovered"), "{why}");
    page.say("What was saved before the kill comes from the agent in the pod, as a file, and in one screen:");
    let evidence = page.ask(&format!("truebeat bundle {name}"))?;
    ensure!(evidence.contains(&incident.spec.fingerprint) && evidence.contains("steps"), "{evidence}");
    page.say("And whoever knows nothing of all this finds the reason where the kubelet puts it (the engine's part):");
    let pod = page.show(&format!("describe pod {victim}"), last_state)?;
    ensure!(last_state(&pod).contains("StepStalled"), "{pod}");
    Ok(())
}

/// From `Last State` of the engine to its restart count.
fn last_state(described: &str) -> String {
    let from =
        described.lines().skip_while(|line| *line != "  engine:").skip_while(|line| !line.contains("Last State"));
    let mut lines: Vec<&str> = Vec::new();
    for line in from {
        lines.push(line.trim_end());
        if line.contains("Restart Count") {
            break;
        }
    }
    lines.join("\n")
}

async fn by_hand(page: &mut Page<'_, '_>, pod: &str, endpoints: &truebeat_tests::endpoints::Endpoints) -> Result<()> {
    page.say(
        "## A replica that looks strange to you\n\nTake it out of traffic; nothing is restarted for it, what runs goes on.\n\
         The last one that serves is refused, for its clients would have nobody; `--even-if-last` takes it all the same.",
    );
    let fenced = Instant::now();
    let said = page.ask(&format!("truebeat fence {pod} --reason 'answers look odd'"))?;
    ensure!(said.contains(pod), "{said}");
    let away = endpoints.flip(pod, false, fenced, BOUND).await?;
    page.world.incident("a record", pod, fenced, |inc| (inc.spec.class == "FencedByPerson").then_some(())).await?;
    let open = page.ask("truebeat incidents --open")?;
    ensure!(open.contains("FencedByPerson"), "{open}");
    page.say("And back:");
    page.ask(&format!("truebeat unfence {pod}"))?;
    endpoints.flip(pod, true, away, BOUND).await.map(drop)
}
