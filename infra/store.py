"""The bucket for datasets and checkpoints, behind one small interface.

On a cluster that is already there the bucket is made through its S3 endpoint. Code that deploys runs sees only `ObjectStore`,
so a bucket made another way changes nothing for it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import boto3
import pulumi
from botocore.config import Config
from botocore.exceptions import ClientError
from pulumi.dynamic import CreateResult, DiffResult, ReadResult, Resource, ResourceProvider, UpdateResult

from infra.settings import Storage, StoreEndpoint

_GONE = ("404", "NoSuchBucket")
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@dataclass(frozen=True)
class ObjectStore:
    """What the rest of the platform knows of the object store."""

    bucket: pulumi.Input[str]
    region: str
    endpoint: str | None
    ready: pulumi.Resource
    """The resource that must exist before anything reads or writes the bucket."""


class BucketProvider(ResourceProvider):
    """Makes and removes a bucket through an S3 endpoint.

    The engine keeps the name of this class in its state and runs it in a process of its own, so a change of the code is no change of the
    bucket. Keys come from the environment when it runs and are never part of its inputs.
    """

    serialize_as_secret_always = False

    def _client(self, properties: dict[str, Any]) -> Any:
        config = Config(
            s3={"addressing_style": "path"}, connect_timeout=5, read_timeout=30, retries={"max_attempts": 3, "mode": "standard"}
        )
        # A session of its own: the environment may name a configuration file or a profile meant for another account.
        session = boto3.session.Session(region_name=properties["region"])
        return session.client("s3", endpoint_url=properties["endpoint"], config=config)

    def create(self, props: dict[str, Any]) -> CreateResult:
        """Create the bucket, or take it over when these keys own it: one that outlived its stack keeps what it holds."""
        client, bucket = self._client(props), props["bucket"]
        try:
            client.create_bucket(Bucket=bucket)
        except ClientError as error:
            if _code(error) not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise
            owned = {entry["Name"] for entry in client.list_buckets()["Buckets"]}
            if bucket not in owned:
                raise Exception(
                    f"bucket {bucket} at {props['endpoint']} belongs to someone else; choose another trainyard:storage.bucket"
                ) from None
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
        return CreateResult(id_=bucket, outs=props)

    def read(self, id_: str, props: dict[str, Any]) -> ReadResult:
        """Return the bucket as it is; none when it has gone."""
        try:
            self._client(props).head_bucket(Bucket=id_)
        except ClientError as error:
            if _code(error) in _GONE:
                return ReadResult(id_="", outs={})
            raise
        return ReadResult(id_=id_, outs=props)

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> DiffResult:
        """Compare what describes the bucket: by another name or at another endpoint it is another bucket."""
        kept = ("bucket", "endpoint", "region", "forceDestroy")
        replaces = [key for key in ("bucket", "endpoint") if _olds.get(key) != _news.get(key)]
        changes = any(_olds.get(key) != _news.get(key) for key in kept)
        return DiffResult(changes=changes, replaces=replaces, stables=[], delete_before_replace=False)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> UpdateResult:
        """Make sure versions are kept, and note the new settings."""
        self._client(_news).put_bucket_versioning(Bucket=_id, VersioningConfiguration={"Status": "Enabled"})
        return UpdateResult(outs=_news)

    def delete(self, _id: str, _props: dict[str, Any]) -> None:
        """Remove the bucket. One that holds anything is only removed when the stack said so beforehand."""
        client = self._client(_props)
        try:
            held = client.list_objects_v2(Bucket=_id, MaxKeys=1).get("KeyCount", 0)
            if held and not _props["forceDestroy"]:
                raise Exception(
                    f"bucket {_id} holds datasets or checkpoints and trainyard:storage.forceDestroy is false; "
                    "set it to true, run `pulumi up`, then destroy again"
                )
            for page in client.get_paginator("list_object_versions").paginate(Bucket=_id):
                found = page.get("Versions", []) + page.get("DeleteMarkers", [])
                keys = [{"Key": entry["Key"], "VersionId": entry["VersionId"]} for entry in found]
                if keys:
                    client.delete_objects(Bucket=_id, Delete={"Objects": keys, "Quiet": True})
            client.delete_bucket(Bucket=_id)
        except ClientError as error:
            if _code(error) not in _GONE:
                raise


def _code(error: ClientError) -> str:
    return error.response.get("Error", {}).get("Code", "")


class Bucket(Resource, module="trainyard", name="Bucket"):
    """A bucket behind an S3 endpoint."""

    def __init__(self, name: str, properties: dict[str, Any], opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__(BucketProvider(), name, properties, opts)


def store_behind_endpoint(endpoint: StoreEndpoint, storage: Storage) -> ObjectStore:
    """Return the object store of a cluster that is already there."""
    properties = {"bucket": storage.bucket, "endpoint": endpoint.endpoint, "region": endpoint.region, "forceDestroy": storage.force_destroy}
    bucket = Bucket(storage.bucket, properties)
    return ObjectStore(bucket=storage.bucket, region=endpoint.region, endpoint=endpoint.endpoint, ready=bucket)


def credentials_from_environment() -> dict[str, pulumi.Output[str]]:
    """Return the keys of the object store as secrets, by the names the trainer's environment gives them."""
    missing = [name for name in CREDENTIALS if not os.environ.get(name)]
    if missing:
        raise pulumi.RunError(
            f"{' and '.join(missing)} must be set in the environment of `pulumi`: the object store's keys are never kept in a stack file. "
            "For the embedded platform `make up` sets them; for an S3 endpoint of your own run `export "
            + " ".join(f"{name}=..." for name in missing)
            + "`."
        )
    return {name: pulumi.Output.secret(os.environ[name]) for name in CREDENTIALS}
