"""The training loop, and what a run leaves in its folder.

In come an experiment, the streams of its data and the strategy of its launch (DDP, FSDP2, ZeRO);
out come checkpoints, metrics.jsonl, run.json and result.json, from which a run goes on, or a model
is loaded again (`pretrained`), saved apart (`saved`) or published (`hub`).
"""
