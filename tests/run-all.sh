#!/usr/bin/env bash
# All of `make test`, in steps; `run-all.sh e2e` runs only what the stories on the cluster need.
#
# First everything is built, side by side as far as cargo's own lock allows: where one step loads from afar, links or optimises a whole
# program on one core, the others have the rest of the machine. Then the tests run, in four rows that share nothing (a cluster has a
# name, a namespace and a folder of its own): most of each is waiting for something real. The stories on the cluster go before the rest
# on the processor: they are told in seconds of a real node, where a probe that comes too late is an answer.
# Each step writes target/test-logs/STEP.log and says here how far it is; one that fails shows the end of its log, and the others still
# run (but for those that stand on it). The last line counts tests: `N passed, N failed`; a step that fails without a failed test counts
# as one. A test that this machine cannot show says so in target/not-run.jsonl and ends well: those are listed, counted in a line of their own,
# and not among those that passed. The exit status is 0 only if nothing failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

what=${1:-all}
case $what in all | e2e) ;; *) printf 'usage: %s [e2e]\n' "$0" >&2; exit 2 ;; esac

logs=target/test-logs
mkdir -p "$logs"
rm -f "$logs"/*.log target/not-run.jsonl
unset TRUEBEAT_REGENERATE INSTA_UPDATE
export INSTA_UPDATE=no CARGO_TERM_COLOR=never

table=()
failed_steps=()
# of the steps that run: process (and group) by name, and when each began and last spoke
declare -A children=() began=() spoke=()
trap 'interrupted' INT TERM HUP

interrupted() {
  local name
  for name in "${!children[@]}"; do kill -TERM -- "-${children[$name]}" 2>/dev/null; done
  wait
  printf '\ninterrupted; logs in %s\n' "$logs"
  exit 130
}

sum() { # word, files…: adds up `… N word;` over all `test result:` lines
  local word=$1
  shift
  cat "$@" 2>/dev/null | sed -n "s/^test result: .* \([0-9][0-9]*\) $word.*/\1/p" | awk '{ n += $1 } END { print n + 0 }'
}

# Functions, by whose names the steps go, side by side until all have ended. The status is 0 only if all went well.
side_by_side() {
  local name status=0
  for name in "$@"; do
    printf '[%s] …\n' "$name"
    began[$name]=$SECONDS spoke[$name]=$SECONDS
    set -m # a process group of its own, so that an interrupt takes all of it
    "$name" >"$logs/$name.log" 2>&1 </dev/null &
    children[$name]=$!
    set +m
  done
  while ((${#children[@]})); do
    sleep 0.5
    for name in "${!children[@]}"; do
      if kill -0 "${children[$name]}" 2>/dev/null; then tell "$name"; else end "$name" || status=1; fi
    done
  done
  return "$status"
}

tell() { # name of a step that runs
  ((SECONDS - spoke[$1] >= 30)) || return 0
  spoke[$1]=$SECONDS
  printf '[%s] %d s … %s\n' "$1" $((SECONDS - began[$1])) "$(tail -n 1 "$logs/$1.log" | cut -c 1-110)"
}

end() { # name of a step that has ended
  local name=$1 log=$logs/$1.log seconds=$((SECONDS - began[$1])) status=0 word went=ok
  wait "${children[$name]}" || status=$?
  unset "children[$name]"
  word="$(sum passed "$log") passed, $(sum failed "$log") failed"
  [ "$word" != '0 passed, 0 failed' ] || word=
  if [ "$status" -ne 0 ]; then
    went=FAILED
    failed_steps+=("$name")
    printf '[%s] FAILED; the end of %s:\n' "$name" "$log"
    tail -n 60 "$log"
  fi
  table+=("$(printf '%-13s %5d s  %-7s %s' "$name" "$seconds" "$went" "$word")")
  printf '[%s] %s after %d s%s\n' "$name" "$went" "$seconds" "${word:+: $word}"
  return "$status"
}

skip() { # name, why
  table+=("$(printf '%-13s %5s    %-7s %s' "$1" - 'not run' "$2")")
  printf '[%s] not run: %s\n' "$1" "$2"
}

tools() {
  if [ "$(id -u)" != 0 ]; then
    echo 'not root: no cluster can run here, so its programs are not built'
    return 0
  fi
  tests/tools/build.sh
}

# In the profile of the build: macros, build scripts and the C that these compile are made once for both.
lint() {
  cargo fmt --all --check &&
    cargo clippy --release --workspace --all-targets --features engine/cuda --locked -- -D warnings
}

# One list for every call in the release profile: with another list cargo would choose other features and build the world once more.
mapfile -t packages < <(sed 's/^/--package=/' tests/packages.txt)
crates=(--locked --package=heartbeat --package=vitals) # in the development profile, which checks arithmetic for overflow
release=(--release --locked "${packages[@]}")
unit_tests=(--lib --bins --test tidy)
node_tests=()
api_tests=(--test cluster_security)
# cargo takes each file of a tests folder for a target, and each folder with a main.rs
for file in {crds,operator,agent,engine,cli,tests}/tests/{*.rs,*/main.rs}; do
  [ -e "$file" ] || continue
  name=$(basename "${file%/main.rs}" .rs)
  case $name in
    cluster_security) ;;
    e2e | cluster_*) node_tests+=(--test "$name") ;;
    *) unit_tests+=(--test "$name") ;;
  esac
done

build() {
  local tests=("${node_tests[@]}" "${api_tests[@]}")
  if [ "$what" = all ]; then
    cargo test --no-run "${crates[@]}" || return 1
    tests+=("${unit_tests[@]}")
  fi
  cargo test --no-run "${release[@]}" "${tests[@]}" && tests/build-programs.sh
}

give_way() { # how much: to the rows that have not; inherited by all that this row starts
  renice -n "$1" -p "$BASHPID" >/dev/null
}

unit() {
  local status=0
  give_way 10
  cargo test --no-fail-fast "${crates[@]}" || status=1
  cargo test --no-fail-fast "${release[@]}" "${unit_tests[@]}" || status=1
  return $status
}

# The heartbeat's Python package, by the machine's own python3; its count in the words that `sum` knows.
python() {
  local status=0 out
  out=$(cd heartbeat/python && PYTHONPATH=.:tests python3 -B -m unittest discover -s tests 2>&1) || status=1
  printf '%s\n' "$out" | awk '{ print } /^Ran [0-9]+ test/ { ran = $2 } /^FAILED/ { while (match($0, /[0-9]+/)) {
    bad += substr($0, RSTART, RLENGTH); $0 = substr($0, RSTART + RLENGTH) } }
    END { printf "test result: %s. %d passed; %d failed;\n", bad || !ran ? "FAILED" : "ok", ran - (bad > ran ? ran : bad), bad + !ran }'
  return $status
}

# What needs a real node: the stories, told one after another on one cluster.
cluster() {
  cargo test --no-fail-fast "${release[@]}" "${node_tests[@]}" -- --nocapture
}

# The operator's program built a second time, elsewhere, must be the same (S5). It has all the time that the others take.
reproducible() {
  give_way 19
  tests/reproducible.sh
}

# What needs a real API server but no node: the threat model, and for some seconds the simulator's API server against the real one
# (`make sim-differential` is the long run).
control_plane() {
  local status=0
  give_way 5
  if [ "$what" = all ]; then
    SIM="cargo test ${release[*]} --test sim --" tests/differential.sh 400 || status=1
  fi
  cargo test --no-fail-fast "${release[@]}" "${api_tests[@]}" -- --nocapture || status=1
  return $status
}

went_well() { # name of a step that has ended
  local name
  for name in ${failed_steps[@]+"${failed_steps[@]}"}; do [ "$name" != "$1" ] || return 1; done
}

started=$SECONDS
steps=(build tools)
rows=()
if [ "$what" = all ]; then
  steps=(python lint "${steps[@]}")
  rows+=(unit reproducible)
fi
side_by_side "${steps[@]}"
if went_well tools; then
  rows+=(cluster control_plane)
else
  for name in cluster control_plane; do skip "$name" 'its tools did not build'; done
fi
if went_well build; then
  side_by_side "${rows[@]}"
else
  for name in "${rows[@]}"; do skip "$name" 'it did not build'; done
fi
# the times of the stories are a result, not only a log
grep -sE '^(── |[ ]+[0-9]+ ms  |              |test e2e::)' "$logs/cluster.log"

printf '\n'
printf '%s\n' "${table[@]}"
printf '%-13s %5d s\n' all $((SECONDS - started))
not_run=0
if [ -s target/not-run.jsonl ]; then
  not_run=$(wc -l <target/not-run.jsonl)
  printf '\nnot run (target/not-run.jsonl):\n'
  sed 's/^/  /' target/not-run.jsonl
fi
passed=$(($(sum passed "$logs"/*.log) - not_run))
failed=$(sum failed "$logs"/*.log)
for name in ${failed_steps[@]+"${failed_steps[@]}"}; do
  [ "$(sum failed "$logs/$name.log")" -gt 0 ] || failed=$((failed + 1))
done
# last of all what a reader of a cut log needs: which tests failed, and what each said
grep -hE '^test .* \.\.\. FAILED' "$logs"/*.log | sort -u
sed -n '/^---- .* stdout ----$/,/^failures:$/p' "$logs"/*.log | grep -vE '^(failures:)?$' | cut -c 1-600 | tail -n 40
printf '\n'
[ "$not_run" -eq 0 ] || printf '%d not run\n' "$not_run"
printf '%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ]
