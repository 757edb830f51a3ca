"""Hangs a real vLLM behind `truebeat run` and prints what was said of it: verdict, class, times to fence and to confirm, bundle.

    run.py --venv DIR --program target/release/truebeat [--only k1,f] [--plugin yes|no] [--tp 1|2] [--mode fence|recover]

In mode `fence` (default) each hang is let go once it was confirmed and its evidence taken, so that one server serves all kinds (with a
fresh detector for each, as the restart that is left out would have brought); in mode `recover` the agent kills it, and it must serve
again. A kind is one test; the last line counts them. Exit status 0: none failed.
"""
import argparse
import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from kinds import GROUPS, KINDS
from load import Load
from server import HERE, ROOT, Failure, Server, ask

# A hang must be confirmed within this: what the most patient of the rivals waits, and the agent's own capture.
CONFIRM_S = 330
FENCE_S_MAX = 75  # of a warm engine; a minute is what one that has answered few requests is given where nothing works
RECOVER_S = 900
WARM_S = 25
WARM_S_MAX = 300
QUIET_S = 20
LONG_S = 240
PREEMPT_S = 60
LONG_WORDS = 6_300  # 14 000 tokens of this tokenizer
# The program's model has heads too small for vLLM's CPU kernels: its tokenizer is kept, the weights are vLLM's own random ones.
SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512,
         "max_position_embeddings": 32768}
LONG_SHAPE = dict(SHAPE, num_hidden_layers=12, hidden_size=512, num_attention_heads=8, intermediate_size=1024)


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the servers on the way
    options = parsed()
    options.program = os.path.abspath(options.program)
    out = os.path.join(ROOT, "target", "vllm")
    os.makedirs(out, exist_ok=True)
    site = None if options.plugin == "no" else plugin_site(out)
    if site:
        atexit.register(shutil.rmtree, site, True)
    rows = []
    wanted = set(options.only.split(",")) if options.only else None
    unknown = (wanted or set()) - {kind.key for kind in KINDS}
    if unknown:
        sys.exit(f"there is no kind {', '.join(sorted(unknown))}; there are: {' '.join(kind.key for kind in KINDS)}")
    for plugin in {"yes": [True], "no": [False], "both": [True, False]}[options.plugin]:
        for group, (ranks, args) in GROUPS.items():
            kinds = [k for k in KINDS if k.group == group and (wanted is None or k.key in wanted)]
            if kinds and options.tp in (None, ranks):
                rows += session(options, out, site if plugin else None, group, ranks, args, kinds)
    print("\n" + header())
    print("\n".join(line(row) for row in rows))
    with open(os.path.join(out, "results-%d.json" % os.getpid()), "w", encoding="utf-8") as file:
        json.dump(rows, file, indent=1)
    failed = sum(not row["ok"] for row in rows)
    print(f"\n{len(rows) - failed} passed, {failed} failed")
    return 1 if failed or not rows else 0


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--plugin", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--tp", type=int, choices=(1, 2))
    parser.add_argument("--mode", choices=("fence", "recover"), default="fence")
    return parser.parse_args()


def plugin_site(out):
    """Our package as pip installs it, in a folder of its own: on the path with the plugin, not on it without."""
    site = os.path.join(out, "site-%d" % os.getpid())  # another run may stand on its own
    with tempfile.TemporaryDirectory() as copy:
        source = os.path.join(copy, "package")  # pip builds in the source's own folder
        shutil.copytree(os.path.join(ROOT, "heartbeat", "python"), source)
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, source], check=True)
    return site


def model(out, program, group):
    folder = os.path.join(out, "model-long" if group in ("long", "chunked") else "model")
    # the run before has changed it, and what is changed is not written over
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([program, "demo-model", folder], check=True, stdout=subprocess.DEVNULL)
    path = os.path.join(folder, "config.json")
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    config.update(LONG_SHAPE if group in ("long", "chunked") else SHAPE)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(config, file)
    return folder


def session(options, out, site, group, ranks, args, kinds):
    """One server and all that happens to it. A server that does not start fails its kinds."""
    name = f"{group}-{'plugin' if site else 'plain'}"
    rows = []
    say(f"== {name}: {' '.join(kind.key for kind in kinds)}")
    folder = os.path.join(out, name)
    with Server(folder, options.program, options.venv, model(out, options.program, group), site, ranks, options.mode, args) as server:
        began = time.monotonic()
        try:
            server.wait_serving()
            say(f"   serving after {time.monotonic() - began:.0f} s")
        except Failure as error:
            return [row(kind, site, ranks, ok=False, note=str(error)) for kind in kinds]
        for kind in kinds:
            try:
                if server.process.poll() is not None:
                    raise Failure("truebeat run is gone")
                made = benign(server, kind, site, ranks, began) if kind.benign else hang(server, kind, site, ranks, options.mode)
            except Failure as error:
                made = row(kind, site, ranks, ok=False, note=str(error))
            rows.append(made)
            say("   " + line(made))
    return rows


def warm(server, seconds=WARM_S):
    """Load until the detector has seen a rhythm, and no alarm on the way. The first steps of a cold engine do not count."""
    load = Load(server.port)
    server.wait("requests served", WARM_S_MAX, lambda: load.total("done") >= len(load.clients), 0.2)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        seen = server.verdict()
        if seen["verdict"] in ("Stalled", "Dead"):
            load.end()
            raise Failure(f"an alarm under plain load: {seen}")
        time.sleep(0.2)
    return load


def hang(server, kind, site, ranks, mode):
    """One hang: warm up, do it, wait for fence and confirmation, let it go (or see it recovered)."""
    calm(server)
    load = warm(server)
    if kind.idle:
        load.end()
        server.wait("idle", 60, lambda: server.verdict()["verdict"] == "Idle")
    calm(server)
    known = len(server.incidents())
    pid = None
    if kind.first:
        os.kill(server.pid_of(*kind.first), signal.SIGSTOP)
    if kind.signal:
        pid = server.pid_of(kind.signal[0], kind.signal[1])
        at = time.monotonic()
        os.kill(pid, getattr(signal, "SIG" + kind.signal[2]))
    else:
        with open(server.trigger, "w", encoding="ascii") as file:
            file.write(kind.hang)
        at = server.wait("the hang", 60, lambda: hung_at(server), 0.02)
    if kind.idle:
        time.sleep(2)
        at = time.monotonic()
    extra = Load(server.port, clients=4, once=True)
    seen = watch(server, at, kind)
    episode = taken(server, known)
    if kind.signal and kind.signal[2] == "STOP" and mode == "fence":
        os.kill(pid, signal.SIGCONT)
    if kind.first:
        signalled(server, kind.first, signal.SIGCONT)
    if seen["class"] == "ProcessDied" and mode == "fence":
        # as the restart that is left out would have: a front end whose core has died may wait for its clients for ever
        signalled(server, ("api", 0), signal.SIGKILL)
    if os.path.exists(server.trigger):
        os.unlink(server.trigger)
    if os.path.exists(server.trigger + ".hung"):
        os.unlink(server.trigger + ".hung")
    recovered = serving_again(server)
    load.end()
    extra.end()
    if mode == "fence":
        server.fresh_detector()
    classes = seen["class"] in kind.classes or seen["verdict"] in kind.classes
    ok = classes and seen["fence_s"] is not None and seen["fence_s"] <= FENCE_S_MAX and (bool(episode["bundle"]) or seen["verdict"] == "Dead") and recovered is not None
    note = seen["reasons"] if recovered is not None else "did not serve again; " + seen["reasons"]
    return row(kind, site, ranks, ok=ok, verdict=seen["verdict"], cls=seen["class"], fence_s=seen["fence_s"],
               confirm_s=seen["confirm_s"], again_s=recovered, bundle=episode["bundle"], note=note)


def signalled(server, who, number):
    """It may have been killed and replaced meanwhile: then there is nobody to signal."""
    try:
        os.kill(server.pid_of(*who), number)
    except (Failure, ProcessLookupError):
        pass


def hung_at(server):
    try:
        with open(server.trigger + ".hung", encoding="ascii") as file:
            return float(file.read())
    except (OSError, ValueError):
        return None


def watch(server, at, kind):
    """Until the confirmation, or for as long as anybody may wait."""
    found = {"verdict": None, "class": None, "fence_s": None, "confirm_s": None, "reasons": ""}
    while time.monotonic() - at < CONFIRM_S:
        seen = server.verdict()
        age = time.monotonic() - at
        if seen["fenced"] and found["fence_s"] is None:
            found["fence_s"] = round(age, 2)
        if seen["verdict"] is not None:
            found.update(verdict=seen["verdict"], reasons="; ".join(reason["text"] for reason in seen["reasons"])[:300])
            found["class"] = seen["class"] if isinstance(seen["class"], str) or seen["class"] is None else str(seen["class"])
        if seen["verdict"] in ("Stalled", "Dead"):
            found["confirm_s"] = round(age, 2)
            break
        time.sleep(0.05)
    if found["class"]:
        found["ranks"] = found["class"]
        found["class"] = found["class"].partition("[")[0]
    return found


def taken(server, known):
    """The newest episode of this hang, once its bundle is there or half a minute has passed."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        list_ = server.incidents()
        if len(list_) > known and list_[0].get("bundle"):
            return list_[0]
        time.sleep(0.2)
    list_ = server.incidents()
    return dict(list_[0], bundle=list_[0].get("bundle")) if len(list_) > known else {"bundle": None}


def serving_again(server):
    began = time.monotonic()
    try:
        server.wait("serving again", RECOVER_S,
                    lambda: (lambda seen: seen["verdict"] in ("Idle", "Progressing") and not seen["fenced"])(server.verdict()), 0.2)
        return round(time.monotonic() - began, 1)
    except Failure:
        return None


def calm(server):
    server.wait("calm", RECOVER_S, lambda: server.verdict()["verdict"] in ("Idle", "Progressing") and not server.verdict()["fenced"], 0.2)


def benign(server, kind, site, ranks, began):
    """One thing that is no hang: it must pass without an alarm, and without one between two looks at the verdict."""
    known = set() if kind.benign == "start" else {incident["id"] for incident in server.incidents()}
    made = passed(server, kind, site, ranks, began)
    more = [incident for incident in server.incidents() if incident["id"] not in known]
    if more and not kind.slow_step:
        made.update(ok=False, note=f"{len(more)} incidents: {more[0].get('reasons')}; {made['note']}")
    return made


def passed(server, kind, site, ranks, began):
    if kind.benign == "start":
        return row(kind, site, ranks, ok=True, verdict="no alarm", note=f"served {time.monotonic() - began:.0f} s after its start")
    if kind.benign == "preempt":
        return preempted(server, kind, site, ranks)
    load = warm(server)
    if kind.benign in ("idle", "long"):
        load.end()
        server.wait("idle", 60, lambda: server.verdict()["verdict"] == "Idle")
    doing = {"idle": lambda: None, "pause": lambda: posted(server, "/pause?mode=keep"),
             "sleep": lambda: posted(server, "/sleep?level=0&mode=keep"),
             "long": lambda: Load(server.port, clients=1, words=LONG_WORDS, tokens=4, once=True)}[kind.benign]
    doing_load = doing()
    at = time.monotonic()
    if kind.benign == "long":
        alarms = alarms_within(server, LONG_S, lambda: doing_load.total("done"))
    else:
        alarms = alarms_within(server, QUIET_S)
    note = f"{time.monotonic() - at:.0f} s"
    if kind.benign in ("pause", "sleep"):
        posted(server, "/resume" if kind.benign == "pause" else "/wake_up")
    after = load if kind.benign in ("pause", "sleep") else Load(server.port)
    before = after.total("done")
    server.wait("requests served afterwards", 120, lambda: after.total("done") > before + 3)
    after.end()
    unfinished = kind.benign == "long" and not doing_load.total("done")
    bad = [alarm for alarm in alarms if alarm[1] != "Suspect" or not kind.slow_step]
    fence = next((alarm[0] for alarm in alarms), None)
    return row(kind, site, ranks, ok=not bad and not unfinished, verdict=alarms[-1][1] if alarms else "no alarm", fence_s=fence,
               note="; ".join([note, *map(str, alarms)]))


def alarms_within(server, seconds, done=lambda: False):
    """What the detector holds against an engine in that time, or until `done`: each new verdict, with when and why."""
    alarms, at = [], time.monotonic()
    while time.monotonic() - at < seconds:
        seen = server.verdict()
        if seen["verdict"] in ("Suspect", "Stalled", "Dead") and (not alarms or alarms[-1][1] != seen["verdict"]):
            alarms.append((round(time.monotonic() - at, 1), seen["verdict"], seen["class"], "; ".join(r["text"] for r in seen["reasons"])))
        if done():
            break
        time.sleep(0.1)
    return alarms


def preempted(server, kind, site, ranks):
    """Requests that together do not fit into the cache: some are put back and computed again, and none of that is a hang."""
    load = Load(server.port, words=60, tokens=330)
    alarms = alarms_within(server, PREEMPT_S)
    load.end()
    count, done = preemptions(server), load.total("done")
    note = f"{count:.0f} preemptions, {done} requests served in {PREEMPT_S} s"
    return row(kind, site, ranks, ok=not alarms and count > 0 and done > 0, verdict=alarms[-1][1] if alarms else "no alarm",
               fence_s=next((alarm[0] for alarm in alarms), None), note="; ".join([note, *map(str, alarms)]))


def preemptions(server):
    _, text = ask(server.engine_port, "/metrics")
    counts = [line for line in text.splitlines() if line.startswith("vllm:num_preemptions_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in counts)


def posted(server, path):
    status, text = ask(server.engine_port, path, "POST", 30)
    if status != 200:
        raise Failure(f"POST {path}: {status} {text[:200]}")


def row(kind, site, ranks, ok, verdict=None, cls=None, fence_s=None, confirm_s=None, again_s=None, bundle=None, note=""):
    return {"kind": kind.key, "what": kind.what, "plugin": bool(site), "tp": ranks, "ok": ok, "verdict": verdict, "class": cls,
            "fence_s": fence_s, "confirm_s": confirm_s, "again_s": again_s, "bundle": bundle, "note": note}


def header():
    return f"{'':4} {'kind':8} {'plugin':6} tp {'verdict':10} {'class':18} {'fence':>8} {'confirm':>8} {'again':>8} bundle  what; note"


def line(row_):
    def seconds(value):
        return "-" if value is None else f"{value:.2f} s"
    ok, plugin, bundle = "ok" if row_["ok"] else "FAIL", "yes" if row_["plugin"] else "no", "yes" if row_["bundle"] else "-"
    times = " ".join(f"{seconds(row_[name]):>8}" for name in ("fence_s", "confirm_s", "again_s"))
    return (f"{ok:4} {row_['kind']:8} {plugin:6} {row_['tp']:2} {row_['verdict'] or '-':10} {row_['class'] or '-':18} {times} {bundle:6}  "
            f"{row_['what']}; {row_['note'][:160]}")


def say(text):
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
