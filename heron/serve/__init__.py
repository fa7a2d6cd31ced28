"""The web page over an index.

In come an index, a model and the queries of a browser; out come neighbours, pictures and answers as
JSON. `guard` and `admission` refuse what is too large, too slow or too much.
"""
