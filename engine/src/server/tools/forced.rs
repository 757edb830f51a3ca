//! Grammars of calls: for answers that have to call something, and for calls in free text whose arguments must be right. Pure.

use serde_json::json;

use super::Function;
use super::parser::{PYTHON_TAG, TOOL_CALLS};
use crate::codec::ToolFormat;
use crate::grammar::{GrammarSpec, lark_json, lark_string};

/// Calls in one answer that is forced to call: a weak model would go on for ever.
const CALLS_MAX: usize = 16;

/// An answer that calls one of these functions, or several where `parallel` allows and the model can. `mark`: the token that begins a list
/// of calls, where it is one that no text has.
pub fn forced(format: ToolFormat, functions: &[Function], parallel: bool, mark: Option<u32>) -> GrammarSpec {
    let rules = bodies(format, functions, true);
    let text = match (format, parallel) {
        (ToolFormat::Hermes, true) => {
            let more = CALLS_MAX - 1;
            format!("start: call ({} call){{0,{more}}}\ncall: {} body {}\n{rules}", lark_string("\n"), OPEN, CLOSE)
        }
        (ToolFormat::Hermes, false) => format!("start: {OPEN} body {CLOSE}\n{rules}"),
        // one call an answer is all that this format knows
        (ToolFormat::Llama3, _) => format!("start: body\n{rules}"),
        (ToolFormat::Mistral, _) => {
            let more = if parallel { format!("{{0,{}}}", CALLS_MAX - 1) } else { String::new() };
            format!("start: {} {}\n{rules}", mark_term(TOOL_CALLS, mark), list(&more))
        }
    };
    GrammarSpec::Lark(text)
}

/// An answer that may call or not; arguments of functions that are strict satisfy their schemas. `mark` as above.
pub fn free(format: ToolFormat, functions: &[Function], mark: Option<u32>) -> GrammarSpec {
    let rules = bodies(format, functions, false);
    let text = match (format, mark) {
        // the mark alone begins a call for who reads it, whatever blanks follow: none comes but the one that is wanted
        (ToolFormat::Hermes, _) => format!(
            "start: call* rest\ncall: before \"\\n\" body {CLOSE}\nbefore[lazy]: TEXT {MARK}\nrest: TEXT\nTEXT: /(\\n|.)*/\n{rules}"
        ),
        // what does not begin like a call is none; the mark begins one for who reads it, spelled in letters too
        (ToolFormat::Llama3, _) => {
            let tag = mark_term(PYTHON_TAG, mark);
            format!("start: tag? body | TEXT\ntag: {tag}\nTEXT: /{}/\n{rules}", text_of_no_call())
        }
        // a list of calls is the last that an answer has
        (ToolFormat::Mistral, Some(_)) => {
            format!(
                "start: TEXT calls?\ncalls: {} {}\nTEXT: /(\\n|.)*/\n{rules}",
                mark_term(TOOL_CALLS, mark),
                list("*")
            )
        }
        (ToolFormat::Mistral, None) => format!(
            "start: calls | rest\ncalls: before {}\nbefore[lazy]: TEXT {}\nrest: TEXT\nTEXT: /(\\n|.)*/\n{rules}",
            list("*"),
            mark_term(TOOL_CALLS, mark)
        ),
    };
    GrammarSpec::Lark(text)
}

fn mark_term(text: &str, mark: Option<u32>) -> String {
    mark.map_or_else(|| lark_string(text), |id| format!("<[{id}]>"))
}

/// Llama's texts that begin with neither a call nor its mark: letter by letter, they end within the mark or leave it.
fn text_of_no_call() -> String {
    let leaves = PYTHON_TAG.char_indices().map(|(at, next)| {
        let nor = if at == 0 { r"{\s" } else { "" };
        format!(r"{}([^{next}{nor}](\n|.)*)?", PYTHON_TAG[..at].replace('|', r"\|"))
    });
    leaves.collect::<Vec<_>>().join("|")
}

/// Calls between brackets: one, and further ones so often.
fn list(more: &str) -> String {
    let further = if more.is_empty() { String::new() } else { format!("(\", \" body){more}") };
    format!("\" \"? \"[\" body {further} \"]\"")
}

const MARK: &str = r#""<tool_call>""#;
const OPEN: &str = r#""<tool_call>\n""#;
const CLOSE: &str = r#""\n</tool_call>""#;

/// Rules `body`, and one for each function's call and arguments. `all`: also functions that are not strict obey their schemas.
fn bodies(format: ToolFormat, functions: &[Function], all: bool) -> String {
    let key = match format {
        ToolFormat::Hermes | ToolFormat::Mistral => "arguments",
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
    use crate::grammar::tests::{SPECIAL, follows, follows_tokens};

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
        let [once, often] = [false, true].map(|parallel| forced(ToolFormat::Hermes, &functions(), parallel, None));
        assert!(follows(&once, &one) && follows(&often, &one) && follows(&often, &format!("{one}\n{two}")));
        assert!(!follows(&once, &format!("{one}\n{two}")) && !follows(&often, &format!("{one}{two}")));
        for none in ["", "text", &hermes("gone", "{}"), &hermes("count", "{\"n\": 30}"), &format!("text {one}")] {
            assert!(!follows(&often, none), "{none}");
        }
        let llama = forced(ToolFormat::Llama3, &functions(), true, None);
        assert!(follows(&llama, "{\"name\": \"count\", \"parameters\": {\"n\": 3}}"));
        assert!(!follows(&llama, &one) && !follows(&llama, "{\"name\": \"count\", \"parameters\": {}}"));
    }

    #[test]
    fn free_answers_say_what_they_like_until_they_call() {
        let hermes_free = free(ToolFormat::Hermes, &functions(), None);
        let (one, loose) = (hermes("count", "{\"n\": 3}"), hermes("find", "{\"n\": 30}"));
        for fine in ["", "any text <tool> {", &one, &format!("see:\n{one}\n{loose}"), &loose] {
            assert!(follows(&hermes_free, fine), "{fine}");
        }
        assert!(!follows(&hermes_free, &format!("see:\n{}", hermes("count", "{\"n\": 30}"))));
        for open in ["", " ", "\n\n", "\t\n"] {
            let unforced = hermes("count", "{\"n\": 30}").replacen("<tool_call>\n", &format!("<tool_call>{open}"), 1);
            assert!(!follows(&hermes_free, &unforced), "{unforced}");
            assert!(!follows(&hermes_free, &format!("{one}\n{unforced}")), "{unforced}");
        }
        let llama_free = free(ToolFormat::Llama3, &functions(), None);
        for fine in ["", "any text {", "{\"name\": \"count\", \"parameters\": {\"n\": 3}}"] {
            assert!(follows(&llama_free, fine), "{fine}");
        }
        assert!(!follows(&llama_free, "{\"name\": \"count\", \"parameters\": {\"n\": 30}}"));
    }

    /// The mark begins a call for who reads it, so it does for the grammar: as a token of its own, and in letters.
    #[test]
    fn llamas_mark_begins_a_call_whose_arguments_are_forced() {
        let call = |n: u32| format!("{{\"name\": \"count\", \"parameters\": {{\"n\": {n}}}}}");
        let after = |text: &str| -> Vec<u32> { [SPECIAL].into_iter().chain(text.bytes().map(u32::from)).collect() };
        let [letters, token] = [None, Some(SPECIAL)].map(|mark| free(ToolFormat::Llama3, &functions(), mark));
        assert!(follows(&letters, &format!("{PYTHON_TAG}{}", call(3))));
        assert!(follows_tokens(&token, &after(&call(3))) && !follows_tokens(&token, &after(&call(30))));
        assert!(!follows_tokens(&token, &after("print(1)")));
        for grammar in [&letters, &token] {
            assert!(follows(grammar, &call(3)));
            for unforced in [format!("{PYTHON_TAG}{}", call(30)), format!("{PYTHON_TAG} {}", call(30))] {
                assert!(!follows(grammar, &unforced), "{unforced}");
            }
            for fine in ["<", "<|python", "<|python_tags|>{", "<b> {\n", "<|x|>", "a <|python_tag|>{"] {
                assert!(follows(grammar, fine), "{fine}");
            }
        }
    }

    fn mistral(calls: &[(&str, &str)]) -> String {
        let call = |(name, arguments): &(&str, &str)| format!("{{\"name\": \"{name}\", \"arguments\": {arguments}}}");
        format!("[TOOL_CALLS] [{}]", calls.iter().map(call).collect::<Vec<_>>().join(", "))
    }

    #[test]
    fn mistrals_calls_are_a_list_after_their_mark() {
        let (one, two) = (mistral(&[("count", "{\"n\": 3}")]), mistral(&[("count", "{\"n\": 3}"), ("find", "{}")]));
        let [once, often] = [false, true].map(|parallel| forced(ToolFormat::Mistral, &functions(), parallel, None));
        assert!(follows(&once, &one) && follows(&often, &one) && follows(&often, &two) && !follows(&once, &two));
        assert!(follows(&once, &one.replace("] [", "][")));
        let wrong = mistral(&[("count", "{\"n\": 30}")]);
        for none in ["", "text", "[TOOL_CALLS] []", &wrong, &mistral(&[("gone", "{}")]), &format!("text {one}")] {
            assert!(!follows(&often, none), "{none}");
        }
        let free_text = free(ToolFormat::Mistral, &functions(), None);
        for fine in ["", "any text [TOOL_", &one, &format!("see:\n{two}"), &mistral(&[("find", "{\"n\": 30}")])] {
            assert!(follows(&free_text, fine), "{fine}");
        }
        assert!(!follows(&free_text, &format!("see:\n{wrong}")));
    }

    #[test]
    fn a_mark_that_is_a_special_token_is_wanted_as_that_token() {
        let forced = forced(ToolFormat::Mistral, &functions(), false, Some(SPECIAL));
        let free = free(ToolFormat::Mistral, &functions(), Some(SPECIAL));
        let list = |arguments| mistral(&[("count", arguments)]).replace("[TOOL_CALLS]", "");
        let tokens = |before: &str, after: &str| -> Vec<u32> {
            before.bytes().map(u32::from).chain([SPECIAL]).chain(after.bytes().map(u32::from)).collect()
        };
        let (right, wrong) = (list("{\"n\": 3}"), list("{\"n\": 30}"));
        assert!(follows_tokens(&forced, &tokens("", &right)) && !follows_tokens(&forced, &tokens("", &wrong)));
        assert!(!follows(&forced, &mistral(&[("count", "{\"n\": 3}")])), "in letters");
        assert!(follows_tokens(&free, &tokens("see: ", &right)) && !follows_tokens(&free, &tokens("see: ", &wrong)));
        assert!(follows(&free, "see: [x]") && follows(&free, ""));
    }
}
