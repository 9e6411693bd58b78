"""One object store with one dataset and one finished run, shared by the tests of the trainer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .gateway import Gateway
from .lab import BUCKET, CONFIG, Lab, Told

SENTENCES = (
    "the quick brown fox jumps over the lazy dog",
    "a checkpoint exists when its mark does",
    "pack my box with five dozen liquor jugs",
    "every rank stops at the same step",
)


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    server = Gateway(tmp_path_factory.mktemp("store"))
    server.client.create_bucket(Bucket=BUCKET)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prose")
    for number in range(40):
        lines = (f"{number} {SENTENCES[(number + line) % len(SENTENCES)]} {line * number}" for line in range(700))
        (folder / f"{number:02d}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def lab(gateway: Gateway, prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    CONFIG["data"]["source"] = str(prose)
    lab = Lab(gateway, tmp_path_factory.mktemp("lab"))
    assert lab.run(lab.config("straight"), "training.prepare").code == 0
    yield lab
    lab.close()


@pytest.fixture(scope="session")
def straight(lab: Lab) -> Told:
    """The run that was never interrupted: what every other one is compared with."""
    return lab.run(lab.config("straight"))
