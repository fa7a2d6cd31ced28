"""The command line: `heron VERB`, one verb a job."""

import argparse
import os
import select
import sys
from collections.abc import Mapping, Sequence

from heron.launch.embed_verb import EMBED
from heron.launch.index_verb import INDEX
from heron.launch.negatives_verb import NEGATIVES
from heron.launch.query_verb import QUERY
from heron.launch.report_verb import REPORT
from heron.launch.reproduce import REPRODUCE
from heron.launch.serve_verb import SERVE
from heron.launch.shard_verbs import SHARD_VERBS
from heron.launch.study_verb import STUDY
from heron.launch.verb import Verb
from heron.pipeline.config.errors import (
    STOPPED,
    CheckpointError,
    ConfigError,
    RetrievalError,
    Stopped,
    StudyError,
    TrainingError,
)
from heron.shards.errors import ShardError, SourceError

EXAMPLES = """examples:
  heron shards build faces --out data/faces --workers 2
  heron shards build mulan --arff scene-train.arff scene-test.arff --xml scene.xml --out data/scene
  heron shards build table --csv yeast.csv --out data/yeast
  heron shards build idx --folder mnist --view-kind noise --noise-std 0.0949 --out data/nmnist
  heron shards build folder --folder cifar10 --out data/cifar10
  heron shards build xrmb --single1 single1.mat --single2 single2.mat --out data/xrmb --workers 4
  heron shards index data/cats --image jpg --label cls --workers 2
  heron shards verify data/faces
  heron shards show data/faces --sheet faces.png
  heron embed runs/faces --out embeddings/faces
  heron index embeddings/faces --out indexes/faces
  heron query indexes/faces --key 000008 --where "Smiling and not Male" --sheet near.png
  heron query indexes/faces --file face.jpg --k 5 --format json
  heron negatives embeddings/faces --out reports/faces
  heron serve indexes/faces
  heron reproduce scene
  heron study configs/studies/negatives.yaml --small seed=0
  heron study configs/studies/workers-fixed-batch.yaml --address auto --out studies/workers
  heron report studies/negatives
"""


VERBS: dict[str, Verb | Mapping[str, Verb]] = {
    "shards": SHARD_VERBS,
    "embed": EMBED,
    "index": INDEX,
    "query": QUERY,
    "negatives": NEGATIVES,
    "serve": SERVE,
    "reproduce": REPRODUCE,
    "study": STUDY,
    "report": REPORT,
}
OUTPUT = 1  # the file descriptor of what is printed
EXPECTED = (
    ConfigError,
    CheckpointError,
    TrainingError,
    RetrievalError,
    StudyError,
    ShardError,
    SourceError,
    OSError,
)


def parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    top = argparse.ArgumentParser(
        prog="heron",
        description="Contrastive pretraining for data with several views and several labels.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    table = top.add_subparsers(metavar="VERB", required=True)
    for name, verb in VERBS.items():
        if isinstance(verb, Verb):
            _add(table, [name], verb)
        else:
            noun = table.add_parser(name, help=", ".join(verb))
            group = noun.add_subparsers(metavar="VERB", required=True)
            for second, one in verb.items():
                _add(group, [name, second], one)
    return top


def _add(
    table: "argparse._SubParsersAction[argparse.ArgumentParser]", path: list[str], verb: Verb
) -> None:
    """One verb's own parser, with the examples that call it."""
    called = f"heron {' '.join(path)} "
    examples = [line for line in EXAMPLES.splitlines() if called in line]
    leaf = table.add_parser(
        path[-1],
        help=verb.help,
        description=f"{verb.help[0].upper()}{verb.help[1:]}.",
        epilog="\n".join(["examples:", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add(leaf)
    leaf.set_defaults(run=verb.run)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; `key=value` may stand anywhere, where argparse takes only what adjoins."""
    top = parser()
    arguments, rest = top.parse_known_args(argv)
    if hasattr(arguments, "overrides"):
        arguments.overrides += [word for word in rest if "=" in word and word[0] != "-"]
        rest = [word for word in rest if word not in arguments.overrides]
    if rest:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; what can be expected to go wrong is a line on stderr and status 1."""
    arguments = _parse(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except EXPECTED as fault:
        if isinstance(fault, BrokenPipeError) and _is_unread():
            return 141  # what a shell gives for SIGPIPE
        print(f"error: {fault}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(f"stopped: {stopped}; run again to go on", file=sys.stderr)
        return STOPPED
    except KeyboardInterrupt:
        return 130  # what a shell gives for Ctrl-C
    return status


def _is_unread() -> bool:
    """Whether who reads the output has gone, as in `heron ... | head`; the rest is not written."""
    output = select.poll()
    output.register(OUTPUT, 0)  # an error is told of in any case
    if gone := any(event & select.POLLERR for _, event in output.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), OUTPUT)
    return gone


if __name__ == "__main__":
    sys.exit(main())
