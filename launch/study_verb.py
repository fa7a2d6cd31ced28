"""`heron study`: run the trials of a study, on this machine or on a cluster."""

import argparse
import os
from pathlib import Path

from heron.launch.verb import Verb

INTERRUPTED = 130  # what a shell gives for Ctrl-C


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", type=Path, help="a file of configs/studies, or one of your own")
    parser.add_argument(
        "overrides", nargs="*", help="key=value of every trial; of what varies, all its values"
    )
    parser.add_argument("--out", type=Path, help="folder of the study (default: studies/NAME)")
    parser.add_argument("--small", action="store_true", help="its small version, for two cores")
    parser.add_argument(
        "--dry-run", action="store_true", help="check all trials, print them and their commands"
    )
    parser.add_argument(
        "--address", help="of a Ray cluster that runs: HOST:PORT or auto (default: begin one here)"
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="run the trials again that have failed"
    )


def _run(arguments: argparse.Namespace) -> int:
    from heron.launch.studies.ledger import Ledger, alone
    from heron.launch.studies.study import load_study
    from heron.launch.studies.trials import plan, refuse_missing_data
    from heron.pipeline.config.errors import ConfigError

    study = load_study(arguments.study, arguments.small, arguments.overrides)
    name = arguments.study.stem + ("-small" if arguments.small else "")
    out = arguments.out or Path("studies") / name
    trials = plan(study, out)
    configs = [trial.config() for trial in trials]  # all of them before the first starts
    print(f"{study.title}: {len(trials)} trials by {study.search.kind}, in {out}", flush=True)
    if arguments.dry_run:
        for trial in trials:
            print(f"{trial.name}: {trial.shown}\n  {trial.command()}")
        try:
            refuse_missing_data(study, configs)
        except ConfigError as fault:
            print(f"not there yet: {fault}")
        return 0
    from heron.launch.studies.cluster import joined
    from heron.launch.studies.drive import drive
    from heron.launch.studies.report import shown
    from heron.launch.studies.results import read_results
    from heron.launch.studies.text import markdown

    with alone(out):
        ledger = Ledger(study, out)
        if arguments.retry_failed:
            ledger.forget_failed()
        if ledger.rows:
            print(f"{len(ledger.rows)} of {len(trials)} trials have ended already", flush=True)
        ended = len(ledger.rows) == len(trials)
        if not ended:
            if not (study.gpus or arguments.address):
                os.environ["CUDA_VISIBLE_DEVICES"] = ""  # workers would take what nobody gave them
            with joined(arguments.address):
                ended = drive(trials, ledger, lambda line: print(line, flush=True))
    if ledger.rows:
        results, score = read_results(out), study.measure.score
        print(markdown(*shown(results, [*study.measure.y, *([score] if score else [])])), end="")
        if score and (best := results.best(score)):
            print(f"best: trial {best}: {results.table.loc[best, 'command']}")
    if not ended:
        print(f"{len(ledger.rows)} of {len(trials)} trials have ended; the same command goes on")
        return INTERRUPTED
    failed = [row["trial"] for row in ledger.rows.values() if row["status"] == "failed"]
    if failed:
        print(f"failed: {', '.join(failed)}; --retry-failed runs them again")
    return 1 if failed else 0


STUDY = Verb("run a study: many trials of one experiment, on Ray", _add, _run)
