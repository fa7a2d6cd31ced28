"""Classes that users keep outside the repository, by dotted path."""

import importlib
import inspect
from difflib import get_close_matches
from pathlib import Path
from typing import TypeGuard, TypeVar

Base = TypeVar("Base")
_loaded: set[Path] = set()


def load_class(path: str, base: type[Base], decisive: bool = True) -> type[Base]:
    """Returns the class that a dotted path names.

    Args:
        path: such as `my_lab.losses.Mine`; the module must be importable (PYTHONPATH).
        base: what the class must derive from.
        decisive: whether it decides a run's numbers, so that its file is one of `loaded_files`.

    Raises:
        ValueError: there is no such module or name, or it is no such class.
    """
    where, _, name = path.rpartition(".")
    expected = f"expected a subclass of {base.__module__}.{base.__qualname__}"
    try:
        module = importlib.import_module(where)
    except Exception as fault:  # it is code of others, which may do anything
        raise ValueError(
            f"{path}: module {where!r} cannot be imported ({type(fault).__name__}: {fault}); "
            "expected a module on the Python path; install its package, or put the folder it lies "
            "in on PYTHONPATH"
        ) from fault
    if not hasattr(module, name):
        known = [key for key, value in vars(module).items() if _derives(value, base)]
        raise ValueError(
            f"{path}: module {where!r} has no {name!r}; {expected}; "
            + (suggest(name, known) if known else "the module has none")
        )
    found: object = getattr(module, name)
    if not _derives(found, base):
        what = f"the class {found.__name__}" if inspect.isclass(found) else repr(found)
        raise ValueError(f"{path}: found {what:.80}; {expected}; derive it from that class")
    if module.__file__ and decisive:
        _loaded.add(Path(module.__file__))
    return found


def loaded_files() -> list[Path]:
    """Returns the source files of the decisive classes loaded so far, in order of their names."""
    return sorted(path for path in _loaded if path.is_file())


def suggest(wrong: str, known: list[str]) -> str:
    """Returns the nearest of the known names as a question, or all of them."""
    near = get_close_matches(wrong, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"


def _derives(value: object, base: type[Base]) -> TypeGuard[type[Base]]:
    return inspect.isclass(value) and issubclass(value, base) and value is not base
