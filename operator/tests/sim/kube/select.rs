//! Label and field selectors, as lists and watches have them.

use serde_json::Value;

use super::{Refusal, object::Object};

/// The fields by which objects of any kind can be chosen. (Pods and others have more.)
const FIELDS: [&str; 2] = ["metadata.name", "metadata.namespace"];

/// Does a label selector take these labels?
pub fn by_labels(selector: &str, labels: &Value) -> bool {
    terms(selector).all(|term| takes(term, labels))
}

/// Does a field selector take this object?
pub fn by_fields(selector: &str, object: &Object) -> bool {
    terms(selector).all(|term| {
        let (field, wanted, same) = compared(term);
        let name = field.rsplit('.').next().unwrap_or_default();
        (object["metadata"][name].as_str().unwrap_or_default() == wanted) == same
    })
}

/// Can it take one object at most? (The API server gets that by its name, and then there is nothing to go on with.)
pub fn of_one(selector: &str) -> bool {
    terms(selector).map(compared).any(|(field, _, same)| field == FIELDS[0] && same)
}

/// Is there a field that objects of any kind cannot be chosen by?
pub fn known_fields(selector: &str) -> Result<(), Refusal> {
    let unknown = terms(selector).map(|term| compared(term).0).find(|field| !FIELDS.contains(field));
    let what = |field| Refusal::new(400, "BadRequest", format!("field label not supported: {field}"));
    unknown.map_or(Ok(()), |field| Err(what(field)))
}

/// A comma within parentheses divides nothing.
fn terms(selector: &str) -> impl Iterator<Item = &str> {
    let mut within = false;
    let divides = move |c: char| {
        within = if matches!(c, '(' | ')') { c == '(' } else { within };
        c == ',' && !within
    };
    selector.split(divides).map(str::trim).filter(|term| !term.is_empty())
}

fn takes(term: &str, labels: &Value) -> bool {
    if let Some((head, list)) = term.strip_suffix(')').and_then(|term| term.split_once('(')) {
        let mut words = head.split_whitespace();
        let (label, negated) = (&labels[words.next().unwrap_or_default()], words.next() == Some("notin"));
        return list.split(',').any(|value| label == value.trim()) != negated;
    }
    if let Some(key) = term.strip_prefix('!').filter(|_| !term.contains('=')) {
        return labels[key].is_null();
    }
    if !term.contains('=') {
        return !labels[term].is_null();
    }
    let (key, wanted, same) = compared(term);
    (labels[key] == wanted) == same
}

/// Name and value of `a=b`, `a==b` or `a!=b`, and whether they are to be the same.
fn compared(term: &str) -> (&str, &str, bool) {
    let (name, value) = term.split_once('=').unwrap_or((term, ""));
    let same = !name.ends_with('!');
    (name.trim_end_matches('!'), value.trim_start_matches('='), same)
}
