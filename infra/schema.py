"""JSON schemas of stack files and run files, for editors: `python -m infra.schema` writes them below `.trainyard/schema/`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from infra.config import PREFIX
from infra.runs.file import RunFile
from infra.settings import PlatformConfig

FOLDER = Path(".trainyard") / "schema"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def stack_schema() -> dict[str, Any]:
    """Return the schema of a stack file: the keys of this project under `config`, every other key left to the engine."""
    model = PlatformConfig.model_json_schema(by_alias=True)
    definitions = model.pop("$defs", {})
    keys = {PREFIX + name: schema for name, schema in model["properties"].items()}
    config = {
        "type": "object",
        "properties": keys,
        "required": [PREFIX + name for name in model["required"]],
        # A key of ours that the model does not have is a mistake; those of others (aws:region) are not ours to judge.
        "patternProperties": {f"^{PREFIX}(?!({'|'.join(model['properties'])})$)": False},
    }
    return {"$schema": _DIALECT, "title": "Stack of trainyard", "type": "object", "properties": {"config": config}, "$defs": definitions}


def run_schema() -> dict[str, Any]:
    """Return the schema of a run file."""
    return {"$schema": _DIALECT, **RunFile.model_json_schema(by_alias=True)}


def main() -> None:
    """Write both."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, schema in (("stack", stack_schema()), ("run", run_schema())):
        (FOLDER / f"{name}.json").write_text(json.dumps(schema, indent=2) + "\n")


if __name__ == "__main__":
    main()
