"""The manifest of a packed dataset: which shards there are and what each must contain."""

import hashlib
import json
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from training.errors import DataError
from training.store import MissingObjectError, Store

DTYPE = "uint8"
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Shard(BaseModel):
    """One object with tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^shard-[0-9]{5}\.bin$")
    bytes: int = Field(gt=0)
    sha256: Sha256


class Manifest(BaseModel):
    """The whole dataset. Its SHA-256 is the identity of the dataset, so it holds nothing that changes from packing to packing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    tokens: int = Field(gt=0)
    dtype: str = Field(pattern=f"^{DTYPE}$")
    files: int = Field(ge=1)
    source_fingerprint: Sha256
    shards: tuple[Shard, ...] = Field(min_length=1)

    def to_json(self) -> bytes:
        """Write the manifest; equal manifests give equal bytes."""
        return (json.dumps(self.model_dump(mode="json"), indent=1) + "\n").encode()

    @property
    def sha256(self) -> str:
        """Identify the dataset by its content."""
        return hashlib.sha256(self.to_json()).hexdigest()


def manifest_key(prefix: str) -> str:
    """Name the manifest object; it is written last, so a dataset exists when it exists."""
    return f"{prefix}/manifest.json"


def read_manifest(store: Store, prefix: str) -> Manifest | None:
    """Read the manifest of a dataset; None when there is none."""
    key = manifest_key(prefix)
    try:
        manifest = Manifest.model_validate_json(store.get(key))
    except MissingObjectError:
        return None
    except ValidationError:
        raise DataError(f"{store.uri(key)} is not a dataset manifest: delete it and run the preparation again") from None
    if sum(shard.bytes for shard in manifest.shards) != manifest.tokens:
        raise DataError(f"{store.uri(key)} contradicts itself (its shards do not add up to its tokens): prepare the dataset again")
    return manifest
