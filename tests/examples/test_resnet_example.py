"""examples/resnet.py: reads CIFAR-10's files, augments, and trains with either normalisation."""

from __future__ import annotations

import pickle
import re
import struct

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import asyncddp as bf
from asyncddp.integrations.bagua.torch_api.contrib import SyncBatchNorm
from tests.examples.launches import RANKS, WAYS, launch, load

resnet = load("resnet.py")


def text_of_python_2(text: bytes) -> bytes:
    """A ``str`` of Python 2, in the second protocol."""
    if len(text) < 256:
        return b"U" + bytes([len(text)]) + text
    return b"T" + struct.pack("<i", len(text)) + text


def batch_file(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A file of CIFAR-10's python version, byte for byte as Python 2 and its numpy wrote them."""
    rows = struct.pack("<h", len(labels))
    return b"".join(
        [
            b"\x80\x02}q\x01(",
            text_of_python_2(b"batch_label") + text_of_python_2(b"training batch 1 of 5"),
            text_of_python_2(b"labels")
            + b"]("
            + b"".join(b"K" + bytes([y]) for y in labels)
            + b"e",
            text_of_python_2(b"data") + b"cnumpy.core.multiarray\n_reconstruct\n",
            b"cnumpy\nndarray\nK\x00\x85" + text_of_python_2(b"b") + b"\x87R",
            b"(K\x01M" + rows + b"M\x00\x0c\x86cnumpy\ndtype\n" + text_of_python_2(b"u1"),
            b"K\x00K\x01\x87R(K\x03" + text_of_python_2(b"|"),
            b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
            + text_of_python_2(pixels.tobytes()),
            b"tb" + text_of_python_2(b"filenames") + b"](",
            b"".join(text_of_python_2(b"leptodactylus_pentadactylus_s_000004.png") for _ in labels),
            b"eu.",
        ]
    )


@pytest.fixture
def cifar(tmp_path):
    """A folder with six such files, and the pixels in them."""
    pixels = np.random.default_rng(0).integers(256, size=(6, 12, 3072), dtype=np.uint8)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for name, batch in zip(names, pixels, strict=True):
        (folder / name).write_bytes(batch_file(batch, [*range(10), 0, 1]))
    return folder, pixels


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.parametrize("way", WAYS)
def test_trains_on_digits_in_each_way_of_starting(way, tmp_path):
    """Each epoch has a line, and the last one tells accuracy and distance of the average model."""
    done = launch(way, "resnet.py", "--smoke", "--out", "found.png", cwd=tmp_path)
    assert done.code == 0, done
    assert not done.left
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    epoch, end = done.stdout.splitlines()
    assert re.fullmatch(
        r"epoch   1: .* images/s and loss \d\.\d+ on rank 0, .* % right by .*", epoch
    )
    said = f"{RANKS[way]} ranks by adapt_then_combine, --norm local: the average model has "
    assert re.fullmatch(re.escape(said) + r"\d+\.\d % right, the ranks are \S+ from it", end)
    assert "Warning" not in done.stderr, done


@pytest.mark.slow
@pytest.mark.launches
def test_trains_on_files_of_cifar_with_all_ranks_normalised_together(cifar, tmp_path):
    """The same by a one-sided method, whose ranks make equally many steps."""
    options = ("--norm", "sync", "--method", "win_put", "--data", str(cifar[0]))
    done = launch("asyncddp run", "resnet.py", "--smoke", *options, cwd=tmp_path)
    assert done.code == 0, done
    assert "2 ranks by win_put, --norm sync: the average model has " in done.stdout


@pytest.mark.parametrize("norm", ["local", "sync"])
def test_all_layers_normalise_as_asked(norm, monkeypatch):
    """One kind of layer or the other, and no mixture."""
    monkeypatch.setattr("sys.argv", ["resnet.py", "--norm", norm, "--depth", "14"])
    bf.init()
    try:
        model = resnet.new_model(resnet.parse_options())
    finally:
        bf.shutdown()
    kinds = {type(layer) for layer in model.modules() if hasattr(layer, "running_mean")}
    assert kinds == {SyncBatchNorm if norm == "sync" else torch.nn.BatchNorm2d}
    convolutions = [layer for layer in model.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert len([one for one in convolutions if one.kernel_size == (3, 3)]) == 14 - 1


def test_pixels_and_labels_are_those_of_the_files(cifar):
    """Five files of training images in order; each is three planes of 32 rows."""
    train, test = resnet.read_images(cifar[0])
    assert torch.equal(train.tensors[0], torch.tensor(cifar[1][:5]).view(60, 3, 32, 32))
    assert torch.equal(test.tensors[0], torch.tensor(cifar[1][5]).view(12, 3, 32, 32))
    assert test.tensors[1].tolist() == [*range(10), 0, 1]


def test_a_file_that_calls_something_is_refused(cifar, tmp_path):
    """What would be called is named, and not called."""
    (cifar[0] / "test_batch").write_bytes(b"cos\nmkdir\n(S'" + bytes(tmp_path / "made") + b"'\ntR.")
    with pytest.raises(
        pickle.UnpicklingError, match=r"expected arrays and text alone, got os\.mkdir"
    ):
        resnet.read_images(cifar[0])
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("mirror", [False, True])
def test_crops_are_windows_of_the_padded_image(mirror):
    """All windows occur, also mirrored ones where they are asked for, and nothing else."""
    image = torch.arange(1, 193, dtype=torch.uint8).view(1, 3, 8, 8)
    padded = F.pad(image, [1] * 4)[0]
    windows = [padded[:, top : top + 8, left : left + 8] for top in range(3) for left in range(3)]
    if mirror:
        windows += [window.flip(2) for window in windows]
    torch.manual_seed(0)
    found = resnet.augment(image.expand(500, -1, -1, -1), mirror)
    wanted = {window.numpy().tobytes() for window in windows}
    assert {one.contiguous().numpy().tobytes() for one in found} == wanted


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--depth", "9"), "argument --depth: expected 8, 14, 20, …, got 9"),
        (("--batch", "0"), "argument --batch: expected at least 1, got 0"),
        (("--data", "nowhere"), "argument --data: expected a folder with test_batch, got nowhere"),
        (("--norm", "none"), "argument --norm: invalid choice: 'none'"),
        (("--method", "magic"), "argument --method: invalid choice: 'magic'"),
    ],
)
def test_bad_options_are_named(options, said, monkeypatch, capsys):
    """With what was expected, and what was given."""
    monkeypatch.setattr("sys.argv", ["resnet.py", *options])
    with pytest.raises(SystemExit, match="2"):
        resnet.parse_options()
    assert said in capsys.readouterr().err
