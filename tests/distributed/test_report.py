"""What a launch leaves besides the model: one report and one tracker's files, equal for every layout, one
rank writing them.
"""

import json

import pytest

from fmmeta.report.page import write
from tests.support.launch import train
from tests.support.messages import check_message
from tests.support.models import save_bert, write_classes
from tests.support.short_runs import metrics_of, tensorboard_of


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_report_and_trackers_are_the_same_on_all_layouts(tmp_path):
    flags = {
        "dataset": write_classes(tmp_path / "data.jsonl", 15, 12),
        "model_name_or_path": save_bert(tmp_path / "bert"),
        "n_way": 3,
        "k_shot": 2,
        "num_query": 4,
        "inner_lr": 0.3,
        "outer_steps": 2,
        "meta_batch_size": 2,
        "eval_episodes": 3,
        "micro_batch_size": 4,
    }
    layouts = {
        "one": (1, {"deepspeed": "ds_configs/zero0.json"}),
        "groups": (2, {"deepspeed": "ds_configs/zero0.json", "group_size": 1, "report_to": "tensorboard"}),
        "sharded": (2, {"deepspeed": "ds_configs/zero3.json", "group_size": 2, "report_to": "tensorboard"}),
        "stages": (2, {"deepspeed": "ds_configs/zero1.json", "group_size": 2, "pipeline_stages": 2}),
    }
    confusion = {}
    for name, (ranks, also) in layouts.items():
        run = tmp_path / name
        assert not train(run, ranks, **flags, **also).ok().others
        confusion[name] = json.loads((run / "run.json").read_text())["held_out"]["confusion"]
        text = (run / "report.html").read_text()
        assert ("Confusion matrix" in text) == (name != "stages")
        again = write(run).read_text()  # made from its folder alone
        assert again.split("Written")[0] == text.split("Written")[0]
    counts = [confusion[name].get("counts") for name in layouts]
    assert counts == [counts[0], counts[0], counts[0], None]
    assert sum(map(sum, counts[0])) == 12
    check_message(confusion["stages"]["left_out"], "pipeline_stages=2")
    for run in (tmp_path / "groups", tmp_path / "sharded"):
        assert len(list((run / "tensorboard").glob("events*"))) == 1
        losses = [line["query_loss"] for line in metrics_of(run)]
        assert [*tensorboard_of(run)["query_loss"].values()] == pytest.approx(losses)
