//! What dashboards, alerts, autoscalers and pages ask of Prometheus, against what agent, operator and engine write: a misspelt metric or label
//! is an alert that never fires and an empty panel. Reads files and renders registries; whether expressions parse at all is asked of promtool
//! in `cluster_chart`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

mod promql;
mod rendered;

use std::collections::{BTreeMap, BTreeSet};

use promql::{Clause, Part, Series, parts};
use rendered::{Families, Family, OF_A_REPLICA, families, family_of};
use truebeat_tests::queries::{self, Query};

const METRICS_PAGE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md"));
const MONITORS: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/truebeat/templates/monitoring.yaml"));

/// Metrics that none of ours writes, where they may be asked for, and why.
const FOREIGN: [(&str, &str, &str); 1] =
    [("vllm:", "docs/engine-signals.md", "other engines' names, made from the agent's own tables (`make regenerate`)")];
/// What a level of a recorded name says of its labels.
const LEVELS: [(&str, &[&str]); 2] = [("deployment:", &["namespace", "deployment"]), ("slo:", &[])];
/// Labels whose values are names of things and no closed set.
const OPEN: [&str; 6] = ["namespace", "pod", "deployment", "model_name", "kind", "verb"];

/// What is known of series: those that are written, and the names under which rules record.
struct Known {
    families: Families,
    recorded: BTreeSet<String>,
    /// The words that the page's row of a metric has in code.
    told: BTreeMap<String, BTreeSet<String>>,
}

impl Known {
    fn of(queries: &[Query]) -> Self {
        let recorded = queries.iter().filter_map(|query| query.recorded.clone()).collect();
        let codes = |text: &str| text.split('`').skip(1).step_by(2).map(str::to_owned).collect();
        let told = rows().map(|cells| (code(cells[0]), codes(cells[3])));
        Self { families: families(), recorded, told: told.collect() }
    }

    /// Has this series the label? An error: there is none of that name.
    fn has(&self, series: &str, label: &str) -> Result<bool, String> {
        if self.recorded.contains(series) {
            let level = LEVELS.iter().find(|(level, _)| series.starts_with(level));
            return level
                .map(|(_, labels)| labels.contains(&label))
                .ok_or_else(|| format!("{series}: of which level?"));
        }
        let (_, family, besides) =
            family_of(&self.families, series).ok_or_else(|| format!("`{series}` is written by nobody"))?;
        Ok(family.has(label) || besides.contains(&label))
    }

    /// What is wrong with the series itself.
    fn of_series(&self, series: &Series, wrong: &mut Vec<String>) {
        if let Err(why) = self.has(&series.name, "") {
            return wrong.push(why);
        }
        for matcher in &series.matchers {
            self.wants(&series.name, &matcher.label, wrong);
            let unknown = matcher.value.split('|').filter(|value| !self.knows(&series.name, &matcher.label, value));
            wrong.extend(unknown.map(|value| format!("{}: `{}` is never `{value}`", series.name, matcher.label)));
        }
    }

    fn wants(&self, series: &str, label: &str, wrong: &mut Vec<String>) {
        match self.has(series, label) {
            Ok(true) => (),
            Ok(false) => wrong.push(format!("`{series}` has no label `{label}`")),
            Err(why) => wrong.push(why),
        }
    }

    /// May this label have this value, by what is written, or by the page?
    fn knows(&self, series: &str, label: &str, value: &str) -> bool {
        let Some((name, family, _)) = family_of(&self.families, series) else { return true };
        let Some(values) = family.labels.get(label).filter(|_| !OPEN.contains(&label)) else { return true };
        values.contains(value) || self.told.get(name).is_some_and(|told| told.contains(value))
    }

    /// All that is wrong with an expression.
    fn complaints(&self, query: &Query) -> Vec<String> {
        let parts = match parts(&query.expr) {
            Ok(parts) => parts,
            Err(why) => return vec![why],
        };
        let (mut wrong, all) = (Vec::new(), series(&parts));
        if query.in_page && self.is_name_of_family(&all, parts.len()) {
            return wrong;
        }
        all.iter().for_each(|series| self.of_series(series, &mut wrong));
        for (at, part) in parts.iter().enumerate() {
            let Part::Clause { clause, labels } = part else { continue };
            let (before, after) = (series(&parts[..at]), series(&parts[at..]));
            for label in labels {
                let one_of = |list: &[&Series]| list.iter().any(|series| self.has(&series.name, label) == Ok(true));
                let fits = match clause {
                    Clause::By => one_of(&after[..after.len().min(1)]),
                    Clause::On => one_of(&before) && one_of(&after[..after.len().min(1)]),
                    Clause::Other => one_of(&all),
                };
                if !fits {
                    wrong.push(format!("{clause:?} `{label}`: not a label of what is asked for"));
                }
            }
        }
        self.of_shown(query, &parts, &mut wrong);
        wrong
    }

    /// What is shown beside the result has to be left in it.
    fn of_shown(&self, query: &Query, parts: &[Part], wrong: &mut Vec<String>) {
        for label in &query.shown {
            match parts.first() {
                Some(Part::Clause { clause: Clause::By, labels }) if labels.contains(label) => (),
                Some(Part::Series(series)) => self.wants(&series.name, label, wrong),
                _ => wrong.push(format!("`{label}` is shown and not there")),
            }
        }
    }

    /// A page may call a histogram by its name, and not by one of its series.
    fn is_name_of_family(&self, all: &[&Series], parts: usize) -> bool {
        matches!((all, parts), ([one], 1) if one.matchers.is_empty() && self.families.contains_key(&one.name))
    }
}

fn series(parts: &[Part]) -> Vec<&Series> {
    parts.iter().filter_map(|part| if let Part::Series(series) = part { Some(series) } else { None }).collect()
}

/// The cells of the page's rows that tell of a metric.
fn rows() -> impl Iterator<Item = Vec<&'static str>> {
    let cells = |line: &'static str| line.split('|').skip(1).map(str::trim).collect::<Vec<_>>();
    METRICS_PAGE.lines().filter(|line| line.starts_with("| `truebeat_")).map(cells)
}

fn code(cell: &str) -> String {
    cell.trim_matches('`').to_owned()
}

fn is_foreign(query: &Query) -> bool {
    FOREIGN.iter().any(|(prefix, place, _)| query.place == *place && query.expr.starts_with(prefix))
}

#[test]
fn all_that_is_asked_for_is_written_with_these_labels() {
    let queries = queries::all().unwrap();
    let known = Known::of(&queries);
    let ours = queries.iter().filter(|query| !is_foreign(query));
    let wrong: Vec<String> = ours
        .flat_map(|query| {
            known.complaints(query).into_iter().map(move |why| format!("{}: {why}: {}", query.place, query.expr))
        })
        .collect();
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    for (place, least) in
        [("charts/truebeat/rules", 50), ("charts/truebeat/dashboards", 25), ("docs/examples", 3), ("docs/", 100)]
    {
        let found = queries.iter().filter(|query| query.place.starts_with(place)).count();
        assert!(found >= least, "only {found} expressions in {place}");
    }
}

#[test]
fn the_autoscaler_asks_for_a_metric_that_the_adapter_offers() {
    let (asked, offered) = queries::custom_metrics().unwrap();
    assert!(!asked.is_empty() && asked.iter().all(|name| offered.contains(name)), "{asked:?} of {offered:?}");
}

/// The names themselves, both ways, are `tidy`'s.
#[test]
fn the_page_tells_kinds_and_labels_as_they_are_written() {
    let families = families();
    let told = rows().map(|cells| {
        let labels = cells[2].split(", ").filter(|label| !label.is_empty()).map(code).collect::<BTreeSet<_>>();
        (code(cells[0]), (cells[1].to_owned(), labels))
    });
    let written = families.iter().filter(|(name, _)| name.starts_with("truebeat_"));
    let written = written.map(|(name, Family { kind, labels, .. })| {
        (name.clone(), (kind.clone(), labels.keys().cloned().collect::<BTreeSet<_>>()))
    });
    assert_eq!(told.collect::<BTreeMap<_, _>>(), written.collect());
}

/// Both ways: what is recorded, by its name with `W` for a window.
#[test]
fn the_page_tells_of_all_that_is_recorded() {
    let queries = queries::all().unwrap();
    let recorded: BTreeSet<String> = queries.iter().filter_map(|query| query.recorded.clone()).collect();
    let rows =
        METRICS_PAGE.lines().filter(|line| LEVELS.iter().any(|(level, _)| line.starts_with(&format!("| `{level}"))));
    let cells = rows.filter_map(|line| line.split(" | ").next()).flat_map(|cell| cell.split('`').skip(1).step_by(2));
    let told: BTreeSet<String> = cells.map(str::to_owned).collect();
    let windowed = |name: &String| match name.rsplit_once('_') {
        Some((stem, window)) if window.starts_with(|c: char| c.is_ascii_digit()) => format!("{stem}_W"),
        _ => name.clone(),
    };
    assert_eq!(told, recorded.iter().map(windowed).collect());
}

#[test]
fn the_chart_puts_the_deployment_on_agents_and_engines_alone() {
    assert_eq!(MONITORS.matches(&format!("targetLabel: {OF_A_REPLICA}\n")).count(), 2);
}

#[test]
fn what_is_misspelt_is_found() {
    let known = Known::of(&queries::all().unwrap());
    let wrong = |expr: &str, shown: &[&str]| {
        let shown = shown.iter().map(|label| (*label).to_owned()).collect();
        known.complaints(&Query { expr: expr.to_owned(), shown, ..Query::default() }).len()
    };
    for (fine, shown) in [
        ("sum by (verdict) (truebeat_verdict{namespace=~\"$namespace\",verdict=~\"Stalled|Dead\"})", vec!["verdict"]),
        ("histogram_quantile(0.9, sum by (le) (rate(truebeat_tick_seconds_bucket[5m])))", vec![]),
        ("truebeat_ready == 0 and on (namespace, pod) vllm:num_requests_running > 0", vec!["pod", "deployment"]),
        ("deployment:truebeat_verdict:lost / scalar(slo:truebeat_verdict:budget)", vec!["namespace"]),
        ("truebeat_operator_api_calls_total{outcome!~\"ok|not_leader\"}", vec!["verb"]),
    ] {
        assert_eq!(wrong(fine, &shown), 0, "{fine}");
    }
    for (misspelt, shown) in [
        ("truebeat_verdicts", vec![]),
        ("truebeat_tick_seconds", vec![]),
        ("truebeat_ready_count", vec![]),
        ("truebeat_verdict{verdicts=\"Stalled\"}", vec![]),
        ("truebeat_verdict{verdict=~\"Stalled|Hung\"}", vec![]),
        ("truebeat_operator_api_calls_total{deployment=\"a\"}", vec![]),
        ("truebeat_operator_api_calls_total{outcome=\"failed\"}", vec![]),
        ("sum by (deploy) (truebeat_ready)", vec![]),
        ("truebeat_ready and on (class) truebeat_fenced", vec![]),
        ("deployment:truebeat_verdict:missing", vec![]),
        ("deployment:truebeat_verdict:lost{pod=\"a\"}", vec![]),
        ("sum by (namespace) (truebeat_ready)", vec!["pod"]),
    ] {
        assert_ne!(wrong(misspelt, &shown), 0, "{misspelt}");
    }
}
