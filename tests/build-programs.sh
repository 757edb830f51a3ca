#!/usr/bin/env bash
# The programs whose images the cluster stories run: agent and engine (dynamic: they open NVML and CUDA at run time), and the operator
# (static). Agent and operator as small as they go. Progress on stderr; a build of what is already built takes a second.
#
#   build-programs.sh            all of them
#   build-programs.sh operator   the operator's alone
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'programs: %s\n' "$*" >&2; }

arch=$(uname -m)
target=$arch-unknown-linux-musl

if command -v rustup >/dev/null && ! rustup target list --installed | grep -qx "$target"; then
  say "rustup target add $target"
  rustup target add "$target" >&2
fi

what=${1:-all}
case $what in all | operator) ;; *) say "unknown word '$what' (none, or operator)"; exit 2 ;; esac

if [ "$what" = all ]; then
  started=$SECONDS
  # All packages of the release profile at once, as run-all.sh tests them: with another list cargo would choose other features of the
  # dependencies and build them once more.
  say '[1/3] truebeat, truebeat-agent, truebeat-engine (release)'
  mapfile -t packages < <(sed 's/^/--package=/' tests/packages.txt)
  cargo build --release --locked "${packages[@]}" --bins
  say "[1/3] after $((SECONDS - started)) s"
  # Three processes of it run beside every engine: the program that pods have is optimised for size, as a whole, and what runs lies side
  # by side (2c). The linker that knows the last is the toolchain's own, which it has on this architecture alone.
  started=$SECONDS
  say '[2/3] truebeat-agent (agent)'
  order=()
  if [ "$arch" = x86_64 ]; then
    # under a name that is new when the order is, or cargo would not link again
    list=$PWD/target/agent-order-$(sha256sum agent/order.txt | cut -c 1-16).txt
    cp agent/order.txt "$list"
    order=(-C "link-arg=-Wl,--symbol-ordering-file=$list" -C link-arg=-Wl,--no-warn-symbol-ordering)
  fi
  cargo rustc --profile agent --locked -p agent --bin truebeat-agent -- "${order[@]}"
  say "[2/3] after $((SECONDS - started)) s"
fi

# `ring` compiles C for this target; it includes nothing of a C library, so the machine's own compiler will do.
started=$SECONDS
say "[3/3] truebeat-operator (image, static: $target)"
export "CC_${target//-/_}=${CC:-gcc}"
# Where the sources lie is nobody's business, and must not be in the program (S5).
upper=${target//-/_}
export "CARGO_TARGET_${upper^^}_RUSTFLAGS=--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo --remap-path-prefix=$PWD=/truebeat"
export "CFLAGS_${target//-/_}=-ffile-prefix-map=${CARGO_HOME:-$HOME/.cargo}=/cargo"
cargo build --profile image --locked --target "$target" -p operator --bin truebeat-operator
say "[3/3] after $((SECONDS - started)) s"
