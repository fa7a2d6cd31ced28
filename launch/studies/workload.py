"""One experiment's step on any number of processes: what it exchanges, and what it holds."""

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from heron.pipeline.config.errors import CheckpointError, ConfigError, StudyError
from heron.pipeline.config.experiment import Config, load_config
from heron.pipeline.config.terms import Term
from heron.pipeline.data.plan import shares
from heron.pipeline.distributed.exchange import ShardSizes
from heron.pipeline.distributed.traffic import FLOAT, Exchange, exchanges
from heron.pipeline.models.heterogeneous import Heterogeneous
from heron.pipeline.objectives.objective import Objective
from heron.pipeline.training.pretrained import input_shapes, locate
from heron.shards.manifest import load_manifest

SLOTS = {"adam": 2, "adamw": 2}  # numbers that an optimiser keeps of a parameter; of SGD momentum
HELD = 3  # times a gathered vector lies in memory: itself, its gradient, and on its way back


@dataclass(frozen=True)
class Setting:
    """How a step is laid out.

    Attributes:
        world: processes.
        labelled: rows of the global batch; `unlabelled` too.
        stage: of ZeRO; 0 also stands for DistributedDataParallel.
    """

    world: int
    labelled: int
    unlabelled: int
    stage: int = 0

    @property
    def sizes(self) -> ShardSizes:
        """The rows of every process."""
        return ShardSizes(shares(self.labelled, self.world), shares(self.unlabelled, self.world))

    @property
    def rows(self) -> int:
        """Of the global batch."""
        return self.labelled + self.unlabelled

    @property
    def share(self) -> int:
        """Rows of the process that has most."""
        return max(self.sizes.rows)


@dataclass(eq=False)
class Workload:
    """The step of an experiment.

    Attributes:
        config: the experiment; its batch is one of many.
        shapes: of one sample of each view.
        labels: width of a row's labels.
        levels: of hierarchical labels.
    """

    config: Config
    shapes: list[list[int]]
    labels: int
    levels: int

    @classmethod
    def of_run(cls, run: Path) -> "Workload":
        """Returns the workload of a run, from its newest checkpoint.

        Raises:
            StudyError: it has none, it cannot be read, or a term exchanges what is not modelled.
        """
        try:
            checkpoint = locate(run)
            shapes = input_shapes(checkpoint)
            labels = int(json.loads((checkpoint / "model.json").read_text())["labels"])
            config = load_config(checkpoint / "config.yaml")
        except (CheckpointError, ConfigError, OSError, ValueError, KeyError) as error:
            raise StudyError(f"{run}: its step cannot be told: {error}") from None
        levels, objective = 0, Objective(config.objective.terms())
        if remembering := [
            name for name, t in objective.terms.items() if type(t).memory is not Term.memory
        ]:
            raise StudyError(
                f"the scaling model does not know what the memory of {' and '.join(remembering)} "
                "exchanges; expected terms that remember nothing from step to step"
            )
        if "paths" in objective.needs.labelled:
            levels = len(load_manifest(config.data.path).labels.levels or [])
        return cls(config, shapes, labels, levels)

    @cached_property
    def objective(self) -> Objective:
        """The experiment's terms."""
        return Objective(self.config.objective.terms())

    @cached_property
    def model(self) -> Heterogeneous:
        """The model, for its shapes alone: it holds no numbers."""
        terms = self.objective.terms
        model = Heterogeneous(self.config.model, self.shapes, self.labels, terms)
        return model.to("meta")

    def labelled_of(self, rows: int) -> int:
        """Returns how many rows of a global batch of the run are labelled."""
        batch = self.config.data.batch
        if isinstance(batch.labelled, int):
            return batch.labelled + self.config.negatives.mine
        return rows - batch.unlabelled if isinstance(batch.unlabelled, int) else rows

    @cached_property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def differs_in(self, other: "Workload") -> list[str]:
        """Returns in what two workloads differ that are to be measured together."""
        return [name for name, part in self._identity.items() if part != other._identity[name]]

    @cached_property
    def _identity(self) -> dict[str, Any]:
        tree = self.config.model_dump(mode="json")
        train = {key: tree["train"][key] for key in ("precision", "micro_batch", "cpu_threads")}
        parts = {"model": tree["model"], "objective": tree["objective"], "shapes": self.shapes}
        return parts | {
            "optim": tree["optim"]["kind"],
            "train": train,
            "views": tree["data"]["views"],
        }

    @cache  # noqa: B019 - a workload lives as long as its report
    def exchanges(self, setting: Setting) -> list[Exchange]:
        """Returns what the processes exchange in a step: see `distributed.traffic.exchanges`."""
        return exchanges(
            self.objective, self.model, self.shapes, setting.sizes, self.labels, self.levels
        )

    def state(self, setting: Setting) -> dict[str, int]:
        """Returns the bytes of weights, gradients and optimiser state that a process holds.

        By the stage of ZeRO (Rajbhandari et al. 2020, section 5, with float32 for its halves): 1
        shares out the optimiser's state, 2 the gradients too, 3 the weights too. DeepSpeed keeps
        the optimiser's part of the weights once more.
        """
        every, stage, optim = FLOAT * self.parameters, setting.stage, self.config.optim
        shared = every // setting.world
        slots = SLOTS.get(optim.kind, 1 if optim.momentum else 0)
        return {
            "weights": (shared if stage >= 3 else every) + (shared if stage else 0),
            "gradients": shared if stage >= 2 else every,
            "optimiser": slots * (shared if stage >= 1 else every),
        }

    def gathered(self, setting: Setting) -> int:
        """Returns the bytes of the negative set that a process holds, about: see `HELD`."""
        moved = [e for e in self.exchanges(setting) if e.what != "moments"]
        back = {e.what for e in moved if e.kind == "scattered"}
        return sum(
            setting.world * e.bytes * (HELD if e.what in back else 1)
            for e in moved
            if e.kind == "gathered"
        )

    def held(self, setting: Setting) -> int:
        """Returns the bytes that a process holds, as far as they are counted."""
        return sum(self.state(setting).values()) + self.gathered(setting)
