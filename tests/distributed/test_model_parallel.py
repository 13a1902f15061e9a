"""A model spread over a group by layers ends where the oracle ends, and comes back from its folder as plain
transformers.
"""

import os

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from fmmeta.config.settings import Config
from fmmeta.learners.load import describe, load_learner
from tests.support.matrix import (
    Case,
    Launches,
    ParityFixture,
    fast_and_slow_cases,
    is_classifier,
    selected,
    spread,
    spread_cover,
    spread_diagonal,
    tolerance,
)

CHOSEN = spread() if os.environ.get("FMMETA_PARITY") == "full" else spread_cover()


def kind_of(case: Case):
    return case.layout, case.stages, case.tensor


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return ParityFixture(tmp_path_factory.mktemp("spread"))


@pytest.fixture(scope="module")
def outcomes(request, bench):
    """theta and facts by case; the cases of a layout and kind run in one launch (DeepSpeed keeps the first
    kind's groups).
    """
    return Launches(bench, selected(request), kind_of).outcome


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", fast_and_slow_cases(spread_diagonal(), CHOSEN, kind_of))
def test_ends_where_the_oracle_ends_and_exports_to_transformers(case: Case, bench, outcomes):
    theta, facts = outcomes(case)
    assert bench.error(case, theta) < tolerance(case)
    assert (
        facts["start_off"] == 0
    )  # every stage holds the checkpoint's weights, also where a new head is drawn
    assert case.tensor == 1 or not facts["mapped"]  # nor is the whole checkpoint kept in memory
    assert facts["engine"] == ("PipelineWorker" if case.stages > 1 else "DeepSpeedWorker")
    assert facts["effects"] == {
        name: value
        for name, value in case.settings.items()
        if name not in ("lora_target_modules", "peft_config")
    }
    assert "group" in facts["checked"] or torch.cuda.is_available()  # under NCCL's rules
    if case.export:
        assert_export_gives_logits(bench, case, theta)


def assert_export_gives_logits(bench: ParityFixture, case: Case, theta: dict[str, torch.Tensor]) -> None:
    """The exported folder, read by plain transformers, gives the logits of theta; of adapters both they on
    their base, read by plain peft, and the merged model.
    """
    folder = bench.folder / f"out-{case.layout[0]}x{case.layout[1]}" / case.id
    config, adapters = Config(**bench.settings(case)), "lora_r" in case.settings
    learner = load_learner(config, describe(config)).eval()
    reset = learner.head_names if case.head != "learned" else ()  # starts with every task
    auto = AutoModelForSequenceClassification if is_classifier(case.model) else AutoModelForCausalLM
    loaded, report = auto.from_pretrained(
        folder / ("merged" if adapters else "model"), output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    models = [loaded]
    if adapters:
        size = {"num_labels": 5} if is_classifier(case.model) else {}
        base = auto.from_pretrained(config.model_name_or_path, ignore_mismatched_sizes=True, **size)
        models.append(PeftModel.from_pretrained(base, folder / "model"))
    ids = torch.randint(3, 259, (2, 12), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        for name in theta.keys() - {*reset}:
            learner.get_parameter(name).copy_(theta[name])
        for name in reset:  # zeros as saved, or the head of joint training: give both the same other head
            value = torch.randn(learner.get_parameter(name).shape)
            for model, own in ((learner, name), (loaded, name.removeprefix("hf."))):
                model.get_parameter(own).copy_(value)
        wanted = learner.logits(learner(**batch))
        for model in models:
            torch.testing.assert_close(model.eval()(**batch).logits, wanted, atol=1e-5, rtol=1e-5)
    assert float(wanted.std()) > 1e-3
