//! Random walks through grammars over a vocabulary of single bytes and a few words: whatever is allowed to its end is what was
//! asked for. And grammars that mean harm.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::codec::{Chat, CodecError, TextCodec, TextStream, ToolFormat};
use crate::model::ModelInfo;
use crate::splitmix::SplitMix64;

pub const END: u32 = 256;
const WORDS: [&str; 6] = ["<end>", "name", "\": ", "{\"", "}}", "[TOOL_CALLS]"];
/// The last word, a special token besides the end.
pub const SPECIAL: u32 = END + 5;

/// Bytes, an end token, and a few words.
pub struct Bytes;

impl TextCodec for Bytes {
    fn encode(&self, _: &str, _: bool) -> Result<Vec<u32>, CodecError> {
        Err(CodecError::NoTemplate)
    }
    fn decode(&self, _: &[u32]) -> Result<String, CodecError> {
        Err(CodecError::NoTemplate)
    }
    fn ids_end(&self) -> Option<usize> {
        Some(256 + WORDS.len())
    }
    fn end_token(&self) -> Option<u32> {
        Some(END)
    }
    fn is_special(&self, id: u32) -> bool {
        id == END || id == SPECIAL
    }
    fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(&self.token_bytes(id)).into_owned()
    }
    fn token_bytes(&self, id: u32) -> Vec<u8> {
        u8::try_from(id).map_or_else(|_| WORDS[(id - END) as usize].into(), |byte| vec![byte])
    }
    fn stream(&self, _: bool) -> Box<dyn TextStream> {
        unreachable!("no grammar decodes")
    }
    fn stream_after(&self, _: &[u32], _: bool) -> Box<dyn TextStream> {
        unreachable!("no grammar decodes")
    }
    fn tool_format(&self) -> Option<ToolFormat> {
        None
    }
    fn chat_prompt(&self, _: Chat<'_>) -> Result<String, CodecError> {
        Err(CodecError::NoTemplate)
    }
}

pub fn info(eos_token_ids: Vec<u32>) -> ModelInfo {
    // the model's last layer is wider than the vocabulary, as it often is
    let vocab_size = 256 + WORDS.len();
    let (name, arch) = ("m".into(), "a".into());
    ModelInfo { name, arch, vocab_size, seq_len_max: 1, eos_token_ids, ..ModelInfo::default() }
}

fn grammars() -> &'static Grammars {
    #[allow(clippy::disallowed_types, reason = "a test may wait: its runner has a deadline")]
    static SHARED: std::sync::LazyLock<Grammars> = std::sync::LazyLock::new(Grammars::default);
    &SHARED
}

fn compile(spec: &GrammarSpec) -> Result<Constraint, GrammarError> {
    grammars().compile(spec, &Bytes, &info(vec![END]))
}

/// One whose masks, but for the first, are made when the gate opens.
pub fn held(spec: &GrammarSpec, gate: &Arc<AtomicBool>) -> Constraint {
    let grammars = Grammars::default();
    grammars.workers.hold(gate);
    grammars.compile(spec, &Bytes, &info(vec![END])).unwrap()
}

fn schema(value: &Value) -> GrammarSpec {
    GrammarSpec::JsonSchema(value.to_string().into())
}

fn wait(constraint: &mut Constraint) {
    assert!(
        constraint.is_ready(Instant::now() + Duration::from_secs(60), MASK_TIME_MAX).unwrap(),
        "a mask in a minute"
    );
}

/// Does the grammar allow this text, byte by byte, and the end after it?
pub fn follows(spec: &GrammarSpec, text: &str) -> bool {
    follows_tokens(spec, &text.bytes().map(u32::from).collect::<Vec<_>>())
}

/// Does the grammar allow these tokens, and the end after them?
pub fn follows_tokens(spec: &GrammarSpec, tokens: &[u32]) -> bool {
    let mut constraint = compile(spec).unwrap();
    for token in tokens {
        wait(&mut constraint);
        if !constraint.mask().unwrap().allows(*token) {
            return false;
        }
        constraint.advance(*token).unwrap();
    }
    wait(&mut constraint);
    constraint.mask().unwrap().allows(END)
}

/// Walks at random, towards the end where it may end and `most` tokens are there; the text, if it came to an end.
fn walk(constraint: &mut Constraint, seed: u64, most: usize) -> Option<String> {
    let (mut random, mut text) = (SplitMix64(seed), Vec::new());
    for step in 0..most * 3 {
        wait(constraint);
        let mask = constraint.mask().unwrap();
        assert!(!mask.allows(262) && !mask.allows(u32::MAX), "padding is never allowed");
        let allowed: Vec<u32> = (0..262).filter(|id| mask.allows(*id)).collect();
        let may_end = allowed.contains(&END);
        let draw = allowed[(random.unit() * allowed.len() as f64) as usize];
        // quotes and brackets close what is open, so that walks end
        let closing = b"\"}]".iter().map(|b| u32::from(*b)).find(|id| step > most && allowed.contains(id));
        let token = if may_end && (step > most || draw == END) { END } else { closing.unwrap_or(draw) };
        if token == END {
            return Some(String::from_utf8(text).unwrap());
        }
        text.extend(Bytes.token_bytes(token));
        constraint.advance(token).unwrap();
    }
    None
}

#[test]
fn choices_and_regular_expressions_give_just_what_they_say() {
    let choice = compile(&GrammarSpec::Choice(vec!["yes".into(), "no \"quoted\"\n".into(), "né".into()])).unwrap();
    let mut seen: Vec<String> = (0..40).filter_map(|seed| walk(&mut choice.another().unwrap(), seed, 40)).collect();
    assert_eq!(seen.len(), 40);
    seen.sort();
    seen.dedup();
    assert_eq!(seen, ["no \"quoted\"\n", "né", "yes"]);
    let date = compile(&GrammarSpec::Regex(r"[0-9]{4}-(0[1-9]|1[0-2])".into())).unwrap();
    for seed in 0..20 {
        let text = walk(&mut date.another().unwrap(), seed, 20).unwrap();
        let month: u32 = text[5..].parse().unwrap();
        assert!(text.len() == 7 && (1..=12).contains(&month), "{text}");
    }
    let lark = "start: pair (\";\" pair)*\npair: /[a-c]/ \"=\" /[0-9]+/";
    let text = walk(&mut compile(&GrammarSpec::Lark(lark.into())).unwrap(), 3, 12).unwrap();
    assert!(text.split(';').all(|pair| pair.split_once('=').is_some()), "{text}");
}

#[test]
fn an_object_is_an_object() {
    let object = compile(&GrammarSpec::JsonObject).unwrap();
    let texts: Vec<String> = (0..15).filter_map(|seed| walk(&mut object.another().unwrap(), seed, 60)).collect();
    assert!(texts.len() > 5, "most walks come to an end");
    assert!(texts.iter().all(|t| serde_json::from_str::<Value>(t).unwrap().is_object()), "{texts:?}");
}

#[test]
fn bad_grammars_are_refused_with_the_reason() {
    let refused = |spec: GrammarSpec| compile(&spec).unwrap_err().to_string();
    assert!(refused(schema(&json!({"type": "nonsense"}))).contains("nonsense"));
    assert!(refused(schema(&json!({"type": "integer", "minimum": 5, "maximum": 1}))).contains("minimum"));
    assert!(refused(GrammarSpec::Regex("(".into())).to_lowercase().contains("regex"));
    assert!(refused(GrammarSpec::Lark("start: missing".into())).contains("missing"));
    assert!(refused(GrammarSpec::Lark("begin: \"a\"".into())).contains("start"));
    let reference = json!({"$ref": "http://example.org/schema.json"});
    assert!(refused(schema(&reference)).contains("$ref"), "nothing is fetched");
    // a number that JSON may have, and no value here
    assert!(refused(GrammarSpec::JsonSchema("{\"minimum\": 1e999}".into())).contains("no JSON"));
    let nobody = Grammars::default().compile(&GrammarSpec::JsonObject, &Bytes, &info(vec![]));
    assert!(matches!(nobody, Err(GrammarError::Vocabulary(_))), "{nobody:?}");
}

#[test]
fn grammars_that_mean_harm_fail_in_bounded_time() {
    let deep = |n: usize| "(".repeat(n) + "a" + &")".repeat(n);
    let nested = |n: usize| (0..n).fold(json!({"type": "null"}), |inner, _| json!({"type": "array", "items": inner}));
    let chain: String = (0..20_000).map(|i| format!("r{i}: r{}\n", i + 1)).collect();
    let specs = [
        GrammarSpec::Regex(deep(50_000)),
        GrammarSpec::Lark(format!("start: {}", deep(50_000).replace('a', "\"a\""))),
        schema(&nested(100)),
        GrammarSpec::Regex("a".repeat(300_000)),
        GrammarSpec::Regex("((a{1,1000}){1,1000}){1,1000}".into()),
        GrammarSpec::Regex("(.*a){30}.{30}".into()),
        GrammarSpec::Lark(format!("start: r0\n{chain}r20000: \"a\"\n")),
        GrammarSpec::Lark("start: start start | \"a\"".into()),
        GrammarSpec::Choice(vec!["x".repeat(300_000)]),
    ];
    let began = Instant::now();
    let refused = specs.iter().filter(|spec| match compile(spec) {
        // what is accepted can be followed, or fails as an error of this request
        Ok(mut constraint) => {
            for _ in 0..20 {
                let mask = constraint.is_ready(Instant::now() + Duration::from_secs(10), MASK_TIME_MAX);
                if mask.is_err() || constraint.advance(u32::from(b'a')).is_err() {
                    break;
                }
            }
            false
        }
        Err(_) => true,
    });
    assert!(refused.count() >= 4);
    assert!(began.elapsed() < Duration::from_secs(120), "{:?}", began.elapsed());
}

#[test]
fn every_constraint_goes_its_own_way_and_gives_its_place_back() {
    let grammars = Grammars::default();
    let spec = GrammarSpec::Choice(vec!["ab".into(), "cd".into()]);
    let mut first = grammars.compile(&spec, &Bytes, &info(vec![END])).unwrap();
    first.advance(u32::from(b'a')).unwrap();
    wait(&mut first);
    let second = first.another().unwrap();
    assert!(second.mask().unwrap().allows(u32::from(b'c')) && !first.mask().unwrap().allows(u32::from(b'c')));
    assert!(first.mask().unwrap().allows(u32::from(b'b')) && !first.mask().unwrap().allows(END));
    let more: Vec<_> = std::iter::repeat_with(|| first.another()).take_while(Result::is_ok).take(1000).collect();
    assert!(more.len() < 1000, "there is a most");
    assert!(matches!(grammars.compile(&spec, &Bytes, &info(vec![END])), Err(GrammarError::Busy(_))));
    drop(more);
    assert!(grammars.compile(&spec, &Bytes, &info(vec![END])).is_ok());
}

#[test]
fn a_token_that_is_not_allowed_fails_the_request_alone() {
    let mut constraint = compile(&GrammarSpec::Choice(vec!["ab".into()])).unwrap();
    constraint.advance(u32::from(b'z')).unwrap();
    let error = constraint.is_ready(Instant::now() + Duration::from_secs(60), MASK_TIME_MAX).unwrap_err();
    assert!(matches!(error, ConstraintError::Failed(_)), "{error}");
    assert!(constraint.mask().is_err() && constraint.advance(0).is_err(), "and stays so");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Whatever comes to its end under a schema satisfies it.
    #[test]
    fn schemas_hold(seed in any::<u64>()) {
        let schema = json!({"type": "object", "properties": {
            "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}, "next": {"$ref": "#/$defs/flag"},
        }, "required": ["name", "age", "next"], "additionalProperties": false, "$defs": {"flag": {"type": "boolean"}}});
        let mut constraint = compile(&GrammarSpec::JsonSchema(schema.to_string().into())).unwrap();
        if let Some(text) = walk(&mut constraint, seed, 60) {
            let value: Value = serde_json::from_str(&text).unwrap();
            prop_assert!(value["name"].as_str().unwrap().chars().count() <= 8, "{}", text);
            prop_assert!(value["age"].as_u64().unwrap() <= 150, "{}", text);
            prop_assert!(value["next"].is_boolean() && value.as_object().unwrap().len() <= 4, "{}", text);
            let tags = value["tags"].as_array().cloned().unwrap_or_default();
            prop_assert!(tags.len() <= 3 && tags.iter().all(|t| t == "a" || t == "b"), "{}", text);
        }
    }
}
