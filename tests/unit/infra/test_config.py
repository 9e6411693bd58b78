"""A stack's configuration is checked whole: every mistake at once, each with its place, what is allowed and what to paste."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.config import existing_cluster, load_stack, parse, stack_values
from infra.problems import ConfigError, Problem
from infra.runs.file import RunFile
from infra.schema import run_schema, stack_schema
from infra.settings import PlatformConfig

PROJECT = Path(__file__).parents[3]
STACKS = sorted(path for path in PROJECT.glob("Pulumi.*.yaml"))
GOOD: dict[str, Any] = {
    "provider": "existing",
    "storage": {"bucket": "bucket-1"},
    "nodeGroups": [{"name": "local", "node": {"gpus": 2, "cpu": "1", "memory": "4Gi"}, "nodes": {"min": 1, "max": 1}}],
    "teams": [{"name": "research", "gpus": {"local": 2}}],
    "priorities": {"standard": 100},
}
FACTS: dict[str, Any] = {
    "kubeconfig": "/node/kubeconfig",
    "objectStore": {"endpoint": "http://198.18.0.2:7070", "cidr": "198.18.0.2/32", "port": 7070, "region": "us-east-1"},
    "images": {"trainer": "trainer@sha256:aa", "kueue": "kueue:v1", "jobset": "jobset:v1"},
    "gitSha": "abc1234",
    "charts": {"kueue": "/charts/kueue", "jobset": "/charts/jobset"},
}


def with_(**keys: Any) -> dict[str, Any]:
    return {**copy.deepcopy(GOOD), **keys}


def raised(values: dict[str, Any], root: Path = PROJECT) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(values, root, "Pulumi.x.yaml")
    assert {problem.file for problem in caught.value.problems} == {"Pulumi.x.yaml"}
    return caught.value


def problems_of(values: dict[str, Any]) -> dict[str, Problem]:
    return {problem.key: problem for problem in raised(values).problems}


def test_all_mistakes_are_told_at_once_with_place_and_remedy() -> None:
    values = with_(provider="aws", nodegroups=[], controllers={"cpu": 1})
    values["storage"] = {"bucket": "Bad Bucket"}
    values["teams"] = [{"nme": "research", "gpus": {"local": "two"}}]
    del values["nodeGroups"]
    found = problems_of(values)
    assert set(found) == {
        "trainyard:provider",
        "trainyard:storage.bucket",
        "trainyard:nodeGroups",
        "trainyard:nodegroups",
        "trainyard:controllers.cpu",
        "trainyard:teams[0].name",
        "trainyard:teams[0].nme",
        "trainyard:teams[0].gpus.local",
    }
    assert all(problem.allowed for problem in found.values())
    unknown = {"trainyard:nodegroups", "trainyard:teams[0].nme"}
    assert all(problem.paste for key, problem in found.items() if key not in unknown)
    assert "nodeGroups" in found["trainyard:nodegroups"].allowed
    assert found["trainyard:teams[0].nme"].allowed == "name, gpus, borrow, viewers"
    assert "'aws'" in found["trainyard:provider"].wrong
    assert "is 1;" in found["trainyard:controllers.cpu"].wrong


def test_the_message_is_one_text_to_read_from_top_to_bottom() -> None:
    text = str(raised(with_(provider="aws", kubeconfg="x")))
    first, *rest = text.splitlines()
    assert first == "2 problems in the configuration; nothing was changed."
    assert rest[0].startswith("1. Pulumi.x.yaml: trainyard:provider: is 'aws'; ")
    assert "     trainyard:provider: existing" in rest


@pytest.mark.parametrize("key", [field.alias for field in PlatformConfig.model_fields.values() if field.is_required()])
def test_what_is_to_be_pasted_for_a_missing_key_is_right(key: str) -> None:
    values = with_()
    del values[key]
    (problem,) = raised(values).problems
    assert (problem.key, problem.wrong) == (f"trainyard:{key}", "is missing")
    (pasted,) = yaml.safe_load(problem.paste).items()
    assert pasted[0] == f"trainyard:{key}"
    assert PlatformConfig.model_validate({**values, key: pasted[1]})


def test_a_wrong_entry_does_not_make_its_list_look_empty() -> None:
    (problem,) = raised(with_(teams=[{"name": "Research", "gpus": {"local": 2}}])).problems
    assert problem.key == "trainyard:teams[0].name"
    (problem,) = raised(with_(teams=[])).problems
    assert problem.key == "trainyard:teams"


def test_a_name_that_does_not_fit_is_not_called_a_wrong_value() -> None:
    (problem,) = raised(with_(priorities={"High_1": 5})).problems
    assert problem.key == "trainyard:priorities.High_1"
    assert problem.wrong.startswith("is not a name that fits; ")


def test_names_are_used_once_and_shares_name_groups_that_exist() -> None:
    values = with_()
    values["nodeGroups"] *= 2
    values["teams"] = [{"name": "a", "gpus": {"gpu": 1}, "borrow": {"l4": 1}}, {"name": "a", "gpus": {}}]
    found = problems_of(values)
    assert set(found) == {"trainyard:nodeGroups", "trainyard:teams", "trainyard:teams[0].gpus.gpu", "trainyard:teams[0].borrow.l4"}
    assert yaml.safe_load(found["trainyard:teams[0].gpus.gpu"].paste) == {"trainyard:teams": [{"gpus": {"local": 1}}]}


@pytest.mark.parametrize("empty", ["", None, {}])
@pytest.mark.parametrize("key", ["platform", "kubeconfig", "gitSha", "images", "objectStore", "charts", "controllers"])
def test_an_empty_key_is_not_given(key: str, empty: object) -> None:
    assert parse(with_(**{key: empty}), PROJECT, "f") == parse(GOOD, PROJECT, "f")


def test_an_empty_key_that_is_needed_is_missing() -> None:
    assert problems_of(with_(storage={}))["trainyard:storage"].wrong == "is missing"


def test_facts_of_the_platform_are_defaults(tmp_path: Path) -> None:
    (tmp_path / "platform.json").write_text(json.dumps(FACTS))
    config = parse(with_(platform="platform.json", images={}, kubeconfig=""), tmp_path, "f")
    assert (config.kubeconfig, config.git_sha) == ("/node/kubeconfig", "abc1234")
    assert config.images
    assert config.images.kueue == "kueue:v1"
    assert config.object_store
    assert config.object_store.port == 7070
    assert config.charts
    assert config.charts.kueue.chart == "/charts/kueue"


def test_keys_of_the_stack_override_the_facts(tmp_path: Path) -> None:
    (tmp_path / "platform.json").write_text(json.dumps(FACTS))
    config = parse(with_(platform="platform.json", kubeconfig="/mine", images={"trainer": "mine@sha256:bb"}), tmp_path, "f")
    assert config.kubeconfig == "/mine"
    assert config.images
    assert config.images.trainer == "mine@sha256:bb"
    assert config.git_sha == "abc1234"


@pytest.mark.parametrize("content", ["{", "3", '{"charts": ["kueue"]}'])
def test_a_file_that_holds_no_facts_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "platform.json").write_text(content)
    (problem,) = raised(with_(platform="platform.json"), tmp_path).problems
    assert problem.key == "trainyard:platform"
    assert "platform.json, which is not a facts file; write it again with `make up`" in problem.wrong


def test_without_the_platform_the_way_to_start_it_is_told(tmp_path: Path) -> None:
    config = parse(with_(platform="platform.json"), tmp_path, "f")
    with pytest.raises(ConfigError, match="make up"):
        existing_cluster(config, tmp_path, "f")


def test_a_cluster_of_ones_own_needs_four_keys_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        existing_cluster(parse(GOOD, tmp_path, "f"), tmp_path, "f")
    found = {problem.key: problem for problem in caught.value.problems}
    assert set(found) == {f"trainyard:{key}" for key in ("kubeconfig", "images", "objectStore", "charts")}
    repaired = {key.removeprefix("trainyard:"): yaml.safe_load(problem.paste)[key] for key, problem in found.items()}
    (tmp_path / "kubeconfig").write_text("")
    own = parse(with_(**{**repaired, "kubeconfig": "kubeconfig"}), tmp_path, "f")
    assert existing_cluster(own, tmp_path, "f").kubeconfig == tmp_path / "kubeconfig"


@pytest.mark.parametrize(
    "keys",
    [
        {"objectStore": {**FACTS["objectStore"], "secretKey": "hunter2"}},
        {"secret_token": "hunter2"},
        {"priorities": {"access-key": "hunter2", "access_key": "hunter2"}},
        {"objectStore": {**FACTS["objectStore"], "endpoint": "http://me:hunter2@store/path"}},
    ],
    ids=["unknown key below", "unknown key", "wrong type", "password in a URL"],
)
def test_what_looks_like_a_secret_is_not_printed(keys: dict[str, Any]) -> None:
    error = raised(with_(**keys))
    assert "hunter2" not in str(error)
    assert "hunter2" not in repr(error.problems)


@pytest.mark.parametrize("path", STACKS, ids=lambda path: path.name)
def test_every_shipped_stack_file_loads(path: Path) -> None:
    assert load_stack(path, PROJECT).teams


def test_the_stacks_are_the_three_that_are_promised() -> None:
    assert [path.name for path in STACKS] == ["Pulumi.dev.yaml", "Pulumi.local.yaml", "Pulumi.prod.yaml"]


def test_the_project_file_declares_every_key_with_type_and_meaning() -> None:
    declared = yaml.safe_load((PROJECT / "Pulumi.yaml").read_text())["config"]
    keys = {f"trainyard:{field.alias or name}": field for name, field in PlatformConfig.model_fields.items()}
    assert set(declared) == set(keys)
    types = {"object": "object", "array": "array", "string": "string"}
    for key, entry in declared.items():
        assert entry["description"], key
        schema = stack_schema()["properties"]["config"]["properties"][key]
        kinds = {types.get(one.get("type", "object"), "object") for one in schema.get("anyOf", [schema]) if one.get("type") != "null"}
        assert {entry["type"]} == kinds, key
        # The engine asks for every key that has no default.
        assert ("default" not in entry) == keys[key].is_required(), key


def refused(schema: dict[str, Any], value: Any, definitions: dict[str, Any], place: str = "") -> list[str]:
    """Return the places at which `value` is not as `schema` says: the part of JSON schema that the models need."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix("#/$defs/")]
    if "anyOf" in schema:
        tried = [refused(one, value, definitions, place) for one in schema["anyOf"]]
        return min(tried, key=len)
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": int | float, "boolean": bool, "null": type(None)}
    if "type" in schema and not isinstance(value, kinds[schema["type"]]):
        return [f"{place}: {schema['type']}"]
    if ("enum" in schema and value not in schema["enum"]) or ("pattern" in schema and not re.search(schema["pattern"], value)):
        return [f"{place}: value"]
    found: list[str] = []
    if isinstance(value, dict):
        found += [f"{place}.{key}: missing" for key in schema.get("required", ()) if key not in value]
        for key, inner in value.items():
            below = schema.get("properties", {}).get(key, schema.get("additionalProperties", True))
            if any(re.search(pattern, key) and not verdict for pattern, verdict in schema.get("patternProperties", {}).items()):
                below = False
            found += [f"{place}.{key}: unknown"] if below is False else []
            found += refused(below, inner, definitions, f"{place}.{key}") if isinstance(below, dict) else []
    if isinstance(value, list):
        found += [one for index, inner in enumerate(value) for one in refused(schema["items"], inner, definitions, f"{place}[{index}]")]
    return found


def check(schema: dict[str, Any], value: Any) -> list[str]:
    return refused(schema, value, schema["$defs"])


@pytest.mark.parametrize("path", STACKS, ids=lambda path: path.name)
def test_the_schema_accepts_every_shipped_stack_file(path: Path) -> None:
    assert check(stack_schema(), yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize("path", sorted((PROJECT / "runs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_schema_accepts_every_shipped_run_file(path: Path) -> None:
    assert check(run_schema(), yaml.safe_load(path.read_text())) == []


def test_the_schema_of_stacks_refuses_what_the_program_refuses() -> None:
    document = yaml.safe_load((PROJECT / "Pulumi.local.yaml").read_text())
    document["config"]["aws:region"] = "eu-west-1"
    assert check(stack_schema(), document) == []
    document["config"]["trainyard:nodegroups"] = []
    document["config"]["trainyard:teams"][0]["gpu"] = {}
    document["config"]["trainyard:provider"] = "aws"
    del document["config"]["trainyard:storage"]
    assert sorted(check(stack_schema(), document)) == [
        ".config.trainyard:nodegroups: unknown",
        ".config.trainyard:provider: value",
        ".config.trainyard:storage: missing",
        ".config.trainyard:teams[0].gpu: unknown",
    ]


def test_the_schema_of_runs_refuses_what_the_program_refuses() -> None:
    document = yaml.safe_load((PROJECT / "runs" / "smoke.yaml").read_text())
    document["model"] = "llama"
    document["train"]["bach_size"] = document["train"].pop("batch_size")
    assert sorted(check(run_schema(), document)) == [".model: value", ".train.bach_size: unknown", ".train.batch_size: missing"]
    assert set(run_schema()["properties"]) == set(RunFile.model_fields)


def test_keys_of_other_projects_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "Pulumi.x.yaml").write_text("config:\n  aws:region: eu-west-1\n  trainyard:provider: eks\n")
    assert stack_values(tmp_path / "Pulumi.x.yaml") == {"provider": "eks"}
