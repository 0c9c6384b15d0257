"""Finished samples as rows of a batch: what a generate step writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distflow.data.batch import Batch, Ragged
from distflow.runtime.protocols import Tokenizer
from distflow.runtime.trajectory import Segment, Trajectory, joined
from distflow.types import FINISH_REASONS, Span


def assemble(samples: Sequence[Trajectory], tokenizer: Tokenizer, dtype: torch.dtype) -> Batch:
    """One row a sample, in the given order; log-probs in `dtype`, 0 for tokens that the model did not write."""
    leases = [sample.lease for sample in samples]
    ids = [sample.token_ids for sample in samples]
    response_ids = Ragged.from_rows(ids, torch.int64)
    return Batch(
        {
            "uid": torch.tensor([lease.uid for lease in leases], dtype=torch.int64),
            "group": torch.tensor([lease.position for lease in leases], dtype=torch.int64),
            "sample": torch.tensor([sample.episode.sample for sample in samples], dtype=torch.int64),
            "prompt_ids": Ragged.from_rows([lease.prompt_ids for lease in leases], torch.int64),
            "prompt_text": Ragged.from_texts([lease.prompt_text for lease in leases]),
            "task": Ragged.from_texts([lease.task for lease in leases]),
            "response_ids": response_ids,
            "response_mask": response_ids.like(_mask(samples, response_ids)),
            "response_text": Ragged.from_texts(_texts(samples, ids, tokenizer)),
            "rollout_logprobs": Ragged.from_rows([_logprobs(sample) for sample in samples], dtype),
            "policy_versions": _versions(samples),
            "finish_reason": torch.tensor([FINISH_REASONS.index(sample.finish_reason) for sample in samples]),
            **_further(samples),
        }
    )


def _mask(samples: Sequence[Trajectory], response_ids: Ragged) -> torch.Tensor:
    segments = [segment for sample in samples for segment in sample.segments]
    trained = torch.tensor([segment.trains for segment in segments], dtype=torch.bool)
    if trained.all():
        return torch.ones_like(response_ids.values, dtype=torch.bool)
    return trained.repeat_interleave(torch.tensor([len(segment.token_ids) for segment in segments]))


def _texts(samples: Sequence[Trajectory], ids: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[str]:
    """Of whole responses: those of single turns are known."""
    several = [number for number, sample in enumerate(samples) if len(sample.segments) > 1]
    decoded = dict(zip(several, tokenizer.decode_batch([ids[n] for n in several], skip_special=True), strict=True))
    return [decoded[n] if n in decoded else sample.texts[0] for n, sample in enumerate(samples)]


def _logprobs(sample: Trajectory) -> Sequence[float]:
    if len(sample.segments) == 1:
        return sample.segments[0].logprobs
    return [logprob for segment in sample.segments for logprob in segment.logprobs or [0.0] * len(segment.token_ids)]


def _versions(samples: Sequence[Trajectory]) -> Ragged:
    rows = [_spans(sample.segments) for sample in samples]
    counts = torch.tensor([0, *map(len, rows)], dtype=torch.int64)
    values = torch.tensor([tuple(span) for row in rows for span in row], dtype=torch.int64).view(-1, 4)
    return Ragged(values, counts.cumsum(0))


def _spans(segments: Sequence[Segment]) -> Sequence[Span]:
    if len(segments) == 1:
        return segments[0].spans
    return joined((segment.spans, len(segment.token_ids)) for segment in segments)


def _further(samples: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """What the step returned for each sample."""
    names = samples[0].fields if samples else ()
    return {name: torch.tensor([float(sample.fields[name]) for sample in samples]) for name in names}
