//! The chart of a replay, as SVG written by hand: false alarms a year of one engine against latency, each rule a dot, ours a curve.
//! Pure text in, text out.
//!
//! A rule is drawn by the worst that it does: one that kills by its false kills and its time to the kill, one that fences or warns
//! by its false alarms and its time to the alarm. A rule that misses hangs has no 99th percentile and stands in the strip above; one
//! of which no false alarm was seen stands in the column on the left, which says what that is worth (the rule of three).

use std::fmt::Write as _;

use vitals::rivals::OUR_NAME;
use vitals::rivals::score::{Rate, RuleScore, rate};

use super::table;

const WIDTH: f64 = 1_080.0;
const HEIGHT: f64 = 620.0;
/// The column of rules without a false alarm, and the plot to its right.
const NONE_LEFT: f64 = 76.0;
const LEFT: f64 = 226.0;
const RIGHT: f64 = 690.0;
const TOP: f64 = 148.0;
const BOTTOM: f64 = 556.0;
/// Where dots stand in the strip of rules that miss hangs, and in the column of those without a false alarm.
const STRIP: f64 = 100.0;
const NONE: f64 = NONE_LEFT + 20.0;
const DOT: f64 = 9.0;

/// What is drawn of one account.
#[derive(Debug, Clone, PartialEq)]
struct Point {
    name: String,
    rate: Rate,
    /// p99, in seconds; `None` where hangs were missed.
    latency_s: Option<f64>,
    caught: (u64, u64),
    acts: &'static str,
}

impl Point {
    /// By what the rule does at worst.
    fn of(score: &RuleScore) -> Option<Self> {
        let acts = table::acts(&score.rule);
        if acts == "fences" || acts == "warns" { Self::fence(score, acts) } else { Self::kill(score) }
    }

    fn fence(score: &RuleScore, acts: &'static str) -> Option<Self> {
        Some(Self {
            name: score.rule.clone(),
            rate: score.fence_rate()?,
            latency_s: score.latency_quantile_ms(990).map(seconds),
            caught: (score.caught, score.hangs),
            acts,
        })
    }

    fn kill(score: &RuleScore) -> Option<Self> {
        Some(Self {
            name: score.rule.clone(),
            rate: score.eviction_rate()?,
            latency_s: score.evict_quantile_ms(990).map(seconds),
            caught: (score.evict_latency_ms.len() as u64, score.hangs),
            acts: "evicts",
        })
    }
}

fn seconds(ms: u64) -> f64 {
    ms as f64 / 1000.0
}

/// A logarithmic axis over whole decades.
#[derive(Debug, Clone, Copy)]
struct Axis {
    decade_min: i32,
    decade_max: i32,
    from: f64,
    to: f64,
}

impl Axis {
    /// Wide enough for the values; two decades at least.
    fn over(values: impl Iterator<Item = f64> + Clone, from: f64, to: f64) -> Self {
        let low = values.clone().fold(f64::INFINITY, f64::min).max(1e-9);
        let high = values.fold(0.0, f64::max).max(low);
        let decade_min = if low.is_finite() { low.log10().floor() as i32 } else { 0 };
        let decade_max = (high.log10().ceil() as i32).clamp(decade_min + 2, decade_min + 15);
        Self { decade_min, decade_max, from, to }
    }

    fn at(&self, value: f64) -> f64 {
        let share =
            (value.max(1e-12).log10() - f64::from(self.decade_min)) / f64::from(self.decade_max - self.decade_min);
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }

    fn decades(&self) -> impl Iterator<Item = i32> + use<> {
        self.decade_min..=self.decade_max
    }
}

/// Draws every rule of `scores`, and our family of policies (`sweep`, named as [`vitals::rivals::SWEEP`] does).
pub fn render(scores: &[RuleScore], sweep: &[RuleScore]) -> String {
    let rivals: Vec<Point> = scores.iter().filter(|score| score.rule != OUR_NAME).filter_map(Point::of).collect();
    let kills: Vec<Point> = sweep.iter().filter_map(Point::kill).collect();
    let fences: Vec<Point> = sweep.iter().filter_map(|score| Point::fence(score, "fences")).collect();
    let all = || rivals.iter().chain(&kills).chain(&fences);
    let x = Axis::over(all().filter(|point| !point.rate.is_bound).map(|point| point.rate.per_year), LEFT, RIGHT);
    let y = Axis::over(all().filter_map(|point| point.latency_s), BOTTOM, TOP);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    frame(&mut svg, &x, &y, scores);
    curve(&mut svg, &x, &y, &fences, "#2a7f9e", "fence");
    curve(&mut svg, &x, &y, &kills, "#c8500a", "kill");
    dots(&mut svg, &x, &y, &rivals);
    legend(&mut svg, &rivals, &kills, &fences);
    svg.push_str("</svg>\n");
    svg
}

/// Where a rate stands: on the axis, or in the column of those that were never wrong.
fn across(x: &Axis, rate: Rate) -> f64 {
    if rate.is_bound { NONE } else { x.at(rate.per_year) }
}

fn text(svg: &mut String, x: f64, y: f64, style: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" {style}>{words}</text>");
}

fn line(svg: &mut String, from: (f64, f64), to: (f64, f64), style: &str) {
    let _ = writeln!(
        svg,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" {style}/>",
        from.0, from.1, to.0, to.1
    );
}

fn frame(svg: &mut String, x: &Axis, y: &Axis, scores: &[RuleScore]) {
    let hangs = scores.iter().map(|score| score.hangs).max().unwrap_or(0);
    let hours = scores.iter().map(|score| score.benign_hours).fold(0.0, f64::max);
    text(svg, NONE_LEFT, 28.0, "font-size=\"16\" font-weight=\"bold\"", "How soon, and how often wrong");
    let under = format!("{hangs} hangs, {hours:.2} engine-hours of health; left and down is better");
    text(svg, NONE_LEFT, 48.0, "fill=\"#555\"", &under);
    let mut shade = |x: f64, y: f64, width: f64, height: f64| {
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"#f1f1f1\"/>"
        );
    };
    shade(NONE_LEFT, 68.0, RIGHT - NONE_LEFT, 66.0);
    shade(NONE_LEFT, TOP, LEFT - NONE_LEFT - 16.0, BOTTOM - TOP);
    text(svg, NONE_LEFT + 6.0, 82.0, "fill=\"#777\" font-size=\"11\"", "misses hangs: no 99th percentile");
    for decade in x.decades() {
        let at = x.at(10f64.powi(decade));
        line(svg, (at, TOP), (at, BOTTOM), "stroke=\"#ddd\"");
        text(svg, at, BOTTOM + 18.0, "text-anchor=\"middle\"", &power(decade));
    }
    for decade in y.decades() {
        let at = y.at(10f64.powi(decade));
        line(svg, (NONE_LEFT, at), (RIGHT, at), "stroke=\"#ddd\"");
        text(svg, NONE_LEFT - 8.0, at + 4.0, "text-anchor=\"end\"", &format!("{} s", power(decade)));
    }
    let bound = rate(0, hours).map_or(String::new(), table::rate);
    text(svg, NONE_LEFT, BOTTOM + 18.0, "", "none seen");
    text(svg, NONE_LEFT, BOTTOM + 34.0, "fill=\"#555\" font-size=\"11\"", &bound);
    let (across, up) = (f64::midpoint(LEFT, RIGHT), f64::midpoint(TOP, BOTTOM));
    text(svg, across, BOTTOM + 40.0, "text-anchor=\"middle\"", "false alarms a year of one engine");
    let turned = format!("text-anchor=\"middle\" transform=\"rotate(-90 18 {up:.1})\"");
    text(svg, 18.0, up, &turned, "99th percentile of latency");
}

/// 0.001 … 100, 1,000, 10k, 1M …
fn power(decade: i32) -> String {
    match decade {
        ..0 => format!("{:.*}", decade.unsigned_abs() as usize, 10f64.powi(decade)),
        0..=2 => format!("{:.0}", 10f64.powi(decade)),
        3..=5 => format!("{:.0}k", 10f64.powi(decade - 3)),
        _ => format!("{:.0}M", 10f64.powi(decade - 6)),
    }
}

fn curve(svg: &mut String, x: &Axis, y: &Axis, points: &[Point], colour: &str, what: &str) {
    let placed: Vec<(f64, f64, &Point)> =
        points.iter().filter_map(|point| Some((across(x, point.rate), y.at(point.latency_s?), point))).collect();
    let path: Vec<String> = placed.iter().map(|(px, py, _)| format!("{px:.1},{py:.1}")).collect();
    let _ =
        writeln!(svg, "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>", path.join(" "));
    let mut labelled: Vec<(f64, f64)> = Vec::new();
    // ours first: where points share a place, its name is the one to read
    for (px, py, point) in placed.iter().filter(|at| at.2.name == OUR_NAME).chain(&placed) {
        let ours = point.name == OUR_NAME;
        let radius = if ours { 7.0 } else { 3.5 };
        let _ = writeln!(svg, "<circle cx=\"{px:.1}\" cy=\"{py:.1}\" r=\"{radius}\" fill=\"{colour}\"/>");
        if labelled.iter().any(|(lx, ly)| (lx - px).abs() < 60.0 && (ly - py).abs() < 11.0) {
            continue;
        }
        labelled.push((*px, *py));
        let percent = point.name.rsplit('@').next().unwrap_or_default();
        let words = if ours { format!("truebeat, {what}") } else { format!("{percent} %") };
        let weight = if ours { "bold" } else { "normal" };
        let style = format!("fill=\"{colour}\" font-size=\"11\" font-weight=\"{weight}\"");
        text(svg, px + 9.0, py - 6.0, &style, &words);
    }
}

fn dots(svg: &mut String, x: &Axis, y: &Axis, points: &[Point]) {
    let mut taken: Vec<(f64, f64)> = Vec::new();
    for (i, point) in points.iter().enumerate() {
        let mut py = point.latency_s.map_or(STRIP, |latency_s| y.at(latency_s));
        let mut px = across(x, point.rate);
        // dots at the same place stand side by side
        let step = 2.0 * DOT + 1.0;
        while taken.iter().any(|(tx, ty)| (tx - px).abs() < step && (ty - py).abs() < 2.0 * DOT) {
            px += step;
            // the column of those that were never wrong is full: a row below
            if point.rate.is_bound && px > LEFT - 26.0 {
                (px, py) = (NONE, py + 2.0 * DOT);
            }
        }
        taken.push((px, py));
        dot(svg, px, py, point.acts, i + 1);
    }
}

/// Full: kills. Hollow: fences. Dashed: warns.
fn dot(svg: &mut String, x: f64, y: f64, acts: &str, number: usize) {
    let (fill, ink, dash) = match acts {
        "warns" => ("white", "#333", " stroke-dasharray=\"3 2\""),
        "fences" => ("white", "#333", ""),
        _ => ("#333", "white", ""),
    };
    let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{DOT}\" fill=\"{fill}\" stroke=\"#333\"{dash}/>");
    text(svg, x, y + 4.0, &format!("text-anchor=\"middle\" font-size=\"10\" fill=\"{ink}\""), &number.to_string());
}

fn legend(svg: &mut String, rivals: &[Point], kills: &[Point], fences: &[Point]) {
    let left = RIGHT + 30.0;
    let mut at = 82.0;
    text(svg, left, at, "font-weight=\"bold\"", "rule: p99, caught, false alarms a year");
    for (i, point) in rivals.iter().enumerate() {
        at += 24.0;
        dot(svg, left + DOT, at - 4.0, point.acts, i + 1);
        entry(svg, left + 26.0, at, point, &point.name, "#222");
    }
    for (points, what, colour) in [(fences, "truebeat fences", "#2a7f9e"), (kills, "truebeat kills", "#c8500a")] {
        if let Some(point) = points.iter().find(|point| point.name == OUR_NAME) {
            at += 24.0;
            let _ =
                writeln!(svg, "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"7\" fill=\"{colour}\"/>", left + DOT, at - 4.0);
            entry(svg, left + 26.0, at, point, what, colour);
        }
    }
    at += 30.0;
    for words in [
        "full dot: kills; hollow: fences; dashed: only warns.",
        "Small dots of a curve: every deadline, factor and",
        "confirm time at that share of the default.",
    ] {
        text(svg, left, at, "fill=\"#555\" font-size=\"11\"", words);
        at += 15.0;
    }
}

fn entry(svg: &mut String, x: f64, y: f64, point: &Point, name: &str, colour: &str) {
    let latency = point.latency_s.map_or("none".to_owned(), |seconds| format!("{seconds:.1} s"));
    let words = format!("{name}: {latency}, {}/{}, {}", point.caught.0, point.caught.1, table::rate(point.rate));
    text(svg, x, y, &format!("fill=\"{colour}\" font-size=\"11\""), &words);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(rule: &str, latency_ms: &[u64], false_evictions: u64) -> RuleScore {
        RuleScore {
            hangs: 2,
            caught: latency_ms.len() as u64,
            latency_ms: latency_ms.to_vec(),
            evict_latency_ms: latency_ms.to_vec(),
            benign_hours: 10.0,
            false_fences: false_evictions,
            false_evictions,
            ..RuleScore::new(rule)
        }
    }

    #[test]
    fn every_rule_has_a_dot_and_a_miss_has_no_percentile() {
        let scores =
            [score("gonka", &[120_000], 0), score("kubelet", &[30_000, 40_000], 3), score(OUR_NAME, &[1_000, 900], 0)];
        let svg = render(&scores, &[score("truebeat@50", &[500, 600], 1), score(OUR_NAME, &[1_000, 900], 0)]);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("gonka: none, 1/2, ≤ 2,630") && svg.contains("kubelet: 40.0 s, 2/2, 2,630"), "{svg}");
        assert!(svg.contains("truebeat kills: 1.0 s, 2/2, ≤ 2,630"), "{svg}");
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert_eq!(svg.matches('<').count(), svg.matches('>').count(), "every mark is closed");
    }

    #[test]
    fn an_axis_holds_its_values_and_nothing_is_no_axis_to_fall_over() {
        let axis = Axis::over([3.0, 4_000.0].into_iter(), 0.0, 100.0);
        assert_eq!((axis.decade_min, axis.decade_max), (0, 4));
        assert!((axis.at(100.0) - 50.0).abs() < 1e-9);
        let empty = Axis::over(std::iter::empty(), 0.0, 100.0);
        assert!(empty.at(5.0).is_finite());
        assert_eq!([power(-2), power(0), power(4), power(7)], ["0.01", "1", "10k", "10M"]);
    }
}
