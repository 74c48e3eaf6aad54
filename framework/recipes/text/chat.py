"""Chats as tokens, by a tokenizer of transformers with its chat template, with a mask of those that
the assistant wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from framework.data.token_files import TOKENIZER_FILE, SpecialTokens
from framework.data.tokenizer import special_names
from framework.data.tokenizer_numbers import read_numbers
from framework.data.tokens import Numbers
from framework.errors import ConfigError, in_one_line, missing_package

Message = Mapping[str, Any]

# In the order of `ByteTokenizer.special`.
_NAMES: Final = {
    "eos_token": "<|end|>",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
    "pad_token": "[PAD]",
}
TEMPLATE_OF_BYTES: Final = (
    "{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}{% "
    "generation %}{{ message.content }}<|end|>{% endgeneration %}{% else %}{{ message.content "
    "}}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
_MARKS: Final = re.compile(r"\{%[-+]?\s*generation\b")
_KEY: Final = "data.chat_template"


def open_tokenizer(path: str | None, template: str | None = None) -> Any:
    """Open the tokenizer that `data.tokenizer` names, of transformers, with `data.chat_template`.
    Without a path it is one of bytes, with the numbers of `ByteTokenizer`. No code in its folder is
    run.

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
        read_numbers(folder / TOKENIZER_FILE, key="data.tokenizer", value=path)
    try:
        if path is None:
            inputs = ["input_ids", "token_type_ids", "attention_mask"]
            tokenizer = fast(tokenizer_object=_of_bytes(), model_input_names=inputs, **_NAMES)
        elif (folder / "tokenizer_config.json").exists():
            tokenizer = AutoTokenizer.from_pretrained(folder)
        else:  # of `prepare`
            library_tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
            names = {}
            for kind, name in special_names(library_tokenizer).items():
                if kind == "end":
                    names["eos_token"] = name
                else:
                    names[f"{kind}_token"] = name
            tokenizer = fast(tokenizer_object=library_tokenizer, **names)
    except Exception as error:  # its files may be of any origin
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
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def _of_bytes() -> Any:
    """Make a `tokenizers.Tokenizer` of bytes with the numbers of `ByteTokenizer`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    # Names of the bytes in a vocabulary: printable ones as they are, the others from 256 on
    # (Radford et al. 2019).
    number_of = {}
    for byte in chain(range(33, 127), range(161, 173), range(174, 256)):
        number_of[chr(byte)] = byte
    others = set(range(256)) - set(number_of.values())
    for offset, byte in enumerate(sorted(others)):
        number_of[chr(256 + offset)] = byte
    tokenizer = Tokenizer(models.BPE(number_of, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _NAMES.values()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 257), ("[SEP]", 258)]
    )
    return tokenizer


def pad_of(tokenizer: Any) -> int:
    """Return the number of the token that pads: the end of text if there is none for it, or 0."""
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    if tokenizer.eos_token_id is not None:
        return int(tokenizer.eos_token_id)
    return 0


def vocab_size_of(tokenizer: Any) -> int:
    """Return the number of token numbers that a model must know; some may be unused."""
    return int(max(tokenizer.get_vocab().values())) + 1


def tokenized(
    tokenizer: Any, messages: Sequence[Message], tools: Any, place: str
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
    """Return the token numbers (n,) of a chat, and a mask (n,) of those that the assistant wrote:
    the tokens that the template marks with ``{% generation %}``, or those by which the chat up to
    an answer is longer than the prompt for it. `place` names the chat in messages.

    Raises:
        ConfigError: kinds ``chat-template-wrong``; ``chat-template-not-prefix``: the whole chat
            begins with other tokens than its part does.
    """
    try:
        if _MARKS.search(str(tokenizer.chat_template)):
            chat = tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            return np.array(chat["input_ids"], np.uint32), np.array(chat["assistant_masks"], bool)
        ids = _ids_of(tokenizer, messages, tools)
        learnt = np.zeros(len(ids), bool)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = _ids_of(tokenizer, messages[:number], tools, add_generation_prompt=True)
            answered = _ids_of(tokenizer, messages[: number + 1], tools)
            if ids[: len(prompt)] != prompt or ids[: len(answered)] != answered:
                reason = (
                    f"{place}: up to message {number + 1} it does not begin as the whole "
                    "conversation does"
                )
                fix = (
                    "mark answers in it, {% generation %}{{ message.content }}...{% "
                    "endgeneration %}"
                )
                raise ConfigError.of("chat-template-not-prefix", reason, fix, _KEY)
            learnt[len(prompt) : len(answered)] = True
    except ConfigError:
        raise
    except Exception as error:  # jinja's, or any that a template raises
        reason = f"it fails on {place}: {in_one_line(error)}"
        fix = "correct the template, or the messages"
        raise ConfigError.of("chat-template-wrong", reason, fix, _KEY) from error
    return np.array(ids, np.uint32), learnt


def _ids_of(
    tokenizer: Any, messages: Sequence[Message], tools: Any, *, add_generation_prompt: bool = False
) -> list[int]:
    chat = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        tokenize=True,
        return_dict=True,
        add_generation_prompt=add_generation_prompt,
    )
    ids: list[int] = chat["input_ids"]
    return ids


class Answers:
    """Tokenizer of a model that was trained on conversations, for its answers: a text is the user's
    message, or a JSON list of messages.
    """

    kind: Literal["bytes", "library"] = "library"
    needs_utf8 = True

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size_of(tokenizer)
        self.special = SpecialTokens(end=tokenizer.eos_token_id)

    def encode(self, texts: Sequence[bytes]) -> list[Numbers]:
        """Return the token numbers of each chat up to the beginning of the answer; a text that is
        no JSON list of messages is the user's only message.
        """
        chats = []
        for text in texts:
            messages = [{"role": "user", "content": text.decode()}]
            with suppress(ValueError, LookupError, TypeError):
                listed = json.loads(text)
                if listed[0]["role"]:
                    messages = listed
            chats.append(np.array(self.prompt_of(messages), np.uint32))
        return chats

    def prompt_of(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        """Return the token numbers of a chat up to the beginning of the answer."""
        return _ids_of(self._tokenizer, messages, tools, add_generation_prompt=True)

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text, without special tokens."""
        return str(self._tokenizer.decode(list(numbers), skip_special_tokens=True))
