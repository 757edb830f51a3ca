//! Log lines without what users wrote, whatever key or place it stands at: only words that engines themselves use are kept. Pure.
//!
//! A filter by keys alone misses the line that prints a prompt without one. Here a word passes if it is in the list below, or in a log
//! signature of `vitals`; a number passes if it is short and does not stand in a row of others. All else becomes `[..]`.

use std::collections::HashSet;
use std::sync::OnceLock;

/// Digits of a number that is kept: counts, ports, milliseconds; not the ids of persons and cards.
const DIGITS_MAX: usize = 6;
/// More numbers than this with nothing but blanks, commas or dashes between them, or more than [`LONG_MAX`] of three digits and more,
/// are token ids or a card, not a time.
const ROW_MAX: usize = 6;
const LONG_MAX: usize = 2;
const HIDDEN: &str = "[..]";

/// What engines, their libraries and we ourselves say of themselves, in small letters.
const VOCABULARY: &str = "
a abort aborted aborting about above accept accepted access active actor add added adding addr address admission after again agent all
alloc allocate allocated allocation allocator already also an and another any api app application are arg args argument arguments array
as ascii assert assertion assertionerror async asyncio at attempt attempts attention attribute attributeerror auto autotune available
average avg await awaiting back backend background bad base batch batched batches beam because been before begin being below between
bf16 bin bind bit bits block blocked blocks body bool both bound broadcast broken buffer build builtin bus but by bytes cache cached
caching call callback called calls can cancel cancelled cannot capacity capture captured capturing card catch cause caused channel check
checking checkpoint checkpoints checksum child children chunk chunked class clear client clients close closed code codec collective
collector com comm command commit communicator compilation compile compiled compiler compiling complete completed completion completions
component compute compressed concurrency config configuration configured connect connected connection connections consider const
container content context continue controller coordinator copy core corrupt corrupted cost could count cpu cpus crash crashed create
created creating critical cublas cuda cudagraph cudagraphs cudnn current currently daemon data dead deadline deadlock debug dec decode
decoder decoding default delay deliver delivered dependency deprecated destroy detect detected detector device devices did die died
different dir directory disable disabled disconnect disconnected disk dispatch distributed do does done down download drain drained
draining driver drop dropped dtype due dump duration during dying each eager either elapsed empty enable enabled encountered encoder end
ended endpoint ends engine enough ensure entered entry environment eof epoch epoll err errno error errors event eventloop events every
evict evicted exc exceeded exception exclusive exec execute executed executing execution executor exist existing exists exit exited
exitcode expected expert experts expired external fail failed failing fails failure false fatal fault faulthandler fetch ffn few field
file files final finally find finish finished fires first flag flags flash flashattention flashinfer float flush for force found fp fp8
fp16 fp32 frame free freed freeze from frontend frozen full func function future futex gather gb gc general generate generated generation
generator get gib gil give given global gloo go going gpu gpus grace graceful gracefully graph graphs group guard had handle handled
handler hang hangs has hash have head headers health healthy heap heartbeat heartbeats hf hidden high hip hit host hour hours how hpu http
https hung id idle if ignore ignored illegal implementation import importerror in inc include index indexerror indices inference inf info
information init initialization initialize initialized initializing inject injected inner input inputs insufficient int int8 integer
internal interrupt interrupted interval into invalid io ioctl ipc is isolated issue it item iteration iterations its itself job join jit
json just kernel kernels key keyerror keys kib kill killed killing kv label large last late latency later latest launch launched layer
layers lazy leader leak leaked least left len length less level lib libc libcuda library limit limits line lines link list listen
listening live load loaded loader loading loads local lock locked locks log logger logging logprobs logs long longer lookup loop lora lost
low made main make manager many map mapped mapping marker mask max maximum may mean measured mem memory message messages metadata method
metric metrics mib microseconds middleware migrate millis milliseconds min minimum minutes missing mistral mm mode model models module
monitor more most moved mp mpi ms mtp much multi multiproc multiprocess multiprocessing must mutex my name nan native nccl ncclwatchdog
need needs network never new next nic no node non none not nothing notice notimplementederror now np ns null num number numpy nvidia
nvlink nvml object of off offload offset ok old older on once one only oom op open openai operation operator optimal option optional
options or order original os oserror other out outer output outputs over overflow overhead own owner page pages paged pair panic panicked
parallel param parameter parameters params parent parse parser part partial pass passed path pause paused peak peer pending per percent
performance permission phase pid pids pin ping pipe pipeline placement plan please plugin policy poll pool pop port ports position possible
post power pre preallocated preempt preempted preemption preemptions prefetch prefill prefix prepare previous print prio priority probably
process processed processes processing processor profile profiler program progress prompt prompts proper property protocol proxy publish
put py pynccl python pytorch quantization query queue queued queues quit qwen race raise raised random range rank ranks rate ratio ray reach
reached read reader reading ready real reason receive received recompile record recover recovery recv recursion recycle redirect reduce
ref refuse refused register registered reject rejected release released reload remaining remote remove removed repeat replica replicas
reply report reported req reqs request requested requests require required reset resize resolve resource resources respond response rest
restart restarted restarting result results resume resumed retry retrying return returned returning reuse right rocm rotary round route
router rows rpc run runner running runs runtime runtimeerror rust safe same sample sampled sampler samples sampling save saved scale
scatter schedule scheduled scheduler scheduling score script search second seconds section secs see seed segment segmentation select self
send sender sending sent seq seqs sequence sequences serial serve served server servers service serving session set setting settings setup
shape shard shards shared shm should show shut shutdown shutting side sig sigabrt sigint sigkill signal signals sigsegv sigterm sigurg sigusr
silent since single site size sizes skip skipped sleep sleeping slot slots slow small smaller snapshot so socket sockets soft some source
space spawn spawned spec speculative speed spin split stack stage stale stall stalled stalls start started starting starts startup
startupstall state stats status step steps still stop stopped stopping storage store stored str stream streaming streams string struct
stuck sub subprocess success successful successfully such suffix suggested sum support supported suspect swap symbol sync synchronize
synchronization system systemerror systemexit table take taken takes target task tasks tcp template temporary tensor tensors terminate
terminated terminating test text than that the their them then there these they this thread threads threshold through throughput thrown took
time timed timeout timeouterror timeouts timer times to tokenizer tokens token tokio too torch total tp trace traceback track traffic
transfer transformer transformers triton true truncated try trying tune tuning two type typeerror types uds unable unavailable
unexpected unhealthy unhandled uninitialized unix unknown unless unload unpin unrecoverable unsupported until up update updated upstream
uptime url usage use used user users using util utilization uv uvicorn v1 valid value valueerror values var variable vector verbose version
via virtual vllm vllmworker vocab vram wait waited waiting wake warm warming warmup warn warning was watch watchdog watcher we weight
weights were what when where which while who why will window with within without wkv work worker workers working workload world would
write writer writing written wrong xla xpu yes yet yield you your zero zmq
gonka sglang tensorrt llm trt truebeat llama gguf lmcache mooncake nixl rdma ib roce xgrammar guidance outlines ipc apiserver apiserverpool
enginecore asyncllm asyncmp busy launcher entrypoints protocol shmbroadcast shm dp ep pp moe gemm attn mla rope norm lm ar spec ngram eagle
medusa draft drafter bonus verified accepted acceptance rejection graphkey uncaught rss oomkilled cgroup oome cputime wchan state kb
jan feb apr jun jul aug sep oct nov dec mon tue wed thu fri sat sun utc gmt am pm
";

/// The text with every word that is no engine's own hidden, line by line.
pub fn redact_words(text: &str) -> String {
    text.lines().map(redact_line).collect::<Vec<_>>().join("\n")
}

/// One run of word characters, or what stands between two.
enum Piece<'a> {
    Word(&'a str),
    Between(&'a str),
}

fn redact_line(line: &str) -> String {
    let pieces = pieces(line);
    let rows = rows_of_numbers(&pieces);
    let mut out = String::with_capacity(line.len());
    let mut hidden_at_end = false;
    for (index, piece) in pieces.iter().enumerate() {
        match piece {
            Piece::Between(text) => {
                // between two hidden words nothing of the text's shape is told
                let next_hidden = matches!(pieces.get(index + 1), Some(Piece::Word(word)) if rows.contains(&(index + 1)) || !is_known(word));
                if !(hidden_at_end && next_hidden && !text.contains(['=', ':'])) {
                    out.push_str(text);
                    hidden_at_end = false;
                }
            }
            Piece::Word(word) if !rows.contains(&index) && is_known(word) => {
                out.push_str(word);
                hidden_at_end = false;
            }
            Piece::Word(_) => {
                if !hidden_at_end {
                    out.push_str(HIDDEN);
                }
                hidden_at_end = true;
            }
        }
    }
    out
}

/// Letters and digits of any script make words; everything else separates.
fn pieces(line: &str) -> Vec<Piece<'_>> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_' || !c.is_ascii();
    let mut pieces = Vec::new();
    let mut rest = line;
    while let Some(first) = rest.chars().next() {
        let word = is_word(first);
        let end = rest.find(|c| is_word(c) != word).unwrap_or(rest.len());
        let (piece, after) = rest.split_at(end);
        pieces.push(if word { Piece::Word(piece) } else { Piece::Between(piece) });
        rest = after;
    }
    pieces
}

/// The indexes of numbers that stand in such a row.
fn rows_of_numbers(pieces: &[Piece<'_>]) -> HashSet<usize> {
    let is_number =
        |piece: &Piece<'_>| matches!(piece, Piece::Word(word) if word.bytes().all(|byte| byte.is_ascii_digit()));
    let joins = |piece: &Piece<'_>| matches!(piece, Piece::Between(text) if text.chars().all(|c| matches!(c, ' ' | ',' | '-' | '[')));
    let (mut rows, mut row) = (HashSet::new(), Vec::new());
    for (index, piece) in pieces.iter().enumerate() {
        if is_number(piece) {
            row.push(index);
        } else if !joins(piece) {
            row.clear();
        }
        let long = row.iter().filter(|at| matches!(&pieces[**at], Piece::Word(word) if word.len() >= 3)).count();
        if row.len() > ROW_MAX || long > LONG_MAX {
            rows.extend(row.iter().copied());
        }
    }
    rows
}

/// Is each part of the word an engine's own, and are its digits few? `EngineCore_0`, `step_stalled`, `H100` and `12` are.
fn is_known(word: &str) -> bool {
    if !word.is_ascii() {
        return false;
    }
    let digits = word.bytes().filter(u8::is_ascii_digit).count();
    if digits > DIGITS_MAX {
        return false;
    }
    if digits == word.len() || vocabulary().contains(word.to_ascii_lowercase().as_str()) {
        return true;
    }
    word.split(|c: char| c == '_' || c.is_ascii_digit()).filter(|part| !part.is_empty()).all(|part| {
        // single letters are units and axes: 5s, 3x, T+1
        let short = part.len() == 1 && word.len() <= DIGITS_MAX + 1;
        short || vocabulary().contains(part.to_ascii_lowercase().as_str()) || camel_parts_are_known(part)
    })
}

/// `StepStalled`, `NCCLWatchdog`: each hump by itself.
fn camel_parts_are_known(word: &str) -> bool {
    let bytes = word.as_bytes();
    let mut begin = 0;
    let mut humps = Vec::new();
    for at in 1..bytes.len() {
        let rises = bytes[at].is_ascii_uppercase() && bytes[at - 1].is_ascii_lowercase();
        let ends_capitals = bytes[at].is_ascii_lowercase() && at >= 2 + begin && bytes[at - 1].is_ascii_uppercase();
        if rises {
            humps.push(&word[begin..at]);
            begin = at;
        } else if ends_capitals {
            humps.push(&word[begin..at - 1]);
            begin = at - 1;
        }
    }
    humps.push(&word[begin..]);
    humps.len() > 1 && humps.iter().all(|hump| vocabulary().contains(hump.to_ascii_lowercase().as_str()))
}

fn vocabulary() -> &'static HashSet<String> {
    static WORDS: OnceLock<HashSet<String>> = OnceLock::new();
    WORDS.get_or_init(|| {
        let own = VOCABULARY.split_ascii_whitespace().map(str::to_owned);
        // what the detector looks for must be there to be looked at
        let signatures = vitals::log_signs::SIGNATURES.iter();
        let signatures = signatures.flat_map(|signature| signature.starts.iter().chain([&signature.contains]));
        let signatures = signatures.flat_map(|part| part.split(|c: char| !c.is_ascii_alphanumeric()));
        own.chain(signatures.map(str::to_ascii_lowercase)).filter(|word| !word.is_empty()).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_engines_say_stays_readable() {
        for line in [
            "INFO 11-21 06:30:28 [loggers.py:123] Engine 000: Avg prompt throughput: 12.0 tokens/s, Running: 5 reqs, Waiting: 0 reqs",
            "(EngineCore_0 pid=4711) ERROR: EngineCore encountered a fatal error.",
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
            "127.0.0.1:40312 - \"POST /v1/completions HTTP/1.1\" 200 OK",
            "WARN engine::fault: injected fault fires fault=StepStall steps_done=12",
        ] {
            let kept = redact_words(line);
            let lost = kept.matches(HIDDEN).count();
            assert!(lost <= 1, "{line}\n{kept}");
        }
    }

    #[test]
    fn every_signature_of_the_detector_survives() {
        for signature in vitals::log_signs::SIGNATURES {
            for part in signature.starts.iter().chain([&signature.contains]) {
                let kept = redact_words(part);
                let same = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
                assert_eq!(same(&kept), same(part), "{}", signature.name);
            }
        }
    }

    #[test]
    fn a_word_that_no_engine_says_is_hidden_wherever_it_stands() {
        for line in [
            "zq7wombat",
            "INFO user said zq7wombat and went",
            "key=zq7wombat",
            "x/zq7wombat/y",
            "Zq7Wombat error",
            "error_zq7wombat",
            "zq7\u{fc}wombat",
            "EngineZq7wombatCore",
        ] {
            let kept = redact_words(line).to_lowercase();
            assert!(!kept.contains("wombat") && !kept.contains("zq7"), "{line}\n{kept}");
        }
        assert_eq!(
            redact_words("error: my mum lives in Springfield, engine failed"),
            "error: my [..] in [..], engine failed"
        );
    }

    #[test]
    fn long_numbers_and_rows_of_numbers_are_hidden() {
        assert_eq!(redact_words("call 4915112345678 now"), "call [..] now");
        assert_eq!(redact_words("card 4111 1111 1111 1111"), "card [..]");
        assert!(!redact_words("[101, 2023, 2003, 1037, 102]").contains("1037"));
        assert_eq!(redact_words("[7, 3, 5, 1, 2, 9, 4]"), "[[..]]");
        assert_eq!(redact_words("2026-11-21 06:30:28,123 took 412 ms"), "2026-11-21 06:30:28,123 took 412 ms");
    }
}
