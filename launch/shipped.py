"""Files that come with Heron and are found by their names: studies, and what starts processes."""

from pathlib import Path

from heron.pipeline.config.errors import ConfigError
from heron.shards.dotted import suggest

HERE = Path(__file__).resolve().parent
STUDIES = HERE.parent / "configs" / "studies"
ACCELERATE = HERE / "accelerate"


def names_in(folder: Path) -> list[str]:
    """Returns the names of a folder's YAML files, without their ending."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def find_shipped(given: str | Path, folder: Path, what: str) -> Path:
    """Returns a file by its path, or by its plain name in a folder that comes with Heron.

    Raises:
        ConfigError: there is no such file and no such name; names the nearest.
    """
    path, names = Path(given), names_in(folder)
    if path.is_file():
        return path
    if str(given) in names:
        return folder / f"{given}.yaml"
    raise ConfigError(
        f"{what} {given} is not there; expected the path of a YAML file, or a name; "
        f"{suggest(path.stem, names)}"
    )
