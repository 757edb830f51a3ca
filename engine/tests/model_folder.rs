//! Folders that are not what they should be: each must end in an error that names the file, and the tensor or field.
//! And the demo model, which must be all that a folder should be.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests: a surprise must fail the test")]

use std::path::Path;

use engine::chat_template::{ChatInput, ChatTemplate};
use engine::demo_model::{DemoArch, write_demo_model};
use engine::model::{KvShape, LogitsWanted, SeqInput, StepBatch, load_model};
use engine::sampling::SamplingDefaults;
use engine::tokenizer::Tokenizer;
use engine::weights::gguf::Builder;
use serde_json::{Value, json};

fn demo(arch: DemoArch) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_demo_model(dir.path(), arch, 3).unwrap();
    dir
}

fn load_error(dir: &Path) -> String {
    load_model(dir, &mut |_, _| {}).err().expect("the folder must be refused").to_string()
}

fn change_config(dir: &Path, key: &str, value: Value) {
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config[key] = value;
    std::fs::write(path, config.to_string()).unwrap();
}

/// Rewrites the header's JSON; the data stays.
fn change_header(dir: &Path, change: impl FnOnce(&mut Value)) {
    let path = dir.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    change(&mut header);
    let header = header.to_string().into_bytes();
    let out = [&(header.len() as u64).to_le_bytes()[..], &header, &bytes[8 + len..]].concat();
    std::fs::write(path, out).unwrap();
}

fn assert_names(error: &str, needles: &[&str]) {
    assert!(needles.iter().all(|needle| error.contains(needle)), "`{error}` should name {needles:?}");
}

#[test]
fn damaged_weights_are_named() {
    const Q: &str = "model.layers.1.self_attn.q_proj.weight";
    type Damage = fn(&mut Value);
    let cases: [(Damage, &[&str]); 5] = [
        (|h| drop(h.as_object_mut().unwrap().remove(Q)), &[Q, "lacks", "[64, 64]"]),
        (|h| h[Q]["shape"] = json!([32, 128]), &["model.safetensors", Q, "[32, 128]", "[64, 64]"]),
        (|h| h[Q]["data_offsets"] = json!([0, 1u64 << 40]), &["model.safetensors", Q, "0..1099511627776"]),
        (|h| h[Q]["shape"] = json!([64, 65]), &["model.safetensors", Q, "[64, 65]", "does not fill"]),
        (|h| h[Q]["dtype"] = json!("F8_E4M3"), &["model.safetensors", Q, "F8_E4M3", "BF16"]),
    ];
    for (damage, needles) in cases {
        let dir = demo(DemoArch::Llama);
        change_header(dir.path(), damage);
        assert_names(&load_error(dir.path()), needles);
    }
}

#[test]
fn truncated_and_foreign_files_are_named() {
    let dir = demo(DemoArch::Qwen3);
    let path = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    for (len, needle) in
        [(0, "0 bytes"), (7, "7 bytes"), (100, "whole file"), (bytes.len() - 1, "is the copy complete")]
    {
        std::fs::write(&path, &bytes[..len]).unwrap();
        assert_names(&load_error(dir.path()), &["model.safetensors", needle]);
    }
    std::fs::write(&path, [&4u64.to_le_bytes()[..], b"\xff\xff\xff\xff"].concat()).unwrap();
    assert_names(&load_error(dir.path()), &["model.safetensors", "UTF-8"]);
    std::fs::remove_file(&path).unwrap();
    assert_names(&load_error(dir.path()), &["neither model.safetensors nor"]);
    std::fs::write(dir.path().join("model.safetensors.index.json"), r#"{"weight_map":{"a":"x.safetensors"}}"#).unwrap();
    assert_names(&load_error(dir.path()), &["x.safetensors", "cannot read"]);
    std::fs::write(dir.path().join("x.safetensors"), [&2u64.to_le_bytes()[..], b"{}"].concat()).unwrap();
    assert_names(&load_error(dir.path()), &["x.safetensors", "`a`", "index"]);
}

#[test]
fn bad_configurations_are_named() {
    let dir = demo(DemoArch::Llama);
    change_config(dir.path(), "num_hidden_layers", json!(3));
    assert_names(&load_error(dir.path()), &["model.layers.2."]);
    change_config(dir.path(), "num_hidden_layers", json!("two"));
    assert_names(&load_error(dir.path()), &["config.json", "two"]);
    change_config(dir.path(), "num_hidden_layers", json!(2));
    change_config(dir.path(), "vocab_size", json!(7));
    assert_names(&load_error(dir.path()), &["model.embed_tokens.weight", "[7, 64]"]);
    change_config(dir.path(), "architectures", json!(["MambaForCausalLM"]));
    assert_names(&load_error(dir.path()), &["config.json", "architectures", "Mamba", "Qwen3ForCausalLM"]);
    std::fs::write(dir.path().join("config.json"), b"\xff{").unwrap();
    assert_names(&load_error(dir.path()), &["config.json"]);
    assert_names(&load_error(&dir.path().join("nowhere")), &["nowhere/config.json", "cannot read"]);
}

/// A model computed without one of its own tensors is another model.
#[test]
fn a_tensor_that_no_part_of_the_model_uses_is_named() {
    let dir = demo(DemoArch::Llama);
    let more = |name: &str| {
        change_header(dir.path(), |h| h[name] = json!({"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}));
    };
    more("model.layers.0.self_attn.rotary_emb.inv_freq");
    load_model(dir.path(), &mut |_, _| {}).unwrap();
    more("model.layers.1.self_attn.k_proj.bias");
    assert_names(&load_error(dir.path()), &["model.safetensors", "model.layers.1.self_attn.k_proj.bias"]);
    let dir = demo(DemoArch::Llama);
    change_config(dir.path(), "num_hidden_layers", json!(1));
    assert_names(&load_error(dir.path()), &["model.safetensors", "model.layers.1.", "8 more"]);
}

/// Of one block, two heads of four, a head tied to the table.
fn tiny_gguf(more: &[(&str, u64)]) -> Builder {
    let mut file = Builder::default().string("general.architecture", "llama");
    let sizes = [("embedding_length", 8), ("feed_forward_length", 16), ("block_count", 1), ("attention.head_count", 2)];
    for (key, size) in sizes.into_iter().chain([("context_length", 64)]) {
        file = file.u32(&format!("llama.{key}"), size);
    }
    let matrices =
        [("token_embd", 8, 4), ("blk.0.ffn_gate", 8, 16), ("blk.0.ffn_up", 8, 16), ("blk.0.ffn_down", 16, 8)];
    let square = ["q", "k", "v", "output"].map(|part| (format!("blk.0.attn_{part}"), 8, 8));
    for (name, cols, rows) in matrices.map(|(name, cols, rows)| (name.to_owned(), cols, rows)).into_iter().chain(square)
    {
        file = file.tensor(&format!("{name}.weight"), &[cols, rows], 0, &vec![0; (cols * rows * 4) as usize]);
    }
    let norms = ["output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"].map(|name| (name, 8));
    for (name, len) in norms.iter().chain(more) {
        file = file.tensor(name, &[*len], 0, &vec![0; (len * 4) as usize]);
    }
    file
}

#[test]
fn a_gguf_file_with_some_biases_is_refused_and_with_all_or_none_it_loads() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let all = ["q", "k", "v", "output"].map(|part| format!("blk.0.attn_{part}.bias"));
    let all: Vec<(&str, u64)> = all.iter().map(|name| (name.as_str(), 8)).collect();
    for more in [&[], &all[..], &[("rope_freqs.weight", 2)]] {
        std::fs::write(&path, tiny_gguf(more).build()).unwrap();
        load_model(&path, &mut |_, _| {}).unwrap();
    }
    for (more, name) in [(&all[..3], "self_attn.k_proj.bias"), (&[("output.bias", 4)], "lm_head.bias")] {
        std::fs::write(&path, tiny_gguf(more).build()).unwrap();
        assert_names(&load_error(&path), &["m.gguf", name]);
    }
}

#[test]
fn loading_reports_every_byte_once() {
    let dir = demo(DemoArch::Qwen3);
    let mut reports = Vec::new();
    load_model(dir.path(), &mut |done, total| reports.push((done, total))).unwrap();
    let total = reports[0].1;
    let file_len = std::fs::metadata(dir.path().join("model.safetensors")).unwrap().len();
    assert!(total > 0 && file_len - total < 8192, "{total} of {file_len}");
    assert!(reports.is_sorted() && reports[0].0 == 0 && reports.last() == Some(&(total, total)));
}

#[test]
fn what_its_makers_sample_a_model_with_is_one_of_its_facts() {
    let dir = demo(DemoArch::Llama);
    let sampling = || load_model(dir.path(), &mut |_, _| {}).unwrap().info().sampling;
    assert_eq!(sampling(), SamplingDefaults::default());
    let said = json!({"eos_token_id": 1, "temperature": 0.6, "top_k": 20, "top_p": 7});
    std::fs::write(dir.path().join("generation_config.json"), said.to_string()).unwrap();
    let told = SamplingDefaults { temperature: Some(0.6), top_k: Some(20), ..SamplingDefaults::default() };
    assert_eq!(sampling(), told);
}

#[test]
fn a_demo_model_talks() {
    for arch in [DemoArch::Llama, DemoArch::Qwen3] {
        let dir = demo(arch);
        let mut model = load_model(dir.path(), &mut |_, _| {}).unwrap();
        let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
        assert_eq!(model.info().vocab_size, tokenizer.vocab_size());
        assert!(model.info().vocab_size > 1000 && model.info().seq_len_max >= 4096);
        assert_eq!((model.info().bos_token_id, &model.info().eos_token_ids[..]), (Some(0), &[1][..]));

        let template = ChatTemplate::from_dir(dir.path()).unwrap().unwrap();
        let messages = json!([{"role": "user", "content": "hello"}]);
        let now = jiff::civil::date(2026, 1, 1).at(0, 0, 0, 0);
        let input = ChatInput { messages: &messages, tools: None, add_generation_prompt: true, extra: None, now };
        let prompt = template.render(input).unwrap();
        assert_eq!(prompt, "<|begin|><|turn|>user\nhello<|end|>\n<|turn|>assistant\n");

        model.allocate_kv(KvShape { num_blocks: 8, block_size: 16 }).unwrap();
        let mut tokens = tokenizer.encode(&prompt, false).unwrap();
        let (mut stream, mut text, mut done) = (tokenizer.stream(true), String::new(), 0);
        for _ in 0..20 {
            let seq = SeqInput {
                tokens: tokens[done..].to_vec(),
                start_pos: done,
                block_table: (0..8).collect(),
                logits: LogitsWanted::Last,
            };
            done = tokens.len();
            let row = model.forward(&StepBatch::of(vec![seq])).unwrap().rows.remove(0).remove(0);
            let best = (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
            tokens.push(u32::try_from(best).unwrap());
            text.extend(stream.push(tokens[done]).unwrap());
        }
        text.extend(stream.finish().unwrap());
        assert_eq!(text, tokenizer.decode(&tokens[tokens.len() - 20..], true).unwrap());
    }
}

#[test]
fn a_damaged_gguf_file_is_named() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gguf/llama-q8_0.gguf");
    let bytes = std::fs::read(golden).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, &bytes).unwrap();
    // the file, or a folder that holds only it
    for place in [&path, &dir.path().to_owned()] {
        let model = load_model(place, &mut |_, _| {}).unwrap();
        assert_eq!((model.info().arch.as_str(), &model.info().eos_token_ids[..]), ("llama", &[2][..]));
    }
    for (len, needle) in
        [(3, "is the copy complete"), (200, "is the copy complete"), (bytes.len() - 4096, "`output.weight`")]
    {
        std::fs::write(&path, &bytes[..len]).unwrap();
        assert_names(&load_error(&path), &["m.gguf", needle]);
    }
    let replace = |from: &str, to: &str| {
        let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        let mut bytes = bytes.clone();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        std::fs::write(&path, bytes).unwrap();
        load_error(&path)
    };
    assert_names(
        &replace("blk.1.attn_v", "blk.1.xttn_v"),
        &["m.gguf", "lacks", "model.layers.1.self_attn.v_proj.weight"],
    );
    assert_names(&replace("llama.context_length", "llama.context_lengtx"), &["m.gguf"]);
    assert_names(&replace("architecture", "brchitecture"), &["m.gguf", "general.architecture"]);
}
