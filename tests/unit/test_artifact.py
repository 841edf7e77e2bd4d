# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The artifact file: what goes in comes out, IREE's own tools run it, and no altered byte goes unseen."""

import dataclasses
import json
import os
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import iree.runtime as iree_runtime
import numpy as np
import pytest
from iree.runtime import version as iree_version
from iree_tools import DUMP_MODULE, RUN_MODULE

from retrograd.contract.manifest import FORMAT_VERSION, Manifest
from retrograd.contract.reading import ManifestError
from retrograd.contract.signature import InputSpec, OutputSpec, Signature, StateSpec, TensorType, Unwritten
from retrograd.contract.tensors import FunctionSpec, TensorSpec
from retrograd.pipelines.toolchain.executable import iree_tool
from retrograd.runtime import artifact
from retrograd.runtime.artifact import ArtifactError, is_runtime_compatible, read_artifact, write_artifact

SOURCE = """
module @m {
  util.func public @forward(%x: tensor<4xf32>) -> tensor<4xf32> {
    %r = arith.addf %x, %x : tensor<4xf32>
    util.return %r : tensor<4xf32>
  }
}
"""
TYPE = TensorType((4,), "float32", (1,), "cpu", True)
MANIFEST = Manifest(
    format_version=FORMAT_VERSION,
    functions=(
        FunctionSpec(
            name="forward",
            arguments=(TensorSpec("x", "input", (4,), "float32"),),
            results=(TensorSpec("y", "output", (4,), "float32"), TensorSpec("s", "saved", (), "bool")),
            transient_bytes=0,
        ),
    ),
    targets=("cpu",),
    partition="min-cut",
    versions={"retrograd": "0.1.0", "torch": "2.13.0", "torch-mlir": "20261001", "iree-compiler": iree_version.VERSION},
    signature=Signature(
        params=(StateSpec("größe", TYPE),),
        buffers=(),
        inputs=(
            InputSpec("args[0]", TYPE),
            InputSpec("args[1]", None, 2.5),
            InputSpec("args[2]", None, Unwritten("x()")),
        ),
        outputs=(OutputSpec("output", "tensor", TYPE), OutputSpec("output[1]", "constant", constant=True)),
    ),
    report={},
)


@pytest.fixture(scope="module")
def vmfb(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("vmfb")
    (folder / "m.mlir").write_text(SOURCE)
    command: list[str | Path] = [
        iree_tool("iree-compile"),
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
        "--iree-llvmcpu-target-cpu=host",
        folder / "m.mlir",
        "-o",
        folder / "m.vmfb",
    ]
    subprocess.run(command, check=True)
    return (folder / "m.vmfb").read_bytes()


@pytest.fixture
def path(vmfb: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "model.vmfb"
    write_artifact(path, vmfb, MANIFEST)
    return path


def test_what_is_written_is_read(path: Path, vmfb: bytes) -> None:
    read = read_artifact(path)
    assert read.vmfb == vmfb
    assert read.manifest == MANIFEST
    assert path.read_bytes().endswith(read.digest.encode())


def test_the_same_content_gives_the_same_file(path: Path, vmfb: bytes, tmp_path: Path) -> None:
    write_artifact(tmp_path / "again.vmfb", vmfb, MANIFEST)
    assert (tmp_path / "again.vmfb").read_bytes() == path.read_bytes()


def test_a_file_is_replaced_and_keeps_the_usual_permissions(path: Path, vmfb: bytes) -> None:
    changed = dataclasses.replace(MANIFEST, partition="default")
    write_artifact(path, vmfb, changed)
    assert read_artifact(path).manifest == changed
    plain = path.with_name("plain")
    plain.write_bytes(b"")
    assert path.stat().st_mode == plain.stat().st_mode


def test_it_is_a_zip_archive(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.namelist()[0] == "module.fb"
        assert Manifest.from_json(archive.read("retrograd/manifest.json")) == MANIFEST


def test_iree_run_module_runs_it(path: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(4, dtype=np.float32))
    np.save(tmp_path / "y.npy", 2 * np.arange(4, dtype=np.float32))
    np.save(tmp_path / "wrong.npy", 3 * np.arange(4, dtype=np.float32))

    def run(expected: str) -> int:
        tensors = [f"--input=@{tmp_path}/x.npy", f"--expected_output=@{tmp_path}/{expected}"]
        command = [*RUN_MODULE, f"--module={path}", "--function=forward", *tensors]
        return subprocess.run(command, check=False, capture_output=True).returncode

    assert run("y.npy") == 0
    assert run("wrong.npy") != 0


def test_iree_reads_the_file_in_place(path: Path) -> None:
    instance = iree_runtime.VmInstance()
    assert "forward" in iree_runtime.VmModule.mmap(instance, str(path)).function_names
    assert "forward" in iree_runtime.VmModule.copy_buffer(instance, path.read_bytes()).function_names
    dump = subprocess.run([*DUMP_MODULE, path], check=True, capture_output=True, text=True)
    assert "// @m : version 0" in dump.stdout


def test_no_altered_byte_goes_unseen(path: Path) -> None:
    whole = path.read_bytes()
    # All of what this project wrote, and a sample of IREE's part.
    ours = len(read_artifact(path).vmfb)
    for position in [*range(0, ours, 97), *range(ours, len(whole))]:
        altered = bytearray(whole)
        altered[position] ^= 0x20
        path.write_bytes(altered)
        with pytest.raises(ArtifactError, match=r"altered|truncated"):
            read_artifact(path)


def test_no_truncation_goes_unseen(path: Path) -> None:
    whole = path.read_bytes()
    ours = len(read_artifact(path).vmfb)
    for length in [*range(0, ours, 97), *range(ours + 1, len(whole))]:
        path.write_bytes(whole[:length])
        with pytest.raises(ArtifactError, match="truncated"):
            read_artifact(path)


@pytest.mark.parametrize("extra", [b"0", b"\n", b"PK\x05\x06" + bytes(18)])
def test_bytes_added_at_the_end_are_seen(path: Path, extra: bytes) -> None:
    path.write_bytes(path.read_bytes() + extra)
    with pytest.raises(ArtifactError, match="altered"):
        read_artifact(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"none\.vmfb: no such file"):
        read_artifact(tmp_path / "none.vmfb")


def test_a_folder_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read: Is a directory"):
        read_artifact(tmp_path)


def test_another_file_is_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"\x80\x02 a pickle")
    with pytest.raises(ArtifactError, match="not an artifact: it does not begin"):
        read_artifact(tmp_path / "x.pt")


def test_a_plain_vmfb_is_no_artifact(tmp_path: Path, vmfb: bytes) -> None:
    (tmp_path / "x.vmfb").write_bytes(vmfb)
    with pytest.raises(ArtifactError, match=r"not an artifact: it holds no retrograd/manifest.json"):
        read_artifact(tmp_path / "x.vmfb")


def reseal(path: Path, vmfb: bytes, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Write an artifact whose seal is right and whose manifest this release would not write."""
    text = json.dumps(MANIFEST.to_dict() | fields).encode()
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "to_json", lambda self: text)
        patch.setattr(Manifest, "from_json", lambda data: MANIFEST)
        write_artifact(path, vmfb, MANIFEST)


def test_another_format_version_is_named(path: Path, vmfb: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    reseal(path, vmfb, monkeypatch, format_version=FORMAT_VERSION + 1, a_field_of_the_future=[])
    with pytest.raises(
        ArtifactError, match=f"format version {FORMAT_VERSION + 1}, this release reads {FORMAT_VERSION}"
    ):
        read_artifact(path)


def test_an_unreadable_manifest_is_named(path: Path, vmfb: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    reseal(path, vmfb, monkeypatch, targets="cpu")
    with pytest.raises(ArtifactError, match=r"manifest\.targets must be list, not str"):
        read_artifact(path)


def test_another_iree_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iree_version, "VERSION", "3.11.0")
    with pytest.raises(ArtifactError, match=r"compiled by IREE 3\.13.*runtime 3\.11\.0 does not run"):
        read_artifact(path)


@pytest.mark.parametrize(
    ("compiler", "runtime", "runs"),
    [
        ("3.13.0", "3.13.0rc20261016", True),
        ("3.13.0", "3.12.1", True),
        ("3.13.0", "3.11.0", False),
        ("3.13.0", "3.14.0", False),
        ("3.13.0", "4.13.0", False),
        ("4.0.0", "3.13.0", False),
        ("3.1", "3.13.0", False),
        ("unknown", "3.13.0", False),
    ],
)
def test_which_runtime_runs_what(compiler: str, runtime: str, runs: bool) -> None:
    assert is_runtime_compatible(compiler, runtime) is runs


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, SystemExit])
def test_an_interrupted_write_leaves_the_old_file_alone(
    path: Path, vmfb: bytes, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    before = path.read_bytes()

    def interrupt(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(error):
        write_artifact(path, vmfb, dataclasses.replace(MANIFEST, partition="default"))
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path: Path, vmfb: bytes) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such folder; make it before: '.*none'"):
        write_artifact(tmp_path / "none" / "x.vmfb", vmfb, MANIFEST)


@pytest.mark.parametrize("data", [b"", b"no archive", b"PK\x03\x04 but no archive"])
def test_only_executables_of_irees_are_written(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ArtifactError, match="not a vmfb in zip form"):
        write_artifact(tmp_path / "x.vmfb", data, MANIFEST)
    assert list(tmp_path.iterdir()) == []


def test_an_artifact_is_not_wrapped_twice(path: Path) -> None:
    with pytest.raises(ArtifactError, match="has a manifest already"):
        write_artifact(path, path.read_bytes(), MANIFEST)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"report": {"speed": float("nan")}}, "cannot be written as JSON"),
        ({"report": {"sizes": (1, 2)}}, "values that JSON changes"),
        ({"report": {1: "x"}}, "values that JSON changes"),
        ({"versions": {"torch": "2.13.0"}}, "manifest.versions lacks the field 'iree-compiler'"),
    ],
)
def test_a_manifest_that_would_not_come_back_is_not_written(
    path: Path, vmfb: bytes, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArtifactError, match=message):
        write_artifact(path, vmfb, dataclasses.replace(MANIFEST, **fields))
    assert read_artifact(path).manifest == MANIFEST


def edited(*path: str | int, **change: Any) -> Any:
    """The manifest's JSON, with the object at `path` updated by `change`; None removes a field."""
    data = json.loads(json.dumps(MANIFEST.to_dict()))
    target = data
    for step in path:
        target = target[step]
    target.update(change)
    for name in [name for name, value in change.items() if value is None]:
        del target[name]
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "manifest must be a JSON object, not list"),
        ({}, "manifest lacks the field 'format_version'"),
        (edited(format_version=99), "manifest has format_version 99"),
        (edited(format_version=True), "manifest.format_version must be int, not bool"),
        (edited(partition=None), "manifest lacks the field 'partition'"),
        (edited(colour="red"), "manifest has the unknown field 'colour'"),
        (edited(report=[]), "manifest.report must be dict, not list"),
        (edited(targets=[1]), r"manifest.targets\[0\] must be str, not int"),
        (edited("versions", torch=2), "manifest.versions.torch must be str, not int"),
        (edited("versions", numpy="2"), "manifest.versions has the unknown field 'numpy'"),
        (edited("functions", 0, transient_bytes="0"), r"functions\[0\].transient_bytes must be int, not str"),
        (edited("functions", 0, results=None), r"functions\[0\] lacks the field 'results'"),
        (edited("functions", 0, "arguments", 0, role="grad"), r"arguments\[0\].role is 'grad'; it must be one of"),
        (edited("functions", 0, "results", 1, role="tangent"), r"results\[1\].role is 'tangent'"),
        (
            edited("functions", 0, "results", 1, shape=[1.0]),
            r"results\[1\].shape\[0\] must be a size: expected a number, a name or a list, not float",
        ),
        (edited("functions", 0, "results", 1, device="cpu"), r"results\[1\] has the unknown field 'device'"),
    ],
)
def test_a_manifest_is_read_strictly(data: Any, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        Manifest.from_dict(data)


def test_a_manifest_finds_its_functions() -> None:
    assert MANIFEST.function("forward") is MANIFEST.functions[0]
    with pytest.raises(KeyError, match=r"no function 'backward' in the manifest; it has \['forward'\]"):
        MANIFEST.function("backward")


def test_text_that_is_no_json_is_refused() -> None:
    for data in (b"{", b"\xff"):
        with pytest.raises(ManifestError, match="not JSON"):
            Manifest.from_json(data)
    assert artifact.MANIFEST_MEMBER == "retrograd/manifest.json"
