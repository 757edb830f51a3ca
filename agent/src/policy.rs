//! The detector's numbers as `--policy NAME=NUMBER` changes them: which there are, and which fit together. Pure.

use vitals::policy::Policy;

use crate::watch::WatchError;

/// The default policy with these numbers changed.
pub fn changed_policy(pairs: &[String]) -> Result<Policy, WatchError> {
    let bad = |pair: &str, why: String| WatchError::Policy { entry: pair.to_owned(), why };
    let mut given = Vec::new();
    let mut value = serde_json::to_value(Policy::default()).map_err(|error| bad("", error.to_string()))?;
    for pair in pairs {
        let (name, number) = pair.split_once('=').ok_or_else(|| bad(pair, "write NAME=NUMBER".to_owned()))?;
        let number: u64 = number.trim().parse().map_err(|_| bad(pair, format!("{number:?} is not a whole number")))?;
        let Some(field) = value.get_mut(name.trim()) else {
            let names = value.as_object().map(|fields| fields.keys().cloned().collect::<Vec<_>>().join(", "));
            return Err(bad(pair, format!("there is no such number; there are: {}", names.unwrap_or_default())));
        };
        *field = number.into();
        given.push(name.trim());
    }
    let mut policy: Policy = serde_json::from_value(value).map_err(|error| bad(&pairs.join(","), error.to_string()))?;
    // a floor that somebody has set is one that no quiet machine lowers
    if given.contains(&"native_floor_ms") && !given.contains(&"native_floor_calm_ms") {
        policy.native_floor_calm_ms = policy.native_floor_ms;
    }
    // Where no rhythm is known a stall is proven after three times the patience, of which a suspicion lives for two.
    if !given.contains(&"suspect_ms_max") {
        policy.suspect_ms_max = policy.suspect_ms_max.max(policy.patience_cap_ms.saturating_mul(2));
    }
    for (floor_name, floor, cap_name, cap) in [
        ("confirm_strong_ms", policy.confirm_strong_ms, "suspect_ms_max", policy.suspect_ms_max),
        ("confirm_moderate_ms", policy.confirm_moderate_ms, "suspect_ms_max", policy.suspect_ms_max),
        ("confirm_weak_ms", policy.confirm_weak_ms, "suspect_ms_max", policy.suspect_ms_max),
        ("confirm_timer_ms", policy.confirm_timer_ms, "suspect_ms_max", policy.suspect_ms_max),
        ("native_floor_ms", policy.native_floor_ms, "patience_cap_ms", policy.patience_cap_ms),
        ("native_floor_ms", policy.native_floor_ms, "lease_cap_ms", policy.lease_cap_ms),
        ("foreign_floor_ms", policy.foreign_floor_ms, "patience_cap_ms", policy.patience_cap_ms),
    ] {
        if floor > cap {
            let why = format!("{floor_name} ({floor}) is above {cap_name} ({cap}); lower the floor or raise the cap");
            return Err(bad(&pairs.join(","), why));
        }
    }
    Ok(policy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_cluster_may_set_are_numbers_of_the_detector_with_its_defaults() {
        let defaults = serde_json::to_value(Policy::default()).unwrap();
        let docs = include_str!("../../docs/detector.md");
        let bounds = crds::agent::Policy::default();
        let names = bounds.durations().into_iter().map(|(field, name, _)| (field, name));
        for (field, name) in names.chain([("slowFactor", "slow_factor")]) {
            let default = defaults[name].as_u64().unwrap();
            let row = docs.lines().find(|line| line.starts_with(&format!("| `{name}` | `{field}` | {default} |")));
            assert!(row.is_some(), "docs/detector.md does not tell of {name}, {field}, {default}");
            let schema = serde_json::to_value(schemars::schema_for!(crds::agent::Policy)).unwrap();
            let words = schema["properties"][field]["description"].as_str().unwrap();
            let told = words.rsplit("Default ").next().unwrap().trim_matches(['`', '.']);
            let told = humantime::parse_duration(told).map_or(told.to_owned(), |told| told.as_millis().to_string());
            assert_eq!(told, default.to_string(), "{field}: {words}");
        }
        let bound = |field: &str, ms: u64| -> crds::agent::Policy {
            serde_json::from_value(serde_json::json!({field: format!("{ms}ms")})).unwrap()
        };
        let ms = |text: &str| humantime::parse_duration(text).ok().map(|duration| duration.as_millis());
        for (floor, cap) in [("native", "patience"), ("native", "lease"), ("foreign", "patience")] {
            // the API refuses what the agent would, from the same defaults on
            let [low, high] =
                [format!("{floor}_floor_ms"), format!("{cap}_cap_ms")].map(|name| defaults[name].as_u64().unwrap());
            let pair = (format!("{floor}Floor"), format!("{cap}Cap"));
            let is_inverted = |policy: crds::agent::Policy| {
                policy.inverted(ms).iter().any(|(floor, cap)| (*floor, *cap) == (pair.0.as_str(), pair.1.as_str()))
            };
            assert!(!is_inverted(bound(&pair.1, low)) && is_inverted(bound(&pair.1, low - 1)), "{pair:?}");
            assert!(!is_inverted(bound(&pair.0, high)) && is_inverted(bound(&pair.0, high + 1)), "{pair:?}");
            let error = changed_policy(&[format!("{floor}_floor_ms=500"), format!("{cap}_cap_ms=499")]).unwrap_err();
            assert!(
                error.to_string().contains(&format!("{floor}_floor_ms (500) is above {cap}_cap_ms (499)")),
                "{error}"
            );
        }
    }

    #[test]
    fn a_suspicion_lives_long_enough_to_be_confirmed() {
        let of = |pairs: &[&str]| changed_policy(&pairs.iter().map(|pair| (*pair).to_owned()).collect::<Vec<_>>());
        assert_eq!(of(&["patience_cap_ms=900000"]).unwrap().suspect_ms_max, 1_800_000);
        assert_eq!(of(&["patience_cap_ms=1000000", "suspect_ms_max=700000"]).unwrap().suspect_ms_max, 700_000);
        assert_eq!(of(&["patience_cap_ms=100000"]).unwrap().suspect_ms_max, Policy::default().suspect_ms_max);
        let error = of(&["confirm_timer_ms=600001"]).unwrap_err().to_string();
        assert!(error.contains("confirm_timer_ms (600001) is above suspect_ms_max (600000)"), "{error}");
    }

    #[test]
    fn a_policy_entry_that_means_nothing_is_named() {
        let error = changed_policy(&["no_such=1".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("no_such=1") && error.contains("native_floor_ms"), "{error}");
        assert!(changed_policy(&["fresh_ms=soon".to_owned()]).is_err());
        let error = changed_policy(&["patience_cap_ms=2000".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("foreign_floor_ms (2500)") && error.contains("patience_cap_ms (2000)"), "{error}");
        assert!(changed_policy(&["fresh_ms".to_owned()]).is_err());
    }

    #[test]
    fn a_floor_that_was_set_is_lowered_by_no_quiet_machine() {
        let calm = |pairs: &[&str]| {
            let pairs: Vec<String> = pairs.iter().map(|pair| (*pair).to_owned()).collect();
            changed_policy(&pairs).unwrap().native_floor_calm_ms
        };
        assert_eq!(calm(&[]), Policy::default().native_floor_calm_ms);
        assert_eq!(calm(&[" native_floor_ms =2000"]), 2_000);
        assert_eq!(calm(&["native_floor_ms=77"]), 77);
        assert_eq!(calm(&["native_floor_calm_ms=99", "native_floor_ms=2000"]), 99);
    }
}
