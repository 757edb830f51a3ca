//! Who wrote a line: the head that each engine's logger puts in front, taken off, so that a signature is looked for where a message
//! *begins*. What a client sent stands behind a head and a message of the request logger, never at a message's beginning.

/// The writer of a line, as its head shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writer<'a> {
    /// vLLM's logger, with the source file it names, without the folder.
    Vllm(&'a str),
    Sglang,
    TensorRtLlm,
    /// The launcher of Text Generation Inference.
    Tgi,
    /// PyTorch's C++ logger in `ProcessGroupNCCL.cpp`.
    Torch,
    /// llama.cpp's logger, with its time and level.
    LlamaCpp,
    /// The kernel's ring buffer.
    Kernel,
    /// The access log of uvicorn, which serves vLLM and SGLang. Its message is the request line in quotes and the answer's status. A client
    /// writes the path, which holds no blank, and may write the address before it (`X-Forwarded-For`): only a line of just these parts is one.
    Access,
    /// No head at all: a traceback, a C library, somebody's print.
    Bare,
}

/// So many processes may stand before a line: the server that takes a core's output, the core, its worker.
const PROCESSES_MAX: usize = 3;
const LEVELS: [&str; 5] = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"];

/// The writer and its message. A head that is not known is part of the message, which is then `Bare`.
pub fn split(line: &str) -> (Writer<'_>, &str) {
    if line.starts_with(char::is_whitespace) {
        return (Writer::Bare, line); // no writer indents its head; a cut date would pass for a whole one
    }
    let line = (0..PROCESSES_MAX).fold(line, |line, _| process(line));
    vllm(line)
        .or_else(|| access(line))
        .or_else(|| torch(line))
        .or_else(|| tensorrt_llm(line))
        .or_else(|| kernel(line))
        .or_else(|| sglang(line))
        .or_else(|| tgi(line))
        .or_else(|| llama_cpp(line))
        .unwrap_or((Writer::Bare, line))
}

/// `(EngineCore pid=6945) `, `(VllmWorker rank=0 pid=55723) `: vLLM puts the process before every line that its children print; some
/// releases do so at each level: `(EngineCore_0 pid=675221) (VllmWorker TP0 pid=675227) INFO …`.
fn process(line: &str) -> &str {
    let inside = line.strip_prefix('(').and_then(|rest| rest.split_once(") "));
    match inside {
        Some((name, rest)) if name.contains("pid=") && !name.contains(['(', '"', '\'']) => rest,
        _ => line,
    }
}

/// `INFO 11-21 01:04:30 [shm_broadcast.py:871] message`; before 0.9 the file had no opening bracket. At level DEBUG it has its folders:
/// `[v1/engine/core.py:936]`.
fn vllm(line: &str) -> Option<(Writer<'_>, &str)> {
    let (level, rest) = line.split_once(' ')?;
    if !LEVELS.contains(&level) {
        return None;
    }
    let rest = rest.trim_start();
    // recordings and some deployments leave the time out
    let rest = if is_date(rest.get(..14)?, "dd-dd dd:dd:dd") { rest.get(15..)? } else { rest };
    let rest = rest.strip_prefix('[').unwrap_or(rest);
    let (place, message) = rest.split_once("] ")?;
    let (path, number) = place.rsplit_once(':')?;
    let file = path.rsplit('/').next()?;
    let plain = file.ends_with(".py") && !path.contains([' ', '"', '\'']);
    (plain && number.bytes().all(|byte| byte.is_ascii_digit())).then_some((Writer::Vllm(file), message))
}

/// `INFO:     127.0.0.1:38344 - "POST /pause HTTP/1.1" 200 OK`; SGLang puts its date before it.
fn access(line: &str) -> Option<(Writer<'_>, &str)> {
    let line = sglang(line).map_or(line, |(_, message)| message);
    let (client, message) = line.strip_prefix("INFO:")?.trim_start().rsplit_once(" - ")?;
    let words: Vec<&str> = message.splitn(4, ' ').collect();
    let [method, path, version, status] = words.as_slice() else { return None };
    let answered = status.starts_with(|c: char| c.is_ascii_digit()) && !status.contains(['"', ':']);
    let request =
        method.starts_with('"') && path.starts_with('/') && version.starts_with("HTTP/") && version.ends_with('"');
    (request && answered && !client.contains([' ', '"'])).then_some((Writer::Access, message))
}

/// `[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] message`; older: `[E ProcessGroupNCCL.cpp:458] …`.
fn torch(line: &str) -> Option<(Writer<'_>, &str)> {
    let rest = match line.strip_prefix("[rank") {
        Some(rest) => rest.split_once("]:")?.1,
        None => line,
    };
    let (head, message) = rest.strip_prefix('[')?.split_once(']')?;
    let level = head.starts_with(['I', 'W', 'E', 'F']);
    if !level || !head.contains(" ProcessGroupNCCL.cpp:") {
        return None;
    }
    Some((Writer::Torch, groups(message.trim_start())))
}

/// `[01/17/2025-07:57:12] [TRT-LLM] [E] message`, with `[RANK n]` where there are several.
fn tensorrt_llm(line: &str) -> Option<(Writer<'_>, &str)> {
    let message = groups(line);
    let head = line.get(..line.len() - message.len())?;
    (head.contains("[TRT-LLM]") || head.contains("[TensorRT-LLM]")).then_some((Writer::TensorRtLlm, message))
}

/// `[ 1843.308145] NVRM: …` of dmesg, `Feb 14 05:03:41 host kernel: NVRM: …` of a syslog.
fn kernel(line: &str) -> Option<(Writer<'_>, &str)> {
    if let Some((uptime, message)) = line.strip_prefix('[').and_then(|rest| rest.split_once("] ")) {
        let is_uptime = !uptime.is_empty() && uptime.bytes().all(|b| b.is_ascii_digit() || b == b'.' || b == b' ');
        return is_uptime.then_some((Writer::Kernel, message));
    }
    let dated = |date: &str| {
        // an indented line has lost its month's first letter at least
        let month = date.get(..3).is_some_and(|month| month.bytes().all(|byte| byte.is_ascii_alphabetic()));
        month && is_date(date.get(3..).unwrap_or(""), " dd dd:dd:dd")
    };
    if !line.get(..15).is_some_and(dated) {
        return None;
    }
    let (host, message) = line.get(16..)?.split_once(" kernel: ")?;
    let message = message.strip_prefix('[').and_then(|rest| rest.split_once("] ")).map_or(message, |(_, rest)| rest);
    (!host.contains(' ')).then_some((Writer::Kernel, message))
}

/// `[2025-04-03 20:06:34 DP1 TP0] message`.
fn sglang(line: &str) -> Option<(Writer<'_>, &str)> {
    let (head, message) = line.strip_prefix('[')?.split_once("] ")?;
    let dated = is_date(head.get(..19)?, "dddd-dd-dd dd:dd:dd");
    dated.then_some((Writer::Sglang, message))
}

/// `2024-07-22T19:57:05.908774Z  INFO shard-manager: text_generation_launcher: message`. Lines of the router carry spans that hold
/// what clients sent and are not looked at.
fn tgi(line: &str) -> Option<(Writer<'_>, &str)> {
    if !is_date(line.get(..19)?, "dddd-dd-ddTdd:dd:dd") {
        return None;
    }
    let (_, rest) = line.split_once("Z ")?;
    let (level, rest) = rest.trim_start().split_once(' ')?;
    let rest = rest.strip_prefix("shard-manager: ").unwrap_or(rest);
    let message = rest.strip_prefix("text_generation_launcher: ")?;
    matches!(level, "INFO" | "WARN" | "ERROR").then_some((Writer::Tgi, message))
}

/// `53.26.801.941 E message`: minutes, seconds, milliseconds and microseconds since it began, and a level.
fn llama_cpp(line: &str) -> Option<(Writer<'_>, &str)> {
    let (time, rest) = line.split_once(' ')?;
    let (minutes, parts) = time.split_once('.')?;
    let timed =
        !minutes.is_empty() && minutes.bytes().all(|byte| byte.is_ascii_digit()) && is_date(parts, "dd.ddd.ddd");
    let (level, message) = rest.split_once(' ')?;
    (timed && matches!(level, "D" | "I" | "W" | "E")).then_some((Writer::LlamaCpp, message))
}

/// What follows leading `[…]` groups.
fn groups(mut text: &str) -> &str {
    while let Some((_, rest)) = text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        text = rest.trim_start();
    }
    text
}

/// Does `text` have this shape, where `d` is a digit (or a space that fills one)?
fn is_date(text: &str, shape: &str) -> bool {
    text.len() == shape.len()
        && text.bytes().zip(shape.bytes()).all(|(byte, shape)| match shape {
            b'd' => byte.is_ascii_digit() || byte == b' ',
            other => byte == other,
        })
}

/// A line without the colours that terminals are given; only copied where there are any.
pub fn plain(line: &str) -> std::borrow::Cow<'_, str> {
    if !line.contains('\u{1b}') {
        return line.into();
    }
    let mut text = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, after)) = rest.split_once('\u{1b}') {
        text.push_str(before);
        let sequence = after.strip_prefix('[').unwrap_or(after);
        let end = sequence.find(|c: char| c.is_ascii_alphabetic()).map_or(sequence.len(), |at| at + 1);
        rest = sequence.get(end..).unwrap_or("");
    }
    text.push_str(rest);
    text.into()
}
