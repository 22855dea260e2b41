"""Hugging Face's Trainer on a small language model, trained by neighbour averaging, then resumed.

    asyncddp run -np 4 examples/finetune_trainer.py
    torchrun --nproc-per-node 4 examples/finetune_trainer.py
    python examples/finetune_trainer.py

A GPT-2 of a few layers learns the bytes of Python's own help pages (``pydoc_data.topics``), so that
nothing is downloaded. Everything is the Trainer's but for one name: ``DecentralizedTrainer``. Each
rank trains on its share of the text and averages models with its neighbours by ``--algorithm``.
Evaluation and checkpoints have the average of all ranks' models. Half of the steps are made by one
Trainer, the others by a second one, which goes on from the checkpoint of the first, each rank from
its own model. Then ``from_pretrained`` reads the average, and it writes a line.

To use it with your own script, replace ``Trainer`` by ``DecentralizedTrainer``.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import asyncddp as bf
from asyncddp.algorithms import ALGORITHMS
from asyncddp.integrations.hugging_face import DecentralizedTrainer

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
logging.getLogger("transformers").setLevel(logging.ERROR)


def byte_samples(text: str, length: int) -> list[dict[str, torch.Tensor]]:
    """Cut a text into samples of so many bytes; a byte is a token."""
    tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def new_model(options: argparse.Namespace) -> GPT2LMHeadModel:
    """A model of bytes, made on the spot."""
    config = GPT2Config(
        vocab_size=256,
        n_positions=options.length,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def new_trainer(steps: int, options: argparse.Namespace) -> DecentralizedTrainer:
    """A Trainer up to so many steps; the class is what a script for DDP changes."""
    arguments = TrainingArguments(
        str(options.out),
        max_steps=steps,
        learning_rate=options.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=options.steps // 10,
        per_device_train_batch_size=8,
        weight_decay=0.01,
        save_steps=options.steps // 2,
        eval_strategy="steps",
        eval_steps=options.steps // 2,
        logging_strategy="no",
        use_cpu=options.cpu or not torch.cuda.is_available(),  # else ranks do not meet
        report_to="none",
        disable_tqdm=True,
    )
    text = "".join(topics[name] for name in sorted(topics))
    samples = byte_samples(text[: options.bytes], options.length)
    return DecentralizedTrainer(
        new_model(options),
        arguments,
        train_dataset=samples[32:],
        eval_dataset=samples[:32],
        algorithm=options.algorithm,
        topology=options.topology,
    )


def write_line(folder: Path, start: str, length: int) -> str:
    """What the average model writes after a start."""
    model = GPT2LMHeadModel.from_pretrained(folder)
    tokens = torch.tensor([list(start.encode())])
    made = model.generate(tokens, max_new_tokens=length, do_sample=False, pad_token_id=0)
    return bytes(made[0].tolist()).decode("utf-8", "replace")


def main() -> None:
    """Train, resume, and say what came of it."""
    options = parse_options()
    half = options.steps // 2
    trainer = new_trainer(half, options)
    first = bf.rank() == 0
    if first:
        print(f"{bf.size()} ranks train by {options.algorithm}")
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]

    trainer = new_trainer(2 * half, options)
    trainer.train(resume_from_checkpoint=True)
    losses.append(trainer.evaluate()["eval_loss"])
    distance = bf.consensus_distance(trainer.model)
    trainer.save_model(str(options.out / "final"))
    if first:
        print(f"after {half} steps the average model has loss {losses[0]:.2f}")
        print(f"a second Trainer resumed, and after {2 * half} steps it is {losses[-1]:.2f}")
        print(f"the ranks' models are {distance:.3f} from the average")
        print(f"it writes: {write_line(options.out / 'final', 'The ', 40)!r}")


def parse_options() -> argparse.Namespace:
    """What can be chosen on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--algorithm",
        choices=sorted(ALGORITHMS),
        default="adapt_then_combine",
        metavar="NAME",
        help=f"one of {', '.join(sorted(ALGORITHMS))} (default: %(default)s)",
    )
    add("--topology", default="one_peer_exponential", help="by name (default: %(default)s)")
    add("--steps", type=int, default=600, help="of both Trainers together (default: %(default)s)")
    add("--lr", type=float, default=2e-3, help="step size (default: %(default)s)")
    add("--layers", type=int, default=2, help="of the model (default: %(default)s)")
    add("--width", type=int, default=128, help="of the model (default: %(default)s)")
    add("--length", type=int, default=64, help="bytes of a sample (default: %(default)s)")
    add("--bytes", type=int, default=500_000, help="of text (default: %(default)s)")
    add("--cpu", action="store_true", help="leave GPUs alone")
    add("--out", type=Path, default=Path("finetune_trainer"), help="folder (default: %(default)s)")
    add("--smoke", action="store_true", help="a few steps of a tiny model, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.width, options.layers, options.bytes = 20, 32, 1, 20_000
    return options


if __name__ == "__main__":
    main()
