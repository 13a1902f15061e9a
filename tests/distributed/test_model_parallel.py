"""A model spread over a group by layers ends where the oracle ends, and comes back from its folder as plain
transformers.
"""

import os

import pytest
import torch
import transformers
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
    """The exported folder, read by plain transformers, gives the logits of theta."""
    if "lora_r" in case.settings:
        return assert_adapters_give_logits(bench, case, theta)
    folder = bench.folder / f"out-{case.layout[0]}x{case.layout[1]}" / case.id / "model"
    config = Config(**bench.settings(case))
    learner = load_learner(config, describe(config)).eval()
    with torch.no_grad():
        for name, value in theta.items():
            if name in learner.head_names and case.head != "learned":
                continue  # starts with every task; that of joint training has other classes
            learner.get_parameter(name).copy_(value)
    auto = AutoModelForSequenceClassification if is_classifier(case.model) else AutoModelForCausalLM
    plain, report = auto.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = torch.randint(3, 259, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        for name in (
            learner.head_names if case.head != "learned" else ()
        ):  # zeros as saved: give both the same other head
            value = torch.randn(learner.get_parameter(name).shape)
            learner.get_parameter(name).copy_(value)
            plain.get_parameter(name.removeprefix("hf.")).copy_(value)
        found, wanted = (
            plain.eval()(input_ids=ids, attention_mask=mask).logits,
            learner.logits(learner(input_ids=ids, attention_mask=mask)),
        )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert float(wanted.std()) > 1e-3


def assert_adapters_give_logits(bench: ParityFixture, case: Case, theta: dict[str, torch.Tensor]) -> None:
    """The exported adapters on their base, by plain peft, and the merged model, by plain transformers, give
    theta's logits.
    """
    from peft import PeftModel

    folder = bench.folder / f"out-{case.layout[0]}x{case.layout[1]}" / case.id
    config = Config(**bench.settings(case))
    learner = load_learner(config, describe(config)).eval()
    with torch.no_grad():
        for name, value in theta.items():
            learner.get_parameter(name).copy_(value)
    encoder = is_classifier(case.model)
    auto = getattr(transformers, "AutoModelForSequenceClassification" if encoder else "AutoModelForCausalLM")
    base = auto.from_pretrained(
        config.model_name_or_path, ignore_mismatched_sizes=True, **({"num_labels": 5} if encoder else {})
    )
    ids = torch.randint(3, 259, (2, 12), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        wanted = learner.logits(learner(**batch))
        for model in (
            PeftModel.from_pretrained(base, folder / "model"),
            auto.from_pretrained(folder / "merged"),
        ):
            torch.testing.assert_close(model.eval()(**batch).logits, wanted, atol=1e-5, rtol=1e-5)
    assert float(wanted.std()) > 1e-3
