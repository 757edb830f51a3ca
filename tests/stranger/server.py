#!/usr/bin/env python3
"""A stranger's engine: an OpenAI-like server that knows nothing of Truebeat, for proving that an unpatched engine is supervised too.

Standard library only. It behaves as a real vLLM does where it matters (names, and who updates them when): an *engine* thread makes
steps and writes the gauges and counters; the HTTP threads only read them. So when the engine thread freezes (SIGUSR2, or
--freeze-after SECONDS), /health goes on saying 200, /metrics goes on answering with frozen numbers, new requests are accepted and
hang, and streams that got their `200 OK` at once get nothing more. A restart is the only cure.

    python3 server.py --port 8000 --rate 50 --freeze-after 20

It also does, on request, what healthy engines do that looks like a hang: POST /act?what=compile|crawl|front&seconds=N, and vLLM's own
POST /sleep and /wake_up; with --counts lumps its figures move at the end of each answer only, as llama.cpp's do.
"""
import argparse
import collections
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# A crawl, as the field reports it; and what a front end takes whose event loop is saturated.
CRAWL_TIMES, FRONT_SECONDS = 100, 3.0
WORDS = "the quick brown fox jumps over a lazy dog and runs on into the night".split()


class Request:
    def __init__(self, prompt_tokens, max_tokens):
        self.prompt_tokens = prompt_tokens
        self.left = max_tokens
        self.made = 0
        self.out = queue.Queue()  # tokens as text; None ends it
        self.gone = False  # the client left


class Engine(threading.Thread):
    """The step loop. Everything /metrics shows is written here, once a step, and nowhere else."""

    def __init__(self, args):
        super().__init__(daemon=True)
        self.args, self.inbox, self.frozen = args, queue.Queue(), threading.Event()
        self.waiting, self.running = collections.deque(), []
        self.shown = dict.fromkeys(
            ["running", "waiting", "kv", "prompt", "generation", "steps", "step_tokens", "stop", "length", "abort", "preempted"], 0)
        self.awake = threading.Event()
        self.awake.set()
        self.until = {"compile": 0.0, "crawl": 0.0, "front": 0.0}  # what it does, and until when

    def does(self, what):
        return time.monotonic() < self.until[what]

    def compile(self):
        """A real compiler at work for as long as it should, as a JIT is in the middle of a step."""
        source = "".join("int f%d(int x) { return x * %d ^ (x >> 3); }\n" % (n, n) for n in range(4000))
        while self.does("compile"):
            subprocess.run(["cc", "-O2", "-x", "c", "-", "-c", "-o", "/dev/null"], input=source.encode(), check=True)

    def run(self):
        step_seconds = 1.0 / self.args.rate
        while True:
            if self.frozen.is_set():
                threading.Event().wait()  # for ever, holding nothing: like a lock that never comes
            if not self.running and not self.waiting and self.inbox.empty():
                self.take(self.inbox.get())  # idle: sleeps until work comes, as vLLM's core does
            while not self.inbox.empty():
                self.take(self.inbox.get_nowait())
            if self.frozen.is_set():
                continue
            self.awake.wait()
            self.compile()
            self.step()
            time.sleep(step_seconds)
            if self.does("crawl"):
                # who crawls works for it
                end = time.monotonic() + step_seconds * CRAWL_TIMES
                while time.monotonic() < end:
                    sum(range(1000))

    def take(self, request):
        if request is not None:  # None only wakes the loop
            self.waiting.append(request)

    def step(self):
        while self.waiting and len(self.running) < self.args.max_num_seqs:
            request = self.waiting.popleft()
            self.shown["prompt"] += request.prompt_tokens
            self.running.append(request)
        tokens = 0
        for request in list(self.running):
            if request.gone:
                self.end(request, "abort")
                continue
            request.out.put(WORDS[request.made % len(WORDS)] + " ")
            request.made, request.left, tokens = request.made + 1, request.left - 1, tokens + 1
            if request.left <= 0:
                self.end(request, "length")
        if self.args.counts == "steps":
            self.shown["generation"] += tokens
            self.shown["step_tokens"] += tokens
            self.shown["steps"] += 1 if tokens else 0
        self.shown["running"], self.shown["waiting"] = len(self.running), len(self.waiting)
        held = sum(request.prompt_tokens + request.made for request in self.running)
        self.shown["kv"] = min(1.0, held / 65536)

    def end(self, request, reason):
        self.running.remove(request)
        self.shown[reason] += 1
        if self.args.counts == "lumps":
            self.shown["generation"] += request.made
        request.out.put(None)


def lumps(engine):
    """llama.cpp's names: its tokens are counted when an answer is whole, its slots when it is asked."""
    rows = [("prompt_tokens_total", engine.shown["prompt"]), ("tokens_predicted_total", engine.shown["generation"]),
            ("requests_processing", len(engine.running)), ("requests_deferred", len(engine.waiting))]
    return "".join("llamacpp:%s %s\n" % row for row in rows)


def metrics(engine, model):
    if engine.args.counts == "lumps":
        return lumps(engine)
    labels = 'engine="0",model_name="%s"' % model
    shown = dict(engine.shown)
    rows = [
        ("num_requests_running", "gauge", [("", shown["running"])]),
        ("num_requests_waiting", "gauge", [("", shown["waiting"])]),
        ("kv_cache_usage_perc", "gauge", [("", round(shown["kv"], 6))]),
        ("prompt_tokens_total", "counter", [("", shown["prompt"])]),
        ("generation_tokens_total", "counter", [("", shown["generation"])]),
        ("num_preemptions_total", "counter", [("", shown["preempted"])]),
        ("request_success_total", "counter", [(',finished_reason="%s"' % why, shown[why]) for why in ("stop", "length", "abort")]),
    ]
    text = []
    for name, kind, values in rows:
        text.append("# TYPE vllm:%s %s" % (name.removesuffix("_total") if kind == "counter" else name, kind))
        text += ["vllm:%s{%s%s} %s" % (name, labels, more, float(value)) for more, value in values]
    text.append("# TYPE vllm:iteration_tokens_total histogram")  # a histogram, in spite of its name
    text.append('vllm:iteration_tokens_total_bucket{%s,le="+Inf"} %s' % (labels, float(shown["steps"])))
    text.append("vllm:iteration_tokens_total_count{%s} %s" % (labels, float(shown["steps"])))
    text.append("vllm:iteration_tokens_total_sum{%s} %s" % (labels, float(shown["step_tokens"])))
    awake = engine.awake.is_set()
    text.append("# TYPE vllm:engine_sleep_state gauge")
    for state, value in (("awake", awake), ("weights_offloaded", not awake), ("discard_all", False)):
        text.append('vllm:engine_sleep_state{%s,sleep_state="%s"} %s' % (labels, state, float(value)))
    cpu = time.process_time()
    text += ["# TYPE process_cpu_seconds_total counter", "process_cpu_seconds_total %.2f" % cpu]
    return "\n".join(text) + "\n"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine = args = None

    def log_message(self, form, *words):
        print("INFO:     %s - %s" % (self.address_string(), form % words), flush=True)

    def do_GET(self):
        path = self.path.split("?")[0]
        if self.engine.does("front"):
            time.sleep(FRONT_SECONDS)
        if path in ("/health", "/ping"):
            self.answer(200, b"", "text/plain")  # never asks the engine: that is the lie
        elif path == "/metrics":
            self.answer(200, metrics(self.engine, self.args.model).encode(), "text/plain; version=0.0.4")
        elif path == "/v1/models":
            self.json(200, {"object": "list", "data": [{"id": self.args.model, "object": "model", "owned_by": "stranger"}]})
        else:
            self.json(404, {"error": {"message": "no such path: " + path, "code": 404}})

    def act(self, path, query):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        what, seconds = query.get("what", [""])[0], query.get("seconds", ["0"])[0]
        if path == "/sleep":
            self.engine.awake.clear()
        elif path == "/wake_up":
            self.engine.awake.set()
        elif what in self.engine.until:
            self.engine.until[what] = time.monotonic() + float(seconds)
        else:
            return self.json(400, {"error": {"message": "no such act: %r" % what, "code": 400}})
        self.json(200, {})

    def do_POST(self):
        url = urllib.parse.urlsplit(self.path)
        if url.path in ("/act", "/sleep", "/wake_up"):
            return self.act(url.path, urllib.parse.parse_qs(url.query))
        chat = self.path == "/v1/chat/completions"
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            if not chat and self.path != "/v1/completions":
                return self.json(404, {"error": {"message": "no such path: " + self.path, "code": 404}})
            prompt = body["messages"] if chat else body["prompt"]
            most = max(1, int(body.get("max_tokens") or body.get("max_completion_tokens") or 16))
        except (ValueError, KeyError, TypeError) as error:
            return self.json(400, {"error": {"message": "bad request: %r" % error, "code": 400}})
        words = len(prompt) if isinstance(prompt, list) and not chat else len(json.dumps(prompt).split())
        request = Request(max(1, words), most)
        self.engine.inbox.put(request)
        try:
            (self.stream if body.get("stream") else self.whole)(request, chat)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            request.gone = True

    def piece(self, request, chat, text, end):
        choice = {"index": 0, "finish_reason": end}
        choice.update({"delta": {"content": text} if text else {}} if chat else {"text": text})
        return {"id": "cmpl-%d" % id(request), "object": "chat.completion.chunk" if chat else "text_completion",
                "created": int(time.time()), "model": self.args.model, "choices": [choice]}

    def stream(self, request, chat):
        self.send_response(200)  # at once, before the first token: so a hang looks like a success
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while (text := request.out.get()) is not None:
            self.event(json.dumps(self.piece(request, chat, text, None)))
        self.event(json.dumps(self.piece(request, chat, "", "length")))
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, data):
        raw = ("data: %s\n\n" % data).encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(raw), raw))
        self.wfile.flush()

    def whole(self, request, chat):
        text = "".join(iter(request.out.get, None))
        answer = self.piece(request, chat, text, "length")
        if chat:
            answer["object"] = "chat.completion"
            answer["choices"][0]["message"] = {"role": "assistant", "content": text}
            del answer["choices"][0]["delta"]
        usage = {"prompt_tokens": request.prompt_tokens, "completion_tokens": request.made}
        answer["usage"] = dict(usage, total_tokens=sum(usage.values()))
        self.json(200, answer)

    def json(self, status, value):
        self.answer(status, json.dumps(value).encode(), "application/json")

    def answer(self, status, body, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main():
    parse = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parse.add_argument("--host", default="127.0.0.1")
    parse.add_argument("--port", type=int, default=8000)
    parse.add_argument("--model", default="stranger")
    parse.add_argument("--rate", type=float, default=50.0, help="steps a second; each gives every running request a token")
    parse.add_argument("--max-num-seqs", type=int, default=16)
    parse.add_argument("--load-seconds", type=float, default=0.5, help="time before the port opens (vLLM binds late)")
    parse.add_argument("--counts", choices=("steps", "lumps"), default="steps", help="when its figures move")
    parse.add_argument("--freeze-after", type=float, help="freeze the engine thread this many seconds after start")
    args = parse.parse_args()
    engine = Engine(args)

    def freeze(*_):
        engine.frozen.set()
        engine.inbox.put(None)  # an idle engine freezes too, not at its next request

    signal.signal(signal.SIGUSR2, freeze)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    time.sleep(args.load_seconds)
    engine.start()
    if args.freeze_after is not None:
        timer = threading.Timer(args.freeze_after, freeze)
        timer.daemon = True
        timer.start()
    Handler.engine, Handler.args = engine, args
    server = ThreadingHTTPServer((args.host, args.port), Handler)
    server.daemon_threads = True
    print("INFO:     Application startup complete, port %d" % server.server_address[1], flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
