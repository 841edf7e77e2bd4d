# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""CUDA's driver, as much of it as launching kernels takes.

Its functions work in the context that is current in the calling thread. CUDA's runtime, which torch calls, makes one
current when it needs one; the driver does not. So a thread calls :meth:`Driver.enter` first.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, ClassVar

import torch

from retrograd.runtime.programs.errors import ExecutionError

_MAX_DYNAMIC_SHARED = 8
# A stream that does not wait for torch's own, and a capture that forbids other threads nothing.
_NON_BLOCKING, _RELAXED = 1, 2
# A kind of memory.
_ON_DEVICE = 2
_LIBRARY = "libcuda.so.1"
_P, _U, _N, _D = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t, ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuModuleLoadData": (_P, _P),
    "cuModuleUnload": (_P,),
    "cuModuleGetFunction": (_P, _P, ctypes.c_char_p),
    "cuFuncSetAttribute": (_P, ctypes.c_int, ctypes.c_int),
    "cuLaunchKernelEx": (_P, _P, _P, _P),
    "cuMemsetD8Async": (_D, ctypes.c_ubyte, _N, _P),
    "cuMemsetD16Async": (_D, ctypes.c_ushort, _N, _P),
    "cuMemsetD32Async": (_D, _U, _N, _P),
    "cuMemcpyDtoDAsync_v2": (_D, _D, _N, _P),
    "cuMemcpyHtoDAsync_v2": (_D, _P, _N, _P),
    "cuStreamCreate": (_P, _U),
    "cuStreamDestroy_v2": (_P,),
    "cuStreamBeginCapture_v2": (_P, ctypes.c_int),
    "cuStreamEndCapture": (_P, _P),
    "cuStreamIsCapturing": (_P, _P),
    "cuStreamGetCaptureInfo_v2": (_P, _P, _P, _P, _P, _P),
    "cuCtxGetCurrent": (_P,),
    "cuCtxSetCurrent": (_P,),
    "cuCtxGetDevice": (_P,),
    "cuDeviceGet": (_P, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_P, ctypes.c_int),
    "cuGraphInstantiateWithFlags": (_P, _P, ctypes.c_ulonglong),
    "cuGraphDestroy": (_P,),
    "cuGraphLaunch": (_P, _P),
    "cuGraphExecDestroy": (_P,),
    "cuGraphExecKernelNodeSetParams_v2": (_P, _P, _P),
    "cuGraphExecMemsetNodeSetParams": (_P, _P, _P, _P),
    "cuGraphExecMemcpyNodeSetParams": (_P, _P, _P, _P),
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


class KernelNode(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS``: a kernel, its grid, blocks and shared memory, and pointers to its arguments."""

    _fields_: ClassVar = [
        ("function", _P),
        ("grid", _U * 3),
        ("block", _U * 3),
        ("shared", _U),
        ("arguments", _P),
        *((name, _P) for name in ("extra", "kernel", "context")),
    ]


class FillNode(ctypes.Structure):
    """``CUDA_MEMSET_NODE_PARAMS``: a target, and how often a value of so many bytes is written there."""

    _fields_: ClassVar = [("target", _D), ("pitch", _N), ("value", _U), ("element", _U), ("width", _N), ("height", _N)]


class _Side(ctypes.Structure):
    """Half of ``CUDA_MEMCPY3D``: where from, or where to."""

    _fields_: ClassVar = [
        *((name, _N) for name in ("x", "y", "z", "level")),
        ("kind", ctypes.c_int),
        ("host", _P),
        ("address", _D),
        *((name, _P) for name in ("array", "reserved")),
        *((name, _N) for name in ("pitch", "height")),
    ]


class CopyNode(ctypes.Structure):
    """``CUDA_MEMCPY3D`` of bytes that lie in a row, on the device."""

    _fields_: ClassVar = [("source", _Side), ("target", _Side), *((name, _N) for name in ("width", "height", "depth"))]

    @classmethod
    def of(cls, length: int) -> CopyNode:
        """A copy of so many bytes; its addresses are set before it is used."""
        sides = (_Side(kind=_ON_DEVICE, pitch=length, height=1) for _ in range(2))
        return cls(*sides, length, 1, 1)


Node = KernelNode | FillNode | CopyNode


class Graph:
    """Work that was recorded, to be queued by one call; ``nodes`` are the handles of its steps. The driver frees it
    when nobody holds it, after what runs.

    Steps of what is queued are named by the nodes of the graph that it was made from: both go together.
    """

    __slots__ = ("__weakref__", "context", "handle", "nodes")

    def __init__(
        self, handle: ctypes.c_void_p, nodes: Sequence[int], context: ctypes.c_void_p, destroy: Callable[[], object]
    ) -> None:
        self.handle, self.nodes, self.context = handle, nodes, context
        # At exit the context may be gone, and with it the graph.
        weakref.finalize(self, destroy).atexit = False


class Driver:
    """The driver's functions; ``library`` is what has them, by their names in C."""

    def __init__(self, library: Any) -> None:
        for name, signature in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = signature, ctypes.c_int
        self._library = library
        # Of the devices that were entered: the driver's name of each, and its primary context, which is kept.
        self._contexts: dict[int, tuple[int, ctypes.c_void_p]] = {}
        # Of one configuration that is there, in three quarters of the time of cuLaunchKernel with its eleven numbers.
        self.launch = library.cuLaunchKernelEx
        self.fills = {1: library.cuMemsetD8Async, 2: library.cuMemsetD16Async, 4: library.cuMemsetD32Async}
        self.copy = library.cuMemcpyDtoDAsync_v2
        self.write = library.cuMemcpyHtoDAsync_v2

    def enter(self, device: int) -> None:
        """Have the calling thread's calls work on a device, by torch's number, from here on: where it has no context,
        or another device's, the one that torch works in becomes current.

        A thread of autograd's has none before torch calls CUDA's runtime in it. A context of this device that somebody
        else made current is left.

        Raises:
            ExecutionError: there is no such device, or the driver gives no context.
        """
        known = self._contexts.get(device)
        if known is None:
            known = self._contexts[device] = self._find_context(device)
        name, context = known
        current = ctypes.c_int()
        if self._library.cuCtxGetDevice(ctypes.byref(current)) or current.value != name:
            self.check(self._library.cuCtxSetCurrent(context), f"make device {device} current")

    def _find_context(self, device: int) -> tuple[int, ctypes.c_void_p]:
        name, context = ctypes.c_int(), ctypes.c_void_p()
        self.check(self._library.cuDeviceGet(ctypes.byref(name), device), f"find device {device}")
        status = self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), name)
        self.check(status, f"give the context of device {device}")
        return name.value, context

    def load_module(self, image: bytes) -> ctypes.c_void_p:
        """Code, PTX that ends with a zero byte, on the current context; it stays there.

        Raises:
            ExecutionError: the driver does not take it.
        """
        module = ctypes.c_void_p()
        self.check(self._library.cuModuleLoadData(ctypes.byref(module), image), "load its kernels")
        return module

    def unload_module(self, module: ctypes.c_void_p) -> None:
        """Take code off the current context again, when nothing of it runs any more.

        Raises:
            ExecutionError: the driver refused it.
        """
        self.check(self._library.cuModuleUnload(module), "unload kernels")

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

    def record(self, queue: Callable[[int], Iterable[None]]) -> Graph:
        """A graph of what ``queue`` queues on the stream that it is given, a step each time it yields; nothing of it
        runs.

        Raises:
            ExecutionError: the driver refused something, or ``queue`` raised it.
        """
        library, nodes = self._library, list[int]()
        stream, graph, executable, context = (ctypes.c_void_p() for _ in range(4))
        self.check(library.cuCtxGetCurrent(ctypes.byref(context)), "name its context")
        self.check(library.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING), "make a stream to record on")
        try:
            self.check(library.cuStreamBeginCapture_v2(stream, _RELAXED), "begin to record a graph")
            try:
                nodes += [self._last_node(stream) for _ in queue(int(stream.value or 0))]
            finally:
                status = library.cuStreamEndCapture(stream, ctypes.byref(graph))
            self.check(status, "record a graph")
            status = library.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, 0)
            self.check(status, "make a graph ready to be queued")
        finally:
            if graph and not executable:
                library.cuGraphDestroy(graph)
            library.cuStreamDestroy_v2(stream)

        def destroy() -> None:
            library.cuGraphExecDestroy(executable)
            library.cuGraphDestroy(graph)

        return Graph(executable, nodes, context, destroy)

    def _last_node(self, stream: ctypes.c_void_p) -> int:
        """The node that what is queued next on a captured stream would follow: that of the step before."""
        status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        before, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
        places = (ctypes.byref(place) for place in (status, number, graph, before, count))
        self.check(self._library.cuStreamGetCaptureInfo_v2(stream, *places), "name a step of a graph")
        if count.value != 1:
            raise ExecutionError(f"CUDA's driver recorded {count.value} steps for one")
        return int(before[0] or 0)

    def change(self, graph: Graph, step: int, node: Node) -> None:
        """Have a step of a graph do what ``node`` says, from the next time on that it is queued: the same on other
        arguments, or at other addresses.

        Raises:
            ExecutionError: the driver refused it.
        """
        library, where = self._library, (graph.handle, graph.nodes[step], ctypes.byref(node))
        if isinstance(node, KernelNode):
            status = library.cuGraphExecKernelNodeSetParams_v2(*where)
        elif isinstance(node, FillNode):
            status = library.cuGraphExecMemsetNodeSetParams(*where, graph.context)
        else:
            status = library.cuGraphExecMemcpyNodeSetParams(*where, graph.context)
        self.check(status, "change a step of a graph")

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


@contextlib.contextmanager
def entered(device: torch.device, driver: Driver | None = None) -> Iterator[None]:
    """Make a CUDA device the calling thread's during the block: for torch, and for ``driver``, by default the
    machine's, which works in its context.

    torch's own guard is not enough: where the device is the current one by number it calls nothing, and a thread in
    which CUDA's runtime was not called yet has no context.

    Raises:
        ExecutionError: the driver has no such device.
    """
    with torch.cuda.device(device):
        driver = driver or open_driver()
        if driver is not None:
            driver.enter(torch.cuda.current_device() if device.index is None else device.index)
        yield
