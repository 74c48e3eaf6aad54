"""All ranks stop after the same step, although the request may have reached only one of them; so
are evaluations and saves by the clock of rank 0.

No collective and no read from the device: until somebody is asked, a step costs one look at a
variable. A thread of every rank looks into the store of the process group several times a second.
When a request is there, each rank's thread posts the next step its rank will end, and the rank does
not go past it before all have posted; the largest of them is the step to stop after. Threads answer
whatever their ranks wait for, so this needs no guess how long a step takes.

    rank 0: SIGTERM -> store: asked   posts 41   .. step 41, waits ..  decided: 42   step 42, stops
    rank 1:               sees asked  posts 42                         decided: 42   step 42, stops

What ends nothing is agreed on as often as it is due, each time under keys of its own. Threads do so
ahead of their ranks: a step that is decided later lies behind those that were before.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Final

import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from framework.engine.distributed import gather
from framework.engine.process_group_errors import is_lost_peer
from framework.errors import EXIT_PEER_LOST, PeerLostError, RunStopped
from framework.system.log import warn
from framework.system.stopping import EVALUATE, SAVE, StopRequest, announce

_LOOK_SECONDS: Final = 0.25
# more of them look less often, as one thread at rank 0 answers all, and wait longer
_RANKS_PER_LOOK: Final = 512
# Threads answer within a second. Who has not after this long is gone, and the launcher's patience
# is 20 to 30 seconds.
_WAIT_SECONDS: Final = 12.0
_numbers = itertools.count()


@contextmanager
def agreed_stops(
    request: StopRequest, *, start_step: int, due: Callable[[], str] = lambda: ""
) -> Iterator[Callable[[int], str]]:
    """From here on requests are honoured between two steps. Collective, as is the end of the block.

    `due` is what rank 0's clock asks for, ``evaluate``, ``save`` or a reason to stop; empty for
    nothing. It is asked in another thread, or after every step where this rank is alone.

    Raises:
        RunStopped: another rank was asked, too, and ended before it came here.

    Yields:
        To be called on every rank equally often, first with `start_step`, then with the number of
        the last step taken: the name of the signal if all ranks stop now, what is due now by the
        clock, else an empty string.
    """
    request.training_begins()
    asked = _asked_so_far(request)
    world_size = torch.distributed.get_world_size()
    store: Store | None = _get_default_store()  # MPI's groups have none
    if asked or world_size == 1:
        yield lambda step: asked or request.signal or (due() if step > start_step else "")
        return
    if store is None:
        warn(
            f"process groups of {torch.distributed.get_backend()} have no store: requests to stop "
            "cannot be agreed on, and are not followed, nor is the clock (every_minutes, "
            "max_minutes) [stop-not-agreed]"
        )
        yield lambda step: ""
        return
    # On a connection of its own: whoever waits on the group's for a peer would keep it.
    own = PrefixStore(f"stop/{next(_numbers)}", store).clone()
    own_rank = torch.distributed.get_rank()
    ask = due if own_rank == 0 else lambda: ""
    agreement = StopAgreement(
        request, store=own, rank=own_rank, world_size=world_size, step=start_step, due=ask
    )
    agreement.start()
    # of every rank: in an evaluation there are several after one step
    calls = itertools.count(start_step)
    try:
        yield lambda step: agreement.signal_after(next(calls))
        agreement.leave()
    finally:
        agreement.close()


def _asked_so_far(request: StopRequest) -> str:
    """The signal that any rank was asked by. A rank that was asked a moment sooner has ended
    instead of coming here.
    """
    try:
        return next((signal for signal in gather(request.signal) if signal), "")
    except RuntimeError as error:
        if not (request.signal and is_lost_peer(error)):
            raise
        raise RunStopped(
            f"{request.signal}: stopped before the first step: nothing new to save [stopped]"
        ) from error


class StopAgreement:
    """One rank's part."""

    def __init__(
        self,
        request: StopRequest,
        *,
        store: Store,
        rank: int,
        world_size: int,
        step: int,
        due: Callable[[], str] = lambda: "",
        look_seconds: float = _LOOK_SECONDS,
        wait_seconds: float = _WAIT_SECONDS,
    ) -> None:
        self._request = request
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._look_seconds = look_seconds * max(1.0, world_size / _RANKS_PER_LOOK)
        self._wait_seconds = wait_seconds + self._look_seconds - look_seconds
        self._changed = threading.Condition()
        self._clock_asks = due
        self._round = 0
        self._step = step
        self._posted = -1
        self._last_decided = -1
        self._agreed: deque[tuple[int, str]] = deque()  # after which call what happens
        self._is_stopping = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stop-agreement", daemon=True)
        self._giving_up: threading.Timer | None = None

    def start(self) -> None:
        """Begin to look; a request that nobody answers ends this process."""
        self._request.when_asked(self._count_down)
        self._thread.start()

    def signal_after(self, step: int) -> str:
        """The signal if all ranks stop after this step, or what else all do now.

        Raises:
            PeerLostError: a rank does not say how far it is.
        """
        with self._changed:
            self._step = step
            if 0 <= self._posted <= step and not self._changed.wait_for(
                lambda: not 0 <= self._posted <= step, timeout=self._wait_seconds
            ):
                raise _lost(self._rank)
            if not self._agreed or step < self._agreed[0][0]:
                return ""
            word = self._agreed[0][1]
            if word in (EVALUATE, SAVE):
                return self._agreed.popleft()[1]
            return word

    def leave(self) -> None:
        """This rank has trained to its end or stopped: a request that still comes need not wait for
        it.
        """
        self._closing.set()
        self._thread.join(self._wait_seconds)
        if self._posted < 0 and not self._is_stopping and not self._thread.is_alive():
            with suppress(RuntimeError):
                self._post()

    def close(self) -> None:
        """Look no more."""
        self._closing.set()
        self._request.when_asked(None)
        if self._giving_up is not None:
            self._giving_up.cancel()

    def _watch(self) -> None:
        while not self._closing.wait(self._look_seconds):
            # the store is where rank 0 is: without it, no rank trains on for long
            with suppress(RuntimeError):
                self._agree()
                if self._is_stopping:
                    return

    def _agree(self) -> None:
        """Take part in what is asked for, if anything is."""
        if self._posted < 0:
            asked = self._request.signal or self._clock_asks()
            if asked:
                self._store.set(self._key("asked"), asked)
            elif not self._store.check([self._key("asked")]):
                return
            self._post()
        # Not looked for: the store answers all who wait as soon as it is there.
        self._store.wait([self._key("decided")], timedelta(seconds=max(1.0, self._look_seconds)))
        word, decided = self._store.multi_get([self._key("asked"), self._key("decided")])
        with self._changed:
            self._agreed.append((int(decided), word.decode()))
            self._is_stopping = word.decode() not in (EVALUATE, SAVE)
            self._posted = -1
            self._last_decided = int(decided)
            self._round = self._round + 1
            self._changed.notify_all()

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"

    def _post(self) -> None:
        """Say which step ends next, and hold it; whoever is the last to say decides."""
        with self._changed:
            self._posted = max(self._step, self._last_decided) + 1
        self._store.set(self._key(f"next/{self._rank}"), str(self._posted))
        if self._store.add(self._key("posted"), 1) == self._world_size:
            steps = self._store.multi_get(
                [self._key(f"next/{rank}") for rank in range(self._world_size)]
            )
            self._store.set(self._key("decided"), str(max(map(int, steps))))

    def _count_down(self) -> None:
        """A launcher may have asked that has seen a rank die: then this one waits for that in a
        collective.
        """
        self._giving_up = threading.Timer(self._wait_seconds, self._give_up)
        self._giving_up.daemon = True
        self._giving_up.start()

    def _give_up(self) -> None:
        if not self._is_stopping and not self._closing.is_set():
            announce(str(_lost(self._rank)))
            os._exit(EXIT_PEER_LOST)


def _lost(rank: int) -> PeerLostError:
    return PeerLostError(
        f"rank {rank}: the ranks are to agree on a step, and another one has ended or does not "
        "answer; what that one said last tells why. The last complete checkpoint stands: "
        "checkpoint.resume=auto [peer-lost]",
        is_of_one_rank=True,
    )
