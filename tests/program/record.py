"""Run the whole program under mocks in this process, and print what it asked the engine for, as JSON.

`python record.py PROJECT STACK < config.json`; the configuration is passed as the engine passes it. One process per run of the program,
because the SDK keeps what it registers in the process.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pulumi
from google.protobuf.json_format import MessageToDict
from pulumi.runtime import mocks
from pulumi.runtime.stack import run_pulumi_func


class Answers(mocks.Mocks):
    """What a provider would answer: the inputs, and a generated name where none was given."""

    def new_resource(self, args: mocks.MockResourceArgs) -> tuple[str, dict[str, Any]]:
        outputs = dict(args.inputs)
        if args.custom and isinstance(outputs.get("metadata"), dict):
            outputs["metadata"] = {"name": f"{args.name}-1a2b3c4d", **outputs["metadata"]}
        return f"{args.name}-id", outputs

    def call(self, args: mocks.MockCallArgs) -> tuple[dict[str, Any], None]:
        raise NotImplementedError(args.token)


class Recorder(mocks.MockMonitor):
    """Keeps the requests themselves: they carry the options, which mocks do not see."""

    def __init__(self) -> None:
        super().__init__(Answers())
        self.requests: list[dict[str, Any]] = []

    def RegisterResource(self, request: Any) -> Any:  # noqa: N802 (the name of the interface)
        if request.type != "pulumi:pulumi:Stack":
            self.requests.append(
                {
                    "urn": self.make_urn(request.parent, request.type, request.name),
                    "type": request.type,
                    "name": request.name,
                    "custom": request.custom,
                    "provider": request.provider,
                    "parent": request.parent,
                    "dependencies": list(request.dependencies),
                    "ignore_changes": list(request.ignoreChanges),
                    "replace_on_changes": list(request.replaceOnChanges),
                    "delete_before_replace": request.deleteBeforeReplaceDefined and request.deleteBeforeReplace,
                    "secret_outputs": list(request.additionalSecretOutputs),
                    "delete_timeout": request.customTimeouts.delete,
                    "inputs": MessageToDict(request.object),
                }
            )
        return super().RegisterResource(request)


def main(project: str, stack: str) -> None:
    loop = asyncio.new_event_loop()  # before the first resource, whose futures belong to it
    asyncio.set_event_loop(loop)
    recorder = Recorder()
    mocks.set_mocks(recorder.mocks, project="trainyard", stack=stack, preview=False, monitor=recorder)
    pulumi.runtime.set_all_config(json.load(sys.stdin))
    program: dict[str, Any] = {}
    error = None
    try:
        loop.run_until_complete(run_pulumi_func(lambda: program.update(runpy.run_path(str(Path(project) / "__main__.py")))))
    except pulumi.RunError as refused:
        error = str(refused)
    secret = {name: loop.run_until_complete(value.is_secret()) for name, value in program.get("credentials", {}).items()}
    outputs = pulumi.runtime.stack.get_root_resource().outputs
    json.dump(
        {
            "error": error,
            "resources": recorder.requests,
            "secret": secret,
            "outputs": {name: value for name, value in outputs.items() if not isinstance(value, dict)},
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
