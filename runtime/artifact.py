# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One file that holds a compiled backward pass: IREE's executable, its manifest and a seal over every byte.

The executable that IREE writes (a vmfb) is also a zip archive, which IREE's runtime reads from its first entry on. So
the file begins with the vmfb, unmoved and unchanged, and goes on with one more zip entry, `retrograd/manifest.json`, a
new central directory and the archive comment `retrograd-sha256:<64 hex digits>`. The digest covers all bytes before
its own digits. `iree-run-module` and `unzip` take the file as it is.
"""

import errno
import hashlib
import io
import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from iree.runtime import version as iree_version

from retrograd.contract.archive import EPOCH, OWN
from retrograd.contract.errors import RetrogradError
from retrograd.contract.manifest import FORMAT_VERSION, Manifest, parse_json, read_format_version
from retrograd.contract.reading import ManifestError
from retrograd.contract.whole_files import replacing

MANIFEST_MEMBER = f"{OWN}manifest.json"

_SEAL = b"retrograd-sha256:"
_DIGITS = 64
_SEAL_PATTERN = re.compile(rb"retrograd-sha256:[0-9a-f]{64}")
_ZIP_START = b"PK\x03\x04"
_ZIP_END = b"PK\x05\x06"
_ZIP_END_BYTES = 22
_REMEDY = "compile and save it again"


class ArtifactError(RetrogradError, RuntimeError):
    """A file that cannot be written or trusted as an artifact; the message says why and what helps."""


@dataclass(frozen=True)
class Artifact:
    """A file that passed every check: the vmfb as IREE wrote it, the manifest, and the file's sha256 in hex."""

    vmfb: bytes
    manifest: Manifest
    digest: str


def write_artifact(path: str | os.PathLike[str], vmfb: bytes, manifest: Manifest) -> None:
    """Write `vmfb` and `manifest` to `path`, at once or not at all.

    A file that was at `path` stays whole until the new one is complete.

    Raises:
        ArtifactError: `vmfb` is no executable of IREE's, or the manifest cannot be read back.
        OSError: the file system refused.
    """
    sealed = _seal(vmfb, manifest)
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder; make it before", str(path.parent))
    with replacing(path, synced=True) as file:
        file.write(sealed)


def read_artifact(path: str | os.PathLike[str]) -> Artifact:
    """Read and check an artifact; IREE sees nothing of it.

    Raises:
        ArtifactError: the file is missing, is no artifact, is cut short or altered, or was made in another format or
            for another IREE.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ArtifactError(f"{path}: no such file") from error
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
    digest = _check_seal(path, data)
    offset, text = _manifest_member(path, data)
    return Artifact(vmfb=data[:offset], manifest=_check_manifest(path, text), digest=digest)


def is_runtime_compatible(compiler: str, runtime: str) -> bool:
    """Whether what IREE compiler version `compiler` wrote runs on IREE runtime version `runtime`. IREE's bytecode
    format moves with each minor release; a runtime takes that of its own and of the next one."""
    made, runs = _major_minor(compiler), _major_minor(runtime)
    if made is None or runs is None:
        return False
    return made[0] == runs[0] and made[1] - runs[1] in (0, 1)


def _major_minor(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    return (int(match[1]), int(match[2])) if match else None


def _seal(vmfb: bytes, manifest: Manifest) -> bytes:
    try:
        text = manifest.to_json()
        Manifest.from_json(text)
    except ManifestError as error:
        raise ArtifactError(f"the manifest would not be read back: {error}") from error
    buffer = io.BytesIO(vmfb)
    if not vmfb.startswith(_ZIP_START) or not zipfile.is_zipfile(buffer):
        raise ArtifactError("the executable is not a vmfb in zip form: pass the bytes that iree-compile wrote")
    with zipfile.ZipFile(buffer, "a") as archive:
        if MANIFEST_MEMBER in archive.namelist():
            raise ArtifactError("the executable has a manifest already: pass Artifact.vmfb, not the whole file")
        # The new entry goes behind the vmfb's own directory rather than over it: reading the file back then gives the
        # vmfb byte for byte, and nothing that IREE maps in place moves.
        archive.start_dir = len(vmfb)
        archive.writestr(zipfile.ZipInfo(MANIFEST_MEMBER, EPOCH), text)
        archive.comment = _SEAL + b"0" * _DIGITS
    body = buffer.getvalue()[:-_DIGITS]
    if body[: len(vmfb)] != vmfb or not body.endswith(_SEAL):
        raise ArtifactError("zipfile of this Python moved the executable; write artifacts with another Python release")
    return body + hashlib.sha256(body).hexdigest().encode()


def _check_seal(path: Path, data: bytes) -> str:
    """The digits of the seal, once they are known to be those of the bytes before them."""
    if _SEAL_PATTERN.fullmatch(data[-len(_SEAL) - _DIGITS :]):
        digest = hashlib.sha256(data[:-_DIGITS]).hexdigest()
        if data[-_DIGITS:].decode() != digest:
            raise ArtifactError(f"{path}: altered: its bytes are not those its sha256 was taken of; {_REMEDY}")
        return digest
    raise ArtifactError(f"{path}: {_why_unsealed(data)}; {_REMEDY}")


def _why_unsealed(data: bytes) -> str:
    """Says what is wrong with a file that does not end in a seal."""
    if not data.startswith(_ZIP_START):
        if _ZIP_START.startswith(data):
            return f"truncated: {len(data)} bytes are no whole file"
        return "not an artifact: it does not begin as an executable of IREE's does"
    end = data.rfind(_ZIP_END)
    comment = data[end + _ZIP_END_BYTES :]
    length = int.from_bytes(data[end + _ZIP_END_BYTES - 2 : end + _ZIP_END_BYTES], "little")
    if end < 0 or len(data) < end + _ZIP_END_BYTES or len(comment) < length:
        return "truncated: the end of the archive is missing"
    if comment.startswith(_SEAL):
        return "altered: the sha256 at its end was changed or added to"
    if len(comment) > length:
        return "truncated: the archive goes on behind the executable and does not end"
    if MANIFEST_MEMBER.encode() not in data:
        return f"not an artifact: it holds no {MANIFEST_MEMBER} (a plain vmfb?)"
    return "altered: the sha256 at its end is missing"


def _manifest_member(path: Path, data: bytes) -> tuple[int, bytes]:
    """Where the manifest's entry begins, which is where the vmfb ends, and the manifest's bytes."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entry = archive.getinfo(MANIFEST_MEMBER)
            return entry.header_offset, archive.read(entry)
    except KeyError as error:
        raise ArtifactError(f"{path}: not an artifact: it holds no {MANIFEST_MEMBER}; {_REMEDY}") from error
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise ArtifactError(f"{path}: not an artifact: {error}; {_REMEDY}") from error


def _check_manifest(path: Path, text: bytes) -> Manifest:
    try:
        data = parse_json(text)
        found = read_format_version(data)
        if found != FORMAT_VERSION:
            raise ArtifactError(
                f"{path}: written in format version {found}, this release reads {FORMAT_VERSION}; "
                "save it again with this release, or install the release that wrote it"
            )
        manifest = Manifest.from_dict(data)
    except ManifestError as error:
        raise ArtifactError(f"{path}: its manifest is not one of this format: {error}; {_REMEDY}") from error
    compiler, runtime = manifest.versions["iree-compiler"], iree_version.VERSION
    if not is_runtime_compatible(compiler, runtime):
        raise ArtifactError(
            f"{path}: compiled by IREE {compiler}, which the installed IREE runtime {runtime} does not run; "
            "compile it again, or install the iree-base-runtime release of its compiler"
        )
    return manifest
