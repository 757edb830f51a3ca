//! Short commands of the machine (`ip`, `openssl`, `kubectl`, `ctr`): run to their end, with their own words in the error.

use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Runs `program` with `args`, gives its standard output.
///
/// # Errors
/// When it cannot be started or does not end with 0; its standard error is part of the message.
pub fn run(program: &str, args: &[&str]) -> Result<String> {
    run_with(Command::new(program).args(args), None)
}

/// Runs a prepared command, `input` (if any) on its standard input.
///
/// # Errors
/// As [`run`].
pub fn run_with(command: &mut Command, input: Option<&str>) -> Result<String> {
    let shown = show(command);
    let stdin = if input.is_some() { Stdio::piped() } else { Stdio::null() };
    let mut child = command
        .stdin(stdin)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{shown}`"))?;
    if let (Some(input), Some(mut pipe)) = (input, child.stdin.take()) {
        // a command that ends early closes its pipe; its exit status tells the story better than EPIPE
        let _ = pipe.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().with_context(|| format!("cannot wait for `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Is there such a program in PATH (or in the system folders that a plain user's PATH leaves out)?
pub fn exists(program: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default();
    path.split(':').chain(["/usr/sbin", "/sbin"]).any(|dir| std::path::Path::new(dir).join(program).is_file())
}

fn show(command: &Command) -> String {
    let words: Vec<_> =
        std::iter::once(command.get_program()).chain(command.get_args()).map(|word| word.to_string_lossy()).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_command_says_its_own_words() {
        let error = run("sh", &["-c", "echo broken pump >&2; exit 3"]).unwrap_err().to_string();
        assert!(error.contains("broken pump") && error.contains('3'), "{error}");
    }

    #[test]
    fn input_reaches_the_command() {
        assert_eq!(run_with(&mut Command::new("cat"), Some("hello")).unwrap(), "hello");
    }
}
