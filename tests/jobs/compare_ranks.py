"""Compares what ranks hold, and counts the bytes that this takes: compare_ranks.py FOLDER."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch.distributed

from framework.engine.distributed import process_group, rank, refuse_different_ranks
from framework.errors import ConfigError

_BIG = {"config.model": {"layers": [f"layer {number}" for number in range(2000)]}}


def main() -> None:
    send, sent = torch.distributed.all_gather_object, list[int]()

    def counting(everyone: list[Any], value: Any) -> None:
        sent.append(len(pickle.dumps(value)))
        send(everyone, value)

    torch.distributed.all_gather_object = counting
    found: dict[str, tuple[str, list[int]]] = {}
    with process_group(None):
        own: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "the same": (_BIG, _BIG),
            "in another order": (_BIG | {"training samples": 7}, {"training samples": 7} | _BIG),
            "another value": (_BIG | {"training samples": 1000}, _BIG | {"training samples": 1100}),
            "a value less": (_BIG | {"evaluation samples": 10}, _BIG),
        }
        for name, (first, other) in own.items():
            sent.clear()
            text = ""
            try:
                refuse_different_ranks(first if rank() == 0 else other)
            except ConfigError as error:
                text = str(error)
            found[name] = text, list(sent)
        (Path(sys.argv[1]) / f"{rank()}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
