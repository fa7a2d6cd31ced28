"""Terms of the objective, one file a family, over one block-wise engine.

They know tensors, never processes: each function takes the vectors of the whole batch and the rows
whose anchors it sums, so that the shares of all processes add up to the loss of one.
"""
