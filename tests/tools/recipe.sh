# shellcheck shell=bash
# What is built, and how: sourced by build.sh and part of the cache key, so a change here builds anew; keep talk out of it.
# One go.mod per group, because the groups pin different versions of the same libraries.
# shellcheck disable=SC2034  # read by build.sh

K8S_VERSION=v1.36.3

# group | binary (path under bin/) | package | cgo | tags
BINARIES='
k8s        kube-apiserver           k8s.io/kubernetes/cmd/kube-apiserver                                0 -
k8s        kube-controller-manager  k8s.io/kubernetes/cmd/kube-controller-manager                       0 -
k8s        kube-scheduler           k8s.io/kubernetes/cmd/kube-scheduler                                0 -
k8s        kubectl                  k8s.io/kubernetes/cmd/kubectl                                       0 -
k8s        kubelet                  k8s.io/kubernetes/cmd/kubelet                                       0 -
k8s        kube-proxy               k8s.io/kubernetes/cmd/kube-proxy                                    0 -
etcd       etcd                     go.etcd.io/etcd/server/v3                                           0 -
containerd containerd               github.com/containerd/containerd/v2/cmd/containerd                  0 -
containerd containerd-shim-runc-v2  github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2     0 -
containerd ctr                      github.com/containerd/containerd/v2/cmd/ctr                         0 -
runc       runc                     github.com/opencontainers/runc                                      1 seccomp
cni        cni/bridge               github.com/containernetworking/plugins/plugins/main/bridge          0 -
cni        cni/loopback             github.com/containernetworking/plugins/plugins/main/loopback        0 -
cni        cni/host-local           github.com/containernetworking/plugins/plugins/ipam/host-local      0 -
kube-router kube-router             github.com/cloudnativelabs/kube-router/v2/cmd/kube-router           0 -
helm       helm                     helm.sh/helm/v4/cmd/helm                                            0 -
prometheus prometheus               github.com/prometheus/prometheus/cmd/prometheus                     0 remove_all_sd,enable_kubernetes_sd
prometheus promtool                 github.com/prometheus/prometheus/cmd/promtool                       0 remove_all_sd,enable_kubernetes_sd
lua        glua                     github.com/yuin/gopher-lua/cmd/glua                                 0 -
prometheus-adapter prometheus-adapter sigs.k8s.io/prometheus-adapter/cmd/adapter                    0 -
'

# Built when it is asked for (build.sh --with-kwok): the simulated nodes of `make bench-scale`.
KWOK='
kwok       kwok                     sigs.k8s.io/kwok/cmd/kwok                                           0 -
'

# Without these -X flags the binaries report v0.0.0-master+$Format, which `kubectl version` cannot parse.
ldflags() { # group
  printf -- '-s -w'
  [ "$1" = k8s ] || return 0
  local package
  for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    printf ' -X %s.gitVersion=%s -X %s.gitMajor=1 -X %s.gitMinor=36' "$package" "$K8S_VERSION" "$package" "$package"
    printf ' -X %s.gitTreeState=clean -X %s.gitCommit=unknown -X %s.buildDate=2026-01-01T00:00:00Z' "$package" "$package" "$package"
  done
}
