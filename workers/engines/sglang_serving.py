"""The loop of SGLang's process: takes samples, returns tokens, swaps weights in between two decode steps."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)

from distflow.workers.engines.samples import VersionStart
from distflow.workers.engines.sglang_updates import CallRefused, GroupUpdates, MappedUpdates, check
from distflow.workers.engines.sglang_wire import Frames, Message, frame

_CHUNK = 1 << 20
SCORE_S = 60.0
"""Limit for scoring given tokens, for which the worker does not wait: running samples may fill the memory until one of
them ends."""
IDLE_S = 60.0
"""Limit for aborted samples to end, before memory is released."""


class Serving:
    """Serves one worker until it closes the connection. `manager` is SGLang's TokenizerManager.

    `updates` loads weights into SGLang's processes.
    """

    def __init__(
        self, manager: Any, updates: MappedUpdates | GroupUpdates, line: socket.socket, frames: Frames
    ) -> None:
        self._manager = manager
        self._updates = updates
        self._line = line
        self._frames = frames
        self._version = (0, 0)
        self._starts: dict[str, list[VersionStart]] = {}
        """By sample: the versions in use, each with the number of tokens there were when it came into use."""
        self._unwanted: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._rows: list[list[Any]] = []
        self._others: list[Message] = []
        self._something = asyncio.Event()
        self._actions: dict[str, Callable[[Message], Awaitable[Message | None]]] = {
            "load": self._load,
            "score": self._score,
            "release": self._release,
            "resume": self._resume,
        }

    async def serve(self) -> None:
        """Run until the worker closes the connection."""
        loop = asyncio.get_running_loop()
        sending = loop.create_task(self._send())
        while not sending.done():
            data = await loop.sock_recv(self._line, _CHUNK)
            if not data:
                break
            for message in self._frames.feed(data):
                self._take(message)
        sending.cancel()

    def _take(self, message: Message) -> None:
        if message["do"] == "generate":
            for sample in message["samples"]:
                self._spawn(self._generate(sample))
        elif message["do"] == "abort":
            for rid in message["rids"]:
                self._unwanted |= {rid} & self._starts.keys()
                self._manager.abort_request(rid)
        else:
            self._spawn(self._answer(message))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self) -> None:
        """Send whatever has accumulated, in one call."""
        loop = asyncio.get_running_loop()
        while True:
            await self._something.wait()
            self._something.clear()
            rows, self._rows = self._rows, []
            others, self._others = self._others, []
            messages = [*([{"tokens": rows}] if rows else []), *others]
            await loop.sock_sendall(self._line, b"".join(map(frame, messages)))

    def _tell(self, message: Message) -> None:
        self._others.append(message)
        self._something.set()

    async def _generate(self, sample: Message) -> None:
        rid = sample["rid"]
        self._starts[rid] = [(*self._version, 0)]
        try:
            request = GenerateReqInput(
                rid=rid,
                input_ids=sample["ids"],
                sampling_params=sample["params"],
                return_logprob=True,
                return_sampling_mask=sample["filtered"],
                stream=True,
                # The prefix cache is shared by requests of the same version only.
                extra_key=sample["cache_salt"],
            )
            async for chunk in self._manager.generate_request(request, None):
                self._pass_on(rid, chunk, sample["filtered"])
        except ValueError as error:
            self._tell({"lost": rid, "text": str(error)})
        except Exception as error:
            # The top of this task: the worker must learn of whatever ends it, or it would wait forever.
            self._tell({"lost": rid, "text": repr(error)})
        finally:
            del self._starts[rid]
            self._unwanted.discard(rid)

    def _pass_on(self, rid: str, chunk: Message, filtered: bool) -> None:
        about = chunk["meta_info"]
        finish = "" if about["finish_reason"] is None else about["finish_reason"]["type"]
        if rid in self._unwanted:
            if not finish:
                # It was aborted before SGLang knew of it.
                self._manager.abort_request(rid)
            return
        if finish == "abort":
            self._tell({"lost": rid, "text": about["finish_reason"].get("message", "")})
            return
        if finish and "weight_versions" in about:
            # SGLang's own, exact count.
            self._starts[rid] = [(*_parse(span["version"]), span["start"]) for span in about["weight_versions"]]
        # These are after temperature and before any filter, whatever is asked for.
        logprobs = [logprob for logprob, *_ in about["output_token_logprobs"]]
        of_filtered = [list(about["output_token_sampling_logprobs"])] if filtered else []
        self._rows.append([rid, list(chunk["output_ids"]), logprobs, self._starts[rid], finish, *of_filtered])
        self._something.set()

    async def _answer(self, message: Message) -> None:
        try:
            answer = await self._actions[message["do"]](message)
        except CallRefused as error:
            self._tell({"failed": message["ask"], "text": str(error)})
        except Exception as error:
            # The top of this task, as in `_generate`.
            self._tell({"failed": message["ask"], "text": repr(error)})
        else:
            self._tell({"done": message["ask"], **(answer or {})})

    async def _load(self, message: Message) -> None:
        """Swap weights in mid-sample; samples go on with the keys and values that older weights computed."""
        manager = self._manager
        await manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        # Its answer arrives after all tokens drawn so far.
        check("begin_weight_update", await manager.begin_weight_update(BeginWeightUpdateReqInput(), None))
        self._use_version(tuple(message["version"]))
        await self._updates.load(message["staged"], "{}.{}".format(*message["version"]))
        check("end_weight_update", await manager.end_weight_update(EndWeightUpdateReqInput(), None))
        await manager.continue_generation(ContinueGenerationReqInput())

    async def _score(self, message: Message) -> Message:
        """Score row by row, in the one slot that samples leave free; None if there is no memory for it in time."""
        # No sample has such a name.
        name = f"score-{message['ask']}-"
        try:
            async with asyncio.timeout(SCORE_S):
                rows = enumerate(message["rows"])
                return {"logprobs": [await self._logprobs(f"{name}{number}", row) for number, row in rows]}
        except TimeoutError:
            # SGLang aborts by prefix.
            self._manager.abort_request(name)
            return {"logprobs": None}

    async def _logprobs(self, name: str, row: list[int]) -> list[float]:
        request = GenerateReqInput(
            rid=name,
            input_ids=row,
            sampling_params={"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
            # A key of its own: nothing that other weights computed may be found in the prefix cache.
            extra_key=name,
        )
        answers = [answer async for answer in self._manager.generate_request(request, None)]
        return [logprob for logprob, *_ in answers[-1]["meta_info"]["input_token_logprobs"][1:]]

    def _use_version(self, version: tuple[int, int]) -> None:
        """Tokens from here on come from this version; those not reported yet count as older, if in doubt."""
        self._version = version
        for rid, starts in self._starts.items():
            state = self._manager.rid_to_state.get(rid)
            produced = 0 if state is None else len(state.output_ids)
            late = self._manager.config_value("stream_interval") - 1 if produced else 0
            while starts and starts[-1][2] >= produced + late:
                starts.pop()
            starts.append((*version, produced + late))

    async def _release(self, message: Message) -> None:
        waiting = [task for task in self._tasks if task is not asyncio.current_task()]
        if waiting and (await asyncio.wait(waiting, timeout=IDLE_S))[1]:
            raise CallRefused(f"aborted samples did not end within {IDLE_S:.0f} s, so no memory was released")
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(), None)

    async def _resume(self, message: Message) -> None:
        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(), None)


def _parse(version: str) -> tuple[int, int]:
    term, _, number = version.partition(".")
    return int(term), int(number)
