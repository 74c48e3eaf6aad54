"""Agreement of all ranks on the step after which they stop, although the request may have reached
only one of them; and on evaluations and saves by the clock of rank 0.

No collective and no read from the device: until a request comes, a step costs one look at a
variable. A thread of every rank looks into the store of the process group several times a second.
When a request is there, each rank's thread posts the next step its rank will end, and the rank does
not go past it before all have posted. The largest posted step is the one to stop after. Threads
answer even while their ranks wait, so no guess is needed how long a step takes.

    rank 0: SIGTERM -> store: asked   posts 41   .. step 41, waits ..  decided: 42   step 42, stops
    rank 1:               sees asked  posts 42                         decided: 42   step 42, stops

Evaluations and saves are agreed on as often as they are due, each time under keys of their own.
Threads do so ahead of their ranks: a step that is decided later comes after those decided before.
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
from torch.distributed.distributed_c10d import Store

from framework.engine.distributed import gather, own_store
from framework.errors import EXIT_PEER_LOST, PeerLostError, RunStopped
from framework.system.log import warn
from framework.system.stopping import GO_ON, Action, Decision, StopRequest, announce

_LOOK_SECONDS: Final = 0.25
# More ranks look less often, as one thread at rank 0 answers all of them, and wait longer.
_RANKS_PER_LOOK: Final = 512
# Threads answer within a second. A rank that has not after this long is gone, and the launcher
# waits 20 to 30 seconds.
_WAIT_SECONDS: Final = 12.0


@contextmanager
def agreed_stops(
    request: StopRequest, *, start_step: int, due: Callable[[], Decision] = lambda: GO_ON
) -> Iterator[Callable[[int], Decision]]:
    """Follow requests between two steps from here on. Collective, as is the end of the block.

    Args:
        request: a request to stop this process.
        start_step: the step from which the run goes on.
        due: returns what is due by rank 0's clock. It is called in another thread, or after every
            step if this rank is alone.

    Raises:
        RunStopped: another rank had a request, too, and ended before it came here.

    Yields:
        A function to be called on every rank equally often, first with `start_step`, then with the
        number of the last step taken. It returns what all ranks do now.
    """
    request.training_begins()
    signal = _earlier_signal(request)
    world_size = torch.distributed.get_world_size()
    if signal or world_size == 1:

        def decide_alone(step: int) -> Decision:
            decision = Decision.of_signal(signal or request.signal)
            if decision == GO_ON and step > start_step:
                return due()
            return decision

        yield decide_alone
        return
    store = own_store("stop")
    if store is None:
        warn(
            f"process groups of {torch.distributed.get_backend()} have no store: requests to stop "
            "cannot be agreed on, and are not followed, nor is the clock (every_minutes, "
            "max_minutes) [stop-not-agreed]"
        )
        yield lambda step: GO_ON
        return
    rank = torch.distributed.get_rank()
    agreement = StopAgreement(
        request,
        store=store,
        rank=rank,
        world_size=world_size,
        step=start_step,
        due=due if rank == 0 else _nothing_due,
    )
    agreement.start()
    # the calls are counted, not the steps: an evaluation makes several after one step
    calls = itertools.count(start_step)
    try:
        yield lambda step: agreement.decision_after(next(calls))
        agreement.leave()
    finally:
        agreement.close()


def _nothing_due() -> Decision:
    return GO_ON


def _earlier_signal(request: StopRequest) -> str:
    """Return the signal that any rank has received so far. Collective. A rank that received it a
    moment sooner has ended instead of coming here.
    """
    try:
        signals = gather(request.signal)
    except RuntimeError as error:
        from framework.engine.process_group_errors import is_lost_peer

        if not (request.signal and is_lost_peer(error)):
            raise
        raise RunStopped(
            f"{request.signal}: stopped before the first step: nothing new to save [stopped]"
        ) from error
    return next((signal for signal in signals if signal), "")


class StopAgreement:
    """The part of one rank in the agreement."""

    def __init__(
        self,
        request: StopRequest,
        *,
        store: Store,
        rank: int,
        world_size: int,
        step: int,
        due: Callable[[], Decision] = lambda: GO_ON,
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
        self._due_by_clock = due
        self._round = 0
        self._step = step
        self._posted = -1  # step that this rank does not pass in this round, or -1
        self._place: int | None = None  # in the order in which the ranks' steps reach the store
        self._is_posted = False  # all that is due of a post has reached the store
        self._last_decided = -1
        self._agreed: deque[tuple[int, Decision]] = deque()  # after which call what happens
        self._is_stopping = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stop-agreement", daemon=True)
        self._giving_up: threading.Timer | None = None

    def start(self) -> None:
        """Begin to look. A request that no other rank answers ends this process."""
        self._request.when_asked(self._count_down)
        self._thread.start()

    def decision_after(self, step: int) -> Decision:
        """Return what all ranks do after this step. At the step that this rank has posted, waits
        until all ranks have posted theirs.

        Raises:
            PeerLostError: a rank does not post its step in time.
        """
        with self._changed:
            self._step = step
            if self._is_held() and not self._changed.wait_for(
                lambda: not self._is_held(), timeout=self._wait_seconds
            ):
                raise _peer_lost(self._rank)
            if not self._agreed or step < self._agreed[0][0]:
                return GO_ON
            decision = self._agreed[0][1]
            if decision.action is not Action.STOP:
                self._agreed.popleft()
            return decision

    def _is_held(self) -> bool:
        """Check whether this rank has reached the step that it posted, before all ranks have."""
        return 0 <= self._posted <= self._step

    def leave(self) -> None:
        """End this rank's part, as it has trained to its end or stopped: wait for the thread, and
        post a step, so that a later request does not wait for this rank.
        """
        self._closing.set()
        self._thread.join(self._wait_seconds)
        if not self._is_posted and not self._is_stopping and not self._thread.is_alive():
            with suppress(RuntimeError):
                self._post()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._request.when_asked(None)
        if self._giving_up is not None:
            self._giving_up.cancel()

    def _watch(self) -> None:
        """Look for requests, in the thread, until one stops the run or this rank leaves."""
        while not self._closing.wait(self._look_seconds):
            # the store is where rank 0 is: without it, no rank trains on for long
            with suppress(RuntimeError):
                self._agree()
                if self._is_stopping:
                    return

    def _agree(self) -> None:
        """Take part in the agreement on a request, if there is one.

        Raises:
            RuntimeError: the ranks have not all posted yet, or the store does not answer; the next
                look calls this again.
        """
        if self._posted < 0 and not self._is_asked():
            return
        if not self._is_posted:
            self._post()
        # `wait` instead of `check`: the store answers all waiting ranks as soon as the key is set.
        self._store.wait([self._key("decided")], timedelta(seconds=max(1.0, self._look_seconds)))
        values = self._store.multi_get([self._key("asked"), self._key("decided")])
        decision = Decision.parse(values[0].decode())
        step = int(values[1])
        with self._changed:
            self._agreed.append((step, decision))
            self._is_stopping = decision.action is Action.STOP
            self._posted = -1
            self._place = None
            self._is_posted = False
            self._last_decided = step
            self._round += 1
            self._changed.notify_all()

    def _is_asked(self) -> bool:
        """Check whether a rank has a request, and share this rank's if it has one."""
        request = Decision.of_signal(self._request.signal)
        if request == GO_ON:
            request = self._due_by_clock()
        if request == GO_ON:
            return bool(self._store.check([self._key("asked")]))
        self._store.set(self._key("asked"), str(request))
        return True

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"

    def _post(self) -> None:
        """Post the step that ends next, after which this rank waits. The last rank to post
        decides.

        The rank is held at its step before the store knows the step: else it could go past it
        meanwhile. If the store fails, the next call posts the same step, from where this one came
        to.

        Raises:
            RuntimeError: the store does not answer.
        """
        with self._changed:
            if self._posted < 0:
                self._posted = max(self._step, self._last_decided) + 1
        if self._place is None:
            self._store.set(self._key(f"next/{self._rank}"), str(self._posted))
            self._place = self._store.add(self._key("posted"), 1)
        if self._place == self._world_size:
            keys = [self._key(f"next/{rank}") for rank in range(self._world_size)]
            steps = [int(step) for step in self._store.multi_get(keys)]
            self._store.set(self._key("decided"), str(max(steps)))
        self._is_posted = True

    def _count_down(self) -> None:
        """Give up after a while. The request may come from a launcher that has seen a rank die:
        then this rank waits for the dead one in a collective.
        """
        self._giving_up = threading.Timer(self._wait_seconds, self._give_up)
        self._giving_up.daemon = True
        self._giving_up.start()

    def _give_up(self) -> None:
        if not self._is_stopping and not self._closing.is_set():
            announce(str(_peer_lost(self._rank)))
            os._exit(EXIT_PEER_LOST)


def _peer_lost(rank: int) -> PeerLostError:
    return PeerLostError(
        f"rank {rank}: the ranks are to agree on a step, and another one has ended or does not "
        "answer; the last line of that rank names the cause. The last complete checkpoint stands: "
        "checkpoint.resume=auto [peer-lost]",
        is_of_one_rank=True,
    )
