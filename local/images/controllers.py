"""Images that hold one static binary and nothing else, made in memory as OCI archives and handed to containerd.

The entry point is the one the charts expect (`/manager`); the user is numeric, because the kubelet cannot tell from a name that it is
not root.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

from local.node import layout
from local.tools import locate

_ENTRYPOINTS = {"pause": "/pause", "coredns": "/coredns", "kueue": "/manager", "jobset": "/manager"}
_USER = "65532:65532"


def load() -> None:
    """Import every controller image that containerd does not have as it is now."""
    present = containerd("images", "list", "--quiet").split()
    for name, reference in layout.IMAGES.items():
        stamp = f"{reference}-{locate(name).parent.name.rpartition('-')[2]}"
        if reference not in present or stamp not in present:
            archive = layout.ROOT / f"{name}.tar"
            archive.write_bytes(_archive(locate(name), _ENTRYPOINTS[name], reference))
            containerd("images", "import", str(archive))
            containerd("images", "tag", "--force", reference, stamp)
            archive.unlink()


def containerd(*arguments: str) -> str:
    """Run `ctr` against the node's containerd and return what it prints."""
    command = ["ctr", f"--address={layout.CONTAINERD_SOCKET}", "--namespace=k8s.io", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _archive(binary: Path, entrypoint: str, reference: str) -> bytes:
    layer = _layer(binary, entrypoint)
    packed = gzip.compress(layer, compresslevel=1, mtime=0)
    config = _json(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": [entrypoint], "User": _USER},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar+gzip", packed)],
        }
    )
    top = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest)
    top["annotations"] = {"io.containerd.image.name": reference}
    files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": _json({"schemaVersion": 2, "manifests": [top]})}
    for blob in (packed, config, manifest):
        files[f"blobs/sha256/{_digest(blob).removeprefix('sha256:')}"] = blob
    return _tar(files)


def _layer(binary: Path, entrypoint: str) -> bytes:
    return _tar({entrypoint.lstrip("/"): binary.read_bytes()}, mode=0o755)


def _tar(files: dict[str, bytes], mode: int = 0o644) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _descriptor(media_type: str, content: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(content), "size": len(content)}


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
