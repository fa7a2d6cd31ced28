"""`heron config`: the keys of an experiment, and what they are in one."""

import textwrap
from typing import Annotated, Any

from heron.base.dotted import suggest
from heron.base.errors import ConfigError
from heron.base.sections import dump_yaml
from heron.cli.arguments import UsageError

LINE_WIDTH = 100


def config(
    *arguments: Annotated[str, "name of a shipped experiment or a file; a key; key=value"],
    method: Annotated[str | None, "change the experiment to a method: herocon-u"] = None,
) -> None:
    """Shows every key with its type, default and meaning, or the values of an experiment.

    heron config train.precision
    heron config --help data.protocol
    heron config scene
    heron config scene optim optim.lr=0.1
    heron config
    """
    from heron.base.shipped import find_config
    from heron.experiment.config import Config, dump_config, load_config
    from heron.experiment.describe import describe_keys, keys_at

    overrides = [word for word in arguments if "=" in word]
    words = [word for word in arguments if "=" not in word]
    file = None
    if words:
        top_key, _, rest = words[0].partition(".")
        if top_key not in Config.model_fields or rest in ("yaml", "yml"):  # not a key
            file = find_config(words.pop(0))
    if len(words) > 1:
        raise UsageError(f"pass one experiment and one key at most, got {' '.join(words)}")
    if file is None:
        if overrides or method:
            raise UsageError("overrides and --method need an experiment to change; pass its name")
        for row in keys_at(words[0]) if words else describe_keys():
            default = "required" if row.default == "required" else f"default {row.default}"
            print(f"{row.shown}: {row.type}, {default}")
            print(textwrap.indent(textwrap.fill(row.meaning, LINE_WIDTH - 4), "    "))
        return
    resolved = load_config(file, overrides, method)
    print(_yaml_at(resolved.model_dump(mode="json"), words[0]) if words else dump_config(resolved))


def _yaml_at(tree: Any, key: str) -> str:
    """Returns the YAML of a key of an experiment; ConfigError if it has no such key."""
    for name in key.split("."):
        tree = dict(enumerate(tree)) if isinstance(tree, list) else tree
        children = {str(k): value for k, value in tree.items()} if isinstance(tree, dict) else {}
        if name not in children:
            hint = suggest(name, list(children)) if children else "there are no keys below a value"
            raise ConfigError(f"the experiment has no {key} (no {name!r}); {hint}")
        tree = children[name]
    text = dump_yaml(tree)
    return text.removesuffix("...\n").rstrip()
