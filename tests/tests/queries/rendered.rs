//! The metrics of agent, operator and engine as their own registries write them, each series touched once, and who adds which labels to them.

use std::collections::{BTreeMap, BTreeSet};

use agent::gate::ledger::GateReply;
use agent::status::StatusDoc;
use agent::supervisor::board::Board;
use crds::InferenceDeployment;
use crds::engine_incident::OUTCOMES;
use engine::beat::BeatBoard;
use engine::scheduler::Limits;
use engine::speculation::SpeculationCounts;
use vitals::verdict::Verdict;

use crate::promql::{Part, parts};

/// What Prometheus and its operator put on each series of a pod.
const OF_A_TARGET: [&str; 6] = ["namespace", "pod", "container", "endpoint", "job", "instance"];
/// What the chart's PodMonitors put on those of agents and engines besides.
pub const OF_A_REPLICA: &str = "deployment";

/// A metric, under which several series may stand.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Family {
    pub kind: String,
    /// Its own labels and their values; a histogram's `le` is not among them.
    pub labels: BTreeMap<String, BTreeSet<String>>,
    /// Labels that come by its scrape.
    pub added: BTreeSet<String>,
}

impl Family {
    pub fn has(&self, label: &str) -> bool {
        self.labels.contains_key(label) || self.added.contains(label)
    }
}

/// Each by its name.
pub type Families = BTreeMap<String, Family>;

/// All that the three programs write.
pub fn families() -> Families {
    let of_replicas = [OF_A_TARGET.as_slice(), &[OF_A_REPLICA]].concat();
    let mut all = read(&agents(), &of_replicas);
    all.extend(read(&operators(), &OF_A_TARGET));
    all.extend(read(&engines(), &of_replicas));
    all
}

/// The name of the family that this series is of, and the labels that it has besides; `None` where there is no such series.
pub fn family_of<'a>(families: &'a Families, series: &str) -> Option<(&'a str, &'a Family, &'static [&'static str])> {
    let parts = [("_bucket", ["le"].as_slice()), ("_sum", &[]), ("_count", &[])];
    let of_histogram = parts.iter().find_map(|(part, labels)| {
        let (name, family) = families.get_key_value(series.strip_suffix(part)?)?;
        (family.kind == "histogram").then_some((name.as_str(), family, *labels))
    });
    let plain = families.get_key_value(series).filter(|(_, family)| family.kind != "histogram");
    of_histogram.or_else(|| plain.map(|(name, family)| (name.as_str(), family, [].as_slice())))
}

fn agents() -> String {
    let metrics = agent::metrics::Metrics::new().unwrap();
    metrics.set_verdict(&Verdict::Progressing, false, true);
    metrics.set_gate(&GateReply::default());
    let board = Board::default();
    board.count_restart("gate");
    board.post(StatusDoc::default());
    metrics.text() + &board.metrics()
}

fn operators() -> String {
    let metrics = operator::metrics::Metrics::new().unwrap();
    metrics.api_calls.with_label_values(&["get", "ok"]).inc();
    metrics.reconciles.with_label_values(&["ok"]).inc();
    metrics.watch_up.with_label_values(&["Pod"]).set(1);
    for gauge in [
        &metrics.grants_held,
        &metrics.restarts_held,
        &metrics.trials_failed,
        &metrics.rollout_failed,
        &metrics.fenced_by_person,
        &metrics.objects_doubted,
        &metrics.health_lies,
        &metrics.replicas_wanted,
        &metrics.replicas_ready,
    ] {
        gauge.with_label_values(&["a", "b"]).set(1);
    }
    metrics.repaired_from_zero("a", "b");
    let infd = InferenceDeployment::new("b", serde_json::from_str(SPEC).unwrap());
    OUTCOMES.iter().for_each(|outcome| metrics.stall_closed(&infd, (outcome, 1.0), &[]));
    String::from_utf8(metrics.text().unwrap()).unwrap()
}

/// What is asked of its metrics is its name alone.
const SPEC: &str = r#"{"engine": {"kind": "Truebeat", "image": "i"}, "agent": {"image": "a"}}"#;

fn engines() -> String {
    let metrics = engine::metrics::Metrics::new("m").unwrap();
    metrics.cache_config(&Limits::default());
    metrics.speculation(&SpeculationCounts { accepted_at: vec![1], ..SpeculationCounts::default() }, true);
    metrics.text(&BeatBoard::default(), 0).unwrap()
}

/// What a page in Prometheus' text format holds; the scrape puts these labels on all of it.
fn read(page: &str, added: &[&str]) -> Families {
    let added: BTreeSet<String> = added.iter().map(|label| (*label).to_owned()).collect();
    let mut families = Families::new();
    for line in page.lines() {
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            let family = Family { kind: kind.to_owned(), added: added.clone(), ..Family::default() };
            families.insert(name.to_owned(), family);
        } else if !line.starts_with('#') {
            // a sample is written as a query would ask for it
            let Some(Part::Series(series)) = parts(line).unwrap().into_iter().next() else { panic!("{line}") };
            let name =
                family_of(&families, &series.name).unwrap_or_else(|| panic!("of no family: {line}")).0.to_owned();
            let labels = &mut families.get_mut(&name).unwrap().labels;
            for matcher in series.matchers.into_iter().filter(|matcher| matcher.label != "le") {
                labels.entry(matcher.label).or_default().insert(matcher.value);
            }
        }
    }
    families
}
