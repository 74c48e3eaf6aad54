"""Time of the forward and backward pass of one micro-batch, by component."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, sqrt
from typing import TYPE_CHECKING

from framework.plan.collectives import Collectives, needed
from framework.plan.devices import Machine
from framework.plan.fitted_rates import Rates
from framework.plan.parallelism import Parallelism
from framework.plan.work import LayerWork, ModelWork

if TYPE_CHECKING:
    from framework.plan.rank_work import Collective

Seconds = dict[str, float]


class PassTimes:
    """Seconds of the passes of one micro-batch, on the slowest pipeline stage.

    Attributes:
        work: of the model; of one rank where it is known of one, of tensor and sequence groups.
        tensor, sequence: ranks that share the work.
        ranks: that share the samples of a step.
        samples: the work's figures, which are of another micro-batch, times this are the plan's.
        peak: operations per second of a device in the type of its numbers, as it is listed.
        fastest: those that its fastest matrix product reaches.
        bandwidth: bytes per second of its memory that operations reach.
    """

    def __init__(
        self, work: ModelWork, parallelism: Parallelism, machine: Machine, rates: Rates
    ) -> None:
        by = parallelism
        device = machine.device
        share = work.of_rank(by.tensor, by.sequence)
        if share is not None and share.work is not None:
            self.work = share.work
            self.tensor = 1
            self.sequence = 1
        else:
            self.work = work
            self.tensor = by.tensor
            self.sequence = by.sequence
        self.by = by
        self.machine = machine
        self.rates = rates
        self.collectives = Collectives(machine, rates.network)
        self.ranks = by.data * by.sequence
        self.samples = by.micro_size / work.num_samples
        peak = device.flops_per_second.get(by.dtype)
        self.peak = needed(peak, f"peak in {by.dtype}", device)
        memory_bandwidth = needed(device.memory_bytes_per_second, "memory bandwidth", device)
        self.bandwidth = rates.memory * memory_bandwidth
        self.fastest = self.peak * self._best_share()
        self.fastest_rounded = 0.0
        if by.rounding_bytes:
            in_fp8 = needed(device.flops_per_second.get("fp8"), "peak in fp8", device)
            self.fastest_rounded = in_fp8 * (self.fastest / self.peak)

    def _best_share(self) -> float:
        """Return the share of the listed peak that the fastest matrix product reaches; a peak that
        was measured is that product's.
        """
        dtype = self.by.dtype
        device = self.machine.device
        if self.machine.origin(f"flops_per_second.{dtype}") == "measured":
            return 1.0
        if dtype == "fp32":
            return self.rates.best_plain
        if dtype == "tf32":
            return self.rates.best_tf32
        bf16 = device.flops_per_second.get("bf16")
        if device.matmul_flops_per_second and bf16:
            return device.matmul_flops_per_second / bf16
        return self.rates.best

    def slowest_stage(self) -> tuple[Seconds, Seconds]:
        """Return the forward and backward seconds of a micro-batch, by component, on the slowest
        pipeline stage or the only one.
        """
        parts = self.work.parts
        *layers, loss = parts
        passes = [self.part(layer, is_loss=False) for layer in layers]
        passes.append(self.part(loss, is_loss=True))
        times = [sum(forward.values()) + sum(backward.values()) for forward, backward in passes]

        repeated = [number for number, part in enumerate(parts) if part.count > 1]
        counts = self.slowest_counts(times, repeated)
        forward_total: Seconds = {}
        backward_total: Seconds = {}
        for count, (forward, backward) in zip(counts, passes, strict=True):
            _add(forward_total, forward, count)
            _add(backward_total, backward, count)
        if self.by.pipe > 1:
            output_bytes = parts[max(repeated, default=0)].output_bytes
            size = self.samples * output_bytes / self.sequence
            sends = self.by.interleaving * self.collectives.send(
                size, self.ranks, self.by.tensor, in_parts=self.by.sends_parts
            )
            forward_total["pipeline sends"] = sends
            backward_total["pipeline sends"] = sends
        for each in self.work.collectives:
            name, seconds = self.collective(each)
            if each.is_backward:
                _add(forward_total, {name: seconds}, 0.0)
                _add(backward_total, {name: seconds}, 1.0)
            else:
                _add(forward_total, {name: seconds}, 1.0)
                _add(backward_total, {name: seconds}, self.by.recomputed)
        return forward_total, backward_total

    def collective(self, each: Collective) -> tuple[str, float]:
        """Return the component, and the seconds on a pipeline stage, of collectives that a pass
        over the model has shown.
        """
        by = self.by
        num_bytes = self.samples * each.num_bytes
        component = "tensor parallel"
        if each.kind == "sum":
            seconds = self.collectives.all_reduce(num_bytes, by.tensor, 1)
        elif each.kind == "join":
            seconds = self.collectives.scatter(num_bytes, by.tensor, 1)
        else:
            component = "sequence parallel"
            seconds = self.collectives.scatter(num_bytes, by.sequence, by.tensor)
        return component, each.count * seconds / by.pipe

    def slowest_counts(self, times: Sequence[float], repeated: Sequence[int]) -> Sequence[float]:
        """Return how often each part is on the slowest pipeline stage, or on the only one.

        Args:
            times: of each part, forward and backward.
            repeated: numbers of the parts that the model has more than once.
        """

        def total_time(counts: Sequence[float]) -> float:
            return sum(count * time for count, time in zip(counts, times, strict=True))

        parts = self.work.parts
        if self.by.pipe == 1:
            return [float(part.count) for part in parts]
        if repeated:
            return max(self.stages(max(repeated)), key=total_time)
        return [part.count / self.by.pipe for part in parts]

    def stages(self, repeated: int) -> Iterator[list[float]]:
        """Yield how often each part is on the last stage, and on a stage in the middle, if weights
        are shared evenly.

        `repeated`: number of the part that is repeated, such as a block; the head comes after it.
        """
        parts = self.work.parts
        pipe = self.by.pipe
        weights = [self.weights(part) for part in parts]
        block = weights[repeated]
        head = sum(weights[repeated + 1 :])
        total = sum(weight * part.count for weight, part in zip(weights, parts, strict=True))
        num_blocks = parts[repeated].count
        on_last = min(max(round((total / pipe - head) / block), 0), num_blocks)
        in_middle = ceil((num_blocks - on_last) / (pipe - 1))

        last_stage = [0.0 for _ in parts]
        last_stage[repeated] = on_last
        for number in range(repeated + 1, len(parts)):
            last_stage[number] = 1.0
        yield last_stage
        middle_stage = [0.0 for _ in parts]
        middle_stage[repeated] = in_middle
        yield middle_stage

    def weights(self, part: LayerWork) -> float:
        """Return the elements of weights in a part's matrix products: shared ones and frozen ones
        included.
        """
        weights = part.num_params + part.shared_params
        if self.work.frozen:
            weights += self.work.num_frozen(part)
        return weights

    def products(self, part: LayerWork) -> tuple[float, float]:
        """Return the forward and backward seconds of a part's products with weights: two products
        backward for a trained weight, one for a frozen one.
        """
        by = self.by
        rates = self.rates
        if not part.weight_flops:
            return 0.0, 0.0
        plateau = rates.plateau
        if self.is_hopper:
            plateau = rates.plateau_hopper
        fastest = self.fastest
        if self.is_rounded(part):
            fastest = self.fastest_rounded
        saturation = sqrt(fastest / 1e15 * self.tensor / max(self.weights(part), 1))
        reached = plateau / (1 + rates.width * saturation)
        seconds = self.samples / reached / fastest / self.tensor / self.sequence
        again = part.again_flops + by.products_again * part.weight_flops
        return seconds * part.weight_flops, seconds * (part.backward_weight_flops + again)

    def scores(self, part: LayerWork) -> tuple[float, float]:
        """Return the forward and backward seconds of a part's products without a weight.

        Around a ring of r teams the last one sees all chunks where attention is causal, and the
        others wait for it: r chunks, of (r + 1) / 2 that a team computes in the mean.
        """
        by = self.by
        attention = self.rates.attention
        if self.is_hopper:
            attention = self.rates.attention_hopper
        seconds = self.samples / attention / self.fastest / self.tensor / self.sequence
        if part.masked_flops > 0:
            seconds *= 2 * by.ring / (by.ring + 1)
        backward = part.backward_score_flops + by.products_again * part.score_flops
        return seconds * part.score_flops, seconds * backward

    @property
    def is_hopper(self) -> bool:
        """Check whether the device's generation has rates that were measured apart."""
        capability = self.machine.device.capability
        return capability is not None and capability >= (9, 0)

    def is_rounded(self, part: LayerWork) -> bool:
        """Check whether the linear layers of a part compute in fp8: blocks have them."""
        return self.by.rounding_bytes > 0 and part.count > 1

    def roundings(self, part: LayerWork) -> tuple[float, float]:
        """Return the forward and backward seconds of rounding operands to fp8: inputs and weights,
        and for the two products backward gradients of outputs as well.

        Inputs of linear layers are taken to have as many numbers as their outputs.
        """
        if not self.is_rounded(part):
            return 0.0, 0.0
        outputs = self.samples * part.product_bytes / self.by.weight_bytes
        weights = self.weights(part)
        seconds = self.by.rounding_bytes / self.bandwidth
        return seconds * (outputs + weights), seconds * (2 * outputs + weights)

    def moved(self, part: LayerWork, *, is_loss: bool) -> float:
        """Return the seconds of a part's other operations, forward.

        Tensor parallelism is taken to split as large a share of them as of the saved values.
        """
        if is_loss:
            split = 1.0
        else:
            split = part.split_bytes / max(part.saved_bytes, 1)
        num_bytes = self.samples * part.moved_bytes * (1 - split + split / self.tensor)
        return num_bytes / self.sequence / self.bandwidth

    def part(self, part: LayerWork, *, is_loss: bool) -> tuple[Seconds, Seconds]:
        """Return the forward and backward seconds of one part and one micro-batch, by component."""
        of_weights, of_gradients = self.products(part)
        of_scores, of_score_gradients = self.scores(part)
        product = of_weights + of_scores
        products_back = of_gradients + of_score_gradients
        again = self.by.recomputed
        products_again = self.by.products_again * product
        if is_loss:
            again = 0.0
            products_back -= products_again
            products_again = 0.0
        moved = self.moved(part, is_loss=is_loss)
        least = self.rates.launch_seconds * part.num_operations
        launch = max(least - product - moved, 0.0)
        round_forward, round_backward = self.roundings(part)
        forward = {"compute": product, "memory-bound operations": moved, "launch": launch}
        forward["rounding to fp8"] = round_forward
        # Of operations that are no products as much is moved as forward.
        backward = {
            "compute": products_back,
            "memory-bound operations": (1 + again) * moved + self.moved_for_tiles(part),
            "launch": max(2 * least - (products_back - products_again) - moved, 0.0)
            + again * launch,
            "rounding to fp8": round_backward + again * round_forward,
        }
        if not is_loss and part.count > 1:
            for name, (num_forward, num_backward), seconds in self.exchanges(part):
                forward[name] = num_forward * seconds
                backward[name] = (num_backward + again * num_forward) * seconds
        return forward, backward

    def moved_for_tiles(self, part: LayerWork) -> float:
        """Return the seconds of what the backward pass moves to run tiles again."""
        num_bytes = self.samples * part.again_bytes
        return num_bytes / self.tensor / self.sequence / self.bandwidth

    def exchanges(self, part: LayerWork) -> Iterator[tuple[str, tuple[int, int], float]]:
        """Yield the collectives of a block: component, how often in the forward and in the backward
        pass, and seconds of one.

        Ulysses exchanges queries, keys, values and outputs, experts what comes to them and from
        them.
        """
        by = self.by
        output = self.samples * part.output_bytes / by.sequence
        seconds = 0.0
        if by.tensor > 1:
            seconds = self.collectives.all_reduce(output, by.tensor, 1)
        yield "tensor parallel", by.block_sums, seconds
        seconds = 0.0
        team = by.sequence // by.ring
        if team > 1:
            seconds = self.collectives.scatter(output, team, by.tensor)
        yield "sequence parallel", (4, 4), seconds
        yield from self.ring(part, output, team)
        seconds = 0.0
        if by.expert > 1:
            # Ranks with other positions are neighbours too.
            seconds = self.collectives.scatter(output, by.expert, by.tensor)
        yield "expert parallel", (2, 2), seconds

    def ring(
        self, part: LayerWork, output: float, team: int
    ) -> Iterator[tuple[str, tuple[int, int], float]]:
        """Yield the transfers of a ring of teams as `exchanges` does: keys and values, and
        backward the gradients of both as well, in fp32.

        Transfers run beside the scores of a chunk, and take what those leave over.
        """
        by = self.by
        if by.ring == 1:
            return
        keys = 2 * output * by.key_share
        of_chunk = self.scores(part)[0] / by.ring
        sent = self.collectives.send(keys, team * by.tensor, 1)
        yield "ring of keys", (by.ring - 1, by.ring - 1), max(sent - of_chunk, 0.0)
        in_fp32 = 4 / by.weight_bytes * keys
        sent = self.collectives.send(in_fp32, team * by.tensor, 1)
        yield "ring of gradients", (0, by.ring), max(sent - 2 * of_chunk, 0.0)


def _add(total: Seconds, seconds: Seconds, count: float) -> None:
    """Add seconds that are there `count` times to a total, by component."""
    for name, value in seconds.items():
        total[name] = total.get(name, 0.0) + count * value
