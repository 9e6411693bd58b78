"""What a user can get wrong: each mistake gives one clear message, the right exit code, and no traceback."""

import pytest

from .lab import Lab, Told

CONFIGURATION, DATA, PREFLIGHT = 44, 45, 46

MISTAKES = {
    "an unknown model": ({"model": "byte-9t"}, {}, CONFIGURATION, ["byte-9t", "byte-1m, byte-2m, byte-3m"]),
    "no dataset": ({"data": {"prefix": "datasets/none"}}, {}, DATA, ["s3://lab/datasets/none", "preparation"]),
    "too short a dataset": ({"train": {"sequence_length": 10**8}}, {}, DATA, ["too few", "train.sequence_length"]),
    "a missing bucket": ({"bucket": "nowhere"}, {}, PREFLIGHT, ["bucket nowhere does not exist"]),
    "a wrong key": ({}, {"AWS_ACCESS_KEY_ID": "somebody"}, PREFLIGHT, ["does not accept the credentials", "AWS_ACCESS_KEY_ID"]),
    "a wrong secret": ({}, {"AWS_SECRET_ACCESS_KEY": "guess"}, PREFLIGHT, ["does not accept the credentials", "Secret object-store"]),
    "no store": ({}, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, PREFLIGHT, ["http://127.0.0.1:9 did not answer", "AWS_ENDPOINT_URL"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_explained(lab: Lab, mistake: str) -> None:
    changes, environment, code, parts = MISTAKES[mistake]
    told = lab.run(lab.config("mistaken", **changes), **environment)
    assert told.code == code, told.errors
    error = told.one("error")
    assert error["code"] == code
    assert all(part in error["message"] for part in parts), error["message"]
    assert told.errors == "", "one message, on stdout, and nothing else"


def test_the_same_run_with_another_model_and_batch_is_refused(lab: Lab, straight: Told) -> None:
    lab.branch("straight", "changed", [24])
    told = lab.run(lab.config("changed", model="byte-3m", train={"batch_size": 5, "steps": 20}))
    assert told.code == CONFIGURATION
    message = told.one("error")["message"]
    assert "model: was byte-1m, is byte-3m" in message
    assert "global_batch: was 8, is 10" in message
    assert "train.steps: the run is at step 24 already, is 20" in message
    assert "new name" in message
    assert "Traceback" not in told.errors


@pytest.mark.parametrize(
    ("data", "parts"),
    [({"source": "/nowhere"}, ["/nowhere does not exist", "data.source"]), ({"pattern": "*.cobol"}, ["'*.cobol'", "data.pattern"])],
)
def test_a_preparation_without_files_is_explained(lab: Lab, data: dict[str, str], parts: list[str]) -> None:
    told = lab.run(lab.config("mistaken", data=data), "training.prepare")
    assert told.code == DATA
    assert all(part in told.one("error")["message"] for part in parts)
    assert told.errors == ""
