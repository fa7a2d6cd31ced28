"""Many runs of one experiment: studies on Ray, searches, comparisons, published tables.

In come a file that says what varies, and the results of runs in their folders; out come the runs
that were missing, a ledger of trials, tables with spread and n, and a report.
"""
