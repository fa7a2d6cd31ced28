"""Heron: distributed contrastive pretraining for data with several views and several labels."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("heron-pretrain")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "not installed"
