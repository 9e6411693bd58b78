"""What is shown of the engine's output."""

from __future__ import annotations

from local import stack

PRINTED = """\
Updating (local):
@ updating......
 +  kubernetes:batch/v1:Job smoke creating (0s)
 +  kubernetes:batch/v1:Job smoke creating (0s) Skipping await logic
 +  kubernetes:batch/v1:Job smoke-prepare creating (0s) Waiting for Job "team-research/smoke-prepare" to start
 +  kubernetes:batch/v1:Job smoke-prepare creating (0s) Waiting for Job "team-research/smoke-prepare" to start
 -- kubernetes:core/v1:ConfigMap smoke deleting original (0s) [diff: ~data]; Resource scheduled for deletion
 +  kubernetes:core/v1:Secret s creating (0s) error: the server refused
 +  kubernetes:batch/v1:Job smoke created (0.05s)
""".splitlines()


def test_each_change_is_told_once_and_trouble_always() -> None:
    assert list(stack.told(PRINTED)) == [
        "Updating (local):",
        ' +  kubernetes:batch/v1:Job smoke-prepare creating (0s) Waiting for Job "team-research/smoke-prepare" to start',
        " +  kubernetes:core/v1:Secret s creating (0s) error: the server refused",
        " +  kubernetes:batch/v1:Job smoke created (0.05s)",
    ]
