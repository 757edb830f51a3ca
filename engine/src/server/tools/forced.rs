//! Grammars of calls: for answers that have to call something, and for calls in free text whose arguments must be right. Pure.

use serde_json::json;

use super::Function;
use crate::codec::ToolFormat;
use crate::grammar::{GrammarSpec, lark_json, lark_string};

/// Calls in one answer that is forced to call: a weak model would go on for ever.
const CALLS_MAX: usize = 16;

/// An answer that calls one of these functions, or several where `parallel` allows and the model can.
pub fn forced(format: ToolFormat, functions: &[Function], parallel: bool) -> GrammarSpec {
    let rules = bodies(format, functions, true);
    let text = match (format, parallel) {
        (ToolFormat::Hermes, true) => {
            let more = CALLS_MAX - 1;
            format!("start: call ({} call){{0,{more}}}\ncall: {} body {}\n{rules}", lark_string("\n"), OPEN, CLOSE)
        }
        (ToolFormat::Hermes, false) => format!("start: {OPEN} body {CLOSE}\n{rules}"),
        // one call an answer is all that this format knows
        (ToolFormat::Llama3, _) => format!("start: body\n{rules}"),
    };
    GrammarSpec::Lark(text)
}

/// An answer that may call or not; arguments of functions that are strict satisfy their schemas.
pub fn free(format: ToolFormat, functions: &[Function]) -> GrammarSpec {
    let rules = bodies(format, functions, false);
    let text = match format {
        ToolFormat::Hermes => format!(
            "start: call* rest\ncall: before body {CLOSE}\nbefore[lazy]: TEXT {OPEN}\nrest: TEXT\nTEXT: /(\\n|.)*/\n{rules}"
        ),
        // what does not begin like a call is none
        ToolFormat::Llama3 => format!("start: body | TEXT\nTEXT: /([^{{\\s](\\n|.)*)?/\n{rules}"),
    };
    GrammarSpec::Lark(text)
}

const OPEN: &str = r#""<tool_call>\n""#;
const CLOSE: &str = r#""\n</tool_call>""#;

/// Rules `body`, and one for each function's call and arguments. `all`: also functions that are not strict obey their schemas.
fn bodies(format: ToolFormat, functions: &[Function], all: bool) -> String {
    let key = match format {
        ToolFormat::Hermes => "arguments",
        ToolFormat::Llama3 => "parameters",
    };
    let names: Vec<String> = (0..functions.len()).map(|i| format!("body_{i}")).collect();
    let mut rules = format!("body: {}\n", names.join(" | "));
    for (i, function) in functions.iter().enumerate() {
        let any = json!({"type": "object"});
        let schema = if all || function.strict { &function.parameters } else { &any };
        let head = lark_string(&format!("{{\"name\": \"{}\", \"{key}\": ", function.name));
        // The arguments' schema is a document of its own: references in it begin at its own root.
        rules += &format!("body_{i}: {head} args_{i} \"}}\"\nargs_{i}: %json {}\n", lark_json(schema));
    }
    rules
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grammar::tests::follows;

    fn functions() -> Vec<Function> {
        let small = json!({"type": "object", "properties": {"n": {"$ref": "#/$defs/small"}}, "required": ["n"],
            "additionalProperties": false, "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 9}}});
        vec![
            Function { name: "count".into(), parameters: small, strict: true },
            Function { name: "find".into(), parameters: json!({"type": "object"}), strict: false },
        ]
    }

    fn hermes(name: &str, arguments: &str) -> String {
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
    }

    #[test]
    fn forced_answers_call_once_or_often_and_nothing_else() {
        let (one, two) = (hermes("count", "{\"n\": 3}"), hermes("find", "{\"what\": [1]}"));
        let [once, often] = [false, true].map(|parallel| forced(ToolFormat::Hermes, &functions(), parallel));
        assert!(follows(&once, &one) && follows(&often, &one) && follows(&often, &format!("{one}\n{two}")));
        assert!(!follows(&once, &format!("{one}\n{two}")) && !follows(&often, &format!("{one}{two}")));
        for none in ["", "text", &hermes("gone", "{}"), &hermes("count", "{\"n\": 30}"), &format!("text {one}")] {
            assert!(!follows(&often, none), "{none}");
        }
        let llama = forced(ToolFormat::Llama3, &functions(), true);
        assert!(follows(&llama, "{\"name\": \"count\", \"parameters\": {\"n\": 3}}"));
        assert!(!follows(&llama, &one) && !follows(&llama, "{\"name\": \"count\", \"parameters\": {}}"));
    }

    #[test]
    fn free_answers_say_what_they_like_until_they_call() {
        let hermes_free = free(ToolFormat::Hermes, &functions());
        let (one, loose) = (hermes("count", "{\"n\": 3}"), hermes("find", "{\"n\": 30}"));
        for fine in ["", "any text <tool> {", &one, &format!("see:\n{one}\n{loose}"), &loose] {
            assert!(follows(&hermes_free, fine), "{fine}");
        }
        assert!(!follows(&hermes_free, &format!("see:\n{}", hermes("count", "{\"n\": 30}"))));
        let llama_free = free(ToolFormat::Llama3, &functions());
        for fine in ["", "any text {", "{\"name\": \"count\", \"parameters\": {\"n\": 3}}"] {
            assert!(follows(&llama_free, fine), "{fine}");
        }
        assert!(!follows(&llama_free, "{\"name\": \"count\", \"parameters\": {\"n\": 30}}"));
    }
}
