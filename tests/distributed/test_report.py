"""What a launch leaves besides the model: one report and one tracker's files, equal for every layout, one
rank writing them.
"""

import json

import pytest

from fmmeta.report.page import write
from tests.support.launch import train
from tests.support.messages import check_message
from tests.support.models import save_bert, write_classes
from tests.support.short_runs import metrics_of


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_report_and_trackers_are_the_same_on_all_layouts(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    data, model = write_classes(tmp_path / "data.jsonl", 15, 12), save_bert(tmp_path / "bert")
    flags = {
        "dataset": data,
        "model_name_or_path": model,
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
        ended = train(tmp_path / name, ranks, **flags, **also).ok()
        assert not ended.others
        confusion[name] = json.loads((tmp_path / name / "run.json").read_text())["held_out"]["confusion"]
        text = (tmp_path / name / "report.html").read_text()
        assert ("Confusion matrix" in text) == (name != "stages")
        assert (
            write(tmp_path / name).read_text().split("Written")[0] == text.split("Written")[0]
        )  # made from its folder alone
    assert confusion["one"]["counts"] == confusion["groups"]["counts"] == confusion["sharded"]["counts"]
    assert sum(map(sum, confusion["one"]["counts"])) == 12
    assert confusion["stages"].keys() == {"left_out"}
    check_message(confusion["stages"]["left_out"], "pipeline_stages=2")
    for name in ("groups", "sharded"):
        lines = metrics_of(tmp_path / name)
        assert len(list((tmp_path / name / "tensorboard").glob("events*"))) == 1
        events = EventAccumulator(str(tmp_path / name / "tensorboard")).Reload()
        assert [one.value for one in events.Scalars("query_loss")] == pytest.approx(
            [line["query_loss"] for line in lines]
        )
