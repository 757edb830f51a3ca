//! The messages of a conversation, from what clients send to what templates print.

use serde_json::{Map, Value};

use crate::server::error::ApiError;
use crate::server::intake::Weight;

/// What the arguments of a conversation's calls, which come as text, may take once they are parsed.
const ARGUMENTS_BYTES_MAX: usize = 32 << 20;

/// JSON within texts of the body was weighed as text: it is weighed here, before it is parsed.
///
/// # Errors
/// It would become too much.
pub fn check_arguments(messages: &[Value]) -> Result<(), ApiError> {
    let calls = messages.iter().filter_map(|message| message.get("tool_calls")?.as_array()).flatten();
    let mut weight = Weight::default();
    for text in calls.filter_map(|call| call.get("function")?.get("arguments")?.as_str()) {
        weight.add(text.as_bytes());
        weight.end_text();
    }
    if weight.bytes() <= ARGUMENTS_BYTES_MAX {
        return Ok(());
    }
    let mib = ARGUMENTS_BYTES_MAX >> 20;
    let message =
        format!("the arguments of messages[].tool_calls have too many values: parsed, they are over {mib} MiB");
    Err(ApiError::invalid("messages", message))
}

/// A message as templates want it: content as one text, arguments of calls as objects, `developer` as `system`.
///
/// # Errors
/// It is none, or has something that no template prints.
pub fn message(index: usize, value: &Value) -> Result<Value, ApiError> {
    let wrong = |what: &str| ApiError::invalid("messages", format!("messages[{index}] {what}"));
    let mut message = value.as_object().cloned().ok_or_else(|| wrong("must be an object"))?;
    let role = message.get("role").and_then(Value::as_str).ok_or_else(|| wrong("must have a role"))?.to_owned();
    if role == "developer" {
        message.insert("role".into(), "system".into());
    }
    // an empty list, as servers answer it and clients send it back, is none
    let empty = |value: &Value| value.is_null() || value.as_array().is_some_and(Vec::is_empty);
    let calls = match message.get("tool_calls").filter(|value| !empty(value)) {
        Some(calls) => Some(past_calls(calls).ok_or_else(|| {
            wrong("has tool_calls that are no list of {\"id\", \"type\": \"function\", \"function\": {\"name\", \"arguments\"}} with arguments in JSON")
        })?),
        None => None,
    };
    let content = match message.get("content") {
        None | Some(Value::Null) if role == "assistant" => refusal(&message),
        None | Some(Value::Null) if calls.is_some() => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => parts
            .iter()
            .map(text_part)
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| wrong("has a content part that is no text; only text is understood"))?
            .join("\n"),
        _ => return Err(wrong("must have a content of text")),
    };
    message.insert("content".into(), content.into());
    match calls {
        Some(calls) => message.insert("tool_calls".into(), calls),
        // templates ask whether the key is there
        None => message.remove("tool_calls"),
    };
    Ok(Value::Object(message))
}

/// What an earlier answer says that has no content: clients send it back as they got it.
fn refusal(message: &Map<String, Value>) -> String {
    message.get("refusal").and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// The calls of an earlier answer; templates print the arguments, which clients send as text.
fn past_calls(calls: &Value) -> Option<Value> {
    let call = |call: &Value| {
        let mut call = call.as_object()?.clone();
        let mut function = call.get("function")?.as_object()?.clone();
        function.get("name")?.as_str()?;
        let arguments = match function.get("arguments") {
            Some(Value::String(text)) if text.trim().is_empty() => Value::Object(Map::new()),
            Some(Value::String(text)) => serde_json::from_str(text).ok()?,
            Some(object @ Value::Object(_)) => object.clone(),
            _ => return None,
        };
        function.insert("arguments".into(), arguments);
        call.insert("function".into(), Value::Object(function));
        Some(Value::Object(call))
    };
    calls.as_array()?.iter().map(call).collect::<Option<Vec<_>>>().map(Value::Array)
}

fn text_part(part: &Value) -> Option<&str> {
    let kind = part.get("type")?.as_str()?;
    if kind == "refusal" {
        part.get("refusal")?.as_str()
    } else {
        (kind == "text").then(|| part.get("text")?.as_str())?
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn templates_see_no_list_of_calls_that_is_empty() {
        for nothing in [json!([]), Value::Null] {
            let said = json!({"role": "assistant", "content": "hi", "tool_calls": nothing});
            assert_eq!(message(0, &said).unwrap(), json!({"role": "assistant", "content": "hi"}));
        }
        let silent = json!({"role": "assistant", "content": null, "tool_calls": []});
        assert_eq!(message(0, &silent).unwrap(), json!({"role": "assistant", "content": ""}));
    }

    #[test]
    fn an_answer_without_content_says_nothing_or_its_refusal_and_nobody_else_may() {
        let content = |said: &Value| message(0, said).map(|told| told["content"].clone());
        for refusal in [Value::Null, json!({}), json!("no")] {
            let text = refusal.as_str().unwrap_or_default();
            assert_eq!(content(&json!({"role": "assistant", "refusal": refusal})), Ok(text.into()));
            assert_eq!(content(&json!({"role": "assistant", "content": null, "refusal": refusal})), Ok(text.into()));
        }
        assert_eq!(content(&json!({"role": "assistant", "content": "yes", "refusal": "no"})), Ok("yes".into()));
        for role in ["user", "system", "developer", "tool"] {
            let error = content(&json!({"role": role, "content": null, "refusal": "no"})).unwrap_err();
            assert!(error.message.contains("content"), "{role}: {}", error.message);
        }
    }

    /// Four bytes of text become a third of a kilobyte.
    #[test]
    fn arguments_are_weighed_before_they_are_parsed() {
        let said = |arguments: String| {
            let call = json!({"function": {"name": "f", "arguments": arguments}});
            [json!({"role": "assistant", "tool_calls": [call]})]
        };
        assert!(check_arguments(&said(format!("{{\"text\": \"{}\"}}", "[0],".repeat(1 << 20)))).is_ok(), "a long text");
        assert!(check_arguments(&said(format!("[{}0]", "[0],".repeat(1 << 20)))).is_err());
        assert!(check_arguments(&said("\"".into())).is_ok(), "what is no JSON is told as that");
    }
}
