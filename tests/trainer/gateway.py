"""A real S3 server over a folder, for tests that damage what it holds."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import boto3
from botocore.config import Config

ACCESS_KEY, SECRET_KEY = "trainer-tests", "trainer-tests-secret"
START_SECONDS = 15


def versitygw() -> Path:
    """Find the server: named by the environment, or by the project's tool resolution."""
    named = os.environ.get("TRAINYARD_VERSITYGW")
    if named:
        return Path(named)
    from local.tools import locate  # the environment decides whether the embedded platform is needed at all

    return Path(locate("versitygw"))


def port_for_later() -> int:
    """Find a port for a server that another process starts in some seconds: not one that the kernel gives to outgoing connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Gateway:
    """versitygw as a child process on a free port of the loopback interface."""

    def __init__(self, folder: Path) -> None:
        root, versions = folder / "objects", folder / "versions"
        for path in (root, versions):
            path.mkdir(parents=True)
        port = port_for_later()
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
        }
        command = [versitygw(), "--port", f"127.0.0.1:{port}", "--versioning-dir", versions, root]
        self._process = subprocess.Popen(command, env={**os.environ, "ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY})
        self._wait()
        self.client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(s3={"addressing_style": "path"}),
        )

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/healthz", timeout=1):
                    return
            except (urllib.error.URLError, ConnectionError):
                assert self._process.poll() is None, "versitygw ended while it started"
                assert time.monotonic() < deadline, f"versitygw did not answer within {START_SECONDS} s"
                time.sleep(0.05)

    def hang(self) -> None:
        """Go on accepting connections, and answer none."""
        self._process.send_signal(signal.SIGSTOP)

    def stop(self) -> None:
        """End the server; no request is answered after that."""
        self.client.close()
        self._process.kill()
        self._process.wait()
