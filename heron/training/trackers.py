"""Experiment trackers beside metrics.jsonl: those of accelerate, and your own."""

import json
import netrc
import os
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from pydantic import BaseModel, ConfigDict

from heron.base.atomic import save_json
from heron.base.dotted import load_class, suggest
from heron.base.errors import TrainingError
from heron.base.sections import leaves
from heron.distributed.collectives import broadcast_object, rank
from heron.distributed.watchdog import Watchdog
from heron.experiment.config import Config
from heron.training.tracking import read_result

PROJECT = "heron"  # of wandb, trackio and others, and MLflow's experiment
TRACKING_FILE = "tracking.json"
WRITTEN = (
    "what a run wrote about its trackers; restore it, or remove it to begin new runs of the "
    "trackers"
)
FINISH_S = 60  # that wandb may take to upload what is left at a run's end
MODULES = {"mlflow": ("sqlalchemy", "alembic")}  # beside the package, for a local folder
EXTRA = {"wandb": "track", "mlflow": "track", "trackio": "trackio"}  # of heron-pretrain
KEYS = {  # of accounts, without which these trackers prompt or use the network
    "clearml": "CLEARML_API_ACCESS_KEY",
    "comet_ml": "COMET_API_KEY",
    "swanlab": "SWANLAB_API_KEY",
}
LOCAL_MLFLOW = {"MLFLOW_DISABLE_TELEMETRY": "true"}
OFFLINE_WANDB = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
REQUIRED = "name", "requires_logging_directory", "tracker"  # attributes of a GeneralTracker


class TrackerState(BaseModel):
    """The content of tracking.json, by which a resumed run continues the same tracker runs.

    Attributes:
        ids: the id of a tracker's run, by the tracker's name.
    """

    model_config = ConfigDict(strict=True)

    ids: dict[str, str] = {}


class Trackers:
    """The trackers of a run; one that fails is reported once, and the run goes on without it.

    Only the main process calls methods other than the constructor; they return lines to print.
    """

    def __init__(self, config: Config, watchdog: Watchdog) -> None:
        """Finds the trackers' classes, on the main process; every process calls it.

        Every process raises TrainingError if one is unknown, not installed, or lacks a key.
        """
        self.config, self.watchdog = config, watchdog
        self.kinds: dict[str, type[GeneralTracker]] = {}
        self.live: dict[str, GeneralTracker] = {}
        self._environment: dict[str, str] = {}
        fault = ""
        if rank() == 0:
            try:
                self.kinds = {name: _kind(name) for name in config.tracking}
            except ValueError as error:
                fault = str(error)
        if fault := broadcast_object(fault):
            raise TrainingError(fault)

    def start(self, start: int) -> list[str]:
        """Starts the trackers' runs, or continues those of tracking.json.

        At `start` 0 all runs are new. Raises TrainingError if tracking.json is damaged.
        """
        path = Path(self.config.run.dir) / TRACKING_FILE
        state = TrackerState()
        if start and path.exists():
            content = read_result(path, kind=TrackerState, expected=WRITTEN)
            state = TrackerState.model_validate(content)
        lines: list[str] = []
        for name, kind in self.kinds.items():
            new = name not in state.ids
            identity = state.ids.get(name, uuid.uuid4().hex)
            lines += self._try(name, start, partial(self._begin, name, kind, identity, start, new))
            if name in self.live:
                run = self.live[name].tracker if name == "mlflow" else None
                state.ids[name] = run.info.run_id if run else identity
        if self.kinds.keys() - {"tensorboard"}:
            save_json(path, state.model_dump())
        return lines

    def log(self, values: Mapping[str, float], step: int) -> list[str]:
        """Logs values of a step."""
        lines = []
        for name, tracker in list(self.live.items()):
            lines += self._try(name, step, partial(tracker.log, dict(values), step=step))
        return lines

    def finish(self) -> list[str]:
        """Ends the trackers' runs."""
        lines = []
        for name, tracker in list(self.live.items()):
            lines += self._try(name, None, tracker.finish)
        self.live.clear()
        for name in self._environment:
            os.environ.pop(name, None)
        return lines

    def _begin(
        self, name: str, kind: type[GeneralTracker], identity: str, start: int, new: bool
    ) -> None:
        folder = Path(self.config.run.dir).absolute()
        options, environment = _options(name, folder, identity, start, new)
        for variable, value in environment.items():
            if variable not in os.environ:
                os.environ[variable] = self._environment[variable] = value
        projects = {"tensorboard": "tensorboard"}  # the folder's name
        projects["wandb"] = os.environ.get("WANDB_PROJECT", PROJECT)
        folders = [str(folder)] if kind.requires_logging_directory else []
        tracker = kind(projects.get(name, PROJECT), *folders, **options)
        tracker.start()
        # TensorBoard would add a folder at each start; trackio forgets the options at each start.
        if (new or name == "trackio") and name != "tensorboard":
            flat = leaves(self.config.model_dump(mode="json"), into_lists=False)
            tracker.store_init_configuration(
                {k: json.dumps(v) if isinstance(v, dict | list) else v for k, v in flat}
            )
        self.live[name] = tracker

    def _try(self, name: str, step: int | None, call: Callable[[], object]) -> list[str]:
        """Calls a tracker, which may wait for the network or fail."""
        try:
            with self.watchdog.busy():
                call()
        except Exception as error:  # third-party code may raise anything
            self.live.pop(name, None)
            when = "at the end" if step is None else f"at step {step}"
            reason = " ".join(str(error).split())
            return [
                f"tracker {name} failed {when} ({type(error).__name__}: {reason:.300}); the run "
                "continues without it, and metrics.jsonl has every step"
            ]
        return []


def _kind(name: str) -> type[GeneralTracker]:
    """Returns the class of a tracker; ValueError, with the remedy, where it cannot be used."""
    if "." in name:
        own: type[GeneralTracker] = load_class(name, GeneralTracker, decisive=False)
        if missing := [key for key in REQUIRED if not hasattr(own, key)]:
            raise ValueError(
                f"tracking: {name} has no {', '.join(missing)}; Accelerate's GeneralTracker needs "
                f"{', '.join(REQUIRED)}"
            )
        return own
    if name not in LOGGER_TYPE_TO_CLASS:
        raise ValueError(
            f"tracking: unknown tracker {name!r}; {suggest(name, sorted(LOGGER_TYPE_TO_CLASS))} "
            "or use the dotted path of your own"
        )
    try:
        if name not in map(str, get_available_trackers()):
            raise ModuleNotFoundError(f"No module named {name!r}")
        for module in MODULES.get(name, ()) if not os.environ.get("MLFLOW_TRACKING_URI") else ():
            import_module(module)
    except ModuleNotFoundError as error:
        package = f"'heron-pretrain[{EXTRA[name]}]'" if name in EXTRA else name
        raise ValueError(
            f"tracking: {name} is not installed ({error}); pip install {package}, or remove it"
        ) from None
    if (key := KEYS.get(name)) and key not in os.environ:
        raise ValueError(
            f"tracking: {name} needs an account, but {key} is not set; set it to the account's "
            "key, or remove the tracker"
        )
    kind: type[GeneralTracker] = LOGGER_TYPE_TO_CLASS[name]
    return kind


def _options(
    name: str, folder: Path, identity: str, start: int, new: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns a tracker's options, and environment variables to set while it is open.

    Without a key or a server nothing is sent from the machine.
    """
    if name == "tensorboard":
        return {"purge_step": start}, {}
    if name == "wandb":
        options = {"id": identity, "name": folder.name, "resume": "allow", "dir": str(folder)}
        login = "WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"
        has_login = os.environ.keys() & {*login} or _is_in_netrc()
        settings = {"settings": {"finish_timeout": FINISH_S}}
        return options | settings, {} if has_login else OFFLINE_WANDB
    if name == "mlflow":
        run = {"run_name": folder.name} if new else {"run_id": identity}
        if "MLFLOW_TRACKING_URI" in os.environ:
            return run, {}
        database = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}"}
        return run | {"logging_dir": str(folder / "mlflow")}, database | LOCAL_MLFLOW
    if name == "trackio":
        return {"name": f"{folder.name}-{identity[:8]}", "resume": "allow", "embed": False}, {}
    if name == "dvclive":
        return {"dir": str(folder / "dvclive"), "save_dvc_exp": False}, {}
    return {}, {}


def _is_in_netrc() -> bool:
    """Returns whether netrc names wandb's host; a default login does not count."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return host in netrc.netrc(Path(os.environ.get("NETRC", "~/.netrc")).expanduser()).hosts
    except (OSError, netrc.NetrcParseError):
        return False
