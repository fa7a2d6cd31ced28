"""What comes with Heron beside its code: its version, configuration files, and the main job."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from heron.base.dotted import suggest
from heron.base.errors import ConfigError

try:
    __version__ = version("heron-pretrain")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "not installed"


def shipped(name: str) -> Path:
    """Returns a file or folder that comes with Heron: in a wheel in the package, else beside it."""
    package = Path(__file__).resolve().parents[1]
    return package / name if (package / name).exists() else package.parent / name


CONFIGS, LAUNCH = shipped("configs"), shipped("launch")
STUDIES, ACCELERATE = CONFIGS / "studies", LAUNCH / "accelerate"
JOB = "heron.api.job"  # the module of the main job, for `accelerate launch -m`
NO_EXPERIMENT = ("methods",)  # files among the experiments that are not experiments


def names_in(folder: Path) -> list[str]:
    """Returns the names of a folder's YAML files: `scene` for `configs/scene.yaml`."""
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    return [name for name in names if folder != CONFIGS or name not in NO_EXPERIMENT]


def find_shipped(name_or_path: str | Path, folder: Path, what: str) -> Path:
    """Returns a YAML file by its path, or by its plain name in a folder such as `STUDIES`.

    A `Path`, or text with a folder or an ending (`./scene`, `scene.yaml`), is a path; other text
    may be a name. ConfigError says that there is no such `what`, and names the nearest.
    """
    path, names = Path(name_or_path), names_in(folder)
    if path.is_file():
        return path
    if name_or_path in names:  # a Path never is
        return folder / f"{name_or_path}.yaml"
    if path.is_dir():
        fault = f"{name_or_path} is a folder, not a YAML file"
    elif path.suffix or path.parent != Path():
        fault = f"{name_or_path} does not exist"
    else:
        fault = f"No {what} named '{name_or_path}'"
    hint = suggest(path.stem, names)
    raise ConfigError(f"{fault}. {hint[:1].upper()}{hint[1:]}")


def find_config(name_or_path: str | Path) -> Path:
    """Returns the file of an experiment: see `find_shipped`."""
    return find_shipped(name_or_path, CONFIGS, "experiment")
