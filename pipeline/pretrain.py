"""Pretrain: the main job, from configuration to report.

    accelerate launch pipeline/pretrain.py --config configs/scene.yaml optim.lr=0.1

One file, read from top to bottom. It runs as it is on one CPU, one GPU, or many of either with
DistributedDataParallel or DeepSpeed's ZeRO 0 to 3; only the accelerate configuration differs.
Without an argument it is configs/faces.yaml. It exits with 0 at the end, 1 after an error, 75 when
a signal came and the state is saved, 76 when a process is dead or hangs.
"""

import argparse
import sys
import time
import traceback
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heron import __version__
from heron.pipeline.config.errors import (
    LOST,
    STOPPED,
    CheckpointError,
    ConfigError,
    Lost,
    Stopped,
    TrainingError,
)
from heron.pipeline.config.experiment import Config, dump_config, load_config
from heron.pipeline.data.batches import ProcessBatches, batches
from heron.pipeline.data.mined import MinedStream
from heron.pipeline.data.plan import shares
from heron.pipeline.data.skipped import Skipped
from heron.pipeline.data.streams import build_data, open_streams
from heron.pipeline.data.views import Views
from heron.pipeline.distributed import collectives, grad_cache
from heron.pipeline.distributed.exchange import Split
from heron.pipeline.distributed.launch import prepare, start_processes
from heron.pipeline.distributed.sync_batchnorm import has_norm, synchronise
from heron.pipeline.distributed.watchdog import Watchdog, leave
from heron.pipeline.evaluation import collapse
from heron.pipeline.evaluation.evaluator import Evaluator
from heron.pipeline.models.heterogeneous import Heterogeneous
from heron.pipeline.negatives.mine import Miner
from heron.pipeline.objectives import fused
from heron.pipeline.objectives.objective import Objective
from heron.pipeline.training import checkpoint, pretrained, throughput
from heron.pipeline.training.checkpoint import Position, Snapshot
from heron.pipeline.training.companions import Companions
from heron.pipeline.training.optim import build_optimizer, learning_rate
from heron.pipeline.training.preamble import preamble
from heron.pipeline.training.report import wants_map, write_report, write_result
from heron.pipeline.training.run_lock import Hold
from heron.pipeline.training.signals import StopSignals
from heron.pipeline.training.tracking import Tracker
from heron.pipeline.training.values import refuse_nonfinite, total
from heron.shards.errors import ShardError, SourceError

EXPECTED = (ConfigError, ShardError, SourceError, CheckpointError, TrainingError, OSError)
AGAIN = "run again with run.resume=auto to go on"
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
        TrainingError: the loss is not finite, fewer processes run than were asked for, or another
            run holds the folder.
        CheckpointError: a checkpoint does not fit, or cannot be written.
        Stopped: a signal came, and the state is saved.
        Lost: another process is gone.
    """
    watchdog = Watchdog(config.train.timeout_s)
    hold = Hold(Path(config.run.dir))
    with StopSignals(config.data.workers > 0) as signals, watchdog, hold:
        try:
            return train(config, watchdog, signals, hold)
        except RuntimeError as error:
            if not (watchdog.started and collectives.is_lost(error)):
                raise
            raise Lost(f"{watchdog.autopsy()}; {error}") from error


def train(config: Config, watchdog: Watchdog, signals: StopSignals, hold: Hold) -> dict[str, Any]:
    """See `pretrain`."""
    started = time.perf_counter()
    folder = Path(config.run.dir)
    text = dump_config(config)

    # Processes. All draw the same initial weights; nothing later uses this generator.
    accelerator = start_processes(config)
    world, main, device = accelerator.num_processes, accelerator.is_main_process, accelerator.device
    watchdog.start()
    torch.manual_seed(config.seed)

    # Data: rows by role, and the streams that the global batches come from. Every process asks for
    # the build: the first on each disk does it, the others find it done.
    with watchdog.busy():
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
    labels = streams.reader.manifest.labels.names
    model = Heterogeneous(config.model, views.shapes, len(labels), **objective.parts).to(device)
    model.precision = config.train.precision
    if model.precision == "fp64":
        model.double()
    peak = throughput.peak_flops(device, config.train.precision)
    flops = throughput.model_flops(model, views.shapes, max(split.rows)) if peak else 0
    companions = Companions(objective, model, streams, split, device)
    pieces = grad_cache.count(config.train.micro_batch, split, has_norm(model))
    synchronise(model)

    # Resume: the position is a number, which the plan turns back into batches.
    saved = folder / "checkpoints"
    hold.take(watchdog, lambda: signals.came)
    snapshot, damaged = None, list[str]()
    if config.run.resume == "auto":
        snapshot, damaged = checkpoint.resume(saved, config)
    done = snapshot.position.step if snapshot else 0
    if done > steps:
        raise CheckpointError(
            f"{saved} stands at step {done}, and the run ends at {steps}; expected a step that is "
            "not past the end: train.steps or train.epochs may not lie before it"
        )
    if snapshot:
        model.load_state_dict(snapshot.model)
        companions.load(snapshot.momentum)
    optimizer = build_optimizer(config.optim, model.parameters())
    strategy = prepare(accelerator, model, optimizer, max(split.rows))
    if snapshot:
        strategy.load_optimizer(snapshot.optimizer, done)
    del snapshot  # or it would stay in memory beside what was made of it
    evaluator = Evaluator(streams.reader, views, config.evaluate, watchdog)
    miner = None  # of hard negatives, which the labelled batches carry
    if isinstance(streams.labelled, MinedStream):
        miner = Miner(config.negatives, streams.labelled, evaluator, saved)
        miner.begin(done)
    texts = {
        "config.yaml": text,
        "model.json": pretrained.describe(views.shapes, len(labels), objective),
    }

    def save(now: int) -> None:
        if miner:
            miner.finish()  # a run that goes on from here needs the table
        place = Position(now, *divmod(now, per_epoch))
        states = strategy.model_state(), strategy.optimizer_state(), companions.state()
        found = Snapshot(place, *states)
        checkpoint.keep(saved, found, texts, config.train.keep_checkpoints, watchdog)

    def evaluate(now: int) -> None:
        _, scores = evaluator.evaluate(model, streams.roles)
        tracker.scores(now - 1, now / per_epoch, scores)

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
        for stale in ("result.json", "report.html", "map.png"):
            (folder / stale).unlink(missing_ok=True)
        (folder / "config.yaml").write_text(text)

    with Tracker(folder, done, steps, main) as tracker, closing(source), miner or nullcontext():
        tracker.say(preamble(config, streams, objective, split, strategy, pieces), *damaged)
        if earlier:
            tracker.say(f"checkpoints of an earlier run are now in {earlier}")
        tracker.say(*skipped.add([streams.reader.lost]))
        skipped.refuse()
        if done and due(done, per_epoch, config.train.evaluate_every_epochs) and done < steps:
            evaluate(done)  # the run that was cut short may not have come to it
        train_seconds = tracker.earlier_s
        for t in range(done, steps):
            # A step: read, embed, gather, compare, descend.
            watchdog.beat(t)
            clock = time.perf_counter()
            if miner:
                miner.wait(t)
            batch = next(source).to(device)
            waited = time.perf_counter() - clock
            inputs = views(batch, train=True)
            cuts = grad_cache.cut(batch.parts, split.firsts(batch.parts), pieces)
            features, backward = grad_cache.embed(strategy, inputs, batch, cuts)
            epoch = t / per_epoch
            whole = companions.globalise(features, batch, inputs, epoch)
            loss, terms = objective(whole, epoch)
            scalars = {"loss": loss, "skipped": len(batch.lost), "signals": bool(signals.came)}
            values = total(scalars | {f"loss/{name}": x for name, x in terms.items()}, device)
            if values.pop("skipped"):
                tracker.say(*skipped.add(collectives.gather_objects(batch.lost)))
                skipped.refuse()
            stop = values.pop("signals") > 0
            refuse_nonfinite(values, t, saved, features)
            companions.judge(features, batch.targets)
            backward(loss)
            values["gradient_norm"] = strategy.gradient_norm()
            refuse_nonfinite(values, t, saved, features)
            rate = learning_rate(config.optim, epoch, config.train.epochs)
            strategy.step(rate)
            tracker.say(*companions.follow(strategy, whole, t, per_epoch))
            del backward, features, inputs, loss  # not to lie beside those of the next step
            seconds = time.perf_counter() - clock
            train_seconds += seconds
            if (share := throughput.mfu(flops, seconds, peak)) is not None:
                values["mfu"] = share

            # Between steps: measure, evaluate, save.
            now = t + 1
            often = config.train.measure_every_steps
            if whole.projections and (now == steps or now % often == 0):
                values |= collapse.measure([z.detach() for z in whole.projections])
                if reason := collapse.collapsed(values):
                    tracker.say(f"step {t}: the embeddings have collapsed: {reason}")
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
            if miner:
                miner.refresh(model, now)
            every = config.train.save_every_steps
            ends = now == steps or due(now, per_epoch, config.train.save_every_epochs)
            if stop or ends or (every is not None and now % every == 0):
                save(now)
            if stop and now < steps:
                raise Stopped(f"a signal came; step {now} of {steps} is saved in {saved}")
            if due(now, per_epoch, config.train.evaluate_every_epochs) and now < steps:
                evaluate(now)

        # Close: score the last weights, write the result and the report.
        test = streams.roles.test if len(streams.roles.test) else streams.roles.unlabelled
        predictions, scores = evaluator.evaluate(model, streams.roles)
        embedding = None  # of rows for the map; clocks differ, so the main process decides
        if collectives.gather_objects(wants_map(config.evaluate.map, train_seconds))[0]:
            sample = test[:: max(1, len(test) // config.evaluate.map_rows)]
            embedding = evaluator.predict(model, sample, hidden=True)
        tracker.scores(max(steps - 1, 0), steps / per_epoch, scores)
        tracker.say(*skipped.add(collectives.gather_objects(streams.reader.lost)))
    skipped.refuse()  # rows of the test set, with which the scores may not count
    result: dict[str, Any] = {
        **scores,
        "steps": steps,
        "epochs": steps / per_epoch,
        "train_seconds": train_seconds,
        "seconds": time.perf_counter() - started,
        "world_size": world,
        "skipped_rows": len(skipped),
        "peak_memory_bytes": throughput.peak_memory(device) if done < steps else None,
        "strategy": strategy.describe(),
        "precision": config.train.precision,
        "contrast": fused.describe(device),
        "version": __version__,
    }
    if main:
        print(f"report: {write_report(folder, result, predictions, embedding, streams.reader)}")
        write_result(folder, result)  # last: who finds it takes the run for done
    return result


def due(step: int, per_epoch: int, every_epochs: int | None) -> bool:
    """Whether `step` steps end a multiple of so many epochs."""
    return every_epochs is not None and step % (every_epochs * per_epoch) == 0


def main() -> int:
    """Read the command line and run; a fault the user can mend is one line, not a traceback."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", default=DEFAULT, help="experiment (default: %(default)s)")
    parser.add_argument("--method", help="terms of a method of configs/methods.yaml")
    parser.add_argument("overrides", nargs="*", help="key=value, such as optim.lr=0.1")
    arguments = parser.parse_intermixed_args()
    try:
        pretrain(load_config(arguments.config, arguments.overrides, arguments.method))
    except Stopped as stopped:
        print(f"stopped: {stopped}; {AGAIN}", file=sys.stderr)
        return ended(STOPPED)
    except Lost as lost:
        print(f"error: a process is gone: {lost}; {AGAIN}", file=sys.stderr, flush=True)
        leave(LOST)  # leaving the process group would wait for the one that is gone
    except EXPECTED as error:
        print(f"error: rank {collectives.rank()}: {error}", file=sys.stderr)
        return failed()
    except Exception:
        traceback.print_exc()
        return failed()
    return ended(0)


def ended(status: int) -> int:
    """The exit status after all is written.

    Several processes leave out the interpreter's end: a thread of a process group can abort it,
    and a run that is done would count as failed.
    """
    several = collectives.world_size() > 1
    collectives.close()
    if several:
        leave(status)
    return status


def failed() -> int:
    """The exit status after an error; others may not know of it, so they are not waited for."""
    if collectives.world_size() > 1:
        leave(1)
    return 1


if __name__ == "__main__":
    sys.exit(main())
