"""GRPO in one process with nothing around it: generate, reward, loss, step. The ceiling on the same cores.

python -m benchmarks.peers.bare_loop --steps 150 --threads 2
"""

import argparse
import json
import random
import statistics
import time

import torch
from transformers import Qwen2ForCausalLM

from benchmarks.peers import task


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts [B, digits + 1] and wanted responses [B, digits + 1], each repeated for its samples."""
    rows = [[random.randrange(10) + task.FIRST_DIGIT for _ in range(task.DIGITS)] for _ in range(task.PROMPTS)]
    prompts = torch.tensor([[*row, task.EQUALS] for row in rows]).repeat_interleave(task.SAMPLES, 0)
    return prompts, torch.tensor([[*row, task.END] for row in rows]).repeat_interleave(task.SAMPLES, 0)


@torch.inference_mode()
def generate(model: Qwen2ForCausalLM, prompts: torch.Tensor) -> torch.Tensor:
    """Responses [B, new tokens], sampled at temperature 1."""
    inputs, cache, tokens = prompts, None, []
    for _ in range(task.NEW_TOKENS):
        out = model(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache, inputs = out.past_key_values, torch.multinomial(out.logits[:, -1].softmax(-1), 1)
        tokens.append(inputs)
    return torch.cat(tokens, 1)


def training_step(model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer) -> float:
    """One step; returns the share of exact answers."""
    prompts, wanted = batch()
    response = generate(model, prompts).clone()
    ended = (response == task.END).int()
    mask = ((ended.cumsum(1) - ended) == 0).float()
    right = (response == wanted) & mask.bool()
    rewards = right.float().mean(1).view(task.PROMPTS, task.SAMPLES)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).view(-1, 1)
    logits = model(input_ids=torch.cat([prompts, response], 1)).logits[:, prompts.shape[1] - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(2, response[..., None]).squeeze(2)
    loss = -(advantages * logprobs * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(right.all(1).float().mean())


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(options.threads)
    model = Qwen2ForCausalLM(task.qwen2_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    times = []
    for _ in range(options.steps):
        begin = time.perf_counter()
        training_step(model, optimizer)
        times.append(time.perf_counter() - begin)
    middle = statistics.median(times[options.warmup :])
    print(json.dumps({"step_ms": middle * 1e3, "samples_per_s": task.PROMPTS * task.SAMPLES / middle}))


if __name__ == "__main__":
    main()
