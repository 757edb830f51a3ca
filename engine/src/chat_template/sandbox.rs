//! Chat templates in processes of their own. A template is a program from the network, and what it asks of memory cannot be bounded
//! within this process: one `~` on a list of lists prints more than any machine holds, costs one step of fuel, and an allocation that
//! fails ends the process. So this program is started once more, with a limit on its memory and its time, and ends alone.

use std::io::{Error, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::alarm;
use serde_json::{Map, Value as Json};

use super::{ChatInput, ChatTemplate, ChatTemplateError, PROMPT_BYTES_MAX, Sources, describe};
use crate::waits::Patience;

/// The hidden argument that makes a process a renderer.
pub const RENDERER_FLAG: &str = "--renders-chats";
/// What a renderer may have beside its program: the longest body and prompt, each many times.
const MEMORY_BYTES_MAX: u64 = 512 << 20;
/// One rendering may take this long; published templates take milliseconds.
const RENDER_S_MAX: u32 = 10;
/// By then a renderer has answered, or its alarm has ended it.
const ANSWER_MAX: Duration = Duration::from_secs(RENDER_S_MAX as u64 + 5);
/// A chat over which a renderer ended is given to another one if it took no longer.
const AGAIN_MAX: Duration = Duration::from_secs(2);
/// A renderer that was killed is gone by then.
const END_MAX: Duration = Duration::from_millis(600);
/// Renderers that are kept for the next chats; more run only while they are needed.
const IDLE_MAX: usize = 2;
/// The longest request: a body of 32 MiB, written anew with every character escaped.
const REQUEST_BYTES_MAX: u64 = 256 << 20;
/// An answer is a prompt, or the words of an error cut to this.
const WORDS_MAX: usize = 4096;

/// The renderers of one template.
#[derive(Debug, Default)]
pub struct Sandbox {
    idle: Mutex<Vec<Renderer>>,
}

impl Sandbox {
    /// A renderer that has compiled the templates, which are of `path`: constants are computed as they are compiled, and that is no less than
    /// to render them.
    ///
    /// # Errors
    /// [`ChatTemplateError::Syntax`], [`ChatTemplateError::Renderer`].
    pub fn new(sources: &Sources, path: PathBuf) -> Result<Self, ChatTemplateError> {
        match Renderer::start(sources) {
            Ok(renderer) => Ok(Self { idle: Mutex::new(vec![renderer]) }),
            Err(ChatTemplateError::Render(reason)) => Err(ChatTemplateError::Syntax { path, reason }),
            Err(other) => Err(other),
        }
    }

    /// The prompt, from a renderer of its own. One that ends over it, or is late, takes nobody else's with it.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn render(&self, sources: &Sources, input: ChatInput<'_>) -> Result<String, ChatTemplateError> {
        let unfit = |error| ChatTemplateError::Render(format!("the chat cannot be sent: {error}"));
        let ChatInput { messages, tools, add_generation_prompt, extra, now } = input;
        let request = (messages, tools, add_generation_prompt, extra, now.to_string());
        let request = serde_json::to_vec(&request).map_err(unfit)?;
        if let Some(mut renderer) = self.take() {
            let asked = Instant::now();
            match renderer.ask(&request) {
                Ok(answer) => {
                    self.keep(renderer);
                    return answer;
                }
                // one that had served before may have ended for reasons of its own: the kernel takes it first where memory is short
                Err(_) if asked.elapsed() < AGAIN_MAX => (),
                Err(error) => return Err(no_answer(error)),
            }
        }
        let mut renderer = Renderer::start(sources)?;
        let answer = renderer.ask(&request).map_err(no_answer)?;
        self.keep(renderer);
        answer
    }

    /// A renderer that has nothing to do, if there is one. Nobody waits for the lock: who does not get it starts another.
    fn take(&self) -> Option<Renderer> {
        let mut idle = self.idle.try_lock().ok()?;
        while let Some(mut renderer) = idle.pop() {
            if matches!(renderer.child.try_wait(), Ok(None)) {
                return Some(renderer);
            }
        }
        None
    }

    fn keep(&self, renderer: Renderer) {
        if let Ok(mut idle) = self.idle.try_lock()
            && idle.len() < IDLE_MAX
        {
            idle.push(renderer);
        }
    }
}

/// A renderer and the way to it.
#[derive(Debug)]
struct Renderer {
    child: Child,
    stream: UnixStream,
}

impl Renderer {
    /// One that has compiled the templates.
    fn start(sources: &Sources) -> Result<Self, ChatTemplateError> {
        let sources = serde_json::to_vec(sources).map_err(|error| ChatTemplateError::Render(error.to_string()))?;
        let mut renderer = Self::spawn().map_err(ChatTemplateError::Renderer)?;
        renderer.ask(&sources).map_err(no_answer)??;
        Ok(renderer)
    }

    /// Starts this program once more, with its own words and one more.
    fn spawn() -> std::io::Result<Self> {
        let (mine, its) = UnixStream::pair()?;
        let mut command = Command::new("/proc/self/exe");
        command.args(std::env::args_os().skip(1)).arg(RENDERER_FLAG);
        // a Ctrl-C at the terminal is for the engine, whose end is the renderer's
        command.stdin(Stdio::from(OwnedFd::from(its))).stdout(Stdio::null()).process_group(0);
        mine.set_write_timeout(Some(ANSWER_MAX))?;
        Ok(Self { child: command.spawn()?, stream: mine })
    }

    /// What it answers, if it does.
    fn ask(&mut self, request: &[u8]) -> std::io::Result<Result<String, ChatTemplateError>> {
        write_frame(&mut self.stream, request)?;
        let mut stream = Timed { stream: &self.stream, until: Instant::now() + ANSWER_MAX };
        let answer = read_frame(&mut stream, PROMPT_BYTES_MAX as u64 + 1)?.ok_or(ErrorKind::UnexpectedEof)?;
        let (kind, text) = answer.split_first().ok_or(ErrorKind::InvalidData)?;
        let text = String::from_utf8(text.to_vec()).map_err(|_| ErrorKind::InvalidData)?;
        Ok(match *kind {
            Answer::PROMPT => Ok(text),
            Answer::REFUSED => Err(ChatTemplateError::Refused(text)),
            _ => Err(ChatTemplateError::Render(text)),
        })
    }
}

/// A renderer that ends does so by a signal, and cannot say why.
fn no_answer(error: Error) -> ChatTemplateError {
    let mib = MEMORY_BYTES_MAX >> 20;
    ChatTemplateError::Render(format!(
        "its renderer gave no answer ({error}): it asked for more than {mib} MiB of memory, or took longer than \
         {RENDER_S_MAX} s"
    ))
}

impl Drop for Renderer {
    fn drop(&mut self) {
        drop(self.child.kill());
        let mut patience = Patience::new(Some(END_MAX));
        while matches!(self.child.try_wait(), Ok(None)) && patience.turn() {}
    }
}

/// Reads until a time, however small the pieces.
struct Timed<'a> {
    stream: &'a UnixStream,
    until: Instant,
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        // a time of zero would be none
        self.stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        self.stream.read(bytes)
    }
}

/// What the first byte of an answer says.
struct Answer;

impl Answer {
    const PROMPT: u8 = 0;
    const REFUSED: u8 = 1;
    const FAILED: u8 = 2;
}

/// The work of a renderer: a template comes on its standard input, then a chat at a time, until the engine has ended.
///
/// # Errors
/// The engine at the other end said something else, or the limits cannot be set.
pub fn serve() -> std::io::Result<()> {
    let mut engine = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    confine()?;
    let Some(sources) = read_frame(&mut engine, REQUEST_BYTES_MAX)? else { return Ok(()) };
    let sources: Sources = serde_json::from_slice(&sources)?;
    let compiled =
        timed(|| ChatTemplate::compile(sources).map_err(|error| ChatTemplateError::Render(describe(&error))));
    let (template, told) = match compiled {
        Ok(template) => (Some(template), Ok(String::new())),
        Err(error) => (None, Err(error)),
    };
    write_frame(&mut engine, &answer(told))?;
    let Some(template) = template else { return Ok(()) };
    while let Some(request) = read_frame(&mut engine, REQUEST_BYTES_MAX)? {
        write_frame(&mut engine, &answer(timed(|| rendered(&template, &request))))?;
    }
    Ok(())
}

/// What takes longer ends this process: nobody catches the signal.
fn timed<T>(work: impl FnOnce() -> T) -> T {
    alarm::set(RENDER_S_MAX);
    let done = work();
    alarm::cancel();
    done
}

/// Before a byte of the template is here: as much memory as the program has by now and [`MEMORY_BYTES_MAX`] more, no core file, and
/// where the machine has no memory left, this process is the one to end.
fn confine() -> std::io::Result<()> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let has = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix(" kB")?.parse().ok());
    let has: u64 = has.ok_or(ErrorKind::InvalidData)?;
    let limit = (has << 10) + MEMORY_BYTES_MAX;
    setrlimit(Resource::RLIMIT_AS, limit, limit)?;
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    // not everywhere may a process say so, and the limit holds without
    drop(std::fs::write("/proc/self/oom_score_adj", "1000"));
    Ok(())
}

fn answer(told: Result<String, ChatTemplateError>) -> Vec<u8> {
    let (kind, text) = match told {
        Ok(prompt) => (Answer::PROMPT, prompt),
        Err(ChatTemplateError::Refused(message)) => (Answer::REFUSED, cut(message)),
        Err(ChatTemplateError::Render(message)) => (Answer::FAILED, cut(message)),
        Err(other) => (Answer::FAILED, cut(other.to_string())),
    };
    [&[kind], text.as_bytes()].concat()
}

fn rendered(template: &ChatTemplate, request: &[u8]) -> Result<String, ChatTemplateError> {
    type Request = (Json, Option<Json>, bool, Option<Map<String, Json>>, String);
    let unreadable = |error: &dyn std::fmt::Display| ChatTemplateError::Render(format!("an unreadable chat: {error}"));
    let request: Request = serde_json::from_slice(request).map_err(|error| unreadable(&error))?;
    let (messages, tools, add_generation_prompt, extra, now) = &request;
    let now = now.parse().map_err(|error: jiff::Error| unreadable(&error))?;
    let (tools, extra) = (tools.as_ref(), extra.as_ref());
    template.render(ChatInput { messages, tools, add_generation_prompt: *add_generation_prompt, extra, now })
}

fn cut(mut words: String) -> String {
    words.truncate(words.floor_char_boundary(WORDS_MAX));
    words
}

/// A length of eight bytes, then as many bytes.
fn write_frame(stream: &mut UnixStream, bytes: &[u8]) -> std::io::Result<()> {
    stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
    stream.write_all(bytes)
}

/// The next frame; `None` where the other end is closed.
fn read_frame(stream: &mut impl Read, bytes_max: u64) -> std::io::Result<Option<Vec<u8>>> {
    let mut len = [0; 8];
    match stream.read_exact(&mut len) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let len = u64::from_le_bytes(len);
    if len > bytes_max {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut bytes = Vec::new();
    if stream.take(len).read_to_end(&mut bytes)? as u64 == len {
        return Ok(Some(bytes));
    }
    Err(ErrorKind::UnexpectedEof.into())
}
