#!/usr/bin/env bash
# What `make test-gpu`, `sanitize-gpu` and `bench-gpu` run on a machine with a GPU, out of the folder that bundle.sh made; at most nine minutes, however
# much of it hangs. Results go to OUT (default: out beside this file). The exit status is 0 only if everything passed.
#
#   run.sh test|bench     all parts of it
#   run.sh PART…          these parts alone: ops models serve ranks signature spin sanitize
#                         copy times-1b times-8b bench-1b bench-1b-eager bench-8b ready peer
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${OUT:-$here/out}
mkdir -p "$out"
export TRUEBEAT_KERNELS=$here TRUEBEAT_GOLDEN=$here/golden
gpu=("$here/gpu" --kernels "$here")
# NCCL is no part of a bundle: the system's, or that of a PyTorch
nccl=$(ldconfig -p 2>/dev/null | sed -n 's/.*=> \(.*libnccl\.so\.2\)$/\1/p' | head -n 1)
if [ -z "$nccl" ]; then
  nccl=$(python3 -c 'import glob, nvidia; print(*(f for p in nvidia.__path__ for f in glob.glob(p + "/nccl/lib/libnccl.so.2")))' 2>/dev/null)
  nccl=${nccl%% *}
  [ -z "$nccl" ] || export LD_LIBRARY_PATH=${nccl%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
# tests of the device that there must be at least: a bundle without them would pass everything
tests_min=23
seconds_a_figure=${SECONDS_A_FIGURE:-8}
deadline=$((SECONDS + ${SECONDS_MAX:-520}))
failed=()

part() { # name, seconds it may take, command…
  local name=$1 seconds=$2 status=0 left=$((deadline - SECONDS)) began=$SECONDS
  shift 2
  if [ "$left" -lt 5 ]; then
    failed+=("$name (no time left)")
    return
  fi
  printf '\n== %s\n' "$name"
  timeout --kill-after=5 $((seconds < left ? seconds : left)) "$@" 2>&1 | tee "$out/${name//[^a-z0-9_-]/.}.log"
  status=${PIPESTATUS[0]}
  printf '%s: status %d after %d s\n' "$name" "$status" $((SECONDS - began))
  [ "$status" -eq 0 ] || failed+=("$name (status $status)")
}

device_tests() { # each in a process of its own: an illegal address spoils its context for all that comes behind it
  local list
  list=$("$here/cuda-tests" --list --ignored 2>/dev/null | sed -n 's/: test$//p')
  if [ "$(wc -l <<<"$list")" -lt "$tests_min" ]; then
    failed+=("$1 (fewer than $tests_min tests are there)")
  fi
  if [ -z "$nccl" ]; then
    echo 'NCCL is not here: nothing was brought by it' | tee -a "$out/not-run.txt"
    list=$(grep -v '^ranks::nccl' <<<"$list")
  fi
  for name in $(if [ "$1" = models ]; then grep '^models' <<<"$list"; else grep -v '^models' <<<"$list"; fi); do
    part "$name" 60 "$here/cuda-tests" --ignored --exact "$name" --nocapture
  done
}

serve() { # the program itself
  part serve 150 "${gpu[@]}" serve --program "${PROGRAM:-$here/truebeat}" --model "$here/m" --out "$out/serve"
}

ranks() { # two of the program on one device
  part ranks 120 "${gpu[@]}" ranks --program "${PROGRAM:-$here/truebeat}" --model "$here/m" --out "$out/ranks"
}

ready() { # 8B from memory
  local big=/dev/shm/truebeat-ready.$$
  if [ "$(df --output=avail -BG /dev/shm | tail -n 1 | tr -dc 0-9)" -lt 20 ]; then
    echo 'no 20 GB of memory files here: the start of an 8B model was not measured' | tee -a "$out/not-run.txt"
    return
  fi
  python3 "$here/big_model.py" "$here/m" "$big" || failed+=("ready (no model)")
  part ready 90 "${gpu[@]}" ready --program "${PROGRAM:-$here/truebeat}" --model "$big"
  rm -rf "$big"
}

sanitize() { # races and misalignment are what the host's twin of a kernel cannot show
  local sanitizer list
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
  if [ -z "$sanitizer" ]; then
    echo 'compute-sanitizer is not here: races and misalignment were not looked for' | tee "$out/not-run.txt"
    return
  fi
  list=$("$here/cuda-tests" --list --ignored 2>/dev/null | sed -n 's/: test$//p' | grep -E '^(paged::attention|rounded::|ops::placing|sampled|products::warpgroups)')
  for name in $list; do
    part "racecheck-$name" 150 "$sanitizer" --tool racecheck --error-exitcode 9 "$here/cuda-tests" --ignored --exact "$name"
  done
  part memcheck 40 "$sanitizer" --tool memcheck --error-exitcode 9 "$here/cuda-tests" --ignored --test-threads=1 products
}

# what others make of the same device: PyTorch, its products by cuBLAS, its steps by CUDA graphs
peer() {
  if ! python3 -c 'import torch' 2>/dev/null; then
    echo 'PyTorch is not here: nothing was compared with it' | tee -a "$out/not-run.txt"
    return
  fi
  part peer 150 python3 "$here/peer.py" --seconds "$seconds_a_figure"
}

# the last process to leave a GPU shuts it down, and the next waits for seconds until it is up again
{ exec 8<>/dev/nvidia0; } 2>/dev/null || true
{
  command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  ldconfig -p 2>/dev/null | grep -E 'libcuda\.|libnvidia-ml\.'
  ldd --version 2>/dev/null | head -n 1
  printf 'LD_LIBRARY_PATH=%s\n' "${LD_LIBRARY_PATH:-}"
} | tee "$out/device.txt"

# what spins may leave a GPU that answers nobody: last
case ${1:-} in
  test) set -- ops models serve ranks signature spin ;;
  bench) set -- copy times-1b bench-1b bench-1b-eager bench-8b ready peer ;;
esac
for what in "$@"; do
  case $what in
    ops | models) device_tests "$what" ;;
    serve | ranks | ready | sanitize | peer) "$what" ;;
    copy) part copy 30 "${gpu[@]}" copy ;;
    times-1b) part times-1b 60 "${gpu[@]}" ops --sizes 1b ;;
    times-8b) part times-8b 60 "${gpu[@]}" ops --sizes 8b ;;
    bench-1b) part bench-1b 240 "${gpu[@]}" bench --sizes 1b --seconds "$seconds_a_figure" ;;
    bench-1b-eager) part bench-1b-eager 240 "${gpu[@]}" bench --sizes 1b --eager --seconds "$seconds_a_figure" ;;
    bench-8b) part bench-8b 240 "${gpu[@]}" bench --sizes 8b --seconds "$seconds_a_figure" ;;
    signature) part signature 200 "${gpu[@]}" signature --out "$out/signature.jsonl" --seconds $((2 * seconds_a_figure)) ;;
    spin) part spin 90 "${gpu[@]}" spin-check ;;
    *) printf 'unknown part %s\n' "$what" >&2; exit 2 ;;
  esac
done
[ $# -gt 0 ] || { printf 'usage: %s test|bench|PART…\n' "$0" >&2; exit 2; }
if [ ${#failed[@]} -gt 0 ]; then
  printf '\nfailed:'
  printf ' %s;' "${failed[@]}"
  printf '\n'
  exit 1
fi
printf '\nall parts passed; results in %s\n' "$out"
