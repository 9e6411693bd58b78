"""One way to report mistakes in files people write: every problem at once, each with its place, what is allowed and what to paste."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import pulumi
import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

Path_ = tuple[str | int, ...]

_SECRET_LIKE = re.compile(r"secret|password|passphrase|token|credential|access[_-]?key|private[_-]?key", re.IGNORECASE)
_SECRET_WITHIN = re.compile(r"//[^/\s]*@|-----BEGIN ")
_SHOWN_LENGTH = 60


@dataclass(frozen=True)
class Problem:
    """A mistake in a file: where it is, what is wrong, what is allowed, and YAML that would be right."""

    file: str
    key: str
    wrong: str
    allowed: str = ""
    paste: str = ""

    def __str__(self) -> str:
        lines = [f"{self.file}: {self.key}: {self.wrong}" if self.key else f"{self.file}: {self.wrong}"]
        if self.allowed:
            lines.append(f"   allowed: {self.allowed}")
        if self.paste:
            lines.append("   paste:")
            lines.extend(f"     {line}" for line in self.paste.rstrip().splitlines())
        return "\n".join(lines)


class ConfigError(pulumi.RunError):
    """The mistakes found in one reading of the input. Pulumi prints it without a traceback."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        head = f"{len(problems)} problem{'s' if len(problems) != 1 else ''} in the configuration; nothing was changed."
        body = "\n".join(f"{number}. {problem}" for number, problem in enumerate(problems, 1))
        super().__init__(f"{head}\n{body}")


def explain(error: ValidationError, model: type[BaseModel], file: str, data: Any, prefix: str = "") -> list[Problem]:
    """Turn pydantic's findings about `data` into problems a person can act on. `prefix` is put before every top-level key."""
    details = error.errors(include_url=False, include_input=False)
    return [_problem(detail, model, file, data, prefix) for detail in details if not _follows(detail, details)]


def _follows(detail: ErrorDetails, details: Sequence[ErrorDetails]) -> bool:
    """Return whether a list only seems too short because an entry of it is wrong, which is told already."""
    place = detail["loc"]
    return detail["type"] == "too_short" and any(other["loc"][: len(place)] == place != other["loc"] for other in details)


def _problem(detail: ErrorDetails, model: type[BaseModel], file: str, data: Any, prefix: str) -> Problem:
    path: Path_ = tuple(part for part in detail["loc"] if part != "[key]")
    field, depth = _field_at(model, path)
    kind = detail["type"]
    if kind == "extra_forbidden":
        known = _known_keys(model, path[:-1])
        return Problem(file, dotted(path, prefix), "is not a key that exists", allowed=", ".join(known))
    if kind == "missing":
        wrong = "is missing"
    elif kind in {"value_error", "assertion_error"}:
        wrong = f"{_given(path, data)}{detail['msg'].removeprefix('Value error, ')}"
    elif "[key]" in detail["loc"]:
        wrong = f"is not a name that fits; {_sentence(detail['msg'])}"
    else:
        wrong = f"{_given(path, data)}{_sentence(detail['msg'])}"
    return Problem(file, dotted(path, prefix), wrong, allowed=_description(field), paste=paste(path[:depth], example(field), prefix))


def dotted(path: Path_, prefix: str = "") -> str:
    """Return the key path as people write it: `trainyard:teams[0].name`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return prefix + text.removeprefix(".")


def paste(path: Path_, value: Any, prefix: str = "") -> str:
    """Return YAML that sets `path` to `value`; nothing when there is no sensible value."""
    if value is None or not path:
        return ""
    nested: Any = value
    for position in range(len(path) - 1, -1, -1):
        part = path[position]
        nested = [nested] if isinstance(part, int) else {f"{prefix}{part}" if position == 0 else part: nested}
    return yaml.safe_dump(nested, sort_keys=False, default_flow_style=False)


def _given(path: Path_, data: Any) -> str:
    value = data
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return ""
    if any(_SECRET_LIKE.search(str(part)) for part in path) or (isinstance(value, str) and _SECRET_WITHIN.search(value)):
        return "(value not shown) "
    if isinstance(value, dict | list):
        return ""
    text = repr(value)
    return f"is {text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + '...'}; "


def _sentence(message: str) -> str:
    return message[:1].lower() + message[1:]


def _models(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _field_at(model: type[BaseModel], path: Path_) -> tuple[FieldInfo | None, int]:
    """Return the deepest declared field on `path` and how many parts of the path lead to it."""
    current: type[BaseModel] | None = model
    found: FieldInfo | None = None
    depth = 0
    for position, part in enumerate(path, 1):
        if isinstance(part, int) or current is None:
            continue
        field = next((field for name, field in current.model_fields.items() if part in (name, field.alias)), None)
        if field is None:
            break
        found, depth = field, position
        current = next(iter(_models(field.annotation)), None)
    return found, depth


def _known_keys(model: type[BaseModel], path: Path_) -> list[str]:
    current = model
    field, _ = _field_at(model, path)
    if field is not None:
        current = next(iter(_models(field.annotation)), model)
    return [field.alias or name for name, field in current.model_fields.items()]


def _description(field: FieldInfo | None) -> str:
    return (field.description or "") if field else ""


def example(field: FieldInfo | None) -> Any:
    """Return the first example of a field, or its default."""
    if field is None:
        return None
    if field.examples:
        return field.examples[0]
    default = field.get_default(call_default_factory=True, validated_data={}) if not field.is_required() else None
    return default if isinstance(default, str | int | float | bool) else None
