//! Prometheus text (0.0.4) and the OpenMetrics that engines send all the same: names with colons, quoted UTF-8 names, escapes,
//! timestamps, exemplars, NaN and infinities. Capped in bytes and samples; what could not be read is counted, never dropped in
//! silence.

use std::borrow::Cow;

/// One sample line.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    pub name: String,
    pub labels: Vec<(String, String)>,
    pub value: f64,
}

impl Sample {
    /// The value of a label.
    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// Caps of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub bytes_max: usize,
    pub samples_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes_max: 8 << 20, samples_max: 100_000 }
    }
}

/// A parsed page.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Exposition {
    pub samples: Vec<Sample>,
    /// Lines that were neither comment, blank nor a sample.
    pub errors: u32,
    /// The first such line: number (from 1) and what is wrong with it.
    pub first_error: Option<(u32, &'static str)>,
    /// A cap was reached; the rest was not read.
    pub truncated: bool,
}

impl Exposition {
    /// All samples of one name.
    pub fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Sample> + 'a {
        self.samples.iter().filter(move |sample| sample.name == name)
    }

    /// In words, what of the page could not be read; `None`: it was read whole.
    pub fn fault(&self) -> Option<String> {
        let first = self.first_error.map(|(line, wrong)| format!("line {line}: {wrong} ({} such lines)", self.errors));
        let rest = self
            .truncated
            .then(|| format!("what is beyond {} samples, or the cap in bytes, was not read", self.samples.len()));
        let both: Vec<String> = first.into_iter().chain(rest).collect();
        (!both.is_empty()).then(|| both.join("; "))
    }
}

/// Labels of one sample; a line with more is an error. What engines write has fewer than forty.
const LABELS_MAX: usize = 128;

/// Parses a page. Never fails: errors are counted in the result.
pub fn parse(text: &str, limits: Limits) -> Exposition {
    parse_where(text, limits, |_| true)
}

/// [`parse`] that keeps only samples whose name is wanted, so that a page of a million others costs time once and no memory.
/// `limits.samples_max` bounds the kept ones; what is not kept is checked all the same.
pub fn parse_where(text: &str, limits: Limits, wanted: impl Fn(&str) -> bool) -> Exposition {
    let mut page = Exposition::default();
    let text = capped(text, limits.bytes_max, &mut page.truncated);
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line == "# EOF" {
            break;
        }
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if page.samples.len() >= limits.samples_max {
            page.truncated = true;
            break;
        }
        match sample(line, &wanted) {
            Ok(Some(sample)) => page.samples.push(sample),
            Ok(None) => {}
            Err(wrong) => {
                page.errors = page.errors.saturating_add(1);
                let number = u32::try_from(number + 1).unwrap_or(u32::MAX);
                page.first_error.get_or_insert((number, wrong));
            }
        }
    }
    page
}

/// Cuts at the last whole line below the cap.
fn capped<'a>(text: &'a str, bytes_max: usize, truncated: &mut bool) -> &'a str {
    if text.len() <= bytes_max {
        return text;
    }
    *truncated = true;
    let head = text.as_bytes().get(..bytes_max).unwrap_or_default();
    let end = head.iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
    text.get(..end).unwrap_or("")
}

/// One line; `None` where nobody wants it.
fn sample(line: &str, wanted: &impl Fn(&str) -> bool) -> Result<Option<Sample>, &'static str> {
    let mut rest = line;
    let mut name = Cow::Borrowed(take_name(&mut rest));
    rest = rest.trim_start();
    // a name in quotes stands among the labels: whether it is wanted is known only then
    let known = (!name.is_empty()).then(|| wanted(&name));
    let mut labels = Vec::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        let keep = known.unwrap_or(true);
        take_labels(&mut rest, &mut name, |key, value| {
            if keep {
                labels.push((key.into_owned(), value.into_owned()));
            }
        })?;
    } else if !name.is_empty() && rest.len() + name.len() == line.len() && !line.contains(char::is_whitespace) {
        return Err("no value");
    }
    if name.is_empty() {
        return Err("no metric name");
    }
    // an exemplar (` # {..} v`) follows value and timestamp
    let figures = rest.split(" # ").next().unwrap_or("");
    let mut words = figures.split_whitespace();
    let value = number(words.next().ok_or("no value")?).ok_or("the value is no number")?;
    if let Some(stamp) = words.next() {
        stamp.parse::<f64>().map_err(|_| "the timestamp is no number")?;
    }
    if words.next().is_some() {
        return Err("words after the timestamp");
    }
    Ok(known.unwrap_or_else(|| wanted(&name)).then(|| Sample { name: name.into_owned(), labels, value }))
}

/// `[a-zA-Z_:][a-zA-Z0-9_:]*` from the front; empty if there is none.
fn take_name<'a>(rest: &mut &'a str) -> &'a str {
    let belongs = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b':');
    let bytes = rest.as_bytes();
    if bytes.first().is_none_or(u8::is_ascii_digit) {
        return "";
    }
    // a byte of a longer character belongs to no name, so this is a boundary
    let end = bytes.iter().position(|byte| !belongs(byte)).unwrap_or(bytes.len());
    let (name, tail) = rest.split_at(end);
    *rest = tail;
    name
}

/// Labels up to and with the closing brace; a lone quoted string is the metric's name (UTF-8 names).
fn take_labels<'a>(
    rest: &mut &'a str,
    name: &mut Cow<'a, str>,
    mut each: impl FnMut(Cow<'a, str>, Cow<'a, str>),
) -> Result<(), &'static str> {
    let mut count = 0;
    loop {
        *rest = rest.trim_start();
        if let Some(tail) = rest.strip_prefix('}') {
            *rest = tail;
            return Ok(());
        }
        let key = if rest.starts_with('"') { take_quoted(rest)? } else { Cow::Borrowed(take_name(rest)) };
        *rest = rest.trim_start();
        if let Some(tail) = rest.strip_prefix('=') {
            *rest = tail.trim_start();
            if key.is_empty() {
                return Err("a label without a name");
            }
            let value = take_quoted(rest)?;
            count += 1;
            if count > LABELS_MAX {
                return Err("too many labels");
            }
            each(key, value);
        } else if name.is_empty() && !key.is_empty() {
            *name = key;
        } else {
            return Err("a label without a value");
        }
        *rest = rest.trim_start();
        match rest.strip_prefix(',') {
            Some(tail) => *rest = tail,
            None if rest.starts_with('}') => {}
            None => return Err("neither comma nor brace after a label"),
        }
    }
}

/// A double-quoted string with `\\`, `\"` and `\n`; borrowed where nothing is escaped.
fn take_quoted<'a>(rest: &mut &'a str) -> Result<Cow<'a, str>, &'static str> {
    let Some(inside) = rest.strip_prefix('"') else { return Err("a label value without quotes") };
    let special = inside.find(['"', '\\']).ok_or("a label value without an end")?;
    let (plain, tail) = inside.split_at(special);
    if let Some(tail) = tail.strip_prefix('"') {
        *rest = tail;
        return Ok(Cow::Borrowed(plain));
    }
    let mut value = plain.to_owned();
    let mut escaped = false;
    for (at, c) in tail.char_indices() {
        match (escaped, c) {
            (true, 'n') => value.push('\n'),
            (true, '\\' | '"') => value.push(c),
            // other escapes are not defined; what was written is kept
            (true, _) => value.extend(['\\', c]),
            (false, '\\') => {}
            (false, '"') => {
                *rest = tail.get(at + 1..).unwrap_or("");
                return Ok(Cow::Owned(value));
            }
            (false, _) => value.push(c),
        }
        escaped = !escaped && c == '\\';
    }
    Err("a label value without an end")
}

fn number(word: &str) -> Option<f64> {
    match word {
        "+Inf" | "Inf" => Some(f64::INFINITY),
        "-Inf" => Some(f64::NEG_INFINITY),
        "NaN" => Some(f64::NAN),
        _ if word.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '+' | '-' | '.')) => word.parse().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(line: &str) -> Sample {
        let page = parse(line, Limits::default());
        assert_eq!(page.errors, 0, "{line}: {:?}", page.first_error);
        page.samples.into_iter().next().unwrap()
    }

    #[test]
    fn names_with_colons_labels_and_escapes() {
        let sample = one(r#"vllm:num_requests_running{engine="0",model_name="a\"b\\c\n}",} 8.0 1700000000000"#);
        assert_eq!(sample.name, "vllm:num_requests_running");
        assert_eq!(sample.label("model_name"), Some("a\"b\\c\n}"));
        assert_eq!(sample.value, 8.0);
    }

    #[test]
    fn odd_but_legal_forms() {
        assert_eq!(one("up{} 1").value, 1.0);
        assert_eq!(one(r#"{"a.b",l="x"} 2"#).name, "a.b");
        assert_eq!(one("x_total 3 # {trace_id=\"1\"} 0.5 1.0").value, 3.0);
        assert_eq!(one(r#"x_bucket{le="+Inf"} +Inf"#).value, f64::INFINITY);
        assert!(one("x NaN").value.is_nan());
        assert_eq!(one("x\t-1.5e-3").value, -1.5e-3);
    }

    #[test]
    fn errors_are_counted_and_told() {
        let page = parse("good 1\nbad\nx{a=\"1} 2\n9x 1\nx{a=1} 2\ny 1 2 3\nz one\n", Limits::default());
        assert_eq!(page.samples.len(), 1);
        assert_eq!(page.errors, 6);
        assert_eq!(page.fault().as_deref(), Some("line 2: no value (6 such lines)"));
        assert_eq!(parse("good 1\n", Limits::default()).fault(), None);
    }

    #[test]
    fn what_is_not_wanted_is_checked_and_not_kept() {
        let text = "a{x=\"1\"} 1\nb{x=\"2\"} 2\n{\"b\",x=\"3\"} 3\nbroken{x} 1\n{\"a\"} 4\n";
        let page = parse_where(text, Limits { samples_max: 2, ..Limits::default() }, |name| name == "b");
        assert_eq!(page.samples.iter().map(|sample| sample.value).collect::<Vec<_>>(), [2.0, 3.0]);
        assert!(page.truncated, "the third line that is wanted would not fit");
        assert_eq!(page.samples[1].label("x"), Some("3"));
        assert_eq!(parse_where(text, Limits::default(), |name| name == "b").errors, 1);
    }

    #[test]
    fn a_line_of_very_many_labels_is_an_error() {
        let many: String = (0..1_000).map(|i| format!("l{i}=\"\",")).collect();
        let page = parse(&format!("x{{{many}}} 1\ny 2\n"), Limits::default());
        assert_eq!((page.samples.len(), page.errors), (1, 1));
    }

    #[test]
    fn comments_eof_and_caps() {
        let page = parse("# HELP x y\n# TYPE x gauge\n\nx 1\n# EOF\nx 2\n", Limits::default());
        assert_eq!((page.samples.len(), page.errors, page.truncated), (1, 0, false));
        let page = parse("a 1\nb 2\nc 3\n", Limits { bytes_max: 100, samples_max: 2 });
        assert_eq!((page.samples.len(), page.truncated), (2, true));
        let page = parse("a 1\nb 2\nc 3\n", Limits { bytes_max: 9, samples_max: 9 });
        assert_eq!((page.samples.len(), page.errors, page.truncated), (2, 0, true));
    }
}
