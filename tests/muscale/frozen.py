"""Imported last by the server of the tests' processes: what is imported by then is never looked through by a collection.

Each training collects first, and a process with torch and Lightning has half a million objects; in a forked one, looking at them
copies their pages too.
"""

import gc

gc.collect()
gc.freeze()
