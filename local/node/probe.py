"""Waiting for the node: every wait looks at the thing itself, ends as soon as it is there, and says what never came."""

from __future__ import annotations

import datetime
import json
import os
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from local import paths
from local.errors import Problem
from local.node import host, layout, pki, processes

_ASK_DNS = r"""
import socket, sys
query = b"\x00\x01\x01\x00\x00\x01" + bytes(6)
for label in (b"kubernetes", b"default", b"svc", b"cluster", b"local", b""):
    query += bytes([len(label)]) + label
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
    client.settimeout(0.5)
    client.sendto(query + b"\x00\x01\x00\x01", (sys.argv[1], 53))
    answer = client.recv(512)
sys.exit(0 if answer[3] & 15 == 0 and answer[7] else 1)
"""
"""Ask for the API server's address and fail unless one comes back: a query is a header, a name and two numbers (RFC 1035, section 4)."""

_TIMEOUT = 120.0
"""Seconds; on an idle machine the slowest wait takes some five."""


def until(what: str, ready: Callable[[], bool], *, component: str, timeout: float = _TIMEOUT) -> None:
    """Return when `ready()` is true; raises `Problem` with the component's last log lines when its process ends or the time is over."""
    deadline = time.monotonic() + timeout
    while not ready():
        if not processes.alive(component):
            raise _failure(f"{component} ended while the node waited for {what}", component)
        if time.monotonic() > deadline:
            raise _failure(f"{what}: not there after {timeout:.0f} s", component)
        time.sleep(0.1)


def _failure(what: str, component: str) -> Problem:
    return Problem(f"{what}\n{processes.tail(component)}", where=str(processes.log(component)), fix="read the log; then make up")


def api_ready() -> bool:
    """Tell whether the API server answers that it is ready."""
    context = ssl.create_default_context(cafile=str(pki.certificate("ca")))
    context.load_cert_chain(pki.certificate("admin"), pki.key("admin"))
    return _answers(f"{layout.API}/readyz", context)


def store_ready() -> bool:
    """Tell whether the object store answers."""
    return _answers(f"{layout.STORE}/healthz", None)


def containerd_ready() -> bool:
    """Tell whether containerd's socket takes connections."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(layout.CONTAINERD_SOCKET))
        except OSError:
            return False
    return True


def node_ready() -> bool:
    """Tell whether the node reports Ready, by a heartbeat of the kubelet that runs now."""
    begun = processes.begun("kubelet")
    conditions = get("node", layout.NODE).get("status", {}).get("conditions", [])
    ready = [item for item in conditions if item["type"] == "Ready" and item["status"] == "True"]
    return any(datetime.datetime.fromisoformat(item["lastHeartbeatTime"]).timestamp() >= begun for item in ready)


def has_pod_addresses() -> bool:
    """Tell whether the node was given its range of pod addresses, without which the policy controller cannot deny by default."""
    return bool(get("node", layout.NODE).get("spec", {}).get("podCIDR"))


def policies_ready() -> bool:
    """Tell whether the policy controller has put its chains in force."""
    listing = host.inside("iptables", "--wait", "--numeric", "--list", "KUBE-NWPLCY-DEFAULT")
    return subprocess.run(listing, capture_output=True, check=False).returncode == 0


def dns_ready() -> bool:
    """Tell whether a name is resolved through the cluster DNS's service address, from inside the node's network."""
    done = subprocess.run(host.inside(sys.executable, "-c", _ASK_DNS, layout.DNS_SERVICE), capture_output=True, check=False)
    return done.returncode == 0


def get(kind: str, name: str, *more: str) -> dict[str, Any]:
    """Return one object of the cluster, empty when it is not there."""
    done = kubectl("get", kind, name, "--output=json", "--ignore-not-found", *more, check=False)
    return json.loads(done) if done.strip() else {}


def kubectl(*arguments: str, stdin: str | None = None, check: bool = True) -> str:
    """Run kubectl as the cluster's administrator and return what it prints; raises `Problem` when `check` and it fails."""
    command = [str(paths.BIN / "kubectl"), f"--kubeconfig={layout.KUBECONFIG}", *arguments]
    direct = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}  # the node is on this machine
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, env=direct)
    if check and done.returncode:
        raise Problem(f"`kubectl {' '.join(arguments)}` failed: {done.stderr.strip()}", fix="make status")
    return done.stdout


def _answers(url: str, context: ssl.SSLContext | None) -> bool:
    # No proxy of the environment stands between this machine and its own node.
    handlers = [urllib.request.ProxyHandler({})] + ([urllib.request.HTTPSHandler(context=context)] if context else [])
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=2) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False
