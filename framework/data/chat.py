"""Chats as tokens, by a tokenizer of transformers with its chat template, and which of them the
assistant wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from framework.data.token_files import TOKENIZER_FILE, SpecialTokens
from framework.data.tokenizer import refuse_far_numbers, special_names
from framework.data.tokens import Numbers
from framework.errors import ConfigError, in_one_line, missing_package

Message = Mapping[str, Any]

# In the order of `ByteTokenizer.special`.
_NAMES: Final = {
    "eos_token": "<|end|>",
    **{f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "mask", "pad")},
}
TEMPLATE_OF_BYTES: Final = (
    "{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}{% "
    "generation %}{{ message.content }}<|end|>{% endgeneration %}{% else %}{{ message.content "
    "}}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
_MARKS: Final = re.compile(r"\{%[-+]?\s*generation\b")
_KEY: Final = "data.chat_template"


def open_tokenizer(path: str | None, template: str | None = None) -> Any:
    """The tokenizer that `data.tokenizer` names, of transformers, with `data.chat_template`; None:
    of bytes, whose numbers are `ByteTokenizer`'s. Nothing in its folder is run.

    Raises:
        ConfigError: kinds ``package-missing``, ``tokenizer-unreadable``, ``chat-template-missing``.
    """
    try:
        from tokenizers import Tokenizer
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise missing_package(
            "transformers", what="data of conversations or labelled texts", extra="text"
        ) from error
    fast: Any = PreTrainedTokenizerFast
    folder = Path(path or "").expanduser()
    if path is not None:
        refuse_far_numbers(folder / TOKENIZER_FILE, key="data.tokenizer", value=path)
    try:
        if path is None:
            inputs = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
            found = fast(tokenizer_object=_of_bytes(), **inputs, **_NAMES)
        elif (folder / "tokenizer_config.json").exists():
            found = AutoTokenizer.from_pretrained(folder)
        else:  # of `prepare`
            made = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
            names = {
                "eos" if kind == "end" else kind: found
                for kind, found in special_names(made).items()
            }
            found = fast(
                tokenizer_object=made, **{f"{kind}_token": name for kind, name in names.items()}
            )
    except Exception as error:  # its files are anybody's
        reason = f"it cannot be read ({in_one_line(error)})"
        fix = "name a folder with tokenizer.json"
        raise ConfigError.of("tokenizer-unreadable", reason, fix, "data.tokenizer", path) from error
    if template is not None and "{" not in template:
        try:
            template = Path(template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = f"it is no file that can be read ({error})"
            fix = "name a file, or write the template"
            raise ConfigError.of("chat-template-missing", reason, fix, _KEY, template) from error
    found.chat_template = template or found.chat_template
    return found


def _of_bytes() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    # Names of the bytes in a vocabulary: printable ones as they are, the others from 256 on
    # (Radford et al. 2019).
    names = {byte: chr(byte) for byte in [*range(33, 127), *range(161, 173), *range(174, 256)]}
    names |= {
        byte: chr(256 + number) for number, byte in enumerate(sorted({*range(256)} - {*names}))
    }
    made = Tokenizer(models.BPE({name: byte for byte, name in names.items()}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in _NAMES.values()])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 257), ("[SEP]", 258)]
    )
    return made


def pad_of(tokenizer: Any) -> int:
    """The number of the token that pads."""
    return next(
        (one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0
    )


def vocab_size_of(tokenizer: Any) -> int:
    """Numbers that a model must know; they may have gaps."""
    return int(max(tokenizer.get_vocab().values())) + 1


def tokenized(
    tokenizer: Any, messages: Sequence[Message], tools: Any, place: str
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
    """Token numbers (n,) of a chat, and which the assistant wrote (n,): those that the template
    marks with ``{% generation %}``, or those by which the chat up to an answer is longer than the
    prompt for it.

    Raises:
        ConfigError: kinds ``chat-template-wrong``; ``chat-template-not-prefix``, where the whole
            chat begins with other tokens than its part does.
    """

    def rendered(part: Sequence[Message], **options: Any) -> Any:
        return tokenizer.apply_chat_template(
            part, tools=tools, tokenize=True, return_dict=True, **options
        )

    try:
        if _MARKS.search(str(tokenizer.chat_template)):
            found = rendered(messages, return_assistant_tokens_mask=True)
            return np.array(found["input_ids"], np.uint32), np.array(found["assistant_masks"], bool)
        ids = rendered(messages)["input_ids"]
        learnt = np.zeros(len(ids), bool)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = rendered(messages[:number], add_generation_prompt=True)["input_ids"]
                until = rendered(messages[: number + 1])["input_ids"]
                if ids[: len(before)] != before or ids[: len(until)] != until:
                    reason = (
                        f"{place}: up to message {number + 1} it does not begin as the whole "
                        "conversation does"
                    )
                    fix = (
                        "mark answers in it, {% generation %}{{ message.content }}...{% "
                        "endgeneration %}"
                    )
                    raise ConfigError.of("chat-template-not-prefix", reason, fix, _KEY)
                learnt[len(before) : len(until)] = True
    except ConfigError:
        raise
    except Exception as error:  # of jinja, or of anybody's template
        reason = f"it fails on {place}: {in_one_line(error)}"
        fix = "mend the template, or the messages"
        raise ConfigError.of("chat-template-wrong", reason, fix, _KEY) from error
    return np.array(ids, np.uint32), learnt


class Answers:
    """Tokenizer of a model that was trained on conversations, for what it writes: a text is what
    the user asks, or a JSON list of messages.
    """

    kind: Literal["bytes", "library"] = "library"
    needs_utf8 = True

    def __init__(self, tokenizer: Any) -> None:
        self._made = tokenizer
        self.vocab_size = vocab_size_of(tokenizer)
        self.special = SpecialTokens(end=tokenizer.eos_token_id)

    def encode(self, texts: Sequence[bytes]) -> list[Numbers]:
        """Token numbers of each chat up to where the answer begins."""
        asked = [[{"role": "user", "content": text.decode()}] for text in texts]
        for number, text in enumerate(texts):
            with suppress(ValueError, LookupError, TypeError):
                messages = json.loads(text)
                asked[number] = messages if messages[0]["role"] else asked[number]
        found = self._made.apply_chat_template(
            asked, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return [np.array(ids, np.uint32) for ids in found["input_ids"]]

    def decode(self, numbers: Sequence[int]) -> str:
        """The text without special tokens."""
        return str(self._made.decode(list(numbers), skip_special_tokens=True))
