//! Engine flags that upstream knows to be bad: what an InferenceDeployment says, in which versions, what happens then, where upstream says so,
//! what to use instead. The entries are data ([`ENTRIES`]); what they mean stands here twice, as Rust ([`of`]) for who asks about an object and as
//! CEL ([`cel_variables`], [`KnownBad::cel`]) for the API server, which only warns. Both read one text and look for the same words in it.
//!
//! Nobody here knows the GPU or the model's architecture, and a tag may lie about the version: an entry is a hint, never a verdict.

mod table;

use std::fmt::Write as _;

use crate::inference_deployment::{Engine, EngineKind};

pub use table::ENTRIES;

/// So many characters of command and arguments are looked at; what CEL may cost is counted by them.
pub const TOLD_CHARS_MAX: usize = 32_768;
/// What stands between the words of a command line, of JSON in it, and of a shell's script.
const BLANKS: [&str; 16] = ["=", ",", ":", ";", "{", "}", "[", "]", "(", ")", "\"", "'", "\\", "\n", "\r", "\t"];
/// Halves each run of blanks; so often that one of 64 becomes a single one.
const HALVINGS: usize = 6;
/// What the operator appends for `engine.tensorParallel`.
const RANKS_FLAG: &str = "--tensor-parallel-size";

/// One entry.
#[derive(Debug, Clone, Copy)]
pub struct KnownBad {
    /// Names it in tests and in the documentation.
    pub name: &'static str,
    pub engine: EngineKind,
    pub versions: Versions,
    /// Of each of these groups one clue is there …
    pub when: &'static [&'static [Clue]],
    /// … and none of these.
    pub unless: &'static [Clue],
    /// What is told together, as a person would say it.
    pub flags: &'static str,
    pub happens: &'static str,
    pub instead: &'static str,
    /// Where upstream says so.
    pub issue: &'static str,
}

/// Up to four numbers, `0.10.1.1`.
pub type Version = [u16; 4];

/// The versions that an entry is about, by the image's tag. Where no version without the fault is known, a tag that names none counts as well.
#[derive(Debug, Clone, Copy)]
pub struct Versions {
    /// The first one; `None`: nobody knows of one before.
    pub from: Option<Version>,
    /// The first one that is none of them any more; `None`: upstream has mended it in no release that we know.
    pub before: Option<Version>,
}

/// Something that command, arguments or environment of an engine say. Words are compared without case, and `_` is `-`, as engines do.
#[derive(Debug, Clone, Copy)]
pub enum Clue {
    /// One of these flags; with values: followed by one of them.
    Flag(&'static [&'static str], &'static [&'static str]),
    /// One of these flags with a value that is not 1.
    Many(&'static [&'static str]),
    /// A key with one of these values, in a flag's JSON or behind its dot.
    Setting(&'static str, &'static [&'static str]),
    /// One of these somewhere: the name of a model, of a class.
    Word(&'static [&'static str]),
    /// An environment variable with one of these literal values.
    Env(&'static str, &'static [&'static str]),
}

/// What is known against this engine's flags.
pub fn of(engine: &Engine) -> Vec<&'static KnownBad> {
    let (told, release) = (told(engine), release(tag(&engine.image)));
    let is_there = |clue: &Clue| clue.is_there(&told, engine);
    let hit = |entry: &&KnownBad| {
        entry.engine == engine.kind
            && entry.versions.have(release)
            && entry.when.iter().all(|group| group.iter().any(is_there))
            && !entry.unless.iter().any(is_there)
    };
    ENTRIES.iter().filter(hit).collect()
}

/// Variables of the admission policy, in an order in which each knows those before it.
pub fn cel_variables() -> Vec<(&'static str, String)> {
    let list = |field: &str| {
        let path = format!("object.spec.engine.{field}");
        format!("has({path}) ? {path} : []")
    };
    let ranks = "has(object.spec.engine.tensorParallel)";
    let mut told = format!(
        "(' ' + (variables.line.size() > {TOLD_CHARS_MAX} ? variables.line.substring(0, {TOLD_CHARS_MAX}) : variables.line) + \
         ({ranks} ? ' {RANKS_FLAG} ' + string(object.spec.engine.tensorParallel) : '') + ' ').lowerAscii().replace('_', '-')"
    );
    for blank in BLANKS {
        _ = write!(told, ".replace({}, ' ')", quoted(blank));
    }
    told += &".replace('  ', ' ')".repeat(HALVINGS);
    let number = |place: usize, weight: u64| {
        let number = format!("int(variables.numbers[{place}])");
        let there = if weight == 1 { number } else { format!("{number} * {weight}") };
        format!("(variables.numbers.size() > {place} ? {there} : 0)")
    };
    let [major, minor, patch, last] = WEIGHTS;
    let numbers = [number(0, major), number(1, minor), number(2, patch), number(3, last)].join(" + ");
    vec![
        ("command", list("command")),
        ("args", list("args")),
        ("env", list("env")),
        ("line", "variables.command.join(' ') + ' ' + variables.args.join(' ')".to_owned()),
        ("told", told),
        (
            "image",
            "object.spec.engine.image.substring(object.spec.engine.image.lastIndexOf('/') + 1).split('@')[0].split(':')"
                .to_owned(),
        ),
        ("tag", "variables.image.size() > 1 ? variables.image[1] : ''".to_owned()),
        (
            "numbers",
            format!("variables.tag.matches('{TAG}') ? variables.tag.find('{NUMBERS}').split('.') : []"),
        ),
        ("release", format!("variables.numbers.size() == 0 ? -1 : {numbers}")),
    ]
}

/// A tag that names a version: `v0.23.0`, `0.5.13.post1-cu130`, `v0.11.0rc1`.
const TAG: &str = "^v?[0-9]{1,4}([.][0-9]{1,4}){1,3}([^0-9.].*|[.][^0-9].*)?$";
/// The version in it.
const NUMBERS: &str = "[0-9]{1,4}([.][0-9]{1,4}){1,3}";
/// What a version's numbers, of four digits at most, count for in the one number that it is compared by.
const WEIGHTS: [u64; 4] = [1_000_000_000_000, 100_000_000, 10_000, 1];

impl KnownBad {
    /// What to tell a person, in one line.
    pub fn words(&self) -> String {
        let KnownBad { flags, happens, instead, issue, .. } = self;
        format!("{flags} ({}): {happens}. Instead: {instead}. {issue}", self.versions_in_words())
    }

    /// `vLLM 0.22.0 to before 0.24.0`.
    pub fn versions_in_words(&self) -> String {
        let engine = match self.engine {
            EngineKind::Vllm => "vLLM",
            EngineKind::SGLang => "SGLang",
            EngineKind::Truebeat => "Truebeat",
            EngineKind::Custom => "any engine",
        };
        let Versions { from, before } = self.versions;
        match (from.map(in_words), before.map(in_words)) {
            (None, None) => engine.to_owned(),
            (Some(from), None) => format!("{engine} from {from}"),
            (None, Some(before)) => format!("{engine} before {before}"),
            (Some(from), Some(before)) => format!("{engine} {from} to before {before}"),
        }
    }

    /// A CEL expression over [`cel_variables`] that is true of every object that this is not known against.
    pub fn cel(&self) -> String {
        let kind = match self.engine {
            EngineKind::Truebeat => "Truebeat",
            EngineKind::Vllm => "VLLM",
            EngineKind::SGLang => "SGLang",
            EngineKind::Custom => "Custom",
        };
        let mut all = vec![format!("object.spec.engine.kind == '{kind}'")];
        all.extend(self.versions.cel());
        let any = |clues: &[Clue]| clues.iter().map(|clue| clue.cel()).collect::<Vec<_>>().join(" || ");
        all.extend(self.when.iter().map(|group| format!("({})", any(group))));
        if !self.unless.is_empty() {
            all.push(format!("!({})", any(self.unless)));
        }
        format!("!({})", all.join(" && "))
    }

    /// Every word that this looks for in the text.
    pub fn needles(&self) -> Vec<String> {
        let clues = self.when.iter().copied().flatten().chain(self.unless);
        clues.flat_map(|clue| [clue.needles(), clue.ones()].concat()).collect()
    }
}

impl Versions {
    /// Is this release one of them? `None`: the tag names none.
    fn have(&self, release: Option<Version>) -> bool {
        let Some(release) = release else { return self.before.is_none() };
        self.from.is_none_or(|from| release >= from) && self.before.is_none_or(|before| release < before)
    }

    fn cel(&self) -> Vec<String> {
        let number =
            |version: Version| version.iter().zip(WEIGHTS).map(|(n, weight)| u64::from(*n) * weight).sum::<u64>();
        let from = self.from.map_or(0, number);
        match (self.before.map(number), self.from) {
            (Some(before), _) => vec![format!("variables.release >= {from} && variables.release < {before}")],
            (None, Some(_)) => vec![format!("(variables.release < 0 || variables.release >= {from})")],
            (None, None) => Vec::new(),
        }
    }
}

impl Clue {
    fn is_there(&self, told: &str, engine: &Engine) -> bool {
        let any = |needles: Vec<String>| needles.iter().any(|needle| told.contains(needle.as_str()));
        match self {
            Clue::Env(name, values) => engine.env.iter().any(|variable| {
                let value = variable.value.as_deref();
                variable.name == *name && value.is_some_and(|value| values.contains(&value))
            }),
            _ => any(self.needles()) && !any(self.ones()),
        }
    }

    fn cel(&self) -> String {
        let any = |needles: Vec<String>| {
            let each = needles.iter().map(|needle| format!("variables.told.contains({})", quoted(needle)));
            each.collect::<Vec<_>>().join(" || ")
        };
        match self {
            Clue::Env(name, values) => {
                let values = values.iter().map(|value| quoted(value)).collect::<Vec<_>>().join(", ");
                format!("variables.env.exists(e, e.name == '{name}' && has(e.value) && e.value in [{values}])")
            }
            Clue::Many(_) => format!("(({}) && !({}))", any(self.needles()), any(self.ones())),
            _ => any(self.needles()),
        }
    }

    /// One of these is in the text, as [`told`] makes it, where the clue is.
    fn needles(&self) -> Vec<String> {
        match self {
            // a dot: `--speculative-config.method`
            Clue::Flag(names, []) => {
                names.iter().flat_map(|name| [format!(" {} ", plain(name)), format!(" {}.", plain(name))]).collect()
            }
            Clue::Flag(names, values) => pairs(" ", names, values),
            Clue::Many(names) => names.iter().map(|name| format!(" {} ", plain(name))).collect(),
            Clue::Setting(key, values) => pairs("", &[*key], values),
            Clue::Word(words) => words.iter().map(|word| plain(word)).collect(),
            Clue::Env(..) => Vec::new(),
        }
    }

    /// And none of these.
    fn ones(&self) -> Vec<String> {
        match self {
            Clue::Many(names) => pairs(" ", names, &["1"]),
            _ => Vec::new(),
        }
    }
}

fn pairs(before: &str, names: &[&str], values: &[&str]) -> Vec<String> {
    let pair = |name: &str, value: &str| format!("{before}{} {} ", plain(name), plain(value));
    names.iter().flat_map(|name| values.iter().map(move |value| pair(name, value))).collect()
}

/// Command and arguments as one line of words, with what the operator appends.
fn told(engine: &Engine) -> String {
    let line = format!("{} {}", engine.command.join(" "), engine.args.join(" "));
    let head: String = line.chars().take(TOLD_CHARS_MAX).collect();
    let ranks = engine.tensor_parallel.map(|ranks| format!(" {RANKS_FLAG} {ranks}")).unwrap_or_default();
    let mut told = plain(&format!(" {head}{ranks} "));
    for blank in BLANKS {
        told = told.replace(blank, " ");
    }
    for _ in 0..HALVINGS {
        told = told.replace("  ", " ");
    }
    told
}

fn plain(text: &str) -> String {
    text.to_ascii_lowercase().replace('_', "-")
}

/// What stands behind the colon of an image's last part; empty: nothing does.
fn tag(image: &str) -> &str {
    let file = image.rsplit('/').next().unwrap_or_default();
    file.split('@').next().unwrap_or_default().split(':').nth(1).unwrap_or_default()
}

/// The version that a tag names, by the rule of [`TAG`].
fn release(tag: &str) -> Option<Version> {
    let mut rest = tag.strip_prefix('v').unwrap_or(tag);
    let (mut version, mut count) = (Version::default(), 0);
    loop {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        *version.get_mut(count)? = rest[..digits].parse().ok().filter(|_| digits <= 4)?;
        (rest, count) = (&rest[digits..], count + 1);
        match rest.strip_prefix('.') {
            Some(more) if more.starts_with(|c: char| c.is_ascii_digit()) => rest = more,
            _ => break,
        }
    }
    // (a dot that nothing follows is no version's)
    (count > 1 && rest != "." && !rest.contains('\n')).then_some(version)
}

fn in_words(version: Version) -> String {
    let [major, minor, patch, last] = version;
    let last = if last == 0 { String::new() } else { format!(".{last}") };
    format!("{major}.{minor}.{patch}{last}")
}

/// A string of CEL.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("'");
    for c in text.chars() {
        match c {
            '\'' | '\\' => quoted.extend(['\\', c]),
            '\n' => quoted += "\\n",
            '\r' => quoted += "\\r",
            '\t' => quoted += "\\t",
            c => quoted.push(c),
        }
    }
    quoted.push('\'');
    quoted
}
