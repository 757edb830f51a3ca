//! The rows S1–S10, S15 and S16 of the threat model (`docs/security.md`), those of the catalogue of faults whose other side is an API server, the
//! warnings of O4 (`docs/known-bad.md`), and budgets and policies that need no engine, each on a real API server with its admission and RBAC, with
//! the real operator and without a node: pods are objects, and what kubelet and agents would write is written here.
//!
//! Most of what is tried is what somebody would try who has stolen one token; the operator and the agents are told apart by their tokens alone.

mod agents;
mod budgets;
mod faults;
mod images;
mod known_bad;
mod manifests;
mod network;
mod outages;
mod people;
mod policies;
mod refusals;
mod rest;
mod rights;
mod schema;
mod silence;
mod weapon;
mod world;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use truebeat_tests::fleet::nodes::SILENT_NODES_STAY;
use truebeat_tests::stories::{self, Told};
use truebeat_tests::{Cluster, Options, product};

use crate::world::World;

/// In the order in which they run: each has a namespace of its own.
const ROWS: [&str; 36] = [
    "s03_restricted_pods_are_taken_without_a_warning",
    "s01_every_right_of_the_operator_is_used",
    "s01_a_watched_namespace_needs_no_right_elsewhere",
    "s01_people_reach_what_is_theirs_by_view_and_edit",
    "s01_a_restart_past_a_hold_can_be_kept_for_some",
    "s02_an_agent_may_patch_pod_status_and_nothing_else",
    "s04_every_container_runs_with_nothing",
    "s05_the_operators_image_is_one_static_program",
    "s05_every_file_of_an_image_is_in_its_bill",
    "s06_a_stranger_gets_no_answer_and_no_action",
    "s07_a_token_speaks_for_its_own_pod_alone",
    "s08_no_webhook",
    "s09_what_the_network_policy_lets_through",
    "s15_one_owned_pod_harms_its_own_replica_alone",
    "s16_a_tenant_that_floods_delays_itself",
    "i02_a_node_bears_no_more_recoveries_than_its_budget",
    "i02_a_failure_domain_bears_no_more_recoveries_than_its_budget",
    "i02_the_fleet_bears_no_more_recoveries_than_its_budget",
    "o05_an_incident_holds_the_number_of_replicas_where_the_policy_says_so",
    "p07_nothing_is_written_while_nothing_changes",
    "a_revision_that_fails_is_held_or_taken_back_as_the_policy_says",
    "fault_a18_whom_nobody_may_replace_is_not_deleted",
    "fault_a20_a_token_that_is_not_taken_is_read_anew",
    "fault_h10_each_rule_of_the_schemas_refuses_in_its_own_words",
    "o04_what_upstream_knows_against_flags_is_told_and_refuses_nobody",
    "fault_a5_who_is_always_overtaken_gets_on_and_does_not_spin",
    "fault_a5_who_is_changed_back_each_time_grows_patient",
    "fault_a13_a_webhook_that_is_down_is_named_and_waited_for",
    "fault_a14_a_right_that_is_gone_is_named_and_costs_nothing_else",
    "fault_a19_a_namespace_on_its_way_out_is_let_go",
    "fault_f4_a_node_that_is_not_heard_costs_no_pod",
    "fault_a15_kinds_that_are_gone_are_waited_for",
    "fault_a1_an_api_server_that_is_gone_is_waited_for",
    "fault_a21_a_store_of_the_past_restarts_nobody",
    "fault_a2_connections_that_went_silent_are_noticed",
    "fault_b3_a_leader_that_was_frozen_does_not_write",
];

fn main() -> ExitCode {
    stories::main(&ROWS, 0, tell_all)
}

fn tell_all(names: &[&'static str]) -> Result<Told> {
    let programs = product::Programs::find()?;
    let options = Options {
        node: false,
        audit: true,
        // as on OpenShift: who sets an owner must hold what that means
        apiserver_extra: vec!["--enable-admission-plugins=OwnerReferencesPermissionEnforcement".to_owned()],
        kcm_extra: vec![SILENT_NODES_STAY.to_owned()],
        ..Options::default()
    };
    // a name of its own: it may run beside the stories, whose one node it has no part in
    let cluster = match Cluster::up("security", &options)? {
        Ok(cluster) => cluster,
        Err(reason) => return Told::none("cluster_security", names, &reason),
    };
    cluster.run(async |client| {
        let world = World::start(client, &cluster, programs).await?;
        let mut told = Told::default();
        for name in names {
            let started = Instant::now();
            let result = tell(name, &world).await;
            let seconds = started.elapsed().as_secs_f64();
            match result {
                Ok(()) => {
                    told.passed += 1;
                    println!("test cluster_security::{name} ... ok ({seconds:.1} s)");
                }
                Err(error) => {
                    told.failed += 1;
                    println!("test cluster_security::{name} ... FAILED after {seconds:.1} s: {error:#}");
                    println!("logs of the cluster: {}", cluster.layout().path("log").display());
                }
            }
        }
        Ok(told)
    })
}

async fn tell(name: &str, world: &World<'_>) -> Result<()> {
    match name {
        "s01_every_right_of_the_operator_is_used" => rights::operator(world).await,
        "s01_a_watched_namespace_needs_no_right_elsewhere" => manifests::one_namespace(world).await,
        "s01_people_reach_what_is_theirs_by_view_and_edit" => people::reach(world).await,
        "s01_a_restart_past_a_hold_can_be_kept_for_some" => people::restarts_for_some(world).await,
        "s02_an_agent_may_patch_pod_status_and_nothing_else" => rights::agent(world).await,
        "s03_restricted_pods_are_taken_without_a_warning" => manifests::restricted(world).await,
        "s04_every_container_runs_with_nothing" => manifests::nothing(world).await,
        "s05_the_operators_image_is_one_static_program" => images::operator(world),
        "s05_every_file_of_an_image_is_in_its_bill" => images::bills(world),
        "s06_a_stranger_gets_no_answer_and_no_action" => agents::strangers(world).await,
        "s07_a_token_speaks_for_its_own_pod_alone" => agents::ownership(world).await,
        "s08_no_webhook" => manifests::no_webhook(world),
        "s09_what_the_network_policy_lets_through" => network::policies(world),
        "s15_one_owned_pod_harms_its_own_replica_alone" => weapon::one_pod(world).await,
        "s16_a_tenant_that_floods_delays_itself" => weapon::flood(world).await,
        "i02_a_node_bears_no_more_recoveries_than_its_budget" => budgets::of_a_node(world).await,
        "i02_a_failure_domain_bears_no_more_recoveries_than_its_budget" => budgets::of_a_domain(world).await,
        "i02_the_fleet_bears_no_more_recoveries_than_its_budget" => budgets::of_the_fleet(world).await,
        "o05_an_incident_holds_the_number_of_replicas_where_the_policy_says_so" => policies::scaling(world).await,
        "p07_nothing_is_written_while_nothing_changes" => rest::silent(world).await,
        "a_revision_that_fails_is_held_or_taken_back_as_the_policy_says" => policies::failed_revision(world).await,
        "fault_a18_whom_nobody_may_replace_is_not_deleted" => faults::quota(world).await,
        "fault_a20_a_token_that_is_not_taken_is_read_anew" => faults::token(world).await,
        "fault_h10_each_rule_of_the_schemas_refuses_in_its_own_words" => schema::rules(world).await,
        "o04_what_upstream_knows_against_flags_is_told_and_refuses_nobody" => known_bad::warned(world).await,
        "fault_a5_who_is_always_overtaken_gets_on_and_does_not_spin" => refusals::conflicts(world).await,
        "fault_a5_who_is_changed_back_each_time_grows_patient" => refusals::fight(world).await,
        "fault_a13_a_webhook_that_is_down_is_named_and_waited_for" => refusals::webhook(world).await,
        "fault_a14_a_right_that_is_gone_is_named_and_costs_nothing_else" => refusals::revoked(world).await,
        "fault_a19_a_namespace_on_its_way_out_is_let_go" => refusals::terminating(world).await,
        "fault_f4_a_node_that_is_not_heard_costs_no_pod" => refusals::silent_node(world).await,
        "fault_a15_kinds_that_are_gone_are_waited_for" => refusals::crds_gone(world).await,
        "fault_a1_an_api_server_that_is_gone_is_waited_for" => outages::api_server_gone(world).await,
        "fault_a21_a_store_of_the_past_restarts_nobody" => outages::store_restored(world).await,
        "fault_a2_connections_that_went_silent_are_noticed" => silence::black_holed(world).await,
        "fault_b3_a_leader_that_was_frozen_does_not_write" => outages::frozen_leader(world).await,
        _ => anyhow::bail!("no such row: {name}"),
    }
}
