"""What a plan says of models that are trained by low-rank adapters, and what it refuses of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distflow.config.schema import ModelConfig
from distflow.config.training_schema import LoraConfig
from distflow.errors import RecipeError
from distflow.flow.estimate import estimate, state_bytes
from distflow.flow.plan import Plan
from distflow.flow.plan_text import render_page
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.sizes import model_size
from distflow.launch.deploy.host_checks import problems_here

LORA = "models.policy.lora={rank: 8, alpha: 16}"
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def planned(*overrides: str) -> Plan:
    return plan_recipe("quickstart", [LORA, *overrides])[1]


def test_versions_of_smollm2_are_less_than_three_per_cent_of_it() -> None:
    size = model_size(ModelConfig(init=SMOLLM2, lora=LoraConfig(rank=8)))
    assert size.parameters == 134_515_008
    layer = 2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536)
    assert size.adapters == 30 * 8 * layer
    assert size.published < 0.03 * size.weights
    some = model_size(ModelConfig(init=SMOLLM2, lora=LoraConfig(rank=8, targets=["q_proj", "mlp.down_proj"])))
    assert some.adapters == 30 * 8 * (576 + 576 + 576 + 1536)


@pytest.mark.parametrize("backend", ["torch", "fsdp", "deepspeed"])
def test_memory_is_that_of_the_adapters(backend: str) -> None:
    """Gradients, moments, versions and checkpoints; of the weights there are those of both."""
    settings = ["layout=split", f"layout.pools.trainer.backend={backend}", "run.save_every=1"]
    plan, whole = planned(*settings), plan_recipe("quickstart", settings)[1]
    size = model_size(plan.recipe.models["policy"])
    rollout, _, trainer = (estimate(plan, worker, on_gpu=False) for worker in plan.workers)
    before = [estimate(whole, worker, on_gpu=False) for worker in whole.workers]
    assert trainer.weights == size.weights + size.published
    assert 0 < trainer.gradients <= 2 * size.published
    assert 0 < trainer.optimizer <= 3 * size.published
    assert trainer.shared == 3 * size.published < before[2].shared
    assert rollout.engine == before[0].engine + 4 * size.adapted
    assert state_bytes(size) == 3 * size.published


def test_a_reference_beside_the_policy_is_no_second_copy() -> None:
    plan = planned("flow=grpo_kl", "layout=split")
    assert "reference: computed by policy with its adapters off, in trainer: no copy" in render_page(plan)
    assert "policy: adapters of rank 8 on all-linear (0.09 MB a version" in render_page(plan)
    trainer = estimate(plan, plan.workers[2], on_gpu=False)
    size = model_size(plan.recipe.models["policy"])
    assert trainer.weights == size.weights + size.published


@pytest.mark.parametrize(
    "overrides",
    [["layout=services"], ["layout=split", "models.reference.dtype=bfloat16"]],
    ids=["in a pool of its own", "of another dtype"],
)
def test_elsewhere_the_reference_is_the_base(overrides: list[str]) -> None:
    plan = planned("flow=grpo_kl", *overrides)
    assert plan.recipe.models["reference"].lora is None
    assert "adapters off" not in render_page(plan)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["flow=ppo", "models.critic.lora.rank=4"], "models.critic.lora — a model with `head: value` has a new last l"),
        (["models.policy.lora.targets=[q_prj]"], "lora.targets — 'q_prj' is not the end of a .* did you mean 'q_proj'"),
        (["models.policy.lora.targets=[]"], "lora.targets — no layers are named, so nothing would be trained"),
        (["models.policy.lora.targets=all"], "models.policy.lora.targets"),
        (["models.policy.lora.rank=0"], "models.policy.lora.rank — 0 should be greater than or equal to 1"),
        (["models.policy.lora.dropout=0.1"], "models.policy.lora.dropout — unknown key"),
        (
            ["layout.pools.trainer.backend=distflow.testing.fakes:FakeBackend"],
            "layout.pools.trainer.backend — backend 'distflow.testing.fakes:FakeBackend' is not known to train",
        ),
        (
            ["layout.pools.rollout.engine=distflow.testing.fakes:FakeEngine"],
            "layout.pools.rollout.engine — engine 'distflow.testing.fakes:FakeEngine' is not known to take adapters",
        ),
        (["flow=grpo_kl", "models.reference.lora.rank=2"], "models.reference.lora — has no effect: no step trains"),
    ],
)
def test_what_adapters_do_not_go_with(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=f"command line: .*{message}"):
        planned("layout=split", *overrides)


def test_the_package_is_asked_for_where_models_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    from distflow.config import plugins

    lacking = replace(plugins.LIBRARIES["lora"], module="no_such_package")
    monkeypatch.setitem(plugins.LIBRARIES, "lora", lacking)  # type: ignore[arg-type]
    (problem,) = problems_here(planned("layout=split"), lambda key: "here")
    assert problem.key == "models.policy.lora"
    assert "needs the package 'no_such_package'" in str(problem)
    assert "peft" in str(problem)


def test_weights_of_4_bits_are_counted_where_they_are_kept() -> None:
    """The home and a copy elsewhere have them; engines have the base in the model's dtype."""
    model = "models.policy.init.hidden_size=512"
    narrow = planned("layout=services", "flow=grpo_kl", model, "models.policy.quantize=nf4")
    whole = planned("layout=services", "flow=grpo_kl", model)
    size = model_size(narrow.recipe.models["policy"])
    assert size.narrow == 2 * (4 * 512 * 512 - 2 * 512 * 256 + 3 * 512 * 256)
    spared = size.narrow * (4 - 0.5625)
    assert size.weights - size.held == pytest.approx(spared, abs=1)
    for worker, other in zip(narrow.workers, whole.workers, strict=True):
        now, then = (estimate(plan, one, on_gpu=False) for plan, one in ((narrow, worker), (whole, other)))
        assert then.weights - now.weights == pytest.approx(spared if worker.models else 0, abs=1)
        assert now.engine == then.engine
    assert narrow.recipe.models["reference"].quantize == "nf4", "the base is that of the policy"
    assert "engines load the base, its weights rounded to nf4, by themselves" in render_page(narrow)
    assert "policy: its base is new (init), and norms, embeddings and the output layer stay" in render_page(narrow)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["models.policy.lora=null"],
            "models.policy.quantize — model 'policy' is trained, and weights of 4 bits are fro",
        ),
        (
            ["layout.pools.trainer.backend=fsdp"],
            "nf4 with backend fsdp, which divides models: not built; backend: torch",
        ),
        (["layout.pools.trainer.zero=2", "layout.pools.trainer.backend=deepspeed"], "nf4 with backend deepspeed"),
        (["run.deterministic=true"], "model 'policy': weights of 4 bits are not computed batch-invariantly"),
        (
            ["flow=ppo", "models.critic={head: value, quantize: nf4}"],
            "model 'critic' is trained, and weights of 4 bits",
        ),
        (
            [
                "models.judge={head: score, quantize: nf4}",
                "flow.steps.reward={call: 'distflow.workers.reward_model:judge', model: judge}",
            ],
            "models.judge.quantize — a model with `head: score` keeps its dtype",
        ),
        (["models.policy.quantize=fp4"], "models.policy.quantize"),
    ],
)
def test_where_weights_of_4_bits_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        planned("layout=split", "models.policy.quantize=nf4", *overrides)
    assert message in str(refused.value)
