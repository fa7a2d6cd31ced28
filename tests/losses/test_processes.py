"""Two processes train what one trains, with every loss, in three kinds of loops, in float64."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader

from heron import losses as h
from heron.distributed import collectives
from heron.losses import functional
from heron.losses.named_terms import named_terms
from tests import ranks
from tests.losses.nets import CASES, Net, batches

Result = dict[str, Tensor]


def plain(cases: list[str]) -> dict[str, Result]:
    """Trains each case in a loop of one's own; the values of the losses, and the last weights."""
    found = {}
    for case in cases:
        net = Net(case)
        wrapped = DistributedDataParallel(net)
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_post_hook(net.after_step)
        values = []
        for rows, epoch in batches(collectives.rank(), collectives.world_size()):
            optimizer.zero_grad()
            loss = wrapped(rows, epoch)["loss"]
            loss.backward()
            optimizer.step()
            values.append(loss.detach())
        found[case] = net.result() | {"values": torch.stack(values)}
    return found


def assert_one(one: Result, several: Result) -> None:
    assert one.keys() == several.keys()
    for name, value in one.items():
        torch.testing.assert_close(several[name], value, rtol=1e-8, atol=1e-10, msg=name)


def test_every_term_is_a_case() -> None:
    names = {name.partition(",")[0] for name in CASES}
    assert names == {term.loss.__name__ for term in named_terms().values()}


def test_two_processes_are_one_in_a_loop_of_ones_own() -> None:
    (one,), two = ranks.run(1, plain, list(CASES)), ranks.run(2, plain, list(CASES))
    for case in CASES:
        for process in two:  # the value of the loss is the same on both, to the last bit
            assert_one(one[case], process[case])
        assert torch.equal(two[0][case]["values"], two[1][case]["values"]), case


FEW = ["WeightedSupervised", "WeightedUnsupervised", "Mulco", "C2ae"]
Loops = Callable[[list[str]], dict[str, Result]]


def in_lightning(cases: list[str]) -> dict[str, Result]:
    """Trains each case by Lightning's Trainer; the last weights."""
    import lightning  # both: a second to load, and in the processes alone

    class Lit(lightning.LightningModule):
        def __init__(self, net: Net) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: tuple[Tensor, float], _: int) -> Tensor:
            return self.net.forward(*batch)["loss"]

        def configure_optimizers(self) -> SGD:
            optimizer = SGD(self.net.parameters(), lr=0.1, momentum=0.9)
            optimizer.register_step_post_hook(self.net.after_step)
            return optimizer

    found, world = {}, collectives.world_size()
    for case in cases:
        net = Net(case)
        rows = list(batches(collectives.rank(), world))
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=world,
            strategy="ddp",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(Lit(net), DataLoader(rows, batch_size=None))  # type: ignore[arg-type]
        found[case] = net.result()
    return found


def in_trainer(cases: list[str]) -> dict[str, Result]:
    """Trains each case by the Trainer of transformers; the last weights."""
    import transformers

    class Rows(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            rows = batches(collectives.rank(), collectives.world_size())
            named = [{"rows": one, "epoch": epoch} for one, epoch in rows]
            return DataLoader(named, batch_size=None)  # type: ignore[arg-type]

    found = {}
    for case in cases:
        net = Net(case)
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_post_hook(net.after_step)
        with tempfile.TemporaryDirectory() as folder:
            options = transformers.TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                num_train_epochs=1,
                max_grad_norm=0,
                lr_scheduler_type="constant",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            )
            Rows(net, options, train_dataset=[], optimizers=(optimizer, None)).train()
        found[case] = net.result()
    return found


@pytest.mark.parametrize("loop", [in_lightning, in_trainer])
def test_two_processes_are_one_in_loops_of_others(loop: Loops) -> None:
    (one,), two = ranks.run(1, plain, FEW), ranks.run(2, loop, FEW)
    for case in FEW:
        expected = {name: value for name, value in one[case].items() if name != "values"}
        for process in two:
            assert_one(expected, process[case])


def alone(cases: list[str]) -> dict[str, Tensor]:
    """The loss of this process's rows alone, and of all with their sizes given."""
    rank, found = collectives.rank(), {}
    z = torch.randn(9, 2, 4, generator=torch.Generator().manual_seed(0)).double()
    own = torch.split(z, [5, 4])[rank].requires_grad_()
    for name, loss in (
        ("alone", h.NtXent(gather=False)(own)),
        ("whole", h.NtXent()(own, sizes=[5, 4])),
        ("local", functional.nt_xent(own.unbind(1))),
        ("global", functional.nt_xent(z.unbind(1))),
    ):
        found[name] = loss.detach()
    with pytest.raises(h.LossError) as error:
        h.NtXent()(own, sizes=[4, 5])
    assert str(error.value) == (
        f"rank {rank}: NtXent: sizes must be the rows of every process, in order of "
        f"rank, got [4, 5], but process {rank} of 2 has {len(own)} rows"
    )
    with pytest.raises(h.LossError) as error:
        h.Supcon()(own[:, :, : 3 + rank], torch.arange(len(own)))
    assert str(error.value) == (
        f"rank {rank}: Supcon: all processes must have the same: "
        "rank 0 projections float64 [batch, 3], float64 [batch, 3]; labels int64 [batch, 1] | "
        "rank 1 projections float64 [batch, 4], float64 [batch, 4]; labels int64 [batch, 1]"
    )
    return found


def test_rows_of_one_process_and_processes_that_differ() -> None:
    for found in ranks.run(2, alone, []):
        torch.testing.assert_close(found["alone"], found["local"])
        torch.testing.assert_close(found["whole"], found["global"])
