"""Names, addresses and folders of the embedded node.

All addresses lie inside the node's own network namespace; the machine sees one link to it. 198.18.0.0/15 is reserved for benchmarks
(RFC 2544), so it collides with no network that a machine is likely to be in.
"""

from __future__ import annotations

from pathlib import Path

from local import paths
from local.tools.pins import COREDNS, JOBSET, KUEUE

NAMESPACE = "trainyard"
"""Name of the network namespace, of the cgroup, and of the folder in /run."""

NODE = "trainyard-local"
NODE_GROUP = "local"
GPUS = 2
"""How many `nvidia.com/gpu` the node advertises. They are simulated: nothing computes on them."""

HOST_LINK, NODE_LINK = "trainyard0", "trainyard1"
HOST_ADDRESS, NODE_ADDRESS, PREFIX = "198.18.0.1", "198.18.0.2", 30
CLUSTER_CIDR, POD_CIDR, SERVICE_CIDR = "10.244.0.0/16", "10.244.0.0/24", "10.96.0.0/16"
API_SERVICE, DNS_SERVICE = "10.96.0.1", "10.96.0.10"
API_PORT, STORE_PORT = 6443, 7070
API = f"https://{NODE_ADDRESS}:{API_PORT}"
STORE = f"http://{NODE_ADDRESS}:{STORE_PORT}"
STORE_REGION = "us-east-1"

ROOT = paths.HOME / "node"
PKI = ROOT / "pki"
CONFIG = ROOT / "config"
LOGS = ROOT / "logs"
PIDS = ROOT / "run"
ETCD = ROOT / "etcd"
CONTAINERD = ROOT / "containerd"
KUBELET = ROOT / "kubelet"
STORE_DATA, STORE_VERSIONS = ROOT / "store" / "data", ROOT / "store" / "versions"
STORE_CREDENTIALS = ROOT / "store.env"
KUBECONFIG = ROOT / "kubeconfig"

RUNTIME = Path("/run") / NAMESPACE
"""Sockets: paths of Unix sockets are limited to some hundred characters, and a checkout may lie deep."""

CONTAINERD_SOCKET = RUNTIME / "containerd.sock"
NETNS = Path("/run/netns") / NAMESPACE
CNI_STATE = Path("/var/lib/cni/networks") / NAMESPACE
CNI_RESULTS = Path("/var/lib/cni/results")
CGROUPS = Path("/sys/fs/cgroup")

IMAGES = {
    "pause": "localhost/trainyard/pause:1.0.0",
    "coredns": f"localhost/trainyard/coredns:v{COREDNS}",
    "kueue": f"localhost/trainyard/kueue:v{KUEUE}",
    "jobset": f"localhost/trainyard/jobset:v{JOBSET}",
}
"""Images with one static binary, made from the tools of the same name."""

MAX_ROOT_LENGTH = 70
"""The kubelet binds sockets below its folder; 108 bytes are all a socket's path may have."""


def kubeconfig(user: str) -> Path:
    """Return the kubeconfig file of a component."""
    return CONFIG / f"{user}.kubeconfig"
