"""The training loop: one run on one process, from its data to its report."""

import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from heron.base.errors import CheckpointError, Stopped
from heron.base.shipped import __version__
from heron.base.terminal import print_lines, print_table
from heron.data.batches import Batch, batches, on_device, worker_count
from heron.data.dataset import build_data
from heron.data.label_files import chosen_files, refuse_other_files
from heron.data.plan import even_sizes
from heron.data.streams import MinedStream
from heron.data.views import Embedded, Views
from heron.distributed import collectives
from heron.distributed.agreement import agree
from heron.distributed.signals import StopSignals
from heron.distributed.sync_batchnorm import has_norm, synchronise
from heron.distributed.watchdog import Watchdog
from heron.evaluation import collapse
from heron.evaluation.evaluator import UNSCORED, Evaluator
from heron.evaluation.metrics import Scores
from heron.experiment.config import Config, dump_config, run_fingerprint
from heron.experiment.open_data import open_data, open_process_batches
from heron.losses.exchange import ShardSizes
from heron.losses.objective import Objective, gather_batch
from heron.losses.products import describe_path
from heron.losses.run import RunSpec, StepEnd
from heron.models.heterogeneous import Heterogeneous
from heron.models.recompute import recompute_blocks
from heron.training import baselines, checkpoint, strategy, throughput
from heron.training.checkpoint import Position
from heron.training.earlier_run import facts_of_steps, make_way, refuse_finished, result_of_ended
from heron.training.frozen import FrozenEncoders
from heron.training.kept_weights import Kept
from heron.training.launch import prepare, prepare_products, start_processes
from heron.training.mining import Miner
from heron.training.optim import build_optimizer, learning_rate
from heron.training.preamble import preamble, refuse_unfit
from heron.training.run_lock import RunLock
from heron.training.run_log import PendingStep, RunLog, StepValues, nonfinite, refuse_nonfinite
from heron.training.saved import as_saved
from heron.training.saver import Saver
from heron.training.signature import SIGNATURE, Signature
from heron.training.trackers import Trackers
from heron.training.tracking import WriteReport, map_rows, wants_map, write_result, write_start

COMPILER = "inductor"  # the backend of torch.compile


class Trainer:
    """One run on one process; `run` calls the other methods in the order in which they stand.

    `start_step` steps were taken before this process began; the run ends after `steps` in all.
    """

    def __init__(
        self, config: Config, watchdog: Watchdog, signals: StopSignals, write_report: WriteReport
    ) -> None:
        """Starts the processes; all seed the generator alike, which only initial weights use."""
        self.start_time = time.perf_counter()
        config = as_saved(config)
        self.config, self.watchdog, self.signals = config, watchdog, signals
        self.write_report = write_report
        self.folder = Path(config.run.dir)
        self.checkpoints = self.folder / "checkpoints"
        self.config_text = dump_config(config)
        self.accelerator = start_processes(config, signals.received)
        self.world, self.is_main = self.accelerator.num_processes, self.accelerator.is_main_process
        self.device = self.accelerator.device
        watchdog.start()
        self.trackers = Trackers(config, watchdog)
        self.stop = False  # whether any process has received a signal
        self.pending: PendingStep | None = None
        self.scores, self.predictions, self.embedding = Scores(), UNSCORED, UNSCORED
        torch.manual_seed(config.seed)

    def run(self, lock: RunLock, overwrite: bool = False) -> dict[str, Any]:
        """Trains, and returns the result: see `pretrain`."""
        if self.config.run.resume == "never" and not overwrite:  # before data are built
            collectives.on_main(lambda: refuse_finished(self.folder, self.config.run.resume))
        self.open_data()
        self.build_model()
        lock.acquire(self.watchdog, self.signals.received)
        self.resume(lock, overwrite)
        if self.is_done:
            return self.earlier
        with closing(self.background):
            self.train()
            return self.report()

    def open_data(self) -> None:
        """Opens the shards and the streams of rows that global batches are drawn from."""
        data, is_local_main = self.config.data, self.accelerator.is_local_main_process
        with self.watchdog.busy():  # the first process on each disk builds, the others wait for it
            build_data(data, progress=is_local_main)
            streams = self.streams = open_data(self.config)
            self.data_fingerprint = streams.reader.manifest.fingerprint
            if data.verify and is_local_main:
                streams.reader.verify_payloads()
        collectives.barrier()  # fails at once where a process is gone
        chosen = chosen_files(data.protocol)
        facts = {"data": self.data_fingerprint, "tokenizers": streams.reader.tokenizers, **chosen}
        agree(facts, self.config.train.timeout_s, self.signals.received)
        self.skipped = streams.skipped(data.max_bad_fraction)
        for lost in collectives.gather_if_any(streams.reader.lost):
            streams.reader.lost |= lost  # with `on_error: skip`, all processes skip the same rows
        self.views = Views(streams.reader, data, self.device)
        self.n_labelled = streams.labelled.batch if streams.labelled else 0
        batch = self.n_labelled, streams.unlabelled.batch if streams.unlabelled else 0
        self.sizes = ShardSizes(*(even_sizes(rows, self.world) for rows in batch))
        self.batch_rows, self.offsets = sum(self.sizes.rows), self.sizes.offsets()
        self.steps_per_epoch = streams.epoch_stream.steps_per_epoch
        self.steps, self.epochs = self.config.train.length(self.steps_per_epoch)
        self.last = round(self.epochs * self.steps_per_epoch)  # `train.steps` may stop before

    def build_model(self) -> None:
        """Builds the objective, its memories, and the parts of the model that it needs."""
        config, streams = self.config, self.streams
        objective = self.objective = Objective(config.objective, config.model.matryoshka)
        objective.refuse_unfit(streams.kind, config.data.views, self.n_labelled, config.model)
        weighted = streams.protocol.label_weights is not None
        objective.refuse_partial_rows(streams.lacks_views, streams.lacks_labels, weighted)
        refuse_unfit(config, objective, self.views, streams)
        self.signature = Signature.of(streams.reader, config.data.views)
        self.labels = streams.reader.manifest.labels.names
        shapes, terms = self.views.shapes, objective.terms
        names, labels = config.data.view_names, len(self.labels)
        model = Heterogeneous(config.model, shapes, labels, terms, names, self.batch_rows)
        model.to(self.device)
        model.precision = precision = config.train.precision
        assert precision != "auto"  # `resolve_precision` has replaced it
        prepare_products(self.device, precision)
        if precision == "fp64":
            model.double()
        seen = dict(enumerate(shapes)) | {v: (model.widths[v],) for v in config.frozen_views}
        flops = throughput.flops(model, [*seen.values()], self.sizes.rows)
        self.peak_flops, self.step_flops = flops
        labelled = torch.from_numpy(streams.labelled_rows)
        objective.build_memories(RunSpec(model, labelled, labels, self._targets, terms))
        micro_batch, self.has_norm = config.train.micro_batch, has_norm(model)
        self.micro_batches = strategy.count_micro_batches(micro_batch, self.sizes, self.has_norm)
        for module in (model, *objective.memories.values()):
            synchronise(module)
        if config.train.activation_checkpointing:
            for encoder in model.encoders:
                recompute_blocks(encoder)
        if config.train.compile:
            model.compile_encoders(COMPILER)
            self.views.compile(COMPILER)
        self.model = model

    def _targets(self) -> Tensor:
        return torch.from_numpy(self.streams.targets(self.streams.labelled_rows))

    def resume(self, run_lock: RunLock, overwrite: bool) -> None:
        """Resumes from the newest checkpoint; without, an earlier run is refused or moved aside."""
        config, model, snapshot = self.config, self.model, None
        self.damaged = list[str]()
        if config.run.resume != "never":
            snapshot, self.damaged = checkpoint.resume(
                self.checkpoints, config, self.data_fingerprint, self.watchdog
            )
        self.start_step = step = snapshot.position.step if snapshot else 0
        if step > self.steps:
            raise CheckpointError(
                f"{self.checkpoints} is at step {step}, past the run's end at step {self.steps}; "
                f"raise {'train.steps' if config.train.steps else config.train.length_key}"
            )
        self.moved = "" if step else make_way(self.folder, config.run.resume, overwrite, run_lock)
        if snapshot:
            path = self.checkpoints / f"step-{step:08d}"
            self.signature.refuse_other_tokenizers(path)
            refuse_other_files(path, config.data.protocol)
            model.load_state_dict(snapshot.model)
            self.objective.load_memory_state(snapshot.memories)
        plain, shown = dict[int, Embedded](), self.accelerator.is_local_main_process
        if config.frozen_views and step < self.steps:
            own = self.streams, model, self.device, self.watchdog, self.signals.received, shown
            self.streams, plain = FrozenEncoders(config, *own).embed()
        optimizer = build_optimizer(config.optim, model.parameters())
        rows, clip_norm = max(self.sizes.rows), config.optim.clip_norm
        self.strategy = prepare(self.accelerator, model, optimizer, rows, clip_norm)
        self.kept = Kept(self.strategy, config.train, self.streams.kind != "multi_label", snapshot)
        if self.kept.best.out_of_patience:
            self.steps = step
        if snapshot:
            self.strategy.load_optimizer(snapshot.optimizer, step)
        del snapshot  # the model and the optimiser hold its values now
        reader, roles, write = self.streams.reader, self.streams.roles, self._write_report
        self.evaluator = Evaluator(reader, self.views, config.evaluate, self.watchdog, plain)
        self.background = baselines.BackgroundBaselines(config, self.evaluator, roles, write)
        self.miner = None  # of hard negatives, which are read with the labelled batches
        if isinstance(stream := self.streams.labelled, MinedStream):
            self.miner = Miner(config.negatives, stream, self.evaluator, self.checkpoints)
        ended = 0 < step == self.steps
        self.earlier, self.is_done = result_of_ended(self.folder, config, ended, self.damaged)

    def train(self) -> None:
        """Takes the remaining steps, and scores the last weights."""
        config, streams = self.config, self.streams
        if self.miner:
            self.miner.begin(self.start_step)
        at, rank, data = self.start_step, self.accelerator.process_index, self.data_fingerprint
        share = open_process_batches(streams, config, rank, self.world, at)
        source = on_device(batches(share, at, self.steps, worker_count(config.data)), self.device)
        if self.is_main:
            write_start(self.folder, self.config_text, self.steps, run_fingerprint(config, data))
        log = RunLog(self.folder, at, self.steps, self.is_main, self.trackers)
        texts = {"config.yaml": self.config_text, SIGNATURE: self.signature.text()}
        texts |= chosen_files(config.data.protocol)
        saver = Saver(self.checkpoints, config.train.keep_checkpoints, data, texts, self.watchdog)
        with log as self.log, closing(source), self.miner or nullcontext(), saver as self.saver:
            parts = self.objective, self.sizes, self.strategy, self.micro_batches
            log.say(preamble(config, streams, *parts), *self.damaged, *filter(None, [self.moved]))
            self._log_skipped([streams.reader.lost])
            if self.kept.best.wanted and not at:  # before hours of training, not after
                _, scores = self.evaluator.evaluate(self.model, streams.roles, "validation")
                self.kept.best.refuse_unscored(scores)
            if at and self._is_due(at):
                known = self.kept.best.found
                self.evaluate(at)  # the interrupted run may not have done it
                if self.kept.best.found != known:
                    self._save(at)
            self.train_seconds = log.earlier_s
            self.background.start()
            with self.signals.saving():
                while at < self.steps:
                    self.step(at, source)
                    at += 1
                    self.background.look(at, self.steps)
                    self.after_step(at)
            with self.kept.as_model():
                self._score()
            self.saver.wait()
        self.skipped.refuse()  # where too many rows of the scored sets could not be read

    def step(self, t: int, source: Iterator[Batch]) -> None:
        """Takes one optimiser step; its metrics are read a step later: see `record_pending`."""
        config, objective = self.config, self.objective
        self.watchdog.beat(t)
        start = time.perf_counter()
        if self.miner:
            self.miner.wait(t)
        batch = next(source)
        data_wait = time.perf_counter() - start
        inputs = self.views(batch, train=True)
        micro = strategy.micro_batches(batch.sizes, self.offsets, self.micro_batches, self.device)
        if self.has_norm:
            strategy.refuse_lonely_rows(batch, micro, self.views.names)
        features, backward = self.strategy.embed(inputs, batch, micro)
        self.record_pending()  # while the GPU computes the features
        half, known = config.train.precision == "bf16", not self.streams.lacks_labels
        sizes, epoch = self.sizes, t / self.steps_per_epoch
        global_batch = gather_batch(features, batch, inputs, sizes, objective, epoch, half, known)
        loss, terms = objective(global_batch)
        scalars = {"loss": loss, "skipped": len(batch.lost), "signals": self.signals.received()}
        scalars |= {"unsaved": self.saver.failed()} | {f"loss/{n}": x for n, x in terms.items()}
        summed = StepValues(scalars, self.device)
        backward(loss)
        norm, rate = self.strategy.gradient_norm(), learning_rate(config.optim, epoch, self.epochs)
        summed.close(gradient_norm=norm, **self.strategy.loss_scale())
        self.strategy.step(rate, norm)
        self.kept.average.update(t + 1)
        gathered = self.strategy.gathered_parameters
        end = StepEnd(t, self.steps_per_epoch, gathered, collectives.broadcast_object)
        self.log.say(*objective.update_memories(end))
        seconds = time.perf_counter() - start
        self.train_seconds += seconds
        values = throughput.utilisation(self.step_flops, seconds, self.peak_flops)
        every = config.train.measure_every_steps
        if "projections" in features and (t + 1 == self.steps or (t + 1) % every == 0):
            z = [collectives.gather(x.detach(), self.sizes.rows) for x in features["projections"]]
            values |= collapse.measure(z, global_batch.present)
        values |= {"lr": rate, "samples_per_s": self.batch_rows / seconds}
        values |= {"data_wait_s": data_wait, "seconds": seconds}
        self.pending = PendingStep(t, summed, values, batch.lost)

    def record_pending(self) -> None:
        """Records the metrics of the last step; raises where one of them is not finite."""
        if self.pending is None:
            return
        (t, summed, values, lost), self.pending = self.pending, None
        metrics = summed.read()
        if metrics.pop("skipped"):
            self._log_skipped(collectives.gather_objects(lost))
        self.stop |= metrics.pop("signals") > 0
        if metrics.pop("unsaved") or nonfinite(metrics):
            self.saver.wait()  # raises, or lets the message below name the newest checkpoint
        self.log.say(*refuse_nonfinite(metrics, t, self.checkpoints))
        if "uniformity" in values and (reason := collapse.collapsed(values)):
            self.log.say(f"step {t}: the embeddings have collapsed: {reason}")
        self.log.step({"step": t, "epoch": t // self.steps_per_epoch, **metrics, **values})

    def after_step(self, step: int) -> None:
        """Mines, saves and evaluates where that is due after `step` steps.

        A checkpoint has the best weights of the evaluations up to its step, so these come first.
        """
        config, per_epoch = self.config.train, self.steps_per_epoch
        saves = step == self.steps or config.saves_after(step, per_epoch)
        evaluates = self._is_due(step)
        mines = self.miner and step % self.config.negatives.every_steps == 0
        if saves or self.stop or evaluates or mines:
            self.record_pending()  # so that no weights are used that a NaN has reached
        if self.miner and mines:
            self.saver.wait()  # a checkpoint keeps the tables that resuming from it needs
            self.miner.refresh(self.model, step)
        if evaluates and self.kept.best.wanted and not (self.stop and step < self.steps):
            self.evaluate(step)
            evaluates, saves = False, saves or self.kept.best.out_of_patience
        if self.stop or saves:
            self._save(step)
        if self.stop and step < self.steps:
            self.saver.wait()
            self.background.report(f"stopped at step {step:,} of {self.steps:,}", step)
            raise Stopped(
                f"a signal came; step {step} of {self.steps} is saved in {self.checkpoints}"
            )
        if evaluates:
            self.evaluate(step)

    def _is_due(self, step: int) -> bool:
        """Whether the run is evaluated after `step` steps; its end is scored anyway."""
        due = self.config.train.evaluates_after(step, self.steps_per_epoch) or step == self.last
        return due and (step < self.steps or self.kept.best.wanted)

    def _save(self, step: int) -> None:
        if self.miner:
            self.miner.finish()  # a run that resumes from here needs the mined table
        if self.kept.best.out_of_patience:
            self.steps = step
        position = Position(step, *divmod(step, self.steps_per_epoch))
        self.saver.begin(position, self.strategy, self.objective, self.kept)

    def evaluate(self, step: int) -> None:
        """Scores the validation rows after `step` steps; the test rows where there are none."""
        has_validation = self.config.data.protocol.validation
        role: Literal["validation", "test"] = "validation" if has_validation else "test"
        with self.kept.average.as_model():
            _, scores = self.evaluator.evaluate(self.model, self.streams.roles, role)
            told = self.kept.best.look(step, scores)
        self.log.scores(step - 1, step / self.steps_per_epoch, scores, role)
        self.log.say(*told)

    def report(self) -> dict[str, Any]:
        """Trains the plain network and other seeds, and writes the result and the report.

        The report is written first, so that no one waits for it, and again with what follows.
        """
        if self.config.evaluate.baselines:
            steps = self._train_other, self._write_report, self.signals.received
            self.scores |= baselines.compare(self.config, self.background, self.scores, *steps)
        if seeds := baselines.other_seeds(self.config):
            self._write_report([f"seed {other.seed}" for other in seeds])
        others = [self._train_other(other) for other in seeds]
        result = self._result()
        if self.is_main and (lines := baselines.summary([result, *others], self.folder.name)):
            print_table(*lines, headed=False)

        def finish() -> None:
            self._write_report([])
            write_result(self.folder, result)  # last: its presence marks the run as done

        collectives.on_main(finish)  # no process ends before
        return result

    def _write_report(self, to_come: list[str], step: int | None = None) -> None:
        """Writes the report with what is known, after `step` steps, and names what is to come."""
        if not self.is_main:
            return
        result = {**self._result(step), **self.background.scores, "to_come": to_come}
        outcome = self.predictions, self.embedding, self.streams.reader
        with self.watchdog.busy():
            report = self.write_report(self.folder, self.config, result, *outcome)
        waits = f", to be updated with {', '.join(to_come)}" if to_come else ""
        print_lines(f"report: {report}{waits}")

    def _result(self, step: int | None = None) -> dict[str, Any]:
        steps = self.steps if step is None else step
        return {
            **self.scores,
            "steps": steps,
            "kept_step": self.kept.best.found.step if self.kept.best.found else None,
            "epochs": steps / self.steps_per_epoch,
            "train_seconds": self.train_seconds,
            "seconds": time.perf_counter() - self.start_time,
            "world_size": self.world,
            "skipped_rows": len(self.skipped),
            **self.streams.rows_by_views(),
            "peak_memory_bytes": throughput.peak_memory(self.device),
            "strategy": self.strategy.describe(),
            "precision": self.config.train.precision,
            **throughput.utilisation(self.step_flops * steps, self.train_seconds, self.peak_flops),
            "contrast": describe_path(self.objective.paths, self.device),
            "version": __version__,
            "fingerprint": run_fingerprint(self.config, self.data_fingerprint),
            **facts_of_steps(self.earlier, self.start_step < self.steps),
        }

    def _score(self) -> None:
        """Scores the last weights, and embeds rows for the report's map."""
        options, roles, last = self.config.evaluate, self.streams.roles, max(self.steps - 1, 0)
        epoch, self.scores = self.steps / self.steps_per_epoch, Scores()
        for role in ("validation", "test"):
            is_wanted = options.test if role == "test" else self.config.data.protocol.validation
            if is_wanted:
                self.predictions, scores = self.evaluator.evaluate(self.model, roles, role)
                prefix = "" if role == "test" else "validation_"
                self.scores |= {f"{prefix}{name}": value for name, value in scores.items()}
                self.log.scores(last, epoch, scores, role)
        # Clocks differ, so the main process decides.
        if collectives.broadcast_object(wants_map(options.map, self.train_seconds)):
            rows = map_rows(roles, options)
            self.embedding = self.evaluator.predict(self.model, rows, hidden=True)
        self._log_skipped(collectives.gather_if_any(self.streams.reader.lost), refuse=False)

    def _train_other(self, other: Config) -> dict[str, Any]:
        with RunLock(Path(other.run.dir)) as run_lock:
            return Trainer(other, self.watchdog, self.signals, self.write_report).run(run_lock)

    def _log_skipped(self, lost: list[dict[int, str]], refuse: bool = True) -> None:
        self.log.say(*self.skipped.add(lost))
        if refuse:
            self.skipped.refuse()
