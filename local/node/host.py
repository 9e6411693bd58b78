"""What the node changes on the machine: a namespace with one link, a cgroup, a mount setting, a limit.

Each is undone when the node stops; docs/local-node.md names the two that are not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from local.errors import Problem
from local.node import layout, processes

_INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
_INOTIFY_NEEDED = 8192
_UNDO = layout.PIDS / "host.json"
_OWNER = layout.RUNTIME / "owner"


def check() -> None:
    """Raise `Problem` for what a node cannot be started on."""
    if os.geteuid() != 0:
        raise Problem(
            "the embedded node needs root: it makes a network namespace, cgroups and mounts",
            fix="run the command with sudo, or deploy to a cluster you have: docs/own-cluster.md",
        )
    if len(os.fsencode(layout.ROOT)) > layout.MAX_ROOT_LENGTH:
        raise Problem(
            f"the checkout lies too deep: the node's folder has {len(os.fsencode(layout.ROOT))} characters of {layout.MAX_ROOT_LENGTH}",
            where=str(layout.ROOT),
            fix="clone into a folder with a shorter path",
        )


def prepare() -> None:
    """Make the namespace, the link, the cgroups and the settings; nothing is done twice.

    Raises `Problem` when another checkout's node runs on this machine.
    """
    _claim()
    _raise_limits()
    _network()
    _cgroups()


def end_pods() -> None:
    """End the processes of all pods, then what supervises them. Nothing may be left that starts them anew."""
    processes.end(cgroup_processes(), grace=10.0)
    processes.end(processes.matching(str(layout.CONTAINERD_SOCKET)), grace=2.0)


def undo(root: Path = layout.ROOT) -> None:
    """Take back everything that `prepare` did; safe when nothing or half of it was done. The node's processes must have ended.

    `root` is the folder of the node that did it.
    """
    _unmount_all(root)
    _quiet("ip", "netns", "delete", layout.NAMESPACE)
    _quiet("ip", "link", "delete", layout.HOST_LINK)
    for group in _groups():
        _remove_tree(group)
    record = root / layout.PIDS.name / _UNDO.name
    changed = json.loads(record.read_text()) if record.exists() else {}
    if "inotify" in changed:
        _INOTIFY.write_text(changed["inotify"])
    if "private" in changed:
        _quiet("mount", "--make-private", "/")
    record.unlink(missing_ok=True)
    subprocess.run(["rm", "-rf", layout.RUNTIME, layout.CNI_STATE], check=True)
    if layout.NETNS.parent.is_dir() and not any(layout.NETNS.parent.iterdir()):  # `ip netns` mounts the folder on itself and leaves it so
        _quiet("umount", str(layout.NETNS.parent))
        layout.NETNS.parent.rmdir()


def inside(*command: str | Path) -> list[str]:
    """Return `command` as it is started inside the node's network namespace.

    `nsenter` and not `ip netns exec`: that one mounts a fresh /sys, in which the kubelet finds no cgroups.
    """
    return ["nsenter", f"--net={layout.NETNS}", "--", *map(str, command)]


def owner() -> str | None:
    """Return the checkout whose node has the machine's namespace, `None` when there is none."""
    try:
        return _OWNER.read_text().strip()
    except FileNotFoundError:
        return None


def cgroup_processes() -> list[int]:
    """Return the ids of all processes in the node's pods."""
    found: set[int] = set()
    for group in _groups():
        for listing in group.rglob("cgroup.procs"):
            try:
                found.update(int(line) for line in listing.read_text().split())
            except OSError:  # the group went away while it was read
                continue
    return sorted(found)


def unified_cgroups() -> bool:
    """Tell whether this machine has cgroup v2 only."""
    return (layout.CGROUPS / "cgroup.controllers").exists()


def _claim() -> None:
    layout.RUNTIME.mkdir(parents=True, exist_ok=True)
    layout.PIDS.mkdir(parents=True, exist_ok=True)
    holder = owner()
    if holder and holder != str(layout.ROOT):
        if processes.any_alive(Path(holder) / layout.PIDS.name):
            raise Problem(
                "another checkout's node is on this machine already, and there is one network namespace for it",
                where=holder,
                fix=f"make down in {Path(holder).parent.parent}",
            )
        end_pods()
        undo(Path(holder))  # it was killed, not stopped
        layout.RUNTIME.mkdir(parents=True)
        holder = None
    if not holder and layout.NETNS.exists():
        raise Problem(
            f"the network namespace {layout.NAMESPACE} is in use by something that is not trainyard",
            where=str(layout.NETNS),
            fix=f"look with `ip netns pids {layout.NAMESPACE}`; when nothing needs it: ip netns delete {layout.NAMESPACE}",
        )
    _OWNER.write_text(str(layout.ROOT))


def _raise_limits() -> None:
    undo_record: dict[str, str] = json.loads(_UNDO.read_text()) if _UNDO.exists() else {}
    limit = _INOTIFY.read_text().strip()
    if int(limit) < _INOTIFY_NEEDED:
        undo_record.setdefault("inotify", limit)
    if not _root_is_shared():
        undo_record["private"] = "/"
    _UNDO.write_text(json.dumps(undo_record))
    if int(limit) < _INOTIFY_NEEDED:
        _INOTIFY.write_text(str(_INOTIFY_NEEDED))
    if not _root_is_shared():  # the kubelet's mounts must reach the containers
        _run("mount", "--make-shared", "/")


def _root_is_shared() -> bool:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[4] == "/":
            return any(field.startswith("shared:") for field in fields[6 : fields.index("-")])
    return False


def _network() -> None:
    if not layout.NETNS.exists():
        _run("ip", "netns", "add", layout.NAMESPACE)
    if not Path(f"/sys/class/net/{layout.HOST_LINK}").exists():
        _free_subnet()
        _run("ip", "link", "add", layout.HOST_LINK, "type", "veth", "peer", "name", layout.NODE_LINK, "netns", layout.NAMESPACE)
        _run("ip", "address", "add", f"{layout.HOST_ADDRESS}/{layout.PREFIX}", "dev", layout.HOST_LINK)
        _run("ip", "link", "set", layout.HOST_LINK, "up")
        _run(*inside("ip", "address", "add", f"{layout.NODE_ADDRESS}/{layout.PREFIX}", "dev", layout.NODE_LINK))
    for link in ("lo", layout.NODE_LINK):
        _run(*inside("ip", "link", "set", link, "up"))
    _run(*inside("ip", "route", "replace", "default", "via", layout.HOST_ADDRESS))
    if shutil.which("modprobe"):
        _quiet("modprobe", "br_netfilter")  # may be built in, then there is no module
    _run(*inside("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"))
    if Path("/proc/sys/net/bridge/bridge-nf-call-iptables").exists():
        _run(*inside("sh", "-c", "echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables"))


def _free_subnet() -> None:
    route = subprocess.run(["ip", "-4", "route", "show", "root", f"{layout.HOST_ADDRESS}/16"], capture_output=True, text=True, check=False)
    taken = [line for line in route.stdout.splitlines() if line.startswith("198.18.")]
    if taken:
        raise Problem(
            f"the machine has a route in 198.18.0.0/16 already, where the node's link would be: {taken[0]}",
            where="ip -4 route",
            fix="remove that route, or run trainyard on another machine",
        )


def _groups() -> list[Path]:
    roots = [layout.CGROUPS] if unified_cgroups() else [folder for folder in layout.CGROUPS.iterdir() if folder.is_dir()]
    return [root / layout.NAMESPACE for root in roots if (root / layout.NAMESPACE).is_dir()]


def _cgroups() -> None:
    """Make the root group of all pods in each hierarchy, so that one folder holds everything that must end."""
    if unified_cgroups():
        group = layout.CGROUPS / layout.NAMESPACE
        group.mkdir(exist_ok=True)
        controllers = (layout.CGROUPS / "cgroup.controllers").read_text().split()
        for place in (layout.CGROUPS, group):
            (place / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))
        return
    for hierarchy in layout.CGROUPS.iterdir():
        if not hierarchy.is_dir() or hierarchy.is_symlink():
            continue
        group = hierarchy / layout.NAMESPACE
        group.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):  # empty ones let no process in
            if (group / setting).exists():
                (group / setting).write_text((hierarchy / setting).read_text())


def _remove_tree(group: Path) -> None:
    deadline = time.monotonic() + 5
    for folder in [*sorted((path for path in group.rglob("*") if path.is_dir()), key=lambda path: -len(path.parts)), group]:
        while folder.exists():
            try:
                folder.rmdir()
            except OSError:  # ended processes leave their group a moment later
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def _unmount_all(root: Path) -> None:
    ours = (str(root), str(layout.RUNTIME))
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in reversed(mounts):
        if mount.startswith(ours):
            _quiet("umount", "--lazy", mount)
    for namespace in _pod_namespaces():
        _quiet("ip", "netns", "delete", namespace)


def _pod_namespaces() -> list[str]:
    """Return the names of the pods' network namespaces, as the results of the node's CNI plugins name them, and forget the results."""
    found: set[str] = set()
    for result in layout.CNI_RESULTS.glob(f"{layout.NAMESPACE}-*"):
        found.update(re.findall(r"/netns/(cni-[0-9a-f-]+)", result.read_text()))
        result.unlink(missing_ok=True)
    return sorted(found)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Problem(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}", fix="run as root on a machine of your own")


def _quiet(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=False)
