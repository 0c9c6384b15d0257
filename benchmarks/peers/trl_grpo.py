"""The same task, model, batch and learning rate under TRL's GRPOTrainer, in one process.

PEERS_PYTHON -m benchmarks.peers.trl_grpo --steps 150 --threads 2
"""

import argparse
import builtins
import json
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers import task


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Pad, end, the ten digits, the equals sign."""
    vocabulary = {"<pad>": task.PAD, "<eos>": task.END, **{str(d): d + task.FIRST_DIGIT for d in range(10)}}
    made = Tokenizer(models.WordLevel({**vocabulary, "=": task.EQUALS}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>", padding_side="left"
    )


def reward(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
    """Share of places that hold the right token, end of sequence included."""
    wanted = [[*(int(c) + task.FIRST_DIGIT for c in text), task.END] for text in answer]
    pairs = zip(completion_ids, wanted, strict=True)
    return [sum(a == b for a, b in zip(ids, want, strict=False)) / len(want) for ids, want in pairs]


class StepTimes(TrainerCallback):
    """Seconds of each training step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)


def prompts(steps: int) -> Dataset:
    random.seed(0)
    rows = ["".join(str(random.randrange(10)) for _ in range(task.DIGITS)) for _ in range(steps * task.PROMPTS)]
    return Dataset.from_list([{"prompt": f"{row}=", "answer": row} for row in rows])


def settings(folder: str, steps: int) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=task.PROMPTS * task.SAMPLES,
        num_generations=task.SAMPLES,
        max_completion_length=task.NEW_TOKENS,
        beta=0.0,
        learning_rate=task.LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=steps,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    model = Qwen2ForCausalLM(task.qwen2_config())
    model.name_or_path = "tiny"
    times = StepTimes()
    shown, builtins.print = builtins.print, lambda *_, **__: None  # it prints every log line
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=settings(folder, options.steps),
            train_dataset=prompts(options.steps),
            processing_class=character_tokenizer(),
            callbacks=[times],
        )
        trainer.train()
    builtins.print = shown
    middle = statistics.median(times.seconds[options.warmup :])
    print(json.dumps({"step_ms": middle * 1e3, "samples_per_s": task.PROMPTS * task.SAMPLES / middle}))


if __name__ == "__main__":
    main()
