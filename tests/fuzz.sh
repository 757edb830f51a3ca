#!/usr/bin/env bash
# Every fuzz target for SECONDS under libFuzzer (cargo-fuzz and a nightly compiler), the canary first, which must fail; where those are
# not installed, the same targets under the random damage of fuzz/src/near.rs. New inputs stay under target/fuzz-new.
#   tests/fuzz.sh [SECONDS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
seconds=${1:-60}
if ! cargo +nightly fuzz --version >/dev/null 2>&1; then
  echo "no cargo-fuzz with a nightly compiler here: bounded mutation of the corpus instead"
  TRUEBEAT_FUZZ_SECONDS=$seconds cargo test --locked -p agent -p engine --test sources_fuzz --test model_fuzz -- --nocapture
  exit
fi
fuzz() { cargo +nightly fuzz run --fuzz-dir fuzz "$@"; }
# 1 s for an input and 512 MiB for the process: the sanitizer alone takes most of that
limits=(-max_len=65536 -timeout=1 -rss_limit_mb=512 -print_final_stats=1)
mkdir -p target/fuzz-new/canary
if fuzz canary target/fuzz-new/canary fuzz/corpus/canary -- -max_total_time=60 "${limits[@]}" >target/fuzz-new/canary.log 2>&1; then
  echo "canary: NOT found within 60 s; this fuzzer finds nothing"
  exit 1
fi
grep -q 'the canary sang' target/fuzz-new/canary.log || { tail -n 30 target/fuzz-new/canary.log; exit 1; }
echo "canary: found, as it must be"
failed=0
for target in page exposition ras log_lines trace gguf_model model_folder; do
  mkdir -p "target/fuzz-new/$target"
  log=target/fuzz-new/$target.log
  if fuzz "$target" "target/fuzz-new/$target" "fuzz/corpus/$target" -- -max_total_time="$seconds" "${limits[@]}" >"$log" 2>&1; then
    printf '%s: %s runs in %s s, no failure\n' "$target" \
      "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")" "$seconds"
  else
    failed=1
    printf '%s: FAILED, see %s\n' "$target" "$log"
    tail -n 30 "$log"
  fi
done
exit $failed
