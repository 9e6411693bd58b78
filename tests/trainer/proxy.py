"""Stands between an S3 client and the server, and does to single requests what networks and stores do: hold, refuse, slow down, cut."""

import re
import socket
import threading
import time
from contextlib import suppress
from urllib.parse import urlsplit

REFUSALS = {503: ("Slow Down", "SlowDown"), 403: ("Forbidden", "AccessDenied")}


class Rule:
    """What happens to the first `times` requests that match `METHOD /bucket/key?query`, at most."""

    def __init__(
        self,
        pattern: str,
        *,
        status: int = 0,
        delay: float = 0.0,
        cut: int | None = None,
        hold: bool = False,
        answered: bool = False,  # hold the answer instead of the request
        times: int = 10**9,
    ):
        self.pattern, self.status, self.delay, self.cut, self.times = re.compile(pattern), status, delay, cut, times
        self.answered = answered
        self.seen = 0
        self.reached, self.released = threading.Event(), threading.Event()
        if not hold:
            self.released.set()


class Proxy:
    """A proxy on a free port. It forwards to the server what no rule speaks about."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname, parts.port)
        self.rules: list[Rule] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def on(self, pattern: str, **how) -> Rule:
        """Add a rule."""
        self.rules.append(Rule(pattern, **how))
        return self.rules[-1]

    def close(self) -> None:
        """Accept no more connections, and let go what is held."""
        self._listener.close()
        for rule in self.rules:
            rule.released.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._upstream) as server, suppress(OSError, EOFError):
            answers = threading.Event()
            answers.set()
            threading.Thread(target=_pump, args=(server, client, answers), daemon=True).start()
            source = client.makefile("rb")
            while line := source.readline():
                head = line
                while (field := source.readline()) not in {b"\r\n", b""}:
                    head += field
                method, path = line.decode().split()[:2]
                rule = self._rule(f"{method} {path}")
                length = int(found[1]) if (found := re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)) else 0
                expects = b"100-continue" in head.lower()
                assert b"transfer-encoding" not in head.lower(), head
                if rule is not None and rule.answered:
                    answers.clear()
                elif rule is not None:
                    rule.reached.set()
                    rule.released.wait()
                    time.sleep(rule.delay)
                    if rule.status:
                        if not expects:
                            source.read(length)
                        client.sendall(_refusal(rule.status))
                        return
                server.sendall(head + b"\r\n")
                if rule is not None and rule.cut is not None:
                    server.sendall(source.read(min(rule.cut, length)))
                    return
                while length:
                    length -= len(piece := source.read1(min(length, 1 << 16)))
                    if not piece:
                        return
                    server.sendall(piece)
                if rule is not None and rule.answered:
                    time.sleep(0.5)
                    rule.reached.set()
                    rule.released.wait()
                    answers.set()

    def _rule(self, request: str) -> Rule | None:
        with self._lock:
            for rule in self.rules:
                if rule.seen < rule.times and rule.pattern.search(request):
                    rule.seen += 1
                    return rule
        return None


def _pump(source: socket.socket, target: socket.socket, answers: threading.Event) -> None:
    with suppress(OSError):
        while piece := source.recv(1 << 16):
            if not piece.startswith(b"HTTP/1.1 100"):
                answers.wait()
            target.sendall(piece)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


def _refusal(status: int) -> bytes:
    reason, code = REFUSALS[status]
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{reason}</Message></Error>'
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return (head + body).encode()
