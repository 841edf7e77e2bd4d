# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``retrograd doctor``: what is installed, whether it fits together, and the command that mends what does not.

It has to work where anything is missing: every import of another package stands in the check that needs it, and what it
prints needs no package.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import platform
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from retrograd.tools.console import PROGRAM, print_json

OK, OPTIONAL, MISSING = "ok", "-", "MISSING"
"""All is well; not usable here, and not needed for CPU; not usable, and needed."""

CPU_DRIVER = "local-task"

# Packages with native code, which may not load here, and the module that shows it. torch-mlir's bindings are loaded
# through the one module that may.
_LOADED = {"torch": "torch", "torch-mlir": "retrograd.dialects.ir", "iree-base-runtime": "iree.runtime"}

_COMPARE: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    "==": lambda found, asked: found[: len(asked)] == asked,
    ">=": lambda found, asked: found >= asked,
    "<": lambda found, asked: found < asked,
}


@dataclass(frozen=True)
class Finding:
    """One thing looked at: its state (``OK``, ``OPTIONAL``, ``MISSING``), what was found, the command that mends it."""

    name: str
    state: str
    found: str
    remedy: str | None = None


def execute(arguments: argparse.Namespace) -> int:
    """Print all findings; exit status 1 if something that CPU needs is missing."""
    findings = [*find_packages(), *find_compiler(), *find_devices(), find_cache()]
    healthy = all(finding.state != MISSING for finding in findings)
    if arguments.json:
        print_json({"ok": healthy, "findings": [dataclasses.asdict(finding) for finding in findings]})
        return 0 if healthy else 1
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.state:<{len(MISSING)}}  {finding.name:<{width}}  {finding.found}")
        if finding.remedy is not None:
            print(f"{'':{len(MISSING)}}  {'':{width}}  mend with: {finding.remedy}")
    print("ready to compile and run on CPU" if healthy else "not ready: mend what is MISSING")
    return 0 if healthy else 1


def find_packages() -> Iterator[Finding]:
    """retrograd, Python, and every package retrograd needs: installed, of a version that it asks for, and loadable."""
    version = _installed("retrograd")
    if version is None:
        yield Finding("retrograd", MISSING, "not installed as a package", "pip install --editable . (in its sources)")
        return
    yield Finding("retrograd", OK, version)
    yield Finding("python", OK, platform.python_version())
    for requirement in metadata.requires("retrograd") or ():
        if ";" not in requirement:
            yield find_package(requirement)
    compiler, runtime = _installed("iree-base-compiler"), _installed("iree-base-runtime")
    if compiler is not None and runtime is not None:
        yield find_iree_match(compiler, runtime)


def find_package(requirement: str) -> Finding:
    """Whether a requirement such as ``torch<2.14,>=2.11`` is met, and its package can be loaded where that may fail."""
    match = re.match(r"[\w.-]*\w", requirement)
    name = match[0] if match else requirement
    remedy = f"pip install {shlex.quote(requirement)}"
    version = _installed(name)
    if version is None:
        return Finding(name, MISSING, "not installed", remedy)
    if not is_met(version, requirement[len(name) :]):
        return Finding(name, MISSING, f"{version}, but retrograd needs {requirement}", remedy)
    try:
        if name in _LOADED:
            importlib.import_module(_LOADED[name])
    except (ImportError, OSError) as error:
        return Finding(name, MISSING, f"{version}, which cannot be loaded: {error}", f"{remedy} --force-reinstall")
    return Finding(name, OK, version)


def is_met(version: str, specifiers: str) -> bool:
    """Whether ``specifiers`` (``==``, ``>=`` and ``<``, with commas) allow ``version``; none at all allow any."""
    found = _release(version)
    asked = re.findall(r"(==|>=|<)\s*([\d.]+)", specifiers)
    return all(_COMPARE[operator](found, _release(release)) for operator, release in asked)


def find_iree_match(compiler: str, runtime: str) -> Finding:
    """Whether what the installed compiler writes runs on the installed runtime."""
    remedy = f"pip install iree-base-runtime=={compiler}"
    try:
        from retrograd.runtime.artifact import is_runtime_compatible
    except ImportError as error:
        return Finding("iree versions", MISSING, f"the runtime cannot be loaded: {error}", remedy)
    if not is_runtime_compatible(compiler, runtime):
        return Finding(
            "iree versions", MISSING, f"runtime {runtime} does not run what compiler {compiler} writes", remedy
        )
    return Finding("iree versions", OK, f"runtime {runtime} runs what compiler {compiler} writes")


def find_compiler() -> Iterator[Finding]:
    """iree-compile: where it is, and whether it starts."""
    remedy = "pip install --force-reinstall iree-base-compiler"
    try:
        from retrograd.pipelines.toolchain.executable import iree_tool
        from retrograd.pipelines.toolchain.subprocesses import run_tool

        tool = iree_tool("iree-compile")
        with tempfile.TemporaryDirectory(prefix="retrograd-doctor-") as folder:
            result = run_tool([tool, "--version"], folder=Path(folder))
    except (ImportError, OSError) as error:
        yield Finding("iree-compile", MISSING, str(error), remedy)
        return
    if result.returncode != 0:
        said = (result.stderr.strip() or f"exit status {result.returncode}").splitlines()[0]
        yield Finding("iree-compile", MISSING, f"{tool} does not start: {said}", remedy)
        return
    yield Finding("iree-compile", OK, str(tool))


def find_devices() -> Iterator[Finding]:
    """Every driver of IREE's and its devices. CPU needs one of them."""
    remedy = "pip install --force-reinstall iree-base-runtime"
    try:
        from retrograd.runtime.programs.devices import list_devices
    except ImportError as error:
        yield Finding("devices", MISSING, f"IREE's runtime cannot be loaded: {error}", remedy)
        return
    devices = list_devices()
    for device in devices:
        needed = device.driver == CPU_DRIVER
        name = f"device {device.driver}"
        if device.error is None:
            yield Finding(name, OK, " ".join(part for part in (device.name, device.path) if part))
        else:
            yield Finding(name, MISSING if needed else OPTIONAL, _reason(device.error), remedy if needed else None)
    if all(device.driver != CPU_DRIVER for device in devices):
        yield Finding(f"device {CPU_DRIVER}", MISSING, "this build of IREE's runtime has no such driver", remedy)


def find_cache() -> Finding:
    """Where executables are kept, how much is there, and whether more can be written."""
    try:
        from retrograd.contract.environment import CACHE_FOLDER
        from retrograd.runtime.cache import Cache
    except ImportError as error:
        return Finding("cache", MISSING, f"cannot be loaded: {error}", "pip install platformdirs")
    cache = Cache()
    existing = next(folder for folder in (cache.folder, *cache.folder.absolute().parents) if folder.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        remedy = f"export {CACHE_FOLDER}=/path/to/a/folder"
        return Finding("cache", OPTIONAL, f"{cache.folder}: cannot be written, so nothing is kept", remedy)
    return Finding(
        "cache", OK, f"{cache.folder}: {len(cache.entries())} entries, {cache.size():,} bytes (`{PROGRAM} cache`)"
    )


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` -> ``(2, 13, 0)``; a pre-release counts as its release."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _reason(error: str) -> str:
    """IREE's message without the place in IREE's sources and the status that it starts with."""
    return re.sub(r"^.*?\.c:\d+: (?:[A-Z_]+; )?", "", error).rstrip(": ")
