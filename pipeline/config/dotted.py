"""Classes that users keep outside the repository, by dotted path."""

import importlib
from typing import TypeVar

Base = TypeVar("Base")


def load_class(path: str, base: type[Base]) -> type[Base]:
    """Returns the class that a dotted path names.

    Args:
        path: such as `my_lab.losses.Mine`; the module must be importable (PYTHONPATH).
        base: what the class must derive from.

    Raises:
        ValueError: there is no such module or name, or it is no such class.
    """
    where, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        missing = error.name or where
        if missing != where and not where.startswith(f"{missing}."):
            raise  # of a module that the user's own imports
        raise ValueError(
            f"{path} names a class of the module {where}, and {missing} cannot be imported; "
            "expected a module on the Python path: set PYTHONPATH to its folder"
        ) from None
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(
            f"{path} is {type(found).__name__ if found is not None else 'not there'}; expected a "
            f"class that derives from {base.__module__}.{base.__name__}"
        )
    return found
