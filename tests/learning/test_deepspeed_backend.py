from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distflow.config.plugins import PluginUse
from distflow.errors import ReplicaLost, UserError
from distflow.runtime.checkpoint.format import Shard, put_together
from distflow.runtime.protocols import Backend, BackendSpec
from distflow.testing.backend_contract import BackendContract, ragged_batch, taken, tiny_model
from distflow.workers.backends import deepspeed_backend, deepspeed_config
from distflow.workers.backends.deepspeed_backend import DeepSpeedBackend
from distflow.workers.backends.deepspeed_config import DeepSpeedOptions, engine_config
from distflow.workers.backends.deepspeed_optimizer import ZeroOptimizer
from distflow.workers.backends.torch_backend import TorchBackend
from distflow.workers.parameters import stored_model
from tests.learning.processes import Job, leave_group, together
from tests.learning.zero_ranks import (
    BEHIND,
    CASES,
    SAVED_BEHIND,
    STEPS,
    Case,
    different,
    frozen,
    parts_of,
    train,
    trained,
)


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """ZeRO 3 collects garbage whenever a model is divided: exclude everything that was imported."""
    gc.freeze()
    yield
    gc.unfreeze()
    # A backend without other replicas makes a group of its own.
    if dist.is_initialized():
        leave_group(dist.destroy_process_group)


class _Stage(BackendContract):
    zero = 0

    # ZeRO keeps weights and moments in float32.
    dtype = "float32"
    whole_matrices = False
    rounding = 2e-6
    resumed_dtypes = ("float32", "bfloat16")

    def make_backend(self, spec: BackendSpec) -> Backend:
        options = {"zero": self.zero, **spec.options}
        backend = DeepSpeedBackend(
            BackendSpec(spec.model, spec.device, spec.trainable, spec.seed, spec.training_steps, options)
        )
        backend.join()
        return backend


class TestStage0(_Stage):
    zero = 0
    resumed_dtypes = ("float32",)  # without ZeRO, DeepSpeed adds bfloat16 gradients up in bfloat16


class TestStage1(_Stage):
    zero = 1


class TestStage2(_Stage):
    zero = 2


class TestStage3(_Stage):
    zero = 3


@pytest.mark.parametrize("lost_in", ["division", "step"])
def test_a_lost_replica_is_told_as_such(monkeypatch: pytest.MonkeyPatch, lost_in: str) -> None:
    """By an error of its own: the pool restarts from its last checkpoint."""

    def lose(*arguments: object) -> None:
        raise RuntimeError("[/somewhere/gloo/transport/tcp/pair.cc:534] Connection closed by peer")

    backend = DeepSpeedBackend(BackendSpec(tiny_model(dtype="float32"), "cpu", True, 0, 10, {"zero": 2}))
    if lost_in == "division":
        monkeypatch.setattr(deepspeed_backend, "make_engine", lose)
        with pytest.raises(ReplicaLost, match="lost while the model was divided: .*closed by peer"):
            backend.join()
        return
    backend.join()
    scores = backend.score(ragged_batch(), temperature=1.0, grad=True, entropy=False)
    backend.accumulate(scores.logprobs_BT.sum())
    monkeypatch.setattr(ZeroOptimizer, "apply", lose)
    with pytest.raises(ReplicaLost, match="lost while gradients were summed: .*closed by peer"):
        backend.apply(1.0)


def test_replicas_that_share_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = DeepSpeedBackend(BackendSpec(tiny_model(dtype="float32"), "cpu", True, 0, 10, {"zero": 2}))
    backend._device = torch.device("cuda:0")
    monkeypatch.setattr(DeepSpeedBackend, "_check_same_settings", lambda self: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    with pytest.raises(UserError, match="backend deepspeed: every training worker needs a GPU of its own; lower the"):
        backend.join()


class Replicas:
    """Results of two replicas, and of the torch backend alone with the samples of both."""

    def __init__(self, folder: Path) -> None:
        self.alone = {name: _alone(case) for name, case in CASES.items()}
        for name, seen in self.alone.items():
            torch.save(seen["state"], folder / f"{name}.pt")
        jobs: dict[str, Job] = {name: (trained, (name, folder)) for name in CASES}
        found = together(2, folder / "replicas", {**jobs, "different": (different, ()), "frozen": (frozen, ())})
        self.seen = [{name: seen[rank] for name, seen in found.items()} for rank in range(2)]

    def whole(self, case: str, what: str) -> dict[str, torch.Tensor]:
        """A whole state, from the shards of both replicas."""
        return put_together(Shard(*shard) for seen in self.seen for shard in seen[case][what])


def _alone(case: Case) -> dict[str, Any]:
    backend = TorchBackend(BackendSpec(case.section(), "cpu", True, 0, 6, {"packed": case.options.get("packed", True)}))
    seen: dict[str, Any] = {"norms": [], "rates": []}
    for step in range(STEPS):
        if step == SAVED_BEHIND:
            seen["state"] = taken(backend)
        parts = [part for own in parts_of(step) for part in own]
        seen["rates"].append(backend.learning_rate)
        seen["norms"].append(train(backend, step, parts, len(parts)))
    seen["final"] = taken(backend)
    parts = [part for own in parts_of(BEHIND) for part in own]
    seen["norm behind"] = train(backend, BEHIND, parts, len(parts))
    seen["behind"] = taken(backend)
    return seen


def _assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Within 1e-5; half-precision weights may be rounded the other way."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        half = tensor.dtype == torch.bfloat16
        rtol, atol = (1e-2, 1e-5) if half else (1e-5, 1e-5)
        torch.testing.assert_close(
            found[name], tensor, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Replicas:
    return Replicas(tmp_path_factory.mktemp("zero"))


each_case = pytest.mark.parametrize("case", CASES)


@each_case
def test_two_replicas_step_as_torch_does_alone(replicas: Replicas, case: str) -> None:
    alone = replicas.alone[case]
    for seen in replicas.seen:
        assert seen[case]["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert seen[case]["rates"] == alone["rates"]
    assert max(alone["norms"]) > 0.3, "gradients are clipped"
    _assert_same(replicas.whole(case, "final"), alone["final"])


@each_case
def test_torch_goes_on_from_the_state_of_two_replicas(replicas: Replicas, case: str) -> None:
    backend = TorchBackend(BackendSpec(CASES[case].section(), "cpu", True, 0, 6, {}))
    backend.load_state(replicas.whole(case, "state"))
    parts = [part for own in parts_of(SAVED_BEHIND) for part in own]
    norm = train(backend, SAVED_BEHIND, parts, len(parts))
    assert norm == pytest.approx(replicas.seen[0][case]["norms"][SAVED_BEHIND], rel=1e-5)
    _assert_same(taken(backend), replicas.whole(case, "final"))


@each_case
def test_two_replicas_go_on_from_the_state_of_torch(replicas: Replicas, case: str) -> None:
    alone = replicas.alone[case]
    for seen in replicas.seen:
        assert seen[case]["resumed norm"] == pytest.approx(alone["norms"][SAVED_BEHIND], rel=1e-5)
    _assert_same(replicas.whole(case, "resumed"), alone["final"])


@each_case
def test_both_replicas_publish_the_same_weights(replicas: Replicas, case: str) -> None:
    first, second = (seen[case]["weights"] for seen in replicas.seen)
    final, stored = replicas.whole(case, "final"), stored_model(CASES[case].section())
    saved = {name.removeprefix("model."): tensor for name, tensor in final.items() if name.startswith("model.")}
    cut = {part: tensor for name in saved if name in stored.tensors for part, tensor in stored.cut(name, saved[name])}
    expected = saved if "lora" in case else cut
    assert all(name.endswith(("lora_A.weight", "lora_B.weight")) for name in expected) == ("lora" in case)
    assert first.keys() == second.keys() == expected.keys()
    assert any(".experts.2." in name for name in expected) == ("experts" in case)
    for name, tensor in expected.items():
        assert tensor.equal(first[name])
        assert tensor.equal(second[name])


@each_case
def test_a_norm_that_is_not_finite_is_skipped_by_all_replicas_alike(replicas: Replicas, case: str) -> None:
    """One of them alone has it. Nothing changes, and the step behind it is that of one replica that never saw it."""
    alone = replicas.alone[case]
    for seen in replicas.seen:
        assert math.isnan(seen[case]["skipped norm"])
        assert all(tensor.equal(seen[case]["weights"][name]) for name, tensor in seen[case]["skipped"].items())
        assert seen[case]["norm behind"] == pytest.approx(alone["norm behind"], rel=1e-5)
    _assert_same(replicas.whole(case, "behind"), alone["behind"])


def test_stages_that_communicate_within_a_pass_are_in_lockstep(replicas: Replicas) -> None:
    assert {name: replicas.seen[0][name]["lockstep"] for name in CASES} == {
        name: case.options["zero"] >= 2 for name, case in CASES.items()
    }


def test_replicas_with_different_options_are_refused(replicas: Replicas) -> None:
    for seen in replicas.seen:
        assert "the 2 training replicas have different backend_options" in seen["different"]


def test_a_frozen_model_can_be_divided_too(replicas: Replicas) -> None:
    plain = TorchBackend(BackendSpec(CASES["3"].section(), "cpu", False, 0, 6, {}))
    expected = plain.score(ragged_batch(), temperature=0.9, grad=False, entropy=False).logprobs_BT
    torch.testing.assert_close(replicas.seen[0]["frozen"]["scores"], expected, rtol=0, atol=1e-5)
    for seen in replicas.seen:
        assert seen["frozen"]["lockstep"]
        assert all(tensor.equal(seen["frozen"]["weights"][name]) for name, tensor in plain.named_shards())


def _config(model: Mapping[str, Any] | None = None, *, trainable: bool = True, **options: Any) -> dict[str, Any]:
    section = tiny_model(**{"dtype": "float32", "optimizer": {"max_grad_norm": 1.0}, **(model or {})})
    use = PluginUse(section, "cpu", model_name="policy", pool="trainer", trained=trainable)
    return engine_config(DeepSpeedOptions.parse(options), use)


REFUSED = [
    ({"zero": 4}, "backend_options.zero 4: expected a ZeRO stage, 0, 1, 2 or 3"),
    ({"zero": True}, "backend_options.zero True: expected a ZeRO stage"),
    (
        {"stage": 2},
        "stage 2: backend deepspeed has no such option — allowed: ds_config, offload_optimizer, packed, zero",
    ),
    ({"packed": 1}, "packed 1: expected true or false"),
    ({"ds_config": "ds.json"}, "ds_config 'ds.json': expected a mapping"),
    ({"zero": 0, "offload_optimizer": True}, "offload_optimizer needs zero ≥ 1"),
    ({"ds_config": {"train_batch_size": 64}}, r"train_batch_size 64: the recipe decides .*batch.prompts.*remove it"),
    ({"ds_config": {"gradient_accumulation_steps": 1}}, "gradient_accumulation_steps 1: the recipe decides"),
    (
        {"ds_config": {"gradient_clipping": 0.5}},
        r"gradient_clipping 0.5: models.policy.optimizer.max_grad_norm is 1.0; remove it .*or set models",
    ),
    ({"ds_config": {"optimizer": {"type": "Lamb"}}}, r"optimizer.type 'Lamb': models.policy.optimizer.name is 'AdamW'"),
    ({"ds_config": {"optimizer": {"params": {"lr": 1e-3}}}}, r"params.lr 0.001: models.policy.optimizer.lr is 0.01"),
    ({"ds_config": {"optimizer": {"params": {"betas": [0.9, 0.999]}}}}, r"betas \[0.9, 0.999\]: .*is \[0.9, 0.95\]"),
    (
        {"ds_config": {"scheduler": {"type": "WarmupLR"}}},
        r"scheduler.type 'WarmupLR': models.policy.optimizer.schedule 'constant' with warmup_steps 0 decides",
    ),
    ({"ds_config": {"bf16": {"enabled": True}}}, r"bf16.enabled True: models.policy.dtype is 'float32'"),
    ({"ds_config": {"fp16": {"enabled": True}}}, r"fp16.enabled True: models.policy.dtype is 'float32'"),
    ({"ds_config": {"zero_optimization": {"stage": 3}}}, r"stage 3: backend_options.zero is 2; remove it"),
    (
        {"ds_config": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}},
        r"device 'nvme': backend_options.offload_optimizer is 'none'",
    ),
    ({"ds_config": {"zero_optimization": {"reduce_scatter": False}}}, "reduce_scatter False: this backend needs True"),
    (
        {"ds_config": {"zero_optimization": {"stage3_prefetch_bucket_size": 5}}},
        "stage3_prefetch_bucket_size 5: used by ZeRO stages 3 only, and backend_options.zero is 2",
    ),
    (
        {"ds_config": {"zero_optimization": {"reduce_bucket_size": 5e8}}},
        r"reduce_bucket_size 500000000.0: expected a whole number",
    ),
    (
        {"ds_config": {"zero_optimization": {"reduce_bucket_sise": 5}}},
        r"reduce_bucket_sise 5: this backend does not pass it on; did you mean 'zero_optimization.reduce_bucket_size'",
    ),
    (
        {"ds_config": {"zero_optimizaton": {"reduce_bucket_sizes": "auto"}}},
        r"reduce_bucket_sizes 'auto': .*pass it on; did you mean 'zero_optimization.reduce_bucket_size'",
    ),
    ({"ds_config": {"steps_per_print": 0}}, "steps_per_print 0: expected a whole number ≥ 1"),
    (
        {"ds_config": {"zero_optimization": {"reduce_bucket_size": 0}}},
        "reduce_bucket_size 0: expected a whole number ≥ 1",
    ),
    (
        {"zero": 3, "ds_config": {"zero_optimization": {"stage3_prefetch_bucket_size": -1}}},
        "stage3_prefetch_bucket_size -1: expected a whole number ≥ 0",
    ),
    (
        {"ds_config": {"zero_optimization": {"offload_optimizer": {"pin_memory": True}}}},
        "pin_memory True: used with backend_options.offload_optimizer only, which is false; remove it",
    ),
    ({"ds_config": {"foo": "auto"}}, "ds_config.foo 'auto': this backend does not pass it on"),
    ({"ds_config": {"optimizr": {}}}, r"ds_config.optimizr {}: .*pass it on; did you mean 'optimizer'"),
    ({"ds_config": {"zenflow": {"topk_ratio": 0.1}}}, "zenflow.topk_ratio 0.1: this backend does not pass it on"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_against_the_recipe_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _config(**options)


@pytest.mark.parametrize(
    ("dtype", "zero", "cure"),
    [("float64", 2, "use float32 or bfloat16"), ("float16", 3, "use bfloat16"), ("bfloat16", 0, "zero: 1")],
)
def test_dtypes_that_deepspeed_cannot_do_exactly_are_refused(dtype: str, zero: int, cure: str) -> None:
    with pytest.raises(UserError, match=rf"models.policy.dtype — {dtype} with .*{cure}"):
        _config({"dtype": dtype}, zero=zero)


def test_a_ds_config_may_repeat_the_recipe_and_tune_the_rest() -> None:
    ds_config = {
        "train_batch_size": "auto",
        "gradient_clipping": 1,
        "bf16": {"enabled": "auto"},
        "scheduler": {"type": "auto", "params": {"warmup_num_steps": "auto"}},
        "fp16": {},
        "optimizer": {"type": "adamw", "params": {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": "auto"}},
        "zero_optimization": {
            "stage": 3,
            "reduce_scatter": True,
            "stage3_prefetch_bucket_size": 7,
            "overlap_comm": True,
        },
    }
    config = _config(zero=3, ds_config=ds_config)
    assert config["zero_optimization"]["stage3_prefetch_bucket_size"] == 7
    assert config["zero_optimization"]["overlap_comm"] is True
    assert "optimizer" not in config
    assert config["gradient_clipping"] == 0, "clipped by the backend, once"


def test_a_frozen_model_is_not_asked_for_its_optimizer() -> None:
    assert _config(trainable=False, ds_config={"gradient_clipping": 0.1})["gradient_clipping"] == 0


def test_what_deepspeed_itself_refuses_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version may refuse values that our own checks accept: here they accept a size of 0."""
    monkeypatch.setattr(deepspeed_config, "_SIZES", ())
    options = {"zero": 2, "ds_config": {"zero_optimization": {"reduce_bucket_size": 0}}}
    backend = DeepSpeedBackend(BackendSpec(tiny_model(dtype="float32"), "cpu", True, 0, 10, options))
    with pytest.raises(UserError, match=r"DeepSpeed refuses backend_options.ds_config: (.|\n)*reduce_bucket_size"):
        backend.join()
