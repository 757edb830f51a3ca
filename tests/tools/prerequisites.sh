#!/usr/bin/env bash
# Is here what `make demo` and `make test` need? Says what is missing and how to get it; as root on Debian it installs the packages
# itself. A fraction of a second when nothing is missing. Go is only needed for the cluster of `make test`: without it the stories on
# the cluster are not run, and said so there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

say() { printf 'prerequisites: %s\n' "$*" >&2; }

missing=()
packages=()
need() { # program, Debian package, what for
  command -v "$1" >/dev/null && return 0
  packages+=("$2")
  missing+=("$1 (package $2): $3")
}

need cc gcc 'a C compiler and linker: zstd and ring are built with it'
need g++ g++ 'a C++ compiler: the tests compile the CUDA kernels for this processor'
need make make 'the two commands'
need python3 python3 "the stranger's engine of demo and tests"
need ld binutils 'linking'
# (Debian keeps what makes environments in a package of its own)
if command -v python3 >/dev/null && ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
  packages+=(python3-venv)
  missing+=('environments of Python (package python3-venv): the official client and the reference run in one')
fi
# a C compiler without the C library's headers builds nothing
if command -v cc >/dev/null && ! printf '#include <stdlib.h>\nint main(void){return 0;}\n' | cc -x c -o /dev/null - 2>/dev/null; then
  packages+=(libc6-dev)
  missing+=('the headers of the C library (package libc6-dev): cc cannot build without them')
fi

if [ ${#packages[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "apt-get install ${packages[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -qq --no-install-recommends "${packages[@]}" >&2 ||
      { apt-get update -qq >&2 && apt-get install -y -qq --no-install-recommends "${packages[@]}" >&2; } ||
      { say "apt-get could not install: ${packages[*]}"; exit 1; }
  else
    printf 'prerequisites: missing: %s\n' "${missing[@]}" >&2
    say 'install these, or run as root on a Debian-like machine'
    exit 1
  fi
fi

channel=$(sed -n 's/^channel *= *"\(.*\)"/\1/p' "$root/rust-toolchain.toml")
if ! command -v cargo >/dev/null; then
  say "no cargo in PATH: install Rust $channel (https://rustup.rs)"
  exit 1
fi
# with rustup this fetches the toolchain of rust-toolchain.toml; without it the version must be there already
if ! version=$(cd "$root" && rustc --version 2>&1); then
  say "rustc does not run: $version"
  say "rust-toolchain.toml asks for $channel: rustup toolchain install $channel"
  exit 1
fi
have=$(awk '{print $2}' <<<"$version")
if [[ $channel =~ ^[0-9] ]] && [ "$(printf '%s\n%s\n' "$channel" "$have" | sort -V | head -n 1)" != "$channel" ]; then
  say "rustc is $have; rust-toolchain.toml asks for $channel or later"
  exit 1
fi

if ! command -v go >/dev/null; then
  say "no Go in PATH: the demo does not need it; 'make test' cannot build the cluster of its stories without Go 1.26.6 or later"
fi
