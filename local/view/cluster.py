"""The cluster, read: the Jobs of runs with their Workloads, pods and events, and the queues, all as the API server's own objects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException
from kubernetes.config.kube_config import load_kube_config
from urllib3.exceptions import HTTPError
from urllib3.util.retry import Retry

from local.errors import Problem

Obj = dict[str, Any]
"""An object as the API server gives it."""

RUN, ROLE = "trainyard.dev/run", "trainyard.dev/role"
DRILL = "drill"
"""Role of the Jobs of restore drills. They are about a run and not part of it: what they say is not in its ledger."""
_KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
_NO_ROUTE = 404


@dataclass(frozen=True)
class RunObjects:
    """One run as the cluster knows it: its newest Job of a role and what belongs to it."""

    name: str
    role: str
    """train or prepare."""
    job: Obj
    workload: Obj | None = None
    pods: list[Obj] = field(default_factory=list)
    events: list[Obj] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        """The namespace of the Job."""
        return self.job["metadata"]["namespace"]


class Cluster:
    """The API server of one kubeconfig; every call is a read."""

    def __init__(self, kubeconfig: str | Path) -> None:
        """Load the kubeconfig; nothing is asked yet."""
        configuration = Configuration()
        try:
            load_kube_config(config_file=str(kubeconfig), client_configuration=configuration, persist_config=False)
        except (ConfigException, OSError) as broken:
            raise Problem(f"The kubeconfig cannot be used: {broken}", where=str(kubeconfig), fix="make up") from broken
        # The client would take a proxy of the environment. Its CA comes from the kubeconfig alone: urllib3 reads no environment.
        configuration.proxy = None
        configuration.retries = Retry(total=1, backoff_factor=0.2)  # type: ignore[assignment]  # annotated as int, handed to urllib3
        self._api = ApiClient(configuration)

    def runs(self, run: str | None = None) -> list[RunObjects]:
        """Return the runs (all, or one by name), an entry a role, each with its newest Job, oldest Job first."""
        selector = f"{RUN}={run}" if run else RUN
        jobs = self._list("/apis/batch/v1/jobs", labelSelector=selector)
        if not jobs:
            return []
        pods = self._list("/api/v1/pods", labelSelector=selector)
        return assemble(jobs, self._list(f"{_KUEUE}/workloads"), pods, self._list("/api/v1/events"))

    def drills(self) -> list[Obj]:
        """Return the Jobs of restore drills, the newest last."""
        return sorted(self._list("/apis/batch/v1/jobs", labelSelector=f"{ROLE}={DRILL}"), key=_created)

    def cluster_queues(self) -> list[Obj]:
        """Return the ClusterQueues; none where Kueue is not installed."""
        return self._list(f"{_KUEUE}/clusterqueues")

    def log(self, pod: Obj, *, follow: bool) -> Iterator[str]:
        """Yield the log lines of a pod's first container, as they come when `follow`."""
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/log"
        params = {"container": pod["spec"]["containers"][0]["name"], "follow": follow or None}
        response = self._request(path, params, timeout=None if follow else 30)
        try:
            rest = b""
            for chunk in response.response.stream(amt=None, decode_content=True):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            if rest:
                yield rest.decode(errors="replace")
        finally:
            response.response.close()

    def said(self, runs: Iterable[RunObjects]) -> list[str]:
        """Return what the newest pod of each entry has said so far: newer than the stored ledger, and all there is of a bad start."""
        lines: list[str] = []
        for pod in (run.pods[-1] for run in runs if run.pods and has_begun(run.pods[-1])):
            with suppress(ApiException, HTTPError):  # The pod may be gone by now.
                lines += self.log(pod, follow=False)
        return lines

    def _list(self, path: str, **params: str) -> list[Obj]:
        try:
            return json.loads(self._request(path, params, timeout=15).read())["items"]
        except ApiException as refused:
            if refused.status == _NO_ROUTE:
                return []
            raise

    def _request(self, path: str, params: Mapping[str, Any], timeout: float | None) -> Any:
        query = [(key, str(value).lower() if isinstance(value, bool) else value) for key, value in params.items() if value is not None]
        call = self._api.param_serialize("GET", path, query_params=query, auth_settings=["BearerToken"])
        # A followed log has no end: only the connection is given a limit.
        try:
            response = self._api.call_api(*call, _request_timeout=timeout or (5, None))
        except (HTTPError, OSError) as broken:
            cause = str(getattr(broken, "reason", broken)).rpartition(": ")[2]
            raise Problem(
                f"The cluster does not answer: {cause}", where=str(self._api.configuration.host), fix="start it again with `make up`"
            ) from broken
        if not 200 <= response.status <= 299:
            raise ApiException(status=response.status, reason=f"{response.reason}: {response.read().decode(errors='replace')[:500]}")
        return response


def assemble(jobs: list[Obj], workloads: list[Obj], pods: list[Obj], events: list[Obj]) -> list[RunObjects]:
    """Return one entry a run and role (its newest Job), with the Job's Workload, its pods and the events of all of them; no drills."""
    newest = {_identity(job): job for job in sorted(jobs, key=_created) if _identity(job)[1] != DRILL}
    return [_assemble(*identity, job, workloads, pods, events) for identity, job in newest.items()]


def _assemble(name: str, role: str, job: Obj, workloads: list[Obj], pods: list[Obj], events: list[Obj]) -> RunObjects:
    uid = job["metadata"]["uid"]
    workload = next((one for one in workloads if uid in _owners(one)), None)
    own_pods = sorted((pod for pod in pods if uid in _owners(pod)), key=_created)
    related = {uid, *(one["metadata"]["uid"] for one in (workload, *own_pods) if one)}
    own_events = [event for event in events if event.get("involvedObject", {}).get("uid") in related]
    return RunObjects(name, role, job, workload, own_pods, sorted(own_events, key=event_time))


def _identity(job: Obj) -> tuple[str, str]:
    labels = job["metadata"]["labels"]
    return labels[RUN], labels.get(ROLE, "train")


def condition(obj: Obj | None, kind: str) -> Obj | None:
    """Return the condition of that type, whatever its status, or None."""
    conditions = ((obj or {}).get("status") or {}).get("conditions") or []
    return next((one for one in conditions if one.get("type") == kind), None)


def holds(obj: Obj | None, kind: str) -> bool:
    """Say whether the condition of that type is true."""
    return (condition(obj, kind) or {}).get("status") == "True"


def containers(pod: Obj) -> list[Obj]:
    """Return the states of all containers of a pod, those that initialise it first."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def has_begun(pod: Obj) -> bool:
    """Say whether a container of the pod has started, so that there is a log."""
    return any((state.get("state") or {}).keys() & {"running", "terminated"} for state in containers(pod))


def moment(text: str | None) -> float | None:
    """Return a time of the API server as unix seconds."""
    return datetime.fromisoformat(text).timestamp() if text else None


def event_time(event: Obj) -> float:
    """Return when an event happened last."""
    series = (event.get("series") or {}).get("lastObservedTime")
    stamps = (series, event.get("lastTimestamp"), event.get("eventTime"), event["metadata"].get("creationTimestamp"))
    return next((when for when in map(moment, stamps) if when is not None), 0.0)


def _created(obj: Obj) -> str:
    return obj["metadata"].get("creationTimestamp") or ""


def _owners(obj: Obj) -> list[str]:
    return [owner.get("uid", "") for owner in obj["metadata"].get("ownerReferences") or []]
