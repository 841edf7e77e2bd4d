# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The Python values that a trace went by: numbers, flags and texts in attributes, configurations, globals, closures.

A value counts where code that ran names it: of the attributes of the model's modules, and of objects that are
attributes of these, those whose names stand in the code of a function that was called, or that ``getattr`` was given.
So do functions, methods and the classes that have them. That may be more than what was read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch

from retrograd.frontend.python.generators import is_generator
from retrograd.frontend.python.held_objects import reach
from retrograd.frontend.python.python_calls_seen import PythonSeen
from retrograd.frontend.python.python_functions import Names, cells_of, find_functions, global_names
from retrograd.frontend.python.python_places import Place, PythonValues
from retrograd.frontend.python.python_search import Search
from retrograd.frontend.python.python_tables import ABSENT, Lookup, of_tensor, settings_of

# What a user may set between two calls; those that are always looked at, and those that are where code names them.
_ALWAYS = {
    "get_default_dtype": torch.get_default_dtype,
    "are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
}
_NAMED: dict[str, Callable[[], Any]] = {
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "get_num_threads": torch.get_num_threads,
    "get_default_device": torch.get_default_device,
    "flash_sdp_enabled": torch.backends.cuda.flash_sdp_enabled,
    "mem_efficient_sdp_enabled": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math_sdp_enabled": torch.backends.cuda.math_sdp_enabled,
    "cudnn_sdp_enabled": torch.backends.cuda.cudnn_sdp_enabled,
}
# Those that a trace sets itself.
_IN_EAGER = {
    "is_grad_enabled": torch.is_grad_enabled,
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "is_multithreading_enabled": torch._C._is_multithreading_enabled,
}
# What each module has: tables of tensors, modules and hooks.
_TABLES_OF_MODULES = frozenset(vars(torch.nn.Module()))
# In which code is looked for that has not run yet, once more each time that there is some.
_ROUNDS = 4


def find_values(
    model: Callable[..., Any], modules: Mapping[str, torch.nn.Module], seen: PythonSeen, changed: set[tuple[int, str]]
) -> PythonValues:
    """The values that ``model``, of these modules by path, went by when it ran what ``seen`` has.

    ``changed`` are attributes, by the identity of their module, that the model itself sets when it is called: what was
    in them is not looked at.
    """
    codes, names = set(seen.codes), set(seen.read)
    for _ in range(_ROUNDS):
        search = _search(model, modules, Search(Names(codes, names), codes, changed, modules.values()))
        if search.more_codes <= codes and search.more_names <= names:
            break
        codes |= search.more_codes
        names |= search.more_names
    settings = _ALWAYS | {name: get for name, get in _NAMED.items() if name in search.names.all}
    places = [*search.places, *_places_of(settings)]
    for name, value in seen.environment.items():
        known = ABSENT if value is None else value
        places.append(Place(f"os.environ[{name!r}]", Lookup(os.environ.get), name, known))
    if seen.reads_environment:
        places += _places_of({"os.environ.copy": os.environ.copy})
    for path, module in modules.items():
        for attribute, tensor in seen.asked:
            owner, _, name = tensor.rpartition(".")
            if owner == path:
                table = module._parameters if name in module._parameters else module._buffers
                asked = of_tensor(table, name)
                places.append(Place(f"{tensor}.{attribute}", asked, attribute, asked.get(attribute, ABSENT)))
    # The second of several traces sets it.
    if "is_anomaly_enabled" in search.names.of_program:
        search.eager.append(Place("torch.is_anomaly_enabled()", {}, "", False))
    in_eager = {name: get for name, get in _IN_EAGER.items() if name in search.names.of_program}
    eager = (*search.eager, *_places_of(in_eager))
    return PythonValues(tuple(places), tuple(search.tensors), eager, search.steps, search.generators)


def _search(model: Callable[..., Any], modules: Mapping[str, torch.nn.Module], search: Search) -> Search:
    for path, module in modules.items():
        search.add_attributes(path or "model", module)
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            for hook in vars(module)[name].values():
                search.look_into(f"{path}.{name}", hook)
    search.look_into(getattr(model, "__qualname__", "model"), model)
    for library in (torch, torch.nn.functional):
        search.add_functions(library)
    search.add_class(torch.Tensor)
    return search


def _places_of(settings: Mapping[str, Callable[[], Any]]) -> list[Place]:
    """Settings of PyTorch's, as they are now."""
    table = settings_of(settings)
    return [
        Place(f"{name}()" if "." in name else f"torch.{name}()", table, name, get()) for name, get in settings.items()
    ]


def find_generators(model: Callable[..., Any], modules: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
    """Generators of random numbers that a model can see: in attributes of its modules, globals and closures, and in
    what is in there."""
    found: dict[int, tuple[str, Any]] = {}
    looked: dict[int, Any] = {}

    def look_into(path: str, value: Any) -> None:
        # Functions of one file see the same globals.
        if id(value) in looked or isinstance(value, ModuleType):
            return
        looked[id(value)] = value
        for held in (value, *cells_of(value).values()) if isinstance(value, FunctionType) else (value,):
            for each in filter(is_generator, reach(held)):
                found.setdefault(id(each), (path if each is value else f"{path} ({type(each).__name__})", each))

    for path, module in modules.items():
        for name, value in vars(module).items():
            if name not in _TABLES_OF_MODULES:
                look_into(f"{path}.{name}".lstrip("."), value)
    for function in find_functions(model, modules.values()):
        for name, value in cells_of(function).items():
            look_into(name, value)
        for name in global_names(function.__code__):
            look_into(name, function.__globals__.get(name))
    return dict(found.values())
