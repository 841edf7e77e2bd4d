# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Describes an artifact: its functions, their tensors, what made it.

Reading is strict. A manifest with a field too many, too few or of another type is refused by name, so that a program
never runs on a signature that was understood by half.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from retrograd.contract.reading import ManifestError, read_as, read_fields, read_plain
from retrograd.contract.signature import Signature
from retrograd.contract.tensors import FunctionSpec

FORMAT_VERSION = 3
"""The only manifest format that this release writes and reads."""

PACKAGES = {
    "retrograd": "retrograd",
    "torch": "torch",
    "torch-mlir": "torch-mlir",
    "iree-compiler": "iree-base-compiler",
}
"""The packages that make an executable: a key of ``Manifest.versions``, and the distribution."""


@dataclass(frozen=True)
class Manifest:
    """All that a loader must know before it gives an executable to IREE.

    `targets` are the devices compiled for, `partition` the policy that chose what is saved, `versions` the packages
    that made the executable (keys `PACKAGES`). `report` is a JSON object that this module carries and does not
    read.
    """

    format_version: int
    functions: tuple[FunctionSpec, ...]
    targets: tuple[str, ...]
    partition: str
    versions: dict[str, str]
    signature: Signature
    report: dict[str, Any]

    def function(self, name: str) -> FunctionSpec:
        """The function exported as `name`.

        Raises:
            KeyError: there is none; the message lists those there are.
        """
        for spec in self.functions:
            if spec.name == name:
                return spec
        raise KeyError(f"no function {name!r} in the manifest; it has {[spec.name for spec in self.functions]}")

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of this manifest."""
        return {
            "format_version": self.format_version,
            "functions": [function.to_dict() for function in self.functions],
            "targets": list(self.targets),
            "partition": self.partition,
            "versions": dict(self.versions),
            "signature": self.signature.to_dict(),
            "report": self.report,
        }

    @classmethod
    def from_dict(cls, data: Any) -> Manifest:
        """Read what `to_dict` wrote.

        Raises:
            ManifestError: the format version is another, or a field is missing, unknown or of another type.
        """
        version = read_format_version(data)
        if version != FORMAT_VERSION:
            raise ManifestError(f"manifest has format_version {version}; this release reads {FORMAT_VERSION}")
        manifest = read_plain(cls, data, "manifest")
        read_fields(manifest.versions, PACKAGES, "manifest.versions")
        return manifest

    def to_json(self) -> bytes:
        """The manifest as UTF-8 JSON, the same bytes for the same content.

        Raises:
            ManifestError: the signature or `report` holds something that JSON cannot carry unchanged.
        """
        try:
            text = json.dumps(self.to_dict(), sort_keys=True, indent=1, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ManifestError(f"the manifest cannot be written as JSON: {error}") from error
        # A tuple or an integer key would be written without complaint and come back as something else.
        if json.loads(text) != self.to_dict():
            raise ManifestError(
                "the manifest holds values that JSON changes; use lists, strings as keys, plain numbers"
            )
        return text.encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Read what `to_json` wrote.

        Raises:
            ManifestError: not JSON, or not a manifest of this format.
        """
        return cls.from_dict(parse_json(data))


def parse_json(data: bytes) -> Any:
    """The JSON value in `data`.

    Raises:
        ManifestError: it is not UTF-8 JSON.
    """
    try:
        return json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ManifestError(f"the manifest is not JSON: {error}") from error


def read_format_version(data: Any) -> int:
    """The format version of a parsed manifest, whatever its other fields are.

    Raises:
        ManifestError: `data` is no object, or its `format_version` is no integer.
    """
    if not isinstance(data, dict):
        raise ManifestError(f"manifest must be a JSON object, not {type(data).__name__}")
    if "format_version" not in data:
        raise ManifestError("manifest lacks the field 'format_version'")
    return read_as(data["format_version"], int, "manifest.format_version")
