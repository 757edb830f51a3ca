//! Outputs as models write them, cut at every place: the parts are the same however they come.

use proptest::prelude::*;

use super::*;

/// Text, and name and arguments of each call, of an output that comes in pieces of `size` bytes.
fn run(format: ToolFormat, output: &str, size: usize, calls_max: usize) -> (String, Vec<(String, String)>) {
    let mut parser = ToolParser::new(format, vec!["f".into(), "g".into()], calls_max, "call_1".into());
    let chars: Vec<char> = output.chars().collect();
    let mut parts: Vec<Parsed> = chars.chunks(size).map(|c| parser.push(&c.iter().collect::<String>())).collect();
    parts.push(parser.finish());
    let text = parts.iter().map(|p| p.text.as_str()).collect();
    let mut calls: Vec<(String, String)> = Vec::new();
    for piece in parts.into_iter().flat_map(|p| p.calls) {
        if let Some((id, name)) = piece.head {
            let id_of_call = format!("call_1_{}", calls.len());
            let short = |id: &str| id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric());
            assert!(id == id_of_call || format == ToolFormat::Mistral && short(&id), "{id}");
            assert_eq!(piece.index, calls.len());
            calls.push((name, String::new()));
        }
        calls[piece.index].1 += &piece.arguments;
    }
    assert_eq!(parser.called(), !calls.is_empty());
    (text, calls)
}

#[track_caller]
fn check(format: ToolFormat, output: &str, text: &str, calls: &[(&str, &str)]) {
    let calls: Vec<(String, String)> = calls.iter().map(|(n, a)| ((*n).into(), (*a).into())).collect();
    for size in 1..=output.chars().count().max(1) {
        assert_eq!(run(format, output, size, 9), (text.to_owned(), calls.clone()), "pieces of {size}: {output}");
    }
}

const TWO: &str = "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Zürich </tool_call> {\"}}\n</tool_call>\n\
                   <tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";

#[test]
fn hermes_calls_follow_text_and_each_other() {
    let calls = [("f", "{\"city\": \"Zürich </tool_call> {\"}"), ("g", "{}")];
    check(ToolFormat::Hermes, TWO, "Let me see.", &calls);
    check(ToolFormat::Hermes, "no call  \n", "no call  \n", &[]);
    check(ToolFormat::Hermes, "a < b <tool> c", "a < b <tool> c", &[]);
}

#[test]
fn calls_in_an_odd_order_or_without_an_end_are_calls() {
    let odd = "<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"f\"}</tool_call> and text";
    check(ToolFormat::Hermes, odd, " and text", &[("f", "{\"a\":1}")]);
    check(ToolFormat::Hermes, "<tool_call>\n{\"name\": \"f\"}", "", &[("f", "{}")]);
    check(ToolFormat::Hermes, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1", "", &[("f", "{\"a\": 1")]);
}

#[test]
fn a_call_that_lacks_its_last_brace_swallows_nothing() {
    let lacks = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}\n</tool_call>";
    check(ToolFormat::Hermes, &format!("{lacks}\nSo be it."), "\nSo be it.", &[("f", "{\"a\": 1}")]);
    check(ToolFormat::Hermes, &lacks.repeat(2), "", &[("f", "{\"a\": 1}"); 2]);
    let list = "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": 1} , {\"name\": \"f\", \"arguments\": {}}]";
    check(ToolFormat::Mistral, list, "", &[("f", "{\"a\": 1}"), ("f", "{}")]);
    let more = "<tool_call>{\"name\": \"f\", \"arguments\": {}, \"id\": \"</tool_call>\"";
    check(ToolFormat::Hermes, &format!("{more}}}</tool_call> x"), " x", &[("f", "{}")]);
    check(ToolFormat::Hermes, &format!("{more}</tool_call> x"), " x", &[("f", "{}")]);
    let text = "<tool_call>{\"name\": \"f\", \"arguments\": {} and so on <b>";
    check(ToolFormat::Hermes, text, "and so on <b>", &[("f", "{}")]);
    let two = "{\"name\": \"f\", \"parameters\": {}; {\"name\": \"g\", \"parameters\": {}";
    check(ToolFormat::Llama3, two, "", &[("f", "{}"), ("g", "{}")]);
    check(ToolFormat::Mistral, "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}] x", " x", &[("f", "{}")]);
}

#[test]
fn what_is_no_call_stays_text() {
    for text in [
        "<tool_call>\n{broken}\n</tool_call>",
        "<tool_call>\n{\"name\": \"unknown\", \"arguments\": {}}\n</tool_call> after",
        "x <tool_call>\nnever closed",
    ] {
        check(ToolFormat::Hermes, text, text, &[]);
    }
    for text in
        ["Plain {\"name\": \"f\", \"parameters\": {}}", "{\"a\": 1} is JSON", "{\"name\": \"zzz\", \"parameters\": {}}"]
    {
        check(ToolFormat::Llama3, text, text, &[]);
    }
}

#[test]
fn what_can_be_no_call_is_told_at_once() {
    let mut parser = ToolParser::new(ToolFormat::Hermes, vec!["f".into()], 9, "c".into());
    let mut said = |text: &str| parser.push(text).text;
    assert_eq!(
        [said("<tool_call>"), said("\n"), said("<function=f>"), said(" and")],
        ["", "", "<tool_call>\n<function=f>", " and"]
    );
    assert_eq!(said("<tool_call>\n{"), "", "this may be one");
    let after = "<tool_call>so <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    check(ToolFormat::Hermes, after, "<tool_call>so", &[("f", "{}")]);
}

#[test]
fn an_end_mark_is_sought_only_in_what_is_new() {
    let (mut sought, mut text) = (0, "é".repeat(9));
    assert_eq!((find_on(&text, CLOSE, &mut sought), sought), (None, 18));
    text += "</tool";
    assert_eq!((find_on(&text, CLOSE, &mut sought), sought), (None, 18), "it may begin there");
    text += "_x </tool";
    assert_eq!((find_on(&text, CLOSE, &mut sought), sought), (None, 27));
    text += "_call>";
    assert_eq!(find_on(&text, CLOSE, &mut sought), Some(27));
}

/// What is read anew with each piece has a bound, and a call that passes it is one all the same.
#[test]
fn a_call_with_a_long_head_is_read_as_a_whole() {
    let blanks = " ".repeat(HEAD_BYTES_MAX);
    let long = format!("<tool_call>{{\"name\":{blanks}\"f\", \"arguments\": {{\"a\": 1}}}}</tool_call>");
    for size in [1, 1000, long.len()] {
        assert_eq!(run(ToolFormat::Hermes, &long, size, 9), (String::new(), vec![("f".into(), "{\"a\":1}".into())]));
    }
}

#[test]
fn llama_calls_are_the_whole_answer() {
    let one = "{\"name\": \"f\", \"parameters\": {\"x\": {\"y\": \"}\"}}}";
    check(ToolFormat::Llama3, one, "", &[("f", "{\"x\": {\"y\": \"}\"}}")]);
    check(ToolFormat::Llama3, &format!("<|python_tag|>{one}"), "", &[("f", "{\"x\": {\"y\": \"}\"}}")]);
    let two = "{\"name\": \"f\", \"parameters\": {}}; {\"parameters\": {}, \"name\": \"g\"}";
    check(ToolFormat::Llama3, two, "", &[("f", "{}"), ("g", "{}")]);
}

#[test]
fn mistrals_calls_are_a_list_after_its_mark() {
    let two = "I see. [TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": \"], [\"}, \"id\": \"abcdefghi\"}, \
               {\"arguments\": {}, \"name\": \"g\"}] end";
    check(ToolFormat::Mistral, two, "I see. end", &[("f", "{\"a\": \"], [\"}"), ("g", "{}")]);
    check(ToolFormat::Mistral, "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}]", "", &[("f", "{}")]);
    // without its end it is one all the same
    check(ToolFormat::Mistral, "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": 1", "", &[("f", "{\"a\": 1")]);
    for text in [
        "[TOOL_CALLS",
        "x [TOOL_CALLS] y [TOOL_CALLS]",
        "[TOOL_CALLS] []",
        "[TOOL_CALLS] [{\"name\": \"unknown\", \"arguments\": {}}] after",
        "[TOOL_CALLS] [{broken}]",
    ] {
        check(ToolFormat::Mistral, text, text, &[]);
    }
    let half = "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"unknown\"}]";
    check(ToolFormat::Mistral, half, ", {\"name\": \"unknown\"}]", &[("f", "{}")]);
}

#[test]
fn calls_beyond_the_most_are_dropped() {
    assert_eq!(run(ToolFormat::Hermes, TWO, 3, 1).1.len(), 1);
}

proptest! {
    /// Whatever comes, and however it is cut: the same text and the same calls; and without calls the text is all there.
    #[test]
    fn cuts_change_nothing(parts in proptest::collection::vec(proptest::sample::select(&PARTS[..]), 0..14), format in 0usize..3) {
        let format = [ToolFormat::Hermes, ToolFormat::Llama3, ToolFormat::Mistral][format];
        let output: String = parts.concat();
        let whole = run(format, &output, usize::MAX, 9);
        for size in [1, 2, 3, 7] {
            prop_assert_eq!(run(format, &output, size, 9), whole.clone(), "pieces of {}: {}", size, output);
        }
        let marked = output.contains(OPEN) || output.contains(PYTHON_TAG) || output.contains('{') || output.contains(TOOL_CALLS);
        prop_assert!(marked || whole.0 == output, "{:?}", whole.0);
    }
}

/// What calls are made of.
const PARTS: [&str; 19] = [
    OPEN,
    CLOSE,
    PYTHON_TAG,
    TOOL_CALLS,
    "[",
    "]",
    ",",
    "{\"name\": \"f\", ",
    "{\"name\": \"g\", \"arguments\": {",
    "\"parameters\": {",
    "}",
    "}}",
    "\"",
    "\\",
    "\n",
    " ",
    "x",
    "; ",
    "é",
];
