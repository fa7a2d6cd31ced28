"""Encoders, heads and the network over several views.

In come the options of the section `model`, the shapes of the views and the parts that terms ask
for; out comes an `nn.Module` that makes features of a batch's views. Dropout depends on the row.
"""
