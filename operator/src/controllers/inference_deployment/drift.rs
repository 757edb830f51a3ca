//! Is what the server shows what was applied, pure. It answers in its own words: with defaults, without what its types cannot tell from
//! nothing, with quantities written another way. Whoever took that for drift would apply the same for ever (P7), and whatever waits for an
//! apply would wait each time.

use serde_json::Value;

use super::quantity;

/// Numbers of which the server's own type has no "not said": it answers without them where they are zero. (Others, as `runAsUser`, are
/// missing only where somebody took them out.)
const PLAIN_NUMBERS: [&str; 3] = ["minReadySeconds", "initialDelaySeconds", "hostPort"];
/// Switches of the same kind, of those that an overlay may set: it answers without them where they are off. (Others, as
/// `allowPrivilegeEscalation` and `automountServiceAccountToken`, mean something else where they are not said.)
const PLAIN_FLAGS: [&str; 4] = ["readOnly", "stdin", "stdinOnce", "tty"];

/// Lists of which the server tells one item from another by these fields, in the objects that are applied here. What somebody else adds to one is
/// theirs (P9), and an apply neither takes it out nor has to be made for it.
const KEYED: [(&str, &[&str]); 14] = [
    ("claims", &["name"]),
    ("containers", &["name"]),
    ("env", &["name"]),
    ("hostAliases", &["ip"]),
    ("imagePullSecrets", &["name"]),
    ("initContainers", &["name"]),
    ("ownerReferences", &["uid"]),
    // of a container, and of a Service
    ("ports", &["containerPort", "protocol"]),
    ("ports", &["port", "protocol"]),
    ("resourceClaims", &["name"]),
    ("topologySpreadConstraints", &["topologyKey", "whenUnsatisfiable"]),
    ("volumeDevices", &["devicePath"]),
    ("volumeMounts", &["mountPath"]),
    ("volumes", &["name"]),
];

/// Does `live` hold everything that `wanted` says? The server adds defaults, so more is fine, and so is what others add to a list of items
/// with keys; any other list must have the same length; quantities count by value, for it writes them its own way. What was taken out of
/// `wanted` shows in the hash annotation.
pub fn covers(live: &Value, wanted: &Value) -> bool {
    match (live, wanted) {
        (Value::Object(live), Value::Object(wanted)) => wanted.iter().all(|(key, value)| match live.get(key) {
            Some(live) if matches!(key.as_str(), "requests" | "limits" | "sizeLimit") => covers_quantities(live, value),
            Some(live) => covers_list(key, live, value).unwrap_or_else(|| covers(live, value)),
            // the server drops empty objects and lists, and a zero or a `false` where its own type cannot tell it from nothing
            None => {
                let plain = |names: &[&str]| names.contains(&key.as_str());
                is_empty(value) || (*value == 0 && plain(&PLAIN_NUMBERS)) || (*value == false && plain(&PLAIN_FLAGS))
            }
        }),
        (Value::Array(live), Value::Array(wanted)) => {
            live.len() == wanted.len() && live.iter().zip(wanted).all(|(live, wanted)| covers(live, wanted))
        }
        _ => live == wanted,
    }
}

/// The same of the list of this name, if its items have keys: each that is wanted is there, in the wanted order.
fn covers_list(name: &str, live: &Value, wanted: &Value) -> Option<bool> {
    let (live, wanted) = (live.as_array()?, wanted.as_array()?);
    // (a key of which the server fills in a part is that of none)
    let fits = |keys: &[&str]| wanted.iter().all(|item| keys.iter().all(|key| !item[*key].is_null()));
    let (_, keys) = KEYED.iter().find(|(list, keys)| *list == name && fits(keys))?;
    let same = |live: &Value, wanted: &Value| keys.iter().all(|key| live[*key] == wanted[*key]);
    let mut rest = live.iter();
    Some(
        wanted
            .iter()
            .all(|wanted| rest.by_ref().find(|live| same(live, wanted)).is_some_and(|live| covers(live, wanted))),
    )
}

/// `live` and `wanted` are a quantity, or a table of quantities by resource.
fn covers_quantities(live: &Value, wanted: &Value) -> bool {
    match (live, wanted) {
        (Value::Object(live), Value::Object(wanted)) => {
            wanted.iter().all(|(name, value)| live.get(name).is_some_and(|live| covers_quantities(live, value)))
        }
        (Value::String(live), Value::String(wanted)) => quantity::equal(live, wanted),
        _ => live == wanted,
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(map) => map.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::String(text) => text.is_empty(), // an empty environment value is not sent back
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_quantity_that_the_server_writes_its_own_way_is_no_drift() {
        let wanted = json!({"resources": {"limits": {"cpu": "0.5", "memory": "1024Mi"}}, "args": ["0.5"]});
        let live =
            |cpu: &str, arg: &str| json!({"resources": {"limits": {"cpu": cpu, "memory": "1Gi"}}, "args": [arg]});
        assert!(covers(&live("500m", "0.5"), &wanted));
        assert!(!covers(&live("501m", "0.5"), &wanted));
        assert!(!covers(&live("500m", "500m"), &wanted), "only where quantities stand");
        assert!(!covers(&json!({"resources": {"limits": {"cpu": "500m"}}, "args": ["0.5"]}), &wanted));
    }

    #[test]
    fn what_somebody_else_adds_to_a_list_is_no_drift() {
        let service = |ports: Value| json!({"spec": {"ports": ports}});
        let http = json!({"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080});
        let grpc = json!({"name": "grpc", "port": 9000, "protocol": "TCP"});
        let wanted = service(json!([http]));
        assert!(covers(&service(json!([grpc, http])), &wanted) && covers(&service(json!([http, grpc])), &wanted));
        assert!(!covers(&service(json!([grpc])), &wanted), "ours is gone");
        let mut other = http.clone();
        other["targetPort"] = json!(8081);
        assert!(!covers(&service(json!([other, grpc])), &wanted), "a field of ours is another");
        let env = |names: &[&str]| json!({"env": names.iter().map(|name| json!({"name": name})).collect::<Vec<_>>()});
        assert!(covers(&env(&["A", "X", "B"]), &env(&["A", "B"])));
        assert!(!covers(&env(&["B", "A"]), &env(&["A", "B"])), "a variable may refer to those before it");
        let args = |args: &[&str]| json!({"args": args});
        assert!(!covers(&args(&["a", "b"]), &args(&["a"])), "a list without keys is one value");
        let owners =
            |uids: &[&str]| json!({"ownerReferences": uids.iter().map(|uid| json!({"uid": uid})).collect::<Vec<_>>()});
        assert!(covers(&owners(&["ours", "theirs"]), &owners(&["ours"])));
    }

    #[test]
    fn a_zero_that_the_server_drops_is_no_drift() {
        let wanted = json!({"minReadySeconds": 0, "securityContext": {"runAsUser": 0}});
        assert!(covers(&json!({"securityContext": {"runAsUser": 0}}), &wanted));
        assert!(!covers(&json!({"minReadySeconds": 5, "securityContext": {"runAsUser": 0}}), &wanted));
        assert!(!covers(&json!({"securityContext": {}}), &wanted), "none is another user");
    }

    #[test]
    fn a_false_that_the_server_drops_is_no_drift() {
        let wanted = json!({"volumeMounts": [{"mountPath": "/a", "readOnly": false}], "tty": false, "stdin": false, "stdinOnce": false});
        assert!(covers(&json!({"volumeMounts": [{"mountPath": "/a"}]}), &wanted));
        assert!(!covers(&json!({"volumeMounts": [{"mountPath": "/a", "readOnly": true}]}), &wanted));
        assert!(!covers(&json!({"volumeMounts": [{"mountPath": "/a"}], "tty": true}), &wanted));
        assert!(!covers(&json!({}), &json!({"tty": true})));
        for kept in ["allowPrivilegeEscalation", "automountServiceAccountToken", "enableServiceLinks", "optional"] {
            assert!(!covers(&json!({}), &json!({kept: false})), "{kept}: not said is not no");
        }
    }
}
