#!/usr/bin/env bash
# What `make test-gpu` and `make bench-gpu` run on a machine with a GPU, out of the folder that bundle.sh made; at most ten minutes. Results go
# to OUT (default: out beside this file). The exit status is 0 only if everything passed.
#
#   run.sh test|bench
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${OUT:-$here/out}
mkdir -p "$out"
export TRUEBEAT_KERNELS=$here TRUEBEAT_GOLDEN=$here/golden
failed=()

part() { # name, seconds it may take, command…
  local name=$1 seconds=$2 status=0
  shift 2
  printf '\n== %s\n' "$name"
  timeout --kill-after=10 "$seconds" "$@" 2>&1 | tee "$out/$name.log"
  status=${PIPESTATUS[0]}
  [ "$status" -eq 0 ] || { failed+=("$name"); printf '%s FAILED (status %d)\n' "$name" "$status"; }
}

command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/device.txt"
case ${1:-} in
  test)
    # each operation and each model against the CPU oracle, on the device
    part ops 240 "$here/cuda-tests" --ignored --test-threads=1 --nocapture
    part spin 90 "$here/gpu" --kernels "$here" spin-check
    part signature 200 "$here/gpu" --kernels "$here" signature --out "$out/signature.jsonl" --seconds 15
    if command -v compute-sanitizer >/dev/null; then
      part sanitizer 60 compute-sanitizer --error-exitcode 9 "$here/cuda-tests" --ignored --test-threads=1 products
    else
      echo 'compute-sanitizer is not here: memory was not checked by it'
    fi
    ;;
  bench) part bench 580 "$here/gpu" --kernels "$here" bench --seconds 8 ;;
  *) printf 'usage: %s test|bench\n' "$0" >&2; exit 2 ;;
esac
if [ ${#failed[@]} -gt 0 ]; then
  printf '\nfailed: %s\n' "${failed[*]}"
  exit 1
fi
printf '\nall parts passed; results in %s\n' "$out"
