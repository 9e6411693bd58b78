"""Who may talk to whom in a team's namespace: shown with real connections through the real enforcer."""

from __future__ import annotations

import json

import pytest

from local.node import layout
from local.node.probe import kubectl
from tests import live
from tests.conftest import Until

SERVE = "import socket; s = socket.create_server(('', 29500)); print('serving', flush=True)\nwhile True: s.accept()[0].close()"
CONNECT = """
import socket, sys, time
def reaches(host, port):
    deadline = time.monotonic() + float(sys.argv[3])
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return True
        except OSError:
            time.sleep(0.2)
    return False
print("reached" if reaches(sys.argv[1], sys.argv[2]) else "refused", flush=True)
"""
RUN = {"trainyard.dev/run": "smoke"}
ALLOWED_SECONDS, DENIED_SECONDS = 20, 4
"""How long a connection is tried; rules of a new pod are in force after about a second."""


@pytest.fixture(scope="module", autouse=True)
def deployed() -> None:
    live.deploy()


def attempt(until: Until, labels: dict[str, str], host: str, port: int, seconds: int) -> str:
    """Return `reached` or `refused`, as a new pod with these labels finds it."""
    with live.pod(["python", "-c", CONNECT, host, str(port), str(seconds)], labels=labels) as name:
        until("the end of the probe", lambda: live.phase(name) in ("Succeeded", "Failed"), 60)
        return live.log(name).strip()


@pytest.fixture(scope="module")
def trainer(until: Until) -> object:
    """A pod that listens where torchrun's rendezvous does, under the label of the run; its address."""
    with live.pod(["python", "-uc", SERVE], labels=RUN) as name:
        until("the listener", lambda: "serving" in live.log(name))
        yield json.loads(kubectl("get", "pod", name, f"--namespace={live.NAMESPACE}", "--output=json"))["status"]["podIP"]


def test_pods_of_one_run_reach_each_other(until: Until, trainer: str) -> None:
    assert attempt(until, RUN, trainer, 29500, ALLOWED_SECONDS) == "reached"


def test_a_pod_without_the_label_of_a_run_reaches_no_trainer(until: Until, trainer: str) -> None:
    assert attempt(until, {}, trainer, 29500, DENIED_SECONDS) == "refused"


def test_a_pod_of_another_run_reaches_no_trainer(until: Until, trainer: str) -> None:
    assert attempt(until, {"trainyard.dev/run": "another"}, trainer, 29500, DENIED_SECONDS) == "refused"


def test_a_pod_of_a_run_reaches_the_object_store(until: Until) -> None:
    assert attempt(until, RUN, layout.NODE_ADDRESS, layout.STORE_PORT, ALLOWED_SECONDS) == "reached"


def test_a_pod_without_the_label_of_a_run_does_not_reach_the_object_store(until: Until) -> None:
    assert attempt(until, {}, layout.NODE_ADDRESS, layout.STORE_PORT, DENIED_SECONDS) == "refused"


def test_a_pod_of_a_run_does_not_reach_the_api_server(until: Until) -> None:
    assert attempt(until, RUN, layout.NODE_ADDRESS, layout.API_PORT, DENIED_SECONDS) == "refused"


def test_a_pod_of_a_run_resolves_names(until: Until) -> None:
    resolve = "import socket; print(socket.gethostbyname('kubernetes.default.svc.cluster.local'))"
    with live.pod(["python", "-c", resolve], labels=RUN) as name:
        until("the end of the probe", lambda: live.phase(name) in ("Succeeded", "Failed"), 60)
        assert live.log(name).strip() == layout.API_SERVICE


def test_a_pod_that_asks_for_more_rights_is_refused() -> None:
    privileged = json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "privileged", "namespace": live.NAMESPACE},
            "spec": {"containers": [{"name": "c", "image": "x", "securityContext": {"privileged": True}}]},
        }
    )
    assert "privileged" not in kubectl("create", "--filename=-", stdin=privileged, check=False)
    assert not [pod for pod in live.objects("pods") if pod["metadata"]["name"] == "privileged"]
