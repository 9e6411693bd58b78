"""Where a run keeps its objects: one S3 bucket, or a mounted folder with the same keys.

Whatever goes wrong becomes a StoreError: one sentence that says what, where and what to do.
"""

import hashlib
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

from training.config import RunConfig
from training.errors import StoreError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

DEFAULT_REGION = "us-east-1"
CONNECT_SECONDS = 5
READ_SECONDS = 60
ATTEMPTS = 4
CHUNK = 1 << 20
PARTIAL = ".partial-"  # a file that is being written

MISSING_CODES = {"NoSuchKey", "NoSuchUpload", "404", "NotFound"}
WRONG_CREDENTIALS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "XAdminUserNotFound", "401"}
FORBIDDEN = {"AccessDenied", "403", "Forbidden"}
ALREADY_THERE = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409"}


class MissingObjectError(StoreError):
    """The object does not exist."""


class ExistsError(StoreError):
    """The object exists already, and the put was conditional."""


@dataclass(frozen=True)
class Listed:
    """An object as a listing shows it."""

    key: str
    size: int


@dataclass(frozen=True)
class Upload:
    """A multipart upload that was begun and neither completed nor aborted: it takes space, and no listing shows it."""

    key: str
    id: str


def region() -> str:
    """Give the region to sign for."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or DEFAULT_REGION


def path_style() -> bool:
    """Tell whether the bucket belongs into the path: a store that is not AWS has no name per bucket."""
    return bool(os.environ.get("AWS_ENDPOINT_URL"))


class _Readable(ABC):
    """What follows from reading in pieces."""

    @abstractmethod
    def stream(self, key: str) -> Iterator[bytes]:
        """Read an object in pieces."""

    def get(self, key: str) -> bytes:
        """Read an object whole."""
        return b"".join(self.stream(key))

    def digest(self, key: str) -> tuple[int, str]:
        """Read an object back and give its size and SHA-256."""
        size, digest = 0, hashlib.sha256()
        for chunk in self.stream(key):
            size += len(chunk)
            digest.update(chunk)
        return size, digest.hexdigest()


class Store(_Readable):
    """One bucket of the object store that the standard AWS environment variables describe."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self.endpoint = os.environ.get("AWS_ENDPOINT_URL") or f"Amazon S3 in {region()}"
        self._client: S3Client = boto3.client(
            "s3",
            region_name=region(),
            config=Config(
                connect_timeout=CONNECT_SECONDS,
                read_timeout=READ_SECONDS,
                retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
                s3={"addressing_style": "path" if path_style() else "auto"},
            ),
        )

    def uri(self, key: str) -> str:
        """Name an object for a human or another S3 client."""
        return f"s3://{self.bucket}/{key}"

    def check(self) -> None:
        """Ask the least that shows whether the store answers, takes the credentials and has the bucket."""
        with self._explained("list", ""):
            self._client.list_objects_v2(Bucket=self.bucket, MaxKeys=1)

    def put(self, key: str, body: bytes) -> None:
        """Write an object whole."""
        with self._explained("write", key):
            self._client.put_object(Bucket=self.bucket, Key=key, Body=body)

    def put_new(self, key: str, body: bytes) -> None:
        """Write an object only if there is none yet; otherwise raise ExistsError."""
        with self._explained("write", key):
            self._client.put_object(Bucket=self.bucket, Key=key, Body=body, IfNoneMatch="*")

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a part of an object."""
        with self._explained("read", key):
            return self._client.get_object(Bucket=self.bucket, Key=key, Range=f"bytes={start}-{start + length - 1}")["Body"].read()

    def stream(self, key: str) -> Iterator[bytes]:
        """Read an object in pieces."""
        with self._explained("read", key):
            yield from self._client.get_object(Bucket=self.bucket, Key=key)["Body"].iter_chunks(CHUNK)

    def listing(self, prefix: str) -> list[Listed]:
        """List every object below a prefix, sorted by key."""
        with self._explained("list", prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
            return [Listed(entry.get("Key", ""), entry.get("Size", 0)) for page in pages for entry in page.get("Contents", [])]

    def delete(self, key: str) -> None:
        """Delete an object; one that is gone already is no error."""
        with self._explained("delete", key):
            self._client.delete_object(Bucket=self.bucket, Key=key)

    def uploads(self, prefix: str) -> list[Upload]:
        """List the open multipart uploads below a prefix."""
        with self._explained("list", prefix):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=prefix)
            return [Upload(entry.get("Key", ""), entry.get("UploadId", "")) for page in pages for entry in page.get("Uploads", [])]

    def abort(self, upload: Upload) -> None:
        """Give up a multipart upload; one that is gone already is no error."""
        with suppress(MissingObjectError), self._explained("delete", upload.key):
            self._client.abort_multipart_upload(Bucket=self.bucket, Key=upload.key, UploadId=upload.id)

    @contextmanager
    def _explained(self, action: str, key: str) -> Iterator[None]:
        """Turn what botocore raises into one sentence."""
        try:
            yield
        except (NoCredentialsError, PartialCredentialsError):
            raise StoreError(
                f"no credentials for the object store {self.endpoint}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
                "(in the cluster: the Secret object-store of the team's namespace) or give the pod an identity"
            ) from None
        except ClientError as error:
            raise self._refused(action, key, error) from None
        except BotoCoreError as error:
            raise StoreError(
                f"the object store {self.endpoint} did not answer to {action} {self.uri(key)} ({type(error).__name__}: {error}): "
                "check AWS_ENDPOINT_URL, that the store runs, and that the network rules of the namespace let the pod reach it"
            ) from None

    def _refused(self, action: str, key: str, error: ClientError) -> StoreError:
        """Explain an answer that says no."""
        details = error.response.get("Error", {})
        code, text = details.get("Code", "?"), details.get("Message", "")
        what = f"{action} {self.uri(key)}"
        if code == "NoSuchBucket":
            return StoreError(
                f"the bucket {self.bucket} does not exist in {self.endpoint}: create it, or correct the key bucket of the run"
            )
        if code in MISSING_CODES:
            return MissingObjectError(f"{self.uri(key)} does not exist")
        if code in ALREADY_THERE:
            return ExistsError(f"{self.uri(key)} exists already")
        if code in WRONG_CREDENTIALS:
            return StoreError(
                f"the object store {self.endpoint} does not accept the credentials ({code}): check AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY (in the cluster: the Secret object-store of the team's namespace)"
            )
        if code in FORBIDDEN:
            return StoreError(f"the object store {self.endpoint} refuses to {what} ({code}): the credentials are known but may not do this")
        return StoreError(f"the object store {self.endpoint} failed to {what} ({code}): {text}")


class Folder(_Readable):
    """A mounted path that several pods may share; needs rename and hard links, as NFS, EFS and FSx for Lustre have them."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    def uri(self, key: str) -> str:
        """Name an object for a human."""
        return str(self.root / key)

    def check(self) -> None:
        """Write and delete a file: a volume may be missing, full, or read only."""
        if not self.root.is_dir():
            raise StoreError(f"{self.root} is no folder: mount the volume there, or correct checkpoint.folder")
        with self._partial("check") as partial:
            _write_durably(partial, b"")

    def put(self, key: str, body: bytes) -> None:
        """Write an object so that a reader sees all of it or nothing."""
        with self._partial(key) as partial:
            _write_durably(partial, body)
            partial.replace(self.root / key)

    def put_new(self, key: str, body: bytes) -> None:
        """Write an object only if there is none yet; otherwise raise ExistsError."""
        with self._partial(key) as partial:
            _write_durably(partial, body)
            (self.root / key).hardlink_to(partial)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a part of an object."""
        with self._explained("read", key), (self.root / key).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def stream(self, key: str) -> Iterator[bytes]:
        """Read an object in pieces."""
        with self._explained("read", key), (self.root / key).open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk

    def listing(self, prefix: str) -> list[Listed]:
        """List every object below a prefix that is a folder, sorted by key."""
        with self._explained("list", prefix):
            files = [path for path in (self.root / prefix).rglob("*") if path.is_file() and not path.name.startswith(PARTIAL)]
            return sorted((Listed(str(path.relative_to(self.root)), path.stat().st_size) for path in files), key=lambda item: item.key)

    def delete(self, key: str) -> None:
        """Delete an object, and the folders that are empty then; one that is gone already is no error."""
        path = self.root / key
        with self._explained("delete", key):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            for folder in path.relative_to(self.root).parents[:-1]:
                (self.root / folder).rmdir()

    def uploads(self, prefix: str) -> list[Upload]:
        """List the files below a prefix that a dead writer left half-written."""
        with self._explained("list", prefix):
            return [Upload(str(path.relative_to(self.root)), "") for path in sorted((self.root / prefix).rglob(f"{PARTIAL}*"))]

    def abort(self, upload: Upload) -> None:
        """Remove such a file."""
        self.delete(upload.key)

    @contextmanager
    def _partial(self, key: str) -> Iterator[Path]:
        """Give the path to write to first; it is gone in the end."""
        path = (self.root / key).with_name(f"{PARTIAL}{uuid.uuid4()}")
        with self._explained("write", key):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                yield path
            finally:
                path.unlink(missing_ok=True)

    @contextmanager
    def _explained(self, action: str, key: str) -> Iterator[None]:
        """Turn what the operating system raises into one sentence."""
        try:
            yield
        except FileNotFoundError:
            raise MissingObjectError(f"{self.uri(key)} does not exist") from None
        except FileExistsError:
            raise ExistsError(f"{self.uri(key)} exists already") from None
        except OSError as error:
            raise StoreError(
                f"the volume at {self.root} failed to {action} {self.uri(key)}: {error.strerror}: check checkpoint.folder"
            ) from None


def _write_durably(path: Path, body: bytes) -> None:
    """Write a file that survives a loss of power."""
    with path.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def place_of(config: RunConfig) -> Store | Folder:
    """Give the place of the run's attempts, checkpoints and ledger."""
    return Folder(config.checkpoint.folder) if config.checkpoint.folder else Store(config.bucket)
