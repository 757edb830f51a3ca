#!/usr/bin/env bash
# Compiles the kernels ahead of time, for sm_80, sm_90a, sm_100 and sm_120 and as PTX for what comes later, with an nvcc from Python wheels
# (100 MB once; an image takes half a minute). Both are kept under ${TRUEBEAT_CACHE:-~/.cache/truebeat}, each by the content of what it is made of.
# Prints the path of the image as its only line of standard output.
#
#   build.sh           build what is missing
#   build.sh --nvcc    install the compiler alone, and print its path
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${TRUEBEAT_CACHE:-$HOME/.cache/truebeat}
say() { printf 'kernels: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

case ${1:-} in '' | --nvcc) ;; *) die "unknown word '$1' (none, or --nvcc)" ;; esac
[ "$(uname -m)" = x86_64 ] || die "the wheels of requirements.lock are for x86_64, and this is $(uname -m)"
for tool in python3 g++; do
  command -v "$tool" >/dev/null || die "no $tool in PATH: install it (nvcc calls g++, the wheels come through python3)"
done

tool=$cache/nvcc-$(sha256sum "$here/requirements.lock" | cut -c 1-16)
mkdir -p "$cache"
exec 9>"$cache/nvcc.lock"
flock 9 # another build may be installing the same thing: wait, then find it there
if [ ! -e "$tool/done" ]; then
  free_mb=$(df --output=avail -BM "$cache" | tail -n 1 | tr -dc 0-9)
  [ "$free_mb" -ge 800 ] || die "needs 800 MB free while it installs (300 MB afterwards); $free_mb MB are free under $cache"
  say "installing nvcc into $tool (300 MB)"
  rm -rf "$tool"
  python3 -m venv "$tool" >&2 || die 'python3 has no venv (package python3-venv)'
  "$tool/bin/pip" install --quiet --no-deps --require-hashes -r "$here/requirements.lock" >&2 || die 'the wheels could not be installed'
  touch "$tool/done"
fi
nvcc=$(echo "$tool"/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)
[ -x "$nvcc" ] || die "no nvcc in $tool: remove that folder and try again"
if [ "${1:-}" = --nvcc ]; then
  printf '%s\n' "$nvcc"
  exit 0
fi

# PTX is for what is newer than all of these: of a generation whose kernels wait for each other (`follow` of common.cuh), as graphs count on
key=$(python3 -B "$here/key.py")
image=$cache/kernels/truebeat-kernels-$key.fatbin
flags=(-O3 -std=c++17 -fmad=false -Werror all-warnings)
targets=(-gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_100,code=sm_100
  -gencode arch=compute_120,code=sm_120 -gencode arch=compute_90,code=compute_90)
# one word of the recipe changed: another image under the same name would be a lie
recipe=$(printf '%s\n' "${flags[@]}" "${targets[@]}" "$(basename "$tool")" | sha256sum | cut -c 1-16)
if [ "$(cat "$image.recipe" 2>/dev/null)" = "$recipe" ] && [ -s "$image" ]; then
  printf '%s\n' "$image"
  exit 0
fi

say "compiling $image"
mkdir -p "$cache/kernels"
part=$image.part.$$
trap 'rm -f "$part" "$part.usage"' EXIT
PATH=$(dirname "$nvcc"):$PATH nvcc -fatbin "${flags[@]}" "${targets[@]}" --resource-usage "$here/all.cu" -o "$part" >"$part.usage" 2>&1 ||
  { cat "$part.usage" >&2; die 'nvcc failed'; }
# every kernel for every device, and nothing spilled to memory
for name in $(sed -n 's/^ENTRY(\(.*\))$/\1/p' "$here/kernels.inc"); do
  for arch in sm_80 sm_90a sm_100 sm_120; do
    grep -q "Compiling entry function '$name' for '$arch'" "$part.usage" || die "the image lacks $name for $arch"
  done
done
if grep -E '[1-9][0-9]* bytes spill' "$part.usage" >&2; then die 'a kernel spills registers'; fi
mv "$part" "$image"
printf '%s' "$recipe" >"$image.recipe"
say "$(grep -c "for 'sm_80'" "$part.usage") kernels for 4 devices and as PTX, $(stat -c %s "$image") bytes"
printf '%s\n' "$image"
