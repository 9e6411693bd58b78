"""The configuration files of the node's components, written when they differ from what they should be."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

import yaml

from local.errors import Problem
from local.node import layout, pki
from local.tools.pins import CNI_FOLDERS, CNI_PACKAGE, CNI_PLUGINS

CONTAINERD = layout.CONFIG / "containerd.toml"
KUBELET = layout.CONFIG / "kubelet.yaml"
PROXY = layout.CONFIG / "kube-proxy.yaml"
CNI = layout.CONFIG / "cni"


def write() -> None:
    """Write all of them."""
    layout.CONFIG.mkdir(parents=True, exist_ok=True)
    CNI.mkdir(exist_ok=True)
    contents = {
        CONTAINERD: _containerd(),
        CNI / "10-trainyard.conflist": json.dumps(_cni(), indent=2),
        layout.CONFIG / "resolv.conf": f"nameserver {layout.DNS_SERVICE}\n",
        KUBELET: yaml.safe_dump(_kubelet()),
        PROXY: yaml.safe_dump(_proxy()),
    }
    for path, content in contents.items():
        if not path.exists() or path.read_text() != content:  # kube-proxy ends when its file is written to
            path.write_text(content)
    _store_credentials()


def store_credentials() -> dict[str, str]:
    """Return the object store's credentials under the names that every AWS client reads from the environment."""
    lines = layout.STORE_CREDENTIALS.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def _store_credentials() -> None:
    if layout.STORE_CREDENTIALS.exists():
        return
    descriptor = os.open(layout.STORE_CREDENTIALS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as handle:
        handle.write(f"AWS_ACCESS_KEY_ID={secrets.token_hex(10).upper()}\nAWS_SECRET_ACCESS_KEY={secrets.token_urlsafe(30)}\n")


def _cni_folder() -> str:
    for folder in CNI_FOLDERS:
        if all((Path(folder) / plugin).exists() for plugin in CNI_PLUGINS):
            return folder
    raise Problem(
        f"the CNI plugins {', '.join(CNI_PLUGINS)} are not installed",
        where=" or ".join(CNI_FOLDERS),
        fix=f"apt-get install {CNI_PACKAGE}",
    )


def _containerd() -> str:
    restrict = "true" if not _may_lower_oom_score() else "false"
    return f"""version = 2
root = "{layout.CONTAINERD}"
state = "{layout.RUNTIME}/containerd"
[grpc]
  address = "{layout.CONTAINERD_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{layout.IMAGES["pause"]}"
  restrict_oom_score_adj = {restrict}
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{_cni_folder()}"
    conf_dir = "{CNI}"
"""


def _may_lower_oom_score() -> bool:
    """Tell whether this process has CAP_SYS_RESOURCE (bit 24), which root lacks in some containers and virtual machines."""
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> 24 & 1)


def _cni() -> dict[str, object]:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipMasq": False,  # nothing here needs the world, and the machine's own iptables stay as they are
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": layout.POD_CIDR}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": str(layout.CNI_STATE.parent),
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": layout.NAMESPACE, "plugins": [bridge, ports]}


def _kubelet() -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki.certificate("ca"))},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki.certificate("kubelet")),
        "tlsPrivateKeyFile": str(pki.key("kubelet")),
        "containerRuntimeEndpoint": f"unix://{layout.CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{layout.NAMESPACE}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "clusterDNS": [layout.DNS_SERVICE],
        "clusterDomain": "cluster.local",
        "resolvConf": str(layout.CONFIG / "resolv.conf"),
        # A big build on the same disk must not evict the run: the disk is watched before the node starts.
        "evictionHard": {"memory.available": "200Mi", "nodefs.available": "0%", "imagefs.available": "0%", "nodefs.inodesFree": "0%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "serializeImagePulls": False,
        "nodeStatusUpdateFrequency": "4s",
        "syncFrequency": "2s",  # the controllers wait for their certificates to appear in a mounted Secret
        "volumeStatsAggPeriod": "0s",
    }


def _proxy() -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clusterCIDR": layout.CLUSTER_CIDR,
        "clientConnection": {"kubeconfig": str(layout.kubeconfig("kube-proxy"))},
        "conntrack": {"maxPerCore": 0, "min": 0},  # the limit belongs to the machine
        "oomScoreAdj": 0,
        "hostnameOverride": layout.NODE,
        "metricsBindAddress": "127.0.0.1:10249",
        "healthzBindAddress": "127.0.0.1:10256",
        "detectLocalMode": "ClusterCIDR",
    }
