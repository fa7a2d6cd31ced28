"""Keys of the first edition: what they are called now."""

from typing import Any

from heron.pipeline.config.errors import ConfigError

# Old key: what it was where nobody had set it, which a run's config.yaml may hold; the new key.
RENAMED: dict[str, tuple[Any, str]] = {
    "data.canvas": (None, "data.decode_size"),
    "model.task_groups": (None, "objective.deepmtmv"),
    "model.label_autoencoder": (
        {"hidden": 512, "width": None},
        "objective.c2ae, with its keys hidden and code",
    ),
}


def refuse_renamed(tree: dict[str, Any]) -> None:
    """Takes keys of the first edition out of a configuration where they say nothing.

    Args:
        tree: plain values, changed in place.

    Raises:
        ConfigError: one of them says something; names the key that it is now.
    """
    for key, (default, now) in RENAMED.items():
        section, name = key.split(".")
        inside = tree.get(section)
        if isinstance(inside, dict) and name in inside:
            if (found := inside[name]) not in (default, None):
                raise ConfigError(f"{key} is {found}; this key is now {now}: move it there")
            del inside[name]
