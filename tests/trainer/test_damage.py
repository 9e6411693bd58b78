"""Checkpoints and data that are not what they were."""

from pathlib import Path

from .lab import BUCKET, DATASET, Lab, Told


def test_a_checkpoint_with_one_flipped_bit_is_passed_over(lab: Lab, straight: Told) -> None:
    lab.branch("straight", "flipped", [12, 18, 24])
    key = "runs/flipped/checkpoints/step-00000024/000001/__1_0.distcp"
    lab.flip_bit(key)
    told = lab.run(lab.config("flipped"))

    assert told.code == 0, told.errors
    assert key in told.one("skipped")["reason"]
    assert told.one("restore")["step"] == 18
    assert told.losses == {step: straight.losses[step] for step in range(19, 25)}
    assert told.one("done")["loss"] == straight.one("done")["loss"]
    assert lab.checkpoints("flipped") == [12, 18, 24], "the damaged one was replaced by a good one"


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(lab: Lab, straight: Told) -> None:
    lab.branch("straight", "ruined", [12, 18])
    lab.flip_bit("runs/ruined/checkpoints/step-00000012/000001/__0_0.distcp")
    lab.client.delete_object(Bucket=BUCKET, Key="runs/ruined/checkpoints/step-00000018/000001/.metadata")
    told = lab.run(lab.config("ruined"))

    assert told.code == 47
    newest, oldest = told.named("skipped")
    assert "step-00000018/000001/.metadata is missing" in newest["reason"]
    assert "step-00000012/000001/__0_0.distcp" in oldest["reason"]
    assert "all 2 committed checkpoint(s)" in told.one("error")["message"]
    assert not told.named("step", "fresh")
    assert "Traceback" not in told.errors


def test_a_missing_or_damaged_shard_is_named(lab: Lab, tmp_path: Path) -> None:
    for key in lab.keys(f"{DATASET}/"):
        lab.put(key.replace(DATASET, "datasets/torn", 1), lab.get(key))
    shard = "datasets/torn/shard-00001.bin"
    config = lab.config("torn", data={"prefix": "datasets/torn"})

    lab.flip_bit(shard)
    damaged = lab.run(config, TMPDIR=str(tmp_path))
    assert damaged.code == 45
    assert f"s3://{BUCKET}/{shard} is damaged" in damaged.one("error")["message"]

    lab.client.delete_object(Bucket=BUCKET, Key=shard)
    missing = lab.run(config, TMPDIR=str(tmp_path))
    assert missing.code == 45
    assert f"s3://{BUCKET}/{shard} is missing" in missing.one("error")["message"]
    assert "Traceback" not in damaged.errors + missing.errors
