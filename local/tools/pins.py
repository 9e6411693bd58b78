"""What the embedded platform is made of: every tool, its version, and how it is built.

The versions of Go modules are in `tools/*/go.mod` (and their hashes in `go.sum`); this table says which program of which module becomes
which tool, and repeats the version only where a program does not know its own and must be stamped with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

KUBERNETES = "1.36.3"
KUEUE = "0.19.2"
JOBSET = "0.12.0"
PULUMI = "3.259.0"
KUBERNETES_PROVIDER = "4.25.0"
COREDNS = "1.14.7"
GO = (1, 26)
"""The oldest Go that the go.mod files accept; the wheel of `tools/requirements.txt` is used when PATH has none as new."""

_PROVIDER_MODULE = "github.com/pulumi/pulumi-kubernetes/provider/v4"
_PROVIDER_COMMAND = "cmd/pulumi-resource-kubernetes"
_NEVER_RUN = ("github.com/pb33f", "github.com/aws", "github.com/Azure", "github.com/envoyproxy", "cloud.google.com/go")
"""What the engine links for backends of other kinds than a folder: 40 % of its compile time, so it is not optimised."""

_SDK = "github.com/pulumi/pulumi/sdk/v3"
_GENERATED_SDK = "github.com/pulumi/pulumi-kubernetes/sdk/v4/..."


@dataclass(frozen=True)
class Extra:
    """A file or folder of a module that a tool needs beside its binary: charts, schemas, helper scripts."""

    module: str
    source: str
    name: str
    executable: bool = False
    pinned_by: str = ""
    """The folder of `tools/` whose go.mod pins the module, when it is not the tool's own."""


@dataclass(frozen=True)
class Tool:
    """One program: built from `package` of the Go module in `tools/<module>`, installed as `name` and under each of `links`."""

    name: str
    version: str
    module: str
    package: str
    ldflags: tuple[str, ...] = ()
    gcflags: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    extras: tuple[Extra, ...] = ()
    plugin: str = ""
    """For a plugin of the engine: its kind and name. It goes into the engine's plugin folder; on PATH it would be warned of."""
    expected_seconds: int = 5
    """Build time on two cores beside the image build, in the order of this table; used only to say how much is left."""
    path_minimum: tuple[int, int] | None = None
    """A user's own program of this name on PATH is taken when it is of this version or newer within the same major version."""
    path_companions: tuple[str, ...] = field(default=())
    """Programs that must stand beside the user's own one for it to be taken."""


# The longest shared half first: etcd and the Kubernetes daemons fill the build cache that Kueue, JobSet, KWOK, CoreDNS and the network
# policy controller then use, because all of them stand in one go.mod.
TOOLS: tuple[Tool, ...] = (
    Tool("etcd", "3.6.14", "node", "go.etcd.io/etcd/server/v3", expected_seconds=45),
    Tool(
        "kubernetes",
        KUBERNETES,
        "node",
        "./kubernetes",
        ldflags=(
            f"-X k8s.io/component-base/version.gitVersion=v{KUBERNETES}",
            f"-X k8s.io/component-base/version.gitMajor={KUBERNETES.split('.')[0]}",
            f"-X k8s.io/component-base/version.gitMinor={KUBERNETES.split('.')[1]}",
            "-X k8s.io/component-base/version.gitTreeState=clean",
            f"-X k8s.io/client-go/pkg/version.gitVersion=v{KUBERNETES}",
        ),
        links=("kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubelet", "kubectl"),
        expected_seconds=280,
    ),
    Tool(
        "kueue",
        KUEUE,
        "node",
        "sigs.k8s.io/kueue/cmd/kueue",
        ldflags=(f"-X sigs.k8s.io/kueue/pkg/version.GitVersion=v{KUEUE}",),
        extras=(Extra("sigs.k8s.io/kueue", "charts/kueue", "chart"),),
        expected_seconds=50,
    ),
    Tool(
        "jobset",
        JOBSET,
        "node",
        "sigs.k8s.io/jobset",
        extras=(Extra("sigs.k8s.io/jobset", "charts/jobset", "chart"),),
    ),
    Tool(
        "kwok",
        "0.8.0",
        "node",
        "sigs.k8s.io/kwok/cmd/kwok",
        extras=(Extra("sigs.k8s.io/kwok", "kustomize/stage", "stages"),),
        expected_seconds=6,
    ),
    Tool(
        "coredns",
        COREDNS,
        "node",
        "./coredns",
        ldflags=(f"-X github.com/coredns/coredns/coremain.GitCommit=v{COREDNS}",),
        expected_seconds=6,
    ),
    Tool("network-policy", "kube-router 2.10.0", "node", "./network-policy"),
    Tool("pause", "1.0.0", "node", "./pause", expected_seconds=1),
    Tool("versitygw", "1.7.0", "versitygw", ".", expected_seconds=19),
    Tool(
        "pulumi",
        PULUMI,
        "pulumi",
        "github.com/pulumi/pulumi/pkg/v3/cmd/pulumi",
        ldflags=(f"-X github.com/pulumi/pulumi/sdk/v3/go/common/version.Version=v{PULUMI}",),
        gcflags=tuple(f"{module}/...=-N -l -dwarf=false" for module in _NEVER_RUN),
        # The host of dynamic resources, which the engine looks for beside itself.
        extras=(Extra(_SDK, "python/dist/pulumi-resource-pulumi-python", "pulumi-resource-pulumi-python", True),),
        expected_seconds=134,
        path_minimum=(3, 259),
        path_companions=("pulumi-language-python",),
    ),
    Tool(
        "pulumi-language-python",
        "3.79.0",
        "language-python",
        "github.com/pulumi/pulumi/sdk/v3/python/cmd/pulumi-language-python",
        # The host is the last one that was tagged in its module; the script beside it is that of the engine's version.
        extras=(Extra(_SDK, "python/cmd/pulumi-language-python-exec", "pulumi-language-python-exec", True, "pulumi"),),
        plugin="language-python",
        expected_seconds=13,
    ),
    Tool(
        "pulumi-resource-kubernetes",
        KUBERNETES_PROVIDER,
        "kubernetes-provider",
        ".",
        ldflags=(f"-X {_PROVIDER_MODULE}/pkg/version.Version={KUBERNETES_PROVIDER}",),
        # The generated SDK is a hundred megabytes of Go behind three component resources that nothing here uses: not worth optimising.
        gcflags=(f"{_GENERATED_SDK}=-N -l -dwarf=false",),
        extras=(
            Extra(_PROVIDER_MODULE, f"{_PROVIDER_COMMAND}/schema.json", "schema.json"),
            Extra(_PROVIDER_MODULE, f"{_PROVIDER_COMMAND}/terraform-mapping.json", "terraform-mapping.json"),
        ),
        plugin="resource-kubernetes",
        expected_seconds=220,
    ),
)

SYSTEM_PROGRAMS: dict[str, str] = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ipset": "ipset",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "mount": "mount",
    "tar": "tar",
}
"""Program -> Debian package, for what the node takes from the distribution."""

IMAGE_PROGRAMS: dict[str, str] = {
    "buildah": "buildah",
    "skopeo": "skopeo",
    "mmdebstrap": "mmdebstrap",
}
"""Program -> Debian package, for what only the image build needs."""

CNI_PLUGINS = ("bridge", "host-local", "loopback", "portmap")
CNI_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni")
CNI_PACKAGE = "containernetworking-plugins"
