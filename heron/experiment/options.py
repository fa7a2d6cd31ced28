"""Sections of an experiment for training: the optimiser, and the length and steps of a run."""

from typing import Any, Literal

from pydantic import model_validator

from heron.base.artefact import Count
from heron.base.sections import BelowOne, Natural, NonNegative, Positive, Section
from heron.models.options import Precision


class Optim(Section):
    """Optimiser and the schedule of its learning rate.

    Attributes:
        kind: optimiser.
        lr: learning rate after the warm-up.
        momentum: momentum of sgd and lars.
        weight_decay: L2 penalty of sgd, lars and adam; decoupled in adamw.
        trust_coefficient: trust coefficient of lars (You et al. 2017).
        lars_exclude_1d: whether biases and batch norm are excluded from lars's trust ratio and from
            weight decay.
        schedule: learning rate after the warm-up; cosine ends at 0.
        milestones: epochs at which schedule `step` multiplies the rate by `gamma`.
        gamma: factor of schedule `step`.
        warmup_epochs: epochs over which the rate rises linearly.
        clip_norm: largest norm of the gradient over all parameters, to which a longer one is scaled
            down; null: any.
    """

    kind: Literal["sgd", "lars", "adam", "adamw"] = "lars"
    lr: Positive = 0.05
    momentum: BelowOne = 0.95
    weight_decay: NonNegative = 0.0
    trust_coefficient: Positive = 0.02
    lars_exclude_1d: bool = False
    schedule: Literal["constant", "cosine", "step"] = "constant"
    milestones: list[Natural] = []
    gamma: Positive = 0.1
    warmup_epochs: Count = 0
    clip_norm: Positive | None = None

    @model_validator(mode="after")
    def _some_milestone(self) -> "Optim":
        if self.schedule == "step" and not self.milestones:
            raise ValueError("schedule is step without milestones; set some: epochs: [100, 150]")
        return self


def _is_due(step: int, every: int | None, unit: int = 1) -> bool:
    return every is not None and step % (every * unit) == 0


class Train(Section):
    """Length of a run, intervals of measuring, evaluating and saving, and how steps are computed.

    On SIGTERM or SIGUSR1 a run saves a checkpoint and ends.

    Attributes:
        epochs: length of the run in epochs, over which the learning rate follows its schedule;
            null: see `total_steps`.
        total_steps: length of the run in steps, in place of `epochs`: the same whatever the number
            of rows.
        steps: steps after which the run stops before its end, with the numbers that the whole run
            has there; `run.resume=auto` without it, or with more, goes on. null: at the end.
        micro_batch: largest number of a process's rows that are embedded with an autograd graph at
            a time; the gradient stays that of the whole batch. null: all.
        precision: bf16 and fp16 compute the model under autocast, fp16 with a dynamic loss scale
            (`torch.amp.GradScaler`), for GPUs without bf16; tf32 is fp32 whose convolutions and
            contrastive products round their factors to 11 bits, on GPUs that can; fp64 has
            parameters, inputs and losses in float64, to show exactness. auto: bf16 on GPUs that
            support it, tf32 on others, fp32 on CPUs; the run reports its choice and writes it to
            its config.yaml.
        frozen_views: augmented views of each row that a frozen network (`freeze: true`) embeds
            once, before the first step; the features are kept in the cache, and each step draws
            one of them for a row. Rows that are scored are embedded once as well, without
            augmentation. 0: the network embeds the rows anew at every step.
        ema: decay per step of an exponential moving average of the weights, such as 0.999, which
            is scored and saved as the model in their place; null: none.
        keep: the weights that the run ends with, which are scored and saved as the model: the
            `last`, or those of the `best` evaluation of the validation rows
            (`data.protocol.validation`).
        keep_by: score of the validation rows by which an evaluation is the best; null: accuracy,
            or auc_macro where a row may have several labels.
        patience: evaluations in a row without a better one after which the run ends; null: it goes
            on to its end.
        compile: whether encoders and augmentations of pictures are compiled (torch.compile); the
            numbers are the same up to rounding. Evaluation is not compiled.
        activation_checkpointing: whether the blocks of encoders keep only their inputs and
            recompute the rest in backward: less memory, the same numbers, a second forward.
        deterministic: whether only deterministic kernels are used; an operation without one is
            refused. CPUs are deterministic anyway.
        measure_every_steps: steps between two measurements of collapse.
        evaluate_every_epochs: epochs between two evaluations; null: see `evaluate_every_steps`.
        evaluate_every_steps: steps between two evaluations; null: one at the end.
        save_every_epochs: epochs between two checkpoints; null: one at the end, or on a signal.
        save_every_steps: steps between two checkpoints; null: see `save_every_epochs`.
        keep_checkpoints: number of newest checkpoints that are kept.
        timeout_s: seconds without progress after which the run ends.
        cpu_threads: threads of a process on CPUs; null: its share of the cores.
    """

    epochs: Natural | None = 1
    total_steps: Natural | None = None
    steps: Natural | None = None
    micro_batch: Natural | None = None
    precision: Precision = "auto"
    frozen_views: Count = 0
    ema: BelowOne | None = None
    keep: Literal["last", "best"] = "last"
    keep_by: str | None = None
    patience: Natural | None = None
    compile: bool = False
    activation_checkpointing: bool = False
    deterministic: bool = False
    measure_every_steps: Natural = 100
    evaluate_every_epochs: Natural | None = None
    evaluate_every_steps: Natural | None = None
    save_every_epochs: Natural | None = None
    save_every_steps: Natural | None = None
    keep_checkpoints: Natural = 2
    timeout_s: Natural = 600
    cpu_threads: Natural | None = None

    @property
    def length_key(self) -> str:
        """The key that has the run's length."""
        return "train.epochs" if self.epochs else "train.total_steps"

    def length(self, steps_per_epoch: int) -> tuple[int, float]:
        """Returns after how many steps a run ends, and the epochs that its schedule extends over.

        The former is less than the latter's steps where `steps` stops the run.
        """
        all_steps = self.total_steps or (self.epochs or 0) * steps_per_epoch
        epochs = self.epochs or all_steps / steps_per_epoch
        return min(all_steps, self.steps or all_steps), epochs

    def evaluates_after(self, step: int, steps_per_epoch: int) -> bool:
        """Whether the run is evaluated after so many steps."""
        every, steps = self.evaluate_every_epochs, self.evaluate_every_steps
        return _is_due(step, every, steps_per_epoch) or _is_due(step, steps)

    def saves_after(self, step: int, steps_per_epoch: int) -> bool:
        """Whether a checkpoint is written after so many steps."""
        every, steps = self.save_every_epochs, self.save_every_steps
        return _is_due(step, every, steps_per_epoch) or _is_due(step, steps)

    @model_validator(mode="before")
    @classmethod
    def _steps_in_place_of_epochs(cls, tree: Any) -> Any:
        """`total_steps` alone replaces the default number of epochs."""
        if isinstance(tree, dict) and tree.get("total_steps") is not None:
            return {"epochs": None} | tree
        return tree

    @model_validator(mode="after")
    def _has_one_length(self) -> "Train":
        if self.epochs is None and self.total_steps is None:
            raise ValueError(
                "epochs and total_steps are both null; set one of them, such as total_steps: "
                f"{self.steps or 1500}"
            )
        if self.epochs is not None and self.total_steps is not None:
            raise ValueError(
                f"epochs and total_steps are both set; set epochs: null for a run of "
                f"{self.total_steps} steps, or total_steps: null"
            )
        if self.total_steps is not None and self.total_steps < (self.steps or 0):
            raise ValueError(
                f"steps is {self.steps}, after the end of the run at total_steps, "
                f"{self.total_steps}; set steps: null, or raise total_steps"
            )
        return self

    @model_validator(mode="after")
    def _keeps_the_best(self) -> "Train":
        given = [name for name in ("keep_by", "patience") if getattr(self, name) is not None]
        if given and self.keep == "last":
            raise ValueError(f"{given[0]} is set, but keep is last; set keep: best")
        if self.keep == "best" and self.evaluate_every_steps is self.evaluate_every_epochs is None:
            raise ValueError(
                "keep is best, but the run is evaluated only at its end; set evaluate_every_steps "
                "or evaluate_every_epochs"
            )
        return self

    @model_validator(mode="after")
    def _compiled_or_recomputed(self) -> "Train":
        if self.compile and self.activation_checkpointing:
            raise ValueError(
                "compile and activation_checkpointing cannot both be true, because a compiled "
                "graph decides itself what to recompute; set one of them to false"
            )
        return self
