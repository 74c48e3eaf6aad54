"""Conversations, and a small tokenizer of transformers with templates that do and do not mark
answers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from framework.data.tokenizer import train_bpe
from framework.recipes.text.rows import questions

_HEAD = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
_TAIL = (
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = "{{ m['content'] + '<|im_end|>' }}"
PLAIN = _HEAD + _TEXT + _TAIL
MARKED = (
    _HEAD
    + "{% if m['role'] == 'assistant' %}{% generation %}"
    + _TEXT
    + "{% endgeneration %}{% else %}"
    + _TEXT
    + "{% endif %}"
    + _TAIL
)
# As some published ones: of earlier answers a part is left out.
FORGETS = (
    _HEAD
    + "{% if not loop.last and m['role'] == 'assistant' %}...{% else %}"
    + _TEXT
    + "{% endif %}"
    + _TAIL
)
CHATS: list[list[dict[str, Any]]] = [list(row["messages"]) for row in list(questions())[::20][:24]]
CHATS[0] = [{"role": "system", "content": "Be brief: ñ, 中."}, *CHATS[0], *CHATS[1]]


def write_chats(file: Path, chats: list[list[dict[str, Any]]] = CHATS) -> str:
    file.write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8"
    )
    return str(file)


def write_tokenizer(folder: Path, template: str) -> str:
    """A byte-level BPE of 400 tokens, in a folder as transformers writes it."""
    from transformers import PreTrainedTokenizerFast

    texts = [message["content"].encode() for chat in CHATS for message in chat]
    made: Any = train_bpe(texts, vocab_size=400)._tokenizer
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "[PAD]"}
    made = PreTrainedTokenizerFast(tokenizer_object=made, **names)
    made.chat_template = template
    made.save_pretrained(folder)
    return str(folder)
