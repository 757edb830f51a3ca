//! A byte-level BPE tokenizer trained on the bundled text: any text can be encoded, and a token may end in the middle
//! of a character, as with the big ones.

use std::collections::HashSet;

use serde_json::{Value, json};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, Tokenizer};

use super::{BOS_ID, DemoArch, DemoModelError, SPECIAL_TOKENS};

const TEXT: &str = include_str!("text.txt");
/// Tokens to learn: the bundled text holds more pairs than that.
const VOCAB_SIZE: usize = 1536;

/// A trained tokenizer as the text of its `tokenizer.json`.
pub struct TrainedTokenizer {
    pub json: String,
    pub vocab_size: usize,
}

/// Trains on the bundled text. Like the real ones, Llama's puts the begin token before a prompt and Qwen3's does not.
pub fn train(arch: DemoArch) -> Result<TrainedTokenizer, DemoModelError> {
    let byte_level = ByteLevel::default().add_prefix_space(false);
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(byte_level)).with_decoder(Some(byte_level));
    // every byte is in the alphabet, so no text is ever unknown
    let alphabet: HashSet<char> = ByteLevel::alphabet().into_iter().collect();
    let trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(VOCAB_SIZE)
        .min_frequency(1)
        .initial_alphabet(alphabet)
        .special_tokens(SPECIAL_TOKENS.iter().map(|token| AddedToken::from(*token, true)).collect())
        .build();
    let failed = |error: tokenizers::Error| DemoModelError::Tokenizer(error.to_string());
    tokenizer.train(&mut TrainerWrapper::from(trainer), TEXT.lines()).map_err(failed)?;
    if arch != DemoArch::Qwen3 {
        let bos = SPECIAL_TOKENS[BOS_ID as usize];
        let template = TemplateProcessing::builder()
            .try_single(format!("{bos} $A"))
            .map_err(DemoModelError::Tokenizer)?
            .special_tokens(vec![(bos, BOS_ID)])
            .build()
            .map_err(|error| DemoModelError::Tokenizer(error.to_string()))?;
        tokenizer.with_post_processor(Some(template));
    }
    let json = tokenizer.to_string(false).map_err(failed)?;
    Ok(TrainedTokenizer { json, vocab_size: tokenizer.get_vocab_size(true) })
}

const CHAT_TEMPLATE: &str = "\
{%- if messages | length == 0 %}{{- raise_exception('a chat needs at least one message') }}{% endif %}
{{- bos_token }}
{%- if tools %}
{{- '<|turn|>tools\\n' }}
{%- for tool in tools %}
{{- tool | tojson + '\\n' }}
{%- endfor %}
{{- 'Call one with <tool_call>\\n{\"name\": ..., \"arguments\": {...}}\\n</tool_call>' + eos_token + '\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('unknown role: ' + message.role) }}
{%- endif %}
{{- '<|turn|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|turn|>assistant\\n' }}
{%- endif %}
";

/// `tokenizer_config.json`.
pub fn config(arch: DemoArch) -> Value {
    let [bos, eos, _, pad] = SPECIAL_TOKENS;
    let added = SPECIAL_TOKENS.iter().enumerate().map(|(id, token)| (id.to_string(), added_token(token)));
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "add_bos_token": arch != DemoArch::Qwen3,
        "clean_up_tokenization_spaces": false,
        "added_tokens_decoder": added.collect::<serde_json::Map<_, _>>(),
        "chat_template": CHAT_TEMPLATE,
    })
}

fn added_token(token: &str) -> Value {
    json!({"content": token, "special": true, "lstrip": false, "rstrip": false, "normalized": false, "single_word": false})
}
