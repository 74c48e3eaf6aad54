from __future__ import annotations

import torch

from framework.data.batches import WholeBatch, collate, own_collate


def test_a_whole_batch_passes_through_untouched() -> None:
    images, labels = torch.zeros(2, 1), torch.ones(2)
    collated = collate(WholeBatch((images, labels)))
    assert collated[0] is images
    assert collated[1] is labels


def test_samples_are_stacked_as_torch_does() -> None:
    images, labels = collate([(torch.zeros(3), 1), (torch.ones(3), 2)])
    assert images.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert labels.tolist() == [1, 2]


def test_the_dataset_s_own_collate_fn_wins() -> None:
    class Texts:
        def collate_fn(self, samples: list[str]) -> str:
            return "|".join(samples)

    own = own_collate(Texts())
    assert own is not None
    assert own(["a", "b"]) == "a|b"
    assert own_collate([1, 2]) is None
