"""A model's folder without weights: a tokenizer of bytes, a chat template, and what the front reads besides."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

#: Two special tokens, the 256 bytes, and a few merges.
BEGIN, END = "<s>", "</s>"
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or"), ("Ġwor", "l"))
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_tokenizer(folder: Path, *, template: str = TEMPLATE) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; the folder."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [BEGIN, END, *letters, *("".join(pair) for pair in MERGES)]
    reader = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=list(MERGES)))
    reader.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reader.decoder = decoders.ByteLevel()
    reader.add_special_tokens([BEGIN, END])
    reader.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    folder.mkdir(parents=True, exist_ok=True)
    reader.save(str(folder / "tokenizer.json"))
    said = {"bos_token": BEGIN, "eos_token": END} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(said), encoding="utf-8")
    return folder
