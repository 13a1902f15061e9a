"""Blocks below all trained parameters run once for each micro-batch, however many passes follow.

    tokens --> frozen blocks --> hidden states, kept with the micro-batch --> trained blocks --> outputs

Their outputs are the same in every inner step: with adapters in the last third of the blocks, five steps take
less than half of the time. Which blocks these are is read off the first pass with gradients: those at the
beginning of a list whose outputs depend on no trained parameter. The hidden states live as long as the
micro-batch. The first pass that uses some is compared with one that does not: a model whose later blocks read
more of a block than its output (shared keys and values, say) runs all of them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from fmmeta.learners.base import HFLearner
from fmmeta.learners.experts import router_names
from fmmeta.learners.shared_prefix import AGREEMENT, AGREEMENT_LOW_PRECISION
from fmmeta.learners.task_axis import computing
from fmmeta.tasks.batching import MicroBatch, map_tensors


class FrozenBlocks:
    """The frozen blocks of a learner that is whole in this process. Local.

    lists: the lists of blocks, none for a learner that has no use for this; before the first pass with
    gradients all blocks, then the frozen ones of each.
    """

    def __init__(self, learner: Any, allowed: bool = True) -> None:
        """allowed: whether the engine of the learner lets blocks be left out."""
        # losses of routers are read in every block; a compiled model would be compiled again
        allowed = allowed and isinstance(learner, HFLearner) and not router_names(learner)
        compiled = allowed and getattr(learner.hf, "_compiled_call_impl", None) is not None
        self.lists = [*block_lists(learner.hf)] if allowed and not compiled else []
        self.known = self.checked = False

    def run(self, batch: MicroBatch, call: Callable[[], Any]) -> Any:
        """The outputs of `call`, a pass over the rows of `batch`."""
        if not self.lists:
            return call()
        if not self.known:
            return self.find(batch, call) if torch.is_grad_enabled() else call()
        if (kept := batch.kept.get(self)) is None:
            # passes without gradients, those of evaluation, may be over more rows than memory is for
            return self.keep(batch, call) if torch.is_grad_enabled() else call()
        if not self.checked:
            self.checked = True
            if not self.works(kept, call):
                self.lists = []
                return call()
        with returning(self.lists, kept):
            return call()

    def find(self, batch: MicroBatch, call: Callable[[], Any]) -> Any:
        """The outputs of a pass with gradients, which shows the frozen blocks."""
        runs = defaultdict[nn.Module, list[Any]](list)
        with on_output([block for blocks in self.lists for block in blocks], runs):
            outputs = call()

        def is_frozen(block: nn.Module) -> bool:
            return len(runs[block]) == 1 and not any(one.requires_grad for one in tensors_of(runs[block]))

        leading = [[*takewhile(is_frozen, blocks)] for blocks in self.lists]
        self.lists, self.known = [blocks for blocks in leading if blocks], True
        batch.kept[self] = {blocks[-1]: runs[blocks[-1]][0] for blocks in self.lists}
        return outputs

    def keep(self, batch: MicroBatch, call: Callable[[], Any]) -> Any:
        """The outputs of a pass that runs all blocks; what the last frozen ones return is kept."""
        runs = defaultdict[nn.Module, list[Any]](list)
        with on_output([blocks[-1] for blocks in self.lists], runs):
            outputs = call()
        batch.kept[self] = {block: found for block, (found,) in runs.items()}
        return outputs

    @torch.no_grad()
    def works(self, kept: Mapping[nn.Module, Any], call: Callable[[], Any]) -> bool:
        """Whether a pass without the frozen blocks has the outputs of one with them, up to rounding.

        Between the two the blocks run on other numbers, so that nothing that a block has stored is right.
        """
        expected = tensors_of(call())
        with ExitStack() as hooks:
            for blocks in self.lists:
                hooks.callback(blocks[0].register_forward_pre_hook(other_numbers, with_kwargs=True).remove)
            call()
        try:
            with returning(self.lists, kept):
                found = tensors_of(call())
        except Exception:  # of the model: what it reads is missing, or of another shape
            return False
        return all(
            float((a - b).abs().max())
            <= AGREEMENT.get(a.dtype, AGREEMENT_LOW_PRECISION) * float(a.abs().max())
            for a, b in zip(expected, found, strict=True)
        )


def block_lists(hf: nn.Module) -> Iterator[list[nn.Module]]:
    """The outermost lists of modules of one type."""
    for child in hf.children():
        if isinstance(child, nn.ModuleList) and len({type(one) for one in child}) == 1:
            yield [*child]
        else:
            yield from block_lists(child)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in dictionaries, lists and tuples, outputs of transformers among them."""
    found = list[Tensor]()
    map_tensors(dict(value) if hasattr(value, "keys") else value, found.append)
    return found


def other_numbers(block: nn.Module, args: Any, named: Any) -> Any:
    """Pre-hook: the features [B, T, H] that a block gets, in reverse order."""

    def change(tensor: Tensor) -> Tensor:
        return tensor.flip(-1) if tensor.is_floating_point() and tensor.dim() == 3 else tensor

    return map_tensors(args, change), map_tensors(named, change)


@contextmanager
def on_output(blocks: Sequence[nn.Module], runs: Mapping[nn.Module, list[Any]]) -> Iterator[None]:
    """Inside, `runs` gets what each of the blocks returns whenever it has run."""
    with ExitStack() as hooks:
        for block in blocks:
            hooks.callback(
                block.register_forward_hook(lambda block, _, output: runs[block].append(output)).remove
            )
        yield


def returning(
    lists: Sequence[Sequence[nn.Module]], kept: Mapping[nn.Module, Any]
) -> AbstractContextManager[None]:
    """Inside, the blocks of a list do not run, and return what is kept of the last one."""
    return computing(
        (block, lambda *args, found=kept[blocks[-1]], **named: found)
        for blocks in lists
        if blocks[-1] in kept
        for block in blocks
    )
