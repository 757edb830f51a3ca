//! Command lines and environments without secrets, and the secrets themselves, to be struck out wherever else they appear. Pure.

use super::words::redact_words;

/// Words in a name that make its value a secret.
const SECRET_WORDS: [&str; 16] = [
    "key",
    "token",
    "secret",
    "secrets",
    "password",
    "passwd",
    "pass",
    "credential",
    "credentials",
    "auth",
    "authorization",
    "apikey",
    "bearer",
    "cookie",
    "header",
    "headers",
];
/// The same within a word.
const SECRET_PARTS: [&str; 5] = ["secret", "passw", "credential", "apikey", "authoriz"];
/// Flags whose tokens are words of a text.
const OPEN_FLAGS: [&str; 2] = ["--long-prefill-token-threshold", "--return-tokens-as-token-ids"];
/// How well-known secrets begin.
const SECRET_BEGINNINGS: [&str; 11] =
    ["hf_", "sk-", "sk_", "ghp_", "gho_", "github_pat_", "glpat-", "AKIA", "eyJ", "xox", "nvapi-"];
/// Variables that configure an engine: their values are evidence. Exact names, or beginnings that end in `_`.
const OPEN_NAMES: [&str; 26] = [
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MODULE_LOADING",
    "NVIDIA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTHONHASHSEED",
    "PYTHONUNBUFFERED",
    "PYTHONFAULTHANDLER",
    "TOKENIZERS_PARALLELISM",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "MASTER_PORT",
    "RUST_LOG",
    "TRUEBEAT_NONCE",
    "NCCL_",
    "VLLM_",
    "SGLANG_",
    "SGL_",
    "TORCH_",
];
/// Variables that say where and who, which a bundle may say too.
const PLACE_NAMES: [&str; 12] = [
    "HOSTNAME",
    "POD_NAME",
    "POD_NAMESPACE",
    "POD_UID",
    "NODE_NAME",
    "LANG",
    "LC_ALL",
    "TERM",
    "SHELL",
    "USER",
    "LOGNAME",
    "PATH",
];
/// Settings are short and plain; what is not is a text or a secret.
const OPEN_VALUE_MAX: usize = 40;
const WORD_MAX: usize = 256;
/// A secret shorter than this would strike out half of the bundle.
const SECRET_LEN_MIN: usize = 6;

/// The command line, secrets and scripts replaced.
pub fn redact_command(args: &[String]) -> Vec<String> {
    let (mut script_next, mut header_next) = (false, false);
    args.iter()
        .zip(are_secret_values(args))
        .map(|(arg, secret)| {
            let script = std::mem::replace(&mut script_next, takes_script(arg));
            let header = std::mem::replace(&mut header_next, arg == "-H");
            match (secret || header && !arg.starts_with("--"), script) {
                (true, _) => "[redacted]".to_owned(),
                (false, true) => shell_text(arg),
                (false, false) => word(arg),
            }
        })
        .collect()
}

/// For each argument, whether it is a value of a secret flag before it. Such a flag may take a list (vLLM's `--api-key`): its values end where
/// the next flag begins. The first may begin with a dash of its own.
fn are_secret_values(args: &[String]) -> Vec<bool> {
    let mut begins_like_a_flag = None;
    args.iter()
        .map(|arg| {
            let is_value = begins_like_a_flag.is_some_and(|dashes| !arg.starts_with::<&str>(dashes));
            let is_secret_flag = arg.starts_with('-') && !arg.contains('=') && is_secret_name(arg);
            begins_like_a_flag = if is_value { Some("-") } else { is_secret_flag.then_some("--") };
            is_value
        })
        .collect()
}

/// `NAME=VALUE` lines with their values hidden unless the name is known to configure an engine and the value is plain.
pub fn redact_environment(variables: &[String]) -> Vec<String> {
    let mut lines: Vec<String> = variables
        .iter()
        .filter_map(|variable| variable.split_once('='))
        .map(|(name, value)| {
            let name: String = name.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '_').take(80).collect();
            let open = is_open(&name) && is_plain(value);
            if open { format!("{name}={value}") } else { format!("{name}=[redacted {} chars]", value.chars().count()) }
        })
        .collect();
    lines.sort();
    lines
}

/// Values that are secret wherever they appear: of secret variables and flags, and of any variable that is no path or setting.
pub fn secrets(args: &[String], variables: &[String]) -> Vec<String> {
    let named = variables.iter().filter_map(|variable| variable.split_once('='));
    let mut found: Vec<String> = named
        .filter(|(name, value)| {
            is_secret_name(name) || !tells_a_place(name) && value.len() >= 12 && !value.starts_with('/')
        })
        .map(|(_, value)| value.to_owned())
        .collect();
    let values = args.iter().zip(are_secret_values(args)).filter(|(_, secret)| *secret);
    // a path behind the list is a model's, and would be missed in every stack
    let values = values.map(|(arg, _)| arg).filter(|arg| !arg.contains('/') || looks_secret(arg));
    found.extend(values.cloned());
    let joined = args.iter().filter_map(|arg| arg.split_once('='));
    found.extend(joined.filter(|(name, _)| is_secret_name(name)).map(|(_, value)| value.to_owned()));
    found.extend(args.iter().filter(|arg| looks_secret(arg)).cloned());
    found.retain(|secret| secret.len() >= SECRET_LEN_MIN && !secret.bytes().all(|byte| byte.is_ascii_digit()));
    once(found)
}

/// Each of them once, and a longer one before what may be a part of it. The processes of a tree share most of theirs.
pub fn once(mut secrets: Vec<String>) -> Vec<String> {
    secrets.sort_by(|one, other| other.len().cmp(&one.len()).then_with(|| one.cmp(other)));
    secrets.dedup();
    secrets
}

/// The text without these values.
pub fn strike_out(text: &str, secrets: &[String]) -> String {
    let mut text = std::borrow::Cow::Borrowed(text);
    for secret in secrets {
        if text.contains(secret.as_str()) {
            text = text.replace(secret.as_str(), "[redacted]").into();
        }
    }
    text.into_owned()
}

/// `-c`, `-lc`, `-e` of shells and interpreters: a whole program follows.
fn takes_script(arg: &str) -> bool {
    let letters = arg.strip_prefix('-').unwrap_or_default();
    let short = (1..=4).contains(&letters.len()) && letters.bytes().all(|byte| byte.is_ascii_lowercase());
    short && (letters.ends_with('c') || letters == "e")
}

/// One argument that is no script.
fn word(arg: &str) -> String {
    if let Some((name, value)) = arg.split_once('=').filter(|(name, _)| is_name(name)) {
        let shown = if is_secret_name(name) { "[redacted]".to_owned() } else { value_text(value) };
        return format!("{name}={shown}");
    }
    value_text(arg)
}

fn value_text(value: &str) -> String {
    if looks_secret(value) {
        return "[redacted]".to_owned();
    }
    let value = match value.split_once("://") {
        // user and password before the host, a token behind the question mark
        Some((scheme, rest)) => {
            let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
            let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
            // a password may hold a question mark
            format!("{scheme}://{}", if query.contains('@') { "[redacted]" } else { host })
        }
        // the same without a scheme; what is no pair (`model@revision`) hides nothing
        None => match value.rsplit_once('@') {
            Some((user, host)) if user.contains(':') => format!("[redacted]@{host}"),
            _ => value.to_owned(),
        },
    };
    let plain = |c: char| {
        c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '/' | ':' | ',' | '@' | '+' | '%' | '[' | ']')
    };
    if value.len() <= WORD_MAX && value.chars().all(plain) { value } else { shell_text(&value) }
}

/// A text that may hold anything: secrets by their place, then every word that is no engine's own.
fn shell_text(text: &str) -> String {
    let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
    let words = if words.len() > 1 { redact_command(&words) } else { words };
    redact_words(&words.into_iter().map(assigned).collect::<Vec<_>>().join(" "))
}

/// A word of a script without what it assigns: a short number is no word by which anybody would know a secret.
fn assigned(word: String) -> String {
    match word.split_once('=') {
        Some((name, _)) if is_secret_name(name) || is_variable(name) && !is_open(name) => format!("{name}=[redacted]"),
        _ => word,
    }
}

/// Could a shell assign to it?
fn is_variable(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 80
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

fn is_secret_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    if OPEN_FLAGS.contains(&name.replace('_', "-").as_str()) {
        return false;
    }
    name.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| SECRET_WORDS.contains(&word))
        || SECRET_PARTS.iter().any(|part| name.contains(part))
}

fn is_open(name: &str) -> bool {
    !is_secret_name(name)
        && OPEN_NAMES.iter().any(|open| if open.ends_with('_') { name.starts_with(open) } else { name == *open })
}

fn tells_a_place(name: &str) -> bool {
    is_open(name) || PLACE_NAMES.contains(&name) || name.starts_with("KUBERNETES_") || name.starts_with("TRUEBEAT_")
}

/// A number, a switch or a short list of them.
fn is_plain(value: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | ':' | ',' | '/');
    value.len() <= OPEN_VALUE_MAX && value.chars().all(plain) && !looks_secret(value) && redact_words(value) == value
}

/// Known beginnings, and long runs of mixed letters and digits such as keys are made of.
fn looks_secret(value: &str) -> bool {
    let begins = value.len() >= 12 && SECRET_BEGINNINGS.iter().any(|begin| value.starts_with(begin));
    let runs = value.split(|c: char| !c.is_ascii_alphanumeric());
    let mixed = |run: &str| {
        let digits = run.bytes().filter(u8::is_ascii_digit).count();
        run.len() >= 20 && digits >= 3 && digits < run.len()
    };
    begins || runs.into_iter().any(mixed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn tokens_of_a_text_are_no_secrets() {
        let args = ["--long-prefill-token-threshold", "2048", "--return-tokens-as-token-ids", "-tp", "8"];
        assert_eq!(redact_command(&args.map(str::to_owned)), args);
        let joined = ["--long_prefill_token_threshold=2048".to_owned()];
        assert_eq!(redact_command(&joined), joined);
    }

    #[test]
    fn secrets_on_the_command_line_are_hidden_and_flags_are_not() {
        let args =
            ["env", "HF_TOKEN=abc", "serve", "--api-key", "abc", "--max-num-batched-tokens", "512", "--ssl-key=abc"];
        let redacted = redact_command(&strings(&args)).join(" ");
        let expected =
            "env HF_TOKEN=[redacted] serve --api-key [redacted] --max-num-batched-tokens 512 --ssl-key=[redacted]";
        assert_eq!(redacted, expected);
        let list = redact_command(&strings(&["serve", "--api-key", "-one", "two", "three", "-q", "llama"])).join(" ");
        assert_eq!(list, "serve --api-key [redacted] [redacted] [redacted] -q llama", "vLLM takes a list");
        let kept = strings(&[
            "/usr/bin/vllm",
            "serve",
            "meta-llama/Llama-3.1-8B",
            "--model=/models/tiny",
            "--tp",
            "8",
            "http://h:1/v1",
            "org/model@revision",
        ]);
        assert_eq!(redact_command(&kept), kept);
    }

    #[test]
    fn what_many_processes_share_is_sought_once_and_the_longer_first() {
        let found = once(strings(&["abcdef", "zz-secret", "abcdef,ghijkl", "abcdef", "zz-secret"]));
        assert_eq!(found, strings(&["abcdef,ghijkl", "zz-secret", "abcdef"]));
        assert_eq!(strike_out("abcdef,ghijkl", &found), "[redacted]");
    }

    #[test]
    fn no_secret_survives_in_a_script_a_header_a_url_or_a_text() {
        for args in [
            &["sh", "-c", "export TOKEN=zqwombat; exec vllm serve --api-key zqwombat"][..],
            &["bash", "-lc", "zqwombat"],
            &["bash", "-ec", "echo zqwombat | login\nvllm serve 'zqwombat'"],
            &["python3", "-c", "key = 'zqwombat'"],
            &["curl", "-H", "x-own: zqwombat"],
            &["e", "--header=Cookie: zqwombat"],
            &["e", "--chat-template", "You are zqwombat, be kind"],
            &["e", "{\"system\":\"zqwombat\"}"],
            &["e", "--store=postgres://me:zqwombat@host/db?x=zqwombat"],
            &["e", "--store=redis://me:12?zqwombat@host/db"],
            &["e", "--cache", "admin:zqwombat@redis:6379"],
            &["env", "HTTP_PROXY=user:zqwombat@proxy:3128", "vllm"],
            &["e", "hf_zqwombat12345"],
            &["e", "zqwombat0123456789abcdef"],
            &["sh", "-c", "sh -c 'X_SECRET=zqwombat true'"],
        ] {
            let redacted = redact_command(&strings(args)).join(" ");
            assert!(!redacted.contains("zqwombat"), "{args:?}\n{redacted}");
        }
        for args in [
            &["docker", "run", "-e", "DB_PASSWORD=471147", "image"][..],
            &["sh", "-c", "PIN=471147"],
            &["sh", "-c", "PIN=471147 exec vllm serve"],
            &["e", "-c", "--password=471147"],
        ] {
            let redacted = redact_command(&strings(args)).join(" ");
            assert!(!redacted.contains("471147"), "{args:?}\n{redacted}");
        }
    }

    #[test]
    fn the_environment_shows_settings_and_nothing_else() {
        let lines = redact_environment(&strings(&[
            "VLLM_USE_V1=1",
            "NCCL_DEBUG=INFO",
            "CUDA_VISIBLE_DEVICES=0,1",
            "HF_TOKEN=zqwombat",
            "VLLM_API_KEY=1",
            "MY_NOTE=zqwombat",
            "VLLM_NOTE=zqwombat",
            "DATABASE_URL=postgres://a:b@c",
            "HOME=/root",
            "no equals sign",
        ]));
        let text = lines.join("\n");
        for shown in [
            "VLLM_USE_V1=1",
            "NCCL_DEBUG=INFO",
            "CUDA_VISIBLE_DEVICES=0,1",
            "MY_NOTE=[redacted 8 chars]",
            "VLLM_API_KEY=[redacted 1 chars]",
        ] {
            assert!(text.contains(shown), "{shown} is not in\n{text}");
        }
        assert!(!text.contains("zqwombat") && !text.contains("a:b@c") && !text.contains("/root"), "{text}");
    }

    #[test]
    fn a_secret_is_struck_out_wherever_it_appears() {
        let secrets = secrets(
            &strings(&["e", "--api-key", "zqwombat", "fourth-one", "--x-token=second-one", "--tp", "8"]),
            &strings(&[
                "HF_TOKEN=third-one",
                "NOTE=a long sentence of a user",
                "PATH=/bin:/usr/bin",
                "PIN_TOKEN=1234567",
            ]),
        );
        let struck =
            strike_out("zqwombat second-one third-one a long sentence of a user /bin:/usr/bin 1234567", &secrets);
        assert_eq!(struck, "[redacted] [redacted] [redacted] [redacted] /bin:/usr/bin 1234567");
        assert_eq!(strike_out("fourth-one", &secrets), "[redacted]", "of a list every value");
    }
}
