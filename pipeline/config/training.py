"""How a run trains and is scored: optimiser, mined negatives, length, precision, evaluation."""

from typing import Literal

from pydantic import model_validator

from heron.pipeline.config.sections import (
    BelowOne,
    Natural,
    NonNegative,
    Positive,
    Section,
    Share,
)
from heron.shards.artefact import Count


class Optim(Section):
    """Optimiser and the schedule of its learning rate.

    Attributes:
        kind: optimiser.
        lr: learning rate, after the warm-up.
        momentum: of sgd and lars.
        weight_decay: L2 penalty of sgd, lars and adam; decoupled in adamw.
        trust_coefficient: of lars (You et al. 2017).
        lars_exclude_1d: whether biases and batch norm are left out of lars's trust ratio and of the
            decay.
        schedule: how the rate goes after the warm-up; cosine ends at 0.
        milestones: epochs at which schedule `step` multiplies the rate by `gamma`.
        gamma: factor of schedule `step`.
        warmup_epochs: epochs over which the rate rises linearly.
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

    @model_validator(mode="after")
    def _some_milestone(self) -> "Optim":
        if self.schedule == "step" and not self.milestones:
            raise ValueError("schedule is step without milestones; expected epochs: [100, 150]")
        return self


class Negatives(Section):
    """Mined hard negatives: near rows with far labels, beside the random labelled rows.

    See `pipeline.negatives.mine`.

    Attributes:
        mine: mined hard negatives that are added to every labelled batch; 0: none.
        every_steps: steps after which the labelled rows are embedded anew, and their hard negatives
            found while training goes on.
        nearest: hard negatives that are found of a row.
        gpu: whether they are searched for on a GPU.
    """

    mine: Count = 0
    every_steps: Natural = 200
    nearest: Natural = 16
    gpu: bool = False


Precision = Literal["auto", "fp32", "tf32", "bf16", "fp64"]


class Distributed(Section):
    """What the processes of a run exchange.

    Attributes:
        exchange: how vectors of other processes come: `gather`: all at once; `ring`: those of rows
            of one process after another, while those before are compared, so that a process holds
            two processes' at a time, and each comes two or three times a step. The numbers are the
            same to rounding. `auto`: a ring where every term can and what would be gathered takes
            more than an eighth of a process's memory; the run says which.
    """

    exchange: Literal["auto", "gather", "ring"] = "auto"


class Train(Section):
    """How long, how often measured for collapse, evaluated, saved, and how a step is computed.

    On SIGTERM or SIGUSR1 a run saves and ends.

    Attributes:
        epochs: epochs of the run.
        steps: steps at which a run ends at the latest; null: at the end of its epochs.
        micro_batch: most rows of a process that are embedded with a graph at a time; the gradient
            stays that of the whole batch. null: all.
        precision: bf16 computes the model by autocast; tf32 is fp32 whose convolutions round their
            factors to 11 bits, where a GPU can; fp64 has parameters, inputs and losses in float64,
            which shows exactness. auto: bf16 on a GPU that has it, tf32 on another, fp32 on CPUs;
            the run says which, and its config.yaml has that.
        compile: whether encoders and augmentations of pictures are compiled (torch.compile); the
            numbers are the same to rounding. Evaluation stays as it is.
        activation_checkpointing: whether the blocks of encoders keep their input alone, and compute
            the rest again in backward: less memory, the same numbers, a second forward.
        deterministic: whether only kernels are used whose numbers repeat; one that has none such
            is refused. On CPUs numbers repeat anyway.
        measure_every_steps: steps between two measurements of collapse.
        evaluate_every_epochs: epochs between two evaluations; null: one at the end.
        save_every_epochs: epochs between two checkpoints; null: one at the end, or when a signal
            comes.
        save_every_steps: steps between two checkpoints; null: see `save_every_epochs`.
        keep_checkpoints: newest checkpoints that stay.
        timeout_s: seconds that nothing may move before the run ends.
        cpu_threads: threads of a process on CPUs; null: its share of the cores.
    """

    epochs: Natural = 1
    steps: Natural | None = None
    micro_batch: Natural | None = None
    precision: Precision = "auto"
    compile: bool = False
    activation_checkpointing: bool = False
    deterministic: bool = False
    measure_every_steps: Natural = 100
    evaluate_every_epochs: Natural | None = None
    save_every_epochs: Natural | None = None
    save_every_steps: Natural | None = None
    keep_checkpoints: Natural = 2
    timeout_s: Natural = 600
    cpu_threads: Natural | None = None

    @model_validator(mode="after")
    def _compiled_or_recomputed(self) -> "Train":
        if self.compile and self.activation_checkpointing:
            raise ValueError(
                "compile and activation_checkpointing are both true; a compiled graph chooses by "
                "itself what it computes again: set one of them to false"
            )
        return self


class Evaluate(Section):
    """How predictions are scored, and whether a probe makes some: see `evaluation.probe`.

    Attributes:
        probe: when a probe makes predictions: where no term trains a classifier (`auto`),
            also beside one (`always`), or `never`.
        probe_by: what a probe is: logistic regression, or support vector machines of classes that
            exclude each other (see `evaluation.probe`).
        knn: labelled neighbours that vote on each test row at every evaluation, which then has
            RankMe of the test rows too; null: none vote.
        knn_tau: temperature of the neighbours' votes: see `evaluation.knn.vote`.
        cross_view: whether there is recall@k of each view's test rows by the projections of each
            other view: see `evaluation.cross_view`.
        threshold: probability above which a label of a multi-label row is predicted, which F1 and
            accuracy hang on, and AUC and mAP do not; `fitted`: that with the best weighted F1 of
            the validation rows, one for all labels.
        batch: rows that are evaluated at a time.
        map: whether the report has a map of test rows and some with their nearest neighbours;
            `auto`: where training took two minutes or more.
        map_rows: test rows on the map, about, at most.
        baselines: whether logistic regression and the plain network are trained on the same labels,
            for comparison; `plain`: the plain network alone.
        seeds: seeds on which networks are trained, from `seed` on, in folders `seed-N` of the
            run's; the report shows their spread. Logistic regression draws nothing by the seed.
        test: whether the test rows are scored; false: a search's trials leave them unread.
    """

    probe: Literal["auto", "always", "never"] = "auto"
    probe_by: Literal["logistic", "svm"] = "logistic"
    knn: Natural | None = None
    knn_tau: Positive = 0.07
    cross_view: bool = False
    threshold: Share | Literal["fitted"] = 0.4
    batch: Natural = 512
    map: Literal["auto", "always", "never"] = "auto"
    map_rows: Natural = 1000
    baselines: Literal[True, False, "plain"] = False
    seeds: Natural = 1
    test: bool = True
