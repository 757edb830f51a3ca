//! Every PromQL expression that people and programs are given: the chart's rules and dashboards, the examples for autoscalers, and what the
//! pages show. Reads the working tree.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
const RULES: &str = "charts/truebeat/rules/truebeat.rules.yaml";
const DASHBOARDS: &str = "charts/truebeat/dashboards";
const KEDA: &str = "docs/examples/autoscaling/keda.yaml";
const ADAPTER: &str = "docs/examples/autoscaling/prometheus-adapter.yaml";
const HPA: &str = "docs/examples/autoscaling/hpa.yaml";

/// What in the code of a page begins like this is a metric …
const PREFIXES: [&str; 7] =
    ["truebeat_", "truebeat:", "vllm:", "slo:truebeat_", "deployment:truebeat_", "kube_", "DCGM_"];
/// … but for what is something else.
const NO_METRICS: [(&str, &str); 1] = [("truebeat_heartbeat", "the page's header for C, and its package for Python")];
/// Of several recorded series of one name the pages write the window as `W`.
const WINDOW: (&str, &str) = ("_W", "_1h");

/// What Grafana and the adapter put in before Prometheus sees an expression, and something of the kind.
const FILLED_IN: [(&str, &str); 5] = [
    ("$__rate_interval", "5m"),
    ("$__interval", "5m"),
    ("$__range", "5m"),
    ("<<.LabelMatchers>>", "namespace=\"a\",pod=\"b\""),
    ("<<.GroupBy>>", "pod"),
];

/// One expression, as Prometheus would see it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Query {
    /// Where it stands, for people.
    pub place: String,
    pub expr: String,
    /// Labels of its result that are shown beside it.
    pub shown: Vec<String>,
    /// The series that it is recorded as.
    pub recorded: Option<String>,
    /// It stands in a page, where a histogram may be told by its name alone.
    pub in_page: bool,
}

/// All of them.
///
/// # Errors
/// A file that is not there, or not what its name says.
pub fn all() -> Result<Vec<Query>> {
    let mut all = rules()?;
    for path in files(Path::new(DASHBOARDS), "json")? {
        let value = serde_json::from_str(&text(&path)?).with_context(|| path.display().to_string())?;
        of_dashboard(&value, &path.display().to_string(), &mut all);
    }
    let keda = yaml(KEDA)?;
    all.extend(list(&keda["spec"]["triggers"]).filter_map(|one| plain(KEDA, &one["metadata"]["query"])));
    for rule in list(&yaml(ADAPTER)?["rules"]) {
        let series = rule["seriesQuery"].as_str().unwrap_or_default();
        let name = series.split('{').next().unwrap_or_default();
        let query = rule["metricsQuery"].as_str().map(|query| query.replace("<<.Series>>", name));
        all.extend(plain(ADAPTER, &series.into()));
        all.extend(plain(ADAPTER, &query.into()));
    }
    all.extend(of_page("README.md", &text(Path::new("README.md"))?));
    for path in files(Path::new("docs"), "md")? {
        all.extend(of_page(&path.display().to_string(), &text(&path)?));
    }
    Ok(all)
}

/// The metrics that the HorizontalPodAutoscaler asks for, and those that the adapter offers.
///
/// # Errors
/// As [`all`].
pub fn custom_metrics() -> Result<(Vec<String>, Vec<String>)> {
    let words = |value: &Value| value.as_str().map(str::to_owned);
    let asked = list(&yaml(HPA)?["spec"]["metrics"]).filter_map(|one| words(&one["pods"]["metric"]["name"])).collect();
    let offered = list(&yaml(ADAPTER)?["rules"]).filter_map(|rule| words(&rule["name"]["as"])).collect();
    Ok((asked, offered))
}

fn rules() -> Result<Vec<Query>> {
    let all = yaml(RULES)?;
    let rules = list(&all["groups"]).flat_map(|group| list(&group["rules"]).collect::<Vec<_>>());
    let query = |rule: Value| {
        let recorded = rule["record"].as_str().map(str::to_owned);
        let name = rule["alert"].as_str().or(recorded.as_deref())?;
        let annotations = rule["annotations"].to_string();
        let shown = annotations.split("$labels.").skip(1).map(first_word).collect();
        Some(Query { shown, recorded: recorded.clone(), ..plain(&format!("{RULES} {name}"), &rule["expr"])? })
    };
    Ok(rules.filter_map(query).collect())
}

/// What panels draw and variables list, panels in rows too.
fn of_dashboard(value: &Value, place: &str, all: &mut Vec<Query>) {
    for variable in list(&value["templating"]["list"]).filter(|variable| variable["type"] == "query") {
        let values = variable["query"].as_str().and_then(|query| query.strip_prefix("label_values("));
        let parts = values.and_then(|rest| rest.strip_suffix(')')?.rsplit_once(','));
        let query = |(expr, label): (&str, &str)| {
            Some(Query { shown: vec![label.trim().to_owned()], ..plain(place, &expr.into())? })
        };
        // (one that is written otherwise is found by nobody's reading it: it parses as no expression)
        all.extend(parts.map_or_else(|| plain(place, &variable["query"]), query));
    }
    for panel in list(&value["panels"]) {
        let place = format!("{place} {}", panel["title"].as_str().unwrap_or_default());
        for target in list(&panel["targets"]) {
            let legend = target["legendFormat"].as_str().unwrap_or_default();
            let shown = legend.split("{{").skip(1).map(|rest| first_word(rest.trim_start())).collect();
            all.extend(plain(&place, &target["expr"]).map(|query| Query { shown, ..query }));
        }
        of_dashboard(&panel, &place, all);
    }
}

/// The code in a page's text that names metrics.
fn of_page(path: &str, text: &str) -> Vec<Query> {
    let codes = codes(text).into_iter().filter(|code| names_a_metric(code));
    codes
        .map(|code| Query { in_page: true, place: path.to_owned(), expr: windowed(&code), ..Query::default() })
        .collect()
}

/// Pieces of code: between backticks, and blocks that are of no other language.
fn codes(text: &str) -> Vec<String> {
    let (mut codes, mut prose) = (Vec::new(), String::new());
    let mut block: Option<(bool, String)> = None;
    for line in text.lines() {
        match (line.trim_start().strip_prefix("```"), &mut block) {
            (Some(language), None) => block = Some((matches!(language, "" | "promql"), String::new())),
            (Some(_), Some(_)) => codes.extend(block.take().filter(|(ours, _)| *ours).map(|(_, code)| code)),
            (None, Some((_, code))) => *code += &format!("{line}\n"),
            (None, None) => prose += &format!("{line}\n"),
        }
    }
    // a piece may go over the end of a line, and over no paragraph's
    let inline = prose.split("\n\n").flat_map(|paragraph| paragraph.split('`').skip(1).step_by(2));
    codes.extend(inline.map(|code| code.replace("\\|", "|")));
    codes
}

fn names_a_metric(code: &str) -> bool {
    let words = code.split(|c: char| !is_of_a_name(c));
    let is_metric = |word: &str| {
        let begins = PREFIXES.iter().any(|prefix| word.len() > prefix.len() && word.starts_with(prefix));
        begins && !NO_METRICS.iter().any(|(other, _)| word == *other)
    };
    words.into_iter().any(is_metric)
}

/// With one window for whichever.
fn windowed(code: &str) -> String {
    let ends = code.strip_suffix(WINDOW.0).map(|name| format!("{name}{}", WINDOW.1));
    ends.unwrap_or_else(|| code.to_owned())
}

fn plain(place: &str, expr: &Value) -> Option<Query> {
    let expr = FILLED_IN.iter().fold(expr.as_str()?.to_owned(), |expr, (from, to)| expr.replace(from, to));
    Some(Query { place: place.to_owned(), expr, ..Query::default() })
}

fn first_word(text: &str) -> String {
    text.chars().take_while(|c| is_of_a_name(*c)).collect()
}

fn is_of_a_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == ':'
}

fn list(value: &Value) -> impl Iterator<Item = Value> + use<> {
    value.as_array().cloned().unwrap_or_default().into_iter()
}

fn yaml(path: &str) -> Result<Value> {
    serde_saphyr::from_str(&text(Path::new(path))?).with_context(|| path.to_owned())
}

fn text(path: &Path) -> Result<String> {
    std::fs::read_to_string(Path::new(ROOT).join(path)).with_context(|| path.display().to_string())
}

/// All files below with this extension, by their paths from the root.
fn files(dir: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let entries = std::fs::read_dir(Path::new(ROOT).join(dir)).with_context(|| dir.display().to_string())?;
    for entry in entries {
        let entry = entry.with_context(|| dir.display().to_string())?;
        let path = dir.join(entry.file_name());
        if entry.path().is_dir() {
            files.extend(self::files(&path, extension)?);
        } else if path.extension().is_some_and(|of| of == extension) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_shows_expressions_between_backticks_and_in_blocks() {
        let page = "One `truebeat_up`, none\n`heartbeat/c/truebeat_heartbeat.h`; `a\\|truebeat_b` goes\n\
                    ```\nsum(truebeat_c)\n```\n```yaml\nx: truebeat_d\n```\n`truebeat: a line`, `slo:truebeat_e:f_W`.\n";
        let found: Vec<_> = of_page("x.md", page).into_iter().map(|query| query.expr).collect();
        assert_eq!(found, ["sum(truebeat_c)\n", "truebeat_up", "a|truebeat_b", "slo:truebeat_e:f_1h"]);
    }

    #[test]
    fn a_dashboard_shows_panels_in_rows_and_variables() {
        let value = serde_json::json!({
            "templating": {"list": [{"type": "query", "query": "label_values(up{a=\"b\"}, c)"}, {"type": "datasource"}]},
            "panels": [{"title": "row", "panels": [{"title": "one", "targets": [
                {"expr": "rate(x[$__rate_interval])", "legendFormat": "{{ pod }} of {{node}}"}]}]}]
        });
        let mut all = Vec::new();
        of_dashboard(&value, "d", &mut all);
        let told: Vec<_> = all.iter().map(|q| (q.place.as_str(), q.expr.as_str(), q.shown.join(" "))).collect();
        let expected = [("d", "up{a=\"b\"}", "c".to_owned()), ("d row one", "rate(x[5m])", "pod node".to_owned())];
        assert_eq!(told, expected);
    }
}
