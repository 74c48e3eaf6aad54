"""Plain `nn.Module`s, each built of a flat sequence of layers where its structure allows it.

A model's `children()` in order are its layers, so that pipeline parallelism can later cut the same model between any
two of them. Weights are drawn inside the constructor of the layer that owns them, never by a loop in the parent: ZeRO-3
partitions a layer's parameters as soon as its constructor returns, and a later `init` would find them empty.
"""
