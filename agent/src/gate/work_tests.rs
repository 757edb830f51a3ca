//! What is work, and how many prompt tokens it brings.

use super::*;

#[test]
fn posts_to_inference_paths_are_work_and_nothing_else_is() {
    for path in [
        "/v1/completions",
        "/v1/chat/completions/",
        "/v1/messages",
        "/generate",
        "/completion",
        "/v1/embeddings",
        "/api/embed",
        "/v2/embed",
        "/v1/reranking",
        "/vertex_generate",
        "/",
        "/v2/models/m/versions/1/infer",
        "/v1/models/m:predict",
        "/v1/systemone",
    ] {
        assert!(is_work(&Method::POST, path), "{path}");
        assert!(!is_work(&Method::GET, path), "{path}");
    }
    for path in ["/health", "/metrics", "/v1/models", "/tokenize", "/sleep", "/continue_generation"] {
        assert!(!is_work(&Method::POST, path), "{path}");
    }
    for (path, put) in [("/generate", true), ("/v1/completions", false), ("/v1/chat/completions/batch", false)] {
        assert_eq!((is_work(&Method::POST, path), is_work(&Method::PUT, path)), (true, put), "{path}");
    }
    assert!(mends("/fault_tolerance/apply") && mends("/update_weights"));
    let mending = ["/resume", "/wake_up/", "/v1/responses/r1/cancel", "/v1/completions", "/pause"].map(mends);
    assert_eq!(mending, [true, true, true, false, false]);
}

#[test]
fn a_path_is_read_as_an_engine_reads_it() {
    for (path, read) in [
        ("/v1/chat/completion%73", "/v1/chat/completions"),
        ("/%67enerate%2f", "/generate/"),
        ("/v1/completions%2573", "/v1/completions%73"),
        ("/a%ff%", "/a\u{fffd}%"),
    ] {
        assert_eq!(plain(path), read);
    }
    let same = ["/v1/completions", "/v1/completion%73"].map(|path| asked(&plain(path), b"{}").print);
    assert!(is_work(&Method::POST, &plain("/v1/completion%73")) && same[0] == same[1]);
}

fn prompt_tokens(body: &[u8]) -> u64 {
    asked("/v1/completions", body).prompt_tokens
}

#[test]
fn who_asks_for_a_stream_is_told_by_body_and_path() {
    for (path, body, stream) in [
        ("/v1/completions", r#"{"prompt":"a","stream":true}"#, true),
        ("/v1/completions", r#"{"stream":false,"prompt":"a"}"#, false),
        ("/v1/chat/completions", r#"{"stream":null,"stream_options":{"stream":true}}"#, false),
        ("/v1/chat/completions", r#"{"stream":"yes","prompt":"12345678"}"#, false),
        ("/v1/audio/transcriptions", "no json", false),
        ("/generate_stream", r#"{"inputs":"a"}"#, true),
        ("/api/chat", r#"{"messages":[]}"#, true),
        ("/api/generate", r#"{"prompt":"a","stream":false}"#, false),
        ("/api/embed", r#"{"input":"a"}"#, false),
        ("/api/v1/chat/completions", r#"{"messages":[]}"#, false),
    ] {
        assert_eq!(asked(path, body.as_bytes()).stream, stream, "{path} {body}");
    }
    assert_eq!(asked_unread("/v1/completions", 4_000), Asked { prompt_tokens: 1_000, stream: false, print: None });
}

#[test]
fn a_picture_is_no_text_of_its_length() {
    let file = "iVBORw0KGgo".repeat(100_000);
    let said = |part: String| format!(r#"{{"messages":[{{"role":"user","content":["12345678",{part}]}}]}}"#);
    let words = 1 + 2;
    let media = media_tokens(file.len() as u64);
    for (part, counts) in [
        (format!(r#"{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{file}"}}}}"#), 3 + media),
        (format!(r#"{{"type":"input_audio","input_audio":{{"data":"{file}","format":"wav"}}}}"#), 3 + media + 1),
        (format!(r#"{{"source":{{"type":"base64","media_type":"image/png","data":"{file}"}}}}"#), 2 + 3 + media),
        (r#"{"type":"image_url","image_url":{"url":"data:image/png;base64,iVBO"}}"#.to_owned(), 3 + MEDIA_TOKENS_MIN),
        (format!(r#"{{"images":["{file}","{file}"]}}"#), 2 * media),
        (r#"{"images":["a picture"]}"#.to_owned(), 3),
        (format!(r#"{{"data":"{}"}}"#, "words and words ".repeat(1_000)), 4_000),
        (format!(r#"{{"text":"{file}"}}"#), file.len() as u64 / BYTES_PER_TOKEN),
        (format!(r#"{{"text":"data: {}"}}"#, "a, b ".repeat(1_000)), 1_252),
    ] {
        assert_eq!(prompt_tokens(said(part.clone()).as_bytes()), words + counts, "{part:.70}");
    }
    assert_eq!(asked_unread("/v1/chat/completions", 64 << 20).prompt_tokens, (64 << 20) / MEDIA_BYTES_PER_TOKEN);
    assert_eq!(asked("/v1/audio/transcriptions", file.as_bytes()).prompt_tokens, media);
}

#[test]
fn what_stands_around_the_question_is_prompt_too() {
    let words = "12345678".repeat(1_000);
    for (body, counts) in [
        (format!(r#"{{"system":"{words}","messages":[]}}"#), 2_000),
        (format!(r#"{{"system":[{{"type":"text","text":"{words}"}}],"messages":[]}}"#), 1 + 2_000),
        (format!(r#"{{"instructions":"{words}","input":"12345678"}}"#), 2_000 + 2),
        (format!(r#"{{"prompt":"1","suffix":"{words}","context":[7,8,9]}}"#), 1 + 2_000 + 3),
        (format!(r#"{{"query":"12345678","documents":["{words}"]}}"#), 2 + 2_000),
        (format!(r#"{{"text_1":"12345678","text_2":"{words}"}}"#), 2 + 2_000),
        (format!(r#"{{"messages":[],"response_format":{{"schema":"{words}"}}}}"#), 1),
    ] {
        assert_eq!(prompt_tokens(body.as_bytes()), counts, "{body:.40}");
    }
}

#[test]
fn tools_are_prompt_with_the_names_in_them() {
    let one = r#"{"type":"function","function":{"name":"look_up","description":"Looks a word up.","parameters":
        {"type":"object","properties":{"word_to_be_looked_up":{"type":"string"},"how_often":{"type":"integer"}}}}}"#;
    for field in ["tools", "functions"] {
        let body = format!(r#"{{"messages":[],"{field}":[{}]}}"#, [one; 100].join(","));
        let (told, written) = (prompt_tokens(body.as_bytes()), body.len() as u64 / BYTES_PER_TOKEN);
        assert!((written * 2 / 3..written * 4 / 3).contains(&told), "{field}: {told} of {written}");
    }
    let picture = "iVBORw0KGgo".repeat(10_000);
    let body = format!(r#"{{"tools":[{{"a":{{"data":"{picture}"}}}}]}}"#);
    let names = 2 + 2;
    assert_eq!(prompt_tokens(body.as_bytes()), media_tokens(picture.len() as u64) + names);
}

#[test]
fn prompts_are_estimated_by_their_kind() {
    assert_eq!(prompt_tokens(br#"{"prompt":"12345678","max_tokens":100000}"#), 2);
    assert_eq!(prompt_tokens(br#"{"prompt":[1,2,3]}"#), 3);
    assert_eq!(prompt_tokens(br#"{"prompt":[[1,2,3],[4]]}"#), 4);
    assert_eq!(prompt_tokens(br#"{"messages":[{"role":"user","content":"123456789"}]}"#), 1 + 3);
    assert_eq!(prompt_tokens(br#"{"max_tokens":3}"#), 1);
    assert_eq!(
        prompt_tokens(br#"{"input":[{"a":7,"b":[7,-1,0.5],"c":null,"d":true,"e\n":"1\u00e9"}],"x":{"y":"12345678"}}"#),
        4
    );
    assert_eq!(prompt_tokens(b"[1,2,3,4,5,6,7]"), 3);
    assert_eq!(prompt_tokens(br#"{"prompt":[1,2,3]} and more"#), 6);
    assert_eq!(prompt_tokens(b"not json, 24 bytes long.."), 6);
    assert_eq!(prompt_tokens(b""), 1);
}
