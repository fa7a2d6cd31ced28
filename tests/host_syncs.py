"""Finds on a CPU what would make the host wait for a GPU: numbers read, sizes that data decide."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

LIBRARY = Path(__file__).parents[1] / "heron"
# Whose result's size the data decide, or that read a number: CUDA waits for everything before them.
WAITING = {
    "_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive",
    "unique_dim_consecutive", "bincount", "masked_select", "equal",
    "lift_fresh",  # a tensor of Python's numbers: a copy that the host awaits
}  # fmt: skip
READING = {"tolist", "numpy", "cpu"}  # which a CPU does without the dispatcher


class _Functions(TorchFunctionMode):
    """Calls in READING; those of backward escape it, since calls of a handler are not handled."""

    def __init__(self, found: "HostSyncs") -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and getattr(func, "__name__", "") in READING:
            self.found.note(func.__name__)
        return func(*args, **(kwargs or {}))


class HostSyncs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is open, notes every such call of the library as `FILE:FUNCTION CALL`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: set[str] = set()
        self._functions = _Functions(self)
        self._paused = 0

    def __enter__(self) -> "HostSyncs":
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._functions.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in WAITING:
            self.note(name.removeprefix("_"))
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [x for x in args[1] if x is not None and x.dtype == torch.bool]
            if masks and (name == "index" or args[2].numel() > 1):  # a number fills without a wait
                self.note("index by a mask")
        elif name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
            self.note(name)
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While it is open, notes nothing: what is called here may wait."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def note(self, call: str) -> None:
        """Notes a call of the innermost function of the library, if there is one."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not self._paused:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(LIBRARY):
                self.calls.add(f"{path.relative_to(LIBRARY)}:{frame.f_code.co_name} {call}")
                return
            frame = frame.f_back
