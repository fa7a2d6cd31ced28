"""One run on one process, from its data to its report."""

import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from heron import __version__
from heron.pipeline.config.errors import CheckpointError, Stopped
from heron.pipeline.config.experiment import Config, dump_config
from heron.pipeline.data.batches import Batch, batches, share_of
from heron.pipeline.data.dataset import build_data
from heron.pipeline.data.mined import MinedStream
from heron.pipeline.data.plan import shares
from heron.pipeline.data.streams import open_data
from heron.pipeline.data.views import Views
from heron.pipeline.data.workers import readers
from heron.pipeline.distributed import collectives, strategy
from heron.pipeline.distributed.agreement import agree, run_fingerprint
from heron.pipeline.distributed.exchange import ShardSizes, gather_batch, uses_ring
from heron.pipeline.distributed.launch import prepare, start_processes
from heron.pipeline.distributed.sync_batchnorm import has_norm, synchronise
from heron.pipeline.distributed.watchdog import Watchdog
from heron.pipeline.evaluation import baselines, collapse
from heron.pipeline.evaluation.evaluator import Evaluator
from heron.pipeline.evaluation.metrics import Scores
from heron.pipeline.models.heterogeneous import Heterogeneous
from heron.pipeline.models.networks import described
from heron.pipeline.models.recompute import recompute_blocks
from heron.pipeline.negatives.mine import Miner
from heron.pipeline.objectives import fused
from heron.pipeline.objectives.memory import RunSpec, StepEnd
from heron.pipeline.objectives.objective import Objective
from heron.pipeline.report.run_report import wants_map, write_report
from heron.pipeline.training import checkpoint, throughput
from heron.pipeline.training.checkpoint import Position, Snapshot
from heron.pipeline.training.optim import build_optimizer, learning_rate
from heron.pipeline.training.preamble import preamble, refuse_unfit
from heron.pipeline.training.run_lock import RunLock
from heron.pipeline.training.signals import StopSignals
from heron.pipeline.training.signature import SIGNATURE, Signature
from heron.pipeline.training.trackers import Trackers
from heron.pipeline.training.tracking import RunLog, write_result, write_start
from heron.pipeline.training.values import StepValues, Unread, refuse_nonfinite
from heron.shards.terminal import say, say_table

COMPILER = "inductor"  # behind torch.compile


def train(
    config: Config, watchdog: Watchdog, signals: StopSignals, run_lock: RunLock
) -> dict[str, Any]:
    """Sets up, steps, evaluates, saves, reports: see `pretrain`."""
    run = Trainer(config, watchdog, signals)
    run.open_data()
    run.build_model()
    run_lock.acquire(watchdog, signals.asked)
    run.resume()
    run.train()
    return run.report()


class Trainer:
    """One run on one process, from its data to its report; its methods are called in their order.

    Attributes:
        done: steps that were taken before this process began.
        steps: at which the run ends.
    """

    def __init__(self, config: Config, watchdog: Watchdog, signals: StopSignals) -> None:
        """Starts the processes. All draw the same weights; nothing later uses this generator."""
        self.started = time.perf_counter()
        config = config.model_copy(update={"model": described(config.model)})
        self.config, self.watchdog, self.signals = config, watchdog, signals
        self.folder = Path(config.run.dir)
        self.saved = self.folder / "checkpoints"
        self.text = dump_config(config)
        self.accelerator = start_processes(config, signals.asked)
        self.world, self.main = self.accelerator.num_processes, self.accelerator.is_main_process
        self.device = self.accelerator.device
        watchdog.start()
        self.trackers = Trackers(config, watchdog)
        self.by_ring: bool | None = None  # known from the first step on
        self.stop = False  # whether a signal has come to any process
        self.unread: Unread | None = None
        torch.manual_seed(config.seed)

    def open_data(self) -> None:
        """Opens the shards, and the streams of rows by role that the global batches come from.

        Every process asks for the build: the first on each disk does it, the others find it done.
        """
        data, local_main = self.config.data, self.accelerator.is_local_main_process
        with self.watchdog.busy():
            build_data(data, progress=local_main)
            streams = self.streams = open_data(self.config)
            self.data = streams.reader.manifest.fingerprint
            if data.verify and local_main:
                streams.reader.verify_payloads()
        collectives.barrier()  # notices at once who is gone
        mine = {"data": self.data, "tokenizers": streams.reader.tokenizers}
        agree(mine, self.config.train.timeout_s, self.signals.asked)
        self.skipped = streams.skipped(data.max_bad_fraction)
        for found in collectives.gather_told(streams.reader.lost):
            streams.reader.lost |= found  # with `on_error: skip`, all processes skip the same rows
        self.views = Views(streams.reader, data, self.device)
        self.labelled = streams.labelled.batch if streams.labelled else 0
        self.sizes = ShardSizes(
            shares(self.labelled, self.world),
            shares(streams.unlabelled.batch if streams.unlabelled else 0, self.world),
        )
        self.rows, self.offsets = sum(self.sizes.rows), self.sizes.offsets()
        self.per_epoch = streams.epoch_stream.steps_per_epoch
        planned = self.config.train.epochs * self.per_epoch
        self.steps = min(planned, self.config.train.steps or planned)

    def build_model(self) -> None:
        """Builds the objective, the parts of the model that it needs, and what terms remember."""
        config, streams = self.config, self.streams
        self.objective = Objective(config.objective.terms(), config.model.matryoshka)
        self.objective.refuse(streams.kind, config.data.views, self.labelled, config.model)
        self.objective.refuse_partial(streams.missing, streams.unknown)
        refuse_unfit(config, self.objective, self.views, streams)
        self.signature = Signature.of(streams.reader, config.data.views)
        self.labels = streams.reader.manifest.labels.names
        shapes, terms, names = self.views.shapes, self.objective.terms, config.data.view_names
        known = names, self.rows
        model = Heterogeneous(config.model, shapes, len(self.labels), terms, *known).to(self.device)
        model.precision = precision = config.train.precision
        assert precision != "auto"  # see `settle`
        fused.prefer("bf16" if precision == "bf16" else "fp16")
        if precision == "fp64":
            model.double()
        # The arithmetic of graphs depends on the rows: it is not counted.
        counted = all(len(shape) != 4 for shape in shapes)
        self.peak = throughput.peak_flops(self.device, precision) if counted else None
        most = max(self.sizes.rows)
        self.flops = throughput.model_flops(model, shapes, most) if self.peak else 0
        labelled = streams.labelled_rows

        def targets() -> Tensor:
            return torch.from_numpy(streams.targets(labelled))

        rows = torch.from_numpy(labelled)
        self.objective.remember(RunSpec(model, rows, len(self.labels), targets, terms))
        micro_batch, self.normed = config.train.micro_batch, has_norm(model)
        self.micro_batches = strategy.count_micro_batches(micro_batch, self.sizes, self.normed)
        for module in (model, *self.objective.memories.values()):
            synchronise(module)
        if config.train.activation_checkpointing:
            for encoder in model.encoders:
                recompute_blocks(encoder)
        if config.train.compile:
            model.compile_encoders(COMPILER)
            self.views.compile(COMPILER)
        self.model = model

    def resume(self) -> None:
        """Takes up the newest checkpoint, whose position is a number: the plan knows its rows."""
        config, model, snapshot = self.config, self.model, None
        self.damaged = list[str]()
        if config.run.resume != "never":
            known = self.saved, config, self.data, self.watchdog
            snapshot, self.damaged = checkpoint.resume(*known)
        self.done = done = snapshot.position.step if snapshot else 0
        if done > self.steps:
            raise CheckpointError(
                f"{self.saved} stands at step {done}, and the run ends at {self.steps}; expected a "
                "step that is not past the end: train.steps or train.epochs may not lie before it"
            )
        if snapshot:
            self.signature.refuse_other_tokenizers(self.saved / f"step-{done:08d}")
            model.load_state_dict(snapshot.model)
            self.objective.load_memory_state(snapshot.memories)
        optimizer = build_optimizer(config.optim, model.parameters())
        rows = max(self.sizes.rows)
        self.strategy = prepare(self.accelerator, model, optimizer, rows)
        if snapshot:
            self.strategy.load_optimizer(snapshot.optimizer, done)
        del snapshot  # or it would stay in memory beside what was made of it
        reader = self.streams.reader
        self.evaluator = Evaluator(reader, self.views, config.evaluate, self.watchdog)
        self.miner = None  # of hard negatives, which the labelled batches carry
        if isinstance(self.streams.labelled, MinedStream):
            mined = self.streams.labelled
            self.miner = Miner(config.negatives, mined, self.evaluator, self.saved)
            self.miner.begin(done)

    def train(self) -> None:
        """Takes every step that is left, and scores the last weights."""
        rank, pin = self.accelerator.process_index, self.device.type == "cuda"
        mine = share_of(self.streams, self.config, rank, self.world, self.done)
        source = batches(mine, self.done, self.steps, readers(self.config.data), pin=pin)
        earlier = self._clear_folder() if self.main else None
        log = RunLog(self.folder, self.done, self.steps, self.main, self.trackers)
        with log as self.log, closing(source), self.miner or nullcontext():
            known = self.config, self.streams, self.objective, self.sizes, self.strategy
            log.say(preamble(*known, self.micro_batches), *self.damaged)
            if earlier:
                log.say(f"checkpoints of an earlier run are now in {earlier}")
            self._tell_skipped([self.streams.reader.lost])
            if self.done and self._evaluates(self.done):
                self.evaluate(self.done)  # the run that was cut short may not have come to it
            self.train_seconds = log.earlier_s
            with self.signals.saving():
                for t in range(self.done, self.steps):
                    self.step(t, source)
                    self.after(t + 1)
            self._score()
        self.skipped.refuse()  # rows of the test set, with which the scores may not count

    def step(self, t: int, source: Iterator[Batch]) -> None:
        """Reads, embeds, gathers, compares, descends; its numbers are read a step later."""
        config, objective = self.config, self.objective
        self.watchdog.beat(t)
        clock = time.perf_counter()
        if self.miner:
            self.miner.wait(t)
        batch = next(source).to(self.device)
        waited = time.perf_counter() - clock
        inputs = self.views(batch, train=True)
        micro = strategy.micro_batches(batch.sizes, self.offsets, self.micro_batches)
        if self.normed:
            strategy.refuse_lonely_rows(batch, micro, self.views.names)
        features, backward = self.strategy.embed(inputs, batch, micro)
        self.read()  # while a GPU is busy with these
        epoch = t / self.per_epoch
        half = config.train.precision == "bf16"
        if self.by_ring is None:
            asked, memory = config.distributed.exchange, throughput.whole_memory(self.device)
            self.by_ring = uses_ring(asked, features, objective, self.sizes, memory)
            if self.by_ring:
                self.log.say("vectors of other processes' rows come round a ring")
        given = features, batch, inputs, self.sizes, objective, epoch, half, self.by_ring
        whole = gather_batch(*given)
        loss, terms = objective(whole)
        scalars = {"loss": loss, "skipped": len(batch.lost), "signals": self.signals.asked()}
        scalars |= {f"loss/{name}": x for name, x in terms.items()}
        numbers = StepValues(scalars, self.device)
        backward(loss)
        numbers.close(gradient_norm=self.strategy.gradient_norm())
        rate = learning_rate(config.optim, epoch, config.train.epochs)
        self.strategy.step(rate)
        gathered = self.strategy.gathered_parameters
        after = StepEnd(t, self.per_epoch, gathered, collectives.from_first)
        self.log.say(*objective.update(after))
        seconds = time.perf_counter() - clock
        self.train_seconds += seconds
        values = {"mfu": self.flops / seconds / self.peak} if self.peak else {}
        often = config.train.measure_every_steps
        if "projections" in features and (t + 1 == self.steps or (t + 1) % often == 0):
            z = [collectives.gather(x.detach(), self.sizes.rows) for x in features["projections"]]
            values |= collapse.measure(z, whole.present)
        values |= {"lr": rate, "samples_per_s": self.rows / seconds}
        values |= {"data_wait_s": waited, "seconds": seconds}
        features = {name: [x.detach() for x in tensors] for name, tensors in features.items()}
        self.unread = Unread(t, numbers, values, features, batch.lost)

    def read(self) -> None:
        """Reads and records the numbers of the last step; stops where one is not finite."""
        if self.unread is None:
            return
        (t, numbers, values, features, lost), self.unread = self.unread, None
        found = numbers.read()
        if found.pop("skipped"):
            self._tell_skipped(collectives.gather_objects(lost))
        self.stop |= found.pop("signals") > 0
        refuse_nonfinite(found, t, self.saved, features)
        if "uniformity" in values and (reason := collapse.collapsed(values)):
            self.log.say(f"step {t}: the embeddings have collapsed: {reason}")
        self.log.step({"step": t, "epoch": t // self.per_epoch, **found, **values})

    def after(self, now: int) -> None:
        """Mines, saves and evaluates where that is due after so many steps."""
        config, mines = self.config.train, self.config.negatives.every_steps
        every = config.save_every_steps
        saves = now == self.steps or self._due(now, config.save_every_epochs)
        saves |= every is not None and now % every == 0
        if saves or self.stop or self._evaluates(now) or (self.miner and now % mines == 0):
            self.read()  # or weights that a NaN has reached would be used
        if self.miner:
            self.miner.refresh(self.model, now)
        if self.stop or saves:
            self.save(now)
        if self.stop and now < self.steps:
            raise Stopped(f"a signal came; step {now} of {self.steps} is saved in {self.saved}")
        if self._evaluates(now):
            self.evaluate(now)

    def save(self, now: int) -> None:
        """Writes a checkpoint; every process calls it."""
        if self.miner:
            self.miner.finish()  # a run that goes on from here needs the table
        position = Position(now, *divmod(now, self.per_epoch))
        model, optimizer = self.strategy.model_state(), self.strategy.optimizer_state()
        memories = self.objective.memory_state()
        snapshot = Snapshot(position, model, optimizer, memories, self.data)
        texts = {"config.yaml": self.text, SIGNATURE: self.signature.text()}
        newest = self.config.train.keep_checkpoints
        checkpoint.keep(self.saved, snapshot, texts, newest, self.watchdog)

    def evaluate(self, now: int) -> None:
        """Scores the validation rows after so many steps; the test rows where there are none."""
        role: Literal["validation", "test"] = "test"
        if self.config.data.protocol.validation:
            role = "validation"
        _, scores = self.evaluator.evaluate(self.model, self.streams.roles, role)
        self.log.scores(now - 1, now / self.per_epoch, scores, role)

    def report(self) -> dict[str, Any]:
        """Trains what the result is compared with, and writes the result and the report."""
        config, scores = self.config, self.scores
        if config.evaluate.baselines:
            scores |= baselines.compare(
                config, self.evaluator, self.streams.roles, scores, self._train_other
            )
        memory = throughput.peak_memory(self.device)
        used = {}
        if self.peak and self.train_seconds:
            used["mfu"] = self.flops * self.steps / self.train_seconds / self.peak
        result: dict[str, Any] = {
            **scores,
            "steps": self.steps,
            "epochs": self.steps / self.per_epoch,
            "train_seconds": self.train_seconds,
            "seconds": time.perf_counter() - self.started,
            "world_size": self.world,
            "skipped_rows": len(self.skipped),
            **self.streams.rows_by_views(),
            "peak_memory_bytes": memory if self.done < self.steps else None,
            "strategy": self.strategy.describe(),
            "precision": config.train.precision,
            **used,
            "contrast": fused.describe(self.device),
            "version": __version__,
            "fingerprint": run_fingerprint(config, self.data),
        }
        others = [self._train_other(other) for other in baselines.other_seeds(config)]
        if self.main:
            shown = self.predictions, self.embedding, self.streams.reader
            report = write_report(self.folder, config, result, *shown)
            if lines := baselines.summary([result, *others], self.folder.name):
                say_table(*lines, headed=False)
            say(f"report: {report}")
            write_result(self.folder, result)  # last: who finds it takes the run for done
        return result

    def _score(self) -> None:
        """Scores the last weights, and embeds rows for the report's map."""
        options, roles, done = self.config.evaluate, self.streams.roles, max(self.steps - 1, 0)
        epoch, self.scores = self.steps / self.per_epoch, Scores()
        if self.config.data.protocol.validation:
            found, scores = self.evaluator.evaluate(self.model, roles, "validation")
            self.predictions = found
            self.scores |= {f"validation_{name}": value for name, value in scores.items()}
            self.log.scores(done, epoch, scores, "validation")
        if options.test:
            self.predictions, scores = self.evaluator.evaluate(self.model, roles)
            self.scores |= scores
            self.log.scores(done, epoch, scores)
        self.embedding = None
        # Clocks differ, so the main process decides.
        if collectives.from_first(wants_map(options.map, self.train_seconds)):
            scored = roles.test if options.test else roles.validation
            scored = scored if len(scored) else roles.unlabelled
            sample = scored[:: max(1, len(scored) // options.map_rows)]
            self.embedding = self.evaluator.predict(self.model, sample, hidden=True)
        self._tell_skipped(collectives.gather_told(self.streams.reader.lost), refuse=False)

    def _train_other(self, other: Config) -> dict[str, Any]:
        with RunLock(Path(other.run.dir)) as run_lock:
            return train(other, self.watchdog, self.signals, run_lock)

    def _clear_folder(self) -> Path | None:
        """Sets an earlier run's files aside, and says where its checkpoints went."""
        earlier = None if self.done else checkpoint.set_aside(self.saved)
        for stale in ("result.json", "report.html"):
            (self.folder / stale).unlink(missing_ok=True)
        write_start(self.folder, self.text, self.steps, run_fingerprint(self.config, self.data))
        return earlier

    def _tell_skipped(self, lost: list[dict[int, str]], refuse: bool = True) -> None:
        self.log.say(*self.skipped.add(lost))
        if refuse:
            self.skipped.refuse()

    def _evaluates(self, now: int) -> bool:
        return now < self.steps and self._due(now, self.config.train.evaluate_every_epochs)

    def _due(self, now: int, every_epochs: int | None) -> bool:
        return every_epochs is not None and now % (every_epochs * self.per_epoch) == 0
