"""The node's processes as a table: what each is called, how it is started, in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from local.node import configs, host, layout, pki, processes
from local.tools import locate


@dataclass(frozen=True)
class Component:
    """One process of the node."""

    name: str
    command: Callable[[], list[str]]
    environment: Callable[[], dict[str, str]] = field(default=dict)
    grace: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""

    def start(self) -> None:
        """Start it inside the node's network namespace."""
        processes.start(self.name, host.inside(*self.command()), self.environment())


def _etcd() -> list[str]:
    return [
        str(locate("etcd")),
        f"--data-dir={layout.ETCD}",
        "--listen-client-urls=http://127.0.0.1:2379",
        "--advertise-client-urls=http://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--initial-advertise-peer-urls=http://127.0.0.1:2380",
        "--initial-cluster=default=http://127.0.0.1:2380",
        "--unsafe-no-fsync",  # survives the death of the process, not of the machine: right for a node that `make up` makes anew
        "--log-level=warn",
    ]


def _apiserver() -> list[str]:
    return [
        str(locate("kubernetes").with_name("kube-apiserver")),
        "--etcd-servers=http://127.0.0.1:2379",
        f"--bind-address={layout.NODE_ADDRESS}",
        f"--advertise-address={layout.NODE_ADDRESS}",
        f"--secure-port={layout.API_PORT}",
        f"--tls-cert-file={pki.certificate('apiserver')}",
        f"--tls-private-key-file={pki.key('apiserver')}",
        f"--client-ca-file={pki.certificate('ca')}",
        f"--kubelet-client-certificate={pki.certificate('apiserver-kubelet-client')}",
        f"--kubelet-client-key={pki.key('apiserver-kubelet-client')}",
        f"--kubelet-certificate-authority={pki.certificate('ca')}",
        "--kubelet-preferred-address-types=InternalIP",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged",
        f"--service-cluster-ip-range={layout.SERVICE_CIDR}",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={layout.PKI / 'service-account.pub'}",
        f"--service-account-signing-key-file={pki.key('service-account')}",
        f"--requestheader-client-ca-file={pki.certificate('ca')}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={pki.certificate('front-proxy-client')}",
        f"--proxy-client-key-file={pki.key('front-proxy-client')}",
        "--profiling=false",
    ]


def _controller_manager() -> list[str]:
    kubeconfig = layout.kubeconfig("kube-controller-manager")
    return [
        str(locate("kubernetes").with_name("kube-controller-manager")),
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        f"--root-ca-file={pki.certificate('ca')}",
        f"--service-account-private-key-file={pki.key('service-account')}",
        f"--cluster-signing-cert-file={pki.certificate('ca')}",
        f"--cluster-signing-key-file={pki.key('ca')}",
        "--use-service-account-credentials",
        "--allocate-node-cidrs",
        f"--cluster-cidr={layout.CLUSTER_CIDR}",
        "--leader-elect=false",
        "--profiling=false",
    ]


def _scheduler() -> list[str]:
    kubeconfig = layout.kubeconfig("kube-scheduler")
    return [
        str(locate("kubernetes").with_name("kube-scheduler")),
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        "--profiling=false",
    ]


def _containerd() -> list[str]:
    return ["containerd", f"--config={configs.CONTAINERD}"]


def _kubelet() -> list[str]:
    return [
        str(locate("kubernetes").with_name("kubelet")),
        f"--config={configs.KUBELET}",
        f"--kubeconfig={layout.kubeconfig('kubelet')}",
        f"--root-dir={layout.KUBELET}",
        f"--hostname-override={layout.NODE}",
        f"--node-ip={layout.NODE_ADDRESS}",
        f"--node-labels=trainyard.dev/node-group={layout.NODE_GROUP}",
    ]


def _proxy() -> list[str]:
    return [str(locate("kubernetes").with_name("kube-proxy")), f"--config={configs.PROXY}"]


def _network_policy() -> list[str]:
    return [
        str(locate("network-policy")),
        f"--kubeconfig={layout.kubeconfig('network-policy')}",
        f"--hostname-override={layout.NODE}",
        f"--service-cluster-ip-range={layout.SERVICE_CIDR}",
        "--iptables-sync-period=30s",
        "--netpol-default-deny",  # a new pod talks to nobody until its rules are in force
    ]


def _store() -> list[str]:
    address = f"{layout.NODE_ADDRESS}:{layout.STORE_PORT}"
    return [str(locate("versitygw")), "--port", address, "--versioning-dir", str(layout.STORE_VERSIONS), str(layout.STORE_DATA)]


def _store_environment() -> dict[str, str]:
    credentials = configs.store_credentials()
    return {"ROOT_ACCESS_KEY": credentials["AWS_ACCESS_KEY_ID"], "ROOT_SECRET_KEY": credentials["AWS_SECRET_ACCESS_KEY"]}


STORE = Component("object-store", _store, _store_environment)
CONTAINERD = Component("containerd", _containerd)
# The API server waits a minute for its watchers to leave; what it was told is in etcd already.
CONTROL_PLANE = (Component("etcd", _etcd), Component("kube-apiserver", _apiserver, grace=1.0))
CONTROLLERS = (
    # After the API server is ready: the controller manager exits when its RBAC rules are not there yet.
    Component("kube-controller-manager", _controller_manager),
    Component("kube-scheduler", _scheduler),
)
NODE = (Component("kubelet", _kubelet), Component("kube-proxy", _proxy))
NETWORK_POLICY = Component("network-policy", _network_policy)
"""After the node is registered: it looks its own node up once, at its start."""
ALL = (CONTAINERD, STORE, *CONTROL_PLANE, *CONTROLLERS, *NODE, NETWORK_POLICY)
"""Every component in the order of starting; they are stopped in the opposite one."""
