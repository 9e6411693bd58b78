"""Starting, healing and stopping the node. Starting a node that runs heals it: what is missing is started, what runs is left alone."""

from __future__ import annotations

import string
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from local import images
from local.errors import Problem
from local.node import components, configs, host, layout, pki, probe, processes
from local.progress import Progress

_COREDNS = Path(__file__).parent / "manifests" / "coredns.yaml"


def start(progress: Progress) -> list[str]:
    """Bring the node to where a pod runs; return the names of the components that had to be started.

    Raises `Problem` when there is no root, another node is in the way, or a component does not come up.
    """
    host.check()
    running_before = {component.name for component in components.ALL if processes.alive(component.name)}
    with progress.task("node", "network, containerd", quiet_under=2.0), ThreadPoolExecutor(1) as beside:
        start_runtime()
        pki.provide()
        for folder in (layout.STORE_DATA, layout.STORE_VERSIONS, layout.KUBELET):
            folder.mkdir(parents=True, exist_ok=True)
        _start_dead(components.STORE, *components.CONTROL_PLANE)
        loading = beside.submit(images.load_controllers)
        progress.detail("node", "API server")
        probe.until("the API server", probe.api_ready, component="kube-apiserver")
        _start_dead(*components.CONTROLLERS, *components.NODE)
        progress.detail("node", "kubelet")
        probe.until("the object store", probe.store_ready, component="object-store")
        probe.until("the node to be Ready", probe.node_ready, component="kubelet")
        probe.until("its range of pod addresses", probe.has_pod_addresses, component="kube-controller-manager")
        _start_dead(components.NETWORK_POLICY)
        probe.until("network rules", probe.policies_ready, component="network-policy")
        loading.result()
        _advertise_gpus()
        progress.detail("node", "cluster DNS")
        _deploy_dns()
        probe.until("the cluster DNS", probe.dns_ready, component="kubelet")
        _check_all_alive()
        progress.detail("node", "ready: a pod runs")
    return [component.name for component in components.ALL if component.name not in running_before]


def start_runtime() -> None:
    """Bring up what takes images, containerd in the node's network; it needs no tool that has to be built."""
    host.prepare()
    configs.write()
    _start_dead(components.CONTAINERD)
    probe.until("containerd", probe.containerd_ready, component="containerd")


def stop() -> None:
    """End every process of the node and undo what it changed on the machine; its data stay for the next start."""
    for component in reversed(components.ALL):
        if component is components.CONTAINERD:
            host.end_pods()
        processes.stop(component.name, grace=component.grace)
    host.undo()


def states() -> dict[str, int | None]:
    """Return the process id of every component, `None` for one that does not run."""
    return {component.name: processes.pid(component.name) for component in components.ALL}


def _start_dead(*wanted: components.Component) -> None:
    for component in wanted:
        if not processes.alive(component.name):
            component.start()


def _check_all_alive() -> None:
    for component in components.ALL:
        if not processes.alive(component.name):
            raise Problem(
                f"{component.name} ended soon after it was started\n{processes.tail(component.name)}",
                where=str(processes.log(component.name)),
                fix="read the log; then make up",
            )


def _advertise_gpus() -> None:
    count = f'"{layout.GPUS}"'
    patch = f'{{"status":{{"capacity":{{"nvidia.com/gpu":{count}}},"allocatable":{{"nvidia.com/gpu":{count}}}}}}}'
    probe.kubectl("patch", "node", layout.NODE, "--subresource=status", "--type=merge", "--patch", patch)


def _deploy_dns() -> None:
    manifest = string.Template(_COREDNS.read_text()).substitute(IMAGE=layout.IMAGES["coredns"], ADDRESS=layout.DNS_SERVICE)
    probe.kubectl("apply", "--server-side", "--force-conflicts", "--filename=-", stdin=manifest)


def ended() -> bool:
    """Tell whether nothing of the node is left on the machine."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=False).stdout
    return not any(states().values()) and not layout.NETNS.exists() and layout.HOST_LINK not in links
