"""Clients of an OpenAI-like server: threads that stream completions, and count what they get."""
import http.client
import json
import random
import threading
import time

WORDS = "the quick brown fox jumps over a lazy dog and runs on into the night".split()


def prompt(words, seed):
    """A text of this many words, another for each seed: no prefix is shared."""
    chance = random.Random(seed)
    return " ".join(chance.choice(WORDS) for _ in range(words))


class Refused(OSError):
    """Another status than 200."""


def stream(port, body):
    """The lines that a completion is answered with."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise Refused(answer.status)
        yield from answer
    finally:
        connection.close()


class Client:
    """One request after another until told to stop."""

    def __init__(self, port, name, words, tokens, pause_s=0.0, once=False):
        self.port, self.name, self.words, self.tokens, self.pause_s, self.once = port, name, words, tokens, pause_s, once
        self.chunks = self.done = self.refused = self.failed = 0
        self.last = time.monotonic()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        number = 0
        while not self.stop.is_set():
            number += 1
            try:
                self.one(number)
            except Refused:
                self.refused += 1
                self.stop.wait(0.3)
            except OSError:
                self.failed += 1
                self.stop.wait(0.3)
            if self.once:
                return
            self.stop.wait(self.pause_s)

    def one(self, number):
        body = {"model": "m", "prompt": prompt(self.words, (self.name, number).__hash__()), "max_tokens": self.tokens, "stream": True,
                "ignore_eos": True}
        for line in stream(self.port, body):
            if line.startswith(b"data:"):
                self.chunks += 1
                self.last = time.monotonic()
            if self.stop.is_set():
                return
        self.done += 1


class Load:
    """Several clients at once."""

    def __init__(self, port, clients=6, words=40, tokens=40, pause_s=0.2, once=False):
        self.clients = [Client(port, i, words, tokens, pause_s, once) for i in range(clients)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        for client in self.clients:
            client.stop.set()

    def total(self, what):
        return sum(getattr(client, what) for client in self.clients)
