//! What a template may ask for that Python does otherwise than minijinja, as `transformers` has it. engine/tests/published compares.

use minijinja::value::{Kwargs, StringInput};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value, escape_formatter};
use serde_json::Value as Json;

/// No template indents by more; a number that a template made is no length of a text.
const MARGIN_MAX: usize = 1024;

pub fn add_to(environment: &mut Environment<'_>) {
    environment.add_filter("tojson", to_json);
    environment.add_filter("indent", indent);
    environment.add_test("iterable", is_iterable);
    environment.set_formatter(print);
}

/// A number that is printed by itself.
fn print(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    if value.is_number() && !value.is_integer() {
        let float = f64::try_from(value.clone())?;
        if float.is_finite() {
            return Ok(out.write_str(&float_text(float))?);
        }
    }
    escape_formatter(out, state, value)
}

/// `None` is nothing to go through: templates ask so for tools before they count them.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// jinja2's: the last line keeps its end, and of several only the last is lost.
fn indent(
    text: StringInput<'_>,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    args: Kwargs,
) -> Result<String, Error> {
    let width = if let Some(width) = width { Some(width) } else { args.get("width")? };
    let margin = width.map_or_else(|| Ok(" ".repeat(4)), |width| margin(&width))?;
    let or_named = |given: Option<bool>, name: &str| match given {
        Some(given) => Ok(given),
        None => args.get::<Option<bool>>(name).map(Option::unwrap_or_default),
    };
    let (first, blank) = (or_named(first, "first")?, or_named(blank, "blank")?);
    args.assert_all_used()?;
    let mut out = if first { margin.clone() } else { String::new() };
    for (index, line) in lines(text.as_str()).enumerate() {
        if index > 0 {
            out.push('\n');
            out.push_str(if blank || !line.is_empty() { &margin } else { "" });
        }
        out.push_str(line);
    }
    Ok(out)
}

/// So many blanks, or the text itself.
fn margin(width: &Value) -> Result<String, Error> {
    if let Some(text) = width.as_str() {
        return Ok(text.to_owned());
    }
    let width = usize::try_from(width.clone())?;
    if width > MARGIN_MAX {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("at most {MARGIN_MAX} blanks, not {width}")));
    }
    Ok(" ".repeat(width))
}

/// The lines of a text that has one more end, as `str.splitlines` of Python finds them.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    const ENDS: [char; 10] = ['\n', '\r', '\x0b', '\x0c', '\x1c', '\x1d', '\x1e', '\u{85}', '\u{2028}', '\u{2029}'];
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        let Some(at) = text.find(ENDS) else {
            rest = None;
            return Some(text);
        };
        let (line, tail) = text.split_at(at);
        let mut tail = tail.chars();
        if tail.next() == Some('\r') && tail.as_str().starts_with('\n') {
            tail.next();
        }
        rest = Some(tail.as_str());
        Some(line)
    })
}

/// Python's `json.dumps`, but that letters stay as they are. The built-in filter would escape `<` and `'` for HTML, which is another
/// prompt than the model was trained on.
fn to_json(value: &Value, args: Kwargs) -> Result<Value, Error> {
    let refuse = |why: String| Error::new(ErrorKind::InvalidOperation, format!("tojson: {why}"));
    let indent: Option<Value> = args.get("indent")?;
    let separators: Option<Vec<String>> = args.get("separators")?;
    let style = Style {
        margin: indent.filter(|indent| !indent.is_none()).map(|indent| margin(&indent)).transpose()?,
        separators: match separators {
            None => None,
            Some(both) => Some(both.try_into().map_err(|_| refuse("separators are two texts".to_owned()))?),
        },
        ascii: args.get::<Option<bool>>("ensure_ascii")?.unwrap_or_default(),
        sorted: args.get::<Option<bool>>("sort_keys")?.unwrap_or_default(),
    };
    args.assert_all_used()?;
    let json = serde_json::to_value(value).map_err(|error| refuse(error.to_string()))?;
    let mut out = String::new();
    style.write(&json, 0, &mut out);
    Ok(Value::from_safe_string(out))
}

/// How a value is written.
struct Style {
    /// What a line within something begins with; None: all is one line.
    margin: Option<String>,
    /// Between items, and after a key.
    separators: Option<[String; 2]>,
    ascii: bool,
    sorted: bool,
}

impl Style {
    fn write(&self, value: &Json, depth: usize, out: &mut String) {
        match value {
            Json::Array(items) if !items.is_empty() => {
                self.write_items(('[', ']'), items.iter().map(|item| (None, item)), depth, out);
            }
            Json::Object(entries) if !entries.is_empty() => {
                let mut items: Vec<_> = entries.iter().map(|(key, item)| (Some(key.as_str()), item)).collect();
                if self.sorted {
                    items.sort_by_key(|(key, _)| *key);
                }
                self.write_items(('{', '}'), items.into_iter(), depth, out);
            }
            Json::String(text) => self.write_text(text, out),
            Json::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
                Some(float) => out.push_str(&float_text(float)),
                None => out.push_str(&number.to_string()),
            },
            scalar => out.push_str(&scalar.to_string()),
        }
    }

    fn write_items<'a>(
        &self,
        (open, close): (char, char),
        items: impl Iterator<Item = (Option<&'a str>, &'a Json)>,
        depth: usize,
        out: &mut String,
    ) {
        let line_break = |depth: usize, out: &mut String| {
            if let Some(margin) = &self.margin {
                out.push('\n');
                out.extend(std::iter::repeat_n(margin.as_str(), depth));
            }
        };
        let one_line = self.margin.is_none();
        let (item_end, key_end) = match &self.separators {
            Some([item_end, key_end]) => (item_end.as_str(), key_end.as_str()),
            None => (if one_line { ", " } else { "," }, ": "),
        };
        out.push(open);
        for (index, (key, item)) in items.enumerate() {
            if index > 0 {
                out.push_str(item_end);
            }
            line_break(depth + 1, out);
            if let Some(key) = key {
                self.write_text(key, out);
                out.push_str(key_end);
            }
            self.write(item, depth + 1, out);
        }
        line_break(depth, out);
        out.push(close);
    }

    fn write_text(&self, text: &str, out: &mut String) {
        let json = Json::from(text).to_string();
        if !self.ascii {
            out.push_str(&json);
            return;
        }
        for letter in json.chars() {
            if letter.is_ascii() && letter != '\x7f' {
                out.push(letter);
            } else {
                let units =
                    letter.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect::<String>();
                out.push_str(&units);
            }
        }
    }
}

/// Python's `repr`: the fewest digits that mean the number, with a power of ten below 0.0001 and from 10^16 on.
fn float_text(float: f64) -> String {
    let size = float.abs();
    if size == 0.0 || (1e-4..1e16).contains(&size) {
        return format!("{float:?}");
    }
    let text = format!("{float:e}");
    let Some((digits, power)) = text.split_once('e') else { return text };
    let (sign, power) = power.strip_prefix('-').map_or(('+', power), |power| ('-', power));
    format!("{digits}e{sign}{power:0>2}")
}
