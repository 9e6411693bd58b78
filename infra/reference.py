"""The reference of every key, from the models themselves: `python -m infra.reference` prints docs/reference/configuration.md."""

from __future__ import annotations

import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from infra.config import PREFIX
from infra.problems import dotted, example, paste
from infra.runs.file import RunFile
from infra.settings import PlatformConfig

_HEAD = """# Configuration

Written by `python -m infra.reference > docs/reference/configuration.md` from the models that check the files.

A stack file is `Pulumi.<stack>.yaml`; the keys of trainyard are below its `config`. A run file is any YAML file a stack names under
`trainyard:runs`. A stack key with an empty value counts as not given. A cluster that is already there needs `kubeconfig`, `images`,
`objectStore` and `charts`; the facts of the embedded platform supply them. The access keys of the object store come from the environment
(`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`), never from a file. Every mistake is reported at once, before anything is changed.
"""
_WORDS = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`"}
_COLUMNS = "| key | type | default | meaning | example |\n|---|---|---|---|---|"


def reference() -> str:
    """Return the whole page."""
    return "\n".join([_HEAD, *_section(PlatformConfig, "Stack file", (), PREFIX), *_section(RunFile, "Run file", (), "")])


def _section(model: type[BaseModel], title: str, path: tuple[str | int, ...], prefix: str, sample: str = "") -> list[str]:
    """Return the table of a model and, after it, those of the models its fields hold."""
    rows, below = [], []
    for name, field in model.model_fields.items():
        key, (inner, is_list) = field.alias or name, _model_in(field.annotation)
        place = (*path, key, 0) if is_list else (*path, key)
        if inner is not None:
            heading = f"`{dotted(place, prefix).replace('[0]', '[]')}`"
            below += _section(inner, heading, place, prefix, paste((*path, key), example(field), prefix))
        rows.append(_row(key if path else prefix + key, field, inner))
    shown = [f"```yaml\n{sample}```\n"] if sample else []
    return [f"{'###' if path else '##'} {title}\n", f"{model.__doc__}\n", *shown, _COLUMNS, *rows, "", *below]


def _row(key: str, field: FieldInfo, inner: type[BaseModel] | None) -> str:
    default = "required" if field.is_required() else _shown(field.get_default(call_default_factory=True, validated_data={}))
    cells = (f"`{key}`", _type(field.annotation), default, field.description or "", "below" if inner else _shown(example(field)))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _model_in(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    found = [model for inner in get_args(annotation) if (model := _model_in(inner)[0])]
    return (found[0], get_origin(annotation) is tuple) if found else (None, False)


def _type(annotation: Any) -> str:
    origin, inner = get_origin(annotation), [one for one in get_args(annotation) if one is not type(None)]
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin in (Annotated, Union, types.UnionType):
        return _type(inner[0])
    if origin in (tuple, dict):
        return f"list of {_type(inner[0])}" if origin is tuple else f"map of {_type(inner[0])} to {_type(inner[1])}"
    return _WORDS.get(annotation, "map")


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"`{json.dumps(value.model_dump(by_alias=True) if isinstance(value, BaseModel) else value)}`"


if __name__ == "__main__":
    print(reference(), end="")
