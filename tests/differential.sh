#!/usr/bin/env bash
# The simulator's API server against a real etcd and kube-apiserver, on loopback, without root: `tests/differential.sh [N [FROM]]`
# compares N random sequences of requests. Both programs end with this script.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

count=${1:-300} from=${2:-1}
bin=$(tests/tools/build.sh)
dir=$(mktemp -d)
pids=()
# nothing of them is kept; an API server that is asked to end waits for minutes for the etcd that has ended
trap 'for pid in "${pids[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done; wait 2>/dev/null; rm -rf "$dir"' EXIT

# below the range from which the kernel gives ports to connections: none of those takes one before it is listened on
free_ports() {
  python3 - <<'PYTHON'
import random, socket
held = []
while len(held) < 3:
    s = socket.socket()
    try:
        s.bind(("127.0.0.1", random.randrange(20000, 32000)))
        held.append(s)
    except OSError:
        pass
print(*(s.getsockname()[1] for s in held))
PYTHON
}
read -r etcd peer api < <(free_ports)

"$bin/etcd" --data-dir "$dir/etcd" --listen-client-urls "http://127.0.0.1:$etcd" --advertise-client-urls "http://127.0.0.1:$etcd" \
  --listen-peer-urls "http://127.0.0.1:$peer" --initial-advertise-peer-urls "http://127.0.0.1:$peer" \
  --initial-cluster "default=http://127.0.0.1:$peer" --unsafe-no-fsync --log-level error >"$dir/etcd.log" 2>&1 &
pids+=($!)

openssl genrsa -out "$dir/sa.key" 2048 2>/dev/null
token=$(openssl rand -hex 16)
printf '%s,admin,admin,system:masters\n' "$token" >"$dir/tokens"
"$bin/kube-apiserver" --etcd-servers "http://127.0.0.1:$etcd" --bind-address 127.0.0.1 --secure-port "$api" --cert-dir "$dir/certs" \
  --token-auth-file "$dir/tokens" --authorization-mode RBAC --service-cluster-ip-range 10.96.0.0/24 \
  --service-account-key-file "$dir/sa.key" --service-account-signing-key-file "$dir/sa.key" \
  --service-account-issuer https://kubernetes.default.svc --disable-admission-plugins ServiceAccount >"$dir/apiserver.log" 2>&1 &
pids+=($!)

ready=
for _ in $(seq 600); do
  curl -sk -H "Authorization: Bearer $token" "https://127.0.0.1:$api/readyz" 2>/dev/null | grep -q '^ok$' && ready=yes && break
  kill -0 "${pids[1]}" 2>/dev/null || { tail -n 5 "$dir/apiserver.log"; exit 1; }
  sleep 0.2
done
[[ -n $ready ]] || { echo "kube-apiserver was not ready within two minutes" >&2; tail -n 5 "$dir/apiserver.log" "$dir/etcd.log"; exit 1; }

cat >"$dir/kubeconfig" <<KUBECONFIG
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:$api", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: "$token"}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
KUBECONFIG
# shellcheck disable=SC2086
KUBECONFIG=$dir/kubeconfig ${SIM:-cargo test --locked --release -p operator --test sim --} differential "$count" --from "$from"
