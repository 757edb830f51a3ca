#!/usr/bin/env bash
# Builds everything that a machine with a GPU needs for `test-gpu`, `sanitize-gpu` and `bench-gpu` into target/gpu: programs, kernels,
# models of the tests and the command itself. That machine needs NVIDIA's driver and nothing else. Runs here at once where there is a driver.
#
#   bundle.sh test|sanitize|bench
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
what=${1:-}
case $what in test | sanitize | bench) ;; *) printf 'usage: %s test|sanitize|bench\n' "$0" >&2; exit 2 ;; esac

image=$(kernels/build.sh)
mapfile -t packages < <(sed 's/^/--package=/' tests/packages.txt)
build=(--release --locked "${packages[@]}" --features engine/cuda)
cargo build "${build[@]}" --bin gpu --bin truebeat
test=$(cargo test "${build[@]}" --test cuda --no-run --message-format=json |
  python3 -c 'import json, sys
print(next(m["executable"] for m in map(json.loads, sys.stdin) if m.get("executable") and m["target"]["name"] == "cuda"))')

rm -rf target/gpu
mkdir -p target/gpu
cp target/release/{gpu,truebeat} "$image" tests/gpu/{run.sh,peer.py,big_model.py} target/gpu/
cp "$test" target/gpu/cuda-tests
# what travels may be 64 MiB with the sources; names of functions stay for whoever reads a stack
strip --strip-debug target/gpu/{gpu,truebeat,cuda-tests}
cp -r engine/tests/golden target/gpu/golden
target/release/truebeat demo-model target/gpu/m --arch llama >/dev/null
du -sh target/gpu | awk '{ print "target/gpu: " $1 }'

if ! ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1'; then
  printf 'no NVIDIA driver here: copy target/gpu to a machine that has one and run `run.sh %s` there; nothing was tested\n' "$what" >&2
  exit 3
fi
exec target/gpu/run.sh "$what"
