#!/usr/bin/env python3
"""Mutants of the operator: each one breaks a rule on purpose, in a copy of the tree, and the simulator must notice.

    operator/tests/mutants.py            all of them
    operator/tests/mutants.py NAME…      some of them
    operator/tests/mutants.py --check    only: does every mutation still find its place in the source?

Ends with `N passed, N failed`; a mutant that survives is a failure, and so is one that does not compile.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = "operator/src/"
PASS = SRC + "controllers/inference_deployment/"

# name, file, what stands there, what shall stand there, which property it breaks
MUTANTS = [
    ("delete-without-uid", SRC + "client.rs", "uid: Some(uid.to_owned()), resource_version: None", "uid: None, resource_version: None", "P8"),
    ("pod-patch-without-uid", PASS + "execute.rs", '"uid": patch.uid, "annotations"', '"annotations"', "P8"),
    ("lease-ignored", SRC + "client.rs", "if verb.writes() && !self.leadership.may_write()", "if verb.writes() && self.leadership.contact_age().is_none()", "P14"),
    ("lease-kept-too-long", SRC + "leader/mod.rs", "RENEW_DEADLINE: Duration = Duration::from_secs(10)", "RENEW_DEADLINE: Duration = Duration::from_secs(60)", "P14"),
    ("deleted-lease-grabbed", SRC + "leader/lease.rs", "< record.duration.max(LEASE_DURATION) => Decision::Wait", "< Duration::ZERO => Decision::Wait", "P14 (B4)"),
    ("budget-off-by-one", PASS + "grants.rs", "let free = slots.saturating_sub(", "let free = (slots + 1).saturating_sub(", "P15"),
    ("fleet-share-ignored", PASS + "mod.rs", "Some(&fleet), calls.wall.now()", "None.or(Some(&fleet).filter(|_| false)), calls.wall.now()", "P15"),
    ("cache-instead-of-quorum", SRC + "client.rs", "let params = ListParams::default().labels(labels);", "let params = ListParams::default().labels(labels).match_any();", "P2"),
    ("pods-told-before-stored", PASS + "mod.rs", "stored = execute::status(calls, infd, early).await.map_err(named)?;", "stored = execute::status(calls, infd, early).await.unwrap_or(stored);", "I2, P1"),
    ("generation-forgotten", PASS + "status.rs", "        observed_generation: generation,", "        observed_generation: 1,", "P13"),
    ("writes-in-peace", PASS + "plan.rs", "(!same).then_some(child)", "Some(child).filter(|_| same || !same)", "P7"),
    ("last-one-unmarked", PASS + "escalate.rs", "[only] => vec![only.uid.clone()],", "[_only] => Vec::new(),", "I3"),
    ("orphan-left-open", SRC + "controllers/incidents/plan.rs", 'else { return Some("PodGone") };', "else { return None };", "P13"),
    ("privileged", PASS + "build/pod.rs", '"allowPrivilegeEscalation": false', '"allowPrivilegeEscalation": true', "P9"),
    ("slow-look-lost", PASS + "mod.rs", "RECHECK_QUIET: Duration = Duration::from_secs(300)", "RECHECK_QUIET: Duration = Duration::from_secs(300_000)", "P3"),
    ("failure-forgotten", SRC + "controllers/queue.rs", "self.due.remove(&key);\n                now + pause", "self.due.remove(&key);\n                now + pause * 10_000", "P4"),
]


def mutate(tree, mutant):
    _, file, old, new, _ = mutant
    text = (ROOT / file).read_text()
    if text.count(old) != 1:
        return f"{file} holds {text.count(old)} times: {old!r}"
    (tree / file).write_text(text.replace(old, new))
    return None


def run(tree, mutant):
    """The verdict on one mutant: None when it was caught."""
    name, file, _, _, prop = mutant
    fault = mutate(tree, mutant)
    if fault:
        return fault
    environment = dict(os.environ, CARGO_TARGET_DIR=str(ROOT / "target"))
    profile = os.environ.get("MUTANTS_PROFILE", "--release").split()
    cargo = ["cargo", "test", "--quiet", "--locked", *profile, "-p", "operator", "--test", "sim"]
    try:
        built = subprocess.run([*cargo, "--no-run"], cwd=tree, env=environment, capture_output=True, text=True)
        if built.returncode != 0:
            return "does not compile: " + built.stderr[-2000:]
        ran = subprocess.run([*cargo, "--", "hunt"], cwd=tree, env=environment, capture_output=True, text=True)
        if ran.returncode == 0:
            return f"survived: {prop} is not watched well enough"
        seen = [line.strip() for line in ran.stdout.splitlines() if line.startswith("    ")]
        print(f"caught    {name:26} {(seen or ['(no words)'])[0][:130]}", flush=True)
        return None
    finally:
        shutil.copy2(ROOT / file, tree / file)
        os.utime(tree / file)


def main():
    words = sys.argv[1:]
    if words == ["--check"]:
        faults = [f"{m[0]}: {m[1]}" for m in MUTANTS if (ROOT / m[1]).read_text().count(m[2]) != 1]
        print("\n".join(faults) or f"{len(MUTANTS)} mutations find their place")
        return 1 if faults else 0
    tree = ROOT / "target" / "mutants"
    shutil.rmtree(tree, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in filter(None, listed.split("\0")):
        if (ROOT / file).is_file():
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, tree / file)
    chosen = [m for m in MUTANTS if not words or m[0] in words]
    failed = 0
    for mutant in chosen:
        fault = run(tree, mutant)
        if fault:
            failed += 1
            print(f"FAILED    {mutant[0]:26} {fault}", flush=True)
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return 1 if failed or not chosen else 0


sys.exit(main())
