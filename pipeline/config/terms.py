"""The terms of the objective as the YAML gives them: their options and defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from heron.pipeline.config.sections import Count, Natural, Positive, Section, Share
from heron.shards.dotted import load_class

if TYPE_CHECKING:
    from torch import Tensor

    from heron.pipeline.objectives.batch import GlobalBatch

Temperature = Annotated[float, Field(ge=0.003)]  # exp(2 / tau) has no float64 below

CLASSIFIERS = ("bce", "cross_entropy")  # terms of known labels, one number a label


class Term(Section):
    """A term of the objective: `weight * min(epoch / ramp_epochs, 1)` times its loss."""

    weight: Annotated[float, Field(ge=0)] = 1.0
    ramp_epochs: Count = 0


class CustomTerm(Term):
    """A term of your own: its options, what it needs, and its loss, in one file anywhere.

    Its place in the YAML is its dotted path: `objective: {my_lab.losses.Mine: {weight: 1}}`.

    Attributes:
        needs: which parts of the model it needs and what the processes share: flags of
            `objectives.catalogue.Definition`, such as `project` or `classify`.
        views: the fewest views that it is defined for.
        kinds: the kinds of labels that it is defined for; none: it looks at no label.
    """

    needs: ClassVar[tuple[str, ...]] = ("project",)
    views: ClassVar[int] = 1
    kinds: ClassVar[tuple[str, ...]] = ()

    def loss(self, batch: GlobalBatch, epoch: float) -> Tensor:
        """Returns this process's share of the loss, a scalar; the shares' sum is the loss.

        Args:
            batch: the vectors of the whole batch, and which rows are this process's own.
            epoch: now; a fraction of it counts.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss(batch, epoch)")


class NtXent(Term):
    """SimCLR's NT-Xent: InfoNCE, UCL."""

    tau: Temperature = 0.5


class Cmc(Term):
    """Contrastive multiview coding."""

    tau: Temperature = 0.5


class WeightedUnsupervised(Term):
    """HeroCon's L_u, Eq. 5."""

    tau: Temperature = 1.0
    anchors: Literal["first", "all"] = "all"
    negatives: Literal["all_views", "cross_view"] = "all_views"


class InputWeightedUnsupervised(Term):
    """HCL's L_u, Eq. 4: weights from the raw inputs."""

    tau: Temperature = 1.0
    anchors: Literal["first", "all"] = "all"


class SingleViewUnsupervised(Term):
    """HeroCon's L_u of one view, Eq. 4."""

    tau: Temperature = 1.0


class WeightedSupervised(Term):
    """HeroCon's L_s, Eq. 7."""

    tau: Temperature = 1.0
    distance: Literal["hamming", "indicator"] = "hamming"
    self_pairs: bool = False


class SupCon(Term):
    """SupCon's L_out."""

    tau: Temperature = 0.1


class Hard(Term):
    """UCL, H-UCL (`supervised: false`), SCL and H-SCL.

    The threshold of e^g is e^(l / tau), l going from `threshold_start` to `threshold_end` over
    `threshold_epochs` (Eq. 4).
    """

    supervised: bool = True
    tau: Temperature = 0.5
    hardening: Literal["none", "exp", "threshold"] = "none"
    beta: Annotated[float, Field(ge=0)] = 1.0
    threshold_start: Annotated[float, Field(ge=-1, le=1)] = -0.3
    threshold_end: Annotated[float, Field(ge=-1, le=1)] = 0.0
    threshold_epochs: Natural = 200
    positives: Literal["label", "augmentation"] = "label"
    detach: bool = False

    @model_validator(mode="after")
    def _labels(self) -> Hard:
        if not self.supervised and self.positives == "label":
            raise ValueError(
                "positives by label need labels; with supervised: false give "
                "positives: augmentation"
            )
        return self


class Debiased(Term):
    """The debiased contrastive loss."""

    tau: Temperature = 0.5
    tau_plus: Annotated[float, Field(ge=0, lt=1)] = 0.1


class Mulco(Term):
    """MulCo's contrastive losses; `momentum` and `queue` are those of the keys."""

    tau: Temperature = 0.05
    kind: Literal["standard", "sifted", "soft", "weighted", "debiased"] = "weighted"
    tau_plus: Annotated[float, Field(ge=0, lt=1)] | None = None
    queue: Natural = 8192
    momentum: Annotated[float, Field(ge=0, le=1)] = 0.999


class Pico(Term):
    """PiCO's objective, L_cls + `contrast` L_cont.

    phi, the share of a pseudo-target that stays in a step, goes linearly from `phi_start` to
    `phi_end` over `phi_epochs`; `gamma` is that of a prototype. For `warmup_epochs` pseudo-targets
    rest, and only a sample's own key is its positive.
    """

    tau: Temperature = 0.07
    contrast: Annotated[float, Field(ge=0)] = 0.5
    gamma: Share = 0.99
    phi_start: Share = 0.95
    phi_end: Share = 0.8
    phi_epochs: Natural = 200
    warmup_epochs: Count = 1
    queue: Natural = 8192
    momentum: Annotated[float, Field(ge=0, le=1)] = 0.999


class Comco(Term):
    """ComCo's objective, SCL-NL + `contrast` times its contrastive loss.

    Until `warmup_epochs` all others are negatives; until `neighbour_epochs` a sample's own key is
    its one positive.
    """

    tau: Temperature = 0.17
    contrast: Annotated[float, Field(ge=0)] = 0.3
    neighbours: Natural = 1
    neighbour_epochs: Count = 100
    warmup_epochs: Count = 1
    queue: Natural = 8192
    momentum: Annotated[float, Field(ge=0, le=1)] = 0.999


class Plnl(Term):
    """PLNL's two networks, which choose for each other.

    For `pretrain_epochs` SCL-LOG alone; then consistency between views, with a weight that rises
    over `consistency_epochs`; from `warmup_epochs` later on labels are guessed, where the mean
    probability over the last `epochs` is above `sure`, and sets enhanced by `neighbours`, by a
    `share` of what they could take.
    """

    pretrain_epochs: Count = 200
    warmup_epochs: Count = 20
    consistency_epochs: Natural = 100
    epochs: Natural = 3
    sure: Share = 0.99
    neighbours: Natural = 500
    share: Share = 0.1


class Hierarchical(Term):
    """HiMulCon, HiConE, HiMulConE."""

    tau: Temperature = 0.1
    constrain: bool = True
    penalty: Literal["exp_inverse"] | None = "exp_inverse"


class Mib(Term):
    """MIB's objective; beta goes exponentially from `beta_start` to `beta` over `beta_epochs`."""

    beta: Positive = 1.0
    beta_start: Positive = 1e-3
    beta_epochs: Natural = 100


class C2ae(Term):
    """C2AE's objective; `scale` of its exponentials is 1 as printed, 5 in the authors' code."""

    alpha: Positive = 0.5
    penalty: Annotated[float, Field(ge=0)] = 0.5
    scale: Positive = 5.0


class Gce(Term):
    """Generalised cross-entropy for complementary labels."""

    q: Annotated[float, Field(gt=0, le=1)] = 0.7


class Objective(Section):
    """The weighted sum that training minimises; a term of weight 0 is not built."""

    bce: Term | None = None
    cross_entropy: Term | None = None
    nt_xent: NtXent | None = None
    cmc: Cmc | None = None
    weighted_unsupervised: WeightedUnsupervised | None = None
    input_weighted_unsupervised: InputWeightedUnsupervised | None = None
    single_view_unsupervised: SingleViewUnsupervised | None = None
    weighted_supervised: WeightedSupervised | None = None
    supcon: SupCon | None = None
    hard: Hard | None = None
    debiased: Debiased | None = None
    mulco: Mulco | None = None
    pico: Pico | None = None
    comco: Comco | None = None
    plnl: Plnl | None = None
    hierarchical: Hierarchical | None = None
    mib: Mib | None = None
    c2ae: C2ae | None = None
    ub_log: Term | None = None
    ub_exp: Term | None = None
    mse: Term | None = None
    gce: Gce | None = None
    l_uw: Term | None = None
    mlcl: Term | None = None
    custom: dict[str, SerializeAsAny[CustomTerm]] = {}  # by dotted path

    @model_validator(mode="before")
    @classmethod
    def _by_path(cls, given: Any) -> Any:
        """Takes keys that are dotted paths for the terms of one's own that they name."""
        if not isinstance(given, dict):
            return given
        dotted = {name: options for name, options in given.items() if "." in str(name)}
        rest = {name: options for name, options in given.items() if name not in dotted}
        custom = rest.get("custom") or {}
        if not dotted or not isinstance(custom, dict):  # which the field's type refuses
            return given
        return rest | {"custom": {**custom, **dotted}}

    @field_validator("custom", mode="before")
    @classmethod
    def _load(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            path: load_class(path, CustomTerm).model_validate(options or {})
            if not isinstance(options, CustomTerm)
            else options
            for path, options in given.items()
            if options is not None
        }

    def terms(self) -> dict[str, Term]:
        """The terms that take part, by name."""
        named = {name: getattr(self, name) for name in type(self).model_fields if name != "custom"}
        named |= self.custom
        return {name: term for name, term in named.items() if term is not None and term.weight > 0}

    @model_validator(mode="after")
    def _some_term(self) -> Objective:
        if not self.terms():
            raise ValueError("no term has a weight above 0; expected at least one")
        return self
