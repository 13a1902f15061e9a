"""What an application sees of fmmeta: results as data, log records, progress bars, and libraries as it had
set them.
"""

import io
import json
import logging
import os
import re
import sys
import time
import warnings

import pytest
import torch

import fmmeta
from fmmeta import Config, MetaTrainer
from fmmeta.adaptation import model
from fmmeta.common.processes import restored_process
from fmmeta.common.progress import LOGGER, Progress, Warn, terminal_log
from fmmeta.parallel.workers.zero import import_deepspeed

SHORT = {
    "n_way": 2,
    "k_shot": 1,
    "num_query": 1,
    "meta_batch_size": 1,
    "inner_steps": 1,
    "max_length": 16,
    "num_workers": "0",
    "outer_steps": 2,
    "eval_episodes": 2,
    "logging_steps": 1,
}
PAIRS = [("red", "colour"), ("blue", "colour"), ("one", "number"), ("two", "number")]


@pytest.fixture
def records():
    """Records of the logger, as an application's handler receives them."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    yield found
    LOGGER.removeHandler(handler)
    LOGGER.setLevel(logging.NOTSET)


def test_adapt_has_the_precision_of_training_and_load_has_fp32(tmp_path, monkeypatch):
    """On hardware where bf16 is the default, which this pretends to be."""
    monkeypatch.setattr(model, "chosen_bf16", lambda config, *_: config.bf16 is not False)
    short = {"inner_steps": 1, "early_stopping": False, "output_dir": str(tmp_path / "task")}
    made = [fmmeta.adapt("tiny", PAIRS, **short), fmmeta.load(str(tmp_path / "task"))]
    found = [next(iter(one.loaded.worker.model.parameters())).dtype for one in made]
    assert found == [torch.bfloat16, torch.float32]


def test_the_result_has_the_log_history_and_the_held_out_table(tmp_path):
    trainer = MetaTrainer(Config(**SHORT, output_dir=str(tmp_path)))
    result = trainer.train()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert result.log_history == [json.loads(line) for line in lines]
    assert [line["step"] for line in result.log_history] == [1, 2]
    assert result.held_out == json.loads((tmp_path / "run.json").read_text())["held_out"]
    assert result.held_out["gain"].keys() == {"accuracy", "loss"}
    assert result.after == result.held_out["after adaptation, meta-trained"]["accuracy"][0]
    assert repr(result).startswith(f"Result(output_dir='{tmp_path}', outer_steps=2, before=")
    assert "log_history=[2 lines], held_out={2 episodes}" in repr(result)
    assert trainer.train() == result  # the run is finished: its files are read


def test_messages_are_records_of_the_logger(tmp_path, records, capsys):
    """An application that has configured logging gets the messages in its handlers alone."""
    MetaTrainer(Config(**SHORT | {"eval_episodes": 0}, output_dir=str(tmp_path))).train()
    assert f"output_dir {tmp_path}" in [record.getMessage() for record in records]
    assert "fmmeta:" not in capsys.readouterr().out
    assert {record.levelno for record in records} == {logging.INFO}


def test_messages_are_printed_unless_the_application_has_configured_logging(tmp_path, capsys):
    MetaTrainer(Config(**SHORT | {"eval_episodes": 0}, output_dir=str(tmp_path))).train()
    assert f"fmmeta: output_dir {tmp_path}\n" in capsys.readouterr().out
    assert (LOGGER.level, LOGGER.propagate) == (logging.NOTSET, True)
    assert [type(handler) for handler in LOGGER.handlers] == [logging.NullHandler]


def test_the_level_filters_messages(capsys):
    with terminal_log("warning"):
        Progress(True).notice("a notice")
        Progress(True).notice(Warn("a warning"))
        LOGGER.error("an error")
    assert capsys.readouterr() == ("fmmeta: a warning\n", "fmmeta: an error\n")


def test_quiet_calls_log_and_show_nothing(bert, records, capsys):
    fmmeta.adapt(bert, PAIRS, inner_steps=2)
    assert any("inner steps" in record.getMessage() for record in records)
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_bars_and_messages_above_them(monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setenv("LINES", "30")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    progress = Progress(True)
    with terminal_log():
        progress.line("outer step", 1, 8, "loss 0.5")
        progress.notice("a message")
        progress.line("validation", 0, 3)
        now = time.monotonic()
        for step in range(2, 7):
            monkeypatch.setattr(time, "monotonic", lambda step=step: now + 50 * step)
            progress.line("outer step", step, 8, "loss 0.5")
        progress.line("outer step", 8, 8, "loss 0.4")
    shown = terminal.getvalue()
    for part in ("outer step:  12%", "fmmeta: a message\n", "validation:   0%", "loss 0.5  1:40 left]"):
        assert part in shown
    assert re.search("outer step: 100%.*loss 0.4", shown)
    assert not progress.bars  # a finished bar ends those below it, and itself


@pytest.mark.parametrize("module", ["fmmeta.learners.shared_prefix", "transformers.cache_utils"])
@pytest.mark.parametrize("kind", [FutureWarning, DeprecationWarning])
def test_a_deprecated_call_fails_the_tests(kind, module):
    with pytest.raises(kind):
        warnings.warn_explicit("it will be removed", kind, "file.py", 1, module=module)


def test_a_pipe_gets_plain_lines(capsys):
    progress = Progress(True)
    progress.line("outer step", 4, 4, "loss 0.4")
    progress.table("title", ["", "a"], [["row", "1"]])
    out = capsys.readouterr().out
    assert out.startswith("outer step 4/4  loss 0.4\n\ntitle\n")
    assert "\r" not in out


def state_of_libraries():
    from transformers.utils import logging as of_transformers

    names = ("transformers", "datasets", "DeepSpeed", "torch.distributed", "fmmeta")
    levels = {name: logging.getLogger(name).level for name in names}
    return dict(os.environ), levels, list(warnings.filters), of_transformers.is_progress_bar_enabled()


@pytest.fixture
def loud():
    """Libraries as an application may have set them, and not as fmmeta does."""
    import deepspeed  # noqa: F401
    from transformers.utils import logging as of_transformers

    bars, logger = of_transformers.is_progress_bar_enabled(), logging.getLogger("transformers")
    level = logger.level
    of_transformers.enable_progress_bar()
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(level)
    if not bars:
        of_transformers.disable_progress_bar()


def test_train_evaluate_adapt_and_load_restore_libraries_and_environment(tmp_path, loud, monkeypatch):
    monkeypatch.delenv("FMMETA_GLOBAL_RANK", raising=False)
    short = SHORT | {"eval_episodes": 0, "outer_steps": 1}
    uses = [
        MetaTrainer(Config(**short, output_dir=str(tmp_path / "run"))).train,
        lambda: fmmeta.evaluate("tiny", "letters", n_way=2, k_shot=1, episodes=2, method="prototype"),
        lambda: fmmeta.adapt("tiny", PAIRS, inner_steps=1, output_dir=tmp_path / "adapted"),
        lambda: fmmeta.load(tmp_path / "adapted"),
    ]
    before = state_of_libraries()
    for use in uses:
        use()
        assert state_of_libraries() == before


def test_deepspeed_is_quiet_only_inside_a_run(monkeypatch, loud):
    import deepspeed

    monkeypatch.setattr(deepspeed, "init_distributed", lambda **named: None)
    before = state_of_libraries()
    with restored_process():
        import_deepspeed()
        assert logging.getLogger("DeepSpeed").level == logging.ERROR
        assert list(warnings.filters) != before[2]
    assert state_of_libraries() == before


def test_a_failed_call_restores_the_environment(monkeypatch):
    before, filters = dict(os.environ), list(warnings.filters)
    with pytest.raises(fmmeta.UsageError):
        fmmeta.evaluate("/no/such/model", "letters")
    assert (dict(os.environ), list(warnings.filters)) == (before, filters)
