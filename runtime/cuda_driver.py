# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""CUDA's driver, as much of it as launching kernels takes, on the thread's current context."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

from retrograd.runtime.tensors import ExecutionError

_MAX_DYNAMIC_SHARED = 8
# A stream that does not wait for torch's own, and a capture that forbids other threads nothing.
_NON_BLOCKING, _RELAXED = 1, 2
_LIBRARY = "libcuda.so.1"
_P, _U, _N, _D = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t, ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuModuleLoadData": (_P, _P),
    "cuModuleGetFunction": (_P, _P, ctypes.c_char_p),
    "cuFuncSetAttribute": (_P, ctypes.c_int, ctypes.c_int),
    "cuLaunchKernelEx": (_P, _P, _P, _P),
    "cuMemsetD8Async": (_D, ctypes.c_ubyte, _N, _P),
    "cuMemsetD16Async": (_D, ctypes.c_ushort, _N, _P),
    "cuMemsetD32Async": (_D, _U, _N, _P),
    "cuMemcpyDtoDAsync_v2": (_D, _D, _N, _P),
    "cuStreamCreate": (_P, _U),
    "cuStreamDestroy_v2": (_P,),
    "cuStreamBeginCapture_v2": (_P, ctypes.c_int),
    "cuStreamEndCapture": (_P, _P),
    "cuStreamIsCapturing": (_P, _P),
    "cuGraphInstantiateWithFlags": (_P, _P, ctypes.c_ulonglong),
    "cuGraphDestroy": (_P,),
    "cuGraphLaunch": (_P, _P),
    "cuGraphExecDestroy": (_P,),
    "cuGetErrorName": (ctypes.c_int, _P),
}


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``: the grid, the blocks, the bytes of shared memory, the stream, and attributes, of which there
    are none."""

    _fields_: ClassVar = [
        ("grid", _U * 3),
        ("block", _U * 3),
        ("shared", _U),
        ("stream", _P),
        ("attributes", _P),
        ("attribute_count", _U),
    ]


class Graph:
    """Work that was recorded, to be queued by one call. The driver frees it when nobody holds it, after what runs."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, handle: ctypes.c_void_p, destroy: Callable[[ctypes.c_void_p], int]) -> None:
        self.handle = handle
        # At exit the context may be gone, and with it the graph.
        weakref.finalize(self, destroy, handle).atexit = False


class Driver:
    """The driver's functions; ``library`` is what has them, by their names in C."""

    def __init__(self, library: Any) -> None:
        for name, signature in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = signature, ctypes.c_int
        self._library = library
        # Of one configuration that is there, in three quarters of the time of cuLaunchKernel with its eleven numbers.
        self.launch = library.cuLaunchKernelEx
        self.fills = {1: library.cuMemsetD8Async, 2: library.cuMemsetD16Async, 4: library.cuMemsetD32Async}
        self.copy = library.cuMemcpyDtoDAsync_v2

    def load_module(self, image: bytes) -> ctypes.c_void_p:
        """Code, PTX that ends with a zero byte, on the current context; it stays there.

        Raises:
            ExecutionError: the driver does not take it.
        """
        module = ctypes.c_void_p()
        self.check(self._library.cuModuleLoadData(ctypes.byref(module), image), "load its kernels")
        return module

    def find_function(self, module: ctypes.c_void_p, name: str, shared: int) -> ctypes.c_void_p:
        """A kernel of a module, which may use ``shared`` bytes of shared memory that it gets at launch.

        Raises:
            ExecutionError: there is none of this name, or the device has less.
        """
        function = ctypes.c_void_p()
        self.check(self._library.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"find {name}")
        if shared:
            what = f"give {name} {shared} bytes of shared memory"
            self.check(self._library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared), what)
        return function

    def record(self, queue: Callable[[int], None]) -> Graph:
        """A graph of what ``queue`` queues on the stream that it is given; nothing of it runs.

        Raises:
            ExecutionError: the driver refused something, or ``queue`` raised it.
        """
        library, stream, graph, executable = self._library, *(ctypes.c_void_p() for _ in range(3))
        self.check(library.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING), "make a stream to record on")
        try:
            self.check(library.cuStreamBeginCapture_v2(stream, _RELAXED), "begin to record a graph")
            try:
                queue(int(stream.value or 0))
            finally:
                status = library.cuStreamEndCapture(stream, ctypes.byref(graph))
            self.check(status, "record a graph")
            status = library.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, 0)
            self.check(status, "make a graph ready to be queued")
        finally:
            if graph:
                library.cuGraphDestroy(graph)
            library.cuStreamDestroy_v2(stream)
        return Graph(executable, library.cuGraphExecDestroy)

    def replay(self, graph: Graph, stream: int) -> None:
        """Queue a graph on a stream.

        Raises:
            ExecutionError: the driver refused it.
        """
        self.check(self._library.cuGraphLaunch(graph.handle, stream), "queue a graph")

    def is_capturing(self, stream: int) -> bool:
        """Whether somebody captures what is queued on a stream."""
        status = ctypes.c_int()
        self.check(self._library.cuStreamIsCapturing(stream, ctypes.byref(status)), "ask whether a stream is captured")
        return status.value != 0

    def check(self, status: int, what: str) -> None:
        """Raise :class:`ExecutionError` where the driver failed to do ``what``."""
        if not status:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(status, ctypes.byref(text))
        raise ExecutionError(f"CUDA's driver failed to {what}: {(text.value or str(status).encode()).decode()}")


@cache
def open_driver() -> Driver | None:
    """The machine's driver; none where there is no such library."""
    try:
        return Driver(ctypes.CDLL(_LIBRARY))
    except OSError:
        return None
