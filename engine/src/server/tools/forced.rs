//! Grammars of calls: for answers that have to call something, and for calls in free text whose arguments must be right. Pure.

use serde_json::json;

use super::parser::{CLOSE, OPEN, PYTHON_TAG, TOOL_CALLS};
use super::{Function, Marks};
use crate::codec::ToolFormat;
use crate::grammar::{GrammarSpec, lark_json, lark_string};

/// Calls in one answer that is forced to call: a weak model would go on for ever.
const CALLS_MAX: usize = 16;

/// An answer that calls one of these functions, or several where `parallel` allows and the model can.
pub fn forced(format: ToolFormat, functions: &[Function], parallel: bool, marks: Marks) -> GrammarSpec {
    let rules = bodies(format, functions, true);
    let text = match (format, parallel) {
        (ToolFormat::Hermes, true) => {
            let more = CALLS_MAX - 1;
            format!("start: call ({} call){{0,{more}}}\ncall: {}\n{rules}", lark_string("\n"), hermes_call(marks))
        }
        (ToolFormat::Hermes, false) => format!("start: {}\n{rules}", hermes_call(marks)),
        // one call an answer is all that this format knows
        (ToolFormat::Llama3, _) => format!("start: body\n{rules}"),
        (ToolFormat::Mistral, _) => {
            let more = if parallel { format!("{{0,{}}}", CALLS_MAX - 1) } else { String::new() };
            format!("start: {} {}\n{rules}", mark_term(TOOL_CALLS, marks.begin), list(&more))
        }
    };
    GrammarSpec::Lark(text)
}

/// An answer that may call or not; arguments of functions that are strict satisfy their schemas.
pub fn free(format: ToolFormat, functions: &[Function], marks: Marks) -> GrammarSpec {
    let rules = bodies(format, functions, false);
    let mark = marks.begin;
    let text = match (format, mark) {
        // the mark alone begins a call for who reads it, whatever blanks follow: none comes but the one that is wanted
        (ToolFormat::Hermes, _) => {
            // in letters as well, where it is a token that no text has: who reads it sees no difference
            let token = mark.map_or_else(String::new, |id| format!(" | TEXT <[{id}]>"));
            let (letters, end) = (lark_string(OPEN), hermes_end(marks));
            format!(
                "start: call* rest\ncall: (before{token}) \"\\n\" body {end}\nbefore[lazy]: TEXT {letters}\nrest: TEXT\nTEXT: /(\\n|.)*/\n{rules}"
            )
        }
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

/// One call between its marks, on lines of their own.
fn hermes_call(marks: Marks) -> String {
    format!("{} {} body {}", mark_term(OPEN, marks.begin), lark_string("\n"), hermes_end(marks))
}

fn hermes_end(marks: Marks) -> String {
    format!("{} {}", lark_string("\n"), mark_term(CLOSE, marks.end))
}

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

    fn marked(id: u32) -> Marks {
        Marks { begin: Some(id), end: None }
    }

    fn hermes(name: &str, arguments: &str) -> String {
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
    }

    #[test]
    fn forced_answers_call_once_or_often_and_nothing_else() {
        let (one, two) = (hermes("count", "{\"n\": 3}"), hermes("find", "{\"what\": [1]}"));
        let [once, often] =
            [false, true].map(|parallel| forced(ToolFormat::Hermes, &functions(), parallel, Marks::default()));
        assert!(follows(&once, &one) && follows(&often, &one) && follows(&often, &format!("{one}\n{two}")));
        assert!(!follows(&once, &format!("{one}\n{two}")) && !follows(&often, &format!("{one}{two}")));
        for none in ["", "text", &hermes("gone", "{}"), &hermes("count", "{\"n\": 30}"), &format!("text {one}")] {
            assert!(!follows(&often, none), "{none}");
        }
        let llama = forced(ToolFormat::Llama3, &functions(), true, Marks::default());
        assert!(follows(&llama, "{\"name\": \"count\", \"parameters\": {\"n\": 3}}"));
        assert!(!follows(&llama, &one) && !follows(&llama, "{\"name\": \"count\", \"parameters\": {}}"));
    }

    #[test]
    fn free_answers_say_what_they_like_until_they_call() {
        let hermes_free = free(ToolFormat::Hermes, &functions(), Marks::default());
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
        let llama_free = free(ToolFormat::Llama3, &functions(), Marks::default());
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
        let [letters, token] =
            [Marks::default(), marked(SPECIAL)].map(|marks| free(ToolFormat::Llama3, &functions(), marks));
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
        let [once, often] =
            [false, true].map(|parallel| forced(ToolFormat::Mistral, &functions(), parallel, Marks::default()));
        assert!(follows(&once, &one) && follows(&often, &one) && follows(&often, &two) && !follows(&once, &two));
        assert!(follows(&once, &one.replace("] [", "][")));
        let wrong = mistral(&[("count", "{\"n\": 30}")]);
        for none in ["", "text", "[TOOL_CALLS] []", &wrong, &mistral(&[("gone", "{}")]), &format!("text {one}")] {
            assert!(!follows(&often, none), "{none}");
        }
        let free_text = free(ToolFormat::Mistral, &functions(), Marks::default());
        for fine in ["", "any text [TOOL_", &one, &format!("see:\n{two}"), &mistral(&[("find", "{\"n\": 30}")])] {
            assert!(follows(&free_text, fine), "{fine}");
        }
        assert!(!follows(&free_text, &format!("see:\n{wrong}")));
    }

    #[test]
    fn a_mark_that_is_a_special_token_is_wanted_as_that_token() {
        let forced = forced(ToolFormat::Mistral, &functions(), false, marked(SPECIAL));
        let free = free(ToolFormat::Mistral, &functions(), marked(SPECIAL));
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

    #[test]
    fn hermes_marks_that_are_special_tokens_are_wanted_as_tokens_and_begin_calls_in_letters_too() {
        // one word stands for both marks
        let marks = Marks { begin: Some(SPECIAL), end: Some(SPECIAL) };
        let call = |n: u32| {
            let text = format!("\n{{\"name\": \"count\", \"arguments\": {{\"n\": {n}}}}}\n");
            [SPECIAL].into_iter().chain(text.bytes().map(u32::from)).chain([SPECIAL]).collect::<Vec<u32>>()
        };
        let then = |calls: &[Vec<u32>]| calls.join(&u32::from(b'\n'));
        let after =
            |text: &str, call: &[u32]| -> Vec<u32> { text.bytes().map(u32::from).chain(call.to_vec()).collect() };
        let [once, often] = [false, true].map(|parallel| forced(ToolFormat::Hermes, &functions(), parallel, marks));
        for grammar in [&once, &often] {
            assert!(follows_tokens(grammar, &call(3)) && !follows_tokens(grammar, &call(30)));
            assert!(!follows(grammar, &hermes("count", "{\"n\": 3}")), "in letters");
        }
        assert!(
            follows_tokens(&often, &then(&[call(3), call(4)])) && !follows_tokens(&once, &then(&[call(3), call(4)]))
        );
        let free = free(ToolFormat::Hermes, &functions(), marks);
        for text in ["", "see: ", "see <tool>\n"] {
            assert!(follows_tokens(&free, &after(text, &call(3))), "{text}");
            assert!(follows_tokens(&free, &after(text, &then(&[call(3), call(4)]))), "{text}");
            assert!(!follows_tokens(&free, &after(text, &call(30))), "{text}");
            assert!(!follows_tokens(&free, &after(text, &then(&[call(3), call(30)]))), "{text}");
            assert!(follows(&free, text), "{text}");
            assert!(!follows(&free, &format!("{text}{}", hermes("count", "{\"n\": 30}"))), "{text}");
        }
    }
}
