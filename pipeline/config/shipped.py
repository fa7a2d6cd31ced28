"""The experiments that come with Heron, found by their names."""

from difflib import get_close_matches
from pathlib import Path

from heron.pipeline.config.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
NO_EXPERIMENT = ("methods",)  # files beside the experiments that are none


def shipped_names() -> list[str]:
    """Returns the names of the shipped experiments: `scene` for `configs/scene.yaml`."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem not in NO_EXPERIMENT)


def find_config(name_or_path: str | Path) -> Path:
    """Returns the file of an experiment.

    Args:
        name_or_path: a path to a YAML file, or the plain name of a shipped experiment, such as
            `scene`. A text with a folder or an ending (`./scene`, `scene.yaml`) is a path.

    Raises:
        ConfigError: there is no such file or experiment; names the nearest shipped ones.
    """
    path, names = Path(name_or_path), shipped_names()
    if path.is_file():
        return path
    if name_or_path in names:  # a Path is none of them
        return CONFIGS / f"{name_or_path}.yaml"
    near = get_close_matches(path.stem, names, 3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the names are {', '.join(names)}"
    found = "is a folder" if path.is_dir() else "is not there"
    raise ConfigError(
        f"configuration {name_or_path} {found}; expected the path of a YAML file, or the name of a "
        f"shipped experiment; {hint}"
    )
