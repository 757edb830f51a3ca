#!/usr/bin/env bash
# Takes what others published out of llama.cpp's sources into ~/.cache/truebeat/published-<key>, once per version and content of these
# files: vocabularies with texts and their tokens, chat templates; and beside them an environment with jinja2. The sources are those of
# the sdist that tests/peers builds (77 MB, fetched once for both). Prints the folder as its only line of standard output.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${TRUEBEAT_CACHE:-$HOME/.cache/truebeat}
version=$(sed -n 's/^version=\([0-9.]*\).*/\1/p' "$here/../../../tests/peers/install.sh")
[ -n "$version" ] || { echo 'tests/peers/install.sh names no version of llama-cpp-python' >&2; exit 1; }
key=$({ echo "$version"; cat "$here/install.sh" "$here/requirements.lock"; } | sha256sum | cut -c 1-12)
home=$cache/published-$key
if [ ! -e "$home" ]; then
  mkdir -p "$cache"
  # made beside its place and moved there whole: an interrupted installation leaves nothing that looks like one
  new=$home.new-$$
  trap 'rm -rf "$new"' EXIT
  mkdir "$new"
  sdist=$cache/llama_cpp_python-$version.tar.gz
  if [ ! -e "$sdist" ]; then
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python --dest "$new" \
      "llama-cpp-python==$version" >&2
    mv "$new/llama_cpp_python-$version.tar.gz" "$sdist"
  fi
  tar -xzf "$sdist" -C "$new" --strip-components=4 "llama_cpp_python-$version/vendor/llama.cpp/models"
  python3 -m venv "$new/venv" >&2
  "$new/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$here/requirements.lock" >&2
  mv "$new" "$home"
fi
printf '%s\n' "$home"
