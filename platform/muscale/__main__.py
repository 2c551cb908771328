"""`python -m muscale`, for places without the console script, such as a Ray job."""

from muscale.cli import main

main()
