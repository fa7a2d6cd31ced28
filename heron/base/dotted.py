"""Loads users' own classes by dotted path."""

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TypeGuard, TypeVar

Base = TypeVar("Base")
TRUST = "if you trust it, pass --trust-code, or trust_code=True in Python"
_decisive_files: set[Path] = set()
_opened: ContextVar[tuple[Path, bool | None] | None] = ContextVar("opened", default=None)


@contextmanager
def opening(folder: Path, trust_code: bool | None) -> Iterator[None]:
    """While it lasts, `load_class` imports nothing for a folder that may be someone else's.

    With `trust_code` it does, except files below the folder. The outermost of several counts.
    """
    token = None if _opened.get() else _opened.set((folder, trust_code))
    try:
        yield
    finally:
        if token is not None:
            _opened.reset(token)


def load_class(path: str, base: type[Base], decisive: bool = True) -> type[Base]:
    """Returns the class, derived from `base`, that a path such as `my_lab.losses.Mine` names.

    The module must be importable (PYTHONPATH); ValueError where there is no such class. A
    `decisive` class affects a run's numbers, so that `loaded_files` includes its file.

    While a folder is `opening`, a module that this process has not imported itself is refused
    with a ValueError: what the folder names would choose the code that runs.
    """
    module_name, _, name = path.rpartition(".")
    expected = f"it must be a subclass of {base.__module__}.{base.__qualname__}"
    opened = None if module_name in sys.modules else _opened.get()
    if opened and not opened[1]:
        raise ValueError(
            f"{path} is code that is not Heron's, and {opened[0]} alone cannot have it run"
            + ("" if opened[1] is None else f"; {TRUST}")
        )
    try:
        if opened:
            _refuse_below(opened[0], module_name)
        module = importlib.import_module(module_name)
    except Exception as fault:  # user code may raise anything
        raise ValueError(
            f"{path}: cannot import module {module_name!r} ({type(fault).__name__}: {fault}); "
            "install its package, or put its folder on PYTHONPATH"
        ) from fault
    if not hasattr(module, name):
        candidates = [key for key, value in vars(module).items() if _is_subclass(value, base)]
        raise ValueError(
            f"{path}: module {module_name!r} has no {name!r}; {expected}; "
            + (suggest(name, candidates) if candidates else "the module has none")
        )
    loaded: object = getattr(module, name)
    if not _is_subclass(loaded, base):
        description = f"the class {loaded.__name__}" if inspect.isclass(loaded) else repr(loaded)
        raise ValueError(f"{path} is {description:.80}; {expected}: derive it from that class")
    if module.__file__ and decisive:
        _decisive_files.add(Path(module.__file__))
    return loaded


def _refuse_below(folder: Path, name: str) -> None:
    """Raises ImportError for a module that lies below a folder, importing the packages it is in."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        spec = find_spec(".".join(parts[:length]))  # imports the package, which has been checked
        places = [*(spec.submodule_search_locations or ())] if spec else []
        places += [spec.origin] if spec and spec.origin and spec.has_location else []
        for place in map(Path, places):
            if place.absolute().is_relative_to(folder.absolute()) or place.resolve().is_relative_to(
                folder.resolve()
            ):
                raise ImportError(f"{place} lies in {folder}, of which no file is ever run")


def loaded_files() -> list[Path]:
    """Returns the source files of the decisive classes loaded so far, sorted."""
    return sorted(path for path in _decisive_files if path.is_file())


def without_case(name: str, known: Iterable[str]) -> str:
    """Returns the one known name that differs from `name` in case alone, else `name`."""
    known = list(known)
    alike = [one for one in known if one.lower() == name.lower()]
    return alike[0] if len(alike) == 1 and name not in known else name


def suggest(wrong: str, known: list[str]) -> str:
    """Returns a question with the closest known name, or the list of all."""
    alike = [one for one in known if one.lower() == wrong.lower()]
    matches = alike or get_close_matches(wrong, known, n=1)
    return f"did you mean {matches[0]!r}?" if matches else f"choose one of {', '.join(known)}"


def _is_subclass(value: object, base: type[Base]) -> TypeGuard[type[Base]]:
    return inspect.isclass(value) and issubclass(value, base) and value is not base
