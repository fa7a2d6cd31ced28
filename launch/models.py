"""`heron save | export`: a trained model as a folder, or as a file for other programs."""

from pathlib import Path
from typing import Annotated, Literal

from heron.launch.arguments import UsageError

Trained = Annotated[str, "folder of a run, a checkpoint or a saved model, or hf://org/name"]


def save(
    run: Trained,
    *,
    out: Annotated[Path | None, "folder to make"] = None,
    push: Annotated[str | None, "org/name on Hugging Face's hub to publish it as"] = None,
    private: Annotated[bool, "a repository that --push makes is private"] = False,
) -> None:
    """Saves a model as a folder that loads anywhere, or publishes it.

    heron save runs/faces --out models/faces
    heron save runs/faces --push org/faces
    """
    from heron.model import from_pretrained

    if out is None and push is None:
        raise UsageError("neither --out nor --push is given; expected one of them, or both")
    model = from_pretrained(run)
    if out is not None:
        model.save_pretrained(out)
        print(f"{out}: {model}")
    if push is not None:
        model.push_to_hub(push, private or None)
        print(f"https://huggingface.co/{push.removeprefix('hf://').partition('@')[0]}")


def export(
    model: Trained,
    *,
    out: Annotated[Path, "file to write, such as faces.onnx or faces.pt2"],
    format: Annotated[Literal["torch", "onnx"], "torch.export's archive, or ONNX"] = "torch",
    layer: Annotated[Literal["hidden", "projection", "logits"], "what it computes"] = "hidden",
) -> None:
    """Exports a model as one file that takes raw rows and needs no Heron.

    heron export runs/faces --format onnx --out faces.onnx
    """
    from heron.model import from_pretrained

    from_pretrained(model).export(out, format, layer)
    print(f"{out}: layer {layer}, {out.stat().st_size:,} bytes, as the model computes it")
