"""What comes in from other tools and goes out to them: spaces, known results, ladders, and a sweep as an Optuna study.

Nothing that comes in is trusted: no file is unpickled or run, and results of others inform a searcher, never a fit of the law.
"""
