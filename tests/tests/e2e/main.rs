//! The product on a real cluster, story by story, in one order on one cluster (starting it is most of a minute on a slow machine).
//! Each story prints its times. Words on the command line choose stories; the first two always run, the others stand on them.
//!
//! A harness of its own, because order and one cluster for all are the point; it speaks as the standard one does.

mod autoscale;
mod chart;
mod drain;
mod evidence;
mod freeze;
mod gitops;
mod hold;
mod kill;
mod kustomize;
mod lifecycle;
mod memory;
mod mid_drain;
mod mode;
mod network;
mod on_call;
mod poison;
mod probes;
mod recovery;
mod rollout;
mod silent;
mod upgrade;
mod world;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use truebeat_tests::stories::{self, Told};
use truebeat_tests::times::Times;
use truebeat_tests::{Cluster, Options, product, story};

use crate::world::{NAMESPACE, World};

/// In the order in which they run.
const STORIES: [&str; 30] = [
    "install",
    "apply_two_replicas",
    "gitops",
    "freeze_one",
    "freeze_both",
    "on_call",
    "kill_the_operator",
    "b5_operator_out_of_memory",
    "kill_detector_and_gate",
    "freeze_an_agent",
    "evidence_outlives_its_pod",
    "poison_request",
    "scale_with_one_frozen",
    "last_replica",
    "unattended",
    "avoid_the_place",
    "mass_stall_is_held",
    "b10_change_of_leader",
    "fence_by_hand",
    "mode_is_told",
    "rollout_and_scale_in_without_loss",
    "bad_revision",
    "another_operator",
    "drain_without_loss",
    "b8_upgrade_in_mid_drain",
    "autoscaled_over_frozen_ones",
    "delete",
    "chart",
    "kustomize",
    "s09_network_policies",
];
const ALWAYS: usize = 2;

fn main() -> ExitCode {
    stories::main(&STORIES, ALWAYS, tell_all)
}

fn tell_all(names: &[&'static str]) -> Result<Told> {
    let programs = product::Programs::find()?;
    // back-off would only be waited for: the times of a default kubelet from the second restart on are 10 s, 20 s, …
    // an autoscaler looks every 15 s, which would be waited for just so
    let kcm_extra = vec!["--horizontal-pod-autoscaler-sync-period=2s".to_owned()];
    let options = Options { restart_period_max_s: Some(1), kcm_extra, ..Options::default() };
    let cluster = match story::one(&options)? {
        Ok(cluster) => cluster,
        Err(reason) => return Told::none("e2e", names, &reason),
    };
    cluster.run(async |client| {
        let mut world = World::new(client, &cluster, programs);
        let mut told = Told::default();
        for name in names {
            if !tell(name, &mut world, &cluster).await {
                told.failed = 1; // the others stand on it
                break;
            }
            told.passed += 1;
        }
        Ok(told)
    })
}

async fn tell(name: &str, world: &mut World<'_>, cluster: &Cluster) -> bool {
    let started = Instant::now();
    let mut times = Times::new(name);
    let result = match name {
        "install" => lifecycle::install(world, &mut times).await,
        "apply_two_replicas" => lifecycle::apply(world, &mut times).await,
        "freeze_one" => freeze::one(world, &mut times).await,
        "freeze_both" => freeze::both(world, &mut times).await,
        "on_call" => on_call::story(world, &mut times).await,
        "kill_the_operator" => kill::operator(world, &mut times).await,
        "b5_operator_out_of_memory" => memory::story(world, &mut times).await,
        "kill_detector_and_gate" => kill::detector_and_gate(world, &mut times).await,
        "freeze_an_agent" => silent::agent(world, &mut times).await,
        "scale_with_one_frozen" => lifecycle::scale(world, &mut times).await,
        "evidence_outlives_its_pod" => evidence::story(world, &mut times).await,
        "poison_request" => poison::story(world, &mut times).await,
        "last_replica" => recovery::last_replica(world, &mut times).await,
        "unattended" => recovery::unattended(world, &mut times).await,
        "avoid_the_place" => recovery::avoid(world, &mut times).await,
        "mass_stall_is_held" => hold::story(world, &mut times).await,
        "b10_change_of_leader" => recovery::leader_change(world, &mut times).await,
        "fence_by_hand" => recovery::by_hand(world, &mut times).await,
        "mode_is_told" => mode::story(world, &mut times).await,
        "gitops" => gitops::story(world, &mut times).await,
        "rollout_and_scale_in_without_loss" => rollout::without_loss(world, &mut times).await,
        "autoscaled_over_frozen_ones" => autoscale::story(world, &mut times).await,
        "bad_revision" => rollout::bad_revision(world, &mut times).await,
        "drain_without_loss" => drain::story(world, &mut times).await,
        "b8_upgrade_in_mid_drain" => mid_drain::story(world, &mut times).await,
        "another_operator" => upgrade::story(world, &mut times).await,
        "delete" => lifecycle::delete(world, &mut times).await,
        "s09_network_policies" => network::story(world, &mut times).await,
        "kustomize" => kustomize::story(world, &mut times).await,
        _ => chart::life(world, &mut times).await,
    };
    println!("\n{}", times.table());
    let seconds = started.elapsed().as_secs_f64();
    match result {
        Ok(()) => println!("test e2e::{name} ... ok ({seconds:.1} s)"),
        Err(error) => {
            println!("{}", product::state(cluster, NAMESPACE));
            println!("test e2e::{name} ... FAILED after {seconds:.1} s: {error:#}");
            println!("logs of the cluster: {}", cluster.layout().path("log").display());
            return false;
        }
    }
    true
}
