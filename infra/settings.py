"""The shape of a stack's configuration: plain frozen data, the same for every stack."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from infra.quantities import CpuQuantity, MemoryQuantity

_LABEL = r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$"

Label = Annotated[
    str, Field(pattern=_LABEL, description="lower-case letters, digits and '-', at most 40, starting and ending with a letter or digit")
]
Share = Annotated[int, Field(ge=0, le=10_000)]


class Settings(BaseModel):
    """Base of every part: frozen, unknown keys refused, values kept out of messages (they may be secrets)."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, alias_generator=to_camel, populate_by_name=True)


class Images(Settings):
    """Container images. A controller without one uses the image its chart names."""

    trainer: str = Field(description="trainer image, by digest", examples=["registry.example.com/trainer@sha256:<digest>"])
    kueue: str | None = Field(
        None, description="image of the Kueue controller, repository:tag", examples=["registry.k8s.io/kueue/kueue:v0.19.2"]
    )
    jobset: str | None = Field(
        None, description="image of the JobSet controller, repository:tag", examples=["registry.k8s.io/jobset/jobset:v0.12.0"]
    )


class StoreEndpoint(Settings):
    """An S3 endpoint, as seen from this machine and from the pods."""

    endpoint: str = Field(description="URL of the S3 endpoint", pattern=r"^https?://[^/\s]+$", examples=["http://198.18.0.2:7070"])
    cidr: str = Field(
        description="addresses pods may reach it at, CIDR", pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$", examples=["198.18.0.2/32"]
    )
    port: int = Field(description="TCP port pods may reach it at, 1 to 65535", ge=1, le=65535, examples=[7070])
    region: str = Field("us-east-1", description="region name sent with requests", examples=["us-east-1"])


class Storage(Settings):
    """The bucket that holds datasets and checkpoints."""

    bucket: str = Field(
        description="bucket of this stack: 3 to 63 of lower-case letters, digits and '-'",
        pattern=r"^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$",
        examples=["trainyard-local"],
    )
    force_destroy: bool = Field(
        False,
        description="true: `pulumi destroy` deletes the bucket with every checkpoint in it; false: refuses while it holds any",
        examples=[False],
    )


class Chart(Settings):
    """Where a Helm chart comes from."""

    chart: str = Field(
        description="chart folder, oci:// reference, or name in `repository`", examples=["oci://registry.k8s.io/kueue/charts/kueue"]
    )
    version: str | None = Field(None, description="chart version; not used for a folder", examples=["0.19.2"])
    repository: str | None = Field(None, description="URL of the chart repository", examples=["https://charts.example.com"])


class Charts(Settings):
    """The charts of the controllers the platform installs."""

    kueue: Chart = Field(
        description="chart of Kueue", examples=[{"chart": "oci://registry.k8s.io/kueue/charts/kueue", "version": "0.19.2"}]
    )
    jobset: Chart = Field(
        description="chart of JobSet", examples=[{"chart": "oci://registry.k8s.io/jobset/charts/jobset", "version": "0.12.0"}]
    )


class ControllerRequests(Settings):
    """What each controller asks of a node."""

    cpu: CpuQuantity = Field(default="100m", examples=["100m"])
    memory: MemoryQuantity = Field(default="256Mi", examples=["256Mi"])


class NodeShape(Settings):
    """What one node offers to runs: its allocatable resources without what the platform's own pods take."""

    gpus: int = Field(description="GPUs of one node, 1 to 16", ge=1, le=16, examples=[4])
    cpu: CpuQuantity = Field(examples=["44"])
    memory: MemoryQuantity = Field(examples=["170Gi"])


class NodeCount(Settings):
    """How many nodes a group has."""

    min: int = Field(description="fewest nodes, 0 or more", ge=0, le=1000, examples=[0])
    max: int = Field(description="most nodes, 1 or more, not below min", ge=1, le=1000, examples=[2])

    @model_validator(mode="after")
    def _ordered(self) -> NodeCount:
        if self.min > self.max:
            raise ValueError(f"min <= max does not hold: {self.min} > {self.max}; raise max or lower min")
        return self


class Taint(Settings):
    """A taint of the nodes of a group; runs admitted to the group tolerate it."""

    key: str = Field(description="key of the taint", examples=["nvidia.com/gpu"])
    value: str = Field("", description="value of the taint", examples=["present"])
    effect: Literal["NoSchedule", "NoExecute"] = Field("NoSchedule", description="NoSchedule or NoExecute", examples=["NoSchedule"])


class NodeGroup(Settings):
    """Nodes of one shape, one zone and one capacity type. Each node carries the label `trainyard.dev/node-group=<name>`."""

    name: Label = Field(examples=["l4"])
    instance_type: str | None = Field(None, description="instance type, for groups the stack itself creates", examples=["g6.12xlarge"])
    capacity: Literal["on-demand", "spot"] = Field("on-demand", description="on-demand or spot", examples=["on-demand"])
    node: NodeShape = Field(description="what one node offers", examples=[{"gpus": 4, "cpu": "44", "memory": "170Gi"}])
    nodes: NodeCount = Field(description="how many nodes", examples=[{"min": 0, "max": 2}])
    labels: dict[str, str] = Field(default_factory=dict, description="further labels of the nodes", examples=[{"example.com/rack": "a1"}])
    taints: tuple[Taint, ...] = Field((), description="taints of the nodes", examples=[[{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]])


class Team(Settings):
    """A team: its namespace, its queue and its share of GPUs. CPU and memory follow the GPUs in proportion."""

    name: Label = Field(examples=["research"])
    gpus: dict[str, Share] = Field(description="node group -> GPUs guaranteed to the team", examples=[{"local": 2}])
    borrow: dict[str, Share] = Field(
        default_factory=dict, description="node group -> idle GPUs of other teams it may use on top", examples=[{"local": 0}]
    )
    viewers: tuple[str, ...] = Field(
        (), description="groups of the cluster that may read the team's objects and logs", examples=[["researchers"]]
    )


class PlatformConfig(Settings):
    """The whole configuration of a stack."""

    provider: Literal["existing", "eks"] = Field(
        description="existing: a cluster that is already there; eks: one the stack creates", examples=["existing"]
    )
    platform: str | None = Field(
        None,
        description="file with the facts of the embedded platform; its values are defaults of the keys below",
        examples=[".trainyard/platform.json"],
    )
    kubeconfig: str | None = Field(None, description="kubeconfig file of an existing cluster", examples=["~/.kube/config"])
    git_sha: str = Field(
        "unknown", description="revision the trainer image was built from, recorded in the ledger of each run", examples=["abc1234"]
    )
    images: Images | None = Field(
        None, description="container images", examples=[{"trainer": "registry.example.com/trainer@sha256:<digest>"}]
    )
    object_store: StoreEndpoint | None = Field(
        None,
        description="S3 endpoint of an existing cluster",
        examples=[{"endpoint": "http://198.18.0.2:7070", "cidr": "198.18.0.2/32", "port": 7070, "region": "us-east-1"}],
    )
    storage: Storage = Field(description="bucket for datasets and checkpoints", examples=[{"bucket": "trainyard-local"}])
    charts: Charts | None = Field(
        None,
        description="Helm charts of the controllers, kueue and jobset",
        examples=[
            {
                "kueue": {"chart": "oci://registry.k8s.io/kueue/charts/kueue", "version": "0.19.2"},
                "jobset": {"chart": "oci://registry.k8s.io/jobset/charts/jobset", "version": "0.12.0"},
            }
        ],
    )
    controllers: ControllerRequests = Field(
        default_factory=lambda: ControllerRequests(),
        description="CPU and memory each controller asks of a node",
        examples=[{"cpu": "100m", "memory": "256Mi"}],
    )
    node_groups: tuple[NodeGroup, ...] = Field(
        description="groups of equal nodes, preferred first, 1 to 16",
        examples=[[{"name": "local", "node": {"gpus": 2, "cpu": "1500m", "memory": "12Gi"}, "nodes": {"min": 1, "max": 1}}]],
        min_length=1,
        max_length=16,
    )
    teams: tuple[Team, ...] = Field(
        description="teams that share the node groups, 1 or more", examples=[[{"name": "research", "gpus": {"local": 2}}]], min_length=1
    )
    priorities: dict[Label, int] = Field(
        description="priority name -> value; a run of higher value may evict a lower one of its own team",
        examples=[{"standard": 100}],
        min_length=1,
    )
    runs: tuple[str, ...] = Field((), description="run files to deploy", examples=[["runs/smoke.yaml"]])

    def group(self, name: str) -> NodeGroup:
        """Return a node group by name."""
        return next(group for group in self.node_groups if group.name == name)
