#!/usr/bin/env bash
# S5: the operator's program built twice is the same, bit for bit: the one that tests/build-programs.sh has left in target/, and one from a
# copy of the sources in a folder of another name, with another home of cargo's. The digest of the second is kept by its inputs
# (${TRUEBEAT_CACHE:-~/.cache/truebeat}/reproducible): later builds of the same sources, wherever, are held against it. Progress on stderr.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'reproducible: %s\n' "$*" >&2; }

program=$(uname -m)-unknown-linux-musl/image/truebeat-operator
first=target/$program
[ -f "$first" ] || { say "no $first: run tests/build-programs.sh first"; exit 1; }

digest() { sha256sum "$1" | cut -c 1-64; }
parts=(operator crds role)
others=$(cargo tree --locked --package operator --edges normal,build --prefix none --format '{p}' |
  sed -n "s|^[^ ]* v[^ ]* ($PWD/\\([^)]*\\)).*|\\1|p" | sort -u | tr '\n' ' ')
[ "$others" = 'crds operator role ' ] || { say "the operator is made of $others: tell tests/reproducible.sh"; exit 1; }
inputs=$(
  { git ls-files -z "${parts[@]}" Cargo.toml Cargo.lock rust-toolchain.toml tests/build-programs.sh | xargs -0 sha256sum; rustc -vV; ${CC:-gcc} --version; } |
    sha256sum | cut -c 1-16
)
known=${TRUEBEAT_CACHE:-$HOME/.cache/truebeat}/reproducible/$inputs

again() { # into the file $known
  local scratch there kept from
  scratch=$(mktemp -d)
  # shellcheck disable=SC2064  # this scratch
  trap "rm -rf '$scratch'" EXIT
  there=$scratch/the-same-sources-elsewhere
  say "building these sources once more, in $there"
  mkdir "$there" "$scratch/home"
  git ls-files -z | xargs -0 cp --parents --target-directory="$there"
  # the packages themselves are not what is compared: what has been downloaded is used
  for kept in registry/index registry/cache config.toml; do
    from=${CARGO_HOME:-$HOME/.cargo}/$kept
    [ ! -e "$from" ] || { mkdir -p "$(dirname "$scratch/home/$kept")" && cp -r "$from" "$scratch/home/$kept"; }
  done
  (cd "$there" && CARGO_HOME=$scratch/home CARGO_TARGET_DIR=$there/target tests/build-programs.sh operator)
  mkdir -p "$(dirname "$known")"
  digest "$there/target/$program" >"$known.part.$$"
  mv "$known.part.$$" "$known"
}

[ -f "$known" ] || again
if [ "$(digest "$first")" = "$(cat "$known")" ]; then
  say "two builds, the same $(stat -c %s "$first") bytes: $(cat "$known")"
  printf 'test result: ok. 1 passed; 0 failed;\n'
else
  say "two builds of the same sources differ: $(digest "$first") in target/, $(cat "$known") elsewhere (kept in $known)"
  printf 'test result: FAILED. 0 passed; 1 failed;\n'
  exit 1
fi
