"""Imports from other tools: spaces, known results, ladders.

Imports are not trusted: no file is unpickled or run. Results from other tools inform a searcher, never a fit of the law.
"""
