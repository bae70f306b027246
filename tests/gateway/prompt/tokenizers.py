"""Small model directories: a byte-level ChatML model, one that adds a BOS, and a SentencePiece-like one."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = ["The quick brown fox says it's 5pm, hello world; Alpha-Beta and user, system or assistant.\n"] * 5


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def chatml(directory: Path) -> Path:
    return write(directory, byte_level(), template=CHATML, generation={"eos_token_id": 2})


def with_bos(directory: Path) -> Path:
    """A BOS that the tokenizer adds and that the chat template writes too."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    turn = "[{{ m['role'] }}] {{ m['content'] | trim }}{{ eos_token }}"
    template = f"{{{{ bos_token }}}}{{% for m in messages %}}{turn}{{% endfor %}}"
    config: dict[str, object] = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>"}
    return write(directory, tokenizer, template=template, config=config)


def sentencepiece(directory: Path) -> Path:
    """Byte fallback, a space before the text, and ordinary pieces that could spell `</s>`."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "<", "/", "s", ">", "a", "b", "▁a", "</", "s>"]
    merges = [("▁", "a"), ("<", "/"), ("s", ">"), ("</", "s>")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return write(directory, tokenizer, template="{% for m in messages %}<s>{{ m['content'] }}{% endfor %}")


def write(
    directory: Path,
    tokenizer: Tokenizer,
    *,
    template: str,
    config: dict[str, object] | None = None,
    generation: dict[str, object] | None = None,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory
