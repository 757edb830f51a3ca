//! What a benchmark was asked for behind `--`.

/// Threads, by `--threads N` or as many as there are processors, and the other words.
pub fn threads_and_words() -> (usize, Vec<String>) {
    let mut words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let Some(at) = words.iter().position(|word| word == "--threads") else {
        return (std::thread::available_parallelism().map_or(1, usize::from), words);
    };
    let threads = words.get(at + 1).and_then(|word| word.parse().ok()).expect("--threads N");
    words.drain(at..at + 2);
    (threads, words)
}
