"""Builds a learner on the meta device and loads its weights from the checkpoint one parameter at a time.

Pipeline stages and ZeRO 3 start from it, so that no rank ever holds a whole model. transformers converts
parameters that are stored in another form, such as one tensor for each expert. Tensors that the checkpoint
lacks (a new classifier, adapters) are drawn on every rank as transformers and peft draw them, from the same
random stream. Never reads pickles.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils import swap_tensors

from fmmeta.config.settings import Config
from fmmeta.learners.files import checkpoint_files, reading
from fmmeta.learners.load import (
    Description,
    check_complete,
    different_tied,
    empty_hf,
    initialize_head,
    load_learner,
    refuse_other_layers,
    stored_tensors,
    wrap,
)
from fmmeta.learners.text_part import whole_of


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file."""

    path: str
    key: str

    def read(self) -> Tensor:
        with safe_open(self.path, "pt") as file:  # an open file would keep the pages that it has read
            return file.get_tensor(self.key)


class ConvertedTensor(NamedTuple):
    """One of the results of a conversion.

    converter: transformers' WeightConverter. first: name of its first result. sources: patterns of the
    converter with the tensors that fit them, in its order.
    """

    name: str
    hf: Any
    converter: Any
    first: str
    sources: list[tuple[str, StoredTensor]]

    def read(self) -> Tensor:
        return self.results([tensor.read for _, tensor in self.sources])[self.name]

    def results(self, values: Sequence[Any]) -> dict[str, Tensor]:
        """All results by name. values: of the sources, or functions that return them."""
        converter = copy.deepcopy(self.converter)
        for (pattern, tensor), value in zip(self.sources, values, strict=True):
            converter.add_tensor(self.first, tensor.key, pattern, value)
        return {
            name: value[0] if isinstance(value, list) else value
            for name, value in converter.convert(self.first, model=self.hf, config=self.hf.config).items()
        }


def same_values(one: StoredTensor | ConvertedTensor, other: StoredTensor | ConvertedTensor) -> bool:
    """Whether both hold the same values; reads them only if they are stored apart."""
    return one == other or bool((one.read() == other.read()).all())


@dataclass
class LazyModel:
    """learner: parameters on the meta device, except new ones; buffers are real.

    stored: parameters and buffers in the checkpoint, by their names in `learner`. new: exact initial values
    of parameters that the checkpoint lacks.
    """

    learner: Any
    stored: dict[str, StoredTensor | ConvertedTensor]
    new: dict[str, Tensor]

    def read(self, name: str) -> Tensor:
        """One complete parameter in fp32, in separate memory."""
        if name in self.new:
            return self.new[name].clone()
        # peft calls an adapted layer base_layer
        return self.stored[name.replace("base_layer.", "")].read().to(torch.float32, copy=True)

    def materialize(
        self, names: Sequence[str], then: Callable[[nn.Parameter], None] = lambda param: None
    ) -> None:
        """Give these parameters their storage and values, one after another; tied ones stay tied.

        `then` is called with each, materialized now or earlier, before the next is read.
        """
        for name in names:
            param = self.learner.get_parameter(name)
            if param.is_meta:
                swap_tensors(param, nn.Parameter(self.read(name), param.requires_grad))
            then(param)


def open_lazy_model(config: Config, description: Description) -> LazyModel:
    """Find every tensor of the checkpoint without reading it. Raises `UsageError`.

    The built-in model has no checkpoint and is small: it is built completely, and so is a user's module.
    """
    stored: dict[str, StoredTensor | ConvertedTensor] = {}
    if config.builtin_model or description.is_module:
        learner = load_learner(config, description)
    else:
        hf = empty_hf(config, description)
        hf.config.name_or_path = config.model_name_or_path
        found = find_tensors(hf, config, description)
        torch.manual_seed(config.seed)
        initialize(hf, [name for name, _ in hf.named_parameters() if name not in found])
        for name in found.keys() & dict(hf.named_buffers()).keys():
            hf.get_buffer(name).copy_(found[name].read())
        torch.manual_seed(config.seed)
        learner = wrap_lazily(hf, config, description)
        initialize_head(learner, config)
        stored = {f"hf.{name}": tensor for name, tensor in found.items()}
    new = {name: param.detach().clone() for name, param in learner.named_parameters() if not param.is_meta}
    return LazyModel(learner.train(), stored, new)


def initialize(hf: Any, missing: Collection[str]) -> None:
    """Draw the parameters `missing` and all buffers as transformers does when it loads a checkpoint; the
    other parameters stay on the meta device.
    """
    for name, param in hf.named_parameters():
        if name in missing:
            swap_tensors(param, nn.Parameter(torch.empty(param.shape), param.requires_grad))
        param._is_hf_initialized = name not in missing  # transformers skips these
    for module in hf.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    hf.initialize_weights()


def wrap_lazily(hf: Any, config: Config, description: Description) -> Any:
    """`wrap` with real adapters around parameters on the meta device.

    peft creates adapters on the device of the adapted weights, so each of these is replaced meanwhile by one
    number on the CPU, expanded to its shape.
    """
    replaced = {
        param: nn.Parameter(torch.zeros(1).expand(param.shape), param.requires_grad)
        for param in hf.parameters()
        if param.is_meta
    }
    for param, expanded in replaced.items():
        swap_tensors(param, expanded)
    learner = wrap(hf, config, description)
    for param, on_meta in replaced.items():
        on_meta.requires_grad_(param.requires_grad)
        swap_tensors(param, on_meta)
    return learner


def find_tensors(
    hf: Any, config: Config, description: Description
) -> dict[str, StoredTensor | ConvertedTensor]:
    """The tensors of the checkpoint by their names in `hf`; transformers translates old names.

    A tied weight has its name in `named_parameters()`, whichever of its names is stored. Tensors of a new
    head in other shapes are left out. Raises `UsageError` for an incomplete checkpoint.
    """
    name = config.model_source
    wanted, shapes, unused = hf.state_dict(), dict[str, list[int]](), list[str]()
    found: dict[str, StoredTensor | ConvertedTensor] = {}
    converted: dict[str, list[tuple[str, StoredTensor, list[int]]]] = defaultdict(list)
    for path, key, renamed, pattern, shape in stored_tensors(hf, name, checkpoint_files(name)):
        if renamed in wanted and pattern is not None:
            converted[renamed].append((pattern, StoredTensor(path, key), shape))
        elif renamed in wanted:
            found[renamed], shapes[renamed] = StoredTensor(path, key), shape
        elif not any(re.search(one, key) for one in hf._keys_to_ignore_on_load_unexpected or ()):
            unused.append(renamed)
    for tensor, shape in conversions(hf, name, converted):
        found[tensor.name], shapes[tensor.name] = tensor, shape
    others = {key: shape for key, shape in shapes.items() if shape != list(wanted[key].shape)}
    found = {key: tensor for key, tensor in found.items() if key not in others}
    names: dict[nn.Parameter, str] = {}
    for alias, param in hf.named_parameters(remove_duplicate=False):
        name = names.setdefault(param, alias)  # the one of named_parameters()
        if alias in found and not same_values(found.setdefault(name, found[alias]), found[alias]):
            raise different_tied(config, name, alias)
    check_complete(hf, config, description, wanted.keys() - found.keys(), others)
    refuse_other_layers(hf, config, unused)
    return found


def conversions(
    hf: Any, name: str, converted: Mapping[str, list[tuple[str, StoredTensor, list[int]]]]
) -> Iterator[tuple[ConvertedTensor, list[int]]]:
    """The results of transformers' conversions with their shapes, found without reading the tensors.

    converted: by the name of the first result, the patterns of its sources, the sources and their shapes.
    Raises `UsageError` for sources that do not fit together.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key

    mapping = get_model_conversion_mapping(whole_of(hf)) if converted else ()
    by_pattern = {
        pattern: converter
        for converter in mapping
        if isinstance(converter, WeightConverter)
        for pattern in converter.source_patterns
    }
    for first, sources in converted.items():
        sources.sort(key=lambda source: dot_natural_key(source[1].key))
        made = ConvertedTensor(first, hf, by_pattern[sources[0][0]], first, [one[:2] for one in sources])
        with reading(name, first):
            results = made.results([torch.empty(shape, device="meta") for *_, shape in sources])
        for result, value in results.items():
            yield made._replace(name=result), list(value.shape)
