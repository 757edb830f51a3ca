#!/usr/bin/env bash
# The cluster's programs (control plane, node, container runtime) built from Go modules, cached by version outside the clone.
#
#   build.sh           build what is missing; progress on stderr; the folder of the binaries is the one line on stdout
#   build.sh --with-kwok  the same, and kwok
#   build.sh --print   print that folder, build nothing
#   build.sh --packages  install the system packages alone, as far as this machine lets us
#   build.sh --check   exit 0 if nothing is missing, else 1 and the names of what is
#
# The cache: ${TRUEBEAT_CACHE:-~/.cache/truebeat}/tools/<key>/bin, where <key> is a hash of every go.mod and go.sum, of recipe.sh and of
# the Go version. Each group of programs has a key of its own as well (tools/groups/<group>-<key>), so that a new version of one group
# builds that group alone: bin/ holds links. Modules stay in .../go/mod. Go's own build cache (.../go/build, 4 GB) only shortens the next
# change of versions; it is dropped after a complete build unless TRUEBEAT_GO_CACHE=keep.
# KUBEBUILDER_ASSETS, if it holds etcd, kube-apiserver and kubectl, is used for those three (as links); the others are still built.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source-path=SCRIPTDIR source=recipe.sh
. "$here/recipe.sh"
cache=${TRUEBEAT_CACHE:-$HOME/.cache/truebeat}

say() { printf 'tools: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

command -v go >/dev/null || die 'no Go in PATH: install Go 1.26.6 or later (the cluster is built from Go modules)'
key=$(
  cd "$here"
  { cat ./*/go.mod ./*/go.sum recipe.sh; go env GOVERSION GOARCH; } | sha256sum | cut -c1-16
)
root=$cache/tools/$key
plain=$root/bin
bin=$plain
assets=
if [ -n "${KUBEBUILDER_ASSETS:-}" ]; then
  assets=$KUBEBUILDER_ASSETS
  for name in etcd kube-apiserver kubectl; do
    [ -x "$assets/$name" ] || { say "KUBEBUILDER_ASSETS=$KUBEBUILDER_ASSETS has no $name: not used"; assets=; break; }
  done
  [ -z "$assets" ] || bin=$root/bin-$(sha256sum <<<"$assets" | cut -c1-8)
fi

group_dir() { # group: where its programs are kept
  local hash
  hash=$(
    cd "$here/$1"
    { cat go.mod go.sum; awk -v group="$1" '$1 == group' <<<"$BINARIES"; ldflags "$1"; go env GOVERSION GOARCH; } | sha256sum | cut -c1-16
  )
  echo "$cache/tools/groups/$1-$hash"
}

missing() { # prints the rows that are not built yet
  local group name package cgo tags
  while read -r group name package cgo tags; do
    [ -n "$group" ] || continue
    [ -x "$bin/$name" ] || printf '%s %s %s %s %s\n' "$group" "$name" "$package" "$cgo" "$tags"
  done <<<"$BINARIES"
}

# The system packages that a build or a node cannot do without, each with the file that tells it is there.
apt_packages() {
  local wanted=()
  command -v nft >/dev/null || [ -x /usr/sbin/nft ] || wanted+=(nftables) # kube-proxy
  command -v ip >/dev/null || [ -x /usr/sbin/ip ] || wanted+=(iproute2)   # the cluster's network namespace
  command -v iptables >/dev/null || [ -x /usr/sbin/iptables ] || wanted+=(iptables) # kube-router, as the next
  command -v ipset >/dev/null || [ -x /usr/sbin/ipset ] || wanted+=(ipset)
  command -v openssl >/dev/null || wanted+=(openssl)                      # the cluster's keys
  if [ ! -x "$bin/runc" ]; then
    command -v pkg-config >/dev/null || wanted+=(pkg-config)
    [ -e /usr/include/seccomp.h ] || wanted+=(libseccomp-dev) # runc refuses every sandbox without seccomp
  fi
  [ ${#wanted[@]} -gt 0 ] || return 0
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "not installed and cannot be installed from here (no root or no apt-get): ${wanted[*]}"
    return 0 # the build or the harness says what that costs
  fi
  say "apt-get install ${wanted[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -y -qq --no-install-recommends "${wanted[@]}" >&2 ||
    { apt-get update -qq >&2 && apt-get install -y -qq --no-install-recommends "${wanted[@]}" >&2; }
}

# A folder with the given three and our own others, which are not built twice.
use_kubebuilder_assets() {
  local name group package cgo tags
  [ -n "$assets" ] || return 0
  for name in etcd kube-apiserver kubectl; do
    ln -sfn "$assets/$name" "$bin/$name"
  done
  while read -r group name package cgo tags; do
    if [ -n "$group" ] && [ ! -e "$bin/$name" ] && [ -x "$plain/$name" ]; then
      mkdir -p "$(dirname "$bin/$name")"
      ln "$plain/$name" "$bin/$name"
    fi
  done <<<"$BINARIES"
  say "etcd, kube-apiserver, kubectl from KUBEBUILDER_ASSETS=$assets"
}

build_one() { # group name package cgo tags
  local group=$1 name=$2 package=$3 cgo=$4 tags=$5 kept part started=$SECONDS
  [ "$tags" = - ] && tags=
  kept=$(group_dir "$group")/$name
  part=$kept.part.$$
  mkdir -p "$(dirname "$bin/$name")" "$(dirname "$kept")"
  if [ -x "$kept" ]; then
    ln -f "$kept" "$bin/$name"
    return 0
  fi
  (
    cd "$here/$group"
    CGO_ENABLED=$cgo nice -n 5 go build -trimpath -tags "$tags" -ldflags "$(ldflags "$group")" -o "$part" "$package" >&2
  ) || die "$name did not build (go build $package in tests/tools/$group)"
  mv -f "$part" "$kept"
  ln -f "$kept" "$bin/$name"
  say "$name built in $((SECONDS - started)) s"
}

build_all() {
  mkdir -p "$bin"
  exec 9>"$root/lock"
  flock 9 # another run may be building the same thing: wait, then find it built
  apt_packages
  use_kubebuilder_assets
  local rows count=0 total group name package cgo tags
  rows=$(missing)
  [ -n "$rows" ] || { say "0 to build ($bin)"; return 0; }
  total=$(wc -l <<<"$rows")
  export GOMODCACHE=$cache/go/mod GOCACHE=$cache/go/build GOTOOLCHAIN=local
  # what a debugger reads is stripped in the end, so none is made: the same program for a ninth less of the compiler's time
  export GOFLAGS='-buildvcs=false -modcacherw -mod=readonly -gcflags=all=-dwarf=false'
  while read -r group name package cgo tags; do
    count=$((count + 1))
    say "[$count/$total] $name"
    build_one "$group" "$name" "$package" "$cgo" "$tags"
  done <<<"$rows"
  [ "${TRUEBEAT_GO_CACHE:-}" = keep ] || { say "dropping Go's build cache"; rm -rf "$cache/go/build"; }
  say "$total built ($bin)"
}

case ${1:-} in
  --print) ;;
  --packages) apt_packages ;;
  --with-kwok)
    BINARIES+=$KWOK
    build_all
    ;;
  --check)
    rows=$(missing)
    [ -z "$rows" ] || die "not built: $(awk '{printf "%s ", $2}' <<<"$rows")"
    ;;
  '') build_all ;;
  *) die "unknown word '$1' (none, --with-kwok, --print, --packages or --check)" ;;
esac
echo "$bin"
