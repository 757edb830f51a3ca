//! Rendering against strings made by hand, and templates that mean harm.

use super::*;
use crate::weights::gguf::Builder;
use serde_json::json;

const CHATML: &str = "{% for m in messages %}
    {%- if loop.first and m.role == 'system' %}{{ '[' + m['content'].strip() + ']\n' }}{% continue %}{% endif %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + eos_token + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
";

fn template(source: &str) -> ChatTemplate {
    let special_tokens = vec![("eos_token".to_owned(), "</s>".to_owned())];
    ChatTemplate::compile(Sources { special_tokens, ..source.to_owned().into() }).unwrap()
}

fn render(source: &str, messages: &Json) -> Result<String, ChatTemplateError> {
    let now = jiff::civil::date(2026, 3, 9).at(8, 5, 0, 0);
    template(source).render(ChatInput { messages, tools: None, add_generation_prompt: true, extra: None, now })
}

#[test]
fn a_chat_becomes_the_known_prompt() {
    let messages = json!([{"role": "system", "content": " be brief "}, {"role": "user", "content": "<hi> & 'ho'"}]);
    let want = "[be brief]\n<|im_start|>user\n<hi> & 'ho'</s>\n<|im_start|>assistant\n";
    assert_eq!(render(CHATML, &messages).unwrap(), want);
}

#[test]
fn tojson_writes_what_python_writes() {
    let messages = json!([{"b": 1, "a": ["é", "<'>", null, true, 1.5], "e": {}}]);
    assert_eq!(
        render("{{ messages | tojson }}", &messages).unwrap(),
        r#"[{"b": 1, "a": ["é", "<'>", null, true, 1.5], "e": {}}]"#
    );
    assert_eq!(render("{{ messages[0].a[:2] | tojson(indent=2) }}", &messages).unwrap(), "[\n  \"é\",\n  \"<'>\"\n]");
}

#[test]
fn tojson_takes_what_transformers_gives_it() {
    let messages = json!({"b": ["é😀", 1e-5, 1e16], "a": {}});
    let told = |words: &str| render(&format!("{{{{ messages | tojson({words}) }}}}"), &messages);
    let ascii = r#"{"b": ["\u00e9\ud83d\ude00", 1e-05, 1e+16], "a": {}}"#;
    assert_eq!(told("ensure_ascii=true").unwrap(), ascii);
    assert_eq!(told("sort_keys=true, separators=(',', ':')").unwrap(), r#"{"a":{},"b":["é😀",1e-05,1e+16]}"#);
    assert_eq!(told("indent='-'").unwrap(), "{\n-\"b\": [\n--\"é😀\",\n--1e-05,\n--1e+16\n-],\n-\"a\": {}\n}");
    for unfit in ["separators=[',']", "indent=99999999", "indent=-1", "colour=1"] {
        assert!(matches!(told(unfit), Err(ChatTemplateError::Render(_))), "{unfit}");
    }
}

/// Qwen3-Coder asks whether tools are iterable before it counts them; Command R+ indents what ends its line.
#[test]
fn none_is_not_iterable_and_indent_keeps_the_end_of_a_line() {
    let source = "{% if none is iterable or 1 is iterable %}!{% endif %}{% if messages is iterable and 'a' is iterable %}.{% endif %}";
    assert_eq!(render(source, &json!([])).unwrap(), ".");
    let told = |words: &str| render(&format!("{{{{ messages | indent({words}) }}}}."), &json!("a\n\r\nb\n")).unwrap();
    assert_eq!(told("2"), "a\n\n  b\n.");
    assert_eq!(told("'>', true, blank=true"), ">a\n>\n>b\n>.");
    assert_eq!(render("{{ 1e22 }} {{ 1.0 }} {{ 3 }}", &json!([])).unwrap(), "1e+22 1.0 3");
}

#[test]
fn time_is_the_arguments() {
    assert_eq!(render("{{ strftime_now('%d %b %Y') }}", &json!([])).unwrap(), "09 Mar 2026");
    assert!(matches!(render("{{ strftime_now('%') }}", &json!([])), Err(ChatTemplateError::Render(_))));
}

#[test]
fn python_methods_and_loop_variables_work() {
    let source = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}\
                  {{ ns.n }} {{ messages[0].content.split('x')[-1].upper() }} {{ messages[0].items() | length }}";
    assert_eq!(render(source, &json!([{"content": "axb"}])).unwrap(), "1 B 1");
}

#[test]
fn tags_that_mark_training_text_print_nothing() {
    let source =
        "{% for m in messages %}a {%- generation -%} {{ m.content }}{% endgeneration %} generation{% endfor %}{% %";
    assert_eq!(without_generation_tags(source).matches("generation").count(), 1);
    let source = "{% for m in messages %}a {%- generation -%} {{ m.content }}{% endgeneration %}.{% endfor %}";
    assert_eq!(render(source, &json!([{"content": "b"}, {"content": "c"}])).unwrap(), "ab.ac.");
}

#[test]
fn a_templates_refusal_is_told_as_such() {
    let error = render("{{ raise_exception('roles must alternate') }}", &json!([])).unwrap_err();
    assert!(matches!(&error, ChatTemplateError::Refused(message) if message == "roles must alternate"), "{error}");
}

#[test]
fn harm_ends_in_an_error() {
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a %}{% endfor %}{% endfor %}";
    let deep = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}";
    let long = "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}";
    assert!(render(long, &json!([])).unwrap_err().to_string().contains("longer than"));
    for source in [endless, deep, "{{ messages.x.y }}", "{{ nothing() }}"] {
        assert!(matches!(render(source, &json!([])), Err(ChatTemplateError::Render(_))), "{source}");
    }
}

#[test]
fn the_template_is_found_where_models_keep_it() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("tokenizer_config.json");
    assert!(ChatTemplate::from_dir(dir.path()).unwrap().is_none());
    std::fs::write(&config, json!({"bos_token": {"content": "<b>"}}).to_string()).unwrap();
    assert!(ChatTemplate::from_dir(dir.path()).unwrap().is_none());
    let named = json!([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d{{ bos_token }}"}]);
    std::fs::write(&config, json!({"bos_token": {"content": "<b>"}, "chat_template": named}).to_string()).unwrap();
    assert_eq!(render_dir(dir.path()), "d<b>");
    std::fs::write(dir.path().join("chat_template.jinja"), "file{{ bos_token }}").unwrap();
    assert_eq!(render_dir(dir.path()), "file<b>");
}

#[test]
fn templates_beside_a_gguf_file_go_before_its_own() {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let tokens = [&8u32.to_le_bytes()[..], &2u64.to_le_bytes(), &text("<b>"), &text("<e>")].concat();
    let bare = || {
        let file = Builder::default().pair("tokenizer.ggml.tokens", 9, &tokens);
        file.u32("tokenizer.ggml.bos_token_id", 0).u32("tokenizer.ggml.eos_token_id", 1)
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, bare().build()).unwrap();
    assert!(ChatTemplate::from_dir(&path).unwrap().is_none());
    let own = bare().string("tokenizer.chat_template", "own {{ bos_token }}{{ eos_token }}");
    std::fs::write(&path, own.build()).unwrap();
    assert_eq!(render_dir(&path), "own <b><e>");
    // what the files beside it do not say of tokens it says itself
    let config = json!({"bos_token": "<B>", "chat_template": "config {{ bos_token }}{{ eos_token }}"});
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    assert_eq!(render_dir(&path), "config <B><e>");
    std::fs::write(dir.path().join("chat_template.jinja"), "file {{ bos_token }}{{ eos_token }}").unwrap();
    assert_eq!([render_dir(&path), render_dir(dir.path())], ["file <B><e>"; 2]);
}

#[test]
fn chats_with_tools_have_the_template_that_is_theirs() {
    let dir = tempfile::tempdir().unwrap();
    let tools = "{{ tools | tojson }} <tool_call>";
    let named = json!([{"name": "tool_use", "template": tools}, {"name": "default", "template": "plain"}]);
    std::fs::write(dir.path().join("tokenizer_config.json"), json!({"chat_template": named}).to_string()).unwrap();
    let template = ChatTemplate::from_dir(dir.path()).unwrap().unwrap();
    let now = jiff::civil::DateTime::constant(2026, 1, 1, 0, 0, 0, 0);
    let (messages, tools) = (json!([]), json!([{"type": "function"}]));
    let input = ChatInput { messages: &messages, tools: None, add_generation_prompt: false, extra: None, now };
    assert_eq!(template.render(input).unwrap(), "plain");
    let with_tools = template.render(ChatInput { tools: Some(&tools), ..input }).unwrap();
    assert_eq!(with_tools, r#"[{"type": "function"}] <tool_call>"#);
    assert_eq!(template.tool_format(), Some(ToolFormat::Hermes));
    std::fs::write(dir.path().join("chat_template.jinja"), "from a file").unwrap();
    std::fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
    std::fs::write(dir.path().join("additional_chat_templates/tool_use.jinja"), "file {{ tools | length }}").unwrap();
    let template = ChatTemplate::from_dir(dir.path()).unwrap().unwrap();
    assert_eq!(template.render(ChatInput { tools: Some(&tools), ..input }).unwrap(), "file 1");
    assert_eq!(template.render(input).unwrap(), "from a file");
}

#[test]
fn the_template_shows_how_tools_are_called() {
    assert_eq!(template("{{ messages }} <tool_call>").tool_format(), None);
    assert_eq!(template("{{ tools }} <tool_call>").tool_format(), Some(ToolFormat::Hermes));
    assert_eq!(template(r#"{{ tools }} {"name": f, "parameters": p}"#).tool_format(), Some(ToolFormat::Llama3));
    assert_eq!(template("{{ tools }} [TOOL_CALLS] \"parameters\":").tool_format(), Some(ToolFormat::Mistral));
    assert_eq!(template("{{ tools }} [TOOL_CALLS]f[ARGS]").tool_format(), None);
    assert_eq!(template("{{ tools }} <tool_call><function=f><parameter=x>1").tool_format(), None);
    assert_eq!(template("{{ tools }} <tool_call>f<arg_key>x</arg_key>").tool_format(), None);
    assert_eq!(template("{{ tools }}").tool_format(), None);
}

fn render_dir(dir: &Path) -> String {
    let now = jiff::civil::DateTime::constant(2026, 1, 1, 0, 0, 0, 0);
    let input = ChatInput { messages: &json!([]), tools: None, add_generation_prompt: false, extra: None, now };
    ChatTemplate::from_dir(dir).unwrap().unwrap().render(input).unwrap()
}

#[test]
fn unusable_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("tokenizer_config.json");
    std::fs::write(&config, "{").unwrap();
    let error = ChatTemplate::from_dir(dir.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json"), "{error}");
    std::fs::write(&config, [b'"', 0xff, b'"']).unwrap();
    assert!(matches!(ChatTemplate::from_dir(dir.path()), Err(ChatTemplateError::Read { .. })));
    std::fs::write(&config, json!({"chat_template": "{% if %}"}).to_string()).unwrap();
    let error = ChatTemplate::from_dir(dir.path()).unwrap_err().to_string();
    assert!(error.contains("does not parse") && error.contains("line 1"), "{error}");
}
