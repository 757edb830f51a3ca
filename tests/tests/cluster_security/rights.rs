//! S1, S2: what the accounts may do is what they do.

use anyhow::{Context, Result, ensure};
use crds::EngineIncident;
use k8s_openapi::api::authorization::v1::{SelfSubjectRulesReview, SelfSubjectRulesReviewSpec};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::rbac::v1::Role;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use truebeat_tests::audit;
use truebeat_tests::fleet::identity;
use truebeat_tests::fleet::operator::{ACCOUNT, NAMESPACE, USER};
use truebeat_tests::fleet::replica::Says;
use truebeat_tests::rbac::{self, Grant};
use truebeat_tests::wait::until_async;

use crate::world::{BOUND, World};

/// Nobody may hold these, whatever it is good for.
const NEVER: [&str; 8] = ["*", "secrets", "escalate", "bind", "impersonate", "pods/exec", "nodes/proxy", "configmaps"];

/// Makes the operator do everything it can do, and looks which of its rights that took: each right of each rule as it is written must be the
/// only one that allows something which was asked and answered. So whoever takes away a rule, or one verb of it, finds it refused here.
pub async fn operator(world: &World<'_>) -> Result<()> {
    let cluster_role = world.json(&["clusterrole", ACCOUNT])?;
    let lease_role = world.json(&["-n", NAMESPACE, "role", ACCOUNT])?;
    for word in NEVER {
        let text = format!("{}{}", cluster_role["rules"], lease_role["rules"]);
        ensure!(!text.contains(&format!("\"{word}\"")), "the operator holds `{word}`");
    }
    everything_once(world).await?;

    let (ours, everybodys) = bound(world)?;
    // no request needs it: who hands a right on must hold it
    let handed_on = |grant: &Grant| grant.is("", "pods/status", "patch");
    until_async("every right to be needed", BOUND, || async {
        let asked = audit::asked(&audit::read(&world.cluster.audit_log(), USER)?);
        let mut idle = rbac::idle(&ours, &everybodys, &asked);
        idle.retain(|grant| !handed_on(grant));
        let idle: Vec<String> = idle.iter().map(ToString::to_string).collect();
        ensure!(idle.is_empty(), "nothing that was asked would be refused without: {}", idle.join(", "));
        Ok(Some(()))
    })
    .await?;
    let entries = audit::read(&world.cluster.audit_log(), USER)?;
    let refused: Vec<_> =
        entries.iter().filter(|entry| matches!(entry.code(), 401 | 403)).map(|e| (&e.verb, e.resource())).collect();
    ensure!(refused.is_empty(), "asked for and not granted: {refused:?}");
    let asked = audit::asked(&entries);
    let all = || ours.iter().chain(&everybodys);
    let beyond: Vec<String> =
        asked.iter().filter(|question| !all().any(|grant| grant.allows(question))).map(ToString::to_string).collect();
    ensure!(beyond.is_empty(), "answered, and no rule that is known here allows it: {}", beyond.join(", "));
    println!(
        "      {} rights granted, each needed; {} requests that asked {} things, none refused",
        ours.len(),
        entries.len(),
        asked.len()
    );
    held_to_hand_on(world, &cluster_role).await?;
    world.leave("rights").await
}

/// What is bound to the operator's account, and what to the groups that it is in by being an account.
fn bound(world: &World<'_>) -> Result<(Vec<Grant>, Vec<Grant>)> {
    let all = world.json(&["-A", "clusterroles,roles,clusterrolebindings,rolebindings"])?;
    let all = all["items"].as_array().context("roles and bindings")?;
    let everybody = ["system:authenticated", "system:serviceaccounts", "system:serviceaccounts:truebeat-system"];
    let (mut ours, mut everybodys) = (Vec::new(), Vec::new());
    for binding in all.iter().filter(|object| object["roleRef"].is_object()) {
        let (namespace, wanted) = (&binding["metadata"]["namespace"], &binding["roleRef"]);
        let is_it = |role: &&Value| {
            let here = wanted["kind"] == "ClusterRole" || role["metadata"]["namespace"] == *namespace;
            role["kind"] == wanted["kind"] && role["metadata"]["name"] == wanted["name"] && here
        };
        for subject in binding["subjects"].as_array().into_iter().flatten() {
            let account = subject["kind"] == "ServiceAccount" && subject["namespace"] == NAMESPACE;
            let group = subject["kind"] == "Group" && everybody.iter().any(|name| subject["name"] == *name);
            let list = match (account && subject["name"] == ACCOUNT, group) {
                (true, _) => &mut ours,
                (_, true) => &mut everybodys,
                _ => continue,
            };
            let role = all.iter().find(is_it).with_context(|| format!("{wanted} is bound and not there"))?;
            list.extend(rbac::granted(role, namespace.as_str()));
        }
    }
    ensure!(!ours.is_empty(), "nothing is bound to the operator");
    Ok((ours, everybodys))
}

/// A deployment that stalls, accuses a node, is restarted, stalls again, is replaced, changes, and is forgotten.
async fn everything_once(world: &World<'_>) -> Result<()> {
    world.tenant("rights")?;
    let recovery =
        json!({"restartsBeforeReplace": 1, "maxUnavailable": 1, "holdPercent": 100, "avoidNodesPercent": 50});
    let pods = world.deploy("rights", "chat", json!({"recovery": recovery})).await?;
    let (first, second) = (pods.first().context("a pod")?, pods.get(1).context("a second pod")?);
    world.stall_until_granted(first, "rights-2").await?;
    // no slot is left for this one, which would be replaced
    world.say(second, Says::Stalls { id: "rights-1".to_owned(), class: "Unkillable" }).await?;
    let node = second.spec.as_ref().and_then(|spec| spec.node_name.clone()).context("a pod without a node")?;
    until_async("the condition of the node", BOUND, || async {
        let conditions = world.json(&["node", &node])?["status"]["conditions"].to_string();
        Ok(conditions.contains("truebeat.io/engine-stalls").then_some(()))
    })
    .await?;
    world.say(second, Says::Recovered("rights-1".to_owned())).await?;
    world.recover(first, "rights-2").await?;
    world.say(first, Says::stalls("rights-3")).await?;
    world.replaced(first).await?;
    // another revision: the operator looks up what it would go back to
    let recovery = json!({"mode": "Observe", "incidentTtl": "1m", "poisonFor": "1m"});
    let spec = json!({"recovery": recovery, "drainSeconds": 31});
    truebeat_tests::product::apply(world.cluster, &crate::world::infd("rights", "chat", spec).to_string())?;
    forget_an_incident(world).await?;
    lose_the_lease(world).await
}

/// The Lease is shipped; only where somebody deletes it does the operator make one.
async fn lose_the_lease(world: &World<'_>) -> Result<()> {
    let leases: Api<Lease> = Api::namespaced(world.client.clone(), NAMESPACE);
    let old = leases.get(ACCOUNT).await?.uid();
    leases.delete(ACCOUNT, &DeleteParams::default()).await?;
    until_async("a new Lease that somebody holds", BOUND, || async {
        let new = leases.get_opt(ACCOUNT).await?.filter(|lease| lease.uid() != old);
        Ok(new.and_then(|lease| lease.spec?.holder_identity).map(|_| ()))
    })
    .await
}

/// An incident that ended long ago, and was recorded a minute ago, goes.
async fn forget_an_incident(world: &World<'_>) -> Result<()> {
    let api: Api<EngineIncident> = Api::namespaced(world.client.clone(), "rights");
    let old = until_async("the incident of the pod that was replaced to be closed", BOUND, || async {
        let list = api.list(&ListParams::default()).await?.items;
        let closed = |i: &EngineIncident| i.status.as_ref().is_some_and(|status| status.closed_at.is_some());
        Ok(list.into_iter().find(|i| i.spec.episode_id == "rights-3" && closed(i)).map(|i| i.name_any()))
    })
    .await?;
    let (api, old, looks) = (&api, &old, &std::sync::atomic::AtomicU32::new(0));
    until_async("an incident of 2020 to be forgotten", BOUND, || async move {
        if api.get_opt(old).await?.is_none() {
            return Ok(Some(()));
        }
        // each is another word, so that the operator looks
        let second = looks.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % 60;
        let patch = Patch::Merge(json!({"status": {"closedAt": format!("2020-01-01T00:00:{second:02}Z")}}));
        match api.patch_status(old, &PatchParams::default(), &patch).await {
            Err(kube::Error::Api(error)) if error.code == 404 => Ok(Some(())),
            patched => patched.map(|_| None).map_err(Into::into),
        }
    })
    .await
}

/// Without the right to patch pod statuses itself, the operator could not give it to an agent.
async fn held_to_hand_on(world: &World<'_>, cluster_role: &Value) -> Result<()> {
    let token = identity::token(&world.client, NAMESPACE, ACCOUNT, None, None).await?;
    let roles: Api<Role> = Api::namespaced(identity::client(world.cluster.layout(), &token).await?, "rights");
    let rule = json!([{"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]}]);
    let role: Role = serde_json::from_value(json!({"metadata": {"name": "handed-on"}, "rules": rule}))?;
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    roles.create(&dry, &role).await.context("with the right itself it may be handed on")?;

    let mut less = cluster_role.clone();
    let rules = less["rules"].as_array_mut().context("rules")?;
    rules.retain(|rule| rule["resources"] != json!(["pods/status"]));
    less["metadata"] = json!({"name": ACCOUNT});
    let more = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": ACCOUNT}, "rules": cluster_role["rules"]});
    truebeat_tests::product::apply(world.cluster, &less.to_string())?;
    let refused = until_async("the API server's authorizer to notice", BOUND, || async {
        Ok(roles.create(&dry, &role).await.err().map(|error| error.to_string()))
    })
    .await;
    truebeat_tests::product::apply(world.cluster, &more.to_string())?;
    ensure!(refused?.contains("not currently held"), "the refusal has another reason");
    Ok(())
}

/// All that the token of an agent is good for, by the API server's own account.
pub async fn agent(world: &World<'_>) -> Result<()> {
    world.tenant("rights-agent")?;
    let pods = world.deploy("rights-agent", "chat", json!({"replicas": 1})).await?;
    let pod = pods.first().context("a pod")?;
    let token = identity::token_of(&world.client, pod).await?;
    let client = identity::client(world.cluster.layout(), &token).await?;
    let reviews: Api<SelfSubjectRulesReview> = Api::all(client);
    for (namespace, most) in [("rights-agent", 1), (NAMESPACE, 0), ("default", 0)] {
        let spec = SelfSubjectRulesReviewSpec { namespace: Some(namespace.to_owned()) };
        let review = SelfSubjectRulesReview { spec, ..SelfSubjectRulesReview::default() };
        let answer = serde_json::to_value(reviews.create(&PostParams::default(), &review).await?)?;
        let rules = answer["status"]["resourceRules"].as_array().context("rules")?.clone();
        // what every account may ask about itself
        let own: Vec<&Value> =
            rules.iter().filter(|rule| !rule["resources"].to_string().contains("selfsubject")).collect();
        ensure!(own.len() == most, "in {namespace} an agent may {own:?}");
        for rule in own {
            let said = (&rule["apiGroups"], &rule["resources"], &rule["verbs"]);
            ensure!(said == (&json!([""]), &json!(["pods/status"]), &json!(["patch"])), "an agent may {rule}");
        }
    }
    let pod = serde_json::to_value(pod)?;
    ensure!(pod["spec"]["automountServiceAccountToken"] == json!(false), "the token is mounted everywhere");
    let volumes = pod["spec"]["volumes"].as_array().context("volumes")?;
    let token = |volume: &&Value| volume.to_string().contains("serviceAccountToken");
    let holders: Vec<&Value> = volumes.iter().filter(token).collect();
    ensure!(holders.len() == 1, "{} volumes hold a token", holders.len());
    let projected = holders.first().map(|volume| volume["projected"]["sources"][0]["serviceAccountToken"].clone());
    let seconds = projected.unwrap_or_default()["expirationSeconds"].as_u64().context("an expiry")?;
    ensure!(seconds <= 600, "a stolen token is good for {seconds} s");
    let mounts = pod["spec"]["containers"][0]["volumeMounts"].to_string();
    ensure!(!mounts.contains("serviceaccount"), "the engine sees the token: {mounts}");
    world.leave("rights-agent").await
}
