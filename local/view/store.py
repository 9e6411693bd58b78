"""The bucket, read: where a run's ledger lies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from local.errors import Problem

_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


@dataclass(frozen=True)
class Store:
    """An S3 bucket and how to reach it."""

    endpoint: str | None
    """URL of the object store; None is AWS."""
    region: str
    bucket: str = "trainyard-local"

    @classmethod
    def of(cls, platform: Mapping[str, Any], bucket: str = "trainyard-local") -> Store:
        """Return the store of the platform's facts."""
        facts = platform.get("objectStore") or {}
        return cls(facts.get("endpoint"), facts.get("region") or "us-east-1", bucket)

    def ledger_lines(self, run: str, credentials: Mapping[str, str] | None = None) -> list[str]:
        """Return the lines of the run's ledger; none when it has not been written yet."""
        try:
            body = self._client(os.environ if credentials is None else credentials).get_object(
                Bucket=self.bucket, Key=f"runs/{run}/ledger.jsonl"
            )["Body"]
            return body.read().decode(errors="replace").splitlines()
        except ClientError as refused:
            if refused.response.get("Error", {}).get("Code") in ("NoSuchKey", "NoSuchBucket", "404"):
                return []
            raise self._problem(refused) from refused
        except BotoCoreError as broken:
            raise self._problem(broken) from broken

    def checkpoints_uri(self, run: str) -> str:
        """Return where the run's checkpoints are."""
        return f"s3://{self.bucket}/runs/{run}/checkpoints/"

    def _client(self, credentials: Mapping[str, str]) -> Any:
        key, secret, token = (credentials.get(name) for name in _CREDENTIALS)
        options: dict[str, Any] = {"connect_timeout": 5, "read_timeout": 20, "retries": {"total_max_attempts": 2}}
        if self.endpoint:
            # A store of the platform is on this machine: neither a proxy of the environment nor virtual-host names lead there.
            options |= {"proxies": {}, "s3": {"addressing_style": "path"}}
        return boto3.session.Session(aws_access_key_id=key, aws_secret_access_key=secret, aws_session_token=token).client(
            "s3", endpoint_url=self.endpoint, region_name=self.region, config=Config(**options)
        )

    def _problem(self, cause: Exception) -> Problem:
        return Problem(
            f"The object store cannot be read: {cause}",
            where=f"bucket {self.bucket} at {self.endpoint or 'AWS, ' + self.region}",
            fix="is the platform up (`make up`), and are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY those of this store?",
        )
