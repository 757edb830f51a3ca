#!/usr/bin/env python3
"""Mutants of the operator: each breaks a rule on purpose, and the simulator must notice by the property that is named.

    operator/tests/mutants.py            all of them
    operator/tests/mutants.py NAME…      some of them
    operator/tests/mutants.py --check    only: does every mutation still find its place in the source?

All of mutants.toml are built at once into one program, in a copy of the tree: `EXPRESSION` becomes `if mutant(N) { NEW } else
{ EXPRESSION }`, and $MUTANT says which of them a run of it is. The product's own source knows nothing of this.
$MUTANTS_CARGO are cargo's flags where the release profile is not wanted.
Ends with `N passed, N failed`; a mutant that survives is a failure, and so is one that does not compile.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".toml")
TREE = ROOT / "target" / "mutants"
SECONDS_MAX = 900
SWITCH = '''
/// Is this run the mutant of that number? (Only in the copy that tests/mutants.py makes.)
pub fn mutant(number: usize) -> bool {
    static CHOSEN: std::sync::LazyLock<Option<usize>> =
        std::sync::LazyLock::new(|| std::env::var("MUTANT").ok().and_then(|text| text.parse().ok()));
    *CHOSEN == Some(number)
}
'''


def mutated(text, number, mutant):
    """The text with the mutant in it, or None if its place is not there exactly once."""
    before, old, after = re.fullmatch(r"(.*)⟦(.*)⟧(.*)", mutant["at"], re.DOTALL).groups()
    if text.count(before + old + after) != 1:
        return None
    choice = f"if crate::mutant({number}) {{ {mutant['new']} }} else {{ {old} }}"
    choice = choice if old.endswith(";") else f"({choice})"
    return text.replace(before + old + after, before + choice + after)


def weave(mutants):
    """The changed files by path, and what found no place."""
    files, lost = {}, []
    for number, mutant in enumerate(mutants):
        path = Path("operator/src") / mutant["file"]
        text = files.get(path) or (ROOT / path).read_text()
        if mutated((ROOT / path).read_text(), number, mutant) is None:
            lost.append(f"{mutant['name']}: {path} does not hold exactly once: {mutant['at']!r}")
            continue
        woven = mutated(text, number, mutant)
        if woven is None:
            lost.append(f"{mutant['name']}: another mutant stands in its place in {path}")
        else:
            files[path] = woven
    return files, lost


def build(files):
    """The program with all mutants in it."""
    shutil.rmtree(TREE, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in filter(None, listed.split("\0")):
        if (ROOT / file).is_file():
            (TREE / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, TREE / file)
    for path, text in files.items():
        (TREE / path).write_text(text)
    lib = TREE / "operator/src/lib.rs"
    lib.write_text(lib.read_text() + SWITCH)
    # a folder of its own: the mutants' library is of the same name as ours, and cargo would take it for ours
    environment = dict(os.environ, CARGO_TARGET_DIR=str(ROOT / "target/mutants-build"))
    # the list that `make test` builds: with another one cargo would choose other features and build the world once more
    packages = [f"--package={package}" for package in (ROOT / "tests/packages.txt").read_text().split()]
    flags = os.environ.get("MUTANTS_CARGO", " ".join(["--release", *packages]))
    command = ["cargo", "test", "--locked", *flags.split(), "--test", "sim", "--no-run"]
    built = subprocess.run(command, cwd=TREE, env=environment, capture_output=True, text=True)
    found = re.search(r"Executable .*\((.*)\)", built.stderr)
    if built.returncode != 0 or not found:
        sys.exit("the mutants do not compile:\n" + "\n".join(built.stderr.splitlines()[-60:]))
    program = TREE / "sim"
    shutil.copy2(ROOT / found.group(1) if not found.group(1).startswith("/") else found.group(1), program)
    return program


def hunt(program, number, mutant):
    """(caught?, words): runs until the named property is violated; `only` asks for all that is violated on the way."""
    command = [program, "hunt-all" if mutant.get("only") else "hunt", mutant["property"]]
    environment = dict(os.environ, MUTANT=str(number))
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX)
    except subprocess.TimeoutExpired:
        return False, f"not caught within {SECONDS_MAX} s"
    found = re.search(r"^violated: (.*)$", ran.stdout, re.MULTILINE)
    properties = found.group(1).split() if found else []
    wanted = mutant["property"].split("|")
    by = [name for name in wanted if name in properties]
    if not by:
        return False, f"survived {mutant['property']}" + (f", seen by {' '.join(properties)}" if properties else "")
    if mutant.get("only") and properties != wanted:
        return False, f"meant for {mutant['property']} alone, seen by {' '.join(properties)}"
    first = next((line.strip() for line in ran.stdout.splitlines() if re.search(rf"\b{by[0]}:", line)), "")
    where = re.search(r"^FAILED (.*)$", ran.stdout, re.MULTILINE)
    return True, f"by {by[0]}{' alone' if mutant.get('only') else ''} in {where.group(1) if where else '?'}: {first[:110]}"


def main():
    mutants = tomllib.loads(TABLE.read_text())["mutant"]
    files, lost = weave(mutants)
    words = sys.argv[1:]
    if lost or words == ["--check"]:
        print("\n".join(lost) or f"{len(mutants)} mutants find their place")
        return 1 if lost else 0
    program = build(files)
    sane = subprocess.run([program, "once"], capture_output=True, text=True)
    if sane.returncode != 0:
        sys.exit("the program fails without any mutant:\n" + sane.stdout[-3000:])
    chosen = [(n, m) for n, m in enumerate(mutants) if not words or m["name"] in words]
    failed = 0
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for (_, mutant), (caught, told) in zip(chosen, pool.map(lambda pair: hunt(program, *pair), chosen)):
            failed += not caught
            print(f"{'caught' if caught else 'FAILED':9} {mutant['name']:30} {told}", flush=True)
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return 1 if failed or not chosen else 0


sys.exit(main())
