//! Folders: each is one of the corpus with a few words changed.

use super::{Made, corpus_file};

/// Words that are there, and those that come in their place.
type Changes = &'static [(&'static [u8], &'static [u8])];
type Row = (&'static str, &'static str, Changes, &'static str);

/// A folder of the corpus with these changes.
fn made((name, from, changes, says): Row) -> Made {
    let mut bytes = std::fs::read(corpus_file(&format!("model_folder/{from}"))).unwrap();
    for (old, new) in changes {
        let at = bytes.windows(old.len()).position(|window| window == *old);
        let at = at.unwrap_or_else(|| panic!("{name}: {from} has no {}", String::from_utf8_lossy(old)));
        bytes.splice(at..at + old.len(), new.iter().copied());
    }
    Made { name, bytes, says }
}

/// Every input.
pub fn all() -> Vec<Made> {
    let rows = [FAMILIES, SIZES, ROPE, WINDOWS, FILES, HEADERS, WORDS, TEMPLATES];
    rows.into_iter().flatten().copied().map(made).collect()
}

const LLAMA: &[u8] = b"LlamaForCausalLM";
const QWEN3: &[u8] = b"Qwen3ForCausalLM";
/// A place for more keys of `config.json`.
const CONFIG: &[u8] = br#"{"architectures""#;

const FAMILIES: &[Row] = &[
    ("arch-other", "llama", &[(LLAMA, b"GPT2LMHeadModel")], "`architectures`"),
    ("arch-none", "llama", &[(br#"["LlamaForCausalLM"]"#, b"null")], "`architectures` is []"),
    ("qwen2-without-biases", "llama", &[(LLAMA, b"Qwen2ForCausalLM")], "q_proj.bias"),
    ("mimo-without-biases", "llama", &[(LLAMA, b"MiMoForCausalLM")], "q_proj.bias"),
    ("attention-biases", "llama", &[(CONFIG, br#"{"attention_bias":true,"architectures""#)], "q_proj.bias"),
    ("mlp-biases", "llama", &[(CONFIG, br#"{"mlp_bias":true,"architectures""#)], "gate_proj.bias"),
    ("activation", "llama", &[(CONFIG, br#"{"hidden_act":"gelu","architectures""#)], "`hidden_act` is gelu"),
    ("activation-swish", "llama", &[(CONFIG, br#"{"hidden_act":"swish","architectures""#)], ""),
    (
        "quantized",
        "llama",
        &[(CONFIG, br#"{"quantization_config":{"quant_method":"fp8"},"architectures""#)],
        "`quantization_config`",
    ),
    ("quantized-null", "llama", &[(CONFIG, br#"{"quantization_config":null,"architectures""#)], ""),
    ("moe-experts-missing", "qwen3", &[(QWEN3, b"Qwen3MoeForCausalLM")], "mlp.gate.weight"),
    (
        "moe-no-experts",
        "qwen3",
        &[(QWEN3, b"Qwen3MoeForCausalLM"), (CONFIG, br#"{"num_experts":0,"architectures""#)],
        "`num_experts` is 0",
    ),
    (
        "moe-more-a-token",
        "qwen3",
        &[(QWEN3, b"Qwen3MoeForCausalLM"), (CONFIG, br#"{"num_local_experts":2,"architectures""#)],
        "`num_experts_per_tok` is 8",
    ),
    (
        "moe-dense-layer",
        "qwen3",
        &[(QWEN3, b"Qwen3MoeForCausalLM"), (CONFIG, br#"{"mlp_only_layers":[0],"architectures""#)],
        "",
    ),
    (
        "moe-sparse-step",
        "qwen3",
        &[(QWEN3, b"Qwen3MoeForCausalLM"), (CONFIG, br#"{"decoder_sparse_step":2,"architectures""#)],
        "",
    ),
];

const SIZES: &[Row] = &[
    ("size-zero", "llama", &[(br#""hidden_size":8"#, br#""hidden_size":0"#)], "`hidden_size` is 0"),
    ("size-huge", "llama", &[(br#""vocab_size":5"#, br#""vocab_size":67108865"#)], "`vocab_size`"),
    ("size-negative", "llama", &[(br#""vocab_size":5"#, br#""vocab_size":-1"#)], "is not a model configuration"),
    ("size-float", "llama", &[(br#""vocab_size":5"#, br#""vocab_size":5.0"#)], "is not a model configuration"),
    ("size-none", "llama", &[(br#""vocab_size":5,"#, b"")], "is not a model configuration"),
    ("heads-zero", "llama", &[(br#"heads":2"#, br#"heads":0"#)], "`num_attention_heads`"),
    (
        "kv-heads-zero",
        "llama",
        &[(CONFIG, br#"{"num_key_value_heads":0,"architectures""#)],
        "`num_key_value_heads` is 0",
    ),
    (
        "kv-heads-do-not-divide",
        "llama",
        &[(CONFIG, br#"{"num_key_value_heads":3,"architectures""#)],
        "a divisor of num_attention_heads",
    ),
    (
        "kv-heads-fewer",
        "llama",
        &[(CONFIG, br#"{"num_key_value_heads":1,"architectures""#)],
        "but config.json calls for",
    ),
    ("head-odd", "llama", &[(CONFIG, br#"{"head_dim":3,"architectures""#)], "an even number"),
    ("head-default-of-qwen3", "qwen3", &[(br#""head_dim":4,"#, b"")], "but config.json calls for"),
    ("ends-one", "llama", &[(br#""eos_token_id":[4]"#, br#""eos_token_id":4"#)], ""),
    ("ends-none", "llama", &[(br#","eos_token_id":[4]"#, b"")], ""),
    ("ends-text", "llama", &[(br#""eos_token_id":[4]"#, br#""eos_token_id":"4""#)], "is not a model configuration"),
    ("begins-list", "llama", &[(CONFIG, br#"{"bos_token_id":[0,1],"architectures""#)], ""),
    ("begins-empty", "llama", &[(CONFIG, br#"{"bos_token_id":[],"architectures""#)], ""),
    ("norm-eps", "llama", &[(CONFIG, br#"{"rms_norm_eps":1e-5,"architectures""#)], ""),
];

const LLAMA3: &[u8] = br#""rope_type":"llama3""#;
const YARN: &[u8] = br#""factor":4.0"#;

const ROPE: &[Row] = &[
    ("rope-base", "llama", &[(b"500000.0", b"1.0")], "`rope_theta` is 1"),
    ("rope-part", "llama", &[(CONFIG, br#"{"partial_rotary_factor":0.5,"architectures""#)], "`partial_rotary_factor`"),
    ("rope-part-nested", "qwen3", &[(YARN, br#""factor":4.0,"partial_rotary_factor":0.5"#)], "`partial_rotary_factor`"),
    ("rope-linear", "llama", &[(LLAMA3, br#""type":"linear""#)], ""),
    ("rope-linear-bare", "llama", &[(LLAMA3, br#""type":"linear""#), (br#""factor":8.0,"#, b"")], "`factor` is missing"),
    ("rope-linear-negative", "llama", &[(LLAMA3, br#""type":"linear""#), (b"8.0", b"-8.0")], "`factor` is missing"),
    ("rope-dynamic", "llama", &[(LLAMA3, br#""rope_type":"dynamic""#)], ""),
    ("rope-other", "llama", &[(LLAMA3, br#""rope_type":"su""#)], "`rope_type` is su"),
    ("rope-llama3-bare", "llama", &[(br#""low_freq_factor":1.0,"#, b"")], "`low_freq_factor`"),
    ("rope-yarn-bare", "qwen3", &[(YARN, br#""x":0"#)], "`factor` is missing"),
    ("rope-yarn-shrinks", "qwen3", &[(YARN, br#""factor":0.5"#)], ""),
    ("rope-yarn-scaled", "qwen3", &[(YARN, br#""factor":4.0,"mscale":1.0,"mscale_all_dim":0.7"#)], ""),
    ("rope-yarn-half-scaled", "qwen3", &[(YARN, br#""factor":4.0,"mscale":1.0,"mscale_all_dim":0"#)], ""),
    (
        "rope-yarn-all",
        "qwen3",
        &[(
            YARN,
            br#""factor":4.0,"attention_factor":1.2,"beta_fast":16,"beta_slow":2,"truncate":false,"original_max_position_embeddings":16"#,
        )],
        "",
    ),
    (
        "rope-by-kind",
        "qwen3",
        &[(br#""rope_parameters":{"#, br#""rope_parameters":{"full_attention":{"rope_type":"linear","factor":2},"#)],
        "",
    ),
];

const TYPES: &[u8] = br#""layer_types":["full_attention"]"#;

const WINDOWS: &[Row] = &[
    ("mistral", "llama", &[(LLAMA, b"MistralForCausalLM")], ""),
    (
        "mistral-null",
        "llama",
        &[(LLAMA, b"MistralForCausalLM"), (CONFIG, br#"{"sliding_window":null,"architectures""#)],
        "",
    ),
    (
        "mistral-zero",
        "llama",
        &[(LLAMA, b"MistralForCausalLM"), (CONFIG, br#"{"sliding_window":0,"architectures""#)],
        "`sliding_window` is 0",
    ),
    ("layers-few", "qwen3", &[(TYPES, br#""layer_types":[]"#)], "`layer_types` is 0 entries"),
    (
        "layers-other",
        "qwen3",
        &[(TYPES, br#""layer_types":["linear_attention"]"#)],
        "`layer_types` is linear_attention",
    ),
    ("layers-without-window", "qwen3", &[(TYPES, br#""layer_types":["sliding_attention"]"#)], "with a window"),
    (
        "layers-with-window",
        "qwen3",
        &[(TYPES, br#""layer_types":["sliding_attention"],"use_sliding_window":true,"sliding_window":8"#)],
        "",
    ),
    ("layers-behind", "qwen3", &[(TYPES, br#""use_sliding_window":true,"max_window_layers":1"#)], ""),
    ("layers-from-first", "qwen3", &[(TYPES, br#""use_sliding_window":true,"max_window_layers":0"#)], ""),
];

const FILES: &[Row] = &[
    ("config-list", "llama", &[(CONFIG, br#"["architectures""#)], "is not a model configuration"),
    ("config-bytes", "llama", &[(LLAMA, b"\xff\xfe")], "is not a model configuration"),
    ("generation-cut", "llama", &[(br#"{"eos_token_id":4,"#, br#"{"eos_token_id"#)], "generation_config.json"),
    ("generation-silent", "llama", &[(br#"{"eos_token_id":4,"#, b"{")], ""),
    ("index-cut", "sharded", &[(br#"{"metadata""#, br#"["metadata""#)], "is not an index of weight files"),
    ("index-without-map", "sharded", &[(b"weight_map", b"weights")], "is not an index of weight files"),
    ("index-outside", "sharded", &[(br#""0.safetensors""#, br#""../0.safetensors""#)], "not a plain file name"),
    ("index-parent", "sharded", &[(br#""0.safetensors""#, br#""..""#)], "not a plain file name"),
    ("index-of-no-file", "sharded", &[(br#""0.safetensors""#, br#""7.safetensors""#)], "cannot read"),
    ("index-of-wrong-file", "sharded", &[(br#""0.safetensors""#, br#""1.safetensors""#)], "which does not hold it"),
];

const NORM: &[u8] = br#""model.norm.weight":{"dtype":"F32","shape":[8],"data_offsets":[160,192]}"#;
const HEAD: &[u8] = br#""lm_head.weight":{"dtype":"F32","shape":[5,8],"data_offsets":[2816,2976]}"#;

const HEADERS: &[Row] = &[
    ("header-cut", "llama", &[(br#"[2816,2976]}}"#, b"[2816")], "is not a JSON object of tensors"),
    ("header-list", "llama", &[(br#"{"model.embed_tokens"#, br#"["model.embed_tokens"#)], "is not a JSON object"),
    ("header-bytes", "llama", &[(br#"{"model.embed_tokens"#, b"{\"\xff\xfe")], "is not UTF-8 (byte 2)"),
    ("header-about", "llama", &[(br#"{"model.embed"#, br#"{"__metadata__":{"format":"pt"},"model.embed"#)], ""),
    ("entry-malformed", "llama", &[(br#""shape":[8]"#, br#""shape":8"#)], "its entry is malformed"),
    ("entry-negative", "llama", &[(br#""shape":[8]"#, br#""shape":[-8]"#)], "its entry is malformed"),
    ("entry-of-one-offset", "llama", &[(b"[160,192]", b"[160]")], "its entry is malformed"),
    ("entry-backwards", "llama", &[(b"[160,192]", b"[192,160]")], "it claims bytes 192..160"),
    ("entry-beyond", "llama", &[(b"[160,192]", b"[160,99999999]")], "is the copy complete?"),
    ("shape-overflows", "llama", &[(br#""shape":[8]"#, br#""shape":[18446744073709551615,2]"#)], "larger than any memory"),
    ("shape-not-filled", "llama", &[(br#""shape":[8]"#, br#""shape":[9]"#)], "does not fill its 32 bytes"),
    ("shape-of-nothing", "llama", &[(br#""shape":[8]"#, br#""shape":[]"#)], "does not fill its 32 bytes"),
    ("shape-other", "llama", &[(br#""shape":[8]"#, br#""shape":[2,4]"#)], "but config.json calls for"),
    ("dtype-other", "llama", &[(NORM, br#""model.norm.weight":{"dtype":"I8","shape":[8],"data_offsets":[160,168]}"#)], "is I8"),
    (
        "dtype-half",
        "llama",
        &[(NORM, br#""model.norm.weight":{"dtype":"BF16","shape":[8],"data_offsets":[160,176]}"#), (
            HEAD,
            br#""lm_head.weight":{"dtype":"F16","shape":[5,8],"data_offsets":[2816,2896]}"#,
        )],
        "",
    ),
    (
        "dtype-blocks",
        "llama",
        &[(HEAD, br#""lm_head.weight":{"dtype":"Q8_0","shape":[5,8],"data_offsets":[2816,2860]}"#)],
        "does not fill",
    ),
    ("tensor-none", "llama", &[(b"model.norm.weight", b"model.norm.w")], "lacks the tensor `model.norm.weight`"),
    ("tensor-left-over", "llama", &[(b"{\"model.embed", b"{\"model.x\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},\"model.embed")], "no part of a llama model uses it"),
    (
        "tensor-unneeded",
        "llama",
        &[(
            b"{\"model.embed",
            b"{\"model.layers.0.self_attn.rotary_emb.inv_freq\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},\"model.embed",
        )],
        "",
    ),
    ("head-tied", "llama", &[(CONFIG, br#"{"tie_word_embeddings":true,"architectures""#)], ""),
    ("head-none", "llama", &[(b"lm_head.weight", b"lm_head.inv.rotary_emb.inv_freq")], ""),
    ("head-none-untied", "qwen3", &[(br#"embeddings":true"#, br#"embeddings":false"#)], "lacks the tensor `lm_head.weight`"),
];

const BPE: &[u8] = br#"{"type":"BPE","vocab":{"a":0,"b":1,"ab":2,"c":3},"merges":[["a","b"]]}"#;
const NFC: &[u8] = br#""normalizer":{"type":"NFC"}"#;
/// Of the folder `qwen3`.
const CUT: &[u8] = br#""pre_tokenizer":null"#;
const AFTER: &[u8] = br#""post_processor":null"#;
const BACK: &[u8] = br#""decoder":null"#;

const WORDS: &[Row] = &[
    ("words-cut", "llama", &[(br#"{"version":"1.0","#, br#""version":"1.0","#)], "is not a usable tokenizer"),
    ("words-no-model", "llama", &[(br#""type":"BPE""#, br#""type":"none""#)], "is not a usable tokenizer"),
    ("words-level", "qwen3", &[(BPE, br#"{"type":"WordLevel","vocab":{"a":0,"[UNK]":1},"unk_token":"[UNK]"}"#)], ""),
    (
        "words-piece",
        "qwen3",
        &[(
            BPE,
            br###"{"type":"WordPiece","unk_token":"[UNK]","continuing_subword_prefix":"##","max_input_chars_per_word":9,"vocab":{"[UNK]":0,"a":1,"##b":2}}"###,
        )],
        "",
    ),
    ("words-unigram", "qwen3", &[(BPE, br#"{"type":"Unigram","unk_id":0,"vocab":[["<unk>",0.0],["a",-1.0]],"byte_fallback":false}"#)], ""),
    ("words-unigram-no-unknown", "qwen3", &[(BPE, br#"{"type":"Unigram","unk_id":9,"vocab":[["a",-1.0]]}"#)], "is not a usable tokenizer"),
    ("words-merges-as-text", "qwen3", &[(br#"["a","b"]"#, br#""a b""#)], ""),
    ("words-merges-of-nothing", "qwen3", &[(br#"["a","b"]"#, br#"["x","y"]"#)], "is not a usable tokenizer"),
    ("words-in-bytes", "qwen3", &[(br#"{"type":"BPE""#, br#"{"type":"BPE","byte_fallback":true,"unk_token":"a","fuse_unk":true"#)], ""),
    ("added-not-special", "qwen3", &[(br#""special":true"#, br#""special":false"#)], ""),
    ("added-strips", "qwen3", &[(br#""lstrip":false,"rstrip":false"#, br#""lstrip":true,"rstrip":true"#)], ""),
    ("added-normalized", "qwen3", &[(br#""single_word":false"#, br#""single_word":true"#), (br#""normalized":false"#, br#""normalized":true"#)], ""),
    ("added-twice", "qwen3", &[(br#""added_tokens":["#, br#""added_tokens":[{"id":5,"content":"<e>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},"#)], ""),
    ("normal-many", "qwen3", &[(NFC, br#""normalizer":{"type":"Sequence","normalizers":[{"type":"Lowercase"},{"type":"Strip","strip_left":true,"strip_right":true},{"type":"Prepend","prepend":"_"},{"type":"Replace","pattern":{"Regex":"\\s+"},"content":" "}]}"#)], ""),
    ("normal-bad-pattern", "qwen3", &[(NFC, br#""normalizer":{"type":"Replace","pattern":{"Regex":"("},"content":""}"#)], "is not a usable tokenizer"),
    ("cut-many", "qwen3", &[(CUT, br#""pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Whitespace"},{"type":"Digits","individual_digits":true},{"type":"Punctuation","behavior":"Isolated"}]}"#)], ""),
    ("cut-metaspace", "qwen3", &[(CUT, "\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"▁\",\"prepend_scheme\":\"always\",\"split\":true}".as_bytes())], ""),
    ("after-template", "qwen3", &[(AFTER, br#""post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<e>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{"<e>":{"id":"<e>","ids":[4],"tokens":["<e>"]}}}"#)], ""),
    ("after-template-of-nothing", "qwen3", &[(AFTER, br#""post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<x>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{}}"#)], ""),
    ("back-pieces", "qwen3", &[(BACK, "\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":{\"String\":\"▁\"},\"content\":\" \"},{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"},{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":0}]}".as_bytes())], ""),
    ("back-pieces-whole", "qwen3", &[(BACK, "\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":{\"String\":\"▁\"},\"content\":\" \"},{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"}]}".as_bytes())], ""),
    ("back-strips-more-than-there-is", "qwen3", &[(BACK, br#""decoder":{"type":"Strip","content":" ","start":9,"stop":9}"#)], ""),
    ("back-other", "qwen3", &[(BACK, br###""decoder":{"type":"WordPiece","prefix":"##","cleanup":true}"###)], ""),
    ("long-texts-cut", "qwen3", &[(br#"{"version":"1.0","#, br#"{"version":"1.0","truncation":{"direction":"Right","max_length":1,"strategy":"LongestFirst","stride":0},"padding":{"strategy":{"Fixed":9},"direction":"Left","pad_to_multiple_of":null,"pad_id":0,"pad_type_id":0,"pad_token":"a"},"#)], ""),
];

const SETTINGS: &[u8] = br#"{"bos_token":"a","eos_token":{"content":"<e>"},"add_bos_token":true}"#;
const TEMPLATE: &[u8] = b"{{ bos_token }}{% for m in messages %}{{ m.role | upper }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}";

const TEMPLATES: &[Row] = &[
    ("settings-cut", "llama", &[(SETTINGS, b"{")], "tokenizer_config.json is not a usable tokenizer"),
    (
        "begins-as-llama",
        "llama",
        &[(SETTINGS, br#"{"tokenizer_class":"LlamaTokenizerFast","bos_token":{"content":"a"},"add_bos_token":true}"#)],
        "",
    ),
    (
        "begins-with-nothing",
        "llama",
        &[(SETTINGS, br#"{"tokenizer_class":"LlamaTokenizer","bos_token":"<none>","add_bos_token":true}"#)],
        "",
    ),
    (
        "begins-with-no-text",
        "llama",
        &[(SETTINGS, br#"{"tokenizer_class":"LlamaTokenizer","bos_token":7,"add_bos_token":true}"#)],
        "",
    ),
    ("template-no-syntax", "llama", &[(TEMPLATE, b"{% for m in %}{% endfor %}")], "does not parse"),
    ("template-refuses", "llama", &[(TEMPLATE, b"{{ raise_exception('no') }}")], "refuses these messages: no"),
    ("template-fails", "llama", &[(TEMPLATE, b"{{ messages.x.y }}")], "the chat template failed"),
    ("template-bytes", "llama", &[(TEMPLATE, b"\xff\xfe")], "cannot read"),
    ("template-in-settings", "llama", &[(SETTINGS, br#"{"chat_template":"{{ messages }}"}"#), (TEMPLATE, b"")], ""),
    ("template-of-no-text", "llama", &[(SETTINGS, br#"{"chat_template":7}"#), (TEMPLATE, b"")], ""),
    (
        "template-first-of-many",
        "llama",
        &[(SETTINGS, br#"{"chat_template":[{"name":"x","template":"{{ messages }}"}]}"#), (TEMPLATE, b"")],
        "",
    ),
    ("template-of-none", "llama", &[(SETTINGS, br#"{"chat_template":[{"name":"default"}]}"#), (TEMPLATE, b"")], ""),
    (
        "template-helpers",
        "llama",
        &[(TEMPLATE, b"{{ strftime_now('%d %b') }}{{ messages | tojson(indent=1) }}{{ 'a b'.split()[0].upper() }}")],
        "",
    ),
];
