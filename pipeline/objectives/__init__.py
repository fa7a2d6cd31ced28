"""Terms of the objective, one file a family, over one block-wise engine.

They know tensors, never processes: every function takes the vectors of the whole batch and the
slice of rows whose anchors it is to sum, so that the shares of P processes add up to the loss of
one.
"""
