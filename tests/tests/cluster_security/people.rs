//! S1, people: Kubernetes' own `view` and `edit` reach InferenceDeployments, and nobody reaches a status or an incident.

use anyhow::{Result, ensure};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::Api;
use kube::api::PostParams;
use truebeat_tests::wait::until_async;

use crate::world::{BOUND, World};

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
