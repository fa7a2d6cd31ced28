"""Folders of models as someone hostile would write them, and a watch over what opening one does.

`python -m tests.hostile FOLDER` opens all of them in a process, and prints what each did as JSON.
"""

import contextlib
import io
import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

CANARY = "it-ran"  # a file in the working directory that the code of a folder would write
CODE = f"""
from pathlib import Path
Path({CANARY!r}).touch()
from heron.data.augmentations import OwnAugmentation
from heron.models.options import OwnEncoder
from heron.losses.terms import Needs
from heron.losses import Loss
from torch import nn

class Flat(nn.Flatten):
    def forward(self, x, rng_keys):
        return super().forward(x)

class Enc(OwnEncoder):
    def build(self, shape, salt):
        return Flat(), shape[0] * shape[1] * shape[2]

class Mask(OwnAugmentation):
    def __call__(self, x, draw):
        return x

class Mine(Loss):
    needs = Needs()
    def share(self, batch):
        return 0
"""
URL = "http://127.0.0.1:9/weights.pth"
VIT = {"model_type": "vit", "hidden_size": 8, "patch_size": 4, "num_hidden_layers": 1,
       "num_attention_heads": 1, "intermediate_size": 8}  # fmt: skip
DETR = {"model_type": "detr", "use_timm_backbone": False, "backbone": "org/net",
        "use_pretrained_backbone": True}  # fmt: skip
NAME = "vit_tiny_patch16_224"
SMALL = {"embed_dim": 8, "depth": 1, "num_heads": 1, "patch_size": 4}


def timm(name: str = NAME, **options: Any) -> dict[str, Any]:
    return {"kind": "timm", "name": name, "options": SMALL | options}


def transformers(**config: Any) -> dict[str, Any]:
    return {"kind": "transformers", "config": VIT | config}


def views(*augment: Any) -> dict[str, Any]:
    return {"views": [{"stored": "left", "augment": list(augment)}, {"stored": "numbers"}]}


# What a folder changes in the experiment of an honest one; `image` is the encoder of its pictures.
# Code, by dotted path:
CODES: dict[str, dict[str, Any]] = {
    "encoder": {"image": {"kind": "models.gift.evil.Enc"}},
    "encoder_on_the_path": {"image": {"kind": "evil.Enc"}},
    "encoder_of_a_package": {"image": {"kind": "models.gift.Enc"}},
    "encoder_beside_the_folder": {"image": {"kind": "kit.evil.Enc"}},
    "encoder_for_all": {"model": {"encoder": {"kind": "models.gift.evil.Enc"}}},
    "encoder_of_the_standard_library": {"image": {"kind": "antigravity.Enc"}},
    "encoder_is_a_command": {"image": {"kind": "os.system", "command": f"touch {CANARY}"}},
    "encoder_starts_a_process": {"image": {"kind": "subprocess.Popen", "args": ["true"]}},
    "encoder_of_another_library": {"image": {"kind": "transformers.AutoModel"}},
    "augmentation": {"data": views({"models.gift.evil.Mask": {}})},
    "augmentation_by_name": {"data": views("models.gift.evil.Mask")},
    "term": {"objective": {"supcon": {"weight": 1}, "models.gift.evil.Mine": {"weight": 1}}},
    "term_without_weight": {"objective": {"supcon": {"weight": 1}, "evil.Mine": {"weight": 0}}},
    "tracker": {"tracking": ["models.gift.evil.Tracker"]},
    "source": {"data": {"build": {"source": "models.gift.evil.Source"}}},
    "tokenizer": {"data": {"views": [{"stored": "left", "tokenizer": "models.gift.evil.Tok"},
                                     {"stored": "numbers"}]}},
    "tag_of_yaml": {"seed": f"!!python/object/apply:os.system [touch {CANARY}]"},
}  # fmt: skip
# What timm would fetch, unpickle or hand on:
TIMMS: dict[str, dict[str, Any]] = {
    "pretrained": timm(pretrained=True),
    "url": timm(pretrained=True, pretrained_cfg_overlay={"url": URL}),
    "url_in_cfg": timm(pretrained=True, pretrained_cfg={"url": URL, "architecture": NAME}),
    "pickle_in_cfg": timm(pretrained=True, pretrained_cfg_overlay={"file": "gift/w.pth"}),
    "hub_in_cfg": timm(pretrained=True, pretrained_cfg={"hf_hub_id": "org/net"}),
    "name_of_cfg": timm(pretrained=True, pretrained_cfg="augreg_in21k"),
    "checkpoint": timm(checkpoint_path="models/gift/w.pth"),
    "cache": timm(pretrained=True, cache_dir="models/gift"),
    "hub": timm("hf-hub:org/net"),
    "hub_underlined": timm("hf_hub:org/net"),
    "local": timm("local-dir:models/gift"),
    "tag": timm(f"{NAME}.augreg_in21k", pretrained=True),
    "weights_are_a_pickle": timm() | {"weights": "models/gift/w.pth"},
    "weights_of_the_hub": timm() | {"weights": "hf://org/net"},
    "custom_load": timm(pretrained_custom_load=True, pretrained=True),
    "features": timm(features_only=True, feature_cls="os.system"),
    "layer": timm(norm_layer="models.gift.evil.Enc"),
    "nested": timm(model_args={"pretrained": True}),
}
# What transformers would:
NETS: dict[str, dict[str, Any]] = {
    "backbone": {"kind": "transformers", "config": DETR},
    "backbone_of_timm": {"kind": "transformers", "config": DETR | {"use_timm_backbone": True}},
    "backbone_of_dpt": transformers(model_type="dpt", backbone="org/net",
                                    use_pretrained_backbone=True),
    "nested_backbone": transformers(model_type="upernet", backbone_config={
        "model_type": "timm_backbone", "backbone": "resnet18", "use_pretrained_backbone": True}),
    "timm_backbone": transformers(model_type="timm_backbone", backbone="resnet18",
                                  use_pretrained_backbone=True),
    "timm_wrapper": transformers(model_type="timm_wrapper", architecture="hf-hub:org/net"),
    "timm_wrapper_args": transformers(model_type="timm_wrapper", architecture=NAME,
                                      model_args={"pretrained": True}),
    "auto_map": transformers(auto_map={"AutoModel": "evil.Enc"}),
    "auto_map_of_the_hub": transformers(auto_map={"AutoModel": "org/net--evil.Enc"}),
    "nested_auto_map": transformers(model_type="clip", vision_config={
        "auto_map": {"AutoModel": "org/net--evil.Enc"}, "model_type": "clip_vision_model"}),
    "remote_code": transformers(trust_remote_code=True, name_or_path="org/net"),
    "kernel_of_the_hub": transformers(attn_implementation="kernels-community/flash-attn"),
    "kernel": transformers(attn_implementation="flash_attention_2"),
    "kernel_inside": transformers(_attn_implementation="org/kernel",
                                  _attn_implementation_internal="org/kernel"),
    "experts": transformers(experts_implementation="org/kernel"),
    "kernel_of_mamba": {"kind": "transformers", "config": {"model_type": "mamba"}},
    "quantization": transformers(quantization_config={"quant_method": "bitsandbytes",
                                                      "load_in_8bit": True}),
    "quantization_by_gptq": transformers(quantization_config={"quant_method": "gptq", "bits": 4}),
    "name_or_path": transformers(name_or_path="models/gift", _name_or_path="org/net"),
    "type_is_a_path": transformers(model_type="../../models/gift"),
    "activation": transformers(hidden_act="os.system"),
    "value_is_a_path": transformers(hidden_act="models/gift/evil.py"),
    "value_is_a_section": transformers(hidden_size={"model_type": "bert", "auto_map": {}}),
    "weights_of_the_hub": transformers() | {"weights": "hf://org/net"},
    "weights_of_the_folder": {"kind": "transformers", "weights": "models/gift"},
    "layers": transformers(per_layer_config={"0": {"auto_map": {"AutoModel": "evil.Enc"}}}),
}  # fmt: skip
CASES = (
    {f"code: {name}": changes for name, changes in CODES.items()}
    | {f"timm: {name}": {"image": encoder} for name, encoder in TIMMS.items()}
    | {f"transformers: {name}": {"image": encoder} for name, encoder in NETS.items()}
    | {"pickle for weights": {"pickle": True}, "lora": {"image": timm(pretrained=True) | {
        "lora": {"rank": 2, "targets": ["org/net", "qkv"]}}}}
)  # fmt: skip
TRUSTED = {"timm: url", "timm: hub", "timm: local", "timm: checkpoint"}  # as timm takes seconds
BACKBONES: dict[str, dict[str, Any]] = {  # config.json of a folder that `--encoder` is given
    "auto_map": VIT | {"auto_map": {"AutoModel": "evil.Enc"}},
    "backbone": DETR,
    "adapter": VIT | {"adapter": True},
    "index_of_pickles": VIT | {"index": True},
    "kernel": VIT | {"attn_implementation": "kernels-community/flash-attn"},
    "quantized": VIT | {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "hub_of_timm": {"architecture": "hf-hub:org/net"},
    "pretrained": {"architecture": NAME, "model_args": SMALL | {"pretrained": True}},
    "pickle": {"architecture": NAME, "model_args": SMALL | {"checkpoint_path": "w.pth"}},
    "url": {"architecture": NAME, "model_args": {"pretrained_cfg_overlay": {"url": URL}}},
}


class Boom:
    """A pickle of it writes the canary as it is read."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path(CANARY),)


def write_code(folder: Path) -> None:
    """Makes a folder a package of the code that leaves the canary."""
    folder.mkdir(exist_ok=True)
    for name in ("__init__.py", "evil.py"):
        (folder / name).write_text(CODE)


def write(root: Path, case: str, honest: dict[str, Any]) -> Path:
    """Writes models/gift below a folder, with a package of evil code, and returns it."""
    gift = root / "models" / "gift"
    gift.mkdir(parents=True, exist_ok=True)
    write_code(gift)
    (gift / "w.pth").write_bytes(pickle.dumps(Boom()))
    changes = dict(CASES[case])
    is_pickle, image = changes.pop("pickle", False), changes.pop("image", None)
    tree = json.loads(json.dumps(honest))
    for key, value in changes.items():
        tree[key] = tree[key] | value if isinstance(value, dict) else value
    if image is not None:
        tree["model"]["encoders"]["left"] = image
    text = re.sub("'(!!python.*)'", r"\1", yaml.safe_dump(tree))
    (gift / "config.yaml").write_text(text)
    if is_pickle:
        (gift / "model.safetensors").write_bytes(pickle.dumps(Boom()))
    else:
        shutil.copy(root / "model.safetensors", gift)
    shutil.copy(root / "model.json", gift)
    return gift


def prepare(root: Path) -> None:
    """Prepares a folder: data, a model of it as it is saved, its embeddings and their index."""
    from heron.data.dataset import open_reader
    from heron.experiment.config import parse_config
    from heron.losses.objective import build_losses
    from heron.models.heterogeneous import Heterogeneous
    from heron.retrieval.build import build_index
    from heron.retrieval.embed import embed
    from heron.shards.build import build
    from heron.sources import make_source
    from heron.training import saved
    from heron.training.signature import Signature

    draw = np.random.default_rng(0)
    rows: dict[str, Any] = {
        "left": draw.integers(0, 255, (40, 8, 8, 3)).astype(np.uint8),
        "labels": np.arange(40) % 3,
        "numbers": draw.normal(size=(40, 4)).astype(np.float32),
    }
    np.savez(root / "rows.npz", **rows)
    build(make_source("arrays", {"npz": root / "rows.npz"}), root / "data", progress=False)
    Image.fromarray(rows["left"][0]).save(root / "picture.png")
    write_code(root / "kit")  # of the user's own
    for name, encoder in (
        ("gift", {"kind": "cnn", "channels": [4]}),
        ("mine", {"kind": "kit.evil.Enc"}),
    ):
        tree = {
            "run": {"dir": "run"},
            "data": {"path": "data", "batch": {"labelled": 8, "unlabelled": 8}} | views(),
            "model": {"encoders": {"left": encoder}, "projection_width": 16},
            "objective": {"cross_entropy": {"weight": 1}, "nt_xent": {"weight": 1, "tau": 0.3}},
            "train": {"precision": "fp32"},
        }
        config = parse_config(tree)
        signature = Signature.of(open_reader(config.data), config.data.views)
        losses = build_losses(config.objective)
        torch.manual_seed(0)
        network = Heterogeneous(
            config.model, signature.shapes, signature.labels, losses, config.data.view_names
        )
        folder = root / "models" / name
        saved.save(folder, network, config, signature)
        embeddings = embed(f"models/{name}", root / f"embeddings-{name}", progress=False)
        build_index(embeddings, root / f"index-{name}", layer="hidden", progress=False)
    gift = root / "models" / "gift"
    for name in ("model.safetensors", "model.json"):
        shutil.copy(gift / name, root)
    (root / "honest.json").write_text(
        json.dumps(yaml.safe_load((gift / "config.yaml").read_text()))
    )
    (gift / "manifest.json").unlink()


def write_backbone(folder: Path, tree: dict[str, Any]) -> Path:
    """Writes a folder of a network with a hostile config.json, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tree, name = dict(tree), "model.safetensors"
    if tree.pop("adapter", False):
        adapter = {"base_model_name_or_path": "org/net", "peft_type": "LORA", "r": 2}
        (folder / "adapter_config.json").write_text(json.dumps(adapter))
        (folder / "adapter_model.bin").write_bytes(pickle.dumps(Boom()))
    if tree.pop("index", False):
        index = {"metadata": {}, "weight_map": {"x": "model-1.bin"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "model-1.bin").write_bytes(pickle.dumps(Boom()))
    else:
        save_file({"x": torch.zeros(1)}, folder / name, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


COMMANDS = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "webbrowser.open"}
EVIL = {"gift", "kit", "evil", "antigravity"}  # in the name of a module
seen: list[str] = []


def watch(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook: refuses connections; notes these, commands, pickles and a folder's code."""
    said = ""
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        said = f"{event} {args[1:] if event == 'socket.connect' else args[:2]}"
    elif event in COMMANDS or (event == "import" and EVIL & {*str(args[0]).split(".")}):
        said = f"{event} {args[0]}"
    elif event == "pickle.find_class":
        said = f"{event} {args}"
    elif event == "exec" and any(f"/{x}/" in args[0].co_filename for x in ("models/gift", "kit")):
        said = f"{event} {args[0].co_filename}"
    elif event == "open" and str(args[0]).endswith((".pth", ".bin", ".pkl")):
        said = f"{event} {args[0]}"
    if said:
        seen.append(said)
        if "HERON_WATCHED" in os.environ:
            with open(os.environ["HERON_WATCHED"], "a") as stream:
                stream.write(f"{said}\n")
        if event.startswith("socket."):
            raise PermissionError(f"no network here: {said}")


@contextlib.contextmanager
def noted(name: str, found: dict[str, Any]) -> Iterator[None]:
    """Notes what happens meanwhile: the error, the events, and whether the canary was written."""
    from heron.base.errors import HeronError

    seen.clear()
    Path(CANARY).unlink(missing_ok=True)
    fault, raw = "", ""
    try:
        yield
    except HeronError as error:
        fault = str(error)
    except BaseException as error:
        raw = f"{type(error).__name__}: {error}"
    found[name] = {"fault": fault, "raw": raw, "seen": [*seen], "ran": Path(CANARY).exists()}


def forget() -> None:
    """Has the evil modules imported anew the next time."""
    for name in [n for n in sys.modules if n.partition(".")[0] in ("models", "kit", "evil")]:
        del sys.modules[name]


def with_timm() -> bool:
    """Puts the tests' timm on the path; False if there is none."""
    from heron.base.extras import MissingPackage, require

    sys.path.append(str(Path(sys.prefix) / "vision"))
    try:
        require("timm", "a test")
    except MissingPackage:
        return False
    return True


def verbs(name: str, *trust: str) -> dict[str, list[str]]:
    """The commands that open models/NAME, by their verbs."""
    model, out = f"models/{name}", f"{name}{len(trust)}"
    words = {
        "embed": ["embed", model, "--out", f"{out}-embedded", "data.path=data"],
        "predict": ["predict", model, "--out", f"{out}.csv", "--data", "data"],
        "export": ["export", model, "--out", f"{out}.pt2"],
        "save": ["save", model, "--out", f"{out}-saved"],
        "query": ["query", f"index-{name}", "--file", "left=picture.png"],
        "query --run": ["query", f"index-{name}", "--run", model, "--file", "left=picture.png"],
        "negatives": ["negatives", f"embeddings-{name}", "--out", f"{out}-report"],
    }
    if not trust:
        words["config"] = ["config", f"{model}/config.yaml"]
        words["pretrain"] = ["pretrain", f"{model}/config.yaml", f"run.dir={out}-run"]
    return {verb: [*given, *trust] for verb, given in words.items()}


def main(root: Path) -> dict[str, Any]:
    """Opens every folder below `root`, trusted and not, and some by every verb."""
    import transformers  # noqa: F401 - that what it imports is not taken for a folder's

    import heron
    from heron.cli.main import main as command
    from heron.retrieval.embedding_model import open_encoder

    prepare(root)
    forget()
    honest = json.loads((root / "honest.json").read_text())
    has_timm = with_timm()
    import transformers.models.auto.modeling_auto  # noqa: F401

    sys.path.append(str(root / "models" / "gift"))  # and the working directory is its parent's
    sys.addaudithook(watch)
    found: dict[str, Any] = {}
    ways = {"": False, " trusted": True}
    for case in CASES:
        if case.startswith(("timm", "lora")) and not has_timm:
            continue
        write(root, case, honest)
        for way, trust in ways.items():
            if way and case.startswith("timm") and case not in TRUSTED:
                continue
            with noted(case + way, found):
                heron.from_pretrained(Path("models/gift"), trust_code=trust)
            forget()
    write(root, "code: encoder", honest)
    for name in ("gift", "mine", "mine --trust-code"):
        for verb, words in verbs(*name.split()).items():
            said = io.StringIO()
            with noted(f"heron {verb} {name}", found), contextlib.redirect_stderr(said):
                status = command([str(word) for word in words])
            found[f"heron {verb} {name}"] |= {"status": status, "said": said.getvalue()}
            forget()
    for name, tree in BACKBONES.items():
        if "architecture" in tree and not has_timm:
            continue
        folder = write_backbone(root / "backbones" / name, tree)
        with noted(f"--encoder {name}", found):
            open_encoder(str(folder), str(root / "data"), "left")
        forget()
    return found


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    place = Path(sys.argv[1])
    found = main(place)
    (place / "found.json").write_text(json.dumps(found))
