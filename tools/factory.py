# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads what ``retrograd compile`` is to compile: a model and its arguments, from a function of the user's."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from retrograd.tools.console import CommandError, UsageError

_RETURNS = "return (model, args) or (model, args, kwargs), args being a tuple of the model's positional arguments"


@dataclass(frozen=True)
class Factory:
    """Where a factory is: ``source`` names a module, or a file if it ends in ``.py``; ``name`` is dotted inside it."""

    source: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Factory:
        """Read ``package.module:factory`` or ``path/to/file.py:factory``.

        Raises:
            UsageError: it is neither.
        """
        source, _, name = text.rpartition(":")
        if text.endswith(".vmfb"):
            raise UsageError(
                f"'{text}' is compiled code, which does not hold its model: give package.module:factory or "
                f"path/to/file.py:factory (to find what is wrong in it: retrograd bisect FACTORY --artifact {text})"
            )
        if not source or not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"'{text}' names no factory: give package.module:factory or path/to/file.py:factory")
        if not source.endswith(".py") and not all(part.isidentifier() for part in source.split(".")):
            raise UsageError(f"'{source}' is neither the name of a module nor a file that ends in .py")
        return cls(source, name)

    def __str__(self) -> str:
        return f"{self.source}:{self.name}"


@dataclass(frozen=True)
class Example:
    """A model and the arguments to compile it for."""

    model: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def make_example(factory: Factory) -> Example:
    """Import the factory's module, with the current folder on ``sys.path``, and call it.

    Raises:
        CommandError: it is not found, raises, or returns something else than a model and its arguments.
    """
    function: Any = _load_module(factory)
    for part in factory.name.split("."):
        if not hasattr(function, part):
            raise CommandError(f"{factory}: {_describe(function)} has no '{part}'")
        function = getattr(function, part)
    if not callable(function):
        raise CommandError(f"{factory} is {type(function).__name__}, not a function: {_RETURNS} from one")
    try:
        made = function()
    except Exception as error:
        raise CommandError(f"{factory} raised {_describe_error(error)}") from error
    return read_example(factory, made)


def read_example(factory: Factory, made: Any) -> Example:
    """Check what a factory returned.

    Raises:
        CommandError: it is no model with its arguments; says what it is.
    """
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise CommandError(f"{factory} returned {what}: {_RETURNS}")
    model, args, kwargs = made if len(made) == 3 else (*made, None)
    if not callable(model):
        raise CommandError(
            f"{factory} returned {type(model).__name__} for the model, which cannot be called: {_RETURNS}"
        )
    if not isinstance(args, (tuple, list)):
        raise CommandError(f"{factory} returned {type(args).__name__} for args: {_RETURNS}")
    if not isinstance(kwargs, (Mapping, type(None))):
        raise CommandError(f"{factory} returned {type(kwargs).__name__} for kwargs: return a mapping or None")
    return Example(model, args, kwargs or {})


def _load_module(factory: Factory) -> ModuleType:
    # The script's own folder comes first on sys.path; `python -m` has the current one there.
    sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        if factory.source.endswith(".py"):
            return _load_file(Path(factory.source))
        return importlib.import_module(factory.source)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{factory.source}.".startswith(f"{error.name}."):
            raise CommandError(
                f"no module '{error.name}' for {factory}: run from the folder that holds it, or give its file"
            ) from error
        raise CommandError(f"importing {factory.source} raised {_describe_error(error)}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CommandError(f"{path}: no such file")
    # What lies beside a file is importable from it, as when Python runs it.
    sys.path.insert(0, str(path.resolve().parent))
    # No name that an import of the user's could mean: a file may be called torch.py.
    name = f"__retrograd_{path.stem}__"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise CommandError(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up there.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _describe(value: Any) -> str:
    return f"the module {value.__file__}" if isinstance(value, ModuleType) else repr(value)


def _describe_error(error: Exception) -> str:
    """The error and the line of the user's that it came from: the last outside of installed packages."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_installed(f.filename)]
    if not frames or isinstance(error, SyntaxError):
        return text
    last = frames[-1]
    return f'{text}\n  at File "{last.filename}", line {last.lineno}, in {last.name}\n    {last.line}'


def _is_installed(filename: str) -> bool:
    return filename == __file__ or filename.startswith(("<", _LIBRARY)) or "site-packages" in filename


_LIBRARY = str(Path(importlib.__file__).parents[1])
