"""What ranks do in the tests of Hugging Face's Trainer and accelerate: one function, one case.

``asyncddp run -np 3 cases.py FOLDER CASE[:ARGUMENT]…`` runs some of them on three ranks.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.state import AcceleratorState, DistributedType
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import asyncddp as bf
from asyncddp.checkpoint.trainable_part import TrainablePart
from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.integrations.accelerate import prepare
from asyncddp.integrations.hugging_face import DecentralizedTrainer, DecentralizedTrainerMixin

WORDS = [(torch.arange(8) + start) % 16 for start in range(96)]
SAMPLES = [{"input_ids": word, "labels": word} for word in WORDS]
QUIET = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.01,
    "logging_strategy": "no",
}


def small_model() -> GPT2LMHeadModel:
    """The same small model, with dropout, on all ranks."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def trainer(
    folder: str, *, model: Any = None, kind: Any = DecentralizedTrainer, **options: Any
) -> Any:
    """A quiet Trainer; options of TrainingArguments and of the Trainer alike."""
    own = ("algorithm", "topology", "algorithm_kwargs", "replicas", "callbacks", "optimizers")
    of_trainer = {name: options.pop(name) for name in own if name in options}
    if kind is not Trainer:
        of_trainer.setdefault("topology", "ring")
    arguments = TrainingArguments(folder, **{"max_steps": 10, **QUIET, **options})
    return kind(
        small_model() if model is None else model,
        arguments,
        train_dataset=SAMPLES,
        eval_dataset=SAMPLES[:24],
        **of_trainer,
    )


def bits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a model's tensors."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def average_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the average model's tensors."""
    with bf.average_model(model):
        return bits(model)


def same(one: Any, other: Any) -> bool:
    """Whether states have the same bits."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class StopAfter(TrainerCallback):
    """Ends a run early, as a lost machine would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


class Last(TrainerCallback):
    """Keeps the optimizer's state after the last step."""

    state: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == args.max_steps:
            self.state = kwargs["optimizer"].state_dict()


def trains(folder: str) -> None:
    """No DDP; groups by weight decay; the Trainer's schedule; accumulation, clipping and bf16."""
    seen: dict[str, Any] = {}

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            own = kwargs["optimizer"].optimizer
            seen["optimizer"], seen["rounds"] = own, own.round
            seen.setdefault("rates", []).append(kwargs["lr_scheduler"].get_last_lr()[0])
            control.should_log = True

    made = trainer(
        folder,
        max_steps=6,
        gradient_accumulation_steps=2,
        weight_decay=0.1,
        warmup_steps=2,
        max_grad_norm=0.5,
        bf16=True,
        save_strategy="no",
        callbacks=[Look()],
    )
    before = bits(made.model)
    made.train()
    own = seen["optimizer"]
    assert isinstance(own, bf.DistributedOptimizer), own
    assert type(own.wrapped) is torch.optim.AdamW
    assert not isinstance(made.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    assert [group["weight_decay"] for group in own.param_groups] == [0.1, 0.0]
    assert seen["rounds"] == 6, seen
    wanted = [0.005, 0.01, 0.0075, 0.005, 0.0025, 0.0]
    assert torch.allclose(torch.tensor(seen["rates"]), torch.tensor(wanted)), seen["rates"]
    assert not same(before, bits(made.model))
    assert bf.consensus_distance(made.model) > 0
    logged = [one["grad_norm"] for one in made.state.log_history if "grad_norm" in one]
    assert len(logged) == 6, made.state.log_history


def goes_on_exactly(folder: str, arguments: str) -> None:
    """A resumed run ends with the bits of one that was not interrupted, on each rank."""
    algorithm, options = json.loads(arguments)
    own = dict(algorithm=algorithm, save_steps=4, algorithm_kwargs=options)
    if algorithm in ("gradient_allreduce",):
        own["gradient_accumulation_steps"] = 2
    last = Last()
    whole = trainer(f"{folder}/whole", **own, callbacks=[last])
    whole.train()
    trainer(f"{folder}/part", **own, callbacks=[StopAfter(5)]).train()
    again = Last()
    rest = trainer(f"{folder}/part", **own, callbacks=[again])
    rest.train(resume_from_checkpoint=True)
    assert rest.state.global_step == 10
    assert same(bits(whole.model), bits(rest.model))
    assert same(last.state, again.state)
    assert "asyncddp" in last.state
    if algorithm != "gradient_allreduce":
        assert bf.consensus_distance(whole.model) > 0


def sees_the_average(folder: str) -> None:
    """evaluate, predict, save_model and checkpoints have the average; each rank keeps its own."""
    found: dict[str, Any] = {}

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found[state.global_step] = bits(kwargs["model"]), average_of(kwargs["model"])

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert same(bits(kwargs["model"]), found[state.global_step][0])

    made = trainer(
        folder, max_steps=3, eval_strategy="steps", eval_steps=1, save_steps=3, callbacks=[Look()]
    )
    made.train()
    own, average = found[3]
    assert not same(own, average)
    assert same(bits(made.model), own)
    saved = GPT2LMHeadModel.from_pretrained(f"{folder}/checkpoint-3")
    assert same(bits(saved), average)
    expected = Trainer(saved, made.args, eval_dataset=SAMPLES[:24]).evaluate()["eval_loss"]
    logged = [one["eval_loss"] for one in made.state.log_history if "eval_loss" in one][-1]
    predicted = made.predict(SAMPLES[:24]).metrics["test_loss"]
    assert logged == predicted == made.evaluate()["eval_loss"] == expected
    made.save_model(f"{folder}/final")
    bf.barrier()
    assert same(bits(GPT2LMHeadModel.from_pretrained(f"{folder}/final")), average)
    assert same(bits(made.model), own)


def ends_with_the_best(folder: str) -> None:
    """load_best_model_at_end gives all ranks the average of the best step; train() goes on."""
    made = trainer(
        folder,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that the best is the first
    )
    made.train()
    assert made.state.best_model_checkpoint.endswith("checkpoint-2")
    assert same(bits(made.model), bits(GPT2LMHeadModel.from_pretrained(f"{folder}/checkpoint-2")))
    bf.barrier()
    before = bits(made.model)
    made.args.load_best_model_at_end = False
    made.train()
    assert not same(before, bits(made.model))
    assert bf.consensus_distance(made.model) > 0


def trains_by_epochs_with_any_optimizer(folder: str) -> None:
    """optim= and optimizers= are wrapped alike; epochs count; a mix-in serves other Trainers."""
    made = trainer(folder, max_steps=-1, num_train_epochs=2, optim="adafactor", save_strategy="no")
    made.train()
    assert made.state.global_step == 2 * 96 // (4 * bf.size())
    assert type(made.optimizer).__name__ == "Adafactor"
    model = small_model()
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    made = trainer(folder, model=model, save_strategy="no", optimizers=(given, None))
    made.train()
    assert made.optimizer is given
    assert bf.consensus_distance(model) > 0

    class Decentralized(DecentralizedTrainerMixin, Seq2SeqTrainer):
        pass

    arguments = Seq2SeqTrainingArguments(folder, max_steps=3, save_strategy="no", **QUIET)
    mixed = Decentralized(small_model(), arguments, train_dataset=SAMPLES, topology="ring")
    mixed.train()
    assert bf.consensus_distance(mixed.model) > 0


def trains_a_part(folder: str) -> None:
    """What is frozen is neither averaged nor saved for each rank."""
    model = small_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".mlp." in name
    trainer(folder, model=model, max_steps=4, save_steps=4).train()
    with bf.average_model(TrainablePart(model)):
        average = bits(model)
    assert same(bits(GPT2LMHeadModel.from_pretrained(f"{folder}/checkpoint-4")), average)
    own = f"{folder}/checkpoint-4/asyncddp/step_0000000004/rank_{bf.rank():05d}.pt"
    names = torch.load(own, weights_only=True)["model"]
    assert names
    assert all(".mlp." in name for name in names)


def never_waits(folder: str, arguments: str) -> None:
    """Asynchronous methods train, evaluate, save and resume, without counting tokens together."""
    algorithm, options = json.loads(arguments)
    own = dict(algorithm=algorithm, algorithm_kwargs=options)
    own |= {"save_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    made = trainer(folder, max_steps=6, **own)
    assert not made.args.average_tokens_across_devices or algorithm == "async_model_average"
    made.train()
    losses = [one["eval_loss"] for one in made.state.log_history if "eval_loss" in one]
    assert losses[-1] < losses[0], losses
    rest = trainer(folder, model=small_model(), **own)
    rest.train(resume_from_checkpoint=True)
    assert rest.state.global_step == 10


def goes_on_on_fewer(folder: str) -> None:
    """Another number of ranks goes on from the average; this is its first part or its second."""
    own = dict(save_steps=4, algorithm="adapt_then_combine")
    if bf.size() == 3:
        trainer(folder, max_steps=4, **own).train()
        return
    seen: list[Any] = []

    class Look(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(bits(kwargs["model"]))

    made = trainer(folder, **own, callbacks=[Look()])
    made.train(resume_from_checkpoint=True)
    assert same(seen[0], bits(GPT2LMHeadModel.from_pretrained(f"{folder}/checkpoint-4")))


def takes_over(folder: str) -> None:
    """The checkpoint of a plain Trainer is one to begin from; a half-written one of ours is not."""
    plain = trainer(folder, kind=Trainer, max_steps=4, save_steps=4)
    plain.train()
    bf.barrier()
    made = trainer(folder, max_steps=6, save_steps=2)
    made.train(resume_from_checkpoint=True)
    assert made.state.global_step == 6
    bf.barrier()
    (manifest,) = Path(folder).glob("checkpoint-6/asyncddp/*/manifest.json")
    bf.barrier()
    if bf.rank() == 0:
        manifest.unlink()
    bf.barrier()
    fails(
        EnvironmentProblem,
        "checkpoint-6: its asyncddp holds no whole checkpoint",
        lambda: trainer(folder).train(resume_from_checkpoint=True),
    )


def fails(kind: type[Exception], text: str, action: Any) -> None:
    """Check that an action raises an error with a text."""
    with pytest.raises(kind, match=re.escape(text)):
        action()


def says_what_cannot_be(folder: str) -> None:
    """Each mistake is named, on all ranks."""
    model = small_model()
    fails(
        ArgumentError, "argument replicas: expected one of", lambda: trainer(folder, replicas="x")
    )
    fails(Exception, "adapt_then_combin", lambda: trainer(folder, algorithm="adapt_then_combin"))
    fails(
        ArgumentError,
        "has no such option",
        lambda: trainer(folder, algorithm_kwargs={"bucket_size": 1}),
    )
    wrapped = bf.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    made = trainer(folder, model=model, optimizers=(wrapped, None))
    fails(ArgumentError, "argument optimizers: expected a plain optimizer", made.train)


def refuses_sharding(folder: str) -> None:
    """FSDP, which accelerate has on GPUs alone, splits models: there is nothing to average."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    text = "expected an accelerator that leaves each rank a whole model, got FSDP, which splits"
    fails(ArgumentError, f"prepare: {text}", lambda: prepare(accelerator, model, optimizer))


def knows_the_same_world(folder: str) -> None:
    """Ranks of which accelerate knows nothing are refused: without use_cpu, and as under srun."""
    if not torch.cuda.is_available():
        text = f"of {bf.size()}, and process 0 of 1 to accelerate: without a GPU it joins other"
        fails(EnvironmentProblem, text, lambda: trainer(folder, use_cpu=False))
        AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in [one for one in os.environ if one.endswith(("RANK", "SIZE"))]:
            patch.delenv(name)
        text = f"of {bf.size()}, and process 0 of 1 to accelerate: start the script by"
        fails(EnvironmentProblem, text, lambda: trainer(folder))


def accelerates(folder: str) -> None:
    """accelerate's states have the average, and each rank's own, with which it goes on exactly."""

    def make() -> tuple[Any, ...]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        loader = torch.utils.data.DataLoader(SAMPLES, batch_size=4)
        made = prepare(accelerator, model, optimizer, loader, schedule, topology="ring")
        return accelerator, *made

    def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, schedule: Any) -> None:
        torch.manual_seed(bf.rank())
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    parts = make()
    accelerator, model, optimizer, loader, _ = parts
    assert isinstance(optimizer.optimizer, bf.DistributedOptimizer)
    assert not isinstance(model, torch.nn.parallel.DistributedDataParallel)
    train(*parts)
    assert optimizer.optimizer.round == len(loader) // 2
    accelerator.save_state(f"{folder}/state")
    average = average_of(model)
    bf.barrier()
    saved = small_model()
    load_checkpoint_in_model(saved, f"{folder}/state")
    assert same(bits(saved), average)
    train(*parts)
    with bf.average_model(model):
        accelerator.save_model(model, f"{folder}/model")
    bf.barrier()
    load_checkpoint_in_model(saved, f"{folder}/model")
    assert same(bits(saved), average_of(model))
    again = make()
    again[0].load_state(f"{folder}/state")
    train(*again)
    assert bf.consensus_distance(model) > 0
    assert same(bits(model), bits(again[1]))
    assert same(optimizer.state_dict(), again[2].state_dict())


def run_each(folder: str, cases: list[str]) -> None:
    """Run cases one after the other, each in a folder of its own, up to one that fails."""
    for number, words in enumerate(cases):
        case, _, arguments = words.partition(":")
        try:
            globals()[case](f"{folder}/{number}", *filter(None, [arguments]))
        except Exception as error:
            raise AssertionError(f"the case {words} has failed") from error
        AcceleratorState._reset_state(reset_partial_state=True)
        bf.barrier()


if __name__ == "__main__":
    bf.init()
    run_each(sys.argv[1], sys.argv[2:])
    if bf.rank() == 0:
        sys.stdout.write("done\n")
