//! S1, people: Kubernetes' own `view` and `edit` reach InferenceDeployments, and nobody reaches a status or an incident; and the policy of
//! `docs/security.md` that keeps a restart past a hold for some.

use std::cell::Cell;

use anyhow::{Context, Result, ensure};
use crds::restart::ANNOTATION_RESTART;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use serde_json::json;
use truebeat_tests::product;
use truebeat_tests::wait::until_async;

use crate::world::{BOUND, World, documented};

const PLACE: &str = "people";
const USERS: [(&str, &str); 3] = [("a-viewer", "view"), ("an-editor", "edit"), ("an-admin", "admin")];
const READS: [(&str, &str); 3] = [("get", "inferencedeployments"), ("watch", "engineincidents"), ("list", "pods")];
const WRITES: [(&str, &str); 4] = [
    ("create", "inferencedeployments"),
    ("delete", "inferencedeployments"),
    ("patch", "inferencedeployments/scale"),
    ("patch", "pods"),
];
const NOBODYS: [(&str, &str); 4] = [
    ("patch", "inferencedeployments/status"),
    ("create", "engineincidents"),
    ("delete", "engineincidents"),
    ("patch", "engineincidents/status"),
];

/// The API server's own account of who may what.
pub async fn reach(world: &World<'_>) -> Result<()> {
    world.tenant(PLACE)?;
    for (user, role) in USERS {
        let (role, who) = (format!("--clusterrole={role}"), format!("--user={user}"));
        world.cluster.kubectl(&["-n", PLACE, "create", "rolebinding", user, &role, &who])?;
    }
    for (user, role) in USERS {
        for right in READS.iter().chain(WRITES.iter().filter(|_| role != "view")) {
            // a controller adds the rules, a moment after the roles are there
            until_async(&format!("{user} to be allowed to {right:?}"), BOUND, || async {
                Ok(may(world, user, *right).await?.then_some(()))
            })
            .await?;
        }
    }
    for (user, role) in USERS {
        for right in NOBODYS.into_iter().chain(WRITES.into_iter().filter(|_| role == "view")) {
            ensure!(!may(world, user, right).await?, "who may {role} may {right:?}");
        }
    }
    world.leave(PLACE).await
}

/// An editor may patch pods, and only who is on call may write the annotation that passes a hold.
pub async fn restarts_for_some(world: &World<'_>) -> Result<()> {
    const PLACE: &str = "on-call";
    let wish = format!("{ANNOTATION_RESTART}=e-1");
    let take_back = format!("{ANNOTATION_RESTART}-");
    world.tenant(PLACE)?;
    let pods = world.deploy(PLACE, "chat", json!({})).await?;
    let pod = pods.first().context("no pod")?.name_any();
    for user in ["some-editor", "whoever-is-on-call"] {
        world.cluster.kubectl(&[
            "-n",
            PLACE,
            "create",
            "rolebinding",
            user,
            "--clusterrole=edit",
            &format!("--user={user}"),
        ])?;
    }
    let annotate = |who: &[&str], what: &str| {
        world.cluster.kubectl(&[who, &["-n", PLACE, "annotate", "--overwrite", "pod", &pod, what]].concat())
    };
    let (editor, on_call) = (["--as=some-editor"], ["--as=whoever-is-on-call", "--as-group=on-call"]);
    until_async("an editor to be allowed to patch pods", BOUND, || async { Ok(annotate(&editor, "note=a").ok()) })
        .await?;
    annotate(&editor, &wish).context("without the policy")?;
    annotate(&editor, &take_back)?;

    product::apply(world.cluster, documented("kind: ValidatingAdmissionPolicy")?)?;
    // the API server takes a policy up a moment after it is there
    let tries = Cell::new(1);
    let refused = until_async("the policy to be in force", BOUND, || async {
        // (another value each time: what changes nothing is refused to nobody)
        tries.set(tries.get() + 1);
        Ok(annotate(&editor, &format!("{ANNOTATION_RESTART}=e-{}", tries.get())).err())
    })
    .await?;
    ensure!(format!("{refused:#}").contains("only the group on-call may write truebeat.io/restart"), "{refused:#}");
    annotate(&on_call, &take_back)?;
    annotate(&editor, "note=b").context("anything else of a pod")?;
    annotate(&on_call, &wish)?;
    annotate(&editor, "note=c").context("anything else of a pod that bears such a wish")?;
    for change in [take_back.as_str(), &format!("{ANNOTATION_RESTART}=another")] {
        ensure!(annotate(&editor, change).is_err(), "an editor may write {change}");
    }
    world.cluster.kubectl(&[
        "delete",
        "validatingadmissionpolicybinding,validatingadmissionpolicy",
        "restart-by-on-call",
    ])?;
    world.leave(PLACE).await
}

async fn may(world: &World<'_>, user: &str, (verb, resource): (&str, &str)) -> Result<bool> {
    let (resource, subresource) = resource.split_once('/').map_or((resource, None), |(of, sub)| (of, Some(sub)));
    let asked = ResourceAttributes {
        group: (resource != "pods").then(|| crds::GROUP.to_owned()),
        namespace: Some(PLACE.to_owned()),
        resource: Some(resource.to_owned()),
        subresource: subresource.map(str::to_owned),
        verb: Some(verb.to_owned()),
        ..ResourceAttributes::default()
    };
    let spec = SubjectAccessReviewSpec {
        user: Some(user.to_owned()),
        resource_attributes: Some(asked),
        ..SubjectAccessReviewSpec::default()
    };
    let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
    let reviews: Api<SubjectAccessReview> = Api::all(world.client.clone());
    let answer = reviews.create(&PostParams::default(), &review).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}
