"""How a launcher finds its place among those of a run."""

import pytest

from training.errors import ConfigurationError
from training.launch import node_of

FIRST = "TRAINYARD_NODE_RANK"
SECOND = "JOB_COMPLETION_INDEX"
HOST = "TRAINYARD_COORDINATOR"


def test_a_node_alone_needs_no_variables_and_stays_on_the_loopback() -> None:
    node = node_of(1, {FIRST: "5", HOST: "elsewhere"})
    assert (node.rank, node.environment) == (0, {"GLOO_SOCKET_IFNAME": "lo"})
    assert "--standalone" in node.rendezvous


PLACES = {
    "a name": ({FIRST: "1", HOST: "run-0.run"}, 1, "run-0.run", "29400"),
    "a port": ({FIRST: "0", HOST: "run-0.run.team.svc:12345"}, 0, "run-0.run.team.svc", "12345"),
    "an address": ({FIRST: "2", HOST: "10.0.0.7:1"}, 2, "10.0.0.7", "1"),
    "an IPv6 address": ({FIRST: "0", HOST: "[fd00::7]:99"}, 0, "fd00::7", "99"),
    "an Indexed Job": ({SECOND: "2", HOST: "run-0.run"}, 2, "run-0.run", "29400"),
    "both": ({FIRST: "0", SECOND: "2", HOST: "run-0.run"}, 0, "run-0.run", "29400"),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_place_of_a_node(place: str) -> None:
    variables, rank, host, port = PLACES[place]
    node = node_of(3, variables)
    assert node.rank == rank
    expected = ("--nnodes", "3", "--node-rank", str(rank), "--master-addr", host, "--master-port", port)
    assert (node.rendezvous, node.environment) == (expected, {})


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:1"])
def test_nodes_on_one_machine_stay_on_the_loopback(host: str) -> None:
    assert node_of(2, {FIRST: "0", HOST: host}).environment == {"GLOO_SOCKET_IFNAME": "lo"}


MISTAKES = {
    "nothing": ({}, [FIRST, "''", "0 to 2", SECOND, HOST, "29400"]),
    "no number": ({FIRST: "first", HOST: "a"}, [FIRST, "'first'", "0 to 2"]),
    "too high": ({FIRST: "3", HOST: "a"}, [FIRST, "'3'", "0 to 2"]),
    "negative": ({SECOND: "-1", HOST: "a"}, [FIRST, "'-1'"]),
    "no host": ({FIRST: "1"}, [HOST, "''", "node 0", "29400"]),
    "no port": ({FIRST: "1", HOST: "a:"}, [HOST, "'a:'"]),
    "a URL": ({FIRST: "1", HOST: "http://a:29400"}, [HOST, "'http://a:29400'"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_variable_that_is_missing_or_wrong_is_named_with_what_to_set(mistake: str) -> None:
    variables, parts = MISTAKES[mistake]
    with pytest.raises(ConfigurationError) as raised:
        node_of(3, variables)
    assert all(part in raised.value.message for part in parts), raised.value.message
