"""The engine in plain torch: continuous batching over slots, for any causal language model of attention or recurrence.

A poll decodes one token for every running sample, also reads the prompts of the groups that fit in, and draws the next
token of all of them together. New weights are swapped in between two polls; running samples keep the keys and values
that older weights computed (as in PipelineRL, arXiv:2509.19128), and each token's version is reported. The tokens of a
sample depend only on its request and the weights (see `sampler`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distflow.config.plugins import ENGINES, PluginUse
from distflow.errors import UserError
from distflow.flow.families import refuse_family
from distflow.runtime.protocols import EngineSpec
from distflow.types import RequestKey, SampleOutput, SampleRequest, Version
from distflow.weights.canary import Rows
from distflow.workers.engines.decoder import CacheShape, Decoder, PromptBatch, SlotCache, TokenBatch
from distflow.workers.engines.kernels import FastKernels, InvariantKernels
from distflow.workers.engines.llama_decoder import LlamaDecoder, is_llama_like
from distflow.workers.engines.module_decoder import ModuleDecoder, cache_shape
from distflow.workers.engines.sampler import SlotSampler
from distflow.workers.engines.samples import RequestLimits, Sample
from distflow.workers.engines.scheduler import Part, Scheduler
from distflow.workers.engines.torch_options import TorchEngineOptions
from distflow.workers.merging import AdapterTable, adapted_weights
from distflow.workers.models import build_model
from distflow.workers.offload import Offloader, bytes_on
from distflow.workers.parameters import ParameterTable, constants_of, stored_model


class TorchEngine:
    """Implements `distflow.runtime.protocols.Engine`. Serves nothing until the first complete update."""

    def __init__(self, spec: EngineSpec) -> None:
        options = TorchEngineOptions.parse(spec.options)
        options.check(PluginUse(spec.model, spec.device, pool=spec.pool, deterministic=spec.deterministic))
        if spec.slots < 1:
            raise UserError(f"engine torch: {spec.slots} slots; expected at least 1")
        self.device = torch.device(spec.device)
        adapts = spec.model.get("lora") is not None
        self.model: Any = build_model(
            spec.model, device=spec.device, seed=spec.seed, load_weights=adapts, deterministic=spec.deterministic
        )
        text = self.model.config.get_text_config()
        refuse_family(PluginUse(spec.model, spec.device, config=text.to_dict()), ENGINES["torch"])
        self.limits = RequestLimits.of(self.model.config, spec.max_tokens)
        parameters = {**dict(self.model.named_parameters()), **constants_of(self.model)}
        self.weights: ParameterTable
        if adapts:
            self.weights = AdapterTable(adapted_weights(parameters, spec.model), spec.model["lora"])
        else:
            self.weights = ParameterTable(parameters, stored_model(spec.model))
            self.weights.poison()
        self.schedule = Scheduler(spec.slots, options.prefill_tokens)
        self.tells_filtered = spec.filtered_logprobs
        self.sampler = SlotSampler(spec.slots, self.device, as_trained=spec.deterministic)
        self.lean = options.decoder == "auto" and is_llama_like(self.model)
        self.kernels = InvariantKernels(self.model) if spec.deterministic else FastKernels()
        shape = CacheShape.of_attention(self.model) if self.lean else cache_shape(self.model)
        self.cache = SlotCache(shape, spec.slots, self.kernels.width(self.limits.max_tokens), self.device)
        self.decoder: Decoder | None = self._make_decoder()
        self.shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        self.offloader = Offloader(self.device)
        self.offloaded = False
        self.filtered = self.greedy = self.shifted = False

    @property
    def free_slots(self) -> int:
        """Samples that could start now."""
        return self.schedule.free_slots

    @property
    def version(self) -> Version | None:
        """Weights in use; None before the first complete update, and while one is under way."""
        return self.weights.version

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue samples; raises ValueError naming the position and the limit for one that can never run.

        Nothing is queued if one of them is refused.
        """
        self.limits.check_all(requests, self.schedule.here)
        self.schedule.add(requests)

    @torch.inference_mode()
    def poll(self) -> list[SampleOutput]:
        """Start what fits, draw one token for every running sample, return the samples that finished."""
        version = self.weights.version
        if version is None:
            return []
        assert not self.offloaded, "an offloaded engine was polled; call onload first"
        assert self.decoder is not None, "onload makes it"
        parts = self.schedule.admit()
        logits = [self._decode(self.decoder)] if self.schedule.running else []
        if parts:
            logits.append(self._prefill(self.decoder, parts, version))
        if not logits:
            return []
        about = {"filtered": self.filtered, "greedy": self.greedy, "shifted": self.shifted}
        drawn = self.sampler.draw(torch.cat(logits), **about)
        wanted = [drawn.filtered_N] if (self.filtered or self.shifted) and self.tells_filtered else []
        # A single copy to the host: token ids are exact in float64.
        tokens, logprobs, *filtered = torch.stack([drawn.tokens_N.double(), drawn.logprobs_N, *wanted]).tolist()
        finished = self.schedule.record([int(token) for token in tokens], logprobs, *filtered)
        outputs = [self.schedule.running[slot].output(reason) for slot, reason in finished.items()]
        self._release(finished)
        return outputs

    def begin_update(self, version: Version) -> None:
        """Start replacing the weights; `poll` serves nothing until `end_update`."""
        self.weights.begin(version)
        if self.decoder is not None:
            self.decoder.forget()

    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy these named parameters in; raises KeyError for an unknown name, ValueError for a wrong shape."""
        self.weights.update(tensors)

    def end_update(self) -> None:
        """Complete the update: tokens from here on carry the new version. Raises ValueError if weights are missing."""
        self.schedule.use_version(self.weights.end())

    @property
    def precision(self) -> str:
        """The dtype it computes in."""
        return str(self.model.dtype).removeprefix("torch.")

    @torch.inference_mode()
    def logprobs(self, rows: Rows) -> list[list[float]]:
        """Log-prob (nats, temperature 1) of every token but the first of each row, all of one length."""
        assert self.decoder is not None, "called after an update, when the engine is on its device"
        tokens_PL = torch.tensor(rows).to(self.device)
        logits_PLV = self.decoder.score(tokens_PL)[:, :-1]
        found_PL = logits_PLV.double().log_softmax(-1).gather(-1, tokens_PL[:, 1:, None]).squeeze(-1)
        found: list[list[float]] = found_PL.tolist()
        return found

    @torch.inference_mode()
    def abort(self, positions: Iterable[int]) -> list[SampleOutput]:
        """Drop these groups (unknown ones are ignored); returns what their running samples had produced."""
        slots = self.schedule.forget(self.schedule.of(set(positions)))
        partials = [self.schedule.running[slot].output("abort") for slot in slots]
        self._release(slots)
        return partials

    @torch.inference_mode()
    def withdraw(self, requests: Collection[RequestKey]) -> None:
        """Drop these requests; unknown ones are ignored."""
        self._release(self.schedule.forget(set(requests)))

    def partials(self) -> list[SampleOutput]:
        """What every running sample has produced so far, with finish_reason abort; they run on."""
        return [sample.output("abort") for sample in self.schedule.running]

    def tokens_after(self, had: Mapping[RequestKey, int]) -> Mapping[RequestKey, Sequence[int]]:
        """Return the response's tokens from that number on, of those of these requests that run."""
        return self.schedule.tokens_after(had)

    def progress(self) -> Mapping[int, int]:
        """Tokens sampled so far by the samples that are queued or running, summed by prompt position."""
        return self.schedule.progress()

    def offload(self) -> None:
        """Free the device's memory: complete weights and the cache of running samples move to the host.

        Incomplete weights, unless a base is kept, and the rest of the cache are dropped, and come back with the next
        update and `onload`. On a CPU complete weights stay where they are.
        """
        lengths = self.schedule.lengths() if self.schedule.running else [0]
        self.cache.cut(len(self.schedule.running), max(lengths))
        parameters = list(self.model.parameters())
        base = self.weights.kept()
        if self.weights.version is None and not base:
            for parameter in parameters:
                parameter.data = parameter.data.new_empty(0)
            parameters = []
        if self.decoder is not None:
            self.decoder.forget()
        if self.device.type != "cpu" or not parameters:
            # It holds the packed matrices that back the parameters.
            self.decoder = None
        self.offloader.put([*parameters, *base, *self.cache.tensors()])
        self.offloaded = True

    def onload(self) -> None:
        """Take the memory again; running samples go on. Dropped weights stay incomplete until the next update."""
        self.offloader.fetch()
        self.cache.grow_back()
        for name, parameter in self.model.named_parameters():
            if parameter.shape != self.shapes[name]:
                parameter.data = parameter.data.new_empty(self.shapes[name])
        if self.weights.unwritten:
            self.weights.poison()
        if self.decoder is None:
            self.decoder = self._make_decoder()
        self.offloaded = False

    def device_bytes(self) -> Mapping[str, int]:
        """Bytes on the device by purpose: weights, kv (the cache)."""
        return {
            "weights": bytes_on(self.device, [*self.model.parameters(), *self.weights.kept()]),
            "kv": bytes_on(self.device, self.cache.tensors()),
        }

    def close(self) -> None:
        """Give the memory back; a closed engine cannot be used again."""
        self.__dict__.clear()

    def _make_decoder(self) -> Decoder:
        if not self.lean:
            return ModuleDecoder(self.model, self.cache)
        return LlamaDecoder(self.model, self.cache, self.kernels)

    def _decode(self, decoder: Decoder) -> Tensor:
        running = len(self.schedule.running)
        lengths = list(self.schedule.lengths())
        width = self.kernels.width(max(lengths))
        sampler = self.sampler
        tokens_N, positions_N = sampler.tokens_S[:running], sampler.positions_S[:running]
        return decoder.decode(TokenBatch(tokens_N, positions_N, width, even=min(lengths) == width))

    def _prefill(self, decoder: Decoder, parts: Sequence[Part], version: Version) -> Tensor:
        start = len(self.schedule.running)
        samples = self.schedule.start(parts, version)
        self.sampler.place(start, [(s.request, len(s.before.token_ids)) for s in samples])
        self._note_settings()
        if self.shifted or self.sampler.shifts is not None:
            self._shift(samples, start)
        self.cache.reserve(self.kernels.width(max(sample.input_length + sample.remaining for sample in samples)))
        read = [part[0].input_ids for part in parts]
        lengths = tuple(map(len, read))
        rows = [tokens + [0] * (max(lengths) - len(tokens)) for tokens in read]
        tokens_PL = torch.tensor(rows).to(self.device)
        counts = torch.tensor([len(part) for part in parts])
        rows_N = torch.arange(len(parts)).repeat_interleave(counts).to(self.device)
        return decoder.prefill(PromptBatch(tokens_PL, lengths, rows_N, slice(start, start + len(samples))))

    def _shift(self, samples: Sequence[Sample], start: int) -> None:
        about = [(sample.request, sample.input_ids, len(sample.before.token_ids)) for sample in samples]
        self.sampler.shift(start, about, self.limits.vocabulary)

    def _release(self, slots: Collection[int]) -> None:
        if not slots:
            return
        targets, sources = self.schedule.release(slots)
        if targets:
            target, source = torch.tensor([targets, sources]).to(self.device)
            self.cache.move(target, source, max(self.schedule.lengths()))
            self.sampler.move(target, source)
        self._note_settings()

    def _note_settings(self) -> None:
        """Note whether any running sample needs filtered, greedy or shifted drawing; changes only as samples start and
        end."""
        running = {id(sample.request.params): sample.request.params for sample in self.schedule.running}.values()
        self.filtered = any(params.filters for params in running)
        self.greedy = any(params.temperature == 0 for params in running)
        self.shifted = any(params.shifts for params in running)
