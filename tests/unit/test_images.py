"""Images as inputs: what is read, how it becomes pixels, which models read them, and the commands on them."""

import hashlib
import io
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageClassification, pipeline

import fmmeta
from fmmeta.adaptation import predict
from fmmeta.cli import main as fmmeta_main
from fmmeta.common.errors import UsageError
from fmmeta.config.settings import Config
from fmmeta.evaluation.settings import PredictConfig
from fmmeta.learners.load import describe, load_learner, load_tokenizer
from fmmeta.parallel.layout import Launch
from fmmeta.parallel.process_groups import World
from fmmeta.tasks.augment import reading
from fmmeta.tasks.batching import Batcher
from fmmeta.tasks.data.files import image_rows
from fmmeta.tasks.data.images import (
    EncodedImage,
    array_bytes,
    content_of,
    decode,
    encoded_image,
)
from fmmeta.tasks.data.rows import rows_in_memory
from fmmeta.tasks.loader import LoadEpisode
from fmmeta.tasks.schedule.meta_batches import Schedule
from fmmeta.tasks.sources.base import transformed
from fmmeta.tasks.sources.load import load_sources
from tests.support.helpers import ROOT, write_rows
from tests.support.messages import check_message, refusal
from tests.support.vision import pixels, save_vision, write_images

SHORT = {
    "n_way": 3,
    "k_shot": 1,
    "num_query": 2,
    "meta_batch_size": 2,
    "inner_steps": 1,
    "num_workers": "0",
    "outer_steps": 2,
    "eval_episodes": 2,
}


def png(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return save_vision(tmp_path_factory.mktemp("vit"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images") / "all")


def config_of(model, dataset, **settings) -> Config:
    return Config(**{**SHORT, "model_name_or_path": str(model), "dataset": [str(dataset)], **settings})


def opened(config: Config, rows=None) -> Any:
    """The sources of the data set, as class sources."""
    return load_sources(config, load_tokenizer(config, describe(config), print), print, rows=rows)


def first_task(source):
    return Schedule(source.items, 1, 0).meta_batch(0)[0]


def test_the_digest_of_a_value_reads_all_of_it():
    """`repr` of a tensor leaves out digits, and elements of a long one."""
    long = torch.zeros(2000)
    other = long.clone()
    other[1000] = 7
    assert content_of(long) == content_of(long.clone()) != content_of(other)
    assert content_of(torch.tensor([0.12345])) != content_of(torch.tensor([0.12349999]))
    assert content_of(torch.tensor([1])) != content_of(torch.tensor([1.0]))
    images = [Image.fromarray(np.zeros((2, 2), np.uint8)).convert("P") for _ in range(2)]
    for image, red in zip(images, (0, 255), strict=True):
        image.putpalette([red, 0, 0] * 256)
    assert content_of(images[0]) != content_of(images[1])


def test_digits_has_4_3_and_3_classes_and_takes_the_built_in_image_model():
    config = Config(dataset=["digits"])
    assert (config.n_way, config.task_type, config.builtin_images) == (3, "classification", True)
    assert Config().n_way == config.but(dataset=["letters"]).n_way == 5
    description = describe(config)
    assert (description.hf_config.model_type, description.images) == ("vit", True)
    sources = opened(config)
    assert sources.valid
    assert sources.test
    classes = [
        {name for names in source.tasks.values() for name in names}
        for source in (sources.train, sources.valid, sources.test)
    ]
    assert classes == [set("0123"), set("456"), set("789")]
    assert len(sources.train.store) == 1797
    row = sources.train.draw(first_task(sources.train)).episode().support[0]
    assert row.values["pixel_values"].shape == (3, 8, 8)
    assert -1 <= float(row.values["pixel_values"].min()) < float(row.values["pixel_values"].max()) <= 1


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        (pixels(1, 0), (8, 8, 3)),
        (pixels(1, 0)[:, :, 0], (8, 8, 3)),
        (Image.new("L", (5, 4), 7), (4, 5, 3)),
        (Image.new("RGBA", (5, 4)), (4, 5, 3)),
        (png(pixels(1, 0)), (8, 8, 3)),
        ({"bytes": png(pixels(1, 0)), "path": "x.png"}, (8, 8, 3)),
    ],
    ids=["array", "grey array", "grey", "transparent", "bytes", "datasets"],
)
def test_images_of_each_kind_become_rgb(value, shape):
    _, image = encoded_image(value, "image", "rows[0]", None)
    found = decode(image)
    assert found.shape == shape
    assert found.dtype == np.uint8


def test_values_that_are_no_images_are_refused(tmp_path):
    for value in ("", None, 3, [1], b"", {"bytes": None, "path": None}):
        check_message(refusal(encoded_image, value, "image", "rows.jsonl:3", None), "which is no image")
    text = refusal(encoded_image, np.zeros((2, 2)), "image", "rows[1]", None)
    check_message(text, "has image with the shape", "float64", "give uint8")
    (tmp_path / "outside.png").write_bytes(png(pixels(0, 0)))
    (tmp_path / "data").mkdir()
    for value, name in (
        ("../outside.png", "../outside.png"),
        ({"bytes": None, "path": "/elsewhere/a.png"}, "/elsewhere/a.png"),
    ):
        text = refusal(encoded_image, value, "image", "rows.jsonl:1", tmp_path / "data")
        check_message(text, name, "copy the image")


def test_damaged_files_are_refused_by_name_and_pickles_are_never_read(tmp_path):
    class Harm:
        def __reduce__(self):
            return (open, (str(tmp_path / "harmed"), "w"))

    file = io.BytesIO()
    np.save(file, np.array([Harm()], dtype=object), allow_pickle=True)
    good = png(pixels(0, 0))
    contents = {
        "text": b"no image",
        "cut": good[: len(good) // 2],
        "pickle": file.getvalue(),
        "cut array": array_bytes(pixels(0, 0))[:100],
    }
    for name, content in contents.items():
        check_message(
            refusal(decode, EncodedImage(f"{name}.png", content)), f"{name}.png", "fix or remove it"
        )
    assert not (tmp_path / "harmed").exists()
    with pytest.raises(FileNotFoundError):
        decode(EncodedImage(str(tmp_path / "none.png")))


def test_pixels_of_the_models_size_are_those_of_its_image_processor(tmp_path):
    reader = load_tokenizer(
        config := config_of(save_vision(tmp_path / "vit"), "letters"), describe(config), print
    )
    array = pixels(2, 1)
    own, of_transformers = reader.prepare(array), reader.processor(images=[array], return_tensors="pt")
    torch.testing.assert_close(own, of_transformers["pixel_values"][0])
    larger = reader.prepare(pixels(2, 1, size=20))
    assert larger.shape == (3, 8, 8)
    check_message(refusal(replace(reader, processor=None).prepare, pixels(2, 1, 20)), "20 x 20", "vision]")
    assert torch.equal(pickle.loads(pickle.dumps(reader)).prepare(pixels(2, 1, 20)), larger)


def test_folders_files_bytes_and_data_sets_give_the_same_rows(images, vit, tmp_path):
    found = [(Path(row.origin), row.values["label"]) for row in image_rows(str(images))]
    assert [path.name for path, label in found if label == "c01"] == [f"{n}.png" for n in range(8)]
    rows = [{"image": str(path.relative_to(images)), "label": label} for path, label in found]
    for row in rows:
        (tmp_path / row["image"]).parent.mkdir(exist_ok=True)
        (tmp_path / row["image"]).write_bytes((images / row["image"]).read_bytes())
    paths = write_rows(tmp_path / "rows.jsonl", rows)
    stored = [{"picture": path.read_bytes(), "label": label} for path, label in found]
    parquet = write_rows(tmp_path / "rows.parquet", stored)
    data = datasets.Dataset.from_dict(
        {"image": [str(path) for path, _ in found], "label": [label for _, label in found]}
    ).cast_column("image", datasets.Image())
    trainer = fmmeta.MetaTrainer(config_of(vit, "letters").but(dataset=["letters"]), dataset=data)
    config, in_memory = trainer._read_objects(World(Launch(), torch.device("cpu")))
    sources = [
        opened(config_of(vit, images)),
        opened(config_of(vit, paths)),
        opened(config_of(vit, parquet, image_column="picture")),
        opened(config, in_memory),
    ]
    tables = [
        {
            store.text("input", row): (
                store.text("target", row),
                store.examples([row], {})[0].values["pixel_values"],
            )
            for row in range(len(store))
        }
        for store in (one.train.store for one in sources)
    ]
    assert [len(table) for table in tables] == [120] * 4
    assert tables[0].keys() == tables[1].keys()
    digests = [sorted((label, content_of(x.numpy())) for label, x in table.values()) for table in tables]
    assert digests[0] == digests[1] == digests[2] == digests[3]


def test_paths_given_in_python_are_those_of_the_working_folder(tmp_path, monkeypatch, vit):
    """The store has absolute paths: rows that are equal in two folders are other images."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    config = config_of(vit, "letters").but(dataset=["in-memory"])
    for folder in (tmp_path / "a", tmp_path / "b"):
        write_images(folder / "images")
        monkeypatch.chdir(folder)
        names = [(row.origin, row.values["label"]) for row in image_rows("images")]
        store = opened(config, rows_in_memory(names, config)).train.store
        assert Path(store.value(0)["image"].where).is_relative_to(folder)


def test_a_folder_of_folders_of_images_has_strata(tmp_path, vit):
    for stratum in "ab":
        write_images(tmp_path / "all" / stratum, classes=4, rows=4)
    sources = opened(config_of(vit, tmp_path / "all", n_way=2))
    assert set(sources.train.items.strata) == {"a", "b"}
    assert all(name.startswith(("a/c", "b/c")) for name in sources.train.items.names)


def test_texts_and_images_are_not_mixed_up(vit, bert, classes, images):
    check_message(refusal(opened, config_of(vit, "letters")), "dataset=letters holds texts", "reads images")
    check_message(refusal(opened, config_of(bert, "digits")), "dataset=digits holds images", "reads texts")
    check_message(refusal(opened, config_of(bert, images)), "none of the columns text", "it has image")
    check_message(refusal(Config, dataset=["digits", "letters"]), "mixes images and texts")
    own = "tests.support.vision:of_stacked"
    check_message(refusal(Config, dataset=["digits"], task_type=own, pipeline_stages=2), "pipeline_stages")
    for settings, cause in (
        ({"task_type": "causal_lm"}, "which reads images"),
        ({"pipeline_stages": 2}, "not split into pipeline stages"),
    ):
        check_message(refusal(describe, Config(model_name_or_path=str(vit), **settings)), cause)


@pytest.mark.parametrize("pooling", ["model", "mean"])
@pytest.mark.parametrize("kind", ["vit", "convnext"])
def test_backbones_and_classifiers_have_features_and_a_head(kind, pooling, tmp_path):
    config = config_of(save_vision(tmp_path, kind), "letters", pooling=pooling)
    learner = load_learner(config, describe(config))
    inputs = torch.stack([torch.from_numpy(pixels(c, 0)).permute(2, 0, 1) / 255 for c in range(4)])
    features, logits = learner(pixel_values=inputs)
    assert features.shape == (4, 16)
    assert logits.shape == (4, 3)
    torch.testing.assert_close(learner.classify(features)[1], logits)
    assert not torch.allclose(features[0], features[1])
    assert learner.to(torch.bfloat16)(pixel_values=inputs)[1].dtype == torch.bfloat16


def test_batch_norm_is_refused_and_so_is_a_model_without_processor(tmp_path):
    config = config_of(save_vision(tmp_path / "resnet", "resnet"), "letters")
    check_message(refusal(load_learner, config, describe(config)), "has batch norm", "running statistics")
    folder = save_vision(tmp_path / "vit")
    (folder / "preprocessor_config.json").unlink()
    config = config_of(folder, "letters")
    check_message(refusal(load_tokenizer, config, describe(config), print), "preprocessor_config.json")


def test_a_damaged_image_is_a_bad_task(vit, tmp_path):
    root = write_images(tmp_path / "all", classes=6, rows=4)
    for path in (root / "c00").iterdir():
        path.write_bytes(path.read_bytes()[:60])
    (root / "class_splits.json").write_text(json.dumps({"train": [f"c{c:02}" for c in range(6)]}))
    config = config_of(vit, root, n_way=2, eval_episodes=0, outer_steps=4, output_dir=str(tmp_path / "run"))
    check_message(
        refusal(fmmeta.MetaTrainer(config).train), "cannot be decoded as an image", "--on_bad_task skip"
    )
    skip = config.but(on_bad_task="skip", max_bad_fraction=0.9, output_dir=str(tmp_path / "skip"))
    lines = fmmeta.MetaTrainer(skip).train().log_history
    bad = [bad for line in lines for bad in line.get("bad_tasks", ())]
    assert bad
    assert all("c00" in one["error"] and "cannot be decoded" in one["error"] for one in bad)
    assert sum(line["skipped_tasks"] for line in lines) == len(bad)


def test_transforms_change_the_pixels_of_training_episodes(images, vit):
    config = config_of(vit, images, example_transforms=["tests.support.vision:darker"])
    source = opened(config).train
    plain = source.draw(first_task(source)).episode()
    changed = transformed(source.draw(first_task(source)), reading(config, source.store.encoder.tokenizer))
    for before, after in zip(plain.support, changed.support, strict=True):
        assert before.labels == after.labels
        light, dark = ((row.values["pixel_values"] + 1) / 2 for row in (before, after))
        assert (light / 2 - dark).abs().max() < 1 / 255 + 1e-6


def test_the_commands_work_on_images(vit, images, tmp_path):
    config = config_of(vit, images, algorithm="protonet", pooling="mean", output_dir=str(tmp_path / "run"))
    model = str(fmmeta.MetaTrainer(config).train().output_dir / "model")
    assert describe(config_of(model, images)).pooling == "mean"
    found = fmmeta.evaluate(
        model,
        str(images),
        method=["finetune", "prototype", "linear", "knn"],
        n_way=3,
        k_shot=[1],
        episodes=4,
        eval_split="train",
    )
    assert len(found["cells"]) == 4
    support = [(str(images / f"c{c:02}" / f"{n}.png"), f"c{c:02}") for c in range(3) for n in range(3)]
    adapted = fmmeta.adapt(model, support, inner_steps=20, inner_lr=0.1, output_dir=str(tmp_path / "task"))
    check_message(
        refusal(fmmeta.adapt, model, support, label_names="names"), "label_names='names'", "leave it out"
    )
    queries = [pixels(c, 7) for c in range(3)]
    answers = adapted.predict(queries)
    again = fmmeta.load(str(tmp_path / "task")).predict(queries)
    assert [one.output for one in answers] == [one.output for one in again]
    assert adapted.accuracy is None
    with pytest.raises(UsageError, match="no image"):
        adapted.predict(["", 3])
    check_message(refusal(adapted.predict, pixels(0, 7)), "are one image", "give a list of images")
    lines = tmp_path / "images.txt"
    lines.write_text("".join(f"{images}/c{c:02}/7.png\n" for c in range(3)))
    out = tmp_path / "answers.jsonl"
    with pytest.raises(SystemExit, match="0"):
        fmmeta_main(
            ["predict", f"--model_name_or_path={tmp_path}/task", f"--input={lines}", f"--output={out}"]
        )
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["label"] for line in written] == [one.output for one in answers]
    queries = [Image.fromarray(one) for one in queries]
    with pytest.raises(KeyError):  # no class, rather than those of a random head
        pipeline("image-classification", str(tmp_path / "task"))(queries)
    served = fmmeta.adapt(vit, support, inner_steps=3, inner_lr=0.1, output_dir=str(tmp_path / "served"))
    best = [found[0] for found in pipeline("image-classification", str(tmp_path / "served"))(queries)]
    wanted = served.predict(queries)
    assert [one["label"] for one in best] == [one.output for one in wanted]
    assert [one["score"] for one in best] == pytest.approx([one.score for one in wanted], abs=1e-4)


def test_an_image_classifier_not_made_by_fmmeta_answers(vit):
    queries = [pixels(c, 7) for c in range(3)]
    model = fmmeta.load(vit)
    inputs = torch.stack([model.loaded.tokenizer.prepare(one) for one in queries])
    with torch.no_grad():
        logits = AutoModelForImageClassification.from_pretrained(vit).eval()(pixel_values=inputs).logits
    assert [one.output for one in model.predict(queries)] == [f"LABEL_{n}" for n in logits.argmax(1).tolist()]


def image_rows_of(folder: Path, classes: Sequence[int], numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Rows with paths below `folder`, of images in folders of their classes."""
    return [
        {"image": str(Path(folder.name, f"c{c:02}", f"{n}.png")), "label": f"c{c:02}"}
        for c in classes
        for n in numbers
    ]


@pytest.mark.parametrize("lora_r", [0, 4])
def test_many_tasks_of_images_equal_single_adaptations(vit, images, tmp_path, lora_r):
    """Paths below the folder of the file, bytes in a table, and arrays."""
    rows = image_rows_of(images, [0, 1], range(3))
    paths = write_rows(images.parent / f"support {lora_r}.jsonl", rows)
    bytes_of = [{**row, "image": (images.parent / row["image"]).read_bytes()} for row in rows]
    arrays = [(pixels(c, n), f"c{c:02}") for c in (2, 3, 4) for n in range(3)]
    supports = {"paths": paths, "bytes": write_rows(tmp_path / "support.parquet", bytes_of), "arrays": arrays}
    flags = {"inner_steps": 5, "inner_lr": 0.1, "early_stopping": False}
    if lora_r:
        flags |= {"lora_r": lora_r, "lora_target_modules": ["all-linear"]}
    models = fmmeta.adapt_many(vit, supports, output_dir=tmp_path / "many", **flags)
    assert models.failed == {}
    for name, support in supports.items():
        queries = [pixels(c, 7) for c in range(5)]
        found, wanted = models[name].predict(queries), fmmeta.adapt(vit, support, **flags).predict(queries)
        assert [one.output for one in found] == [one.output for one in wanted]
        assert [one.score for one in found] == pytest.approx([one.score for one in wanted], abs=1e-5)


def test_query_images_are_answered_under_the_names_of_their_rows(vit, images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # relative paths begin at the folder of the file
    rows = image_rows_of(images, [0, 1, 2], [6, 7])
    contents = [(images.parent / row["image"]).read_bytes() for row in rows]
    labels = [row["label"] for row in rows]
    table = [{**row, "image": content} for row, content in zip(rows, contents, strict=True)]
    arrays = [decode(EncodedImage("", content)) for content in contents]
    queries = {
        "paths": write_rows(images.parent / "query.jsonl", rows),
        "table": write_rows(tmp_path / "query.parquet", table),
        "arrays": [*zip(arrays, labels, strict=True)],
    }
    support = write_rows(images.parent / "support.jsonl", image_rows_of(images, [0, 1, 2], range(4)))
    found = {}
    for name, query in queries.items():
        out = tmp_path / name
        adapted = fmmeta.adapt(vit, support, query=query, output_dir=out, inner_steps=5, inner_lr=0.1)
        found[name] = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
        assert [one["truth"] for one in found[name]] == labels
        assert [one["label"] for one in found[name]] == [one.output for one in adapted.predict(contents)]
    assert [one["text"] for one in found["paths"]] == [row["image"] for row in rows]
    assert [one["text"] for one in found["table"]] == [
        hashlib.sha256(content).hexdigest()[:32] for content in contents
    ]
    damaged = write_rows(tmp_path / "damaged.parquet", [{"image": b"no image", "label": "c00"}])
    check_message(
        refusal(fmmeta.adapt, vit, support, query=damaged, inner_steps=1),
        f"{damaged}:1 cannot be decoded",
        "fix or remove it",
    )


def test_predict_reads_the_image_of_a_row_with_a_text(vit, images, tmp_path):
    """With a model, and with adapters."""
    support = [(str(images / f"c{c:02}" / f"{n}.png"), f"c{c:02}") for c in range(2) for n in range(3)]
    flags = {"lora_r": 4, "lora_target_modules": ["all-linear"], "inner_steps": 1, "early_stopping": False}
    fmmeta.adapt_many(vit, {"task": support}, output_dir=tmp_path / "out", **flags)
    path, out = str(images / "c00" / "7.png"), str(tmp_path / "out")
    source = write_rows(tmp_path / "in.jsonl", [{"text": "a caption", "image": path, "adapter": "task"}])
    for place in ({"model_name_or_path": f"{out}/task"}, {"adapters": out}):
        predict.run(PredictConfig(**place, input=str(source), output=str(tmp_path / "answers.jsonl")))
        (line,) = map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
        (wanted,) = fmmeta.load(f"{out}/task").predict([path])
        assert (line["text"], line["label"]) == (path, wanted.output)
        assert line["score"] == pytest.approx(wanted.score, abs=1e-5)


def test_predict_reads_the_files_of_images_that_adapt_reads(vit, images, tmp_path, monkeypatch):
    """Paths relative to the file, and the bytes of a parquet file."""
    names = [f"c{c:02}/{n}.png" for c in range(2) for n in range(3)]
    images = shutil.copytree(images, tmp_path / "copy")
    paths = [{"image": name, "label": name[:3]} for name in names]
    encoded = [
        {"image": {"bytes": (images / name).read_bytes(), "path": None}, "label": name[:3]} for name in names
    ]
    rows = write_rows(images / "rows.jsonl", paths), write_rows(tmp_path / "rows.parquet", encoded)
    adapted = fmmeta.adapt(
        vit, rows[0], query=rows[0], output_dir=tmp_path / "out", inner_steps=1, early_stopping=False
    )
    monkeypatch.chdir(tmp_path)
    for source in rows:
        out = tmp_path / "answers.jsonl"
        predict.run(PredictConfig(str(tmp_path / "out"), input=str(source), output=str(out)))
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert [one["label"] for one in lines] == [one.output for one in adapted.predictions]
        assert [one["score"] for one in lines] == pytest.approx(
            [one.score for one in adapted.predictions], abs=1e-5
        )
        assert [one["text"] for one in lines] == names or source == rows[1]


def test_digits_needs_no_pillow(tmp_path, monkeypatch):
    """The training, the exported model and the evaluation; images of another size need it."""
    encoded = EncodedImage("a.png", png(pixels(0, 0)))
    monkeypatch.setattr("fmmeta.learners.load.is_vision_available", lambda: False)
    monkeypatch.setitem(sys.modules, "PIL", None)
    config = Config(**SHORT, dataset=["digits"], output_dir=str(tmp_path / "run"))
    model = str(fmmeta.MetaTrainer(config).train().output_dir / "model")
    found = fmmeta.evaluate(model, "digits", method="prototype", k_shot=1, episodes=2)
    assert len(found["cells"]) == 1
    check_message(refusal(decode, encoded), "a.png: Pillow", "fmmeta[vision]")


@pytest.mark.slow
def test_digits_is_trained_where_pillow_is_not_installed(tmp_path):
    code = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.split(".")[0] == "PIL" else found(name, *more)
sys.modules["PIL"] = None
from fmmeta.cli import main
main(sys.argv[1:])
"""
    flags = "--dataset digits --k_shot 1 --num_query 1 --outer_steps 1 --test_episodes 2 --eval_episodes 0"
    flags += f" --meta_batch_size 1 --inner_steps 1 --num_workers 0 --output_dir {tmp_path}/run"
    subprocess.run([sys.executable, "-c", code, "train", *flags.split()], cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_of_images_have_no_tokens(size, images, vit):
    source = opened(config_of(vit, images)).train
    episode = LoadEpisode(source, Batcher(0, size))(first_task(source)).batches
    assert episode
    assert [list(batch.inputs) for batch in episode.query] == [["pixel_values"]] * len(episode.query)
    assert sum(len(batch.weights) for batch in episode.query) == 6
    assert sum(batch.tokens for batch in episode.query) == 6  # an image counts as one token


def test_a_photo_is_turned_as_its_exif_data_say(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.new("RGB", (20, 10)).save(tmp_path / "turned.jpg", exif=exif)
    assert decode(EncodedImage(str(tmp_path / "turned.jpg"))).shape == (20, 10, 3)


def test_an_image_of_more_than_8_bits_is_refused(tmp_path):
    Image.fromarray(np.full((4, 4), 1000, np.uint16)).save(tmp_path / "deep.png")
    check_message(
        refusal(decode, EncodedImage(str(tmp_path / "deep.png"))), "deep.png", "mode I;16", "8 bits"
    )


def test_rows_beside_a_folder_of_their_images_are_read(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.npy").write_bytes(array_bytes(np.zeros((2, 2), np.uint8)))
    assert len(image_rows(str(tmp_path))) == 1
    (tmp_path / "train.jsonl").write_text('{"image": "images/a.npy", "label": "cat"}\n')
    assert image_rows(str(tmp_path)) == []
