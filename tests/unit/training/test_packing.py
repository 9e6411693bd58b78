"""Text files become shards that depend on their names and contents only."""

import subprocess
import sys
from pathlib import Path

import pytest

from training.errors import DATA, DataError
from training.prepare import SEPARATOR, SHARD_BYTES, pack, survey


def test_files_are_packed_in_the_order_of_their_paths_each_with_its_separator(tmp_path: Path) -> None:
    for name, content in {"b.txt": "second", "a/z.txt": "first", "c.md": "not matched", "empty.txt": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    source = survey(tmp_path, "*.txt")
    assert b"".join(pack(source.files)) == b"first\x00second\x00\x00"
    assert source.tokens == len(b"first\x00second\x00\x00")


def test_shards_are_of_one_size_and_lose_nothing(tmp_path: Path) -> None:
    contents = [bytes([65 + number]) * (SHARD_BYTES // 2 + number) for number in range(5)]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.txt").write_bytes(content)
    source = survey(tmp_path, "*.txt")
    shards = list(pack(source.files))
    assert [len(shard) for shard in shards[:-1]] == [SHARD_BYTES] * (source.tokens // SHARD_BYTES)
    assert b"".join(shards) == b"".join(content + SEPARATOR for content in contents)


def test_the_fingerprint_follows_names_and_contents_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("text")
    first = survey(tmp_path, "*.txt").fingerprint
    path.touch()
    (tmp_path / "other.md").write_text("does not match")
    assert survey(tmp_path, "*.txt").fingerprint == first
    path.write_text("next")
    changed = survey(tmp_path, "*.txt").fingerprint
    path.rename(tmp_path / "two.txt")
    assert len({first, changed, survey(tmp_path, "*.txt").fingerprint}) == 3


def test_a_folder_that_is_missing_or_has_no_match_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist") as raised:
        survey(tmp_path / "absent", "*.txt")
    assert raised.value.code == DATA
    with pytest.raises(DataError, match=r"no file below .* matches '\*\.txt'"):
        survey(tmp_path, "*.txt")


def test_the_preparation_and_the_launcher_start_without_torch() -> None:
    program = "import sys, training.prepare, training.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
