#!/usr/bin/env bash
# Installs the official OpenAI client into ~/.cache/truebeat/venv-openai, once per content of requirements.lock (70 MB). Prints the path
# of the environment as its only line of standard output.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${TRUEBEAT_CACHE:-$HOME/.cache/truebeat}
venv=$cache/venv-openai
key=$(sha256sum <"$here/requirements.lock" | cut -c 1-16)
if [ "$(cat "$venv/truebeat.key" 2>/dev/null)" != "$key" ]; then
  mkdir -p "$cache"
  # made beside its place and moved there whole: an interrupted installation leaves nothing that looks like one
  rm -rf "$venv" "$venv.new"
  python3 -m venv "$venv.new" >&2
  "$venv.new/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$here/requirements.lock" >&2
  printf '%s' "$key" >"$venv.new/truebeat.key"
  mv "$venv.new" "$venv"
fi
printf '%s\n' "$venv"
