"""`heron check`: any loss on several processes, in other precisions, at hard inputs."""

from typing import Annotated, Literal

from heron.base.terminal import print_table
from heron.cli.arguments import Override


def check(
    loss: Annotated[str, "dotted path of a class, a loss function, or a function that builds one"],
    *options: Annotated[Override, "its keyword arguments: tau=0.1; $RANK and $WORLD are replaced"],
    inputs: Annotated[
        Literal["views", "pair", "clip", "siglip", "stacked", "rows", "labelled", "logits"] | None,
        "what to call it with (default: guess from its arguments)",
    ] = None,
    processes: Annotated[list[int] | None, "numbers of processes to try (default: 2 and 3)"] = None,
) -> int:
    """Checks a loss on several processes, in other precisions and with hard inputs.

    The reference is the loss of one process with all rows in float64. Gradients are averaged over
    the processes, as in DistributedDataParallel. The exit status is 1 if any line says FAILS.

    heron check heron.losses.NtXent tau=0.1
    heron check open_clip.loss.ClipLoss 'rank=$RANK' 'world_size=$WORLD'
    heron check my_lab.losses.mine --inputs pair
    """
    from heron.base.sections import parse_yaml
    from heron.losses.check import check_loss, passed
    from heron.losses.check_inputs import FORMS, LossSpec, guess_form

    words = (option.split("=", 1) for option in options)
    values = {name: parse_yaml(text, f"option {name}") for name, text in words}
    form = inputs or guess_form(loss)
    spec = LossSpec(loss, values, form)
    print(f"{loss}, called as {FORMS[form]}")
    findings = check_loss(spec, processes or (2, 3))
    verdicts = {True: "passes", False: "FAILS", None: "refuses"}
    print_table(
        ["case", "", "seen"],
        [[finding.case, verdicts[finding.passed], finding.text] for finding in findings],
    )
    return 0 if passed(findings) else 1
