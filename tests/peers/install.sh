#!/usr/bin/env bash
# Builds llama.cpp for this machine from the sdist of its Python package into ~/.cache/truebeat/llama-cpp-<key>, once per version, content
# of these files and processor (about 10 minutes on 2 cores and 1 GB). Prints the folder of its programs as the only line of standard output.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${TRUEBEAT_CACHE:-$HOME/.cache/truebeat}
say() { printf 'llama.cpp: %s\n' "$*" >&2; }

version=0.3.36 # of llama-cpp-python: brings llama.cpp 0c1e57098
# built for the very processor: another one needs another build
key=$({ cat "$here/install.sh" "$here/llama_cell.cpp"; grep -m1 '^flags' /proc/cpuinfo; } | sha256sum | cut -c 1-12)
home=$cache/llama-cpp-$version-$key
if [ -e "$home/done" ]; then
  printf '%s\n' "$home/bin"
  exit 0
fi
for tool in cmake g++ python3; do
  command -v "$tool" >/dev/null || { say "install $tool first"; exit 1; }
done
free_gb=$(df --output=avail -BG "$HOME" | tail -n 1 | tr -dc 0-9)
[ "$free_gb" -ge 3 ] || { say "needs 3 GB free while it builds; $free_gb GB are free under $HOME"; exit 1; }

say "building $version into $home"
mkdir -p "$home/bin"
sdist=$cache/llama_cpp_python-$version.tar.gz
if [ ! -e "$sdist" ]; then
  python3 -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$home" "llama-cpp-python==$version" >&2
  mv "$home/llama_cpp_python-$version.tar.gz" "$sdist"
fi
tar -xzf "$sdist" -C "$home" "llama_cpp_python-$version/vendor/llama.cpp"
source=$home/llama_cpp_python-$version/vendor/llama.cpp
# GCC 12 takes the stores to the set-up of tiles (AMX) for dead and drops them: the program would die at its first product
sed -i 's/_tile_loadconfig(&tc);/asm volatile("" : : "r"(\&tc) : "memory"); &/' "$source/ggml/src/ggml-cpu/amx/mmq.cpp"
targets=(llama llama-bench llama-quantize llama-server)
cmake -S "$source" -B "$home/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
  -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_APP=OFF -DGGML_CCACHE=OFF \
  -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON >"$home/cmake.log" 2>&1 ||
  { tail -n 20 "$home/cmake.log" >&2; exit 1; }
cmake --build "$home/build" --target "${targets[@]}" -j "${JOBS:-2}" >"$home/build.log" 2>&1 ||
  { tail -n 20 "$home/build.log" >&2; exit 1; }
g++ -O2 -std=c++17 -I "$source/include" -I "$source/ggml/include" "$here/llama_cell.cpp" -o "$home/build/bin/llama_cell" \
  -L "$home/build/bin" -lllama -lggml -lggml-base -lggml-cpu -Wl,-rpath,'$ORIGIN' >&2
cp -a "$home/build/bin/." "$home/bin/"
rm -rf "$home/build" "${home:?}/llama_cpp_python-$version"
touch "$home/done"
printf '%s\n' "$home/bin"
