"""SimCLR's training step by lightly and by solo-learn, around our encoder and on our batches.

    pip install lightly
    pip install --no-deps solo-learn lightning-bolts timm einops "pytorch-lightning<2" \
        "lightning-fabric<2" "setuptools<80"

All are imported where they are used: none is needed to run the benchmark.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.scaling_steps import build, fed_batches, open_run_data
from benchmarks.scaling_turns import Gate
from heron.experiment.config import Config
from heron.losses.objective import build_losses
from heron.losses.unsupervised import NtXent
from heron.training.optim import build_optimizer

CLASSES = 10  # of solo-learn's classifier on detached features, which its step trains beside
DECLARED: list[Any] = []  # as long as they are held

Step = Callable[[list[Tensor]], Tensor]


class Plain(nn.Module):
    """An encoder of ours, called with pictures alone."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        keys = torch.empty(len(x), dtype=torch.int64)  # of dropout, which it has not
        result: Tensor = self.encoder(x, keys)
        return result


def lightly(gate: Gate, config: Config) -> None:
    """The step of lightly's PyTorch example of SimCLR, with its head and its loss."""
    have_torchvision()
    losses, heads = (importlib.import_module(f"lightly.{n}") for n in ("loss", "models.modules"))

    def prepare(encoder: Plain, projector: nn.Sequential) -> tuple[nn.Module, Step]:
        width, out = sizes(projector)
        head = heads.SimCLRProjectionHead(width, width, out, batch_norm=False)
        head.layers.load_state_dict(projector.state_dict())
        model, criterion = nn.Sequential(encoder, head), losses.NTXentLoss(temperature(config))
        return model, lambda x: criterion(model(x[0]), model(x[1]))

    train(gate, config, prepare)


def solo(gate: Gate, config: Config) -> None:
    """`SimCLR.training_step` of solo-learn, without Lightning's trainer around it."""
    have_torchvision()
    method = importlib.import_module("solo.methods.simclr").SimCLR
    count = config.data.batch.unlabelled
    assert count != "all"
    optim = dict(optimizer="sgd", lars=False, lr=0.1, weight_decay=0.0, classifier_lr=0.1)
    optim |= dict(exclude_bias_n_norm=False, accumulate_grad_batches=1, extra_optimizer_args={})
    optim |= dict(scheduler="none", min_lr=0.0, warmup_start_lr=0.0, warmup_epochs=0, max_epochs=1)

    def prepare(encoder: Plain, projector: nn.Sequential) -> tuple[nn.Module, Step]:
        width, out = sizes(projector)
        model = method(
            encoder="resnet18",  # replaced below
            num_classes=CLASSES,
            backbone_args={},
            batch_size=count,
            num_large_crops=2,
            num_small_crops=0,
            proj_output_dim=out,
            proj_hidden_dim=width,
            temperature=temperature(config),
            **optim,
        )
        model.features_dim = width
        model.encoder, model.projector = encoder, projector  # Linear, ReLU, Linear: as its own
        model.classifier = nn.Linear(width, CLASSES)
        logged: dict[str, Tensor] = {}
        model.log_dict = lambda metrics, **_: logged.update(metrics)
        numbers = torch.arange(count)
        classes = numbers % CLASSES

        def step(x: list[Tensor]) -> Tensor:
            loss: Tensor = model.training_step([numbers, x, classes], 0)
            gate.first = float(logged["train_nce_loss"]) if gate.first is None else gate.first
            return loss

        return model, step

    train(gate, config, prepare)


def train(
    gate: Gate,
    config: Config,
    prepare: Callable[[Plain, nn.Sequential], tuple[nn.Module, Step]],
) -> None:
    """Train a peer's model, made of our encoder and of the weights of our projector."""
    streams, views = open_run_data(config)
    own_model = build(config, streams, views)
    encoder, projector = own_model.branch(0)
    assert isinstance(projector, nn.Sequential)
    model, loss_of = prepare(Plain(encoder), projector)
    optimizer = build_optimizer(config.optim, model.parameters())
    for _, inputs in fed_batches(config, streams, views):
        loss = loss_of(inputs)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        gate(loss)


def sizes(projector: nn.Sequential) -> tuple[int, int]:
    """The width of hidden features, and of a projection."""
    last = projector[-1]
    assert isinstance(last, nn.Linear)
    return last.in_features, last.out_features


def temperature(config: Config) -> float:
    term = build_losses(config.objective)["nt_xent"]
    assert isinstance(term, NtXent)
    return term.tau


def beside(gate: Gate, config: Config, train: Callable[[Gate, Config], None]) -> None:
    """Train in the surroundings of the peers: transformers imports torchvision where it is."""
    if importlib.util.find_spec("torchvision") is not None:
        have_torchvision()
    train(gate, config)


def have_torchvision() -> None:
    """Import torchvision, also where its operators have no kernels for this build of torch.

    It then stops at two operators that it describes and no one here calls; they are declared.
    """
    importlib.import_module("torch._dynamo")  # which torchvision would leave half imported
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library: Any = torch.library.Library
        DECLARED.append(library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            DECLARED[-1].define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")
        importlib.import_module("torchvision")


def versions() -> dict[str, Any]:
    """Of the peers that are installed."""
    metadata = importlib.import_module("importlib.metadata")
    versions_by_name = {}
    for name in ("lightly", "solo-learn"):
        try:
            versions_by_name[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions_by_name
