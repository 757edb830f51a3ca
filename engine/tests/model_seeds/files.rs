//! GGUF files: the head's own structure, the keys of the configuration, places of tensors, and the two kinds of vocabulary.

use engine::weights::gguf::Builder;

use super::Made;

/// Numbers of a value's types.
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const TEXT: u32 = 8;
const LIST: u32 = 9;

/// A file in the making.
struct File {
    pairs: Vec<(String, u32, Vec<u8>)>,
    /// Name, sizes with the innermost first, type and bytes.
    tensors: Vec<(String, Vec<u64>, u32, usize)>,
}

impl File {
    /// A model of one layer, whole, of this architecture.
    fn of(arch: &str) -> Self {
        let mut file = Self { pairs: Vec::new(), tensors: Vec::new() }.text("general.architecture", arch);
        let sizes = [
            ("embedding_length", 8),
            ("feed_forward_length", 16),
            ("block_count", 1),
            ("attention.head_count", 2),
            ("context_length", 64),
            ("attention.key_length", 4),
        ];
        for (key, size) in sizes {
            file = file.u32(&format!("{arch}.{key}"), size);
        }
        let square = ["attn_q", "attn_k", "attn_v", "attn_output"].map(|part| (part, vec![8, 8]));
        let mlp = [("ffn_gate", vec![8, 16]), ("ffn_up", vec![8, 16]), ("ffn_down", vec![16, 8])];
        let norms = [("attn_norm", vec![8]), ("ffn_norm", vec![8])];
        file = file.tensor("token_embd.weight", &[8, 6]).tensor("output_norm.weight", &[8]);
        for (part, dims) in square.into_iter().chain(mlp).chain(norms) {
            file = file.tensor(&format!("blk.0.{part}.weight"), &dims);
        }
        if arch == "qwen3" {
            file = file.tensor("blk.0.attn_q_norm.weight", &[4]).tensor("blk.0.attn_k_norm.weight", &[4]);
        }
        file.words("gpt2", &["<|end|>", "a", "b", "ab", "Ġ", "c"]).text("tokenizer.ggml.pre", "qwen2").pair(
            "tokenizer.ggml.merges",
            LIST,
            &texts(&["a b"]),
        )
    }

    /// A vocabulary.
    fn words(self, model: &str, words: &[&str]) -> Self {
        self.text("tokenizer.ggml.model", model).pair("tokenizer.ggml.tokens", LIST, &texts(words))
    }

    /// The vocabulary of a SentencePiece model: its tokens, with a score each.
    fn pieces(self, words: &[&str], scores: &[f32]) -> Self {
        let scores = scores.iter().map(|score| score.to_le_bytes().to_vec()).collect();
        self.words("llama", words).pair("tokenizer.ggml.scores", LIST, &list(F32, scores))
    }

    /// A key's value, new or instead of its old one.
    fn pair(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        match self.pairs.iter_mut().find(|(old, ..)| old == key) {
            Some(old) => (old.1, old.2) = (kind, value.to_vec()),
            None => self.pairs.push((key.to_owned(), kind, value.to_vec())),
        }
        self
    }

    fn text(self, key: &str, value: &str) -> Self {
        self.pair(key, TEXT, &text(value))
    }

    fn u32(self, key: &str, value: u32) -> Self {
        self.pair(key, U32, &value.to_le_bytes())
    }

    fn f32(self, key: &str, value: f32) -> Self {
        self.pair(key, F32, &value.to_le_bytes())
    }

    /// A key of the qwen3 family.
    fn qwen3(self, key: &str, value: u32) -> Self {
        self.u32(&format!("qwen3.{key}"), value)
    }

    fn without(mut self, key: &str) -> Self {
        self.pairs.retain(|(old, ..)| old != key);
        self.tensors.retain(|(old, ..)| old != key);
        self
    }

    /// A tensor of zeros in f32.
    fn tensor(self, name: &str, dims: &[u64]) -> Self {
        let bytes = dims.iter().product::<u64>() as usize * 4;
        self.odd(name, dims, 0, bytes)
    }

    /// A tensor of any type and length, new or instead of an old one.
    fn odd(mut self, name: &str, dims: &[u64], kind: u32, bytes: usize) -> Self {
        match self.tensors.iter_mut().find(|(old, ..)| old == name) {
            Some(old) => (old.1, old.2, old.3) = (dims.to_vec(), kind, bytes),
            None => self.tensors.push((name.to_owned(), dims.to_vec(), kind, bytes)),
        }
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let all = self.pairs.iter().fold(Builder::default(), |all, (key, kind, value)| all.pair(key, *kind, value));
        let tensors = self.tensors.iter();
        tensors.fold(all, |all, (name, dims, kind, bytes)| all.tensor(name, dims, *kind, &vec![0; *bytes])).build()
    }
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn list(kind: u32, items: Vec<Vec<u8>>) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &(items.len() as u64).to_le_bytes(), &items.concat()].concat()
}

fn texts(texts: &[&str]) -> Vec<u8> {
    list(TEXT, texts.iter().map(|one| text(one)).collect())
}

/// A list that claims so many elements, of which none are there.
fn claims(kind: u32, count: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat()
}

/// Every input.
pub fn all() -> Vec<Made> {
    let files = keys().into_iter().chain(tensors()).chain(vocabularies());
    let files = files.map(|(name, file, says)| Made { name, bytes: file.bytes(), says });
    files.chain(heads().into_iter().map(|(name, bytes, says)| Made { name, bytes, says })).collect()
}

type Named = (&'static str, File, &'static str);

/// What is wrong before any key is read, or with a key's bytes.
fn heads() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let short = File { pairs: Vec::new(), tensors: Vec::new() }.text("general.architecture", "qwen3");
    let patched = |at: usize, with: &[u8]| {
        let mut bytes = short.bytes();
        bytes[at..at + with.len()].copy_from_slice(with);
        bytes
    };
    let with = |kind: u32, value: &[u8]| {
        File { pairs: Vec::new(), tensors: Vec::new() }.pair("general.x", kind, value).bytes()
    };
    let deep = |depth: usize| (0..depth).fold(list(U32, vec![]), |inner, _| list(LIST, vec![inner]));
    let mut dims = File::of("qwen3").bytes();
    let (place, name) = (b"token_embd.weight".len(), b"token_embd.weight");
    let at = dims.windows(place).position(|window| window == name).unwrap() + place;
    dims[at] = 5;
    vec![
        ("empty", Vec::new(), "it should have 4 more"),
        ("magic", patched(0, b"GGML"), "does not begin with `GGUF`"),
        ("version", patched(4, &1u32.to_le_bytes()), "it is of version 1"),
        ("tensors-claimed", patched(8, &u64::MAX.to_le_bytes()), "entries, but has"),
        ("pairs-claimed", patched(16, &(1u64 << 40).to_le_bytes()), "entries, but has"),
        ("key-claimed", patched(24, &(1u64 << 40).to_le_bytes()), "entries, but has"),
        ("kind", with(13, &[0; 8]), "of type 13"),
        ("list-of-no-kind", with(LIST, &list(99, vec![vec![0]])), "of type 99"),
        ("list-claimed", with(LIST, &claims(0, 1 << 22)), "entries, but has"),
        ("list-of-millions", with(LIST, &claims(0, 1 << 40)), "more than can be read"),
        ("lists-too-deep", with(LIST, &deep(5)), "more than can be read"),
        ("dimensions", dims, "has 5 dimensions"),
    ]
}

/// Metadata of the configuration.
fn keys() -> Vec<Named> {
    let qwen3 = || File::of("qwen3");
    let float = |value: f64| value.to_le_bytes();
    let all_kinds = qwen3()
        .pair("x.u8", 0, &[1])
        .pair("x.i8", 1, &[255])
        .pair("x.u16", 2, &[1, 0])
        .pair("x.i16", 3, &[255, 255])
        .pair("x.i32", I32, &(-1i32).to_le_bytes())
        .pair("x.bool", BOOL, &[1])
        .pair("x.lists", LIST, &list(LIST, vec![list(BOOL, vec![vec![0], vec![1]])]))
        .pair("x.u64", 10, &1u64.to_le_bytes())
        .pair("x.i64", 11, &(-1i64).to_le_bytes())
        .pair("x.f64", 12, &float(0.5));
    let yarn = qwen3()
        .text("qwen3.rope.scaling.type", "yarn")
        .f32("qwen3.rope.scaling.factor", 4.0)
        .f32("qwen3.rope.scaling.yarn_beta_fast", 32.0)
        .f32("qwen3.rope.scaling.yarn_beta_slow", 1.0)
        .qwen3("rope.scaling.original_context_length", 32);
    let windowed = File::of("llama").u32("llama.attention.sliding_window", 8);
    let ends = qwen3()
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 0)
        .u32("tokenizer.ggml.eot_token_id", 0)
        .pair("tokenizer.ggml.eom_token_id", I32, &(-1i32).to_le_bytes());
    vec![
        ("all-kinds", all_kinds, ""),
        ("llama", File::of("llama"), ""),
        ("llama-window", windowed, ""),
        ("qwen2-without-biases", File::of("qwen2"), "q_proj.bias"),
        ("moe-without-experts", File::of("qwen3moe").u32("qwen3moe.expert_count", 2), "num_experts_per_tok"),
        ("arch", qwen3().text("general.architecture", "gpt2"), "`general.architecture`"),
        ("arch-none", qwen3().without("general.architecture"), "`general.architecture`"),
        ("arch-no-text", qwen3().u32("general.architecture", 1), "`general.architecture`"),
        ("size-none", qwen3().without("qwen3.block_count"), "is not a model configuration"),
        ("size-zero", qwen3().qwen3("embedding_length", 0), "`hidden_size` is 0"),
        ("size-huge", qwen3().qwen3("feed_forward_length", u32::MAX), "`intermediate_size`"),
        ("scale-linear", qwen3().f32("qwen3.rope.scale_linear", 2.0), "rope.scale_linear"),
        ("scale-linear-one", qwen3().f32("qwen3.rope.scale_linear", 1.0), ""),
        ("scale-no-number", qwen3().text("qwen3.rope.scaling.attn_factor", "x"), "rope.scaling.attn_factor"),
        ("rotated-part", qwen3().qwen3("rope.dimension_count", 2), "rope.dimension_count"),
        ("rotated-whole", qwen3().qwen3("rope.dimension_count", 4), ""),
        ("rope-yarn", yarn, ""),
        ("rope-none", qwen3().text("qwen3.rope.scaling.type", "none"), ""),
        ("rope-linear-bare", qwen3().text("qwen3.rope.scaling.type", "linear"), "`factor`"),
        ("rope-other", qwen3().text("qwen3.rope.scaling.type", "longrope"), "`rope_type` is longrope"),
        ("rope-base-not-finite", qwen3().f32("qwen3.rope.freq_base", f32::NAN), ""),
        ("ends", ends, ""),
        ("aligned-to-3", qwen3().u32("general.alignment", 3), "`general.alignment`"),
        ("aligned-to-text", qwen3().text("general.alignment", "32"), "`general.alignment`"),
        ("aligned-to-16", qwen3().u32("general.alignment", 16), ""),
    ]
}

/// Places and names of tensors.
fn tensors() -> Vec<Named> {
    let qwen3 = || File::of("qwen3");
    let (down, norm) = ("blk.0.ffn_down.weight", "output_norm.weight");
    vec![
        ("shape-overflows", qwen3().odd(norm, &[u64::MAX, 2], 0, 0), "larger than any memory"),
        ("blocks-not-whole", qwen3().odd(down, &[16, 8], 8, 136), "no whole blocks of Q8_0"),
        ("bytes-not-there", qwen3().odd("x", &[1 << 20], 0, 0), "is the copy complete?"),
        ("type-unknown", qwen3().odd(norm, &[8], 2, 32), "is ggml type 2"),
        ("type-half", qwen3().odd(norm, &[8], 1, 16).odd(down, &[16, 8], 30, 256), ""),
        ("shape-other", qwen3().tensor(norm, &[4]), "but config.json calls for"),
        ("tensor-none", qwen3().without(down), "lacks the tensor"),
        ("embedding-none", qwen3().without("token_embd.weight"), "is not a model configuration"),
        ("head-own", qwen3().tensor("output.weight", &[8, 6]), ""),
        ("left-over", qwen3().tensor("blk.0.attn_sinks.weight", &[2]), "no part of a qwen3 model uses it"),
        ("left-over-bare", qwen3().tensor("bare", &[2]), "no part of a qwen3 model uses it"),
        ("left-over-outside", qwen3().tensor("blk.weight", &[2]), "no part of a qwen3 model uses it"),
        ("experts-stacked", qwen3().tensor("blk.0.ffn_up_exps.weight", &[8, 4, 2]), "no part of a qwen3 model"),
        ("experts-flat", qwen3().tensor("blk.0.ffn_up_exps.weight", &[8, 4]), ""),
        ("experts-none", qwen3().tensor("blk.0.ffn_up_exps.weight", &[8, 4, 0]), ""),
        ("heads-do-not-divide", File::of("llama").u32("llama.attention.head_count", 3), "q_proj"),
    ]
}

/// Tokenizers and templates.
fn vocabularies() -> Vec<Named> {
    let qwen3 = || File::of("qwen3");
    let words = ["<unk>", "a", "b", "ab", "▁", "<0x0A>"];
    let kinds = |kinds: [i32; 6]| list(I32, kinds.map(|kind| kind.to_le_bytes().to_vec()).to_vec());
    let scores = [0.0, -1.0, -2.0, -3.0, -4.0, 0.0];
    let pieces = || qwen3().pieces(&words, &scores).pair("tokenizer.ggml.token_type", LIST, &kinds([2, 1, 1, 1, 1, 6]));
    let long = "a".repeat(1025);
    let pre = |pre: &str| qwen3().text("tokenizer.ggml.pre", pre);
    let template = |text: &str| qwen3().text("tokenizer.chat_template", text);
    let begins = || pieces().u32("tokenizer.ggml.bos_token_id", 1);
    vec![
        ("words-none", qwen3().without("tokenizer.ggml.model"), "its tokenizer is `none`"),
        ("words-other", qwen3().text("tokenizer.ggml.model", "bert"), "its tokenizer is `bert`"),
        ("tokens-none", qwen3().without("tokenizer.ggml.tokens"), "no list `tokenizer.ggml.tokens`"),
        ("tokens-no-texts", qwen3().pair("tokenizer.ggml.tokens", LIST, &kinds([1; 6])), "something else than texts"),
        ("merges-none", qwen3().without("tokenizer.ggml.merges"), "no list `tokenizer.ggml.merges`"),
        ("merges-of-nothing", qwen3().pair("tokenizer.ggml.merges", LIST, &texts(&["x y"])), "not a usable tokenizer"),
        ("merges-of-one", qwen3().pair("tokenizer.ggml.merges", LIST, &texts(&["ab"])), "not a usable tokenizer"),
        ("kinds", qwen3().pair("tokenizer.ggml.token_type", LIST, &kinds([3, 1, 1, 4, -1, 1])), ""),
        ("cut-as-llama", pre("llama-bpe").u32("tokenizer.ggml.bos_token_id", 1), ""),
        ("cut-as-qwen35", pre("qwen35"), ""),
        ("cut-as-gpt-2", pre("gpt-2"), ""),
        ("cut-as-nobody-knows", pre("tekken"), "the `tekken` way"),
        ("pieces", pieces(), ""),
        ("pieces-begin", begins().pair("tokenizer.ggml.add_bos_token", BOOL, &[1]), ""),
        ("pieces-do-not-begin", begins().pair("tokenizer.ggml.add_bos_token", BOOL, &[0]), ""),
        ("pieces-without-blank", pieces().pair("tokenizer.ggml.add_space_prefix", BOOL, &[0]), ""),
        ("scores-none", pieces().without("tokenizer.ggml.scores"), "no list `tokenizer.ggml.scores`"),
        ("scores-few", pieces().pieces(&words, &scores[1..]), "no number for every token"),
        ("scores-no-numbers", pieces().pair("tokenizer.ggml.scores", LIST, &texts(&words)), "no number for every"),
        ("piece-too-long", qwen3().pieces(&[&long], &[0.0]), "has 1025 bytes"),
        ("template", template("{{ bos_token }}{{ messages[0].content }}"), ""),
        ("template-of-tools", template("{{ 1 }}").text("tokenizer.chat_template.tool_use", "{{ tools | tojson }}"), ""),
        ("template-no-syntax", template("{% if %}"), "does not parse"),
        ("template-refuses", template("{{ raise_exception('no') }}"), "refuses these messages: no"),
        ("template-fails", template("{{ messages.x.y }}"), "the chat template failed"),
    ]
}
