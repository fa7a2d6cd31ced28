"""`heron report`: a study's folder as tables, figures, fits and the commands of its rows."""

import argparse
from pathlib import Path

from heron.launch.verb import Verb


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", type=Path, help="folder that `heron study` wrote, finished or not")
    parser.add_argument("--out", type=Path, help="folder for the report (default: STUDY/report)")
    parser.add_argument("--x", help="column that figures go over (default: what the study says)")
    parser.add_argument("--y", nargs="+", default=[], help="columns that they show (default: same)")
    parser.add_argument(
        "--points", type=Path, nargs="+", default=[], help="studies that the scaling model takes in"
    )
    add = parser.add_argument
    add("--link-gbps", type=float, default=200, help="of a process's link (default: %(default)s)")
    add("--latency-us", type=float, default=5, help="of a message (default: %(default)s)")
    add("--overlap", type=float, default=0, help="of the gradients' exchange, hidden by backward")
    add("--measure-contrast", action="store_true", help="time the objective alone, on this machine")
    add("--global-batch", type=int, help="rows in all, on any number of processes")


def _run(arguments: argparse.Namespace) -> int:
    from heron.launch.studies.forecast import Assumed, section  # here, so that --help is quick
    from heron.launch.studies.report import Report
    from heron.launch.studies.results import read_results
    from heron.pipeline.config.sections import check

    results = read_results(arguments.study)
    report = Report.of(results, arguments.x, arguments.y)
    out = arguments.out or arguments.study / "report"
    options = {name: getattr(arguments, name) for name in Assumed.model_fields}
    assumed = check(Assumed, options, "heron report")
    part = scaling = ""
    if len(results.done) and (arguments.points or "workers" in results.varied):
        studies = [results, *map(read_results, arguments.points)]
        part, scaling = section(studies, assumed, arguments.measure_contrast)
    path = report.write(out, part)
    print((out / "table.md").read_text())
    if scaling:
        (out / "scaling.md").write_text(scaling)
        print(scaling)
    print(results.progress)
    print(f"report: {path}")
    return 0


REPORT = Verb("tables, figures and fits of a study", _add, _run)
