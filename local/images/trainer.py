"""The trainer's image, built from `training/Dockerfile` with buildah on a base bootstrapped from Debian's packages, handed to containerd.

No registry and no container engine takes part. What is slow (the base, the layer of requirements) is kept in the user's cache and shared
by all checkouts; after a change of the package alone the build and the hand-over take about a second.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from local import locks, paths
from local.errors import Problem
from local.images.controllers import containerd
from local.node import layout
from local.progress import Progress
from local.tools.golang import last_line

TASK = "trainer image"
REPOSITORY = "localhost/trainyard/trainer"
_SUITE = "bookworm"
_PACKAGES = "python3,python3-venv,python3-dev,g++,ca-certificates"
"""Compiler and headers are for torch.compile, which needs them when the training runs."""

_BASE = f"localhost/trainyard/python-base:{_SUITE}-{hashlib.sha256(_PACKAGES.encode()).hexdigest()[:8]}"
_RECORD = paths.HOME / "images" / "trainer.json"
_FREE_BYTES = 16 * 10**9
"""Build storage, the OCI folder and containerd's copy together, measured 15 GB."""


@dataclass(frozen=True)
class Image:
    """A built trainer: the hash of its sources, its tag, and the digest by which Jobs name it."""

    sources: str
    tag: str
    digest: str

    @property
    def reference(self) -> str:
        """The name for a pod: by digest, so that a Job runs what was reviewed."""
        return f"{REPOSITORY}@{self.digest}"


def provide(progress: Progress) -> Image:
    """Build what is not built and return the image; containerd need not run yet.

    Raises `Problem` when the disk is nearly full, the package registries cannot be reached, or a step fails.
    """
    sources = _sources_hash()
    known = _known()
    if known and known.sources == sources and _layout_has(known.digest):
        return known
    with progress.task(TASK), locks.exclusive(_store() / "lock", lambda other: progress.detail(TASK, other)):
        if not _exists(_BASE):
            check_space()
            progress.detail(TASK, "a base from Debian's packages")
            _bootstrap_base()
        tag = git_revision()
        progress.detail(TASK, "requirements and package (PyTorch is some gigabytes)")
        _build(tag)
        progress.detail(TASK, "writing it as OCI layout")
        image = Image(sources, tag, _export(tag))
        _leave_no_mount()
        progress.detail(TASK, f"{tag} {image.digest[:19]}")
    _RECORD.parent.mkdir(parents=True, exist_ok=True)
    _RECORD.write_text(json.dumps(asdict(image)))
    return image


def load(image: Image, progress: Progress) -> None:
    """Import the image into containerd: only the blobs that it does not have travel."""
    if image.reference in containerd("images", "list", "--quiet").split():
        return
    with progress.task("image into containerd"):
        archive = layout.ROOT / "trainer.tar"
        index = layout.ROOT / "trainer-index"
        try:
            _pack(image, archive, index)
            containerd("images", "import", "--digests", "--base-name", REPOSITORY, str(archive))
        except subprocess.CalledProcessError as failure:
            raise Problem(f"containerd did not take the trainer image: {last_line(failure.stderr)}", fix="make up") from failure
        finally:
            archive.unlink(missing_ok=True)
            shutil.rmtree(index, ignore_errors=True)


def purge() -> None:
    """Remove the build storage; it holds mounts and files of other owners, which only its own tool may remove."""
    if shutil.which("buildah") and _store().exists():
        subprocess.run([*_buildah(), "rmi", "--all", "--force"], capture_output=True, check=False)
    _leave_no_mount()


def git_revision() -> str:
    """Return the short commit of the checkout, with `-dirty` when files differ from it; `nogit` where git cannot tell."""
    if not shutil.which("git"):
        return "nogit"

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=paths.PROJECT, capture_output=True, text=True, check=False).stdout.strip()

    revision = git("rev-parse", "--short=12", "HEAD")
    return f"{revision}-dirty" if revision and git("status", "--porcelain") else revision or "nogit"


def _pack(image: Image, archive: Path, index: Path) -> None:
    """Write a tar with an index of this one image and the blobs that containerd lacks."""
    present = set(containerd("content", "list", "--quiet").split())
    manifest = json.loads(_blob(image.digest).read_text())
    layers = [layer["digest"] for layer in manifest["layers"]]
    needed = [image.digest, manifest["config"]["digest"], *(layer for layer in layers if layer not in present)]
    descriptor = {
        "mediaType": manifest.get("mediaType", "application/vnd.oci.image.manifest.v1+json"),
        "digest": image.digest,
        "size": _blob(image.digest).stat().st_size,
        "annotations": {"io.containerd.image.name": f"{REPOSITORY}:{image.tag}"},
    }
    index.mkdir(parents=True, exist_ok=True)
    (index / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [descriptor]}))
    (index / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    blobs = [f"blobs/sha256/{digest.removeprefix('sha256:')}" for digest in needed]
    _run(["tar", "-cf", str(archive), "-C", str(index), "oci-layout", "index.json", "-C", str(_oci()), *blobs], "packing the image")


def _build(tag: str) -> None:
    command = [*_buildah(), "bud", "--isolation=chroot", "--network=host", "--layers", "--timestamp=0", f"--build-arg=BASE={_BASE}"]
    command += [f"--volume={_uv_cache()}:/root/.cache/uv"]
    bundle = os.environ.get("SSL_CERT_FILE") or os.environ.get("REQUESTS_CA_BUNDLE") or "/etc/ssl/certs/ca-certificates.crt"
    command += [f"--secret=id=ca,src={bundle}"] if Path(bundle).exists() else []
    command += [f"--tag={REPOSITORY}:{tag}", "--file=training/Dockerfile", str(paths.PROJECT)]
    _run(command, "building the trainer image")


def _export(tag: str) -> str:
    """Write the image into the OCI folder, uncompressed (compressing PyTorch takes minutes and nothing travels), and return its digest."""
    _oci().mkdir(parents=True, exist_ok=True)
    source = f"containers-storage:[overlay@{_store() / 'storage'}+{_runtime()}]{REPOSITORY}:{tag}"
    _run(
        ["skopeo", "--insecure-policy", "copy", "--quiet", "--dest-oci-accept-uncompressed-layers", source, f"oci:{_oci()}:{tag}"],
        "exporting",
    )
    index = json.loads((_oci() / "index.json").read_text())
    named = [entry for entry in index["manifests"] if entry.get("annotations", {}).get("org.opencontainers.image.ref.name") == tag]
    return named[-1]["digest"]


def _bootstrap_base() -> None:
    archive = _store() / f"base.{os.getpid()}.tar"
    skipped = [f"--dpkgopt=path-exclude={pattern}" for pattern in ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*")]
    forget = '--customize-hook=rm -f "$1/etc/resolv.conf" "$1/etc/hostname" "$1/etc/machine-id"'  # they are this machine's
    include = f"--include={_PACKAGES}"
    try:
        _run(["mmdebstrap", "--quiet", "--variant=minbase", include, *skipped, forget, _SUITE, str(archive)], "making the base image")
        container = _run([*_buildah(), "from", "scratch"], "making the base image").strip()
        _run([*_buildah(), "add", "--quiet", container, str(archive), "/"], "making the base image")
        _run([*_buildah(), "commit", "--quiet", "--rm", "--timestamp=0", container, _BASE], "making the base image")
    finally:
        archive.unlink(missing_ok=True)


def _run(command: list[str], doing: str) -> str:
    environment = {**os.environ, "TMPDIR": str(_store()), "BUILDAH_LAYERS": "true"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        log = paths.HOME / "logs" / "image.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"$ {' '.join(command)}\n{done.stdout}\n{done.stderr}")
        fix = "check that Debian's packages and the Python package index can be reached; then make up: finished layers are kept"
        raise Problem(f"{doing} failed: {last_line(done.stderr)}", where=str(log), fix=fix)
    return done.stdout


def check_space() -> None:
    """Raise `Problem` when the disk of the cache cannot hold an image build."""
    _store().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(_store()).free
    if free < _FREE_BYTES:
        raise Problem(
            f"the trainer image needs {_FREE_BYTES / 1e9:.0f} GB of free disk, {free / 1e9:.1f} GB are free",
            where=str(_store()),
            fix="free some space, or set TRAINYARD_CACHE to a folder on another disk",
        )


def _sources_hash() -> str:
    digest = hashlib.sha256()
    package = [path for path in (paths.PROJECT / "training").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in sorted([*package, paths.PROJECT / "requirements-bootstrap.txt", paths.PROJECT / ".dockerignore"]):
        digest.update(str(path.relative_to(paths.PROJECT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _known() -> Image | None:
    try:
        return Image(**json.loads(_RECORD.read_text()))
    except FileNotFoundError:
        return None


def _layout_has(digest: str) -> bool:
    return _blob(digest).exists()


def _leave_no_mount() -> None:
    """Undo what buildah leaves on the machine: its storage mounted on itself, and its runtime folder."""
    subprocess.run(["umount", str(_store() / "storage" / "overlay")], capture_output=True, check=False)
    shutil.rmtree(_runtime(), ignore_errors=True)


def _exists(reference: str) -> bool:
    _store().mkdir(parents=True, exist_ok=True)
    return subprocess.run([*_buildah(), "inspect", "--type=image", reference], capture_output=True, check=False).returncode == 0


def _buildah() -> list[str]:
    return ["buildah", f"--root={_store() / 'storage'}", f"--runroot={_runtime()}", "--storage-driver=overlay"]


def _store() -> Path:
    return paths.cache() / "images"


def _runtime() -> Path:
    return Path("/run") / f"{layout.NAMESPACE}-build"


def _oci() -> Path:
    return _store() / "oci"


def _blob(digest: str) -> Path:
    return _oci() / "blobs" / "sha256" / digest.removeprefix("sha256:")


def _uv_cache() -> Path:
    folder = Path(os.environ.get("UV_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "uv")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
