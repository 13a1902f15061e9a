"""Loads a learner and its tokenizer or image processor from a folder, a hub id or `tiny`.

Weights come from safetensors, never from pickles.
"""

import copy
import inspect
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer, normalizers
from torch import nn
from torch.utils import swap_tensors
from transformers.utils import is_vision_available

from fmmeta.common.errors import CLEAR, UsageError, one_line, usage_errors
from fmmeta.common.processes import hide_download_bars, quiet_logger
from fmmeta.common.progress import Warn
from fmmeta.common.text import shortened
from fmmeta.config.algorithms import find
from fmmeta.config.conflicts import DEFAULT_LENGTH
from fmmeta.config.fields import refuse_first
from fmmeta.config.learners import CAUSAL, SEQ2SEQ_LM
from fmmeta.config.settings import Config
from fmmeta.learners import quantized, text_part
from fmmeta.learners.base import HFLearner, Learner
from fmmeta.learners.experts import check_mixture, has_experts
from fmmeta.learners.files import (
    GENERATION_FILE,
    HEAD_FILE,
    SENTENCE_PROMPTS,
    adapter_folder,
    base_model_name,
    checkpoint_files,
    encoder_file,
    encoder_source,
    is_path,
    reachable,
    read_json,
    read_stored,
    reading,
    remembered,
    sentence_modules,
    sentence_settings,
    split_source,
)
from fmmeta.learners.forward_options import check_packing, checkpoint_layers
from fmmeta.learners.lora import import_peft, inject, merge, restore_adapters
from fmmeta.learners.parameter_sets import choose_parameters
from fmmeta.learners.tiny import byte_tokenizer, image_settings, tiny_config, tiny_vit_config
from fmmeta.tasks.data.images import PROCESSOR_FILE, ImageReader

MODULE_FILE = "model.safetensors"  # of a user's module
NO_CONFIG = transformers.PretrainedConfig.from_dict({"num_hidden_layers": 0})
"""Of a module without a configuration, whose activations are not known."""
AFTER_PADDING = {
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "roberta-prelayernorm",
    "camembert",
    "longformer",
    "mpnet",
    "esm",
    "data2vec-text",
    "ibert",
    "xmod",
    "luke",
    "layoutlmv3",
    "markuplm",
}
"""Model types that count positions from pad_token_id + 1."""


def max_positions(hf_config: Any) -> int | None:
    """Largest number of tokens of a text; None if the configuration sets no limit.

    A text longer than `rotary_positions` would change the results of those beside it.
    """
    most = getattr(hf_config, "max_position_embeddings", None)
    if not isinstance(most, int) or most <= 0:
        return None
    most = min(most, rotary_positions(hf_config) or most)
    return most - (hf_config.pad_token_id + 1 if hf_config.model_type in AFTER_PADDING else 0)


def rotary_positions(hf_config: Any) -> int | None:
    """Number of positions beyond which all rows of a pass get another rotary table if the longest of them
    does (longrope, as in Phi-3); None for other tables. That of dynamic NTK changes beyond
    max_position_embeddings.
    """
    stored = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    tables = [one for one in (stored, *stored.values()) if isinstance(one, dict)]  # or one per type of layer
    name = "original_max_position_embeddings"
    found = [
        one.get(name, getattr(hf_config, name, None))
        for one in tables
        if one.get("rope_type", one.get("type")) in ("longrope", "su")
    ]
    return min((one for one in found if one and one < hf_config.max_position_embeddings), default=None)


def fitted(config: Config, hf_config: Any) -> Config:
    """The settings with the default max_length lowered to the model's positions, or to the longest text of a
    sentence-transformers folder.

    Raises `UsageError` if a given max_length is above the positions.
    """
    most = max_positions(hf_config)
    longest = sentence_settings(config.model_source).get("max_seq_length")
    if config.max_length == DEFAULT_LENGTH and isinstance(longest, int) and 0 < longest < (most or math.inf):
        most = longest
    if most is None or config.max_length <= most:
        return config
    if config.max_length != DEFAULT_LENGTH or config.learner.ordered:
        name = "context + chunk" if config.learner.ordered else "max_length"
        why = " with one rotary table for rows of all lengths" if rotary_positions(hf_config) else ""
        raise UsageError(
            f"{name}={config.max_length} is above the {most} positions of model_name_or_path="
            f"{config.model_name_or_path}{why}; use {most} or less"
        )
    return replace(config, max_length=most)


def fitted_to_model(config: Config, trains: bool = True) -> Config:
    """`fitted` to the model that `config` names. trains: whether any weights are changed.

    Raises `UsageError` for a model that cannot be trained so.
    """
    hf_config = describe(config).hf_config
    quantized.check_use(config, hf_config, trains=trains)
    return fitted(config, hf_config)


CHANGING_GREEDY = {
    **{"repetition_penalty": 1, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0},
    **{"num_beams": 1, "guidance_scale": 1, "min_length": 0, "min_new_tokens": 0, "stop_strings": []},
    **{"forced_bos_token_id": None, "forced_eos_token_id": None, "suppress_tokens": []},
    **{"begin_suppress_tokens": [], "bad_words_ids": [], "sequence_bias": {}},
    "exponential_decay_length_penalty": None,
}
"""Generation settings, beside sampling, that would change greedy answers, with the value that does not."""
DROPOUTS = ("dropout", "pdrop", "layerdrop", "drop_path", "jitter")  # in names of probabilities, or of noise
TOKENIZERS = (  # files, one of which is beside every tokenizer that is not made by code alone
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "vocab.bpe",
    "merges.txt",
    "bpe.codes",
    "dict.txt",
    "tokenizer.model",
    "spiece.model",
    "spm.model",
    "sentencepiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "tiktoken.model",
    "qwen.tiktoken",
    "tekken.json",
)
FEWEST = 64  # tokens of a tokenizer beside its special ones, for a model of more rows than bytes
IDS = ("pad", "bos", "eos", "unk", "sep", "cls", "mask", "decoder_start")  # NAME_token_id in configurations
READ = ("pad_token_id", "decoder_start_token_id")  # of these, those that are put before the model
ENDS = ("eos_token_id", "pad_token_id", "bos_token_id")  # in generation settings
NUMBER = re.compile(r"\.\d+\.")  # of a layer, in the name of a weight
MOST_BYTES = 260  # rows of an embedding whose tokens may be bytes


@dataclass(frozen=True)
class Description:
    """A model before its weights are read.

    pooling: model, mean or cls. restored: settings of the checkpoint that training changes and export
    restores: probabilities of dropouts, which it sets to 0, and output_router_logits. normalizes: whether
    sentence-transformers scales the folder's vectors to length 1. labels: names of the classes of a model
    that is adapted to one task. classes: of all training tasks, where one head serves them; 0: the head has
    the classes of an episode. images: whether it reads images. ends: of a language model, the tokens that end
    a text by its generation settings. is_module: whether the learner is the user's module, which has no
    configuration. whole: the configuration of the checkpoint, if the model is a part of it (text_part.py).
    """

    hf_config: Any
    pooling: str
    restored: dict[str, Any]
    normalizes: bool = False
    labels: tuple[str, ...] = ()
    classes: int = 0
    images: bool = False
    ends: tuple[int, ...] = ()
    is_module: bool = False
    whole: Any = None

    @property
    def pad_token_id(self) -> int:
        """0 where there are no tokens."""
        return getattr(self.hf_config, "pad_token_id", None) or 0

    @property
    def router_loss(self) -> bool:
        """Whether the loss includes that of the routers of a mixture of experts."""
        return "output_router_logits" in self.restored

    def dependent(self, config: Config) -> str:
        """The setting by which losses of rows depend on each other, with its value; "" if they do not."""
        task_type = "" if config.learner.kind.rows_are_independent else f"task_type={config.task_type}"
        return "output_router_logits=True of config.json" if self.router_loss else task_type

    def outputs(self, config: Config) -> int:
        """Outputs of the classifier head; 0 for causal_lm."""
        return max(self.classes, config.most_classes)


def describe(config: Config) -> Description:
    """Read and check a model's configuration. Raises `UsageError` for models that cannot be meta-trained."""
    from transformers.models.auto import modeling_auto as known

    if config.learner.make is not None:
        return Description(NO_CONFIG, "model", {}, is_module=True)
    hide_download_bars()  # one per rank and file otherwise
    for library in ("transformers", "bitsandbytes"):
        quiet_logger(library)
    if config.lora_r:
        import_peft(config)
    if config.model_revision and (
        config.builtin_model or is_path(config.model_name_or_path) or Path(config.model_name_or_path).exists()
    ):
        raise UsageError(
            f"model_revision={config.model_revision} is for models of the hub, and model_name_or_path="
            f"{config.model_name_or_path} is not one; leave it out"
        )
    name = base_model_name(config.model_source)
    if config.builtin_images:
        hf_config = tiny_vit_config()
    elif config.builtin_model:
        hf_config = tiny_config(config.learner.auto, max(512, config.max_length))
    else:
        hf_config = read_hf_config(name, config.trust_remote_code)
    whole, part = hf_config, text_part.text_config(hf_config) if config.learner.auto == CAUSAL else None
    hf_config = part or whole
    kind, alone = hf_config.model_type, hf_config.get_text_config() is hf_config
    of_pixels = (
        hasattr(hf_config, "num_channels") or kind in known.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    )
    images = alone and of_pixels and not hasattr(hf_config, "vocab_size")
    pooling = resolve_pooling(config, images)
    bidirectional = kind in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not (
        getattr(hf_config, "is_decoder", False) or getattr(hf_config, "is_encoder_decoder", False)
    )
    reasons = (
        (
            not hasattr(hf_config, "pad_token_id") and not alone,
            f"a {kind}, a text model with others around it; give a text model alone, or --task_type causal_lm"
            " if transformers has a class for its language model",
        ),
        (
            part is not None and config.lora_merge,
            f"a part of a {whole.model_type}, and lora_merge=True merges into whole models; leave it out, and"
            " merge the adapters by peft",
        ),
        (
            images and config.learner.writes,
            f"a {kind}, which reads images; use --task_type classification",
        ),
        (
            images and config.pipeline_stages > 1,
            f"a {kind}, an image model, and these are not split into pipeline stages; use ZeRO 3",
        ),
        (
            config.learner.auto == CAUSAL and bidirectional,
            f"a {kind}, whose tokens see those behind them, answers included; give a decoder, or use"
            " --task_type classification",
        ),
        (
            config.learner.auto == SEQ2SEQ_LM and not getattr(hf_config, "is_encoder_decoder", False),
            f"a {kind}, which is no encoder with a decoder; give one, such as T5 or BART",
        ),
        (
            pooling != "model" and getattr(hf_config, "is_encoder_decoder", False),
            f"a {kind}, an encoder and a decoder, which has no features to pool; give an encoder alone",
        ),
    )
    refuse_first((holds, f"model_name_or_path={name} is {why}") for holds, why in reasons)
    quantized.check_kind(name, config, hf_config)
    restored = {
        key: value
        for key, value in vars(hf_config).items()
        if any(part in key for part in DROPOUTS)
        and any(type(one) in (int, float) for one in (value if isinstance(value, list) else [value]))
    }
    hf_config.update({key: [0.0] * len(v) if isinstance(v, list) else 0.0 for key, v in restored.items()})
    if has_experts(hf_config) and getattr(hf_config, "output_router_logits", False):
        # learners ask for them where they learn: passes with a cache cannot compute the loss
        restored["output_router_logits"], hf_config.output_router_logits = True, False
    for key in [f"{one}_token_id" for one in IDS]:
        if getattr(hf_config, key, None) == -1:  # how LLaMA 1 says that there is none
            setattr(hf_config, key, None)
    if not images and getattr(hf_config, "pad_token_id", None) is None:
        hf_config.pad_token_id = next(iter(with_row(getattr(hf_config, "eos_token_id", None), hf_config)), 0)
    if kind in AFTER_PADDING:
        pad, rows, most = (
            getattr(hf_config, key, None) for key in ("pad_token_id", "vocab_size", "max_position_embeddings")
        )
        if type(pad) is not int or not 0 <= pad < min(rows or math.inf, (most or math.inf) - 1):
            raise UsageError(
                f"model_name_or_path={name}: pad_token_id={pad!r} of config.json is not among the {rows} rows"
                f" of its embedding, or leaves none of its {most} positions, which begin behind it; use the"
                " id of the padding token"
            )
    normalizes = pooling != "model" and any(
        kind == "Normalize" for kind, _ in sentence_modules(config.model_source)
    )
    description = Description(
        hf_config,
        pooling,
        restored,
        normalizes,
        images=images,
        ends=with_row(generation_settings(config, hf_config).get("eos_token_id"), hf_config)
        if config.learner.writes
        else (),
        whole=None if part is None else whole,
    )
    if has_experts(hf_config):
        hf = empty_hf(replace(config, attn_implementation=None), description)
        check_mixture(hf, config, description.router_loss)
    return description


def generation_settings(config: Config, hf_config: Any) -> dict[str, Any]:
    """The content of the checkpoint's generation_config.json, or of its base's; without that file, the
    settings in its configuration, as transformers reads them. Raises `UsageError`.
    """
    base = base_model_name(config.model_source)
    for place in dict.fromkeys((config.model_source, base)):
        if stored := read_json(place, GENERATION_FILE, dict):
            return stored
    stored = read_json(base, "config.json", dict) or hf_config.to_dict()
    known = vars(transformers.GenerationConfig())
    return {name: value for name, value in stored.items() if name in known}


def listed(found: Any) -> Sequence[Any]:
    """The ids of a setting that is an id or a list of them."""
    return found if isinstance(found, (list, tuple)) else [found]


def with_row(found: Any, hf_config: Any) -> tuple[int, ...]:
    """The ids of a setting that the vocabulary has; `refuse_without_row` names the others."""
    rows = getattr(hf_config, "vocab_size", None) or math.inf
    return tuple(dict.fromkeys(one for one in listed(found) if type(one) is int and 0 <= one < rows))


def read_hf_config(name: str, trust_remote_code: bool) -> Any:
    """transformers' configuration of a folder or hub id. Raises `UsageError`."""
    given = f"model_name_or_path={name}"
    kind, folder = next(iter(sentence_modules(name)), ("Transformer", ""))
    refuse_first(
        [
            (not Path(name).exists() and is_path(name), f"{given} is not a folder; check the path"),
            (
                kind != "Transformer",
                f"{given} begins with the sentence-transformers module {kind}, and only models of"
                " transformers can be trained; give one that begins with Transformer",
            ),
            (
                Path(name).is_dir() and not Path(name, folder, "config.json").is_file(),
                f"{given} holds no {Path(folder, 'config.json')}; give a Hugging Face folder or hub id",
            ),
            (
                not reachable(name) and encoder_file(name, "config.json") is None,
                f"{given} is no folder, and the hub cannot be reached for a model of that name; check the"
                " path, or the network",
            ),
        ]
    )
    with reading(name, "its configuration"):
        return transformers.AutoConfig.from_pretrained(
            **encoder_source(name), trust_remote_code=trust_remote_code
        )


def not_computed(source: str) -> str:
    """What changes the vectors of a sentence-transformers folder and is not computed here; "" if nothing is.

    Raises `UsageError` for broken files.
    """
    parts = [
        f"the module {kind} ({path or 'no folder'})"
        for kind, path in sentence_modules(source)
        if kind not in ("Transformer", "Pooling", "Normalize", "Dropout")  # the last one trains alone
    ]
    prompt = read_json(
        source, SENTENCE_PROMPTS, lambda one: one.get("prompts", {}).get(one.get("default_prompt_name"))
    )
    if prompt:
        parts.append(f"the default prompt {shortened(prompt)}")
    return " and ".join(parts)


def resolve_pooling(config: Config, images: bool = False) -> str:
    """`auto` follows fmmeta.json, or for texts the pooling of a sentence-transformers folder; without one it
    is the model's pooling.

    Raises `UsageError` for a folder with another pooling, or whose vectors are not those of its pooling.
    """
    if not config.learner.pools:
        return "model"
    if config.pooling != "auto":
        return config.pooling
    if config.builtin_model:
        return "mean"
    stored = remembered(config.model_source).get("pooling")
    if stored in ("mean", "cls", "model"):
        return stored
    if images:
        return "model"
    if parts := not_computed(config.model_source):
        raise UsageError(
            f"pooling=auto: the vectors of model_name_or_path={config.model_name_or_path} need {parts}, which"
            " fmmeta does not compute; choose --pooling mean or cls to train the encoder without"
        )
    modules = dict(sentence_modules(config.model_source))
    file = f"{modules.get('Pooling', '1_Pooling')}/config.json"
    modes = read_json(config.model_source, file, dict)
    if modes is None and "Pooling" in modules:
        raise UsageError(
            f"pooling=auto: model_name_or_path={config.model_name_or_path} lacks {file}, which its"
            " modules.json names; fetch it again, or choose a pooling with --pooling"
        )
    if modes is None:
        return "model"
    chosen = [key for key, value in modes.items() if key.startswith("pooling_mode_") and value is True]
    for pooling, key in (("cls", "pooling_mode_cls_token"), ("mean", "pooling_mode_mean_tokens")):
        if chosen == [key] or (not chosen and modes.get("pooling_mode") == pooling):
            return pooling
    raise UsageError(
        f"pooling=auto: {file} of model_name_or_path={config.model_name_or_path} has a pooling"
        " that is not mean or cls; choose one with --pooling"
    )


def load_tokenizer(
    config: Config, description: Description, notice: Callable[[str], None], given: Any = None
) -> Any:
    """The `given` tokenizer, else the checkpoint's; bytes for the built-in model and for checkpoints with
    neither a tokenizer nor more rows than bytes.

    Its padding token becomes the model's: sequence classifiers look for it among the ids. Of an image model,
    its `ImageReader`. Raises `UsageError` for a tokenizer or a configuration with tokens that the model has
    no rows for.
    """
    if description.is_module:
        return given
    if description.images:
        return load_image_reader(config, given)
    name, hf_config, bytes_ = config.model_source, description.hf_config, byte_tokenizer()
    settings = sentence_settings(name)
    if config.max_length < DEFAULT_LENGTH and config.max_length == max_positions(hf_config):
        notice(f"max_length {config.max_length}: {name} has no more positions")
    elif config.max_length < DEFAULT_LENGTH and config.max_length == settings.get("max_seq_length"):
        notice(f"max_length {config.max_length}, the max_seq_length of {name}")
    if most := rotary_positions(hf_config):
        notice(
            f"{name} is used up to {most} positions: beyond them its rotary table (longrope) depends on the"
            " longest row of a pass"
        )
    if config.pooling != "auto" and description.pooling != "model" and (parts := not_computed(name)):
        notice(Warn(f"pooling={config.pooling}: {name} is trained and exported without {parts}"))
    if description.normalizes and not config.feature_norm:
        notice(
            f"{name} scales its vectors to length 1, and a linear head sees them as they are; --feature_norm"
            " 3.16 is a length to try"
        )
    rows = embedding_rows(config, description)
    tokenizer = read_tokenizer(config) if given is None else copy.deepcopy(given)
    missing = tokenizer is None or (given is None and (rows or 0) > MOST_BYTES and is_empty(tokenizer))
    if missing and rows is not None and not len(bytes_) <= rows <= MOST_BYTES:
        raise UsageError(
            f"model_name_or_path={name} has {rows} rows in its embedding, and no tokenizer with a vocabulary"
            " beside it; add its tokenizer (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    if tokenizer is None:
        if not config.builtin_model:
            notice(Warn(f"{name} has no tokenizer: texts are read as bytes"))
        tokenizer = bytes_
    if tokenizer.eos_token_id is None and description.ends:
        tokenizer.eos_token = next(filter(None, tokenizer.convert_ids_to_tokens([*description.ends])), None)
    stored = generation_settings(config, hf_config) if config.learner.writes else {}
    if stored:
        unused = [key for key, no in CHANGING_GREEDY.items() if stored.get(key) not in (None, no)]
        if unused:
            notice(
                f"answers are greedy and end at tokens alone: {GENERATION_FILE} of {name} has"
                f" {', '.join(unused)}, which exports keep"
            )
    if rows is not None:
        if given is None and (dropped := drop_unused(tokenizer, rows)):
            notice(Warn(f"{name}: {' '.join(dropped)} have no row in its embedding, and are read as text"))
        where = f"model_name_or_path={name}" if given is None else f"tokenizer={type(tokenizer).__name__}"
        refuse_without_row(where, hf_config, stored, tokenizer, rows, notice)
    if hf_config.model_type not in AFTER_PADDING and tokenizer.pad_token_id is not None:
        hf_config.pad_token_id = tokenizer.pad_token_id
    if given is None and settings.get("do_lower_case"):
        lower_case(name, tokenizer)
    return tokenizer


def lower_case(name: str, tokenizer: Any) -> None:
    """Lower the case of every text, as sentence-transformers does for do_lower_case. Raises `UsageError`."""
    with reading(name, "do_lower_case"):
        backend = tokenizer.backend_tokenizer
        before = [backend.normalizer] if backend.normalizer else []
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])


def is_empty(tokenizer: Any) -> bool:
    """Whether there is no tokenizer, or one of special tokens: transformers makes one without any file."""
    if tokenizer is None:
        return True
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    return len(tokenizer.get_vocab().keys() - special) < FEWEST


def embedding_rows(config: Config, description: Description) -> int | None:
    """Rows of the input embedding, or of a language model's output layer if it has fewer; None if the model
    does not say.
    """
    hf_config = copy.deepcopy(description.hf_config)
    hf_config.pad_token_id = 0  # torch makes no embedding for one beyond its rows
    given = replace(config, attn_implementation=None)  # refused where the model is made
    hf, layers = empty_hf(given, replace(description, hf_config=hf_config)), list[Any]()
    with suppress(Exception):  # of a user's class, or one that does not say
        layers = [hf.get_input_embeddings(), hf.get_output_embeddings()]
    # answers are scored with its size
    if config.learner.writes and not hasattr(next(iter(layers), None), "weight"):
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path} ({type(hf).__name__}) does not say which"
            " layer its embedding is; define get_input_embeddings in its class"
        )
    rows = [layer.weight.shape[0] for layer in layers if hasattr(layer, "weight")]
    return min(rows, default=getattr(hf_config, "vocab_size", None))


def drop_unused(tokenizer: Any, rows: int) -> list[str]:
    """Remove special tokens beyond `rows` that neither the tokenizer nor its chat template writes.

    transformers adds those of its classes to a vocabulary without them, and a padding token is often added.
    """
    model = getattr(getattr(tokenizer, "_tokenizer", None), "model", None)
    written = {getattr(tokenizer, f"{one}_token", None) for one in ("bos", "eos", "sep", "cls")}
    written.add(getattr(model, "unk_token", None))  # one that the vocabulary does not need is not written
    template, added = str(getattr(tokenizer, "chat_template", "")), tokenizer.added_tokens_decoder
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= rows}
    needed = [
        token
        for token, number in beyond.items()
        if token in written or token in template or number not in added or not added[number].special
    ]
    if not beyond or needed or not tokenizer.is_fast:  # where one is needed the tokenizer is refused
        return []
    facts = json.loads(tokenizer.backend_tokenizer.to_str())
    facts["added_tokens"] = [one for one in facts["added_tokens"] if one["content"] not in beyond]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(facts))
    for one in ("pad", "mask", "unk"):
        if getattr(tokenizer, f"{one}_token", None) in beyond:
            setattr(tokenizer, f"{one}_token", None)
    return sorted(beyond)


def refuse_without_row(
    where: str,
    hf_config: Any,
    stored: Mapping[str, Any],
    tokenizer: Any,
    rows: int,
    notice: Callable[[str], None],
) -> None:
    """Raise `UsageError` for a tokenizer or ids of the configuration beyond the rows of the embedding.

    Every token counts, as a text may contain it. An id that the model never reads is named in a notice.
    stored: the generation settings of a language model.
    """
    with reading(hf_config.name_or_path, "its tokenizer"):
        most = max([*tokenizer.get_vocab().values(), *tokenizer("a")["input_ids"]])
    if most >= rows:
        raise UsageError(
            f"{where}: the tokenizer has {most + 1} tokens, and the embedding of the model {rows} rows; call"
            " model.resize_token_embeddings(len(tokenizer)) and save both, or remove the added tokens"
        )
    starts = getattr(hf_config, "decoder_start_token_id", None)
    if getattr(hf_config, "is_encoder_decoder", False) and starts is None:
        raise UsageError(
            f"{where}: config.json has no decoder_start_token_id, with which its decoder begins; add it"
        )
    own = {key: getattr(hf_config, key, None) for key in (f"{one}_token_id" for one in IDS)}
    others = {key: stored[key] for key in ENDS if key in stored and repr(stored[key]) != repr(own[key])}
    for file, ids in (("config.json", own), (GENERATION_FILE, others)):
        for key, number in [(key, one) for key, found in ids.items() for one in listed(found)]:
            if number in (None, -1) or (type(number) is int and 0 <= number < rows):
                continue
            text = f"{where}: {key}={number!r} of {file} is not among the {rows} rows of its embedding"
            if type(number) is not int or number < 0 or (ids is own and key in READ):
                raise UsageError(f"{text}; use the id of a token, or null")
            notice(Warn(f"{text}, and is not used"))


def load_image_reader(config: Config, given: Any = None) -> ImageReader:
    """The images as the built-in model, the `given` image processor or that of the checkpoint prepares them.

    Raises `UsageError`.
    """
    if given is not None:
        return ImageReader(json.loads(given.to_json_string()), given)
    place = base_model_name(config.model_source)
    settings = image_settings() if config.builtin_model else read_json(place, PROCESSOR_FILE, dict)
    if settings is None:
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path} is an image model without {PROCESSOR_FILE}; add"
            " the one of its image processor (AutoImageProcessor, save_pretrained)"
        )
    if not is_vision_available():
        return ImageReader(settings)
    if config.builtin_model:
        return ImageReader(settings, transformers.ViTImageProcessorPil(**settings))
    with reading(place, "its image processor"):  # the same numbers with and without torchvision
        processor = transformers.AutoImageProcessor.from_pretrained(
            **split_source(place), backend="pil", local_files_only=not reachable(place)
        )
    return ImageReader(settings, processor)


def suggest_chat(config: Config, tokenizer: Any, notice: Callable[[str], None]) -> None:
    """Log that the tokenizer has a chat template, where plain prompts are the default and not the model's."""
    if (
        config.learner.generates
        and config.prompt_template == "plain"
        and getattr(tokenizer, "chat_template", None)
        and "prompt_template" not in remembered(config.model_source)
    ):
        notice(
            "prompt_template=plain (the default), and the tokenizer has a chat template; an instruction-tuned"
            " model is used with it: --prompt_template chat"
        )


def read_tokenizer(config: Config) -> Any:
    """The tokenizer of the checkpoint, of its base model where peft saved none, or the one that the code of
    its family makes without a file; None if there is none. Raises `UsageError`.
    """

    def read(place: str) -> Any:
        return transformers.AutoTokenizer.from_pretrained(
            **encoder_source(place), trust_remote_code=config.trust_remote_code
        )

    base = base_model_name(config.model_source)
    for place in dict.fromkeys((config.model_source, base)):
        if any(encoder_file(place, name) for name in TOKENIZERS):
            with reading(place, "its tokenizer"):
                return read(place)
    with suppress(Exception):
        made = None if config.builtin_model else read(base)
        return None if is_empty(made) else made


def load_learner(config: Config, description: Description) -> Any:
    """Read the weights in fp32; new ones (built-in model, new head, adapters) depend on the seed only."""
    if description.is_module:
        return load_module(config)
    hf = load_hf(config, description)
    torch.manual_seed(config.seed)
    learner = wrap(hf, config, description)
    if config.lora_r:
        restore_adapters(learner, config)
    initialize_head(learner, config)
    if config.packing:
        check_packing(hf, lambda given: learner(**given))
    of_library = type(hf).__module__.startswith("transformers.")
    if not (
        of_library or description.images or not config.learner.plain
    ):  # outputs of other learners are of any kind
        check_output(learner, config, description)
    return learner.train()


def load_module(config: Config) -> Learner:
    """The user's module in fp32, with the weights of the folder --model_name_or_path, if it names one.

    Raises `UsageError`.
    """
    torch.manual_seed(config.seed)
    assert config.learner.make is not None
    with usage_errors(f"task_type={config.task_type} cannot be made", "give a learner without arguments"):
        learner = config.learner.make().float().train()
    refuse_running_statistics(learner, config)
    name = config.model_name_or_path
    if not config.builtin_model:
        with reading(name, MODULE_FILE):
            learner.load_state_dict(load_file(Path(name, MODULE_FILE)))
    choose_parameters(learner, config)
    return learner


def check_output(learner: HFLearner, config: Config, description: Description) -> None:
    """Raise `UsageError` if a model of a user's class returns no logits, or hidden states, of the right shape
    for a text of two tokens. One that returns nothing at all here may need a GPU.
    """
    ids, returned, shape = torch.ones(1, 2, dtype=torch.long), list[Any](), list[int]()
    with (
        learner.hf.register_forward_hook(lambda *args: returned.append(args[-1])),
        suppress(Exception),
        torch.no_grad(),
    ):
        shape = [*learner.logits(learner(input_ids=ids, attention_mask=torch.ones_like(ids))).shape]
    field = "logits" if config.learner.generates or description.pooling == "model" else "last_hidden_state"
    wanted = [1, description.outputs(config)]
    if config.learner.generates:  # it may have more outputs than tokens
        wanted = [1, 2, max([embedding_rows(config, description) or 0, *shape[-1:]])]
    if returned and shape != wanted:
        raise UsageError(
            f"model_name_or_path={config.model_name_or_path} ({type(learner.hf).__name__}) returns a"
            f" {type(returned[0]).__name__} for a text of two tokens, which gives outputs of shape"
            f" {shape or None} in place of {wanted}; return a ModelOutput of transformers with {field} in its"
            " forward"
        )


def initialize_head(learner: Learner, config: Config) -> None:
    """Set a head that every task initialises to zero; else load the head stored beside an encoder with
    fmmeta's pooling, if it has outputs for as many classes.
    """
    if config.head_init != "learned":
        for name in learner.head_names:
            param = learner.get_parameter(name)  # without storage in a LazyModel
            swap_tensors(param, nn.Parameter(torch.zeros(param.shape), param.requires_grad))
        return
    stored = read_stored(config.model_source, HEAD_FILE, load_file) if learner.own_head else None
    if stored is None:
        return
    for name in learner.head_names:
        param, found = learner.get_parameter(name), stored.get(name)
        if found is not None and found.shape == param.shape:
            param.data.copy_(found)
        elif find(config.algorithm).trains_nothing:
            raise UsageError(
                f"head_init=learned: the head of {config.model_name_or_path} has the shape"
                f" {list(found.shape) if found is not None else None}, and that of these tasks"
                f" {list(param.shape)}; use --head_init zero, or tasks of as many classes"
            )


def load_hf(config: Config, description: Description) -> Any:
    """The HF model before anything is trained, in fp32."""
    auto, name = auto_class(config, description), config.model_source
    base = base_model_name(name)
    torch.manual_seed(config.seed)
    if config.builtin_model:
        return auto.from_config(description.hf_config)
    with reading(name, "the model"):
        loaded = auto.from_pretrained(
            **encoder_source(base),
            adapter_kwargs={"local_files_only": not reachable(base)},
            config=description.whole or description.hf_config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **(
                {"quantization_config": transformers.BitsAndBytesConfig(**quantized.NF4)}
                if config.load_in_4bit
                else {}
            ),
        )
        hf = loaded
        if isinstance(loaded, tuple):  # code of a repository may return the model alone
            hf, info = loaded
            shapes = {key: stored for key, stored, _ in info["mismatched_keys"]}
            check_complete(hf, config, description, info["missing_keys"], shapes)
            refuse_other_layers(hf, config, info["unexpected_keys"])
            files = list[str]()
            with suppress(UsageError):  # weights that transformers finds elsewhere
                files = checkpoint_files(base)
            for _ in stored_tensors(hf, base, files):  # checks them
                pass
        params = dict(hf.named_parameters(remove_duplicate=False))
        for second, first in hf.get_expanded_tied_weights_keys(all_submodels=True).items():
            if params.get(first) is not params.get(second):  # transformers has untied them
                raise different_tied(config, first, second)
        packed = getattr(hf, "is_quantized", False)
        if packed:
            quantized.replace_products(hf)
        if base != name and not config.lora_r:  # adapters that are trained further are not merged
            merge(hf, adapter_folder(name), config, keep=packed)
            for param in hf.parameters():  # peft had frozen the base
                param.requires_grad_(param.is_floating_point())
        return hf if description.whole is None else text_part.take(hf)


def check_complete(
    hf: Any,
    config: Config,
    description: Description,
    missing: Collection[str],
    shapes: Mapping[str, Sequence[int]],
) -> None:
    """Raise `UsageError` for weights that the checkpoint lacks or stores in other shapes: they would start
    from random values.

    A model with a head may lack its pooler, and with transformers' pooling all that is beside the base model.
    missing: names of weights. shapes: stored shapes that differ from those of `hf`, by name.
    """
    classifier = config.learner.has_head
    above = {name for name, _ in hf.named_children()} - {hf.base_model_prefix}
    new = above if classifier and description.pooling == "model" else ()
    ignored = hf._keys_to_ignore_on_load_missing or ()

    def needed(name: str) -> bool:
        parts = name.split(".")
        return parts[0] not in new and not (classifier and "pooler" in parts)

    where, wanted = f"model_name_or_path={base_model_name(config.model_source)}", hf.state_dict()
    wrong = [
        f"{name} of shape {[*shapes[name]]} (its configuration says {[*value.shape]})"
        for name, value in wanted.items()
        if name in shapes and needed(name)
    ]
    if wrong:
        raise UsageError(f"{where} holds {first_three(wrong)}; fix config.json or the weights")
    names = [name for name, _ in hf.named_parameters()]
    lacking = [
        name
        for name in names
        if name in missing and needed(name) and not any(re.search(pattern, name) for pattern in ignored)
    ]
    if lacking:
        raise UsageError(
            f"{where} lacks {len(lacking)} of the {len(names)} weights of {type(hf).__name__}"
            f" ({first_three(lacking)}); give a complete checkpoint, with the names that save_pretrained"
            " writes"
        )


def refuse_other_layers(hf: Any, config: Config, unused: Collection[str]) -> None:
    """Raise `UsageError` for weights of layers that the configuration does not count. unused: names."""

    def of_any_layer(name: str) -> str:
        return NUMBER.sub(".N.", name.removeprefix(f"{hf.base_model_prefix}."))

    known = {of_any_layer(name) for name in hf.state_dict() if NUMBER.search(name)}
    layers = [name for name in unused if NUMBER.search(name) and (of_any_layer(name) in known or not known)]
    if layers:
        raise UsageError(
            f"model_name_or_path={base_model_name(config.model_source)} holds {len(layers)} weights of layers"
            f" that its configuration does not count ({first_three(sorted(layers))}); fix config.json"
        )


def stored_tensors(
    hf: Any, name: str, paths: Sequence[str]
) -> Iterator[tuple[str, str, str, str | None, list[int]]]:
    """File, name in the file, name in `hf` and shape of each tensor of a checkpoint. transformers translates
    old names. Tensors outside `hf` have their names in the model of the checkpoint. Between the last two: of
    a tensor that is converted on the way, such as one expert of many, the pattern of its name in
    transformers' WeightConverter; the name is that of the first result.

    Raises `UsageError` for floating-point weights that are stored in another type, such as the whole numbers
    of a quantised checkpoint: they would be read as they are.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    wanted, whole = hf.state_dict(), text_part.whole_of(hf)
    of_whole = wanted if whole is hf else whole.state_dict()
    mapping, prefix = get_model_conversion_mapping(whole), whole.base_model_prefix
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    for path in paths:
        with reading(name, path), safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118  (a safetensors handle is no dict)
                renamed, pattern = rename_source_key(key, renamings, converters, prefix, of_whole)
                if renamed not in of_whole and key in of_whole:  # it is stored as the model computes with it
                    renamed, pattern = key, None
                renamed = text_part.inside(hf, renamed)
                stored = file.get_slice(key)
                dtype, of_floats = (
                    stored.get_dtype(),
                    renamed in wanted and wanted[renamed].is_floating_point(),
                )
                if of_floats and not dtype.startswith(("F", "BF")):
                    raise UsageError(
                        f"model_name_or_path={name} holds {key} as {dtype}, which is no floating-point type;"
                        " give the checkpoint that is not quantised"
                    )
                yield path, key, renamed, pattern, list(stored.get_shape())


def different_tied(config: Config, first: str, second: str) -> UsageError:
    """For weights that are tied by the configuration, and stored twice with different values.

    Tied, one of them would be dropped; untied, the configuration would be wrong, and so would be that of an
    export.
    """
    return UsageError(
        f"model_name_or_path={base_model_name(config.model_source)} holds different values of {first} and"
        f" {second}, and its configuration ties them; set tie_word_embeddings to false in config.json"
    )


def first_three(parts: Sequence[str]) -> str:
    """The first three parts, for a message."""
    return ", ".join(parts[:3]) + (", ..." if len(parts) > 3 else "")


def empty_hf(config: Config, description: Description) -> Any:
    """The HF model on the meta device."""
    name, attention = config.model_name_or_path, config.attn_implementation
    with reading(name, "its configuration"), torch.device("meta"):
        try:
            hf = auto_class(config, description).from_config(
                description.whole or description.hf_config, trust_remote_code=config.trust_remote_code
            )
            if description.whole is not None:
                hf = text_part.take(hf)
            if settings := quantized.settings_of(config, description.hf_config):
                quantized.mark(hf, settings)
            return hf
        except CLEAR as error:
            if not attention:
                raise
            raise UsageError(
                f"attn_implementation={attention} does not work with model_name_or_path={name} here"
                f" ({one_line(error).split('. ')[0]}); use eager, or leave it out"
            ) from None


def empty_learner(config: Config, description: Description) -> Any:
    """The learner on the meta device: to count its parameters, and to save under its names."""
    if description.is_module:
        return load_module(config.but(model_name_or_path="tiny")).to("meta")
    hf = empty_hf(config, description)
    with torch.device("meta"):
        return wrap(hf, config, description)


def auto_class(config: Config, description: Description) -> Any:
    """transformers' class for the task; number of classes and attention go into the configuration."""
    if config.attn_implementation:
        (description.whole or description.hf_config)._attn_implementation = config.attn_implementation
    if description.whole is not None:
        return transformers.AutoModelForImageTextToText
    if description.pooling != "model":
        return transformers.AutoModel
    if config.learner.has_head:
        description.hf_config.num_labels = description.outputs(config)
    if auto := config.learner.auto:
        return getattr(transformers, auto)
    return (
        transformers.AutoModelForImageClassification
        if description.images
        else transformers.AutoModelForSequenceClassification
    )


def refuse_running_statistics(hf: Any, config: Config) -> None:
    """Raise `UsageError` for batch norm: every pass changes its running statistics, which are no parameters,
    so that a task would leave a trace in the next one and ranks would differ.
    """
    for name, module in hf.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            raise UsageError(
                f"model_name_or_path={config.model_name_or_path} ({type(hf).__name__}) has batch norm"
                f" ({name}), whose running statistics are no parameters; use a model with layer norm, such as"
                " ViT, DINOv2 or ConvNeXt"
            )


def wrap(hf: Any, config: Config, description: Description) -> HFLearner:
    """A learner around `hf`, with adapters and checkpointed layers where `config` has them."""
    outputs = description.outputs(config)
    refuse_running_statistics(hf, config)
    for module in hf.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):  # by code, where no configuration has one
            module.p = 0.0
    if config.gradient_checkpointing:
        checkpoint_layers(hf)
    if config.packing and "position_ids" not in inspect.signature(hf.forward).parameters:
        raise UsageError(
            f"packing=True: {type(hf).__name__} takes no position_ids, which keep packed rows apart; leave"
            " it out"
        )
    native: Any = config.learner.kind
    if description.pooling == "model":
        learner: HFLearner = native(hf, outputs)
        if config.feature_norm:
            raise UsageError(
                f"feature_norm={config.feature_norm:g} scales pooled features, and {type(hf).__name__} pools"
                " by itself; use --pooling mean or cls, or leave it out"
            )
        has_no_bias = len(learner.head_names) < 2 and not config.learner.generates
        if config.head_init == "prototype" and has_no_bias:
            raise UsageError(
                f"head_init=prototype needs a head with a bias, and that of {type(hf).__name__} has none; "
                "use --pooling mean or another --head_init"
            )
    else:
        learner = native.pooled(hf, outputs, description.pooling, config.feature_norm)
    learner.own_loss = config.learner.loss
    learner.options = {"output_router_logits": True} if description.router_loss else {}
    if config.lora_r:
        inject(learner, config)
    choose_parameters(learner, config)
    return learner
