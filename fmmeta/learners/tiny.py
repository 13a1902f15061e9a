"""Built-in models and tokenizer, generated in code: the bare command needs no file and no network.

`tiny` is a 2-layer BERT for classification and a 2-layer Llama for language models, and a T5 of 2 and 2
layers for encoder-decoders, all over bytes, and a 2-layer ViT for the images of the suite `digits`.
"""

from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from fmmeta.config.learners import CAUSAL, SEQ2SEQ_LM

BYTES = 256
HIDDEN, LAYERS, HEADS = 64, 2, 4


def byte_tokenizer(max_length: int = 512) -> Any:
    """A tokenizer of UTF-8 bytes with <pad>, <bos> and <eos>; an ordinary fast tokenizer that saves and loads
    as such.
    """
    specials = ["<pad>", "<bos>", "<eos>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*specials, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


IMAGE_SIZE, PATCH_SIZE = 8, 4  # pixels


def tiny_vit_config() -> Any:
    """Configuration of the built-in model of images."""
    return transformers.ViTConfig(
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
    )


def image_settings() -> dict[str, Any]:
    """Settings of the built-in model's image processor, as in preprocessor_config.json."""
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        "resample": 2,  # bilinear
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }


def tiny_config(auto: str, max_length: int) -> Any:
    """Configuration of the built-in model. auto: transformers' class of it, if that is known."""
    if auto == SEQ2SEQ_LM:
        config = transformers.T5Config(
            vocab_size=BYTES + 3,
            d_model=HIDDEN,
            d_kv=HIDDEN // HEADS,
            d_ff=4 * HIDDEN,
            num_layers=LAYERS,
            num_heads=HEADS,
            pad_token_id=0,
            eos_token_id=2,
        )
        config.update({"decoder_start_token_id": 0})
        return config
    shared: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "pad_token_id": 0,
        "vocab_size": BYTES + 3,
        "max_position_embeddings": max_length,
    }
    if auto != CAUSAL:
        return transformers.BertConfig(intermediate_size=4 * HIDDEN, type_vocab_size=1, **shared)
    return transformers.LlamaConfig(
        intermediate_size=3 * HIDDEN, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True, **shared
    )
