"""Pretrain: the main job, from configuration to report.

    accelerate launch pipeline/pretrain.py --config configs/scene.yaml optim.lr=0.1

One file, read from top to bottom. It runs as it is on one CPU, one GPU, or many of either with
DistributedDataParallel; only the accelerate configuration differs. Without an argument it is
configs/faces.yaml.
"""

import argparse
import importlib.metadata
import math
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline import checkpoint, collectives
from pipeline.checkpoint import Position
from pipeline.config import Config, dump_config, load_config
from pipeline.data.batches import ProcessBatches, batches
from pipeline.data.plan import shares
from pipeline.data.skipped import Skipped
from pipeline.data.streams import Streams, build_data, open_streams
from pipeline.data.views import Views
from pipeline.errors import CheckpointError, ConfigError, TrainingError
from pipeline.evaluation import Evaluator
from pipeline.exchange import Split, culprits, globalise, remember
from pipeline.models.heterogeneous import Features, Heterogeneous
from pipeline.models.momentum import Momentum
from pipeline.models.normalisation import synchronise
from pipeline.objectives import fused
from pipeline.objectives.objective import Objective
from pipeline.optim import build_optimizer, learning_rate
from pipeline.processes import start_processes
from pipeline.report import write_report, write_result
from pipeline.tracking import Tracker
from shards.errors import ShardError, SourceError

EXPECTED = (ConfigError, ShardError, SourceError, CheckpointError, TrainingError, OSError)
DEFAULT = Path(__file__).resolve().parent.parent / "configs" / "faces.yaml"


def pretrain(config: Config) -> dict[str, Any]:
    """Train, evaluate, report.

    Args:
        config: the experiment; every process is given the same.

    Returns:
        What the run's result.json holds.

    Raises:
        ConfigError: the configuration does not fit the data.
        ShardError: the data set is missing or damaged.
        TrainingError: the loss is not finite, or fewer processes run than were asked for.
    """
    started = time.perf_counter()
    folder = Path(config.run.dir)
    text = dump_config(config)

    # Processes. All draw the same initial weights; nothing later uses this generator.
    accelerator = start_processes(config)
    world, main, device = accelerator.num_processes, accelerator.is_main_process, accelerator.device
    torch.manual_seed(config.seed)

    # Data: rows by role, and the streams that the global batches come from. Every process asks for
    # the build: the first on each disk does it, the others find it done.
    build_data(config.data, progress=accelerator.is_local_main_process)
    streams = open_streams(config)
    if config.data.verify and accelerator.is_local_main_process:
        streams.reader.verify_payloads()
    used = np.concatenate([streams.rows, streams.roles.test])
    skipped = Skipped(used, config.data.max_bad_fraction)
    for found in collectives.gather_objects(streams.reader.lost):
        streams.reader.lost |= found  # with `on_error: skip`, all processes skip the same rows
    views = Views(streams.reader, config.data, device)
    split = Split(
        shares(streams.labelled.batch if streams.labelled else 0, world),
        shares(streams.unlabelled.batch if streams.unlabelled else 0, world),
    )
    per_epoch = streams.lead.steps_per_epoch
    planned = config.train.epochs * per_epoch
    steps = min(planned, config.train.steps or planned)

    # Model, objective, optimiser: only the parts that some term needs.
    objective = Objective(config.objective.terms())
    rows = streams.labelled.batch if streams.labelled else 0
    objective.refuse(streams.kind, config.data.views, rows, config.model)
    model = Heterogeneous(
        config.model,
        views.shapes,
        len(streams.reader.manifest.labels.names),
        classify=objective.needs("classify"),
        project=objective.needs("project"),
        weigh=objective.needs("weigh"),
    ).to(device)
    momentum = None  # a slow copy that makes keys, of the second view where there is one encoder
    if (term := objective.mulco) is not None:
        names = streams.reader.manifest.labels.names
        momentum = Momentum(model, 1, term.queue, len(names), term.momentum).to(device)
        synchronise(momentum)
    synchronise(model)
    optimizer = build_optimizer(config.optim, model.parameters())
    wrapped = accelerator.prepare(model)
    evaluator = Evaluator(streams.reader, views, config.evaluate)

    # Resume: the position is a number, which the plan turns back into batches.
    saved = folder / "checkpoints"
    done = 0
    if config.run.resume == "auto" and (found := checkpoint.complete(saved)):
        done = checkpoint.load(found[-1], model, optimizer, config, momentum).step
    positions = collectives.gather_objects(done)
    if len(set(positions)) > 1 or done > steps:
        raise CheckpointError(
            f"{saved} stands at step {positions} of the processes, and the run ends at {steps}; "
            "expected one step, not past the end: all machines must see the same run.dir, and "
            "train.steps or train.epochs may not lie before it"
        )
    source = batches(
        ProcessBatches(streams, config.seed, accelerator.process_index, world),
        done,
        steps,
        config.data.workers,
        pin=device.type == "cuda",
    )
    earlier = None
    if main:
        earlier = None if done else checkpoint.set_aside(saved)
        folder.mkdir(parents=True, exist_ok=True)
        for stale in ("result.json", "report.html"):
            (folder / stale).unlink(missing_ok=True)
        (folder / "config.yaml").write_text(text)

    with Tracker(folder, done, steps, main) as tracker:
        tracker.say(describe(config, streams, split, model))
        if earlier:
            tracker.say(f"checkpoints of an earlier run are now in {earlier}")
        tracker.say(*skipped.add([streams.reader.lost]))
        skipped.refuse()
        train_seconds = 0.0
        for t in range(done, steps):
            # A step: read, embed, gather, compare, descend.
            clock = time.perf_counter()
            batch = next(source).to(device)
            waited = time.perf_counter() - clock
            rate = learning_rate(config.optim, t / per_epoch, config.train.epochs)
            for group in optimizer.param_groups:
                group["lr"] = rate
            inputs = views(batch, train=True)
            features = wrapped(inputs, batch.keys, batch.parts)
            whole = globalise(features, batch, inputs, split, objective, momentum)
            loss, terms = objective(whole, t / per_epoch)
            values = total(
                {"loss": loss, "skipped": torch.tensor(len(batch.lost), device=device)}
                | {f"loss/{name}": term for name, term in terms.items()}
            )
            if values.pop("skipped"):
                tracker.say(*skipped.add(collectives.gather_objects(batch.lost)))
                skipped.refuse()
            refuse_nonfinite(values, t, saved, features)
            optimizer.zero_grad()
            accelerator.backward(loss * world)  # DDP means over processes, the loss is a sum
            values["gradient_norm"] = float(nn.utils.get_total_norm(gradients(model)))
            refuse_nonfinite(values, t, saved, features)
            optimizer.step()
            if momentum is not None:
                momentum.follow(model)
                remember(momentum, whole, split)
            seconds = time.perf_counter() - clock
            train_seconds += seconds
            tracker.step(
                {
                    "step": t,
                    "epoch": t // per_epoch,
                    **values,
                    "lr": rate,
                    "samples_per_s": sum(split.rows) / seconds,
                    "data_wait_s": waited,
                    "seconds": seconds,
                }
            )

            # Between epochs: evaluate and save.
            now = t + 1
            if due(now, per_epoch, config.train.evaluate_every_epochs) and now < steps:
                _, scores = evaluator.evaluate(model, streams.roles)
                tracker.scores(t, now / per_epoch, scores)
            if due(now, per_epoch, config.train.save_every_epochs) or now == steps:
                if main:
                    place = Position(now, *divmod(now, per_epoch))
                    kept = config.train.keep_checkpoints
                    checkpoint.save(saved, place, model, optimizer, text, kept, momentum)
                collectives.barrier()

        # Close: score the last weights, write the result and the report.
        test = streams.roles.test if len(streams.roles.test) else streams.roles.unlabelled
        predictions, scores = evaluator.evaluate(model, streams.roles)
        sample = test[:: max(1, len(test) // config.evaluate.map_rows)]
        embedding = evaluator.predict(model, sample, hidden=True)
        tracker.scores(max(steps - 1, 0), steps / per_epoch, scores)
        tracker.say(*skipped.add(collectives.gather_objects(streams.reader.lost)))
    result: dict[str, Any] = {
        **scores,
        "steps": steps,
        "epochs": steps / per_epoch,
        "train_seconds": train_seconds,
        "seconds": time.perf_counter() - started,
        "world_size": world,
        "skipped_rows": len(skipped),
        "peak_memory_bytes": peak_memory(device),
        "contrast": fused.describe(device),
        "version": importlib.metadata.version("heron-pretrain"),
    }
    if main:
        write_result(folder, result)
        print(f"report: {write_report(folder, result, predictions, embedding, streams.reader)}")
    skipped.refuse()  # rows of the test set, with which the scores may not count
    return result


def describe(config: Config, streams: Streams, split: Split, model: nn.Module) -> str:
    """The run in a few lines, with the arithmetic of its batch."""
    world = len(split.rows)
    terms = config.objective.terms()
    lines = [
        f"{config.run.dir}: {sum(p.numel() for p in model.parameters()):,} parameters; objective "
        + " + ".join(f"{term.weight:g} {name}" for name, term in terms.items()),
        *streams.describe(),
        f"global batch {sum(split.rows):,} = {' + '.join(f'{n:,}' for n in split.rows)} over "
        f"{world} process{'es' if world > 1 else ''} ({sum(split.labelled):,} labelled)",
    ]
    return "\n".join(lines)


def total(parts: Mapping[str, Tensor]) -> dict[str, float]:
    """Every process's share of some scalars, summed."""
    stacked = torch.stack([value.detach().double() for value in parts.values()])
    return dict(zip(parts, collectives.sum_over_processes(stacked).tolist(), strict=True))


def refuse_nonfinite(
    values: Mapping[str, float], step: int, saved: Path, features: Features
) -> None:
    """Stop before a NaN reaches the weights; all processes see the same values."""
    wrong = {name: value for name, value in values.items() if not math.isfinite(value)}
    if wrong:
        named = [name for name in wrong if name != "loss"] or ["loss"]
        found = checkpoint.complete(saved)
        where = culprits(features) or ["the embeddings of all ranks are finite"]
        raise TrainingError(
            f"step {step}: {', '.join(f'{name} is {wrong[name]}' for name in named)}; "
            f"{'; '.join(where)}; the weights were not touched; last checkpoint: "
            f"{found[-1] if found else 'none'}; lower optim.lr or raise tau, and check the data "
            "with `heron shards verify`"
        )


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradients that the last backward left."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def due(step: int, per_epoch: int, every_epochs: int | None) -> bool:
    """Whether `step` steps end a multiple of so many epochs."""
    return every_epochs is not None and step % (every_epochs * per_epoch) == 0


def peak_memory(device: torch.device) -> int:
    """The most memory this process has held: of the GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    """Read the command line and run; a fault the user can mend is one line, not a traceback."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", default=DEFAULT, help="experiment (default: %(default)s)")
    parser.add_argument("--method", help="terms of a method of configs/methods.yaml")
    parser.add_argument("overrides", nargs="*", help="key=value, such as optim.lr=0.1")
    arguments = parser.parse_intermixed_args()
    try:
        pretrain(load_config(arguments.config, arguments.overrides, arguments.method))
    except EXPECTED as error:
        print(f"error: rank {collectives.rank()}: {error}", file=sys.stderr)
        return 1
    finally:
        collectives.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
