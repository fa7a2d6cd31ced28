"""Moves finished work aside, whole, so that no command destroys what an earlier one wrote."""

from pathlib import Path

from heron.shards.errors import HeronError


def is_taken(path: Path) -> bool:
    """Returns whether a path is a file, or a folder that is not empty."""
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))


def aside_name(path: Path) -> Path:
    """Returns the first free name beside a file or folder: `faces-1`, `faces-1.onnx`."""
    target, number = path.resolve(), 1
    stem, suffix = (target.name, "") if target.is_dir() else (target.stem, target.suffix)
    while (aside := target.with_name(f"{stem}-{number}{suffix}")).exists():
        number += 1
    return path.with_name(aside.name) if not path.is_symlink() else aside


def set_aside(path: Path) -> Path:
    """Renames a file or a whole folder, and returns its new name; an empty folder takes its place.

    Of a link, what it leads to is renamed. Raises OSError where that is refused, as of a folder
    that a disk is mounted on.
    """
    aside, target = aside_name(path), path.resolve()
    is_folder = target.is_dir()
    target.rename(target.with_name(aside.name))
    if is_folder:
        target.mkdir()
    return aside


def refuse_taken(out: Path, overwrite: bool, error: type[HeronError]) -> None:
    """Raises `error` if a path holds something, unless it may be moved aside.

    Verbs that write a new file or folder call it before the work, and `make_room` after it.
    """
    if not overwrite and is_taken(out):
        raise error(
            f"{out} is there already; choose another --out, or add --overwrite, which moves it to "
            f"{aside_name(out)}"
        )


def make_room(out: Path, overwrite: bool, error: type[HeronError]) -> None:
    """Moves aside what a path holds, and says so; without `overwrite`, raises `error`."""
    refuse_taken(out, overwrite, error)
    if is_taken(out):
        print(f"what was in {out} is now in {set_aside(out)}", flush=True)
