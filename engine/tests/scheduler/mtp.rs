//! Guesses of an MTP head through the engine thread: the same output, a head that has read all it attends to, and guesses that are taken.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use engine::cli::folder_loader;
use engine::core::{CoreConfig, Loaded, start};
use engine::demo_model::DemoArch;
use engine::handle::{End, EngineHandle, GenerateRequest};
use engine::metrics::Metrics;
use engine::model::{LoadOptions, load_model_with};
use engine::sampling::SamplingParams;
use engine::speculation::SpeculationSpec;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;

use crate::headed::HeadedModel;
use crate::paged::greedy;
use crate::thread::{MakeModel, crowded, demo, engine, folder, metric, outputs, paged, plain, requests, until};

fn guessing(config: CoreConfig) -> CoreConfig {
    CoreConfig { speculation: Some(SpeculationSpec::Mtp), speculates_always: true, ..config }
}

fn with_head(dir: &Path) -> MakeModel {
    let dir = dir.to_owned();
    let options = LoadOptions { head: true, ..LoadOptions::default() };
    Box::new(move || load_model_with(&dir, &options, &mut |_, _| ()).unwrap())
}

/// Guesses that were verified, and those of them that were right.
fn verified(handle: &EngineHandle) -> (f64, f64) {
    let of = |name: &str| metric(handle, &format!("vllm:spec_decode_num_{name}_tokens_total"));
    (of("draft"), of("accepted"))
}

#[tokio::test(flavor = "multi_thread")]
async fn ep4_a_model_says_the_same_with_its_head_and_without() {
    let root = tempfile::tempdir().unwrap();
    let codec = demo(root.path(), DemoArch::Llama, 1);
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/mimo");
    let requests = requests(160);
    let expected = outputs(&engine(plain(), &codec, folder(&dir), None), &requests, false).await;
    assert!(expected.iter().all(|(said, end)| said.len() == 48 && *end == End::Length));

    let handle = engine(guessing(CoreConfig::default()), &codec, with_head(&dir), None);
    assert_eq!(outputs(&handle, &requests, false).await, expected, "alone");
    assert_eq!(outputs(&handle, &requests, true).await, expected, "together");
    assert!(verified(&handle).0 > 20.0, "{:?}", verified(&handle));

    let crowd = engine(guessing(crowded()), &codec, with_head(&dir), None);
    assert_eq!(outputs(&crowd, &requests, true).await, expected, "in a crowd");
    assert_eq!(outputs(&crowd, &requests, true).await, expected, "from the cache");
    assert!(metric(&crowd, "vllm:num_preemptions_total") > 0.0);
    assert!(metric(&crowd, "vllm:prefix_cache_hits_total") > 0.0);
}

/// Runs nine requests three times in a crowd, twice as they come and once one by one; gives what [`verified`] counts.
async fn crowd_of(lies: u64, config: CoreConfig) -> (f64, f64) {
    let root = tempfile::tempdir().unwrap();
    let codec = demo(root.path(), DemoArch::Llama, 1);
    let model = HeadedModel::new(2048, lies);
    let blind = model.blind.clone();
    let handle = engine(config, &codec, Box::new(move || Box::new(model)), None);
    let requests = requests(60);
    for together in [true, true, false] {
        for (request, (said, _)) in requests.iter().zip(outputs(&handle, &requests, together).await) {
            if request.sampling.temperature == 0.0 {
                assert_eq!(said, greedy(&request.prompt, 48, &[]));
            }
        }
    }
    assert!(metric(&handle, "vllm:prefix_cache_hits_total") > 0.0);
    assert_eq!(blind.load(Relaxed), 0, "rows of the head that attended to what it had not read");
    verified(&handle)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_finds_what_it_attends_to_whoever_shares_preempts_and_is_cached() {
    let (guessed, accepted) = crowd_of(0, guessing(crowded())).await;
    assert!(guessed > 100.0 && accepted == guessed, "{accepted} of {guessed}");
    let odd = CoreConfig { block_size: 1, num_blocks: Some(400), ..crowded() };
    let (guessed, accepted) = crowd_of(0, guessing(odd)).await;
    assert!(guessed > 100.0 && accepted == guessed, "{accepted} of {guessed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_that_is_often_wrong_or_rests_reads_again_what_it_must() {
    let (guessed, accepted) = crowd_of(3, guessing(crowded())).await;
    assert!(accepted > 100.0 && guessed > accepted + 20.0, "{accepted} of {guessed}");
    // the governor lets it guess now and then
    crowd_of(0, CoreConfig { speculates_always: false, ..guessing(crowded()) }).await;
}

/// Guesses that were verified in 400 tokens of one sequence, by a head that is mostly right and takes as long as hundreds of steps.
async fn guesses_of_a_slow_head(speculates_always: bool) -> f64 {
    let root = tempfile::tempdir().unwrap();
    let codec = demo(root.path(), DemoArch::Llama, 1);
    let mut model = HeadedModel::new(2048, 3);
    model.takes = Duration::from_millis(10);
    let config = CoreConfig { speculates_always, ..guessing(CoreConfig::default()) };
    let handle = engine(config, &codec, Box::new(move || Box::new(model)), None);
    let request = GenerateRequest { max_new_tokens: 400, ..requests(60).swap_remove(0) };
    let said = outputs(&handle, std::slice::from_ref(&request), false).await.swap_remove(0).0;
    assert_eq!(said, greedy(&request.prompt, 400, &[]));
    verified(&handle).0
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_that_loses_time_is_asked_no_more() {
    let (asked, let_be) = (guesses_of_a_slow_head(true).await, guesses_of_a_slow_head(false).await);
    assert!(asked > 150.0, "{asked}");
    assert!(let_be < asked / 2.0, "{let_be} where {asked} are possible");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_without_a_head_cannot_guess_by_it() {
    let root = tempfile::tempdir().unwrap();
    let dir = demo(root.path(), DemoArch::Llama, 1);
    let codec = Arc::new(engine::codec::HfCodec::from_dir(&dir).unwrap());
    let load = Box::new(move |_: &mut dyn FnMut(u64, u64)| Ok(Loaded { model: paged()(), codec, draft: None }));
    let metrics = Arc::new(Metrics::new("m").unwrap());
    let ended = start(guessing(CoreConfig::default()), metrics, load).unwrap().ended.await.unwrap();
    assert!(ended.unwrap_err().to_string().contains("--speculative mtp"));
    let load = folder_loader(&dir, Some(SpeculationSpec::Mtp));
    let error = load(&mut |_, _| ()).err().unwrap().to_string();
    assert!(error.contains("num_nextn_predict_layers"), "{error}");
}

/// Every token has its own direction, and the one after it is known: `next` of it. Blocks add nothing, so a state is its token's direction, and
/// the head turns it into the next one's. It looks at states alone: one of another place makes a wrong guess.
#[tokio::test(flavor = "multi_thread")]
async fn a_head_that_is_right_by_construction_is_always_taken() {
    let root = tempfile::tempdir().unwrap();
    let dir = demo(root.path(), DemoArch::Llama, 1);
    write_known(&dir);
    let request = |n: u32| {
        let mut prompt: Vec<u32> = (0..37).map(|i| (i * i + 3) % TOKENS).collect();
        prompt.push(n * 5 + 1);
        let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        GenerateRequest {
            prompt: prompt.into(),
            max_new_tokens: 40,
            ignore_eos: true,
            sampling,
            ..GenerateRequest::default()
        }
    };
    let requests: Vec<GenerateRequest> = (0..6).map(request).collect();
    // as the command line does it
    let loader = folder_loader(&dir, Some(SpeculationSpec::Mtp));
    let config = guessing(CoreConfig { block_size: 4, ..CoreConfig::default() });
    let handle = start(config, Arc::new(Metrics::new("m").unwrap()), loader).unwrap().handle;
    until("the engine is ready", || handle.shared.ready.get().is_some());
    for together in [false, true] {
        for (request, (said, _)) in requests.iter().zip(outputs(&handle, &requests, together).await) {
            let last = *request.prompt.last().unwrap();
            let known: Vec<u32> =
                std::iter::successors(Some(next(last)), |token| Some(next(*token))).take(40).collect();
            assert_eq!(said, known);
        }
    }
    let (guessed, accepted) = verified(&handle);
    assert!(guessed > 300.0 && accepted == guessed, "{accepted} of {guessed}");
    assert!(metric(&handle, "vllm:prefix_cache_hits_total") > 0.0);
    let (steps, said) = (metric(&handle, "truebeat:steps_total"), 2.0 * 6.0 * 40.0);
    assert!(steps < said / 2.0, "{steps} steps for {said} tokens");
}

const TOKENS: u32 = 64;

/// A walk through all tokens.
fn next(token: u32) -> u32 {
    (token * 5 + 3) % TOKENS
}

/// In place of the weights of the model in `dir`.
fn write_known(dir: &Path) {
    let size = TOKENS as usize;
    let matrix = |rows: usize, cols: usize, one: &dyn Fn(usize) -> Option<usize>| {
        let mut values = vec![0.0f32; rows * cols];
        (0..rows).filter_map(|row| Some(row * cols + one(row)?)).for_each(|at| values[at] = 1.0);
        (vec![rows, cols], values)
    };
    // row `to` has its one where the token before it stands
    let from = |to: usize| (0..TOKENS).find(|token| next(*token) as usize == to).map(|token| token as usize);
    let mut all = HashMap::from([
        ("model.embed_tokens.weight".to_owned(), matrix(size, size, &Some)),
        ("lm_head.weight".to_owned(), matrix(size, size, &from)),
        ("model.norm.weight".to_owned(), (vec![size], vec![1.0; size])),
        ("model.mtp_layers.0.input_proj.weight".to_owned(), matrix(size, 2 * size, &from)),
    ]);
    for block in ["model.layers.0", "model.mtp_layers.0"] {
        for (name, rows, cols) in [
            ("self_attn.q_proj", size, size),
            ("self_attn.k_proj", size, size),
            ("self_attn.v_proj", size, size),
            ("self_attn.o_proj", size, size),
            ("mlp.gate_proj", 32, size),
            ("mlp.up_proj", 32, size),
            ("mlp.down_proj", size, 32),
        ] {
            all.insert(format!("{block}.{name}.weight"), matrix(rows, cols, &|_| None));
            if ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"].contains(&name) {
                all.insert(format!("{block}.{name}.bias"), (vec![rows], vec![0.0; rows]));
            }
        }
        let of_head: &[&str] = match block {
            "model.layers.0" => &[],
            _ => &["token_layernorm", "hidden_layernorm", "final_layernorm"],
        };
        for norm in ["input_layernorm", "post_attention_layernorm"].iter().chain(of_head) {
            all.insert(format!("{block}.{norm}.weight"), (vec![size], vec![1.0; size]));
        }
    }
    let bytes: HashMap<&String, Vec<u8>> = all
        .iter()
        .map(|(name, (_, values))| (name, values.iter().flat_map(|value| value.to_le_bytes()).collect()))
        .collect();
    let view = |(name, (shape, _)): (&String, &(Vec<usize>, Vec<f32>))| {
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), &bytes[name]).unwrap())
    };
    std::fs::write(dir.join("model.safetensors"), safetensors::serialize(all.iter().map(view), None).unwrap()).unwrap();
    let config = json!({"architectures": ["MiMoForCausalLM"], "hidden_size": size, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 4, "vocab_size": size, "max_position_embeddings": 256, "num_nextn_predict_layers": 1});
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}
