//! Where an engine will listen, by its own command line: what people type behind `truebeat run --` says it already. Pure.

use std::ffi::OsString;

use http::Uri;

/// Where vLLM, TensorRT-LLM and our own engine listen that were told nothing.
const PORT: u16 = 8000;
/// Engines that listen elsewhere unless they are told, by a word of their command: upstream's own defaults.
const PORTS: [(&str, u16); 4] =
    [("sglang.launch_server", 30_000), ("sglang", 30_000), ("llama-server", 8080), ("text-generation-launcher", 3000)];

/// `--port` and `--host` (our own engine's `--listen`) of a command, or where such an engine listens that has neither. What a shell is given
/// as one word is not read.
pub fn of_command(command: &[OsString]) -> Uri {
    let words: Vec<&str> = command.iter().map(|word| word.to_str().unwrap_or_default()).collect();
    let (host, port) = match option(&words, "--listen").and_then(|address| address.rsplit_once(':')) {
        Some((host, port)) => (Some(host), port.parse().ok()),
        None => (option(&words, "--host"), option(&words, "--port").and_then(|port| port.parse().ok())),
    };
    let port = port.filter(|port| *port != 0).unwrap_or_else(|| usual_port(&words));
    let host = host.map(|host| host.trim_matches(['[', ']'])).unwrap_or_default();
    let address = match host {
        "" | "0.0.0.0" | "*" => format!("http://127.0.0.1:{port}"),
        "::" => format!("http://[::1]:{port}"),
        six if six.contains(':') => format!("http://[{six}]:{port}"),
        name => format!("http://{name}:{port}"),
    };
    // a host that no URL can have is refused by the engine as well, in its own words
    let is_whole = |uri: &Uri| uri.path() == "/" && uri.query().is_none();
    address.parse().ok().filter(is_whole).unwrap_or_else(|| Uri::from_static("http://127.0.0.1:8000"))
}

/// Of an option that is given twice the last counts, as in the engines' own parsers.
fn option<'a>(words: &[&'a str], name: &str) -> Option<&'a str> {
    let given = |(at, word): (usize, &&'a str)| match word.strip_prefix(name)? {
        "" => words.get(at + 1).copied(),
        rest => rest.strip_prefix('='),
    };
    words.iter().enumerate().filter_map(given).next_back()
}

fn usual_port(words: &[&str]) -> u16 {
    let is = |word: &&str, name: &str| word.rsplit('/').next() == Some(name);
    let of = |(name, port): &(&str, u16)| words.iter().any(|word| is(word, name)).then_some(*port);
    PORTS.iter().find_map(of).unwrap_or(PORT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_says_where_its_engine_listens() {
        for (line, url) in [
            ("vllm serve m", "http://127.0.0.1:8000/"),
            ("vllm serve m --port 9000", "http://127.0.0.1:9000/"),
            ("vllm serve m --port=9000 --port 9001", "http://127.0.0.1:9001/"),
            ("vllm serve m --host 10.0.0.5", "http://10.0.0.5:8000/"),
            ("vllm serve m --host 0.0.0.0 --port 81", "http://127.0.0.1:81/"),
            ("vllm serve m --host :: --port 81", "http://[::1]:81/"),
            ("vllm serve m --host fd00::5 --port 81", "http://[fd00::5]:81/"),
            ("vllm serve m --port", "http://127.0.0.1:8000/"),
            ("vllm serve m --port 0", "http://127.0.0.1:8000/"),
            ("vllm serve m --host a/b", "http://127.0.0.1:8000/"),
            ("vllm serve m --portable 7", "http://127.0.0.1:8000/"),
            ("python3 -m sglang.launch_server --model-path m", "http://127.0.0.1:30000/"),
            ("/opt/bin/sglang serve --port 8001", "http://127.0.0.1:8001/"),
            ("/opt/bin/llama-server -m m.gguf", "http://127.0.0.1:8080/"),
            ("text-generation-launcher --model-id m", "http://127.0.0.1:3000/"),
            ("truebeat engine --model m --listen 127.0.0.1:7000", "http://127.0.0.1:7000/"),
            ("sh -c serve", "http://127.0.0.1:8000/"),
        ] {
            let command: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let expected = url.trim_end_matches('/');
            assert_eq!(of_command(&command).to_string().trim_end_matches('/'), expected, "{line}");
        }
    }
}
