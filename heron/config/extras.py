"""Optional packages: imports them, or explains how to install them."""

import importlib
from types import ModuleType

from heron.shards.errors import HeronError

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
    "timm": "pip install 'heron-pretrain[vision]'",
    "umap": "pip install 'heron-pretrain[map]'",
    "optuna": "pip install 'heron-pretrain[study]'",
    "ray": "pip install 'heron-pretrain[study]'",
}


class MissingPackage(HeronError):
    """A package of an extra is not installed."""


def require(module: str, what: str) -> ModuleType:
    """Imports a key of `EXTRAS`, or a module inside that package.

    MissingPackage says that `what` needs it, and how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = module.partition(".")[0]
        if missing.name != package:
            raise
        raise MissingPackage(
            f"{what} needs the package {package}, which is not installed; install it with: "
            f"{EXTRAS[package]}"
        ) from None
