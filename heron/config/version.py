"""The version of Heron that is installed."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("heron-pretrain")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "not installed"
