"""How the training step scales over processes, what it exchanges, and what it costs beside others.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --parts bytes overhead --json scaling.json

Everything is measured in this run, on processes of one thread each that take turns; a figure is the
median of the rounds' ratios. On drawn faces of 64 x 64, two augmented views.

- `scaling`: `pretrain` itself with HeroCon's objective, from reading to logging, on one
  process and on two over gloo. Weak: each process has the batch of one; strong: they share it.
  `apart` are two runs of one process at the same time, which exchange nothing: what the cores
  give to two. Efficiency is samples a second by P times those of one.
- `bytes`: what a process is sent in a step, and in how many collectives, counted at torch's
  dispatcher.
- `overhead`: the same run on one process beside a bare loop of the same batches: model, the same
  loss functions, backward, optimiser, and no more. `input` reads and augments alone.
- `simclr`: a ResNet with NT-Xent, by us, by the bare loop, and by the training steps of lightly and
  solo-learn (`benchmarks/peers_simclr.py`) around the same encoder, weights, batches and optimiser.
  `first loss` shows that all compute the same.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers_simclr as peers
from benchmarks.data import cores
from benchmarks.race import Rate, ratio
from benchmarks.scaling_bytes import KINDS, Case, count
from benchmarks.scaling_steps import LABELLED, bare, experiment, input_only, pretrain_job
from benchmarks.scaling_turns import Contestant, Results, race, together
from benchmarks.table import Table, number
from heron.data.dataset import build_data
from heron.losses.named_terms import Terms

PROCESSES = 2
PARTS = ["scaling", "bytes", "overhead", "simclr"]
PEERS = {"lightly": peers.lightly, "solo-learn": peers.solo}
OBJECTIVES: dict[str, tuple[dict[str, Any], str]] = {  # whose bytes are counted, and on which rows
    "nt_xent": ({"nt_xent": {}}, "unlabelled"),
    "herocon": ({"bce": {}, "weighted_unsupervised": {}, "weighted_supervised": {}}, "both"),
    "input_weighted_unsupervised": ({"bce": {}, "input_weighted_unsupervised": {}}, "both"),
    "hierarchical": ({"hierarchical": {}}, "labelled"),
}
ONE, WEAK, STRONG, APART = "one", "weak", "strong", "apart"
SMALL = {"rows": 64, "batch": 16, "size": 16, "channels": [4, 8], "widths": [8, 16], "width": 8}
SMALL |= {"rounds": 1, "seconds": 0.01}


def convnet(arguments: argparse.Namespace) -> dict[str, Any]:
    """The model of configs/faces.yaml."""
    encoder = {"kind": "cnn", "channels": arguments.channels}
    return {"encoder": encoder, "projection_width": arguments.width}


def resnet(arguments: argparse.Namespace) -> dict[str, Any]:
    """The model of configs/cifar10.yaml: one encoder for both views, and SimCLR's head."""
    depths = [1] * len(arguments.widths)
    encoder = {"kind": "resnet", "widths": arguments.widths, "depths": depths, "stem_stride": 2}
    shared = {"shared_encoder": True, "shared_projector": True, "classify_on": "first_view"}
    return {"encoder": encoder, "projection_width": arguments.width, "projector": "mlp"} | shared


class Bench:
    """The parts, each a race or a count of its own."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder, self.arguments = folder, arguments

    def contestant(
        self,
        name: str,
        train: Any,
        method: str = "herocon",
        batch: int = 0,
        world: int = 1,
        apart: bool = False,
    ) -> Contestant:
        arguments, batch = self.arguments, batch or self.arguments.batch
        model = (convnet if method == "herocon" else resnet)(arguments)
        config = experiment(self.folder, name, method, arguments.rows, batch, arguments.size, model)
        build_data(config.data, progress=False)
        rows = batch * (world if apart else 1)
        if method == "herocon":
            return Contestant(train, (config,), rows, world, apart)
        return Contestant(peers.beside, (config, train), rows)

    def race(self, contestants: Mapping[str, Contestant]) -> Results:
        """Race, and stop where one of ours cannot take part or losses differ."""
        arguments = self.arguments
        results = race(contestants, self.folder / "meet", arguments.rounds, arguments.seconds)
        for name, fault in results.missing.items():
            if name not in PEERS:
                raise SystemExit(f"{name}: {fault}")
        return results

    def scaling(self) -> dict[str, Any]:
        batch, contestant = self.arguments.batch, self.contestant
        results = self.race(
            {
                ONE: contestant(ONE, pretrain_job),
                APART: contestant(APART, pretrain_job, world=PROCESSES, apart=True),
                WEAK: contestant(WEAK, pretrain_job, batch=PROCESSES * batch, world=PROCESSES),
                STRONG: contestant(STRONG, pretrain_job, world=PROCESSES),
            }
        )
        heads = ["", "processes", "batch of each", "samples/s", "efficiency", "of apart"]
        head(*heads, "by processor time", "of apart")
        for name in (ONE, APART, WEAK, STRONG):
            rates = results.rates[name]
            several = name != ONE
            cells = [name, str(PROCESSES if several else 1)]
            cells += [f"{batch // PROCESSES if name == STRONG else batch:,}", median(rates)]
            of_one, of_apart = ratio(rates, results.rates[ONE]), ratio(rates, results.rates[APART])
            shown = [of_one[0] / PROCESSES, of_apart[0], of_one[1], of_apart[1]]
            print(Table.row(cells + ([f"{x:.3f}" for x in shown] if several else [""] * 4)))
        return numbers(results)

    def bytes(self) -> dict[str, Any]:
        arguments, numbers_by_objective = self.arguments, {}
        head("objective", "N (labelled)", "kind", "bytes", "collectives")
        for name, (terms, rows) in OBJECTIVES.items():
            labelled = arguments.batch // LABELLED + 1 if rows == "both" else arguments.batch + 1
            labelled = 0 if rows == "unlabelled" else labelled
            unlabelled = arguments.batch + 1 - labelled  # odd: shares differ, and are padded
            channels = tuple(arguments.channels)
            objective_terms = Terms.model_validate(terms)
            case = Case(
                objective_terms, labelled, unlabelled, arguments.size, channels, arguments.width
            )
            meeting_folder = self.folder / "bytes" / name
            counted = together(count, (case,), PROCESSES, meeting_folder)
            numbers_by_objective[name] = counted
            for kind in dict.fromkeys([*KINDS, *counted[0][0]]):
                byte_counts = sorted({counts.get(kind, 0) for counts, _ in counted})
                call_counts = sorted({counts.get(kind, 0) for _, counts in counted})
                cells = [name, f"{labelled + unlabelled:,} ({labelled:,})", kind]
                cells += [" and ".join(f"{n:,}" for n in byte_counts)]
                cells += [" and ".join(map(str, call_counts))]
                print(Table.row(cells))
        print("\n" + "\n".join(f"{kind}: {meaning}" for kind, meaning in KINDS.items()))
        return numbers_by_objective

    def overhead(self) -> dict[str, Any]:
        trains = {"pretrain": pretrain_job, "bare": bare, "input": input_only}
        results = self.race({name: self.contestant(name, train) for name, train in trains.items()})
        head("", "samples/s", "ms a step", "time / bare", "by processor time", "first loss")
        for name in trains:
            rates = results.rates[name]
            over = ratio(results.rates["bare"], rates)
            losses = f"{results.losses[name]:.5f}" if name != "input" else ""
            cells = [name, median(rates), milliseconds(rates, self.arguments.batch)]
            print(Table.row([*cells, *(f"{x:.3f}" for x in over), losses]))
        return numbers(results)

    def simclr(self) -> dict[str, Any]:
        trains = {"ours": pretrain_job, "bare": bare, **PEERS, "input": input_only}
        results = self.race(
            {n: self.contestant(f"{n}-simclr", train, "simclr") for n, train in trains.items()}
        )
        print(", ".join(f"{name} {v}" for name, v in peers.versions().items()) or "no peers")
        head("", "samples/s", "ms a step", "ours is", "by processor time", "first loss")
        notes: list[str] = []
        for name in trains:
            if name in results.missing:
                fault = results.missing[name]
                absent = "ModuleNotFoundError" in fault
                notes += [] if absent else [f"{name}: {fault}"]
                print(Table.row([name, "not installed" if absent else "–", *"––––"]))
                continue
            rates = results.rates[name]
            ratios = [f"{x:.3f} x" for x in ratio(results.rates["ours"], rates)]
            losses = f"{results.losses[name]:.5f}" if name != "input" else ""
            cells = [name, median(rates), milliseconds(rates, self.arguments.batch)]
            print(Table.row([*cells, *ratios, losses]))
        print("".join(f"\n{note}\n" for note in notes), end="")
        return numbers(results) | {"versions": peers.versions()}


def head(*names: str) -> None:
    print(f"{Table.row(names)}\n{'|---' * len(names)}|")


def median(rates: Sequence[Rate]) -> str:
    return f"{statistics.median(rate.rows for rate in rates):,.0f}"


def milliseconds(rates: Sequence[Rate], batch: int) -> str:
    return number(1e3 * statistics.median(batch / rate.rows for rate in rates), ",.1f")


def numbers(results: Results) -> dict[str, Any]:
    return {
        "rates": {name: [asdict(rate) for rate in rates] for name, rates in results.rates.items()},
        "first_losses": results.losses,
        "missing": results.missing,
    }


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", nargs="+", default=PARTS, choices=PARTS)
    add("--batch", type=int, default=128, help="rows of a process's batch, of both views")
    add("--rows", type=int, default=2048, help="faces to train on")
    add("--size", type=int, default=64, help="of a view, a side")
    add("--channels", type=int, nargs="+", default=[16, 32, 64, 128], help="of the cnn")
    add("--widths", type=int, nargs="+", default=[16, 32, 64], help="of the resnet of `simclr`")
    add("--width", type=int, default=64, help="of a projection")
    add("--rounds", type=int, default=9)
    add("--seconds", type=float, default=2.0, help="of a turn, about")
    add("--small", action="store_true", help="all of it, too small to mean anything")
    add("--json", help="a file for the numbers")
    if parser.parse_args(words).small:
        parser.set_defaults(**SMALL)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    results = {}
    print(f"{cores()} cores, 1 thread a process, torch {torch.__version__}")
    with tempfile.TemporaryDirectory(prefix="heron-") as scratch:
        bench = Bench(Path(scratch), arguments)
        for part in arguments.parts:
            print(f"\n{part}\n")
            results[part] = getattr(bench, part)()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
