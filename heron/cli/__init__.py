"""Entry points: the command line, launch configurations, studies."""
