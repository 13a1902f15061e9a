"""MLPs behind the last blocks: an ordinary checkpoint that computes the same, of which an inner loop changes
the new MLPs alone.
"""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fmmeta import Config, MetaTrainer
from fmmeta.learners.tiny import byte_tokenizer
from tests.support.messages import check_message, exit_code
from tests.support.models import save, tiny


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_the_model_computes_what_it_did(tmp_path, capsys, family):
    folder, out = save(tiny(family, num_hidden_layers=4), tmp_path / "model"), tmp_path / "prime"
    byte_tokenizer(64).save_pretrained(folder)
    assert exit_code(["convert", str(folder), str(out), "--prime_mlps", "2"]) == 0
    before, after = (AutoModelForCausalLM.from_pretrained(each).eval() for each in (folder, out))
    assert after.config.num_hidden_layers == 6
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(after(ids).logits, before(ids).logits)
    names = {name for name, value in load_file(out / "model.safetensors").items() if not value.any()}
    parts = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    zeros = {f"model.layers.{number}.{part}" for number in (3, 5) for part in parts}
    assert zeros <= names
    assert AutoTokenizer.from_pretrained(out)("ab")["input_ids"] == byte_tokenizer(64)("ab")["input_ids"]
    assert (
        "'model.layers.3.mlp.*' 'model.layers.5.mlp.*' --outer_parameters all except"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("family", "sizes", "count", "part"),
    [
        ("gpt2", {}, "1", "prime_mlps=1 needs blocks with self_attn.o_proj and mlp.down_proj"),
        ("llama", {"num_hidden_layers": 2}, "3", "prime_mlps=3, and"),
        ("llama", {}, "-1", "prime_mlps=-1 is below 0"),
    ],
)
def test_other_blocks_are_refused(tmp_path, capsys, family, sizes, count, part):
    folder = save(tiny(family, **sizes), tmp_path / "model")
    capsys.readouterr()
    assert exit_code(["convert", str(folder), str(tmp_path / "out"), "--prime_mlps", count]) == 2
    check_message(capsys.readouterr().err, part)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_adapters_is_refused(tmp_path, capsys):
    """Its model is the base alone, and the adapters are of other layers."""
    model = get_peft_model(tiny("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "model")
    argv = ["convert", str(tmp_path / "model"), str(tmp_path / "out"), "--prime_mlps", "1"]
    settings = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(save(tiny("llama"), tmp_path / "base"))
    (tmp_path / "model" / "adapter_config.json").write_text(json.dumps(settings))
    capsys.readouterr()
    assert exit_code(argv) == 2
    check_message(capsys.readouterr().err, "prime_mlps=1 needs a full model", "merged/")


def test_the_inner_loop_changes_the_new_mlps_and_the_outer_loop_all(tmp_path):
    folder, out = save(tiny("llama", num_hidden_layers=2), tmp_path / "model"), tmp_path / "prime"
    assert exit_code(["convert", str(folder), str(out), "--prime_mlps", "1"]) == 0
    config = Config(
        model_name_or_path=str(out),
        task_type="stream",
        dataset=["ciphers"],
        chunk=8,
        context=8,
        chunks=3,
        outer_steps=1,
        outer_lr=1e-2,
        meta_batch_size=1,
        eval_episodes=0,
        num_workers=0,
        inner_parameters=["*.layers.2.mlp.*"],
        outer_parameters=["all", "except", "*.layers.2.self_attn.*"],
        output_dir=str(tmp_path / "run"),
    )
    MetaTrainer(config).train()
    before, after = (load_file(each / "model.safetensors") for each in (out, tmp_path / "run" / "model"))
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if ".layers.2.self_attn." in name} <= same
    assert {name for name in before if ".mlp." in name}.isdisjoint(same)
