"""A loop of one's own with heron.losses is pretrain.py: losses, gradients and weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from heron import losses as h
from heron.api.job import pretrain
from heron.data.batches import Batch, batches
from heron.distributed import collectives
from heron.distributed.signals import StopSignals
from heron.distributed.watchdog import Watchdog
from heron.experiment.config import Config
from heron.experiment.open_data import open_process_batches
from heron.losses.momentum import VIEW, MomentumLoss
from heron.models.heterogeneous import Features
from heron.report.run_report import write_report
from heron.training.optim import learning_rate
from heron.training.tracking import read_metrics
from heron.training.trainer import Trainer
from tests import ranks
from tests.distributed.test_strategies import choose
from tests.reference_runs import OPTIONS, data, experiment

STEPS = 5
METHODS = ["herocon", "hcl", "herocon-single-view", "supcon", "cmc", "simclr", "debiased", "h-ucl"]
METHODS += ["h-scl-tau", "himulcone", "mib", "c2ae", "deepmtmv", "mulco-soft", "pico", "comco"]
METHODS += ["plnl", "ub-exp", "mse", "gce", "l-uw", "mlcl"]


class Branch(nn.Module):
    """The encoder and the projector of a view, which a slow copy is made of."""

    def __init__(self, encoder: nn.Module, projector: nn.Module) -> None:
        super().__init__()
        self.encoder, self.projector = encoder, projector

    def forward(self, x: Tensor, rng_keys: Tensor) -> Tensor:
        projected: Tensor = self.projector(self.encoder(x, rng_keys))
        return projected


class Loop(nn.Module):
    """The trainer's model, with losses as modules in the place of its objective."""

    def __init__(self, run: Trainer) -> None:
        super().__init__()
        self.run, self.model, self.terms = (run,), run.model, run.objective.terms
        order = torch.from_numpy(run.streams.roles.labelled).argsort()
        self.rows = torch.from_numpy(run.streams.roles.labelled)[order]
        targets = torch.from_numpy(run.streams.targets(run.streams.roles.labelled))[order]
        width, dim = self.model.widths[0], self.model.projection_width
        labels = len(run.labels)
        if "deepmtmv" in self.terms:
            self.terms = {"deepmtmv": self.terms["deepmtmv"]}  # its loss is bce's
        built: dict[str, Any] = {
            "single_view_unsupervised": [dim, [len(x) for x in self.inputs()]],
            "weighted_unsupervised": [dim],
            "mib": [dim],
            "c2ae": [width * 2, labels],
            "deepmtmv": [width, labels, 2],
            "mulco": [dim, labels],
            "comco": [dim, labels],
            "pico": [dim, targets],
            "plnl": [targets],
        }
        self.losses = nn.ModuleDict()
        for name, term in self.terms.items():
            loss = self.losses[name] = type(term)(*built.get(name, []), **term.options)
            for part in loss.parts:  # the trainer's are the model's
                loss.parts[part] = getattr(self.model, part)
                delattr(self.model, part)
                self.model._parts = [other for other in self.model._parts if other != part]
                if part == "classifier":
                    self.model.classifier = None
        self.slow = None
        if momentum := [t.momentum for t in self.terms.values() if isinstance(t, MomentumLoss)]:
            self.slow = h.MomentumEncoder(Branch(*self.model.branch(VIEW)), momentum[0])

    def inputs(self) -> list[range]:
        """As many numbers as each view has."""
        return [range(int(torch.tensor(shape).prod())) for shape in self.run[0].views.shapes]

    def forward(self, batch: Batch, inputs: list[Tensor], epoch: float) -> Tensor:
        """The weighted sum of the losses of a step."""
        inputs = [x.double() for x in inputs]
        features = self.model(inputs, batch.rng_keys, batch.sizes, None)
        weights = self.run[0].objective.weights(epoch)
        found = [
            weights[name if name != "deepmtmv" else "bce"]
            * self.of(name, features, batch, inputs, epoch)
            for name in self.terms
        ]
        return torch.stack(found).sum()

    def of(
        self, name: str, features: Features, batch: Batch, inputs: list[Tensor], epoch: float
    ) -> Tensor:
        """The loss of one term; those that look at labels see the labelled rows alone."""
        loss: Any = self.losses[name]
        count, y = batch.labelled, batch.targets.double()
        z = features.get("projections", [])
        own = [view[:count] for view in z]
        hidden = features["hidden"][0][:count]
        if isinstance(loss, h.SingleViewUnsupervised | h.InputWeightedUnsupervised):
            found = loss(z, inputs)
        elif isinstance(loss, h.Mib):
            found = loss(z, epoch=epoch, rng_keys=batch.rng_keys)
        elif isinstance(loss, h.NtXent | h.Cmc | h.Debiased | h.WeightedUnsupervised):
            found = loss(z)
        elif isinstance(loss, h.Hard):
            found = loss(own, y, epoch=epoch) if loss.supervised else loss(z)
        elif isinstance(loss, h.Hierarchical):
            found = loss(own, batch.paths)
        elif isinstance(loss, h.Supcon):
            found = loss(own, y)
        elif isinstance(loss, h.WeightedSupervised | h.C2ae | h.Deepmtmv):
            found = loss(hidden, y)
        elif isinstance(loss, h.Plnl):
            logits, views = [x[:count] for x in features["networks"]], len(inputs)
            at = torch.searchsorted(self.rows, batch.indices[:count])
            found = loss(logits[:views], logits[views:], at, epoch=epoch)
        elif isinstance(loss, h.Mulco | h.Comco | h.Pico):
            assert self.slow is not None
            keys = self.slow(inputs[VIEW][:count], batch.rng_keys[:count] + VIEW)
            at = torch.searchsorted(self.rows, batch.indices[:count])
            last = at if isinstance(loss, h.Pico) else y
            when: dict[str, Any] = {} if isinstance(loss, h.Mulco) else {"epoch": epoch}
            found = loss(own[0], keys, features["logits"][0][:count], last, **when)
        else:
            found = loss(features["logits"][0][:count], y)
        assert isinstance(found, Tensor)
        return found


def own_loop(config: Config) -> dict[str, Tensor]:
    """Trains a method in a loop of one's own, from the trainer's weights, on its batches."""
    run = Trainer(config, Watchdog(600.0), StopSignals(False), write_report)
    run.open_data()
    run.build_model()
    names = {id(p): name for name, p in run.model.named_parameters()}
    loop, optim = Loop(run), config.optim
    wrapped = DistributedDataParallel(loop)
    optimizer = SGD(loop.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    if (slow := loop.slow) is not None:
        optimizer.register_step_post_hook(lambda *_: slow.update())
    source = batches(
        open_process_batches(run.streams, config, run.accelerator.process_index, run.world, 0),
        0, STEPS, 0,
    )  # fmt: skip
    found, values = {}, []
    for t in range(STEPS):
        batch, epoch = next(source), t / run.steps_per_epoch
        inputs = run.views(batch, train=True)
        optimizer.zero_grad()
        loss = wrapped(batch, inputs, epoch)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in loop.parameters() if p.grad is not None])
        values.append(torch.stack([loss.detach(), norm]))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(optim, epoch, run.epochs)
        optimizer.step()
        ends = (t + 1) % (OPTIONS["deepmtmv"]["every_epochs"] * run.steps_per_epoch) == 0
        if ends and "deepmtmv" in loop.losses:
            loop.losses["deepmtmv"].part()  # type: ignore[operator]
    for parameter in loop.parameters():
        if name := names.get(id(parameter)):
            found[name] = parameter.detach()
    return found | {"values": torch.stack(values)}


def both(folder: str, methods: list[str]) -> list[list[dict[str, Tensor]]]:
    """Trains methods by pretrain.py and by a loop of one's own."""
    found, world = [], collectives.world_size()
    torch.set_default_dtype(torch.float64)
    for method in methods:
        results = []
        for name in ("trainer", "own"):
            choose("ddp")
            config = experiment(
                Path(folder), method, f"{method}-{name}-{world}", precision="fp64", steps=STEPS
            )
            if name == "own":
                results.append(own_loop(config))
                continue
            pretrain(config)
            run = Path(config.run.dir)
            rows = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
            values = [[row["loss"], row["gradient_norm"]] for row in rows]
            weights = load_file(run / "checkpoints" / "latest" / "model.safetensors")
            results.append({**weights, "values": torch.tensor(values)})
        found.append(results)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_loop_of_ones_own_is_the_trainer(world: int, tmp_path: Path) -> None:
    data(tmp_path)
    for process in ranks.run(world, both, str(tmp_path), METHODS):
        for method, (trainer, own) in zip(METHODS, process, strict=True):
            assert len(own) > 3
            for name, value in own.items():
                expected = trainer[name].double()
                torch.testing.assert_close(
                    value.double(), expected, rtol=1e-8, atol=1e-10, msg=f"{method}, {name}"
                )
