"""Plain `nn.Module`s, each built of a flat sequence of layers where its structure allows it.

Pipeline parallelism cuts the same model between any two of these layers: its `children()` in order,
or the list that its method `layers()` returns (`models.layers`). Weights are drawn inside the
constructor of the layer that owns them, never by a loop in the parent: ZeRO-3 partitions a layer's
parameters as soon as its constructor returns, and a later `init` would find them empty.
"""
