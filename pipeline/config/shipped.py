"""The files that come with Heron and are found by their names."""

from pathlib import Path

from heron.pipeline.config.errors import ConfigError
from heron.shards.dotted import suggest

ROOT = Path(__file__).resolve().parents[2]
CONFIGS, STUDIES = ROOT / "configs", ROOT / "configs" / "studies"
ACCELERATE = ROOT / "launch" / "accelerate"
NO_EXPERIMENT = ("methods",)  # files beside the experiments that are none


def names_in(folder: Path) -> list[str]:
    """Returns the names of a folder's YAML files: `scene` for `configs/scene.yaml`."""
    found = sorted(path.stem for path in folder.glob("*.yaml"))
    return [name for name in found if folder != CONFIGS or name not in NO_EXPERIMENT]


def find_shipped(given: str | Path, folder: Path, what: str) -> Path:
    """Returns a YAML file by its path, or by its plain name in a folder that comes with Heron.

    Args:
        given: a path, or a name. A `Path`, and a text with a folder or an ending (`./scene`,
            `scene.yaml`), is a path.
        folder: such as `STUDIES`.
        what: it is, for the message.

    Raises:
        ConfigError: there is no such file and no such name; names the nearest.
    """
    path, names = Path(given), names_in(folder)
    if path.is_file():
        return path
    if given in names:  # a Path is none of them
        return folder / f"{given}.yaml"
    found = "is a folder" if path.is_dir() else "is not there"
    raise ConfigError(
        f"{what} {given} {found}; expected the path of a YAML file, or a name that comes with "
        f"Heron; {suggest(path.stem, names)}"
    )


def find_config(name_or_path: str | Path) -> Path:
    """Returns the file of an experiment: see `find_shipped`."""
    return find_shipped(name_or_path, CONFIGS, "configuration")
