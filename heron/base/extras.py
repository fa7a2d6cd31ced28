"""Packages of others: how to import the optional ones, and what is handed to their networks."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock
from types import ModuleType
from typing import Any

from heron.base.errors import HeronError

EXTRAS = {  # how to install each optional module, by an extra of pyproject.toml
    "faiss": "pip install 'heron-pretrain[cpu]', or 'heron-pretrain[gpu]' for CUDA",
    "fastapi": "pip install 'heron-pretrain[serve]'",
    "uvicorn": "pip install 'heron-pretrain[serve]'",
    "huggingface_hub": "pip install 'heron-pretrain[remote]'",
    "onnx": "pip install 'heron-pretrain[export]'",
    "onnxruntime": "pip install 'heron-pretrain[export]'",
    "onnxscript": "pip install 'heron-pretrain[export]'",
    "peft": "pip install 'heron-pretrain[lora]'",
    "torch_geometric": "pip install 'heron-pretrain[graph]'",
    "timm": "pip install 'heron-pretrain[vision]', or on a CPU pip install --no-deps timm",
    "umap": "pip install 'heron-pretrain[map]'",
    "optuna": "pip install 'heron-pretrain[study]'",
    "ray": "pip install 'heron-pretrain[study]'",
}
_lock = RLock()


class MissingPackage(HeronError):
    """A package of an extra is not installed."""


def require(module: str, what: str) -> ModuleType:
    """Imports a key of `EXTRAS`, or a module inside that package.

    MissingPackage says that `what` needs it, and how to install it, or why it cannot be imported.
    """
    package, fault = module.partition(".")[0], "is not installed"
    try:
        with _torchvision() if package == "timm" else nullcontext():
            return importlib.import_module(module)
    except Exception as error:  # one that does not fit another may raise anything
        if not isinstance(error, ModuleNotFoundError) or error.name != package:
            fault = f"cannot be imported ({in_a_line(error)})"
        raise MissingPackage(
            f"{what} needs the package {package}, which {fault}; install it with: {EXTRAS[package]}"
        ) from None


class _Name(type):
    """A class with any attribute: each is its own name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class _Names(ModuleType):
    """A module with any class, and any function, which does nothing."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        part = sys.modules.get(f"{self.__name__}.{name}", lambda *_, **__: None)
        return _Name(name, (), {}) if name[0].isupper() else part


@contextmanager
def _torchvision() -> Iterator[None]:
    """While it lasts, timm can be imported: its networks need torchvision's names alone.

    The builds of PyPI are for CUDA, and do not load beside a torch for CPUs.
    """
    parts = ["", ".datasets", ".models", ".ops", ".transforms", ".datasets.folder"]
    parts += [".models.feature_extraction", ".ops.misc", ".transforms.functional"]
    names = {}
    try:
        importlib.import_module("torchvision")
    except Exception:  # one that does not fit torch may raise anything
        names = {name: _Names(name) for name in (f"torchvision{part}" for part in parts)}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def in_a_line(error: Exception) -> str:
    """Returns what an exception of another library says, in a line of at most 300 characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def offline() -> Iterator[None]:
    """While it lasts, Hugging Face's libraries send no request, as with HF_HUB_OFFLINE=1."""
    try:
        from huggingface_hub import constants
    except ImportError:  # nothing here can send one
        yield
        return
    with _lock:
        before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before
