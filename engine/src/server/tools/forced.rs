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
