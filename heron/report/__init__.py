"""The report of a run: one HTML file that opens from disk and fetches nothing.

In come a run's metrics, result and predictions; out comes report.html. `pages` and `charts` are the
frame and the charts that reports of studies and of negatives use as well.
"""
