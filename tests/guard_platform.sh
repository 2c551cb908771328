#!/bin/sh
# platform/ shadows the standard library's module the moment Python can take it for a package or finds a module in it,
# and then neither pytest nor a Ray worker starts. So this is checked by a shell, before any Python runs.
found=$(find platform -maxdepth 1 -name '*.py')
if [ -n "$found" ]; then
    echo "platform/ must hold only the package muscale, found: $found" >&2
    exit 1
fi
