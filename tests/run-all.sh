#!/usr/bin/env bash
# All of `make test`, in steps; `run-all.sh e2e` runs only what the stories on the cluster need.
#
# Each step writes target/test-logs/STEP.log and says here how far it is; one that fails shows the end of its log, and the others still
# run (but for those that stand on it). The last line counts tests: `N passed, N failed`; a step that fails without a failed test counts
# as one. The exit status is 0 only if nothing failed.
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
child=
trap 'if [ -n "$child" ]; then kill -TERM -- "-$child" 2>/dev/null; wait "$child"; fi; printf "\ninterrupted; logs in %s\n" "$logs"; exit 130' INT TERM

sum() { # word, files…: adds up `… N word;` over all `test result:` lines
  local word=$1
  shift
  cat "$@" 2>/dev/null | sed -n "s/^test result: .* \([0-9][0-9]*\) $word.*/\1/p" | awk '{ n += $1 } END { print n + 0 }'
}

step() { # name, function
  local name=$1 log=$logs/$1.log started=$SECONDS said=$SECONDS status=0 word
  printf '[%s] …\n' "$name"
  set -m # a process group of its own, so that an interrupt takes all of it
  "$2" >"$log" 2>&1 </dev/null &
  child=$!
  set +m
  while kill -0 "$child" 2>/dev/null; do
    sleep 0.5
    if ((SECONDS - said >= 30)); then
      said=$SECONDS
      printf '[%s] %d s … %s\n' "$name" $((SECONDS - started)) "$(tail -n 1 "$log" | cut -c 1-110)"
    fi
  done
  wait "$child" || status=$?
  child=
  word="$(sum passed "$log") passed, $(sum failed "$log") failed"
  [ "$word" != '0 passed, 0 failed' ] || word=
  if [ "$status" -ne 0 ]; then
    failed_steps+=("$name")
    printf '[%s] FAILED; the end of %s:\n' "$name" "$log"
    tail -n 60 "$log"
  fi
  table+=("$(printf '%-10s %5d s  %-7s %s' "$name" $((SECONDS - started)) "$([ "$status" -eq 0 ] && echo ok || echo FAILED)" "$word")")
  printf '[%s] %s after %d s%s\n' "$name" "$([ "$status" -eq 0 ] && echo ok || echo FAILED)" $((SECONDS - started)) "${word:+: $word}"
  return "$status"
}

skip() { # name, why
  table+=("$(printf '%-10s %5s    %-7s %s' "$1" - 'not run' "$2")")
  printf '[%s] not run: %s\n' "$1" "$2"
}

tools() {
  if [ "$(id -u)" != 0 ]; then
    echo 'not root: no cluster can run here, so its programs are not built'
    return 0
  fi
  tests/tools/build.sh
}

lint() {
  cargo fmt --all --check && cargo clippy --workspace --all-targets --locked -- -D warnings
}

# One list for every call in the release profile: with another list cargo would choose other features and build the world once more.
mapfile -t packages < <(sed 's/^/--package=/' tests/packages.txt)

is_story() { # name of a test target
  [[ $1 == e2e || $1 == cluster_* ]]
}

unit() {
  local status=0 tests=(--test tidy) file name
  # cargo takes each file of a tests folder for a target, and each folder with a main.rs
  for file in {crds,operator,agent,engine,cli,tests}/tests/{*.rs,*/main.rs}; do
    name=$(basename "${file%/main.rs}" .rs)
    { [ ! -e "$file" ] || is_story "$name"; } || tests+=(--test "$name")
  done
  # the development profile checks arithmetic for overflow
  cargo test --no-fail-fast --locked -p heartbeat -p vitals || status=1
  cargo test --no-fail-fast --release --locked "${packages[@]}" --lib --bins "${tests[@]}" || status=1
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

programs() {
  tests/build-programs.sh
}

# The simulator's API server against the real one, for some seconds; `make sim-differential` is the long run.
differential() {
  SIM="cargo test --release --locked ${packages[*]} --test sim --" tests/differential.sh 400
}

cluster() {
  local tests=(--test e2e) file
  for file in tests/tests/cluster_*{.rs,/main.rs}; do
    tests+=(--test "$(basename "${file%/main.rs}" .rs)")
  done
  cargo test --no-fail-fast --release --locked "${packages[@]}" "${tests[@]}" -- --nocapture
}

started=$SECONDS
[ "$what" = e2e ] || step lint lint
[ "$what" = e2e ] || step unit unit
[ "$what" = e2e ] || step python python
if step tools tools && step programs programs; then
  [ "$what" = e2e ] || step differential differential
  step cluster cluster
  # the times of the stories are a result, not only a log
  grep -E '^(── |[ ]+[0-9]+ ms  |              |test e2e::)' "$logs/cluster.log"
else
  skip cluster 'its programs did not build'
fi

printf '\n'
printf '%s\n' "${table[@]}"
printf '%-10s %5d s\n' all $((SECONDS - started))
if [ -s target/not-run.jsonl ]; then
  printf '\nstories not run (target/not-run.jsonl):\n'
  sed 's/^/  /' target/not-run.jsonl
fi
passed=$(sum passed "$logs"/*.log)
failed=$(sum failed "$logs"/*.log)
for name in ${failed_steps[@]+"${failed_steps[@]}"}; do
  [ "$(sum failed "$logs/$name.log")" -gt 0 ] || failed=$((failed + 1))
done
grep -hE '^test .* \.\.\. FAILED' "$logs"/*.log | sort -u
printf '\n%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ]
