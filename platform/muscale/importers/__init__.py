"""Imports from other tools: spaces, known results, ladders.

Nothing that comes in is trusted: no file is unpickled or run, and results of others inform a searcher, never a fit of the law.
"""
