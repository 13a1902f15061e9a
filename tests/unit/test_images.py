"""Images as inputs: what is read, how it becomes pixels, which models read them, and the commands on them.
Functions that collate rows: nested inputs reach the model, and what a function may not return.
"""

import hashlib
import io
import json
import pickle
import shutil
import subprocess
import sys
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
from fmmeta.tasks.batching import Batcher, Example, MicroBatch, labels_of
from fmmeta.tasks.collate import Collate, structure_of
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
from tests.support.vision import (
    nested,
    nested_rows,
    one_row_less,
    pixels,
    save_nested,
    save_vision,
    write_images,
)

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


def reader_of(config: Config) -> Any:
    return load_tokenizer(config, describe(config), print)


def opened(config: Config, rows=None) -> Any:
    """The sources of the data set, as class sources."""
    return load_sources(config, reader_of(config), print, rows=rows)


def first_draw(source):
    return source.draw(Schedule(source.items, 1, 0).meta_batch(0)[0])


def paths_of(folder: Path, classes: int, *numbers: int) -> list[tuple[str, str]]:
    """Images with their classes."""
    return [(str(folder / f"c{c:02}" / f"{n}.png"), f"c{c:02}") for c in range(classes) for n in numbers]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outputs_of(answers) -> list[str]:
    return [one.output for one in answers]


def scores_of(answers, off: float = 1e-5):
    return pytest.approx([one.score for one in answers], abs=off)


def test_the_digest_of_a_value_reads_all_of_it():
    """`repr` of a tensor leaves out digits, and elements of a long one."""
    long, other = torch.zeros(2000), torch.zeros(2000)
    assert content_of(long) == content_of(other)
    other[1000] = 7
    images = [Image.fromarray(np.zeros((2, 2), np.uint8)).convert("P") for _ in range(2)]
    for image, red in zip(images, (0, 255), strict=True):
        image.putpalette([red, 0, 0] * 256)
    for pair in (
        (long, other),
        (torch.tensor([0.12345]), torch.tensor([0.12349999])),
        (torch.tensor([1]), torch.tensor([1.0])),
        images,
    ):
        assert len({content_of(value) for value in pair}) == 2


def test_digits_has_4_3_and_3_classes_and_takes_the_built_in_image_model():
    config = Config(dataset=["digits"])
    assert (config.n_way, config.task_type, config.builtin_images) == (3, "classification", True)
    assert Config().n_way == config.but(dataset=["letters"]).n_way == 5
    description = describe(config)
    assert (description.hf_config.model_type, description.images) == ("vit", True)
    sources = opened(config)
    parts = (sources.train, sources.valid, sources.test)
    classes = ["".join(sorted(name for names in part.tasks.values() for name in names)) for part in parts]
    assert classes == ["0123", "456", "789"]
    assert len(sources.train.store) == 1797
    image = first_draw(sources.train).episode().support[0].values["pixel_values"]
    assert image.shape == (3, 8, 8)
    assert -1 <= float(image.min()) < float(image.max()) <= 1


def turned() -> bytes:
    """A photo with EXIF data of a quarter turn."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    Image.new("RGB", (20, 10)).save(file, "JPEG", exif=exif)
    return file.getvalue()


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        (pixels(1, 0), (8, 8, 3)),
        (pixels(1, 0)[:, :, 0], (8, 8, 3)),
        (Image.new("L", (5, 4), 7), (4, 5, 3)),
        (Image.new("RGBA", (5, 4)), (4, 5, 3)),
        (png(pixels(1, 0)), (8, 8, 3)),
        ({"bytes": png(pixels(1, 0)), "path": "x.png"}, (8, 8, 3)),
        (turned(), (20, 10, 3)),
    ],
    ids=["array", "grey array", "grey", "transparent", "bytes", "datasets", "turned"],
)
def test_images_of_each_kind_become_rgb(value, shape):
    found = decode(encoded_image(value, "image", "rows[0]", None)[1])
    assert (found.shape, found.dtype) == (shape, np.uint8)


class Harm:
    """Writes a file into the working folder when it is unpickled."""

    def __reduce__(self):
        return open, ("harmed", "w")


def pickled() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Harm()], dtype=object), allow_pickle=True)
    return file.getvalue()


NO_IMAGE = ["has image=", "which is no image"]


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        *((one, NO_IMAGE) for one in ("", None, 3, [1], b"", {"bytes": None, "path": None})),
        (np.zeros((2, 2)), ["has image with the shape", "float64", "give uint8"]),
        ("../outside.png", ["../outside.png", "copy the image"]),
        ({"bytes": None, "path": "/elsewhere/a.png"}, ["/elsewhere/a.png", "copy the image"]),
        *(
            ({"bytes": content, "path": "a.png"}, ["rows.jsonl:3 cannot be decoded", "fix or remove it"])
            for content in (
                b"no image",
                png(pixels(0, 0))[:50],
                array_bytes(pixels(0, 0))[:100],
                pickled(),  # which is never read
            )
        ),
        (png(np.full((4, 4), 1000, np.uint16)), ["mode I;16", "8 bits"]),
    ],
)
def test_values_that_are_no_images_are_refused(tmp_path, monkeypatch, value, parts):
    (tmp_path / "data").mkdir()
    (tmp_path / "outside.png").write_bytes(png(pixels(0, 0)))
    monkeypatch.chdir(tmp_path)

    def read():
        return decode(encoded_image(value, "image", "rows.jsonl:3", tmp_path / "data")[1])

    check_message(refusal(read), *parts)
    assert not (tmp_path / "harmed").exists()


def test_an_image_that_is_gone_is_an_error_of_the_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        decode(EncodedImage(str(tmp_path / "none.png")))


def test_pixels_of_the_models_size_are_those_of_its_image_processor(vit):
    reader, array, large = reader_of(config_of(vit, "letters")), pixels(2, 1), pixels(2, 1, size=20)
    found = reader.processor(images=[array], return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(reader.prepare(array), found)
    assert reader.prepare(large).shape == (3, 8, 8)
    check_message(refusal(replace(reader, processor=None).prepare, large), "20 x 20", "vision]")
    assert torch.equal(pickle.loads(pickle.dumps(reader)).prepare(large), reader.prepare(large))


def test_folders_files_bytes_and_data_sets_give_the_same_rows(images, vit, tmp_path):
    found = [(Path(row.origin), row.values["label"]) for row in image_rows(str(images))]
    assert [path.name for path, label in found if label == "c01"] == [f"{n}.png" for n in range(8)]
    copy = shutil.copytree(images, tmp_path / "copy")
    rows = [{"image": str(path.relative_to(images)), "label": label} for path, label in found]
    stored = [{"picture": path.read_bytes(), "label": label} for path, label in found]
    columns = {"image": [str(path) for path, _ in found], "label": [label for _, label in found]}
    data = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    trainer = fmmeta.MetaTrainer(config_of(vit, "letters"), dataset=data)
    sources = [
        opened(config_of(vit, images)),
        opened(config_of(vit, write_rows(copy / "rows.jsonl", rows))),
        opened(config_of(vit, write_rows(tmp_path / "rows.parquet", stored), image_column="picture")),
        opened(*trainer._read_objects(World(Launch(), torch.device("cpu")))),
    ]
    digests = []
    for store in (one.train.store for one in sources):
        values = [row.values["pixel_values"].numpy() for row in store.examples([*range(len(store))], {})]
        labels = [store.text("target", row) for row in range(len(store))]
        digests.append(sorted(zip(labels, map(content_of, values), strict=True)))
    assert len(digests[0]) == 120
    assert digests[0] == digests[1] == digests[2] == digests[3]
    names = [{one.train.store.text("input", row) for row in range(120)} for one in sources[:2]]
    assert names[0] == names[1]


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


def test_texts_and_images_are_not_mixed_up(vit, bert, images):
    own = {"task_type": "tests.support.vision:of_stacked", "pipeline_stages": 2}
    for call, config, parts in (
        (opened, config_of(vit, "letters"), ["dataset=letters holds texts", "reads images"]),
        (opened, config_of(bert, "digits"), ["dataset=digits holds images", "reads texts"]),
        (opened, config_of(bert, images), ["none of the columns text", "it has image"]),
        (describe, config_of(vit, "letters", task_type="causal_lm"), ["which reads images"]),
        (describe, config_of(vit, "letters", pipeline_stages=2), ["not split into pipeline stages"]),
    ):
        check_message(refusal(call, config), *parts)
    check_message(refusal(Config, dataset=["digits", "letters"]), "mixes images and texts")
    check_message(refusal(Config, dataset=["digits"], **own), "pipeline_stages")


@pytest.mark.parametrize("pooling", ["model", "mean"])
@pytest.mark.parametrize("kind", ["vit", "convnext"])
def test_backbones_and_classifiers_have_features_and_a_head(kind, pooling, tmp_path):
    config = config_of(save_vision(tmp_path, kind), "letters", pooling=pooling)
    learner = load_learner(config, describe(config))
    inputs = torch.stack([torch.from_numpy(pixels(c, 0)).permute(2, 0, 1) / 255 for c in range(4)])
    features, logits = learner(pixel_values=inputs)
    assert (features.shape, logits.shape) == ((4, 16), (4, 3))
    torch.testing.assert_close(learner.classify(features)[1], logits)
    assert not torch.allclose(features[0], features[1])
    assert learner.to(torch.bfloat16)(pixel_values=inputs)[1].dtype == torch.bfloat16


def test_batch_norm_is_refused_and_so_is_a_model_without_processor(tmp_path):
    config = config_of(save_vision(tmp_path / "resnet", "resnet"), "letters")
    check_message(refusal(load_learner, config, describe(config)), "has batch norm", "running statistics")
    (tmp_path / "resnet" / "preprocessor_config.json").unlink()
    check_message(refusal(reader_of, config), "preprocessor_config.json")


def test_a_damaged_image_is_a_bad_task(vit, tmp_path):
    root = write_images(tmp_path / "all", classes=6, rows=4)
    for path in (root / "c00").iterdir():
        path.write_bytes(path.read_bytes()[:60])
    (root / "class_splits.json").write_text(json.dumps({"train": [f"c{c:02}" for c in range(6)]}))
    config = config_of(vit, root, n_way=2, eval_episodes=0, outer_steps=4, output_dir=str(tmp_path / "run"))
    message = refusal(fmmeta.MetaTrainer(config).train)
    check_message(message, "cannot be decoded as an image", "--on_bad_task skip")
    skip = config.but(on_bad_task="skip", max_bad_fraction=0.9, output_dir=str(tmp_path / "skip"))
    lines = fmmeta.MetaTrainer(skip).train().log_history
    errors = [bad["error"] for line in lines for bad in line.get("bad_tasks", ())]
    assert errors
    assert all("c00" in one and "cannot be decoded" in one for one in errors)
    assert sum(line["skipped_tasks"] for line in lines) == len(errors)


def test_transforms_change_the_pixels_of_training_episodes(images, vit):
    config = config_of(vit, images, example_transforms=["tests.support.vision:darker"])
    source = opened(config).train
    plain = first_draw(source).episode()
    changed = transformed(first_draw(source), reading(config, source.store.encoder.tokenizer))
    for before, after in zip(plain.support, changed.support, strict=True):
        assert before.labels == after.labels
        light, dark = ((row.values["pixel_values"] + 1) / 2 for row in (before, after))
        assert (light / 2 - dark).abs().max() < 1 / 255 + 1e-6


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_of_images_have_no_tokens(size, images, vit):
    source = opened(config_of(vit, images)).train
    batches = LoadEpisode(source, Batcher(0, size))(first_draw(source).task).batches.query
    assert {*map(tuple, (batch.inputs for batch in batches))} == {("pixel_values",)}
    assert sum(len(batch.weights) for batch in batches) == 6
    assert sum(batch.tokens for batch in batches) == 6  # an image counts as one token


FEW = {"inner_steps": 3, "inner_lr": 0.1, "early_stopping": False}
LORA = {"lora_r": 4, "lora_target_modules": ["all-linear"]}


def test_the_commands_work_on_images(vit, images, tmp_path):
    config = config_of(vit, images, algorithm="protonet", pooling="mean", output_dir=str(tmp_path / "run"))
    model = str(fmmeta.MetaTrainer(config).train().output_dir / "model")
    assert describe(config_of(model, images)).pooling == "mean"
    given = {"n_way": 3, "k_shot": [1], "episodes": 4, "eval_split": "train"}
    methods = ["finetune", "prototype", "linear", "knn"]
    assert len(fmmeta.evaluate(model, str(images), method=methods, **given)["cells"]) == 4
    support, task = paths_of(images, 3, 0, 1, 2), tmp_path / "task"
    adapted = fmmeta.adapt(model, support, inner_steps=20, inner_lr=0.1, output_dir=str(task))
    message = refusal(fmmeta.adapt, model, support, label_names="names")
    check_message(message, "label_names='names'", "leave it out")
    queries = [pixels(c, 7) for c in range(3)]
    answers = adapted.predict(queries)
    assert outputs_of(answers) == outputs_of(fmmeta.load(str(task)).predict(queries))
    assert adapted.accuracy is None
    with pytest.raises(UsageError, match="no image"):
        adapted.predict(["", 3])
    check_message(refusal(adapted.predict, pixels(0, 7)), "are one image", "give a list of images")
    lines, out = tmp_path / "images.txt", tmp_path / "answers.jsonl"
    lines.write_text("".join(f"{path}\n" for path, _ in paths_of(images, 3, 7)))
    with pytest.raises(SystemExit, match="0"):
        fmmeta_main(["predict", f"--model_name_or_path={task}", f"--input={lines}", f"--output={out}"])
    assert [line["label"] for line in lines_of(out)] == outputs_of(answers)
    with pytest.raises(KeyError):  # no class, rather than those of a random head
        pipeline("image-classification", str(task))([Image.fromarray(one) for one in queries])


def test_transformers_answers_as_an_image_classifier_and_the_other_way_round(vit, images, tmp_path):
    queries = [pixels(c, 7) for c in range(3)]
    served = fmmeta.adapt(vit, paths_of(images, 3, 0, 1, 2), **FEW, output_dir=str(tmp_path / "served"))
    pipe = pipeline("image-classification", str(tmp_path / "served"))
    best, wanted = (
        [one[0] for one in pipe([Image.fromarray(one) for one in queries])],
        served.predict(queries),
    )
    assert [one["label"] for one in best] == outputs_of(wanted)
    assert [one["score"] for one in best] == scores_of(wanted, 1e-4)
    model = fmmeta.load(vit)  # not made by fmmeta
    inputs = torch.stack([model.loaded.tokenizer.prepare(one) for one in queries])
    with torch.no_grad():
        logits = AutoModelForImageClassification.from_pretrained(vit).eval()(pixel_values=inputs).logits
    assert outputs_of(model.predict(queries)) == [f"LABEL_{n}" for n in logits.argmax(1).tolist()]


@pytest.fixture
def forms(images, tmp_path, monkeypatch):
    """The same rows of three classes, by the number of an image: paths below the folder of the file, bytes in
    a table, and arrays.
    """
    monkeypatch.chdir(tmp_path)  # relative paths begin at the folder of the file
    copy = shutil.copytree(images, tmp_path / "files" / "all")

    def of(name, *numbers):
        found = [(Path(path).relative_to(copy.parent), label) for path, label in paths_of(copy, 3, *numbers)]
        rows = [{"image": str(path), "label": label} for path, label in found]
        table = [{**row, "image": (copy.parent / row["image"]).read_bytes()} for row in rows]
        arrays = [(pixels(int(label[1:]), int(path.stem)), label) for path, label in found]
        return {
            "paths": write_rows(copy.parent / f"{name}.jsonl", rows),
            "table": write_rows(tmp_path / f"{name}.parquet", table),
            "arrays": arrays,
        }

    return of


@pytest.mark.parametrize("settings", [{}, LORA], ids=["whole", "lora"])
def test_many_tasks_of_images_equal_single_adaptations(vit, forms, tmp_path, settings):
    """Predict reads the image of a row that has a text too, with a model and with adapters."""
    supports, out = forms("support", 0, 1, 2), tmp_path / "many"
    models = fmmeta.adapt_many(vit, supports, output_dir=out, **FEW, **settings)
    assert models.failed == {}
    queries = [pixels(c, 7) for c in range(3)]
    for name, support in supports.items():
        found = models[name].predict(queries)
        wanted = fmmeta.adapt(vit, support, **FEW, **settings).predict(queries)
        assert outputs_of(found) == outputs_of(wanted)
        assert [one.score for one in found] == scores_of(wanted)
    (tmp_path / "query.png").write_bytes(png(queries[0]))
    row = {"text": "a caption", "image": "query.png", "adapter": "paths"}
    rows, answers = str(write_rows(tmp_path / "in.jsonl", [row])), tmp_path / "answers.jsonl"
    wanted = models["paths"].predict(queries[:1])
    model, adapters = {"model_name_or_path": str(out / "paths")}, {"adapters": str(out)}
    for place in (model, adapters) if settings else (model,):
        predict.run(PredictConfig(**place, input=rows, output=str(answers)))
        (line,) = lines_of(answers)
        assert (line["text"], line["label"]) == ("query.png", wanted[0].output)
        assert [line["score"]] == scores_of(wanted)


def test_query_images_are_answered_under_the_names_of_their_rows(vit, forms, tmp_path):
    """By adapt, and by predict from the same files."""
    support, queries = forms("support", 0, 1, 2)["paths"], forms("query", 6, 7)
    contents = [png(array) for array, _ in queries["arrays"]]
    names = {
        "paths": [row["image"] for row in lines_of(queries["paths"])],
        "table": [hashlib.sha256(content).hexdigest()[:32] for content in contents],
    }
    for name, query in queries.items():
        out = tmp_path / name
        adapted = fmmeta.adapt(vit, support, query=query, output_dir=out, **FEW)
        found = lines_of(out / "predictions.jsonl")
        assert [one["truth"] for one in found] == [label for _, label in queries["arrays"]]
        assert [one["label"] for one in found] == outputs_of(adapted.predict(contents))
        if name in names:
            assert [one["text"] for one in found] == names[name]
            answers = tmp_path / "answers.jsonl"
            predict.run(PredictConfig(str(out), input=str(query), output=str(answers)))
            assert [one["label"] for one in lines_of(answers)] == outputs_of(adapted.predictions)
            assert [one["score"] for one in lines_of(answers)] == scores_of(adapted.predictions)
            assert [one["text"] for one in lines_of(answers)] == names["paths"] or name == "table"
    damaged = write_rows(tmp_path / "damaged.parquet", [{"image": b"no image", "label": "c00"}])
    message = refusal(fmmeta.adapt, vit, support, query=damaged, inner_steps=1)
    check_message(message, f"{damaged}:1 cannot be decoded", "fix or remove it")


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


def test_rows_beside_a_folder_of_their_images_are_read(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.npy").write_bytes(array_bytes(np.zeros((2, 2), np.uint8)))
    assert len(image_rows(str(tmp_path))) == 1
    (tmp_path / "train.jsonl").write_text('{"image": "images/a.npy", "label": "cat"}\n')
    assert image_rows(str(tmp_path)) == []


ROWS = [Example([0], 0, values={"nodes": [[1.0] * 4] * 2, "part": [float(n)] * 4}) for n in range(3)]


def named(function: str) -> Collate:
    collate = Collate.of(Config(task_type=f"tests.support.vision:of_{function}"))
    assert collate
    return collate


@pytest.mark.parametrize("workers", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_nested_inputs_train_a_model(workers, tmp_path):
    """Other keys for some rows are an error of the task."""
    model, data = save_nested(tmp_path / "model"), write_rows(tmp_path / "rows.jsonl", nested_rows())
    settings = {"pooling": "mean", "inner_lr": 0.5, "outer_steps": 3, "num_workers": workers}
    kind, run = "tests.support.vision:of_nested", str(tmp_path / "run")
    config = config_of(model, data, **settings, task_type=kind, algorithm="protonet", output_dir=run)
    result = fmmeta.MetaTrainer(config).train()
    assert len(result.log_history) >= 1
    assert result.after > 0.6  # the classes are far from each other
    if workers == "0":
        later = Config(**{**SHORT, **settings, "outer_steps": 20}, model_name_or_path=str(model))
        later = later.but(dataset=[str(data)], task_type="tests.support.vision:of_other_keys_later")
        message = refusal(fmmeta.MetaTrainer(later).train)
        check_message(message, "of_other_keys_later: collate returned", "for the first episode")


def test_a_micro_batch_moves_with_its_nested_inputs():
    inputs = {"graph": {"nodes": torch.zeros(2, 3)}, "parts": [torch.zeros(2)], "name": "x"}
    batch = MicroBatch(inputs, {"labels": torch.zeros(2, dtype=torch.long)}, torch.ones(2))
    moved = batch.to(torch.device("meta")).inputs
    assert [moved["graph"]["nodes"].is_meta, moved["parts"][0].is_meta, moved["name"]] == [True, True, "x"]


def test_the_structure_of_inputs_is_compared():
    collate = named("nested")
    made = collate(ROWS, 0)
    of_inputs = {"graph.nodes": "float32", "parts.0": "float32", "parts.1": "float32"}
    assert structure_of(*made) == {**of_inputs, "targets.labels": "int64"}
    assert structure_of(*pickle.loads(pickle.dumps(collate))(ROWS, 0)) == structure_of(*made)


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (lambda rows: [1], ["a:b returned [1]", "return a dictionary"]),
        (lambda rows: 1 / 0, ["ZeroDivisionError", "fix it"]),
        (one_row_less, ["pixel_values of shape [2, 3, 8, 8] for 3 rows"]),
        (nested, ["'graph.nodes'", "{'input_ids': 'int64'}", "return the same keys"]),
    ],
)
def test_functions_that_make_other_inputs_are_refused(function, parts):
    def call(rows, pad_token_id):
        return function([row.values for row in rows]), {"labels": labels_of(rows)}

    collate = Collate("a:b", call, {"input_ids": "int64"} if function is nested else {})
    check_message(refusal(collate, ROWS, 0), *parts)
    missing = "task_type=tests.support.vision:of_missing"
    check_message(refusal(named, "missing"), missing, "write module:name")
