"""Adapters over 4-bit and 8-bit bases end where the oracle ends on the dequantised base, on every layout, and
adapt, answer and resume as others do.
"""

import json

import pytest
import torch
import transformers

from fmmeta import Config
from tests.support.helpers import fast_or_slow
from tests.support.matrix import ALSO, CLASSIFIER, Case, ParityFixture, selected, tolerance
from tests.support.messages import check_message, refusal
from tests.support.models import save
from tests.support.ranks import built, on_ranks

pytest.importorskip("bitsandbytes")
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
KINDS = {
    "nf4": NF4,
    "double": {**NF4, "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
# layout, stage, algorithm, kind, dtype, outer, head, also
FAST = [
    ((1, 1), "plain", "maml-adapters", "nf4", "fp32", "sgd", "zero", "lora"),
    ((2, 1), "plain", "reptile", "double", "fp32", "sgd", "zero", "lora"),
    ((2, 1), "plain", "fomaml", "on-the-fly", "fp32", "sgd", "zero", "on-the-fly"),
    ((1, 2), 1, "maml", "fp4", "fp32", "sgd", "zero", "lora"),
    ((1, 2), 2, "maml", "nf4", "fp32", "sgd", "zero", "both"),
]
SLOW = [
    ((1, 1), "plain", "maml", "int8", "fp32", "adamw", "zero", "lora-linear"),
    ((1, 1), "plain", "fomaml", "nf4", "bf16", "sgd", "zero", "lora"),
    ((2, 1), "plain", "anil", f"{CLASSIFIER}-nf4", "fp32", "adamw", "learned", "lora"),
    ((1, 2), 0, "imaml", "nf4", "fp32", "sgd", "zero", "lora-linear"),
    ((1, 2), 2, "fomaml", "int8", "fp32", "adamw", "zero", "lora-linear"),
    ((1, 2), 2, "fomaml", "nf4", "bf16", "adamw", "zero", "lora"),
    ((2, 2), 0, "fomaml", "nf4", "fp32", "sgd", "zero", "multi_task"),
    ((2, 2), 1, "meta_sgd", "nf4", "fp32", "sgd", "zero", "lora"),
    ((2, 2), 2, "proto_maml", f"{CLASSIFIER}-nf4", "fp32", "sgd", "prototype", "lora"),
    ((2, 2), 2, "boil", f"{CLASSIFIER}-int8", "fp32", "sgd", "learned", "lora"),
]
CASES = [
    Case.of_row(layout, stage, algorithm, kind, dtype, outer, head, also)
    for layout, stage, algorithm, kind, dtype, outer, head, also in [*FAST, *SLOW]
]


class QuantizedFixture(ParityFixture):
    """The reference reads the base that transformers has dequantised."""

    def _model(self, name):
        kind, full = name.removeprefix(f"{CLASSIFIER}-"), super()._model("llama")
        if kind in ("llama", "on-the-fly"):
            return full
        model = transformers.AutoModelForCausalLM.from_pretrained(
            full, quantization_config=transformers.BitsAndBytesConfig(**KINDS[kind])
        )
        return save(model, self.folder / name)

    def _reference(self, settings, counted="[]"):
        given = json.loads(settings)
        on_the_fly = given.pop("load_in_4bit", False)
        how = {"quantization_config": transformers.BitsAndBytesConfig(**NF4)} if on_the_fly else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(given["model_name_or_path"], **how)
        full = transformers.AutoModelForCausalLM.from_pretrained(self.models("llama"))
        full.load_state_dict(model.dequantize(dtype=torch.float32).state_dict())
        given["model_name_or_path"] = str(save(full, self.folder / f"full-{len([*self.folder.iterdir()])}"))
        return super()._reference(json.dumps(given, sort_keys=True), counted)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALSO, "on-the-fly", {"lora_r": 4, "load_in_4bit": True})
        yield QuantizedFixture(tmp_path_factory.mktemp("quantized"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", fast_or_slow(CASES, CASES[: len(FAST)].__contains__, lambda case: case.id))
def test_ends_where_the_oracle_ends_on_the_dequantised_base(case, bench, request):
    theta, _ = bench.outcome(case, selected(request))
    assert bench.error(case, theta) < tolerance(case)


@on_ranks(2)
def refused(world, settings):
    return refusal(built, world, Config(**settings))


def test_zero_3_is_refused_on_all_ranks(bench):
    given = {
        "model_name_or_path": str(bench.models("llama")),
        "dataset": [str(bench.data[True])],
        "k_shot": 2,
    }
    given |= {"task_type": "causal_lm", "lora_r": 4, "load_in_4bit": True, "group_size": "2"}
    for text in refused({**given, "num_query": 2, "deepspeed": "zero3"}) or [""]:
        check_message(text, "ZeRO 3", "use ZeRO 0 to 2")
