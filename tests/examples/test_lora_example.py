"""examples/lora.py: adapters alone are trained and sent, on texts that the base has not seen."""

from __future__ import annotations

import re

import pytest
import torch

from tests.examples.launches import RANKS, WAYS, launch, load

lora = load("lora.py")

BLOCKS, RANK, WIDTH = 2, 4, 64
INPUTS_AND_OUTPUTS = 4 * WIDTH + 2 * WIDTH + 2 * (WIDTH + 4 * WIDTH)  # of qkv, out, up and down
ADAPTERS = BLOCKS * RANK * INPUTS_AND_OUTPUTS
STEPS = 5  # of --smoke


def table_of(printed: str) -> dict[str, list[float]]:
    """The rows of the table: name → losses on the groups, and their mean."""
    rows = re.findall(r"^(\w[\w ]*?) +((?:\d+\.\d+ *)+)$", printed, re.MULTILINE)
    return {name: [float(cell) for cell in cells.split()] for name, cells in rows}


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.parametrize("way", WAYS)
def test_trains_alone_and_averaged_in_each_way_of_starting(way, tmp_path):
    """A row for the base, each rank and each average; bytes are those of adapters."""
    done = launch(way, "lora.py", "--smoke", "--out", "found.png", cwd=tmp_path)
    assert done.code == 0, done
    assert not done.left
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    table = table_of(done.stdout)
    alone = [f"rank {rank} alone" for rank in range(RANKS[way])]
    assert list(table) == ["base", *alone, "averaged in the end", "averaged in each step"]
    for losses in table.values():
        assert losses[-1] == pytest.approx(sum(losses[:-1]) / len(lora.GROUPS), abs=2e-3)
    told = " ".join(done.stdout.split())
    assert f"With {ADAPTERS:,} of " in told
    sent = 4 * ADAPTERS * STEPS / 1e6 if RANKS[way] > 1 else 0.0
    assert f"a rank has sent {sent:.1f} MB by adapt_then_combine" in told
    if RANKS[way] == 1:
        assert table["averaged in the end"] == table["averaged in each step"] == table[alone[0]]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.launches
def test_the_base_is_written_once_and_read_afterwards(tmp_path):
    """A second run trains no base, and judges the same one."""
    first, second = (
        launch("alone", "lora.py", "--smoke", "--base", "base.pt", cwd=tmp_path) for _ in range(2)
    )
    assert second.code == 0, second
    assert "base      step" in first.stdout
    assert "base      step" not in second.stdout
    assert table_of(first.stdout) == table_of(second.stdout)


def test_the_base_has_read_no_paragraph_of_the_groups():
    """What the ranks learn is new; all groups have enough of it."""
    base, groups = lora.read_texts()
    read = {part.strip() for part in bytes(base.tolist()).decode().split("\n\n")}
    assert len(base) > 100_000
    for group in groups:
        assert len(group) > 15_000
        assert not read & {part.strip() for part in bytes(group.tolist()).decode().split("\n\n")}


def test_adapters_change_nothing_until_they_are_trained():
    """B is 0; A and B alone are trained, and the matrices stay as they are."""
    torch.manual_seed(0)
    model = lora.GPT(16, WIDTH)
    text = torch.randint(256, (2, 17))
    before, start = model.loss(text), [one.detach().clone() for one in model.parameters()]
    base = list(model.parameters())
    adapters = lora.add_adapters(model, RANK, 8.0)
    assert torch.equal(model.loss(text), before)
    assert sum(one.numel() for one in adapters) == ADAPTERS
    optimizer = torch.optim.AdamW(adapters, lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(text).backward()
        optimizer.step()
    assert model.loss(text) < before
    assert all(map(torch.equal, base, start))


def test_an_adapter_adds_the_product_of_two_thin_matrices():
    """W x + b + (alpha / rank) B A x."""
    torch.manual_seed(0)
    adapter = lora.Adapter(torch.nn.Linear(6, 5), 2, 3.0)
    torch.nn.init.normal_(adapter.b)
    x = torch.randn(7, 6)
    whole = adapter.frozen.weight + 1.5 * adapter.b @ adapter.a
    torch.testing.assert_close(adapter(x), x @ whole.T + adapter.frozen.bias)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rank", "0"), "argument --rank: expected at least 1, got 0"),
        (("--base-steps", "0"), "argument --base-steps: expected at least 1, got 0"),
        (("--width", "30"), "argument --width: expected a multiple of 4, got 30"),
        (("--method", "magic"), "argument --method: invalid choice: 'magic'"),
    ],
)
def test_bad_options_are_named(options, said, monkeypatch, capsys):
    """With what was expected, and what was given."""
    monkeypatch.setattr("sys.argv", ["lora.py", *options])
    with pytest.raises(SystemExit, match="2"):
        lora.parse_options()
    assert said in capsys.readouterr().err
